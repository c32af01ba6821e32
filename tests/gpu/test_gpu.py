"""What only a GPU can show. Without one, all tests are skipped; with several, the first is used."""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.checkpointing.layout import CheckpointManifest, list_checkpoints, step_name
from stages.ranks.handoff import DIRECTORY
from stages.scoring import packages
from tests.conftest import make_adapted
from tests.faults import environment
from tests.project import GPUS, LAUNCH, REPO, Project, make_nano, make_pipeline, run_python, save_weights
from tests.trainings import newest_checkpoint, weights

HAS_LM_EVAL = packages.directory().is_dir()
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
"""Rows of 64 values, which are quantized together."""

pytestmark = [pytest.mark.skipif(not GPUS, reason="needs a GPU"), pytest.mark.timeout(900)]

GPU = {"CUDA_VISIBLE_DEVICES": GPUS.split(",")[0]}
CODE = {**GPU, "PYTHONPATH": os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])}
"""For Python code that imports the stages of this repository, and what else the environment adds."""

PROBE = """
from itertools import product
import torch
from transformers import AutoConfig
from stages.forward.attention_choice import _test
from stages.forward.small_copy import small_config
names = ["llama", "qwen3", "mistral", "phi3", "gpt_neox"]
if torch.DTYPE != torch.float32:  # with heads of 256 values, flex needs more shared memory in it than GPUs have
    names.append("gemma3_text")
refusals = {}
for name in names:
    sizes = {"attention_dropout": 0.0} if name == "gpt_neox" else {}
    small = small_config(AutoConfig.for_model(name, **sizes))
    for mask, is_cut in product((True, False), (False, True) if "ATTENTION" == "varlen" else (False,)):
        torch.compiler.reset()  # after eight recompilations, flex is not compiled any more
        # In this process: `refusal` would start one each time.
        if reason := _test(small, "ATTENTION", mask, torch.DTYPE, "cuda", (), is_cut):
            refusals[name, mask, is_cut] = reason
print("refused", refusals)
"""
STEPS = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from stages.forward.batch import make_batch
from stages.forward.loss import loss_sum
from stages.forward import attention
from stages.forward.transfer import to_device
sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=512,
             num_hidden_layers=4, vocab_size=512, sliding_window=300, pad_token_id=None)
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model("mistral", **sizes), attn_implementation="varlen", dtype=torch.bfloat16
).cuda()
layers = model.model.layers
for layer in layers:
    layer.compile(fullgraph=True)
generator = torch.Generator().manual_seed(0)
def batch(documents):
    rows = torch.randint(1, 512, (2, 1024), generator=generator)
    rows[:, torch.randperm(1024, generator=generator)[:documents]] = 0
    made = make_batch(rows, 0, document_mask=True, lengths=True)
    return to_device(made, "cuda")
batches = [batch(documents) for documents in (3, 40, 9, 40, 9, 100, 20, 5)]
for number, one in enumerate(batches):
    if number == 4:  # by now, the number of documents is known to vary, and torch 2.15 has a graph for short ones
        torch.compiler.set_stance("fail_on_recompile")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    loss = loss_sum(model, one)
    loss.backward()
torch.cuda.set_sync_debug_mode("default")
print("finite", bool(loss.isfinite()))
"""

COMPILED = """
import gc
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from stages.forward.attention import activate_kernels
from stages.forward.attention_names import IMPLEMENTATIONS
from stages.forward.batch import make_batch
from stages.forward.loss import loss_sum
from stages.forward.transfer import to_device
from stages.building.activation_checkpointing import checkpoint_activations
sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=512,
             num_hidden_layers=2, vocab_size=512, sliding_window=100, pad_token_id=None)
