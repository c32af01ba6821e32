"""All that only GPUs can show, in one command: tests, speed, memory, checkpoints, resume.

    make gpu                                                  all GPUs of this machine, at most 25 minutes
    python -m benchmarks.gpu --only tests steps
    python -m benchmarks.gpu --ranks 1 --params 1M --save-params 1M --seq-length 64 --precision fp32    tries it on CPUs

smoke        device, allocator, communication and a step, each alone; a minute, with torch and transformers alone
steps        a step of the training on rows of documents: each attention with each loss, with activation checkpointing,
             fp16, fp8, CPU offload, deterministic, compiled or not
resume       a training that is killed and resumed, compared with one that is not, deterministic or not
large        the same steps with a model of 8 billion parameters whose activations are computed again
saves        what the training waits for at a first and a second asynchronous save of 4 GB, and what a save takes
tests        tests/gpu, for a third of the time at most
programs     the pipeline, a bare FSDP2 loop and the Trainer of transformers, on the same rows, without a document mask
predicted    the peak of memory that `plan` predicts for those of `steps` that are not compiled; any machine measures it

The most important numbers of each part come first, because a machine may be lent for minutes. Each result is stored at
once. If a run ends before all is measured, the next one continues: first with what was never measured, then with what
failed. Results of other code, devices or versions stay, and are marked in the table; --fresh throws away those of the
parts that are measured. results.json, table.md and log.txt are all that is to be kept of a machine: with a copy of them
as --results, another one continues. The command needs no network and installs nothing: it uses the Python that runs it,
and what a missing package prevents is an error in the table. `make gpu-wheels` downloads what GPU machines often lack.
Models and checkpoints need 40 GB of disk. At home, without a GPU, the memory of a measured one is predicted by

    python -m benchmarks.gpu --only predicted --ranks 1 --gpu-memory-gb 139.8 --results DIRECTORY
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import REPO, environment
from benchmarks.gpu.report import FORMATS, report
from benchmarks.gpu.results import RESULT, Results, Row, Stamp, replace
from benchmarks.gpu.settings import (
    PARTS,
    SAVES,
    Settings,
    best_setting,
    large_settings,
    main_settings,
    name_of,
    predictable,
)
from benchmarks.gpu.smoke import CHECKS
from benchmarks.train.comparisons import BARE, OURS, TRAINER, speed
from benchmarks.train.job import SHAPES, TORCHRUN, llama
from stages.base import process

if TYPE_CHECKING:  # pydantic and pyarrow may be missing
    from benchmarks.train.bench import Bench

TESTS = "tests/gpu"
PYTEST = ["-m", "pytest", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
"""Without what pyproject.toml asks for: where a plugin of pytest is missing, it would be an error."""
FIRST = (
    ("smoke", None), ("steps", 2), ("resume", 1), ("large", 3), ("steps", 4), ("saves", None), ("tests", None),
    ("programs", None),
)  # fmt: skip
"""What comes first, with how much of it: of `steps` the best setting, compiled and not, and then without documents and
deterministic. The rest follows in the order of `PARTS`."""
SETTING_LIMIT, SMOKE_LIMIT, LARGE_LIMIT = 150, 90, 200
"""Seconds after which a setting of `steps`, of `smoke` and `saves`, or of `large` counts as failed."""
SAVED_BYTES = 4 * 10**9
"""What `saves` saves, with a GPU; without one a hundredth."""
TESTS_SHARE = 1 / 3
"""Of --minutes, after which the tests end."""
STEPS, SAVED_EVERY, KILLED_AT = 16, 4, 10
"""Steps of the trainings that `resume` compares."""


class OutOfTime(Exception):
    """`--minutes` have passed."""


class Session:
    """One run of the command: what is to be measured, and how."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.num_ranks: int = args.ranks or torch.cuda.device_count()
        main, large = main_settings(args.batch_sizes, args.precision), large_settings(args.precision)
        self.settings: Settings = main | large
        names = {
            "smoke": [*CHECKS],
            "steps": [*main],
            "resume": ["deterministic", "not deterministic"],
            "large": [*large],
            "saves": [*SAVES],
            "tests": [TESTS],  # listed when they are run: that takes ten seconds
            "programs": [OURS, BARE, TRAINER],
            "predicted": [*predictable(main)],
        }
        self.planned = {part: names[part][: args.first] for part in PARTS if part in args.only}
        for directory in (args.work, args.results):
            directory.mkdir(parents=True, exist_ok=True)
        self.log: Path = args.results.resolve() / "log.txt"
        fresh = args.only if args.fresh else ()
        self.results = Results(args.results / "results.json", about(args), stamp(self.num_ranks), fresh)

    def run(self) -> None:
        """Measure what is missing, and then what has failed before."""
        failed = {part: self.results.failed(part, names) for part, names in self.planned.items()}
        if "tests" in failed:
            failed["tests"] = self.results.failed("tests", self.results.parts.get("tests", {}))
        for part, limit in FIRST:
            names = self.names(part)[:limit]
            missing = {*self.results.missing(part, names), *self.results.failed(part, names, of_other_code=True)}
            self.measure(part, [name for name in names if name in missing])
        for part in self.planned:
            self.measure(part, self.results.missing(part, self.names(part)))
        for part, names in failed.items():
            self.measure(part, self.results.failed(part, names))

    def names(self, part: str) -> list[str]:
        """What is to be measured of a part."""
        if self.planned.get(part) == [TESTS]:
            self.planned[part] = collect()[: self.args.first]
        return self.planned.get(part, [])

    def measure(self, part: str, names: list[str]) -> None:
        """Measure some things of a part; if it fails, those without a result have an error."""
        if not names:
            return
        with self.log.open("a") as log:
            log.write(f"\n== {part}: {', '.join(names)}\n")
        try:
            getattr(self, part)(names)
        except (ImportError, SystemExit) as error:
            with self.log.open("a") as log:
                log.write(f"{error}\n")
            for name in self.results.missing(part, names):
                self.add(part, name, {"error": reason(str(error))})

    def add(self, part: str, name: str, result: Row) -> None:
        """Store and print a result."""
        settings = {"settings": self.settings[name]} if name in self.settings else {}
        self.results.add(part, name, {**result, **settings})
        self.write_table()
        values = {column: value for column in FORMATS if (value := result.get(column)) is not None}
        numbers = ", ".join(f"{column} {FORMATS[column].format(value)}" for column, value in values.items())
        print(f"{part}: {name}: {result.get('error') or numbers}", flush=True)

    def write_table(self) -> None:
        replace(self.args.results / "table.md", report(self.results, self.planned))

    def smoke(self, names: list[str]) -> None:
        """Check the machine, with as few packages as possible."""
        self.run_module("smoke", names)

    def saves(self, names: list[str]) -> None:
        """Time the two halves of asynchronous saves."""
        self.run_module("saves", [*SAVES])

    def run_module(self, part: str, names: list[str]) -> None:
        """Run the module of a part in each rank, without a project."""
        command = [*self.torchrun(), "-m", f"benchmarks.gpu.{part}"]
        self.run_settings(part, command, {name: {} for name in names}, self.args.work, environment(), SMOKE_LIMIT)

    def tests(self, names: list[str]) -> None:
        """Run tests, several at a time where that is possible: their models are small."""
        command = [*PYTEST, "-p", "benchmarks.gpu.outcomes", "--capture=sys", *names]
        if importlib.util.find_spec("xdist"):
            # Their processes import torch for most of the time, and their kernels are tiny.
            command += ["-n", str(max(1, min(14, len(os.sched_getaffinity(0)) - 2))), "--dist", "worksteal"]
        # PYTEST_ADDOPTS may have other options, and what pytest-xdist sets is for a test that calls this.
        variables = {name: value for name, value in environment().items() if not name.startswith("PYTEST_")}
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # not one for each core, in each training
        seconds, unfinished = 60 * self.args.minutes * TESTS_SHARE, set[str]()
        start = self.log.stat().st_size
        with (
            self.log.open("a") as log,
            started(command, REPO, variables, stdout=subprocess.PIPE, stderr=log, text=True) as child,
            killed_after(child, seconds),
        ):
            for line in child.stdout or ():
                if not line.startswith(RESULT):
                    log.write(line)
                    continue
                result = json.loads(line.removeprefix(RESULT))
                name = result.pop("name")
                if "started" in result:
                    unfinished.add(name)
                else:
                    unfinished.discard(name)
                    self.add("tests", name, result)
            status = child.wait()
        if status == -signal.SIGKILL:  # or this run would go on with those that have not begun; the next one does
            unfinished |= {*self.results.missing("tests", names)}
        for name in unfinished:
            self.add("tests", name, {"error": f"it had not ended when the tests ended, after {seconds:.0f} s at most"})
        if status not in (0, 1, -signal.SIGKILL):  # 1: tests have failed
            raise SystemExit(reason(self.log_from(start)))

    def steps(self, names: list[str], part: str = "steps") -> None:
        """Time steps with each setting, in a process of all those that may share one."""
        shape = self.args.large_params if part == "large" else self.args.params
        command = [*self.torchrun(), "-m", "benchmarks.gpu.steps", "measure"]
        for is_deterministic in (False, True):  # of a process, not of a step
            chosen = [name for name in names if self.settings[name].get("deterministic", False) == is_deterministic]
            self.run_in_project(part, command, chosen, shape)

    def large(self, names: list[str]) -> None:
        """The same with a model that may be too large for this machine."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **llama(self.args.large_params, 1)))
        needed = 16 * sum(param.numel() for param in model.parameters())
        if torch.cuda.is_available() and needed > self.num_ranks * torch.cuda.mem_get_info()[1]:
            raise SystemExit(f"weights, gradients and AdamW need {needed / 2**30:.0f} GiB: more than these GPUs have")
        self.steps(names, "large")

    def predicted(self, names: list[str]) -> None:
        """Predict the memory of each setting, which needs no GPU."""
        self.run_in_project("predicted", ["-m", "benchmarks.gpu.steps", "predict"], names, self.args.params)

    def torchrun(self) -> list[str]:
        """Arguments of Python that start a module in each rank."""
        return [*TORCHRUN, f"--nproc-per-node={self.num_ranks}"]

    def run_in_project(self, part: str, command: list[str], names: list[str], shape: str) -> None:
        """`run_settings` in the project of a model."""
        if names:
            with closing(self.bench(shape)) as bench:
                bench.write_params()
                settings = {name: self.settings[name] for name in names}
                limit = LARGE_LIMIT if part == "large" else SETTING_LIMIT
                self.run_settings(part, command, settings, bench.project, bench.environment, limit)

    def run_settings(
        self, part: str, command: list[str], settings: Settings, directory: Path, variables: dict[str, str], limit: int
    ) -> None:
        """Start a process for some settings, and another one for the rest where it fails at one of them."""
        args, job = self.args, directory.resolve() / "settings.json"
        while settings:
            job.write_text(json.dumps({
                "settings": settings, "num_ranks": self.num_ranks, "seq_length": args.seq_length, "steps": args.steps,
                "shape": args.params, "batch_size": max(args.batch_sizes), "precision": args.precision,
                "gpu_memory": args.gpu_memory_gb and int(args.gpu_memory_gb * 2**30),
                "saved_bytes": SAVED_BYTES // (1 if torch.cuda.is_available() else 100),
            }))  # fmt: skip
            start = self.log.stat().st_size
            with (
                self.log.open("a") as errors,
                started([*command, str(job)], directory, variables, stdout=subprocess.PIPE, stderr=errors,
                        text=True) as child,
            ):  # fmt: skip
                for result in results_of(child, limit):
                    name = result.pop("name")
                    self.add(part, name, result)
                    settings.pop(name, None)  # one that was started again may print others, too
                status = child.wait()
            if settings and status == 0:
                raise SystemExit(f"{' '.join(command)} has measured nothing: see {self.log}")
            if settings:
                name = next(iter(settings))
                is_killed = status == -signal.SIGKILL
                error = f"killed after {limit} s" if is_killed else reason(self.log_from(start))
                self.add(part, name, {"error": error})
                del settings[name]

    def log_from(self, start: int) -> str:
        """What was written to the log since it had `start` bytes."""
        return self.log.read_bytes()[start:].decode(errors="replace")

    def programs(self, names: list[str]) -> None:
        """Compare the pipeline with other programs; all of them again, because they are compared within a run."""
        programs = [OURS, BARE, TRAINER]
        if importlib.util.find_spec("accelerate") is None:
            self.add("programs", programs.pop(), {"error": "accelerate is not installed: run `pip install .[bench]`"})
        with closing(self.bench(self.args.params)) as bench:
            errors: dict[str, str] = {}
            for name, row in speed(bench, programs, errors).items():
                self.add("programs", name, row)
            for name, error in errors.items():
                self.add("programs", name, {"error": reason(error)})

    def resume(self, names: list[str]) -> None:
        """Compare a training that was killed and resumed with one that was not."""
        for name in names:
            with closing(self.bench(self.args.save_params)) as bench:
                params = {"deterministic": name == "deterministic", "document_mask": True}
                bench.remove_checkpoints()
                bench.start_ours(STEPS, params=params).finish()
                expected = bench.result_digest(), bench.history_losses()
                bench.remove_checkpoints()
                training = bench.start_ours(STEPS, params=params, ckpt_freq=SAVED_EVERY)
                training.until(KILLED_AT)
                training.kill()
                resumed = bench.start_ours(STEPS, params=params, ckpt_freq=SAVED_EVERY)
                resumed.finish()
                found = bench.result_digest(), bench.history_losses()
                bench.remove_checkpoints()
            if min(resumed.lines) == 1:
                self.add("resume", name, {"error": f"the training that was killed at step {KILLED_AT} started over"})
                continue
            difference = max(abs(a - b) for a, b in zip(found[1], expected[1], strict=True))
            self.add("resume", name, {"same bits": float(found[0] == expected[0]), "losses differ by": difference})

    def bench(self, shape: str) -> "Bench":
        """The project with the model of a shape, which is made where there is none."""
        from benchmarks.train.bench import Bench

        args = self.args
        directory = args.work / f"{shape}-{args.seq_length}-{args.megabytes}"
        directory.mkdir(exist_ok=True)
        bench = Bench(directory, argparse.Namespace(
            params=shape, seq_length=args.seq_length, batch_size=max(args.batch_sizes), precision=args.precision,
            compile=not args.eager, rounds=4, log_freq=5, ranks=self.num_ranks, threads=None, megabytes=args.megabytes,
        ), has_weights=shape in (args.params, args.save_params))  # fmt: skip
        bench.remove_checkpoints()  # of a run that was ended
        return bench


def about(args: argparse.Namespace) -> dict[str, str]:
    """What all results have in common."""
    names = ("params", "save_params", "large_params", "seq_length", "batch_sizes", "precision", "eager", "steps")
    return {
        "model": json.dumps(llama(args.params, args.seq_length)),
        # ckpt_freq was an argument once: so results of earlier machines are continued.
        "arguments": ", ".join(
            [*(f"{name} {getattr(args, name)}" for name in names), "ckpt_freq 10", f"megabytes {args.megabytes}"]
        ),
        "best": name_of(best_setting(args.batch_sizes, args.precision), args.precision),
    }


def stamp(num_ranks: int) -> Stamp:
    """What measures: results with another stamp are marked in the table."""
    device, driver = f"CPU, ranks: {num_ranks}", "none"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        device, driver = f"{num_ranks} x {torch.cuda.get_device_name()}, {memory:.1f} GiB", "unknown"
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(query, text=True, capture_output=True).stdout.partition("\n")[0]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPO, text=True, capture_output=True).stdout
    digest = hashlib.sha256()
    sources = (path for name in ("benchmarks", "stages", "tests") for path in (REPO / name).rglob("*.py"))
    for path in [REPO / "params.yaml", *sorted(sources)]:
        digest.update(path.read_bytes())
    return {
        "device": device,
        "driver": driver,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "torchao": version("torchao") if importlib.util.find_spec("torchao") else "not installed, so no fp8",
        "code": digest.hexdigest()[:12],
        "commit": commit.strip() or "unknown",
    }


def collect() -> list[str]:
    """The names of all tests in tests/gpu; where they cannot be listed, the directory alone."""
    command = [sys.executable, *PYTEST, "--collect-only", "-q", TESTS]
    found = subprocess.run(command, cwd=REPO, env=environment(), text=True, capture_output=True)
    return [line for line in found.stdout.splitlines() if line.startswith(TESTS)] or [TESTS]


@contextmanager
def started(
    command: list[str], directory: Path, variables: dict[str, str], **options: Any
) -> "Iterator[subprocess.Popen[str]]":
    """Start Python in a process group of its own; nothing of it is left afterwards, however this process ends."""
    child = subprocess.Popen(
        [sys.executable, *command], cwd=directory, env=variables, start_new_session=True,
        preexec_fn=partial(process.die_with_parent, signal.SIGKILL, os.getpid()), **options,
    )  # fmt: skip
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextmanager
def killed_after(child: "subprocess.Popen[str]", seconds: float) -> Iterator[None]:
    """Kill a process group unless the block ends before."""
    timer = threading.Timer(seconds, os.killpg, (child.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def results_of(child: "subprocess.Popen[str]", limit: int) -> Iterator[Row]:
    """The results that a process prints; it is killed if it prints none for `limit` seconds."""
    assert child.stdout
    while True:
        with killed_after(child, limit):
            line = next((line for line in child.stdout if line.startswith(RESULT)), None)
        if line is None:
            return
        yield json.loads(line.removeprefix(RESULT))


def reason(log: str) -> str:
    """The first error in a log, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *|E +)?(error:|[\w.]+(Error|Exception)(:|$))", line)]
    return [*errors, *lines[-1:], "it ended without a message"][0][:300]


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = made.add_argument
    option("--only", nargs="+", choices=PARTS, default=PARTS)
    option("--minutes", type=float, default=25, help="stop after so many; the next run continues")
    option("--work", type=Path, default=REPO / "outputs/.gpu", help="directory for models and checkpoints")
    option("--results", type=Path, help="directory for results, table and log; default: that of --work")
    option("--fresh", action="store_true", help="throw away the results of the parts that are measured")
    option("--params", choices=SHAPES, default="1B", help="size of the model")
    option("--save-params", choices=SHAPES, default="400M", help="size for `resume`")
    option("--large-params", choices=SHAPES, help="size for `large`; default: 8B, on CPUs that of --params")
    option("--seq-length", type=int, default=4096)
    option("--batch-sizes", type=int, nargs="+", default=[2, 8], help="rows per GPU")
    option("--precision", choices=("fp32", "bf16"), default="bf16")
    option("--eager", action="store_true", help="do not compile in `programs` and `resume`")
    option("--steps", type=int, default=6, help="timed steps of each setting")
    option("--first", type=int, help="measure only so many things of each part")
    option("--ranks", type=int, help="default: one per GPU; to be given on CPUs")
    option("--gpu-memory-gb", type=float, help="of the GPU for `predicted`, in GiB; default: of that here")
    option("--megabytes", type=int, default=4, help="size of the text")
    return made


def main() -> None:
    args = parser().parse_args()
    if not torch.cuda.is_available() and args.ranks is None:
        print(
            f"error: torch {torch.__version__} cannot use a GPU here; --help shows how to try it on CPUs",
            file=sys.stderr,
        )
        sys.exit(2)

    args.results = args.results or args.work
    if torch.cuda.is_available() and not args.gpu_memory_gb:
        args.gpu_memory_gb = torch.cuda.get_device_properties(0).total_memory / 2**30
    args.large_params = args.large_params or ("8B" if args.gpu_memory_gb else args.params)

    def out_of_time(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception: what was started is ended, too
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
    session = Session(args)
    try:
        session.run()
    except OutOfTime:
        print(f"{args.minutes:g} minutes have passed: run the same command again to measure the rest", flush=True)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to measure the rest", flush=True)
        sys.exit(130)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        session.write_table()
    table = args.results / "table.md"
    print(f"\n{table.read_text()}\nwritten to {table}")
    if session.results.errors():
        sys.exit(1)


if __name__ == "__main__":
    main()
