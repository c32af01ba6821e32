"""What a training reads: parameters, the model, tokens, the encoder of `pack`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import yaml
from pydantic import Field

from stages.artifacts import publish
from stages.artifacts.origin import RECORDS, DataRecord
from stages.artifacts.params_file import PARAMS_FILE, load_params
from stages.checks.findings import Finding, ok, warning
from stages.corpus import fast_tokenizer
from stages.model import headers, hub, hub_cache
from stages.model.manifest import MANIFEST, ModelManifest
from stages.tokens.packed import TRAIN, VALIDATION, PackedTokens
from stages.tokens.rows import TokenRows
from stages.training import trackers
from stages.training.params import TrainParams, TrainRuntime


@dataclass(frozen=True)
class InputParams:
    """The leaves of `params.yaml` that name what is read."""

    raw_dir: Annotated[str, Field(min_length=1)]
    model_name: Annotated[str, Field(min_length=1)]
    model_revision: Annotated[str, Field(min_length=1)]
    initial_weights: Literal["auto", "pretrained", "random"]
    fast_encoder: bool


@dataclass(frozen=True)
class ExecutorRuntime:
    """What runs the data stages."""

    executor: Literal["processes", "dask"]
    dask_scheduler: str | None


class Settings(NamedTuple):
    """params.yaml, as far as the checks need it."""

    inputs: InputParams
    params: TrainParams
    runtime: TrainRuntime
    executor: ExecutorRuntime


def load() -> Settings:
    """Read params.yaml.

    Raises:
        StageError: naming each parameter that is wrong.
    """
    return Settings(
        load_params(InputParams), load_params(TrainParams), load_params(TrainRuntime, "runtime"),
        load_params(ExecutorRuntime, "runtime"),
    )  # fmt: skip


def check_extras(settings: Settings) -> Iterator[Finding]:
    """The packages that some parameters need, and the fast encoder."""
    settings.params.check_packages()
    trackers.check(settings.runtime.tracker)
    if settings.inputs.fast_encoder:
        fast_tokenizer.check_installed()
        yield ok(f"fast_encoder: {fast_tokenizer.NAME} is installed")


def check_model(params: InputParams, full: bool, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The files of the model: compared with the manifest, or where that is not of it, with what is known without one.

    Args:
        params: Which model.
        full: Compare the SHA-256 of each file, too, not only its size.
        environment: That of the stages.
    """
    # First, whatever the manifest says: the parameters may have changed since it was written.
    try:
        source = hub.resolve(params.model_name, params.model_revision, params.initial_weights != "random")
    except hub.Lacking:
        if hub_cache.offline_variable(environment):
            raise
        return  # only the doctor itself may not fetch it: `offline.check_hub` reports that a stage would
    wanted = (params.model_name, params.model_revision, source.weights)
    manifest = ModelManifest.read() if MANIFEST.exists() else None
    if manifest and (manifest.model_name, manifest.model_revision, manifest.weights) == wanted:
        manifest.verify(contents=full)
        compared = "size and SHA-256" if full else "size"
        yield ok(f"{manifest.model_name}: {len(manifest.files)} files have the {compared} of {MANIFEST}")
        return
    headers.read(source.directory, source.weights)  # for its errors: a file that was cut off
    if full and source.commit is not None:  # `resolve` has compared the small files
        for name in source.weights:
            hub_cache.check(params.model_name, source.commit, name, publish.sha256_file(source.directory / name))
    state = "is of other parameters" if manifest else "is missing"
    yield warning(f"{MANIFEST} {state}; {params.model_name} is in {source.directory}", "`dvc repro download`")


def check_data(params: InputParams) -> Iterator[Finding]:
    """The raw files are there, and the data stages have run with the parameters of params.yaml."""
    if not Path(params.raw_dir).is_dir():
        yield warning(f"raw_dir {params.raw_dir} is not a directory", "put the raw files there, or set raw_dir")
    values = yaml.safe_load(PARAMS_FILE.read_text(encoding="utf-8"))
    for stage, path in RECORDS.items():
        if not path.exists():
            continue
        recorded = DataRecord.read(path).origin.params
        others = [
            f"{name} was {value!r} and is {values.get(name)!r}"
            for name, value in recorded.items()
            if values.get(name) != value
        ]
        if others:
            yield warning(f"{path} is of other parameters: {', '.join(others)}", f"`dvc repro {stage}`")


def check_export_from(params: TrainParams) -> Iterator[Finding]:
    """There are rows by which `export_from` can choose; without tokens `check_tokens` reports that."""
    if VALIDATION.exists():
        params.check_export_from(PackedTokens.read(VALIDATION).num_rows)
    yield from ()


def check_tokens(full: bool, directories: tuple[Path, ...] = (TRAIN, VALIDATION)) -> Iterator[Finding]:
    """The packed tokens: every file is there with all its rows; with `full` each has its SHA-256."""
    for directory in directories:
        if not directory.exists():
            yield warning(f"{directory} is missing", "`dvc repro pack`, or `dvc pull`")
            continue
        num_rows = len(TokenRows(directory))
        if full:
            PackedTokens.read(directory).verify()
        yield ok(f"{directory}: {num_rows:,} rows" + (", with their SHA-256" if full else ""))
