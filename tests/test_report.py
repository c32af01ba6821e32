"""The report shows what the files of a project say; what is missing is a sentence."""

import base64
import dataclasses
import html.parser
import io
import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from stages.base import history, outputs, publish
from stages.base.errors import StageError
from stages.base.origin import DATA_METRICS
from stages.export.scores import Scores
from stages.reporting import page as report
from stages.reporting import pictures
from tests import reports
from tests.project import run_python


@pytest.fixture(autouse=True)
def project(empty_project: Path) -> None:
    reports.make_records()


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("complete"))
        reports.make_records()
        write(with_pictures=True)
        return outputs.REPORT.absolute()


def write(with_pictures: bool = False) -> str:
    """Write the report, by default without the pictures, which take most of the time; returns its page."""
    with publish.directory(outputs.REPORT) as directory, pytest.MonkeyPatch.context() as patch:
        if not with_pictures:
            patch.setattr(pictures, "draw", lambda picture, rows: None)
        report.write(directory, "exp", "/data/<raw>")
    return (outputs.REPORT / report.PAGE).read_text()


def sections() -> dict[str, str]:
    """What the report shows in each section."""
    return PageReader(write()).sections


def change(path: Path, **values: object) -> None:
    """Change what a stage has recorded."""
    reports.write_json(path, publish.read_json(path) | values)


class PageReader(html.parser.HTMLParser):
    """Collects the links, ids and tags of a page, and the text that it shows, by section."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.sections: dict[str, str] = {"": ""}
        self._is_heading = False
        self.feed(content)
        self.text = " ".join(self.sections.values())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        self.ids.update(value or "" for name, value in attrs if name == "id")
        self._is_heading = tag == "h2"

    def handle_data(self, data: str) -> None:
        if self._is_heading:
            self._current, self._is_heading = data, False
            self.sections[data] = ""
        else:
            last = next(reversed(self.sections))
            self.sections[last] += data


def test_the_page_needs_no_other_file_no_network_and_no_script(complete: Path) -> None:
    content = (complete / report.PAGE).read_text()
    reader = PageReader(content)
    assert reader.links, "the pictures are in the page"
    assert all(link.startswith("data:image/svg+xml;base64,") for link in reader.links)
    assert not reader.tags.keys() & {"script", "link", "iframe", "object", "embed", "form"}
    assert not re.search(r"url\((?!#)|@import|@font-face| on\w+=", content)
    assert {name: number for name, number in reader.ids.items() if number > 1} == {}
    assert content.startswith('<!doctype html>\n<html lang="en">')
    assert content.count('<div class="scroll" role="region" aria-label="') == reader.tags["table"]
    assert """content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">""" in content


def test_each_section_shows_what_the_files_say(complete: Path) -> None:
    reader = PageReader((complete / report.PAGE).read_text())
    shown = reader.sections
    for section, texts in {
        "": ["2.5000", "12.18", "1.2500", "2,345,678", "4,096", "1 h 07 min", "random weights", "<tiny & small>"],
        "Loss": ["all held-out rows", "before training", "8.5000", "as bfloat16", "310"],
        "Tasks": ["sums", "exact_match ↑", "1,200", "0.1250", "0.7500 ± 0.0200", "+0.6250 ± 0.0312",
                  "with the chat template", "3 of 1,1600.7412"],
        "Cost": ["5,120", "0.410", "1.500", "saved a checkpoint3", "14.3%", "end2026-03-01 10:31 UTC", "16 on 2 nodes",
                 "NVIDIA H100", "commit of the project0123456789\n"],
        "Data": ["text.gz", "3.00", "hidden", "1,234", "567,890", "extract.json names them", "invalid YAML", "3.25",
                 "0.10%", "tokenizers 1.0", "Raw files in /data/<raw>", "Documents that were skipped for another one",
                 "An <old> version", "0.84",
                 "mean length in characters17", "fewer than 20 characters691"],
        "Rows as the model saw them": ["is read but not predicted", "row 7\n  ⟦The⟧ <text>", "row 8"],
        "Model": ["LlamaForCausalLM", "n_head", "bfloat16", "torch 2.13.0"],
        "Samples": ["The model, until it was cut offOnce <b> upon\n a", "The documentOnce <b> there"],
        "Parameters": ["num_splits", "fsdp.preset", "single_node_fsdp", "seq_length"],
    }.items():  # fmt: skip
        for text in texts:
            assert text in shown[section], (section, text)
    assert not reader.tags.keys() & {"b", "text", "raw"}, "what is untrusted is escaped"
    assert "fsdp.size" not in shown["Parameters"], "null: the preset's value"


