"""No file of others needs more memory than the bound: the files of tests/hostile.py, through `extract`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import HOSTILE, MIB, OPTIONS
from tests.project import REPO

BOUND = 1024
"""MiB of a worker of `extract`, with the interpreter and its libraries (docs/formats.md)."""
LIBRARIES = 150
"""MiB that these need."""
SCALE = 16
LARGEST = (
    "emoji_and_ascii.json", "large_emoji_and_ascii.json", "short_strings.json", "large_object.json", "line_feeds.json",
    "one_line_of_escapes.jsonl", "large_line_feeds.json", "open_string.json", "reread.yaml", "documents.json",
    "window.jsonl.zst", "not_a_number.json", "large_list_of_lists.json", "short_lines.jsonl", "large_cp1252.txt",
    "bomb.yaml.gz", "large_brackets.json", "row_group.parquet", "long.txt", "page.parquet", "long_key_of_many.yaml",
    "long_key.json", "bomb.arrow",
)  # fmt: skip
"""Files of `HOSTILE` that need the most, in this order, or needed more. All limits of what they need are scaled."""


def extract_in_process(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that `tests.hostile` prints, beside what `extract` says of a file."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(directory)}
    command = [sys.executable, "-m", "tests.hostile", *arguments]
    completed = subprocess.run(command, env=environment, text=True, stdout=-1, stderr=-1)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_trap_13_no_file_needs_more_memory_than_the_bound(tmp_path: Path) -> None:
    """Files, strings, keys and places that are too large: a worker needs less than 1 GiB."""
    lines = extract_in_process(tmp_path, ",".join(LARGEST), str(MIB), "default")
    assert len(lines) == len(LARGEST)
    assert {line["name"]: line["growth"] for line in lines if line["growth"] > BOUND - LIBRARIES} == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_trap_13_the_memory_that_files_need_scales_with_the_limits(tmp_path: Path) -> None:
    """With limits of a 16th, files that are 16 times smaller need a 16th of what the bound leaves for them."""
    lines = extract_in_process(tmp_path, "all", str(MIB // SCALE))
    assert len(lines) == len(HOSTILE) * len(OPTIONS)
    allowed = (BOUND - LIBRARIES) / SCALE
    assert {(line["name"], line["option"]): line["growth"] for line in lines if line["growth"] > allowed} == {}
    assert [line["name"] for line in lines if not line["strings"]] == []  # the file beside it is read
