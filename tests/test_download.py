"""Finding and checking a model: from a directory or the cache, without a socket, or with a clear error."""

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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config

from stages import download
from stages.artifacts import publish
from stages.artifacts.errors import StageError
from stages.artifacts.model_files import WEIGHTS, WEIGHTS_INDEX
from stages.download import DownloadParams
from stages.model import headers, hub, meta
from stages.model.manifest import MANIFEST, ModelManifest
from tests.models import LAYERS, SIZES, write_tokenizer
from tests.project import REPO, flip_bit

pytestmark = pytest.mark.usefixtures("empty_project")

HUB_ID, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"

LLAMA = LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=True)
GPT2 = GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=32)


def write_model(
    directory: Path,
    config: PretrainedConfig = LLAMA,
    weights: bool = True,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "4KB",
) -> Path:
    """Make a model directory with `save_pretrained`; the weights are in several files of about `max_shard_size`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if weights:
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    else:
        model.config.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
    write_tokenizer(directory, ["a", "b", "<eos>"])
    return directory


def cached(source: Path, home: Path) -> Path:
    """Copy `source` into an HF_HOME with the layout of huggingface_hub; returns the snapshot's directory."""
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


def describe(name: str = "model", initial_weights: Any = "auto") -> ModelManifest:
    params = DownloadParams(model_name=name, model_revision="main", initial_weights=initial_weights)
    return download.describe(params)


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
def test_the_manifest_describes_the_model(config: PretrainedConfig, layer: str, tied: dict[str, str]) -> None:
    write_model(Path("model"), config, dtype=torch.bfloat16)
    found = describe()
    model = AutoModelForCausalLM.from_pretrained("model")
    assert found.architecture == type(model).__name__
    assert found.num_parameters == model.num_parameters()
    assert (found.layer_classes, found.tied_weights) == ([layer], tied)
    assert (found.dtype, found.vocab_size, found.commit) == ("bfloat16", 64, None)
    assert found.max_seq_length == config.max_position_embeddings
    assert found.eos_token_id == 2  # of the tokenizer, which ends the documents, not of the config
    assert len(found.weights) > 1
    assert set(found.files) == {path.name for path in Path("model").iterdir()}
    assert found.files["config.json"].sha256 == publish.sha256_file(Path("model/config.json"))


def test_the_stage_writes_a_manifest_that_is_reproducible() -> None:
    write_model(Path("model"), weights=False)
    Path("params.yaml").write_text("model_name: model\nmodel_revision: main\ninitial_weights: auto\n")
    command = [sys.executable, "-m", "stages.download"]
    env = {**os.environ, "PYTHONPATH": str(REPO), "HF_TOKEN": "hf_SENTINEL"}
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert process.stdout.startswith("download: model (a local directory): LlamaForCausalLM, 5,")
    assert "random weights" in process.stdout
    first = MANIFEST.read_bytes()
    assert ModelManifest.read() == describe()
    assert ModelManifest.read().directory() == Path("model")
    describe().write()
    assert MANIFEST.read_bytes() == first
    assert b"SENTINEL" not in first + process.stdout.encode() + process.stderr.encode()


def test_initial_weights_decides_which_files_are_needed() -> None:
    write_model(Path("full"))
    write_model(Path("bare"), weights=False)
    assert describe("full", "pretrained").weights == describe("full", "auto").weights != []
    assert describe("bare", "auto").weights == describe("full", "random").weights == []
    assert WEIGHTS_INDEX not in describe("full", "random").files
    with pytest.raises(StageError, match="initial_weights is 'pretrained', but 'bare' has no safetensors"):
        describe("bare", "pretrained")


def test_help_does_not_import_torch() -> None:
    script = "import sys; sys.argv = ['download']; import stages.download; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"


def test_a_cached_hub_model_needs_no_socket(home: Path) -> None:
    snapshot = cached(write_model(Path("source")), home)
    found = describe(HUB_ID)
    assert found.commit == COMMIT
    assert found.weights == hub.weight_files(snapshot) != []
    assert found.directory() == found.verify() == snapshot
    found.write()
    assert str(home) not in MANIFEST.read_text()

    blob = (snapshot / found.weights[0]).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x01")
    with pytest.raises(StageError, match=f"{found.weights[0]} was changed since the download"):
        found.verify()
    assert found.verify(["config.json"]) == snapshot  # no other file is read
    with pytest.raises(StageError, match=r"model\.json does not list other\.json: run `dvc repro -f -s download`"):
        found.verify(["other.json"])  # as where the manifest was edited
    shutil.rmtree(home)
    with pytest.raises(StageError, match=f"{HUB_ID} at commit {COMMIT} is not in HF_HOME"):
        found.directory()


def test_the_commit_does_not_change_when_the_branch_moves(home: Path) -> None:
    snapshot = cached(write_model(Path("source")), home)
    found = describe(HUB_ID)
    other = snapshot.with_name("f" * 40)
    shutil.copytree(snapshot, other, symlinks=True)
    (home / "hub" / "models--someone--tiny" / "refs" / "main").write_text(other.name)
    assert found.directory() == snapshot
    assert describe(HUB_ID).commit == other.name


