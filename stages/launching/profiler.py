"""A trace of some steps, and where the memory of the GPU went in them: `runtime.profile_steps`."""

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import profile

from stages.base.errors import as_stage_error
from stages.launching.console import print_line


class Profiler:
    """Records some steps of this rank; a context manager around the loop over the steps.

    The files are written after the last of these steps, or when the training ends before, also by an error: where
    memory ran out, the snapshot shows what it was used for.

    Args:
        steps: The first and the last step to record; None: none.
        directory: For the trace, which chrome://tracing and ui.perfetto.dev show, and on a GPU for the snapshot of its
            memory, which docs.pytorch.org/memory_viz shows.
    """

    def __init__(self, steps: tuple[int, int] | None, directory: Path) -> None:
        self._steps, self._directory = steps, directory
        self._recording: profile | None = None
        self._first = self._last = 0

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._finish()
        except RuntimeError:  # of a GPU that no longer works: the error of the training is the one to report
            if error is None:
                raise

    def before_step(self, step: int) -> None:
        """Start or finish the recording, where it is due before step `step`."""
        if self._steps is not None and self._steps[0] <= step <= self._steps[1]:
            if self._recording is None:
                self._start(step)
            self._last = step
        else:
            self._finish()

    def _start(self, step: int) -> None:
        self._first = step  # of a training that resumes in between, a later one than asked for
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(stacks="python")  # with those of C++, writing takes minutes
        self._recording = profile(record_shapes=True, profile_memory=True)
        self._recording.start()

    def _finish(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop()
        trace = self._directory / f"steps-{self._first}-{self._last}.trace.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(str(trace))
            if torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(str(trace).replace(".trace.json.gz", ".memory.pickle"))
        except OSError as error:  # the training does not depend on it
            print_line(f"profile_steps: no trace was written: {as_stage_error(error)}")
        else:
            print_line(f"profile_steps: the trace of steps {self._first} to {self._last} is {trace}")
        finally:
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)
