"""The stage `organize`: which files are read, and how they and their parts are divided into splits."""

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stages.base import publish
from stages.base.errors import StageError
from stages.organize import NUM_LISTED, WRITTEN, OrganizeParams, OrganizeRuntime, organize
from stages.splits import assignment, parts, tree
from stages.splits import manifests as splits
from stages.work import reuse
from tests.corpus import with_processes
from tests.project import REPO, as_nobody, start_stage, wait_for

PATHS = st.sets(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), max_size=60)


def params_of(root: Path | str, num_splits: int = 4) -> OrganizeParams:
    return OrganizeParams(num_splits=num_splits, raw_dir=str(root))


def run(root: Path, num_splits: int = 4, num_workers: int = 1, **sizes: int) -> dict[str, bytes]:
    """Organize `root`; the files of the result by name."""
    target = root.parent / "splits"
    runtime = with_processes(OrganizeRuntime(num_workers=num_workers))
    organize(params_of(root, num_splits), runtime, target, **sizes)
    return {path.name: path.read_bytes() for path in target.iterdir()}


def summary(result: dict[str, bytes]) -> Any:
    return json.loads(result[splits.SUMMARY])


def skipped(result: dict[str, bytes]) -> dict[str, str]:
    return {entry["path"]: entry["reason"] for entry in summary(result)["passed_over"]}


def entries_in(result: dict[str, bytes]) -> list[dict[str, Any]]:
    """The entries of all manifests, in the order of their paths and places."""
    lines = b"".join(content for name, content in result.items() if name != splits.SUMMARY).splitlines()
    return sorted(map(json.loads, lines), key=lambda entry: (entry["path"], entry.get("part", {}).get("start", 0)))


def selected(result: dict[str, bytes]) -> list[str]:
    return [entry["path"] for entry in entries_in(result)]


def put(root: Path, *names: str, **contents: str) -> None:
    """Write files; each of those without a content has its name as content."""
    for name, content in {**dict(zip(names, names, strict=True)), **contents}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path / "raw", **{"a.txt": "a"})
    return tmp_path / "raw"


@settings(max_examples=50)
@given(PATHS, st.integers(1, 30))
def test_trap_01_counts_differ_by_at_most_one(paths: set[str], num_splits: int) -> None:
    """The number of files and parts of a split."""
    counts = np.bincount(assignment.assign(sorted(paths), num_splits), minlength=num_splits)
    assert counts.sum() == len(paths)
    assert counts.max() - counts.min() <= 1


@settings(max_examples=50)
@given(PATHS, st.text(st.characters(codec="utf-8"), min_size=9, max_size=9), st.integers(1, 30))
def test_trap_01_one_added_file_moves_fewer_than_num_splits_others(
    paths: set[str], added: str, num_splits: int
) -> None:
    """The assignment depends on the paths alone."""
    before, after = sorted(paths), sorted(paths | {added})
    old = dict(zip(before, assignment.assign(before, num_splits).tolist(), strict=True))
    new = dict(zip(after, assignment.assign(after, num_splits).tolist(), strict=True))
    assert sum(old[path] != new[path] for path in before) < num_splits


def test_trap_01_the_assignment_never_changes() -> None:
    """Other numbers here would move every file of every user."""
    names = sorted(f"{index}.txt" for index in range(12))
    assert assignment.assign(names, 4).tolist() == [2, 3, 0, 2, 1, 0, 0, 3, 2, 3, 1, 1]


def test_trap_01_directory_order_and_workers_change_nothing(tmp_path: Path) -> None:
    names = [f"{directory}/{name}.txt" for directory in "ab" for name in range(20)]
    results = []
    for place, order, num_workers in (("here", names, 1), ("there/deeper", names[::-1], 2)):
        put(tmp_path / place / "raw", *order)
        results.append(run(tmp_path / place / "raw", num_workers=num_workers, files_per_task=7))
    assert results[0] == results[1]
    assert selected(results[0]) == sorted(names)


