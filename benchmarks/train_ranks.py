"""The programs that `benchmarks.train` compares, each as one of its ranks; torchrun starts them.

    torchrun --nproc-per-node 2 -m benchmarks.train_ranks JOB.json

All print `step K/N peak X GiB` every `log_freq` steps, and `load {...}` when the weights are where they belong. The
pipeline's own training prints the first line by itself; here only its load is watched.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, PreTrainedModel

from stages.training.data import TokenRows
from stages.training.order import step_rows
from stages.training.telemetry import memory_gib

MIB = 2**20


@dataclass(frozen=True)
class Job:
    """What a program is told. The batches, the optimizer and the precision are the same in all of them."""

    program: str
    """stage | bare | ddp | trainer."""
    model: str
    """A directory with weights."""
    batch_size: int
    total_batch_size: int
    steps: int
    log_freq: int
    """Steps between two lines."""
    precision: str
    compile: bool
    save_freq: int | None = None
    """Steps between two checkpoints of the Trainer."""
    resume: bool = False
    """Whether the Trainer goes on from its newest checkpoint."""
    main_loads: bool = False
    """Whether rank 0 of the Trainer reads the weights for all (`cpu_ram_efficient_loading`)."""

    @property
    def accumulation(self) -> int:
        """Forward passes a step and rank."""
        return self.total_batch_size // self.batch_size // int(os.environ["WORLD_SIZE"])


LR, BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM, SEED = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 0


# Reporting


def print_step(job: Job, step: int) -> None:
    """Print the line of a step, when the device has done its work."""
    if step % job.log_freq == 0:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if int(os.environ["RANK"]) == 0:
            print(f"step {step}/{job.steps} peak {memory_gib()[1]:.3f} GiB", flush=True)


class LoadWatch:
    """Counts what is read, and the most memory that is held, while the weights are loaded.

    A file that is mapped into memory does not show in /proc/self/io. So what the tensors cut out of safetensors hold is
    counted, and the rest, hashing above all, is taken from there.
    """

    def __init__(self) -> None:
        self.mapped = 0
        self._start = {**_counters(), **_status()}

    def open(self, *args: Any, **kwargs: Any) -> "CountedFile":
        """What stands in for `safe_open`."""
        return CountedFile(self, safetensors.safe_open(*args, **kwargs))

    def report(self) -> None:
        """Print the counts of this rank, once."""
        now = {**_counters(), **_status()}
        values = {
            "rank": int(os.environ["RANK"]),
            "mapped_mib": self.mapped / MIB,
            "read_mib": (now["rchar"] - self._start["rchar"]) / MIB,
            "peak_mib": now["VmHWM"] / 1024,
            "before_mib": self._start["VmRSS"] / 1024,
        }
        os.write(1, f"load {json.dumps(values)}\n".encode())  # at once: the ranks share the pipe


class CountedFile:
    """A safetensors file whose tensors are counted as they are cut out."""

    def __init__(self, watch: LoadWatch, file: Any) -> None:
        self._watch, self._file = watch, file

    def __enter__(self) -> "CountedFile":
        self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, key: str) -> "CountedSlice":
        return CountedSlice(self._watch, self._file.get_slice(key))

    def get_tensor(self, key: str) -> Tensor:
        return CountedSlice(self._watch, self._file.get_slice(key))[...]


class CountedSlice:
    """A tensor of such a file."""

    def __init__(self, watch: LoadWatch, whole: Any) -> None:
        self._watch, self._whole = watch, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __getitem__(self, index: Any) -> Tensor:
        part: Tensor = self._whole[index]
        self._watch.mapped += part.nbytes
        return part


def _counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _status() -> dict[str, int]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Vm")]
    return {name.removesuffix(":"): int(value) for name, value, _ in lines}


# The programs


def stage(job: Job) -> None:
    """The pipeline's training, up to its first step."""
    from stages import train
    from stages.training import model

    build = model.build

    def watched(*args: Any, **kwargs: Any) -> PreTrainedModel:
        watch = LoadWatch()
        model.safe_open = watch.open  # type: ignore[assignment]
        built = build(*args, **kwargs)
        watch.report()
        return built

    model.build = watched
    sys.argv = sys.argv[:1]
    train.main()


def bare(job: Job) -> None:
    """The shortest loop with FSDP2: no log, no checkpoint, no check."""
    with process_group() as device:
        model = load(job, device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if job.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        loop(job, model, device, autocast=False)


def ddp(job: Job) -> None:
    """The same loop, each rank with the whole model."""
    with process_group() as device:
        model = load(job, device)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        loop(job, wrapped, device, autocast=job.precision == "bf16")


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the ranks; yields the device of this one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    yield device
    dist.destroy_process_group()


def load(job: Job, device: torch.device) -> Any:
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).to(device)
    if job.compile:
        for layer in model.model.layers:
            layer.compile()
    return model


def loop(job: Job, model: nn.Module, device: torch.device, autocast: bool) -> None:
    optimizer = AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    steps = [[rows.to(device) for rows in own_rows(job, step)] for step in range(job.steps)]
    for step, batches in enumerate(steps, start=1):
        for input_ids in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                logits = model(input_ids=input_ids, use_cache=False).logits
            targets = nn.functional.pad(input_ids[:, 1:], (0, 1), value=-100)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        print_step(job, step)


def own_rows(job: Job, step: int) -> list[Tensor]:
    """The rows that the stage gives this rank in a step: of each forward pass, (B, T) int64."""
    rows = TokenRows(Path("data/tokens/train"))
    indices = step_rows(step, job.total_batch_size, len(rows), SEED)
    own = indices.reshape(job.accumulation, -1, job.batch_size)[:, int(os.environ["RANK"])]
    return [torch.from_numpy(rows.rows(part)).long() for part in own]


def trainer(job: Job) -> None:
    """The Trainer of transformers, with the FSDP2 of accelerate."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        shard_on_cpus()
    arguments = TrainingArguments(
        output_dir="trainer",
        use_cpu=not on_gpu,
        per_device_train_batch_size=job.batch_size,
        gradient_accumulation_steps=job.accumulation,
        max_steps=job.steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
        bf16=job.precision == "bf16",
        torch_compile=job.compile,
        logging_steps=job.log_freq,
        save_strategy="steps" if job.save_freq else "no",
        save_steps=job.save_freq or 500,
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": 2,
            "cpu_ram_efficient_loading": job.main_loads,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    )
    watch = LoadWatch()
    transformers.modeling_utils.safe_open = watch.open  # type: ignore[assignment]

    class Lines(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.report()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print_step(job, state.global_step)

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    rows = TokenRows(Path("data/tokens/train"))
    dataset = [{"input_ids": row, "labels": row} for row in map(torch.from_numpy, all_rows(rows))]
    Trainer(model, arguments, train_dataset=dataset, callbacks=[Lines()]).train(resume_from_checkpoint=job.resume)


def all_rows(rows: TokenRows) -> np.typing.NDArray[np.int64]:
    return rows.rows(np.arange(len(rows))).astype(np.int64)


def shard_on_cpus() -> None:
    """Let accelerate shard on CPUs, which it does on accelerators only: tell it that its ranks had some."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    {"stage": stage, "bare": bare, "ddp": ddp, "trainer": trainer}[job.program](job)


if __name__ == "__main__":
    main()
