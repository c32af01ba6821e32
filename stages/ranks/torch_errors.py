"""Turning errors of torch into advice, at the boundary of a rank."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from stages.base.errors import StageError, is_out_of_memory, one_line

_OF_OTHER_RANKS = re.compile("gloo|Wait timeout")
"""Of gloo and the FileStore, whose errors have no class of their own."""

_OF_PARAMETERS = {
    r"does not have a deterministic implementation|CUBLAS_WORKSPACE_CONFIG": (
        "deterministic: set it to false, or use another model or attention"
    ),
    r"cached during selective activation checkpoint has been mutated": (
        "activation_checkpointing selective_op: use full: a layer of this model overwrites a result that "
        "would be kept"
    ),
    r"^torch\._dynamo\.exc\.(Unsupported|UserError)": (
        "compile: a layer of the model cannot be compiled as one graph: set it to false"
    ),
    r"^torch\._(dynamo|inductor)\..*(InvalidCxxCompiler|Failed to find C compiler)": (
        "compile: torch finds no compiler of C++: install g++, or name one in CXX and CC; or set compile to false"
    ),
    r"^torch\._(dynamo|inductor)\.": (
        "compile: the compiler failed, which need not be because of the model: mend the cause, or set it to false"
    ),
}  # fmt: skip
"""A sign in the class of the error or in its message, the parameter at fault, and what to do: the first that fits."""


class LostConnection(Exception):
    """Another rank has ended, or does not answer."""


def is_of_ranks(error: BaseException) -> bool:
    """Whether an error says that memory ran out, or that another rank has ended or does not answer."""
    is_of_others = isinstance(error, RuntimeError) and _OF_OTHER_RANKS.search(str(error))
    return is_out_of_memory(error) or isinstance(error, dist.DistError) or bool(is_of_others)


@contextmanager
def explain_torch_errors(who: str, if_out_of_memory: str) -> Iterator[None]:
    """Turn an error of torch into one that names what to change.

    Args:
        who: This process, such as `rank 3`.
        if_out_of_memory: What to change, such as `use batch_size 1`.

    Raises:
        StageError: this process is out of memory, an operation has no deterministic form, or a layer cannot be compiled
            or does not allow selective_op.
        LostConnection: to another rank, which prints its own reason, unless it was killed.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            reason = one_line(str(error).rpartition("err == 0. ")[2])  # without the line in torch's source
            raise StageError(f"{who} is out of memory{f' ({reason})' if reason else ''}: {if_out_of_memory}") from None
        if is_of_ranks(error):
            # The rank that is at fault prints the cause; the others would bury it under a traceback each.
            raise LostConnection(f"{who} lost the connection to another rank ({one_line(error)})") from None
        for sign, advice in _OF_PARAMETERS.items():
            if re.search(sign, f"{type(error).__module__}.{type(error).__qualname__}: {error}", re.DOTALL):
                # Of a compiler that was called, what it printed: the command alone fills a line.
                raise StageError(f"{advice} ({one_line(str(error).rpartition('Output:')[2])})") from None
        raise
