"""The losses are those of the model, on any number of ranks; and what is exported has the loss of what was trained."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig, LlamaConfig, Mamba2Config, PreTrainedConfig

from stages import evaluate
from stages.base import history, outputs, publish
from stages.base.dataset import Dataset
from stages.base.errors import StageError
from stages.base.identity import TokenFingerprints
from stages.base.packed import METRICS, VALIDATION, PackMetrics
from stages.base.params_file import load_params
from stages.evaluate import EvaluateParams, EvaluateRuntime
from stages.evaluation import generation, measure, rank, samples, sharing
from stages.evaluation.request import (
    LossSum,
    Measurements,
    Request,
    Trained,
    remedies,
    stored_dtype,
    weight_bytes,
)
from stages.export.evaluation import Evaluation
from stages.export.lineage import InitialModel, Lineage
from stages.forward import attention_choice
from stages.forward.loss import LossHead
from stages.forward.rows import TokenRows
from stages.model.manifest import MODEL_MANIFEST
from stages.ranks import asking, handoff, process_group, watchdog
from stages.ranks.asking import REQUEST
from stages.ranks.watchdog import Heartbeat
from stages.work import arrow
from tests.artifacts import describe, make_lineage, packed_text, write_model, write_pack_metrics
from tests.project import REPO, flip_bit, is_alive, run_here, start_stage, wait_for
from tests.ranks import Ranks

LENGTH, EOS = 24, 2
MODEL = Path("outputs/exp/model")
SIZES: dict[str, Any] = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": EOS, "initializer_range": 0.5}
LLAMA = LlamaConfig(
    **SIZES, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=48,
)  # fmt: skip
RUNTIME = EvaluateRuntime(nproc_per_node=1, timeout_minutes=5)
TEXT = packed_text()


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the stage reads, with rows of random words."""
    directory = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        write_params()
        write_rows()
        make_model(LLAMA)
        write_history(untrained=4.5)
    return directory


@pytest.fixture(autouse=True)
def project(made_once: Path, empty_project: Path, mesh: object) -> None:
    """A copy of it as the current directory; this process is the only rank."""
    shutil.copytree(made_once, ".", dirs_exist_ok=True)


def make_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> None:
    """Write a model of random weights, rounded to `dtype`, and its lineage, as `consolidate` does."""
    write_model(MODEL, config, words=["<unk>", "<b>", "<eos>", *(f"w{number}" for number in range(3, 64))])
    if dtype != torch.float32:
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).save_pretrained(MODEL)
    describe(str(MODEL)).write()
    write_lineage()


def write_lineage() -> None:
    """The lineage of a model that was trained with the rows and parameters of the project."""
    data = TokenFingerprints("t", Dataset.read(VALIDATION, "pack").fingerprint)
    trained = {**yaml.safe_load(Path("params.yaml").read_text()), "precision": "fp32", "tf32": False}
    weights = {"model.safetensors": publish.sha256_file(MODEL / "model.safetensors")}
    initial = InitialModel("initial", "main", commit=None, manifest=publish.sha256_file(MODEL_MANIFEST), lineage=None)
    make_lineage(model=initial, data=data, params=trained, weights=weights).write(MODEL / "lineage.json")


def write_history(untrained: float | None = None, trained: float | None = None) -> None:
    """The course of a training of three steps, with the validation losses before and after it."""
    table = history.History()
    for step, loss in enumerate((untrained, None, 3.75, trained)):
        table.add(step=step, epoch=0.5, validation_loss=loss)
    outputs.HISTORY.write_text(table.text())


def make_rows(num_rows: int = 7, length: int = LENGTH) -> Any:
    """Rows of random tokens; the first one is a part of one document."""
    rows = np.random.default_rng(0).integers(1, 64, (num_rows, length), dtype=np.int32)
    rows[:1][rows[:1] == EOS] = 3
    return rows


