"""Time what depends on the number of files rather than on their size."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

from benchmarks import REPO
from benchmarks.data.corpora import make_tree
from benchmarks.data.measuring import measure
from benchmarks.data.stage_runs import run_organize


def time_organize(work: Path, num_files: int) -> None:
    """Print time and memory of `organize`."""
    make_tree(work / "tree", num_files)
    result = measure(run_organize, work / "tree", 2)
    seconds, peak = result.timing.seconds, result.peak_mb
    print(f"organize: {num_files} files in {seconds:.1f} s, 2 processes, peak {peak:.0f} MB")


def time_noop(work: Path, num_files: int) -> None:
    """Print the time of a `dvc repro` with nothing to do, here and for one bare stage with the same dependency."""
    ours, bare = work / "ours", work / "bare"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (ours / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, ours / name)
    bare.mkdir()
    dvc = Path(sys.executable).with_name("dvc")
    environment = {**os.environ, "PATH": f"{dvc.parent}:{os.environ['PATH']}", "DVC_NO_ANALYTICS": "1"}
    stage = {"cmd": "touch out", "deps": ["data/raw"], "outs": ["out"]}
    (bare / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"bare": stage}}))
    for project in (ours, bare):
        subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    subprocess.run([dvc, "init", "-q"], cwd=bare, env=environment, check=True)
    seconds = {}
    for project, target in ((ours, "extract"), (bare, "bare")):
        make_tree(project / "data/raw", num_files)
        for _ in range(3):  # the first runs the stages, the second fills the caches of DVC and of the disk
            start = time.perf_counter()
            subprocess.run([dvc, "repro", "-q", target], cwd=project, env=environment, check=True)
            seconds[project] = time.perf_counter() - start
        print(f"no-op dvc repro over {num_files} files, {project.name}: {seconds[project]:.1f} s", flush=True)
    print(f"ours needs {seconds[ours] / seconds[bare]:.2f} x the time of bare DVC")
