"""From a corpus to rows of tokens: none is lost, the same bytes however it is computed, nothing encoded twice."""

import dataclasses
import json
import os
import random
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from tokenizers.processors import TemplateProcessing

from stages.base import code, publish
from stages.base.dataset import Dataset
from stages.base.errors import StageError
from stages.base.packed import TRAIN, PackMetrics
from stages.base.params_file import load_params
from stages.base.publish import read_json, sha256_file
from stages.duplicates import finding
from stages.formats.limits import LIMITS
from stages.forward.batch import count_labels, read_batch
from stages.forward.rows import TokenRows
from stages.model.manifest import TOKENIZER, ModelManifest
from stages.pack import PackParams, PackRuntime, pack
from stages.tokenizing import fast_tokenizer, packing
from stages.tokenizing.conversations import START, WHOLE
from stages.tokenizing.encoding import DEFAULT_LIMITS, NAME, TokenizerSpec
from stages.tokenizing.fast_tokenizer import FastTokenizer
from stages.tokenizing.specs import find_tokenizer_spec
from stages.work import arrow, reuse, skipped
from tests import corpus
from tests.byte_model import BOS, BOS_SPELLING, EOS, SPELLING, byte_tokenizer, make_model
from tests.chat_templates import CHATML
from tests.corpus import (
    CORPUS,
    NOT_RECORDS,
    extract_raw,
    keep_all,
    put,
    wait_for_workers,
    with_processes,
)
from tests.project import REPO, run_python, start_stage

pytestmark = pytest.mark.usefixtures("empty_project")

METRICS, STORE, TEMPLATES = Path("data/pack.json"), Path("data/.reuse"), Path("models/templates")
SPLITS = [[f"document {split} {index} " * 9 for index in range(5)] for split in range(5)]


def spec_of_model(fast_encoder: bool = True) -> TokenizerSpec:
    return find_tokenizer_spec(ModelManifest.read(), 4, fast_encoder)


def make_corpus(splits: Sequence[Sequence[str | dict[str, Any]]], batch_size: int = 1000) -> None:
    """Write a corpus of which no row is skipped."""
    corpus.make_corpus(splits, batch_size=batch_size)
    keep_all()


def run_stage(
    num_workers: int | None = 1,
    reuse_gib: float = 1,
    dask_scheduler: str | None = None,
    max_batch_tokens: int = packing.MAX_BATCH_TOKENS,
    **params: Any,
) -> str:
    """Run the stage with what is in the store; return what it prints. More than one worker means processes."""
    runtime = with_processes(PackRuntime(num_workers=num_workers, reuse_gib=reuse_gib, dask_scheduler=dask_scheduler))
    return pack(PackParams(**{"seq_length": 4, "validation_splits": 1, **params}), runtime, max_batch_tokens)


def encode(**arguments: Any) -> int:
    """Run the stage with what is in the store; return how many splits were encoded."""
    [(reused, total)] = re.findall(r"(\d+) of (\d+)  splits reused", run_stage(**arguments))
    return int(total) - int(reused)


def run(**arguments: Any) -> dict[str, Any]:
    """Run the stage with nothing in the store; return the metrics."""
    forget()
    run_stage(**arguments)
    return metrics()


def forget() -> None:
    """Remove all results of the stage, also those in the store."""
    shutil.rmtree(STORE, ignore_errors=True)
    shutil.rmtree("data/tokens", ignore_errors=True)


def metrics() -> dict[str, Any]:
    found: dict[str, Any] = read_json(METRICS)
    return found


def tokens(name: str) -> list[int]:
    """All rows of a part, one after the other."""
    dataset = datasets.load_from_disk(f"data/tokens/{name}")
    return [token for row in dataset["input_ids"] for token in row]


def content() -> dict[str, bytes]:
    paths = [METRICS, *sorted(Path("data/tokens").rglob("*"))]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


