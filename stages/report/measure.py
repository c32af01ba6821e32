"""Measure a finished model and have it write samples: one rank of it. `python -m stages.evaluate` starts the ranks.

Reads    outputs/<experiment_name>/model/, data/tokens/validation, and the request of `evaluate`
Writes   the measurements, for `evaluate`
Command  python -m stages.report.measure

Each rank holds a copy of the model and measures a share of the batches, or, where the copies would not fit into memory,
the model is sharded over the ranks. The batches are the same for any number of ranks, and rank 0 adds up what each of
them has measured. So the result is the same, up to the order in which a matrix product adds up its terms, which depends
on the number of threads.
"""

import dataclasses
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from stages.base import command
from stages.base.command import USER_ERROR, format_gib
from stages.base.errors import StageError
from stages.base.packed import VALIDATION
from stages.base.publish import read_json
from stages.base.record import Record
from stages.export.evaluation import Sample
from stages.forward.attention_names import IMPLEMENTATIONS, NEED_LENGTHS, Attention
from stages.model import headers
from stages.model.files import CONFIG
from stages.ranks import handoff

# torch and transformers take seconds to import, so functions import what needs them: `evaluate` needs no more than the
# names, and answers --help at once.
if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from stages.forward.rows import TokenRows
    from stages.ranks.watchdog import Heartbeat

T = TypeVar("T")

REQUEST = "request.json"
MEASUREMENTS = "measurements.json"
"""Their names in the directory that the ranks share."""

PROMPT_TOKENS = 32
NEW_TOKENS = 64
TEMPERATURE = 0.8

_MEMORY_SHARE = 0.8
"""Of the free memory, that copies of the weights may take: the rest is for activations, logits, keys and values."""
_LOST = 3
"""Exit status of a rank that lost the connection to another one, which prints its own reason."""


@dataclass(frozen=True)
class Trained:
    """What the training has measured, on the rows that are measured first."""

    loss: float
    """Nats per token."""
    step: int
    allowed: float
    """By how many nats per token the loss may change in the export."""


@dataclass(frozen=True)
class Request(Record):
    """What to measure, and how: from `evaluate` to its ranks."""

    STAGE: ClassVar[str] = "evaluate"

    model: str
    """Path of its directory."""
    weights: list[str]
    """Its safetensors files."""
    initial: str | None
    """The directory of the initial model, if it has weights."""
    initial_weights: list[str]
    layer_classes: list[str]
    """Classes of its layers, by which it can be sharded."""
    eos_token_id: int
    """That ends the documents."""
    eval_rows: int | None
    """Rows that the training has measured; null: all."""
    batch_size: int
    """Rows per forward pass."""
    document_mask: bool
    num_samples: int
    timeout_minutes: float
    """After this time without an answer another rank counts as lost."""
    trained: Trained | None
    """null: there is no loss to compare with."""

    def before(self) -> "Request | None":
        """The same of the initial model."""
        if self.initial is None:
            return None
        return dataclasses.replace(self, model=self.initial, weights=self.initial_weights, initial=None)

    @property
    def directory(self) -> Path:
        """Of the model."""
        return Path(self.model)


@dataclass(frozen=True)
class LossSum:
    """What was measured on some rows."""

    rows: int
    tokens: int
    """Predicted."""
    nats: float
    """Summed over them."""


@dataclass(frozen=True)
class Measurements(Record):
    """What the ranks found."""

    STAGE: ClassVar[str] = "evaluate"

    num_parameters: int
    eval_rows: LossSum
    """Of the rows that the training has measured too."""
    others: LossSum
    """Of all other rows."""
    samples: list[Sample]
    sources: dict[str, LossSum] = field(default_factory=dict)
    """Of all rows of each source; none: they are of all files."""


class Batch(NamedTuple):
    """Some rows."""

    rows: "NDArray[np.int64]"
    """(B,): their indices."""
    in_eval_rows: bool
    """Whether the training has measured them too."""
    source: str
    """Of all of them; "": there are none."""


def main() -> None:
    """Measure as one of the ranks that `evaluate` has started."""
    command.parser(__doc__).parse_args()
    if handoff.DIRECTORY not in os.environ:
        raise StageError("`python -m stages.evaluate` starts the ranks: run that")
    handoff.die_with_torchrun(signal.SIGKILL)
    # There is nothing to save: where another rank fails, this one is ended, and says nothing.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    directory = Path(os.environ[handoff.DIRECTORY])
    request = Request.read(directory / REQUEST)

    from stages.forward.distributed import is_rank0
    from stages.ranks.process_group import process_group
    from stages.ranks.torch_errors import LostConnection, explain_torch_errors
    from stages.ranks.watchdog import Heartbeat, watched

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heartbeat = Heartbeat()
    try:
        with (
            explain_torch_errors(f"rank {rank}", f"use {remedies(request, num_ranks)}"),
            process_group(request.timeout_minutes, os.environ[handoff.DIRECTORY]),
            watched(heartbeat, request.timeout_minutes),
        ):
            measurements = measure(request, heartbeat)
            if is_rank0():
                measurements.write(directory / MEASUREMENTS)
    except LostConnection:
        sys.exit(_LOST)
    except (StageError, OSError):
        if not handoff.claim_error(""):  # whatever it is: the first rank that fails speaks for all
            sys.exit(USER_ERROR)
        raise


