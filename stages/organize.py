"""Divide the raw files into splits of equal count.

Reads    raw_dir: .txt .md .csv .json .jsonl .ndjson .yaml .yml, each also as .gz and .zst, in directories of any depth
Writes   data/splits/split_00.jsonl ...: a line a file with its path, size in bytes and SHA-256
         data/splits/summary.json: counts, and which files were passed over and why
Command  python -m stages.organize

With --materialize the splits are not made but laid out: data/materialized/split_00/ ... with the files themselves, for
tools that need directories.
"""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from tqdm import tqdm

from stages.artifacts import command, publish
from stages.artifacts.errors import StageError
from stages.artifacts.params_file import load_params
from stages.corpus import assignment, splits, tree, workers
from stages.corpus.formats import suffixes

MATERIALIZED = Path("data/materialized")


@dataclass(frozen=True)
class OrganizeParams:
    """What decides the splits."""

    num_splits: Annotated[int, Field(ge=1, le=10_000)]
    """Parts that are processed in parallel. A part is held out of training entirely or not at all."""
    raw_dir: str
    """The directory of raw files, relative to the root of the project, or absolute."""
    deduplicate_files: bool
    """Of files with the same bytes only the first is kept, in the order of their paths."""


@dataclass(frozen=True)
class OrganizeRuntime(workers.Runtime):
    """What changes no result."""


def main() -> None:
    """Run the stage."""
    parser = command.parser(__doc__)
    parser.add_argument("--materialize", choices=("hardlink", "copy"), help="lay out the splits that exist")
    method = parser.parse_args().materialize
    if method:
        print(materialize(load_params(OrganizeParams), method))
        return
    print(organize(load_params(OrganizeParams), load_params(OrganizeRuntime, "runtime")))


def organize(
    params: OrganizeParams, runtime: OrganizeRuntime, target: Path = splits.SPLITS, files_per_task: int = 4096
) -> str:
    """Write the manifests and the summary; return a line that describes them.

    Raises:
        StageError: `raw_dir` is not a directory, or contains no file that can be read.
    """
    root = Path(params.raw_dir)
    if not root.is_dir():
        raise StageError(
            f"raw_dir is {params.raw_dir!r}, which is not a directory: create it and put the raw files in it"
        )
    paths, passed_over = tree.walk(root, lambda name: suffixes.find(name) is not None)
    files, unreadable = measure_all(root, paths, runtime, files_per_task)
    passed_over += unreadable
    reasons = dict(sorted(Counter(item.reason for item in passed_over).items()))
    if not files:
        found = ", ".join(f"{count} x {reason}" for reason, count in reasons.items()) or "it is empty"
        raise StageError(
            f"raw_dir {params.raw_dir!r} contains no file that can be read ({found}): "
            f"put files there that end in {' '.join(suffixes.FORMATS)}"
        )
    # Before the assignment, so that the splits have equal counts of the files that are left.
    duplicates: list[splits.Duplicate] = []
    if params.deduplicate_files:
        files, duplicates = deduplicate(files)
    split_of = assignment.assign([file.path for file in files], params.num_splits)
    members: list[list[splits.RawFile]] = [[] for _ in range(params.num_splits)]
    for file, split in zip(files, split_of.tolist(), strict=True):
        members[split].append(file)  # in the order of the paths, as `files` is
    names = [splits.printable(file.path) for file in files]
    num_bytes = sum(file.size for file in files)
    # Replaced as a directory, so that no manifest of an earlier run with more splits stays.
    with publish.directory(target) as directory:
        splits.Summary(
            files=len(files),
            bytes=num_bytes,
            splits=[write_split(directory, index, part) for index, part in enumerate(members)],
            names_not_utf8=[name for name, file in zip(names, files, strict=True) if name != file.path],
            duplicate_files=len(duplicates),
            duplicates=duplicates,
            passed_over_counts=reasons,
            passed_over=[
                splits.PassedOver(splits.printable(item.path), item.reason)
                for item in sorted(passed_over, key=tree.by_path)
            ],
        ).write(directory / splits.SUMMARY)
    return (
        f"organize: {len(files)} files, {num_bytes / 1e6:.1f} MB, in {params.num_splits} splits; "
        + f"{len(duplicates)} duplicates dropped; " * params.deduplicate_files
        + f"{len(passed_over)} passed over (see {target / splits.SUMMARY})"
    )