DOCUMENT = st.text(st.characters(codec="utf-8") | st.sampled_from("ab \n"), min_size=1) | st.just(
    f"a{BOS_SPELLING} {SPELLING} b"
)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(DOCUMENT, max_size=4), min_size=2, max_size=4), st.integers(2, 9), st.integers(1, 12))
def test_trap_25_decoding_gives_back_the_documents(splits: list[list[str]], seq_length: int, batch: int) -> None:
    """EOS is at the end of documents and nowhere else."""
    splits = [["long enough for a row", *documents] for documents in splits]
    splits[-1] = splits[-1][:2]  # more than twice its share would be held out by content
    make_model()
    make_corpus(splits, batch_size=batch)
    counts = run(seq_length=seq_length, max_batch_tokens=batch)
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True
    for name, part in (("train", splits[:-1]), ("validation", splits[-1:])):
        documents = [document for split in part for document in split]
        stream = [token for document in documents for token in (*tokenizer.encode(document).ids, EOS)]
        num_rows = len(stream) // seq_length
        assert tokens(name) == stream[: num_rows * seq_length]
        expected = {
            "tokens": len(stream), "documents": len(documents), "rows": num_rows,
            "characters": sum(map(len, documents)), "bytes": sum(len(document.encode()) for document in documents),
        }  # fmt: skip
        assert {key: counts[name][key] for key in expected} == expected
        assert decode_documents(tokenizer, stream) == documents


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
    assert "train" not in texts["validation"] and "also" in texts["validation"]
    assert run(validation_splits=0)["validation"]["tokens"] == 0
    assert tokens("validation") == []
    assert "also" in byte_tokenizer().decode(tokens("train"))


def test_trap_27_one_large_file_leaves_rows_to_validate() -> None:
    lines = [f"text {number} of one file " * 3 for number in range(20_000)]
    put({"a.jsonl": "\n".join(map(json.dumps, lines))})
    make_model()
    extract_raw(num_splits=20)
    keep_all()
    assert 0.03 < run(seq_length=64)["validation"]["documents"] / len(lines) < 0.07


def test_few_bytes_of_each_document_are_in_memory_to_divide_a_corpus() -> None:
    number = 20_000
    make_corpus([[*map(str, range(number))]])
    tracemalloc.start()
    try:
        assert packing.dividing_fraction([(CORPUS / arrow.shard_name(0, 1), b"")], 0.05) == 0.05
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * number


def test_trap_25_truncation_padding_and_added_tokens_of_the_tokenizer_are_disabled() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS_SPELLING} $A", special_tokens=[(BOS_SPELLING, BOS)])
    make_model(tokenizer)
    make_corpus([["xyzxyz"], ["validation"]])
    run(seq_length=7)
    assert decode_documents(byte_tokenizer(), tokens("train")) == ["xyzxyz"]


