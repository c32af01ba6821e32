"""The fast tokenizer: the tokens are those of the model's own, or it is not used."""

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stages.base.errors import StageError
from stages.tokenizing import fast_tokenizer
from stages.tokenizing.comparison import Comparison, Differs
from stages.tokenizing.encoding import EncodedBatch, Encoder, EncoderLimits
from stages.tokenizing.fast_tokenizer import Failed, FastTokenizer
from tests.kinds import KINDS, MORE_KINDS, SPECIAL, SPELLINGS, make, prose, spec_of
from tests.project import REPO

pytestmark = pytest.mark.usefixtures("empty_project")

SMALL = EncoderLimits(batch=3000, sample=200)
QUICK = ["BPE of bytes, some missing", "BPE of bytes, added tokens", "Unigram, NFKC", "WordPiece, BERT"]
NOT_FAST = {
    "BPE of bytes, other added tokens": "other tokens for the text",
    "BPE of bytes, prefix": "cannot use .*add_prefix_space",
    # It knows only the patterns of widespread models, and not the one that keeps `<0x0A>` in a text from being a byte.
    "BPE of bytes, other pattern": "gives other words",
    "BPE, byte fallback, entire words": "gives other words",
    "Unigram, byte fallback": "does not support a `Metaspace`",
}
"""For which kinds it is not used, and why."""


def encoders(kind: str) -> tuple[Encoder, Encoder]:
    """Two that encode all with the model's own tokenizer, and as much as possible with the fast one."""
    slow, fast = (Encoder(spec_of(make(kind), is_fast=is_fast), SMALL) for is_fast in (False, True))
    return slow, fast


def batches_of(encoder: Encoder, *documents: str) -> list[EncodedBatch]:
    return [*encoder.encode(pa.array(documents))]


def tokens_of(encoder: Encoder, *documents: str) -> list[int]:
    return [token for batch in batches_of(encoder, *documents) for token in batch.tokens.tolist()]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in (*KINDS, *MORE_KINDS)],
)
def test_the_tokens_are_those_of_the_model_s_own_tokenizer(kind: str) -> None:
    if kind in NOT_FAST:
        with pytest.raises(Differs, match=NOT_FAST[kind]):
            encoders(kind)
        return
    slow, fast = encoders(kind)
    # Characters from all of Unicode, side by side and between spaces; surrogates are not text.
    codes = [code for code in range(0, 0x110000, 499) if not 0xD800 <= code < 0xE000]
    blocks = ["".join(map(chr, codes[start : start + 64])) for start in range(0, len(codes), 64)]
    documents = [
        *(prose(seed, 400) for seed in range(5)),
        *(spell(token) for token in [*SPECIAL, "<l>", " <r> ", "word", "<0x0A>"] for spell in SPELLINGS),
        *(character * count for character in (" ", "a", "\n", "é", "1 ", "\t\n") for count in (1, 2, 3, 17, 1000)),
        *blocks,
        *map(" ".join, blocks),
        "",
    ]
    assert tokens_of(fast, *documents) == tokens_of(slow, *documents)
    if kind.endswith("missing"):
        assert sum(batch.num_slow for batch in batches_of(fast, "a\x04b")) == 3
    batches = batches_of(fast, *(prose(seed, 400) for seed in range(5)))
    assert not any(batch.num_slow for batch in batches)


NORMALIZED = (
    "\u0345\u1ad2", "\u1ad2\u0dca", "\u0d3b\u0301", "\u0897\u0334",  # of another combining class in Unicode 17
    "\U000105d2\u0307", "\U00011382\U000113c9", "\U00011384\U000113bb", "\U0001138b\U000113c2",
    "\U000113c2\U000113b8", "\U00011935\U00011930", "\U0001611e\U0001611e\U0001611f",
    "\U00016129\U0001611f", "\U0001611e\U00016120", "\U0001611e\U00016129", "\U00016d63\U00016d67",
)  # fmt: skip
"""Differently since Unicode 9."""
DIVIDED = ("'\u017faid", "K'\u017faid", "the Prince'\u017f hou\u017fe", "\U0001e6f1\U0002fa0e")
"""Differently, whether or not a vocabulary shows it: the long s, and a letter of Unicode 17."""


@pytest.mark.parametrize("kind", ["BPE of bytes, digits", "BPE of bytes, pattern", "Unigram, lower case"])
def test_what_versions_of_unicode_treat_differently_is_left_to_the_model_s_own(kind: str) -> None:
    slow, fast = encoders(kind)
    # The second kind normalizes nothing; the first has NFC, the third NFD and no accents.
    normalized = [f"the{text} of{text}" for text in NORMALIZED if not kind.endswith("pattern")]
    for document in (*normalized, *(DIVIDED if "BPE" in kind else ())):
        assert tokens_of(fast, document) == tokens_of(slow, document), document
        is_same = kind.endswith("digits") and "\u017f" in document
        if "BPE" in kind:  # accents are removed from the other one in any case
            found = sum(batch.num_slow for batch in batches_of(fast, document))
            assert found == (0 if is_same else len(document)), document


PIECE = (
    st.integers(0, 9).map(lambda seed: prose(seed, 150))
    | st.text(max_size=60)
    | st.builds(lambda piece, times: piece * times, st.text(min_size=1, max_size=4), st.integers(1, 300))
    | st.builds(lambda piece, times: piece * times, st.sampled_from([" ", "a", "\n", "th", "1"]), st.integers(1, 3000))
)


