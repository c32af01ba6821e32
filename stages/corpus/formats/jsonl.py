"""JSON Lines: each line is a record; a line that cannot be read does not affect the others."""

import io
from functools import partial

from stages.corpus.formats import json
from stages.corpus.formats.sink import Sink
from stages.corpus.source import Rejected, Source


def read(source: Source, sink: Sink) -> None:
    """Put the strings of each line into `sink`."""
    stream, limits = source.stream(), source.limits
    longest = limits.longest_string
    # With a limit: a file without line ends would fill the memory.
    for number, line in enumerate(iter(partial(stream.readline, longest), b""), source.first_line):
        if len(line) == longest:
            raise Rejected("line too long", f"a line has more than {longest} bytes", f"line {number}")
        if not sink.keep_source and json.is_document(line, limits.largest_held):
            sink.add_json(line)
            continue
        try:
            # Also for lines that are not valid: the scanner finds the position, and may still accept NaN.
            json.scan(io.BytesIO(line), sink, number, limits)
        except Rejected as rejected:
            sink.reject(Rejected(rejected.reason, rejected.detail, f"line {number}"))
