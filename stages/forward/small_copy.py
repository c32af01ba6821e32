"""A small random model of the same architecture, with which the tests before a training compute.

What a config allows to be made smaller is not written anywhere: sizes depend on each other, layers on the layers before
them. So several configs are tried, the smallest first, and the first one whose model computes is taken.
"""

import copy
import dataclasses
import math
from itertools import product
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_MAX_PARAMETERS = (2**24, 2**28)
"""First 64 MiB in fp32 are tried, then 1 GiB."""
VOCAB_SIZE = 64
WINDOW = 5
_CHUNK = 8
_SOFT_CAP = 1.0
"""The scores of the small model are about as large, so that they are seen to be capped."""
_LARGEST_SINK = 16.0
"""Of the heads of the small model. Its scores are about as large where queries and keys have biases: beside them, sinks
as small as at initialization are not seen to be missing. Heads with small ones attend also where there are no biases.
"""
_WINDOWS = ("sliding_window", "attention_chunk_size")
_WIDTHS = (
    *("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "intermediate_size_mlp",
)
_CHOSEN = ("num_experts_per_tok", "moe_k")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", *_CHOSEN)
_LAYERS = ("num_hidden_layers", "num_blocks")


def small_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of a small model of the same architecture, which computes; None: none was found within 1 GiB.

    It has a layer of each kind, few heads, few tokens, small windows; or more of what cannot be left out: two layers of
    each kind where the second ones use something of the first. The size of a head stays, as tables of rotary embeddings
    depend on it. Seeds the random number generator of torch.
    """
    widths = [None, *_factors(config.get_text_config())]
    for max_parameters, of_each_kind, factor in product(_MAX_PARAMETERS, (1, 2, None), widths):
        try:
            small = _reduced(config, factor, of_each_kind)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(copy.deepcopy(small), trust_remote_code=False)
            if sum(param.numel() for param in model.parameters()) > max_parameters:
                continue
            if _sees_the_token_before(random_model(small, None, torch.float32, "cpu")):
                return small
        except Exception:  # of any architecture: sizes that do not fit each other
            continue
    return None


def random_model(
    config: PreTrainedConfig, implementation: str | None, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """A random model in evaluation mode, the same for all implementations."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # which writes into the config that it is given
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=implementation, trust_remote_code=False
    )
    torch.manual_seed(0)  # the initialization may draw numbers, or not
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("sinks"):
                param.copy_(torch.linspace(0, _LARGEST_SINK, len(param)))
            elif param.dim() > 1:
                param.normal_(std=param.shape[-1] ** -0.5)
            else:  # nothing is zero, as some gates are at initialization
                param.copy_(torch.where(param == 0, torch.empty_like(param).uniform_(0.5, 1.5), param))
    return model.to(device, dtype).eval()  # type: ignore[no-any-return, arg-type]


def rounding(dtype: torch.dtype, device: str) -> float:
    """How far a product of matrices of this dtype is rounded, relative to 1: in fp32 on a GPU maybe as in TF32."""
    if dtype == torch.float32 and device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return float(2**-10)
    return torch.finfo(dtype).eps


def _sees_the_token_before(model: PreTrainedModel) -> bool:
    """Whether logits depend on it; not if a number of layers without meaning has left out all of them."""
    tokens = torch.randint(1, VOCAB_SIZE - 1, (1, 8)).repeat(2, 1)
    tokens[1, -2] = tokens[0, -2] % (VOCAB_SIZE - 2) + 1
    with torch.no_grad():
        first, second = model(tokens, use_cache=False).logits[:, -1]
    return not torch.equal(first, second)


