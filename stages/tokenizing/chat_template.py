"""Conversations as the model's own chat template writes them, and which of the text is the data's.

What a template does with a message is not known, so it is found out and checked. Each conversation is rendered twice:
as it is, and with a mark in place of each string of the data. The second rendering shows what is the template's; with
the strings put back it must equal the first one to the letter. So a content that the template drops, rewrites or
repeats is noticed, and one that spells a special token stays text.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, NamedTuple

import msgspec

from stages.base.errors import StageError, one_line
from stages.base.process import limited
from stages.tokenizing.encoding import ChatSpec

SECONDS, BYTES = 5.0, 1 << 30
"""That a template may need for one conversation: thousands of times what they do."""
FLAGS = ("train", "weight", "loss", "loss_mask")
"""Keys of a message that is not trained where they are false or 0, as several formats have it."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message. The template gets the first of them under the first two names, as in newer versions of
transformers."""
KNOWN_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls", "function_call", *_REASONING, *FLAGS)
"""Keys of a message that templates know; of the others, few write any."""
_KEPT = ("type", "id")
"""Keys in a call whose strings templates compare, so they are not marked."""
_UNWRITTEN = (*_KEPT, "$id", "$schema", "format", "title")
"""Keys in a tool that templates need not write."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Others are counted together."""
# The white space between belongs to no group of its own: where the closing tag is missing, each of them would be tried.
_THOUGHTS = re.compile(r"(\s*<think>)(.*?)(</think>)(.*)", re.DOTALL)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A date that is always the same: with that of today, a conversation would give other tokens tomorrow.
_DATE = datetime(2024, 7, 26)
_CODES = ["%" + pad + letter for letter in "aAbBdeFHIjmMpSTyY" for pad in ("", "-")]
_STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace({code!r}, {_DATE.strftime(code)!r})" for code in _CODES)
    + " }}{% endmacro %}\n"  # the environment drops this line end, and none that the template begins with
)


class Refused(Exception):
    """A conversation, or a part of it, gives no tokens; the message is the reason, for people."""


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    num_prompt: int | None
    """How many of them are the prompt; None: nothing says so."""
    tools: list[dict[str, Any]] | None


class Leaf(NamedTuple):
    """A string of the data, without the white space around it."""

    message: int
    text: str
    kind: Literal["content", "reasoning", "call"]


class Span(NamedTuple):
    """Characters of a rendering, from `start` up to `end`."""

    start: int
    end: int


class Piece(NamedTuple):
    """A part of a rendering."""

    text: str
    leaf: int | None
    """None: it is the template's."""


class Rendering(NamedTuple):
    """What the template wrote."""

    conversation: Conversation
    """In the form that the template reads."""
    text: str
    generated: list[Span]
    """Where the template itself says that the assistant wrote it."""
    pieces: list[Piece] | None
    """None: the template rewrites contents, so what it writes depends on them."""
    leaves: list[Leaf]
    """The strings of the messages."""


