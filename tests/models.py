"""Tiny models of each family that the training is tested with."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.tensor import DTensor

from stages.base.files import FileEntry
from stages.model import adapters, hub, meta
from stages.model.manifest import ModelManifest

SIZES: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
LAYERS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Of models that are downloaded and exported, but not trained."""

_SMALL: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip

_GPT2: dict[str, Any] = {
    "vocab_size": 101, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip

_SCALED_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**{**_SMALL, "num_hidden_layers": 3}, tie_word_embeddings=True),
    "llama untied, scaled rope": transformers.LlamaConfig(
        **_SMALL, tie_word_embeddings=False, rope_parameters=_SCALED_ROPE
    ),
    "gpt2": transformers.GPT2Config(**_GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "qwen3": transformers.Qwen3Config(**_SMALL, tie_word_embeddings=True),
    "gemma3": transformers.Gemma3TextConfig(
        **_SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gemma2": transformers.Gemma2Config(**_SMALL, sliding_window=8),
    "gemma untied": transformers.GemmaConfig(**_SMALL, tie_word_embeddings=False),
    "mistral": transformers.MistralConfig(**_SMALL, sliding_window=8),
    "mistral tied": transformers.MistralConfig(**_SMALL, sliding_window=8, tie_word_embeddings=True),
    "qwen3 untied": transformers.Qwen3Config(**_SMALL, tie_word_embeddings=False),
    "phi": transformers.PhiConfig(**{**_SMALL, "num_key_value_heads": 3}, partial_rotary_factor=0.5),  # type: ignore[call-arg]
    "phi tied": transformers.PhiConfig(**{**_SMALL, "num_key_value_heads": 3}, tie_word_embeddings=True),
    "phi3": transformers.Phi3Config(**_SMALL),
    "gpt2 untied": transformers.GPT2Config(**_GPT2, tie_word_embeddings=False),
}

MIXTRAL = transformers.MixtralConfig(
    **_SMALL, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5, output_router_logits=True
)
"""A mixture of experts: its files have the experts one by one."""


def manifest_of(directory: Path, with_weights: bool) -> ModelManifest:
    """The manifest that `download` would write for a model of CONFIGS in `directory`."""
    model = meta.build(directory)
    linears = meta.find_linears(model, meta.layer_classes(model))  # not tried with adapters, which takes a second
    manifest = ModelManifest(
        model_name=str(directory),
        model_revision="main",
        commit=None,
        dtype="float32",
        files={path.name: FileEntry.of(path) for path in directory.iterdir()},
        weights=hub.weight_files(directory) if with_weights else [],
        **meta.fields(model),
        eos_token_id=0,
        start_token_ids=[],
        tokenizer=FileEntry.of_text(""),
        linears={adapters.kind(name): adapters.LinearKind(1, 1, 1, None) for name in linears},
    )
    return dataclasses.replace(manifest, max_seq_length=64)


def write_tokenizer(directory: Path, words: list[str]) -> None:
    """Write a tokenizer of words, with `<eos>` as EOS; unknown words become the first one."""
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of a parameter or of a moment, which may be a DTensor sharded over the ranks, and quantized."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.dequantize() if hasattr(full, "codes") else full


class CountedGraphs:
    """A backend of torch.compile that divides forward and backward pass as inductor does, but makes no kernels."""

    def __init__(self) -> None:
        # Which takes as long as to compile some layers.
        from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
        from torch._dynamo.backends.common import aot_autograd

        self.forward: Counter[str] = Counter()
        """How often each operation is in the graphs, by its name."""
        self.backward: Counter[str] = Counter()
        self._compile = aot_autograd(
            fw_compiler=self._count(self.forward),
            bw_compiler=self._count(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        return self._compile(graph, inputs)

    def _count(self, counts: Counter[str]) -> Any:
        from functorch.compile import make_boxed_func

        def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            for node in graph.graph.nodes:  # arguments too: operations with random numbers are those of other ones
                counts.update(str(op) for op in (node.target, *node.args) if isinstance(op, torch._ops.OpOverload))
            return make_boxed_func(graph.forward)

        return compile_graph
