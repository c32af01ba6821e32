"""From strings to tokens, with memory for a batch of text.

Two libraries can encode: the model's own, which is the tokenizers that transformers requires, and a fast one. The fast
one is used where it is known to give the same tokens. Each character that occurs is encoded by both, alone and among
others, as the two know different versions of Unicode: a document with a character that differs is left to the model's
own. A sample of each batch is encoded by both, too. If it differs, nothing that was encoded is used.

The model's own needs about a hundred times the memory of its text, the fast one forty times. So text is encoded in
batches; no document of a corpus is longer than one.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stages.base.errors import StageError
from stages.model.tokenizer import TEXTS
from stages.tokenizing import vocabulary
from stages.tokenizing.comparison import Comparison, Differs, encode
from stages.tokenizing.fast_tokenizer import Failed
from stages.work import arrow

NAME = f"tokenizers {tokenizers.__version__}"
"""The model's own, of the version that transformers requires."""

Tokens = NDArray[np.integer[Any]]


TrainOn = Literal["assistant", "last", "completion", "all"]
"""assistant: all turns of the assistant | last: the last one | completion: what follows the prompt, or the last turn |
all: every token, those of the template too."""


class ChatSpec(NamedTuple):
    """How conversations become tokens, beside the tokenizer (stages/tokenizing/conversations.py)."""

    templates: tuple[tuple[str, str], ...]
    """Jinja, by name: `tool_use` is for conversations with tools, `default` for the others. Without
    any, only prompts and completions that are plain text can be encoded."""
    variables: tuple[tuple[str, str], ...]
    """The special tokens by the names that templates use, such as `bos_token`."""
    train_on: TrainOn
    seq_length: int
    """Tokens of a row."""


class TokenizerSpec(NamedTuple):
    """How strings become tokens."""

    path: Path
    """A `tokenizer.json`."""
    sha256: str
    """Of that file."""
    eos_token_id: int
    """Ends each document, and occurs nowhere else."""
    unk_token_id: int | None
    """Replaces what the vocabulary cannot express."""
    special_tokens: tuple[str, ...]
    """No text gives them, except for the unknown token."""
    vocab_size: int
    """Rows of the model's embedding."""
    is_fast: bool = False
    """Whether the fast tokenizer may encode."""
    chat: ChatSpec | None = None
    """None: the corpus has no conversations."""
    start_token_ids: tuple[int, ...] = ()
    """Begin each document, such as BOS."""

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """The smallest that can represent the vocabulary; with conversations, one that has room for more bits."""
        if self.chat:
            return np.dtype(np.uint32)
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)


class EncoderLimits(NamedTuple):
    """What bounds the memory, in bytes of UTF-8. It changes no token."""

    batch: int = 1 << 20
    """Encoded at once, or a single longer document."""
    sample: int = 1 << 11
    """Of a batch, encoded by both tokenizers: 0.2 % of the text, as one of them is about 20 times as slow."""


DEFAULT_LIMITS = EncoderLimits()


class EncodedBatch(NamedTuple):
    """The tokens of some documents, and counts of characters of these documents."""

    tokens: Tokens
    """(n,) `spec.dtype`."""
    num_dropped: int = 0
    """They leave no token, or lose a part of their bytes."""
    num_slow: int = 0
    """Encoded by the model's own tokenizer, although the fast one may encode."""


_SEEN, _DROPPED, _DIFFERS = 1, 2, 4
"""Bits for a character."""


class _Refused(Exception):
    """A document cannot be encoded; the message is the reason."""


