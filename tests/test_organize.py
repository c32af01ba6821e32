import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts.command import StageError
from stages.corpus import splits, tree
from stages.organize import OrganizeParams, OrganizeRuntime, materialize, organize
from tests.conftest import Project

PATHS = st.sets(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), max_size=60)


def run(root: Path, num_splits: int = 4, num_workers: int = 1, deduplicate: bool = False) -> dict[str, bytes]:
    """Organize `root`; the files of the result by name."""
    target = root.parent / "splits"
    organize(OrganizeParams(num_splits, str(root), deduplicate), OrganizeRuntime(num_workers), target)
    return {path.name: path.read_bytes() for path in target.iterdir()}


def summary(result: dict[str, bytes]) -> dict[str, dict[str, str]]:
    """`summary.json`, with a dictionary for what was passed over."""
    content = json.loads(result[splits.SUMMARY])
    return {**content, "passed_over": {entry["path"]: entry["reason"] for entry in content["passed_over"]}}


def taken(result: dict[str, bytes]) -> list[str]:
    lines = b"".join(content for name, content in result.items() if name != splits.SUMMARY).splitlines()
    return sorted(json.loads(line)["path"] for line in lines)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("a")
    return tmp_path / "raw"


@given(PATHS, st.integers(1, 30))
def test_trap_01_counts_differ_by_at_most_one(paths: set[str], num_splits: int) -> None:
    counts = np.bincount(splits.assign(sorted(paths), num_splits), minlength=num_splits)
    assert counts.sum() == len(paths)
    assert counts.max() - counts.min() <= 1


@settings(max_examples=300)
@given(PATHS, st.text(st.characters(codec="utf-8"), min_size=9, max_size=9), st.integers(1, 30))
def test_trap_01_one_added_file_moves_fewer_than_num_splits_others(
    paths: set[str], added: str, num_splits: int
) -> None:
    before, after = sorted(paths), sorted(paths | {added})
    old = dict(zip(before, splits.assign(before, num_splits).tolist(), strict=True))
    new = dict(zip(after, splits.assign(after, num_splits).tolist(), strict=True))
    assert sum(old[path] != new[path] for path in before) < num_splits


def test_trap_01_one_added_file_moves_few_of_ten_thousand() -> None:
    before = [f"folder/{index:05d}.txt" for index in range(10_000)]
    moved = [
        sum(
            a != b
            for a, b in zip(splits.assign(before, 20), splits.assign([f"_{added}", *before], 20)[1:], strict=True)
        )
        for added in range(5)
    ]
    assert max(moved) < 20
    assert any(moved)  # a cap makes some move: the assignment is not by hash alone


def test_trap_01_assignment_is_the_one_that_was_published() -> None:
    """Other numbers here would move every file of every user."""
    assert splits.assign(sorted(f"{index}.txt" for index in range(12)), 4).tolist() == [
        2,
        3,
        0,
        2,
        1,
        0,
        0,
        3,
        2,
        3,
        1,
        1,
    ]


def test_trap_01_place_order_and_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{folder}/{name}.txt" for folder in "ab" for name in range(20)]
    results = []
    for place, order, num_workers in (("here", names, 1), ("there/deeper", names[::-1], 2)):
        raw = tmp_path / place / "raw"
        for name in order:
            (raw / name).parent.mkdir(parents=True, exist_ok=True)
            (raw / name).write_text(name)
        monkeypatch.setattr("stages.organize.FILES_PER_TASK", 7)
        results.append(run(raw, num_workers=num_workers))
    assert results[0] == results[1]
    assert len(taken(results[0])) == len(names)


