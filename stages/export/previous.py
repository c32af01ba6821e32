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


@dataclass(frozen=True)
class Lock:
    """What a dvc.lock says of the stages by which a model is made and measured: of all but `plan`."""

    outs: dict[str, str]
    """The MD5 of each, by path."""
    params: dict[str, Any]
    """Those with which the stages ran, by dotted name."""
    is_complete: bool
    """Whether each stage ran with what the stages before it have written last."""

    def has(self, path: Path, content: bytes) -> bool:
        """Whether an out that is a file had this content."""
        return self.outs.get(str(path)) == hashlib.md5(content, usedforsecurity=False).hexdigest()


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
    here = pointer.read_bytes()
    try:
        with Repo() as repo:
            root, cache = Path(repo.root_dir), repo.cache.local
            missing = unreadable = False
            for commit, subject in commits(root, f"-{num_commits}"):
                lock = read_lock(root, commit)
                name = _experiment_name(lock.outs)
                if name is None or lock.has(outputs.directory(name) / pointer.name, here):
                    continue
                try:
                    result = _read(name, {path: Path(cache.oid_to_path(md5)) for path, md5 in lock.outs.items()})
                except (ValueError, StageError):
                    unreadable = True
                    continue
                if result:
                    return Previous(commit[:10], subject, result)
                missing = True
    except DvcException:  # whose message names a path of this machine, which does not belong into a report
        raise StageError(
            "No run before this one is known: this is no project of git and DVC, or one that `dvc status` cannot read"
        ) from None
    if missing:
        raise StageError(
            "No run before this one is known: the commits of this branch have others, but DVC's cache has no complete "
            "one of them that can be read. `dvc pull -A` fetches them, if they were pushed"
        )
    if unreadable:
        raise StageError(
            "No run before this one is known: the commits of this branch have others, but their files are damaged, or "
            "of another version of this pipeline. `git commit` after each `dvc repro`, and the next report compares"
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
    # -z: a subject may contain what Python takes for the end of a line.
    log = _git(root, "log", "-z", "--no-show-signature", *options, "--format=%H %s", "--", "dvc.lock")
    for entry in filter(None, log.split("\0")):
        commit, _, subject = entry.partition(" ")
        yield commit, subject


def _git(root: Path, *arguments: str) -> str:
    """What git prints; nothing where it fails, or is not installed."""
    try:
        process = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return process.stdout.decode("utf-8", "replace")


def read_lock(root: Path, commit: str) -> Lock:
    """The dvc.lock of a commit, or of the `workspace`; empty where it is missing, damaged, or of another pipeline.

    Args:
        root: Of the project.
        commit: As git names it.
    """
    try:
        is_here = commit == "workspace"
        text = (root / "dvc.lock").read_text("utf-8") if is_here else _git(root, "show", f"{commit}:./dvc.lock")
        stages = [stage for name, stage in yaml.load(text, _LOADER)["stages"].items() if name != "plan"]
        outs = {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", ())}
        params = [values for stage in stages for values in stage.get("params", {}).values()]
        return Lock(
            outs,
            params={name: value for values in params for name, value in values.items()},
            is_complete=all(
                outs.get(dep["path"]) in (None, dep.get("md5")) for stage in stages for dep in stage.get("deps", ())
            ),
        )
    # Of a conflict, of another pipeline.
    except (FileNotFoundError, ValueError, yaml.YAMLError, TypeError, KeyError, AttributeError):
        return Lock({}, {}, True)


def _experiment_name(outs: Mapping[str, str]) -> str | None:
    """The one that a pipeline trained; None: it did not."""
    names = [Path(path).parent.name for path in outs if path.endswith("/run.json")]
    return names[0] if names else None


def _read(name: str, cached: Mapping[str, Path]) -> Result | None:
    """The run of an experiment, whose outs are in DVC's cache; None: not all of it is there.

    Raises:
        ValueError: DVC's cache is damaged.
        StageError: a file is damaged, or of another version of this pipeline.
    """
    files = {path: cached[str(path)] for path in FILES if str(path) in cached}
    model = cached.get(str(outputs.directory(name) / "model"))
    if outputs.HISTORY not in files or model is None or not model.exists():
        return None
    # A directory is a list of its files in the cache.
    members = {entry["relpath"]: entry["md5"] for entry in json.loads(model.read_text(encoding="utf-8"))}
    if (digest := members.get(LINEAGE)) is None:
        return None
    lineage = model.parent.parent / digest[:2] / digest[2:]
    return Result.read(lineage, files) if all(path.exists() for path in (lineage, *files.values())) else None
