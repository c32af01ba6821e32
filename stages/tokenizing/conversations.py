"""From conversations to tokens, and which of them are trained: the model's own chat template, rendered as it is.

What a template does with a message is not known, so it is found out and checked. Each conversation is rendered twice:
as it is, and with a mark in place of each string of the data. The second rendering shows what is the template's; with
the strings put back it must equal the first one to the letter. So a content that the template drops, rewrites or
repeats is noticed, and one that spells a special token stays text.

The trained contents are looked for in the rendering of the entire conversation. The length of a rendered beginning says
nothing: many templates render a turn in another way once another one follows.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from stages.base.errors import StageError, one_line
from stages.base.process import limited
from stages.tokenizing import vocabulary
from stages.tokenizing.encoding import TokenizerSpec

START, TRAINED, WHOLE = 1 << 31, 1 << 30, 1 << 29
"""Bits of a token beside its id: it begins a document; it is trained; the document that it begins stays in one row."""
ID_MASK = WHOLE - 1

SECONDS, BYTES = 5.0, 1 << 30
"""That a template may need for one conversation: thousands of times what they do."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message. The template gets the first of them under the first two names, as in newer versions of
transformers."""
_FLAGS = ("train", "weight", "loss", "loss_mask")
"""Keys of a message that is not trained where they are false or 0, as several formats have it."""
_KEPT = ("type", "id")
"""Keys in a call whose strings templates compare, so they are not marked."""
_UNWRITTEN = (*_KEPT, "$id", "$schema", "format", "title")
"""Keys in a tool that templates need not write."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Others are counted together."""
# The white space between belongs to no group of its own: where the closing tag is missing, each of them would be tried.
_THOUGHTS = re.compile(r"(\s*<think>)(.*?)(</think>)(.*)", re.DOTALL)
_OPENING = re.compile(r"<\w+>\s*\Z")
"""A tag right before reasoning, as `<think>`: the model must write it itself."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A date that is always the same: with that of today, a conversation would give other tokens tomorrow.
_DATE = {
    "%d": "26",
    "%b": "Jul",
    "%B": "July",
    "%m": "07",
    "%Y": "2024",
    "%y": "24",
    "%H": "00",
    "%M": "00",
    "%S": "00",
}
_STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace({code!r}, {value!r})" for code, value in _DATE.items())
    + " }}{% endmacro %}\n"  # the environment drops this line end, and none that the template begins with
)


class Refused(Exception):
    """A conversation, or a part of it, gives no tokens; the message is the reason, for people."""


class _TooLong(Exception):
    """A conversation does not fit into a row; the message says how long it is."""


class Encoded(NamedTuple):
    """A conversation as tokens."""

    tokens: NDArray[np.uint32]
    """(n,): ids with the bits `START`, `TRAINED` and `WHOLE`."""
    terminators: frozenset[int]
    """The ids of the special tokens that end its trained turns."""
    strings: dict[str, int]
    """How many strings it has, by where they are: `system`, `assistant reasoning`, `tools`, ..."""
    left_out: dict[str, int]
    """Those of them that the template does not write."""


class _Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    num_prompt: int | None
    """How many of them are the prompt; None: nothing says so."""
    tools: list[dict[str, Any]] | None


class _Leaf(NamedTuple):
    """A string of the data, without the white space around it."""

    message: int
    text: str
    kind: Literal["content", "reasoning", "call"]


class _Place(NamedTuple):
    """Characters of a rendering."""

    start: int
    end: int


class _Piece(NamedTuple):
    """A part of a rendering."""

    text: str
    leaf: int | None
    """None: it is the template's."""


