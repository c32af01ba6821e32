"""Make `models/tiny-llama`: a tokenizer trained on the sample corpus, and the config of a small Llama. No weights.

    python -m models.make_tiny_llama

The result is committed, so that every machine has the same vocabulary. Run it again only to change the model: the
corpus describes the installed packages, so another environment gives another vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from scripts import sample_corpus

DIRECTORY = Path(__file__).parent / "tiny-llama"
VOCAB_SIZE = 4096
EOS = "<|endoftext|>"
SEQ_LENGTH = 1024


def main() -> None:
    """Write the directory and print the size of the vocabulary."""
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(DIRECTORY)
    config = make_config(tokenizer)
    config.save_pretrained(DIRECTORY)
    GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(DIRECTORY)
    text = "".join(texts())
    tokens = len(tokenizer(text, verbose=False)["input_ids"])
    print(f"{DIRECTORY.name}: {len(tokenizer)} tokens in the vocabulary, {len(text) / tokens:.2f} characters a token")


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: any text can be encoded, and decodes to the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=SEQ_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Small enough for two CPU cores, with features of larger models: grouped-query attention, tied weights."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,  # its embedding would not be trained, and this token ends the documents
        dtype="float32",
    )


def texts() -> Iterator[str]:
    """Every string of the sample corpus, in order."""
    yield from (text for _, text in sample_corpus.topics())
    for _, value in [*sample_corpus.modules(), *sample_corpus.distributions()]:
        yield from strings(value)


def strings(value: Any) -> Iterator[str]:
    """Every string value in nested dicts and lists, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from strings(child)


if __name__ == "__main__":
    main()
