"""Stages that run in this process while the disk is full, for test_full_disk.py."""

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from stages.work import reuse
from tests.project import run_in_process

PAGE = os.sysconf("SC_PAGE_SIZE")


OUTPUTS = {
    "organize": ["data/splits"],
    "extract": ["data/corpus", "data/extract.json"],
    "deduplicate": ["data/duplicates", "data/deduplicate.json"],
    "download": ["data/license.json", "data/model.json", "data/tokenizer.json"],
    "pack": ["data/tokens", "data/pack.json"],
    "plan": ["outputs/plan.json", "outputs/rows.txt"],
    "launch": [
        *("outputs/test/run.json", "outputs/history.tsv", "outputs/speed.tsv", "outputs/train_metrics.json"),
        "outputs/cost.json",
    ],
    "consolidate": ["outputs/test/model"],
    "evaluate": ["outputs/metrics.json", "outputs/evaluation.json"],
    "score": ["outputs/answers.jsonl", "outputs/scores.json", "outputs/tasks.json"],
    "report": ["outputs/report"],
}
"""What each stage writes. Where a training has finished, launch only writes its outputs."""


def run(stage: str) -> tuple[int, str]:
    """Run a stage in this process; return its exit status and its error message."""
    status, _, error = run_in_process(stage)
    return status, error


def content(stage: str) -> dict[str, bytes]:
    """The bytes of all files that a stage has published, by path."""
    files = [file for path in map(Path, OUTPUTS[stage]) for file in (path.rglob("*") if path.is_dir() else [path])]
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def clear(stage: str) -> None:
    """Remove the outputs of a stage, and what it could reuse."""
    for path in [*map(Path, OUTPUTS[stage]), reuse.root()]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def sweep(stage: str, cause: str, limits: Iterable[Callable[[], AbstractContextManager[None]]]) -> int:
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
