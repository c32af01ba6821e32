"""What a launch does: nothing, resume, adopt the checkpoint of another run, extend one, or start.

Whoever holds the lock of the run decides, once for each start of the ranks: the launcher, or rank 0 where something
else has started them. `launch --explain`, and the submission of a job, only look. The ranks take the first checkpoint
of the decision whose files match their digests.
"""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from stages.base.errors import StageError
from stages.base.files import DamagedFile, first_problem
from stages.base.identity import RunIdentity
from stages.base.summary import counted
from stages.checkpointing import retention
from stages.checkpointing.adoption import adopt
from stages.checkpointing.layout import (
    CheckpointManifest,
    UnsupportedFormat,
    checkpoint_root,
    is_copy,
    list_checkpoints,
    step_name,
    verify,
)
from stages.checkpointing.run import ABSENT, Run, compare, differences
from stages.model.manifest import ModelManifest
from stages.training.schedule import ScheduleParams, learning_rate

_SCHEDULE = {field.name for field in dataclasses.fields(ScheduleParams)}
_NEUTRAL = {
    *("experiment_name", "export_from", "batch_size", "num_epochs", "max_steps", "history_freq"),
    *("eval_batch_size", "eval_freq", "eval_rows"),
    *("activation_checkpointing", "attention", "compile", "context_parallel", "deterministic", "fsdp", "loss"),
}
"""Parameters that may differ between two runs which compute the same weights, up to rounding and the masks of
dropout, at every step that both of them do. Those of the schedule may differ too: the learning rates themselves are
compared, step by step."""

_ADDED = {"context_parallel": 1, "lora_base": None}
"""Parameters that older runs do not have, and what these did."""
_DIGESTS = {"data.train": "it was trained on other tokens", "model": "it began with another initial model"}
"""What to say of parts of an identity that are digests, which tell a person nothing."""

Resume = Literal["auto", "never", "own"]
"""`runtime.resume`; `own`: it is `never`, and this is a restart, whose checkpoints must not be deleted."""


@dataclass(frozen=True)
class Found:
    """What `find` has found on the disk, and what else a decision depends on."""

    own: dict[Path, CheckpointManifest | StageError]
    """The checkpoints of the run itself, newest first, or why their manifest cannot be read."""
    has_last: bool
    """Whether the last of them is there, and its files have the sizes that its manifest lists."""
    others: dict[Path, CheckpointManifest]
    """Those of other runs of the experiment that can be read, newest first in each run."""
    unsupported: list[str]
    """What is said of those that other versions of the pipeline wrote."""
    is_copy: bool
    """As the function of this name."""
    has_router_loss: bool
    """Of the model: whether it trains the routers of a mixture of experts."""


@dataclass(frozen=True)
class Decision:
    """What a launch does."""

    action: Literal["finished", "resume", "adopt", "extend", "start"]
    checkpoints: list[Path]
    """Where the training continues from: the first one that is valid. Empty: it starts at step 0."""
    reason: str
    """For people."""


def find(run: Run) -> Found:
    """Look for the checkpoints of the experiment of `run`. Reads no tensors: a finished run may have terabytes."""

    def read(directory: Path) -> dict[Path, CheckpointManifest | StageError]:
        found: dict[Path, CheckpointManifest | StageError] = {}
        for path in list_checkpoints(directory):
            try:
                found[path] = CheckpointManifest.read(path)
            except StageError as error:
                found[path] = error  # `layout.latest_valid` reports the damaged ones
        return found

    directories = sorted(checkpoint_root(run.params.experiment_name).glob("*/"))
    others = [entry for each in directories if each.name != run.run_id for entry in read(each).items()]
    return Found(
        own=read(run.directory),
        has_last=_is_complete(run.directory / step_name(run.total_steps)),
        others={path: manifest for path, manifest in others if isinstance(manifest, CheckpointManifest)},
        unsupported=[str(error) for _, error in others if isinstance(error, UnsupportedFormat)],
        # Several copies train at the same time. If one adopted a checkpoint of another, its result would depend on
        # which of them was ahead, or was interrupted.
        is_copy=is_copy(),
        has_router_loss=bool(ModelManifest.read().router_loss_coef),
    )


def _is_complete(checkpoint: Path) -> bool:
    try:
        manifest = verify(checkpoint, contents=False)
        verify(checkpoint, names=[name for name in manifest.files if "/" not in name])  # what the outs are written from
    except StageError:
        return False  # the training falls back to the checkpoint before it
    return True


