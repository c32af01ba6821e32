"""The model of the training, against the one that transformers loads."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

from stages.artifacts import params
from stages.artifacts.command import StageError
from stages.training import model as training_model
from stages.training.batch import loss_sum, make_batch
from stages.training.params import TrainParams
from tests.conftest import REPO
from tests.models import CONFIGS, manifest_of, whole


@pytest.fixture(params=["llama", "llama untied, scaled rope", "gpt2", "qwen3", "gemma3"])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param])
    model.save_pretrained(tmp_path)
    return model


@pytest.fixture
def train_params(monkeypatch: pytest.MonkeyPatch) -> TrainParams:
    monkeypatch.chdir(REPO)
    return params.load(TrainParams)


def test_pretrained_weights_and_buffers_are_those_of_transformers(
    reference: transformers.PreTrainedModel, mesh: DeviceMesh, train_params: TrainParams, tmp_path: Path
) -> None:
    model = training_model.build(manifest_of(tmp_path, with_weights=True), train_params, mesh, initialize=True)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(whole(ours), theirs), name
    buffers = dict(reference.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    batch = make_batch(torch.randint(1, 101, (2, 16)), eos_token_id=0, document_mask=True)
    torch.testing.assert_close(loss_sum(model, batch), loss_sum(reference, batch))


def test_a_weight_file_that_was_changed_since_the_download_is_refused(
    reference: transformers.PreTrainedModel, mesh: DeviceMesh, train_params: TrainParams, tmp_path: Path
) -> None:
    manifest = manifest_of(tmp_path, with_weights=True)
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StageError, match="was changed since the download"):
        training_model.build(manifest, train_params, mesh, initialize=True)


def test_without_initialization_only_the_buffers_have_values(
    reference: transformers.PreTrainedModel, mesh: DeviceMesh, train_params: TrainParams, tmp_path: Path
) -> None:
    model = training_model.build(manifest_of(tmp_path, True), train_params, mesh, initialize=False)
    assert all(whole(param.detach()).isnan().all() for param in model.parameters())
    assert all(torch.equal(buffer, dict(reference.named_buffers())[name]) for name, buffer in model.named_buffers())


def test_random_weights_depend_on_the_seed_alone_and_follow_the_rules_of_the_model(
    reference: transformers.PreTrainedModel, mesh: DeviceMesh, train_params: TrainParams, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    manifest = manifest_of(tmp_path, with_weights=False)
    torch.manual_seed(1)
    one = training_model.build(manifest, train_params, mesh, initialize=True)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", pytest.fail)  # nor does it seed the GPU, on all ranks alike
    two = training_model.build(manifest, train_params, mesh, initialize=True)
    assert torch.equal(torch.get_rng_state(), state)
    theirs = reference.state_dict()
    for (name, first), (_, second) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        values = whole(first.detach())
        assert torch.equal(values, whole(second.detach())), name
        assert values.std().item() == pytest.approx(theirs[name].std().item(), rel=0.35, abs=1e-6), name
        assert values.mean().item() == pytest.approx(theirs[name].mean().item(), abs=0.01), name
    for name, buffer in one.named_buffers():
        assert torch.equal(buffer, dict(reference.named_buffers())[name]), name
    matrices = [whole(param.detach()) for param in one.parameters() if param.dim() == 2]
    assert len({tuple(matrix.flatten()[:4].tolist()) for matrix in matrices}) == len(matrices)


def test_activation_checkpointing_changes_no_gradient(
    reference: transformers.PreTrainedModel, mesh: DeviceMesh, train_params: TrainParams, tmp_path: Path
) -> None:
    manifest = manifest_of(tmp_path, with_weights=True)
    batch = make_batch(torch.randint(1, 101, (2, 16)), eos_token_id=0, document_mask=True)
    gradients = []
    for kind in ("none", "full", "selective"):
        changed = dataclasses.replace(train_params, activation_checkpointing=kind)
        model = training_model.build(manifest, changed, mesh, initialize=True)
        model.train()
        loss_sum(model, batch).backward()
        gradients.append([whole(param.grad) for param in model.parameters()])
        layers = [module for module in model.modules() if type(module).__name__ in manifest.layer_classes]
        checkpointed = [layer.gradient_checkpointing for layer in layers]
        assert checkpointed == [
            kind == "full" or (kind == "selective" and index % 2 == 0) for index in range(len(layers))
        ]
    for plain, full, selective in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, full)
        torch.testing.assert_close(plain, selective)


def test_no_token_attends_to_another_document(reference: transformers.PreTrainedModel) -> None:
    rows = torch.randint(1, 101, (1, 16))
    rows[0, 6] = 0
    changed = rows.clone()
    changed[0, :6] = (changed[0, :6] + 7) % 100 + 1
    logits = []
    for row in (rows, changed):
        batch = make_batch(row, eos_token_id=0, document_mask=True)
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            logits.append(reference.eval()(**inputs, use_cache=False).logits)
    assert torch.equal(logits[0][0, 7:], logits[1][0, 7:])
    assert not torch.equal(logits[0][0, :6], logits[1][0, :6])


assert "RANK" not in os.environ, "run these tests outside of torchrun"
