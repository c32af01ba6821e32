"""What the programs have in common: models, optimizer, and the description of what one of them runs. No torch."""

from dataclasses import dataclass
from typing import Any

LR, BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM, SEED = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 0

SHAPES = {  # hidden size, layers, attention heads, key-value heads, intermediate size, vocabulary
    "1M": (128, 4, 4, 2, 384, 4096),
    "12M": (384, 6, 6, 2, 1024, 8192),
    "100M": (768, 12, 12, 4, 2048, 32768),
    "400M": (1024, 24, 16, 8, 4096, 32768),
    "1B": (2048, 16, 32, 8, 8192, 128256),
    "8B": (4096, 32, 32, 8, 14336, 128256),
}
UNTIED = {"8B"}
"""Those whose output embedding has a weight of its own; the shapes of 1 and 8 billion are those of Llama 3."""

TORCHRUN: list[str] = ["-m", "stages.ranks.torchrun", "--standalone", "--local-addr=127.0.0.1"]
"""With an address, because torchrun would ask the nameserver for the name of this machine."""


def llama(shape: str, seq_length: int) -> dict[str, Any]:
    """The arguments of a `LlamaConfig`."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": vocabulary,
        "tie_word_embeddings": shape not in UNTIED, "max_position_embeddings": seq_length, "bos_token_id": None,
        "eos_token_id": 0,
    }  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What a program runs. The batches, the optimizer and the precision are the same in all of them."""

    program: str
    """bare | ddp | trainer."""
    model: str
    """A directory with weights."""
    batch_size: int
    """Rows per rank and step."""
    steps: int
    precision: str
    """fp32 | bf16."""
    compile: bool
    log_freq: int
    """Steps between two lines."""
