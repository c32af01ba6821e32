"""What a launch does, given the checkpoints that are there: a table, and what is read and deleted around it."""

import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from stages.base.errors import StageError
from stages.base.files import FileEntry, write_sealed
from stages.base.identity import Adoption, RunIdentity, TokenFingerprints
from stages.base.params_file import load_params
from stages.checkpointing import decision, run
from stages.checkpointing.decision import Found, decide
from stages.checkpointing.layout import MANIFEST, CheckpointManifest, list_checkpoints, step_name, verify
from stages.checkpointing.run import Run
from stages.launching.runtime import TrainRuntime, how_to_resume
from stages.training.params import TrainParams
from tests.project import REPO
from tests.trainings import checkpoint_manifest, train_state

FINISHED = (10, 12)
"""Steps of the checkpoints of a run that is done: it has 12 steps an epoch."""


@dataclass(frozen=True)
class Case:
    """Which checkpoints are there, and what the launch of a run does."""

    name: str
    action: Literal["finished", "resume", "adopt", "extend", "start"]
    reason: str
    """A part of it."""
    continued: list[int] = field(default_factory=list)
    """Steps of the checkpoints that it may continue from, in their order."""
    ours: dict[str, Any] = field(default_factory=dict)
    """Parameters of the run, or other parts of its identity, where they are not those of `make_run`."""
    own: tuple[int, ...] = ()
    """Steps of its own checkpoints."""
    theirs: dict[str, Any] = field(default_factory=dict)
    """As `ours`, of another run."""
    others: tuple[int, ...] = ()
    """Steps of the checkpoints of that run."""
    resume: Literal["auto", "never"] = "auto"
    is_copy: bool = False
    has_router_loss: bool = False


