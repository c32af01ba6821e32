"""What is compared, each printed as a Markdown table."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.train.bench import Bench
from benchmarks.train.launched import Training
from stages.training import flops


def in_turns(
    programs: dict[str, Callable[[], Training]], first: int, size: int, num_turns: int
) -> tuple[dict[str, list[float]], dict[str, Training]]:
    """Seconds of each program for each of `num_turns` times `size` steps after step `first`; and its training.

    On CPUs all of them are started and then take turns, all but one paused: what else the machine does meanwhile slows
    all of them down. On GPUs, whose memory may be too small for all of them, they run one after the other.
    """
    take_turns = not torch.cuda.is_available()
    trainings: dict[str, Training] = {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for name in [*programs] * num_turns if take_turns else [name for name in programs for _ in range(num_turns)]:
        if name not in trainings:
            trainings[name] = programs[name]()
            trainings[name].until(first)
            trainings[name].cpu_times.append(trainings[name].cpu_seconds())
        training, done = trainings[name], seconds[name]
        training.unpause()
        step = first + size * len(done)
        done.append(-training.until(step) + training.until(step + size))
        training.cpu_times.append(training.cpu_seconds())
        if take_turns:
            training.pause()
        elif len(done) == num_turns:
            training.finish()
    for training in trainings.values():
        training.finish()
    return seconds, trainings


def median_ratio(values: list[float], others: list[float]) -> float:
    """Median over the rounds of the ratio within each."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def speed(bench: Bench) -> None:
    """Tokens per second."""
    size, num_turns = bench.args.log_freq, bench.args.rounds
    first = 2 * size
    steps = first + size * (num_turns + 1)  # the pipeline validates after the last one
    programs = {
        "(a) ours": lambda: bench.start_ours(steps, log_freq=size),
        "(b) bare FSDP2": lambda: bench.start_other("bare", steps, log_freq=size),
        "(c) Trainer": lambda: bench.start_other("trainer", steps, log_freq=size),
        "(d) DDP": lambda: bench.start_other("ddp", steps, log_freq=size),
    }
    seconds, trainings = in_turns(programs, first, size, num_turns)
    losses = {name: training.losses for name, training in trainings.items()}
    check_losses(losses | {"(a) ours": bench.history_losses(size)}, bench.args.precision)
    cpu_time = {name: training.cpu_times[-1] - training.cpu_times[0] for name, training in trainings.items()}
    print("\n| speed | tokens/s | of the bare loop | quartiles | CPU time of it | MFU | peak GiB of rank 0 |")
    print("|---|---|---|---|---|---|---|")
    for name, values in seconds.items():
        rate = size * bench.tokens_per_step / statistics.median(values)
        ratios = [other / value for value, other in zip(values, seconds["(b) bare FSDP2"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        peak = trainings[name].peak
        columns = [f"{rate:,.0f}", f"{middle:.1%}", f"{low:.1%}, {high:.1%}",
                   f"{cpu_time[name] / cpu_time['(b) bare FSDP2']:.1%}", mfu(bench, rate), f"{peak:.2f}"]  # fmt: skip
        print(f"| {name} | {' | '.join(columns)} |")


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


def mfu(bench: Bench, rate: float) -> str:
    if not torch.cuda.is_available():
        return ""
    peak = flops.peak_flops(torch.cuda.get_device_name(), bench.args.precision)
    return f"{rate * bench.flops_per_token / (peak * bench.num_ranks):.1%}" if peak and bench.flops_per_token else ""


def checkpoints(bench: Bench) -> None:
    """What a checkpoint costs the training: the time of some steps with one, less that of as many without."""
    size, num_turns = bench.args.ckpt_freq, bench.args.rounds

    def start(experiment: str, **runtime: Any) -> Callable[[], Training]:
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
    print(f"\n| checkpoint | seconds for {size} steps | seconds lost | quartiles | of the synchronous one |")
    print("|---|---|---|---|---|")
    for name, values in seconds.items():
        low, middle, high = lost[name]
        part = f"{middle / lost['synchronous'][1]:.0%}"
        print(f"| {name} | {statistics.median(values):.2f} | {middle:.2f} | {low:.2f}, {high:.2f} | {part} |")


def resume(bench: Bench) -> None:
    """Time from the launch to the first step after a checkpoint."""
    steps, saved = 1000, 4

    def ours() -> Training:
        return bench.start_ours(steps, "resume", ckpt_freq=saved)

    def trainer(resume: bool = True) -> Training:
        return bench.start_other("trainer", steps, save_freq=saved, resume=resume)

    for start in (ours, lambda: trainer(resume=False)):
        training = start()
        training.until(saved + 1)
        training.stop()
    programs: dict[str, Callable[[], Training]] = {"(a) ours": ours, "(c) Trainer": trainer}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    cpu_times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(bench.args.launches):
        for name, program in programs.items():
            training = program()
            seconds[name].append(training.until_first())
            cpu_times[name].append(training.cpu_seconds())
            training.stop()
    print("\n| resume | seconds from launch to first step | of the Trainer | CPU seconds | of the Trainer |")
    print("|---|---|---|---|---|")
    for name in programs:
        columns = [
            f"{statistics.median(values[name]):.1f} | {median_ratio(values[name], values['(c) Trainer']):.0%}"
            for values in (seconds, cpu_times)
        ]
        print(f"| {name} | {' | '.join(columns)} |")


def load(bench: Bench) -> None:
    """What the ranks read, and the memory that they need, until their weights are loaded."""
    bench.make_model(bench.args.load_params)
    bench.start(["-m", "stages.download"]).finish()
    bench.write_params(1, "load")
    programs: dict[str, Callable[[], Training]] = {
        "(a) ours": lambda: bench.start_other("stage", 0),
        "(c) Trainer": lambda: bench.start_other("trainer", 0),
        "(c) Trainer, rank 0 reads for all": lambda: bench.start_other("trainer", 0, cpu_ram_efficient_loading=True),
    }
    print(f"\n| load, {bench.num_parameters:,} parameters | MiB of weights read, each rank | MiB of other reads | "
          "peak MiB of memory for the load |\n|---|---|---|---|")  # fmt: skip
    for name, program in programs.items():
        training = program()
        training.finish()
        ranks = sorted(training.loads, key=lambda values: values["rank"])
        columns = (
            ", ".join(f"{values[key]:.0f}" for values in ranks) for key in ("mapped_mib", "read_mib", "grown_mib")
        )
        print(f"| {name} | {' | '.join(columns)} |")
