"""From a sharded checkpoint to a directory that transformers loads: the same values or an error, never zeros."""

import dataclasses
import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from stages import consolidate, download
from stages.base import publish
from stages.base.errors import StageError
from stages.base.identity import Adoption, RunIdentity, TokenFingerprints
from stages.base.origin import RECORDS, Origin
from stages.base.packed import ConversationMetrics, EncoderMetrics, PackMetrics, PartMetrics, fingerprint
from stages.base.record import FileEntry
from stages.checkpointing import layout
from stages.checkpointing.layout import CheckpointManifest, TensorEntry
from stages.checkpointing.pointer import RunPointer, pointer_path
from stages.export import card, mapped
from stages.export.lineage import InitialModel, Lineage
from stages.model import tokenizer
from stages.model.license import ModelLicense
from stages.model.manifest import MANIFEST, TOKENIZER, ModelManifest
from tests.models import LAYERS, SIZES, write_tokenizer
from tests.project import REPO, flip_bit, start_stage, wait_for

PARAMS = "experiment_name: exp\nexport_dtype: null\nmax_shard_size: 1GB\nruntime: {num_workers: 2}\n"
CONFIGS: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=False),
    "gpt2": GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "qwen3": Qwen3Config(**SIZES, **LAYERS, num_key_value_heads=1, head_dim=8),
    "gemma": GemmaConfig(**SIZES, **LAYERS, num_key_value_heads=1, head_dim=8),
    "gemma3": Gemma3TextConfig(**SIZES, **LAYERS, num_key_value_heads=1, head_dim=8, sliding_window=4),
    "mixtral": MixtralConfig(**SIZES, **LAYERS, num_key_value_heads=1, num_local_experts=3),
}


