"""Extract the text of the raw files, as `records` says. Without a rule each string is a document.

Reads    data/splits/, and the raw files, or parts of them, that it lists
Writes   data/corpus/: a Hugging Face dataset with the columns `text` and, for conversations, `messages`
         data/extract.json: counts, and what could not be read, with position and reason
Example  python -m stages.extract --preview data/raw/chat.jsonl
"""

import codecs
import dataclasses
import json
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, Field

from stages.base import code, command, publish
from stages.base.dataset import CORPUS, Dataset, Shard
from stages.base.errors import StageError
from stages.base.files import JsonFile
from stages.base.names import printable
from stages.base.origin import Origin
from stages.base.params_file import load_params
from stages.base.process import paused_collector
from stages.base.summary import counted, table
from stages.formats import rules
from stages.formats.limits import LIMITS, Limits
from stages.formats.rules import RecordCounts, Rule, RuleCounts
from stages.splits import manifests as splits
from stages.splits import suffixes, tree
from stages.work import reuse, workers

if TYPE_CHECKING:
    from stages.formats.raw_content import Rejected

METRICS = Path("data/extract.json")

NUM_PRINTED = 20
"""Rejected files named in the error message; all of them are in the metrics."""
NUM_PREVIEWED, LONGEST_PREVIEWED = 5, 1000
"""Rows that a preview shows, and characters of each."""


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
    """Encoding of files that are not UTF-8 and have no byte order mark. null: they are rejected."""
    max_rejected_files: Annotated[int, Field(ge=0)]
    """How many files may be unreadable, entirely or in part, before the stage fails."""
    min_chars: Annotated[int, Field(ge=1)]
    """Length below which strings are dropped, in characters."""
    raw_dir: str
    """Directory of the raw files. It is relative to the root of the project, or absolute."""
    records: list[Rule] | None
    """Rules for documents and conversations (docs/formats.md). null: each string is a document. The first rule that
    fits the path of a file counts."""

    @property
    def features(self) -> dict[str, Any]:
        """Of the corpus. The rules decide, not the records, so that all splits have the same."""
        from stages.work import arrow

        makes_conversations = any(rule.makes_conversations for rule in self.records or ())
        return arrow.WITH_CONVERSATIONS if makes_conversations else arrow.TEXT


@dataclass(frozen=True)
class ExtractRuntime(reuse.Runtime):
    """What changes no result."""


@dataclass(frozen=True)
class Rejection:
    """A file, or a record in it, that could not be read."""

    path: str
    """Printable."""
    position: str | None
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" + f" at {self.position}" * bool(self.position) + f": {self.detail}"


@dataclass(frozen=True)
class RejectedFile:
    """What could not be read of a file, or of a part of one, as far as it is listed."""

    path: str
    """Printable."""
    start: int
    """Of the part, as in the manifest; 0: of the file."""
    rejections: list[Rejection]


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


@dataclass
class SplitCounts:
    """What was counted in a split, or in several."""

    files: int = 0
    """Each once, with its first part."""
    structured_files: int = 0
    """Of JSON, YAML or tables, without a rule."""
    fallback_encoded_files: int = 0
    records: int = 0
    strings: int = 0
    characters: int = 0
    short_strings: int = 0
    """As in `Metrics`, like the three before it."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Files or records, by reason."""

    def __add__(self, other: "SplitCounts") -> "SplitCounts":
        return SplitCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class SplitResult:
    """The shard of a split, and what was counted."""

    shard: Shard
    counts: SplitCounts
    of_rules: dict[int, RecordCounts]
    """By the index of the rule."""
    rejected: list[RejectedFile]
    changed: list[str]
    """Files that are not those that were organized. If there are any, the result is not used, and not stored."""
    fit: list[str]
    """Paths of files that were cut, and that have text here."""
    silent: list[str]
    """Paths of files, or parts, without text and without a reason."""
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
        print(preview(Path(file), params))
        return
    with publish.lock(CORPUS):
        print(extract(params, load_params(ExtractRuntime, "runtime")))


