"""The events of YAML 1.2.2, for documents that libyaml refuses although they are valid.

Production by production, as the specification has them: indentation and the context (block or flow) are arguments, and
nothing else is remembered but the place in the text. It reads 0.3 to 2 MB/s, a tenth of libyaml, and needs the text in
memory. Each production is a generator of events and of other productions, which `Events` runs with a stack of its own:
so the depth of a document is not limited by that of Python's stack.

The time is linear in the text, and so is the memory: characters are passed over by regular expressions that do not
backtrack, and of a key, which only the colon after it shows to be one, the length is limited.
"""

import re
import sys
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, NoReturn, TypeAlias
from urllib.parse import unquote

import yaml

from stages.corpus.formats import json
from stages.corpus.source import Rejected

_LONGEST_KEY = 1024  # characters before the colon, where the colon alone makes a key (section 7.4.2)
_END = "\0"  # follows the text; as a character of the text, it is not allowed anywhere
_AFTER = " \t\n" + _END  # what follows an indicator
_FLOW = ",[]{}"
_AFTER_IN_FLOW = _AFTER + ",]}"
_WHITE, _BLANKS, _SPACES = re.compile(r"[ \t\n]*"), re.compile(r"[ \t]*"), re.compile(" *")
# Only quotes may contain these, and of control characters not even they.
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\ufeff\ufffe\uffff]")
_CONTROL = re.compile("[\0-\x08\x0b-\x1f]")
_NOT_FIRST = frozenset(" \t\n,[]{}#&*!|>'\"%@`" + _END)  # of a plain scalar
_END_OF_PLAIN = re.compile(r":(?=[ \t\n\0])|(?<=[ \t])#|[\n\0]")
_END_OF_PLAIN_IN_FLOW = re.compile(r":(?=[ \t\n\0,\[\]{}])|(?<=[ \t])#|[\n\0,\[\]{}]")
_QUOTED = {'"': re.compile(r'"(?:[^"\\\n]|\\.)*"'), "'": re.compile(r"'(?:[^'\n]|'')*'")}  # on one line
_NAME = re.compile(r"[^ \t\n\0,\[\]{}]+")  # of an anchor
_URI = r"[\w\-#;/?:@&=+$,.!~*'()\[\]%]+"
_HANDLE = "!(?:[0-9A-Za-z-]*!)?"
_TAG = re.compile(rf"!<({_URI})>|({_HANDLE})([\w\-#;/?:@&=+$.~*'()%]*)", re.ASCII)
_HEADER = re.compile(r"[|>](?:([1-9])([-+]?)|([-+])([1-9]?))?(?:[ \t]+#[^\n\0]*|[ \t]*)(?=[\n\0])")
_NO_ESCAPE = re.compile("%(?![0-9a-fA-F]{2})")  # in a tag
# At the start of a line: not even allowed in quotes, and the end of a document, whose successor a mark may precede.
_MARKER = re.compile(r"(?:---|\.\.\.)(?=[ \t\n\0])")
_END_OF_DOCUMENT = re.compile(_MARKER.pattern + "|\ufeff")
_NAME_OF_DIRECTIVE = re.compile(r"%[^ \t\n\0]*")
_DIRECTIVES = {
    "%YAML": re.compile(r"%YAML[ \t]+1\.[0-9]+(?=[ \t\n\0])"),
    "%TAG": re.compile(rf"%TAG[ \t]+({_HANDLE})[ \t]+({_URI})(?=[ \t\n\0])", re.ASCII),
}
_OTHER_DIRECTIVE = re.compile(r"%[^ \t\n\0]+(?:[ \t]+[^# \t\n\0][^ \t\n\0]*)*")
_QUOTE_OR_ESCAPE = {'"': re.compile(r'"|\\[^\0]', re.DOTALL), "'": re.compile("''|'")}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b",
    " ": " ", '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029",
}  # fmt: skip

Production: TypeAlias = "Iterator[yaml.Event | Production]"


class Mark(NamedTuple):
    """A place in a file, from 0."""

    line: int
    column: int


