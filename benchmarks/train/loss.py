"""Memory and time of a step with each kind of loss, in one process on the CPU.

    python -m benchmarks.train.loss --vocab-size 49152 --tokens 4096
    python -m benchmarks.train.loss --vocab-size 128256 --tokens 2048
    python -m benchmarks.train.loss --vocab-size 4096 --tokens 512 --rounds 30

`usual` is what most trainings do: the logits of all tokens in fp32, and torch's cross_entropy. The model is a small
Llama with two layers, sharded and updated as in the pipeline. Each kind runs in a process of its own; the peak is the
growth of its memory from after the first step with a few tokens, so weights and optimizer state are not in it.
"""

import argparse
import ctypes
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from benchmarks import REPO
from stages.base.params_file import load_params
from stages.base.record import FileEntry
from stages.forward import loss
from stages.forward.batch import count_labels, make_batch
from stages.model import meta
from stages.model.manifest import ModelManifest
from stages.training import sharded_model, step
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from stages.training.precision import make_grad_scaler

KINDS = ("usual", "plain", "fused")
ROW = 256
"""Tokens of a row."""


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.train.loss", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--tokens", type=int, default=4096, help=f"of a forward pass, a multiple of {ROW}")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps")
    parser.add_argument("--kind", choices=KINDS, help="measure only this one, in this process")
    args = parser.parse_args()
    if args.kind:
        print(json.dumps(measure(args)))
        return
    size = 4 * args.tokens * args.vocab_size / 2**20
    print(f"logits of {args.tokens} tokens in fp32: {size:.0f} MiB\n\n| loss | peak, MiB | step, ms |\n|---|---|---|")
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.train.loss", *sys.argv[1:], "--kind", kind]
        found = json.loads(subprocess.run(command, cwd=REPO, check=True, text=True, stdout=-1).stdout)
        print(f"| {kind} | {found['peak']:.0f} | {found['milliseconds']:.0f} |", flush=True)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """The growth of memory in MiB, and the milliseconds of a step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    params = dataclasses.replace(
        load_params(TrainParams, path=REPO / "params.yaml"),
        loss="fused" if args.kind == "fused" else "plain",
        precision=args.precision,
    )
    with tempfile.TemporaryDirectory() as directory:
        manifest = make_model(Path(directory), args)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        model = sharded_model.build(manifest, params, mesh, initialize=True).train()
    optimizer, scaler = make_optimizer(model, params), make_grad_scaler(params.precision, torch.device("cpu"))

    def train(num_rows: int) -> None:
        batch = make_batch(torch.randint(1, args.vocab_size, (num_rows, ROW)), eos_token_id=0, document_mask=True)
        labels = count_labels(batch)
        step.train_step(model, optimizer, scaler, [batch], labels, params)

    with mock.patch.object(step, "training_losses", usual if args.kind == "usual" else loss.training_losses):
        train(1)
        ctypes.CDLL(None).malloc_trim(0)  # what that step has freed would otherwise count as in use before
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = status("VmRSS")
        milliseconds = []
        for _ in range(args.rounds):
            started = time.perf_counter()
            train(args.tokens // ROW)
            milliseconds.append(1000 * (time.perf_counter() - started))
    return {"peak": status("VmHWM") - before, "milliseconds": statistics.median(milliseconds)}


def make_model(directory: Path, args: argparse.Namespace) -> ModelManifest:
    config = LlamaConfig(
        vocab_size=args.vocab_size, hidden_size=args.hidden_size, intermediate_size=2 * args.hidden_size,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, eos_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(directory)
    model = meta.build(directory)
    return ModelManifest(
        model_name=str(directory), model_revision="main", commit=None, architecture="LlamaForCausalLM",
        model_type="llama", dtype="float32", num_parameters=meta.num_parameters(model),
        files={path.name: FileEntry.of(path) for path in directory.iterdir()}, weights=[],
        tied_weights=meta.tied_weights(model), layer_classes=meta.layer_classes(model),
        module_classes=meta.module_classes(model), router_loss_coef=None, vocab_size=args.vocab_size,
        max_seq_length=None, eos_token_id=0, bos_token_id=None, pad_token_id=None,
        tokenizer=FileEntry.of_text(""),
    )  # fmt: skip


def usual(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """What takes the place of `training_losses`."""
    logits = loss.logits(model, batch).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"), None


def status(name: str) -> float:
    """A line of /proc/self/status, in MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
