"""The plain recipes: what one writes first with `datasets`."""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.data.corpora import files_in, sample, text_size, total_size
from benchmarks.data.measuring import Timing

YAML_MB = 6
"""Input of the YAML recipe, which reads less than one megabyte per second."""
SEQ_LENGTH = 1024


def recipe_json(work: Path, corpus: Path, num_processes: int) -> Timing:
    return _recipe(work, files_in(corpus), num_processes, json_strings)


def recipe_yaml(work: Path, corpus: Path, num_processes: int) -> Timing:
    return _recipe(work, sample(files_in(corpus), YAML_MB), num_processes, yaml_strings)


def recipe_text(work: Path, corpus: Path, num_processes: int) -> Timing:
    return _recipe(work, files_in(corpus), num_processes, text_strings)


def _recipe(work: Path, paths: list[Path], num_processes: int, read: Callable[[Path], Iterator[str]]) -> Timing:
    """A generator, `from_generator`, `save_to_disk`."""
    import datasets

    datasets.disable_progress_bars()
    start = time.perf_counter()
    dataset = datasets.Dataset.from_generator(
        rows, gen_kwargs={"paths": paths, "read": [read] * len(paths)}, cache_dir=str(work / "cache"),
        num_proc=num_processes if num_processes > 1 else None,
    )  # fmt: skip
    dataset.save_to_disk(str(work / "corpus"), num_proc=num_processes)
    return Timing(time.perf_counter() - start, total_size(paths), f"{len(dataset)} rows")


def rows(paths: list[Path], read: list[Callable[[Path], Iterator[str]]]) -> Iterator[dict[str, str]]:
    for path, function in zip(paths, read, strict=True):
        try:
            for string in function(path):
                yield {"text": string}
        except UnicodeDecodeError:
            continue  # the file is lost


def json_strings(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from walk(json.load(file))


def yaml_strings(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from walk(yaml.safe_load(file))


def text_strings(path: Path) -> Iterator[str]:
    yield path.read_text(encoding="utf-8")


def walk(node: Any) -> Iterator[str]:
    """All strings among the values of a document."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def recipe_pack(work: Path, project: Path, num_processes: int) -> Timing:
    """`map` to tokenize and `map` to group, as in `run_clm.py` among the examples of `transformers`."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    datasets.disable_caching()  # otherwise the second run would reuse the result of the first
    os.environ["RAYON_NUM_THREADS"] = "1"  # in each process
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(project / "model/tokenizer.json"))
    texts = datasets.load_from_disk(str(project / "data/corpus"))
    map_kwargs: dict[str, Any] = {"batched": True, "num_proc": num_processes if num_processes > 1 else None}

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"])

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(itertools.chain(*lists)) for name, lists in batch.items()}
        end = len(joined["input_ids"]) // SEQ_LENGTH * SEQ_LENGTH
        groups = {
            name: [values[start : start + SEQ_LENGTH] for start in range(0, end, SEQ_LENGTH)]
            for name, values in joined.items()
        }
        return {**groups, "labels": groups["input_ids"].copy()}

    start = time.perf_counter()
    tokens = texts.map(tokenize, remove_columns=["text"], **map_kwargs).map(group, **map_kwargs)
    tokens.save_to_disk(str(work / "tokens"))
    seconds = time.perf_counter() - start
    return Timing(seconds, text_size(project), f"{len(tokens)} rows")
