"""What DVC does with raw files that it cannot read, how docs/data.md finds them, what DVC watches, and its links."""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from itertools import product
from pathlib import Path

import pytest
from dvc.repo import Repo

from tests.project import REPO, Project

NOT_UTF8 = os.fsdecode(b"caf\xe9")

# Root may read every file, unless it gives up these capabilities.
CAPABILITIES = "-dac_override,-dac_read_search"
AS_USER = ("setpriv", f"--bounding-set={CAPABILITIES}", f"--inh-caps={CAPABILITIES}") if os.geteuid() == 0 else ()
is_user = not AS_USER or (
    shutil.which("setpriv") is not None and subprocess.run([*AS_USER, "true"], check=False).returncode == 0
)
as_user = pytest.mark.skipif(not is_user, reason="this machine does not let root give up a capability")


@pytest.fixture(scope="module")
def _organized(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project after `dvc repro organize`."""
    project = Project(tmp_path_factory.mktemp("dvc_reads") / "project")
    (project / "data/raw").mkdir(parents=True)
    for name in ("dvc.yaml", "params.yaml", ".dvcignore", ".gitignore", "data/.gitignore"):
        shutil.copy(REPO / name, project / name)
    for name in ("stages", "scripts"):
        shutil.copytree(REPO / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    (project / ".dvc").mkdir()
    shutil.copy(REPO / ".dvc/config", project / ".dvc")
    (project / "data/raw/a.txt").write_text("a")
    project.run("git", "init", "-q")
    project.run("dvc", "repro", "organize")
    return project


@pytest.fixture
def organized(_organized: Project, tmp_path: Path) -> Project:
    return _organized.copy(tmp_path / "project")


def obstacles(raw: Path) -> dict[str, str]:
    """Put everything at which DVC hangs or fails into a directory; what DVC prints at each, "" where it hangs."""
    outside = raw.parent.parent.parent / "outside"
    outside.mkdir()
    (raw / "folder").mkdir()
    pipes = ("pipe.txt", "folder/a [b]*\\ .txt", "folder/white space ")
    for pipe in (outside / "pipe", *(raw / name for name in pipes)):
        os.mkfifo(pipe)
    links = {"to_pipe.txt": outside / "pipe", "zero.txt": "/dev/zero", "missing.txt": "nowhere", "loop.txt": "loop.txt"}
    for name, target in links.items():
        (raw / name).symlink_to(target)
    with tempfile.TemporaryDirectory() as short:  # the path of a socket has 107 bytes at most
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(f"{short}/socket")
        shutil.move(f"{short}/socket", raw / "socket.txt")
    (raw / "folder/.dvcignore").write_text("*.csv\n")
    (raw / "closed.txt").touch(mode=0)
    (raw / NOT_UTF8).mkdir()
    (raw / NOT_UTF8 / "it's.txt").write_text("one")
    (raw / f"{NOT_UTF8}.txt").write_text("two")
    return {
        **dict.fromkeys((*pipes, "to_pipe.txt", "zero.txt"), ""),
        "missing.txt": "[Errno 2] No such file or directory",
        "loop.txt": "[Errno 40] Too many levels of symbolic links",
        "socket.txt": "[Errno 6] No such device or address",
        "closed.txt": "[Errno 13] Permission denied",
        "folder/.dvcignore": ".dvcignore file should not be in collected dir path",
        **dict.fromkeys((NOT_UTF8, f"{NOT_UTF8}.txt"), "'utf-8' codec can't encode character"),
    }


STATUS_OF_EACH = """
import json, shutil, sys
from pathlib import Path
from dvc.repo import Repo
for name, place in json.load(sys.stdin):
    place = Path(place)
    place.parent.mkdir(exist_ok=True)
    Path(name).rename(place)
    try:
        print(json.dumps(Repo().status(targets=["organize"])))
    except Exception as error:
        print(json.dumps(str(error)))
    place.rename(name)
"""


def status_of_each(project: Project, moves: list[tuple[Path, Path]]) -> list[object]:
    """What `dvc status` finds while one file is at another place, for each of them; in a single process."""
    given = json.dumps([(str(source), str(target)) for source, target in moves])
    output = project.run(*AS_USER, "bash", "-c", 'python -c "$CODE" <<< "$GIVEN"', CODE=STATUS_OF_EACH, GIVEN=given)
    return [json.loads(line) for line in output.splitlines()]


@as_user
def test_trap_04_dvc_stops_where_the_docs_state(organized: Project, tmp_path: Path) -> None:
    """At pipes, devices, loops, sockets and files without permission DVC waits or fails, and the guide says so."""
    away = tmp_path / "x/away/raw"
    away.mkdir(parents=True)
    messages = obstacles(away)
    fails = {name: message for name, message in messages.items() if message}
    found = status_of_each(organized, [(away / name, organized / "data/raw" / name) for name in fails])
    docs = " ".join((REPO / "docs/data.md").read_text().split())
    for message, output in zip(fails.values(), found, strict=True):
        assert message in str(output)
        assert message in docs
    shutil.move(away / "pipe.txt", organized / "data/raw/pipe.txt")
    with organized.popen("dvc", "status", "organize") as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        process.kill()


@as_user
def test_trap_04_without_what_the_guide_finds_dvc_reads_everything(organized: Project) -> None:
    """Two `find` commands name each file at which DVC waits or fails."""
    raw = organized / "data/raw"
    names = obstacles(raw)
    commands = re.findall(r"^\$ (find .*?)(?:  +#.*)?$", (REPO / "docs/data.md").read_text(), re.MULTILINE)
    output = organized.run(*AS_USER, "bash", "-c", f"{{ {'; '.join(commands)}; }} 2> errors > found || true")
    assert output == ""
    found = os.fsdecode((organized / "found").read_bytes()).splitlines()
    inside = f"{NOT_UTF8}/it's.txt"
    assert sorted(found) == sorted(f"data/raw/{name}" for name in (*names, inside))
    for path in found:
        if not (organized / path).is_dir():
            (organized / path).unlink()
    (raw / NOT_UTF8).rmdir()
    assert " 1  files " in organized.run(*AS_USER, "dvc", "repro", "--force", "organize")
    (raw / "ab.txt").write_text("new")
    assert "modified:           data/raw" in organized.run(*AS_USER, "dvc", "status", "organize")


@as_user
def test_trap_31_every_edit_of_a_raw_file_is_noticed(organized: Project) -> None:
    """Also of files that are named like temporary files, caches or outputs."""
    moves = [
        (organized / "new.txt", organized / "data/raw" / name)
        for name in ("notes.tmp/a.txt", "b.tmp", "dvc_plots/a.txt", "__pycache__/a.txt", "cache-x.arrow", ".venv/a.txt",
                     "outputs/a.tmp", "logs/a.txt")
    ]  # fmt: skip
    (organized / "new.txt").write_text("new")
    noticed = {"organize": [{"changed deps": {"data/raw": "modified"}}]}
    assert status_of_each(organized, moves) == [noticed] * len(moves)


def test_trap_31_dvc_passes_over_what_a_killed_stage_leaves() -> None:
    ignore = Repo(str(REPO)).dvcignore
    for name in (
        "data/splits.tmp/a", "data/splits.x1y2.tmp/a", "data/extract.json.tmp", "data/extract.json.x1y2.tmp",
        "data/tokens/train.tmp/a", "data/tokens/train.x1y2.tmp/a", "outputs/plan.json.x1y2.tmp", "outputs/report.tmp/a",
        "outputs/test/run.json.x1y2.tmp", "outputs/test/model.x1y2.tmp/a", "outputs/test/checkpoints/a",
        "data/corpus/cache-1.arrow", "data/tokens/train/cache-1.arrow", "models/__pycache__/a.pyc", "data/.reuse/a",
    ):  # fmt: skip
        assert ignore.is_ignored_file(str(REPO / name)), name
    inside = ("a.tmp", "x.tmp/a", "cache-1.arrow", "__pycache__/a", "dvc_plots/a", ".venv/a", "outputs/a/logs/b")
    for name, file in product(("raw", "data/other", "corpora/a"), inside):  # wherever raw_dir is
        assert not ignore.is_ignored_file(str(REPO / name / file)), (name, file)


def test_the_links_of_dvc_are_the_files(organized: Project, tmp_path: Path) -> None:
    """As docs/shared-disks.md and the doctor advise."""
    for name in ("b.txt", "same.txt", "folder/c.txt"):
        path = organized / "data/raw" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("a" if name == "same.txt" else name)
    organized.run("dvc", "cache", "dir", "--local", str(tmp_path / "cache"))
    for kind in ("copy", "hardlink", "symlink"):
        organized.run("dvc", "config", "--local", "cache.type", kind)
        organized.run("dvc", "add", "-q", "data/raw")
        path = organized / "data/raw/folder/c.txt"
        assert (path.is_symlink(), path.stat().st_nlink == 2) == (kind == "symlink", kind == "hardlink")
        (organized / "data/raw/outside.txt").symlink_to(organized / "params.yaml")
        organized.run("python", "-m", "stages.organize")
        (organized / "data/raw/outside.txt").unlink()
        summary = organized.json("data/splits/summary.json")
        assert summary["files"] == 4
        assert summary["passed_over"] == [{"path": "outside.txt", "reason": "link that leaves the directory"}]


def test_files_that_dvc_checks_out_cannot_change_the_store(organized: Project) -> None:
    """What DVC leaves in the workspace is a file of its own, or read-only."""
    organized.set(num_splits=4)
    for number in range(12):
        (organized / f"data/raw/{number}.txt").write_text(f"text {number}")
    for cache_type in ("", "reflink,copy", "hardlink"):
        if cache_type:
            organized.run("dvc", "config", "cache.type", cache_type)
        (organized / f"data/raw/added {cache_type}.txt").write_text(f"added {cache_type}")
        output = organized.run("dvc", "repro", "extract")
        assert re.search(r"[123] of 4  splits reused" if cache_type else "0 of 4  splits reused", output), output
        entries = {path.stat().st_ino for path in organized.path.glob("data/.reuse/*/file")}
        assert len(entries) > 4 * bool(cache_type)
        corpus = [path.stat() for path in organized.path.glob("data/corpus/*.arrow")]
        assert len(corpus) == 4
        assert [file for file in corpus if file.st_ino in entries and file.st_mode & 0o222] == []
    assert organized.run("git", "status", "--porcelain", "--untracked-files=all", "data") == "?? data/.gitignore\n"
