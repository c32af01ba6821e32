"""Check in seconds, before a job is booked, what would otherwise show up after an hour in the queue.

Reads    the installed packages, params.yaml, the model, data/tokens, outputs/plan.json, settings of DVC, GPUs, disks
Writes   nothing that stays: temporary files, where the pipeline writes, to try locks, renames and fsync
Command  python -m stages.doctor
         srun --ntasks-per-node=1 python -m stages.doctor    all nodes of a job, compared with each other

Each line is ok, warning or error, and names what to do. The exit status is 1 if there is an error. No connection to
another machine is opened.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before what an older Python cannot import: without .venv, `make doctor` runs that of the system. Python 3.6 must be
# able to parse this file.
if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    print(
        f"error    Python {sys.version_info[0]}.{sys.version_info[1]} in {sys.prefix} is not supported: "
        "`rm -rf .venv`, and `PYTHON=python3.12 make setup` (3.10 to 3.14)"
    )
    sys.exit(1)

from stages.artifacts import command
from stages.checks.findings import Finding, collect, ok, warning

if TYPE_CHECKING:
    from stages.checks.inputs import Settings
    from stages.checks.nodes import Node
    from stages.plan import Plan
    from stages.training.params import TrainRuntime

# A package that is missing must be a line, not a traceback: so each group of checks imports what it needs by itself.
_OUTPUTS = Path("outputs")  # of stages/artifacts/outputs.py, which imports pydantic


def main() -> None:
    """Print the findings of all checks."""
    parser = command.parser(__doc__)
    parser.add_argument(
        "--full", action="store_true", help="compare the SHA-256 of model and tokens: reads all of them"
    )
    parser.add_argument(
        "--wait", type=float, default=30, metavar="SECONDS", help="for other nodes (default: %(default)s)"
    )
    args = parser.parse_args()
    if os.environ.get("SLURM_LOCALID", "0") != "0" and "SLURM_STEP_ID" in os.environ:
        return  # another task checks this node
    environment = dict(os.environ)
    # Nothing here may ask the Hub: what is not in the cache is an error. huggingface_hub reads it when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from stages.checks.nodes import Node

    node = Node.of(environment)
    prefix = f"{node.name}: " if node.num_nodes > 1 else ""
    seen: set[Finding] = set()
    for finding in find(node, args.full, args.wait, environment):
        if finding not in seen:  # several checks fail where a package is missing
            print(f"{prefix}{finding}", flush=True)
        seen.add(finding)
    counts = Counter(finding.level for finding in seen)
    print(f"{prefix}doctor: {counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors")
    sys.exit(1 if counts["error"] else 0)


def find(node: "Node", full: bool, seconds: float, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The findings of all checks, those that need torch last.

    Args:
        node: This one, among those that are checked at the same time.
        full: Also read all of the model and the tokens.
        seconds: To wait for other nodes.
        environment: That the stages would have.
    """
    yield from collect(partial(_nodes, node, seconds, environment))  # first: the nodes wait for each other
    yield from collect(_installation)
    settings: list[Settings] = []
    yield from collect(partial(_read_params, settings))
    plans: list[Plan] = []
    of_params = next(iter(settings), None)
    yield from collect(partial(_read_plan, of_params, plans))
    configs: list[Mapping[str, Any]] = []
    yield from collect(partial(_read_dvc, configs))
    plan, config = next(iter(plans), None), next(iter(configs), None)
    for group in (
        partial(_dvc, config, environment),
        partial(_inputs, of_params, full, environment),
        partial(_disks, node, of_params, plan, config),
        partial(_operating_system, plan),
        partial(_accelerators, node, of_params, plan, environment),
    ):
        yield from collect(group)


def _installation() -> Iterator[Finding]:
    from stages.checks import installation

    yield from collect(installation.check_python)
    yield from collect(installation.check_packages)


def _read_params(found: "list[Settings]") -> Iterator[Finding]:
    from stages.checks import inputs

    found.append(inputs.load())
    yield ok("params.yaml is valid")


def _read_plan(settings: "Settings | None", found: "list[Plan]") -> Iterator[Finding]:
    from stages.artifacts import outputs
    from stages.plan import Plan, inputs_digest

    plan = Plan.read(outputs.PLAN) if outputs.PLAN.exists() else None
    if plan is None or (settings and plan.inputs != inputs_digest(settings.params)):
        state = "is missing" if plan is None else "is of other parameters, tokens or another model"
        yield warning(f"{outputs.PLAN} {state}: disk and memory are not compared with it", "`dvc repro plan`")
        return
    found.append(plan)


def _read_dvc(found: list[Mapping[str, Any]]) -> Iterator[Finding]:
    from stages.checks import dvc_settings

    found.append(dvc_settings.read_config())
    yield from dvc_settings.check_project(found[0])


def _nodes(node: "Node", seconds: float, environment: Mapping[str, str]) -> Iterator[Finding]:
    from stages.checks import nodes

    if node.num_nodes > 1:
        shared = Path(environment.get("CHECKPOINT_ROOT") or _OUTPUTS)
        yield from nodes.check_nodes(node, nodes.facts(), shared, seconds)


