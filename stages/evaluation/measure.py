"""Measure a finished model on the held-out rows; a collective of the ranks that `evaluate` has started.

Each rank holds a copy of the model and measures a share of the batches, or, where the copies would not fit into memory,
the model is sharded over the ranks. The batches are the same for any number of ranks, and rank 0 adds up what each of
them has measured. So the result is the same, up to the order in which a matrix product adds up its terms, which depends
on the number of threads.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.errors import StageError
from stages.base.packed import VALIDATION
from stages.base.summary import counted
from stages.building import frozen_model
from stages.evaluation import generation
from stages.evaluation.request import (
    LossSum,
    Measurements,
    Request,
    change_of_export,
    computed_dtype,
    stored_dtype,
    weight_bytes,
)
from stages.evaluation.samples import generate_samples
from stages.evaluation.sharing import gathered, must_shard, share
from stages.forward.attention import activate_kernels
from stages.forward.attention_choice import choose_attention
from stages.forward.attention_names import IMPLEMENTATIONS, Attention
from stages.forward.batch import read_batch
from stages.forward.distributed import is_rank0, run_on_all_ranks, run_on_rank0
from stages.forward.loss import choose_loss, fuse, losses
from stages.forward.padded import extended, padded_batches
from stages.forward.rope import fix_tables
from stages.forward.rows import TokenRows
from stages.forward.transfer import to_device
from stages.ranks.process_group import device_mesh
from stages.ranks.watchdog import Heartbeat


class Batch(NamedTuple):
    """Some rows."""

    rows: NDArray[np.int64]
    """(B,): their indices."""
    in_eval_rows: bool
    """Whether the training has measured them too."""
    source: str
    """Of all of them; "": there are none."""


def measure(request: Request, heartbeat: Heartbeat, is_sharded: bool | None = None) -> Measurements:
    """Measure the loss of a model, and have it write samples; a collective of the ranks of this machine.

    Args:
        request: What to measure.
        heartbeat: Of this rank.
        is_sharded: Whether to shard the model over the ranks; None: where copies would not fit into memory.

    Returns:
        What all ranks have found, on rank 0; the others have nothing that counts.

    Raises:
        StageError: the model's documents cannot be kept apart, or it has another loss than the trained one.
    """

    def part(wanted: Iterable[bool]) -> LossSum:
        own = [*compress(zip(batches, sums, strict=False), wanted)]
        return LossSum(
            rows=sum(len(batch.rows) for batch, _ in own),
            tokens=sum(tokens for _, (_, tokens) in own),
            nats=math.fsum(nats for _, (nats, _) in own),  # exact, whatever the order
        )

    rows = TokenRows(VALIDATION)
    if is_sharded is None:
        is_sharded = must_shard(weight_bytes(request.directory, request.weights))
    heartbeat.note("loading the model")
    model, tokenizer = load(request, is_sharded)
    with rows_attention(model, request, rows.seq_length) as attention:
        # Documents of many rows together need less padding.
        batches = plan_batches(request, rows, request.batch_size * (8 if attention == "padded" else 1))

        def measured(some: list[Batch]) -> list[tuple[float, int]]:
            return gathered(measure_batches(model, rows, some, request, attention, heartbeat, is_sharded), heartbeat)

        num_eval = sum(batch.in_eval_rows for batch in batches)
        sums = measured(batches[:num_eval])
        # The others may be many more, and samples take as long again.
        run_on_rank0(lambda: check_export(request, part(batch.in_eval_rows for batch in batches)))
        sums += measured(batches[num_eval:])
    num_parameters, dtype = model.num_parameters(), model.dtype
    samples = generate_samples(model, tokenizer, rows, request, heartbeat, is_sharded)
    # Loading is a collective: not "if there are samples", of which a rank may have no share.
    if request.initial and len(rows):
        before = dataclasses.replace(request, model=request.initial, weights=request.initial_weights)
        del model
        heartbeat.note("loading the initial model")
        initial, _ = load(before, is_sharded, dtype)
        older = generate_samples(initial, tokenizer, rows, before, heartbeat, is_sharded)
        samples = [
            dataclasses.replace(sample, before=other.continuation) for sample, other in zip(samples, older, strict=True)
        ]
    return Measurements(
        num_parameters,
        part(batch.in_eval_rows for batch in batches),
        part(not batch.in_eval_rows for batch in batches),
        gathered(samples, heartbeat),
        {source: part(batch.source == source for batch in batches) for source in rows.sources},
    )


def check_export(request: Request, exported: LossSum) -> None:
    """Compare the loss of the exported weights with that of the trained ones, on the same rows.

    Raises:
        StageError: they differ by more than rounding explains.
    """
    trained = request.trained
    if trained is None or not exported.tokens:
        return
    loss = exported.nats / exported.tokens
    if abs(loss - trained.loss) <= trained.allowed:  # not true of NaN
        return
    change, remedy = change_of_export(stored_dtype(request.directory), trained.lora_base)
    losses = (
        f"the loss on {counted(exported.rows, 'held-out row')} was {trained.loss:.6g} at step {trained.step} of the "
        f"training, and is {loss:.6g} with the exported weights: {loss - trained.loss:+.4g} nats, where "
        f"{trained.allowed:.4g} is allowed"
    )
    if change:
        raise StageError(f"{losses}. {change[0].upper()}{change[1:]} has changed it. {remedy}")
    raise StageError(
        f"{losses}. They are not the weights of the checkpoint: run `dvc repro -f -s consolidate`, and then again"
    )


def plan_batches(request: Request, rows: TokenRows, size: int) -> list[Batch]:
    """The batches of `size` rows: those of rows that the training has measured, then those of the others."""
    eval_rows, all_rows = rows.spread(request.eval_rows), rows.spread(None)
    others = {source: np.setdiff1d(all_rows[source], measured) for source, measured in eval_rows.items()}
    return [
        Batch(some[first : first + size], in_eval_rows, source)
        for of_sources, in_eval_rows in ((eval_rows, True), (others, False))
        for source, some in of_sources.items()
        for first in range(0, len(some), size)
    ]


def load(request: Request, is_sharded: bool, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, Any]:
    """The model, with the loss of the training, and its tokenizer; a collective.

    A copy is loaded as any user would load it, from its directory alone.
    """
    dtype = dtype or computed_dtype(request.directory)
    loss = run_on_rank0(lambda: choose_loss("auto", request.directory))
    if is_rank0() and loss.reason:
        print(f"evaluate: loss {loss.name}, because {loss.reason}")
    if is_sharded:
        mesh = device_mesh((1, dist.get_world_size()), request.timeout_minutes)
        model = frozen_model.load(request.directory, request.weights, request.layer_classes, dtype, loss.name, mesh)
        return model, generation.load_tokenizer(request.directory)
    model, tokenizer = generation.load(request.directory, dtype)
    if loss.name == "fused":
        fuse(model)
    return model, tokenizer


@contextmanager
def rows_attention(model: PreTrainedModel, request: Request, seq_length: int) -> Iterator[Attention]:
    """Have a model compute rows of documents, with the fastest attention function; yields its name.

    Not that of the training: it may not work in the dtype of the exported weights. All that are accepted give the same
    loss, up to rounding. A collective.
    """
    attention, _, kernels = run_on_rank0(
        lambda: choose_attention(
            "auto", request.directory, request.document_mask, seq_length, model.dtype, model.device.type
        )
    )
    activate_kernels(kernels)
    own = model.config._attn_implementation
    if implementation := IMPLEMENTATIONS[attention]:
        model.set_attn_implementation(implementation)
    handles = fix_tables(model, seq_length)
    yield attention
    for handle in handles:
        handle.remove()
    model.set_attn_implementation(own)  # to generate text, one token after another


def measure_batches(
    model: PreTrainedModel, rows: TokenRows, batches: Sequence[Batch], request: Request, attention: Attention,
    heartbeat: Heartbeat, is_sharded: bool,
) -> list[tuple[float, int]]:  # fmt: skip
    """The loss of each batch of this rank's share in nats, summed over the tokens predicted, and their number."""
    own, num_counted = share(batches, is_sharded)
    sums = [(0.0, 0)] * len(own)
    measured: list[int] = []
    """For each forward pass, which of the batches it is of."""

    def made() -> Iterator[dict[str, Tensor]]:
        is_quiet = dist.get_rank() > 0 or not own
        # disable=None: where there is no terminal
        for index, batch in enumerate(tqdm(own, desc="evaluate", unit="batch", disable=is_quiet or None)):
            heartbeat.note(f"measuring batch {index + 1} of {len(own)}")
            lengths = attention == "varlen"
            inputs = [read_batch(rows, batch.rows, request.eos_token_id, request.document_mask, lengths)]
            if attention == "padded":
                inputs = padded_batches(inputs[0], max_tokens=request.batch_size * rows.seq_length)
                if is_sharded:  # each is a collective: as many on all ranks
                    inputs = extended(inputs, max(run_on_all_ranks(partial(len, inputs))))
            measured.extend([index] * len(inputs))
            yield from (to_device(each, model.device) for each in inputs)

    with torch.no_grad():
        found = list(losses(model, made()))
    for index, (nats, num_tokens) in zip(measured, found, strict=True):
        sums[index] = sums[index][0] + nats, sums[index][1] + num_tokens
    return sums[:num_counted]
