import base64
import datetime
import hashlib
import io
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from stages.base.errors import StageError
from stages.formats import source, tables
from stages.formats.limits import Limits
from stages.splits import manifests as splits
from tests.corpus import CORPUS, SPLITS, content_of, extract_file, extract_raw, organize_raw, put, read_rows
from tests.project import REPO, peak_memory

pytestmark = pytest.mark.usefixtures("empty_project")

FORMATS = ("a.parquet", "a.arrow", "b.arrow", "a.feather")


def encode(name: str, table: pa.Table, rows: int = 2, **options: Any) -> bytes:
    """A table as a file of a format, with so many rows in each row group or record batch."""
    sink = io.BytesIO()
    if name.endswith(".parquet"):
        pq.write_table(table, sink, row_group_size=rows, **options)
        return sink.getvalue()
    compression = {"a.arrow": None, "b.arrow": "zstd", "a.feather": "lz4"}[name]
    new = pa.ipc.new_stream if name == "a.arrow" else pa.ipc.new_file
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


NESTED = pa.table(
    {
        "id": [1, 2, 3],
        "text": ["a", None, "c"],
        "large": pa.array(["d", "e", "f"], pa.large_string()),
        "category": pa.array(["g", "h", "g"]).dictionary_encode(),
        "list": [["i", None, "j"], [], None],
        "struct": [{"x": "k", "y": 1, "z": ["l"]}, None, {"x": None, "y": 2, "z": None}],
        "map": pa.array([[("key", "m")], [], None], pa.map_(pa.string(), pa.string())),
        "bytes": [b"n", b"n", None],
        "time": [datetime.datetime(2024, 1, 1)] * 3,
        "empty": ["", "", "o"],
    }
)
STRINGS = [*"adgijklmn", *"ehn", *"cfgo"]


@pytest.mark.parametrize("name", FORMATS)
def test_each_string_of_each_row_is_a_document(name: str) -> None:
    content = encode(name, NESTED)
    assert extract_file(name, content) == STRINGS
    assert json.loads(Path("data/extract.json").read_text())["records"] == 3
    assert extract_file(name, content, min_chars=2) == []
    assert extract_file(name, encode(name, NESTED.slice(0, 0))) == []
    assert extract_file(name, encode(name, NESTED.select(["id"]))) == []


