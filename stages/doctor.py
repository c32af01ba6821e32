"""Check in seconds, before a job is booked, the machine that it will run on. `plan` checks the training itself.

Reads    settings of DVC, params.yaml, the model cache; GPUs, disks, and the allocation of Slurm
Writes   nothing that stays: temporary files, where the pipeline writes, to try locks
Example  python -m stages.doctor
         srun --ntasks-per-node=1 python -m stages.doctor    all nodes of a job

Each line is ok, warning or error, and names what to do. The exit status is 1 if there is an error. No connection to
another machine is opened.
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

# Before what an older Python cannot import: without .venv, `make doctor` runs that of the system. Python 3.6 must be
# able to parse this file.
if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    print(
        f"error    Python {sys.version_info[0]}.{sys.version_info[1]} in {sys.prefix} is not supported: "
        "`rm -rf .venv`, and `PYTHON=python3.12 make setup` (3.10 to 3.14)"
    )
    sys.exit(1)

from stages.base import command
from stages.base.summary import counted
from stages.checks.findings import Found, collect, error


def main() -> None:
    """Print the findings of all checks."""
    command.parser(__doc__).parse_args()
    if os.environ.get("SLURM_LOCALID", "0") != "0" and "SLURM_STEP_ID" in os.environ:
        return  # another task checks this node
    # Nothing here may ask the Hub: what is not in the cache is an error. huggingface_hub reads it when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    num_nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))  # 1 in a batch script, and without Slurm
    prefix = f"{os.environ['SLURMD_NODENAME']}: " if num_nodes > 1 else ""
    counts: Counter[str] = Counter()
    for finding in collect(find(num_nodes)):
        print(f"{prefix}{finding}", flush=True)
        counts[finding.level] += 1
    numbers = ", ".join(counted(counts[level], level) for level in ("warning", "error"))
    print(f"{prefix}doctor: {counts['ok']} ok, {numbers}")
    sys.exit(1 if counts["error"] else 0)


def find(num_nodes: int) -> Found[None]:
    """The findings of all checks, which `num_nodes` nodes make at the same time."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as problem:  # as where all disks are full, which the checks below say
        yield error(f"TMPDIR: {problem.strerror}", "free some space there, or `export TMPDIR=DIR` with one that has it")
        tempfile.tempdir = "."  # or torch could not be imported
    # Here, so that a package that cannot be imported is a line, and not a traceback.
    from stages.base import outputs
    from stages.checkpointing.layout import checkpoint_root
    from stages.checks import dvc_settings, launch, machine

    directories = {"data": Path("data"), "outputs": outputs.OUTPUTS, "TMPDIR": Path(tempfile.gettempdir())}
    has_home = yield from machine.check_user()
    settings = yield from collect(launch.load())  # before DVC, which asserts that raw_dir is no null
    config = has_home and (yield from collect(dvc_settings.read()))
    if config:
        yield from collect(dvc_settings.check_cache(config))
        directories["DVC cache"] = dvc_settings.cache_directory(config)
    if settings:
        directories["experiment"] = outputs.directory(settings.train.experiment_name)
        directories["checkpoints"] = checkpoint_root(settings.train.experiment_name)
        yield from collect(launch.check_model(settings.download))
        yield from collect(launch.check_gpus(settings.runtime))
    yield from machine.check_directories(directories, num_nodes)
    yield from collect(machine.check_shared_memory())


if __name__ == "__main__":
    command.run(main)
