"""Where two tokenizers that should be the same give different tokens.

The two libraries know different versions of Unicode (9 and 17), and the newer one does not support all of what a
`tokenizer.json` may contain. Whether a text is divided and normalized equally depends on its characters and their
neighbours, and a vocabulary may hide that: where it has no token across a border, nobody sees the border. So beside the
tokenizer itself another one is compared, with its normalizer and pre-tokenizer, whose tokens are bytes and show all
borders of words.
"""

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stages.model.tokenizer import TEXTS
from stages.tokenizing import vocabulary
from stages.tokenizing.fast_tokenizer import Failed, FastTokenizer

# A character among others, which it divides differently as a letter, a digit, a space or punctuation. U+0345 and U+0334
# have the combining classes 240 and 1: they are sorted if what is between them has a class, too.
_AMONG = "{0}b{0}{0} a{0}b A{0}B {0} 1{0}2.{0}\n{0} a'{0}a'{0} {0}a\u0345{0}\u0334"
_SECOND = "\u0307\U00011930\U000113b8\U000113bb\U000113c2\U000113c9\U0001611e\U0001611f\U00016120\U00016129\U00016d67"
_COMPOSED = "".join(f"{{0}}{second}" for second in _SECOND)
"""A character before those that NFC composes with the one before them in Unicode 17, but not in Unicode 9."""

_AROUND = ("{}", " {} ", "a{}b", "{0}{0}", "\n{}\n", "  {}", "{}.")
"""An added token alone and among others: it may be a word only if it is one, and take the spaces around it."""


_END = 1 << 12
"""Bytes of a batch of text that decide which part of it is compared."""


class Differs(Exception):
    """The fast tokenizer gives other tokens than the model's own; the message states where."""


def encode(tokenizer: Tokenizer, strings: Sequence[str]) -> list[NDArray[Any]]:
    """The ids of each string's tokens, (n,)."""
    # `fast` leaves out the offsets, and special tokens would be put into the middle of the stream.
    encodings = tokenizer.encode_batch_fast(strings, add_special_tokens=False)
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]


class Comparison:
    """The model's own tokenizer and the fast one, and a pair that shows where these may differ."""

    def __init__(self, own: Tokenizer, content: bytes) -> None:
        """Load the others, and compare how `TEXTS` are divided into words.

        Args:
            own: Of the model.
            content: Its `tokenizer.json`.

        Raises:
            Differs: it gives other words.
            Failed: the fast one cannot be used.
        """
        self.differing: set[str] = set()
        """Characters. A regular expression would need a microsecond for each character of a text."""
        words = vocabulary.words(content)
        self.fast = FastTokenizer(vocabulary.complete_bytes(content))
        self._own = own
        self._words = Tokenizer.from_buffer(words), FastTokenizer(words)
        self._probes = (_AMONG, _COMPOSED) if own.normalizer else (_AMONG,)
        self._check(*self._words, TEXTS, "words")

    def characters(self, characters: Sequence[str]) -> NDArray[np.bool_]:
        """Which characters, and from now on all text with them, are left to the model's own tokenizer, (n,)."""
        result = np.zeros(len(characters), np.bool_)
        for own, fast, probes in ((self._own, self.fast, ("{0}", "a{0}{0}b")), (*self._words, self._probes)):
            for probe in probes:
                result |= _differ(own, fast, [probe.format(character) for character in characters])
        self.differing.update(character for character, differs in zip(characters, result, strict=True) if differs)
        return result

    def differs(self, text: str) -> bool:
        """Whether a text is left to the model's own tokenizer."""
        return not self.differing.isdisjoint(text)

    def encode(self, strings: Sequence[str], has_differing: bool) -> list[NDArray[Any]]:
        """The ids of each string's tokens, (n,); `has_differing`: one of them has a character that differs."""
        if not has_differing:
            return self.fast.encode(strings)
        return [(encode(self._own, [each]) if self.differs(each) else self.fast.encode([each]))[0] for each in strings]

    def check_sample(self, text: bytes, size: int) -> None:
        """Raise Differs if the tokens of about `size` bytes of a text differ; which ones depends on the text alone."""
        start = _border(text, zlib.crc32(text[-_END:]) % max(1, len(text) - size))
        sample = str(text[start : _border(text, start + size)], "utf-8")
        if not self.differs(sample):
            self.check(sample)

    def check(self, text: str) -> None:
        """Raise Differs if the tokens of a text differ."""
        self._check(self._own, self.fast, [text], "tokens")

    def check_all(self, added: Iterable[str], choosy: Collection[str]) -> None:
        """Raise Differs if the tokens of `TEXTS` differ, or those of text around added tokens.

        Args:
            added: The added tokens, as they are spelled.
            choosy: Those of them for which it matters what is beside them.
        """
        added = [*added]
        around = [around.format(token) for token in added for around in _AROUND]
        around += [f"a {pair}" for one in choosy for other in added for pair in (one + other, other + one)]
        self._check(self._own, self.fast, [*filter(self.differing.isdisjoint, (*TEXTS, *around))], "tokens")

    def _check(self, own: Tokenizer, fast: FastTokenizer, texts: Sequence[str], what: str) -> None:
        if (differ := _differ(own, fast, texts)).any():
            raise Differs(f"it gives other {what} for the text {texts[int(differ.argmax())][:50]!r}...")


def _differ(own: Tokenizer, fast: FastTokenizer, strings: Sequence[str]) -> NDArray[np.bool_]:
    """For which strings the two give different ids, or one of them none, (n,)."""
    try:
        pairs = zip(fast.encode(strings), encode(own, strings), strict=True)
    except Exception as error:
        if type(error) not in (Failed, Exception):  # the latter is what `tokenizers` raises
            raise
        if len(strings) == 1:
            return np.array([True])
        return np.concatenate([_differ(own, fast, [string]) for string in strings])
    return np.array([not np.array_equal(*pair) for pair in pairs], np.bool_)


def _border(text: bytes, index: int) -> int:
    """The last byte up to `index` that begins a character, or the end."""
    if index >= len(text):
        return len(text)
    while text[index] & 0xC0 == 0x80:  # UTF-8: 10xxxxxx continues a character
        index -= 1
    return index