def test_strings_of_every_type_are_found() -> None:
    columns = [
        pa.array(["a"], pa.string_view()),
        pa.array([["b"]], pa.large_list(pa.large_string())),
        pa.array([["c"]], pa.list_(pa.string(), 1)),
        pa.array([["d"]], pa.list_view(pa.string())),
        pa.array([[{"k": [{"l": "e"}]}]]),
        pa.array([["f"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        pa.array([[("k", [("l", "g")])]], pa.map_(pa.string(), pa.map_(pa.string(), pa.string()))),
        pa.RunEndEncodedArray.from_arrays([1], ["h"]),
        pa.array(['"i"'], pa.json_()),
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array(["j"]), pa.array([1])]),
    ]
    table = pa.table(columns, [f"column{number}" for number in range(len(columns))])
    assert extract_file("a.arrow", encode("a.arrow", table)) == [*"abcdefghij"]


@pytest.mark.parametrize("name", FORMATS)
def test_trap_33_paths_lead_into_nested_columns(name: str) -> None:
    content = encode(name, NESTED)
    for path, rows in {
        "$.text": ["a", "c"],
        "$['text','large']": ["a\nd", "e", "c\nf"],
        "$.list[1]": [],
        "$.list[2]": ["j"],
        "$.struct.x": ["k"],
        "$.struct.z[*]": ["l"],
        "$.map.key": ["m"],
        "$.category": ["g", "h", "g"],
        "$..x": ["k"],
        "$[?@.y == 1].x": ["k"],
    }.items():
        rule = {"files": "*", "text": path}
        if rows:
            assert extract_file(name, content, rule) == rows, path
            continue
        with pytest.raises(StageError, match=r"records\.0 makes no row"):
            extract_file(name, content, rule)
    [rule] = json.loads(Path("data/extract.json").read_text())["rules"]
    assert (rule["records"], rule["left_out"]) == (3, {"no string at $[?@.y == 1].x": 2})


@pytest.mark.parametrize("name", FORMATS)
def test_a_column_of_json_has_its_values(name: str) -> None:
    """As `datasets` writes columns of several types, and DuckDB those of its type JSON: a string has no quotes."""
    cells = ['"a b"', "5", None, "null", '{"k": ["c", "d"], "k": "e", "n": NaN}', r'"\ud800"', '"cut', "[" * 100_000]
    column = pa.array(cells, pa.json_())
    turns = [{"role": "user", "content": "Hi", "at": {"x": 1}}, {"role": "assistant", "content": "Hello", "at": "y"}]
    content = encode(name, pa.table({"col": column, "in": pa.StructArray.from_arrays([column], ["j"])}))
    texts = ["a b", "c", "d", "e", "\ufffd", '"cut', "[" * 100_000]
    found = extract_file(name, content)
    assert sorted(found) == sorted(2 * texts)
    rows = ["a b", "c\nd\ne", *texts[4:]]
    for path in ("$.col", "$.in.j"):
        assert extract_file(name, content, {"files": "*", "text": path}) == rows
    assert extract_file(name, content, {"files": "*", "text": "$.col.k[*]"}) == ["c\nd"]
    chat = pa.ListArray.from_arrays([0, 2], pa.array(map(json.dumps, turns), pa.json_()))
    assert extract_file(name, encode(name, pa.table({"messages": chat})), {"files": "*"}) == [{"messages": turns}]


def test_trap_33_both_columns_of_a_name_are_kept() -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    for name in FORMATS:
        content = encode(name, table)
        assert extract_file(name, content) == ["a", "b"]
        assert extract_file(name, content, {"files": "*", "text": "$.text"}) == ["a\nb"]


@pytest.mark.parametrize("name", FORMATS)
def test_conversations_of_a_table_have_no_nulls(name: str) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    rows = [
        {"messages": [{"role": "user", "content": "Hi", "tool_calls": None}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": None},
    ]
    table = pa.Table.from_pylist(rows).append_column("tools", pa.array(['[{"a": 1}]', None, None]))
    assert extract_file(name, encode(name, table), {"files": "*"}) == [
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"a": 1}]},
        {"messages": [{"role": "assistant", "tool_calls": [call]}]},
    ]
    prompts = pa.table({"q": ["Q"], "a": ["A"], "time": [datetime.datetime(2024, 1, 1)]})
    rule = {"files": "*", "prompt": "$.q", "completion": [{"role": "assistant", "content": "$.a", "at": "$.time"}]}
    rule["prompt"] = [{"role": "user", "content": "$.q"}]
    assert extract_file(name, encode(name, prompts), rule) == [
        {
            "prompt": [{"role": "user", "content": "Q"}],
            "completion": [{"role": "assistant", "content": "A", "at": "2024-01-01T00:00:00"}],
        }
    ]


