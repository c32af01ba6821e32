"""Processes that end with those who started them: one that is left over would write where the next run writes."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send `number` to this process when its parent ends, however it ends (Linux).

    Args:
        number: SIGKILL cannot be delayed, SIGTERM allows time to save.
        parent: The process that must still be the parent: it may have ended before this call, and the kernel would then
            send nothing. None where it is not known.
    """
    # The kernel keeps the request across exec, but children do not inherit it: each process asks for itself. Its parent
    # is the thread that started it, so that thread must live as long as the process is wanted.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os._exit(1)  # at once: nobody waits for cleanup, and the next run may have started
