"""Take a checkpoint of another run into the directory of a run, which then resumes from it as from its own."""

import dataclasses
from pathlib import Path

from stages.base import publish
from stages.base.files import FileEntry
from stages.base.history import HISTORY, SPEED, History
from stages.base.identity import Adoption
from stages.checkpointing import retention
from stages.checkpointing.layout import verify
from stages.checkpointing.run import Run, differences
from stages.checkpointing.state import STATE, TrainState


def adopt(run: Run, checkpoint: Path) -> Path:
    """Publish a checkpoint of another run as one of `run`, and return where it is.

    The files of its tensors, which no program changes, get a second name, or are copied where the disk has no links. So
    the other run may delete its own. Small files are written again: time, memory and validations are those of one run.

    Raises:
        DamagedFile: a small file of it, or the size of a large one, is not as recorded.
        FileNotFoundError: its run deletes it now.
    """
    manifest = verify(checkpoint, contents=False)
    verify(checkpoint, names=[STATE, HISTORY])
    history = History((checkpoint / HISTORY).read_text(encoding="utf-8"))
    theirs, ours = manifest.identity, run.identity
    if theirs.data.validation != ours.data.validation or theirs.params["eval_rows"] != ours.params["eval_rows"]:
        history = history.without("validation_loss")  # of other rows: nobody may compare them with ours
    tensors = {name: entry for name, entry in manifest.files.items() if "/" in name}
    path = run.directory / checkpoint.name
    retention.quarantine(path)  # it may be a part of a checkpoint
    with publish.directory(path) as target:
        for name in tensors:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            publish.link(checkpoint / name, target / name)
        dataclasses.replace(TrainState.of(checkpoint), launches=0).write(target / STATE)
        publish.write_text(target / HISTORY, history.text())
        publish.write_text(target / SPEED, "")
        dataclasses.replace(
            manifest, run_id=run.run_id, total_steps=run.total_steps, identity=run.identity, validation_loss=None,
            adopted=Adoption(manifest.run_id, manifest.step, differences(theirs, ours), manifest.adopted),
            files=tensors | {name: FileEntry.of(target / name) for name in (STATE, HISTORY, SPEED)},
        ).write(target)  # fmt: skip
    return path
