"""Frozen weights in four bits (NF4), under LoRA: QLoRA, as in Dettmers et al. (2023, arXiv:2305.14314).

64 values of a row share a scale in fp32, the largest of their magnitudes. Each value becomes the nearest of sixteen
numbers times the scale: quantiles of the normal distribution, those of bitsandbytes, whose codes and scales are the
same bit for bit. With the scale a weight takes 4.5 bits. Each rank quantizes its own rows.

Codes and scales of a row are one row of bytes, seen as numbers of the dtype of the computation: FSDP2 would cast
others. They are made of the files at each launch, and no checkpoint holds them.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64
"""Values that share a scale."""
_SCALE = 4
"""Bytes of a scale."""
_ELEMENTS = 1 << 24
"""Of a weight that are dequantized at a time, with 6 bytes of memory each beside the result."""
_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What the codes from 0 to 15 stand for."""


def num_bytes(in_features: int) -> int:
    """Bytes of a row of a quantized weight."""
    return in_features // 2 + in_features // BLOCK * _SCALE


def quantize(weight: Tensor) -> Tensor:
    """(rows, in_features) of any dtype -> (rows, num_bytes) uint8: two codes in a byte, then the scales."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    values = torch.tensor(_VALUES, device=weight.device)
    # A block of zeros stays one: 0 / tiny is 0.
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(relative, (values[1:] + values[:-1]) / 2).to(torch.uint8).flatten(-2)
    return torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)], dim=-1)


def dequantize(packed: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """What `quantize` returns, in any dtype of the same bytes -> (rows, in_features) of `dtype`."""
    codes, scales = packed.view(torch.uint8).split([in_features // 2, in_features // BLOCK * _SCALE], dim=-1)
    weight = torch.empty(len(packed), in_features, dtype=dtype, device=packed.device)
    num_rows = max(1, _ELEMENTS // in_features)
    for rows, own, factors in zip(*(tensor.split(num_rows) for tensor in (weight, codes, scales)), strict=True):
        blocks = nn.functional.embedding(own.int(), _pairs(packed.device)).view(len(rows), -1, BLOCK)
        torch.mul(blocks, factors.contiguous().view(torch.float32)[..., None], out=rows.unflatten(-1, (-1, BLOCK)))
    return weight


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte: (256, 2) fp32. Kept: a GPU would wait for its copy in each product."""
    values = torch.tensor(_VALUES)
    return torch.cartesian_prod(values, values).to(device)


class Nf4Linear(nn.Linear):
    """A linear module whose weight is quantized. An `nn.Linear` becomes one by its class."""

    def pack(self, dtype: torch.dtype) -> None:
        """Replace the weight, on the meta device, by one without values, of bytes seen as `dtype`."""
        size = num_bytes(self.in_features) // dtype.itemsize
        self.weight = nn.Parameter(torch.empty(self.out_features, size, dtype=dtype, device="meta"), False)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        output: Tensor = product(input, self.weight, self.bias, self.in_features)
        return output


# Operators of their own: torch.compile finds the values of a weight computed twice, and would keep them for the
# backward pass. That needs nothing of `input`, as W has no gradient.
@torch.library.custom_op("stages::nf4_product", mutates_args=())
def product(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    """`x W^T + b`: (..., in_features) -> (..., rows)."""
    return nn.functional.linear(input, dequantize(packed, in_features, input.dtype), bias)


@product.register_fake
def _(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], len(packed))


@torch.library.custom_op("stages::nf4_product_backward", mutates_args=())
def _product_backward(grad: Tensor, packed: Tensor, in_features: int) -> Tensor:
    """The gradient of x, for which W is dequantized again."""
    return grad @ dequantize(packed, in_features, grad.dtype)


@_product_backward.register_fake
def _(grad: Tensor, packed: Tensor, in_features: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], in_features)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, _, ctx.in_features = inputs
    ctx.save_for_backward(packed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _product_backward(grad, *ctx.saved_tensors, ctx.in_features), None, None, None


product.register_autograd(_backward, setup_context=_save)
