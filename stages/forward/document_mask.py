"""Which attention function a model is trained with, tested before it is trained.

Attention functions differ in what they ignore without a word: positions that restart with each document (so tokens
attend to other documents), a window, a soft cap, dropout. It depends on the function, the architecture, the device and
the precision. So a tiny random model of the architecture is tested with the very function:

- with other tokens in one document, the logits of all others must not change at all;
- logits and gradients must be those of each document computed alone by the model's own code, up to rounding.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stages.base.errors import StageError, one_line
from stages.forward.attention import activate_kernels, deactivate_kernels
from stages.forward.attention_names import IMPLEMENTATIONS, NEED_LENGTHS, Attention
from stages.forward.batch import make_batch
from stages.forward.loss import logits

_SHORT = 512
"""Rows up to this length have small masks: on CPUs a step of the default model takes as long with `sdpa` as with
`varlen`, or 6 % less where a row is one document. At 1024 tokens it takes 33 % more, with documents of 300 tokens."""

_END = 0
_LENGTH = 32
_DOCUMENTS = ((13, 9, 10), (3, 29))
"""Lengths of the documents in each row, most of them longer than a window."""
_WINDOW = 5
_SOFT_CAP = 1.0
"""The scores of the tiny model are about as large, so that they are seen to be capped."""
_VOCAB_SIZE = 64
_WINDOWS = ("sliding_window", "attention_chunk_size")
_WIDTHS = (
    *("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "intermediate_size_mlp",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k")


def choose_attention(
    attention: Attention, directory: Path, document_mask: bool, seq_length: int, dtype: torch.dtype, device: str
) -> Attention:
    """The attention function that `attention` stands for. Seeds the random number generator of torch.

    Args:
        attention: As in params.yaml.
        directory: Of the model.
        document_mask: Whether tokens attend to their own document only.
        seq_length: Tokens per row.
        dtype: Of the computation.
        device: `cuda` or `cpu`.

    Raises:
        StageError: the one that is named does not work with the model, or none does with `document_mask`.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    architecture = (config.architectures or [config.model_type])[0]
    reasons: dict[str, str] = {}
    order = _order(seq_length if document_mask else 0, device)
    for name in order if attention == "auto" else (attention,):
        reason = refusal(config, name, document_mask, dtype, device)
        if reason is None:
            return name
        reasons[name] = reason
    if attention == "auto" and not document_mask:
        return "eager"  # a model that cannot be tested: nothing is asked of its own code that it might ignore
    remedy = "set document_mask to false, and let tokens attend across documents; or use another model"
    if attention == "auto":
        found = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        raise StageError(f"document_mask: no attention keeps the documents of {architecture} apart: {found}: {remedy}")
    others = [name for name in order if name != attention]
    works = [name for name in others if refusal(config, name, document_mask, dtype, device) is None]
    precision = str(dtype).removeprefix("torch.")
    remedy = f"use auto, or {' or '.join(works)}" if works else remedy
    raise StageError(
        f"attention {attention} does not work with {architecture} in {precision} on this {device}: it "
        f"{reasons[attention]}: {remedy}"
    )


def _order(mask_length: int, device: str) -> tuple[Attention, ...]:
    """What `auto` tries, the fastest first, where `sdpa` has a mask of `mask_length` tokens, or none of documents."""
    if device == "cuda":
        return "varlen", "flex", "sdpa", "eager"
    # Without flex, of which torch has no backward pass for CPUs.
    return ("sdpa", "varlen", "eager") if mask_length <= _SHORT else ("varlen", "sdpa", "eager")


def refusal(
    config: PreTrainedConfig, attention: Attention, document_mask: bool, dtype: torch.dtype, device: str
) -> str | None:
    """Why a model cannot be trained with an attention function, as the end of a sentence; None: it can.

    Args:
        config: Of a model of any size.
        attention: Not `auto`.
        document_mask: As for `choose_attention`.
        dtype: As for `choose_attention`.
        device: As for `choose_attention`.
    """
    if attention == "flex" and device == "cpu":
        return "has no backward pass on CPUs"  # which torch reports after a minute of compiling
    if attention == "varlen":
        activate_kernels()
    try:
        reason = _find_fault(config, attention, document_mask, dtype, device)
    except Exception as error:  # of any architecture, of a compiler, or of a package that is not installed
        reason = f"fails ({type(error).__name__}: {one_line(error)})"
    if reason and attention == "varlen":
        deactivate_kernels()  # sdpa would call them too
    return reason


def sees_what_follows(directory: Path) -> bool:
    """Whether the tokens of a model depend on those after them, as in an encoder, so that it learns to copy.

    False also where a small copy of it cannot be tested. Seeds the random number generator of torch.
    """
    with suppress(Exception):  # of any architecture
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        model = _tiny_model(config, "eager", torch.float32, "cpu")
        rows = torch.randint(1, _VOCAB_SIZE, (1, _LENGTH))  # (B, T)
        changed, is_other = _change(rows, 0, slice(_LENGTH - 1, _LENGTH))
        with torch.no_grad():
            found, other = (logits(model, {"input_ids": tokens})[is_other] for tokens in (rows, changed))
        # Other kernels may round differently; what a token sees changes its logits by more than a hundredth.
        return not torch.allclose(found, other, rtol=0, atol=1e-3, equal_nan=True)
    return False


