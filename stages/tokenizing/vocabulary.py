"""What is in a `tokenizer.json`, and the same tokenizer with special tokens that no text can spell.

A tokenizer looks for the pieces of a text among all its tokens. Unigram and word models thus find `</s>` or `[CLS]` in
any text that spells it, or that a normalizer turns into it, and no setting prevents that. So the special tokens are
renamed before the tokenizer is loaded: they keep their ids, and their new names occur in no text.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of tokenizer_config.json."""

_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = [
    chr(byte if byte in _VISIBLE else 0x100 + byte - sum(visible < byte for visible in _VISIBLE)) for byte in range(256)
]
"""The character for each byte in vocabularies of bytes, as in GPT-2."""

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_SPLIT_BYTE_TOKENS = {
    "type": "Split",
    "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"},
    "behavior": "Isolated",
    "invert": False,
}
"""A pre-tokenizer that makes the first character of a text like `<0x0A>` a word of its own."""


class Vocabulary(NamedTuple):
    """The tokens of a `tokenizer.json`."""

    token_ids: frozenset[int]
    unk_token_id: int | None
    """Replaces what the vocabulary cannot express."""
    special_tokens: frozenset[str]


def read(path: Path, config: dict[str, Any], eos_token_id: int) -> Vocabulary:
    """Read the vocabulary of a tokenizer.

    Args:
        path: A `tokenizer.json`.
        config: Tokens by the names of their roles; other keys are ignored.
        eos_token_id: Of a token that is special, even if both files have it as an ordinary one.
    """
    content, model = _parse(path.read_bytes())
    added = content["added_tokens"]
    tokens = _tokens(model) | {token["id"]: token["content"] for token in added}
    unk_token_id = _unk_token_id(model)
    special = {token["content"] for token in added if token["special"]}
    special |= {tokens[token_id] for token_id in (eos_token_id, unk_token_id) if token_id in tokens}
    special |= {*_template_tokens(content["post_processor"])}
    roles = [config.get(role) for role in ROLES]
    special |= {role["content"] if isinstance(role, dict) else role for role in roles if role}
    return Vocabulary(frozenset(tokens), unk_token_id, frozenset(special & {*tokens.values()}))


def rename(path: Path, special_tokens: Iterable[str]) -> tuple[bytes, dict[str, str]]:
    """The content of a `tokenizer.json` that gives no special token for a text, and for all other text what it gave.

    Returns:
        The content, and the new name of each special token that has one.
    """
    content, model = _parse(path.read_bytes())
    byte_fallback = model.get("byte_fallback", False)
    # Where nothing replaces an unknown character, a token of one character stays: nothing else could express it.
    min_chars = 2 if _unk_token_id(model) is None and not byte_fallback else 1
    secret = secrets.token_hex(16)  # another one in each process, so that nobody can write a text with it
    names = {
        token: f"\uffff{secret}-{index}"
        for index, token in enumerate(special_tokens)
        if len(token) >= min_chars and not (byte_fallback and _BYTE_TOKEN.fullmatch(token))
    }
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], list):
        model["vocab"] = [(names.get(token, token), score) for token, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "dropout" in model:  # it would divide words at random
        model["dropout"] = None
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        decoded = msgspec.json.decode(model["merges"])
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in decoded]  # older files have "a b"
        model["merges"] = [(a, b) for a, b in merges if names.keys().isdisjoint((a, b, a + b[len(prefix) :]))]
    # These two look up words, so `<0x0A>` in a text would become a line end. Its name is needed: the text is divided.
    if byte_fallback and (isinstance(model["vocab"], list) or model.get("ignore_merges")):
        steps = [step for step in (content["pre_tokenizer"], _SPLIT_BYTE_TOKENS) if step]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return msgspec.json.encode(content | {"model": model}), names


