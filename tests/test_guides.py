"""Run the commands of guides, with a small model in place of theirs."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from stages.scoring import packages
from tests.hub_server import Hub
from tests.project import REPO, Project, make_pipeline, save_weights
from tests.public_tasks import serve_all

REPLACED = {
    r"meta-llama/Llama-3.1-\w+|HuggingFaceTB/SmolLM2-135M\S*": "models/nano",
    "outputs/tiny-llama": "outputs/test",
    "plan.num_ranks=32": "plan.num_ranks=4",
    "seq_length=4096": "seq_length=16",
    "max_steps=20": "max_steps=2",
    "max_steps=12": "max_steps=2",
    r"total_batch_size=\d+": "total_batch_size=8",
    r"\[10,12\]": "[1,2]",
}
NOT_RUN = r"hf download|make setup"
"""They need a network."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["quickstart", "memory", "lora", "models", "reruns", "troubleshooting"])
def test_the_commands_of_a_guide_run(reproduced: Project, name: str) -> None:
    guide, printed = (REPO / f"docs/{name}.md").read_text(), {}
    commands = re.findall(r"^\$ (.*?)(?:  +#.*)?$", guide, re.MULTILINE)
    assert len(commands) > 2
    for values in re.findall(r"^```yaml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL):
        save_weights(reproduced / "models/nano")
        reproduced.set(**{**yaml.safe_load(values), "model_name": "models/nano"})
    if name == "quickstart":
        shutil.rmtree(reproduced / "data/raw")
        reproduced.set(chat_template="models/templates/plain.jinja")  # which the model of the guide has itself
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    for command in commands:
        if not re.search(NOT_RUN, command):
            run = command
            for text, other in REPLACED.items():
                run = re.sub(text, other, run)
            printed[command] = reproduced.run("bash", "-c", run)
    if name == "quickstart":
        assert "2 ranks x 2 rows x 1 accumulation step" in printed["dvc repro plan"]
        assert (reproduced / "outputs/chat/adapter/adapter_model.safetensors").exists()
        assert printed[commands[-1]].strip(), "the model answers"
    if name == "reruns":
        assert "different" not in printed["python -m stages.lineage verify"]
        assert re.search(r"\d+ equal$", printed["python -m stages.lineage segments"].strip())
    if "profile_steps" in str(commands):
        assert list((reproduced / "outputs/test/profile").glob("*/steps-1-2.trace.json.gz"))


def test_what_runs_again_is_what_dvc_watches() -> None:
    """The stages in the table of docs/reruns.md read the parameters beside them."""
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", (REPO / "docs/reruns.md").read_text(), re.MULTILINE)
    stages = yaml.safe_load((REPO / "dvc.yaml").read_text())["stages"]
    read: dict[str, set[str]] = {}
    for stage, declared in stages.items():
        for entry in declared["params"]:
            for name in entry["params.yaml"] if isinstance(entry, dict) else [entry]:
                read.setdefault(name, set()).add(stage)
    assert len(rows) > 10
    for names, readers in rows:
        for name in re.findall(r"`(.*?)`", names):
            assert read[name] == {*re.findall(r"`(.*?)`", readers)}, name


def test_the_row_that_a_guide_shows_is_that_of_the_table() -> None:
    (shown,) = re.findall(r"^qwen3,.*$", (REPO / "docs/models.md").read_text(), re.MULTILINE)
    assert shown in (REPO / "docs/models.csv").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "conversations"])
def test_a_guide_to_data_says_what_to_set_and_to_run(tmp_path: Path, name: str) -> None:
    """In the order in which it says so."""
    project = Project(tmp_path)
    make_pipeline(project)
    shutil.rmtree(project / "data/raw")
    for source in ("topics", "modules"):
        for number in ("while", *range(20)):
            path = project / f"data/raw/{source}/{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{source} has a file of number {number} and says it. " * 9)
    records: list[dict[str, object]] = [
        {"id": number, "url": f"https://example.org/{number}", "title": f"Title {number}",
         "body": f"Article {number} has a body of some words. " * 9}
        for number in range(30)
    ]  # fmt: skip
    (project / "data/raw/articles").mkdir()
    lines = [json.dumps(record) for record in [*records, {"id": 30, "title": "No body"}]]
    (project / "data/raw/articles/a.jsonl").write_text("\n".join(lines))
    project.set(seq_length=256)
    project.run("git", "init", "-q")
    guide, printed = (REPO / f"docs/{name}.md").read_text(), {}
    shown = []  # by the guide
    for kind, block in re.findall(r"^```(yaml|console)\n(.*?)^```", guide, re.MULTILINE | re.DOTALL):
        if kind == "yaml":
            project.set(**yaml.safe_load(block))
            continue
        for command, output in re.findall(r"^\$ (.*?)(?:  +#.*)?\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            printed[command] = project.run("bash", "-c", command.replace("less ", "cat "), timeout=600)
            shown += [(line.removesuffix("..."), printed[command]) for line in output.splitlines()]
    for line, output in shown:
        assert line in output
    if name == "data":
        assert len(shown) > 12
        assert re.search(r"topics +50\.0% of each step", printed["dvc repro plan"])
        return
    kinds = ("--preview", "less", "--chat")
    preview, rows, answer = (next(printed[command] for command in printed if kind in command) for kind in kinds)
    assert "What is 0 plus 0?" in preview
    assert "⟦System: You answer with one short sentence." in rows
    assert answer.strip()
    template = (project / "outputs/test/model/chat_template.jinja").read_text()
    assert template == (REPO / "models/templates/plain.jinja").read_text()
    assert "different" not in project.run("python", "-m", "stages.lineage", "verify")
    samples = project.json("outputs/evaluation.json")["samples"]
    assert all(sample["prompt"].endswith("Assistant:") for sample in samples), samples


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_guide_to_scores_says_what_to_write_and_to_run(reproduced: Project, tmp_path: Path) -> None:
    """The task of its first block, too, and the public ones, from the Hub of the tests."""
    reproduced.set(seq_length=128)
    guide, printed = (REPO / "docs/scores.md").read_text().replace("outputs/tiny-llama", "outputs/test"), ""
    with Hub().serve() as hub:
        serve_all(hub, tmp_path / "hub", packages.ensure_installed())
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        for kind, block in re.findall(r"^```(yaml|console)\n(.*?)^```", guide, re.MULTILINE | re.DOTALL):
            if block.startswith("task: sums"):
                (reproduced / "evals/short.yaml").write_text(block.replace("task: sums", "task: short"))
            elif kind == "yaml":
                values = {**yaml.safe_load(block), "num_epochs": 1}
                values["tasks"].append("evals/short.yaml")
                reproduced.set(**values)
            else:
                for command in re.findall(r"^\$ (.*)", block, re.MULTILINE):
                    printed += reproduced.run("bash", "-c", command.replace("less ", "cat "), timeout=600, **settings)
    for name in ("sums", "short"):
        assert re.search(rf"^ +0\.\d+  {name} exact_match +60 questions, 0\.0000 before training", printed, re.M), (
            printed
        )
    assert reproduced.json("evals/public/manifest.json")["tasks"].keys() > {"arc_easy", "mmlu"}
    assert (reproduced / "evals/public/cais--mmlu.dvc").is_file()
