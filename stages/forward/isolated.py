"""Calls in a process of their own, on GPUs: there an error of one kernel makes all later ones of the process fail."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from stages.base.process import die_with_parent

T = TypeVar("T")


def isolated(device: str, function: Callable[..., T], *args: Any) -> T:
    """Call `function`, on GPUs in a process that ends with the call, with the same device and the same precision.

    In this process where the compute mode of the GPU is exclusive: no other one gets it.

    Args:
        device: `cuda` or `cpu`.
        function: Of a module; it catches its errors, as not every class of them passes to another process.
        args: Its arguments.

    Raises:
        RuntimeError: the process was ended, as by a segmentation fault.
    """
    if device != "cuda":
        return function(*args)
    settings = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _start, (os.getpid(), *settings)) as executor:
        try:
            if torch.cuda.is_available() and not executor.submit(_use_gpu, torch.cuda.current_device()).result():
                return function(*args)
            return executor.submit(function, *args).result()
        except BrokenProcessPool:
            raise RuntimeError("the process that computes it was ended") from None


def _start(parent: int, matmul_precision: str, cudnn_tf32: bool, deterministic: bool) -> None:
    die_with_parent(signal.SIGKILL, parent)
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32 = cudnn_tf32
    torch.use_deterministic_algorithms(deterministic)


def _use_gpu(index: int) -> bool:
    try:
        torch.cuda.set_device(index)
        torch.ones((), device="cuda")
    except RuntimeError:
        return False
    return True
