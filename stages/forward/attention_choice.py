"""Which attention function a model is trained with, tested before it is trained.

Attention functions differ in what they ignore without a word: positions that restart with each document (so tokens
attend to other documents), a window, a soft cap, dropout. It depends on the function, the architecture, the device and
the precision. So a tiny random model of the architecture is tested with the very function:

- with other tokens in one document, the logits of all others must not change at all;
- logits and gradients must be those of each document computed alone by the model's own code, up to rounding.

Padded documents (stages/forward/padded.py) are computed by the model's own code, each as if it were alone, if the model
is causal: for these the first test is enough, in fp32 and up to rounding. The padding changes in it, too.

With `context_parallel` the rows are cut into slices, as they are for ranks. A model that looks across tokens outside of
attention misses those of the other slices, and fails the second test.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from stages.base.errors import StageError, one_line
from stages.forward.attention import activate_kernels, deactivate_kernels
from stages.forward.attention_names import IMPLEMENTATIONS, Attention
from stages.forward.batch import make_batch
from stages.forward.context import RowContext, cut
from stages.forward.isolated import isolated
from stages.forward.loss import logits
from stages.forward.padded import padded_batches
from stages.forward.rope import fix_tables
from stages.forward.small_copy import VOCAB_SIZE, random_model, rounding, small_config
from stages.forward.transfer import to_device

_SHORT = 512
"""Rows up to this length have small masks: on CPUs a step of the default model takes as long with `sdpa` as with
`varlen`, or 6 % less where a row is one document. At 1024 tokens it takes 33 % more, with documents of 300 tokens."""

_END = 0
_LENGTH = 32
_DOCUMENTS = ((13, 9, 10), (3, 29))
"""Lengths of the documents in each row, most of them longer than a window."""
_SLICES = 4
"""Of all rows together, for `context_parallel`: its own number shows no more. They begin inside documents."""


class AttentionChoice(NamedTuple):
    """How tokens attend to their own document only."""

    name: Attention
    """Not `auto`."""
    reason: str | None
    """Why not what is preferred: why `padded`, or why `varlen` with torch's own kernels."""
    kernels: tuple[str, ...] = ()
    """Of Flash Attention, which `varlen` calls, for `activate_kernels`; none: torch's own."""


def choose_attention(
    attention: Attention, directory: Path, document_mask: bool, seq_length: int, dtype: torch.dtype, device: str,
    context_parallel: int = 1,
) -> AttentionChoice:  # fmt: skip
    """The attention that `attention` stands for. Seeds the random number generator of torch.

    Args:
        attention: As in params.yaml.
        directory: Of the model.
        document_mask: Whether tokens attend to their own document only.
        seq_length: Tokens per row.
        dtype: Of the computation.
        device: `cuda` or `cpu`.
        context_parallel: Ranks that share each row; with several, it is `varlen`, whatever else would work.

    Raises:
        StageError: the one that is named does not work with the model, or it is none whose tokens see only what stands
            before them, or the ranks cannot share the layers of the model.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    architecture = (config.architectures or [config.model_type])[0]
    small = small_config(config)
    reasons: dict[str, str] = {}
    order = _order(seq_length if document_mask else 0, dtype, device)
    is_cut = context_parallel > 1
    if is_cut:
        attention = "varlen"
    for name in order if attention == "auto" else (attention,):
        not_used = None
        for kernels in _kernels(name):
            reason = refusal(small, name, document_mask, dtype, device, kernels, is_cut)
            if reason is None:
                return AttentionChoice(name, _list(reasons) if name == "padded" != attention else not_used, kernels)
            reasons[name], not_used = reason, f"{' '.join(kernels)} {reason}"
        if attention == "auto" and not document_mask and name == "eager":
            # A model that cannot be tested: nothing is asked of its own code that it might ignore.
            return AttentionChoice("eager", None)
    if attention == "auto":
        raise StageError(
            f"document_mask: the documents of {architecture} cannot be kept apart: {_list(reasons)}: use another model"
        )
    precision = str(dtype).removeprefix("torch.")
    if is_cut:
        raise StageError(
            f"context_parallel {context_parallel} does not work with {architecture} in {precision} on this {device}: "
            f"attention varlen {reasons['varlen']}: use context_parallel 1, or another model"
        )
    others = [name for name in order if name != attention]
    works = [name for name in others if refusal(small, name, document_mask, dtype, device) is None]
    remedy = f"use auto, or {' or '.join(works)}" if works else "use another model"
    raise StageError(
        f"attention {attention} does not work with {architecture} in {precision} on this {device}: it "
        f"{reasons[attention]}: {remedy}"
    )


def _order(mask_length: int, dtype: torch.dtype, device: str) -> tuple[Attention, ...]:
    """What `auto` tries, the fastest first, where `sdpa` has a mask of `mask_length` tokens, or none of documents."""
    if device == "cuda" and dtype == torch.float32:
        # For it varlen has no kernel, and flex no fast one, compiled at each start.
        return "varlen", "sdpa", "flex", "eager", "padded"
    if device == "cuda":
        return "varlen", "flex", "sdpa", "eager", "padded"
    # Without flex, of which torch has no backward pass for CPUs.
    fastest: tuple[Attention, ...] = ("sdpa", "varlen") if mask_length <= _SHORT else ("varlen", "sdpa")
    return *fastest, "eager", "padded"


def _kernels(attention: Attention) -> list[tuple[str, ...]]:
    """What to try an attention function with, for `activate_kernels`: torch's own last."""
    found = activate_kernels() if attention == "varlen" else ()
    deactivate_kernels()  # sdpa would call them too
    return [found, ()] if found else [()]


