"""The speed of programs, as the rows of a table."""

import statistics
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from stages.launching import flops

if TYPE_CHECKING:  # without pydantic and psutil, the tables can be written
    from benchmarks.train.bench import Bench
    from benchmarks.train.launched import Training

OURS, BARE, TRAINER, DDP = "(a) ours", "(b) bare FSDP2", "(c) Trainer", "(d) DDP"
PROGRAMS = {OURS: "", BARE: "bare", TRAINER: "trainer", DDP: "ddp"}
"""What `speed` compares, and the `Job.program` of those that are not the pipeline itself."""

FORMATS = {
    "tokens/s": "{:,.0f}",
    "of the bare loop": "{:.1%}",
    "lower quartile": "{:.1%}",
    "upper quartile": "{:.1%}",
    "MFU": "{:.1%}",
    "peak GiB of rank 0": "{:.2f}",
}
"""The columns of the tables, and how their numbers are written."""


def in_turns(
    programs: "dict[str, Callable[[], Training]]",
    first: int,
    size: int,
    num_turns: int,
    errors: dict[str, str] | None = None,
) -> "tuple[dict[str, list[float]], dict[str, Training]]":
    """Seconds of each program for each of `num_turns` times `size` steps after step `first`; and its training.

    On CPUs all of them are started and then take turns, all but one paused: what else the machine does meanwhile slows
    all of them down. On GPUs, whose memory may be too small for all of them, they run one after the other. With
    `errors`, a program that fails is named there, and left out.
    """
    take_turns = not torch.cuda.is_available()
    trainings: dict[str, Training] = {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}

    def turn(name: str) -> None:
        if name not in trainings:
            trainings[name] = programs[name]()
            trainings[name].until(first)
        training, done = trainings[name], seconds[name]
        training.unpause()
        step = first + size * len(done)
        done.append(-training.until(step) + training.until(step + size))
        if len(done) == num_turns and name == OURS:
            training.kill()  # what would follow is a validation and a checkpoint
        elif len(done) == num_turns:
            training.finish()
        elif take_turns:
            training.pause()

    for name in [*programs] * num_turns if take_turns else [name for name in programs for _ in range(num_turns)]:
        try:
            if name in seconds:
                turn(name)
        except SystemExit as error:
            if errors is None:
                raise
            errors[name] = str(error)
            del seconds[name], trainings[name]
    return seconds, trainings


def speed(
    bench: "Bench", programs: Iterable[str] = PROGRAMS, errors: dict[str, str] | None = None
) -> dict[str, dict[str, float | None]]:  # fmt: skip
    """Tokens per second of the pipeline and of other programs; `errors` as for `in_turns`."""
    size, num_turns = bench.args.log_freq, bench.args.rounds
    first = 2 * size
    steps = first + size * num_turns

    def start(program: str) -> "Callable[[], Training]":
        if program == OURS:
            return lambda: bench.start_ours(steps + 1, log_freq=1)
        return lambda: bench.start_other(PROGRAMS[program], steps, size)

    seconds, trainings = in_turns({name: start(name) for name in programs}, first, size, num_turns, errors)
    if not seconds:
        return {}
    losses = {name: trainings[name].losses for name in seconds}
    if OURS in losses:
        losses[OURS] = [statistics.mean(losses[OURS][start : start + size]) for start in range(0, steps, size)]
    try:
        check_losses(losses, bench.args.precision)
    except SystemExit as error:
        if errors is None:
            raise
        errors["losses"] = str(error)  # beside the numbers: minutes on a GPU are not thrown away
    rows: dict[str, dict[str, float | None]] = {}
    for name, values in seconds.items():
        rate = size * bench.tokens_per_step / statistics.median(values)
        rows[name] = {"tokens/s": rate, "MFU": mfu(bench, rate), "peak GiB of rank 0": trainings[name].peak or None}
        if BARE in seconds:  # it may have failed
            ratios = [other / value for value, other in zip(values, seconds[BARE], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows[name] |= {"of the bare loop": middle, "lower quartile": low, "upper quartile": high}
    return rows


def check_losses(losses: dict[str, list[float]], precision: str) -> None:
    """Refuse to compare programs that do not compute the same.

    Raises:
        SystemExit: the losses of a step differ.
    """
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    difference = max(max(values) - min(values) for values in zip(*losses.values(), strict=True))
    if not difference <= tolerance:
        raise SystemExit("the losses differ:\n" + "\n".join(f"{name}: {row}" for name, row in losses.items()))
    print(f"\nthe losses of all differ by {difference:.1e} at most")


def mfu(bench: "Bench", rate: float) -> float | None:
    """The share of the GPUs' peak that `rate` tokens per second use, if that is known."""
    if not torch.cuda.is_available():
        return None
    peak = flops.peak_flops(torch.cuda.get_device_name(), bench.args.precision)
    return rate * bench.flops_per_token / (peak * bench.num_ranks) if peak and bench.flops_per_token else None
