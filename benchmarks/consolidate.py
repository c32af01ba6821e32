"""From a sharded checkpoint to whole tensors: the writer of `consolidate`, compared with others and with `cp`.

    python -m benchmarks.consolidate --gigabytes 2 8 --rounds 3 --work DIR

It needs `pip install .[bench]`, three times the largest size on the disk of DIR, and once as memory. Four ranks save a
model of fp32 matrices of 64 MiB. Each program then makes whole tensors of it, in a process of its own, in turn; `cp`
copies the bytes of the checkpoint, and `sha256sum` hashes them. In addition to the others, `consolidate` hashes each
shard first, to compare it with the manifest, and computes the SHA-256 of each file and tensor. Each program finds what
it reads in the page cache, as far as it fits, and nothing else that is of this benchmark. Nothing is synced to the disk
in the time that is measured. The peak of memory is that of the process minus what it needed after its imports.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from benchmarks import tables
from stages.base import publish
from stages.export import mapped

NUM_RANKS = 4
MATRIX = (4096, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.consolidate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 16])
    parser.add_argument("--work", type=Path, required=True, help="an empty directory, for checkpoints and results")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # a program, in a process of its own
    args = parser.parse_args()
    if args.run:
        run(args.run[0], Path(args.run[1]), args.work)
        return
    for gigabytes in args.gigabytes:
        print(compare(gigabytes, args.rounds, args.workers, args.work), flush=True)


def compare(gigabytes: float, rounds: int, workers: list[int], work: Path) -> str:
    """A table of all programs, for a model of a size."""
    names = [f"matrix.{number}" for number in range(round(gigabytes * 1e9 / 4 / MATRIX[0] / MATRIX[1]))]
    checkpoint = work / "checkpoint"
    mp.spawn(save, (str(work / "store"), checkpoint, names), nprocs=NUM_RANKS)
    programs = ["cp", "sha256sum", *(f"ours, {count} workers, fp32" for count in workers)]
    programs += [f"ours, {workers[1]} workers, bf16", "dcp_to_torch_save", "accelerate merge-weights"]
    programs += [f"consolidate_safetensors_files, {count} threads" for count in workers[:2]]
    measured: dict[str, list[tuple[float, float]]] = {program: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            measured[program].append(measure(program, checkpoint, work))
    shutil.rmtree(checkpoint)
    (work / "store").unlink(missing_ok=True)
    rows = {
        program: {
            "seconds": statistics.median(seconds for seconds, _ in results),
            "fastest": min(seconds for seconds, _ in results),
            "MiB": max(mebibytes for _, mebibytes in results),
        }
        for program, results in measured.items()
    }
    formats = {"seconds": "{:.1f}", "fastest": "{:.1f}", "MiB": "{:.0f}"}
    return f"\n{len(names) * 64 / 1024:.2f} GiB in fp32\n\n" + tables.markdown("program", rows, formats)


def save(rank: int, store: str, checkpoint: Path, names: list[str]) -> None:
    """Save a model as `train` does, and as safetensors of each rank, as torch's own converter needs it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    generator = torch.Generator().manual_seed(rank)
    rows = MATRIX[0] // NUM_RANKS
    tensors = {
        name: DTensor.from_local(torch.randn(rows, MATRIX[1], generator=generator), mesh, [Shard(0)]) for name in names
    }
    # One after the other: each needs as much memory as the shard.
    for state, writer in (
        (tensors, dcp.FileSystemWriter(checkpoint / "dcp/model", single_file_per_rank=True, thread_count=1)),
        (tensors, dcp.HuggingFaceStorageWriter(str(checkpoint / "hf"), save_distributed=True)),
    ):
        dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


def measure(program: str, checkpoint: Path, work: Path) -> tuple[float, float]:
    """Seconds and MiB of a program."""
    output = work / "output"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    cache(checkpoint / ("hf" if program.startswith("consolidate_safetensors_files") else "dcp"), checkpoint)
    command = [sys.executable, "-m", "benchmarks.consolidate", "--work", str(output), "--run", program, str(checkpoint)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{program} failed: {process.stderr[-2000:]}")
    seconds, mebibytes = json.loads(process.stdout.splitlines()[-1])
    return seconds, mebibytes


def cache(directory: Path, checkpoint: Path) -> None:
    """Have no file of `checkpoint` but those of `directory` in the page cache, and nothing to write to the disk."""
    os.sync()
    for path in filter(Path.is_file, checkpoint.rglob("*")):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while path.is_relative_to(directory) and file.read(1 << 20):
                pass


def run(program: str, checkpoint: Path, output: Path) -> None:
    """Run a program in this process, and print what it needed."""
    action = prepare(program, checkpoint, output)
    before, start = peak(), time.perf_counter()
    action()
    print(json.dumps([time.perf_counter() - start, peak() - before]))


def prepare(program: str, checkpoint: Path, output: Path) -> Callable[[], object]:
    """Import what a program needs; returns what runs it."""
    name, _, options = program.partition(", ")
    shards = checkpoint / "dcp"
    if name in ("cp", "sha256sum"):
        files = [str(path) for path in sorted(shards.rglob("*.distcp"))]
        return lambda: subprocess.run(
            [name, *files, *([str(output)] if name == "cp" else [])], check=True, stdout=subprocess.DEVNULL
        )
    number = int(options.split()[0]) if options else 1
    if name == "ours":
        dtype = torch.bfloat16 if options.endswith("bf16") else torch.float32

        def ours() -> None:
            with ThreadPoolExecutor(number) as threads:  # as `record.check_files` does
                list(threads.map(publish.sha256_file, shards.glob("*.distcp")))
            weights = mapped.ShardedTensors(shards)
            tensors = specs(shards)
            mapped.write_safetensors(
                weights, tensors, output, number, dict.fromkeys(tensors, dtype), max_shard_bytes=5e9
            )

        return ours
    if name == "dcp_to_torch_save":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        return lambda: dcp_to_torch_save(shards / "model", output / "model.pt")
    if name == "accelerate merge-weights":
        from accelerate.utils.fsdp_utils import merge_fsdp_weights

        return lambda: merge_fsdp_weights(str(shards / "model"), str(output))
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    files_of = {name: 1 + index * 64 * 2**20 // 5_000_000_000 for index, name in enumerate(specs(shards))}
    return lambda: consolidate_safetensors_files(str(checkpoint / "hf"), str(output), files_of, number)


def specs(shards: Path) -> dict[str, mapped.TensorSpec]:
    """The tensors of the model, by name."""
    entries: dict[str, Any] = dcp.FileSystemReader(shards / "model").read_metadata().state_dict_metadata
    return {name: mapped.TensorSpec(tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}


def peak() -> float:
    """The most memory that this process has used, in MiB, with the pages of files that it has mapped."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    main()
