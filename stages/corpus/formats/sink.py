"""The interface between a format and the rest of the pipeline: where strings go, and where in a file each is from."""

from collections.abc import Sequence
from typing import Protocol

from stages.corpus.source import Rejected


class Sink(Protocol):
    """Receives what a format reads, record by record."""

    keep_source: bool
    """Whether `add` needs the place of each string."""

    def add(self, strings: list[str], places: Sequence[str] = ()) -> None:
        """Add strings of the current record, in order; a record may need several calls.

        `places` has the place of each string in its file, if `keep_source` and if the string is not the entire file.
        """

    def end(self) -> None:
        """The current record is complete: keep its strings."""

    def add_json(self, record: bytes) -> None:
        """Add a complete record for which `json.is_document` holds, and keep its strings; not if `keep_source`."""

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current record and report why. Other records are not affected."""


class Place:
    """Where a reader is in a file: the number of the record, from 1, and a JSON pointer into it (RFC 6901)."""

    def __init__(self, record: int = 1) -> None:
        self.record = record
        self._steps: list[str] = []  # of each open collection
        self._indexes: list[int] = []

    def __str__(self) -> str:
        """Such as `1/key/0`."""
        return "/".join((str(self.record), *self._steps))

    def enter(self) -> None:
        """A list or map begins."""
        self._steps.append("")
        self._indexes.append(-1)

    def leave(self) -> None:
        """A list or map ends."""
        self._steps.pop()
        self._indexes.pop()

    def item(self) -> None:
        """The next item of a list begins. Outside of any list, nothing changes."""
        if self._indexes:
            self._indexes[-1] += 1
            self._steps[-1] = str(self._indexes[-1])

    def key(self, key: str) -> None:
        """The next key of a map."""
        # `~` first: otherwise the tilde of `~1` would be escaped again.
        self._steps[-1] = key.replace("~", "~0").replace("/", "~1")
