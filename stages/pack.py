"""Turn the text into rows of tokens for the model, a part of them held out for validation.

Reads    data/corpus/, data/model.json and the model's tokenizer.json
Writes   data/tokens/train, data/tokens/validation: Hugging Face datasets, `input_ids` of seq_length tokens a row
         data/pack.json: documents, tokens, rows, characters per token, the share of unknown tokens
Command  python -m stages.pack

A split whose text, tokenizer and code are the same as in an earlier run is not encoded again (docs/data.md, "What is
not done twice").
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from stages.artifacts import code, command, publish, reuse
from stages.artifacts.dataset import Dataset, Shard
from stages.artifacts.errors import StageError
from stages.artifacts.model_files import TOKENIZER
from stages.artifacts.params_file import load_params
from stages.artifacts.record import Record
from stages.corpus import arrow, encoding, packing, progress, workers
from stages.model.manifest import ModelManifest
from stages.tokens.packed import TRAIN, VALIDATION

CORPUS = Path("data/corpus")
METRICS = Path("data/pack.json")

AHEAD = 100
"""Record batches per worker that are encoded before they are needed: no worker waits for one very long document."""


@dataclass(frozen=True)
class PackParams:
    """What decides the rows."""

    seq_length: Annotated[int, Field(ge=2)]
    """Tokens of a row."""
    validation_splits: Annotated[int, Field(ge=0)]
    """Splits, the last ones, that are held out of training."""


@dataclass(frozen=True)
class PackRuntime(workers.Runtime):
    """What changes no result."""

    reuse_gib: Annotated[float, Field(ge=0)]
    """Disk for results of earlier runs, in GiB, in addition to what outputs and DVC's cache occupy anyway."""


@dataclass(frozen=True)
class PartMetrics:
    """Of the documents for training, or of those for validation."""

    documents: int
    characters: int
    tokens: int
    """Including an EOS token for each document, and those of the partial row that is dropped."""
    characters_per_token: float | None
    """EOS tokens not counted; null: there is no text."""
    unknown_share: float | None
    """Of the tokens, EOS not counted, those that replace what the vocabulary cannot express; null: there is no text."""
    rows: int


@dataclass(frozen=True)
class PackMetrics(Record):
    """The content of `data/pack.json`."""

    STAGE: ClassVar[str] = "pack"

    train: PartMetrics
    validation: PartMetrics


class Split(NamedTuple):
    """A split of the corpus, and where its tokens belong."""

    shard: Path
    num_documents: int
    key: str
    """Of the tokens in the store."""
    tokens: Path
    """The file to write, in the form of `packing.encode`."""


class EncodedSplit(NamedTuple):
    """The tokens of a split."""

    tokens: Path
    """A file in the form of `packing.encode`."""
    counts: packing.Counts
    is_reused: bool


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    print(pack(load_params(PackParams), load_params(PackRuntime, "runtime")))


def pack(params: PackParams, runtime: PackRuntime, max_batch_tokens: int = packing.MAX_BATCH_TOKENS) -> str:
    """Write the rows and the metrics; return a line that states how many there are.

    A document is a row of the corpus. Each document is encoded on its own and ended by the model's EOS token. Documents
    are joined in the order of the corpus into one stream for training and one for validation; each stream is cut into
    rows and only its last, partial row is dropped.

    Args:
        params: What decides the rows.
        runtime: Where they are computed.
        max_batch_tokens: Tokens of a record batch of rows.

    Raises:
        StageError: the parameters do not fit the model or the corpus, or there are too few tokens for a row.
    """
    # Both raise what is wrong with the parameters, the model or the corpus, before a token is encoded.
    spec = find_tokenizer_spec(params)
    shards = read_corpus(params)
    store = reuse.Store(reuse.root(), packing.Counts)
    num_train = len(shards) - params.validation_splits  # entire splits, so no line of a file gives rows to both sides
    with ExitStack() as stack:  # which publishes neither directory before both are complete
        train_directory = stack.enter_context(publish.directory(TRAIN))
        validation_directory = stack.enter_context(publish.directory(VALIDATION))
        splits = encode_splits(shards, spec, train_directory, store, runtime)
        train = write_rows(splits[:num_train], train_directory, spec, params, max_batch_tokens)
        validation = write_rows(splits[num_train:], validation_directory, spec, params, max_batch_tokens)
        if train.rows == 0:
            raise StageError(too_few("train", train, params))
        if validation.rows == 0 and params.validation_splits:  # with 0 splits an empty dataset is what was asked for
            raise StageError(too_few("validation", validation, params))
        PackMetrics(train, validation).write(METRICS)
    # Only after success: what a failed run finished is what the next one reuses.
    store.trim(int(runtime.reuse_gib * 2**30))
    return (
        f"pack: {train.rows} rows to train on and {validation.rows} to validate, of {params.seq_length} tokens; "
        f"{train.characters_per_token} characters per token; "
        f"{sum(split.is_reused for split in splits)} of {len(splits)} splits reused"
    )


