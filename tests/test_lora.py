"""Adapters (LoRA): trained as all weights are, whatever happens; stored as PEFT stores them; merged exactly."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages import consolidate, download, launch
from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.building import lora, sharded_model
from stages.checkpointing import run
from stages.checkpointing.layout import CheckpointManifest, step_name
from stages.export import merged
from stages.forward import adapter_probe
from stages.forward.adapter_probe import describe_linears
from stages.forward.loss import summed_loss
from stages.model import adapters, headers, meta
from stages.model.manifest import ModelManifest
from stages.planning.warnings import warn_of_peft
from stages.training.params import TrainParams
from tests.artifacts import write_model
from tests.conftest import make_adapted
from tests.models import full_value, manifest_of
from tests.project import Project, flip_bit, save_weights
from tests.ranks import Ranks
from tests.steps import Training, changed
from tests.trainings import newest_checkpoint, result, weights

KILLED = -9
MODEL, ADAPTER = "outputs/test/model", "outputs/test/adapter"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """With six steps; to be copied."""
    project = Project(tmp_path_factory.mktemp("adapted"))
    make_adapted(project)
    project.set(max_steps=6)
    return project


@pytest.fixture(scope="module")
def exported(adapted: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The same after its run, with its model and its adapters; to be copied where it is changed."""
    project = adapted.copy(tmp_path_factory.mktemp("exported") / "project")
    ranks.run(project)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.path)
        described = run.describe(load_params(TrainParams))
        launch.write_outs(described, described.directory / step_name(described.total_steps))
        patch.setattr("sys.argv", ["consolidate"])
        consolidate.main()
    return project


def test_adapters_killed_in_an_update_and_a_save_end_with_the_same_result(
    adapted: Project, exported: Project, ranks: Ranks, tmp_path: Path
) -> None:
    """With dropout; files of adapters are tiny, so a kill hits their rename rather than their bytes."""
    project = adapted.copy(tmp_path / "project")
    ranks.run(project, "kill rank 0 in update 3", KILLED)
    project.set(runtime={"async_checkpoint": True})
    ranks.run(project, "kill rank 0 at os.rename:.*step-00000004.tmp$", KILLED)
    output = ranks.run(project)
    assert "resuming from step 2" in output and "LoRA of rank 4" in output
    assert result(project, 6) == result(exported, 6)
    tensors = CheckpointManifest.read(newest_checkpoint(project, 6)).tensors
    assert len(tensors) == 2 * 7 * 2 and all(map(adapters.is_adapter, tensors))


@pytest.mark.slow
def test_adapters_in_fp32_killed_at_many_steps_end_with_the_same_result(ranks: Ranks, tmp_path: Path) -> None:
    """Beside embeddings that are not tied."""
    reference = Project(tmp_path / "reference")
    reference.path.mkdir()
    make_adapted(reference, tie_word_embeddings=False)
    reference.set(precision="fp32", runtime={"async_checkpoint": True})
    killed = reference.copy(tmp_path / "killed")
    ranks.run(reference)
    for number, step in enumerate((1, 3, 5, 9, 11)):
        ranks.run(killed, f"kill rank {number % 2} at step {step}", KILLED)
    ranks.run(killed)
    assert result(killed) == result(reference)


def test_a_flipped_bit_of_the_initial_weights_is_refused_on_resume(
    exported: Project, ranks: Ranks, tmp_path: Path
) -> None:
    project = exported.copy(tmp_path / "project")
    shutil.rmtree(newest_checkpoint(project, 6))
    flip_bit(project / "models/nano/model.safetensors", -1)
    assert "model.safetensors" in ranks.run(project, status=2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of dcp, in this process
def test_another_number_of_ranks_continues(adapted: Project, ranks: Ranks, tmp_path: Path) -> None:
    """With one rank of adapters, a process has no row of A."""
    found = []
    for name, sizes in (("reference", [2]), ("changing", [2, 1, 2])):
        project = adapted.copy(tmp_path / name)
        project.set(lora_r=1, lora_dropout=0.0, precision="fp32")
        for number, size in enumerate(sizes[:-1]):
            ranks.run(project, f"kill rank 0 at step {3 + 2 * number}", KILLED, world_size=size)
        ranks.run(project, world_size=sizes[-1])
        last = newest_checkpoint(project, 6)
        tensors = {key: torch.empty(each.shape) for key, each in CheckpointManifest.read(last).tensors.items()}
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(last / "model"), no_dist=True)
        assert tensors and all(tensor.any() for tensor in tensors.values())  # B, too, has moved
        found.append(tensors)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