def test_the_stage_writes_the_page_without_torch(complete: Path) -> None:
    Path("params.yaml").write_text("experiment_name: exp\nraw_dir: /data/<raw>\nruntime: {}\n")
    code = "import sys; from stages import report; report.main(); sys.exit('torch' in sys.modules)"
    process = run_python(code)
    assert process.returncode == 0
    assert re.fullmatch(r" +[\d,]+  bytes +outputs/report/report\.html: open it in a browser\n", process.stdout)
    assert (outputs.REPORT / report.PAGE).read_bytes() == (complete / report.PAGE).read_bytes()


def test_the_weights_of_another_step_than_the_last_one_are_named() -> None:
    assert "weights of step" not in write()
    change(outputs.TRAIN_METRICS, steps=1234)
    [step] = re.findall(r"weights of step (\d+) of 1,234 steps, from", write())
    assert int(step) < 1234


def test_what_is_not_known_or_the_same_is_not_shown() -> None:
    shown = sections()
    assert shown["Loss"].count("2.5000") == 1, "the training measured all rows, and the weights were not rounded"
    assert "after training, exported as bfloat16" in shown["Loss"]
    trained = publish.read_json(outputs.TRAIN_METRICS)
    for place in (None, trained["place"] | {"commit": None, "nodes": 1}):
        change(outputs.TRAIN_METRICS, cost=trained["cost"] | {"mfu": None}, place=place)
        cost_shown = sections()["Cost"]
        assert "MFU" not in cost_shown and "commit" not in cost_shown and "nodes" not in cost_shown
        assert ("ranks16\n" in cost_shown) == (place is not None)


def test_each_picture_is_in_the_page_and_a_file(complete: Path) -> None:
    content = (complete / report.PAGE).read_text()
    names = {*pictures.COURSE, *pictures.SPEED, "tasks"}
    assert {path.name for path in complete.iterdir()} == {f"{name}.svg" for name in names} | {"report.html"}
    files = {name: (complete / f"{name}.svg").read_bytes() for name in names}
    assert all(f"base64,{base64.b64encode(file).decode()}" in content for file in files.values())
    assert all(b"<metadata>" not in file for file in files.values())
    # matplotlib draws a text as paths after a comment.
    for text in ("loss (nats per token)", "validation", "tokens per second", "milliseconds per step", "forward"):
        assert any(f"<!-- {text} -->".encode() in file for file in files.values())
    assert b"<!-- gradient norm, before clipping (log scale) -->" in files["gradient_norm"]
    assert b"log scale" not in files["loss"]


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        (outputs.SPEED, None, "is missing: run `dvc repro train`"),
        (outputs.TRAIN_METRICS, None, "is missing: run `dvc repro train`"),
        (outputs.EVALUATION, None, "is missing: run `dvc repro evaluate`"),
        (outputs.TASKS, None, "is missing: run `dvc repro score`"),
        (outputs.ROWS, None, "is missing: run `dvc repro plan`"),
        (reports.MODEL / "config.json", None, "is missing: run `dvc repro consolidate`"),
        (outputs.HISTORY, "step\tloss\n1\tx\n", "is not valid: run `dvc repro -f -s train`"),
        (outputs.HISTORY, "stop\tloss\n1\t2\n", "is not valid: run `dvc repro -f -s train`"),
        (outputs.SPEED, "\0" * 200, "is not valid: run `dvc repro -f -s train`"),  # after a power cut
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(path: Path, content: str | None, problem: str) -> None:
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(StageError, match=f"{path} {problem}"):
        write()


@pytest.mark.parametrize("other", [{"run_id": "other"}, {"step": 100}])
def test_losses_of_another_model_are_refused(other: dict[str, object]) -> None:
    """Those before the newest export are there until `evaluate` runs."""
    change(outputs.EVALUATION, **other)
    with pytest.raises(StageError, match=r"evaluation\.json is not of the model in outputs/exp/model: run `dvc re"):
        write()


def leave_conversations_out() -> None:
    rule = {"files": "posts/*.jsonl", "left_out": {"no string at $.text": 60}}
    change(DATA_METRICS["extract"], rules=[rule])
    packed = publish.read_json(DATA_METRICS["pack"])
    talks = {"conversations": 280, "tokens": 5000, "trained_tokens": 3141, "refused": {"longer than a row": 3, "x": 1}}
    change(DATA_METRICS["pack"], **{name: packed[name] | {"conversations": talks} for name in ("train", "validation")})