def complete_bytes(content: bytes) -> bytes:
    """The content of a `tokenizer.json` with a token for each byte, if it is one of bytes.

    Some vocabularies lack bytes that their training text lacked (SmolLM2 has no 0x04). tokenizers drops them, and its
    version 1.0 refuses the vocabulary. The new tokens have ids beyond all others.
    """
    parsed, model = _parse(content)
    if not any(step["type"] == "ByteLevel" for step in _steps(parsed["pre_tokenizer"])) or model.get("type") != "BPE":
        return content
    vocab = model["vocab"]
    first = max([*vocab.values(), *(token["id"] for token in parsed["added_tokens"])]) + 1
    missing = sorted({*_BYTES} - vocab.keys())
    model["vocab"] = vocab | {character: first + index for index, character in enumerate(missing)}
    return msgspec.json.encode(parsed | {"model": model}) if missing else content


def words(content: bytes) -> bytes:
    """The content of a `tokenizer.json` with the normalizer and the pre-tokenizer of another, and tokens of bytes.

    Its tokens show the normalized text and where words begin: where two versions normalize or divide text differently,
    the ids of these differ, whatever the vocabulary of the other one hides.
    """
    parsed, _ = _parse(content)
    # Metaspace looks at spaces only, and tokenizers 1.0 has no other step beside it.
    steps = [step for step in _steps(parsed["pre_tokenizer"]) if step["type"] != "Metaspace"]
    if not any(step["type"] == "ByteLevel" for step in steps):
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    # Two characters side by side become one token if they are in one word.
    near = [_BYTES[byte] for byte in b" \n'.abAB12"]
    ascii, middle, first = _BYTES[:0x80], _BYTES[0x80:0xC0], _BYTES[0xC2:0xF5]  # of characters in UTF-8
    merges = [*product(near, ascii + first), *product(ascii + middle, near), *product(middle, first)]
    tokens = dict.fromkeys([*_BYTES, *map("".join, merges)])
    return msgspec.json.encode(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": parsed["normalizer"],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if steps[1:] else steps[0],
            **dict.fromkeys(("truncation", "padding", "post_processor", "decoder")),
            "model": {
                "type": "BPE",
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": [*dict.fromkeys(merges)],
            },
        }
    )


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not pre_tokenizer:
        return []
    parts = pre_tokenizer.get("pretokenizers")
    return [step for part in parts for step in _steps(part)] if parts else [pre_tokenizer]


def _parse(file: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a `tokenizer.json`, without its model, and the model."""
    raw = msgspec.json.decode(file, type=dict[str, msgspec.Raw])
    raw_model = msgspec.json.decode(raw.pop("model"), type=dict[str, msgspec.Raw])
    # Scores stay the bytes that they are: reading and writing them again might change the last digit.
    vocab = msgspec.json.decode(raw_model.pop("vocab"), type=dict[str, int] | list[tuple[str, msgspec.Raw]])
    defaults: dict[str, Any] = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    content = defaults | {key: msgspec.json.decode(value) for key, value in raw.items()}
    # Merges stay JSON, too, as few need them: they would be as many small lists as there are tokens.
    model = {key: value if key == "merges" else msgspec.json.decode(value) for key, value in raw_model.items()}
    return content, model | {"vocab": vocab}


def _tokens(model: dict[str, Any]) -> dict[int, str]:
    if isinstance(model["vocab"], list):  # Unigram: pairs of a token and its score, in the order of their ids
        return {token_id: token for token_id, (token, _) in enumerate(model["vocab"])}
    return {token_id: token for token, token_id in model["vocab"].items()}


def _unk_token_id(model: dict[str, Any]) -> int | None:
    is_unigram = isinstance(model["vocab"], list)
    unk_token_id: int | None = model.get("unk_id") if is_unigram else model["vocab"].get(model.get("unk_token"))
    return unk_token_id


def _template_tokens(processor: dict[str, Any] | None) -> Iterator[str]:
    """The tokens that a post-processor puts around a text."""
    match processor:
        case {"type": "Sequence", "processors": processors}:
            for step in processors:
                yield from _template_tokens(step)
        case {"type": "TemplateProcessing", "special_tokens": tokens}:
            for token in tokens.values():
                yield from token["tokens"]
        case {"type": "BertProcessing" | "RobertaProcessing", "sep": [sep, _], "cls": [cls, _]}:
            yield from (sep, cls)
