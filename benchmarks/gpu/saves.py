"""How long a training waits for an asynchronous save, and how long that takes: of some GB of a model.

    torchrun --nproc-per-node 1 -m benchmarks.gpu.saves JOB.json

The first save allocates memory of the CPU, the second one uses it again. Each number ends with a line `result {...}`.
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import REPO
from benchmarks.gpu.results import print_result
from benchmarks.gpu.settings import SAVES
from stages.base.params_file import load_params
from stages.checkpointing.saver import Saver
from stages.launching.runtime import TrainRuntime
from stages.ranks import handoff
from tests.trainings import checkpoint_manifest, train_state


def main() -> None:
    handoff.die_with_torchrun(signal.SIGKILL)
    path = Path(sys.argv[1])
    directory = path.parent / "saves"
    shutil.rmtree(directory, ignore_errors=True)
    on_gpu = torch.cuda.is_available()
    num_bytes = json.loads(path.read_text())["saved_bytes"] // int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    size = min(2**26, num_bytes // 4)  # as large as the weights of a layer
    names = [
        f"{dist.get_rank()}-{number}" for number in range(num_bytes // (4 * size))
    ]  # or torch would save one of each
    model = nn.ParameterDict({name: torch.ones(size, device=device) for name in names})
    optimizer = torch.optim.SGD(model.parameters())
    runtime = dataclasses.replace(load_params(TrainRuntime, "runtime", REPO / "params.yaml"), async_checkpoint=True)
    seconds = dict.fromkeys(SAVES, 0.0)
    with Saver(runtime, timeout_minutes=5) as saver:
        for step, name in enumerate(SAVES[:2], start=1):
            start = time.perf_counter()
            saver.save(
                directory / f"step-{step:08d}", model, optimizer, train_state(), {},
                checkpoint_manifest(step=step),
            )  # fmt: skip
            copied = time.perf_counter()
            saver.wait()
            seconds[name], seconds["write"] = copied - start, time.perf_counter() - copied
    written = sum(param.nbytes for param in model.parameters())
    shutil.rmtree(directory, ignore_errors=True)
    if dist.get_rank() == 0:
        for name, value in seconds.items():
            print_result(name, {"ms": 1000 * value, "GB/s": written / value / 1e9})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