def write_rows(num_rows: int = 7, length: int = LENGTH) -> None:
    """Write them as the pack stage does."""
    shutil.rmtree(VALIDATION, ignore_errors=True)
    VALIDATION.mkdir(parents=True)
    features, shards = arrow.token_features(length), []
    if num_rows:
        writer = arrow.StreamWriter(VALIDATION / arrow.shard_name(0, 1), features)
        writer.write(pa.FixedSizeListArray.from_arrays(make_rows(num_rows, length).ravel(), length))
        shards = [writer.close()]
    Dataset(features, shards).write(VALIDATION)
    # With the tokens of a partial row, which pack drops.
    tokens = num_rows * length + length // 2 if num_rows else 0
    write_pack_metrics("", packed_text(bytes=tokens, tokens=tokens + 9, documents=9, start_tokens=9, rows=num_rows))
    if MODEL.exists():
        write_lineage()


def write_params(**changed: Any) -> None:
    """Write params.yaml, and the lineage of a training with these parameters if there is a model."""
    values = {"experiment_name": "exp", "batch_size": 2, "eval_batch_size": None, "document_mask": True, "eval_rows": 3,
              "eval_samples": 0, **changed}  # fmt: skip
    values["runtime"] = {"nproc_per_node": 2, "timeout_minutes": 5}
    Path("params.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()))
    if MODEL.exists():
        write_lineage()


def measure_here(request: Request, num_ranks: int | None) -> Measurements:
    return measure.measure(request, Heartbeat())


def run_stage() -> Evaluation:
    """What the stage finds, with this process as the only rank."""
    return evaluate.evaluate(load_params(EvaluateParams), RUNTIME, measure_here)


def read_outs() -> dict[Path, bytes]:
    """The content of what the stage has written."""
    return {path: path.read_bytes() for path in (outputs.EVALUATION, outputs.METRICS) if path.exists()}


def request(**changed: Any) -> Request:
    """What the stage would ask for."""
    found: list[Request] = []

    def record(request: Request, num_ranks: int | None) -> Measurements:
        found.append(request)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        evaluate.evaluate(load_params(EvaluateParams), RUNTIME, record)
    return replace(found[0], **changed)


def reference_loss(document_mask: bool, first: int = 0, last: int | None = None) -> tuple[float, int]:
    """The loss of one document, or one row, at a time, and the number of tokens.

    Of the tokens from `first` to `last` among those of all rows.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rows = make_rows()
    losses = []
    position = 0
    for row in rows:
        ends = [index + 1 for index in np.flatnonzero(row == EOS)] if document_mask else []
        for document in np.split(row, ends):
            if len(document) > 1:
                tokens = torch.tensor(document)[None]
                with torch.no_grad():
                    log_probs = model(tokens).logits[0, :-1].log_softmax(-1)
                for index, token in enumerate(tokens[0, 1:]):
                    if first <= position + index + 1 < (last or rows.size):
                        losses.append(-log_probs[index, token].item())
            position += len(document)
    return float(np.mean(losses)), len(losses)


@pytest.mark.parametrize(
    ("document_mask", "eval_batch_size", "is_padded"),
    [(True, None, False), (True, 100, False), (False, None, False), (True, None, True)],
)
def test_loss_and_perplexity_are_those_of_each_document_alone(
    document_mask: bool, eval_batch_size: int | None, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_padded:
        monkeypatch.setattr(attention_choice, "refusal", lambda _, name, *args: None if name == "padded" else "fails")
    write_params(document_mask=document_mask, eval_batch_size=eval_batch_size)
    evaluation = run_stage()
    found = evaluation.validation
    loss, tokens = reference_loss(document_mask)
    assert found is not None
    assert (found.rows, found.tokens, found.loss) == (7, tokens, pytest.approx(loss, abs=1e-5))
    assert abs(loss - reference_loss(not document_mask)[0]) > 1e-3, "the other kind of mask would not do"
    assert found.perplexity == pytest.approx(math.exp(found.loss), rel=5e-6)
    of_bytes = 7 * LENGTH + LENGTH // 2  # as many as tokens, without the 9 of BOS
    measured = of_bytes if document_mask else of_bytes + 9  # without a mask, BOS is predicted, too
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) * measured / of_bytes, rel=5e-6)
    assert max(len(str(number)) for number in (found.loss, found.perplexity, found.bits_per_byte)) <= 7, "6 digits"
    assert (evaluation.run_id, evaluation.step, evaluation.dtype) == ("0123", 3, "float32")


@pytest.mark.parametrize(("eval_rows", "indices"), [(3, [0, 2, 4]), (None, [*range(7)])])
def test_losses_before_and_after_training_are_on_the_same_rows(eval_rows: int | None, indices: list[int]) -> None:
    write_params(eval_rows=eval_rows)
    exported = run_stage().exported
    losses = [reference_loss(True, LENGTH * index, LENGTH * (index + 1)) for index in indices]
    tokens = sum(tokens for _, tokens in losses)
    assert exported is not None
    assert (exported.rows, exported.tokens) == (len(indices), tokens)
    assert exported.loss == pytest.approx(sum(loss * each for loss, each in losses) / tokens, abs=1e-5)
    trained = exported.loss * (1 - 9e-5)
    write_history(untrained=4.5, trained=trained)
    found = run_stage()
    assert found.exported == exported
    for before, loss in ((found.untrained, 4.5), (found.trained, trained)):
        assert before == evaluate.make_loss(loss, len(indices), tokens, TEXT, document_mask=True)


def test_the_loss_does_not_depend_on_which_rows_are_measured_together() -> None:
    """The second row has the only document that is longer than the original context of the model."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    values = {**LLAMA.to_dict(), "rope_parameters": {**rope, "factor": 4.0, "original_max_position_embeddings": 16}}
    make_model(LlamaConfig(**values))
    losses = []
    for eval_batch_size in (1, 7):
        write_params(eval_batch_size=eval_batch_size)
        validation = run_stage().validation
        assert validation is not None
        losses.append(validation.loss)
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


# The export.


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        ("float32", "They are not the weights of the checkpoint: run `dvc repro -f -s consolidate`"),
        ("bfloat16", "Rounding to bfloat16 has changed it. Set export_dtype: fp32"),
        ("float16", "Rounding to float16 has changed it. Set export_dtype: fp32"),
    ],
)
def test_weights_may_be_rounded_but_not_be_other_ones(dtype: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = run_stage().exported
    assert trained is not None
    write_history(untrained=trained.loss, trained=trained.loss)
    make_model(LLAMA, getattr(torch, dtype))
    evaluation = run_stage()
    assert evaluation.exported is not None
    assert (evaluation.exported.loss == trained.loss) == (dtype == "float32")
    assert evaluation.dtype == dtype
    weights = AutoModelForCausalLM.from_pretrained(MODEL)
    weights.lm_head.weight.data.zero_()
    weights.save_pretrained(MODEL)
    write_lineage()
    monkeypatch.setattr(measure, "generate_samples", None)  # before any are written
    with pytest.raises(StageError, match=rf"was {trained.loss:.6g} at step 3 .*is \S+ with .* nats, where .*{remedy}"):
        run_stage()


@pytest.mark.parametrize(
    ("dtype", "precision", "tf32", "untrained", "trained", "allowed"),
    [
        # Above 1 nat a part of the loss: that of the coarser of export and computation.
        ("float32", "fp32", False, None, 2.0, 2 * 1e-4),
        ("float32", "fp32", True, None, 2.0, 2 * 2**-10),
        ("float32", "bf16", False, None, 2.0, 2 * 2**-7),
        ("float16", "fp32", False, None, 2.0, 2 * 2**-10),
        ("bfloat16", "fp16", False, None, 2.0, 2 * 2**-7),
        ("bfloat16", "fp8", False, None, 2.0, 2 * 2**-4),
        # Near 0 in nats; with rounding half of the gain, where there is one.
        ("float32", "fp32", False, 0.9591, 0.01, 1e-4),
        ("float32", "fp32", False, None, 0.0, 1e-4),
        ("bfloat16", "fp32", False, 0.9591, 0.01, 0.5 * 0.9491),
        ("bfloat16", "fp32", False, 0.0101, 0.01, 2**-7),
        ("bfloat16", "fp32", False, None, 0.01, 2**-7),
        ("bfloat16", "fp32", False, math.nan, 0.01, 2**-7),
    ],
)
def test_what_is_allowed_is_of_the_loss_in_nats_or_of_the_gain(
    dtype: str, precision: str, tf32: bool, untrained: float | None, trained: float, allowed: float
) -> None:
    lineage = make_lineage(params={"precision": precision, "tf32": tf32})
    course: list[history.Row] = [{"step": 0, "validation_loss": untrained}, {"step": 3, "validation_loss": trained}]
    found = evaluate.find_trained(course, lineage, dtype)
    assert found == Trained(trained, 3, pytest.approx(allowed))  # type: ignore[arg-type]


def test_a_loss_that_differs_by_more_than_is_allowed_or_is_none_is_refused() -> None:
    found = request(trained=Trained(2.0, 3, 0.25))
    for loss in (1.75, 2.25):
        measure.check_export(found, LossSum(1, 2, 2 * loss))
    for loss in (1.74, 2.26, math.nan):
        with pytest.raises(StageError, match=r"the loss on 1 held-out row was 2 at step 3 .* nats, where 0.25 is"):
            measure.check_export(found, LossSum(1, 2, 2 * loss))


@pytest.mark.parametrize(("tokens", "rows"), [(8192, 64), (3 * LENGTH, 3), (LENGTH - 1, 1)])
def test_a_forward_pass_has_a_limited_number_of_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int, rows: int) -> None:
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", tokens)
    write_params(eval_batch_size=64)
    assert request().batch_size == rows


