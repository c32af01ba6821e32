"""Run the commands of docs/fsdp.md and docs/troubleshooting.md, with a small model in place of theirs."""

import re
import sys
from pathlib import Path

import pytest

from tests.project import REPO, Project

REPLACED = {
    r"meta-llama/Llama-3.1-\w+": "models/nano",
    "plan.num_ranks=32": "plan.num_ranks=4",
    "seq_length=4096": "seq_length=16",
    "max_steps=20": "max_steps=2",
    "max_steps=12": "max_steps=2",
    r"total_batch_size=\d+": "total_batch_size=8",
    r"\[10,12\]": "[1,2]",
}
NEEDS_NETWORK = "hf download"


@pytest.mark.slow
@pytest.mark.parametrize("document", ["docs/fsdp.md", "docs/troubleshooting.md"])
def test_the_commands_of_a_guide_run(reproduced: Project, document: str) -> None:
    commands = re.findall(r"^\$ (.*?)(?:  +#.*)?$", (REPO / document).read_text(), re.MULTILINE)
    assert len(commands) > 5
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    for command in commands:
        if NEEDS_NETWORK not in command:
            for text, other in REPLACED.items():
                command = re.sub(text, other, command)
            reproduced.run("bash", "-c", command)
    if "profile_steps" in str(commands):
        assert list((reproduced / "outputs/test/profile").glob("*/steps-1-2.trace.json.gz"))
