"""Estimate what a training needs, before you book a GPU, and show what the model will be fed.

Reads    data/model.json, data/tokenizer.json, data/pack.json, data/tokens/, the config of the model, names in evals/
Writes   outputs/plan.json: steps, memory of each rank, disk
         outputs/rows.txt: the first rows of the training as text
Example  dvc exp run -S plan.num_ranks=8 -S plan.gpu_memory_gb=79 plan
"""

import dataclasses
import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, PositiveInt

from stages.base import command, outputs, publish
from stages.base.command import format_gib
from stages.base.errors import StageError, one_line
from stages.base.files import JsonFile
from stages.base.packed import METRICS, TRAIN, VALIDATION, PackedTokens, PackMetrics
from stages.base.params_file import load_params
from stages.base.summary import Row, counted, table
from stages.checkpointing.decision import decide, find
from stages.checkpointing.layout import checkpoint_root, size_of
from stages.checkpointing.run import describe
from stages.forward.rows import TokenRows
from stages.launching.runtime import TrainRuntime, how_to_resume
from stages.model import adapters
from stages.model.dtypes import BY_NAME, PRECISIONS
from stages.model.manifest import ModelManifest
from stages.planning import memory_plan
from stages.planning.memory_plan import PeakMemory, Table
from stages.scoring import public
from stages.training.order import RowOrder
from stages.training.params import TrainParams
from stages.training.schedule import learning_rate, lr_ratio

_FP32 = 4
_MOMENTS = {"adamw": 2 * _FP32, "adamw_8bit": 2 * (1 + _FP32 / 256)}
"""Bytes per parameter of the optimizer state; in 8 bits, 256 values share a scale."""

_LEAST_HELD_OUT = 0.02
"""Part of the rows below which a warning says so."""
_MUCH_PADDING = 0.3
"""Of the tokens that are computed; more is worth a warning."""

_NUM_SHOWN = 3
"""Rows in rows.txt, the first ones of the training."""
_NUM_SEARCHED = 1000
"""Rows among which there should be one of a conversation, where there are conversations."""


@dataclass(frozen=True)
class Cluster:
    """What `plan` computes for; it changes no training."""

    num_ranks: PositiveInt
    """How many ranks train, on all machines."""
    gpu_memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    """Memory of each GPU, in GiB. null: no limit. An H100 of 80 GB has 79. Settings that need more are refused."""


@dataclass(frozen=True)
class PlanParams:
    """The leaves of `params.yaml` that only `plan` reads."""

    plan: Cluster
    export_dtype: Literal["bf16", "fp16", "fp32"] | None
    """Number format of the model that `consolidate` writes."""
    seq_length: PositiveInt
    """Tokens per row."""
    tasks: list[str]
    """What `score` asks after the training."""


@dataclass(frozen=True)
class Source:
    """Of the rows to train on."""

    rows: int
    tokens: int
    """Of these rows."""
    share: float
    """Of the rows of each step, by `mixture`; without it, of all rows."""
    epochs: float
    """How often the training uses a row of it."""
    total_tokens: int
    """Of the whole training: of prompts and padding, too."""


@dataclass(frozen=True)
class Plan(JsonFile):
    """Content of plan.json."""

    STAGE: ClassVar[str] = "plan"

    parameters: int
    """Of the model."""
    trained_parameters: int
    """All of these, or those of the adapters beside them."""
    training_rows: int
    validation_rows: int
    steps: int
    """Of the optimizer."""
    tokens_per_step: int
    tokens: int
    """Of the whole training."""
    epochs: float
    sources: dict[str, Source]
    """None: the rows are of all files."""
    validations: int
    """During the training: before the first step, every `eval_freq` steps, and after the last one."""
    rows_per_validation: int
    validation_share: float
    """Of the compute of the training, from 0 to 1: a forward pass is a third of forward and backward pass; beside
    adapters half, as the weights need no gradients."""
    num_ranks: int
    """That `peak` and `peaks` are computed for."""
    peak: PeakMemory | None
    """Of each rank; null where it could not be measured."""
    peaks: Table | None
    """Bytes of each rank at the peak of a step, by `activation_checkpointing` and `batch_size`; null where
    `plan.gpu_memory_gb` is."""
    checkpoint_bytes: int
    model_bytes: int
    """Of the exported model and its adapters."""


