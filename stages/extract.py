"""Extract the text of the raw files, as `records` says. Without a rule each string is a document.

Reads    data/splits/, and the raw files, or parts of them, that it lists
Writes   data/corpus/: a Hugging Face dataset with the columns `text` and, for conversations, `messages`
         data/extract.json: counts, and what could not be read, with position and reason
Example  python -m stages.extract --preview data/raw/chat.jsonl
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from stages.base import code, command, publish
from stages.base.dataset import CORPUS, Dataset
from stages.base.errors import StageError
from stages.base.files import JsonFile
from stages.base.origin import Origin
from stages.base.params_file import load_params
from stages.base.summary import Row, counted, table
from stages.formats import layouts, preview, rules
from stages.formats.limits import LIMITS, Limits
from stages.formats.rules import RuleCounts
from stages.formats.shard import ReadParams, Rejection, SplitCounts, SplitResult, count_rules, join_parts, read_files
from stages.splits import manifests as splits
from stages.work import reuse, workers

METRICS = Path("data/extract.json")

NUM_PRINTED = 20
"""Rejected files named in the error message; all of them are in the metrics."""


@dataclass(frozen=True)
class ExtractParams(ReadParams):
    """What decides the text, and whether it is enough."""

    max_rejected_files: Annotated[int, Field(ge=0)]
    """How many files may be unreadable, entirely or in part, before the stage fails."""


@dataclass(frozen=True)
class ExtractRuntime(reuse.Runtime):
    """What changes no result."""


@dataclass(frozen=True)
class Metrics(JsonFile):
    """`data/extract.json`."""

    STAGE: ClassVar[str] = "extract"

    files: int
    fallback_encoded_files: int
    fallback_encoded: list[str]
    """The first of them."""
    rejected_files: int
    """Of which something could not be read."""
    records: int
    """Lines of JSON Lines, documents of JSON and YAML, and text files, if they were read."""
    strings: int
    """Rows of the corpus."""
    characters: int
    mean_characters: int | None
    """Of the strings; null: there are none."""
    short_strings: int
    """With fewer than 20 characters."""
    rejected: dict[str, int]
    """Files or records, by reason."""
    rejections: list[Rejection]
    rules: list[RuleCounts]
    source: str
    """SHA-256 of data/splits/summary.json."""
    fingerprint: str
    """Of the corpus."""
    origin: Origin


class SplitTask(NamedTuple):
    """One split, and where its text belongs."""

    split: splits.Split
    shard: Path
    """The Arrow file to write."""
    params: ExtractParams
    limits: Limits
    store: "reuse.Store[SplitResult]"
    key: str
    """Of the split's result in the store."""


def main() -> None:
    """Run the stage."""
    parser = command.parser(__doc__)
    parser.add_argument("--preview", metavar="FILE", help="show the first rows of a raw file, and write nothing")
    file = parser.parse_args().preview
    params = load_params(ExtractParams)
    if file is not None:
        print(preview.preview(Path(file), params))
        return
    with publish.lock(CORPUS):
        print(extract(params, load_params(ExtractRuntime, "runtime")))


def extract(params: ExtractParams, runtime: ExtractRuntime, limits: Limits = LIMITS) -> str:
    """Write the corpus and the metrics; return lines that describe them.

    Raises:
        StageError: a rule is left no file, or makes no row; files changed after `organize`, or too many cannot be read.
            All files are tried before.
    """
    from stages.work import arrow

    summary = splits.read_summary(splits.SPLITS)
    if params.records:
        rules.check_files(params.records, sorted({*raw_paths(summary)}))
    store = reuse.Store(reuse.root(), SplitResult)
    # With the versions of packages, unlike run_id: another parser may read other text, and a split costs only minutes.
    code_digest = code.digest_with_packages("stages.extract")
    with publish.directory(CORPUS) as directory:
        tasks = [
            SplitTask(
                split=split,
                shard=directory / arrow.shard_name(index, len(summary.splits)),
                params=params,
                limits=limits,
                store=store,
                key=key(split.digest, params, limits, code_digest),
            )
            for index, split in enumerate(summary.splits)
        ]
        results = workers.tracked_map(extract_split, tasks, [task.split.bytes for task in tasks], runtime, "extract")
        check_unchanged(results)
        shards = [result.shard._replace(source=summary.source(index)) for index, result in enumerate(results)]
        dataset = Dataset(params.features, shards)
        metrics = summed(results, dataset, params, limits)
        metrics.write(METRICS)  # before the error, which refers the user to this file for all rejections
        check_text(metrics, params.max_rejected_files)
        with publish.together(METRICS):
            dataset.write(directory)
    # Only after success: what a failed run finished is what the next one reuses.
    store.trim(int(runtime.reuse_gib * 2**30))
    for line in warnings(params, summary, results, metrics, limits):
        print(line)
    # Not the empty ones, which are all equal: all but the first come from the store in any run.
    used = [result.is_reused for result, split in zip(results, summary.splits, strict=True) if split.files]
    total = table(*rows(metrics), (f"{sum(used)} of {len(used)}", "splits reused", ""))
    return "\n".join([*notes(metrics.rules), total])


