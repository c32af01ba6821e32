"""Extract all text from the raw files: a row for each text file and each string in JSON, YAML and tables, or for each
record, as the parameter `records` says.

Reads    data/splits/ and the raw files, or parts of them, that it lists
Writes   data/corpus/: a Hugging Face dataset with the column `text`, and `messages` where a rule makes conversations;
         one Arrow file a split
         data/extract.json: counts, and the files or parts of files that could not be read, with position and reason
Command  python -m stages.extract

A split with the same files, parameters and code as in an earlier run is not read again (docs/data.md, "What is not done
twice").
"""

import codecs
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, Field
from tqdm import tqdm

from stages.base import code, command, publish
from stages.base.dataset import Dataset, Shard
from stages.base.errors import StageError
from stages.base.names import printable
from stages.base.origin import Origin
from stages.base.params_file import load_params
from stages.base.process import paused_collector
from stages.base.record import Record
from stages.formats import rules
from stages.formats.limits import LIMITS, Limits
from stages.formats.rules import Rule, RuleCounts
from stages.splits import manifests as splits
from stages.work import reuse, workers

CORPUS = Path("data/corpus")
METRICS = Path("data/extract.json")

NUM_PRINTED = 20
"""Rejected files named in the error message; all of them are in the metrics."""


# The escape sequences of all of Python's encodings in which an ASCII character can be anything else than itself.
_ESCAPES = b"\\u0041 +AGE- ~{:!~} \x1b$B \x0e xn--4ca"


def _encoding(name: str | None) -> str | None:
    """Python's own name of an encoding that any piece of a file can be decoded in.

    Raises:
        ValueError: Python does not know the encoding, or it is another one.
    """
    if name is None:
        return None
    try:
        "".encode(name)  # a LookupError for codecs such as `base64`, which codecs.lookup alone would accept
        # UTF-16, UTF-7, punycode, ...: what a byte means there depends on those before it.
        if len(_ESCAPES.decode(name, "replace")) == len(_ESCAPES):
            return codecs.lookup(name).name  # one name for all spellings, as it is part of the key in the store
    except (LookupError, ValueError):
        pass
    raise ValueError(
        "must be null, or an encoding that Python knows with one byte for each ASCII character, such as cp1252 or "
        "shift_jis: convert files in other encodings with `iconv -t UTF-8`"
    )


@dataclass(frozen=True)
class ExtractParams:
    """What decides the text."""

    fallback_encoding: Annotated[str | None, AfterValidator(_encoding)]
    """For files that are neither UTF-8 nor begin with a byte order mark; None rejects them."""
    max_rejected_files: Annotated[int, Field(ge=0)]
    """The stage fails if more files than this cannot be read, entirely or in part."""
    min_chars: Annotated[int, Field(ge=1)]
    """Strings with fewer characters are dropped."""
    raw_dir: str
    """The directory of raw files, relative to the root of the project, or absolute."""
    deduplicate_strings: bool
    """Of equal strings only the first is kept, in the order of the splits and their rows."""
    records: list[Rule] | None
    """The first rule that fits the path of a file decides what its records become; without one each string is a row."""

    @property
    def features(self) -> dict[str, Any]:
        """Of the corpus. The rules decide, not the records, so that all splits have the same."""
        from stages.work import arrow

        makes_conversations = any(rule.makes_conversations for rule in self.records or ())
        return arrow.WITH_CONVERSATIONS if makes_conversations else arrow.TEXT


@dataclass(frozen=True)
class ExtractRuntime(workers.Runtime):
    """What changes no result."""

    reuse_gib: Annotated[float, Field(ge=0)]
    """Limit of the disk space, in GiB, for results of earlier runs that are not also outputs or in DVC's cache."""


@dataclass(frozen=True)
class Rejection:
    """A file, or a record in it, that could not be read."""

    path: str
    """Printable."""
    position: str | None
    reason: str
    detail: str


@dataclass(frozen=True)
class RejectedFile:
    """What could not be read of a file, or of a part of one."""

    place: tuple[str, int]
    """Printable path, and offset of the part: the order of the parts of all splits."""
    rejections: list[Rejection]


