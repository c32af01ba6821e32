"""What `plan` refuses before a training is launched, the memory that it predicts, and the rows that it shows."""

import dataclasses
import gc
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import profile, record_function

from stages import plan
from stages.base.errors import StageError
from stages.base.origin import Origin
from stages.base.packed import PackedTokens
from stages.base.params_file import load_params
from stages.building import sharded_model
from stages.forward.attention_choice import AttentionChoice
from stages.forward.batch import Marks, make_batch
from stages.launching.runtime import TrainRuntime
from stages.launching.timers import memory_gib, reset_peak_memory
from stages.model.manifest import ModelManifest
from stages.planning import memory_plan, peak_memory, preview, warnings
from stages.planning.estimate import estimate
from stages.planning.memory_plan import PeakMemory
from stages.planning.peak_memory import Chosen
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from stages.training.precision import make_grad_scaler
from stages.training.step import train_step
from tests.artifacts import write_model, write_pack_metrics
from tests.models import CONFIGS, SIZES, manifest_of
from tests.project import REPO, Project

ROWS = PackedTokens(digests={}, fingerprint="", num_rows=96, seq_length=32, sources={})
GIB = 2**30
STATE = ("weights", "gradients", "optimizer")
PARTS = (*STATE, "unsharded", "activations", "temporaries")


def measure(model: ModelManifest, params: TrainParams, *others: Any, **named: Any) -> PeakMemory:
    return peak_memory.measure(model, peak_memory.choose(model, params), *others, **named)


def peak_of(total: int) -> PeakMemory:
    return PeakMemory(total, False, *[0] * 7)


@pytest.fixture
def llama(tmp_path: Path) -> ModelManifest:
    return manifest_of(write_model(tmp_path, dtype=None), with_weights=False)


