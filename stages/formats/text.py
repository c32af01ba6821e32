"""Plain text, Markdown, CSV: the entire file is one string, exactly as it is."""

from stages.formats.source import Source
from stages.formats.writer import TextWriter


def read(source: Source, sink: TextWriter) -> None:
    """Put the content into `sink` as one record of one string."""
    sink.add_text(source.stream(), source.utf8_size)
    sink.end()