def check_unchanged(results: Sequence[SplitResult]) -> None:
    """Check that all files are those of the manifests: else the text would mix two states of `raw_dir`.

    Raises:
        StageError: some are not.
    """
    if changed := [*{path: None for result in results for path in result.changed}]:  # parts: each file once
        raise StageError(
            f"{counted(len(changed), 'file')} changed or removed after organize, the first is {changed[0]}: "
            "run `dvc repro` to organize them again"
        )


def summed(results: Sequence[SplitResult], dataset: Dataset, params: ExtractParams, limits: Limits) -> Metrics:
    """What was counted in all splits."""
    counts = sum((result.counts for result in results), SplitCounts())
    rejected = [file for result in results for file in result.rejected]
    return Metrics(
        files=counts.files,
        fallback_encoded_files=counts.fallback_encoded_files,
        fallback_encoded=sorted(chain.from_iterable(result.fallback for result in results))[: limits.num_listed],
        rejected_files=len({file.path for file in rejected}),
        records=counts.records,
        strings=counts.strings,
        characters=counts.characters,
        mean_characters=round(counts.characters / counts.strings) if counts.strings else None,
        short_strings=counts.short_strings,
        rejected=dict(sorted(counts.rejected.items())),
        rejections=join_parts(rejected, limits.num_listed)[: limits.most_listed],
        rules=count_rules(params.records, results),
        source=publish.sha256_file(splits.SPLITS / splits.SUMMARY),
        fingerprint=dataset.fingerprint,
        origin=Origin.of("stages.extract", params),
    )


def check_text(metrics: Metrics, max_rejected_files: int) -> None:
    """Check that enough was read.

    Raises:
        StageError: too many files could not be read, or a rule makes no row.
    """
    if metrics.rejected_files > max_rejected_files:
        raise StageError(*too_many(metrics.rejected_files, metrics.rejections, max_rejected_files))
    for index, rule in enumerate(metrics.rules):
        if rule.left_out and not rule.documents + rule.conversations:
            raise StageError(f"params.yaml: records.{index} makes no row of {rule.files!r}:", *rule.describe())


def warnings(
    params: ExtractParams, summary: splits.Summary, results: Sequence[SplitResult], metrics: Metrics, limits: Limits
) -> Iterator[str]:
    """What people may not have meant: files without a rule, without text, or in another encoding."""
    if num_files := sum(result.counts.structured_files for result in results):
        yield (
            f"note: {counted(num_files, 'file')} without a rule (docs/formats.md): each CSV file is a document, and "
            "each string of the others"
        )
        if found := layouts.find_layouts(params, raw_paths(summary), limits):
            yield f"warning: {found}"
    if silent := find_silent(results):
        yield (
            f"warning: {counted(len(silent), 'file')} without text, of which nothing was rejected, such as "
            f"{min(silent)}: `{preview.command_for(min(silent), params)}` shows why"
        )
    if fallback := metrics.fallback_encoded:
        yield (
            f"warning: {counted(metrics.fallback_encoded_files, 'file')} not in UTF-8, and read as "
            f"{params.fallback_encoding} (fallback_encoding), such as {fallback[0]}: see with "
            f"`{preview.command_for(fallback[0], params)}` whether the text looks right"
        )


