r"""JSON: all string values at any depth, in the order of the file. Keys, numbers, true, false and null are dropped.

Two readers give the same strings. A document that msgspec finds valid is cut (`json_values.py`), which is fast. msgspec
rejects lone surrogates, which RFC 8259 permits, and what occurs although the RFC forbids it (NaN, several documents in
a row). For these, and for files too large to be held, there is `scan`: fifty times slower, but it reads in pieces, at
any depth.

ijson would lose text. Its fast backend, yajl2_c, rejects documents with NaN, an integer above 64 bits or 1e999, reads
"\ud800" as "?" without an error, and reports no position. Of a file of 200 MB it reads 80 MB/s and `scan` 15 MB/s, in
22 and 28 MiB of memory (ijson 3.6).

Under a rule a record becomes objects, by Python's own parser: it is the one that gives both values of a key that occurs
twice, and NaN and lone surrogates too.
"""

import codecs
import io
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stages.formats import json_values, paths
from stages.formats.limits import LIMITS, Limits
from stages.formats.source import Rejected, Source
from stages.formats.writer import TextWriter

if TYPE_CHECKING:
    from stages.formats.records import Records

# Unrolled: runs of ordinary characters between escapes, so that no string makes the regular expression backtrack.
_CONTENT = r'[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*'  # of a string
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_TOKEN = re.compile(
    rf'[ \t\n\r]*(?:(?P<string>"{_CONTENT}")|(?P<mark>[][{{}},:])|(?P<scalar>{_NUMBER}|true|false|null|NaN|-?Infinity))'
)
_BEGUN = re.compile(rf'[ \t\n\r]*(?P<string>"{_CONTENT})?')
_INSIDE = re.compile(_CONTENT)
_SPACE = re.compile(r"[ \t\n\r]*")
_skip = msgspec.json.Decoder(msgspec.Raw).decode
_MOST_DIGITS = 4000  # of an integer: Python refuses 4301
_LONGEST_CUT = 16  # characters: a token that ends this close to the end of a piece may continue in the next one

# States of `scan`: the tokens that may come next. A string is `"`, a scalar `0`, any other token is itself.
_VALUE, _VALUE_OR_END = '"0[{', '"0[{]'
_KEY, _KEY_OR_END = '"', '"}'
_COLON = ":"
_OUTSIDE, _LIST, _MAP = b" [{"
_AFTER_VALUE = {_OUTSIDE: _VALUE, _LIST: ",]", _MAP: ",}"}  # by the innermost open bracket; after a document: another


def _no_number(_: str) -> None:
    """What NaN and the infinities, which JSON does not have, become in a record."""


def _integer(digits: str) -> int | None:
    return int(digits) if len(digits) < _MOST_DIGITS else None


_decoder = json.JSONDecoder(object_pairs_hook=paths.make_object, parse_constant=_no_number)
# Slower, as it calls a function for each integer.
_lenient = json.JSONDecoder(object_pairs_hook=paths.make_object, parse_constant=_no_number, parse_int=_integer)
decode_at = _decoder.raw_decode
"""The value at a place of a text, and the place after it. Raises ValueError, too, for an integer of many digits. Each
error counts the lines before it, so `text` should be short where there may be many."""


