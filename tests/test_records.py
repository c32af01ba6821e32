"""Rules for records: which paths and files they fit, what the records of each format become, and what is left out."""

import csv
import gzip
import io
import json
import os
import re
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import jsonpath
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.extract import ExtractParams, ExtractRuntime, extract
from stages.formats import json_format, paths, records
from stages.formats.limits import LIMITS, Limits
from stages.formats.preview import preview
from stages.formats.rules import Rule, find
from stages.organize import OrganizeParams, OrganizeRuntime, organize
from stages.splits import tree
from tests.corpus import CORPUS, PARAMS, SMALL, ListSink, Memory, check, check_rules, extract_raw, put, read_rows
from tests.project import REPO

pytestmark = pytest.mark.usefixtures("empty_project")

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
TEXT = {"text": "$.text"}
RUNTIME = ExtractRuntime(num_workers=1, reuse_gib=1)


def jsonl(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def in_each_format(rule: dict[str, Any], record: Any, row: Any) -> list[tuple[Any, ...]]:
    """Cases of `check_rules` of one record, which becomes one row."""
    contents = {
        "a.json": json.dumps([record], ensure_ascii=False), "b.json": json.dumps(record, indent=2),
        "c.jsonl": jsonl(record), "d.ndjson": jsonl(record), "e.yaml": yaml.safe_dump(record, sort_keys=False),
    }  # fmt: skip
    return [(rule, name, content, [row]) for name, content in contents.items()]


# Paths

KEYS = st.sampled_from(["a", "b", "text"])
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab\n", max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=20,
)
SELECTORS = st.one_of(
    st.just("*"),
    KEYS.map(repr),
    st.integers(-3, 3).map(str),
    # With a start: python-jsonpath refuses `[0,:]`.
    st.tuples(st.integers(-3, 3), st.none() | st.integers(-3, 3), st.sampled_from([None, 1, 2, -1, -2, 0])).map(
        lambda bounds: ":".join("" if bound is None else str(bound) for bound in bounds)
    ),
)
SEGMENTS = st.lists(SELECTORS, min_size=1, max_size=2).map(lambda selectors: f"[{','.join(selectors)}]")
FILTERS = st.sampled_from(["[?@.a]", "[?@ == 1]", "[?$.a == @.b]", "[?length(@) > 1]", "[?@.*]", "[?@ == 'a']"])
PATHS = st.lists(st.tuples(st.sampled_from(["", "", ".."]), SEGMENTS | FILTERS), max_size=4).map(
    lambda segments: "$" + "".join(descent + segment for descent, segment in segments)
)


@settings(deadline=None, max_examples=50)
@given(DOCUMENTS, PATHS)
def test_a_path_finds_what_the_library_finds(document: Any, path: str) -> None:
    if isinstance(document, str):  # which the library takes for JSON
        document = [document]
    paths.check(path)
    found = jsonpath.JSONPathEnvironment(strict=True).finditer(path, document)
    # RFC 9535, section 2.3.4: a slice selects nothing of a string; python-jsonpath selects characters.
    expected = [match.obj for match in found if not of_string(match)]
    assert paths.finder(path)(document) == expected


def of_string(match: Any) -> bool:
    parent = match.parent
    return parent is not None and (isinstance(parent.obj, str) or of_string(parent))


def test_trap_32_a_path_finds_both_values_of_a_key_that_occurs_twice() -> None:
    document = json_format.decode('{"a": "x", "a": "y", "b": "z"}')
    expected = {
        "$.a": "xy", "$['a','b']": "xyz", "$.*": "xyz", "$..a": "xy", "$[?@ != 'x']": "yz", "$.a.b": "",
    }  # fmt: skip
    assert {path: "".join(paths.finder(path)(document)) for path in expected} == expected


def test_a_path_that_is_none_is_refused_with_the_column() -> None:
    refused = {
        "text": "a path begins with \\$", "$.te xt": "unexpected token 'xt' at column 6", "$.a[": "at column 5",
        "$.a[?@.b ==]": "at column 12", "$.a | $.b": "at column 5", "$" + "[?(" * 5000: "nested too deep|at column",
    }  # fmt: skip
    for path, message in refused.items():
        with pytest.raises(ValueError, match=message):
            paths.check(path)


def test_the_keys_that_decide_what_a_path_finds_are_known() -> None:
    expected = {"$.a.b": ["a"], "$['a','b']": ["a", "b"], "$.*": None, "$..a": None, "$": None, "$.a[?$.b]": None}
    assert {path: paths.first_keys(path) for path in expected} == expected


# The parameter


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("{files: a}", "records is {'files': 'a'}: input should be a valid list"),
        ("[{text: $.a}]", "parameter 'records.0.files' is missing"),
        ("[{files: a, txt: $.a}]", "records.0.txt: there is no such key; docs/formats.md has all of them"),
        ("[{files: a}, {files: b, text: $.te xt}]", "records.1.text is '$.te xt': unexpected token 'xt' at column 6"),
        ("[{files: a, text: 3}]", "records.0.text is 3: must be a JSONPath such as $.text"),
        ("[{files: a, text: $.a, messages: $.b}]", "has both text and messages: keep one"),
        ("[{files: a, prompt: $.a}]", "needs both prompt and completion, or neither"),
        ("[{files: a, messages: [{role: user}]}]", "each message needs a role and a content"),
        ("[{files: a, messages: [{role: user, content: '$['}]}]", "at column 3"),
        ("[{files: a, messages: [{role: user, content: 5}]}]", "must be strings: put others into quotes, as '5'"),
        ("[{files: a, messages: []}]", "must have a message"),
        ("[{files: a, format: chatml}]", "input should be 'sharegpt' or 'alpaca'"),
        ("[{files: a, format: alpaca, text: $.a}]", "has both text and format: keep one"),
        ("[{files: a, roles: {x: asistant}}]", "roles has 'asistant' for 'x': write user, assistant, system, "),
        ("[{files: a, text: $.a, system: $.b}]", "has system or history without messages, which they go before"),
    ],
)
def test_a_mistake_in_a_rule_is_one_clear_line(rules: str, message: str) -> None:
    values = yaml.safe_load((REPO / "params.yaml").read_text())
    Path("params.yaml").write_text(yaml.safe_dump({**values, "records": yaml.safe_load(rules)}))
    with pytest.raises(StageError) as caught:
        load_params(ExtractParams)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_rules_are_read_as_the_documentation_writes_them() -> None:
    text = (REPO / "docs/formats.md").read_text()
    for block in text.split("```yaml\n")[1:]:
        values = yaml.safe_load((REPO / "params.yaml").read_text()) | yaml.safe_load(block.split("```")[0])
        Path("params.yaml").write_text(yaml.safe_dump(values))
        assert load_params(ExtractParams).records


