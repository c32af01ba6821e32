"""The stage `extract`: which rows text, JSON, JSON Lines and YAML become, also in other encodings, compressed, damaged,
cut into parts or too large for memory; and its outputs after changes of the files, kills and other numbers of workers.
"""

import codecs
import dataclasses
import encodings
import gc
import gzip
import io
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import datasets
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.base import publish
from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.base.publish import sha256_file
from stages.extract import ExtractParams, ExtractRuntime, extract
from stages.formats import json_format, raw_content, readers, writer, yaml_format
from stages.formats.limits import LIMITS, Limits
from stages.formats.raw_content import Rejected, Unreadable
from stages.formats.writer import TextWriter
from stages.splits import suffixes
from stages.work import arrow
from tests.corpus import (
    CORPUS,
    NOT_RECORDS,
    PARAMS,
    ListSink,
    Memory,
    check,
    content_of,
    extract_raw,
    organize_raw,
    put,
    put_large_file,
    put_slow_files,
    read_rows,
    wait_for_workers,
    write_params_of_extract,
)
from tests.project import REPO, is_alive, start_stage, wait_for

pytestmark = pytest.mark.usefixtures("empty_project")

RUNTIME = ExtractRuntime(num_workers=1, reuse_gib=1)
LINES = "".join(f'"{random.Random(number).randbytes(20).hex()}"\n' for number in range(6000)).encode()
STRINGS = LINES.decode().replace('"', "").split()


def zst(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zst}


def json_strings(text: str, batch: int = LIMITS.batch) -> list[list[str]]:
    """Those of each document."""
    sink: Any = ListSink()
    json_format.read(Memory(text, Limits(batch=batch, chunk=0)), sink)  # each document is handed on
    kept: list[list[str]] = sink.records
    return kept


def yaml_strings(text: str, chunk: int = LIMITS.chunk) -> list[str]:
    """Of all documents, without empty ones."""
    sink: Any = ListSink()
    yaml_format.read(Memory(text, Limits(chunk=chunk)), sink)
    return [string for document in sink.records for string in document if string]


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [string for child in children for string in strings_in(child)]


def refusal(read: Callable[..., object], *arguments: Any) -> str:
    """Why a reader refuses something; "" where it does not."""
    try:
        read(*arguments)
    except Rejected as rejected:
        return rejected.reason
    return ""


def read_file(path: Path, then: Callable[[], object] = lambda: None, limits: Limits = LIMITS) -> None:
    """Read a file as the stage does; `then` is called when it is open."""
    found = suffixes.find(path.name)
    assert found
    sink: Any = ListSink()
    with raw_content.RawContent(path, found[1], sha256_file(path), limits=limits) as raw:
        then()
        readers.READERS[found[0]](raw, sink)


# organize to extract


def with_byte(content: bytes, value: int) -> bytes:
    """`content` with another byte near its end."""
    place = len(content) * 9 // 10
    return content[:place] + bytes([value]) + content[place + 1 :]


def become_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def replace_file(path: Path, content: bytes) -> None:
    path.with_name("new").write_bytes(content)
    path.with_name("new").replace(path)


