"""Divide the raw files into splits of equal count.

Reads    raw_dir: .txt .md .csv .json .jsonl .ndjson .yaml .yml, each also as .gz and .zst, in folders of any depth
Writes   data/splits/split_00.jsonl ...: a line a file with its path, size in bytes and SHA-256
         data/splits/summary.json: counts, and what was passed over and why
Command  python -m stages.organize

With --materialize the splits are not made but laid out: data/materialized/split_00/ ... with the files themselves, for
tools that want folders.
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

from stages.artifacts import command, params, publish
from stages.artifacts.command import StageError
from stages.corpus import formats, splits, tree, workers

SPLITS = Path("data/splits")
MATERIALIZED = Path("data/materialized")
FILES_PER_TASK = 4096


@dataclass(frozen=True)
class OrganizeParams:
    """What decides the splits."""

    num_splits: Annotated[int, Field(ge=1, le=10_000)]
    """Parts that are worked on in parallel, and held out of training as a whole."""
    raw_dir: str
    """The folder of raw files, relative to the root of the project, or absolute."""
    deduplicate_files: bool
    """Of files with the same bytes only the first is taken, in the order of their paths."""


@dataclass(frozen=True)
class OrganizeRuntime(workers.Runtime):
    """What changes no result."""


def main() -> None:
    """Run the stage."""
    parser = command.parser(__doc__)
    parser.add_argument("--materialize", choices=("hardlink", "copy"), help="lay out the splits that are there")
    method = parser.parse_args().materialize
    if method:
        print(materialize(params.load(OrganizeParams), method))
        return
    print(organize(params.load(OrganizeParams), params.load(OrganizeRuntime, "runtime")))


def organize(options: OrganizeParams, runtime: OrganizeRuntime, target: Path = SPLITS) -> str:
    """Write the manifests and the summary; return a line that says what was found.

    Raises:
        StageError: `raw_dir` is no folder, or holds no file that can be read.
    """
    root = Path(options.raw_dir)
    if not root.is_dir():
        raise StageError(f"raw_dir is {options.raw_dir!r}, which is no folder: create it and put the raw files in it")
    paths, passed_over = tree.walk(root, lambda name: formats.find(name) is not None)
    files: list[splits.RawFile] = []
    tasks = [(str(root), paths[start : start + FILES_PER_TASK]) for start in range(0, len(paths), FILES_PER_TASK)]
    with tqdm(total=len(paths), desc="organize", unit="file", disable=None) as progress:
        for (_, batch), results in zip(tasks, workers.ordered_map(measure, tasks, runtime), strict=True):
            for path, found in zip(batch, results, strict=True):
                if isinstance(found, str):
                    passed_over.append(tree.PassedOver(path, found))
                else:
                    files.append(splits.RawFile(path, *found))
            progress.update(len(batch))
    if not files:
        reasons = Counter(item.reason for item in passed_over)
        found = ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items())) or "it is empty"
        raise StageError(
            f"raw_dir {options.raw_dir!r} holds no file that can be read ({found}): "
            f"put files there that end in {' '.join(formats.suffixes())}"
        )
    duplicates: list[dict[str, str]] = []
    if options.deduplicate_files:
        files, duplicates = deduplicate(files)
    split_of = splits.assign([file.path for file in files], options.num_splits)
    members: list[list[splits.RawFile]] = [[] for _ in range(options.num_splits)]
    for file, split in zip(files, split_of.tolist(), strict=True):
        members[split].append(file)
    names = [tree.printable(file.path) for file in files]
    num_bytes = sum(file.size for file in files)
    with publish.directory(target) as directory:
        digests = [
            splits.write_manifest(directory / splits.manifest_name(split), part) for split, part in enumerate(members)
        ]
        publish.write_json(
            directory / splits.SUMMARY,
            {
                "files": len(files),
                "bytes": num_bytes,
                "splits": [
                    {
                        "manifest": splits.manifest_name(split),
                        "files": len(part),
                        "bytes": sum(file.size for file in part),
                        "digest": digest,
                    }
                    for split, (part, digest) in enumerate(zip(members, digests, strict=True))
                ],
                "names_not_utf8": [name for name, file in zip(names, files, strict=True) if name != file.path],
                "duplicate_files": len(duplicates),
                "duplicates": duplicates,
                "passed_over_counts": dict(sorted(Counter(item.reason for item in passed_over).items())),
                "passed_over": [
                    {"path": tree.printable(item.path), "reason": item.reason} for item in sorted(passed_over)
                ],
            },
        )
    return (
        f"organize: {len(files)} files, {num_bytes / 1e6:.1f} MB, in {options.num_splits} splits; "
        + f"{len(duplicates)} duplicates dropped; " * options.deduplicate_files
        + f"{len(passed_over)} passed over (see {target / splits.SUMMARY})"
    )


def measure(task: tuple[str, Sequence[str]]) -> list[tuple[int, str] | str]:
    """Size and digest of each of some files, or why it cannot be read, given the folder they are relative to.

    With a million files it counts that the paths are joined as strings, and not sent back.
    """
    root, paths = task
    prefix = os.path.join(root, "")
    results: list[tuple[int, str] | str] = []
    for path in paths:
        try:
            results.append(tree.measure(prefix + path))
        except OSError as error:
            results.append(f"unreadable: {error.strerror}")
    return results


def deduplicate(files: Sequence[splits.RawFile]) -> tuple[list[splits.RawFile], list[dict[str, str]]]:
    """The first file of each content, and for each of the others its name and that of the first."""
    first_of: dict[str, splits.RawFile] = {}
    duplicates = []
    for file in files:
        first = first_of.setdefault(file.digest, file)
        if first is not file:
            duplicates.append({"path": tree.printable(file.path), "of": tree.printable(first.path)})
    return list(first_of.values()), duplicates


def materialize(
    options: OrganizeParams, method: Literal["hardlink", "copy"], source: Path = SPLITS, target: Path = MATERIALIZED
) -> str:
    """Lay out the files of each split in a folder of its own; return a line that says how many there are.

    A hard link is the raw file itself: who writes to one writes to both.

    Raises:
        StageError: there are no splits, a file is not what it was when they were made, or it cannot be linked.
    """
    if not (source / splits.SUMMARY).exists():
        raise StageError(f"{source / splits.SUMMARY} is missing: run `dvc repro organize`")
    num_files = 0
    with publish.directory(target) as directory:
        for part in publish.read_json(source / splits.SUMMARY)["splits"]:
            folder = directory / Path(part["manifest"]).stem
            folder.mkdir()
            for file in splits.read_manifest(source / part["manifest"], part["digest"]):
                # The real path, as a link to a link may lead nowhere from its new place.
                origin, place = os.path.realpath(Path(options.raw_dir, file.path)), folder / file.path
                place.parent.mkdir(parents=True, exist_ok=True)
                lay(origin, place, method)
                if tree.measure(place) != (file.size, file.digest):
                    raise StageError(
                        f"{tree.printable(file.path)} was changed after organize: run `dvc repro organize`"
                    )
                num_files += 1
    return f"organize: {num_files} files laid out in {target}"


def lay(origin: str, place: Path, method: Literal["hardlink", "copy"]) -> None:
    """Put a file at another place."""
    if method == "copy":
        shutil.copyfile(origin, place)
        return
    try:
        os.link(origin, place)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StageError(
            f"{tree.printable(origin)} cannot be linked ({error.strerror}): use --materialize copy"
        ) from None


if __name__ == "__main__":
    command.run(main)
