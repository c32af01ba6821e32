"""Turning errors of torch that a parameter causes into advice."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from stages.artifacts.errors import StageError

_CAUSES = (
    (
        r"does not have a deterministic implementation|CUBLAS_WORKSPACE_CONFIG",
        "deterministic",
        "set it to false, or use another model or attention",
    ),
    (
        r"cached during selective activation checkpoint has been mutated",
        "activation_checkpointing selective_op",
        "use full or selective: a layer of this model overwrites a result that would be kept",
    ),
)
"""A sign in the message, the parameter at fault, and what to do."""


@contextmanager
def explain_torch_errors() -> Iterator[None]:
    """Turn an error of torch into one that names the parameter to change.

    Raises:
        StageError: an operation has no deterministic form, a layer cannot be compiled, or does not allow selective_op.
    """
    try:
        yield
    except RuntimeError as error:
        for sign, name, remedy in _CAUSES:
            if re.search(sign, str(error)):
                raise StageError(f"{name}: {remedy} ({_summary(error)})") from None
        if type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.")):
            raise StageError(
                f"compile: a layer of the model cannot be compiled as one graph: set it to false ({_summary(error)})"
            ) from None
        raise


def _summary(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
