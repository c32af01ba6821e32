"""The installed packages, compared with the lock. Only of the standard library."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stages.checks.findings import Found, error, ok, warning


def check_packages(project: Path = Path()) -> Found[None]:
    """Whether the packages are those of the lock, of the installed build of torch as in scripts/setup.sh; pip says it.

    Where one is missing that a stage needs, importing it is the error.
    """
    try:
        build = "cpu" if version("torch").endswith("+cpu") else "cuda"
    except PackageNotFoundError:
        build = "cuda"
    path = project / f"requirements-{build}.lock"
    if not path.exists():
        yield error(f"{path} is missing", "run the doctor in the root of the project, or `git checkout` it")
        return
    # Without an index: nothing is looked for but what is installed.
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "-q", "-r", str(path))
    found = subprocess.run(pip, capture_output=True, text=True)
    if found.returncode:
        reason = found.stderr.strip().rpartition("\n")[2]
        yield warning(
            f"installed packages are not those of {path.name}: {reason}", "install the lock with `make setup`"
        )
    else:
        yield ok(f"the packages are those of {path.name}")
