"""List, verify and delete the checkpoints of an experiment.

Reads    outputs/<experiment_name>/checkpoints/, outputs/<experiment_name>/run.json, and what identifies the current
         run: params.yaml, data/tokens, data/model.json
Writes   nothing; `prune --yes` deletes
Example  python -m stages.checkpoints list | verify | prune [--other-runs] [--yes]

prune keeps the newest valid checkpoint of each run and its best; of an unfinished run also the newest
`runtime.keep_checkpoints`. With --other-runs, it also deletes all checkpoints of other runs. It never touches
a run that is being trained, nor the checkpoint that run.json points to. It also deletes what a killed `python -m
stages.lineage segments` has left.
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from stages.base import command, publish
from stages.base.command import format_gib
from stages.base.errors import StageError
from stages.base.file_lock import open_lock, try_exclusive
from stages.base.names import printable
from stages.base.params_file import load_params
from stages.checkpointing import retention
from stages.checkpointing.layout import (
    AGAIN,
    MANIFEST,
    CheckpointManifest,
    UnsupportedFormat,
    checkpoint_root,
    latest_valid,
    list_checkpoints,
    list_incomplete,
    size_of,
    verify,
)
from stages.checkpointing.lock import try_writer_lock
from stages.checkpointing.pointer import RunPointer, pointer_path
from stages.checkpointing.run import describe
from stages.launching.runtime import TrainRuntime
from stages.training.params import TrainParams


def main() -> None:
    parser = command.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="run, step, size, age, validation loss and state of each checkpoint")
    commands.add_parser("verify", help="compare every file with its manifest")
    pruning = commands.add_parser("prune", help="show what no resume needs: of a finished run all but newest and best")
    pruning.add_argument("--other-runs", action="store_true", help="also all checkpoints of runs but the current one")
    pruning.add_argument("--yes", action="store_true", help="delete it")
    arguments = parser.parse_args()
    params = load_params(TrainParams)
    root = checkpoint_root(params.experiment_name)
    runs = sorted(path for path in root.glob("[!.]*/") if path.is_dir())
    if not runs:
        raise StageError(f"{root} contains no checkpoints")
    if arguments.command == "list":
        _list(runs, params)
    elif arguments.command == "verify":
        _verify(runs)
    else:
        _prune(runs, params, arguments)


def _list(runs: list[Path], params: TrainParams) -> None:
    try:
        current = describe(params).run_id
    except (StageError, FileNotFoundError):  # the tokens or the model are not there
        current = None
    pointed = _pointed(params.experiment_name)
    print(f"{'run':16}  {'checkpoint':21}  {'size':>10}  {'age':>17}  {'validation loss':>15}  state")
    for directory in runs:
        complete = dict(retention.list_complete(directory))
        best = retention.best(complete.items())
        incomplete = [*retention.list_leftovers(directory), *list_incomplete(directory)]
        for path in sorted([*incomplete, *list_checkpoints(directory)]):
            loss = complete[path].validation_loss if path in complete else None
            marked = {"best": path == best, "current run": directory.name == current, "in run.json": path == pointed}
            marks = [mark for mark, applies in marked.items() if applies]
            with suppress(FileNotFoundError):  # where a training deletes it meanwhile
                # Not negative, where the clock of the file server, or of the machine that wrote it, is ahead.
                age = timedelta(seconds=max(0, int(time.time() - path.lstat().st_mtime)))
                run, name = printable(directory.name), printable(path.name)
                print(
                    f"{run:16}  {name:21}  {format_gib(size_of(path)):>10}  {age!s:>17}  "
                    f"{'' if loss is None else f'{loss:.4f}':>15}  {', '.join([_state(path, complete), *marks])}"
                )


def _state(path: Path, complete: dict[Path, CheckpointManifest]) -> str:
    states = {retention.TEMPORARY: "being written, or left by a crash", retention.DAMAGED: "damaged, in quarantine"}
    if path in complete or path.suffix in states:
        return states.get(path.suffix, "complete")
    try:
        CheckpointManifest.read(path)
    except UnsupportedFormat:
        return "of another version"
    except (StageError, OSError):
        pass
    return "incomplete"


def _verify(runs: list[Path]) -> None:
    damaged: list[str] = []
    for directory in runs:
        for path in list_incomplete(directory):
            if path.exists():
                damaged.append(f"{path / MANIFEST} is missing: copy all of the checkpoint, or move it away")
        for path in list_checkpoints(directory):
            try:
                verify(path)
            except (StageError, FileNotFoundError) as error:
                if path.exists():  # otherwise a training has deleted it meanwhile
                    damaged.append(str(error))
            else:
                print(f"{printable(path)} is valid")
    if damaged:
        raise StageError(*damaged)


def _prune(runs: list[Path], params: TrainParams, arguments: argparse.Namespace) -> None:
    current = describe(params).run_id if arguments.other_runs else None  # the data need not be there otherwise
    pointed = _pointed(params.experiment_name)
    freed: list[int] = []  # bytes
    verb = "deleting" if arguments.yes else "would delete"
    again = checkpoint_root(params.experiment_name) / AGAIN
    if again.exists():
        with open_lock(publish.lock_file(again)) as lock:
            if try_exclusive(lock):  # else `lineage segments` is training there
                freed.append(0)  # most of it are further names of the files of checkpoints
                print(f"{verb} {printable(again)}")
                if arguments.yes:
                    shutil.rmtree(again)
    for directory in runs:
        if directory.is_symlink():  # what it leads to may belong to another experiment
            print(f"{printable(directory)} is a link: skipped")
            continue
        # The lock is held while it deletes: a training that starts now is refused, and could otherwise resume from
        # a checkpoint that is about to go.
        with try_writer_lock(directory, "pruning") as is_locked:
            if not is_locked:
                print(f"{printable(directory)} is being trained: skipped")
                continue
            if current and directory.name != current:
                paths = [*retention.list_leftovers(directory), *list_checkpoints(directory)]
            else:
                paths = list(_expendable(directory))
            for path in paths:
                if path == pointed:  # DVC has no copy of it, and could only train it again
                    continue
                size = 0 if path.is_symlink() else size_of(path)
                freed.append(size)
                print(f"{verb} {printable(path)}, {format_gib(size)}")
                if arguments.yes:
                    retention.delete([path])
    command_line = f"python -m stages.checkpoints prune{' --other-runs' if arguments.other_runs else ''} --yes"
    if not freed:
        print("nothing to delete")
    else:
        print(f"{format_gib(sum(freed))} {'freed' if arguments.yes else f'would be freed: run `{command_line}`'}")


def _pointed(experiment_name: str) -> Path | None:
    """The checkpoint that run.json points to, from which the model is consolidated."""
    path = pointer_path(experiment_name)
    return RunPointer.read(path).path(experiment_name) if path.exists() else None


def _expendable(directory: Path) -> Iterator[Path]:
    """What one run no longer needs."""
    yield from retention.list_leftovers(directory)
    published = list_checkpoints(directory)
    # Every byte of it is verified before any other checkpoint goes: sizes alone do not show a flipped bit.
    try:
        newest = latest_valid(published, print)
    except StageError as error:
        print(f"{error}: skipped")  # left for a person to look at
        return
    if newest is None:
        return
    # Older ones are for the case that the newest turns out damaged on a resume; a finished run is not resumed.
    keep = 1 if CheckpointManifest.read(newest).is_finished else load_params(TrainRuntime, "runtime").keep_checkpoints
    damaged = set(published) - {path for path, _ in retention.list_complete(directory)}
    expendable = damaged.union(retention.prunable(directory, keep)) - {newest}
    yield from (path for path in published if path in expendable)


if __name__ == "__main__":
    command.run(main)
