"""YAML: all string values at any depth, in the order of the file, each once; nothing is constructed.

libyaml's events are read, not objects: so tags run no code, aliases and merge keys repeat nothing, and an impossible
date costs nothing. Plain scalars are typed by the core schema of YAML 1.2 (section 10.3.2).
"""

import io
import re
from typing import Any, BinaryIO

import yaml
from yaml._yaml import CParser

from stages.corpus.formats.base import Place, Sink
from stages.corpus.source import Rejected, Source

_NO_STRING = re.compile(
    r"""null | Null | NULL | ~ |
        true | True | TRUE | false | False | FALSE |
        [-+]? [0-9]+ | 0o [0-7]+ | 0x [0-9a-fA-F]+ |
        [-+]? ( \. [0-9]+ | [0-9]+ ( \. [0-9]* )? ) ( [eE] [-+]? [0-9]+ )? |
        [-+]? \. ( inf | Inf | INF ) | \. ( nan | NaN | NAN )""",
    re.VERBOSE,
)
_FIRST_CHARACTERS = frozenset("nN~tTfF-+.0123456789")
_STANDARD = "tag:yaml.org,2002:"
_STRING_BY_TAG = {"!": True, _STANDARD + "str": True} | {
    _STANDARD + name: False for name in ("null", "bool", "int", "float", "binary", "timestamp")
}
_HIDDEN = {"\x85": "\ufdd01", "\u2028": "\ufdd02", "\u2029": "\ufdd03", "\ufdd0": "\ufdd00"}
_HIDING = {ord(shown): hidden for shown, hidden in _HIDDEN.items()}
_TO_HIDE = re.compile("[" + "".join(_HIDDEN) + "]")
_DEEPEST = 1000  # libyaml takes time quadratic in the depth: 7 ms for this one, minutes for a million
_BATCH = 1 << 20  # characters handed on at once, unless a string has more


def is_string(event: yaml.ScalarEvent) -> bool:
    """Whether a scalar is a string.

    A tag of YAML's own decides. Other tags belong to an application and leave the question to the scalar's looks:
    quoted and block scalars are strings, plain ones unless they look like something else.
    """
    tag = event.tag
    if tag is not None and tag in _STRING_BY_TAG:
        return _STRING_BY_TAG[tag]
    if event.style:
        return True
    value = event.value
    return value != "" and not (value[0] in _FIRST_CHARACTERS and _NO_STRING.fullmatch(value))


def read(source: Source, sink: Sink) -> None:
    """Put the strings of each document of a file into `sink`.

    Raises:
        Rejected: what follows the last whole document is no YAML, or is nested too deep.
    """
    text = _Text(source.stream())
    try:
        _read(CParser(text), text, sink)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}" if mark else None
        detail = ": ".join(part for part in (error.context, error.problem) if part)
        raise Rejected("invalid YAML", detail, position) from None
    except yaml.reader.ReaderError as error:
        raise Rejected("invalid YAML", f"{error.reason}: U+{error.character:04X}", f"byte {error.position}") from None


class _Text:
    """The content as libyaml shall see it.

    libyaml is of YAML 1.1, in which NEL, LS and PS are line breaks. Since YAML 1.2 they are characters like others
    (section 5.4), so they are hidden from libyaml behind a code point that Unicode reserves for such uses.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = io.TextIOWrapper(stream, "utf-8", newline="")
        self._hides = False

    def read(self, size: int = -1, /) -> str:
        """The next `size` characters, some of them hidden."""
        text = self._stream.read(size)
        if text.isascii() or not _TO_HIDE.search(text):  # `translate` takes as long as the parser
            return text
        self._hides = True
        return text.translate(_HIDING)

    def restore(self, value: str) -> str:
        """What `value` was before `read`."""
        if self._hides:
            for shown, hidden in _HIDDEN.items():
                value = value.replace(hidden, shown)
        return value


def _read(parser: CParser, text: _Text, sink: Sink) -> None:
    strings: list[str] = []
    size = 0  # characters of these
    places: list[str] = []  # of these
    where = Place() if sink.keep_source else None
    get_event, scalar = parser.get_event, yaml.ScalarEvent
    is_key: bool | None = None  # the next node, if the innermost open collection is a mapping
    outer: list[bool | None] = []  # the same of the collections around it
    key_depth = 0  # from this number of open collections on, everything belongs to a key that is itself a collection
    while True:
        event: Any = get_event()
        kind = type(event)
        if where:
            _follow(where, event, is_key, text)
        if kind is scalar:
            if is_key:
                is_key = False
                continue
            if is_key is not None:
                is_key = True
            if not key_depth and is_string(event):
                strings.append(text.restore(event.value))
                if where:
                    places.append(str(where))
                size += len(event.value)
                if size > _BATCH:
                    sink.add(strings, places)
                    strings, places, size = [], [], 0
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            outer.append(None if is_key is None else not is_key)
            if is_key and not key_depth:
                key_depth = len(outer)
            if len(outer) > _DEEPEST:
                line = event.start_mark.line + 1
                raise Rejected("nested too deep", f"more than {_DEEPEST} levels", f"line {line}")
            is_key = True if kind is yaml.MappingStartEvent else None
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            if key_depth == len(outer):
                key_depth = 0
            is_key = outer.pop()
        elif kind is yaml.AliasEvent:
            if is_key is not None:
                is_key = not is_key
        elif kind is yaml.DocumentEndEvent:
            sink.add(strings, places)
            sink.end()
            strings, places, size = [], [], 0
        elif kind is yaml.StreamEndEvent:
            return


def _follow(where: Place, event: Any, is_key: bool | None, text: _Text) -> None:
    """Keep `where` at the node that an event begins: a key that is no scalar is called `?`, or `*` and its anchor."""
    if isinstance(event, yaml.NodeEvent):
        if is_key is None:
            where.item()
        elif is_key:
            is_alias = isinstance(event, yaml.AliasEvent)
            key = event.value if isinstance(event, yaml.ScalarEvent) else f"*{event.anchor}" if is_alias else "?"
            where.key(text.restore(key))
        if isinstance(event, yaml.CollectionStartEvent):
            where.enter()
    elif isinstance(event, yaml.CollectionEndEvent):
        where.leave()
    elif isinstance(event, yaml.DocumentEndEvent):
        where.document += 1
