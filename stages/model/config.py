"""What a config.json may ask for, checked before transformers believes it: code, and more parts than a model has."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.base import publish
from stages.base.errors import StageError
from stages.model.files import CONFIG, TOKENIZER_CONFIG

_LIMITS = {re.compile(r"(^|_)(layers?|blocks|depth)$"): 1_000, re.compile(r"(^|_)(labels|classes)$"): 1_000_000}
"""The largest numbers of what transformers makes one by one, by the names of their keys. A layer takes it up to ten
milliseconds; the deepest language models have about 130."""
_NOT_HERE = "/|flash|deepgemm|sonicmoe"
"""Of the names of attention functions and experts: those that transformers does not contain."""


def check(directory: Path) -> None:
    """Check the config of a model, that of its tokenizer, and the configs in them.

    Raises:
        StageError: one is no JSON object, asks for code that is not part of transformers, for more layers than any
            model has, for NaN, or for results without names (`return_dict`).
    """
    for path in (directory / CONFIG, directory / TOKENIZER_CONFIG):
        if not path.is_file():
            continue
        try:
            content = publish.read_json(path)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise StageError(f"{path} is not a JSON object: fetch it again")
        _check(path, content)


def _check(path: Path, config: dict[str, Any]) -> None:
    for key, value in _items(config):
        if isinstance(value, float) and math.isnan(value):
            raise StageError(f"{path}: {key} is not a number (NaN): correct it in a copy")
        if key == "auto_map":
            raise StageError(
                f"{path} asks for code of its own (auto_map), which is never run: "
                "use a model whose class is part of transformers, or, if it is, remove `auto_map` in a copy"
            )
        if key == "return_dict" and value is False:
            raise StageError(f"{path}: return_dict is false: no stage reads the tuple of results: remove it in a copy")
        if key.endswith(("attn_implementation", "experts_implementation")) and re.search(_NOT_HERE, str(value)):
            kind, why = "a package for attention", "without which it cannot be loaded"
            if "flash" not in str(value) or "/" in str(value):
                kind, why = "a kernel of the Hub", "which is never run"
            raise StageError(f"{path} asks for {kind} ({key}: {value!r}), {why}: remove `{key}` in a copy")
        limit = next((limit for pattern, limit in _LIMITS.items() if pattern.search(key)), None)
        if limit is not None and isinstance(value, (int, float)) and not value <= limit:
            raise StageError(f"{path}: {key} is {value}, and at most {limit:,} are built: correct it in a copy")


def _items(config: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values of a JSON value, at any depth."""
    pending = [config]  # a stack of our own: depth is not limited by recursion
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield from value.items()
        if isinstance(value, (dict, list)):
            pending.extend(value.values() if isinstance(value, dict) else value)