activate_kernels(())  # as a training with sdpa: never cuDNN, which torch prefers on some GPUs
def gradient(attention, kind, compiles):
    torch.compiler.reset()  # or flex would not be compiled any more after eight recompilations
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mistral", **sizes), attn_implementation=IMPLEMENTATIONS[attention], dtype=torch.bfloat16
    ).cuda().train()
    checkpoint_activations(model, list(model.model.layers), kind)
    for layer in model.model.layers if compiles else ():
        layer.compile(fullgraph=True)
    rows = torch.randint(1, 512, (2, 512), generator=torch.Generator().manual_seed(0))
    rows[:, ::150] = 0
    made = make_batch(rows, 0, document_mask=True, lengths=attention == "varlen")
    made = to_device(made, "cuda")
    gc.collect()  # compiled layers are parts of cycles: the model before would be freed at any time
    before = torch.cuda.memory_allocated()
    loss = loss_sum(model, made)
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return torch.cat([param.grad.float().flatten() for param in model.parameters()]), kept
expected, _ = gradient("eager", "none", False)
for attention in ("varlen", "flex", "sdpa"):
    kept = {}
    for kind in ("none", "selective_op", "full"):
        found, kept[kind] = gradient(attention, kind, True)
        assert (found - expected).norm() < 0.05 * expected.norm(), (attention, kind)
    print(attention, kept)
    assert kept["full"] < kept["selective_op"] < kept["none"], (attention, kept)
print("all near")
"""

STRICT = """
import sys, torch
from stages import train
from stages.training import loop
queue_step, num_steps = loop.train_step, 0
def strict_step(*args):
    global num_steps
    num_steps += 1
    torch.cuda.set_sync_debug_mode("error" if num_steps > 1 else "default")  # the first one sets up libraries
    try:
        return queue_step(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        if num_steps == 1:  # torch was imported before the training set the allocator's variable
            print("segments", {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
loop.train_step = strict_step
sys.argv = ["train"]
train.main()
"""

SHARED = """
import sys
import torch.distributed as dist
from stages import train
from stages.ranks import process_group
process_group.check_devices = lambda num_ranks: 1
join = dist.init_process_group
dist.init_process_group = lambda backend, device_id, **options: join("cpu:gloo,cuda:gloo", **options)
sys.argv = ["train"]
train.main()
"""

FROZEN = """
from pathlib import Path
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from stages.building import frozen_model
from stages.model import meta
sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 1}
latent = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
          "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
tokens = torch.arange(96, device="cuda").view(2, 48)
for config, dtype, kept in (
    (transformers.DeepseekV3Config(**sizes, **latent), torch.bfloat16, "layers.1.mlp.gate.e_score_correction_bias"),
    (transformers.GptOssConfig(**sizes, num_local_experts=4), torch.float16, "norm.weight"),
):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.state_dict()[f"model.{kept}"].add_(14.012)  # no value of bf16 or fp16
    directory = Path(config.model_type)
    model.save_pretrained(directory)
    expected = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).cuda()
    classes = meta.layer_classes(expected)
    found = frozen_model.load(directory, ["model.safetensors"], classes, dtype, "plain", mesh)
    assert found.state_dict()[f"model.{kept}"].dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, expected(tokens).logits), config.model_type
print("all equal")
dist.destroy_process_group()
"""

QUEUED = """
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stages.base.params_file import load_params
from stages.launching.runtime import TrainRuntime
from stages.checkpointing.saver import Saver
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.zeros(1 << 26, device="cuda")
saver = Saver(load_params(TrainRuntime, "runtime"), timeout_minutes=5)
for step in range(1, 6):
    for _ in range(20):
        weight += 1
    tensors, _ = saver._copy({"model": {"weight": weight}})
    weight += 1000  # of the next step
    directory = Path(f"{step}/model")
    saver._write_tensors(directory, tensors["model"])
    weight -= 1000
    found = {"weight": torch.empty(1 << 26)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(directory))
    assert (found["weight"] == 20 * step).all(), step