def decide(run: Run, resume: Resume, found: Found) -> Decision:
    """What a launch of `run` does. A function of its arguments alone.

    | checkpoints | then |
    |---|---|
    | the last one of the run itself | nothing: it has finished |
    | others of the run itself | resume |
    | of another run with the same weights until there, and unfinished or shorter | adopt the one with the most steps |
    | none of these, and `extend_from` names a finished and shorter run | extend that one |
    | none | start |

    `_why_not_adopt` says which weights are the same.

    Args:
        run: What is to be trained.
        resume: With `never`, the checkpoints of the run itself are deleted, and it starts or extends.
        found: What `find` has found.

    Raises:
        StageError: a checkpoint in the run's own directory belongs to another run, or another version of the pipeline
            wrote it, or the run that `extend_from` names cannot be extended.
    """
    unsupported = [str(error) for error in found.own.values() if isinstance(error, UnsupportedFormat)]
    if resume != "never" and unsupported:
        raise StageError(*unsupported, "runtime.resume=never deletes them and starts over")
    if resume != "never" and found.own:  # they exclude all others, even those with more steps
        for path, manifest in found.own.items():
            if isinstance(manifest, CheckpointManifest) and manifest.identity != run.identity:
                lines = differences(manifest.identity, run.identity)
                raise StageError(f"{path} belongs to another run; move it away. It differs in", *lines)
        newest = next(iter(found.own))
        if found.has_last:
            reason = f"run {run.run_id} has already finished, at step {run.total_steps}: nothing to train"
            return Decision("finished", list(found.own), reason)
        reason = f"run {run.run_id} continues from its own {newest.name}, of {run.total_steps} steps"
        return Decision("resume", list(found.own), reason)
    obstacles = {path: _why_not_adopt(run, resume, path, manifest, found) for path, manifest in found.others.items()}
    if adoptable := [path for path, why in obstacles.items() if why is None]:
        # The most steps first: they need not be computed again.
        adoptable.sort(key=lambda path: (found.others[path].step, path), reverse=True)
        reason = f"continuing from {adoptable[0]}, whose run was identical until there"
        return Decision("adopt", adoptable, reason)
    if run.params.extend_from is not None:
        path = _last_to_extend(run, found)
        return Decision("extend", [path], f"extending {path} with another schedule")
    if resume == "never" and found.own:
        why = f"runtime.resume is never, which deletes {counted(len(found.own), 'checkpoint')}"
    elif not found.others:
        why = "there is no checkpoint to continue from"
    else:
        # Of the checkpoint that differs in the least, the one with the most steps.
        nearest = min(
            obstacles,
            key=lambda path: (len(differences(found.others[path].identity, run.identity)), -found.others[path].step),
        )
        why = f"no other run can be continued. The nearest checkpoint is {nearest}, but {obstacles[nearest]}"
    return Decision("start", [], "; ".join([f"run {run.run_id} starts at step 0: {why}", *found.unsupported]))


def begin(run: Run, resume: Resume) -> Decision:
    """Decide, and prepare the directory of the run, so that the ranks only have to resume from what is in it.

    Checkpoints of another run are adopted: all that it has, in case the newest turns out damaged. With `never`, the
    run's own are deleted. Called by whoever holds the lock of the run.

    Raises:
        StageError: as `decide`, or no checkpoint of the other run is valid.
    """
    decision = decide(run, resume, find(run))
    if resume == "never":  # `retention.prune` would count the old steps as the newest
        retention.delete(list_checkpoints(run.directory))
    if decision.action not in ("adopt", "extend"):
        return decision
    others = [path for path in decision.checkpoints if path.parent == decision.checkpoints[0].parent]
    own, problems = [], []
    for path in others:
        try:
            own.append(adopt(run, path))
        except (FileNotFoundError, DamagedFile) as error:
            problems.append(str(error))
    if own:
        return replace(decision, checkpoints=own)
    if any(path.exists() for path in others):
        remedy = "to start over, set runtime.resume=never, or move that directory away"
        raise StageError(*problems, f"no checkpoint in {others[0].parent} is valid; {remedy}")
    return begin(run, resume)  # its run has deleted them meanwhile


