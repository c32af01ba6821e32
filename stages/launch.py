"""Start the ranks of the training, and end them with the process that started this one.

Reads    what stages.train reads, and its checkpoints
Writes   outputs/<experiment_name>/run.json (the pointer to the last checkpoint)
         outputs/history.tsv, outputs/train_metrics.json
Command  python -m stages.launch

A training that is stopped by a signal saves and exits with status 75; the next launch continues where it stopped. One
that crashes or hangs is restarted up to `runtime.max_restarts` times; one that reports a user error is not.
"""

import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stages.artifacts import command, outputs, publish
from stages.artifacts.command import USER_ERROR
from stages.artifacts.errors import StageError
from stages.artifacts.history import HISTORY
from stages.artifacts.params_file import load_params
from stages.checkpointing.layout import list_checkpoints, step_name, verify
from stages.checkpointing.lock import writer_lock
from stages.checkpointing.pointer import RunPointer, pointer_path
from stages.training import trackers
from stages.training.console import print_line
from stages.training.environment import set_environment
from stages.training.handoff import DIRECTORY, LAUNCHER, Launch
from stages.training.memory import remedies
from stages.training.params import TrainParams, TrainRuntime
from stages.training.run import Run, describe, differences, resume_candidates, start_over
from stages.training.signals import INTERRUPTED, forward_stop_signals
from stages.training.state import STATE, TrainMetrics, TrainState
from stages.training.watchdog import Watchdog

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

CRASHED = 1
"""Exit status of a training of which a rank crashed or hung."""


def main() -> None:
    command.parser(__doc__).parse_args()
    run = describe(load_params(TrainParams))
    runtime = load_params(TrainRuntime, "runtime")
    last = run.directory / step_name(run.total_steps)
    # Also around the outs: another launcher, with resume=never, could delete the checkpoint that they are written from.
    with writer_lock(run.directory, print_line) as set_status:
        if runtime.resume != "never" and _is_finished(last):
            print(f"run {run.run_id} has already finished, at step {run.total_steps}: nothing to train")
        else:
            # Here, where it is one message, and before torch takes seconds to import.
            trackers.check(runtime.tracker)
            run.params.check_packages()
            status = _train(run, runtime, set_status)
            if status == INTERRUPTED:
                saved = list_checkpoints(run.directory)
                state = f"{saved[0].name} is saved; {_next_launch(runtime)}" if saved else "no step was done yet"
                print(f"interrupted: {state}", file=sys.stderr)
            if status:
                sys.exit(status)
        refuse_changed_files(run, runtime)
        metrics = write_outs(run, last)
    loss, validation_loss = (value or float("nan") for value in (metrics.loss, metrics.validation_loss))
    print(f"train: {metrics.steps:,} steps, {metrics.tokens:,} tokens: loss {loss:.4f}, "
          f"validation loss {validation_loss:.4f}; run {run.run_id}")  # fmt: skip


def refuse_changed_files(run: Run, runtime: TrainRuntime) -> None:
    """Fail where the files no longer are those that `run` was read from.

    DVC reads them once more after this process, and would record the result of the old ones as that of the new ones.

    Raises:
        StageError: naming what differs.
    """
    if lines := differences(run.identity, describe(load_params(TrainParams)).identity):
        reasons = "\n".join(lines)
        auto = " (with runtime.resume auto: `never` deletes it)" if runtime.resume == "never" else ""
        raise StageError(
            f"run {run.run_id} has finished, but its files have changed since the launch (there). `dvc repro` trains "
            f"what they are now; undo the changes first, and it finds the finished run{auto}\n{reasons}"
        )


def write_outs(run: Run, last: Path) -> TrainMetrics:
    """Write the outs of the train stage from the last checkpoint of a run: the same bytes whenever it is called.

    So DVC finds nothing changed after a stage that only had to look.
    """
    metrics = TrainState.read(last / STATE).metrics
    publish.write_text(outputs.HISTORY, (last / HISTORY).read_text(encoding="utf-8"))
    metrics.write(outputs.TRAIN_METRICS)
    RunPointer.to(last).write(pointer_path(run.params.experiment_name))
    return metrics


def _is_finished(last: Path) -> bool:
    if not last.is_dir():
        return False
    try:
        verify(last)
    except StageError:
        return False  # the training falls back to the checkpoint before it
    return True


