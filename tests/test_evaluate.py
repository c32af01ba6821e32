"""The loss is that of the model; the report needs no network and has the same bytes each time."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig

from stages import download, evaluate
from stages.artifacts import outputs, publish
from stages.artifacts.dataset import Dataset, Shard
from stages.artifacts.errors import StageError
from stages.artifacts.identity import TokenFingerprints
from stages.artifacts.params_file import load_params
from stages.export import generation
from stages.export.provenance import Lineage, SourceModel
from stages.model.manifest import MANIFEST
from stages.tokens.loss import LossHead
from stages.tokens.packed import VALIDATION
from tests.models import write_tokenizer
from tests.project import REPO, flip_bit

LENGTH, EOS = 24, 2
HISTORY = """step\tepoch\ttokens\tloss\tlr\tgrad_norm\tvalidation_loss
0\t0.0\t0\t\t\t\t4.5
1\t0.25\t100\t4.25\t0.001\t2.0\t
2\t0.5\t200\t4.0\t0.002\t1.5\t3.75
3\t0.75\t300\t3.5\t0.001\t1.0\t
"""


@pytest.fixture(autouse=True)
def project(empty_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the stage reads, with rows of random words."""
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=None, eos_token_id=EOS, max_position_embeddings=48, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    directory = Path("outputs/exp/model")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(directory, ["<unk>", "<b>", "<eos>", *(f"w{number}" for number in range(3, 64))])
    params = download.DownloadParams(model_name=str(directory), model_revision="main", initial_weights="auto")
    download.describe(params).write()
    lineage = Lineage(
        run_id="0123",
        step=3,
        adopted=None,
        model=SourceModel(
            name="<tiny & small>", revision="main", commit=None, manifest=publish.sha256_file(MANIFEST), lineage=None
        ),
        data=TokenFingerprints(train="t", validation="v"),
        params={},
        code="c",
        packages={},
        checkpoint="cs",
        weights={"model.safetensors": publish.sha256_file(directory / "model.safetensors")},
    )
    lineage.write(directory / "lineage.json")
    Path("outputs/history.tsv").write_text(HISTORY)
    write_rows(7)
    write_params()


def write_rows(num_rows: int, length: int = LENGTH) -> None:
    """Write rows of random tokens as the pack stage does: with the digests of the shard in state.json."""
    shutil.rmtree(VALIDATION, ignore_errors=True)
    rows = np.random.default_rng(0).integers(1, 64, (num_rows, length), dtype=np.int32)
    rows[:1][rows[:1] == EOS] = 3  # the first row is a part of one document
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=length)})
    datasets.Dataset.from_dict({"input_ids": list(rows)}, features=features).save_to_disk(str(VALIDATION))
    files = sorted(VALIDATION.glob("*.arrow"))  # one, or none where there are no rows
    shards = [Shard(filename=file.name, rows=num_rows, sha256=publish.sha256_file(file)) for file in files]
    info = publish.read_json(VALIDATION / "dataset_info.json")
    Dataset(features=info["features"], shards=shards).write(VALIDATION)


