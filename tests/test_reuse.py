"""The store of results: what is met again is not done again, and changes no byte."""

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
import yaml

from stages import extract as extract_stage
from stages.artifacts import reuse
from stages.extract import ExtractParams, ExtractRuntime, extract
from stages.organize import OrganizeParams, OrganizeRuntime, organize
from tests.conftest import REPO, Project
from tests.test_extract import content_of, put, workers_of

CORPUS = Path("data/corpus")
STORE = Path("data/.reuse")
OPTIONS = ExtractParams("cp1252", 0, 1, "data/raw", False, False)
RUNTIME = ExtractRuntime(1, 1)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project to run in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


def run(num_splits: int = 4, options: ExtractParams = OPTIONS, runtime: ExtractRuntime = RUNTIME) -> int:
    """Organize and extract; return how many splits were done anew."""
    organize(OrganizeParams(num_splits, options.raw_dir, False), OrganizeRuntime(1))
    return num_splits - reused(extract(options, runtime))


def reused(output: str) -> int:
    [number] = re.findall(r"(\d+) of \d+ splits reused", output)
    return int(number)


def result() -> tuple[dict[str, bytes], Any]:
    return content_of(CORPUS), json.loads(Path("data/extract.json").read_text())


def fresh_result(num_splits: int = 4, options: ExtractParams = OPTIONS) -> tuple[dict[str, bytes], Any]:
    """The result of a run that finds nothing in the store."""
    shutil.rmtree(STORE)
    assert run(num_splits, options) == num_splits
    return result()


def put_numbered(count: int) -> None:
    put({f"folder{number % 7}/{number:05d}.txt": f"text {number}" for number in range(count)})


@pytest.mark.parametrize(
    "added", ["folder3/05000b.txt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aaa.txt", "zzz.json"))]
)
def test_one_file_added_to_ten_thousand_redoes_at_most_a_quarter(added: str) -> None:
    put_numbered(10_000)
    assert run(20) == 20
    assert run(20) == 0
    put({added: '"added"'})
    assert 1 <= run(20) <= 5
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


def test_rejected_files_are_reused_with_their_reasons() -> None:
    put_numbered(8)
    put({"bad.json": "[", "worse.yaml": "{", "wörse.json": '["\ud800'.encode(errors="surrogatepass")})
    options = ExtractParams("cp1252", 3, 1, "data/raw", False, False)
    run(options=options)
    first = result()
    assert run(options=options) == 0
    assert result() == first
    assert first[1]["rejected_files"] == 3


def test_parameters_and_code_decide_and_the_place_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    put_numbered(8)
    run()
    assert run(options=ExtractParams("cp1252", 5, 1, "data/raw", False, False)) == 0
    Path("data/raw").rename("moved")
    assert run(options=ExtractParams("cp1252", 0, 1, "moved", False, False)) == 0
    assert run(options=ExtractParams("cp1252", 0, 2, "moved", False, False)) == 4
    assert run(options=ExtractParams(None, 0, 1, "moved", False, False)) == 4
    monkeypatch.setattr(reuse, "digest_of_code", lambda module: "of an edit")
    assert run(options=ExtractParams("cp1252", 0, 1, "moved", False, False)) == 4


