"""Start the ranks of the training, on this machine or with srun on several, and end them with this process.

With `runtime.launcher: sbatch`, on a login node of Slurm, submit a job that does it, and follow the job to its end.

Reads    what stages.train reads, and its checkpoints
Writes   outputs/<experiment_name>/run.json (the pointer to the last checkpoint, or to the best)
         outputs/history.tsv, outputs/speed.tsv, outputs/train_metrics.json, outputs/cost.json
Command  python -m stages.launch

A training that is stopped by a signal saves and exits with status 75; the next launch continues where it stopped. One
that crashes or hangs is restarted up to `runtime.max_restarts` times; one that reports a user error is not.
"""

import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from stages.artifacts import command, outputs, publish
from stages.artifacts.errors import StageError
from stages.artifacts.history import HISTORY, SPEED, History
from stages.artifacts.params_file import load_params
from stages.artifacts.shared_disk import refresh
from stages.checkpointing.layout import CheckpointManifest, DamagedCheckpoint, list_checkpoints, step_name, verify
from stages.checkpointing.lock import writer_lock
from stages.checkpointing.pointer import RunPointer, pointer_path
from stages.training import sbatch, slurm, trackers
from stages.training.console import print_line
from stages.training.environment import set_environment
from stages.training.handoff import Launch, is_first_start
from stages.training.local_ranks import LocalRanks, count_local_ranks
from stages.training.memory import remedies
from stages.training.params import TrainParams, TrainRuntime
from stages.training.run import Run, describe, differences, read_run, resume_candidates, start_over
from stages.training.signals import INTERRUPTED, on_stop_signal, stop_ranks
from stages.training.slurm import LostNode, SrunRanks
from stages.training.state import STATE, CostColumns, TrainMetrics, TrainState
from stages.training.supervision import CRASHED, run_ranks


def main() -> None:
    command.parser(__doc__).parse_args()
    run, runtime = read_run()  # in a job that a launcher has submitted: what it read
    last = run.directory / step_name(run.total_steps)
    is_submitted = sbatch.submits(runtime)
    if is_submitted and (runtime.resume == "never" or not _is_finished(last, contents=False)):
        _check_packages(run, runtime)
        if status := sbatch.run_job(run, runtime):
            sys.exit(status)
    # Also around the outs: another launcher, with resume=never, could delete the checkpoint that they are written from.
    with writer_lock(run.directory, print_line) as set_status:
        was_finished = not is_submitted and runtime.resume != "never" and _is_finished(last)
        if was_finished:
            print(f"run {run.run_id} has already finished, at step {run.total_steps}: nothing to train")
        elif not is_submitted:
            _check_packages(run, runtime)
            status = _train(run, runtime, set_status)
            if status == INTERRUPTED:
                saved = list_checkpoints(run.directory)
                state = f"{saved[0].name} is saved; {_next_launch(runtime)}" if saved else "no step was done yet"
                print(f"interrupted: {state}", file=sys.stderr)
            if status:
                sys.exit(status)
        refuse_changed_files(run, runtime)
        refresh([last])  # the ranks may have written it on another node
        metrics, exported = write_outs(run, last, contents=was_finished)
    print(f"train: {metrics.steps:,} steps, {metrics.tokens:,} tokens: {losses_text(metrics)}; run {run.run_id}"
          f"{'' if exported == last else f', whose best checkpoint is {exported.name}'}")  # fmt: skip


def losses_text(metrics: TrainMetrics) -> str:
    """The last losses, for people to read; there is no validation loss without held-out rows."""
    losses = {"loss": metrics.loss, "validation loss": metrics.validation_loss}
    return ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None)


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


def write_outs(run: Run, last: Path, contents: bool) -> tuple[TrainMetrics, Path]:
    """Write the outs of the train stage from the last checkpoint of a run: the same bytes whenever it is called.

    So DVC finds nothing changed after a stage that only had to look.

    Args:
        run: The run.
        last: Its last checkpoint, which is valid.
        contents: Whether the bytes of the best checkpoint must be verified too, or only its sizes.

    Returns:
        The metrics, and the checkpoint that `export_from` chooses.

    Raises:
        StageError: that checkpoint is missing or damaged.
    """
    exported = _best(last, contents) if run.params.export_from == "best" else last
    metrics = TrainState.read(last / STATE).metrics
    for out, name in ((outputs.HISTORY, HISTORY), (outputs.SPEED, SPEED)):
        publish.write_text(out, (last / name).read_text(encoding="utf-8"))
    metrics.write(outputs.TRAIN_METRICS)
    publish.write_json(outputs.COST, CostColumns.of(metrics))
    RunPointer.to(exported).write(pointer_path(run.params.experiment_name))
    return metrics, exported


