"""The learning rate, as a function of the step alone."""

import math

from stages.training.params import TrainParams


def lr_ratio(params: TrainParams, total_steps: int, step: int) -> float:
    """The learning rate of optimizer step `step` (from 0), as a part of `lr`."""
    if step < params.warmup_steps:
        return (step + 1) / params.warmup_steps
    if params.lr_schedule == "constant":
        return 1.0
    end = params.lr_decay_steps or total_steps
    start = params.warmup_steps
    if params.lr_schedule == "wsd":
        start = max(start, end - round(params.lr_decay_ratio * end))
    progress = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    decayed = (1 + math.cos(math.pi * progress)) / 2 if params.lr_schedule == "cosine" else 1 - progress
    return params.min_lr_ratio + (1 - params.min_lr_ratio) * decayed
