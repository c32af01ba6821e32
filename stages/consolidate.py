"""Turn the sharded checkpoint of a training into a Hugging Face model directory.

Reads    outputs/<experiment_name>/run.json, the checkpoint that it points to, the records in data/, and the files
         of the initial model: config and tokenizer, with `lora_r` also the weights
Writes   outputs/<experiment_name>/model/: config, tokenizer, safetensors, README.md, lineage.json
         outputs/<experiment_name>/adapter/: with `lora_r`, the adapters as PEFT stores them; else empty
Example  python -m stages.consolidate --checkpoint CHECKPOINT --output DIR
"""

import dataclasses
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from stages.base import command, history, outputs, publish
from stages.base.errors import StageError
from stages.base.files import check_files
from stages.base.origin import DATA_METRICS, DataMetrics, find_data_metrics
from stages.base.outputs import ExperimentName, ShardSize
from stages.base.packed import METRICS, PackMetrics, fingerprint
from stages.base.params_file import load_params
from stages.base.summary import Row, counted, table
from stages.checkpointing import layout
from stages.checkpointing.layout import METADATA, MODEL, TensorEntry
from stages.checkpointing.pointer import RunPointer, resolve
from stages.export import card
from stages.export.config import add_chat_template, add_ends, write_config
from stages.export.evaluation import bits_per_byte
from stages.export.lineage import InitialModel, Lineage
from stages.model import adapters, headers, tokenizer
from stages.model.dtypes import PRECISIONS
from stages.model.files import (
    CARD,
    CONFIG,
    LINEAGE,
    WEIGHTS_INDEX,
)
from stages.model.license import ModelLicense
from stages.model.manifest import MODEL_MANIFEST, REMEDY, ModelManifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from stages.export.mapped import Digests, ShardedTensors


@dataclass(frozen=True)
class ConsolidateParams:
    """Which experiment is exported, and how its weights are stored."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""
    export_dtype: Literal["bf16", "fp16", "fp32"] | None
    """Number format of the stored weights. null: that of the initial model."""
    max_shard_size: ShardSize
    """Size of a file of weights at most, in bytes. A larger tensor, or the experts of a layer, have their own."""


@dataclass(frozen=True)
class ConsolidateRuntime:
    """What changes no result."""

    num_workers: PositiveInt | None
    """Threads that hash; null: one per core."""


def main() -> None:
    """Run the stage."""
    parser = command.parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="another checkpoint than the one in run.json")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where its model is written")
    args = parser.parse_args()
    if (args.checkpoint is None) != (args.output is None):
        parser.error("--checkpoint and --output belong together: the model of the pipeline is that of run.json")
    if args.checkpoint and not (args.checkpoint / layout.MANIFEST).is_file():
        raise StageError(f"--checkpoint: {args.checkpoint} is no checkpoint: it has no {layout.MANIFEST}")
    params, runtime = load_params(ConsolidateParams), load_params(ConsolidateRuntime, "runtime")
    target = _new_output(args.output) if args.output else outputs.directory(params.experiment_name) / "model"
    with publish.lock(target):
        model = ModelManifest.read()
        if args.checkpoint:
            checkpoint, pointer = args.checkpoint, RunPointer.to(args.checkpoint)
        else:
            pointer, checkpoint = resolve(params.experiment_name)
        # Config and tokenizer come from the model that data/model.json describes now, the weights from the run.
        if pointer.identity.model != publish.sha256_file(MODEL_MANIFEST):
            remedy = (
                "set model_name and model_revision to what that was, and run `dvc repro download`"
                if args.checkpoint
                else "run `dvc repro train`"
            )
            raise StageError(f"{MODEL_MANIFEST} is not of the model that {checkpoint} was trained from: {remedy}")
        if args.output and target == model.directory().resolve():
            raise StageError(
                f"--output: {target} is the model that {checkpoint} was trained from: give a new or empty directory"
            )
        rank = pointer.identity.params.get("lora_r")
        adapter = None
        if rank or not args.output:  # an out of DVC, which is empty without adapters
            adapter = target.with_name("adapter")
            if args.output:
                adapter = _new_output(target.with_name(f"{target.name}-adapter"))
        weights = export(params, runtime, model, pointer, checkpoint, target, adapter)
    size = sum((target / name).stat().st_size for name in weights)
    dtype = export_dtype(params, model)
    rows: list[Row] = [
        (pointer.step, "step", f"of run {pointer.run_id}"),
        (size, "bytes", f"{target}: {dtype}, {counted(len(weights), 'file')}"),
    ]
    print(table(*rows, *([(rank, "rank", f"adapters in {adapter}")] if rank else [])))


def _new_output(path: Path) -> Path:
    """The directory that `--output` names, which is replaced if all of it is a model of this stage.

    Raises:
        StageError: there is something else.
    """
    path = path.resolve()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return path
    try:
        lineage = Lineage.read(path / LINEAGE)
    except StageError:
        remedy = "give a new or empty directory"
        raise StageError(f"--output: {path} exists, and is no model of this pipeline: {remedy}") from None
    own = {**lineage.weights, **lineage.files, CARD: lineage.card, LINEAGE: None}
    for file in sorted(each for each in path.rglob("*") if not each.is_dir()):
        name = str(file.relative_to(path))
        if name in own and own[name] in (None, publish.sha256_file(file)):
            continue
        problem = "was changed" if name in own else "is not of its model"
        raise StageError(
            f"--output: {path} is replaced as a whole, and {name} {problem}: move it, or give a new or empty directory"
        )
    return path


def export_dtype(params: ConsolidateParams, model: ModelManifest) -> str:
    """PyTorch's name of the dtype in which floating-point weights are stored."""
    return PRECISIONS[params.export_dtype] if params.export_dtype else model.dtype


