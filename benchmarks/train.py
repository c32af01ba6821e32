"""Speed, checkpoints, resume and load of the training, beside a bare FSDP2 loop, the Trainer of transformers and DDP.

    python -m benchmarks.train                                               two ranks on the CPU, or all GPUs
    python -m benchmarks.train --only speed --rounds 20
    python -m benchmarks.train --only checkpoints --ranks 1 --threads 1      a core is left for the saving
    python -m benchmarks.train --params 1B --seq-length 4096 --precision bf16 --compile --load-params 1B --ckpt-freq 100

All train the same Llama from the same weights on the same rows (the sources of the Python packages around it), in the
same order, with fused AdamW; where their losses differ, nothing is reported. They take turns of a few steps, and each
number is the median over the turns. The clock is that of this process, read when a line of the training arrives; so
the log, the data and the checks of the pipeline count as part of its steps.

With 1B parameters a checkpoint has 15 GB, and `--work` must have room for ten of them. The Trainer needs accelerate:
`pip install .[bench]`.
"""

import argparse
import csv
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.data import REPO, make_text
from benchmarks.train_ranks import BETAS, EPS, LR, MAX_GRAD_NORM, SEED, WEIGHT_DECAY, Job
from stages.training import flops

SHAPES = {  # hidden, layers, heads, heads of keys and values, intermediate, vocabulary
    "1M": (128, 4, 4, 2, 352, 4096),
    "12M": (384, 6, 6, 2, 1024, 8192),
    "100M": (768, 12, 12, 4, 2048, 32768),
    "1B": (2048, 16, 32, 8, 8192, 128256),
}
LINE = re.compile(r"step (\d+)/\d+ .*peak ([\d.]+) GiB")


