"""Rules for records whose keys are those of known data, such as Alpaca or FineWeb."""

import json
import os
import re
from collections.abc import Container, Iterable
from typing import Any

from stages.base.names import printable
from stages.formats import rules
from stages.formats.limits import Limits
from stages.formats.shard import ReadParams
from stages.splits import suffixes

_MOST_TRIED = 100
"""Files that are looked at."""

_MESSAGES: tuple[tuple[set[str], dict[str, Any]], ...] = (
    ({"role", "content"}, {}),
    ({"from", "value"}, {"role": "from", "content": "value"}),
)
_QUESTIONS = ("instruction", "question", "query", "prompt", "input")
_ANSWERS = ("output", "response", "solution", "answer", "chosen", "completion")
_CONVERSATIONS = ("messages", "conversations", "conversation", *_ANSWERS)
_NO_CONVERSATIONS = {*_QUESTIONS, "context", "rejected"}
_ASKING = {"user", "human", "system", "developer"}
"""Roles of which none answers."""
_REQUESTS = {"instruction", "question", "query"}
"""Keys of which one may be the request, and another one what it is about."""
_UNCLEAR = re.compile("[Aa]|op[a-d]|(choice|option|label).*|role|sentiment|summary|target")
"""Keys of records whose strings mean nothing alone: with choices, a label or a summary, or in a tree of messages."""


def propose(record: Any, is_row: bool = False) -> dict[str, Any]:
    """A rule for records like this one, without `files`, by the keys that known data has; empty: it is not known.

    None either where a document is all of the text, and so is one without a rule, unless it is a row of CSV.
    """
    if type(record) is not dict:
        return {}
    strings = {name for name, value in record.items() if type(value) is str}
    chats = {
        name: more
        for name, value in record.items()
        for keys, more in _MESSAGES
        if value and type(value) is list and type(value[0]) is dict and keys <= value[0].keys()
    }

    def first(wanted: Iterable[str], names: Container[str]) -> str | None:
        return next((name for name in wanted if name in names), None)

    def path(*names: str) -> str:
        is_plain = len(names) == 1 and names[0].isidentifier()
        return f"$.{names[0]}" if is_plain else f"$[{', '.join(map(_quoted, names))}]"

    def has_answers(name: str) -> bool:
        key = chats[name].get("role", "role")
        roles = {str(message.get(key)).lower() for message in record[name] if type(message) is dict}
        return not roles <= _ASKING and (len(roles) > 1 or name not in _ANSWERS)

    system = {"system": path(name)} if (name := first(("system", "system_prompt"), strings)) else {}
    question, answer = (first(wanted, chats or strings) for wanted in (_QUESTIONS, _ANSWERS))
    if "preferred_output" in chats and type(record.get("input")) is dict:  # of OpenAI
        return {"prompt": "$.input.messages", "completion": "$.preferred_output", "tools": "$.input.tools"}
    if chats and question and answer and record[question][0] != record[answer][0]:
        return {"prompt": path(question), "completion": path(answer), **chats[question]}
    if chats:  # an answer that begins with its question, as in UltraFeedback, is a conversation
        names = [name for name in chats if name not in _NO_CONVERSATIONS and has_answers(name)]
        name = first(_CONVERSATIONS, names) or (names[0] if len(names) == 1 else None)  # not one of two to compare
        return {"messages": path(name), **chats[name], **system} if name else {}
    if any(map(_UNCLEAR.fullmatch, record)) or len(_REQUESTS & strings) > 1:
        return {}
    if {"instruction", "output"} <= strings and strings.isdisjoint({"system_prompt", "context"}):
        return {"format": "alpaca"}
    if question and answer:
        more = [name for name in ("context", "input") if name in strings and name != question]
        written = (("user", path(question, *more)), ("assistant", path(answer)))
        history = {"history": "$.history"} if type(record.get("history")) is list else {}  # of ChatGLM
        return {**system, **history, "messages": [{"role": role, "content": content} for role, content in written]}
    text = first(("text", "content"), strings)
    more = [name for name, value in record.items() if value and type(value) in (str, dict, list)]
    return {"text": path(text)} if text and not answer and (is_row or more != [text]) else {}


def _quoted(name: str) -> str:
    """The name in a path, with the escapes of JSON: a path has no others."""
    inner = json.dumps(name, ensure_ascii=False)[1:-1].replace(r"\"", '"')
    return "'{}'".format(inner.replace("'", r"\'"))


def find_layouts(params: ReadParams, paths: Iterable[str], limits: Limits) -> str | None:
    """Names files without a rule whose first record has a known layout, and rules for them and those beside them.

    The first file stands for those of its directory with the same suffix. Where all directories that were looked at
    have one layout, a rule is for what is below them, too.
    """
    from stages.formats import readers  # imports pyarrow

    # By suffix and directory: the path of a file, and its layout.
    looked: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {}
    num_tried = 0
    for path in paths:
        suffix, directory = path[-len(suffixes.ending(path)) :], path.rpartition("/")[0]
        if directory in looked.get(suffix, ()) or not rules.has_records(path) or rules.find(params.records, path):
            continue
        if num_tried == _MOST_TRIED:
            break
        num_tried += 1
        record = readers.first_record(params.raw_dir, path, params.fallback_encoding, limits)
        layout = propose(record, suffix.lower().startswith((".csv", ".tsv")))
        looked.setdefault(suffix, {})[directory] = path, layout
    found: dict[str, str] = {}
    for suffix, below in looked.items():
        path, first = next(iter(below.values()))
        if all(layout == first for _, layout in below.values()):
            common = os.path.commonpath(below)
            is_deep = common or len(below) > 1
            below = {f"{common}/**".lstrip("/") if is_deep else "": (path, first)}
        for directory, (path, layout) in below.items():
            if layout:
                found[path] = _written(f"{directory}/*{suffix}".lstrip("/"), layout)
    if not found:
        return None
    named, of_files = ", ".join(found), ", ".join(found.values())
    remedy = f"add to records: {of_files}" if params.records else f"set records: [{of_files}]"
    return printable(f"each record seems to be one document or conversation in {named}: {remedy}")


def _written(files: str, layout: dict[str, Any]) -> str:
    """A rule as YAML, with as few quotes as a person would write."""
    rule = {"files": re.sub("[\udc80-\udcff]", "?", files), **layout}  # a byte of no UTF-8 cannot be written
    return re.sub(r'"([a-z_]+|\$[.\w]+)"', r"\1", json.dumps(rule, ensure_ascii=False))
