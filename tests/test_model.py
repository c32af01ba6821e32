"""The model of the training, against the one that transformers loads."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from stages.artifacts import params, publish
from stages.artifacts.command import StageError
from stages.model import headers, meta
from stages.model.manifest import FileEntry, ModelManifest
from stages.training import model as training_model
from stages.training.batch import loss_sum, make_batch
from stages.training.params import TrainParams
from tests.conftest import REPO

CONFIGS = {
    "llama": transformers.LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    ),
    "llama untied, scaled rope": transformers.LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, eos_token_id=0, bos_token_id=None,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=101, n_embd=24, n_layer=2, n_head=3, n_positions=64, eos_token_id=0, bos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "qwen3": transformers.Qwen3Config(
        vocab_size=101, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    ),
}  # fmt: skip


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # torch.empty gives NaN instead of what happens to lie there: nothing that is forgotten looks plausible.
    torch.use_deterministic_algorithms(True)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


@pytest.fixture(params=CONFIGS)
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param])
    model.save_pretrained(tmp_path)
    return model


def manifest_of(directory: Path, with_weights: bool) -> ModelManifest:
    model = meta.build(directory)
    files = {path.name: FileEntry(path.stat().st_size, publish.sha256_file(path)) for path in directory.iterdir()}
    weights = headers.weight_files(directory) if with_weights else []
    return ModelManifest(
        str(directory), "main", None, type(model).__name__, model.config.model_type, "float32",
        meta.num_parameters(model), files, weights, meta.tied_weights(model), meta.layer_classes(model), 101, 64, 0,
        None, None,
    )  # fmt: skip


@pytest.fixture
def train_params(monkeypatch: pytest.MonkeyPatch) -> TrainParams:
    monkeypatch.chdir(REPO)
    return params.load(TrainParams)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
    reference: transformers.PreTrainedModel, mesh: DeviceMesh, train_params: TrainParams, tmp_path: Path
) -> None:
    manifest = manifest_of(tmp_path, with_weights=False)
    torch.manual_seed(1)
    one = training_model.build(manifest, train_params, mesh, initialize=True)
    torch.manual_seed(2)
    two = training_model.build(manifest, train_params, mesh, initialize=True)
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
    for kind in ("none", "full"):
        changed = dataclasses.replace(train_params, activation_checkpointing=kind)
        model = training_model.build(manifest, changed, mesh, initialize=True)
        model.train()
        loss_sum(model, batch).backward()
        gradients.append([whole(param.grad) for param in model.parameters()])
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) == (kind == "full")
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


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
