"""`export_from: best`: the result is the checkpoint with the lowest validation loss, whatever happens to a training."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stages import launch, plan
from stages.base import history
from stages.base.dataset import Dataset
from stages.base.errors import StageError
from stages.base.history import SPEED, History
from stages.base.identity import Adoption
from stages.base.packed import VALIDATION
from stages.base.params_file import load_params
from stages.checkpointing import retention, run
from stages.checkpointing.layout import CheckpointManifest, list_checkpoints, step_name
from stages.checkpointing.pointer import RunPointer
from stages.checkpointing.state import TrainMetrics
from stages.training.params import TrainParams
from stages.work import arrow
from tests.project import Project, flip_bit, run_here
from tests.ranks import Ranks
from tests.trainings import checkpoint_manifest, names, newest_checkpoint

KILLED = -9
BEST = 6
"""The step of the lowest loss in `rising`; those of the steps 2 and 4 are the best until then."""


@pytest.fixture(scope="module")
def _risen(_training: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = _training.copy(tmp_path_factory.mktemp("risen") / "project")
    project.set(export_from="best", seed=2, lr=0.02, eval_freq=2)
    project.set(runtime={"ckpt_freq": None, "ckpt_minutes": None, "async_checkpoint": False})
    ranks.run(project)
    return project


@pytest.fixture
def risen(_risen: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A training whose validation loss rose again, as its tokens are random; it has saved nothing but best and last."""
    project = _risen.copy(tmp_path / "project")
    monkeypatch.chdir(project.path)
    return project


@pytest.fixture
def rising(risen: Project) -> Project:
    """The same before its run."""
    shutil.rmtree(risen / "outputs")
    return risen


def write_outs() -> str:
    """Write the outs of a finished training, as the launcher does; returns the content of run.json."""
    described = run.describe(load_params(TrainParams))
    launch.write_outs(described, described.directory / step_name(described.total_steps))
    return Path("outputs/test/run.json").read_text()


def losses() -> dict[float, float]:
    """The validation losses of history.tsv by step."""
    return dict(zip(*history.series(history.read(Path("outputs/history.tsv")), "validation_loss"), strict=True))


def test_the_best_step_is_the_newest_of_the_lowest_of_the_run_itself() -> None:
    table = History()
    for step, loss in enumerate([0.5, 0.9, 0.6, None, math.nan, 0.7, 0.6, 0.8]):
        table.add(step=step, epoch=0.0, validation_loss=loss)
    adopted = Adoption(run_id="zeroth", step=6, differences=[], adopted=None)
    assert table.best_step(None) == 6
    assert table.best_step(adopted) == 7
    assert table.best_step(replace(adopted, step=7)) is None
    assert history.lowest({2: math.nan, 1: math.inf}) is None


def test_the_checkpoint_that_is_kept_as_the_best_is_chosen_by_the_same_rule() -> None:
    losses = {9: math.nan, 8: None, 7: 0.7, 6: 0.6, 5: 0.6}
    found = [(Path(str(step)), checkpoint_manifest(step=step, validation_loss=loss)) for step, loss in losses.items()]
    assert retention.best(found) == retention.best(found[::-1]) == Path("6")
    assert retention.best(found[:2]) is None


def test_a_killed_training_exports_the_same_checkpoint(risen: Project, ranks: Ranks) -> None:
    """Killed during and after the save of the best, with other checkpoints by `runtime`."""
    reference, two = write_outs(), losses()
    assert risen.json("outputs/test/run.json")["step"] == BEST == min(two, key=two.__getitem__)
    assert risen.json("outputs/train_metrics.json")["steps"] == 12
    assert [path.name for path in list_checkpoints(risen.checkpoints())] == names(12, BEST)
    assert retention.best(retention.list_complete(risen.checkpoints())) == risen.checkpoints() / step_name(BEST)

    shutil.rmtree(risen / "outputs")
    risen.set(runtime={"async_checkpoint": True, "ckpt_freq": 3})
    ranks.run(risen, f"kill rank 0 at os.rename:.*{step_name(BEST)}.tmp$", KILLED)
    assert [path.name for path in list_checkpoints(risen.checkpoints())] == names(4, 3)
    ranks.run(risen, f"kill rank 1 at step {BEST + 2}", KILLED)
    risen.set(runtime={"ckpt_freq": 5})
    ranks.run(risen)
    assert write_outs() == reference


@pytest.mark.slow
def test_a_run_that_extends_another_exports_the_best_of_its_own_steps(rising: Project, ranks: Ranks) -> None:
    rising.set(export_from="last", lr=0.001)
    ranks.run(rising)
    extended = newest_checkpoint(rising, 12)
    (extended / SPEED).unlink()  # as of an older version
    manifest = CheckpointManifest.read(extended)
    replace(manifest, files={name: entry for name, entry in manifest.files.items() if name != SPEED}).write(extended)

    rising.set(export_from="best", extend_from=extended.parent.name, num_epochs=2, lr=0.1, lr_schedule="constant")
    rising.set(runtime={"ckpt_freq": 4})  # so that step 12 is saved by this run too
    ranks.run(rising, "kill rank 0 at step 15", KILLED)
    assert [path.name for path in list_checkpoints(newest_checkpoint(rising, 14).parent)] == names(14, 12)
    ranks.run(rising)
    write_outs()
    own = {step: loss for step, loss in losses().items() if step > 12}
    assert losses()[12] < min(own.values()) == own[14]
    pointer = RunPointer.read(Path("outputs/test/run.json"))
    assert pointer.step == 14
    assert pointer.adopted and pointer.adopted.step == 12
    cost = TrainMetrics.of(newest_checkpoint(rising, 24)).cost
    assert (cost.launches, cost.steps) == (2, 12), "those of the run itself"


def test_a_missing_or_damaged_best_checkpoint_is_named(risen: Project) -> None:
    write_outs()
    best = risen.checkpoints() / step_name(BEST)
    flip_bit(best / "model/__1_0.distcp", 100)
    write_outs()  # looks at sizes alone: consolidate reads, and verifies
    Path("outputs/test/run.json").unlink()
    with (best / "model/__1_0.distcp").open("ab") as file:
        file.write(b"more")
    output = run_here("launch", status=2)
    assert f"error: export_from is best, and that is step {BEST}, but " in output
    assert "model/__1_0.distcp is damaged" in output and "trains it again, here from the start" in output
    assert "Traceback" not in output
    shutil.rmtree(best)
    with pytest.raises(StageError, match=rf"that is step {BEST}, but .*{best.name}/manifest.json: No such file"):
        write_outs()
    assert not Path("outputs/test/run.json").exists()


def test_without_held_out_rows_best_is_refused_early_and_by_one_of_the_ranks(
    rising: Project, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(VALIDATION)
    VALIDATION.mkdir()
    Dataset(arrow.token_features(32), []).write(VALIDATION)
    message = "export_from is best, but no rows are held out .* set validation_splits to 1 or more, or export_from to"
    monkeypatch.setattr("sys.argv", ["plan"])
    with pytest.raises(StageError, match=message):
        plan.main()
    output = ranks.run(rising, status=2)
    assert output.count("export_from is best, but no rows are held out") == 1 and "Traceback" not in output
