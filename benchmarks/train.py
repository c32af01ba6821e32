"""Speed, checkpoints, resume and load of the training, beside a bare FSDP2 loop, the Trainer of transformers and DDP.

    python -m benchmarks.train                                    two ranks on the CPU, or all GPUs
    python -m benchmarks.train --only speed --rounds 5
    python -m benchmarks.train --params 1B --seq-length 4096 --precision bf16 --compile

All train the same Llama from the same weights on the same rows (the sources of the Python packages around it) with
fused AdamW. They are started in turns, a b c d a b c d ..., and each number is the median over the rounds: what else
the machine does meanwhile hits all of them. The clock is that of this process, read when a line of the training
arrives; so the log, the data and the checks of the pipeline count as part of its steps.

The Trainer needs accelerate: `pip install .[bench]`.
"""

import argparse
import csv
import itertools
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
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.data import REPO, make_text
from benchmarks.train_ranks import BETAS, EPS, LR, MAX_GRAD_NORM, SEED, WEIGHT_DECAY, Job

SHAPES = {  # hidden, layers, heads, heads of keys and values, intermediate, vocabulary
    "1M": (128, 4, 4, 2, 352, 4096),
    "12M": (384, 6, 6, 2, 1024, 8192),
    "100M": (768, 12, 12, 4, 2048, 32768),
    "1B": (2048, 16, 32, 8, 8192, 128256),
}
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # bf16, dense
LINE = re.compile(r"step (\d+)/\d+ .*peak ([\d.]+) GiB")
INTERRUPTED = 75
EXPERIMENT = "bench"


class Launched(NamedTuple):
    """What a training printed."""

    lines: dict[int, float]
    """Seconds from the launch to the line of a step."""
    peak: float
    """GiB of rank 0, of the GPU where there is one."""
    loads: list[dict[str, float]]
    """What each rank said of its load."""
    losses: list[float]
    """Mean losses between two lines, from the first step on."""

    def step_seconds(self, skip: int) -> float:
        """Median time of a step, without the first `skip` and those of the last line, which follows a validation."""
        steps = sorted(step for step in self.lines if step >= skip)[:-1]
        return statistics.median(
            (self.lines[end] - self.lines[start]) / (end - start) for start, end in itertools.pairwise(steps)
        )


