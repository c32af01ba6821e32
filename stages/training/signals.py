"""Signals that ask a training to stop: how the launcher passes them on, and how a rank remembers them."""

import signal
import threading
import time
from collections.abc import Callable

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


def forward_stop_signals(on_signal: Callable[[], None]) -> None:
    """From here on, pass each stop signal on to the children of this process; it ends when they do.

    The signals are blocked in this thread, and so in the children until their `StopSignal` is ready: none is lost, and
    none kills a child that is still starting.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def forward() -> None:
        while True:
            signal.sigwait(STOP_SIGNALS)
            on_signal()
            # One that comes before the ranks are started waits for them, as nothing else would pass it on.
            while not (children := psutil.Process().children()):
                time.sleep(0.1)
            for child in children:
                child.send_signal(signal.SIGTERM)  # all four mean the same to a rank

    # A thread, as the main one waits for the ranks; a daemon, as sigwait never returns where no signal comes.
    threading.Thread(target=forward, daemon=True).start()
