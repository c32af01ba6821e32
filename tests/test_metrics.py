"""What a training prints, and the numbers in it."""

import io
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from stages.model import meta
from stages.training import flops
from stages.training.console import Console
from stages.training.timers import memory_gib, reset_peak_memory
from tests.project import REPO


def build(tmp_path: Path, **config: object) -> PreTrainedModel:
    values = json.loads((REPO / "models/tiny-llama/config.json").read_text())
    small = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**values, **small, **config}))
    return meta.build(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_of_palm(tmp_path: Path, tied: bool) -> None:
    model = build(tmp_path, tie_word_embeddings=tied)
    layer = 2 * 16 * 4 * 8 + 2 * 16 * 2 * 8 + 3 * 16 * 32 + 2 * 16  # queries, output; keys, values; MLP; norms
    weights = 2 * layer + 16 + 100 * 16  # the last norm, the output; the embedding is only looked up
    assert flops.flops_per_token(model, seq_length=64) == 6 * weights + 12 * 2 * 4 * 8 * 64


def test_flops_of_an_unknown_architecture_are_none(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    assert flops.flops_per_token(build(tmp_path, **experts), seq_length=64) is None


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A10G", "bf16", None),  # not an A10
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
    ],
)
def test_an_unknown_gpu_has_no_peak_flops(name: str, precision: str, expected: float | None) -> None:
    assert flops.peak_flops(name, precision) == expected


def test_peak_memory_is_measured_since_the_last_log_line() -> None:
    big = torch.ones(2**27)  # half a GiB
    now, peak = memory_gib()
    assert peak >= now >= 0.5
    del big
    reset_peak_memory()
    assert memory_gib()[1] < peak - 0.4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_progress_bar_with_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        clock = [0.0]
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr("tqdm.std.time", lambda clock=clock: clock[0])
        console = Console(rank=0, step=4, total_steps=12)
        clock[0] = 8.0
        for _ in range(4):
            console.advance()
        console.close()
        assert ("8/12 [00:08<00:08" in stream.getvalue()) == shown  # four steps took as long as four will