@dataclass(frozen=True)
class Metrics(Record):
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
    duplicate_strings: int
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
    """One split."""

    manifest: Path
    digest: str
    """Of the manifest."""
    num_bytes: int
    """Of its files, as they are stored."""
    shard: Path
    """The Arrow file to write."""
    params: ExtractParams
    limits: Limits
    store: "reuse.Store[SplitResult]"
    key: str
    """Of the split's result in the store."""


@dataclass(frozen=True)
class SplitResult:
    """The shard of a split, and what was counted."""

    shard: Shard
    counts: Counter[str]
    """`rejected` and a reason, for each reason; those of a rule after its index; otherwise named as in `Metrics`."""
    rejected: list[RejectedFile]
    changed: list[str]
    """Files that are not those that were organized. If there are any, the result is not used, and not stored."""
    unfit: list[RejectedFile]
    """Files, or parts, with records of which a rule makes no row."""
    fit: list[str]
    """Paths of files that were cut, and that have text here."""
    silent: list[str]
    """Paths of files, or parts, without text and without a reason."""
    advice: Counter[str]
    """Rules that would make conversations of files without a rule: how many files."""
    fallback: list[str]
    """Paths of files that were read in `fallback_encoding`, the first ones."""
    is_reused: bool = False


def main() -> None:
    """Run the stage."""
    parser = command.parser(__doc__)
    parser.add_argument("--preview", metavar="FILE", help="show the first rows of a raw file, and write nothing")
    file = parser.parse_args().preview
    params = load_params(ExtractParams)
    if file is not None:
        from stages.formats.preview import preview

        print(preview(Path(file), params.raw_dir, params.records, params.fallback_encoding, params.min_chars))
        return
    with publish.lock(CORPUS):
        print(extract(params, load_params(ExtractRuntime, "runtime")))


def extract(params: ExtractParams, runtime: ExtractRuntime, limits: Limits = LIMITS) -> str:
    """Write the corpus and the metrics; return a line that describes them.

    Raises:
        StageError: a rule fits no file; files changed after `organize`, or too many cannot be read. All files are tried
            before.
    """
    from stages.formats.writer import SHORT
    from stages.work import arrow

    summary = splits.read_summary(splits.SPLITS)
    parts = summary.splits
    if params.records:
        manifests = (splits.read_manifest(splits.SPLITS / part.manifest, part.digest) for part in parts)
        rules.check_files(params.records, sorted({file.path for file in chain.from_iterable(manifests)}))
    store = reuse.Store(reuse.root(), SplitResult)
    # With the versions of packages, unlike run_id: another parser may read other text, and a split costs only minutes.
    code_digest = code.digest_with_packages("stages.extract")
    shard_names = [arrow.shard_name(index, len(parts)) for index in range(len(parts))]
    with publish.directory(CORPUS) as directory:
        tasks = [
            SplitTask(
                manifest=splits.SPLITS / part.manifest,
                digest=part.digest,
                num_bytes=part.bytes,
                # Under another name first, as `deduplicate` cannot drop rows from the file that it reads.
                shard=directory / (f"whole-{index}" if params.deduplicate_strings else shard_names[index]),
                params=params,
                limits=limits,
                store=store,
                key=key(part.digest, params, limits, code_digest),
            )
            for index, part in enumerate(parts)
        ]
        results = run(tasks, runtime)
        # The manifest has other digests than the files now: this text would mix two states of raw_dir.
        if changed := [*{path: None for result in results for path in result.changed}]:  # parts: each file once
            raise StageError(
                f"{len(changed)} files were changed or removed after organize, the first is {changed[0]}: "
                "run `dvc repro` to organize them again"
            )
        counts = sum((result.counts for result in results), Counter())
        shards = [result.shard for result in results]
        if params.deduplicate_strings:
            targets = [directory / name for name in shard_names]
            shards = deduplicate(tasks, shards, targets, runtime, counts)
        unfit = find_unfit(results)
        counts.update("rejected no record fits" for _ in unfit)
        all_rejected = [*chain.from_iterable(result.rejected for result in results), *unfit]
        rejected = join_parts(all_rejected, limits.num_listed)
        counts["rejected_files"] = len({entry.path for entry in rejected})
        # Before the error, which refers the user to this file for all rejections.
        sourced = [shard._replace(source=summary.source(index)) for index, shard in enumerate(shards)]
        dataset = Dataset(params.features, sourced)
        fallback = sorted(chain.from_iterable(result.fallback for result in results))[: limits.num_listed]
        metrics(params, counts, rejected, fallback, dataset.fingerprint).write(METRICS)
        if counts["rejected_files"] > params.max_rejected_files:
            raise StageError(*too_many(counts["rejected_files"], rejected, params.max_rejected_files))
        dataset.write(directory)
    if params.records:
        from stages.formats.records import find_warnings

        for index, rule in enumerate(params.records):
            of_rule = _starting_with(f"rule {index} ", counts)
            for warning in find_warnings(index, rule, of_rule, [entry.detail for entry in rejected]):
                print(f"warning: {warning}")
    if advice := sum((result.advice for result in results), Counter()):
        print(describe_advice(advice))
    if silent := sorted(find_silent(results) - {entry.path for entry in rejected}):
        print(f"extract: {len(silent)} files have no text, and nothing in them was rejected, such as {silent[0]}")
    if fallback:
        print(
            f"extract: {counts['fallback_encoded_files']} files are not in UTF-8 and were read as "
            f"{params.fallback_encoding} (fallback_encoding), such as {fallback[0]}: see whether they look right with "
            f"`python -m stages.extract --preview {params.raw_dir}/{fallback[0]}`"
        )
    # Only after success: what a failed run finished is what the next one reuses.
    store.trim(int(runtime.reuse_gib * 2**30))
    num_rejections = sum(_starting_with("rejected ", counts).values())
    rejections = f"{num_rejections} rejections in {counts['rejected_files']} of them" * bool(num_rejections)
    num_left_out = sum(number for name, number in counts.items() if rules.LEFT_OUT in name)
    left_out = f"{num_left_out} records left out by rules; " * bool(num_left_out)
    # Not the empty ones, which are all equal: all but the first come from the store in any run.
    used = [result.is_reused for result, part in zip(results, parts, strict=True) if part.files]
    unused = "".join(
        f"columns that records.{index} does not use: {', '.join(columns[:NUM_PRINTED])}; "
        for index in range(len(params.records or ()))
        if (columns := [*_starting_with(f"rule {index} {rules.UNUSED}", counts)])
    )
    lengths = (
        f" (mean {counts['characters'] / counts['strings']:.0f} characters, "
        f"{counts['short_strings'] / counts['strings']:.0%} below {SHORT})"
        if counts["strings"]
        else ""
    )
    return (
        f"extract: {counts['strings']} strings{lengths}, {counts['characters'] / 1e6:.1f} M "
        f"characters, from {counts['files']} files; {left_out}{unused}{rejections or 'nothing rejected'} "
        f"(see {METRICS}); {sum(used)} of {len(used)} splits reused"
    )


