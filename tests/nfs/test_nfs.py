"""Two nodes whose project is on NFS 4.2, with one cache of attributes and names each; see tests/nfs/init.sh."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from stages.base.errors import StageError
from stages.base.file_lock import exclusive, local_locks, open_lock, read_status
from stages.base.files import FileEntry
from stages.base.shared_disk import refresh, wait_for_file
from stages.checkpointing import retention
from stages.checkpointing.layout import list_checkpoints, step_name, verify
from stages.checkpointing.lock import rank_lock, writer_lock
from tests.project import Project, make_pipeline, ranks_of, wait_for
from tests.ranks import Ranks
from tests.trainings import Given, checkpoint_manifest, result, weights

SERVER, N1, N2 = Path("/mnt/server"), Path("/mnt/n1"), Path("/mnt/n2")
SLOW = "delay rank 1 at step 5\ndelay rank 1 at step 6\ndelay rank 1 at step 7"
"""Two seconds more in each of these steps, so that the training still runs when its disk is away."""
LEASE_SECONDS = 10


@pytest.fixture
def shared(fresh: Given, tmp_path: Path) -> Iterator[tuple[Project, list[Path], dict[str, str]]]:
    """The project on NFS as node n1 sees it, where both nodes see it, and the weights of two ranks of one machine."""
    project, reference = fresh
    nodes = [node / tmp_path.name for node in (N1, N2)]  # a new name: node 2 remembers what a directory was
    yield project.copy(nodes[0]), nodes, reference
    shutil.rmtree(nodes[0], ignore_errors=True)


def wait_for_step(ranks: Ranks, step: int) -> None:
    """Wait until the checkpoint of a step is on the server."""
    try:
        wait_for(lambda: list(SERVER.glob(f"*/outputs/test/checkpoints/*/{step_name(step)}")), 100)
    except AssertionError:
        raise AssertionError(ranks.output.read_text()) from None


def export(options: str) -> None:
    options += ",fsid=0,no_root_squash,sync,no_subtree_check"
    subprocess.run(["exportfs", "-o", options, "*:/mnt/server"], check=True)
    subprocess.run(["exportfs", "-f"], check=True)


def link(node: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", node, state], check=True)


@contextmanager
def cut_off(*nodes: str) -> Iterator[None]:
    """Nodes that do not reach the server."""
    for node in nodes:
        link(node, "down")
    try:
        yield
    finally:
        for node in nodes:
            link(node, "up")


def test_a_name_that_a_node_remembers_as_missing_is_found(tmp_path: Path) -> None:
    directory = N1 / "names"
    directory.mkdir()
    other = N2 / "names/new"
    assert not other.exists()
    (directory / "new").write_text("content")
    with pytest.raises(FileNotFoundError):
        other.read_text()  # what the test is about: without it, nothing is shown
    refresh([other.parent])
    assert other.read_text() == "content"
    assert not (N2 / "names/third").exists()
    with (directory / "third").open("w") as file:
        file.write("abc")
        file.flush()
        os.fsync(file.fileno())
        assert wait_for_file(N2 / "names/third", 3, 5)
        file.write("def")
    assert (N2 / "names/third").stat().st_size == 3  # as remembered
    assert wait_for_file(N2 / "names/third", 6, 5)
    assert not wait_for_file(N2 / "names/never", 0, 1)


def test_a_checkpoint_that_another_node_has_just_published_again_is_valid() -> None:
    run = N1 / "run"
    for content in ("short", "another length"):
        path = run / "step-00000002"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        (path / "state.json").write_text(content)
        checkpoint_manifest(step=2, files={"state.json": FileEntry.of(path / "state.json")}).write(path)
        there = N2 / "run/step-00000002"
        assert [there] == list_checkpoints(there.parent)
        verify(there)
        assert (there / "state.json").stat().st_size == len(content)


def test_a_lock_and_its_status_are_seen_by_another_node() -> None:
    with writer_lock(N1 / "locks", print) as set_status:
        for status in ("running", "stopping", "running"):
            set_status(status)
            with open_lock(N2 / "locks/writer.lock") as other:
                assert re.fullmatch(rf"{status}, process \d+ on guest", read_status(other))
        with pytest.raises(StageError, match="another training writes into"):
            writer_lock(N2 / "locks", print).__enter__()
    with writer_lock(N2 / "locks", print):
        pass
    assert local_locks(N1) is None


def test_the_lock_of_a_lost_node_is_waited_for_and_lost_by_it() -> None:
    """The node, which was only cut off, notices that it no longer holds the lock before it publishes anything."""
    messages: list[str] = []
    directory = N1 / "lost"
    with rank_lock(N2 / "lost") as confirm, open_lock(N2 / "lost/writer.lock") as lock:
        confirm()
        exclusive(lock)
        lock.write("running, process 1 on n2")
        lock.flush()
        os.fsync(lock.fileno())
        with cut_off("n2"):
            start = time.monotonic()
            with writer_lock(directory, messages.append, lease_seconds=4 * LEASE_SECONDS):
                assert time.monotonic() - start < 3 * LEASE_SECONDS
        # Without a message where already opening the file waits, for a delegation of the lost node.
        assert all("waiting up to 40 s for another training (running, process 1 on n2)" in text for text in messages)
        for _ in range(2):
            with pytest.raises(StageError, match="the lock is lost, and another training may have started"):
                confirm()


def test_a_checkpoint_with_an_open_file_is_deleted_later() -> None:
    run = N1 / "open"
    for step in (1, 2, 3):
        path = run / f"step-0000000{step}"
        path.mkdir(parents=True)
        (path / "history.tsv").touch()
        checkpoint_manifest(step=step).write(path)
    messages: list[str] = []
    with (run / "step-00000001/history.tsv").open():
        retention.prune(run, 2, messages.append)
        assert re.fullmatch("warning: an old checkpoint is not deleted yet .*a later save tries it again", messages[0])
    retention.prune(run, 2, messages.append)
    assert len(messages) == 1
    assert sorted(path.name for path in run.glob("step*")) == ["step-00000002", "step-00000003"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_that_is_killed_on_one_node_continues_on_the_others(
    shared: tuple[Project, list[Path], dict[str, str]], ranks: Ranks, asynchronous: bool
) -> None:
    project, nodes, reference = shared
    project.set(runtime={"async_checkpoint": asynchronous})
    ranks.run(project, "kill rank 1 at step 5", status=-signal.SIGKILL, nodes=nodes)
    # Rank 0 is on the other node now, which must see what the first one has published: when rank 1 is killed, an
    # asynchronous save of step 4 may not have ended.
    output = ranks.run(project, nodes=nodes[::-1])
    assert re.search(f"resuming from step {'[24]' if asynchronous else '4'} of 12", output), output
    assert result(project) == reference
    assert not list(project.path.glob("outputs/test/checkpoints/*/.shared-*"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_directory_that_is_read_only_for_a_while_delays_the_save(
    shared: tuple[Project, list[Path], dict[str, str]], ranks: Ranks, asynchronous: bool
) -> None:
    project, nodes, reference = shared
    project.set(runtime={"async_checkpoint": asynchronous, "timeout_minutes": 4})
    ranks.start(project, SLOW, nodes=nodes)
    wait_for_step(ranks, 2)
    export("ro")
    try:
        wait_for(lambda: "is not saved yet" in ranks.output.read_text(), 100)
    finally:
        export("rw")
    statuses, output = ranks.wait()
    assert statuses == [0, 0], output
    assert (
        re.search("step-0000.* is not saved yet: .*: Read-only file system; trying again in 1 s", output)
        and "Traceback" not in output
    )
    assert result(project) == reference


@pytest.mark.timeout(600)
def test_a_server_that_is_away_for_a_while_is_waited_for(
    shared: tuple[Project, list[Path], dict[str, str]], ranks: Ranks
) -> None:
    project, nodes, reference = shared
    project.set(runtime={"timeout_minutes": 4})
    pids = ranks.start(project, SLOW, nodes=nodes)
    wait_for_step(ranks, 4)
    assert all(psutil.pid_exists(pid) for pid in pids)
    with cut_off("n1", "n2"):
        time.sleep(LEASE_SECONDS / 2)
    statuses, output = ranks.wait()
    assert statuses == [0, 0], output
    assert result(project) == reference


@pytest.mark.timeout(600)
def test_nodes_without_a_common_directory_are_refused(
    shared: tuple[Project, list[Path], dict[str, str]], ranks: Ranks, tmp_path: Path
) -> None:
    project, nodes, _ = shared
    elsewhere = project.copy(tmp_path / "elsewhere").path
    output = ranks.run(project, nodes=[nodes[0], elsewhere], status=2)
    assert "node n2 does not see what rank 0, on node n1, writes into" in output and "Traceback" not in output


@pytest.mark.timeout(1500)
def test_a_pipeline_with_data_checkpoints_and_cache_on_nfs_is_killed_and_resumed(ranks: Ranks, tmp_path: Path) -> None:
    project = Project(N1 / "pipeline")
    project.path.mkdir()
    make_pipeline(project)
    for command in (
        ("git", "init", "-q"),
        ("dvc", "cache", "dir", "--local", str(N1 / "cache")),
        ("dvc", "config", "--local", "cache.type", "hardlink,symlink"),
        ("dvc", "config", "--local", "core.site_cache_dir", str(tmp_path / "site")),
    ):
        project.run(*command)
    process = project.popen("dvc", "repro", "train")
    wait_for(
        lambda: list(project.path.glob("outputs/test/checkpoints/*/step-00000002")) or process.poll() is not None, 1000
    )
    for rank in ranks_of(process):
        rank.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode and "Signal 9 (SIGKILL)" in output and "Traceback" not in output, output
    local = project.copy(tmp_path / "local")
    shutil.rmtree(local / "outputs/test/checkpoints")
    ranks.run(local)
    assert "resuming from step" in project.run("dvc", "repro", "train", timeout=600)
    assert weights(project) == weights(local)
    assert (project / "data/tokens/train").is_dir() and any((N1 / "cache/files").rglob("*.dir"))