def _find_fault(
    config: PreTrainedConfig, attention: Attention, document_mask: bool, dtype: torch.dtype, device: str
) -> str | None:
    model, reference = (_tiny_model(config, name, dtype, device) for name in (IMPLEMENTATIONS[attention], "eager"))

    def batch(rows: Tensor, document_mask: bool = document_mask) -> dict[str, Tensor]:
        made = make_batch(rows, _END, document_mask, lengths=attention in NEED_LENGTHS)
        return {name: tensor.to(device) for name, tensor in made.items()}

    rows = torch.randint(1, _VOCAB_SIZE, (len(_DOCUMENTS), _LENGTH))  # (B, T), without _END, which is 0
    for row, document in _documents():
        rows[row, document.stop - 1] = _END
    parts = list(_documents() if document_mask else ((row, slice(0, _LENGTH)) for row in range(len(rows))))
    with torch.no_grad():
        found = logits(model, batch(rows))  # (B, T, V)
        for row, part in parts:
            changed, is_other = _change(rows, row, part)
            if not torch.equal(logits(model, batch(changed))[is_other], found[is_other]):
                return f"lets tokens attend to other {'documents' if document_mask else 'rows'}"
        # The control: without the mask the logits must change, or the test could not detect a leak.
        changed, is_other = _change(rows, 0, slice(0, _DOCUMENTS[0][0]))
        without_mask = [logits(model, batch(tokens, document_mask=False))[is_other] for tokens in (rows, changed)]
        if torch.equal(*without_mask):
            return "computes logits that do not depend on what stands before"

    # eval(): dropout would differ. Gradients of the logits' sum with random factors.
    factors = torch.randn(*rows.shape, _VOCAB_SIZE).to(device)
    found = logits(model, batch(rows))
    (found.float() * factors).sum().backward()
    expected = torch.zeros_like(found)
    for row, part in parts:
        alone = logits(reference, {"input_ids": rows[row, part][None].to(device)})  # (1, tokens of the part, V)
        (alone.float() * factors[row, part]).sum().backward()
        expected[row, part] = alone.detach()[0]
    compared = {"logits": (found.detach(), expected), "gradients": (_gradient(model), _gradient(reference))}
    for name, (value, expected_value) in compared.items():
        error = ((value.float() - expected_value.float()).norm() / expected_value.float().norm()).item()
        # Between rounding, a few times eps, and what a wrong mask makes, which is more than a tenth.
        if not error <= torch.finfo(dtype).eps ** 0.5:
            return f"computes {name} that differ by {error:.2g} from those of each document alone"
    with torch.no_grad():
        logits(model.train(), batch(rows))  # raises where the function has no dropout, and the model asks for it
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
    changed[row, part] = torch.where(tokens == _END, tokens, tokens % (_VOCAB_SIZE - 1) + 1)
    is_other[row, part] = False
    return changed, is_other


def _gradient(model: PreTrainedModel) -> Tensor:
    params = model.parameters()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).float().flatten() for p in params])


def _tiny_model(config: PreTrainedConfig, implementation: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A random model in evaluation mode, the same for all implementations."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(config), dtype=torch.float32, attn_implementation=implementation, trust_remote_code=False
    )
    torch.manual_seed(0)  # the initialization may draw numbers, or not
    with torch.no_grad():
        for param in model.parameters():  # nothing is zero, as some gates are at initialization
            param.uniform_(0.5, 1.5) if param.dim() < 2 else param.normal_(std=param.shape[-1] ** -0.5)
    return model.to(device, dtype).eval()  # type: ignore[no-any-return, arg-type]


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a tiny model of the same architecture: a layer of each kind, few heads, few tokens, small windows.

    The size of a head stays, as tables of rotary embeddings depend on it.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(text).items()
        # Not the numbers of layers, as LFM2 and Llama 4 list them: each would be a kind of its own.
        if isinstance(value, list) and len(value) == num_layers and value != [*range(num_layers)]
    }
    kinds = {tuple(map(repr, kind)): index for index, kind in reversed([*enumerate(zip(*lists.values(), strict=True))])}
    layers = sorted(kinds.values()) or [0]  # the first layer of each kind, such as sliding and full attention
    heads = getattr(text, "num_attention_heads", None)
    sizes = {"num_hidden_layers": len(layers), "vocab_size": _VOCAB_SIZE, **dict.fromkeys(_WIDTHS, 64)}
    # All tokens go to all experts: with fewer, the number that an expert gets would change how its results are rounded.
    sizes |= {**dict.fromkeys(_EXPERTS, 2), "n_group": 1, "topk_group": 1, **dict.fromkeys(_WINDOWS, _WINDOW)}
    if isinstance(heads, int):
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        shared = getattr(text, "num_key_value_heads", None) or heads
        # Twice as many heads as key-value heads, where there are more.
        heads = 2 if shared == heads else 4
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": 2, "num_kv_heads": 2,
                  "hidden_size": heads * size, "word_embed_proj_dim": heads * size}  # fmt: skip
    for name, value in sizes.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, value)
    for name, values in lists.items():
        setattr(text, name, [values[index] for index in layers])
    if getattr(text, "attn_logit_softcapping", None):
        text.attn_logit_softcapping = _SOFT_CAP
    text.pad_token_id = None  # it may be beyond the vocabulary
    return config
