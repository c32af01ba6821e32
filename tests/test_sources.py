"""Sources, and documents that are held out by their content: from raw files to a model."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from stages.base.errors import StageError
from stages.base.history import HISTORY, of_source, read
from stages.base.packed import METRICS, TRAIN, VALIDATION, PackMetrics
from stages.base.params_file import load_params
from stages.checkpointing.layout import step_name
from stages.extract import ExtractRuntime, extract
from stages.forward.rows import TokenRows
from stages.organize import OrganizeParams, OrganizeRuntime, organize
from stages.pack import PackParams, PackRuntime, pack
from tests.byte_model import EOS, byte_tokenizer, make_model
from tests.corpus import PARAMS, keep_all, put
from tests.project import LAUNCH, Project, make_pipeline
from tests.ranks import Ranks
from tests.trainings import result

TEXTS = {
    **{f"web/{number}.txt": f"web {number} " * 5 for number in range(12)},
    **{f"code/deep/{number}.md": f"code {number} " * 3 for number in range(6)},
    "notes.txt": "in no source",
}


def run(sources: list[str] | None, num_splits: int = 2, **params: Any) -> str:
    organize(
        OrganizeParams(num_splits=num_splits, raw_dir="data/raw", sources=sources),
        OrganizeRuntime(num_workers=1),
    )
    extract(PARAMS, ExtractRuntime(num_workers=1, reuse_gib=1))
    params = {"seq_length": 4, "validation_splits": 1, **params}
    keep_all()
    return pack(PackParams(**params), PackRuntime(num_workers=1, reuse_gib=1))


def texts(directory: Path) -> dict[str, list[str]]:
    """The documents in the rows of each source, in order; the last one may lack its end."""
    decode = byte_tokenizer().decode
    rows, found, start = TokenRows(directory), {}, 0
    for source, size in (rows.sources or {"": len(rows)}).items():
        tokens = rows.rows(np.arange(start, start + size)).flatten()
        start += size
        pieces = np.split(tokens, np.flatnonzero(tokens == EOS) + 1)
        found[source] = [decode(piece.tolist()) for piece in pieces if len(piece)]
    return found


@pytest.fixture(autouse=True)
def model(empty_project: Path) -> None:
    make_model()


def test_a_source_without_text_is_named_as_such() -> None:
    put({"web/1.txt": "web", "web/2.txt": "web", "code/1.txt": ""})
    with pytest.raises(StageError, match=r"^there is no text of source code: extract made no row of its files"):
        run(["web", "code"])


def test_each_source_has_rows_of_its_own() -> None:
    put(TEXTS)
    run(["web", "code/deep"])
    summary = json.loads(Path("data/splits/summary.json").read_text())
    assert summary["passed_over"] == [{"path": "notes.txt", "reason": "in none of sources"}]
    assert [split["files"] for split in summary["splits"]] == [6, 6, 3, 3]
    rows, metrics = TokenRows(TRAIN), PackMetrics.read(METRICS)
    assert [*rows.sources] == ["web", "code/deep"]
    assert len(rows) == sum(rows.sources.values()) == metrics.train.rows
    assert metrics.sources["train web"].documents == 6
    assert sum(part.tokens for name, part in metrics.sources.items() if "train" in name) == metrics.train.tokens
    for directory in (TRAIN, VALIDATION):
        for source, documents in texts(directory).items():
            assert documents
            assert all(document.startswith(source.partition("/")[0][: len(document)]) for document in documents)


def test_a_small_source_fills_its_splits_as_a_large_one_does() -> None:
    lines = [json.dumps({"number": number}) + "\n" for number in range(10_000)]
    put({"web/all.jsonl": "".join(lines) * 20, "chat/all.jsonl": "".join(lines)})
    params = OrganizeParams(num_splits=4, raw_dir="data/raw", sources=["web", "chat"])
    organize(params, OrganizeRuntime(num_workers=1), smallest_part=1 << 12)
    sizes = [split["bytes"] for split in json.loads(Path("data/splits/summary.json").read_text())["splits"]]
    for found in (sizes[:4], sizes[4:]):
        assert min(found) > 0.5 * max(found)


def test_names_of_sources_are_part_of_what_the_rows_are() -> None:
    put({f"{name}/{number}.txt": f"{number} " * 9 for name in "ab" for number in range(4)})
    found = []
    for sources in (["a", "b"], ["b", "a"], None):
        run(sources)
        found.append(PackMetrics.read(METRICS).fingerprint)
    assert len({*found}) == 3


def test_a_source_that_is_none_is_refused() -> None:
    put(TEXTS)
    Path("data/raw/empty").mkdir()
    Path("data/raw/link").symlink_to("/tmp")
    for sources, message in (
        (
            ["web", "cod"],
            "sources has 'cod': name each directory in data/raw once, .* there are code, empty, link, web",
        ),
        (["web", "web"], "sources has 'web': name each directory"),
        (["../raw/web"], "name each directory"),
        (["web/"], "name each directory"),
        (["web", "empty"], r"empty has no file that is read \(it is empty\)"),
        (["web", "link"], r"link has no file that is read \(1 x link that leaves the directory\)"),
    ):
        with pytest.raises(StageError, match=message):
            run(sources)


def test_documents_are_held_out_by_their_content() -> None:
    documents = [f"document {number}" for number in range(300)]
    sides = []
    # Added, removed, renamed, in other splits: none of it counts.
    for names, kept in (("abc", documents), ("xyabc", documents[50:]), ("q", documents[::2])):
        for path in Path("data/raw").glob("*"):
            path.unlink()
        for place, name in enumerate(names):
            put({f"{name}.jsonl": "".join(f"{json.dumps(text)}\n" for text in kept[place :: len(names)])})
        run(None, num_splits=3, seq_length=2, validation_fraction=0.2)
        sides.append({name: {*texts(part)[""][:-1]} for name, part in (("train", TRAIN), ("held", VALIDATION))})
    first, *others = sides
    assert 35 < len(first["held"]) < 85
    assert not first["held"] & first["train"]
    for other in others:
        assert other["held"] <= first["held"]
        assert other["train"] <= first["train"]


def test_equal_documents_are_on_one_side_and_counted() -> None:
    copies = {f"{number}.txt": f"text of {number % 20}" for number in range(100)}
    put(copies)
    printed = run(None, num_splits=4, validation_fraction=0.3)
    metrics = PackMetrics.read(METRICS)
    held_out = metrics.validation.documents
    assert held_out and held_out % 5 == 0
    # All of them are in the rows.
    assert f"100  documents        {held_out} held out, {held_out * 4 // 5} of them equal to an earlier one" in printed
    assert metrics.validation.duplicates == held_out * 4 // 5
    assert metrics.train.duplicates == 0
    assert metrics.train.documents == 100 - held_out
    # From the store, too.
    assert "4 of 4  splits reused" in run(None, num_splits=4, validation_fraction=0.3)
    assert PackMetrics.read(METRICS) == metrics


@pytest.mark.parametrize("name", ["alpaca.json", "seven-parts.jsonl"])
def test_a_single_file_has_the_share_of_held_out_documents_that_splits_would_have(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"instruction": f"question {number}", "output": f"answer {number} " * 10} for number in range(400)]
    put({name: json.dumps(records) if name == "alpaca.json" else "\n".join(map(json.dumps, records))})
    run(None, num_splits=20)
    metrics = PackMetrics.read(METRICS)
    assert 0.03 < metrics.validation.documents / 800 < 0.07
    assert metrics.train.documents + metrics.validation.documents == 800
    assert not {*texts(TRAIN)[""]} & {*texts(VALIDATION)[""]}
    assert re.search(
        r"note: 5% of the documents are held out by their content: the last validation_splits = 1 of num_splits = 20 "
        r"splits have \d+ of 800",
        capsys.readouterr().out,
    )


def test_few_documents_are_divided_where_they_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    for number, held_out in ((1, 0), (2, 1), (5, 1)):
        put({"few.json": json.dumps([f"document {place} " * 9 for place in range(number)])})
        run(None, num_splits=20)
        metrics = PackMetrics.read(METRICS)
        assert (metrics.train.documents, metrics.validation.documents) == (number - held_out, held_out)
        assert ("warning: nothing is held out: there is only one document" in capsys.readouterr().out) == (number == 1)


def test_held_out_documents_that_fill_no_row_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    put({"few.json": json.dumps([f"document {place}" for place in range(20)])})
    run(None, num_splits=20, seq_length=64)
    assert PackMetrics.read(METRICS).validation.rows == 0
    assert "warning: validation has 1" in (out := capsys.readouterr().out) and "lower seq_length" in out


def test_a_source_with_too_few_held_out_documents_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    put({f"web/{number}.txt": f"page {number} " * 9 for number in range(40)} | {"small/1.txt": "one document " * 9})
    run(["web", "small"], validation_fraction=0.1)
    sources = PackMetrics.read(METRICS).sources
    assert sources["validation web"].rows
    assert sources["validation small"].rows == 0
    assert "warning: validation of source small has 0 tokens" in (out := capsys.readouterr().out)
    assert "nothing of small is validated" in out
    with pytest.raises(StageError, match="validation of source small has 0 tokens"):
        run(["small"], validation_fraction=0.1)


def test_a_fraction_that_is_none_is_refused() -> None:
    for number in (0, 0.6, -1):
        values = {"seq_length": 4, "validation_splits": 1, "validation_fraction": number}
        Path("params.yaml").write_text(yaml.safe_dump(values))
        with pytest.raises(StageError, match="validation_fraction"):
            load_params(PackParams)


@pytest.mark.slow
def test_two_folders_and_one_of_conversations_are_trained_on_by_their_shares(tmp_path: Path, ranks: Ranks) -> None:
    """On two ranks, killed and resumed: the same bits, with the loss of each source."""
    project = Project(tmp_path / "project")
    make_pipeline(project)
    shutil.rmtree(project / "data/raw")
    (project / "data/raw/chat").mkdir(parents=True)
    for name in ("web", "code"):
        (project / f"data/raw/{name}").mkdir()
        for number in range(40):
            (project / f"data/raw/{name}/{number}.txt").write_text(f"The {name} of number {number} says it. " * 9)
    chats = [
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(200)
    ]
    (project / "data/raw/chat/all.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    project.set(
        sources=["web", "code", "chat"], records=[{"files": "chat/*.jsonl", "messages": "$.messages"}],
        chat_template="models/templates/plain.jinja", validation_fraction=0.2, max_steps=12, num_epochs=9,
        mixture={"web": 0.5, "code": 0.2, "chat": 0.3},
    )  # fmt: skip
    project.run("git", "init", "-q")
    output = project.run("dvc", "repro", "plan")
    assert re.search(r"web +50\.0% of each step", output), output
    plan = project.json("outputs/plan.json")
    used = {name: source["total_tokens"] / plan["tokens"] for name, source in plan["sources"].items()}
    assert all(abs(used[name] - share) < 0.02 for name, share in {"web": 0.5, "code": 0.2, "chat": 0.3}.items())
    project.set(max_repeats={"chat": 0.1})
    assert "max_repeats: chat is used" in project.run("python", "-m", "stages.plan", status=2)
    project.set(max_repeats=None)

    killed = project.copy(tmp_path / "killed")
    ranks.run(project)
    ranks.run(killed, "kill rank 1 at step 7", status=-9)
    assert "resuming from step" in ranks.run(killed)
    assert result(killed) == result(project)
    table = read(project.checkpoints() / step_name(12) / HISTORY)
    last = {name: value for name, value in table[-1].items() if name.startswith("validation_loss")}
    assert [*last] == ["validation_loss", *map(of_source, ("web", "code", "chat"))]
    assert all(value and math.isfinite(value) for value in last.values())

    # Other shares run no data stage, and the run is another one.
    before = project.json("data/pack.json")
    project.set(mixture={"web": 1, "chat": 1})
    status = project.run("dvc", "status", "pack", "extract", "organize")
    assert "mixture" not in status and "changed" not in status, status
    assert "starts at step 0" in project.run(*LAUNCH, "--explain")
    # And the rest of the pipeline, on the result of the first.
    project.set(mixture={"web": 0.5, "code": 0.2, "chat": 0.3})
    project.run("dvc", "repro", timeout=600)
    assert project.json("data/pack.json") == before
    evaluation = project.json("outputs/evaluation.json")
    assert [*evaluation["sources"]] == ["web", "code", "chat"]
    assert "<h2>Sources</h2>" in (project / "outputs/report/report.html").read_text()
    assert (project / "outputs/report/loss_by_source.svg").exists()
