"""The stages as DVC sees them: what is declared, what reruns, what survives a kill."""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import pytest
import yaml
from dvc.cli import main as dvc
from dvc.exceptions import InvalidArgumentError
from dvc.repo import Repo
from dvc.utils.hydra import apply_overrides
from pydantic import TypeAdapter, ValidationError

from stages import consolidate, evaluate, pack
from stages.base import code, outputs
from stages.base.errors import StageError
from tests.network import CAN_UNSHARE, IN_A_NAMESPACE
from tests.pipeline import DATA_STAGES, STAGES, ran
from tests.project import REPO, Project, flip_bit, ranks_of, run_here, wait_for
from tests.trainings import steps, weights

pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep:DeprecationWarning")  # of what DVC uses

PIPELINE = yaml.safe_load((REPO / "dvc.yaml").read_text())

UNNEEDED = 15
"""Modules that DVC watches for a stage which does not use them; an edit to one of them runs the stage without need."""


def entries(stage: str) -> set[str]:
    """The modules that a stage runs: the one of its name, the one that its command starts, and that of its ranks."""
    [started] = re.findall(r"python -m (\S+)", PIPELINE["stages"][stage]["cmd"])
    ranks = {"evaluate": {"stages.evaluation.rank"}, "score": {"stages.scoring.rank"}}
    return {f"stages.{stage}", started} | ranks.get(stage, set())


def watched_files(stage: str) -> set[Path]:
    """The modules and templates that DVC watches for a stage."""
    deps = [REPO / dep for dep in PIPELINE["stages"][stage]["deps"] if dep.startswith("stages/")]
    files = {file for dep in deps for file in ([dep] if dep.is_file() else dep.rglob("*"))}
    return {file for file in files if file.suffix in (".py", ".html")}


def reached_files(stage: str) -> set[Path]:
    """The modules that a stage can reach, and their templates."""
    files = {*code.reached(*entries(stage)).values()}
    return files | {file.with_suffix(".html") for file in files if file.with_suffix(".html").exists()}


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_watches_all_that_a_stage_can_reach_and_little_else(stage: str) -> None:
    # Those of packages only have a docstring.
    reached = {file for file in reached_files(stage) if file.name != "__init__.py"}
    assert reached <= watched_files(stage)
    unneeded = sorted(str(file.relative_to(REPO / "stages")) for file in watched_files(stage) - reached_files(stage))
    print(f"{stage}: {len(unneeded)} modules without need: {', '.join(unneeded)}")
    assert len(unneeded) <= UNNEEDED, unneeded
    docstring = re.compile(r'"""[^"]*"""\n')
    assert all(docstring.fullmatch(file.read_text()) for file in (REPO / "stages").rglob("__init__.py"))


def test_dvc_edits_params_yaml_and_leaves_the_rest_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(REPO / "params.yaml", path)
    before = path.read_text()
    apply_overrides(path, ["batch_size=4", "runtime.log_freq=5"])  # what `dvc exp run -S` does
    text = before.replace("batch_size: 2 ", "batch_size: 4 ").replace("log_freq: 10 ", "log_freq: 5  ")
    assert path.read_text() == text != before
    apply_overrides(path, ["batch_size=2", "runtime.log_freq=10", "max_steps=3", "max_steps=null"])
    assert path.read_text() == before
    with pytest.raises(InvalidArgumentError) as error:
        apply_overrides(path, ["batchsize=4"])
    assert "batchsize" in str(error.value.__cause__)


def test_git_ignores_data_own_models_and_bundles_and_no_file_of_dvc() -> None:
    ignored = ["data/raw/file.txt", "data/raw_stage2/file.txt", "models/mine/model.safetensors", "bundle/x",
               "bundle-2/x", "bundle.0123abcd.tmp/x", "wheels/x.whl", "evals/public/a--b/x.parquet",
               "models/.mine.lock"]  # fmt: skip
    tracked = ["data/raw.dvc", "data/raw_stage2.dvc", "models/mine.dvc", "models/tiny-llama/config.json",
               "models/templates/a.jinja", "models/make_tiny_llama.py", "evals/public/a--b.dvc",
               "evals/public/manifest.json"]  # fmt: skip
    found = subprocess.run(["git", "check-ignore", *ignored, *tracked], cwd=REPO, text=True, stdout=-1, check=True)
    assert found.stdout.split() == ignored


