"""Check in seconds, before a job is booked, what would otherwise show up after an hour in the queue.

Reads    the installed packages, params.yaml, the model, data/tokens, outputs/plan.json, settings of DVC, GPUs, disks
Writes   nothing that stays: temporary files, where the pipeline writes, to try locks, renames and fsync
Command  python -m stages.doctor
         srun --ntasks-per-node=1 python -m stages.doctor    all nodes of a job

Each line is ok, warning or error, and names what to do. The exit status is 1 if there is an error. No connection to
another machine is opened.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

# Before what an older Python cannot import: without .venv, `make doctor` runs that of the system. Python 3.6 must be
# able to parse this file.
if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    print(
        f"error    Python {sys.version_info[0]}.{sys.version_info[1]} in {sys.prefix} is not supported: "
        "`rm -rf .venv`, and `PYTHON=python3.12 make setup` (3.10 to 3.14)"
    )
    sys.exit(1)

from stages.base import command
from stages.checks import installation
from stages.checks.findings import Found, collect

if TYPE_CHECKING:
    from stages.checks.settings import Settings
    from stages.model.manifest import ModelManifest


def main() -> None:
    """Print the findings of all checks."""
    parser = command.parser(__doc__)
    parser.add_argument(
        "--full", action="store_true", help="compare the SHA-256 of model and tokens: reads all of them"
    )
    args = parser.parse_args()
    if os.environ.get("SLURM_LOCALID", "0") != "0" and "SLURM_STEP_ID" in os.environ:
        return  # another task checks this node
    environment = dict(os.environ)
    # Nothing here may ask the Hub: what is not in the cache is an error. huggingface_hub reads it when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    num_nodes = int(environment.get("SLURM_STEP_NUM_NODES", 1))  # 1 in a batch script, and without Slurm
    prefix = f"{environment['SLURMD_NODENAME']}: " if num_nodes > 1 else ""
    counts: Counter[str] = Counter()
    for finding in find(num_nodes, args.full, environment):
        print(f"{prefix}{finding}", flush=True)
        counts[finding.level] += 1
    print(f"{prefix}doctor: {counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors")
    sys.exit(1 if counts["error"] else 0)


def find(num_nodes: int, full: bool, environment: Mapping[str, str]) -> Found[None]:
    """The findings of all checks.

    Args:
        num_nodes: That are checked at the same time.
        full: Also read all of the model and the tokens.
        environment: That the stages would have.
    """
    yield from collect(installation.check_packages())
    yield from collect(_find(num_nodes, full, environment))


def _find(num_nodes: int, full: bool, environment: Mapping[str, str]) -> Found[None]:
    # Here, so that a package that cannot be imported is a line, and not a traceback.
    from stages.base import outputs
    from stages.checkpointing.layout import checkpoint_root
    from stages.checks import dvc_settings, machine, settings

    directories = {"data": Path("data"), "outputs": outputs.OUTPUTS, "TMPDIR": Path(tempfile.gettempdir())}
    config = (yield from machine.check_user()) and (yield from collect(dvc_settings.read()))
    if config:
        yield from collect(dvc_settings.check_cache(config))
        directories["DVC cache"] = dvc_settings.cache_directory(config)
    found = yield from collect(settings.load())
    if found:
        directories["experiment"] = outputs.directory(found.train.experiment_name)
        directories["checkpoints"] = checkpoint_root(found.train.experiment_name)
    yield from machine.check_directories(directories, num_nodes)
    yield from collect(machine.check_shared_memory())
    has_tokens = yield from collect(settings.check_tokens(full))
    if found:
        yield from collect(settings.check_data(found))
        yield from collect(settings.check_packages(found))
        model = yield from collect(settings.check_model(found.download, full, environment))
        if model:
            yield from collect(settings.check_tokenizer(found.pack))
        yield from collect(_training(found, model if has_tokens else None, environment))


def _training(found: "Settings", model: "ModelManifest | None", environment: Mapping[str, str]) -> Found[None]:
    """What can be known of a launch here; `model`: None where the model or its tokens are missing."""
    from stages.checks import accelerators, settings
    from stages.plan import launched_nodes
    from stages.ranks import torchrun

    runtime = found.runtime
    in_job = "SLURM_JOB_ID" in environment
    if in_job:
        torchrun.num_nodes(runtime.launcher, runtime.num_nodes)  # raises what a launch here would
    num_nodes = launched_nodes(runtime, environment)
    # On a login node a launch would only submit a job, or fail.
    trains_here = in_job or (runtime.launcher in ("auto", "torchrun") and num_nodes == 1)
    yield from collect(accelerators.check_gpus(runtime.nproc_per_node if trains_here else None))
    num_ranks = None
    if num_nodes and (trains_here or runtime.nproc_per_node):
        num_ranks = (runtime.nproc_per_node or accelerators.num_gpus() or 2) * num_nodes
    plan = yield from collect(settings.check_plan(found, num_ranks, model is not None))
    if model and trains_here and num_nodes:
        yield from collect(accelerators.check_training(found.train, found.pack.seq_length, model))
        if plan:
            yield from collect(
                accelerators.check_memory(plan, found.train, runtime, num_ranks or plan.num_ranks, num_nodes)
            )


if __name__ == "__main__":
    command.run(main)