def main() -> None:
    command.parser(__doc__).parse_args()
    params, extra = load_params(TrainParams), load_params(PlanParams)
    runtime = load_params(TrainRuntime, "runtime")
    public.check(extra.tasks)
    # What is written must not depend on this machine, so to torch it has no GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    num_nodes = launched_nodes(runtime)
    with publish.lock(outputs.PLAN):
        if params.total_batch_size % params.batch_size:  # no number of ranks can; the error names what these could
            params.grad_accum_steps(extra.plan.num_ranks)
        launched = num_nodes and runtime.nproc_per_node and runtime.nproc_per_node * num_nodes
        plan = check(params, runtime, launched, extra.export_dtype)
        model = ModelManifest.read()
        _warn_of_schedule(params, plan)
        _warn_of_held_out(plan)
        if warning := model.router_warning(params.lora_r):
            print(warning)
        if params.lora_r:
            _warn_of_modules(params, model)
            _warn_of_peft(params, model)
            _warn_of_new_tokens(params, model)
        num_ranks, gpu_gib = extra.plan.num_ranks, extra.plan.gpu_memory_gb
        limit = int(gpu_gib * 2**30) if gpu_gib else None
        peak, peaks, step = measure_memory(model, params, num_ranks, extra.seq_length, limit)
        if peak is not None and limit is not None:
            could_adapt = params.lora_r is None and bool(model.weights)
            memory_plan.check_fits(peak, peaks, limit, could_adapt)
        rows = preview(params, model)
        plan = dataclasses.replace(plan, num_ranks=num_ranks, peak=peak, peaks=peaks or None)
        print(table(*_summary(params, runtime, plan, model, step)))
        check_disk(params, runtime, plan)  # after the numbers, for those who will train on another machine
        plan.write(outputs.PLAN)
        publish.write_text(outputs.ROWS, rows)


def measure_memory(
    model: ModelManifest, params: TrainParams, num_ranks: int, seq_length: int, limit: int | None
) -> tuple[PeakMemory | None, Table, str]:
    """Measure the memory of each rank, and where `limit` bytes of a GPU are known, print a table of what fits.

    The tensors have no memory (stages/planning/peak_memory.py), and no weight is read. So the result is the same on
    each machine.

    Returns:
        The peak of each rank, None where it cannot be measured; a table of peaks, empty without a limit; and how the
        rows of a step are divided over the ranks, "" where these cannot train, or passes have no fixed size.

    Raises:
        StageError: the model cannot be trained like this.
    """
    from stages.planning import peak_memory  # imports torch

    try:
        params.check_context_parallel(model, seq_length, num_ranks)
        accumulated = params.grad_accum_steps(num_ranks)
        _, size = params.fsdp.mesh_shape(num_ranks, num_ranks)
    except StageError as error:  # these ranks are assumed, others may train
        ranks = counted(num_ranks, "rank")
        print(f"warning: {ranks} (plan.num_ranks) cannot train, and their memory is not known: {error}")
        return None, {}, ""
    if size != params.fsdp.mesh_shape(num_ranks, 1)[1]:
        print(
            f"warning: HYBRID_SHARD shards the model over the ranks of a node, and this is the memory of {num_ranks} "
            "ranks (plan.num_ranks) on one: set fsdp.size to the GPUs of a node"
        )
    if limit:
        params.check_context_on_gpus()
    chosen, rows, step = peak_memory.choose(model, params), None, ""
    if chosen.params.attention == "padded":
        rows = TokenRows(TRAIN)
        share = peak_memory.padding(model, chosen, num_ranks, rows).share
        reason = f", because {chosen.reason}" if chosen.reason else ""
        print(f"note: attention padded{reason}; {share:.0%} of the tokens that are computed are padding")
        if share > _MUCH_PADDING:
            print(
                f"warning: {share:.0%} is much padding. Of more documents in a step, more have the same length: raise "
                f"total_batch_size {params.total_batch_size}, batch_size {params.batch_size} or seq_length "
                f"{seq_length:,}"
            )
    else:
        steps = counted(accumulated, "accumulation step")
        step = f" = {params.describe_ranks(num_ranks)} x {counted(params.batch_size, 'row')} x {steps}"
    try:
        peak = peak_memory.measure(model, chosen, num_ranks, seq_length, rows=rows, device_memory=limit)
        peaks = peak_memory.make_table(model, chosen, num_ranks, seq_length, limit, rows) if limit else {}
    except peak_memory.ERRORS as error:
        state = _state_bytes(params, model) / size
        print(
            f"warning: activations of {model.architecture} cannot be measured ({type(error).__name__}: "
            f"{one_line(error)}): weights, gradients and optimizer state of each of {num_ranks} "
            f"ranks need {format_gib(state)}, and what comes on top is not known"
        )
        return None, {}, step
    if limit and params.precision == "fp32":
        print("warning: precision fp32 uses a small part of a GPU, which is made for bf16: set precision to bf16")
    if limit:
        print(f"GiB of each rank by activation_checkpointing and batch_size; !: too much for {format_gib(limit)}")
        print("\n".join(memory_plan.lines(peaks, limit)))
        if not any(memory_plan.largest(peaks, limit).values()):
            _print_context_parallel(model, params, num_ranks, seq_length, limit)
        if params.lora_r and size > 1:
            whole = dataclasses.replace(params.fsdp, strategy="ddp", sharding_strategy=None, cpu_offload=False)
            changed = chosen._replace(params=dataclasses.replace(chosen.params, fsdp=whole))
            needed = peak_memory.measure(model, changed, num_ranks, seq_length, rows=rows, device_memory=limit).total
            if needed <= memory_plan.USABLE * limit:
                print(
                    f"note: with fsdp.strategy ddp each rank holds the whole model, in {format_gib(needed)}, and "
                    "gathers no weights"
                )
    return peak, peaks, step