def measure_all(
    root: Path, paths: Sequence[str], runtime: OrganizeRuntime, files_per_task: int
) -> tuple[list[splits.RawFile], list[splits.PassedOver]]:
    """Size and SHA-256 of all files, by the workers, and the files that cannot be read."""
    files: list[splits.RawFile] = []
    unreadable: list[splits.PassedOver] = []
    # Thousands of files a task: to pass a task to a process costs more than to read a small file.
    tasks = [(str(root), paths[start : start + files_per_task]) for start in range(0, len(paths), files_per_task)]
    with tqdm(total=len(paths), desc="organize", unit="file", disable=None) as progress:
        # Results come in the order of the tasks, so the number of workers does not change the order of the files.
        for (_, batch), results in zip(tasks, workers.ordered_map(measure, tasks, runtime), strict=True):
            for path, found in zip(batch, results, strict=True):
                if isinstance(found, str):
                    unreadable.append(splits.PassedOver(path, found))
                else:
                    files.append(splits.RawFile(path, *found))
            progress.update(len(batch))
    return files, unreadable


def write_split(directory: Path, index: int, files: Sequence[splits.RawFile]) -> splits.Split:
    """Write the manifest of a split; return its entry in the summary."""
    name = f"split_{index:02d}.jsonl"
    digest = splits.write_manifest(directory / name, files)
    return splits.Split(manifest=name, files=len(files), bytes=sum(file.size for file in files), digest=digest)


def measure(task: tuple[str, Sequence[str]]) -> list[tuple[int, str] | str]:
    """Size and digest of each of some files, or why it cannot be read, given the directory they are relative to.

    The results have no paths, which the stage knows, and paths are joined as strings: both count with a million files.
    """
    root, paths = task
    prefix = os.path.join(root, "")
    results: list[tuple[int, str] | str] = []
    for path in paths:
        try:
            results.append(tree.measure(prefix + path))
        except OSError as error:  # listed, not raised: one file without read permission must not hide the others
            results.append(f"unreadable: {error.strerror}")
    return results


def deduplicate(files: Sequence[splits.RawFile]) -> tuple[list[splits.RawFile], list[splits.Duplicate]]:
    """The first file of each content, and the others."""
    first_of: dict[str, splits.RawFile] = {}
    duplicates = []
    for file in files:
        first = first_of.setdefault(file.digest, file)  # `files` is sorted, so the first is the same on every machine
        if first is not file:
            duplicates.append(splits.Duplicate(path=splits.printable(file.path), of=splits.printable(first.path)))
    return list(first_of.values()), duplicates


def materialize(
    params: OrganizeParams,
    method: Literal["hardlink", "copy"],
    source: Path = splits.SPLITS,
    target: Path = MATERIALIZED,
) -> str:
    """Lay out the files of each split in a directory of its own; return a line with their number.

    A hard link is the raw file itself: writing to one writes to both.

    Raises:
        StageError: there are no splits, a file was changed since they were made, or it cannot be linked.
    """
    num_files = 0
    summary = splits.Summary.read(source / splits.SUMMARY)
    with publish.directory(target) as directory:
        for split in summary.splits:
            split_directory = directory / Path(split.manifest).stem
            split_directory.mkdir()
            for file in splits.read_manifest(source / split.manifest, split.digest):
                # The real path: a hard link to a symbolic link would be one itself, and broken in its new place.
                origin, place = os.path.realpath(Path(params.raw_dir, file.path)), split_directory / file.path
                place.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(origin, place, method)
                # After it is in its place: a change while it was copied is found, too.
                if tree.measure(place) != (file.size, file.digest):
                    raise StageError(
                        f"{splits.printable(file.path)} was changed after organize: run `dvc repro organize`"
                    )
                num_files += 1
    return f"organize: {num_files} files laid out in {target}"


def link_or_copy(origin: str, place: Path, method: Literal["hardlink", "copy"]) -> None:
    """Put a file at another place."""
    if method == "copy":
        shutil.copyfile(origin, place)
        return
    try:
        os.link(origin, place)
    except FileNotFoundError:  # the file is gone: copying would fail as well
        raise
    except OSError as error:
        raise StageError(
            f"{splits.printable(origin)} cannot be linked ({error.strerror}): use --materialize copy"
        ) from None


if __name__ == "__main__":
    command.run(main)
