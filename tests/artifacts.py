"""What the stages read and write, made small: a model on the disk, and whatever else several test files need."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stages import download
from stages.base import publish
from stages.base.identity import TokenFingerprints
from stages.base.origin import Origin
from stages.base.packed import METRICS, EncoderMetrics, PackMetrics, RowsMetrics
from stages.export.lineage import InitialModel, Lineage
from stages.forward import adapter_probe
from stages.model.manifest import ModelManifest
from tests.models import CONFIGS, write_tokenizer


def write_model(
    directory: Path,
    config: str | transformers.PreTrainedConfig = "llama",
    dtype: torch.dtype | None = torch.float32,
    words: list[str] | None = None,
    max_shard_size: str = "50GB",
) -> Path:
    """Write a model as `save_pretrained` does, and return its directory.

    Args:
        directory: Where to. It may have other files.
        config: That of the model, or its name in `CONFIGS`.
        dtype: Of its weights, which have the values of seed 0. With None there is only a config.
        words: Those of its tokenizer, where it has one: the first one stands for unknown words.
        max_shard_size: Of a file of weights.
    """
    config = CONFIGS[config] if isinstance(config, str) else config
    if dtype is None:
        config.save_pretrained(directory)
    else:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    if words:
        write_tokenizer(directory, words)
    return directory


def write_cache(source: Path, home: Path, name: str, commit: str) -> Path:
    """Copy a model into an HF_HOME as an older huggingface_hub leaves it; returns the snapshot's directory."""
    repo = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for directory in (repo / "blobs", repo / "refs", snapshot):
        directory.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for path in source.iterdir():
        blob = repo / "blobs" / publish.sha256_file(path)
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def try_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `download` find no layers that adapters fit."""
    monkeypatch.setattr(adapter_probe, "describe_linears", lambda *arguments: {})


def describe(name: str, initial_weights: Any = "auto") -> ModelManifest:
    """What `download` finds out of a model, but for adapters: to try them takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        try_no_adapters(patch)
        return download.describe(download.DownloadParams(name, "main", initial_weights))


# What is written beside exported weights.


def make_lineage(**values: Any) -> Lineage:
    """The lineage of a model of which only `values` matter."""
    defaults: dict[str, Any] = {
        "run_id": "0123", "step": 3, "adopted": None, "code": "c", "packages": {}, "checkpoint": "cs", "weights": {},
        "model": InitialModel(name="<tiny & small>", revision="main", commit=None, manifest="m", lineage=None),
        "data": TokenFingerprints(train="t", validation="v"), "params": {"experiment_name": "exp"},
    }  # fmt: skip
    return Lineage(**{**defaults, **values})


def packed_text(**values: Any) -> RowsMetrics:
    """What `pack` counts of some text of which only `values` matter."""
    defaults: dict[str, Any] = {
        "documents": 1, "characters": 1, "bytes": 1, "tokens": 1, "characters_per_token": 1.0, "unknown_share": 0.0,
        "dropped_characters": 0, "rows": 1,
    }  # fmt: skip
    return RowsMetrics(**{**defaults, **values})


def write_pack_metrics(fingerprint: str, text: RowsMetrics | None = None, encoder: str = "", **values: Any) -> None:
    """Write data/pack.json, of tokens with this fingerprint."""
    text = text or packed_text()
    defaults = {"source": "", "origin": Origin({}, {}), "train_shards": {}}
    encoded = EncoderMetrics(encoder, slow_characters=0, reason=None)
    PackMetrics(train=text, validation=text, encoder=encoded, fingerprint=fingerprint, **{**defaults, **values}).write(
        METRICS
    )
