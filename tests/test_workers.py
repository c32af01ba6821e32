"""Tasks in other processes, on this machine and on a Dask cluster: the same results in the same order."""

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import distributed
import psutil
import pytest
import yaml

from stages.artifacts import reuse
from stages.artifacts.command import StageError
from stages.artifacts.reuse import Store
from stages.corpus import arrow, cluster
from stages.corpus.workers import Runtime, ordered_map
from stages.extract import ExtractParams, ExtractRuntime, extract
from stages.organize import OrganizeParams, OrganizeRuntime, organize
from tests import tasks
from tests.conftest import BIN, REPO, wait_for
from tests.test_extract import CORPUS, content_of, put, put_slow_files

LOCAL = ("--host", "127.0.0.1", "--no-dashboard", "--dashboard-address", "127.0.0.1:0")
EXECUTORS = ["processes", "dask"]


class DaskCluster(NamedTuple):
    """A scheduler and two workers, in processes and a directory of their own."""

    file: Path
    address: str


def dask(*command: str, cwd: Path) -> psutil.Popen:
    """Start `dask scheduler` or `dask worker`. `PYTHONPATH` is empty: this project is nothing that it could import."""
    with (cwd / "log").open("a") as log:
        environment = {**os.environ, "PYTHONPATH": ""}
        return psutil.Popen([BIN / "dask", *command], cwd=cwd, stdout=log, stderr=log, env=environment)


@pytest.fixture(scope="module")
def dask_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    file = elsewhere / "scheduler.json"
    where = ("--scheduler-file", str(file))
    processes = [dask("scheduler", "--port", "0", *where, *LOCAL, cwd=elsewhere)]
    processes += [dask("worker", "--nthreads", "2", *where, *LOCAL, cwd=elsewhere) for _ in range(2)]
    wait_for(lambda: file.exists() and file.read_text().endswith("}"), 60)
    address = json.loads(file.read_text())["address"]
    with distributed.Client(address) as client:
        client.wait_for_workers(2, 60)
    yield DaskCluster(file, address)
    for process in reversed(processes):
        for each in (*process.children(recursive=True), process) if process.is_running() else ():
            each.kill()
        process.wait()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project to run in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


def outputs() -> dict[str, bytes]:
    """All outputs of organize and extract."""
    return {**content_of(Path("data/splits")), **content_of(CORPUS), "": Path("data/extract.json").read_bytes()}


def run(executor: str, address: str | None = None, *, deduplicate: bool = False) -> dict[str, bytes]:
    """Organize and extract with nothing kept of earlier runs; return all outputs."""
    shutil.rmtree("data/.reuse", ignore_errors=True)
    where = {"executor": executor, "dask_scheduler": address}
    organize(OrganizeParams(2, "data/raw", False), OrganizeRuntime(1, **where))
    extract(ExtractParams("cp1252", 0, 1, "data/raw", deduplicate, False), ExtractRuntime(1, 1, **where))
    return outputs()


def start_extract(**runtime: Any) -> "subprocess.Popen[str]":
    """Start the stage as DVC does, with nothing kept of earlier runs."""
    shutil.rmtree("data/.reuse", ignore_errors=True)
    content = yaml.safe_load((REPO / "params.yaml").read_text()) | {"deduplicate_strings": True}
    content["runtime"] |= runtime | {"executor": "dask"}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-W", "error", "-m", "stages.extract"]
    return psutil.Popen(command, env={**os.environ, "PYTHONPATH": str(REPO)}, text=True, stderr=subprocess.PIPE)


def task_processes() -> list[psutil.Process]:
    """The processes that Dask workers started for tasks, whoever is the parent of those by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "cluster.serve()" in " ".join(process.cmdline()) and process.cwd() == os.getcwd():
                found.append(process)
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
def test_results_wait_for_their_turn(executor: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Few results are held at once, and they come in the order of the tasks."""
    runtime = Runtime(2, executor=executor)
    assert list(ordered_map(tasks.be_slow, range(5), runtime, ahead=1)) == [0, -1, -2, -3, -4]
    assert "task 3" in capfd.readouterr().err


