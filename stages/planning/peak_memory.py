"""The memory that each rank needs at the peak of a step, measured before there is a GPU.

The real model, its real sharding, `train_step` and the real optimizer run on fake tensors, which have shapes but no
memory, in a process group whose other ranks do not exist. torch's FSDPMemTracker counts every tensor from its
allocation to its end: seconds for a model of 7 billion parameters on any number of ranks. On CPUs it agrees with what
the allocator counts in a real step, and the resident set grows by up to 2 % more (docs/benchmarks.md).

The fake tensors are those of a CPU, because torch can compute with those of a GPU only where it was built for CUDA.
Both have the same sizes, and the loss is computed in parts as large as on a GPU. What is not counted: CUDA, NCCL and
cuBLAS themselves, memory inside kernels, and what allocators round up or cannot use.
"""

import dataclasses
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType, _FSDPState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from stages.base.errors import StageError
from stages.building import sharded_model, sharding
from stages.forward.attention_choice import choose_attention
from stages.forward.batch import make_batch
from stages.forward.context import RankContext, cut
from stages.forward.loss import assumed_device, choose_loss, loss_sum
from stages.forward.rows import TokenRows
from stages.model.manifest import ModelManifest
from stages.planning.memory_plan import KINDS, PeakMemory, Table, batch_sizes
from stages.training.loader import BatchLoader, Padding
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from stages.training.precision import make_grad_scaler
from stages.training.step import train_step

ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError),
)
"""What `measure` raises where a model cannot be computed without values."""

_KINDS = {
    "weights": ("Sharded Param", "Buffer"),
    "gradients": ("Sharded Grad",),
    "optimizer": ("OptState",),
    "unsharded": ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter"),
    "activations": ("Activation", "Inputs"),
    "temporaries": ("Temp",),
}
"""The fields of `PeakMemory`, as FSDPMemTracker names what they consist of."""


_LONG = 4096
"""Tokens in a row, for which the attention on CPUs needs as much memory as on GPUs: none for a mask."""


class Chosen(NamedTuple):
    """What a training would compute with, as far as it can be known on a CPU."""

    params: TrainParams
    """With the attention and the loss that were chosen, without `compile`."""
    reason: str | None
    """Of `AttentionChoice`."""
    is_upper_bound: bool
    """Whether a GPU may have an attention function that needs less."""


def choose(manifest: ModelManifest, params: TrainParams) -> Chosen:
    """The settings to measure: attention and loss as a training would choose them, without `compile`.

    Args:
        manifest: The model manifest.
        params: As in params.yaml.

    Raises:
        StageError: the model cannot be trained with those that `params` name.
    """
    # Those that have no form for CPUs mostly need as much memory as the one that `auto` finds here.
    wanted = params.attention if params.attention in ("varlen", "sdpa", "eager", "padded") else "auto"
    attention = choose_attention(
        wanted, manifest.directory(), params.document_mask, _LONG, torch.float32, "cpu", params.context_parallel
    )
    loss = choose_loss(params.loss, manifest.directory())
    # A GPU may have `flex`, or a kernel that the model gives the lengths to, for what a CPU has only these for.
    is_upper_bound = attention.name in ("eager", "padded") and attention.name != params.attention
    chosen = dataclasses.replace(params, compile=False, attention=attention.name, loss=loss.name)
    return Chosen(chosen, attention.reason, is_upper_bound)


def measure(
    manifest: ModelManifest, chosen: Chosen, num_ranks: int, seq_length: int, device_type: str = "cuda",
    rows: TokenRows | None = None, device_memory: int | None = None,
) -> PeakMemory:  # fmt: skip
    """Measure rank 0, whose part of each weight is the largest.

    Args:
        manifest: The model manifest.
        chosen: As `choose` returns it.
        num_ranks: Of the training, as if on one machine.
        seq_length: Tokens per row.
        device_type: Of the ranks.
        rows: Of the training, where documents are padded: many short ones may need more than long ones.
        device_memory: Bytes of a GPU, which decide how much of the loss is computed at a time; None: it is a large one.

    Raises:
        StageError: the model cannot be trained like this.
        RuntimeError: or another of `ERRORS`: the computation depends on values, which fake tensors do not have, as that
            of some mixtures of experts does.
    """
    shapes = [(chosen.params.batch_size, seq_length)]
    if rows is not None:
        shapes.append(padding(manifest, chosen, num_ranks, rows).most_sequences)
    peaks = [_measure(manifest, chosen, num_ranks, shape, seq_length, device_type, device_memory) for shape in shapes]
    return max(peaks, key=lambda peak: peak.total)