class ChatTemplate:
    """Renders conversations."""

    def __init__(self, chat: ChatSpec) -> None:
        self._templates, self._variables = dict(chat.templates), dict(chat.variables)
        self._mark = secrets.token_hex(8)
        self._marks = re.compile(rf"{self._mark}x(\d{{6}})")
        self._prompt = lru_cache(maxsize=100)(self._find_prompt)

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> Rendering:
        """Write a conversation, and perhaps what precedes the next turn of the assistant.

        Most templates expect objects as arguments of calls, would quote a string of JSON, and write `None` for what is
        null. Some expect OpenAI's format: strings, and nulls. The first form that the template reads is taken.

        Raises:
            Refused: the template fails.
        """
        forms = [conversation._replace(messages=[*map(form, conversation.messages)]) for form in (_objects, _strings)]
        for form in forms if forms[0] != forms[1] else forms[:1]:
            try:
                text, generated = self._render(form, add_generation_prompt)
                for what, value in _structures(form.messages):
                    if value and str(value) in text:
                        raise Refused(f"the chat template writes {what} as Python does")
            except Refused as refused:
                problem = refused
                continue
            marked, leaves = self._marked(form.messages)
            skeleton, _ = self._render(form._replace(messages=marked), add_generation_prompt)
            return Rendering(form, text, generated, self._pieces(text, skeleton, leaves), leaves)
        raise problem

    def generation_prompt(self, tools: list[dict[str, Any]] | None) -> str:
        """What the template writes before a turn of the assistant, as far as it can be known."""
        return self._prompt(json.dumps(tools))

    def _find_prompt(self, tools: str) -> str:
        user = Conversation([{"role": "user", "content": "."}], None, json.loads(tools))
        try:
            with_prompt, without = (self._render(user, add)[0] for add in (True, False))
        except Refused:
            return ""
        return with_prompt.removeprefix(without) * with_prompt.startswith(without)

    def _render(self, conversation: Conversation, add_generation_prompt: bool) -> tuple[str, list[Span]]:
        """The text of a conversation, and where the template itself says that the assistant wrote it."""
        # It imports no torch, unlike transformers' tokenizers, and half a second is not for --help.
        from transformers.utils import chat_template_utils

        # As `apply_chat_template` chooses.
        name = "tool_use" if conversation.tools is not None and "tool_use" in self._templates else "default"
        if (template := self._templates.get(name)) is None:
            raise StageError(
                "the model has no chat template, or none named default, which conversations need: set chat_template to "
                "the file of one, such as models/templates/plain.jinja"
            )
        messages = [{key: value for key, value in each.items() if key not in FLAGS} for each in conversation.messages]
        render: Any = chat_template_utils.render_jinja_template  # which is annotated as if it returned a string
        try:
            # In a worker of Dask, without limits; but `pack` tries each template in its own process first.
            with limited(SECONDS, BYTES):
                texts, generated = render(
                    [messages], conversation.tools, None, _STRFTIME_NOW * ("strftime_now" in template) + template,
                    bool(_GENERATION.search(template)),
                    add_generation_prompt=add_generation_prompt, **self._variables,
                )  # fmt: skip
        except Exception as error:  # of any kind: it is a program of the model's authors
            raise Refused(f"the chat template fails: {one_line(error) or type(error).__name__}") from None
        return str(texts[0]), [Span(*span) for spans in generated for span in spans]

    def _marked(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Leaf]]:
        """The messages with a mark in place of each string of their contents, and these strings."""
        leaves: list[Leaf] = []

        def mark(number: int, text: str, kind: Literal["content", "reasoning", "call"]) -> str:
            if not (core := text.strip()):
                return text
            before, after = text.split(core, 1)  # white space stays, for templates that trim and for those that do not
            leaves.append(Leaf(number, core, kind))
            return f"{before}{self._mark}x{len(leaves) - 1:06d}{after}"

        def mark_part(number: int, part: Any) -> Any:
            if isinstance(part, str):
                return mark(number, part, "content")
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                return {**part, "text": mark(number, part["text"], "content")}
            return part

        def mark_content(number: int, content: Any, role: str) -> Any:
            if isinstance(content, list):
                return [mark_part(number, part) for part in content]
            if not isinstance(content, str):
                return content
            if role == "assistant" and (thoughts := _THOUGHTS.fullmatch(content)):
                opening, reasoning, closing, answer = thoughts.groups()
                return f"{opening}{mark(number, reasoning, 'reasoning')}{closing}{mark(number, answer, 'content')}"
            return mark(number, content, "content")

        def mark_call(number: int, value: Any) -> Any:
            if isinstance(value, str):
                return mark(number, value, "call")
            if isinstance(value, dict):
                return {key: item if key in _KEPT else mark_call(number, item) for key, item in value.items()}
            return [mark_call(number, item) for item in value] if isinstance(value, list) else value

        marked = []
        for number, message in enumerate(messages):
            new = dict(message)
            if isinstance(reasoning := message.get("reasoning_content"), str):
                new["reasoning_content"] = new["thinking"] = mark(number, reasoning, "reasoning")
            if "content" in message:
                new["content"] = mark_content(number, message["content"], message["role"])
            if calls := message.get("tool_calls"):
                new["tool_calls"] = mark_call(number, calls)
            marked.append(new)
        return marked, leaves

    def _pieces(self, full: str, skeleton: str, leaves: list[Leaf]) -> list[Piece] | None:
        """A rendering, divided where that of the marks has them; None: the two differ in more than these strings."""
        parts = self._marks.split(skeleton)  # what the template writes, the number of a leaf, and so on
        pieces, end = [Piece(parts[0], None)], len(parts[0])
        if not full.startswith(parts[0]):
            return None
        for number, after in zip(parts[1::2], parts[2::2], strict=True):
            text = leaves[int(number)].text
            escaped = json.dumps(text, ensure_ascii=False)[1:-1]  # by `tojson`, as in the arguments of a tool call
            found = next((each for each in (text, escaped) if full.startswith(each + after, end)), None)
            if found is None:
                return None
            pieces += [Piece(found, int(number)), Piece(after, None)]
            end += len(found) + len(after)
        return pieces if end == len(full) else None


def read_conversation(parsed: dict[str, Any]) -> Conversation:
    """A conversation as `extract` writes it: `messages`, or `prompt` and `completion`; perhaps `tools`."""
    prompt = parsed.get("prompt")
    messages = parsed["messages"] if prompt is None else [*prompt, *parsed["completion"]]
    return Conversation([*map(_normalized, messages)], None if prompt is None else len(prompt), parsed.get("tools"))


