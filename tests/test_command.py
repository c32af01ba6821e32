"""How a stage ends where its surroundings are not as usual: streams, limits, options of Python."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.base.errors import StageError, as_stage_error, explained
from stages.base.summary import counted, table
from tests.project import REPO, run_python

PROGRAM = """
import sys
from stages.base import command
from stages.base.errors import StageError

def main():
    if "fail" in sys.argv:
        raise StageError("what is wrong", "error: a name\\n\\x1b[2J")
    print("done")

command.run(main)
"""


def run(redirection: str, *options: str, arguments: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a small stage from a shell, in the current directory."""
    python = " ".join([f"PYTHONPATH={REPO}", sys.executable, *options, "-c", f"'{PROGRAM}'", arguments])
    return subprocess.run(["sh", "-c", f"{python} {redirection}"], capture_output=True, text=True)


def test_an_output_that_is_full_is_named(empty_project: Path) -> None:
    for options in ([], ["-u"]):  # at its end, and at once
        process = run(">/dev/full", *options)
        assert (process.returncode, process.stderr) == (2, "error: standard output: No space left on device\n")
    assert run(">/dev/full 2>/dev/full").returncode == 2


def test_python_without_docstrings_is_refused(empty_project: Path) -> None:
    process = run("", "-OO")
    assert process.returncode == 2
    assert process.stderr.startswith("error: Python runs with -OO")


def test_a_name_makes_no_line_of_its_own(empty_project: Path) -> None:
    process = run("", arguments="fail")
    assert process.stderr == "error: what is wrong\nerror: error: a name\\n\\x1b[2J\n"
    assert str(StageError("a", "b\u202e\n", "caf\udce9")) == "a\nb\\u202e\\n\ncaf\\xe9"


def test_too_many_open_files_is_said_with_the_remedy() -> None:
    error = as_stage_error(OSError(errno.EMFILE, "Too many open files"))
    assert str(error) == "Too many open files: raise the limit on open files (`ulimit -n 4096`), and run again"


def test_memory_that_ran_out_in_c_code_is_named_as_that() -> None:
    with pytest.raises(MemoryError), explained(StageError):
        raise SystemError("<function f> returned NULL without setting an exception")
    with pytest.raises(StageError, match="SystemError: unknown opcode"), explained(StageError):
        raise SystemError("unknown opcode")


def test_code_of_another_clone_is_refused(tmp_path: Path) -> None:
    """DVC writes the hashes of this directory's code into dvc.lock, whichever Python finds."""
    (tmp_path / "stages").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "stages.organize"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == (
        f"error: the code that runs is {REPO / 'stages'}, and DVC watches {tmp_path / 'stages'}: unset PYTHONPATH "
        f"({REPO}) and PYTHONSAFEPATH (1)\n"
    )


def test_torchao_prints_nothing(empty_project: Path) -> None:
    """The library transformers imports it in most stages; a line `Failed to load ...` looked like their error."""
    pytest.importorskip("torchao")
    code = f"import sys; sys.path += {sys.path}\nfrom stages.base import command\n"
    found = run_python(code + "command.run(lambda: print(__import__('transformers.quantizers.auto'), *sys.modules))")
    assert " torchao " in found.stdout and found.stderr == ""


def test_numbers_of_all_stages_stand_below_each_other() -> None:
    text = "\n".join([table((8030261248, "parameters", "of a model")), table(("0 of 20", "splits reused", ""))])
    assert text == "8,030,261,248  parameters       of a model\n      0 of 20  splits reused"
    assert table((1, "rows", "")) == f"{1:>13}  row" and counted(1, "file") == "1 file"
    assert table((0, "rows", "")) == f"{0:>13}  rows" and counted(2000, "file") == "2,000 files"
