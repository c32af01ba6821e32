"""From a model's name to the directory of its files: a local one, or a snapshot in `HF_HOME`.

The cache comes first: where it has all that is needed, no socket is opened. The price is that a branch such as `main`
stays at the commit that was fetched first. For a newer one, set `model_revision` to the commit, or run `hf download`.
"""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stages.artifacts.errors import StageError
from stages.artifacts.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    LINEAGE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
)

_PATTERNS = (
    CONFIG, GENERATION_CONFIG, "chat_template*", LINEAGE, WEIGHTS_INDEX,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
)  # fmt: skip
"""All files of a model except its weights, so that no other format of them (pickles, GGUF) is fetched."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class ModelSource:
    """Where a model was found."""

    directory: Path
    commit: str | None
    """Null for a local directory."""
    weights: list[str]
    """Names of its safetensors files; empty where it has none, or where they are not wanted."""


def resolve(
    model_name: str, model_revision: str, want_weights: bool, timeout: float = 10.0,
    required: tuple[str, ...] = (CONFIG, TOKENIZER),
) -> ModelSource:  # fmt: skip
    """Find a model's files; fetch them from the Hub where the cache lacks some.

    Args:
        model_name: An existing directory, else a Hub id.
        model_revision: Branch, tag or commit of a Hub id.
        want_weights: Whether the weights are needed too, if the model has any.
        timeout: Seconds to wait for the Hub's first answer; huggingface_hub's own download has no limit.
        required: Files without which a cached model is incomplete, beside its weights.

    Raises:
        StageError: the model is not found, or loading it would run code of its authors: pickles, `auto_map`.
    """
    if Path(model_name).is_dir():
        source = Path(model_name)
        commit = None
        weights = weight_files(source) if want_weights else []
        names = _names(source)
    else:
        source, weights, names = _from_hub(model_name, model_revision, want_weights, timeout, required)
        commit = source.name
    if not (source / CONFIG).is_file():
        raise StageError(f"model_name is {model_name!r}: it has no {CONFIG}, so transformers cannot load it")
    if want_weights and not weights:  # with random weights, pickles beside the config harm nobody
        _refuse_pickles(model_name, names)
    _refuse_code(model_name, source)
    return ModelSource(source, commit, weights)


def model_files(source: ModelSource) -> list[str]:
    """The names of all files that the model needs, in order."""
    found = {path.name for pattern in _PATTERNS for path in source.directory.glob(pattern) if path.is_file()}
    if not source.weights:
        found.discard(WEIGHTS_INDEX)  # it names files that the manifest does not list
    return sorted(found | set(source.weights))


def weight_files(directory: Path) -> list[str]:
    """The safetensors files that make up the model in `directory`: those that its index names, or the only one."""
    index = directory / WEIGHTS_INDEX
    if index.is_file():
        try:
            # Of the index, not all *.safetensors: a repository may have others, such as consolidated.safetensors.
            return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StageError(f"{index} is not a valid index of safetensors files: fetch it again") from None
    return [WEIGHTS] if (directory / WEIGHTS).is_file() else []


def _from_hub(
    repo: str, revision: str, want_weights: bool, timeout: float, required: tuple[str, ...]
) -> tuple[Path, list[str], list[str]]:
    """The snapshot's directory, its weights, and the names of all files that the repository is known to have."""
    source = _snapshot(repo, revision, list(_PATTERNS), list(required), timeout)
    if not want_weights:
        return source, [], []
    commit = source.name  # from here on the commit: the branch may get another one between two requests
    weights = weight_files(source) or [WEIGHTS]
    known = _listing(repo, commit) or _names(source)
    if not set(weights) & set(known):  # before fetching: the Hub has none of them, perhaps pickles instead
        _refuse_pickles(repo, known)
    _snapshot(repo, commit, weights, weights, timeout)
    return source, weight_files(source), _listing(repo, commit) or _names(source)