def find_unfit(results: Iterable[SplitResult]) -> list[RejectedFile]:
    """The files of which a rule makes no row, each once."""
    fit = {path for result in results for path in result.fit}
    by_path = {file.place[0]: file for result in results for file in result.unfit if file.place[0] not in fit}
    return [*by_path.values()]


def find_silent(results: Iterable[SplitResult]) -> set[str]:
    """The files of which no part has text."""
    return {path for result in results for path in result.silent} - {path for result in results for path in result.fit}


def describe_advice(advice: Counter[str]) -> str:
    """What to tell about files that have conversations, but no rule."""
    (rule, _), *others = advice.most_common()
    return (
        f"extract: {advice.total()} files look like conversations, and each of their strings is a document now, roles "
        f"and ids too. For conversations, write this in params.yaml:\nrecords:\n- {rule}"
        + "".join(f"\n- {other}" for other, _ in others[:NUM_PRINTED])
    )


def deduplicate(
    tasks: Sequence[SplitTask],
    shards: Sequence[Shard],
    targets: Sequence[Path],
    runtime: ExtractRuntime,
    counts: Counter[str],
) -> list[Shard]:
    """Write `targets`, the shards without duplicate strings, remove those of `tasks`, and correct the counts."""
    from stages.formats import duplicates

    sources = [task.shard for task in tasks]
    num_at_once = tasks[0].limits.digests
    splits_to_digest = [duplicates.DigestTask(source, num_at_once) for source in sources]
    num_bytes = sum(path.stat().st_size for path in sources)
    digests = list(workers.ordered_map(duplicates.write_digests, splits_to_digest, runtime, num_bytes=num_bytes))
    # In the stage, not by workers: what occurs first depends on all splits.
    flags = duplicates.find(digests, [shard.rows for shard in shards], num_at_once)
    filters = [
        duplicates.Filter(source, target, flag, tasks[0].params.features)
        for source, target, flag in zip(sources, targets, flags, strict=True)
    ]
    filtered = list(workers.ordered_map(duplicates.drop, filters, runtime, num_bytes=num_bytes))
    for path in chain(sources, *digests):  # `publish.directory` publishes whatever is in the directory
        path.unlink()
    for result in filtered:  # splits are stored and counted with their duplicates
        counts["duplicate_strings"] += result.duplicates
        counts["strings"] -= result.duplicates
        counts["characters"] -= result.characters
        counts["short_strings"] -= result.num_short
    return [result.shard for result in filtered]


