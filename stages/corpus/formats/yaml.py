"""YAML: all string values at any depth, in the order of the file, each once; nothing is constructed.

libyaml's events are read, not objects: so tags run no code, aliases and merge keys repeat nothing, and an impossible
date costs nothing. Plain scalars are typed by the core schema of YAML 1.2 (section 10.3.2).
"""

import re
from typing import Any

import yaml
from yaml._yaml import CParser

from stages.corpus.formats.base import Sink
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
_NO_STRING_TAGS = frozenset(_STANDARD + name for name in ("null", "bool", "int", "float", "binary", "timestamp"))
_NODES = frozenset([yaml.ScalarEvent, yaml.AliasEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent])
_ENDS = frozenset([yaml.MappingEndEvent, yaml.SequenceEndEvent])
_DEEPEST = 1000  # libyaml takes time quadratic in the depth: 7 ms for this one, minutes for a million
_BATCH = 1 << 14  # strings handed on at once


def is_string(event: yaml.ScalarEvent) -> bool:
    """Whether a scalar is a string.

    A tag of YAML's own decides. Other tags belong to an application and leave the question to the scalar's looks:
    quoted and block scalars are strings, plain ones unless they look like something else.
    """
    if event.tag in ("!", _STANDARD + "str"):
        return True
    if event.tag in _NO_STRING_TAGS:
        return False
    value = event.value
    is_plain = not event.style
    return not (is_plain and (not value or (value[0] in _FIRST_CHARACTERS and _NO_STRING.fullmatch(value))))


def read(source: Source, sink: Sink) -> None:
    """Put the strings of each document of a file into `sink`.

    Raises:
        Rejected: what follows the last whole document is no YAML, or is nested too deep.
    """
    parser = CParser(source.stream())
    try:
        _read(parser, sink)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}" if mark else None
        detail = ": ".join(part for part in (error.context, error.problem) if part)
        raise Rejected("invalid YAML", detail, position) from None
    except yaml.reader.ReaderError as error:
        raise Rejected("invalid YAML", f"{error.reason}: U+{error.character:04X}", f"byte {error.position}") from None


def _read(parser: CParser, sink: Sink) -> None:
    strings: list[str] = []
    # For each open mapping whether its next node is a key, for each open sequence None.
    open_: list[bool | None] = []
    key_depth = 0  # from this number of open collections on, everything belongs to a key that is itself a collection
    while True:
        event: Any = parser.get_event()
        kind = type(event)
        if kind in _NODES:
            is_key = False
            if open_ and open_[-1] is not None:
                is_key = open_[-1]
                open_[-1] = not is_key
            if kind is yaml.ScalarEvent:
                if not is_key and not key_depth and is_string(event):
                    strings.append(event.value)
            elif kind is not yaml.AliasEvent:
                open_.append(True if kind is yaml.MappingStartEvent else None)
                if is_key and not key_depth:
                    key_depth = len(open_)
                if len(open_) > _DEEPEST:
                    line = event.start_mark.line + 1
                    raise Rejected("nested too deep", f"more than {_DEEPEST} levels", f"line {line}")
        elif kind in _ENDS:
            if key_depth == len(open_):
                key_depth = 0
            open_.pop()
        elif kind is yaml.DocumentEndEvent:
            sink.add(strings)
            sink.end()
            strings = []
        elif kind is yaml.StreamEndEvent:
            return
        if len(strings) == _BATCH:
            sink.add(strings)
            strings = []