class Bench:
    """A project with a model and tokens, and how its trainings are started."""

    def __init__(self, project: Path, options: argparse.Namespace) -> None:
        self.project, self.options = project, options
        self.ranks: int = options.ranks or torch.cuda.device_count() or 2
        self.batch_size: int = options.batch_size
        self.tokens_per_step = self.batch_size * self.ranks * options.seq_length
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.ranks))
        self.environment = {
            **os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        self.make_model()
        self.make_tokens()

    def make_model(self) -> None:
        """Random weights in bf16 under the tokenizer of the embedded model."""
        hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[self.options.params]
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
        # A forward and a backward pass of all weights, and of the causal half of attention.
        self.flops_per_token = 6 * (self.num_parameters + layers * hidden * self.options.seq_length)

    def make_tokens(self) -> None:
        corpus = self.project / "corpus"
        corpus.mkdir()
        make_text(corpus, self.options.megabytes)
        for name in ("dvc.yaml", "stages"):
            (self.project / name).symlink_to(REPO / name)
        self.write_params(1)
        for name in ("organize", "extract", "download", "pack"):
            self.run(["-m", f"stages.{name}"])

    def write_params(self, steps: int, log_freq: int = 1, **runtime: Any) -> None:
        """The parameters of a training of the pipeline that does what the others do."""
        content = yaml.safe_load((REPO / "params.yaml").read_text())
        content |= {
            "experiment_name": EXPERIMENT, "raw_dir": "corpus", "num_splits": 20, "model_name": "model", "seq_length": self.options.seq_length,
            "batch_size": self.batch_size, "total_batch_size": self.batch_size * self.ranks, "num_epochs": 10**6,
            "max_steps": steps, "lr": LR, "lr_schedule": "constant", "warmup_steps": 0, "weight_decay": WEIGHT_DECAY,
            "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPS, "max_grad_norm": MAX_GRAD_NORM,
            "seed": SEED, "precision": self.options.precision, "compile": self.options.compile, "document_mask": False,
            "eval_freq": 10**6,
        }  # fmt: skip
        content["runtime"] |= {"nproc_per_node": self.ranks, "log_freq": log_freq, "ckpt_freq": 10**6, **runtime}
        (self.project / "params.yaml").write_text(yaml.safe_dump(content))

    def run(self, arguments: list[str], stop_at: int | None = None) -> Launched:
        """Run Python in the project; stop it with SIGTERM when the line of step `stop_at` arrives."""
        lines: dict[int, float] = {}
        loads, losses, peak = [], [], 0.0
        with tempfile.TemporaryFile("w+") as errors:
            start = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.project, env=self.environment, text=True,
                stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
            assert process.stdout
            for line in process.stdout:
                now = time.perf_counter() - start
                if line.startswith("load "):
                    loads.append(json.loads(line[5:]))
                if line.startswith("losses "):
                    losses = json.loads(line[7:])
                if match := LINE.search(line):
                    step, peak = int(match[1]), float(match[2])
                    lines[step] = now
                    if stop_at is not None and step >= stop_at:
                        process.send_signal(signal.SIGTERM)
                        stop_at = None
            status = process.wait()
            errors.seek(0)
            if status not in (0, INTERRUPTED, -signal.SIGTERM) and not (lines and status == 1):
                raise SystemExit(f"{arguments} ended with status {status}\n{errors.read()[-4000:]}")
        return Launched(lines, peak, loads, losses)

    def launch_ours(self, steps: int, stop_at: int | None = None, **runtime: Any) -> Launched:
        self.write_params(steps, **runtime)
        return self.run(["-m", "stages.launch"], stop_at)

    def launch(self, program: str, steps: int, log_freq: int = 1, stop_at: int | None = None, **job: Any) -> Launched:
        """Start the ranks of a program with torchrun."""
        told = Job(
            program, str(self.project / "model"), self.batch_size, steps, log_freq, self.options.precision,
            self.options.compile, **job,
        )  # fmt: skip
        path = self.project / "job.json"
        path.write_text(json.dumps(asdict(told)))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return self.run([*torchrun, "-m", "benchmarks.train_ranks", str(path)], stop_at)

    def history_losses(self, log_freq: int) -> list[float]:
        """The losses of the pipeline's last training, as the others print them."""
        with (self.project / "outputs" / EXPERIMENT / "history.tsv").open() as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file, delimiter="\t") if row["loss"]]
        return [statistics.mean(losses[start : start + log_freq]) for start in range(0, len(losses), log_freq)]

    def clean(self) -> None:
        """Forget all checkpoints."""
        for name in ("outputs", "trainer"):
            shutil.rmtree(self.project / name, ignore_errors=True)


def rounds(number: int, programs: dict[str, Callable[[], Launched]]) -> dict[str, list[Launched]]:
    """Run all programs in turns."""
    results: dict[str, list[Launched]] = {name: [] for name in programs}
    for _ in range(number):
        for name, program in programs.items():
            results[name].append(program())
    return results


