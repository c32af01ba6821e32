"""The loss of a causal language model on packed rows, a part of the tokens at a time.

Logits are the largest tensors of a training: those of 8 rows of 4096 tokens and a vocabulary of 128 256 have 17 GB in
fp32, and the steps of a cross-entropy and its gradient are as large again. So the loss and its gradient are computed
for some tokens, and then for the next ones (`summed_loss`). With `fuse` the LM head itself does that, inside
the forward pass of the model, where FSDP2 has gathered its weight; then not even the logits exist as a whole.

torch 2.13 has `torch.nn.functional.linear_cross_entropy` for this. It is not used: it adds up the loss and the gradient
of the weight in the dtype of the hidden states, so the sum over 4096 tokens is rounded to a multiple of 128 in bf16 and
may be infinite in fp16.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.function import once_differentiable

from stages.base.errors import StageError, one_line
from stages.forward.transfer import Readback, read_late
from stages.model import meta

_CPU_LOGITS, _GPU_LOGITS, _LARGE_GPU_LOGITS = 2**23, 2**27, 2**29
"""How many there are at a time: 32 MiB in fp32 on CPUs, 512 on GPUs, whose products should be large, and 2 GiB on large
ones: the gradient of the weight is read and written once for each part."""
_LARGE_GPU = 80e9
"""Bytes of memory."""
_assumed: tuple[str, float] | None = None
_FP16_FACTOR = 2.0**8
"""Of gradients while they are in fp16, in which those of most logits would vanish: they are small probabilities."""

_CHANGES = "the model changes what its LM head returns, as by a soft cap or a factor"


class LossHead(nn.Linear):
    """An LM head that, while it is given labels, returns their summed loss instead of logits."""

    _labels: Tensor | None = None
    loss: Tensor | None = None
    """What it has returned last."""
    compiles = False
    """Whether loss and gradient of the logits are one compiled kernel, of the logits' dtype: not a dozen passes."""

    @contextmanager
    def given(self, labels: Tensor) -> Iterator[None]:
        """Have forward passes return the loss of `labels`: as many int64 as there will be hidden states."""
        # An attribute, because models pass nothing but hidden states to their LM head.
        self._labels = labels
        try:
            yield
        finally:
            self._labels = self.loss = None

    def forward(self, input: Tensor) -> Tensor:
        """(..., H) -> (..., V), or a scalar in float32."""
        if self._labels is None:
            return super().forward(input)
        hidden, labels = input.flatten(0, -2), self._labels.flatten()
        self.loss = summed_loss(hidden, labels, self.weight, self.bias, compiles=self.compiles)
        return self.loss


@contextmanager
def assumed_device(device_type: str, memory: float | None) -> Iterator[None]:
    """In the block, compute as many logits at a time as on a device of this type, to measure what it needs.

    Args:
        device_type: `cuda` or `cpu`.
        memory: Bytes of a GPU; None: it is not known, and taken for a large one.
    """
    global _assumed
    before, _assumed = _assumed, (device_type, _LARGE_GPU if memory is None else memory)
    try:
        yield
    finally:
        _assumed = before


def _logits_at_a_time(device: torch.device) -> int:
    kind, memory = _assumed or (device.type, None)
    if kind == "cpu":
        return _CPU_LOGITS
    if memory is None:
        memory = torch.cuda.get_device_properties(device).total_memory
    return _LARGE_GPU_LOGITS if memory >= _LARGE_GPU else _GPU_LOGITS


def fuse(model: nn.Module, compiles: bool = False) -> None:
    """Let the LM head compute the loss. Its weight, its name and what is tied to it stay the same.

    Args:
        model: Any causal language model of transformers whose LM head is an `nn.Linear`.
        compiles: Whether torch.compile makes one kernel of the loss of logits and its gradient.
    """
    head = _head(model)
    head.__class__ = LossHead
    head.compiles = compiles


class LossChoice(NamedTuple):
    """How the loss is computed."""

    name: Literal["fused", "plain"]
    reason: str | None
    """Why not fused, where `auto` would have preferred that."""


def choose_loss(loss: Literal["auto", "fused", "plain"], directory: Path) -> LossChoice:
    """Decide how the loss is computed.

    Args:
        loss: As in params.yaml.
        directory: Of the model.

    Raises:
        StageError: `loss` is fused, which the model does not allow.
    """
    if loss == "plain":
        return LossChoice("plain", None)
    model = meta.build(directory, dtype=torch.bfloat16)  # torch knows the shapes of grouped products in bf16 alone
    reason = obstacle_to_fuse(model)
    if loss == "fused" and reason:
        raise StageError(f"loss fused is not possible with {type(model).__name__}: {reason}; use loss auto or plain")
    return LossChoice("plain" if reason else "fused", reason)


