"""From conversations to tokens, and which of them are trained.

The trained contents are looked for in the rendering of the entire conversation. The length of a rendered beginning says
nothing: many templates render a turn in another way once another one follows.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stages.base.errors import StageError, one_line
from stages.tokenizing import vocabulary
from stages.tokenizing.chat_template import (
    FLAGS,
    KNOWN_KEYS,
    ChatTemplate,
    Conversation,
    Leaf,
    Piece,
    Refused,
    Rendering,
    Span,
    count_strings,
    names_in,
    other_strings,
    read_conversation,
)
from stages.tokenizing.encoding import TokenizerSpec

START, TRAINED, WHOLE = 1 << 31, 1 << 30, 1 << 29
"""Bits of a token beside its id: it begins a document; it is trained; the document that it begins stays in one row."""
ID_MASK = WHOLE - 1

_OPENING = re.compile(r"<\w+>\s*\Z")
"""A tag right before reasoning, as `<think>`: the model must write it itself."""


class Encoded(NamedTuple):
    """A conversation as tokens."""

    tokens: NDArray[np.uint32]
    """(n,): ids with the bits `START`, `TRAINED` and `WHOLE`."""
    terminators: frozenset[int]
    """The ids of the special tokens that end its trained turns."""
    inner: frozenset[int]
    """Those that are within such turns, as `<|end|>` of gpt-oss after reasoning: the model continues after them."""
    strings: dict[str, int]
    """How many strings it has, by where they are: `system`, `assistant reasoning`, `tools`, ..."""
    left_out: dict[str, int]
    """Those of them that the template does not write."""


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
        self._eos, self._start = eos[0], spec.start_token_ids
        self._terminator = re.compile(rf"\s*(?:{self._renamed.pattern})")
        self._ends = re.compile(rf"(?:{self._renamed.pattern})\s*\Z")
        self._template = ChatTemplate(spec.chat)
        self._turn_ends = cache(self._find_turn_ends)
        # A text with more characters has more tokens than a row.
        self._max_chars = max(map(len, vocab)) * self._chat.seq_length

    def encode(self, content: str) -> Encoded | Refused:
        """The tokens of a conversation, or why there are none.

        Args:
            content: JSON as `extract` writes it: `messages`, or `prompt` and `completion`; perhaps `tools`.
        """
        try:
            parsed = msgspec.json.decode(content)
            if isinstance(parsed.get("prompt"), str):
                return self._encode_text(parsed["prompt"], parsed["completion"])
            conversation = read_conversation(parsed)
            return self._encode(conversation, self._wanted(conversation))
        except Refused as refused:
            return refused
        except RecursionError:
            return Refused("nested too deep")

    def _wanted(self, conversation: Conversation) -> set[int]:
        """The messages that are trained; with `all`, those of which nothing says that they are not."""
        messages, train_on = conversation.messages, self._chat.train_on
        found = [index for index, message in enumerate(messages) if train_on == "all" or message["role"] == "assistant"]
        if train_on == "completion" and conversation.num_prompt is not None:
            found = [index for index in found if index >= conversation.num_prompt]
        elif train_on in ("last", "completion"):
            found = found[-1:]
        return {index for index in found if not any(messages[index].get(flag) in (False, 0) for flag in FLAGS)}

    def _encode_text(self, prompt: str, completion: str) -> Encoded:
        """A prompt and what follows it: no template, but what begins and ends any document."""
        text = prompt + completion + self._eos
        span = Span(0 if self._chat.train_on == "all" else len(prompt), len(text))
        return self._tokens(text, [span], {}, {}, self._start)

    def _encode(self, conversation: Conversation, wanted: set[int]) -> Encoded:
        if self._special.search("\n".join(names_in(conversation))):
            raise Refused("a role, a name or a tool spells a special token")
        rendering = self._template.render(conversation)
        renamed = self._renamed_in(rendering)
        messages, pieces, generated = rendering.conversation.messages, rendering.pieces, rendering.generated
        if self._special.search("\n".join(text for message in messages for text in other_strings(message))):
            known = [{key: value for key, value in message.items() if key in KNOWN_KEYS} for message in messages]
            if self._template.render(rendering.conversation._replace(messages=known)).text != rendering.text:
                raise Refused("a message spells a special token beside its content, and the chat template writes it")
        counts = count_strings(rendering)
        if self._chat.train_on == "all":
            if len(wanted) < len(messages):
                raise Refused("train_on is all, and a message has train: false, or a weight of 0")
            return self._tokens(renamed.text, [Span(0, len(renamed.text))], *counts)
        if pieces is not None:
            _check_leaves(pieces, rendering.leaves, wanted)
        elif not generated:
            raise Refused("the chat template rewrites contents, so which tokens are theirs is not known")
        if generated:
            chosen = _chosen(rendering, wanted)
            spans = [Span(renamed.index(start), renamed.index(end)) for start, end in chosen]
        else:
            spans = [*self._spans(renamed, rendering.leaves, wanted, conversation.tools)]
        text = renamed.text
        for number, (start, end) in enumerate(spans):
            text, end = self._terminated(text, start, end)
            spans[number] = Span(start, end)
        return self._tokens(text, spans, *counts)

    def encode_prompt(self, messages: list[dict[str, Any]]) -> NDArray[np.uint32]:
        """The ids of a conversation and of what precedes the next turn of the assistant, (n,).

        Raises:
            Refused: the template fails, or a content would give a special token.
        """
        rendering = self._template.render(read_conversation({"messages": messages}), add_generation_prompt=True)
        return self._encoded(self._renamed_in(rendering).text)[0]

    def _renamed_in(self, rendering: Rendering) -> "_Renamed":
        """The rendering with the new names of the special tokens that are the template's."""
        if rendering.pieces is None and any(self._special.search(leaf.text) for leaf in rendering.leaves):
            raise Refused("a content spells a special token, and the chat template rewrites contents")
        return _Renamed(rendering.pieces or [Piece(rendering.text, None)], self._rename)

    def _rename(self, text: str) -> str:
        """The text of the template with the new names of special tokens."""
        return self._special.sub(lambda match: self._names[match[0]], text)

    def _spans(
        self, renamed: "_Renamed", leaves: list[Leaf], wanted: set[int], tools: list[dict[str, Any]] | None
    ) -> Iterator[Span]:
        """Where the contents of the messages are: from the first string of each to its last.

        With what the template writes around them that the model must write, too: the tag before reasoning, the
        beginning and the end of a tool call.
        """
        of_messages: dict[int, list[int]] = defaultdict(list)  # the numbers of the pieces that a message has
        for number, piece in enumerate(renamed.pieces):
            if piece.leaf is not None:
                of_messages[leaves[piece.leaf].message].append(number)
        for message in sorted(wanted):
            if not (numbers := of_messages[message]):
                continue  # an empty content
            first, last = numbers[0], numbers[-1]  # a piece of the template precedes each, and follows it
            first_kind, last_kind = (leaves[renamed.pieces[number].leaf or 0].kind for number in (first, last))
            start, end = renamed.starts[first], renamed.starts[last + 1]
            before = renamed.text[renamed.starts[first - 1] : start]
            if first_kind == "reasoning" and (opening := _OPENING.search(before)):
                start -= len(opening[0])
            elif first_kind == "call":  # it begins where the generation prompt ends
                prompt = self._rename(self._template.generation_prompt(tools))
                found = before.rfind(prompt)
                if not prompt or found < 0:
                    raise Refused("it is not known where a tool call begins: use a chat template with {% generation %}")
                start -= len(before) - found - len(prompt)
            if last_kind == "call":
                end = self._end_of_call(renamed.text, end, renamed.starts[last + 2], tools is not None)
            yield Span(start, end)

    def _end_of_call(self, text: str, end: int, after: int, has_tools: bool) -> int:
        """The end of a turn whose last string, up to `end`, is of a call; the next string begins at `after`.

        A template may write special tokens into a call and around it. So it is the one that ends other turns, too. Some
        templates end a call by the beginning of the next turn: without any other, that one is certain.

        Raises:
            Refused: it is not known.
        """
        found = [*self._renamed.finditer(text, end, after)]
        ends = self._turn_ends(has_tools)
        known = [match for match in found if self._ids[match[0]] in ends] or found
        if len(found) > 1 and known is found:
            raise Refused("it is not known where a tool call ends: use a chat template with {% generation %}")
        return known[0].end() if known else end

    def _find_turn_ends(self, has_tools: bool) -> frozenset[int]:
        """The ids of the special tokens that end turns of the assistant without a call."""
        messages = [{"role": role, "content": "."} for role in ("user", "assistant") * 2]
        try:
            return self._encode(Conversation(messages, None, [] if has_tools else None), {1, 3}).terminators
        except Refused:
            return frozenset()

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
        self, text: str, spans: list[Span], strings: dict[str, int], left_out: dict[str, int],
        beginning: tuple[int, ...] = (),
    ) -> Encoded:  # fmt: skip
        """Encode a rendering, after the ids of `beginning`; a token is trained where any of its characters is."""
        ids, offsets = self._encoded(text, len(beginning))
        covered = np.zeros(len(text) + 1, np.int64)
        for start, end in spans:
            covered[start + 1 : end + 1] = 1
        covered = covered.cumsum()  # trained characters before each one
        begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
        is_trained = covered[np.maximum(end, np.minimum(begin + 1, len(text)))] > covered[begin]
        is_trained[:1] &= bool(beginning)  # otherwise nothing precedes it
        if not is_trained.any():
            raise Refused("nothing of it is trained")
        ids |= np.where(is_trained, TRAINED, 0).astype(np.uint32)
        ids = np.append(np.array(beginning, np.uint32), ids)
        ids[0] |= START | WHOLE
        turns = [[self._ids[name] for name in self._renamed.findall(text, *span)] for span in spans]
        terminators = frozenset(tokens[-1] for tokens in turns if tokens)
        # With `all`, a span is no turn, but all of them.
        inner = frozenset(token for tokens in turns for token in tokens[:-1] if self._chat.train_on != "all")
        return Encoded(ids, terminators, inner, strings, left_out)

    def _encoded(self, text: str, num_before: int = 0) -> tuple[NDArray[np.uint32], list[tuple[int, int]]]:
        """The ids of a rendering that follows some tokens, (n,), and the characters that each stands for.

        Raises:
            Refused: it is longer than a row, or a content gives a special token.
        """
        if len(text) > self._max_chars:
            raise Refused(f"longer than a row: {len(text):,} characters")
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the only class that `tokenizers` raises
            raise Refused(f"the tokenizer cannot encode it: {one_line(error)}") from None
        ids = np.array(encoding.ids, np.uint32)
        if (length := num_before + len(ids)) > self._chat.seq_length:
            raise Refused(f"longer than a row: {length:,} tokens, and seq_length is {self._chat.seq_length:,}")
        names = [*self._renamed.finditer(text)]
        # A normalizer may drop the first character of a name.
        inside = {index for name in names for index in range(name.start() + 2, name.end())}
        if not inside.isdisjoint(begin for begin, _ in encoding.offsets):
            raise Refused(
                "the tokenizer takes a special token of the chat template for text, so the model would not see it: set "
                "normalized and single_word to false in tokenizer.json and tokenizer_config.json of a copy of the model"
            )
        written = [token for name in names if (token := self._ids[name[0]]) in self._counted]
        if ids[np.isin(ids, [*self._counted])].tolist() != written:
            raise Refused("a content gives a special token")
        return ids, encoding.offsets