def test_trap_02_names(root: Path) -> None:
    for name in ("x/a.txt", "y/a.txt", "B.JSON", "C.YML", "D.Txt", "e.JsonL.GZ", "f.csv.zst", "g.ndjson", "h.md"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    for name in ("image.png", "archive.gz", "txt", "noext", "a.txt.bz2", ".hidden.txt"):
        (root / name).write_text(name)
    (root / ".git").mkdir()
    (root / ".git" / "a.txt").write_text("")
    result = run(root)
    assert taken(result) == sorted(
        ["a.txt", "x/a.txt", "y/a.txt", "B.JSON", "C.YML", "D.Txt", "e.JsonL.GZ", "f.csv.zst", "g.ndjson", "h.md"]
    )
    other = dict.fromkeys(("image.png", "archive.gz", "txt", "noext", "a.txt.bz2"), "other suffix")
    assert summary(result)["passed_over"] == {**other, ".git/": "hidden", ".hidden.txt": "hidden"}


def test_trap_02_names_that_are_no_utf8_are_taken_and_reported(root: Path) -> None:
    odd = os.fsdecode(b"caf\xe9.txt")
    (root / odd).write_text("odd")
    result = run(root)
    assert taken(result) == sorted(["a.txt", odd])
    assert json.loads(result[splits.SUMMARY])["names_not_utf8"] == ["caf\\xe9.txt"]
    [entry] = [
        file
        for name, content in result.items()
        if name != splits.SUMMARY
        for file in splits.read_manifest(root.parent / "splits" / name, digest_of(content))
        if file.path == odd
    ]
    assert tree.measure(root / entry.path) == (3, entry.digest)


def digest_of(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def test_trap_03_fewer_files_than_splits(root: Path) -> None:
    result = run(root, num_splits=3)
    assert sorted(result) == ["split_00.jsonl", "split_01.jsonl", "split_02.jsonl", "summary.json"]
    assert sorted(map(len, result.values()))[:2] == [0, 0]
    assert taken(result) == ["a.txt"]


def test_trap_03_nothing_to_read(root: Path) -> None:
    (root / "a.txt").rename(root / "a.bin")
    with pytest.raises(StageError, match=r"holds no file that can be read \(1 x other suffix\).*\.txt"):
        run(root)
    (root / "a.bin").unlink()
    with pytest.raises(StageError, match="it is empty"):
        run(root)
    root.rmdir()
    with pytest.raises(StageError, match="no folder: create it"):
        run(root)
    assert not (root.parent / "splits").exists()


def test_trap_04_links_and_devices(root: Path) -> None:
    outside = root.parent / "outside.txt"
    outside.write_text("outside")
    (root / "folder").mkdir()
    (root / "folder" / "blob").write_text("blob")
    for name, target in {
        "loop.txt": "loop.txt",
        "up": "..",
        "folder/again": "../folder",
        "out.txt": "../outside.txt",
        "zero.txt": "/dev/zero",
        "missing.txt": "nowhere",
        "same.txt": "a.txt",
        "snapshot.txt": "folder/blob",
        "twice.txt": "folder/blob",
        "picture.png": "folder/blob",
    }.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "pipe.txt")
    (root / "to_pipe.txt").symlink_to("pipe.txt")
    result = run(root)
    assert taken(result) == ["a.txt", "snapshot.txt"]
    assert summary(result)["passed_over"] == {
        "folder/again": "link to a folder",
        "folder/blob": "other suffix",
        "loop.txt": "broken link",
        "missing.txt": "broken link",
        "out.txt": "link that leaves the folder",
        "picture.png": "other suffix",
        "pipe.txt": "no regular file",
        "same.txt": "link to a file that is taken already",
        "to_pipe.txt": "no regular file",
        "twice.txt": "link to a file that is taken already",
        "up": "link that leaves the folder",
        "zero.txt": "link that leaves the folder",
    }


@pytest.fixture
def public_root() -> Iterator[Path]:
    """A folder that a user without rights can reach, seen as such a user."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o777)
        (path / "raw").mkdir(mode=0o755)
        yield path / "raw"


def test_trap_04_unreadable(public_root: Path) -> None:
    for name in ("good.txt", "bad.txt", "closed/a.txt"):
        (public_root / name).parent.mkdir(exist_ok=True)
        (public_root / name).write_text(name)
    (public_root / "bad.txt").chmod(0)
    (public_root / "closed").chmod(0)
    is_root = os.geteuid() == 0
    if is_root:  # root may read everything
        os.seteuid(65534)
    try:
        result = run(public_root)
    finally:
        if is_root:
            os.seteuid(0)
        (public_root / "closed").chmod(stat.S_IRWXU)
    assert taken(result) == ["good.txt"]
    assert summary(result)["passed_over"] == dict.fromkeys(("bad.txt", "closed/"), "unreadable: Permission denied")


def test_summary_counts(root: Path) -> None:
    (root / "b.md").write_text("bcd")
    content = json.loads(run(root, num_splits=2)[splits.SUMMARY])
    assert (content["files"], content["bytes"]) == (2, 4)
    assert sorted(part["bytes"] for part in content["splits"]) == [1, 3]


def test_a_changed_manifest_is_refused(root: Path) -> None:
    result = run(root)
    path = root.parent / "splits" / "split_00.jsonl"
    path.write_text("{}")
    with pytest.raises(StageError, match=r"split_00\.jsonl was changed"):
        splits.read_manifest(path, digest_of(result["split_00.jsonl"]))


def test_of_files_with_the_same_bytes_the_first_is_taken(root: Path) -> None:
    for name, content in {"b.txt": "a", "folder/a.json": "a", "c.txt": "c", "d.md": "a "}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    (root / os.fsdecode(b"\xff.txt")).write_text("c")
    kept = run(root)
    assert len(taken(kept)) == 6
    assert json.loads(kept[splits.SUMMARY])["duplicates"] == []
    result = run(root, deduplicate=True)
    assert taken(result) == ["a.txt", "c.txt", "d.md"]
    content = json.loads(result[splits.SUMMARY])
    assert content["duplicates"] == [
        {"path": "b.txt", "of": "a.txt"},
        {"path": "folder/a.json", "of": "a.txt"},
        {"path": "\\xff.txt", "of": "c.txt"},
    ]
    assert (content["files"], content["duplicate_files"]) == (3, 3)
    assert result == run(root, deduplicate=True, num_workers=2)


@pytest.mark.parametrize("method", ["hardlink", "copy"])
def test_splits_can_be_laid_out(root: Path, method: Literal["hardlink", "copy"]) -> None:
    for name in ("x/y/a.txt", "b.json", os.fsdecode(b"caf\xe9.txt")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, errors="surrogateescape")
    (root / "x" / "blob").write_text("behind a link")
    (root / "x" / "link.txt").symlink_to("blob")
    result = run(root, 3)
    source, target = root.parent / "splits", root.parent / "materialized"
    options = OrganizeParams(3, str(root), False)
    for _ in range(2):  # what is there is replaced
        assert materialize(options, method, source, target).startswith("organize: 5 files")
    for split in range(3):
        folder = target / f"split_{split:02d}"
        found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        assert found == [Path(json.loads(line)["path"]) for line in result[f"{folder.name}.jsonl"].splitlines()]
        for path in found:
            assert not (folder / path).is_symlink()
            assert (folder / path).read_bytes() == (root / path).read_bytes()
            assert (folder / path).samefile(root / path) == (method == "hardlink")


def test_what_cannot_be_laid_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = root.parent / "splits", root.parent / "materialized"
    options = OrganizeParams(4, str(root), False)
    with pytest.raises(StageError, match=r"summary.json is missing: run `dvc repro organize`"):
        materialize(options, "copy", source, target)
    run(root)
    (root / "a.txt").write_text("b")
    with pytest.raises(StageError, match=r"a.txt was changed after organize: run `dvc repro organize`"):
        materialize(options, "hardlink", source, target)

    def link(origin: object, place: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StageError, match=r"cannot be linked \(Invalid cross-device link\): use --materialize copy"):
        materialize(options, "hardlink", source, target)
    assert not target.exists()


def test_dvc_never_takes_the_linked_files_for_its_own(reproduced: Project) -> None:
    """With `cache.type hardlink` it would make them read-only, and with them the raw files."""
    reproduced.run("dvc", "config", "cache.type", "hardlink")
    reproduced.run("python", "-m", "stages.organize", "--materialize", "hardlink")
    output = reproduced.run("dvc", "add", "data/materialized", status=1)
    assert "ignored" in output
    raw = [path for path in (reproduced / "data/raw").rglob("*") if path.is_file()]
    assert all(path.stat().st_nlink == 2 and path.stat().st_mode & 0o200 for path in raw)
    assert reproduced.run("git", "status", "--porcelain", "--untracked-files=all", "data") == ""
    assert "Running" not in reproduced.run("dvc", "repro", "extract")
