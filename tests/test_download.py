"""Finding and checking a model: from a directory or the cache, without a socket, or a clear error."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config

from stages import download
from stages.artifacts import publish
from stages.artifacts.command import StageError
from stages.download import DownloadParams
from stages.model import headers, hub, manifest, meta

ROOT = Path(download.__file__).parents[1]
REPO, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"

SIZES: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
LAYERS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=True)
GPT2 = GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=32)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)


def write_model(
    directory: Path,
    config: PretrainedConfig = LLAMA,
    weights: bool = True,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Path:
    """A model directory as `save_pretrained` makes it; several shards of about 4 kB where there are weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if weights:
        model.save_pretrained(directory, **{"max_shard_size": "4KB", **how})
    else:
        model.config.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def cached(source: Path, home: Path) -> Path:
    """Lay `source` into a HF_HOME as huggingface_hub does; returns the snapshot's directory."""
    repo = home / "hub" / "models--someone--tiny"
    snapshot = repo / "snapshots" / COMMIT
    for directory in (repo / "blobs", repo / "refs", snapshot):
        directory.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for path in source.iterdir():
        blob = repo / "blobs" / publish.sha256_file(path)
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HF_HOME, in which any attempt to open a socket fails the test."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def refuse(*args: Any) -> None:
        pytest.fail("opened a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path / "home"


def describe(name: str = "model", initial_weights: Any = "auto") -> manifest.ModelManifest:
    return download.describe(DownloadParams(name, "main", initial_weights))


@pytest.mark.parametrize(
    ("config", "layer", "tied"),
    [
        (LLAMA, "LlamaDecoderLayer", {"lm_head.weight": "model.embed_tokens.weight"}),
        (LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=False), "LlamaDecoderLayer", {}),
        (GPT2, "GPT2Block", {"lm_head.weight": "transformer.wte.weight"}),
        (Qwen3Config(**SIZES, **LAYERS, num_key_value_heads=1, head_dim=8), "Qwen3DecoderLayer", {}),
    ],
    ids=["llama-tied", "llama-untied", "gpt2", "qwen3"],
)
def test_the_manifest_says_what_the_model_is(config: PretrainedConfig, layer: str, tied: dict[str, str]) -> None:
    write_model(Path("model"), config, dtype=torch.bfloat16)
    found = describe()
    model = AutoModelForCausalLM.from_pretrained("model")
    assert found.architecture == type(model).__name__
    assert found.num_parameters == model.num_parameters()
    assert (found.layer_classes, found.tied_weights) == ([layer], tied)
    assert (found.dtype, found.vocab_size, found.commit) == ("bfloat16", 64, None)
    assert found.max_seq_length == config.max_position_embeddings
    assert found.eos_token_id == 2  # the tokenizer's, which ends the documents, not the config's
    assert len(found.weights) > 1
    assert set(found.files) == {path.name for path in Path("model").iterdir()}
    assert found.files["config.json"].sha256 == publish.sha256_file(Path("model/config.json"))


