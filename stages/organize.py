"""Divide the raw files into splits of equal count. Large JSON Lines files and tables are cut into parts.

Reads    raw_dir: text, JSON, YAML and tables (docs/data.md), also as .gz and .zst, in directories of any depth
Writes   data/splits/split_00.jsonl ...: a line for each file, or part of one, with path, size in bytes and SHA-256
         data/splits/summary.json: counts, and which files were skipped and why
Example  python -m stages.organize
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, NoReturn

from pydantic import Field
from tqdm import tqdm

from stages.base import command, publish
from stages.base.errors import StageError
from stages.base.names import is_inside, is_utf8, printable
from stages.base.origin import Origin
from stages.base.params_file import load_params
from stages.base.summary import counted, table
from stages.splits import assignment, parts, suffixes, tables, tree
from stages.splits import manifests as splits
from stages.work import workers

WRITTEN = (splits.SPLITS, *map(Path, ("data/corpus", "data/duplicates", "data/tokens", "data/.reuse", "outputs")))
"""The directories that stages write."""

IN_NO_SOURCE = "in none of sources"
"""Why a file is skipped."""
NUM_LISTED = 10_000
"""Files of each kind that the summary lists, which later stages read as a whole; it counts all."""
_NUM_PRINTED = 5
"""Kinds of skipped files that the stage prints; all files are in the summary."""

File = Sequence[splits.RawFile]
"""All parts of a raw file, in order, or the entire file alone."""


@dataclass(frozen=True)
class OrganizeParams:
    """What decides the splits."""

    num_splits: Annotated[int, Field(ge=1, le=10_000)]
    """How many splits each source has, which are processed in parallel. A split is held out entirely or not at all."""
    raw_dir: str
    """Directory of the raw files. It is relative to the root of the project, or absolute."""
    sources: Annotated[list[str], Field(min_length=1)] | None = None
    """Directories in `raw_dir` that `mixture` gives shares. null: all files are one source, without a name. Each has
    `num_splits` splits of its own. Other directories are not read."""


@dataclass(frozen=True)
class OrganizeRuntime(workers.Runtime):
    """What changes no result."""

    min_bytes: ClassVar[float] = 128 << 20
    """A byte is only hashed."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    with publish.lock(splits.SPLITS):
        print(organize(load_params(OrganizeParams), load_params(OrganizeRuntime, "runtime")))


def organize(
    params: OrganizeParams,
    runtime: OrganizeRuntime,
    target: Path = splits.SPLITS,
    files_per_task: int = 4096,
    smallest_part: int = parts.SMALLEST,
    num_listed: int = NUM_LISTED,
) -> str:
    """Write the manifests and the summary; return a table that describes them.

    Raises:
        StageError: `raw_dir` is not a directory of raw files, or contains no file that can be read.
    """
    root, sources = find_root(params.raw_dir), params.sources or []
    check_sources(root, sources)
    paths_of, passed_over = find_files(root, sources)
    file_of, part_sizes, unreadable = measure_files(
        root, paths_of, params.num_splits, runtime, files_per_task, smallest_part
    )
    passed_over += unreadable
    of_source = {source: [file_of[path] for path in own if path in file_of] for source, own in paths_of.items()}
    check_found(params.raw_dir, of_source, passed_over)
    files = [file_of[path] for path in sorted(file_of)]
    members = [
        split for source, found in of_source.items() for split in assign(found, params.num_splits, part_sizes[source])
    ]
    num_bytes = sum(part.size for file in files for part in file)
    num_parts = [len(file) for file in files if len(file) > 1]
    shares = [sum(part.size for part in member) / max(1, num_bytes) for member in members]
    # Replaced as a directory, so that no manifest of an earlier run with more splits stays.
    with publish.directory(target) as directory:
        splits.Summary(
            files=len(files),
            bytes=num_bytes,
            formats=count_formats(files),
            splits=[write_split(directory, index, member) for index, member in enumerate(members)],
            sources=sources,
            names_not_utf8=[printable(path) for path in map(path_of, files) if not is_utf8(path)][:num_listed],
            passed_over_counts=dict(sorted(Counter(item.reason for item in passed_over).items())),
            passed_over=[
                splits.PassedOver(printable(item.path), item.reason)
                for item in sorted(passed_over, key=tree.by_path)[:num_listed]
            ],
            origin=Origin.of("stages.organize", params),
        ).write(directory / splits.SUMMARY)
    cut_into = f", {counted(len(num_parts), 'file')} cut into {sum(num_parts)} parts" * bool(num_parts)
    return table(
        (len(files), "files", f"{num_bytes / 1e6:.1f} MB"),
        (len(members), "splits", f"{min(shares):.1%} to {max(shares):.1%} of the bytes each{cut_into}"),
        (len(passed_over), "skipped", f"{kinds(passed_over)}: see {target / splits.SUMMARY}" if passed_over else ""),
    )