def _print_context_parallel(
    model: ModelManifest, params: TrainParams, num_ranks: int, seq_length: int, limit: int
) -> None:
    """Where no row fits, print how many ranks of a node could share each."""
    from stages.planning import peak_memory

    for size in (2, 4, 8):
        changed = dataclasses.replace(
            params, context_parallel=size, batch_size=1, eval_batch_size=None, activation_checkpointing="full"
        )
        if size <= params.context_parallel or num_ranks % size:
            continue
        try:
            changed.check_context_parallel(model, seq_length)
            changed.check_context_on_gpus()
            changed.grad_accum_steps(num_ranks)
            chosen = peak_memory.choose(model, changed)
            needed = peak_memory.measure(model, chosen, num_ranks, seq_length, device_memory=limit).total
        except (StageError, *peak_memory.ERRORS):  # nor for more ranks
            return
        if needed <= memory_plan.USABLE * limit:
            print(
                f"note: with context_parallel {size}, batch_size 1 and activation_checkpointing full each rank needs "
                f"{format_gib(needed)} (docs/memory.md)"
            )
            return


def preview(params: TrainParams, model: ModelManifest) -> str:
    """The first rows of the training, as text, and one of a conversation and one of documents where there are both.

    Raises:
        StageError: they cannot be read.
    """
    from tokenizers import Tokenizer

    from stages.forward.batch import read_marks
    from stages.planning.preview import LEGEND, render

    tokenizer = Tokenizer.from_file(str(model.verify_tokenizer()))
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special.add(model.eos_token_id)
    try:
        tokens = TokenRows(TRAIN)
        order = RowOrder(params, len(tokens), tokens.sources)
        steps = range(-(-_NUM_SEARCHED // params.total_batch_size))
        decode, texts = partial(tokenizer.decode, skip_special_tokens=False), []
        for index in rows_to_show(tokens, chain.from_iterable(map(order.step, steps))):
            (row,), marks = tokens.rows(np.array([index])), read_marks(tokens, np.array([index]))
            text = render(row, decode, model.eos_token_id, special, params.document_mask, marks)
            texts.append(f"row {index}\n{text}")
    except (pa.ArrowException, ArithmeticError, LookupError, ValueError) as error:  # of damaged files; train verifies
        raise StageError(f"{TRAIN} cannot be read ({one_line(error)}): run `dvc repro -f -s pack`") from None
    return "\n\n".join([LEGEND, *texts]) + "\n"


def rows_to_show(tokens: TokenRows, indices: Iterable[np.int64]) -> list[np.int64]:
    """The first of these rows; the last gives way to one of a conversation, or of documents, where they have none."""
    rest = iter(indices)
    first = [*islice(rest, _NUM_SHOWN)]

    def is_trained(index: np.int64) -> bool:
        marks = tokens.marks(np.array([index]))
        return marks is None or bool(marks[0].all())

    kinds = {is_trained(index) for index in first}
    if len(kinds) == 1:
        first[-1] = next((index for index in rest if is_trained(index) not in kinds), first[-1])
    return first


def check_disk(params: TrainParams, runtime: TrainRuntime, plan: Plan) -> None:
    """Refuse a training whose checkpoints cannot be on the disk together.

    Raises:
        StageError: naming the disk.
    """
    root = checkpoint_root(params.experiment_name)
    disk = _existing(root)
    is_shared = disk.stat().st_dev == _existing(outputs.OUTPUTS).stat().st_dev
    num_checkpoints = _most_checkpoints(params, runtime, plan)
    needed = num_checkpoints * plan.checkpoint_bytes + (plan.model_bytes if is_shared else 0)
    earlier = describe(params).directory  # of a launch that this one resumes
    free = shutil.disk_usage(disk).free + size_of(earlier)
    if free < needed:
        raise StageError(
            f"{root}: No space left on device: {counted(num_checkpoints, 'checkpoint')} and the model need "
            f"{format_gib(needed)}, and {format_gib(free)} are free: free some space, lower runtime.keep_checkpoints, "
            "or set CHECKPOINT_ROOT to a larger disk, and run again"
        )


def _most_checkpoints(params: TrainParams, runtime: TrainRuntime, plan: Plan) -> int:
    """How many are on the disk together: the newest, the best, and the one that is being written; or all of them."""
    is_best_kept = plan.validation_rows > 0
    # Nobody knows how many there will be by time, or because they are the best.
    is_known = runtime.ckpt_minutes is None and params.export_from != "best"
    steps = (runtime.ckpt_freq or plan.steps) if is_known else 1
    return min(runtime.keep_checkpoints + is_best_kept + 1, math.ceil(plan.steps / steps))


def _summary(params: TrainParams, runtime: TrainRuntime, plan: Plan, model: ModelManifest, step: str) -> list[Row]:
    """What a person decides by; the rest is in plan.json."""
    disk = _most_checkpoints(params, runtime, plan) * plan.checkpoint_bytes + plan.model_bytes
    held_out = (
        f"{plan.validations:,} validations take about {plan.validation_share:.0%} of the compute"
        if plan.validation_rows
        else "nothing is held out"
    )
    at_most = "at most; " if plan.peak and plan.peak.is_upper_bound else ""
    trained = f"; {plan.trained_parameters:,} parameters trained" if params.lora_r else ""
    return [
        (plan.steps, "steps", f"of {params.total_batch_size:,} rows{step}"),
        (plan.tokens, "tokens", f"{plan.epochs:.2f} epochs; {held_out}"),
        *(
            (f"{source.total_tokens:,}", name, f"{source.share:.1%} of each step; {source.epochs:.2f} epochs of it")
            for name, source in plan.sources.items()
        ),
        (
            f"{plan.peak.total / 2**30:.3f}" if plan.peak else "?",
            "GiB a rank",
            f"{at_most}{format_gib(disk)} of disk{trained}; first rows: {outputs.ROWS}",
        ),
    ]


def _warn_of_schedule(params: TrainParams, plan: Plan) -> None:
    """Warn where the learning rate does not end where `min_lr_ratio` asks for."""
    if params.warmup_steps >= plan.steps:
        highest = learning_rate(params, plan.steps, plan.steps - 1)
        print(
            f"warning: warmup_steps {params.warmup_steps} lasts until the end of the training: the learning rate rises "
            f"to {highest:.2e} in the last of {plan.steps} steps, and never decays: lower warmup_steps"
        )
    elif params.lr_schedule != "constant" and lr_ratio(params, plan.steps, plan.steps) > params.min_lr_ratio + 1e-9:
        end, last = params.lr_decay_steps or plan.steps, learning_rate(params, plan.steps, plan.steps - 1)
        if end > plan.steps:
            why = f"lr_decay_steps {end} is more than the {plan.steps} steps of the training"
            remedy = "lower lr_decay_steps, unless a longer run is to follow"
        else:
            why = f"lr_decay_ratio {params.lr_decay_ratio} of {end} steps is rounded to 0 steps of decay"
            remedy = f"raise lr_decay_ratio to {1 / end:.2g} or more"
        print(
            f"warning: {why}: the learning rate of the last step is {last:.2e}, and min_lr_ratio asks for "
            f"{params.lr * params.min_lr_ratio:.2e}: {remedy}"
        )


def _warn_of_held_out(plan: Plan) -> None:
    """Warn where splits have few of the rows; a `validation_fraction` is what somebody wants."""
    if plan.validation_rows:
        share = plan.validation_rows / (plan.training_rows + plan.validation_rows)
        if share < _LEAST_HELD_OUT and PackMetrics.read(METRICS).origin.params["validation_fraction"] is None:
            print(
                f"warning: only {share:.1%} of the rows are held out: splits have equal numbers of files, not of "
                "tokens: set validation_fraction, such as 0.05"
            )


def _warn_of_modules(params: TrainParams, model: ModelManifest) -> None:
    """Name the linear modules that get no adapter, and why."""
    if params.lora_target_modules == adapters.ALL_LINEAR:
        for name, linear in model.linears.items():
            if linear.problem:
                print(f"note: {name} gets no adapter: {linear.problem}")


def _warn_of_peft(params: TrainParams, model: ModelManifest) -> None:
    """Warn where the adapters cannot be used without merging them, or have more parameters than what they change."""
    from stages.model import meta

    kinds = adapters.choose(model.linears, params.lora_target_modules, model.architecture)
    built = meta.build(model.directory())
    if problem := adapters.peft_problem(kinds, meta.has_joined_experts(built)):
        print(f"warning: {problem}")
    linears = meta.find_linears(built, model.layer_classes)
    adapted = (name for name in linears if adapters.kind(name) in kinds)
    name = min(adapted, key=lambda name: min(linears[name].weight.shape))
    rows, columns = linears[name].weight.shape
    if params.lora_r is not None and params.lora_r > min(rows, columns):
        print(
            f"warning: lora_r is {params.lora_r}, but {adapters.kind(name)} has a matrix of {rows} x {columns}: a rank "
            f"above {min(rows, columns)} only adds parameters. Lower lora_r, or leave it out of lora_target_modules"
        )


def _warn_of_new_tokens(params: TrainParams, model: ModelManifest) -> None:
    """Warn where turns end with tokens that the model may not know, as adapters leave the embedding as it is."""
    packed = PackMetrics.read(METRICS)
    conversations = packed.train.conversations
    if conversations is None or packed.chat_templates == model.chat_templates:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.verify_tokenizer()))
    names = ", ".join(str(tokenizer.id_to_token(token)) for token in conversations.terminators)
    print(
        f"warning: the chat template is not that of {model.model_name}, and adapters do not train the embedding: if "
        f"the model does not know {names or 'the tokens of the template'}, use its own template, or lora_r null"
    )