def test_only_the_columns_that_a_rule_names_are_read() -> None:
    """A column that cannot be read is none of its business."""
    table = pa.table({"other": ["x" * 1000] * 10, "text": [f"row {number}" for number in range(10)]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    content = bytearray(encode("a.parquet", table, rows=10, **options))
    place = content.find(b"x" * 1000)
    content[place - 4 : place] = b"\xff" * 4  # the length of the first string
    rule = {"files": "*", "text": "$.text"}
    assert extract_file("a.parquet", bytes(content), rule) == table["text"].to_pylist()
    assert extract_file("a.parquet", bytes(content), max_rejected_files=1) == []


def test_trap_32_the_keys_of_a_table_are_its_columns() -> None:
    expected = r"row group 1, row 1: no string at \$\.body: the keys are id, text, large, category, list,"
    with pytest.raises(StageError, match=expected):
        extract_file("a.parquet", encode("a.parquet", NESTED), {"files": "*", "text": "$.body"})


BINARY = {"text": [b"alpha", "béta".encode(), None, b""], "id": ["a", "b", "c", "d"]}


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())]
)
def test_text_without_an_annotation_is_text(kind: pa.DataType) -> None:
    name = "a.arrow" if kind == pa.binary_view() else "a.parquet"
    table = pa.table(BINARY)
    texts = table["text"].dictionary_encode() if pa.types.is_dictionary(kind) else table["text"].cast(kind)
    content = encode(name, table.set_column(0, "text", texts))
    assert extract_file(name, content) == ["alpha", "a", "béta", "b", "c", "d"]
    assert extract_file(name, content, {"files": "*", "text": "$.text"}) == ["alpha", "béta"]
    rows = [{"text": [value], "map": [(b"key", value)]} for value in BINARY["text"]]
    inside = pa.struct({"text": pa.list_(pa.binary()), "map": pa.map_(pa.binary(), pa.binary())})
    nested = pa.table({"rows": pa.array(rows, inside)})
    assert extract_file("a.arrow", encode("a.arrow", nested)) == ["alpha", "alpha", "béta", "béta"]
    assert extract_file("a.arrow", encode("a.arrow", nested), {"files": "*", "text": "$.rows.map.key"})[0] == "alpha"


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_that_are_no_text_are_named_with_their_column_and_type(name: str) -> None:
    table = pa.table({"image": [b"\xff\xd8", b"\xff", b"ab"], "id": ["a", "b", "c"]})
    content = encode(name, table)
    with pytest.raises(
        StageError, match=r"not text at column image \(binary\): it has bytes that are not UTF-8: write"
    ):
        extract_file(name, content)
    assert extract_file(name, content, max_rejected_files=1) == ["a", "b", "ab", "c"]
    assert json.loads(Path("data/extract.json").read_text())["rejected"] == {"not text": 1}
    for rows in (2, 3):  # of which none fits, or the last one
        with pytest.raises(StageError, match=r"not text at column image \(binary\)"):
            extract_file(name, encode(name, table.slice(0, rows)), {"files": "*", "text": "$.image"})
    assert extract_file(name, content, {"files": "*", "text": "$.id"}) == ["a", "b", "c"]