def extract(params: ExtractParams, runtime: ExtractRuntime, limits: Limits = LIMITS) -> str:
    """Write the corpus and the metrics; return lines that describe them.

    Raises:
        StageError: a rule is left no file, or makes no row; files changed after `organize`, or too many cannot be read.
            All files are tried before.
    """
    from stages.formats.writer import SHORT
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
        # The manifest has other digests than the files now: this text would mix two states of raw_dir.
        if changed := [*{path: None for result in results for path in result.changed}]:  # parts: each file once
            raise StageError(
                f"{counted(len(changed), 'file')} changed or removed after organize, the first is {changed[0]}: "
                "run `dvc repro` to organize them again"
            )
        counts = sum((result.counts for result in results), SplitCounts())
        files = [file for result in results for file in result.rejected]
        rejected = join_parts(files, limits.num_listed)[: limits.most_listed]
        rejected_names = {file.path for file in files}
        # Before the error, which refers the user to this file for all rejections.
        sourced = [result.shard._replace(source=summary.source(index)) for index, result in enumerate(results)]
        dataset = Dataset(params.features, sourced)
        fallback = sorted(chain.from_iterable(result.fallback for result in results))[: limits.num_listed]
        of_rules = count_rules(params.records, results)
        Metrics(
            files=counts.files,
            fallback_encoded_files=counts.fallback_encoded_files,
            fallback_encoded=fallback,
            rejected_files=len(rejected_names),
            records=counts.records,
            strings=counts.strings,
            characters=counts.characters,
            mean_characters=round(counts.characters / counts.strings) if counts.strings else None,
            short_strings=counts.short_strings,
            rejected=dict(sorted(counts.rejected.items())),
            rejections=rejected,
            rules=of_rules,
            source=publish.sha256_file(splits.SPLITS / splits.SUMMARY),
            fingerprint=dataset.fingerprint,
            origin=Origin.of("stages.extract", params),
        ).write(METRICS)
        if len(rejected_names) > params.max_rejected_files:
            raise StageError(*too_many(len(rejected_names), rejected, params.max_rejected_files))
        for index, rule in enumerate(of_rules):
            if rule.left_out and not rule.documents + rule.conversations:
                raise StageError(f"params.yaml: records.{index} makes no row of {rule.files!r}:", *rule.describe())
        with publish.together(METRICS):
            dataset.write(directory)
    for line in warnings(params, summary, counts, find_silent(results) - rejected_names, fallback):
        print(line)
    # Only after success: what a failed run finished is what the next one reuses.
    store.trim(int(runtime.reuse_gib * 2**30))
    num_rejections = counts.rejected.total()
    num_left_out = sum(sum(rule.left_out.values()) for rule in of_rules)
    rejected_of = f"{num_rejections:,} rejected in {counted(len(rejected_names), 'file')}"
    dropped = f"{rejected_of}, {num_left_out:,} left out by rules: see {METRICS}"
    # Not the empty ones, which are all equal: all but the first come from the store in any run.
    used = [result.is_reused for result, split in zip(results, summary.splits, strict=True) if split.files]
    notes: list[str] = []
    for index, rule in enumerate(of_rules):
        of_records = f" of {counted(rule.records, 'record')}"
        notes += [f"note: records.{index} leaves out {num:,}{of_records}: {why}" for why, num in rule.left_out.items()]
        notes += [f"note: records.{index}: {line}" for line in rule.notes()]
    lengths = (
        f"{counts.characters:,} characters, mean {counts.characters / counts.strings:.0f}, "
        f"{counts.short_strings / counts.strings:.0%} below {SHORT}"
        if counts.strings
        else ""
    )
    num_dropped = num_rejections + num_left_out
    summed = table(
        (counts.strings, "documents", lengths),
        (num_dropped, "dropped", dropped if num_dropped else f"of {counted(counts.files, 'file')}"),
        (f"{sum(used)} of {len(used)}", "splits reused", ""),
    )
    return "\n".join([*notes, summed])


