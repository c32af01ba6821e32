"""Every block of README.md that is marked `sh` is run, in order, in a project that was reproduced once."""

import re
import sys
from pathlib import Path

from tests.conftest import REPO, Project


def test_the_commands_of_the_readme_run(reproduced: Project) -> None:
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    blocks = re.findall(r"^```sh\n(.*?)^```", (REPO / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    assert "make repro" in commands
    assert "dvc exp run -S batch_size=4" in commands
    for command in commands:
        # The environment is there: a test does not install another one.
        reproduced.run("bash", "-c", command.replace("make ", "make --old-file setup "))


def test_every_file_that_the_readme_names_is_there() -> None:
    text = (REPO / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (REPO / link).exists(), link
    tree = text.split("## What is where")[1]
    for name in re.findall(r"[\w/-]+(?:\.py|\.md|\.yaml|/)(?=\s)", tree):
        assert any((REPO / folder / name).exists() for folder in ("", "stages", "docs", "tests")), name
