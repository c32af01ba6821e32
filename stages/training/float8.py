"""Matrix products in 8 bits: `precision: fp8`, with torchao.

Inputs, weights and gradients of the linear layers are cast to float8 with one scale per tensor, computed from its
largest value each time (dynamic tensorwise scaling, torchao.float8). All else is as with bf16: the weights that are
updated and stored are fp32. torchao can also gather the weights in float8 (`enable_fsdp_float8_all_gather`); then the
parameters, and so the checkpoints, would contain a class of torchao, which nothing else could load.
"""

from torch import nn

from stages.base.errors import StageError


def convert_linears(layers: list[nn.Module]) -> None:
    """Have the linear layers inside `layers` compute in float8. Modules and parameters keep their names.

    The head is not in a layer, so it is not converted: its error would reach the loss directly.

    Raises:
        StageError: there is no linear layer that can compute in float8.
    """
    from torchao.float8 import convert_to_float8_training  # slow to import, and an extra

    converted = []

    def is_suitable(module: nn.Module, name: str) -> bool:
        # The GPU multiplies float8 matrices only where both dims are multiples of 16.
        suitable = isinstance(module, nn.Linear) and module.in_features % 16 == module.out_features % 16 == 0
        converted.extend([name] * suitable)
        return suitable

    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=is_suitable)
    if not converted:
        raise StageError(
            "precision fp8: no layer of the model has linear modules whose sizes are multiples of 16: use bf16"
        )