def warnings(
    params: ExtractParams, summary: splits.Summary, counts: SplitCounts, silent: set[str], fallback: list[str]
) -> Iterator[str]:
    """What people may not have meant: files without a rule, without text, or in another encoding."""
    if counts.structured_files:
        yield (
            f"note: {counted(counts.structured_files, 'file')} without a rule (docs/formats.md): each CSV file is a "
            "document, and each string of the others"
        )
        if found := find_conversations(params, raw_paths(summary)):
            yield f"warning: {found}"
    if silent:
        yield (
            f"warning: {counted(len(silent), 'file')} without text, of which nothing was rejected, such as "
            f"{min(silent)}: `{_preview_of(min(silent), params)}` shows why"
        )
    if fallback:
        yield (
            f"warning: {counted(counts.fallback_encoded_files, 'file')} not in UTF-8, and read as "
            f"{params.fallback_encoding} (fallback_encoding), such as {fallback[0]}: see with "
            f"`{_preview_of(fallback[0], params)}` whether the text looks right"
        )


def raw_paths(summary: splits.Summary) -> Iterator[str]:
    """Of the files in all splits; that of a file in parts comes once for each."""
    return (file.path for split in summary.splits for file in read_manifest(split))


def read_manifest(split: splits.Split) -> list[splits.RawFile]:
    """The raw files of a split, and parts of them."""
    return splits.read_manifest(splits.SPLITS / split.manifest, split.digest)


def find_conversations(params: ExtractParams, paths: Iterable[str]) -> str | None:
    """Names a file of JSON without a rule that begins with a conversation, and the rule for those beside it.

    Of the first files alone: there may be a million. The rule is for one directory, as others may have documents.
    """
    import pyarrow as pa

    lines = (path for path in paths if (found := suffixes.find(path)) and found[0] in ("json", "jsonl"))
    for path in islice((path for path in lines if not rules.find(params.records, path)), NUM_PRINTED):
        suffix = path[-len(suffixes.ending(path)) :]
        file = os.path.join(params.raw_dir, path)
        with suppress(OSError, ValueError, RecursionError), pa.input_stream(file) as raw:  # by its suffix decompressed
            text = raw.read(1 << 20).decode("utf-8-sig", "ignore")
            record, _ = json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))  # the first line, or of a list
            for name, value in record.items() if isinstance(record, dict) else ():
                first = value[0] if value and isinstance(value, list) else None
                for keys, more in ({"role", "content"}, ""), ({"from", "value"}, ", role: from, content: value"):
                    if isinstance(first, dict) and keys <= first.keys():
                        directory, *below = Path(path).parts
                        files = f"{directory}/**/*" * bool(below) or "*"
                        messages = f"$.{name}" if name.isidentifier() else json.dumps(f"$['{name}']")
                        more += ", system: $.system" * isinstance(record.get("system"), str)
                        rule = f'{{files: "{files}{suffix}", messages: {messages}{more}}}'
                        remedy = f"add to records: {rule}" if params.records else f"set records: [{rule}]"
                        return printable(f"{path} has conversations, whose strings are separate documents: {remedy}")
    return None


def _preview_of(path: str, params: ExtractParams) -> str:
    """The command that shows what becomes of a raw file."""
    return f"python -m stages.extract --preview {shlex.quote(f'{params.raw_dir}/{path}')}"


def find_silent(results: Iterable[SplitResult]) -> set[str]:
    """The files of which no part has text."""
    return {path for result in results for path in result.silent} - {path for result in results for path in result.fit}


def key(manifest_digest: str, params: ExtractParams, limits: Limits, code_digest: str) -> str:
    """The digest of everything that decides the result of a split: its files, the parameters and the code.

    It leaves out where the raw files are, as the manifest has their digests, and how many may be rejected.
    """
    decisive = {name: getattr(params, name) for name in ("fallback_encoding", "min_chars")}
    decisive["records"] = [dataclasses.asdict(rule) for rule in params.records or ()]
    return publish.sha256_json(["extract", manifest_digest, decisive, dataclasses.asdict(limits), code_digest])


