"""JSON: all string values at any depth, in the order of the file. Keys, numbers, true, false and null are dropped.

Two readers give the same strings. A document that msgspec finds valid is cut (`stages/corpus/cut.py`), which is fast.
msgspec refuses halves of surrogate pairs, which RFC 8259 leaves open, and what occurs although it forbids it (NaN,
several documents in a row). For these, for files too large to be held, and where the place of each string is wanted,
there is `scan`, fifty times slower, which reads in pieces and at any depth.
"""

import codecs
import json
import re
from typing import BinaryIO

import msgspec

from stages.corpus.formats.base import Place, Sink
from stages.corpus.source import CHUNK, LONGEST_STRING, WHOLE, Rejected, Source

_STRING = r'"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*'  # without its last quote
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_TOKEN = re.compile(
    rf'[ \t\n\r]*(?:(?P<string>{_STRING}")|(?P<mark>[][{{}},:])|(?P<other>{_NUMBER}|true|false|null|NaN|-?Infinity))'
)
_BEGUN = re.compile(rf"[ \t\n\r]*(?:{_STRING})?")
_SPACE = re.compile(r"[ \t\n\r]*")
_skip = msgspec.json.Decoder(msgspec.Raw).decode
_LONGEST_CUT = 16  # characters: so near to the end of a piece, a token may go on in the next one

# What may come next.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END = range(6)


def read(source: Source, sink: Sink) -> None:
    """Put the strings of a file into `sink`; the file may hold several documents in a row."""
    if source.data is not None and not sink.keep_source and is_document(source.data):
        sink.add_json(source.data)
    else:
        scan(source.stream(), sink)


def is_document(data: bytes) -> bool:
    """Whether `data` is one document of JSON that `cut.strings` takes; False also where it is long or nested deeply."""
    if len(data) > WHOLE:
        return False
    try:
        _skip(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def scan(stream: BinaryIO, sink: Sink, line: int | None = None) -> None:
    """Put the strings of documents in a row into `sink`, with memory for one piece of the file and its longest string.

    Args:
        stream: UTF-8.
        sink: Gets the strings, with their places if it keeps these.
        line: Which line of a file this is; None: a whole file, so that documents are counted.

    Raises:
        Rejected: what follows the last whole document is no JSON.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, place, is_all = "", 0, False
    lines_before, characters_before = 0, 0  # of `text`
    strings: list[str] = []
    places: list[str] = []  # of these
    where = Place(line or 1) if sink.keep_source else None
    containers = bytearray()  # the brackets that are open
    expected = _VALUE
    while True:
        token = _TOKEN.match(text, place)
        if not is_all and len(text) - (token.end() if token else _end_of_begun(text, place)) <= _LONGEST_CUT:
            sink.add(strings, places)
            strings, places = [], []
            lines_before += text.count("\n", 0, place)
            characters_before += place
            if len(text) - place > LONGEST_STRING:
                raise Rejected("string too long", f"more than {LONGEST_STRING} characters", f"line {lines_before + 1}")
            piece = stream.read(max(CHUNK, len(text) - place))  # at least twice the rest, so that each byte moves twice
            is_all = not piece
            text, place = text[place:] + decoder.decode(piece, is_all), 0
            continue
        kind, mark = (token.lastgroup, token["mark"]) if token else (None, None)
        is_value = expected <= _VALUE_OR_END
        ended = False
        if where and is_value and containers[-1:] == b"[":
            where.item()
        if kind == "string" and is_value:
            assert token
            strings.append(_unescape(token["string"]))
            if where:
                places.append(str(where))
            ended = True
        elif kind == "string" and expected in (_KEY, _KEY_OR_END):
            if where:
                assert token
                where.key(_unescape(token["string"]))
            expected = _COLON
        elif kind == "other" and is_value:
            ended = True
        elif mark == "," and expected == _COMMA_OR_END:
            expected = _KEY if containers[-1:] == b"{" else _VALUE
        elif mark == ":" and expected == _COLON:
            expected = _VALUE
        elif mark in ("[", "{") and is_value:
            assert mark
            containers += mark.encode()
            if where:
                where.enter()
            expected = _KEY_OR_END if mark == "{" else _VALUE_OR_END
        elif (mark == "]" and containers[-1:] == b"[" and expected in (_VALUE_OR_END, _COMMA_OR_END)) or (
            mark == "}" and containers[-1:] == b"{" and expected in (_KEY_OR_END, _COMMA_OR_END)
        ):
            containers.pop()
            if where:
                where.leave()
            ended = True
        else:
            break
        assert token
        place = token.end()
        if ended:
            expected = _COMMA_OR_END if containers else _VALUE
            if not containers:
                sink.add(strings, places)
                sink.end()
                strings, places = [], []
                if where and line is None:
                    where.document += 1

    space = _SPACE.match(text, place)
    assert space
    place = space.end()
    if place < len(text) or containers:
        line = lines_before + text.count("\n", 0, place) + 1
        what = f"unexpected {text[place : place + 20]!r}" if place < len(text) else "the document does not end"
        raise Rejected("invalid JSON", what, f"line {line}, character {characters_before + place}")


def _end_of_begun(text: str, place: int) -> int:
    """Up to where `text` may be the beginning of a token."""
    begun = _BEGUN.match(text, place)
    assert begun
    return begun.end()


def _unescape(string: str) -> str:
    """The value of a JSON string; halves of surrogate pairs, which UTF-8 cannot express, become U+FFFD."""
    if "\\" not in string:
        return string[1:-1]
    value: str = json.loads(string)
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