LONGER = {"num_epochs": 2}
CASES = [
    Case("nothing is there", "start", "there is no checkpoint to continue from"),
    # Its own checkpoints.
    Case("finished", "finished", "at step 12: nothing to train", [12, 10], own=FINISHED),
    Case("killed", "resume", "its own step-00000004", [4, 2], own=(2, 4)),
    Case("its own go before those with more steps", "resume", "its own step-00000004", [4],
         {"batch_size": 4}, own=(4,), others=(10,)),
    Case("never", "start", "is never, which deletes 2 checkpoints", own=(2, 4), resume="never"),
    Case("never, and finished", "start", "is never", own=FINISHED, resume="never"),
    # Those of a run that computed the same until there.
    Case("less memory", "adopt", "identical until there", [10, 4], {"batch_size": 4}, others=(4, 10)),
    Case("less memory, routers", "start", "params.batch_size: 2 there, 4 here", [], {"batch_size": 4}, others=(10,),
         has_router_loss=True),
    Case("other attention", "adopt", "identical", [10], {"attention": "padded"}, others=(10,)),
    Case("other attention, routers", "start", "params.attention: 'auto' there, 'padded' here", [],
         {"attention": "padded"}, others=(10,), has_router_loss=True),
    Case("other sharding", "adopt", "identical", [10], {"fsdp": {"preset": "no_shard"}}, others=(10,)),
    Case("other validations", "adopt", "identical", [10], {"eval_rows": 5, "validation": "v2"}, others=(10,)),
    Case("other code, unfinished", "adopt", "identical", [10], {"code": "c2"}, others=(10,)),
    Case("other code, finished", "start", "has finished, with another code, and is not shorter", [],
         {"code": "c2"}, others=FINISHED),
    Case("same length, finished", "start", "has finished, with another batch_size, lr, and is not shorter", [],
         {"batch_size": 4, "lr": 0.5}, others=FINISHED),
    Case("longer, constant lr", "adopt", "identical", [12, 10], {**LONGER, "lr_schedule": "constant"},
         theirs={"lr_schedule": "constant"}, others=FINISHED),
    Case("longer, cosine to the same step", "adopt", "identical", [12, 10],
         {**LONGER, "lr_decay_steps": 12}, theirs={"lr_decay_steps": 12}, others=FINISHED),
    Case("longer, the stable phase of wsd", "adopt", "identical", [10, 8], {**LONGER, "lr_schedule": "wsd"},
         theirs={"lr_schedule": "wsd"}, others=(8, 10, 12)),
    Case("longer, the warm-up of cosine", "adopt", "identical", [2], LONGER, others=(2, 4, 12)),
    Case("longer, cosine", "start", " here: extend_from=", [], LONGER, others=FINISHED),
    Case("longer, cosine, unfinished", "start", "the learning rate of step 4 is", [], LONGER, others=(10,)),
    Case("shorter", "start", "it is at step 10, and this run has 8", [], {"max_steps": 8}, others=(10,)),
    Case("other lr", "start", "the learning rate of step 1 is", [], {"lr": 0.5}, others=(10,)),
    Case("other seed", "start", "params.seed: 0 there, 7 here", [], {"seed": 7}, others=(10,)),
    Case("other rows", "start", "it was trained on other tokens", [], {"train": "t2"}, others=(10,)),
    Case("other rows, finished", "start", "it was trained on other tokens", [], {"train": "t2"}, others=FINISHED),
    Case("other model", "start", "it began with another initial model", [], {"model": "m2"}, others=(10,)),
    Case("a schedule that is none", "start", "its schedule is none (lr: ", [], theirs={"lr": "high"}, others=(10,)),
    Case("never adopts", "start", "is never", [], {"batch_size": 4}, others=(10,), resume="never"),
    Case("best adopts nothing", "start", "export_from is best", [], {"export_from": "best"}, others=(10,)),
    Case("best is adopted", "adopt", "identical", [10], theirs={"export_from": "best"}, others=(10,)),
    Case("an experiment's copy adopts nothing", "start", "this is a copy", [], {"batch_size": 4}, others=(10,),
         is_copy=True),
    # One that `extend_from` names, which has other learning rates.
    Case("extend", "extend", "with another schedule", [12], {**LONGER, "lr": 0.5, "extend_from": "OTHER"},
         others=FINISHED),
    Case("extend again", "extend", "with another schedule", [12], {**LONGER, "extend_from": "OTHER"}, own=(14,),
         others=FINISHED, resume="never"),
    Case("extended and killed", "resume", "its own step-00000014", [14], {**LONGER, "extend_from": "OTHER"}, own=(14,),
         others=FINISHED),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_a_launch_does(case: Case, params: TrainParams) -> None:
    other = make_run(params, **case.theirs)
    ours = case.ours | ({"extend_from": other.run_id} if "extend_from" in case.ours else {})
    own = make_run(params, **ours)
    found = Found(
        own=dict(reversed(checkpoints(own, *case.own).items())),
        has_last=own.total_steps in case.own,
        others=checkpoints(other, *case.others),
        unsupported=[],
        is_copy=case.is_copy,
        has_router_loss=case.has_router_loss,
    )
    chosen = decide(own, case.resume, found)
    assert chosen.action == case.action
    assert case.reason in chosen.reason
    continued = own if case.action in ("finished", "resume") else other
    assert chosen.checkpoints == [continued.directory / step_name(step) for step in case.continued]


def test_a_foreign_checkpoint_in_the_directory_of_a_run_is_refused(params: TrainParams) -> None:
    own, other = make_run(params), make_run(params, seed=7)
    found = Found(checkpoints(other, 4), False, {}, [], False, False)
    with pytest.raises(StageError, match=r"belongs to another run; move it away\. It differs in\nparams.seed: 7 there"):
        decide(own, "auto", found)


def test_checkpoints_of_another_version_are_named(params: TrainParams) -> None:
    found = Found({}, False, {}, ["x has the format 1"], False, False)
    assert decide(make_run(params), "auto", found).reason.endswith("; x has the format 1")


def test_after_a_restart_never_means_what_this_launch_has_saved(
    params: TrainParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = make_run(params, batch_size=4), make_run(params)
    found = Found({}, False, checkpoints(other, 10), [], False, False)
    runtime = replace(load_params(TrainRuntime, "runtime", REPO / "params.yaml"), resume="never")
    variables = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    assert how_to_resume(runtime) == "never"
    assert how_to_resume(runtime, is_restart=True) == "own"
    for name in variables:
        for count, expected in (("1", "own"), ("0", "never")):
            monkeypatch.setenv(name, count)
            assert how_to_resume(runtime) == expected
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert how_to_resume(replace(runtime, resume="auto")) == "auto"
    assert decide(own, "auto", found).action == "adopt"
    assert decide(own, "own", found).action == "start"
    assert decide(own, "own", replace(found, own=checkpoints(own, 2))).action == "resume"


def test_the_checkpoint_that_differs_in_the_least_is_explained(
    params: TrainParams,
) -> None:
    near, far = make_run(params, lr=0.5), make_run(params, lr=0.5, seed=7, train="t2")
    others = {**checkpoints(far, 10), **checkpoints(near, 4)}
    found = Found({}, False, others, [], is_copy=False, has_router_loss=False)
    assert near.run_id in decide(make_run(params), "auto", found).reason


def test_what_cannot_be_extended_is_an_error_that_lists_what_can(params: TrainParams) -> None:
    good = make_run(params, batch_size=4, lr=0.1, lr_schedule="linear")
    unfinished, long = make_run(params, lr=0.2), make_run(params, num_epochs=2)
    other = make_run(params, seed=1, weight_decay=0.5)
    others = checkpoints(good, 12) | checkpoints(unfinished, 10) | checkpoints(long, 24) | checkpoints(other, 12)
    for named, reason in (
        (unfinished, f"there is no finished run of this name in {good.directory.parent}"),
        (long, "steps: 24 there, only 24 here"),
        (other, "params.seed: 1 there, 0 here\nparams.weight_decay: 0.5 there, 0.1 here"),
    ):
        extending = make_run(params, num_epochs=2, lr=0.5, extend_from=named.run_id)
        with pytest.raises(StageError) as error:
            decide(extending, "auto", Found({}, False, others, [], False, False))
        message = f"extend_from: run {named.run_id} cannot be extended:\n{reason}\n"
        assert str(error.value) == f"{message}runs that can be extended: {good.run_id}"


@pytest.mark.usefixtures("here")
def test_a_run_starts_over_only_if_it_can() -> None:
    params = load_params(TrainParams)
    own = run.describe(replace(params, extend_from="0123456789abcdef"))
    write(own, 10)
    with pytest.raises(StageError, match="cannot be extended"):
        decision.begin(own, "never")
    assert len(list_checkpoints(own.directory)) == 1
    own = run.describe(params)
    write(own, 10)
    decision.begin(own, "never")
    assert list_checkpoints(own.directory) == []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("has_links", [True, False])
def test_what_is_adopted_stays_whatever_happens_to_the_other_run(
    request: pytest.FixtureRequest, has_links: bool
) -> None:
    """The next launch resumes, also where it would adopt nothing."""
    if not has_links:
        request.getfixturevalue("refuse_links")
    params = load_params(TrainParams)
    other, own = run.describe(replace(params, batch_size=4)), run.describe(params)
    for path in write(other, 2, 4):
        (path / "model").mkdir()
        for name in ("model/shard", "state.json", "history.tsv"):
            (path / name).write_text("x")
        train_state().write(path / "state.json")
        (path / "history.tsv").write_text("step\tvalidation_loss\n2\t1.5\n")
        files = {name: FileEntry.of(path / name) for name in ("model/shard", "state.json", "history.tsv")}
        replace(CheckpointManifest.read(path), files=files).write(path)
    (other.directory / step_name(4) / "model/shard").write_text("too long")  # it may turn out later, too
    adopted = own.directory / step_name(2)
    adopted.mkdir(parents=True)
    (adopted / "part").touch()  # of a checkpoint that somebody copies
    chosen = decision.begin(own, "auto")
    assert (adopted.with_suffix(".damaged") / "part").exists()
    assert (chosen.action, chosen.checkpoints) == ("adopt", [adopted])
    assert (adopted / "model/shard").stat().st_nlink == 1 + has_links
    before = CheckpointManifest.read(other.directory / step_name(2))
    shutil.rmtree(other.directory)
    manifest = verify(adopted)
    assert (manifest.run_id, manifest.identity, manifest.total_steps) == (own.run_id, own.identity, own.total_steps)
    assert manifest.adopted == Adoption(before.run_id, 2, ["params.batch_size: 4 there, 2 here"], None)
    for resume in ("auto", "own"):
        assert decision.begin(own, resume).reason.startswith(f"run {own.run_id} continues from its own step-00000002")


@pytest.mark.usefixtures("here")
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    params = load_params(TrainParams)
    other, own = run.describe(replace(params, batch_size=4)), run.describe(params)
    write(other, 2)

    def delete(run: Run, path: Path) -> Path:
        shutil.rmtree(path)
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(decision, "adopt", delete)
        assert decision.begin(own, "auto").action == "start"
    write(other, 2)
    with pytest.raises(StageError, match=r"no checkpoint in .* is valid; to start over, set runtime.resume=never"):
        decision.begin(own, "auto")  # it has no state.json


@pytest.mark.usefixtures("here")
def test_own_checkpoints_of_another_version_are_neither_skipped_nor_quarantined() -> None:
    own = run.describe(load_params(TrainParams))
    for path in write(own, 2, 4):
        write_sealed(path / MANIFEST, {"format": 1}, "sha256")
    for resume in ("auto", "own"):
        with pytest.raises(StageError, match=r"step-0000000.* has the format 1.*continue the run with the version"):
            decision.begin(own, resume)
    assert len(list_checkpoints(own.directory)) == 2
    assert "which deletes 2 checkpoints" in decision.begin(own, "never").reason
    assert not list_checkpoints(own.directory)


def make_run(params: TrainParams, **changes: Any) -> Run:
    """A run of 12 steps an epoch, with these parameters, or other parts of the identity, changed."""
    parts = {name: changes.pop(name, name[0]) for name in ("train", "validation", "model", "code")}
    ours = {"experiment_name": "test", "total_batch_size": 8, "num_epochs": 1, "warmup_steps": 2, **changes}
    fsdp = replace(params.fsdp, **ours.pop("fsdp", {}))
    params = replace(params, **ours, fsdp=fsdp)
    data = TokenFingerprints(parts["train"], parts["validation"])
    return Run(params, RunIdentity(asdict(params), data, parts["model"], parts["code"]), num_rows=96, seq_length=32)


def checkpoints(described: Run, *steps: int) -> dict[Path, CheckpointManifest]:
    """Checkpoints of a run at some steps, as far as a decision reads them, with the oldest first."""
    return {
        described.directory / step_name(step): checkpoint_manifest(
            run_id=described.run_id, identity=described.identity, step=step, total_steps=described.total_steps
        )
        for step in steps
    }


def write(described: Run, *steps: int) -> list[Path]:
    """The same on the disk: of each only its manifest."""
    found = checkpoints(described, *steps)
    for path, manifest in found.items():
        path.mkdir(parents=True, exist_ok=True)
        manifest.write(path)
    return [*found]
