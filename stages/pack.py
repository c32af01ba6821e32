"""Turn documents and conversations into rows of tokens, a part of them held out for validation.

Reads    data/corpus/, data/duplicates/, data/model.json, data/tokenizer.json, and the file of `chat_template`
Writes   data/tokens/train, data/tokens/validation: datasets with `input_ids`, seq_length tokens a row
         data/pack.json: documents, tokens, rows; conversations that are refused, and why
Example  dvc exp run -S seq_length=1024 pack
"""

import hashlib
import operator
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field
from tqdm import tqdm

from stages.base import code, command, publish
from stages.base.dataset import CORPUS, Dataset, Shard
from stages.base.errors import StageError
from stages.base.files import check_files
from stages.base.origin import Origin
from stages.base.packed import (
    METRICS,
    TOKENS,
    TRAIN,
    VALIDATION,
    ConversationMetrics,
    EncoderMetrics,
    PackMetrics,
    RowsMetrics,
    fingerprint,
)
from stages.base.params_file import load_params
from stages.base.summary import Row, counted, table
from stages.model.manifest import ModelManifest
from stages.tokenizing import comparison, encoding, fast_tokenizer, packing
from stages.tokenizing.held_out import Split, TokenShard, find_token_shards
from stages.tokenizing.specs import find_chat_spec, find_tokenizer_spec
from stages.work import arrow, reuse, skipped, workers

AHEAD = 100
"""Record batches per worker that are encoded before they are needed: no worker waits for one slow batch."""


@dataclass(frozen=True)
class PackParams:
    """What decides the rows."""

    seq_length: Annotated[int, Field(ge=2, le=2**24)]
    """Length of a row, in tokens. The limit is far above that of any model; all of a row is in memory (64 MiB)."""
    validation_splits: Annotated[int, Field(ge=0)]
    """How many splits of each source are held out of training, the last ones."""
    fast_encoder: bool = True
    """Whether to encode with tokenizers 1.0, where it gives the same tokens."""
    chat_template: str | None = None
    """File of a chat template below models/templates/. null: the model's own."""
    train_on: encoding.TrainOn = "assistant"
    """Tokens of a conversation that are trained. assistant: those of its turns. last: of its last turn. completion: of
    what follows the prompt. all: every one, those of the template too."""
    validation_fraction: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Documents that are held out instead of splits, as a share. null: splits are. A digest of their content
    decides."""
    max_left_out: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Strings of a role, or of tools, that the chat template may leave out, as a share."""


@dataclass(frozen=True)
class PackRuntime(reuse.Runtime):
    """What changes no result."""


class SplitTask(NamedTuple):
    """A split of the corpus, or some of its documents, and where their tokens belong."""

    split: Split
    side: packing.Side | None
    """The documents; None: all."""
    key: str
    """Of the tokens in the store."""
    tokens: Path
    """The file to write, in the form of `packing.encode`."""


NUM_REASONS = 5
"""Of refused conversations that are printed, the most frequent ones; all are in the metrics."""

_REMEDIES = {
    "longer than a row": "raise seq_length",
    "the chat template": "set chat_template to the file of one that writes them, or correct the conversations",
    "nothing of it is trained": "give its answers text, map their role with `roles` in the rule, or change train_on",
    "train_on": "change train_on",
}
"""By the beginning of the reason why conversations were refused."""


