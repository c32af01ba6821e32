"""The page that compares experiments has all of them, the best one first, with what differs and their curves."""

import re
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo

from stages import compare
from stages.artifacts import outputs
from stages.artifacts.errors import StageError
from stages.compare import Experiment
from tests import reports


def experiment(name: str, loss: float | None = None, state: str = "", **params: Any) -> Experiment:
    metrics = {} if loss is None else {"validation_loss": loss, "steps": 200}
    course = (
        [{"step": float(step), "loss": loss + 1 / step, "validation_loss": None} for step in (1, 2)] if loss else []
    )
    return Experiment(name, state, params, metrics, course)


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
    assert all(len(one.course) == 201 for one in found)
    assert "runtime.log_freq" not in found[0].params
    reports.cached(reports.add_to_cache(outputs.HISTORY)).unlink()
    assert [bool(one.course) for one in compare.find()] == [False, True, True]


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
    assert finished.metrics and finished.course
    assert (other.state, other.params, other.metrics, other.course) == (state, finished.params, {}, [])


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
