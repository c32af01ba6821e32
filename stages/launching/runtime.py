"""How a training is launched: the parameters under `runtime`, and what a launcher passes on to the ranks.

The launcher reads the parameters once, for all ranks and all restarts. A rank that read params.yaml itself could train
something else than the others, or after a restart another run inside the directory of the first one.
"""

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from stages.base.errors import StageError
from stages.base.files import first_problem
from stages.base.identity import RunIdentity
from stages.base.params_file import load_params
from stages.checkpointing.decision import Decision, Resume
from stages.checkpointing.retention import CheckpointRuntime
from stages.checkpointing.run import SINCE_THE_LAUNCH, Run, describe, differences
from stages.model.manifest import ModelManifest
from stages.ranks import handoff
from stages.training.params import TrainParams


def _check_order(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[0] > steps[1]:
        raise ValueError("the first step must not be after the last")
    return steps


def _check_options(options: str) -> str:
    for option in shlex.split(options):  # a ValueError where a quote is not closed
        if option == "--test-only" or option.startswith(("--array", "-a")):
            raise ValueError(f"the training is one job, so sbatch cannot have {option}")
    return options


_MAX_CANDIDATES = 100
"""Checkpoints that are handed over: Linux starts no process with a variable of 128 KiB, and of so many one is valid."""

Steps = Annotated[tuple[PositiveInt, PositiveInt], AfterValidator(_check_order)]
"""The first and the last of a range of steps."""


@dataclass(frozen=True)
class TrainRuntime(CheckpointRuntime):
    """The leaves of the `runtime` section that training reads. None of them changes what is learned."""

    launcher: Literal["auto", "torchrun", "srun", "sbatch"]
    """Where torchrun starts the ranks. torchrun: on this machine. srun: on each node of an allocation of Slurm. auto:
    srun in an allocation of several nodes, else torchrun. sbatch: in a job of Slurm, which the launch submits and
    follows. Inside an allocation sbatch is the same as auto."""
    sbatch_args: Annotated[str, AfterValidator(_check_options)] | None
    """Options of `sbatch` as on its command line, for launcher sbatch."""
    num_nodes: PositiveInt | None
    """How many nodes of the allocation train. null: all. With launcher sbatch also the nodes of the job; then null
    means those of `sbatch_args` or of the script."""
    nproc_per_node: PositiveInt | None
    """How many ranks each node has. null: one per GPU, or 2 where there is none."""
    rdzv_endpoint: Annotated[str, Field(pattern=r"^[^:\s]+(:\d{1,5})?$")] | None
    """Where the other nodes reach the first one, as `host` or `host:port`. null: the address that it has towards the
    last one."""
    log_freq: PositiveInt
    """Distance between two lines of output, in optimizer steps."""
    timeout_minutes: PositiveFloat
    """How long a rank may take for one thing, in minutes. After 0.9 of it rank 0 names the rank and ends all. After the
    full time the others take rank 0 itself for lost."""
    max_restarts: NonNegativeInt
    """How often the ranks are restarted after a crash or a hang. An error that would recur, and a signal to stop, end
    the training at once."""
    resume: Literal["auto", "never"]
    """What a launch does with checkpoints. auto: it continues from the newest that this run would have reached itself.
    never: it deletes those of this run, and starts over."""
    tracker: Literal["none", "tensorboard", "wandb"]
    """Where else the metrics go. The files are below outputs/<experiment_name>/."""
    debug: bool
    """Whether each rank writes a log below `outputs/<experiment_name>/logs/`."""
    profile_steps: Steps | None
    """Steps that rank 0 traces, as [first, last]. null: none. The trace is in
    outputs/<experiment_name>/profile/<run_id>/."""


@dataclass(frozen=True)
class Launch:
    """What the launcher read."""

    params: TrainParams
    runtime: TrainRuntime
    identity: RunIdentity
    decision: Decision | None
    """Where the ranks start; None: whoever reads this decides."""

    def hand_over(self) -> None:
        """Pass it on to the processes that this one starts."""
        content = dataclasses.asdict(self)
        if self.decision:
            # The launcher has printed the reason, which names each checkpoint of another version of the pipeline.
            content["decision"] |= {"checkpoints": self.decision.checkpoints[:_MAX_CANDIDATES], "reason": ""}
        # json, not pydantic's dump, which refuses a path that is not UTF-8.
        os.environ[handoff.LAUNCH] = json.dumps(content, default=str)  # the paths of the decision


def _is_first_start() -> bool:
    """Whether `resume: never` is to delete the checkpoints of the run here: they are not of an earlier start.

    Slurm counts the starts of a job; torchrun counts those after a failure, not those after a change of its nodes
    (`--nnodes 1:4`).
    """
    return {os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")} == {"0"}


def read_launch() -> tuple[Run, TrainRuntime, Decision | None]:
    """What to train: what a launcher has read and decided, or without one what is in params.yaml now.

    Raises:
        StageError: the code, the tokens or the model are not those that the launcher has read.
    """
    if handoff.LAUNCH not in os.environ:
        return describe(load_params(TrainParams)), load_params(TrainRuntime, "runtime"), None
    try:
        launch = TypeAdapter(Launch).validate_python(json.loads(os.environ[handoff.LAUNCH]))
    except ValidationError as error:
        raise StageError(f"the code has changed since the launch ({first_problem(error)}): launch it again") from None
    run = describe(launch.params)
    if lines := differences(launch.identity, run.identity, SINCE_THE_LAUNCH):
        raise StageError("the files have changed since the launch: launch the training again", *lines)
    return run, launch.runtime, launch.decision


def how_to_resume(runtime: TrainRuntime, is_restart: bool = False) -> Resume:
    """What a start of the ranks may continue from."""
    return "own" if runtime.resume == "never" and (is_restart or not _is_first_start()) else runtime.resume


def check_ranks(run: Run, num_ranks: int, ranks_of_node: int) -> tuple[int, int]:
    """Refuse ranks that cannot train a run; returns their `FsdpParams.mesh_shape`.

    Raises:
        StageError: naming the parameter that does not fit them.
    """
    run.params.check_context_parallel(ModelManifest.read(), run.seq_length, ranks_of_node)
    run.params.grad_accum_steps(num_ranks)
    return run.params.fsdp.mesh_shape(num_ranks, ranks_of_node)
