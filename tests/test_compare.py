"""The page that compares experiments has all of them, the best one first, with what differs and their curves."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.repo import Repo

from stages import compare
from stages.artifacts import outputs
from stages.artifacts.errors import StageError
from stages.compare import Experiment
from tests import reports


def experiment(name: str, loss: float | None = None, state: str = "", **params: Any) -> Experiment:
    metrics = {} if loss is None else {"validation_loss": loss, "steps": 200}
    return Experiment(name, state, params, metrics, {"loss": ([1.0, 2.0], [loss + 1, loss])} if loss else {})


def lines(content: str) -> list[list[str]]:
    """The cells of each line of the table."""
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in content.splitlines() if line.startswith("<tr")]


def test_the_table_has_the_metrics_and_the_parameters_that_differ() -> None:
    content = compare.render(
        [
            experiment("<b>", 2.5, lr=0.1, seed=1),
            experiment("$x", 3.0, lr=0.2, seed=1),
            experiment("c", None, "queued", lr=None, seed=1),
        ]
    )
    assert '<th scope="col" class="number">lr</th>' in content
    assert lines(content) == [
        ["1. &lt;b&gt;", "finished", "2.5000", "200", "0.1"],
        ["2. $x", "finished", "3.0000", "200", "0.2"],
        ["3. c", "queued", "", "", "null"],
    ]
    assert content.count("<svg") == 1  # none of them was validated
    assert not re.search(r"<script|<link|https?://(?!www\.w3\.org)", content)


def test_of_many_experiments_the_best_have_a_color_and_a_number() -> None:
    content = compare.render([experiment(f"run {number}", 2.0 + number) for number in range(60)])
    assert content.count("stroke: var(--before)") == 54
    for color in ("blue", "orange", "green", "purple", "yellow", "red"):
        assert f"stroke: var(--{color})" in content
    assert len(lines(content)) == 60


def test_all_runs_of_a_project_are_there_once(empty_project: Path) -> None:
    for lr, loss in ((0.001, 3.0), (0.002, 2.0)):
        reports.make_records(lr=lr, loss=loss)
        reports.commit(f"lr {lr}")
    Path("notes.txt").write_text("a commit with the same run")
    reports.commit("notes")
    reports.git("checkout", "-qb", "other", "HEAD~2")
    reports.make_records(lr=0.004, loss=2.5)
    reports.commit("on another branch")
    reports.git("checkout", "-q", "main")
    reports.make_records(lr=0.002, loss=2.0)

    found = compare.find()
    assert [(one.metrics["validation_loss"], one.params["lr"]) for one in found] == [
        (2.0, 0.002),
        (2.5, 0.004),
        (3.0, 0.001),
    ]
    assert found[0].name.startswith("workspace, main")
    assert found[1].name == "other: on another branch"
    assert re.fullmatch(r"[0-9a-f]{9}: lr 0.001", found[2].name)
    assert all([len(curve[0]) for curve in one.curves.values()] == [200, 11] for one in found)
    assert "runtime.log_freq" not in found[0].params
    reports.cached(reports.add_to_cache(outputs.HISTORY)).unlink()
    assert [bool(one.curves) for one in compare.find()] == [False, True, True]


def test_a_loss_that_is_not_a_number_is_not_the_best() -> None:
    losses = [experiment("a", 2.0), experiment("b", float("nan")), experiment("c", 1.0), experiment("d", float("-inf"))]
    assert [one.loss for one in losses] == [2.0, float("inf"), 1.0, float("inf")]


def test_experiments_without_a_curve_take_no_color() -> None:
    found = [experiment(f"run {number}", 2.0 + number) for number in range(8)]
    without = [dataclasses.replace(one, curves={}) for one in found[:6]]
    content = compare.render([*without, *found[6:]])
    assert "stroke: var(--blue)" in content and "stroke: var(--orange)" in content
    assert "stroke: var(--before)" not in content
    assert "<!-- 7 -->" in content and "<!-- 8 -->" in content  # in the legend, the numbers of the table
    assert "no history.tsv of 6 of them" in content


def test_of_a_long_history_only_what_is_drawn_is_kept(empty_project: Path) -> None:
    reports.make_records(steps=5000)
    reports.commit("long")
    (found,) = compare.find()
    assert {name: len(steps) <= 801 for name, (steps, _) in found.curves.items()} == {
        "loss": True, "validation_loss": True
    }  # fmt: skip


def test_a_history_of_another_version_is_one_without_a_curve(empty_project: Path) -> None:
    reports.make_records()
    reports.commit("first")
    reports.cached(reports.add_to_cache(outputs.HISTORY)).write_text("step\tloss\n1\tx\n")
    (found,) = compare.find()
    assert found.metrics and not found.curves


def test_results_have_the_parameters_with_which_they_were_made(empty_project: Path) -> None:
    reports.make_records(lr=0.003)
    reports.commit("first")
    for lr in (0.4, 0.5):  # by a commit, and in the workspace
        Path("params.yaml").write_text(f"lr: {lr}\n")
        if lr == 0.4:
            commit_notes("another lr, without a run")
    (found,) = compare.find()
    assert found.params["lr"] == 0.003
    assert found.name.startswith("workspace, main")


def test_results_of_before_the_training_ran_again_are_not_shown(empty_project: Path) -> None:
    reports.make_records()
    reports.commit("first")
    lock = yaml.safe_load(Path("dvc.lock").read_text())
    lock["stages"]["evaluate"] = {"cmd": "true", "deps": [{"path": str(outputs.HISTORY), "md5": "of another training"}]}
    Path("dvc.lock").write_text(yaml.safe_dump(lock))
    first, workspace = compare.find()
    assert (first.state, bool(first.metrics)) == ("", True)
    assert (workspace.name, workspace.state, workspace.metrics) == ("workspace", "not finished: `dvc repro`", {})


def test_results_of_a_stage_that_ran_without_dvc_are_not_shown(empty_project: Path) -> None:
    reports.make_records()
    reports.commit("first")
    reports.make_records(loss=2.0)
    first, workspace = compare.find()
    assert (first.state, bool(first.metrics)) == ("", True)
    assert (workspace.state, workspace.metrics) == ("not finished: `dvc repro`", {})


def test_a_number_that_dvc_lock_has_as_a_text_does_not_differ() -> None:
    content = compare.render([experiment("finished", 2.0, lr="1e-05"), experiment("next", state="queued", lr=1e-05)])
    assert ">state</th>" in content and ">lr</th>" not in content


def test_a_commit_that_dvc_cannot_read_is_a_line_with_the_reason(empty_project: Path) -> None:
    reports.make_records()
    reports.commit("first")
    good = Path("dvc.yaml").read_text(), Path("dvc.lock").read_text()
    Path("dvc.yaml").write_text("stages: [\n")
    Path("dvc.lock").write_text("damaged: true\n")
    commit_notes("damaged")
    Path("dvc.yaml").write_text(good[0])
    Path("dvc.lock").write_text(good[1])
    commit_notes("repaired")
    first, damaged = compare.find()
    assert (first.state, damaged.name[9:]) == ("", ": damaged")
    assert re.match(r"not readable: .*dvc\.yaml", damaged.state)
    assert "not readable" in compare.render([first, damaged])


def test_a_subject_may_have_any_character(empty_project: Path) -> None:
    reports.make_records()
    reports.commit("page\x0cone\u2028two\u0085three")
    assert "page\x0cone\u2028two\u0085three" in compare.find()[0].name


def commit_notes(text: str) -> None:
    Path("notes.txt").write_text(text)
    reports.git("add", ".")
    reports.git("commit", "-qm", text)


def test_an_experiment_of_an_older_commit_waits(empty_project: Path) -> None:
    reports.make_records()
    reports.commit("first")
    commit_notes("without results of its own")
    with Repo() as repo:
        repo.experiments.queue_one(repo.experiments.celery_queue, params={"params.yaml": ["lr=0.5"]}, name="waiting")
    commit_notes("after it")
    found = compare.find()
    assert [(one.state, one.params["lr"], bool(one.metrics)) for one in found] == [
        ("", 0.003, True),
        ("queued", 0.5, False),
    ]
    assert found[1].name == "waiting"


@pytest.mark.parametrize("state", ["running", "failed"])
def test_results_of_the_commit_before_are_not_those_of_an_experiment(empty_project: Path, state: str) -> None:
    reports.make_records()
    reports.commit("first")
    with Repo() as repo:
        workspace = repo.experiments.show()[0]
        finished, other = (compare._read(repo, "name", state, workspace) for state in ("", state))
    assert finished.metrics and finished.curves
    assert (other.state, other.params, other.metrics, other.curves) == (state, finished.params, {}, {})


@pytest.mark.parametrize("missing", [".git", ".dvc", "commits"])
def test_without_a_project_there_is_nothing_to_compare(empty_project: Path, missing: str) -> None:
    reports.make_records()
    if missing == "commits":
        reports.git("init", "-q")
        Path(".dvc").mkdir()
        Path(".dvc/config").touch()
    else:
        reports.commit("first")
        Path(missing).rename("elsewhere")
    with pytest.raises(
        StageError, match=r"`git commit` after `dvc repro`|not a git repository|not inside of a DVC rep"
    ):
        compare.find()
