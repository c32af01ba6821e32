"""Signals that ask a training to stop: how they reach the ranks, and how a rank remembers them."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

INTERRUPTED = 75
"""Exit status of a training that was stopped by a signal and has saved: EX_TEMPFAIL, try again. It must not be 0, or
DVC would record a half-trained run as the result of the stage."""

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
"""Those that ask a training to save and exit."""


class StopSignal:
    """Remembers that a signal asked this process to stop; the training looks at it between two steps."""

    def __init__(self) -> None:
        self.received = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        # The launcher blocked them for its children: one that came while this process started is delivered here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def ignore(self) -> None:
        """From here on the signals do nothing.

        At exit Python restores their default action, which kills the process: a late signal would turn a finished
        training into a failed one.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _remember(self, number: int, frame: object) -> None:
        # No more than that: a handler runs between any two instructions, also in the middle of a save.
        self.received = True


def on_stop_signal(call: Callable[[], None]) -> None:
    """From here on, each stop signal calls `call` in a thread, and does nothing else to this process.

    The signals are blocked in this thread, and so in the children until their `StopSignal` is ready: none is lost, and
    none kills a child that is still starting.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def wait() -> None:
        while True:
            signal.sigwait(STOP_SIGNALS)
            call()

    # A thread, as the main one waits for the ranks; a daemon, as sigwait never returns where no signal comes.
    threading.Thread(target=wait, daemon=True).start()


def stop_ranks() -> None:
    """Ask the ranks, the children of this process, to save and exit. It waits until there are some."""
    # One that comes before the ranks are started waits for them, as nothing else would pass it on.
    while not psutil.Process().children():
        time.sleep(0.1)
    send_to_ranks(signal.SIGTERM)  # all four mean the same to a rank


def send_to_ranks(number: signal.Signals) -> None:
    """Send a signal to the ranks, the children of this process."""
    for rank in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