def export(
    params: ConsolidateParams,
    runtime: ConsolidateRuntime,
    model: ModelManifest,
    pointer: RunPointer,
    checkpoint: Path,
    target: Path,
    adapter: Path | None,
) -> list[str]:
    """Write a model directory from a checkpoint, and the directory of its adapters.

    Every tensor is compared with the checkpoint's manifest and with the model that config.json describes. The directory
    appears only when all files are written. Adapters are merged into the weights of the initial model. Weights are
    stored as `save_pretrained` stores them, tied ones once and experts one by one, in the dtype of the initial model or
    in `export_dtype`. Those that the model's class keeps in fp32 stay so.

    Args:
        params: What decides the bytes.
        runtime: How they are written.
        model: The model that the run started from.
        pointer: To the checkpoint.
        checkpoint: Its directory.
        target: The model directory, replaced if it exists.
        adapter: That of the adapters, replaced too, and empty without adapters; None: there are none.

    Returns:
        The names of the weight files.

    Raises:
        StageError: naming the file or the tensor that is missing, damaged or not the expected one.
    """
    # Here, not above: they take seconds, and --help and the checks of `main` need neither.
    import torch

    from stages.export import mapped, merged
    from stages.model import meta

    dtype = export_dtype(params, model)
    # All inputs are verified before the first byte is written: an error names its cause, and leaves no output.
    manifest = layout.verify(checkpoint, names=[f"{MODEL}/{METADATA}", history.HISTORY])
    weights = mapped.ShardedTensors(checkpoint)
    layout.verify(checkpoint, names=[f"{MODEL}/{file}" for file in weights.files])
    # Not the old index: it would name the files of the initial model's weights.
    copied = [file for file in model.files if file not in model.weights and file != WEIGHTS_INDEX]
    initial, terms = model.verify(copied), ModelLicense.read()
    check_files({initial / name: terms.files[name] for name in terms.texts()}, REMEDY)
    reference = meta.build(initial)
    tied = meta.tied_weights(reference)  # stored once, as save_pretrained does; loading ties them again
    expected = {name: tensor for name, tensor in reference.state_dict().items() if name not in tied}
    settings = pointer.identity.params
    is_adapted = bool(settings.get("lora_r"))
    trained = _adapters(reference, model, settings) if is_adapted else expected
    # Twice, because the manifest lists what the training meant to save, and the shards contain what it did save.
    _check_listed(checkpoint / layout.MANIFEST, manifest.tensors, trained)
    weights.check(trained)
    load: mapped.Load = weights.load
    if is_adapted:
        model.verify(model.weights)
        stored = meta.check_headers(reference, headers.read(initial, model.weights))
        scale = settings["lora_alpha"] / settings["lora_r"]
        load = merged.MergedTensors(initial, stored, weights, trained, scale).load
    num_workers = runtime.num_workers or len(os.sched_getaffinity(0))
    # A directory gets its final name after its last file, so a killed run leaves no model that looks finished. That of
    # the adapters gets it first.
    with publish.directory(target) as temporary, ExitStack() as stack:
        digests = mapped.write_safetensors(
            load, meta.stored_as(reference), temporary, num_workers,
            meta.stored_dtypes(initial, getattr(torch, dtype)), params.max_shard_size,
        )  # fmt: skip
        # Read the files back as the download stage would: the model can be the start of another training.
        meta.check_headers(reference, headers.read(temporary, list(digests.files)))
        for file in [*copied, *terms.texts()]:
            (temporary / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(initial / file, temporary / file)  # the content: files in HF_HOME are links into its blobs
        write_config(temporary / CONFIG, model.architecture, dtype, reference)
        tokenizer.check_exported(temporary, model)
        records = find_data_metrics(fingerprint(pointer.identity.data.train, pointer.identity.data.validation))
        packed = PackMetrics.read(METRICS) if "pack" in records else None  # else it is of other tokens
        turns = add_chat_template(temporary, packed) if packed else []
        add_ends(temporary, reference, [model.eos_token_id, *turns], tokenizer.text_tokens(model.verify_tokenizer()))
        written = {str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()}
        small = sorted(written - {*digests.files, LINEAGE, CARD})
        others = {name: publish.sha256_file(temporary / name) for name in small}
        lineage = _lineage(pointer, checkpoint, model, initial, digests, others, records, packed)
        losses = _losses(checkpoint, lineage, packed)
        text = card.readme(lineage, model.architecture, dtype, not model.weights, terms, losses)
        # Over copied files of these names, if the initial model has them.
        lineage.write_with_card(temporary, text)
        if adapter:
            stack.enter_context(publish.lock(adapter))
            directory = stack.enter_context(publish.directory(adapter))
        if is_adapted:
            for file in small:  # with its tokenizer and templates, it is used as the model is
                if file != CONFIG:
                    (directory / file).parent.mkdir(exist_ok=True)
                    shutil.copyfile(temporary / file, directory / file)
            _write_adapter(directory, weights, trained, reference, model, lineage, terms, losses, num_workers)
        publish.sync_tree(temporary)  # what may fail is done when the first directory gets its name
    return list(digests.files)


def _adapters(reference: "PreTrainedModel", model: ModelManifest, params: dict[str, Any]) -> "dict[str, Tensor]":
    """The tensors of the adapters that a training with these parameters has, by name, on the meta device."""
    import torch

    from stages.model import meta

    kinds = adapters.choose(model.linears, params["lora_target_modules"], model.architecture)
    rank, found = params["lora_r"], {}
    for name, module in meta.find_linears(reference, model.layer_classes).items():
        if adapters.kind(name) in kinds:
            found[name + adapters.A] = torch.empty(rank, module.in_features, dtype=torch.float32, device="meta")
            found[name + adapters.B] = torch.empty(module.out_features, rank, dtype=torch.float32, device="meta")
    return found


def _write_adapter(
    directory: Path, weights: "ShardedTensors", trained: "Mapping[str, Tensor]", reference: "PreTrainedModel",
    model: ModelManifest, lineage: Lineage, terms: ModelLicense, losses: "card.Losses | None", num_workers: int,
) -> None:  # fmt: skip
    """Write the adapters as PEFT stores them, with a card and a lineage.json of their own."""
    from torch import float32, nn

    from stages.export import mapped
    from stages.model import meta

    parts = {name: {adapters.PREFIX + name: tuple(tensor.shape)} for name, tensor in trained.items()}
    dtypes = dict.fromkeys(trained, float32)
    digests = mapped.write_safetensors(weights.load, parts, directory, num_workers, dtypes, stem=adapters.STEM)
    targets = {name.removesuffix(adapters.A) for name in trained if name.endswith(adapters.A)}
    others = {name for name, module in reference.named_modules() if isinstance(module, nn.Linear)} - targets
    config = adapters.peft_config(sorted(targets), others, lineage.params, model.model_name, model.commit)
    publish.write_json(directory / adapters.CONFIG, config)
    files = {name: digest for name, digest in lineage.files.items() if name != CONFIG}
    files[adapters.CONFIG] = publish.sha256_file(directory / adapters.CONFIG)
    own = dataclasses.replace(lineage, weights=digests.files, tensors=digests.tensors, files=files)
    problem = adapters.peft_problem(targets, meta.has_joined_experts(reference))
    own.write_with_card(directory, card.adapter_readme(own, model.architecture, terms, losses, problem))


def _check_listed(path: Path, listed: dict[str, TensorEntry], expected: "Mapping[str, Tensor]") -> None:
    """Compare the tensors that a checkpoint's manifest lists with those of the model."""
    wanted = {name: TensorEntry.of(tensor) for name, tensor in expected.items()}
    differing = sorted(name for name in wanted.keys() | listed.keys() if wanted.get(name) != listed.get(name))
    if differing:
        lines = [f"  {name}: {_text(listed.get(name))} instead of {_text(wanted.get(name))}" for name in differing[:5]]
        raise StageError(f"{path} differs from the model in {counted(len(differing), 'tensor')}", *lines)


def _text(entry: TensorEntry | None) -> str:
    return f"{entry.dtype} {entry.shape}" if entry else "no tensor"


def _lineage(
    pointer: RunPointer, checkpoint: Path, model: ModelManifest, initial: Path, digests: "Digests",
    files: dict[str, str], records: dict[str, DataMetrics], packed: PackMetrics | None,
) -> Lineage:  # fmt: skip
    if missing := [str(path) for stage, path in DATA_METRICS.items() if stage not in records]:
        lost = "" if packed else f"; bring back {METRICS} of the training for the chat template of conversations"
        print(
            f"warning: {', '.join(missing)}: missing, damaged, or of other data, so lineage.json does not say how the "
            f"data was made{lost}"
        )
    return Lineage(
        run_id=pointer.run_id,
        step=pointer.step,
        adopted=pointer.adopted,
        model=InitialModel(
            name=model.model_name,
            revision=model.model_revision,
            commit=model.commit,
            manifest=pointer.identity.model,
            lineage=_initial_lineage(initial, model),
        ),
        data=pointer.identity.data,
        params=pointer.identity.params,
        code=pointer.identity.code,
        packages=pointer.packages,
        checkpoint=pointer.result_sha256,
        weights=digests.files,
        history=history.digest(checkpoint / history.HISTORY, pointer.step),
        tensors=digests.tensors,
        encoder=packed.encoder.name if packed else None,
        files=files,
        splits=publish.sha256_file(DATA_METRICS["organize"]) if "organize" in records else None,
        corpus=records["extract"].fingerprint if "extract" in records else None,
        origins={stage: record.origin for stage, record in records.items()},
    )


def _initial_lineage(initial: Path, model: ModelManifest) -> Lineage | None:
    """The lineage of the initial model, if its lineage.json describes the very weights that the run started from."""
    if LINEAGE not in model.files or not model.weights:  # random weights have no ancestor, whatever file is there
        return None
    try:
        lineage = Lineage.read(initial / LINEAGE)
    except StageError:  # a file of the same name that another program wrote
        return None
    # Somebody may have trained these weights further and left the file where it was.
    return lineage if lineage.weights == {name: model.files[name].sha256 for name in model.weights} else None


def _losses(checkpoint: Path, lineage: Lineage, packed: PackMetrics | None) -> card.Losses | None:
    # The checkpoint's own copy of the history, which `layout.verify` has compared with the manifest.
    losses = dict(zip(*history.series(history.read(checkpoint / history.HISTORY), "validation_loss"), strict=True))
    loss = losses.get(lineage.step)  # of these weights, not of those of an earlier validation
    if loss is None:
        return None
    if not packed:
        return card.Losses(loss, None)
    text, document_mask = packed.validation, lineage.params["document_mask"]
    return card.Losses(loss, bits_per_byte(loss, text.measured_tokens(document_mask), text.measured_bytes))


if __name__ == "__main__":
    command.run(main)