def launched_nodes(runtime: TrainRuntime) -> int | None:
    """The nodes of a launch; None: the job will know, which is not submitted yet."""
    if runtime.launcher == "torchrun":
        return 1
    if "SLURM_JOB_ID" in os.environ:
        return runtime.num_nodes or int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
    return runtime.num_nodes or (1 if runtime.launcher == "auto" else None)


def check(params: TrainParams, runtime: TrainRuntime, num_ranks: int | None, export_dtype: str | None) -> Plan:
    """What a training with this number of ranks needs, except memory; None: it is not known before the training.

    Args:
        params: Of the training.
        runtime: Where.
        num_ranks: See above.
        export_dtype: As in params.yaml.

    Raises:
        StageError: the training would be refused.
    """
    model, train = ModelManifest.read(), PackedTokens.read(TRAIN)
    check_model_stays(params, model)
    params.check_context_parallel(model, train.seq_length, runtime.nproc_per_node)
    check_num_ranks(params, num_ranks)
    plan = estimate(params, model, train, PackedTokens.read(VALIDATION), export_dtype)
    run = describe(params)
    decide(run, how_to_resume(runtime), find(run))  # the launch would refuse what this refuses
    return plan


def check_model_stays(params: TrainParams, model: ModelManifest) -> None:
    """Check that the initial model is not what this experiment has exported. The stages after the export read it, too.

    Raises:
        StageError: it is.
    """
    exported = outputs.directory(params.experiment_name) / "model"
    if model.directory().resolve() == exported.resolve():
        raise StageError(
            f"model_name is {model.model_name!r}: DVC deletes it before consolidate writes the model of "
            f"experiment_name {params.experiment_name!r}: choose another experiment_name"
        )


