"""Bit-exact repetition on GPUs: `deterministic: true`.

Without it a GPU adds in an order that varies, as in the backward pass of attention and where an embedding gathers its
gradient, so two runs differ by rounding. The part of cuBLAS and NCCL is in stages/training/environment.py.
"""

import torch


def use_deterministic_algorithms() -> None:
    """Have torch use only algorithms that give the same bits each time, and raise an error where there is none.

    The flag reaches the kernels of attention: those of flash and memory-efficient attention then add up their gradients
    in a fixed order, and `sdpa` avoids cuDNN's. The compiler chooses no kernel by timing it.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # It would fill all new memory with NaN, to show reads of what nobody has written: a pass over each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