class _Renamed:
    """A rendering in which the special tokens of the template have names that no data can spell."""

    def __init__(self, pieces: list[Piece], rename: Callable[[str], str]) -> None:
        self.pieces = pieces
        self._rename = rename
        texts = [piece.text if piece.leaf is not None else rename(piece.text) for piece in pieces]
        self.text = "".join(texts)
        self.starts = [*accumulate(map(len, texts), initial=0)]
        """Where each piece begins in it, and its end."""
        self._before = [*accumulate((len(piece.text) for piece in pieces), initial=0)]

    def index(self, index: int) -> int:
        """Where a character of the rendering as the template wrote it is in `text`."""
        number = min(bisect_right(self._before, index), len(self.pieces)) - 1
        piece, rest = self.pieces[number], index - self._before[number]
        return self.starts[number] + (rest if piece.leaf is not None else len(self._rename(piece.text[:rest])))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of some texts, a longer one first; without any, nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _check_leaves(pieces: list[Piece], leaves: list[Leaf], wanted: set[int]) -> None:
    """Check that the rendering has all that is to be trained, each string once, and in order.

    Raises:
        Refused: it has not.
    """
    counts = Counter(piece.leaf for piece in pieces)
    for number, leaf in enumerate(leaves):
        if leaf.message in wanted and counts[number] != 1:
            does = "repeats" if counts[number] else "leaves out"
            last = "" if counts[number] else "; with train_on last, only the last turn must be there"
            raise Refused(f"the chat template {does} the {leaf.kind} of a turn of the assistant{last}")
    order = [leaves[piece.leaf].message for piece in pieces if piece.leaf is not None]
    turns = [message for message, _ in groupby(order) if message in wanted]
    if turns != sorted({*turns}):
        raise Refused("the chat template puts the turns of the assistant into another order")


def _chosen(rendering: Rendering, wanted: set[int]) -> list[Span]:
    """Of the spans that the template says the assistant wrote, those of the messages that are trained."""
    messages, generated = rendering.conversation.messages, rendering.generated
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if wanted == {*assistants}:
        return generated
    if len(generated) != len(assistants):
        raise Refused(f"the chat template marks {len(generated)} places for {len(assistants)} turns of the assistant")
    turns = [*zip(generated, assistants, strict=True)]
    start = 0
    for piece in rendering.pieces or ():
        message = None if piece.leaf is None else rendering.leaves[piece.leaf].message
        inside = next((index for span, index in turns if span.start <= start < span.end), message)
        if message in assistants and inside != message:
            raise Refused("the chat template marks other places than one for each turn of the assistant")
        start += len(piece.text)
    return [span for span, index in turns if index in wanted]
