"""Fetches files from the Hub into the model cache, so that an interrupted download continues where it stopped.

`snapshot_download` of huggingface_hub resumes only within one process: when it fails, it deletes what it has of each
file, up to eight shards of gigabytes. Here that stays as `blobs/DIGEST.incomplete`, and becomes a blob after its digest
was compared with the Hub's. The files come through HTTP from the Hub and the servers that it redirects to. Xet is
faster, but needs other servers, which firewalls refuse more often, and cannot resume either.
"""

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from stages.artifacts import command, file_lock, publish
from stages.artifacts.errors import StageError, naming
from stages.model import hub_cache

if TYPE_CHECKING:
    from huggingface_hub._tree_cache import TreeCacheEntry
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoSibling

_PASSING = (408, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 60
"""Seconds that the Hub may ask us to wait before we report it instead."""
_RETRIES = 5


class NotFetched(Exception):
    """The Hub was not reached, or refuses; the message is for people."""

    def __init__(self, message: str, needs_remedy: bool = False) -> None:
        super().__init__(message)
        self.needs_remedy = needs_remedy
        """Whether the message does not say what to do: get the files another way."""


class _Stopped(Exception):
    """Another file failed, or the user asked to stop."""


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn the errors of the client into sentences."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.errors import HTTPError as ClientError

    try:
        yield
    except HfHubHTTPError as error:
        # Never the error's text: it may quote the request's headers, and so the token.
        response = error.response
        status, code = response.status_code, response.headers.get("X-Error-Code")
        page = f"{constants.ENDPOINT}/{repo}"
        answer = f"the Hub answered {status} ({type(error).__name__})"
        has_token = get_token() is not None
        if code == "GatedRepo":
            whose = "the account of your token" if has_token else "your account, and set HF_TOKEN to a token of it"
            message = f"{answer}: the model is gated: accept its license at {page} with {whose}"
        elif code == "RevisionNotFound":
            message = f"{answer}: it has the model, but not this revision: set model_revision to one of {page}/commits"
        elif status == 401 and has_token and code is None:
            message = f"{answer}: it refuses your token: set HF_TOKEN to a valid one, or unset it"
        elif status in (401, 404) and code != "EntryNotFound":
            message = f"{answer}: there is no such model, or it is private: check the name; if private, set HF_TOKEN"
        elif status == 429:
            seconds = response.headers.get("Retry-After", "some")
            message = f"{answer}: it limits requests: run it again in {seconds} seconds; what is fetched is kept"
        else:
            raise NotFetched(answer, needs_remedy=True) from None
        raise NotFetched(message) from None
    # ValueError: a token with characters that no header may have; also, as KeyError, of a server that is not a Hub.
    except (ClientError, ValueError, KeyError) as error:
        raise NotFetched(f"the Hub was not reached ({type(error).__name__})", needs_remedy=True) from None


def fetch_listing(repo: str, revision: str, timeout: float) -> str:
    """Store in the cache which files a repository has, with their digests.

    Returns:
        The commit of the revision.

    Raises:
        NotFetched: the Hub was not reached, or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub._tree_cache import write_tree_cache
    from huggingface_hub.errors import HfHubHTTPError

    failures, info = 0, None
    while info is None:
        with _explained(repo):
            try:
                # The client itself has no limit of time.
                info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
            except HfHubHTTPError as error:
                failures += 1
                time.sleep(_wait(error, failures))
    assert info.sha is not None
    entries = {sibling.rfilename: _entry(sibling) for sibling in info.siblings or []}
    directory = hub_cache.repository(repo)
    hub_cache.snapshot(repo, info.sha).mkdir(parents=True, exist_ok=True)
    write_tree_cache(str(directory), info.sha, entries)
    if hub_cache.listing(repo, info.sha) is None:  # the library only logs that it could not write it
        raise StageError(f"{directory}/trees cannot be written: make room there, or set HF_HOME to another directory")
    if revision != info.sha:
        publish.write_text(directory / "refs" / revision, info.sha)  # without a line end, as the library writes it
    return info.sha


def fetch(repo: str, commit: str, names: Iterable[str], timeout: float, num_workers: int = 8) -> None:
    """Fetch files of a listed commit which the cache lacks.

    Raises:
        NotFetched: the Hub was not reached any more, or refuses.
        StageError: the disk has too little space, or what came is not what the Hub lists.
    """
    from huggingface_hub import constants

    entries = hub_cache.listing(repo, commit) or {}
    directory, snapshot = hub_cache.repository(repo), hub_cache.snapshot(repo, commit)
    (directory / "blobs").mkdir(exist_ok=True)  # a copy of the cache may have none
    missing = [name for name in names if not (snapshot / name).is_file()]
    blobs = {name: directory / "blobs" / (entries[name].lfs_sha256 or entries[name].blob_id) for name in missing}
    sizes = {blobs[name]: entries[name].lfs_size or entries[name].size for name in missing}
    todo = {blobs[name]: name for name in missing if not blobs[name].is_file()}  # two files can have the same content
    if todo:
        done = {blob: partial.stat().st_size for blob in todo if (partial := _partial(blob)).is_file()}
        total, initial = sum(sizes[blob] for blob in todo), sum(done.values())
        free = shutil.disk_usage(directory).free
        if total - initial > free:
            raise StageError(
                f"{repo} needs {command.format_gib(total - initial)} more in {directory}, where "
                f"{command.format_gib(free)} are free: make room, or set HF_HOME to a directory on a larger disk"
            )
        print(f"fetching {total - initial:,} bytes of {repo} from {constants.ENDPOINT}", flush=True)
        stop = threading.Event()
        with (
            tqdm(total=total, initial=initial, desc="fetch", unit="B", unit_scale=True, disable=None) as progress,
            ThreadPoolExecutor(num_workers) as pool,
        ):
            jobs = [pool.submit(_fetch, repo, commit, todo[blob], blob, sizes[blob], timeout, progress, stop)
                    for blob in todo]  # fmt: skip
            try:
                for job in as_completed(jobs):
                    with _explained(repo):
                        job.result()
            finally:  # after an error or Ctrl-C: the other files stop at their next chunk, and keep what they have
                stop.set()
                pool.shutdown(cancel_futures=True)
    for name, blob in blobs.items():
        _link(snapshot / name, blob)


def _fetch(
    repo: str, commit: str, name: str, blob: Path, size: int, timeout: float, progress: "tqdm[Any]",
    stop: threading.Event,
) -> None:  # fmt: skip
    """Fetch one file; what is there of it stays for the next run when it fails."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.errors import HTTPError as ClientError

    url = hf_hub_url(repo, name, revision=commit)
    # Whoever fetches the same file waits, as another project with the same cache; then the blob is there.
    with naming(_partial(blob)), _partial(blob).open("ab") as partial:
        if not file_lock.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB):
            print(f"waiting for another process that fetches {name} of {repo}", flush=True)
            file_lock.flock(partial, fcntl.LOCK_EX)
        if blob.is_file():
            return
        failures, attempts = 0, 2
        while attempts:
            before = partial.seek(0, os.SEEK_END)
            wait = 0.0
            if before != size:
                try:
                    _append(url, partial, before if before < size else 0, timeout, progress, stop)
                except HfHubHTTPError as error:
                    failures += 1
                    wait = _wait(error, failures)
                except ClientError:
                    failures = 1 if partial.tell() > before else failures + 1
                    if failures > _RETRIES:
                        raise
                    wait = _backoff(failures)
            if not wait:
                partial.flush()
                os.fsync(partial.fileno())
                digest = publish.sha256_file(_partial(blob))
                if hub_cache.is_of_digest(_partial(blob), blob.name, digest):
                    publish.rename(_partial(blob), blob)
                    return
                # What an earlier run has left may be damaged, or a server has sent another part than asked for.
                progress.update(-partial.tell())
                partial.truncate(0)
                attempts -= 1
            elif stop.wait(wait):
                raise _Stopped
    raise StageError(
        f"{name} of {repo} was received twice with another content than the Hub lists (digest {blob.name}): something "
        f"on the way changes it, such as a proxy or the mirror in HF_ENDPOINT; fetch it on another network"
    )


