"""Install lm-evaluation-harness in a directory of its own (requirements-score.lock).

Example  python -m stages.scoring.packages, which `score` needs only where it finds no packages

Its full installation replaces packages that all stages use. So it has only what it needs here, and only the ranks that
measure, and `--fetch`, have the directory on `sys.path`, behind all other packages.
"""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from stages.base import command, publish
from stages.base.errors import StageError
from stages.scoring import network

VERSION = "0.4.13"
"""Of lm-eval, in the lock."""
LOCK = Path("requirements-score.lock")


def directory() -> Path:
    """Where the packages of the lock are, or will be.

    Copies of the project that DVC makes for experiments share it. Its name changes with the lock and with Python.
    """
    digest = publish.sha256_file(LOCK)[:8]
    name = f"lm-eval-{VERSION}-{sys.implementation.cache_tag}-{digest}"
    return Path(os.environ.get("DVC_ROOT", "."), ".packages", name).absolute()


def ensure_installed() -> Path:
    """Install the packages if they are not there.

    Returns:
        Their directory.

    Raises:
        StageError: pip cannot install them.
    """
    target = directory()
    if target.is_dir():
        return target
    with publish.lock(target):
        if target.is_dir():  # another run has installed them meanwhile
            return target
        print(f"score: installing lm-eval {VERSION} into {target}", flush=True)
        temporary = target.with_name(f"{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--require-hashes", "--no-deps", "--only-binary=:all:"]
        options = ["--target", str(temporary), "--requirement", str(LOCK)]
        if subprocess.run([*pip, *options], stdin=subprocess.DEVNULL).returncode:
            raise StageError(
                f"pip could not install {LOCK}, see above: make an index or a directory of wheels reachable "
                "(PIP_INDEX_URL, PIP_FIND_LINKS), or set tasks: []"
            )
        temporary.rename(target)
    return target


def use(packages: Path) -> None:
    """Make lm-eval importable from a directory, have it print no more than errors, and keep it to this machine."""
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    sys.path.append(str(packages))
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    network.refuse()


def main() -> None:
    """Install the packages."""
    command.parser(__doc__).parse_args()
    ensure_installed()


if __name__ == "__main__":
    command.run(main)
