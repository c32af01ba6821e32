"""Start the training with torchrun, and end it with the process that started it.

Reads    what stages.train reads, and its checkpoints
Writes   outputs/<experiment_name>/run.json (the pointer to the last checkpoint), history.tsv, train_metrics.json
Command  python -m stages.launch

A training that is stopped by a signal saves and exits with status 75; the next launch continues where it stopped. One
that crashes or hangs is restarted up to `runtime.max_restarts` times; one that reports a user error is not.
"""

import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from stages.artifacts import command, publish
from stages.artifacts.command import USER_ERROR
from stages.artifacts.errors import StageError
from stages.artifacts.history import HISTORY
from stages.artifacts.params_file import load_params
from stages.checkpointing.layout import step_name, verify
from stages.checkpointing.lock import writer_lock
from stages.checkpointing.pointer import RunPointer, pointer_path
from stages.training import trackers
from stages.training.console import print_line
from stages.training.memory import remedies
from stages.training.params import TrainParams, TrainRuntime
from stages.training.run import Run, describe
from stages.training.signals import INTERRUPTED, LAUNCHER, forward_stop_signals
from stages.training.state import STATE, TrainMetrics, TrainState
from stages.training.watchdog import Watchdog

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
            trackers.check(runtime.tracker)  # here, where it is one message, and before torch takes seconds to import
            status = _train(run.params, runtime, set_status)
            if status == INTERRUPTED:
                print("interrupted: the training was saved and continues with the next launch", file=sys.stderr)
            if status:
                sys.exit(status)
        metrics = write_outs(run, last)
    loss, validation_loss = (value or float("nan") for value in (metrics.loss, metrics.validation_loss))
    print(f"train: {metrics.steps:,} steps, {metrics.tokens:,} tokens: loss {loss:.4f}, "
          f"validation loss {validation_loss:.4f}; run {run.run_id}")  # fmt: skip


def write_outs(run: Run, last: Path) -> TrainMetrics:
    """Write the outs of the train stage from the last checkpoint of a run: the same bytes whenever it is called.

    So DVC finds nothing changed after a stage that only had to look.
    """
    outputs = Path("outputs") / run.params.experiment_name
    metrics = TrainState.read(last / STATE).metrics
    publish.write_text(outputs / HISTORY, (last / HISTORY).read_text(encoding="utf-8"))
    metrics.write(outputs / "train_metrics.json")
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


def _train(params: TrainParams, runtime: TrainRuntime, set_status: Callable[[str], None]) -> int:
    """Run the ranks, again where one crashed and `max_restarts` allows it; returns an exit status."""
    # Before torch is imported: the threads that it starts must not receive the signals.
    stopping = threading.Event()

    def on_signal() -> None:
        stopping.set()
        set_status("stopping")

    forward_stop_signals(on_signal)
    os.environ[LAUNCHER] = str(os.getpid())
    import torch

    # torchrun itself would give the ranks 30 seconds to save, and none at a second signal. So it handles none: the
    # ranks get the signals, save together and exit, and torchrun sees them exit.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # Errors of the number of ranks are raised here once, instead of by each rank.
    num_ranks = runtime.nproc_per_node or torch.cuda.device_count() or 2
    params.grad_accum_steps(num_ranks)
    params.fsdp.mesh_shape(num_ranks, num_ranks)
    # torchrun would set 1, which leaves cores idle where there are fewer ranks than cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    # The ranks print their own errors; torchrun would add its traceback of each.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    for restart in itertools.count(1):
        status, reason = _torchrun(num_ranks, params, runtime)
        if status != CRASHED:
            return status
        if restart > runtime.max_restarts or stopping.is_set():
            break
        print(f"{reason}; restart {restart} of {runtime.max_restarts}", file=sys.stderr, flush=True)
    print(f"error: {reason}", file=sys.stderr)
    after = f"after {restart - 1} restarts, " if runtime.max_restarts else ""
    print(f"error: {after}the training failed; the next launch continues from its newest checkpoint", file=sys.stderr)
    return CRASHED


def _torchrun(num_ranks: int, params: TrainParams, runtime: TrainRuntime) -> tuple[int, str]:
    """Run processes of stages.train under torchrun's agent in this process; returns an exit status and its reason.

    torchrun restarts nothing: it would also do so after the exit statuses of a signal and of a user error.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # --standalone: the rendezvous uses any free port, so several trainings can share a machine.
    arguments = ["--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=0", "-m", "stages.train"]
    # A little earlier than the process group's own timeout, after which the other ranks would exit: they cannot name
    # what the rank at fault was doing.
    with Watchdog(60 * runtime.timeout_minutes * 0.9, runtime.debug) as watchdog:
        try:
            torchrun.run(torchrun.parse_args(arguments))
        except ChildFailedError as error:
            failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
            for status in (INTERRUPTED, USER_ERROR):  # the others lost the connection, or torchrun ended them
                if status in failures.values():
                    return status, ""
            if watchdog.hang is not None:
                return CRASHED, watchdog.hang
            # The first to fail: one that was killed, rather than one that lost the connection or that torchrun ended.
            rank, code = min(failures.items(), key=lambda failure: (failure[1] == -signal.SIGTERM, failure[1]))
            how = f"was killed by signal {-code}" if code < 0 else "failed as shown above"
            reason = f"rank {rank} {how}: {watchdog.activity(rank)}"
            if code == -signal.SIGKILL:
                reason += f" (if the machine ran out of memory, use {remedies(params, num_ranks)})"
            return CRASHED, reason
    return 0, ""


if __name__ == "__main__":
    command.run(main)