@pytest.mark.parametrize("fast_encoder", [True, False])
def test_each_document_begins_as_the_tokenizer_begins_a_text(fast_encoder: bool) -> None:
    """With BOS, as Llama and Gemma do, whose users do not turn it off."""
    make_model(start_token_ids=[BOS])
    documents = ["xyz", f"x{BOS_SPELLING}", "xyz"]  # a text that occurs twice is encoded once
    make_corpus([documents, ["validation"]])
    found = run(seq_length=5, fast_encoder=fast_encoder)["train"]
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True
    stream = [token for text in documents for token in (BOS, *tokenizer.encode(text).ids, EOS)]
    assert tokens("train") == stream[: len(stream) // 5 * 5]
    assert (found["tokens"], found["start_tokens"], found["characters_per_token"]) == (len(stream), 3, 1)


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("start", [[BOS], [66, BOS]], ids=["BOS", "two, as GLM has"])
def test_the_measured_tokens_are_those_with_a_label(start: list[int], document_mask: bool) -> None:
    """So the loss times their number is that of the text."""
    make_model(start_token_ids=start)
    make_corpus([["xyz", "x", "zyx"], ["validation " * 2]])
    run(seq_length=3 * len(start) + 10)
    batch = read_batch(TokenRows(TRAIN), np.arange(1), EOS, document_mask, lengths=False)
    first = not document_mask  # of the row, which nothing precedes there alone
    assert PackMetrics.read(METRICS).train.measured_tokens(document_mask) == count_labels(batch) + first


def make_ninefold_corpus() -> None:
    """Of which each split has several batches."""
    make_model()
    make_corpus([[f"document {split} {index} é " * 9 for index in range(9)] for split in range(2)], batch_size=3)


def test_trap_22_workers_and_the_fast_tokenizer_change_no_byte() -> None:
    make_ninefold_corpus()
    results, encoders = [], []
    for where in ({}, {"num_workers": 2}, {"fast_encoder": False}):
        encoders.append(run(**where)["encoder"])
        results.append(content())
    assert results[0] == results[1]
    for result in results:
        del result[str(METRICS)]
    assert results[0] == results[2]
    assert [each["name"] for each in encoders] == [fast_tokenizer.NAME] * 2 + [NAME]
    assert {(each["slow_characters"], each["reason"]) for each in encoders} == {(0, None)}


@pytest.mark.slow
def test_trap_22_dask_changes_no_byte() -> None:
    make_ninefold_corpus()
    run()
    expected = content()
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        run(num_workers=None, dask_scheduler=cluster.scheduler_address)
    assert content() == expected


def test_a_fast_tokenizer_that_gives_other_tokens_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model()
    make_corpus([[f"document {split} {index} é " * 9 for index in range(99)] for split in range(2)])
    run(fast_encoder=False)
    expected = content()
    encode_fast = FastTokenizer.encode

    def planted(self: FastTokenizer, strings: list[str]) -> list[Any]:
        ids = encode_fast(self, strings)
        return [each[::-1] if "ment 1" in string else each for each, string in zip(ids, strings, strict=True)]

    monkeypatch.setattr(FastTokenizer, "encode", planted)
    forget()
    run_stage()
    assert "warning: pack encodes with the model's own tokenizer, not with tokenizers 1" in capsys.readouterr().out
    assert metrics()["encoder"]["name"] == NAME
    assert "gives other tokens for the text" in metrics()["encoder"]["reason"]
    assert content() == expected | {str(METRICS): METRICS.read_bytes()}


def test_trap_23_rows_are_int32_and_memory_mapped() -> None:
    make_model()
    make_corpus([["train " * 50], ["validation " * 5]])
    run(seq_length=8)
    dataset = datasets.load_from_disk("data/tokens/train")
    assert dataset.features == datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=8)})
    [entry] = read_json(Path("data/tokens/train/state.json"))["_data_files"]
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


LONG = [["long enough é"], ["long enough"]]


@pytest.mark.parametrize(
    ("model", "splits", "params", "message"),
    [
        ({"eos_token_id": None}, LONG, {}, r"eos_token_id: .*: run `dvc repro -f -s download`"),
        ({"eos_token_id": 5000}, LONG, {}, "has no token 5000"),
        ({"max_seq_length": 8}, LONG, {"seq_length": 9}, "seq_length is 9, model allows at most 8: lower it"),
        ({"vocab_size": 100}, LONG, {}, r"gives token \d+, but the model's vocab_size is 100"),
        ({}, [[], []], {}, "contains no text: put files with text into raw_dir"),
        ({}, LONG, {"validation_splits": 2}, "validation_splits is 2 of num_splits = 2 splits"),
        (
            {},
            [["xy"], ["long enough"]],
            {},
            "train has 3 tokens, too few for one row of seq_length 4: lower seq_length",
        ),
        ({}, [["long enough"], ["xy"]], {}, r"validation has 3 tokens, .* raise validation_splits \(now 1\)"),
        ({}, [["only one"], []], {"validation_fraction": 0.5}, r"train has 0 tokens, .* or validation_fraction"),
    ],
)
def test_trap_03_26_what_gives_no_rows_for_the_model_is_refused(
    model: dict[str, Any], splits: list[list[str]], params: dict[str, Any], message: str
) -> None:
    """No text to train or to validate on, or rows that are longer than the model allows: an error names the remedy."""
    make_model(**model)
    make_corpus(splits)
    with pytest.raises(StageError, match=message):
        run(**params)
    assert not list(Path("data").glob("tokens/*"))


def test_a_tokenizer_that_download_has_not_written_is_refused() -> None:
    make_corpus(LONG)
    make_model()
    TOKENIZER.write_text(TOKENIZER.read_text() + " ")
    with pytest.raises(StageError, match=r"data/tokenizer.json is damaged or was changed: .*: run `dvc repro -f -s do"):
        run()
    TOKENIZER.unlink()
    with pytest.raises(StageError, match=r"data/tokenizer.json is missing: run `dvc repro -f -s download`"):
        run()


