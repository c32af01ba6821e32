"""Finding and checking a model: from a directory or the cache, without a socket, or with a clear error."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from stages import download
from stages.base import publish
from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.base.record import FileEntry
from stages.download import DownloadParams
from stages.model import headers, hub, hub_cache, meta
from stages.model.files import WEIGHTS, WEIGHTS_INDEX
from stages.model.license import ModelLicense
from stages.model.manifest import MANIFEST, ModelManifest
from tests import hub_server
from tests.hub_server import TOKEN, Hub
from tests.models import LAYERS, SIZES, write_tokenizer
from tests.network import CAN_UNSHARE
from tests.project import REPO, flip_bit, wait_for

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


def cached(source: Path, home: Path, commit: str = COMMIT) -> Path:
    """Copy `source` into an HF_HOME as an older huggingface_hub leaves it; returns the snapshot's directory."""
    repo = home / "hub" / "models--someone--tiny"
    snapshot = repo / "snapshots" / commit
    for directory in (repo / "blobs", repo / "refs", snapshot):
        directory.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for path in source.iterdir():
        blob = repo / "blobs" / publish.sha256_file(path)
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def set_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_HOME; huggingface_hub, which reads it once, may have done so before."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HF_HOME, in which any attempt to open a socket fails the test."""
    set_home(tmp_path / "home", monkeypatch)

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
    with pytest.raises(StageError, match=f"{found.weights[0]} is damaged or was changed"):
        found.verify()
    assert found.verify(["config.json"]) == snapshot  # no other file is read
    shutil.rmtree(home)
    with pytest.raises(StageError, match=f"{HUB_ID} at commit {COMMIT} is not in the model cache"):
        found.directory()


@pytest.mark.parametrize("revision", ["/elsewhere", "../x", "a/../../x", ""])
def test_a_revision_is_a_name_below_the_refs(revision: str) -> None:
    Path("params.yaml").write_text(f"model_name: a/b\nmodel_revision: '{revision}'\ninitial_weights: auto\n")
    with pytest.raises(StageError, match=f"model_revision is '{revision}': it must be a relative path without `..`"):
        load_params(DownloadParams)
    write_model(Path("model"), weights=False)
    dataclasses.replace(describe(), commit=f"../{COMMIT}").write()
    with pytest.raises(StageError, match=r"model\.json is not valid \(commit: .* it must be the name of a file"):
        ModelManifest.read()


def test_the_commit_does_not_change_when_the_branch_moves(home: Path) -> None:
    snapshot = cached(write_model(Path("source")), home)
    found = describe(HUB_ID)
    other = snapshot.with_name("f" * 40)
    shutil.copytree(snapshot, other, symlinks=True)
    (home / "hub" / "models--someone--tiny" / "refs" / "main").write_text(other.name)
    assert found.directory() == snapshot
    assert describe(HUB_ID).commit == other.name


def test_a_model_that_is_not_cached_is_one_clear_error_offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "weights"])
def test_a_cache_that_lacks_a_file_is_refused_offline(
    home: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Above all: weights that are not in the cache must not mean random weights."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = cached(write_model(Path("source"), max_shard_size="1GB"), home)
    name = "model.safetensors" if lacking == "weights" else lacking
    (snapshot / name).unlink()
    with pytest.raises(hub.Lacking, match=f"lacks .*{name}"):
        describe(HUB_ID)


def test_a_cache_without_the_branch_names_the_commit_that_is_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached(write_model(Path("source")), home)
    (home / "hub/models--someone--tiny/refs/main").unlink()
    with pytest.raises(hub.Lacking, match=rf"at revision 'main'.* has commit {COMMIT}: set model_revision to it"):
        describe(HUB_ID)
    params = DownloadParams(model_name=HUB_ID, model_revision=COMMIT, initial_weights="auto")
    assert download.describe(params).commit == COMMIT


def test_weights_that_the_owner_alone_may_read_are_named_so() -> None:
    with tempfile.TemporaryDirectory() as name:  # which another user can reach
        directory = Path(name)
        directory.chmod(0o755)
        save_file({"a": torch.ones(1)}, directory / WEIGHTS)
        (directory / WEIGHTS).chmod(0)
        is_root = os.geteuid() == 0
        if is_root:  # root may read everything
            os.seteuid(65534)
        try:
            with pytest.raises(StageError, match=rf"{WEIGHTS} cannot be read \(Permission denied\).*chmod"):
                headers.read(directory, [WEIGHTS])
        finally:
            if is_root:
                os.seteuid(0)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"extra.weight": torch.ones(1)}, "delete the extra tensors in a copy of the files"),
        ({"lm_head.weight": None}, "set tie_word_embeddings: true in the config.json of a copy, if the output"),
        ({"model.norm.weight": None}, "fetch all safetensors files of this revision again$"),
        ({"model.norm.weight": torch.ones(3)}, "correct config.json in a copy, or fetch it and the weights again$"),
    ],
)
def test_weights_that_do_not_fit_have_a_remedy(change: dict[str, torch.Tensor | None], remedy: str) -> None:
    write_model(Path("model"), LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=False), max_shard_size="1GB")
    path = Path("model", WEIGHTS)
    tensors = {name: tensor for name, tensor in {**load_file(path), **change}.items() if tensor is not None}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(StageError, match=f"(?m)the weights do not fit the config of LlamaForCausalLM: .*{remedy}"):
        describe()