def decode(text: str) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is not valid.
    """
    try:
        return _decoder.decode(text)
    except ValueError:
        return _lenient.decode(text)


def read(source: Source, sink: TextWriter) -> None:
    """Put the strings of a file into `sink`; the file may contain several documents in a row."""
    if source.data is not None and is_document(source.data, source.limits):
        sink.add_json(source.data)
    else:
        scan(source.stream().read, sink, limits=source.limits)


def is_document(data: bytes, limits: Limits = LIMITS) -> bool:
    """Whether `data` is one document of JSON that `json_values.strings` can read.

    False also if it is too large to be held, if a string in it may be too long, or if it is nested deeply.
    """
    if len(data) > limits.largest_held:
        return False
    try:
        _skip(data)  # msgspec.Raw: validates all of it and creates no object for any value
    except (msgspec.DecodeError, RecursionError):  # msgspec recurses; `scan` then decides, and names the position
        return False
    if len(data) <= limits.longest_string:
        return True
    return not json_values.has_longer(data, limits.longest_string, limits.chunk)


def scan(read: Callable[[int], bytes], sink: TextWriter, line: int | None = None, limits: Limits = LIMITS) -> None:
    """Put the strings of documents in a row into `sink`, with memory for one piece of the file and its longest string.

    Args:
        read: Gives the next bytes of UTF-8: at most so many, and none at the end only.
        sink: Receives the strings.
        line: Which line of a file this is: one record, even of several documents. None: an entire file, in which each
            document is a record.
        limits: Size of the pieces, and of the longest string.

    Raises:
        Rejected: what follows the last complete document is not JSON; or the line cannot be read.
    """
    tokens = _Tokens(read, limits)
    next_token, longest_string = tokens.next, limits.longest_string  # local names, as this runs for each token
    strings: list[str] = []  # of the record, not yet in the sink
    size = 0  # characters of these
    rejected: Rejected | None = None  # why nothing is kept of the record, whose end is still to be found
    is_record = False  # whether the line has a document
    brackets = bytearray([_OUTSIDE])  # those that are open: a byte each, as a file may be nothing but brackets
    expected = _VALUE
    while True:
        is_key = expected in (_KEY, _KEY_OR_END)
        kind, string = next_token(expected, 0 if is_key or rejected else longest_string)
        if not kind:  # the end, or an error: `check_end` finds out which
            break
        if kind == '"':
            if is_key:
                expected = _COLON
                continue
            if string is not None:
                if size + len(string) > limits.chunk:  # a record of any size needs the memory of a piece
                    sink.add(strings)
                    strings, size = [], 0
                strings.append(string)
                size += len(string)
            elif not rejected:
                detail = f"a string has more than {longest_string} bytes of UTF-8: split it"
                rejected = Rejected("string too long", detail, f"line {tokens.line()}")
        elif kind in "[{":
            brackets.append(ord(kind))
            if len(brackets) > longest_string:
                raise Rejected("nested too deep", f"{longest_string} levels or more", f"line {tokens.line()}")
            expected = _VALUE_OR_END if kind == "[" else _KEY_OR_END
            continue
        elif kind in ",:":
            expected = _KEY if kind == "," and brackets[-1] == _MAP else _VALUE
            continue
        elif kind in "]}":
            brackets.pop()
        expected = _AFTER_VALUE[brackets[-1]]  # a value is complete
        if len(brackets) == 1:  # so is the document
            is_record = True
            if line is None:  # an error further on does not drop its strings
                if rejected:
                    sink.reject(rejected)
                else:
                    sink.add(strings)
                    sink.end()
                strings, size, rejected = [], 0, None
    if rejected:
        raise rejected
    tokens.check_end(is_complete=len(brackets) == 1)
    if line is not None and is_record:
        sink.add(strings)
        sink.end()


def read_records(source: Source, records: "Records") -> None:
    """Put the records of documents in a row into `records`, with memory for one of them.

    Raises:
        Rejected: what follows the last complete record is not JSON.
    """
    tokens = _Tokens(source.stream().read, source.limits)
    steps = None if records.each is None else paths.plain_steps(records.each)
    records.position = lambda: f"line {tokens.line()}"
    try:
        while kind := tokens.peek():
            if records.each is None:
                _select(tokens, (None,) if kind == "[" else (), records)
            elif steps is None:
                records.add(tokens.value())
            else:
                if kind != "{":
                    records.note_keys([] if kind == "[" else "")
                _select(tokens, steps, records, is_document=True)
    except RecursionError:
        raise Rejected("nested too deep", "more levels than a record may have", records.position()) from None
    tokens.check_end(is_complete=True)


def _select(
    tokens: "_Tokens", steps: tuple[paths.Step, ...] | None, records: "Records", is_document: bool = False
) -> None:
    """Add the records that plain steps lead to from the next value, which is never in memory as a whole.

    None: there are none in it.
    """
    kind = tokens.peek()
    if steps == ():
        try:
            records.take(tokens.value())
            return
        except TooLarge as rejected:
            records.reject(rejected)
            steps = None
    if kind not in ("[", "{"):
        tokens.expect('"0')
        return
    close = "]" if tokens.expect("[{")[0] == "[" else "}"
    if tokens.next(close, 0)[0]:
        return
    index = 0
    while True:
        key: str | int | None = index
        if close == "}":
            _, key = tokens.expect('"', tokens.limits.longest_string)  # None: it is too long
            tokens.expect(":")
            if is_document and key is not None:
                records.note_keys({key: None})
        is_on_path = steps is not None and steps[0] in (None, key)
        _select(tokens, steps[1:] if steps is not None and is_on_path else None, records)
        if tokens.expect("," + close)[0] == close:
            return
        index += 1


def documents(text: str, limits: Limits) -> list[Any]:
    """The documents in a line.

    Raises:
        Rejected: it is not JSON.
    """
    tokens = _Tokens(io.BytesIO(text.encode()).read, limits)
    found: list[Any] = []
    try:
        while tokens.peek():
            found.append(tokens.value())
    except RecursionError:
        raise Rejected("nested too deep", "more levels than a record may have") from None
    tokens.check_end(is_complete=True)
    return found


def is_too_large(text: str, limits: Limits, start: int = 0) -> bool:
    """Whether a record may need too much memory: a value that is an object needs up to a hundred bytes."""
    num_values = sum(text.count(mark, start) for mark in ",[{")
    return len(text) - start > limits.longest_record or num_values > limits.most_values


class TooLarge(Rejected):
    """A record that may need too much memory."""

    def __init__(self, limits: Limits) -> None:
        detail = f"more than {limits.longest_record} characters or {limits.most_values} values: split it"
        super().__init__("record too large", detail)


class _Tokens:
    """The tokens of a text, of which a piece is in memory."""

    def __init__(self, read: Callable[[int], bytes], limits: Limits) -> None:
        self._read, self.limits = read, limits
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_read = False  # all of it
        self._is_last = False  # the piece
        self._text = ""
        self._ahead = ""  # follows the text, where a value was sought in more than a piece
        self._place = 0  # in the text, after the last token
        self._certain = 0  # a token that ends before this place does not continue in the next piece
        self._lines_before = 0
        self._characters_before = 0  # of the line in which the text begins

    def next(self, expected: str, longest: int) -> tuple[str, str | None]:
        """Read the next token if it is one of those that may come next.

        Args:
            expected: Their kinds.
            longest: Bytes of UTF-8 that a string may have.

        Returns:
            The kind, empty if there is no such token; and the value of a string, or None if that is longer.

        Raises:
            Rejected: it is a number that is too long.
        """
        # `1` may become `12`, and what is no token yet may become one.
        while ((token := _TOKEN.match(self._text, self._place)) or self._begun()).end() >= self._certain:
            begun = self._begun()
            place = begun.end() - len(begun["string"] or "")  # white space is not kept
            if begun.end() - place > self.limits.chunk:
                return ('"', self._read_string(place, longest)) if '"' in expected else ("", None)
            if begun["string"] is None and len(self._text) - place > self.limits.longest_string:
                detail = f"a number has more than {self.limits.longest_string} characters"
                raise Rejected("number too long", detail, f"line {self.line()}")
            self._advance(place)
        if token is None:
            return "", None
        group = token.lastgroup
        kind = '"' if group == "string" else "0" if group == "scalar" else token["mark"]
        if kind not in expected:
            return "", None
        self._place = token.end()
        if kind != '"' or not longest:
            return kind, None
        string = _unescape(token["string"])
        return kind, None if _is_longer(string, longest) else string

    def peek(self) -> str:
        """The character that the next token begins with; empty at the end."""
        while True:
            self._place = _match(_SPACE, self._text, self._place).end()
            if self._place < len(self._text) or self._is_last:
                return self._text[self._place : self._place + 1]
            self._advance(self._place)

    def expect(self, expected: str, longest: int = 0) -> tuple[str, str | None]:
        """The next token as `next` gives it, which is one of those that are expected.

        Raises:
            Rejected: it is another one.
        """
        token = self.next(expected, longest)
        if not token[0]:
            self.peek()
            raise self._error()
        return token

    def value(self) -> Any:
        """The next value, which is held as a whole.

        Raises:
            Rejected: it is not valid, or is too large; in that case it can still be skipped.
            RecursionError: it is nested too deep.
        """
        try:
            return self._value()
        finally:  # tokens are sought in a piece: the regular expression needs memory for each escape
            end = self._place + self.limits.chunk
            if len(self._text) > end:
                self._text, self._ahead = self._text[:end], self._text[end:] + self._ahead
                self._set_certain()

    def _value(self) -> Any:
        decode_value = decode_at
        while True:
            try:
                value, end = decode_value(self._text, self._place)
                if end < self._certain:
                    self._place = end
                    return value
                failed = end
            except json.JSONDecodeError as error:
                failed = len(self._text) if error.msg.startswith("Unterminated") else error.pos
            except ValueError:  # an integer is too long
                decode_value = _lenient.raw_decode
                continue
            if failed < self._certain:  # so a further piece would not help
                self._place = failed
                raise self._error()
            if self._is_last:
                self._place = len(self._text)
                raise self._error()
            if is_too_large(self._text, self.limits, self._place):
                raise TooLarge(self.limits)
            self._advance(self._place)

    def check_end(self, is_complete: bool) -> None:
        """Raise `Rejected` unless only white space follows, and the last document is complete."""
        self._place = _match(_SPACE, self._text, self._place).end()
        if self._place < len(self._text) or not is_complete:
            raise self._error()

    def line(self) -> int:
        """The number of the current line, from 1."""
        return self._lines_before + self._text.count("\n", 0, self._place) + 1

    def _begun(self) -> re.Match[str]:
        """What the text has of the next token, if that is a string, and the white space before it."""
        return _match(_BEGUN, self._text, self._place)

    def _advance(self, place: int) -> None:
        """Drop the text before `place`, and read a further piece."""
        rest = self._text[place:]  # a token that is cut
        self._characters_before = self._column(place)
        self._lines_before += self._text.count("\n", 0, place)
        size = max(self.limits.chunk, len(rest))  # at least doubled: each byte is moved twice
        if self._ahead:
            piece, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            data = self._read(size)
            self._is_read = not data
            piece = self._decoder.decode(data, self._is_read)
        self._text, self._place = rest + piece, 0
        self._set_certain()

    def _set_certain(self) -> None:
        self._is_last = self._is_read and not self._ahead
        self._certain = len(self._text) + (1 if self._is_last else -_LONGEST_CUT)

    def _read_string(self, place: int, longest: int) -> str | None:
        """Read a string that begins at `place` and is longer than a piece, with memory for its value and a piece.

        None: the value has more than `longest` bytes of UTF-8.

        Raises:
            Rejected: it is not a string.
        """
        self._place = place + 1  # after the quote
        parts: list[bytes] = []  # of the value
        size = 0
        surrogate = ""  # the first half of a pair, of which the other half may be in the next piece
        while True:
            end = _match(_INSIDE, self._text, self._place).end()
            if size <= longest:
                value = surrogate + _decode(f'"{self._text[self._place : end]}"')
                surrogate = value[-1:] if "\ud800" <= value[-1:] <= "\udbff" else ""
                parts.append(replace_surrogates(value[: len(value) - len(surrogate)]).encode())
                size += len(parts[-1])
            self._place = end
            if self._text[end : end + 1] == '"':
                break
            if self._is_last or len(self._text) - end > _LONGEST_CUT:
                raise self._error()
            self._advance(end)
        self._place += 1
        parts.append(replace_surrogates(surrogate).encode())
        size += len(parts[-1])
        return b"".join(parts).decode() if size <= longest else None

    def _column(self, place: int) -> int:
        """The characters of its line before a place."""
        begin = self._text.rfind("\n", 0, place) + 1
        return place - begin if begin else self._characters_before + place

    def _error(self) -> Rejected:
        what = "the document does not end"
        if self._place < len(self._text):
            what = f"unexpected {self._text[self._place : self._place + 20]!r}"
        return Rejected("invalid JSON", what, f"line {self.line()}, character {self._column(self._place) + 1}")


def _match(pattern: re.Pattern[str], text: str, place: int) -> re.Match[str]:
    """The match of a pattern that matches nothing, too."""
    match = pattern.match(text, place)
    assert match
    return match


def _is_longer(string: str, size: int) -> bool:
    """Whether a string has more than `size` bytes of UTF-8."""
    return len(string) > size // 4 and len(string.encode()) > size  # a character has at most 4


def _unescape(string: str) -> str:
    """The value of a JSON string; lone surrogates, which UTF-8 cannot express, become U+FFFD."""
    return replace_surrogates(_decode(string)) if "\\" in string else string[1:-1]


def _decode(string: str) -> str:
    """The value of a JSON string."""
    value: str = json.loads(string)
    return value


def replace_surrogates(value: str) -> str:
    """Join pairs of surrogates, and replace the others."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