class Events:
    """The events of documents in a row, as `get_event` of PyYAML's parsers returns them."""

    def __init__(self, text: str, line: int = 0, is_start: bool = True) -> None:
        """Nothing is read yet.

        Args:
            text: The documents, with line feeds as line ends.
            line: Of the file, in which the text begins.
            is_start: Whether it is the start of the file: only there, and after `...`, a document needs no `---`.
        """
        self._text, self._last, self._is_start = text + _END, len(text), is_start
        self._place = self._line_start = 0
        self._line = line
        self._is_fresh = True  # only white space is before the place in its line
        self._indent = 0  # spaces at the start of that line, if so
        self._is_json = False  # whether the last node was quoted or in brackets: a colon may follow it at once
        self._handles: dict[str, str] = {}  # of tags
        self._unprintable = self._find_unprintable()
        self._closed: dict[int, int] = {}  # of brackets on this line: the place of the first, and the end of the last
        self._matched_to = 0  # of brackets before this place, those that are not in `_closed` are no keys
        self._events = self._run(self._stream())

    def get_event(self) -> yaml.Event:
        """The next event.

        Raises:
            Rejected: what follows is not YAML.
        """
        return next(self._events)

    def close(self) -> None:
        """Nothing more is read. Without this, the text stays in memory until garbage is collected."""
        self._events.close()

    @staticmethod
    def _run(first: Production) -> Generator[yaml.Event, None, None]:
        stack = [first]
        while stack:
            step = next(stack[-1], None)
            if step is None:
                stack.pop()
            elif isinstance(step, yaml.Event):
                yield step
            else:
                stack.append(step)

    # Documents (chapter 9)

    def _stream(self) -> Production:
        may_be_bare = self._is_start
        while True:
            self._skip_prefix()
            has_directives = self._directives(may_be_bare)
            if self._is_end():
                break
            if self._is_marker("...") and not has_directives:
                self._take(3)
                self._end_line()
                may_be_bare = True
                continue
            is_explicit = self._is_marker("---")
            if is_explicit:
                self._take(3)
            elif has_directives or not may_be_bare:
                self._fail("expected ---")
            yield yaml.DocumentStartEvent(self._mark(), self._mark(), is_explicit, None, self._handles)
            yield self._block_node(-1, has_sequence=False, is_compact=not is_explicit)
            if not self._is_document_end():
                self._fail("expected the end of the document")
            may_be_bare = False
            yield yaml.DocumentEndEvent(self._mark(), self._mark(), self._is_marker("..."))
        if has_directives:
            self._fail("expected --- after directives")
        yield yaml.StreamEndEvent(self._mark(), self._mark())

    def _skip_prefix(self) -> None:
        """Skip comments and byte order marks."""
        self._space()
        while self._is_at("\ufeff") and self._column() == 0:
            self._move(self._place + 1, is_quoted=True)
            self._line_start = self._place
            self._space()

    def _directives(self, may_be_here: bool) -> bool:
        """Read the directives of a document; return whether there are any."""
        self._handles = {"!": "!", "!!": "tag:yaml.org,2002:"}
        names = set()
        while self._is_at("%") and self._column() == 0 and may_be_here:
            name = self._text[self._place : self._place + _length(_NAME_OF_DIRECTIVE, self._text, self._place)]
            pattern = _DIRECTIVES.get(name, _OTHER_DIRECTIVE)
            directive = pattern.match(self._text, self._place)
            key = (name, *directive.groups()[:1]) if directive else ()
            if not directive or (pattern is not _OTHER_DIRECTIVE and key in names):
                self._fail(f"a directive that is not valid, or occurs twice: {self._shown()}")
            names.add(key)
            if name == "%TAG":
                self._handles[directive[1]] = directive[2]
            self._take(directive.end() - self._place)
            self._end_line()
        return bool(names)

    # Block style (chapter 8)

    def _block_node(self, indent: int, has_sequence: bool, is_compact: bool) -> Production:
        """The node after an indicator; it is empty if the next line is not indented by more than `indent`.

        Args:
            indent: That of the collection around it, -1 if there is none.
            has_sequence: Whether a sequence may be indented as much as that collection.
            is_compact: Whether a collection may begin in the line of the indicator.
        """
        anchor = tag = None
        while True:
            after = self._place
            self._space()
            if self._is_fresh or self._is_end():
                is_entry = has_sequence and self._indent == indent and self._is("-") and self._column() == indent
                if self._is_document_end() or (self._indent <= indent and not is_entry):
                    yield self._scalar("", anchor, tag)
                    return
                may_begin = self._indent == self._column()  # no tabs
            else:
                may_begin = (
                    is_compact and anchor is None and tag is None and "\t" not in self._text[after : self._place]
                )
            if may_begin and self._is("-"):
                yield self._block_sequence(self._column(), anchor, tag)
                return
            if may_begin and (self._is("?") or self._is(":") or self._is_key()):
                yield self._block_mapping(self._column(), anchor, tag)
                return
            if self._is_at("&") and anchor is None:
                anchor = self._anchor()
            elif self._is_at("!") and tag is None:
                tag = self._tag()
            else:
                break
            if not self._is_after():
                self._fail("expected a space after a tag or anchor")
        if self._is_at("|") or self._is_at(">"):
            yield self._block_scalar(indent, anchor, tag)
        else:
            yield self._flow_node(indent + 1, False, anchor, tag)
            self._end_line()

    def _block_sequence(self, column: int, anchor: str | None, tag: str | None) -> Production:
        yield yaml.SequenceStartEvent(anchor, tag, True, self._mark(), self._mark())
        is_open = True
        while is_open:
            self._take(1)
            yield self._block_node(column, has_sequence=False, is_compact=True)
            is_open = self._continues(column) and self._is("-")
        yield yaml.SequenceEndEvent(self._mark(), self._mark())

    def _block_mapping(self, column: int, anchor: str | None, tag: str | None) -> Production:
        yield yaml.MappingStartEvent(anchor, tag, True, self._mark(), self._mark())
        is_open = True
        while is_open:
            if self._is("?"):
                self._take(1)
                yield self._block_node(column, has_sequence=True, is_compact=True)
                if self._continues(column) and self._is(":"):
                    self._take(1)
                    yield self._block_node(column, has_sequence=True, is_compact=True)
                else:
                    yield self._scalar("")
            else:
                if self._is(":"):
                    yield self._scalar("")
                elif self._is_key():
                    yield self._flow_node(column, False)
                    self._space()
                    if not self._is(":"):
                        self._fail("expected :")
                else:
                    self._fail("expected a key")
                self._take(1)
                yield self._block_node(column, has_sequence=True, is_compact=False)
            is_open = self._continues(column)
        yield yaml.MappingEndEvent(self._mark(), self._mark())

    def _continues(self, column: int) -> bool:
        """Whether the next line may have another entry of a collection in that column."""
        if self._is_document_end():
            return False
        if self._indent > column or self._indent < self._column():
            self._fail("wrong indentation")
        return self._indent == column

    def _block_scalar(self, parent: int, anchor: str | None, tag: str | None) -> Production:
        text, style = self._text, self._text[self._place]
        header = _HEADER.match(text, self._place)
        if not header:
            self._fail(f"expected the end of the line after {style}")
        size, chomping = header[1] or header[4], header[2] or header[3]
        indent = max(parent, 0) + int(size) if size else None
        lines: list[str] = []
        place, widest = min(header.end() + 1, self._last), 0
        while place < self._last:
            end = text.find("\n", place)
            end = end if end >= 0 else self._last
            spaces = _length(_SPACES, text, place)
            is_blank = place + spaces == end
            if indent is None and is_blank:
                widest = max(widest, spaces)
                lines.append("")
            else:
                if not spaces and _END_OF_DOCUMENT.match(text, place):
                    break
                if indent is None:
                    if spaces <= parent:
                        if text[place + spaces] == "\t":
                            self._fail("a block scalar whose first line is indented with a tab")
                        break
                    if spaces < widest:
                        self._fail("a line of spaces is longer than the indentation of the block scalar after it")
                    indent = spaces
                if spaces < indent and not is_blank:
                    break
                lines.append(text[place + indent : end])
            place = min(end + 1, self._last)
        num_lines = len(lines)
        while lines and not lines[-1]:
            lines.pop()
        num_blank = num_lines - len(lines)
        value = ("\n".join if style == "|" else _fold_block)(lines)
        if lines and chomping != "-":  # the end of the file ends a line, too
            value += "\n"
        if chomping == "+":
            value += "\n" * num_blank
        start = self._mark()
        self._take(place - self._place)
        self._is_fresh = self._line_start == place
        self._end_line()
        yield yaml.ScalarEvent(anchor, tag, (False, False), value, start, self._mark(), style)

    # Flow style (chapter 7)

    def _flow_node(self, indent: int, is_flow: bool, anchor: str | None = None, tag: str | None = None) -> Production:
        """A node in one of the flow styles, whose further lines are indented by at least `indent`.

        Args:
            indent: Spaces.
            is_flow: Whether it is in brackets. If not, and it has no more than a tag or an anchor, a colon follows.
            anchor: Its anchor, if that was read before.
            tag: Its tag, if that was read before.
        """
        while (self._is_at("&") and anchor is None) or (self._is_at("!") and tag is None):
            if self._is_at("&"):
                anchor = self._anchor()
            else:
                tag = self._tag()
            if not self._is_after(is_flow):
                self._fail("expected a space after a tag or anchor")
            self._flow_space(indent)
        has_properties = anchor is not None or tag is not None
        first = self._text[self._place]
        self._is_json = False
        if has_properties and (self._is(":", is_flow) or (is_flow and first in ",]}")):
            yield self._scalar("", anchor, tag)
        elif first == "*" and not has_properties:
            start = self._mark()
            yield yaml.AliasEvent(self._anchor(), start, self._mark())
        elif first == "[":
            yield self._flow_sequence(indent, anchor, tag)
        elif first == "{":
            yield self._flow_mapping(indent, anchor, tag)
        elif first in _QUOTED:
            yield self._quoted(indent, anchor, tag)
        else:
            yield self._plain(indent, is_flow, anchor, tag)
        self._is_json = first in "[{\"'"

    def _flow_sequence(self, indent: int, anchor: str | None, tag: str | None) -> Production:
        yield yaml.SequenceStartEvent(anchor, tag, True, self._mark(), self._mark())
        self._take(1)
        self._flow_space(indent)
        while not self._is_at("]"):
            if self._is("?") or self._is(":", True) or self._is_key(True):  # a mapping of one pair
                yield yaml.MappingStartEvent(None, None, True, self._mark(), self._mark())
                yield self._flow_pair(indent)
                yield yaml.MappingEndEvent(self._mark(), self._mark())
            else:
                yield self._flow_node(indent, True)
            self._flow_comma(indent, "]")
        self._take(1)
        yield yaml.SequenceEndEvent(self._mark(), self._mark())

    def _flow_mapping(self, indent: int, anchor: str | None, tag: str | None) -> Production:
        yield yaml.MappingStartEvent(anchor, tag, True, self._mark(), self._mark())
        self._take(1)
        self._flow_space(indent)
        while not self._is_at("}"):
            yield self._flow_pair(indent)
            self._flow_comma(indent, "}")
        self._take(1)
        yield yaml.MappingEndEvent(self._mark(), self._mark())

    def _flow_pair(self, indent: int) -> Production:
        is_explicit = self._is("?")
        if is_explicit:
            self._take(1)
            self._flow_space(indent)
        self._is_json = False
        if self._is(":", True) or (is_explicit and self._text[self._place] in ",]}"):
            yield self._scalar("")
        else:
            yield self._flow_node(indent, True)
        is_json = self._is_json
        self._flow_space(indent)
        if not (self._is(":", True) or (is_json and self._is_at(":"))):
            yield self._scalar("")
            return
        self._take(1)
        self._flow_space(indent)
        if self._text[self._place] in ",]}":
            yield self._scalar("")
        else:
            yield self._flow_node(indent, True)

    def _flow_comma(self, indent: int, closing: str) -> None:
        self._flow_space(indent)
        if self._is_at(","):
            self._take(1)
            self._flow_space(indent)
        elif not self._is_at(closing):
            self._fail(f"expected , or {closing}")

    def _flow_space(self, indent: int) -> None:
        """Skip white space and comments inside a flow node."""
        self._space()
        if self._is_fresh and (self._indent < indent or self._is_document_end()):
            self._fail("a line in brackets, or after a tag or anchor, is not indented")

    def _quoted(self, indent: int, anchor: str | None, tag: str | None) -> Production:
        text, start, quote = self._text, self._mark(), self._text[self._place]
        begin = end = self._place + 1
        while True:
            found = _QUOTE_OR_ESCAPE[quote].search(text, end)
            if not found:
                self._fail(f"the string has no closing {quote}")
            end = found.end()
            if found[0] == quote:
                break
        value = text[begin : end - 1]
        if _CONTROL.search(value):
            self._fail("a string with a control character")
        if "\n" in value:
            lines = value.split("\n")
            for line in lines[1:]:
                has_text = line.strip(" \t") or line is lines[-1]
                if (has_text and _length(_SPACES, line, 0) < indent) or _MARKER.match(line + _END):
                    self._fail("a line in quotes is not indented")
            value = _fold_quoted(lines, quote == '"')
        self._take(end - self._place, is_quoted=True)
        if quote == "'":
            value = value.replace("''", "'")
        elif "\\" in value:
            value = json.replace_surrogates(_ESCAPE.sub(self._unescape, value))
        yield yaml.ScalarEvent(anchor, tag, (False, False), value, start, self._mark(), quote)

    def _unescape(self, escape: re.Match[str]) -> str:
        digits = escape[1] or escape[2] or escape[3]
        number = int(digits, 16) if digits else 0
        if number > sys.maxunicode or (not digits and escape[4] not in _ESCAPES):
            self._fail(f"unknown escape {escape[0]}")
        return chr(number) if digits else _ESCAPES[escape[4]]

    def _plain(self, indent: int, is_flow: bool, anchor: str | None, tag: str | None) -> Production:
        text, start = self._text, self._mark()
        pattern, not_safe = (_END_OF_PLAIN_IN_FLOW, _AFTER + _FLOW) if is_flow else (_END_OF_PLAIN, _AFTER)
        place = self._place
        if text[place] in _NOT_FIRST or (text[place] in "-?:" and text[place + 1] in not_safe):
            self._fail(f"unexpected {self._shown()}")
        parts: list[str] = []
        while True:
            end = _search(pattern, text, place)
            parts.append(text[place:end].rstrip(" \t"))
            place += len(parts[-1])
            if text[end] != "\n":
                break
            following = end + _length(_WHITE, text, end)
            line = text.rfind("\n", end, following) + 1
            if (
                following == self._last
                or _length(_SPACES, text, line) < indent
                or text[following] in ("#" + _FLOW if is_flow else "#")
                or (text[following] == ":" and text[following + 1] in not_safe)
                or _END_OF_DOCUMENT.match(text, line)
            ):
                break
            parts.append("\n" * (text.count("\n", end, following) - 1) or " ")
            place = following
        self._take(place - self._place)
        yield yaml.ScalarEvent(anchor, tag, (True, False), "".join(parts), start, self._mark(), None)

    # Parts of nodes (chapter 6)

    def _anchor(self) -> str:
        """The name of an anchor or alias."""
        name = _NAME.match(self._text, self._place + 1)
        if not name:
            self._fail("an anchor or alias without a name")
        self._take(1 + len(name[0]))
        return name[0]

    def _tag(self) -> str:
        found = _TAG.match(self._text, self._place)
        assert found
        verbatim, handle, suffix = found.groups()
        if not verbatim and ((handle != "!" and not suffix) or handle not in self._handles):
            self._fail(f"a tag without a name, or with a handle that no directive has: {self._shown()}")
        if verbatim == "!" or _NO_ESCAPE.search(found[0]):
            self._fail(f"a tag that is not valid: {self._shown()}")
        self._take(len(found[0]))
        if verbatim:
            return verbatim
        return self._handles[handle] + unquote(suffix) if suffix else "!"

    def _scalar(self, value: str, anchor: str | None = None, tag: str | None = None) -> yaml.Event:
        return yaml.ScalarEvent(anchor, tag, (True, False), value, self._mark(), self._mark(), None)

    def _is_key(self, is_flow: bool = False) -> bool:
        """Whether a key is here that only the colon after it shows to be one: on one line, and not long."""
        text, end, longest = self._text, self._place, self._place + _LONGEST_KEY
        while end <= longest and text[end] in "&!":
            pattern = _TAG if text[end] == "!" else _NAME
            end += _length(pattern, text, end)
            end += _length(_BLANKS, text, end)
        first = text[end]
        if first == "*":
            end += _length(_NAME, text, end)
        elif first in _QUOTED:
            found = _QUOTED[first].match(text, end, longest)
            end = found.end() if found else self._last
        elif first in "[{":
            end = self._end_of_brackets(end)
        elif first not in _NOT_FIRST and not self._is(":", is_flow, end):
            found = (_END_OF_PLAIN_IN_FLOW if is_flow else _END_OF_PLAIN).search(text, end, longest + 2)
            end = found.start() if found else self._last
        end += _length(_BLANKS, text, end)
        is_json = is_flow and first in "[{\"'"
        return end <= longest and (self._is(":", is_flow, end) or (is_json and text[end] == ":"))

    def _end_of_brackets(self, place: int) -> int:
        """The end of a flow collection that is short and on one line; otherwise the end of the text."""
        if place >= self._matched_to:
            self._match_brackets(place)
        return self._closed.get(place, self._last)

    def _match_brackets(self, place: int) -> None:
        """Find the ends of many collections at once: with a search for each, the time would depend on their depth."""
        text, longest = self._text, place + 64 * _LONGEST_KEY
        opened: list[int] = []
        is_json = False  # whether a quote or bracket was closed before: a colon may follow it at once
        self._closed.clear()
        while place < longest:
            first, was_json = text[place], is_json
            is_json = first in "\"']}" or (is_json and first in " \t")
            if first in _QUOTED:
                found = _QUOTED[first].match(text, place, longest)
                end = found.end() if found else place
            elif first in "&*!":
                end = place + _length(_TAG if first == "!" else _NAME, text, place)
            elif first in " \t,[{]}" or (first in ":?" and self._is(first, True, place)) or (first == ":" and was_json):
                end = place + 1
                if first in "[{":
                    opened.append(place)
                elif first in "]}":
                    begin = opened.pop()
                    if end - begin <= _LONGEST_KEY:
                        self._closed[begin] = end
                    if not opened:
                        place = end
                        break
            else:
                found = _END_OF_PLAIN_IN_FLOW.search(text, place, longest)
                end = found.start() if found else place
            if end == place:  # the end of the line, or an error
                break
            place = end
        # What is longer than a key may end further on.
        self._matched_to = place - (_LONGEST_KEY if place + _LONGEST_KEY > longest else 0)

    # Where it is

    def _space(self) -> None:
        """Skip white space, line ends and comments."""
        text = self._text
        end = self._place + _length(_WHITE, text, self._place)
        while text[end] == "#" and (text[end - 1] in _AFTER or end == self._line_start):  # after a byte order mark
            newline = text.find("\n", end)
            end = newline + _length(_WHITE, text, newline) if newline >= 0 else self._last
        self._move(end)
        if self._is_fresh:
            self._indent = _length(_SPACES, text, self._line_start)

    def _end_line(self) -> None:
        """Skip what may follow a complete node, up to the next line that has more."""
        self._space()
        if not self._is_fresh and not self._is_end():
            self._fail(f"unexpected {self._shown()}")

    def _take(self, size: int, is_quoted: bool = False) -> None:
        self._move(self._place + size, is_quoted)
        self._is_fresh = False

    def _move(self, place: int, is_quoted: bool = False) -> None:
        if place > self._unprintable and not is_quoted:
            self._fail(f"U+{ord(self._text[self._unprintable]):04X}, which only quotes may contain")
        newline = self._text.rfind("\n", self._place, place)
        if newline >= 0:
            self._line += self._text.count("\n", self._place, place)
            self._line_start, self._is_fresh = newline + 1, True
        self._place = place
        if place > self._unprintable:
            self._unprintable = self._find_unprintable()

    def _find_unprintable(self) -> int:
        found = _UNPRINTABLE.search(self._text, self._place)
        return found.start() if found else self._last

    def _column(self) -> int:
        return self._place - self._line_start

    def _mark(self) -> Any:
        return Mark(self._line, self._column())

    def _is(self, indicator: str, is_flow: bool = False, place: int | None = None) -> bool:
        """Whether an indicator is here, which white space follows, or in brackets another indicator."""
        place = self._place if place is None else place
        return self._text[place] == indicator and self._text[place + 1] in (_AFTER_IN_FLOW if is_flow else _AFTER)

    def _is_at(self, character: str) -> bool:
        return self._text[self._place] == character

    def _is_after(self, is_flow: bool = False) -> bool:
        """Whether a word has ended here."""
        return self._text[self._place] in (_AFTER_IN_FLOW if is_flow else _AFTER)

    def _is_end(self) -> bool:
        return self._place == self._last

    def _is_marker(self, marker: str) -> bool:
        return (
            self._column() == 0 and self._text.startswith(marker, self._place) and self._text[self._place + 3] in _AFTER
        )

    def _is_document_end(self) -> bool:
        return self._is_end() or (self._column() == 0 and _END_OF_DOCUMENT.match(self._text, self._place) is not None)

    def _shown(self) -> str:
        """A little of what is here, for a message."""
        return repr(self._text[self._place : self._place + 20].rstrip(_END))

    def _fail(self, what: str) -> NoReturn:
        raise Rejected("invalid YAML", what, f"line {self._line + 1}, column {self._column() + 1}")


