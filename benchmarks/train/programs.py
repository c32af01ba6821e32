"""The programs that are compared; torchrun runs this module in each rank.

    torchrun --nproc-per-node 2 -m benchmarks.train.programs JOB.json

They print `step K/N peak X GiB` every `log_freq` steps, and `losses [...]` at the end. The pipeline's own training
prints the lines of its steps itself and is started without this module.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM

from benchmarks.train.job import BETAS, EPS, LR, MAX_GRAD_NORM, SEED, WEIGHT_DECAY, Job
from stages.forward.rows import TokenRows
from stages.launching.timers import memory_gib
from stages.ranks import handoff
from stages.training.order import shuffled


def print_step(job: Job, step: int) -> None:
    """Print the line of a step, when the device has finished it."""
    if step % job.log_freq == 0:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if int(os.environ["RANK"]) == 0:
            print(f"step {step}/{job.steps} peak {memory_gib()[1]:.3f} GiB", flush=True)


def print_losses(losses: list[float]) -> None:
    """Print the mean losses between two lines, from the first step on, if this is rank 0."""
    if int(os.environ["RANK"]) == 0:
        print(f"losses {json.dumps(losses)}", flush=True)


def bare(job: Job) -> None:
    """The shortest loop with FSDP2, without logs, checkpoints and checks."""
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
    """The same loop with a full copy of the model in each rank."""
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
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.to(device)
    if job.compile:
        for layer in model.model.layers:
            layer.compile()
    return model


def loop(job: Job, model: nn.Module, device: torch.device, autocast: bool) -> None:
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    rows = RowsInOrder(job)
    batches = [torch.stack(rows.of_step(step)).to(device) for step in range(job.steps)]
    losses = []
    for step, input_ids in enumerate(batches, start=1):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=input_ids, use_cache=False).logits
        targets = nn.functional.pad(input_ids[:, 1:], (0, 1), value=-100)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        del logits  # otherwise their memory stays in use until the next step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        print_step(job, step)
    total = torch.stack(losses)
    dist.all_reduce(total)
    print_losses([part.mean().item() / dist.get_world_size() for part in total.split(job.log_freq)])


class RowsInOrder(Dataset[dict[str, Tensor]]):
    """The rows of all steps, in the order of the stage: (T,) int64 each."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows = TokenRows(Path("data/tokens/train"))
        self._size = job.batch_size * int(os.environ["WORLD_SIZE"])

    def __len__(self) -> int:
        return self._job.steps * self._size

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        index = shuffled(np.array([number]), len(self._rows), SEED)
        row = torch.from_numpy(self._rows.rows(index)[0]).long()
        return {"input_ids": row, "labels": row}

    def of_step(self, step: int) -> list[Tensor]:
        """The rows of this rank."""
        start = step * self._size + int(os.environ["RANK"]) * self._job.batch_size
        return [self[number]["input_ids"] for number in range(start, start + self._job.batch_size)]


def trainer(job: Job) -> None:
    """The Trainer of transformers, with the FSDP2 of accelerate."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir="trainer",
        use_cpu=not on_gpu,
        per_device_train_batch_size=job.batch_size,
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
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fsdp=cast(Any, True),
        fsdp_config={
            "cpu_ram_efficient_loading": False,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    )
    if not on_gpu:
        shard_on_cpus()

    class Lines(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            assert isinstance(kwargs["model"], FSDPModule), "accelerate did not shard the model"

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print_step(job, state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print_losses([entry["loss"] for entry in state.log_history if "loss" in entry])

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(RowsInOrder(job))

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    InOrder(model, arguments, train_dataset=RowsInOrder(job), callbacks=[Lines()]).train()
    dist.destroy_process_group()  # without it a rank sometimes hangs at exit


def shard_on_cpus() -> None:
    """Make accelerate, which shards on accelerators only, believe that each rank has one."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState().distributed_type = DistributedType.MULTI_GPU


def main() -> None:
    handoff.die_with_torchrun(signal.SIGKILL)  # which starts its ranks in process groups of their own
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    {"bare": bare, "ddp": ddp, "trainer": trainer}[job.program](job)


if __name__ == "__main__":
    main()