def hold_nothing_out() -> None:
    change(outputs.EVALUATION, **dict.fromkeys(("validation", "untrained", "trained", "exported")), samples=[])
    text = outputs.HISTORY.read_text()
    outputs.HISTORY.write_text(re.sub(r"\t[\d.]*$", "\t", text, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("make_change", "section", "texts"),
    [
        (DATA_METRICS["pack"].unlink, "Data", ["There are no records of how these tokens were made"]),
        (leave_conversations_out, "Data", [
            "records left out of posts/*.jsonl: no string at $.text60", "conversations280280", "of these trained3,141",
            "conversations refused (data/pack.json says why)44", "characters of documents900"]),
        (hold_nothing_out, "Loss", ["set validation_fraction, such as 0.05, or lower seq_length"]),
        (hold_nothing_out, "Samples", ["There are none: no rows are held out."]),
        (lambda: change(outputs.EVALUATION, samples=[]), "Samples", ["There are none: eval_samples is 0."]),
    ],
    ids=["no records", "left out", "no loss", "no samples", "no samples wanted"],
)  # fmt: skip
def test_what_is_left_out_or_missing_is_said(make_change: Callable[[], object], section: str, texts: list[str]) -> None:
    make_change()
    shown = sections()[section]
    for text in texts:
        assert text in shown, text


def test_records_of_other_data_are_not_shown() -> None:
    change(DATA_METRICS["pack"], source="another corpus")
    shown = sections()["Data"]
    assert "tokenizers 1.0" in shown
    assert "567,890" not in shown


def test_each_loss_is_in_the_table_of_its_rows() -> None:
    exported = publish.read_json(outputs.EVALUATION)["exported"]
    change(outputs.EVALUATION, exported=exported | {"loss": 2.75})
    every, subset = write().partition("On the rows that the training measured")[::2]
    assert "all held-out rows" in every and "before training" not in every
    assert re.search(r"before training.*8\.5000.*after training.*exported as bfloat16.*2\.7500", subset, re.DOTALL)


def test_a_source_may_have_no_held_out_rows() -> None:
    change(DATA_METRICS["pack"], sources={"train small": {"rows": 10}, "validation small": {"rows": 0}})
    change(outputs.TRAIN_METRICS, sources={"small": 1.5})
    change(outputs.EVALUATION, sources={})
    assert "".join(["small", "10", "1.50", "15", "0", "not known"]) in sections()["Sources"]


def test_values_that_are_not_finite_leave_a_picture_of_the_others() -> None:
    rows = history.read(outputs.HISTORY)
    rows[50] |= {"loss": math.nan, "grad_norm": math.inf}
    for column in ("loss", "grad_norm"):
        for curve in (pictures.Curve(column, "blue", "each"), pictures.Curve(column, "blue", "mean", is_mean=True)):
            steps, values = pictures.series(rows, curve)
            assert len(steps) == len(values) >= 196 and np.isfinite(values).all()
    everything = [{**row, "loss": math.nan, "validation_loss": None} for row in rows]
    assert pictures.draw(pictures.COURSE["loss"], everything) is None


def test_the_mean_forgets_a_peak_however_high() -> None:
    """Of a training that diverged for a moment; a difference of sums would be 0 from then on."""
    rows: list[history.Row] = [{"step": float(step), "grad_norm": 1e18 if step == 500 else 2.0} for step in range(1001)]
    steps, values = pictures.series(rows, pictures.COURSE["gradient_norm"].curves[1])
    assert (steps[0], steps[-1], len(steps)) == (19, 1000, 982)
    assert (values[[0, 480, -1]] == 2.0).all() and values[481] == values[500] == pytest.approx(1e18 / 20)


def test_a_single_point_can_be_seen() -> None:
    rows, speed = history.read(outputs.HISTORY)[1:2], history.read(outputs.SPEED)[:1]
    for picture, row in (*((one, rows) for one in pictures.COURSE.values()), (pictures.SPEED["memory"], speed)):
        svg, _ = pictures.draw(picture, row) or ("", "")
        assert re.search(f'<use [^>]*"fill: {pictures.COLORS["blue"]}', svg)


def test_the_values_of_a_picture_can_be_read_out(complete: Path) -> None:
    content = (complete / report.PAGE).read_text()
    text = r"Loss\. Last values of loss \(nats per token\): [^\"]*; validation 2\.453 \(lowest 2\.453\)"
    assert re.search(f'alt="{text}"', content)
    assert re.search(r'alt="Time of a step\. Last values of milliseconds per step: data 9\.127; forward', content)


def test_names_may_be_long_and_may_have_any_character(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []

    def keep(figure: Figure) -> str:
        figures.append(figure)
        figure.savefig(io.StringIO(), format="svg")
        return ""

    monkeypatch.setattr(pictures, "_svg", keep)
    name = r"price_$\of_$" + "_".join(["high_school"] * 20)
    pictures.draw_tasks([dataclasses.replace(Scores.read(outputs.TASKS).tasks[0], task=name)])
    rows: list[history.Row] = [{"step": x, history.of_source(name): x, history.of_source("b"): x} for x in (1.0, 2.0)]
    pictures.draw(pictures.of_sources([name, "b"]), rows)
    for figure in figures:
        (axes,), whole = figure.axes, figure.bbox
        assert axes.bbox.width > whole.width / 3 and axes.bbox.height > whole.height / 3


def test_a_legend_has_names_that_begin_with_an_underscore_and_names_in_any_letters() -> None:
    for name, is_text in (("_web", False), ("新闻", True)):
        rows: list[history.Row] = [{"step": 1.0, history.of_source(name): 1.0, history.of_source("b"): 2.0}]
        svg, _ = pictures.draw(pictures.of_sources([name, "b"]), rows) or ("", "")
        assert re.search(rf"<!-- \W?{name} -->" if not is_text else rf">{name}</text>", svg)


def test_however_long_the_training_was_the_page_is_small_and_has_each_peak() -> None:
    values = np.sin(np.arange(100_000.0))
    values[54_321], values[60_000] = 9.0, -9.0
    rows: list[history.Row] = [{"step": float(step), "lr": float(value)} for step, value in enumerate(values)]
    picture = pictures.Picture("", "", [pictures.Curve("lr", "blue", "this run")], "auto")
    svg, _ = pictures.draw(picture, rows) or ("", "")
    (curve,) = re.findall(r'<g id="line2d_\d+">\s*<path d="(M[^"]{5000,})"', svg)
    heights = [float(height) for height in re.findall(r"[ML] \S+ (\S+)", curve)]
    assert len(heights) < 10_000
    assert np.ptp(heights) == pytest.approx(9 * np.ptp(np.quantile(heights, [0.01, 0.99])), rel=0.1)
    reports.write_courses(loss=2.5, lr=0.003, steps=30_000)
    assert len(write(with_pictures=True)) < 2_000_000


def test_the_text_can_be_read_on_every_background() -> None:
    """The contrast that WCAG 2 asks for: 4.5 for text, 3 for lines."""

    def luminance(color: str) -> float:
        channels = (int(color[index : index + 2], 16) / 255 for index in (1, 3, 5))
        linear = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels)
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one: str, other: str) -> float:
        dark, light = sorted(luminance(pictures.COLORS[name]) for name in (one, other))
        return (light + 0.05) / (dark + 0.05)

    for back in ("back", "panel"):
        assert contrast("text", back) > 7
        assert contrast("grey", back) > 4.5, back
    for line in ("blue", "orange", "green", "purple"):
        assert contrast(line, "back") > 3, line


