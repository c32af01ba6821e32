"""What `plan` refuses before a training is launched, the memory that it predicts, and the rows that it shows."""

import dataclasses
import gc
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.profiler import profile, record_function

from stages import plan
from stages.base.errors import StageError
from stages.base.packed import PackedTokens
from stages.building import sharded_model
from stages.forward.attention_choice import AttentionChoice
from stages.forward.attention_names import NEED_LENGTHS
from stages.forward.batch import Marks, make_batch
from stages.launching.runtime import TrainRuntime
from stages.model.manifest import ModelManifest
from stages.planning import memory_plan, peak_memory, preview
from stages.planning.memory_plan import PeakMemory
from stages.planning.peak_memory import Chosen
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from stages.training.precision import make_grad_scaler
from stages.training.step import train_step
from tests.models import CONFIGS, SIZES, manifest_of
from tests.project import REPO, Project


def measure(model: ModelManifest, params: TrainParams, *others: Any, **named: Any) -> PeakMemory:
    return peak_memory.measure(model, peak_memory.choose(model, params), *others, **named)


ROWS = PackedTokens(digests={}, fingerprint="", num_rows=96, seq_length=32, sources={})


@pytest.fixture
def llama(tmp_path: Path) -> ModelManifest:
    CONFIGS["llama"].save_pretrained(tmp_path)
    return manifest_of(tmp_path, with_weights=False)


def estimate(params: TrainParams, model: ModelManifest, **changes: Any) -> plan.Plan:
    return plan.estimate(dataclasses.replace(params, **changes), model, ROWS, ROWS)


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


def test_ranks_that_cannot_be_grouped_are_refused(params: TrainParams) -> None:
    groups_of_three = dataclasses.replace(params.fsdp, sharding_strategy="HYBRID_SHARD", size=3)
    with pytest.raises(StageError, match=r"fsdp.size 3 does not divide the 2 ranks"):
        plan.check_num_ranks(dataclasses.replace(params, fsdp=groups_of_three), 2)


def test_layers_to_wrap_that_the_model_lacks_are_refused(params: TrainParams, llama: ModelManifest) -> None:
    for names in (None, "LlamaMLP, LlamaDecoderLayer"):
        estimate(params, llama, fsdp=dataclasses.replace(params.fsdp, wrap_layer_cls=names))
    message = r"LlamaForCausalLM has no LlamaDecodrLayer: use LlamaDecoderLayer \(its layers, .*\) or others .*LlamaMLP"
    with pytest.raises(StageError, match=message):
        estimate(params, llama, fsdp=dataclasses.replace(params.fsdp, wrap_layer_cls="LlamaDecodrLayer"))