@pytest.fixture
def planned(here: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that changes params.yaml, runs the stage without measuring memory, and gives what it prints."""
    monkeypatch.setattr("sys.argv", ["plan"])
    monkeypatch.setattr(peak_memory, "choose", lambda _, params: Chosen(params, None, False))
    monkeypatch.setattr(peak_memory, "measure", lambda *_, **__: peak_of(GIB))

    def output(**changes: Any) -> str:
        here.set(**changes)
        plan.main()
        return capsys.readouterr().out

    return output


def test_a_wrong_parameter_is_refused_before_torch_is_imported(here: Project) -> None:
    here.set(lr="wrong")
    code = "import sys; from stages import plan; from stages.base import command\n"
    script = f"{code}try:\n command.run(plan.main)\nfinally:\n print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "lr is 'wrong'" in found.stderr and found.stdout == "False\n"


@pytest.mark.parametrize("num_ranks", [None, 1, 2, 3, 4])
def test_proposed_numbers_of_rows_are_accepted(params: TrainParams, num_ranks: int | None) -> None:
    changed = dataclasses.replace(params, batch_size=3, total_batch_size=16)
    with pytest.raises(StageError) as error:
        plan.check_num_ranks(changed, num_ranks)
    _, _, proposals = str(error.value).partition(": use ")
    found = re.fullmatch(
        r"total_batch_size (\d+)(?: or (\d+))?(?: or batch_size (\d+))?(?: or (\d+) ranks)? \(.*\)", proposals
    )
    assert found
    for total in filter(None, found.groups()[:2]):
        plan.check_num_ranks(dataclasses.replace(changed, total_batch_size=int(total)), num_ranks)
    if found[3]:
        plan.check_num_ranks(dataclasses.replace(changed, batch_size=int(found[3])), num_ranks)
    if found[4]:
        plan.check_num_ranks(changed, int(found[4]))


def test_ranks_that_cannot_share_a_step_are_refused(params: TrainParams) -> None:
    groups = dataclasses.replace(params.fsdp, sharding_strategy="HYBRID_SHARD", size=3)
    for num_ranks, changes, message in (
        # Two nodes of eight GPUs with the defaults: what `sbatch --nodes=2 --gpus-per-node=8` starts.
        (16, {"total_batch_size": 16}, "2 x 16 ranks: use total_batch_size 32 or batch_size 1 or 8 ranks (runtime.npr"),
        (4, {"total_batch_size": 1}, "batch_size 2 x 4 ranks: use total_batch_size 8 (runtime"),
        (2, {"fsdp": groups}, "fsdp.size 3 does not divide the 2 ranks"),
    ):
        with pytest.raises(StageError, match=re.escape(message)):
            plan.check_num_ranks(dataclasses.replace(params, batch_size=2, **changes), num_ranks)


def test_what_the_training_would_lack_is_refused(
    params: TrainParams, llama: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(layers: str | None = None, **changes: Any) -> TrainParams:
        fsdp = dataclasses.replace(params.fsdp, wrap_layer_cls=layers)
        return dataclasses.replace(params, fsdp=fsdp, **changes)

    estimate(changed("LlamaMLP, LlamaDecoderLayer"), llama, ROWS, ROWS, None)
    message = r"LlamaForCausalLM has no LlamaDecodrLayer: use LlamaDecoderLayer \(its layers, .*\) or others .*LlamaMLP"
    with pytest.raises(StageError, match=message):
        estimate(changed("LlamaDecodrLayer"), llama, ROWS, ROWS, None)
    odd = dataclasses.replace(ROWS, seq_length=24)
    with pytest.raises(StageError, match=r"a multiple of 16 tokens per forward pass, not batch_size 3 x seq_length 24"):
        estimate(changed(precision="fp8", batch_size=3), llama, odd, odd, None)
    for name in ("torchao", "torchao.optim"):  # the latter is found first, where it was imported before
        monkeypatch.setitem(sys.modules, name, None)
    message = " needs torchao, which is not installed: run `pip install torchao`"
    for name, value in (("optimizer", "adamw_8bit"), ("precision", "fp8")):
        with pytest.raises(StageError, match=f"{name} {value}{message}"):
            estimate(changed(**{name: value}), llama, ROWS, ROWS, None)


def test_the_state_of_a_rank_is_its_share(params: TrainParams, tmp_path: Path) -> None:
    config = CONFIGS["llama"].to_dict() | {"num_hidden_layers": 6}
    model = manifest_of(write_model(tmp_path, transformers.LlamaConfig(**config), dtype=None), with_weights=False)
    peak = measure(model, dataclasses.replace(params, batch_size=1), 4, 2)
    share = model.num_parameters  # bytes: a quarter of the weights
    assert peak.weights == pytest.approx(share, rel=0.1)  # and buffers, which are whole on each rank
    assert peak.gradients == pytest.approx(share, rel=0.1)  # of the forward passes before
    assert peak.optimizer == pytest.approx(2 * share, rel=0.1)
    assert peak.staging == peak.weights + peak.optimizer
    # DTensor computes shapes with full tensors, all gradients at once where they are clipped. They do not exist.
    assert peak.total - sum(getattr(peak, name) for name in STATE) < 4 * share
    assert peak.total == sum(getattr(peak, name) for name in PARTS)


def test_offloaded_state_is_not_on_the_gpu(params: TrainParams, llama: ModelManifest) -> None:
    offloads = dataclasses.replace(params, fsdp=dataclasses.replace(params.fsdp, cpu_offload=True))
    peak = measure(llama, offloads, 2, 32)
    assert peak.total == sum(getattr(peak, name) for name in PARTS if name not in STATE)


def test_moments_in_8_bits_need_less(params: TrainParams, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    config = transformers.LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": 8192, "hidden_size": 192})
    model = manifest_of(write_model(tmp_path, config, dtype=None), with_weights=False)
    peak = measure(model, dataclasses.replace(params, optimizer="adamw_8bit"), 1, 16)
    assert peak.optimizer == pytest.approx(2 * (1 + 4 / 256) * model.num_parameters, rel=0.05)


def test_a_large_batch_of_a_validation_counts(params: TrainParams, llama: ModelManifest) -> None:
    assert measure(llama, dataclasses.replace(params, eval_batch_size=64), 2, 32).total > 4 * 64 * 32 * 101  # logits


def test_the_table_ends_with_what_does_not_fit(
    params: TrainParams, llama: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = {"none": 10, "full": 2}  # GiB of a row

    def measure_row(manifest: ModelManifest, chosen: Chosen, *others: Any, **named: Any) -> PeakMemory:
        params = chosen.params
        if params.activation_checkpointing not in share:
            raise RuntimeError("unsuitable")
        return peak_of(share[params.activation_checkpointing] * params.batch_size * GIB)

    monkeypatch.setattr(peak_memory, "measure", measure_row)
    table = peak_memory.make_table(llama, Chosen(params, None, False), 2, 32, limit=20 * GIB)
    assert table == {"none": {1: 10 * GIB, 2: 20 * GIB, 4: 40 * GIB}, "full": {n: 2 * n * GIB for n in (1, 2, 4, 8)}}
    header, none, full, largest = memory_plan.lines(table, limit=20 * GIB)
    assert header.split() == ["batch_size", "1", "2", "4", "8"]
    assert none.split() == ["none", "10.00", "20.00!", "40.00!"]  # a part of the memory of a GPU is not usable
    assert full.split() == ["full", "2.00", "4.00", "8.00", "16.00"]
    assert largest.endswith(": 1 with activation_checkpointing none, 8 with activation_checkpointing full")


def test_activation_checkpointing_needs_less(params: TrainParams, llama: ModelManifest) -> None:
    params = dataclasses.replace(params, batch_size=8)
    none, full = (
        measure(llama, dataclasses.replace(params, activation_checkpointing=kind), 2, 64) for kind in ("none", "full")
    )
    assert full.activations < none.activations / 2
    assert full.total < none.total


def test_what_cannot_fit_is_refused_with_what_would() -> None:
    peak = peak_of(90 * GIB)
    table = {"none": {1: 60 * GIB, 2: 90 * GIB}, "full": {1: 40 * GIB, 2: 50 * GIB, 4: 70 * GIB, 8: 99 * GIB}}
    memory_plan.check_fits(peak, table, 90 * GIB, could_adapt=False)
    message = (
        r"needs 90.000 GiB at the peak of a step, and a GPU has 80.000 GiB \(plan.gpu_memory_gb\): use a batch_size of "
        "at most: 1 with activation_checkpointing none, 4 with activation_checkpointing full$"
    )
    with pytest.raises(StageError, match=message):
        memory_plan.check_fits(peak, table, 80 * GIB, could_adapt=False)
    with pytest.raises(StageError, match=r"more ranks, or fsdp\.cpu_offload true, or train adapters alone"):
        memory_plan.check_fits(peak, table, 40 * GIB, could_adapt=True)
    at_most = dataclasses.replace(peak, is_upper_bound=True)  # it may fit
    memory_plan.check_fits(at_most, table, 40 * GIB, could_adapt=True)


def test_what_only_eager_computes_on_cpus_is_an_upper_bound(
    params: TrainParams, llama: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_memory, "choose_attention", lambda *_: AttentionChoice("eager", None))
    peak = measure(llama, params, 2, 32)
    assert peak.is_upper_bound
    assert not peak_memory.choose(llama, dataclasses.replace(params, attention="eager")).is_upper_bound


def test_the_loss_is_computed_in_parts_as_large_as_on_the_device(params: TrainParams, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": 49152, "num_hidden_layers": 1})
    model = manifest_of(write_model(tmp_path, config, dtype=None), with_weights=False)
    cpu, gpu = (measure(model, params, 1, 1024, device).total for device in ("cpu", "cuda"))
    assert gpu - cpu > 0.9 * 4 * (2048 - 128) * 49152  # logits in fp32
    small, large = (measure(model, params, 1, 8192, device_memory=memory).total for memory in (24 * GIB, None))
    assert large - small > 0.9 * 4 * (8192 - 2048) * 49152


def test_of_a_model_that_depends_on_values_the_state_is_printed(
    params: TrainParams, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.JetMoeConfig(**SIZES, hidden_size=16, num_hidden_layers=1)
    model = manifest_of(write_model(tmp_path, config, dtype=None), with_weights=False)
    logged: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = logged.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    assert memory_plan.measure_memory(model, params, 2, 32, limit=GIB)[:2] == (None, {})
    logger.removeHandler(handler)
    assert logged == []  # torch's own message, a traceback
    output = capsys.readouterr().out
    assert "activations of JetMoeForCausalLM cannot be measured" in output
    assert f"of each of 2 ranks need {8 * model.num_parameters / GIB:.3f} GiB" in output


def test_ranks_that_hold_the_whole_model_are_proposed_for_adapters_where_it_fits(
    params: TrainParams, llama: ModelManifest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frozen weights need neither gradients nor optimizer states, so that a copy on each rank may be small."""

    def measured(_: ModelManifest, chosen: peak_memory.Chosen, *__: Any, **___: Any) -> PeakMemory:
        return peak_of((2 if chosen.params.fsdp.strategy == "ddp" else 1) * GIB)

    monkeypatch.setattr(peak_memory, "measure", measured)
    adapted, note = dataclasses.replace(params, lora_r=3), "note: with fsdp.strategy ddp each rank holds"
    memory_plan.measure_memory(llama, adapted, 2, 32, limit=3 * GIB)
    assert f"{note} the whole model, in 2.000 GiB" in capsys.readouterr().out
    memory_plan.measure_memory(llama, adapted, 2, 32, limit=2 * GIB)  # of which a part stays free
    memory_plan.measure_memory(llama, params, 2, 32, limit=3 * GIB)
    memory_plan.measure_memory(llama, adapted, 1, 32, limit=3 * GIB)
    assert note not in capsys.readouterr().out


def test_a_plan_is_the_same_on_each_machine(
    planned: Callable[..., str], here: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of these ranks and this row, not of those that this machine would start.
    monkeypatch.setattr(peak_memory, "measure", lambda _, __, num_ranks, row, **___: peak_of(num_ranks * row * GIB))
    files = [here / name for name in ("outputs/plan.json", "outputs/rows.txt")]
    assert planned(plan={"num_ranks": 2}).endswith("; first rows: outputs/rows.txt\n")
    before = [file.read_bytes() for file in files]
    assert json.loads(before[0])["peak"]["total"] == 2 * 32 * GIB
    planned(runtime={"nproc_per_node": 4})
    assert before == [file.read_bytes() for file in files]
    with pytest.raises(StageError, match=r"a GPU has 0.001 GiB \(plan.gpu_memory_gb\)"):
        planned(plan={"gpu_memory_gb": 0.001})
    assert capsys.readouterr().out.count("which is made for bf16: set precision to bf16") == 1


def test_a_plan_counts_the_nodes_of_the_job(planned: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_params(TrainRuntime, "runtime")

    def nodes(**changes: Any) -> int | None:
        return plan.launched_nodes(dataclasses.replace(runtime, **changes))

    assert (nodes(launcher="auto"), nodes(launcher="sbatch")) == (1, None)  # a job to come knows how many there are
    with pytest.raises(StageError, match="8 is not a multiple of batch_size 2 x 3 ranks"):
        planned(runtime={"nproc_per_node": 3})
    planned(runtime={"launcher": "sbatch", "sbatch_args": "--nodes=2"})
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert (nodes(launcher="auto"), nodes(launcher="torchrun"), nodes(launcher="auto", num_nodes=2)) == (3, 1, 2)
    with pytest.raises(StageError, match="8 is not a multiple of batch_size 2 x 6 ranks"):
        planned(runtime={"launcher": "auto", "nproc_per_node": 2})


UNKNOWN = "ranks (plan.num_ranks) cannot train, and their memory is not known: "
MULTI_NODE, WSD = {"preset": "multi_node_fsdp"}, {"lr_schedule": "wsd"}
SCHEDULES: list[dict[str, Any]] = [WSD, {"lr_schedule": "cosine"}]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"warmup_steps": 12}, "warmup_steps 12 lasts until the end"),
        ({"warmup_steps": 24, "max_steps": 4}, "the learning rate rises to 5.00e-04 in the last of 4"),  # 4/24 of 0.003
        ({**WSD, "lr_decay_ratio": 0.04}, "lr_decay_ratio 0.04 of 12 steps is rounded to 0 steps of decay: the learning"
         " rate of the last step is 3.00e-03, and min_lr_ratio asks for 3.00e-04: raise lr_decay_ratio to 0.083"),
        *[({**schedule, "lr_decay_steps": 1000}, "lr_decay_steps 1000 is more than the 12") for schedule in SCHEDULES],
        ({"plan": {"num_ranks": 3}}, f"3 {UNKNOWN}total_batch_size 8 is not"),
        ({"plan": {"num_ranks": 2}, "fsdp": {"strategy": "none"}}, f"2 {UNKNOWN}fsdp.strategy none"),
        ({"plan": {"num_ranks": 2}, "fsdp": MULTI_NODE}, "set fsdp.size to the GPUs of a node"),
        ({"plan": {"num_ranks": 2}, "fsdp": {**MULTI_NODE, "size": 2}}, None),
        ({}, None),
        ({"warmup_steps": 3}, None),
        ({**WSD, "lr_decay_ratio": 0.083}, None),
        *[({**schedule, "lr_decay_steps": 12}, None) for schedule in SCHEDULES],
        ({"lr_schedule": "constant", "lr_decay_steps": 1000}, None),
    ],
)  # fmt: skip
def test_what_a_first_training_gets_wrong_is_a_warning(
    planned: Callable[..., str], changes: dict[str, Any], warning: str | None
) -> None:
    output = planned(**changes)
    assert ("warning: " in output) == bool(warning)
    assert warning is None or warning in output