def _dvc(config: Mapping[str, Any] | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    if config is None:
        return
    from stages.checks import dvc_settings, offline

    yield from collect(partial(dvc_settings.check_cache, config))
    yield from collect(partial(dvc_settings.check_site_cache, config))
    yield from collect(partial(dvc_settings.check_locks, config))
    yield from collect(partial(offline.check_dvc, config, environment))


def _inputs(settings: "Settings | None", full: bool, environment: Mapping[str, str]) -> Iterator[Finding]:
    from stages.checks import inputs, offline

    yield from collect(partial(offline.check_proxies, environment))
    yield from collect(partial(inputs.check_tokens, full))
    if settings:
        yield from collect(partial(inputs.check_data, settings.inputs))
        yield from collect(partial(inputs.check_export_from, settings.params))
        yield from collect(partial(inputs.check_extras, settings))
        yield from collect(partial(inputs.check_model, settings.inputs, full, environment))
        yield from collect(partial(offline.check_hub, settings.inputs, environment))
        yield from collect(partial(offline.check_services, settings.executor, settings.runtime.tracker))


def _disks(
    node: "Node", settings: "Settings | None", plan: "Plan | None", config: Mapping[str, Any] | None
) -> Iterator[Finding]:
    from stages.checks import disks

    directories = {"data": Path("data"), "outputs": _OUTPUTS, "TMPDIR": Path(tempfile.gettempdir())}
    if config:
        from stages.checks.dvc_settings import cache_directory

        directories["DVC cache"] = cache_directory(config)
    if settings:
        from stages.checkpointing.layout import checkpoint_root

        directories["checkpoints"] = checkpoint_root(settings.params.experiment_name)
        if not Path(settings.inputs.model_name).is_dir():
            from stages.model import hub_cache

            directories["HF_HOME"] = hub_cache.directory()
        if plan:
            yield from collect(partial(_space_of_checkpoints, settings, plan))
    for names, path in disks.by_file_system(directories).items():
        yield from collect(partial(disks.check_space, names, path))
    directories.pop("HF_HOME", None)  # nobody writes into a complete one
    for names, path in disks.by_directory(directories).items():
        yield from collect(partial(disks.check_file_system, names, path, node.num_nodes))


def _space_of_checkpoints(settings: "Settings", plan: "Plan") -> Iterator[Finding]:
    from stages.plan import check_disk

    message = check_disk(settings.params, settings.runtime, plan)
    if message:
        yield Finding("warning", message.removeprefix("warning: "))
    else:
        yield ok("checkpoints and model of the plan fit on their disk")


def _operating_system(plan: "Plan | None") -> Iterator[Finding]:
    from stages.checks import operating_system

    yield from collect(operating_system.check_shared_memory)
    yield from collect(partial(operating_system.check_limits, plan.checkpoint_bytes if plan else None))


def _accelerators(
    node: "Node", settings: "Settings | None", plan: "Plan | None", environment: Mapping[str, str]
) -> Iterator[Finding]:
    from stages.artifacts import outputs
    from stages.checks import accelerators, operating_system
    from stages.training import devices

    nproc_per_node = settings.runtime.nproc_per_node if settings else None
    trains_here = settings is None or _trains_here(settings.runtime, environment)
    yield from collect(accelerators.check_driver)
    yield from collect(partial(accelerators.check_gpus, nproc_per_node if trains_here else None))
    memory = accelerators.usable_memory()
    has_gpus = devices.num_devices() > 0
    yield from collect(partial(accelerators.check_backends, has_gpus))
    yield from collect(partial(accelerators.check_interface, node.num_nodes, has_gpus, environment))
    if not (settings and plan and plan.peak and (trains_here or nproc_per_node)):
        return
    from stages.plan import launched_ranks
    from stages.training import torchrun
    from stages.training.memory import memory_limit

    allocated = torchrun.num_nodes(settings.runtime) if "SLURM_JOB_ID" in environment else None
    num_nodes = allocated or settings.runtime.num_nodes or 1
    num_ranks = launched_ranks(settings.runtime, len(memory), num_nodes)
    if num_ranks != plan.num_ranks:
        yield warning(
            f"{outputs.PLAN} is for {plan.num_ranks} ranks, and a launch here starts {num_ranks}, of which the memory "
            "is not known", f"set plan.num_ranks to {num_ranks}",
        )  # fmt: skip
        return
    if not trains_here:
        yield ok(f"{outputs.PLAN} is for {num_ranks} ranks, as many as a launch here starts on other nodes")
        return
    if memory:
        yield from collect(partial(accelerators.check_memory, plan.peak, min(memory)))
    on_cpu = plan.peak.staging * settings.runtime.async_checkpoint + plan.peak.total * (not memory)
    if memory and settings.params.fsdp.resolved().cpu_offload:
        on_cpu += plan.peak.weights + plan.peak.gradients + plan.peak.optimizer
    needed = num_ranks // num_nodes * on_cpu
    yield from collect(partial(operating_system.check_memory, needed, memory_limit()))


def _trains_here(runtime: "TrainRuntime", environment: Mapping[str, str]) -> bool:
    """Whether a launch on this machine trains on it. On a login node it would only submit a job, or fail."""
    is_alone = runtime.launcher in ("auto", "torchrun") and (runtime.num_nodes or 1) == 1
    return is_alone or "SLURM_JOB_ID" in environment


if __name__ == "__main__":
    command.run(main)
