"""From a sharded checkpoint to a directory that transformers loads: the same values, or an error, and never zeros."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from stages import consolidate, download
from stages.artifacts import checkpoint, publish
from stages.artifacts.command import StageError
from stages.export import stream
from stages.model import headers, manifest
from stages.model.manifest import ModelManifest

SIZES: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
LAYERS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=False),
    "gpt2": GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "qwen3": Qwen3Config(**SIZES, **LAYERS, num_key_value_heads=1, head_dim=8),
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project as the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["consolidate"])
    for name in ("DVC_ROOT", "CHECKPOINT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    Path("params.yaml").write_text("experiment_name: exp\nexport_dtype: null\n")
    return tmp_path


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)


def make_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32, pretrained: bool = True) -> ModelManifest:
    """A model directory and its manifest, in the current project."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    directory = Path("models/tiny")
    if pretrained:
        model.save_pretrained(directory)
    else:
        model.config.save_pretrained(directory)
    write_tokenizer(directory)
    described = download.describe(download.DownloadParams("models/tiny", "main", "auto"))
    manifest.write(described)
    return described


def trained(config: PretrainedConfig) -> dict[str, Tensor]:
    """State of a model, as training saves it: fp32, a tied parameter under its first name only."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save(tensors: dict[str, Any], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(directory, thread_count=1)
        dcp.save({"model": tensors, "optimizer": {"step": torch.tensor(3.0)}}, storage_writer=writer)


def finish(tensors: dict[str, Tensor], step: int = 3) -> Path:
    """What training adds to the shards in the checkpoint's directory: its manifest, and the pointer to it."""
    source = checkpoint.root("exp") / "run" / f"step-{step:08d}"
    (source / "history.tsv").write_text("step\tvalidation_loss\n0\t4.5\n3\t2.25\n")
    seal(source, tensors, step)
    return source


def seal(source: Path, tensors: dict[str, Tensor], step: int = 3) -> None:
    described = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in tensors.items()
    }
    files = {
        path.name: {"size": path.stat().st_size, "sha256": publish.sha256_file(path)}
        for path in sorted(source.iterdir())
        if path.name != checkpoint.MANIFEST
    }
    common: dict[str, Any] = {
        "run_id": "run",
        "step": step,
        "identity": {
            "params": {"lr": 0.1},
            "data": {"train": "t", "validation": "v"},
            "model": publish.sha256_file(manifest.MANIFEST),
            "code": "c",
        },
        "adopted": None,
        "packages": {"torch": torch.__version__},
    }
    checkpoint.write_manifest(source, {"format": 1, **common, "files": files, "tensors": described})
    pointer = {
        **common,
        "checkpoint": source.name,
        "manifest_sha256": publish.sha256_file(source / checkpoint.MANIFEST),
    }
    publish.write_json(Path("outputs/exp/run.json"), pointer)


def make_checkpoint(tensors: dict[str, Tensor]) -> Path:
    source = checkpoint.root("exp") / "run" / "step-00000003"
    source.mkdir(parents=True)
    save(tensors, source)
    return finish(tensors)