def notes(of_rules: Sequence[RuleCounts]) -> Iterator[str]:
    """What rules leave out or change."""
    for index, rule in enumerate(of_rules):
        of_records = f" of {counted(rule.records, 'record')}"
        yield from (
            f"note: records.{index} leaves out {num:,}{of_records}: {why}" for why, num in rule.left_out.items()
        )
        yield from (f"note: records.{index}: {line}" for line in rule.notes())


def rows(metrics: Metrics) -> list[Row]:
    """What was read, for people."""
    from stages.formats.writer import SHORT

    lengths = (
        f"{metrics.characters:,} characters, mean {metrics.characters / metrics.strings:.0f}, "
        f"{metrics.short_strings / metrics.strings:.0%} below {SHORT}"
        if metrics.strings
        else ""
    )
    num_rejected = sum(metrics.rejected.values())
    num_left_out = sum(sum(rule.left_out.values()) for rule in metrics.rules)
    dropped = (
        f"{num_rejected:,} rejected in {counted(metrics.rejected_files, 'file')}, {num_left_out:,} left out by rules: "
        f"see {METRICS}"
        if num_rejected + num_left_out
        else f"of {counted(metrics.files, 'file')}"
    )
    return [(metrics.strings, "documents", lengths), (num_rejected + num_left_out, "dropped", dropped)]


def raw_paths(summary: splits.Summary) -> Iterator[str]:
    """Of the files in all splits; that of a file in parts comes once for each."""
    return (file.path for split in summary.splits for file in read_manifest(split))


def read_manifest(split: splits.Split) -> list[splits.RawFile]:
    """The raw files of a split, and parts of them."""
    return splits.read_manifest(splits.SPLITS / split.manifest, split.digest)


def find_silent(results: Sequence[SplitResult]) -> set[str]:
    """The files of which no part has text, and nothing was rejected."""
    silent = {path for result in results for path in result.silent}
    rejected = {file.path for result in results for file in result.rejected}
    return silent - rejected - {path for result in results for path in result.fit}


def key(manifest_digest: str, params: ExtractParams, limits: Limits, code_digest: str) -> str:
    """The digest of everything that decides the result of a split: its files, the parameters and the code.

    It leaves out where the raw files are, as the manifest has their digests, and how many may be rejected.
    """
    decisive = {name: getattr(params, name) for name in ("fallback_encoding", "min_chars")}
    decisive["records"] = [asdict(rule) for rule in params.records or ()]
    return publish.sha256_json(["extract", manifest_digest, decisive, asdict(limits), code_digest])


def extract_split(task: SplitTask) -> SplitResult:
    """Write the shard of one split, or fetch it from the store."""
    if found := task.store.fetch(task.key, task.shard):
        shard = found.shard._replace(filename=task.shard.name)
        return replace(found, shard=shard, is_reused=True)
    result = read_files(read_manifest(task.split), task.shard, task.params, task.limits)
    if not result.changed:  # the key has the digests of the files as organized, and these are others
        task.store.put(task.key, task.shard, result.shard.sha256, result)
    return result


def too_many(number: int, rejected: list[Rejection], limit: int) -> list[str]:
    """The lines of the error for more rejected files than are allowed."""
    first_of_file = {entry.path: entry for entry in reversed(rejected)}  # of equal keys the last stays: the first
    lines = [str(entry) for _, entry in sorted(first_of_file.items())[:NUM_PRINTED]]
    more = [f"... and {number - NUM_PRINTED} more"] * (number > NUM_PRINTED)
    is_encoding = any(entry.reason == "unknown encoding" for entry in rejected)
    fix = "change fallback_encoding, or fix them" if is_encoding else "fix them"
    remedy = f"{counted(number, 'file')} could not be read in full, and max_rejected_files is {limit}: {fix}"
    remedy += f", or raise it, which keeps the rest of them (all: {METRICS})"
    return [*lines, *more, remedy]


if __name__ == "__main__":
    command.run(main, "what is finished is in data/.reuse, and the next run continues with it")