@pytest.mark.parametrize(
    ("dtype", "undone", "warns"), [("bfloat16", 0.04, False), ("bfloat16", 0.06, True), ("float32", 0.06, False)]
)
def test_what_the_rounding_of_the_export_has_undone_is_a_warning(
    dtype: str, undone: float, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = run_stage()
    assert evaluation.exported is not None
    untrained, trained = (
        replace(evaluation.exported, loss=evaluation.exported.loss + difference)
        for difference in (0.5 * (1 - undone), -0.5 * undone)
    )
    evaluate.write(replace(evaluation, dtype=dtype, untrained=untrained, trained=trained))
    output = capsys.readouterr().out
    assert ("warning: rounding to bfloat16 has undone 6% of the gain" in output) == warns
    cost = f"rounding to bfloat16 costs {0.5 * undone:.4f} nats per token, {undone:.1%} of the gain"
    assert (cost in output) == (dtype == "bfloat16")
    assert ("export_dtype: fp32" in output) == warns


def test_a_cpu_computes_in_fp32() -> None:
    """Where it has no instructions for bf16, that is several times as fast."""
    make_model(LLAMA, torch.bfloat16)
    model, _ = generation.load(MODEL)
    assert (stored_dtype(MODEL), model.dtype) == ("bfloat16", torch.float32)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_model_computes_the_loss_itself_where_that_gives_the_same(
    is_sharded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = measure.load(request(), is_sharded)
    assert isinstance(model.get_output_embeddings(), LossHead)
    make_model(GraniteConfig(**{**LLAMA.to_dict(), "model_type": "granite"}, logits_scaling=4.0))
    model, _ = measure.load(request(), is_sharded)
    assert not isinstance(model.get_output_embeddings(), LossHead)
    assert "evaluate: loss plain, because the model changes what its LM head returns" in capsys.readouterr().out


def test_the_attention_is_one_that_works_in_the_exported_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = attention_choice.refusal
    monkeypatch.setattr(
        attention_choice,
        "refusal",
        lambda config, name, mask, dtype, *args: (
            "needs bf16" if name == "varlen" and dtype == torch.float32 else refusal(config, name, mask, dtype, *args)
        ),
    )
    model, _ = measure.load(request(), is_sharded=False)
    with measure.rows_attention(model, request(), LENGTH) as attention:
        assert (model.config._attn_implementation, attention) == ("sdpa", "sdpa")
    monkeypatch.setattr(attention_choice, "refusal", lambda *args: "is broken")
    with (
        pytest.raises(StageError, match=r"documents of .* cannot be kept apart"),
        measure.rows_attention(model, request(), LENGTH),
    ):
        pass


# Samples.


def test_samples_continue_the_beginnings_of_held_out_documents() -> None:
    write_rows(length=44)
    write_params(eval_samples=3)
    samples = run_stage().samples
    tokens = make_rows(length=44).ravel()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    documents = [tokenizer.decode(document) for document in np.split(tokens, np.flatnonzero(tokens == EOS) + 1)]
    assert len({sample.prompt for sample in samples}) == 3
    for sample in samples:
        (document,) = (each for each in documents if each.startswith(sample.prompt))
        assert sample.prompt.count("w") <= document.count("w") / 2  # so that there is text to continue
        assert "<eos>" not in sample.prompt
        assert sample.continuation
        assert sample.reference and document.startswith(sample.prompt + sample.reference)
    write_params(eval_samples=20)
    assert len(run_stage().samples) == 7


@pytest.mark.parametrize(
    ("rows", "indices", "expected"),
    [
        ([[3, 4, 5, 6], [EOS, 7, 8, 9]], range(2), [3, 4]),
        ([[3, EOS, 4, 5], [6, 7, EOS, 8]], range(2), [4, 5]),  # of 4 to 7
        ([[3, 4, EOS, 5], [EOS, 7, 8, 9]], range(2), [3]),  # the last one begins in the next row
        ([[3, 4, 5, 6], [7, EOS, 8, 9], [10, 11, 12, 13]], range(1, 3), [8, 9, 10]),
        ([[3, 4, 5, 6], [7, 8, 9, EOS], [10, 11, 12, 13]], range(1, 2), [10, 11]),
        ([[3, 4, 5, 6], [7, 8, 9, 10], [11, EOS, 12, 13]], range(1, 3), [12]),
        ([[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]], range(1, 2), [7, 8, 9]),  # there is only a middle
        ([[EOS, EOS, EOS, EOS], [EOS, 4, EOS, EOS]], range(1, 2), [4]),
        ([[EOS, EOS, EOS, EOS]], range(1), []),
    ],
)
def test_a_prompt_is_at_most_half_of_the_longest_document_that_begins_in_a_row(
    rows: list[list[int]], indices: range, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(len(rows), length=4)
    packed = TokenRows(VALIDATION)
    monkeypatch.setattr(packed, "rows", np.array(rows).__getitem__)
    prompt, rest = samples.find_prompt(packed, indices, EOS, 3)
    assert prompt.tolist() == expected
    document = ",".join(map(str, [*prompt.tolist(), *rest.tolist()]))
    assert document in ",".join(str(token) for row in rows for token in row), "the rest follows in the rows"
    assert str(EOS) not in document.split(",") and len(rest) >= len(prompt) - 1


@pytest.mark.parametrize(("index", "expected"), [(0, [5, 6, 5, 6]), (1, [7, 8, 7])])
def test_a_prompt_is_of_one_source(index: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a source drops the rest of its last document, and the next row begins another one."""
    write_rows(2, length=6)
    packed = TokenRows(VALIDATION)
    monkeypatch.setattr(packed, "sources", {"web": 1, "books": 1})
    monkeypatch.setattr(packed, "rows", np.array([[3, EOS, 5, 6, 5, 6], [7, 8, 7, EOS, 9, 9]]).__getitem__)
    prompt, rest = samples.find_prompt(packed, range(index, index + 1), EOS, 2)
    assert [*prompt.tolist(), *rest.tolist()] == expected


@pytest.mark.parametrize(("size", "expected"), [(5, 5), (4, 3), (3, 3), (1, 0)])
def test_a_question_leaves_room_for_an_answer(size: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reaches the end of what the model allows would end all samples; without another, there is none."""
    write_rows(3, length=6)
    packed = TokenRows(VALIDATION)
    starts = np.array([[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0]], np.bool_)
    trained = np.array([[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]], np.bool_)
    monkeypatch.setattr(packed, "marks", lambda indices: (trained[indices], starts[indices]))
    question, answer = samples.find_question(packed, range(3), size) or ([], [])
    assert len(question) == expected
    assert len(answer) == {5: 1, 3: 3, 0: 0}[expected]


def test_without_held_out_rows_there_is_no_loss_and_no_sample(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(0)
    write_params(eval_samples=3)
    write_history()
    evaluation = run_stage()
    assert evaluation.validation is evaluation.exported is evaluation.untrained is evaluation.trained is None
    assert evaluation.samples == []
    evaluate.write(evaluation)
    assert set(publish.read_json(outputs.METRICS).values()) == {None}
    assert "note: no rows are held out to measure a loss on" in capsys.readouterr().out


# What is read.


def flip_weights() -> None:
    flip_bit(MODEL / "model.safetensors", -1)


def flip_rows() -> None:
    (file,) = VALIDATION.glob("*.arrow")
    flip_bit(file, file.stat().st_size // 2)


def pack_other_rows() -> None:
    lineage = (MODEL / "lineage.json").read_bytes()
    write_rows(8)
    (MODEL / "lineage.json").write_bytes(lineage)


def export_another_run() -> None:
    lineage = Lineage.read(MODEL / "lineage.json")
    replace(lineage, history="0" * 64).write(MODEL / "lineage.json")


def download_another_model() -> None:
    replace(describe(str(MODEL)), model_name="another").write()


def move_initial_model() -> None:
    replace(describe(str(MODEL)), model_name="gone").write()
    write_lineage()


def train_initial_model_further() -> None:
    shutil.copytree(MODEL, "initial")
    replace(describe(str(MODEL)), model_name="initial").write()
    write_lineage()
    flip_bit(Path("initial/model.safetensors"), -1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (flip_weights, r"model\.safetensors is damaged .*: run `dvc repro -f -s consolidate`"),
        ((MODEL / "lineage.json").unlink, r"lineage\.json is missing"),
        (flip_rows, r"arrow is damaged .* run `dvc repro -f -s pack`"),
        (pack_other_rows, r"validation has other rows than the training measured: run `dvc repro"),
        (export_another_run, r"history\.tsv is not of the run that made outputs/exp/model: run `dvc repro e"),
        (download_another_model, r"model\.json is not of the model that run 0123 was trained from: run `dvc repro eva"),
        (move_initial_model, r"model_name: the directory 'gone' is gone; put it back"),
        (train_initial_model_further, r"initial/model\.safetensors is damaged .*: put it back, or run `dvc r"),
        (lambda: write_history(4.5, math.nan), "was nan at step 3: the training has diverged. Lower lr"),
        (lambda: write_history(4.5, math.inf), "was inf at step 3: the training has diverged. Lower lr"),
    ],
    ids=["weights", "no lineage", "rows", "other rows", "other run", "other model", "moved", "damaged", "nan", "inf"],
)
def test_what_is_damaged_or_of_another_training_is_refused(change: Callable[[], object], problem: str) -> None:
    write_params(eval_samples=1)
    change()
    with pytest.raises(StageError, match=problem):
        run_stage()
    assert read_outs() == {}


def test_the_initial_model_is_needed_where_samples_of_it_are_wanted() -> None:
    """Without its samples the result would depend on the machine."""
    write_params(eval_samples=1)
    assert request().initial == str(MODEL)
    write_params()
    move_initial_model()
    assert run_stage().samples == []


def test_all_is_written_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = run_stage()
    written = publish.write_json

    def fail(path: Path, value: Any) -> None:
        written(path, value)
        if path == outputs.METRICS:  # the last file
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "write_json", fail)
    with pytest.raises(OSError, match="No space left"):
        evaluate.write(evaluation)
    assert read_outs() == {}


# Several ranks.

SHORT = LlamaConfig(**{**LLAMA.to_dict(), "max_position_embeddings": LENGTH})  # so are the samples
TIED = LlamaConfig(**{**SHORT.to_dict(), "tie_word_embeddings": True})
GPT2 = GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH + 8)
"""It has no embedding for a position beyond the last one."""
MAMBA2 = Mamba2Config(
    **SIZES, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8, n_groups=1, chunk_size=8
)
CASES: dict[str, tuple[PreTrainedConfig, torch.dtype, dict[str, Any]]] = {
    # The second rank has no sample, but loads the initial model with the first.
    "untied": (SHORT, torch.float32,
               {"num_samples": 1, "initial": str(MODEL), "initial_weights": ["model.safetensors"]}),
    "tied": (TIED, torch.bfloat16, {"num_samples": 3}),
    "padded": (MAMBA2, torch.float32, {}),
    "learned positions": (GPT2, torch.float32, {"batch_size": 1, "document_mask": False, "num_samples": 3}),
}  # fmt: skip


def rank_main(rank: int, requests: dict[str, Request]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore("store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=1))
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN: no uninitialized value looks plausible
    found: dict[str, Any] = {}
    for name, each in requests.items():
        os.chdir(name)
        found[name] = [measure.measure(each, Heartbeat(), is_sharded) for is_sharded in (False, True)]
        model, _ = measure.load(each, is_sharded=True)
        found[f"{name}, share"] = sum(param.to_local().numel() for param in model.parameters()) / model.num_parameters()
        size = weight_bytes(each.directory, each.weights)
        fits = math.ceil(2 * size / sharing.MEMORY_SHARE)
        sharing.free_memory = lambda fits=fits: fits  # type: ignore[misc]
        found[f"{name}, fits"] = sharing.must_shard(size)
        sharing.free_memory = lambda fits=fits: fits - 10 * rank  # type: ignore[misc]  # all ranks must decide alike
        found[f"{name}, too little"] = sharing.must_shard(size)
        os.chdir("..")
    dist.destroy_process_group()
    torch.save(found, f"results-{rank}.pt")


def test_any_number_of_ranks_finds_the_same_with_copies_or_a_sharded_model(ranks: Ranks) -> None:
    """That is, the same digits, and the same text."""
    expected, requests = {}, {}
    for name, (config, dtype, changed) in CASES.items():
        make_model(config, dtype)
        requests[name] = request(**changed)
        expected[name] = measure_here(requests[name], 1)
        for directory in ("data", "outputs"):
            shutil.copytree(directory, Path(name) / directory)
    ranks.call(rank_main, requests)
    results, others = (torch.load(f"results-{rank}.pt", weights_only=False) for rank in range(2))
    text, lineage = PackMetrics.read(METRICS).validation, Lineage.read(MODEL / "lineage.json")
    for name, found in expected.items():
        for measured in results[name]:
            first, second = (evaluate.describe(each, text, {}, lineage, [], "") for each in (measured, found))
            assert first == second
        assert 0.4 < results[f"{name}, share"] < 0.6
        for each in (results, others):
            assert (each[f"{name}, fits"], each[f"{name}, too little"]) == (False, True)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, number: int, free: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))


def test_on_gpus_each_copy_in_the_exported_dtype_must_fit_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(LLAMA, torch.bfloat16)
    on_cpu = weight_bytes(request().directory, request().weights)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    pretend_gpus(monkeypatch, 8)
    needed = weight_bytes(request().directory, request().weights)
    assert needed == on_cpu / 2
    for share, is_sharded in ((0.79, False), (0.81, True)):
        pretend_gpus(monkeypatch, 8, free=math.floor(needed / share))
        assert sharing.must_shard(needed) == is_sharded


@pytest.mark.parametrize(
    ("gpus", "ranks", "batch_size", "expected"),
    [
        (0, 1, 1, r"a machine with more memory: the weights need \S+ GiB in fp32, and \S+ GiB were free"),
        (0, 2, 1, r"fewer ranks than 2 \(runtime\.nproc_per_node\), or a machine with more memory: the weights need "
         r"\S+ GiB in fp32, in each of 2 ranks or shared by them, and \S+ GiB were free"),
        (0, 1, 4, r"eval_batch_size 2 \(.*\), or a machine with more memory: .*"),
        (2, 2, 1, r"GPUs with more memory: the weights need \S+ GiB on each GPU, or on all together if a copy does not "
         r"fit"),
        (2, 2, 4, r"eval_batch_size 2 \(.*\), or GPUs with more memory: .*"),
        (8, 2, 4, r"eval_batch_size 2 \(.*\), more ranks than 2 \(runtime\.nproc_per_node\) if a copy of the model "
         r"does not fit, or GPUs with more memory: .*"),
    ],
)  # fmt: skip
def test_what_needs_less_memory_is_named(
    gpus: int, ranks: int, batch_size: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpus:
        pretend_gpus(monkeypatch, gpus)
    assert re.fullmatch(expected, remedies(request(batch_size=batch_size), ranks))


@pytest.mark.slow
def test_the_command_writes_the_same_bytes_on_two_ranks(tmp_path: Path) -> None:
    evaluate.write(run_stage())
    expected = read_outs()
    metrics, validation = publish.read_json(outputs.METRICS), Evaluation.read(outputs.EVALUATION).validation
    assert validation is not None
    assert metrics["validation_loss"] == validation.loss
    assert (metrics["perplexity"], metrics["bits_per_byte"]) == (validation.perplexity, validation.bits_per_byte)
    environment = {"PYTHONPATH": str(REPO), "SOURCE_DATE_EPOCH": "1", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "stages.evaluate"]
    process = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert re.match(r"evaluate: measuring 7 held-out rows\n +\d\.\d{4}  validation loss", process.stdout)
    assert read_outs() == expected
    assert not any(str(tmp_path).encode() in content for content in expected.values())


KILLED = (
    r"=+\n{} FAILED\n(?s:.*) : Signal 9 \(SIGKILL\) (?s:.*)\n"
    r"error: the measurement failed as shown above; if a rank was killed by signal 9 because memory ran out, use "
    r"eval_batch_size 1 \(of the training too, which then runs again\), fewer ranks than 2 .*\n"
)


def test_a_killed_rank_ends_the_others_with_one_message(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    with pytest.raises(SystemExit, match="1"):
        asking.ask("tests.lost_rank", request(), Measurements, 2, remedies)
    assert re.fullmatch(KILLED.format(r"tests\.lost_rank"), capfd.readouterr().err)


@pytest.mark.parametrize(
    ("number", "is_rank", "status", "message"),
    [
        pytest.param(signal.SIGKILL, True, 1, r"(\[.*(failed to connect|connectFullMesh failed).*\n)*"
                     + KILLED.format(r"stages\.evaluation\.rank"), marks=pytest.mark.slow),
        (signal.SIGTERM, False, 143, "interrupted: run it again\n"),
        pytest.param(signal.SIGKILL, False, -9, "", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_signal_ends_all_ranks_with_one_message_and_nothing_is_written(
    number: signal.Signals, is_rank: bool, status: int, message: str
) -> None:
    write_rows(200)
    write_params(eval_samples=200)  # so many that no rank is done before it is stopped
    process = start_stage("evaluate")

    def ranks() -> list[psutil.Process]:
        started = process.children(recursive=True)
        return [
            rank for rank in started if rank.cmdline()[-1:] == ["stages.evaluation.rank"] and "RANK" in rank.environ()
        ]

    wait_for(lambda: len(ranks()) == 2)
    started = sorted(ranks(), key=lambda rank: rank.environ()["RANK"])
    directory = Path(started[1].environ()["TRAINING_DIRECTORY"])
    wait_for((directory / "store").exists)  # they are finding each other
    (started[1] if is_rank else process).send_signal(number)
    process.wait(timeout=60)
    wait_for(lambda: not any(map(is_alive, started)), seconds=1)  # left alone they would need longer
    _, errors = process.communicate()
    assert process.returncode == status
    assert re.fullmatch(message, errors), errors
    assert directory.exists() == (status == -signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)
    assert read_outs() == {}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_one_clear_error(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: object) -> Measurements:
        raise error

    request().write(tmp_path / REQUEST)
    environment = {"TRAINING_DIRECTORY": str(tmp_path), "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["rank"])
    monkeypatch.setattr(handoff, "die_with_torchrun", lambda *args: None)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(process_group, "process_group", lambda timeout, directory: contextlib.nullcontext())
    monkeypatch.setattr(watchdog, "watched", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(measure, "measure", fail)
    expected = (
        r"rank 1 is out of memory.*: use eval_batch_size 1 .*, fewer ranks than 2 .* weights need 0\.000 GiB in fp32"
    )
    with pytest.raises(StageError, match=expected):
        rank.main()
    with pytest.raises(SystemExit) as exited:  # another rank has printed it
        rank.main()
    assert exited.value.code == 2


def test_a_rank_needs_a_launcher() -> None:
    assert run_here("evaluation.rank", status=2) == "error: `python -m stages.evaluate` starts the ranks: run that\n"
