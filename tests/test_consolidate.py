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
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.filesystem import _StorageInfo
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Glm4MoeConfig,
    Lfm2MoeConfig,
    LlamaConfig,
    LlavaConfig,
    PretrainedConfig,
)

from stages import consolidate, download
from stages.base import publish
from stages.base.errors import StageError
from stages.base.files import FileEntry
from stages.base.identity import Adoption
from stages.base.origin import DATA_METRICS, Origin
from stages.base.packed import ConversationMetrics, fingerprint
from stages.checkpointing import layout
from stages.checkpointing.layout import TensorEntry
from stages.checkpointing.pointer import RunPointer, pointer_path
from stages.export import card, mapped
from stages.export.config import add_ends, without_mtp, write_config
from stages.export.lineage import Lineage
from stages.model import tokenizer
from stages.model.license import ModelLicense
from stages.model.manifest import MODEL_MANIFEST, TOKENIZER, ModelManifest
from tests import models
from tests.artifacts import describe, make_lineage, packed_text, write_model, write_pack_metrics
from tests.project import flip_bit, run_here, wait_for
from tests.trainings import checkpoint_manifest

PARAMS = "experiment_name: exp\nexport_dtype: null\nmax_shard_size: 1GB\nruntime: {num_workers: 2}\n"
MODEL, TARGET = Path("models/tiny"), Path("outputs/exp/model")
TOKENS = fingerprint("t", "v")
"""Of the tokens that all checkpoints here were trained with."""
NORM = "model.norm.weight"
NAMES = ["llama", "llama untied, scaled rope", "gpt2", "gemma3"]
CONFIGS = {**{name: models.CONFIGS[name] for name in NAMES}, "mixtral": models.MIXTRAL}


