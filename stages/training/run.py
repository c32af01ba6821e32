"""A run: what makes it this run and no other, where its checkpoints lie, and where it begins.

`run_id` is the digest of all that DVC watches for the train stage: parameters, data, model manifest, code. So a run
can be killed at any time and go on, while a changed learning rate can never continue the old model.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import yaml

from stages.artifacts import checkpoint, publish
from stages.artifacts.command import StageError
from stages.artifacts.params import PIPELINE_FILE
from stages.training.params import TrainParams, TrainRuntime
from stages.training.schedule import lr_ratio

MODEL = Path("data/model.json")
TRAIN = Path("data/tokens/train")
VALIDATION = Path("data/tokens/validation")

# What a run may change and still take the same path: the same rows, and up to rounding the same weights, at each step.
# The learning rate is compared step by step instead.
_FREE = {
    *("experiment_name", "batch_size", "num_epochs", "max_steps", "eval_freq", "history_freq"),
    *("activation_checkpointing", "compile", "fsdp"),
    *("lr", "lr_schedule", "lr_decay_steps", "lr_decay_ratio", "min_lr_ratio", "warmup_steps"),
}


@dataclass(frozen=True)
class Run:
    """One training, from its first step to its last."""

    params: TrainParams
    identity: dict[str, Any]
    """What `run_id` digests: `params`, `data`, `model`, `code`."""
    num_rows: int
    """Training rows."""
    num_validation_rows: int
    """Validation rows."""
    seq_length: int
    """Tokens a row."""

    @property
    def run_id(self) -> str:
        """Name of the run: the first 16 hexadecimal digits of the digest of its identity."""
        return publish.sha256_json(self.identity)[:16]

    @property
    def directory(self) -> Path:
        """Where its checkpoints lie."""
        return checkpoint.root(self.params.experiment_name) / self.run_id

    @property
    def aside(self) -> Path:
        """Where goes what is no result: logs, and what trackers write. As checkpoints do, it outlives a copy."""
        return Path(os.environ.get("DVC_ROOT", ".")) / "outputs" / self.params.experiment_name

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.params.total_steps(self.num_rows)


def describe(params: TrainParams) -> Run:
    """The run that `params` and the files of this directory make. Imports no torch, reads no tokens."""
    deps = yaml.safe_load(PIPELINE_FILE.read_text(encoding="utf-8"))["stages"]["train"]["deps"]
    code = [path for dep in deps if dep.startswith("stages/") for path in _sources(Path(dep))]
    datasets = {path: _dataset(path) for path in (TRAIN, VALIDATION)}
    identity = {
        "params": dataclasses.asdict(params),
        "data": {path.name: dataset["_fingerprint"] for path, dataset in datasets.items()},
        "model": publish.sha256_file(MODEL),
        "code": publish.sha256_json({str(path): publish.sha256_file(path) for path in sorted(code)}),
    }
    features = publish.read_json(TRAIN / "dataset_info.json")["features"]
    return Run(
        params,
        identity,
        num_rows=_num_rows(datasets[TRAIN]),
        num_validation_rows=_num_rows(datasets[VALIDATION]),
        seq_length=features["input_ids"]["length"],
    )


def _num_rows(dataset: dict[str, Any]) -> int:
    return sum(shard["rows"] for shard in dataset["_data_files"])


def _sources(path: Path) -> list[Path]:
    return list(path.rglob("*.py")) if path.is_dir() else [path]


def _dataset(path: Path) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], publish.read_json(path / "state.json"))
    except FileNotFoundError:
        raise StageError(f"{path} is missing: run `dvc repro pack`") from None


def starting_points(run: Run, runtime: TrainRuntime, report: Callable[[str], None]) -> list[Path]:
    """The checkpoints from which `run` may go on, best first; none: it begins at step 0.

    Its own come first. Else those of a sibling that took the same path so far, and either did not finish or has fewer
    steps to go than this run.

    Raises:
        StageError: a checkpoint in the run's own directory belongs to another run.
    """
    if runtime.resume == "never":
        return []
    if own := checkpoint.find(run.directory):
        for path, manifest in _manifests(own):
            if manifest["identity"] != run.identity:
                differences = "\n".join(_differences(manifest["identity"], run.identity))
                raise StageError(f"{path} belongs to another run; move it away. It differs in\n{differences}")
        return own
    siblings = []
    for directory in checkpoint.root(run.params.experiment_name).glob("*/"):
        for path, manifest in _manifests(checkpoint.find(directory)):
            if _may_adopt(run, manifest, extend=runtime.resume == "extend"):
                siblings.append((manifest["step"], path))
    siblings.sort(reverse=True)
    if siblings:
        report(f"going on from {siblings[0][1]}, whose run took the same path until there")
    return [path for _, path in siblings]


def _manifests(paths: list[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Those of `paths` whose manifest is whole, each with it."""
    for path in paths:
        with suppress(StageError):
            yield path, checkpoint.read_manifest(path)


def _may_adopt(run: Run, manifest: dict[str, Any], extend: bool) -> bool:
    identity, step, theirs_total = manifest["identity"], manifest["step"], manifest["total_steps"]
    finished = step >= theirs_total
    if step >= run.total_steps or (finished and theirs_total >= run.total_steps):
        return False
    if identity["data"]["train"] != run.identity["data"]["train"] or identity["model"] != run.identity["model"]:
        return False
    theirs, ours = identity["params"], run.identity["params"]
    if theirs.keys() != ours.keys() or any(theirs[name] != ours[name] for name in theirs.keys() - _FREE):
        return False
    if extend:
        return True
    other = _schedule_params(run.params, theirs)
    return all(
        other.lr * lr_ratio(other, theirs_total, k) == run.params.lr * lr_ratio(run.params, run.total_steps, k)
        for k in range(step)
    )


def _schedule_params(params: TrainParams, theirs: dict[str, Any]) -> TrainParams:
    names = ("lr", "lr_schedule", "lr_decay_steps", "lr_decay_ratio", "min_lr_ratio", "warmup_steps")
    return dataclasses.replace(params, **{name: theirs[name] for name in names})


def _differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted(theirs.keys() | ours.keys()):
        old, new = theirs.get(name), ours.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}: {old!r} there, {new!r} here"


def adoption(run: Run, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the lineage of `run` shall say of the checkpoint of another run that it goes on from."""
    return {
        "run_id": manifest["run_id"],
        "step": manifest["step"],
        "differences": list(_differences(manifest["identity"], run.identity)),
        "adopted": manifest["adopted"],
    }


def packages() -> dict[str, str]:
    """The versions of what computes the result."""
    return {name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")}


def write_outs(run: Run, path: Path) -> None:
    """Write the outs of the train stage from the last checkpoint of a run: the same files whenever it is called."""
    manifest = checkpoint.read_manifest(path)
    state = publish.read_json(path / "state.json")
    outputs = Path("outputs") / run.params.experiment_name
    publish.write_text(outputs / "history.tsv", (path / "history.tsv").read_text(encoding="utf-8"))
    publish.write_json(outputs / "train_metrics.json", state["metrics"])
    pointer = {
        "run_id": run.run_id,
        "step": manifest["step"],
        "checkpoint": path.name,
        "manifest_sha256": publish.sha256_file(path / checkpoint.MANIFEST),
        **{name: manifest[name] for name in ("identity", "adopted", "packages")},
    }
    publish.write_json(outputs / "run.json", pointer)
