"""Records under a rule: each becomes a document, a conversation, or is left out for a reason that is counted.

A conversation is JSON, of `{"messages": [...]}` or `{"prompt": ..., "completion": ...}`, each with `"tools": [...]` if
it has any: the names of TRL. Prompt and completion are both strings, or both lists of messages.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from stages.base.names import printable
from stages.formats import json_format, paths
from stages.formats.limits import Limits
from stages.formats.raw_content import Rejected
from stages.formats.rules import (
    KNOWN_ROLES,
    MESSAGES,
    NUM_LEFT_OUT,
    TEXT,
    LeftOutRecord,
    RecordCounts,
    Rule,
    Side,
    is_path,
)
from stages.formats.writer import TextWriter, replace_surrogates

ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "model": "assistant", "ai": "assistant", "bot": "assistant", "function_response": "tool", "observation": "tool",
    **{role: role for role in KNOWN_ROLES},
}  # fmt: skip
"""What data calls a role, in any letter case, and what templates do. Another name stays as it is."""

_OBJECTS = {dict, paths.Pairs}
_SAYING = {"content", "tool_calls", "function_call", "reasoning_content", "thinking", "reasoning"}
"""Keys of a message that templates read. If no message has one, `content` of the rule is probably misspelt."""
_TOO_SHORT = "fewer characters than min_chars"
_NUM_ROLES = 5  # unknown ones that are named, of a split
_NUM_KEYS, _MAX_KEY = 20, 100  # of a record that are named, and characters of each

Row = tuple[int, str]
"""The column, and what the row has there."""
Maker = Callable[[Any], Row]
"""Makes the row of a record, or raises LeftOut."""


class LeftOut(Exception):
    """Why a record is neither a document nor a conversation."""

    def __init__(self, reason: str, message: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.message = message
        """That it lies in, whose keys are named in place of the record's."""


class _Roles(dict[str, str]):
    """The role of each name."""

    def __init__(self, rule: Rule) -> None:
        super().__init__({**ROLES, **(rule.roles or {})})
        self.unknown: set[str] = set()
        """The first names that are no role."""

    def __missing__(self, name: str) -> str:
        role = self.get(name.lower())
        if role is None and len(self.unknown) < _NUM_ROLES:
            self.unknown.add(name)
        return name if role is None else role


class Records:
    """Where the formats put the records of the files under a rule; the rows that it makes of them go to `sink`."""

    def __init__(self, rule: Rule, sink: TextWriter, min_chars: int, limits: Limits) -> None:
        self.each = rule.each
        self.add: Callable[[Any], None] = self.take if rule.each is None else self._add_each
        """Adds a document: its records are those of `each`, or itself."""
        self.decode_at = json_format.value_at
        """What makes the documents of JSON."""
        self.num_seen = 0
        """Records that were added or rejected."""
        self.path = ""
        """Of the file, printable; set for each of them, like the next two."""
        self.position: Callable[[], str] = str
        """Where in it the current record is."""
        self.names: dict[str, None] | None = None
        """Columns of a table, also those that are not read; None: the keys of each record."""
        self.counts = RecordCounts()
        alternatives = rule.alternatives()
        used = _columns(alternatives)
        self.columns = used if rule.each is None else paths.first_keys(rule.each)
        """The keys of a record that decide; None: all may."""
        self._roles = _Roles(rule)
        makers = [_maker(one, min_chars, self._roles) for one in alternatives]
        self._make = makers[0] if len(makers) == 1 else _first_present(alternatives, makers)
        self._find = None if rule.each is None else paths.finder(rule.each)
        self._sink, self._limits = sink, limits
        self._rows: list[str] = []  # not yet in the sink
        self._size = 0  # characters of these
        self._known = {*used} if used is not None else set()  # columns that are used, or were counted as unused
        self._most_known = 0 if used is None else len(self._known) + _NUM_KEYS  # keys may be ids; 0: all are used

    def begin(self, path: str) -> None:
        """The records that follow are of a file; `path` is printable."""
        self.path, self.position, self.names = path, str, None
        self._before = self.counts.copy(), {*self._known}

    def undo(self) -> None:
        """Drop what was counted of the file; its rows are dropped by the sink."""
        self.counts, self._known = self._before
        self._rows, self._size = [], 0

    def take(self, record: Any) -> None:
        """Add a record."""
        self.num_seen += 1
        self.counts.records += 1
        if isinstance(record, Mapping):
            self.note_columns(record)
        try:
            column, row = self._make(record)
        except LeftOut as reason:
            self.leave_out(str(reason), reason.message or self.names or record)
            return
        except RecursionError:
            self.reject(Rejected("nested too deep", "more levels than a record may have"))
            return
        if not row.isascii() or len(row) > self._limits.longest_string:
            try:
                num_bytes = len(row.encode())
            except UnicodeEncodeError:
                row = replace_surrogates(row)
                num_bytes = len(row.encode())
            if num_bytes > self._limits.longest_string:
                detail = f"more than {self._limits.longest_string} bytes of UTF-8: split the record"
                self.reject(Rejected("string too long", detail))
                return
        if column != self._sink.column:
            self.flush()
            self._sink.use(column)
        self._rows.append(row)
        self._size += len(row)
        if self._size > self._limits.chunk:
            self.flush()

    def leave_out(self, reason: str, value: Any) -> None:
        """Count a record without a row, or a document without a record; of the first, keep the keys, or the type."""
        self.counts.left_out[reason] += 1
        if len(self.counts.first_left_out) < NUM_LEFT_OUT:
            hint = ', whose elements `each: "$[*]"` reads' * (isinstance(value, list) and self.each is None)
            none = [f"(none: a {type(value).__name__}{hint})"]
            keys = [*islice(value, _NUM_KEYS)] if isinstance(value, Mapping) else none
            names = [printable(str(key))[:_MAX_KEY] for key in keys]
            self.counts.first_left_out.append(LeftOutRecord(self.path, self.position(), reason, names))

    def note_columns(self, names: Iterable[str]) -> None:
        """Count the columns of a record that the rule does not use, up to a limit."""
        if len(self._known) >= self._most_known or self._known.issuperset(names):
            return
        for name in names:
            if name not in self._known and len(self._known) < self._most_known:
                self._known.add(name)
                self.counts.unused_columns.add(printable(name)[:_MAX_KEY])

    def end(self) -> None:
        """A line is complete. Its documents are records of their own."""

    def flush(self) -> None:
        """Put the rows into the sink, each as a record of its own."""
        self.counts.unknown_roles |= {printable(name)[:_MAX_KEY] for name in self._roles.unknown}
        if self._rows:
            if self._sink.column == MESSAGES:
                self.counts.conversations += len(self._rows)
            else:
                self.counts.documents += len(self._rows)
            self._sink.add(self._rows)
            self._sink.end(len(self._rows))
        self._rows, self._size = [], 0

    def reject(self, rejected: Rejected) -> None:
        """Report a record that cannot be read."""
        self.num_seen += 1
        self._sink.report(Rejected(rejected.reason, rejected.detail, self.position()))

    def _add_each(self, document: Any) -> None:
        assert self._find
        try:
            found = self._find(document)
        except RecursionError:
            self.reject(Rejected("nested too deep", "more levels than a record may have"))
            return
        if not found:
            self.leave_out(self.no_record, document)
        for record in found:
            self.take(record)

    @property
    def no_record(self) -> str:
        """Why a document is left out in which the path of the records finds none."""
        return f"no record at {self.each}"


