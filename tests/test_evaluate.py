"""The numbers are those of the model, and the report opens anywhere and is the same each time."""

import html.parser
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from stages import download, evaluate
from stages.artifacts import publish
from stages.artifacts.command import StageError
from stages.export import history, report
from stages.model import manifest

ROOT = Path(evaluate.__file__).parents[1]
LENGTH, EOS = 24, 2
HISTORY = """step\tepoch\ttokens\tloss\tlr\tgrad_norm\tvalidation_loss
0\t0.0\t0\t\t\t\t4.5
1\t0.25\t100\t4.25\t0.001\t2.0\t
2\t0.5\t200\t4.0\t0.002\t1.5\t3.75
3\t0.75\t300\t3.5\t0.001\t1.0\t
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the stage reads, with rows of random words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"<unk>": 0, "<b>": 1, "<eos>": EOS} | {f"w{number}": number for number in range(3, 64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=None, eos_token_id=EOS, max_position_embeddings=48, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    directory = Path("outputs/exp/model")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    manifest.write(download.describe(download.DownloadParams(str(directory), "main", "auto")))
    lineage = {
        "run_id": "0123", "step": 3, "model": {"name": "<tiny & small>"},
        "weights": {"model.safetensors": publish.sha256_file(directory / "model.safetensors")},
    }  # fmt: skip
    publish.write_json(directory / "lineage.json", lineage)
    Path("outputs/exp/history.tsv").write_text(HISTORY)
    write_rows(7)
    write_params()


def write_rows(count: int) -> None:
    rows = np.random.default_rng(0).integers(1, 64, (count, LENGTH), dtype=np.int32)
    feature = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=LENGTH)})
    datasets.Dataset.from_dict({"input_ids": list(rows)}, features=feature).save_to_disk(str(evaluate.VALIDATION))


def write_params(**changed: Any) -> None:
    values = {"experiment_name": "exp", "batch_size": 2, "document_mask": True, **changed}
    Path("params.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()))


def metrics() -> dict[str, Any]:
    evaluate.main()
    found: dict[str, Any] = publish.read_json(Path("outputs/exp/metrics.json"))
    return found


def reference_loss(document_mask: bool) -> tuple[float, int]:
    """The loss, one document, or one row, and one token at a time."""
    model = AutoModelForCausalLM.from_pretrained("outputs/exp/model")
    rows = np.asarray(datasets.load_from_disk(str(evaluate.VALIDATION))["input_ids"])
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
@pytest.mark.parametrize("batch_size", [2, 7, 100])
def test_loss_and_perplexity_are_those_of_each_document_alone(document_mask: bool, batch_size: int) -> None:
    write_params(document_mask=document_mask, batch_size=batch_size)
    found = metrics()
    loss, tokens = reference_loss(document_mask)
    assert found["validation_tokens"] == tokens
    assert found["validation_loss"] == pytest.approx(loss, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert (found["untrained_validation_loss"], found["validation_rows"], found["step"]) == (4.5, 7, 3)


def test_the_two_kinds_of_mask_differ_here() -> None:
    """Or the test above could not tell them apart."""
    assert abs(reference_loss(True)[0] - reference_loss(False)[0]) > 1e-3


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    outputs = Path("outputs/exp")
    evaluate.main()
    paths = [outputs / "metrics.json", *sorted((outputs / "report").iterdir())]
    assert {path.name for path in paths} >= {"index.html", "loss.svg", "schedule.svg", "sample.md"}
    first = [path.read_bytes() for path in paths]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SOURCE_DATE_EPOCH": "1", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "stages.evaluate"]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert [path.read_bytes() for path in paths] == first
    assert process.stdout.startswith("evaluate: validation loss ")
    assert not any(str(tmp_path).encode() in content for content in first)


class Outside(html.parser.HTMLParser):
    """Collects whatever a page would fetch, and the text it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_but_itself() -> None:
    evaluate.main()
    content = Path("outputs/exp/report/index.html").read_text()
    page = Outside()
    page.feed(content)
    assert page.links, "the pictures refer to their own parts"
    assert all(link.startswith("#") for link in page.links)
    assert not page.tags & {"script", "link", "iframe", "img"}
    assert "svg" in page.tags
    assert not re.search(r"url\((?!#)|@import", content)
    assert "<tiny & small>" in page.text
    assert "4.5000 nats per token (perplexity 90.0)" in page.text


def test_a_sample_continues_the_beginning_of_a_held_out_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "PROMPT_TOKENS", 9)
    evaluate.main()
    rows = np.asarray(datasets.load_from_disk(str(evaluate.VALIDATION))["input_ids"])
    tokenizer = transformers.AutoTokenizer.from_pretrained("outputs/exp/model")
    text = Path("outputs/exp/report/sample.md").read_text()
    for index in (0, 3, 6):
        documents = np.split(rows[index], np.flatnonzero(rows[index] == EOS) + 1)
        prompt = tokenizer.decode(max(documents, key=len)[:9])
        assert f"Prompt:\n\n    {prompt}\n\nContinuation:\n\n    " in text
    written = re.findall(r"Continuation:\n\n    (.*)", text)
    assert len(written) == 3
    assert all(written)


def test_without_held_out_rows_there_is_a_note_and_no_loss() -> None:
    write_rows(0)
    Path("outputs/exp/history.tsv").write_text(HISTORY.replace("4.5", "").replace("3.75", ""))
    found = metrics()
    assert found["validation_loss"] is found["perplexity"] is found["untrained_validation_loss"] is None
    assert "validation_splits" in found["note"]
    assert "not measured" in Path("outputs/exp/report/index.html").read_text()


def test_weights_that_are_not_those_of_the_lineage_are_refused() -> None:
    path = Path("outputs/exp/model/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StageError, match=r"model\.safetensors is missing or was changed"):
        evaluate.main()
    Path("outputs/exp/model/lineage.json").unlink()
    with pytest.raises(StageError, match=r"lineage\.json is missing"):
        evaluate.main()
    assert not Path("outputs/exp/report").exists()


def test_the_pictures_show_what_the_history_says() -> None:
    rows = history.read(Path("outputs/exp/history.tsv"))
    assert history.values(rows, "loss") == ([1, 2, 3], [4.25, 4.0, 3.5])
    assert history.values(rows, "validation_loss") == ([0, 2], [4.5, 3.75])
    changed = [*rows, {**rows[-1], "step": 4.0, "loss": 3.0, "lr": 0.0005}]
    assert report.loss_picture(rows) != report.loss_picture(changed)
    assert report.schedule_picture(rows) != report.schedule_picture(changed)
    assert report.loss_picture([]).startswith("<?xml")
    assert report.schedule_picture([]).startswith("<?xml")


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys; import stages.evaluate, stages.consolidate; print({'torch', 'matplotlib'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "set()\n"
