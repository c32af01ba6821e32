"""Say what a training will take, before a machine is booked for it.

Reads    data/model.json, data/tokens/train, data/tokens/validation
Writes   outputs/<experiment_name>/plan.json
Command  python -m stages.plan

The numbers follow from the manifests and the parameters alone; no weight and no token is read.
"""

import shutil
from pathlib import Path

from stages.artifacts import command, params, publish
from stages.artifacts.checkpoint import root
from stages.artifacts.command import StageError
from stages.model import manifest as model_manifest
from stages.training import run
from stages.training.params import TrainParams, TrainRuntime

_ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_FP32 = 4
_MEANS = {"adamw": 2 * _FP32, "adamw_8bit": 2 * (1 + _FP32 / 256)}
"""Bytes for each parameter that the optimizer keeps; in 8 bits, 256 values share a scale."""


def main() -> None:
    command.parser(__doc__).parse_args()
    train_params = params.load(TrainParams)
    runtime = params.load(TrainRuntime, "runtime")
    manifest = model_manifest.read()
    this = run.describe(train_params)
    _check_limits(this, manifest)

    num_parameters, means = manifest.num_parameters, _MEANS[train_params.optimizer]
    tokens_per_step = train_params.total_batch_size * this.seq_length
    plan = {
        "parameters": num_parameters,
        "training_rows": this.num_rows,
        "validation_rows": this.num_validation_rows,
        "steps": this.total_steps,
        "tokens_per_step": tokens_per_step,
        "tokens": this.total_steps * tokens_per_step,
        "epochs": this.total_steps * train_params.total_batch_size / this.num_rows,
        # Weights and gradients in fp32, and the means of AdamW, of one copy of the model. Activations come on top.
        "training_state_bytes": int((2 * _FP32 + means) * num_parameters),
        "checkpoint_bytes": int((_FP32 + means) * num_parameters),
        "model_bytes": _ITEM_SIZES[manifest.dtype] * num_parameters,
    }
    publish.write_json(Path("outputs") / train_params.experiment_name / "plan.json", plan)

    # Beside the newest ones lie the best, and the one that is being written.
    disk = (runtime.keep_checkpoints + 2) * plan["checkpoint_bytes"] + plan["model_bytes"]
    print(
        f"plan: {plan['steps']:,} steps, {plan['tokens']:,} tokens ({plan['epochs']:.2f} epochs) of a model of "
        f"{num_parameters:,} parameters: {_gib(plan['training_state_bytes'])} of memory over the processes that share "
        f"a copy of it, beside activations; {_gib(disk)} of disk for checkpoints and model"
    )
    checkpoints = _existing(root(train_params.experiment_name))
    if (free := shutil.disk_usage(checkpoints).free) < disk:
        print(f"warning: {checkpoints} has {_gib(free)} free; set CHECKPOINT_ROOT to a larger disk")


def _check_limits(this: run.Run, manifest: model_manifest.ModelManifest) -> None:
    if manifest.max_seq_length is not None and this.seq_length > manifest.max_seq_length:
        raise StageError(
            f"seq_length is {this.seq_length}, but {manifest.model_name} takes at most {manifest.max_seq_length} tokens"
        )
    if manifest.eos_token_id is None:
        raise StageError(f"{manifest.model_name} has no eos_token_id: set one in its generation_config.json")


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


if __name__ == "__main__":
    command.run(main)
