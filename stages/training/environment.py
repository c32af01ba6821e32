"""Environment variables that torch, CUDA and NCCL read once, when they start.

Each rank sets them for itself: nodes may differ in TMPDIR. It does so before torch is imported, which sets one of them.
What a person has set stays.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from stages.base.errors import StageError
from stages.base.outputs import OUTPUTS
from stages.base.shared_disk import may_be_shared
from stages.training.params import TrainParams

COMPILE_CACHE = OUTPUTS / ".compile"
"""Compiled code, for all later launches on one machine, if the disk is its own; else it is below /tmp, as by default,
which may not outlive that."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_environment(params: TrainParams, num_nodes: int = 1) -> None:
    """Set the variables that `params` needs, except those that are already set.

    Args:
        params: Those of the training.
        num_nodes: On which it runs.

    Raises:
        StageError: another user of this node could put code into the cache of compiled code.
    """
    # Like the checkpoints, the cache is not in the copy that `dvc exp run --temp` deletes.
    cache = Path(os.environ.get("DVC_ROOT", "."), COMPILE_CACHE).resolve()
    # On a disk that nodes share, one finds files that another is still writing, or has removed (ESTALE). They may be
    # of one training, or of jobs of one node each.
    if is_private := num_nodes > 1 or may_be_shared(cache):
        # Its name has that of the node, as TMPDIR may be on such a disk, too.
        cache = Path(tempfile.gettempdir(), f"compile-{os.getuid()}-{os.uname().nodename}")
    chosen = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    if is_private and chosen == str(cache):
        _make_private(cache)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(chosen, "triton")))
    if not any(name in os.environ for name in _ALLOCATOR):
        # Segments that grow instead of new ones: sizes that vary leave no holes that nothing fits into.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if params.deterministic:
        # cuBLAS then sums in the same order in every run; torch refuses to be deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Sums inside the switches of NVLink and InfiniBand have no fixed order. Rings and trees have one, for the same
        # sizes on the same ranks.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("NCCL_COLLNET_ENABLE", "0")


def _make_private(directory: Path) -> None:
    """Make a directory below /tmp that only this user can write to: what is in it is executed."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StageError(
            f"{directory} is not a directory of this user alone, and compiled code would be read from it: remove it, "
            "or set TORCHINDUCTOR_CACHE_DIR to one that is"
        )
