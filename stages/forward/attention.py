"""`varlen`: attention within documents, without a mask, as an attention function of transformers.

All rows of a batch are one row of B*T tokens here, and each document in it is a sequence of its own. transformers makes
no mask for an implementation that it has no mask function for, and hands the lengths of the documents through from the
call of the model: so this works with any architecture that looks its attention function up. On GPUs it is
`torch.nn.attention.varlen`, which shares key-value heads without copies and has windows. On CPUs it is the kernel of
`scaled_dot_product_attention`, called for each document, and for blocks of a document that is longer than a window.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from stages.base.errors import StageError
from stages.forward.context import Context

_BLOCK = 512
"""Queries at a time, where a document is longer than the window of a layer."""

# Since torch 2.12, which otherwise refuses fewer key-value heads; before, the kernel just accepted them.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    context: Context | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each token to its own document.

    Args:
        module: The attention module; not used.
        query: (1, H, T, D), the documents one after another.
        key: (1, Hkv, T, D), where Hkv divides H.
        value: (1, Hkv, T, D'), where D' is at most D.
        attention_mask: None, or the model makes masks of its own.
        dropout: 0: the kernels have none.
        scaling: Factor of the scores; None: 1/sqrt(D).
        sliding_window: Tokens that each one attends to, itself included; None: all of its document.
        cu_seq_lens_q: (N + 1,) int32: where each document starts, and T; as `make_batch` returns it.
        max_length_q: An upper bound of their lengths.
        context: The ranks that share the T tokens: states and output are those of a slice of them; None: there is one.
        kwargs: What else the model gives to its attention functions.

    Returns:
        (1, T, H, D'), and None for the weights.

    Raises:
        ValueError: the model needs what this cannot compute.
    """
    unsupported = {
        "a mask of its own": attention_mask,
        "soft caps": kwargs.get("softcap"),
        "attention sinks": kwargs.get("s_aux"),
        "a bias for each position": kwargs.get("position_bias"),
        "dropout (set that of the attention to 0 in its config.json)": dropout or None,
    }
    for feature, given in unsupported.items():
        if given is not None:
            raise ValueError(f"the model's attention has {feature}")
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("the lengths of the documents do not reach the model's attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if context:
        query, key, value = map(context.gather, (query, key, value))
    size = value.shape[-1]
    if size < query.shape[-1]:  # as in DeepSeek's: the kernels want one size of head
        value = nn.functional.pad(value, (0, query.shape[-1] - size))
    if query.is_cuda:
        query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # (T, H, D)
        # The kernels count the tokens before the query, without itself.
        window = (sliding_window - 1 if sliding_window else -1, 0)
        output = varlen_attn(
            query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scale,
            window_size=window, **_GQA,
        )  # fmt: skip
        assert isinstance(output, Tensor)
    else:
        # Query heads that share a key-value head are the heads of one item of a batch.
        query = query[0].unflatten(0, (key.shape[1], -1))  # (Hkv, H / Hkv, T, D)
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        output, _ = _documents(query, key, value, cu_seq_lens_q, sliding_window or 0, scale)
        output = output.flatten(0, 1).transpose(0, 1)  # (T, H, D)
    output = output[None, ..., :size]
    return context.scatter(output) if context else output, None


AttentionInterface.register("varlen", varlen_attention)


def activate_kernels(names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Have `varlen` call Flash Attention 3 or 4, where one is installed and made for this GPU; else torch's own.

    Torch's own too, where algorithms are to be deterministic: Flash Attention 3 before its version 3.0.0 adds up
    gradients in any order nevertheless. Never cuDNN, which torch prefers to all of them since 2.15: it adds up in any
    order, and prepares itself anew for each number of documents.

    Args:
        names: The one to call, or none: torch's own; None: the first that can be activated.

    Returns:
        What is active now, as `names`.

    Raises:
        StageError: the one to call, which another rank has chosen, cannot be activated here.
    """
    deactivate_kernels()
    torch.backends.cuda.enable_cudnn_sdp(False)
    tried = names or ()
    if names is None and torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled():
        tried = {9: ("FA3", "FA4"), 10: ("FA4",)}.get(torch.cuda.get_device_capability()[0], ())
    for name in tried:
        with suppress(ImportError, RuntimeError, ValueError):  # not installed, or built for another torch
            torch.nn.attention.activate_flash_attention_impl(name)
            return (name,)
    if names:
        raise StageError(
            f"rank 0 computes attention with {names[0]}, which this rank does not find: install it on all nodes, or on "
            "none"
        )
    return ()


def deactivate_kernels() -> None:
    """Undo `activate_kernels`."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    if torch.nn.attention.current_flash_attention_impl():
        torch.nn.attention.restore_flash_attention_impl()


# An operator of its own, so that torch.compile and fake tensors need not look into lengths that they do not know.
# `selective_op` finds it by "attention" in its name.
@torch.library.custom_op("stages::document_attention", mutates_args=(), device_types="cpu")
def _documents(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents.

    Args:
        query: (B, H, T, D).
        key: (B, 1, T, D).
        value: (B, 1, T, D).
        cu_seq_lens: (N + 1,): where each document starts, and T.
        window: Tokens that each one attends to, itself included; 0: all.
        scale: Factor of the scores.

    Returns:
        (B, H, T, D), and the logarithm of the sums of the softmax: (B, H, T).
    """
    output, sums = _empty(query), _empty_sums(query)
    for queries, keys, mask in _blocks(cu_seq_lens, window, query.dtype):
        parts = query[:, :, queries], *(_repeated(states[:, :, keys], query) for states in (key, value))
        output[:, :, queries], sums[:, :, queries] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *parts, 0.0, mask is None, attn_mask=mask, scale=scale
        )
    return output, sums


@_documents.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    return _empty(query), _empty_sums(query)


@torch.library.custom_op("stages::document_attention_backward", mutates_args=(), device_types="cpu")
def _documents_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, cu_seq_lens: Tensor,
    window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, from that of the output."""
    grads = _empty(query), _empty(key).zero_(), _empty(value).zero_()
    for queries, keys, mask in _blocks(cu_seq_lens, window, query.dtype):
        parts = query[:, :, queries], *(_repeated(states[:, :, keys], query) for states in (key, value))
        of_query, *of_others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, :, queries], *parts, output[:, :, queries], sums[:, :, queries], 0.0, mask is None,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        grads[0][:, :, queries] = of_query
        for total, part in zip(grads[1:], of_others, strict=True):
            total[:, :, keys] += part.sum(dim=1, keepdim=True)  # added up: two blocks may have keys in common
    return grads


@_documents_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, cu_seq_lens: Tensor,
    window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty(query), _empty(key), _empty(value)


def _empty(states: Tensor) -> Tensor:
    """Like `states`, but in memory as (T, B, H, D): so the model's linear layers have them, before and after."""
    batch, heads, length, size = states.shape
    return states.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)


def _empty_sums(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))


def _repeated(states: Tensor, query: Tensor) -> Tensor:
    """The one head as many times as `query` has heads, without copies."""
    return states.expand(-1, query.shape[1], -1, -1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seq_lens, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seq_lens)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_documents_backward(grad, *ctx.saved_tensors, ctx.window, ctx.scale), None, None, None


_documents.register_autograd(_backward, setup_context=_save)


def _blocks(cu_seq_lens: Tensor, window: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the keys that they attend to, and what to add to their scores; None: the keys are causal."""
    for start, end in pairwise(cu_seq_lens.tolist()):  # on the CPU: nothing is waited for
        if not 0 < window < end - start:
            if start < end:  # the padding at the end has empty documents
                yield slice(start, end), slice(start, end), None
            continue
        for first in range(start, end, _BLOCK):
            last, oldest = min(first + _BLOCK, end), max(start, first - window + 1)
            distance = torch.arange(first, last)[:, None] - torch.arange(oldest, last)
            outside = (distance < 0) | (distance >= window)
            mask = torch.zeros(distance.shape, dtype=dtype).masked_fill_(outside, -torch.inf)
            yield slice(first, last), slice(oldest, last), mask