@pytest.mark.parametrize("rule", [None, {"files": "*", "text": "$..text"}])
def test_a_rejection_names_its_row(rule: dict[str, Any] | None) -> None:
    table = pa.table({"text": ["a", "b", "x" * 99, "c", "y" * 99]})
    rules = (rule,) if rule else ()
    content = encode("a.parquet", table, rows=4)
    rows = extract_file(
        "a.parquet", content, *rules, limits=Limits(longest_string=50, longest_document=50), max_rejected_files=1
    )
    assert rows == ["a", "b", "c"]
    rejections = json.loads(Path("data/extract.json").read_text())["rejections"]
    assert [each["position"] for each in rejections] == ["row group 1, row 3", "row group 2, row 1"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_table_without_rows_is_no_error(name: str) -> None:
    empty = encode(name, pa.table({"text": pa.array([], pa.string())}))
    put({f"empty/{name}": empty})
    for rule in ({"text": "$.text"}, {"each": "$.text", "text": "$"}, {}):
        extract_raw(records=[{"files": "**", **rule}])
        assert read_rows() == []
    put({f"full/{name}": encode(name, pa.table({"text": ["full 1", "full 2"]}))})
    metrics = extract_raw(records=[{"files": "**", "text": "$.text"}])
    assert (read_rows(), metrics["rejected"]) == (["full 1", "full 2"], {})


@pytest.mark.parametrize("name", FORMATS)
def test_rows_without_a_string_are_records(name: str) -> None:
    assert extract_file(name, encode(name, NESTED.select(["id"]))) == []
    assert json.loads(Path("data/extract.json").read_text())["records"] == 3


# Parts


def numbered(num_rows: int) -> pa.Table:
    return pa.table({"text": [f"row {number} {'x' * 200}" for number in range(num_rows)]})


def cut(name: str, content: bytes, num_splits: int = 4) -> list[dict[str, Any]]:
    """The entries of the manifests, in order."""
    shutil.rmtree("data", ignore_errors=True)
    put({name: content})
    organize_raw(num_splits)
    lines = b"".join(path.read_bytes() for path in SPLITS.glob("split_*")).splitlines()
    return sorted(map(json.loads, lines), key=lambda entry: entry.get("part", {}).get("start", 0))


@pytest.mark.parametrize("name", FORMATS)
def test_trap_34_a_large_table_is_cut_between_row_groups(name: str) -> None:
    table = numbered(4000)
    content = encode(name, table, rows=50, **({"compression": "none"} if name == "a.parquet" else {}))
    entries = cut(name, content)
    if name in ("a.parquet", "a.arrow"):  # the others are compressed to little
        assert len(entries) > 4
        assert max(entry["size"] for entry in entries) <= 2 * min(entry["size"] for entry in entries[:-1])
    places = [(entry["part"]["start"], entry["part"]["end"]) for entry in entries]
    assert places[0][0] == 0
    assert [end for _, end in places] == [*(start for start, _ in places[1:]), None]
    assert sum(entry["size"] for entry in entries) == len(content)
    extract_raw(num_splits=4)
    assert sorted(read_rows()) == sorted(table["text"].to_pylist())
    extract_raw(num_splits=4, records=[{"files": "*", "text": "$.text"}])
    assert sorted(read_rows()) == sorted(table["text"].to_pylist())
    for entry in entries:
        part = splits.Part(**entry["part"])
        assert source.is_unchanged(Path("data/raw", name), entry["digest"], part)
    one = content_of(CORPUS)
    shutil.rmtree("data/.reuse")
    extract_raw(num_splits=4, num_workers=2, records=[{"files": "*", "text": "$.text"}])
    assert content_of(CORPUS) == one


def test_trap_34_the_rows_keep_their_order() -> None:
    table = numbered(1000)
    for name in FORMATS:
        content = encode(name, table, rows=10, **({"compression": "none"} if name == "a.parquet" else {}))
        cut(name, content, num_splits=1)
        extract_raw(num_splits=1)
        assert read_rows() == table["text"].to_pylist()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_trap_34_the_digest_of_each_part_is_that_of_the_file(name: str) -> None:
    content = encode(name, numbered(4000), rows=50, **({"compression": "none"} if name == "a.parquet" else {}))
    entries = cut(name, content)
    assert len(entries) > 4
    assert {entry["digest"] for entry in entries} == {hashlib.sha256(content).hexdigest()}
    path = Path("data/raw", name)
    for place in (0, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        for entry in entries:
            assert not source.is_unchanged(path, entry["digest"], splits.Part(**entry["part"]))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_is_hashed_once_for_all_of_its_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode(name, numbered(4000), rows=50, **({"compression": "none"} if name == "a.parquet" else {}))
    assert len(cut(name, content)) > 4
    opened = []
    open_raw = source.open_raw
    monkeypatch.setattr(source, "open_raw", lambda path: opened.append(path) or open_raw(path))
    extract_raw_only()
    assert opened == [f"data/raw/{name}"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_trap_05_a_table_that_changes_while_a_part_is_read_is_noticed(name: str) -> None:
    content = encode(name, numbered(400), rows=50, **({"compression": "none"} if name == "a.parquet" else {}))
    Path(name).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()

    def read(while_reading: Callable[[], object]) -> None:
        with tables.Table(name, digest, part=splits.Part(1, 2, 2)) as table:
            for _ in table.rows(lambda schema: schema.names):
                while_reading()

    def change() -> None:
        with Path(name).open("ab") as file:
            file.write(b"x")

    read(lambda: None)  # hashed, and found unchanged
    with pytest.raises(source.Changed):
        read(change)


def test_tables_that_cannot_be_cut_are_read_as_a_whole() -> None:
    table = numbered(4000)
    dictionaries = pa.table({"text": table["text"].combine_chunks().dictionary_encode()})
    for name, content in (
        ("a.arrow", encode("a.arrow", dictionaries, rows=50)),
        ("a.parquet", encode("a.parquet", table, rows=4000, compression="none")),
    ):
        [entry] = cut(name, content)
        assert "part" not in entry
        extract_raw(num_splits=4)
        assert read_rows() == table["text"].to_pylist()
    damaged = encode("a.parquet", table, rows=50, compression="none")[:-3]
    [entry] = cut("a.parquet", damaged)
    assert "part" not in entry


def test_trap_05_a_table_that_changes_is_noticed() -> None:
    for name in FORMATS:
        content = encode(name, numbered(2000), rows=50)
        cut(name, content)
        path = Path("data/raw", name)
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
        with pytest.raises(StageError, match=rf"1 files were changed .* first is {name}"):
            extract_raw_only()
        path.write_bytes(content[:middle])
        with pytest.raises(StageError, match=rf"1 files were changed .* first is {name}"):
            extract_raw_only()
        path.unlink()
        with pytest.raises(StageError, match=rf"1 files were changed .* first is {name}"):
            extract_raw_only()


def extract_raw_only() -> None:
    from stages.extract import ExtractRuntime, extract
    from tests.corpus import PARAMS

    extract(PARAMS, ExtractRuntime(num_workers=1, reuse_gib=1))


# Data sets


def test_a_data_set_of_save_to_disk_is_its_arrow_files() -> None:
    rows = [f"row {number}" for number in range(30)]
    dataset = datasets.Dataset.from_dict({"text": rows, "id": list(range(30))})
    dataset.save_to_disk("data/raw/one", num_shards=3)
    datasets.DatasetDict(train=dataset, test=dataset.select([3])).save_to_disk("data/raw/dict")
    shutil.copy("data/raw/one/data-00000-of-00003.arrow", "data/raw/one/cache-0123.arrow")
    put({"other/state.json": '["kept"]', "state.json": '["kept, too"]', "dict/x/dataset_dict.json": '["kept"]'})
    extract_raw(num_splits=2)
    assert sorted(read_rows()) == sorted([*rows, *rows, "row 3", "kept", "kept", "kept, too"])
    summary = json.loads((SPLITS / "summary.json").read_text())
    about = [
        entry["path"] for entry in summary["passed_over"] if entry["reason"] == "about the data set of its directory"
    ]
    assert about == [
        "dict/dataset_dict.json",
        *("dict/test/dataset_info.json", "dict/test/state.json"),
        *("dict/train/dataset_info.json", "dict/train/state.json"),
        *("one/cache-0123.arrow", "one/dataset_info.json", "one/state.json"),
    ]
    extract_raw(num_splits=2, records=[{"files": "one/*", "text": "$.text"}])
    assert Path("data/corpus/state.json").exists()


# Hostile files


class PlainKms(pe.KmsClient):  # type: ignore[misc]
    """Keeps keys as they are."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64decode(key)


def encrypted(table: pa.Table, *, plaintext_footer: bool) -> bytes:
    config = pe.EncryptionConfiguration("key", column_keys={"key": ["text"]}, plaintext_footer=plaintext_footer)
    properties = pe.CryptoFactory(PlainKms).file_encryption_properties(pe.KmsConnectionConfig(), config)
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    return sink.getvalue()


def varint(number: int) -> bytes:
    """A number of Thrift's compact protocol."""
    number *= 2
    encoded = bytearray()
    while number >= 128:
        encoded.append(number % 128 + 128)
        number //= 128
    return bytes([*encoded, number])


def with_rows(content: bytes, old: int, new: int, count: int) -> bytes:
    """A Parquet file whose footer has other numbers of rows; the first `count` of those in it."""
    start = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    footer = content[start:]
    assert footer.count(varint(old)) >= count
    return content[:start] + footer.replace(varint(old), varint(new), count)


def hostile_files() -> dict[str, bytes]:
    table = numbered(12345)
    parquet = encode("a.parquet", table, rows=10**6)
    files = {
        "lying total.parquet": with_rows(parquet, 12345, 12346, 2),
        "lying row group.parquet": with_rows(parquet, 12345, 12350, 4),
        "encrypted.parquet": encrypted(table, plaintext_footer=False),
        "encrypted columns.parquet": encrypted(table, plaintext_footer=True),
        "empty.parquet": b"",
        "not a table.parquet": b"PAR1" + b"text" * 100 + b"PAR1",
        "long footer.parquet": parquet[:-8] + b"\xff\xff\xff\x7fPAR1",
        "no footer.parquet": parquet[: len(parquet) // 2],
        "cut.parquet": parquet[:-1],
        "empty.arrow": b"",
        "not a table.arrow": b"text" * 100,
        "feather 1.feather": b"FEA1" + b"\0" * 100 + b"FEA1",
    }
    for name in ("a.arrow", "b.arrow"):
        content = encode(name, table, rows=1000)
        files |= {
            f"half {name}": content[: len(content) // 2],
            f"cut {name}": content[: content.rfind(b"\xff\xff\xff\xff\0")],
        }
        # The body of the first record batch is said to have 2^61 bytes.
        batch = pa.ipc.read_message(pa.BufferReader(content.removeprefix(b"ARROW1\0\0")))
        assert batch.type == "schema"
        files[f"huge {name}"] = content.replace(struct.pack("<q", body_size(content)), struct.pack("<q", 1 << 61), 1)
    return files


def body_size(content: bytes) -> int:
    reader = pa.BufferReader(content.removeprefix(b"ARROW1\0\0"))
    pa.ipc.read_message(reader)
    size: int = pa.ipc.read_message(reader).body.size
    return size


def test_trap_34_hostile_tables_are_rejected_and_their_siblings_kept() -> None:
    files = hostile_files()
    put({**files, "good.parquet": encode("a.parquet", NESTED)})
    for rules in (None, [{"files": "**", "text": "$.text"}]):
        metrics = extract_raw(num_splits=3, records=rules, max_rejected_files=len(files))
        assert {entry["path"] for entry in metrics["rejections"]} == {*files}
        assert {*metrics["rejected"]} <= {"damaged table", "table too large"}
        assert "e" in read_rows() or rules


def test_trap_34_no_damage_crashes_the_process() -> None:
    """In a process of its own: what pyarrow makes of any bytes is not for us to know."""
    output = subprocess.run(
        [sys.executable, "-m", "tests.damaged_tables", "60"], cwd=REPO, stdout=-1, stderr=-2, text=True, check=False
    )
    assert output.returncode == 0, output.stdout
    outcomes = json.loads(output.stdout)
    assert {*outcomes} == {"read", "rejected"}


def test_trap_34_a_row_that_is_not_utf8_is_rejected_alone() -> None:
    values = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    for name in FORMATS:
        content = encode(name, pa.table({"text": values}), rows=3)
        assert extract_file(name, content, max_rejected_files=1) == ["a", "c"]
        [rejection] = json.loads(Path("data/extract.json").read_text())["rejections"]
        assert rejection["position"] == ("row group 1, row 2" if name == "a.parquet" else "record batch 1, row 2")
        assert rejection["reason"] == "damaged table"


def arrow_file(column: pa.Array) -> bytes:
    batch = pa.RecordBatch.from_arrays([column], ["x"])
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(allow_64bit=True)) as writer:
        writer.write(batch)
    return sink.getvalue()


def with_strings(kind: pa.DataType, *values: int) -> bytes:
    """A struct in each row: a string and a value of a kind."""
    texts = pa.array(["abcdefgh"[index] for index in range(len(values))])
    return arrow_file(pa.StructArray.from_arrays([texts, pa.array(values, kind)], ["s", "t"]))


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.duration("s"), pa.date32()])
@pytest.mark.parametrize("rules", [(), ({"files": "*", "text": "$.x.s"},)])
def test_a_time_that_python_does_not_have_is_rejected_alone(kind: pa.DataType, rules: tuple[Any, ...]) -> None:
    content = with_strings(kind, 1, 2**31 - 1 if kind == pa.date32() else 10**15, 2)
    assert extract_file("a.arrow", content, *rules, max_rejected_files=1) == ["a", "c"]
    [rejection] = json.loads(Path("data/extract.json").read_text())["rejections"]
    assert (rejection["reason"], rejection["position"]) == ("value out of range", "record batch 1, row 2")


def test_an_unknown_time_zone_is_the_reason_that_is_given() -> None:
    content = with_strings(pa.timestamp("s", tz="Bogus/Zone"), 1)
    assert extract_file("a.arrow", content, max_rejected_files=1) == []
    [rejection] = json.loads(Path("data/extract.json").read_text())["rejections"]
    assert "unknown time zone" in rejection["detail"] and "Bogus/Zone" in rejection["detail"]


def test_runs_of_structs_are_read() -> None:
    values = pa.array([{"a": "x", "d": None, "e": {"k": "v"}}])
    content = arrow_file(pa.RunEndEncodedArray.from_arrays(pa.array([3], pa.int32()), values))
    assert extract_file("a.arrow", content) == ["x", "v"] * 3
    assert extract_file("a.arrow", content, {"files": "*", "text": "$.x.e"}) == ["v"] * 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.arrow", arrow_file(pa.RunEndEncodedArray.from_arrays(pa.array([2**40], pa.int64()), pa.array(["bomb"])))),
        ("a.arrow", arrow_file(pa.Array.from_buffers(pa.null(), 2**40, [None]))),
        ("a.parquet", encode("a.parquet", pa.table({"x": pa.nulls(5 << 20)}), rows=5 << 20)),
    ],
    ids=["run", "nulls", "parquet"],
)
def test_rows_that_need_no_bytes_are_limited(name: str, content: bytes) -> None:
    assert extract_file(name, content, {"files": "*", "text": "$.x"}, max_rejected_files=1) == []
    assert json.loads(Path("data/extract.json").read_text())["rejected"] == {"table too large": 1}


