import codecs
import contextlib
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

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
from stages.formats import json_format, jsonl, readers, source, writer, yaml_format
from stages.formats.limits import LIMITS, Limits
from stages.formats.source import Rejected
from stages.formats.writer import TextWriter
from stages.splits import suffixes
from stages.work import arrow
from tests.corpus import (
    CORPUS,
    NOT_RECORDS,
    PARAMS,
    content_of,
    extract_file,
    extract_raw,
    organize_raw,
    put,
    put_large_file,
    put_slow_files,
    wait_for_workers,
    with_processes,
    write_params_of_extract,
)
from tests.project import REPO, is_alive, peak_memory, start_stage, wait_for

Files = dict[str, str | bytes]

pytestmark = pytest.mark.usefixtures("empty_project")


def run(
    num_splits: int = 1, num_workers: int = 1, *, max_rejected_files: int = 0, fallback: str | None = "cp1252",
    min_chars: int = 1, is_fresh: bool = True, limits: Limits = LIMITS,
) -> dict[str, Any]:  # fmt: skip
    """Organize and extract, from nothing if `is_fresh`; return `data/extract.json`."""
    if is_fresh:
        shutil.rmtree("data/.reuse", ignore_errors=True)
    organize_raw(num_splits)
    params = replace(PARAMS, fallback_encoding=fallback, max_rejected_files=max_rejected_files, min_chars=min_chars)
    extract(params, with_processes(ExtractRuntime(num_workers=num_workers, reuse_gib=1)), limits)
    metrics: dict[str, Any] = json.loads(Path("data/extract.json").read_text())
    return metrics


def rows() -> list[str]:
    return list(datasets.load_from_disk(str(CORPUS))["text"])


def strings_of(name: str, content: str | bytes, **arguments: Any) -> list[str]:
    """The rows of a corpus of one good file."""
    shutil.rmtree("data/raw", ignore_errors=True)
    put({name: content})
    run(**arguments)
    return rows()


def rejection_of(name: str, content: str | bytes, **arguments: Any) -> dict[str, Any]:
    """The rejection of the only bad file of a corpus, whose other file stays."""
    shutil.rmtree("data/raw", ignore_errors=True)
    put({name: content, "sibling.txt": "sibling"})
    metrics = run(max_rejected_files=1, **arguments)
    assert rows()[-1] == "sibling"
    assert metrics["rejected_files"] == 1
    [rejection] = metrics["rejections"]
    assert rejection["path"] == name
    assert metrics["rejected"] == {rejection["reason"]: 1}
    return {**rejection, "rows": rows()[:-1]}


class ListSink:
    """A sink that keeps all documents."""

    def __init__(self) -> None:
        self.documents: list[list[str]] = []
        self.current: list[str] = []

    def add(self, strings: list[str]) -> None:
        self.current += map(writer.replace_surrogates, strings)

    def add_text(self, stream: BinaryIO) -> None:
        self.current.append(stream.read().decode())

    def end(self, records: int = 1) -> None:
        self.documents += [self.current, *[[]] * (records - 1)]
        self.current = []

    def reject(self, rejected: Rejected) -> None:
        self.current = []

    def drop(self) -> None:
        self.current = []


def scanned(text: str | bytes, batch: int = LIMITS.batch) -> list[list[str]]:
    sink = ListSink()
    json_format.read(Memory(text, Limits(batch=batch, chunk=0)), sink)  # each document is handed on
    return sink.documents


# organize to extract


def test_trap_05_a_changed_file_is_refused() -> None:
    put({"a.txt": "old", "b.txt": "b"})
    organize_raw(num_splits=1)
    params, runtime = replace(PARAMS, max_rejected_files=9), ExtractRuntime(num_workers=1, reuse_gib=1)
    for change in (lambda: put({"a.txt": "new"}), lambda: Path("data/raw/a.txt").unlink()):
        change()
        with pytest.raises(StageError, match=r"1 files were changed .* first is a.txt: run `dvc repro`"):
            extract(params, runtime)
        assert not CORPUS.exists()


def replace_file(path: Path, content: bytes) -> None:
    path.with_name("new").write_bytes(content)
    path.with_name("new").replace(path)


def with_byte(content: bytes, value: int) -> bytes:
    """`content` with another byte near its end."""
    place = len(content) * 9 // 10
    return content[:place] + bytes([value]) + content[place + 1 :]


