"""Plain text, Markdown, CSV: the entire file is one string, exactly as it is."""

from stages.corpus.formats.sink import Sink
from stages.corpus.source import Source


def read(source: Source, sink: Sink) -> None:
    """Put the content into `sink` as one record of one string."""
    sink.add_text(source.stream(), source.utf8_size)
    sink.end()
