"""The stages `organize`, `extract` and `pack`, each in a project of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import REPO, environment
from benchmarks.data.corpora import files_in, link_all, sample, text_size, total_size
from benchmarks.data.measuring import Timing
from benchmarks.data.recipes import SEQ_LENGTH

PACK_MB = 100
"""Raw files whose text is packed."""


def write_params(project: Path, raw_dir: Path, num_processes: int, **values: Any) -> None:
    content = yaml.safe_load((REPO / "params.yaml").read_text())
    content |= {"raw_dir": str(raw_dir), "num_splits": 8, **values}
    content["runtime"]["num_workers"] = num_processes
    (project / "params.yaml").write_text(yaml.safe_dump(content))


def run_extract(work: Path, corpus: Path, num_processes: int) -> Timing:
    """Time `extract`; the time of `organize` before it is in the note."""
    from stages import extract, organize
    from stages.base.params_file import load_params
    from stages.formats import readers  # noqa: F401 - the stage imports them late, while the clock runs
    from stages.work import arrow  # noqa: F401 - the stage imports them late, while the clock runs

    write_params(work, corpus, num_processes)
    os.chdir(work)
    start = time.perf_counter()
    organize.organize(load_params(organize.OrganizeParams), load_params(organize.OrganizeRuntime, "runtime"))
    organized = time.perf_counter() - start
    start = time.perf_counter()
    extract.extract(load_params(extract.ExtractParams), load_params(extract.ExtractRuntime, "runtime"))
    seconds = time.perf_counter() - start
    metrics = json.loads(Path("data/extract.json").read_text())
    note = f"{metrics['strings']} rows, {metrics['fallback_encoded_files']} not UTF-8; organize {organized:.2f} s"
    return Timing(seconds, total_size(files_in(corpus)), note)


def make_pack_project(work: Path, corpus: Path, tokenizer: Path) -> Path:
    """A project with a part of `corpus`, extracted, and a model with `tokenizer`: the input of all that packs."""
    from tokenizers import Tokenizer

    raw_dir, project = work / f"{corpus.name}-part", work / f"{corpus.name}-project"
    raw_dir.mkdir()
    project.mkdir()
    link_all(sample(files_in(corpus), PACK_MB), raw_dir)
    model = project / "model"
    shutil.copytree(REPO / "models/tiny-llama", model)
    shutil.copyfile(tokenizer, model / "tokenizer.json")
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    (model / "config.json").write_text(json.dumps(config))
    write_params(project, raw_dir, num_processes=2, model_name=str(model))
    for stage in ("organize", "extract", "deduplicate", "download"):
        subprocess.run([sys.executable, "-m", f"stages.{stage}"], env=environment(), cwd=project, check=True)
    return project


def run_pack(work: Path, project: Path, num_processes: int) -> Timing:
    from stages import pack
    from stages.base.params_file import load_params
    from stages.tokenizing import packing  # noqa: F401 - the stage imports them late, while the clock runs
    from stages.work import arrow  # noqa: F401 - the stage imports them late, while the clock runs

    model = str(project / "model")
    write_params(work, project, num_processes, seq_length=SEQ_LENGTH, validation_splits=1, model_name=model)
    os.chdir(work)
    Path("data").mkdir()
    for name in ("corpus", "model.json", "tokenizer.json"):
        Path("data", name).symlink_to(project / "data" / name)
    start = time.perf_counter()
    pack.pack(load_params(pack.PackParams), load_params(pack.PackRuntime, "runtime"))
    seconds = time.perf_counter() - start
    metrics = json.loads(Path("data/pack.json").read_text())
    num_rows = metrics["train"]["rows"] + metrics["validation"]["rows"]
    return Timing(seconds, text_size(project), f"{num_rows} rows")