def measure_files(
    root: Path,
    paths_of: Mapping[str, list[str]],
    num_splits: int,
    runtime: OrganizeRuntime,
    files_per_task: int,
    smallest_part: int,
) -> tuple[dict[str, File], dict[str, int], list[splits.PassedOver]]:
    """The raw files of all sources, by their paths; the size of parts of each source; and what cannot be read."""
    part_sizes: dict[str, int] = {}
    large: dict[str, tuple[int, int]] = {}
    for source, own in paths_of.items():  # each fills its own splits, however small it is beside the others
        part_sizes[source], sizes = find_large(root, own, num_splits, smallest_part)
        large |= {path: (size, part_sizes[source]) for path, size in sizes.items()}
    paths = [*chain.from_iterable(paths_of.values())]
    with tqdm(total=len(paths), desc="organize", unit="file", disable=None) as progress:
        cut = cut_all(root, large, runtime, progress)
        others = [path for path in paths if path not in cut]
        whole, unreadable = measure_all(root, others, runtime, files_per_task, progress)
    return {path_of(file): file for file in [*whole, *cut.values()]}, part_sizes, unreadable


def check_found(raw_dir: str, of_source: Mapping[str, list[File]], passed_over: Sequence[splits.PassedOver]) -> None:
    """Check that each source has a file.

    Raises:
        StageError: one has none that can be read.
    """
    if not any(of_source.values()):
        raise StageError(
            f"raw_dir {raw_dir!r} contains no file that can be read ({kinds(passed_over) or 'it is empty'}): "
            f"put files there that end in {' '.join(suffixes.FORMATS)}"
        )
    if empty := [source for source, found in of_source.items() if not found]:
        in_empty = tuple(f"{source}/" for source in empty)
        why = kinds([item for item in passed_over if f"{item.path}/".startswith(in_empty)])  # a source may be a link
        raise StageError(
            f"sources: {', '.join(empty)} has no file that is read ({why or 'it is empty'}): leave it out, or put "
            "files there"
        )


def find_files(root: Path, sources: Sequence[str]) -> tuple[dict[str, list[str]], list[splits.PassedOver]]:
    """The paths of the raw files of each source, in order, and what is skipped. Without sources all are of ""."""
    paths, passed_over = tree.walk(root, lambda name: suffixes.find(name) is not None)
    if metadata := tables.find_metadata(paths):
        paths = [path for path in paths if path not in metadata]
        passed_over += [splits.PassedOver(path, "about the data set of its directory") for path in metadata]
    if not sources:
        return {"": paths}, passed_over
    found: dict[str, list[str]] = {source: [] for source in [*sources, ""]}
    for path in paths:
        found[source_of(path, sources)].append(path)
    passed_over += [splits.PassedOver(path, IN_NO_SOURCE) for path in found.pop("")]
    return found, passed_over


