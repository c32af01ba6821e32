"""The store of results: work is not repeated, and the outputs are the same bytes."""

import contextlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import stages.extract
from stages.base import code
from stages.base.errors import StageError
from stages.extract import ExtractParams, ExtractRuntime, extract
from stages.formats.limits import LIMITS, Limits
from stages.formats.shard import SplitResult
from stages.work import reuse
from tests.corpus import (
    CORPUS,
    PARAMS,
    SPLITS,
    content_of,
    organize_raw,
    put,
    put_large_file,
    put_numbered,
    put_slow_files,
    workers_of,
    write_params_of_extract,
)
from tests.project import flip_bit, start_stage

pytestmark = pytest.mark.usefixtures("empty_project")

STORE = Path("data/.reuse")
RUNTIME = ExtractRuntime(num_workers=1, reuse_gib=1)


def run(
    num_splits: int = 4, params: ExtractParams = PARAMS, runtime: ExtractRuntime = RUNTIME, limits: Limits = LIMITS
) -> int:
    """Organize and extract; return how many splits were read."""
    organize_raw(num_splits, params.raw_dir)
    return num_splits - reused(extract(params, runtime, limits))


def reused(output: str) -> int:
    [number] = re.findall(r"(\d+) of \d+  splits reused", output)
    return int(number)


def result() -> tuple[dict[str, bytes], Any]:
    return content_of(CORPUS), json.loads(Path("data/extract.json").read_text())


def fresh_result(
    num_splits: int = 4, params: ExtractParams = PARAMS, limits: Limits = LIMITS
) -> tuple[dict[str, bytes], Any]:
    """The result of a run that finds nothing in the store."""
    shutil.rmtree(STORE)
    assert run(num_splits, params, limits=limits) == num_splits
    return result()


def test_one_file_added_to_hundreds_redoes_a_quarter_of_the_splits_on_average_at_most() -> None:
    put_numbered(500)
    assert run(20) == 20
    assert run(20) == 0
    num_redone = []
    for name in ("aaa.txt", "folder1/01000b.txt", "folder3/05000b.txt", "folder5/09000b.txt", "zzz.json"):
        before = content_of(SPLITS)
        put({name: '"added"'})
        num_redone.append(run(20))
        changed = {split for split, content in content_of(SPLITS).items() if content != before[split]}
        assert 1 <= num_redone[-1] <= len(changed - {"summary.json"})
    assert sum(num_redone) / len(num_redone) <= 20 / 4
    assert result() == fresh_result(20)


def test_trap_27_lines_appended_to_a_large_file_redo_few_splits() -> None:
    """They change its last part only."""
    lines = "".join(f'"a line of text with the number {number}"\n' for number in range(40_000))
    put({"a.jsonl": lines, "b.txt": "b"})
    assert run(20) == 20
    for appended, most in (('"one line"\n', 1), ('"three parts"\n' * 3000, 10)):
        lines += appended
        put({"a.jsonl": lines})
        assert 1 <= run(20) <= most
    assert result() == fresh_result(20)


def test_an_edited_file_redoes_its_split() -> None:
    put_numbered(40)
    run()
    put({"folder0/00000.txt": "edited"})
    assert run() == 1
    after = result()
    put({"folder0/00000.txt": "text 0"})
    assert run() == 0  # the result before the edit is still there
    put({"folder0/00000.txt": "edited"})
    assert after == fresh_result()


def test_empty_splits_are_not_counted_as_reused() -> None:
    put({"a.txt": "a", "b.txt": "b"})
    organize_raw(20)
    assert extract(PARAMS, RUNTIME).endswith(" 0 of 2  splits reused")
    assert extract(PARAMS, RUNTIME).endswith(" 2 of 2  splits reused")


def test_rejected_files_are_reused_with_their_reasons_also_after_a_failed_run() -> None:
    put_numbered(8)
    put({"bad.json": "[", "worse.yaml": "{", "wörse.json": '["\ud800'.encode(errors="surrogatepass")})
    with pytest.raises(StageError, match="3 files could not be read"):
        run()
    params = replace(PARAMS, max_rejected_files=3)
    assert run(params=params) == 0
    assert result()[1]["rejected_files"] == 3
    assert result() == fresh_result(params=params)