def _reduced(config: PreTrainedConfig, factor: int | None, of_each_kind: int | None) -> PreTrainedConfig:
    """A smaller config, as it would be read from a file; an error of any class if it is of no model.

    Args:
        config: Is not changed.
        factor: By which it is less wide, in heads and all that is a multiple of the hidden size; None: as wide as a few
            heads are, with narrow layers between them.
        of_each_kind: How many layers; None: all.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    hidden = getattr(text, "hidden_size", None)
    of_layers: dict[int, dict[str, Any]] = {}
    if text.is_heterogeneous:  # its values for all layers cannot be read while some layers have others
        of_layers = {int(index): values for index, values in text.to_dict()["per_layer_config"].items()}
        text.per_layer_config = None
    if of_each_kind:
        of_layers = _keep_some_layers(text, of_layers, of_each_kind)
    sizes: dict[str, int] = {**dict.fromkeys(_WINDOWS, WINDOW), "n_group": 1, "topk_group": 1}
    # All tokens go to all experts: with fewer, the number that an expert gets would change how its results are rounded.
    sizes |= dict.fromkeys(_EXPERTS, min(2, *(getattr(text, name, None) or 2 for name in _CHOSEN)))
    sizes |= {name: VOCAB_SIZE for name in vars(text) if "vocab_size" in name}
    # Of a scan, whose sequences are padded to it.
    sizes |= {name: _CHUNK for name in vars(text) if name.endswith("chunk_size") and name not in sizes}
    sizes = (_few_heads(text) if factor is None else _scaled(text, factor)) | sizes
    for name, value in sizes.items():
        own = getattr(text, name, None)
        if isinstance(own, int):
            setattr(text, name, value)
        elif isinstance(own, list):  # of all layers
            setattr(text, name, [value] * len(own))
    if of_layers:
        text.per_layer_config = {
            index: {name: sizes.get(name, value) if isinstance(value, int) else value for name, value in values.items()}
            for index, values in of_layers.items()
        }
    if getattr(text, "attn_logit_softcapping", None):
        text.attn_logit_softcapping = _SOFT_CAP
    for each in (config, text):  # they may be beyond the vocabulary
        each.bos_token_id, each.eos_token_id, each.pad_token_id = 0, 0, VOCAB_SIZE - 1
    for name in config.sub_configs:  # of images and sounds
        part = getattr(config, name, None)
        if part is None or part is text:
            continue
        for key, value in vars(part).items():
            if key in _LAYERS and not part.is_heterogeneous:
                setattr(part, key, 1)
            elif value == hidden and "out" in key:
                setattr(part, key, text.hidden_size)
    return type(config).from_dict(config.to_dict())  # computes what depends on these values


def _few_heads(text: PreTrainedConfig) -> dict[str, int]:
    sizes = dict.fromkeys(_WIDTHS, 64)
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        return sizes
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    alike = [name for name, value in _heads(text).items() if value == heads]  # as of linear attention
    # Twice as many heads as key-value heads, where there are more.
    heads = 2 if shared == heads else 4
    return sizes | dict.fromkeys(alike, heads) | {
        "num_key_value_heads": 2, "num_kv_heads": 2, "hidden_size": heads * size, "word_embed_proj_dim": heads * size,
    }  # fmt: skip


def _scaled(text: PreTrainedConfig, factor: int) -> dict[str, int]:
    """Numbers of heads, the hidden size and its multiples, divided by a factor."""
    hidden = text.hidden_size
    sizes = {name: 64 for name in _WIDTHS if isinstance(value := getattr(text, name, None), int) and value % hidden}
    multiples = {name: value for name, value in _numbers(text).items() if value % hidden == 0}
    return sizes | {name: value // factor for name, value in (multiples | _heads(text)).items() if name not in sizes}


def _factors(text: PreTrainedConfig) -> list[int]:
    """Powers of two that divide the hidden size and each number of heads, the largest first, and 1 last."""
    hidden = getattr(text, "hidden_size", 1)
    common = math.gcd(hidden, *_heads(text).values())
    powers = [1 << power for power in reversed(range(common.bit_length()))]
    return [factor for factor in powers if common % factor == 0 and (hidden // factor >= 64 or factor == 1)]


def _heads(text: PreTrainedConfig) -> dict[str, int]:
    return {name: value for name, value in _numbers(text).items() if name.endswith("heads") or name == "n_head"}


def _numbers(text: PreTrainedConfig) -> dict[str, int]:
    return {name: value for name, value in vars(text).items() if type(value) is int and value > 1}


def _keep_some_layers(
    text: PreTrainedConfig, of_layers: dict[int, dict[str, Any]], number: int
) -> dict[int, dict[str, Any]]:
    """Leave the first layer of each kind, `number` times, such as sliding and full attention; their `of_layers`."""
    num_layers = text.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(text).items()
        # Not the numbers of layers, as LFM2 and Llama 4 list them: each would be a kind of its own.
        if isinstance(value, list) and len(value) == num_layers and value != [*range(num_layers)]
    }
    kinds: dict[str, int] = {}
    for index in range(num_layers):
        kinds.setdefault(repr([of_layers.get(index), *(values[index] for values in lists.values())]), index)
    layers = [*kinds.values()] * number
    text.num_hidden_layers = len(layers)
    if number > 1 and getattr(text, "num_kv_shared_layers", None):  # the last ones use keys and values of the first
        text.num_kv_shared_layers = len(kinds)
    computed = {*vars(text)} - {field.name for field in dataclasses.fields(text)}
    for name in computed:
        if isinstance(getattr(text, name), list):  # numbers of layers, as Zamba 2 has them
            delattr(text, name)
    for name, values in lists.items():
        setattr(text, name, [values[index] for index in layers])
    return {new: of_layers[old] for new, old in enumerate(layers) if old in of_layers}