def exported() -> dict[str, Tensor]:
    return {
        name: tensor
        for path in Path("outputs/exp/model").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def refused(match: str) -> None:
    """The stage fails with a clear message, and publishes nothing."""
    with pytest.raises(StageError, match=match):
        consolidate.main()
    assert sorted(path.name for path in Path("outputs/exp").iterdir()) == ["checkpoints", "run.json"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_values_dtypes_and_size_are_those_of_save_pretrained(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    make_model(config, dtype)
    tensors = trained(config)
    make_checkpoint(tensors)
    consolidate.main()

    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reference.load_state_dict(tensors, strict=False)
    reference.to(dtype).save_pretrained("reference")
    expected = load_file("reference/model.safetensors")
    found = exported()
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
    same = AutoModelForCausalLM.from_pretrained("reference", local_files_only=True)
    assert torch.equal(loaded(input_ids).logits, same(input_ids).logits)
    assert AutoTokenizer.from_pretrained("outputs/exp/model", local_files_only=True)("a b")["input_ids"] == [1, 2]


def _save_sharded(rank: int, store: str, directory: Path, tensors: dict[str, Tensor]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    save({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}, directory)
    dist.destroy_process_group()


@pytest.fixture
def sharded() -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint by two ranks, each of which holds half of the rows of every tensor."""
    config = CONFIGS["llama-tied"]
    make_model(config)
    tensors = trained(config)
    source = checkpoint.root("exp") / "run" / "step-00000003"
    source.mkdir(parents=True)
    mp.start_processes(_save_sharded, (str(Path("store").resolve()), source, tensors), nprocs=2, start_method="fork")
    assert len(list(source.glob("*.distcp"))) == 2
    return finish(tensors), tensors


def test_shards_of_two_ranks_become_several_files_with_an_index(
    sharded: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tensors = sharded
    monkeypatch.setattr(stream, "MAX_FILE_BYTES", 6000)
    consolidate.main()
    found = exported()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    files = sorted(Path("outputs/exp/model").glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        held = load_file(path)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 6000
    index = publish.read_json(Path("outputs/exp/model/model.safetensors.index.json"))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {files[0].with_name(name) for name in index["weight_map"].values()} == set(files)
    loaded = AutoModelForCausalLM.from_pretrained("outputs/exp/model", local_files_only=True)
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in loaded.named_parameters())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_truncated_or_flipped_shard_is_named(sharded: tuple[Path, dict[str, Tensor]], rank: int) -> None:
    source, _ = sharded
    shard = source / f"__{rank}_0.distcp"
    whole = shard.read_bytes()

    middle = len(whole) // 2
    shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    refused(f"{shard.name} is damaged")
    shard.write_bytes(whole[:-1])
    refused(f"{shard.name} has {len(whole) - 1} bytes instead of {len(whole)}")
    shard.unlink()
    refused(f"{shard.name} is missing")

    shard.write_bytes(whole)
    consolidate.main()


def test_a_tensor_that_no_shard_holds_is_never_zeros() -> None:
    """The manifest lists it, the shards do not: torch's own converter would write zeros."""
    config = CONFIGS["llama-tied"]
    make_model(config)
    tensors = trained(config)
    source = make_checkpoint({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    seal(source, tensors)
    refused(r"model\.norm\.weight is missing")


def test_a_tensor_of_which_the_shards_hold_a_part_is_refused(sharded: tuple[Path, dict[str, Tensor]]) -> None:
    import pickle

    source, tensors = sharded
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.model.norm.weight"].chunks.pop()
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(source, tensors)
    refused(r"model\.norm\.weight is not whole: the shards hold 8 of 16 elements")


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "dtype"])
def test_the_manifest_must_list_the_tensors_of_the_model(change: str) -> None:
    config = CONFIGS["gpt2"]
    make_model(config)
    tensors = trained(config)
    name = "transformer.ln_f.weight"
    changed = {
        "missing": {key: tensor for key, tensor in tensors.items() if key != name},
        "unexpected": {**tensors, "other": torch.zeros(2)},
        "shape": {**tensors, name: torch.zeros(15)},
        "dtype": {**tensors, name: torch.zeros(16, dtype=torch.bfloat16)},
    }[change]
    make_checkpoint(changed)
    refused("1 tensors are not those of the model\n  (other|transformer.ln_f.weight): ")


def test_shards_of_another_dtype_than_the_manifest_says_are_refused() -> None:
    config = CONFIGS["gpt2"]
    make_model(config)
    tensors = trained(config)
    half = {**tensors, "transformer.ln_f.weight": torch.zeros(16, dtype=torch.bfloat16)}
    seal(make_checkpoint(half), tensors)
    refused("transformer.ln_f.weight is .* torch.bfloat16 instead of .* torch.float32")


def test_the_pointer_names_one_manifest() -> None:
    config = CONFIGS["gpt2"]
    make_model(config)
    source = make_checkpoint(trained(config))
    path = source / checkpoint.MANIFEST
    content = path.read_text()
    path.write_text(content.replace('"step": 3', '"step": 4'))
    refused("is not the one that")
    path.write_text(content)
    manifest.MANIFEST.write_text(manifest.MANIFEST.read_text() + " ")
    refused("not the one that the run was trained with")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_source_file_that_is_missing_or_changed_is_named(name: str) -> None:
    config = CONFIGS["gpt2"]
    make_model(config)
    make_checkpoint(trained(config))
    path = Path("models/tiny") / name
    content = path.read_bytes()
    path.write_bytes(content.replace(b"{", b"[", 1))
    refused(f"{name} was changed since the download")
    path.unlink()
    refused(f"{name} is missing")


def test_values_beyond_the_range_of_the_source_dtype_are_refused() -> None:
    config = CONFIGS["gpt2"]
    make_model(config, torch.float16)
    tensors = trained(config)
    tensors["transformer.ln_f.weight"][3] = 7e4
    make_checkpoint(tensors)
    refused(r"transformer\.ln_f\.weight has values up to 70000, beyond the 65504 of torch\.float16")


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
    specs = {name: stream.TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    weights = stream.ShardedWeights(tmp_path / "checkpoint")
    weights.check(specs)
    digests = stream.write_safetensors(weights, specs, torch.bfloat16, tmp_path)
    assert digests == {"model.safetensors": publish.sha256_file(tmp_path / "model.safetensors")}
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, stored in headers.read(tmp_path, ["model.safetensors"]).items():
        assert stored.begin % found[name].itemsize == 0  # aligned, so that it can be used where it lies
    for name, tensor in tensors.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        assert torch.equal(found[name], expected)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Under a limit that the whole model would break."""
    tensors = {f"matrix.{number}": torch.full((8, 1 << 20), float(number)) for number in range(12)}  # 12 x 32 MiB
    save(tensors, tmp_path / "checkpoint")
    script = """
import torch
from pathlib import Path
from stages.export import stream
specs = {f"matrix.{number}": stream.TensorSpec((8, 1 << 20), torch.float32) for number in range(12)}
weights = stream.ShardedWeights(Path("checkpoint"))
weights.check(specs)
def peak():  # in KiB; ru_maxrss would count the parent, too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
stream.write_safetensors(weights, specs, torch.bfloat16, Path())
print(peak() - before >> 10)
"""
    root = Path(consolidate.__file__).parents[1]
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(process.stdout) < 200  # MiB, of 384


def test_weights_are_stored_in_the_dtype_that_is_asked_for() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config, torch.bfloat16)
    weights = trained(config)
    make_checkpoint(weights)
    Path("params.yaml").write_text("experiment_name: exp\nexport_dtype: fp32\n")
    consolidate.main()
    model = AutoModelForCausalLM.from_pretrained("outputs/exp/model")
    assert model.dtype == torch.float32
    stored = model.state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights.items())


def test_the_same_checkpoint_gives_the_same_bytes() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config, pretrained=False)
    make_checkpoint(trained(config))
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

    from huggingface_hub import ModelCard

    card = ModelCard(first["README.md"].decode())
    assert card.data.eval_results is not None
    assert card.data.eval_results[0].metric_value == 2.25
    assert "trained for 3 steps from random weights" in card.text


def test_the_lineage_contains_that_of_the_model_it_started_from() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    make_checkpoint(trained(config))
    source = Path("models/tiny/model.safetensors")
    parent = {"run_id": "first", "weights": {"model.safetensors": publish.sha256_file(source)}}
    foreign = {"run_id": "first", "weights": {"model.safetensors": "another"}}
    for content, expected in ((json.dumps(parent), parent), (json.dumps(foreign), None), ("[]", None), ("?", None)):
        Path("models/tiny/lineage.json").write_text(content)
        manifest.write(download.describe(download.DownloadParams("models/tiny", "main", "auto")))
        finish(trained(config))
        consolidate.main()
        lineage = json.loads(Path("outputs/exp/model/lineage.json").read_text())
        assert (lineage["run_id"], lineage["model"]["lineage"]) == ("run", expected)
        assert ("the result of run `first`" in Path("outputs/exp/model/README.md").read_text()) == bool(expected)


def test_a_kill_midway_publishes_nothing_and_the_next_run_does() -> None:
    config = CONFIGS["llama-tied"]
    make_model(config)
    tensors = trained(config)
    make_checkpoint(tensors)
    script = """
import time
from stages import consolidate
from stages.export import stream
stream.ShardedWeights.read = lambda *args: time.sleep(60)
consolidate.main()
"""
    root = Path(consolidate.__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(root)})
    half_written = Path("outputs/exp/model.tmp/model.safetensors")
    deadline = time.monotonic() + 60
    while not half_written.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert half_written.is_file()
    assert not Path("outputs/exp/model").exists()
    consolidate.main()
    assert not half_written.parent.exists()
    assert exported().keys() == tensors.keys()


def test_a_mistake_of_the_user_is_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    root = Path(consolidate.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.run([sys.executable, "-m", "stages.consolidate"], env=env, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == "error: data/model.json is missing: run `dvc repro download`\n"