@pytest.mark.slow
@pytest.mark.skipif(reports.chromium() is None, reason="needs chromium, and root to take its network away")
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_the_report_without_an_error(tmp_path: Path, complete: Path, width: int) -> None:
    shot = tmp_path / "page.png"
    command = [
        *("unshare", "-rn", str(reports.chromium()), "--headless", "--no-sandbox", "--disable-gpu"),
        *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},3000", f"--screenshot={shot}"),
        *("--enable-logging=stderr", "--v=0", f"file://{complete / report.PAGE}"),
    ]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    # Those of the browser's own pages are not ours.
    sources = re.findall(r"CONSOLE.*?source: (\S*)", process.stderr, re.DOTALL)
    assert [source for source in sources if not source.startswith("chrome://")] == [], process.stderr
    import matplotlib.image

    assert matplotlib.image.imread(shot)[..., :3].mean() > 0.8


def test_the_pictures_show_the_history() -> None:
    rows = history.read(outputs.HISTORY)
    changed: list[history.Row] = [*rows, {**rows[-1], "step": 201.0, "loss": 3.0, "lr": 0.0005, "grad_norm": 0.0}]
    for picture in pictures.COURSE.values():
        assert pictures.draw(picture, rows) != pictures.draw(picture, changed)
        assert pictures.draw(picture, []) is None
    speed = history.read(outputs.SPEED)
    for picture in pictures.SPEED.values():
        assert pictures.draw(picture, speed) != pictures.draw(picture, speed[:100])
        assert pictures.draw(picture, []) is None