def _normalized(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if there is any, under one name, and with its calls, if there are any, in a list.

    Raises:
        Refused: the calls are a string, and not JSON.
    """
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    rest = {key: value for key, value in message.items() if key not in _REASONING}
    if isinstance(calls := rest.get("tool_calls"), str) and calls:  # as in tables whose rows differ
        rest["tool_calls"] = _parsed(calls)
        if not isinstance(rest["tool_calls"], (list, NoneType)):  # a template would take each character for a call
            raise Refused("tool_calls is a string that is no JSON of a list")
    if isinstance(rest.get("function_call"), dict) and not rest.get("tool_calls"):  # OpenAI's old format
        rest["tool_calls"] = [{"type": "function", "function": rest.pop("function_call")}]
    if rest.get("tool_calls") in ([], ""):  # some templates only look whether the key is there
        del rest["tool_calls"]
    return rest if reasoning is None else rest | {"reasoning_content": reasoning, "thinking": reasoning}


def _parsed(text: str) -> Any:
    """The value of a string of JSON; another string stays as it is."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what is null, and with objects as the arguments of its calls."""

    def decode(arguments: Any) -> Any:
        found = _parsed(arguments) if isinstance(arguments, str) else None
        return found if isinstance(found, dict) else arguments

    return _with_arguments({key: value for key, value in message.items() if value is not None}, decode)


def _strings(message: dict[str, Any]) -> dict[str, Any]:
    """The message with strings of JSON as the arguments of its calls."""
    return _with_arguments(
        message, lambda found: json.dumps(found, ensure_ascii=False) if type(found) is dict else found
    )


def _with_arguments(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    def converted(call: Any) -> Any:
        function = _function(call)
        if "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": convert(function["arguments"])}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(converted, calls)]} if isinstance(calls, list) else message


def _function(call: Any) -> dict[str, Any]:
    """Name and arguments of a call; none of what is no call."""
    function = call.get("function") if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _structures(messages: Iterable[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What a template has to take apart: lists of parts, and objects with arguments."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield "a content that is a list", content
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(arguments := _function(call).get("arguments"), dict):
                yield "the arguments of a call", arguments


def names_in(conversation: Conversation) -> Iterator[str]:
    """What templates write that is no content: roles, names, ids, tools, keys of arguments."""
    yield json.dumps(conversation.tools, ensure_ascii=False)
    for message in conversation.messages:
        yield from (str(message.get(key)) for key in ("role", "name", "tool_call_id"))
        yield from _keys(message.get("tool_calls"))


def _keys(value: Any) -> Iterator[str]:
    """The keys in a value, and what is not marked."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from (str(item),) if key in _KEPT else _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)


def count_strings(rendering: Rendering) -> tuple[dict[str, int], dict[str, int]]:
    """The strings of a conversation, and those of them that its rendering lacks, by where they are."""
    messages = rendering.conversation.messages
    roles = [message["role"] if message["role"] in _ROLES else "other roles" for message in messages]
    written = None if rendering.pieces is None else {piece.leaf for piece in rendering.pieces}
    strings: Counter[str] = Counter()
    left_out: Counter[str] = Counter()

    def add(where: str, is_written: bool) -> None:
        strings[where] += 1
        left_out[where] += not is_written

    def is_written(text: str) -> bool:  # by `tojson`, as it is, or each of its lines
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        return escaped in rendering.text or all(line.strip() in rendering.text for line in text.splitlines())

    for number, leaf in enumerate(rendering.leaves):
        kind = "" if leaf.kind == "content" else f" {leaf.kind}"
        add(roles[leaf.message] + kind, is_written(leaf.text) if written is None else number in written)
    for message, role in zip(messages, roles, strict=True):
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if isinstance(part, dict) and not isinstance(part.get("text"), str):  # such as a picture
                # Without a string it stands for what is elsewhere, which no template can write.
                texts = [*_strings_of(part)]
                add(f"{role} parts other than text", bool(texts) and all(map(is_written, texts)))
        for text in other_strings(message):
            add(f"{role} other keys", is_written(text))
    for text in _strings_of(rendering.conversation.tools):
        add("tools", is_written(text))
    return strings, +left_out


def other_strings(message: dict[str, Any]) -> Iterator[str]:
    """The strings under the keys of a message that templates need not know."""
    return filter(str.strip, _strings_of({key: value for key, value in message.items() if key not in KNOWN_KEYS}))


def _strings_of(value: Any) -> Iterator[str]:
    """The strings in a value that a template must write."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _UNWRITTEN:
                yield from _strings_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings_of(item)
