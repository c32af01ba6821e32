"""The values of `attention` in params.yaml. Without torch: params and `--help` need no more than the names."""

from typing import Literal

Attention = Literal["auto", "varlen", "flex", "sdpa", "eager", "padded"]
"""auto: the first that works with the model (stages/forward/attention_choice.py) | varlen: flash kernels of torch,
given the lengths of the documents | flex: compiled for the model's own mask, also with soft caps | sdpa: torch's
`scaled_dot_product_attention`, with a mask of (T, T) values where documents are kept apart | eager: matrix products,
the slowest | padded: each document is a sequence of its own, padded, for models whose layers cannot be told where
documents end."""

IMPLEMENTATIONS: dict[str, str | None] = {
    "varlen": "varlen",
    "flex": "flex_attention",
    "sdpa": "sdpa",
    "eager": "eager",
    "padded": None,
}
"""What transformers calls them; None: the model's own choice. `varlen` is registered by stages/forward/attention.py."""