def key(manifest_digest: str, params: ExtractParams, limits: Limits, code_digest: str) -> str:
    """The digest of everything that decides the result of a split: its files, the parameters and the code.

    It leaves out where the raw files are, as the manifest has their digests, and how many may be rejected. Duplicate
    strings are dropped afterwards, as that depends on all splits.
    """
    decisive = {name: getattr(params, name) for name in ("fallback_encoding", "min_chars")}
    decisive["records"] = [dataclasses.asdict(rule) for rule in params.records or ()]
    return publish.sha256_json(["extract", manifest_digest, decisive, dataclasses.asdict(limits), code_digest])


def run(tasks: Sequence[SplitTask], runtime: workers.Runtime) -> list[SplitResult]:
    """Extract all splits; return the results in their order. The largest begins first, so that none ends late."""
    order = sorted(range(len(tasks)), key=lambda index: -tasks[index].num_bytes)
    ordered = [tasks[index] for index in order]
    num_bytes = sum(task.num_bytes for task in tasks)
    results: dict[int, SplitResult] = {}  # by index: the corpus keeps the order of the splits
    with (
        tqdm(total=num_bytes, desc="extract", unit="B", unit_scale=True, disable=None) as bar,
        closing(workers.ordered_map(extract_split, ordered, runtime, num_bytes=num_bytes)) as extracted,
    ):
        for index, result in zip(order, extracted, strict=True):
            results[index] = result
            bar.update(tasks[index].num_bytes)
    return [results[index] for index in range(len(tasks))]


def extract_split(task: SplitTask) -> SplitResult:
    """Write the shard of one split, or fetch it from the store."""
    if found := task.store.fetch(task.key, task.shard):
        shard = found.shard._replace(filename=task.shard.name)
        return dataclasses.replace(found, shard=shard, is_reused=True)
    result = read_split(task)
    if not result.changed:  # the key has the digests of the files as organized, and these are others
        task.store.put(task.key, task.shard, result.shard.sha256, result)
    return result


