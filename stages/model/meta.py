"""The model without its weights: built on the meta device, and compared with the headers of its files.

This finds in seconds what loading would find only after it has read all weights.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
    revert_weight_conversion,
)

from stages.base.errors import StageError, explained
from stages.model.dtypes import DTYPES
from stages.model.files import CONFIG
from stages.model.headers import StoredTensor

_TRAINABLE = {dtype.code: dtype for dtype in DTYPES if dtype.is_floating_point}
"""What weights may be stored in, by the code in safetensors headers."""
_COMPUTED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that older versions of transformers stored, and models compute today."""
_MASKS = (r"(attn|attention)\.(masked_)?bias$",)
"""The same, of a few classes."""


def build(
    directory: Path, attn_implementation: str | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build the model that `directory`'s config.json describes: on the meta device, without weights.

    Args:
        directory: Of the model.
        attn_implementation: `sdpa`, `eager` ...; None: sdpa where the model has it, else eager.
        dtype: Of the parameters. fp32, in which training keeps its weights; from_config's default is the dtype in the
            config, often bf16.

    Raises:
        StageError: it is not a causal language model of the installed transformers.
    """
    with understood(directory):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if config.is_encoder_decoder:  # which building it as a decoder would overwrite
            raise StageError(
                f"{directory / CONFIG}: {config.model_type} is an encoder-decoder: it continues what its encoder has "
                "read. Use a decoder, such as Llama or Qwen"
            )
        # Shapes and names without memory.
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=False
            )
            return model


def understood(directory: Path) -> AbstractContextManager[None]:
    """Have an error of any class, as transformers raises them for a config that is wrong, be a `StageError`."""
    return explained(
        lambda problem: StageError(
            f"{directory / CONFIG} does not describe a causal language model that transformers "
            f"{transformers.__version__} can build: {problem}"
        )
    )


def fields(model: PreTrainedModel) -> dict[str, Any]:
    """Those of the model manifest that follow from the config."""
    config = model.config.get_text_config()  # a multimodal config has the decoder's values one level below
    return {
        "architecture": type(model).__name__,
        "model_type": config.model_type,
        "num_parameters": num_parameters(model),
        "tied_weights": tied_weights(model),
        "layer_classes": layer_classes(model),
        "module_classes": module_classes(model),
        "router_loss_coef": router_loss_coef(model),
        "vocab_size": model.get_input_embeddings().get_parameter("weight").shape[0],
        "max_seq_length": getattr(config, "max_position_embeddings", None),
    }


def num_parameters(model: nn.Module) -> int:
    """Parameters of a model, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are the same object as an earlier one -> the name of that one."""
    names: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # by default tied names are left out
        canonical = names.setdefault(id(parameter), name)
        if canonical != name:
            tied[name] = canonical
    return tied


def layer_classes(model: nn.Module) -> list[str]:
    """The classes of the decoder's layers.

    They are the elements of module lists that `_no_split_modules` names. The names alone would not do: models also list
    embeddings there, or parts of layers. Where no list matches, the longest one is assumed to be that of the layers.
    Layers that share parameters (as the hybrid ones of Zamba 2) are not among them: they cannot be gathered separately.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise StageError(f"{type(model).__name__} has no list of layers, so there is nothing to shard it by")
    not_split: Iterable[str] = getattr(model, "_no_split_modules", None) or []
    elements = {type(layer).__name__ for layers in lists for layer in layers}
    found = elements.intersection(not_split) or {type(layer).__name__ for layer in max(lists, key=len)}
    return sorted({name for name in found if not _share_parameters(model, name)} or found)


def _share_parameters(model: nn.Module, class_name: str) -> bool:
    """Whether a parameter belongs to several of the modules of a class."""
    owners = Counter(
        param for module in model.modules() if type(module).__name__ == class_name for param in {*module.parameters()}
    )
    return max(owners.values(), default=1) > 1


def module_classes(model: nn.Module) -> list[str]:
    """The classes of all modules inside the model that have parameters, or contain modules that do."""
    inner = [module for module in model.modules() if module is not model]
    return sorted({type(module).__name__ for module in inner if any(True for _ in module.parameters())})


def find_linears(model: nn.Module, layer_classes: Iterable[str]) -> dict[str, nn.Linear]:
    """The linear modules in the layers of a model, by name."""
    layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    inside = {inner for layer in layers for inner in layer.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module in inside
    }


def has_joined_experts(model: PreTrainedModel) -> bool:
    """Whether a parameter of a meta model is stored in several parts, as those of all experts of a layer are."""
    return any(len(parts) > 1 for parts in stored_as(model).values())


def dtype_name(directory: Path, stored: dict[str, StoredTensor]) -> str:
    """PyTorch's name of the dtype that has most of the stored bytes; without weights, that of the config.

    Raises:
        StageError: weights cannot be trained in the one that the config names.
    """
    sizes: Counter[str] = Counter()
    for tensor in stored.values():
        if dtype := _TRAINABLE.get(tensor.dtype):
            # By bytes, not by number: many small fp32 norms beside bf16 matrices must not decide.
            sizes[dtype.name] += dtype.itemsize * math.prod(tensor.shape)
    if sizes:
        return sizes.most_common(1)[0][0]
    # Read again: `build` has changed it in the model's config.
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    name = str(config.get_text_config().dtype or torch.float32).removeprefix("torch.")
    known = [dtype.name for dtype in _TRAINABLE.values()]
    if name not in known:
        raise StageError(f"{CONFIG}: dtype is {name!r}, which cannot be trained: use {' or '.join(known)} in a copy")
    return name


def router_loss_coef(model: nn.Module) -> float | None:
    """The factor of the router loss in the training loss; None: the model has none, as it is no mixture of experts.

    As in transformers it is 0 unless `output_router_logits` is true in the config.
    """
    coef: float | None = getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", None)
    config: Any = model.config
    return coef if coef is None or config.get_text_config().output_router_logits else 0.0


class _KeepViews(TorchFunctionMode):
    """Within it `contiguous` copies nothing, so that a result still shows which elements it is made of."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def stored_as(model: PreTrainedModel) -> dict[str, dict[str, tuple[int, ...]]]:
    """How `save_pretrained` stores a meta model, which is what other programs read.

    Returns:
        For each name in `model.state_dict()`, tied names left out, the tensors in the files: their names and shapes, in
        the order of its elements. It is mostly one, of the same name. A mixture of experts has the weights of all its
        experts in one parameter, and those of each expert in tensors of their own on disk.
    """
    tied = tied_weights(model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    with _KeepViews():
        stored = revert_weight_conversion(model, tensors)
    parts = defaultdict(list)
    for key, tensor in stored.items():
        parts[tensor.untyped_storage()._cdata].append((tensor.storage_offset(), key, tensor))
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        found[name], end = {}, 0
        for offset, key, part in sorted(parts[tensor.untyped_storage()._cdata], key=lambda part: part[0]):
            if offset == end and part.is_contiguous():
                found[name][key] = tuple(part.shape)
                end += part.numel()
        if end != tensor.numel():
            # Transposed, or put together of several: then all keep the names of the class, as save_pretrained stores
            # them with save_original_format=False.
            return {name: {name: tuple(tensor.shape)} for name, tensor in tensors.items()}
    return found


def stored_dtypes(directory: Path, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each tensor of a model that is stored in `dtype`, by its name in the model's `state_dict()`.

    As in what `from_pretrained` loads in that dtype, and `save_pretrained` stores: some classes have tensors of another
    one, such as the biases that choose experts, in fp32.
    """
    model = build(directory, dtype=dtype)
    plan = model._get_dtype_plan(dtype)
    kept = build_glob_alternation([*plan])[0] if plan else None
    return {
        name: torch.float32 if kept and kept.search(name) else tensor.dtype
        for name, tensor in model.state_dict().items()
    }


def check_headers(model: PreTrainedModel, stored: dict[str, StoredTensor]) -> dict[str, list[StoredTensor]]:
    """Find each parameter and persistent buffer of a meta model among the stored tensors, without reading a weight.

    Returns:
        The tensors for each name in `model.state_dict()`, tied names left out, in the order of its elements: mostly
        one. A tensor's name in the file (its `key`) may differ from the model's: transformers renames old names, adds
        or drops the prefix of the base model, and joins experts that are stored one by one.

    Raises:
        StageError: a tensor is missing, not expected, or there twice, or has another shape or a dtype that cannot be
            trained.
    """
    tensors = model.state_dict()  # with tied names, but without buffers that are not persistent
    tied = tied_weights(model)
    aliases = defaultdict(list)
    for name, canonical in tied.items():
        aliases[canonical].append(name)
    renamed = _renamed(model, stored)
    found: dict[str, list[StoredTensor]] = {}
    missing, misshapen, mistyped = [], [], []
    for name, parts in stored_as(model).items():
        # Stored under any of its names, or under several (`check_tied`); else in parts.
        whole = next((key for key in (name, *aliases[name]) if key in renamed), None)
        wanted = {whole: tuple(tensors[name].shape)} if whole else parts
        missing += [key for key in wanted if key not in renamed]
        found[name] = [renamed[key] for key in wanted if key in renamed]
        for key, shape in wanted.items():
            tensor = renamed.get(key)
            if tensor and tensor.shape != shape:
                misshapen.append(f"{key} is {list(tensor.shape)} in {tensor.file}, the config asks for {list(shape)}")
            elif tensor and tensors[name].is_floating_point() and tensor.dtype not in _TRAINABLE:  # not all buffers are
                mistyped.append(
                    f"{key} is {tensor.dtype} in {tensor.file}, which cannot be trained: use {' or '.join(_TRAINABLE)}"
                )
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unexpected = [name for name in _unused(model, renamed, found) if not _matches(name, ignored)]
    problems = [
        *_some("missing in the safetensors files", missing),
        *_some("not expected by the model", unexpected),
        *_some("of another shape", misshapen),
        *_some("of another type", mistyped),
    ]
    if problems:
        fit = f"the weights do not fit the config of {type(model).__name__}"
        remedies = [*_remedies(model, missing, unexpected, misshapen)]
        raise StageError(f"{fit}: {', or '.join(remedies)}" if remedies else fit, *problems)
    return found


def _remedies(model: PreTrainedModel, missing: list[str], unexpected: list[str], misshapen: list[str]) -> Iterator[str]:
    """What may make tensors of these kinds fit."""
    if missing:
        output = model.get_output_embeddings()
        names = {name for name, parameter in model.named_parameters() if output and parameter is output.weight}
        if names.issuperset(missing):
            shared = "if the output shares the weights of the embedding"
            yield f"set tie_word_embeddings: true in the {CONFIG} of a copy, {shared}"
        # transformers may split what is stored, of which no parameter is found here.
        converts = any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(model))
        if unexpected and converts and all([*parts] == [name] for name, parts in stored_as(model).items()):
            yield "load them with transformers and `save_pretrained(copy, save_original_format=False)`"
        yield "fetch all safetensors files of this revision again"
    if unexpected:  # the same would be fetched again
        yield "delete the extra tensors in a copy of the files, if the model needs none of them"
    if misshapen:
        yield f"correct {CONFIG} in a copy, or fetch it and the weights again"