def _length(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Of a match, 0 if there is none."""
    found = pattern.match(text, place)
    return len(found[0]) if found else 0


def _search(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Where a pattern begins that also matches at the end of the text."""
    found = pattern.search(text, place)
    assert found
    return found.start()


def _fold_quoted(lines: list[str], has_escapes: bool) -> str:
    """Join lines: a line break becomes a space, and each empty line a line break."""
    parts = []
    num_breaks, is_escaped = 0, False  # since the last part
    for number, line in enumerate(lines):
        text = line.lstrip(" \t") if number else line
        if number < len(lines) - 1:
            line, text = text, text.rstrip(" \t")
            is_odd = has_escapes and (len(text) - len(text.rstrip("\\"))) % 2 == 1
            if is_odd and len(text) < len(line):  # an escaped space
                text, is_odd = line[: len(text) + 1], False
        else:
            is_odd = False
        if not number or text or number == len(lines) - 1:
            if number:
                parts.append("\n" * (num_breaks - 1) or ("" if is_escaped else " "))
            parts.append(text[:-1] if is_odd else text)
            num_breaks, is_escaped = 0, is_odd
        num_breaks += 1
    return "".join(parts)


def _fold_block(lines: list[str]) -> str:
    """Join lines: a line break becomes a space, and each empty line a line break, but not beside indented lines."""
    parts = []
    num_breaks, was_indented = 0, True  # so that the first lines, if they are empty, are breaks
    for line in lines:
        if line:
            is_indented = line[0] in " \t"
            if is_indented or was_indented:
                parts.append("\n" * num_breaks)
            else:
                parts.append("\n" * (num_breaks - 1) or " ")
            parts.append(line)
            num_breaks, was_indented = 0, is_indented
        num_breaks += 1
    return "".join(parts)
