"""Rules: which values of a record are a document or a conversation (docs/records.md).

Without python-jsonpath, whose import a pipeline without rules is spared.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict

from stages.base.errors import StageError
from stages.base.names import printable
from stages.splits import suffixes

TEXT, MESSAGES = 0, 1
"""The columns of the corpus: a row is a document or a conversation."""

LEFT_OUT = "left out "
"""What the names of counts begin with that end in a reason."""
UNUSED = "unused "
"""What they begin with that end in a column of the records that the rule does not use."""
ROLE = "role "
"""What they begin with that end in a role that is not known."""
KNOWN_ROLES = ("user", "assistant", "system", "developer", "tool", "function", "ipython")
"""What templates call a role."""
TOOLS = "$.tools"
"""Where the tools of a conversation are, unless a rule says otherwise."""

Turn = dict[str, Any]
"""A message that is written in a rule: strings that begin with $ are paths, all else is itself."""

_MOST_VALUES, _DEEPEST = 10_000, 50
"""Of the messages in a rule. YAML has aliases: a few lines may stand for billions of values, or contain themselves."""


def _path(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError("must be a JSONPath such as $.text")
    from stages.formats import paths

    paths.check(value)
    return value


def _side(value: Any) -> Any:
    """A path to a string or to a list of messages, or messages that are written out."""
    if not isinstance(value, list):
        return _path(value)
    _check_size(value)
    for turn in value:
        if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
            raise ValueError("each message needs a role and a content, as in [{role: user, content: $.question}]")
        for part in turn.values():
            if is_path(part):
                _path(part)
    if not value:
        raise ValueError("must have a message")
    return value


def _check_size(messages: list[Any]) -> None:
    level: list[Any] = [messages]
    number = 0
    for _ in range(_DEEPEST):
        level = [[*each.values()] if isinstance(each, dict) else each for each in level]
        number += sum(map(len, level))
        if number > _MOST_VALUES:
            break
        level = [child for each in level for child in each if isinstance(child, (list, dict))]
        if not level:
            return
    # No ValueError: pydantic would have the value printed.
    raise StageError(
        f"params.yaml: messages in a rule of records have more than {_MOST_VALUES} values, or {_DEEPEST} levels, where "
        "an alias counts as what it names: shorten them"
    )


def is_path(value: Any) -> bool:
    """Whether a value in a written message is a path."""
    return isinstance(value, str) and value.startswith("$")


JsonPath = Annotated[Any, AfterValidator(_path)]
Side = Annotated[Any, AfterValidator(_side)]


@dataclass(frozen=True)
class Rule:
    """How the records of some files are read. Of `text`, `messages` and `prompt` with `completion`, one is given.

    None of them: those of the columns `messages`, `prompt` with `completion`, `text` that a record has, in this order.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    files: str
    """A glob for paths below `raw_dir`: `*` and `?` stop at a slash, `**` does not."""
    each: JsonPath = None
    """The path of the records in a document; None: a document is a record, a list in a .json file has a record each."""
    text: JsonPath = None
    """Strings at this path are one document."""
    messages: Side = None
    prompt: Side = None
    completion: Side = None
    tools: JsonPath = None
    """A list of tools; None: `$.tools`, where there is one."""
    system: JsonPath = None
    """The content of a system message before `messages`."""
    history: JsonPath = None
    """A list of pairs of a question and its answer, which are turns before `messages`."""
    role: str = "role"
    """The key of a message that has the role."""
    content: str = "content"
    """The key of a message that has the content."""
    roles: dict[str, str] | None = None
    """What else is the name of a role, and the role."""
    format: Literal["sharegpt", "alpaca"] | None = None
    """The name of a preset, instead of all that."""

    def __post_init__(self) -> None:
        given = [name for name in ("text", "messages", "prompt", "format") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"has both {given[0]} and {given[1]}: keep one")
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("needs both prompt and completion, or neither")
        if (self.system or self.history) and self.messages is None:
            raise ValueError("has system or history without messages, which they go before: add messages")
        for name, role in (self.roles or {}).items():
            if role not in (*KNOWN_ROLES, name):
                raise ValueError(f"roles has {role!r} for {name!r}: write {', '.join(KNOWN_ROLES)}, or {name!r} itself")

    def alternatives(self) -> list["Rule"]:
        """The rules without preset of which the first one that finds something in a record decides: one, or three."""
        if self.format:
            return [dataclasses.replace(self, format=None, **_PRESETS[self.format])]
        if self.text or self.messages or self.prompt:
            return [self]
        return [dataclasses.replace(self, **columns) for columns in _COLUMNS]

    @property
    def makes_conversations(self) -> bool:
        """Whether any record may become one."""
        return self.text is None

    def find_paths(self) -> Iterator[str]:
        """All paths of an alternative in its records, and the one of `tools`."""
        tools = self.tools or (TOOLS if self.makes_conversations else None)
        for value in (self.text, self.system, self.history, self.messages, self.prompt, self.completion, tools):
            if isinstance(value, str):
                yield value
            elif value:
                yield from (part for turn in value for part in turn.values() if is_path(part))


