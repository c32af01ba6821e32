"""An hour of training with a checkpoint every few seconds: what it holds at the end, compared with its beginning.

    python -m benchmarks.soak                  # an hour
    python -m benchmarks.soak --minutes 10 --work /mnt/small-disk

Every two seconds it counts the memory, file descriptors, threads and processes of the whole launch, and the bytes below
outputs/. The first tenth is left out, in which caches fill. Growth is that of the minimum of the last tenth beside the
minimum of the second one: what is held between two saves, however long these take on a busy disk. A row of history for
each step is the only thing that may grow.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.growth import ENVIRONMENT, prepared, set_runtime
from benchmarks.tables import markdown

SECONDS = 2
FORMATS = {"second tenth": "{:.1f}", "last tenth": "{:.1f}", "growth": "{:.1%}"}


def sample(process: psutil.Process, outputs: Path) -> dict[str, float]:
    """What a launch holds at this moment."""
    found = {"memory (MiB)": 0.0, "file descriptors": 0.0, "threads": 0.0, "processes": 0.0}
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            found["memory (MiB)"] += member.memory_full_info().pss / 2**20
            found["file descriptors"] += member.num_fds()
            found["threads"] += member.num_threads()
            found["processes"] += 1
    return {**found, "disk (MB)": sum(_sizes(outputs)) / 1e6, "files": float(len([*_sizes(outputs)]))}


def _sizes(directory: Path) -> Iterator[int]:
    for root, _, names in os.walk(directory):  # which passes over directories of a checkpoint that was pruned
        for name in names:
            with suppress(FileNotFoundError):
                yield os.stat(os.path.join(root, name)).st_size


def soak(project: Path, minutes: float) -> tuple[list[dict[str, float]], str]:
    """Train for so long, then ask the training to stop; returns the samples and what it printed last.

    Raises:
        SystemExit: it ended by itself.
    """
    command = [sys.executable, "-m", "stages.launch"]
    samples: list[dict[str, float]] = []
    with (project / "log.txt").open("w+") as log:
        process = subprocess.Popen(command, cwd=project, env=ENVIRONMENT, stdout=log, stderr=log)
        end = time.monotonic() + 60 * minutes
        try:
            while time.monotonic() < end and process.poll() is None:
                time.sleep(SECONDS)
                with suppress(psutil.NoSuchProcess):
                    samples.append(sample(psutil.Process(process.pid), project / "outputs"))
            has_ended = process.poll() is not None
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(300)
        log.seek(0)
        last_lines = "".join(log.readlines()[-3:])
        if has_ended:
            raise SystemExit(f"the training has ended before its time:\n{last_lines}")
        return samples, last_lines


def compare(samples: list[dict[str, float]]) -> str:
    """The minima of the second and of the last tenth of the time, as a table."""
    tenth = max(1, len(samples) // 10)
    rows: dict[str, dict[str, float | None]] = {}
    for name in samples[0]:
        parts = (samples[tenth : 2 * tenth], samples[-tenth:])
        first, last = (min(each[name] for each in part) for part in parts)
        rows[name] = {"second tenth": first, "last tenth": last, "growth": last / first - 1}
    return markdown("held", rows, FORMATS)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--work", type=Path, help="directory for temporary files, on a small disk")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        project = prepared(Path(work), 1, num_epochs=1_000_000, max_steps=10_000_000, eval_freq=50)  # the best is kept
        set_runtime(project, ckpt_minutes=0.05, ckpt_freq=None, log_freq=1000, nproc_per_node=2)
        samples, last_lines = soak(project, args.minutes)
        print(f"{len(samples)} samples in {args.minutes:g} minutes\n\n{compare(samples)}\n{last_lines}")


if __name__ == "__main__":
    main()