class PackedRows(NamedTuple):
    """The rows of some splits."""

    num_rows: int
    num_tokens: int
    """With those of the last, partial row."""
    num_padding: int
    """That fill up rows; 0 without conversations."""
    counts: packing.Counts
    are_reused: list[bool]
    """Whether the store had the split, of each that has documents. Its held-out side is not another split."""

    def __add__(self, other: "PackedRows") -> "PackedRows":  # type: ignore[override]
        return PackedRows(*map(operator.add, self, other))

    def metrics(self, is_chat: bool) -> RowsMetrics:
        """For data/pack.json; `is_chat`: whether the corpus has conversations."""
        counts = self.counts
        # Each document that is text has EOS, too, and perhaps BOS.
        num_added = counts.num_start + counts.num_documents - counts.num_conversations
        num_text_tokens = self.num_tokens - counts.num_chat_tokens - num_added
        return RowsMetrics(
            documents=counts.num_documents,
            characters=counts.num_characters,
            bytes=counts.num_bytes,
            tokens=self.num_tokens,
            start_tokens=counts.num_start,
            characters_per_token=round(counts.num_characters / num_text_tokens, 4) if num_text_tokens else None,
            unknown_share=round(counts.num_unknown / num_text_tokens, 6) if num_text_tokens else None,
            dropped_characters=counts.num_dropped,
            rows=self.num_rows,
            duplicates=counts.num_duplicates,
            conversations=None
            if not is_chat
            else ConversationMetrics(
                conversations=counts.num_conversations,
                tokens=counts.num_chat_tokens,
                trained_tokens=counts.num_trained,
                padding_tokens=self.num_padding,
                refused=counts.refused,
                first_refused=counts.first_refused,
                terminators=sorted(
                    counts.terminators.keys() - counts.inner.keys(),
                    key=lambda token: (-counts.terminators[token], token),
                ),
                strings=dict(sorted(counts.strings.items())),
                left_out=dict(sorted(counts.left_out.items())),
            ),
        )


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    with publish.lock(TOKENS):
        print(pack(load_params(PackParams), load_params(PackRuntime, "runtime")))


def pack(params: PackParams, runtime: PackRuntime, max_batch_tokens: int = packing.MAX_BATCH_TOKENS) -> str:
    """Write the rows and the metrics; return a table of how many there are.

    A document is a row of the corpus. Each document is encoded on its own, begins with BOS if the tokenizer begins
    texts so, and ends with the model's EOS token. Documents are joined in the order of the corpus into one stream for
    training and one for validation; each stream is cut into rows and only its last, partial row is dropped.

    Args:
        params: What decides the rows.
        runtime: Where they are computed.
        max_batch_tokens: Tokens of a record batch of rows.

    Raises:
        StageError: the parameters do not fit the model or the corpus, or there are too few tokens for a row.
    """
    # All of these raise what is wrong with the parameters, the model or the corpus, before a token is encoded.
    model = ModelManifest.read()
    spec = find_tokenizer_spec(model, params.seq_length, params.fast_encoder)
    corpus = Dataset.read(CORPUS, "extract", contents=True)
    skips = skipped.read(corpus)
    parts = find_token_shards(corpus, skips, params.validation_fraction, params.validation_splits)
    if is_chat := "messages" in corpus.features:
        spec = spec._replace(chat=find_chat_spec(model, params.chat_template, params.train_on, params.seq_length))
    store = reuse.Store(reuse.root(), packing.Counts)
    reason = None
    with publish.directory(TOKENS) as directory:  # one directory for both datasets, so that both appear at once
        try:
            written = write_token_shards(parts, spec, directory, store, params, runtime, max_batch_tokens)
        except comparison.Differs as error:
            reason = str(error)
            print(f"warning: pack encodes with the model's own tokenizer, not with {fast_tokenizer.NAME}: {reason}")
            spec = spec._replace(is_fast=False)
            written = write_token_shards(parts, spec, directory, store, params, runtime, max_batch_tokens)
        check_rows(written, params)
        train, validation = (
            reduce(operator.add, (rows for part, rows in written if part.directory == name))
            for name in (TRAIN.name, VALIDATION.name)
        )
        counts = train.counts + validation.counts
        check_left_out(counts, params)
        warn_of_conversations(counts, params)
        if train.counts.num_conversations and validation.num_rows and not validation.counts.num_conversations:
            remedy = "make them a source of their own (sources), or raise validation_fraction"
            print(f"warning: no conversation is held out, so no validation loss and no sample is of one: {remedy}")
        name = fast_tokenizer.NAME if spec.is_fast else encoding.NAME
        encoder = EncoderMetrics(name, counts.num_slow, reason)
        metrics = PackMetrics(
            train.metrics(is_chat),
            validation.metrics(is_chat),
            encoder,
            skips.fingerprint,
            fingerprint(
                *(Dataset.read(directory / name, "pack").fingerprint for name in (TRAIN.name, VALIDATION.name))
            ),
            Origin.of("stages.pack", params),
            train_shards(parts),
            dict(spec.chat.templates) if spec.chat else {},
            {f"{part.directory} {part.source}": rows.metrics(is_chat) for part, rows in written if part.source},
        )
        metrics.write(METRICS)
    # Only after success: what a failed run finished is what the next one reuses.
    store.trim(int(runtime.reuse_gib * 2**30))
    held_out = validation.num_tokens / (train.num_tokens + validation.num_tokens)
    used = train.are_reused + validation.are_reused
    note = f"of {params.seq_length:,} tokens; {validation.num_rows:,} more held out ({held_out:.1%} of the tokens)"
    return table(
        (train.num_rows, "rows", note),
        conversations_row(counts) if is_chat else documents_row(counts, validation.counts),
        (f"{sum(used)} of {len(used)}", "splits reused", ""),
    )


