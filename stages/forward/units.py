"""Which modules FSDP wraps: the weights of each are gathered together, and freed together."""

from torch import nn
from transformers import PreTrainedModel

from stages.base.errors import StageError
from stages.model import meta


def modules_to_wrap(model: nn.Module, classes: list[str]) -> list[nn.Module]:
    """The modules that FSDP wraps, whose weights are gathered together, in the order of the model.

    Args:
        model: Its parameters may be on the meta device.
        classes: Names of the classes of these modules.

    Raises:
        StageError: the classes would separate tied weights.
    """
    # FSDP shards a parameter with the innermost wrapped module around it; a tied one has two places, but one owner.
    modules = [module for module in model.modules() if type(module).__name__ in classes]
    _check_tied(model, modules, classes)
    return modules


def untied_embeddings(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The embedding and the LM head, which FSDP gathers by themselves; nothing where they share a weight."""
    if not isinstance(model, PreTrainedModel) or meta.tied_weights(model):
        return [], []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return (
        [embedding] if isinstance(embedding, nn.Embedding) else [],
        [head] if isinstance(head, nn.Linear) else [],
    )


def _check_tied(model: nn.Module, modules: list[nn.Module], classes: list[str]) -> None:
    for name, canonical in meta.tied_weights(model).items():
        first, second = (_innermost(model, modules, key) for key in (name, canonical))
        if first is not second:
            raise StageError(
                f"fsdp.wrap_layer_cls {','.join(classes)} would gather {canonical} and {name} separately, but they are "
                "one weight: use null"
            )


def _innermost(model: nn.Module, modules: list[nn.Module], name: str) -> nn.Module:
    """The wrapped module to which the parameter `name` belongs: `model` where it is in none of them."""
    path = name.split(".")[:-1]
    ancestors = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), 0, -1)]
    return next((module for module in ancestors if module in modules), model)