def test_the_code_is_all_that_a_stage_imports_and_the_packages_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(REPO / "stages", "stages", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(reuse, "_SOURCES", Path().absolute())
    before = reuse.digest_of_code("stages.extract")
    for unused in ("train.py", "pack.py", "corpus/packing.py"):
        Path("stages", unused).write_text("changed")
    assert reuse.digest_of_code("stages.extract") == before
    for used in ("extract.py", "corpus/__init__.py", "corpus/text.py", "corpus/formats/yaml.py", "artifacts/params.py"):
        source = Path("stages", used).read_text()
        Path("stages", used).write_text(source + "# edited")
        assert reuse.digest_of_code("stages.extract") != before, used
        Path("stages", used).write_text(source)
    version = reuse.importlib.metadata.version
    monkeypatch.setattr(reuse.importlib.metadata, "version", lambda name: f"{version(name)}{'.1' * (name == 'PyYAML')}")
    assert reuse.digest_of_code("stages.extract") != before


@pytest.mark.parametrize("size", [7, 1 << 20])
def test_of_equal_strings_the_first_is_kept(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.corpus.duplicates.RANGE", size)
    monkeypatch.setattr("stages.corpus.text.BATCH", 50)
    chance = random.Random(0)
    for number in range(12):
        strings = [f"string {chance.randrange(60)}" for _ in range(20)]
        put({f"{number}.json": json.dumps(strings), "same.json": json.dumps(["same"] * 99), "empty.json": "[]"})
    run()
    everything = list(datasets.load_from_disk(str(CORPUS))["text"])
    options = dataclasses.replace(OPTIONS, deduplicate_strings=True)
    assert run(options=options) == 0  # what is stored is not yet without duplicates
    different = list(dict.fromkeys(everything))
    assert len(different) < len(everything) / 2
    assert list(datasets.load_from_disk(str(CORPUS))["text"]) == different
    clean = result()
    assert clean[1]["duplicate_strings"] == len(everything) - len(different)
    assert clean[1]["strings"] == len(different)
    assert clean[1]["characters"] == sum(map(len, different))
    assert sorted(clean[0]) == [
        *(f"data-{index:05d}-of-00004.arrow" for index in range(4)), "dataset_info.json", "state.json",
    ]  # fmt: skip
    assert clean == fresh_result(options=options)
    run(options=options, runtime=ExtractRuntime(3, 1))
    assert result() == clean
    put({"0.json": '["an edit", "same"]'})
    assert run(options=options) == 1
    assert result() == fresh_result(options=options)


def test_a_file_that_changed_leaves_no_entry() -> None:
    put({"a.txt": "old"})
    organize(OrganizeParams(1, "data/raw", False), OrganizeRuntime(1))
    put({"a.txt": "new"})
    with pytest.raises(extract_stage.StageError, match="1 files were changed"):
        extract(OPTIONS, ExtractRuntime(1, 1))
    assert not STORE.exists()


def test_what_a_failed_run_finished_is_kept() -> None:
    put_numbered(8)
    put({"bad.json": "["})
    with pytest.raises(extract_stage.StageError, match="1 files could not be read"):
        run()
    Path("data/raw/bad.json").unlink()
    assert run() <= 2
    assert result() == fresh_result()


DAMAGES = {
    "a flipped bit": lambda entry: flip(entry / "file"),
    "a cut file": lambda entry: os.truncate(entry / "file", 100),
    "no file": lambda entry: (entry / "file").unlink(),
    "no value": lambda entry: (entry / "value.json").unlink(),
    "half a value": lambda entry: os.truncate(entry / "value.json", 40),
    "another value": lambda entry: (entry / "value.json").write_text(
        (entry / "value.json").read_text().replace('"characters": ', '"characters": 1')
    ),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_not_used(damage: str) -> None:
    put_numbered(40)
    run()
    clean = result()
    DAMAGES[damage](sorted(STORE.iterdir())[0])
    assert run() == 1
    assert result() == clean
    assert run() == 0


def test_an_output_that_was_edited_in_place_is_not_used() -> None:
    """It may be a link to the store."""
    put_numbered(40)
    run()
    clean = result()
    with (CORPUS / "data-00002-of-00004.arrow").open("r+b") as file:
        file.write(b"spoilt")
    assert run() == 1
    assert result() == clean


def test_the_store_is_bounded_and_what_was_not_used_for_the_longest_time_goes_first() -> None:
    store = reuse.Store(STORE)
    for number in range(5):
        file = Path(f"file{number}")
        file.write_bytes(b"x" * 1000)
        store.put(f"key{number}", file, reuse.publish.sha256_file(file), number)
        os.utime(STORE / f"key{number}", (number, number))
    store.trim(500)
    assert len(list(STORE.iterdir())) == 5  # their files are links: the store itself takes only their values
    for number in range(5):
        Path(f"file{number}").unlink()
    assert store.fetch("key1", Path("target")) == 1
    Path("target").unlink()
    abandoned = STORE / f"{reuse._TEMPORARY}x"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    store.trim(3500)
    assert sorted(path.name for path in STORE.iterdir()) == ["key1", "key3", "key4"]
    store.trim(0)
    assert list(STORE.iterdir()) == []
    store.put("key", Path(__file__), "", None)
    shutil.rmtree(STORE)
    store.trim(0)


def test_the_stage_bounds_the_store() -> None:
    put_numbered(400)
    run()
    shutil.rmtree(CORPUS)
    runtime = ExtractRuntime(1, 0)
    assert run(options=ExtractParams("cp1252", 0, 2, "data/raw", False, False), runtime=runtime) == 4
    assert len(list(STORE.iterdir())) <= 4


def test_without_links_there_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    put_numbered(40)
    run()
    clean = result()
    flip(CORPUS / "data-00002-of-00004.arrow")
    assert run() == 0
    assert result() == clean


def test_two_runs_may_publish_the_same_result() -> None:
    store = reuse.Store(STORE)
    Path("file").write_text("content")
    for _ in range(2):
        store.put("key", Path("file"), reuse.publish.sha256_file(Path("file")), [1])
    assert [path.name for path in STORE.iterdir()] == ["key"]
    assert store.fetch("key", Path("target")) == [1]
    assert Path("target").read_text() == "content"


def test_experiments_in_a_copy_of_the_project_share_the_store(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    put_numbered(8)
    run()
    shutil.copytree("data/raw", "copy/data/raw")
    monkeypatch.setenv("DVC_ROOT", str(place))
    monkeypatch.chdir("copy")
    assert run() == 0
    assert not STORE.exists()


@pytest.mark.parametrize("cache_type", ["reflink,copy", "hardlink"])
def test_a_corpus_in_dvc_is_no_open_door_to_the_store(reproduced: Project, cache_type: str) -> None:
    """What DVC leaves in the workspace is a file of its own, or read-only."""
    reproduced.run("dvc", "config", "cache.type", cache_type)
    (reproduced / "data/raw/added.txt").write_text("added")
    assert 1 <= reused(reproduced.run("dvc", "repro", "extract")) <= 3
    entries = {path.stat().st_ino for path in reproduced.path.glob("data/.reuse/*/file")}
    assert len(entries) > 4
    corpus = [path.stat() for path in reproduced.path.glob("data/corpus/*.arrow")]
    assert len(corpus) == 4
    assert [file for file in corpus if file.st_ino in entries and file.st_mode & 0o222] == []
    assert reproduced.run("git", "status", "--porcelain", "--untracked-files=all", "data") == ""


def put_slow_files() -> None:
    text = yaml.safe_dump([{"key": f"value {number}"} for number in range(1500)])
    put({f"{number}.yaml": text + f"- file {number}" for number in range(24)})


@pytest.mark.parametrize("number", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 50))])
def test_trap_21_killed_at_any_moment_redoes_what_was_not_finished(number: int) -> None:
    """A SIGKILL of a worker, or of the stage, then a run to the end."""
    put_slow_files()
    assert run(12) == 12
    clean = result()
    shutil.rmtree(STORE)
    shutil.rmtree(CORPUS)
    Path("params.yaml").write_text(
        "deduplicate_strings: false\nfallback_encoding: cp1252\nkeep_source: false\nmax_rejected_files: 0\n"
        "min_chars: 1\nraw_dir: data/raw\n"
        "runtime: {num_workers: 2, reuse_gib: 1}\n"
    )
    chance = random.Random(number)
    num_kept = num_kills = 0
    while num_kills < 2:
        stage = psutil.Popen(
            [sys.executable, "-m", "stages.extract"], env={**os.environ, "PYTHONPATH": str(REPO)},
            stdout=-1, stderr=-1, text=True,
        )  # fmt: skip
        while len(workers := workers_of(stage)) < 2:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1.5))
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            (stage if chance.random() < 0.5 else chance.choice(workers)).kill()
        output, _ = stage.communicate()
        psutil.wait_procs(workers, timeout=5)
        if stage.returncode == 0:  # the kill came too late
            assert reused(output) == num_kept
            break
        num_kills += 1
        assert not CORPUS.exists() or result() == clean  # killed between its last deed and its end
        finished = [path for path in STORE.glob("*") if not path.name.startswith(reuse._TEMPORARY)]
        assert len(finished) >= num_kept
        num_kept = len(finished)
    assert run(12) == 12 - (num_kept if num_kills == 2 else 12)
    assert result() == clean
    assert not CORPUS.with_name("corpus.tmp").exists()
