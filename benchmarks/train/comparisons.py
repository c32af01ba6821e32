"""What is compared, each as the rows of a table."""

import math
import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

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
    "CPU time of it": "{:.1%}",
    "MFU": "{:.1%}",
    "peak GiB of rank 0": "{:.2f}",
    "seconds": "{:.2f}",
    "seconds lost": "{:.2f}",
    "lower quartile, s": "{:.2f}",
    "upper quartile, s": "{:.2f}",
    "of the synchronous one": "{:.0%}",
    "steps between two": "{:.0f}",
    "seconds from launch to first step": "{:.1f}",
    "CPU seconds": "{:.1f}",
    "of the Trainer": "{:.0%}",
    "of its CPU seconds": "{:.0%}",
    "MiB of weights read": "{:.0f}",
    "MiB of other reads": "{:.0f}",
    "peak MiB of memory": "{:.0f}",
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
            trainings[name].cpu_times.append(trainings[name].cpu_seconds())
        training, done = trainings[name], seconds[name]
        training.unpause()
        step = first + size * len(done)
        done.append(-training.until(step) + training.until(step + size))
        training.cpu_times.append(training.cpu_seconds())
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


def median_ratio(values: list[float], others: list[float]) -> float:
    """Median over the rounds of the ratio within each."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


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
        return lambda: bench.start_other(PROGRAMS[program], steps, log_freq=size)

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
    cpu_time = {name: trainings[name].cpu_times[-1] - trainings[name].cpu_times[0] for name in seconds}
    rows: dict[str, dict[str, float | None]] = {}
    for name, values in seconds.items():
        rate = size * bench.tokens_per_step / statistics.median(values)
        rows[name] = {"tokens/s": rate, "MFU": mfu(bench, rate), "peak GiB of rank 0": trainings[name].peak or None}
        if BARE in seconds:  # it may have failed
            ratios = [other / value for value, other in zip(values, seconds[BARE], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows[name] |= {
                "of the bare loop": middle,
                "lower quartile": low,
                "upper quartile": high,
                "CPU time of it": cpu_time[name] / cpu_time[BARE],
            }
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


def checkpoints(bench: "Bench") -> dict[str, dict[str, float | None]]:
    """What a checkpoint costs the training: the time of some steps with one, less that of as many without."""
    freq, num_turns = bench.args.ckpt_freq, bench.args.rounds
    size = min(max(freq, steps_of_a_save(bench)), 10 * freq)  # where a step takes milliseconds, enough is enough

    def start(experiment: str, **runtime: Any) -> "Callable[[], Training]":
        return lambda: bench.start_ours(size * (num_turns + 2), experiment, log_freq=size, **runtime)

    programs = {
        "none": start("none"),
        "synchronous": start("synchronous", ckpt_freq=size, async_checkpoint=False),
        "asynchronous": start("asynchronous", ckpt_freq=size, async_checkpoint=True),
    }
    seconds, _ = in_turns(programs, size, size, num_turns)
    lost = {
        name: statistics.quantiles([value - other for value, other in zip(values, seconds["none"], strict=True)], n=4)
        for name, values in seconds.items()
    }
    return {
        name: {
            "seconds": statistics.median(values),
            "seconds lost": lost[name][1],
            "lower quartile, s": lost[name][0],
            "upper quartile, s": lost[name][2],
            "of the synchronous one": lost[name][1] / lost["synchronous"][1],
            "steps between two": size,
        }
        for name, values in seconds.items()
    }


def steps_of_a_save(bench: "Bench") -> int:
    """Steps that take as long as writing 1.5 checkpoints: with fewer between two, one would wait for the other."""
    first, saves = 3, 3
    training = bench.start_ours(first + 2 * saves, "trial", log_freq=1, ckpt_freq=2, async_checkpoint=False)
    training.until(first + 2 * saves)
    training.stop()
    bench.remove_checkpoints()
    times = [training.lines[step] for step in range(first, first + 2 * saves + 1)]
    step = min(after - before for before, after in pairwise(times))
    save = (times[-1] - times[0]) / saves - 2 * step
    return math.ceil(1.5 * max(0.0, save) / step)


def resume(bench: "Bench") -> dict[str, dict[str, float | None]]:
    """Time from the launch to the first step after a checkpoint."""
    steps, saved = 1000, 4

    def ours() -> "Training":
        return bench.start_ours(steps, "resume", ckpt_freq=saved)

    def trainer(resume: bool = True) -> "Training":
        return bench.start_other("trainer", steps, save_freq=saved, resume=resume)

    for start in (ours, lambda: trainer(resume=False)):
        training = start()
        training.until(saved + 1)
        training.stop()
    programs: dict[str, Callable[[], Training]] = {OURS: ours, TRAINER: trainer}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    cpu_times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(bench.args.launches):
        for name, program in programs.items():
            training = program()
            seconds[name].append(training.until_first())
            cpu_times[name].append(training.cpu_seconds())
            training.stop()
    return {
        name: {
            "seconds from launch to first step": statistics.median(seconds[name]),
            "of the Trainer": median_ratio(seconds[name], seconds[TRAINER]),
            "CPU seconds": statistics.median(cpu_times[name]),
            "of its CPU seconds": median_ratio(cpu_times[name], cpu_times[TRAINER]),
        }
        for name in programs
    }


def load(bench: "Bench") -> dict[str, dict[str, float | None]]:
    """What the ranks read, and the memory that they need, until their weights are loaded; the largest of all ranks."""
    bench.make_model(bench.args.load_params)
    bench.start(["-m", "stages.download"]).finish()
    bench.write_params()
    programs: dict[str, Callable[[], Training]] = {
        OURS: lambda: bench.start_other("stage", 0),
        TRAINER: lambda: bench.start_other("trainer", 0),
        "(c) Trainer, rank 0 reads for all": lambda: bench.start_other("trainer", 0, cpu_ram_efficient_loading=True),
    }
    rows: dict[str, dict[str, float | None]] = {}
    for name, program in programs.items():
        training = program()
        training.finish()
        rows[name] = {
            title: max(values[key] for values in training.loads)
            for title, key in (
                ("MiB of weights read", "mapped_mib"),
                ("MiB of other reads", "read_mib"),
                ("peak MiB of memory", "grown_mib"),
            )
        }
    return rows