def test_results_depend_on_parameters_and_code_and_not_on_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    put_numbered(8)
    run()
    assert run(params=replace(PARAMS, max_rejected_files=5)) == 0
    Path("data/raw").rename("moved")
    moved = replace(PARAMS, raw_dir="moved")
    assert run(params=moved) == 0
    assert run(params=replace(moved, min_chars=2)) == 4
    assert run(params=replace(moved, fallback_encoding=None)) == 4
    assert run(params=moved, limits=Limits(num_listed=3)) == 4
    monkeypatch.setattr(code, "digest_with_packages", lambda module: "of an edit")
    assert run(params=moved) == 4


def assert_lengths(strings: Iterable[str]) -> None:
    lengths = [*map(len, strings)]
    metrics = result()[1]
    assert metrics["short_strings"] == sum(length < 20 for length in lengths)
    assert metrics["mean_characters"] == round(sum(lengths) / len(lengths))


def test_the_lengths_of_all_strings_are_counted_also_in_splits_that_are_reused() -> None:
    rng = random.Random(0)
    strings = ["é" * int(1.5 ** rng.uniform(0, 15)) for _ in range(999)]
    put({f"{number}.json": json.dumps(strings[number::9]) for number in range(9)})
    limits = replace(LIMITS, batch=100, chunk=50)  # of characters: a string that is longer is a batch of its own
    for expected in (4, 0):
        assert run(limits=limits) == expected
        assert_lengths(strings)
    put({"9.txt": "a" * 9999})
    organize_raw(4)
    output = extract(PARAMS, RUNTIME, limits)
    assert_lengths([*strings, "a" * 9999])
    short = sum(len(string) < 20 for string in strings)
    mean = result()[1]["mean_characters"]
    assert re.match(rf" +1,000  documents +[\d,]+ characters, mean {mean}, {short / 1000:.0%} below 20\n", output)
    shutil.rmtree("data/raw")
    put({"9.txt": ""})
    run(limits=limits)
    assert (result()[1]["mean_characters"], result()[1]["short_strings"]) == (None, 0)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a flipped bit": lambda entry: flip_bit(entry / "file", -20),
    "a cut file": lambda entry: os.truncate(entry / "file", 100),
    "no file": lambda entry: (entry / "file").unlink(),
    "no value": lambda entry: (entry / "value.json").unlink(),
    "half a value": lambda entry: os.truncate(entry / "value.json", 40),
    "another value": lambda entry: (entry / "value.json").write_text(
        (entry / "value.json").read_text().replace('"characters": ', '"characters": 1')
    ),
}


def moved(path: Path) -> Path:
    return path.rename(Path("outside", path.name)).absolute()


def replace_value(entry: Path, make: Callable[[Path], Any]) -> None:
    (entry / "value.json").unlink()
    make(entry / "value.json")


DAMAGES |= {
    "a link to nothing": lambda entry: (shutil.rmtree(entry), entry.symlink_to(Path("outside/planted").absolute())),
    "a link to another directory": lambda entry: entry.symlink_to(moved(entry)),
    "a link to a file": lambda entry: (entry / "file").symlink_to(moved(entry / "file")),
    "a file": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
    "a value that is a pipe": lambda entry: replace_value(entry, os.mkfifo),
    "a value that is a directory": lambda entry: replace_value(entry, Path.mkdir),
    "a value that is a link to itself": lambda entry: replace_value(entry, lambda path: path.symlink_to(path.name)),
    "a value without end": lambda entry: os.truncate(entry / "value.json", 1 << 30),
}


@pytest.mark.timeout(60)
def test_a_damaged_entry_is_not_used() -> None:
    """Nor written to; an output is edited in place, too, which may be a link to the store."""
    put_numbered(100)
    assert run(20) == 20
    clean = result()
    Path("outside").mkdir()
    entries = sorted(path for path in STORE.iterdir() if path.is_dir())
    [spoilt] = [path for path in CORPUS.glob("*.arrow") if path.samefile(entries[-1] / "file")]
    with spoilt.open("r+b") as file:
        file.write(b"spoilt")
    for entry, damage in zip(entries, DAMAGES.values(), strict=False):
        damage(entry)
    around = sorted(Path("outside").rglob("*"))
    assert run(20) == len(DAMAGES) + 1
    assert result() == clean
    assert not any(path.is_symlink() for path in CORPUS.iterdir())
    assert sorted(Path("outside").rglob("*")) == around, "it was written elsewhere"
    assert run(20) == 0