def resolve_in_a_process(endpoint: str, token: str) -> subprocess.CompletedProcess[str]:
    script = (
        "from stages.model import hub; from stages.base import command\n"
        f"command.run(lambda: hub.resolve({HUB_ID!r}, 'main', want_weights=True))"
    )
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env |= {"HF_HOME": str(Path("home").resolve()), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token}
    env |= {"HF_HUB_ETAG_TIMEOUT": "1"}
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
    with pytest.raises(
        StageError, match=f"{WEIGHTS} is incomplete or damaged .*: delete .*{WEIGHTS} and fetch it again"
    ):
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
    with pytest.raises(StageError, match=f"{shard.name} is damaged or was changed"):
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
    assert [part.key for part in found["transformer.wte.weight"]] == ["wte.weight"]
    assert "lm_head.weight" not in found


def test_weights_that_transformers_drops_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    config = Glm4MoeConfig(
        **SIZES, **{**LAYERS, "num_hidden_layers": 1}, num_key_value_heads=1, head_dim=8, moe_intermediate_size=16,
        n_routed_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    write_model(Path("model"), config, max_shard_size="1GB")
    describe()
    assert "dropped" not in capsys.readouterr().out
    path = Path("model", WEIGHTS)
    mtp = {f"model.layers.46.{name}.weight": torch.ones(3, 2) for name in ("eh_proj", "enorm")}
    save_file({**load_file(path), **mtp}, path, {"format": "pt"})
    describe()
    assert capsys.readouterr().out.endswith(
        "download: 2 tensors with 12 values are dropped, as Glm4MoeForCausalLM does not have them: they are neither "
        "trained nor exported (model.layers.46.eh_proj.weight, model.layers.46.enorm.weight)\n"
    )


@pytest.mark.parametrize("pad_token_id", [1, None])
def test_a_model_that_does_not_load_as_it_was_trained_is_refused(pad_token_id: int | None) -> None:
    """Youtu overwrites the row of the padding token, which the output shares."""
    config = AutoConfig.for_model(
        "youtu", **SIZES, **LAYERS, num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        v_head_dim=8, qk_nope_head_dim=8, pad_token_id=pad_token_id,
    )  # fmt: skip
    write_model(Path("model"), config)
    refused = pytest.raises(
        StageError, match=r"overwrites model\.embed_tokens\.weight.*set pad_token_id to null in the config\.json"
    )
    with refused if pad_token_id else contextlib.nullcontext():
        describe()


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


def test_experts_that_are_stored_one_by_one_are_the_parts_of_a_parameter() -> None:
    config = MixtralConfig(**SIZES, **LAYERS, num_key_value_heads=1, num_local_experts=2)
    write_model(Path("model"), config, max_shard_size="1GB")
    assert describe().layer_classes == ["MixtralDecoderLayer"]
    model, stored = meta.build(Path("model")), headers.read(Path("model"), files=[WEIGHTS])
    found = meta.check_headers(model, stored)
    expert = "model.layers.1.block_sparse_moe.experts.{}.weight"
    keys = [part.key for part in found["model.layers.1.mlp.experts.gate_up_proj"]]
    assert keys == [expert.format(part) for part in ("0.w1", "0.w3", "1.w1", "1.w3")]
    lacking = {key: tensor for key, tensor in stored.items() if key != keys[2]}
    with pytest.raises(StageError, match=f"1 missing in the safetensors files:\n  {keys[2]}$"):
        meta.check_headers(model, lacking)
    other = dataclasses.replace(stored[keys[0]], key=expert.format("2.w1"))
    with pytest.raises(StageError, match=f"1 not expected by the model:\n  {other.key}$"):
        meta.check_headers(model, {**stored, other.key: other})
    narrow = dataclasses.replace(stored[keys[0]], shape=(24, 15))
    with pytest.raises(StageError, match=rf"1 of another shape:\n  {keys[0]} is \[24, 15\] in .* for \[24, 16\]$"):
        meta.check_headers(model, {**stored, narrow.key: narrow})


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


@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00002.safetensors", "consolidated.safetensors", "model.fp16.safetensors",
        "adapter_model.safetensors", "model-Q4_K_M.gguf", "tf_model.h5", "flax_model.msgpack",
    ],
)  # fmt: skip
def test_weights_that_would_not_be_read_are_refused(name: str, home: Path) -> None:
    """Training would start from random ones. Beside them is a pickle, as the `Trainer` of transformers leaves one."""
    write_model(Path("model"), weights=False)
    for other in (name, "training_args.bin"):
        Path("model", other).write_bytes(b"never read")
    cached(Path("model"), home)
    for model, initial_weights in (("model", "auto"), ("model", "pretrained"), (HUB_ID, "auto")):
        with pytest.raises(StageError, match=f"it has neither .*, but {name}: .*'random'"):
            describe(model, initial_weights)
    assert name not in describe("model", "random").files


