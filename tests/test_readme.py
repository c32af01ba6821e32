"""Run the `sh` blocks of README.md and docs/training.md, in order, in a project that was reproduced once."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from stages.base.errors import StageError
from stages.training.params import TrainParams
from tests.pipeline import STAGES, ran
from tests.project import REPO, Project, commands


@pytest.mark.slow
def test_the_commands_of_the_readme_run(reproduced: Project) -> None:
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    assert "make repro" in commands("README.md")
    assert "dvc exp run -S batch_size=4" in commands("README.md")
    for command in commands("README.md"):
        # The environment exists already: `setup` must not install another one.
        reproduced.run("bash", "-c", command.replace("make ", "make --old-file setup "))


@pytest.mark.slow
def test_a_colleague_gets_the_results_and_has_nothing_to_run(reproduced: Project, tmp_path: Path) -> None:
    """The commands of "Working together"."""
    section = (REPO / "docs/experiments.md").read_text().split("## Working together")[1].split("\n## ")[0]
    lines = [line.split("  #")[0] for line in re.findall(r"^\$ (.*)", section, re.MULTILINE)]
    places = {"/shared/dvc": str(tmp_path / "dvc"), "/shared/project.git": str(reproduced.path)}
    place = next(index for index, line in enumerate(lines) if line.startswith("git clone"))
    for line in lines[: place + 1]:
        for name, path in places.items():
            line = line.replace(name, path)
        reproduced.run("bash", "-c", line)
    assert reproduced.run("git", "ls-files", "data").split() == ["data/.gitignore", "data/raw.dvc"]
    # The clone is made inside of the first project, whose directory is the current one.
    clone = Project((reproduced / "project").rename(tmp_path / "clone"))
    assert "missing data 'source': data/raw" in clone.run("dvc", "repro", status=255)
    assert ran(clone.run("dvc", "repro", "--allow-missing")) == []
    assert lines[place + 1 :] == ["dvc pull", "dvc repro"]
    clone.run("dvc", "pull")
    assert "Data and pipelines are up to date." in clone.run("dvc", "repro")
    for path in ("data/raw/folder0/0.txt", "outputs/test/model/model.safetensors", "outputs/report/report.html"):
        assert (clone / path).read_bytes() == (reproduced / path).read_bytes()

    shutil.rmtree(clone / "data/raw")
    output = clone.run("python", "-m", "scripts.sample_corpus", status=1)  # as `make repro` does
    assert "data/raw is empty, but dvc.lock has results" in output
    assert not (clone / "data/raw").exists()


@pytest.mark.slow
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
    trained = reproduced.json("outputs/train_metrics.json")["validation_loss"]
    parent = reproduced.json("outputs/test/model/lineage.json")

    recipe = [command.replace("tiny-llama", "test") for command in commands("docs/training.md")]
    outputs = {command: reproduced.run("bash", "-c", command) for command in recipe}
    again = [ran(output) for command, output in outputs.items() if command.endswith("dvc repro")]
    assert again == [[], []]
    assert [ran(output) for output in outputs.values()].count(STAGES) == 1
    compared = outputs["dvc metrics diff HEAD~1"]
    assert re.search(r"validation_loss +\d\S+ +\d\S+ +-?\d", compared), compared
    reproduced.run("dvc", "plots", "diff", "HEAD~1")
    page = (reproduced / "dvc_plots/index.html").read_text()
    assert set(re.findall(r'"rev": "([^"]+)"', page)) == {"HEAD~1", "workspace"}
    evaluation = reproduced.json("outputs/evaluation.json")
    losses = {name: evaluation[name]["loss"] for name in ("untrained", "trained", "exported")}
    assert losses["untrained"] == trained
    assert losses["exported"] == pytest.approx(losses["trained"], abs=1e-4) != trained
    lineage = reproduced.json("outputs/stage2/model/lineage.json")
    assert lineage["data"]["train"] != parent["data"]["train"]
    assert lineage["model"]["lineage"] == {key: value for key, value in parent.items() if key != "sealed"}
    assert parent["run_id"] in (reproduced / "outputs/stage2/model/README.md").read_text()


def test_every_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in (*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), REPO / "tests/README.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            if ":" in link or (target.exists() and (not heading or heading in _headings(target))):
                continue
            broken.append(f"{page.name}: {link}")
    assert broken == []


def test_every_heading_that_a_message_names_is_there() -> None:
    scripts = [path for name in ("scripts", "slurm", "stages") for path in (REPO / name).rglob("*") if path.is_file()]
    texts = [path.read_text() for path in scripts if path.suffix in (".py", ".sh", ".sbatch")]
    named = [found for text in texts for found in re.findall(r'see ([\w/]+\.md), "([^"]+)"', text)]
    assert named
    for page, heading in named:
        assert re.search(rf"^#+ {re.escape(heading)}$", (REPO / page).read_text(), re.MULTILINE), (page, heading)


def _headings(page: Path) -> set[str]:
    """As GitHub makes anchors of them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_file_of_the_tree_exists() -> None:
    tree = (REPO / "CONTRIBUTING.md").read_text().split("## What is where")[1]
    for name in re.findall(r"[\w/-]+(?:\.py|\.md|\.yaml|/)(?=\s)", tree):
        assert any((REPO / directory / name).exists() for directory in ("", "stages", "docs", "tests")), name


