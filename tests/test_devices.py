"""What concerns GPUs, as far as CPUs can show it; tests/gpu has the rest."""

import dataclasses
import errno
import gzip
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import transformers
from torch import nn
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from stages import launch
from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.building import sharded_model
from stages.building.activation_checkpointing import _contexts
from stages.building.sharded_model import convert_linears
from stages.checkpointing.layout import step_name
from stages.checkpointing.run import describe
from stages.checkpointing.state import TrainState
from stages.forward.batch import make_batch
from stages.forward.loss import loss_sum
from stages.launching.runtime import TrainRuntime
from stages.ranks import torchrun
from stages.ranks.handoff import DIRECTORY
from stages.ranks.memory import memory_limit
from stages.ranks.process_group import check_devices, use_gpu
from stages.ranks.torch_errors import explain_torch_errors
from stages.training.environment import set_environment
from stages.training.params import TrainParams
from stages.training.precision import check_precision, set_float32_precision
from tests.artifacts import write_model
from tests.models import CONFIGS, MIXTRAL, CountedGraphs, full_value, manifest_of
from tests.project import run_python
from tests.ranks import Ranks
from tests.trainings import Given, result


def test_what_changes_no_bit_on_cpus_changes_none_in_a_killed_training_either(fresh: Given, ranks: Ranks) -> None:
    project, reference = fresh
    project.set(
        deterministic=True, activation_checkpointing="selective_op", tf32=True, runtime={"profile_steps": [3, 6]}
    )
    output = ranks.run(project, "kill rank 0 at step 5", status=-9)
    assert output.count("training with") == 1
    assert re.search(
        r"^training with 2 ranks \(CPU\): precision bf16, attention sdpa, loss fused, strategy fsdp FULL_SHARD, "
        r"batch 8 = 2 ranks x 2 rows x 2 accumulation steps, activation checkpointing selective_op, deterministic, "
        r"memory \d\.\d\d of \d+\.\d\d GiB before the first step$",
        output,
        re.M,
    )
    output = ranks.run(project)
    assert {**result(project), "result": ""} == {**reference, "result": ""}
    place = TrainState.of(project.checkpoints() / step_name(12)).place
    assert place and place.variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    [directory] = project.path.glob("outputs/test/profile/*")
    [trace] = directory.iterdir()
    assert trace.name == "steps-5-6.trace.json.gz"
    assert output.count(f"the trace of steps 5 to 6 is outputs/test/profile/{directory.name}/{trace.name}") == 1
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert "[memory]" in names
    assert any("Input Dims" in event.get("args", {}) for event in events)


def test_an_operation_without_a_deterministic_form_is_one_clear_error() -> None:
    torch.use_deterministic_algorithms(True)
    message = r"^deterministic: set it to false, .* \(put_.* does not have a deterministic implementation"
    try:
        with pytest.raises(StageError, match=message), explain_torch_errors("rank 0", ""):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_layer_that_overwrites_what_selective_op_keeps_is_one_clear_error() -> None:
    weight = torch.ones(2, 2, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).mul_(2).exp()

    with (
        pytest.raises(StageError, match=r"^activation_checkpointing selective_op: use full"),
        explain_torch_errors("rank 0", ""),
    ):
        checkpoint(layer, weight, use_reentrant=False, context_fn=_contexts).sum().backward()


def test_other_errors_of_torch_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), explain_torch_errors("rank 0", ""):
        torch.ones(2, 3) @ torch.ones(2, 3)