def check_rows(written: Sequence[tuple[TokenShard, PackedRows]], params: PackParams) -> None:
    """Check that there are rows to train on, and to validate on if any were to be held out.

    Raises:
        StageError: there are none.
    """
    # A fraction that suits a large source may give none of the rows of a small one.
    is_measured = any(rows.num_rows for part, rows in written if part.directory == VALIDATION.name)
    for part, rows in written:
        # With 0 splits an empty dataset is what was asked for.
        if rows.num_rows or (part.directory == VALIDATION.name and not part.splits):
            continue
        message = too_few(part, rows, params)
        was_chosen = params.validation_fraction is not None or not part.side
        if part.directory == TRAIN.name or (was_chosen and not is_measured):
            raise StageError(message)
        print(f"warning: {message}; nothing{f' of {part.source}' if part.source else ''} is validated")


def train_shards(parts: Iterable[TokenShard]) -> dict[str, float]:
    """See `PackMetrics`."""
    trained = [part for part in parts if part.directory == TRAIN.name]
    fractions = {part.source: part.side.fraction if part.side else 0.0 for part in trained}
    return {split.shard.filename: fractions[part.source] for part in trained for split in part.splits}


def documents_row(counts: packing.Counts, held_out: packing.Counts) -> Row:
    """How many documents there are, for people to read; equal ones are known only where their content decides."""
    equal = held_out.num_duplicates
    note = f"{held_out.num_documents:,} held out" + (f", {equal:,} of them equal to an earlier one" if equal else "")
    return counts.num_documents, "documents", note


def conversations_row(counts: packing.Counts) -> Row:
    """What became of the conversations, for people to read; prints why some were refused, or not written in full."""
    for where, left_out in sorted(counts.left_out.items()):
        print(f"note: the chat template leaves out {left_out} of {counts.strings[where]} strings of {where}")
    for begin, number in sorted(counts.refused.items(), key=lambda item: -item[1])[:NUM_REASONS]:
        reason = next((each.reason for each in counts.first_refused if each.reason.startswith(begin)), begin)
        print(f"note: {counted(number, 'conversation')} refused: {reason}: {remedies([begin])}")
    share, num_refused = counts.num_trained / max(1, counts.num_chat_tokens), sum(counts.refused.values())
    note = f"{share:.1%} of their tokens trained; {num_refused:,} more refused"
    return counts.num_conversations, "conversations", note


def check_left_out(counts: packing.Counts, params: PackParams) -> None:
    """Check that the chat template writes what the conversations have.

    Not their thoughts: many templates drop those of earlier turns, and such a turn is not trained. Nor what messages
    have beside their content, such as ids.

    Raises:
        StageError: of one role, or of the tools, it leaves out more than `max_left_out`.
    """
    for where, number in sorted(counts.left_out.items()):
        total = counts.strings[where]
        if number > params.max_left_out * total and not where.endswith((" reasoning", " other keys")):
            raise StageError(
                f"the chat template leaves out {number} of {total} strings of {where} ({number / total:.1%}), and "
                f"max_left_out is {params.max_left_out:g}: set chat_template to the file of one that writes them, "
                "leave them out of the data by a rule (docs/formats.md), or raise max_left_out"
            )


def warn_of_conversations(counts: packing.Counts, params: PackParams) -> None:
    """Warn where many are refused, except those that are longer than a row, which are dropped on purpose."""
    lost = sum(number for reason, number in counts.refused.items() if not reason.startswith("longer than"))
    share = lost / max(1, counts.num_conversations + sum(counts.refused.values()))
    if share > params.max_left_out:
        print(f"warning: {share:.0%} of the conversations are refused, so not trained (see {METRICS})")


