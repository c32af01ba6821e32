"""Speed, memory and disk of the data stages, beside the plain recipe and beside parsing or encoding alone.

    python -m benchmarks.data                            JSON, YAML, text, pack and flat memory, 1 and 2 processes
    python -m benchmarks.data --only json pack           some of these
    python -m benchmarks.data --only pack --tokenizer MODEL/tokenizer.json
    python -m benchmarks.data --million-files 1000000    organize so many small files, and nothing else
    python -m benchmarks.data --noop 100000              `dvc repro` with nothing to do, beside bare DVC

The JSON is botocore's service descriptions (`pip install .[bench]`, or a folder given with --botocore), the YAML is the
same documents dumped as YAML, the text is the sources and notes of the Python packages around it. Nothing is read
twice: a corpus smaller than --megabytes is completed with copies under other names, and the first line of its table
says how many times it was taken. Each measurement has a process of its own and a project directory of its own; the time
counts from when everything is imported to when the result is on the disk; memory is the peak of the sum over its
processes, with pages that they share counted in each. All numbers of a table come from one run, one after the other.
"""

import argparse
import gzip
import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

REPO = Path(__file__).resolve().parent.parent
MB = 1_000_000
TEXT_SUFFIXES = (".py", ".md", ".rst", ".txt", ".h")
SEQ_LENGTH = 1024
SLOW_MB = 6  # of a corpus, for what reads less than one of these in a second


class Measured(NamedTuple):
    """What one run took."""

    seconds: float
    megabytes: float
    """Of input."""
    peak: float
    """Megabytes of memory."""
    disk: float
    """Megabytes written and still there."""
    note: str

    @property
    def rate(self) -> float:
        return self.megabytes / self.seconds


# The corpora


def make_json(target: Path, megabytes: int, botocore: Path) -> None:
    """The service descriptions, decompressed."""
    for path in sorted(botocore.joinpath("data").rglob("*.json*")):
        content = path.read_bytes()
        name = "--".join(path.relative_to(botocore / "data").parts)
        (target / name.removesuffix(".gz")).write_bytes(gzip.decompress(content) if path.suffix == ".gz" else content)
    complete(target, megabytes)


def make_yaml(target: Path, megabytes: int, json_files: Path) -> None:
    """The same documents, until there are enough."""
    done = 0
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = [(path, target) for path in files(json_files)]
        for size in pool.imap_unordered(dump_yaml, paths, chunksize=8):
            done += size
            if done >= megabytes * MB:
                break
    complete(target, megabytes)