class TwoGraphs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it
def test_layers_are_compiled_as_one_graph_each_also_with_activation_checkpointing(
    params: TrainParams, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[CountedGraphs] = []
    given: list[dict[str, Any]] = []
    compile_layer = nn.Module.compile

    def compile_fast(layer: nn.Module, **options: Any) -> None:
        given.append(options)
        compile_layer(layer, **options, backend=graphs[-1])

    monkeypatch.setattr(nn.Module, "compile", compile_fast)
    manifest = manifest_of(write_model(tmp_path), with_weights=True)
    batch = make_batch(torch.arange(32).view(2, 16), eos_token_id=7, document_mask=True)
    gradients = []
    kinds = ("none", "full", "selective_op")
    for compiles, kind in ((False, "none"), *((True, kind) for kind in kinds)):
        graphs.append(CountedGraphs())
        changed = dataclasses.replace(params, compile=compiles, activation_checkpointing=kind)
        model = sharded_model.build(manifest, changed, mesh, initialize=True)
        loss_sum(model.train(), batch).backward()
        gradients.append({name: full_value(param.grad) for name, param in model.named_parameters()})
        torch.testing.assert_close(gradients[-1], gradients[0])
    assert given == [{"fullgraph": True}] * 3 * len(kinds)
    # The three layers share a graph of seven products, whose gradients are fourteen.
    assert [found.forward["aten.mm.default"] for found in graphs[1:]] == [7, 7, 7]
    assert [found.backward["aten.mm.default"] - 14 for found in graphs[1:]] == [0, 6, 3]
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert [found.backward[attention] for found in graphs[1:]] == [0, 1, 0]

    layer = TwoGraphs()
    layer.compile(**given[0])
    message = r"^compile: .* cannot be compiled as one graph: set it to false \(.*ranch"
    with pytest.raises(StageError, match=message), explain_torch_errors("rank 0", ""):
        layer(torch.ones(3))


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (InvalidCxxCompiler(), r"^compile: torch finds no compiler of C\+\+: install g\+\+"),
        (UnicodeDecodeError("ascii", b"\xe2", 0, 1, "ordinal"), r"^compile: the compiler failed.* 'ascii' codec"),
        (CppCompileError(["g++", "x" * 600], "Python.h: No such"), r"^compile: the compiler failed.* \(.*Python\.h"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), r"^compile: the compiler failed.*: '/cache'"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_not_called_the_fault_of_the_model(cause: Exception, message: str) -> None:
    def backend(*_: Any) -> Any:
        raise cause

    with pytest.raises(StageError, match=message) as found, explain_torch_errors("rank 0", ""):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert "one graph" not in str(found.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it
def test_two_kinds_of_layers_are_compiled_for_batches_of_any_size(
    params: TrainParams, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First for a validation, whose last batch has fewer rows, then for a training."""
    compile_layer = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **options: compile_layer(layer, **options, backend="eager"))
    config = transformers.Gemma3TextConfig(
        **{**CONFIGS["gemma3"].to_dict(), "num_hidden_layers": 12, "layer_types": None}
    )
    changed = dataclasses.replace(params, compile=True, activation_checkpointing="full", attention="varlen")
    manifest = manifest_of(write_model(tmp_path, config), with_weights=True)
    model = sharded_model.build(manifest, changed, mesh, initialize=True)
    assert len(set(model.config.layer_types)) == 2
    for trains in (False, True):
        model.train(trains)
        for number, num_rows in enumerate((4, 4, 4, 3, 1)):
            rows = torch.randint(1, 100, (num_rows, 32), generator=torch.Generator().manual_seed(number))
            rows[:, torch.arange(2, 30, 1 + number)] = 7
            with torch.set_grad_enabled(trains):
                loss = loss_sum(model, make_batch(rows, eos_token_id=7, document_mask=True, lengths=True))
            if trains:
                loss.backward()


def test_a_router_loss_cannot_be_compiled(params: TrainParams, tmp_path: Path) -> None:
    manifest = manifest_of(write_model(tmp_path, MIXTRAL, dtype=None), with_weights=False)
    with pytest.raises(StageError, match="compile true is not possible with the router loss of MixtralForCausalLM"):
        dataclasses.replace(params, compile=True).check_compile(manifest)
    params.check_compile(manifest)


ENVIRONMENT = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE"),
)


OF_THE_USER = f"compile-{os.getuid()}-{os.uname().nodename}"


@pytest.fixture
def job(empty_project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files of a Slurm job, in which none of these variables is set."""
    for name in ENVIRONMENT:  # first set, so that it is restored
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(tempfile, "tempdir", str(empty_project))
    return empty_project


def test_the_environment_is_that_of_the_parameters_unless_a_person_has_set_it(
    params: TrainParams, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment(deterministic: bool, num_nodes: int = 1) -> dict[str, str]:
        set_environment(dataclasses.replace(params, deterministic=deterministic), num_nodes)
        return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}

    always = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": str(job / "outputs/.compile"),
        "TRITON_CACHE_DIR": str(job / "outputs/.compile/triton"),
    }
    assert environment(deterministic=False) == always
    exact = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
    assert environment(deterministic=True) == always | exact
    theirs = dict.fromkeys(ENVIRONMENT, "theirs")
    del theirs["PYTORCH_ALLOC_CONF"]  # its older name is enough
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    assert environment(deterministic=True) == theirs


def test_nodes_do_not_share_compiled_code(params: TrainParams, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor users: what is in the cache is executed."""
    cache = job / OF_THE_USER
    for number in ("17", "18"):  # of two jobs, which would leave a directory each
        monkeypatch.setenv("SLURM_JOB_ID", number)
        set_environment(params, num_nodes=2)
    found = os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]
    assert found == (str(cache), str(cache / "triton"))
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    with pytest.raises(StageError, match=f"{OF_THE_USER} is not a directory of this user alone"):
        set_environment(params, num_nodes=2)
    cache.rmdir()
    cache.symlink_to(job)
    with pytest.raises(StageError, match=f"{OF_THE_USER} is not a directory of this user alone"):
        set_environment(params, num_nodes=2)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(job / "own"))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    set_environment(params, num_nodes=2)
    assert os.environ["TRITON_CACHE_DIR"] == str(job / "own/triton"), "not in the one that somebody else has made"


@pytest.mark.parametrize(("kind", "expected"), [("ext4", ".compile"), ("nfs4", OF_THE_USER), ("lustre", OF_THE_USER)])
def test_jobs_of_one_node_that_share_a_disk_do_not_share_compiled_code(
    params: TrainParams, job: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: str
) -> None:
    mounts = [SimpleNamespace(mountpoint="/", fstype=kind, opts="rw")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    set_environment(params)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name == expected


OF_A_RANK = """
import os, sys, types
from stages import train
def found(*launched):
    return print(os.environ["TORCHINDUCTOR_CACHE_DIR"], "torch" in sys.modules, end="") or True
sys.modules["stages.launching.rank"] = types.SimpleNamespace(train=found)
sys.modules["stages.ranks.torch_errors"] = types.SimpleNamespace(LostConnection=ValueError)
train.main()
"""
"""Prints where compiled code is, and whether torch is imported, which would have decided that."""


@pytest.mark.usefixtures("here")
def test_a_rank_has_its_compiled_code_in_the_temporary_directory_of_its_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "SLURM_JOB_ID": "17", "TMPDIR": str(tmp_path)})
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    handed: dict[str, str] = {}
    monkeypatch.setattr(torchrun, "run", lambda *args: handed.update(os.environ) or 0)
    monkeypatch.setattr(torchrun, "count_srun_nodes", lambda *args: 2)
    monkeypatch.setattr(launch, "on_stop_signals", lambda stop: None)
    described, runtime = describe(load_params(TrainParams)), load_params(TrainRuntime, "runtime")
    assert launch._train(described, dataclasses.replace(runtime, nproc_per_node=1), lambda status: None) == 0
    for node in (tmp_path / "n1", tmp_path / "n2"):
        node.mkdir()
        of_node = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TMPDIR": str(node)}
        rank = run_python(OF_A_RANK, **{**handed, **of_node, DIRECTORY: str(tmp_path)})
        assert rank.stdout == f"{node / OF_THE_USER} False", rank.stderr


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that there are GPUs of these compute capabilities."""

    def pretend(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: f"NVIDIA GPU {device}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: capabilities[device])

    return pretend


def test_fp8_is_for_gpus_that_have_it(params: TrainParams, gpus: Callable[..., None]) -> None:
    fp8 = dataclasses.replace(params, precision="fp8", batch_size=2)
    check_precision(params, seq_length=3)
    for capabilities, found in (((), "not CPUs: use bf16"), (((9, 0), (8, 0)), "not NVIDIA GPU 1: use bf16")):
        gpus(*capabilities)
        with pytest.raises(StageError, match=rf"^precision fp8 needs GPUs of compute capability 8.9 .*, {found}$"):
            check_precision(fp8, seq_length=32)
    gpus((8, 9), (10, 0))
    check_precision(fp8, seq_length=32)
    with pytest.raises(StageError, match=r"a multiple of 16 tokens per forward pass, not batch_size 2 x seq_length 30"):
        check_precision(fp8, seq_length=30)


def test_fp8_is_for_the_linear_layers_that_gpus_can_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[nn.Module] = []

    def convert(layer: nn.Module, module_filter_fn: Callable[[nn.Module, str], bool]) -> None:
        converted.extend(module for name, module in layer.named_modules() if module_filter_fn(module, name))

    fake: Any = ModuleType("torchao.float8")
    fake.convert_to_float8_training = convert
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    layer = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(24, 16))
    convert_linears([layer])
    assert converted == [layer[0]]
    with pytest.raises(StageError, match="precision fp8: no layer of the model has linear modules whose sizes"):
        convert_linears([nn.Linear(24, 16)])


def test_tf32_is_for_gpus_and_only_where_it_is_wanted(gpus: Callable[..., None]) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_float32_precision(tf32=True)
        assert torch.get_float32_matmul_precision() == before[0]  # of CPUs
        gpus((8, 0))
        for tf32, expected in ((True, "high"), (False, "highest")):
            set_float32_precision(tf32)
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (expected, tf32)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_more_ranks_than_gpus_are_one_clear_error(gpus: Callable[..., None]) -> None:
    gpus((9, 0), (9, 0))
    assert check_devices(None) == check_devices(1) == check_devices(2) == 2
    with pytest.raises(StageError, match=r"3 ranks need 3 GPUs, but torch can use 2 here: set runtime.nproc_per_node"):
        check_devices(3)


def test_gpus_that_torch_cannot_use_are_an_error_unless_they_are_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()  # in a container without GPUs
    assert check_devices(2, tmp_path) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # whoever names GPUs wants to train on them
    with pytest.raises(StageError, match=r"^CUDA_VISIBLE_DEVICES is 0,1, but torch .* cannot use a GPU"):
        check_devices(2, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia0").touch()
    for version, remedy in (("13.0", "check the driver with `nvidia-smi`"), (None, "install the CUDA build with")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(StageError, match=rf"this machine has GPUs, but torch .* cannot use a GPU: {remedy}"):
            check_devices(2, tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")  # the machine has no such GPU: its driver works
    wanted = r"^CUDA_VISIBLE_DEVICES is 99, but torch .* cannot use a GPU: check with `nvidia-smi -L`"
    with pytest.raises(StageError, match=wanted):
        check_devices(2, tmp_path)
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert check_devices(2, tmp_path) == 0


def test_a_gpu_that_does_not_compute_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = "CUDA error: no kernel image is available for execution on the device\nCompile with"
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock(side_effect=torch.AcceleratorError(error)))
    with pytest.raises(StageError, match=r"^GPU 1 does not work \(CUDA error: no kernel image is .* device\): check"):
        use_gpu(1)


@pytest.mark.parametrize(("own", "file"), [
    ("0::/slurm/job_1/step_0\n", "slurm/job_1/memory.max"),
    ("3:cpu:/x\n4:memory:/slurm/job_1\n", "memory/slurm/job_1/memory.limit_in_bytes"),
])  # fmt: skip
def test_the_memory_of_a_job_is_its_limit(tmp_path: Path, own: str, file: str) -> None:
    (tmp_path / "own").write_text(own)
    assert memory_limit(tmp_path / "own", tmp_path) == psutil.virtual_memory().total
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("12345\n")
    assert memory_limit(tmp_path / "own", tmp_path) == 12345
