"""The interface between a format and the rest of the pipeline: where strings go, and where in a file each is from."""

from collections.abc import Sequence
from typing import BinaryIO, Protocol

from stages.corpus.limits import LIMITS, Limits
from stages.corpus.source import Rejected


class Sink(Protocol):
    """Receives what a format reads, record by record."""

    keep_source: bool
    """Whether `add` needs the place of each string."""

    def add(self, strings: list[str], places: Sequence[str] = ()) -> None:
        """Add strings of the current record, in order; a record may need several calls.

        `places` has the place of each string in its file, if `keep_source` and if the string is not the entire file.
        """

    def add_text(self, stream: BinaryIO, size: int) -> None:
        """Add a string of any length to the current record: an entire file of `size` bytes, as a stream of UTF-8."""

    def end(self) -> None:
        """The current record is complete: keep its strings."""

    def add_json(self, record: bytes) -> None:
        """Add a complete record for which `json.is_document` holds, and keep its strings; not if `keep_source`."""

    def drop(self) -> None:
        """Drop the strings of the current record. Other records are not affected."""

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current record and report why."""


class Place:
    """Where a reader is in a file: the number of the record, from 1, and a JSON pointer into it (RFC 6901).

    Of a place that is too long, the end is missing: its memory is bounded, however long its keys are.
    """

    def __init__(self, record: int = 1, limits: Limits = LIMITS) -> None:
        self.record = record
        self._longest = limits.longest_place
        self._length = 0  # characters of the steps
        self._steps: list[str] = []  # of each open collection
        self._indexes: list[int] = []

    def __str__(self) -> str:
        """Such as `1/key/0`."""
        return "/".join((str(self.record), *self._steps))

    @property
    def is_too_long(self) -> bool:
        """Whether the place is too long to be repeated for each string."""
        return self._length + len(self._steps) > self._longest  # a slash before each step

    def rejected(self, line: int) -> Rejected:
        """Why a record with a string at a place that is too long cannot be kept."""
        detail = f"a string whose place has more than {self._longest} characters: set keep_source to false"
        return Rejected("place too long", detail, f"line {line}")

    def enter(self) -> None:
        """A list or map begins."""
        self._steps.append("")
        self._indexes.append(-1)

    def leave(self) -> None:
        """A list or map ends."""
        self._length -= len(self._steps.pop())
        self._indexes.pop()

    def item(self) -> None:
        """The next item of a list begins. Outside of any list, nothing changes."""
        if self._indexes:
            self._indexes[-1] += 1
            self._replace(str(self._indexes[-1]))

    def key(self, key: str) -> None:
        """The next key of a map."""
        room = max(0, self._longest + 1 - self._length + len(self._steps[-1]))
        # `~` first: otherwise the tilde of `~1` would be escaped again.
        self._replace(key[:room].replace("~", "~0").replace("/", "~1"))

    def _replace(self, step: str) -> None:
        self._length += len(step) - len(self._steps[-1])
        self._steps[-1] = step