def test_what_was_added_to_dvc_is_found_again(tmp_path: Path) -> None:
    """DVC looks for no .dvc file in a directory that git ignores, and deletes what the file tracks."""
    for name in (".gitignore", ".dvcignore", ".dvc/config", "data/.gitignore"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    files = [tmp_path / path / "file" for path in ("models/mine", "data/raw", "evals/public/a--b")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("content")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    Repo(tmp_path).add([str(file.parent) for file in files])
    Repo(tmp_path).checkout()
    for file in files:
        assert file.exists()
        shutil.rmtree(file.parent)
    Repo(tmp_path).checkout()
    assert [file.read_text() for file in files] == ["content"] * 3


def test_an_experiment_cannot_have_the_name_of_an_output() -> None:
    """DVC would delete its checkpoints together with the output."""
    adapter = TypeAdapter(outputs.ExperimentName)
    assert adapter.validate_python("report2") == "report2"
    fixed = [out for name in STAGES for part in ("outs", "metrics") for out in PIPELINE["stages"][name].get(part, [])]
    names = [out.removeprefix("outputs/") for out in fixed if re.fullmatch(r"outputs/[\w.]+", out)]
    assert len(names) == 12
    for name in names:
        with pytest.raises(ValidationError, match="choose another name"):
            adapter.validate_python(name)


def test_no_data_stage_reaches_training_or_its_checkpoints() -> None:
    for stage in ["download", *DATA_STAGES]:
        rooms = {name.split(".")[1] for name in code.reached(*entries(stage)) if "." in name}
        # `download` tries a small copy of the model: whether its tokens see what follows.
        own = {"forward"} if stage == "download" else set()
        assert not rooms & ({"building", "forward", "training", "ranks", "launching", "checkpointing"} - own), stage


def test_no_import_goes_up() -> None:
    """From each room to those below it; `stages/*.py` are on top, and `checks/` reads their parameters."""
    below = {
        "base": set(),
        "work": {"base"},
        "splits": {"base", "work"},
        "model": {"base"},
        "ranks": {"base", "model", "forward"},
        "formats": {"base", "splits", "work"},
        "duplicates": {"base", "work"},
        "tokenizing": {"base", "work", "model"},
        "forward": {"base", "model"},
        "building": {"base", "model", "forward"},
        "training": {"base", "model", "forward", "building"},
        "checkpointing": {"base", "model", "forward", "building", "training"},
        "planning": {"base", "model", "forward", "building", "training"},
        "launching": {"base", "model", "forward", "building", "training", "checkpointing", "ranks"},
        "export": {"base", "model", "checkpointing"},
        "evaluation": {"base", "model", "forward", "building", "ranks", "export"},
        "scoring": {
            *("base", "work", "model", "forward", "building", "ranks", "export", "evaluation"),
            *("duplicates", "tokenizing"),
        },
        "reporting": {"base", "model", "checkpointing", "export"},
    }
    directories = {path.name for path in (REPO / "stages").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert directories == below.keys() | {"checks"}
    for room, others in below.items():
        for file in (REPO / "stages" / room).rglob("*.py"):
            for name in code.reached(".".join(file.relative_to(REPO).with_suffix("").parts)):
                used = name.split(".")[1] if "." in name else room
                assert used in others | {room}, f"{file} imports {name}"


def test_no_stage_has_an_effect_or_imports_what_takes_seconds_when_it_is_imported() -> None:
    """Neither the environment nor the interpreter's settings change, nor does a process or a thread start.

    But for the allocator of pyarrow, which is chosen before pyarrow is imported.
    """
    names = ", ".join(f"stages.{stage}" for stage in [*STAGES, "launch", "checkpoints", "doctor"])
    script = f"""
import os, signal, sys, threading
import stages.formats.limits
import numpy, pyarrow  # which may have effects of their own
def state():
    handlers = {{number: signal.getsignal(number) for number in signal.valid_signals()}}
    return dict(os.environ), sys.getswitchinterval(), threading.active_count(), handlers, os.getcwd(), sys.path[:]
before = state()
import {names}
assert state() == before
assert not {{'torch', 'transformers', 'datasets', 'matplotlib'}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=REPO, check=True)


def leaves(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all leaves of a parameter dataclass: `seed`, `fsdp.strategy`, ..."""
    hints = get_type_hints(cls)  # without `Annotated`, and with names in quotes resolved
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all leaves of params.yaml."""
    for name, value in values.items():
        yield from flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]


def test_dvc_watches_the_leaves_that_a_stage_reads_and_params_yaml_has_no_others() -> None:
    """Every `load_params(SomeParams)` in the stage's own modules, against `params` and `meta.runtime`."""
    used = set()
    for stage in STAGES:
        watched, runtime = set(), set()
        for name in [*entries(stage), *(["stages.launching.runtime"] if stage == "train" else [])]:
            module = importlib.import_module(name)
            for cls, section in re.findall(r"load_params\((\w+)(, \"runtime\")?\)", Path(module.__file__).read_text()):
                (runtime if section else watched).update(leaves(getattr(module, cls)))
        declared = PIPELINE["stages"][stage]
        files = [entry.values() if isinstance(entry, dict) else [[entry]] for entry in declared["params"]]
        assert {name for lists in files for names in lists for name in names} == watched, stage
        assert set(declared.get("meta", {}).get("runtime", [])) == runtime, stage
        used |= watched | {f"runtime.{name}" for name in runtime}
    assert set(flatten(yaml.safe_load((REPO / "params.yaml").read_text()))) == used
    paths = {path for declared in PIPELINE["stages"].values() for path in declared["deps"]}
    assert not paths & used, "`dvc exp show` takes a file for the parameter of its name"


@pytest.mark.parametrize("stage", [*STAGES, "launch", "checkpoints", "doctor"])
def test_every_stage_explains_itself(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [stage, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"stages.{stage}").main()
    output = capsys.readouterr().out
    assert [word for word in ("Reads", "Writes", "Example") if word not in output] == []
    if stage not in ("checkpoints", "doctor"):  # programs with commands of their own
        assert len(output.partition("\noptions:")[0].splitlines()) <= 10


def test_nothing_runs_again_without_a_change_of_what_decides_results(reproduced: Project) -> None:
    assert ran(reproduced.run("dvc", "exp", "run", "-S", "runtime.log_freq=1")) == []
    assert reproduced.run("git", "status", "--porcelain").split() == ["M", "params.yaml"]


def test_what_a_pipeline_leaves_opens_without_a_network(reproduced: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, plots, report and model."""
    monkeypatch.chdir(reproduced.path)
    metrics = Repo().metrics.show()[""]["data"]
    assert {path: list(file["data"]) for path, file in metrics.items()} == {  # few, as each is a column
        "outputs/cost.json": ["steps", "tokens_per_s", "memory_peak_gib"],
        "outputs/metrics.json": ["validation_loss", "perplexity", "bits_per_byte"],
        "outputs/scores.json": [],
    }
    assert metrics["outputs/metrics.json"]["data"]["validation_loss"] < 9
    assert reproduced.json("data/extract.json")["files"] == 36

    assert dvc(["plots", "show"]) == 0
    page = (reproduced / "dvc_plots/index.html").read_text()
    assert set(re.findall(r"https?://[^\"/]*", page)) == {"http://www.w3.org", "https://vega.github.io"}  # names only
    assert not re.search(r"<(script|link|iframe)[^>]*(src|href)=|@import|url\(|fetch\(", page)
    assert re.findall(r"vegaEmbed\('#(\w+)'", page) == [
        *("Loss", "Learning_rate", "Gradient_norm", "Speed", "Memory", "Times_of_a_step")
    ]
    assert "<img" not in page  # the pictures of the report show the same
    labels = set(re.findall(r'"title": "([^"]*)"', page))
    assert labels == {
        *("step", "loss (nats per token)", "learning rate", "gradient norm, before clipping", "tokens per second"),
        *("memory of rank 0 (GiB)", "milliseconds per step"),
    }
    report = (reproduced / "outputs/report/report.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", report)
    # What the template names is in the records of all stages. On CPUs there is no MFU, and no line of it.
    assert "not known" not in report
    assert '<th scope="row">MFU</th>' not in report

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("outputs/test/model")
    tokenizer = AutoTokenizer.from_pretrained("outputs/test/model")
    generated = model.generate(**tokenizer("The file", return_tensors="pt"), max_new_tokens=3)
    assert tokenizer.decode(generated[0]).startswith("The file")


def dvc_outs(project: Project) -> dict[str, Any]:
    """The digests of all outs, as DVC has recorded them."""
    lock = yaml.safe_load((project / "dvc.lock").read_text())["stages"]
    return {out["path"]: out["md5"] for stage in lock.values() for out in stage["outs"]}


RECORDS_IMPORTS = """
import atexit, os, sys
def record():
    names = [name for name in sys.modules if name.startswith("stages.")]
    with open(os.environ["IMPORTED"], "a") as file:
        file.writelines(f"{os.environ['DVC_STAGE']} {name}\\n" for name in names)
if "DVC_STAGE" in os.environ:
    atexit.register(record)
"""


@pytest.mark.slow
def test_a_change_reruns_what_depends_on_it_and_no_stage_imports_what_dvc_does_not_watch(
    reproduced: Project, tmp_path: Path
) -> None:
    """What Python itself has imported when a stage ends: which reading the imports might miss."""
    (tmp_path / "sitecustomize.py").write_text(RECORDS_IMPORTS)
    environment = {"PYTHONPATH": str(tmp_path), "IMPORTED": str(tmp_path / "imported")}

    def run(*command: str) -> str:
        return reproduced.run("dvc", *command, **environment)

    def result() -> dict[str, Any]:
        found: dict[str, Any] = reproduced.json("outputs/test/run.json")
        return found

    schedule, before = reproduced / "stages/training/schedule.py", result()
    text = schedule.read_text()
    schedule.write_text(text + "edited = 1\n")
    output = run("exp", "run", "-S", "batch_size=4", "-S", "lr=0.00002")
    assert ran(output) == ["plan", "train", "consolidate", "evaluate", "score", "report"]
    assert "resuming" not in output
    assert "nothing to train" not in output
    identity = result()["identity"]
    assert (identity["params"]["batch_size"], identity["params"]["lr"], result()["adopted"]) == (4, 2e-05, None)
    assert identity["code"] != before["identity"]["code"]
    assert "test" in run("exp", "show", "--csv")
    schedule.write_text(text)
    output = run("exp", "run", "-S", "batch_size=2", "-S", f"lr={before['identity']['params']['lr']}")
    assert ran(output) == []  # from the cache
    assert result() == before

    source = reproduced / "stages/model/hub.py"  # the training never imports it, but it is in a folder of its stage
    source.write_text(source.read_text() + "edited = 1\n")
    users = {stage for stage in STAGES if "stages/model" in PIPELINE["stages"][stage]["deps"]}
    assert json.loads(run("status", "--json")).keys() == users
    (reproduced / "data/raw/folder0/0.txt").write_text("another text " * 40)
    assert {*ran(run("repro", "pack"))} == {"download", *DATA_STAGES}

    imported: dict[str, set[Path]] = {}
    for line in (tmp_path / "imported").read_text().splitlines():
        stage, name = line.split()
        file = REPO / f"{name.replace('.', '/')}.py"
        if file.is_file():
            imported.setdefault(stage, set()).add(file)
    assert imported.keys() == set(STAGES)
    for stage, files in imported.items():
        assert files <= watched_files(stage), stage


def test_an_edit_of_the_page_measures_no_model(reproduced: Project) -> None:
    outs = dvc_outs(reproduced)
    page = reproduced / "stages/reporting/page.html"
    page.write_text(page.read_text().replace("<h2>Loss</h2>", "<h2>Losses</h2>"))
    assert ran(reproduced.run("dvc", "repro")) == ["report"]
    assert {path for path, digest in dvc_outs(reproduced).items() if digest != outs[path]} == {"outputs/report"}
    assert "<h2>Losses</h2>" in (reproduced / "outputs/report/report.html").read_text()


def test_another_task_trains_nothing(reproduced: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reproduced.path)
    reproduced.set(tasks=["sums"])
    (reproduced / "evals/more.jsonl").write_text("{}")
    assert Repo().status().keys() == {"plan", "score"}


def test_two_clones_with_equal_inputs_write_equal_reports(reproduced: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their git history and DVC's cache have."""
    monkeypatch.chdir(reproduced.path)
    before = {path: path.read_bytes() for path in Path("outputs/report").iterdir()}
    for name in (".git", ".dvc", "outputs/report", "stages"):
        shutil.rmtree(name)
    run_here("report")
    assert {path: path.read_bytes() for path in Path("outputs/report").iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["repro train", "exp run -S seed=1 train", "exp run --temp -S seed=1 train"])
def test_a_killed_training_resumes_and_ends_with_the_same_weights(
    reproduced: Project, uninterrupted: dict[str, str], command: str
) -> None:
    if command == "repro train":
        reproduced.set(seed=1)
    full = ["dvc", *command.split(), "--allow-missing"]
    process = reproduced.popen(*full)
    wait_for(lambda: "step-00000004" in steps(reproduced, seed=1))
    ranks = ranks_of(process)
    for victim in [ranks[0].parent(), *ranks]:  # the launcher, too
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, output
    output = reproduced.run(*full)
    assert re.search(r"resuming from step (4|6|8|10) of 12", output), output
    assert weights(reproduced) == uninterrupted


@pytest.mark.skipif(not CAN_UNSHARE, reason="this machine allows no network namespaces")
def test_repro_needs_no_network(repro_log: str) -> None:
    """All stages, in a namespace whose only interface is loopback, ask no nameserver and listen on loopback only."""
    assert ran(repro_log) == STAGES
    observed = json.loads(re.findall(r"^observed (.*)", repro_log, re.MULTILINE)[0])
    assert observed == {"names": [], "is_listening": True, "everywhere": []}


@pytest.mark.slow
@pytest.mark.skipif(not CAN_UNSHARE, reason="this machine allows no network namespaces")
def test_repro_from_a_model_of_the_hub_needs_no_network(reproduced: Project, tmp_path: Path) -> None:
    """From a Hub id in a HF_HOME, whose weights are trained on."""
    import torch
    from transformers import AutoConfig

    from tests.artifacts import write_cache, write_model

    source = Path(shutil.copytree(reproduced / "models/nano", tmp_path / "source"))
    write_model(source, AutoConfig.from_pretrained(source), torch.bfloat16)
    commit = "0123456789abcdef0123456789abcdef01234567"
    write_cache(source, tmp_path / "hf", "someone/nano", commit)
    reproduced.set(model_name="someone/nano", num_splits=5)
    assert ran(reproduced.run(*IN_A_NAMESPACE, "dvc", "repro", HF_HOME=str(tmp_path / "hf"))) == STAGES
    manifest = reproduced.json("data/model.json")
    assert manifest["commit"] == commit
    assert manifest["weights"] == ["model.safetensors"]
    assert reproduced.json("outputs/test/model/config.json")["dtype"] == "bfloat16"
    lineage = reproduced.json("outputs/test/model/lineage.json")
    assert commit in json.dumps(lineage)
    losses = reproduced.json("outputs/evaluation.json")
    assert losses["exported"]["loss"] < losses["untrained"]["loss"]


def test_39_what_dvc_restores_from_a_damaged_cache_is_refused(
    reproduced: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC does not read again what has the size and the time that it knows."""
    model = "outputs/test/model"
    read_by: dict[str, list[Callable[[], object]]] = {
        "data/model.json": [consolidate.main, evaluate.main],
        "data/license.json": [consolidate.main],
        "outputs/test/run.json": [consolidate.main],
        **{f"{model}/{path.name}": [evaluate.main] for path in (reproduced / model).iterdir()},
        "outputs/history.tsv": [evaluate.main],
        "data/tokens/validation/data-00000-of-00001.arrow": [evaluate.main],
        "data/corpus/data-00000-of-00004.arrow": [pack.main],
    }
    del read_by[f"{model}/README.md"]  # for people
    good: dict[str, bytes] = {}
    for name in read_by:
        good[name] = (reproduced / name).read_bytes()
        digest = hashlib.md5(good[name], usedforsecurity=False).hexdigest()
        damaged = reproduced / f".dvc/cache/files/md5/{digest[:2]}/{digest[2:]}"
        before = damaged.stat()
        damaged.chmod(0o644)
        middle = len(good[name]) // 2
        digits = (found.start() for found in re.finditer(rb"[0-9]", good[name]))
        flip_bit(damaged, min(digits, key=lambda place: abs(place - middle)))  # 4 becomes 5: it can still be read
        os.utime(damaged, ns=(before.st_atime_ns, before.st_mtime_ns))
        (reproduced / name).unlink()
    Repo(reproduced.path).checkout()
    (reproduced / "outputs/metrics.json").unlink()  # as DVC does before the stage

    monkeypatch.chdir(reproduced.path)
    monkeypatch.setattr(sys, "argv", ["stage"])
    bad = {name: Path(name).read_bytes() for name in good}
    assert not [name for name in good if good[name] == bad[name]]
    for name, content in good.items():
        Path(name).write_bytes(content)
    for name, stages in read_by.items():
        Path(name).write_bytes(bad[name])
        for stage in stages:
            with pytest.raises(StageError, match=f"{name}|manifest.json is not the one that {name}"):
                stage()
        Path(name).write_bytes(good[name])
    assert not Path("outputs/metrics.json").exists()
