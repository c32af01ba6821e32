"""The ceilings: parse or encode with the fastest library found, and drop the result."""

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    """Encode with the fast tokenizer in as many processes."""
    import datasets

    num_texts = len(datasets.load_from_disk(str(project / "data/corpus")))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes + 1)
    with context.Pool(num_processes, _Bare.load, (project, barrier)) as pool:
        barrier.wait()
        start = time.perf_counter()
        size = -(-num_texts // (32 * num_processes))
        pool.map(_Bare.encode, [slice(first, first + size) for first in range(0, num_texts, size)], chunksize=1)
        return Timing(time.perf_counter() - start, text_size(project))


class _Bare:
    """What a process encodes, and with what."""

    texts: Any
    tokenizer: Any

    @classmethod
    def load(cls, project: Path, barrier: threading.Barrier) -> None:
        import datasets

        from stages.tokenizing import vocabulary
        from stages.tokenizing.fast_tokenizer import FastTokenizer

        cls.texts = datasets.load_from_disk(str(project / "data/corpus"))["text"]
        cls.tokenizer = FastTokenizer(vocabulary.complete_bytes((project / "model/tokenizer.json").read_bytes()))
        barrier.wait()

    @classmethod
    def encode(cls, part: slice) -> None:
        cls.tokenizer.encode(cls.texts[part])
