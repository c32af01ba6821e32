"""Which linear modules of a model can have an adapter: tried on a small copy of it, as attention is.

An adapter of a module acts in its forward pass alone. Where a model multiplies with the weight of a module itself, as
Mamba does with that of `dt_proj`, an adapter does nothing while it is trained. Where no gradient passes, as through the
choice of an indexer, it never moves.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from stages.base.errors import one_line
from stages.forward.small_copy import VOCAB_SIZE, random_model, small_config
from stages.model import meta
from stages.model.adapters import LinearKind, kind

_WITH_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 0),
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""What says which layers have experts, with the values at which all have. A small copy may have one layer."""
_BYPASSED = "the model computes with its weight directly, so an adapter would have no effect"
_RANK = 2
_STD = 0.3
_TOLERANCE = 1e-3
"""Of the largest logit. Merged weights differ by rounding, about 1e-6; a lost adapter by about 1."""


def describe_linears(model: nn.Module, layer_classes: list[str], directory: Path) -> dict[str, LinearKind]:
    """All kinds of linear modules in the layers of a model, with what an adapter of them would be worth.

    Seeds the random number generator of torch.

    Args:
        model: On the meta device.
        layer_classes: Of the model's layers.
        directory: Of the model's config.
    """
    found = _by_kind(model, layer_classes)
    uses: Counter[Tensor] = Counter(param for module in model.modules() for param in module.parameters(recurse=False))
    problems = _find_problems(directory, layer_classes) if found else {}
    untested = "it is not in a small copy of the model, so adapters cannot be tried"
    described: dict[str, LinearKind] = {}
    for name, named in found.items():
        modules = named.values()
        is_bypassed = _hands_on_weight(model, next(iter(named)))
        problem = _BYPASSED if is_bypassed else problems.get("", problems.get(name, untested))
        if any(uses[module.weight] > 1 for module in modules):
            problem = "its weight belongs to several modules"
        described[name] = LinearKind(
            modules=len(modules),
            weights=sum(module.weight.numel() for module in modules),
            features=sum(module.in_features + module.out_features for module in modules),
            problem=problem,
        )
    return described


def _by_kind(model: nn.Module, layer_classes: list[str]) -> dict[str, dict[str, nn.Linear]]:
    """The linear modules in the layers of each kind, by name."""
    found: dict[str, dict[str, nn.Linear]] = {}
    for name, module in meta.find_linears(model, layer_classes).items():
        found.setdefault(kind(name), {})[name] = module
    return found


def _hands_on_weight(model: nn.Module, name: str) -> bool:
    """Whether the code of the module around a linear one uses its weight itself, if only for a kernel on GPUs."""
    outer, _, leaf = name.rpartition(".")
    source = inspect.getsource(type(model.get_submodule(outer)))
    return re.search(rf"\.{re.escape(leaf)}\.weight\b(?!\.(?:dtype|device|shape))", source) is not None


def _find_problems(directory: Path, layer_classes: list[str]) -> dict[str, str | None]:
    """The problem of each kind in a small copy, or of "": of all."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        configs = [small_config(config)]
        text = config.get_text_config()
        if changed := {
            name: value for name, value in _WITH_EXPERTS.items() if getattr(text, name, None) not in (None, value)
        }:
            for name, value in changed.items():
                setattr(text, name, value)
            configs.append(small_config(config))
        found: dict[str, str | None] = {}
        for small in configs:
            if small is None:
                return {"": "no small copy of the model computes, so adapters cannot be tried"}
            found |= _try(random_model(small, None, torch.float32, "cpu"), layer_classes)
        return found
    except Exception as error:  # of any architecture; who trains all weights has no use for an answer
        return {"": f"adapters cannot be tried on a small copy ({type(error).__name__}: {one_line(error)})"}


def _try(model: nn.Module, layer_classes: list[str]) -> dict[str, str | None]:
    """The problem of each kind of linear module in a small copy."""
    tokens = torch.randint(1, VOCAB_SIZE - 1, (2, 12))
    for param in model.parameters():
        param.requires_grad_(False)

    def logits() -> Tensor:
        result: Tensor = model(tokens, use_cache=False).logits
        return result.float()

    return {name: _problem([*named.values()], logits) for name, named in _by_kind(model, layer_classes).items()}


def _problem(modules: list[nn.Linear], logits: Callable[[], Tensor]) -> str | None:
    """What is wrong with adapters of these modules alone."""
    matrices = [
        (torch.randn(_RANK, module.in_features) * _STD, torch.randn(module.out_features, _RANK) * _STD)
        for module in modules
    ]
    hooks = [
        module.register_forward_hook(lambda _, inputs, output, pair=pair: output + inputs[0] @ pair[0].T @ pair[1].T)
        for module, pair in zip(modules, matrices, strict=True)
    ]
    for low, _ in matrices:
        low.requires_grad_()
    try:
        adapted = logits()
        if adapted.requires_grad:
            adapted.log_softmax(-1)[..., 0].sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        for module, (low, high) in zip(modules, matrices, strict=True):
            module.weight += high @ low
        merged = logits()
        for module, (low, high) in zip(modules, matrices, strict=True):
            module.weight -= high @ low
        largest = merged.abs().max()
        if not (adapted - merged).abs().max() <= _TOLERANCE * largest:  # NaN, too
            return _BYPASSED
    if not any(low.grad is not None and low.grad.any() for low, _ in matrices):
        return "no gradient reaches it, so an adapter would not be trained"
    return None