def test_trap_02_files_are_selected_by_suffix(root: Path) -> None:
    """By the end of the name, in any letter case. The others are listed with a reason, and hidden ones too."""
    output = organize(params_of(root), OrganizeRuntime(num_workers=1), root.parent / "splits")
    assert output.endswith(" 0  skipped")
    read = ["x/a.txt", "y/a.txt", "B.JSON", "C.YML", "D.Txt", "e.JsonL.GZ", "f.csv.zst", "g.ndjson", "h.md"]
    other = ["b.ORC", "c/d.orc", "e.tar.gz", "README", "f.pdf", "g.docx", "txt", "a.txt.bz2", "archive.gz"]
    put(root, *read, *other, ".hidden.txt", ".git/a.txt")
    result = run(root)
    assert selected(result) == sorted(["a.txt", *read])
    assert skipped(result) == {**dict.fromkeys(other, "other suffix"), ".git/": "hidden", ".hidden.txt": "hidden"}
    output = organize(params_of(root, 1), OrganizeRuntime(num_workers=1), root.parent / "splits")
    (kinds,) = re.findall(" 11  skipped  +(.*): see ", output)
    assert sorted(kinds.split(", ")[:3]) == ["2 x .orc", "2 x hidden", "2 x without suffix"]
    assert len(kinds.split(", ")) == 6 and kinds.endswith(", 3 of other kinds")
    assert re.search(r"1  split +100\.0% to 100\.0% of the bytes", output)


def test_trap_02_names_that_are_not_utf8_are_read_and_reported(root: Path) -> None:
    """DVC stops at them (04)."""
    odd = os.fsdecode(b"caf\xe9.txt")
    put(root, **{odd: "odd"})
    result = run(root)
    assert selected(result) == sorted(["a.txt", odd])
    assert summary(result)["names_not_utf8"] == ["caf\\xe9.txt"]
    [entry] = [
        file
        for name, content in result.items()
        if name != splits.SUMMARY
        for file in splits.read_manifest(root.parent / "splits" / name, hashlib.sha256(content).hexdigest())
        if file.path == odd
    ]
    assert tree.measure(root / entry.path) == (3, entry.digest)


@pytest.mark.parametrize("num_files", [1, 2, 5, 19, 20, 21])
@pytest.mark.parametrize("num_lines", [0, 2500])  # of a file that is cut into four parts
def test_trap_03_the_first_splits_are_empty_as_the_last_ones_are_held_out(
    root: Path, num_files: int, num_lines: int
) -> None:
    """With fewer files than splits, empty splits are valid."""
    put(root, *(f"{number}.txt" for number in range(1, num_files)))
    if num_lines:
        put(root, **{"large.jsonl": '"four words of text"\n' * num_lines})
    result = run(root, num_splits=20)
    counts = [result[f"split_{index:02d}.jsonl"].count(b"\n") for index in range(20)]
    assert sum(counts) == num_files + (4 if num_lines else 0)
    if sum(counts) < 20:
        assert counts == sorted(counts)
    assert counts[-1] > 0
    assert max(counts) - min(counts) <= 1


def test_trap_03_a_directory_without_readable_files_is_refused(root: Path) -> None:
    """The error names what to change."""
    (root / "a.txt").rename(root / "a.bin")
    with pytest.raises(StageError, match=r"contains no file that can be read \(1 x \.bin\).*\.txt"):
        run(root)
    (root / "a.bin").unlink()
    with pytest.raises(StageError, match="it is empty"):
        run(root)
    root.rmdir()
    with pytest.raises(StageError, match="is not a directory: create it"):
        run(root)
    assert not (root.parent / "splits").exists()


def test_trap_31_a_directory_that_stages_write_into_is_refused(empty_project: Path) -> None:
    """A `raw_dir` with outputs in it would be its own input."""
    put(empty_project, *(f"{name}/a.txt" for name in ("data/raw", "data/corpus", "outputs/test/model")))
    Path("link").symlink_to(empty_project)
    project = "contains the project, where stages write"
    refused = {
        "": "raw_dir is empty: name the directory", ".": project, "..": project, "data/raw/../..": project,
        "link": project, "data": "contains data/splits, where stages write",
        "outputs": "is in outputs, where stages write", "outputs/test/model": "is in outputs, where stages write",
        "data/corpus": "is in data/corpus, where stages write",
    }  # fmt: skip
    for name, message in refused.items():
        with pytest.raises(StageError, match=message):
            organize(params_of(name), OrganizeRuntime(num_workers=1))
    for name in ("data/raw", str(empty_project / "data/raw")):  # beside what stages write
        organize(params_of(name), OrganizeRuntime(num_workers=1))