def test_a_model_that_is_not_cached_is_one_clear_error_offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StageError) as error:
        describe(HUB_ID)
    for part in (HUB_ID, "'main'", str(home), "config.json", "HF_HUB_OFFLINE", f"hf download {HUB_ID}"):
        assert part in str(error.value)
    with pytest.raises(StageError, match="no such directory, and it is not a valid Hub id"):
        describe("not/a/model")


def test_a_directory_that_does_not_exist_is_not_taken_for_a_model_of_the_hub(home: Path) -> None:
    """Online, too: the fixture fails the test if the Hub is asked."""
    write_model(Path("models/nano"), weights=False)
    for name in ("models/does-not-exist", "models/that/is/not/there", "./models/nono", "/models/nano", "~/models"):
        with pytest.raises(StageError, match=f"model_name is '{name}': there is no such directory; ") as error:
            describe(name)
        assert ("models/nano" in str(error.value).partition(";")[2]) == ("models/" in name and name[0] not in "/~")
    with pytest.raises(StageError, match="that is a file; use the directory"):
        describe("models/nano/config.json")


def test_a_misspelt_hub_id_is_answered_with_the_one_in_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cached(write_model(Path("source")), home)
    write_model(Path("models/nano-llama"), weights=False)
    for name, similar in (("someone/tinny", HUB_ID), ("Someone/Tiny", HUB_ID), ("nano-llama", "models/nano-llama")):
        with pytest.raises(
            StageError, match=f"similar name is here: '{similar}'.*use that one, or run `hf download {name}"
        ):
            describe(name)
    with pytest.raises(StageError, match="forbids fetching it: run `hf download another/model"):
        describe("another/model")
    (snapshot / "tokenizer.json").unlink()  # the name is right, the copy is incomplete
    with pytest.raises(StageError, match=f"forbids fetching it: run `hf download {HUB_ID}"):
        describe(HUB_ID)


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "weights"])
def test_a_cache_that_lacks_a_file_is_refused_offline(
    home: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Above all: weights that are not in the cache must not mean random weights."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cached(write_model(Path("source"), max_shard_size="1GB"), home)
    name = "model.safetensors" if lacking == "weights" else lacking
    (snapshot / name).unlink()
    with pytest.raises(StageError, match=f"lacks .*{name}"):
        describe(HUB_ID)


def resolve_in_a_process(endpoint: str, token: str) -> subprocess.CompletedProcess[str]:
    script = (
        "from stages.model import hub; from stages.artifacts import command\n"
        f"command.run(lambda: hub.resolve({HUB_ID!r}, 'main', want_weights=True, timeout=1))"
    )
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env |= {"HF_HOME": str(Path("home").resolve()), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token}
    return subprocess.run([sys.executable, "-c", script], cwd=REPO, env=env, capture_output=True, text=True)


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


def test_a_token_with_invalid_characters_is_not_shown() -> None:
    """The HTTP client quotes such a token in its error, because no header may contain it."""
    server = socket.create_server(("127.0.0.1", 0))
    for token in ("hf_SENTINEL\u00cf", "hf_SENTINEL\x01"):
        process = resolve_in_a_process(f"http://127.0.0.1:{server.getsockname()[1]}", token)
        assert process.returncode == 2
        assert "SENTINEL" not in process.stdout + process.stderr
    server.close()


def first_shard(directory: Path) -> Path:
    return directory / hub.weight_files(directory)[0]


def change_header(content: bytes, change: Callable[[list[dict[str, Any]]], object]) -> bytes:
    """The content of a safetensors file after a change to the entries of its tensors, in the order of their offsets."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change([entry for key, entry in header.items() if key != "__metadata__"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[end:]


def _move(entry: dict[str, Any], begin: int, end: int) -> None:
    entry["data_offsets"] = [entry["data_offsets"][0] + begin, entry["data_offsets"][1] + end]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "one byte missing": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "ends in the header": lambda content: content[:100],
    "ends in the length": lambda content: content[:4],
    "empty": lambda content: b"",
    "not safetensors": lambda content: b"\xff" * 99,
    "header is not a dict": lambda content: (2).to_bytes(8, "little") + b"[]",
    "lacks a key": lambda content: content.replace(b"data_offsets", b"data_offsetz", 1),
    "unknown dtype": lambda content: change_header(content, lambda entries: entries[0].update(dtype="F33")),
    "other dtype": lambda content: change_header(content, lambda entries: entries[0].update(dtype="BF16")),
    "other shape": lambda content: change_header(content, lambda entries: entries[0]["shape"].append(2)),
    "gap at the start": lambda content: change_header(content, lambda entries: _move(entries[0], 4, 0)),
    "gap": lambda content: change_header(content, lambda entries: _move(entries[1], 4, 4)) + bytes(4),
    "overlap": lambda content: change_header(content, lambda entries: _move(entries[1], -4, -4))[:-4],
    "ends before it begins": lambda content: change_header(
        content, lambda entries: entries[0]["data_offsets"].reverse()
    ),
    "negative offset": lambda content: change_header(content, lambda entries: _move(entries[0], -4, -4)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage: str) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    save_file(tensors, WEIGHTS, {"format": "pt"})
    assert headers.read(Path(), files=[WEIGHTS]).keys() == tensors.keys()
    content = Path(WEIGHTS).read_bytes()
    Path(WEIGHTS).write_bytes(change_header(content, lambda entries: None))
    assert headers.read(Path(), files=[WEIGHTS]).keys() == tensors.keys()  # it is not the rewriting that is refused
    Path(WEIGHTS).write_bytes(DAMAGES[damage](content))
    with pytest.raises(StageError, match=f"{WEIGHTS} is incomplete or damaged .*: fetch it again"):
        headers.read(Path(), files=[WEIGHTS])


def test_a_shard_that_is_missing_or_truncated_is_named() -> None:
    write_model(Path("model"))
    shard = first_shard(Path("model"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(StageError, match=f"{shard.name} is incomplete or damaged"):
        describe()
    shard.unlink()
    with pytest.raises(StageError, match=f"{shard.name} is missing"):
        describe()
    shard.write_bytes(content)
    describe()


def test_a_tensor_in_two_files_is_refused() -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(1), name: torch.zeros(1)}, name)
    with pytest.raises(StageError, match="'a' is in both one and two"):
        headers.read(Path(), files=["one", "two"])


def test_a_dtype_that_neither_numpy_nor_torch_has_is_read() -> None:
    """It may belong to a tensor that the model ignores."""
    entry = {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}
    text = json.dumps({"a": entry}).encode()
    Path(WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(6))
    stored = headers.read(Path(), files=[WEIGHTS])
    assert stored == {"a": headers.StoredTensor(file=WEIGHTS, key="a", dtype="F6_E2M3", shape=(8,))}


def test_one_flipped_bit_is_found_after_the_download() -> None:
    write_model(Path("model"))
    found = describe()
    shard = first_shard(Path("model"))
    flip_bit(shard, -1)
    with pytest.raises(StageError, match=f"{shard.name} was changed since the download"):
        found.verify()


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
def test_headers_are_compared_with_the_config(change: Callable[[dict[str, torch.Tensor]], None], message: str) -> None:
    write_model(Path("model"), max_shard_size="1GB")
    path = Path("model", WEIGHTS)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(StageError, match=message):
        describe()


def test_no_weight_is_read_to_check_the_headers() -> None:
    """Behind its header the file is a hole of more than 10 GiB, which is slow to read."""
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
    with Path("model", WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert end > 10 * 2**30
    began = time.monotonic()
    built = meta.build(Path("model"))
    found = meta.check_headers(built, headers.read(Path("model"), files=[WEIGHTS]))
    assert found.keys() == model.state_dict().keys()
    assert time.monotonic() - began < 5


def test_tensors_are_found_under_the_names_of_older_checkpoints() -> None:
    """GPT-2 on the Hub lacks the prefix `transformer.`, and has masks that the model no longer has."""
    write_model(Path("model"), GPT2, max_shard_size="1GB")
    path = Path("model", WEIGHTS)
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, path, {"format": "pt"})
    describe()
    found = meta.check_headers(meta.build(Path("model")), headers.read(Path("model"), files=[WEIGHTS]))
    assert found["transformer.wte.weight"].key == "wte.weight"
    assert "lm_head.weight" not in found


def test_a_tied_parameter_stored_twice_must_be_the_same() -> None:
    write_model(Path("model"), max_shard_size="1GB")
    path = Path("model", WEIGHTS)
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, path, {"format": "pt"})
    describe()
    for other in (embedding + 1, embedding.to(torch.bfloat16), embedding[1:].clone()):
        save_file({**tensors, "lm_head.weight": other}, path, {"format": "pt"})
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
        name = HUB_ID
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


def test_a_directory_without_a_causal_language_model_is_refused() -> None:
    Path("empty").mkdir()
    with pytest.raises(StageError, match=r"no config\.json"):
        describe("empty")
    write_model(Path("model"), weights=False)
    publish.write_json(Path("model/config.json"), {"model_type": "t5"})
    with pytest.raises(StageError, match="does not describe a causal language model that transformers"):
        describe()
    publish.write_json(Path("model/config.json"), {"model_type": "unknown-to-transformers"})
    with pytest.raises(StageError, match="does not describe a causal language model that transformers"):
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


def test_a_model_without_a_valid_tokenizer_json_is_refused() -> None:
    write_model(Path("model"))
    path = Path("model/tokenizer.json")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(StageError, match="tokenizer cannot be loaded"):
        describe()
    path.unlink()
    with pytest.raises(StageError, match=r"no other tokenizer: add tokenizer\.json and tokenizer_config\.json"):
        describe()
    Path("model/tokenizer.model").write_bytes(b"of sentencepiece")
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


def test_layers_are_found_in_the_lists_of_a_model() -> None:
    model = Model()
    assert meta.layer_classes(model) == ["Layer"]  # the longest list
    model._no_split_modules = {"Embedding", "Linear", "Layer"}
    assert meta.layer_classes(model) == ["Layer"]  # neither a module outside of the lists nor a part of a layer
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