def find_tokenizer_spec(params: PackParams) -> encoding.TokenizerSpec:
    """The model's tokenizer, checked against the model manifest and the parameters.

    Raises:
        StageError: it is missing or was changed, has no EOS token, or the model does not allow such long rows.
    """
    model = ModelManifest.read()
    if model.eos_token_id is None:
        raise StageError(
            f"{model.model_name} has no EOS token, which must end each document: set eos_token_id in its config.json"
        )
    if model.max_seq_length is not None and params.seq_length > model.max_seq_length:
        raise StageError(
            f"seq_length is {params.seq_length}, {model.model_name} allows at most {model.max_seq_length}: lower it"
        )
    if TOKENIZER not in model.files:
        raise StageError(
            f"{model.model_name} has no {TOKENIZER}: load its tokenizer with transformers' AutoTokenizer and "
            "save it beside the model with save_pretrained"
        )
    path = model.verify([TOKENIZER]) / TOKENIZER  # only this file: the weights decide no token, and take long to hash
    token_ids, unk_token_id = read_vocabulary(path)
    if model.eos_token_id not in token_ids:
        raise StageError(f"{path} has no token {model.eos_token_id}, which {model.model_name} gives as its EOS token")
    return encoding.TokenizerSpec(
        path=path.resolve(),
        sha256=model.files[TOKENIZER].sha256,
        eos_token_id=model.eos_token_id,
        unk_token_id=unk_token_id,
        vocab_size=model.vocab_size,
    )


def read_vocabulary(path: Path) -> tuple[set[int], int | None]:
    """The ids of all tokens in a `tokenizer.json`, and the id of its unknown token, if there is one."""
    content = json.loads(path.read_bytes())
    model = content["model"]
    added = {token["id"] for token in content["added_tokens"]}
    if isinstance(model["vocab"], list):  # Unigram: pairs of a token and its score, in the order of their ids
        return added | {*range(len(model["vocab"]))}, model["unk_id"]
    return added | {*model["vocab"].values()}, model["vocab"].get(model.get("unk_token"))


def read_corpus(params: PackParams) -> list[Shard]:
    """The verified shards of the corpus, one per split.

    Raises:
        StageError: a shard was changed, there is no text, or no split is left to train on.
    """
    shards = arrow.read_shards(CORPUS)
    if not any(shard.rows for shard in shards):
        raise StageError(f"{CORPUS} contains no text: put files with text into raw_dir, or lower min_chars")
    if params.validation_splits >= len(shards):
        raise StageError(
            f"validation_splits is {params.validation_splits} of num_splits = {len(shards)} splits, which leaves none "
            "to train on: lower it"
        )
    return shards


def encode_splits(
    shards: Sequence[Shard],
    spec: encoding.TokenizerSpec,
    directory: Path,
    store: reuse.Store[packing.Counts],
    runtime: PackRuntime,
) -> list[EncodedSplit]:
    """Put a file of tokens for each split into the directory, from the store or newly encoded; return them in order."""
    code_digest = code.digest_with_packages("stages.pack")
    splits = [
        Split(CORPUS / shard.filename, shard.rows, key(shard.sha256, spec, code_digest), directory / f"split-{index}")
        for index, shard in enumerate(shards)
    ]
    reused = fetch_splits(splits, store)  # all of them first: workers then start only if something is missing
    missing = [split for split in splits if split not in reused]
    encoded = dict(encode_missing(missing, spec, directory / "progress", store, runtime))
    return [EncodedSplit(split.tokens, (reused | encoded)[split], split in reused) for split in splits]


def key(shard_digest: str, spec: encoding.TokenizerSpec, code_digest: str) -> str:
    """The digest of all that decides the tokens of a split: its text, the tokenizer, the ids of the model, the code.

    How they are cut into rows is not included, so that another `seq_length` encodes nothing again.
    """
    # Without the path: the tokenizer's digest decides, so a moved HF_HOME encodes nothing again.
    decisive = {name: value for name, value in spec._asdict().items() if name != "path"}
    return publish.sha256_json(["pack", shard_digest, decisive, code_digest])


