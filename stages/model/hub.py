"""From a model's name to the directory of its files: a local one, or a snapshot in the model cache.

huggingface_hub looks into the cache first: where it has all that is needed, no socket is opened. The price is that a
branch such as `main` stays at the commit that was fetched first. For a newer one, set `model_revision` to the commit,
or run `hf download`. What the cache lacks is fetched: complete files stay, one that was cut off begins again.
"""

import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import command, publish
from stages.base.errors import StageError, naming
from stages.model import adapters, config, hub_cache
from stages.model.files import (
    CONFIG,
    GENERATION_CONFIG,
    LINEAGE,
    MORE_TEMPLATES,
    TOKENIZER,
    WEIGHTS,
    WEIGHTS_INDEX,
)
from stages.model.license import is_license_file

_PATTERNS = (
    CONFIG, GENERATION_CONFIG, "chat_template*", f"{MORE_TEMPLATES}/*.jinja", LINEAGE, WEIGHTS_INDEX,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "*processor_config.json",  # of images, without which vLLM does not load a model that takes some
)  # fmt: skip
"""All files of a model except its weights, so that no other format of them (pickles, GGUF) is fetched."""
_COMMIT = re.compile("[0-9a-f]{40}")
_SHARD = re.compile(r"[^/]+\.safetensors")
"""What an index may name: a file beside it."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHER_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model was found."""

    directory: Path
    commit: str | None
    """Null for a local directory."""
    weights: list[str]
    """Names of its safetensors files; empty where it has none, or where they are not wanted."""


def resolve(model_name: str, model_revision: str, want_weights: bool) -> ResolvedModel:
    """Find a model's files; fetch them from the Hub where the cache lacks some.

    Args:
        model_name: An existing directory, else a Hub id.
        model_revision: Branch, tag or commit of a Hub id.
        want_weights: Whether the weights are needed too, if the model has any.

    Raises:
        StageError: there is no such directory, the cache lacks files that could not be fetched, the weights are in a
            form that is not read, or loading the model would run code of its authors: pickles, `auto_map`.
    """
    if Path(model_name).is_dir():
        directory, commit = Path(model_name), None
    else:
        directory = _snapshot(model_name, model_revision, _PATTERNS, (CONFIG, TOKENIZER))
        commit = directory.name  # from here on it, and not the branch, which may get another one between two requests
        for name in sorted(_small_files(directory)):  # download checks the weights later
            hub_cache.check(model_name, commit, name, publish.sha256_file(directory / name))
    if (directory / adapters.CONFIG).is_file():  # transformers would load them
        raise StageError(
            f"model_name is {model_name!r}: adapters (LoRA) are in it: use the directory of the model that they are "
            f"merged into; in this pipeline it is the one beside them. Without them, remove {adapters.CONFIG}"
        )
    if not (directory / CONFIG).is_file():
        raise StageError(f"model_name is {model_name!r}: it has no {CONFIG}, so transformers cannot load it")
    # Before anything large is fetched; what the cache lacks of the weights is fetched below.
    _refuse_unreadable(directory, want_weights and commit is None)
    config.check(directory)
    if not want_weights:  # with random weights, others beside the config harm nobody
        return ResolvedModel(directory, commit, [])
    weights = weight_files(directory)
    if not weights:
        _refuse_weights(model_name, directory, commit)
    if commit is not None:
        if not weights:
            # The index, too: a cache without a list of the repository's files may lack it unnoticed.
            _snapshot(model_name, commit, (*_PATTERNS, WEIGHTS), (WEIGHTS,))
            weights = weight_files(directory)
        _snapshot(model_name, commit, tuple(weights), tuple(weights))
        if not weights:
            _refuse_weights(model_name, directory, commit)  # of which only the Hub knew
    return ResolvedModel(directory, commit, weights)


def model_files(resolved: ResolvedModel) -> list[str]:
    """The names of all files that the model needs, in order."""
    found = _small_files(resolved.directory)
    if resolved.weights in ([], [WEIGHTS]):
        found.discard(WEIGHTS_INDEX)  # it names files that the manifest does not list
    return sorted(found | set(resolved.weights))