def extract_split(task: SplitTask) -> SplitResult:
    """Write the shard of one split, or fetch it from the store."""
    if found := task.store.fetch(task.key, task.shard):
        shard = found.shard._replace(filename=task.shard.name)
        return dataclasses.replace(found, shard=shard, is_reused=True)
    result = read_files(read_manifest(task.split), task.shard, task.params, task.limits)
    if not result.changed:  # the key has the digests of the files as organized, and these are others
        task.store.put(task.key, task.shard, result.shard.sha256, result)
    return result


class _Rejections:
    """What cannot be read of the current file, or of a part of it."""

    def __init__(self) -> None:
        self.begin("", 0)

    def begin(self, path: str, most: int) -> None:
        """What follows is of a file from its beginning: list at most so many. `path` is printable."""
        self._path, self._most = path, most
        self.reasons: Counter[str] = Counter()
        """Of all of them."""
        self.listed: list[Rejection] = []
        """The first ones."""

    def add(self, rejected: "Rejected") -> None:
        """Count it, and list it if there is room: a JSON Lines file in a wrong format has millions."""
        self.reasons[rejected.reason] += 1
        if len(self.listed) < self._most:
            self.listed.append(Rejection(self._path, rejected.position, rejected.reason, rejected.detail))


def read_files(files: Iterable[splits.RawFile], path: Path, params: ExtractParams, limits: Limits) -> SplitResult:
    """Write the strings of some raw files, or of parts of them, into a shard."""
    from stages.formats import readers
    from stages.formats.raw_content import UTF_8, Changed, Rejected, Unreadable
    from stages.formats.records import Records
    from stages.formats.writer import TextWriter
    from stages.work import arrow

    counts = SplitCounts()
    rejected: list[RejectedFile] = []
    changed: list[str] = []
    fit: list[str] = []
    silent: list[str] = []
    fallback: list[str] = []
    of_rules: dict[int, Records] = {}
    rejections = _Rejections()
    num_listed = 0  # of all files
    with paused_collector(), arrow.StreamWriter(path, params.features) as stream:
        writer = TextWriter(stream, params.min_chars, rejections.add, limits)

        def read(encoding: str) -> Unreadable | None:
            """Add the strings of the current file; none where it is not in this encoding, or is damaged."""
            rejections.begin(name, most)
            writer.begin_file()
            if records:
                records.begin(name)
            try:
                readers.read(params.raw_dir, file, encoding, limits, writer, records)
            except Rejected as reason:
                writer.reject(reason)
            except Changed:  # continue: one run finds all files that changed
                changed.append(name)
            except Unreadable as problem:
                writer.undo()
                if records:
                    records.undo()
                return problem
            return None

        for file in files:
            name = printable(file.path)
            start = file.part.start if file.part else 0
            is_first = start == 0  # each file is counted once, with its first part
            counts.files += is_first
            records = None
            if found := rules.find(params.records, file.path):
                index, rule = found
                if index not in of_rules:
                    of_rules[index] = Records(rule, writer, params.min_chars, limits)
                records = of_rules[index]
                records.counts.files += is_first
            elif rules.has_records(file.path):
                counts.structured_files += is_first

            most = min(limits.num_listed, limits.most_listed - num_listed)
            problem = read(UTF_8)
            details = [problem.detail] if problem else []
            if problem and problem.is_encoding and params.fallback_encoding:
                problem = read(params.fallback_encoding)
                if problem:
                    details.append(problem.detail)
                else:
                    counts.fallback_encoded_files += 1
                    if len(fallback) < limits.num_listed:
                        fallback.append(name)
            if problem:
                rejections.begin(name, most)  # without what was rejected before the problem was found
                rejections.add(Rejected(problem.reason, "; ".join(details)))

            counts.rejected += rejections.reasons
            if file.part and writer.has_text:
                fit.append(name)
            elif not (writer.has_text or rejections.reasons):
                silent.append(name)
            if rejections.reasons:
                rejected.append(RejectedFile(name, start, rejections.listed))
                num_listed += len(rejections.listed)
        shard = writer.close()
    counts.records, counts.strings = writer.records, shard.rows
    counts.characters, counts.short_strings = writer.characters, writer.short_strings
    of_records = {index: records.counts for index, records in of_rules.items()}
    return SplitResult(shard, counts, of_records, rejected, changed, fit, silent, fallback)