def test_a_glob_fits_paths_below_raw_dir() -> None:
    names = ["a.json", "x/b.json", "x/y/c.json"]
    expected = {
        "*.json": names[:1], "?.json": names[:1], "[a].json": [], "x/*": names[1:2], "x/**": names[1:],
        "**/*.json": names, "**": names, "x**": names[1:], "x?b.json": [], "?/b.json": names[1:2],
        "**/**/c.json": names[2:],
    }  # fmt: skip
    assert {glob: [name for name in names if find([Rule(files=glob)], name)] for glob in expected} == expected


def test_trap_32_a_rule_without_a_file_is_refused_before_any_file_is_read() -> None:
    """The error names files that are there."""
    name = "日本\u3000語\u200d"  # messages show it
    put({"a.json": '{"text": "a"}', "b.txt": "text", f"{name}/c.jsonl": '{"text": "c"}'})
    for rules, message in (
        ([{"files": "*.txt", **TEXT}], r"records\.0\.files is '\*\.txt': no file with records is left for it"),
        ([{"files": "*.jsonl", **TEXT}], r"Files with records below raw_dir: a\.json, 日本\\u3000語\\u200d/c\.jsonl$"),
        ([{"files": "**"}, {"files": "*.json"}], r"records\.1\.files .* put the rule before those that fit the same"),
    ):
        with pytest.raises(StageError, match=message):
            extract_raw(records=rules)
        assert not Path("data/extract.json").exists()
    extract_raw(records=[{"files": f"{name}/*", **TEXT}])  # a rule fits the name as it is
    assert read_rows() == ["a", "text", "c"]


def test_the_first_rule_that_fits_decides_and_text_needs_none() -> None:
    record = '{"x": "x", "y": "y"}'
    put({"a/1.json": record, "b/2.json": record, "b/3.txt": "text", "4.json": '["s"]'})
    for key in "yxy":  # and not the rules of a run before
        metrics = extract_raw(records=[{"files": "a/*", "text": "$.x"}, {"files": "*/*", "text": f"$.{key}"}])
        assert read_rows() == ["s", "x", key, "text"]
    assert [rule["matched_files"] for rule in metrics["rules"]] == [1, 1]


# Documents


def test_trap_33_the_same_path_finds_the_same_strings_in_each_format() -> None:
    """In JSON, JSON Lines, YAML and nested columns."""
    typed = {"body": [{"type": "text", "value": "a"}, {"type": "x", "value": "b"}]}
    cases: list[tuple[str, Any, str]] = [
        ("$.text", {"text": "a", "id": "1"}, "a"),
        ("$.body[*].para", {"body": [{"para": "a"}, {"para": ""}, {"para": "b"}]}, "a\nb"),
        ("$.text", {"text": ["a", {"b": "b", "c": [1, "c"]}, None]}, "a\nb\nc"),
        ("$..para", {"para": "a", "x": {"para": "b"}}, "a\nb"),
        ("$['title','text']", {"text": "b", "title": "a"}, "a\nb"),
        ("$.body[?@.type == 'text'].value", typed, "a"),
        ("$.text", {"text": "a\nb\n "}, "a\nb\n "),
    ]
    check_rules(*(case for path, record, row in cases for case in in_each_format({"text": path}, record, row)))


def test_trap_33_both_values_of_a_key_that_occurs_twice_are_kept() -> None:
    contents = ('{"text": "a", "x": 1, "text": "b"}\n', '{"t\\u0065xt": "a", "text": "b"}\n')
    names = ("a.jsonl", "a.json", "a.yaml")
    check_rules(*((TEXT, name, content, ["a\nb"]) for name in names for content in contents))


def test_trap_32_what_a_rule_leaves_out_is_counted() -> None:
    """By rule and reason, the first five with their keys: a missing key, a number or null makes no empty row."""
    values = [{"text": "abc"}, {"id": 1}, {"text": 3}, {"text": None}, {"text": ""}, {"text": "a"}, {"text": []}, 7]
    metrics = check_rules((TEXT, "a.jsonl", jsonl(*values), ["abc"]), min_chars=2)
    reasons = [("no string at $.text", key) for key in ("id", "text", "text")]
    reasons += [("fewer characters than min_chars", "text")] * 2
    [counts] = metrics["rules"]
    assert counts.pop("first_left_out") == [
        {"path": "000/a.jsonl", "position": f"line {number}", "reason": reason, "keys": [key]}
        for number, (reason, key) in enumerate(reasons, 2)
    ]
    assert counts == {
        "files": "000/**", "matched_files": 1, "records": 8, "documents": 1, "conversations": 0,
        "left_out": {"fewer characters than min_chars": 2, "no string at $.text": 5},
        "unused_columns": ["id"], "unknown_roles": [],
    }  # fmt: skip
    assert (metrics["records"], metrics["strings"]) == (1, 1)


