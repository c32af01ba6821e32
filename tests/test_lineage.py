"""`python -m stages.lineage`: what differs from the lineage of a model is named."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages import lineage
from stages.base.errors import StageError
from stages.base.files import write_sealed
from stages.base.origin import DATA_METRICS, Origin
from stages.base.params_file import load_params
from stages.extract import ExtractParams
from stages.formats.raw_content import is_unchanged
from stages.splits.manifests import Part
from tests.pipeline import STAGES
from tests.project import Project, flip_bit

MODEL = Path("outputs/test/model")


@pytest.fixture
def project(reproduced: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(reproduced.path)
    for name in ("DVC_ROOT", "CHECKPOINT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    return reproduced


@pytest.fixture(scope="module")
def unchanged(_reproduced: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """As the current directory, a project for tests that put back what they change."""
    project = _reproduced.copy(tmp_path_factory.mktemp("unchanged") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.path)
        for name in ("DVC_ROOT", "CHECKPOINT_ROOT"):
            patch.delenv(name, raising=False)
        yield project


def differing() -> list[str]:
    """The names of what differs; what is equal or missing does not count."""
    return [finding.name for finding in lineage.verify(MODEL) if finding.state == "different"]


def test_everything_is_equal_after_a_run(unchanged: Project) -> None:
    findings = list(lineage.verify(MODEL))
    assert {finding.state for finding in findings} == {"equal"}, findings
    names = " ".join(finding.name for finding in findings)
    for part in ("model.safetensors", "tokenizer.json", "checkpoint", "data/model.json", "initial model",
                 "code of the training", "parameters of pack", "packages of extract", "data/tokens/validation",
                 "data/corpus", "manifests in data/splits", "raw files"):  # fmt: skip
        assert part in names


def test_another_version_of_a_package_is_found(
    unchanged: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("pyarrow", "torch"):
        metadata = tmp_path / f"site/{package}-0.1.dist-info/METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert differing() == ["packages of train", *(f"packages of {stage}" for stage in DATA_METRICS)]


@pytest.mark.parametrize(
    ("path", "change", "found"),
    [
        ("outputs/test/model/model.safetensors", None, "outputs/test/model/model.safetensors"),
        ("outputs/test/model/tokenizer.json", None, "outputs/test/model/tokenizer.json"),
        ("outputs/test/checkpoints/*/step-00000012/model/__0_0.distcp", None, "checkpoint"),
        ("data/tokens/train/*.arrow", None, "data/tokens/train"),
        ("data/corpus/*.arrow", None, "data/corpus"),
        ("data/splits/split_01.jsonl", None, "manifests in data/splits"),
        ("models/nano/tokenizer.json", None, "files of the initial model models/nano"),
        ("data/raw/folder0/0.txt", ("number", "numbed"), "raw files in data/raw"),
        ("params.yaml", ("\nlr: ", "\nlr: 1"), "parameters of train in params.yaml"),
        ("params.yaml", ("\nnum_splits: 4", "\nnum_splits: 3"), "parameters of organize in params.yaml"),
        ("params.yaml", ("\nmin_chars: ", "\nmin_chars: 1"), "parameters of extract in params.yaml"),
        ("params.yaml", ("\nseq_length: 32", "\nseq_length: 16"), "parameters of pack in params.yaml"),
    ],
)
def test_what_was_changed_is_found_and_nothing_else(
    unchanged: Project, path: str, change: tuple[str, str] | None, found: str
) -> None:
    """One bit, or a part of a text."""
    file = sorted(unchanged.path.glob(path))[0]
    content = file.read_bytes()
    if change:
        file.write_text(file.read_text().replace(*change))
    else:
        flip_bit(file, len(content) // 2)
    try:
        [name] = differing()
    finally:
        file.write_bytes(content)
    assert name.startswith(found)


def test_a_model_has_the_files_that_its_lineage_lists_and_no_others(project: Project) -> None:
    (MODEL / "config.json").unlink()
    (MODEL / "adapter").mkdir()
    (MODEL / "adapter/adapter_config.json").write_text("{}")
    (MODEL / "modeling.py").symlink_to("elsewhere.py")
    (MODEL / "README.md").write_text("edited")
    for name in (".gitattributes", ".cache/huggingface/download/config.json.metadata"):  # as `hf download` leaves them
        (MODEL / name).parent.mkdir(parents=True, exist_ok=True)
        (MODEL / name).write_text("")
    found = [finding for finding in lineage.verify(MODEL) if finding.state == "different"]
    assert found == [
        ("different", f"{MODEL}/adapter/adapter_config.json", "lineage.json does not list it"),
        ("different", f"{MODEL}/modeling.py", "lineage.json does not list it"),
        ("different", f"{MODEL}/config.json", f"it would be {project.path / MODEL}/config.json"),
    ]


def test_manifests_are_compared_without_the_raw_files(project: Project) -> None:
    shutil.rmtree("data/raw")
    flip_bit(Path("data/splits/split_01.jsonl"), 0)
    assert differing() == ["manifests in data/splits"]


def test_an_edited_lineage_does_not_fit_itself(project: Project) -> None:
    content = json.loads((MODEL / "lineage.json").read_text())
    content["params"]["lr"] = 1.0
    (MODEL / "lineage.json").write_text(json.dumps(content))
    with pytest.raises(StageError, match=r"lineage\.json is damaged or was changed"):
        differing()
    del content["sealed"]
    (MODEL / "lineage.json").write_text(json.dumps(content))
    with pytest.raises(StageError, match=r"lineage\.json states no SHA-256 of itself, so it is of an older version"):
        differing()
    write_sealed(MODEL / "lineage.json", content)
    assert differing() == ["run_id of parameters, data, model and code", "parameters of train in params.yaml"]
    write_sealed(MODEL / "lineage.json", {**content, "params": {}})
    with pytest.raises(StageError, match="is not valid: its params have no experiment_name"):
        differing()
    write_sealed(MODEL / "lineage.json", {**content, "origins": {"train": {"params": {}, "packages": {}}}})
    with pytest.raises(StageError, match=r"lineage\.json is not valid.*origins"):
        differing()


def test_a_model_directory_alone_is_enough(unchanged: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(unchanged / str(MODEL), tmp_path / "elsewhere/model")
    monkeypatch.chdir(tmp_path / "elsewhere")
    findings = list(lineage.verify(Path("model")))
    assert {finding.state for finding in findings} == {"equal", "missing"}
    missing = {finding.name: finding.detail for finding in findings if finding.state == "missing"}
    assert missing["data/corpus"] == f"it would be {tmp_path}/elsewhere/data/corpus"
    assert missing.keys() >= {"data/model.json of models/nano", "data/tokens/train", "data/splits/summary.json"}


@pytest.mark.parametrize(("content", "message"), [(None, "not a directory: .* `dvc get"), ("{}", "json is not valid")])
def test_what_is_no_model_is_a_clear_error(empty_project: Path, content: str | None, message: str) -> None:
    if content:
        Path("model").mkdir()
        Path("model/lineage.json").write_text(content)
    with pytest.raises(StageError, match=message):
        list(lineage.verify(Path("model")))


def test_a_part_is_compared_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"aabbcc")
    digest = hashlib.sha256(b"bb").hexdigest()
    assert is_unchanged(tmp_path / "file", digest, Part(2, 4, 1))
    assert not is_unchanged(tmp_path / "file", digest, Part(2, None, 1))
    assert not is_unchanged(tmp_path / "none", digest, None)


def test_the_command_fails_where_something_differs_such_as_the_code(project: Project) -> None:
    arguments = ("python", "-m", "stages.lineage", "verify", str(MODEL))
    assert "different" not in project.run(*arguments[:-1]), "without a directory: the current model"
    flip_bit(MODEL / "model.safetensors", -1)
    with (project / "stages/training/schedule.py").open("a") as module:
        module.write("\nedited = 1\n")
    output = project.run(*arguments, status=2)
    assert f"different  {MODEL}/model.safetensors: SHA-256 " in output
    assert re.search(r"different  code of the training: \w+ in lineage.json, \w+ here", output)
    assert f"error: 2 of these differ from what {MODEL}/lineage.json records" in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_stage_gives_the_same_bytes_again_and_dvc_says_so(project: Project, tmp_path: Path) -> None:
    # Without DVC_ROOT, as by hand, no stored result is used, and elsewhere there are no checkpoints.
    for stage in STAGES:
        module = {"train": "launch"}.get(stage, stage)
        project.run("python", "-m", f"stages.{module}", CHECKPOINT_ROOT=str(tmp_path / "again"))
    found = json.loads(project.run("dvc", "status", "--json"))
    changed = {path for entries in found.values() for entry in entries for paths in entry.values() for path in paths}
    durations = {"outputs/speed.tsv", "outputs/train_metrics.json", "outputs/cost.json", "outputs/report"}
    assert changed == durations


def test_values_are_written_as_in_params_yaml() -> None:
    found = lineage._check("them", Path(), {"max_steps": None, "tf32": True}, lambda: {"max_steps": 3, "tf32": False})
    assert found.detail == "max_steps null in lineage.json, 3 here; tf32 true in lineage.json, false here"
    found = lineage._check("them", Path(), {}, lambda: {"extend_from": None})  # of an older version
    assert found.detail == "extend_from nothing in lineage.json, null here"


def test_rules_are_recorded_as_they_are_written(here: Project) -> None:
    written = [{"files": "*.jsonl", "prompt": [{"role": "user", "content": "$.q"}], "completion": "$.a"}]
    here.set(records=written)
    assert Origin.of("stages.extract", load_params(ExtractParams)).params["records"] == written
