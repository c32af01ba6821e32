"""Low-rank adapters (LoRA) in a model: its weights stay, and some of its linear modules get a trained summand.

`y = W x + (lora_alpha / r) B A dropout(x)`. A and B are fp32, like all that is trained. W is kept in the dtype that the
layers compute in, to which FSDP2 would cast it at each gathering: the same gradients bit for bit, with half the memory.
With `lora_base: nf4` it is quantized.
Modules keep their names, so the weights of the model are found as always, and those of adapters are named as in PEFT.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stages.base.errors import StageError
from stages.building.nf4 import BLOCK, Nf4Linear
from stages.building.params import BuildParams
from stages.building.sharding import compute_dtype
from stages.building.weights import local_rows, seeded
from stages.model import meta
from stages.model.adapters import ALL_LINEAR, B, choose, is_adapter, kind
from stages.model.manifest import ModelManifest


class LoraLinear(nn.Linear):
    """A linear module with an adapter. An `nn.Linear` becomes one by its class, as an LM head becomes a `LossHead`."""

    def add(self, rank: int, scale: float, dropout: float) -> None:
        """Add the matrices, on the meta device: as modules, so that they have PEFT's names, and FSDP2 casts them."""
        options: dict[str, Any] = {"bias": False, "device": "meta", "dtype": torch.float32}
        self.lora_A = nn.Linear(self.in_features, rank, **options)
        self.lora_B = nn.Linear(rank, self.out_features, **options)
        self.lora_dropout, self.scale = nn.Dropout(dropout), scale

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        summand: Tensor = self.lora_B(self.lora_A(self.lora_dropout(input)))
        return super().forward(input) + summand * self.scale


class LoraNf4Linear(LoraLinear, Nf4Linear):
    """The same with a quantized weight."""


def add_adapters(model: nn.Module, manifest: ModelManifest, params: BuildParams) -> None:
    """Freeze a meta model, in the dtype of the computation, and add adapters without values.

    Raises:
        StageError: `lora_target_modules` names a module that cannot have an adapter, or a weight cannot be quantized.
    """
    assert params.lora_r
    adapted = choose(manifest.linears, params.lora_target_modules, manifest.architecture)
    # Of others the model takes the weight by itself.
    quantized = choose(manifest.linears, ALL_LINEAR, manifest.architecture) if params.lora_base == "nf4" else {}
    dtype = compute_dtype(params.precision)
    for param in model.parameters():  # not the buffers, which FSDP2 does not cast either
        param.requires_grad_(False)
        param.data = param.data.to(dtype)
    for name, module in meta.find_linears(model, manifest.layer_classes).items():
        if kind(name) in quantized:
            if module.in_features % BLOCK:
                raise StageError(
                    f"lora_base nf4 quantizes {BLOCK} values together, and {name} of {manifest.architecture} has rows "
                    f"of {module.in_features}: set it to null"
                )
            module.__class__ = Nf4Linear
            assert isinstance(module, Nf4Linear)
            module.pack(dtype)
        if kind(name) in adapted:
            module.__class__ = LoraNf4Linear if kind(name) in quantized else LoraLinear
            assert isinstance(module, LoraLinear)
            module.add(params.lora_r, params.lora_alpha / params.lora_r, params.lora_dropout)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Fill the adapters as PEFT does: A uniformly (He et al., 2015, a = sqrt(5)), B with 0: nothing changes yet.

    Each A has a seed of its own, so its values are the same on any number of ranks.
    """
    for name, param in model.named_parameters():
        if not is_adapter(name):
            continue
        assert isinstance(param, DTensor)
        if name.endswith(B):
            param.to_local().zero_()
            continue
        with seeded(f"{seed}/{name}"):
            whole = torch.empty(param.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        param.to_local().copy_(whole[local_rows(param)])