@pytest.mark.parametrize(
    "weight_map",
    [{}, None, [], {"a": 1}, {"a": ["b"]}, {"a": ""}, {"a": ".."}, {"a": "../other/model.safetensors"},
     {"a": "/model.safetensors"}],
)  # fmt: skip
def test_an_index_names_files_beside_it(weight_map: object) -> None:
    write_model(Path("model"))
    publish.write_json(Path("model", WEIGHTS_INDEX), {"weight_map": weight_map})
    with pytest.raises(StageError, match="does not name the safetensors files beside it: fetch it again"):
        hub.resolve("model", "main", want_weights=True)
    Path("model", WEIGHTS_INDEX).write_text("null")
    with pytest.raises(StageError, match="does not name the safetensors files"):
        hub.resolve("model", "main", want_weights=True)


def test_an_index_that_was_left_behind_is_not_read() -> None:
    """As in transformers, which looks for a single file first."""
    write_model(Path("model"))
    index = Path("model", WEIGHTS_INDEX).read_bytes()
    for path in Path("model").glob("model*"):
        path.unlink()
    write_model(Path("model"), max_shard_size="1GB")
    Path("model", WEIGHTS_INDEX).write_bytes(index)
    found = describe()
    assert found.weights == [WEIGHTS] and WEIGHTS_INDEX not in found.files


def plant(path: Path, kind: str) -> None:
    """Put something under a name that is no file."""
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to("../blobs/0123")  # of a tree that was copied without them
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
@pytest.mark.parametrize("name", [WEIGHTS, WEIGHTS_INDEX, "generation_config.json", "chat_template.jinja"])
def test_a_name_without_a_file_is_refused(name: str, kind: str) -> None:
    """Instead of random weights, or of a model that ends its answers elsewhere."""
    write_model(Path("model"), weights=False)
    plant(Path("model", name), kind)
    with pytest.raises(StageError, match=rf"model/{name} is no file that can be read"):
        describe()
    if name in (WEIGHTS, WEIGHTS_INDEX):
        assert describe(initial_weights="random").weights == []


def test_weights_that_are_broken_links_are_refused() -> None:
    write_model(Path("model"), weights=False)
    plant(Path("model/model-00001-of-00002.safetensors"), "link")
    with pytest.raises(StageError, match=r"neither model\.safetensors nor .* but model-00001-of-00002\.safetensors"):
        describe()


