"""Tasks in other processes, on this machine and on a Dask cluster: the same results in the same order."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import distributed
import psutil
import pytest

from stages.base.errors import StageError
from stages.base.process import INTERRUPTS, raise_on_interrupt
from stages.deduplicate import DeduplicateParams, DeduplicateRuntime, deduplicate
from stages.extract import ExtractRuntime, extract
from stages.work import arrow, cluster, workers
from stages.work.reuse import Store
from stages.work.skipped import DUPLICATES
from stages.work.workers import Runtime, ordered_map, threaded_map
from tests import tasks
from tests.corpus import (
    CORPUS,
    PARAMS,
    SPLITS,
    content_of,
    organize_raw,
    put,
    put_large_file,
    put_slow_files,
    write_params_of_extract,
)
from tests.pipeline import DATA_STAGES
from tests.project import BIN, REPO, is_alive, run_python, start_stage, wait_for

pytestmark = pytest.mark.usefixtures("empty_project")

LOCAL = ("--host", "127.0.0.1", "--no-dashboard", "--dashboard-address", "127.0.0.1:0")
EXECUTORS = ["processes", pytest.param("dask", marks=pytest.mark.slow)]


class DaskCluster(NamedTuple):
    """A scheduler and two workers, in processes and a directory of their own."""

    file: Path
    address: str


def dask(*command: str, cwd: Path) -> psutil.Popen:
    """Start `dask scheduler` or `dask worker`. `PYTHONPATH` is empty, so that it cannot import this project."""
    with (cwd / "log").open("a") as log:
        environment = {**os.environ, "PYTHONPATH": ""}
        return psutil.Popen([BIN / "dask", *command], cwd=cwd, stdout=log, stderr=log, env=environment)


@pytest.fixture(scope="module")
def dask_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    file = elsewhere / "scheduler.json"
    where = ("--scheduler-file", str(file))
    processes = [dask("scheduler", "--port", "0", *where, *LOCAL, cwd=elsewhere)]
    processes += [dask("worker", "--nthreads", "1", *where, *LOCAL, cwd=elsewhere) for _ in range(2)]
    wait_for(lambda: file.exists() and file.read_text().endswith("}"), 60)
    address = json.loads(file.read_text())["address"]
    with distributed.Client(address) as client:
        client.wait_for_workers(2, 60)
    yield DaskCluster(file, address)
    for process in reversed(processes):
        for each in (*process.children(recursive=True), process) if process.is_running() else ():
            each.kill()
        process.wait()


def outputs() -> dict[str, bytes]:
    """All outputs of organize, extract and deduplicate."""
    found = {f"{path}/{name}": data for path in (SPLITS, CORPUS, DUPLICATES) for name, data in content_of(path).items()}
    return {**found, "": Path("data/extract.json").read_bytes()}


def run(address: str | None = None) -> dict[str, bytes]:
    """Organize, extract and deduplicate with nothing kept of earlier runs; return all outputs."""
    shutil.rmtree("data/.reuse", ignore_errors=True)
    organize_raw(num_splits=2, dask_scheduler=address)
    extract(PARAMS, ExtractRuntime(num_workers=1, reuse_gib=1, dask_scheduler=address))
    find_duplicates(address)
    return outputs()


def find_duplicates(address: str | None) -> None:
    runtime = DeduplicateRuntime(num_workers=1, reuse_gib=1, dask_scheduler=address)
    deduplicate(DeduplicateParams("near", 0.8), runtime)


def dask_runtime(dask_cluster: DaskCluster) -> Runtime:
    return Runtime(num_workers=None, dask_scheduler=dask_cluster.address)


def task_processes() -> list[psutil.Process]:
    """The Dask workers, of any cluster, that have begun a task of this test."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and "spawn_main" in " ".join(process.cmdline())
                and process.cwd() == os.getcwd()
            ):
                found.append(process)
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
def test_results_come_in_the_order_of_the_tasks(executor: str, request: pytest.FixtureRequest) -> None:
    """Few results are in memory at a time, and they have the order of the tasks."""
    runtime = Runtime(num_workers=2)
    if executor == "dask":
        runtime = dask_runtime(request.getfixturevalue("dask_cluster"))
    assert list(ordered_map(tasks.be_slow, range(5), runtime, ahead=1)) == [0, -1, -2, -3, -4]