def test_trap_32_a_rule_without_a_row_is_an_error_that_shows_what_it_leaves_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the keys that are there."""
    contents: dict[str, tuple[dict[str, Any], str, str]] = {
        "a.jsonl": (TEXT, jsonl({"id": "1", "body": "a"}), "line 1: no string at $.text: the keys are id, body"),
        "b.jsonl": (TEXT, '{"\\ud800\\u0007x": 1}', r"line 1: no string at $.text: the keys are \ud800\x07x"),
        "e.json": (
            {"each": "$.items[*]", **TEXT}, '{"rows": [{"text": "a"}]}',
            "line 1: no record at $.items[*]: the keys are rows",
        ),
        "f.yaml": (
            TEXT, "- text: a\n",
            'line 1: no string at $.text: the keys are (none: a list, whose elements `each: "$[*]"` reads)',
        ),
        "g.jsonl": (
            {"messages": "$.messages", "role": "from"}, jsonl({"messages": [{"role": "user", "content": "a"}]}),
            "line 1: a message without a string 'from': the keys are role, content",
        ),
        "h.csv": (TEXT, "id,body\n1,b\n", "line 2: no string at $.text: the keys are id, body"),
    }  # fmt: skip
    for name, (rule, content, expected) in contents.items():
        put({name: content})
        with pytest.raises(StageError) as error:
            extract_raw(records=[{"files": name, **rule}])
        lines = str(error.value).splitlines()
        assert lines[0] == f"params.yaml: records.0 makes no row of {name!r}:"
        assert lines[2] == f"{name}, {expected}"
        metrics = json.loads(Path("data/extract.json").read_text())
        assert (metrics["rejected_files"], metrics["rules"][0]["first_left_out"][0]["path"]) == (0, name)
        assert preview(Path(name), replace(PARAMS, records=[Rule(files=name, **rule)])).endswith("\n".join(lines[1:]))
    # Beside a file with a row, each is a file without text, which is named.
    put({"z.jsonl": jsonl({"text": "z"}), "y.json": "[]", "x.jsonl": ""})
    metrics = extract_raw(records=[{"files": "*", **TEXT}])
    assert (read_rows(), len(metrics["rules"][0]["first_left_out"])) == (["z"], 5)
    assert "8 files without text, of which nothing was rejected, such as a.jsonl: `" in capsys.readouterr().out


def test_trap_32_one_record_of_a_file_that_was_cut_is_a_row() -> None:
    lines = [{"other": f"{number:030}"} for number in range(3000)]
    put({"a.jsonl": jsonl(*lines, {"text": "last"}), "b.jsonl": jsonl(*lines)})
    [rule] = extract_raw(num_splits=3, records=[{"files": "*", **TEXT}])["rules"]
    assert read_rows() == ["last"]
    assert (rule["matched_files"], rule["left_out"]) == (2, {"no string at $.text": 6000})
    assert len(rule["first_left_out"]) == 5


def test_what_a_rule_leaves_out_is_told_with_the_reason() -> None:
    put({"a.jsonl": jsonl(*({name: "a"} for name in ("text", "note", "text")))})
    extract_raw(records=[{"files": "*", **TEXT}])
    message = extract(replace(PARAMS, records=[Rule(files="*", **TEXT)]), RUNTIME)
    assert "note: records.0 leaves out 1 of 3 records: no string at $.text\n" in message


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]


ANSWER, WRONG = [{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "wrong"}]
SYSTEM = {"role": "system", "content": "s"}
PAIR = {"prompt": turns("q"), "completion": ANSWER}
LAYOUTS: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "conversation": [
        ({"instruction": "q", "input": "", "output": "a"}, turns("q", "a")),
        ({"instruction": "q", "input": "i", "output": "a", "text": "q i a"}, turns("q\ni", "a")),
        ({"instruction": "q", "context": "c", "response": "a", "category": "x"}, turns("q\nc", "a")),
        ({"question": "q", "answer": "a"}, turns("q", "a")),
        ({"query": "q", "response": "a", "type": "x"}, turns("q", "a")),
        ({"prompt": "q", "completion": "a"}, turns("q", "a")),
        ({"prompt": "q", "chosen": "a", "rejected": "wrong"}, turns("q", "a")),
        ({"input": "q", "output": "a"}, turns("q", "a")),
        ({"prompt": "q2", "response": "a2", "history": [["q", "a"]]}, [*turns("q", "a"), *turns("q2", "a2")]),
        ({"system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, *turns("q", "a")]),
        ({"prompt": "q", "messages": turns("q", "a")}, turns("q", "a")),
        ({"prompt": "q", "rejected": [*turns("q"), *WRONG], "chosen": turns("q", "a")}, turns("q", "a")),
        ({"prompt": turns("q"), "chosen": turns("q", "a"), "rejected": WRONG}, turns("q", "a")),
        ({"my chat": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": "1"}, turns("q", "a")),
        ({"prompt": turns("q"), "completion": ANSWER}, PAIR),
        ({"prompt": turns("q"), "rejected": WRONG, "chosen": ANSWER}, PAIR),
        ({"input": {"messages": turns("q")}, "preferred_output": ANSWER, "non_preferred_output": WRONG}, PAIR),
        ({"instruction": "q", "output": "a", "system_prompt": "s"}, [SYSTEM, *turns("q", "a")]),
        ({"instruction": "q", "output": "a", "context": "c"}, turns("q\nc", "a")),
        ({"question": "q", "solution": "a", "answer": "42"}, turns("q", "a")),
        ({"conversation": turns("q", "a"), "conversation_before": turns("q", "wrong")}, turns("q", "a")),
    ],
    "document": [
        ({"id": "1", "url": "u", "title": "t", "text": "d"}, "d"),
        ({"text": "d", "meta": {"source": "s"}}, "d"),
        ({"content": "d", "path": "a.py"}, "d"),
    ],
    "none": [
        ({"question": "q", "A": "a", "B": "b", "answer": "A"}, None),
        ({"question": "q", "choices": ["a", "b"], "answer": "a"}, None),
        ({"text": "d", "label": ["l"], "id": 1}, None),
        ({"text": "d", "role": "prompter", "parent_id": "1"}, None),
        ({"text": "d", "answer": "a", "annotator": "x"}, None),
        ({"text": "d", "number": 1, "none": None}, None),
        ({"prompt": turns("q"), "rejected": WRONG}, None),
        ({"prompt": "q", "chosen": ANSWER, "rejected": WRONG}, None),
        ({"conversation_a": turns("q", "a"), "conversation_b": turns("q", "b"), "winner": "model_b"}, None),
        ({"context": turns("q", "a"), "response1": "a", "response2": "b"}, None),
        ({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}}, None),
        ({"input": "q", "preferred_output": ANSWER, "non_preferred_output": WRONG}, None),
        ({"instruction": "Answer.", "question": "q", "answer": "a"}, None),
        ({"instruction": "Answer.", "question": "q", "output": "a"}, None),
        ({"question": "q", "option_a": "a", "option_b": "b", "answer": "A"}, None),
        ({"text": "d", "summary": "s", "title": "t"}, None),
        ({"answer": "a", "note": "n"}, None),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl", "b.json", "c.parquet", "d.arrow", "e.csv", "f.yaml"])
def test_a_rule_that_is_proposed_gives_the_rows_that_a_layout_means(name: str) -> None:
    for number, (record, row) in enumerate(chain(*LAYOUTS.values())):
        if name == "e.csv" and not all(isinstance(value, str) for value in record.values()):
            continue
        file = f"{number} b/{name}"
        (Path("data/raw") / file).parent.mkdir(parents=True)
        write_record(Path("data/raw") / file, record)
        last = show(file).split("\n")[-1]
        if row is None:
            assert "set records" not in last, record
            continue
        [rule] = yaml.safe_load(last.split("set records: ")[1])
        expected = row if isinstance(row, (str, dict)) else {"messages": row}
        extract_raw(records=[rule])
        assert read_rows() == [expected], rule
        shutil.rmtree("data/raw")


def test_many_files_of_one_directory_do_not_hide_the_layout_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    put({f"a/{number:03}.jsonl": jsonl({"text": "d", "id": "1"}) for number in range(120)})
    put({"b/c/d.jsonl": jsonl({"messages": CHAT})})
    extract_raw()
    rules = '{files: "a/*.jsonl", text: $.text}, {files: "b/c/*.jsonl", messages: $.messages}'
    assert f" in a/000.jsonl, b/c/d.jsonl: set records: [{rules}]\n" in capsys.readouterr().out


def test_a_proposal_leaves_other_layouts_below_a_directory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/b", "a/b/c", "a/d/e"):
        put({f"{name}/{number}.jsonl": jsonl({"text": "d", "id": "1"}) for number in range(2)})
    extract_raw()
    assert 'set records: [{files: "a/**/*.jsonl", text: $.text}]\n' in capsys.readouterr().out
    put({"a/b/c/0.jsonl": jsonl({"messages": CHAT}), "a/d/e/0.jsonl": jsonl({"note": "n"})})
    extract_raw()
    rules = '{files: "a/b/*.jsonl", text: $.text}, {files: "a/b/c/*.jsonl", messages: $.messages}'
    assert f"set records: [{rules}]\n" in capsys.readouterr().out


def test_directories_with_one_layout_get_one_rule(capsys: pytest.CaptureFixture[str]) -> None:
    put({f"{name}/a.jsonl": jsonl({"text": "d", "id": "1"}) for name in "abc"})
    extract_raw()
    assert 'in a/a.jsonl: set records: [{files: "**/*.jsonl", text: $.text}]\n' in capsys.readouterr().out
    put({"b/a.jsonl": jsonl({"note": "n"})})
    extract_raw()
    rules = '{files: "a/*.jsonl", text: $.text}, {files: "c/*.jsonl", text: $.text}'
    assert f" in a/a.jsonl, c/a.jsonl: set records: [{rules}]\n" in capsys.readouterr().out


def test_a_proposal_knows_columns_that_are_null_in_the_first_row_and_other_encodings() -> None:
    rows = [{"context": None, "question": "q", "answer": "a"}, {"context": "c", "question": "q", "answer": "a"}]
    put({"b.csv": "question,answer\né,è".encode("cp1252")})
    pq.write_table(pa.Table.from_pylist(rows), "data/raw/a.parquet")
    assert "content: \"$['question', 'context']\"}" in show("a.parquet")
    assert show("b.csv").endswith("{role: user, content: $.question}, {role: assistant, content: $.answer}]}]")


@pytest.mark.parametrize("directory", ['a [b], {c}: it\'s "d"', "é中\xa0\n", os.fsdecode(b"caf\xe9")])
@pytest.mark.parametrize("key", ["a b", 'it\'s "c"', "é中", "a\xa0b\\"])
def test_a_proposal_fits_names_of_any_characters(directory: str, key: str) -> None:
    put({f"{directory}/a.jsonl": jsonl({key: CHAT})})
    last = show(f"{directory}/a.jsonl").split("\n")[-1]
    extract_raw(records=yaml.safe_load(last.split("set records: ")[1]))
    assert read_rows() == [{"messages": CHAT}]


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write it as the only one of a file."""
    table = pa.Table.from_pylist([record])
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([record.keys(), record.values()])
    else:
        path.write_text(json.dumps([record] if path.suffix == ".json" else record))


