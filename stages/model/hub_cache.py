"""The model cache: where it is, whether the network may be used, and the Hub's digests of its files.

Its layout is that of huggingface_hub, so that `hf download` and other tools can have filled it:

    models--OWNER--NAME/blobs/DIGEST             the files, each under the digest that the Hub lists for it
    models--OWNER--NAME/snapshots/COMMIT/FILE    links to them, or copies
    models--OWNER--NAME/refs/BRANCH              the commit of a branch
    models--OWNER--NAME/trees/COMMIT.json        all files of the repository, with git's digests; older tools write none
"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from stages.base.errors import StageError
from stages.model.files import MORE_TEMPLATES

_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""SHA-1 or SHA-256. A blob of another name has none."""
_DEFAULT = ".hf/hub"
_LOCATIONS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def directory() -> Path:
    """The cache that HF_HOME or HF_HUB_CACHE names; where none is set, `.hf/hub` in the project.

    A relative path is resolved against `$DVC_ROOT`, which DVC sets, so that experiments, which run in copies of the
    project, share one cache. The default is not that of huggingface_hub, which is in the home directory:
    that is small on many clusters, and not part of the project that is carried to them.
    """
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE if _is_named() else _DEFAULT
    return Path(os.environ.get("DVC_ROOT", "."), cache).absolute()


def _is_named() -> bool:
    return any(os.environ.get(name) for name in _LOCATIONS)


def offline_variable() -> str | None:
    """The environment variable that forbids the network, if there is one.

    Of the libraries, each only looks for its own, so all three must be checked here.
    """
    return next((name for name in _OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def repository(repo: str) -> Path:
    """The directory of one model.

    Where the environment names no cache, that is one in the home directory if only that has it: `hf download` puts it
    there, and it need not be fetched again.
    """
    from huggingface_hub import constants

    name = f"models--{repo.replace('/', '--')}"
    path, other = directory() / name, Path(constants.HF_HUB_CACHE, name)
    return other if not _is_named() and not path.is_dir() and other.is_dir() else path


def snapshot(repo: str, commit: str) -> Path:
    """The directory of the files of a commit."""
    return repository(repo) / "snapshots" / commit


def commits(repo: str) -> list[str]:
    """The commits of which the cache has at least some files, in order."""
    return sorted(path.name for path in (repository(repo) / "snapshots").glob("*") if path.is_dir())


def listing(repo: str, commit: str) -> dict[str, str] | None:
    """Git's SHA-1 of each file in the root of a repository, and of its chat templates; None where no list is cached."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(repo, revision=commit, cache_dir=repository(repo).parent)
    except CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.blob_id for file in files if "/" not in file.path.removeprefix(f"{MORE_TEMPLATES}/")}


def check(repo: str, commit: str, name: str, sha256: str) -> None:
    """Compare a cached file with the Hub's list, or, where the cache lacks that, with the digest in its name.

    Args:
        repo: The Hub id.
        commit: The commit of the snapshot.
        name: The file in it.
        sha256: The digest of its content, so that it need not be read twice.

    Raises:
        StageError: the file is damaged, or the Hub does not list it.
    """
    path = snapshot(repo, commit) / name
    files = listing(repo, commit)
    if files is not None and name not in files:  # it would count as a part of the commit
        raise StageError(f"{path} is not a file of {repo} at commit {commit}: delete it, or use a local copy")
    # Without list and links, as in a copy, nothing is known of it.
    expected = path.resolve().name if files is None else files[name]
    if _DIGEST.fullmatch(expected) and expected != sha256 and expected not in _git_digests(path, sha256):
        raise StageError(
            f"{path.resolve()} is damaged: it is {name} of {repo}, for which the Hub lists the digest {expected}. "
            "Delete it, and run `python -m stages.download` on a machine with internet, or put a good copy in its place"
        )


def _git_digests(path: Path, sha256: str) -> Iterator[str]:
    """Those of a file in git: of a large one as a pointer, and of a small one as it is.

    Mirrors that are no git servers have the SHA-1 of a small file without the header that git puts before it.
    """
    size = path.stat().st_size
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (sha256.encode(), size)
    yield hashlib.sha1(b"blob %d\0" % len(pointer) + pointer, usedforsecurity=False).hexdigest()
    for header in (b"blob %d\0" % size, b""):
        digest = hashlib.sha1(header, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        yield digest.hexdigest()
