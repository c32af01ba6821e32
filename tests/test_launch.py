"""The launcher: what it does with a run that is finished, and with one that cannot continue."""

import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from stages import launch
from stages.base.command import USER_ERROR
from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.checkpointing.layout import list_checkpoints, step_name
from stages.checkpointing.lock import rank_lock, writer_lock
from stages.checkpointing.run import describe
from stages.checkpointing.state import TrainMetrics
from stages.launching import remedies, sbatch
from stages.launching.runtime import TrainRuntime
from stages.ranks import handoff, torchrun, watchdog
from stages.ranks.signals import INTERRUPTED
from stages.ranks.torch_errors import LostConnection, explain_torch_errors
from stages.ranks.watchdog import Heartbeat, Note, watched
from stages.training.params import TrainParams
from tests.project import REPO, Project, flip_bit, run_here, wait_for
from tests.trainings import Given, result


def test_a_finished_run_is_not_trained_again(finished: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    project, reference = finished
    monkeypatch.chdir(project.path)
    last = project.checkpoints() / "step-00000012"
    for _ in range(2):
        assert "has already finished, at step 12: nothing to train" in run_here("launch")
    assert result(project) == reference
    assert (project / "outputs/history.tsv").read_text() == (last / "history.tsv").read_text()
    pointer = project.json("outputs/test/run.json")
    assert pointer["result_sha256"] == reference["result"]
    assert (pointer["step"], pointer["adopted"]) == (12, None)
    flip_bit(last / "model/__1_0.distcp", 100)
    assert "nothing to train" in run_here("launch")  # it looks at sizes: consolidate reads it, and names the file


def test_an_experiment_waits_for_another_one_with_the_same_training(
    finished: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of `dvc exp run --queue -S eval_samples=0,3` does, with two workers."""
    project, _ = finished
    copy, messages = project.copy(tmp_path / "copy"), []
    monkeypatch.setenv("DVC_ROOT", str(project.path))
    monkeypatch.chdir(copy.path)
    with ExitStack() as other:
        other.enter_context(writer_lock(project.checkpoints(), print))

        def report(message: str) -> None:
            messages.append(message)
            other.close()

        monkeypatch.setattr(launch, "print_line", report)
        run_here("launch")
    assert re.match(r"waiting for another experiment that trains the same run \(running, process", messages[0])
    assert "nothing to train" in messages[1] and len(messages) == 2


def test_what_was_edited_during_a_training_is_not_recorded_as_its_input(here: Project) -> None:
    launched, runtime = describe(load_params(TrainParams)), load_params(TrainRuntime, "runtime")
    launch.refuse_changed_files(launched, runtime)
    here.set(seed=1)
    for resume, advice in (("auto", r"finds the finished run"), ("never", r"\(with runtime.resume auto: .*\)")):
        message = rf"has finished, but its files have changed .*{advice}\nparams.seed: 0 at the launch, 1 now$"
        with pytest.raises(StageError, match=message):
            launch.refuse_changed_files(launched, replace(runtime, resume=resume))


def test_a_job_that_was_cancelled_before_it_started_has_not_trained(
    finished: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `resume: never` there may be the checkpoint of a job before."""
    project, _ = finished
    monkeypatch.chdir(project.path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(launch.sbatch, "run_job", lambda run, runtime: 0)
    for seed, resume in ((0, "never"), (1, "auto")):
        project.set(seed=seed, runtime={"launcher": "sbatch", "resume": resume})
        output = run_here("launch", status=2)
        assert re.fullmatch(r"error: the job has ended, but has not written \S+/step-00000012: if .*\n", output)


def test_a_job_whose_tracker_is_not_installed_is_not_submitted(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(launch.sbatch, "run_job", pytest.fail)
    monkeypatch.setattr(launch.trackers.importlib.util, "find_spec", lambda name: None)
    here.set(runtime={"launcher": "sbatch", "tracker": "wandb"})
    assert "the package wandb is not installed" in run_here("launch", status=2)


@contextmanager
def closed_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this process print to a terminal that is closed."""
    reader, writer = os.openpty()
    os.close(reader)
    # Nothing is held back, as in a terminal: what cannot be written is an error at once, and none later.
    stream = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    with stream, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        patch.setattr("sys.stderr", stream)
        yield


def test_16_a_job_is_followed_to_its_end_without_a_terminal(
    here: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its launch would cancel it: `sbatch --wait` dies with the process that has started it."""
    (here / "slurm").mkdir()
    (here / "slurm/launch.sbatch").touch()
    script = tmp_path / "sbatch"
    script.write_text(
        '#!/bin/sh\nfor each; do case $each in --output=*) echo a line >> "${each#*=}";; esac; done; exit 3'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv(handoff.LAUNCH, "")  # restored afterwards
    monkeypatch.setattr(sbatch, "on_stop_signals", lambda stop: None)
    monkeypatch.setattr(sbatch, "print_line", lambda *_: None)  # the first line was still read
    run, runtime = describe(load_params(TrainParams)), load_params(TrainRuntime, "runtime")
    with closed_terminal(monkeypatch):
        assert sbatch.run_job(run, runtime) == 3


def test_jobs_of_one_run_in_two_clones_have_two_names(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for each other, and Ctrl-C would end both."""
    (here / "slurm").mkdir()
    (here / "slurm/launch.sbatch").touch()
    script = here.path.with_name("sbatch")
    script.write_text('#!/bin/sh\necho "$@" >> "${0%/*}/commands"')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    monkeypatch.setenv(handoff.LAUNCH, "")  # restored afterwards
    monkeypatch.setattr(sbatch, "on_stop_signals", lambda stop: None)
    clone = here.copy(here.path.with_name("clone"))
    for project, root in ((here, "."), (clone, "."), (clone, here.path)):  # the last one is DVC's copy of the first
        monkeypatch.chdir(project.path)
        monkeypatch.setenv("DVC_ROOT", str(root))
        run = describe(load_params(TrainParams))
        assert sbatch.run_job(run, load_params(TrainRuntime, "runtime")) == 0
    first, second, third = re.findall(rf"--job-name=train-{run.run_id}(\S*)", script.with_name("commands").read_text())
    assert first == third != second


def test_15_a_crash_that_nobody_can_read_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that `max_restarts` starts the ranks again."""
    (tmp_path / "torchrun-here").write_text("Traceback\nValueError")
    started = mock.patch.object(subprocess, "Popen", return_value=mock.Mock(returncode=1))
    with started, closed_terminal(monkeypatch):
        assert torchrun.run("stages.train", torchrun.Ranks(1), tmp_path) == torchrun.CRASHED


STARTING = """
import os, signal, time
from stages.ranks.signals import StopSignal, on_stop_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
"""
SCRIPTS = {
    "a signal before the first step ends a rank": """
StopSignal()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
""",
    "one after the last step does not": """
StopSignal().training_starts()
os.kill(os.getpid(), signal.SIGTERM)
class Late:
    def __del__(self):  # called after Python has restored the default handlers
        os.kill(os.getpid(), signal.SIGTERM)
late = Late()
""",
    "what a rank ignores from the start, it ignores": """
stop = StopSignal()
stop.training_starts()
for number in (signal.SIGHUP, signal.SIGUSR1):
    os.kill(os.getpid(), number)
    time.sleep(0.3)
    print(stop.received)
""",
    # So a training that was started with nohup goes on when its terminal is closed.
    "and so does a launcher": """
on_stop_signals(lambda: print("stop"))
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGUSR1)
""",
    # A signal to the process is delivered to any thread that does not block it, and ends the process there.
    "no thread is started before a rank blocks the signals": """
import stages.train
print(len(os.listdir("/proc/self/task")))
""",
    # `Event.set` has one, and a launcher that waits for itself would never ask its ranks to save.
    "a signal while one is answered does not wait for its locks": """
import threading
lock = threading.Lock()
def stop():
    with lock:
        signal.raise_signal(signal.SIGTERM)
on_stop_signals(stop)
signal.raise_signal(signal.SIGINT)
""",
}


@pytest.mark.parametrize(
    ("name", "status", "printed"),
    [*zip(SCRIPTS, (INTERRUPTED, 0, 0, 0, 0, 0), ("", "", "False\nTrue\n", "stop\n", "1\n", ""), strict=True)],
)
def test_16_a_signal_to_a_rank_or_a_launcher(name: str, status: int, printed: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}  # as on a machine with four cores for each rank
    command = [sys.executable, "-c", STARTING + SCRIPTS[name]]
    process = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=30)
    assert (process.returncode, process.stdout) == (status, printed), process.stderr


@pytest.mark.usefixtures("here")
def test_a_restart_waits_for_the_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a node which srun has lost may still write, until the node ends it."""
    run, own = describe(load_params(TrainParams)), load_params(TrainRuntime, "runtime")
    rank, has_ended, statuses = ExitStack(), threading.Event(), iter((torchrun.CRASHED, 0))

    def end() -> None:
        has_ended.set()
        rank.close()

    def start(*_: object) -> int:
        if status := next(statuses):
            rank.enter_context(rank_lock(run.directory))
            threading.Timer(0.2, end).start()
        else:
            assert has_ended.is_set()
        return status

    monkeypatch.setattr(torchrun, "run", start)
    monkeypatch.setattr(launch, "on_stop_signals", lambda stop: None)
    monkeypatch.setenv(handoff.LAUNCH, "")
    assert launch._train(run, replace(own, max_restarts=1, nproc_per_node=1), lambda status: None) == 0


def test_any_number_of_signals_while_a_launcher_exits_leave_its_status() -> None:
    code = """
import sys, threading, time
from stages.base import command
from stages.ranks.signals import INTERRUPTED, on_stop_signals
def main():
    stopping = threading.Event()
    on_stop_signals(stopping.set)
    print("ready", flush=True)
    while not stopping.is_set():
        time.sleep(0.01)
    sys.exit(INTERRUPTED)
command.run(main)
"""
    numbers = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE)
        assert process.stdout and process.stdout.readline()
        while process.poll() is None:
            for number in numbers:
                process.send_signal(number)
            time.sleep(0.0005)
        process.stdout.close()
        assert process.returncode == INTERRUPTED


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(USER_ERROR)", USER_ERROR),
        ("os.kill(os.getpid(), signal.SIGKILL)", torchrun.CRASHED),  # as where memory runs out while weights are read
    ],
    ids=["an error", "a kill"],
)
def test_how_one_rank_ends_is_the_status_though_torchrun_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str, status: int
) -> None:
    """A job of Slurm that was interrupted starts again, and would do so for ever."""
    (tmp_path / "one_fails.py").write_text(f"""
import os, signal, sys, time
from stages.base.command import USER_ERROR
from stages.ranks import handoff
from stages.ranks.signals import StopSignal
with handoff.rank():
    stop = StopSignal()
    if os.environ["RANK"] == "1":
        open(os.environ["WAITING"], "w").close()
        time.sleep(60)
    while not os.path.exists(os.environ["WAITING"]):
        time.sleep(0.1)
    {end}
""")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO}")
    monkeypatch.setenv("WAITING", str(tmp_path / "waiting"))
    ranks = torchrun.Ranks(2)
    with torchrun.shared_directory(ranks) as directory:
        assert torchrun.run("one_fails", ranks, directory, stopping=threading.Event()) == status
        assert str(INTERRUPTED) not in handoff.told(directory)


def test_a_torchrun_that_is_killed_is_no_lost_node_where_there_is_one_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a lost node slurm/job.sh would start the job again."""
    (tmp_path / "kills.py").write_text("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO}")
    ranks = torchrun.Ranks(1)
    with torchrun.shared_directory(ranks) as directory:
        assert torchrun.run("kills", ranks, directory) == torchrun.CRASHED
    assert capsys.readouterr().err == "error: torchrun has ended without a word\n"


@pytest.mark.slow
def test_a_save_after_a_signal_may_take_as_long_as_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before torch 2.12, torchrun kills its ranks 30 seconds after a signal."""
    (tmp_path / "slow_save.py").write_text("""
import sys, time
from stages.ranks import handoff
from stages.ranks.signals import INTERRUPTED, StopSignal
with handoff.rank():
    stop = StopSignal()
    stop.training_starts()
    while not stop.received:
        time.sleep(0.1)
    time.sleep(35)
    sys.exit(INTERRUPTED)
""")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO}")
    stopping, ranks = threading.Event(), torchrun.Ranks(1)
    with torchrun.shared_directory(ranks) as directory, ThreadPoolExecutor() as thread:
        status = thread.submit(torchrun.run, "slow_save", ranks, directory, stopping=stopping)
        wait_for(lambda: handoff.TRAINING in handoff.told(directory))
        stopping.set()
        assert status.result() == INTERRUPTED


def test_a_machine_that_is_none_of_the_nodes_does_not_count_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `salloc` on a login node."""
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(StageError, match=r"set runtime\.nproc_per_node"):
        torchrun.count_local_ranks(None, num_nodes=2)
    assert torchrun.count_local_ranks(3, num_nodes=2) == 3


def test_a_watchdog_survives_an_error_of_its_store(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a full /tmp: without it, the rank would seem to be stopped, and all of them would be killed."""
    heartbeat = Heartbeat()
    with watched(heartbeat, timeout_minutes=0.1):
        (thread,) = (each for each in threading.enumerate() if "_run" in each.name)
        owner = thread._target.__self__  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(owner, "_publish", mock.Mock(side_effect=torch.distributed.DistStoreError("no space left")))
            time.sleep(0.5)
        beat = owner._beat
        wait_for(lambda: owner._beat > beat + 2, seconds=5)


def test_ranks_that_wait_for_one_that_still_writes_are_not_ended(
    mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    found = watchdog._Watchdog(Heartbeat(), limit=60, dump_stacks=False)
    found._store = store = mock.Mock()

    def watch(pieces: int) -> None:
        notes = [Note(0, "n1", 7, "saving", 0, False, 1), Note(1, "n2", 7, "saving", pieces, False, pieces)]
        store.multi_get.return_value = map(json.dumps, notes)
        found._watch()

    for pieces in range(200):  # of a second each
        watch(pieces)
    store.set.assert_not_called()
    for _ in range(60):
        watch(pieces)
    store.set.assert_called_once_with("signal 0", "9")
    assert "rank 1 on node n2 made no progress" in capsys.readouterr().err


def test_15_a_rank_that_hangs_is_ended_without_a_terminal(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watchdog._Watchdog(Heartbeat(), limit=0, dump_stacks=False)
    found._store = store = mock.Mock()
    store.multi_get.return_value = [json.dumps(Note(0, "n1", 7, "saving", 0, False, 1))]
    with closed_terminal(monkeypatch):
        found._watch()
    store.set.assert_called_once_with("signal 0", "9")


def test_only_losses_that_were_measured_are_shown() -> None:
    rows = [("2.5000", "loss", ""), ("3.2500", "validation loss", "")]
    assert launch.loss_rows(TrainMetrics(loss=2.5, validation_loss=3.25)) == rows
    assert launch.loss_rows(TrainMetrics(loss=2.5, validation_loss=None)) == rows[:1]


@pytest.mark.slow
def test_the_command_that_the_help_names_trains_a_new_run(training: Project) -> None:
    training.set(max_steps=2)
    [command] = re.findall(r"^Example  (torchrun .*)", training.run("python", "-m", "stages.train", "--help"), re.M)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])  # for tests that run at the same time
    training.run(*command.split(), PET_MASTER_PORT=port)
    assert list_checkpoints(training.checkpoints())[0].name == step_name(2)


def test_under_torchrun_too_one_rank_prints_an_error_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for rank, claimed in (("0", True), ("1", False)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        assert handoff.claim_error("of all") == claimed
        assert handoff.claim_error(f"of rank {rank}")


def test_a_full_disk_does_not_end_a_rank_that_tells_it_is_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(handoff.DIRECTORY, str(tmp_path))
    with mock.patch.object(Path, "touch", side_effect=OSError(errno.ENOSPC, "full")):
        handoff.tell_launcher(handoff.TRAINING)
    assert not handoff.told(tmp_path)
    handoff.tell_launcher(handoff.TRAINING)
    assert handoff.told(tmp_path) == {handoff.TRAINING}


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (lambda: torch.empty(2**52), StageError),
        (lambda: bytearray(2**62), StageError),
        (torch.OutOfMemoryError("CUDA"), StageError),
        (torch.AcceleratorError("CUDA error: out of memory"), StageError),
        (torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), StageError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), StageError),
        (RuntimeError("Registering memory failed with cudaError: 2"), StageError),
        (RuntimeError("Registering memory failed with cudaError: 201"), RuntimeError),
        (RuntimeError("gloo: connection closed"), LostConnection),
        (torch.distributed.DistStoreError("Broken pipe"), LostConnection),
    ],
)
def test_out_of_memory_is_one_clear_error_and_no_other_error_is_taken_for_it(
    fail: Exception | Callable[[], object], kind: type[Exception], params: TrainParams
) -> None:
    params = replace(params, batch_size=4, total_batch_size=24)
    message = "rank 3 is out of memory.*: use batch_size 3 " if kind is StageError else str(fail)
    allocate = mock.Mock(side_effect=fail) if isinstance(fail, Exception) else fail
    with (
        pytest.raises(kind, match=message) as error,
        explain_torch_errors("rank 3", f"use {remedies.remedies(params, 2)}"),
    ):
        allocate()
    assert type(error.value) is kind
