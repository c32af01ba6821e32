"""How time and memory of the stages grow with the work.

    python -m benchmarks.growth                     # all
    python -m benchmarks.growth corpus --scale 0.1  # only this, with a tenth of the work

Each size is ten times the one before (ranks: twice), and each stage runs in processes of its own, as DVC starts it. The
exponent is that of the last two sizes, of which the fixed cost of starting Python and the libraries is the smallest
part: 1 means that the cost grows as the work does, and below 1 that a fixed cost is still a part of it. Memory is that
of a stage with all its processes, in which pages that they share count in each.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import yaml

from benchmarks import REPO, environment
from benchmarks.data.corpora import make_tree
from benchmarks.data.measuring import MB, resident_bytes
from benchmarks.data.stage_runs import write_params
from benchmarks.tables import markdown

TEXT = "The quick brown fox jumps over the lazy dog, and what it says has the number "
_MODEL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


class Cost(NamedTuple):
    """What one stage needed for one size of the work."""

    size: float
    seconds: float
    mib: float


Costs = dict[str, list[Cost]]
"""By stage, the smallest size first."""


def run(project: Path, stage: str, size: float) -> Cost:
    """Run a stage in its own process and measure it."""
    command = [sys.executable, "-m", f"stages.{stage}"]
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=project, env=environment(), stdout=output, stderr=output)
        while process.poll() is None:
            try:
                peak = max(peak, resident_bytes(psutil.Process(process.pid)))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.05)
        if process.wait():
            output.seek(0)
            raise SystemExit(f"{stage}: {output.read()}")
    return Cost(size, time.perf_counter() - start, peak / 2**20)


def make_project(work: Path, raw_dir: Path, model: dict[str, int] | None = None, **values: object) -> Path:
    """A project with a small model, or one of the given shape."""
    project = Path(tempfile.mkdtemp(dir=work))
    directory = project / "models/small"
    shutil.copytree(REPO / "models/tiny-llama", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **_MODEL, **(model or {})}))
    defaults = {
        "model_name": "models/small", "experiment_name": "growth", "max_steps": 10, "eval_rows": 2, "warmup_steps": 1,
    }  # fmt: skip
    write_params(project, raw_dir, 2, **{**defaults, **values})
    return project


def write_text(target: Path, megabytes: float) -> None:
    """Write JSON Lines with documents of about 3 000 characters, all of them different."""
    target.mkdir()
    with (target / "all.jsonl").open("w") as file:
        for number in range(math.ceil(megabytes * MB / 3000)):
            file.write(json.dumps({"id": number, "text": (TEXT + f"{number}. ") * 37}) + "\n")


def corpus(work: Path, scale: float) -> Costs:
    """Megabytes of JSON Lines."""
    costs: Costs = {}
    for megabytes in (1 * scale, 10 * scale, 100 * scale):
        raw = work / f"corpus-{megabytes}"
        write_text(raw, megabytes)
        project = make_project(work, raw, records=[{"files": "**", "text": "$.text"}])
        run(project, "download", 1)
        for stage in ("organize", "extract", "deduplicate", "pack", "plan"):
            costs.setdefault(stage, []).append(run(project, stage, megabytes))
        shutil.rmtree(raw)
        shutil.rmtree(project)
    return costs


def files(work: Path, scale: float) -> Costs:
    """Files of a hundred bytes."""
    costs: Costs = {}
    for number in (round(1_000 * scale), round(10_000 * scale), round(100_000 * scale)):
        raw = work / f"files-{number}"
        raw.mkdir()
        make_tree(raw, number)
        project = make_project(work, raw)
        for stage in ("organize", "extract"):
            costs.setdefault(stage, []).append(run(project, stage, number))
        shutil.rmtree(raw)
        shutil.rmtree(project)
    return costs


def prepared(work: Path, scale: float, model: dict[str, int] | None = None, **values: object) -> Path:
    """A project with tokens, so that training can start."""
    raw = Path(tempfile.mkdtemp(dir=work)) / "raw"
    write_text(raw, max(0.5, 2 * scale))
    project = make_project(work, raw, model, num_splits=4, **values)
    for stage in ("download", "organize", "extract", "deduplicate", "pack"):
        run(project, stage, 1)
    return project


def set_runtime(project: Path, **values: object) -> None:
    """Change values of the section `runtime`."""
    params = yaml.safe_load((project / "params.yaml").read_text())
    params["runtime"] |= values
    (project / "params.yaml").write_text(yaml.safe_dump(params))


def ranks(work: Path, scale: float) -> Costs:
    """Ranks on this machine, with the same rows in all; time beyond its cores is that of the cores."""
    project = prepared(work, scale, max_steps=max(2, round(20 * scale)))
    found = []
    for number in (1, 2, 4):
        set_runtime(project, nproc_per_node=number, resume="never")
        found.append(run(project, "launch", number))
    return {"train": found}


def parameters(work: Path, scale: float) -> Costs:
    """Millions of parameters: the training of four steps with a checkpoint, and its export."""
    costs: Costs = {}
    for hidden, layers in ((128, 2), (384, 4), (1024, 8)):
        width = round(hidden * math.sqrt(scale) / 64) * 64 or 64
        model = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": 64,
                 "num_attention_heads": max(1, width // 64), "num_key_value_heads": max(1, width // 64)}  # fmt: skip
        project = prepared(work, 0, model, max_steps=4, seq_length=64)
        millions = json.loads((project / "data/model.json").read_text())["num_parameters"] / 1e6
        for name, stage in (("train", "launch"), ("consolidate", "consolidate")):
            costs.setdefault(name, []).append(run(project, stage, millions))
        shutil.rmtree(project)
    return costs


def checkpoints(work: Path, scale: float) -> Costs:
    """Checkpoints that a finished run has kept: a launch that finds nothing to do, and one that resumes."""
    costs: Costs = {}
    for number in (max(2, round(5 * scale)), max(4, round(50 * scale))):
        project = prepared(work, 0, max_steps=number, seq_length=64)
        set_runtime(project, ckpt_freq=1, keep_checkpoints=number, nproc_per_node=1)
        run(project, "launch", number)
        costs.setdefault("a finished run", []).append(run(project, "launch", number))
        newest = sorted((project / "outputs/growth/checkpoints").glob("*/step-*"))[-1]
        shutil.rmtree(newest)
        costs.setdefault("its last step", []).append(run(project, "launch", number))
        shutil.rmtree(project)
    return costs


MEASUREMENTS: dict[str, Callable[[Path, float], Costs]] = {
    function.__name__: function for function in (corpus, files, ranks, parameters, checkpoints)
}


def exponent(first: float, last: float, ratio: float) -> float:
    """How a cost grows with the size: last / first = ratio ** exponent."""
    return math.log(last / first) / math.log(ratio)


def table(name: str, costs: Costs) -> str:
    """The costs of each stage at each size, with the exponents of the last two."""
    rows: dict[str, dict[str, float | None]] = {}
    formats = {}
    for stage, found in costs.items():
        cells: dict[str, float | None] = {}
        for cost in found:
            for unit, value in (("s", cost.seconds), ("MiB", cost.mib)):
                title = f"{cost.size:.3g}: {unit}"
                cells[title], formats[title] = value, "{:.1f}" if unit == "s" else "{:.0f}"
        before, last = found[-2:]
        ratio = last.size / before.size
        cells["exponent of time"] = exponent(before.seconds, last.seconds, ratio)
        cells["exponent of memory"] = exponent(before.mib, last.mib, ratio)
        rows[stage] = cells
    formats |= {"exponent of time": "{:.2f}", "exponent of memory": "{:.2f}"}
    return markdown(name, rows, formats)


def extrapolate(costs: Costs, size: float, what: str) -> Iterator[str]:
    """Lines about a size that was not measured, by the slope between the last two that were."""
    for stage, (*_, before, last) in costs.items():
        slope = (last.seconds - before.seconds) / (last.size - before.size)
        yield f"{stage}: {what} need {(last.seconds + slope * (size - last.size)) / 3600:.1f} h by this slope"


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}; all, if none is named")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes (default: 1)")
    parser.add_argument("--work", type=Path, help="directory for temporary files, on a fast disk")
    args = parser.parse_args()
    if unknown := {*args.names} - {*MEASUREMENTS}:
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    for name in args.names or MEASUREMENTS:
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            costs = MEASUREMENTS[name](Path(work).resolve(), args.scale)  # stages run elsewhere
        print(f"{MEASUREMENTS[name].__doc__}\n\n{table(name, costs)}", flush=True)
        if name == "corpus":
            print("\n".join(extrapolate({k: v for k, v in costs.items() if k != "plan"}, 1e5, "100 GB")) + "\n")
        if name == "files":
            print("\n".join(extrapolate(costs, 1e8, "100 million files")) + "\n")


if __name__ == "__main__":
    main()
