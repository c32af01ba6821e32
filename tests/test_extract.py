import codecs
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
import yaml
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts.command import StageError
from stages.artifacts.publish import sha256_file
from stages.corpus import arrow, cut, formats, source
from stages.corpus.formats import json as json_format
from stages.corpus.formats import yaml as yaml_format
from stages.corpus.source import Rejected
from stages.corpus.text import TextWriter
from stages.extract import ExtractParams, ExtractRuntime, extract
from stages.organize import OrganizeParams, OrganizeRuntime, organize
from tests.conftest import peak_memory

REPO = Path(__file__).parent.parent
CORPUS = Path("data/corpus")

Files = dict[str, str | bytes]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project to run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(files: Files) -> None:
    for name, content in files.items():
        path = Path("data/raw", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def run(
    num_splits: int = 1, num_workers: int = 1, *, max_rejected_files: int = 0, fallback: str | None = "cp1252",
    min_chars: int = 1, keep_source: bool = False, is_fresh: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Organize and extract, from nothing if `is_fresh`; return `data/extract.json`."""
    if is_fresh:
        shutil.rmtree("data/.reuse", ignore_errors=True)
    organize(OrganizeParams(num_splits, "data/raw", False), OrganizeRuntime(1))
    options = ExtractParams(fallback, max_rejected_files, min_chars, "data/raw", False, keep_source)
    extract(options, ExtractRuntime(num_workers, 1))
    metrics: dict[str, Any] = json.loads(Path("data/extract.json").read_text())
    return metrics


def rows() -> list[str]:
    return list(datasets.load_from_disk(str(CORPUS))["text"])


def strings_of(name: str, content: str | bytes, **options: Any) -> list[str]:
    """The rows of a corpus of one good file."""
    shutil.rmtree("data/raw", ignore_errors=True)
    put({name: content})
    run(**options)
    return rows()


def rejection_of(name: str, content: str | bytes, **options: Any) -> dict[str, Any]:
    """What is said of the only bad file of a corpus, whose other file stays."""
    shutil.rmtree("data/raw", ignore_errors=True)
    put({name: content, "sibling.txt": "sibling"})
    metrics = run(max_rejected_files=1, **options)
    assert rows()[-1] == "sibling"
    assert metrics["rejected_files"] == 1
    [rejection] = metrics["rejections"]
    assert rejection["path"] == name
    assert metrics["rejected"] == {rejection["reason"]: 1}
    return {**rejection, "rows": rows()[:-1]}


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class ListSink:
    """A sink that remembers documents."""

    keep_source = False

    def __init__(self) -> None:
        self.documents: list[list[str]] = []
        self.current: list[str] = []

    def add(self, strings: list[str], places: Sequence[str] = ()) -> None:
        self.current += strings

    def end(self) -> None:
        self.documents.append(self.current)
        self.current = []

    def add_json(self, document: bytes) -> None:
        raise AssertionError

    def reject(self, rejected: Rejected) -> None:
        self.current = []


def scanned(text: str | bytes) -> list[list[str]]:
    sink = ListSink()
    json_format.scan(io.BytesIO(text.encode() if isinstance(text, str) else text), sink)
    return sink.documents


# organize to extract


def test_trap_05_a_file_that_changed_is_noticed() -> None:
    put({"a.txt": "old", "b.txt": "b"})
    organize(OrganizeParams(1, "data/raw", False), OrganizeRuntime(1))
    options, runtime = ExtractParams(None, 9, 1, "data/raw", False, False), ExtractRuntime(1, 1)
    for change in (lambda: put({"a.txt": "new"}), lambda: Path("data/raw/a.txt").unlink()):
        change()
        with pytest.raises(StageError, match=r"1 files were changed .* first is a.txt: run `dvc repro`"):
            extract(options, runtime)
        assert not CORPUS.exists()


# text


def test_trap_06_encodings() -> None:
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


def test_trap_06_encoding_of_a_streamed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "WHOLE", 10)
    monkeypatch.setattr(source, "CHUNK", 7)
    text = "Größe … 5 €\n" * 9
    for encoding in ("utf-8", "utf-8-sig", "cp1252", "utf-16"):
        assert strings_of("a.txt", text.encode(encoding)) == [text]
    assert "at byte 50" in rejection_of("a.txt", b"\xc3\xa4" * 25 + b"\xff" + b"a" * 30, fallback=None)["detail"]


def test_trap_07_text_is_kept_as_it_is() -> None:
    text = "a\r\nb\rc\n\n\x00\x0c\u2028 end"
    assert strings_of("a.txt", text) == [text]
    assert strings_of("a.csv", 'x,"y\r\n"') == ['x,"y\r\n"']


# JSON


def cut_out(text: str) -> list[str] | None:
    """The strings of a document, if it is one that can be cut."""
    document = text.encode()
    return cut.strings([document]).to_pylist() if json_format.is_document(document) else None


def test_trap_08_values_only() -> None:
    value = {"key": "a", "n": [1, 2.5, True, None, "", "b", {"c": ["d", {}, [], "e"]}]}
    assert strings_of("a.json", json.dumps(value)) == ["a", "b", "d", "e"]
    assert strings_of("a.json", '["ab", "c", "déf"]', min_chars=2) == ["ab", "déf"]
    assert strings_of("a.json", '"only"') == ["only"]


def test_trap_09_duplicate_keys() -> None:
    text = r'{"a": "first", "b\"\\": "\"quoted\"\\", "a": {"c": "x", "c": "y"}, "d": 1, "d": 2}'
    expected = ["first", '"quoted"\\', "x", "y"]
    assert strings_of("a.json", text) == expected
    assert strings_of("a.jsonl", text) == expected
    assert cut_out(text) == expected


def test_trap_09_the_fast_reader_is_used_where_it_is_exact() -> None:
    for text in (
        r'{"a": "\\", "b": "\\\"", "\"": "\u0022", "c": ""}',
        '["a"]',
        "{}",
        '{"a": {"a": "b"}}',
        '"a"',
        '""',
        "1",
    ):
        assert cut_out(text) == list(filter(None, scanned(text)[0]))


def test_white_space_tells_keys_from_values() -> None:
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
        assert cut_out(space.join(items)) == ["a", "b", "c"]
        assert cut_out(f'"a"{space}') == ["a"]


def test_many_documents_are_cut_at_once() -> None:
    documents = [b'"a"', b'{"b": "c"}', b" 1 ", b'["\\n\\u00e9", "\xc3\xa9"]', b'"d\\\\"', b"{}"]
    assert cut.strings(documents).to_pylist() == ["a", "c", "\n\u00e9", "\u00e9", "d\\"]


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


def test_trap_10_surrogates() -> None:
    assert strings_of("a.json", r'["\ud83d\ude00"]') == ["😀"]
    assert strings_of("a.json", r'["\ud83d\ude00", "\ud800", "a\udc00\ud83d", "\ude00\ud83d\ude00"]') == [
        "😀", "\ufffd", "a\ufffd\ufffd", "\ufffd😀",
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-be"])
def test_trap_11_byte_order_marks(encoding: str) -> None:
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-32-be": codecs.BOM_UTF32_BE}
    content = mark.get(encoding, b"") + '{"a": "é😀"}\n'.encode(encoding)
    for name in ("a.json", "a.jsonl", "a.yaml", "a.json.gz"):
        packed = gzip.compress(content) if name.endswith("gz") else content
        assert strings_of(name, packed) == ["é😀"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1E+999", "9" * 5000, "-0", "0." + "3" * 9999])
def test_trap_11_numbers_cost_no_sibling(number: str) -> None:
    assert strings_of("a.json", f'["a", {number}, {{"k": {number}}}, "b"]') == ["a", "b"]
    assert strings_of("a.jsonl", f'["a", {number}, "b"]\n') == ["a", "b"]


def test_trap_12_depth() -> None:
    depth = 100_000
    text = '[{"a":' * depth + '"deep"' + "}]" * depth
    start = time.monotonic()
    assert strings_of("a.json", text) == ["deep"]
    assert "does not end" in rejection_of("a.json", "[" * depth)["detail"]
    assert time.monotonic() - start < 20  # and not the minutes of a reader that starts over at each level


class Pieces(io.RawIOBase):
    """A JSON array of strings that is made while it is read, and remembers how much was asked for at once."""

    def __init__(self, number: int) -> None:
        self.left, self.most, self.rest = number, 0, bytearray(b"[")

    def read(self, size: int = -1) -> bytes:
        self.most = max(self.most, size)
        while self.left and len(self.rest) < size:
            self.left -= 1
            self.rest += b'"number %d"' % self.left + (b"," if self.left else b"]")
        piece, self.rest = self.rest[:size], self.rest[size:]
        return bytes(piece)


def test_trap_13_streams_hold_one_piece() -> None:
    class Counter(ListSink):
        strings = most = 0

        def add(self, strings: list[str], places: Sequence[str] = ()) -> None:
            self.strings += len(strings)
            self.most = max(self.most, sum(map(len, strings)))

    sink, pieces = Counter(), Pieces(300_000)
    json_format.scan(pieces, sink)
    assert sink.strings == 300_000
    assert sink.most <= pieces.most == source.CHUNK


@pytest.mark.slow
def test_trap_13_memory_of_a_long_file() -> None:
    """Ten times the file, the same memory."""
    peaks = []
    for size in (100, 1000):
        with Path("raw.json").open("w") as file:
            file.write("[")
            for _ in range(size):
                file.write(json.dumps(["a string of some length " * 4] * 10_000)[1:-1] + ",")
            file.write('"end"]')
        code = (
            "from pathlib import Path; from stages.corpus import arrow, source, text, tree;"
            "from stages.corpus.formats import json;"
            "stream = arrow.StreamWriter(Path('shard.arrow'), arrow.TEXT);"
            "writer = text.TextWriter(stream, 1, print); path = Path('raw.json');"
            "json.read(source.Source(path, '', tree.measure(path)[1], None), writer);"
            f"assert writer.close().rows == {size * 10_000 + 1}"
        )
        peaks.append(peak_memory(code))
    assert peaks[1] < 1.2 * peaks[0]


def test_trap_13_too_long_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("source", "text", "formats.json", "formats.jsonl"):
        monkeypatch.setattr(f"stages.corpus.{module}.LONGEST_STRING", 1000)
    monkeypatch.setattr(json_format, "WHOLE", 1000)
    long = "é" * 501
    for name, content in {
        "a.txt": long,
        "b.json": json.dumps(["fits", long], ensure_ascii=False),
        "c.yaml": f"- fits\n- {long}\n",
        "d.jsonl": f'"{long}"\n',
    }.items():
        rejection = rejection_of(name, content)
        assert rejection["reason"].endswith("too long")
        assert rejection["rows"] == []
        assert "1000" in rejection["detail"]
    monkeypatch.setattr(source, "WHOLE", 10)
    assert rejection_of("a.txt", long)["reason"] == "string too long"
    assert rejection_of("a.json", f'["{long}"]')["reason"] == "string too long"
    assert strings_of("a.txt", long[:500]) == [long[:500]]


def test_trap_13_large_content_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    put({"a.txt": "0123456789", "b.txt": "0123456789!"})
    monkeypatch.setattr(source, "WHOLE", 10)
    small, large = (
        source.Source(path, "", sha256_file(path), None) for path in (Path("data/raw/a.txt"), Path("data/raw/b.txt"))
    )
    assert small.data == b"0123456789"
    assert large.data is None
    assert large.stream().read() == b"0123456789!"
    monkeypatch.setattr(source, "LONGEST_STRING", 10)
    monkeypatch.setattr(source.Source, "stream", None)  # not even tried
    with pytest.raises(Rejected, match="string too long"):
        large.text()


def test_trap_13_a_long_document_leaves_no_row_if_its_end_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.corpus.text.BATCH", 50)
    monkeypatch.setattr(json_format, "CHUNK", 20)
    monkeypatch.setattr(source, "WHOLE", 10)
    put({"a.json": '["kept"]', "b.json": json.dumps(["dropped " * 3] * 30) + json.dumps(["dropped " * 3] * 30)[:-1]})
    put({"c.json": json.dumps(["also kept"] * 20)})
    metrics = run(max_rejected_files=1)
    assert rows() == ["kept", *["dropped " * 3] * 30, *["also kept"] * 20]
    assert (metrics["documents"], metrics["strings"]) == (3, 51)
    assert metrics["characters"] == sum(map(len, rows()))
    assert metrics["rejections"][0]["position"] == "line 1, character 1679"


def test_trap_14_lines() -> None:
    content = '{"a": "one"}\r\n\n{bad}\n"two" "three"\n["lost", "lost"\n{"a": "four\u2028"}'
    put({"a.jsonl": content, "b.ndjson": '"five"\n'})
    metrics = run(max_rejected_files=1)
    assert rows() == ["one", "two", "three", "four\u2028", "five"]
    assert metrics["documents"] == 5
    assert [rejection["position"] for rejection in metrics["rejections"]] == ["line 3", "line 5"]
    assert metrics["rejected"] == {"invalid JSON": 2}
    assert metrics["rejected_files"] == 1


def test_trap_14_documents_in_a_row() -> None:
    assert strings_of("a.json", '{"a": "one"}\n{"a": "two"}["three"] "four"') == ["one", "two", "three", "four"]
    rejection = rejection_of("a.json", '{"a": "one"}\n{"a": "two"\n, x}')
    assert (rejection["position"], rejection["rows"]) == ("line 3, character 27", ["one"])


@pytest.mark.parametrize(
    "text",
    [
        "[1,]", "[,1]", '{"a":1,}', '{"a" 1}', '{"a":}', "{1:1}", "[1 2]", "[01]", "[1.]", "[.5]", "[+1]", "[0x1]",
        '["a]', '["a\tb"]', '["\\x41"]', '["\\u12"]', "['a']", "[tru]", "[nul", "{", "[", '{"a"', '["a"', "]", "}",
        "[}", "{]", '["a"}', "// c\n[]", "[1] x", ":", ",", '{"a":1 "b":2}', '{"a":"b":"c"}', '["a":"b"]', '{"a","b"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_invalid_json_is_rejected(text: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_format, "CHUNK", chunk)
    padding = " " * 40
    with pytest.raises(Rejected, match="invalid JSON"):
        scanned(text + padding)
    assert cut_out(text) is None


def test_an_empty_file_holds_nothing() -> None:
    put({"a.json": "", "b.jsonl": "\n", "c.yaml": "", "d.txt": "", "e.yaml": "# comment\n", "f.txt.gz": b""})
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


@settings(deadline=None, max_examples=200)
@given(st.lists(JSON_VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]), st.sampled_from([1, 5, 1 << 20]))
def test_any_json_gives_exactly_its_strings_in_order(
    values: list[Any], ascii_only: bool, indent: int | None, chunk: int
) -> None:
    texts = [json.dumps(value, ensure_ascii=ascii_only, indent=indent) for value in values]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_format, "CHUNK", chunk)
        found = scanned(" ".join(texts))
    assert [list(filter(None, document)) for document in found] == list(map(strings_in, values))
    for text, value in zip(texts, values, strict=True):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            assert cut_out(text) is None
        else:
            assert cut_out(text) == strings_in(value)


def test_sources_of_strings() -> None:
    """`keep_source` gives the file, the number of the document in it, and a JSON pointer into that."""
    value = {"a": "x", "": [1, "y", ["", "z"], {"b/c~d": "w"}], "n": {"m": None, "o": "v"}, "\n": "u"}
    places = {"x": "/a", "y": "//1", "z": "//2/1", "w": "//3/b~1c~0d", "v": "/n/o", "u": "/\n"}
    put({
        "a.json": json.dumps(value) + '"second"',
        "b.jsonl": f'["b"]\n\nbad\n{json.dumps(value)}\n',
        "c.yaml": f"--- {json.dumps(value)}\n--- {{\u2028: third}}\n",
        "d.txt": "text",
    })  # fmt: skip
    run(max_rejected_files=1, keep_source=True)
    dataset = datasets.load_from_disk(str(CORPUS))
    sources = {source: text for text, source in zip(dataset["text"], dataset["source"], strict=True)}
    assert sources == {
        **{f"a.json#1{place}": text for text, place in places.items()}, "a.json#2": "second",
        "b.jsonl#1/0": "b", **{f"b.jsonl#4{place}": text for text, place in places.items()},
        **{f"c.yaml#1{place}": text for text, place in places.items()}, "c.yaml#2/\u2028": "third",
        "d.txt": "text",
    }  # fmt: skip


def test_sources_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.corpus.text.BATCH", 20)  # several record batches
    put(
        {
            "a.json": json.dumps([["one", "two"] * 20, {"k": "three"}]),
            "b.yaml": "- {a: &x four, *x : five}\n- ? [a]\n  : sixth\n",
        }
    )
    run(min_chars=4)
    texts = rows()
    run(min_chars=4, keep_source=True)
    assert rows() == texts
    assert datasets.load_from_disk(str(CORPUS))["source"][-3:] == ["b.yaml#1/0/a", "b.yaml#1/0/*x", "b.yaml#1/1/?"]


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
def test_trap_15_plain_scalars_that_are_no_strings(scalar: str) -> None:
    assert (
        yaml_strings(f"a: {scalar}\nb: '{scalar}'\nc: !!str {scalar}\nd: ! {scalar}\ne: >-\n  {scalar}\n")
        == [scalar] * 4
    )


@pytest.mark.parametrize("scalar", [scalar for scalar in YAML_STRINGS.split() if scalar != "-"])
def test_trap_15_plain_scalars_that_are_strings(scalar: str) -> None:
    assert yaml_strings(f"a: {scalar}\n") == [scalar]


def yaml_strings(text: str | bytes) -> list[str]:
    """Of all documents, without empty ones."""

    class Memory:
        def stream(self) -> io.BytesIO:
            return io.BytesIO(text.encode() if isinstance(text, str) else text)

    sink = ListSink()
    memory: Any = Memory()
    yaml_format.read(memory, sink)
    return [string for document in sink.documents for string in document if string]


def test_trap_15_the_table_of_the_docs() -> None:
    """Each scalar in the table of docs/data.md is what its row says."""
    text = (REPO / "docs/data.md").read_text(encoding="utf-8")
    table = text[text.index("| plain scalar") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 5
    for line in table:
        scalars, kind = line.strip("|").split("|")[:2]
        for scalar in scalars.split("`")[1::2]:
            assert yaml_strings(f"a: {scalar}\n") == ([scalar] if kind.strip() == "string" else []), line


def test_trap_16_tags_run_nothing_and_cost_nothing(place: Path) -> None:
    text = f"""
a: !!python/object/apply:os.system ["touch {place}/ran"]
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
    expected = [f"touch {place}/ran", "Resource", "secret\n", "x", "z", "=", "2024-02-31", "value", "c", "last"]
    assert strings_of("a.yaml", text) == expected
    assert not (place / "ran").exists()


def test_trap_17_each_scalar_counts_once() -> None:
    bomb = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert strings_of("a.yml", bomb) == ["lol", "lol"]
    merge = "base: &base {x: one}\nchild:\n  <<: *base\n  y: two\n  z: *base\n*base : three\n"
    assert strings_of("a.yml", merge) == ["one", "two", "three"]


def test_line_breaks_of_yaml_1_1_are_characters() -> None:
    text = "a: x\u2028 y\nb: 'p\x85 q'\n\u2029c: \u2029\nd: \"ä\ufdd01\"\n"
    assert strings_of("a.yaml", text) == ["x\u2028 y", "p\x85 q", "\u2029", "ä\ufdd01"]


def test_trap_13_yaml_is_handed_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_format, "_BATCH", 10)
    monkeypatch.setattr("stages.corpus.text.BATCH", 10)
    sizes: list[int] = []
    add = TextWriter.add
    monkeypatch.setattr(TextWriter, "add", lambda self, *args: (sizes.append(len(args[0])), add(self, *args))[1])
    text = "- four\n" * 100
    assert strings_of("a.yaml", text) == ["four"] * 100
    assert max(sizes) == 3
    assert rejection_of("a.yaml", text + "- [")["rows"] == []


def test_trap_18_documents() -> None:
    put({"a.yaml": "one\n---\n- two\n---\n...\n---\n{a: three}\n"})
    assert run()["documents"] == 4
    assert rows() == ["one", "two", "three"]
    rejection = rejection_of("b.yaml", "one\n---\n[two, three\n---\nfour\n")
    assert (rejection["reason"], rejection["position"]) == ("invalid YAML", "line 4, column 1")
    assert rejection["rows"] == ["one"]
    assert rejection_of("b.yaml", "a: \x07")["position"] == "byte 3"


@pytest.mark.parametrize("opening", ["[", "{", "- ", "? ", "[a, ", "[\n"])
def test_trap_18_a_million_openings(opening: str) -> None:
    start = time.monotonic()
    assert rejection_of("a.yaml", opening * 1_000_000)["reason"] == "nested too deep"
    assert time.monotonic() - start < 2
    assert strings_of("b.yaml", "[" * 900 + "a" + "]" * 900) == ["a"]


# The characters that YAML lets stand, without those that it takes for line breaks.
YAML_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)) | st.sampled_from("\n\t"))
YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | YAML_TEXT,
    lambda children: st.lists(children) | st.dictionaries(YAML_TEXT, children),
)