def test_each_guarantee_names_its_tests() -> None:
    text = (REPO / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \|.*\| (.*) \|$", text, re.MULTILINE)
    named = {
        number: re.findall(r"`(test_\w+\.py)`", tests) for numbers, tests in rows for number in numbers.split(", ")
    }
    assert sorted(map(int, named)) == list(range(1, 40))
    tested: dict[str, set[str]] = {}
    for path in (REPO / "tests").glob("test_*.py"):
        for numbers in re.findall(r"^def test((?:_\d\d)+)_", path.read_text(), re.MULTILINE):
            for number in numbers.split("_")[1:]:
                tested.setdefault(str(int(number)), set()).add(path.name)
    for number, files in named.items():
        assert all((REPO / "tests" / file).exists() for file in files), number
        assert not tested.get(number) or tested[number] & {*files}, number
    assert tested.keys() <= named.keys()


def test_the_ranks_of_every_command_can_share_its_total_batch_size(params: TrainParams) -> None:
    """Of every command for a cluster in README, docs and the scripts themselves, with the defaults of params.yaml."""
    defaults = yaml.safe_load((REPO / "params.yaml").read_text())
    variables = {"TOTAL_BATCH_SIZE": "total_batch_size", "BATCH_SIZE_PER_DEVICE": "batch_size"}
    commands = [
        command
        for path in (REPO / "README.md", *(REPO / "docs").glob("*.md"), *(REPO / "slurm").iterdir())
        for command in re.findall(r"^.*\b(?:sbatch\b.*slurm/|sbatch_args:).*", _joined(path.read_text()), re.MULTILINE)
        if "gpus-per-node" in command
    ]
    assert len([command for command in commands if "--nodes=" in command]) >= 4, commands
    for command in commands:
        found = {**defaults, "nodes": 1}
        for name, value in re.findall(r"(\w[\w-]*)[=:] ?(\d+)\b", command):
            found[variables.get(name, name)] = int(value)
        nodes, gpus, total, batch = (
            found[name] for name in ("nodes", "gpus-per-node", "total_batch_size", "batch_size")
        )
        changed = dataclasses.replace(params, total_batch_size=total, batch_size=batch)
        try:
            changed.grad_accum_steps(nodes * gpus)
        except StageError as error:
            pytest.fail(f"{command}: {error}")


def _joined(text: str) -> str:
    """With continued lines as one, and a block of YAML that submits nodes as a line."""
    blocks = re.sub(r"^```yaml\n(.*?)^```", lambda block: block[1].replace("\n", " ") + "\n", text, flags=re.M | re.S)
    return blocks.replace("num_nodes: ", "nodes: ").replace("\\\n", " ")
