r"""YAML: all string values at any depth, in the order of the file; under a rule, documents as JSON values.

libyaml's events are read, not objects: so tags run no code and an impossible date is not an error. Without a rule,
aliases and merge keys repeat nothing. Plain scalars are typed by the core schema of YAML 1.2 (section 10.3.2).

`extract` reads 15.4 MB/s in a process this way; a standard parser, which builds objects, reaches 0.6
(docs/benchmarks.md).

libyaml reads these documents in another way than YAML 1.2 demands. `↵` is a line end. A test reads this table.

| misread | what YAML 1.2 demands | strings here |
|---|---|---|
| `&a:b c` | a colon in the name of an anchor | `:b c` |
| `--- a↵\ufeff--- b` | a byte order mark (here `\ufeff`) before a later document | `a \ufeff--- b` |
| `"a"#b` `[a]#b` | nothing: a comment begins after white space | `a` |
| `x: [↵a↵]` `x: "↵a"` | nothing: lines in brackets and quotes are indented | `a` ` a` |
| `--- \|↵# a↵--- b` `--- \|↵%TAG ! a↵--- b` | an unindented block scalar that begins with `#` or `%` | `b` |
| `{? :a}` `[!t :a]` | keys and text that begin with a colon | `a` |
| `!!!str a` `\|#b↵ a` | nothing: tags with three exclamation marks, a comment directly after `\|` | `a` `a↵` |

libyaml refuses some valid documents, which YAML 1.2 allows and YAML 1.1 does not. Of these, files of JSON occur: what
libyaml refuses is read as JSON if all of it is.
"""

import io
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml
from yaml._yaml import CParser

from stages.formats import json_format, paths
from stages.formats.limits import Limits
from stages.formats.raw_content import RawContent, Rejected
from stages.formats.writer import TextWriter

if TYPE_CHECKING:
    from stages.formats.records import Records

_NOT_STRING = re.compile(
    r"""null | Null | NULL | ~ |
        true | True | TRUE | false | False | FALSE |
        [-+]? [0-9]+ | 0o [0-7]+ | 0x [0-9a-fA-F]+ |
        [-+]? ( \. [0-9]+ | [0-9]+ ( \. [0-9]* )? ) ( [eE] [-+]? [0-9]+ )? |
        [-+]? \. ( inf | Inf | INF ) | \. ( nan | NaN | NAN )""",
    re.VERBOSE,
)
# Most scalars begin otherwise, and are strings without a look at the expression.
_FIRST_CHARACTERS = frozenset("nN~tTfF-+.0123456789")
_STANDARD = "tag:yaml.org,2002:"
_STRING_BY_TAG = {"!": True, _STANDARD + "str": True} | {
    _STANDARD + name: False for name in ("null", "bool", "int", "float", "binary", "timestamp")
}
# U+FDD0 is the escape, so it is escaped itself: whatever the text contains, `restore` gives it back.
_HIDDEN = {"\x85": "\ufdd01", "\u2028": "\ufdd02", "\u2029": "\ufdd03", "\ufdd1": "\ufdd04", "\ufdd0": "\ufdd00"}
_HIDING = {ord(shown): hidden for shown, hidden in _HIDDEN.items()}
_TO_HIDE = re.compile("[" + "".join(_HIDDEN) + "]")
# A question mark at the start of a word, in a flow collection or elsewhere. It comes first, to be found fast.
_QUESTION = re.compile(r"\?(?<=[ \t\r\n\[{,:]\?)(?=[^ \t\r\n\[\]{},])")
_HIDDEN_QUESTION = "\ufdd1"
_MOST_DIRECTIVES = 1000  # libyaml compares each `%TAG` with those before it: 3 ms for these, half an hour for 8 MB
_LONGEST_PREFIX = 1024  # characters in a `%TAG`, as a copy of them is in each tag
_DEEPEST = 1000  # libyaml needs time quadratic in the depth: 7 ms for this one, minutes for a million


def is_string(event: yaml.ScalarEvent) -> bool:
    """Whether a scalar is a string.

    A tag of YAML's own decides. Other tags belong to an application and decide nothing: quoted and block scalars are
    strings, and plain ones are unless they look like another type.
    """
    tag = event.tag
    if tag is not None and tag in _STRING_BY_TAG:
        return _STRING_BY_TAG[tag]
    if event.style:  # quoted, literal or folded
        return True
    value = event.value
    return value != "" and not (value[0] in _FIRST_CHARACTERS and _NOT_STRING.fullmatch(value))


def read(content: RawContent, sink: TextWriter) -> None:
    """Put the strings of each document of a file into `sink`.

    Raises:
        Rejected: what follows the last complete document is not YAML, is nested too deep, or has a string that is too
            long.
    """

    def as_json() -> None:
        sink.drop()  # what libyaml has read
        # One record: none is kept if an error follows.
        into = json_format.Strings(sink, content.limits)
        json_format.read_record(content.stream().read, into, content.limits)
        into.flush()

    _read_all(content, lambda text: _read(text, sink, content.limits), as_json)


