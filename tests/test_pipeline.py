"""The stages as DVC sees them: what is declared, what reruns, what survives a kill."""

import ast
import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from stages.artifacts.params import leaves
from tests.conftest import REPO, Project, ranks_of, steps, wait_for, weights

PIPELINE = yaml.safe_load((REPO / "dvc.yaml").read_text())
STAGES = ["organize", "extract", "download", "pack", "plan", "train", "consolidate", "evaluate"]
DATA_STAGES = ["organize", "extract", "pack"]
ENTRY = {stage: [f"stages.{stage}"] for stage in STAGES} | {"train": ["stages.launch", "stages.train"]}


def module_file(name: str) -> Path | None:
    path = REPO / name.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports(file: Path) -> Iterator[str]:
    """The first-party modules that a file imports, wherever in the file, and the packages that hold them."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "stages":
                yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def closure(stage: str) -> set[Path]:
    """All first-party files that a stage runs."""
    files: set[Path] = set()
    pending = list(ENTRY[stage])
    while pending:
        file = module_file(pending.pop())
        if file is not None and file not in files:
            files.add(file)
            pending.extend(imports(file))
    return files - {REPO / "stages/__init__.py"}  # a docstring


def ran(output: str) -> list[str]:
    return re.findall(r"Running stage '(\w+)'", output)


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_watches_every_module_that_a_stage_imports(stage: str) -> None:
    watched = [REPO / dep for dep in PIPELINE["stages"][stage]["deps"] if dep.startswith("stages/")]
    missing = [file for file in closure(stage) if not any(file == dep or dep in file.parents for dep in watched)]
    assert not missing
    unused = [dep for dep in watched if not any(file == dep or dep in file.parents for file in closure(stage))]
    assert not unused


@pytest.mark.parametrize("stage", [*DATA_STAGES, "download"])
def test_no_data_stage_reaches_training(stage: str) -> None:
    assert not [file for file in closure(stage) if REPO / "stages/training" in file.parents]


def test_floors_are_kept() -> None:
    allowed = {"artifacts": set(), "corpus": {"artifacts"}, "model": {"artifacts"}, "export": {"artifacts"},
               "training": {"artifacts", "model"}}  # fmt: skip
    for floor, below in allowed.items():
        for file in (REPO / "stages" / floor).rglob("*.py"):
            used = {name.split(".")[1] for name in imports(file) if "." in name} - {floor}
            assert used <= below, f"{file} imports {used - below}"


def test_data_stages_import_no_torch() -> None:
    names = ", ".join(f"stages.{stage}" for stage in DATA_STAGES)
    code = f"import sys, {names}; sys.exit(bool({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_watches_the_leaves_that_a_stage_reads(stage: str) -> None:
    """Every `params.load(SomeParams)` in the stage's own modules, against `params` and `meta.runtime`."""
    watched, runtime = set(), set()
    for name in ENTRY[stage]:
        file = module_file(name)
        assert file is not None
        module = __import__(name, fromlist=["_"])
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "params.load":
                cls = getattr(module, ast.unparse(call.args[0]))
                (runtime if len(call.args) == 2 else watched).update(leaves(cls))
    declared = PIPELINE["stages"][stage]
    assert set(declared["params"]) == watched
    assert set(declared.get("meta", {}).get("runtime", [])) == runtime


def test_params_yaml_holds_what_the_stages_read_and_no_more() -> None:
    declared = {name for stage in PIPELINE["stages"].values() for name in stage["params"]}
    declared |= {
        f"runtime.{name}" for s in PIPELINE["stages"].values() for name in s.get("meta", {}).get("runtime", [])
    }

    def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            yield from flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]

    assert set(flatten(yaml.safe_load((REPO / "params.yaml").read_text()))) == declared


@pytest.mark.parametrize("stage", [*STAGES, "launch", "checkpoints"])
def test_every_stage_explains_itself(stage: str) -> None:
    output = subprocess.check_output([sys.executable, "-m", f"stages.{stage}", "--help"], cwd=REPO, text=True)
    assert "Reads" in output
    assert "Writes" in output
    assert "Command" in output


def test_help_of_a_data_stage_answers_at_once() -> None:
    start = time.monotonic()
    subprocess.check_output([sys.executable, "-m", "stages.organize", "--help"], cwd=REPO)
    assert time.monotonic() - start < 2


def test_reproduced_once_runs_nothing_twice(reproduced: Project) -> None:
    assert ran(reproduced.run("dvc", "repro")) == []
    assert reproduced.run("git", "status", "--porcelain") == ""
    code = """
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained("outputs/test/model")
tokenizer = transformers.AutoTokenizer.from_pretrained("outputs/test/model")
print(tokenizer.decode(model.generate(**tokenizer("The file", return_tensors="pt"), max_new_tokens=3)[0]))
"""
    assert "The file" in reproduced.run("python", "-c", code)
    metrics = json.loads(reproduced.run("dvc", "metrics", "show", "--json"))[""]["data"]
    assert metrics["outputs/test/metrics.json"]["data"]["validation_loss"] < 9
    assert metrics["data/extract.json"]["data"]["files"] == 36
    assert "consolidate" in reproduced.run("dvc", "dag")
    assert "params.lr" not in reproduced.run("dvc", "params", "diff")