def test_files_without_a_rule_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    put({"a.jsonl": jsonl({"messages": CHAT}), "b.yaml": "a: b", "c.csv": "text\na", "d.txt": "d"})
    for _ in range(2):  # then from the store
        extract_raw(num_splits=2)
        output = capsys.readouterr().out
        assert "note: 3 files without a rule (docs/formats.md): each CSV file is a document, and each string" in output
        rules = '{files: "*.csv", text: $.text}, {files: "*.jsonl", messages: $.messages}'
        assert f"document or conversation in c.csv, a.jsonl: set records: [{rules}]\n" in output
    put({"a.jsonl": jsonl({"messages": [1], "tables": [{"role": "b"}]}), "c.csv": "note\na"})
    extract_raw(num_splits=2)
    assert "set records" not in capsys.readouterr().out
    put({"a.JSONL.gz": gzip.compress(jsonl({"messages": CHAT}).encode())})
    extract_raw(num_splits=2)
    assert 'set records: [{files: "*.JSONL.gz", messages: $.messages}]' in capsys.readouterr().out
    extract_raw(num_splits=2, records=[{"files": "?.yaml", "text": "$"}, {"files": "*"}])
    assert "without a rule" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("b.jsonl", jsonl({"conversations": SHAREGPT})),
        ("b.jsonl", jsonl({"chat log": SHAREGPT})),
        ("b.json", json.dumps([{"conversations": SHAREGPT}], indent=2)),
        ("b.json", json.dumps({"conversations": SHAREGPT})),
        ("b.jsonl", jsonl({"system": "S", "conversations": SHAREGPT})),
    ],
)
def test_the_rule_in_the_warning_about_conversations_reads_them(
    name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of its directory alone: a rule for all .jsonl would leave out the documents of the other one.
    put({"web/a.jsonl": jsonl({"body": "a"}), f"chat/new/{name}": content})
    text = {"files": "web/*", "text": "$.body"}
    metrics = extract_raw(records=[text])
    assert metrics["strings"] == 1 + 2 * len(SHAREGPT) + content.count('"system"')
    [rule] = re.findall(r"add to records: (.*)", capsys.readouterr().out)
    [count, other] = extract_raw(records=[text, yaml.safe_load(rule)])["rules"]
    assert (count["documents"], other["conversations"], other["left_out"]) == (1, 1, {})
    assert other["unused_columns"] == []


def test_null_switches_a_default_of_a_rule_off() -> None:
    record = jsonl({"system": "S", "tools": [TOOL], "messages": CHAT, "conversations": SHAREGPT})
    system = {"messages": [{"role": "system", "content": "S"}, *CHAT], "tools": [TOOL]}
    metrics = check_rules(
        ({"messages": "$.messages"}, "a.jsonl", record, [{"messages": CHAT, "tools": [TOOL]}]),
        ({"messages": "$.messages", "tools": None}, "a.jsonl", record, [{"messages": CHAT}]),
        ({"format": "sharegpt"}, "a.jsonl", record, [system]),
        ({"format": "sharegpt", "system": None, "tools": None}, "a.jsonl", record, [{"messages": CHAT}]),
    )
    assert ["system" in rule["unused_columns"] for rule in metrics["rules"]] == [True, True, False, True]


def test_bad_lines_are_rejected_and_the_others_kept() -> None:
    good = '{"text": "%s"}'
    numbers = f'{{"text": "9", "x": [NaN, 1e999, -Infinity, {"9" * 5000}]}}'
    content = [
        *(good % "1", "{", good % "3", "", f" {good % 5} ", good % "6a" + good % "6b", f"{good % 7} x", "[" * 100_000),
        *(numbers, good % r"\ud83d\ude00 \ud83d", '{"text":', "}", good % "\t"),
    ]
    rows = ["1", "3", "5", "6a", "6b", "9", "😀 \ufffd"]
    bad = [
        f"{'nested too deep' if number == 8 else 'invalid JSON'} at line {number}:" for number in (2, 7, 8, 11, 12, 13)
    ]
    endings = "\r\n".join([good % "1", "x", good % "3"])
    check_rules(
        (TEXT, "a.jsonl", "\n".join(content), rows, *bad),
        (TEXT, "b.jsonl", endings, ["1", "3"], "invalid JSON at line 2:"),
    )


# Records of large files


def streamed(content: str, limits: Limits, **rule: Any) -> ListSink:
    """What becomes of a file of JSON that is read in pieces."""
    sink: Any = ListSink()
    given = records.Records(Rule(files="*", **rule), sink, 1, limits)
    try:
        json_format.read_records(Memory(content, limits), given)
    except json_format.Rejected as rejected:
        sink.report(rejected)
    given.flush()
    kept: ListSink = sink
    return kept


STRINGS = st.recursive(
    st.text('a"\\é😀', min_size=1, max_size=3) | st.integers(-99, 99) | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=3),
    max_leaves=15,
)


