"""Run the commands of guides, with a small model in place of theirs."""

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
    r"meta-llama/Llama-3.1-\w+": "models/nano",
    "outputs/tiny-llama": "outputs/test",
    "plan.num_ranks=32": "plan.num_ranks=4",
    "seq_length=4096": "seq_length=16",
    "max_steps=20": "max_steps=2",
    "max_steps=12": "max_steps=2",
    r"total_batch_size=\d+": "total_batch_size=8",
    r"\[10,12\]": "[1,2]",
}
NEEDS_NETWORK = "hf download"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", ["docs/fsdp.md", "docs/lora.md", "docs/troubleshooting.md"])
def test_the_commands_of_a_guide_run(reproduced: Project, document: str) -> None:
    commands = re.findall(r"^\$ (.*?)(?:  +#.*)?$", (REPO / document).read_text(), re.MULTILINE)
    assert len(commands) > 2
    if document == "docs/lora.md":
        save_weights(reproduced / "models/nano")
        (values,) = re.findall(r"^```yaml\n(.*?)^```", (REPO / document).read_text(), re.MULTILINE | re.DOTALL)
        reproduced.set(**{**yaml.safe_load(values), "model_name": "models/nano"})
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    for command in commands:
        if NEEDS_NETWORK not in command:
            for text, other in REPLACED.items():
                command = re.sub(text, other, command)
            reproduced.run("bash", "-c", command)
    if "profile_steps" in str(commands):
        assert list((reproduced / "outputs/test/profile").glob("*/steps-1-2.trace.json.gz"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["choosing", "conversations"])
def test_a_guide_to_data_says_what_to_set_and_to_run(tmp_path: Path, name: str) -> None:
    """In the order in which it says so."""
    project = Project(tmp_path)
    make_pipeline(project)
    shutil.rmtree(project / "data/raw")
    for source in ("topics", "modules", "distributions"):
        for number in ("while", *range(20)):
            path = project / f"data/raw/{source}/{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{source} has a file of number {number} and says it. " * 9)
    project.set(seq_length=256)
    project.run("git", "init", "-q")
    guide, printed = (REPO / f"docs/{name}.md").read_text(), {}
    for kind, block in re.findall(r"^```(yaml|console)\n(.*?)^```", guide, re.MULTILINE | re.DOTALL):
        if kind == "yaml":
            project.set(**yaml.safe_load(block))
            continue
        for command in re.findall(r"^\$ (.*?)(?:  +#.*)?$", block, re.MULTILINE):
            printed[command] = project.run("bash", "-c", command.replace("less ", "cat "), timeout=600)
    if name == "choosing":
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
                (reproduced / "tasks/short.yaml").write_text(block.replace("task: sums", "task: short"))
            elif kind == "yaml":
                values = {**yaml.safe_load(block), "num_epochs": 1}
                values["tasks"].append("tasks/short.yaml")
                reproduced.set(**values)
            else:
                for command in re.findall(r"^\$ (.*)", block, re.MULTILINE):
                    printed += reproduced.run("bash", "-c", command.replace("less ", "cat "), timeout=600, **settings)
    for name in ("sums", "short"):
        assert re.search(rf"^score: {name} exact_match 0.*, before training 0.*\(60 questions\)$", printed, re.M), (
            printed
        )
    assert reproduced.json("tasks/public/manifest.json")["tasks"].keys() > {"arc_easy", "mmlu"}
    assert (reproduced / "tasks/public/cais--mmlu.dvc").is_file()