_COLUMNS: tuple[dict[str, Any], ...] = (
    {"messages": "$.messages"},
    {"prompt": "$.prompt", "completion": "$.completion"},
    {"text": "$.text"},
)
_PRESETS: dict[str, dict[str, Any]] = {
    "sharegpt": {"messages": "$.conversations", "role": "from", "content": "value", "system": "$.system"},
    "alpaca": {
        "system": "$.system",
        "history": "$.history",
        "messages": [
            {"role": "user", "content": "$['instruction', 'input']"},
            {"role": "assistant", "content": "$.output"},
        ],
    },
}


def has_records(path: str) -> bool:
    """Whether a rule can decide about a raw file: one of text is a document as a whole."""
    found = suffixes.find(path)
    return found is not None and found[0] != "text"


def find(rules: Sequence[Rule] | None, path: str) -> tuple[int, Rule] | None:
    """The first rule that fits a file, given its path below `raw_dir`, and its index; None: there is none."""
    if not rules or not has_records(path):
        return None
    return next((found for found in enumerate(rules) if _fits(found[1].files, path)), None)


def check_files(rules: Sequence[Rule], paths: Sequence[str]) -> None:
    """Raise a StageError for a rule that decides about none of the files below `raw_dir`."""
    paths = [path for path in paths if has_records(path)]
    used = {found[0] for path in paths if (found := find(rules, path))}
    for index, rule in enumerate(rules):
        if index in used:
            continue
        if any(find([rule], path) for path in paths):
            problem = "decides about no file, as earlier rules fit all of its files: put it before them"
        else:
            near = sorted(paths, key=lambda path: -SequenceMatcher(None, rule.files, path).ratio())[:3]
            there = f"such as {', '.join(map(printable, near))}" if near else "and there is none"
            deeper = f"**/{rule.files}"
            glob = repr(deeper) if any(_fits(deeper, path) for path in paths) else "another glob"
            problem = f"fits no file with records below raw_dir, {there}: write {glob}, or remove the rule"
        raise StageError(f"params.yaml: records.{index}.files is {rule.files!r}: it {problem}")


@dataclass(frozen=True)
class RuleCounts:
    """What became of the records under a rule."""

    files: str
    """The glob of the rule."""
    matched_files: int
    records: int
    documents: int
    conversations: int
    left_out: dict[str, int]
    """Records without a row, by reason."""
    unused_columns: list[str]
    """Columns of the records that the rule does not use, the first of each file."""

    @classmethod
    def of(cls, rule: Rule, counts: Mapping[str, int]) -> "RuleCounts":
        """The counts of one rule: `files`, `records`, ..., `left out` with a reason, `unused` with a column."""
        names = ("records", "documents", "conversations")
        return cls(
            files=rule.files,
            matched_files=counts.get("files", 0),
            **{name: counts.get(name, 0) for name in names},
            left_out={
                name.removeprefix(LEFT_OUT): counts[name] for name in sorted(counts) if name.startswith(LEFT_OUT)
            },
            unused_columns=[name.removeprefix(UNUSED) for name in counts if name.startswith(UNUSED)],
        )


def _fits(glob: str, path: str) -> bool:
    """Whether a glob fits a path; not by a regular expression, which may try all ways to divide it among wildcards."""
    places = {0}  # in the path, up to which the parts so far may lead
    for part in _parts(glob):
        if not places:
            return False
        if part == "**":
            places = {*range(min(places), len(path) + 1)}
        elif part == "**/":
            places |= {place + 1 for place in range(min(places), len(path)) if path[place] == "/"}
        elif part == "*":
            begins, places = sorted(places), set()
            for begin in begins:
                if begin not in places:
                    end = path.find("/", begin)
                    places |= {*range(begin, (len(path) if end < 0 else end) + 1)}
        elif part == "?":
            places = {place + 1 for place in places if path[place : place + 1] not in ("", "/")}
        else:
            places = {place + len(part) for place in places if path.startswith(part, place)}
    return len(path) in places


@cache
def _parts(glob: str) -> list[str]:
    return [part for part in re.split(r"(\*\*/|\*\*|\*|\?)", glob) if part]