def padding(manifest: ModelManifest, chosen: Chosen, num_ranks: int, rows: TokenRows) -> Padding:
    """What padded documents cost in the first steps."""
    router_loss = bool(manifest.router_loss_coef)
    return BatchLoader(rows, chosen.params, manifest.eos_token_id, router_loss).padding(num_ranks)


def _measure(
    manifest: ModelManifest, chosen: Chosen, num_ranks: int, shape: tuple[int, int], seq_length: int, device_type: str,
    device_memory: int | None,
) -> PeakMemory:  # fmt: skip
    params = chosen.params
    with _fake_ranks(params, num_ranks) as mesh, assumed_device(device_type, device_memory):
        model = sharded_model.prepare(manifest, params, mesh)
        shapes = (shape, (params.rows_per_validation_pass, seq_length))
        batches = [_batch(params, shape, has_mask=bool(manifest.router_loss_coef)) for shape in shapes]
        make_optimizer(torch.nn.Linear(64, 64), params)  # torchao computes tables with values at its first state
        accumulates = params.total_batch_size > params.batch_size * num_ranks // params.context_parallel
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # the model is on the meta device, and is not fake
            sharding.allocate(model, "cpu")
            optimizer = make_optimizer(model, params)
            scaler = make_grad_scaler(params.precision, torch.device("cpu"))
            batch, validated = tree_map_only(torch.Tensor, mode.from_tensor, batches)
            if accumulates:  # the last forward pass of a step has the gradients of those before it beside it
                for param in model.parameters():
                    param.grad = torch.zeros_like(param) if param.requires_grad else None
            model.train()
            offloaded = ("weights", "gradients", "optimizer") if params.fsdp.resolved().cpu_offload else ()
            tracker = _Tracker(model, optimizer, mode, [name for kind in offloaded for name in _KINDS[kind]])
            tracker.track_inputs((batch, validated))
            with tracker:
                train_step(model, optimizer, scaler, [batch], 1, params)
                if params.rows_per_validation_pass > params.batch_size:  # else it needs less than a step
                    tracker.reset_mod_stats()  # it asks for this between two forward passes
                    with torch.no_grad():
                        loss_sum(model.eval(), validated)
            parts = [param for param in model.parameters() if isinstance(param, DTensor) and param.requires_grad]
            trained = sum(param.to_local().nbytes for param in parts)
    sizes = {kind: sum(tracker.peak[name] for name in names) for kind, names in _KINDS.items()}
    return PeakMemory(
        total=tracker.peak_size,
        is_upper_bound=chosen.is_upper_bound,
        staging=(trained if params.lora_r else sizes["weights"]) + sizes["optimizer"],
        **sizes,
    )


def make_table(
    manifest: ModelManifest, chosen: Chosen, num_ranks: int, seq_length: int, limit: int, rows: TokenRows | None = None
) -> Table:
    """Measure each kind of activation checkpointing with growing batches, until one does not fit into `limit` bytes."""
    table: dict[str, dict[int, int]] = {}
    for kind in KINDS:
        for size in batch_sizes(chosen.params, num_ranks):
            values: dict[str, Any] = {"activation_checkpointing": kind, "batch_size": size}
            changed = chosen._replace(params=dataclasses.replace(chosen.params, **values))
            try:
                peak = measure(manifest, changed, num_ranks, seq_length, rows=rows, device_memory=limit).total
            except (StageError, *ERRORS):
                break  # the model does not support this kind
            table.setdefault(kind, {})[size] = peak
            if peak > limit:
                break
    return table


