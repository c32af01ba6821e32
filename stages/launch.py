"""Start the ranks of the training with torchrun, on this machine or on several, and end them with this process.

Reads    data/tokens/, data/model.json and the files of the model, and the checkpoints of earlier launches
Writes   outputs/<experiment_name>/checkpoints/ and run.json, which points to the checkpoint that becomes the model
         outputs/history.tsv, outputs/speed.tsv, outputs/train_metrics.json, outputs/cost.json
Example  python -m stages.launch --explain
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from stages.base import command, outputs, publish
from stages.base.errors import StageError
from stages.base.files import DamagedFile
from stages.base.history import HISTORY, SPEED, History
from stages.base.params_file import load_params
from stages.base.shared_disk import refresh
from stages.base.summary import Row, table
from stages.checkpointing.decision import begin, decide, find
from stages.checkpointing.layout import CheckpointManifest, is_copy, list_checkpoints, step_name, verify
from stages.checkpointing.lock import wait_for_ranks, writer_lock
from stages.checkpointing.pointer import RunPointer, pointer_path
from stages.checkpointing.run import SINCE_THE_LAUNCH, Run, describe, differences
from stages.checkpointing.state import TrainMetrics
from stages.launching import sbatch, trackers
from stages.launching.console import print_line
from stages.launching.remedies import remedies
from stages.launching.runtime import Launch, TrainRuntime, check_ranks, how_to_resume, read_launch
from stages.ranks import torchrun
from stages.ranks.signals import INTERRUPTED, on_stop_signals
from stages.training.params import TrainParams


def main() -> None:
    """Run the stage. With `runtime.launcher: sbatch`, submit a job that does it, and follow the job to its end.

    A training that is stopped by a signal saves and exits with status 75. The next launch continues where it stopped.
    A training that crashes or hangs is restarted up to `runtime.max_restarts` times. A user error is not.
    """
    parser = command.parser(__doc__)
    parser.add_argument("--explain", action="store_true", help="print what a launch would do now, and why; do nothing")
    arguments = parser.parse_args()
    run, runtime, _ = read_launch()  # in a job that a launcher has submitted: what it read
    last = run.directory / step_name(run.total_steps)
    if arguments.explain:
        decision = decide(run, how_to_resume(runtime), find(run))
        print_line(f"{decision.action}: {decision.reason}")
        return
    is_submitted, before = sbatch.submits(runtime), None
    if is_submitted and decide(run, how_to_resume(runtime), find(run)).action != "finished":
        trackers.check(runtime.tracker)  # as the ranks do, which may wait for days in the queue
        before = _time_of(last)  # with resume=never, there may be that of an earlier job
        if status := sbatch.run_job(run, runtime):
            sys.exit(status)
    # Also around the outs: another launcher, with resume=never, could delete the checkpoint that they are written from.
    # Experiments that differ in later stages have the same training, and workers of a queue start them together.
    with writer_lock(run.directory, print_line, waits=is_copy()) as set_status:
        if not is_submitted and (status := _train(run, runtime, set_status)):
            sys.exit(status)
        refuse_changed_files(run, runtime)
        refresh([last])  # the ranks may have written it on another node
        if _time_of(last) == before:  # sbatch reports no error of a job that was cancelled while it was pending
            raise StageError(f"the job has ended, but has not written {last}: if it was cancelled, launch it again")
        metrics, exported = write_outs(run, last)
    best = "" if exported == last else f", whose best checkpoint is {exported.name}"
    print(table((metrics.steps, "steps", f"{metrics.tokens:,} tokens; run {run.run_id}{best}"), *loss_rows(metrics)))


def _time_of(checkpoint: Path) -> int | None:
    """When it was written; None: it is not there."""
    return checkpoint.stat().st_mtime_ns if checkpoint.exists() else None


def loss_rows(metrics: TrainMetrics) -> list[Row]:
    """The last losses, for people to read; there is no validation loss without held-out rows."""
    losses = ("loss", metrics.loss), ("validation loss", metrics.validation_loss)
    return [(f"{loss:.4f}", name, "") for name, loss in losses if loss is not None]


def refuse_changed_files(run: Run, runtime: TrainRuntime) -> None:
    """Fail where the files no longer are those that `run` was read from.

    DVC reads them once more after this process, and would record the result of the old ones as that of the new ones.

    Raises:
        StageError: naming what differs.
    """
    if lines := differences(run.identity, describe(load_params(TrainParams)).identity, SINCE_THE_LAUNCH):
        auto = " (with runtime.resume auto: `never` deletes it)" if runtime.resume == "never" else ""
        raise StageError(
            f"run {run.run_id} has finished, but its files have changed since the launch. `dvc repro` trains "
            f"what they are now; undo the changes first, and it finds the finished run{auto}",
            *lines,
        )


def write_outs(run: Run, last: Path) -> tuple[TrainMetrics, Path]:
    """Write the outs of the train stage from the last checkpoint of a run: the same bytes whenever it is called.

    So DVC finds nothing changed after a stage that only had to look.

    Args:
        run: The run.
        last: Its last checkpoint, which is valid.

    Returns:
        The metrics, and the checkpoint that `export_from` chooses.

    Raises:
        StageError: that checkpoint is missing or damaged.
    """
    exported = _best(last) if run.params.export_from == "best" else last
    metrics = TrainMetrics.of(last)
    for out, name in ((outputs.HISTORY, HISTORY), (outputs.SPEED, SPEED)):
        publish.write_text(out, (last / name).read_text(encoding="utf-8"))
    metrics.write(outputs.TRAIN_METRICS)
    cost = metrics.cost  # each name is a column of `dvc exp show`, so there are few
    publish.write_json(
        outputs.COST,
        {"steps": metrics.steps, "tokens_per_s": cost.tokens_per_second, "memory_peak_gib": cost.memory_peak_gib},
    )
    RunPointer.to(exported).write(pointer_path(run.params.experiment_name))
    return metrics, exported


def _best(last: Path) -> Path:
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
        verify(best, contents=False)
    except DamagedFile as error:
        from_start = "here from the start, with runtime.resume=never"
        raise StageError(f"export_from is best, and that is step {step}, but {error}, {from_start}") from None
    return best


def _train(run: Run, runtime: TrainRuntime, set_status: Callable[[str], None]) -> int:
    """Run the ranks, if any step is left, again where one crashed and `max_restarts` allows it.

    Returns:
        An exit status: 0, if the run has finished.
    """
    decision = decide(run, how_to_resume(runtime), find(run))  # a finished run needs no ranks to be checked
    if decision.action == "finished":
        print_line(decision.reason)
        return 0
    num_nodes = torchrun.count_srun_nodes(runtime.launcher, runtime.num_nodes)
    ranks = torchrun.Ranks(torchrun.count_local_ranks(runtime.nproc_per_node, num_nodes), num_nodes)
    check_ranks(run, ranks.total, ranks.num_local)  # here, before checkpoints are adopted, or deleted
    decision = begin(run, how_to_resume(runtime))
    print_line(decision.reason)
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        set_status("stopping")

    on_stop_signals(stop)
    status = torchrun.CRASHED
    for restart in range(runtime.max_restarts + 1):
        if restart:
            wait_for_ranks(run.directory, print_line, stopping.is_set)  # that of a node that was lost may still write
            print_line(f"restart {restart} of {runtime.max_restarts}", sys.stderr)
            decision = begin(run, how_to_resume(runtime, is_restart=True))
        Launch(run.params, runtime, run.identity, decision).hand_over()
        with torchrun.shared_directory(ranks, run.directory) as directory:
            status = torchrun.run("stages.train", ranks, directory, runtime.rdzv_endpoint, stopping)
        if status != torchrun.CRASHED or stopping.is_set():
            break
    if status == torchrun.CRASHED:
        killed = f"; if a rank was killed by signal 9 because memory ran out, use {remedies(run.params, ranks.total)}"
        print_line(f"error: the training failed as shown above; {_next_launch(runtime)}{killed}", sys.stderr)
    elif status == INTERRUPTED:
        saved = list_checkpoints(run.directory)
        state = f"{saved[0].name} is saved; {_next_launch(runtime)}" if saved else "no step was done yet"
        print_line(f"interrupted: {state}", sys.stderr)
    return status


def _next_launch(runtime: TrainRuntime) -> str:
    if runtime.resume == "never":
        return "set runtime.resume to auto to continue from its newest checkpoint, because `never` deletes it"
    return "the next launch continues from its newest checkpoint"


if __name__ == "__main__":
    command.run(main)