def median_ratio(values: list[float], others: list[float]) -> float:
    """Median over the rounds of the ratio within each."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def speed(bench: Bench) -> None:
    """Tokens a second."""
    steps, log_freq, skip = bench.options.steps, 5, 10

    def ours() -> Launched:
        bench.clean()
        launched = bench.launch_ours(steps, log_freq=log_freq, resume="never")
        return launched._replace(losses=bench.history_losses(log_freq))

    programs = {
        "(a) ours": ours,
        "(b) bare FSDP2": lambda: bench.launch("bare", steps, log_freq),
        "(c) Trainer": lambda: bench.launch("trainer", steps, log_freq),
        "(d) DDP": lambda: bench.launch("ddp", steps, log_freq),
    }
    results = rounds(bench.options.rounds, programs)
    check_losses({name: launched[0].losses for name, launched in results.items()}, bench.options.precision)
    rates = {
        name: [bench.tokens_per_step / one.step_seconds(skip) for one in launched] for name, launched in results.items()
    }
    print("\n| speed | tokens/s | of the bare loop | lowest, highest | MFU | peak GiB of rank 0 |")
    print("|---|---|---|---|---|---|")
    for name, values in rates.items():
        ratios = [value / other for value, other in zip(values, rates["(b) bare FSDP2"], strict=True)]
        spread = f"{min(ratios):.1%}, {max(ratios):.1%}"
        rate = statistics.median(values)
        peak = statistics.median(one.peak for one in results[name])
        print(
            f"| {name} | {rate:,.0f} | {statistics.median(ratios):.1%} | {spread} | {mfu(bench, rate)} | {peak:.2f} |"
        )


def check_losses(losses: dict[str, list[float]], precision: str) -> None:
    """Refuse to compare programs that do not compute the same."""
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    for values in zip(*losses.values(), strict=True):
        if max(values) - min(values) > tolerance:
            raise SystemExit("the losses differ:\n" + "\n".join(f"{name}: {row}" for name, row in losses.items()))


def mfu(bench: Bench, rate: float) -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for device, flops in PEAK_FLOPS.items():
        if device in name and bench.options.precision == "bf16":
            return f"{rate * bench.flops_per_token / (flops * bench.ranks):.1%}"
    return ""


def checkpoints(bench: Bench) -> None:
    """What a checkpoint costs the training: the time of the steps after it, beyond that of as many others."""
    freq = bench.options.ckpt_steps

    def ours(asynchronous: bool) -> Launched:
        bench.clean()
        return bench.launch_ours(3 * freq, ckpt_freq=freq, resume="never", async_checkpoint=asynchronous)

    results = rounds(bench.options.rounds, {"sync": lambda: ours(False), "async": lambda: ours(True)})
    lost = {name: [lost_seconds(one, freq) for one in launched] for name, launched in results.items()}
    print("\n| checkpoint | seconds lost | of the synchronous one |")
    print("|---|---|---|")
    for name, values in lost.items():
        print(f"| {name} | {statistics.median(values):.2f} | {median_ratio(values, lost['sync']):.0%} |")


def lost_seconds(launched: Launched, freq: int) -> float:
    """Of each of the checkpoints after steps `freq` and `2 * freq`; the last step, with its validation, is left out."""
    lines = launched.lines
    usual = statistics.median(lines[step] - lines[step - 1] for step in range(4, freq + 1))
    last = 3 * freq - 1
    return (lines[last] - lines[freq] - (last - freq) * usual) / 2


def resume(bench: Bench) -> None:
    """From the launch to the first step after a checkpoint."""
    steps, saved = 1000, 4
    bench.clean()
    bench.launch_ours(steps, stop_at=saved, resume="never")
    bench.launch("trainer", steps, stop_at=saved + 1, save_freq=saved)
    results = rounds(
        bench.options.rounds,
        {
            "(a) ours": lambda: bench.launch_ours(steps, stop_at=1),
            "(c) Trainer": lambda: bench.launch("trainer", steps, stop_at=1, save_freq=10**6, resume=True),
        },
    )
    seconds = {name: [min(one.lines.values()) for one in launched] for name, launched in results.items()}
    print("\n| resume | seconds from launch to first step | of the Trainer |")
    print("|---|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.1f} | {median_ratio(values, seconds['(c) Trainer']):.0%} |")


def load(bench: Bench) -> None:
    """What the ranks read and hold until the weights are where they belong."""
    bench.clean()
    bench.write_params(1, resume="never")
    launched = {
        "(a) ours": bench.launch("stage", 0),
        "(c) Trainer": bench.launch("trainer", 0),
        "(c) Trainer, rank 0 reads for all": bench.launch("trainer", 0, main_loads=True),
    }
    print(
        "\n| load | MiB of weights read, each rank | MiB read beside them | peak MiB, each rank | of it for the load |"
    )
    print("|---|---|---|---|---|")
    for name, one in launched.items():
        ranks = sorted(one.loads, key=lambda values: values["rank"])
        columns = (
            ", ".join(f"{values[key]:.0f}" for values in ranks) for key in ("mapped_mib", "read_mib", "peak_mib")
        )
        growth = ", ".join(f"{values['peak_mib'] - values['before_mib']:.0f}" for values in ranks)
        print(f"| {name} | {' | '.join(columns)} | {growth} |")


def main() -> None:
    kinds = {"speed": speed, "checkpoints": checkpoints, "resume": resume, "load": load}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--params", choices=SHAPES, default="12M", help="size of the model")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a rank")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40, help="of a training whose speed is measured")
    parser.add_argument("--ckpt-steps", type=int, default=10, help="between two checkpoints, when they are measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, help="default: one a GPU, or 2")
    parser.add_argument("--megabytes", type=int, default=1, help="of text")
    parser.add_argument("--work", type=Path, help="a folder for temporary files, on a fast disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        bench = Bench(Path(folder), options)
        print(
            f"{bench.num_parameters:,} parameters, {bench.ranks} ranks, {bench.tokens_per_step} tokens a step, "
            f"{options.precision}, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        for kind in options.only:
            kinds[kind](bench)
            sys.stdout.flush()
        print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
