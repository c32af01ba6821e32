"""Start the training with torchrun, and end it with whoever started it.

Reads    what stages.train reads, and its checkpoints
Writes   outputs/<experiment_name>/run.json (the pointer to the last checkpoint), history.tsv, train_metrics.json
Command  python -m stages.launch

A training that is stopped by a signal saves and exits with status 75; the next launch goes on where it stopped. One
that crashes or hangs is started again up to `runtime.max_restarts` times; one that names a mistake to mend is not.
"""

import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from stages.artifacts import checkpoint, command, params, publish
from stages.artifacts.command import USER_ERROR, StageError
from stages.training import run, trackers
from stages.training.activity import Watchdog
from stages.training.memory import remedies
from stages.training.params import TrainParams, TrainRuntime
from stages.training.process import INTERRUPTED, LAUNCHER, forward_stop_signals, single_writer

CRASHED = 1
"""Exit status of a training of which a rank crashed or hung."""


def main() -> None:
    command.parser(__doc__).parse_args()
    this = run.describe(params.load(TrainParams))
    runtime = params.load(TrainRuntime, "runtime")
    last = this.directory / checkpoint.step_name(this.total_steps)
    with single_writer(this.directory, print) as tell:
        if runtime.resume != "never" and _is_finished(last):
            print(f"run {this.run_id} was finished before, at step {this.total_steps}: nothing to train")
        else:
            trackers.check(runtime.tracker)
            status = _train(this.params, runtime, tell)
            if status == INTERRUPTED:
                print("interrupted: the training was saved and goes on with the next launch", file=sys.stderr)
            if status:
                sys.exit(status)
        run.write_outs(this, last)
    metrics = publish.read_json(last / "state.json")["metrics"]
    loss, validation_loss = (metrics[name] or float("nan") for name in ("loss", "validation_loss"))
    print(f"train: {metrics['steps']:,} steps, {metrics['tokens']:,} tokens: loss {loss:.4f}, "
          f"validation loss {validation_loss:.4f}; run {this.run_id}")  # fmt: skip


def _is_finished(last: Path) -> bool:
    if not last.is_dir():
        return False
    try:
        checkpoint.verify(last)
    except StageError:
        return False  # the training falls back to the checkpoint before it
    return True


def _train(train_params: TrainParams, runtime: TrainRuntime, tell: Callable[[str], None]) -> int:
    """Run the ranks, again where one crashed and `max_restarts` allows it; returns an exit status."""
    # Before torch is imported: the threads that it starts must not take the signals.
    stopping = threading.Event()

    def told() -> None:
        stopping.set()
        tell("stopping")

    forward_stop_signals(told)
    os.environ[LAUNCHER] = str(os.getpid())
    import torch

    # torchrun itself would give the ranks 30 seconds to save, and none at a second signal. So it handles none: the
    # ranks get the signals, save together and end, and torchrun sees them end.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    ranks = runtime.nproc_per_node or torch.cuda.device_count() or 2
    train_params.grad_accum_steps(ranks)
    train_params.fsdp.mesh_shape(ranks, ranks)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # the ranks speak
    for restart in itertools.count(1):
        status, reason = _torchrun(ranks, train_params, runtime)
        if status != CRASHED:
            return status
        if restart > runtime.max_restarts or stopping.is_set():
            break
        print(f"{reason}; restart {restart} of {runtime.max_restarts}", file=sys.stderr, flush=True)
    print(f"error: {reason}", file=sys.stderr)
    after = f"after {restart - 1} restarts, " if runtime.max_restarts else ""
    print(f"error: {after}the training failed; the next launch goes on from its newest checkpoint", file=sys.stderr)
    return CRASHED


def _torchrun(ranks: int, train_params: TrainParams, runtime: TrainRuntime) -> tuple[int, str]:
    """Run processes of stages.train under torchrun's agent in this process; returns an exit status and its reason.

    torchrun restarts nothing: it would also do so at the exit statuses that tell of a signal or of a user's mistake.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0", "-m", "stages.train"]
    # A little earlier than the others would give a rank up: they cannot say what it did.
    with Watchdog(60 * runtime.timeout_minutes * 0.9, runtime.debug) as watchdog:
        try:
            torchrun.run(torchrun.parse_args(arguments))
        except ChildFailedError as error:
            failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
            for status in (INTERRUPTED, USER_ERROR):  # the others lost it, or torchrun ended them on their way out
                if status in failures.values():
                    return status, ""
            if watchdog.hang is not None:
                return CRASHED, watchdog.hang
            # The first to fail: one that was killed, rather than those that lost it, or that torchrun ended then.
            rank, code = min(failures.items(), key=lambda failure: (failure[1] == -signal.SIGTERM, failure[1]))
            how = f"was killed by signal {-code}" if code < 0 else "failed as shown above"
            reason = f"rank {rank} {how}: {watchdog.what(rank)}"
            if code == -signal.SIGKILL:
                reason += f" (if the machine ran out of memory, take {remedies(train_params, ranks)})"
            return CRASHED, reason
    return 0, ""


if __name__ == "__main__":
    command.run(main)