class Training:
    """A training that was started, read line by line."""

    def __init__(self, arguments: list[str], project: Path, environment: dict[str, str], errors: Path) -> None:
        self.arguments = arguments
        self.lines: dict[int, float] = {}
        """Seconds from the launch to the line of a step, without those in which it was paused."""
        self.peak = 0.0
        """GiB of rank 0, of the GPU where there is one, at the last line."""
        self.loads: list[dict[str, float]] = []
        """What each rank said of its load."""
        self.losses: list[float] = []
        """Mean losses between two lines, from the first step on."""
        self.computed: list[float] = []
        """CPU seconds of its processes until the begin and the end of each turn."""
        self._errors = errors
        self._start = time.perf_counter()
        self._paused_at: float | None = None
        with errors.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], cwd=project, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip

    def until(self, step: int) -> float:
        """Wait for the line of a step; returns its time."""
        while step not in self.lines:
            if not self._read_line():
                self._fail()
        return self.lines[step]

    def until_first(self) -> float:
        """Wait for the first line; returns its time."""
        while not self.lines:
            if not self._read_line():
                self._fail()
        return min(self.lines.values())

    def pause(self) -> None:
        """Stop all its processes, until `go_on`."""
        self._signal(signal.SIGSTOP)
        self._paused_at = time.perf_counter()

    def go_on(self) -> None:
        """End a pause, if there is one."""
        if self._paused_at is not None:
            self._start += time.perf_counter() - self._paused_at
            self._paused_at = None
            self._signal(signal.SIGCONT)

    def finish(self) -> None:
        """Wait for its end."""
        self.go_on()
        while self._read_line():
            pass
        if self._process.wait():
            self._fail()

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        self._process.terminate()
        while self._read_line():
            pass
        self._process.wait()

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)

    def cpu_seconds(self) -> float:
        """What its processes that live have computed so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes())

    def _read_line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if match := LINE.search(line):
            self.lines[int(match[1])] = time.perf_counter() - self._start
            self.peak = max(self.peak, float(match[2]))
        elif line.startswith("load "):
            self.loads.append(json.loads(line[5:]))
        elif line.startswith("losses "):
            self.losses = json.loads(line[7:])
        return line

    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            process.send_signal(number)

    def _fail(self) -> NoReturn:
        status = self._process.wait()
        raise SystemExit(f"{self.arguments} ended with status {status}\n{self._errors.read_text()[-4000:]}")


class Bench:
    """A project with a model and tokens, and how its trainings are started."""

    def __init__(self, project: Path, options: argparse.Namespace) -> None:
        self.project, self.options = project, options
        self.ranks: int = options.ranks or torch.cuda.device_count() or 2
        self.batch_size: int = options.batch_size
        self.tokens_per_step = self.batch_size * self.ranks * options.seq_length
        threads: int = options.threads or max(1, len(os.sched_getaffinity(0)) // self.ranks)
        self.environment = {
            **os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        self.trainings: list[Training] = []
        self.make_model(options.params)
        self.make_tokens()

    def make_model(self, params: str) -> None:
        """Random weights in bf16 under the tokenizer of the embedded model."""
        hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[params]
        config = LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=intermediate, vocab_size=vocabulary, tie_word_embeddings=True,
            max_position_embeddings=self.options.seq_length, bos_token_id=None, eos_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        directory = self.project / "model"
        model.save_pretrained(directory)
        for path in (REPO / "models/tiny-llama").glob("*token*"):
            shutil.copy(path, directory)
        self.num_parameters = sum(param.numel() for param in model.parameters())
        self.flops_per_token = flops.flops_per_token(model, self.options.seq_length)

    def make_tokens(self) -> None:
        corpus = self.project / "corpus"
        corpus.mkdir()
        make_text(corpus, self.options.megabytes)
        for name in ("dvc.yaml", "stages"):
            (self.project / name).symlink_to(REPO / name)
        self.write_params(1, "bench")
        for name in ("organize", "extract", "download", "pack"):
            self.start(["-m", f"stages.{name}"]).finish()

    def write_params(self, steps: int, experiment: str, **runtime: Any) -> None:
        """The parameters of a training of the pipeline that does what the others do."""
        content = yaml.safe_load((REPO / "params.yaml").read_text())
        content |= {
            "experiment_name": experiment, "raw_dir": "corpus", "model_name": "model",
            "seq_length": self.options.seq_length, "batch_size": self.batch_size,
            "total_batch_size": self.batch_size * self.ranks, "num_epochs": 10**6, "max_steps": steps, "lr": LR,
            "lr_schedule": "constant", "warmup_steps": 0, "weight_decay": WEIGHT_DECAY, "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1], "adam_eps": EPS, "max_grad_norm": MAX_GRAD_NORM,
            "seed": SEED, "precision": self.options.precision, "compile": self.options.compile, "document_mask": False,
            "eval_freq": 10**6,
        }  # fmt: skip
        content["runtime"] |= {"nproc_per_node": self.ranks, "log_freq": 1, "ckpt_freq": None, **runtime}
        (self.project / "params.yaml").write_text(yaml.safe_dump(content))

    def start(self, arguments: list[str]) -> Training:
        """Start Python in the project."""
        errors = self.project / f"errors-{len(self.trainings)}.txt"
        self.trainings.append(Training(arguments, self.project, self.environment, errors))
        return self.trainings[-1]

    def start_ours(self, steps: int, experiment: str = "bench", **runtime: Any) -> Training:
        self.write_params(steps, experiment, **runtime)
        return self.start(["-m", "stages.launch"])

    def start_other(self, program: str, steps: int, **job: Any) -> Training:
        """Start the ranks of a program with torchrun."""
        told = Job(
            program, str(self.project / "model"), self.batch_size, steps, precision=self.options.precision,
            compile=self.options.compile, **job,
        )  # fmt: skip
        path = self.project / "job.json"
        path.write_text(json.dumps(asdict(told)))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return self.start([*torchrun, "-m", "benchmarks.train_ranks", str(path)])

    def close(self) -> None:
        """Leave no process behind."""
        for training in self.trainings:
            training.kill()

    def history_losses(self, log_freq: int) -> list[float]:
        """The losses of the pipeline's last training, as the others print them."""
        with (self.project / "outputs/bench/history.tsv").open() as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file, delimiter="\t") if row["loss"]]
        return [statistics.mean(losses[start : start + log_freq]) for start in range(0, len(losses), log_freq)]


