"""Whether a model keeps the documents of a row apart, tested before it is trained.

Given position ids that restart with each document, transformers masks the attention between documents in most
architectures, and silently ignores them in others (OPT, Falcon, BLOOM). So a tiny random model of the architecture is
tested: with another first document, the logits of the second one must not change at all.
"""

import copy

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stages.artifacts.errors import StageError
from stages.model.manifest import ModelManifest
from stages.tokens.batch import make_batch
from stages.tokens.loss import logits
from stages.training.distributed import device_type
from stages.training.params import TrainParams
from stages.training.precision import compute_dtype

_END = 0
_LENGTH = 16
_VOCAB_SIZE = 64
_WIDTHS = ("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k")


def check_document_mask(manifest: ModelManifest, params: TrainParams) -> None:
    """Refuse a document mask that the model would ignore. Seeds the random number generator of torch.

    Raises:
        StageError: naming `document_mask`.
    """
    if not params.document_mask:
        return
    remedy = "set document_mask to false, and let tokens attend across documents; or use another model"
    try:
        config = AutoConfig.from_pretrained(manifest.directory(), local_files_only=True)
        leaks = leaks_documents(config, params)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StageError(
            f"document_mask: cannot determine whether {manifest.architecture} keeps documents apart "
            f"({type(error).__name__}: {reason}): {remedy}"
        ) from None
    if leaks:
        raise StageError(f"document_mask: {manifest.architecture} lets tokens attend to other documents: {remedy}")


def leaks_documents(config: PreTrainedConfig, params: TrainParams, attn_implementation: str | None = None) -> bool:
    """Whether the logits of a token depend on the documents before its own.

    Args:
        config: Of a model of any size.
        params: Rows at a time, as some implementations separate documents in a batch of one row only; precision.
        attn_implementation: `sdpa`, `eager` ...; None: the one that training uses.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(config), attn_implementation=attn_implementation, trust_remote_code=False
    )
    with torch.no_grad():
        for param in model.parameters():  # nothing is zero, as some gates are at initialization
            param.uniform_(0.5, 1.5) if param.dim() < 2 else param.normal_(std=param.shape[-1] ** -0.5)
    # The device and dtype of the training: they decide which attention kernel runs. eval(): dropout would differ.
    model.to(device_type(), compute_dtype(params.precision)).eval()

    rows = torch.randint(1, _VOCAB_SIZE, (min(params.batch_size, 2), _LENGTH))  # (B, T), without _END, which is 0
    starts = torch.tensor([8, 5][: len(rows)])  # of the second documents
    rows[range(len(rows)), starts - 1] = _END
    is_first = torch.arange(_LENGTH) < starts[:, None]  # (B, T)
    # Each token of the first document becomes another one, none of them _END: the documents stay where they are.
    changed = torch.where(is_first & (rows != _END), rows % (_VOCAB_SIZE - 1) + 1, rows)
    masked, unmasked = (
        not torch.equal(*(_logits(model, tokens, document_mask)[~is_first] for tokens in (rows, changed)))
        for document_mask in (True, False)
    )
    # The control: without the mask the logits must change, or the test could not detect a leak.
    if not unmasked:
        raise ValueError("its logits do not depend on what stands before")
    return masked


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a tiny model of the same architecture: a layer of each kind, two heads, few tokens.

    The size of a head stays, as tables of rotary embeddings depend on it.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == num_layers}
    kinds = {tuple(map(repr, kind)): index for index, kind in reversed([*enumerate(zip(*lists.values(), strict=True))])}
    layers = sorted(kinds.values()) or [0]  # the first layer of each kind, such as sliding and full attention
    heads = getattr(text, "num_attention_heads", None)
    sizes = {"num_hidden_layers": len(layers), "vocab_size": _VOCAB_SIZE, **dict.fromkeys(_WIDTHS, 64)}
    # All tokens go to all experts: with fewer, the number that an expert gets would change how its results are rounded.
    sizes |= {**dict.fromkeys(_EXPERTS, 2), "n_group": 1, "topk_group": 1}
    if isinstance(heads, int):
        width = 2 * (getattr(text, "head_dim", None) or text.hidden_size // heads)
        # Key-value heads must divide the heads, of which there are two.
        shared = min(2, getattr(text, "num_key_value_heads", None) or 2)
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": shared, "num_kv_heads": shared,
                  "hidden_size": width, "word_embed_proj_dim": width}  # fmt: skip
    for name, size in sizes.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, size)
    for name, value in lists.items():
        setattr(text, name, [value[index] for index in layers])
    text.pad_token_id = None  # it may be beyond the vocabulary
    return config


@torch.no_grad()
def _logits(model: PreTrainedModel, input_ids: Tensor, document_mask: bool) -> Tensor:
    return logits(model, make_batch(input_ids.to(model.device), _END, document_mask)).cpu()
