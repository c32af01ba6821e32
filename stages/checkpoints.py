"""List, verify and delete the checkpoints of an experiment.

Reads    outputs/<experiment_name>/checkpoints/, outputs/<experiment_name>/run.json, and what tells the current run:
         params.yaml, data/tokens, data/model.json
Writes   nothing; `prune --yes` deletes
Command  python -m stages.checkpoints list | verify | prune [--other-runs] [--yes]

prune leaves each run its newest whole checkpoint and its best, one that is not finished also `runtime.keep_checkpoints`
of the newest; with --other-runs, all checkpoints go but those of the current run. A run that is being trained is left
alone, and so is the checkpoint that run.json points to.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from stages.artifacts import checkpoint, command, params, publish
from stages.artifacts.command import StageError
from stages.training import retention, run
from stages.training.params import TrainParams, TrainRuntime
from stages.training.process import is_only_writer


def main() -> None:
    parser = command.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="run, step, size, age, validation loss and state of each checkpoint")
    commands.add_parser("verify", help="hold every file against its manifest")
    pruning = commands.add_parser("prune", help="say what can go")
    pruning.add_argument("--other-runs", action="store_true", help="all checkpoints but those of the current run")
    pruning.add_argument("--yes", action="store_true", help="delete it")
    options = parser.parse_args()
    train_params = params.load(TrainParams)
    root = checkpoint.root(train_params.experiment_name)
    runs = sorted(path for path in root.glob("*/") if path.is_dir())
    if not runs:
        raise StageError(f"{root} holds no checkpoints")
    if options.command == "list":
        _list(runs)
    elif options.command == "verify":
        _verify(runs)
    else:
        _prune(runs, run.describe(train_params), options)


def _list(runs: list[Path]) -> None:
    print(f"{'run':16}  {'checkpoint':21}  {'size':>10}  {'age':>17}  {'validation loss':>15}  state")
    for directory in runs:
        complete = dict(retention.complete(directory))
        for path in sorted([*retention.leftovers(directory), *checkpoint.find(directory)]):
            loss = complete.get(path, {}).get("validation_loss")
            with suppress(FileNotFoundError):  # where a training deletes it meanwhile
                age = timedelta(seconds=int(time.time() - path.stat().st_mtime))
                print(
                    f"{directory.name:16}  {path.name:21}  {_gib(_size(path)):>10}  {age!s:>17}  "
                    f"{'' if loss is None else f'{loss:.4f}':>15}  {_state(path, complete)}"
                )


def _state(path: Path, complete: dict[Path, dict[str, Any]]) -> str:
    if path in complete:
        return "complete"
    states = {retention.TEMPORARY: "being written, or left by a crash", retention.DAMAGED: "damaged, set aside"}
    return states.get(path.suffix, "incomplete")


def _verify(runs: list[Path]) -> None:
    damaged = []
    for path in (path for directory in runs for path in checkpoint.find(directory)):
        try:
            checkpoint.verify(path)
        except StageError as error:
            if path.exists():  # else a training has deleted it meanwhile
                damaged.append(str(error))
        else:
            print(f"{path} is whole")
    if damaged:
        raise StageError("\n".join(damaged))


def _prune(runs: list[Path], current: run.Run, options: argparse.Namespace) -> None:
    pointed = _pointed(current)
    freed = 0
    for directory in runs:
        with is_only_writer(directory) as alone:
            if not alone:
                print(f"{directory} is being trained: left alone")
                continue
            all_of_it = options.other_runs and directory.name != current.run_id
            all_paths = [*retention.leftovers(directory), *checkpoint.find(directory)]
            for path in all_paths if all_of_it else _expendable(directory):
                if path == pointed:
                    continue
                size = _size(path)
                freed += size
                print(f"{'deleting' if options.yes else 'would delete'} {path}, {_gib(size)}")
                if options.yes:
                    retention.delete([path])
    print(f"{_gib(freed)} {'are free' if options.yes else 'would be free: say prune --yes'}")


def _pointed(current: run.Run) -> Path | None:
    """The checkpoint that run.json points to, from which the model is consolidated."""
    experiment_name = current.params.experiment_name
    try:
        pointer = publish.read_json(Path("outputs") / experiment_name / "run.json")
    except FileNotFoundError:
        return None
    path: Path = checkpoint.root(experiment_name) / pointer["run_id"] / pointer["checkpoint"]
    return path


def _expendable(directory: Path) -> Iterator[Path]:
    """What one run does not need any more."""
    yield from retention.leftovers(directory)
    published = checkpoint.find(directory)
    try:
        newest = checkpoint.newest_whole(published, print)
    except StageError as error:
        print(f"{error}: left alone")
        return
    if newest is None:
        return
    manifest = checkpoint.read_manifest(newest)
    finished = manifest["step"] >= manifest["total_steps"]
    keep = 1 if finished else params.load(TrainRuntime, "runtime").keep_checkpoints
    damaged = set(published) - {path for path, _ in retention.complete(directory)}
    yield from (path for path in published if path in damaged.union(retention.superfluous(directory, keep)) - {newest})


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"


if __name__ == "__main__":
    command.run(main)