def test_no_more_tasks_are_under_way_than_asked_for(tmp_path: Path, dask_cluster: DaskCluster) -> None:
    runtime = Runtime(None, executor="dask", dask_scheduler=dask_cluster.address)
    results = ordered_map(tasks.wait, [tmp_path] * 9, runtime, ahead=1)
    thread = threading.Thread(target=lambda: next(results))
    thread.start()
    wait_for(lambda: len(list(tmp_path.iterdir())) == 4)  # two threads of two workers
    time.sleep(0.5)
    assert len(list(tmp_path.iterdir())) == 4
    (tmp_path / "go").touch()
    thread.join()
    assert list(results) == [True] * 8


def test_processes_open_no_socket_and_a_local_cluster_none_to_other_machines() -> None:
    def listening() -> set[Any]:
        return {socket.laddr for socket in psutil.Process().net_connections("inet") if socket.status == "LISTEN"}

    seen, others = {}, listening()  # of other tests
    for executor in EXECUTORS:
        for _ in ordered_map(tasks.place, range(3), Runtime(2, executor=executor)):
            seen[executor] = {address.ip for address in listening() - others}
    assert seen["processes"] == set()
    assert seen["dask"] <= {"127.0.0.1"}
    assert list(Path().iterdir()) == []  # nor is anything written


def test_extract_gives_the_same_bytes_on_a_cluster(dask_cluster: DaskCluster) -> None:
    put({f"{number}.json": json.dumps(["text", f"{number}"] * number) for number in range(30)})
    put({"ümlaut.txt": "ä", os.fsdecode(b"latin\xe4.txt"): "b", "c.csv": "c"})
    expected = run("processes", deduplicate=True)
    shutil.rmtree("data/corpus")
    process = start_extract(dask_scheduler=str(dask_cluster.file))
    _, error = process.communicate(timeout=100)
    assert (process.returncode, error) == (0, "")
    assert outputs() == expected
    assert json.loads(expected[""])["duplicate_strings"] > 0
    assert {path.name for path in Path().iterdir()} == {"data", "params.yaml"}
    assert sorted(path.name for path in dask_cluster.file.parent.iterdir()) == ["log", "scheduler.json"]


def test_the_work_of_a_killed_dask_worker_is_done_by_another(dask_cluster: DaskCluster) -> None:
    put_slow_files()
    expected = run("processes")
    victims = []

    def kill() -> None:
        wait_for(lambda: list(Path("data/corpus.tmp").glob("*.arrow")))
        victims.append(task_processes()[0])
        victims[0].parent().kill()

    thread = threading.Thread(target=kill)
    thread.start()
    assert run("dask", dask_cluster.address) == expected
    thread.join()
    wait_for(lambda: victims[0] not in task_processes())  # it ended with its worker


def test_task_processes_end_with_the_stage() -> None:
    put_slow_files()
    organize(OrganizeParams(2, "data/raw", False), OrganizeRuntime(1))
    process = start_extract(num_workers=2)
    wait_for(lambda: len(list(Path("data/corpus.tmp").glob("whole-*"))) == 2)
    assert len(task_processes()) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not task_processes())
    assert not CORPUS.exists()


