"""Long strings: encoded in windows, the tokens are those of the entire string."""

import random
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from stages.tokenizing import comparison, windows

WORDS = ["the", "of", "and", "to", "in", "is", "for", "tokens", "1234", "x=1", "über", "naïve", "東京", "😀"]
SPECIAL = ["<unk>", "</s>"]


def prose(seed: int, count: int) -> str:
    chance = random.Random(seed)
    spaces = [" "] * 20 + ["\n", "\n\n", "    ", "\t", ", ", ". "]
    return "".join(chance.choice(WORDS) + chance.choice(spaces) for _ in range(count))


@cache
def make(kind: str) -> Tokenizer:
    """A small tokenizer of each of the kinds that models come with."""
    bpe = {"special_tokens": SPECIAL, "show_progress": False, "max_token_length": 12}
    if kind == "bytes":  # GPT-2, SmolLM2
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **bpe)
    elif kind == "bytes, split":  # Llama 3
        tokenizer = Tokenizer(models.BPE())
        pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        split = pre_tokenizers.Split(pattern, "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **bpe)
    elif kind == "prepend":  # Llama 2: words are not split at all
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=200, **bpe)
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trainer = trainers.BpeTrainer(vocab_size=200, **bpe)
    elif kind == "unigram":  # T5, XLM-R; the normalizer changes lengths
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    else:  # BERT
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=20))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([prose(seed, 300).replace("東", "") for seed in range(5)], trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, size: int) -> list[NDArray[Any]]:
    is_bpe = isinstance(tokenizer.model, models.BPE)
    of_strings = partial(comparison.encode, tokenizer)
    return [*windows.encode(of_strings, memoryview(text.encode()), size, is_bpe)]


KINDS = ["bytes", "bytes, split", "prepend", "metaspace", "unigram", "words"]
PIECE = (
    st.integers(0, 9).map(lambda seed: prose(seed, 60))
    | st.text(max_size=60)
    | st.builds(lambda piece, times: piece * times, st.text(min_size=1, max_size=4), st.integers(1, 200))
    | st.builds(
        lambda piece, times: piece * times, st.sampled_from([" ", "a", "\n", "th", "é", "1"]), st.integers(1, 900)
    )
)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(st.lists(PIECE, min_size=1, max_size=8).map("".join), st.sampled_from([0, 1, 2, 3]))
@example(prose(1, 2000), 0)
def test_joined_windows_have_the_tokens_of_the_entire_string(kind: str, text: str, shift: int) -> None:
    try:
        pieces = encode(make(kind), text, 1600 + shift)
    except windows.NotJoined:
        return
    assert np.concatenate(pieces).tolist() == make(kind).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_prose_is_joined(kind: str) -> None:
    text = prose(7, 4000)
    pieces = encode(make(kind), text, 1600)
    assert len(pieces) > 10
    assert np.concatenate(pieces).tolist() == make(kind).encode(text, add_special_tokens=False).ids


def test_windows_that_divide_a_run_differently_are_not_joined() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "aa": 1}, [("a", "a")]))
    with pytest.raises(windows.NotJoined):  # one has pairs at even places, the other as many at odd ones
        encode(tokenizer, "a" * 1501, 808)


def test_a_word_longer_than_a_window_is_not_joined() -> None:
    """All ways to cut this one are equally good: rounding decides, which depends on all that precedes."""
    tokenizer = Tokenizer(models.Unigram([("?", -9.0), ("aa", -0.2), ("aaaa", -0.4)], unk_id=0))
    with pytest.raises(windows.NotJoined):
        encode(tokenizer, "a" * 420, 400)
