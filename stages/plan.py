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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from stages.base import command, outputs, publish
from stages.base.command import format_gib
from stages.base.errors import StageError
from stages.base.packed import TRAIN, VALIDATION, PackedTokens
from stages.base.params_file import load_params
from stages.base.summary import Row, counted, table
from stages.checkpointing.decision import decide, find
from stages.checkpointing.layout import checkpoint_root, size_of
from stages.checkpointing.run import describe
from stages.launching.runtime import TrainRuntime, how_to_resume
from stages.model.manifest import ModelManifest
from stages.planning import memory_plan, warnings
from stages.planning.estimate import Plan, estimate
from stages.scoring import public
from stages.training.params import TrainParams


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


def main() -> None:
    """Run the stage."""
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
        warnings.warn(params, plan, model)
        num_ranks, gpu_gib = extra.plan.num_ranks, extra.plan.gpu_memory_gb
        limit = int(gpu_gib * 2**30) if gpu_gib else None
        peak, peaks, step = memory_plan.measure_memory(model, params, num_ranks, extra.seq_length, limit)
        if peak is not None and limit is not None:
            could_adapt = params.lora_r is None and bool(model.weights)
            memory_plan.check_fits(peak, peaks, limit, could_adapt)
        from stages.planning import preview  # imports torch: after CUDA_VISIBLE_DEVICES, and after the parameters

        rows = preview.first_rows(params, model)
        plan = dataclasses.replace(plan, num_ranks=num_ranks, peak=peak, peaks=peaks or None)
        print(table(*_summary(params, runtime, plan, model, step)))
        check_disk(params, runtime, plan)  # after the numbers, for those who will train on another machine
        plan.write(outputs.PLAN)
        publish.write_text(outputs.ROWS, rows)


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
        lower = "lower runtime.keep_checkpoints, " * (runtime.keep_checkpoints > 2)
        raise StageError(
            f"{root}: No space left on device: {counted(num_checkpoints, 'checkpoint')} and the model need "
            f"{format_gib(needed)}, and {format_gib(free)} are free: free some space, {lower}or set CHECKPOINT_ROOT to "
            "a larger disk, and run again"
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


def _existing(path: Path) -> Path:
    # Before the first training the directory of the checkpoints is missing, and disk_usage needs one that exists.
    return path if path.exists() else _existing(path.parent)


if __name__ == "__main__":
    command.run(main)
