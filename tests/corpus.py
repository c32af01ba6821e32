"""Raw files, the corpus made of them, and the processes that make it: for the tests of the data stages."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml
from pydantic import TypeAdapter

from stages.extract import ExtractParams, ExtractRuntime, extract
from stages.formats.limits import LIMITS, Limits
from stages.formats.rules import Rule
from stages.organize import OrganizeParams, OrganizeRuntime, organize
from stages.work.workers import Runtime
from tests.project import wait_for

NOT_RECORDS = (b"", b"{", b"[]", b"null", b'"text"', b"{}", b"\xff\xfe", b"[" * 100_000)
"""Contents of a JSON file that a stage cannot have written."""
AnyRuntime = TypeVar("AnyRuntime", bound=Runtime)

CORPUS = Path("data/corpus")
SPLITS = Path("data/splits")

PARAMS = ExtractParams(
    fallback_encoding="cp1252",
    max_rejected_files=0,
    min_chars=1,
    raw_dir="data/raw",
    records=None,
)


def put(files: dict[str, str | bytes]) -> None:
    """Write raw files, given their contents by name."""
    for name, content in files.items():
        path = Path("data/raw", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def put_numbered(num_files: int) -> None:
    """Write small text files, all different, into seven directories."""
    put({f"folder{number % 7}/{number:05d}.txt": f"text {number}" for number in range(num_files)})


def put_slow_files(num_files: int = 12, num_strings: int = 20_000) -> None:
    """Write YAML files, all different, which are slow to read, so that a test can kill a process."""
    text = yaml.safe_dump([{"key": f"value {number}"} for number in range(num_strings)])
    put({f"{number}.yaml": f"{text}- file {number}" for number in range(num_files)})


def put_large_file() -> None:
    """Write a file that is by its size worth processes, but read fast."""
    put({"large.yaml": "# no string\n" * 1_000_000})


def organize_raw(num_splits: int, raw_dir: str = PARAMS.raw_dir, **runtime: Any) -> None:
    """Assign the raw files to splits."""
    params = OrganizeParams(num_splits=num_splits, raw_dir=raw_dir)
    organize(params, OrganizeRuntime(**{"num_workers": 1, **runtime}))


def extract_raw(num_splits: int = 1, num_workers: int = 1, limits: Limits = LIMITS, **params: Any) -> dict[str, Any]:
    """Organize and extract; `records` are rules as in params.yaml. Return `data/extract.json`."""
    organize_raw(num_splits)
    params["records"] = TypeAdapter(list[Rule] | None).validate_python(params.get("records"))
    runtime = with_processes(ExtractRuntime(num_workers=num_workers, reuse_gib=1))
    extract(dataclasses.replace(PARAMS, **params), runtime, limits)
    metrics: dict[str, Any] = json.loads(Path("data/extract.json").read_text())
    return metrics


def extract_file(name: str, content: str | bytes, *rules: dict[str, Any], **params: Any) -> list[Any]:
    """The rows of a corpus of one file: documents as strings, conversations as dictionaries."""
    shutil.rmtree("data", ignore_errors=True)
    put({name: content})
    extract_raw(records=list(rules) or None, **params)
    return read_rows()


def read_rows() -> list[Any]:
    """The rows of the corpus: documents as strings, conversations as dictionaries."""
    import datasets

    rows = datasets.load_from_disk(str(CORPUS)).to_list()
    assert all((row["text"] is None) != (row.get("messages") is None) for row in rows)
    return [json.loads(row["messages"]) if row["text"] is None else row["text"] for row in rows]


def write_params_of_extract(num_workers: int) -> None:
    """Write PARAMS into params.yaml, for a process that runs the stage."""
    runtime = {"num_workers": num_workers, "reuse_gib": 1}
    Path("params.yaml").write_text(yaml.safe_dump({**dataclasses.asdict(PARAMS), "runtime": runtime}))


def with_processes(runtime: AnyRuntime) -> AnyRuntime:
    """The same, but more than one worker means processes however small the work is."""
    return runtime if runtime.num_workers == 1 else _with_min_bytes(runtime, 0.0)


def in_this_process(runtime: AnyRuntime) -> AnyRuntime:
    """The same without processes, however much work it is."""
    return _with_min_bytes(runtime, math.inf)


def _with_min_bytes(runtime: AnyRuntime, num_bytes: float) -> AnyRuntime:
    kind = type(runtime)
    other: Any = type(kind.__name__, (kind,), {"min_bytes": num_bytes})
    changed: AnyRuntime = other(**vars(runtime))
    return changed


def content_of(directory: Path) -> dict[str, bytes]:
    """The bytes of all files of a directory, by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """The worker processes that a stage has started."""
    return [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]


def wait_for_workers(process: psutil.Process, num_workers: int) -> list[psutil.Process]:
    """Wait until a stage has started that many worker processes, and return them."""
    wait_for(lambda: len(workers_of(process)) >= num_workers)
    return workers_of(process)
