"""Turn the text into rows of tokens for the model, a part of them held out for validation.

Reads    data/corpus/, data/model.json and the model's tokenizer.json
Writes   data/tokens/train, data/tokens/validation: Hugging Face datasets, `input_ids` of seq_length tokens a row
         data/pack.json: documents, tokens, rows, characters a token, the share of unknown tokens
Command  python -m stages.pack
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from tqdm import tqdm

from stages.artifacts import command, params, publish
from stages.artifacts.command import StageError
from stages.corpus import workers

if TYPE_CHECKING:
    from stages.corpus.packing import Coding, Encoded, RowWriter

CORPUS = Path("data/corpus")
TOKENS = Path("data/tokens")
METRICS = Path("data/pack.json")

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class PackParams:
    """What decides the rows."""

    seq_length: Annotated[int, Field(ge=2)]
    """Tokens a row."""
    validation_splits: Annotated[int, Field(ge=0)]
    """Splits, the last ones, that are held out of training as a whole."""


@dataclass(frozen=True)
class PackRuntime(workers.Runtime):
    """What changes no result."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    print(pack(params.load(PackParams), params.load(PackRuntime, "runtime")))


def pack(options: PackParams, runtime: PackRuntime) -> str:
    """Write the rows and the metrics; return a line that says how many there are.

    A document is a row of the corpus. Documents are encoded one by one, ended by the model's EOS token, and joined in
    the order of the corpus into one stream for training and one for validation; each stream is cut into rows and
    only its last, partial row is dropped.

    Raises:
        StageError: the parameters do not fit the model or the corpus, or there are too few tokens for a row.
    """
    from stages.corpus import arrow, packing

    coding = find_coding(options)
    shards = arrow.read_shards(CORPUS)
    if not any(shard.rows for shard in shards):
        raise StageError(f"{CORPUS} holds no text: put files with text into raw_dir, or lower min_chars")
    if options.validation_splits >= len(shards):
        raise StageError(
            f"validation_splits is {options.validation_splits} of num_splits = {len(shards)} splits, which leaves none "
            "to train on: lower it"
        )
    num_train = len(shards) - options.validation_splits
    parts = {"train": shards[:num_train], "validation": shards[num_train:]}
    tasks = {
        name: [
            packing.Task(CORPUS / shard.filename, offset, coding)
            for shard in part
            for offset in arrow.batch_offsets(CORPUS / shard.filename)
        ]
        for name, part in parts.items()
    }
    # A few batches ahead: enough to keep all workers busy, few enough for the memory of this process.
    encoded = workers.ordered_map(packing.encode, [*tasks["train"], *tasks["validation"]], runtime, ahead=3)
    features = arrow.token_features(options.seq_length)
    metrics = {}
    with ExitStack() as stack:
        progress = stack.enter_context(
            tqdm(total=sum(shard.rows for shard in shards), desc="pack", unit="document", disable=None)
        )
        for name, part in tasks.items():
            directory = stack.enter_context(publish.directory(TOKENS / name))
            stream = stack.enter_context(arrow.StreamWriter(directory / arrow.shard_name(0, 1), features))
            writer = packing.RowWriter(stream, options.seq_length)
            metrics[name] = write(islice(encoded, len(part)), writer, progress)
            shard = writer.close()
            metrics[name]["rows"] = shard.rows
            arrow.write_metadata(directory, features, [shard])
            if shard.rows == 0 and parts[name]:
                raise StageError(too_few(name, writer.num_tokens, options))
        publish.write_json(METRICS, metrics)
    train, validation = metrics["train"], metrics["validation"]
    return (
        f"pack: {train['rows']} rows to train on and {validation['rows']} to validate, of {options.seq_length} tokens; "
        f"{train['characters_per_token']} characters a token"
    )


def find_coding(options: PackParams) -> "Coding":
    """The model's tokenizer, checked against the manifest and the parameters."""
    import json

    from stages.corpus.packing import Coding
    from stages.model import manifest

    model = manifest.read()
    if model.eos_token_id is None:
        raise StageError(
            f"{model.model_name} has no EOS token, which must end each document: set eos_token_id in its config.json"
        )
    if model.max_seq_length is not None and options.seq_length > model.max_seq_length:
        raise StageError(
            f"seq_length is {options.seq_length}, {model.model_name} takes at most {model.max_seq_length}: lower it"
        )
    if TOKENIZER not in model.files:
        raise StageError(
            f"{model.model_name} has no {TOKENIZER}: load its tokenizer with transformers' AutoTokenizer and "
            "save it beside the model with save_pretrained"
        )
    path = manifest.verify(model, [TOKENIZER]) / TOKENIZER
    content = json.loads(path.read_bytes())
    inner, vocab = content["model"], content["model"]["vocab"]  # a list of tokens, or ids by token
    ids = {
        *(range(len(vocab)) if isinstance(vocab, list) else vocab.values()),
        *(t["id"] for t in content["added_tokens"]),
    }
    if model.eos_token_id not in ids:
        raise StageError(f"{path} has no token {model.eos_token_id}, which {model.model_name} gives as its EOS token")
    unknown = inner["unk_id"] if isinstance(vocab, list) else vocab.get(inner.get("unk_token"))
    return Coding(path.resolve(), model.eos_token_id, unknown, model.vocab_size)


def write(encoded: "Iterator[Encoded]", writer: "RowWriter", progress: Any) -> dict[str, Any]:
    """Append all documents to the rows and return what was counted."""
    counts: Counter[str] = Counter()
    for batch in encoded:
        writer.add(batch.tokens)
        counts += Counter(documents=batch.documents, characters=batch.characters, unknown=batch.unknown)
        progress.update(batch.documents)
    of_text = writer.num_tokens - counts["documents"]  # the others are EOS
    return {
        "documents": counts["documents"],
        "characters": counts["characters"],
        "tokens": writer.num_tokens,
        "characters_per_token": round(counts["characters"] / of_text, 4) if of_text else None,
        "unknown_share": round(counts["unknown"] / of_text, 6) if of_text else None,
    }


def too_few(name: str, num_tokens: int, options: PackParams) -> str:
    """The error message for a part without a single row."""
    message = f"{name} has {num_tokens} tokens, too few for one row of seq_length {options.seq_length}: "
    if name == "validation":
        return (
            message + f"lower seq_length, raise validation_splits (now {options.validation_splits}), or add raw files"
        )
    return message + "lower seq_length, or add raw files"


if __name__ == "__main__":
    command.run(main)