def dropped(
    model: PreTrainedModel, stored: dict[str, StoredTensor], found: dict[str, list[StoredTensor]]
) -> list[StoredTensor]:
    """The stored weights that the class does not have, and transformers ignores, such as the layers of MTP.

    `found` is what `check_headers` has returned.
    """
    unused = _unused(model, _renamed(model, stored), found)
    return [tensor for name, tensor in unused.items() if not _matches(name, _MASKS)]


def _unused(
    model: PreTrainedModel, renamed: dict[str, StoredTensor], found: dict[str, list[StoredTensor]]
) -> dict[str, StoredTensor]:
    """The stored tensors that no part of the model has, by their names in it, but for what models compute today."""
    tensors, used = model.state_dict(), {tensor.key for parts in found.values() for tensor in parts}
    return {
        name: tensor
        for name, tensor in renamed.items()
        if name not in tensors and tensor.key not in used and not _matches(name, _COMPUTED)
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def check_tied(model: PreTrainedModel, stored: dict[str, StoredTensor], directory: Path) -> None:
    """Compare the two copies of each tied parameter that is stored under both names: tying keeps only one.

    Raises:
        StageError: they differ.
    """
    renamed = _renamed(model, stored)
    for name, canonical in tied_weights(model).items():
        if name in renamed and canonical in renamed:
            first, second = renamed[name], renamed[canonical]
            if not _is_equal(directory, first, second):
                raise StageError(
                    f"{first.key!r} in {first.file} and {second.key!r} in {second.file} differ, but {CONFIG} ties "
                    "them: set tie_word_embeddings to false in a copy of the model"
                )


def _is_equal(directory: Path, first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors have the same bytes. The files are memory-mapped: an embedding may have gigabytes."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):  # headers suffice: nothing is read
        return False
    with safe_open(directory / first.file, "pt") as file, safe_open(directory / second.file, "pt") as other:
        tensors = file.get_tensor(first.key), other.get_tensor(second.key)
        # As bytes, because NaN differs from itself; flat, because a scalar cannot be viewed as bytes.
        return torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in tensors))


def _renamed(model: PreTrainedModel, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors under the names that transformers gives them on loading; those that it joins keep theirs.

    Raises:
        StageError: two would be the same part of the model.
    """
    transforms: list[Any] = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    tensors = model.state_dict()
    renamed: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, tensors)
        if key in tensors or converter is not None:  # a name that the model has needs no renaming
            name = key
        if name in tensors and name in renamed:
            raise StageError(
                f"{renamed[name].key!r} in {renamed[name].file} and {key!r} in {tensor.file} are both {name} of the "
                "model: delete one of them in a copy of the files"
            )
        renamed[name] = tensor
    return renamed


def _some(what: str, names: list[str]) -> list[str]:
    """A line for each of the first few problems of a kind, and how many there are."""
    if not names:
        return []
    return [f"{len(names)} {what}:", *(f"  {name}" for name in names[:5]), *(["  ..."] if len(names) > 5 else [])]
