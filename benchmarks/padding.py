"""What `attention: padded` costs: what share of its tokens is padding, and how fast a training is, beside the others.

    python -m benchmarks.padding
    python -m benchmarks.padding --seq-length 4096 --rounds 5

Documents have about 500 tokens each, of random lengths. The trainings of a model take turns of `--steps` steps; each
number is the median over the turns, relative to the first of the model.
"""

import argparse
import csv
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
import yaml

from benchmarks.growth import ENVIRONMENT, make_project, run, set_runtime
from benchmarks.tables import markdown

TOKENS = 500  # of a document, about; a word has 1.1 tokens
WORDS = ("learn", "model", "token", "value", "train", "state", "layer", "scale", "print", "range")
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "varlen": {"attention": "varlen"},
        "sdpa with a mask": {"attention": "sdpa"},
        "padded": {"attention": "padded"},
    },
    "mamba2": {"document_mask: false": {"document_mask": False}, "padded": {"attention": "padded"}},
}


def write_documents(target: Path, number: int) -> None:
    """Write texts of random lengths: most are short, a few are long."""
    target.mkdir()
    generator = random.Random(0)
    for index in range(number):
        length = 1 + min(8 * TOKENS, round(generator.expovariate(1 / TOKENS)))
        (target / f"{index}.txt").write_text(" ".join(generator.choices(WORDS, k=length)))


def use_mamba2(project: Path) -> None:
    """Replace the model of a project by one of state spaces, of the same vocabulary."""
    directory = project / "models/small"
    config = json.loads((directory / "config.json").read_text())
    transformers.Mamba2Config(
        vocab_size=config["vocab_size"], hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16,
        n_groups=1, chunk_size=64, eos_token_id=config["eos_token_id"], bos_token_id=None, pad_token_id=None,
        tie_word_embeddings=True,
    ).save_pretrained(directory)  # fmt: skip


def train(project: Path, **values: Any) -> tuple[float, str]:
    """Train with these parameters; returns tokens per second and what the log says of padding."""
    path = project / "params.yaml"
    original = path.read_text()
    path.write_text(yaml.safe_dump(yaml.safe_load(original) | values))
    command = [sys.executable, "-m", "stages.launch"]
    done = subprocess.run(command, cwd=project, env=ENVIRONMENT, text=True, capture_output=True)
    path.write_text(original)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    with (project / "outputs/speed.tsv").open() as file:
        rates = [float(row["tokens_per_second"]) for row in csv.DictReader(file, delimiter="\t")]
    share = re.search(r"\d+% of the tokens that are computed are padding", done.stdout)
    return statistics.median(rates[1:]), share[0] if share else "no padding"


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.padding", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--work", type=Path, help="directory for temporary files, on a fast disk")
    args = parser.parse_args()
    for model, settings in MODELS.items():
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            raw = Path(work, "raw")
            write_documents(raw, args.seq_length * args.batch_size * (args.steps + 20) // TOKENS)
            sizes = {"seq_length": args.seq_length, "batch_size": args.batch_size // args.ranks}
            positions = {"max_position_embeddings": args.seq_length}
            project = make_project(Path(work), raw, positions, max_steps=args.steps, eval_freq=1000, **sizes)
            if model == "mamba2":
                use_mamba2(project)
            set_runtime(project, nproc_per_node=args.ranks, resume="never", log_freq=1, ckpt_minutes=None)
            for stage in ("download", "organize", "extract", "pack"):
                run(project, stage, 1)
            rates: dict[str, list[float]] = {name: [] for name in settings}
            shares = {}
            for _ in range(args.rounds):
                for name, values in settings.items():
                    rate, shares[name] = train(project, **values)
                    rates[name].append(rate)
        medians = {name: statistics.median(found) for name, found in rates.items()}
        reference = next(iter(medians.values()))
        rows = {
            f"{name}, {shares[name]}": {"tokens/s": median, "of the first": median / reference}
            for name, median in medians.items()
        }
        print(markdown(model, rows, {"tokens/s": "{:.0f}", "of the first": "{:.0%}"}), flush=True)


if __name__ == "__main__":
    main()
