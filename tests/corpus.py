"""Raw files, the corpus made of them, and the processes that make it: for the tests of the data stages."""

import dataclasses
import io
import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import psutil
import pyarrow as pa
import yaml
from pydantic import TypeAdapter

from stages.base.dataset import Dataset
from stages.deduplicate import DeduplicateParams, DeduplicateRuntime, deduplicate
from stages.extract import ExtractParams, ExtractRuntime, extract
from stages.formats.limits import LIMITS, Limits
from stages.formats.raw_content import RawContent, Rejected
from stages.formats.rules import Rule
from stages.formats.writer import replace_surrogates
from stages.organize import OrganizeParams, OrganizeRuntime, organize
from stages.work import arrow
from stages.work.workers import Runtime
from tests.project import wait_for

NOT_RECORDS = (b"", b"{", b"[]", b"null", b'"text"', b"{}", b"\xff\xfe", b"[" * 100_000)
"""Contents of a JSON file that a stage cannot have written."""
AnyRuntime = TypeVar("AnyRuntime", bound=Runtime)

SMALL = Limits(chunk=7, batch=20)
"""With which every file is read in many pieces."""

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


def make_corpus(splits: Sequence[Sequence[Any]], sources: Sequence[str | None] = (), batch_size: int = 7) -> None:
    """Write a corpus of documents and, as dictionaries, conversations, with so many of them in a record batch."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    CORPUS.mkdir(parents=True)
    is_chat = any(isinstance(row, dict) for rows in splits for row in rows)
    features, shards = arrow.WITH_CONVERSATIONS if is_chat else arrow.TEXT, []
    for index, rows in enumerate(splits):
        with arrow.StreamWriter(CORPUS / arrow.shard_name(index, len(splits)), features) as stream:
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                for column, group in groupby(batch, key=lambda row: int(isinstance(row, dict))):
                    stream.write_column(pa.array([json.dumps(row) if column else row for row in group]), column)
            shards.append(stream.close()._replace(source=sources[index] if sources else None))
    Dataset(features, shards).write(CORPUS)


def keep_all() -> None:
    """Have `pack` skip no row of the corpus."""
    deduplicate(
        DeduplicateParams(deduplicate=None, dedup_threshold=0.8), DeduplicateRuntime(num_workers=1, reuse_gib=1)
    )


def check(*cases: tuple[Any, ...], limits: Iterable[Limits] = (LIMITS, SMALL), **params: Any) -> dict[str, Any]:
    """Extract several files as one corpus, in a piece each and in many pieces; return `data/extract.json`.

    A case is the name of a file, its content, its rows, and a regular expression for each rejection in it, as in
    "invalid JSON at line 3: unexpected". The file is in a directory of its own: 000, 001, ...
    """
    names = [f"{number:03}/{name}" for number, (name, *_) in enumerate(cases)]
    metrics: dict[str, Any] = {}
    for some in limits:
        shutil.rmtree("data", ignore_errors=True)
        put({name: content for name, (_, content, *_) in zip(names, cases, strict=True)})
        metrics = extract_raw(limits=some, **{"max_rejected_files": len(cases), **params})
        assert read_rows() == [row for _, _, rows, *_ in cases for row in rows]
        for name, (_, _, _, *expected) in zip(names, cases, strict=True):
            found = [
                f"{each['reason']} at {each['position']}: {each['detail']}"
                for each in metrics["rejections"]
                if each["path"] == name
            ]
            assert len(found) == len(expected), (name, found)
            assert all(map(re.search, expected, found)), (name, found)
    return metrics


def check_rules(*cases: tuple[Any, ...], **params: Any) -> dict[str, Any]:
    """The same, where each case begins with the rule for its file."""
    rules = [{"files": f"{number:03}/**", **rule} for number, (rule, *_) in enumerate(cases)]
    return check(*(tuple(case) for _, *case in cases), records=rules, **params)


class Memory(RawContent):
    """As much of a `RawContent` as a reader of JSON or YAML needs."""

    first_line = 1

    def __init__(self, content: str | bytes, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.begin = content.encode() if isinstance(content, str) else content

    def stream(self) -> BinaryIO:
        return io.BytesIO(self.begin)


class ListSink:
    """Keeps what a reader puts into it: the strings of each complete record, and what it rejects."""

    column = 0

    def __init__(self) -> None:
        self.records: list[list[str]] = []
        self.rejected: list[Rejected] = []
        self._current: list[str] = []

    @property
    def rows(self) -> list[str]:
        return [row for record in self.records for row in record]

    def use(self, column: int) -> None:
        self.column = column

    def add(self, strings: list[str]) -> None:
        self._current += map(replace_surrogates, strings)

    def add_text(self, stream: BinaryIO) -> None:
        self._current.append(stream.read().decode())

    def end(self, records: int = 1) -> None:
        self.records += [self._current, *[[]] * (records - 1)]
        self._current = []

    def report(self, rejected: Rejected) -> None:
        self.rejected.append(rejected)

    def reject(self, rejected: Rejected) -> None:
        self.report(rejected)
        self.drop()

    def drop(self) -> None:
        self._current = []


def read_rows() -> list[Any]:
    """The rows of the corpus: documents as strings, conversations as dictionaries."""
    import datasets

    rows = datasets.load_from_disk(str(CORPUS)).to_list()
    assert all((row["text"] is None) != (row.get("messages") is None) for row in rows)
    return [json.loads(row["messages"]) if row["text"] is None else row["text"] for row in rows]


def write_params_of_extract(dask_scheduler: str | None = None) -> None:
    """Write PARAMS into params.yaml, for a process that runs the stage with two workers, or on a cluster."""
    runtime = {"num_workers": 2, "reuse_gib": 1, "dask_scheduler": dask_scheduler}
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