def test_trap_31_the_directories_that_stages_write_are_known() -> None:
    pipeline = yaml.safe_load((REPO / "dvc.yaml").read_text())
    outs = [Path(out) for stage in pipeline["stages"].values() for out in [*stage["outs"], *stage.get("metrics", [])]]
    directories = {out if not out.suffix else out.parent for out in outs} - {Path("data")}  # which data/raw is in
    assert not [path for path in directories if not any(path.is_relative_to(place) for place in WRITTEN)]
    assert reuse.root().relative_to(Path.cwd()) in WRITTEN


def test_trap_04_links_are_followed_only_to_other_files_inside(root: Path) -> None:
    """Nothing outside `raw_dir` is read, no file twice, and each link that is not read is listed with a reason."""
    put(root, "../outside.txt", "folder/blob")
    os.mkfifo(root / "pipe.txt")
    leaves, twice = "link that leaves the directory", "link to a file that is already read"
    links = {
        "loop.txt": ("loop.txt", "broken link"), "missing.txt": ("nowhere", "broken link"),
        "top": (".", "link to a directory"), "folder/again": ("../folder", "link to a directory"),
        "up": ("..", leaves), "out.txt": ("../outside.txt", leaves), "zero.txt": ("/dev/zero", leaves),
        "same.txt": ("a.txt", twice), "snapshot.txt": ("folder/blob", ""), "twice.txt": ("folder/blob", twice),
        "picture.png": ("folder/blob", "other suffix"), "to_pipe.txt": ("pipe.txt", "not a regular file"),
    }  # fmt: skip
    for name, (target, _) in links.items():
        (root / name).symlink_to(target)
    result = run(root)
    assert selected(result) == ["a.txt", "snapshot.txt"]
    assert skipped(result) == {
        "folder/blob": "other suffix", "pipe.txt": "not a regular file",
        **{name: reason for name, (_, reason) in links.items() if reason},
    }  # fmt: skip


