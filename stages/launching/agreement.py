"""Whether the ranks agree before a training: on what they train, and where its checkpoints and locks lie.

Also: whether all files have their digests, of which each rank compares a share.
"""

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from stages.base import publish
from stages.base.errors import StageError
from stages.base.file_lock import exclusive, open_lock, try_exclusive
from stages.base.files import DamagedFile, compare, damaged
from stages.base.identity import RunIdentity
from stages.base.shared_disk import refresh, wait_for_file
from stages.checkpointing.run import Run, differences, packages
from stages.forward.distributed import run_on_all_ranks, run_on_rank0
from stages.launching.runtime import TrainRuntime
from stages.model.manifest import REMEDY, ModelManifest

_PREFIX = ".shared-"


@dataclass(frozen=True)
class _Facts(RunIdentity):
    """What must be the same on all ranks."""

    runtime: TrainRuntime
    packages: dict[str, str]


def refuse_different_ranks(run: Run, runtime: TrainRuntime) -> None:
    """Compare what the ranks train, and with which packages; a collective.

    Raises:
        StageError: naming the ranks and what differs from rank 0.
    """
    own = _Facts(**vars(run.identity), runtime=runtime, packages=packages(run.identity.params))
    first, *others = run_on_all_ranks(lambda: own)
    lines = [
        f"rank {rank} differs from rank 0: {line}"
        for rank, theirs in enumerate(others, start=1)
        if theirs != first
        for line in differences(first, theirs)
    ]
    if lines:
        raise StageError(*lines)


def check_shared(directory: Path) -> list[str]:
    """Check that all nodes see a file that rank 0 makes in `directory`, within three seconds; a collective.

    Nodes that have a directory each would save a part of each checkpoint, which none of them could load.

    Returns:
        Warnings: of nodes that could lock what rank 0 has locked.

    Raises:
        StageError: naming the nodes that do not see the file.
    """
    if dist.get_world_size() == int(os.environ["LOCAL_WORLD_SIZE"]):
        return []
    with ExitStack() as stack:

        def make() -> Path:
            for leftover in directory.glob(f"{_PREFIX}*"):  # of a killed training
                leftover.unlink(missing_ok=True)
            path = directory / f"{_PREFIX}{secrets.token_hex(4)}"  # a new name: no node remembers that it was missing
            stack.callback(path.unlink, missing_ok=True)
            exclusive(stack.enter_context(open_lock(path)))
            return path

        path = run_on_rank0(make)
        nodes = run_on_all_ranks(lambda: _look(path) if os.environ["LOCAL_RANK"] == "0" else None)
    found = [node for node in nodes if node is not None]
    if blind := [name for name, is_seen, _ in found if not is_seen]:
        raise StageError(
            f"node {', '.join(blind)} does not see what rank 0, on node {found[0][0]}, writes into {directory}: put "
            "the checkpoints on a disk that all nodes share (set CHECKPOINT_ROOT)"
        )
    unlocked = ", ".join(name for name, _, is_locked in found if not is_locked)
    return [
        f"warning: node {unlocked} does not see locks that node {found[0][0]} holds in {directory}: never start this "
        "run twice at once, or mount its file system with locks that all nodes see (docs/shared-disks.md)"
    ] if unlocked else []  # fmt: skip


def _look(path: Path) -> tuple[str, bool, bool]:
    """The name of this node, whether it sees a file, and whether it sees that it is locked."""
    node = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    if not wait_for_file(path, 0, seconds=3):
        return node, False, False
    with open_lock(path) as lock:
        return node, True, not try_exclusive(lock)


VERIFIED = ".verified-tokens.json"
"""In the directory of a run: the tokens that were compared with their digests, with sizes and times."""

ROUND_BYTES = 64 << 20
"""That a rank reads between two notes: 0.05 s from the page cache, a minute from a disk with 1 MB/s."""

_CHUNK_BYTES = 1 << 20


def check_together(
    files: Mapping[Path, str], remedy: str, note: Callable[[], None], round_bytes: int = ROUND_BYTES
) -> None:
    """Compare files with their SHA-256, as `check_files` does; a collective, with the same result on all ranks.

    The ranks meet after every `round_bytes`. Otherwise those with less to read would wait in one collective, and look
    like ranks that hang, for as long as another one reads a large file.

    Args:
        files: Files that exist, with their SHA-256.
        remedy: What to do about one that differs.
        note: Called before each round, to note progress for the watchdog.
        round_bytes: How much each rank reads in a round.

    Raises:
        DamagedFile: naming the file that has another content, or a part that cannot be read.
        StageError: a file cannot be read now.
    """
    # Sorted on rank 0: where another machine still sees an old size, the shares would not add up to all files.
    by_size = run_on_rank0(lambda: sorted(files, key=lambda path: (-path.stat().st_size, path)))
    share = by_size[dist.get_rank() :: dist.get_world_size()]
    refresh({path.parent for path in share})  # another node may have written them a moment ago
    rounds = _read_in_rounds([(path, files[path]) for path in share], remedy, round_bytes)
    problems: list[str] = []
    while True:
        note()
        found = run_on_all_ranks(lambda: next(rounds, None))
        if all(part is None for part in found):
            break
        problems += [problem for part in found for problem in part or ()]
    if problems:
        raise DamagedFile(min(problems))


def check_once(files: Mapping[Path, str], record: Path, remedy: str, note: Callable[[], None]) -> None:
    """As `check_together`, but of the files that were compared before, and have the same size and times, none is read.

    Args:
        files: As for `check_together`.
        record: A file with the sizes and times of those that were compared.
        remedy: As for `check_together`.
        note: As for `check_together`.
    """

    def look() -> tuple[dict[str, object], dict[str, list[str | int]]]:
        refresh({record.parent, *(path.parent for path in files)})
        return _known(record), {str(path): _stamp(path, digest) for path, digest in files.items()}

    known, found = run_on_rank0(look)
    changed = {path: digest for path, digest in files.items() if known.get(str(path)) != found[str(path)]}
    if changed:
        check_together(changed, remedy, note)
        run_on_rank0(lambda: publish.write_json(record, found))  # of before they were read


def _known(record: Path) -> dict[str, object]:
    try:
        content = publish.read_json(record)
    except (FileNotFoundError, publish.Unreadable, ValueError):  # then all are read
        return {}
    return content if isinstance(content, dict) else {}


def _stamp(path: Path, digest: str) -> list[str | int]:
    found = path.stat()
    return [digest, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def verify_weights(manifest: ModelManifest, note: Callable[[], None]) -> None:
    """Compare the files of the initial weights with their digests; a collective, as `check_together`."""
    directory = run_on_rank0(lambda: manifest.verify(manifest.weights, contents=False))
    check_together({directory / name: manifest.files[name].sha256 for name in manifest.weights}, REMEDY, note)


def _read_in_rounds(share: Iterable[tuple[Path, str]], remedy: str, round_bytes: int) -> Iterator[list[str]]:
    """Yields, after every `round_bytes` and at the end, the errors of the damaged files found since then."""
    problems: list[str] = []
    num_bytes = 0
    for path, expected in share:
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    if num_bytes >= round_bytes:
                        yield problems
                        problems, num_bytes = [], 0
            compare(path, expected, digest.hexdigest(), remedy)
        except DamagedFile as error:
            problems.append(str(error))
        except OSError as error:
            if error.errno != errno.EIO:  # a bad block of the disk
                raise
            problems.append(str(damaged(path, "a part of it cannot be read", remedy)))
    yield problems
