"""Text is text: whatever spells a special token is encoded as the characters that it consists of."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from stages.base.errors import StageError
from stages.tokenizing import vocabulary
from stages.tokenizing.encoding import Encoder, EncoderLimits
from tests.kinds import EOS, KINDS, SPECIAL, SPELLINGS, UNK, encode, make, prose, spec_of

SMALL = EncoderLimits(batch=400)


pytestmark = pytest.mark.usefixtures("empty_project")


@pytest.mark.parametrize("kind", KINDS)
def test_trap_25_no_text_gives_a_special_token(kind: str) -> None:
    """However a special token is spelled in a text, or made by a normalizer."""
    tokenizer = make(kind)
    encoder, small = Encoder(spec_of(tokenizer)), Encoder(spec_of(tokenizer), SMALL)
    special = {tokenizer.token_to_id(token) for token in SPECIAL} - {UNK}
    documents = [spell(token) for token in [*SPECIAL, "<0x0A>", "<0x73>"] for spell in SPELLINGS]
    encoded = encode(encoder, *documents)
    assert encode(small, *documents) == encoded
    for document, ids in zip(documents, encoded, strict=True):
        assert special.isdisjoint(ids), document
        if UNK not in ids:
            text = tokenizer.decode(ids, skip_special_tokens=False)
            assert without_spaces(text) == without_spaces(normalize(tokenizer, document))
            if kind not in ("WordPiece", "WordPiece, BERT", "WordLevel"):
                assert text.strip(" ") == normalize(tokenizer, document).strip(" ")


def normalize(tokenizer: Tokenizer, text: str) -> str:
    normalized: str = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return normalized.replace("▁", " ")


def without_spaces(text: str) -> str:
    return "".join(text.split())


def test_dropout_divides_no_word_at_random() -> None:
    tokenizer = make("BPE of bytes")
    expected = encode(Encoder(spec_of(tokenizer)), prose(0, 300))
    tokenizer.model.dropout = 0.5
    assert encode(Encoder(spec_of(tokenizer)), prose(0, 300)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_trap_25_other_text_has_the_tokens_that_the_file_gives_it(kind: str) -> None:
    tokenizer = make(kind)
    documents = [prose(seed, 99) for seed in range(5)]
    plain = [tokenizer.encode(document, add_special_tokens=False).ids for document in documents]
    assert encode(Encoder(spec_of(tokenizer)), *documents) == plain
    renamed, names = vocabulary.rename(Path("tokenizer.json"), SPECIAL)
    loaded = Tokenizer.from_buffer(renamed)
    assert [loaded.token_to_id(names[token]) for token in SPECIAL] == [*map(tokenizer.token_to_id, SPECIAL)]
    before, after = (json.loads(each.to_str()) for each in (Tokenizer.from_file("tokenizer.json"), loaded))
    assert loaded.get_vocab_size() == tokenizer.get_vocab_size()
    assert after["model"].get("merges") == before["model"].get("merges")
    if kind.startswith("Unigram"):
        assert [score for _, score in after["model"]["vocab"]] == [score for _, score in before["model"]["vocab"]]


@pytest.mark.parametrize(
    "source", ["flag", "role", "role with settings", "template", "BERT template", "EOS", "unknown"]
)
def test_trap_25_what_makes_a_token_special(source: str) -> None:
    tokens = ["</s>", "<x>", "?", *"<x>/s"]
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in dict.fromkeys(tokens)], unk_id=2))
    config: dict[str, Any] = {}
    eos_token_id = EOS
    match source:
        case "flag":
            tokenizer.add_special_tokens(["<x>"])
        case "role":
            config = {"mask_token": "<x>", "pad_token": None, "add_bos_token": True}
        case "role with settings":
            config = {"bos_token": {"content": "<x>", "lstrip": False}}
        case "template":
            template = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 1)])
            tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
        case "BERT template":
            tokenizer.post_processor = processors.BertProcessing(("</s>", 0), ("<x>", 1))
        case "EOS":
            tokenizer.add_tokens(["<x>"])  # not a special one
            eos_token_id = 1
        case _:
            tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in dict.fromkeys(tokens)], unk_id=1))
    spec = spec_of(tokenizer, eos_token_id, **config)
    assert "<x>" in spec.special_tokens
    [piece] = Encoder(spec).encode(pa.array(["<x>"]))
    assert [tokenizer.id_to_token(token) for token in piece.tokens.tolist()[:-1]] == ["<", "x", ">"]


def test_trap_25_added_tokens_that_are_not_special_stay_tokens() -> None:
    tokenizer = make("BPE of bytes")
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True)])
    text = "a <tool>s</s>"
    expected = [*tokenizer.encode("a").ids, tokenizer.token_to_id("<tool>")]
    [ids] = encode(Encoder(spec_of(tokenizer)), text)
    assert ids[: len(expected)] == expected
    assert tokenizer.decode(ids[len(expected) :]) == "s</s>"


def test_a_tokenizer_file_may_have_a_model_only() -> None:
    spec = spec_of(
        Tokenizer(models.Unigram([("</s>", 0.0), ("?", -9.0), *((char, -5.0) for char in "</s>")], unk_id=1))
    )
    spec.path.write_text(json.dumps({"model": json.loads(spec.path.read_text())["model"]}))
    assert vocabulary.read(spec.path, {}, EOS).special_tokens == {"</s>", "?"}
    assert encode(Encoder(spec), "</s>") == [[2, 3, 4, 5]]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("prefix", ["", "##"])
def test_trap_25_a_special_token_that_merges_would_give_is_not_merged(legacy: bool, prefix: str) -> None:
    tokens = ["<e>", "the", "t", f"{prefix}h", f"{prefix}e", f"{prefix}he", f"{prefix}n", "then"]
    merges = [(f"{prefix}h", f"{prefix}e"), ("t", f"{prefix}he"), ("the", f"{prefix}n")]
    model = models.BPE({token: index for index, token in enumerate(tokens)}, merges, continuing_subword_prefix=prefix)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["the"])
    spec = spec_of(tokenizer)
    if legacy:
        content = json.loads(spec.path.read_text())
        content["model"]["merges"] = [" ".join(pair) for pair in merges]
        spec.path.write_text(json.dumps(content))
    assert encode(Encoder(spec), "the", "then") == [[2, 5], [2, 5, 6]]


def of_bytes(*tokens: str) -> Tokenizer:
    """A tokenizer that has a token for some bytes only, and drops the others."""
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text", "problem"),
    [
        # The only way to write a line end, as no other token has that byte.
        (of_bytes("Ċ", "a"), "aaa\nb", "gives the special token 'Ċ'"),
        (Tokenizer(models.BPE({"</s>": 0, "a": 1}, [], unk_token="</s>")), "aaa\nb", "gives the special token '</s>'"),
        (Tokenizer(models.Unigram([("</s>", 0.0), ("a", -1.0)])), "aaa\nb", "`unk_id` is missing"),
        (Tokenizer(models.Unigram([("</s>", 0.0), ("a", -1.0)])), "aaa\n" * 200, "`unk_id` is missing"),
    ],
)
def test_trap_25_a_document_that_cannot_be_encoded_is_named(tokenizer: Tokenizer, text: str, problem: str) -> None:
    """With its beginning and the remedy."""
    encoder = Encoder(spec_of(tokenizer), SMALL)
    message = f"begins with .aaa.n.* {problem}.* Remove or change it in raw_dir, or give the model another tok"
    with pytest.raises(StageError, match=message):
        list(encoder.encode(pa.array(["a", text, "aa"])))


def test_trap_25_characters_that_leave_no_token_are_counted() -> None:
    """What the vocabulary lacks is in `data/pack.json`."""

    def count(tokenizer: Tokenizer, *documents: str) -> int:
        encoder = Encoder(spec_of(tokenizer), SMALL)
        array = pa.array(["\x01", *documents, "\x01"])
        return sum(piece.num_dropped for piece in encoder.encode(array.slice(1, len(documents))))

    text = "ab\x01\x01 é\n東 \x7f"
    for kind in KINDS:
        assert count(make(kind), prose(0, 999), *SPECIAL) == 0
        assert count(make(kind), text) == (3 if "BERT" in kind else 0)
    tokenizer = of_bytes("</s>", *"abĠĊæĿÃ")
    # Three control characters without a token, a letter without its second byte, another one without its last.
    assert count(tokenizer, text) == count(tokenizer, text, "aab") == 5
    assert count(tokenizer, *[text] * 100, text * 100) == 1000
    tokenizer.add_tokens(["é"])
    assert count(tokenizer, text) == 4
    assert count(Tokenizer(models.BPE({"</s>": 0, "a": 1, " ": 2}, [])), "a b\x01a\n") == 3
