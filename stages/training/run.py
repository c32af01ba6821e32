"""A run: what identifies it, where its checkpoints are, and which checkpoint it may continue from.

`run_id` is the digest of all that DVC watches for the train stage: parameters, tokens, model manifest, code. So a run
can be killed at any time and continue, while a changed learning rate never continues the old model.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.artifacts import code, publish
from stages.artifacts.errors import StageError
from stages.artifacts.identity import Adoption, RunIdentity, TokenFingerprints
from stages.checkpointing.layout import CheckpointManifest, UnsupportedFormat, checkpoint_root, list_checkpoints
from stages.model.manifest import MANIFEST
from stages.tokens.packed import TRAIN, VALIDATION, PackedTokens
from stages.training.params import TrainParams, TrainRuntime
from stages.training.schedule import ScheduleParams, lr_ratio

_ENTRIES = ("stages.launch", "stages.train")
"""The modules that the train stage runs: the launcher, and each rank."""

_SCHEDULE = {field.name for field in dataclasses.fields(ScheduleParams)}
_NEUTRAL = {
    *("experiment_name", "batch_size", "num_epochs", "max_steps", "eval_freq", "history_freq"),
    *("activation_checkpointing", "compile", "fsdp"),
}
"""Parameters that may differ between two runs which compute the same weights, up to rounding, at every step that both
of them do. Those of the schedule may differ too: the learning rates themselves are compared, step by step."""


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
        return Path(os.environ.get("DVC_ROOT", ".")) / "outputs" / self.params.experiment_name

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.params.total_steps(self.num_rows)


def describe(params: TrainParams) -> Run:
    """The run that `params` and the files of this directory make. Imports no torch, reads no tokens."""
    train, validation = PackedTokens.read(TRAIN), PackedTokens.read(VALIDATION)
    identity = RunIdentity(
        params=dataclasses.asdict(params),
        data=TokenFingerprints(train.fingerprint, validation.fingerprint),
        model=publish.sha256_file(MANIFEST),
        code=code.digest(*_ENTRIES),
    )
    return Run(
        params=params,
        identity=identity,
        num_rows=train.num_rows,
        seq_length=train.seq_length,
    )


def resume_candidates(run: Run, runtime: TrainRuntime, report: Callable[[str], None]) -> list[Path]:
    """The checkpoints from which `run` may continue, best first; none: it starts at step 0.

    Its own come first. Without any, those of another run of the experiment that `_may_adopt` accepts.

    Raises:
        StageError: a checkpoint in the run's own directory belongs to another run.
    """
    if runtime.resume == "never":
        return []
    # Own checkpoints exclude all others, even those with more steps.
    if own := list_checkpoints(run.directory):
        for path, manifest in _readable(own, report):
            if manifest.identity != run.identity:
                differences = "\n".join(_differences(manifest.identity, run.identity))
                raise StageError(f"{path} belongs to another run; move it away. It differs in\n{differences}")
        return own
    others = []
    for directory in checkpoint_root(run.params.experiment_name).glob("*/"):
        checkpoints = list(_readable(list_checkpoints(directory), report))
        # Of all its checkpoints: the last one but one of a finished run is not that of an unfinished one.
        is_finished = any(manifest.step >= manifest.total_steps for _, manifest in checkpoints)
        for path, manifest in checkpoints:
            if _may_adopt(run, manifest, is_finished, extend=runtime.resume == "extend"):
                others.append((manifest.step, path))
    others.sort(reverse=True)  # the most steps first: they need not be computed again
    if others:
        report(f"continuing from {others[0][1]}, whose run was identical until there")
    return [path for _, path in others]


def _readable(paths: list[Path], report: Callable[[str], None]) -> Iterator[tuple[Path, CheckpointManifest]]:
    """Those of `paths` whose manifest is valid, each with it."""
    for path in paths:
        try:
            yield path, CheckpointManifest.read(path)
        except UnsupportedFormat as error:  # without a word, a run that could have continued would start over
            report(f"not considered: {error}")
        except StageError:
            pass  # `latest_valid` reports the damaged ones


def _may_adopt(run: Run, manifest: CheckpointManifest, is_finished: bool, extend: bool) -> bool:
    """Whether `run` may continue from a checkpoint of another run, which `is_finished` or not.

    It may where it would have reached these very weights itself, up to rounding:

    - the same training rows and the same model to start from;
    - the same parameters, but for those that cannot change the weights (`_NEUTRAL`);
    - the same learning rate at every step until the checkpoint (with `extend`, any learning rate).

    The code may differ: an unfinished run continues after a bug fix. And the two runs must not be the same piece of
    work done twice: a *finished* run is continued only by a longer one. So a run that ran out of memory continues with
    a smaller `batch_size`, and more `num_epochs` continue a finished run, but the same training with other code, once
    it was finished, is trained again from step 0.

    What is wrongly accepted here is a model that no run from scratch would give. So anything not listed counts as
    different: a new parameter prevents an adoption until someone has thought about it.
    """
    if manifest.step >= run.total_steps or (is_finished and manifest.total_steps >= run.total_steps):
        return False
    theirs, ours = manifest.identity, run.identity
    # Validation rows are only measured, so they may differ.
    if theirs.data.train != ours.data.train or theirs.model != ours.model:
        return False
    # Also the names: a parameter that only one of them has comes from another version of the code.
    compared = ours.params.keys() - _NEUTRAL - _SCHEDULE
    if theirs.params.keys() != ours.params.keys() or any(theirs.params[name] != ours.params[name] for name in compared):
        return False
    if extend:
        return True
    # The rates, not the parameters of the schedule: with `wsd`, runs of different lengths share the stable phase.
    # Exact equality is right, as the same function computed both.
    schedule = ScheduleParams(**{name: theirs.params[name] for name in _SCHEDULE})
    return all(
        schedule.lr * lr_ratio(schedule, manifest.total_steps, step)
        == run.params.lr * lr_ratio(run.params, run.total_steps, step)
        for step in range(manifest.step)
    )


def _differences(theirs: RunIdentity, ours: RunIdentity) -> list[str]:
    """One line for each leaf that differs: `params.batch_size: 2 there, 4 here`."""

    def compare(old: dict[str, Any], new: dict[str, Any], prefix: str) -> Iterator[str]:
        for name in sorted(old.keys() | new.keys()):
            there, here = old.get(name), new.get(name)
            if isinstance(there, dict) and isinstance(here, dict):
                yield from compare(there, here, f"{prefix}{name}.")
            elif there != here:
                yield f"{prefix}{name}: {there!r} there, {here!r} here"

    return list(compare(dataclasses.asdict(theirs), dataclasses.asdict(ours), ""))


def adoption(run: Run, manifest: CheckpointManifest) -> Adoption:
    """What the lineage of `run` records of the checkpoint of another run that it continues from."""
    return Adoption(manifest.run_id, manifest.step, _differences(manifest.identity, run.identity), manifest.adopted)


def packages() -> dict[str, str]:
    """The versions of what computes the result."""
    return {name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")}
