"""Fetches files from the Hub into the model cache, so that an interrupted download continues where it stopped.

`snapshot_download` of huggingface_hub resumes only within one process: when it fails, it deletes what it has of each
file, up to eight shards of gigabytes. Here that stays as `blobs/DIGEST.incomplete`, and becomes a blob after its digest
was compared with the Hub's. The files come through HTTP from the Hub and the servers that it redirects to. Xet is
faster, but needs other servers, which firewalls refuse more often, and cannot resume either.
"""

import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

from pydantic import Field, TypeAdapter, ValidationError
from tqdm import tqdm

from stages.artifacts import command, file_lock, publish
from stages.artifacts.errors import StageError, naming
from stages.artifacts.record import first_problem
from stages.model import hub_cache

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_PASSING = (408, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 60
"""Seconds that the Hub may ask us to wait before we report it instead."""
_RETRIES = 5

_Size = Annotated[int, Field(ge=0)]
_Sha1 = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class _LargeFile:
    sha256: _Sha256
    size: _Size


@dataclass(frozen=True)
class _File:
    rfilename: str
    size: _Size
    blob_id: Annotated[str, Field(validation_alias="blobId", pattern=f"^({hub_cache.DIGEST.pattern})$")]
    lfs: _LargeFile | None = None


@dataclass(frozen=True)
class _Model:
    """What the Hub answers about a model. Commits and digests become names of files, so nothing else may be in them."""

    sha: _Sha1
    siblings: list[_File]


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
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.errors import HTTPError as ClientError

    try:
        yield
    except HfHubHTTPError as error:
        # Never the error's text: it may quote the request's headers, and so the token.
        response = error.response
        status, code = response.status_code, response.headers.get("X-Error-Code")
        page = f"{_endpoint()}/{repo}"
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
    except (ClientError, ValueError) as error:  # ValueError: a token with characters that no header may have
        raise NotFetched(f"the Hub was not reached ({type(error).__name__})", needs_remedy=True) from None


def fetch_listing(repo: str, revision: str, timeout: float) -> str:
    """Store in the cache which files a repository has, with their digests.

    Returns:
        The commit of the revision.

    Raises:
        NotFetched: the Hub was not reached, or refuses.
    """
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

    model = _model(repo, revision, timeout)
    entries = {}
    for file in model.siblings:
        sha256, size = (file.lfs.sha256, file.lfs.size) if file.lfs else (None, None)
        entries[file.rfilename] = TreeCacheEntry(file.size, file.blob_id, sha256, size)
    directory = hub_cache.repository(repo)
    hub_cache.snapshot(repo, model.sha).mkdir(parents=True, exist_ok=True)
    write_tree_cache(str(directory), model.sha, entries)
    if hub_cache.listing(repo, model.sha) is None:  # the library only logs that it could not write it
        raise StageError(f"{directory}/trees cannot be written: make room there, or set HF_HOME to another directory")
    if revision != model.sha:
        publish.write_text(directory / "refs" / revision, model.sha)  # without a line end, as the library writes it
    return model.sha


def _model(repo: str, revision: str, timeout: float) -> _Model:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    # Not through `HfApi`, which checks no types: a server that is no Hub would end in any kind of error.
    url = f"{constants.ENDPOINT}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
    failures, content = 0, None
    while content is None:
        with _explained(repo):
            try:
                response = get_session().get(url, headers=build_hf_headers(), timeout=timeout)
                hf_raise_for_status(response)
                content = response.content
            except HfHubHTTPError as error:
                failures += 1
                time.sleep(_wait(error, failures))
    try:
        return TypeAdapter(_Model).validate_json(content)
    except ValidationError as error:
        raise NotFetched(
            f"{_endpoint()} does not answer as the Hub does ({first_problem(error)}): correct HF_ENDPOINT, or, if it "
            "is a mirror without digests, fetch the model with `hf download`, which does not compare them"
        ) from None


def _endpoint() -> str:
    """The Hub's address for people: without the password that HF_ENDPOINT may have."""
    from huggingface_hub import constants

    url = urlsplit(constants.ENDPOINT)
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()


def fetch(repo: str, commit: str, names: Iterable[str], timeout: float, num_workers: int = 8) -> None:
    """Fetch files of a listed commit which the cache lacks.

    Raises:
        NotFetched: the Hub was not reached any more, or refuses.
        StageError: the disk has too little space, or what came is not what the Hub lists.
    """
    entries = hub_cache.listing(repo, commit) or {}
    directory, snapshot = hub_cache.repository(repo), hub_cache.snapshot(repo, commit)
    (directory / "blobs").mkdir(exist_ok=True)  # a copy of the cache may have none
    missing = [name for name in names if not (snapshot / name).is_file()]
    blobs = {name: directory / "blobs" / (entries[name].lfs_sha256 or entries[name].blob_id) for name in missing}
    sizes = {blobs[name]: entries[name].lfs_size or entries[name].size for name in missing}
    wanted = {blobs[name]: name for name in missing if not blobs[name].is_file()}  # two files can have the same content
    if wanted:
        left = {blob: partial.stat().st_size for blob in wanted if (partial := _partial(blob)).is_file()}
        total = sum(sizes[blob] for blob in wanted)
        initial = sum(size for blob, size in left.items() if size <= sizes[blob])  # larger ones are not continued
        free = shutil.disk_usage(directory).free
        if total - initial > free:
            raise StageError(
                f"{repo} needs {command.format_gib(total - initial)} more in {directory}, where "
                f"{command.format_gib(free)} are free: make room, or set HF_HOME to a directory on a larger disk"
            )
        print(f"fetching {total - initial:,} bytes of {repo} from {_endpoint()}", flush=True)
        stop = threading.Event()
        with (
            tqdm(total=total, initial=initial, desc="fetch", unit="B", unit_scale=True, disable=None) as progress,
            ThreadPoolExecutor(num_workers) as pool,
        ):
            jobs = [pool.submit(_fetch, repo, commit, wanted[blob], blob, sizes[blob], timeout, progress, stop)
                    for blob in wanted]  # fmt: skip
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
    with naming(_partial(blob)), _partial(blob).open("ab") as partial:
        # Whoever fetches the same file waits, as another project with the same cache; then the blob is there.
        _lock(partial, f"{name} of {repo}", stop)
        if blob.is_file():
            _partial(blob).unlink(missing_ok=True)  # opening it has created it again
            return
        if partial.seek(0, os.SEEK_END) > size:
            partial.truncate(0)
        # What an earlier run has left may be damaged, which is no failure of this one.
        failures, attempts = 0, 3 if partial.seek(0, os.SEEK_END) else 2
        while attempts:
            before = partial.seek(0, os.SEEK_END)
            wait = 0.0
            if before != size:
                try:
                    _append(url, partial, before, size, timeout, progress, stop)
                except HfHubHTTPError as error:
                    # 416: the server has no more than is here, so that is another file, which the digest shows below.
                    if error.response.status_code != 416:
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


def _lock(partial: IO[bytes], name: str, stop: threading.Event) -> None:
    """Lock a file that is fetched; not by a call that waits, which nothing but the other process could end."""
    if file_lock.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB):
        return
    print(f"waiting for another process that fetches {name}", flush=True)
    while not file_lock.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if stop.wait(0.5):
            raise _Stopped


def _append(
    url: str, partial: IO[bytes], start: int, size: int, timeout: float, progress: "tqdm[Any]", stop: threading.Event
) -> None:
    from huggingface_hub import get_session
    from huggingface_hub.errors import HTTPError as ClientError
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
    # With a Content-Length the client notices it, and a complete file of another size is for the digest to refuse.
    if partial.tell() < size and "Content-Length" not in response.headers:
        raise ClientError("the connection broke")


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


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _link(path: Path, blob: Path) -> None:
    """Make a file of a snapshot, which takes the place of a link to a file that was deleted."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # another process may do the same
    try:
        try:
            temporary.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # of a file system without links
            shutil.copyfile(blob, temporary)
        publish.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
