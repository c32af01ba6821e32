import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from itertools import chain, product
from pathlib import Path
from typing import Any

import datasets
import distributed
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from stages.base import code, publish
from stages.base.dataset import Dataset
from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.base.publish import read_json, sha256_file
from stages.extract import ExtractRuntime, extract
from stages.formats import duplicates
from stages.formats.limits import LIMITS
from stages.forward.rows import TokenRows
from stages.model.manifest import ModelManifest
from stages.pack import PackParams, PackRuntime, find_tokenizer_spec, pack
from stages.tokenizing import fast_tokenizer, packing
from stages.tokenizing.encoding import DEFAULT_LIMITS, NAME, Encoder, EncoderLimits, TokenizerSpec
from stages.tokenizing.fast_tokenizer import FastTokenizer
from stages.work import arrow, reuse
from tests.byte_model import BOS, BOS_SPELLING, EOS, SPELLING, byte_tokenizer, make_model
from tests.chat_templates import CHATML
from tests.corpus import (
    CORPUS,
    NOT_RECORDS,
    PARAMS,
    content_of,
    extract_raw,
    organize_raw,
    put,
    put_numbered,
    wait_for_workers,
    with_processes,
)
from tests.project import REPO, start_stage

pytestmark = pytest.mark.usefixtures("empty_project")


def spec_of_model() -> TokenizerSpec:
    return find_tokenizer_spec(PackParams(seq_length=4, validation_splits=0), ModelManifest.read())


def make_corpus(splits: list[list[str]], batch_size: int = 1000) -> None:
    """Write the corpus, with so many documents in a record batch."""
    directory = Path("data/corpus")
    directory.mkdir(parents=True, exist_ok=True)
    shards = []
    for index, documents in enumerate(splits):
        stream = arrow.StreamWriter(directory / arrow.shard_name(index, len(splits)), arrow.TEXT)
        for start in range(0, len(documents), batch_size):
            stream.write(pa.array(documents[start : start + batch_size]))
        shards.append(stream.close())
    Dataset(arrow.TEXT, shards).write(directory)


def run(**arguments: Any) -> dict[str, Any]:
    """Run the stage with nothing in the store; return the metrics."""
    shutil.rmtree("data/.reuse", ignore_errors=True)
    encode(**arguments)
    metrics: dict[str, Any] = json.loads(Path("data/pack.json").read_text())
    return metrics


def encode(
    seq_length: int = 4,
    validation_splits: int = 1,
    num_workers: int = 1,
    reuse_gib: float = 1,
    max_batch_tokens: int = packing.MAX_BATCH_TOKENS,
    fast_encoder: bool = True,
) -> int:
    """Run the stage with what is in the store; return how many splits were encoded."""
    params = PackParams(seq_length, validation_splits, fast_encoder)
    output = pack(params, PackRuntime(num_workers=num_workers, reuse_gib=reuse_gib), max_batch_tokens)
    [(reused, total)] = re.findall(r"(\d+) of (\d+) splits reused", output)
    return int(total) - int(reused)


def tokens(name: str) -> list[int]:
    """All rows of a part, one after the other."""
    dataset = datasets.load_from_disk(f"data/tokens/{name}")
    return [token for row in dataset["input_ids"] for token in row]


def content() -> dict[str, bytes]:
    paths = [Path("data/pack.json"), *sorted(Path("data/tokens").rglob("*"))]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


DOCUMENT = st.text(st.characters(codec="utf-8") | st.sampled_from("ab \n"), min_size=1) | st.just(
    f"a{BOS_SPELLING} {SPELLING} b"
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(DOCUMENT, max_size=4), min_size=2, max_size=4), st.integers(2, 9), st.integers(1, 12))
def test_trap_25_decoding_gives_back_the_documents(splits: list[list[str]], seq_length: int, batch: int) -> None:
    splits = [["long enough for a row", *documents] for documents in splits]
    splits[-1] = splits[-1][:2]  # more than twice its share would be held out by content
    make_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "digest_with_packages", lambda module: "")  # slower than everything else in this test
        make_corpus(splits, batch_size=batch)
        metrics = run(seq_length=seq_length, max_batch_tokens=batch)
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True
    for name, part in (("train", splits[:-1]), ("validation", splits[-1:])):
        documents = [document for split in part for document in split]
        stream = [token for document in documents for token in (*tokenizer.encode(document).ids, EOS)]
        found = tokens(name)
        assert found == stream[: len(stream) - len(stream) % seq_length]
        assert metrics[name]["tokens"] == len(stream)
        assert metrics[name]["documents"] == len(documents)
        assert metrics[name]["characters"] == sum(map(len, documents))
        assert metrics[name]["bytes"] == sum(len(document.encode()) for document in documents)
        assert metrics[name]["rows"] == len(stream) // seq_length
        rest = stream[len(found) :]
        assert decode_documents(tokenizer, found + rest) == documents


