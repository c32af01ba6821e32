"""Tiny models of every family that the training is tested with."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor

from stages.artifacts import publish
from stages.model import headers, meta
from stages.model.manifest import FileEntry, ModelManifest

_SMALL: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip

CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    ),
    "llama untied, scaled rope": transformers.LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, eos_token_id=0, bos_token_id=None,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=101, n_embd=24, n_layer=2, n_head=3, n_positions=64, eos_token_id=0, bos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "qwen3": transformers.Qwen3Config(
        vocab_size=101, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **_SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gemma2": transformers.Gemma2Config(**_SMALL, sliding_window=8),
    "gemma untied": transformers.GemmaConfig(**_SMALL, tie_word_embeddings=False),
    "mistral": transformers.MistralConfig(**_SMALL, sliding_window=8),
    "mistral tied": transformers.MistralConfig(**_SMALL, sliding_window=8, tie_word_embeddings=True),
    "qwen3 untied": transformers.Qwen3Config(**_SMALL, tie_word_embeddings=False),
    "phi": transformers.PhiConfig(**{**_SMALL, "num_key_value_heads": 3}, partial_rotary_factor=0.5),
    "phi tied": transformers.PhiConfig(**{**_SMALL, "num_key_value_heads": 3}, tie_word_embeddings=True),
    "phi3": transformers.Phi3Config(**_SMALL),
    "gpt2 untied": transformers.GPT2Config(
        vocab_size=101, n_embd=24, n_layer=2, n_head=3, n_positions=64, eos_token_id=0, bos_token_id=0,
        tie_word_embeddings=False,
    ),
}  # fmt: skip


def manifest_of(directory: Path, with_weights: bool) -> ModelManifest:
    model = meta.build(directory)
    files = {path.name: FileEntry(path.stat().st_size, publish.sha256_file(path)) for path in directory.iterdir()}
    weights = headers.weight_files(directory) if with_weights else []
    return ModelManifest(
        str(directory), "main", None, type(model).__name__, model.config.model_type, "float32",
        meta.num_parameters(model), files, weights, meta.tied_weights(model), meta.layer_classes(model), 101, 64, 0,
        None, None,
    )  # fmt: skip


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