def obstacle_to_fuse(model: nn.Module) -> str | None:
    """Why `fuse` would change the loss of a model, in words; None: it would not, or its own values decide.

    It may, if the model returns the very tensor that its LM head has made. Some change it after the head, by a soft cap
    (Gemma 2) or a factor (Granite, Cohere). Nothing is computed; `training_losses` sees it in each forward pass, too.

    Args:
        model: On the meta device; it is of no use afterwards.
    """
    head = _head(model)
    if type(head) is not nn.Linear:
        return f"its LM head is not torch's nn.Linear, but {type(head).__name__}"
    fuse(model)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            tokens = torch.ones((2, 8), dtype=torch.long)
            loss_sum(model.to_empty(device="cpu"), {"input_ids": tokens, "labels": tokens})
    except StageError:
        return _CHANGES
    except (DataDependentOutputException, DynamicOutputShapeException):  # of some mixtures of experts
        return None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"it cannot continue with a loss in place of logits ({type(error).__name__}: {one_line(error)})"
    return None


def _head(model: nn.Module) -> Any:
    model_of_transformers: Any = model
    return model_of_transformers.get_output_embeddings()


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The logits of a batch: (B, T, vocab_size), in the dtype that the model computes in. Of small batches only."""
    output: Tensor = _forward(model, batch).logits
    return output.view(*batch["input_ids"].shape, -1)  # with `lengths`, the model sees a single row


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The negative log-likelihood, in nats, summed over all labels of a batch: a scalar, float32.

    A sum, not a mean: batches differ in their number of labels, so a mean of their means would give some tokens more
    weight than others.
    """
    return training_losses(model, batch)[0]


def training_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """`loss_sum`, and the router loss of a mixture of experts that computes one: a scalar, float32, else None.

    The router loss is low where all experts get equally many tokens of the batch. It is not a sum over tokens.
    """
    head = _head(model)
    if isinstance(head, LossHead):
        with head.given(batch["labels"]):
            output = _forward(model, batch)
            loss: Tensor = output.logits
            if loss is not head.loss:
                raise StageError(f"loss fused is not possible with this model: {_CHANGES}; set loss to plain")
    else:
        output = _forward(model, batch)
        loss = summed_loss(output.logits.flatten(0, 1), batch["labels"].flatten())
    return loss, getattr(output, "aux_loss", None)


def _forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    inputs: dict[str, Any] = {
        name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch
    }
    if "cu_seq_lens" in batch:
        # As transformers names them for its flash attention.
        length, starts = batch["max_length"], batch["cu_seq_lens"]
        if "context" in batch:
            inputs["context"] = batch["context"]  # with rows that are slices of one
        else:
            inputs = {name: rows.view(1, -1) for name, rows in inputs.items()}
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": length, "max_length_k": length}
    # Nothing of every layer, which a config may ask for: no keys and values, as nothing is generated, and no states.
    return model(**inputs, use_cache=False, output_hidden_states=False, output_attentions=False)


