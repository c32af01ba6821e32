"""The settings of a training whose steps are timed, as changes of params.yaml."""

import importlib.util
from collections.abc import Iterator
from itertools import product
from typing import Any

PARTS = ("smoke", "steps", "resume", "large", "saves", "tests", "programs", "predicted")
"""What `python -m benchmarks.gpu --help` describes, in the order in which it is measured."""

Settings = dict[str, dict[str, Any]]
"""Parameters by the name of the setting."""

ATTENTION, LOSS = ("varlen", "flex", "sdpa"), ("fused", "plain")
"""`sdpa` and `plain` are what transformers does by itself: a dense mask, and the logits of all tokens."""

SAVES = ("first copy", "second copy", "write")
"""What is timed of two asynchronous saves. The training waits for the copies, and not for `write`."""


def best_setting(batch_sizes: list[int], precision: str) -> dict[str, Any]:
    """The one that is expected to be the fastest."""
    size = max(batch_sizes)
    return {"attention": "varlen", "loss": "fused", "compile": True, "batch_size": size, "precision": precision}


def main_settings(batch_sizes: list[int], precision: str) -> Settings:
    """Each option by itself, with the largest batch; the best setting first. fp8 only where torchao is installed."""
    best = best_setting(batch_sizes, precision)
    eager, usual = {**best, "compile": False}, {"attention": "sdpa", "loss": "plain"}
    return _named(
        precision,
        best,
        eager,
        {**best, "document_mask": False},
        {**best, "deterministic": True},
        {**best, **usual},
        {**best, **usual, "document_mask": False},
        *({**eager, "attention": attention, "loss": loss} for attention, loss in product(ATTENTION, LOSS)),
        *({**eager, "activation_checkpointing": kind} for kind in ("selective_op", "full")),
        *({**best, "activation_checkpointing": kind} for kind in ("selective_op", "full")),
        *({**chosen, "precision": "fp16"} for chosen in (best, eager)),
        *([{**best, "precision": "fp8"}] if importlib.util.find_spec("torchao") else []),
        {**eager, "fsdp": {"strategy": "fsdp", "cpu_offload": True}},
        {**eager, "deterministic": True},
    )


def large_settings(precision: str) -> Settings:
    """Of a model whose activations are computed again; the largest batch that 140 GB have memory for is the first."""
    best = {**best_setting([4], precision), "activation_checkpointing": "full"}
    single = {**best, "batch_size": 1}
    adapters = {**best, "lora_r": 16}
    has_8_bits = importlib.util.find_spec("torchao")
    return _named(
        precision,
        best,
        *([{**best, "optimizer": "adamw_8bit", "activation_checkpointing": "selective_op"}] if has_8_bits else []),
        {**adapters, "lora_base": "nf4"},
        {**adapters, "activation_checkpointing": "selective_op"},
        adapters,
        {**single, "activation_checkpointing": "selective_op"},
        {**best, "deterministic": True},
        single,
    )


def _named(precision: str, *settings: dict[str, Any]) -> Settings:
    return {name_of(values, precision): values for values in settings}


def name_of(values: dict[str, Any], precision: str) -> str:
    """The name of a setting, with what differs from the usual."""

    def parts() -> Iterator[str]:
        yield f"{values['attention']}, {values['loss']}"
        yield f"batch {values['batch_size']}"
        if values["precision"] != precision:
            yield values["precision"]
        if "activation_checkpointing" in values:
            yield f"checkpointing {values['activation_checkpointing']}"
        if "optimizer" in values:
            yield values["optimizer"]
        if "fsdp" in values:
            yield "CPU offload"
        if "lora_r" in values:
            yield f"LoRA of rank {values['lora_r']}"
        if "lora_base" in values:
            yield values["lora_base"]
        if values["compile"]:
            yield "compiled"
        if not values.get("document_mask", True):
            yield "no documents"
        if values.get("deterministic"):
            yield "deterministic"

    return ", ".join(parts())


def predictable(settings: Settings) -> Settings:
    """Those whose memory `plan` predicts: not compiled ones, whose kernels keep less."""
    return {name: values for name, values in settings.items() if not values["compile"]}
