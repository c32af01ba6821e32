"""Typed parameters from `params.yaml`.

Each stage keeps its parameters as a frozen dataclass beside it; the fields are the leaves of `params.yaml` that the
stage reads, and `dvc.yaml` declares the same leaves (a test compares the two). What never changes a result is in
the `runtime` section, is read by dataclasses of its own, and is listed under `meta.runtime` in `dvc.yaml`, which
DVC does not watch. So the environment may override that section: a job sets what depends on its nodes without an edit
of the file.
"""

import dataclasses
import datetime
import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import ByteSize, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from stages.base.errors import StageError, explained
from stages.base.outputs import ExperimentName, ShardSize

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

PARAMS_FILE = Path("params.yaml")
PIPELINE_FILE = Path("dvc.yaml")
RUNTIME = "PIPELINE_RUNTIME"
"""Environment variable with values of the `runtime` section that override those of the file: a YAML mapping."""


@dataclasses.dataclass(frozen=True)
class _AfterTraining:
    """What all stages check, although only the last ones read it: a mistake is refused before the training."""

    experiment_name: ExperimentName = "default"
    max_shard_size: ShardSize = dataclasses.field(default=ByteSize(1))
    eval_samples: NonNegativeInt = 0
    task_limit: PositiveInt | None = None
    task_chat: bool = False


def load_params(cls: type[T], section: str | None = None, path: Path = PARAMS_FILE) -> T:
    """Read the fields of the dataclass `cls` from `params.yaml`, or from one `section` of it.

    Types are applied on load: DVC writes `-S lr=0.00002` as `2e-05`, which YAML 1.1 reads as a string.

    Raises:
        StageError: a parameter is missing, unknown, ill-typed or out of range; one line for each, with the key, the
            value and what is allowed.
    """
    values = read_values(path)
    _check_names(values, path)
    if section is not None:
        values = values.get(section) or {}
    names = {field.name for field in dataclasses.fields(cls)}
    place = _place(path, section)
    adapter: TypeAdapter[T] = TypeAdapter(cls, config=None)
    prefix = (section,) if section else ()
    read: dict[str, Any] = {}
    try:
        if section is None:
            late = {each.name: values[each.name] for each in dataclasses.fields(_AfterTraining) if each.name in values}
            read = dataclasses.asdict(TypeAdapter(_AfterTraining).validate_python(late))
        # Not strict: the string "2e-05" becomes a float. Names of other stages are left out here, not refused.
        result = adapter.validate_python({name: value for name, value in values.items() if name in names})
    except ValidationError as error:
        lines = [_explain(place, prefix, details) for details in error.errors(include_url=False)]
        raise StageError(*lines) from None
    given = dict(flatten({section: values} if section else values))
    read |= dataclasses.asdict(result)
    if problems := [f"{place}: {problem}" for problem in _no_numbers(given, {section: read} if section else read)]:
        raise StageError(*problems)
    return result