class ConversationEncoder:
    """Renders and encodes conversations."""

    def __init__(self, spec: TokenizerSpec) -> None:
        assert spec.chat
        self._chat = spec.chat
        content, self._names = vocabulary.rename(spec.path, spec.special_tokens)
        # Under their new names the special tokens are found in what the template writes, and in no string of the data.
        self._tokenizer = Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special, self._renamed = _any_of(self._names), _any_of(self._names.values())
        vocab = self._tokenizer.get_vocab()
        self._ids = {name: vocab[name] for name in self._names.values()}
        # The unknown token may replace characters of a content.
        self._counted = {*self._ids.values()} - {spec.unk_token_id} | {spec.eos_token_id}
        eos = [name for name, token_id in self._ids.items() if token_id == spec.eos_token_id]
        if not eos:
            raise StageError(
                f"the EOS token of {spec.path} is a character that text may contain, so it cannot end the turns of "
                "conversations: choose a model whose EOS token is a special one"
            )
        self._eos = eos[0]
        self._terminator = re.compile(rf"\s*(?:{self._renamed.pattern})")
        self._ends = re.compile(rf"(?:{self._renamed.pattern})\s*\Z")
        self._mark = secrets.token_hex(8)
        self._marks = re.compile(rf"{self._mark}x(\d{{6}})")
        self._templates = spec.chat.templates
        self._prompts: dict[bool, str] = {}
        """By whether there are no tools."""
        # A text with more characters has more tokens than a row.
        self._max_chars = max(map(len, vocab)) * self._chat.seq_length

    def encode(self, content: str) -> Iterator[Encoded | Refused]:
        """The tokens of a conversation, or why there are none; of one that is split, those of each part.

        Args:
            content: JSON as `extract` writes it: `messages`, or `prompt` and `completion`; perhaps `tools`.
        """
        parsed = msgspec.json.decode(content)
        try:
            if isinstance(parsed.get("prompt"), str):
                yield self._encode_text(parsed["prompt"], parsed["completion"])
                return
            conversation = _conversation(parsed)
            wanted = self._wanted(conversation)
            try:
                yield self._encode(conversation, wanted)
            except _TooLong:
                if self._chat.too_long == "drop":
                    raise
                yield from self._split(conversation, wanted)
        except _TooLong as error:
            yield Refused(f"longer than a row: {error}")
        except Refused as refused:
            yield refused

    def _wanted(self, conversation: _Conversation) -> set[int]:
        """The messages that are trained; with `all`, those of which nothing says that they are not."""
        messages, train_on = conversation.messages, self._chat.train_on
        found = [index for index, message in enumerate(messages) if train_on == "all" or message["role"] == "assistant"]
        if train_on == "completion" and conversation.num_prompt is not None:
            found = [index for index in found if index >= conversation.num_prompt]
        elif train_on in ("last", "completion"):
            found = found[-1:]
        return {index for index in found if not any(messages[index].get(flag) in (False, 0) for flag in _FLAGS)}

    def _split(self, conversation: _Conversation, wanted: set[int]) -> Iterator[Encoded | Refused]:
        """Cut a conversation before turns of the user into parts that fit into a row; the last ones are the longest.

        Each part begins with what precedes the first of these turns, such as the system message; in the first part it
        is trained, too. What nothing that is trained follows is left out.
        """
        messages = conversation.messages
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        starts = [index for index in users if index - 1 not in users]
        if not starts:
            raise _TooLong("no turn of the user to split it at")
        head, bounds = messages[: starts[0]], [*starts, len(messages)]
        parts: list[Encoded | Refused] = []
        last = len(starts)
        while last and (left := [index for index in wanted if index < bounds[last]]):
            last = max(1, bisect_right(bounds, max(left)))
            found: Encoded | Refused = Refused("longer than a row: a single turn")
            begin = last - 1
            for first in reversed(range(last)):
                own = {index - bounds[first] + len(head) for index in left if index >= bounds[first]}
                if first == 0 or self._chat.train_on == "all":
                    own |= {index for index in left if index < len(head)}
                part = conversation._replace(messages=[*head, *messages[bounds[first] : bounds[last]]])
                try:
                    found, begin = self._encode(part, own), first
                except _TooLong:
                    break
            parts.append(found)
            last = begin
        yield from reversed(parts)

    def _encode_text(self, prompt: str, completion: str) -> Encoded:
        """A prompt and what follows it: no template, and EOS at the end, as of any document."""
        text = prompt + completion + self._eos
        return self._tokens(text, [(0 if self._chat.train_on == "all" else len(prompt), len(text))], {}, {})

    def _encode(self, conversation: _Conversation, wanted: set[int]) -> Encoded:
        """Raises Refused, or _TooLong."""
        if self._special.search("\n".join(_names(conversation))):
            raise Refused("a role, a name or a tool spells a special token")
        conversation, full, generated = self._render_as_read(conversation)
        pieces, leaves, rendering = self._divided(conversation, full)
        written = None if pieces is None else {piece.leaf for piece in pieces}
        counts = _count(conversation, leaves, full, written)
        if pieces is None:  # what the template writes depends on the contents
            if not generated and self._chat.train_on != "all":
                raise Refused("the chat template rewrites contents, so which tokens are theirs is not known")
        elif self._chat.train_on != "all":
            _check_leaves(pieces, leaves, wanted)
        if self._chat.train_on == "all":
            if len(wanted) < len(conversation.messages):
                raise Refused("train_on is all, and a message has train: false, or a weight of 0")
            return self._tokens(rendering.text, [(0, len(rendering.text))], *counts)
        if generated:
            spans = [
                (rendering.place(start), rendering.place(end))
                for start, end in _chosen(generated, conversation.messages, wanted)
            ]
        else:
            spans = [*self._spans(rendering, leaves, wanted, conversation.tools)]
        text = rendering.text
        for number, (start, end) in enumerate(spans):
            text, end = self._terminated(text, start, end)
            spans[number] = (start, end)
        return self._tokens(text, spans, *counts)

    def encode_prompt(self, messages: list[dict[str, Any]]) -> NDArray[np.uint32]:
        """The ids of a conversation and of what precedes the next turn of the assistant, (n,).

        Raises:
            Refused: the template fails, or a content would give a special token.
        """
        conversation = _conversation({"messages": messages})
        full, _ = self._render(conversation, add_generation_prompt=True)
        _, _, rendering = self._divided(conversation, full, add_generation_prompt=True)
        return np.array(self._encoded(rendering.text).ids, np.uint32)

    def _divided(
        self, conversation: _Conversation, full: str, add_generation_prompt: bool = False
    ) -> tuple[list[_Piece] | None, list[_Leaf], "_Rendering"]:
        """A rendering in pieces, None where the template rewrites contents; the strings; the special tokens in it."""
        marked, leaves = self._marked(conversation.messages)
        skeleton, _ = self._render(conversation._replace(messages=marked), add_generation_prompt)
        pieces = self._pieces(full, skeleton, leaves)
        if pieces is None and any(self._special.search(leaf.text) for leaf in leaves):
            raise Refused("a content spells a special token, and the chat template rewrites contents")
        return pieces, leaves, _Rendering(pieces or [_Piece(full, None)], self._rename)

    def _render_as_read(self, conversation: _Conversation) -> tuple[_Conversation, str, list[_Place]]:
        """The conversation in the form that the template reads, and what `_render` gives for it.

        Most expect objects as arguments of calls, would quote a string of JSON, and write `None` for what is null. Some
        expect OpenAI's format: strings, and nulls.
        """
        forms = [conversation._replace(messages=[*map(form, conversation.messages)]) for form in (_objects, _strings)]
        for form in forms if forms[0] != forms[1] else forms[:1]:
            try:
                full, generated = self._render(form)
                for what, value in _structures(form.messages):
                    if value and str(value) in full:
                        raise Refused(f"the chat template writes {what} as Python does")
                return form, full, generated
            except Refused as refused:
                problem = refused
        raise problem

    def _render(self, conversation: _Conversation, add_generation_prompt: bool = False) -> tuple[str, list[_Place]]:
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
        messages = [{key: value for key, value in each.items() if key not in _FLAGS} for each in conversation.messages]
        render: Any = chat_template_utils.render_jinja_template  # which is annotated as if it returned a string
        variables = dict(self._chat.variables)
        try:
            # In a worker of Dask, without limits; but `pack` tries each template in its own process first.
            with limited(SECONDS, BYTES):
                texts, generated = render(
                    [messages], conversation.tools, None, _STRFTIME_NOW * ("strftime_now" in template) + template,
                    bool(_GENERATION.search(template)),
                    add_generation_prompt=add_generation_prompt, **variables,
                )  # fmt: skip
        except Exception as error:  # of any kind: it is a program of the model's authors
            raise Refused(f"the chat template fails: {one_line(error) or type(error).__name__}") from None
        return str(texts[0]), [_Place(*place) for places in generated for place in places]

    def _marked(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[_Leaf]]:
        """The messages with a mark in place of each string of their contents, and these strings."""
        leaves: list[_Leaf] = []

        def mark(number: int, text: str, kind: Literal["content", "reasoning", "call"]) -> str:
            if not (core := text.strip()):
                return text
            before, after = text.split(core, 1)  # white space stays, for templates that trim and for those that do not
            leaves.append(_Leaf(number, core, kind))
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

    def _pieces(self, full: str, skeleton: str, leaves: list[_Leaf]) -> list[_Piece] | None:
        """A rendering, divided where that of the marks has them; None: the two differ in more than these strings."""
        parts = self._marks.split(skeleton)  # what the template writes, the number of a leaf, and so on
        pieces, place = [_Piece(parts[0], None)], len(parts[0])
        if not full.startswith(parts[0]):
            return None
        for number, after in zip(parts[1::2], parts[2::2], strict=True):
            text = leaves[int(number)].text
            escaped = json.dumps(text, ensure_ascii=False)[1:-1]  # by `tojson`, as in the arguments of a tool call
            found = next((each for each in (text, escaped) if full.startswith(each + after, place)), None)
            if found is None:
                return None
            pieces += [_Piece(found, int(number)), _Piece(after, None)]
            place += len(found) + len(after)
        return pieces if place == len(full) else None

    def _rename(self, text: str) -> str:
        """The text of the template with the new names of special tokens."""
        return self._special.sub(lambda match: self._names[match[0]], text)

    def _prompt(self, tools: list[dict[str, Any]] | None) -> str:
        """What the template writes before a turn of the assistant, as far as it can be known."""
        user = _Conversation([{"role": "user", "content": "."}], None, tools)
        if (found := self._prompts.get(tools is None)) is None:
            try:
                with_prompt, without = (self._render(user, add_generation_prompt=add)[0] for add in (True, False))
            except Refused:
                with_prompt = without = ""
            found = self._rename(with_prompt[len(without) :]) if with_prompt.startswith(without) else ""
            self._prompts[tools is None] = found
        return found

    def _spans(
        self, rendering: "_Rendering", leaves: list[_Leaf], wanted: set[int], tools: list[dict[str, Any]] | None
    ) -> Iterator[tuple[int, int]]:
        """Where the contents of the messages are: from the first string of each to its last."""
        positions: dict[int, list[int]] = defaultdict(list)
        for position, piece in enumerate(rendering.pieces):
            if piece.leaf is not None:
                positions[leaves[piece.leaf].message].append(position)
        for message in sorted(wanted):
            if not (own := positions[message]):
                continue  # an empty content
            kinds = [leaves[rendering.pieces[position].leaf or 0].kind for position in own]
            start, end = rendering.starts[own[0]], rendering.starts[own[-1] + 1]
            before = rendering.text[rendering.starts[own[0] - 1] : start]
            if kinds[0] == "reasoning" and (opening := _OPENING.search(before)):
                start -= len(opening[0])
            elif kinds[0] == "call":  # the model must write what precedes the name of the function, too
                prompt = self._prompt(tools)
                place = before.rfind(prompt)
                if not prompt or place < 0:
                    raise Refused("it is not known where a tool call begins: use a chat template with {% generation %}")
                start -= len(before) - place - len(prompt)
            if kinds[-1] == "call":
                after = rendering.starts[own[-1] + 2]
                end = next((match.start() for match in self._renamed.finditer(rendering.text, end, after)), end)
            yield start, end

    def _terminated(self, text: str, start: int, end: int) -> tuple[str, int]:
        """The end of a turn with the special token that ends it, and the text, which may get that token here.

        Some templates end a turn by the beginning of the next one: the last one then gets EOS, as any document.
        """
        if not self._ends.search(text, start, end):
            if not text[end:].strip():
                return text + self._eos, len(text) + len(self._eos)
            if not (match := self._terminator.match(text, end)):
                raise Refused(
                    "the chat template ends a turn of the assistant with no special token: nothing would stop it"
                )
            end = match.end()
        # Of two in a row, as in Command, the one that ends a generation.
        return text, end + len(self._eos) * text.startswith(self._eos, end)

    def _tokens(
        self, text: str, spans: list[tuple[int, int]], strings: dict[str, int], left_out: dict[str, int]
    ) -> Encoded:
        """Encode a rendering; a token is trained where any of its characters is."""
        encoding = self._encoded(text)
        ids = np.array(encoding.ids, np.uint32)
        covered = np.zeros(len(text) + 1, np.int64)
        for start, end in spans:
            covered[start + 1 : end + 1] = 1
        covered = covered.cumsum()  # trained characters before each place
        begin, end = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        is_trained = covered[np.maximum(end, np.minimum(begin + 1, len(text)))] > covered[begin]
        is_trained[:1] = False  # nothing precedes it
        if not is_trained.any():
            raise Refused("nothing of it is trained")
        ids |= np.where(is_trained, TRAINED, 0).astype(np.uint32)
        ids[0] |= START | WHOLE
        last = [names[-1] for span in spans if (names := self._renamed.findall(text, *span))]
        return Encoded(ids, frozenset(self._ids[name] for name in last), strings, left_out)

    def _encoded(self, text: str) -> Encoding:
        """Encode a rendering: it has the special tokens of the template, and no others."""
        if len(text) > self._max_chars:
            raise _TooLong(f"{len(text):,} characters")
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the only class that `tokenizers` raises
            raise Refused(f"the tokenizer cannot encode it: {one_line(error)}") from None
        ids = np.array(encoding.ids, np.uint32)
        if len(ids) > self._chat.seq_length:
            raise _TooLong(f"{len(ids):,} tokens, and seq_length is {self._chat.seq_length:,}")
        written = sum(self._ids[name] in self._counted for name in self._renamed.findall(text))
        if np.isin(ids, [*self._counted]).sum() != written:
            raise Refused("a content gives a special token")
        return encoding


