"""JSON Lines: each line is a document; a line that cannot be read costs the others nothing."""

import io

from stages.corpus.formats import json
from stages.corpus.formats.base import Sink
from stages.corpus.source import LONGEST_STRING, Rejected, Source


def read(source: Source, sink: Sink) -> None:
    """Put the strings of each line into `sink`."""
    stream, number = source.stream(), 0
    while line := stream.readline(LONGEST_STRING):
        number += 1
        if len(line) == LONGEST_STRING:
            raise Rejected("document too long", f"a line has more than {LONGEST_STRING} bytes", f"line {number}")
        if not sink.keep_source and json.is_document(line):
            sink.add_json(line)
            continue
        try:
            json.scan(io.BytesIO(line), sink, number)
        except Rejected as rejected:
            sink.reject(Rejected(rejected.reason, rejected.detail, f"line {number}"))
