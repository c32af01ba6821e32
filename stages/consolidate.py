"""Turn the sharded checkpoint of a training into a Hugging Face model directory.

Reads     outputs/<experiment_name>/run.json, the checkpoint it points to, data/model.json and the files it lists
Writes    outputs/<experiment_name>/model/: config, tokenizer, generation config, safetensors (with an index where they
          are several), README.md (the model card), lineage.json
Command   python -m stages.consolidate

Every tensor is held against the checkpoint's manifest and against the model that config.json describes, and the
directory appears when all of it is written. Weights are stored in the dtype of the source model, or in `export_dtype`,
tied ones once.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.artifacts import checkpoint, command, params, publish
from stages.artifacts.command import StageError
from stages.export import card, history
from stages.model import headers, manifest
from stages.model.manifest import ModelManifest

if TYPE_CHECKING:
    from stages.export.stream import TensorSpec


@dataclass(frozen=True)
class ConsolidateParams:
    """Which experiment is meant, and how its model is stored."""

    experiment_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the directory under outputs/."""
    export_dtype: Literal["bf16", "fp16", "fp32"] | None
    """Of the weights; None: that of the source model."""


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    options = params.load(ConsolidateParams)
    model = manifest.read()
    pointer, source = _checkpoint(options.experiment_name)
    if pointer["identity"]["model"] != publish.sha256_file(manifest.MANIFEST):
        raise StageError(f"{manifest.MANIFEST} is not the one that the run was trained with: run `dvc repro train`")
    if options.export_dtype is not None:
        model = replace(model, dtype=_DTYPES[options.export_dtype])
    outputs = Path("outputs") / options.experiment_name
    weights = export(options.experiment_name, model, pointer, source, outputs / "model")
    size = sum((outputs / "model" / name).stat().st_size for name in weights)
    print(
        f"consolidate: {outputs / 'model'}: step {pointer['step']} of run {pointer['run_id']}, {model.dtype}, "
        f"{size:,} bytes in {len(weights)} files"
    )


def _checkpoint(experiment_name: str) -> tuple[dict[str, Any], Path]:
    """Content of run.json, and the directory of the checkpoint that it points to."""
    path = Path("outputs") / experiment_name / "run.json"
    try:
        pointer: dict[str, Any] = publish.read_json(path)
    except FileNotFoundError:
        raise StageError(f"{path} is missing: run `dvc repro train`") from None
    source = checkpoint.root(experiment_name) / pointer["run_id"] / pointer["checkpoint"]
    if not (source / checkpoint.MANIFEST).is_file():
        raise StageError(
            f"the checkpoint {source}, to which {path} points, is gone: set CHECKPOINT_ROOT to where it lies, "
            "or run `dvc repro -f train`"
        )
    if publish.sha256_file(source / checkpoint.MANIFEST) != pointer["manifest_sha256"]:
        raise StageError(f"{source / checkpoint.MANIFEST} is not the one that {path} names: run `dvc repro -f train`")
    return pointer, source


def export(name: str, model: ModelManifest, pointer: dict[str, Any], source: Path, target: Path) -> list[str]:
    """Write the model directory `target` from the checkpoint `source`; return the names of its weight files."""
    import torch

    from stages.export import stream
    from stages.model import meta

    content = checkpoint.verify(source)
    described = [file for file in model.files if file not in model.weights and file != headers.INDEX]
    directory = manifest.verify(model, described)
    reference = meta.build(directory)
    tied = meta.tied_weights(reference)
    expected = {
        key: stream.TensorSpec(tuple(tensor.shape), tensor.dtype)
        for key, tensor in reference.state_dict().items()
        if key not in tied
    }
    _check_manifest(source / checkpoint.MANIFEST, content["tensors"], expected)
    weights = stream.ShardedWeights(source)
    weights.check(expected)

    with publish.directory(target) as temporary:
        digests = stream.write_safetensors(weights, expected, getattr(torch, model.dtype), temporary)
        meta.check_headers(reference, headers.read(temporary, list(digests)))  # it loads as transformers would
        for file in described:
            shutil.copyfile(directory / file, temporary / file)
        _write_config(temporary / "config.json", model)
        if "generation_config.json" not in described and reference.generation_config is not None:
            reference.generation_config.save_pretrained(temporary)
        parent = _parent(directory, model)
        lineage = card.lineage(pointer, model.model_name, model.model_revision, model.commit, parent, digests)
        publish.write_json(temporary / "lineage.json", lineage)
        _, losses = history.values(history.read(source / "history.tsv"), "validation_loss")
        loss = losses[-1] if losses else None
        text = card.readme(name, lineage, model.architecture, not model.weights, loss)
        publish.write_text(temporary / "README.md", text)
    return list(digests)


def _check_manifest(path: Path, tensors: dict[str, Any], expected: dict[str, "TensorSpec"]) -> None:
    """Hold the list of tensors in a checkpoint's manifest against the model."""
    wanted = {
        name: {"shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}
        for name, spec in expected.items()
    }
    differing = sorted(name for name in wanted.keys() | tensors.keys() if wanted.get(name) != tensors.get(name))
    if differing:
        lines = [f"  {name}: {tensors.get(name)} instead of {wanted.get(name)}" for name in differing[:5]]
        raise StageError("\n".join([f"{path}: {len(differing)} tensors are not those of the model", *lines]))


def _parent(directory: Path, model: ModelManifest) -> dict[str, Any] | None:
    """The lineage of the model that the run started from, where its lineage.json speaks of these very weights."""
    if "lineage.json" not in model.files or not model.weights:
        return None
    try:
        lineage: dict[str, Any] = publish.read_json(directory / "lineage.json")
        described = lineage["weights"]
    except (ValueError, KeyError, TypeError):  # a file of the same name that another program wrote
        return None
    return lineage if described == {name: model.files[name].sha256 for name in model.weights} else None


def _write_config(path: Path, model: ModelManifest) -> None:
    """Keep the source's config, and say which class and which dtype the weights now have."""
    config = {key: value for key, value in json.loads(path.read_bytes()).items() if key not in _OF_THE_SOURCE}
    publish.write_json(path, {**config, "architectures": [model.architecture], "dtype": model.dtype})


# An older name of `dtype`, and where somebody's copy of the model lay.
_OF_THE_SOURCE = {"torch_dtype", "_name_or_path"}


if __name__ == "__main__":
    command.run(main)