@settings(deadline=None, max_examples=50)
@given(
    STRINGS, st.lists(st.sampled_from(["[*]", ".a", ".b", "[0]", "[1]"]), max_size=3), st.sampled_from([1, 7, 10**6])
)
def test_records_of_a_large_file_are_those_of_the_document(document: Any, steps: list[str], batch: int) -> None:
    each = "$" + "".join(steps)
    expected = ["\n".join(paths.strings(found)) for found in paths.finder(each)(document)]
    for indent in (None, 1):
        text = json.dumps(document, indent=indent, ensure_ascii=indent is None)
        sink = streamed(text, replace(SMALL, batch=batch), each=each, text="$")
        assert sink.rows == [row for row in expected if row]
        assert not sink.rejected


def test_what_was_read_ahead_of_a_large_record_is_not_lost() -> None:
    items = ["x" * 1000, *(f"item {number}" for number in range(300)), "y" * 3000, "z"]
    for batch in (1, 7, 50):
        limits = replace(SMALL, batch=batch, longest_record=2000)
        sink = streamed(json.dumps({"skipped": items, "x": items}), limits, each="$.x[*]", text="$")
        assert sink.rows == [item for item in items if len(item) < 2000]
        assert [rejected.reason for rejected in sink.rejected] == ["record too large"]


def test_a_top_level_list_has_a_record_each_and_other_documents_are_one() -> None:
    assert streamed('[{"t": "a"}, {"t": "b"}] {"t": "c"} "d" [] ["e"]', SMALL, text="$..*").rows == ["a", "b", "c"]
    assert streamed('["a", ["b", "c"]]', SMALL, text="$").rows == ["a", "b\nc"]
    assert streamed('[["a"], ["b"]]', SMALL, each="$[?@[0]]", text="$").rows == ["a", "b"]  # held as a whole


@pytest.mark.parametrize("limits", [SMALL, LIMITS], ids=["pieces", "whole"])
def test_what_follows_the_last_record_is_rejected_with_its_place(limits: Limits) -> None:
    expected = {
        '["a", "b", c, "d"]': ("ab", "line 1, character 12"),
        '["a",\n"b"': ("ab", "line 2, character 4"),
        '["a",\n"b': ("a", "line 2, character 3"),
        '["a" "b"]': ("a", "line 1, character 6"),
        '["a",]': ("a", "line 1, character 6"),
        '{"x": ["a"': ("a", "line 1, character 11"),
        '{"y": [1 2], "x": ["a"]}': ("", "line 1, character 10"),
        '{"y" 1}': ("", "line 1, character 6"),
        "{3: 1}": ("", "line 1, character 2"),
        '["a"] x': ("a", "line 1, character 7"),
    }
    found = {}
    for text in expected:
        sink = streamed(text, limits, text="$", each="$.x[*]" if text.startswith("{") else None)
        [rejected] = sink.rejected
        found[text] = "".join(sink.rows), rejected.position
    assert found == expected


def test_a_record_that_is_too_large_is_rejected_and_the_others_kept() -> None:
    large, many = {"t": "x" * 500}, {"t": [[]] * 100}
    items = [{"t": "a"}, large, {"t": "b"}, many, {"t": "c"}]
    rule, rows = {"text": "$.t"}, ["a", "b", "c"]
    too = "record too large at line"
    check_rules(
        (rule, "a.json", json.dumps(items), rows, f"{too} 1, element 2:", f"{too} 1, element 4:"),
        (rule, "b.json", json.dumps(items, indent=1), rows, f"{too} 5, element 2:", f"{too} 11, element 4:"),
        (rule, "c.jsonl", jsonl(*items), rows, f"{too} 2:", f"{too} 4:"),
        (rule, "d.csv", "t\na\n" + "x" * 500 + "\nb\n", ["a"], f"{too} 3:"),  # what follows is lost
        (rule, "e.yaml", yaml.safe_dump_all(items), ["a"], "record too large"),
        limits=[replace(LIMITS, chunk=64, batch=64, longest_record=300, most_values=40)],
    )


def test_depth_ends_soon() -> None:
    for text in ("[" * 100_000, '{"x":' * 100_000, '{"y":' + "[" * 100_000):
        sink = streamed(text, LIMITS, each="$.x[*]", text="$")
        reasons = [rejected.reason for rejected in sink.rejected]
        assert reasons == ["nested too deep", "invalid JSON"][not text.startswith('{"x"') :]


# YAML and CSV


def test_a_yaml_document_is_a_record_of_typed_values() -> None:
    values = "train: false, n: [1, 0o14, 1.5, .inf, null, ~, 2024-01-02]"
    typed = {"train": False, "n": [1, 12, 1.5, None, None, None, "2024-01-02"]}
    long = f"messages: [{{role: user, content: a, n: 0x{'f' * 10**5}}}]"
    messages = {"messages": "$.messages"}
    check_rules(
        (messages, "a.yaml", f"# 1\nmessages:\n- {{role: user, content: yes, {values}}}\n---\n- x\n",
         [{"messages": [{"role": "user", "content": "yes", **typed}]}]),
        (messages, "b.yaml", long, [{"messages": [{"role": "user", "content": "a", "n": None}]}]),
        (TEXT, "c.yaml", '\t[{"text": "a"},\n{"text": "b"}]', ["a", "b"]),  # JSON that libyaml refuses
        (TEXT, "d.yaml", "text: a\n---\n{", ["a"], "invalid YAML"),
    )  # fmt: skip


def test_trap_33_an_alias_is_the_node_that_it_names_and_a_bomb_of_them_is_rejected() -> None:
    content = (
        "system: &s Be brief.\nitems:\n- {text: *s}\n- &i {text: b}\n- *i\n- {text: *nothing}\n? [a, b]\n: c\n1: d\n"
    )
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    check_rules(
        ({"each": "$.items[*]", **TEXT}, "a.yaml", content, ["Be brief.", "b", "b"]),
        ({"text": "$['1']"}, "b.yaml", content, ["d"]),
        ({"text": "$.a0"}, "c.yaml", "\n".join(["a0: &a0 text", *levels]), [], "record too large"),
    )


