"""What a launch on this machine meets: params.yaml, the nodes of Slurm, the GPUs, and the model cache alone."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from stages.base.command import format_gib
from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.base.summary import counted
from stages.checks.findings import Finding, Found, ok, warning
from stages.consolidate import ConsolidateParams
from stages.deduplicate import DeduplicateParams
from stages.download import DownloadParams
from stages.evaluate import EvaluateParams
from stages.extract import ExtractParams
from stages.launching.runtime import TrainRuntime
from stages.model import hub
from stages.organize import OrganizeParams
from stages.pack import PackParams
from stages.plan import PlanParams
from stages.ranks import torchrun
from stages.ranks.gpus import DEVICES, num_devices
from stages.ranks.process_group import check_devices, use_gpu
from stages.report import ReportParams
from stages.score import ScoreParams, ScoreRuntime
from stages.scoring import packages, public
from stages.training.params import TrainParams


class Settings(NamedTuple):
    """params.yaml, as far as the checks need it."""

    download: DownloadParams
    train: TrainParams
    runtime: TrainRuntime


def load() -> Found[Settings]:
    """The parameters of all stages: what the last ones refuse would show up after the training."""
    of_data = OrganizeParams, ExtractParams, DeduplicateParams, PackParams
    for params in (*of_data, PlanParams, ConsolidateParams, EvaluateParams, ReportParams):
        load_params(params)
    load_params(ScoreRuntime, "runtime")  # has what TrainRuntime lacks
    tasks = load_params(ScoreParams).tasks
    public.check(tasks)
    settings = Settings(load_params(DownloadParams), load_params(TrainParams), load_params(TrainRuntime, "runtime"))
    yield ok("params.yaml is valid")
    if tasks and not packages.directory().is_dir():
        yield warning(
            "score will install lm-eval for `tasks` after the training, and fail where there is no package index",
            "`python -m stages.scoring.packages` installs it now",
        )
    return settings


def check_model(params: DownloadParams) -> Found[None]:
    """Whether the cache has all files of the model. The environment must have HF_HUB_OFFLINE=1."""
    try:
        resolved = hub.resolve(params.model_name, params.model_revision, params.initial_weights != "random")
    except StageError as problem:
        yield Finding("error", f"with HF_HUB_OFFLINE=1 `download` would fail: {problem}")
    else:
        yield ok(f"{params.model_name} is complete in {resolved.directory}: no stage asks the Hub")


def check_gpus(runtime: TrainRuntime, devices: Path = DEVICES) -> Found[None]:
    """The build of torch, and each GPU: it must compute, and there must be one for each rank of a launch here.

    Raises:
        StageError: the allocation of Slurm has fewer nodes than a launch needs, or a GPU is missing or broken.
    """
    in_job = "SLURM_JOB_ID" in os.environ
    if in_job:
        torchrun.count_srun_nodes(runtime.launcher, runtime.num_nodes)
    is_one_node = runtime.launcher == "torchrun" or (runtime.launcher == "auto" and runtime.num_nodes in (None, 1))
    # On a login node a launch would only submit a job, or fail.
    num_usable = check_devices(runtime.nproc_per_node if in_job or is_one_node else None, devices)
    for index in range(num_usable):
        use_gpu(index)
    build = f"torch {torch.__version__}"
    if num_usable:
        found = [torch.cuda.get_device_properties(index) for index in range(num_usable)]
        names = {f"{gpu.name}, {format_gib(gpu.total_memory)}" for gpu in found}
        yield ok(f"{build} computes on {counted(num_usable, 'GPU')} ({'; '.join(sorted(names))})")
    elif torch.version.cuda is None and not num_devices(devices):
        yield ok(f"{build} is the CPU build, and this machine has no GPU: it trains on CPUs")
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield warning(
            f"{build} finds no GPU, of {num_devices(devices)} (CUDA_VISIBLE_DEVICES is {visible!r}): it trains on CPUs",
            "for GPUs, run the doctor on their node (`srun --gpus=1 make doctor`), without that variable",
        )