Change = Callable[[Path, bytes], Any]
EDITS: dict[str, Change] = {
    "truncated": lambda path, content: os.truncate(path, len(content) // 2),
    "cut off after a line": lambda path, content: os.truncate(path, content.rfind(b"\n", 0, len(content) // 2) + 1),
    "emptied": lambda path, content: os.truncate(path, 0),
    "grown": lambda path, content: path.write_bytes(content + content),
    "edited": lambda path, content: path.write_bytes(with_byte(content, content[len(content) * 9 // 10] ^ 1)),
    "not UTF-8": lambda path, content: path.write_bytes(with_byte(content, 255)),
    "no longer of its format": lambda path, content: path.write_bytes(with_byte(content, ord("]"))),
}
REPLACEMENTS: dict[str, Change] = {
    "replaced": lambda path, content: replace_file(path, content.replace(b"e", b"E")),
    "removed": lambda path, content: path.unlink(),
    "a pipe": lambda path, content: (path.unlink(), os.mkfifo(path)),
}
"""After which a process that has opened the file still reads what was organized."""
NO_LONGER_FILES: dict[str, Change] = {
    "a directory": lambda path, content: (path.unlink(), path.mkdir()),
    "a socket": lambda path, content: become_socket(path),
    "a link to a device": lambda path, content: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link to itself": lambda path, content: (path.unlink(), path.symlink_to(path)),
}


def table_of(*texts: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink, **options)
    return sink.getvalue()


def arrow_of(*texts: str) -> bytes:
    table, sink = pa.table({"text": texts}), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=500)
    return sink.getvalue()


def test_trap_05_each_file_that_is_not_as_organized_is_refused() -> None:
    """Of each format, also of a file that was cut: whatever has become of it, at once, and nothing of it is stored."""
    contents = {
        "a.txt": b"text\n" * 9, "b.jsonl": LINES, "c.jsonl": LINES[:900], "d.yaml.gz": gzip.compress(LINES),
        "e.parquet": table_of(*STRINGS, row_group_size=500), "f.arrow": arrow_of(*STRINGS),
    }  # fmt: skip
    changes = {**EDITS, **REPLACEMENTS, **NO_LONGER_FILES}
    files = [
        (f"{number:02}/{name}", name, change) for number, change in enumerate(changes.values()) for name in contents
    ]
    put({path: contents[name] for path, name, _ in files})
    organize_raw(num_splits=3)
    for path, name, change in files:
        change(Path("data/raw", path), contents[name])
    refused = rf"^{len(files)} files changed or removed after organize, the first is .*: run `dvc repro`"
    with pytest.raises(StageError, match=refused):
        extract(dataclasses.replace(PARAMS, max_rejected_files=999), RUNTIME)
    assert not CORPUS.exists()
    assert not Path("data/.reuse").exists()


@pytest.mark.parametrize("change", [*EDITS, *REPLACEMENTS])
def test_trap_05_a_file_that_changes_while_it_is_read_is_refused(change: str) -> None:
    """Wherever the reader stops. What replaces a file that is open is not read."""
    contents = {
        "a.jsonl": LINES, "a.json": LINES, "b.json": b"!\n" + LINES, "a.yaml": LINES.replace(b"\n", b"\n---\n"),
        "a.jsonl.gz": gzip.compress(LINES), "a.json.zst": zst(LINES), **({"a.txt": LINES} if change in EDITS else {}),
    }  # fmt: skip
    for name, content in contents.items():
        path = Path(name)
        path.write_bytes(content)
        with suppress(Rejected), nullcontext() if change in REPLACEMENTS else pytest.raises(raw_content.Changed):
            read_file(path, lambda: {**EDITS, **REPLACEMENTS}[change](path, content), Limits(chunk=1000))  # noqa: B023


def test_a_file_that_grows_while_it_is_read_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("a.txt")
    path.write_bytes(b"a" * 10)
    num_reads = 0

    def read_and_append(descriptor: int, size: int, read: Callable[[int, int], bytes] = os.read) -> bytes:
        nonlocal num_reads
        num_reads += 1
        with path.open("ab") as file:
            file.write(b"a" * size * (num_reads < 50))
        return read(descriptor, size)

    with pytest.raises(raw_content.Changed):
        read_file(path, lambda: monkeypatch.setattr(raw_content.os, "read", read_and_append), Limits(chunk=1))
    assert num_reads < 5


@pytest.mark.parametrize("error", [OSError, MemoryError, KeyboardInterrupt, ValueError])
def test_the_rest_of_a_large_file_is_read_only_after_an_error_that_a_change_can_cause(
    error: type[BaseException],
) -> None:
    path = Path("raw.txt")
    path.write_bytes(b"line\n" * 100_000)

    def fail() -> None:
        os.truncate(path, 10)
        raise error

    with pytest.raises(raw_content.Changed if error is ValueError else error):
        read_file(path, fail, Limits(chunk=1000))


def test_a_file_whose_size_is_not_known_is_read() -> None:
    path = Path("/proc/version")  # a regular file of 0 bytes, with content
    assert path.stat().st_size == 0
    with raw_content.RawContent(path, "", sha256_file(path)) as raw:
        assert raw.stream().read() == path.read_bytes() != b""


def test_what_cannot_be_read_to_its_end_leaves_nothing_of_its_beginning() -> None:
    whole = {
        "c.jsonl": LINES, "d.txt": LINES, "f.json": b"[" + LINES.replace(b"\n", b",") + b"1]",
        "e.yaml": b"".join(b"- " + line for line in LINES.splitlines(keepends=True)),
    }  # fmt: skip
    around = [("a.jsonl", '"before"\n"é"', ["before", "é"])]
    damaged = [(f"{name}.gz", gzip.compress(content)[:-9], []) for name, content in whole.items()]
    metrics = check(
        *(case for each in damaged for case in (*around, (*each, "damaged compression"))),
        ("z.jsonl", b'"after"\n{\n', ["after"], "invalid JSON at line 2"),
        limits=(LIMITS, Limits(chunk=1000, batch=3000)),
    )
    assert (metrics["records"], metrics["strings"], metrics["characters"]) == (9, 9, 33)
    # A byte at its end that is no UTF-8: all of it is read again.
    ends = {name: b"# \xe9" if name == "e.yaml" else b'"\xe9"' for name in whole}
    packed = {f"{name}.gz": gzip.compress(content + ends[name]) for name, content in whole.items()}
    rows = {name: STRINGS if name == "e.yaml.gz" else [*STRINGS, "é"] for name in packed}
    rows["d.txt.gz"] = [LINES.decode() + '"é"']
    for fallback in ("cp1252", None):
        again = [
            (name, content, *([rows[name]] if fallback else [[], "unknown encoding at None: utf-8: "]))
            for name, content in packed.items()
        ]
        metrics = check(
            *(case for each in again for case in (*around, each)),
            *around,
            fallback_encoding=fallback,
            limits=(LIMITS, Limits(chunk=1000, batch=3000)),
        )
        assert metrics["fallback_encoded_files"] == len(packed) * bool(fallback)
        assert metrics["characters"] == sum(map(len, read_rows()))


@pytest.mark.parametrize("content", range(len(NOT_RECORDS) + 7))
def test_trap_29_a_summary_that_organize_has_not_written_is_refused(content: int) -> None:
    """Empty, truncated or edited: one error names the file and the stage to run again."""
    put({f"{number}.txt": "text" for number in range(4)})
    organize_raw(num_splits=2)
    path = Path("data/splits/summary.json")
    summary = json.loads(path.read_text())
    listed = summary["splits"]
    others = [
        json.dumps({**summary, "splits": value}).encode()
        for value in (None, "text", [1], [{}], listed[::-1], listed[:0], listed[:1])
    ]
    path.write_bytes([*NOT_RECORDS, *others][content])
    with pytest.raises(StageError, match=r"^data/splits/summary.json .*run `dvc repro -f -s organize`$"):
        extract(PARAMS, RUNTIME)
    assert not CORPUS.exists()


# Text and encodings


def test_trap_06_encodings_are_detected(capsys: pytest.CaptureFixture[str]) -> None:
    """A byte order mark decides, then UTF-8, then `fallback_encoding` for the whole file."""
    text = "Größe … 5 €\n" * 9
    cases = [
        (f"{name}.txt", text.encode(name), [text]) for name in ("utf-8", "utf-8-sig", "utf-16", "cp1252", "cp1252")
    ]
    metrics = check(*cases, ("a.csv", b"\x81\xff", [], "unknown encoding at None: utf-8: .*; cp1252: "))
    assert (metrics["fallback_encoded_files"], metrics["fallback_encoded"]) == (2, ["003/cp1252.txt", "004/cp1252.txt"])
    message = "2 files not in UTF-8, and read as cp1252 (fallback_encoding), such as 003/cp1252.txt: see with "
    assert message in capsys.readouterr().out
    with pytest.raises(
        StageError, match=r"3 files could not be read in full, .*: change fallback_encoding, or fix them, or raise"
    ):
        extract_raw(fallback_encoding=None)
    check(
        ("a.md", b"Gr\xf6\xdfe", [], "invalid start byte at byte 2"),
        ("b.txt", b"ends\xe2\x82", [], "end of data at byte 4"),
        ("c.txt", b"\xc3\xa4" * 25 + b"\xff" + b"a" * 30, [], "at byte 50"),
        fallback_encoding=None,
    )


def test_trap_06_a_fallback_encoding_is_one_of_text_that_can_be_read_in_pieces() -> None:
    """An encoding in which a byte depends on those before it is refused."""
    codec_names = {module.name for module in pkgutil.iter_modules(encodings.__path__)} - {"aliases"}
    some_bytes = bytes(range(256)) + random.Random(0).randbytes(5000)
    refused = {}
    for name in codec_names | {"klingon", ""}:
        Path("params.yaml").write_text(yaml.safe_dump({**dataclasses.asdict(PARAMS), "fallback_encoding": name}))
        try:
            encoding = load_params(ExtractParams).fallback_encoding
        except StageError as error:
            refused[name] = str(error)
            continue
        assert encoding
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        pieces = [decoder.decode(some_bytes[place : place + 1]) for place in range(len(some_bytes))]
        text = some_bytes.decode(encoding, "replace")
        assert "".join(pieces) + decoder.decode(b"", final=True) == text, name
        assert text.encode()  # no lone surrogates
    assert all("fallback_encoding" in error and "such as cp1252" in error for error in refused.values())
    expected = "utf_16 utf_16_le utf_32 utf_7 unicode_escape raw_unicode_escape idna punycode"
    expected += " rot_13 base64_codec hz iso2022_jp undefined klingon"
    assert {*expected.split(), ""} <= refused.keys()
    assert not {"cp1252", "latin_1", "shift_jis", "gb18030", "euc_kr", "koi8_r", "mac_roman", "cp037"} & refused.keys()


@pytest.mark.parametrize("fallback", ["cp1252", None])
def test_trap_06_utf16_without_a_byte_order_mark_is_rejected_with_the_remedy(fallback: str | None) -> None:
    scripts = ("English text", "Größe: 5 €", "Zażółć gęślą jaźń", "Русский текст", "Ελληνικά", "טקסט בעברית", "نص عربي")
    cases = []
    for encoding in ("UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"):
        remedy = f"looks like {encoding} without a byte order mark: convert it with `iconv -f {encoding} -t UTF-8`$"
        contents = [f'"{text}"\n'.encode(encoding) for text in scripts]
        names = ("a.txt", "a.json", "a.jsonl", "a.yaml")
        cases += [(name, content, [], f"^unknown encoding.*{remedy}") for name, content in product(names, contents)]
        cases.append(("a.txt.gz", gzip.compress(contents[3]), [], remedy))
    check(*cases, fallback_encoding=fallback)


def test_trap_06_the_parts_of_a_file_in_utf16_without_a_byte_order_mark_are_rejected() -> None:
    put({"a.jsonl": "".join(f'"line {number}"\n' for number in range(9000)).encode("utf-16-be"), "b.txt": "b"})
    metrics = extract_raw(num_splits=4, max_rejected_files=1)
    assert metrics["rejected"].keys() == {"unknown encoding"}
    assert metrics["rejected_files"] == 1
    assert read_rows() == ["b"]


def test_trap_07_text_is_not_changed() -> None:
    """Line ends, NUL and other control characters stay, byte for byte, in one string."""
    texts = (
        "a\r\nb\rc\n\n\x00\x0c\u2028 end", "\x00", "\x00" * 99, "name\x00" * 9, "abc\x00" * 9, "ab\x00" * 9,
        "one\x00two\x00three\x00", "id\x01name\x02", "text" + "\x00" * 500, "a\x00b\x00" + "c" * 9,
    )  # fmt: skip
    check(*(("a.txt", text, [text]) for text in texts), ("a.csv", 'x,"y\r\n"', ['x,"y\r\n"']))


def test_trap_11_byte_order_marks_are_recognized() -> None:
    """The mark before JSON and YAML is no part of the content."""
    content = '\ufeff{"a": "é😀"}\n'
    encoded = map(content.encode, ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"))
    check(
        *(
            (name, gzip.compress(each) if name.endswith("gz") else each, ["é😀"])
            for each in encoded
            for name in ("a.json", "a.jsonl", "a.yaml", "a.json.gz")
        )
    )


def test_files_and_documents_without_text_are_no_error() -> None:
    contents = {"a.json": "", "b.jsonl": "\n", "c.yaml": "", "d.txt": "", "e.yaml": "# comment\n"}
    packed = [(f"a{end}{suffix}", pack(b""), []) for end in (".json", ".txt") for suffix, pack in PACKERS.items()]
    check(*((name, content, []) for name, content in contents.items()), *packed, max_rejected_files=0)


# JSON


def test_trap_08_only_values_are_text() -> None:
    """Keys, numbers, booleans, null and empty strings are no text, at any depth, and the order is that of the file."""
    value = {"key": "a", "n": [1, 2.5, True, None, "", "b", {"c": ["d", {}, [], "e"]}]}
    check(("a.json", json.dumps(value), ["a", "b", "d", "e"]), ("b.jsonl", json.dumps(value), ["a", "b", "d", "e"]))
    check(("a.json", '["ab", "c", "déf"]', ["ab", "déf"]), ("a.txt", "é", []), ("b.txt", "éé", ["éé"]), min_chars=2)


def test_trap_09_all_values_of_duplicate_keys_are_kept() -> None:
    """Also where keys and values have escapes."""
    text = r'{"a": "first", "b\"\\": "\"quoted\"\\", "a": {"c": "x", "c": "y"}, "d": 1, "d": 2}'
    expected = ["first", '"quoted"\\', "x", "y"]
    check(("a.json", text, expected), ("a.jsonl", text, expected))
    assert [json_strings(text, batch) for batch in (1, 5, 9)] == [[expected]] * 3


def test_keys_are_recognized_before_any_white_space() -> None:
    items = ["[", "{", '"key"', ":", '"a"', ",", r'"\\\""', ":", "[", '"b"', ",", "1", ",", '"c"', "]", "}", "]", ""]
    spaces = ("", " ", "\n\t\r ", " " * 31, "\n" * 32, " " * 33, " " * 5000)
    for space, batch in product(spaces, (1, 40, LIMITS.batch)):
        assert json_strings(space.join(items), batch) == [["a", "b", "c"]]
        assert json_strings(f'"a"{space}', batch) == [["a"]]


def test_trap_10_lone_surrogates_are_replaced() -> None:
    """Pairs are one character, and a lone surrogate becomes U+FFFD."""
    escaped = r'["\ud83d\ude00", "\ud800", "a\udc00\ud83d", "\ude00\ud83d\ude00"]'
    check(("a.json", r'["\ud83d\ude00"]', ["😀"]), ("b.json", escaped, ["😀", "\ufffd", "a\ufffd\ufffd", "\ufffd😀"]))


def test_trap_11_unusual_numbers_lose_no_string() -> None:
    """NaN, Infinity and numbers of any size stand beside strings, which are kept."""
    numbers = ("NaN", "-Infinity", "1e999", "-1E+999", "9" * 5000, "-0", "0." + "3" * 9999)
    check(
        *(("a.json", f'["a", {number}, {{"k": {number}}}, "b"]', ["a", "b"]) for number in numbers),
        *(("a.jsonl", f'["a", {number}, "b"]\n', ["a", "b"]) for number in numbers),
    )


def test_trap_12_deep_nesting_is_read_in_linear_time() -> None:
    """JSON that is nested 100 000 deep is read or rejected in seconds."""
    depth = 100_000
    text = '[{"a":' * depth + '"deep"' + "}]" * depth
    start = time.monotonic()
    check(("a.json", text, ["deep"]), ("b.json", "[" * depth, [], "does not end"), limits=[LIMITS])
    assert time.monotonic() - start < 20  # a reader that starts over at each level needs minutes


class Pieces(io.RawIOBase):
    """A JSON array of strings that is made while it is read, and records the largest size that was requested."""

    def __init__(self, number: int) -> None:
        self.left, self.most, self.rest = number, 0, bytearray(b"[")

    def read(self, size: int = -1) -> bytes:
        self.most = max(self.most, size)
        while self.left and len(self.rest) < size:
            self.left -= 1
            self.rest += b'"number %d"' % self.left + (b"," if self.left else b"]")
        piece, self.rest = self.rest[:size], self.rest[size:]
        return bytes(piece)


def test_trap_13_a_stream_has_one_piece_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[int, int]] = []  # strings, and their characters, of each call
    sink: Any = ListSink()
    monkeypatch.setattr(sink, "add", lambda strings: added.append((len(strings), sum(map(len, strings)))))
    pieces = Pieces(300_000)
    json_format.read_record(pieces.read, json_format.Strings(sink, LIMITS), LIMITS)
    assert sum(number for number, _ in added) == 300_000
    assert max(size for _, size in added) <= pieces.most == LIMITS.batch
    assert len(added) < 20  # each costs as much as many strings


def test_trap_13_too_long_strings_are_rejected_and_the_records_beside_them_kept() -> None:
    """A string that is too long is rejected with its position."""
    long, too_long = "é" * 500, "é" * 501
    limits = Limits(longest_string=1000, longest_document=1000)
    check(
        ("b.json", json.dumps(["fits", too_long], ensure_ascii=False), [], "string too long.*1000"),
        ("c.yaml", f"- fits\n- {too_long}\n", [], "string too long.*1000"),
        ("d.jsonl", f'"{too_long}"\n', [], "string too long.*1000"),
        ("e.json", json.dumps([too_long]), [], "string too long.*1000"),  # escaped
        ("f.txt", long, [long]),
        ("g.json", json.dumps({too_long: "a"}, ensure_ascii=False), ["a"]),
        limits=[limits, dataclasses.replace(limits, chunk=10)],
    )
    long, more = "a" * 101, "x" * 99
    lines = f'["one"]\n["a", "{long}", "b"]\n["two", "{more}"]\n{long}\n["three"]'
    check(
        ("a.json", f'["one"]\n["a",\n"{long}", "b"] {{"{long}": "two"}}', ["one", "two"], "too long at line 3:"),
        ("a.jsonl", lines, ["one", "two", more, "three"], "string too long at line 2:", "invalid JSON at line 4"),
        ("b.json", f"[{'1' * 101}]", [], "number too long"),
        ("c.json", f'["a",{" " * 999}"b"]', ["a", "b"]),
        ("d.json", "[" * 200, [], "nested too deep at line 1:"),
        limits=[Limits(longest_string=100, longest_document=100, chunk=10, batch=10, deepest=100)],
    )


@pytest.mark.parametrize("batch", [1, 2, 7, 50])
def test_strings_longer_than_a_piece_are_read_in_pieces(batch: int) -> None:
    string = 'é😀\ud83d"\\\n' + "a" * 40 + "😀\ude00"
    expected = string.replace("\ud83d", "\ufffd").replace("\ude00", "\ufffd")
    assert json_strings(f'[{json.dumps(string)}, {{{json.dumps(string)}: "b"}}]', batch) == [[expected, "b"]]
    for wrong in ('"', "\\x", "\t", "\\u12"):
        assert refusal(json_strings, f'["{"a" * 60}{wrong}{"z" * 60}"]', batch) == "invalid JSON"


def test_trap_13_a_string_that_is_passed_over_needs_no_memory_for_its_escapes() -> None:
    text = '["' + r"\n" * 500_000 + '"] ["kept"]'
    sink, limits = ListSink(), Limits(longest_string=len(text) // 2, batch=1000)
    tracemalloc.start()
    try:
        json_format.read(Memory(text, limits), sink)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(text)
    finally:
        tracemalloc.stop()
    assert sink.rows == ["kept"]
    assert [rejected.reason for rejected in sink.rejected] == ["string too long"]


def test_trap_13_a_long_string_becomes_several_documents() -> None:
    """A string over 1 MiB is cut at a line end, else at a space, else between two characters."""
    line = "one line\nand é more\n\n"  # 22 bytes
    cut = {
        line * 3: [line] * 3,  # at a line end
        "a\n" * 20: ["a\n" * 12, "a\n" * 8],  # at the last one
        "word " * 10: ["word " * 4, "word " * 4, "word " * 2],  # at a space
        "a\nb c " + "d" * 40: ["a\n", "b c ", "d" * 24, "d" * 16],  # at a line end before a space
        "€" * 20: ["€" * 8, "€" * 8, "€" * 4],  # at a character
        "a" + "😀" * 12: ["a" + "😀" * 5, "😀" * 6, "😀"],  # within no character
        "d" * 24: ["d" * 24],  # not at all
    }
    cases, records = [], []
    for text, rows in cut.items():
        given = {
            "a.txt": text, "b.json": json.dumps([text]), "c.json": json.dumps([text], ensure_ascii=False),
            "d.jsonl": json.dumps(text), "e.yaml": json.dumps(text, ensure_ascii=False), "a.parquet": table_of(text),
        }  # fmt: skip
        cases += [(name, content, rows) for name, content in given.items()]
        records += [("a.parquet", table_of(text), rows), ("a.jsonl", json.dumps({"text": text}), rows)]
    limits = [Limits(longest_document=24), Limits(longest_document=24, chunk=7, batch=5)]
    check(*cases, limits=limits)
    check(*records, limits=limits, records=[{"files": "**", "text": "$.text"}])
    messages = [{"role": "user", "content": "one two " * 20}]  # but no conversation
    case = ("a.jsonl", json.dumps({"messages": messages}), [{"messages": messages}])
    check(case, limits=limits, records=[{"files": "**", "messages": "$.messages"}])


@given(st.text(st.sampled_from("ab é€😀\n"), max_size=99), st.integers(4, 30))
@settings(max_examples=50)
def test_trap_13_joined_the_documents_of_a_string_are_the_string(text: str, size: int) -> None:
    found = [*writer.documents(io.BytesIO(text.encode()), size)]
    assert "".join(found) == text
    assert all(0 < len(document.encode()) <= size for document in found)
    for document, following in pairwise(found):
        window = (document + following).encode()[:size]
        last = b"\n" if b"\n" in window else b" " if b" " in window else None
        longest = window[: window.rindex(last) + 1] if last else window.decode(errors="ignore").encode()
        assert document.encode() == longest


def test_a_long_string_is_as_long_as_min_chars_says_before_it_is_cut() -> None:
    rows = ["é" * 12] * 4 + ["é" * 2]
    for min_chars, expected in ((50, rows), (51, [])):
        check(
            ("a.txt", "é" * 50, expected),
            ("b.json", json.dumps(["é" * 50]), expected),
            limits=[Limits(longest_document=24), Limits(longest_document=24, batch=5)],
            min_chars=min_chars,
        )


def test_trap_13_a_long_document_leaves_no_row_and_no_count_if_its_end_is_bad() -> None:
    """It is read in pieces, and turns out to be invalid only at its end."""
    texts = ["dropped " * 3, "dropped"] * 15
    place = f"line 1, character {2 * len(json.dumps(texts))}"
    metrics = check(
        ("a.json", '["kept"]', ["kept"]),
        ("b.json", json.dumps(texts) + json.dumps(texts)[:-1], texts, f"invalid JSON at {place}:"),
        ("c.json", json.dumps(["also kept"] * 20), ["also kept"] * 20),
        limits=[Limits(batch=50, chunk=20)],
    )
    assert (metrics["records"], metrics["strings"], metrics["short_strings"]) == (3, 51, 15 + 21)
    assert metrics["characters"] == sum(map(len, read_rows()))


def test_small_records_are_not_joined_again_for_each_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take hours for a file of them."""
    num_joined = 0
    slices = writer.slices

    def counted(rows: pa.Array, *others: Any) -> Iterator[pa.Array]:
        nonlocal num_joined
        num_joined += len(rows)
        return slices(rows, *others)

    monkeypatch.setattr(writer, "slices", counted)
    put({"a.jsonl": '"b"\n[NaN,"c"]\n' * 2000})  # which two readers read in turn
    assert extract_raw(limits=Limits(batch=1000))["strings"] == 4000
    assert num_joined < 10 * 4000


def test_trap_14_a_bad_line_is_lost_and_nothing_else() -> None:
    """All of a bad line is lost; of other JSON, what follows the last complete document. Both have a position."""
    lines = '{"a": "one"}\r\n\n{bad}\n"two" "three"\n["lost", "lost"\n{"a": "four\u2028"}'
    bad = ("invalid JSON at line 3", "invalid JSON at line 5")
    metrics = check(
        ("a.jsonl", lines, ["one", "two", "three", "four\u2028"], *bad),
        ("b.ndjson", '"five"\n', ["five"]),
        ("c.jsonl", '["one"]\n{"a": "x"} {bad\n["two"] ["three"]\n', ["one", "two", "three"], "invalid JSON at line 2"),
        ("d.json", '{"a": "one"}\n{"a": "two"}["three"] "four"', ["one", "two", "three", "four"]),
        ("e.json", '{"a": "one"}\n{"a": "two"\n, x}', ["one"], "at line 3, character 3:"),
        ("f.json", '["é",\n\n ["é",  x]]' + " " * 50, [], "at line 3, character 9:"),
        limits=(LIMITS, Limits(chunk=1, batch=1), Limits(chunk=4, batch=3)),
    )
    assert metrics["records"] == 3 + 1 + 2 + 4 + 1  # documents in one line are one record
    assert (metrics["rejected"], metrics["rejected_files"]) == ({"invalid JSON": 5}, 4)


def numbered_lines(number: int) -> list[dict[str, Any]]:
    """Values of JSON Lines that make a file of several parts."""
    return [{"a": f"line {line} é", "b": ["x" * (line % 50), line, "end"]} for line in range(number)]


def strings_by_line(shard: Path) -> dict[int, list[str]]:
    """The rows of a shard that are from `numbered_lines`, in their order."""
    found: dict[int, list[str]] = {}
    for offset in arrow.batch_offsets(shard):
        for text in filter("b".__ne__, arrow.read_batch(shard, offset)["text"].to_pylist()):
            if number := re.fullmatch(r"line (\d+) é", text):
                assert int(number[1]) not in found
                strings = found[int(number[1])] = []
            strings.append(text)
    return found


@pytest.mark.parametrize(
    ("encoding", "limits"),
    [
        ("utf-8", Limits(chunk=1000, batch=5000)),
        *((name, LIMITS) for name in ("utf-8", "utf-8-sig", "utf-16", "cp1252")),
    ],
)
def test_trap_27_the_parts_of_a_file_give_its_strings_in_order(encoding: str, limits: Limits) -> None:
    """Each line is read once, in order, with its number in the file."""
    values = numbered_lines(3000)
    text = "\r\n".join(json.dumps(value, ensure_ascii=False) for value in values)
    put({"a/large.jsonl": text.encode(encoding), "b.txt": "b"})
    metrics = extract_raw(num_splits=4, limits=limits)
    assert (metrics["files"], metrics["records"]) == (2, 3001)
    assert metrics["fallback_encoded_files"] == (encoding == "cp1252")
    shards = [*map(strings_by_line, CORPUS.glob("*.arrow"))]
    assert {line: strings for shard in shards for line, strings in shard.items()} == {
        line: strings_in(value) for line, value in enumerate(values)
    }
    assert sum(map(len, shards)) == len(values)  # no line is in two shards
    assert [*map(list, shards)] == [*map(sorted, shards)]
    assert all(len(shard) > 250 for shard in shards) == encoding.startswith("utf-8")  # others are not cut


def test_trap_27_a_file_is_rejected_once_and_not_once_a_part() -> None:
    lines = [json.dumps(value) for value in numbered_lines(3000)]
    lines[10::10] = [f"bad {number}" for number in range(10, 2990, 10)] + ['\ufeff"a mark inside the file"']
    put({"a.jsonl": "\n".join(lines).encode("utf-8-sig"), "b.json": "["})
    with pytest.raises(StageError, match=r"a.jsonl: invalid JSON at line 11: .*\n.*b.json.*\n.*2 files could not be"):
        extract_raw(num_splits=4, max_rejected_files=1)
    metrics = extract_raw(num_splits=4, max_rejected_files=2, limits=Limits(num_listed=200))
    assert (metrics["files"], metrics["rejected_files"], metrics["records"]) == (2, 2, 2701)
    assert metrics["rejected"] == {"invalid JSON": 300}
    positions = [f"line {number + 1}" for number in range(10, 2010, 10)]
    assert [rejection["position"] for rejection in metrics["rejections"][:-1]] == positions


@pytest.mark.parametrize("records", [None, [{"files": "**", "text": "$.text"}]], ids=["no rule", "a rule"])
def test_a_document_over_several_lines_is_one_hint(records: Any) -> None:
    values: list[Any] = [[{"text": "a", "n": number} for number in range(2000)], {"a": {"b": [1]}, "c": "d"}]
    hint = "at None: a JSON document over several lines, and no JSON Lines: rename it to end in .json$"
    cases: list[tuple[Any, ...]] = [
        ("a.jsonl", json.dumps(value, indent=1).encode(encoding), [], hint)
        for value, encoding in product(values, ("utf-8", "utf-8-sig", "utf-16"))
    ]
    cases += [("b.jsonl", '{"text": "b"}\n', ["b"])]
    cases += [("c.jsonl", '{\n{"text": "b"}\n', ["b"], "invalid JSON at line 1")]  # only the first line is damaged
    check(*cases, limits=[LIMITS], records=records, num_splits=1)


@pytest.mark.parametrize("batch", [1, 1 << 20])
def test_invalid_json_is_rejected(batch: int) -> None:
    texts = (
        "[1,]", "[,1]", '{"a":1,}', '{"a" 1}', '{"a":}', "{1:1}", "[1 2]", "[01]", "[1.]", "[.5]", "[+1]", "[0x1]",
        '["a]', '["a\tb"]', '["\\x41"]', '["\\u12"]', "['a']", "[tru]", "[nul", "{", "[", '{"a"', '["a"', "]", "}",
        "[}", "{]", '["a"}', "// c\n[]", "[1] x", ":", ",", '{"a":1 "b":2}', '{"a":"b":"c"}', '["a":"b"]', '{"a","b"}',
    )  # fmt: skip
    padded = [text + end for text in texts for end in ("", " " * 40)]
    assert {text: refusal(json_strings, text, batch) for text in padded} == dict.fromkeys(padded, "invalid JSON")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(JSON_VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]), st.sampled_from([1, 5, 1 << 20]))
def test_any_json_gives_exactly_its_strings_in_order(
    values: list[Any], ascii_only: bool, indent: int | None, batch: int
) -> None:
    texts = [json.dumps(value, ensure_ascii=ascii_only, indent=indent) for value in values]
    found = json_strings(" ".join(texts), batch)
    assert [list(filter(None, document)) for document in found] == list(map(strings_in, values))


# YAML

YAML_TYPES = """
null Null NULL ~ true True TRUE false False FALSE
0 7 -1 +12 0777 0o14 0xFF 1234567890123456789012345678901234567890
1.5 -0.0 .5 5. 1e3 1E-3 +1.5e+10 .inf -.Inf +.INF .nan .NaN .NAN
"""
YAML_STRINGS = """
yes no on off y n Yes NO nULL tRUE
1_000 12:30:45 2024-01-02 2001-12-14t21:59:43.10-05:00 0b101 0o8 0xG -0o14 +0x1 1e 1.2.3 . + -. e3 .e3 +.nan
= << Infinity NaN nan inf -inf a
"""


def test_trap_15_plain_scalars_have_the_types_of_yaml_1_2() -> None:
    """`no`, `1_000` and `0o14` have the types of the core schema."""
    strings, others = YAML_STRINGS.split(), YAML_TYPES.split()
    text = "a: {0}\nb: '{0}'\nc: !!str {0}\nd: ! {0}\ne: >-\n  {0}\n"
    assert {scalar: yaml_strings(text.format(scalar)) for scalar in others} == {each: [each] * 4 for each in others}
    assert {scalar: yaml_strings(f"a: {scalar}\n") for scalar in strings} == {each: [each] for each in strings}


def rows_of_table(path: str, heading: str) -> list[list[str]]:
    """The cells of the table of a file that begins so."""
    text = (REPO / path).read_text(encoding="utf-8")
    table = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 5
    return [[cell.replace("\0", "|") for cell in line.replace("\\|", "\0").strip("|").split("|")] for line in table]


def test_trap_15_the_tables_of_yaml_are_correct() -> None:
    for scalars, kind, *_ in rows_of_table("docs/formats.md", "| plain scalar"):
        for scalar in scalars.split("`")[1::2]:
            assert yaml_strings(f"a: {scalar}\n") == ([scalar] if kind.strip() == "string" else []), scalar
    for row in rows_of_table("stages/formats/yaml_format.py", "| misread |"):
        documents, strings = (
            cell.replace("\\ufeff", "\ufeff").replace("↵", "\n").split("`")[1::2] for cell in (row[0], row[2])
        )
        for document in documents:
            assert {""} < {"", *yaml_strings(document)} <= {"", *strings}, document


def refused_by_libyaml(text: str) -> Any:
    with pytest.raises(yaml.YAMLError) as refused:
        list(yaml.parse(text, Loader=yaml.CSafeLoader))
    return refused.value


@pytest.mark.parametrize(
    "text", ["a:\n\t- b\n", "- [a\n", "[a]\nb\n", "--- @a", '"a": b\n c: d', '"a" "b": c', "- \x7f"]
)
def test_trap_15_what_libyaml_refuses_is_rejected_with_its_place(text: str) -> None:
    """With line and column."""
    with pytest.raises(Rejected, match="invalid YAML") as rejected:
        yaml_strings(text)
    error = refused_by_libyaml(text)
    assert (error.reason if isinstance(error, yaml.reader.ReaderError) else error.problem) in rejected.value.detail
    assert re.fullmatch(r"line \d+, column \d+|byte \d+", str(rejected.value.position))


def test_trap_15_json_that_libyaml_refuses_is_read_if_all_of_it_is_json() -> None:
    texts = {
        '\t{"a":\t"b"}': ["b"],
        '{"a": "b"}\n\t\n': ["b"],
        '["b",\n"a longer string",\n"c",\n"\\ud83d\\ude00", NaN]': ["b", "a longer string", "c", "😀"],
        f'["b", {{"{"k" * 1025}": 1}}]': ["b"],
    }
    for text in texts:
        refused_by_libyaml(text)
    check(
        *(("a.yaml", each, rows) for text, rows in texts.items() for each in (text, text.encode("utf-16"))),
        ("b.yaml", '"a": b\n c: d', [], "invalid YAML at line 2, column 3:"),
    )


def test_trap_13_what_was_read_leaves_the_memory_without_the_collector() -> None:
    """What is in a cycle stays in memory until the collector looks at it, perhaps for many files."""
    texts = ("- [a]]\n", "[a]\nb\n", "a: \x07", "-\ta\n", "a\n...\nb\n", '\t["a"]', "[" * 2000, "--- |\na\n--- b\n")
    files = {f"{number}.yaml": text.encode() for number, text in enumerate(texts)}
    files |= {"a.json": b"[a", "a.jsonl": b"[a\n" * 3, "a.yaml.zst": b"a"}
    files["a.txt.gz"] = gzip.compress(b"a" * 1000, mtime=0)[:-4]

    def read(name: str) -> None:
        with suppress(Rejected, Unreadable):
            read_file(Path(name))

    for name, content in files.items():
        Path(name).write_bytes(content)
        read(name)  # what is done once, such as imports, does not matter
    gc.collect()
    gc.freeze()  # the objects of before are not looked at, here and later
    gc.disable()
    try:
        for name in files:
            read(name)
            # A cycle with a suspended generator is not counted by `collect`, which closes it first.
            assert not [kept for kept in gc.get_objects() if type(kept) is raw_content.RawContent], name
            assert gc.collect() == 0, name
    finally:
        gc.enable()


def test_the_end_of_a_file_ends_its_last_line() -> None:
    assert yaml_strings("--- |\n one") == ["one\n"]
    assert yaml_strings("--- [one]") == ["one"]


def test_trap_16_tags_run_nothing_and_cost_nothing(empty_project: Path) -> None:
    """Tags construct no object, impossible dates are no error, and no string is lost."""
    ran = empty_project / "ran"
    text = f"""
a: !!python/object/apply:os.system ["touch {ran}"]
b: !Ref Resource
c: !vault |
  secret
d: !Sub ["x", {{y: z}}]
e: !!int "12"
f: !!binary aGVsbG8=
g: !Number 5
h: !!set {{k}}
i: =
j: 2024-02-31
k: {{{{ template }}}}
? [complex, {{key: of}}]
: value
? {{a: b}}
: c
l: last
"""
    rows = [f"touch {ran}", "Resource", "secret\n", "x", "z", "=", "2024-02-31", "value", "c", "last"]
    check(("a.yaml", text, rows))
    assert not ran.exists()


def test_trap_17_each_scalar_is_one_row() -> None:
    """Aliases, merge keys and bombs of aliases repeat nothing: each scalar counts where it is written."""
    bomb = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    merge = "base: &base {x: one}\nchild:\n  <<: *base\n  y: two\n  z: *base\n*base : three\n"
    check(("a.yml", bomb, ["lol", "lol"]), ("b.yml", merge, ["one", "two", "three"]))


def test_trap_15_what_yaml_1_1_takes_for_indicators_is_text() -> None:
    """Its line breaks, and a question mark before a letter."""
    text = "a: x\u2028 y\nb: 'p\x85 q'\n\u2029c: \u2029\nd: \"ä\ufdd01\"\n"
    check(("a.yaml", text, ["x\u2028 y", "p\x85 q", "\u2029", "ä\ufdd01"]))
    assert yaml_strings("[?x, a ?b, {c: ?d}, {?e: f}]") == ["?x", "a ?b", "?d", "f"]
    assert yaml_strings("? [g]\n: ['?h', \"?i\", ?\tj]") == ["?h", "?i"]
    assert yaml_strings("- !k?l <?m>\n- a?b:?c\n- ??n\n- 'o\ufdd1'\n") == ["<?m>", "a?b:?c", "??n", "o\ufdd1"]
    for number in range(16_370, 16_390):  # libyaml reads pieces of 16 KiB
        assert yaml_strings("[" + " " * number + "?x, ??, ? y]") == ["?x", "??"]


def test_trap_13_strings_of_yaml_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    add = TextWriter.add
    monkeypatch.setattr(TextWriter, "add", lambda self, *args: (sizes.append(len(args[0])), add(self, *args))[1])
    text = "- four\n" * 100
    limits = [Limits(chunk=10, batch=10)]
    check(("a.yaml", text, ["four"] * 100), ("b.yaml", text + "- [", [], "invalid YAML"), limits=limits)
    assert max(sizes) == 3


def test_trap_18_documents_before_a_bad_one_are_kept() -> None:
    """The rest of the file is rejected."""
    metrics = check(
        ("a.yaml", "one\n---\n- two\n---\n...\n---\n{a: three}\n", ["one", "two", "three"]),
        ("b.yaml", "one\n---\n[two, three\n---\nfour\n", ["one"], "invalid YAML at line 4, column 1:"),
        ("c.yaml", "a: \x07", [], "at byte 3:"),
    )
    assert metrics["records"] == 4 + 1


def test_trap_13_what_libyaml_holds_in_memory_is_limited() -> None:
    fits, long = "a" * 3_000, "a" * 60_000
    texts = [
        long, f"'{long}'", f'"{long}"', f"|\n {long}", ">\n" + " a\n" * 30_000, f"[? {long}]", f"&{long} b",
        f"*{long}", f"!{long} b", f"!<{long}> b", f"# {long}\nb", "\n" * 60_000, '"' + "\\u0416" * 10_000,
    ]  # fmt: skip
    documents = [
        *(f"kept\n---\n--- {text}" for text in texts),
        f"kept\n---\n...\n%{long}",
        f"kept\n---\n...\n%TAG ! {long}",
    ]
    packed = gzip.compress(documents[0].encode())
    check(
        *(("a.yaml", document, ["kept"], "string too long at line 3:") for document in documents),
        ("b.yaml.gz", packed, ["kept"], "string too long at line 3:"),
        ("c.yaml", f"- {fits}\n" * 30, [fits] * 30),
        limits=[Limits(longest_string=20_000)],
    )


def test_trap_18_directives_and_openings_without_number_are_rejected_at_once() -> None:
    """A million open brackets, and many or long directives, take seconds."""
    directives = ["".join(f"%TAG !{number}! x\n" for number in range(number)) for number in (100_000, 900)]
    prefix = "a\n...\n%TAG !e! {}\n---\n- [!e!a b]\n"  # a copy of it is in each tag
    start = time.monotonic()
    check(
        ("a.yaml", f"a\n---\nb\n...\n{directives[0]}---\nc\n", [], "%TAG directives"),
        ("b.yaml", f"{directives[1]}--- !1!y z\n", ["z"]),
        ("c.yaml", prefix.format("x" * 1025), ["a"], "string too long"),
        ("d.yaml", prefix.format("x" * 1024), ["a", "b"]),
        *(("e.yaml", 1_000_000 * opening, [], "nested too deep") for opening in ("[", "{", "- ", "? ", "[a, ", "[\n")),
        ("f.yaml", "[" * 900 + "a" + "]" * 900, ["a"]),
        limits=[LIMITS],
    )
    assert time.monotonic() - start < 10  # libyaml alone needs minutes for each of these


# The characters that YAML allows unescaped, without those that YAML 1.1 reads as line breaks.
YAML_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)) | st.sampled_from("\n\t"))
YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | YAML_TEXT,
    lambda children: st.lists(children) | st.dictionaries(YAML_TEXT, children),
)


@settings(deadline=None, max_examples=50)
@given(YAML_VALUES, st.booleans(), st.sampled_from([True, False, None]))
def test_any_yaml_gives_exactly_its_strings_in_order(value: Any, unicode: bool, flow: bool | None) -> None:
    # Double quotes for all scalars: numbers then have tags, and no plain scalar is a string in YAML 1.1 only.
    text = yaml.dump(
        value, Dumper=yaml.SafeDumper, default_style='"', allow_unicode=unicode, default_flow_style=flow,
        sort_keys=False,
    )  # fmt: skip
    assert yaml_strings(text, chunk=2) == strings_in(value)


# Compressions


def test_trap_19_compressed_files_give_the_rows_of_plain_ones_or_none() -> None:
    """Several members are one file. Truncated, of 0 bytes or followed by garbage, it is rejected and has no row."""
    plain: list[tuple[str, bytes, list[str]]] = [
        ("a.txt", b"one\n" * 99, ["one\n" * 99]), ("b.json", b'["two"]' * 9, ["two"] * 9),
        ("c.jsonl", b'"three"\n' * 9, ["three"] * 9), ("d.yml", b"- four\n" * 9, ["four"] * 9),
    ]  # fmt: skip
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    cases: list[tuple[Any, ...]] = [
        ("a.txt.zst", b"".join([skippable, *[zst(b"")] * 999, zst(b"te"), skippable, zst(b"xt")]), ["text"]),
        ("b.txt.zst", skippable, []),
        ("c.txt.gz", gzip.compress(b"") * 999 + gzip.compress(b"text") + bytes(99), ["text"]),
    ]
    for suffix, pack in PACKERS.items():  # two members each, and damaged ones
        cases += [(name + suffix.upper(), pack(data[:5]) + pack(data[5:]), rows) for name, data, rows in plain]
        good = pack(b'"one"\n' * 99)
        damaged = (good[:-3], good + good[:-9], good + b"garbage", b"garbage", b"")
        cases += [("a.jsonl" + suffix, bad, [], "^damaged compression at None") for bad in damaged]
    check(*cases)


def test_trap_19_a_window_that_needs_too_much_memory_is_rejected_with_the_remedy() -> None:
    """As zstd itself refuses it without --long."""

    def packed(window_log: int) -> bytes:  # a frame header, and a block that is not compressed
        return b"\x28\xb5\x2f\xfd\x00" + bytes([window_log - 10 << 3]) + (4 << 3 | 1).to_bytes(3, "little") + b"text"

    check(
        *(("a.txt.zst", packed(size), [], "window too large at None: .*zstd -dc --long=31") for size in (28, 31)),
        ("b.txt.zst", packed(27), ["text"]),
    )


# The output


def test_trap_20_edits_and_fewer_splits_leave_nothing_old() -> None:
    """An edit changes only the shard of its file, and no shard of an earlier run stays."""
    put({f"{number}.txt": f"text {number}" for number in range(6)})
    extract_raw(num_splits=4)
    before = content_of(CORPUS)
    put({"3.txt": "edited"})
    extract_raw(num_splits=4)
    after = content_of(CORPUS)
    assert sorted(read_rows()) == ["edited", *(f"text {number}" for number in (0, 1, 2, 4, 5))]
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) == 2  # one shard, and the state with its fingerprint
    assert "state.json" in changed
    extract_raw(num_splits=2)
    assert [path.name for path in sorted(CORPUS.glob("*.arrow"))] == [
        "data-00000-of-00002.arrow", "data-00001-of-00002.arrow",
    ]  # fmt: skip


def test_trap_21_a_killed_stage_or_worker_leaves_nothing() -> None:
    """At any moment: nothing partial is published, and no process stays or writes."""
    put({"a.txt": "a"})
    extract_raw()
    before = content_of(CORPUS)
    put_slow_files(6, 10_000)
    put_large_file()
    organize_raw(num_splits=4)
    write_params_of_extract()
    stage = start_stage("extract")
    workers = wait_for_workers(stage, 2)
    time.sleep(0.3)
    stage.send_signal(signal.SIGKILL)
    stage.communicate()
    wait_for(lambda: not any(map(is_alive, workers)), seconds=30)  # one that is just starting notices it later
    assert content_of(CORPUS) == before  # the old result, which dvc would have removed
    assert len(list(CORPUS.parent.glob("corpus.*"))) == 1
    with publish.lock(CORPUS):  # as the next run does
        assert not list(CORPUS.parent.glob("corpus.*"))

    def kill() -> None:
        wait_for_workers(psutil.Process(), 1)[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(StageError, match=r"worker process was killed.*runtime.num_workers, now 2"):
        extract_raw(num_splits=4, num_workers=2)
    thread.join()
    assert content_of(CORPUS) == before
    assert not list(CORPUS.parent.glob("corpus.*"))


def test_trap_22_the_number_of_workers_changes_no_byte() -> None:
    """Nor does the place of the workers."""
    put({f"{number}.json": json.dumps([f"text {each % 5}" for each in range(number)]) for number in range(9)})
    put({"bad.yaml": "[", "worse.yaml": "{"})
    results = []
    for number in (1, 2):
        shutil.rmtree("data/.reuse", ignore_errors=True)
        metrics = extract_raw(num_splits=4, num_workers=number, max_rejected_files=2)
        results.append((content_of(CORPUS), metrics))
    assert results[0] == results[1]
    names = [entry["filename"] for entry in json.loads(results[0][0]["state.json"])["_data_files"]]
    assert names == sorted(names)  # although the largest split is the first to be worked on
    assert [rejection["path"] for rejection in metrics["rejections"]] == ["bad.yaml", "worse.yaml"]


def test_trap_23_datasets_loads_it_memory_mapped() -> None:
    """`datasets.load_from_disk` gives the right types, over several record batches."""
    put({"a.json": json.dumps([f"string {number}" for number in range(50)]), "b.txt": "b" * 99})
    extract_raw(num_splits=3, limits=Limits(batch=20))  # several record batches a shard
    dataset = datasets.load_from_disk(str(CORPUS))
    assert len(dataset.cache_files) == 3
    assert len(dataset.data.column("text").chunks) > 20
    assert sorted(dataset["text"]) == sorted([f"string {number}" for number in range(50)] + ["b" * 99])
    assert str(CORPUS.resolve()) in Path("/proc/self/maps").read_text()
    assert dataset.map(lambda row: {"size": len(row["text"])}, load_from_cache_file=False)["size"][0] > 0


def test_trap_23_a_corpus_without_strings_can_be_loaded() -> None:
    put({"a.json": "[1, 2]"})
    metrics = extract_raw(num_splits=2)
    assert (metrics["strings"], metrics["records"]) == (0, 1)
    dataset = datasets.load_from_disk(str(CORPUS))
    assert (dataset.num_rows, dataset.column_names) == (0, ["text"])


@pytest.mark.slow
def test_trap_23_a_split_may_have_more_than_two_gib() -> None:
    text = "a line of forty characters, more or less\n" * (1 << 24)
    for number in range(4):
        put({f"{number}.txt": text})
    del text
    extract_raw()
    dataset = datasets.load_from_disk(str(CORPUS))
    assert dataset.data.nbytes > 2**31
    assert dataset[3]["text"][-5:] == "less\n"


def test_trap_24_the_disk_has_each_shard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the corpus is written, nothing is on the disk but its shards, each once."""
    put({f"{number}.txt": "text " * 200_000 for number in range(8)})
    most = 0

    def used() -> int:
        files = [path.stat() for path in Path("data").rglob("*") if path.is_file() and "raw" not in path.parts]
        return sum({file.st_ino: file.st_size for file in files}.values())

    write = arrow.StreamWriter.write

    def spy(self: arrow.StreamWriter, *columns: Any) -> None:
        nonlocal most
        write(self, *columns)
        most = max(most, used())

    monkeypatch.setattr(arrow.StreamWriter, "write", spy)
    extract_raw(num_splits=4)
    output = sum(path.stat().st_size for path in CORPUS.iterdir())
    assert 0.9 * output < most < 1.1 * output


# The stage


def test_files_that_give_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = io.BytesIO()
    pq.write_table(pa.table({"id": [*range(9000)]}), numbers, row_group_size=1000, compression="none")
    silent: dict[str, str | bytes] = {
        "a.json": '{"a:": 1, "b": [true, {}]}', "b.jsonl": "1\n" * 40_000, "c.yaml": "a: 1", "d.txt": "",
        "e.parquet": numbers.getvalue(), "f.json": "[]", "rule/g.csv": "text,id\n",
    }  # fmt: skip
    put(silent)
    put({"x.json": '{"a": ":x", ":b": 1}', "y.jsonl": "1\n" * 40_000 + '"y"\n', "z.json": "{", "rule/x.csv": "text\na"})
    params: Any = {"num_splits": 3, "records": [{"files": "rule/*", "text": "$.text"}], "max_rejected_files": 1}
    for _ in range(2):  # the second time from the store
        extract_raw(**params)
        expected = f"{len(silent)} files without text, of which nothing was rejected, such as a.json: `python"
        assert expected in capsys.readouterr().out
    for name in silent:
        Path("data/raw", name).unlink()
    extract_raw(**params)
    assert "without text" not in capsys.readouterr().out


def test_a_command_in_a_message_has_the_name_in_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    put({"a b/c.txt": "", "x.txt": "x", "é y.txt": b"\xe9\xe9"})
    extract_raw(fallback_encoding="cp1252")
    output = capsys.readouterr().out
    assert "warning: 1 file without text, " in output and "warning: 1 file not in UTF-8, " in output
    for name in ("a b/c.txt", "é y.txt"):
        assert f"`python -m stages.extract --preview 'data/raw/{name}'` " in output


def test_too_many_rejected_files_fail_after_all_were_read() -> None:
    put({f"{number:02d}.json": "[" for number in range(24)})
    put({"good.txt": "good", "x.yaml": "{", os.fsdecode(b"\xff.json"): "["})
    with pytest.raises(StageError) as error:
        extract_raw(num_splits=2, max_rejected_files=25)
    lines = str(error.value).splitlines()
    assert lines[0] == "00.json: invalid JSON at line 1, character 2: the document does not end"
    assert lines[-2] == "... and 6 more"
    assert lines[-1].startswith(
        "26 files could not be read in full, and max_rejected_files is 25: fix them, or raise it"
    )
    metrics = json.loads(Path("data/extract.json").read_text())
    assert metrics["rejected"] == {"invalid JSON": 25, "invalid YAML": 1}
    assert metrics["rejections"][24]["path"] == "\\xff.json"  # in bytes, as no text has it
    assert not CORPUS.exists()
    assert extract_raw(max_rejected_files=26)["rejected_files"] == 26


@pytest.mark.parametrize("num_splits", [1, 3])
def test_no_more_rejections_are_listed_than_later_stages_read(num_splits: int) -> None:
    """Neither of a file nor of all: the others are counted."""
    put({f"{number}.jsonl": "x\n" * 3 for number in range(9)})
    for _ in range(2):  # the second time from the store
        metrics = extract_raw(num_splits, max_rejected_files=9, limits=Limits(num_listed=2, most_listed=5))
        assert (metrics["rejected_files"], metrics["rejected"]) == (9, {"invalid JSON": 27})
        assert [each["path"] for each in metrics["rejections"]] == [f"{number}.jsonl" for number in (0, 0, 1, 1, 2)]
    stored = [json.loads(path.read_text())["value"]["rejected"] for path in Path("data/.reuse").glob("*/value.json")]
    assert max(sum(len(file["rejections"]) for file in files) for files in stored) == 5
    assert Limits().most_listed * 1000 < publish.LARGEST


def test_each_format_that_organize_lists_has_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the example of the docstring."""
    assert set(suffixes.FORMATS.values()) == set(readers.READERS)
    example = re.search(r"^    def read\(.*?(?=^Then)", readers.__doc__ or "", re.M | re.S)
    assert example
    scope: dict[str, Any] = {"RawContent": raw_content.RawContent, "TextWriter": TextWriter, "Rejected": Rejected}
    exec(textwrap.dedent(example[0]), scope)
    monkeypatch.setitem(suffixes.FORMATS, ".talk", "talk")
    monkeypatch.setitem(readers.READERS, "talk", scope["read"])
    check(("a.talk", "she: hello\nnothing\nhe: good: bye\n", ["hello", "good: bye"], " at line 2:"))


def test_help_of_data_stages_imports_no_large_library() -> None:
    code = (
        "import sys, runpy\nsys.argv = ['stage', '--help']\n"
        "try: runpy.run_module('stages.{}', run_name='__main__')\n"
        "finally: print(sorted(set(sys.modules) & {{'torch', 'transformers', 'datasets', 'pyarrow', 'tokenizers'}}))"
    )
    # pack needs 0.15 s for its two; their functions would have to import them one by one.
    for stage, loaded in (("organize", []), ("extract", []), ("pack", ["pyarrow", "tokenizers"])):
        command = [sys.executable, "-c", code.format(stage)]
        output = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
        assert output.endswith(f"{loaded}\n"), output
