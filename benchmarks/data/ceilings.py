"""The ceilings: parse or encode with the fastest library found, and drop the result."""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.data.corpora import files_in, sample, text_size, total_size
from benchmarks.data.measuring import Timing

YAML_MB = 30


def ceiling_json(_: Path, corpus: Path, num_processes: int) -> Timing:
    return _ceiling(parse_json, files_in(corpus), num_processes)


def ceiling_yaml(_: Path, corpus: Path, num_processes: int) -> Timing:
    return _ceiling(parse_yaml, sample(files_in(corpus), YAML_MB), num_processes)


def ceiling_text(_: Path, corpus: Path, num_processes: int) -> Timing:
    return _ceiling(decode, files_in(corpus), num_processes)


def _ceiling(parse: Callable[[Path], None], paths: list[Path], num_processes: int) -> Timing:
    with multiprocessing.get_context("spawn").Pool(num_processes, gc.disable) as pool:
        pool.map(parse, paths[:num_processes], chunksize=1)  # the processes start and import before the clock does
        start = time.perf_counter()
        pool.map(parse, paths, chunksize=-(-len(paths) // (8 * num_processes)))
        return Timing(time.perf_counter() - start, total_size(paths))


def parse_json(path: Path) -> None:
    import orjson

    orjson.loads(path.read_bytes())


def parse_yaml(path: Path) -> None:
    from yaml import StreamEndEvent
    from yaml._yaml import CParser

    parser = CParser(path.read_bytes())
    while type(parser.get_event()) is not StreamEndEvent:
        pass


def decode(path: Path) -> None:
    path.read_bytes().decode(errors="replace")


def ceiling_pack(_: Path, project: Path, num_processes: int) -> Timing:
    os.environ["RAYON_NUM_THREADS"] = str(num_processes)
    import datasets
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(project / "model/tokenizer.json"))
    texts = list(datasets.load_from_disk(str(project / "data/corpus"))["text"])
    start = time.perf_counter()
    for first in range(0, len(texts), 1000):
        tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
    return Timing(time.perf_counter() - start, text_size(project))
