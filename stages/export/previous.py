"""The run before this one: that of the newest commit whose training has another result, read from DVC's cache.

Nothing is checked out, no network is used, and the files of this run are not touched.
"""

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stages.artifacts import outputs
from stages.artifacts.errors import StageError
from stages.artifacts.model_files import LINEAGE
from stages.export.facts import FILES, Result

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML has it: ten times as fast, and each commit has a file of a thousand lines."""


@dataclass(frozen=True)
class Previous:
    """The run before, and where it is from."""

    commit: str
    subject: str
    """First line of its message."""
    result: Result


def find(pointer: Path, num_commits: int = 100) -> Previous:
    """The run before the one whose run.json is `pointer`.

    Args:
        pointer: outputs/<experiment_name>/run.json.
        num_commits: Of those that changed dvc.lock, how many are looked at.

    Raises:
        StageError: there is none, and why.
    """
    # Here, not above: it takes a second.
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    if not pointer.is_file():
        raise StageError(f"{pointer} is missing: run `dvc repro train`")
    here = hashlib.md5(pointer.read_bytes(), usedforsecurity=False).hexdigest()
    try:
        with Repo() as repo:
            root, cache = Path(repo.root_dir), repo.cache.local
            others = 0
            for commit, subject in commits(root, f"-{num_commits}"):
                outs = _outs(root, commit)
                name = _experiment_name(outs)
                if name is None or outs[str(outputs.directory(name) / pointer.name)] == here:
                    continue
                others += 1
                if result := _read(name, {path: Path(cache.oid_to_path(digest)) for path, digest in outs.items()}):
                    return Previous(commit[:10], subject, result)
    except DvcException:  # whose message names a path of this machine, which does not belong into a report
        raise StageError(
            "No run before this one is known: this is no project of git and DVC, or one that `dvc status` cannot read"
        ) from None
    if others:
        raise StageError(
            "No run before this one is known: the commits of this branch have others, but DVC's cache has no complete "
            "one of them. `dvc pull -A` fetches them, if they were pushed"
        )
    raise StageError(
        "No run before this one is known: no commit of this branch has another. `git commit` after each `dvc repro`, "
        "and the next report compares"
    )


def commits(root: Path, *options: str) -> Iterator[tuple[str, str]]:
    """The commits that changed dvc.lock, newest first, and their subjects; none without git.

    Args:
        root: Of the project.
        options: Of `git log`; without any, all commits that this branch has.
    """
    for line in _git(root, "log", *options, "--format=%H %s", "--", "dvc.lock").splitlines():
        commit, _, subject = line.partition(" ")
        yield commit, subject


def _git(root: Path, *arguments: str) -> str:
    """What git prints; nothing where it fails, or is not installed."""
    try:
        process = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return process.stdout.decode("utf-8", "replace")


def _outs(root: Path, commit: str) -> dict[str, str]:
    """The MD5 of each out of the pipeline, by path, as dvc.lock of a commit has them."""
    try:
        stages = yaml.load(_git(root, "show", f"{commit}:./dvc.lock"), _LOADER)["stages"].values()
        return {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", ())}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError):  # of a conflict, of another pipeline
        return {}


def _experiment_name(outs: Mapping[str, str]) -> str | None:
    """The one that a pipeline trained; None: it did not."""
    names = [Path(path).parent.name for path in outs if path.endswith("/run.json")]
    return names[0] if names else None


def _read(name: str, cached: Mapping[str, Path]) -> Result | None:
    """The run of an experiment, whose outs are in DVC's cache; None: not all of it is there, or it is of other code."""
    files = {path: cached[str(path)] for path in FILES if str(path) in cached}
    model = cached.get(str(outputs.directory(name) / "model"))
    if outputs.HISTORY not in files or model is None:
        return None
    try:
        # A directory is a list of its files in the cache.
        members = {entry["relpath"]: entry["md5"] for entry in json.loads(model.read_text(encoding="utf-8"))}
        lineage = members[LINEAGE]
        return Result.read(model.parent.parent / lineage[:2] / lineage[2:], files)
    except (FileNotFoundError, KeyError, ValueError, StageError):
        return None