def check_num_ranks(params: TrainParams, num_ranks: int | None) -> None:
    """Check that this number of ranks can train; None: it is not known before the training.

    Raises:
        StageError: they cannot share `total_batch_size` evenly, or be grouped as `fsdp` asks.
    """
    params.grad_accum_steps(num_ranks or params.context_parallel)  # what the fewest cannot, no number of them can
    if num_ranks is not None:
        params.fsdp.mesh_shape(num_ranks, num_ranks)


def estimate(
    params: TrainParams, model: ModelManifest, train: PackedTokens, validation: PackedTokens, export_dtype: str | None
) -> Plan:
    """What a training of `model` with these parameters needs, and the model that is exported in `export_dtype`.

    Raises:
        StageError: the rows are too long for the model, there are too few, the model has no layers as in
            `fsdp.wrap_layer_cls`, fp8 refuses the tokens of a pass, or the optimizer's package is not installed.
    """
    # `plan` runs before the training, so what would fail there is refused here, without a GPU.
    if model.max_seq_length is not None and train.seq_length > model.max_seq_length:
        raise StageError(
            f"seq_length is {train.seq_length}, but {model.model_name} supports at most {model.max_seq_length} tokens"
        )
    params.fsdp.wrapped_classes(model)
    params.check_compile(model)
    params.check_lora(model)
    params.check_tokens(train.seq_length)
    params.check_packages()
    trained_parameters, moments = params.num_trained(model), _MOMENTS[params.optimizer]
    order = RowOrder(params, train.num_rows, train.sources)
    steps = params.total_steps(order.num_rows)
    order.check_repeats(steps)
    epochs, shares = order.epochs(steps), order.shares
    validations = 1 + math.ceil(steps / params.eval_freq)
    held_out = validation.sources.values() or [validation.num_rows]
    rows_per_validation = sum(min(num_rows, params.eval_rows or num_rows) for num_rows in held_out)
    validated, trained = validations * rows_per_validation, steps * params.total_batch_size  # rows
    tokens_per_step = params.total_batch_size * train.seq_length
    return Plan(
        parameters=model.num_parameters,
        trained_parameters=trained_parameters,
        training_rows=train.num_rows,
        validation_rows=validation.num_rows,
        steps=steps,
        tokens_per_step=tokens_per_step,
        tokens=steps * tokens_per_step,
        epochs=steps * params.total_batch_size / order.num_rows,
        sources={
            name: Source(
                rows=num_rows,
                tokens=num_rows * train.seq_length,
                share=round(shares.get(name, 0.0), 6),
                epochs=round(epochs.get(name, 0.0), 4),
                total_tokens=round(epochs.get(name, 0.0) * num_rows) * train.seq_length,
            )
            for name, num_rows in train.sources.items()
        },
        validations=validations,
        rows_per_validation=rows_per_validation,
        validation_share=round(validated / (validated + (2 if params.lora_r else 3) * trained), 4),
        num_ranks=0,
        peak=None,
        peaks=None,
        # Without the gradients: a checkpoint is between two steps, where there are none.
        checkpoint_bytes=int((_FP32 + moments) * trained_parameters),
        model_bytes=BY_NAME[PRECISIONS[export_dtype] if export_dtype else model.dtype].itemsize * model.num_parameters
        + (_FP32 * trained_parameters if params.lora_r else 0),
    )


def _state_bytes(params: TrainParams, model: ModelManifest) -> int:
    """Weights, gradients and moments of one copy of the model."""
    trained = int((2 * _FP32 + _MOMENTS[params.optimizer]) * params.num_trained(model))
    if params.lora_r is None:
        return trained
    quantized = params.num_quantized(model)
    frozen = BY_NAME[PRECISIONS[params.precision]].itemsize * (model.num_parameters - quantized)
    return trained + frozen + int(adapters.NF4_BYTES * quantized)


def _existing(path: Path) -> Path:
    # Before the first training the directory of the checkpoints is missing, and disk_usage needs one that exists.
    return path if path.exists() else _existing(path.parent)


if __name__ == "__main__":
    command.run(main)
