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
    max_shard_size: str = "50GB",
) -> Path:
    """Write a model as `save_pretrained` does, and return its directory.

    Args:
        directory: Where to. It may have other files.
        config: That of the model, or its name in `CONFIGS`.
        dtype: Of its weights, which have the values of seed 0. With None there is only a config.
        words: Those of its tokenizer, where it has one: the first one stands for unknown words.
        max_shard_size: Of a file of weights.
    """
    config = CONFIGS[config] if isinstance(config, str) else config
    if dtype is None:
        config.save_pretrained(directory)
    else:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    if words:
        write_tokenizer(directory, words)
    return directory