def _batch(params: TrainParams, shape: tuple[int, int], has_mask: bool) -> dict[str, Any]:
    tokens = torch.ones(shape, dtype=torch.int32)
    if params.attention == "padded":
        mask = {"attention_mask": torch.ones_like(tokens).long()} if has_mask else {}
        return make_batch(tokens, 0, document_mask=False) | mask
    tokens[:, shape[1] // 2] = 0  # the end of a document: with some, attention may need a mask
    batch = make_batch(tokens, 0, params.document_mask, lengths=params.attention == "varlen")
    if params.context_parallel == 1:
        return batch
    group, _ = dist.new_subgroups(params.context_parallel)
    assert isinstance(group, dist.ProcessGroup)
    return cut(batch, 0, RankContext(group))


@contextmanager
def _fake_ranks(params: TrainParams, num_ranks: int) -> Iterator[DeviceMesh]:
    copies, size = params.fsdp.mesh_shape(num_ranks, num_ranks)
    excepthook = sys.excepthook  # torch replaces it by one that prints a rank
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    # It would print the traceback of what is raised where a model depends on values, which the caller explains.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled = True
    try:
        sizes, names = ((size,), ("fsdp",)) if copies == 1 else ((copies, size), ("replicate", "fsdp"))
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        logger.disabled = False
        sys.excepthook = excepthook
        dist.destroy_process_group()


class _Tracker(FSDPMemTracker):
    """Keeps the peak of a part of the memory, and no peaks of single modules, which would need most of the time."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, mode: FakeTensorMode, ignored: list[str]) -> None:
        super().__init__(model, optimizer)
        self._mode, self._ignored = mode, ignored
        self.peak_size = 0
        """Bytes, without the kinds in `ignored`."""
        self.peak: dict[str, int] = {}
        """Bytes of each kind, by its name."""
        # The weights that FSDP2 does not manage: torch's own would miss them, or take them for activations.
        whole = [param for param in model.parameters() if not isinstance(param, DTensor)]
        self._name([*whole], _FSDPRefType.SHARDED_PARAM)

    def _fsdp_param_group_post_backward(self, fsdp_mod: Any, orig_fsdp_param_group_post_backward: Any) -> Any:
        # torch's own has the last gradient of the group in a variable while it is reduced, so that it ends too late.
        def post_backward(*args: Any, **kwargs: Any) -> None:
            params = fsdp_mod._get_fsdp_state()._fsdp_param_group.fsdp_params
            self._name([param._unsharded_param.grad for param in params], _FSDPRefType.UNSHARDED_GRAD)
            self._fsdp_state = _FSDPState.POST_BW
            orig_fsdp_param_group_post_backward(*args, **kwargs)
            self._name([param.sharded_param.grad for param in params], _FSDPRefType.SHARDED_GRAD)

        return post_backward

    def _name(self, tensors: list[torch.Tensor | None], kind: _FSDPRefType) -> None:
        for tensor in tensors:
            if tensor is not None:
                self._update_and_maybe_create_winfos(tensor, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self._in_opt:
            # `found_inf`, which adamw_8bit reads: it does not update. On GPUs that is compiled to kernels that need no
            # memory, unlike its operations one by one.
            return 1.0
        self._operation = func
        if func is torch.ops.aten._grouped_mm.default:  # of a mixture of experts
            func = _grouped_mm
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Called after each operation."""
        # Where two gradients of one tensor meet, as those of a weight that the embedding shares with the head, autograd
        # adds the second to the first in place. It does not with fake tensors, which are of a subclass: there the first
        # one ends only now. The next operation counts what this one has made.
        if self._operation is torch.ops.aten.add.Tensor and self._mod_tracker.is_bw:
            return
        # DTensor finds the shape of a result by computing with the full tensors: in this mode, entered once more. They
        # do not exist in a real step.
        if len(self._mode.enter_stack) > 1:
            return
        snapshot = self._curr_mem_snap[torch.device("cpu")]
        sizes = {getattr(kind, "value", kind): size for kind, size in snapshot.items()}
        size = sizes["Total"] - sum(sizes[name] for name in self._ignored)
        if size > self.peak_size:
            self.peak_size, self.peak = size, sizes


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """Without the check of torch's shape function that the dtype is bf16: its kernels have more."""
    result = torch.ops.aten._grouped_mm.default(first.bfloat16(), second.bfloat16(), *others, **options)
    assert isinstance(result, torch.Tensor)
    return result.to(first.dtype)