def test_the_plan_says_what_is_trained_and_held_out(
    planned: Callable[..., str], here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 14 held-out rows, 12 steps of 8 rows: validated rows per row that is trained on, and their part of the compute.
    for eval_rows, freq, ratio in ((None, 4, 4 * 14 / 96), (5, 5, 4 * 5 / 96), (None, 2, 7 * 14 / 96)):
        found = planned(eval_rows=eval_rows, eval_freq=freq)
        share = ratio / (ratio + 3)
        assert here.json("outputs/plan.json")["validation_share"] == pytest.approx(share, abs=1e-4)
        assert f"about {share:.0%} of the compute" in found
    assert " of 8 rows = 2 ranks x 2 rows x 2 accumulation steps\n" in found
    written = here.json("outputs/plan.json")
    planned(export_dtype="bf16")
    assert here.json("outputs/plan.json")["model_bytes"] == 2 * written["parameters"] == written["model_bytes"] / 2
    monkeypatch.setattr(warnings, "_LEAST_HELD_OUT", 0.13)
    few = "warning: only 12.7% of the rows are held out: splits have equal numbers of files"
    for fraction in (None, 0.127):  # somebody wants few
        write_pack_metrics("", origin=Origin({"validation_fraction": fraction}, {}))
        assert (few in planned()) == (fraction is None)


def test_what_a_later_stage_would_refuse_is_refused(planned: Callable[..., str], here: Project) -> None:
    for changes, message in (
        ({"plan": {"num_ranks": 2}, "batch_size": 3}, "of batch_size 3 x 2 ranks: use total_batch_size 6 or 12"),
        ({"batch_size": 2, "tasks": ["evals/none.yaml"]}, "^tasks: evals/none.yaml is no file below evals/ that ends"),
        (
            {"tasks": [], "extend_from": "0123456789abcdef"},
            "run 0123456789abcdef cannot be extended:\nthere is no fini",
        ),
    ):
        with pytest.raises(StageError, match=message):
            planned(**changes)
    (here / "data/tokenizer.json").write_text("{")
    with pytest.raises(StageError, match=r"tokenizer\.json"):
        planned(extend_from=None)


def test_a_model_that_the_export_would_delete_is_refused(planned: Callable[..., str], here: Project) -> None:
    link = here / "outputs/test/model"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to((here / "models/nano").resolve())  # either may be a link
    with pytest.raises(StageError, match="'models/nano': DVC deletes it before consolidate writes the model of experi"):
        planned()
    planned(experiment_name="second")


@pytest.mark.parametrize(
    ("runtime", "params", "needs", "expected"),
    [
        ({}, {}, {"steps": 4}, 2),
        ({}, {}, {}, 4),  # two, the best, and the one that is being written
        ({"ckpt_freq": None, "ckpt_minutes": 5}, {}, {}, 4),
        ({"ckpt_freq": 4, "ckpt_minutes": 15}, {}, {"steps": 4}, 4),
        ({"ckpt_freq": 4}, {"export_from": "best"}, {"steps": 4}, 4),
        ({}, {}, {"validation_rows": 0}, 3),
    ],
    ids=["short", "long", "by the clock", "also by the clock", "best", "no validation"],
)
def test_a_disk_that_cannot_hold_the_checkpoints_is_refused(
    here: Project, monkeypatch: pytest.MonkeyPatch, runtime: dict[str, Any], params: dict[str, Any],
    needs: dict[str, int], expected: int,
) -> None:  # fmt: skip
    here.set(**params, runtime={"ckpt_minutes": None, **runtime})  # ckpt_freq 2, keep_checkpoints 2
    given, saved = load_params(TrainParams), load_params(TrainRuntime, "runtime")
    plan_of = estimate(given, ModelManifest.read(), PackedTokens.read(plan.TRAIN), ROWS, None)
    plan_of = dataclasses.replace(plan_of, **needs)
    free = [expected * plan_of.checkpoint_bytes + plan_of.model_bytes]
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    plan.check_disk(given, saved, plan_of)
    free[0] -= 1
    message = rf"{expected} checkpoints and the model need .* free some space, or set CHECKPOINT_ROOT to a larger"
    with pytest.raises(StageError, match=message):  # 2 are the fewest that may be kept
        plan.check_disk(given, saved, plan_of)
    own_free, free[0] = free[0], 0
    with pytest.raises(StageError, match="free some space, lower runtime"):
        plan.check_disk(given, dataclasses.replace(saved, keep_checkpoints=3), plan_of)
    free[0] = own_free
    own = plan.describe(given).directory / "step-00000002"  # of a launch that this one resumes
    own.mkdir(parents=True)
    (own / "data").write_bytes(b"1")
    plan.check_disk(given, saved, plan_of)


def test_who_asks_about_memory_may_train_on_another_disk(
    planned: Callable[..., str], here: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(StageError, match="No space left on device"):
        planned(plan={"num_ranks": 1, "gpu_memory_gb": 8})
    assert "1.000  GiB" in capsys.readouterr().out
    assert not (here / "outputs/plan.json").exists()


LINE = f"  {'-' * 8}"


def shown(
    words: list[str], row: Any, special: set[int], document_mask: bool = True, marks: Marks | None = None
) -> list[str]:
    """The lines that show a row of these tokens."""

    def decode(ids: list[int]) -> str:
        return "".join(words[token] for token in ids).removeprefix(" ")

    return preview.render(np.array(row, dtype=np.int32), decode, 0, special, document_mask, marks).split("\n")


def test_rows_are_shown_with_their_documents_and_what_is_not_predicted() -> None:
    words = ["<eos>", "the", " cat", "\n", " sat", "\x1b[2J", *(f" {number}" for number in range(200))]
    row = [2, 3, 4, 0, 1, 2, 0, 5, 4]
    assert shown(words, row, {0}) == ["  ⟦cat⟧⏎ sat⟪<eos>⟫", LINE, "  ⟦the⟧ cat⟪<eos>⟫", LINE, r"  ⟦\x1b[2J⟧ sat"]
    first, second, *_ = shown(words, row, {0}, document_mask=False)
    assert first == "  ⟦cat⟧⏎ sat⟪<eos>⟫" and "⟦the⟧" not in second
    long = "\n".join(shown(words, [*range(6, 206)] * 4, {0}))
    assert "characters ..." in long and long.endswith(" 198 199") and len(long) < 1000
    assert shown(words, [1, 0] * 100, {0})[-1].endswith("... 95 more documents with 190 tokens")


def test_a_row_of_conversations_shows_what_is_trained_and_what_stays_free() -> None:
    trained = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    starts = torch.tensor([[1, 0, 0, 0, 1, 0, 0, 1, 0, 0]], dtype=torch.bool)
    words, row = ["<eos>", "user ", "assistant ", "yes", "<end>"], [1, 2, 3, 4, 1, 2, 4, 0, 0, 0]
    assert shown(words, row, {0, 4}, marks=Marks(trained, starts)) == [
        "  ⟦user assistant ⟧yes⟪<end>⟫", LINE, "  ⟦user assistant ⟧⟪<end>⟫", LINE, "  3 free tokens",
    ]  # fmt: skip


def test_a_conversation_is_shown_where_there_are_few() -> None:
    """Its marks are what one looks for; and documents, where most rows are of conversations."""
    is_chat = np.zeros(100, np.bool_)
    rows = SimpleNamespace(marks=lambda indices: (~is_chat[indices, None].repeat(4, axis=1), None))
    order = np.random.default_rng(0).permutation(100)
    assert preview.rows_to_show(rows, order) == [*order[:3]]
    is_chat[order[[50, 60]]] = True
    assert preview.rows_to_show(rows, order) == [*order[[0, 1, 50]]]
    is_chat = ~is_chat
    assert preview.rows_to_show(rows, order) == [*order[[0, 1, 50]]]
    is_chat[order[2]] = False
    assert preview.rows_to_show(rows, order) == [*order[:3]]
    assert preview.rows_to_show(SimpleNamespace(marks=lambda _: None), order) == [*order[:3]]


def test_a_special_token_looks_other_than_its_name_in_a_text() -> None:
    words = ["<eos>", "<|im_start|>", "<|im", "_start|>", "user", "\n"]
    line, _ = shown(words, [1, 4, 5, 2, 3, 1, 0], {0, 1})
    assert line == "  ⟦⟪<|im_start|>⟫⟧user⏎<|im_start|>⟪<|im_start|>⟫⟪<eos>⟫"
    assert "⟪...⟫" in preview.LEGEND


def test_the_turns_of_a_long_conversation_are_decoded_once_each() -> None:
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.extend(ids)
        return "a" * len(ids)

    row = np.array([1, 2] * 500, dtype=np.int32)
    preview.render(row, decode, 0, {1}, document_mask=True)
    assert len(decoded) < 5 * len(row)  # each beside those before and after it


FP32: dict[str, Any] = {"precision": "fp32"}
LORA: dict[str, Any] = {"precision": "fp32", "lora_r": 8}
FULL: dict[str, Any] = {"activation_checkpointing": "full"}


def real_step(manifest: ModelManifest, params: TrainParams, mesh: DeviceMesh, num_tokens: int) -> Callable[[], Any]:
    """The first step of a training, which is set up, with the parameters of `Chosen`."""
    model = sharded_model.build(manifest, params, mesh, initialize=True).train()
    optimizer, scaler = make_optimizer(model, params), make_grad_scaler(params.precision, torch.device("cpu"))
    rows = torch.ones(params.batch_size, num_tokens, dtype=torch.int32)
    rows[:, num_tokens // 2] = 0
    batch = make_batch(rows, 0, document_mask=True, lengths=params.attention == "varlen")
    batches = [batch] * (params.total_batch_size // params.batch_size)
    return lambda: train_step(model, optimizer, scaler, batches, 2 * num_tokens, params)


@pytest.mark.parametrize(
    ("kind", "tied", "changes"),
    [
        (transformers.LlamaConfig, True, FP32),  # two gradients of one weight: of the embedding and of the head
        (transformers.LlamaConfig, False, {**FULL, "total_batch_size": 4}),  # gradients of an earlier forward pass
        (transformers.MixtralConfig, False, FP32),
        (transformers.LlamaConfig, True, LORA),  # weights that FSDP2 does not manage, and no gradient of them
        (transformers.LlamaConfig, False, {**LORA, **FULL}),
    ],
)
def test_a_real_step_allocates_what_is_predicted(
    kind: Any, tied: bool, changes: dict[str, Any], params: TrainParams, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As the allocator of a GPU counts: all bytes of tensors, whether they were written to or not."""
    config = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}  # fmt: skip
    manifest = manifest_of(write_model(tmp_path, kind(**config)), with_weights=True)
    params = dataclasses.replace(params, **{"batch_size": 2, "total_batch_size": 2, "precision": "bf16", **changes})
    chosen = peak_memory.choose(manifest, params)
    predicted = peak_memory.measure(manifest, chosen, 1, 16, "cpu").total
    mesh = request.getfixturevalue("mesh")  # another process group than that of `measure`
    gc.collect()  # what ends within the block must not have begun before
    with profile(profile_memory=True, acc_events=True) as profiler:
        take_step = real_step(manifest, chosen.params, mesh, 16)
        with record_function("step"):
            take_step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = np.cumsum([event.nbytes() if event.name() == "[memory]" else 0 for event in events])
    start = [event.name() for event in events].index("step")
    assert predicted == pytest.approx(max(allocated[start:]), rel=0.01)


def compare_resident_set(config: dict[str, Any], num_tokens: int, changes: dict[str, Any], directory: str) -> None:
    """Print what is predicted, and by how much a step grows the resident set of this process, in GiB."""
    small = transformers.LlamaConfig(**config, max_position_embeddings=num_tokens)
    manifest = manifest_of(write_model(Path(directory), small, dtype=None), with_weights=False)
    params = load_params(TrainParams, path=REPO / "params.yaml")
    params = dataclasses.replace(params, **{"batch_size": 1, "total_batch_size": 1, "precision": "fp32", **changes})
    chosen = peak_memory.choose(manifest, params)
    predicted = peak_memory.measure(manifest, chosen, 1, num_tokens, "cpu").total / GIB
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weight = torch.randn(512, 512, requires_grad=True)
    (weight @ weight).sum().backward()  # what a first product allocates for good
    start = memory_gib()[0]
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    take_step = real_step(manifest, chosen.params, mesh, num_tokens)
    reset_peak_memory()
    take_step()
    print(predicted, memory_gib()[1] - start)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("vocab_size", "num_layers", "num_tokens", "tied", "changes"),
    [
        (49152, 4, 512, True, {}),
        (128256, 2, 512, True, {}),
        (128256, 2, 512, False, {**FULL, "precision": "bf16", "total_batch_size": 2}),
        (49152, 4, 4096, False, {"precision": "bf16", "total_batch_size": 2}),
        (4096, 6, 4096, True, {}),
        (4096, 6, 4096, True, FULL),
    ],
)
def test_the_resident_set_of_a_real_step_is_what_is_predicted(
    vocab_size: int, num_layers: int, num_tokens: int, tied: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Its growth, in a process whose allocator returns what is freed."""
    config = {"vocab_size": vocab_size, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": num_layers,
              "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": tied}  # fmt: skip
    given = (config, num_tokens, changes, str(tmp_path))
    code = f"from tests import test_plan; test_plan.compare_resident_set(*{given})"
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MALLOC_MMAP_THRESHOLD_": "65536",
                   "MALLOC_TRIM_THRESHOLD_": "65536"}  # fmt: skip
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=REPO, env=environment, text=True, stdout=-1, check=True).stdout
    predicted, measured = map(float, output.split()[-2:])
    assert predicted == pytest.approx(measured, rel=0.1)