def test_a_base_in_the_dtype_of_the_computation_gives_the_same_bits(
    params: TrainParams, mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in fp32 that FSDP2 casts, and needs half of its memory."""
    write_model(tmp_path)
    adapted = changed(params, {"strategy": "fsdp", "cpu_offload": False}, lora_r=3, precision="bf16")
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(lora, "compute_dtype", lambda _, dtype=dtype: dtype)
        monkeypatch.setattr("stages.building.sharding._is_whole", lambda *_: False)
        training = Training(tmp_path, adapted)
        assert training.model.get_input_embeddings().weight.dtype == dtype
        training.train(2)
        found.append(training.trained())
    assert found[0]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_the_first_values_of_adapters_depend_on_the_seed_alone(params: TrainParams, mesh: Any, tmp_path: Path) -> None:
    manifest, found = manifest_of(write_model(tmp_path), with_weights=True), []
    for state, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(state)
        model = sharded_model.build(manifest, changed(params, lora_r=3, seed=seed), mesh, initialize=True)
        found.append({name: full_value(param) for name, param in model.named_parameters() if name.endswith(adapters.A)})
    one, same, other = found
    assert one and all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT about transformers
def test_peft_loads_the_adapters_and_its_merge_is_the_model(
    exported: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(exported.path)
    ours, base = (AutoModelForCausalLM.from_pretrained("models/nano") for _ in range(2))
    model = peft.PeftModel.from_pretrained(base, ADAPTER).eval()
    stored = load_file(f"{ADAPTER}/{adapters.WEIGHTS}")
    assert all(tensor.any() for tensor in stored.values())
    torch.testing.assert_close(peft.get_peft_model_state_dict(model), stored, rtol=0, atol=0)
    # The same adapters in the model that is trained.
    lora.add_adapters(ours, ModelManifest.read(), changed(load_params(TrainParams), precision="fp32"))
    for name, module in ours.named_modules():
        if isinstance(module, lora.LoraLinear):
            for layer, end in ((module.lora_A, adapters.A), (module.lora_B, adapters.B)):
                layer.weight = torch.nn.Parameter(stored[adapters.PREFIX + name + end])
    tokens = torch.arange(1, 33)[None]
    with torch.no_grad():
        theirs = model(tokens).logits
        assert torch.equal(ours.eval()(tokens).logits, theirs)
        merged = AutoModelForCausalLM.from_pretrained(MODEL)(tokens).logits
        assert (merged - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    expected = model.merge_and_unload().state_dict()
    for name, tensor in load_file(f"{MODEL}/model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name
    # Rounded once, by any number of workers and threads.
    rounded = exported.copy(tmp_path / "rounded")
    rounded.set(export_dtype="bf16", runtime={"num_workers": 20})
    monkeypatch.chdir(rounded.path)
    monkeypatch.setattr("sys.argv", ["consolidate"])
    number = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        consolidate.main()
    finally:
        torch.set_num_threads(number)
    for name, tensor in load_file(rounded / MODEL / "model.safetensors").items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    for name in (adapters.WEIGHTS, "README.md"):
        assert (rounded / ADAPTER / name).read_bytes() == (exported / ADAPTER / name).read_bytes()


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


def test_adapters_as_an_initial_model_are_refused_by_their_name(
    exported: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(exported.path)
    given = dataclasses.replace(load_params(download.DownloadParams), model_name=ADAPTER)
    with pytest.raises(StageError, match=r"adapters \(LoRA\) are in it: use the directory of the model"):
        download.describe(given)


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def described(config: str | transformers.PreTrainedConfig, directory: Path) -> dict[str, adapters.LinearKind]:
    model = meta.build(write_model(directory, config, dtype=None))
    return describe_linears(model, meta.layer_classes(model), directory)


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
    linears = described("llama", tmp_path / "llama")
    assert linears["model.layers.self_attn.q_proj"] == adapters.LinearKind(3, 3 * 24 * 24, 3 * 48, None)
    assert adapters.num_parameters(linears, 2) == 2 * 3 * (48 + 32 + 32 + 48 + 3 * 64)
    for name in ("lm_head", "embed_tokens", "proj"):
        with pytest.raises(StageError, match=f"'{name}' is no linear module .* use all-linear, or some of q_proj, k_p"):
            adapters.choose(linears, [name], "LlamaForCausalLM")
    assert list(adapters.choose(linears, ["self_attn.v_proj", "v_proj"], "")) == ["model.layers.self_attn.v_proj"]
    with pytest.raises(StageError, match="lora_r is not possible with GPT2LMHeadModel: its layers have no linear"):
        adapters.choose(described("gpt2", tmp_path / "gpt2"), adapters.ALL_LINEAR, "GPT2LMHeadModel")


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


@pytest.mark.parametrize("first_is_dense", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}], ids=str)
def test_shared_experts_get_adapters_where_the_first_layer_has_none(
    first_is_dense: dict[str, Any], tmp_path: Path
) -> None:
    config = transformers.Qwen2MoeConfig(
        **SMALL, intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=4, **first_is_dense,
    )  # fmt: skip
    linears = described(config, tmp_path)
    assert {"model.layers.mlp.up_proj", "model.layers.mlp.shared_expert.up_proj"} < linears.keys()
    assert [name for name, linear in linears.items() if linear.problem] == []


def test_a_rank_above_the_smallest_matrix_is_named(
    params: TrainParams, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    manifest = manifest_of(write_model(tmp_path, config), with_weights=True)
    warn_of_peft(changed(params, lora_r=16), manifest)
    warn_of_peft(changed(params, lora_r=17, lora_target_modules=["q_proj"]), manifest)
    assert capsys.readouterr().out == ""
    warn_of_peft(changed(params, lora_r=17), manifest)
    assert capsys.readouterr().out.startswith(
        "warning: lora_r is 17, but model.layers.self_attn.k_proj has a matrix of 16 x 32: a rank above 16 only adds"
    )


def test_only_the_modules_that_are_named_are_exported_as_adapters(tmp_path: Path) -> None:
    model = manifest_of(write_model(tmp_path, "llama"), with_weights=True)
    tensors = consolidate._adapters(meta.build(tmp_path), model, {"lora_r": 3, "lora_target_modules": ["q_proj"]})
    layers = range(len({name.split(".")[2] for name in tensors}))
    assert tensors.keys() == {
        f"model.layers.{layer}.self_attn.q_proj{part}" for layer in layers for part in (adapters.A, adapters.B)
    }


def test_routers_that_are_not_trained_are_not_said_to_be(tmp_path: Path) -> None:
    manifest = manifest_of(write_model(tmp_path, dtype=None), with_weights=False)
    without_loss = dataclasses.replace(manifest, router_loss_coef=0.0)
    assert (manifest.router_warning(None), manifest.router_warning(8)) == (None, None)
    assert str(without_loss.router_warning(None)).startswith("warning: the experts of this model are trained without")
    assert str(without_loss.router_warning(8)).startswith("note: routers without an adapter keep their weights, and")


def test_a_weight_that_is_stored_in_parts_gets_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, low, high = torch.randn(6, 3), torch.randn(2, 3), torch.randn(6, 2)
    save_file({"one": weight[:4].clone(), "two": weight[4:].clone()}, tmp_path / "model.safetensors")
    parts = [
        headers.StoredTensor("model.safetensors", name, "F32", (rows, 3)) for name, rows in (("one", 4), ("two", 2))
    ]
    values = {f"x{adapters.A}": low, f"x{adapters.B}": high}
    given = mock.Mock(load=lambda name, content, *_: content.__setitem__(slice(None), values[name].numpy().tobytes()))
    monkeypatch.setattr(merged, "_BLOCK", 9)  # three rows
    found = bytearray(6 * 3 * 4)
    tensors = merged.MergedTensors(tmp_path, {"x.weight": parts}, given, values, 0.5)
    tensors.load("x.weight", memoryview(found), torch.float32, lambda _: None)
    merged_weight = torch.frombuffer(found, dtype=torch.float32).view(6, 3)
    assert torch.allclose(merged_weight, weight + high @ low * 0.5)


def test_a_weight_without_dimensions_is_merged_as_it_is(tmp_path: Path) -> None:
    save_file({"scale": torch.tensor(2.5)}, tmp_path / "model.safetensors")
    stored = {"scale": [headers.StoredTensor("model.safetensors", "scale", "F32", ())]}
    found = bytearray(4)
    tensors = merged.MergedTensors(tmp_path, stored, mock.Mock(), {}, 0.5)
    tensors.load("scale", memoryview(found), torch.float32, lambda _: None)
    assert torch.frombuffer(found, dtype=torch.float32).item() == 2.5


def test_a_directory_beside_the_output_is_not_replaced(exported: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported.path)
    other = exported / "other-adapter/notes.txt"
    other.parent.mkdir()
    other.write_text("mine")
    checkpoint = str(newest_checkpoint(exported, 6))
    monkeypatch.setattr("sys.argv", ["consolidate", "--checkpoint", checkpoint, "--output", "other"])
    with pytest.raises(StageError, match="other-adapter exists, and is no model of this pipeline"):
        consolidate.main()
    assert other.read_text() == "mine"


def test_a_name_that_means_other_modules_too_is_written_out() -> None:
    targets, others = ["model.layers.0.q_proj", "model.layers.0.fc.1"], ["tower.layers.0.q_proj", "lm_head"]
    config = adapters.peft_config(targets, others, {"lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.0}, "name", None)
    assert config["target_modules"] == ["model.layers.0.fc.1", "model.layers.0.q_proj"]


def test_without_adapters_their_parameters_change_no_run(params: TrainParams) -> None:
    other = changed(params, lora_alpha=7, lora_dropout=0.5, lora_target_modules=["q_proj"], lora_base="nf4")
    assert other.identity() == params.identity() and "lora_r" not in params.identity()
    adapted = dataclasses.replace(params, lora_r=8)
    assert dataclasses.replace(adapted, lora_alpha=7).identity() != adapted.identity()
    assert changed(adapted, lora_base="nf4").identity() == {**adapted.identity(), "lora_base": "nf4"}
    one, two = (dataclasses.replace(adapted, lora_target_modules=names) for names in (["b", "a", "b"], ["a", "b"]))
    assert one.identity() == two.identity()


def test_what_cannot_be_together_is_refused(params: TrainParams, tmp_path: Path) -> None:
    manifest = manifest_of(write_model(tmp_path, dtype=None), with_weights=False)
    adapted, with_weights = changed(params, lora_r=8), dataclasses.replace(manifest, weights=["model.safetensors"])
    with pytest.raises(StageError, match="starts from random weights, which adapters would leave random: set lora_r"):
        adapted.check_lora(manifest)
    with pytest.raises(StageError, match="use precision bf16"):
        changed(adapted, precision="fp8").check_lora(with_weights)
    with pytest.raises(StageError, match="lora_base nf4 is for weights beside adapters: set lora_r"):
        changed(params, lora_base="nf4").check_lora(with_weights)
    params.check_lora(manifest)


def test_a_frozen_head_gets_no_gradient() -> None:
    """At 8 billion parameters and a vocabulary of 128 256 it would have 1.98 GiB."""
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
