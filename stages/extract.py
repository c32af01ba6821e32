"""Take all text out of the raw files: a row for each text file and for each string in JSON and YAML.

Reads    data/splits/ and the raw files that it lists
Writes   data/corpus/: a Hugging Face dataset with the column `text`, one Arrow file a split
         data/extract.json: counts, and the files or parts of files that could not be read, with position and reason
Command  python -m stages.extract

A split whose files, parameters and code were met before is not read again (docs/data.md, "What is not done twice").
"""

import codecs
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field
from tqdm import tqdm

from stages.artifacts import command, params, publish, reuse
from stages.artifacts.command import StageError
from stages.corpus import formats, splits, tree, workers
from stages.corpus.source import Changed, Rejected, Source

SPLITS = Path("data/splits")
CORPUS = Path("data/corpus")
METRICS = Path("data/extract.json")

NUM_PRINTED = 20
"""Rejected files named in the error message; all of them are in the metrics."""
NUM_LISTED = 1000
"""Rejections listed of one file; all are counted."""


def _encoding(name: str | None) -> str | None:
    """A name that Python knows of an encoding of text, spelt in the usual way."""
    try:
        if name is not None:
            "".encode(name)
            name = codecs.lookup(name).name
    except LookupError:
        raise ValueError("must be an encoding that Python knows, such as cp1252, or null") from None
    return name


@dataclass(frozen=True)
class ExtractParams:
    """What decides the text."""

    fallback_encoding: Annotated[str | None, AfterValidator(_encoding)]
    """For files that are neither UTF-8 nor begin with a byte order mark; None rejects them."""
    max_rejected_files: Annotated[int, Field(ge=0)]
    """More files than this that are unreadable, as a whole or in part, fail the stage."""
    min_chars: Annotated[int, Field(ge=1)]
    """Strings with fewer characters are dropped."""
    raw_dir: str
    """The folder of raw files, relative to the root of the project, or absolute."""
    deduplicate_strings: bool
    """Of equal strings only the first is kept, in the order of the splits and their rows."""
    keep_source: bool
    """Of each string, keep in a second column `source` which file it is from, and where in it it stands."""


@dataclass(frozen=True)
class ExtractRuntime(workers.Runtime):
    """What changes no result."""

    reuse_gib: Annotated[float, Field(ge=0)]
    """What results of earlier runs may take on the disk, in GiB, besides what outputs and DVC's cache hold anyway."""


class Task(NamedTuple):
    """One split."""

    manifest: Path
    digest: str
    """Of the manifest."""
    shard: Path
    """The Arrow file to write."""
    options: ExtractParams
    store: reuse.Store
    key: str
    """Of the split's result in the store."""


class SplitResult(NamedTuple):
    """What became of a split."""

    shard: Any  # an arrow.Shard
    counts: Counter[str]
    rejected: list[dict[str, Any]]
    changed: list[str]
    is_reused: bool


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    print(extract(params.load(ExtractParams), params.load(ExtractRuntime, "runtime")))


def extract(options: ExtractParams, runtime: ExtractRuntime) -> str:
    """Write the corpus and the metrics; return a line that says what was found.

    Raises:
        StageError: files changed after `organize`, or too many cannot be read. All files are tried before.
    """
    from stages.corpus import arrow

    summary = publish.read_json(SPLITS / splits.SUMMARY)
    parts = summary["splits"]
    store = reuse.Store(reuse.root())
    code = reuse.digest_of_code("stages.extract")
    features = arrow.TEXT_AND_SOURCE if options.keep_source else arrow.TEXT
    shard_names = [arrow.shard_name(index, len(parts)) for index in range(len(parts))]
    with publish.directory(CORPUS) as directory:
        tasks = [
            Task(
                manifest=SPLITS / part["manifest"],
                digest=part["digest"],
                shard=directory / (f"whole-{index}" if options.deduplicate_strings else shard_names[index]),
                options=options,
                store=store,
                key=key(part["digest"], options, code),
            )
            for index, part in enumerate(parts)
        ]
        results = run(tasks, [part["bytes"] for part in parts], runtime)
        if changed := [path for result in results for path in result.changed]:
            raise StageError(
                f"{len(changed)} files were changed or removed after organize, the first is {changed[0]}: "
                "run `dvc repro` to organize them again"
            )
        counts = sum((result.counts for result in results), Counter())
        shards = [result.shard for result in results]
        if options.deduplicate_strings:
            targets = [directory / name for name in shard_names]
            shards = deduplicate([task.shard for task in tasks], shards, targets, features, runtime, counts)
        rejected = sorted((entry for result in results for entry in result.rejected), key=lambda entry: entry["path"])
        publish.write_json(METRICS, metrics(counts, rejected))
        if counts["rejected_files"] > options.max_rejected_files:
            raise StageError(too_many(counts["rejected_files"], rejected, options.max_rejected_files))
        arrow.write_metadata(directory, features, shards)
    store.trim(int(runtime.reuse_gib * 2**30))
    return (
        f"extract: {counts['strings']} strings, {counts['characters'] / 1e6:.1f} M characters, "
        f"from {counts['files']} files; {counts['rejected_files']} rejected (see {METRICS}); "
        f"{sum(result.is_reused for result in results)} of {len(results)} splits reused"
    )


