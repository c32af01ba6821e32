"""Run the `sh` blocks of README.md and docs/training.md, in order, in a project that was reproduced once."""

import json
import re
import shutil
import sys
from pathlib import Path

from tests.pipeline import STAGES, ran
from tests.project import REPO, Project


def commands(document: str) -> list[str]:
    """The lines of the `sh` blocks of a document, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (REPO / document).read_text(), re.MULTILINE | re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]


def test_the_commands_of_the_readme_run(reproduced: Project) -> None:
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    assert "make repro" in commands("README.md")
    assert "dvc exp run -S batch_size=4" in commands("README.md")
    for command in commands("README.md"):
        # The environment exists already: `setup` must not install another one.
        reproduced.run("bash", "-c", command.replace("make ", "make --old-file setup "))


def test_a_second_training_starts_from_the_weights_of_the_first(reproduced: Project) -> None:
    """The commands of docs/training.md, with other files to train on and the same held-out ones."""
    reproduced.run("git", "reset", "-q", "--soft", "HEAD^")  # the first training is not committed yet
    last_split = (reproduced / "data/splits/split_03.jsonl").read_text()
    held_out = [json.loads(line)["path"] for line in last_split.splitlines()]
    raw = reproduced / "data/raw_stage2"
    shutil.copytree(reproduced / "data/raw", raw)
    for file in raw.rglob("*.txt"):
        if str(file.relative_to(raw)) not in held_out:
            file.write_text("Another text to train on. " * 40)
    trained = reproduced.json("outputs/test/train_metrics.json")["validation_loss"]
    parent = reproduced.json("outputs/test/model/lineage.json")

    recipe = [command.replace("tiny-llama", "test") for command in commands("docs/training.md")]
    outputs = {command: ran(reproduced.run("bash", "-c", command)) for command in recipe}
    again = [stages for command, stages in outputs.items() if command.endswith("dvc repro")]
    assert again == [[], []]
    assert list(outputs.values()).count(STAGES) == 1
    metrics = reproduced.json("outputs/stage2/metrics.json")
    assert metrics["untrained_validation_loss"] == trained
    assert metrics["validation_loss"] != trained
    lineage = reproduced.json("outputs/stage2/model/lineage.json")
    assert lineage["data"]["train"] != parent["data"]["train"]
    assert lineage["model"]["lineage"] == parent
    assert parent["run_id"] in (reproduced / "outputs/stage2/model/README.md").read_text()


def test_every_file_that_the_readme_names_exists() -> None:
    text = (REPO / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#:]+)[)#]", text):
        assert (REPO / link).exists(), link
    tree = text.split("## What is where")[1]
    for name in re.findall(r"[\w/-]+(?:\.py|\.md|\.yaml|/)(?=\s)", tree):
        assert any((REPO / directory / name).exists() for directory in ("", "stages", "docs", "tests")), name
