"""The interface between a format and the rest of the pipeline."""

from typing import BinaryIO, Protocol

from stages.corpus.source import Rejected


class Sink(Protocol):
    """Receives what a format reads, record by record."""

    def add(self, strings: list[str]) -> None:
        """Add strings of the current record, in order; a record may need several calls."""

    def add_text(self, stream: BinaryIO, size: int) -> None:
        """Add a string of any length to the current record: an entire file of `size` bytes, as a stream of UTF-8."""

    def end(self) -> None:
        """The current record is complete: keep its strings."""

    def add_json(self, record: bytes) -> None:
        """Add a complete record for which `json.is_document` holds, and keep its strings."""

    def drop(self) -> None:
        """Drop the strings of the current record. Other records are not affected."""

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current record and report why."""