def test_a_string_that_is_too_long_is_rejected_alone() -> None:
    limits = Limits(longest_string=50, longest_document=50)
    for name in FORMATS:
        content = encode(name, pa.table({"text": ["a", "x" * 100, "c"]}), rows=3)
        for rules in ((), ({"files": "*", "text": "$.text"},)):
            assert extract_file(name, content, *rules, limits=limits, max_rejected_files=1) == ["a", "c"]


def bomb(name: str, mib: int) -> bytes:
    """A file of kilobytes that needs so much memory."""
    table = pa.table({"text": ["a" * (mib << 20)]})
    if name.endswith(".parquet"):
        return encode(
            name, table, compression="zstd", use_dictionary=False, data_page_size=1 << 31, write_statistics=False
        )
    return encode(name, table)


@pytest.mark.parametrize("name", ["a.parquet", "b.arrow"])
def test_trap_34_a_bomb_needs_no_more_memory_than_it_may(name: str) -> None:
    content = bomb(name, 200)
    assert len(content) < 1 << 20
    put({name: content, "good.txt": "good"})
    organize_raw(1)
    code = "\n".join(
        [
            "from tests.corpus import *; from stages.formats.limits import Limits",
            "params = dataclasses.replace(PARAMS, max_rejected_files=1)",
            "extract(params, in_this_process(ExtractRuntime(num_workers=1, reuse_gib=1)), Limits(table=50 << 20))",
        ]
    )
    peak = peak_memory(code)
    metrics = json.loads(Path("data/extract.json").read_text())
    assert metrics["rejected"] == {"table too large": 1}
    assert read_rows() == ["good"]
    assert peak < 300


def test_the_limit_of_memory_is_lifted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    seen = []

    def items() -> Any:
        for _ in range(2):
            seen.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
            yield tables.Rows("", 1, [], [], 0, {})
        raise ValueError

    bounded = tables._bounded(items(), 1 << 30)
    for _ in range(2):
        next(bounded)
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(ValueError, match=r"^$"):
        next(bounded)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert all(0 < limit < 8 << 30 for limit in seen)
