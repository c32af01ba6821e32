"""The process group of the training: one rank per device, NCCL on GPUs, gloo on CPUs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stages.artifacts.errors import StageError

T = TypeVar("T")


class LostConnection(Exception):
    """Another rank has ended, or does not answer."""


@contextmanager
def process_group(mesh_shape: tuple[int, int], timeout_minutes: float) -> Iterator[DeviceMesh]:
    """Join the process group that torchrun describes in the environment; yields the device mesh of its ranks.

    The mesh has one axis, `fsdp`, over which the model is sharded, and before it, where there are several copies of the
    model, the axis `replicate`.

    Args:
        mesh_shape: Copies of the model, ranks that share each.
        timeout_minutes: After this time without an answer another rank counts as lost.

    Raises:
        LostConnection: to another rank, which prints its own reason, unless it was killed.
    """
    timeout = timedelta(minutes=timeout_minutes)
    copies, size = mesh_shape
    # Of a mesh with two axes, fully_shard replicates over the first and shards over the second.
    shape, names = ((size,), ("fsdp",)) if copies == 1 else ((copies, size), ("replicate", "fsdp"))
    try:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            # gloo beside NCCL: checkpoints and decisions are exchanged on the CPU, where they do not wait for the GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        yield init_device_mesh(device_type(), shape, mesh_dim_names=names)
    except RuntimeError as error:
        # The rank that is at fault prints the cause; the others would bury it under a traceback each.
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # gloo's errors have no class of their own
            reason = f" ({str(error).partition(chr(10))[0]})" if isinstance(error, dist.DistError) else ""
            raise LostConnection(f"rank {os.environ['RANK']} lost the connection to another rank{reason}") from None
        raise
    # Not after an error: NCCL would wait here for ranks that in turn wait for this one.
    dist.destroy_process_group()


def device_type() -> str:
    """`cuda` where there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_rank0() -> bool:
    """Whether this is rank 0, which alone prints, decides and publishes."""
    return dist.get_rank() == 0


def all_reduce_sum(*values: float) -> list[float]:
    """The sum of each number over all ranks, in double precision: counts and flags stay exact.

    The tensor is on the CPU, so gloo carries it and the GPU's queue is not waited for.
    """
    total = torch.tensor(values, dtype=torch.float64, device="cpu")  # (len(values),)
    dist.all_reduce(total)
    return [float(value) for value in total]


def run_on_rank0(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `function` on rank 0 and return its result, or raise its `StageError`, on all ranks.

    A decision that depends on the file system is made once: two ranks may see different directory listings, and ranks
    that resume from different checkpoints would train a mix.
    """
    answer: list[Any] = [None, None]
    if is_rank0():
        try:
            answer[0] = function()
        except (StageError, OSError) as error:
            answer[1] = _as_stage_error(error)
    # An error is broadcast as well: the other ranks would wait here until the timeout.
    dist.broadcast_object_list(answer, src=0, group=group)
    if answer[1] is not None:
        raise answer[1]
    return cast(T, answer[0])


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `function` on every rank and return all results in rank order; if it fails on one, all ranks raise."""
    # An error is gathered like a result: a rank that raised at once would leave the others waiting for it.
    outcome: Any
    try:
        outcome = (function(), None)
    except (StageError, OSError) as error:
        outcome = (None, _as_stage_error(error))
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=group)
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise StageError(f"rank {rank}: {failure}")
    return [result for result, _ in outcomes]


def _as_stage_error(error: StageError | OSError) -> StageError:
    # The message that `command.run` prints for an OSError, so that all ranks report the same one.
    if isinstance(error, OSError):
        return StageError(f"{error.filename or 'input/output'}: {error.strerror or error}")
    return error
