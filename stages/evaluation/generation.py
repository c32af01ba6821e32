"""A model directory as its users load it, and the text that it writes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from stages.base.errors import StageError, one_line
from stages.model.tokenizer import find_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(directory: Path, dtype: torch.dtype | None = None) -> tuple["PreTrainedModel", Any]:
    """The model in evaluation mode, on a GPU if there is one, and its tokenizer.

    It computes in `dtype`; None: in that of its weights, on CPUs in fp32: bf16 weights take seven times as long on a
    CPU without bf16 instructions.

    Raises:
        StageError: a file is missing or damaged, or transformers does not know the architecture.
    """
    logging.disable_progress_bar()  # it would be printed without a terminal too
    device, own = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", torch.float32)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype=dtype or own
        )
        tokenizer = load_tokenizer(directory)
    except (OSError, ValueError, KeyError, TypeError, ImportError, SafetensorError) as error:  # on files of any content
        raise StageError(f"{directory} cannot be loaded: {one_line(error)}") from None
    # eval: no dropout, as in the validation of the training.
    return model.to(device).eval(), tokenizer


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory."""
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def encode(tokenizer: Any, text: str) -> Tensor:
    """The tokens of the beginning of a document, as `pack` encodes it: (1, T) int64.

    With the BOS that the tokenizer puts first, without EOS, after which another document begins. The spelling of a
    special token is text.
    """
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    backend = getattr(tokenizer, "backend_tokenizer", None)  # that of a model of others may have none
    start = find_start(backend, tokenizer.eos_token_id) if backend else []
    return torch.tensor([start + ids], dtype=torch.long)


def max_length(model: "PreTrainedModel") -> int:
    """Tokens of prompt and continuation together. With learned positions there is no embedding for more."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit or sys.maxsize


def has_ended(model: "PreTrainedModel", continuation: Tensor) -> bool:
    """Whether tokens that it wrote, (n,) int64, end with one of its EOS tokens."""
    found = model.generation_config.eos_token_id
    return continuation[-1:].tolist() in ([token] for token in (found if isinstance(found, list) else [found]))


def generate(
    model: "PreTrainedModel", prompt: Tensor, max_new_tokens: int, temperature: float, streamer: Any = None,
    synced_gpus: bool = False,
) -> Tensor:  # fmt: skip
    """The tokens that follow a prompt: (1, T) int64 -> (at most max_new_tokens,) int64.

    Args:
        model: As `load` returns it.
        prompt: With at least one token, and fewer than `max_length`.
        max_new_tokens: It ends before at an EOS token of its generation config, or at `max_length`.
        temperature: 0 for the most probable token each time; otherwise one of the 50 most probable is drawn.
        streamer: As transformers describes it: called with each token as it is there.
        synced_gpus: Whether the model is sharded over ranks, all of which call this, with a prompt of their own each:
            those that are ready help the others until the last one is.
    """
    # In place of the model's own, from which transformers takes what is not given: beams, penalties, forbidden tokens.
    model.generation_config = GenerationConfig(
        **({"do_sample": True, "temperature": temperature, "top_k": 50} if temperature else {}),
        max_new_tokens=min(max_new_tokens, max_length(model) - prompt.shape[1]),
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=0,  # a batch of one is never padded, but generate warns without it
    )
    output: Tensor = model.generate(  # type: ignore[operator]  # transformers types it as not callable
        prompt,
        attention_mask=torch.ones_like(prompt),  # (1, T)
        streamer=streamer,
        synced_gpus=synced_gpus,
    )
    return output[0, prompt.shape[1] :]