def summed_loss(
    inputs: Tensor, labels: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    num_logits: int | None = None, compiles: bool = False,
) -> Tensor:  # fmt: skip
    """The negative log-likelihood, in nats, summed over all labels: a scalar, float32.

    Args:
        inputs: (N, H) hidden states, or (N, V) logits where there is no weight.
        labels: (N,) int64; -100 where nothing is to be predicted.
        weight: (V, H), of the LM head.
        bias: (V,), of the LM head.
        num_logits: How many there are at a time, at most; None: a number that fits the device.
        compiles: As for `fuse`; where there is a weight, and a gradient.
    """
    num_logits = num_logits or _logits_at_a_time(inputs.device)
    vocab_size = inputs.shape[1] if weight is None else weight.shape[0]
    # A power of two: the number of tokens is often a multiple of it, and then all parts are equal.
    num_tokens = 1 << (max(1, num_logits // vocab_size).bit_length() - 1)
    parts = [slice(start, start + num_tokens) for start in range(0, len(labels), num_tokens)]
    loss: Tensor
    if not torch.is_grad_enabled():
        loss = _loss(inputs, labels, weight, bias, parts)
    elif weight is None:
        loss = _PlainLoss.apply(inputs, labels, parts)  # type: ignore[no-untyped-call]
    else:
        loss = _FusedLoss.apply(inputs, labels, weight, bias, parts, compiles)  # type: ignore[no-untyped-call]
    return loss


class _PlainLoss(torch.autograd.Function):
    """Keeps the logits for the backward pass, and nothing in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, parts: list[slice]) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.parts = parts
        return _loss(logits, labels, None, None, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for part in ctx.parts:
            grad = _grad_logits(_log_probs(logits[part]), labels[part])
            torch.mul(grad, grad_loss * _has_label(labels[part]), out=grad_logits[part])
        return grad_logits, None, None


class _FusedLoss(torch.autograd.Function):
    """Computes the gradients together with the loss: no logits are kept, or made again, for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, parts: list[slice],
        compiles: bool,
    ) -> Tensor:  # fmt: skip
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        # Added up in float32 over all parts, and rounded once, as the product of a plain loss is.
        # A head that is not trained has none: of a large vocabulary it would have gigabytes.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[3]:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        ctx.dtype, ctx.factor = hidden.dtype, _FP16_FACTOR if hidden.dtype == torch.float16 else 1.0
        for part in parts:
            tokens, has_label = hidden[part], _has_label(labels[part])
            logits = nn.functional.linear(tokens, weight, bias)
            if compiles:
                of_part, rounded = _compiled()(logits, labels[part], ctx.factor)
                grad = rounded
            else:
                log_probs = _log_probs(logits)
                of_part = _negative_log_likelihood(log_probs, labels[part])
                grad = _grad_logits(log_probs, labels[part])  # (n, V)
                if ctx.factor != 1:
                    grad *= ctx.factor
                rounded = grad.to(ctx.dtype)
                del log_probs
            loss += of_part
            torch.mm(rounded, weight, out=grad_hidden[part]).mul_(has_label)
            tokens = tokens * has_label
            if grad_weight is None:
                pass
            elif tokens.is_cuda and ctx.dtype != torch.float32:
                torch.addmm(grad_weight, rounded.T, tokens, out_dtype=torch.float32, out=grad_weight)
            else:
                grad_weight.addmm_(grad.T.float(), tokens.float())
            if grad_bias is not None:
                grad_bias += has_label.float().T.matmul(grad.float()).view(-1)
            del logits, grad, rounded  # or they would be in memory while the next ones are computed
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # With a dim: a scalar would first be rounded to the dtype of the gradient, and all gradients with it.
        factor = (grad_loss / ctx.factor).view(1)
        # In place, as they are large. A second backward pass through the same graph is an error of torch.
        hidden, weight, bias = (
            None if gradient is None else gradient.mul_(factor).to(ctx.dtype) for gradient in ctx.saved_tensors
        )
        return hidden, None, weight, bias, None, None


@cache
def _compiled() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    return torch.compile(_loss_and_grad_logits, fullgraph=True)


def _loss_and_grad_logits(logits: Tensor, labels: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """As `_negative_log_likelihood` and `_grad_logits` times `factor` in the dtype of the logits, for torch.compile.

    Compiled, it reads the logits (n, V) twice and writes the gradient, and float32 is in registers alone. The other
    functions write the float32 logits four times: by count, a tenth of a step of a Llama of 1.2 billion parameters.
    """
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    loss = -torch.where(is_label, log_probs, 0).sum(-1)  # of each token; 0 without a label
    return loss.sum(), ((log_probs.exp() - is_label.float()) * factor).to(logits.dtype)


def _loss(inputs: Tensor, labels: Tensor, weight: Tensor | None, bias: Tensor | None, parts: list[slice]) -> Tensor:
    loss = torch.zeros((), dtype=torch.float32, device=inputs.device)
    for part in parts:
        loss += _negative_log_likelihood(_log_probs(inputs[part], weight, bias), labels[part])
    return loss


def _log_probs(inputs: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """(n, H) hidden states, or (n, V) logits -> (n, V) in float32."""
    logits = inputs if weight is None else nn.functional.linear(inputs, weight, bias)
    # In float32: the softmax sums over the vocabulary, and bf16 has 8 significant bits.
    return logits.log_softmax(-1, dtype=torch.float32)


def _negative_log_likelihood(log_probs: Tensor, labels: Tensor) -> Tensor:
    # Not `nll_loss`, which torch lists as not deterministic on GPUs.
    of_labels = log_probs.gather(1, labels.clamp(min=0)[:, None])  # (n, 1)
    return -of_labels.masked_fill(~_has_label(labels), 0).sum()


def _grad_logits(log_probs: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the logits, in place: the probabilities, minus 1 at the label.

    Tokens without a label have some gradient, too: whoever multiplies it by something smaller leaves them out there.
    """
    minus_one = torch.full((len(labels), 1), -1.0, device=labels.device)
    return log_probs.exp_().scatter_add_(1, labels.clamp(min=0)[:, None], minus_one)


def _has_label(labels: Tensor) -> Tensor:
    return (labels != -100)[:, None]  # (n, 1) bool


def losses(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], before_forward: Callable[[], None] = lambda: None
) -> Iterator[tuple[float, int]]:
    """Measure the loss of each of several batches, as validation during training and the evaluate stage both do.

    The caller puts the model in evaluation mode and turns gradients off.

    Args:
        model: Any causal language model of transformers, sharded or not.
        batches: As `make_batch` returns them.
        before_forward: Called before each forward pass.

    Yields:
        The negative log-likelihood in nats, summed over all labels of the batch, and the number of labels. They are
        separate so that batches, and ranks, can be added up before the mean is taken.
    """

    def measure() -> Iterator[Readback]:
        for batch in batches:
            before_forward()
            num_labels = (batch["labels"] != -100).sum()
            yield Readback(torch.stack([loss_sum(model, batch).double(), num_labels.double()]))

    return ((nats, int(num_labels)) for nats, num_labels in read_late(measure()))