def test_the_summary_of_many_skipped_files_stays_small(root: Path) -> None:
    put(root, *(f"{number:02}.png" for number in range(50)), "a.txt")
    content = summary(run(root, num_listed=7))
    assert content["passed_over_counts"] == {"other suffix": 50}
    assert [each["path"] for each in content["passed_over"]] == [f"{number:02}.png" for number in range(7)]
    # As read by later stages: no list of names makes it larger than they read.
    assert NUM_LISTED * 4 * 255 < publish.LARGEST


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_trap_04_a_file_that_became_a_pipe_after_the_walk_is_reported(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`organize` never blocks."""
    (root / "a.txt").rename(root / name)
    put(root, "b.txt")
    walk = tree.walk

    def walk_then_change(*arguments: Any) -> Any:
        found = walk(*arguments)
        (root / name).unlink()
        os.mkfifo(root / name)
        return found

    monkeypatch.setattr(tree, "walk", walk_then_change)
    monkeypatch.setattr(tree, "size", lambda _: 100)  # so that a.jsonl is cut
    result = run(root, smallest_part=1)
    assert selected(result) == ["b.txt"]
    assert skipped(result) == {name: "unreadable: not a regular file"}


def measured_parts(path: Path, size: int) -> list[parts.Measured]:
    """Those that have lines."""
    tasks = parts.tasks(path, path.stat().st_size, size)
    return [part for measured in map(parts.measure, tasks) for part in measured or () if part.start < part.end]


@settings(max_examples=50)
@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=30), max_size=30),
    st.booleans(),
    st.sampled_from([1, 2, 8, 64]),
)
def test_trap_27_parts_have_each_line_once(lines: list[str], is_ended: bool, size: int) -> None:
    """Wherever a file is cut."""
    content = ("\n".join(lines) + "\n" * is_ended).encode()
    assume(not parts.is_one_document(content))  # which is not cut
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        measured = measured_parts(Path(file.name), size)
    if not content:
        assert measured == []
        return
    entries = [entry for entry in parts.join("a", measured) if entry.part]
    starts = [entry.part.start for entry in entries if entry.part]
    ends = [entry.part.end for entry in entries if entry.part]
    assert (starts[0], ends) == (0, [*starts[1:], None])
    for entry, start, end in zip(entries, starts, ends, strict=True):
        assert start == 0 or content[start - 1 : start] == b"\n"
        assert entry.part and entry.part.line == content[:start].count(b"\n") + 1
        assert (entry.size, entry.digest) == (len(content[start:end]), hashlib.sha256(content[start:end]).hexdigest())
        assert (end or len(content)) - start - len(content[start:end].splitlines(keepends=True)[-1]) <= 2 * size + 99
    # Each part has the lines that begin in its range: appended lines change the last one only.
    assert len({start // size for start in starts}) == len(starts)


def test_trap_27_one_large_file_fills_all_splits_equally(root: Path) -> None:
    lines = [json.dumps({"text": f"line {number} " * (number % 7)}) for number in range(20_000)]
    put(root, "b.txt", **{"large.jsonl": "\n".join(lines)})
    results = [run(root, num_splits=20, num_workers=number, smallest_part=1024) for number in (1, 2)]
    assert results[0] == results[1]
    content = summary(results[0])
    assert content["files"] == 3
    assert content["bytes"] == sum(path.stat().st_size for path in root.iterdir())
    assert content["formats"]["jsonl"] == {"files": 1, "bytes": (root / "large.jsonl").stat().st_size}
    sizes = [part["bytes"] for part in content["splits"]]
    assert max(sizes) < 1.4 * min(sizes)
    counts = [result.count(b"\n") for name, result in results[0].items() if name != splits.SUMMARY]
    assert max(counts) <= min(counts) + 1
    assert [sorted(part) for part in entries_in(results[0])[:2]] == [["digest", "path", "size"]] * 2


def test_trap_27_what_cannot_be_entered_in_the_middle_stays_whole(root: Path) -> None:
    """Compressed files, and other encodings than UTF-8."""
    text = "\n".join(f'"line {number} äöü"' for number in range(5000))
    lines = text.encode()
    contents = {
        "a.jsonl.gz": lines, "b.json": lines, "c.txt": lines, "d.ndjson": text.encode("utf-16"),
        "e.jsonl": text.encode("cp1252"), "f.jsonl": lines + b"\xe2\x82", "g.jsonl": lines.replace(b"\n", b" "),
        "h.ndjson": lines,
    }  # fmt: skip
    for name, content in contents.items():
        (root / name).write_bytes(content)
    result = run(root, smallest_part=1024)
    assert {entry["path"] for entry in entries_in(result) if "part" in entry} == {"h.ndjson"}
    assert {part["path"]: part["size"] for part in entries_in(result) if "part" not in part} == {
        "a.txt": 1, **{name: len(content) for name, content in contents.items() if name != "h.ndjson"}
    }  # fmt: skip


def test_trap_27_a_long_line_is_in_the_part_in_which_it_begins(tmp_path: Path) -> None:
    content = b'"a"\n"' + b"x" * (4 << 20) + b'"\n"b"'
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert [(part.start, part.end) for part in measured_parts(path, 1 << 14)] == [
        (0, len(content) - 3), (len(content) - 3, len(content))
    ]  # fmt: skip
    with path.open("rb") as file:  # its end is looked for once, and not from each part
        assert parts._line_start(file, 1 << 20, 2 << 20) == 2 << 20


def test_trap_04_unreadable_files_are_reported(public_directory: Path) -> None:
    root = public_directory / "raw"
    put(root, "good.txt", "bad.txt", "closed/a.txt")
    (root / "bad.txt").chmod(0)
    (root / "closed").chmod(0)
    with as_nobody():
        result = run(root)
    assert selected(result) == ["good.txt"]
    assert skipped(result) == dict.fromkeys(("bad.txt", "closed/"), "unreadable: Permission denied")


def test_a_changed_manifest_is_refused(root: Path) -> None:
    result = run(root)
    path = root.parent / "splits" / "split_00.jsonl"
    path.write_text("{}")
    with pytest.raises(StageError, match=r"split_00\.jsonl is damaged or was changed"):
        splits.read_manifest(path, hashlib.sha256(result["split_00.jsonl"]).hexdigest())


def test_01_after_a_kill_the_manifests_are_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, *(f"{number}.txt" for number in range(2000)))
    expected = run(root)
    monkeypatch.chdir(root.parent)
    values = yaml.safe_load((REPO / "params.yaml").read_text())
    Path("params.yaml").write_text(yaml.safe_dump({**values, "raw_dir": str(root), "num_splits": 4}))
    stage = start_stage("organize")
    wait_for(Path("data/.splits.lock").exists)
    stage.kill()
    stage.communicate()
    again = start_stage("organize")
    output = again.communicate()
    assert again.returncode == 0, output
    found = {path.name: path.read_bytes() for path in splits.SPLITS.iterdir()}
    assert [path.name for path in splits.SPLITS.parent.iterdir() if path.name.endswith(".tmp")] == []
    del found[splits.SUMMARY], expected[splits.SUMMARY]  # which names raw_dir
    assert found == expected
