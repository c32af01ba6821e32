"""Divide the raw files into splits of equal count.

Reads    raw_dir: .txt .md .csv .json .jsonl .ndjson .yaml .yml, each also as .gz and .zst, in folders of any depth
Writes   data/splits/split_00.jsonl ...: a line a file with its path, size in bytes and SHA-256
         data/splits/summary.json: counts, and what was passed over and why
Command  python -m stages.organize
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from tqdm import tqdm

from stages.artifacts import command, params, publish
from stages.artifacts.command import StageError
from stages.corpus import formats, splits, tree, workers

SPLITS = Path("data/splits")
FILES_PER_TASK = 4096


@dataclass(frozen=True)
class OrganizeParams:
    """What decides the splits."""

    num_splits: Annotated[int, Field(ge=1, le=10_000)]
    """Parts that are worked on in parallel, and held out of training as a whole."""
    raw_dir: str
    """The folder of raw files, relative to the root of the project, or absolute."""


@dataclass(frozen=True)
class OrganizeRuntime:
    """What changes no result."""

    num_workers: Annotated[int, Field(ge=1)] | None
    """Processes that read the files; None: one a core."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
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
    tasks = [(root, paths[start : start + FILES_PER_TASK]) for start in range(0, len(paths), FILES_PER_TASK)]
    num_workers = workers.count(runtime.num_workers)
    with tqdm(total=len(paths), desc="organize", unit="file", disable=None) as progress:
        for readable, unreadable in workers.ordered_map(measure, tasks, num_workers):
            files += readable
            passed_over += unreadable
            progress.update(len(readable) + len(unreadable))
    if not files:
        reasons = Counter(item.reason for item in passed_over)
        found = ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items())) or "it is empty"
        raise StageError(
            f"raw_dir {options.raw_dir!r} holds no file that can be read ({found}): "
            f"put files there that end in {' '.join(formats.suffixes())}"
        )

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
                "passed_over_counts": dict(sorted(Counter(item.reason for item in passed_over).items())),
                "passed_over": [
                    {"path": tree.printable(item.path), "reason": item.reason} for item in sorted(passed_over)
                ],
            },
        )
    return (
        f"organize: {len(files)} files, {num_bytes / 1e6:.1f} MB, in {options.num_splits} splits; "
        f"{len(passed_over)} passed over (see {target / splits.SUMMARY})"
    )


def measure(task: tuple[Path, Sequence[str]]) -> tuple[list[splits.RawFile], list[tree.PassedOver]]:
    """Size and digest of each of some files, given the folder they are relative to; and those that cannot be read."""
    root, paths = task
    readable, unreadable = [], []
    for path in paths:
        try:
            readable.append(splits.RawFile(path, *tree.measure(root / path)))
        except OSError as error:
            unreadable.append(tree.PassedOver(path, f"unreadable: {error.strerror}"))
    return readable, unreadable


if __name__ == "__main__":
    command.run(main)