def _list(reasons: dict[str, str]) -> str:
    """One sentence for all that have the same reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(found)} {reason}" for reason, found in names.items())


def refusal(
    small: PreTrainedConfig | None, attention: Attention, document_mask: bool, dtype: torch.dtype, device: str,
    kernels: tuple[str, ...] = (), is_cut: bool = False,
) -> str | None:  # fmt: skip
    """Why a model cannot be trained with an attention function, as the end of a sentence; None: it can.

    Args:
        small: What `small_config` returned.
        attention: Not `auto`.
        document_mask: As for `choose_attention`.
        dtype: As for `choose_attention`.
        device: As for `choose_attention`.
        kernels: Of Flash Attention, which `varlen` is to call; none: torch's own.
        is_cut: Whether ranks share each row; with `varlen`.
    """
    if small is None:  # padding needs nothing of a model, and so no test
        return None if attention == "padded" else "cannot be tested, as no small copy of the model computes"
    if attention == "flex" and device == "cpu":
        return "has no backward pass on CPUs"  # which torch reports after a minute of compiling
    try:
        return isolated(device, _test, small, attention, document_mask, dtype, device, kernels, is_cut)
    except RuntimeError as error:
        return f"fails ({error})"


def _test(
    small: PreTrainedConfig, attention: Attention, document_mask: bool, dtype: torch.dtype, device: str,
    kernels: tuple[str, ...], is_cut: bool,
) -> str | None:  # fmt: skip
    """As `refusal`, in this process."""
    try:
        activate_kernels(kernels)
        return _find_fault(small, attention, document_mask, dtype, device, is_cut)
    except Exception as error:  # of any architecture, of a compiler, or of a package that is not installed
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATIONS[attention],):
            return "is not among the attention functions that the model's code in transformers knows"
        # The first sentence: libraries go on with advice to whoever calls them.
        return f"fails ({type(error).__name__}: {one_line(error).partition('. ')[0]})"
    finally:
        deactivate_kernels()


def sees_what_follows(small: PreTrainedConfig) -> bool:
    """Whether the tokens of a model depend on those after them, as in an encoder, so that it learns to copy.

    False also where its small copy cannot be tested. Seeds the random number generator of torch.
    """
    with suppress(Exception):  # of any architecture
        model = random_model(small, "eager", torch.float32, "cpu")
        rows = torch.randint(1, VOCAB_SIZE - 1, (1, _LENGTH))  # (B, T)
        changed, is_other = _change(rows, 0, slice(_LENGTH - 1, _LENGTH))
        with torch.no_grad():
            found, other = (logits(model, {"input_ids": tokens})[is_other] for tokens in (rows, changed))
        # Other kernels may round differently; what a token sees changes its logits by more than a hundredth.
        return not torch.allclose(found, other, rtol=0, atol=1e-3, equal_nan=True)
    return False


def _find_fault(
    small: PreTrainedConfig, attention: Attention, document_mask: bool, dtype: torch.dtype, device: str, is_cut: bool
) -> str | None:
    dtype = torch.float32 if attention == "padded" else dtype
    model = random_model(small, IMPLEMENTATIONS[attention], dtype, device)
    fix_tables(model, _LENGTH)

    def compute(rows: Tensor, document_mask: bool = document_mask) -> Tensor:
        """The logits of rows, with the attention that is tested: (B, T, V)."""
        batch = make_batch(rows, _END, document_mask, lengths=attention == "varlen")
        if is_cut:
            context = RowContext(_SLICES)  # each slice is a row
            slices = [cut(batch, number, context) for number in range(_SLICES)]
            batch = slices[0] | {
                name: torch.cat([each[name] for each in slices]) for name in ("input_ids", "position_ids")
            }
            return logits(model, to_device(batch, device)).view(*rows.shape, -1)
        if attention != "padded":
            return logits(model, to_device(batch, device))
        batch["labels"] = torch.arange(rows.numel()).view_as(rows)  # to see where each token goes
        (padded,) = padded_batches(batch, max_tokens=rows.numel() ** 2)
        place = padded["labels"].flatten()
        order = place.argsort()[(place < 0).sum() :]
        return logits(model, to_device(padded, device)).flatten(0, 1)[order].view(*rows.shape, -1)

    # (B, T), without _END, which is 0, and without the token that is used for padding.
    rows = torch.randint(1, VOCAB_SIZE - 1, (len(_DOCUMENTS), _LENGTH))
    for row, document in _documents():
        rows[row, document.stop - 1] = _END
    parts = list(_documents() if document_mask else ((row, slice(0, _LENGTH)) for row in range(len(rows))))
    # Between rounding, a few times as much, and what a wrong mask makes, which is more than a tenth.
    tolerance = rounding(dtype, device) ** 0.5
    with torch.no_grad():
        found = compute(rows)
        for row, part in parts:
            changed, is_other = _change(rows, row, part)
            found_again = compute(changed)
            if attention == "padded":  # with other padding too; no document can see another one
                if not _error(found_again[is_other], found[is_other]) <= tolerance:
                    return "lets tokens attend to what stands behind them"
            elif not torch.equal(found_again[is_other], found[is_other]):
                return f"lets tokens attend to other {'documents' if document_mask else 'rows'}"
        if attention == "padded":
            return None
        # The control: without the mask the logits must change, or the test could not detect a leak.
        changed, is_other = _change(rows, 0, slice(0, _DOCUMENTS[0][0]))
        without_mask = [compute(tokens, document_mask=False)[is_other] for tokens in (rows, changed)]
        if torch.equal(*without_mask):
            return "computes logits that do not depend on what stands before"

    reference = random_model(small, "eager", dtype, device)
    fix_tables(reference, _LENGTH)
    # eval(): dropout would differ. Gradients of the logits' sum with random factors.
    factors = torch.randn(*rows.shape, VOCAB_SIZE).to(device)
    found = compute(rows)
    (found.float() * factors).sum().backward()
    expected = torch.zeros_like(found)
    for row, part in parts:
        alone = logits(reference, {"input_ids": rows[row, part][None].to(device)})  # (1, tokens of the part, V)
        (alone.float() * factors[row, part]).sum().backward()
        expected[row, part] = alone.detach()[0]
    compared = {"logits": (found.detach(), expected), "gradients": (_gradient(model), _gradient(reference))}
    for name, values in compared.items():
        if not (error := _error(*values)) <= tolerance:
            return f"computes {name} that differ by {error:.2g} from those of each document alone"
    with torch.no_grad():
        model.train()
        compute(rows)  # raises where the function has no dropout, and the model asks for it
    return None


def _documents() -> Iterator[tuple[int, slice]]:
    """The row and the place in it of each document."""
    for row, sizes in enumerate(_DOCUMENTS):
        start = 0
        for size in sizes:
            yield row, slice(start, start + size)
            start += size


def _change(rows: Tensor, row: int, part: slice) -> tuple[Tensor, Tensor]:
    """`rows` with other tokens in a part of a row, all but the ends of documents; and which are not in it: (B, T)."""
    changed, is_other = rows.clone(), torch.ones_like(rows, dtype=torch.bool)
    tokens = rows[row, part]
    changed[row, part] = torch.where(tokens == _END, tokens, tokens % (VOCAB_SIZE - 2) + 1)
    is_other[row, part] = False
    return changed, is_other


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _gradient(model: PreTrainedModel) -> Tensor:
    params = model.parameters()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).float().flatten() for p in params])
