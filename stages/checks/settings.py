"""What stages refuse of params.yaml, the model and the tokens: each is asked itself, so that nothing is said twice."""

import importlib
from collections.abc import Mapping
from typing import NamedTuple

from stages import plan
from stages.base import outputs
from stages.base.packed import TRAIN, VALIDATION, PackedTokens
from stages.base.params_file import load_params
from stages.checks.findings import Found, error, ok, warning
from stages.consolidate import ConsolidateParams, ConsolidateRuntime
from stages.download import DownloadParams
from stages.evaluate import EvaluateParams, EvaluateRuntime
from stages.extract import ExtractParams, ExtractRuntime
from stages.forward.rows import TokenRows
from stages.launching import trackers
from stages.launching.runtime import TrainRuntime
from stages.model import hub, hub_cache
from stages.model.manifest import MANIFEST, ModelManifest
from stages.organize import OrganizeParams, OrganizeRuntime, find_root
from stages.pack import PackParams, PackRuntime, find_tokenizer_spec
from stages.plan import Plan, PlanParams
from stages.report import ReportParams
from stages.training.params import TrainParams


class Settings(NamedTuple):
    """params.yaml, as far as other checks need it."""

    organize: OrganizeParams
    download: DownloadParams
    pack: PackParams
    train: TrainParams
    data_runtime: OrganizeRuntime
    runtime: TrainRuntime


def load() -> Found[Settings]:
    """The parameters of all stages.

    Raises:
        StageError: naming each that is wrong.
    """
    for params in (ExtractParams, PlanParams, ConsolidateParams, EvaluateParams, ReportParams):
        load_params(params)
    for runtime in (ExtractRuntime, PackRuntime, ConsolidateRuntime, EvaluateRuntime):
        load_params(runtime, "runtime")
    settings = Settings(
        *(load_params(OrganizeParams), load_params(DownloadParams), load_params(PackParams), load_params(TrainParams)),
        *(load_params(OrganizeRuntime, "runtime"), load_params(TrainRuntime, "runtime")),
    )
    yield ok("params.yaml is valid")
    return settings


def check_data(settings: Settings) -> Found[None]:
    """The raw files, the splits, and what runs the data stages."""
    settings.pack.check_splits(settings.organize.num_splits)
    yield ok(f"raw_dir is {find_root(settings.organize.raw_dir)}")
    if scheduler := settings.data_runtime.dask_scheduler:
        importlib.import_module("distributed")
        yield warning(
            f"the data stages connect to {scheduler}", "runtime.dask_scheduler: null keeps them on this machine"
        )


def check_packages(settings: Settings) -> Found[None]:
    """What some parameters need in addition to the lock."""
    settings.train.check_packages()
    trackers.check(settings.runtime.tracker)
    yield ok("the packages that params.yaml asks for are installed")


def check_model(params: DownloadParams, full: bool, environment: Mapping[str, str]) -> Found[ModelManifest | None]:
    """Whether the model is complete, and that of the manifest, which is returned then.

    Args:
        params: Which model.
        full: Compare the SHA-256 of each file, too, not only its size.
        environment: That of the stages; in that of the doctor the Hub is forbidden.
    """
    try:
        source = hub.resolve(params.model_name, params.model_revision, params.initial_weights != "random")
    except hub.Lacking:
        if hub_cache.offline_variable(environment):
            raise
        yield error(
            f"`download` would connect to the Hub: {hub_cache.repository(params.model_name).parent} lacks files of "
            f"{params.model_name}, and HF_HUB_OFFLINE is not set",
            f"`hf download {params.model_name} --revision {params.model_revision}` where there is a network, bring "
            "its HF_HOME here, and `export HF_HUB_OFFLINE=1`",
        )
        return None
    yield ok(f"{params.model_name} is complete in {source.directory}: no stage asks the Hub")
    manifest = ModelManifest.read() if MANIFEST.exists() else None
    wanted = (params.model_name, params.model_revision, source.weights)
    if manifest is None or (manifest.model_name, manifest.model_revision, manifest.weights) != wanted:
        yield warning(f"{MANIFEST} is missing, or of other parameters", "`dvc repro download`")
        return None
    manifest.verify(contents=full)
    yield ok(f"{len(manifest.files)} files have the {'size and SHA-256' if full else 'size'} of {MANIFEST}")
    return manifest


def check_tokenizer(params: PackParams) -> Found[None]:
    """What `pack` needs of the model that the manifest describes."""
    spec = find_tokenizer_spec(params, ModelManifest.read())
    yield ok(f"pack can encode with {spec.path.name}, in rows of {params.seq_length}")


def check_tokens(full: bool) -> Found[bool]:
    """The packed tokens: every file is there with all its rows, with `full` each has its SHA-256; whether there are."""
    for directory in (TRAIN, VALIDATION):
        if not directory.exists():
            yield warning(f"{directory} is missing", "`dvc repro pack`, or `dvc pull`")
            return False
        num_rows = len(TokenRows(directory))
        PackedTokens.read(directory, contents=full)
        yield ok(f"{directory}: {num_rows:,} rows" + ", with their SHA-256" * full)
    return True


def check_plan(settings: Settings, num_ranks: int | None, has_inputs: bool) -> Found[Plan | None]:
    """What `plan` refuses; returns outputs/plan.json, which has the memory of each rank, if it is of these inputs."""
    if not has_inputs:
        plan.check_num_ranks(settings.train, num_ranks)
        return None
    estimated = plan.check(settings.train, settings.runtime, num_ranks)
    yield ok(f"{estimated.steps:,} steps; their checkpoints and the model fit on the disk")
    found = Plan.read(outputs.PLAN) if outputs.PLAN.exists() else None
    if found and found.inputs == plan.inputs_digest(settings.train):
        return found
    state = "is of other parameters, tokens or another model" if found else "is missing"
    yield warning(f"{outputs.PLAN} {state}: memory is not compared with it", "`dvc repro plan`")
    return None
