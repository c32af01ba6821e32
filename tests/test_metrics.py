"""What a training prints, and the numbers in it."""

import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn
from transformers import Gemma3Config, Gemma3TextConfig, PreTrainedModel

from stages.base import history
from stages.base.history import SPEED, History, Row, Table
from stages.base.identity import RunIdentity, TokenFingerprints
from stages.building.nf4 import Nf4Linear
from stages.checkpointing.run import Run
from stages.checkpointing.state import Cost
from stages.launching import flops
from stages.launching.console import Console, never_silent, print_line
from stages.launching.metrics import SPEED_COLUMNS, MetricsLogger
from stages.launching.timers import Timers, memory_gib, reset_peak_memory
from stages.launching.trackers import Tracker
from stages.model import meta
from stages.training.params import TrainParams
from stages.training.step import StepResult, Validation
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


def test_flops_are_not_those_of_an_image_tower(tmp_path: Path) -> None:
    text = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    found = []
    for config in (Gemma3TextConfig(**text), Gemma3Config(text_config=text, vision_config=tower)):
        config.save_pretrained(tmp_path)
        found.append(flops.flops_per_token(meta.build(tmp_path), seq_length=64))
    assert found[0] == found[1]


def test_flops_of_quantized_weights_are_those_of_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    model = build(tmp_path, hidden_size=64, intermediate_size=128).requires_grad_(False)
    expected = flops.flops_per_token(model, seq_length=64)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Nf4Linear
            cast(Nf4Linear, module).pack(torch.bfloat16)
    assert flops.flops_per_token(model, seq_length=64) == expected


def test_flops_of_an_unknown_architecture_are_none(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    assert flops.flops_per_token(build(tmp_path, **experts), seq_length=64) is None


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A10G", "bf16", None),  # not an A10
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
    ],
)
def test_an_unknown_gpu_has_no_peak_flops(name: str, precision: str, expected: float | None) -> None:
    assert flops.peak_flops(name, precision) == expected


@pytest.mark.parametrize(("matmul", "peak"), [("highest", 19.5e12), ("high", 156e12)])
def test_the_mfu_of_tf32_is_that_of_its_own_peak(monkeypatch: pytest.MonkeyPatch, matmul: str, peak: float) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)
    assert flops.utilization(1e3, 10**9, "fp32") == pytest.approx(1e12 / (2 * peak))
    assert flops.utilization(1e3, 10**9, "bf16") == pytest.approx(1e12 / (2 * 312e12))


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