def _first_present(alternatives: list[Rule], makers: list[Maker]) -> Maker:
    """What takes the first of several rules whose path leads to something; they have no written messages."""
    finds = [paths.finder(rule.messages or rule.prompt or rule.text) for rule in alternatives]

    def make(record: Any) -> Row:
        for find, make_row in zip(finds, makers, strict=True):
            if any(value is not None for value in find(record)):
                return make_row(record)
        raise LeftOut("no messages, prompt or text")

    return make


def _columns(alternatives: Iterable[Rule]) -> list[str] | None:
    found = [paths.first_keys(path) for rule in alternatives for path in rule.find_paths()]
    keys = [key for keys in found if keys is not None for key in keys]
    return None if None in found else [*dict.fromkeys(keys)]


def _maker(rule: Rule, min_chars: int, roles: _Roles) -> Maker:
    if rule.text is not None:
        return _text_maker(rule.text, min_chars)
    sides = {name: side for name in ("messages", "prompt", "completion") if (side := getattr(rule, name)) is not None}
    makers = {name: _side_maker(side, name, rule, roles) for name, side in sides.items()}
    if rule.system or rule.history:
        makers["messages"] = _with_beginning(rule, makers["messages"])
    find_tools = paths.finder(rule.tools) if rule.tools else None

    def make(record: Any) -> Row:
        conversation = {name: make_side(record) for name, make_side in makers.items()}
        if len({type(side) for side in conversation.values()}) > 1:
            raise LeftOut("a string and a list of messages as prompt and completion")
        if find_tools and (tools := _tools(find_tools(record), rule.tools)):
            conversation["tools"] = tools
        return MESSAGES, _encode(conversation)

    return make


def _text_maker(path: str, min_chars: int) -> Maker:
    find = paths.finder(path)

    def make(record: Any) -> Row:
        text = _join(find(record))
        if text is None:
            raise LeftOut(_nothing_at(path))
        if len(text) < min_chars:
            raise LeftOut(_TOO_SHORT)
        return TEXT, text

    return make


def _nothing_at(path: str | None) -> str:
    return f"no string at {path}"


def _join(values: list[Any]) -> str | None:
    """The strings at a path, at any depth below, as one; None: there are none."""
    if len(values) == 1 and type(values[0]) is str:
        return values[0]
    found = [string for value in values for string in paths.strings(value)]
    return "\n".join(filter(None, found)) if found else None


