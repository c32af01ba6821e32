"""From a model's name to the directory of its files: a local one, or a snapshot in `HF_HOME`.

The cache comes first: where it holds all that is needed, no socket is opened. So a branch such as `main` stays at the
commit that was fetched first; to move on, give the commit in `model_revision`, or run `hf download` by hand.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.artifacts.command import StageError
from stages.model import headers

DESCRIPTION_FILES = ("config.json", "generation_config.json", "chat_template*", "lineage.json", headers.INDEX)
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")

_TIMEOUT = 10.0  # seconds to wait for the Hub's first answer; huggingface_hub's own call has no limit


@dataclass(frozen=True)
class Source:
    """Where a model was found."""

    directory: Path
    commit: str | None
    """Null for a local directory."""
    weights: list[str]
    """Names of its safetensors files; none where it has none, or where they were not asked for."""


def resolve(model_name: str, model_revision: str, want_weights: bool) -> Source:
    """Find a model's files; fetch them from the Hub where the cache lacks some.

    Args:
        model_name: An existing directory, else a Hub id.
        model_revision: Branch, tag or commit of a Hub id.
        want_weights: Whether the weights are needed too, if the model has any.

    Raises:
        StageError: the model cannot be had, or is one that would run code of others: pickles, `auto_map`.
    """
    if Path(model_name).is_dir():
        source = Path(model_name)
        commit = None
        weights = headers.weight_files(source) if want_weights else []
        names = _names(source)
    else:
        source, weights, names = _from_hub(model_name, model_revision, want_weights)
        commit = source.name
    if not (source / "config.json").is_file():
        raise StageError(f"model_name is {model_name!r}: it has no config.json, so it is no model of transformers")
    if want_weights and not weights:
        _refuse_pickles(model_name, names)
    _refuse_code(model_name, source)
    return Source(source, commit, weights)


def model_files(source: Source) -> list[str]:
    """The names of all files that the model needs, in order."""
    patterns = DESCRIPTION_FILES + TOKENIZER_FILES
    found = {path.name for pattern in patterns for path in source.directory.glob(pattern) if path.is_file()}
    if not source.weights:
        found.discard(headers.INDEX)
    return sorted(found | set(source.weights))


def _from_hub(repo: str, revision: str, want_weights: bool) -> tuple[Path, list[str], list[str]]:
    """The snapshot's directory, its weights, and the names of all files that the repository is known to have."""
    patterns = [*DESCRIPTION_FILES, *TOKENIZER_FILES]
    source = _snapshot(repo, revision, patterns, required=["config.json", "tokenizer.json"])
    if not want_weights:
        return source, [], []
    commit = source.name
    weights = headers.weight_files(source) or [headers.SINGLE_FILE]
    known = _listing(repo, commit) or _names(source)
    if not set(weights) & set(known):
        _refuse_pickles(repo, known)
    _snapshot(repo, commit, weights, required=weights)
    return source, headers.weight_files(source), _listing(repo, commit) or _names(source)


def _snapshot(repo: str, revision: str, patterns: list[str], required: list[str]) -> Path:
    """The snapshot of a repository with the files that match `patterns`: from the cache, else from the Hub.

    The cache suffices where it holds the files in `required`, but for those that the Hub is known not to have.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.errors import HTTPError as ClientError  # of the HTTP client that huggingface_hub uses

    only: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["*/*"]}  # the root of the repository
    try:
        source = Path(snapshot_download(repo, revision=revision, local_files_only=True, **only))
        listing = _listing(repo, source.name)
        expected = required if listing is None else [name for name in required if name in listing]
        lacking = [name for name in expected if not (source / name).is_file()]
        if not lacking:
            return source
    except HFValidationError:
        raise StageError(f"model_name is {repo!r}: there is no such directory, and a Hub id looks otherwise") from None
    except LocalEntryNotFoundError:  # nothing of this revision, or not all that the Hub is known to have
        lacking = required
    missing = (
        f"model_name is {repo!r}: there is no such directory, and HF_HOME ({constants.HF_HOME}) "
        f"lacks {', '.join(lacking)} of the Hub's model at revision {revision!r}"
    )
    remedy = f"run `hf download {repo} --revision {revision}` on a machine with internet and bring its HF_HOME here"
    if constants.is_offline_mode():
        raise StageError(f"{missing}; HF_HUB_OFFLINE forbids to fetch it: {remedy}")
    try:
        HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT)
        return Path(snapshot_download(repo, revision=revision, **only))
    except HfHubHTTPError as error:
        # The text of an error may quote the request's headers, and so the token: its class must do.
        status = error.response.status_code
        hint = "check name and revision; a gated model needs HF_TOKEN" if status in (401, 403, 404) else remedy
        raise StageError(f"{missing}; the Hub answered {status} ({type(error).__name__}): {hint}") from None
    except (OSError, ClientError, ValueError) as error:  # ValueError: a token that no header can hold
        raise StageError(f"{missing}; the Hub was not reached ({type(error).__name__}): {remedy}") from None


def _listing(repo: str, commit: str) -> list[str] | None:
    """The files in the root of a repository, where an earlier download has left the list in the cache."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(repo, revision=commit) if "/" not in file.path]
    except CachedRepoTreeNotFoundError:
        return None


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def _refuse_pickles(model_name: str, names: list[str]) -> None:
    pickles = sorted(name for name in names if name.endswith(headers.PICKLES))
    if pickles:
        raise StageError(
            f"model_name is {model_name!r}: its weights are pickles ({', '.join(pickles[:3])}), which can run any code "
            "when they are read; take a revision with safetensors, or convert them where you trust them"
        )


def _refuse_code(model_name: str, source: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        path = source / name
        if not path.is_file():
            continue
        try:
            has_code = "auto_map" in json.loads(path.read_bytes())
        except ValueError:
            raise StageError(f"{path} is no valid JSON: fetch it again") from None
        if has_code:
            raise StageError(
                f"model_name is {model_name!r}: {name} asks for code of its own (auto_map), which is never run; "
                "take a model whose class is part of transformers, or, if it is, remove `auto_map` in a copy"
            )
