"""Model FLOPs utilization (MFU): the share of the GPUs' peak performance that the training uses.

As in Chowdhery et al., PaLM (2022, arXiv:2204.02311), appendix B: what the model itself needs, counted once, against
the peak of the device. What activation checkpointing computes again does not count, and attention counts as if every
token saw the entire row.
"""

import re

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from stages.building.nf4 import Nf4Linear

# TFLOP/s of one GPU for dense matrices, from the makers' data sheets: bf16 and fp16 on tensor cores, and fp32 without
# them. The rates with sparsity are twice as high.
_PEAKS = {
    r"A10": (125, 31.2),
    r"A30": (165, 10.3),
    r"A40": (149.7, 37.4),
    r"A100[- ].*": (312, 19.5),
    r"L4": (121, 30.3),
    r"L40": (181, 90.5),
    r"L40S": (362, 91.6),
    r"H100 80GB HBM3": (989, 67),
    r"H100 PCIe": (756, 51),
    r"H100 NVL": (835, 60),
    r"H200": (989, 67),
    r"H200 NVL": (835, 60),
    r"GH200 .*": (989, 67),
    r"B200": (2250, 75),
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of a GPU by its name, as torch gives it; None where they are not known, as for a slice of a GPU (MIG)."""
    for pattern, (half, single) in _PEAKS.items():
        if "MIG" not in device_name and re.fullmatch(f"NVIDIA {pattern}", device_name):
            # On the tensor cores of all of them, TF32 has half the rate of bf16, and float8, where they have it, twice.
            return 1e12 * {"fp32": single, "tf32": half / 2, "fp8": 2 * half}.get(precision, half)
    return None


def utilization(tokens_per_second: float, flops_per_token: int | None, precision: str) -> float | None:
    """The MFU of all ranks, from 0 to 1; None on CPUs and where the model's FLOPs or the GPU's peak are not known."""
    if flops_per_token is None or not torch.cuda.is_available():
        return None
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    peak = peak_flops(torch.cuda.get_device_name(), precision)
    return None if peak is None else tokens_per_second * flops_per_token / (dist.get_world_size() * peak)


def flops_per_token(model: PreTrainedModel, seq_length: int) -> int | None:
    """FLOPs of forward and backward pass per token: 6 for each weight that it is multiplied with, and attention.

    None where that is not how the model works: mixtures of experts, layers that are no attention or of several sizes.
    """
    config = model.config.get_text_config()
    if config.is_heterogeneous:  # what differs between its layers cannot be read
        return None
    layers, heads, size = (
        getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    has_experts = any("expert" in name for name in config.to_dict())
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers is None or not heads or size is None or has_experts or kinds - {"full_attention", "sliding_attention"}:
        return None
    head_dim = getattr(config, "head_dim", None) or size // heads
    # 6: a multiplication and an addition, once forward and twice backward (for the inputs and for the weights, if they
    # are trained).
    # 12: the same for two products of each head, queries with keys and attention with values.
    quantized = {module.weight: module for module in model.modules() if isinstance(module, Nf4Linear)}
    weights = 0
    for param in _multiplied(model):
        module = quantized.get(param)  # whose weight has the elements of its bytes
        size = module.in_features * module.out_features if module else param.numel()
        weights += (6 if param.requires_grad else 4) * size
    return weights + 12 * int(layers * heads * head_dim) * seq_length


def _multiplied(model: PreTrainedModel) -> list[nn.Parameter]:
    """Parameters without those that are only looked up: embeddings that are not the output's weights, too.

    And without those of an image tower, which no text passes.
    """
    outputs = model.get_output_embeddings()
    decoder = model if model.config.get_text_config() is model.config else model.get_decoder()
    embeddings = (module for module in decoder.modules() if isinstance(module, nn.Embedding))
    looked_up = {param for module in embeddings for param in module.parameters(recurse=False)}
    of_outputs = [*outputs.parameters()] if outputs else []
    return [*dict.fromkeys([*of_outputs, *(param for param in decoder.parameters() if param not in looked_up)])]
