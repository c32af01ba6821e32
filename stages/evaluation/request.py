"""What `evaluate` asks the ranks of this machine, and what they answer."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil

from stages.base.command import format_gib
from stages.base.files import JsonFile
from stages.base.publish import read_json
from stages.export.evaluation import Sample
from stages.model import headers
from stages.model.files import CONFIG
from stages.ranks import asking
from stages.ranks.memory import memory_limit

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Trained:
    """What the training has measured, on the rows that are measured first."""

    loss: float
    """Nats per token."""
    step: int
    allowed: float
    """By how many nats per token the loss may change in the export."""
    lora_base: str | None = None
    """nf4: the training computed with quantized weights, and the export has those of the files."""


@dataclass(frozen=True)
class Request(asking.Request):
    """What to measure, and how."""

    STAGE: ClassVar[str] = "evaluate"

    model: str
    """Path of its directory."""
    weights: list[str]
    """Its safetensors files."""
    initial: str | None
    """The directory of the initial model, if it has weights and samples of it are wanted."""
    initial_weights: list[str]
    layer_classes: list[str]
    """Classes of its layers, by which it can be sharded."""
    eos_token_id: int
    """That ends the documents."""
    eval_rows: int | None
    """Rows that the training has measured; null: all."""
    batch_size: int
    """Rows per forward pass."""
    document_mask: bool
    num_samples: int
    trained: Trained | None
    """null: there is no loss to compare with."""

    @property
    def directory(self) -> Path:
        """Of the model."""
        return Path(self.model)


@dataclass(frozen=True)
class LossSum:
    """What was measured on some rows."""

    rows: int
    tokens: int
    """Predicted."""
    nats: float
    """Summed over them."""


@dataclass(frozen=True)
class Measurements(JsonFile):
    """What the ranks found."""

    STAGE: ClassVar[str] = "evaluate"

    num_parameters: int
    eval_rows: LossSum
    """Of the rows that the training has measured too."""
    others: LossSum
    """Of all other rows."""
    samples: list[Sample]
    sources: dict[str, LossSum] = field(default_factory=dict)
    """Of all rows of each source; none: they are of all files."""


def change_of_export(dtype: str, lora_base: str | None) -> tuple[str, str]:
    """What changes the loss in an export with weights in `dtype`, and what to do where that is too much.

    Both are "" where nothing may change it.
    """
    if lora_base:
        return (
            "merging adapters that were trained beside weights in NF4 into those of the files",
            "Use the adapter beside weights in NF4, or train with lora_base null",
        )
    if dtype not in ("bfloat16", "float16"):
        return "", ""
    return f"rounding to {dtype}", "Set export_dtype: fp32, or with LoRA use the adapter, which is exact"


def ask_ranks(request: Request, nproc_per_node: int | None) -> Measurements:
    """See `asking.ask`."""
    return asking.ask("stages.evaluation.rank", request, Measurements, nproc_per_node, remedies)


def weight_bytes(directory: Path, weights: list[str], dtype: "torch.dtype | None" = None) -> int:
    """Bytes of the weights of a model in `dtype`; None: in that in which they are computed with."""
    stored = headers.read(directory, weights)
    return (dtype or computed_dtype(directory)).itemsize * sum(math.prod(tensor.shape) for tensor in stored.values())


def computed_dtype(directory: Path) -> "torch.dtype":
    """That of the weights on a GPU; on CPUs fp32: bf16 takes seven times as long on one without bf16 instructions."""
    import torch

    stored: torch.dtype = getattr(torch, stored_dtype(directory))
    return stored if torch.cuda.is_available() else torch.float32


def stored_dtype(directory: Path) -> str:
    """The dtype of a model's weights, as its config.json names it."""
    dtype: str = read_json(directory / CONFIG)["dtype"]
    return dtype


def free_memory() -> int:
    """Bytes of this machine's memory that can be used, or of that of its job."""
    return min(int(psutil.virtual_memory().available), memory_limit())


def remedies(request: Request, num_ranks: int) -> str:
    """What needs less memory, in words, and how much the weights need."""
    found = []
    if request.batch_size > 1:
        found.append(f"eval_batch_size {request.batch_size // 2} (of the training too, which then runs again)")
    return remedies_for(weight_bytes(request.directory, request.weights), num_ranks, found)


def remedies_for(num_bytes: int, num_ranks: int, found: list[str]) -> str:
    """The same for weights of so many bytes, after what was found already."""
    import torch

    weights = format_gib(num_bytes)
    if torch.cuda.is_available():
        if num_ranks < torch.cuda.device_count():
            found.append(f"more ranks than {num_ranks} (runtime.nproc_per_node) if a copy of the model does not fit")
        found.append("GPUs with more memory")
        needed = f"{weights} on each GPU, or on all together if a copy does not fit"
    else:
        if num_ranks > 1:
            found.append(f"fewer ranks than {num_ranks} (runtime.nproc_per_node)")
        found.append("a machine with more memory")
        where = f", in each of {num_ranks} ranks or shared by them" if num_ranks > 1 else ""
        needed = f"{weights} in fp32{where}, and {format_gib(free_memory())} were free"
    return f"{', or '.join(filter(None, [', '.join(found[:-1]), found[-1]]))}: the weights need {needed}"
