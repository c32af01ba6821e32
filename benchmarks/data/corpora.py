"""The corpora: JSON, YAML and text that come with Python packages."""

import gzip
import importlib.util
import json
import multiprocessing
import os
import shutil
import sysconfig
from pathlib import Path

import yaml

from benchmarks.data.measuring import MB

TEXT_SUFFIXES = (".py", ".md", ".rst", ".txt", ".h")


def make_json(target: Path, megabytes: int, botocore: Path | None) -> None:
    """Write the service descriptions of botocore, decompressed; `botocore` is the directory of the package."""
    data = (botocore or _find_botocore()) / "data"
    for path in sorted(data.rglob("*.json*")):
        content = path.read_bytes()
        name = "--".join(path.relative_to(data).parts)
        (target / name.removesuffix(".gz")).write_bytes(gzip.decompress(content) if path.suffix == ".gz" else content)
    _complete(target, megabytes)


def _find_botocore() -> Path:
    spec = importlib.util.find_spec("botocore")
    if spec is None or spec.origin is None:
        raise SystemExit("botocore is not installed: run `pip install .[bench]` or pass its directory as --botocore")
    return Path(spec.origin).parent


def make_yaml(target: Path, megabytes: int, json_corpus: Path) -> None:
    """Write the documents of the JSON corpus as YAML, until there are enough."""
    num_bytes = 0
    tasks = [(path, target) for path in files_in(json_corpus)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for size in pool.imap_unordered(_dump_yaml, tasks, chunksize=8):
            num_bytes += size
            if num_bytes >= megabytes * MB:
                break
    for unfinished in target.glob(".*"):
        unfinished.unlink()
    _complete(target, megabytes)


def _dump_yaml(task: tuple[Path, Path]) -> int:
    path, target = task
    text = yaml.dump(json.loads(path.read_bytes()), Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    # The pool is terminated as soon as there is enough: the rename keeps partly written files out of the corpus.
    temporary = target / f".{path.stem}"
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(target / f"{path.stem}.yaml")
    return len(text)


def make_text(target: Path, megabytes: int) -> None:
    """Copy sources and notes of the installed Python packages, each file once, its bytes unchanged."""
    num_bytes = 0
    packages = Path(sysconfig.get_paths()["purelib"])
    for number, path in enumerate(sorted(packages.rglob("*"))):
        if path.suffix in TEXT_SUFFIXES and path.is_file() and num_bytes < megabytes * MB:
            shutil.copyfile(path, target / f"{number}.txt")
            num_bytes += path.stat().st_size
    _complete(target, megabytes)


def _complete(target: Path, megabytes: int) -> None:
    """Link all files under further names until the corpus has at least so many megabytes."""
    originals = files_in(target)
    times = -(-megabytes * MB // total_size(originals))
    for copy in range(1, times):
        link_all(originals, target, prefix=f"{copy}-")
    paths = files_in(target)
    print(f"{target.name}: {total_size(paths) / MB:.0f} MB in {len(paths)} files, each original {times} x")


def link_all(paths: list[Path], target: Path, prefix: str = "") -> None:
    for path in paths:
        os.link(path, target / f"{prefix}{path.name}")


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def total_size(paths: list[Path]) -> int:
    """Bytes of files; a file with several names counts once for each of them."""
    return sum(path.stat().st_size for path in paths)


def text_size(project: Path) -> int:
    """Bytes of the text that was extracted in a project."""
    return total_size([*(project / "data/corpus").glob("*.arrow")])


def sample(paths: list[Path], megabytes: float) -> list[Path]:
    """Files at equal distances in the corpus that together have about so many megabytes."""
    return paths[:: max(1, round(total_size(paths) / megabytes / MB))]


def make_tree(target: Path, num_files: int) -> None:
    """Write files of about a hundred bytes, a thousand in each directory."""
    for index in range(num_files):
        if index % 1000 == 0:
            directory = target / f"{index // 1000:04d}"
            directory.mkdir(parents=True)
        (directory / f"{index}.txt").write_text(f"file {index} " * 8)
