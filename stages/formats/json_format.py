r"""JSON: all string values at any depth, in the order of the file, or the records of a rule.

Python's own parser reads every record: it is the one that gives both values of a key that occurs twice, NaN, and lone
surrogates. Where no rule asks for more, its hook makes strings of each object at once.

A document that is larger than a chunk of the file is read element by element, at any depth.
"""

import codecs
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from stages.formats import paths
from stages.formats.limits import Limits
from stages.formats.raw_content import RawContent, Rejected
from stages.formats.writer import TextWriter

if TYPE_CHECKING:
    from stages.formats.records import Records

_SPACE = re.compile(r"[ \t\n\r]*")
# Unrolled: runs of ordinary characters between escapes, so that no string makes the regular expression backtrack. For
# each repetition it keeps 168 bytes to go back to: so their number has a limit.
_INSIDE = re.compile(r'[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*){,9999}')  # of a string
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_KEY = re.compile(r'[ \t\n\r]*"[^"\\\x00-\x1f]*"[ \t\n\r]*:[ \t\n\r]*')  # without escapes, as most
_MOST_DIGITS = 4000  # of an integer: Python refuses 4301
_LONGEST_CUT = 16  # characters: a number or an escape that ends this close to the end of a chunk may be cut there
_MOST_TRIED = 64  # levels at which a collection is tried as a whole: below, each failure would cost a chunk again
_MOST_KEYS = 20  # of a document, for messages
_CLOSING = {"[": "]", "{": "}"}
_LARGE = object()  # in place of a collection that does not fit into a chunk

DecodeAt = Callable[[str, int], tuple[Any, int]]
"""The value at an index of a text, and the index after it. Raises `json.JSONDecodeError`, or RecursionError. Each error
counts the lines before it, so the text should be short where there may be many."""


def _no_number(_: str) -> None:
    """What NaN and the infinities, which JSON does not have, become in a record."""


def _integer(digits: str) -> int | None:
    return int(digits) if len(digits) < _MOST_DIGITS else None


def _flatten(values: list[Any]) -> list[str]:
    """The strings of some values as `_flat` has them: objects are tuples of their strings already."""
    found: list[str] = []
    for value in values:
        kind = type(value)
        if kind is str:
            found.append(value)
        elif kind is tuple:
            found += value
        elif kind is list:
            found += _flatten(value)
    return found


def _strings_of(pairs: list[tuple[str, Any]]) -> tuple[str, ...]:
    """The strings of an object."""
    return tuple(_flatten([value for _, value in pairs]))


_decoder = json.JSONDecoder(object_pairs_hook=paths.make_object, parse_constant=_no_number)
# Slower, as it calls a function for each integer.
_lenient = json.JSONDecoder(object_pairs_hook=paths.make_object, parse_constant=_no_number, parse_int=_integer)
_flat = json.JSONDecoder(object_pairs_hook=_strings_of, parse_int=float)  # which takes any number of digits


def value_at(text: str, index: int = 0) -> tuple[Any, int]:
    """`DecodeAt` of records."""
    try:
        return _decoder.raw_decode(text, index)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer is too long
        return _lenient.raw_decode(text, index)


def strings_at(text: str, index: int = 0) -> tuple[list[str], int]:
    """`DecodeAt` of all strings in a value, perhaps with lone surrogates."""
    value, end = _flat.raw_decode(text, index)
    return _flatten([value]), end


