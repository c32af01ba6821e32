"""params.yaml as people, editors and other programs may leave it: one line says what is wrong."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts import parameters
from stages.base import params_file
from stages.base.errors import StageError
from stages.base.params_file import load_params
from tests.project import REPO


@dataclass(frozen=True)
class Section:
    part: float


@dataclass(frozen=True)
class Params:
    share: float
    section: Section
    shares: dict[str, float] = field(default_factory=dict)


GOOD = "share: 1\nsection: {part: 2}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    params = "[experiment_name, max_shard_size, section.part, share, shares]"
    (tmp_path / "dvc.yaml").write_text(f"stages: {{a: {{cmd: a, params: {params}}}}}")
    return tmp_path / "params.yaml"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD.encode() + b"# \xff", "is not valid YAML: UnicodeDecodeError"),
        (GOOD + "more: " + "[" * 1_500 + "]" * 1_500, "is not valid YAML: RecursionError"),
        (GOOD + "more: " + "9" * 5_000, "is not valid YAML: ValueError"),
        (GOOD + "share: 3\n", r"params\.yaml is not valid YAML: line 3: 'share' is there twice"),
        (GOOD + "rule: {text: $.list[*].text}\n", r"line 3: .*; put a value with \* or \[ in quotes"),
        ("share: 1\nsection: {part: 2, part: 2}\n", "'part' is there twice"),
        ("share: .inf\nsection: {part: 2}\n", "share is inf: it must be a finite number"),
        ("share: 1\nsection: {part: '-inf'}\n", "section.part is '-inf': it must be a finite number"),
        ("share:\nsection: {part: 2}\n", "share is null: input should be a valid number"),
        (GOOD + "experiment_name: a/b\n", "experiment_name is 'a/b': string .* pattern .*; docs/parameters.md says"),
        (GOOD + "experiment_name: report\n", "experiment_name is 'report': outputs/report is an output of every"),
        (GOOD + "experiment_name: 2024\n", " is 2024: .* string; put text that looks like a number in quotes"),
        (GOOD + "experiment_name: 2024-01-31\n", " is 2024-01-31: .* string; put text .* in quotes, and dates"),
        (GOOD + "max_shard_size: potatoes\n", "max_shard_size is 'potatoes': could not parse value"),
        (GOOD + "max_shard_size: true\n", "max_shard_size must be a number, not a boolean"),
        ("share: 1\nsection: 2\n", "unknown parameter 'section'; it is a section: write `name: value` pairs below it$"),
        ("share: 1\nsection:\n", "section is null: input should be a dictionary"),
        (GOOD + "shares: {a: 1, b: .nan}\n", "shares.b is nan: it must be a finite number"),
        (GOOD + "shares: {a: true}\n", "shares.a must be a number, not a boolean"),
        ("share: true\nsection: {part: 2}\n", "share must be a number, not a boolean"),
        (GOOD + "more: &more {more: *more}\n", "unknown parameter 'more'"),
        (GOOD + '"more\\e[2J\\nerror: a": 1\n', r"unknown parameter 'more\\x1b\[2J\\nerror: a'; no stage reads it$"),
    ],
    ids=["latin-1", "levels", "digits", "twice", "star", "twice in a section", "infinite", "infinite text", "null",
         "directories", "a name in use", "a number", "a date", "of a later stage",
         "boolean of a later stage", "no section", "empty section",
         "not finite in a mapping", "boolean in a mapping", "boolean", "circle", "control characters"],
)  # fmt: skip
def test_what_is_wrong_is_said(path: Path, content: str | bytes, message: str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(StageError, match=message):
        load_params(Params, path=path)


@pytest.mark.parametrize("override", ["{part: 1, part: 2}", "[" * 1_500, "{part: " + "9" * 5_000 + "}", "\udcff"])
def test_what_is_wrong_in_the_environment_is_said(path: Path, override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(GOOD)
    monkeypatch.setenv(params_file.RUNTIME, override)
    with pytest.raises(StageError, match=r"^PIPELINE_RUNTIME is '.*it must contain values of the section `runtime`"):
        load_params(Params, path=path)


def test_the_page_of_all_parameters_is_what_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter has a docstring, too: the command fails without it."""
    monkeypatch.chdir(REPO)
    assert parameters.PAGE.read_text() == parameters.page(), "run `make parameters`"
    assert parameters.describe("Length of a row, in tokens. null: none. Why. x: it is x.", ["x"]) == (
        "tokens", "Length of a row. null: none. x: it is x."
    )  # fmt: skip