def kinds(passed_over: Sequence[splits.PassedOver]) -> str:
    """How many files of which suffix were skipped, and of those with a suffix that is read, why; "": none.

    A directory of another format beside one README would otherwise train on the README.
    """

    def kind(item: splits.PassedOver) -> str:
        is_other = item.reason == tree.OTHER_SUFFIX
        return (printable(suffixes.ending(item.path)) or "without suffix") if is_other else item.reason

    shown = Counter(map(kind, passed_over)).most_common(_NUM_PRINTED)
    names = [f"{count} x {name}" for name, count in shown]
    if rest := len(passed_over) - sum(count for _, count in shown):
        names.append(f"{rest} of other kinds")
    return ", ".join(names)


def find_root(raw_dir: str) -> Path:
    """The directory of the raw files.

    Raises:
        StageError: it is not a directory, or stages write into it, so that each run would read what the last one wrote.
    """
    root = Path(raw_dir)
    if not raw_dir:  # which `Path` reads as the current directory
        raise StageError("raw_dir is empty: name the directory of the raw files, such as data/raw")
    if not root.is_dir():
        remedy = "name its directory" if root.exists() else "create it and put the raw files in it"
        raise StageError(f"raw_dir is {raw_dir!r}, which is not a directory: {remedy}")
    real_root = root.resolve()
    for place in (Path(), *WRITTEN):
        is_inside = real_root.is_relative_to(place.resolve()) and place != Path()  # data/raw is inside the project
        if is_inside or place.resolve().is_relative_to(real_root):
            raise StageError(
                f"raw_dir is {raw_dir!r}, which {'is in' if is_inside else 'contains'} "
                f"{'the project' if place == Path() else place}, where stages write: name a directory that has "
                "nothing but raw files, such as data/raw"
            )
    return root


def check_sources(root: Path, sources: Sequence[str]) -> None:
    """Check the names of sources.

    Raises:
        StageError: one is no directory in the directory of the raw files, or is there twice.
    """
    wrong = [name for name in sources if not (is_inside(name) and (root / name).is_dir())]
    twice = [name for name in sources if sources.count(name) > 1]
    if wrong or twice:
        directories = sorted(path.name for path in root.iterdir() if path.is_dir())
        raise StageError(
            f"sources has {(wrong or twice)[0]!r}: name each directory in {root} once, with / between directories and "
            f"none at the end; there are {', '.join(map(printable, directories)) or 'none'}"
        )


def source_of(path: str, sources: Sequence[str]) -> str:
    """The source of a raw file, the innermost directory of them; "": it is in none."""
    return max((source for source in sources if path.startswith(f"{source}/")), key=len, default="")


def path_of(file: File) -> str:
    """The path of a raw file."""
    return file[0].path


def find_large(root: Path, paths: Sequence[str], num_splits: int, smallest_part: int) -> tuple[int, dict[str, int]]:
    """The size of parts, in bytes, and the sizes of the files that are larger and may be cut, by their paths."""
    divisible = {path for path in paths if path.lower().endswith(suffixes.DIVISIBLE)}
    if not divisible:
        return smallest_part, {}  # a million files are spared the next line
    sizes = {path: tree.size(os.path.join(root, path)) for path in paths}
    # Of the bytes of all files: what is small beside the others need not be cut.
    part_size = parts.size_of(sum(sizes.values()), num_splits, smallest_part)
    return part_size, {path: size for path, size in sizes.items() if path in divisible and size > part_size}