def decode_documents(tokenizer: Tokenizer, stream: list[int]) -> list[str]:
    ends = [index for index, token in enumerate(stream) if token == EOS]
    starts = [0, *(end + 1 for end in ends)]
    assert starts.pop() == len(stream)
    return [tokenizer.decode(stream[start:end]) for start, end in zip(starts, ends, strict=True)]


def test_trap_25_validation_shares_no_document_with_training() -> None:
    make_model()
    make_corpus([["train " * 5], ["held out " * 5], ["also held out " * 5]])
    held_out = run(validation_splits=2)["validation"]
    assert (held_out["tokens"], held_out["bytes"]) == (46 + 67, 45 + 70)
    texts = {name: byte_tokenizer().decode(tokens(name)) for name in ("train", "validation")}
    assert "held" not in texts["train"]
    assert "train" not in texts["validation"]
    assert "also" in texts["validation"]
    assert run(validation_splits=0)["validation"]["tokens"] == 0
    assert tokens("validation") == []
    assert "also" in byte_tokenizer().decode(tokens("train"))


def test_trap_27_one_large_file_leaves_rows_to_validate() -> None:
    lines = [f"text {number} of one file " * 3 for number in range(20_000)]
    put({"a.jsonl": "\n".join(map(json.dumps, lines))})
    make_model()
    corpora = []
    for num_workers in (1, 2):
        organize_raw(num_splits=20)
        extract(PARAMS, with_processes(ExtractRuntime(num_workers=num_workers, reuse_gib=0)))
        corpora.append(content_of(CORPUS))
    assert corpora[0] == corpora[1]
    assert 0.03 < run(seq_length=64)["validation"]["documents"] / len(lines) < 0.07
    texts = datasets.load_from_disk(str(CORPUS))["text"]
    assert sorted(texts, key=lambda text: int(text.split()[1])) == lines


def test_trap_25_truncation_padding_and_added_tokens_of_the_tokenizer_are_disabled() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS_SPELLING} $A", special_tokens=[(BOS_SPELLING, BOS)])
    make_model(tokenizer)
    make_corpus([["xyzxyz"], ["validation"]])
    run(seq_length=7)
    assert decode_documents(byte_tokenizer(), tokens("train")) == ["xyzxyz"]


def decode_documents_of_ids(stream: list[int]) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in stream:
        if token == EOS:
            documents.append([])
        else:
            documents[-1].append(token)
    return [document for document in documents if document]


def test_trap_22_the_number_of_workers_and_the_executor_change_no_byte() -> None:
    make_model()
    make_corpus([[f"document {split} {index} " * 9 for index in range(3)] for split in range(2)], batch_size=1)
    results = []
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        for num_workers, scheduler in ((1, None), (3, None), (None, cluster.scheduler_address)):
            runtime = with_processes(PackRuntime(num_workers=num_workers, reuse_gib=0, dask_scheduler=scheduler))
            pack(PackParams(seq_length=4, validation_splits=1), runtime)
            results.append(content())
    assert results[0] == results[1] == results[2]


def test_the_fast_tokenizer_changes_no_byte_and_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model()
    make_corpus([[f"document {split} {index} é " * 9 for index in range(99)] for split in range(2)])
    results = []
    for fast_encoder, num_workers in product((False, True), (1, 3)):
        shutil.rmtree("data/.reuse", ignore_errors=True)
        params = PackParams(seq_length=4, validation_splits=1, fast_encoder=fast_encoder)
        pack(params, with_processes(PackRuntime(num_workers=num_workers, reuse_gib=1)))
        encoder = read_json(Path("data/pack.json"))["encoder"]
        results.append({name: data for name, data in content().items() if name != "data/pack.json"})
        assert encoder["name"] == (fast_tokenizer.NAME if fast_encoder else NAME)
        assert (encoder["slow_characters"], encoder["reason"]) == (0, None)
    assert results[0] == results[1] == results[2] == results[3]

    encode_fast = FastTokenizer.encode

    def planted(self: FastTokenizer, strings: list[str]) -> list[Any]:
        ids = encode_fast(self, strings)
        return [each[::-1] if "ment 1" in string else each for each, string in zip(ids, strings, strict=True)]

    monkeypatch.setattr(FastTokenizer, "encode", planted)
    shutil.rmtree("data/.reuse")
    output = pack(params, PackRuntime(num_workers=1, reuse_gib=1))
    assert f"encoded by {NAME}" in output
    assert "gives other tokens for the text" in read_json(Path("data/pack.json"))["encoder"]["reason"]
    assert results[0] == {name: data for name, data in content().items() if name != "data/pack.json"}