def change_config(**values: Any) -> None:
    path = Path("model/config.json")
    path.write_text(json.dumps({**publish.read_json(path), **values}))  # publish would refuse NaN


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": "16"}, "does not describe a causal language model .* expected int, got str"),
        ({"hidden_size": 17}, "does not describe a causal language model .* not a multiple"),
        ({"num_attention_heads": 0}, "does not describe a causal language model .*: ZeroDivisionError"),
        ({"head_dim": -8}, "does not describe a causal language model .* negative dimension"),
        ({"dtype": "os.system"}, "does not describe a causal language model .* 'os.system'"),
        ({"dtype": "int8"}, "dtype is 'int8', which cannot be trained: use float64 or"),
        ({"rms_norm_eps": math.nan}, r"rms_norm_eps is not a number \(NaN\)"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, and at most 1,000 are built"),
        ({"text_config": {"num_labels": 10**9}}, "num_labels is 1000000000, and at most 1,000,000 are built"),
        ({"text_config": {"auto_map": {}}}, r"asks for code of its own \(auto_map\)"),
        ({"attn_implementation": "somebody/kernel"}, "asks for a kernel of the Hub .*'somebody/kernel'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "the weights are quantized"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "a token sees those after it, as in an encoder"),
        ({"vocab_size": 2}, "the EOS token has the id 2, and there are 2 rows"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_that_cannot_be_trained_is_refused_in_one_line(values: dict[str, Any], message: str) -> None:
    write_model(Path("model"), weights=False)
    change_config(**values)
    with pytest.raises(StageError, match=f"^[^\n]*{message}[^\n]*$"):
        describe()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("seconds", "num_bytes", "message"),
    [
        (2, 4 << 30, "without its weights, the model needs more than 2 s"),
        (50, 64 << 20, "without its weights, the model needs more than 0.062 GiB of memory"),
    ],
)
def test_a_model_of_any_size_is_not_built(seconds: float, num_bytes: int, message: str) -> None:
    values = {"model_type": "hrm_text", "num_layers_per_stack": 10**7, "hidden_size": 64, "num_attention_heads": 2}
    Path("config.json").write_text(json.dumps(values))
    with pytest.raises(StageError, match=f"^config.json[^\n]*{message}[^\n]*$"):
        download.build(Path(), seconds=seconds, num_bytes=num_bytes)


def test_trap_26_a_model_without_an_eos_token_is_refused() -> None:
    write_model(Path("model"), weights=False)
    change_config(eos_token_id=None)
    assert describe().eos_token_id == 2, "the tokenizer has one"
    path = Path("model/tokenizer_config.json")
    path.write_text(json.dumps({key: value for key, value in publish.read_json(path).items() if key != "eos_token"}))
    with pytest.raises(StageError, match="model has no EOS token, which must end each document: set eos_token in the"):
        describe()


def test_without_weights_the_dtype_is_that_of_the_config() -> None:
    write_model(Path("model"), weights=False)
    change_config(dtype="bfloat16")
    assert describe().dtype == "bfloat16"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["null", '"auto_map"', "[" * 100_000, "\xff"])
def test_a_file_that_is_no_json_object_is_named(name: str, content: str) -> None:
    write_model(Path("model"))
    Path("model", name).write_text(content, encoding="latin-1")
    with pytest.raises(StageError, match=f"{name} is not a JSON object: fetch it again"):
        hub.resolve("model", "main", want_weights=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"])
def test_a_file_without_end_is_not_read(name: str) -> None:
    os.truncate(write_model(Path("model"), weights=False) / name, 1 << 30)
    with pytest.raises(StageError, match=f"{name} has 1,073,741,824 bytes, and at most 134,217,728 are read"):
        hub.resolve("model", "main", want_weights=True)


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
    publish.write_json(Path("model/config.json"), {"model_type": "vit"})
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


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"model_type": "xlm"}, "in XLMWithLMHeadModel, .* a token sees those after it, as in an encoder"),
        ({"model_type": "t5"}, "t5 is an encoder-decoder"),
        ({"model_type": "whisper", "pad_token_id": 0}, "whisper is an encoder-decoder"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_only_can_be_used_as_a_causal_model_is_refused_as_what_it_is(values: dict[str, Any], kind: str) -> None:
    write_model(Path("model"), weights=False)
    publish.write_json(Path("model/config.json"), values)
    with pytest.raises(StageError, match=kind):
        describe()


def test_an_encoder_whose_config_makes_it_a_decoder_is_accepted() -> None:
    write_model(Path("model"), weights=False)
    publish.write_json(Path("model/config.json"), {"model_type": "bert", "is_decoder": True})
    assert describe().architecture == "BertLMHeadModel"


def test_a_model_without_a_valid_tokenizer_json_is_refused() -> None:
    write_model(Path("model"))
    path = Path("model/tokenizer.json")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(StageError, match="tokenizer cannot be loaded"):
        describe()
    write_tokenizer(Path("model"), ["a", "b", "<eos>"])
    panics = {"type": "Precompiled", "precompiled_charsmap": "AAAA/////wAA"}
    publish.write_json(path, {**publish.read_json(path), "normalizer": panics})
    with pytest.raises(StageError, match="tokenizer cannot be loaded: PanicException: "):
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
    model.many[1].part = model.many[0].part
    assert meta.layer_classes(model) == ["Conv1d"]  # what two layers share cannot be gathered with each of them
    with pytest.raises(StageError, match="no list of layers"):
        meta.layer_classes(torch.nn.Linear(1, 1))


def test_only_the_files_that_the_model_needs_are_recorded() -> None:
    write_model(Path("model"))
    for name in ("README.md", "notes.txt", "optimizer.pt", "consolidated.safetensors"):
        Path("model", name).write_text("not needed")
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    Path("model/additional_chat_templates").mkdir()
    Path("model/additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    source = hub.resolve("model", "main", want_weights=True)
    names = hub.model_files(source)
    assert {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"} <= {*names}
    assert describe().chat_templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert not {"README.md", "notes.txt", "optimizer.pt", "consolidated.safetensors"} & set(names)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one model, whose weights are in one file, and an empty HF_HOME."""
    from huggingface_hub import constants

    write_model(Path("source"), max_shard_size="1GB")
    set_home(tmp_path / "home", monkeypatch)
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name == "HF_TOKEN":
            monkeypatch.delenv(name)
    with Hub().serve() as server:
        server.add(HUB_ID, Path("source"), **{"README.md": b"#", "pytorch_model.bin": b"-", "other.safetensors": b"-"})
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        yield server


def resolve(name: str = HUB_ID, revision: str = "main") -> Path:
    return hub.resolve(name, revision, want_weights=True).directory


def test_an_empty_cache_is_filled_with_what_is_needed(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import get_cached_repo_tree, snapshot_download

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    found = describe(HUB_ID)
    assert found.commit == hub_server.COMMIT
    needed = {path.name for path in Path("source").iterdir()}
    assert set(found.files) == needed
    assert served.fetched() == {*needed, "README.md"}
    for name in needed:
        assert (found.directory() / name).read_bytes() == Path("source", name).read_bytes()
    assert not any("xet" in request.path for request in served.requests)
    served.requests.clear()
    assert describe(HUB_ID) == found
    assert served.requests == []
    # Other tools can use the cache, too.
    assert snapshot_download(HUB_ID, local_files_only=True, allow_patterns=list(needed)) == str(found.directory())
    assert "README.md" in [file.path for file in get_cached_repo_tree(HUB_ID)]


def test_more_chat_templates_are_fetched_too(served: Hub) -> None:
    others = {"tool_use.jinja": b"{{ tools }}", "notes.txt": b"not needed"}
    more = {f"additional_chat_templates/{name}": content for name, content in others.items()}
    served.add(HUB_ID, Path("source"), **more, **{"chat_template.jinja": b"{{ messages }}"})
    found = describe(HUB_ID)
    assert found.chat_templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert "additional_chat_templates/tool_use.jinja" in found.files and "notes.txt" not in served.fetched()
    served.requests.clear()
    assert describe(HUB_ID) == found and served.requests == []


def test_files_that_are_complete_are_not_fetched_again(served: Hub) -> None:
    served.refused[WEIGHTS] = 403
    with pytest.raises(hub.Lacking, match=r"answered 403 .*: run `hf download"):
        resolve()
    served.refused.clear()
    served.requests.clear()
    resolve()
    assert served.fetched() == {WEIGHTS}


def test_a_snapshot_of_which_the_library_knows_no_better_is_not_complete(served: Hub, tmp_path: Path) -> None:
    """Where it cannot list the files, it returns what is there; without weights, training would start from others."""
    cached(write_model(Path("bare"), weights=False), tmp_path / "home", hub_server.COMMIT)
    served.refused[f"/tree/{hub_server.COMMIT}"] = 403
    hub.resolve(HUB_ID, "main", want_weights=False)
    with pytest.raises(hub.Lacking, match=f"lacks {WEIGHTS} .*; the Hub (was not reached|answered 403)"):
        resolve()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_download(served: Hub, number: signal.Signals) -> None:
    """Not the end of all files that have begun, for which huggingface_hub waits. Nothing is left that is of no use."""
    served.endless.add(WEIGHTS)
    Path("params.yaml").write_text(f"model_name: {HUB_ID}\nmodel_revision: main\ninitial_weights: auto\n")
    env = {**os.environ, "PYTHONPATH": str(REPO), "HF_ENDPOINT": served.url}
    process = subprocess.Popen([sys.executable, "-m", "stages.download"], env=env, stderr=subprocess.PIPE, text=True)
    blobs = hub_cache.repository(HUB_ID) / "blobs"

    def has_begun() -> bool:
        with suppress(FileNotFoundError):  # a small file that is complete meanwhile
            return any(path.stat().st_size > 1 << 22 for path in blobs.glob("*.incomplete"))
        return False

    wait_for(has_begun)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert (process.returncode, error) == (128 + number, "interrupted: run it again\n")
    assert not list(blobs.glob("*.incomplete"))


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS])
def test_what_differs_from_the_digest_of_the_hub_is_refused(served: Hub, name: str) -> None:
    content = Path("source", name).read_bytes()
    served.changed = {name: content[:-1] + b"x"}
    with pytest.raises(StageError, match=f"is damaged: it is {name} of {HUB_ID}, .* Delete it") as error:
        describe(HUB_ID)
    Path(str(error.value).partition(" is damaged")[0]).unlink()
    served.changed = {}
    describe(HUB_ID)


def test_a_disk_with_too_little_space_is_noticed_before(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 20))
    with pytest.raises(StageError, match=f"{HUB_ID} needs .* GiB more in .* set HF_HOME to a directory on a larger"):
        resolve()
    assert not served.fetched()


@pytest.mark.parametrize(
    ("name", "revision", "token", "message"),
    [
        ("someone/gated", "main", None, "gated: accept its license at .*/someone/gated, and set HF_TOKEN"),
        ("someone/gated", "main", "hf_OTHER", "it refuses your token: set HF_TOKEN to a valid one, or unset it"),
        ("someone/missing", "main", None, "401 .*no such model, or it is private: check the name"),
        ("someone/missing", "main", TOKEN, "404 .*no such model, or it is private: check the name"),
        (HUB_ID, "mian", None, "lacks config.json.* at revision 'mian'.* not this revision: set model_revision to"),
        ("someone/limited", "limited", None, "429 .*it limits requests: run it again later"),
        ("someone/refused", "refused", None, "answered 403 .*: run `hf download someone/refused"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_remedy(
    served: Hub, monkeypatch: pytest.MonkeyPatch, name: str, revision: str, token: str | None, message: str
) -> None:
    served.add("someone/gated", Path("source"))
    served.gated.add("someone/gated")
    served.refused = {"limited": 429, "refused": 403}
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    began = time.monotonic()
    with pytest.raises(hub.Lacking, match=message) as error:
        resolve(name, revision)
    assert time.monotonic() - began < 5
    assert "\n" not in str(error.value)
    assert not token or token not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda info: None,
        lambda info: [],
        lambda info: {},
        lambda info: {**info, "sha": None},
        lambda info: {**info, "sha": "../../../../evil"},
        lambda info: {**info, "siblings": [5]},
        lambda info: "text",
    ],
)
def test_a_server_that_is_no_hub_is_one_clear_error(
    served: Hub, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    """What it names becomes the names of files."""
    before = set(tmp_path.rglob("*"))
    served.described[HUB_ID] = json.dumps(change(hub_server.info(served.models[HUB_ID]))).encode()
    with pytest.raises(StageError, match=r"answer is not understood \(.*: correct HF_ENDPOINT") as error:
        resolve()
    assert "\n" not in str(error.value)
    assert set(tmp_path.rglob("*")) == before


def test_a_gated_model_is_fetched_with_the_token(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.gated.add(HUB_ID)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    resolve()
    for path in hub_cache.directory().rglob("*"):
        assert not path.is_file() or b"SENTINEL" not in path.read_bytes()


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_each_of_three_variables_forbids_the_network(
    served: Hub, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(StageError, match=f"{variable} forbids fetching it"):
        resolve()
    assert served.requests == []


@pytest.mark.parametrize("plant", ["auto_map", "pickles"])
def test_a_model_that_is_refused_is_refused_before_its_weights_are_fetched(served: Hub, plant: str) -> None:
    files = served.models[HUB_ID]
    if plant == "auto_map":
        files["config.json"] = json.dumps(
            {**json.loads(files["config.json"]), "auto_map": {"AutoModel": "m.M"}}
        ).encode()
    else:
        del files[WEIGHTS], files["other.safetensors"]
    with pytest.raises(StageError, match="auto_map" if plant == "auto_map" else r"pickles \(pytorch_model\.bin\)"):
        resolve()
    assert not {WEIGHTS, "pytorch_model.bin"} & served.fetched()


@pytest.mark.parametrize("copied", [False, True], ids=["links", "copied"])
def test_a_cache_of_another_tool_is_used_and_checked(
    served: Hub, home_of_tool: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """One that huggingface_hub has filled, as it is and copied without links; damage is named, and fetched again."""
    if copied:
        shutil.copytree(home_of_tool, "copy")  # follows links
        shutil.rmtree("copy/hub/models--someone--tiny/blobs")
        set_home(Path("copy").absolute(), monkeypatch)
    served.requests.clear()
    snapshot = resolve()
    assert describe(HUB_ID).commit == hub_server.COMMIT
    assert served.requests == []
    for name in ("tokenizer.json", WEIGHTS):
        path = (snapshot / name).resolve()
        flip_bit(path, -3)
        with pytest.raises(StageError, match=f"{path} is damaged: .* Delete it, and run") as error:
            describe(HUB_ID)
        assert "\n" not in str(error.value)
        path.unlink()
        describe(HUB_ID)
        assert served.fetched() == {name}
        served.requests.clear()


@pytest.mark.parametrize("name", [WEIGHTS_INDEX, "added_tokens.json", "tokenizer.model"])
def test_a_file_that_the_hub_does_not_list_is_refused(served: Hub, name: str) -> None:
    """It would count as a part of the commit, and an index can replace the weights."""
    snapshot = resolve()
    (snapshot / "notes.txt").write_text("not read")
    resolve()
    shutil.copyfile(snapshot / WEIGHTS, snapshot / "evil.safetensors")
    (snapshot / name).write_text(json.dumps({"weight_map": {"a": "evil.safetensors"}}))
    with pytest.raises(StageError, match=f"{snapshot / name} is not a file of {HUB_ID} at .*: delete it"):
        resolve()


def test_weights_that_the_hub_does_not_list_are_refused(served: Hub) -> None:
    for name in (WEIGHTS, "pytorch_model.bin", "other.safetensors"):
        del served.models[HUB_ID][name]
    assert describe(HUB_ID).weights == []
    planted = resolve() / WEIGHTS
    shutil.copyfile(Path("source", WEIGHTS), planted)
    with pytest.raises(StageError, match=f"{planted} is not a file of {HUB_ID} at "):
        describe(HUB_ID)


def test_an_index_that_an_older_tool_has_left_out_is_fetched(served: Hub, tmp_path: Path) -> None:
    """Of a cache without a list nothing tells that there are weights at all."""
    shutil.rmtree("source")
    write_model(Path("source"))
    served.models.clear()
    served.add(HUB_ID, Path("source"))
    snapshot = cached(Path("source"), tmp_path / "home", hub_server.COMMIT)
    for path in [snapshot / WEIGHTS_INDEX, *snapshot.glob("*.safetensors")]:
        path.unlink()
    assert hub.resolve(HUB_ID, "main", want_weights=True).weights == hub.weight_files(Path("source"))


def test_pickles_that_an_older_tool_has_left_out_are_refused(served: Hub, tmp_path: Path) -> None:
    cached(write_model(Path("bare"), weights=False), tmp_path / "home", hub_server.COMMIT)
    for name in (WEIGHTS, "other.safetensors"):
        del served.models[HUB_ID][name]
    with pytest.raises(StageError, match=r"pickles \(pytorch_model\.bin\)"):
        resolve()


@pytest.fixture
def home_of_tool(served: Hub, tmp_path: Path) -> Path:
    from huggingface_hub import snapshot_download

    snapshot_download(HUB_ID, ignore_patterns=["*.bin"])
    return tmp_path / "home"


@pytest.mark.parametrize("content", [b"../../../../source", b"\xff"])
def test_a_branch_in_the_cache_that_leads_to_no_commit_is_one_clear_error(
    content: bytes, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = cached(write_model(Path("source")), home)
    (snapshot.parents[1] / "refs/main").write_bytes(content)
    with pytest.raises(hub.Lacking, match=f"at revision 'main', but has commit {COMMIT}: set model_revision to it"):
        describe(HUB_ID)


def test_a_generation_config_that_cannot_be_read_is_refused() -> None:
    write_model(Path("model"), weights=False)
    Path("model/generation_config.json").write_text("{")
    with pytest.raises(StageError, match=r"model/generation_config\.json cannot be read: OSError"):
        describe()


def test_a_cache_without_list_is_checked_by_the_names_of_its_files(home: Path) -> None:
    snapshot = cached(write_model(Path("source")), home)
    shard = first_shard(snapshot)
    flip_bit(shard, -1)
    with pytest.raises(StageError, match=f"{shard.resolve()} is damaged"):
        describe(HUB_ID)
    blob = shard.resolve()
    shard.unlink()
    blob.rename(shard)  # a copy, of which nothing is known
    describe(HUB_ID)


def test_the_cache_is_in_the_project_unless_the_environment_names_one(
    empty_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_home(Path("/shared/hf"), monkeypatch)
    assert hub_cache.directory() == Path("/shared/hf/hub")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache.directory() == empty_project / ".hf/hub"
    monkeypatch.setenv("DVC_ROOT", str(empty_project / "other"))  # as in a copy of the project
    assert hub_cache.directory() == empty_project / "other/.hf/hub"
    set_home(Path("models/hf"), monkeypatch)
    assert hub_cache.directory() == empty_project / "other/models/hf/hub"
    monkeypatch.delenv("DVC_ROOT")
    # What `hf download` has put into the home directory need not be fetched again; the project's own comes first.
    set_home(empty_project / "user", monkeypatch)
    monkeypatch.delenv("HF_HOME")
    write_model(Path("source"), weights=False)
    snapshot = cached(Path("source"), empty_project / "user")
    assert hub.resolve(HUB_ID, "main", want_weights=False).directory == snapshot
    other = cached(Path("source"), empty_project / ".hf")
    assert hub.resolve(HUB_ID, "main", want_weights=False).directory == other


def test_the_cache_that_is_named_is_the_one_that_lacks_a_file(
    empty_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the home directory, where nothing has set HF_HOME."""
    set_home(empty_project / "user", monkeypatch)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached(write_model(Path("source")), empty_project / "user")
    snapshot = hub.resolve(HUB_ID, "main", want_weights=True).directory
    first_shard(snapshot).unlink()
    with pytest.raises(hub.Lacking, match=rf"the model cache {empty_project}/user/hub \(HF_HOME sets it\) lacks"):
        hub.resolve(HUB_ID, "main", want_weights=True)
    with pytest.raises(hub.Lacking, match=rf"the model cache {empty_project}/\.hf/hub \(HF_HOME sets it\) lacks"):
        hub.resolve("someone/else", "main", want_weights=True)


def test_a_cache_without_list_is_mentioned(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it nobody knows whether a file such as generation_config.json is missing. The Hub is not asked for it."""
    monkeypatch.setattr(sys, "argv", ["download"])
    write_model(Path("source"))
    cached(Path("source"), home)
    for name, expected in (("source", False), (HUB_ID, True)):
        Path("params.yaml").write_text(f"model_name: {name}\nmodel_revision: main\ninitial_weights: auto\n")
        download.main()
        mentioned = f"`hf download {HUB_ID} --revision {COMMIT}` with a current version adds it"
        assert (mentioned in capsys.readouterr().out) == expected


def test_the_stage_fills_an_empty_cache_and_then_needs_no_network(served: Hub) -> None:
    """The process is killed and started again; at last there is no network interface at all."""
    served.endless.add(WEIGHTS)
    Path("params.yaml").write_text(f"model_name: {HUB_ID}\nmodel_revision: main\ninitial_weights: auto\n")
    stage = [sys.executable, "-m", "stages.download"]
    env = {**os.environ, "PYTHONPATH": str(REPO), "HF_ENDPOINT": served.url, "HF_TOKEN": TOKEN, "HF_DEBUG": "1"}
    with Path("output").open("w") as output:
        killed = subprocess.Popen(stage, env=env, stdout=output, stderr=output)
        wait_for(lambda: WEIGHTS in served.fetched())
        killed.kill()
        killed.wait()
        served.endless.clear()
        served.requests.clear()
        subprocess.run(stage, env=env, check=True, stdout=output, stderr=output)
    assert served.fetched() == {WEIGHTS}
    assert not any("xet" in request.path for request in served.requests)
    manifest = MANIFEST.read_bytes()
    text = Path("output").read_text() + manifest.decode()
    assert "SENTINEL" not in text
    assert "%|" not in text  # no progress bars, except in a terminal
    if CAN_UNSHARE:
        MANIFEST.unlink()
        env["HF_HUB_OFFLINE"] = "1"
        subprocess.run(["unshare", "-rn", *stage], env=env, check=True)
        assert MANIFEST.read_bytes() == manifest


def license_of(card: bytes) -> ModelLicense:
    Path("model").mkdir()
    Path("model/README.md").write_bytes(card)
    return ModelLicense.of(Path("model"), {"README.md": FileEntry.of(Path("model/README.md"))})


def test_the_license_is_in_the_metadata_of_the_model_card() -> None:
    write_model(Path("model"), max_shard_size="1GB")
    texts = {"LICENSE.md": "all", "Notice": "of", "USE_POLICY.txt": "it", "licenses.py": "", "README.md": "---\n"}
    texts["README.md"] += (
        "license: other\nlicense_name: tiny\nlicense_link: LICENSE.md\nlanguage: [en, de]\n---\n# Tiny"
    )
    for name, text in texts.items():
        Path("model", name).write_text(text)
    model = describe()
    found = download.describe_license(model)
    assert found.problem is None
    assert found.metadata == {
        "license": "other", "license_name": "tiny", "license_link": "LICENSE.md", "language": ["en", "de"]
    }  # fmt: skip
    assert list(found.files) == ["LICENSE.md", "Notice", "README.md", "USE_POLICY.txt"]
    assert not {*found.files} & {*model.files}  # another license is no other model: nothing is trained again
    assert ModelLicense.of(Path("model"), {}).problem == "there is no README.md beside its config"


@pytest.mark.parametrize(
    ("card", "problem"),
    [
        (b"", "no metadata in the first 64 KiB"),
        (b"# Title\n---\nlicense: mit\n---\n", "no metadata"),
        (b"---\nlicense: mit\n" + b"#" * (1 << 16) + b"\n---\n", "no metadata"),
        (b"---\n\xff\n---\n", "not valid YAML"),
        (b"---\n[\n---\n", "not valid YAML"),
        (b"---\n" + b"[" * 60_000 + b"\n---\n", "not valid YAML"),
        (b'---\nlicense: "\\UFFFFFFFF"\n---\n', "not valid YAML"),
        (b"---\nlicense: &a [*a, *a]\n---\n", "does not name it"),
        (b"---\na: &a [x, x]\nb: &b [*a, *a]\nlicense: {? *b : *b}\n---\n", "does not name it"),
        (b"---\n- license\n---\n", "does not name it"),
        (b"---\nlicense: no\n---\n", "does not name it"),
        (b"---\nlicense: unknown\n---\n", "does not name it"),
        (b'---\nlicense: "mit`\\n# x"\n---\n', "does not name it"),
        (b"---\n!!python/object/apply:os.abort : 1\nlicense: !!python/object/apply:os.abort []\n---\n", "not name it"),
    ],
)
def test_a_card_that_is_damaged_is_an_unknown_license(card: bytes, problem: str) -> None:
    found = license_of(card)
    assert problem in (found.problem or "")
    assert found.metadata.get("license", "unknown") == "unknown"


def test_norwegian_is_a_language_and_a_byte_order_mark_is_no_text() -> None:
    found = license_of("\ufeff---\nlicense: mit\nlanguage: [en, no]\n---\n".encode())
    assert found.metadata == {"license": "mit", "language": ["en", "no"]}


def test_metadata_that_grows_when_it_is_read_is_not_expanded() -> None:
    lists = "\n".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(20))
    start = time.monotonic()
    found = license_of(f"---\na: &a [x]\n{lists}\nlicense: *u\nlanguage: *t\n---\n".encode())
    assert time.monotonic() - start < 5
    assert found.metadata == {}


def test_the_license_of_a_model_of_the_hub_comes_with_the_model(
    served: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served.models[HUB_ID] |= {"README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"all of it"}
    Path("params.yaml").write_text(f"model_name: {HUB_ID}\nmodel_revision: main\ninitial_weights: auto\n")
    monkeypatch.setattr(sys, "argv", ["download"])
    download.main()
    found = ModelLicense.read()
    assert (found.metadata, found.problem) == ({"license": "mit"}, None)
    assert found.texts() == ["LICENSE"]
    snapshot = hub_cache.snapshot(HUB_ID, hub_server.COMMIT)
    (snapshot / "README.md").resolve().write_text("---\nlicense: cc0-1.0\n---\n")
    with pytest.raises(StageError, match=r"README\.md .*is damaged|is damaged: it is README\.md"):
        download.main()

    # A cache that has all but these is complete: nothing is asked for.
    for name in ("README.md", "LICENSE"):
        (snapshot / name).unlink()
    served.requests.clear()
    capsys.readouterr()
    download.main()
    assert served.requests == []
    assert f"the license of {HUB_ID} is unknown: there is no README.md" in capsys.readouterr().out
    assert ModelLicense.read().files == {}
