"""The answers are those of the model, on any number of ranks; and no number is stale, or wrong without a word."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages import download, score
from stages.base import outputs, publish
from stages.base.errors import StageError
from stages.base.identity import TokenFingerprints
from stages.export.lineage import InitialModel, Lineage
from stages.export.scores import Scores
from stages.score import ScoreParams, ScoreRuntime
from stages.scoring import packages
from stages.scoring.request import Measurements, Request, Terms
from tests.network import CAN_UNSHARE, IN_A_NAMESPACE
from tests.project import REPO, Project, make_nano, save_weights

PARAMS = ScoreParams(experiment_name="exp", tasks=["tasks/mc.yaml"], task_limit=None, task_chat=False)
RUNTIME = ScoreRuntime(nproc_per_node=1, reuse_gib=1, timeout_minutes=5)
ROWS = [
    {"q": f"Question {number}: which word follows {'and so on ' * (number % 5)}?", "c": ["the", f"a {number}", "of it"],
     "a": number % 3, "text": f"The file of number {number} says it {number * 3} times. " * (number + 1)}
    for number in range(20)
]  # fmt: skip
BASE = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "tasks/rows.jsonl"}}, "test_split": "test"}
TASKS: dict[str, dict[str, Any]] = {
    "mc": {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "c", "doc_to_target": "a",
        "num_fewshot": 2, "fewshot_split": "test",
    },
    "qa": {
        "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{c[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "ppl": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def installed() -> Path:
    """The packages of lm-eval, in this copy of the project."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPO)
        patch.delenv("DVC_ROOT", raising=False)
        return packages.ensure_installed()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Project:
    """An initial model, one that was trained from it, and tasks."""
    project = Project(tmp_path_factory.mktemp("score"))
    for name in ("params.yaml", "dvc.yaml", packages.LOCK):
        shutil.copy(REPO / name, project.path)
    (project / "stages").symlink_to(REPO / "stages")
    (project / packages.directory().parent.name).symlink_to(installed.parent)
    make_nano(project / "models/nano", max_position_embeddings=128)
    save_weights(project / "models/nano")
    model = project / "outputs/exp/model"
    shutil.copytree(project / "models/nano", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.path)
        download.describe(download.DownloadParams("models/nano", "main", "auto")).write()
        change_weights(model)
        (project / "tasks").mkdir()
        write_rows(ROWS)
        for name in TASKS:
            write_task(name)
    project.set(experiment_name="exp", tasks=[f"tasks/{name}.yaml" for name in TASKS])
    return project


def change_weights(model: Path, factor: float = 1.5) -> None:
    """Train a model, in a way, and describe it as `consolidate` does."""
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    save_file({name: tensor * factor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    files = {file.name: publish.sha256_file(file) for file in sorted(model.iterdir()) if file.name != "lineage.json"}
    Lineage(
        run_id="0123", step=3, adopted=None, data=TokenFingerprints(train="t", validation="v"), params={}, code="c",
        model=InitialModel(name="nano", revision="main", commit=None, manifest="m", lineage=None), packages={},
        checkpoint="cs", weights={path.name: files.pop(path.name)}, files=files,
    ).write(model / "lineage.json")  # fmt: skip


def write_rows(rows: list[dict[str, Any]]) -> None:
    Path("tasks/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_task(name: str, **changes: Any) -> None:
    Path(f"tasks/{name}.yaml").write_text(yaml.safe_dump({"task": name, **BASE, **TASKS[name], **changes}))


@pytest.fixture
def project(made: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of it as the current directory."""
    copy = made.copy(tmp_path / "project")
    monkeypatch.chdir(copy.path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return copy


@pytest.fixture
def lm_eval(installed: Path, mesh: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """lm-eval can be imported, and this process is the only rank."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield


def measure(request: Request, _: int | None = None) -> Measurements:
    """In this process, in place of ranks."""
    from stages.ranks.watchdog import Heartbeat
    from stages.scoring.measure import measure

    return measure(request, Heartbeat(), Path("datasets"))


def ask(*names: str, **changes: Any) -> Scores:
    """Run the stage in this process."""
    tasks = [f"tasks/{name}.yaml" for name in names]
    print(score.score(dataclasses.replace(PARAMS, tasks=tasks, **changes), RUNTIME, measure))
    return Scores.read(outputs.TASKS)


def answers(task: str) -> list[dict[str, Any]]:
    lines = map(json.loads, outputs.ANSWERS.read_text().splitlines())
    return [line for line in lines if line["task"] == task]


def test_the_answers_are_those_of_the_model_on_any_number_of_ranks(project: Project) -> None:
    """With examples before each question, in a network namespace that has no way out."""
    written = []
    around = IN_A_NAMESPACE if CAN_UNSHARE else ()
    for num_ranks in (1, 2, 3):
        shutil.rmtree(project / "data/.reuse", ignore_errors=True)
        project.set(runtime={"nproc_per_node": num_ranks})
        output = project.run(*around, "python", "-m", "stages.score")
        assert "score: mc acc" in output
        if CAN_UNSHARE:
            observed = json.loads(output.split("observed ")[1])
            assert (observed["names"], observed["everywhere"]) == ([], [])
        written.append([path.read_bytes() for path in (outputs.TASKS, outputs.SCORES, outputs.ANSWERS)])
    assert written[0] == written[1] == written[2]
    check_with_transformers(Path("outputs/exp/model"), "answer")
    check_with_transformers(Path("models/nano"), "answer_of_initial")


def check_with_transformers(directory: Path, key: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)

    def nats(prompt: list[int], continuation: list[int]) -> float:
        ids = [*prompt, *continuation]
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(found[len(ids) - n - 1, ids[-n]]) for n in range(1, len(continuation) + 1))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    for row in answers("mc"):
        assert row["prompt"].count("Question") == 3
        prompt = encode(row["prompt"])
        expected = [nats(prompt, encode(row["prompt"] + choice)[len(prompt) :]) for choice in row["choices"]]
        assert row[key] == pytest.approx(expected, abs=1e-5)
    for row in answers("ppl")[:3]:  # in one window
        assert float(row[key]) == pytest.approx(nats([tokenizer.eos_token_id], encode(row["prompt"])), abs=1e-4)
    for row in answers("qa"):
        ids = torch.tensor([encode(row["prompt"])])
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
                                    repetition_penalty=1.0, pad_token_id=0)  # fmt: skip
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert row[key] == text.partition("\n")[0]