@pytest.mark.slow
def test_only_the_requested_number_of_tasks_runs_at_a_time(tmp_path: Path, dask_cluster: DaskCluster) -> None:
    runtime = dask_runtime(dask_cluster)
    results = ordered_map(tasks.wait, [tmp_path] * 9, runtime, ahead=1)
    thread = threading.Thread(target=lambda: next(results))
    thread.start()
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)  # two workers
    time.sleep(0.5)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "go").touch()
    thread.join()
    assert list(results) == [True] * 8


def test_processes_open_no_socket_and_write_nothing() -> None:
    def listening() -> set[Any]:
        return {socket.laddr for socket in psutil.Process().net_connections("inet") if socket.status == "LISTEN"}

    others = listening()  # of other tests
    for _ in ordered_map(tasks.place, range(3), Runtime(num_workers=2)):
        assert listening() <= others
    assert list(Path().iterdir()) == []


def test_a_cluster_is_asked_for_the_code_of_all_data_stages() -> None:
    """And for that of `score` that reads the training documents."""
    modules = [*DATA_STAGES, "scoring.contamination"]
    assert tuple(f"stages.{module}" for module in modules) == cluster._MODULES


@pytest.mark.slow
def test_extract_gives_the_same_bytes_on_a_cluster(dask_cluster: DaskCluster) -> None:
    put({f"{number}.json": json.dumps(["text", f"{number}"] * number) for number in range(30)})
    put({"ümlaut.txt": "ä", os.fsdecode(b"latin\xe4.txt"): "b", "c.csv": "c"})
    expected = run()
    for path in (CORPUS, "data/.reuse"):
        shutil.rmtree(path)
    write_params_of_extract(dask_scheduler=str(dask_cluster.file))
    process = start_stage("extract", "-W", "error")
    _, error = process.communicate(timeout=100)
    assert (process.returncode, error) == (0, "")
    find_duplicates(dask_cluster.address)
    assert outputs() == expected
    assert {path.name for path in Path().iterdir()} == {"data", "params.yaml"}
    assert sorted(path.name for path in dask_cluster.file.parent.iterdir()) == ["log", "scheduler.json"]


