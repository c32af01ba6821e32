"""The interface between a format and the rest of the pipeline."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from stages.corpus.source import Rejected, Source


class Sink(Protocol):
    """Where a format puts what it reads, document by document."""

    def add(self, strings: list[str]) -> None:
        """Take strings of the current document, in order; they may come in several calls."""

    def end(self) -> None:
        """The current document is whole: keep its strings."""

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current document and report why; the documents around it are unharmed."""


class Format(NamedTuple):
    """A kind of file."""

    suffixes: tuple[str, ...]
    """In lower case, with their dot, without that of a compression."""
    read: Callable[[Source, Sink], None]
    """Put all strings of a source into a sink. Raises `Rejected` where nothing more can be read."""
