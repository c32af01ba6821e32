"""The learning rate, as a function of the step alone."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class ScheduleParams:
    """What decides the learning rate of each step."""

    lr: PositiveFloat
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"]
    """Shape of the learning rate after the warm-up. wsd: stable at `lr`, then a linear decay."""
    lr_decay_steps: PositiveInt | None
    """Time until the lowest learning rate, warm-up included, in optimizer steps. null: the whole run."""
    lr_decay_ratio: Annotated[float, Field(gt=0, le=1)]
    """Last part of `lr_decay_steps` that decays with wsd, as a share."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)]
    """Lowest learning rate, as a fraction of `lr`."""
    warmup_steps: NonNegativeInt
    """Linear increase to `lr`, in optimizer steps. The first step has `lr` / warmup_steps."""

    def __post_init__(self) -> None:
        if self.lr_decay_steps is not None and self.lr_decay_steps <= self.warmup_steps:
            raise ValueError(
                f"lr_decay_steps {self.lr_decay_steps} includes the warm-up, but warmup_steps is {self.warmup_steps}: "
                "use more lr_decay_steps or fewer warmup_steps"
            )


def lr_ratio(params: ScheduleParams, total_steps: int, steps_done: int) -> float:
    """The learning rate of the optimizer step after `steps_done` ones, as a fraction of `lr`."""
    if steps_done < params.warmup_steps:
        # + 1: a first step with a rate of 0 would use up its rows for nothing.
        return (steps_done + 1) / params.warmup_steps
    if params.lr_schedule == "constant":
        return 1.0
    # With `lr_decay_steps` the rates do not depend on the length of the run: a longer one can adopt its checkpoints.
    end = params.lr_decay_steps or total_steps
    start = params.warmup_steps
    if params.lr_schedule == "wsd":
        start = max(start, end - round(params.lr_decay_ratio * end))
    # Clamped: after `end` the rate stays at the lowest. `max(1, ...)` where the warm-up lasts the entire run.
    progress = min(1.0, max(0.0, (steps_done - start) / max(1, end - start)))
    decayed = (1 + math.cos(math.pi * progress)) / 2 if params.lr_schedule == "cosine" else 1 - progress
    return params.min_lr_ratio + (1 - params.min_lr_ratio) * decayed


def learning_rate(params: ScheduleParams, total_steps: int, steps_done: int) -> float:
    """The learning rate of the optimizer step after `steps_done` ones."""
    return params.lr * lr_ratio(params, total_steps, steps_done)