def test_trap_23_rows_are_int32_and_memory_mapped() -> None:
    make_model()
    make_corpus([["train " * 50], ["validation " * 5]])
    run(seq_length=8)
    dataset = datasets.load_from_disk("data/tokens/train")
    assert dataset.features == datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=8)})
    state = read_json(Path("data/tokens/train/state.json"))
    [entry] = state["_data_files"]
    path = Path("data/tokens/train", entry["filename"])
    assert entry["sha256"] == sha256_file(path)
    before = pa.total_allocated_bytes()
    column = pa.ipc.open_stream(pa.memory_map(str(path))).read_all().column("input_ids")
    values = column.chunk(0).flatten().to_numpy(zero_copy_only=True)
    assert pa.total_allocated_bytes() == before
    assert values.dtype == np.int32
    assert values.tolist() == tokens("train")


def test_the_fingerprint_depends_on_the_content_only() -> None:
    make_model()
    prints = []
    for text, seq_length in (("train " * 9, 4), ("train " * 9, 4), ("trail " * 9, 4), ("train " * 9, 2)):
        make_corpus([[text], ["validation"]])
        run(seq_length=seq_length)
        loaded = datasets.load_from_disk("data/tokens/train")
        prints.append((read_json(Path("data/tokens/train/state.json"))["_fingerprint"], loaded._fingerprint))
    assert prints[0] == prints[1]
    assert len({*prints}) == len({loaded for _, loaded in prints}) == 3
    assert len(prints[0][0]) == 64


def test_trap_26_a_model_without_an_eos_token_is_refused() -> None:
    make_corpus([["train"], ["validation"]])
    make_model(eos_token_id=None)
    with pytest.raises(StageError, match=r"eos_token_id: .*: run `dvc repro -f -s download`"):
        run()
    make_model(eos_token_id=5000)
    with pytest.raises(StageError, match="has no token 5000"):
        run()
    make_model()
    Path("data/tokenizer.json").unlink()
    with pytest.raises(StageError, match=r"data/tokenizer.json is missing: run `dvc repro -f -s download`"):
        run()


def test_trap_26_a_seq_length_above_the_limit_of_the_model_is_refused() -> None:
    make_corpus([["train"], ["validation"]])
    make_model(max_seq_length=8)
    with pytest.raises(StageError, match="seq_length is 9, model allows at most 8: lower it"):
        run(seq_length=9)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    make_corpus([["train é"], ["validation"]])
    make_model(vocab_size=100)
    with pytest.raises(StageError, match=r"gives token \d+, but the model's vocab_size is 100"):
        run()
    make_model()
    Path("data/tokenizer.json").write_text("{}")
    with pytest.raises(StageError, match=r"tokenizer.json is damaged or was changed"):
        run()


@pytest.mark.parametrize(
    ("splits", "arguments", "message"),
    [
        ([[], []], {}, "contains no text: put files with text into raw_dir"),
        ([["a"], ["b"]], {"validation_splits": 2}, "validation_splits is 2 of num_splits = 2 splits"),
        ([["xy"], ["long enough"]], {}, "train has 3 tokens, too few for one row of seq_length 4: lower seq_length"),
        ([["long enough"], ["xy"]], {}, r"validation has 3 tokens, .* raise validation_splits \(now 1\)"),
    ],
)
def test_trap_03_too_little_text_is_refused(splits: list[list[str]], arguments: dict[str, Any], message: str) -> None:
    make_model()
    make_corpus(splits)
    with pytest.raises(StageError, match=message):
        run(**arguments)
    assert not list(Path("data").glob("tokens/*"))


def test_the_corpus_that_is_recorded_is_the_one_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model()
    make_corpus([["train " * 50], ["validation"]])
    encode()
    read = Dataset.read(CORPUS, "extract").fingerprint
    close = packing.RowWriter.close

    def close_late(self: packing.RowWriter) -> Any:
        make_corpus([["of another extract " * 50], ["validation"]])
        return close(self)

    monkeypatch.setattr(packing.RowWriter, "close", close_late)
    assert encode() == 0
    assert Dataset.read(CORPUS, "extract").fingerprint != read
    assert read_json(Path("data/pack.json"))["source"] == read


def test_a_damaged_corpus_is_refused() -> None:
    make_model()
    make_corpus([["train " * 50], ["validation"]])
    path = Path("data/corpus/data-00000-of-00002.arrow")
    good = path.read_bytes()
    # Without the check, the last two would be read as a valid, shorter shard and as another text.
    for bad in (good[:-1], good[:-8], good.replace(b"train", b"trail")):
        path.write_bytes(bad)
        with pytest.raises(StageError, match=r"data-00000-of-00002.arrow is damaged"):
            run()
    path.unlink()
    with pytest.raises(StageError, match=r"data-00000-of-00002.arrow is missing"):
        run()


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_trap_29_metadata_that_extract_has_not_written_is_refused(name: str) -> None:
    make_model()
    make_corpus(SPLITS)
    path = CORPUS / name
    metadata = json.loads(path.read_text())
    key = "_data_files" if name == "state.json" else "features"
    for content in (*NOT_RECORDS, *(json.dumps({**metadata, key: value}).encode() for value in (None, 1, "text", [1]))):
        path.write_bytes(content)
        with pytest.raises(StageError, match=r"^data/corpus/state.json .*run `dvc repro -f -s extract`$"):
            run()