@settings(deadline=None, max_examples=200)
@given(YAML_VALUES, st.booleans(), st.sampled_from([True, False, None]))
def test_any_yaml_gives_exactly_its_strings_in_order(value: Any, unicode: bool, flow: bool | None) -> None:
    # Double quotes for all scalars: numbers then bear tags, and no string is plain that only YAML 1.1 takes for one.
    text = yaml.dump(
        value, Dumper=yaml.SafeDumper, default_style='"', allow_unicode=unicode, default_flow_style=flow,
        sort_keys=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_format, "_BATCH", 2)
        assert yaml_strings(text) == strings_in(value)


# Compressions


def zst(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zst}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("whole", [1 << 20, 10])
def test_trap_19_compressed_files_give_the_same_rows(suffix: str, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "WHOLE", whole)
    pack = PACKERS[suffix]
    plain: Files = {"a.txt": "one\n" * 99, "b.json": '["two"]' * 9, "c.jsonl": '"three"\n' * 9, "d.yml": "- four\n" * 9}
    put(plain)
    run()
    expected = content_of(CORPUS)
    for name, content in plain.items():
        data = str(content).encode()
        Path("data/raw", name).unlink()
        put({name + suffix.upper(): pack(data[:5]) + pack(data[5:])})  # two members
    run()
    assert content_of(CORPUS) == expected


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("whole", [1 << 20, 10])
def test_trap_19_truncated_members(suffix: str, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "WHOLE", whole)
    pack = PACKERS[suffix]
    good = pack(b'"one"\n' * 99)
    for bad in (good[:-3], good + good[:-9], good + b"garbage", b"garbage"):
        rejection = rejection_of("a.jsonl" + suffix, bad)
        assert rejection["reason"] == "damaged compression"
        assert rejection["rows"] == []


