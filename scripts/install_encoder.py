"""Install the fast tokenizer of `pack` (stages/tokenizing/fast_tokenizer.py) in a directory of its own.

Example  python -m scripts.install_encoder

transformers requires another version of the same package, so both cannot be installed in the same place.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from stages.tokenizing.fast_tokenizer import DIRECTORY

LOCK = Path(__file__).parents[1] / "requirements-encoder.lock"


def main() -> int:
    temporary = DIRECTORY.with_name(f"{DIRECTORY.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    command = [sys.executable, "-m", "scripts.install", "--require-hashes", "--no-deps", "--target", str(temporary)]
    status = subprocess.run([*command, "--requirement", str(LOCK)]).returncode
    if status == 0:
        shutil.rmtree(DIRECTORY, ignore_errors=True)
        temporary.rename(DIRECTORY)
    return status


if __name__ == "__main__":
    sys.exit(main())