def test_trap_29_rows_that_the_corpus_does_not_have_are_refused() -> None:
    make_model()
    make_corpus(SPLITS)
    run()
    path = CORPUS / "state.json"
    state = json.loads(path.read_text())
    for rows in (4, -1):
        state["_data_files"][0]["rows"] = rows
        path.write_text(json.dumps(state))
        for function in (encode, run):  # with the tokens in the store, and without
            with pytest.raises(StageError, match=r"^data/corpus/state.json .*run `dvc repro -f -s extract`$"):
                function()


def test_a_seq_length_beyond_any_model_is_refused() -> None:
    Path("params.yaml").write_text(f"seq_length: {2**31}\nvalidation_splits: 1\n")
    with pytest.raises(StageError, match=r"seq_length is 2147483648: input should be less than or equal to 16777216"):
        load_params(PackParams)


def test_unknown_tokens_and_dropped_characters_are_counted() -> None:
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "?": 1, "a": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make_model(tokenizer)
    make_corpus([["a b a c"], ["a a"]])
    metrics = run(seq_length=2)
    assert metrics["train"] == {
        "documents": 1, "characters": 7, "bytes": 7, "tokens": 5, "rows": 2, "characters_per_token": 1.75,
        "unknown_share": 0.5, "dropped_characters": 0, "duplicates": 0,
        "conversations": None,
    }  # fmt: skip
    assert metrics["validation"]["unknown_share"] == 0
    vocab = {token: index for index, token in enumerate(["</s>", *"abĠ"])}  # some bytes, no unknown token
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    make_model(tokenizer)
    make_corpus([["a\x01 b\x02", "a b\x01"], ["aaaa"]])
    metrics = run(seq_length=2)
    assert (metrics["train"]["tokens"], metrics["train"]["dropped_characters"]) == (8, 3)
    assert metrics["validation"]["dropped_characters"] == 0


SPLITS = [[f"document {split} {index} " * 9 for index in range(5)] for split in range(5)]


def test_tokens_are_reused_when_only_the_rows_change() -> None:
    make_model()
    make_corpus(SPLITS)
    assert encode() == 5
    assert encode(seq_length=9) == encode(validation_splits=2) == encode(num_workers=2) == 0
    assert encode(seq_length=9, validation_splits=2) == 0
    reused = content()
    run(seq_length=9, validation_splits=2)
    assert content() == reused


def test_tokens_are_reused_if_text_tokenizer_and_code_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model()
    make_corpus(SPLITS)
    encode()
    make_corpus([*SPLITS[:2], ["an edit"], *SPLITS[3:]])
    assert encode() == 1
    reused = content()
    run()
    assert content() == reused
    make_model(eos_token_id=BOS)
    assert encode() == 5
    make_model(vocab_size=1 << 17)  # in four bytes each
    assert encode() == 5
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    make_model(tokenizer)
    assert encode() == 5
    assert encode() == 0
    make_model(tokenizer, special_tokens={"pad_token": "ab"})  # which is a special token then
    assert encode() == 5
    assert encode() == 0
    monkeypatch.setattr(code, "digest_with_packages", lambda module: "of an edit")
    assert encode() == 5


def test_tokens_of_two_and_four_bytes_give_the_same_rows() -> None:
    make_corpus(SPLITS)
    make_model()
    run()
    narrow = content()
    make_model(vocab_size=1 << 17)
    run()
    assert content() == narrow


@pytest.mark.slow
def test_one_added_file_encodes_a_quarter_of_the_splits_on_average_at_most() -> None:
    def encode_raw() -> tuple[int, dict[str, bytes]]:
        organize_raw(num_splits=20)
        extract(PARAMS, ExtractRuntime(num_workers=1, reuse_gib=1))
        shards = {path.name: path.read_bytes() for path in CORPUS.glob("*.arrow")}
        return encode(), shards

    make_model()
    put_numbered(400)
    num_encoded, shards = encode_raw()
    assert num_encoded == 20
    counts = []
    for name in ("aaa.txt", "folder1/00100b.txt", "folder3/00200b.txt", "folder5/00300b.txt", "zzz.txt"):
        put({name: f"added as {name}"})
        before = shards
        num_encoded, shards = encode_raw()
        assert 1 <= num_encoded <= sum(shards[shard] != before[shard] for shard in shards)
        counts.append(num_encoded)
    assert sum(counts) / len(counts) <= 20 / 4