def test_the_corpus_that_is_recorded_is_the_one_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model()
    make_corpus([["train " * 50], ["validation"]])
    encode()
    read = skipped.read(Dataset.read(CORPUS, "extract")).fingerprint
    close = packing.RowWriter.close

    def close_late(self: packing.RowWriter) -> Any:
        make_corpus([["of another extract " * 50], ["validation"]])
        return close(self)

    monkeypatch.setattr(packing.RowWriter, "close", close_late)
    assert encode() == 0
    assert skipped.read(Dataset.read(CORPUS, "extract")).fingerprint != read
    assert metrics()["source"] == read


def test_a_damaged_corpus_is_refused() -> None:
    make_model()
    make_corpus([["train " * 50], ["validation"]])
    path = CORPUS / "data-00000-of-00002.arrow"
    good = path.read_bytes()
    # Without the check, the last two would be read as a valid, shorter shard and as another text.
    for bad in (good[:-1], good[:-8], good.replace(b"train", b"trail")):
        path.write_bytes(bad)
        with pytest.raises(StageError, match=r"data-00000-of-00002.arrow is damaged"):
            run()
    path.unlink()
    with pytest.raises(StageError, match=r"data-00000-of-00002.arrow is missing"):
        run()


@pytest.mark.parametrize("function", [encode, run])  # with the tokens in the store, and without
def test_trap_29_metadata_that_extract_has_not_written_is_refused(function: Callable[[], object]) -> None:
    """Empty, truncated or edited: one error names the file and the stage to run again."""
    make_model()
    make_corpus(SPLITS)
    run()
    for name, key in (("state.json", "_data_files"), ("dataset_info.json", "features")):
        good = (CORPUS / name).read_bytes()
        values: list[Any] = [None, 1, "text", [1]]
        if name == "state.json":
            first, *others = json.loads(good)[key]
            values += [[{**first, "rows": rows}, *others] for rows in (4, -1)]
        for bad in (*NOT_RECORDS, *(json.dumps({**json.loads(good), key: value}).encode() for value in values)):
            (CORPUS / name).write_bytes(bad)
            with pytest.raises(StageError, match=r"^data/corpus/state.json .*run `dvc repro -f -s extract`$"):
                function()
        (CORPUS / name).write_bytes(good)


def test_a_seq_length_beyond_any_model_is_refused() -> None:
    Path("params.yaml").write_text(f"seq_length: {2**31}\nvalidation_splits: 1\n")
    with pytest.raises(StageError, match=r"seq_length is 2147483648: input should be less than or equal to 16777216"):
        load_params(PackParams)


def test_unknown_tokens_and_dropped_characters_are_counted() -> None:
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "?": 1, "a": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make_model(tokenizer)
    make_corpus([["a b a c"], ["a a"]])
    found = run(seq_length=2)
    assert found["train"] == {
        "documents": 1, "characters": 7, "bytes": 7, "tokens": 5, "rows": 2, "characters_per_token": 1.75,
        "unknown_share": 0.5, "dropped_characters": 0, "duplicates": 0,
        "conversations": None, "start_tokens": 0,
    }  # fmt: skip
    assert found["validation"]["unknown_share"] == 0
    make_model(tokenizer, start_token_ids=[1])
    assert run(seq_length=2)["train"]["unknown_share"] == 0.5, "the BOS of the document is no part of its text"
    vocab = {token: index for index, token in enumerate(["</s>", *"abĠ"])}  # some bytes, no unknown token
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    make_model(tokenizer)
    make_corpus([["a\x01 b\x02", "a b\x01"], ["aaaa"]])
    found = run(seq_length=2)
    assert (found["train"]["tokens"], found["train"]["dropped_characters"]) == (8, 3)
    assert found["validation"]["dropped_characters"] == 0


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
    make_model(vocab_size=1 << 17)  # in four bytes each
    assert encode() == 5
    assert content() == reused
    make_model(eos_token_id=BOS)
    assert encode() == 5
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    make_model(tokenizer)
    assert encode() == 5
    make_model(tokenizer, special_tokens={"pad_token": "ab"})  # which is a special token then
    assert encode() == 5
    assert encode() == 0
    monkeypatch.setattr(code, "digest_with_packages", lambda module: "of an edit")
    assert encode() == 5


