"""Turn the text into rows of tokens for the model, a part of them held out for validation.

Reads    data/corpus/, data/model.json and the model's tokenizer.json
Writes   data/tokens/train, data/tokens/validation: Hugging Face datasets, `input_ids` of seq_length tokens a row
         data/pack.json: documents, tokens, rows, characters a token, the share of unknown tokens
Command  python -m stages.pack

A split whose text, tokenizer and code were met before is not encoded again (docs/data.md, "What is not done twice").
"""

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field
from tqdm import tqdm

from stages.artifacts import command, params, publish, reuse
from stages.artifacts.command import StageError
from stages.corpus import workers

if TYPE_CHECKING:
    from stages.corpus.arrow import Shard
    from stages.corpus.encoding import Coding

CORPUS = Path("data/corpus")
TOKENS = Path("data/tokens")
METRICS = Path("data/pack.json")

TOKENIZER = "tokenizer.json"
AHEAD = 100  # record batches a worker under way or done: one very long document keeps no worker waiting


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

    reuse_gib: Annotated[float, Field(ge=0)]
    """What results of earlier runs may take on the disk, in GiB, besides what outputs and DVC's cache hold anyway."""


class EncodedSplit(NamedTuple):
    """The tokens of a split."""

    path: Path
    """As `packing.encode` writes them."""
    counts: Counter[str]
    """Documents, characters, and tokens that stand for what the vocabulary cannot express."""
    is_reused: bool


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
    store = reuse.Store(reuse.root())
    features = arrow.token_features(options.seq_length)
    metrics = {}
    with ExitStack() as stack:
        directories = {name: stack.enter_context(publish.directory(TOKENS / name)) for name in ("train", "validation")}
        splits = encode_splits(shards, coding, directories["train"], store, runtime)
        num_train = len(shards) - options.validation_splits
        for name, part in (("train", splits[:num_train]), ("validation", splits[num_train:])):
            path = directories[name] / arrow.shard_name(0, 1)
            stream = stack.enter_context(arrow.StreamWriter(path, features))
            writer = packing.RowWriter(stream, options.seq_length)
            for split in part:
                writer.add_file(split.path, coding)
                split.path.unlink()
            shard = writer.close()
            arrow.write_metadata(directories[name], features, [shard])
            if shard.rows == 0 and part:
                raise StageError(too_few(name, writer.num_tokens, options))
            counts = sum((split.counts for split in part), Counter())
            metrics[name] = count(counts, writer.num_tokens, shard.rows)
        publish.write_json(METRICS, metrics)
    store.trim(int(runtime.reuse_gib * 2**30))
    train, validation = metrics["train"], metrics["validation"]
    return (
        f"pack: {train['rows']} rows to train on and {validation['rows']} to validate, of {options.seq_length} tokens; "
        f"{train['characters_per_token']} characters a token; "
        f"{sum(split.is_reused for split in splits)} of {len(splits)} splits reused"
    )


def encode_splits(
    shards: "Sequence[Shard]", coding: "Coding", directory: Path, store: reuse.Store, runtime: PackRuntime
) -> list[EncodedSplit]:
    """Lay a file of tokens for each split into the directory, from the store or encoded anew, and return them in order.

    The largest split begins first. A split is stored as soon as all of it is encoded.
    """
    from stages.corpus import arrow, packing

    code = reuse.digest_of_code("stages.pack")
    keys = [key(shard.sha256, coding, code) for shard in shards]
    files = [CORPUS / shard.filename for shard in shards]
    paths = [directory / f"split-{index}" for index in range(len(shards))]
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        found = list(threads.map(store.fetch, keys, paths))
    splits = {
        index: EncodedSplit(paths[index], Counter(counts), is_reused=True)
        for index, counts in enumerate(found)
        if counts is not None
    }
    missing = sorted({*range(len(shards))} - {*splits}, key=lambda index: -files[index].stat().st_size)
    tasks = {
        index: [
            packing.Task(files[index], offset, coding, directory / f"split-{index}-{offset}")
            for offset in arrow.batch_offsets(files[index])
        ]
        for index in missing
    }
    encoded = workers.ordered_map(packing.encode, [*chain.from_iterable(tasks.values())], runtime, AHEAD)
    num_documents = sum(shards[index].rows for index in missing)
    with tqdm(total=num_documents, desc="pack", unit="document", disable=None) as progress:
        for index, parts in tasks.items():
            counts: Counter[str] = Counter()
            for result in islice(encoded, len(parts)):
                counts.update(result._asdict())
                progress.update(result.documents)
            sha256 = packing.join([part.target for part in parts], paths[index])
            store.put(keys[index], paths[index], sha256, counts)
            splits[index] = EncodedSplit(paths[index], counts, is_reused=False)
    return [splits[index] for index in range(len(shards))]


def key(shard_digest: str, coding: "Coding", code: str) -> str:
    """The digest of all that decides the tokens of a split: its text, the tokenizer, the ids of the model, the code.

    How they are cut into rows is no part of it.
    """
    decisive = {name: value for name, value in coding._asdict().items() if name != "tokenizer"}
    return publish.sha256_json(["pack", shard_digest, decisive, code])


def find_coding(options: PackParams) -> "Coding":
    """The model's tokenizer, checked against the manifest and the parameters."""
    from stages.corpus.encoding import Coding
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
    return Coding(path.resolve(), model.files[TOKENIZER].sha256, model.eos_token_id, unknown, model.vocab_size)


def count(counts: Counter[str], num_tokens: int, num_rows: int) -> dict[str, Any]:
    """What `data/pack.json` says of a part."""
    of_text = num_tokens - counts["documents"]  # the others are EOS
    return {
        "documents": counts["documents"],
        "characters": counts["characters"],
        "tokens": num_tokens,
        "characters_per_token": round(counts["characters"] / of_text, 4) if of_text else None,
        "unknown_share": round(counts["unknown"] / of_text, 6) if of_text else None,
        "rows": num_rows,
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