def weight_files(directory: Path) -> list[str]:
    """The safetensors files that make up the model in `directory`: the only one, or those that its index names.

    Where there are both, the index was left behind by a model of several files: transformers does not read it either.
    """
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    index = directory / WEIGHTS_INDEX
    if index.is_file():
        try:
            # Of the index, not all *.safetensors: a repository may have others, such as consolidated.safetensors.
            names = set(publish.read_json(index)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            names = set()
        # No name at all would mean random weights, and one with a "/" a file of another model.
        if not names or not all(isinstance(name, str) and _SHARD.fullmatch(name) for name in names):
            raise StageError(f"{index} does not name the safetensors files beside it: fetch it again")
        return sorted(names)
    return []


def _snapshot(repo: str, revision: str, patterns: tuple[str, ...], required: tuple[str, ...]) -> Path:
    """The snapshot of a repository with the files that match `patterns`: from the cache, else from the Hub.

    Where the cache has no list of the repository's files, those in `required` suffice.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, IncompleteSnapshotError, LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    cache, found = hub_cache.repository(repo).parent, None
    try:
        found = snapshot_download(
            repo, revision=revision, cache_dir=cache, allow_patterns=[*patterns], local_files_only=True
        )
    except HFValidationError:
        _refuse_directory(repo)
        raise StageError(f"model_name is {repo!r}: there is no such directory, and it is not a valid Hub id") from None
    except IncompleteSnapshotError as error:
        found = error.snapshot_path
    except (LocalEntryNotFoundError, ValueError):  # of a branch whose commit cannot be read
        pass
    missing, others = [*required], hub_cache.commits(repo)
    if found and Path(found).name in others:
        snapshot, others = Path(found), []
        listed = hub_cache.listing(repo, snapshot.name)
        expected = required if listed is None else filter_repo_objects(listed, allow_patterns=[*patterns])
        missing = [name for name in expected if not (snapshot / name).is_file()]
        if not missing:
            return snapshot
    _refuse_directory(repo)
    problem = (
        f"model_name is {repo!r}: there is no such directory, and the model cache {cache} (HF_HOME sets it) lacks "
        f"{', '.join(missing[:5])} of the Hub's model at revision {revision!r}"
    )
    if others:  # of a cache that was copied without refs/
        problem += f", but has commit {' and '.join(others[:5])}: set model_revision to it"
    if (local := Path("models", repo)).is_dir():
        problem += f", and {local} is a directory: write that if you mean it"
    remedy = f"run `hf download {repo} --revision {revision}` on a machine with internet and bring its HF_HOME here"
    if variable := hub_cache.offline_variable():
        raise StageError(f"{problem}; {variable} forbids fetching it: {remedy}")
    try:
        with naming(hub_cache.repository(repo)):
            return _fetch(repo, revision, patterns)
    except (HTTPError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise StageError(f"{problem}; {_explained(error, repo, remedy)}") from None


def _fetch(repo: str, revision: str, patterns: tuple[str, ...]) -> Path:
    """Fetch what matches `patterns`, and the texts of the license, into the cache; returns the snapshot.

    Nothing is fetched for the sake of the license alone, so a cache without it is complete.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import filter_repo_objects, tqdm

    # Xet needs other servers than the Hub's, which firewalls refuse more often: huggingface_hub then tries for minutes.
    if "HF_HUB_DISABLE_XET" not in os.environ:
        constants.HF_HUB_DISABLE_XET = True
    stop = threading.Event()

    class Progress(tqdm):
        """A bar, on terminals only, and the way to end the threads that fetch: they call it for each part of a file."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"disable": None, **kwargs})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> Any:
            if stop.is_set():
                raise InterruptedError
            return super().update(n)

    try:
        # First, because only this request has a time limit.
        model = HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT, files_metadata=True)
        commit = _COMMIT.fullmatch(model.sha or "")[0]  # type: ignore[index]
    except (KeyError, TypeError) as error:  # the library checks no types
        raise ValueError from error
    directory, snapshot = hub_cache.repository(repo), hub_cache.snapshot(repo, commit)
    sizes = {file.rfilename: file.size or 0 for file in model.siblings or ()}
    names = [*filter_repo_objects(sizes, allow_patterns=[*patterns]), *filter(is_license_file, sizes)]
    needed = sum(sizes[name] for name in names if not (snapshot / name).is_file())
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StageError(
            f"{repo} needs {command.format_gib(needed)} more in {directory}, where {command.format_gib(free)} are "
            "free: make room, or set HF_HOME to a directory on a larger disk"
        )
    print(f"fetching {needed:,} bytes of {repo}", flush=True)
    # In a thread, because after Ctrl-C it waits for all files that it has begun.
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            snapshot_download, repo, revision=commit, cache_dir=directory.parent, allow_patterns=names,
            tqdm_class=Progress,
        )  # fmt: skip
        try:
            job.result()
        finally:
            stop.set()
    if not all((snapshot / name).is_file() for name in names):
        raise ConnectionError  # then it returns what is there
    if revision != commit:
        publish.write_text(directory / "refs" / revision, commit)  # without a line end, as the library writes it
    return snapshot


def _explained(error: Exception, repo: str, remedy: str) -> str:
    """One line for an error of huggingface_hub, without its text, which may quote the request's headers: the token."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # after which the library has looked into the cache
    name, page = type(error).__name__, f"https://huggingface.co/{repo}"
    if isinstance(error, ValueError):
        return f"the Hub's answer is not understood ({name}): correct HF_ENDPOINT if it is set, or {remedy}"
    if not isinstance(error, HfHubHTTPError):
        return f"the Hub was not reached ({name}): {remedy}"
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        remedy = f"the model is gated: accept its license at {page}, and set HF_TOKEN to a token of that account"
    elif isinstance(error, RepositoryNotFoundError):
        remedy = "there is no such model, or it is private: check the name; if private, set HF_TOKEN"
    elif isinstance(error, RevisionNotFoundError):
        remedy = f"it has the model, but not this revision: set model_revision to one of {page}/commits"
    elif status == 401:
        remedy = "it refuses your token: set HF_TOKEN to a valid one, or unset it"
    elif status == 429:
        remedy = "it limits requests: run it again later; files that are complete are kept"
    return f"the Hub answered {status} ({name}): {remedy}"


def _refuse_directory(model_name: str) -> None:
    """Refuse a name that can only mean a directory, and not a model of the Hub."""
    path = Path(model_name)
    first, *others = path.parts
    if not (model_name.startswith(("/", ".", "~")) or path.exists() or (others and Path(first).is_dir())):
        return
    if model_name.startswith("~"):  # that of `-S model_name=~/a`, too: shells replace it at the beginning of a word
        full = os.path.expanduser(model_name)
        raise StageError(f"model_name is {model_name!r}: nothing replaces ~ by your home directory: write {full}")
    if path.exists():
        raise StageError(f"model_name is {model_name!r}: that is a file; use the directory that contains config.json")
    parent = next(ancestor for ancestor in path.parents if ancestor.is_dir())
    models = sorted(str(config.parent) for config in parent.glob(f"*/{CONFIG}"))
    if (tracked := path.with_name(f"{path.name}.dvc")).is_file():
        found = f"DVC tracks it: `dvc pull {tracked}`"
    elif (Path(os.environ.get("DVC_ROOT", ".")) / path).is_dir():  # in the project that this is a copy of
        found = f"the copy of an experiment has what git and DVC track: `dvc add {path}`, and commit {tracked}"
    else:
        found = f"the models in {parent} are {', '.join(models[:10])}" if models else f"{parent} contains no models"
    raise StageError(f"model_name is {model_name!r}: there is no such directory; {found}")


def _small_files(directory: Path) -> set[str]:
    found = (path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file())
    return {str(path.relative_to(directory)) for path in found}


def _refuse_unreadable(directory: Path, want_weights: bool) -> None:
    """Refuse names that the model needs where there is no file, and files of any size, which transformers reads whole.

    Without such a file it would be another model. A tree that was copied without what its links lead to has such names,
    as a cache without its blobs.
    """
    from huggingface_hub.utils import filter_repo_objects

    patterns = [*_PATTERNS, WEIGHTS] if want_weights else [name for name in _PATTERNS if name != WEIGHTS_INDEX]
    for name in sorted(filter_repo_objects(os.listdir(directory), allow_patterns=patterns)):
        path = directory / name
        if path.is_file():
            if name != WEIGHTS and (size := path.stat().st_size) > publish.LARGEST:
                raise StageError(f"{path} has {size:,} bytes, and at most {publish.LARGEST:,} are read: fetch it again")
        elif not path.is_dir() or path.suffix:  # others are such as tokenizer/ of a pipeline of models
            why = "a directory, a pipe or the like: fetch it again"
            if path.is_symlink():
                why = f"a link to {os.readlink(path)}: copy the model with what its links lead to (`cp -rL`)"
            raise StageError(f"{path} is no file that can be read, but {why}, or delete it")


def _refuse_weights(model_name: str, directory: Path, commit: str | None) -> None:
    """Refuse weights that are not read: without a word, the run would start from random ones."""
    listing = None if commit is None else hub_cache.listing(model_name, commit)
    names = os.listdir(directory) if listing is None else list(listing)
    if WEIGHTS in names:
        return
    others = sorted(name for name in names if name.endswith(_OTHER_WEIGHTS))
    if others:
        raise StageError(
            f"model_name is {model_name!r}: it has neither {WEIGHTS} nor {WEIGHTS_INDEX}, but {', '.join(others[:3])}: "
            "fetch what is missing, convert the weights with `save_pretrained` of transformers in a copy, or set "
            "initial_weights to 'random'"
        )
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise StageError(
            f"model_name is {model_name!r}: its weights are pickles ({', '.join(pickles[:3])}), which can run any code "
            "when they are read: use a revision with safetensors, or convert them if you trust their source"
        )