def _append(url: str, partial: Any, start: int, timeout: float, progress: "tqdm[Any]", stop: threading.Event) -> None:
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    # The client drops the token's header when the Hub redirects to another host.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        if response.status_code != 206:  # from the start, asked for or not
            progress.update(-partial.tell())
            partial.truncate(0)
        for chunk in response.iter_bytes():  # as they come: chunks of a size would lose the last one when it breaks
            if stop.is_set():
                raise _Stopped
            partial.write(chunk)
            progress.update(len(chunk))


def _wait(error: "HfHubHTTPError", failures: int) -> float:
    """Seconds to wait after an answer of the Hub that may be another one later; else the error is raised again."""
    response = error.response
    asked = response.headers.get("Retry-After", "")
    seconds = float(asked) if asked.isdigit() else _backoff(failures)
    if response.status_code not in _PASSING or failures > _RETRIES or seconds > _LONGEST_WAIT:
        raise error
    return max(seconds, 0.1)


def _backoff(failures: int) -> float:
    return min(2.0**failures / 4, 8)


def _entry(sibling: "RepoSibling") -> "TreeCacheEntry":
    from huggingface_hub._tree_cache import TreeCacheEntry

    size, sha256 = (sibling.lfs.size, sibling.lfs.sha256) if sibling.lfs else (None, None)
    # They become names of files.
    if sibling.size is None or not hub_cache.DIGEST.fullmatch(sha256 or sibling.blob_id or ""):
        raise StageError(
            "the server in HF_ENDPOINT does not list size and digest of its files: fetch the model with `hf download`, "
            "which does not check them"
        )
    return TreeCacheEntry(sibling.size, sibling.blob_id or "", sha256, size)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _link(path: Path, blob: Path) -> None:
    path.unlink(missing_ok=True)  # a link to a file that was deleted
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except FileExistsError:  # another process was faster
        return
    except OSError:  # of a file system without links
        shutil.copyfile(blob, path)