def _train(run: Run, runtime: TrainRuntime, set_status: Callable[[str], None]) -> int:
    """Run the ranks, again where one crashed and `max_restarts` allows it; returns an exit status."""
    # Before torch is imported: the threads that it starts must not receive the signals.
    stopping = threading.Event()

    def on_signal() -> None:
        stopping.set()
        set_status("stopping")

    forward_stop_signals(on_signal)
    from stages.training.distributed import check_devices
    from stages.training.precision import check_precision

    # Errors that every rank would find are raised here once, before the ranks are started.
    num_gpus = check_devices(runtime.nproc_per_node)
    num_ranks = runtime.nproc_per_node or num_gpus or 2
    check_precision(run.params, run.seq_length)
    run.params.grad_accum_steps(num_ranks)
    run.params.fsdp.mesh_shape(num_ranks, num_ranks)
    if runtime.resume == "never":
        start_over(run)  # once and under the lock: a restart of the ranks resumes from what this launch has saved
    resume_candidates(run, runtime, lambda message: None)  # for its errors; the ranks choose the checkpoint
    os.environ[LAUNCHER] = str(os.getpid())
    Launch(run.params, runtime, run.identity).hand_over()
    set_environment(run.params)
    # Several ranks with one thread per core each would compete for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    for restart in itertools.count(1):
        status, reason = _run_ranks(num_ranks, run.params, runtime)
        if status != CRASHED:
            return status
        if restart > runtime.max_restarts or stopping.is_set():
            break
        print(f"{reason}; restart {restart} of {runtime.max_restarts}", file=sys.stderr, flush=True)
    print(f"error: {reason}", file=sys.stderr)
    after = f"after {restart - 1} restarts, " if runtime.max_restarts else ""
    print(f"error: {after}the training failed; {_next_launch(runtime)}", file=sys.stderr)
    return CRASHED


def _next_launch(runtime: TrainRuntime) -> str:
    if runtime.resume == "never":
        return "set runtime.resume to auto to continue from its newest checkpoint, because `never` deletes it"
    return "the next launch continues from its newest checkpoint"


def _run_ranks(num_ranks: int, params: TrainParams, runtime: TrainRuntime) -> tuple[int, str]:
    """Run processes of stages.train as children of this one; returns an exit status and its reason.

    With the part of torchrun that starts processes and ends all when one fails, but without its rendezvous and its
    agent: on one machine these only ask the nameserver for the machine's own name, and listen on all interfaces.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    # torch itself would give the ranks 30 seconds to save, and none at a second signal. So it handles none: the ranks
    # get the signals, save together and exit, and torch sees them exit.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # The ranks print their own errors; torch would add that they failed.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    size = str(num_ranks)
    with tempfile.TemporaryDirectory(prefix="training-") as directory:
        environment = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, DIRECTORY: directory}
        # A little earlier than the process group's own timeout, after which the other ranks would exit: they cannot
        # name what the rank at fault was doing.
        with Watchdog(Path(directory), 60 * runtime.timeout_minutes * 0.9, runtime.debug) as watchdog:
            processes = start_processes(
                name="train",
                entrypoint=sys.executable,
                args=dict.fromkeys(range(num_ranks), ("-u", "-m", "stages.train")),
                envs={rank: {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)},
                logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the ranks print into the terminal
            )
            result = processes.wait(period=0.1)
            assert result is not None, "it waits without a limit"
            if not result.failures:
                return 0, ""
            failures = {rank: failure.exitcode for rank, failure in result.failures.items()}
            for status in (INTERRUPTED, USER_ERROR):  # the others lost the connection, or were ended
                if status in failures.values():
                    return status, ""
            if watchdog.hang is not None:
                return CRASHED, watchdog.hang
            rank = _first_to_fail(result.failures)
            code = failures[rank]
            how = f"was killed by signal {-code}" if code < 0 else "failed as shown above"
            reason = f"rank {rank} {how}: {watchdog.activity(rank)}"
            if code == -signal.SIGKILL:
                reason += f" (if the machine ran out of memory, use {remedies(params, num_ranks)})"
            return CRASHED, reason


def _first_to_fail(failures: "Mapping[int, ProcessFailure]") -> int:
    """The rank that failed by itself, as far as exit statuses show it."""
    first = min(failure.timestamp for failure in failures.values())
    # Within a second those that it leaves behind lose the connection, or torch ends them with SIGTERM; those that do
    # not react, as in a collective of NCCL, torch kills after 30 seconds. A rank that was killed at once comes first.
    return min(
        (failure.timestamp > first + 20, failure.exitcode == -signal.SIGTERM, failure.exitcode, rank)
        for rank, failure in failures.items()
    )[-1]


if __name__ == "__main__":
    command.run(main)
