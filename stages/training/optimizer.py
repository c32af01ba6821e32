"""AdamW, with its moments in fp32 or in 8 bits."""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from stages.training.params import TrainParams

_MATRICES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NO_MATRIX = re.compile("bias|norm|scale|A_log|^D$", re.IGNORECASE)
"""In the name of a parameter or of its module's class, with or without dims for heads, experts or layers."""


def make_optimizer(model: nn.Module, params: TrainParams) -> Optimizer:
    """AdamW without weight decay on norms and biases."""
    weights = [param for param in model.parameters() if param.requires_grad]
    matrices = find_matrices(model)
    groups = [
        {"params": [param for param in weights if param in matrices], "weight_decay": params.weight_decay},
        {"params": [param for param in weights if param not in matrices], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # one group where no norm has weights
    options: dict[str, Any] = {"lr": params.lr, "betas": (params.adam_beta1, params.adam_beta2), "eps": params.adam_eps}
    if params.optimizer == "adamw_8bit":
        optimizer = _adamw_8bit(groups, options)
    else:
        optimizer = AdamW(groups, fused=True, **options)  # fused: one pass over a weight, not one per operation
    _allocate_state(optimizer)
    return optimizer


def find_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that weight decay is for: the weights of layers, embeddings and convolutions.

    The number of dims does not tell: norms and biases have two where each head or expert has its own, and the weights
    of experts are stacked in modules that torch has no class for.
    """
    return {
        param
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if _is_matrix(module, name, param)
    }


def _is_matrix(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    if isinstance(module, _MATRICES):
        return name == "weight"
    names_none = not any(_NO_MATRIX.search(each) for each in (name, type(module).__name__))
    return names_none and sum(size > 1 for size in param.shape) >= 2  # (1, 1, hidden) is a vector


def set_lr(group: dict[str, Any], lr: float | Tensor) -> None:
    """Set the learning rate of a parameter group; torchao keeps it in a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


@torch.no_grad()
def _allocate_state(optimizer: Optimizer) -> None:
    """Allocate the optimizer state by a step that changes nothing.

    torch does the same when it saves an optimizer without state, but then counts the step: a run whose first steps are
    skipped would depend on when it was saved.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0 * group["lr"]  # a new object: torchao's tensor, which is restored below, keeps its value
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    # AdamW's bias correction depends on the step: the first real one must be step 1.
    for state in optimizer.state.values():
        state["step"].zero_()


def _adamw_8bit(groups: list[dict[str, Any]], options: dict[str, Any]) -> Optimizer:
    from torchao.optim import AdamW8bit  # slow to import, and an extra
    from torchao.optim.subclass_8bit import OptimState8bit

    @OptimState8bit.implements(torch.ops.aten.new_empty.default)  # type: ignore[untyped-decorator]
    def new_empty(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What torch's stager makes of a moment for an asynchronous save, before it copies its parts."""
        moment, shape = args
        return OptimState8bit.zeros(shape, moment.signed, moment.block_size, kwargs["device"], moment.dtype)

    @OptimState8bit.implements(torch.ops.aten.slice.Tensor)  # type: ignore[untyped-decorator]
    def rows(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Some rows, for a checkpoint of other ranks. torchao refuses those that divide a block: here a plain copy."""
        moment, _, *ends = args[:4]
        codes, scale, size = moment.codes, moment.scale, moment.block_size
        start, end = (index * math.prod(moment.shape[1:]) for index in ends)
        if start % size or end % size:
            return function(moment.dequantize(), *args[1:], **kwargs)
        scale = scale[start // size : end // size]
        return OptimState8bit(function(codes, *args[1:], **kwargs), scale, moment.qmap, moment.signed, moment.dtype)

    on_cpu = groups[0]["params"][0].device.type == "cpu"

    class SkippingAdamW8bit(AdamW8bit):  # type: ignore[misc]  # torchao has no types
        """Skips a step where `found_inf` is 1, as torch's fused AdamW does; but here the CPU waits for the GPU.

        torchao compiles the update, once for each shape of a parameter. On CPUs that takes minutes, so it is not done.
        """

        _step_supports_amp_scaling = True  # GradScaler then gives it `found_inf`

        def step(self, closure: Any = None) -> Any:
            found_inf: Tensor | None = getattr(self, "found_inf", None)
            if found_inf is not None and found_inf.item():
                return None
            with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
                return super().step(closure)

    return SkippingAdamW8bit(groups, **options)
