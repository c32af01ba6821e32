"""Speed of the training, compared with a bare FSDP2 loop, the Trainer and DDP.

    python -m benchmarks.train                     two ranks on the CPU, or all GPUs
    python -m benchmarks.train --params 1B --seq-length 4096 --precision bf16 --compile

All programs train the same Llama from the same weights on the same rows (the sources of the installed Python packages),
in the same order, with fused AdamW; if their losses differ, nothing is reported. They take turns of a few steps, and
each number is the median over the turns. The clock is that of this process, read when a line of the training arrives;
so the log, the data and the checks of the pipeline count as part of its steps. The Trainer of transformers needs
accelerate: `pip install .[bench]`.
"""

import argparse
import os
import signal
import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks.tables import markdown
from benchmarks.train.bench import Bench
from benchmarks.train.comparisons import FORMATS, speed
from benchmarks.train.job import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", choices=SHAPES, default="12M", help="size of the model")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4, help="rows per rank")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each program")
    parser.add_argument("--log-freq", type=int, default=5, help="steps per turn")
    parser.add_argument("--ranks", type=int, help="default: one per GPU, or 2")
    parser.add_argument("--threads", type=int, help="threads per rank; default: the cores divided by the ranks")
    parser.add_argument("--megabytes", type=int, default=1, help="size of the text")
    parser.add_argument("--work", type=Path, help="directory for temporary files, on a fast disk")
    args = parser.parse_args()
    if args.work and not args.work.is_dir():
        parser.error(f"--work: {args.work} is no directory: create it on a fast disk")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception: `closing` then ends the trainings, too
    with tempfile.TemporaryDirectory(dir=args.work) as work, closing(Bench(Path(work), args)) as bench:
        print(
            f"{bench.num_parameters:,} parameters, {bench.num_ranks} ranks, {bench.tokens_per_step} tokens per step, "
            f"{args.precision}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        print(f"\n{markdown('speed', speed(bench), FORMATS)}", end="", flush=True)
        print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
