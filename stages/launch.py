"""Start the training with torchrun, and end it with whoever started it.

Reads    what stages.train reads, and its checkpoints
Writes   outputs/<experiment_name>/run.json (the pointer to the last checkpoint), history.tsv, train_metrics.json
Command  python -m stages.launch

A training that is stopped by a signal saves and exits with status 75; the next launch goes on where it stopped.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from stages.artifacts import checkpoint, command, params, publish
from stages.artifacts.command import USER_ERROR, StageError
from stages.training import run
from stages.training.params import TrainParams, TrainRuntime
from stages.training.process import INTERRUPTED, LAUNCHER, forward_stop_signals, single_writer


def main() -> None:
    command.parser(__doc__).parse_args()
    this = run.describe(params.load(TrainParams))
    runtime = params.load(TrainRuntime, "runtime")
    last = this.directory / checkpoint.step_name(this.total_steps)
    with single_writer(this.directory, print) as tell:
        if runtime.resume != "never" and _is_finished(last):
            print(f"run {this.run_id} was finished before, at step {this.total_steps}: nothing to train")
        else:
            # Before torch is imported: the threads that it starts must not take the signals.
            forward_stop_signals(lambda: tell("stopping"))
            status = _torchrun(this.params, runtime)
            for number in range(runtime.max_restarts):
                if status in (0, INTERRUPTED, USER_ERROR):
                    break
                print(f"restart {number + 1} of {runtime.max_restarts}", file=sys.stderr, flush=True)
                status = _torchrun(this.params, runtime)
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


def _torchrun(train_params: TrainParams, runtime: TrainRuntime) -> int:
    """Run the ranks, processes of stages.train, under torchrun's agent in this process; returns an exit status."""
    os.environ[LAUNCHER] = str(os.getpid())
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun itself would give the ranks 30 seconds to save, and none at a second signal. So it handles none: the
    # ranks get the signals, save together and end, and torchrun sees them end.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    ranks = runtime.nproc_per_node or torch.cuda.device_count() or 2
    train_params.grad_accum_steps(ranks)
    train_params.fsdp.mesh_shape(ranks, ranks)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    arguments = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0", "-m", "stages.train"]
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # the ranks speak
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if INTERRUPTED in failures.values():  # the others too, or torchrun ended them on their way out
            return INTERRUPTED
        # The first to fail: one that was killed, rather than those that lost it, or that torchrun ended then.
        rank, code = min(failures.items(), key=lambda failure: (failure[1] == -signal.SIGTERM, failure[1]))
        if code < 0:
            print(f"error: rank {rank} was killed by signal {-code}; the next start resumes", file=sys.stderr)
        return code if code > 0 else 1
    return 0


if __name__ == "__main__":
    command.run(main)