def preview(file: Path, params: ExtractParams) -> str:
    """What becomes of a raw file, as text: its first rows, and what has none. It may be given below `raw_dir`.

    Raises:
        StageError: it is not below `raw_dir`, is not read by its name, or changes.
    """
    from stages.work import arrow

    path = os.path.relpath(file if file.exists() else Path(params.raw_dir, file), params.raw_dir)
    if not Path(params.raw_dir, path).exists():
        raise StageError(f"there is no {file}, here or below {params.raw_dir}")
    if path.startswith("..") or not Path(params.raw_dir, path).is_file():
        raise StageError(f"{file} is not a file below {params.raw_dir}: name one, such as {params.raw_dir}/a.jsonl")
    if not (suffix := suffixes.find(path)):
        compressed = " or ".join(suffixes.COMPRESSIONS)
        raise StageError(
            f"{file} is not read: its name ends in none of {', '.join(suffixes.FORMATS)} "
            f"(and {compressed}, but not after {', '.join(suffixes.TABLES)}): rename it if it has this format"
        )
    found = rules.find(params.records, path)
    unit = "the file" if suffix[0] in ("text", "csv", "tsv") else "each string"
    with tempfile.TemporaryDirectory() as directory:
        shard = Path(directory, "rows")
        raw = splits.RawFile(path, *tree.measure(Path(params.raw_dir, path)))
        result = read_files([raw], shard, params, LIMITS)
        if result.changed:
            raise StageError(f"{file} changes while it is read: try again when it is complete")
        rows = (
            (column, text) for texts, column in arrow.read_rows(shard) for text in texts[:NUM_PREVIEWED].to_pylist()
        )
        shown = [_show(number, *row) for number, row in enumerate(islice(rows, NUM_PREVIEWED), 1)]
    return "\n".join(
        [
            f"{printable(path)}: " + (f"records.{found[0]}" if found else f"no rule: {unit} is a document"),
            *_skipped(printable(path)),
            *[f"it is not UTF-8: read as {params.fallback_encoding} (fallback_encoding)"] * bool(result.fallback),
            *shown,
            counted(result.counts.strings, "row")
            + ", as it has no text" * bool(result.silent)
            + f", of {params.min_chars} characters or more" * (params.min_chars > 1),
            *map(str, join_parts(result.rejected, NUM_PREVIEWED)),
            *(count_rules(params.records, [result])[found[0]].describe() if found else ()),
            *filter(None, [find_conversations(params, [path])]),
        ]
    )


def _skipped(path: str) -> list[str]:
    """A line that says why `organize` has skipped a raw file; none where it has not, or has not run."""
    try:
        summary = splits.read_summary(splits.SPLITS)
    except StageError:
        return []
    reasons = {item.path: item.reason for item in summary.passed_over}
    names = [path, *(f"{above}/" for above in Path(path).parents)]
    return [f"organize skips it: {reasons[name]}" for name in names if name in reasons]


def _show(number: int, column: int, text: str) -> str:
    if column == rules.MESSAGES:
        return f"--- {number}: a conversation\n{json.dumps(json.loads(text), indent=2, ensure_ascii=False)}"
    more = f"... ({len(text)} characters)" * (len(text) > LONGEST_PREVIEWED)
    return f"--- {number}: a document\n{text[:LONGEST_PREVIEWED]}{more}"


def count_rules(given: Sequence[Rule] | None, results: Iterable[SplitResult]) -> list[RuleCounts]:
    """What became of the records under each rule."""
    return [
        RuleCounts.of(rule, [result.of_rules[index] for result in results if index in result.of_rules])
        for index, rule in enumerate(given or ())
    ]


def join_parts(rejected: Iterable[RejectedFile], num_listed: int) -> list[Rejection]:
    """The rejections of all files, sorted by path and position, at most `num_listed` of each."""
    in_order = sorted(rejected, key=lambda file: (file.path, file.start))
    return [
        rejection
        for _, parts in groupby(in_order, key=lambda file: file.path)
        for rejection in islice(chain.from_iterable(part.rejections for part in parts), num_listed)
    ]


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