class Trained(NamedTuple):
    """A checkpoint of the current project."""

    directory: Path
    tensors: dict[str, Tensor]

    def finish(self) -> None:
        """Write its manifest, as training does after the shards, for what it and the initial model are now."""
        (self.directory / "history.tsv").write_text("step\tvalidation_loss\n0\t4.5\n3\t2.25\n")
        self.list_files()

    def list_files(self, **listed: Tensor | None) -> None:
        """Write the manifest, with other tensors than its own where `listed` has them, and run.json."""
        identity = checkpoint_manifest().identity
        identity = replace(
            identity,
            params={"experiment_name": "exp", "lr": 0.1, "document_mask": True},
            data=make_lineage().data,
            model=publish.sha256_file(MODEL_MANIFEST),
        )
        files = (path for path in sorted(self.directory.rglob("*")) if path.is_file() and path.name != layout.MANIFEST)
        tensors = {name: tensor for name, tensor in {**self.tensors, **listed}.items() if tensor is not None}
        checkpoint_manifest(
            run_id="run", step=3, total_steps=3, identity=identity,
            files={str(path.relative_to(self.directory)): FileEntry.of(path) for path in files},
            tensors={
                name: TensorEntry(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in tensors.items()
            },
        ).write(self.directory)  # fmt: skip
        RunPointer.to(self.directory).write(pointer_path("exp"))


@pytest.fixture(autouse=True)
def project(empty_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is the same in all projects."""
    monkeypatch.setattr(sys, "argv", ["consolidate"])
    monkeypatch.delenv("CHECKPOINT_ROOT", raising=False)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of them
    Path("params.yaml").write_text(PARAMS)


@pytest.fixture(scope="module")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.delenv("CHECKPOINT_ROOT", raising=False)
        make_model("llama")
        tensors = trained_tensors(CONFIGS["llama"])
        make_checkpoint(tensors, num_ranks=2)
    return directory, tensors


@pytest.fixture
def llama(_llama: tuple[Path, dict[str, Tensor]], project: None) -> Trained:
    """A model, and a checkpoint of two ranks, each with half of the rows of every tensor."""
    directory, tensors = _llama
    shutil.copytree(directory, ".", dirs_exist_ok=True)
    return Trained(checkpoint_directory(), tensors)


def make_model(config: str | PretrainedConfig, dtype: torch.dtype | None = torch.float32) -> None:
    """A model directory and its manifest; without a dtype it has no weights."""
    write_model(MODEL, CONFIGS[config] if isinstance(config, str) else config, dtype, words=["<eos>", "a", "b"])
    write_model_manifest()


def write_model_manifest() -> None:
    manifest = describe(str(MODEL))
    download.describe_license(manifest).write()
    publish.write_text(TOKENIZER, tokenizer.load(MODEL).content)
    manifest.write()


def trained_tensors(config: PretrainedConfig) -> dict[str, Tensor]:
    """The parameters of a model, as training saves them: fp32, a tied one under its first name only."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def checkpoint_directory() -> Path:
    return layout.checkpoint_root("exp") / "run" / layout.step_name(3)


def make_checkpoint(tensors: dict[str, Tensor], num_ranks: int | None = None) -> Trained:
    """A checkpoint that torch writes, or one of so many ranks."""
    checkpoint = Trained(checkpoint_directory(), tensors)
    if num_ranks:
        save_rows(checkpoint.directory, tensors, num_ranks)
    else:
        save(tensors, checkpoint.directory)
    checkpoint.finish()
    return checkpoint


def save(tensors: dict[str, Tensor], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=directory / "model")


def save_rows(directory: Path, tensors: dict[str, Tensor], num_ranks: int) -> None:
    """A checkpoint of some ranks, each with a part of the rows of each tensor, as FSDP shards them."""
    (directory / "model").mkdir(parents=True)
    metadata = stored.Metadata({}, storage_data={})
    for name, tensor in tensors.items():
        metadata.state_dict_metadata[name] = stored.TensorStorageMetadata(stored.TensorProperties(), tensor.shape, [])
    for rank in range(num_ranks):
        content = io.BytesIO()
        for number, (name, tensor) in enumerate(tensors.items()):
            content.write(b"?" * number)  # at any place
            start, part = content.tell(), tensor.tensor_split(num_ranks)[rank]
            first_row = sum(len(before) for before in tensor.tensor_split(num_ranks)[:rank])
            offsets = torch.Size([first_row, *(0 for _ in tensor.shape[1:])])
            torch.save(part.clone(), content)
            metadata.state_dict_metadata[name].chunks.append(stored.ChunkStorageMetadata(offsets, part.shape))
            place = _StorageInfo(file_name(rank), start, content.tell() - start)
            metadata.storage_data[stored.MetadataIndex(name, offsets)] = place
        (directory / "model" / file_name(rank)).write_bytes(content.getvalue())
    (directory / "model/.metadata").write_bytes(pickle.dumps(metadata))


def file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def run(*options: str) -> None:
    sys.argv[1:] = options
    consolidate.main()


def exported_tensors(directory: Path = TARGET) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def exported_lineage() -> Lineage:
    consolidate.main()
    return Lineage.read(TARGET / "lineage.json")


def exported_card() -> ModelCard:
    consolidate.main()
    return card_of((TARGET / "README.md").read_text())


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names, dtypes, shapes and values are the same."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def assert_refused(match: str) -> None:
    """The stage fails with a clear message, and publishes nothing."""
    with pytest.raises(StageError, match=match):
        consolidate.main()
    assert_nothing_is_published()


def assert_nothing_is_published() -> None:
    published = {path.name for path in Path("outputs/exp").iterdir() if path.suffix != ".lock"}
    assert published == {"checkpoints", "run.json"}


@pytest.mark.parametrize(
    ("name", "dtype", "export_dtype"),
    [
        *((name, torch.bfloat16, "null") for name in CONFIGS),
        ("llama", torch.float32, "null"),
        ("llama", torch.bfloat16, "fp32"),
    ],
    ids=str,
)
def test_values_dtypes_and_size_are_those_of_save_pretrained(name: str, dtype: torch.dtype, export_dtype: str) -> None:
    config = CONFIGS[name]
    make_model(config, dtype)
    Path("params.yaml").write_text(PARAMS.replace("null", export_dtype))
    tensors = trained_tensors(config)
    make_checkpoint(tensors)
    consolidate.main()

    dtype = torch.float32 if export_dtype == "fp32" else dtype
    live = AutoModelForCausalLM.from_config(config, dtype=dtype)  # not `.to(dtype)`, which would round buffers, too
    live.load_state_dict({key: tensor.to(dtype) for key, tensor in tensors.items()}, strict=False)
    live.save_pretrained("reference")
    expected = load_file("reference/model.safetensors")
    assert_equal(exported_tensors(), expected)
    size = sum(tensor.nbytes for tensor in expected.values())
    assert size <= (TARGET / "model.safetensors").stat().st_size < size + 8192

    loaded, info = AutoModelForCausalLM.from_pretrained(TARGET, local_files_only=True, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    input_ids = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(input_ids).logits, live.eval()(input_ids).logits)
    assert AutoTokenizer.from_pretrained(TARGET, local_files_only=True)("a b")["input_ids"] == [1, 2]


MIXTURE = {
    **models.SIZES,
    **models.LAYERS,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 1,
}
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
    AutoModelForCausalLM.from_pretrained(TARGET, local_files_only=True).save_pretrained("again")
    assert_equal(found, load_file("again/model.safetensors"))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.float32}


def test_the_config_says_that_layers_which_the_model_lacks_are_not_there() -> None:
    """A server would make random ones: those of MTP, which transformers drops. One is the default of the class."""
    config, path = BIASES["mlp.gate.e_score_correction_bias"], MODEL / "config.json"
    make_model(config)
    own = publish.read_json(path)
    values = {name: value for name, value in own.items() if "nextn" not in name and "mtp" not in name}
    live = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    checkpoint = make_checkpoint({name: tensor.detach() for name, tensor in live.state_dict().items()})
    for stated in ({"num_nextn_predict_layers": 1}, {}):
        publish.write_json(path, {**values, **stated})
        write_model_manifest()
        checkpoint.finish()
        consolidate.main()
        found = publish.read_json(TARGET / "config.json")
        assert found.pop("num_nextn_predict_layers") == 0
        assert found == {**values, "architectures": ["Glm4MoeForCausalLM"], "dtype": "float32"}


def test_the_config_keeps_layers_of_mtp_that_the_class_has() -> None:
    config, path = BIASES["mlp.gate.e_score_correction_bias"], Path("config.json")
    model = AutoModelForCausalLM.from_config(config)
    model.mtp = torch.nn.Linear(2, 2)
    publish.write_json(path, {"num_nextn_predict_layers": 1})
    write_config(path, "Glm4MoeForCausalLM", "float32", model)
    assert publish.read_json(path)["num_nextn_predict_layers"] == 1


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
    assert without_mtp(config) == exported


def test_shards_of_two_ranks_become_several_files_with_an_index(llama: Trained) -> None:
    Path("params.yaml").write_text(PARAMS.replace("1GB", "6kB"))
    consolidate.main()
    assert_equal(exported_tensors(), llama.tensors)
    files = sorted(TARGET.glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        content = load_file(path)
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= 6000
    index = publish.read_json(TARGET / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in llama.tensors.values())
    assert {files[0].with_name(name) for name in index["weight_map"].values()} == set(files)
    loaded = AutoModelForCausalLM.from_pretrained(TARGET, local_files_only=True)
    assert_equal({name: parameter.detach() for name, parameter in loaded.named_parameters()}, llama.tensors)


# What is read.


def assert_damage_is_named(path: Path) -> None:
    """One bit, one byte less, or no file."""
    content = path.read_bytes()
    flip_bit(path, len(content) // 2)
    assert_refused(f"{path.name} is damaged or was changed")
    path.write_bytes(content[:-1])
    assert_refused(f"{path.name} .* it has {len(content) - 1} bytes instead of {len(content)}")
    path.unlink()
    assert_refused(f"{path.name} is missing")
    path.write_bytes(content)


@pytest.mark.parametrize("name", [f"model/{file_name(0)}", f"model/{file_name(1)}", "model/.metadata", "history.tsv"])
def test_a_missing_truncated_or_flipped_file_of_the_checkpoint_is_named(llama: Trained, name: str) -> None:
    assert_damage_is_named(llama.directory / name)
    consolidate.main()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE.md"])
def test_a_source_file_that_is_missing_or_changed_is_named(llama: Trained, name: str) -> None:
    (MODEL / "README.md").write_text("---\nlicense: other\nlicense_link: LICENSE.md\n---\n")
    (MODEL / "LICENSE.md").write_text("All of it.")
    write_model_manifest()
    llama.finish()
    assert_damage_is_named(MODEL / name)


@pytest.mark.parametrize(
    ("where", "changed", "problem"),
    [
        ("manifest", {NORM: None}, f"in 1 tensor\n  {NORM}: no tensor instead of float32 [24]"),
        ("manifest", {"other": torch.zeros(2)}, "in 1 tensor\n  other: float32 [2] instead of no tensor"),
        ("manifest", {NORM: torch.zeros(23)}, f"in 1 tensor\n  {NORM}: float32 [23] instead of float32 [24]"),
        ("manifest", {NORM: torch.zeros(24).half()}, f"in 1 tensor\n  {NORM}: float16 [24] instead of float32 [24]"),
        ("shards", {NORM: None}, f"{NORM} is missing"),  # torch's own converter would write zeros
        ("shards", {"other": torch.zeros(2)}, "other is not expected"),
        ("shards", {NORM: torch.zeros(23)}, f"{NORM} is [23] torch.float32 instead of [24] torch.float32"),
        ("shards", {NORM: torch.zeros(24).half()}, f"{NORM} is [24] torch.float16 instead of [24] torch.float32"),
    ],
    ids=["not listed", "listed too", "listed shape", "listed dtype", "not stored", "stored too", "shape", "dtype"],
)
def test_a_tensor_that_is_missing_or_is_not_that_of_the_model_is_named(
    llama: Trained, where: str, changed: dict[str, Tensor | None], problem: str
) -> None:
    if where == "manifest":
        llama.list_files(**changed)
    else:
        shutil.rmtree(llama.directory / "model")
        tensors = {**llama.tensors, **changed}
        save({name: tensor for name, tensor in tensors.items() if tensor is not None}, llama.directory)
        llama.list_files()
    assert_refused(re.escape(problem))


def test_a_checkpoint_other_than_that_of_the_pointer_is_refused(llama: Trained) -> None:
    pointer = pointer_path("exp").read_text()
    shutil.rmtree(llama.directory)
    make_checkpoint({**llama.tensors, NORM: llama.tensors[NORM] + 1})  # as a run that was started over does
    pointer_path("exp").write_text(pointer)
    assert_refused("is not the one that")
    for _ in range(2):
        shutil.rmtree(llama.directory)
        make_checkpoint(llama.tensors)  # with another random id in .metadata
        pointer, before = pointer_path("exp").read_text(), pointer
    assert pointer == before


def test_a_checkpoint_of_another_model_is_said_to_be_one(llama: Trained) -> None:
    MODEL_MANIFEST.write_text(MODEL_MANIFEST.read_text() + " ")
    problem = "not of the model that .*step-00000003 was trained from: "
    assert_refused(f"{problem}run `dvc repro train`")
    with pytest.raises(StageError, match=f"{problem}set model_name and model_revision"):
        run("--checkpoint", str(llama.directory), "--output", "elsewhere")


def test_a_mistake_of_the_user_is_one_message() -> None:
    assert run_here("consolidate", status=2) == "error: data/model.json is missing: run `dvc repro download`\n"


def test_a_tokenizer_that_encodes_in_another_way_than_in_the_training_is_refused(llama: Trained) -> None:
    trained = Tokenizer.from_file(str(TOKENIZER))
    trained.add_tokens(["a b"])
    publish.write_text(TOKENIZER, trained.to_str())
    replace(ModelManifest.read(), tokenizer=FileEntry.of(TOKENIZER)).write()
    llama.finish()
    assert_refused("the exported model would encode 'a b' with other tokens than it was trained")


# From shards to files.


def write_rows(
    directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32, num_workers: int = 2,
    parts: dict[str, dict[str, tuple[int, ...]]] | None = None, **options: Any,
) -> mapped.Digests:  # fmt: skip
    """Write a checkpoint in `directory` below `result`; what is no floating-point number keeps its dtype."""
    weights = mapped.ShardedTensors(directory)
    weights.check(tensors)
    dtypes = {name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in tensors.items()}
    (directory / "result").mkdir()
    parts = parts or {name: {name: tuple(tensor.shape)} for name, tensor in tensors.items()}
    return mapped.write_safetensors(weights.load, parts, directory / "result", num_workers, dtypes, **options)


def exported_rows(directory: Path, tensors: dict[str, Tensor], *arguments: Any, **options: Any) -> dict[str, Tensor]:
    """What `write_rows` has written."""
    write_rows(directory, tensors, *arguments, **options)
    return exported_tensors(directory / "result")


@pytest.mark.parametrize("beside", [1.0, math.inf, -math.inf, math.nan])
def test_values_beyond_the_range_of_the_stored_dtype_are_refused(tmp_path: Path, beside: float) -> None:
    tensors = {"a": torch.tensor([1.0, 7e4, beside])}
    save(tensors, tmp_path)
    problem = r"a has the value 70000, beyond the 65504 of torch\.float16: set export_dtype"
    with pytest.raises(StageError, match=problem):
        exported_rows(tmp_path, tensors, torch.float16)


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
    save(tensors, tmp_path)
    digests = write_rows(tmp_path, tensors, torch.bfloat16)
    path = tmp_path / "result/model.safetensors"
    assert digests.files == {path.name: publish.sha256_file(path)}
    found = load_file(path)
    assert digests.tensors == {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest() for name, tensor in found.items()
    }
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":  # each tensor is aligned, so that it can be used without a copy
            assert (start + entry["data_offsets"][0]) % found[name].itemsize == 0
    assert_equal(found, {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("smaller offset", r"__1_0.distcp is damaged: b is not where \.metadata says"),
        ("smaller length", r"__1_0.distcp is damaged: b is not where \.metadata says"),
        ("place of another", r"__1_0.distcp is damaged: b is not where \.metadata says"),
        ("no last part", "b is incomplete: the shards do not contain element 8 of 12"),
        ("a part without a place", "b is incomplete: the shards do not contain element 4 of 12"),
        ("columns", "a is incomplete: the shards do not contain element 0 of 9"),
    ],
)
def test_a_tensor_that_is_not_where_the_metadata_says_or_not_all_of_it_is_refused(
    tmp_path: Path, change: str, problem: str
) -> None:
    tensors = {"a": torch.randn(3, 3), "b": torch.randn(3, 4)}
    save_rows(tmp_path, tensors, 3)
    path = tmp_path / "model/.metadata"
    metadata = pickle.loads(path.read_bytes())
    chunks, places = metadata.state_dict_metadata, metadata.storage_data
    row_of_a, row_of_b = (stored.MetadataIndex(name, [1, 0]) for name in tensors)
    moved: dict[str, dict[str, int]] = {
        "smaller offset": {"offset": places[row_of_b].offset - 1},
        "smaller length": {"length": 99},
        "place of another": {"offset": places[row_of_a].offset, "length": places[row_of_a].length},
    }
    if change in moved:
        places[row_of_b] = replace(places[row_of_b], **moved[change])
    elif change == "no last part":
        chunks["b"].chunks.pop()
    elif change == "a part without a place":
        del places[row_of_b]
    else:
        for chunk in chunks["a"].chunks:
            place = places.pop(stored.MetadataIndex("a", chunk.offsets))
            chunk.offsets, chunk.sizes = chunk.offsets[::-1], chunk.sizes[::-1]
            places[stored.MetadataIndex("a", chunk.offsets)] = place
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(StageError, match=problem):
        exported_rows(tmp_path, tensors)


@pytest.mark.parametrize("num_workers", [1, 5])
@pytest.mark.parametrize("limit", [math.inf, 100])
def test_a_tensor_is_written_in_parts_wherever_its_shards_end(tmp_path: Path, limit: float, num_workers: int) -> None:
    """As the experts of a mixture are; those of a layer are in one file."""
    tensors = {"experts": torch.randn(5, 6, 7), "vector": torch.randn(5, 3)}
    save_rows(tmp_path, tensors, 5)
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
    assert_equal(found, {name: tensor.bfloat16() for name, tensor in expected.items()})


def test_the_memory_is_that_of_the_largest_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of pieces. The system frees the pages of mapped files, so they do not count."""
    # From 32 MiB on, the allocator gives what is freed back to the system.
    tensors = {f"matrix.{number}": torch.full((10, 1 << 20), float(number)) for number in range(6)}  # 6 x 40 MiB
    save(tensors, tmp_path)
    measured: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            measured.append(own_memory())

    for dtype in (torch.bfloat16, torch.float32):
        shutil.rmtree(tmp_path / "result", ignore_errors=True)
        before = own_memory()
        measured.clear()
        is_over.clear()
        with ThreadPoolExecutor(1) as watcher:
            watcher.submit(watch)
            try:
                write_rows(tmp_path, tensors, dtype, num_workers=16)
            finally:
                is_over.set()
        assert 40 <= max(measured) - before < 40 + 100  # of 240


def own_memory() -> int:
    """MiB of this process that are not those of files."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) >> 10


def test_a_file_has_its_space_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a full disk is an error: where it has no room for a page that is mapped, it kills the process."""
    tensors = {"a": torch.zeros(8, 1 << 16)}
    save_rows(tmp_path, tensors, 8)
    load = mapped.ShardedTensors.load
    found: list[os.stat_result] = []

    def observed(*arguments: Any) -> None:
        found.append((tmp_path / "result/model.safetensors").stat())
        load(*arguments)

    monkeypatch.setattr(mapped.ShardedTensors, "load", observed)
    exported_rows(tmp_path, tensors)
    [status] = found
    assert status.st_blocks * 512 >= status.st_size > 2 << 20


# The directory.


def test_the_same_checkpoint_gives_the_same_bytes(llama: Trained) -> None:
    consolidate.main()
    first = {path.name: path.read_bytes() for path in TARGET.iterdir()}
    shutil.rmtree(TARGET)
    lineage = exported_lineage()
    assert first == {path.name: path.read_bytes() for path in TARGET.iterdir()}
    assert first.keys() >= {"config.json", "generation_config.json", "tokenizer.json", "README.md", "lineage.json"}
    here = str(Path().resolve()).encode()
    assert not any(here in content for content in first.values())
    config = json.loads(first["config.json"])
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert (lineage.run_id, lineage.step, lineage.model.name) == ("run", 3, "models/tiny")
    assert lineage.weights.keys() == {"model.safetensors"}
    digests = lineage.weights | lineage.files
    assert digests == {
        name: publish.sha256_file(TARGET / name) for name in first.keys() - {"README.md", "lineage.json"}
    }


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # has threads, from Python 3.12 on
def test_a_killed_export_publishes_nothing_and_the_next_run_does(llama: Trained) -> None:
    """The process is a fork, which need not import torch."""
    if not (process := os.fork()):
        mapped.ShardedTensors.load = lambda *arguments: time.sleep(60)  # type: ignore[method-assign, assignment]
        try:
            consolidate.main()
        finally:
            os._exit(1)
    wait_for(lambda: list(Path("outputs/exp").glob("model.*.tmp/model.safetensors")))
    os.kill(process, signal.SIGKILL)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    assert not TARGET.exists()
    consolidate.main()
    assert not list(Path("outputs/exp").glob("model.*"))
    assert exported_tensors().keys() == llama.tensors.keys()


@pytest.mark.parametrize(
    ("owner", "name", "asks"),
    [
        (mapped, "write_safetensors", lambda: bytearray(1 << 60)),
        # Of torch, and where any other error would be that of a damaged shard.
        (torch, "load", lambda: torch.empty(1 << 50)),
    ],
    ids=["a file", "a shard"],
)
def test_too_little_memory_is_one_message_and_publishes_nothing(
    llama: Trained, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, asks: Callable[[], object]
) -> None:
    monkeypatch.setattr(owner, name, lambda *arguments, **options: asks())
    message = r"error: memory ran out \(.*Error.*\): lower runtime.num_workers or raise its limit, and run again\n"
    assert re.fullmatch(message, run_here("consolidate", status=2))
    assert_nothing_is_published()


def test_any_checkpoint_gives_a_model(llama: Trained) -> None:
    pointer_path("exp").unlink()
    Path("empty").mkdir()
    for output in ("elsewhere/model", "empty", "empty"):  # the last one is a model then, which is replaced
        run("--checkpoint", str(llama.directory), "--output", output)
        assert_equal(exported_tensors(Path(output)), llama.tensors)
    with pytest.raises(StageError, match=r"^--checkpoint: step-3 is no checkpoint: it has no manifest.json$"):
        run("--checkpoint", "step-3", "--output", "elsewhere/other")
    for option in ("--checkpoint", "--output"):
        with pytest.raises(SystemExit, match="2"):
            run(option, "a")


def test_the_initial_model_is_not_replaced(llama: Trained) -> None:
    """It may be a model of this pipeline: without it, no run that began with it can be exported or continued."""
    run("--checkpoint", str(llama.directory), "--output", "model")
    for path in Path("model").iterdir():
        shutil.copy(path, MODEL)
    write_model_manifest()
    llama.finish()
    before = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    with pytest.raises(StageError, match=r"models/tiny is the model that .*step-\d+ was trained from: give a new"):
        run("--checkpoint", str(llama.directory), "--output", str(MODEL))
    assert {path.name: path.read_bytes() for path in MODEL.iterdir()} == before


def test_what_is_no_model_is_not_replaced(llama: Trained) -> None:
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("mine")
    run("--checkpoint", str(llama.directory), "--output", "model")
    Path("model/gguf").mkdir()
    Path("model/gguf/a.gguf").write_text("mine")
    with pytest.raises(StageError, match=r"is replaced as a whole, and gguf/a\.gguf is not of its model: move it"):
        run("--checkpoint", str(llama.directory), "--output", "model")
    assert Path("model/gguf/a.gguf").read_text() == "mine"
    shutil.rmtree("model/gguf")
    for name in ("README.md", "generation_config.json"):
        before = Path("model", name).read_text()
        Path("model", name).write_text("{}")
        with pytest.raises(StageError, match=f"is replaced as a whole, and {name} was changed: move it"):
            run("--checkpoint", str(llama.directory), "--output", "model")
        Path("model", name).write_text(before)
    for output in (".", "outputs", "outputs/exp", "notes", "notes/a.txt"):
        with pytest.raises(StageError, match="exists, and is no model of this pipeline: give a new or empty directory"):
            run("--checkpoint", str(llama.directory), "--output", output)


@pytest.mark.parametrize(
    ("stated", "generation", "alone", "with_turns"),
    [
        (None, None, 0, [0, 5, 3]),  # and not the 2 of LlamaConfig
        (7, None, [7, 0], [7, 0, 5, 3]),
        (7, {"eos_token_id": 0}, 0, [0, 5, 3]),
        (None, {"eos_token_id": [5, 9]}, [5, 9, 0], [5, 9, 0, 3]),
        (7, {"max_length": 9}, 0, [0, 5, 3]),
        (2, None, 0, [0, 5, 3]),  # a word of this tokenizer
        (None, {"eos_token_id": [1, 9]}, [9, 0], [9, 0, 5, 3]),
    ],
)
def test_generated_text_ends_where_documents_and_turns_have_ended(
    llama: Trained, stated: int | None, generation: dict[str, Any] | None, alone: Any, with_turns: list[int]
) -> None:
    own = publish.read_json(MODEL / "config.json")
    del own["eos_token_id"]
    publish.write_json(MODEL / "config.json", own if stated is None else {**own, "eos_token_id": stated})
    (MODEL / "generation_config.json").unlink()
    if generation is not None:
        publish.write_json(MODEL / "generation_config.json", generation)
    write_model_manifest()
    llama.finish()
    for expected in (alone, with_turns):
        consolidate.main()
        loaded = AutoModelForCausalLM.from_pretrained(TARGET, local_files_only=True)
        assert loaded.generation_config.eos_token_id == expected
        write_conversations({"default": "new"})


def test_a_text_config_says_where_generated_text_ends_too(tmp_path: Path) -> None:
    config = LlavaConfig(text_config=LlamaConfig(eos_token_id=7))
    config.save_pretrained(tmp_path)
    reference: Any = SimpleNamespace(config=config)
    add_ends(tmp_path, reference, [0], ())
    assert publish.read_json(tmp_path / "generation_config.json")["eos_token_id"] == [7, 0]


def test_the_configs_in_a_config_name_the_dtype_of_the_export_too(tmp_path: Path) -> None:
    """As `save_pretrained` writes them."""
    text = {**models.SIZES, **models.LAYERS, "head_dim": 8, "num_key_value_heads": 1}
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=tower, dtype=torch.bfloat16)
    for dtype in ("bfloat16", "float16"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(tmp_path / dtype)
    path = tmp_path / "bfloat16/config.json"
    write_config(path, "Gemma3ForConditionalGeneration", "float16", model)
    assert publish.read_json(path) == publish.read_json(tmp_path / "float16/config.json")


def test_what_prepares_images_is_kept(llama: Trained) -> None:
    """Without it, vLLM does not load a Gemma 3."""
    publish.write_json(MODEL / "preprocessor_config.json", {"size": 896})
    write_model_manifest()
    llama.finish()
    consolidate.main()
    assert publish.read_json(TARGET / "preprocessor_config.json") == {"size": 896}


def write_conversations(templates: dict[str, str]) -> None:
    """Have the training data be conversations, whose turns ended with the tokens 5 and 3."""
    chats = ConversationMetrics(1, 9, 9, 0, {}, [], [5, 3])
    write_pack_metrics(TOKENS, packed_text(conversations=chats), chat_templates=templates)


def test_the_templates_of_the_conversations_replace_those_of_the_model(llama: Trained) -> None:
    own = publish.read_json(MODEL / "tokenizer_config.json")
    publish.write_json(MODEL / "tokenizer_config.json", {**own, "chat_template": "old"})
    publish.write_json(MODEL / "chat_template.json", {"chat_template": "old"})
    publish.write_text(MODEL / "additional_chat_templates/tool_use.jinja", "old")
    write_model_manifest()
    llama.finish()
    consolidate.main()
    assert [path.name for path in (TARGET / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]
    write_conversations({"default": "new", "rag": "b"})
    lineage = exported_lineage()
    assert [path.name for path in TARGET.glob("chat_template*")] == ["chat_template.jinja"]
    assert "chat_template" not in publish.read_json(TARGET / "tokenizer_config.json")
    assert AutoTokenizer.from_pretrained(TARGET, local_files_only=True).chat_template == {"default": "new", "rag": "b"}
    assert lineage.files["additional_chat_templates/rag.jinja"] == FileEntry.of_text("b").sha256


# The card.


def card_of(text: str) -> ModelCard:
    """The card as the library of the Hub reads it; what it writes is the same."""
    found = ModelCard(text)
    again = ModelCard(str(found))
    assert found.data.to_dict() == again.data.to_dict()
    return found


def readme(
    lineage: Lineage, losses: card.Losses | None = None, is_random: bool = False, **metadata: Any
) -> str:  # fmt: skip
    return card.readme(lineage, "LlamaForCausalLM", "float32", is_random, ModelLicense(metadata, "", {}), losses)


def test_the_card_has_the_evaluation_of_this_very_step(llama: Trained) -> None:
    # With the bytes of the text there are bits per byte; of other tokens they are unknown.
    for tokens, bits in ((None, {}), (TOKENS, {"bits_per_byte": 2.25 / math.log(2) / 4}), ("of others", {})):
        if tokens:
            write_pack_metrics(tokens, packed_text(bytes=48, tokens=12))
        found = exported_card()
        metrics = {result.metric_type: result.metric_value for result in found.data.eval_results or []}
        assert metrics == pytest.approx({"loss": 2.25, "perplexity": 9.48774} | bits, rel=1e-12)
    assert "rounded" not in str(found)

    Path("params.yaml").write_text(PARAMS.replace("null", "bf16"))
    found = exported_card()
    assert found.data.eval_results is not None
    assert found.data.eval_results[0].metric_value == 2.25
    assert "before the weights were rounded to bfloat16" in (found.data.eval_results[0].metric_name or "")
    assert "On held-out text, before the weights were rounded to bfloat16:" in found.text

    # The last validation was before this step: its loss is that of other weights.
    (llama.directory / "history.tsv").write_text("step\tvalidation_loss\n0\t4.5\n2\t2.25\n")
    llama.list_files()
    found = exported_card()
    assert found.data.eval_results is None
    assert "was not measured at step 3" in found.text


@pytest.mark.parametrize("loss", [800.0, math.inf, math.nan])
def test_only_finite_numbers_are_metrics(loss: float) -> None:
    losses = card.Losses(loss, loss)
    assert losses.metrics().keys() == ({"loss", "bits_per_byte"} if loss == 800 else set())
    text = readme(make_lineage(), losses)
    assert ("is not finite at step 3" in text) == (loss != 800)
    assert ("| metric | value |" in text) == (loss == 800)


def test_the_card_of_a_model_of_conversations_shows_the_chat_template() -> None:
    for rules, is_chat in (
        (None, False),
        ([{"files": "**", "text": "$.text"}], False),
        ([{"files": "a/**", "text": "$.text"}, {"files": "**", "messages": "$.messages"}], True),
    ):
        lineage = make_lineage(origins={"extract": Origin({"records": rules}, {})})
        assert ("apply_chat_template" in readme(lineage)) == is_chat


def test_the_card_names_the_base_model_on_the_hub() -> None:
    lineage = make_lineage()
    local = replace(lineage, model=replace(lineage.model, name="/home/ann/tiny"))
    source = replace(lineage.model, name="owner/base", commit="c" * 40)
    adapter = partial(card.adapter_readme, architecture="", terms=ModelLicense({}, "", {}), losses=None, problem=None)
    assert "/home" not in readme(local) + adapter(local)
    assert f'.from_pretrained("owner/base", revision="{source.commit}")' in adapter(replace(lineage, model=source))
    for is_random, expected in ((False, ("owner/base", "finetune")), (True, (None, None))):
        text = readme(replace(lineage, model=source), is_random=is_random, license="mit", language="en")
        data = card_of(text).data
        assert (data.base_model, data.get("base_model_relation")) == expected
        assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")


def test_the_license_of_the_initial_model_is_carried_on(llama: Trained) -> None:
    front = "license: other\nlicense_name: tiny\nlicense_link: LICENSE.md\nlanguage: [en]\nbase_model: a/b\n"
    (MODEL / "README.md").write_text(f"---\n{front}---\n# Tiny\n")
    (MODEL / "LICENSE.md").write_text("All of it.")
    # Of a directory, the Hub has no page; what that was made from here, it has.
    for base_model in (None, "a/b"):
        write_model_manifest()
        llama.finish()
        found = exported_card()
        assert (found.data.license, found.data.license_name, found.data.license_link) == ("other", "tiny", "LICENSE.md")
        assert (found.data.language, found.data.base_model) == (["en"], base_model)
        assert "is `tiny` (LICENSE.md). Its text is in `LICENSE.md`." in found.text
        assert (TARGET / "LICENSE.md").read_text() == "All of it."
        # Its weights are the start of another training.
        text = (TARGET / "README.md").read_text().replace("language:", "base_model: a/b\nlanguage:")
        shutil.rmtree(MODEL)
        shutil.copytree(TARGET, MODEL)
        (MODEL / "README.md").write_text(text)


def test_the_license_of_a_config_is_not_that_of_random_weights() -> None:
    make_model("llama", dtype=None)
    (MODEL / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n")
    write_model_manifest()
    make_checkpoint(trained_tensors(CONFIGS["llama"]))
    found = exported_card()
    assert (found.data.license, found.data.language, found.data.base_model) == ("unknown", None, None)
    assert "Config and tokenizer have a license of their own. That of `models/tiny` is `apache-2.0`." in found.text
    assert "trained for 3 steps from random weights" in found.text


# The lineage.


def test_the_lineage_contains_the_lineage_of_the_initial_model(llama: Trained) -> None:
    weights = {"model.safetensors": publish.sha256_file(MODEL / "model.safetensors")}
    adopted = Adoption(run_id="zeroth", step=2, differences=[], adopted=None)
    parent = make_lineage(run_id="first", step=7, adopted=adopted, weights=weights)
    of_other_weights = replace(parent, weights={"model.safetensors": "another"})
    path = MODEL / "lineage.json"
    for write, expected in (
        (lambda: parent.write(path), parent),
        (lambda: of_other_weights.write(path), None),
        (lambda: publish.write_json(path, dataclasses.asdict(parent)), None),  # without its digest
        (lambda: path.write_text("?"), None),
    ):
        write()
        write_model_manifest()
        llama.finish()
        lineage = exported_lineage()
        assert (lineage.run_id, lineage.model.lineage) == ("run", expected)
        assert ("the result of run `first`" in (TARGET / "README.md").read_text()) == bool(expected)


def test_the_lineage_names_how_the_data_was_made(llama: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    lineage = exported_lineage()
    assert (lineage.splits, lineage.corpus, lineage.encoder, lineage.origins) == (None, None, None, {})

    params: dict[str, dict[str, Any]] = {
        "organize": {"num_splits": 4}, "extract": {"min_chars": 1}, "deduplicate": {}, "pack": {"seq_length": 32},
    }  # fmt: skip
    origins = {stage: Origin(values, {"pyarrow": "1"}) for stage, values in params.items()}
    publish.write_json(DATA_METRICS["organize"], {"origin": origins["organize"]})
    splits = publish.sha256_file(DATA_METRICS["organize"])
    publish.write_json(DATA_METRICS["extract"], {"origin": origins["extract"], "source": splits, "fingerprint": "f"})
    found = {"origin": origins["deduplicate"], "source": "f", "fingerprint": "d"}
    publish.write_json(DATA_METRICS["deduplicate"], found)
    write_pack_metrics(TOKENS, encoder="tokenizers 1", source="d", origin=origins["pack"])
    capsys.readouterr()
    lineage = exported_lineage()
    assert (lineage.splits, lineage.corpus, lineage.encoder) == (splits, "f", "tokenizers 1")
    assert [*lineage.origins.items()] == [*origins.items()]
    assert "warning" not in capsys.readouterr().out

    # Stages that ran again since, on other data: their records, and those before them, are not of this model.
    for number, stage in enumerate(DATA_METRICS, 1):
        left = [*DATA_METRICS][number:]
        record = publish.read_json(DATA_METRICS[stage])
        changed = {"fingerprint": "other"} if "fingerprint" in record else {"files": 1}
        publish.write_json(DATA_METRICS[stage], {**record, **changed})
        lineage = exported_lineage()
        assert list(lineage.origins) == left
        output = capsys.readouterr().out
        assert f"{DATA_METRICS[stage]}: missing, damaged, or of other data" in output
        assert ("chat template" in output) == (stage == "pack")
        assert (lineage.splits, lineage.corpus) == (None, "f" if "extract" in left else None)
        assert lineage.encoder == ("tokenizers 1" if left else None)