def read_split(task: SplitTask) -> SplitResult:
    """Write the shard of one split from its raw files."""
    from stages.formats import json_values, readers
    from stages.formats.advice import find_advice
    from stages.formats.records import Records
    from stages.formats.source import Changed, Rejected
    from stages.formats.writer import TextWriter
    from stages.work import arrow

    counts: Counter[str] = Counter()
    advice: Counter[str] = Counter()
    fallback: list[str] = []
    rejected: list[RejectedFile] = []
    unfit: list[RejectedFile] = []
    fit: list[str] = []
    silent: list[str] = []
    known: dict[int | None, set[str]] = {}  # columns, by rule
    changed: list[str] = []
    path = ""  # printable, of the current file
    rejections: list[Rejection] = []  # of the current file, or part

    def report(what: Rejected) -> None:
        counts[f"rejected {what.reason}"] += 1
        if len(rejections) < task.limits.num_listed:  # a JSON Lines file in a wrong format has millions
            rejections.append(Rejection(path=path, position=what.position, reason=what.reason, detail=what.detail))

    json_values.fill_array_cache()  # before the first large array (see there)
    params = task.params
    with paused_collector(), arrow.StreamWriter(task.shard, params.features) as stream:
        writer = TextWriter(stream, params.min_chars, report, task.limits)
        for file in splits.read_manifest(task.manifest, task.digest):
            rejections = []
            path = printable(file.path)
            offset = file.part.start if file.part else 0
            counts["files"] += offset == 0  # each file once, with its first part
            index, rule = rules.find(params.records, file.path) or (None, None)
            of_rule = known.setdefault(index, set())
            records = None if rule is None else Records(rule, writer, params.min_chars, task.limits, of_rule)
            writer.has_text = False
            try:
                with readers.open_source(params.raw_dir, file, params.fallback_encoding, task.limits) as source:
                    counts["fallback_encoded_files"] += source.used_fallback
                    if source.used_fallback and len(fallback) < task.limits.num_listed:
                        fallback.append(path)
                    readers.read(path, source, writer, records)
                    if records is None and offset == 0:
                        advice.update(find_advice(path, source.begin))
            except Rejected as reason:
                writer.reject(reason)
            except Changed:  # continue: one run finds all files that changed
                changed.append(path)
            problem = records.problem() if records else None
            if records:
                counts.update({f"rule {index} {name}": count for name, count in records.counts.items()})
                counts[f"rule {index} files"] += offset == 0
            if problem:
                rejection = Rejection(path, None, "no record fits", f"records.{index}: {problem}")
                unfit.append(RejectedFile((path, offset), [rejection]))
            elif file.part and writer.has_text:
                fit.append(path)
            elif not (writer.has_text or rejections):
                silent.append(path)
            if rejections:
                rejected.append(RejectedFile((path, offset), rejections))
        shard = writer.close()
    # |= keeps the larger of two counts, and these names have none yet.
    counts |= Counter(
        records=writer.records, strings=shard.rows, characters=writer.characters, short_strings=writer.num_short
    )
    return SplitResult(shard, counts, rejected, changed, unfit, fit, silent, advice, fallback)


def join_parts(rejected: Iterable[RejectedFile], num_listed: int) -> list[Rejection]:
    """The rejections of all files, sorted by path and position, at most `num_listed` of each."""
    of_path = groupby(sorted(rejected, key=lambda file: file.place), key=lambda file: file.place[0])
    return [
        rejection
        for _, parts in of_path
        for rejection in islice(chain.from_iterable(part.rejections for part in parts), num_listed)
    ]


def metrics(
    params: ExtractParams, counts: Counter[str], rejected: list[Rejection], fallback: list[str], fingerprint: str
) -> Metrics:
    """The content of `data/extract.json`."""
    return Metrics(
        files=counts["files"],
        fallback_encoded_files=counts["fallback_encoded_files"],
        fallback_encoded=fallback,
        rejected_files=counts["rejected_files"],
        records=counts["records"],
        duplicate_strings=counts["duplicate_strings"],
        strings=counts["strings"],
        characters=counts["characters"],
        mean_characters=round(counts["characters"] / counts["strings"]) if counts["strings"] else None,
        short_strings=counts["short_strings"],
        rejected=_starting_with("rejected ", counts),
        rejections=rejected,
        rules=[
            RuleCounts.of(rule, _starting_with(f"rule {index} ", counts))
            for index, rule in enumerate(params.records or ())
        ],
        source=publish.sha256_file(splits.SPLITS / splits.SUMMARY),
        fingerprint=fingerprint,
        origin=Origin.of("stages.extract", params),
    )


def _starting_with(prefix: str, counts: Counter[str]) -> dict[str, int]:
    return {name.removeprefix(prefix): counts[name] for name in sorted(counts) if name.startswith(prefix)}


def too_many(number: int, rejected: list[Rejection], limit: int) -> list[str]:
    """The lines of the error for more rejected files than are allowed."""
    first_of_file = {entry.path: entry for entry in reversed(rejected)}  # of equal keys the last stays: the first
    lines = [
        f"{path}: {entry.reason}" + f" at {entry.position}" * bool(entry.position) + f": {entry.detail}"
        for path, entry in sorted(first_of_file.items())[:NUM_PRINTED]
    ]
    more = [f"... and {number - NUM_PRINTED} more"] * (number > NUM_PRINTED)
    is_encoding = any(entry.reason == "unknown encoding" for entry in rejected)
    fix = "set fallback_encoding, or fix them" if is_encoding else "fix them"
    remedy = f"{number} files could not be read, max_rejected_files is {limit}: {fix}, or raise it (all: {METRICS})"
    return [*lines, *more, remedy]


if __name__ == "__main__":
    command.run(main, "what is finished is in data/.reuse, and the next run continues with it")