def _no_numbers(given: Mapping[str, Any], read: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the numbers that were read of the given leaves, where pydantic is content."""
    for name, value in flatten(read):
        if isinstance(given.get(name), bool) and not isinstance(value, bool):  # which it takes for 0 and 1
            yield f"{name} must be a number, not a boolean"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {given.get(name)!r}: it must be a finite number"


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by dotted name, in order: `seed`, `fsdp.strategy`, ..."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class _Loader(yaml.SafeLoader):
    """A key that is twice in a mapping is an error, as to DVC: otherwise the last one would count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
            names.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def _parse(text: bytes, what: Path | str) -> Any:
    with explained(lambda problem: StageError(f"{what} is not valid YAML: {problem}")):
        try:
            return yaml.load(text.decode(), _Loader)
        except yaml.MarkedYAMLError as error:
            place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
            # As in `text: $.list[*].text`, within { } or not.
            is_path = error.context == "while scanning an alias" or str(error.problem).endswith("got '['")
            remedy = "; put a value with * or [ in quotes" * is_path
            raise StageError(f"{what} is not valid YAML: {place}{error.problem}{remedy}") from None


def read_values(path: Path) -> dict[str, Any]:
    """All that is in `params.yaml`, as it is there, with the runtime of the environment.

    Raises:
        StageError: it is missing, or not valid.
    """
    try:
        values = _parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise StageError(f"{path} is missing: run from the root of the project") from None
    if not isinstance(values, dict):
        raise StageError(f"{path} must contain `name: value` pairs")
    if override := os.environ.get(RUNTIME):
        try:
            values["runtime"] = {**(values.get("runtime") or {}), **_parse(os.fsencode(override), RUNTIME)}
        except (TypeError, StageError):
            raise StageError(
                f"{RUNTIME} is {override!r}: it must contain values of the section `runtime`, "
                "such as {nproc_per_node: 4}"
            ) from None
    return values


def _check_names(values: Mapping[str, Any], path: Path) -> None:
    """Refuse names that no stage reads: `dvc.yaml` beside `params.yaml` is the register of all names."""
    pipeline = path.with_name(PIPELINE_FILE.name)
    if not pipeline.exists():
        return
    stages = _parse(pipeline.read_bytes(), pipeline)["stages"].values()
    known = {name for stage in stages for entry in stage.get("params", []) for name in _names(entry)}
    known |= {f"runtime.{name}" for stage in stages for name in stage.get("meta", {}).get("runtime", [])}
    # Without this a misspelled name would leave the old value in force, and the run would look right.
    unknown = [*_unknown(values, known)]
    if unknown:
        lines = (f"{_place(path, name)}: unknown parameter {name!r}{_suggest(name, known)}" for name in unknown)
        raise StageError(*lines)


def _unknown(values: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        # Only into sections that there are: with its aliases, a small file may contain any number of others. One whose
        # lines are all comments is null.
        if isinstance(value, dict | None) and any(each.startswith(f"{name}.") for each in known):
            yield from _unknown(value or {}, known, f"{name}.")
        elif name not in known:
            yield name


def _names(entry: str | dict[str, list[str]]) -> list[str]:
    """The parameters of an entry of `params`: one, or those of a file."""
    return [entry] if isinstance(entry, str) else [name for names in entry.values() for name in names]


def _place(path: Path, name: str | None) -> str:
    """Where a parameter, or a section, is set."""
    is_overridden = name is not None and name.partition(".")[0] == "runtime" and os.environ.get(RUNTIME)
    return f"{path} with ${RUNTIME}" if is_overridden else str(path)


def _suggest(name: str, known: set[str]) -> str:
    if any(each.startswith(f"{name}.") for each in known):
        return "; it is a section: write `name: value` pairs below it"
    # Sorted, because a set has another order in each process, and of equally close names the first is suggested.
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "; no stage reads it"


def _explain(path: str, prefix: tuple[str, ...], details: Any) -> str:
    # A union such as `int | None` adds the names of its members to the location: keep what names the parameter.
    name = ".".join([*prefix, *(str(part) for part in details["loc"])])
    if details["type"] == "missing":
        return f"{path}: parameter {name!r} is missing"
    message = details["msg"].removeprefix("Value error, ")  # pydantic's prefix to a ValueError of a validator
    if not details["loc"]:  # a check over several parameters, which names them itself
        return f"{path}: {message}"
    if details["type"] == "unexpected_keyword_argument":
        return f"{path}: {name}: there is no such key; docs/formats.md has all of them"
    is_scalar = details["type"].startswith("string") and isinstance(details["input"], (int, float, datetime.date))
    remedy = "; put text that looks like a number in quotes, and dates, yes and no" * is_scalar
    remedy += "; docs/parameters.md says what it is" * (details["type"] == "string_pattern_mismatch")
    return f"{path}: {name} is {as_yaml(details['input'])}: {message[0].lower()}{message[1:]}{remedy}"


def as_yaml(value: Any) -> str:
    """A value as people write it in the file."""
    if isinstance(value, datetime.date):
        return str(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