class Encoder:
    """Encodes documents."""

    def __init__(self, spec: TokenizerSpec, limits: EncoderLimits = DEFAULT_LIMITS) -> None:
        """Load the tokenizers.

        Raises:
            Differs: the fast one cannot be used.
        """
        # Workers use all cores already, and `num_workers: 1` means one. `tokenizers` reads this at each batch.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._spec = spec
        self._limits = limits
        content, names = vocabulary.rename(spec.path, spec.special_tokens)
        self._tokenizer = Tokenizer.from_buffer(content)
        self._tokenizer.encode_special_tokens = True  # `<|endoftext|>` in a text is text
        self._tokenizer.no_truncation()  # or documents would lose all after the limit in the file, without an error
        self._tokenizer.no_padding()  # or documents of a batch would get the length of the longest
        ids = {token: self._tokenizer.token_to_id(name) for token, name in names.items()}
        self._renamed = {token_id: token for token, token_id in ids.items() if token_id is not None}
        # What may not be within a document: EOS may not even where it is the unknown token, too.
        special = self._renamed.keys() - {spec.unk_token_id} | {spec.eos_token_id}
        self._is_special = np.zeros(spec.vocab_size, np.bool_)  # of each id
        self._is_special[[token_id for token_id in special if token_id < spec.vocab_size]] = True
        self._start = np.array(spec.start_token_ids, np.uint32)
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._known = np.zeros(sys.maxunicode + 1, np.uint8)  # of each character
        self._plain = b""  # ASCII characters that were seen, are not dropped, and do not differ
        self._comparison: Comparison | None = None
        if spec.is_fast:
            self._load_fast(content)

    def _load_fast(self, content: bytes) -> None:
        try:
            self._comparison = Comparison(self._tokenizer, content)
        except Failed as error:
            reason = str(error).partition(". ")[0]  # what follows is advice to whoever calls the library
            raise Differs(f"it cannot use {self._spec.path.name}: {reason}") from None
        # Under its new name no text has a special token.
        added = {self._renamed.get(token_id, token.content): token for token_id, token in self._added.items()}
        self._check_characters(bytes(range(128)) + "".join([*added, *TEXTS]).encode())
        if (differing := self._known[:128] & (_DIFFERS | _DROPPED) == _DIFFERS).any():
            raise Differs(f"it gives other tokens for the character {chr(int(differing.argmax()))!r}")
        choosy = [text for text, token in added.items() if token.single_word or token.lstrip or token.rstrip]
        self._comparison.check_all(added, choosy)

    def encode(self, documents: pa.StringArray) -> Iterator[EncodedBatch]:
        """Yield the documents' tokens, each with those that begin and end a document, in batches of some documents.

        Raises:
            StageError: the tokenizer gives ids that the model does not know, or cannot encode a document.
            Differs: the fast tokenizer gives other tokens than the model's own.
        """
        for batch in arrow.slices(documents, pc.binary_length(documents), self._limits.batch):
            try:
                yield self._encode(batch)
            except Failed as error:
                raise Differs(f"it cannot encode all of the text: {error}") from None
            except Exception as error:
                if type(error) not in (_Refused, Exception):  # the latter is what `tokenizers` raises
                    raise
                if len(batch) > 1:  # which document is it about?
                    for index in range(len(batch)):
                        yield from self.encode(batch.slice(index, 1))
                    continue
                beginning = str(memoryview(batch[0].as_buffer())[:200], "utf-8", "ignore")[:50]
                raise StageError(
                    f"{self._spec.path} cannot encode the document that begins with {beginning!r}: {error}. "
                    "Remove or change it in raw_dir, or give the model another tokenizer or eos_token_id"
                ) from None

    def _encode(self, batch: pa.StringArray) -> EncodedBatch:
        text = bytes(_text(batch))
        num_dropped, has_differing = self._check_characters(text)
        if self._comparison:
            self._comparison.check_sample(text, self._limits.sample)
        tokens, num_slow = self._encode_batch(batch, has_differing)
        return EncodedBatch(tokens, num_dropped, num_slow)

    def _check_characters(self, text: bytes) -> tuple[int, bool]:
        """How many characters of a text are dropped, and whether the fast tokenizer encodes any of them differently.

        Dropped are those that leave no token, or lose a part of their bytes: byte-level vocabularies without an unknown
        token drop the bytes that they lack; some normalizers drop control characters. White space is not counted where
        the tokenizer only uses it to find words.
        """
        unusual = text.translate(None, self._plain)  # usually only what is not ASCII
        codes = np.frombuffer(str(unusual, "utf-8").encode("utf-32-le"), np.uint32)  # (characters,)
        if len(new := np.unique(codes[self._known[codes] == 0])):
            self._learn(new)
        known = self._known[codes]
        return int(np.count_nonzero(known & _DROPPED)), bool(np.any(known & _DIFFERS))

    def _learn(self, codes: NDArray[np.uint32]) -> None:
        """Decide about characters that were not seen before, by encoding each of them alone."""
        self._known[codes] = [_SEEN | _DROPPED * self._drops(chr(code)) for code in codes]
        if self._comparison:
            self._known[codes[self._comparison.characters([*map(chr, codes)])]] |= _DIFFERS
        self._plain = bytes(np.flatnonzero(self._known[:128] == _SEEN).tolist())

    def _drops(self, character: str) -> bool:
        tokenizer = self._tokenizer
        try:
            encoding = tokenizer.encode(character, add_special_tokens=False)
        except Exception:  # a model of words without an unknown token may know the character within words only
            return False
        if not self._added.keys().isdisjoint(encoding.ids):
            return False
        word = tokenizer.normalizer.normalize_str(character) if tokenizer.normalizer else character
        if tokenizer.pre_tokenizer:
            word = "".join(part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word))
        # A token is at least as long as what it stands for; a byte-level word has a character for each byte.
        is_partly_lost = len("".join(encoding.tokens)) < len(word)
        return is_partly_lost or not (encoding.ids or character.isspace())

    def _encode_batch(self, batch: pa.StringArray, has_differing: bool) -> tuple[Tokens, int]:
        """The tokens of all documents together, (n,), and how many characters the fast tokenizer has not encoded."""
        different = batch.dictionary_encode()  # records repeat their strings: encode each once
        strings = different.dictionary.to_pylist()
        num_slow = 0
        if self._comparison:
            documents = self._comparison.encode(strings, has_differing)
            if has_differing:
                num_slow = sum(len(string) for string in batch.to_pylist() if self._comparison.differs(string))
        else:
            documents = encode(self._tokenizer, strings)
        end = np.array([self._spec.eos_token_id], np.uint32)
        whole = [part for document in documents for part in (self._start, document, end)]
        ids = np.concatenate(whole)
        check_ids(ids, self._spec)  # before the cast, which would wrap 70 000 to 4 464 in uint16 without an error
        tokens = ids.astype(self._spec.dtype)
        self._check(tokens, len(documents))
        if len(documents) < len(batch):
            num_added = len(self._start) + 1
            starts = np.cumsum([0, *(len(document) + num_added for document in documents)], dtype=np.int32)
            lists = pa.ListArray.from_arrays(arrow.from_numpy(starts), arrow.from_numpy(tokens))
            tokens = np.from_dlpack(lists.take(different.indices).flatten()).view(self._spec.dtype)
        return tokens, num_slow

    def _check(self, tokens: Tokens, num_documents: int) -> None:
        """Raise if there are more special tokens than those that begin and end each document."""
        found = tokens[self._is_special[tokens]]
        num_before = np.count_nonzero(self._is_special[self._start])
        if len(found) > (num_before + 1) * num_documents:
            token_id = int(found[num_before])  # of a single document, the first that is in its text
            token = self._renamed.get(token_id) or self._tokenizer.id_to_token(token_id)
            raise _Refused(f"its text gives the special token {token!r}")


def check_ids(ids: NDArray[Any], spec: TokenizerSpec) -> None:
    """Raise a StageError if the model's embedding lacks a row for one of these ids."""
    if ids.max(initial=0) >= spec.vocab_size:
        raise StageError(
            f"{spec.path} gives token {ids.max()}, but the model's vocab_size is {spec.vocab_size}: "
            "the tokenizer belongs to another model, or tokens were added to it alone"
        )


def _text(documents: pa.StringArray) -> memoryview:
    """The UTF-8 of documents, one after the other; no copy."""
    _, offsets, data = documents.buffers()
    ends = np.frombuffer(offsets, np.int32)[documents.offset :][: len(documents) + 1]
    return memoryview(data)[ends[0] : ends[-1]]