def test_an_optimizer_without_its_package_is_refused(
    params: TrainParams, llama: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(StageError, match="adamw_8bit needs torchao, which is not installed: run `pip install torchao`"):
        estimate(params, llama, optimizer="adamw_8bit")


GIB = 2**30
STATE = ("weights", "gradients", "optimizer")
PARTS = (*STATE, "unsharded", "activations", "temporaries")


def test_the_state_of_a_rank_is_its_share(params: TrainParams, tmp_path: Path) -> None:
    config = CONFIGS["llama"].to_dict() | {"num_hidden_layers": 12}
    transformers.LlamaConfig(**config).save_pretrained(tmp_path)
    model = manifest_of(tmp_path, with_weights=False)
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


def test_moments_in_8_bits_need_less(params: TrainParams, llama: ModelManifest, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    config = transformers.LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": 8192, "hidden_size": 192})
    config.save_pretrained(tmp_path)
    model = manifest_of(tmp_path, with_weights=False)
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
        return PeakMemory(share[params.activation_checkpointing] * params.batch_size * GIB, False, *[0] * 7)

    monkeypatch.setattr(peak_memory, "measure", measure_row)
    table = peak_memory.make_table(llama, Chosen(params, None, False), 2, 32, limit=20 * GIB)
    assert table == {"none": {1: 10 * GIB, 2: 20 * GIB, 4: 40 * GIB}, "full": {n: 2 * n * GIB for n in (1, 2, 4, 8)}}
    header, none, full, largest = memory_plan.lines(table, limit=20 * GIB)
    assert header.split() == ["batch_size", "1", "2", "4", "8"]
    assert none.split() == ["none", "10.00", "20.00!", "40.00!"]  # a part of the memory of a GPU is not usable
    assert full.split() == ["full", "2.00", "4.00", "8.00", "16.00"]
    assert largest.endswith(": 1 with activation_checkpointing none, 8 with activation_checkpointing full")


def test_activation_checkpointing_needs_less(params: TrainParams, llama: ModelManifest) -> None:
    kinds: list[dict[str, Any]] = [{"activation_checkpointing": kind} for kind in ("none", "full")]
    none, full = (measure(llama, dataclasses.replace(params, batch_size=8, **kind), 2, 64) for kind in kinds)
    assert full.activations < none.activations / 2
    assert full.total < none.total


def test_what_cannot_fit_is_refused_with_what_would() -> None:
    peak = PeakMemory(90 * GIB, False, *[0] * 7)
    table = {"none": {1: 60 * GIB, 2: 90 * GIB}, "full": {1: 40 * GIB, 2: 50 * GIB, 4: 70 * GIB, 8: 99 * GIB}}
    memory_plan.check_fits(peak, table, 90 * GIB, "plan.gpu_memory_gb")
    message = (
        r"needs 90.000 GiB at the peak of a step, and a GPU has 80.000 GiB \(plan.gpu_memory_gb\): use a batch_size of "
        "at most: 1 with activation_checkpointing none, 4 with activation_checkpointing full$"
    )
    with pytest.raises(StageError, match=message):
        memory_plan.check_fits(peak, table, 80 * GIB, "plan.gpu_memory_gb")
    with pytest.raises(StageError, match=r"more ranks, or fsdp\.cpu_offload true"):
        memory_plan.check_fits(peak, table, 40 * GIB, "plan.gpu_memory_gb")
    at_most = dataclasses.replace(peak, is_upper_bound=True)  # it may fit
    memory_plan.check_fits(at_most, table, 40 * GIB, "plan.gpu_memory_gb")


def test_what_only_eager_computes_on_cpus_is_an_upper_bound(
    params: TrainParams, llama: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_memory, "choose_attention", lambda *_: AttentionChoice("eager", None))
    peak = measure(llama, params, 2, 32)
    assert peak.is_upper_bound
    assert peak.describe().startswith("at most ")
    assert not measure(llama, dataclasses.replace(params, attention="eager"), 2, 32).is_upper_bound


def test_the_loss_is_computed_in_parts_as_large_as_on_the_device(params: TrainParams, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": 49152})
    config.save_pretrained(tmp_path)
    model = manifest_of(tmp_path, with_weights=False)
    cpu, gpu = (measure(model, params, 1, 1024, device).total for device in ("cpu", "cuda"))
    assert gpu - cpu > 0.9 * 4 * (2048 - 128) * 49152  # logits in fp32
    small, large = (measure(model, params, 1, 8192, device_memory=size * GIB).total for size in (24, 80))
    assert large - small > 0.9 * 4 * (8192 - 2048) * 49152
    assert measure(model, params, 1, 8192).total == large


def test_of_a_model_that_depends_on_values_the_state_is_printed(
    params: TrainParams, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.JetMoeConfig(**SIZES, hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    model = manifest_of(tmp_path, with_weights=False)
    logged: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = logged.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    assert plan.measure_memory(model, params, 2, 32, limit=GIB) == (None, {})
    logger.removeHandler(handler)
    assert logged == []  # torch's own message, a traceback
    output = capsys.readouterr().out
    assert "activations of JetMoeForCausalLM cannot be measured" in output
    assert f"of each of 2 ranks need {8 * model.num_parameters / GIB:.3f} GiB" in output


def test_ranks_that_the_settings_exclude_have_no_memory(
    params: TrainParams, llama: ModelManifest, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = dataclasses.replace(params, fsdp=dataclasses.replace(params.fsdp, strategy="none"))
    assert plan.measure_memory(llama, alone, 2, 32, limit=None) == (None, {})
    assert (
        "warning: 2 ranks (plan.num_ranks) cannot train, and their memory is not known: fsdp.strategy none"
        in capsys.readouterr().out
    )
    assert plan.measure_memory(llama, params, 3, 32, limit=None) == (None, {})  # they cannot share total_batch_size


def test_a_plan_is_the_same_on_each_machine(
    training: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(training.path)
    monkeypatch.setattr("sys.argv", ["plan"])
    plan.main()
    files = [(training / name).read_bytes() for name in ("outputs/plan.json", "outputs/rows.txt")]
    assert capsys.readouterr().out.endswith(files[1].decode())
    assert json.loads(files[0])["peak"]["total"] > 0
    training.set(runtime={"nproc_per_node": 4})
    plan.main()
    assert files == [(training / name).read_bytes() for name in ("outputs/plan.json", "outputs/rows.txt")]
    training.set(plan={"gpu_memory_gb": 0.001})
    monkeypatch.setattr(peak_memory, "measure", lambda *_, **__: PeakMemory(2 * GIB, False, *[0] * 7))
    with pytest.raises(StageError, match=r"a GPU has 0.001 GiB \(plan.gpu_memory_gb\)"):
        plan.main()
    assert capsys.readouterr().out.count("which is made for bf16: set precision to bf16") == 1


def test_ranks_that_cannot_share_a_step_are_told_a_value_of_each_number(params: TrainParams) -> None:
    """Two nodes of eight GPUs with the defaults: what `sbatch --nodes=2 --gpus-per-node=8` starts."""
    message = r"batch_size 2 x 16 ranks: use total_batch_size 32 or batch_size 1 or 8 ranks \(runtime.nproc_per_node on"
    with pytest.raises(StageError, match=message):
        dataclasses.replace(params, total_batch_size=16, batch_size=2).grad_accum_steps(16)
    with pytest.raises(StageError, match=r"batch_size 2 x 4 ranks: use total_batch_size 8 \(runtime"):
        dataclasses.replace(params, total_batch_size=1, batch_size=2).grad_accum_steps(4)


def test_a_plan_counts_the_nodes_of_the_job(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    monkeypatch.setattr("sys.argv", ["plan"])
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setattr(peak_memory, "measure", lambda *_, **__: PeakMemory(GIB, False, *[0] * 7))
    training.set(runtime={"nproc_per_node": 2})
    with pytest.raises(StageError, match="8 is not a multiple of batch_size 2 x 6 ranks"):
        plan.main()
    for others in ({"launcher": "torchrun"}, {"launcher": "auto", "num_nodes": 2}):
        training.set(runtime=others)
        plan.main()
    monkeypatch.delenv("SLURM_JOB_ID")
    training.set(runtime={"num_nodes": None, "nproc_per_node": 3})
    with pytest.raises(StageError, match="8 is not a multiple of batch_size 2 x 3 ranks"):
        plan.main()
    training.set(runtime={"launcher": "sbatch", "sbatch_args": "--nodes=2"})
    plan.main()  # the job will know how many there are


def test_a_learning_rate_that_does_not_reach_its_lowest_is_a_warning(
    training: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(training.path)
    params, runtime = plan.load_params(TrainParams), plan.load_params(plan.TrainRuntime, "runtime")

    def output(**changes: Any) -> str:
        changed = dataclasses.replace(params, max_steps=12, **changes)
        plan._print_summary(changed, runtime, plan.check(changed, runtime, None), ModelManifest.read())
        return capsys.readouterr().out

    found = output(lr_schedule="wsd", lr_decay_ratio=0.04)
    assert "warning: lr_decay_ratio 0.04 of 12 steps is rounded to 0 steps of decay: the learning rate of the" in found
    assert "last step is 3.00e-03, and min_lr_ratio asks for 3.00e-04: raise lr_decay_ratio to 0.083 or more" in found
    assert "warning" not in output(lr_schedule="wsd", lr_decay_ratio=0.083)
    for schedule in ("wsd", "cosine", "linear"):
        found = output(lr_schedule=schedule, lr_decay_steps=1000)
        assert "warning: lr_decay_steps 1000 is more than the 12 steps of the training: the learning rate" in found
        assert "warning" not in output(lr_schedule=schedule, lr_decay_steps=12)
    assert "warning" not in output(lr_schedule="constant", lr_decay_steps=1000)


def test_what_a_first_training_gets_wrong_is_a_warning(
    training: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(training.path)
    monkeypatch.setattr("sys.argv", ["plan"])
    monkeypatch.setattr(peak_memory, "measure", lambda *_, **__: PeakMemory(GIB, False, *[0] * 7))

    def output(**changes: Any) -> str:
        training.set(**changes)
        plan.main()
        return capsys.readouterr().out

    found = output()
    assert "warning" not in found and "divide" not in found
    assert "plan: 2 ranks x 2 rows x 2 accumulation steps = 8 rows per step\n" in found
    assert "plan: 14 rows are held out, 12.7% of all" in found
    decayed = re.search(r"weight decay 0.1 for (\d+) of (\d+) parameters", found.replace(",", ""))
    assert decayed
    assert 0.98 * int(decayed[2]) < int(decayed[1]) < int(decayed[2])  # norms do not
    assert "warning: warmup_steps 12 lasts until the end" in output(warmup_steps=12)
    found = output(warmup_steps=24, max_steps=4)
    assert "the learning rate rises to 5.00e-04 in the last of 4 steps" in found  # 4/24 of 0.003
    assert "warning" not in output(warmup_steps=3)
    assert "3 ranks (plan.num_ranks) cannot train, and their memory is not known: total_batch_size 8 is not" in output(
        plan={"num_ranks": 3}
    )
    hybrid = {"preset": "multi_node_fsdp"}
    assert "set fsdp.size to the GPUs of a node" in output(plan={"num_ranks": 2}, fsdp=hybrid)
    assert "set fsdp.size" not in output(fsdp={**hybrid, "size": 2})
    training.set(fsdp={"preset": "single_node_fsdp", "size": None})
    with pytest.raises(StageError, match="not a multiple of batch_size 3 x 2 ranks: use total_batch_size 6 or 12"):
        output(plan={"num_ranks": 2}, batch_size=3)
    training.set(batch_size=2)
    monkeypatch.setattr(plan, "_LEAST_HELD_OUT", 0.13)
    assert "warning: only 12.7% of the rows are held out: splits have equal numbers of files" in output()


def test_a_run_that_cannot_be_extended_is_refused(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    monkeypatch.setattr("sys.argv", ["plan"])
    monkeypatch.setattr(peak_memory, "measure", lambda *_, **__: PeakMemory(GIB, False, *[0] * 7))
    training.set(extend_from="0123456789abcdef")
    with pytest.raises(
        StageError, match=r"extend_from: run 0123456789abcdef cannot be extended:\nthere is no finished"
    ):
        plan.main()


def test_a_tokenizer_that_was_changed_is_refused(
    training: Project, params: TrainParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(training.path)
    (training / "data/tokenizer.json").write_text("{")
    with pytest.raises(StageError, match=r"tokenizer\.json"):
        plan.preview(params, ModelManifest.read())


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused(
    training: Project, params: TrainParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(training.path)
    runtime = dataclasses.replace(plan.load_params(TrainRuntime, "runtime"), ckpt_minutes=None)  # freq 2, keep 2
    small = dataclasses.replace(plan.load_params(TrainParams), max_steps=4)
    model, rows = ModelManifest.read(), PackedTokens.read(plan.TRAIN)
    needs = plan.estimate(small, model, rows, rows)

    def free(checkpoints: float) -> None:
        size = int(checkpoints * needs.checkpoint_bytes) + needs.model_bytes
        monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))

    free(2)  # those of steps 2 and 4
    plan.check_disk(small, runtime, needs)
    free(1.9)
    with pytest.raises(StageError, match=r"2 checkpoints and the model need .* CHECKPOINT_ROOT to a larger disk"):
        plan.check_disk(small, runtime, needs)
    long = plan.load_params(TrainParams)
    free(3.9)  # two, the best, and the one that is being written
    needs_of_long = plan.estimate(long, model, rows, rows)
    for frequency, minutes in ((2, None), (None, 5)):
        often = dataclasses.replace(runtime, ckpt_freq=frequency, ckpt_minutes=minutes)
        with pytest.raises(StageError, match="4 checkpoints and the model need"):
            plan.check_disk(long, often, needs_of_long)
    by_time = dataclasses.replace(runtime, ckpt_freq=4, ckpt_minutes=15)
    best = dataclasses.replace(small, export_from="best")
    for chosen, saved in ((small, by_time), (best, dataclasses.replace(runtime, ckpt_freq=4))):
        with pytest.raises(StageError, match="4 checkpoints and the model need"):
            plan.check_disk(chosen, saved, needs)
    free(3)
    plan.check_disk(long, runtime, dataclasses.replace(needs_of_long, validation_rows=0))
    free(1.9)
    own = plan.describe(small).directory / "step-00000002"
    own.mkdir(parents=True)
    (own / "data").write_bytes(bytes(needs.checkpoint_bytes))
    plan.check_disk(small, runtime, needs)


def test_rows_are_shown_with_their_documents_and_what_is_not_predicted() -> None:
    words = ["<eos>", "the", " cat", "\n", " sat", "\x1b[2J", *(f" {number}" for number in range(200))]

    def decode(ids: list[int]) -> str:
        return "".join(words[token] for token in ids).removeprefix(" ")

    row = np.array([2, 3, 4, 0, 1, 2, 0, 5, 4], dtype=np.int32)
    line = f"  {'-' * 8}"
    assert preview.render(row, decode, 0, {0}, document_mask=True).split("\n") == [
        "  ⟦cat⟧⏎ sat⟪<eos>⟫", line, "  ⟦the⟧ cat⟪<eos>⟫", line, r"  ⟦\x1b[2J⟧ sat",
    ]  # fmt: skip
    assert preview.render(row, decode, 0, {0}, document_mask=False).startswith("  ⟦cat⟧⏎ sat⟪<eos>⟫\n")
    assert "⟦the⟧" not in preview.render(row, decode, 0, {0}, document_mask=False)
    long = preview.render(np.tile(np.arange(6, 206, dtype=np.int32), 4), decode, 0, {0}, document_mask=True)
    assert "characters ..." in long
    assert long.endswith(" 198 199")
    assert len(long) < 1000
    many = preview.render(np.tile(np.array([1, 0], dtype=np.int32), 100), decode, 0, {0}, document_mask=True)
    assert many.endswith("... 95 more documents with 190 tokens")


def test_a_row_of_conversations_shows_what_is_trained_and_what_stays_free() -> None:
    words = ["<eos>", "user ", "assistant ", "yes", "<end>"]

    def decode(ids: list[int]) -> str:
        return "".join(words[token] for token in ids)

    row = np.array([1, 2, 3, 4, 1, 2, 4, 0, 0, 0], dtype=np.int32)
    trained = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    starts = torch.tensor([[1, 0, 0, 0, 1, 0, 0, 1, 0, 0]], dtype=torch.bool)
    line = f"  {'-' * 8}"
    assert preview.render(row, decode, 0, {0, 4}, True, Marks(trained, starts)).split("\n") == [
        "  ⟦user assistant ⟧yes⟪<end>⟫", line, "  ⟦user assistant ⟧⟪<end>⟫", line, "  3 tokens stay free",
    ]  # fmt: skip


def test_a_special_token_looks_other_than_its_name_in_a_text() -> None:
    words = ["<eos>", "<|im_start|>", "<|im", "_start|>", "user", "\n"]

    def decode(ids: list[int]) -> str:
        return "".join(words[token] for token in ids)

    row = np.array([1, 4, 5, 2, 3, 1, 0], dtype=np.int32)
    shown = "⟪<|im_start|>⟫user⏎<|im_start|>⟪<|im_start|>⟫⟪<eos>⟫"
    for document_mask in (True, False):
        (line, _) = preview.render(row, decode, 0, {0, 1}, document_mask=document_mask).split("\n")
        assert line == "  ⟦⟪<|im_start|>⟫⟧" + shown.removeprefix("⟪<|im_start|>⟫")
    assert "⟪...⟫" in preview.LEGEND


@pytest.mark.parametrize(
    ("kind", "tied", "changes"),
    [
        # Two gradients of one weight: of the embedding and of the head.
        (transformers.LlamaConfig, True, {"precision": "fp32"}),
        # Gradients of an earlier forward pass.
        (transformers.LlamaConfig, False, {"activation_checkpointing": "full", "total_batch_size": 4}),
        (transformers.MixtralConfig, False, {"precision": "fp32"}),
        # Weights that FSDP2 does not manage, and no gradient of them.
        (transformers.LlamaConfig, True, {"lora_r": 8, "precision": "fp32"}),
        (transformers.LlamaConfig, False, {"lora_r": 8, "precision": "fp32", "activation_checkpointing": "full"}),
    ],
)
def test_a_real_step_allocates_what_is_predicted(
    kind: Any, tied: bool, changes: dict[str, Any], params: TrainParams, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As the allocator of a GPU counts: all bytes of tensors, whether they were written to or not."""
    config = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(kind(**config)).save_pretrained(tmp_path)
    manifest = manifest_of(tmp_path, with_weights=True)
    params = dataclasses.replace(params, **{"batch_size": 2, "total_batch_size": 2, "precision": "bf16", **changes})
    predicted = measure(manifest, params, 1, 16, "cpu").total
    params = peak_memory.choose(manifest, params).params
    mesh = request.getfixturevalue("mesh")  # another process group than that of `measure`
    gc.collect()  # what ends within the block must not have begun before
    with profile(profile_memory=True, acc_events=True) as profiler:
        model = sharded_model.build(manifest, params, mesh, initialize=True).train()
        optimizer, scaler = make_optimizer(model, params), make_grad_scaler(params.precision, torch.device("cpu"))
        rows = torch.ones(params.batch_size, 16, dtype=torch.int32)
        rows[:, 8] = 0
        batch = make_batch(rows, 0, document_mask=True, lengths=params.attention in NEED_LENGTHS)
        batches = [batch] * (params.total_batch_size // params.batch_size)
        with record_function("step"):
            train_step(model, optimizer, scaler, batches, 32, params)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = np.cumsum([event.nbytes() if event.name() == "[memory]" else 0 for event in events])
    start = [event.name() for event in events].index("step")
    assert predicted == pytest.approx(max(allocated[start:]), rel=0.01)


REAL = """
import dataclasses, json, sys
from pathlib import Path
import torch, torch.distributed as dist, transformers
from torch.distributed.device_mesh import init_device_mesh
from stages.base.params_file import load_params
from stages.forward.attention_names import NEED_LENGTHS
from stages.forward.batch import make_batch
from stages.building import sharded_model
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from stages.planning.peak_memory import choose, measure
from stages.training.precision import make_grad_scaler
from stages.training.step import train_step
from stages.launching.timers import Timers, memory_gib, reset_peak_memory
from tests.models import manifest_of

config, num_tokens, changes = json.loads(sys.argv[1])
transformers.LlamaConfig(**config, max_position_embeddings=num_tokens).save_pretrained(".")
manifest = manifest_of(Path(), with_weights=False)
params = load_params(TrainParams, path=Path(sys.argv[2]))
params = dataclasses.replace(params, **{"batch_size": 1, "total_batch_size": 1, "precision": "fp32", **changes})
chosen = choose(manifest, params)
predicted, params = measure(manifest, chosen, 1, num_tokens, "cpu").total / 2**30, chosen.params
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.randn(512, 512, requires_grad=True)
(weight @ weight).sum().backward()  # what a first product allocates for good
start = memory_gib()[0]
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
model = sharded_model.build(manifest, params, mesh, initialize=True)
optimizer, scaler = make_optimizer(model, params), make_grad_scaler(params.precision, torch.device("cpu"))
rows = torch.randint(1, 1000, (1, num_tokens))
rows[:, num_tokens // 2] = 0
model.train()
reset_peak_memory()
batch = make_batch(rows, 0, True, lengths=params.attention in NEED_LENGTHS)
train_step(model, optimizer, scaler, [batch] * params.total_batch_size, num_tokens, params)
print(params.attention, params.loss, predicted, memory_gib()[1] - start)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("vocab_size", "num_layers", "num_tokens", "tied", "changes"),
    [
        (49152, 4, 512, True, {}),
        (128256, 2, 512, True, {}),
        (128256, 2, 512, False, {"precision": "bf16", "total_batch_size": 2, "activation_checkpointing": "full"}),
        (49152, 4, 4096, False, {"precision": "bf16", "total_batch_size": 2}),
        (4096, 6, 4096, True, {}),
        (4096, 6, 4096, True, {"activation_checkpointing": "full"}),
    ],
)
def test_the_resident_set_of_a_real_step_is_what_is_predicted(
    vocab_size: int, num_layers: int, num_tokens: int, tied: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Its growth, in a process whose allocator returns what is freed."""
    config = {"vocab_size": vocab_size, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": num_layers,
              "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": tied}  # fmt: skip
    environment = {**plan.os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "2",
                   "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # fmt: skip
    command = [sys.executable, "-c", REAL, json.dumps([config, num_tokens, changes]), str(REPO / "params.yaml")]
    output = subprocess.run(command, cwd=tmp_path, env=environment, text=True, stdout=-1, check=True).stdout
    predicted, measured = map(float, output.split()[-2:])
    assert predicted == pytest.approx(measured, rel=0.1)