def write_token_shards(
    token_shards: Sequence[TokenShard],
    spec: encoding.TokenizerSpec,
    directory: Path,
    store: reuse.Store[packing.Counts],
    params: PackParams,
    runtime: PackRuntime,
    max_batch_tokens: int,
) -> list[tuple[TokenShard, PackedRows]]:
    """Write the datasets for training and for validation; rows are cut while later splits are encoded.

    Raises:
        Differs: the fast tokenizer gives other tokens than the model's own.
    """
    features = arrow.token_features(params.seq_length, is_marked=spec.chat is not None)
    with (
        tempfile.TemporaryDirectory(dir=directory) as tokens,
        closing(encode_splits(token_shards, spec, Path(tokens), store, runtime)) as splits,
    ):
        written = []
        for name in (TRAIN.name, VALIDATION.name):
            (directory / name).mkdir(exist_ok=True)
            own, shards = [wanted for wanted in token_shards if wanted.directory == name], []
            for index, wanted in enumerate(own):
                target = directory / name / arrow.shard_name(index, len(own))
                of_shard = islice(splits, len(wanted.splits))
                rows, shard = write_rows(of_shard, target, spec, features, params, max_batch_tokens)
                written.append((wanted, rows))
                shards.append(shard._replace(source=wanted.source))
            Dataset(features, shards).write(directory / name)
        return written


def encode_splits(
    token_shards: Sequence[TokenShard],
    spec: encoding.TokenizerSpec,
    directory: Path,
    store: reuse.Store[packing.Counts],
    runtime: PackRuntime,
) -> Generator[tuple[SplitTask, packing.Counts, bool], None, None]:
    """Yield each split of each shard when its tokens are in `directory`; its counts; whether the store had them."""
    code_digest = code.digest_with_packages("stages.pack")
    tasks = [
        SplitTask(
            split, wanted.side, key(split, wanted.side, spec, code_digest),
            directory / f"{wanted.directory}-{split.shard.filename}",
        )
        for wanted in token_shards
        for split in wanted.splits
    ]  # fmt: skip
    # All of them first: workers then start only if something is missing.
    with closing(workers.threaded_map(lambda task: store.fetch(task.key, task.tokens), tasks)) as found:
        reused = {task: counts for task, counts in zip(tasks, found, strict=True) if counts is not None}
    missing = [task for task in tasks if task not in reused]
    with closing(encode_missing(missing, spec, store, runtime)) as encoded:
        for task in tasks:
            counts = reused.get(task) or next(encoded)
            task.split.shard.check_rows(counts.num_read)
            yield task, counts, task in reused


def key(split: Split, side: packing.Side | None, spec: encoding.TokenizerSpec, code_digest: str) -> str:
    """The digest of what decides the tokens of a split: its text, which documents, the tokenizer, the code.

    How they are cut into rows is not included, so that another `seq_length` encodes nothing again; but where there are
    conversations, of which it refuses those that are longer.
    """
    # Without the path: the tokenizer's digest decides, so a moved HF_HOME encodes nothing again.
    decisive = {name: value for name, value in spec._asdict().items() if name != "path"}
    skipped_rows = hashlib.sha256(split.skipped).hexdigest()
    return publish.sha256_json(["pack", split.shard.sha256, side, skipped_rows, decisive, code_digest])