@pytest.fixture(autouse=True)
def project(empty_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is the same in all projects."""
    monkeypatch.setattr(sys, "argv", ["consolidate"])
    monkeypatch.delenv("CHECKPOINT_ROOT", raising=False)
    Path("params.yaml").write_text(PARAMS)


def make_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32, pretrained: bool = True) -> ModelManifest:
    """A model directory and its manifest, in the current project."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    directory = Path("models/tiny")
    if pretrained:
        model.save_pretrained(directory)
    else:
        model.config.save_pretrained(directory)
    write_tokenizer(directory, ["<eos>", "a", "b"])
    return write_model_manifest()


def write_model_manifest() -> ModelManifest:
    params = download.DownloadParams(model_name="models/tiny", model_revision="main", initial_weights="auto")
    manifest = download.describe(params)
    download.describe_license(manifest).write()
    publish.write_text(TOKENIZER, tokenizer.load(Path("models/tiny")).content)
    manifest.write()
    return manifest


def trained_tensors(config: PretrainedConfig) -> dict[str, Tensor]:
    """The parameters of a model, as training saves them: fp32, a tied one under its first name only."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save(tensors: dict[str, Any], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, state in (("model", tensors), ("optimizer", {"a": {"step": torch.tensor(3.0)}})):
            dcp.save(state, checkpoint_id=directory / kind)


def finish(tensors: dict[str, Tensor]) -> Path:
    """Add to the shards what training writes after them; returns the directory of the checkpoint."""
    checkpoint = layout.checkpoint_root("exp") / "run" / layout.step_name(3)
    (checkpoint / "history.tsv").write_text("step\tvalidation_loss\n0\t4.5\n3\t2.25\n")
    write_manifest(checkpoint, tensors)
    return checkpoint


def write_manifest(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Write the manifest of a checkpoint as it is now, listing these tensors, and run.json."""
    manifest = CheckpointManifest(
        format=layout.FORMAT,
        run_id="run",
        step=3,
        total_steps=3,
        identity=RunIdentity(
            params={"experiment_name": "exp", "lr": 0.1},
            data=TokenFingerprints(train="t", validation="v"),
            model=publish.sha256_file(MANIFEST),
            code="c",
        ),
        validation_loss=2.25,
        adopted=None,
        packages={"torch": torch.__version__},
        files={
            str(path.relative_to(checkpoint)): FileEntry.of(path)
            for path in sorted(checkpoint.rglob("*"))
            if path.is_file() and path.name != layout.MANIFEST
        },
        tensors={
            name: TensorEntry(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        },
    )
    manifest.write(checkpoint)
    RunPointer.to(checkpoint).write(pointer_path("exp"))


def make_checkpoint(tensors: dict[str, Tensor]) -> Path:
    checkpoint = layout.checkpoint_root("exp") / "run" / layout.step_name(3)
    checkpoint.mkdir(parents=True)
    save(tensors, checkpoint)
    return finish(tensors)


def exported_tensors() -> dict[str, Tensor]:
    return {
        name: tensor
        for path in Path("outputs/exp/model").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_refused(match: str) -> None:
    """The stage fails with a clear message, and publishes nothing."""
    with pytest.raises(StageError, match=match):
        consolidate.main()
    published = {path.name for path in Path("outputs/exp").iterdir() if path.suffix != ".lock"}
    assert published == {"checkpoints", "run.json"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_values_dtypes_and_size_are_those_of_save_pretrained(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    make_model(config, dtype)
    tensors = trained_tensors(config)
    make_checkpoint(tensors)
    consolidate.main()

    live = AutoModelForCausalLM.from_config(config, dtype=dtype)  # not `.to(dtype)`, which would round buffers, too
    live.load_state_dict({key: tensor.to(dtype) for key, tensor in tensors.items()}, strict=False)
    live.save_pretrained("reference")
    expected = load_file("reference/model.safetensors")
    found = exported_tensors()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key
    size = sum(tensor.nbytes for tensor in expected.values())
    assert size <= Path("outputs/exp/model/model.safetensors").stat().st_size < size + 8192

    loaded, info = AutoModelForCausalLM.from_pretrained(
        "outputs/exp/model", local_files_only=True, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    input_ids = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(input_ids).logits, live.eval()(input_ids).logits)
    assert AutoTokenizer.from_pretrained("outputs/exp/model", local_files_only=True)("a b")["input_ids"] == [1, 2]


MIXTURE = {**SIZES, **LAYERS, "num_key_value_heads": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 1}
BIASES = {
    "mlp.gate.e_score_correction_bias": Glm4MoeConfig(
        **MIXTURE, head_dim=8, n_routed_experts=2, first_k_dense_replace=1, num_mtp_layers=0
    ),
    "feed_forward.expert_bias": Lfm2MoeConfig(
        **MIXTURE, num_experts=2, num_dense_layers=1, layer_types=["full_attention"] * 2, tie_word_embeddings=False
    ),
}


@pytest.mark.parametrize("name", BIASES)
def test_weights_that_a_class_keeps_in_fp32_are_not_rounded(name: str) -> None:
    """As in what transformers loads and saves: the biases that choose experts, which are buffers."""
    config = BIASES[name]
    make_model(config, torch.bfloat16)
    live = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    bias = f"model.layers.1.{name}"
    live.get_buffer(bias).copy_(torch.tensor([14.012, 3.337]))  # neither is a value of bf16
    make_checkpoint({name: tensor.detach() for name, tensor in live.state_dict().items()})
    consolidate.main()
    found = exported_tensors()
    assert torch.equal(found[bias], live.get_buffer(bias))
    AutoModelForCausalLM.from_pretrained("outputs/exp/model", local_files_only=True).save_pretrained("again")
    expected = load_file("again/model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("stated", [{"num_nextn_predict_layers": 1}, {}])
def test_the_config_says_that_layers_which_the_model_lacks_are_not_there(stated: dict[str, int]) -> None:
    """A server would make random ones: those of MTP, which transformers drops. One is the default of the class."""
    config = BIASES["mlp.gate.e_score_correction_bias"]
    make_model(config)
    path = Path("models/tiny/config.json")
    values = {
        name: value for name, value in publish.read_json(path).items() if "nextn" not in name and "mtp" not in name
    }
    publish.write_json(path, {**values, **stated})
    write_model_manifest()
    live = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_checkpoint({name: tensor.detach() for name, tensor in live.state_dict().items()})
    consolidate.main()
    found = publish.read_json(Path("outputs/exp/model/config.json"))
    assert found.pop("num_nextn_predict_layers") == 0
    assert found == {**values, "architectures": ["Glm4MoeForCausalLM"], "dtype": "float32"}
    assert AutoModelForCausalLM.from_pretrained("outputs/exp/model").config.num_nextn_predict_layers == 0


@pytest.mark.parametrize(
    ("config", "exported"),
    [
        ({"n": 1}, {"n": 1}),
        ({"num_nextn_predict_layers": 0, "use_mtp": True}, {"num_nextn_predict_layers": 0, "use_mtp": True}),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, {"text_config": {"mtp_num_hidden_layers": 0}}),
        ({"mtp_config": {"num_nextn_predict_layers": 8}}, {"mtp_config": {"num_nextn_predict_layers": 0}}),
        (  # of each layer, and of those that are dropped
            {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "layer_types": ["a", "b", "c"], "d": [1, 2]},
            {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "layer_types": ["a", "b"], "d": [1, 2]},
        ),
    ],
)
def test_layers_of_mtp_are_found_in_any_config(config: dict[str, Any], exported: dict[str, Any]) -> None:
    assert consolidate.without_mtp(config) == exported


def _save_sharded(rank: int, store: str, directory: Path, tensors: dict[str, Tensor]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    save({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}, directory)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote, each half of the rows of every tensor of `llama-tied`."""
    directory = tmp_path_factory.mktemp("shards")
    store = str(tmp_path_factory.mktemp("store") / "store")
    # Spawned, as a fork of this process, which has threads of torch and others, may crash.
    mp.spawn(_save_sharded, (store, directory, trained_tensors(CONFIGS["llama-tied"])), nprocs=2)
    assert len(list((directory / "model").glob("*.distcp"))) == 2
    return directory


@pytest.fixture
def sharded(shards: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of two ranks, and its tensors."""
    config = CONFIGS["llama-tied"]
    make_model(config)
    tensors = trained_tensors(config)
    shutil.copytree(shards, layout.checkpoint_root("exp") / "run" / layout.step_name(3))
    return finish(tensors), tensors


def test_shards_of_two_ranks_become_several_files_with_an_index(sharded: tuple[Path, dict[str, Tensor]]) -> None:
    _, tensors = sharded
    Path("params.yaml").write_text(PARAMS.replace("1GB", "6kB"))
    consolidate.main()
    found = exported_tensors()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    files = sorted(Path("outputs/exp/model").glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        content = load_file(path)
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= 6000
    index = publish.read_json(Path("outputs/exp/model/model.safetensors.index.json"))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {files[0].with_name(name) for name in index["weight_map"].values()} == set(files)
    loaded = AutoModelForCausalLM.from_pretrained("outputs/exp/model", local_files_only=True)
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in loaded.named_parameters())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_truncated_or_flipped_shard_is_named(sharded: tuple[Path, dict[str, Tensor]], rank: int) -> None:
    checkpoint, _ = sharded
    shard = checkpoint / f"model/__{rank}_0.distcp"
    content = shard.read_bytes()

    flip_bit(shard, len(content) // 2)
    assert_refused(f"{shard.name} is damaged")
    shard.write_bytes(content[:-1])
    assert_refused(f"{shard.name} .* it has {len(content) - 1} bytes instead of {len(content)}")
    shard.unlink()
    assert_refused(f"{shard.name} is missing")

    shard.write_bytes(content)
    consolidate.main()


def test_a_tensor_in_no_shard_is_an_error_and_not_zeros() -> None:
    """The manifest lists it, the shards do not contain it: torch's own converter would write zeros."""
    config = CONFIGS["llama-tied"]
    make_model(config)
    tensors = trained_tensors(config)
    checkpoint = make_checkpoint({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    write_manifest(checkpoint, tensors)
    assert_refused(r"model\.norm\.weight is missing")


def test_a_tensor_with_a_missing_part_is_refused(sharded: tuple[Path, dict[str, Tensor]]) -> None:
    import pickle

    checkpoint, tensors = sharded
    metadata = pickle.loads((checkpoint / "model/.metadata").read_bytes())
    metadata.state_dict_metadata["model.norm.weight"].chunks.pop()
    (checkpoint / "model/.metadata").write_bytes(pickle.dumps(metadata))
    write_manifest(checkpoint, tensors)
    assert_refused(r"model\.norm\.weight is incomplete: the shards do not contain element 8 of 16")


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "dtype"])
def test_the_manifest_must_list_the_tensors_of_the_model(change: str) -> None:
    config = CONFIGS["gpt2"]
    make_model(config)
    tensors = trained_tensors(config)
    name = "transformer.ln_f.weight"
    changed = {
        "missing": {key: tensor for key, tensor in tensors.items() if key != name},
        "unexpected": {**tensors, "other": torch.zeros(2)},
        "shape": {**tensors, name: torch.zeros(15)},
        "dtype": {**tensors, name: torch.zeros(16, dtype=torch.bfloat16)},
    }[change]
    make_checkpoint(changed)
    assert_refused("1 tensors are not those of the model\n  (other|transformer.ln_f.weight): ")


def test_shards_of_another_dtype_than_in_the_manifest_are_refused() -> None:
    config = CONFIGS["gpt2"]
    make_model(config)
    tensors = trained_tensors(config)
    half = {**tensors, "transformer.ln_f.weight": torch.zeros(16, dtype=torch.bfloat16)}
    write_manifest(make_checkpoint(half), tensors)
    assert_refused("transformer.ln_f.weight is .* torch.bfloat16 instead of .* torch.float32")


def test_checkpoints_and_models_other_than_those_of_the_pointer_are_refused() -> None:
    config = CONFIGS["gpt2"]
    make_model(config)
    tensors = trained_tensors(config)
    checkpoint = make_checkpoint(tensors)
    pointer = pointer_path("exp").read_text()
    shutil.rmtree(checkpoint)
    other = {**tensors, "transformer.ln_f.weight": tensors["transformer.ln_f.weight"] + 1}
    make_checkpoint(other)  # as a run that was started over does
    pointer_path("exp").write_text(pointer)
    assert_refused("is not the one that")
    shutil.rmtree(checkpoint)
    make_checkpoint(tensors)  # with another random id in .metadata
    assert pointer_path("exp").read_text() == pointer
    MANIFEST.write_text(MANIFEST.read_text() + " ")
    assert_refused("not of the model that .*step-00000003 was trained from: run `dvc repro train`")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_source_file_that_is_missing_or_changed_is_named(name: str) -> None:
    config = CONFIGS["gpt2"]
    make_model(config)
    make_checkpoint(trained_tensors(config))
    path = Path("models/tiny") / name
    content = path.read_bytes()
    path.write_bytes(content.replace(b"{", b"[", 1))
    assert_refused(f"{name} is damaged or was changed")
    path.unlink()
    assert_refused(f"{name} is missing")


@pytest.mark.parametrize("beside", [1.0, math.inf, -math.inf, math.nan])
def test_values_beyond_the_range_of_the_source_dtype_are_refused(beside: float) -> None:
    config = CONFIGS["gpt2"]
    make_model(config, torch.float16)
    tensors = trained_tensors(config)
    tensors["transformer.ln_f.weight"][3:5] = torch.tensor([7e4, beside])
    make_checkpoint(tensors)
    assert_refused(r"transformer\.ln_f\.weight has the value 70000, beyond the 65504 of torch\.float16")


def test_scalars_integers_and_mixed_dtypes_are_kept(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(7, dtype=torch.int64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "half": torch.randn(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "matrix": torch.randn(3, 5),
    }
    save(tensors, tmp_path / "checkpoint")
    specs = {name: mapped.TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    weights = mapped.ShardedTensors(tmp_path / "checkpoint")
    weights.check(specs)
    dtypes = {name: torch.bfloat16 if spec.dtype.is_floating_point else spec.dtype for name, spec in specs.items()}
    digests = mapped.write_safetensors(weights, specs, tmp_path, num_workers=2, dtypes=dtypes)
    assert digests.files == {"model.safetensors": publish.sha256_file(tmp_path / "model.safetensors")}
    found = load_file(tmp_path / "model.safetensors")
    assert digests.tensors == {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest() for name, tensor in found.items()
    }
    assert found.keys() == tensors.keys()
    content = (tmp_path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":  # each tensor is aligned, so that it can be used without a copy
            assert (start + entry["data_offsets"][0]) % found[name].itemsize == 0
    for name, tensor in tensors.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        assert torch.equal(found[name], expected)


@pytest.mark.parametrize("change", ["smaller", "shorter", "other"])
def test_an_archive_that_is_not_where_the_metadata_says_is_named(tmp_path: Path, change: str) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(3, 4)}
    save_rows(tmp_path, tensors)
    metadata = pickle.loads((tmp_path / "model/.metadata").read_bytes())
    index = MetadataIndex("b", [1, 0])
    place, other = metadata.storage_data[index], metadata.storage_data[MetadataIndex("a", [1, 0])]
    moved: dict[str, dict[str, int]] = {
        "smaller": {"offset": place.offset - 1},
        "shorter": {"length": 99},
        "other": {"offset": other.offset, "length": other.length},
    }
    metadata.storage_data[index] = dataclasses.replace(place, **moved[change])
    (tmp_path / "model/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StageError, match=rf"{file_name(1)} is damaged: b is not where \.metadata"):
        exported_rows(tmp_path, tensors)


def test_tensors_that_are_sharded_in_columns_are_refused(tmp_path: Path) -> None:
    save_rows(tmp_path, {"a": torch.randn(2, 2)})
    metadata = pickle.loads((tmp_path / "model/.metadata").read_bytes())
    entry = metadata.state_dict_metadata["a"]
    entry.chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets[::-1]), torch.Size(chunk.sizes[::-1])) for chunk in entry.chunks
    ]
    metadata.storage_data = {
        dataclasses.replace(index, offset=torch.Size(index.offset[::-1])): place
        for index, place in metadata.storage_data.items()
    }
    (tmp_path / "model/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StageError, match=r"a is incomplete: the shards do not contain element 0 of 4"):
        exported_rows(tmp_path, {"a": torch.zeros(2, 2)})


@pytest.mark.parametrize("num_workers", [1, 5])
@pytest.mark.parametrize("limit", [math.inf, 100])
def test_a_tensor_is_written_in_parts_wherever_its_shards_end(tmp_path: Path, limit: float, num_workers: int) -> None:
    """As the experts of a mixture are; those of a layer are in one file."""
    tensors = {"experts": torch.randn(5, 6, 7), "vector": torch.randn(5, 3)}
    save_rows(tmp_path, tensors)
    expected = {f"{n}.{half}": tensors["experts"][n, 3 * half :][:3] for n in range(5) for half in range(2)}
    expected |= {"rows": tensors["vector"][:3], "others": tensors["vector"][3:]}
    parts = {
        "experts": {name: (3, 7) for name in expected if "." in name},
        "vector": {"rows": (3, 3), "others": (2, 3)},
    }
    found = exported_rows(
        tmp_path, tensors, dtype=torch.bfloat16, num_workers=num_workers, max_shard_bytes=limit, parts=parts
    )
    assert len(list((tmp_path / "result").glob("*.safetensors"))) == (1 if limit == math.inf else 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in expected.items())


def test_a_part_without_a_place_is_refused(tmp_path: Path) -> None:
    """The table of chunks has it."""
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(3, 2)}
    save_rows(tmp_path, tensors)
    metadata = pickle.loads((tmp_path / "model/.metadata").read_bytes())
    del metadata.storage_data[MetadataIndex("b", [1, 0])]
    (tmp_path / "model/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StageError, match=r"b is incomplete: the shards do not contain element 2 of 6"):
        exported_rows(tmp_path, tensors)


def file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def save_rows(directory: Path, tensors: dict[str, Tensor]) -> None:
    """A checkpoint of as many ranks as the tensors have rows, each with a row of each."""
    (directory / "model").mkdir()
    metadata = Metadata({}, storage_data={})
    for name, tensor in tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size([n, *(0 for _ in tensor.shape[1:])]), torch.Size([1, *tensor.shape[1:]]))
            for n in range(len(tensor))
        ]
        metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(), tensor.shape, chunks)
    for rank in range(next(iter(tensors.values())).shape[0]):
        content = io.BytesIO()
        for number, (name, tensor) in enumerate(tensors.items()):
            content.write(b"?" * number)  # at any place
            start = content.tell()
            torch.save(tensor[rank : rank + 1].clone(), content)
            place = _StorageInfo(file_name(rank), start, content.tell() - start)
            metadata.storage_data[MetadataIndex(name, [rank, *(0 for _ in tensor.shape[1:])])] = place
        (directory / "model" / file_name(rank)).write_bytes(content.getvalue())
    (directory / "model/.metadata").write_bytes(pickle.dumps(metadata))


def exported_rows(
    directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32, num_workers: int = 2,
    **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    weights = mapped.ShardedTensors(directory)
    specs = {name: mapped.TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    weights.check(specs)
    (directory / "result").mkdir()
    mapped.write_safetensors(weights, specs, directory / "result", num_workers, dict.fromkeys(specs, dtype), **options)
    files = (directory / "result").glob("*.safetensors")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_memory_is_that_of_the_largest_piece(tmp_path: Path, dtype: str) -> None:
    """With 200 MiB, whatever the number of pieces. The system frees the pages of mapped files, so they do not count."""
    tensors = {f"matrix.{number}": torch.full((8, 1 << 20), float(number)) for number in range(12)}  # 12 x 32 MiB
    save(tensors, tmp_path / "checkpoint")
    script = """
import sys
import threading
import torch
from pathlib import Path
from stages.export import mapped
specs = {f"matrix.{number}": mapped.TensorSpec((8, 1 << 20), torch.float32) for number in range(12)}
weights = mapped.ShardedTensors(Path("checkpoint"))
weights.check(specs)
def memory():  # in KiB
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
before, measured, is_over = memory(), [], threading.Event()
def watch():
    while not is_over.wait(0.001):
        measured.append(memory())
watcher = threading.Thread(target=watch)
watcher.start()
mapped.write_safetensors(weights, specs, Path(), 16, dict.fromkeys(specs, getattr(torch, sys.argv[1])))
is_over.set()
watcher.join()
print(max(measured) - before >> 10)
"""
    process = subprocess.run(
        [sys.executable, "-c", script, dtype], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 32 <= int(process.stdout) < 32 + 200  # MiB, of 384


def test_a_file_has_its_space_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a full disk is an error: where it has no room for a page that is mapped, it kills the process."""
    tensors = {"a": torch.zeros(8, 1 << 16)}
    save_rows(tmp_path, tensors)
    load = mapped.ShardedTensors.load
    found: list[os.stat_result] = []

    def observed(*arguments: Any) -> None:
        found.append((tmp_path / "result/model.safetensors").stat())
        load(*arguments)

    monkeypatch.setattr(mapped.ShardedTensors, "load", observed)
    exported_rows(tmp_path, tensors)
    [status] = found
    assert status.st_blocks * 512 >= status.st_size > 2 << 20


def test_weights_are_stored_in_export_dtype() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config, torch.bfloat16)
    weights = trained_tensors(config)
    make_checkpoint(weights)
    Path("params.yaml").write_text(PARAMS.replace("null", "fp32"))
    consolidate.main()
    model = AutoModelForCausalLM.from_pretrained("outputs/exp/model")
    assert model.dtype == torch.float32
    stored = model.state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights.items())


def test_the_same_checkpoint_gives_the_same_bytes() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config, pretrained=False)
    make_checkpoint(trained_tensors(config))
    consolidate.main()
    target = Path("outputs/exp/model")
    first = {path.name: path.read_bytes() for path in target.iterdir()}
    shutil.rmtree(target)
    consolidate.main()
    assert first == {path.name: path.read_bytes() for path in target.iterdir()}
    assert first.keys() >= {"config.json", "generation_config.json", "tokenizer.json", "README.md", "lineage.json"}
    here = str(Path().resolve()).encode()
    assert not any(here in content for content in first.values())

    config_json = json.loads(first["config.json"])
    assert config_json["architectures"] == ["LlamaForCausalLM"]
    assert config_json["dtype"] == "float32"
    lineage = json.loads(first["lineage.json"])
    assert lineage["weights"] == {"model.safetensors": publish.sha256_file(target / "model.safetensors")}
    assert (lineage["run_id"], lineage["step"], lineage["model"]["name"]) == ("run", 3, "models/tiny")


def card_of(text: str) -> ModelCard:
    """The card as the library of the Hub reads it; what it writes is the same."""
    found = ModelCard(text)
    again = ModelCard(str(found))
    assert found.data.to_dict() == again.data.to_dict()
    return found


def test_the_card_has_the_evaluation_of_this_very_step() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config, pretrained=False)
    checkpoint = make_checkpoint(trained_tensors(config))
    target = Path("outputs/exp/model")
    consolidate.main()
    found = card_of((target / "README.md").read_text())
    metrics = {result.metric_type: result.metric_value for result in found.data.eval_results or []}
    assert metrics == {"loss": 2.25, "perplexity": 9.48774}
    assert "trained for 3 steps from random weights" in found.text
    assert "rounded" not in str(found)

    # With the bytes of the text there are bits per byte; of other tokens they are unknown.
    part, encoder = PartMetrics(1, 48, 48, 12, 4.0, 0.0, 0, 1), EncoderMetrics("", 0, None)
    for tokens, expected in ((fingerprint("t", "v"), 2.25 / math.log(2) / 4), ("other", None)):
        PackMetrics(part, part, encoder, "", tokens, Origin({}, {})).write(RECORDS["pack"])
        consolidate.main()
        found = card_of((target / "README.md").read_text())
        metrics = {result.metric_type: result.metric_value for result in found.data.eval_results or []}
        assert metrics.get("bits_per_byte") == (expected and pytest.approx(expected))

    Path("params.yaml").write_text(PARAMS.replace("null", "bf16"))
    consolidate.main()
    found = card_of((target / "README.md").read_text())
    assert found.data.eval_results is not None
    assert found.data.eval_results[0].metric_value == 2.25
    assert "before the weights were rounded to bfloat16" in (found.data.eval_results[0].metric_name or "")
    assert "On held-out text, before the weights were rounded to bfloat16:" in found.text

    # The last validation was before this step: its loss is that of other weights.
    (checkpoint / "history.tsv").write_text("step\tvalidation_loss\n0\t4.5\n2\t2.25\n")
    write_manifest(checkpoint, trained_tensors(config))
    consolidate.main()
    found = card_of((target / "README.md").read_text())
    assert found.data.eval_results is None
    assert "was not measured at step 3" in found.text


@pytest.mark.parametrize("loss", [800.0, math.inf, math.nan])
def test_only_finite_numbers_are_metrics(loss: float) -> None:
    losses = card.Losses(loss, loss)
    assert losses.metrics().keys() == ({"loss", "bits_per_byte"} if loss == 800 else set())
    config = CONFIGS["llama-tied"]
    make_model(config)
    make_checkpoint(trained_tensors(config))
    consolidate.main()
    lineage = Lineage.read(Path("outputs/exp/model/lineage.json"))
    text = card.readme(lineage, "LlamaForCausalLM", "float32", False, ModelLicense({}, "", {}), losses)
    assert ("is not finite at step 3" in text) == (loss != 800)
    assert ("| metric | value |" in text) == (loss == 800)


def test_the_card_of_a_model_of_conversations_shows_the_chat_template() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    make_checkpoint(trained_tensors(config))
    consolidate.main()
    lineage = Lineage.read(Path("outputs/exp/model/lineage.json"))
    for rules, is_chat in (
        (None, False),
        ([{"files": "**", "text": "$.text"}], False),
        ([{"files": "a/**", "text": "$.text"}, {"files": "**", "messages": "$.messages"}], True),
    ):
        origins = {"extract": Origin({"records": rules}, {})}
        terms, losses = ModelLicense({}, "", {}), card.Losses(2.0, None)
        text = card.readme(dataclasses.replace(lineage, origins=origins), "A", "float32", False, terms, losses)
        assert ("apply_chat_template" in text) == is_chat


@pytest.mark.parametrize(
    ("stated", "generation", "expected"),
    [
        (None, None, [0, 5, 3]),  # and not the 2 of LlamaConfig
        (7, None, [7, 0, 5, 3]),
        (7, 0, [0, 5, 3]),
        (None, [5, 9], [5, 9, 0, 3]),
    ],
)
def test_generated_text_ends_where_documents_and_turns_have_ended(
    stated: int | None, generation: int | list[int] | None, expected: list[int]
) -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    model = Path("models/tiny")
    own = publish.read_json(model / "config.json")
    del own["eos_token_id"]
    publish.write_json(model / "config.json", own if stated is None else {**own, "eos_token_id": stated})
    (model / "generation_config.json").unlink()
    if generation is not None:
        publish.write_json(model / "generation_config.json", {"eos_token_id": generation})
    target = Path("outputs/exp/model")
    tensors = trained_tensors(config)

    def ends() -> Any:
        write_model_manifest()
        shutil.rmtree(layout.checkpoint_root("exp"), ignore_errors=True)
        make_checkpoint(tensors)
        consolidate.main()
        return AutoModelForCausalLM.from_pretrained(target, local_files_only=True).generation_config.eos_token_id

    without = [token for token in expected if token != 3 and (token != 5 or generation == [5, 9])]
    assert ends() == (without if len(without) > 1 else without[0])

    # With conversations, and a template in the place of those that the model had.
    own = publish.read_json(model / "tokenizer_config.json")
    publish.write_json(model / "tokenizer_config.json", {**own, "chat_template": "old"})
    publish.write_json(model / "chat_template.json", {"chat_template": "old"})
    publish.write_text(model / "additional_chat_templates/tool_use.jinja", "old")
    chats = ConversationMetrics(1, 9, 9, 0, {}, [], [5, 3])
    part, encoder = PartMetrics(1, 0, 0, 9, None, None, 0, 1, conversations=chats), EncoderMetrics("", 0, None)
    packed = PackMetrics(part, part, encoder, "", fingerprint("t", "v"), Origin({}, {}), {"default": "new", "rag": "b"})
    packed.write(RECORDS["pack"])
    assert ends() == expected
    assert [path.name for path in target.glob("chat_template*")] == ["chat_template.jinja"]
    assert "chat_template" not in publish.read_json(target / "tokenizer_config.json")
    assert AutoTokenizer.from_pretrained(target, local_files_only=True).chat_template == {"default": "new", "rag": "b"}
    lineage = Lineage.read(target / "lineage.json")
    assert lineage.files["additional_chat_templates/rag.jinja"] == FileEntry.of_text("b").sha256
    Path(RECORDS["pack"]).unlink()  # without conversations those of the model stay
    ends()
    assert [path.name for path in (target / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]


def test_the_license_of_the_initial_model_is_carried_on() -> None:
    config = CONFIGS["llama-tied"]
    front = "license: other\nlicense_name: tiny\nlicense_link: LICENSE.md\nlanguage: [en]\nbase_model: a/b\n"
    make_model(config)
    Path("models/tiny/README.md").write_text(f"---\n{front}---\n# Tiny\n")
    Path("models/tiny/LICENSE.md").write_text("All of it.")
    tensors = trained_tensors(config)
    make_checkpoint(tensors)
    target = Path("outputs/exp/model")
    for generation in range(2):
        write_model_manifest()
        finish(tensors)
        consolidate.main()
        found = card_of((target / "README.md").read_text())
        license_of = (found.data.license, found.data.license_name, found.data.license_link)
        assert license_of == ("other", "tiny", "LICENSE.md")
        assert found.data.language == ["en"]
        # Of a directory, the Hub has no page; what that was made from here, it has.
        assert found.data.base_model == (None if generation == 0 else "a/b")
        assert "is `tiny` (LICENSE.md). Its text is in `LICENSE.md`." in found.text
        assert (target / "LICENSE.md").read_text() == "All of it."
        assert Lineage.read(target / "lineage.json").files["LICENSE.md"] == publish.sha256_file(target / "LICENSE.md")
        if generation == 0:  # its weights are the start of another training
            text = (target / "README.md").read_text().replace("language:", "base_model: a/b\nlanguage:")
            shutil.rmtree("models/tiny")
            shutil.copytree(target, "models/tiny")
            Path("models/tiny/README.md").write_text(text)

    path = Path("models/tiny/LICENSE.md")
    path.write_text("None of it")
    shutil.rmtree(target)
    target.with_name("adapter").rmdir()  # empty
    assert_refused("LICENSE.md is damaged or was changed")
    path.unlink()
    assert_refused("LICENSE.md is missing")


def test_the_license_of_a_config_is_not_that_of_random_weights() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config, pretrained=False)
    Path("models/tiny/README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n")
    write_model_manifest()
    make_checkpoint(trained_tensors(config))
    consolidate.main()
    found = card_of(Path("outputs/exp/model/README.md").read_text())
    assert (found.data.license, found.data.language, found.data.base_model) == ("unknown", None, None)
    assert "Config and tokenizer have a license of their own. That of `models/tiny` is `apache-2.0`." in found.text


def test_the_card_names_the_base_model_on_the_hub() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    make_checkpoint(trained_tensors(config))
    consolidate.main()
    lineage = Lineage.read(Path("outputs/exp/model/lineage.json"))
    source = dataclasses.replace(lineage.model, name="owner/base", commit="c" * 40)
    lineage = dataclasses.replace(lineage, model=source)
    terms = ModelLicense({"license": "mit", "language": "en"}, None, {})
    local = dataclasses.replace(lineage, model=dataclasses.replace(source, name="/home/ann/tiny", commit=None))
    assert "/home" not in card.readme(local, "LlamaForCausalLM", "float32", False, terms, None)
    for is_random, expected in ((False, ("owner/base", "finetune")), (True, (None, None))):
        text = card.readme(lineage, "LlamaForCausalLM", "float32", is_random, terms, None)
        data = card_of(text).data
        assert (data.base_model, data.get("base_model_relation")) == expected
        assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")


def test_the_lineage_contains_the_lineage_of_the_initial_model() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    make_checkpoint(trained_tensors(config))
    parent = Lineage(
        run_id="first",
        step=7,
        adopted=Adoption(run_id="zeroth", step=2, differences=[], adopted=None),
        model=InitialModel(name="models/other", revision="main", commit=None, manifest="m", lineage=None),
        data=TokenFingerprints(train="t", validation="v"),
        params={"lr": 1e-5, "fsdp": {"size": None}},
        code="c",
        packages={"torch": torch.__version__},
        checkpoint="cs",
        weights={"model.safetensors": publish.sha256_file(Path("models/tiny/model.safetensors"))},
    )
    of_other_weights = dataclasses.replace(parent, weights={"model.safetensors": "another"})
    path = Path("models/tiny/lineage.json")
    for content, expected in (
        (parent, parent),
        (of_other_weights, None),
        (json.dumps(dataclasses.asdict(parent)), None),
        ("[]", None),
        ("?", None),
    ):
        if isinstance(content, Lineage):
            content.write(path)
        else:
            path.write_text(content)
        write_model_manifest()
        finish(trained_tensors(config))
        consolidate.main()
        lineage = Lineage.read(Path("outputs/exp/model/lineage.json"))
        assert (lineage.run_id, lineage.model.lineage) == ("run", expected)
        assert ("the result of run `first`" in Path("outputs/exp/model/README.md").read_text()) == bool(expected)


def test_the_lineage_names_what_encoded_the_data() -> None:
    make_model(CONFIGS["llama-tied"])
    make_checkpoint(trained_tensors(CONFIGS["llama-tied"]))
    part = PartMetrics(1, 1, 1, 1, None, None, 0, 0)
    encoding = EncoderMetrics("tokenizers 1", 0, None)
    for validation, encoder in ((None, None), ("v", "tokenizers 1"), ("of other data", None)):
        if validation:
            tokens = fingerprint("t", validation)
            PackMetrics(part, part, encoding, "", tokens, Origin({}, {})).write(Path("data/pack.json"))
        finish(trained_tensors(CONFIGS["llama-tied"]))
        consolidate.main()
        assert Lineage.read(Path("outputs/exp/model/lineage.json")).encoder == encoder


def test_the_lineage_names_how_the_data_was_made_and_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    make_model(CONFIGS["llama-tied"])
    make_checkpoint(trained_tensors(CONFIGS["llama-tied"]))
    finish(trained_tensors(CONFIGS["llama-tied"]))
    consolidate.main()
    target = Path("outputs/exp/model")
    lineage = Lineage.read(target / "lineage.json")
    assert (lineage.splits, lineage.corpus, lineage.origins) == (None, None, {})
    described = {path.name for path in target.iterdir()} - {"README.md", "lineage.json"}
    assert {*lineage.weights, *lineage.files} == described
    assert lineage.files["config.json"] == publish.sha256_file(target / "config.json")

    origins = {"organize": {"num_splits": 4}, "extract": {"min_chars": 1}, "pack": {"seq_length": 32}}
    digests: dict[str, dict[str, Any]] = {"organize": {}, "extract": {"fingerprint": "f"}}
    text = dataclasses.asdict(PartMetrics(1, 48, 48, 12, 4.0, 0.0, 0, 1))
    encoder = dataclasses.asdict(EncoderMetrics("", 0, None))
    digests["pack"] = {
        "train": text, "validation": text, "encoder": encoder,
        "source": "f", "fingerprint": fingerprint("t", "v"),
    }  # fmt: skip
    for stage, params in origins.items():
        record = {"origin": {"params": params, "packages": {"pyarrow": "1"}}, **digests[stage]}
        publish.write_json(RECORDS[stage], record)
        digests["extract"]["source"] = publish.sha256_file(RECORDS["organize"])
    capsys.readouterr()
    consolidate.main()
    lineage = Lineage.read(target / "lineage.json")
    assert lineage.splits == publish.sha256_file(RECORDS["organize"])
    assert lineage.corpus == "f"
    assert lineage.origins == {stage: Origin(params, {"pyarrow": "1"}) for stage, params in origins.items()}
    assert list(lineage.origins) == ["organize", "extract", "pack"]

    assert "warning" not in capsys.readouterr().out
    # Stages that ran again since, on other data: their records, and those before them, are not of this model.
    for stage, left in (("organize", ["extract", "pack"]), ("extract", ["pack"]), ("pack", [])):
        record = publish.read_json(RECORDS[stage])
        changed = {"fingerprint": "other"} if "fingerprint" in record else {"files": 1}
        publish.write_json(RECORDS[stage], {**record, **changed})
        consolidate.main()
        lineage = Lineage.read(target / "lineage.json")
        assert list(lineage.origins) == left
        assert f"{RECORDS[stage]}: missing, damaged, or of other data" in capsys.readouterr().out
        assert (lineage.splits, lineage.corpus) == (None, "f" if "extract" in left else None)


def test_a_killed_export_publishes_nothing_and_the_next_run_does() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    tensors = trained_tensors(config)
    make_checkpoint(tensors)
    script = """
import time
from stages import consolidate
from stages.export import mapped
mapped.ShardedTensors.load = lambda *args: time.sleep(60)
consolidate.main()
"""
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(REPO)})
    wait_for(lambda: list(Path("outputs/exp").glob("model.*.tmp/model.safetensors")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("outputs/exp/model").exists()
    consolidate.main()
    assert not list(Path("outputs/exp").glob("model.*"))
    assert exported_tensors().keys() == tensors.keys()


@pytest.mark.parametrize("kind", ["limit", "torch", "reader"])
def test_too_little_memory_is_one_message_and_publishes_nothing(kind: str) -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    tensors = trained_tensors(config)
    make_checkpoint(tensors)
    # The allocator may still have room for this little model: more than that is asked for.
    refused = {
        "limit": "(limit(), bytearray(1 << 30))",
        "torch": "torch.empty(1 << 50)",
        "reader": "setattr(torch, 'load', lambda *args, **options: torch.empty(1 << 50))",
    }[kind]
    script = f"""
import resource
import torch
from stages import consolidate
from stages.base import command
from stages.export import mapped
def limit():  # as `ulimit -v`, but of what the interpreter and the libraries leave
    size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size + 1000 << 10,) * 2)
write = mapped.write_safetensors
mapped.write_safetensors = lambda *args, **options: ({refused}, write(*args, **options))[1]
command.run(consolidate.main)
"""
    process = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True
    )
    assert process.returncode == 2
    message = r"error: memory ran out \(.*Error.*\): lower runtime.num_workers or raise its limit, and run again\n"
    assert re.fullmatch(message, process.stderr)
    assert sorted(path.name for path in Path("outputs/exp").iterdir()) == [".model.lock", "checkpoints", "run.json"]
    consolidate.main()
    assert exported_tensors().keys() == tensors.keys()


def test_any_checkpoint_gives_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    tensors = trained_tensors(config)
    checkpoint = make_checkpoint(tensors)
    pointer_path("exp").unlink()
    monkeypatch.setattr(sys, "argv", ["consolidate", "--checkpoint", str(checkpoint), "--output", "elsewhere/model"])
    consolidate.main()
    loaded = AutoModelForCausalLM.from_pretrained("elsewhere/model")
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in loaded.named_parameters())
    monkeypatch.setattr(sys, "argv", ["consolidate", "--checkpoint", "step-3", "--output", "elsewhere/other"])
    with pytest.raises(StageError, match=r"^--checkpoint: step-3 is no checkpoint: it has no manifest.json$"):
        consolidate.main()


@pytest.mark.parametrize("output", [".", "outputs", "outputs/exp", "notes", "notes/a.txt"])
def test_what_is_no_model_is_not_replaced(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    checkpoint = make_checkpoint(trained_tensors(config))
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["consolidate", "--checkpoint", str(checkpoint), "--output", output])
    with pytest.raises(StageError, match=r"exists, and is no model of this pipeline: give a new or empty directory"):
        consolidate.main()
    Path("empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["consolidate", "--checkpoint", str(checkpoint), "--output", "empty"])
    consolidate.main()
    consolidate.main()  # a model is replaced
    assert Path("empty/model.safetensors").is_file()


def test_a_checkpoint_of_another_model_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    checkpoint = make_checkpoint(trained_tensors(config))
    write_model_manifest()
    manifest = CheckpointManifest.read(checkpoint)
    dataclasses.replace(manifest, identity=dataclasses.replace(manifest.identity, model="0" * 64)).write(checkpoint)
    monkeypatch.setattr(sys, "argv", ["consolidate", "--checkpoint", str(checkpoint), "--output", "elsewhere"])
    with pytest.raises(
        StageError, match=r"not of the model that .*step-00000003 .*: set model_name and model_revision"
    ):
        consolidate.main()


@pytest.mark.parametrize("options", [["--checkpoint", "a"], ["--output", "a"]])
def test_options_that_belong_together(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["consolidate", *options])
    with pytest.raises(SystemExit, match="2"):
        consolidate.main()


def test_a_mistake_of_the_user_is_one_message() -> None:
    process = start_stage("consolidate")
    _, error = process.communicate()
    assert process.returncode == 2
    assert error == "error: data/model.json is missing: run `dvc repro download`\n"


def test_a_tokenizer_that_encodes_in_another_way_than_in_the_training_is_refused() -> None:
    config = CONFIGS["llama-tied"]
    model = make_model(config)
    trained = Tokenizer.from_file(str(TOKENIZER))
    trained.add_tokens(["a b"])
    publish.write_text(TOKENIZER, trained.to_str())
    dataclasses.replace(model, tokenizer=FileEntry.of(TOKENIZER)).write()
    make_checkpoint(trained_tensors(config))
    with pytest.raises(StageError, match="the exported model would encode 'a b' with other tokens than it was trained"):
        consolidate.main()
    assert not Path("outputs/exp/model").exists()
