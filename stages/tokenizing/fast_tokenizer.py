"""tokenizers 1.0, a release candidate that encodes many times as fast as the version that transformers requires.

It is installed in a directory of its own (requirements-encoder.lock) and imported under another name, so that both are
in one process and can be compared.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stages.base.errors import StageError

Result = TypeVar("Result")

VERSION = "1.0.0rc3"
"""That of requirements-encoder.lock. A part of the keys in the reuse store, as all code of the stage."""
NAME = f"tokenizers {VERSION}"
DIRECTORY = Path(sys.prefix) / f"tokenizers-{VERSION}"


class Failed(Exception):
    """The tokenizer cannot be read, or a text not be encoded."""


class FastTokenizer:
    """A tokenizer without truncation, padding, and special tokens around a text or within it."""

    def __init__(self, content: bytes) -> None:
        """`content`: of a `tokenizer.json`."""
        # A file without a name, as workers are killed at any time. No other function of the package reads a file.
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
            tokenizer = _call(_import(DIRECTORY).Tokenizer.from_file, f"/dev/fd/{file.fileno()}")
        # One by one: `encode_batch` always starts a thread per core, which needs a third more CPU time.
        self._encode = partial(
            tokenizer.encode, add_special_tokens=False, encode_special_tokens=True, padding=None, truncation=None
        )

    def encode(self, strings: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each string's tokens, (n,).

        Raises:
            Failed: one of them cannot be encoded.
        """
        return _call(lambda: [self._encode(string).ids_array for string in strings])


def check_installed() -> None:
    """Raise StageError if the package is not installed in this environment."""
    _import(DIRECTORY)


@cache
def _import(directory: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fast_tokenizers", directory / "tokenizers" / "__init__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it imports its extension relative to this name
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, SyntaxError) as error:
        raise StageError(
            f"fast_encoder is true, but {directory} is missing or damaged ({error}): `python -m "
            "scripts.install_encoder` installs it; fast_encoder: false encodes the same tokens without it, but slower"
        ) from None
    return module


def _call(function: Callable[..., Result], *args: Any) -> Result:
    try:
        return function(*args)
    except MemoryError:
        raise
    except BaseException as error:
        # Of the latter, a panic of Rust, only the name is known: it is no Exception, and no module exports it.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise Failed(str(error)) from None
        raise