def in_turns(
    programs: dict[str, Callable[[], Training]], first: int, size: int, number: int
) -> tuple[dict[str, list[float]], dict[str, Training]]:
    """Seconds that each program takes for every `size` steps after step `first`, `number` times; and its training.

    On CPUs all of them are started and then take turns, all but one paused: what else the machine does meanwhile hits
    all of them. On GPUs, whose memory may not hold them all, they run one after the other.
    """
    take_turns = not torch.cuda.is_available()
    trainings: dict[str, Training] = {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for name in [*programs] * number if take_turns else [name for name in programs for _ in range(number)]:
        if name not in trainings:
            trainings[name] = programs[name]()
            trainings[name].until(first)
            trainings[name].computed.append(trainings[name].cpu_seconds())
        training, done = trainings[name], seconds[name]
        training.go_on()
        step = first + size * len(done)
        done.append(-training.until(step) + training.until(step + size))
        training.computed.append(training.cpu_seconds())
        if take_turns:
            training.pause()
        elif len(done) == number:
            training.finish()
    for training in trainings.values():
        training.finish()
    return seconds, trainings


def median_ratio(values: list[float], others: list[float]) -> float:
    """Median over the rounds of the ratio within each."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def speed(bench: Bench) -> None:
    """Tokens a second."""
    size, number = bench.options.log_freq, bench.options.rounds
    first = 2 * size
    steps = first + size * (number + 1)  # the pipeline validates after the last one
    programs = {
        "(a) ours": lambda: bench.start_ours(steps, log_freq=size),
        "(b) bare FSDP2": lambda: bench.start_other("bare", steps, log_freq=size),
        "(c) Trainer": lambda: bench.start_other("trainer", steps, log_freq=size),
        "(d) DDP": lambda: bench.start_other("ddp", steps, log_freq=size),
    }
    seconds, trainings = in_turns(programs, first, size, number)
    losses = {name: training.losses for name, training in trainings.items()}
    check_losses(losses | {"(a) ours": bench.history_losses(size)}, bench.options.precision)
    computed = {name: training.computed[-1] - training.computed[0] for name, training in trainings.items()}
    print("\n| speed | tokens/s | of the bare loop | quartiles | CPU time of it | MFU | peak GiB of rank 0 |")
    print("|---|---|---|---|---|---|---|")
    for name, values in seconds.items():
        rate = size * bench.tokens_per_step / statistics.median(values)
        ratios = [other / value for value, other in zip(values, seconds["(b) bare FSDP2"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        peak = trainings[name].peak
        columns = [f"{rate:,.0f}", f"{middle:.1%}", f"{low:.1%}, {high:.1%}",
                   f"{computed[name] / computed['(b) bare FSDP2']:.1%}", mfu(bench, rate), f"{peak:.2f}"]  # fmt: skip
        print(f"| {name} | {' | '.join(columns)} |")


def check_losses(losses: dict[str, list[float]], precision: str) -> None:
    """Refuse to compare programs that do not compute the same."""
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    difference = max(max(values) - min(values) for values in zip(*losses.values(), strict=True))
    if not difference <= tolerance:
        raise SystemExit("the losses differ:\n" + "\n".join(f"{name}: {row}" for name, row in losses.items()))
    print(f"\nthe losses of all differ by {difference:.1e} at most")


def mfu(bench: Bench, rate: float) -> str:
    if not torch.cuda.is_available():
        return ""
    peak = flops.peak_flops(torch.cuda.get_device_name(), bench.options.precision)
    return f"{rate * bench.flops_per_token / (peak * bench.ranks):.1%}" if peak and bench.flops_per_token else ""


def checkpoints(bench: Bench) -> None:
    """What a checkpoint costs the training: the time of some steps with one, beyond that of as many without."""
    size, number = bench.options.ckpt_freq, bench.options.rounds

    def start(experiment: str, **runtime: Any) -> Callable[[], Training]:
        return lambda: bench.start_ours(size * (number + 2), experiment, log_freq=size, **runtime)

    programs = {
        "none": start("none"),
        "synchronous": start("synchronous", ckpt_freq=size, async_checkpoint=False),
        "asynchronous": start("asynchronous", ckpt_freq=size, async_checkpoint=True),
    }
    seconds, _ = in_turns(programs, size, size, number)
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
    """From the launch to the first step after a checkpoint."""
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
    computed: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(bench.options.launches):
        for name, program in programs.items():
            training = program()
            seconds[name].append(training.until_first())
            computed[name].append(training.cpu_seconds())
            training.stop()
    print("\n| resume | seconds from launch to first step | of the Trainer | CPU seconds | of the Trainer |")
    print("|---|---|---|---|---|")
    for name in programs:
        columns = [
            f"{statistics.median(values[name]):.1f} | {median_ratio(values[name], values['(c) Trainer']):.0%}"
            for values in (seconds, computed)
        ]
        print(f"| {name} | {' | '.join(columns)} |")


def load(bench: Bench) -> None:
    """What the ranks read and hold until the weights are where they belong."""
    bench.make_model(bench.options.load_params)
    bench.start(["-m", "stages.download"]).finish()
    bench.write_params(1, "load")
    programs: dict[str, Callable[[], Training]] = {
        "(a) ours": lambda: bench.start_other("stage", 0),
        "(c) Trainer": lambda: bench.start_other("trainer", 0),
        "(c) Trainer, rank 0 reads for all": lambda: bench.start_other("trainer", 0, main_loads=True),
    }
    print(f"\n| load, {bench.num_parameters:,} parameters | MiB of weights read, each rank | MiB read beside them | "
          "MiB of memory for the load, at most |\n|---|---|---|---|")  # fmt: skip
    for name, program in programs.items():
        training = program()
        training.finish()
        ranks = sorted(training.loads, key=lambda values: values["rank"])
        columns = (
            ", ".join(f"{values[key]:.0f}" for values in ranks) for key in ("mapped_mib", "read_mib", "grown_mib")
        )
        print(f"| {name} | {' | '.join(columns)} |")


def main() -> None:
    kinds = {"speed": speed, "checkpoints": checkpoints, "resume": resume, "load": load}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--params", choices=SHAPES, default="12M", help="size of the model")
    parser.add_argument("--load-params", choices=SHAPES, default="100M", help="of the model whose load is watched")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a rank")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each program")
    parser.add_argument("--log-freq", type=int, default=5, help="steps of a turn, when speed is measured")
    parser.add_argument("--ckpt-freq", type=int, default=5, help="steps of a turn, when checkpoints are measured")
    parser.add_argument("--launches", type=int, default=3, help="of each program, when resuming is measured")
    parser.add_argument("--ranks", type=int, help="default: one a GPU, or 2")
    parser.add_argument("--threads", type=int, help="of a rank; default: the cores, shared out")
    parser.add_argument("--megabytes", type=int, default=1, help="of text")
    parser.add_argument("--work", type=Path, help="a folder for temporary files, on a fast disk")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the trainings are ended, too
    with tempfile.TemporaryDirectory(dir=options.work) as folder, closing(Bench(Path(folder), options)) as bench:
        print(
            f"{bench.num_parameters:,} parameters, {bench.ranks} ranks, {bench.tokens_per_step} tokens a step, "
            f"{options.precision}, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        for kind in options.only:
            kinds[kind](bench)
            sys.stdout.flush()
        print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
