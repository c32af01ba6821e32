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
QUICK = (
    "line_feeds.json", "open_string.json", "documents.json", "short_strings.json", "not_a_number.json",
    "large_line_feeds.json", "large_list_of_lists.json", "large_object.json", "large_emoji_and_ascii.json",
    "large_brackets.json", "long_key.json",
    "one_line_of_escapes.jsonl", "short_lines.jsonl", "long.txt", "large_cp1252.txt", "long_key_of_many.yaml",
    "reread.yaml", "bomb.yaml.gz", "window.jsonl.zst", "row_group.parquet", "page.parquet", "bomb.arrow",
)  # fmt: skip
"""Files of `HOSTILE` that needed more, or need the most, and that are read fast."""


def extract_in_process(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that `tests.hostile` prints, beside what `extract` says of a file."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(directory)}
    command = [sys.executable, "-m", "tests.hostile", *arguments]
    completed = subprocess.run(command, env=environment, text=True, stdout=-1, stderr=-1)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HOSTILE)
def test_trap_13_no_file_needs_more_memory_than_the_bound(name: str, tmp_path: Path) -> None:
    """Files, strings, keys and places that are too large: a worker needs less than 1 GiB."""
    lines = extract_in_process(tmp_path, name, str(MIB))
    assert len(lines) == len(OPTIONS)
    assert {line["option"]: line["peak"] for line in lines if line["peak"] > BOUND} == {}
    assert {line["strings"] for line in lines if not line["strings"]} == set()  # the file beside it is read


@pytest.mark.slow
def test_trap_13_the_memory_that_files_need_scales_with_the_limits(tmp_path: Path) -> None:
    """With limits of a 64th, files that are 64 times smaller need a 64th of what the bound leaves for them."""
    lines = extract_in_process(tmp_path, ",".join(QUICK), str(MIB // 64), "default")
    assert len(lines) == len(QUICK)
    allowed = (BOUND - 150) / 64 + 4  # and a little that does not scale
    assert {line["name"]: line["growth"] for line in lines if line["growth"] > allowed} == {}
