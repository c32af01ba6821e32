"""Processes that end with those who started them: one that is left over would write where the next run writes.

And limits of time and memory, for what somebody else has written.
"""

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a stage to stop."""

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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os._exit(1)  # at once: nobody waits for cleanup, and the next run may have started


@contextmanager
def raise_on_interrupt() -> Iterator[list[int]]:
    """In the block, the first signal to stop raises a KeyboardInterrupt, and all others are ignored.

    Yields an empty list, to which the signal is added: the interrupt may cause other errors.
    """
    # Those that are ignored already stay so, as Ctrl-C in what a shell runs in the background.
    numbers = [number for number in INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN]
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # what cleans up is not to be interrupted itself
        received.append(number)
        raise KeyboardInterrupt

    def again(lost: "sys.UnraisableHookArgs") -> None:
        # What is raised in a finalizer, or a callback of the garbage collector such as Dask's, does not leave it: with
        # Dask, 2 interrupts of 25. It would be the last one, so it is repeated after that.
        if received and lost.exc_type is KeyboardInterrupt:
            for each in numbers:
                signal.signal(each, stop)
            threading.Timer(0.01, os.kill, (os.getpid(), received.pop())).start()
        else:
            hook(lost)

    hook, sys.unraisablehook = sys.unraisablehook, again
    handlers = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield received
    finally:
        sys.unraisablehook = hook
        if not received:  # after an interrupt the others are ignored until the process ends
            for each, handler in handlers.items():
                if signal.getsignal(each) is stop:  # else the block has a use for the signal that does not end with it
                    signal.signal(each, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpone the signals to stop to the end of the block, so that nothing in it is left half-way."""
    if threading.current_thread() is not threading.main_thread():  # their handlers run in the main thread only
        yield
        return
    # Not by a signal mask: that of one thread leaves the signals to the others, and the main thread still handles them.
    received: list[int] = []

    def postpone(number: int, frame: object) -> None:
        received.append(number)

    handlers = {number: signal.signal(number, postpone) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


class _Timeout(BaseException):
    """No `Exception`: libraries catch those and go on, such as Jinja for an expression that it folds."""


@contextmanager
def limited(seconds: float, num_bytes: int) -> Iterator[None]:
    """Raise a TimeoutError or a MemoryError in the block where it needs more time, or more memory, than this.

    Time on a processor: a process may be suspended, as by Slurm or Ctrl-Z, or wait for a core. Only in the main thread
    of a process, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    has_passed, begun = False, time.thread_time()

    def stop(number: int, frame: object) -> None:
        nonlocal has_passed
        if time.thread_time() - begun >= seconds:
            has_passed = True
            raise _Timeout

    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + num_bytes
    before = signal.signal(signal.SIGALRM, stop)
    try:
        # Repeated: the process may have waited until then, and C++ code that calls Python may swallow what is raised.
        signal.setitimer(signal.ITIMER_REAL, seconds / 10, seconds / 10)
        resource.setrlimit(resource.RLIMIT_AS, (size if limits[1] < 0 else min(size, limits[1]), limits[1]))
        yield
    except BaseException:
        if not has_passed:
            raise
        # Also in place of an error that the interrupted code then makes, as contexts of torch do.
        raise TimeoutError(f"it took more than {seconds:g} seconds") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the garbage collector from searching again and again the objects of a large file that is read.

    It takes a quarter of the time for JSON with escapes and YAML, and three quarters for the `.metadata` of a
    checkpoint of 1 024 ranks, two million entries.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:  # a worker may be the stage itself, or a test
            gc.enable()
