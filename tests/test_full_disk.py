"""A full disk at each write of each stage: one message, nothing published, and the next run gives the same bytes."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from stages.base import code
from tests import full_disks
from tests.corpus import put
from tests.project import REPO, SMALL, Project, make_nano


@pytest.fixture
def data_project(empty_project: Path) -> Project:
    """A project with raw files and a model."""
    project = Project(empty_project)
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(REPO / name, empty_project)
    make_nano(project / "models/nano")
    project.set(**SMALL, num_splits=3, deduplicate="exact", runtime={"num_workers": 1})
    put({f"{number}.txt": f"The file of number {number} has a few words. " * 60 for number in range(6)})
    put({"lines.jsonl": "".join(f'"This is line {number} of the file."\n' for number in range(200))})
    return project


def test_trap_30_a_file_that_cannot_be_written_is_one_message_and_nothing_is_published(
    data_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 2, one line with path, cause and remedy, and nothing temporary stays."""
    # Both take most of the time, and the limit does not concern them.
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(code, "digest_with_packages", lambda module: module)
    num_failures = {}
    full_disks.run("download")
    for name in ("organize", "extract", "deduplicate", "pack"):
        limits = [partial(full_disks.file_size_limit, size) for size in (0, 900, 3000, 5000, 10_000, 20_000, 1 << 20)]
        num_failures[name] = full_disks.sweep(name, "File too large", limits)
    assert min(num_failures.values()) >= 1 and min(num_failures["extract"], num_failures["pack"]) >= 4, num_failures


SWEEP = """
import json, os, shutil, subprocess, sys
from functools import partial
from pathlib import Path
from tests import full_disks
source, which, step, names = json.loads(sys.argv[1])
disks = {}
for name in ("project", "store"):
    disks[name] = Path(source).with_name(f"disk-{name}")
    disks[name].mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", str(disks[name])], check=True)
project = disks["project"] / "project"
shutil.copytree(source, project, symlinks=True, ignore=shutil.ignore_patterns(".dvc", ".git"))
os.chdir(project)
shutil.rmtree("stages")  # the code that runs is that of this process
os.symlink(Path(full_disks.__file__).parents[1] / "stages", "stages")
os.environ["DVC_ROOT"] = str(disks["store"])
shutil.copytree("outputs", disks["store"] / "outputs")
limits = [partial(full_disks.free_pages, disks[which], number) for number in range(0, 100_000, step)]
for name in names:
    print(name, full_disks.sweep(name, "No space left on device", limits), flush=True)
"""


def can_mount() -> bool:
    """Whether this process may mount file systems of its own."""
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("which", "step", "names"),
    [
        ("project", 1, ["organize", "extract", "deduplicate", "pack"]),
        ("store", 1, ["extract", "deduplicate", "pack"]),
        ("project", 8, ["download", "plan", "launch", "consolidate", "evaluate", "score", "report"]),
    ],
)
def test_trap_30_a_disk_that_is_full_after_any_number_of_pages(
    reproduced: Project, which: str, step: int, names: list[str]
) -> None:
    """With the store on another file system."""
    if not can_mount():
        pytest.skip("unshare -Urm may not mount a tmpfs here")
    reproduced.set(deduplicate="exact", num_splits=4, runtime={"num_workers": 1})
    arguments = json.dumps([str(reproduced.path), which, step, names])
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = ["unshare", "-Urm", sys.executable, "-c", SWEEP, arguments]
    result = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout
    counts = dict(line.split() for line in result.stdout.splitlines() if line.startswith(tuple(names)))
    assert all(int(counts[name]) > 0 for name in names), result.stdout
    print(result.stdout)
