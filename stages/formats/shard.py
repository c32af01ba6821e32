"""The raw files of a split become a shard of the corpus."""

import codecs
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from stages.base.dataset import Shard
from stages.base.names import printable
from stages.base.process import paused_collector
from stages.formats import rules
from stages.formats.limits import Limits
from stages.formats.rules import RecordCounts, Rule, RuleCounts
from stages.splits.manifests import RawFile

if TYPE_CHECKING:
    from stages.formats.raw_content import Rejected, Unreadable
    from stages.formats.records import Records
    from stages.work.arrow import StreamWriter

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
class ReadParams:
    """What decides the text of a raw file."""

    fallback_encoding: Annotated[str | None, AfterValidator(_encoding)]
    """Encoding of files that are not UTF-8 and have no byte order mark. null: they are rejected."""
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
    """As in `Metrics` of the stage, like the three before it."""
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


def read_files(files: Iterable[RawFile], path: Path, params: ReadParams, limits: Limits) -> SplitResult:
    """Write the strings of some raw files, or of parts of them, into a shard."""
    from stages.work import arrow

    with paused_collector(), arrow.StreamWriter(path, params.features) as stream:
        split = _Split(stream, params, limits)
        for file in files:
            split.add(file)
        return split.close()


class _Split:
    """What was read of a split until now."""

    def __init__(self, stream: "StreamWriter", params: ReadParams, limits: Limits) -> None:
        # Here, not above: pyarrow takes a while, and --help does not need it.
        from stages.formats.writer import TextWriter

        self._params, self._limits = params, limits
        self._rejections = _Rejections()
        self._writer = TextWriter(stream, params.min_chars, self._rejections.add, limits)
        self._of_rules: dict[int, Records] = {}
        self._counts = SplitCounts()
        self._rejected: list[RejectedFile] = []
        self._num_listed = 0  # of their rejections
        self._changed: list[str] = []
        self._fit: list[str] = []
        self._silent: list[str] = []
        self._fallback: list[str] = []

    def add(self, file: RawFile) -> None:
        """Read a file, or a part of one, in UTF-8, or else in `fallback_encoding`."""
        from stages.formats.raw_content import UTF_8, Rejected

        name, encoding = printable(file.path), self._params.fallback_encoding
        start = file.part.start if file.part else 0
        records = self._records_of(file, is_first=start == 0)
        problem = self._read(file, UTF_8, records)
        details = [problem.detail] if problem else []
        if problem and problem.is_encoding and encoding:
            problem = self._read(file, encoding, records)
            if problem:
                details.append(problem.detail)
            else:
                self._counts.fallback_encoded_files += 1
                if len(self._fallback) < self._limits.num_listed:
                    self._fallback.append(name)
        if problem:
            self._begin(name)  # without what was rejected before the problem was found
            self._rejections.add(Rejected(problem.reason, "; ".join(details)))

        found = self._rejections
        self._counts.rejected += found.reasons
        if file.part and self._writer.has_text:
            self._fit.append(name)
        elif not (self._writer.has_text or found.reasons):
            self._silent.append(name)
        if found.reasons:
            self._rejected.append(RejectedFile(name, start, found.listed))
            self._num_listed += len(found.listed)

    def _records_of(self, file: RawFile, is_first: bool) -> "Records | None":
        """What reads the records of a file under a rule; None: it has none. A file is counted with its first part."""
        from stages.formats.records import Records

        self._counts.files += is_first
        found = rules.find(self._params.records, file.path)
        if not found:
            self._counts.structured_files += is_first and rules.has_records(file.path)
            return None
        index, rule = found
        if index not in self._of_rules:
            self._of_rules[index] = Records(rule, self._writer, self._params.min_chars, self._limits)
        self._of_rules[index].counts.files += is_first
        return self._of_rules[index]

    def _read(self, file: RawFile, encoding: str, records: "Records | None") -> "Unreadable | None":
        """Add the strings of a file; none where it is not in this encoding, or is damaged."""
        from stages.formats import readers
        from stages.formats.raw_content import Changed, Rejected, Unreadable

        name = printable(file.path)
        self._begin(name)
        self._writer.begin_file()
        if records:
            records.begin(name)
        try:
            readers.read(self._params.raw_dir, file, encoding, self._limits, self._writer, records)
        except Rejected as reason:
            self._writer.reject(reason)
        except Changed:  # continue: one run finds all files that changed
            self._changed.append(name)
        except Unreadable as problem:
            self._writer.undo()
            if records:
                records.undo()
            return problem
        return None

    def _begin(self, name: str) -> None:
        self._rejections.begin(name, min(self._limits.num_listed, self._limits.most_listed - self._num_listed))

    def close(self) -> SplitResult:
        """End the shard."""
        counts, writer, shard = self._counts, self._writer, self._writer.close()
        counts.records, counts.strings = writer.records, shard.rows
        counts.characters, counts.short_strings = writer.characters, writer.short_strings
        of_rules = {index: records.counts for index, records in self._of_rules.items()}
        return SplitResult(
            shard, counts, of_rules, self._rejected, self._changed, self._fit, self._silent, self._fallback
        )


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