def write_params(**changed: Any) -> None:
    values = {"experiment_name": "exp", "batch_size": 2, "eval_batch_size": None, "document_mask": True, "eval_rows": 3,
              "attention": "auto", "loss": "auto", **changed}  # fmt: skip
    Path("params.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()))


def run_stage() -> dict[str, Any]:
    """Run the stage; returns the content of metrics.json, and `eval`: that of eval_losses.json."""
    evaluate.main()
    return {**publish.read_json(outputs.METRICS), "eval": publish.read_json(outputs.REPORT / evaluate.EVAL_LOSSES)}


def reference_loss(document_mask: bool, indices: slice | list[int] = slice(None)) -> tuple[float, int]:
    """The loss of one document, or one row, at a time, and the number of tokens."""
    model = AutoModelForCausalLM.from_pretrained("outputs/exp/model")
    rows = np.asarray(datasets.load_from_disk(str(VALIDATION))["input_ids"])[indices]
    losses = []
    for row in rows:
        ends = [index + 1 for index in np.flatnonzero(row == EOS)] if document_mask else []
        for document in np.split(row, ends):
            if len(document) > 1:
                tokens = torch.tensor(document)[None]
                with torch.no_grad():
                    log_probs = model(tokens).logits[0, :-1].log_softmax(-1)
                losses += [-log_probs[index, token].item() for index, token in enumerate(tokens[0, 1:])]
    return float(np.mean(losses)), len(losses)


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize(
    ("eval_batch_size", "attention"),
    [(None, "auto"), (7, "varlen"), (100, "flex")],  # flex: not on CPUs
)
def test_loss_and_perplexity_are_those_of_each_document_alone(
    document_mask: bool, eval_batch_size: int | None, attention: str
) -> None:
    write_params(document_mask=document_mask, eval_batch_size=eval_batch_size, attention=attention)
    metrics = run_stage()
    loss, tokens = reference_loss(document_mask)
    assert metrics["validation_loss"] == pytest.approx(loss, abs=1e-5)
    assert f"{math.exp(metrics['validation_loss']):,.2f}</td>" in (outputs.REPORT / "report.html").read_text()
    assert metrics["eval"]["untrained"] == 4.5
    assert publish.read_json(outputs.EVALUATION)["validation"]["tokens"] == tokens


@pytest.mark.parametrize(("eval_rows", "indices"), [(3, [0, 2, 4]), (7, slice(None)), (None, slice(None))])
def test_losses_before_and_after_training_are_on_the_same_rows(
    eval_rows: int | None, indices: list[int] | slice
) -> None:
    write_params(eval_rows=eval_rows)
    Path("outputs/history.tsv").write_text(HISTORY.replace("1.0\t\n", "1.0\t3.25\n"))
    metrics = run_stage()
    assert publish.read_json(outputs.EVALUATION)["exported"]["rows"] == len(np.arange(7)[indices])
    assert (metrics["eval"]["untrained"], metrics["eval"]["trained"]) == (4.5, 3.25)
    assert metrics["eval"]["exported"] == pytest.approx(reference_loss(True, indices)[0], abs=1e-5)
    assert metrics["validation_loss"] == pytest.approx(reference_loss(True)[0], abs=1e-5)


@pytest.mark.parametrize("undone", [0.04, 0.06])
def test_what_the_rounding_of_the_export_has_undone_is_a_warning(
    undone: float, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = run_stage()["eval"]["exported"]
    rows = [f"0\t0.0\t0\t\t\t\t{exported + 1 - undone}", f"3\t0.75\t300\t3.5\t0.001\t1.0\t{exported - undone}"]
    Path("outputs/history.tsv").write_text("\n".join([HISTORY.splitlines()[0], *rows, ""]))
    config = publish.read_json(Path("outputs/exp/model/config.json"))
    for dtype, warns in (("bfloat16", undone > 0.05), ("float32", False)):
        publish.write_json(Path("outputs/exp/model/config.json"), {**config, "dtype": dtype})
        capsys.readouterr()
        run_stage()
        output = capsys.readouterr().out
        assert ("warning: rounding the weights to bfloat16 has undone 6% of the gain" in output) == warns
        assert ("export_dtype: fp32" in output) == warns


def test_a_cpu_computes_in_fp32() -> None:
    """Where it has no instructions for bf16, that is several times as fast."""
    directory = Path("outputs/exp/model")
    AutoModelForCausalLM.from_pretrained(directory).bfloat16().save_pretrained(directory)
    model, _ = generation.load(directory)
    assert (evaluate.stored_dtype(directory), model.dtype) == ("bfloat16", torch.float32)


def test_the_two_kinds_of_mask_give_different_losses() -> None:
    """Otherwise the test above would pass with either."""
    assert abs(reference_loss(document_mask=True)[0] - reference_loss(document_mask=False)[0]) > 1e-3


def test_the_model_computes_the_loss_itself_where_that_gives_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = generation.load(Path("outputs/exp/model"))
    scaled: Any = AutoModelForCausalLM.from_config(
        GraniteConfig(**{**model.config.to_dict(), "model_type": "granite"}, logits_scaling=4.0)
    ).eval()
    params = load_params(evaluate.EvaluateParams)
    scaled.save_pretrained("scaled")
    for given, directory in ((model, "outputs/exp/model"), (scaled, "scaled")):
        evaluate.prepare_loss(given, Path(directory), params)
    assert isinstance(model.get_output_embeddings(), LossHead)
    assert not isinstance(scaled.get_output_embeddings(), LossHead)
    assert "evaluate: loss plain, because it changes logits after its output embedding" in capsys.readouterr().out
    with pytest.raises(StageError, match="loss fused is not possible with GraniteForCausalLM"):
        evaluate.prepare_loss(scaled, Path("scaled"), dataclasses.replace(params, loss="fused"))


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    evaluate.main()
    paths = [outputs.METRICS, *sorted(outputs.REPORT.iterdir())]
    assert {path.name for path in paths} >= {"report.html", "loss.svg", "learning_rate.svg", "samples.md"}
    first = [path.read_bytes() for path in paths]
    env = {**os.environ, "PYTHONPATH": str(REPO), "SOURCE_DATE_EPOCH": "1", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "stages.evaluate"]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert [path.read_bytes() for path in paths] == first
    assert process.stdout.startswith("evaluate: validation loss ")
    assert not any(str(tmp_path).encode() in content for content in first)


def test_a_sample_continues_the_beginning_of_a_held_out_document() -> None:
    write_rows(7, length=44)
    evaluate.main()
    rows = np.asarray(datasets.load_from_disk(str(VALIDATION))["input_ids"])
    tokenizer = transformers.AutoTokenizer.from_pretrained("outputs/exp/model")
    text = Path("outputs/report/samples.md").read_text()
    longest = [max(np.split(row, np.flatnonzero(row == EOS) + 1), key=len) for row in rows[[0, 3, 6]]]
    assert max(map(len, longest)) > evaluate.PROMPT_TOKENS > min(map(len, longest))
    for document in longest:
        prompt = tokenizer.decode(document[: evaluate.PROMPT_TOKENS])
        assert f"Prompt:\n\n    {prompt}\n\nContinuation:\n\n    " in text
    written = re.findall(r"Continuation:\n\n    (.*)", text)
    assert len(written) == 3
    assert all(written)


def test_without_held_out_rows_there_is_a_note_and_no_loss() -> None:
    write_rows(0)
    Path("outputs/history.tsv").write_text(HISTORY.replace("4.5", "").replace("3.75", ""))
    metrics = run_stage()
    assert metrics["validation_loss"] is metrics["eval"]["exported"] is None
    assert "validation_splits" in Path("outputs/report/report.html").read_text()


def test_weights_that_are_not_those_of_the_lineage_are_refused() -> None:
    path = Path("outputs/exp/model/model.safetensors")
    flip_bit(path, -1)
    with pytest.raises(StageError, match=r"model\.safetensors is missing or was changed"):
        evaluate.main()
    Path("outputs/exp/model/lineage.json").unlink()
    with pytest.raises(StageError, match=r"lineage\.json is missing"):
        evaluate.main()
    assert not Path("outputs/report").exists()


def test_tokens_that_are_not_those_of_their_metadata_are_refused() -> None:
    (file,) = VALIDATION.glob("*.arrow")
    flip_bit(file, file.stat().st_size // 2)
    with pytest.raises(StageError, match=r"arrow is damaged: .* run `dvc repro -f -s pack`"):
        evaluate.main()


def test_help_does_not_import_torch_or_matplotlib() -> None:
    script = (
        "import sys; import stages.evaluate, stages.compare; print({'torch', 'matplotlib', 'dvc'} & set(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    assert process.stdout == "set()\n"