def _why_not_adopt(run: Run, resume: Resume, path: Path, manifest: CheckpointManifest, found: Found) -> str | None:
    """Why `run` may not continue from a checkpoint of another run; None: it may.

    It may where it would have reached these very weights itself, up to rounding and the masks of dropout:

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
    if resume != "auto":
        return "runtime.resume is never"
    if run.params.export_from == "best":
        # Which validations are its own, of which it exports the best, must not depend on how far another run was.
        return "export_from is best"
    if found.is_copy:
        return "this is a copy of the project, for an experiment"
    # The router loss of a mixture of experts is computed once per forward pass, so it depends on the rows of one, and
    # with attention `padded`, which `auto` may choose, on its documents.
    changing = {"batch_size", "attention"} if found.has_router_loss else set()
    if lines := _obstacles(manifest.identity, run.identity, (_NEUTRAL | _SCHEDULE) - changing):
        return ", ".join(lines)
    # Of all its checkpoints: the last one but one of a finished run is not that of an unfinished one.
    is_finished = any(other.is_finished for name, other in found.others.items() if name.parent == path.parent)
    if is_finished and manifest.total_steps >= run.total_steps:
        compared = compare(dataclasses.asdict(manifest.identity), dataclasses.asdict(run.identity))
        names = ", ".join(name.removeprefix("params.") for name, _, _ in compared)
        return f"its run has finished, with another {names}, and is not shorter"
    if manifest.step >= run.total_steps:
        return f"it is at step {manifest.step}, and this run has {run.total_steps}"
    # The rates, not the parameters of the schedule: with `wsd`, runs of different lengths share the stable phase.
    # Exact equality is right, as the same function computed both.
    try:
        schedule = TypeAdapter(ScheduleParams).validate_python(manifest.identity.params)
    except ValidationError as error:
        return f"its schedule is none ({first_problem(error)})"
    for steps_done in range(manifest.step):
        there = learning_rate(schedule, manifest.total_steps, steps_done)
        here = learning_rate(run.params, run.total_steps, steps_done)
        if there != here:
            remedy = f": extend_from={manifest.run_id} accepts that" if is_finished else ""
            return f"the learning rate of step {steps_done + 1} is {there} there, {here} here{remedy}"
    return None


def _last_to_extend(run: Run, found: Found) -> Path:
    """The last checkpoint of the run that `extend_from` names.

    Unlike an adopted run it has other learning rates, so the result is another one than from scratch. That is why
    `extend_from` is a parameter, part of the identity, and names one run: the result depends on nothing else.

    Raises:
        StageError: it has not finished, differs in more than `_why_not_adopt` allows and the schedule, or is not
            shorter.
    """
    last = {manifest.run_id: (path, manifest) for path, manifest in found.others.items() if manifest.is_finished}
    ignored = _NEUTRAL | _SCHEDULE | {"extend_from"}
    obstacles = {run_id: _obstacles(manifest.identity, run.identity, ignored) for run_id, (_, manifest) in last.items()}
    for run_id, (_, manifest) in last.items():
        if manifest.step >= run.total_steps:
            obstacles[run_id].append(f"steps: {manifest.step} there, only {run.total_steps} here")
    wanted = str(run.params.extend_from)
    if wanted in last and not obstacles[wanted]:
        return last[wanted][0]
    lines = obstacles.get(wanted, [f"there is no finished run of this name in {run.directory.parent}"])
    possible = ", ".join(sorted(run_id for run_id in last if not obstacles[run_id])) or "none"
    raise StageError(f"extend_from: run {wanted} cannot be extended:", *lines, f"runs that can be extended: {possible}")


def _obstacles(theirs: RunIdentity, ours: RunIdentity, ignored: set[str]) -> list[str]:
    """The differences that keep one run from continuing the other; those of the parameters `ignored` do not."""
    there, here = (dataclasses.asdict(identity) for identity in (theirs, ours))
    for each in (there, here):
        each["params"] = _ADDED | each["params"]
    lines = []
    for name, old, new in compare(there, here):
        section, _, parameter = name.partition(".")
        # Validation rows are only measured, so they may differ. A parameter that only one of the runs has comes from
        # another version of the code, so it counts although it is ignored.
        is_ignored = parameter.partition(".")[0] in ignored and ABSENT not in (old, new)
        if not (name in ("code", "data.validation") or (section == "params" and is_ignored)):
            lines.append(_DIGESTS.get(name) or f"{name}: {old} there, {new} here")
    return lines