def fetch_splits(splits: Sequence[Split], store: reuse.Store[packing.Counts]) -> dict[Split, packing.Counts]:
    """Put the tokens of those splits that the store has in their places."""
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        found = threads.map(lambda split: store.fetch(split.key, split.tokens), splits)
        return {split: counts for split, counts in zip(splits, found, strict=True) if counts is not None}


def encode_missing(
    splits: Sequence[Split],
    spec: encoding.TokenizerSpec,
    directory: Path,
    store: reuse.Store[packing.Counts],
    runtime: PackRuntime,
) -> Iterator[tuple[Split, packing.Counts]]:
    """Encode splits, record batch by record batch, and yield the counts of each.

    A split is stored as soon as all of it is encoded, so that a run that fails later, or is killed, has not encoded it
    in vain. `directory` is for the files of the progress bar.
    """
    splits = sorted(splits, key=lambda split: -split.shard.stat().st_size)  # the largest first, so that none ends late
    num_documents = sum(split.num_documents for split in splits)
    with progress.show(directory, num_documents, desc="pack", unit="document") as bar:
        # A task is a record batch, not a split: one large split then occupies all workers.
        tasks = {split: list(tasks_of(split, spec, bar)) for split in splits}
        results = workers.ordered_map(
            packing.encode,
            [*chain.from_iterable(tasks.values())],
            runtime,
            ahead=AHEAD,
            initializer=encoding.use_one_thread,
        )
        # Generators: a split is joined and stored while workers encode the next ones, up to AHEAD batches.
        for split, parts in tasks.items():
            counts = sum(islice(results, len(parts)), packing.Counts())  # in their order, so these are the split's own
            sha256 = packing.join([part.target for part in parts], split.tokens)
            store.put(split.key, split.tokens, sha256, counts)  # before the next split is waited for
            yield split, counts


def tasks_of(split: Split, spec: encoding.TokenizerSpec, bar: progress.Bar) -> Iterator[packing.Task]:
    """The tasks that encode a split: one for each of its record batches."""
    for offset in arrow.batch_offsets(split.shard):
        target = split.tokens.with_name(f"{split.tokens.name}-{offset}")
        yield packing.Task(split.shard, offset, spec, target, bar.file(target.name))


def write_rows(
    splits: Sequence[EncodedSplit],
    directory: Path,
    spec: encoding.TokenizerSpec,
    params: PackParams,
    max_batch_tokens: int,
) -> PartMetrics:
    """Write the dataset of rows of some splits, and remove the files of their tokens."""
    features = arrow.token_features(params.seq_length)
    # One shard: a row may begin in one split and end in the next.
    with arrow.StreamWriter(directory / arrow.shard_name(0, 1), features) as stream:
        writer = packing.RowWriter(stream, params.seq_length, max_batch_tokens)
        for split in splits:
            writer.add_file(split.tokens, spec)
            split.tokens.unlink()  # the directory becomes the dataset; the store keeps the tokens
        shard = writer.close()
    Dataset(features, [shard]).write(directory)
    counts = sum((split.counts for split in splits), packing.Counts())
    num_text_tokens = writer.num_tokens - counts.num_documents  # the others are EOS, one for each document
    return PartMetrics(
        documents=counts.num_documents,
        characters=counts.num_characters,
        tokens=writer.num_tokens,
        characters_per_token=round(counts.num_characters / num_text_tokens, 4) if num_text_tokens else None,
        unknown_share=round(counts.num_unknown / num_text_tokens, 6) if num_text_tokens else None,
        rows=shard.rows,
    )


def too_few(name: str, metrics: PartMetrics, params: PackParams) -> str:
    """The error message for a part without a single row."""
    message = f"{name} has {metrics.tokens} tokens, too few for one row of seq_length {params.seq_length}: "
    if name == "validation":
        remedy = "lower seq_length"
        if not metrics.tokens:  # as where there are fewer files than splits, and they cannot be cut into parts
            remedy = 'lower num_splits, decompress .jsonl.gz and .jsonl.zst (docs/data.md, "How files become splits")'
        return f"{message}{remedy}, raise validation_splits (now {params.validation_splits}), or add raw files"
    return message + "lower seq_length, or add raw files"


if __name__ == "__main__":
    command.run(main)