def read_records(content: RawContent, records: "Records") -> None:
    """Put each document of a file into `records`.

    Raises:
        Rejected: as `read` does; or a document is too large.
    """
    _read_all(
        content,
        lambda text: _compose(text, records, content.limits),
        lambda: json_format.read_records(content, records),
    )


def _read_all(content: RawContent, read: Callable[["_Text"], None], read_as_json: Callable[[], None]) -> None:
    text = _Text(content.stream(), content.limits.longest_string)
    # Not an exception: its traceback would refer to this frame, which refers to it, and `extract` collects no cycles.
    refused: tuple[str, str | None]
    reason = "invalid YAML"
    try:
        return read(text)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        if "nesting depth" in str(error.problem):  # libyaml 0.2.6 has a limit of its own
            reason = "nested too deep"
        position = f"line {mark.line + 1}, column {mark.column + 1}" if mark else None
        refused = ": ".join(part for part in (error.context, error.problem) if part), position
    except yaml.reader.ReaderError as error:
        refused = f"{error.reason}: U+{error.character:04X}", f"byte {error.position}"
    except Rejected as rejected:  # by `text` or `sink`
        line = text.mark.line + 1 if text.mark else 1
        raise Rejected(rejected.reason, rejected.detail, rejected.position or f"line {line}") from None
    if not text.num_records:
        with suppress(Rejected):
            return read_as_json()
    raise Rejected(reason, *refused)


class _Text:
    """The content as libyaml must see it.

    libyaml implements YAML 1.1, in which NEL, LS and PS are line breaks. Since YAML 1.2 they are ordinary characters
    (section 5.4), so libyaml gets noncharacters in their place, code points that Unicode reserves for internal use.
    In a flow collection libyaml reads any question mark as the indicator of a key, and would drop the string of `[?x]`.
    In YAML 1.2 only one before white space is an indicator (section 7.3.3), so the others are replaced, too.

    libyaml holds scalars, tags and anchors of any size in memory. So what it is given between two events is limited.
    """

    def __init__(self, stream: BinaryIO, longest: int) -> None:
        self.mark: Any = None
        """Where the last event ended. Whoever reads the events sets it."""
        self.num_records = 0
        """Documents that are complete; set like `mark`."""
        self._stream = io.TextIOWrapper(stream, "utf-8", newline="")
        self._longest = longest
        self._last = ""  # the last character that was read
        self._hides = False
        self._seen: Any = None  # the mark at the last call of `read`
        self._size = self._num_directives = 0  # since then

    def read(self, size: int = -1, /) -> str:
        """The next `size` characters or one more, some of them replaced.

        Raises:
            Rejected: there was no event for too long.
        """
        text = self._stream.read(size)
        if not text and self._last not in "\n\r":
            text = "\n"  # the end of a file ends its last line
        if text.endswith("?"):
            text += self._stream.read(1)  # decides what the question mark is
        self._check(text)
        if not text.isascii() and _TO_HIDE.search(text):  # `translate` is as slow as the parser
            self._hides = True
            text = text.translate(_HIDING)
        if "?" in text:
            text, number = _QUESTION.subn(_HIDDEN_QUESTION, self._last + text)
            text = text[len(self._last) :]
            self._hides |= number > 0
        self._last = text[-1:]
        return text

    def restore(self, value: str) -> str:
        """What `value` was before `read`."""
        if self._hides and not value.isascii():
            value = value.replace(_HIDDEN_QUESTION, "?")
            for shown, hidden in _HIDDEN.items():  # U+FDD0 last, or it would form other pairs
                value = value.replace(hidden, shown)
        return value

    def _check(self, text: str) -> None:
        if self.mark is not self._seen:
            self._seen, self._size, self._num_directives = self.mark, 0, 0
        self._size += len(text)
        self._num_directives += text.count("\n%TAG") + text.count("\r%TAG")
        if self._size > self._longest:
            raise Rejected("string too long", f"a string, key or comment has more than {self._longest} characters")
        if self._num_directives > _MOST_DIRECTIVES:
            raise Rejected("invalid YAML", f"more than {_MOST_DIRECTIVES} %TAG directives")