def test_finished_splits_are_kept_when_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model()
    make_corpus(SPLITS)
    run()
    clean = content()
    shutil.rmtree("data/.reuse")
    shutil.rmtree("data/tokens")
    with monkeypatch.context() as patch:
        patch.setattr(packing, "encode", failing(packing.encode, 3))
        with pytest.raises(RuntimeError):
            encode()
    assert not list(Path("data").glob("tokens*"))
    assert encode() == 2
    assert content() == clean


def failing(function: Any, calls: int) -> Any:
    """The function, which fails after so many calls."""

    def limited(task: packing.BatchTask) -> packing.Encoded:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise RuntimeError
        result: packing.Encoded = function(task)
        return result

    return limited


def test_the_store_of_tokens_is_bounded_and_verified() -> None:
    make_model()
    make_corpus(SPLITS)
    run()
    clean = content()
    damaged = sorted(Path("data/.reuse").glob("*/file"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert encode() == 1
    assert content() == clean
    assert encode(reuse_gib=0) == 0
    assert list(Path("data/.reuse").iterdir()) == []


def test_the_file_of_a_lost_worker_is_not_written_to() -> None:
    make_model()
    make_corpus([["text"]])
    [shard] = Dataset.read(Path("data/corpus"), "extract").shards
    path, target = Path("data/corpus", shard.filename), Path("tokens")
    target.write_bytes(b"of a lost worker")
    with target.open("rb") as left:
        [offset] = arrow.batch_offsets(path)
        packing.encode(packing.BatchTask(shard=path, offset=offset, spec=spec_of_model(), target=target))
        assert left.read() == b"of a lost worker"
    assert target.stat().st_size == 2 * len("text.")


def test_an_error_of_the_disk_is_not_the_end_of_a_file() -> None:
    """As which numpy.fromfile takes it."""
    make_model()
    broken = Path("/proc/self/mem")  # there is nothing at its beginning, where reading is an error
    with (
        arrow.StreamWriter(Path("rows"), arrow.token_features(4)) as stream,
        pytest.raises(OSError, match="error"),
    ):
        packing.RowWriter(stream, 4).add_file(broken, spec_of_model())
    with pytest.raises(OSError, match="error"):
        duplicates._read_entries(broken, 0, 1)


def test_trap_28_two_runs_at_once_give_the_tokens_of_one() -> None:
    make_model()
    make_corpus([[f"document {split} {index} " * 90 for index in range(20)] for split in range(8)], batch_size=5)
    Path("params.yaml").write_text("seq_length: 4\nvalidation_splits: 1\nruntime: {num_workers: 2, reuse_gib: 1}\n")
    start_stage("pack").communicate()
    clean = content()
    shutil.rmtree("data/.reuse")
    shutil.rmtree("data/tokens")
    with publish.lock(Path("data/tokens")):  # both wait, and then compete
        stages = [start_stage("pack") for _ in range(2)]
        for stage in stages:
            assert "waiting for another run that writes data/tokens" in stage.stdout.readline()
    for stage in stages:
        stage.communicate()
    assert [stage.returncode for stage in stages] == [0, 0]
    assert content() == clean
    assert encode() == 0


def test_trap_28_what_changes_while_it_is_packed_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model()
    make_corpus(SPLITS)
    encode_intact = packing.encode

    def encode_replaced(task: packing.BatchTask) -> packing.Encoded:
        encoded = encode_intact(task)
        make_corpus([["another"], *SPLITS[1:]])
        return encoded

    with monkeypatch.context() as patch:
        patch.setattr(packing, "encode", encode_replaced)
        with pytest.raises(StageError, match=r"data-00000-of-00005\.arrow is damaged .* while it was read"):
            encode()
    assert not list(Path("data").glob("tokens*"))
    assert not Path("data/.reuse").exists()


@pytest.mark.parametrize("damage", ["written", "cut"])
def test_trap_28_tokens_that_are_not_those_of_the_encoder_are_not_stored(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    make_model()
    make_corpus(SPLITS)
    encode_intact = packing.encode

    def encode_damaged(task: packing.BatchTask) -> packing.Encoded:
        encoded = encode_intact(task)
        if damage == "cut":
            os.truncate(task.target, task.target.stat().st_size - 2)
        else:
            task.target.write_bytes(bytes(task.target.stat().st_size))
        return encoded

    monkeypatch.setattr(packing, "encode", encode_damaged)
    with pytest.raises(StageError, match=r"train-data-00000-.* is damaged .*: check the disk"):
        encode()
    assert not Path("data/.reuse").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_trap_21_after_a_kill_only_unfinished_splits_are_encoded(number: int) -> None:
    """A SIGKILL of a worker, or of the stage, then a run to the end."""
    make_model()
    # Enough to be worked on by processes, and long enough to be killed.
    make_corpus([[f"document {split} {index} " * 1100 for index in range(50)] for split in range(12)])
    run(fast_encoder=False)
    clean = content()
    shutil.rmtree("data/.reuse")
    shutil.rmtree("data/tokens")
    Path("params.yaml").write_text(
        "seq_length: 4\nvalidation_splits: 1\nfast_encoder: false\nruntime: {num_workers: 2, reuse_gib: 1}\n"
    )
    chance = random.Random(number)
    stage = start_stage("pack")
    processes = wait_for_workers(stage, 2)
    time.sleep(chance.uniform(0.5, 4))
    if stage.poll() is None:
        (stage if chance.random() < 0.5 else chance.choice(processes)).kill()
    stage.communicate()
    psutil.wait_procs(processes, timeout=5)
    kept = [path for path in Path("data/.reuse").glob("*") if path.suffix != reuse._TEMPORARY]
    assert encode(fast_encoder=False) == 12 - len(kept)
    assert content() == clean


SMALL = EncoderLimits(batch=800)


def tokens_of(documents: list[str]) -> list[list[int]]:
    """What an encoder with small batches makes of documents, in its pieces."""
    encoder = Encoder(spec_of_model()._replace(is_fast=False), SMALL)
    return [piece.tokens.tolist() for piece in encoder.encode(pa.array(documents))]


def test_documents_have_the_same_tokens_in_any_batches() -> None:
    make_model()
    documents = ["ab a" * 3000, "short", f"{SPELLING}\n\n {BOS_SPELLING} é😀" * 99, "x", " " * 5000, "a b" * 200]
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True
    stream = [token for document in documents for token in (*tokenizer.encode(document).ids, EOS)]
    assert [*chain.from_iterable(tokens_of(documents))] == stream


def test_no_document_of_a_corpus_is_longer_than_a_batch() -> None:
    assert LIMITS.longest_document <= DEFAULT_LIMITS.batch


@pytest.mark.parametrize("fast_encoder", [False, True])
def test_a_worker_encodes_with_one_thread(fast_encoder: bool) -> None:
    make_model()
    script = f"""
import psutil, pyarrow
from stages.tokenizing.encoding import Encoder
from stages.pack import PackParams, find_tokenizer_spec
from stages.model.manifest import ModelManifest
params = PackParams(seq_length=4, validation_splits=0, fast_encoder={fast_encoder})
spec = find_tokenizer_spec(params, ModelManifest.read())
encoder, process = Encoder(spec), psutil.Process()
before = process.num_threads()
list(encoder.encode(pyarrow.array([f"text {{number}}" for number in range(1000)])))
print(process.num_threads() - before)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "RAYON_NUM_THREADS": "3"}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    output = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert int(output) <= 0  # a thread of the libraries may end meanwhile


CHAT = ["<|im_start|>", "<|im_end|>"]


def make_chat_model(template: str | None = CHATML) -> None:
    """A model with a chat template, and two special tokens for it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHAT])
    model = make_model(tokenizer)
    if template is not None:
        dataclasses.replace(model, chat_templates={"default": template}).write()


def make_conversations(splits: list[list[str | dict[str, Any]]], batch_size: int = 1000) -> None:
    """Write a corpus of documents and conversations."""
    directory = Path("data/corpus")
    directory.mkdir(parents=True, exist_ok=True)
    features = dict.fromkeys(("text", "messages"), arrow.TEXT["text"])
    shards = []
    for index, rows in enumerate(splits):
        stream = arrow.StreamWriter(directory / arrow.shard_name(index, len(splits)), features)
        for start in range(0, len(rows), batch_size):
            some = rows[start : start + batch_size]
            stream.write(
                pa.array([row if isinstance(row, str) else None for row in some], pa.string()),
                pa.array([json.dumps(row) if isinstance(row, dict) else None for row in some], pa.string()),
            )
        shards.append(stream.close())
    Dataset(features, shards).write(directory)


def chat(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


def documents_of(name: str, seq_length: int) -> list[tuple[str, str]]:
    """The text of each document in the rows of a part, and what of it is trained."""
    rows = TokenRows(Path("data/tokens", name))
    tokenizer = Tokenizer.from_file("model/tokenizer.json")
    found = []
    for index in range(len(rows)):
        [ids] = rows.rows(np.array([index]))
        marks = rows.marks(np.array([index]))
        assert marks is not None
        [trained], [starts] = marks
        for piece in np.split(np.arange(seq_length), np.flatnonzero(starts)):
            if len(piece):
                texts = (ids[piece], ids[piece][trained[piece]])
                found.append(tuple(tokenizer.decode(each.tolist(), skip_special_tokens=False) for each in texts))
    return found


@pytest.mark.parametrize("seq_length", [64, 67])  # bits of a row need not begin a byte
def test_conversations_stay_whole_and_say_what_is_trained(seq_length: int) -> None:
    make_chat_model()
    conversations = [chat(f"question {index}", f"answer {'x' * (index % 17)}") for index in range(40)]
    texts = [f"document {index} " * 5 for index in range(7)]
    mixed: list[Any] = [*conversations[:10], *texts[:3], *conversations[10:], *texts[3:]]
    make_conversations([mixed, [conversations[0]]], batch_size=9)
    metrics = run(seq_length=seq_length)["train"]
    found = documents_of("train", seq_length)
    rendered = {
        f"<|im_start|>user\nquestion {index}<|im_end|>\n<|im_start|>assistant\nanswer {'x' * (index % 17)}<|im_end|>\n":
        f"answer {'x' * (index % 17)}<|im_end|>" for index in range(40)
    }  # fmt: skip
    whole = [(text, trained.strip()) for text, trained in found if text.startswith("<|im_start|>")]
    assert sorted(whole) == sorted((text, trained.strip()) for text, trained in rendered.items())
    others = [(text, trained) for text, trained in found if not text.startswith("<|im_start|>")]
    padding = [text for text, trained in others if not trained]
    assert {*"".join(padding).split(SPELLING)} == {""}
    assert "".join(trained for _, trained in others) == "".join(text + SPELLING for text in texts)
    counts = metrics["conversations"]
    assert (metrics["documents"], counts["conversations"], counts["refused"]) == (47, 40, {})
    assert counts["padding_tokens"] == sum(len(text) for text in padding) // len(SPELLING)
    assert metrics["rows"] * seq_length == metrics["tokens"] + counts["padding_tokens"]
    assert counts["terminators"] == [Tokenizer.from_file("model/tokenizer.json").token_to_id("<|im_end|>")]


def test_rows_of_conversations_are_the_same_for_any_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chat_model()
    rows: list[Any] = [chat("question", "answer " * (index % 3 + 1)) for index in range(60)]
    make_conversations([[*rows, "a document " * 40], [chat("a", "b")]], batch_size=7)
    run(seq_length=80)
    clean = content()
    read = packing._read
    monkeypatch.setattr(packing, "_read", lambda path, dtype, size: read(path, dtype, 13))
    run(seq_length=80)
    assert content() == clean


def test_what_gives_no_tokens_is_counted_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    make_chat_model()
    long = chat("question", "x" * 100)
    make_conversations([[chat("a", "b"), long, chat("nobody answers")], [chat("a", "b")]])
    metrics = run(seq_length=64)["train"]["conversations"]
    assert metrics["refused"] == {"longer than a row": 1, "nothing of it is trained": 1}
    warning = (
        "pack: warning: 25% of the conversations are refused, so not trained: map the role of its answers with `roles`"
    )
    assert warning in capsys.readouterr().out
    first, second = metrics["first_refused"]
    assert re.fullmatch("longer than a row: 1.. tokens, and seq_length is 64", first[0])
    assert json.dumps(long).startswith(first[1]) and second[1].startswith('{"messages": [{"role": "user"')
    make_conversations([[chat("a", "b"), *[long] * 3, chat("nobody answers")], [chat("a", "b")]])
    output = pack(PackParams(64, 1), PackRuntime(num_workers=1, reuse_gib=1))
    reason = r"longer than a row: 1.. tokens, and seq_length is 64"
    assert re.search(rf" trained, 4 refused \(3 of them as this one: {reason}; see data/pack.json\)$", output)
    make_conversations([[chat("a", "b"), long, chat("nobody answers")], [chat("a", "b")]])
    encode(seq_length=160)  # another length is another result
    assert json.loads(Path("data/pack.json").read_text())["train"]["conversations"]["conversations"] == 2


def test_what_the_chat_template_leaves_out_is_refused_above_a_share() -> None:
    template = CHATML.replace("in messages %}", "in messages if message.role != 'system' %}")
    make_chat_model(template)
    with_system = chat("a", "b")
    with_system["messages"].insert(0, {"role": "system", "content": "Be brief."})
    make_conversations([[with_system] * 3 + [chat("c", "d")], [chat("e", "f")]])
    problem = (
        r"the chat template leaves out 3 of 3 strings of system \(100.0%\), and max_left_out is 0.01: set chat_"
        r"template to the file of one that writes them, leave them out of the data by a rule .*, or raise max_left_out"
    )
    with pytest.raises(StageError, match=problem):
        run(seq_length=64)
    assert not Path("data/pack.json").exists()
    output = pack(PackParams(64, 1, max_left_out=1), PackRuntime(num_workers=1, reuse_gib=1))
    assert "2 of 2 splits reused" in output
    assert output.endswith(", left out by the chat template: 3 of 3 strings of system")
    found = read_json(Path("data/pack.json"))["train"]["conversations"]
    assert (found["strings"], found["left_out"]) == ({"assistant": 4, "system": 3, "user": 4}, {"system": 3})


def test_all_chat_templates_of_the_model_are_kept() -> None:
    make_chat_model()
    templates = {"default": CHATML, "tool_use": "{{ tools }}" + CHATML, "rag": "a"}
    dataclasses.replace(ModelManifest.read(), chat_templates=templates).write()
    make_conversations([[chat("a", "b")], [chat("a", "b")]])
    assert run(seq_length=64)["chat_templates"] == templates
    dataclasses.replace(ModelManifest.read(), chat_templates={**templates, "rag": "{% for"}).write()
    with pytest.raises(StageError, match=r"the chat template rag of model, line 1: .*: correct it, or set chat_templ"):
        run(seq_length=64)


def test_conversations_need_a_template_that_dvc_watches() -> None:
    make_chat_model(template=None)
    make_conversations([[chat("a", "b")], [chat("a", "b")]])
    with pytest.raises(StageError, match=r"^the model has no chat template.*set chat_template"):
        run()
    Path("chat.jinja").write_text(CHATML)
    for path in ("chat.jinja", "models/templates/none.jinja", "models/templates/../../chat.jinja"):
        params = PackParams(64, 1, chat_template=path)
        with pytest.raises(
            StageError, match=rf"^chat_template is '{path}': name a file in models/templates/, which DVC"
        ):
            pack(params, PackRuntime(num_workers=1, reuse_gib=1))
    Path("models/templates").mkdir(parents=True)
    Path("models/templates/chat.jinja").write_text(CHATML)
    pack(PackParams(64, 1, chat_template="models/templates/chat.jinja"), PackRuntime(num_workers=1, reuse_gib=1))
    assert json.loads(Path("data/pack.json").read_text())["chat_templates"] == {"default": CHATML}


def test_a_template_that_fails_is_named_with_its_line_or_with_a_remedy() -> None:
    make_chat_model(template=None)
    make_conversations([[chat("a", "b")], [chat("a", "b")]])
    template = Path("models/templates/own.jinja")
    template.parent.mkdir(parents=True)
    for text, message in (
        (
            "{% for each in messages %}\n{{ each.content }\n{% endfor %}",
            r"^models/templates/own\.jinja, line 2: .*'}'.*",
        ),
        (
            "{{ raise_exception('no') }}",
            r"\(the chat template fails: no\): set chat_template to the file of one that writes them, or "
            "correct the conversations$",
        ),
    ):
        template.write_text(text)
        with pytest.raises(StageError, match=message):
            pack(PackParams(64, 1, chat_template=str(template)), PackRuntime(num_workers=1, reuse_gib=1))


def test_records_of_raw_files_become_trained_conversations() -> None:
    make_chat_model(template=None)
    dataclasses.replace(ModelManifest.read(), special_tokens={"eos_token": SPELLING}).write()
    template = Path("models/templates/plain.jinja")
    template.parent.mkdir(parents=True)
    shutil.copy(REPO / template, template)
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    put({"chat/a.jsonl": json.dumps({"id": "x1", "conversations": turns}) + "\n", "notes.txt": "a note"})
    pq.write_table(pa.table({"q": ["1+1?", "left out"], "a": ["2", None], "link": ["l", "l"]}), "data/raw/b.parquet")
    rules = [
        {"files": "chat/*", "format": "sharegpt"},
        {"files": "*.parquet", "prompt": [{"role": "user", "content": "$.q"}],
         "completion": [{"role": "assistant", "content": "$.a"}]},
    ]  # fmt: skip
    metrics = extract_raw(records=rules)
    assert [rule["conversations"] for rule in metrics["rules"]] == [1, 1]
    assert metrics["rules"][1]["left_out"] == {"no string at $.a": 1}
    pack(PackParams(64, 0, chat_template=str(template)), PackRuntime(num_workers=1, reuse_gib=1))
    found = [(text, trained) for text, trained in documents_of("train", 64) if trained]
    assert sorted(found) == sorted(
        [
            (f"User: Hi\nAssistant: Hello{SPELLING}\n", f" Hello{SPELLING}"),
            (f"User: 1+1?\nAssistant: 2{SPELLING}\n", f" 2{SPELLING}"),
            (f"a note{SPELLING}", f"a note{SPELLING}"),
        ]
    )


def test_counts_of_many_parts_are_added_in_linear_time() -> None:
    parts = [
        packing.Counts(num_read=1, refused={"a": 1, f"b{number % 2}": 1}, held_out=f"{number:016x}" * 2000)
        for number in range(3000)
    ]
    assert packing.Counts.total(parts[:3]) == parts[0] + parts[1] + parts[2]
    start = time.process_time()
    total = packing.Counts.total(parts)
    assert time.process_time() - start < 2  # one after the other copies 100 GB
    assert (total.num_read, total.refused) == (3000, {"a": 3000, "b0": 1500, "b1": 1500})
    assert total.held_out == "".join(part.held_out for part in parts)
    assert packing.Counts.total([]) == packing.Counts()
