"""Files that are made to exhaust the memory of what reads them, and the memory that `extract` needs for them.

Each file is generated. Its size is a number of units: of 1 MiB to try the limits of the stage, and of less to try
smaller limits in seconds (`limits_of`).

    python -m tests.hostile all 65536    # names, bytes of a unit: prints the peak in MiB, and what was rejected
    python -m tests.hostile large_key.json,long.txt 1048576 min_chars
"""

import codecs
import gzip
import itertools
import json
import os
import resource
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import zstandard

from stages.formats.limits import LIMITS, Limits
from stages.formats.rules import Rule

MIB = 1 << 20
Pieces = Iterator[bytes]

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "min_chars": {"min_chars": 3},
    "no_fallback": {"fallback_encoding": None},
    "records": {"records": [Rule(files="**", text="$")]},
    "whole": {"records": [Rule(files="**", each="$", messages=[{"role": "user", "content": "$..*"}])]},
}
"""Parameters of `extract` that differ from `PARAMS`."""


def limits_of(unit: int) -> Limits:
    """The limits of the stage, in which a MiB is only `unit` bytes."""
    sizes = ["chunk", "batch", "longest_document", "longest_string", "longest_record", "most_values"]
    sizes += ["deepest", "table"]
    values = {name: getattr(LIMITS, name) * unit // MIB for name in sizes}
    return replace(LIMITS, **values)


def fill(size: int, begin: bytes, item: bytes, end: bytes = b"") -> Pieces:
    """About `size` bytes of `item`, between a beginning and an end."""
    yield begin
    number = size // len(item)
    several = max(1, min(number, 65536 // len(item)))
    yield from itertools.repeat(item * several, number // several)
    yield end


def lines(number: int, line: Callable[[], Pieces]) -> Pieces:
    """So many lines."""
    for _ in range(number):
        yield from line()
        yield b"\n"


def nested(depth: int, begin: bytes, end: bytes) -> Pieces:
    """Collections within each other, each with a string."""
    yield begin * depth
    yield b'"deep"'
    yield end * depth


def text_of(encoding: str, size: int) -> Pieces:
    """About `size` bytes of Cyrillic text with a byte order mark."""
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-32-be": codecs.BOM_UTF32_BE}[encoding]
    return fill(size, mark, "Ж ".encode(encoding))


def gzipped(pieces: Pieces) -> Pieces:
    """The pieces as one member."""
    compressor = zlib.compressobj(wbits=31)
    yield from map(compressor.compress, pieces)
    yield compressor.flush()


def zstandardized(pieces: Pieces, window_log: int) -> Pieces:
    """The pieces as one frame."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    yield from map(compressor.compress, pieces)
    yield compressor.flush()


def sparse(size: int) -> Callable[[Path], None]:
    """A file of NUL bytes that uses no disk space."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return write


def table(num_rows: int, size: int, **options: Any) -> Callable[[Path], None]:
    """A table of equal texts of so many bytes in one row group or record batch."""

    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if child := os.fork():  # the memory of the writer does not count
            assert os.waitpid(child, 0)[1] == 0
            return
        text = "a" * size
        if "dictionary_pagesize_limit" in options:
            indices = pa.repeat(pa.scalar(0, pa.int32()), num_rows)
            rows = pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array([text]))})
        else:
            rows = pa.table({"text": pa.repeat(text, num_rows) if num_rows > 1 else pa.array([text])})
        if path.suffix == ".parquet":
            pq.write_table(rows, path, row_group_size=num_rows, compression="zstd", **options)
        else:
            with pa.ipc.new_stream(path, rows.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
                writer.write_table(rows)
        os._exit(0)

    return write


File = Callable[[int], "Pieces | Callable[[Path], None]"]

HOSTILE: dict[str, File] = {
    # JSON that fits into memory: one string ...
    "line_feeds.json": lambda unit: fill(60 * unit, b'["', rb"\n", b'"]'),
    "backslashes.json": lambda unit: fill(60 * unit, b'["', rb"\\", b'"]'),
    "quotes.json": lambda unit: fill(60 * unit, b'["', rb"\"", b'"]'),
    "cyrillic_escapes.json": lambda unit: fill(60 * unit, b'["', rb"\u0416", b'"]'),
    "surrogate_pairs.json": lambda unit: fill(60 * unit, b'["', rb"\ud83d\ude00", b'"]'),
    "lone_surrogates.json": lambda unit: fill(60 * unit, b'["', rb"\ud83d", b'"]'),
    "emoji_and_ascii.json": lambda unit: fill(31 * unit, '["😀\\n'.encode(), b"a", b'"]'),
    "not_a_number.json": lambda unit: fill(42 * unit, b'[NaN,"', rb"\n", b'"]'),
    "open_string.json": lambda unit: fill(60 * unit, b'["', rb"\n"),
    # ... or many strings ...
    "empty_strings.json": lambda unit: fill(60 * unit, b'[""', b',""', b"]"),
    "short_strings.json": lambda unit: fill(60 * unit, b'["a"', ',"Ж","b"'.encode(), b"]"),
    "short_escapes.json": lambda unit: fill(60 * unit, b'["a"', rb',"\n"', b"]"),
    "short_keys.json": lambda unit: fill(60 * unit, b'{"":1', b',"a":"b"', b"}"),
    "not_numbers.json": lambda unit: fill(20 * unit, b"[NaN", ',"Ж"'.encode(), b"]"),
    "documents.json": lambda unit: fill(20 * unit, b"", '"Ж" '.encode()),
    "no_documents.json": lambda unit: fill(30 * unit, b"", b"1 "),
    # ... or none.
    "numbers.json": lambda unit: fill(60 * unit, b"[1", b",1", b"]"),
    "brackets.json": lambda unit: fill(60 * unit, b"", b"["),
    "depth.json": lambda unit: nested(10 * unit, b'[{"a":', b"}]"),
    "white_space.json": lambda unit: fill(60 * unit, b'["a"', b" ", b',"b"]'),
    # JSON that does not fit.
    "large_line_feeds.json": lambda unit: fill(84 * unit, b'["a","', rb"\n", b'","b"]'),
    "large_cyrillic_escapes.json": lambda unit: fill(84 * unit, b'["', rb"\u0416", b'"]'),
    "large_emoji_and_ascii.json": lambda unit: fill(84 * unit, '["😀'.encode(), b"a", b'"]'),
    "large_string.json": lambda unit: fill(1000 * unit, b'["', b"a", b'"]'),
    "large_key.json": lambda unit: fill(300 * unit, b'{"', b"a", b'": "b"}'),
    "large_number.json": lambda unit: fill(300 * unit, b'["a",', b"1", b"]"),
    "large_white_space.json": lambda unit: fill(300 * unit, b'["a"', b" \n", b',"b"]'),
    "large_brackets.json": lambda unit: fill(300 * unit, b"", b"["),
    "large_short_strings.json": lambda unit: fill(70 * unit, b'["a"', ',"Ж","b"'.encode(), b"]"),
    "large_list_of_lists.json": lambda unit: fill(70 * unit, b"[[]", b",[]", b"]"),
    "large_object.json": lambda unit: fill(70 * unit, b'{"":"a"', ',"Ж":"b"'.encode(), b"}"),
    "large_list_of_objects.json": lambda unit: fill(70 * unit, b"[0", b',{"a":["b",{}],"c":"d"}', b"]"),
    # Long places.
    "strings_at_each_level.json": lambda unit: fill(20_000 * 4 * unit // MIB, b"", b'["a",'),
    "strings_at_depth.json": lambda unit: itertools.chain(
        fill(15_000 * unit // MIB, b"", b"["), fill(2_000, b'"a"', b',"a"'), fill(15_000 * unit // MIB, b"", b"]")
    ),
    "long_key.json": lambda unit: itertools.chain(
        fill(unit, b'{"', b"k", b'": ["b"'), fill(2300 * 4, b"", b',"b"', b"]}")
    ),
    "long_keys.json": lambda unit: itertools.chain(
        *(fill(unit // 20, b'{"', b"k", b'":') for _ in range(1000)), [b'"a"' + b"}" * 1000]
    ),
    # JSON Lines.
    "one_line.jsonl": lambda unit: fill(84 * unit, b'["a"', b',"b"', b"]"),
    "one_line_of_escapes.jsonl": lambda unit: fill(84 * unit, b'["', rb"\n", b'"]'),
    "one_string.jsonl": lambda unit: fill(300 * unit, b'["', b"a", b'"]\n["b"]\n'),
    "no_line_end.jsonl": lambda unit: fill(300 * unit, b"", b"a"),
    "long_lines.jsonl": lambda unit: lines(4, lambda: fill(30 * unit, b'["', b"a", b'"]')),
    "short_lines.jsonl": lambda unit: fill(8 * unit, b"", b'"a"\n'),
    "not_numbers.jsonl": lambda unit: fill(4 * unit, b"", '[NaN,"Ж"]\n'.encode()),
    "empty_lines.jsonl": lambda unit: fill(2 * unit, b"", b"\n"),
    "bad_lines.jsonl": lambda unit: fill(2 * unit, b"", b"x\n"),
    # Text.
    "long.txt": lambda unit: sparse(2048 * unit),
    "emoji_and_ascii.txt": lambda unit: fill(60 * unit, "😀".encode(), b"a"),
    "large_emoji_and_ascii.txt": lambda unit: fill(300 * unit, "😀".encode(), b"a"),
    "large_cp1252.txt": lambda unit: fill(300 * unit, b"", b"\x80"),
    "large_utf-16.txt": lambda unit: text_of("utf-16-le", 300 * unit),
    "large_utf-32.csv": lambda unit: text_of("utf-32-be", 300 * unit),
    # Other encodings, in files that fit into memory.
    "cp1252.txt": lambda unit: fill(60 * unit, b"", b"\x80"),
    "utf-32.txt": lambda unit: text_of("utf-32-be", 60 * unit),
    "utf-16.yaml": lambda unit: text_of("utf-16-le", 60 * unit),
    "no_mark.txt": lambda unit: fill(300 * unit, b"", "a".encode("utf-16-le")),
    # YAML: what libyaml holds in memory.
    "plain.yaml": lambda unit: fill(31 * unit, "a: 😀".encode(), b"a"),
    "double_quoted.yaml": lambda unit: fill(31 * unit, b'"', b"\\n", b'"'),
    "line_separators.yaml": lambda unit: fill(31 * unit, b"a: 1", "\u2028?".encode()),
    "line_breaks.yaml": lambda unit: fill(31 * unit, b"a: b", b"\n", b"  c"),
    "folded.yaml": lambda unit: fill(31 * unit, b">\n", b" a\n"),
    "key.yaml": lambda unit: fill(31 * unit, b"? ", b"a", b"\n: b"),
    "tag.yaml": lambda unit: fill(31 * unit, b"!", b"a", b" b"),
    "anchor.yaml": lambda unit: fill(300 * unit, b"&", b"a", b" b"),
    "comment.yaml": lambda unit: fill(300 * unit, b"#", b"a", b"\nb"),
    "large_literal.yaml": lambda unit: fill(300 * unit, b"a: |\n", b" a\n"),
    "short_strings.yaml": lambda unit: fill(2 * unit, b"[b", ",Ж".encode(), b"]"),
    "aliases.yaml": lambda unit: fill(2 * unit, b"[&a b", b",*a", b"]"),
    "documents.yaml": lambda unit: fill(2 * unit, b"", "--- Ж\n".encode()),
    "directives.yaml": lambda unit: fill(4 * unit, b"", b"%TAG !a! b\n", b"--- c"),
    "long_key_of_many.yaml": lambda unit: itertools.chain(
        fill(unit, b"? ", b"k", b"\n: [b"), fill(2300 * 2, b"", b",b", b"]")
    ),
    "long_keys.yaml": lambda unit: itertools.chain(
        *(fill(unit // 20, b"{? ", b"k", b" : ") for _ in range(900)), [b"a" + b"}" * 900]
    ),
    # Tables.
    "row_group.parquet": lambda unit: table(unit, 1000),
    "page.parquet": lambda unit: table(
        1, 1000 * unit, use_dictionary=False, data_page_size=1 << 31, write_statistics=False
    ),
    "dictionary.parquet": lambda unit: table(50, 10 * unit, dictionary_pagesize_limit=1 << 30),
    "batch.arrow": lambda unit: table(600 * unit // 1000, 1000),
    "bomb.arrow": lambda unit: table(1, 1000 * unit, compression="zstd"),
    # Rows.
    "long_row.csv": lambda unit: fill(84 * unit, b"a,b\n", b"c"),
    "many_columns.tsv": lambda unit: fill(84 * unit, b"a", b"\tb"),
    "open_quote.csv": lambda unit: fill(84 * unit, b'a\n"', b"b\n"),
    # Compressed files.
    "bomb.txt.gz": lambda unit: gzipped(fill(1000 * unit, b"", b"a")),
    # JSON, which libyaml refuses.
    "reread.yaml": lambda unit: fill(20 * unit, b'\t["', "😀\\n".encode(), b'"]'),
    "reread_many.yaml": lambda unit: fill(20 * unit, b"\t[0", ',"Ж"'.encode(), b"]"),
    "bomb.yaml.gz": lambda unit: gzipped(fill(1000 * unit, b"a: ", b"a")),
    "bomb.json.zst": lambda unit: zstandardized(fill(1000 * unit, b'["', b"a", b'"]'), 20),
    "window.jsonl.zst": lambda unit: zstandardized(
        fill(300 * unit, b"", b'"' + b"a" * 99 + b'"\n'), (128 * unit).bit_length() - 1
    ),
    "larger_window.txt.zst": lambda unit: zstandardized(fill(300 * unit, b"", b"a"), 28),
    "empty_members.jsonl.gz": lambda unit: fill(unit, b"", gzip.compress(b"")),
    "empty_frames.jsonl.zst": lambda unit: fill(unit // 2, b"", zstandard.ZstdCompressor().compress(b"")),
}
"""The content of each file, in pieces, or a function that writes it, given the size of a unit in bytes."""


def write(name: str, directory: Path, unit: int) -> None:
    """Write a hostile file below a directory, which may have been missing."""
    directory.mkdir(parents=True, exist_ok=True)
    content = HOSTILE[name](unit)
    if callable(content):
        content(directory / name)
        return
    with (directory / name).open("wb") as file:
        file.writelines(content)


def peak() -> int:
    """Bytes that this process has held at most since the last `reset_peak`."""
    # Not `ru_maxrss`, which is at least that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reset_peak() -> None:
    """Let `peak` begin at the memory that this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def extract_one(name: str, unit: int, option: str, limits: Limits) -> dict[str, Any]:
    """Organize and extract a hostile file beside a good one, in the current directory; return `data/extract.json`."""
    from stages.extract import ExtractRuntime, extract
    from tests.corpus import PARAMS, in_this_process, organize_raw

    shutil.rmtree("data", ignore_errors=True)
    write(name, Path("data/raw"), unit)
    Path("data/raw/sibling.json").write_text('{"text": "sibling"}')  # of which a rule makes a row
    organize_raw(num_splits=1)
    params = replace(PARAMS, max_rejected_files=1, **OPTIONS[option])
    extract(params, in_this_process(ExtractRuntime(num_workers=1, reuse_gib=0)), limits)
    metrics: dict[str, Any] = json.loads(Path("data/extract.json").read_text())
    return metrics


def main() -> None:
    """Extract some files, or all, with some or all of the options, and print a line of JSON for each."""
    names, unit, *options = sys.argv[1:]
    # This machine must survive what the limits of the stage do not prevent.
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    limits = limits_of(int(unit))
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for name in HOSTILE if names == "all" else names.split(","):
            extract_one(name, 1 << 10, "records", limits)  # imports what the file needs
            # A fork holds nothing that was left of the file before, in which the memory for this one would find room.
            if child := os.fork():
                assert os.waitpid(child, 0)[1] == 0, name
                continue
            extract_one(name, 1 << 10, "records", limits)  # reads the pages of the libraries that it needs
            reset_peak()
            before = peak()
            for option in options or OPTIONS:
                reset_peak()
                metrics = extract_one(name, int(unit), option, limits)
                memory = {"peak": round(peak() / MIB, 1), "growth": round((peak() - before) / MIB, 1)}
                print(json.dumps({"name": name, "option": option, **memory, **metrics}), flush=True)
            os._exit(0)
        os.chdir("/")


if __name__ == "__main__":
    main()