def test_finished_splits_are_kept_when_another_fails_and_the_store_is_verified_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_model()
    make_corpus(SPLITS)
    run()
    clean = content()
    forget()
    encode_batch, finished = packing.encode, []

    def failing(task: packing.BatchTask) -> packing.BatchResult:
        if len(finished) == 3:
            raise RuntimeError
        finished.append(encode_batch(task))
        return finished[-1]

    with monkeypatch.context() as patch:
        patch.setattr(packing, "encode", failing)
        with pytest.raises(RuntimeError):
            encode()
    assert not list(Path("data").glob("tokens*"))
    assert encode() == 2
    assert content() == clean
    damaged = sorted(STORE.glob("*/file"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert encode() == 1
    assert content() == clean
    assert encode(reuse_gib=0) == 0
    assert list(STORE.iterdir()) == []


def test_the_file_of_a_lost_worker_is_not_written_to() -> None:
    make_model()
    make_corpus([["text"]])
    [shard] = Dataset.read(CORPUS, "extract").shards
    path, target = CORPUS / shard.filename, Path("tokens")
    target.write_bytes(b"of a lost worker")
    with target.open("rb") as left:
        [offset] = arrow.batch_offsets(path)
        packing.encode(packing.BatchTask(shard=path, offset=offset, spec=spec_of_model(), target=target))
        assert left.read() == b"of a lost worker"
    assert target.stat().st_size == 2 * len("text.")


def test_few_rows_of_conversations_are_open_and_the_fullest_is_written_for_another() -> None:
    with arrow.StreamWriter(Path("rows"), arrow.token_features(8, is_marked=True)) as stream:
        writer = packing.MarkedRowWriter(stream, 8, eos_token_id=0, max_batch_tokens=16)
        for length, free in ((6, [2]), (5, [2, 3]), (7, [3, 1]), (3, [1])):
            tokens = np.full(length, 9 | WHOLE, np.uint32)
            tokens[0] |= START
            writer._add([tokens])
            assert writer._room == free
        writer.close()


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
        finding._read(broken, 0, 1)


NOT_OF_THE_ENCODER = r"train-data-00000-.* is damaged .*: check the disk"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tokens: make_corpus([["another"], *SPLITS[1:]]),
            r"00000-of-00005\.arrow is damaged .* while it was read",
        ),
        (lambda tokens: os.truncate(tokens, tokens.stat().st_size - 2), NOT_OF_THE_ENCODER),
        (lambda tokens: tokens.write_bytes(bytes(tokens.stat().st_size)), NOT_OF_THE_ENCODER),
    ],
    ids=["another corpus", "tokens cut", "tokens written over"],
)
def test_trap_28_what_changes_while_it_is_packed_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], message: str
) -> None:
    """The corpus is replaced while it is read."""
    make_model()
    make_corpus(SPLITS)
    encode_intact = packing.encode

    def encode_and_change(task: packing.BatchTask) -> packing.BatchResult:
        encoded = encode_intact(task)
        change(task.target)
        return encoded

    monkeypatch.setattr(packing, "encode", encode_and_change)
    with pytest.raises(StageError, match=message):
        encode()
    assert not list(Path("data").glob("tokens*"))
    assert not STORE.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_trap_21_after_a_kill_only_unfinished_splits_are_encoded(number: int) -> None:
    """A SIGKILL of a worker, or of the stage, then a run to the end."""
    make_model()
    # Enough to be worked on by processes, and long enough to be killed.
    make_corpus([[f"document {split} {index} " * 1100 for index in range(50)] for split in range(12)])
    run(fast_encoder=False)
    clean = content()
    forget()
    params = {"seq_length": 4, "validation_splits": 1, "fast_encoder": False}
    publish.write_json(Path("params.yaml"), {**params, "runtime": {"num_workers": 2, "reuse_gib": 1}})
    chance = random.Random(number)
    stage = start_stage("pack")
    processes = wait_for_workers(stage, 2)
    time.sleep(chance.uniform(0.5, 4))
    with suppress(psutil.NoSuchProcess):  # it has ended by itself
        (stage if chance.random() < 0.5 else chance.choice(processes)).kill()
    stage.communicate()
    psutil.wait_procs(processes, timeout=5)
    kept = [path for path in STORE.glob("*") if path.suffix != reuse._TEMPORARY]
    assert encode(fast_encoder=False) == 12 - len(kept)
    assert content() == clean


