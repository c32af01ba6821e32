"""Comparing files with their digests before the training reads them: each rank reads a share."""

import errno
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from stages.artifacts.shared_disk import refresh
from stages.training.distributed import run_on_all_ranks, run_on_rank0

ROUND_BYTES = 64 << 20
"""That a rank reads between two notes: 0.05 s from the page cache, a minute from a disk with 1 MB/s."""

_CHUNK_BYTES = 1 << 20


def find_damaged(files: Mapping[Path, str], note: Callable[[], None], round_bytes: int = ROUND_BYTES) -> list[Path]:
    """Those of `files` whose SHA-256 is not the given one; a collective, with the same result on all ranks.

    The ranks meet after every `round_bytes`. Otherwise those with less to read would wait in one collective, and look
    like ranks that hang, for as long as another one reads a large file.

    Args:
        files: Files that exist, with their SHA-256.
        note: Called before each round, to note progress for the watchdog.
        round_bytes: How much each rank reads in a round.

    Raises:
        StageError: a file cannot be read.
    """
    # Sorted on rank 0: where another machine still sees an old size, the shares would not add up to all files.
    by_size = run_on_rank0(lambda: sorted(files, key=lambda path: (-path.stat().st_size, path)))
    share = by_size[dist.get_rank() :: dist.get_world_size()]
    refresh({path.parent for path in share})  # another node may have written them a moment ago
    rounds = _read_in_rounds([(path, files[path]) for path in share], round_bytes)
    damaged: list[Path] = []
    while True:
        note()
        found = run_on_all_ranks(lambda: next(rounds, None))
        if all(part is None for part in found):
            return sorted(damaged)
        damaged += [path for part in found for path in part or ()]


def _read_in_rounds(share: Iterable[tuple[Path, str]], round_bytes: int) -> Iterator[list[Path]]:
    """Yields, after every `round_bytes` and at the end, the damaged files found since then."""
    damaged: list[Path] = []
    num_bytes = 0
    for path, expected in share:
        digest = hashlib.sha256()
        is_readable = True
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    if num_bytes >= round_bytes:
                        yield damaged
                        damaged, num_bytes = [], 0
        except OSError as error:
            if error.errno != errno.EIO:  # a bad block of the disk
                raise
            is_readable = False
        if not is_readable or digest.hexdigest() != expected:
            damaged.append(path)
    yield damaged
