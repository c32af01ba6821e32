"""Signals that ask a training to stop, and how a rank remembers them."""

import atexit
import os
import signal
import threading
from collections.abc import Callable

from stages.ranks import handoff

INTERRUPTED = 75
"""Exit status of a training that was stopped by a signal and has saved: EX_TEMPFAIL, try again. It must not be 0, or
DVC would record a half-trained run as the result of the stage."""

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
"""Those that ask a training to save and exit."""


def _heeded() -> set[signal.Signals]:
    """Those that are not ignored from the start, as SIGHUP is under `nohup`."""
    return {number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at the first of them that is not ignored, or at a few that come together, one after the other.

    Never within a call of it, which another signal may interrupt: both would wait for its locks, as that of an `Event`.
    """
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        if not received:
            received.append(number)
            stop()

    for number in _heeded():
        signal.signal(number, receive)
        # Python takes its handlers away before the process has ended, which the next signal would then kill.
        atexit.register(signal.signal, number, signal.SIG_IGN)


class StopSignal:
    """Remembers that a signal asked this process to stop; the training looks at it between two steps.

    Before the first step there is nothing to save: such a signal ends the process at once, also where it waits for the
    other ranks in a collective, in which no handler of Python would run. That is why a thread waits for the signals,
    which are blocked in all others. They stay blocked: one that comes when the training is done changes nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self._is_training = False
        self._lock = threading.Lock()
        self._signals = _heeded()  # a signal that is ignored would be waited for too, once it is blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        threading.Thread(target=self._wait, daemon=True).start()

    def training_starts(self) -> None:
        """From here on, signals are remembered."""
        if self._is_training:
            return
        handoff.tell_launcher(handoff.TRAINING)
        with self._lock:
            self._is_training = True

    def _wait(self) -> None:
        while True:
            received = signal.sigwaitinfo(self._signals)
            with self._lock:
                self.received = True
                if not self._is_training:
                    # torchrun ends the others when a rank has failed, which is no interruption of the training.
                    if (received.si_signo, received.si_pid) != (signal.SIGTERM, os.getppid()):
                        handoff.tell_launcher(INTERRUPTED)
                    os._exit(INTERRUPTED)