def decode(text: str) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is not valid.
    """
    try:
        return _decoder.decode(text)
    except ValueError:
        return _lenient.decode(text)


class Strings:
    """Where documents are put where no rule asks for more than their strings."""

    decode_at = staticmethod(strings_at)

    def __init__(self, sink: TextWriter, limits: Limits) -> None:
        self.position: Callable[[], str] = str
        """Where in the file the current document is; set by the reader."""
        self._sink = sink
        # A call of the sink is worth many strings. One that may be too long for it comes alone.
        self._most = min(limits.chunk, limits.longest_string // 4)  # characters
        self._complete: list[str] = []  # of complete records, not yet in the sink, before the others
        self._num_complete = 0
        self._current: list[str] = []  # of the current record
        self._size = 0  # characters of both
        self._is_begun = self._is_bad = False  # the current record: it is in the sink in part, or nothing is kept of it

    def add(self, strings: list[str]) -> None:
        """Add strings of the current record."""
        if self._is_bad:
            return
        self._current += strings
        self._size += sum(map(len, strings))
        if self._size > self._most:
            try:
                self.flush()
                self._sink.add(self._current)
                self._current, self._size, self._is_begun = [], 0, True
            except Rejected as rejected:
                self.reject(rejected)

    def reject(self, rejected: Rejected) -> None:
        """Report why nothing is kept of the current record, whose end is still to be found."""
        if not self._is_bad:
            self.flush()
            self._sink.reject(Rejected(rejected.reason, rejected.detail, self.position()))
        self._current, self._size, self._is_begun, self._is_bad = [], 0, False, True

    def end(self) -> None:
        """The current record is complete."""
        if self._is_begun:
            self._sink.add(self._current)
            self._sink.end()
        elif not self._is_bad:
            self._complete += self._current
            self._num_complete += 1
        self._current, self._is_begun, self._is_bad = [], False, False

    def flush(self) -> None:
        """Put the complete records into the sink."""
        if self._num_complete:
            self._sink.add(self._complete)
            self._sink.end(self._num_complete)
            self._complete, self._num_complete = [], 0


def read(content: RawContent, sink: TextWriter) -> None:
    """Put the strings of a file into `sink`; each of its documents, of which it may have several, is a record.

    Raises:
        Rejected: what follows the last complete document is not JSON.
    """
    into = Strings(sink, content.limits)
    tokens = Tokens(content.stream().read, content.limits, into.decode_at)
    into.position = tokens.position
    try:
        while tokens.peek():
            walk(tokens, None, into.add, into.reject)
            into.end()
    finally:
        into.flush()


def read_record(read: Callable[[int], bytes], into: "Strings | Records", limits: Limits) -> None:
    """Read documents in a row as one record, of which a chunk is in memory, or under a rule all of them.

    Args:
        read: Gives the next bytes of UTF-8: at most so many, and none at the end only.
        into: Receives the documents.
        limits: Size of the chunks, and of what is held.

    Raises:
        Rejected: it is not JSON, or under a rule too large.
    """
    tokens = Tokens(read, limits, into.decode_at)
    documents: list[Any] = []  # under a rule
    while tokens.peek():
        if isinstance(into, Strings):
            walk(tokens, None, into.add, into.reject)
            continue
        walk(tokens, (), documents.append, _refuse)
        if tokens.size > limits.longest_record:
            raise TooLarge(limits)
    for document in documents:
        into.add(document)
    into.end()


def _refuse(rejected: Rejected) -> NoReturn:
    raise rejected


def read_records(content: RawContent, records: "Records") -> None:
    """Put the records of documents in a row into `records`, with memory for one of them.

    Raises:
        Rejected: what follows the last complete record is not JSON.
    """
    tokens = Tokens(content.stream().read, content.limits, records.decode_at)
    records.position = tokens.position
    steps = None if records.each is None else paths.plain_steps(records.each)
    while kind := tokens.peek():
        if records.each is None:
            walk(tokens, (None,) if kind == "[" else (), records.take, records.reject)
        elif steps is None:
            walk(tokens, (), records.add, records.reject)
        else:
            before = records.num_seen
            document = walk(tokens, steps, records.take, records.reject)
            if records.num_seen == before:
                records.leave_out(records.no_record, document)


def is_too_large(text: str, limits: Limits, start: int = 0) -> bool:
    """Whether a record may need too much memory: a value that is an object needs up to a hundred bytes."""
    num_values = sum(text.count(mark, start) for mark in ",[{")
    return len(text) - start > limits.longest_record or num_values > limits.most_values


class TooLarge(Rejected):
    """A record that may need too much memory."""

    def __init__(self, limits: Limits, position: str | None = None) -> None:
        detail = f"more than {limits.longest_record} characters or {limits.most_values} values: split it"
        super().__init__("record too large", detail, position)


class _TooLong(Rejected):
    """A string that is not held in memory; what follows it can be read."""


def walk(
    tokens: "Tokens",
    steps: tuple[paths.Step, ...] | None,
    take: Callable[[Any], None],
    reject: Callable[[Rejected], None],
) -> Any:
    """Read the next document, which is never in memory as a whole.

    Args:
        tokens: Of the file.
        steps: Lead to the values that `take` gets. None: it gets everything, in values that fit into a chunk.
        take: Called with each value.
        reject: Called with why a value is not taken; what follows it is read.

    Returns:
        A value with the first keys of the document, for messages.

    Raises:
        Rejected: it is not JSON.
    """
    take_part = take if steps is None else lambda _: None
    found: dict[str, None] = {}
    begin = tokens.peek()
    closing: list[str] = []  # of the collections that are open, like the next two
    outer: list[tuple[paths.Step, ...] | None] = []  # the steps from each
    indices: list[int] = []
    while True:
        kind = tokens.peek()
        part: Any = _LARGE
        tokens.element = indices[-1] + 1 if steps is not None and closing[-1:] == ["]"] else 0  # without: not counted
        try:
            if steps == ():
                take(tokens.value())
                part = None
            elif (steps is None and len(outer) < _MOST_TRIED) or kind not in _CLOSING:
                part = tokens.value(is_whole=False)
                if part is not _LARGE and steps is None:
                    take_part(part)
        except _TooLong as rejected:
            reject(rejected)
            part = None
        except TooLarge as rejected:
            reject(rejected)
            steps = None
            continue
        except RecursionError:
            reject(Rejected("nested too deep", "more levels than a record may have"))
            steps = None
            continue
        if part is _LARGE:
            closing.append(_CLOSING[tokens.mark("[{")])
            outer.append(steps)
            indices.append(-1)
            if len(outer) > tokens.limits.deepest:
                raise Rejected("nested too deep", f"more than {tokens.limits.deepest} levels", tokens.line())
            if tokens.peek() == closing[-1]:
                tokens.mark(closing[-1])
                part = closing.pop(), outer.pop(), indices.pop()
        while part is not _LARGE and closing and tokens.mark("," + closing[-1]) != ",":
            closing.pop(), outer.pop(), indices.pop()
        if not closing:
            return found if begin == "{" else [] if begin == "[" else None
        if outer[-1] is None and len(outer) <= _MOST_TRIED and (strings := tokens.strings(closing[-1] == "}")):
            take_part(strings)
        indices[-1] += 1
        key: paths.Step = indices[-1]
        if closing[-1] == "}":
            key = tokens.key()
            tokens.mark(":")
            if len(closing) == 1 and key is not None and len(found) < _MOST_KEYS:
                found[str(key)] = None
        above = outer[-1]
        steps = above[1:] if above and above[0] in (None, key) else None


class Tokens:
    """The values and marks of a text, of which a chunk is in memory."""

    def __init__(self, read: Callable[[int], bytes], limits: Limits, decode_at: DecodeAt) -> None:
        self._read, self.limits, self._decode_at = read, limits, decode_at
        self.size = 0
        """Bytes that were read."""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_read = False  # all of it
        self._is_last = False  # the chunk
        self._text = ""
        self._ahead = ""  # follows the text, where a value was sought in more than a chunk
        self._index = 0  # in the text, after the last token
        self._begin = 0  # in the text, where the last value begins
        self._certain = 0  # a number that ends before this index does not continue in the next chunk
        self._lines_before = 0
        self._characters_before = 0  # of the line in which the text begins

        self.element = 0
        """The number of the last value in its list, from 1; 0: it is in none, or not under a rule. Set by `walk`."""

    def position(self) -> str:
        """The line in which the last value begins, and which element it is."""
        return self.line(self._begin) + f", element {self.element}" * bool(self.element)

    def line(self, index: int | None = None) -> str:
        """The line of an index in the text, or of the next token, from 1."""
        before = self._text.count("\n", 0, self._index if index is None else index)
        return f"line {self._lines_before + before + 1}"

    def peek(self) -> str:
        """The character that the next token begins with; empty at the end."""
        while True:
            character = self._text[self._index : self._index + 1]
            if character > " ":  # most: nothing is looked for
                return character
            self._index = _match(_SPACE, self._text, self._index).end()
            if self._index < len(self._text) or self._is_last:
                return self._text[self._index : self._index + 1]
            self._advance(self._index)

    def mark(self, expected: str) -> str:
        """Read the next token, which is one of the expected marks.

        Raises:
            Rejected: it is something else.
        """
        mark = self.peek()
        if not mark or mark not in expected:
            raise self._error()
        self._index += 1
        return mark

    def key(self) -> str | None:
        """Read a key; None: it is too long to be held.

        Raises:
            Rejected: it is something else.
        """
        if self.peek() != '"':
            raise self._error()
        try:
            key: str = self._value(value_at, is_whole=False)
        except _TooLong:
            return None
        return key

    def strings(self, is_object: bool) -> list[str]:
        """The strings of the next elements of a collection, each with the comma after it, that lie in the chunk.

        A large collection of small elements would take several times as long by `value`, `mark` and `key`.
        """
        self.peek()
        self._begin = index = self._index
        text, values = self._text, []
        find_begin = (_KEY if is_object else _SPACE).match
        with suppress(ValueError, RecursionError):
            while begin := find_begin(text, index):
                value, end = _flat.raw_decode(text, begin.end())
                if not (comma := _COMMA.match(text, end)):
                    break
                values.append(value)
                index = comma.end()
                if len(values) > 1:
                    continue
                # Where what is between the first two elements occurs last, one may end, too.
                if last := text.rfind(text[end - 1 : index + 1], index, index + self.limits.batch) + 1:
                    with suppress(ValueError, RecursionError):
                        inside = text[index:last].join("{}" if is_object else "[]")
                        values.append(_flat.decode(inside))
                        index = _match(_COMMA, text, last).end()
                        break
        self._index = index
        return _flatten(values)

    def value(self, is_whole: bool = True) -> Any:
        """Read the next value.

        Args:
            is_whole: Whether it is held, whatever its size. Otherwise `_LARGE` stands for a collection that is larger
                than a chunk or nested deep, of which nothing is read.

        Raises:
            Rejected: it is not valid, or is too large; in that case it can still be skipped.
            RecursionError: it is nested too deep, and can be skipped too.
        """
        try:
            return self._value(self._decode_at, is_whole)
        finally:  # what is tried as a whole is sought in a chunk
            end = self._index + self.limits.batch
            if len(self._text) > end + 3 * self.limits.batch:
                self._text, self._ahead = self._text[:end], self._text[end:] + self._ahead
                self._set_certain()

    def _value(self, decode_at: DecodeAt, is_whole: bool) -> Any:
        while True:
            start = self._begin = self._index
            text = self._text
            try:
                value, end = decode_at(text, start)
                if end < self._certain or text[end - 1] in '"]}':
                    self._index = end
                    return value
                failed = end
            except json.JSONDecodeError as error:
                failed = len(text) if error.msg.startswith("Unterminated") else error.pos
            except RecursionError:
                if is_whole:
                    raise
                return _LARGE
            if failed < self._certain:  # so a further chunk would not help
                self._index = failed
                raise self._error()
            if is_whole and is_too_large(text, self.limits, start):
                raise TooLarge(self.limits)
            if text[start] in _CLOSING:
                if not is_whole and 4 * (len(text) - start) >= self.limits.batch:  # a character has at most 4 bytes
                    return _LARGE
            elif len(text) - start > self.limits.longest_string:
                self._pass_over()
            self._advance(start)

    def _pass_over(self) -> NoReturn:
        """Raise Rejected at a string or a number that is too long, after the end of a string."""
        longest = self.limits.longest_string
        if self._text[self._index] != '"':
            raise Rejected("number too long", f"a number has more than {longest} characters", self.position())
        position = self.position()
        self._index += 1
        while self._text[self._index : self._index + 1] != '"':
            begin, self._index = self._index, _match(_INSIDE, self._text, self._index).end()
            if self._index > len(self._text) - _LONGEST_CUT and not self._is_last:
                self._advance(self._index)
            elif self._index == begin:
                raise self._error()
        self._index += 1
        detail = f"a string has more than {longest} bytes of UTF-8: split it"
        raise _TooLong("string too long", detail, position)

    def _advance(self, index: int) -> None:
        """Drop the text before `index`, and read a further chunk."""
        rest = self._text[index:]  # a token that is cut
        self._characters_before = self._column(index)
        self._lines_before += self._text.count("\n", 0, index)
        size = max(self.limits.batch, len(rest))  # at least doubled: each byte is moved twice
        if self._ahead:
            chunk, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            data = self._read(size)
            self._is_read = not data
            self.size += len(data)
            chunk = self._decoder.decode(data, self._is_read)
        self._text, self._index, self._begin = rest + chunk, 0, 0
        self._set_certain()

    def _set_certain(self) -> None:
        self._is_last = self._is_read and not self._ahead
        self._certain = len(self._text) + (1 if self._is_last else -_LONGEST_CUT)

    def _column(self, index: int) -> int:
        """The characters of its line before an index."""
        begin = self._text.rfind("\n", 0, index) + 1
        return index - begin if begin else self._characters_before + index

    def _error(self) -> Rejected:
        what = "the document does not end"
        if self._index < len(self._text):
            what = f"unexpected {self._text[self._index : self._index + 20]!r}"
        return Rejected("invalid JSON", what, f"{self.line()}, character {self._column(self._index) + 1}")


def _match(pattern: re.Pattern[str], text: str, index: int) -> re.Match[str]:
    """The match of a pattern that matches nothing, too."""
    match = pattern.match(text, index)
    assert match
    return match