def test_the_stage_writes_a_manifest_that_can_be_read_and_repeated() -> None:
    write_model(Path("model"), weights=False)
    Path("params.yaml").write_text("model_name: model\nmodel_revision: main\ninitial_weights: auto\n")
    command = [sys.executable, "-m", "stages.download"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_TOKEN": "hf_SENTINEL"}
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert process.stdout.startswith("download: model (a local directory): LlamaForCausalLM, 5,")
    assert "random weights" in process.stdout
    first = manifest.MANIFEST.read_bytes()
    assert manifest.read() == describe()
    assert manifest.directory(manifest.read()) == Path("model")
    manifest.write(describe())
    assert manifest.MANIFEST.read_bytes() == first
    assert b"SENTINEL" not in first + process.stdout.encode() + process.stderr.encode()


def test_initial_weights_decides_what_is_read() -> None:
    write_model(Path("full"))
    write_model(Path("bare"), weights=False)
    assert describe("full", "pretrained").weights == describe("full", "auto").weights != []
    assert describe("bare", "auto").weights == describe("full", "random").weights == []
    assert headers.INDEX not in describe("full", "random").files
    with pytest.raises(StageError, match="initial_weights is 'pretrained', but 'bare' has no safetensors"):
        describe("bare", "pretrained")


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys; sys.argv = ['download']; import stages.download; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"


def test_a_cached_hub_model_needs_no_socket(home: Path) -> None:
    snapshot = cached(write_model(Path("source")), home)
    found = describe(REPO)
    assert found.commit == COMMIT
    assert found.weights == headers.weight_files(snapshot) != []
    assert manifest.directory(found) == manifest.verify(found) == snapshot
    assert str(home) not in json.dumps(publish.read_json(_written(found)))

    blob = (snapshot / found.weights[0]).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x01")
    with pytest.raises(StageError, match=f"{found.weights[0]} was changed since the download"):
        manifest.verify(found)
    assert manifest.verify(found, ["config.json"]) == snapshot  # only what is asked for is read
    shutil.rmtree(home)
    with pytest.raises(StageError, match=f"{REPO} at commit {COMMIT} is not in HF_HOME"):
        manifest.directory(found)


def test_the_commit_stays_the_same_when_the_branch_moves_on(home: Path) -> None:
    snapshot = cached(write_model(Path("source")), home)
    found = describe(REPO)
    other = snapshot.with_name("f" * 40)
    shutil.copytree(snapshot, other, symlinks=True)
    (home / "hub" / "models--someone--tiny" / "refs" / "main").write_text(other.name)
    assert manifest.directory(found) == snapshot
    assert describe(REPO).commit == other.name


def _written(found: manifest.ModelManifest) -> Path:
    manifest.write(found)
    return manifest.MANIFEST


def test_offline_and_not_cached_is_one_clear_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StageError) as error:
        describe(REPO)
    for part in (REPO, "'main'", str(home), "config.json", "HF_HUB_OFFLINE", f"hf download {REPO}"):
        assert part in str(error.value)
    with pytest.raises(StageError, match="no such directory, and a Hub id looks otherwise"):
        describe("models/that/is/not/there")


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "weights"])
def test_a_cache_that_lacks_a_file_is_not_taken_for_complete(
    home: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Above all: weights that are not in the cache must not mean random weights."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cached(write_model(Path("source"), max_shard_size="1GB"), home)
    name = "model.safetensors" if lacking == "weights" else lacking
    (snapshot / name).unlink()
    with pytest.raises(StageError, match=f"lacks .*{name}"):
        describe(REPO)


def resolve_in_a_process(endpoint: str, token: str) -> subprocess.CompletedProcess[str]:
    script = (
        "from stages.model import hub; from stages.artifacts import command; hub._TIMEOUT = 1\n"
        f"command.run(lambda: hub.resolve({REPO!r}, 'main', True))"
    )
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env |= {"HF_HOME": str(Path("home").resolve()), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token}
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("answer", ["refused", "silent"])
def test_a_hub_that_cannot_be_reached_fails_within_seconds(answer: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    if answer == "refused":
        server.close()
    began = time.monotonic()
    process = resolve_in_a_process(f"http://127.0.0.1:{port}", "hf_SENTINEL")
    server.close()
    assert time.monotonic() - began < 10
    assert process.returncode == 2
    assert "the Hub was not reached" in process.stderr
    assert process.stderr.count("\n") == 1
    assert "SENTINEL" not in process.stdout + process.stderr


def test_a_token_that_no_header_can_hold_is_not_shown() -> None:
    """The HTTP client's own error for such a token quotes it."""
    server = socket.create_server(("127.0.0.1", 0))
    for token in ("hf_SENTINEL\u00cf", "hf_SENTINEL\x01"):
        process = resolve_in_a_process(f"http://127.0.0.1:{server.getsockname()[1]}", token)
        assert process.returncode == 2
        assert "SENTINEL" not in process.stdout + process.stderr
    server.close()


def first_shard(directory: Path) -> Path:
    return directory / headers.weight_files(directory)[0]


def test_a_shard_that_is_missing_truncated_or_damaged_is_named() -> None:
    write_model(Path("model"))
    shard = first_shard(Path("model"))
    whole = shard.read_bytes()
    for content in (
        whole[:-1],
        whole + b"\0",
        whole[:100],
        whole[:4],
        b"\xff" * 99,
        whole.replace(b"data_offsets", b"data_offsetz", 1),
    ):
        shard.write_bytes(content)
        with pytest.raises(StageError, match=shard.name):
            describe()
    shard.unlink()
    with pytest.raises(StageError, match=f"{shard.name} is missing"):
        describe()
    shard.write_bytes(whole)
    describe()


def test_one_flipped_bit_is_noticed_after_the_download() -> None:
    write_model(Path("model"))
    found = describe()
    shard = first_shard(Path("model"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StageError, match=f"{shard.name} was changed since the download"):
        manifest.verify(found)


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(17)


def _retype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(16, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"1 missing in the safetensors files:\n  model\.layers\.1\.mlp\.up_proj\.weight"),
        (_add, r"1 not expected by the model:\n  model\.layers\.7\.mlp\.up_proj\.weight"),
        (_reshape, r"1 of another shape:\n  model\.norm\.weight is \[17\] in model\.safetensors.* \[16\]"),
        (_retype, r"1 of another type:\n  model\.norm\.weight is I8 in model\.safetensors"),
    ],
)
def test_headers_are_held_against_the_config(change: Callable[[dict[str, torch.Tensor]], None], message: str) -> None:
    write_model(Path("model"), max_shard_size="1GB")
    path = Path("model/model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(StageError, match=message):
        describe()


def test_no_weight_is_read_to_check_the_headers() -> None:
    """All but the header of the file is a hole of the disk, far larger than it."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 1 << 16}, **{**LAYERS, "hidden_size": 1 << 14})
    write_model(Path("model"), LLAMA, weights=False)
    config.save_pretrained("model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with open("model/model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert end > 10 * 2**30
    began = time.monotonic()
    built = meta.build(Path("model"))
    found = meta.check_headers(built, headers.read(Path("model"), ["model.safetensors"]))
    assert found.keys() == model.state_dict().keys()
    assert time.monotonic() - began < 5


def test_names_of_older_checkpoints_are_found() -> None:
    """GPT-2 on the Hub has no prefix `transformer.`, and stores masks that the model no longer has."""
    write_model(Path("model"), GPT2, max_shard_size="1GB")
    path = Path("model/model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, path, {"format": "pt"})
    describe()
    found = meta.check_headers(meta.build(Path("model")), headers.read(Path("model"), ["model.safetensors"]))
    assert found["transformer.wte.weight"].key == "wte.weight"
    assert "lm_head.weight" not in found


def test_a_tied_parameter_stored_twice_must_be_the_same() -> None:
    write_model(Path("model"), max_shard_size="1GB")
    path = Path("model/model.safetensors")
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, path, {"format": "pt"})
    describe()
    save_file({**tensors, "lm_head.weight": embedding + 1}, path, {"format": "pt"})
    with pytest.raises(StageError, match=r"config\.json ties them"):
        describe()
    del tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding}, path, {"format": "pt"})  # under the other name only
    describe()


def test_experts_stored_one_by_one_are_refused_with_the_reason() -> None:
    write_model(Path("model"), MixtralConfig(**SIZES, **LAYERS, num_key_value_heads=1, num_local_experts=2))
    with pytest.raises(StageError, match="experts one by one"):
        describe()
    assert describe(initial_weights="random").layer_classes == ["MixtralDecoderLayer"]


@pytest.mark.parametrize("where", ["directory", "cache"])
def test_pickled_weights_are_refused(where: str, request: pytest.FixtureRequest) -> None:
    write_model(Path("model"), weights=False)
    Path("model/pytorch_model.bin").write_bytes(b"never read")
    name = "model"
    if where == "cache":
        cached(Path("model"), request.getfixturevalue("home"))
        name = REPO
    with pytest.raises(StageError, match=r"weights are pickles \(pytorch_model.bin\)"):
        describe(name)
    assert "pytorch_model.bin" not in describe(name, "random").files


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_with_code_of_its_own_is_refused(name: str) -> None:
    write_model(Path("model"))
    path = Path("model") / name
    publish.write_json(path, {**publish.read_json(path), "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}})
    Path("model/modeling.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(StageError, match=f"{name} asks for code of its own"):
        describe()


def test_what_is_no_model_is_refused() -> None:
    Path("empty").mkdir()
    with pytest.raises(StageError, match=r"no config\.json"):
        describe("empty")
    write_model(Path("model"), weights=False)
    publish.write_json(Path("model/config.json"), {"model_type": "t5"})
    with pytest.raises(StageError, match="no causal language model that transformers"):
        describe()
    publish.write_json(Path("model/config.json"), {"model_type": "nothing-of-the-kind"})
    with pytest.raises(StageError, match="no causal language model that transformers"):
        describe()
    write_model(Path("quantized"))
    publish.write_json(
        Path("quantized/config.json"),
        {
            **publish.read_json(Path("quantized/config.json")),
            "quantization_config": {"quant_method": "gptq", "bits": 4},
        },
    )
    with pytest.raises(StageError, match="quantized"):
        describe("quantized")


def test_a_tokenizer_json_is_needed() -> None:
    write_model(Path("model"))
    path = Path("model/tokenizer.json")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(StageError, match="tokenizer cannot be loaded"):
        describe()
    path.unlink()
    with pytest.raises(StageError, match=r"no tokenizer\.json(.|\n)*save_pretrained"):
        describe()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(1, 1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1, 1)
        self.few = torch.nn.ModuleList([torch.nn.Conv1d(1, 1, 1)])
        self.many = torch.nn.ModuleList([Layer(), Layer()])


def test_layers_are_found_without_their_names() -> None:
    model = Model()
    assert meta.layer_classes(model) == ["Layer"]  # the longest list
    model._no_split_modules = {"Embedding", "Linear", "Layer"}
    assert meta.layer_classes(model) == ["Layer"]  # neither what is in no list nor a part of a layer
    model._no_split_modules = {"Conv1d", "Layer"}
    assert meta.layer_classes(model) == ["Conv1d", "Layer"]
    with pytest.raises(StageError, match="no list of layers"):
        meta.layer_classes(torch.nn.Linear(1, 1))


def test_only_the_files_that_the_model_needs_are_recorded() -> None:
    write_model(Path("model"))
    for name in ("README.md", "notes.txt", "optimizer.pt", "consolidated.safetensors"):
        Path("model", name).write_text("not needed")
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    source = hub.resolve("model", "main", want_weights=True)
    names = hub.model_files(source)
    assert "chat_template.jinja" in names
    assert not {"README.md", "notes.txt", "optimizer.pt", "consolidated.safetensors"} & set(names)