def test_the_store_is_bounded_and_removes_the_least_recently_used_first() -> None:
    store = reuse.Store(STORE, int)
    for number in range(5):
        file = Path(f"file{number}")
        file.write_bytes(b"x" * 1000)
        store.put(f"key{number}", file, reuse.publish.sha256_file(file), number)
        os.utime(STORE / f"key{number}", (number, number))
    store.trim(1000)
    assert len(list(STORE.iterdir())) == 5  # their files are links: the store itself uses space for their values only
    for number in range(5):
        Path(f"file{number}").unlink()
    assert store.fetch("key1", Path("target")) == 1
    Path("target").unlink()
    abandoned = STORE / f"x{reuse._TEMPORARY}"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    store.trim(4000)
    assert sorted(path.name for path in STORE.iterdir()) == ["key1", "key3", "key4"]
    store.trim(0)
    assert list(STORE.iterdir()) == []
    store.put("key", Path(__file__), reuse.publish.sha256_file(Path(__file__)), 0)
    shutil.rmtree(STORE)
    store.trim(0)


def test_the_stage_bounds_the_store() -> None:
    put_numbered(40)
    run()
    shutil.rmtree(CORPUS)
    assert run(params=replace(PARAMS, min_chars=2), runtime=replace(RUNTIME, reuse_gib=0)) == 4
    assert len(list(STORE.iterdir())) <= 4


@pytest.mark.usefixtures("refuse_links")
def test_files_are_copied_where_they_cannot_be_linked() -> None:
    put_numbered(40)
    run()
    clean = result()
    flip_bit(CORPUS / "data-00002-of-00004.arrow", -20)
    assert run() == 0
    assert result() == clean


def test_two_runs_may_publish_the_same_result() -> None:
    store = reuse.Store(STORE, list[int])
    Path("file").write_text("content")
    for _ in range(2):
        store.put("key", Path("file"), reuse.publish.sha256_file(Path("file")), [1])
    assert [path.name for path in STORE.iterdir()] == ["key"]
    assert store.fetch("key", Path("target")) == [1]
    assert Path("target").read_text() == "content"


def test_experiments_in_a_copy_of_the_project_share_the_store(
    monkeypatch: pytest.MonkeyPatch, empty_project: Path
) -> None:
    put_numbered(8)
    run()
    shutil.copytree("data/raw", "copy/data/raw")
    monkeypatch.setenv("DVC_ROOT", str(empty_project))
    monkeypatch.chdir("copy")
    assert run() == 0
    assert not STORE.exists()


def test_after_an_error_only_unfinished_splits_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    put_numbered(40)
    run(12)
    clean = result()
    shutil.rmtree(STORE)
    read_files, finished = stages.extract.read_files, []

    def failing(*arguments: Any) -> SplitResult:
        if len(finished) == 5:
            raise RuntimeError
        finished.append(read_files(*arguments))
        return finished[-1]

    monkeypatch.setattr(stages.extract, "read_files", failing)
    with pytest.raises(RuntimeError):
        run(12)
    monkeypatch.setattr(stages.extract, "read_files", read_files)
    assert result() == clean, "the earlier corpus is in its place"
    assert run(12) == 12 - 5
    assert result() == clean


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_trap_21_after_a_kill_only_unfinished_splits_are_read(number: int) -> None:
    """A SIGKILL of a worker, or of the stage, then a run to the end."""
    put_slow_files(24, 1500)
    put_large_file()
    assert run(12) == 12
    clean = result()
    shutil.rmtree(STORE)
    shutil.rmtree(CORPUS)
    write_params_of_extract()
    chance = random.Random(number)
    num_kept = num_kills = 0
    while num_kills < 2:
        stage = start_stage("extract")
        workers: list[psutil.Process] = []
        while len(workers) < 2 and stage.poll() is None:  # the few splits that are left may need only one
            with contextlib.suppress(psutil.NoSuchProcess):
                workers = workers_of(stage)
        time.sleep(chance.uniform(0, 1.5))
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            (stage if chance.random() < 0.5 else chance.choice(workers or [stage])).kill()
        output, _ = stage.communicate()
        psutil.wait_procs(workers, timeout=5)
        if stage.returncode == 0:  # the kill came too late
            assert reused(output) == num_kept
            break
        num_kills += 1
        assert not CORPUS.exists() or result() == clean  # killed after it had published
        finished = [path for path in STORE.glob("*") if path.suffix != reuse._TEMPORARY]
        assert len(finished) >= num_kept
        num_kept = len(finished)
    assert run(12) == 12 - (num_kept if num_kills == 2 else 12)
    assert result() == clean