@pytest.mark.parametrize("lose", [os.openpty, os.pipe])
def test_lines_that_nobody_can_read_end_no_training(
    lose: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal is closed, or Ctrl-C ended a `tee` too: the training still has to save."""
    reader, writer = lose()
    with open(writer, "w") as stream:
        os.close(reader)
        monkeypatch.setattr("sys.stdout", stream)
        Console(rank=0, step=4, total_steps=12).line("a line")
        print_line("another one")
        assert os.path.samefile(f"/proc/self/fd/{writer}", os.devnull)  # so Python ends with the status of the training


class Recorder(Tracker):
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.values: Row = {}

    def log(self, step: int, row: Row) -> None:
        self.values = row


class Launch:
    """What logs the steps of a launch that begins after `step`, with rows of 8 tokens."""

    def __init__(
        self, params: TrainParams, step: int, log_freq: int, rank: int = 0, total_steps: int = 9, speed: str = ""
    ) -> None:
        identity = RunIdentity(params={}, data=TokenFingerprints(train="", validation=""), model="", code="")
        num_rows = total_steps * params.total_batch_size // params.num_epochs
        run, console = Run(params, identity, num_rows, seq_length=8), Console(rank, step, total_steps)
        self.recorder, self.timers, self.table = Recorder(), Timers(lambda phase: None), Table(SPEED_COLUMNS, speed)
        given = (run, log_freq, console, self.recorder, self.timers, None, History(), self.table)
        self.logger = MetricsLogger(*given)


def test_a_line_fits_a_terminal_and_has_the_remaining_time(
    params: TrainParams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flops, "utilization", lambda *_: 0.412)
    step = 118_000
    launch = Launch(params, step, log_freq=1, total_steps=218_000)
    monkeypatch.setattr(launch.timers, "read", lambda: {"forward": 1.5, "other": 0.5})
    launch.logger.log(step + 1, StepResult(loss=10.4321, grad_norm=12.345))
    line = capsys.readouterr().out.rstrip("\n")
    assert re.fullmatch(
        r"\d\d-\d\d \d\d:\d\d:\d\d step 118001/218000  loss 10\.4321  lr \d\.\d\de-\d\d  grad norm 12\.35  "
        r"64 tokens/s  MFU 41%  ETA 2 days, 7:33:18",  # 99 999 steps of two seconds
        line,
    ), line
    assert len(line) <= 120
    assert "forward_ms\t" in launch.table.text() and "\t1500.0\t" in launch.table.text()


def test_a_source_without_held_out_rows_has_no_loss(params: TrainParams, capsys: pytest.CaptureFixture[str]) -> None:
    launch = Launch(params, step=0, log_freq=1)
    launch.logger.log(0, StepResult(loss=None, grad_norm=None), Validation(2.0, {"web": 2.0, "small": None}, 3))
    assert capsys.readouterr().out.endswith("step 0: validation loss 2.0000 (3 rows)  web 2.0000\n")


def test_slow_steps_print_a_line_every_30_s(
    params: TrainParams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("stages.launching.metrics.monotonic", lambda: clock[0])
    launch = Launch(params, step=0, log_freq=10)
    for step in range(1, 7):
        clock[0] += 22
        launch.logger.log(step, StepResult(loss=1.0, grad_norm=1.0))
    assert re.findall(r" step (\d+)/", capsys.readouterr().out) == ["2", "4", "6"]
    assert [row.split("\t")[0] for row in launch.table.text().splitlines()] == ["step", "2", "4", "6"]


def test_a_step_that_takes_long_is_not_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with never_silent(lambda: "step 4, forward", seconds=0.2):
        for _ in range(5):
            time.sleep(0.1)
            print_line("a line")
        time.sleep(0.5)
    time.sleep(0.3)
    first, *others = capsys.readouterr().out.split("a line\n")[-1].splitlines()
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d working: step 4, forward", first) and len(others) == 1


def two_steps(params: TrainParams, step: int, save_at: int | None = None, speed: str = "") -> Launch:
    """A launch that makes two steps after `step`, in 40 ms, half of them in no phase of a step."""
    launch = Launch(params, step, log_freq=2, rank=1, speed=speed)
    for number in (step + 1, step + 2):
        with launch.timers.phase("forward"):
            time.sleep(0.01)
        time.sleep(0.01)  # a collective operation, logging
        launch.logger.log(number, StepResult(loss=1.0, grad_norm=1.0))
        if number == save_at:
            launch.logger.time_steps(number)
    return launch


def test_the_phases_add_up_to_the_time_by_the_clock(params: TrainParams) -> None:
    row = two_steps(params, step=0).recorder.values
    milliseconds = sum(value or 0 for name, value in row.items() if name.endswith("_ms"))
    assert milliseconds >= 20
    assert (row["other_ms"] or 0) >= 10
    tokens_per_step = 8 * params.total_batch_size
    assert row["tokens_per_second"] == pytest.approx(1000 * tokens_per_step / milliseconds)
    assert row["seconds"] == pytest.approx(2 * milliseconds / 1000)


def test_the_cost_is_that_of_all_launches_and_of_a_run_that_adopted_that_of_its_own_steps(
    params: TrainParams, tmp_path: Path
) -> None:
    first = two_steps(params, step=0)
    last = two_steps(params, step=2, save_at=3, speed=first.table.text())
    assert last.table.text().startswith(first.table.text())
    (tmp_path / SPEED).write_text(last.table.text())
    rows = history.read(tmp_path / SPEED)
    assert tuple(rows[0]) == SPEED_COLUMNS
    assert [row["step"] for row in rows] == [2, 3, 4]  # a save ends a row, so that none of its steps is lost by a kill
    cost = Cost.of(rows, first_step=0, launches=2, tokens_per_step=8 * params.total_batch_size)
    assert (cost.steps, cost.launches, cost.mfu) == (4, 2, None)
    assert cost.training_seconds >= 0.08
    assert cost.training_seconds == pytest.approx(rows[-1]["seconds"], abs=0.01)
    assert sum(cost.milliseconds.values()) == pytest.approx(250 * cost.training_seconds, abs=0.5)
    assert cost.milliseconds["forward"] >= 10
    assert cost.tokens_per_second == pytest.approx(4 * 8 * params.total_batch_size / cost.training_seconds, rel=0.01)
    assert cost.memory_peak_gib == pytest.approx(max(row["memory_peak_gib"] or 0 for row in rows), abs=1e-3)
    for name, value in last.recorder.values.items():
        assert rows[-1][name] == (None if value is None else pytest.approx(value, abs=1e-3))
    assert Cost.of(rows[1:], first_step=2, launches=1, tokens_per_step=8).steps == 2


def test_the_utilization_is_a_mean_over_the_time() -> None:
    columns = ("step", "seconds", "tokens_per_second", "mfu", "memory_peak_gib", "forward_ms")
    values = ((1, 3.0, 8 / 3, 0.5, 2.0, 3000.0), (3, 4.0, 16.0, 0.1, 1.0, 500.0))
    rows: list[Row] = [dict(zip(columns, row, strict=True)) for row in values]
    cost = Cost.of(rows, first_step=0, launches=1, tokens_per_step=8)
    assert (cost.mfu, cost.tokens_per_second, cost.memory_peak_gib) == (0.4, 6.0, 2.0)
    assert cost.milliseconds == {"forward": 1333.333}


def test_the_name_of_a_source_is_one_column_whatever_is_in_it(tmp_path: Path) -> None:
    """After a resume, too."""
    source = "web\tpages\n\u2028"
    column, text = history.of_source(source), ""
    for step, loss in enumerate((2.5, 1.5)):
        table = History(text, [source])
        table.add(step=step, **{column: loss})
        text = table.text()
    (tmp_path / "history.tsv").write_text(text, encoding="utf-8")
    assert history.series(history.read(tmp_path / "history.tsv"), column) == ([0.0, 1.0], [2.5, 1.5])
