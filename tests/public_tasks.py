"""Data sets of public tasks on the Hub of the tests: few made-up rows, in the columns that lm-eval's tasks read."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.hub_server import Hub

ARC = [
    {"id": f"{n}", "question": f"Which is {n}?", "answerKey": "B", "choices": {"text": ["a", "b"], "label": ["A", "B"]}}
    for n in range(6)
]
HELLASWAG = [
    {"ind": n, "activity_label": "Counting", "ctx_a": f"Somebody counts to {n}.", "ctx_b": "they", "source_id": f"{n}",
     "ctx": f"Somebody counts to {n}. they", "endings": ["go on.", "[step] stop.", "sing.", "sleep."], "split": "val",
     "split_type": "indomain", "label": str(n % 4)}
    for n in range(6)
]  # fmt: skip
GSM8K = [{"question": f"What is {n} plus 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in range(6)]
MMLU = [
    {"question": f"What is {n}?", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": n % 4} for n in range(5)
]

SQUAD = [
    {"id": f"{n}", "title": "t", "context": f"It is {n}.", "question": "What is it?",
     "answers": {"text": [f"{n}"], "answer_start": [6]}}
    for n in range(4)
]  # fmt: skip


TASKS = ("arc", "gsm8k", "hellaswag", "humaneval", "mmlu", "squadv2", "super_glue")
"""What there is of lm-eval's tasks: its directories of them."""


def link_packages(installed: Path, target: Path) -> None:
    """Give a directory the packages of lm-eval, with `TASKS` alone."""
    tasks = installed / "lm_eval/tasks"

    def others(directory: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(directory) == tasks and "." not in name and name not in TASKS]

    shutil.copytree(installed, target, ignore=others, copy_function=os.symlink)


def serve_all(hub: Hub, directory: Path, lm_eval: Path) -> None:
    """Give a Hub the data of arc_easy, gsm8k, hellaswag and mmlu, and of squadv2, which needs more than data.

    Args:
        hub: Any.
        directory: For the files.
        lm_eval: The directory of its packages, whose tasks name the 57 configs of mmlu.
    """
    files = sorted((lm_eval / "lm_eval/tasks/mmlu/default").glob("mmlu_*.yaml"))
    subjects = sorted(re.findall(r'"dataset_name": "(\w+)"', "".join(path.read_text() for path in files)))
    splits = ("train", "validation", "test")
    serve(hub, directory, "allenai/ai2_arc", ["ARC-Challenge", "ARC-Easy"], splits, ARC)
    serve(hub, directory, "Rowan/hellaswag", ["default"], splits, HELLASWAG)
    serve(hub, directory, "openai/gsm8k", ["main", "socratic"], ("train", "test"), GSM8K)
    serve(hub, directory, "lighteval/squad_v2", ["squad_v2"], ("train", "validation"), SQUAD)
    serve(hub, directory, "cais/mmlu", subjects, ("test", "validation", "dev"), MMLU)


def serve(
    hub: Hub, directory: Path, name: str, configs: list[str], splits: tuple[str, ...], rows: list[dict[str, Any]]
) -> None:
    """Give a Hub a data set: Parquet files, a README that names them, and a license."""
    source, card = directory / name, []
    for config in configs:
        (source / config).mkdir(parents=True)
        for split in splits:
            pq.write_table(pa.Table.from_pylist(rows), source / config / f"{split}-00000-of-00001.parquet")
        files = [{"split": split, "path": f"{config}/{split}-*"} for split in splits]
        card.append({"config_name": config, "data_files": files})
    (source / "README.md").write_text(f"---\n{yaml.safe_dump({'license': 'mit', 'configs': card})}---\n# {name}\n")
    (source / "LICENSE").write_text("You may.\n")
    hub.add(f"datasets/{name}", source)
