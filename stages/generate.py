"""Continue a text with a trained model; the text appears as it is generated.

Reads    outputs/<experiment_name>/model/, or another model directory
Command  python -m stages.generate "Once upon a time"
         python -m stages.generate --model DIR --temperature 0 < prompt.txt

On a GPU if there is one. The same seed gives the same text on the same device.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from stages.artifacts import command, outputs
from stages.artifacts.errors import StageError
from stages.artifacts.model_files import CONFIG
from stages.artifacts.outputs import ExperimentName
from stages.artifacts.params_file import load_params


@dataclass(frozen=True)
class GenerateParams:
    """The leaf of `params.yaml` that decides which model it is."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""


def main() -> None:
    """Run the command."""
    parser = command.parser(__doc__)
    parser.add_argument("prompt", nargs="?", help="the beginning of the text; without it, what is on standard input")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: that of the experiment in params.yaml")
    parser.add_argument(
        "--max-new-tokens", type=positive_integer, default=128, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--temperature",
        type=not_negative_number,
        default=0.8,
        help="0: the most probable token (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    if args.prompt is None and sys.stdin.isatty():
        parser.error("give a prompt, as an argument or on standard input")
    directory = args.model or outputs.directory(load_params(GenerateParams).experiment_name) / "model"
    if not (directory / CONFIG).is_file():
        raise StageError(f"{directory} is not a model directory: run `dvc repro`, or give another one with --model")
    prompt = sys.stdin.read() if args.prompt is None else args.prompt

    # Here, as they take seconds: not for --help.
    import torch
    from transformers import TextStreamer

    from stages.export import generation

    model, tokenizer = generation.load(directory)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)  # (1, T)
    if not tokens.numel():
        raise StageError("the prompt has no token: give at least a word")
    torch.manual_seed(args.seed)
    generation.generate(model, tokens, args.max_new_tokens, args.temperature, TextStreamer(tokenizer))


def positive_integer(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def not_negative_number(text: str) -> float:
    if not (number := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


if __name__ == "__main__":
    command.run(main)