def test_no_document_of_a_corpus_is_longer_than_a_batch() -> None:
    assert LIMITS.longest_document <= DEFAULT_LIMITS.batch


def test_a_worker_encodes_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model()
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    script = """
import psutil, pyarrow
from stages.tokenizing.encoding import Encoder
from stages.tokenizing.specs import find_tokenizer_spec
from stages.model.manifest import ModelManifest
for fast_encoder in (False, True):
    encoder = Encoder(find_tokenizer_spec(ModelManifest.read(), 4, fast_encoder))
    before = psutil.Process().num_threads()
    list(encoder.encode(pyarrow.array([f"text {number}" for number in range(1000)])))
    print(psutil.Process().num_threads() - before)
"""
    output = run_python(script, RAYON_NUM_THREADS="3").stdout
    assert max(map(int, output.split())) <= 0  # a thread of the libraries may end meanwhile


def test_a_worker_that_lives_for_many_runs_keeps_few_tokenizers() -> None:
    make_model()
    make_corpus(SPLITS)
    shard, spec = CORPUS / arrow.shard_name(0, len(SPLITS)), spec_of_model(fast_encoder=False)
    for number in range(9):
        changed = spec._replace(vocab_size=spec.vocab_size + number)
        packing.encode(packing.BatchTask(shard, arrow.batch_offsets(shard)[0], changed, Path("tokens")))
    assert packing.make_encoder.cache_info().currsize < 5


CHAT = ["<|im_start|>", "<|im_end|>"]


