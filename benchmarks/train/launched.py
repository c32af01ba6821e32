"""A training in other processes: read its lines, pause it, end it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil

from stages.base.process import die_with_parent

LINE = re.compile(r"step (\d+)/\d+ (?: loss ([\d.]+))?(?:.*peak ([\d.]+) GiB)?")
"""Of a step: the pipeline's own has its loss, and those of the other programs have the peak of memory."""


class Training:
    """A training that was started, read line by line."""

    def __init__(self, command: list[str], project: Path, environment: dict[str, str], errors: Path) -> None:
        self.command = command
        """The arguments of Python."""
        self.lines: dict[int, float] = {}
        """Seconds from the launch to the line of each step, pauses excluded."""
        self.peak = 0.0
        """GiB of rank 0 at the last line, of the GPU if there is one."""
        self.losses: list[float] = []
        """Of the pipeline that of each line, of the other programs the mean since the line before."""
        self._errors = errors
        self._start = time.perf_counter()
        self._paused_at: float | None = None
        with errors.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, *command], cwd=project, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=stderr, preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
            )  # fmt: skip

    def until(self, step: int) -> float:
        """Wait for the line of a step; returns its time."""
        while step not in self.lines:
            if not self._read_line():
                self._fail()
        return self.lines[step]

    def pause(self) -> None:
        """Stop all its processes until `unpause`."""
        self._signal(signal.SIGSTOP)
        self._paused_at = time.perf_counter()

    def unpause(self) -> None:
        """End a pause, if there is one."""
        if self._paused_at is not None:
            self._start += time.perf_counter() - self._paused_at
            self._paused_at = None
            self._signal(signal.SIGCONT)

    def finish(self) -> None:
        """Wait for its end."""
        self.unpause()
        while self._read_line():
            pass
        if self._process.wait():
            self._fail()

    def kill(self) -> None:
        """Kill all its processes, unless it has ended."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)

    def _read_line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if match := LINE.search(line):
            self.lines[int(match[1])] = time.perf_counter() - self._start
            if match[2]:
                self.losses.append(float(match[2]))
            self.peak = max(self.peak, float(match[3] or 0))
        elif line.startswith("losses "):
            self.losses = json.loads(line.removeprefix("losses "))
        return line

    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            process.send_signal(number)

    def _fail(self) -> NoReturn:
        status = self._process.wait()
        raise SystemExit(f"{self.command} ended with status {status}\n{self._errors.read_text()[-4000:]}")