def measure(request: Request, heartbeat: "Heartbeat", is_sharded: bool | None = None) -> Measurements:
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
    from stages.forward.distributed import run_on_rank0
    from stages.forward.rows import TokenRows

    def part(is_wanted: Callable[[Batch], bool]) -> LossSum:
        own = [found for found in zip(batches, sums, strict=False) if is_wanted(found[0])]
        return LossSum(
            rows=sum(len(batch.rows) for batch, _ in own),
            tokens=sum(tokens for _, (_, tokens) in own),
            nats=math.fsum(nats for _, (nats, _) in own),  # exact, whatever the order
        )

    rows = TokenRows(VALIDATION)
    if is_sharded is None:
        is_sharded = must_shard(request)
    heartbeat.note("loading the model")
    model, tokenizer = load(request, is_sharded)
    with rows_attention(model, request, rows.seq_length) as attention:
        # Documents of many rows together need less padding.
        batches = plan_batches(request, rows, request.batch_size * (8 if attention == "padded" else 1))

        def measured(some: list[Batch]) -> list[tuple[float, int]]:
            return _gathered(measure_batches(model, rows, some, request, attention, heartbeat, is_sharded), heartbeat)

        num_eval = sum(batch.in_eval_rows for batch in batches)
        sums = measured(batches[:num_eval])
        # The others may be many more, and samples take as long again.
        run_on_rank0(lambda: check_export(request, part(lambda batch: batch.in_eval_rows)))
        sums += measured(batches[num_eval:])
    num_parameters, dtype = model.num_parameters(), model.dtype
    samples = generate_samples(model, tokenizer, rows, request, heartbeat, is_sharded)
    # Loading is a collective: not "if there are samples", of which a rank may have no share.
    if (before := request.before()) and request.num_samples and len(rows):
        del model
        heartbeat.note("loading the initial model")
        initial, _ = load(before, is_sharded, dtype)
        older = generate_samples(initial, tokenizer, rows, before, heartbeat, is_sharded)
        samples = [
            dataclasses.replace(sample, before=other.continuation) for sample, other in zip(samples, older, strict=True)
        ]
    return Measurements(
        num_parameters,
        part(lambda batch: batch.in_eval_rows),
        part(lambda batch: not batch.in_eval_rows),
        _gathered(samples, heartbeat),
        {source: part(partial(_is_of, source)) for source in rows.sources},
    )