def _snapshot(repo: str, revision: str, patterns: list[str], required: list[str], timeout: float) -> Path:
    """The snapshot of a repository with the files that match `patterns`: from the cache, else from the Hub.

    The cache suffices where it has the files in `required`, except those that the Hub is known not to have.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.errors import HTTPError as ClientError  # of the HTTP client that huggingface_hub uses

    only: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["*/*"]}  # the root of the repository
    try:
        # Where no listing is cached, this returns a snapshot even if files are missing: they are looked for below.
        source = Path(snapshot_download(repo, revision=revision, local_files_only=True, **only))
        listing = _listing(repo, source.name)
        expected = required if listing is None else [name for name in required if name in listing]
        missing = [name for name in expected if not (source / name).is_file()]
        if not missing:
            return source
    except HFValidationError:
        _refuse_directory(repo)
        raise StageError(f"model_name is {repo!r}: there is no such directory, and it is not a valid Hub id") from None
    except LocalEntryNotFoundError:  # nothing of this revision, or not all of its files
        missing = required
    _refuse_directory(repo)
    similar = _similar_name(repo, Path(constants.HF_HUB_CACHE))
    problem = (
        f"model_name is {repo!r}: there is no such directory, and HF_HOME ({constants.HF_HOME}) "
        f"lacks {', '.join(missing)} of the Hub's model at revision {revision!r}"
        + (f"; a model with a similar name is here: {similar!r}" if similar else "")
    )
    remedy = f"run `hf download {repo} --revision {revision}` on a machine with internet and bring its HF_HOME here"
    if similar:
        remedy = f"use that one, or {remedy}"
    if constants.is_offline_mode():
        raise StageError(f"{problem}; HF_HUB_OFFLINE forbids fetching it: {remedy}")
    try:
        # The download has no limit of its own, so this request finds out whether the Hub answers.
        HfApi().model_info(repo, revision=revision, timeout=timeout)
        return Path(snapshot_download(repo, revision=revision, **only))
    except HfHubHTTPError as error:
        # Only the error's class: its text may quote the request's headers, and so the token.
        status = error.response.status_code
        hint = "check name and revision; a gated model needs HF_TOKEN" if status in (401, 403, 404) else remedy
        raise StageError(f"{problem}; the Hub answered {status} ({type(error).__name__}): {hint}") from None
    except (OSError, ClientError, ValueError) as error:  # ValueError: a token with characters that no header may have
        raise StageError(f"{problem}; the Hub was not reached ({type(error).__name__}): {remedy}") from None


def _refuse_directory(model_name: str) -> None:
    """Refuse a name that can only mean a directory, and not a model of the Hub."""
    path = Path(model_name)
    first, *others = path.parts
    if not (model_name.startswith(("/", ".", "~")) or path.exists() or (others and Path(first).is_dir())):
        return
    if path.exists():
        raise StageError(f"model_name is {model_name!r}: that is a file; use the directory that contains config.json")
    parent = next(ancestor for ancestor in path.parents if ancestor.is_dir())
    models = sorted(str(config.parent) for config in parent.glob(f"*/{CONFIG}"))
    found = f"the models in {parent} are {', '.join(models[:10])}" if models else f"{parent} contains no models"
    raise StageError(f"model_name is {model_name!r}: there is no such directory; {found}")


def _similar_name(model_name: str, cache: Path) -> str | None:
    """The most similar name of a model that is on this machine, unless there is one of this very name."""
    cached = [path.name.removeprefix("models--").replace("--", "/") for path in cache.glob("models--*")]
    if model_name in cached:
        return None
    names = {
        name.lower(): name for name in [*cached, *(str(path.parent) for path in Path("models").glob(f"*/{CONFIG}"))]
    }
    return next((names[name] for name in get_close_matches(model_name.lower(), names)), None)


def _listing(repo: str, commit: str) -> list[str] | None:
    """The files in the root of a repository, where an earlier download stored the list in the cache; else None."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(repo, revision=commit) if "/" not in file.path]
    except CachedRepoTreeNotFoundError:
        return None


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def _refuse_pickles(model_name: str, names: list[str]) -> None:
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise StageError(
            f"model_name is {model_name!r}: its weights are pickles ({', '.join(pickles[:3])}), which can run any code "
            "when they are read: use a revision with safetensors, or convert them if you trust their source"
        )


def _refuse_code(model_name: str, source: Path) -> None:
    for name in (CONFIG, TOKENIZER_CONFIG):
        path = source / name
        if not path.is_file():
            continue
        try:
            has_code = "auto_map" in json.loads(path.read_bytes())
        except ValueError:
            raise StageError(f"{path} is not valid JSON: fetch it again") from None
        if has_code:
            raise StageError(
                f"model_name is {model_name!r}: {name} asks for code of its own (auto_map), which is never run: "
                "use a model whose class is part of transformers, or, if it is, remove `auto_map` in a copy"
            )
