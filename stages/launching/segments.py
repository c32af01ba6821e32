"""Train a part of a run again, from one of its checkpoints to the next, and compare the results.

Training is a function of what identifies a run and of the checkpoint from which it goes on, so the same hardware gives
the same bits: weights, moments, history, and what else the next step needs. A checkpoint that something else has made
is found by the part that ends at it. The comparison at every later checkpoint is also a test of the resume, for this
pipeline and for any other.
"""

import dataclasses
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from stages.base import publish
from stages.base.errors import StageError
from stages.checkpointing import layout
from stages.checkpointing.decision import begin
from stages.checkpointing.layout import MODEL, OPTIMIZER, CheckpointManifest, list_checkpoints, step_name
from stages.checkpointing.metadata import stored_tensors
from stages.checkpointing.run import Run
from stages.checkpointing.state import Place, TrainState
from stages.launching.place import differences
from stages.launching.runtime import Launch, TrainRuntime
from stages.ranks import torchrun


class Segment(NamedTuple):
    """A part of a run."""

    start: Path | None
    """The checkpoint from which it goes on; None: the start of the run."""
    end: Path

    @property
    def name(self) -> str:
        return f"{self.start.name if self.start else 'start'} to {self.end.name}"


def find(run: Run, step: int | None) -> list[Segment]:
    """The parts between the checkpoints that the run still has, or the one that ends at a step.

    Raises:
        StageError: there is none.
    """
    checkpoints = list_checkpoints(run.directory)[::-1]
    adopted = CheckpointManifest.read(checkpoints[-1]).adopted if checkpoints else None
    found = [
        Segment(start, end)
        for start, end in zip([None, *checkpoints], checkpoints, strict=False)
        if not adopted or (start and CheckpointManifest.read(end).step > adopted.step)  # those before are another run's
    ]
    if not found:
        raise StageError(
            f"{run.directory} has no checkpoints to compare: params.yaml, data, model or code are not those of a run "
            "that was trained here, or its checkpoints were deleted"
        )
    chosen = [segment for segment in found if step is None or segment.end.name == step_name(step)]
    if not chosen:
        ends = ", ".join(str(int(segment.end.name.split("-")[1])) for segment in found)
        raise StageError(f"no part ends at step {step}; the checkpoints that are kept end parts at {ends}")
    return chosen


def content(checkpoint: Path) -> dict[str, str]:
    """Digests of all that the steps after a checkpoint depend on, and of nothing that tells when and where it was made.

    Raises:
        DamagedFile: naming the file.
    """
    manifest, state = layout.verify(checkpoint), TrainState.of(checkpoint)
    rest = {
        **{f"places of the {kind}'s tensors": stored_tensors(checkpoint / kind) for kind in (MODEL, OPTIMIZER)},
        "loss scaler": dataclasses.asdict(state.loss_scaler),
    }
    return {"result": manifest.result_sha256, **{name: publish.sha256_json(value) for name, value in rest.items()}}


def find_obstacle(run: Run, segment: Segment, here: Place | None) -> str | None:
    """Why a part may have other bits where it was trained again, as far as its end tells; None: it has the same.

    Args:
        run: The run.
        segment: Its part.
        here: Where that part was trained again.
    """
    manifest, place = CheckpointManifest.read(segment.end), TrainState.of(segment.end).place
    if place and here and (others := differences(manifest, place, here)):
        return "; ".join(others)
    if torch.cuda.is_available() and not run.params.deterministic:
        return "deterministic is false, and GPUs add in any order then"
    if place and place.since > (CheckpointManifest.read(segment.start).step if segment.start else 0):
        return "it was interrupted, and the checkpoint between, from which maybe other ranks went on, is deleted"
    return None


def train_again(run: Run, runtime: TrainRuntime, segment: Segment) -> tuple[dict[str, str], Place | None]:
    """Train a part again, beside the checkpoints of the run; returns the `content` of its end, and where that was.

    Raises:
        DamagedFile: a file of its start or of its end.
        StageError: the training fails.
    """
    end, place = CheckpointManifest.read(segment.end), TrainState.of(segment.end).place
    if segment.start:
        layout.verify(segment.start)
    num_ranks = place.ranks if place and place.nodes == 1 else None  # of several nodes there are not so many here
    again = dataclasses.replace(
        runtime, launcher="torchrun", num_nodes=None, nproc_per_node=num_ranks or runtime.nproc_per_node,
        ckpt_freq=end.step, ckpt_minutes=None, async_checkpoint=False, resume="auto", tracker="none", debug=False,
        profile_steps=None,
    )  # fmt: skip
    with _elsewhere(run.directory.parent) as root:
        if segment.start:
            shutil.copytree(segment.start, run.directory / segment.start.name, copy_function=publish.link)
        decision = begin(run, "auto")
        ranks = torchrun.Ranks(torchrun.count_local_ranks(again.nproc_per_node))
        if place and place.threads:  # where it goes on from a checkpoint, the ranks take that number themselves
            os.environ["OMP_NUM_THREADS"] = str(place.threads)
        Launch(run.params, again, run.identity, decision).hand_over()
        made, stopping, done = run.directory / step_name(end.step), threading.Event(), threading.Event()

        def watch() -> None:
            # The ranks end by themselves after the last step: a signal in that moment would be an error of torchrun.
            while end.step < run.total_steps and not done.wait(0.2):
                if (made / layout.MANIFEST).exists():
                    stopping.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with torchrun.shared_directory(ranks) as directory:
                torchrun.run("stages.train", ranks, directory, stopping=stopping)
        finally:
            done.set()
            watcher.join()
        if not (made / layout.MANIFEST).exists():
            raise StageError(f"{segment.name}: the training did not come to its end in {root}; see above")
        return content(made), TrainState.of(made).place


@contextmanager
def _elsewhere(beside: Path) -> Iterator[Path]:
    """Have checkpoints be in a temporary directory on the same disk."""
    before = os.environ.get("CHECKPOINT_ROOT")
    with publish.scratch(beside / layout.AGAIN) as root:
        os.environ["CHECKPOINT_ROOT"] = str(root.absolute())
        try:
            yield root
        finally:
            os.environ.pop("CHECKPOINT_ROOT")
            if before is not None:
                os.environ["CHECKPOINT_ROOT"] = before