def make_chat_model(template: str | None = CHATML, **changes: Any) -> None:
    """A model with a chat template, and two special tokens for it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHAT])
    make_model(tokenizer, chat_templates={} if template is None else {"default": template}, **changes)


def chat(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


SHORT = [[chat("a", "b")], [chat("a", "b")]]


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
def test_conversations_stay_whole_and_say_what_is_trained(seq_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chat_model()
    answers = [f"answer {'x' * (index % 17)}" for index in range(40)]
    conversations = [chat(f"question {index}", answer) for index, answer in enumerate(answers)]
    texts = [f"document {index} " * 5 for index in range(7)]
    make_corpus([[*conversations[:10], *texts[:3], *conversations[10:], *texts[3:]], conversations[:1]], batch_size=9)
    counts = run(seq_length=seq_length)["train"]
    found = documents_of("train", seq_length)
    rendered = [
        (f"<|im_start|>user\nquestion {index}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n",
         f"{answer}<|im_end|>") for index, answer in enumerate(answers)
    ]  # fmt: skip
    whole = [(text, trained.strip()) for text, trained in found if text.startswith("<|im_start|>")]
    assert sorted(whole) == sorted(rendered)
    others = [(text, trained) for text, trained in found if not text.startswith("<|im_start|>")]
    padding = [text for text, trained in others if not trained]
    assert {*"".join(padding).split(SPELLING)} == {""}
    assert "".join(trained for _, trained in others) == "".join(text + SPELLING for text in texts)
    of_chat = counts["conversations"]
    assert (counts["documents"], of_chat["conversations"], of_chat["refused"]) == (47, 40, {})
    assert of_chat["padding_tokens"] == sum(len(text) for text in padding) // len(SPELLING)
    assert counts["rows"] * seq_length == counts["tokens"] + of_chat["padding_tokens"]
    assert of_chat["terminators"] == [Tokenizer.from_file("model/tokenizer.json").token_to_id("<|im_end|>")]

    clean, read = content(), packing._read
    monkeypatch.setattr(packing, "_read", lambda path, dtype, size: read(path, dtype, 13))
    run(seq_length=seq_length)
    assert content() == clean, "rows are the same for any pieces in which tokens are read"


def test_a_token_of_a_conversation_without_a_row_in_the_embedding_is_refused() -> None:
    make_chat_model(vocab_size=byte_tokenizer().get_vocab_size())
    make_corpus(SHORT)
    with pytest.raises(StageError, match=r"gives token \d+, but the model's vocab_size is \d+: .* added to it alone"):
        run(seq_length=64)


def test_each_split_with_documents_is_counted_once() -> None:
    make_model()
    make_corpus([[f"{name} {number}" for number in range(9)] if name else [] for name in ("a", "", "", "b")])
    forget()
    for number in (0, 2):
        assert f"{number} of 2  splits reused" in run_stage(validation_fraction=0.5)


@pytest.mark.parametrize("is_held_out", [False, True])
def test_a_warning_says_that_no_conversation_is_held_out(is_held_out: bool, capsys: pytest.CaptureFixture[str]) -> None:
    make_chat_model()
    make_corpus([[chat("a", "b")] * 3, ["a document " * 9, *([chat("a", "b")] * is_held_out)]])
    run(seq_length=64)
    assert ("warning: no conversation is held out, so no" in capsys.readouterr().out) != is_held_out


def test_what_gives_no_tokens_is_counted_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    make_chat_model()
    long = chat("question", "x" * 100)
    make_corpus([[chat("a", "b"), long, chat("nobody answers")], [chat("a", "b")]])
    found = run(seq_length=64)["train"]["conversations"]
    assert found["refused"] == {"longer than a row": 1, "nothing of it is trained": 1}
    output = capsys.readouterr().out
    assert "warning: 25% of the conversations are refused, so not trained (see data/pack.json)\n" in output
    assert "note: 1 conversation refused: nothing of it is trained: give its answers text, map their role" in output
    first, second = found["first_refused"]
    reason = r"longer than a row: 1.. tokens, and seq_length is 64"
    assert re.fullmatch(reason, first[0])
    assert json.dumps(long).startswith(first[1]) and second[1].startswith('{"messages": [{"role": "user"')
    run_stage(seq_length=160)  # another length is another result
    assert metrics()["train"]["conversations"]["conversations"] == 2
    make_corpus([[chat("a", "b"), *[long] * 3, chat("nobody answers")], [chat("a", "b")]])
    assert "; 4 more refused\n" in run_stage(seq_length=64)
    note = rf"note: 3 conversations refused: {reason}: raise seq_length\nnote: 1 conversation refused: "
    assert re.search(note, capsys.readouterr().out)


def test_a_token_within_turns_ends_no_generated_text() -> None:
    """As `<|end|>` of gpt-oss, which ends earlier turns, and the reasoning of the last one."""
    make_chat_model(
        "{% for message in messages %}<|im_start|>{{ message.role }}:{% if message.thinking and loop.last %}"
        "{{ message.thinking }}<|im_end|><|im_start|>{% endif %}{{ message.content }}"
        "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}{% endfor %}"
    )
    earlier = chat("a", "b", "c", "d")
    reasons = {"messages": [*earlier["messages"][:-1], {"role": "assistant", "content": "d", "thinking": "hm"}]}
    end, last = (Tokenizer.from_file("model/tokenizer.json").token_to_id(name) for name in ("<|im_end|>", SPELLING))
    make_corpus([[earlier], [earlier]])
    assert {*run(seq_length=64)["train"]["conversations"]["terminators"]} == {end, last}
    make_corpus([[earlier, reasons], [earlier]])
    assert run(seq_length=64)["train"]["conversations"]["terminators"] == [last]


def test_the_reason_of_a_refused_call_of_a_tool_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    make_chat_model()
    called = chat("a", "b", "c", "")
    called["messages"][3]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    make_corpus([[chat("a", "b"), called], [chat("a", "b")]])
    [reason] = run(seq_length=64)["train"]["conversations"]["refused"]
    assert reason.endswith("of a turn of the assistant; with train_on last, only the last turn must be there")
    assert f"{reason}: set chat_template to the file of one that writes them" in capsys.readouterr().out


def test_what_the_chat_template_leaves_out_is_refused_above_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    make_chat_model(CHATML.replace("in messages %}", "in messages if message.role != 'system' %}"))
    with_system = chat("a", "b")
    with_system["messages"].insert(0, {"role": "system", "content": "Be brief."})
    make_corpus([[with_system] * 3 + [chat("c", "d")], [chat("e", "f")]])
    problem = (
        r"the chat template leaves out 3 of 3 strings of system \(100.0%\), and max_left_out is 0.01: set chat_"
        r"template to the file of one that writes them, leave them out of the data by a rule .*, or raise max_left_out"
    )
    with pytest.raises(StageError, match=problem):
        run(seq_length=64)
    assert not METRICS.exists()
    output = run_stage(seq_length=64, max_left_out=1)
    assert "2 of 2  splits reused" in output
    assert "note: the chat template leaves out 3 of 3 strings of system\n" in capsys.readouterr().out
    found = metrics()["train"]["conversations"]
    assert (found["strings"], found["left_out"]) == ({"assistant": 4, "system": 3, "user": 4}, {"system": 3})


def test_all_chat_templates_of_the_model_are_kept() -> None:
    make_chat_model()
    templates = {"default": CHATML, "tool_use": "{{ tools }}" + CHATML, "rag": "a"}
    dataclasses.replace(ModelManifest.read(), chat_templates=templates).write()
    make_corpus(SHORT)
    assert run(seq_length=64)["chat_templates"] == templates
    dataclasses.replace(ModelManifest.read(), chat_templates={**templates, "rag": "{% for"}).write()
    with pytest.raises(StageError, match=r"the chat template rag of model, line 1: .*: correct it, or set chat_templ"):
        run(seq_length=64)


NOT_WATCHED = r"^chat_template is '.*(chat|none)\.jinja': name a file in models/templates/, which DVC"


@pytest.mark.parametrize(
    ("path", "template", "message"),
    [
        (None, CHATML, r"^the model has no chat template.*set chat_template"),
        ("chat.jinja", CHATML, NOT_WATCHED),
        ("models/templates/../../chat.jinja", CHATML, NOT_WATCHED),
        ("models/templates/none.jinja", CHATML, NOT_WATCHED),
        ("models/templates/own.jinja", "{% for each in messages %}\n{{ each.content }\n{% endfor %}",
         r"^models/templates/own\.jinja, line 2: .*'}'.*"),
        ("models/templates/own.jinja", "{{ raise_exception('no') }}",
         r"\(the chat template fails: no\): set chat_template to the file of one that writes them, or correct the "
         "conversations$"),
        ("models/templates/own.jinja", CHATML, None),
    ],
)  # fmt: skip
def test_conversations_need_a_valid_template_that_dvc_watches(
    path: str | None, template: str, message: str | None
) -> None:
    make_chat_model(template=None)
    make_corpus(SHORT)
    for file in (Path("chat.jinja"), TEMPLATES / "own.jinja"):
        publish.write_text(file, template)
    if message is None:
        run_stage(seq_length=64, chat_template=path)
        assert metrics()["chat_templates"] == {"default": CHATML}
        return
    with pytest.raises(StageError, match=message):
        run_stage(seq_length=64, chat_template=path)


def test_records_of_raw_files_become_trained_conversations() -> None:
    make_chat_model(template=None, special_tokens={"eos_token": SPELLING})
    template = TEMPLATES / "plain.jinja"
    publish.write_text(template, (REPO / template).read_text())
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    put({"chat/a.jsonl": json.dumps({"id": "x1", "conversations": turns}) + "\n", "notes.txt": "a note"})
    pq.write_table(pa.table({"q": ["1+1?", "left out"], "a": ["2", None], "link": ["l", "l"]}), "data/raw/b.parquet")
    rules = [
        {"files": "chat/*", "format": "sharegpt"},
        {"files": "*.parquet", "prompt": [{"role": "user", "content": "$.q"}],
         "completion": [{"role": "assistant", "content": "$.a"}]},
    ]  # fmt: skip
    extracted = extract_raw(records=rules)
    keep_all()
    assert [rule["conversations"] for rule in extracted["rules"]] == [1, 1]
    assert extracted["rules"][1]["left_out"] == {"no string at $.a": 1}
    run_stage(seq_length=64, validation_splits=0, chat_template=str(template))
    found = [(text, trained) for text, trained in documents_of("train", 64) if trained]
    assert sorted(found) == [
        (f"User: 1+1?\nAssistant: 2{SPELLING}\n", f" 2{SPELLING}"),
        (f"User: Hi\nAssistant: Hello{SPELLING}\n", f" Hello{SPELLING}"),
        (f"a note{SPELLING}", f"a note{SPELLING}"),
    ]


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
