"""The model manifest, `data/model.json`: which model a run starts from, file by file.

It holds no clock times and no paths of this machine, so that the same model gives the same manifest everywhere.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from stages.artifacts import publish
from stages.artifacts.command import StageError

MANIFEST = Path("data/model.json")


@dataclass(frozen=True)
class FileEntry:
    """What a file must be, to be the one that was downloaded."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class ModelManifest:
    """What the stages after `download` need to know of the model."""

    model_name: str
    """A Hub id or a local directory, as given in params.yaml."""
    model_revision: str
    """As given in params.yaml; a local directory has none, and ignores it."""
    commit: str | None
    """The commit that the revision of a Hub id stood for; null for a local directory."""
    architecture: str
    """The class in transformers, such as `LlamaForCausalLM`."""
    model_type: str
    """The family's name in transformers, such as `llama`."""
    dtype: str
    """Of the stored weights (where they are mixed: of most of them), or of the config where there are none."""
    num_parameters: int
    """Tied weights are counted once."""
    files: dict[str, FileEntry]
    """Every file that the model needs."""
    weights: list[str]
    """The safetensors files among them; none: the run starts from random weights."""
    tied_weights: dict[str, str]
    """Names that share a parameter with another one -> the name under which it is trained and stored."""
    layer_classes: list[str]
    """Classes of the decoder's layers, which FSDP wraps."""
    vocab_size: int
    """Rows of the embedding."""
    max_seq_length: int | None
    """Tokens; null where the model knows no limit."""
    eos_token_id: int | None
    bos_token_id: int | None
    pad_token_id: int | None


def write(manifest: ModelManifest, path: Path = MANIFEST) -> None:
    """Write a manifest, atomically."""
    publish.write_json(path, dataclasses.asdict(manifest))


def read(path: Path = MANIFEST) -> ModelManifest:
    """Read a manifest that `write` wrote."""
    try:
        return TypeAdapter(ModelManifest).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise StageError(f"{path} is missing: run `dvc repro download`") from None
    except ValidationError as error:
        raise StageError(
            f"{path} is no model manifest: {error.errors()[0]['msg']}; run `dvc repro -f download`"
        ) from None


def directory(manifest: ModelManifest) -> Path:
    """Where the model's files lie on this machine; no socket is opened.

    Raises:
        StageError: they are gone.
    """
    if manifest.commit is None:
        if not Path(manifest.model_name).is_dir():
            raise StageError(f"model_name: the directory {manifest.model_name!r} is gone; put it back")
        return Path(manifest.model_name)
    from huggingface_hub import constants, try_to_load_from_cache

    config = try_to_load_from_cache(manifest.model_name, "config.json", revision=manifest.commit)
    if not isinstance(config, str):
        raise StageError(
            f"{manifest.model_name} at commit {manifest.commit} is not in HF_HOME ({constants.HF_HOME}): "
            "set HF_HOME to the directory that holds it, or run `dvc repro -f download`"
        )
    return Path(config).parent


def verify(manifest: ModelManifest, names: Iterable[str] | None = None) -> Path:
    """Hold the model's files, or those in `names`, against the manifest; return the directory they lie in.

    Raises:
        StageError: naming the file that is missing or was changed.
    """
    source = directory(manifest)
    for name in manifest.files if names is None else names:
        entry, path = manifest.files[name], source / name
        if not path.is_file():
            raise StageError(f"{path} is missing: put it back, or run `dvc repro -f download`")
        if path.stat().st_size != entry.size or publish.sha256_file(path) != entry.sha256:
            raise StageError(f"{path} was changed since the download: put it back, or run `dvc repro -f download`")
    return source