def test_plots_open_without_a_network(reproduced: Project) -> None:
    reproduced.run("dvc", "plots", "show")
    page = (reproduced / "dvc_plots/index.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    pictures = re.findall(r'<img[^>]*src="([^"]+)"', page)
    assert len(pictures) == 2
    assert all((reproduced / "dvc_plots" / picture).is_file() for picture in pictures)
    report = (reproduced / "outputs/test/report/index.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", report)


def test_a_new_batch_size_reruns_what_it_must_and_the_old_one_comes_from_the_cache(reproduced: Project) -> None:
    output = reproduced.run("dvc", "exp", "run", "-S", "batch_size=4")
    assert ran(output) == ["plan", "train", "consolidate", "evaluate"]
    assert reproduced.json("outputs/test/run.json")["identity"]["params"]["batch_size"] == 4
    assert "test" in reproduced.run("dvc", "exp", "show", "--csv")
    output = reproduced.run("dvc", "exp", "run", "-S", "batch_size=2")
    assert ran(output) == []
    assert reproduced.json("outputs/test/run.json")["identity"]["params"]["batch_size"] == 2


def test_another_lr_is_a_float_and_starts_at_step_0(reproduced: Project) -> None:
    output = reproduced.run("dvc", "exp", "run", "-S", "lr=0.00002")
    assert "resuming" not in output
    assert reproduced.json("outputs/test/run.json")["identity"]["params"]["lr"] == 2e-05
    assert reproduced.json("outputs/test/run.json")["adopted"] is None


def test_what_is_under_runtime_reruns_nothing(reproduced: Project) -> None:
    assert ran(reproduced.run("dvc", "exp", "run", "-S", "runtime.log_freq=1")) == []


def test_a_misspelt_parameter_is_a_clear_error(reproduced: Project) -> None:
    output = reproduced.run("dvc", "exp", "run", "-S", "batchsize=4", status=255)
    assert "batchsize" in output
    assert "Traceback" not in output
    reproduced.set(batchsize=4, num_splits=3)
    output = reproduced.run("dvc", "repro", status=255)
    assert "unknown parameter 'batchsize'; did you mean 'batch_size'?" in output
    assert "Traceback" not in output


def test_edits_rerun_what_depends_on_them(reproduced: Project) -> None:
    source = reproduced / "stages/training/schedule.py"
    source.write_text(source.read_text() + "# an edit\n")
    assert ran(reproduced.run("dvc", "repro")) == ["plan", "train", "consolidate", "evaluate"]
    raw = reproduced / "data/raw/folder0/0.txt"
    raw.write_text("another text " * 40)
    output = ran(reproduced.run("dvc", "repro", "pack"))
    assert output == ["organize", "extract", "pack"]


def kill_training(process: "subprocess.Popen[str]") -> None:
    """SIGKILL to the ranks and to the launcher."""
    ranks = ranks_of(process)
    for victim in [ranks[0].parent(), *ranks]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


@pytest.mark.parametrize(
    "command",
    [*(pytest.param(c, marks=pytest.mark.slow) for c in ("repro", "exp run")), "exp run --temp --allow-missing"],
)
def test_killed_midway_goes_on_and_ends_with_the_same_weights(
    reproduced: Project, uninterrupted: dict[str, str], command: str
) -> None:
    if command == "repro":
        reproduced.set(seed=1)
        full = ["dvc", "repro"]
    else:
        full = ["dvc", *command.split(), "-S", "seed=1"]
    process = reproduced.popen(*full)
    wait_for(lambda: "step-00000004" in steps(reproduced, seed=1))
    kill_training(process)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, output
    output = reproduced.run(*full)
    assert re.search(r"resuming from step (4|6|8|10) of 12", output), output
    assert weights(reproduced) == uninterrupted


def no_network(project: Project, *command: str, **environment: str) -> str:
    script = "ip link set lo up && exec " + " ".join(command)
    return project.run("unshare", "-rn", "sh", "-c", script, **environment)


can_unshare = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare, reason="this machine allows no network namespaces")
def test_repro_needs_no_network(reproduced: Project, tmp_path: Path) -> None:
    """All stages in a namespace whose only interface is loopback: from a Hub id in a HF_HOME, pretrained weights."""
    code = """
import sys, torch, transformers
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained("models/nano"))
model.to(torch.bfloat16).save_pretrained(sys.argv[1])
"""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hf/hub/models--someone--nano"
    snapshot = repo / "snapshots" / commit
    plain = tmp_path / "plain"
    shutil.copytree(reproduced / "models/nano", plain)
    reproduced.run("python", "-c", code, str(plain))
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    for number, file in enumerate(sorted(plain.iterdir())):
        shutil.move(file, repo / f"blobs/{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")

    reproduced.set(model_name="someone/nano", num_splits=5)
    output = no_network(reproduced, "dvc", "repro", HF_HOME=str(tmp_path / "hf"))
    assert ran(output) == STAGES
    manifest = reproduced.json("data/model.json")
    assert manifest["commit"] == commit
    assert manifest["weights"] == ["model.safetensors"]
    assert reproduced.json("outputs/test/model/config.json")["dtype"] == "bfloat16"
    lineage = reproduced.json("outputs/test/model/lineage.json")
    assert commit in json.dumps(lineage)
    metrics = reproduced.json("outputs/test/metrics.json")
    assert metrics["validation_loss"] < metrics["untrained_validation_loss"]


@pytest.mark.skipif(not can_unshare, reason="this machine allows no network namespaces")
def test_a_model_that_is_not_cached_is_a_clear_error_without_a_network(reproduced: Project, tmp_path: Path) -> None:
    reproduced.set(model_name="someone/nano")
    process = reproduced.popen("unshare", "-rn", "dvc", "repro", HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="0")
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "someone/nano" in output
    assert "HF_HOME" in output
    assert "Traceback" not in output
