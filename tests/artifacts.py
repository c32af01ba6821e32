"""What the stages read and write, made small: a model on the disk, and whatever else several test files need."""

from pathlib import Path

import torch
import transformers

from tests.models import CONFIGS, write_tokenizer


def write_model(
    directory: Path,
    config: str | transformers.PreTrainedConfig = "llama",
    dtype: torch.dtype | None = torch.float32,
    words: list[str] | None = None,
) -> Path:
    """Write a model as `save_pretrained` does, and return its directory.

    Args:
        directory: Where to. It may have other files.
        config: That of the model, or its name in `CONFIGS`.
        dtype: Of its weights, which have the values of seed 0. With None there is only a config.
        words: Those of its tokenizer, where it has one: the first one stands for unknown words.
    """
    config = CONFIGS[config] if isinstance(config, str) else config
    if dtype is None:
        config.save_pretrained(directory)
    else:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    if words:
        write_tokenizer(directory, words)
    return directory