def dump_yaml(task: tuple[Path, Path]) -> int:
    path, target = task
    text = yaml.dump(json.loads(path.read_bytes()), Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    temporary = target / f".{path.stem}"  # renamed when whole: the pool may be ended before
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(target / f"{path.stem}.yaml")
    return len(text)


def make_text(target: Path, megabytes: int) -> None:
    """Sources and notes, each file once, byte by byte as it is."""
    done = 0
    packages = Path(sysconfig.get_paths()["purelib"])
    for number, path in enumerate(sorted(packages.rglob("*"))):
        if path.suffix in TEXT_SUFFIXES and path.is_file() and done < megabytes * MB:
            shutil.copyfile(path, target / f"{number}.txt")
            done += path.stat().st_size
    complete(target, megabytes)


def complete(target: Path, megabytes: int) -> None:
    """Copy all files under other names until there are so many megabytes."""
    for old in target.glob(".*"):
        old.unlink()
    originals = files(target)
    times = -(-megabytes * MB // total_size(originals))
    for copy in range(1, times):
        for path in originals:
            os.link(path, target / f"{copy}-{path.name}")
    size = total_size(files(target)) / MB
    print(f"{target.name}: {size:.0f} MB in {len(files(target))} files, each original {times} x")


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def total_size(paths: list[Path]) -> int:
    """Bytes of files, of each as often as it has a name."""
    return sum(path.stat().st_size for path in paths)


def size_of(folder: Path) -> int:
    """Bytes that all files below a folder take on the disk: each once however many names it has."""
    found = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum({status.st_ino: status.st_size for status in found}.values())


def some(paths: list[Path], megabytes: float) -> list[Path]:
    """Files spread over the corpus that together have about so many megabytes."""
    return paths[:: max(1, round(total_size(paths) / megabytes / MB))]


# What is measured. Each takes a directory to work in, the input and the number of processes.


def recipe_json(work: Path, corpus: Path, processes: int) -> tuple[float, str]:
    return recipe(work, files(corpus), processes, json_strings)


def recipe_yaml(work: Path, corpus: Path, processes: int) -> tuple[float, str]:
    return recipe(work, some(files(corpus), SLOW_MB), processes, yaml_strings)


def recipe_text(work: Path, corpus: Path, processes: int) -> tuple[float, str]:
    return recipe(work, files(corpus), processes, text_strings)


def recipe(work: Path, paths: list[Path], processes: int, read: Callable[[Path], Iterator[str]]) -> tuple[float, str]:
    """What one writes first: a generator, `from_generator`, `save_to_disk`."""
    import datasets

    datasets.disable_progress_bars()
    start = time.perf_counter()
    dataset = datasets.Dataset.from_generator(
        rows, gen_kwargs={"paths": paths, "read": [read] * len(paths)}, cache_dir=str(work / "cache"),
        num_proc=processes if processes > 1 else None,
    )  # fmt: skip
    dataset.save_to_disk(str(work / "corpus"), num_proc=processes)
    return time.perf_counter() - start, f"{total_size(paths)} {len(dataset)} rows"


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
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def ours(work: Path, corpus: Path, processes: int) -> tuple[float, str]:
    """The stage `extract`; what `organize` takes before it is in the note."""
    from stages import extract, organize
    from stages.artifacts import params
    from stages.corpus import arrow, text

    assert arrow and text  # imported before the clock starts, as in the other measurements
    project(work, corpus, processes)
    start = time.perf_counter()
    organize.organize(params.load(organize.OrganizeParams), params.load(organize.OrganizeRuntime, "runtime"))
    organized = time.perf_counter() - start
    start = time.perf_counter()
    extract.extract(params.load(extract.ExtractParams), params.load(extract.ExtractRuntime, "runtime"))
    seconds = time.perf_counter() - start
    metrics = json.loads(Path("data/extract.json").read_text())
    note = f"{metrics['strings']} rows, {metrics['fallback_encoded_files']} not UTF-8; organize {organized:.2f} s"
    return seconds, f"{total_size(files(corpus))} {note}"


def project(work: Path, corpus: Path, processes: int, **values: Any) -> None:
    """Go to a new project whose raw files are the corpus."""
    os.chdir(work)
    shutil.rmtree("data/.reuse", ignore_errors=True)  # what an earlier measurement left would not be read again
    content = yaml.safe_load((REPO / "params.yaml").read_text())
    content |= {"raw_dir": str(corpus), "num_splits": 8, **values}
    content["runtime"]["num_workers"] = processes
    Path("params.yaml").write_text(yaml.safe_dump(content))


def ceiling_json(_: Path, corpus: Path, processes: int) -> tuple[float, str]:
    return ceiling(parse_json, files(corpus), processes)


def ceiling_yaml(_: Path, corpus: Path, processes: int) -> tuple[float, str]:
    return ceiling(parse_yaml, some(files(corpus), 5 * SLOW_MB), processes)


def ceiling_text(_: Path, corpus: Path, processes: int) -> tuple[float, str]:
    return ceiling(decode, files(corpus), processes)


def ceiling(parse: Callable[[Path], None], paths: list[Path], processes: int) -> tuple[float, str]:
    """Read and parse, and drop the result."""
    with multiprocessing.get_context("spawn").Pool(processes, start_parser) as pool:
        pool.map(parse, paths[:processes], chunksize=1)
        start = time.perf_counter()
        pool.map(parse, paths, chunksize=-(-len(paths) // (8 * processes)))
        seconds = time.perf_counter() - start
    return seconds, f"{total_size(paths)}"


def start_parser() -> None:
    import gc

    gc.disable()


def parse_json(path: Path) -> None:
    import orjson

    orjson.loads(path.read_bytes())


def parse_yaml(path: Path) -> None:
    from yaml._yaml import CParser

    parser = CParser(path.read_bytes())
    while type(parser.get_event()) is not yaml.StreamEndEvent:
        pass


def decode(path: Path) -> None:
    path.read_bytes().decode(errors="replace")


# pack


def recipe_pack(work: Path, corpus: Path, processes: int) -> tuple[float, str]:
    """`map` to tokenize and `map` to group, as `run_clm.py` among the examples of `transformers` does."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    datasets.disable_caching()  # or the second run would take the first one's result
    os.environ["RAYON_NUM_THREADS"] = "1"  # in each process
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(corpus / "model/tokenizer.json"))
    texts = datasets.load_from_disk(str(corpus / "data/corpus"))
    options: dict[str, Any] = {"batched": True, "num_proc": processes if processes > 1 else None}

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"])

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(itertools.chain(*lists)) for name, lists in batch.items()}
        whole = len(joined["input_ids"]) // SEQ_LENGTH * SEQ_LENGTH
        rows = {
            name: [values[start : start + SEQ_LENGTH] for start in range(0, whole, SEQ_LENGTH)]
            for name, values in joined.items()
        }
        return {**rows, "labels": rows["input_ids"].copy()}

    start = time.perf_counter()
    tokens = texts.map(tokenize, remove_columns=["text"], **options).map(group, **options)
    tokens.save_to_disk(str(work / "tokens"))
    return time.perf_counter() - start, f"{text_bytes(corpus)} {len(tokens)} rows"


def ours_pack(work: Path, corpus: Path, processes: int) -> tuple[float, str]:
    from stages import pack
    from stages.artifacts import params
    from stages.corpus import arrow, packing

    assert arrow and packing
    project(work, corpus, processes, seq_length=SEQ_LENGTH, validation_splits=1, model_name=str(corpus / "model"))
    Path("data").mkdir()
    for name in ("corpus", "model.json"):
        Path("data", name).symlink_to(corpus / "data" / name)
    start = time.perf_counter()
    pack.pack(params.load(pack.PackParams), params.load(pack.PackRuntime, "runtime"))
    seconds = time.perf_counter() - start
    metrics = json.loads(Path("data/pack.json").read_text())
    return seconds, f"{text_bytes(corpus)} {metrics['train']['rows'] + metrics['validation']['rows']} rows"


def ceiling_pack(_: Path, corpus: Path, processes: int) -> tuple[float, str]:
    os.environ["RAYON_NUM_THREADS"] = str(processes)
    import datasets
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus / "model/tokenizer.json"))
    texts = list(datasets.load_from_disk(str(corpus / "data/corpus"))["text"])
    start = time.perf_counter()
    for first in range(0, len(texts), 1000):
        tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
    return time.perf_counter() - start, f"{text_bytes(corpus)}"


def text_bytes(corpus: Path) -> int:
    return sum(path.stat().st_size for path in (corpus / "data/corpus").glob("*.arrow"))


def prepare_pack(work: Path, corpus: Path, tokenizer: Path) -> Path:
    """A project with a part of a corpus and a model's manifest, for all of the measurements of `pack`."""
    from tokenizers import Tokenizer

    raw, target = work / f"{corpus.name}-part", work / f"{corpus.name}-project"
    raw.mkdir()
    target.mkdir()
    for path in some(files(corpus), 30):
        os.link(path, raw / path.name)
    model = target / "model"
    shutil.copytree(REPO / "models/tiny-llama", model)
    shutil.copyfile(tokenizer, model / "tokenizer.json")
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    (model / "config.json").write_text(json.dumps(config))
    script = (
        "from pathlib import Path; from benchmarks.data import project;"
        f"project(Path({str(target)!r}), Path({str(raw)!r}), 2, model_name={str(model)!r})"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    for stage in ("organize", "extract", "download"):
        subprocess.run([sys.executable, "-m", f"stages.{stage}"], env=environment, cwd=target, check=True)
    return target


# Running and showing


def measure(function: Callable[[Path, Path, int], tuple[float, str]], corpus: Path, processes: int) -> Measured:
    """Run one measurement in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        process = context.Process(target=send, args=(sender, function, Path(folder), corpus, processes))
        process.start()
        assert process.pid
        peak = 0
        while not receiver.poll(0.02) and process.is_alive():
            peak = max(peak, memory_of(psutil.Process(process.pid)))
        if not receiver.poll():
            raise SystemExit(f"{function.__name__} ended with status {process.exitcode}")
        seconds, text = receiver.recv()
        process.join()
        disk = size_of(Path(folder))
    size, _, note = text.partition(" ")
    return Measured(seconds, int(size) / MB, peak / MB, disk / MB, note)


def send(sender: Any, function: Callable[[Path, Path, int], Any], work: Path, corpus: Path, processes: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    sender.send(function(work, corpus, processes))


def memory_of(process: psutil.Process) -> int:
    """Resident bytes of a process and its descendants."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def compare(name: str, corpus: Path, functions: list[Callable[[Path, Path, int], tuple[float, str]]]) -> None:
    """Print the table of one format."""
    print(f"\n| {name} | processes | MB/s | of the recipe | of the ceiling | peak MB | disk MB | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for processes in (1, 2):
        results = [measure(function, corpus, processes) for function in functions]
        recipe, _, ceiling = results
        for label, result in zip(("(a) recipe", "(b) ours", "(c) ceiling"), results, strict=True):
            ratios = f"{result.rate / recipe.rate:.1f} x | {result.rate / ceiling.rate:.0%}"
            sizes = f"{result.peak:.0f} | {result.disk:.0f}"
            print(f"| {label} | {processes} | {result.rate:.1f} | {ratios} | {sizes} | {result.note} |", flush=True)


def compare_memory(work: Path, json_files: Path) -> None:
    """Print the peak for a corpus and for ten times as much."""
    peaks = []
    for times in (1, 10):
        corpus = work / f"memory-{times}"
        corpus.mkdir()
        for path in files(json_files):
            for copy in range(times):
                os.link(path, corpus / f"{copy}-{path.name}")
        result = measure(ours, corpus, 1)
        peaks.append(result.peak)
        print(f"\nmemory: {result.megabytes:.0f} MB of JSON, 1 process: peak {result.peak:.0f} MB")
    print(f"memory: ten times the corpus, {peaks[1] / peaks[0]:.2f} x the peak")


def organize_only(work: Path, corpus: Path, processes: int) -> tuple[float, str]:
    from stages import organize
    from stages.artifacts import params

    project(work, corpus, processes)
    start = time.perf_counter()
    organize.organize(params.load(organize.OrganizeParams), params.load(organize.OrganizeRuntime, "runtime"))
    return time.perf_counter() - start, "0"


def make_tree(target: Path, number: int) -> None:
    """Files of a hundred bytes, a thousand a folder."""
    for index in range(number):
        if index % 1000 == 0:
            folder = target / f"{index // 1000:04d}"
            folder.mkdir(parents=True)
        (folder / f"{index}.txt").write_text(f"file {index} " * 8)


def million_files(work: Path, number: int) -> None:
    make_tree(work / "tree", number)
    result = measure(organize_only, work / "tree", 2)
    print(f"organize: {number} files in {result.seconds:.1f} s, 2 processes, peak {result.peak:.0f} MB")


def noop(work: Path, number: int) -> None:
    """Time `dvc repro` with nothing to do, here and with one bare stage that depends on the same tree."""
    real, bare = work / "real", work / "bare"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (real / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, real / name)
    bare.mkdir()
    dvc = Path(sys.executable).with_name("dvc")
    environment = {**os.environ, "PATH": f"{dvc.parent}:{os.environ['PATH']}", "DVC_NO_ANALYTICS": "1"}
    stage = {"cmd": "touch out", "deps": ["data/raw"], "outs": ["out"]}
    (bare / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"bare": stage}}))
    subprocess.run(["git", "init", "-q"], cwd=real, check=True)
    subprocess.run(["git", "init", "-q"], cwd=bare, check=True)
    subprocess.run([dvc, "init", "-q"], cwd=bare, env=environment, check=True)
    seconds = {}
    for name, folder in (("ours", real), ("bare", bare)):
        make_tree(folder / "data/raw", number)
        for _ in range(3):  # the first runs the stages, the second fills the caches of DVC and of the disk
            start = time.perf_counter()
            target = ["extract"] if name == "ours" else []
            subprocess.run([dvc, "repro", "-q", *target], cwd=folder, env=environment, check=True)
            seconds[name] = time.perf_counter() - start
        print(f"no-op dvc repro over {number} files, {name}: {seconds[name]:.1f} s", flush=True)
    print(f"ours takes {seconds['ours'] / seconds['bare']:.2f} x the time of bare DVC")


def main() -> None:
    kinds = ("json", "yaml", "text", "pack", "memory")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--megabytes", type=int, default=100, help="of each corpus, at least")
    parser.add_argument("--botocore", type=Path, help="the folder of the package, if it is not installed")
    parser.add_argument("--work", type=Path, help="a folder for temporary files, on a fast disk")
    parser.add_argument(
        "--tokenizer", type=Path, default=REPO / "models/tiny-llama/tokenizer.json", help="a tokenizer.json for pack"
    )
    parser.add_argument("--million-files", type=int, metavar="N")
    parser.add_argument("--noop", type=int, metavar="N")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        if arguments.million_files:
            million_files(work, arguments.million_files)
        if arguments.noop:
            noop(work, arguments.noop)
        if arguments.million_files or arguments.noop:
            return
        compare_all(work, arguments.only, arguments.megabytes, arguments.botocore, arguments.tokenizer)


def compare_all(work: Path, kinds: list[str], megabytes: int, botocore: Path | None, tokenizer: Path) -> None:
    corpora = {name: work / name for name in ("json", "yaml", "text")}
    for corpus in corpora.values():
        corpus.mkdir()
    if {"json", "yaml", "pack", "memory"} & {*kinds}:
        if botocore is None:
            found = importlib.util.find_spec("botocore")
            if found is None or found.origin is None:
                raise SystemExit("botocore is not installed: `pip install .[bench]`, or name its folder: --botocore")
            botocore = Path(found.origin).parent
        make_json(corpora["json"], megabytes, botocore)
    if "yaml" in kinds:
        make_yaml(corpora["yaml"], megabytes, corpora["json"])
    if {"text", "pack"} & {*kinds}:
        make_text(corpora["text"], megabytes)
    if "json" in kinds:
        compare("JSON", corpora["json"], [recipe_json, ours, ceiling_json])
    if "yaml" in kinds:
        compare("YAML", corpora["yaml"], [recipe_yaml, ours, ceiling_yaml])
    if "text" in kinds:
        compare("text", corpora["text"], [recipe_text, ours, ceiling_text])
    if "pack" in kinds:
        for name in ("text", "json"):
            prepared = prepare_pack(work, corpora[name], tokenizer)
            compare(f"pack, {name}", prepared, [recipe_pack, ours_pack, ceiling_pack])
    if "memory" in kinds:
        compare_memory(work, corpora["json"])


if __name__ == "__main__":
    main()