def _side_maker(side: Side, name: str, rule: Rule, roles: _Roles) -> Callable[[Any], Any]:
    """The function that makes messages, or the string of a prompt or completion, of a record."""
    if not isinstance(side, str):
        turns = [_turn_maker(turn, roles) for turn in side]
        return lambda record: [message for make in turns if (message := make(record)) is not None]
    find = paths.finder(side)

    def make(record: Any) -> Any:
        values = find(record)
        if name == "messages" and len(values) == 1:
            values = [_from_json(values[0])]
        messages = values[0] if len(values) == 1 and type(values[0]) is list else values
        if messages and _OBJECTS.issuperset(map(type, messages)):
            renamed = [_rename(message, rule.role, rule.content, roles) for message in messages]
            if all(_SAYING.isdisjoint(message) for message in renamed):
                raise LeftOut(f"no message has a {rule.content!r}", messages[0])
            return renamed
        if name == "messages":
            raise LeftOut(f"no list of messages at {side}")
        text = _join(values)
        if text is None or (name == "completion" and not text):
            raise LeftOut(_nothing_at(side))
        return text

    return make


def _with_beginning(rule: Rule, make_messages: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function that makes the messages of a record, after its system message and its history."""
    find_system, find_history = (paths.finder(path) if path else None for path in (rule.system, rule.history))

    def make(record: Any) -> Any:
        messages = make_messages(record)
        pairs = find_history(record) if find_history else []
        pairs = _from_json(pairs[0]) or [] if len(pairs) == 1 else pairs
        if not (type(pairs) is list and all(map(_is_pair, pairs))):
            raise LeftOut(f"no list of pairs of a question and an answer at {rule.history}")
        turns = [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        text = _join(find_system(record)) if find_system else None
        system = [{"role": "system", "content": text}] if text and text.strip() else []  # an empty cell
        return [*system, *turns, *(messages[1:] if system and messages[:1] == system else messages)]

    return make


def _is_pair(value: Any) -> bool:
    return type(value) is list and [*map(type, value)] == [str, str]


def _turn_maker(turn: dict[str, Any], roles: _Roles) -> Callable[[Any], dict[str, Any] | None]:
    """The function that makes a message that is written in a rule; None: a system message without content."""
    finds = {key: paths.finder(part) for key, part in turn.items() if is_path(part)}

    def make(record: Any) -> dict[str, Any] | None:
        message = {**turn}
        for key, find in finds.items():
            values = find(record)
            if key in ("role", "content"):
                message[key] = _join(values)
            elif values:
                message[key] = values[0] if len(values) == 1 else values
            else:
                del message[key]
        missing = next((key for key in ("role", "content") if not (message[key] or "").strip()), None)  # an empty cell
        if missing == "content" and message["role"] == "system":
            return None
        if missing and not (missing == "content" and message.get("tool_calls")):
            raise LeftOut(_nothing_at(turn[missing]))
        return _rename(message, "role", "content", roles)

    return make


def _rename(message: Mapping[str, Any], role: str, content: str, roles: _Roles) -> dict[str, Any]:
    """A message with the usual keys and the usual names of roles."""
    if type(message) is paths.Pairs:
        raise LeftOut("a key occurs twice in a message")
    name, text = message.get(role), message.get(content)
    if type(name) is not str:
        raise LeftOut(f"a message without a string {role!r}", message)
    if type(text) is not str and not (text is None or type(text) is list):
        raise LeftOut(f"a {content!r} that is neither a string nor a list", message)
    renamed: dict[str, Any] = {"role": roles[name]}
    if content in message:
        renamed["content"] = text
    if len(message) == len(renamed):  # most
        return renamed
    return {**renamed, **{key: value for key, value in message.items() if key not in (role, content, *renamed)}}


def _tools(values: list[Any], path: str) -> list[Any] | None:
    tools = _from_json(values[0]) if len(values) == 1 else values
    if type(tools) is str and not tools.strip():  # an empty cell
        return None
    if tools is None or type(tools) is list:
        return tools
    raise LeftOut(f"no list of tools at {path}")


def _from_json(value: Any) -> Any:
    """What a string of JSON, as in tables whose rows differ, stands for; all else as it is."""
    try:
        return json_format.decode(value) if type(value) is str and value else value
    except ValueError:
        return value


def _encode(conversation: Any) -> str:
    try:
        return _encoder.encode(conversation).decode()
    except UnicodeEncodeError:
        return _encoder.encode(_mend(conversation)).decode()


def _mend(value: Any) -> Any:
    """The same with U+FFFD in place of lone surrogates."""
    if type(value) is str:
        return replace_surrogates(value)
    if type(value) is dict:
        return {replace_surrogates(key): _mend(child) for key, child in value.items()}
    return [_mend(child) for child in value] if type(value) is list else value


def _other(value: Any) -> str:
    """What stands for a value that msgspec does not know: one of a table, perhaps."""
    if type(value) is paths.Pairs:
        raise LeftOut("a key occurs twice in a message")
    return str(value)


# Numbers that JSON does not have, as in tables, become null; dates and decimals strings, and bytes too (base64).
_encoder = msgspec.json.Encoder(enc_hook=_other)