def test_a_task_whose_worker_is_gone_does_not_begin(tmp_path: Path) -> None:
    header = pickle.dumps(("tests.tasks", reuse.digest_of_code("tests.tasks")))
    command = [sys.executable, "-c", cluster._SERVE, str(REPO)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout
        process.stdout.close()
        process.stdin.write(header + pickle.dumps((Path.touch, tmp_path / "file")))
        process.stdin.close()
        assert process.wait(20) == 1
    assert not (tmp_path / "file").exists()


def test_errors_of_tasks_reach_the_user(dask_cluster: DaskCluster, capfd: pytest.CaptureFixture[str]) -> None:
    runtime = Runtime(None, executor="dask", dask_scheduler=dask_cluster.address)
    with pytest.raises(StageError, match=r"^the value is 1, at most 0 are allowed: lower it$"):
        list(ordered_map(tasks.fail, ["StageError", "StageError"], runtime))
    assert "a task speaks" in capfd.readouterr().err
    with pytest.raises(FileNotFoundError) as missing:
        list(ordered_map(tasks.fail, ["OSError"], runtime))
    assert missing.value.filename == "gone"
    with pytest.raises(ZeroDivisionError) as bug:
        list(ordered_map(tasks.fail, ["bug"], runtime))
    assert "tasks.py" in str(bug.value.__cause__)  # the traceback of the other process
    with pytest.raises(StageError, match=r"process of a Dask worker was killed by signal 9.*--nthreads"):
        list(ordered_map(tasks.fail, ["kill"], runtime))


def test_workers_with_other_code_or_packages_are_refused(
    dask_cluster: DaskCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "digest_of_code", lambda module: "of other versions")
    with pytest.raises(StageError, match=r"a Dask worker on \S+ finds other code or packages than the stage"):
        list(ordered_map(abs, range(2), Runtime(None, executor="dask", dask_scheduler=dask_cluster.address)))


def test_machines_that_lack_the_project_are_named(dask_cluster: DaskCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(None, executor="dask", dask_scheduler=dask_cluster.address)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/elsewhere/python")
        with pytest.raises(StageError, match=r"/elsewhere/python.*share"):
            list(ordered_map(abs, range(2), runtime))
    monkeypatch.setattr(cluster, "_ROOT", "/elsewhere")
    with pytest.raises(StageError, match=r"(?s)/elsewhere.*share.*No module named 'stages'"):
        list(ordered_map(abs, range(2), runtime))


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("tcp://127.0.0.1:9", r"tcp://127.0.0.1:9 within 1 seconds.*`dask scheduler`.*runtime.executor"),
        ("missing.json", r"missing.json.*within 1 seconds.*`dask scheduler --scheduler-file`"),
    ],
)
def test_a_scheduler_out_of_reach(scheduler: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE", 1.0)
    start = time.monotonic()
    with pytest.raises(StageError, match=message):
        list(ordered_map(abs, range(2), Runtime(None, executor="dask", dask_scheduler=scheduler)))
    assert time.monotonic() - start < 10


def test_a_cluster_without_workers_and_one_that_is_lost(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = dask("scheduler", "--port", "0", "--scheduler-file", "scheduler.json", *LOCAL, cwd=place)
    wait_for(Path("scheduler.json").exists)
    monkeypatch.setattr(cluster, "PATIENCE", 3.0)
    runtime = Runtime(None, executor="dask", dask_scheduler="scheduler.json")
    with pytest.raises(StageError, match=r"had no worker for 3 seconds.*`dask worker`"):
        list(ordered_map(abs, range(2), runtime))
    timer = threading.Timer(2, scheduler.kill)
    timer.start()
    with pytest.raises(StageError, match=r"was lost; nothing was published"):
        list(ordered_map(abs, range(2), runtime))
    scheduler.wait()


def test_dask_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(StageError, match=r"distributed is not installed: run `make setup`.*extra `dask`"):
        list(ordered_map(abs, range(2), Runtime(2, executor="dask")))


def test_what_a_lost_worker_left_is_not_written_to(tmp_path: Path) -> None:
    """The same task may run again while the lost worker still writes, or after it stored its file."""
    target, store = tmp_path / "shard", Store(tmp_path / "store")
    with arrow.StreamWriter(target, arrow.TEXT) as stream:
        store.put("key", target, stream.close().sha256, 1)
    assert store.fetch("key", target) == 1  # although it lies there, and is the stored file itself
    with arrow.StreamWriter(target, arrow.TEXT):
        assert not target.samefile(tmp_path / "store/key/file")
    assert store.fetch("key", target) == 1
