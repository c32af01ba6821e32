"""Tables, Parquet and Arrow: their strings and records, parts of large ones, and those that are damaged or hostile."""

import base64
import datetime
import hashlib
import io
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from stages.base.errors import StageError
from stages.base.publish import sha256_file
from stages.extract import ExtractRuntime, extract
from stages.formats import raw_content, tables
from stages.formats.limits import LIMITS, Limits
from stages.splits import manifests as splits
from tests.corpus import PARAMS, SPLITS, check, check_rules, extract_raw, organize_raw, put, read_rows
from tests.project import REPO, peak_memory

pytestmark = pytest.mark.usefixtures("empty_project")

FORMATS = ("a.parquet", "a.arrow", "b.arrow", "a.feather")
ONCE = [LIMITS]
TEXT = {"text": "$.text"}


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


def in_each_format(table: pa.Table, *expected: Any, **options: Any) -> list[tuple[Any, ...]]:
    """Cases of `check`."""
    return [(name, encode(name, table, **options), *expected) for name in FORMATS]


def with_rule(rule: dict[str, Any], cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same as cases of `check_rules`."""
    return [(rule, *case) for case in cases]


def places(*rows: tuple[int, int]) -> dict[str, list[str]]:
    """How a rejection in a format names so many rows: by their row groups or record batches, and numbers in them."""
    units = {name: "row group" if name == "a.parquet" else "record batch" for name in FORMATS}
    return {name: [f"at {unit} {group}, row {row}:" for group, row in rows] for name, unit in units.items()}


def test_each_string_of_each_row_is_a_document() -> None:
    metrics = check(
        *in_each_format(NESTED, STRINGS),
        *in_each_format(NESTED.slice(0, 0), []),
        *in_each_format(NESTED.select(["id"]), []),
        limits=ONCE,
    )
    assert metrics["records"] == len(FORMATS) * (3 + 0 + 3)  # also rows without a string


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
    content = pa.RunEndEncodedArray.from_arrays(
        pa.array([3], pa.int32()), pa.array([{"a": "x", "d": None, "e": {"k": "v"}}])
    )
    check(
        ("a.arrow", encode("a.arrow", table), [*"abcdefghij"]),
        ("runs of structs.arrow", arrow_file(content), ["x", "v"] * 3),
        limits=ONCE,
    )
    check_rules(({"text": "$.x.e"}, "runs of structs.arrow", arrow_file(content), ["v"] * 3), limits=ONCE)


def test_trap_33_paths_lead_into_nested_columns() -> None:
    paths = {
        "$.text": ["a", "c"], "$['text','large']": ["a\nd", "e", "c\nf"], "$.list[1,2]": ["j"],
        "$.struct.x": ["k"], "$.struct.z[*]": ["l"], "$.map.key": ["m"], "$.category": ["g", "h", "g"], "$..x": ["k"],
        "$[?@.y == 1].x": ["k"],
    }  # fmt: skip
    cases = [case for path, rows in paths.items() for case in with_rule({"text": path}, in_each_format(NESTED, rows))]
    rule = check_rules(*cases, limits=ONCE)["rules"][-1]
    assert (rule["records"], rule["left_out"]) == (3, {"no string at $[?@.y == 1].x": 2})


def test_trap_32_the_keys_of_a_table_are_its_columns() -> None:
    put({"a.parquet": encode("a.parquet", NESTED)})
    expected = r"row group 1, row 1: no string at \$\.body: the keys are id, text, large, category, list,"
    with pytest.raises(StageError, match=expected):
        extract_raw(records=[{"files": "*", "text": "$.body"}])


def test_a_column_of_json_has_its_values() -> None:
    """As `datasets` writes columns of several types, and DuckDB those of its type JSON: a string has no quotes."""
    cells = ['"a b"', "5", None, "null", '{"k": ["c", "d"], "k": "e", "n": NaN}', r'"\ud800"', '"cut', "[" * 100_000]
    column = pa.array(cells, pa.json_())
    turns = [{"role": "user", "content": "Hi", "at": {"x": 1}}, {"role": "assistant", "content": "Hello", "at": "y"}]
    table = pa.table({"col": column, "in": pa.StructArray.from_arrays([column], ["j"])})
    chat = pa.ListArray.from_arrays([0, 2], pa.array(map(json.dumps, turns), pa.json_()))
    texts = [["a b"], ["c", "d", "e"], ["\ufffd"], ['"cut'], ["[" * 100_000]]
    rows = ["\n".join(strings) for strings in texts]
    check(*in_each_format(table, [string for strings in texts for _ in "12" for string in strings]), limits=ONCE)
    check_rules(
        *with_rule({"text": "$.col"}, in_each_format(table, rows)),
        *with_rule({"text": "$.in.j"}, in_each_format(table, rows)),
        *with_rule({"text": "$.col.k[*]"}, in_each_format(table, ["c\nd"])),
        *with_rule({}, in_each_format(pa.table({"messages": chat}), [{"messages": turns}])),
        limits=ONCE,
    )


def test_trap_33_both_columns_of_a_name_are_kept() -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    check(*in_each_format(table, ["a", "b"]), limits=ONCE)
    check_rules(*with_rule(TEXT, in_each_format(table, ["a\nb"])), limits=ONCE)


def test_conversations_of_a_table_have_no_nulls() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    rows = [
        {"messages": [{"role": "user", "content": "Hi", "tool_calls": None}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": None},
    ]
    table = pa.Table.from_pylist(rows).append_column("tools", pa.array(['[{"a": 1}]', None, None]))
    expected = [
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"a": 1}]},
        {"messages": [{"role": "assistant", "tool_calls": [call]}]},
    ]
    prompts = pa.table({"q": ["Q"], "a": ["A"], "time": [datetime.datetime(2024, 1, 1)]})
    rule = {
        "prompt": [{"role": "user", "content": "$.q"}],
        "completion": [{"role": "assistant", "content": "$.a", "at": "$.time"}],
    }
    answer = {"role": "assistant", "content": "A", "at": "2024-01-01T00:00:00"}
    pair = {"prompt": [{"role": "user", "content": "Q"}], "completion": [answer]}
    check_rules(
        *with_rule({}, in_each_format(table, expected)), *with_rule(rule, in_each_format(prompts, [pair])), limits=ONCE
    )


def test_only_the_columns_that_a_rule_names_are_read() -> None:
    """A column that cannot be read is none of its business."""
    table = pa.table({"other": ["x" * 1000] * 10, "text": [f"row {number}" for number in range(10)]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    content = bytearray(encode("a.parquet", table, rows=10, **options))
    place = content.find(b"x" * 1000)
    content[place - 4 : place] = b"\xff" * 4  # the length of the first string
    check_rules((TEXT, "a.parquet", bytes(content), table["text"].to_pylist()), limits=ONCE)
    check(("a.parquet", bytes(content), [], "damaged table"), limits=ONCE)


def test_text_without_an_annotation_is_text() -> None:
    values = [b"alpha", "béta".encode(), None, b""]
    plain = pa.table({"text": values, "id": ["a", "b", "c", "d"]})
    kinds = {kind: plain["text"].cast(kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())}
    kinds["dictionary"] = plain["text"].dictionary_encode()
    cases = [
        (name, encode(name, plain.set_column(0, "text", texts)))
        for kind, texts in kinds.items()
        for name in ["a.arrow" if kind == pa.binary_view() else "a.parquet"]
    ]
    rows = [{"text": [value], "map": [(b"key", value)]} for value in values]
    inside = pa.struct({"text": pa.list_(pa.binary()), "map": pa.map_(pa.binary(), pa.binary())})
    nested = encode("a.arrow", pa.table({"rows": pa.array(rows, inside)}))
    check(
        *((*case, ["alpha", "a", "béta", "b", "c", "d"]) for case in cases),
        ("a.arrow", nested, ["alpha", "alpha", "béta", "béta"]),
        limits=ONCE,
    )
    check_rules(
        *((TEXT, *case, ["alpha", "béta"]) for case in cases),
        ({"text": "$.rows.map.key"}, "a.arrow", nested, ["alpha", "béta"]),
        limits=ONCE,
    )


def test_bytes_that_are_no_text_are_named_with_their_column_and_type() -> None:
    table = pa.table({"image": [b"\xff\xd8", b"\xff", b"ab"], "id": ["a", "b", "c"]})
    expected = r"^not text at column image \(binary\): it has bytes that are not UTF-8: write"
    check(*in_each_format(table, ["a", "b", "ab", "c"], expected), limits=ONCE)
    put({"full.parquet": encode("a.parquet", table), "none.parquet": encode("a.parquet", table.slice(0, 2))})
    for name in ("full", "none"):  # of a column of which the last cell fits, or none
        with pytest.raises(StageError, match=r"not text at column image \(binary\)"):
            extract_raw(records=[{"files": f"{name}.*", "text": "$.image"}])
    check_rules(*with_rule({"text": "$.id"}, in_each_format(table, ["a", "b", "c"])), limits=ONCE)


def test_a_row_that_cannot_be_read_is_rejected_alone_and_named() -> None:
    long = pa.table({"text": ["a", "b", "x" * 99, "c", "y" * 99]})
    limits = [Limits(longest_string=50, longest_document=50)]
    cases = [(*case, *places((1, 3), (2, 1))[case[0]]) for case in in_each_format(long, [*"abc"], rows=4)]
    check(*cases, limits=limits)
    check_rules(*with_rule({"text": "$..text"}, cases), limits=limits)
    not_utf8 = pa.table({"text": pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())})
    damaged = {name: f"^damaged table {place}" for name, [place] in places((1, 2)).items()}
    check(*((*case, damaged[case[0]]) for case in in_each_format(not_utf8, ["a", "c"], rows=3)), limits=ONCE)


def test_a_table_without_rows_is_no_error() -> None:
    empty, full = pa.table({"text": pa.array([], pa.string())}), pa.table({"text": ["full 1", "full 2"]})
    check_rules(
        *with_rule(TEXT, in_each_format(empty, [])),
        *with_rule({"each": "$.text", "text": "$"}, in_each_format(empty, [])),
        *with_rule({}, in_each_format(empty, [])),
        *with_rule(TEXT, in_each_format(full, ["full 1", "full 2"])),
        limits=ONCE,
    )


# Parts


def numbered(num_rows: int) -> pa.Table:
    return pa.table({"text": [f"row {number} {'x' * 200}" for number in range(num_rows)]})


def encode_plainly(name: str, table: pa.Table, rows: int = 50) -> bytes:
    return encode(name, table, rows, **({"compression": "none"} if name == "a.parquet" else {}))


def cut(name: str, content: bytes) -> list[dict[str, Any]]:
    """The entries of the manifest of a split with one file, in order."""
    shutil.rmtree("data", ignore_errors=True)
    put({name: content})
    organize_raw(num_splits=1)
    return [*map(json.loads, (SPLITS / "split_00.jsonl").read_bytes().splitlines())]


@pytest.mark.parametrize("name", FORMATS)
def test_trap_34_a_large_table_is_cut_between_row_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is in one part, in order; the digest of each part is that of the file, which is hashed once."""
    table = numbered(2000)
    content = encode_plainly(name, table)
    entries = cut(name, content)
    if name in ("a.parquet", "a.arrow"):  # the others are compressed to little
        assert len(entries) > 4
        assert max(entry["size"] for entry in entries) <= 2 * min(entry["size"] for entry in entries[:-1])
    places = [(entry["part"]["start"], entry["part"]["end"]) for entry in entries]
    assert (places[0][0], places[-1][1]) == (0, None)
    assert all(end == start for (_, end), (start, _) in pairwise(places))
    assert sum(entry["size"] for entry in entries) == len(content)
    assert {entry["digest"] for entry in entries} == {hashlib.sha256(content).hexdigest()}
    opened = []
    open_raw = raw_content.open_raw
    monkeypatch.setattr(raw_content, "open_raw", lambda path: opened.append(path) or open_raw(path))
    extract(PARAMS, ExtractRuntime(num_workers=1, reuse_gib=1))
    assert read_rows() == table["text"].to_pylist()
    assert opened == [f"data/raw/{name}"]
    extract_raw(records=[{"files": "*", "text": "$.text"}])
    assert read_rows() == table["text"].to_pylist()
    path = Path("data/raw", name)
    for place in (None, 0, len(content) // 2, len(content) - 1):
        if place is not None:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        for entry in entries:
            assert raw_content.is_unchanged(path, entry["digest"], splits.Part(**entry["part"])) == (place is None)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_trap_05_a_table_that_changes_while_a_part_is_read_is_noticed(name: str) -> None:
    """`extract` stops, names it and asks for `dvc repro`."""
    content = encode_plainly(name, numbered(400))
    Path(name).write_bytes(content)

    def read(while_reading: Callable[[], object]) -> None:
        with tables.Table(name, hashlib.sha256(content).hexdigest(), part=splits.Part(1, 2, 2)) as table:
            for _ in table.rows(lambda schema: schema.names):
                while_reading()

    read(lambda: None)  # hashed, and found unchanged
    with pytest.raises(raw_content.Changed):
        read(lambda: Path(name).write_bytes(content + b"x"))


def test_tables_that_cannot_be_cut_are_read_as_a_whole() -> None:
    table = numbered(4000)
    dictionaries = pa.table({"text": table["text"].combine_chunks().dictionary_encode()})
    for name, content, is_damaged in (
        ("a.arrow", encode_plainly("a.arrow", dictionaries), False),
        ("a.parquet", encode_plainly("a.parquet", table, rows=4000), False),
        ("a.parquet", encode_plainly("a.parquet", table)[:-3], True),
    ):
        [entry] = cut(name, content)
        assert "part" not in entry
        if not is_damaged:
            extract_raw()
            assert read_rows() == table["text"].to_pylist()


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


def body_size(content: bytes) -> int:
    reader = pa.BufferReader(content.removeprefix(b"ARROW1\0\0"))
    assert pa.ipc.read_message(reader).type == "schema"
    size: int = pa.ipc.read_message(reader).body.size
    return size


def test_trap_34_hostile_tables_are_rejected_and_their_siblings_kept() -> None:
    """Truncated, encrypted, or with other numbers of rows and sizes than they say."""
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
        files[f"half {name}"] = content[: len(content) // 2]
        files[f"cut {name}"] = content[: content.rfind(b"\xff\xff\xff\xff\0")]
        # The body of the first record batch is said to have 2^61 bytes.
        files[f"huge {name}"] = content.replace(struct.pack("<q", body_size(content)), struct.pack("<q", 1 << 61), 1)
    put({**files, "good.parquet": encode("a.parquet", NESTED)})
    for rules, row in ((None, "e"), ([{"files": "**", "text": "$.text"}], "c")):
        metrics = extract_raw(num_splits=3, records=rules, max_rejected_files=len(files))
        assert {entry["path"] for entry in metrics["rejections"]} == {*files}
        assert {*metrics["rejected"]} <= {"damaged table", "table too large"}
        assert row in read_rows()


def read_damaged_tables() -> None:
    """Print how many tables with bytes that are not theirs, half of them in the footer, were read, and rejected."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # this machine must survive
    outcomes: Counter[str] = Counter()
    table = pa.concat_tables([NESTED] * 50).unify_dictionaries()
    for name, number in product(FORMATS, range(15)):
        choice = random.Random(f"{name} {number}")
        options = {
            "compression": choice.choice(["snappy", "zstd", "none"]),
            "data_page_version": choice.choice("12") + ".0",
        }
        content = bytearray(encode(name, table, 50, **(options if name == "a.parquet" else {})))
        first = choice.choice([0, max(0, len(content) - 3000)])
        for _ in range(choice.choice([1, 2, 8])):
            content[choice.randrange(first, len(content))] = choice.choice([0, 255, 127, 128, choice.randrange(256)])
        size = choice.randrange(len(content)) if choice.random() < 0.1 else len(content)
        Path(name).write_bytes(content[:size])
        try:
            with tables.Table(name, sha256_file(Path(name))) as given:
                for rows in given.rows(lambda schema: schema.names):
                    assert isinstance(rows, (tables.Rows, raw_content.Rejected))
            outcomes["read"] += 1
        except raw_content.Rejected:
            outcomes["rejected"] += 1
    print(json.dumps(outcomes))


def test_trap_34_no_damage_crashes_the_process() -> None:
    """In a process of its own: what pyarrow makes of any bytes is not for us to know."""
    code = "from tests.test_tables import read_damaged_tables; read_damaged_tables()"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, stdout=-1, stderr=-2, text=True, check=False)
    assert output.returncode == 0, output.stdout
    assert {*json.loads(output.stdout)} == {"read", "rejected"}


def arrow_file(column: pa.Array) -> bytes:
    batch = pa.RecordBatch.from_arrays([column], ["x"])
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(allow_64bit=True)) as writer:
        writer.write(batch)
    return sink.getvalue()


def test_a_time_that_python_does_not_have_is_rejected_alone() -> None:
    def with_strings(kind: pa.DataType, *values: int) -> bytes:  # a struct in each row
        texts = pa.array(["abcdefgh"[index] for index in range(len(values))])
        return arrow_file(pa.StructArray.from_arrays([texts, pa.array(values, kind)], ["s", "t"]))

    latest = {pa.timestamp("s"): 10**15, pa.duration("s"): 10**15, pa.date32(): 2**31 - 1}
    cases = [
        ("a.arrow", with_strings(kind, 1, value, 2), ["a", "c"], "value out of range at record batch 1, row 2:")
        for kind, value in latest.items()
    ]
    bogus = ("a.arrow", with_strings(pa.timestamp("s", tz="Bogus/Zone"), 1), [], "unknown time zone.*Bogus/Zone")
    check(*cases, bogus, limits=ONCE)
    check_rules(*with_rule({"text": "$.x.s"}, cases), limits=ONCE)


def test_rows_that_need_no_bytes_are_limited() -> None:
    rule, reason = {"text": "$.x"}, "^table too large"
    run = pa.RunEndEncodedArray.from_arrays(pa.array([2**40], pa.int64()), pa.array(["bomb"]))
    nulls = encode("a.parquet", pa.table({"x": pa.nulls(5 << 20)}), rows=5 << 20)
    check_rules(
        (rule, "a.arrow", arrow_file(run), [], reason),
        (rule, "b.arrow", arrow_file(pa.Array.from_buffers(pa.null(), 2**40, [None])), [], reason),
        (rule, "a.parquet", nulls, [], reason),
        limits=ONCE,
    )


def test_trap_34_a_bomb_needs_no_more_memory_than_it_may() -> None:
    """Pages that expand to gigabytes are not expanded at once."""
    table = pa.table({"text": ["a" * (200 << 20)]})
    options = {"compression": "zstd", "use_dictionary": False, "data_page_size": 1 << 31, "write_statistics": False}
    bombs = {"a.parquet": encode("a.parquet", table, **options), "b.arrow": encode("b.arrow", table)}
    assert max(map(len, bombs.values())) < 1 << 20
    put({**bombs, "good.txt": "good"})
    organize_raw(1)
    code = "\n".join(
        [
            "from tests.corpus import *; from stages.formats.limits import Limits",
            "params = dataclasses.replace(PARAMS, max_rejected_files=2)",
            "extract(params, in_this_process(ExtractRuntime(num_workers=1, reuse_gib=1)), Limits(table=50 << 20))",
        ]
    )
    assert peak_memory(code) < 300
    assert json.loads(Path("data/extract.json").read_text())["rejected"] == {"table too large": 2}
    assert read_rows() == ["good"]


def test_the_record_batches_of_a_large_file_are_found_with_little_memory() -> None:
    batch = pa.record_batch([pa.array(["a" * 30_000])], ["text"])
    with open("large.arrow", "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        for _ in range(10_000):
            stream.write_batch(batch)
    code = "from stages.splits.tables import *; assert count_units(Path('large.arrow')) == 10_000"
    assert peak_memory(code) < 200


def test_the_limit_of_memory_is_lifted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
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
    assert all(0 < limit - data < 2 << 30 for limit in seen)
