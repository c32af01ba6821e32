"""A run: what identifies it, where its checkpoints are, and which checkpoint it may continue from.

`run_id` is the digest of all that DVC watches for the train stage: parameters, tokens, model manifest, code. So a run
can be killed at any time and continue, while with a changed learning rate it is another run.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.artifacts import code, outputs, publish
from stages.artifacts.errors import StageError
from stages.artifacts.identity import Adoption, RunIdentity, TokenFingerprints
from stages.artifacts.params_file import load_params
from stages.checkpointing import retention
from stages.checkpointing.layout import CheckpointManifest, UnsupportedFormat, checkpoint_root, list_checkpoints
from stages.checkpointing.lock import try_delete_lock
from stages.model.manifest import MANIFEST, ModelManifest
from stages.tokens.packed import TRAIN, VALIDATION, PackedTokens
from stages.training import handoff
from stages.training.params import TrainParams, TrainRuntime
from stages.training.schedule import ScheduleParams, lr_ratio

ENTRIES = ("stages.launch", "stages.train")
"""The modules that the train stage runs: the launcher, and each rank."""

_SCHEDULE = {field.name for field in dataclasses.fields(ScheduleParams)}
_NEUTRAL = {
    *("experiment_name", "export_from", "batch_size", "num_epochs", "max_steps", "history_freq"),
    *("eval_batch_size", "eval_freq", "eval_rows"),
    *("activation_checkpointing", "attention", "compile", "deterministic", "fsdp", "loss"),
}
"""Parameters that may differ between two runs which compute the same weights, up to rounding, at every step that both
of them do. Those of the schedule may differ too: the learning rates themselves are compared, step by step."""

_ABSENT = "nothing"
"""What a difference shows for a parameter that a run does not have."""


@dataclass(frozen=True)
class Run:
    """One training, from its first step to its last."""

    params: TrainParams
    identity: RunIdentity
    num_rows: int
    """Training rows."""
    seq_length: int
    """Tokens per row."""

    @property
    def run_id(self) -> str:
        """Name of the run: the first 16 hexadecimal digits of the digest of its identity."""
        # 64 bits: names stay short. `resume_candidates` compares the identities themselves.
        return publish.sha256_json(dataclasses.asdict(self.identity))[:16]

    @property
    def directory(self) -> Path:
        """Where its checkpoints are."""
        return checkpoint_root(self.params.experiment_name) / self.run_id

    @property
    def log_directory(self) -> Path:
        """For logs and trackers. Like the checkpoints, it is not in the copy that `dvc exp run --temp` deletes."""
        return Path(os.environ.get("DVC_ROOT", ".")) / outputs.directory(self.params.experiment_name)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.params.total_steps(self.num_rows)


def describe(params: TrainParams) -> Run:
    """The run that `params` and the files of this directory make. Imports no torch, reads no tokens.

    Raises:
        StageError: a file is missing or damaged, or there are no rows for `export_from`.
    """
    train, validation = PackedTokens.read(TRAIN), PackedTokens.read(VALIDATION)
    params.check_export_from(validation.num_rows)
    identity = RunIdentity(
        params=dataclasses.asdict(params),
        data=TokenFingerprints(train.fingerprint, validation.fingerprint),
        model=publish.sha256_file(MANIFEST),
        code=code.digest(*ENTRIES),
    )
    return Run(
        params=params,
        identity=identity,
        num_rows=train.num_rows,
        seq_length=train.seq_length,
    )


def read_run() -> tuple[Run, TrainRuntime]:
    """What to train: what the launcher has read, or without one what is in params.yaml now.

    Raises:
        StageError: the code, the tokens or the model are not those that the launcher has read.
    """
    launch = handoff.received()
    if launch is None:
        return describe(load_params(TrainParams)), load_params(TrainRuntime, "runtime")
    run = describe(launch.params)
    if lines := differences(launch.identity, run.identity):
        reasons = "\n".join(lines)
        raise StageError(f"the files have changed since the launch (there): launch the training again\n{reasons}")
    return run, launch.runtime


def start_over(run: Run) -> None:
    """Delete the checkpoints of a run.

    `retention.prune` would count the old steps as the newest, and a rename could not replace them.

    Raises:
        StageError: another run reads from them, or the run could not start without them.
    """
    if run.params.extend_from is not None:
        _last_to_extend(run)  # raises before anything is deleted
    with try_delete_lock(run.directory) as nobody_reads:
        if not nobody_reads:
            raise StageError(f"{run.directory} is being read, so it cannot start over: launch it again in a minute")
        retention.delete(list_checkpoints(run.directory))


def check_extend_from(run: Run, runtime: TrainRuntime) -> None:
    """Check that the run that `extend_from` names can be extended, if a launch would start from it.

    Raises:
        StageError: it cannot.
    """
    if run.params.extend_from is not None and (runtime.resume == "never" or not list_checkpoints(run.directory)):
        _last_to_extend(run)


def resume_candidates(run: Run, runtime: TrainRuntime, report: Callable[[str], None]) -> list[Path]:
    """The checkpoints from which `run` may continue, best first; none: it starts at step 0.

    Its own exclude all others. Without any, those of other runs of the experiment that `_may_adopt` accepts (not with
    `resume: never`, with `export_from: best`, nor in a copy of the project); without those, the last one of the run
    that `extend_from` names.

    Raises:
        StageError: a checkpoint in the run's own directory belongs to another run, or that run cannot be extended.
    """
    # Own checkpoints exclude all others, even those with more steps. With `never` they are those of this launch.
    if own := list_checkpoints(run.directory):
        for path, manifest in _readable(own, report):
            if manifest.identity != run.identity:
                lines = "\n".join(differences(manifest.identity, run.identity))
                raise StageError(f"{path} belongs to another run; move it away. It differs in\n{lines}")
        return own
    others = []
    # Which validations are its own, of which it exports the best, must not depend on how far another run was.
    may_adopt = runtime.resume == "auto" and run.params.export_from == "last" and not _is_copy()
    for directory in checkpoint_root(run.params.experiment_name).glob("*/") if may_adopt else ():
        checkpoints = list(_readable(list_checkpoints(directory), report))
        # Of all its checkpoints: the last one but one of a finished run is not that of an unfinished one.
        is_finished = any(manifest.step >= manifest.total_steps for _, manifest in checkpoints)
        for path, manifest in checkpoints:
            if _may_adopt(run, manifest, is_finished):
                others.append((manifest.step, path))
    others.sort(reverse=True)  # the most steps first: they need not be computed again
    if others:
        report(f"continuing from {others[0][1]}, whose run was identical until there")
    elif run.params.extend_from is not None:
        others = [(0, _last_to_extend(run))]
        report(f"extending {others[0][1]} with another schedule")
    return [path for _, path in others]


def _is_copy() -> bool:
    """Whether this is the copy that DVC makes of a project for `dvc exp run --temp` and queued experiments.

    Several of them train at the same time. If one adopted a checkpoint of another, its result would depend on which of
    them was ahead, or was interrupted.
    """
    return Path(os.environ.get("DVC_ROOT", ".")).resolve() != Path.cwd()


def _readable(paths: list[Path], report: Callable[[str], None]) -> Iterator[tuple[Path, CheckpointManifest]]:
    """Those of `paths` whose manifest is valid, each with it."""
    for path in paths:
        try:
            yield path, CheckpointManifest.read(path)
        except UnsupportedFormat as error:  # without a word, a run that could have continued would start over
            report(f"not considered: {error}")
        except StageError:
            pass  # `latest_valid` reports the damaged ones


def _may_adopt(run: Run, manifest: CheckpointManifest, is_finished: bool) -> bool:
    """Whether `run` may continue from a checkpoint of another run, which `is_finished` or not.

    It may where it would have reached these very weights itself, up to rounding:

    - the same training rows and the same model to start from;
    - the same parameters, but for those that cannot change the weights (`_NEUTRAL`);
    - the same learning rate at every step until the checkpoint.

    The code may differ: an unfinished run continues after a bug fix. And the two runs must not be the same piece of
    work done twice: a *finished* run is continued only by a longer one. So a run that ran out of memory continues with
    a smaller `batch_size`, and more `num_epochs` continue a finished run, but the same training with other code, once
    it was finished, is trained again from step 0.

    What is wrongly accepted here is a model that no run from scratch would give. So anything not listed counts as
    different: a new parameter prevents an adoption until someone has thought about it.
    """
    if manifest.step >= run.total_steps or (is_finished and manifest.total_steps >= run.total_steps):
        return False
    # The router loss of a mixture of experts is computed once per forward pass, so it depends on the rows of one.
    changing = {"batch_size"} if ModelManifest.read().router_loss_coef else set()
    if _obstacles(manifest.identity, run.identity, (_NEUTRAL | _SCHEDULE) - changing):
        return False
    # The rates, not the parameters of the schedule: with `wsd`, runs of different lengths share the stable phase.
    # Exact equality is right, as the same function computed both.
    schedule = ScheduleParams(**{name: manifest.identity.params[name] for name in _SCHEDULE})
    return all(
        schedule.lr * lr_ratio(schedule, manifest.total_steps, step)
        == run.params.lr * lr_ratio(run.params, run.total_steps, step)
        for step in range(manifest.step)
    )


def _last_to_extend(run: Run) -> Path:
    """The last checkpoint of the run that `extend_from` names.

    Unlike an adopted run it has other learning rates, so the result is another one than from scratch. That is why
    `extend_from` is a parameter, part of the identity, and names one run: the result depends on nothing else.

    Raises:
        StageError: it has not finished, differs in more than `_may_adopt` allows and the schedule, or is not shorter.
    """
    last = {}
    for directory in checkpoint_root(run.params.experiment_name).glob("*/"):
        for path, manifest in _readable(list_checkpoints(directory)[:1], lambda message: None):
            if directory != run.directory and manifest.step >= manifest.total_steps:
                last[manifest.run_id] = (path, manifest)
    ignored = _NEUTRAL | _SCHEDULE | {"extend_from"}
    obstacles = {run_id: _obstacles(manifest.identity, run.identity, ignored) for run_id, (_, manifest) in last.items()}
    for run_id, (_, manifest) in last.items():
        if manifest.step >= run.total_steps:
            obstacles[run_id].append(f"steps: {manifest.step} there, only {run.total_steps} here")
    wanted = str(run.params.extend_from)
    if wanted in last and not obstacles[wanted]:
        return last[wanted][0]
    lines = "\n".join(obstacles.get(wanted, [f"there is no finished run of this name in {run.directory.parent}"]))
    possible = ", ".join(sorted(run_id for run_id in last if not obstacles[run_id])) or "none"
    raise StageError(f"extend_from: run {wanted} cannot be extended:\n{lines}\nruns that can be extended: {possible}")


def _obstacles(theirs: RunIdentity, ours: RunIdentity, ignored: set[str]) -> list[str]:
    """The differences that keep one run from continuing the other; those of the parameters `ignored` do not."""
    found = []
    for name, there, here in _compare(dataclasses.asdict(theirs), dataclasses.asdict(ours)):
        section, _, parameter = name.partition(".")
        # Validation rows are only measured, so they may differ. A parameter that only one of the runs has comes from
        # another version of the code, so it counts although it is ignored.
        is_ignored = parameter.partition(".")[0] in ignored and _ABSENT not in (there, here)
        if not (name in ("code", "data.validation") or (section == "params" and is_ignored)):
            found.append(f"{name}: {there} there, {here} here")
    return found


def differences(theirs: RunIdentity, ours: RunIdentity) -> list[str]:
    """One line for each leaf that differs: `params.batch_size: 2 there, 4 here`."""
    compared = _compare(dataclasses.asdict(theirs), dataclasses.asdict(ours))
    return [f"{name}: {there} there, {here} here" for name, there, here in compared]


def _compare(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name in sorted(old.keys() | new.keys()):
        if isinstance(old.get(name), dict) and isinstance(new.get(name), dict):
            yield from _compare(old[name], new[name], f"{prefix}{name}.")
            continue
        if name not in old or name not in new or old[name] != new[name]:
            there, here = (repr(values[name]) if name in values else _ABSENT for values in (old, new))
            yield f"{prefix}{name}", there, here


def adoption(run: Run, manifest: CheckpointManifest) -> Adoption:
    """What the lineage of `run` records of the checkpoint of another run that it continues from."""
    return Adoption(manifest.run_id, manifest.step, differences(manifest.identity, run.identity), manifest.adopted)


def validates_same_rows(run: Run, manifest: CheckpointManifest) -> bool:
    """Whether the validation losses of a checkpoint, which `run` adopts, are on the rows that `run` measures."""
    theirs, ours = manifest.identity, run.identity
    return theirs.data.validation == ours.data.validation and theirs.params["eval_rows"] == ours.params["eval_rows"]


def packages() -> dict[str, str]:
    """The versions of what computes the result."""
    return {name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")}
