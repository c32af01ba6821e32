"""The model of the training, compared with the one that transformers loads."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

from stages.base.errors import StageError
from stages.building import sharded_model
from stages.building.weights import rules_of_random_values
from stages.forward.batch import make_batch
from stages.forward.loss import loss_sum
from stages.forward.small_copy import small_config
from stages.launching.agreement import verify_weights
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from stages.training.precision import make_grad_scaler
from stages.training.step import train_step
from tests.artifacts import write_model
from tests.models import CONFIGS, MIXTRAL, full_value, manifest_of
from tests.project import flip_bit


@pytest.fixture(params=["llama", "llama untied, scaled rope", "gpt2", "qwen3", "gemma3"])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(write_model(tmp_path, request.param))


Build = Callable[..., Any]


@pytest.fixture
def build(mesh: DeviceMesh, params: TrainParams, tmp_path: Path) -> Build:
    """A function that builds the model of the training, of that in `tmp_path` or elsewhere."""

    def make(directory: Path = tmp_path, with_weights: bool = False, **options: Any) -> Any:
        manifest = manifest_of(directory, with_weights)
        return sharded_model.build(manifest, **{"params": params, "mesh": mesh, "initialize": True, **options})

    return make


def assert_equal_buffers(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    buffers = dict(reference.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_pretrained_weights_and_buffers_are_those_of_transformers(
    reference: transformers.PreTrainedModel, build: Build
) -> None:
    model = build(with_weights=True)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(full_value(ours), theirs), name
    assert_equal_buffers(model, reference)
    batch = make_batch(torch.randint(1, 101, (2, 16)), eos_token_id=0, document_mask=True)
    torch.testing.assert_close(loss_sum(model, batch), loss_sum(reference, batch))


def test_a_weight_file_changed_since_the_download_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    manifest = manifest_of(write_model(tmp_path), with_weights=True)
    flip_bit(tmp_path / "model.safetensors", -1)
    note = mock.Mock()  # for the watchdog: a file of weights may need a minute
    with pytest.raises(StageError, match="is damaged or was changed"):
        verify_weights(manifest, note)
    assert note.called


def test_random_values_follow_the_rule_of_the_innermost_model(reference: transformers.PreTrainedModel) -> None:
    """That of Gemma 3n reads attributes which only the inner model has."""
    rules, inner = rules_of_random_values(reference), reference.base_model
    for name, module in reference.named_modules():
        owner = inner if name.startswith(reference.base_model_prefix) else reference
        assert rules[module].__self__ is owner, name  # type: ignore[attr-defined]


@pytest.mark.parametrize("reference", ["llama", "gemma3"], indirect=True)
def test_without_initialization_only_the_buffers_have_values(
    reference: transformers.PreTrainedModel, build: Build
) -> None:
    model = build(with_weights=True, initialize=False)
    assert all(full_value(param.detach()).isnan().all() for param in model.parameters())
    assert_equal_buffers(model, reference)


def test_random_weights_depend_only_on_the_seed_and_follow_the_rules_of_the_model(
    reference: transformers.PreTrainedModel, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    one = build()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", pytest.fail)  # it would seed the GPUs of all ranks alike
    two = build()
    assert torch.equal(torch.get_rng_state(), state)
    theirs = reference.state_dict()
    for (name, first), (_, second) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        values = full_value(first.detach())
        assert torch.equal(values, full_value(second.detach())), name
        assert values.std().item() == pytest.approx(theirs[name].std().item(), rel=0.35, abs=1e-6), name
        assert values.mean().item() == pytest.approx(theirs[name].mean().item(), abs=0.01), name
    assert_equal_buffers(one, reference)
    matrices = [full_value(param.detach()) for param in one.parameters() if param.dim() == 2]
    assert len({tuple(matrix.flatten()[:4].tolist()) for matrix in matrices}) == len(matrices)


def test_every_parameter_of_any_model_gets_its_random_weights(build: Build, tmp_path: Path) -> None:
    mamba = transformers.MambaConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, eos_token_id=0)
    for name, config in {**CONFIGS, "mixtral": MIXTRAL, "mamba": mamba}.items():
        note = mock.Mock()  # for the watchdog: a large layer may need a minute
        model = build(write_model(tmp_path / name, config, dtype=None), note=note)
        assert note.call_count == model.config.num_hidden_layers + 1
        assert not any(full_value(param.detach()).isnan().any() for param in model.parameters()), name


def test_a_buffer_that_another_module_fills_has_its_values(build: Build, tmp_path: Path) -> None:
    """The model of Falcon H1 fills those of its layers."""
    config = small_config(transformers.FalconH1Config(ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9]))
    assert config is not None
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert any("mup_vector" in name for name, _ in reference.named_buffers())
    assert_equal_buffers(build(write_model(tmp_path, config, dtype=None)), reference)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Without what transformers computes of other values: the numbers of the layers of one kind.
        pytest.param(transformers.Zamba2Config(), {"num_hidden_layers": 2, "hybrid_layer_ids": [1]}, id="zamba2"),
        # The second layer of a kind uses something of the first.
        pytest.param(
            transformers.Gemma3nTextConfig(), {"num_hidden_layers": 8, "num_kv_shared_layers": 4}, id="gemma3n"
        ),
        # Of which transformers takes one expert a token only.
        pytest.param(transformers.ZayaConfig(), {"num_experts_per_tok": 1, "num_experts": 1}, id="zaya"),
        # With parts for images and sounds.
        pytest.param(transformers.Phi4MultimodalConfig(), {"num_hidden_layers": 1}, id="phi4"),
    ],
)
def test_a_small_copy_has_few_layers_and_a_valid_config(
    config: transformers.PreTrainedConfig, expected: dict[str, Any], tmp_path: Path
) -> None:
    small = small_config(config)
    assert small is not None
    small.save_pretrained(tmp_path)  # which validates it
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(read, name) for name in expected} == expected
    for part in {*read.sub_configs} - {"text_config"}:
        layers = {getattr(getattr(read, part), name, 1) for name in ("num_hidden_layers", "num_blocks")}
        assert layers == {1}


def test_random_weights_that_no_rule_makes_are_refused(build: Build, tmp_path: Path) -> None:
    config = small_config(transformers.ApertusConfig())
    assert config is not None
    config.save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(False)  # else torch fills memory itself
    with pytest.raises(StageError, match=r"no rule for the random values of \S*alpha_p, .*: use a model with weights"):
        build()


@pytest.mark.parametrize(("checkpointing", "kind"), [("none", "plain"), ("full", "fused")])
def test_the_router_loss_of_a_mixture_of_experts_is_that_of_transformers(
    build: Build, params: TrainParams, tmp_path: Path, checkpointing: Any, kind: Any
) -> None:
    params = dataclasses.replace(params, activation_checkpointing=checkpointing, loss=kind)
    model = build(write_model(tmp_path, MIXTRAL, dtype=None), params=params).train()
    reference = transformers.AutoModelForCausalLM.from_config(MIXTRAL, dtype=torch.float32)
    reference.load_state_dict({name: full_value(value) for name, value in model.state_dict().items()})

    rows = [torch.randint(1, 101, (2, 16)), torch.randint(1, 101, (1, 9))]
    counts = [2 * 15, 8]  # two forward passes, of different weight
    losses = [reference(input_ids=part, labels=part).loss for part in rows]
    loss = sum(count / sum(counts) * one for count, one in zip(counts, losses, strict=True))
    loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)

    batches = [make_batch(part, eos_token_id=0, document_mask=False) for part in rows]
    total, norm, _ = train_step(
        model, make_optimizer(model, params), make_grad_scaler("fp32", torch.device("cpu")), batches, sum(counts),
        params,
    )  # fmt: skip
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    aux = [count / sum(counts) * reference(input_ids=part).aux_loss for count, part in zip(counts, rows, strict=True)]
    assert total.item() / sum(counts) == pytest.approx(
        (loss - 0.5 * sum(aux)).item(), rel=1e-5
    )  # of the tokens alone, as validated


def test_a_config_can_turn_the_router_loss_off(tmp_path: Path) -> None:
    off = transformers.MixtralConfig(**{**MIXTRAL.to_dict(), "output_router_logits": False})
    for name, config, expected in (("on", MIXTRAL, 0.5), ("off", off, 0.0), ("llama", CONFIGS["llama"], None)):
        manifest = manifest_of(write_model(tmp_path / name, config, dtype=None), with_weights=False)
        assert manifest.router_loss_coef == expected, name