@pytest.mark.parametrize(
    "kind",
    [
        "BPE of bytes, pattern",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("BPE of bytes", "BPE, byte fallback", "Unigram, NFKC")
        ),
    ],
)
@settings(deadline=None, max_examples=10)
@given(st.lists(PIECE, min_size=1, max_size=12).map("".join))
def test_a_long_document_has_the_tokens_of_the_model_s_own_tokenizer(kind: str, text: str) -> None:
    _, fast = encoders(kind)
    at_once = Encoder(spec_of(make(kind)))
    assert tokens_of(fast, text) == tokens_of(at_once, text)


def test_text_that_cannot_be_encoded_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = encoders("BPE of bytes")

    def fail(self: FastTokenizer, strings: list[str]) -> list[NDArray[np.uint32]]:
        if any("the other" in string for string in strings):
            raise Failed("no reason")
        return encode(self, strings)

    encode = FastTokenizer.encode
    monkeypatch.setattr(FastTokenizer, "encode", fail)
    monkeypatch.setattr(Comparison, "check_sample", lambda self, text, size: 0)
    with pytest.raises(Differs, match="cannot encode all of the text: no reason"):
        tokens_of(fast, "the other tokens")


def test_text_near_a_character_that_differs_is_left_to_the_model_s_own_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FastTokenizer, "encode", of_another_unicode("語"))
    slow, fast = encoders("BPE of bytes")
    before, after = ("the other tokens " * count for count in (100, 300))
    documents = [before * 2, f"{after}語{after}", before * 3]
    assert tokens_of(fast, *documents) == tokens_of(slow, *documents)
    assert sum(batch.num_slow for batch in batches_of(fast, *documents)) == len(documents[1])
    assert sum(batch.num_slow for batch in batches_of(fast, documents[0])) == 0


def of_another_unicode(word: str) -> Callable[[FastTokenizer, list[str]], list[NDArray[np.uint32]]]:
    """`FastTokenizer.encode` with other tokens for strings that contain a word."""
    encode = FastTokenizer.encode

    def planted(self: FastTokenizer, strings: list[str]) -> list[NDArray[np.uint32]]:
        ids = encode(self, strings)
        return [each[::-1] if word in string else each for each, string in zip(ids, strings, strict=True)]

    return planted


def test_a_difference_in_a_sample_or_a_fixed_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = encoders("BPE of bytes")
    plain = FastTokenizer.encode

    def differ_at(word: str) -> None:
        monkeypatch.setattr(FastTokenizer, "encode", plain)
        monkeypatch.setattr(FastTokenizer, "encode", of_another_unicode(word))

    differ_at("HTTPServer")
    with pytest.raises(Differs, match="it gives other tokens for the text 'camelCase HTTPServer"):
        fast._comparison.check_all([], [])
    differ_at("tokens")
    with pytest.raises(Differs, match=r"it gives other tokens for the text '.+'"):
        tokens_of(fast, prose(0, 1000))
    differ_at("<|im_start|>")
    with pytest.raises(Differs, match=r"for the text '<\|im_start\|>'"):
        encoders("BPE of bytes")


def test_each_batch_is_sampled_at_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = encoders("BPE of bytes")
    samples: list[str] = []
    check = Comparison.check
    monkeypatch.setattr(Comparison, "check", lambda self, text: [samples.append(text), check(self, text)])
    texts = [prose(seed, 400) for seed in range(30)]
    tokens_of(fast, *texts)
    places = [
        text.find(sample) / len(text) for sample in samples for text in texts if len(sample) > 50 and sample in text
    ]
    assert min(places) < 0.2 < 0.7 < max(places)


def test_what_is_installed_is_what_the_lock_names() -> None:
    lock = (REPO / "requirements-encoder.lock").read_text()
    assert re.findall(r"^(\S+)==(\S+)", lock, re.M) == [("tokenizers", fast_tokenizer.VERSION)]
    assert fast_tokenizer._import(fast_tokenizer.DIRECTORY).__version__.replace("-rc.", "rc") == fast_tokenizer.VERSION


@pytest.mark.parametrize("is_there", [False, True])
def test_for_a_missing_or_damaged_fast_tokenizer_the_remedy_is_named(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        (tmp_path / "tokenizers").mkdir()
        (tmp_path / "tokenizers/__init__.py").write_text("from .tokenizers import (")
    monkeypatch.setattr(fast_tokenizer, "DIRECTORY", tmp_path)
    monkeypatch.setitem(sys.modules, "fast_tokenizers", ModuleType("fast_tokenizers"))  # to restore what is there
    with pytest.raises(
        StageError, match=r"is missing or damaged \(.*\): `python -m scripts.install_encoder`.*fast_encoder: false"
    ):
        fast_tokenizer.check_installed()


def test_no_file_is_left_if_a_worker_is_killed_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[list[Path]] = []
    call = fast_tokenizer._call

    def look(*args: Any) -> Any:
        files.append([*tmp_path.iterdir()])
        return call(*args)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fast_tokenizer, "_call", look)
    FastTokenizer(make("BPE of bytes").to_str().encode())
    assert files == [[]]


def test_a_panic_is_an_error() -> None:
    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("index out of bounds")

    with pytest.raises(fast_tokenizer.Failed, match="index out of bounds"):
        fast_tokenizer._call(panic)
    with pytest.raises(KeyboardInterrupt):
        fast_tokenizer._call(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
