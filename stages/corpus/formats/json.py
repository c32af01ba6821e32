r"""JSON: all string values at any depth, in the order of the file. Keys, numbers, true, false and null are dropped.

Two readers give the same strings. A document that msgspec finds valid is cut (`json_values.py`), which is fast. msgspec
rejects lone surrogates, which RFC 8259 permits, and what occurs although the RFC forbids it (NaN, several documents in
a row). For these, for files too large to be held, and where the place of each string is needed, there is `scan`: fifty
times slower, but it reads in pieces and at any depth.

ijson would lose text. Its fast backend, yajl2_c, rejects documents with NaN, an integer above 64 bits or 1e999, reads
"\ud800" as "?" without an error, and reports no position. Of a file of 200 MB it reads 80 MB/s and `scan` 15 MB/s, in
22 and 28 MiB of memory (ijson 3.6).
"""

import codecs
import json
import re
from typing import BinaryIO

import msgspec

from stages.corpus.formats.sink import Place, Sink
from stages.corpus.limits import LIMITS, Limits
from stages.corpus.source import Rejected, Source

# Unrolled: runs of ordinary characters between escapes, so that no string makes the regular expression backtrack.
_STRING = r'"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*'  # without its last quote
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_TOKEN = re.compile(
    rf'[ \t\n\r]*(?:(?P<string>{_STRING}")|(?P<mark>[][{{}},:])|(?P<scalar>{_NUMBER}|true|false|null|NaN|-?Infinity))'
)
_BEGUN = re.compile(rf"[ \t\n\r]*(?:{_STRING})?")
_SPACE = re.compile(r"[ \t\n\r]*")
_skip = msgspec.json.Decoder(msgspec.Raw).decode
_LONGEST_CUT = 16  # characters: a token that ends this close to the end of a piece may continue in the next one

# States of `scan`: the tokens that may come next. A string is `"`, a scalar `0`, any other token is itself.
_VALUE, _VALUE_OR_END = '"0[{', '"0[{]'
_KEY, _KEY_OR_END = '"', '"}'
_COLON = ":"
_OUTSIDE, _LIST, _MAP = b" [{"
_AFTER_VALUE = {_OUTSIDE: _VALUE, _LIST: ",]", _MAP: ",}"}  # by the innermost open bracket; after a document: another


def read(source: Source, sink: Sink) -> None:
    """Put the strings of a file into `sink`; the file may contain several documents in a row."""
    limits = source.limits
    if source.data is not None and not sink.keep_source and is_document(source.data, limits.largest_held):
        sink.add_json(source.data)
    else:
        scan(source.stream(), sink, limits=limits)


def is_document(data: bytes, longest: int = LIMITS.largest_held) -> bool:
    """Whether `data` is one document of JSON that `json_values.strings` can read.

    False also if it has more than `longest` bytes or is nested deeply.
    """
    if len(data) > longest:
        return False
    try:
        _skip(data)  # msgspec.Raw: validates all of it and creates no object for any value
    except (msgspec.DecodeError, RecursionError):  # msgspec recurses; `scan` then decides, and names the position
        return False
    return True


def scan(stream: BinaryIO, sink: Sink, line: int | None = None, limits: Limits = LIMITS) -> None:
    """Put the strings of documents in a row into `sink`, with memory for one piece of the file and its longest string.

    Args:
        stream: UTF-8.
        sink: Receives the strings, with their places if it keeps these.
        line: Which line of a file this is; None: an entire file, so that documents are counted.
        limits: Size of the pieces, and of the longest string.

    Raises:
        Rejected: what follows the last complete document is not JSON.
    """
    window = _Window(stream, limits)
    text, place = "", 0
    strings: list[str] = []
    places: list[str] = []  # of these
    where = Place(line or 1) if sink.keep_source else None
    brackets = bytearray([_OUTSIDE])  # those that are open: a byte each, as a file may be nothing but brackets
    expected = _VALUE
    while True:
        token = _TOKEN.match(text, place)
        # Before the token is used: `1` may become `12`, and what is no token yet may become one.
        if not window.is_last and len(text) - (token.end() if token else _end_of_begun(text, place)) <= _LONGEST_CUT:
            # Handed over with each piece, so that a document of any size needs the memory of one.
            sink.add(strings, places)
            strings, places = [], []
            text, place = window.advance(place), 0
            continue
        if token is None:  # the end, or an error: `check_end` finds out which
            break
        group = token.lastgroup
        kind = '"' if group == "string" else "0" if group == "scalar" else token["mark"]
        if kind not in expected:
            break
        place = token.end()
        if where and expected in (_VALUE, _VALUE_OR_END) and brackets[-1] == _LIST:
            where.item()
        if kind == '"':
            if expected in (_KEY, _KEY_OR_END):
                if where:
                    where.key(_unescape(token["string"]))
                expected = _COLON
                continue
            strings.append(_unescape(token["string"]))  # a value: keys were handled above
            if where:
                places.append(str(where))
        elif kind in "[{":
            brackets.append(ord(kind))
            if where:
                where.enter()
            expected = _VALUE_OR_END if kind == "[" else _KEY_OR_END
            continue
        elif kind in ",:":
            expected = _KEY if kind == "," and brackets[-1] == _MAP else _VALUE
            continue
        elif kind in "]}":
            brackets.pop()
            if where:
                where.leave()
        expected = _AFTER_VALUE[brackets[-1]]  # a value is complete
        if len(brackets) == 1:  # so is the document: an error further on does not drop its strings
            sink.add(strings, places)
            sink.end()
            strings, places = [], []
            if where and line is None:
                where.record += 1
    window.check_end(place, is_complete=len(brackets) == 1)


class _Window:
    """The piece of the text that is in memory, and where it is in the file."""

    def __init__(self, stream: BinaryIO, limits: Limits) -> None:
        self.is_last = False
        self._stream, self._limits = stream, limits
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._lines_before = self._characters_before = 0

    def advance(self, place: int) -> str:
        """The text from `place` on, and a further piece of the file.

        Raises:
            Rejected: the text from `place` on is a string that is too long.
        """
        self._lines_before += self._text.count("\n", 0, place)
        self._characters_before += place
        rest = self._text[place:]  # a token that is cut, most often a string
        longest = self._limits.longest_string
        if len(rest) > longest:
            position = f"line {self._lines_before + 1}"
            raise Rejected("string too long", f"more than {longest} characters", position)
        piece = self._stream.read(max(self._limits.chunk, len(rest)))  # at least doubled: each byte is moved twice
        self.is_last = not piece
        self._text = rest + self._decoder.decode(piece, self.is_last)
        return self._text

    def check_end(self, place: int, is_complete: bool) -> None:
        """Raise `Rejected` unless only white space follows `place`, and the last document is complete."""
        space = _SPACE.match(self._text, place)
        assert space
        place = space.end()
        if place == len(self._text) and is_complete:
            return
        what = "the document does not end"
        if place < len(self._text):
            what = f"unexpected {self._text[place : place + 20]!r}"
        line = self._lines_before + self._text.count("\n", 0, place) + 1
        raise Rejected("invalid JSON", what, f"line {line}, character {self._characters_before + place}")


def _end_of_begun(text: str, place: int) -> int:
    """The place up to which `text` may be the beginning of a token."""
    begun = _BEGUN.match(text, place)
    assert begun
    return begun.end()


def _unescape(string: str) -> str:
    """The value of a JSON string; lone surrogates, which UTF-8 cannot express, become U+FFFD."""
    if "\\" not in string:
        return string[1:-1]
    value: str = json.loads(string)
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
