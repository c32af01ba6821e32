"""The model without its weights: built on the meta device, and held against the headers of its files."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from stages.artifacts.command import StageError
from stages.model.headers import StoredTensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights may be stored in: safetensors' code -> dtype."""


def build(directory: Path, attn_implementation: str | None = None) -> PreTrainedModel:
    """Build the model that `directory`'s config.json describes: on the meta device, fp32, without weights.

    Args:
        directory: Holds config.json.
        attn_implementation: `sdpa`, `eager` ...; None takes sdpa where the model has it, else eager.

    Raises:
        StageError: it is no causal language model of the installed transformers.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attn_implementation, trust_remote_code=False
            )
            return model
    except (ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise StageError(
            f"{directory}/config.json is no causal language model that transformers {transformers.__version__} "
            f"can build: {reason}"
        ) from None


def num_parameters(model: nn.Module) -> int:
    """Parameters of a model, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are the same object as an earlier one -> the name of that one."""
    names: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = names.setdefault(id(parameter), name)
        if canonical != name:
            tied[name] = canonical
    return tied


def layer_classes(model: nn.Module) -> list[str]:
    """The classes of the decoder's layers: elements of lists that the model asks never to split, else the longest list.

    Models ask the same for modules that are no layers, such as embeddings, or parts of layers.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise StageError(f"{type(model).__name__} has no list of layers, so there is nothing to shard it by")
    asked: Iterable[str] = getattr(model, "_no_split_modules", None) or []
    elements = {type(layer).__name__ for layers in lists for layer in layers}
    return sorted(elements.intersection(asked) or {type(layer).__name__ for layer in max(lists, key=len)})


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the embedding: every token id must be below."""
    weight: torch.Tensor = model.get_input_embeddings().get_parameter("weight")
    return weight.shape[0]


def dtype_name(model: PreTrainedModel, stored: dict[str, StoredTensor]) -> str:
    """The dtype in which most of the weights are stored, or that the config names where there are none."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored.values():
        if tensor.dtype in DTYPES:
            sizes[DTYPES[tensor.dtype]] += tensor.end - tensor.begin
    dtype = sizes.most_common(1)[0][0] if sizes else model.config.get_text_config().dtype or torch.float32
    return str(dtype).removeprefix("torch.")


def check_headers(model: PreTrainedModel, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Find each parameter and persistent buffer of a meta model among the stored tensors, without reading a weight.

    Returns:
        The tensor for each name in `model.state_dict()`, tied names left out. A tensor's name in the file (its `key`)
        may differ from the model's: transformers renames old names and adds or drops the prefix of the base model.

    Raises:
        StageError: a tensor is missing, not expected, or has another shape or a dtype that cannot be trained.
    """
    if getattr(model.config, "quantization_config", None):
        raise StageError("config.json: the weights are quantized (quantization_config), which cannot be trained")
    tensors = model.state_dict()
    tied = tied_weights(model)
    # Buffers that older versions stored.
    passed_over = {*(model._keys_to_ignore_on_load_unexpected or []), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    found: dict[str, StoredTensor] = {}
    unexpected = []
    for name, tensor in _renamed(model, stored).items():
        canonical = tied.get(name, name)
        if name not in tensors:
            if not any(re.search(pattern, name) for pattern in passed_over):
                unexpected.append(name)
        elif canonical == name or canonical not in found:
            found[canonical] = tensor

    missing = [name for name in tensors if name not in tied and name not in found]
    misshapen = [
        f"{name} is {list(tensor.shape)} in {tensor.file}, the config asks for {list(tensors[name].shape)}"
        for name, tensor in found.items()
        if tensor.shape != tuple(tensors[name].shape)
    ]
    mistyped = [
        f"{name} is {tensor.dtype} in {tensor.file}, which cannot be trained: take one of {', '.join(DTYPES)}"
        for name, tensor in found.items()
        if tensors[name].is_floating_point() and tensor.dtype not in DTYPES
    ]
    problems = [
        *_some("missing in the safetensors files", missing),
        *_some("not expected by the model", unexpected),
        *_some("of another shape", misshapen),
        *_some("of another type", mistyped),
    ]
    if problems:
        raise StageError(
            "\n".join([f"the weights do not fit the config of {type(model).__name__}; fetch both again", *problems])
        )
    return found


def check_tied(model: PreTrainedModel, stored: dict[str, StoredTensor], directory: Path) -> None:
    """Where a tied parameter is stored under both names, the two must be equal, or tying would lose one.

    Raises:
        StageError: they differ.
    """
    renamed = _renamed(model, stored)
    for name, canonical in tied_weights(model).items():
        if name in renamed and canonical in renamed:
            first, second = renamed[name], renamed[canonical]
            if _bytes(directory, first) != _bytes(directory, second):
                raise StageError(
                    f"{first.key!r} in {first.file} and {second.key!r} in {second.file} differ, but config.json ties "
                    "them: set tie_word_embeddings to false in a copy of the model"
                )


def _bytes(directory: Path, tensor: StoredTensor) -> bytes:
    with (directory / tensor.file).open("rb") as file:
        file.seek(tensor.begin)
        return file.read(tensor.end - tensor.begin)


def _renamed(model: PreTrainedModel, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors under the names that transformers gives them on loading."""
    transforms: list[Any] = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    tensors = model.state_dict()
    renamed = {}
    for key, tensor in stored.items():
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, tensors)
        if converter is not None and key not in tensors:
            raise StageError(
                f"{tensor.file}: {type(model).__name__} keeps {key!r} joined with others as {name!r}; weights stored "
                "so (experts one by one) cannot be loaded here: set initial_weights to random, or take a dense model"
            )
        renamed[key if key in tensors else name] = tensor
    return renamed


def _some(what: str, names: list[str]) -> list[str]:
    """A line for each of the first few problems of a kind, and how many there are."""
    if not names:
        return []
    return [f"{len(names)} {what}:", *(f"  {name}" for name in names[:5]), *(["  ..."] if len(names) > 5 else [])]
