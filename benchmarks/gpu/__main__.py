"""All that only GPUs can show, in one command: tests, speed, memory, checkpoints, resume.

    make gpu                                                  all GPUs of this machine, at most 25 minutes
    python -m benchmarks.gpu --only tests steps
    python -m benchmarks.gpu --ranks 1 --params 1M --save-params 1M --seq-length 64 --precision fp32    tries it on CPUs

tests        tests/gpu
steps        a step of the training on rows of documents: each attention with each loss, with activation checkpointing,
             fp16, fp8, CPU offload, deterministic, compiled or not
predicted    the peak of memory that `plan` predicts for those that are not compiled
programs     the pipeline, a bare FSDP2 loop and the Trainer of transformers, on the same rows, without a document mask
checkpoints  what a synchronous and an asynchronous save cost, with a model of 400 million parameters
resume       a training that is killed and resumed, compared with one that is not, deterministic or not, with this model
matrix       a step with each attention x loss x compiled or not x batch size

Each result is stored in --work at once. If a run ends before all is measured, the next one with the same arguments
continues, unless the code or the device has changed. The tables are in table.md in that directory. The command needs no
network and installs nothing: it uses the Python that runs it. Models and checkpoints need 40 GB of disk.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import transformers

from benchmarks import REPO
from benchmarks.gpu.report import FORMATS, report
from benchmarks.gpu.results import Results, Row
from benchmarks.gpu.settings import best_setting, main_settings, matrix, name_of, predictable
from benchmarks.gpu.steps import RESULT
from benchmarks.train.bench import SHAPES, TORCHRUN, Bench
from benchmarks.train.comparisons import BARE, OURS, TRAINER, checkpoints, speed

SETTING_LIMIT = 240
"""Seconds after which a setting of `steps` counts as failed."""
STEPS, SAVED_EVERY, KILLED_AT = 16, 4, 10
"""Steps of the trainings that `resume` compares."""


class OutOfTime(Exception):
    """`--minutes` have passed."""


class Session:
    """One run of the command: what is to be measured, and how."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.num_ranks: int = args.ranks or torch.cuda.device_count()
        main, others = (make(args.batch_sizes, args.precision) for make in (main_settings, matrix))
        self.settings = main | others
        names = {
            "tests": ["tests/gpu"],
            "steps": [*main],
            "predicted": [*predictable(main)],
            "programs": [OURS, BARE, TRAINER],
            "checkpoints": ["none", "synchronous", "asynchronous"],
            "resume": ["deterministic", "not deterministic"],
            "matrix": [name for name in others if name not in main],
        }
        self.planned = {part: names[part][: args.first] for part in args.only}
        args.work.mkdir(parents=True, exist_ok=True)
        self.results = Results(args.work / "results.json", about(self))

    def run(self) -> None:
        """Measure what is missing, part after part; a part that fails is an error in the table."""
        for part in self.planned:
            if missing := self.results.missing(part, self.planned[part]):
                try:
                    getattr(self, part)(missing)
                except SystemExit as error:
                    for name in self.results.missing(part, missing):
                        self.add(part, name, {"error": reason(str(error))})

    def add(self, part: str, name: str, result: Row) -> None:
        """Store and print a result."""
        self.results.add(part, name, result)
        values = {column: value for column in FORMATS if (value := result.get(column)) is not None}
        numbers = ", ".join(f"{column} {FORMATS[column].format(value)}" for column, value in values.items())
        print(f"{part}: {name}: {result.get('error') or numbers}", flush=True)

    def tests(self, missing: list[str]) -> None:
        """Run tests/gpu, several at a time: their models are small."""
        report, log = (self.args.work.resolve() / name for name in ("tests.xml", "tests.log"))
        report.unlink(missing_ok=True)  # of a run before
        num_processes = str(min(8, max(1, len(os.sched_getaffinity(0)) // 2)))
        command = ["-m", "pytest", *missing, "-n", num_processes, "-p", "no:cacheprovider", f"--junitxml={report}"]
        with log.open("w") as file, started(command, REPO, dict(os.environ), stdout=file, stderr=file) as process:
            process.wait()
        if not report.exists():
            raise SystemExit(f"the tests did not start: see {log}")
        [suite] = ElementTree.parse(report).getroot().iter("testsuite")
        total, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
        failed += int(suite.get("errors", 0))
        result: Row = {"passed": total - failed - skipped, "skipped": skipped}
        if failed:  # an error, so that the next run repeats them
            names = [
                str(case.get("name"))
                for case in suite.iter("testcase")
                if case.find("failure") is not None or case.find("error") is not None
            ]
            result = {"error": f"{failed} of {total} failed, see {log}: {', '.join(names)}"}
        self.add("tests", missing[0], result)

    def steps(self, missing: list[str], part: str = "steps") -> None:
        """Time steps with each setting, in a process of all those that may share one."""
        torchrun = [*TORCHRUN, f"--nproc-per-node={self.num_ranks}"]
        for is_deterministic in (False, True):  # of a process, not of a step
            names = [name for name in missing if self.settings[name].get("deterministic", False) == is_deterministic]
            self.run_settings(part, [*torchrun, "-m", "benchmarks.gpu.steps", "measure"], names)

    def matrix(self, missing: list[str]) -> None:
        """The same with those settings that are not in `steps`."""
        self.steps(missing, "matrix")

    def predicted(self, missing: list[str]) -> None:
        """Predict the memory of each setting, without the GPU."""
        self.run_settings("predicted", ["-m", "benchmarks.gpu.steps", "predict"], missing)

    def run_settings(self, part: str, command: list[str], names: list[str]) -> None:
        """Start a process for some settings, and another one for the rest where it fails at one of them."""
        with closing(self.bench(self.args.params)) as bench:
            bench.write_params()
            job = bench.project / "settings.json"
            while names:
                settings = {name: self.settings[name] for name in names}
                job.write_text(json.dumps({
                    "settings": settings, "num_ranks": self.num_ranks, "seq_length": self.args.seq_length,
                    "steps": self.args.steps,
                }))  # fmt: skip
                log = job.with_suffix(".log")
                with (
                    log.open("w") as errors,
                    started([*command, str(job)], bench.project, bench.environment, stdout=subprocess.PIPE,
                            stderr=errors, text=True) as process,
                ):  # fmt: skip
                    for result in results_of(process):
                        self.add(part, result.pop("name"), result)
                    status = process.wait()
                names = self.results.missing(part, names)
                if names and status == 0:
                    raise SystemExit(f"{' '.join(command)} has measured nothing: see {log}")
                if names:
                    is_killed = status == -signal.SIGKILL
                    error = f"killed after {SETTING_LIMIT} s" if is_killed else reason(log.read_text(errors="replace"))
                    self.add(part, names[0], {"error": error})
                    names = names[1:]

    def programs(self, missing: list[str]) -> None:
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
            bench.remove_checkpoints()

    def checkpoints(self, missing: list[str]) -> None:
        """What saving costs."""
        with closing(self.bench(self.args.save_params)) as bench:
            for name, row in checkpoints(bench).items():
                self.add("checkpoints", name, row)
            bench.remove_checkpoints()

    def resume(self, missing: list[str]) -> None:
        """Compare a training that was killed and resumed with one that was not."""
        for name in missing:
            with closing(self.bench(self.args.save_params)) as bench:
                params = {"deterministic": name == "deterministic", "document_mask": True}
                bench.remove_checkpoints()
                bench.start_ours(STEPS, params=params).finish()
                expected = bench.result_digest(), bench.history_losses(1)
                bench.remove_checkpoints()
                training = bench.start_ours(STEPS, params=params, ckpt_freq=SAVED_EVERY)
                training.until(KILLED_AT)
                training.kill()
                resumed = bench.start_ours(STEPS, params=params, ckpt_freq=SAVED_EVERY)
                resumed.finish()
                found = bench.result_digest(), bench.history_losses(1)
                bench.remove_checkpoints()
            if min(resumed.lines) == 1:
                self.add("resume", name, {"error": f"the training that was killed at step {KILLED_AT} started over"})
                continue
            difference = max(abs(a - b) for a, b in zip(found[1], expected[1], strict=True))
            self.add("resume", name, {"same bits": float(found[0] == expected[0]), "losses differ by": difference})

    def bench(self, shape: str) -> Bench:
        """The project with the model of a shape, which is made where there is none."""
        args = self.args
        directory = args.work / f"{shape}-{args.seq_length}-{args.megabytes}"
        directory.mkdir(exist_ok=True)
        return Bench(directory, argparse.Namespace(
            params=shape, seq_length=args.seq_length, batch_size=max(args.batch_sizes), precision=args.precision,
            compile=not args.eager, rounds=4, log_freq=5, ckpt_freq=args.ckpt_freq, ranks=self.num_ranks, threads=None,
            megabytes=args.megabytes,
        ))  # fmt: skip


def about(session: Session) -> dict[str, Any]:
    """What the results depend on: others are thrown away."""
    args, device = session.args, "CPU"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        device = f"{session.num_ranks} x {torch.cuda.get_device_name()}, {memory:.1f} GiB"
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            device += f", driver {subprocess.check_output(query, text=True).split()[0]}"
    digest = hashlib.sha256()
    sources = (path for name in ("benchmarks", "stages", "tests") for path in (REPO / name).rglob("*.py"))
    for path in [REPO / "params.yaml", *sorted(sources)]:
        digest.update(path.read_bytes())
    # Those that say where, how long and what to measure change no result.
    values = {name: value for name, value in vars(args).items() if name not in ("work", "minutes", "only", "first")}
    return {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torchao": version("torchao") if importlib.util.find_spec("torchao") else "not installed, so no fp8",
        "arguments": ", ".join(f"{name} {value}" for name, value in values.items()),
        "best": name_of(best_setting(args.batch_sizes, args.precision), args.precision),
        "code": digest.hexdigest(),
    }


@contextmanager
def started(
    command: list[str], directory: Path, environment: dict[str, str], **options: Any
) -> "Iterator[subprocess.Popen[Any]]":
    """Start Python in a process group of its own; nothing of it is left afterwards."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=directory, env=environment, start_new_session=True, **options
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def results_of(process: "subprocess.Popen[str]") -> Iterator[Row]:
    """The results that a process prints; it is killed if it prints none for `SETTING_LIMIT` seconds."""
    assert process.stdout
    while True:
        timer = threading.Timer(SETTING_LIMIT, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            line = next((line for line in process.stdout if line.startswith(RESULT)), None)
        finally:
            timer.cancel()
        if line is None:
            return
        yield json.loads(line.removeprefix(RESULT))


def reason(log: str) -> str:
    """The first error in a log, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?(error:|[\w.]+(Error|Exception)\b)", line)]
    return [*errors, *lines[-1:], "it ended without a message"][0][:300]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("tests", "steps", "predicted", "programs", "checkpoints", "resume", "matrix")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--minutes", type=float, default=25, help="stop after so many; the next run continues")
    parser.add_argument("--work", type=Path, default=REPO / "outputs/.gpu", help="directory for models and results")
    parser.add_argument("--params", choices=SHAPES, default="1B", help="size of the model")
    parser.add_argument("--save-params", choices=SHAPES, default="400M", help="size for `checkpoints` and `resume`")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2, 8], help="rows per GPU")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--eager", action="store_true", help="do not compile in the parts after `predicted`")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each setting")
    parser.add_argument("--ckpt-freq", type=int, default=10, help="steps between two checkpoints, for `checkpoints`")
    parser.add_argument("--first", type=int, help="measure only so many things of each part")
    parser.add_argument("--ranks", type=int, help="default: one per GPU; to be given on CPUs")
    parser.add_argument("--megabytes", type=int, default=4, help="size of the text")
    args = parser.parse_args()
    if not torch.cuda.is_available() and args.ranks is None:
        print(
            f"error: torch {torch.__version__} cannot use a GPU here; --help shows how to try it on CPUs",
            file=sys.stderr,
        )
        sys.exit(2)

    def out_of_time(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception: what was started is ended, too
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
    session, table = Session(args), args.work / "table.md"
    try:
        session.run()
    except OutOfTime:
        print(f"{args.minutes:g} minutes have passed: run the same command again to measure the rest", flush=True)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to measure the rest", flush=True)
        sys.exit(130)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        table.write_text(report(session.results, session.planned))
    print(f"\n{table.read_text()}\nwritten to {table}")
    if session.results.errors():
        sys.exit(1)


if __name__ == "__main__":
    main()