def _read(text: _Text, sink: TextWriter, limits: Limits) -> None:
    """Put the strings into `sink`, at most `limits.chunk` characters at once unless a string is longer."""
    get_event, restore = CParser(text).get_event, text.restore
    strings: list[str] = []
    size = 0  # characters of these
    scalar = yaml.ScalarEvent  # a local name, as this runs for each scalar
    is_key: bool | None = None  # the next node, if the innermost open collection is a mapping
    outer: list[bool | None] = []  # the same of the collections around it
    key_depth = 0  # from this number of open collections on, everything belongs to a key that is itself a collection
    while True:
        event: Any = get_event()
        text.mark = event.end_mark
        kind = type(event)
        if kind is scalar:
            if is_key:
                is_key = False
                continue
            if is_key is not None:
                is_key = True
            if not key_depth and is_string(event):  # not inside of a key such as `? [a, b]`
                strings.append(restore(event.value))
                size += len(event.value)
                if size > limits.chunk:  # a document may be the entire file
                    sink.add(strings)
                    strings, size = [], 0
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            outer.append(None if is_key is None else not is_key)
            if is_key and not key_depth:
                key_depth = len(outer)
            _check_depth(outer, event)
            is_key = True if kind is yaml.MappingStartEvent else None
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            if key_depth == len(outer):
                key_depth = 0
            is_key = outer.pop()
        elif kind is yaml.AliasEvent:  # a node that was read where it is anchored: only key or value changes
            if is_key is not None:
                is_key = not is_key
        elif kind is yaml.DocumentEndEvent:
            sink.add(strings)
            strings, size = [], 0
            sink.end()
            text.num_records += 1
        elif kind is yaml.StreamEndEvent:
            return
        else:
            _check_directives(event)


def _compose(text: _Text, records: "Records", limits: Limits) -> None:
    """Add each document as objects. An alias is the node that it names, and counts as often as it is written."""
    get_event, restore = CParser(text).get_event, text.restore
    nodes: list[Any] = []  # complete ones in the innermost open collection: of a mapping keys and values
    outer: list[
        tuple[bool, str | None, list[Any], tuple[int, int]]
    ] = []  # is it a mapping, its anchor, what precedes it
    named: dict[str, tuple[Any, int, int]] = {}  # by anchor: a node, its characters, its values
    characters = values = 0  # of the document
    first_line = 1  # of the document
    records.position = lambda: f"line {first_line}"
    while True:
        event: Any = get_event()
        text.mark = event.end_mark
        kind = type(event)
        before = characters, values
        anchor = None
        if kind is yaml.ScalarEvent:
            is_key = outer and outer[-1][0] and len(nodes) % 2 == 0
            node = restore(event.value) if is_key else _value(event, restore)
            characters, values, anchor = characters + len(event.value), values + 1, event.anchor
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            outer.append((kind is yaml.MappingStartEvent, event.anchor, nodes, before))
            nodes = []
            values += 1
            _check_depth(outer, event)
            continue
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            is_mapping, anchor, others, before = outer.pop()
            if is_mapping:
                node = paths.make_object([*zip(map(str, nodes[::2]), nodes[1::2], strict=True)])
            else:
                node = nodes
            nodes = others
        elif kind is yaml.AliasEvent:
            node, *size = named.get(event.anchor, (None, 0, 0))
            characters, values = characters + size[0], values + size[1] + 1
        elif kind is yaml.DocumentEndEvent:
            records.add(nodes.pop())
            named, characters, values = {}, 0, 0
            text.num_records += 1
            continue
        elif kind is yaml.StreamEndEvent:
            return
        else:
            if kind is yaml.DocumentStartEvent:
                first_line = event.start_mark.line + 1
            _check_directives(event)
            continue
        if characters > limits.longest_record or values > limits.most_values:
            raise json_format.TooLarge(limits)
        nodes.append(node)
        if anchor:
            named[anchor] = node, characters - before[0], values - before[1]


def _value(event: yaml.ScalarEvent, restore: Callable[[str], str]) -> Any:
    """What a scalar is in JSON: null, where JSON does not have it."""
    value = event.value
    if is_string(event):
        return restore(value)
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        number = int(value, 0 if value[:2] in ("0o", "0x") else 10)
        str(number)  # of any number of hexadecimal digits, but nobody could write it in decimal ones
        return number
    except ValueError:
        pass
    try:
        return float(value) if math.isfinite(float(value)) else None
    except ValueError:
        return None


def _check_depth(outer: list[Any], event: Any) -> None:
    """Raises Rejected at the event, before libyaml gets deeper."""
    if len(outer) > _DEEPEST:
        line = event.start_mark.line + 1
        raise Rejected("nested too deep", f"more than {_DEEPEST} levels", f"line {line}")


def _check_directives(event: Any) -> None:
    """Raises Rejected for a prefix of which a copy would be in each tag."""
    tags = event.tags if isinstance(event, yaml.DocumentStartEvent) else None
    if tags and max(map(len, tags.values())) > _LONGEST_PREFIX:
        raise Rejected("string too long", f"a prefix of more than {_LONGEST_PREFIX} characters in a %TAG directive")