# The output


def test_trap_20_edits_and_fewer_splits() -> None:
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


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]


def put_slow_files() -> None:
    text = yaml.safe_dump([{"key": f"value {number}"} for number in range(20_000)])
    put({f"{number}.yaml": text for number in range(12)})


def test_trap_21_a_killed_worker_leaves_nothing() -> None:
    put_slow_files()
    run(num_splits=4)
    clean = content_of(CORPUS)

    def kill() -> None:
        while not (found := workers_of(psutil.Process())):
            time.sleep(0.01)
        time.sleep(0.5)
        found[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(StageError, match=r"worker process was killed.*runtime.num_workers, now 2"):
        run(num_splits=4, num_workers=2)
    thread.join()
    assert content_of(CORPUS) == clean  # the old result, which dvc would have removed; not a mixture
    assert not CORPUS.with_name("corpus.tmp").exists()
    run(num_splits=4, num_workers=2)
    assert content_of(CORPUS) == clean


def is_alive(process: psutil.Process) -> bool:
    """Where nobody collects orphans they stay as zombies."""
    return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE


def test_trap_21_workers_end_with_the_stage() -> None:
    put_slow_files()
    organize(OrganizeParams(4, "data/raw", False), OrganizeRuntime(1))
    Path("params.yaml").write_text(
        "deduplicate_strings: false\nfallback_encoding: null\nkeep_source: false\nmax_rejected_files: 0\nmin_chars: 1\n"
        "raw_dir: data/raw\n"
        "runtime: {num_workers: 2, reuse_gib: 1}\n"
    )
    stage = psutil.Popen([sys.executable, "-m", "stages.extract"], env={**os.environ, "PYTHONPATH": str(REPO)})
    while len(workers := workers_of(stage)) < 2:
        time.sleep(0.01)
    time.sleep(0.3)
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    deadline = time.monotonic() + 30  # one that is just starting has to get so far that it notices
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
    assert not CORPUS.exists()


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


def test_trap_23_datasets_loads_it_memory_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.corpus.text.BATCH", 20)  # several record batches a shard
    put({"a.json": json.dumps([f"string {number}" for number in range(50)]), "b.txt": "b" * 99})
    run(num_splits=3)
    dataset = datasets.load_from_disk(str(CORPUS))
    assert len(dataset.cache_files) == 3
    assert len(dataset.data.column("text").chunks) > 20
    assert sorted(dataset["text"]) == sorted([f"string {number}" for number in range(50)] + ["b" * 99])
    mapped = Path("/proc/self/maps").read_text()
    assert str(CORPUS.resolve()) in mapped
    assert dataset.map(lambda row: {"size": len(row["text"])}, load_from_cache_file=False)["size"][0] > 0


def test_trap_23_zero_strings_load() -> None:
    put({"a.json": "[1, 2]"})
    metrics = run(num_splits=2)
    assert metrics["strings"] == 0
    assert metrics["documents"] == 1
    dataset = datasets.load_from_disk(str(CORPUS))
    assert dataset.num_rows == 0
    assert dataset.column_names == ["text"]


@pytest.mark.slow
def test_trap_23_more_than_two_gib_in_a_split() -> None:
    text = "a line of forty characters, more or less\n" * (1 << 24)
    for number in range(4):
        put({f"{number}.txt": text})
    del text
    run()
    dataset = datasets.load_from_disk(str(CORPUS))
    assert dataset.data.nbytes > 2**31
    assert dataset[3]["text"][-5:] == "less\n"


def test_trap_24_disk_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the corpus is written, nothing is on the disk but its shards, each once."""
    put({f"{number}.txt": "text " * 200_000 for number in range(8)})
    most = 0

    def used() -> int:
        files = [path.stat() for path in Path("data").rglob("*") if path.is_file() and "raw" not in path.parts]
        return sum({file.st_ino: file.st_size for file in files}.values())

    write = arrow.StreamWriter.write

    def spy(self: arrow.StreamWriter, column: Any) -> None:
        nonlocal most
        write(self, column)
        most = max(most, used())

    monkeypatch.setattr(arrow.StreamWriter, "write", spy)
    run(num_splits=4)
    output = sum(path.stat().st_size for path in CORPUS.iterdir())
    assert 0.9 * output < most < 1.1 * output


# The stage


def test_too_many_rejected_files_fail_after_all_were_tried() -> None:
    put({f"{number:02d}.json": "[" for number in range(25)})
    put({"good.txt": "good", "x.yaml": "{"})
    with pytest.raises(StageError) as error:
        run(num_splits=2, max_rejected_files=25)
    lines = str(error.value).splitlines()
    assert lines[0] == "00.json: invalid JSON at line 1, character 1: the document does not end"
    assert lines[-2] == "... and 6 more"
    assert lines[-1].startswith("26 files could not be read, max_rejected_files is 25: mend them, or raise it")
    metrics = json.loads(Path("data/extract.json").read_text())
    assert metrics["rejected"] == {"invalid JSON": 25, "invalid YAML": 1}
    assert not CORPUS.exists()
    assert run(max_rejected_files=26)["rejected_files"] == 26


def test_many_bad_lines_are_counted_and_some_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.extract.NUM_LISTED", 3)
    put({"a.jsonl": "x\n" * 10, "b.jsonl": "x\n" * 2})
    metrics = run(max_rejected_files=2)
    assert metrics["rejected"] == {"invalid JSON": 12}
    assert len(metrics["rejections"]) == 5


def test_odd_names_can_be_rejected() -> None:
    put({os.fsdecode(b"\xff.json"): "["})
    assert run(max_rejected_files=1)["rejections"][0]["path"] == "\\xff.json"


def test_the_format_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPO / "docs/data.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {name: getattr(formats.base, name) for name in ("Source", "Sink", "Rejected")}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    monkeypatch.setitem(formats._BY_SUFFIX, ".talk", formats.Format((".talk",), scope["read"]))
    rejection = rejection_of("a.talk", "she: hello\nnothing\nhe: good: bye\n")
    assert rejection["rows"] == ["hello", "good: bye"]
    assert rejection["position"] == "line 2"


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, runpy\nsys.argv = ['stage', '--help']\n"
        "try: runpy.run_module('stages.{}', run_name='__main__')\n"
        "finally: print(sorted(set(sys.modules) & {{'torch', 'transformers', 'datasets', 'pyarrow', 'tokenizers'}}))"
    )
    for stage in ("organize", "extract", "pack"):
        command = [sys.executable, "-c", code.format(stage)]
        output = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
        assert output.endswith("[]\n"), output
