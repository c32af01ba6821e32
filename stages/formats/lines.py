"""The texts of many lines of JSON at once, where a rule names one key: several times as fast as record by record.

msgspec builds objects for this key only. Of two equal keys it keeps the last, and says nothing: so what it has found is
taken only if the key occurs in the bytes no more often than in the records.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from stages.formats import paths
from stages.formats.limits import Limits
from stages.formats.rules import Rule

_KEY = re.compile(r"[A-Za-z0-9_]+")
_find_columns = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class LineReader:
    """Reads the strings at some keys, each in the one before."""

    def __init__(self, keys: Sequence[str], limits: Limits) -> None:
        kind: Any = Any
        for key in reversed(keys):
            inner = kind if kind is Any else kind | None
            kind = msgspec.defstruct("Node", [("value", inner, msgspec.UNSET)], rename={"value": key}, gc=False)
        self._decode = msgspec.json.Decoder(kind).decode
        self._keys = [f'"{key}"'.encode() for key in keys]
        codes = "|".join(f"{ord(character):02x}" for character in sorted({*"".join(keys)}))
        self._escape = re.compile(rf"\\u00(?:{codes})".encode(), re.IGNORECASE)  # another spelling of a key
        self._longest = limits.longest_string // 4  # characters

    def read(self, lines: bytes) -> list[str | None] | None:
        """The string of each line, None of one without; None instead if it takes more to find them."""
        if b"\\u00" in lines and self._escape.search(lines):  # the first alone takes a tenth of the time
            return None
        try:
            nodes: list[Any] = [*map(self._decode, lines.removesuffix(b"\n").split(b"\n"))]
        except (msgspec.DecodeError, RecursionError):
            return None
        for key in self._keys:
            nodes = [node.value if node else msgspec.UNSET for node in nodes]  # null has no key
            if lines.count(key) != len(nodes) - nodes.count(msgspec.UNSET):
                return None
        texts = [node if type(node) is str else None for node in nodes]
        return texts if self._fit(texts) and {*map(type, nodes)}.isdisjoint((list, dict)) else None

    def find_columns(self, lines: bytes) -> Iterable[str]:
        """The keys of the first of some lines that `read` has read: of all would take as long as to read them."""
        columns: dict[str, msgspec.Raw] = _find_columns(lines.partition(b"\n")[0])
        return columns

    def are_texts(self, values: list[Any]) -> bool:
        """Whether some values of a column are what the rule takes as they are: strings, or None."""
        return len(self._keys) == 1 and {str, type(None)}.issuperset(map(type, values)) and self._fit(values)

    def _fit(self, texts: list[str | None]) -> bool:
        return 0 < max((len(text) for text in texts if text is not None), default=0) <= self._longest


def find_reader(rule: Rule, limits: Limits) -> LineReader | None:
    """The reader of lines for a rule that allows it."""
    steps = paths.plain_steps(rule.text) if rule.text and rule.each is None else None
    keys = [step for step in steps or () if isinstance(step, str) and _KEY.fullmatch(step)]
    return LineReader(keys, limits) if steps and len(keys) == len(steps) else None