print("all equal")
"""

LOSS = """
import torch
from torch.nn.functional import cross_entropy, linear
from stages.forward.loss import summed_loss
torch.use_deterministic_algorithms(True)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    torch.manual_seed(0)
    hidden = torch.randn(700, 64, device="cuda").to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(1000, 64, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(0, 1000, (700,), device="cuda")
    labels[::7] = -100
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = cross_entropy(linear(*exact), labels, reduction="sum")
    expected.mul(1 / 77).backward()
    torch.cuda.set_sync_debug_mode("error")
    loss = summed_loss(hidden, labels, weight, num_logits=64000)
    loss.mul(1 / 77).backward()
    torch.cuda.set_sync_debug_mode("default")
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    assert loss.dtype == torch.float32 and abs(loss.item() / expected.item() - 1) < tolerance
    for found, reference in zip((hidden, weight), exact):
        assert (found.grad.double() - reference.grad).norm() < tolerance * reference.grad.norm(), dtype
hidden = torch.randn(16384, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(128256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
summed_loss(hidden, torch.randint(0, 128256, (16384,), device="cuda"), weight).backward()
print("peak", (torch.cuda.max_memory_allocated() - before) / 2**30)
"""


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    """What the tests start must see it, or all would train on the CPU and pass."""
    found = run_python("import torch; assert torch.cuda.is_available()", **GPU)
    assert found.returncode == 0, found.stderr


def train(project: Project, fault: str = "", status: int = 0, **variables: str) -> str:
    return project.run(*LAUNCH, status=status, timeout=600, **{**GPU, **variables, **environment(fault)})


def at_once(*calls: Callable[[], str]) -> list[str]:
    """Call each in a thread: most of the time that a training takes here, its processes import."""
    with ThreadPoolExecutor() as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def losses(project: Project) -> np.ndarray:
    return np.genfromtxt(newest_checkpoint(project, 12) / "history.tsv", delimiter="\t", names=True)["loss"][1:]


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_a_killed_training_continues(training: Project, compile_blocks: bool) -> None:
    """To the same losses, up to the rounding of kernels that sum in any order."""
    training.set(precision="bf16", compile=compile_blocks)
    undisturbed = training.copy(training.path.with_name("undisturbed"))
    at_once(partial(train, undisturbed), partial(train, training, "kill rank 0 at step 5", status=1))
    assert re.search(r"resuming from step [24] of 12", train(training))
    np.testing.assert_allclose(losses(training), losses(undisturbed), rtol=0.01)
    metrics = training.json("outputs/train_metrics.json")
    assert 0 < metrics["cost"]["memory_peak_gib"] < 10
    times = metrics["cost"]["milliseconds"]
    assert times.keys() == {"data", "forward", "backward", "update", "validation", "saving", "other"}
    assert all(value >= 0 for value in times.values())
    assert metrics["cost"]["steps"] == 12


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_cpu_waits_for_nothing_in_a_step(training: Project, tmp_path: Path, precision: str) -> None:
    """An operation that would wait is an error."""
    training.set(precision=precision)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", DIRECTORY: str(tmp_path)}
    output = training.run("python", "-c", STRICT, timeout=600, **CODE, **rank)
    assert "step 12/12" in output
    assert "segments {True}" in output


@pytest.mark.parametrize("changes", [{}, {"context_parallel": 2}, {"fsdp": {"strategy": "ddp"}}])
def test_ranks_that_share_a_gpu_train_as_one_does(training: Project, changes: dict[str, Any]) -> None:
    """Their collectives are those of gloo: NCCL wants a GPU for each rank."""
    training.set(precision="bf16", attention="varlen")
    alone = training.copy(training.path.with_name("alone"))
    train(alone)
    training.set(**changes)
    directory = training.path.with_name("found")
    directory.mkdir()
    ranks = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", DIRECTORY: str(directory)}
    started = [training.popen("python", "-c", SHARED, **CODE, **ranks, RANK=str(rank)) for rank in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    np.testing.assert_allclose(losses(training), losses(alone), rtol=0.01)


def test_a_frozen_model_keeps_in_fp32_what_its_class_does(training: Project) -> None:
    """Sharded, it computes the bits of `from_pretrained`."""
    assert "all equal" in training.run("python", "-c", FROZEN, **CODE)


def test_a_loss_that_is_not_finite_is_named_and_in_no_checkpoint(training: Project) -> None:
    """Although its numbers are read when the next step is queued."""
    assert "step 6: the gradient norm is nan" in train(training, "nan rank 0 at step 5", status=2)
    assert [path.name for path in list_checkpoints(training.checkpoints())] == [step_name(step) for step in (4, 2)]
    assert "resuming from step 4 of 12" in train(training)


def test_an_asynchronous_save_has_the_values_of_its_step(training: Project) -> None:
    """The GPU copies while the next step is queued."""
    assert "all equal" in training.run("python", "-c", QUEUED, **GPU)


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_a_deterministic_training_that_was_killed_continues_to_the_same_bits(
    training: Project, compile_blocks: bool
) -> None:
    training.set(
        precision="bf16", deterministic=True, activation_checkpointing="selective_op", compile=compile_blocks,
        runtime={"profile_steps": [9, 10]},
    )  # fmt: skip
    undisturbed = training.copy(training.path.with_name("undisturbed"))
    output, _ = at_once(partial(train, undisturbed), partial(train, training, "kill rank 0 at step 5", status=1))
    assert re.search(
        r"^training with 1 rank \(NVIDIA .*\): precision bf16, attention .*, strategy none, batch 8 = 1 rank x .*, "
        r"activation checkpointing selective_op, (compiled, )?deterministic, memory ",
        output,
        re.M,
    )
    assert re.search(r"resuming from step [24] of 12", train(training))
    assert weights(training) == weights(undisturbed)
    for project in (training, undisturbed):
        [directory] = project.path.glob("outputs/test/profile/*")
        assert {path.name for path in directory.iterdir()} == {
            "steps-9-10.trace.json.gz",
            "steps-9-10.memory.pickle",
        }
    assert (training / "outputs/.compile").is_dir() == compile_blocks


@pytest.mark.parametrize("base", [None, "nf4"])
def test_adapters_that_were_killed_continue_to_the_same_bits(tmp_path: Path, base: str | None) -> None:
    """Compiled, and with dropout."""
    project = Project(tmp_path / "adapted")
    project.path.mkdir()
    make_adapted(project, **WIDE)
    project.set(lora_base=base, lora_target_modules="all-linear", compile=True, deterministic=True)
    undisturbed = project.copy(tmp_path / "undisturbed")
    output, _ = at_once(partial(train, undisturbed), partial(train, project, "kill rank 0 at step 5", status=1))
    assert "LoRA of rank 4" + " on NF4" * bool(base) in output
    assert re.search(r"resuming from step [24] of 12", train(project))
    assert weights(project) == weights(undisturbed)


def test_all_stages_run_on_a_gpu(tmp_path: Path) -> None:
    """Without DVC, which a GPU machine may lack. Adapters are merged, and the loss stays that of the training."""
    project = Project(tmp_path / "pipeline")
    make_pipeline(project)
    shutil.rmtree(project / "models/nano")
    make_nano(project / "models/nano", **WIDE)
    save_weights(project / "models/nano")
    questions = [{"question": f"Which number follows {number}?", "answer": f"{number + 1}"} for number in range(20)]
    (project / "evals/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    tasks = ["evals/sums.yaml"] if HAS_LM_EVAL else []
    if HAS_LM_EVAL:  # a GPU machine may have no network to install it from
        (project / packages.directory().parent.name).symlink_to(packages.directory().parent)
    project.set(lora_r=4, lora_base="nf4", precision="bf16", fast_encoder=False, tasks=tasks)
    stages = ["organize", "extract", "deduplicate", "download", "pack", "plan", "launch", "consolidate"]
    for stage in [*stages, "evaluate", "score", "report"]:
        project.run("python", "-m", f"stages.{stage}", timeout=600, **GPU)
    trained = project.json("outputs/train_metrics.json")["validation_loss"]
    assert project.json("outputs/metrics.json")["validation_loss"] == pytest.approx(trained, rel=0.02)
    assert project.json("outputs/scores.json").keys() == {Path(task).stem for task in tasks}


def test_tf32_is_near_fp32(training: Project) -> None:
    training.set(precision="fp32")
    exact = training.copy(training.path.with_name("exact"))
    training.set(tf32=True)
    output, _ = at_once(partial(train, training), partial(train, exact))
    assert "precision fp32, TF32, " in output
    np.testing.assert_allclose(losses(training), losses(exact), rtol=0.01)
    assert not np.array_equal(losses(training), losses(exact))


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")
@pytest.mark.parametrize("changes", [{"precision": "fp8"}, {"optimizer": "adamw_8bit"}])
def test_8_bits_are_near_bf16_and_resume(training: Project, changes: dict[str, str]) -> None:
    training.set(precision="bf16")
    bf16 = training.copy(training.path.with_name("bf16"))
    training.set(**changes)
    at_once(partial(train, bf16), partial(train, training, "kill rank 0 at step 5", status=1))
    assert re.search(r"resuming from step [24] of 12", train(training))
    np.testing.assert_allclose(losses(training), losses(bf16), rtol=0.05)
    manifests = [CheckpointManifest.read(newest_checkpoint(project, 12)) for project in (training, bf16)]
    assert manifests[0].tensors.keys() == manifests[1].tensors.keys()


def test_more_ranks_than_gpus_and_broken_ones_end_the_launch(training: Project) -> None:
    training.set(runtime={"nproc_per_node": 2})
    assert "2 ranks need 2 GPUs, but torch can use 1 here" in train(training, status=2)
    output = train(training, status=2, CUDA_VISIBLE_DEVICES="99")
    assert "CUDA_VISIBLE_DEVICES to -1" in output
    assert "Traceback" not in output


def test_a_gpu_trains_on_the_same_rows_as_two_ranks_on_the_cpu_to_the_same_losses(training: Project) -> None:
    training.set(precision="fp32")
    cpu = training.copy(training.path.with_name("cpu"))
    tolerances: dict[Project, dict[str, float]] = {}
    for number, (changes, tolerance) in enumerate((
        ({}, {"rtol": 0, "atol": 1e-3}),
        ({"precision": "bf16", "loss": "fused"}, {"rtol": 0.01}),
        ({"precision": "bf16", "loss": "plain"}, {"rtol": 0.01}),
    )):  # fmt: skip
        gpu = training.copy(training.path.with_name(str(number)))
        gpu.set(**changes)
        tolerances[gpu] = tolerance
    at_once(partial(train, cpu, CUDA_VISIBLE_DEVICES=""), *(partial(train, gpu) for gpu in tolerances))
    for gpu, tolerance in tolerances.items():
        np.testing.assert_allclose(losses(gpu), losses(cpu), **tolerance)


def test_the_fused_loss_is_exact_small_and_without_waits(training: Project) -> None:
    """Of 16 384 tokens, whose logits have 7.8 GiB in fp32."""
    environment = {**CODE, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    output = training.run("python", "-c", LOSS, **environment)
    assert float(output.split("peak")[1]) < 6.5  # 2**29 logits at a time, of GPUs with 80 GB and more


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("varlen", "bfloat16"),
        ("varlen", "float16"),
        ("flex", "float32"),
        ("sdpa", "bfloat16"),
    ],
)
def test_documents_are_computed_as_if_each_were_alone(training: Project, attention: str, dtype: str) -> None:
    """Without leaks, with windows, with heads that share keys; logits and gradients. `varlen` in slices, too."""
    code = PROBE.replace("ATTENTION", attention).replace("DTYPE", dtype)
    assert "refused {}" in training.run("python", "-c", code, timeout=600, **CODE)


def test_varlen_neither_waits_nor_recompiles(training: Project) -> None:
    output = training.run("python", "-c", STEPS, timeout=600, **CODE)
    assert "finite True" in output


def test_compiled_layers_keep_what_activation_checkpointing_wants(training: Project) -> None:
    """With each attention function, and the gradients stay the same."""
    output = training.run("python", "-c", COMPILED, timeout=600, **CODE)
    assert "all near" in output