def encode_missing(
    tasks: Sequence[SplitTask],
    spec: encoding.TokenizerSpec,
    store: reuse.Store[packing.Counts],
    runtime: PackRuntime,
) -> Generator[packing.Counts, None, None]:
    """Encode splits, record batch by record batch, and yield the counts of each, in order.

    A split is stored as soon as all of it is encoded, so that a run that fails later, or is killed, has not encoded it
    in vain.
    """
    # A task of a worker is a record batch, not a split: one large split then occupies all workers.
    batches = {task: list(batch_tasks(task, spec)) for task in tasks}
    encoding_all = workers.ordered_map(
        packing.encode,
        [*chain.from_iterable(batches.values())],
        runtime,
        num_bytes=sum(task.split.path.stat().st_size for task in tasks),
        ahead=AHEAD,
    )
    # Generators: a split is joined and stored while workers encode the next ones, up to AHEAD batches.
    with (
        tqdm(total=sum(task.split.shard.rows for task in tasks), desc="pack", unit="document", disable=None) as bar,
        closing(encoding_all) as results,
    ):
        for task, own in batches.items():
            encoded = []
            for result in islice(results, len(own)):  # in their order, so these are the split's own
                encoded.append(result)
                bar.update(result.counts.num_read)
            counts = packing.Counts.total(result.counts for result in encoded)
            files = [(batch.target, result.sha256) for batch, result in zip(own, encoded, strict=True)]
            sha256 = packing.join(files, task.tokens)
            # Again, as the tokens are stored under it: another run of extract may have replaced the corpus.
            check_files({task.split.path: task.split.shard.sha256}, arrow.CHANGED)
            store.put(task.key, task.tokens, sha256, counts)  # before the next split is waited for
            yield counts


def batch_tasks(task: SplitTask, spec: encoding.TokenizerSpec) -> Iterator[packing.BatchTask]:
    """The tasks of workers that encode a split: one for each of its record batches."""
    path, tokens = task.split.path, task.tokens
    for offset, rows in packing.batches_of(path, task.split.skipped):
        yield packing.BatchTask(path, offset, spec, tokens.with_name(f"{tokens.name}-{offset}"), task.side, rows)


def write_rows(
    splits: Iterable[tuple[SplitTask, packing.Counts, bool]],
    target: Path,
    spec: encoding.TokenizerSpec,
    features: arrow.Features,
    params: PackParams,
    max_batch_tokens: int,
) -> tuple[PackedRows, Shard]:
    """Write the rows of some splits, and remove the files of their tokens."""
    counts, are_reused = [], []
    # One shard: a row may begin in one split and end in the next.
    with arrow.StreamWriter(target, features) as stream:
        writer = (
            packing.MarkedRowWriter(stream, params.seq_length, spec.eos_token_id, max_batch_tokens)
            if spec.chat
            else packing.RowWriter(stream, params.seq_length, max_batch_tokens)
        )
        for task, of_split, is_reused in splits:
            writer.add_file(task.tokens, spec)
            task.tokens.unlink()  # the store keeps them
            counts.append(of_split)
            if task.split.rows and not (task.side and task.side.is_held_out):
                are_reused.append(is_reused)
        shard = writer.close()
    total = packing.Counts.total(counts)
    return PackedRows(shard.rows, writer.num_tokens, writer.num_padding, total, are_reused), shard


def remedies(refused: Iterable[str]) -> str:
    """What to do where conversations were refused for these reasons."""
    reasons = [*refused]
    found = [remedy for begin, remedy in _REMEDIES.items() if any(each.startswith(begin) for each in reasons)]
    return "; ".join(dict.fromkeys(found)) or "correct them"


def too_few(wanted: TokenShard, rows: PackedRows, params: PackParams) -> str:
    """The error message for a shard without a single row."""
    name = f"{wanted.directory} of source {wanted.source}" if wanted.source else wanted.directory
    message = f"{name} has {counted(rows.num_tokens, 'token')}, too few for one row of seq_length {params.seq_length}: "
    if number := sum(split.num_skipped for split in wanted.splits):
        message += f"deduplicate skips {counted(number, 'document')} of its splits: set it to null, or "
    if rows.counts.refused:
        first = {refused.reason.partition(":")[0]: refused.reason for refused in reversed(rows.counts.first_refused)}
        reasons = ", ".join(f"{count} ({first.get(reason, reason)})" for reason, count in rows.counts.refused.items())
        return f"{message}conversations were refused, {reasons}: {remedies(rows.counts.refused)}"
    if wanted.directory == TRAIN.name:
        less = f" or validation_fraction (now {wanted.side.fraction:.3g})" if wanted.side else ""
        return f"{message}lower seq_length{less}, or add raw files"
    if wanted.side:
        return (
            f"{message}lower seq_length, raise validation_fraction (now {wanted.side.fraction:.3g}), or add raw files"
        )
    return f"{message}lower seq_length, raise validation_splits (now {params.validation_splits}), or add raw files"


if __name__ == "__main__":
    command.run(main, "what is finished is in data/.reuse, and the next run continues with it")