def _gathered(own: list[T], heartbeat: "Heartbeat") -> list[T]:
    """On rank 0, what all ranks have of what `_share` has divided, in its order; a collective."""
    from stages.forward.distributed import gather_on_rank0, is_rank0

    heartbeat.note("collecting what the ranks have found")
    gathered = gather_on_rank0(lambda: own)
    if not is_rank0():
        return own
    found = gathered()
    return [found[index % len(found)][index // len(found)] for index in range(sum(map(len, found)))]


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
    dtype = stored_dtype(request.directory)
    losses = (
        f"the loss on {exported.rows:,} held-out rows was {trained.loss:.6g} at step {trained.step} of the "
        f"training, and is {loss:.6g} with the exported weights: {loss - trained.loss:+.4g} nats, where "
        f"{trained.allowed:.4g} is allowed"
    )
    if dtype not in ("bfloat16", "float16"):
        raise StageError(
            f"{losses}. They are not the weights of the checkpoint: run `dvc repro -f -s consolidate`, and then again"
        )
    raise StageError(f"{losses}. Rounding the weights to {dtype} has changed it: set export_dtype: fp32")


def _is_of(source: str, batch: Batch) -> bool:
    return batch.source == source


def plan_batches(request: Request, rows: "TokenRows", size: int) -> list[Batch]:
    """The batches of `size` rows: those of rows that the training has measured, then those of the others."""
    import numpy as np

    eval_rows, all_rows = rows.spread(request.eval_rows), rows.spread(None)
    others = {source: np.setdiff1d(all_rows[source], measured) for source, measured in eval_rows.items()}
    return [
        Batch(some[first : first + size], in_eval_rows, source)
        for of_sources, in_eval_rows in ((eval_rows, True), (others, False))
        for source, some in of_sources.items()
        for first in range(0, len(some), size)
    ]


def must_shard(request: Request) -> bool:
    """Whether copies of the model would not fit into the free memory of all GPUs, or of this machine; a collective."""
    import torch
    import torch.distributed as dist

    from stages.forward.distributed import all_reduce_sum

    if torch.cuda.is_available():
        needed, free = weight_bytes(request), torch.cuda.mem_get_info()[0]
    else:
        needed, free = dist.get_world_size() * weight_bytes(request), free_memory()
    (votes,) = all_reduce_sum(needed > _MEMORY_SHARE * free)
    return votes > 0 and dist.get_world_size() > 1


def weight_bytes(request: Request) -> int:
    """Bytes of the weights in the dtype in which they are computed with."""
    stored = headers.read(request.directory, request.weights)
    return computed_dtype(request).itemsize * sum(math.prod(tensor.shape) for tensor in stored.values())


def computed_dtype(request: Request) -> "torch.dtype":
    """That of the weights on a GPU; on CPUs fp32: bf16 takes seven times as long on one without bf16 instructions."""
    import torch

    stored: torch.dtype = getattr(torch, stored_dtype(request.directory))
    return stored if torch.cuda.is_available() else torch.float32


def stored_dtype(directory: Path) -> str:
    """The dtype of a model's weights, as its config.json names it."""
    dtype: str = read_json(directory / CONFIG)["dtype"]
    return dtype


def free_memory() -> int:
    """Bytes of this machine's memory that can be used, or of that of its job."""
    import psutil

    from stages.ranks.memory import memory_limit

    return min(int(psutil.virtual_memory().available), memory_limit())


def remedies(request: Request, num_ranks: int) -> str:
    """What needs less memory, in words, and how much the weights need."""
    import torch

    weights, found = format_gib(weight_bytes(request)), []
    if request.batch_size > 1:
        found.append(f"eval_batch_size {request.batch_size // 2} (of the training too, which then runs again)")
    if torch.cuda.is_available():
        if num_ranks < torch.cuda.device_count():
            found.append(f"more ranks than {num_ranks} (runtime.nproc_per_node) if a copy of the model does not fit")
        found.append("GPUs with more memory")
        needed = f"{weights} on each GPU, or on all together if a copy does not fit"
    else:
        if num_ranks > 1:
            found.append(f"fewer ranks than {num_ranks} (runtime.nproc_per_node)")
        found.append("a machine with more memory")
        where = f", in each of {num_ranks} ranks or shared by them" if num_ranks > 1 else ""
        needed = f"{weights} in fp32{where}, and {format_gib(free_memory())} were free"
    return f"{', or '.join(filter(None, [', '.join(found[:-1]), found[-1]]))}: the weights need {needed}"


def load(request: Request, is_sharded: bool, dtype: "torch.dtype | None" = None) -> tuple["PreTrainedModel", Any]:
    """The model, with the loss of the training, and its tokenizer; a collective.

    A copy is loaded as any user would load it, from its directory alone.
    """
    import torch.distributed as dist

    from stages.forward import frozen_model
    from stages.forward.distributed import is_rank0, run_on_rank0
    from stages.forward.loss import fuse
    from stages.forward.loss_probe import choose_loss
    from stages.ranks.process_group import device_mesh
    from stages.report import generation

    dtype = dtype or computed_dtype(request)
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
def rows_attention(model: "PreTrainedModel", request: Request, seq_length: int) -> Iterator[Attention]:
    """Have a model compute rows of documents, with the fastest attention function; yields its name.

    Not that of the training: it may not work in the dtype of the exported weights. All that are accepted give the same
    loss, up to rounding. A collective.
    """
    from stages.forward.attention import activate_kernels
    from stages.forward.distributed import run_on_rank0
    from stages.forward.document_mask import choose_attention
    from stages.forward.rope import fix_tables

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
    model: "PreTrainedModel", rows: "TokenRows", batches: Sequence[Batch], request: Request, attention: Attention,
    heartbeat: "Heartbeat", is_sharded: bool,
) -> list[tuple[float, int]]:  # fmt: skip
    """The loss of each batch of this rank's share in nats, summed over the tokens predicted, and their number."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from stages.forward.batch import read_batch
    from stages.forward.distributed import run_on_all_ranks
    from stages.forward.loss import losses
    from stages.forward.padded import extended, padded_batches
    from stages.forward.transfer import to_device

    own, num_counted = _share(batches, is_sharded)
    sums = [(0.0, 0)] * len(own)
    measured: list[int] = []
    """For each forward pass, which of the batches it is of."""

    def made() -> Iterator[dict[str, "Tensor"]]:
        is_quiet = dist.get_rank() > 0 or not own
        # disable=None: where there is no terminal
        for index, batch in enumerate(tqdm(own, desc="evaluate", unit="batch", disable=is_quiet or None)):
            heartbeat.note(f"measuring batch {index + 1} of {len(own)}")
            lengths = attention in NEED_LENGTHS
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


def generate_samples(
    model: "PreTrainedModel", tokenizer: Any, rows: "TokenRows", request: Request, heartbeat: "Heartbeat",
    is_sharded: bool,
) -> list[Sample]:  # fmt: skip
    """This rank's share of the samples: what the model writes after prompts that are spread over all held-out rows."""
    import numpy as np
    import torch

    from stages.report import generation

    num_samples = min(request.num_samples, len(rows))
    bounds = np.arange(num_samples + 1) * len(rows) // max(1, num_samples)  # of as many ranges of rows
    size = min(PROMPT_TOKENS, generation.max_length(model) // 2)
    ranges = [range(*pair) for pair in pairwise(bounds.tolist())]
    found = [find_question(rows, each) or find_prompt(rows, each, request.eos_token_id, size) for each in ranges]
    prompts = [(torch.from_numpy(prompt).long(), rest) for prompt, rest in found if len(prompt)]
    # As many for all prompts: ranks that share a model do not stop before the last of them.
    num_tokens = min(NEW_TOKENS, generation.max_length(model) - max((len(prompt) for prompt, _ in prompts), default=0))
    own, num_counted = _share(list(enumerate(prompts)), is_sharded)
    samples = []
    for number, (prompt, rest) in own:
        heartbeat.note(f"writing sample {number + 1} of {len(prompts)}")
        torch.manual_seed(number)  # of the sample: the same on any number of ranks
        continuation = generation.generate(
            model, prompt[None].to(model.device), num_tokens, TEMPERATURE, synced_gpus=is_sharded
        )
        samples.append(
            Sample(
                tokenizer.decode(prompt), tokenizer.decode(continuation, skip_special_tokens=True),
                tokenizer.decode(rest[:num_tokens]), generation.has_ended(model, continuation),
            )
        )  # fmt: skip
    return samples[:num_counted]


def find_prompt(
    rows: "TokenRows", indices: range, eos_token_id: int, size: int
) -> tuple["NDArray[np.int32]", "NDArray[np.int32]"]:
    """The beginning of a held-out document, (n,), and the rest of what is there of the document, at least as long.

    n is at most `size`.

    It is that of the longest document which begins in the first of the rows in which one begins. If none does, it is
    taken from the middle of one; it is empty if there is nothing but EOS.

    Args:
        rows: Held-out rows, each of which continues the one before.
        indices: The rows to look at; at least one.
        eos_token_id: It ends each document, and is not a part of the prompt.
        size: In tokens.
    """
    import numpy as np

    for index in indices:
        tokens = rows.rows(np.arange(index, min(index + 2, len(rows)))).ravel()  # (T or 2T,): a document may go on
        is_end = tokens == eos_token_id
        pieces = [piece[piece != eos_token_id] for piece in np.split(tokens, np.flatnonzero(is_end) + 1)]
        pieces = pieces[: 1 + np.count_nonzero(is_end[: rows.seq_length])]  # without those that begin in the next row
        # The first piece is the end of a document, except in the very first row.
        longest = max(pieces[min(index, 1) :], key=len, default=tokens[:0])
        if len(longest) > 1:
            break
    else:
        longest = max(pieces, key=len)
    size = min(size, max(1, len(longest) // 2))
    return longest[:size], longest[size:]


def find_question(rows: "TokenRows", indices: range) -> tuple["NDArray[np.int32]", "NDArray[np.int32]"] | None:
    """The beginning of a held-out conversation, until the model is to write, and the rest of it; None: there is none.

    Args:
        rows: Held-out rows.
        indices: The rows to look at.
    """
    import numpy as np

    for index in indices:
        (tokens,), marks = rows.rows(np.array([index])), rows.marks(np.array([index]))
        if marks is None:
            return None
        (is_trained,), (is_start,) = marks
        for start, end in pairwise([*np.flatnonzero(is_start).tolist(), len(tokens)]):
            answers = np.flatnonzero(is_trained[start:end])
            if len(answers) and answers[0]:
                return tokens[start : start + answers[0]], tokens[start + answers[0] : end]
    return None


def _share(items: Sequence[T], is_sharded: bool) -> tuple[list[T], int]:
    """This rank's share of some items, and how many of them count.

    A forward pass of a sharded model is a collective: all ranks make as many, some of which do not count.
    """
    import torch.distributed as dist

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = [*items[rank::num_ranks]]
    missing = -(-len(items) // num_ranks) - len(own) if is_sharded else 0
    return own + [*items[:1]] * missing, len(own)


if __name__ == "__main__":
    with handoff.rank():
        command.run(main)