def deduplicate(
    sources: Sequence[Path],
    shards: Sequence[Any],
    targets: Sequence[Path],
    features: dict[str, Any],
    runtime: ExtractRuntime,
    counts: Counter[str],
) -> list[Any]:
    """Turn the shards of all strings into those of different strings, and take the duplicates off the counts."""
    from stages.corpus import duplicates

    digests = list(workers.ordered_map(duplicates.write_digests, sources, runtime))
    flags = duplicates.find(digests, [shard.rows for shard in shards])
    tasks = [(source, target, features, flag) for source, target, flag in zip(sources, targets, flags, strict=True)]
    filtered = list(workers.ordered_map(duplicates.drop, tasks, runtime))
    for path in (*sources, *digests):
        path.unlink()
    for result in filtered:
        counts["duplicate_strings"] += result.duplicates
        counts["strings"] -= result.duplicates
        counts["characters"] -= result.characters
    return [result.shard for result in filtered]


def key(manifest_digest: str, options: ExtractParams, code: str) -> str:
    """The digest of all that decides what becomes of a split: its files, the parameters and the code.

    Where the raw files lie is no part of it, as the manifest has their digests, nor how many may be rejected.
    Duplicate strings are dropped afterwards, as that depends on all splits.
    """
    decisive = {name: getattr(options, name) for name in ("fallback_encoding", "keep_source", "min_chars")}
    return publish.sha256_json(["extract", manifest_digest, decisive, code])


def run(tasks: Sequence[Task], sizes: Sequence[int], runtime: workers.Runtime) -> list[SplitResult]:
    """Extract all splits and return the results in their order. The largest begins first, so that none ends late."""
    order = sorted(range(len(tasks)), key=lambda index: -sizes[index])
    results: dict[int, SplitResult] = {}
    with tqdm(total=sum(sizes), desc="extract", unit="B", unit_scale=True, disable=None) as progress:
        computed = workers.ordered_map(extract_split, [tasks[index] for index in order], runtime)
        for index, result in zip(order, computed, strict=True):
            results[index] = result
            progress.update(sizes[index])
    return [results[index] for index in range(len(tasks))]


def extract_split(task: Task) -> SplitResult:
    """Write the shard of one split, or take it from the store."""
    from stages.corpus import arrow

    if found := task.store.fetch(task.key, task.shard):
        shard = arrow.Shard(task.shard.name, found["rows"], found["sha256"])
        return SplitResult(shard, Counter(found["counts"]), found["rejected"], [], is_reused=True)
    result = read_split(task)
    if not result.changed:
        _, rows, sha256 = result.shard
        value = {"rows": rows, "sha256": sha256, "counts": result.counts, "rejected": result.rejected}
        task.store.put(task.key, task.shard, sha256, value)
    return result


def read_split(task: Task) -> SplitResult:
    """Write the shard of one split from its raw files."""
    from stages.corpus import arrow
    from stages.corpus.text import TextWriter

    counts: Counter[str] = Counter()
    rejected: list[dict[str, Any]] = []
    changed: list[str] = []
    path = ""
    num_rejected = 0  # of the current file

    def report(what: Rejected) -> None:
        nonlocal num_rejected
        num_rejected += 1
        counts[f"rejected {what.reason}"] += 1
        if num_rejected <= NUM_LISTED:
            where = {"path": tree.printable(path), "position": what.position}
            rejected.append({**where, "reason": what.reason, "detail": what.detail})

    keep_source = task.options.keep_source
    features = arrow.TEXT_AND_SOURCE if keep_source else arrow.TEXT
    with without_collector(), arrow.StreamWriter(task.shard, features) as stream:
        writer = TextWriter(stream, task.options.min_chars, report, keep_source)
        for path, _, digest in splits.read_manifest(task.manifest, task.digest):
            num_rejected = 0
            writer.path = tree.printable(path)
            found = formats.find(path)
            assert found, "organize takes no other files"
            format, compression = found
            counts["files"] += 1
            try:
                source = Source(Path(task.options.raw_dir, path), compression, digest, task.options.fallback_encoding)
                counts["fallback_encoded_files"] += source.used_fallback
                format.read(source, writer)
            except Rejected as reason:
                writer.reject(reason)
            except (Changed, FileNotFoundError):
                changed.append(tree.printable(path))
            counts["rejected_files"] += num_rejected > 0
        shard = writer.close()
    counts |= Counter(documents=writer.documents, strings=shard.rows, characters=writer.characters)
    return SplitResult(shard, counts, rejected, changed, is_reused=False)


@contextmanager
def without_collector() -> Iterator[None]:
    """Spare the objects of a parsed file, which hold no cycles, being looked through again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def metrics(counts: Counter[str], rejected: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of `data/extract.json`."""
    names = (
        "files",
        "fallback_encoded_files",
        "rejected_files",
        "documents",
        "duplicate_strings",
        "strings",
        "characters",
    )
    prefix = "rejected "
    return {
        **{name: counts[name] for name in names},
        "rejected": {name.removeprefix(prefix): counts[name] for name in sorted(counts) if name.startswith(prefix)},
        "rejections": rejected,
    }


def too_many(number: int, rejected: list[dict[str, Any]], limit: int) -> str:
    """The error message for more rejected files than are allowed."""
    first_of_file = {entry["path"]: entry for entry in reversed(rejected)}
    lines = [
        f"{path}: {entry['reason']}" + f" at {entry['position']}" * bool(entry["position"]) + f": {entry['detail']}"
        for path, entry in sorted(first_of_file.items())[:NUM_PRINTED]
    ]
    more = [f"... and {number - NUM_PRINTED} more"] * (number > NUM_PRINTED)
    remedy = f"{number} files could not be read, max_rejected_files is {limit}: mend them, or raise it (all: {METRICS})"
    return "\n".join([*lines, *more, remedy])


if __name__ == "__main__":
    command.run(main)