@pytest.mark.slow
def test_the_work_of_a_killed_dask_worker_is_done_by_another(dask_cluster: DaskCluster) -> None:
    put_slow_files()
    put({"large.jsonl": "".join(f'"line {number}"\n' for number in range(60_000))})
    expected = run()
    assert '"part"' in Path("data/splits/split_00.jsonl").read_text()
    victims = []

    def kill() -> None:
        wait_for(lambda: list(Path("data").glob("corpus.*.tmp/*.arrow")))
        victims.append(task_processes()[0])
        victims[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    assert run(dask_cluster.address) == expected
    thread.join()
    assert len(victims) == 1


STAGE = """
import sys
from pathlib import Path
from stages.base import command, publish
from stages.work.workers import Runtime, ordered_map
from tests import tasks

def main():
    with publish.directory(Path("out")) as directory:
        list(ordered_map(tasks.write_for_long, [directory] * 4, Runtime(2, dask_scheduler=(sys.argv + [None])[1])))

if __name__ == "__main__":
    command.run(main, "the next run continues")
"""


def start_writing(*scheduler: str) -> psutil.Popen:
    """Start a stage of two processes that write; return it when they do."""
    Path("stage.py").write_text(STAGE)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    pipe = subprocess.PIPE
    command = [sys.executable, "stage.py", *scheduler]
    stage = psutil.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe, start_new_session=True)
    wait_for(lambda: len({path.name.split("-")[0] for path in Path().glob("out.*.tmp/*")}) == 2)
    return stage


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_trap_21_an_interrupt_ends_the_tasks_and_others_change_nothing(
    executor: str, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C, once and several times, and an error of one worker."""
    stage = start_writing(*[request.getfixturevalue("dask_cluster").address] * (executor == "dask"))
    processes = task_processes() if executor == "dask" else stage.children(recursive=True)
    assert len(processes) >= 2
    for delay in (0, 0.02, 0.1, 0.3):
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGINT:  # as the terminal does
                os.killpg(stage.pid, number)
            else:
                os.kill(stage.pid, number)
    output, error = stage.communicate(timeout=15)
    assert (stage.returncode, output, error) == (128 + number, "", "interrupted: the next run continues\n")
    psutil.wait_procs(processes, timeout=1)
    assert not any(map(is_alive, processes))
    assert [path.name for path in Path().iterdir()] == ["stage.py"]


@pytest.mark.slow
def test_an_error_ends_the_tasks_of_other_dask_workers(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    results = ordered_map(tasks.fail_or_write, [None, tmp_path, tmp_path], dask_runtime(dask_cluster))
    with pytest.raises(StageError, match="of a task"):
        next(results)
    written = list(tmp_path.iterdir())
    time.sleep(0.5)
    assert written == list(tmp_path.iterdir())
    with distributed.Client(dask_cluster.address) as client:
        client.wait_for_workers(2, 60)  # they were started again


def test_signals_are_handled_as_before_where_nothing_was_interrupted() -> None:
    def handling() -> list[Any]:
        return [sys.unraisablehook, *map(signal.getsignal, INTERRUPTS)]

    before = handling()
    with raise_on_interrupt() as received:
        assert all(now is not then for now, then in zip(handling(), before, strict=True))
    assert not received
    assert handling() == before
    with pytest.raises(ZeroDivisionError), raise_on_interrupt():
        raise ZeroDivisionError
    assert handling() == before


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    code = """
import os, signal, time
from stages.base import command

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

def main():
    Finalized()
    time.sleep(60)

command.run(main)
"""
    stage = run_python(code)
    assert (stage.returncode, stage.stderr) == (130, "interrupted: run it again\n")


def test_after_an_error_no_process_writes(tmp_path: Path) -> None:
    """Neither after that of a task nor after that of the caller."""
    runtime = Runtime(num_workers=3)
    with pytest.raises(StageError, match="of a task"):
        list(ordered_map(tasks.fail_or_write, [None, tmp_path, tmp_path], runtime))
    assert multiprocessing.active_children() == []
    results = ordered_map(abs, range(9), runtime)
    next(results)
    results.close()  # as `closing` does
    assert multiprocessing.active_children() == []


def test_threads_do_not_begin_tasks_that_nobody_waits_for() -> None:
    begun = []
    results = threaded_map(lambda number: (begun.append(number), time.sleep(0.1)), range(1000))
    next(results)
    results.close()
    assert len(begun) < 500


def test_a_worker_that_is_killed_while_it_sends_a_result_is_a_clear_error() -> None:
    results = ordered_map(tasks.send_much, range(50), Runtime(num_workers=2))
    next(results)
    for process in multiprocessing.active_children():
        process.kill()
    with pytest.raises(StageError, match=r"worker process was killed.*runtime.num_workers, now 2"):
        list(results)


def test_processes_are_started_only_for_work_that_is_worth_it() -> None:
    def processes(num_workers: int, num_bytes: int) -> set[int]:
        places = ordered_map(tasks.place, range(4), Runtime(num_workers=num_workers), num_bytes=num_bytes)
        return {process for _, process, _ in places}

    assert processes(2, 1 << 20) == {os.getpid()}
    assert os.getpid() not in processes(2, 1 << 30)
    assert os.getpid() not in processes(1, 1 << 30)  # but in one that can be killed


def test_small_corpora_are_organized_and_extracted_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_processes", None)
    put({f"{number}.json": json.dumps(["text"] * number) for number in range(200)})
    organize_raw(num_splits=4, num_workers=2)
    extract(PARAMS, ExtractRuntime(num_workers=2, reuse_gib=1))
    put_large_file()
    organize_raw(num_splits=4, num_workers=2)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        extract(PARAMS, ExtractRuntime(num_workers=2, reuse_gib=1))


@pytest.mark.slow
def test_errors_of_tasks_reach_the_user(dask_cluster: DaskCluster) -> None:
    runtime = dask_runtime(dask_cluster)
    with pytest.raises(StageError, match=r"^the value is 1, at most 0 are allowed: lower it$"):
        list(ordered_map(tasks.fail, ["StageError", "StageError"], runtime))
    with pytest.raises(FileNotFoundError) as missing:
        list(ordered_map(tasks.fail, ["OSError"], runtime))
    assert missing.value.filename == "gone"
    with pytest.raises(ZeroDivisionError) as bug:
        list(ordered_map(tasks.fail, ["bug"], runtime))
    assert "tasks.py" in "".join(traceback.format_exception(bug.value))
    with pytest.raises(StageError, match=r"several Dask workers were killed during the same task.*fewer workers"):
        list(ordered_map(tasks.fail, ["kill"], runtime))


@pytest.mark.slow
def test_workers_with_other_code_or_packages_are_refused(
    dask_cluster: DaskCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "code_digest", lambda: "of other versions")
    with pytest.raises(StageError, match=r"all machines must share: .*: it has imported other code or packages"):
        list(ordered_map(abs, range(2), dask_runtime(dask_cluster)))


def test_machines_that_lack_the_project_are_named(empty_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ROOT", "/elsewhere")
    scheduler = dask("scheduler", "--port", "0", "--scheduler-file", "scheduler.json", *LOCAL, cwd=empty_project)
    worker = dask("worker", "--scheduler-file", "scheduler.json", *LOCAL, cwd=empty_project)
    with pytest.raises(StageError, match=r"/elsewhere and .* all machines must share: .*No module named 'stages'"):
        list(ordered_map(abs, range(2), Runtime(num_workers=None, dask_scheduler="scheduler.json")))
    for process in (*worker.children(recursive=True), worker, scheduler):
        process.kill()
    for process in (worker, scheduler):
        process.wait(10)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("tcp://127.0.0.1:9", r"tcp://127.0.0.1:9 within 1 seconds.*`dask scheduler`.*runtime.dask_scheduler"),
        ("missing.json", r"missing.json.*within 1 seconds.*`dask scheduler --scheduler-file`"),
    ],
)
def test_a_scheduler_that_cannot_be_reached_is_a_clear_error(
    scheduler: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 1)
    start = time.monotonic()
    with pytest.raises(StageError, match=message), cluster.connect(abs, scheduler):
        pass
    assert time.monotonic() - start < 10


def test_a_cluster_without_workers_and_a_lost_one_are_clear_errors(
    empty_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = dask("scheduler", "--port", "0", "--scheduler-file", "scheduler.json", *LOCAL, cwd=empty_project)
    wait_for(Path("scheduler.json").exists)
    runtime = Runtime(num_workers=None, dask_scheduler="scheduler.json")
    monkeypatch.setattr(workers, "PATIENCE", 1)
    with pytest.raises(StageError, match=r"no Dask worker for 1 seconds.*`dask worker`"):
        list(ordered_map(abs, [-1], runtime))
    monkeypatch.setattr(workers, "PATIENCE", 3)
    timer = threading.Timer(1, scheduler.kill)
    timer.start()
    with pytest.raises(StageError, match=r"was lost; nothing was published"):
        list(ordered_map(abs, [-1], runtime))
    scheduler.wait()
    cluster._close(mock.Mock(close=mock.Mock(side_effect=RuntimeError("Cannot change state of expiring Timeout"))))


def test_a_missing_dask_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(StageError, match=r"distributed is not installed: run `make setup`.*extra `dask`"):
        list(ordered_map(abs, range(2), Runtime(num_workers=2, dask_scheduler="tcp://head:8786")))


def test_the_shard_of_a_lost_worker_is_not_written_to(tmp_path: Path) -> None:
    """The same task may run again while the lost worker still writes, or after it stored its file."""
    target, store = tmp_path / "shard", Store(tmp_path / "store", int)
    with arrow.StreamWriter(target, arrow.TEXT) as stream:
        store.put("key", target, stream.close().sha256, 1)
    assert store.fetch("key", target) == 1  # although the target exists, and is the stored file itself
    with arrow.StreamWriter(target, arrow.TEXT):
        assert not target.samefile(tmp_path / "store/key/file")
    assert store.fetch("key", target) == 1
