"""Turn the sharded checkpoint of a training into a Hugging Face model directory.

Reads     outputs/<experiment_name>/run.json, the checkpoint it points to, data/model.json and the files it lists; for
          the lineage data/splits/summary.json, data/extract.json and data/pack.json
Writes    outputs/<experiment_name>/model/: config, tokenizer, generation config, safetensors (with an index if there
          are several), README.md (the model card), lineage.json
Command   python -m stages.consolidate

Every tensor is compared with the checkpoint's manifest and with the model that config.json describes, and the directory
appears only when all files are written. Weights are stored in the dtype of the source model, or in `export_dtype`; tied
weights are stored once.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stages.artifacts import command, history, outputs, publish
from stages.artifacts.dtypes import PRECISIONS
from stages.artifacts.errors import StageError
from stages.artifacts.model_files import CONFIG, GENERATION_CONFIG, LINEAGE, WEIGHTS_INDEX
from stages.artifacts.origin import RECORDS, find_records
from stages.artifacts.outputs import ExperimentName
from stages.artifacts.params_file import load_params
from stages.checkpointing import layout
from stages.checkpointing.layout import TensorEntry
from stages.checkpointing.pointer import RunPointer, resolve
from stages.export import card
from stages.export.provenance import Lineage, SourceModel
from stages.model import headers
from stages.model.manifest import MANIFEST, ModelManifest
from stages.tokens.packed import find_encoder, fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.export.stream import TensorSpec

MAX_FILE_BYTES = 1 << 30
"""Tensors share a file up to this size; a larger tensor has a file of its own."""

_CARD = "README.md"

_OUTDATED_CONFIG_KEYS = {"torch_dtype", "_name_or_path"}
"""An older name of `dtype`, and where somebody's copy of the source model was."""


@dataclass(frozen=True)
class ConsolidateParams:
    """Which experiment is exported, and how its weights are stored."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""
    export_dtype: Literal["bf16", "fp16", "fp32"] | None
    """Dtype of the stored weights; null: that of the source model."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    params = load_params(ConsolidateParams)
    target = outputs.directory(params.experiment_name) / "model"
    with publish.lock(target):
        model = ModelManifest.read()
        pointer, checkpoint = resolve(params.experiment_name)
        # Config and tokenizer come from the model that data/model.json describes now, the weights from the run.
        if pointer.identity.model != publish.sha256_file(MANIFEST):
            raise StageError(f"{MANIFEST} is not the one that the run was trained with: run `dvc repro train`")
        dtype = PRECISIONS[params.export_dtype] if params.export_dtype else model.dtype
        weights = export(params.experiment_name, model, dtype, pointer, checkpoint, target)
    size = sum((target / name).stat().st_size for name in weights)
    print(
        f"consolidate: {target}: step {pointer.step} of run {pointer.run_id}, {dtype}, "
        f"{size:,} bytes in {len(weights)} files"
    )