class _Rendering:
    """A rendering in which the special tokens of the template have names that no data can spell."""

    def __init__(self, pieces: list[_Piece], rename: Callable[[str], str]) -> None:
        self.pieces = pieces
        self._rename = rename
        texts = [piece.text if piece.leaf is not None else rename(piece.text) for piece in pieces]
        self.text = "".join(texts)
        self.starts = [*accumulate(map(len, texts), initial=0)]
        """Where each piece begins in it, and its end."""
        self._before = [*accumulate((len(piece.text) for piece in pieces), initial=0)]

    def place(self, index: int) -> int:
        """Where a place of the rendering as the template wrote it is in `text`."""
        number = min(bisect_right(self._before, index), len(self.pieces)) - 1
        piece, rest = self.pieces[number], index - self._before[number]
        return self.starts[number] + (rest if piece.leaf is not None else len(self._rename(piece.text[:rest])))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of some texts, a longer one first; without any, nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _conversation(parsed: dict[str, Any]) -> _Conversation:
    prompt = parsed.get("prompt")
    messages = parsed["messages"] if prompt is None else [*prompt, *parsed["completion"]]
    return _Conversation([*map(_normalized, messages)], None if prompt is None else len(prompt), parsed.get("tools"))


def _normalized(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if there is any, under one name, and with a single call in a list."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    rest = {key: value for key, value in message.items() if key not in _REASONING}
    if isinstance(rest.get("function_call"), dict) and not rest.get("tool_calls"):  # OpenAI's old format
        rest["tool_calls"] = [{"type": "function", "function": rest.pop("function_call")}]
    return rest if reasoning is None else rest | {"reasoning_content": reasoning, "thinking": reasoning}


def _objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what is null, and with objects as the arguments of its calls."""

    def decode(arguments: Any) -> Any:
        try:
            found = msgspec.json.decode(arguments) if isinstance(arguments, str) else None
        except (msgspec.DecodeError, RecursionError):
            found = None
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


def _names(conversation: _Conversation) -> Iterator[str]:
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


def _count(
    conversation: _Conversation, leaves: list[_Leaf], full: str, written: set[int | None] | None
) -> tuple[dict[str, int], dict[str, int]]:
    """The strings of a conversation, and those that its rendering lacks, by where they are.

    Args:
        conversation: As the template got it.
        leaves: The strings of its messages.
        full: Its rendering.
        written: The leaves that are in it; None: nothing says so, so they are looked for.
    """
    strings: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for number, leaf in enumerate(leaves):
        role = conversation.messages[leaf.message]["role"]
        where = role if role in _ROLES else "other roles"
        where += "" if leaf.kind == "content" else f" {leaf.kind}"
        strings[where] += 1
        left_out[where] += not (_is_in(leaf.text, full) if written is None else number in written)
    for message in conversation.messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if isinstance(part, dict) and not isinstance(part.get("text"), str):  # such as a picture
                where = f"{message['role'] if message['role'] in _ROLES else 'other roles'} parts other than text"
                texts = [*_strings_of(part)]
                strings[where] += 1
                # Without a string it is a place for what is elsewhere, which no template can write.
                left_out[where] += not (texts and all(_is_in(text, full) for text in texts))
    for text in _strings_of(conversation.tools):
        strings["tools"] += 1
        left_out["tools"] += not _is_in(text, full)
    return strings, +left_out


def _is_in(text: str, full: str) -> bool:
    """Whether a rendering has a string, by `tojson`, as it is, or each of its lines."""
    return json.dumps(text, ensure_ascii=False)[1:-1] in full or all(line.strip() in full for line in text.splitlines())


def _strings_of(value: Any) -> Iterator[str]:
    """The strings in tools that a template must write."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _UNWRITTEN:
                yield from _strings_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings_of(item)


def _check_leaves(pieces: list[_Piece], leaves: list[_Leaf], wanted: set[int]) -> None:
    """Check that the rendering has all that is to be trained, each string once, and in order.

    Raises:
        Refused: it has not.
    """
    counts = Counter(piece.leaf for piece in pieces)
    for number, leaf in enumerate(leaves):
        if leaf.message in wanted and counts[number] != 1:
            does = "repeats" if counts[number] else "leaves out"
            last = "" if counts[number] else "; with train_on: last, only the last turn must be there"
            raise Refused(f"the chat template {does} the {leaf.kind} of a turn of the assistant{last}")
    order = [leaves[piece.leaf].message for piece in pieces if piece.leaf is not None]
    turns = [message for message, _ in groupby(order) if message in wanted]
    if turns != sorted({*turns}):
        raise Refused("the chat template puts the turns of the assistant into another order")


def _chosen(generated: list[_Place], messages: list[dict[str, Any]], wanted: set[int]) -> list[_Place]:
    """Of the places that the template says the assistant wrote, those of the messages that are trained."""
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(generated) == len(assistants):
        return [place for place, index in zip(generated, assistants, strict=True) if index in wanted]
    if wanted == {*assistants}:
        return generated
    raise Refused(f"the chat template marks {len(generated)} places for {len(assistants)} turns of the assistant")
