"""Processes that end with those who started them."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send `number` to this process when its parent ends, however it ends (Linux).

    Args:
        number: SIGKILL cannot be delayed, SIGTERM leaves time to save.
        parent: The process that must still be the parent; None where it is not known.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os._exit(1)
