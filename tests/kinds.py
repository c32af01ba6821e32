"""Small tokenizers of all kinds, and text that is hard for them."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from stages.tokenizing import vocabulary
from stages.tokenizing.encoding import Encoder, TokenizerSpec

SPECIAL = ["</s>", "<s>", "<unk>", "<pad>", "[CLS]", "[MASK]", "<|im_start|>"]
EOS, UNK = 0, 2
WORDS = ["the", "other", "tokens", "s", "in", "a", "CLS", "[x]", "<tag>", "<0x0a>", "1234", "x=1", "über", "東京", "😀"]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""That of Llama 3."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def prose(seed: int, count: int) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice(WORDS) + chance.choice([" "] * 9 + ["\n", "  ", ", "]) for _ in range(count))


def make(kind: str) -> Tokenizer:
    """A small tokenizer of each of the kinds that a `tokenizer.json` can describe; a test may change it."""
    return Tokenizer.from_str(_trained(kind))


@cache
def _trained(kind: str) -> str:
    return train(kind, [prose(seed, 300) for seed in range(5)]).to_str()


def train(kind: str, texts: list[str], vocab_size: int | None = None) -> Tokenizer:
    """Train a tokenizer on texts; `vocab_size`: None for one that fits a few words."""
    options: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    alphabet = [*{*prose(0, 999), *"".join(SPECIAL)}]
    metaspace, words = pre_tokenizers.Metaspace(), pre_tokenizers.WhitespaceSplit()
    decoder: Any = decoders.Metaspace()
    unigram = trainers.UnigramTrainer(
        vocab_size=vocab_size or 120, unk_token="<unk>", initial_alphabet=alphabet, **options
    )
    normalizer: Any = None
    pre_tokenizer: Any
    match kind:
        case "BPE of bytes, added tokens" | "BPE of bytes, other added tokens":
            tokenizer = train("BPE of bytes", texts, vocab_size)
            tokenizer.add_tokens(
                [AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True), AddedToken("word", single_word=True),
                 AddedToken("tokens in", normalized=False)]
            )  # fmt: skip
            if "other" in kind:  # next to those
                tokenizer.add_tokens([AddedToken("é", normalized=True), "    "])
            return tokenizer
        case "BPE of bytes" | "BPE of bytes, entire words" | "BPE of bytes, some missing":
            model: Any = models.BPE(ignore_merges=kind.endswith("words"))
            if not kind.endswith("missing"):  # of a text without control characters
                options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
            pre_tokenizer, decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
            trainer: Any = trainers.BpeTrainer(vocab_size=vocab_size or 400, **options)
        case "BPE of bytes, prefix" | "BPE of bytes, digits" | "BPE of bytes, pattern" | "BPE of bytes, other pattern":
            model = models.BPE(ignore_merges="pattern" in kind)
            options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
            of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=kind.endswith("prefix"), use_regex="patt" not in kind)
            split = pre_tokenizers.Split(Regex(PATTERN if kind.endswith(", pattern") else "[a-z]+|[^a-z]"), "isolated")
            first: Any = pre_tokenizers.Digits(individual_digits=True) if kind.endswith("digits") else split
            pre_tokenizer = of_bytes if kind.endswith("prefix") else pre_tokenizers.Sequence([first, of_bytes])
            normalizer = normalizers.NFC() if kind.endswith("digits") else None
            decoder, trainer = decoders.ByteLevel(), trainers.BpeTrainer(vocab_size=vocab_size or 400, **options)
        case "BPE, unknown":
            model, pre_tokenizer = models.BPE(unk_token="<unk>"), metaspace
            trainer = trainers.BpeTrainer(vocab_size=vocab_size or 200, initial_alphabet=alphabet, **options)
        case "BPE, byte fallback" | "BPE, byte fallback, entire words":
            options["special_tokens"] = SPECIAL + BYTES
            model = models.BPE(byte_fallback=True, ignore_merges=kind != "BPE, byte fallback")
            normalizer = normalizers.Replace(" ", "▁")
            pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
            decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
            trainer = trainers.BpeTrainer(vocab_size=vocab_size or 400, **options)
        case "Unigram" | "Unigram, NFKC" | "Unigram, lower case":
            model, pre_tokenizer, trainer = models.Unigram(), metaspace, unigram
            lower_case = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
            normalizer = normalizers.NFKC() if "NFKC" in kind else lower_case if "lower" in kind else None
        case "Unigram, byte fallback":
            pieces = [(piece, -1.0) for piece in SPECIAL] + [(piece, 0.0) for piece in BYTES]
            pieces += [(piece, -2.0) for piece in ("▁", *"thesokn.<0xA>", "th", "▁th")]
            tokenizer = Tokenizer(models.Unigram(pieces, unk_id=UNK, byte_fallback=True))
            tokenizer.pre_tokenizer = metaspace
            tokenizer.add_special_tokens(SPECIAL)
            tokenizer.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
            return tokenizer
        case "WordPiece" | "WordPiece, BERT":
            model, pre_tokenizer, decoder = models.WordPiece(unk_token="<unk>"), words, decoders.WordPiece()
            if "BERT" in kind:
                normalizer = normalizers.BertNormalizer(lowercase=True)
                pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            trainer = trainers.WordPieceTrainer(vocab_size=vocab_size or 200, initial_alphabet=alphabet, **options)
        case _:
            model, pre_tokenizer, trainer = (
                models.WordLevel(unk_token="<unk>"),
                words,
                trainers.WordLevelTrainer(**options),
            )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre_tokenizer, decoder
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


KINDS = [
    "BPE of bytes", "BPE of bytes, entire words", "BPE, unknown", "BPE, byte fallback",
    "BPE, byte fallback, entire words", "Unigram", "Unigram, NFKC", "Unigram, byte fallback",
    "WordPiece", "WordPiece, BERT", "WordLevel",
]  # fmt: skip

MORE_KINDS = [
    "BPE of bytes, prefix", "BPE of bytes, digits", "BPE of bytes, pattern", "BPE of bytes, other pattern",
    "BPE of bytes, some missing", "BPE of bytes, added tokens", "BPE of bytes, other added tokens",
    "Unigram, lower case",
]  # fmt: skip
"""For tests that compare tokenizers and decode nothing."""

FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
SPELLINGS: list[Callable[[str], str]] = [
    lambda token: token,
    lambda token: f"a{token}s in{token}",
    lambda token: token * 2,
    lambda token: f" {token} the {token}\n",
    lambda token: token.translate(FULL_WIDTH),
    lambda token: f"{token[0]}\u200b{token[1:]}",
    lambda token: f"\u200d{token}\ufe0f",
    lambda token: token.swapcase(),
    lambda token: f"{token[:-1]}{token}{token[-1]}",
    lambda token: f"tokens{token}in a " * 60,
]


def spec_of(tokenizer: Tokenizer, eos_token_id: int = EOS, is_fast: bool = False, **config: Any) -> TokenizerSpec:
    """How `pack` uses a tokenizer."""
    path = Path("tokenizer.json")
    tokenizer.save(str(path))
    found = vocabulary.read(path, config, eos_token_id)
    vocab_size = max(found.token_ids) + 1
    special_tokens = tuple(sorted(found.special_tokens))
    return TokenizerSpec(path, "", eos_token_id, found.unk_token_id, special_tokens, vocab_size, is_fast)


def encode(encoder: Encoder, *documents: str) -> list[list[int]]:
    """The ids of each document, without EOS."""
    ids = [token for piece in encoder.encode(pa.array(documents)) for token in piece.tokens.tolist()]
    ends = [index for index, token in enumerate(ids) if token == EOS]
    assert len(ends) == len(documents)
    return [ids[start + 1 : end] for start, end in zip([-1, *ends], ends, strict=False)]