def cut_all(
    root: Path,
    large: Mapping[str, tuple[int, int]],
    runtime: OrganizeRuntime,
    progress: "tqdm[NoReturn]",
) -> dict[str, File]:
    """The parts of each file that is cut, given the sizes in bytes of those that may be, and of their parts.

    A file that is not UTF-8 is not cut: its encoding depends on all of its bytes, so no part can be read alone. Nor is
    a table that is damaged.
    """
    tasks = {path: parts.tasks(root / path, size, part_size) for path, (size, part_size) in large.items()}
    cut: dict[str, File] = {}
    num_bytes = sum(size for size, _ in large.values())
    measuring = workers.ordered_map(parts.measure, [*chain.from_iterable(tasks.values())], runtime, num_bytes=num_bytes)
    with closing(measuring) as results:
        for path in tasks:
            measured = [next(results) for _ in tasks[path]]
            found = [part for several in measured for part in several or () if part.start < part.end]
            if None not in measured and len(found) > 1:  # otherwise `measure_all` finds out what it is
                cut[path] = parts.join(path, found)
                progress.update()
    return cut


def measure_all(
    root: Path, paths: Sequence[str], runtime: OrganizeRuntime, files_per_task: int, progress: "tqdm[NoReturn]"
) -> tuple[list[File], list[splits.PassedOver]]:
    """Size and SHA-256 of entire files, by the workers, and the files that cannot be read."""
    files: list[File] = []
    unreadable: list[splits.PassedOver] = []
    # Thousands of files a task: to pass a task to a process costs more than to read a small file.
    tasks = [(str(root), paths[start : start + files_per_task]) for start in range(0, len(paths), files_per_task)]
    # Results come in the order of the tasks, so the number of workers does not change the order of the files.
    # Many files are worth processes however small they are: a million of them are spared this sum.
    num_bytes = math.inf if len(tasks) > 4 else sum(tree.size(os.path.join(root, path)) for path in paths)
    with closing(workers.ordered_map(measure, tasks, runtime, num_bytes=num_bytes)) as results:
        for (_, batch), measured in zip(tasks, results, strict=True):
            for path, found in zip(batch, measured, strict=True):
                if isinstance(found, str):
                    unreadable.append(splits.PassedOver(path, found))
                else:
                    files.append([splits.RawFile(path, *found)])
            progress.update(len(batch))
    return files, unreadable


def assign(files: Sequence[File], num_splits: int, part_size: int) -> list[list[splits.RawFile]]:
    """The entire files and the parts of files of each split, in the order of their paths and places.

    Parts are assigned apart from entire files, because they are all about equally long: each split gets about the same
    number of bytes of them.
    """
    whole = [file[0] for file in files if len(file) == 1]
    cut = [part for file in files if len(file) > 1 for part in file]
    names = [parts.name(part, part_size) for part in cut]
    # The first splits stay empty where there are fewer files and parts than splits: the last ones are held out.
    first = max(0, num_splits - len(whole) - len(cut))
    # The parts begin where the entire files stopped, so that the counts of both together differ by at most one, too.
    split_of = [
        *assignment.assign([file.path for file in whole], num_splits, first).tolist(),
        *assignment.assign(names, num_splits, first + len(whole)).tolist(),
    ]
    members: list[list[splits.RawFile]] = [[] for _ in range(num_splits)]
    for file, split in zip([*whole, *cut], split_of, strict=True):
        members[split].append(file)
    return [sorted(member, key=splits.sort_key) for member in members]


def write_split(directory: Path, index: int, files: Sequence[splits.RawFile]) -> splits.Split:
    """Write the manifest of a split; return its entry in the summary."""
    name = splits.manifest_name(f"{index:02d}")
    digest = splits.write_manifest(directory / name, files)
    num_files = len({file.path for file in files})
    return splits.Split(manifest=name, files=num_files, bytes=sum(file.size for file in files), digest=digest)


def count_formats(files: Sequence[File]) -> dict[str, splits.Format]:
    """How many files there are of each format, and how large they are."""
    sizes: dict[str, list[int]] = {}
    for file in files:
        name = "".join(suffixes.find(path_of(file)) or ())
        sizes.setdefault(name, []).append(sum(part.size for part in file))
    return {name: splits.Format(len(found), sum(found)) for name, found in sorted(sizes.items())}


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


if __name__ == "__main__":
    command.run(main)
