"""A model that is only a tokenizer, of bytes."""

import dataclasses
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stages.base.files import FileEntry
from stages.base.publish import write_text
from stages.model.manifest import TOKENIZER, ModelManifest

EOS, SPELLING = 0, "<|endoftext|>"
BOS, BOS_SPELLING = 1, "<|begin|>"


def byte_tokenizer() -> Tokenizer:
    """EOS and BOS, a token for each byte, and a few merges that cross the borders between words and lines."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ċ", "Ċ")]
    tokens = [SPELLING, BOS_SPELLING, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPELLING, BOS_SPELLING])
    return tokenizer


def make_model(tokenizer: Tokenizer | None = None, **changes: Any) -> ModelManifest:
    """A model that is only a tokenizer, and its manifest."""
    directory = Path("model")
    directory.mkdir(exist_ok=True)
    path = directory / "tokenizer.json"
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.save(str(path))
    model = ModelManifest(
        model_name=str(directory), model_revision="main", commit=None, architecture="", model_type="", dtype="float32",
        num_parameters=0, files={"tokenizer.json": FileEntry.of(path)},
        weights=[], tied_weights={}, layer_classes=[], module_classes=[], router_loss_coef=None,
        vocab_size=tokenizer.get_vocab_size(), max_seq_length=None,
        eos_token_id=EOS, start_token_ids=[],
        tokenizer=FileEntry.of_text(tokenizer.to_str()),
    )  # fmt: skip
    model = dataclasses.replace(model, **changes)
    write_text(TOKENIZER, tokenizer.to_str())
    model.write()
    return model
