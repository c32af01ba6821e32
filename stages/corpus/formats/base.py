"""The interface between a format and the rest of the pipeline."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stages.corpus.source import Rejected, Source


class Sink(Protocol):
    """Where a format puts what it reads, document by document."""

    keep_source: bool
    """Whether `add` wants to know where each string stands."""

    def add(self, strings: list[str], places: Sequence[str] = ()) -> None:
        """Take strings of the current document, in order; they may come in several calls.

        `places` says of each string where in its file it stands, if `keep_source` and if it is not all of the file.
        """

    def end(self) -> None:
        """The current document is whole: keep its strings."""

    def add_json(self, document: bytes) -> None:
        """Take a whole document that `json.is_document`, and keep its strings; not if `keep_source`."""

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current document and report why; the documents around it are unharmed."""


class Format(NamedTuple):
    """A kind of file."""

    suffixes: tuple[str, ...]
    """In lower case, with their dot, without that of a compression."""
    read: Callable[[Source, Sink], None]
    """Put all strings of a source into a sink. Raises `Rejected` where nothing more can be read."""


class Place:
    """Where a reader is in a file: the number of the document, from 1, and a JSON pointer into it (RFC 6901)."""

    def __init__(self, document: int = 1) -> None:
        self.document = document
        self._steps: list[str] = []  # of each open collection
        self._indexes: list[int] = []

    def __str__(self) -> str:
        """Such as `1/key/0`."""
        return "/".join((str(self.document), *self._steps))

    def enter(self) -> None:
        """A list or map begins."""
        self._steps.append("")
        self._indexes.append(-1)

    def leave(self) -> None:
        """A list or map ends."""
        self._steps.pop()
        self._indexes.pop()

    def item(self) -> None:
        """The next item of a list begins; outside of any, nothing."""
        if self._indexes:
            self._indexes[-1] += 1
            self._steps[-1] = str(self._indexes[-1])

    def key(self, key: str) -> None:
        """The next key of a map."""
        self._steps[-1] = key.replace("~", "~0").replace("/", "~1")
