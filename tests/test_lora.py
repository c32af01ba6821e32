"""Adapters (LoRA): trained as all weights are, whatever happens; stored as PEFT stores them; merged exactly."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import multiprocessing
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from stages import launch
from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.building import lora, sharded_model
from stages.checkpointing import run
from stages.checkpointing.layout import CheckpointManifest, step_name
from stages.export import mapped, merged
from stages.forward import adapter_probe
from stages.forward.adapter_probe import describe_linears
from stages.model import adapters, headers, meta
from stages.model.manifest import ModelManifest
from stages.training.params import TrainParams
from tests.conftest import made_once, make_training
from tests.models import CONFIGS, full_value, manifest_of
from tests.project import Project, flip_bit, save_weights
from tests.ranks import Ranks
from tests.test_sharding import Training, with_fsdp
from tests.trainings import Given, newest_checkpoint, result, weights

KILLED = -9
MODEL, ADAPTER = "outputs/test/model", "outputs/test/adapter"


def make_adapted(project: Project, **config: Any) -> None:
    """A training of adapters beside the stored weights of a small model."""
    make_training(project)
    path = project / "models/nano/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path.parent))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)  # so large that bits of a gradient show
    model.save_pretrained(path.parent)
    project.set(lora_r=4, lora_alpha=8, lora_dropout=0.1)
    project.set(runtime={"async_checkpoint": False})
    project.run("python", "-m", "stages.download")


@pytest.fixture(scope="session")
def _adapted(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return made_once(tmp_path_factory, "adapted", make_adapted)


@pytest.fixture
def adapted(_adapted: Project, tmp_path: Path) -> Project:
    return _adapted.copy(tmp_path / "adapted")


@pytest.fixture(scope="session")
def references(
    _adapted: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], Given]:
    """A function that gives, for a precision and tied embeddings or not, a project after a run without faults."""
    made: dict[tuple[str, bool], Given] = {}

    def make(precision: str, tied: bool) -> Given:
        if (precision, tied) not in made:
            project = Project(tmp_path_factory.mktemp("adapters") / "project")
            project.path.mkdir()
            make_adapted(project, tie_word_embeddings=tied)
            project.set(precision=precision, eval_freq=100)
            ranks.run(project)
            made[precision, tied] = project, result(project)
        return made[precision, tied]

    return make


def export(project: Project) -> tuple[Path, Path]:
    """The model and the adapters of a training that has ended."""
    described = run.describe(load_params(TrainParams))
    launch.write_outs(described, described.directory / step_name(described.total_steps))
    for name in (MODEL, ADAPTER):
        shutil.rmtree(project / name, ignore_errors=True)
    project.run("python", "-m", "stages.consolidate")
    return project / MODEL, project / ADAPTER


@pytest.mark.parametrize(("precision", "tied"), [pytest.param("fp32", True, marks=pytest.mark.slow), ("bf16", False)])
def test_adapters_killed_many_times_end_with_the_same_result(
    references: Callable[[str, bool], Given], ranks: Ranks, tmp_path: Path, precision: str, tied: bool
) -> None:
    """With dropout; files of adapters are tiny, so a kill hits their rename rather than their bytes."""
    given, reference = references(precision, tied)
    project = given.copy(tmp_path / "project")
    shutil.rmtree(project / "outputs")
    ranks.run(project, "kill rank 1 at step 3", KILLED)
    ranks.run(project, "kill rank 0 in update 5", KILLED)
    project.set(runtime={"async_checkpoint": True})
    ranks.run(project, "kill rank 0 at os.rename:.*step-00000006.tmp$", KILLED)
    ranks.run(project, "kill rank 1 at step 9", KILLED)
    output = ranks.run(project)
    assert "resuming from step" in output and "LoRA of rank 4" in output
    assert result(project) == reference
    tensors = CheckpointManifest.read(newest_checkpoint(project, 12)).tensors
    assert len(tensors) == 2 * 7 * 2 and all(map(adapters.is_adapter, tensors))


def test_a_flipped_bit_of_the_initial_weights_is_refused_on_resume(adapted: Project, ranks: Ranks) -> None:
    ranks.run(adapted, "kill rank 0 at step 5", KILLED)
    flip_bit(adapted / "models/nano/model.safetensors", -1)
    assert "model.safetensors" in ranks.run(adapted, status=2)


def test_another_number_of_ranks_continues(adapted: Project, ranks: Ranks, tmp_path: Path) -> None:
    """With one rank of adapters, a process has no row of A."""
    adapted.set(lora_r=1, lora_dropout=0.0, eval_freq=100)
    found = []
    for number, (first, second) in enumerate([(2, 2), (2, 1), (1, 2)]):
        project = adapted.copy(tmp_path / str(number))
        ranks.run(project, "kill rank 0 at step 5", KILLED, world_size=first)
        ranks.run(project, world_size=second)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project.path)
            _, adapter = export(project)
        found.append(load_file(adapter / adapters.WEIGHTS))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, tensor in other.items():
            assert (tensor - found[0][name]).abs().max() <= 1e-6, name
    assert all(tensor.any() for tensor in found[0].values())  # B, too, has moved


def save_and_load(directory: Path, params: TrainParams) -> list[str]:
    """The names of the parameters that a checkpoint does not give back, with a value of its own in each row."""
    different = []
    for one, two in (({}, {"strategy": "ddp"}), ({"strategy": "ddp"}, {})):
        training = Training(directory / "llama", with_fsdp(params, **one))
        training.train(1)
        wanted = {}
        for number, (name, param) in enumerate(training.model.named_parameters()):
            if adapters.is_adapter(name):
                local = param.to_local() if isinstance(param, DTensor) else param
                for tensor in (local, training.optimizer.state[param]["exp_avg"].to_local()):
                    rank = dist.get_rank() if not one else 0
                    tensor.detach().copy_(torch.arange(tensor.numel()).view_as(tensor) + 1000 * number + 1e5 * rank)
                wanted[name] = full_value(param.detach()).clone()
                wanted[f"{name} exp_avg"] = full_value(training.optimizer.state[param]["exp_avg"]).clone()
        path = directory / f"saved-{len(one)}" / "step-00000001"
        training.save(path)
        other = Training(directory / "llama", with_fsdp(params, **two), initialize=False)
        other.load(path)
        for name, param in other.model.named_parameters():
            if adapters.is_adapter(name):
                found = {name: param.detach(), f"{name} exp_avg": other.optimizer.state[param]["exp_avg"]}
                different += [key for key, value in found.items() if not torch.equal(full_value(value), wanted[key])]
    return different


def losses_of(directory: Path, params: TrainParams) -> dict[str, Any]:
    """Losses, gradients and values after two steps, by what is changed."""
    results = {}
    changes: dict[str, dict[str, Any]] = {
        "": {}, "fused": {"loss": "fused"}, "full": {"activation_checkpointing": "full"},
        "selective_op": {"activation_checkpointing": "selective_op"},
    }  # fmt: skip
    for name, changed in changes.items():
        training = Training(directory / "llama untied, scaled rope", dataclasses.replace(params, **changed))
        steps = training.train(2)
        values = {key: full_value(param.detach()) for key, param in training.model.named_parameters()}
        results[name] = (steps, values)
    whole = Training(directory / "llama untied, scaled rope", with_fsdp(params, strategy="ddp"))
    results["ddp"] = (whole.train(2), {key: full_value(param) for key, param in whole.model.named_parameters()})
    results["managed"] = [name for name, param in whole.model.named_parameters() if isinstance(param, DTensor)]
    return results


def rank_main(rank: int, directory: Path, params: TrainParams) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
    torch.use_deterministic_algorithms(True)
    found = {job.__name__: job(directory, params) for job in (save_and_load, losses_of)}
    dist.destroy_process_group()
    torch.save(found, directory / f"results-{rank}.pt")


@pytest.fixture(scope="module")
def results(params: TrainParams, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    directory = tmp_path_factory.mktemp("adapters")
    for name in ("llama", "llama untied, scaled rope"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).save_pretrained(directory / name)
    adapted = dataclasses.replace(params, lora_r=3, lora_alpha=6, loss="plain", attention="sdpa")
    multiprocessing.spawn(rank_main, (directory, adapted), nprocs=2)
    return [torch.load(directory / f"results-{rank}.pt", weights_only=False) for rank in range(2)]


def test_a_checkpoint_gives_each_row_back_whoever_saved_it(results: list[dict[str, Any]]) -> None:
    assert [found["save_and_load"] for found in results] == [[], []]


def test_adapters_train_alike_however_the_loss_is_computed(results: list[dict[str, Any]]) -> None:
    found = results[0]["losses_of"]
    steps, values = found[""]
    for name in ("full", "selective_op"):
        assert found[name][0] == steps
        assert all(torch.equal(tensor, values[key]) for key, tensor in found[name][1].items()), name
    for name in ("fused", "ddp"):
        for one, two in zip(steps, found[name][0], strict=True):
            assert two == pytest.approx(one, rel=1e-4)
        for key, tensor in found[name][1].items():
            assert (tensor - values[key]).abs().max() <= 1e-4, (name, key)
    assert found["managed"] and all(map(adapters.is_adapter, found["managed"]))  # the rest is held whole, once


def test_a_base_in_the_dtype_of_the_computation_gives_the_same_bits(
    params: TrainParams, mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in fp32 that FSDP2 casts, and needs half of its memory."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32).save_pretrained(tmp_path)
    adapted = dataclasses.replace(
        with_fsdp(params, strategy="fsdp", cpu_offload=False),
        lora_r=3,
        precision="bf16",
        attention="sdpa",
        loss="plain",
    )
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(lora, "compute_dtype", lambda _, dtype=dtype: dtype)
        monkeypatch.setattr("stages.building.sharding._is_whole", lambda *_: False)
        training = Training(tmp_path, adapted)
        assert training.model.get_input_embeddings().weight.dtype == dtype
        training.train(2)
        found.append({key: full_value(param) for key, param in training.model.named_parameters() if "lora" in key})
    assert found[0] and all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())


def test_the_first_values_of_adapters_depend_on_the_seed_alone(params: TrainParams, mesh: Any, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32).save_pretrained(tmp_path)
    manifest, found = manifest_of(tmp_path, with_weights=True), []
    for state, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(state)
        adapted = dataclasses.replace(params, lora_r=3, seed=seed, attention="sdpa", loss="plain")
        model = sharded_model.build(manifest, adapted, mesh, initialize=True)
        found.append({name: full_value(param) for name, param in model.named_parameters() if name.endswith(adapters.A)})
    one, same, other = found
    assert one and all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def exported(_adapted: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a model and its adapters, in fp32."""
    project = _adapted.copy(tmp_path_factory.mktemp("exported") / "project")
    ranks.run(project)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.path)
        export(project)
    return project


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT about transformers
def test_peft_loads_the_adapters_and_its_merge_is_the_model(exported: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported.path)
    base = AutoModelForCausalLM.from_pretrained("models/nano")
    model = peft.PeftModel.from_pretrained(base, exported / ADAPTER).eval()
    stored = load_file(exported / ADAPTER / adapters.WEIGHTS)
    loaded = peft.get_peft_model_state_dict(model)
    assert loaded.keys() == stored.keys() and all(torch.equal(loaded[name], stored[name]) for name in stored)
    assert all(tensor.any() for tensor in stored.values())
    tokens = torch.arange(1, 33)[None]
    with torch.no_grad():
        theirs = model(tokens).logits
    # The same adapters in the model that is trained.
    manifest = ModelManifest.read()
    ours = AutoModelForCausalLM.from_pretrained("models/nano")
    lora.add_adapters(ours, manifest, load_params(TrainParams))
    for name, module in ours.named_modules():
        if isinstance(module, lora.LoraLinear):
            module.lora_A.to_empty(device="cpu")
            module.lora_B.to_empty(device="cpu")
            with torch.no_grad():
                module.lora_A.weight.copy_(stored[adapters.stored_name(name + adapters.A)])
                module.lora_B.weight.copy_(stored[adapters.stored_name(name + adapters.B)])
    with torch.no_grad():
        assert torch.equal(ours.eval()(tokens).logits, theirs)
        merged = AutoModelForCausalLM.from_pretrained(exported / MODEL)(tokens).logits
        assert (merged - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    expected = model.merge_and_unload().state_dict()
    found = load_file(exported / MODEL / "model.safetensors")
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    # Rounded once.
    exported.set(export_dtype="bf16")
    exported.run("python", "-m", "stages.consolidate")
    for name, tensor in load_file(exported / MODEL / "model.safetensors").items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    again = load_file(exported / ADAPTER / adapters.WEIGHTS)
    assert all(torch.equal(again[name], stored[name]) for name in stored)


def test_the_merged_bytes_do_not_depend_on_the_workers(exported: Project) -> None:
    found = []
    for number, threads in ((1, "1"), (20, "2")):
        exported.set(export_dtype="fp32", runtime={"num_workers": number})
        exported.run("python", "-m", "stages.consolidate", OMP_NUM_THREADS=threads)
        found.append([(exported / name / file).read_bytes() for name, file in
                      ((MODEL, "model.safetensors"), (ADAPTER, adapters.WEIGHTS), (ADAPTER, "README.md"))])  # fmt: skip
    assert found[0] == found[1]


def test_the_files_of_adapters_say_what_made_them(exported: Project) -> None:
    config = exported.json(f"{ADAPTER}/{adapters.CONFIG}")
    assert config["target_modules"] == sorted(config["target_modules"]) and "q_proj" in config["target_modules"]
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["base_model_name_or_path"] == "models/nano"
    lineage, of_model = (exported.json(f"{name}/lineage.json") for name in (ADAPTER, MODEL))
    assert lineage["run_id"] == of_model["run_id"] and lineage["weights"].keys() == {adapters.WEIGHTS}
    assert of_model["params"]["lora_r"] == 4
    assert "library_name: peft" in (exported / ADAPTER / "README.md").read_text()
    assert lineage["files"].keys() >= {"tokenizer.json", adapters.CONFIG}
    tokens, expected = (transformers.AutoTokenizer.from_pretrained(exported / name)("a b").input_ids
                        for name in (ADAPTER, MODEL))  # fmt: skip
    assert tokens == expected


def test_adapters_as_an_initial_model_are_refused_by_their_name(exported: Project) -> None:
    exported.set(model_name=ADAPTER)
    output = exported.run("python", "-m", "stages.download", status=2)
    assert "adapters (LoRA) are in it: use the directory of the model" in output


def described(config: transformers.PretrainedConfig, directory: Path) -> dict[str, adapters.LinearKind]:
    config.save_pretrained(directory)
    model = meta.build(directory)
    return describe_linears(model, meta.layer_classes(model), directory)


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def test_an_adapter_that_would_have_no_effect_is_not_made(tmp_path: Path) -> None:
    linears = described(transformers.MambaConfig(**SMALL, state_size=8), tmp_path)
    dead = linears["backbone.layers.mixer.dt_proj"]
    assert dead.problem and "with its weight directly" in dead.problem
    # With kernels for GPUs in training, those of x_proj and out_proj would not act either.
    fit = adapters.choose(linears, adapters.ALL_LINEAR, "MambaForCausalLM")
    assert [name.rpartition(".")[2] for name in fit] == ["in_proj"]
    with pytest.raises(StageError, match="'dt_proj': the model computes with its weight directly"):
        adapters.choose(linears, ["in_proj", "dt_proj"], "MambaForCausalLM")


class Odd(torch.nn.Module):
    """Uses a linear module by its weight, whatever it calls it, and another one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 8)
        self.plain, self.by_weight, self.detached = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: torch.Tensor, use_cache: bool) -> Any:
        weight = next(self.by_weight.parameters())
        logits = self.plain(self.embedding(tokens)) @ weight.T
        return mock.Mock(logits=logits + self.detached(self.embedding(tokens)).detach())


def test_adapters_are_tried_on_what_a_model_computes() -> None:
    torch.manual_seed(0)
    found = adapter_probe._try(Odd(), ["Odd"])
    assert found["plain"] is None
    assert found["by_weight"] and "with its weight directly" in found["by_weight"]
    assert found["detached"] and "no gradient reaches it" in found["detached"]


def test_what_is_no_linear_module_of_a_layer_is_refused(tmp_path: Path) -> None:
    linears = described(CONFIGS["llama"], tmp_path / "llama")
    assert linears["model.layers.self_attn.q_proj"] == adapters.LinearKind(3, 3 * 24 * 24, 3 * 48, None)
    assert adapters.num_parameters(linears, 2) == 2 * 3 * (48 + 32 + 32 + 48 + 3 * 64)
    for name in ("lm_head", "embed_tokens", "proj"):
        with pytest.raises(StageError, match=f"'{name}' is no linear module .* use all-linear, or some of q_proj, k_p"):
            adapters.choose(linears, [name], "LlamaForCausalLM")
    assert list(adapters.choose(linears, ["self_attn.v_proj", "v_proj"], "")) == ["model.layers.self_attn.v_proj"]
    with pytest.raises(StageError, match="lora_r is not possible with GPT2LMHeadModel: its layers have no linear"):
        adapters.choose(described(CONFIGS["gpt2"], tmp_path / "gpt2"), adapters.ALL_LINEAR, "GPT2LMHeadModel")


def test_adapters_that_peft_would_drop_are_named(tmp_path: Path) -> None:
    deepseek = transformers.DeepseekV3Config(
        **SMALL, intermediate_size=48, moe_intermediate_size=16, num_attention_heads=4, num_key_value_heads=4,
        n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    linears = described(deepseek, tmp_path)
    assert "model.layers.mlp.shared_experts.up_proj" in linears
    assert not any(linear.problem for linear in linears.values())
    assert meta.has_joined_experts(meta.build(tmp_path))
    problem = adapters.peft_problem(linears, has_joined_experts=True)
    assert problem and problem.startswith(
        "PEFT may take adapters of down_proj, gate_proj, up_proj for those of the exp"
    )
    assert adapters.peft_problem(["model.layers.self_attn.o_proj"], has_joined_experts=True) is None
    assert adapters.peft_problem(linears, has_joined_experts=False) is None


def test_a_weight_that_is_stored_in_parts_gets_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, low, high = torch.randn(6, 3), torch.randn(2, 3), torch.randn(6, 2)
    save_file({"one": weight[:4].clone(), "two": weight[4:].clone()}, tmp_path / "model.safetensors")
    parts = [
        headers.StoredTensor("model.safetensors", name, "F32", (rows, 3)) for name, rows in (("one", 4), ("two", 2))
    ]
    values = {f"x{adapters.A}": low, f"x{adapters.B}": high}
    given = mock.Mock(load=lambda name, content, *_: content.__setitem__(slice(None), values[name].numpy().tobytes()))
    specs = {name: mapped.TensorSpec(tuple(value.shape), torch.float32) for name, value in values.items()}
    monkeypatch.setattr(merged, "_BLOCK", 9)  # three rows
    found = bytearray(6 * 3 * 4)
    tensors = merged.MergedTensors(tmp_path, {"x.weight": parts}, given, specs, 0.5)
    tensors.load("x.weight", memoryview(found), torch.float32, lambda _: None)
    merged_weight = torch.frombuffer(found, dtype=torch.float32).view(6, 3)
    assert torch.allclose(merged_weight, weight + high @ low * 0.5)


def test_a_directory_beside_the_output_is_not_replaced(exported: Project) -> None:
    other = exported / "other-adapter/notes.txt"
    other.parent.mkdir()
    other.write_text("mine")
    checkpoint = str(newest_checkpoint(exported, 12))
    command = ("python", "-m", "stages.consolidate", "--checkpoint", checkpoint, "--output", "other")
    assert "other-adapter exists, and is no model of this pipeline" in exported.run(*command, status=2)
    assert other.read_text() == "mine"


def test_a_name_that_means_other_modules_too_is_written_out() -> None:
    targets, others = ["model.layers.0.q_proj", "model.layers.0.fc.1"], ["tower.layers.0.q_proj", "lm_head"]
    config = adapters.peft_config(targets, others, {"lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.0}, "name", None)
    assert config["target_modules"] == ["model.layers.0.fc.1", "model.layers.0.q_proj"]


def test_without_adapters_their_parameters_change_no_run(params: TrainParams) -> None:
    other = dataclasses.replace(params, lora_alpha=7, lora_dropout=0.5, lora_target_modules=["q_proj"])
    assert other.identity() == params.identity() and "lora_r" not in params.identity()
    adapted = dataclasses.replace(params, lora_r=8)
    assert dataclasses.replace(adapted, lora_alpha=7).identity() != adapted.identity()
    one, two = (dataclasses.replace(adapted, lora_target_modules=names) for names in (["b", "a", "b"], ["a", "b"]))
    assert one.identity() == two.identity()


def test_what_cannot_be_together_is_refused(params: TrainParams, tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    manifest = manifest_of(tmp_path, with_weights=False)
    adapted = dataclasses.replace(params, lora_r=8)
    with pytest.raises(
        StageError, match="starts from random weights, which adapters would leave random: set lora_r to"
    ):
        adapted.check_lora(manifest)
    with_weights = dataclasses.replace(manifest, weights=["model.safetensors"])
    with pytest.raises(StageError, match="use precision bf16"):
        dataclasses.replace(adapted, precision="fp8").check_lora(with_weights)
    params.check_lora(manifest)


def test_a_frozen_head_gets_no_gradient() -> None:
    """At 8 billion parameters and a vocabulary of 128 256 it would have 1.98 GiB."""
    from stages.forward.loss import summed_loss

    hidden, labels = torch.randn(6, 8, requires_grad=True), torch.randint(0, 9, (6,))
    gradients = []
    for trained in (True, False):
        weight, bias = (torch.ones(shape).mul_(0.1).requires_grad_(trained) for shape in ((9, 8), (9,)))
        with mock.patch.object(torch, "zeros_like", wraps=torch.zeros_like) as made:
            loss = summed_loss(hidden, labels, weight, bias)
        assert made.call_count == 2 * trained  # the gradients of weight and bias
        (gradient,) = torch.autograd.grad(loss, [hidden])
        gradients.append(gradient)
    assert torch.equal(*gradients)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pipeline_with_adapters_without_and_with_again(reproduced: Project) -> None:
    """`-S lora_r=4` is another run, and the first one is there again."""
    save_weights(reproduced / "models/nano")
    reproduced.set(lora_r=4)
    reproduced.run("dvc", "repro")
    first = weights(reproduced), {path.name: path.read_bytes() for path in (reproduced / ADAPTER).iterdir()}
    assert first[1]
    reproduced.set(lora_r=None)
    reproduced.run("dvc", "repro")
    assert not list((reproduced / ADAPTER).iterdir())
    reproduced.set(lora_r=4)
    assert "training with" not in reproduced.run("dvc", "repro")
    assert {path.name: path.read_bytes() for path in (reproduced / ADAPTER).iterdir()} == first[1]
    assert "up to date" in reproduced.run("dvc", "status")
    assert "equal" in reproduced.run("python", "-m", "stages.lineage", "verify")