CHANGES: dict[str, Callable[[Path, bytes], Any]] = {
    "truncated": lambda path, content: os.truncate(path, len(content) // 2),
    "cut off after a line": lambda path, content: os.truncate(path, content.rfind(b"\n", 0, len(content) // 2) + 1),
    "emptied": lambda path, content: os.truncate(path, 0),
    "grown": lambda path, content: path.write_bytes(content + content),
    "edited": lambda path, content: path.write_bytes(with_byte(content, content[len(content) * 9 // 10] ^ 1)),
    "not UTF-8": lambda path, content: path.write_bytes(with_byte(content, 255)),
    "no longer of its format": lambda path, content: path.write_bytes(with_byte(content, ord("]"))),
}
KEPT: dict[str, Callable[[Path, bytes], Any]] = {
    "replaced": lambda path, content: replace_file(path, content.replace(b"e", b"E")),
    "removed": lambda path, content: path.unlink(),
    "a pipe": lambda path, content: (path.unlink(), os.mkfifo(path)),
}
"""After which a process that has opened the file still reads what was organized."""


@pytest.mark.parametrize("change", [*CHANGES, *KEPT])
def test_trap_05_a_file_that_changes_while_it_is_read_is_refused(change: str) -> None:
    lines = "".join(f'"{random.Random(number).randbytes(20).hex()}"\n' for number in range(6000)).encode()
    path = Path("raw")

    def read(reader: Callable[..., None], compression: str, content: bytes) -> None:
        with source.Source(path, compression, sha256_file(path), limits=Limits(chunk=1000)) as raw:
            (CHANGES | KEPT)[change](path, content)
            with contextlib.suppress(Rejected):
                reader(raw, ListSink())

    for format, compression, content in (
        ("jsonl", "", lines),
        ("json", "", lines),
        ("json", "", b"!\n" + lines),  # the reader stops at the first line
        ("text", "", lines),
        ("yaml", "", b"---\n" + lines.replace(b"\n", b"\n---\n")),
        ("jsonl", ".gz", gzip.compress(lines)),
        ("json", ".zst", zst(lines)),
    ):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        if change in KEPT and format == "text":  # which is opened twice
            continue
        with contextlib.nullcontext() if change in KEPT else pytest.raises(source.Changed):
            read(readers.READERS[format], compression, content)


def test_what_cannot_be_read_to_its_end_leaves_nothing_of_its_beginning() -> None:
    lines = "".join(f'"{random.Random(number).randbytes(20).hex()}"\n' for number in range(6000)).encode()
    yaml_lines = b"".join(b"- " + line for line in lines.splitlines(keepends=True))
    whole = {
        "c.jsonl": lines,
        "d.txt": lines,
        "e.yaml": yaml_lines,
        "f.json": b"[" + lines.replace(b"\n", b",") + b"1]",
    }
    expected = [*lines.decode().replace('"', "").split()]
    for limits in (LIMITS, Limits(chunk=1000, batch=3000)):
        for name, content in whole.items():
            files = {"a.jsonl": b'"before"\n', f"{name}.gz": gzip.compress(content)[:-9], "z.jsonl": b'"after"\n{\n'}
            shutil.rmtree("data/raw", ignore_errors=True)
            put(files)
            metrics = run(max_rejected_files=2, limits=limits)
            assert rows() == ["before", "after"]
            assert metrics["rejected"] == {"damaged compression": 1, "invalid JSON": 1}
            assert (metrics["records"], metrics["strings"], metrics["characters"]) == (2, 2, 11)
            # A byte at its end that is no UTF-8: all of it is read again.
            put(
                {f"{name}.gz": gzip.compress(content + b"# \xe9" * (name == "e.yaml") + b'"\xe9"' * (name != "e.yaml"))}
            )
            metrics = run(max_rejected_files=1, limits=limits)
            assert metrics["fallback_encoded"] == [f"{name}.gz"]
            assert metrics["rejected"] == {"invalid JSON": 1}
            found = rows()
            assert (found[0], found[-1], sum(map(len, found))) == ("before", "after", metrics["characters"])
            if name != "d.txt":
                assert found[1:6001] == expected
            metrics = run(max_rejected_files=2, limits=limits, fallback=None)
            assert rows() == ["before", "after"]
            assert metrics["rejected"] == {"unknown encoding": 1, "invalid JSON": 1}


@pytest.mark.parametrize("error", [OSError, MemoryError, KeyboardInterrupt])
def test_the_rest_of_a_large_file_is_not_read_after_an_error_that_no_change_can_cause(
    error: type[BaseException],
) -> None:
    path, limits = Path("raw"), Limits(chunk=1000)
    path.write_bytes(b"line\n" * 100_000)

    def fail(error: type[BaseException]) -> None:
        with source.Source(path, "", sha256_file(path), limits=limits) as raw:
            raw.stream().read(1)
            os.truncate(path, 10)
            raise error

    with pytest.raises(error):
        fail(error)
    path.write_bytes(b"line\n" * 100_000)
    with pytest.raises(source.Changed):  # which a change can cause
        fail(ValueError)


def test_trap_05_nothing_of_a_file_that_changes_while_it_is_read_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(chunk=1000)
    content = "".join(f'"line {number}"\n' for number in range(9000))
    put({"a.jsonl": content})
    run(limits=limits)
    clean = content_of(CORPUS)
    shutil.rmtree("data/.reuse")
    runtime = ExtractRuntime(num_workers=1, reuse_gib=1)

    def read(source: Any, sink: Any) -> None:
        os.truncate("data/raw/a.jsonl", len(content) // 2)
        jsonl.read(source, sink)

    monkeypatch.setitem(readers.READERS, "jsonl", read)
    with pytest.raises(StageError, match=r"1 files were changed .* first is a.jsonl: run `dvc repro`"):
        extract(PARAMS, runtime, limits)
    monkeypatch.setitem(readers.READERS, "jsonl", jsonl.read)
    put({"a.jsonl": content})
    extract(PARAMS, runtime, limits)
    assert content_of(CORPUS) == clean


def become_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def test_trap_05_what_is_no_longer_a_regular_file_is_refused_at_once() -> None:
    become: dict[str, Callable[[Path], None]] = {
        "a.txt": os.mkfifo, "b.txt.gz": os.mkfifo, "c.txt": os.mkdir, "d.txt": become_socket,
        "e.txt": lambda path: path.symlink_to("/dev/zero"), "f.txt": lambda path: path.symlink_to(path),
        "g.jsonl": os.mkfifo,
    }  # fmt: skip
    put(dict.fromkeys(become, '"a line"\n' * 9000))
    organize_raw(num_splits=3)
    for name, change in become.items():
        Path("data/raw", name).unlink()
        change(Path("data/raw", name))
    with pytest.raises(StageError, match=r"7 files were changed .* first is a.txt: run `dvc repro`"):
        extract(PARAMS, ExtractRuntime(num_workers=1, reuse_gib=1))


# text


def test_trap_29_a_summary_that_organize_has_not_written_is_refused() -> None:
    put({f"{number}.txt": "text" for number in range(4)})
    organize_raw(num_splits=2)
    path = Path("data/splits/summary.json")
    summary = json.loads(path.read_text())
    fewer = [json.dumps({**summary, "splits": summary["splits"][:count]}).encode() for count in range(2)]
    values = (None, "text", [1], [{}], summary["splits"][::-1])
    others = [json.dumps({**summary, "splits": value}).encode() for value in values]
    for content in (*NOT_RECORDS, *fewer, *others):
        path.write_bytes(content)
        with pytest.raises(StageError, match=r"^data/splits/summary.json .*run `dvc repro -f -s organize`$"):
            extract(PARAMS, ExtractRuntime(num_workers=1, reuse_gib=1))
    assert not CORPUS.exists()


def test_trap_06_encodings_are_detected() -> None:
    text = "Größe … 5 €"
    for encoding in ("utf-8", "utf-8-sig", "cp1252"):
        assert strings_of("a.txt", text.encode(encoding)) == [text]
    assert run_counts(text.encode("cp1252")) == 1
    assert run_counts(text.encode("utf-8")) == 0
    assert "invalid start byte at byte 2" in rejection_of("a.md", b"Gr\xf6\xdfe", fallback=None)["detail"]
    assert rejection_of("a.csv", b"\x81\xff")["reason"] == "unknown encoding"  # not in cp1252 either
    assert "end of data at byte 4" in rejection_of("a.txt", b"ends\xe2\x82", fallback=None)["detail"]


def run_counts(content: bytes) -> int:
    put({"a.txt": content})
    number: int = run()["fallback_encoded_files"]
    return number


def test_trap_06_encodings_of_streamed_files_are_detected() -> None:
    limits = Limits(chunk=7)
    text = "Größe … 5 €\n" * 9
    for encoding in ("utf-8", "utf-8-sig", "cp1252", "utf-16"):
        assert strings_of("a.txt", text.encode(encoding), limits=limits) == [text]
    content = b"\xc3\xa4" * 25 + b"\xff" + b"a" * 30
    assert "at byte 50" in rejection_of("a.txt", content, fallback=None, limits=limits)["detail"]


def test_trap_06_a_fallback_encoding_is_one_of_text_that_can_be_read_in_pieces() -> None:
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
        pieces.append(decoder.decode(b"", final=True))
        text = some_bytes.decode(encoding, "replace")
        assert "".join(pieces) == text, name
        assert text.encode()  # no lone surrogates
    assert all("fallback_encoding" in error and "such as cp1252" in error for error in refused.values())
    for name in ("utf_16", "utf_16_le", "utf_32", "utf_7", "unicode_escape", "raw_unicode_escape", "idna", "punycode"):
        assert name in refused
    assert {"rot_13", "base64_codec", "hz", "iso2022_jp", "undefined", "klingon", ""} <= refused.keys()
    assert not {"cp1252", "latin_1", "shift_jis", "gb18030", "euc_kr", "koi8_r", "mac_roman", "cp037"} & refused.keys()


WITHOUT_MARK = ("UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE")
SCRIPTS = ("English text", "Größe: 5 €", "Zażółć gęślą jaźń", "Русский текст", "Ελληνικά", "טקסט בעברית", "نص عربي")


@pytest.mark.parametrize("limits", [LIMITS, Limits(chunk=7)], ids=["held", "streamed"])
def test_trap_06_utf16_without_a_byte_order_mark_is_rejected_with_the_remedy(limits: Limits) -> None:
    for encoding in WITHOUT_MARK:
        files = {
            f"{number}{suffix}": f'"{text}"\n'.encode(encoding)
            for number, text in enumerate(SCRIPTS)
            for suffix in (".txt", ".json", ".jsonl", ".yaml")
        }
        put({**files, "a.txt.gz": gzip.compress(files["3.txt"])})
        for fallback in ("cp1252", None):
            metrics = run(max_rejected_files=99, limits=limits, fallback=fallback)
            assert metrics["rejected"] == {"unknown encoding": len(files) + 1}
            remedy = f"looks like {encoding} without a byte order mark: convert it with `iconv -f {encoding} -t UTF-8`"
            assert {rejection["detail"] for rejection in metrics["rejections"]} == {remedy}


def test_trap_06_the_parts_of_a_file_in_utf16_without_a_byte_order_mark_are_rejected() -> None:
    put({"a.jsonl": "".join(f'"line {number}"\n' for number in range(9000)).encode("utf-16-be"), "b.txt": "b"})
    metrics = run(num_splits=4, max_rejected_files=1)
    assert metrics["rejected"].keys() == {"unknown encoding"}
    assert metrics["rejected_files"] == 1
    assert rows() == ["b"]


@pytest.mark.parametrize("limits", [LIMITS, Limits(chunk=7)], ids=["held", "streamed"])
def test_trap_07_text_is_not_changed(limits: Limits) -> None:
    for text in (
        "a\r\nb\rc\n\n\x00\x0c\u2028 end", "\x00", "\x00" * 99, "name\x00" * 9, "abc\x00" * 9, "ab\x00" * 9,
        "one\x00two\x00three\x00", "id\x01name\x02", "text" + "\x00" * 500, "a\x00b\x00" + "c" * 9,
    ):  # fmt: skip
        assert strings_of("a.txt", text, limits=limits) == [text]
    assert strings_of("a.csv", 'x,"y\r\n"') == ['x,"y\r\n"']


# JSON


def test_trap_08_only_values_are_text() -> None:
    value = {"key": "a", "n": [1, 2.5, True, None, "", "b", {"c": ["d", {}, [], "e"]}]}
    assert strings_of("a.json", json.dumps(value)) == ["a", "b", "d", "e"]
    assert strings_of("a.json", '["ab", "c", "déf"]', min_chars=2) == ["ab", "déf"]
    assert strings_of("a.json", '"only"') == ["only"]


def test_trap_09_all_values_of_duplicate_keys_are_kept() -> None:
    text = r'{"a": "first", "b\"\\": "\"quoted\"\\", "a": {"c": "x", "c": "y"}, "d": 1, "d": 2}'
    expected = ["first", '"quoted"\\', "x", "y"]
    assert strings_of("a.json", text) == expected
    assert strings_of("a.jsonl", text) == expected
    for chunk in (1, 5, 9):
        assert scanned(text, chunk) == [expected]


def test_keys_are_recognized_before_any_white_space() -> None:
    for space in ("", " ", "\n\t\r ", " " * 31, "\n" * 32, " " * 33, " " * 5000):
        items = [
            "[",
            "{",
            '"key"',
            ":",
            '"a"',
            ",",
            r'"\\\""',
            ":",
            "[",
            '"b"',
            ",",
            "1",
            ",",
            '"c"',
            "]",
            "}",
            "]",
            "",
        ]
        for chunk in (1, 40, LIMITS.batch):
            assert scanned(space.join(items), chunk) == [["a", "b", "c"]]
            assert scanned(f'"a"{space}', chunk) == [["a"]]


def test_rows_follow_the_order_of_the_files_whatever_their_formats() -> None:
    put(
        {
            "a.json": '["a", "b"]',
            "b.txt": "c",
            "c.json": '"d"',
            "d.yaml": "[e, f]",
            "e.jsonl": '"g"\n"h"',
            "f.json": '"i"',
        }
    )
    run()
    assert "".join(rows()) == "abcdefghi"


def test_trap_10_lone_surrogates_are_replaced() -> None:
    assert strings_of("a.json", r'["\ud83d\ude00"]') == ["😀"]
    assert strings_of("a.json", r'["\ud83d\ude00", "\ud800", "a\udc00\ud83d", "\ude00\ud83d\ude00"]') == [
        "😀", "\ufffd", "a\ufffd\ufffd", "\ufffd😀",
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-be"])
def test_trap_11_byte_order_marks_are_recognized(encoding: str) -> None:
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-32-be": codecs.BOM_UTF32_BE}
    content = mark.get(encoding, b"") + '{"a": "é😀"}\n'.encode(encoding)
    for name in ("a.json", "a.jsonl", "a.yaml", "a.json.gz"):
        packed = gzip.compress(content) if name.endswith("gz") else content
        assert strings_of(name, packed) == ["é😀"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1E+999", "9" * 5000, "-0", "0." + "3" * 9999])
def test_trap_11_unusual_numbers_lose_no_string(number: str) -> None:
    assert strings_of("a.json", f'["a", {number}, {{"k": {number}}}, "b"]') == ["a", "b"]
    assert strings_of("a.jsonl", f'["a", {number}, "b"]\n') == ["a", "b"]


def test_trap_12_deep_nesting_is_read_in_linear_time() -> None:
    depth = 100_000
    text = '[{"a":' * depth + '"deep"' + "}]" * depth
    start = time.monotonic()
    assert strings_of("a.json", text) == ["deep"]
    assert "does not end" in rejection_of("a.json", "[" * depth)["detail"]
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


def test_trap_13_a_stream_has_one_piece_in_memory() -> None:
    class Counter(ListSink):
        strings = most = calls = 0

        def add(self, strings: list[str]) -> None:
            self.calls += 1
            self.strings += len(strings)
            self.most = max(self.most, sum(map(len, strings)))

    sink, pieces = Counter(), Pieces(300_000)
    json_format.read_record(pieces.read, json_format.Strings(sink, LIMITS), LIMITS)
    assert sink.strings == 300_000
    assert sink.most <= pieces.most == LIMITS.batch
    assert sink.calls < 20  # each costs as much as many strings


@pytest.mark.slow
def test_trap_13_memory_does_not_grow_with_the_file() -> None:
    """Ten times the file, the same memory."""
    peaks = []
    for size in (100, 1000):
        with Path("raw.json").open("w") as file:
            file.write("[")
            for _ in range(size):
                file.write(json.dumps(["a string of some length " * 4] * 10_000)[1:-1] + ",")
            file.write('"end"]')
        code = (
            "from pathlib import Path; from stages.formats import json_format, source, writer as w;"
            "from stages.splits import tree; from stages.work import arrow;"
            "stream = arrow.StreamWriter(Path('shard.arrow'), arrow.TEXT);"
            "writer = w.TextWriter(stream, 1, print); path = Path('raw.json');"
            "digest = tree.measure(path)[1];"
            "json_format.read(source.Source(path, compression='', digest=digest), writer);"
            f"assert writer.close().rows == {size * 10_000 + 1}"
        )
        peaks.append(peak_memory(code))
    assert peaks[1] < 1.2 * peaks[0]


def test_trap_13_too_long_strings_are_rejected() -> None:
    limits = Limits(longest_string=1000, longest_document=1000)
    long = "é" * 501
    for name, content in {
        "b.json": json.dumps(["fits", long], ensure_ascii=False),
        "c.yaml": f"- fits\n- {long}\n",
        "d.jsonl": f'"{long}"\n',
        "e.json": json.dumps([long]),  # escaped
    }.items():
        for some in (limits, replace(limits, chunk=10)):
            rejection = rejection_of(name, content, limits=some)
            assert rejection["reason"] == "string too long"
            assert rejection["rows"] == []
            assert "1000" in rejection["detail"]
    for some in (limits, replace(limits, chunk=10)):
        assert strings_of("a.txt", long[1:], limits=some) == [long[1:]]
        assert strings_of("a.json", json.dumps({long: "a"}, ensure_ascii=False), limits=some) == ["a"]


def test_trap_13_records_beside_a_too_long_string_are_kept() -> None:
    limits = Limits(longest_string=100, longest_document=100, chunk=10, batch=10, deepest=100)
    long = "a" * 101
    rejection = rejection_of("a.json", f'["one"]\n["a",\n"{long}", "b"] {{"{long}": "two"}}', limits=limits)
    assert rejection["rows"] == ["one", "two"]
    assert rejection["position"] == "line 3"
    content = f'["one"]\n["a", "{long}", "b"]\n["two", "{"x" * 99}"]\n{long}\n["three"]'
    put({"a.jsonl": content})
    Path("data/raw/a.json").unlink()
    metrics = run(limits=limits, max_rejected_files=1)
    assert rows() == ["one", "two", "x" * 99, "three", "sibling"]
    assert [(entry["position"], entry["reason"]) for entry in metrics["rejections"]] == [
        ("line 2", "string too long"), ("line 4", "invalid JSON"),
    ]  # fmt: skip
    assert rejection_of("a.json", f"[{'1' * 101}]", limits=limits)["reason"] == "number too long"
    assert strings_of("a.json", f'["a",{" " * 999}"b"]', limits=limits) == ["a", "b"]
    rejection = rejection_of("a.json", "[" * 200, limits=limits)
    assert (rejection["reason"], rejection["position"]) == ("nested too deep", "line 1")


@pytest.mark.parametrize("chunk", [1, 2, 7, 50])
def test_strings_longer_than_a_piece_are_read_in_pieces(chunk: int) -> None:
    string = 'é😀\ud83d"\\\n' + "a" * 40 + "😀\ude00"
    expected = string.replace("\ud83d", "\ufffd").replace("\ude00", "\ufffd")
    document = f'[{json.dumps(string)}, {{{json.dumps(string)}: "b"}}]'
    assert scanned(document, chunk) == [[expected, "b"]]
    for wrong in ('"', "\\x", "\t", "\\u12"):
        with pytest.raises(Rejected, match="invalid JSON"):
            scanned(f'["{"a" * 60}{wrong}{"z" * 60}"]', chunk)


LINES = "one line\nand é more\n\n"  # 22 bytes
CUT = {  # what becomes of texts of more than 24 bytes
    "at a line end": (LINES * 3, [LINES] * 3),
    "at the last one": ("a\n" * 20, ["a\n" * 12, "a\n" * 8]),
    "at a space": ("word " * 10, ["word " * 4, "word " * 4, "word " * 2]),
    "at a line end before a space": ("a\nb c " + "d" * 40, ["a\n", "b c ", "d" * 24, "d" * 16]),
    "at a character": ("€" * 20, ["€" * 8, "€" * 8, "€" * 4]),
    "within no character": ("a" + "😀" * 12, ["a" + "😀" * 5, "😀" * 6, "😀"]),
    "not at all": ("d" * 24, ["d" * 24]),
}


@pytest.mark.parametrize("case", CUT)
def test_trap_13_a_long_string_becomes_several_documents(case: str) -> None:
    text, expected = CUT[case]
    contents = {
        "a.txt": text,
        "b.json": json.dumps([text]),
        "c.json": json.dumps([text], ensure_ascii=False),
        "d.jsonl": json.dumps(text) + "\n",
        "e.yaml": json.dumps(text, ensure_ascii=False),
    }
    rule = {"files": "*", "text": "$.text"}
    for some in (Limits(longest_document=24), Limits(longest_document=24, chunk=7, batch=5)):
        for name, content in contents.items():
            assert strings_of(name, content, limits=some) == expected
        assert extract_file("a.parquet", parquet(text), limits=some) == expected
        assert extract_file("a.parquet", parquet(text), rule, limits=some) == expected
        assert extract_file("a.jsonl", json.dumps({"text": text}), rule, limits=some) == expected


def parquet(text: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [text]}), sink)
    return sink.getvalue()


@given(st.text(st.sampled_from("ab é€😀\n"), max_size=99), st.integers(4, 30))
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
    for name, text in (("a.txt", "é" * 50), ("b.json", json.dumps(["é" * 50]))):
        for limits in (Limits(longest_document=24), Limits(longest_document=24, batch=5)):
            assert len(strings_of(name, text, limits=limits, min_chars=50)) == 5
            assert strings_of(name, text, limits=limits, min_chars=51) == []


def test_a_long_conversation_is_not_cut() -> None:
    messages = [{"role": "user", "content": "one two " * 20}]
    rule = {"files": "*", "messages": "$.messages"}
    content = json.dumps({"messages": messages})
    [row] = extract_file("a.jsonl", content, rule, limits=Limits(longest_document=24))
    assert row["messages"] == messages


def test_trap_13_a_long_document_leaves_no_row_if_its_end_is_bad() -> None:
    put({"a.json": '["kept"]', "b.json": json.dumps(["dropped " * 3] * 30) + json.dumps(["dropped " * 3] * 30)[:-1]})
    put({"c.json": json.dumps(["also kept"] * 20)})
    metrics = run(max_rejected_files=1, limits=Limits(batch=50, chunk=20))
    assert rows() == ["kept", *["dropped " * 3] * 30, *["also kept"] * 20]
    assert (metrics["records"], metrics["strings"]) == (3, 51)
    assert metrics["characters"] == sum(map(len, rows()))
    assert metrics["rejections"][0]["position"] == "line 1, character 1680"


def test_strings_of_a_rejected_record_are_not_counted() -> None:
    put({"a.json": '["kept"]', "b.json": json.dumps(["dropped"] * 99)[:-1]})
    metrics = run(max_rejected_files=1, limits=Limits(batch=50, chunk=20))
    assert (metrics["strings"], metrics["mean_characters"], metrics["short_strings"]) == (1, 4, 1)


def test_small_records_are_not_joined_again_for_each_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take hours for a file of them."""
    num_joined = 0
    batches = writer._batches

    def counted(arrays: Sequence[pa.Array], *others: Any) -> Iterator[pa.Array]:
        nonlocal num_joined
        num_joined += sum(map(len, arrays))
        return batches(arrays, *others)

    monkeypatch.setattr(writer, "_batches", counted)
    put({"a.jsonl": '"b"\n[NaN,"c"]\n' * 2000})  # which two readers read in turn
    assert run(limits=Limits(batch=1000))["strings"] == 4000
    assert num_joined < 10 * 4000


def test_trap_14_each_line_is_a_record() -> None:
    content = '{"a": "one"}\r\n\n{bad}\n"two" "three"\n["lost", "lost"\n{"a": "four\u2028"}'
    put({"a.jsonl": content, "b.ndjson": '"five"\n'})
    metrics = run(max_rejected_files=1)
    assert rows() == ["one", "two", "three", "four\u2028", "five"]
    assert metrics["records"] == 4  # documents in one line are one record
    assert [rejection["position"] for rejection in metrics["rejections"]] == ["line 3", "line 5"]
    assert metrics["rejected"] == {"invalid JSON": 2}
    assert metrics["rejected_files"] == 1


def test_trap_14_a_bad_line_leaves_nothing_of_its_first_documents() -> None:
    for limits in (LIMITS, Limits(chunk=1), Limits(chunk=4)):
        rejection = rejection_of("a.jsonl", '["one"]\n{"a": "x"} {bad\n["two"] ["three"]\n', limits=limits)
        assert rejection["rows"] == ["one", "two", "three"]
        assert rejection["position"] == "line 2"


def test_positions_count_characters_in_their_line() -> None:
    for chunk in (1, 3, 1000):
        with pytest.raises(Rejected) as error:
            scanned('["é",\n\n ["é",  x]]' + " " * 50, chunk)
        assert error.value.position == "line 3, character 9"


def numbered_lines(number: int) -> list[dict[str, Any]]:
    """Values of JSON Lines that make a file of several parts."""
    return [{"a": f"line {line} é", "b": ["x" * (line % 50), line, "end"]} for line in range(number)]


def strings_by_line(shard: Path) -> dict[int, list[str]]:
    """The rows of a shard that are from `numbered_lines`, in their order."""
    found: dict[int, list[str]] = {}
    for offset in arrow.batch_offsets(shard):
        for text in filter("b".__ne__, arrow.read_batch(shard, offset)["text"].to_pylist()):
            if number := re.fullmatch(r"line (\d+) é", text):
                strings = found[int(number[1])] = []
            strings.append(text)
    return found


@pytest.mark.parametrize("limits", [LIMITS, Limits(chunk=1000, batch=5000)], ids=["held", "streamed"])
def test_trap_27_the_parts_of_a_file_give_its_strings_in_order(limits: Limits) -> None:
    values = numbered_lines(6000)
    put({"a/large.jsonl": "\r\n".join(json.dumps(value, ensure_ascii=False) for value in values), "b.txt": "b"})
    metrics = run(num_splits=4, limits=limits)
    assert (metrics["files"], metrics["records"]) == (2, 6001)
    shards = list(map(strings_by_line, CORPUS.glob("*.arrow")))
    found = {line: strings for shard in shards for line, strings in shard.items()}
    assert found == {line: strings_in(value) for line, value in enumerate(values)}
    assert sum(map(len, shards)) == len(found)  # no line is in two shards
    for shard in shards:
        assert list(shard) == sorted(shard)
        assert len(shard) > 500


def test_trap_27_the_parts_of_a_file_have_its_encoding() -> None:
    lines = [json.dumps(value, ensure_ascii=False) for value in numbered_lines(3000)]
    text = "\n".join(lines)
    expected = {line: strings_in(value) for line, value in enumerate(numbered_lines(3000))}
    for encoding, number in (("utf-8-sig", 0), ("utf-16", 0), ("cp1252", 1)):
        shutil.rmtree("data/raw", ignore_errors=True)
        put({"a.jsonl": text.encode(encoding)})
        metrics = run(num_splits=4)
        assert (metrics["files"], metrics["fallback_encoded_files"]) == (1, number)
        found = [pair for shard in CORPUS.glob("*.arrow") for pair in strings_by_line(shard).items()]
        assert (dict(found), len(found)) == (expected, 3000)
    # A byte order mark is dropped at the beginning of the file only.
    middle = "\n".join([*lines[:-1], "\ufeff" + lines[-1]])
    put({"a.jsonl": middle.encode("utf-8-sig")})
    [rejection] = run(num_splits=4, max_rejected_files=1)["rejections"]
    assert rejection["position"] == "line 3000"


def test_trap_27_a_file_is_rejected_once_and_not_once_a_part() -> None:
    lines = [json.dumps(value) for value in numbered_lines(3000)]
    lines[10::10] = [f"bad {number}" for number in range(10, 3000, 10)]
    put({"a.jsonl": "\n".join(lines), "b.json": "["})
    with pytest.raises(StageError, match=r"a.jsonl: invalid JSON at line 11: .*\n.*b.json.*\n.*2 files could not be"):
        run(num_splits=4, max_rejected_files=1)
    metrics = run(num_splits=4, max_rejected_files=2, limits=Limits(num_listed=200))
    assert (metrics["files"], metrics["rejected_files"], metrics["records"]) == (2, 2, 2701)
    assert metrics["rejected"] == {"invalid JSON": 300}
    assert [rejection["position"] for rejection in metrics["rejections"][:-1]] == [
        f"line {number + 1}" for number in range(10, 2010, 10)
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("value", [[{"text": "a", "n": number} for number in range(2000)], {"a": {"b": [1]}, "c": "d"}])
def test_a_document_over_several_lines_is_one_hint(value: Any, encoding: str) -> None:
    content = json.dumps(value, indent=1).encode(encoding)
    for rules in (None, [{"files": "*", "text": "$.text"}]):
        shutil.rmtree("data", ignore_errors=True)
        put({"a.jsonl": content, "b.jsonl": '{"text": "b"}\n'})
        metrics = extract_raw(num_splits=3, records=rules, max_rejected_files=1)
        [rejection] = metrics["rejections"]
        assert rejection["detail"] == "a JSON document over several lines, and no JSON Lines: rename it to end in .json"
    assert rows() == ["b"]
    shutil.rmtree("data")
    put({"a.jsonl": '{\n{"text": "b"}\n'})  # only the first line is damaged
    assert extract_raw(max_rejected_files=1)["rejected"] == {"invalid JSON": 1}
    assert rows() == ["b"]


def test_trap_27_a_file_that_changes_or_grows_is_refused_once() -> None:
    lines = "".join(f"{json.dumps(value)}\n" for value in numbered_lines(3000))
    put({"a.jsonl": lines})
    organize_raw(num_splits=4)
    for changed in (lines + '"more"', lines.replace("line", "LINE")):
        put({"a.jsonl": changed})
        with pytest.raises(StageError, match=r"1 files were changed .* first is a.jsonl: run `dvc repro`"):
            extract(PARAMS, ExtractRuntime(num_workers=1, reuse_gib=1))


def test_trap_14_a_file_may_contain_several_documents() -> None:
    assert strings_of("a.json", '{"a": "one"}\n{"a": "two"}["three"] "four"') == ["one", "two", "three", "four"]
    rejection = rejection_of("a.json", '{"a": "one"}\n{"a": "two"\n, x}')
    assert (rejection["position"], rejection["rows"]) == ("line 3, character 3", ["one"])


@pytest.mark.parametrize(
    "text",
    [
        "[1,]", "[,1]", '{"a":1,}', '{"a" 1}', '{"a":}', "{1:1}", "[1 2]", "[01]", "[1.]", "[.5]", "[+1]", "[0x1]",
        '["a]', '["a\tb"]', '["\\x41"]', '["\\u12"]', "['a']", "[tru]", "[nul", "{", "[", '{"a"', '["a"', "]", "}",
        "[}", "{]", '["a"}', "// c\n[]", "[1] x", ":", ",", '{"a":1 "b":2}', '{"a":"b":"c"}', '["a":"b"]', '{"a","b"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_invalid_json_is_rejected(text: str, chunk: int) -> None:
    padding = " " * 40
    for end in ("", padding):
        with pytest.raises(Rejected, match="invalid JSON"):
            scanned(text + end, chunk)


def test_an_empty_file_has_no_document() -> None:
    put({"a.json": "", "b.jsonl": "\n", "c.yaml": "", "d.txt": "", "e.yaml": "# comment\n"})
    put({f"{name}{suffix}": pack(b"") for name in ("a.json", "d.txt") for suffix, pack in PACKERS.items()})
    assert run()["rejected_files"] == 0
    assert rows() == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [string for child in children for string in strings_in(child)]


@settings(deadline=None, max_examples=50)
@given(st.lists(JSON_VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]), st.sampled_from([1, 5, 1 << 20]))
def test_any_json_gives_exactly_its_strings_in_order(
    values: list[Any], ascii_only: bool, indent: int | None, chunk: int
) -> None:
    texts = [json.dumps(value, ensure_ascii=ascii_only, indent=indent) for value in values]
    found = scanned(" ".join(texts), chunk)
    assert [list(filter(None, document)) for document in found] == list(map(strings_in, values))


# YAML

YAML_TYPES = """
null Null NULL ~ true True TRUE false False FALSE
0 7 -1 +12 0777 0o14 0xFF 1234567890123456789012345678901234567890
1.5 -0.0 .5 5. 1e3 1E-3 +1.5e+10 .inf -.Inf +.INF .nan .NaN .NAN
"""
YAML_STRINGS = """
yes no on off y n Yes NO nULL tRUE
1_000 12:30:45 2024-01-02 2001-12-14t21:59:43.10-05:00 0b101 0o8 0xG -0o14 +0x1 1e 1.2.3 . - + -. e3 .e3 +.nan
= << Infinity NaN nan inf -inf a
"""


@pytest.mark.parametrize("scalar", YAML_TYPES.split())
def test_trap_15_plain_scalars_that_are_not_strings(scalar: str) -> None:
    assert (
        yaml_strings(f"a: {scalar}\nb: '{scalar}'\nc: !!str {scalar}\nd: ! {scalar}\ne: >-\n  {scalar}\n")
        == [scalar] * 4
    )


@pytest.mark.parametrize("scalar", [scalar for scalar in YAML_STRINGS.split() if scalar != "-"])
def test_trap_15_plain_scalars_that_are_strings(scalar: str) -> None:
    assert yaml_strings(f"a: {scalar}\n") == [scalar]


class Memory(source.Source):
    """As much of a `Source` as the reader of YAML needs."""

    def __init__(self, text: str | bytes, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.content = text.encode() if isinstance(text, str) else text

    def stream(self) -> BinaryIO:
        return io.BytesIO(self.content)


def yaml_strings(text: str | bytes, chunk: int = LIMITS.chunk) -> list[str]:
    """Of all documents, without empty ones."""
    sink = ListSink()
    yaml_format.read(Memory(text, Limits(chunk=chunk)), sink)
    return [string for document in sink.documents for string in document if string]


def test_trap_15_the_table_in_the_docs_is_correct() -> None:
    """Each scalar in the table of docs/data.md has the type of its row."""
    text = (REPO / "docs/data.md").read_text(encoding="utf-8")
    table = text[text.index("| plain scalar") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 5
    for line in table:
        scalars, kind = line.strip("|").split("|")[:2]
        for scalar in scalars.split("`")[1::2]:
            assert yaml_strings(f"a: {scalar}\n") == ([scalar] if kind.strip() == "string" else []), line


def test_trap_15_the_table_of_what_libyaml_misreads_in_the_docs_is_correct() -> None:
    text = (REPO / "docs/data.md").read_text(encoding="utf-8")
    table = text[text.index("| misread |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 7
    for line in table:
        for shown, character in (("\\|", "\0"), ("\\ufeff", "\ufeff"), ("↵", "\n")):
            line = line.replace(shown, character)
        documents, strings = (cell.replace("\0", "|").split("`")[1::2] for cell in line.strip("|").split("|")[::2])
        for document in documents:
            assert yaml_strings(document), line
            assert set(yaml_strings(document)) <= set(strings), line


@pytest.mark.parametrize(
    "text", ["a:\n\t- b\n", "- [a\n", "[a]\nb\n", "--- @a", '"a": b\n c: d', '"a" "b": c', "- \x7f"]
)
def test_trap_15_what_libyaml_refuses_is_rejected_with_its_place(text: str) -> None:
    with pytest.raises(Rejected, match="invalid YAML") as rejected:
        yaml_strings(text)
    with pytest.raises(yaml.YAMLError) as refused:
        list(yaml.parse(text, Loader=yaml.CSafeLoader))
    error: Any = refused.value
    assert (error.reason if isinstance(error, yaml.reader.ReaderError) else error.problem) in rejected.value.detail
    assert re.fullmatch(r"line \d+, column \d+|byte \d+", str(rejected.value.position))


@pytest.mark.parametrize(
    "text",
    [
        '\t{"a":\t"b"}',
        '{"a": "b"}\n\t\n',
        '["b",\n"a longer string",\n"c",\n"\\ud83d\\ude00", NaN]',
        f'["b", {{"{"k" * 1025}": 1}}]',
    ],
)
def test_trap_15_json_that_libyaml_refuses_is_read(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        list(yaml.parse(text, Loader=yaml.CSafeLoader))
    expected = [string for [*document] in scanned(text) for string in document]
    assert expected[0] == "b"
    assert strings_of("a.yaml", text) == expected
    assert strings_of("a.yaml", text.encode("utf-16"), limits=Limits(chunk=10, batch=10)) == expected


def test_trap_15_yaml_that_begins_as_json_leaves_nothing() -> None:
    rejection = rejection_of("a.yaml", '"a": b\n c: d')
    assert (rejection["rows"], rejection["position"]) == ([], "line 2, column 3")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("a.yaml", text)
            for text in (
                "- [a]]\n", "[a]\nb\n", "a: \x07", "-\ta\n", "a\n...\nb\n", '\t["a"]', "[" * 2000, "--- |\na\n--- b\n",
            )
        ),
        ("a.json", "[a"),
        ("a.jsonl", "[a\n" * 3),
        ("a.txt.gz", gzip.compress(b"a" * 1000, mtime=0)[:-4]),
        ("a.yaml.zst", b"a"),
    ],
)  # fmt: skip
def test_trap_13_what_was_read_leaves_the_memory_without_the_collector(name: str, content: str | bytes) -> None:
    """What is in a cycle stays in memory until the collector looks at it, perhaps for many files."""
    path = Path(name)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    found = suffixes.find(name)
    assert found
    format, compression = found

    def read() -> None:
        with (
            contextlib.suppress(Rejected, source.Unreadable),
            source.Source(path, compression, sha256_file(path)) as raw,
        ):
            readers.READERS[format](raw, ListSink())

    read()  # what is done once, such as imports, does not matter
    gc.collect()
    gc.freeze()  # the objects of before are not looked at
    gc.disable()
    try:
        read()
        # A cycle with a suspended generator is not counted by `collect`, which closes it first.
        assert not [kept for kept in gc.get_objects() if type(kept) is source.Source]
        assert gc.collect() == 0
    finally:
        gc.enable()
        gc.unfreeze()


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

    digest = sha256_file(path)
    monkeypatch.setattr(source.os, "read", read_and_append)
    with pytest.raises(source.Changed), source.Source(path, "", digest) as raw:
        raw.stream().read()
    assert num_reads < 5


def test_a_file_whose_size_is_not_known_is_read() -> None:
    path = Path("/proc/version")  # a regular file of 0 bytes, with content
    assert path.stat().st_size == 0
    with source.Source(path, "", sha256_file(path)) as raw:
        assert raw.stream().read() == path.read_bytes() != b""


def test_the_end_of_a_file_ends_its_last_line() -> None:
    assert yaml_strings("--- |\n one") == ["one\n"]
    assert yaml_strings("--- [one]") == ["one"]


def test_trap_16_tags_run_nothing_and_cost_nothing(empty_project: Path) -> None:
    text = f"""
a: !!python/object/apply:os.system ["touch {empty_project}/ran"]
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
    expected = [f"touch {empty_project}/ran", "Resource", "secret\n", "x", "z", "=", "2024-02-31", "value", "c", "last"]
    assert strings_of("a.yaml", text) == expected
    assert not (empty_project / "ran").exists()


def test_trap_17_each_scalar_is_one_row() -> None:
    bomb = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert strings_of("a.yml", bomb) == ["lol", "lol"]
    merge = "base: &base {x: one}\nchild:\n  <<: *base\n  y: two\n  z: *base\n*base : three\n"
    assert strings_of("a.yml", merge) == ["one", "two", "three"]


def test_line_breaks_of_yaml_1_1_are_characters() -> None:
    text = "a: x\u2028 y\nb: 'p\x85 q'\n\u2029c: \u2029\nd: \"ä\ufdd01\"\n"
    assert strings_of("a.yaml", text) == ["x\u2028 y", "p\x85 q", "\u2029", "ä\ufdd01"]


def test_trap_15_a_question_mark_before_a_letter_is_text() -> None:
    assert yaml_strings("[?x, a ?b, {c: ?d}, {?e: f}]") == ["?x", "a ?b", "?d", "f"]
    assert yaml_strings("? [g]\n: ['?h', \"?i\", ?\tj]") == ["?h", "?i"]
    assert yaml_strings("- !k?l <?m>\n- a?b:?c\n- ??n\n- 'o\ufdd1'\n") == ["<?m>", "a?b:?c", "??n", "o\ufdd1"]
    for number in range(16_370, 16_390):  # libyaml reads pieces of 16 KiB
        assert yaml_strings("[" + " " * number + "?x, ??, ? y]") == ["?x", "??"]


def test_trap_13_strings_of_yaml_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(chunk=10, batch=10)
    sizes: list[int] = []
    add = TextWriter.add
    monkeypatch.setattr(TextWriter, "add", lambda self, *args: (sizes.append(len(args[0])), add(self, *args))[1])
    text = "- four\n" * 100
    assert strings_of("a.yaml", text, limits=limits) == ["four"] * 100
    assert max(sizes) == 3
    assert rejection_of("a.yaml", text + "- [", limits=limits)["rows"] == []


def test_trap_18_documents_before_a_bad_one_are_kept() -> None:
    put({"a.yaml": "one\n---\n- two\n---\n...\n---\n{a: three}\n"})
    assert run()["records"] == 4
    assert rows() == ["one", "two", "three"]
    rejection = rejection_of("b.yaml", "one\n---\n[two, three\n---\nfour\n")
    assert (rejection["reason"], rejection["position"]) == ("invalid YAML", "line 4, column 1")
    assert rejection["rows"] == ["one"]
    assert rejection_of("b.yaml", "a: \x07")["position"] == "byte 3"


def test_trap_13_what_libyaml_holds_in_memory_is_limited() -> None:
    limits = Limits(longest_string=20_000)
    fits, long = "a" * 3_000, "a" * 60_000
    texts = [
        long, f"'{long}'", f'"{long}"', f"|\n {long}", ">\n" + " a\n" * 30_000, f"[? {long}]", f"&{long} b",
        f"*{long}", f"!{long} b", f"!<{long}> b", f"# {long}\nb", "\n" * 60_000, '"' + "\\u0416" * 10_000,
    ]  # fmt: skip
    documents = {f"{number}.yaml": f"kept\n---\n--- {text}" for number, text in enumerate(texts)}
    documents |= {"directive.yaml": f"kept\n---\n...\n%{long}", "prefix.yaml": f"kept\n---\n...\n%TAG ! {long}"}
    put(documents)
    put({"a.yaml": f"- {fits}\n" * 30, "b.yaml.gz": gzip.compress(documents["0.yaml"].encode())})
    metrics = run(max_rejected_files=99, limits=limits)
    assert metrics["rejected"] == {"string too long": len(documents) + 1}
    assert {rejection["position"] for rejection in metrics["rejections"]} == {"line 3"}
    assert rows().count("kept") == len(documents) + 1
    assert rows().count(fits) == 30


def test_trap_18_many_directives_are_rejected_at_once() -> None:
    start = time.monotonic()
    directives = "".join(f"%TAG !{number}! x\n" for number in range(100_000))
    assert "%TAG directives" in rejection_of("a.yaml", f"a\n---\nb\n...\n{directives}---\nc\n")["detail"]
    assert time.monotonic() - start < 5  # libyaml alone needs minutes
    assert strings_of("a.yaml", "".join(f"%TAG !{number}! x\n" for number in range(900)) + "--- !1!y z\n") == ["z"]


def test_trap_18_a_long_prefix_of_tags_is_rejected() -> None:
    sink = ListSink()  # a copy of the prefix is in each tag
    with pytest.raises(Rejected, match="string too long"):
        yaml_format.read(Memory(f"a\n...\n%TAG !e! {'x' * 1025}\n---\n- [!e!a b]\n"), sink)
    assert sink.documents == [["a"]]
    assert yaml_strings(f"%TAG !e! {'x' * 1024}\n--- !e!a b\n") == ["b"]


@pytest.mark.parametrize("opening", ["[", "{", "- ", "? ", "[a, ", "[\n"])
def test_trap_18_a_million_openings_are_rejected_at_once(opening: str) -> None:
    start = time.monotonic()
    assert rejection_of("a.yaml", opening * 1_000_000)["reason"] == "nested too deep"
    assert time.monotonic() - start < 2
    assert strings_of("b.yaml", "[" * 900 + "a" + "]" * 900) == ["a"]


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


def zst(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zst}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("limits", [LIMITS, Limits(chunk=10)], ids=["held", "streamed"])
def test_trap_19_compressed_files_give_the_same_rows(suffix: str, limits: Limits) -> None:
    pack = PACKERS[suffix]
    plain: Files = {"a.txt": "one\n" * 99, "b.json": '["two"]' * 9, "c.jsonl": '"three"\n' * 9, "d.yml": "- four\n" * 9}
    put(plain)
    run(limits=limits)
    expected = content_of(CORPUS)
    for name, content in plain.items():
        data = str(content).encode()
        Path("data/raw", name).unlink()
        put({name + suffix.upper(): pack(data[:5]) + pack(data[5:])})  # two members
    run(limits=limits)
    assert content_of(CORPUS) == expected


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("limits", [LIMITS, Limits(chunk=10)], ids=["held", "streamed"])
def test_trap_19_truncated_members_are_rejected(suffix: str, limits: Limits) -> None:
    pack = PACKERS[suffix]
    good = pack(b'"one"\n' * 99)
    for bad in (good[:-3], good + good[:-9], good + b"garbage", b"garbage", b""):
        rejection = rejection_of("a.jsonl" + suffix, bad, limits=limits)
        assert rejection["reason"] == "damaged compression"
        assert rejection["rows"] == []


def test_trap_19_empty_and_skippable_frames_are_no_damage() -> None:
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    content = b"".join([skippable, *[zst(b"")] * 999, zst(b"te"), skippable, zst(b"xt")])
    assert strings_of("a.txt.zst", content) == ["text"]
    assert strings_of("a.txt.gz", gzip.compress(b"") * 999 + gzip.compress(b"text") + bytes(99)) == ["text"]
    assert strings_of("a.txt.zst", skippable) == []


def test_trap_19_a_window_that_needs_too_much_memory_is_rejected_with_the_remedy() -> None:
    def packed(window_log: int) -> bytes:  # a frame header, and a block that is not compressed
        return b"\x28\xb5\x2f\xfd\x00" + bytes([window_log - 10 << 3]) + (4 << 3 | 1).to_bytes(3, "little") + b"text"

    for window_log in (28, 31):
        rejection = rejection_of("a.txt.zst", packed(window_log))
        assert rejection["reason"] == "window too large"
        assert "zstd -dc --long=31" in rejection["detail"]
    assert strings_of("a.txt.zst", packed(27)) == ["text"]


# The output


def test_trap_20_edits_and_fewer_splits_leave_nothing_old() -> None:
    put({f"{number}.txt": f"text {number}" for number in range(6)})
    run(num_splits=4)
    before = content_of(CORPUS)
    put({"3.txt": "edited"})
    run(num_splits=4)
    after = content_of(CORPUS)
    assert "edited" in rows()
    assert "text 3" not in rows()
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) == 2  # one shard, and the state with its fingerprint
    assert "state.json" in changed
    run(num_splits=2)
    assert [path.name for path in sorted(CORPUS.glob("*.arrow"))] == [
        "data-00000-of-00002.arrow", "data-00001-of-00002.arrow",
    ]  # fmt: skip


def test_trap_21_a_killed_worker_leaves_nothing() -> None:
    put_slow_files()
    run(num_splits=4)
    clean = content_of(CORPUS)

    def kill() -> None:
        workers = wait_for_workers(psutil.Process(), 1)
        time.sleep(0.5)
        workers[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(StageError, match=r"worker process was killed.*runtime.num_workers, now 2"):
        run(num_splits=4, num_workers=2)
    thread.join()
    assert content_of(CORPUS) == clean  # the old result, which dvc would have removed; not a mixture
    assert not list(CORPUS.parent.glob("corpus.*"))
    run(num_splits=4, num_workers=2)
    assert content_of(CORPUS) == clean


def test_trap_21_workers_end_with_the_stage() -> None:
    put_slow_files()
    put_large_file()
    organize_raw(num_splits=4)
    write_params_of_extract(num_workers=2)
    stage = start_stage("extract")
    workers = wait_for_workers(stage, 2)
    time.sleep(0.3)
    stage.send_signal(signal.SIGKILL)
    stage.communicate()
    wait_for(lambda: not any(map(is_alive, workers)), seconds=30)  # one that is just starting notices it later
    assert not CORPUS.exists()
    assert len(list(CORPUS.parent.glob("corpus.*"))) == 1
    with publish.lock(CORPUS):  # as the next run does
        assert not list(CORPUS.parent.glob("corpus.*"))


def test_trap_28_two_runs_at_once_give_the_corpus_of_one() -> None:
    put_slow_files(12, 2000)
    run(num_splits=8)
    clean = content_of(CORPUS)
    shutil.rmtree("data/.reuse")
    shutil.rmtree(CORPUS)
    write_params_of_extract(num_workers=2)
    with publish.lock(CORPUS):  # both wait, and then compete
        stages = [start_stage("extract") for _ in range(2)]
        for stage in stages:
            assert "waiting for another run that writes data/corpus" in stage.stdout.readline()
    for stage in stages:
        stage.communicate()
    assert [stage.returncode for stage in stages] == [0, 0]
    assert content_of(CORPUS) == clean
    run(num_splits=8)
    assert content_of(CORPUS) == clean


def test_trap_22_the_number_of_workers_changes_no_byte() -> None:
    put({f"{number}.json": json.dumps(["text"] * number) for number in range(9)})
    put({"bad.yaml": "[", "worse.yaml": "{"})
    results, metrics = [], []
    for number in (1, 2, 3):
        metrics.append(run(num_splits=4, num_workers=number, max_rejected_files=2))
        results.append(content_of(CORPUS))
    assert results[0] == results[1] == results[2]
    assert metrics[0] == metrics[1] == metrics[2]
    names = [entry["filename"] for entry in json.loads(results[0]["state.json"])["_data_files"]]
    assert names == sorted(names)  # although the largest split is the first to be worked on
    assert [rejection["path"] for rejection in metrics[0]["rejections"]] == ["bad.yaml", "worse.yaml"]


def test_trap_23_datasets_loads_it_memory_mapped() -> None:
    put({"a.json": json.dumps([f"string {number}" for number in range(50)]), "b.txt": "b" * 99})
    run(num_splits=3, limits=Limits(batch=20))  # several record batches a shard
    dataset = datasets.load_from_disk(str(CORPUS))
    assert len(dataset.cache_files) == 3
    assert len(dataset.data.column("text").chunks) > 20
    assert sorted(dataset["text"]) == sorted([f"string {number}" for number in range(50)] + ["b" * 99])
    mapped = Path("/proc/self/maps").read_text()
    assert str(CORPUS.resolve()) in mapped
    assert dataset.map(lambda row: {"size": len(row["text"])}, load_from_cache_file=False)["size"][0] > 0


def test_trap_23_a_corpus_without_strings_can_be_loaded() -> None:
    put({"a.json": "[1, 2]"})
    metrics = run(num_splits=2)
    assert metrics["strings"] == 0
    assert metrics["records"] == 1
    dataset = datasets.load_from_disk(str(CORPUS))
    assert dataset.num_rows == 0
    assert dataset.column_names == ["text"]


@pytest.mark.slow
def test_trap_23_a_split_may_have_more_than_two_gib() -> None:
    text = "a line of forty characters, more or less\n" * (1 << 24)
    for number in range(4):
        put({f"{number}.txt": text})
    del text
    run()
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
    run(num_splits=4)
    output = sum(path.stat().st_size for path in CORPUS.iterdir())
    assert 0.9 * output < most < 1.1 * output


# The stage


def test_files_in_another_encoding_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    put({f"{name}.txt": "déjà".encode("cp1252") for name in "bca"} | {"d.txt": "déjà"})
    metrics = run(num_splits=2)
    assert (metrics["fallback_encoded_files"], metrics["fallback_encoded"]) == (3, ["a.txt", "b.txt", "c.txt"])
    expected = (
        "3 files are not in UTF-8 and were read as cp1252 (fallback_encoding), such as a.txt: see whether they look"
    )
    assert expected in capsys.readouterr().out
    with pytest.raises(
        StageError, match=r"3 files could not be read, .*: set fallback_encoding, or fix them, or raise"
    ):
        run(num_splits=2, fallback=None)


def test_files_that_give_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = io.BytesIO()
    pq.write_table(pa.table({"id": [*range(9000)]}), numbers, row_group_size=1000, compression="none")
    silent: dict[str, str | bytes] = {
        "a.json": '{"a:": 1, "b": [true, {}]}', "b.jsonl": "1\n" * 40_000, "c.yaml": "a: 1", "d.txt": "",
        "e.parquet": numbers.getvalue(), "f.json": "[]", "rule/g.csv": "text,id\n",
    }  # fmt: skip
    put(silent)
    put({"x.json": '{"a": ":x", ":b": 1}', "y.jsonl": "1\n" * 40_000 + '"y"\n', "z.json": "{", "rule/x.csv": "text\na"})
    rules = [{"files": "rule/*", "text": "$.text"}]
    extract_raw(num_splits=3, records=rules, max_rejected_files=1)
    expected = f"{len(silent)} files have no text, and nothing in them was rejected, such as a.json: `python"
    assert expected in capsys.readouterr().out
    extract_raw(num_splits=3, records=rules, max_rejected_files=1)  # from the store
    assert expected in capsys.readouterr().out
    for name in silent:
        Path("data/raw", name).unlink()
    extract_raw(num_splits=3, records=rules, max_rejected_files=1)
    assert "no text" not in capsys.readouterr().out


def test_too_many_rejected_files_fail_after_all_were_read() -> None:
    put({f"{number:02d}.json": "[" for number in range(25)})
    put({"good.txt": "good", "x.yaml": "{"})
    with pytest.raises(StageError) as error:
        run(num_splits=2, max_rejected_files=25)
    lines = str(error.value).splitlines()
    assert lines[0] == "00.json: invalid JSON at line 1, character 2: the document does not end"
    assert lines[-2] == "... and 6 more"
    assert lines[-1].startswith("26 files could not be read, max_rejected_files is 25: fix them, or raise it")
    metrics = json.loads(Path("data/extract.json").read_text())
    assert metrics["rejected"] == {"invalid JSON": 25, "invalid YAML": 1}
    assert not CORPUS.exists()
    assert run(max_rejected_files=26)["rejected_files"] == 26


def test_many_bad_lines_are_counted_and_the_first_are_listed() -> None:
    put({"a.jsonl": "x\n" * 10, "b.jsonl": "x\n" * 2})
    metrics = run(max_rejected_files=2, limits=Limits(num_listed=3))
    assert metrics["rejected"] == {"invalid JSON": 12}
    assert len(metrics["rejections"]) == 5


@pytest.mark.parametrize("num_splits", [1, 3])
def test_no_more_rejections_are_listed_than_later_stages_read(num_splits: int) -> None:
    put({f"{number}.jsonl": "x\n" * 3 for number in range(9)})
    for is_fresh in (True, False):  # the second time from the store
        metrics = run(num_splits, max_rejected_files=9, is_fresh=is_fresh, limits=Limits(most_listed=5))
        assert (metrics["rejected_files"], metrics["rejected"]) == (9, {"invalid JSON": 27})
        assert len(metrics["rejections"]) == 5
    stored = [json.loads(path.read_text())["value"]["rejected"] for path in Path("data/.reuse").glob("*/value.json")]
    assert max(sum(len(file["rejections"]) for file in files) for files in stored) == 5
    assert Limits().most_listed * 1000 < publish.LARGEST


def test_rejected_names_that_are_not_utf8_are_listed() -> None:
    put({os.fsdecode(b"\xff.json"): "["})
    assert run(max_rejected_files=1)["rejections"][0]["path"] == "\\xff.json"


def test_each_format_that_organize_lists_has_a_reader() -> None:
    assert set(suffixes.FORMATS.values()) == set(readers.READERS)


def test_the_example_format_in_the_docs_works(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPO / "docs/data.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {"Source": source.Source, "TextWriter": TextWriter, "Rejected": Rejected}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    monkeypatch.setitem(suffixes.FORMATS, ".talk", "talk")
    monkeypatch.setitem(readers.READERS, "talk", scope["read"])
    rejection = rejection_of("a.talk", "she: hello\nnothing\nhe: good: bye\n")
    assert rejection["rows"] == ["hello", "good: bye"]
    assert rejection["position"] == "line 2"


def test_each_trap_has_a_row_in_the_docs() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (REPO / "docs/data-traps.md").read_text(encoding="utf-8"), re.M)
    tested: dict[int, set[str]] = {}
    for path in (REPO / "tests").glob("test_*.py"):
        for number in re.findall(r"^def test_trap_(\d+)_", path.read_text(encoding="utf-8"), re.M):
            tested.setdefault(int(number), set()).add(path.name)
    assert {int(number): set(re.findall(r"`(.+?)`", files)) for number, files in rows} == tested


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
