"""Disks that several nodes share, or that are away for a while. tests/nfs has the same on NFS."""

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stages.base import publish
from stages.base.errors import StageError, Unavailable
from stages.base.file_lock import local_locks, open_lock, shared
from stages.base.shared_disk import wait_for_file
from stages.checkpointing import retention
from stages.checkpointing.layout import list_checkpoints, verify
from stages.checkpointing.lock import rank_lock, writer_lock
from tests.ranks import Ranks
from tests.trainings import Given, result, write_checkpoint

FAULTS = """\
EROFS rank 0 at os.mkdir:.*step-00000002.tmp$
ESTALE rank 1 at open:.*step-00000006.tmp/optimizer/__1_0
ETIMEDOUT rank 0 at os.rename:.*step-00000010.tmp$"""


def fail(number: int) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return function


def test_a_writer_on_another_node_is_waited_for_until_its_lock_ends_and_not_forever(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); "
        "lock.write('running, process 1 on elsewhere'); lock.flush(); print(flush=True); sys.stdin.read()"
    )
    messages: list[str] = []

    def report(message: str) -> None:
        messages.append(message)
        other.kill()  # as a file server does, which ends the lock of a node that it no longer hears of

    command = [sys.executable, "-c", code, str(tmp_path / "writer.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        with pytest.raises(StageError, match=r"another training writes into .* \(running, process 1 on elsewhere\)"):
            writer_lock(tmp_path, print, lease_seconds=0.1).__enter__()
        with writer_lock(tmp_path, report):
            pass
    assert messages == [
        "waiting up to 200 s for another training (running, process 1 on elsewhere): if its node was lost, the file "
        "server releases its lock"
    ]


def test_the_last_rank_of_a_lost_node_is_waited_for_with_a_message(tmp_path: Path) -> None:
    messages: list[str] = []
    with open_lock(tmp_path / "ranks.lock") as lock:
        shared(lock)

        def report(message: str) -> None:
            messages.append(message)
            lock.close()

        with writer_lock(tmp_path, report):
            pass
    assert re.match("waiting until the last rank of the training before has ended", messages[0]) and len(messages) == 1


def test_a_rank_whose_lock_is_lost_notices_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_lock(tmp_path) as confirm:
        confirm()
        outcomes = [fail(errno.EIO), fail(errno.EIO), fail(errno.EIO), lambda _: None]
        monkeypatch.setattr(os, "fsync", lambda descriptor: outcomes.pop(0)(descriptor))
        with pytest.raises(Unavailable, match="Input/output error"):  # the disk is away
            confirm()
        with pytest.raises(StageError, match="the lock is lost, and another training may have started") as lost:
            confirm()  # NFS fails what is written into such a file, and nothing else
    assert not isinstance(lost.value, Unavailable)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("nfs", "rw,vers=3,hard,nolock,local_lock=all,addr=10.0.0.1", "nfs mounted with nolock"),
        ("nfs", "rw,vers=3,hard,local_lock=flock,addr=10.0.0.1", "nfs mounted with local_lock=flock"),
        ("nfs", "rw,vers=3,hard,local_lock=none,addr=10.0.0.1", None),
        ("nfs4", "rw,vers=4.2,hard,local_lock=none,addr=10.0.0.1", None),
        ("lustre", "rw,localflock,lazystatfs", "lustre mounted with localflock"),
        ("lustre", "rw,flock,lazystatfs", None),
        ("ext4", "rw", None),
    ],
)
def test_locks_that_other_nodes_do_not_see_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: str, expected: str | None
) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype="autofs", opts="rw"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype=kind, opts=f"rw,relatime,{options}"),
        SimpleNamespace(mountpoint=f"{tmp_path}-other", fstype="nfs", opts="rw,nolock"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert local_locks(tmp_path / "directory") == expected


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_rename_whose_answer_was_lost_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_directory: bool
) -> None:
    """NFS sends it again, and the server does not find what it has just renamed."""
    rename = Path.rename

    def rename_twice(source: Path, target: Path) -> None:
        rename(source, target)
        rename(source, target)

    source, target = tmp_path / "source", tmp_path / "target"
    if is_directory:
        source.mkdir()
    else:
        source.write_text("new")
        target.write_text("old")
    monkeypatch.setattr(Path, "rename", rename_twice)
    publish.rename(source, target)
    assert target.is_dir() if is_directory else target.read_text() == "new"
    source.touch()
    monkeypatch.setattr(Path, "rename", fail(errno.ENOENT))
    with pytest.raises(FileNotFoundError):
        publish.rename(source, target)


def test_a_file_system_that_cannot_sync_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL))
    publish.sync_directory(tmp_path)
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        publish.sync_directory(tmp_path)


def test_a_file_is_waited_for_until_it_has_its_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    threading.Timer(0.1, lambda: path.write_text("ab")).start()
    assert wait_for_file(path, 2, 10)
    assert not wait_for_file(path, 3, 0.1)


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS its directory is not empty while a process has a file in it open."""
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    messages: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", fail(errno.ENOTEMPTY))
        retention.prune(tmp_path, 2, messages.append)
    assert "an old checkpoint is not deleted yet (" in messages[0] and "Directory not empty" in messages[0]
    retention.prune(tmp_path, 2, messages.append)
    assert len(messages) == 1 and len(list(tmp_path.glob("step-*"))) == 2


def test_a_checkpoint_is_not_damaged_while_its_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(tmp_path, 1)
    monkeypatch.setattr(publish, "read_bytes", fail(errno.ESTALE))
    with pytest.raises(OSError, match="tale"):
        verify(checkpoint)


def test_a_checkpoint_is_not_missing_while_its_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, 1)
    assert list_checkpoints(tmp_path / "no run") == []
    for name, function in (("is_file", os.path.isfile), ("is_dir", os.path.isdir)):  # as since Python 3.14
        monkeypatch.setattr(Path, name, function)
    for owner in (os, Path):  # Python 3.10's own does not call that of os
        monkeypatch.setattr(owner, "stat", fail(errno.ESTALE))
    with pytest.raises(OSError, match="tale"):
        list_checkpoints(tmp_path)


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_save_is_tried_again_while_the_disk_is_away(fresh: Given, ranks: Ranks, asynchronous: bool) -> None:
    project, reference = fresh
    project.set(runtime={"async_checkpoint": asynchronous, "timeout_minutes": 5})
    output = ranks.run(project, FAULTS, status=0)
    for fault in FAULTS.splitlines():
        error = os.strerror(getattr(errno, fault.split()[0]))
        [step] = re.findall(r"step-\d+", fault)
        assert re.search(rf"{step} is not saved yet: .*{error}.*trying again in 1 s", output)
    assert result(project) == reference


@pytest.mark.slow
def test_a_disk_that_stays_away_is_a_clear_error(fresh: Given, ranks: Ranks) -> None:
    project, reference = fresh
    project.set(runtime={"async_checkpoint": False, "timeout_minutes": 0.05})
    output = ranks.run(project, "EROFS rank 0 at os.mkdir:.*step-00000006.tmp$", status=2)
    assert "step-00000006.tmp: Read-only file system" in output and "Traceback" not in output
    ranks.run(project)
    assert result(project) == reference


def test_nodes_that_do_not_share_the_checkpoints_are_refused(fresh: Given, ranks: Ranks, tmp_path: Path) -> None:
    project, _ = fresh
    other = project.copy(tmp_path / "other").path
    output = ranks.run(project, nodes=[project.path, other], status=2)
    assert "node n2 does not see what rank 0, on node n1, writes into" in output and "Traceback" not in output
    assert list_checkpoints(project.checkpoints()) == []