def test_csv_has_a_record_each_row_where_there_is_a_rule() -> None:
    content = 'id,text,text\n1,"a, ""b""\nc",d\n\n2,e,\n3,f\n4,"g"h,i\n5,j,k\n6,"l,m\n7,n\n8,"o"p\n'
    bad = [f"invalid CSV at {place}:" for place in ("line 6", "line 7", "lines 9 to 11")]
    check_rules(
        (TEXT, "a.csv", content, ['a, "b"\nc\nd', "e", "j\nk"], *bad),
        (TEXT, "a.tsv", content.replace(",", "\t"), ['a\t "b"\nc\nd', "e", "j\nk"], *bad),
        (TEXT, "b.csv", "\n\ntext,id\na,1\n", ["a"]),
    )
    check(("a.csv", content, [content]), ("a.tsv", content, [content]))


# Conversations

CONVERSATIONS: list[tuple[dict[str, Any], Any, Any]] = [
    ({}, {"messages": CHAT}, {"messages": CHAT}),
    ({}, {"messages": CHAT, "tools": [TOOL]}, {"messages": CHAT, "tools": [TOOL]}),
    ({}, {"messages": CHAT, "tools": []}, {"messages": CHAT}),
    ({}, {"messages": None, "prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
    ({}, {"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt": CHAT[:1], "completion": CHAT[1:]}),
    ({}, {"text": "a"}, "a"),
    ({"messages": "$.messages"}, {"messages": [*CHAT[:1], CALL], "tools": json.dumps([TOOL])},
     {"messages": [*CHAT[:1], CALL], "tools": [TOOL]}),
    ({"messages": "$.messages"}, {"messages": CHAT, "tools": " "}, {"messages": CHAT}),
    ({"messages": "$.messages"}, {"messages": json.dumps(CHAT)}, {"messages": CHAT}),
    ({"messages": "$.m[*]"}, {"m": CHAT}, {"messages": CHAT}),
    ({"messages": "$.c", "role": "from", "content": "value"}, {"c": SHAREGPT}, {"messages": CHAT}),
    ({"format": "sharegpt"}, {"conversations": [*SHAREGPT, {"from": "observation", "value": "x", "train": False}]},
     {"messages": [*CHAT, {"role": "tool", "content": "x", "train": False}]}),
    ({"format": "alpaca"}, {"instruction": "Add.", "input": "1+1", "output": "2"},
     {"messages": [{"role": "user", "content": "Add.\n1+1"}, {"role": "assistant", "content": "2"}]}),
    ({"format": "alpaca"}, {"instruction": "Hi", "input": "", "output": "Hello"}, {"messages": CHAT}),
    ({"format": "alpaca"},
     {"instruction": "Hi", "output": "Hello", "system": "S", "history": [["h1", "r1"], ["h2", "r2"]]},
     {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "h1"},
                   {"role": "assistant", "content": "r1"}, {"role": "user", "content": "h2"},
                   {"role": "assistant", "content": "r2"}, *CHAT]}),
    ({"format": "alpaca"}, {"instruction": "Hi", "output": "Hello", "system": "", "history": []}, {"messages": CHAT}),
    ({"format": "alpaca"}, {"instruction": "Hi", "output": "Hello", "history": '[["h", "r"]]'},
     {"messages": [{"role": "user", "content": "h"}, {"role": "assistant", "content": "r"}, *CHAT]}),
    ({"format": "sharegpt"}, {"conversations": SHAREGPT, "system": "S"},
     {"messages": [{"role": "system", "content": "S"}, *CHAT]}),
    ({"format": "sharegpt"}, {"conversations": [{"from": "system", "value": "S"}, *SHAREGPT], "system": "S"},
     {"messages": [{"role": "system", "content": "S"}, *CHAT]}),
    ({"messages": "$.messages", "system": "$.s"}, {"messages": CHAT, "s": " "}, {"messages": CHAT}),
    ({"messages": [{"role": "system", "content": "$.s"}, {"role": "user", "content": "$.q"},
                   {"role": "assistant", "content": "$.a", "reasoning_content": "$.r", "train": True}]},
     {"s": "", "q": "Q", "a": "A", "r": "R"},
     {"messages": [{"role": "user", "content": "Q"},
                   {"role": "assistant", "content": "A", "reasoning_content": "R", "train": True}]}),
    ({"messages": [{"role": "user", "content": "$.q"},
                   {"role": "assistant", "content": "$.a", "tool_calls": "$.c[*]"}]},
     {"q": "Q", "a": "", "c": CALL["tool_calls"] * 2},
     {"messages": [{"role": "user", "content": "Q"},
                   {"role": "assistant", "content": "", "tool_calls": CALL["tool_calls"] * 2}]}),
    ({"messages": [{"role": "system", "content": "Be brief."}, {"role": "$.who", "content": "$.q"}]},
     {"who": "human", "q": "Q"},
     {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q"}]}),
    ({"prompt": "$.q", "completion": "$.a[*]"}, {"q": "", "a": ["b", "c"]}, {"prompt": "", "completion": "b\nc"}),
    ({"prompt": [{"role": "user", "content": "$.q"}], "completion": [{"role": "assistant", "content": "$.a"}],
      "tools": "$.t"}, {"q": "Hi", "a": "Hello", "t": [TOOL]},
     {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": [TOOL]}),
    ({"messages": "$.chats[0]"}, {"chats": [CHAT]}, {"messages": CHAT}),
    ({"messages": "$.m"},
     {"m": [{"role": name, "content": "a"} for name in ("User", "model", "Assistant", "ASSISTANT", "ai", "bot")]},
     {"messages": [{"role": name, "content": "a"} for name in ("user", *["assistant"] * 5)]}),
    ({"messages": "$.m", "roles": {"Narrator": "system", "x": "x", "ai": "user"}},
     {"m": [{"role": name, "content": "a"} for name in ("Narrator", "x", "ai", "y")]},
     {"messages": [{"role": name, "content": "a"} for name in ("system", "x", "user", "y")]}),
]  # fmt: skip


def test_a_rule_makes_conversations() -> None:
    check_rules(*(case for rule, record, row in CONVERSATIONS for case in in_each_format(rule, record, row)))


def test_a_conversation_is_compact_json_and_other_keys_keep_their_order() -> None:
    message = {"content": "é\u2028 <b>", "z": 1.0, "role": "user", "a": [True, None]}
    put({"a.jsonl": jsonl({"messages": [message]})})
    extract_raw(records=[{"files": "*"}])
    [row] = datasets.load_from_disk(str(CORPUS))["messages"]
    assert row == '{"messages":[{"role":"user","content":"é\u2028 <b>","z":1.0,"a":[true,null]}]}'


LEFT_OUT: list[tuple[dict[str, Any], str, str]] = [
    ({}, '{"a": 1}', "no messages, prompt or text"),
    ({"messages": "$.m"}, '{"m": []}', "no list of messages at $.m"),
    ({"messages": "$.m"}, '{"m": "text"}', "no list of messages at $.m"),
    ({"messages": "$.m"}, '{"m": [{"role": "user"}, "b"]}', "no list of messages at $.m"),
    ({"messages": "$.m"}, '{"m": [{"from": "a"}]}', "a message without a string 'role'"),
    ({"messages": "$.m"}, '{"m": [{"role": "a", "content": 3}]}', "a 'content' that is neither a string nor a list"),
    ({"messages": "$.m"}, '{"m": [{"role": "a", "role": "b", "content": "c"}]}', "a key occurs twice in a message"),
    ({"messages": "$.m"}, '{"m": [{"role": "a", "content": [{"y": 1, "y": 2}]}]}', "a key occurs twice in a message"),
    ({"messages": "$.m"}, '{"m": [{"role": "a"}], "m": [{"role": "b"}]}', "no list of messages at $.m"),
    ({"messages": "$.m"}, '{"m": [{"role": "a", "text": "b"}]}', "no message has a 'content'"),
    ({"messages": "$.m", "role": "from"}, '{"m": [{"from": "gpt", "value": "b"}]}', "no message has a 'content'"),
    ({"messages": "$.m", "tools": "$.t"}, '{"m": [{"role": "a", "content": "b"}], "t": "x"}',
     "no list of tools at $.t"),
    ({"prompt": "$.p", "completion": "$.c"}, '{"p": "a"}', "no string at $.c"),
    ({"prompt": "$.p", "completion": "$.c"}, '{"p": "a", "c": ""}', "no string at $.c"),
    ({"prompt": "$.p", "completion": "$.c"}, '{"p": "a", "c": [{"role": "b", "content": "d"}]}',
     "a string and a list of messages as prompt and completion"),
    ({"messages": [{"role": "user", "content": "$.q"}]}, '{"a": "b"}', "no string at $.q"),
    ({"format": "alpaca"}, '{"instruction": "a", "output": " "}', "no string at $.output"),
    ({"format": "alpaca"}, '{"instruction": "a", "output": "b", "history": [["c"]]}',
     "no list of pairs of a question and an answer at $.history"),
]  # fmt: skip
GOOD = {
    "messages": CHAT,
    "m": [{**message, "from": "gpt"} for message in CHAT],
    "p": "a",
    "c": "b",
    "q": "Q",
    "instruction": "a",
    "output": "b",
}
"""A record of which each of these rules makes a row."""


def test_what_is_no_conversation_is_left_out_with_a_reason() -> None:
    put({f"{number:02}.jsonl": f"{record}\n{json.dumps(GOOD)}\n" for number, (_, record, _) in enumerate(LEFT_OUT)})
    rules = [{"files": f"{number:02}.jsonl", **rule} for number, (rule, _, _) in enumerate(LEFT_OUT)]
    metrics = extract_raw(records=rules)
    assert [rule["left_out"] for rule in metrics["rules"]] == [{reason: 1} for _, _, reason in LEFT_OUT]
    assert metrics["strings"] == len(LEFT_OUT)


def test_numbers_and_surrogates_cost_no_conversation() -> None:
    message = rf'{{"role": "user", "content": "\ud83d\ude00\ud83d", "n": [NaN, 1e999, {2**70}, {"9" * 5000}]}}'
    row = {"messages": [{"role": "user", "content": "😀\ufffd", "n": [None, None, 2**70, None]}]}
    check_rules(({}, "a.jsonl", f'{{"messages": [{message}]}}', [row]))


def test_columns_that_no_rule_used_are_named_once() -> None:
    rows = [{"messages": json.dumps(CHAT), "system": "S", "prompt": "p", "n": "1"}] * 3
    sheet, table = io.StringIO(), io.BytesIO()
    csv.writer(sheet).writerows([rows[0].keys(), *(row.values() for row in rows)])
    pq.write_table(pa.Table.from_pylist(rows), table)
    contents: dict[str, str | bytes] = {
        "a.jsonl": jsonl(*rows), "a.json": json.dumps(rows), "a.csv": sheet.getvalue(), "a.parquet": table.getvalue(),
    }  # fmt: skip
    unused: list[tuple[dict[str, Any], list[str]]] = [
        ({"messages": "$.messages"}, ["n", "prompt", "system"]),
        ({}, ["n", "system"]),
        ({"text": "$.system"}, ["messages", "n", "prompt"]),
        ({"text": "$['system','prompt']"}, ["messages", "n"]),
        ({"text": "$..*"}, []),
    ]
    rules, expected = [], []
    for name, content in contents.items():
        for rule, names in unused:
            directory = f"{len(rules):02}"
            put({f"{directory}/{name}": content, f"{directory}/b/{name}": content})
            rules.append({"files": f"{directory}/**", **rule})
            expected.append(names)
    metrics = extract_raw(num_splits=2, records=rules)
    assert [rule["unused_columns"] for rule in metrics["rules"]] == expected
    message = extract(replace(PARAMS, records=[Rule(**rule) for rule in rules]), RUNTIME)
    named = re.findall(r"note: records\.(\d+): columns that the rule does not use: (.*)", message)
    assert named == [(str(number), ", ".join(names)) for number, names in enumerate(expected) if names]


def test_roles_that_nobody_knows_are_named() -> None:
    turns = [{"role": name, "content": "a"} for name in ("human", "agent", "Assistant", "developer")]
    put({f"{name}.jsonl": jsonl({"messages": turns}) for name in "ab"})
    params = replace(PARAMS, records=[Rule(files="*")])
    assert extract_raw(num_splits=2, records=[{"files": "*"}])["rules"][0]["unknown_roles"] == ["agent"]
    message = extract(params, RUNTIME)
    note = "roles that are not known: agent: add `roles: {agent: ROLE}` to the rule, where ROLE is user, assistant, ..."
    assert f"note: records.0: {note}\n" in message
    shown = preview(Path("a.jsonl"), params)
    assert shown.endswith(note)
    for role in ("assistant", "agent"):
        metrics = extract_raw(num_splits=2, records=[{"files": "*", "roles": {"agent": role}}])
        assert metrics["rules"][0]["unknown_roles"] == []
        assert [turn["role"] for turn in read_rows()[0]["messages"]] == ["user", role, "assistant", "developer"]


def test_records_with_ever_new_keys_name_a_few_of_them() -> None:
    put({"a.jsonl": jsonl(*({"text": "a", f"id{number}": 1} for number in range(1000)))})
    [rule] = extract_raw(records=[{"files": "*"}])["rules"]
    assert rule["unused_columns"] == sorted(f"id{number}" for number in range(20))


# The corpus


def test_the_columns_depend_on_the_rules_alone() -> None:
    put({"a.jsonl": jsonl({"text": "a"}), "b.txt": "b", "c.jsonl": jsonl({"text": "c"})})
    for rules, columns in (
        (None, ["text"]),
        ([{"files": "*", **TEXT}], ["text"]),
        ([{"files": "a*"}, {"files": "*", **TEXT}], ["text", "messages"]),
        ([{"files": "*"}], ["text", "messages"]),
    ):
        extract_raw(num_splits=3, records=rules)
        dataset = datasets.load_from_disk(str(CORPUS))
        assert dataset.column_names == columns
        assert sorted(dataset["text"]) == ["a", "b", "c"]


def mixed_cases() -> list[tuple[Any, ...]]:
    chats = [({"messages": CHAT * number}, {"text": f"t{number}"}) for number in range(1, 10)]
    return [
        *(("a.jsonl", jsonl(*pair), [pair[0], pair[1]["text"]]) for pair in chats),
        ("x.txt", "x" * 2000, ["x" * 2000]),
        ("y.json", '["y", "y"]', ["y", "y"]),
        ("z.txt", "x" * 2000, ["x" * 2000]),
        ("c.jsonl", jsonl({"messages": CHAT}), [{"messages": CHAT}]),
        ("t.txt", json.dumps({"messages": CHAT}), [json.dumps({"messages": CHAT})]),  # no conversation
    ]


def test_documents_and_conversations_keep_the_order_of_the_files() -> None:
    # In small pieces: what is too long for a batch is written while it is read.
    check(*mixed_cases(), records=[{"files": "**/*.jsonl"}], limits=[LIMITS, Limits(chunk=10, batch=50)])


def test_what_has_no_row_in_json_is_named_by_its_element_and_first_line() -> None:
    items = [{"text": "a"}, {"other": "b"}, {"text": "c"}, {"other": "d", "more": ["e"]}]
    rows = ["a", "c"]
    metrics = check_rules(
        (TEXT, "a.json", json.dumps(items), rows),
        (TEXT, "b.json", json.dumps(items, indent=1), rows),
        ({"each": "$.x[*]", **TEXT}, "c.json", json.dumps({"x": items}, indent=1), rows),
        (TEXT, "d.json", "\n".join(map(json.dumps, items)), rows),
    )
    assert [[record["position"] for record in rule["first_left_out"]] for rule in metrics["rules"]] == [
        ["line 1, element 2", "line 1, element 4"],
        ["line 5, element 2", "line 11, element 4"],
        ["line 6, element 2", "line 12, element 4"],
        ["line 2", "line 4"],
    ]


# The preview


def show(name: str, *rules: Rule, **params: Any) -> str:
    return preview(Path(name), replace(PARAMS, records=[*rules], **params))


def test_the_preview_shows_what_the_rules_make_of_a_file() -> None:
    put({"a.jsonl": jsonl(*({"text": f"text {number}"} for number in range(99)), {"messages": CHAT})})
    put({"c/chat.jsonl": jsonl({"messages": CHAT}, {"messages": []}), "d.txt": "x" * 5000, "e.jsonl": "{"})
    put({"f.json": '["ab", "abc"]', "g.json": "[]"})
    rules = (Rule(files="c/*"), Rule(files="a*", text="$.text"))
    for name in ("data/raw/a.jsonl", "a.jsonl"):
        shown = show(name, *rules)
        assert shown.startswith("a.jsonl: records.1\n--- 1: a document\ntext 0\n--- 2: a document\ntext 1\n")
        assert "text 5" not in shown
        assert shown.endswith(
            "99 rows\n1 record left out: no string at $.text\n"
            "a.jsonl, line 100: no string at $.text: the keys are messages\n"
            "columns that the rule does not use: messages"
        )
    assert '--- 1: a conversation\n{\n  "messages": [\n    {\n      "role": "user",' in show("c/chat.jsonl", *rules)
    assert show("d.txt").startswith("d.txt: no rule: the file is a document\n")
    add = 'conversation in c/chat.jsonl: add to records: {files: "c/**/*.jsonl", messages: $.messages}'
    assert show("c/chat.jsonl", *rules[1:]).endswith(add)
    assert show("a.jsonl").startswith("a.jsonl: no rule: each string is a document\n--- 1: a document\ntext 0\n")
    assert "x... (5000 characters)\n1 row" in show("d.txt", *rules)
    for broken in ("{", '{"a": "b\n', '{"a": "b\r\n'):
        put({"e.jsonl": broken})
        assert show("e.jsonl").endswith("0 rows\ne.jsonl: invalid JSON at line 1: the document does not end")
    assert show("f.json", min_chars=4).endswith("0 rows, of 4 characters or more")
    assert show("g.json").endswith("0 rows, as it has no text")
    put({"i": "i"})
    put({"h\n\udcff.txt": "h"})
    assert show("h\n\udcff.txt").startswith("h\\n\\xff.txt: no rule")
    for name, problem in (
        ("nothing.jsonl", "there is no nothing.jsonl"),
        ("data", "data is not a file below data/raw: name one, such as data/raw/a.jsonl"),
        ("i", r"i is not read: its name ends in none of .txt, .md, .*, .feather \(and .gz"),
    ):
        with pytest.raises(StageError, match=problem):
            show(name)
    assert not CORPUS.exists()


def test_the_preview_says_in_which_encoding_a_file_was_read() -> None:
    put({"a.txt": "é".encode("cp1252")})
    assert show("a.txt", fallback_encoding="cp1252").split("\n")[1:3] == [
        "it is not UTF-8: read as cp1252 (fallback_encoding)",
        "--- 1: a document",
    ]


def test_the_preview_says_that_organize_skips_a_file() -> None:
    put({"a.txt": "a", ".hidden/b.txt": "b"})
    organize(OrganizeParams(1, PARAMS.raw_dir), OrganizeRuntime(num_workers=1))
    skipped = [show(name).split("\n")[1] for name in ("a.txt", ".hidden/b.txt")]
    assert skipped == ["--- 1: a document", "organize skips it: hidden"]


def test_a_preview_of_a_file_that_changes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    put({"a.jsonl": jsonl({"text": "abc"})})
    monkeypatch.setattr(tree, "measure", lambda path: (path.stat().st_size, "0" * 64))
    with pytest.raises(StageError, match="changes while it is read: try again"):
        show("a.jsonl")
