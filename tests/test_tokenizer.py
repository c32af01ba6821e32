"""The tokens of the training are those that `AutoTokenizer` gives with the model before and after it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from stages.base.errors import StageError
from stages.base.files import FileEntry
from stages.base.publish import read_json, write_json, write_text
from stages.model.manifest import TOKENIZER, ModelManifest
from stages.model.tokenizer import check_exported, compared_with_file, find_start, load
from stages.tokenizing.comparison import Differs
from stages.tokenizing.encoding import Encoder
from stages.tokenizing.specs import find_tokenizer_spec
from tests.byte_model import make_model
from tests.kinds import make, prose

pytestmark = pytest.mark.usefixtures("empty_project")

TEXTS = ["123 45", "  two spaces, Ünïcode", "\n I'll <extra> be <extra>.\t\n", *(prose(seed, 50) for seed in range(3))]
FAMILIES = {
    "qwen2": ("BPE of bytes, pattern", "Qwen2Tokenizer"),  # whose own pattern takes one digit at a time
    "llama": ("BPE, byte fallback", "LlamaTokenizer"),
    "gemma": ("BPE, byte fallback", "GemmaTokenizer"),
    "gpt2": ("BPE of bytes, digits", "GPT2Tokenizer"),
    "gpt_neox": ("BPE of bytes, prefix", "GPTNeoXTokenizer"),
    "mistral": ("BPE, unknown", "LlamaTokenizerFast"),
    "phi": ("BPE of bytes, added tokens", "CodeGenTokenizer"),
    "cohere": ("BPE of bytes", "CohereTokenizer"),
    "phi3": ("Unigram, NFKC", "T5Tokenizer"),
    "olmo": ("WordPiece, BERT", "BertTokenizer"),
    "granite": ("Unigram", "PreTrainedTokenizerFast"),
}
"""By type of the model: the kind of its tokenizer.json, and the class in tokenizer_config.json."""


def write_model(family: str, kind: str, **tokenizer_config: Any) -> Path:
    """A model without weights; an added token is named in tokenizer_config.json alone."""
    directory = Path("model")
    directory.mkdir()
    tokenizer = make(kind)
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": family, "vocab_size": vocab_size + 8, "n_embd": 16, "n_layer": 2, "n_head": 2, **sizes}
    config |= {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    (directory / "config.json").write_text(json.dumps(config))
    added = {"content": "<extra>", "special": False}
    added |= dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    tokens = {"eos_token": "</s>", "unk_token": "<unk>", "added_tokens_decoder": {str(vocab_size): added}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens | tokenizer_config))
    return directory


def packed(text: str, is_fast: bool) -> list[int]:
    """The tokens that `pack` gives a document, without EOS."""
    encoder = Encoder(find_tokenizer_spec(ModelManifest.read(), 64, is_fast))
    ids = [token for piece in encoder.encode(pa.array([text])) for token in piece.tokens.tolist()]
    assert ids.pop() == 0
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_encodes_as_it_was_trained(family: str) -> None:
    kind, name = FAMILIES[family]
    directory = write_model(family, kind, tokenizer_class=name)
    download_model(directory)
    loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    start = [loaded.convert_tokens_to_ids("[CLS]")] * (name == "BertTokenizer")
    expected = [start + loaded(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in TEXTS]
    for is_fast in (False, True):
        try:
            assert [packed(text, is_fast) for text in TEXTS] == expected
        except Differs:  # the fast one then encodes nothing
            assert is_fast


def test_a_document_has_the_tokens_that_users_of_the_model_give_it() -> None:
    """With BOS where the tokenizer adds it, and EOS."""
    directory = write_model("llama", "BPE of bytes")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    tokenizer.save(str(directory / "tokenizer.json"))
    download_model(directory)
    loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    for text in TEXTS:
        assert [*packed(text, is_fast=False), 0] == loaded(text, split_special_tokens=True).input_ids


def test_what_tokenizer_json_alone_gives_is_said() -> None:
    directory = write_model("qwen2", "BPE of bytes, pattern", tokenizer_class="Qwen2Tokenizer")
    sentence = compared_with_file(load(directory), directory)
    assert re.fullmatch(
        r"pack encodes as AutoTokenizer \(Qwen2Tokenizer\) does; tokenizer.json alone gives other tokens, as for "
        r"'The 1 12 123 .*': do not use the trained model with programs that read only that file",
        sentence or "",
    )


def test_an_export_that_encodes_in_another_way_is_refused() -> None:
    directory = write_model("qwen2", "BPE of bytes, pattern", tokenizer_class="Qwen2Tokenizer")
    download_model(directory)
    manifest = ModelManifest.read()
    check_exported(directory, manifest)
    TOKENIZER.write_text(json.dumps(json.loads(TOKENIZER.read_text()), indent=1))  # the same, written in another way
    manifest = dataclasses.replace(manifest, tokenizer=FileEntry.of(TOKENIZER))
    check_exported(directory, manifest)
    write_json(directory / "config.json", {**read_json(directory / "config.json"), "model_type": "llama"})
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    with pytest.raises(StageError, match=r"the exported model would encode 'The 1 12 .* with other tokens than it was"):
        check_exported(directory, manifest)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, {}),
        ("a", {"default": "a"}),
        (
            [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}],
            {"tools": "b", "default": "a"},
        ),
    ],
)
def test_all_chat_templates_are_found(template: Any, expected: dict[str, str]) -> None:
    directory = write_model("llama", "BPE of bytes", chat_template=template)
    found = load(directory)
    assert (found.chat_templates, found.special_tokens) == (expected, {"eos_token": "</s>", "unk_token": "<unk>"})
    write_text(directory / "chat_template.jinja", "c")
    assert load(directory).chat_templates == {"default": "c"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"chat_template": {"a": 1}}, "the chat template a is a int, not text: correct it in a copy"),
        ({"chat_template": [{"name": "../a", "template": "a"}]}, "'../a' is no name for a chat template: correct it"),
        ({"chat_template": [{"name": "default"}]}, "the tokenizer cannot be loaded: .*'template'"),
        ({"bos_token": ["a"]}, "the tokenizer cannot be loaded: "),
    ],
)
def test_a_tokenizer_config_of_other_types_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(StageError, match=problem):
        load(write_model("llama", "BPE of bytes", **config))


@pytest.mark.parametrize(
    ("template", "eos", "start"),
    [
        ("$A", "</s>", []), ("<s> $A", "</s>", ["<s>"]), ("<s> $A </s>", "</s>", ["<s>"]), ("$A </s>", "</s>", []),
        ("<unk> <s> $A", None, ["<unk>", "<s>"]), ("</s> $A", "</s>", []),
    ],
)  # fmt: skip
def test_what_the_tokenizer_puts_before_a_text_is_known(template: str, eos: str | None, start: list[str]) -> None:
    tokenizer = make("BPE of bytes")
    ids = {token: tokenizer.token_to_id(token) for token in ("<s>", "</s>", "<unk>")}
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[*ids.items()])
    tokenizer.enable_padding(length=9)
    assert find_start(tokenizer, eos and ids[eos]) == [ids[token] for token in start]


def download_model(directory: Path) -> None:
    """Write the files of `download` that `pack` reads."""
    loaded = load(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    start = find_start(Tokenizer.from_str(loaded.content), loaded.eos_token_id)
    model = make_model(tokenizer, vocab_size=tokenizer.get_vocab_size() + 8, start_token_ids=start)
    dataclasses.replace(model, **loaded.fields()).write()
    write_text(TOKENIZER, loaded.content)
