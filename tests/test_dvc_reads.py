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
from typing import Any

import pytest
from dvc.repo import Repo

from tests.project import REPO, Project, run_here

pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep:DeprecationWarning")  # of what DVC uses

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
    """A project as after `dvc repro organize`."""
    project = Project(tmp_path_factory.mktemp("dvc_reads") / "project")
    (project / "data/raw").mkdir(parents=True)
    (project / ".dvc").mkdir()
    for name in ("dvc.yaml", "params.yaml", ".dvcignore", ".dvc/config", ".gitignore", "data/.gitignore"):
        shutil.copy(REPO / name, project / name)
    (project / "stages").symlink_to(REPO / "stages")
    (project / "data/raw/a.txt").write_text("a")
    subprocess.run(["git", "init", "-q"], cwd=project.path, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.path)
        run_here("organize")
        Repo().commit("organize", force=True)
    return project


@pytest.fixture
def organized(_organized: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of it, as the current directory."""
    project = _organized.copy(tmp_path / "project")
    monkeypatch.chdir(project.path)
    return project


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


NOTICED = {"organize": [{"changed deps": {"data/raw": "modified"}}]}
"""What `dvc status` says of a change."""

STATUS_OF_EACH = """
import json, os, signal, sys
from pathlib import Path
from dvc.repo import Repo

def end(*arguments):
    print(json.dumps("waits"), flush=True)
    os._exit(0)

signal.signal(signal.SIGALRM, end)
moves = json.load(sys.stdin)
for name, place in moves:
    if name == moves[-1][0]:
        signal.alarm(2)  # all others together take less
    Path(name).rename(place)
    try:
        print(json.dumps(Repo().status(targets=["organize"])), flush=True)
    except Exception as error:
        print(json.dumps(str(error)), flush=True)
    Path(place).rename(name)
"""


@as_user
def test_trap_04_dvc_stops_where_the_docs_state(organized: Project, tmp_path: Path) -> None:
    """At pipes, devices, loops, sockets and files without permission DVC waits or fails, and the guide says so."""
    away = tmp_path / "x/away/raw"
    away.mkdir(parents=True)
    messages = {name: message for name, message in obstacles(away).items() if message}
    names = ["a.txt", *messages, "pipe.txt"]
    (away / "a.txt").write_text("another")
    (organized / "data/raw/folder").mkdir()
    given = json.dumps([(str(away / name), str(organized / "data/raw" / name)) for name in names])
    output = organized.run(*AS_USER, "bash", "-c", 'python -c "$CODE" <<< "$GIVEN"', CODE=STATUS_OF_EACH, GIVEN=given)
    modified, *found, last = [json.loads(line) for line in output.splitlines()]
    assert (modified, last) == (NOTICED, "waits")
    docs = " ".join((REPO / "docs/data.md").read_text().split())
    for message, found_message in zip(messages.values(), found, strict=True):
        assert message in str(found_message)
        assert message in docs


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
    assert " 1  file " in organized.run(*AS_USER, "dvc", "repro", "--force", "organize")


def test_trap_31_every_edit_of_a_raw_file_is_noticed(organized: Project) -> None:
    """Also of files that are named like temporary files, caches or outputs."""
    new = organized / "new.txt"
    new.write_text("new")
    for name in ("ab.txt", "notes.tmp/a.txt", "b.tmp", "dvc_plots/a.txt", "__pycache__/a.txt", "cache-x.arrow",
                 ".venv/a.txt", "outputs/a.tmp", "logs/a.txt"):  # fmt: skip
        path = organized / "data/raw" / name
        path.parent.mkdir(exist_ok=True)
        new.rename(path)
        assert Repo().status(targets=["organize"]) == NOTICED, name
        path.rename(new)


def test_trap_31_dvc_passes_over_what_a_killed_stage_leaves() -> None:
    ignore = Repo(str(REPO)).dvcignore
    for name in (
        "data/splits.tmp/a", "data/splits.x1y2.tmp/a", "data/extract.json.tmp", "data/extract.json.x1y2.tmp",
        "data/tokens/train.tmp/a", "data/tokens/train.x1y2.tmp/a", "outputs/plan.json.x1y2.tmp", "outputs/report.tmp/a",
        "outputs/test/run.json.x1y2.tmp", "outputs/test/model.x1y2.tmp/a", "outputs/test/checkpoints/a",
        "data/corpus/cache-1.arrow", "data/tokens/train/cache-1.arrow", "models/__pycache__/a.pyc", "data/.reuse/a",
        "evals/.public.lock", "models/.mine.lock",
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
    for kind in ("copy", "hardlink", "symlink"):
        (organized / ".dvc/config.local").write_text(f"[cache]\n    dir = {tmp_path}/cache\n    type = {kind}\n")
        Repo().add("data/raw")
        path = organized / "data/raw/folder/c.txt"
        assert (path.is_symlink(), path.stat().st_nlink == 2) == (kind == "symlink", kind == "hardlink")
        (organized / "data/raw/outside.txt").symlink_to(organized / "params.yaml")
        run_here("organize")
        (organized / "data/raw/outside.txt").unlink()
        summary = organized.json("data/splits/summary.json")
        assert summary["files"] == 4
        assert summary["passed_over"] == [{"path": "outside.txt", "reason": "link that leaves the directory"}]


def test_files_that_dvc_checks_out_cannot_change_the_store(organized: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """What DVC leaves in the workspace is a file of its own, or read-only."""
    printed: dict[str, str] = {}

    def run_stage(executable: str, command: str, **options: Any) -> None:
        stage = command.removeprefix("exec python -m stages.")
        printed[stage] = run_here(stage)

    monkeypatch.setattr("dvc.stage.run._run", run_stage)  # in place of a shell
    organized.set(num_splits=4, runtime={"num_workers": 1})
    for number in range(12):
        (organized / f"data/raw/{number}.txt").write_text(f"text {number}")
    for round_number, cache_type in enumerate(("reflink,copy", "reflink,copy", "hardlink")):
        (organized / ".dvc/config.local").write_text(f"[cache]\n    type = {cache_type}\n")
        (organized / f"data/raw/added {round_number}.txt").write_text(f"added {round_number}")
        Repo().reproduce("extract")
        assert re.search(f"{'[123]' if round_number else '0'} of 4  splits reused", printed["extract"])
        entries = {path.stat().st_ino for path in organized.path.glob("data/.reuse/*/file")}
        assert len(entries) > 4 * bool(round_number)
        corpus = [path.stat() for path in organized.path.glob("data/corpus/*.arrow")]
        assert len(corpus) == 4
        assert [file for file in corpus if file.st_ino in entries and file.st_mode & 0o222] == []
    assert organized.run("git", "status", "--porcelain", "--untracked-files=all", "data") == "?? data/.gitignore\n"
