"""Rules: which values of a record are a document or a conversation (docs/formats.md).

Without python-jsonpath, whose import a pipeline without rules is spared.
"""

import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict

from stages.base.errors import StageError
from stages.base.names import printable
from stages.base.summary import counted
from stages.splits import suffixes

TEXT, MESSAGES = 0, 1
"""The columns of the corpus: a row is a document or a conversation."""

KNOWN_ROLES = ("user", "assistant", "system", "developer", "tool", "function", "ipython")
"""What templates call a role."""

NUM_LEFT_OUT = 5
"""Records without a row that are kept of each rule, with their reasons and keys."""

_NUM_EXAMPLES, _NUM_NAMES = 3, 20
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


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
    for turn in value:
        if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
            raise ValueError("each message needs a role and a content, as in [{role: user, content: $.question}]")
        if not isinstance(turn["role"], str) or not isinstance(turn["content"], (str, NoneType)):
            raise ValueError("the role and the content of a message must be strings: put others into quotes, as '5'")
        for part in turn.values():
            if is_path(part):
                _path(part)
    if not value:
        raise ValueError("must have a message")
    return value


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
    tools: JsonPath = "$.tools"
    """A list of tools; None: none are read."""
    system: JsonPath = ""
    """The content of a system message before `messages`; empty: that of the preset, if any; None: none."""
    history: JsonPath = ""
    """A list of pairs of a question and its answer, which are turns before `messages`; otherwise as `system`."""
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
            off = {name: None for name in ("system", "history") if getattr(self, name) is None}
            return [dataclasses.replace(self, format=None, **_PRESETS[self.format] | off)]
        if self.text or self.messages or self.prompt:
            return [self]
        return [dataclasses.replace(self, **columns) for columns in _COLUMNS]

    @property
    def makes_conversations(self) -> bool:
        """Whether any record may become one."""
        return self.text is None

    def find_paths(self) -> Iterator[str]:
        """All paths of an alternative in its records, and the one of `tools`."""
        tools = self.tools if self.makes_conversations else None
        given = (self.text, self.system, self.history, self.messages, self.prompt, self.completion, tools)
        for value in filter(None, given):
            if isinstance(value, str):
                yield value
            else:
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
    return next((found for found in enumerate(rules) if _expression(found[1].files).fullmatch(path)), None)


def check_files(rules: Sequence[Rule], paths: Iterable[str]) -> None:
    """Raise a StageError for a rule that decides about none of the files below `raw_dir`, before hours of reading."""
    there = [path for path in paths if has_records(path)]
    used = {found[0] for path in there if (found := find(rules, path))}
    for index in sorted({*range(len(rules))} - used):
        raise StageError(
            f"params.yaml: records.{index}.files is {rules[index].files!r}: no file with records is left for it. "
            "Change the glob, put the rule before those that fit the same files, or remove it. Files with "
            f"records below raw_dir: {', '.join(map(printable, there[:_NUM_EXAMPLES])) or 'none'}"
        )


@dataclass(frozen=True)
class LeftOutRecord:
    """A record of which a rule makes no row."""

    path: str
    """Printable."""
    position: str
    reason: str
    keys: list[str]
    """Some of those that the record has, or the message in it that is the reason."""

    def __str__(self) -> str:
        place = f"{self.path}, {self.position}" if self.position else self.path
        return f"{place}: {self.reason}: the keys are {', '.join(self.keys) or 'none'}"


@dataclass
class RecordCounts:
    """What became of the records under a rule, in one split."""

    files: int = 0
    """Each once, with its first part."""
    records: int = 0
    documents: int = 0
    conversations: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Records without a row, by reason."""
    first_left_out: list[LeftOutRecord] = field(default_factory=list)
    unused_columns: set[str] = field(default_factory=set)
    """Columns that the rule does not use, the first ones."""
    unknown_roles: set[str] = field(default_factory=set)
    """The first ones."""

    def copy(self) -> "RecordCounts":
        """A copy that stays as it is when this one counts on."""
        return RecordCounts(*map(copy.copy, vars(self).values()))


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
    first_left_out: list[LeftOutRecord]
    unused_columns: list[str]
    """Columns of the records that the rule does not use, the first of each split."""
    unknown_roles: list[str]
    """Roles of messages that are not known and stay as they are, the first of each split."""

    @classmethod
    def of(cls, rule: Rule, of_splits: Sequence[RecordCounts]) -> "RuleCounts":
        """The counts of one rule in all splits."""
        left_out = sum((each.left_out for each in of_splits), Counter[str]())
        first_left_out = chain.from_iterable(each.first_left_out for each in of_splits)
        return cls(
            files=rule.files,
            matched_files=sum(each.files for each in of_splits),
            records=sum(each.records for each in of_splits),
            documents=sum(each.documents for each in of_splits),
            conversations=sum(each.conversations for each in of_splits),
            left_out=dict(sorted(left_out.items())),
            first_left_out=[*islice(first_left_out, NUM_LEFT_OUT)],
            unused_columns=sorted({name for each in of_splits for name in each.unused_columns}),
            unknown_roles=sorted({name for each in of_splits for name in each.unknown_roles}),
        )

    def describe(self) -> list[str]:
        """Lines for people: what has no row, with the first of these records, and what is not used."""
        left_out = [f"{counted(number, 'record')} left out: {reason}" for reason, number in self.left_out.items()]
        return [*left_out, *map(str, self.first_left_out), *self.notes()]

    def notes(self) -> list[str]:
        """The last of these lines: what of the records is not used or not known."""
        lines = []
        if self.unused_columns:
            lines.append(f"columns that the rule does not use: {', '.join(self.unused_columns[:_NUM_NAMES])}")
        if self.unknown_roles:
            names = self.unknown_roles[:_NUM_NAMES]
            remedy = f"add `roles: {{{names[0]}: ROLE}}` to the rule, where ROLE is user, assistant, ..."
            lines.append(f"roles that are not known: {', '.join(names)}: {remedy}")
        return lines


@cache
def _expression(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.compile("".join(_WILDCARDS.get(part, re.escape(part)) for part in parts), re.DOTALL)