def _best(last: Path, contents: bool) -> Path:
    history = History((last / HISTORY).read_text(encoding="utf-8"))
    step = history.best_step(CheckpointManifest.read(last).adopted)
    if step is None:
        raise StageError(
            "no validation of the run has a finite loss, by which export_from best could choose. `python -m "
            f"stages.consolidate --checkpoint {last} --output DIR` exports the last checkpoint; with export_from last "
            "the training runs again"
        )
    best = last.with_name(step_name(step))
    try:
        verify(best, contents)
    except DamagedCheckpoint as error:
        raise StageError(
            f"export_from is best, and that is step {step}, but {error}: put this checkpoint back, or train the run "
            "again from the start with runtime.resume=never"
        ) from None
    return best


def _check_packages(run: Run, runtime: TrainRuntime) -> None:
    """Refuse what is not installed here, where it is one message, and before torch takes seconds to import."""
    trackers.check(runtime.tracker)
    run.params.check_packages()


def _is_finished(last: Path, contents: bool = True) -> bool:
    if not last.is_dir():
        return False
    try:
        verify(last, contents)
    except StageError:
        return False  # the training falls back to the checkpoint before it
    return True


def _train(run: Run, runtime: TrainRuntime, set_status: Callable[[str], None]) -> int:
    """Run the ranks, again where one crashed and `max_restarts` allows it; returns an exit status."""
    num_nodes = slurm.num_nodes(runtime)
    # Before torch is imported: the threads that it starts must not receive the signals.
    stopping = threading.Event()

    def on_signal() -> None:
        stopping.set()
        set_status("stopping")
        if num_nodes is None:
            stop_ranks()  # `SrunRanks` itself looks at `stopping`

    on_stop_signal(on_signal)
    set_environment(run.params)
    Launch(run.params, runtime, run.identity).hand_over()
    for restart in itertools.count(1):
        try:
            with _ranks(run, runtime, num_nodes, stopping) as ranks:
                if stopping.is_set():
                    return INTERRUPTED
                run.params.grad_accum_steps(ranks.num_ranks)
                run.params.fsdp.mesh_shape(ranks.num_ranks, ranks.num_local)
                if restart == 1:
                    if runtime.resume == "never" and is_first_start():
                        start_over(run)  # under the lock; a restart resumes from what this launch has saved
                    resume_candidates(run, runtime, lambda message: None)  # for its errors; the ranks choose
                status, reason = run_ranks(
                    ranks, runtime.timeout_minutes, runtime.debug, remedies(run.params, ranks.num_ranks)
                )
        except LostNode as error:
            status, reason = CRASHED, str(error)
        if status != CRASHED:
            return status
        if restart > runtime.max_restarts or stopping.is_set():
            break
        print(f"{reason}; restart {restart} of {runtime.max_restarts}", file=sys.stderr, flush=True)
    print(f"error: {reason}", file=sys.stderr)
    after = f"after {restart - 1} restarts, " if runtime.max_restarts else ""
    print(f"error: {after}the training failed; {_next_launch(runtime)}", file=sys.stderr)
    return CRASHED


def _ranks(
    run: Run, runtime: TrainRuntime, num_nodes: int | None, stopping: threading.Event
) -> AbstractContextManager[LocalRanks | SrunRanks]:
    """The ranks that the launch can start, on this machine or on `num_nodes` of Slurm."""
    if num_nodes is None:
        from stages.training.precision import check_precision

        num_local = count_local_ranks(runtime.nproc_per_node)
        check_precision(run.params, run.seq_length)  # an error that every rank would find is raised here once
        return LocalRanks(num_local)
    return slurm.srun_ranks(runtime, num_nodes, stopping)


def _next_launch(runtime: TrainRuntime) -> str:
    if runtime.resume == "never":
        return "set runtime.resume to auto to continue from its newest checkpoint, because `never` deletes it"
    return "the next launch continues from its newest checkpoint"


if __name__ == "__main__":
    command.run(main)