def export(
    experiment_name: str,
    model: ModelManifest,
    dtype: str,
    pointer: RunPointer,
    checkpoint: Path,
    target: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Write a model directory from a checkpoint.

    Args:
        experiment_name: The title of the model card.
        model: The model that the run started from.
        dtype: PyTorch's name of the dtype in which floating-point weights are stored.
        pointer: The result of the run.
        checkpoint: The directory that `pointer` points to.
        target: The model directory, replaced if it exists.
        max_file_bytes: Limit for a weight file of several tensors.

    Returns:
        The names of the weight files.

    Raises:
        StageError: naming the file or the tensor that is missing, damaged or not the expected one.
    """
    # Here, not above: they take seconds, and --help and the checks of `main` need neither.
    import torch

    from stages.export import stream
    from stages.model import meta

    # All inputs are verified before the first byte is written: an error costs no time, and names its cause.
    manifest = layout.verify(checkpoint)
    # Not the old index: it would name the files of the source model's weights.
    copied = [file for file in model.files if file not in model.weights and file != WEIGHTS_INDEX]
    source = model.verify(copied)
    reference = meta.build(source)
    tied = meta.tied_weights(reference)
    expected = {
        name: stream.TensorSpec(tuple(tensor.shape), tensor.dtype)
        for name, tensor in reference.state_dict().items()
        if name not in tied  # stored once, as save_pretrained does; loading ties them again
    }
    # Twice, because the manifest lists what the training meant to save, and the shards contain what it did save.
    _check_listed(checkpoint / layout.MANIFEST, manifest.tensors, expected)
    weights = stream.ShardedWeights(checkpoint)
    weights.check(expected)

    # The directory gets its final name after its last file, so a killed run leaves no model that looks finished.
    with publish.directory(target) as temporary:
        digests = stream.write_safetensors(weights, expected, getattr(torch, dtype), temporary, max_file_bytes)
        # Read the files back as the download stage would: the model can be the start of another training.
        meta.check_headers(reference, headers.read(temporary, list(digests)))
        for file in copied:
            shutil.copyfile(source / file, temporary / file)  # the content: files in HF_HOME are links into its blobs
        _write_config(temporary / CONFIG, model.architecture, dtype)
        if GENERATION_CONFIG not in copied and reference.generation_config is not None:
            reference.generation_config.save_pretrained(temporary)
        others = sorted(path.name for path in temporary.iterdir() if path.name not in {*digests, LINEAGE, _CARD})
        files = {name: publish.sha256_file(temporary / name) for name in others}
        lineage = _lineage(pointer, model, source, digests, files)
        lineage.write(temporary / LINEAGE)  # over the copied file of that name, if the source model has one
        loss = _last_validation_loss(checkpoint)
        # Training updates weights in fp32.
        text = card.readme(experiment_name, lineage, model.architecture, not model.weights, loss, dtype != "float32")
        publish.write_text(temporary / _CARD, text)
    return list(digests)


def _check_listed(path: Path, listed: dict[str, TensorEntry], expected: "Mapping[str, TensorSpec]") -> None:
    """Compare the tensors that a checkpoint's manifest lists with those of the model."""
    wanted = {name: TensorEntry(list(spec.shape), spec.dtype_name) for name, spec in expected.items()}
    differing = sorted(name for name in wanted.keys() | listed.keys() if wanted.get(name) != listed.get(name))
    if differing:
        lines = [f"  {name}: {_text(listed.get(name))} instead of {_text(wanted.get(name))}" for name in differing[:5]]
        raise StageError("\n".join([f"{path}: {len(differing)} tensors are not those of the model", *lines]))


def _text(entry: TensorEntry | None) -> str:
    return f"{entry.dtype} {entry.shape}" if entry else "no tensor"


def _lineage(
    pointer: RunPointer, model: ModelManifest, source: Path, weights: dict[str, str], files: dict[str, str]
) -> Lineage:
    records = find_records(fingerprint(pointer.identity.data.train, pointer.identity.data.validation))
    return Lineage(
        run_id=pointer.run_id,
        step=pointer.step,
        adopted=pointer.adopted,
        model=SourceModel(
            name=model.model_name,
            revision=model.model_revision,
            commit=model.commit,
            manifest=pointer.identity.model,
            lineage=_source_lineage(source, model),
        ),
        data=pointer.identity.data,
        params=pointer.identity.params,
        code=pointer.identity.code,
        packages=pointer.packages,
        checkpoint=pointer.result_sha256,
        weights=weights,
        encoder=find_encoder() if "pack" in records else None,
        files=files,
        splits=publish.sha256_file(RECORDS["organize"]) if "organize" in records else None,
        corpus=records["extract"].fingerprint if "extract" in records else None,
        origins={stage: record.origin for stage, record in records.items()},
    )


def _source_lineage(source: Path, model: ModelManifest) -> Lineage | None:
    """The lineage of the source model, if its lineage.json describes the very weights that the run started from."""
    if LINEAGE not in model.files or not model.weights:  # random weights have no ancestor, whatever file is there
        return None
    try:
        lineage = Lineage.read(source / LINEAGE)
    except StageError:  # a file of the same name that another program wrote
        return None
    # Somebody may have trained these weights further and left the file where it was.
    return lineage if lineage.weights == {name: model.files[name].sha256 for name in model.weights} else None


def _write_config(path: Path, architecture: str, dtype: str) -> None:
    """Keep the source's config, but name the class and the dtype of these weights."""
    config = {key: value for key, value in publish.read_json(path).items() if key not in _OUTDATED_CONFIG_KEYS}
    publish.write_json(path, {**config, "architectures": [architecture], "dtype": dtype})


def _last_validation_loss(checkpoint: Path) -> float | None:
    # The checkpoint's own copy, which `layout.verify` has compared with the manifest.
    _, losses = history.series(history.read(checkpoint / history.HISTORY), "validation_loss")
    return losses[-1] if losses else None


if __name__ == "__main__":
    command.run(main)
