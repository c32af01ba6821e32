"""Low-rank adapters (LoRA): which linear modules can have one, and how PEFT names and stores them.

As in Hu et al., LoRA (2021, arXiv:2106.09685): `y = W x + (lora_alpha / r) B A x`, with A (r, in) and B (out, r).
No torch here: the launcher and `plan` count adapters before torch is imported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stages.base.errors import StageError

ALL_LINEAR = "all-linear"
A, B = ".lora_A.weight", ".lora_B.weight"
"""What PEFT appends to the name of a module."""
WEIGHTS, CONFIG, STEM = "adapter_model.safetensors", "adapter_config.json", "adapter_model"
NF4_BYTES = 0.5625
"""Of a weight in NF4: 4 bits, and a 64th of a scale in fp32."""
PREFIX = "base_model.model."
"""Of what PEFT calls a tensor in the file."""
_NUM_SHOWN = 12


@dataclass(frozen=True)
class LinearKind:
    """The linear modules that have the same name in each layer, and for each expert."""

    modules: int
    weights: int
    """Values of their weights."""
    features: int
    """Sum of their `in_features` and `out_features`: each rank of adapters has as many parameters."""
    problem: str | None
    """Why an adapter of them would be lost or not trained; null: it is neither."""


def kind(name: str) -> str:
    """The name of a module without the numbers in it, which are those of layers and experts."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def choose(linears: Mapping[str, LinearKind], wanted: str | list[str], architecture: str) -> dict[str, LinearKind]:
    """The kinds of modules that get adapters, by name.

    Args:
        linears: Those in the layers of the model, by `kind`.
        wanted: As `lora_target_modules` in params.yaml: the ends of their names, or all of which adapters are trained.
        architecture: For the message.

    Raises:
        StageError: there is none, or one that is named has a problem.
    """
    fit = {name: linear for name, linear in linears.items() if linear.problem is None}
    if not fit:
        problems = sorted({linear.problem for linear in linears.values() if linear.problem})
        reason = "; ".join(problems) or "its layers have no linear modules of torch"
        raise StageError(f"lora_r is not possible with {architecture}: {reason}. Set it to null")
    if wanted == ALL_LINEAR:
        return fit
    found: dict[str, LinearKind] = {}
    for end in wanted:
        matching = {name: linear for name, linear in linears.items() if f".{name}".endswith(f".{end}")}
        allowed = f"use {ALL_LINEAR}, or some of {_list(fit)}"
        if not matching:
            raise StageError(
                f"lora_target_modules: {end!r} is no linear module in the layers of {architecture} (the embedding and "
                f"the LM head keep their weights): {allowed}"
            )
        for linear in matching.values():
            if linear.problem:
                raise StageError(f"lora_target_modules: {end!r}: {linear.problem}: {allowed}")
        found |= matching
    return {name: linear for name, linear in linears.items() if name in found}  # in the model's order


def num_parameters(kinds: Mapping[str, LinearKind], rank: int) -> int:
    """Parameters of the adapters of these modules."""
    return rank * sum(linear.features for linear in kinds.values())


def _list(names: Iterable[str]) -> str:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join([*ends[:_NUM_SHOWN], *["..."] * (len(ends) > _NUM_SHOWN)])


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter."""
    return name.endswith((A, B))


def peft_problem(targets: Iterable[str], has_joined_experts: bool) -> str | None:
    """What PEFT would do to adapters of these modules; None: it loads them as they are.

    Args:
        targets: Names of modules, or their kinds.
        has_joined_experts: Whether the experts of a layer are one parameter, and stored one by one.
    """
    ends = sorted({"gate_proj", "up_proj", "down_proj"}.intersection(name.rpartition(".")[2] for name in targets))
    if not (has_joined_experts and ends):
        return None
    return (
        f"PEFT may take adapters of {', '.join(ends)} for those of the experts, and drop them: use the merged model, "
        "or name other modules in lora_target_modules"
    )


def peft_config(
    targets: Iterable[str], others: Iterable[str], params: Mapping[str, Any], model_name: str, commit: str | None
) -> dict[str, Any]:
    """The content of adapter_config.json, as PEFT, vLLM and the converter of llama.cpp read it.

    Args:
        targets: The modules that have adapters.
        others: The other linear modules of the model, which must not be meant by a short name.
        params: Those of the training.
        model_name: Of the initial model.
        commit: Of its files; None: a local directory.
    """
    ends = {name: name.rpartition(".")[2] for name in targets}
    taken = {name.rpartition(".")[2] for name in others}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "revision": commit,
        "r": params["lora_r"],
        "lora_alpha": params["lora_alpha"],
        "lora_dropout": params["lora_dropout"],
        "target_modules": sorted({name if end in taken or end.isdigit() else end for name, end in ends.items()}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
