"""A project in which all programs train the same model on the same tokens."""

import argparse
import csv
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import REPO, environment
from benchmarks.data.corpora import make_text
from benchmarks.train.job import BETAS, EPS, LR, MAX_GRAD_NORM, SEED, TORCHRUN, WEIGHT_DECAY, Job, llama
from benchmarks.train.launched import Training
from stages.base import outputs
from stages.checkpointing.pointer import RunPointer, pointer_path
from stages.launching import flops
from stages.model import meta

EXPERIMENT = "bench"
_MADE = "made"
"""This file exists when the project is complete."""
_DOCUMENT = 1200
"""Characters of a document, on average: some 400 tokens."""


class Bench:
    """The project, which is made in an empty directory or used again, and how its trainings are started."""

    def __init__(self, project: Path, args: argparse.Namespace, has_weights: bool = True) -> None:
        """`args` are those of the command line of `benchmarks.train`; `has_weights` is for `make_model`."""
        self.project, self.args = project.resolve(), args
        self.num_ranks: int = args.ranks or torch.cuda.device_count() or 2
        self.batch_size: int = args.batch_size
        self.tokens_per_step = self.batch_size * self.num_ranks * args.seq_length
        num_threads: int = args.threads or max(1, len(os.sched_getaffinity(0)) // self.num_ranks)
        self.environment = environment(OMP_NUM_THREADS=str(num_threads), TOKENIZERS_PARALLELISM="false")
        self.trainings: list[Training] = []
        if not (project / _MADE).exists():
            self.make_model(args.params, has_weights)
            self.make_tokens()
            (project / _MADE).touch()
        model = meta.build(project / "model")
        self.num_parameters = meta.num_parameters(model)
        self.flops_per_token = flops.flops_per_token(model, args.seq_length)

    def make_model(self, shape: str, has_weights: bool) -> None:
        """Write random weights in bf16, or none: trainings make them; with the tokenizer of the embedded model."""
        config = AutoConfig.for_model("llama", **llama(shape, self.args.seq_length))
        directory = self.project / "model"
        if has_weights:
            torch.manual_seed(0)
            # On a GPU at once; a CPU takes 25 ns for a random number in bf16, half a minute for a billion.
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
            torch.cuda.empty_cache()
        else:
            config.architectures = ["LlamaForCausalLM"]
            config.save_pretrained(directory)
        for path in (REPO / "models/tiny-llama").glob("*token*"):
            shutil.copy(path, directory)

    def make_tokens(self) -> None:
        corpus = self.project / "corpus"
        shutil.rmtree(corpus, ignore_errors=True)  # of a process that was killed
        corpus.mkdir()
        make_text(corpus, self.args.megabytes)
        random = np.random.default_rng(SEED)
        for path in sorted(corpus.iterdir()):  # of whole files, most rows would be one document
            text, start = path.read_text(errors="replace"), 0
            with path.with_suffix(".jsonl").open("w") as file:
                while start < len(text):
                    end = start + 1 + int(random.exponential(_DOCUMENT))
                    file.write(json.dumps(text[start:end]) + "\n")
                    start = end
            path.unlink()
        for name in ("dvc.yaml", "stages"):
            (self.project / name).unlink(missing_ok=True)
            (self.project / name).symlink_to(REPO / name)
        self.write_params()
        for name in ("organize", "extract", "deduplicate", "download", "pack"):
            self.start(["-m", f"stages.{name}"]).finish()

    def write_params(self, steps: int = 1, params: Mapping[str, Any] | None = None, **runtime: Any) -> None:
        """Write params.yaml such that the pipeline trains as the other programs do, but for `params`."""
        content = yaml.safe_load((REPO / "params.yaml").read_text())
        content |= {
            "experiment_name": EXPERIMENT, "raw_dir": "corpus", "model_name": "model",
            "seq_length": self.args.seq_length, "batch_size": self.batch_size,
            "total_batch_size": self.batch_size * self.num_ranks, "num_epochs": 10**6, "max_steps": steps, "lr": LR,
            "lr_schedule": "constant", "warmup_steps": 0, "weight_decay": WEIGHT_DECAY, "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1], "adam_eps": EPS, "max_grad_norm": MAX_GRAD_NORM,
            "seed": SEED, "precision": self.args.precision, "compile": self.args.compile, "document_mask": False,
            "eval_freq": 10**6, "fast_encoder": False, **(params or {}),
        }  # fmt: skip
        content["runtime"] |= {"nproc_per_node": self.num_ranks, "log_freq": 1, "ckpt_freq": None, **runtime}
        (self.project / "params.yaml").write_text(yaml.safe_dump(content))

    def start(self, command: list[str]) -> Training:
        """Start Python in the project."""
        errors = self.project / f"errors-{len(self.trainings)}.txt"
        self.trainings.append(Training(command, self.project, self.environment, errors))
        return self.trainings[-1]

    def start_ours(self, steps: int, params: Mapping[str, Any] | None = None, **runtime: Any) -> Training:
        """Start the launcher, with parameters as for `write_params`, which nothing may change until it has ended."""
        self.write_params(steps, params, **runtime)
        return self.start(["-m", "stages.launch"])

    def start_other(self, program: str, steps: int, log_freq: int) -> Training:
        """Start the ranks of a program with torchrun; the arguments are those of its `Job`."""
        args, model = self.args, str(self.project / "model")
        job = Job(program, model, self.batch_size, steps, args.precision, args.compile, log_freq)
        path = self.project / "job.json"
        path.write_text(json.dumps(asdict(job)))
        torchrun = [*TORCHRUN, f"--nproc-per-node={self.num_ranks}"]
        return self.start([*torchrun, "-m", "benchmarks.train.programs", str(path)])

    def close(self) -> None:
        """Leave no process behind."""
        for training in self.trainings:
            training.kill()

    def remove_checkpoints(self) -> None:
        """Make room; the outs stay."""
        for directory in self.project.glob("outputs/*/checkpoints"):
            shutil.rmtree(directory)

    def result_digest(self) -> str:
        """Of all that the pipeline's last training has computed: weights, optimizer state, history."""
        return RunPointer.read(self.project / pointer_path(EXPERIMENT)).result_sha256

    def history_losses(self) -> list[float]:
        """Those of all steps of the pipeline's last training."""
        with (self.project / outputs.HISTORY).open() as file:
            return [float(row["loss"]) for row in csv.DictReader(file, delimiter="\t") if row["loss"]]
