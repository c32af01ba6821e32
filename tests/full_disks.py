"""Stages that run in this process while the disk is full, for test_full_disk.py."""

import contextlib
import importlib
import io
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from stages.base import command
from stages.work import reuse

PAGE = os.sysconf("SC_PAGE_SIZE")


class Stage(NamedTuple):
    """A stage, and what it writes."""

    arguments: list[str]
    """The module and its options."""
    outputs: list[str]


STAGES = {
    "organize": Stage(["organize"], ["data/splits"]),
    "extract": Stage(["extract"], ["data/corpus", "data/extract.json"]),
    "download": Stage(["download"], ["data/license.json", "data/model.json", "data/tokenizer.json"]),
    "pack": Stage(["pack"], ["data/tokens", "data/pack.json"]),
    "plan": Stage(["plan"], ["outputs/plan.json", "outputs/rows.txt"]),
    "train": Stage(
        ["launch"],
        [
            *("outputs/test/run.json", "outputs/history.tsv", "outputs/speed.tsv", "outputs/train_metrics.json"),
            "outputs/cost.json",
        ],
    ),
    "consolidate": Stage(["consolidate"], ["outputs/test/model"]),
    "evaluate": Stage(["evaluate"], ["outputs/metrics.json", "outputs/evaluation.json"]),
    "report": Stage(["report"], ["outputs/report"]),
}
"""In their order. Where a training has finished, launch only writes its outputs."""


def run(stage: Stage) -> tuple[int, str]:
    """Run a stage as its command does, in this process; return its exit status and its error message."""
    module, *options = stage.arguments
    main = importlib.import_module(f"stages.{module}").main
    error = io.StringIO()
    arguments, sys.argv = sys.argv, [module, *options]
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            command.run(main)
    except SystemExit as end:
        return int(end.code or 0), error.getvalue()
    finally:
        sys.argv = arguments
    return 0, error.getvalue()


def content(stage: Stage) -> dict[str, bytes]:
    """The bytes of all files that a stage has published, by path."""
    files = [file for path in map(Path, stage.outputs) for file in (path.rglob("*") if path.is_dir() else [path])]
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def clear(stage: Stage) -> None:
    """Remove the outputs of a stage, and what it could reuse."""
    for path in [*map(Path, stage.outputs), reuse.root()]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def sweep(stage: Stage, cause: str, limits: Iterable[Callable[[], contextlib.AbstractContextManager[None]]]) -> int:
    """Run a stage under one limit after the other, until it succeeds; return how often it failed.

    Each failure has exit status 2 and one line with a path, the cause and a remedy; nothing is published and nothing
    temporary stays. The next run without a limit gives the result of an undisturbed one, with what the store has.
    """
    clear(stage)
    assert run(stage) == (0, "")
    expected = content(stage)
    for number, limit in enumerate(limits):
        clear(stage)
        with limit():
            status, error = run(stage)
        if status == 0:
            assert content(stage) == expected
            return number
        [line] = error.splitlines()
        assert status == 2 and line.startswith("error: ") and cause in line, line
        path, _, remedy = line.removeprefix("error: ").partition(f": {cause}: ")
        assert remedy.endswith("and run again"), line
        roots = (Path("data").resolve(), Path("outputs").resolve(), reuse.root())
        assert any(Path(path).absolute().is_relative_to(root) for root in roots), line
        assert content(stage) == {}, line
        assert [*Path().glob("data/*.tmp"), *Path().glob("outputs/**/*.tmp")] == [], line
        assert run(stage) == (0, ""), line
        assert content(stage) == expected, line
    raise AssertionError("no limit was high enough")


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Let no file of this process grow beyond a number of bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def free_pages(disk: Path, num_pages: int) -> Iterator[None]:
    """Leave so many pages free on a tmpfs."""
    status = os.statvfs(disk)
    used = (status.f_blocks - status.f_bfree) * status.f_bsize // PAGE
    _resize(disk, (used + num_pages) * PAGE)
    try:
        yield
    finally:
        _resize(disk, 1 << 30)


def _resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
