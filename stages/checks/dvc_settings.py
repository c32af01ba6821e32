"""DVC: whether it can read the project, its cache, and what it would connect to."""

import os
from collections.abc import Mapping
from pathlib import Path

from dvc.config import Config
from dvc.exceptions import DvcException
from dvc.repo import Repo

from stages.artifacts.errors import StageError
from stages.checks.findings import Found, error, ok, warning
from stages.checks.machine import existing


def read(project: Path = Path()) -> Found[Config]:
    """Have DVC read its settings, dvc.yaml and dvc.lock, and give the settings.

    Raises:
        StageError: it cannot.
    """
    try:
        with Repo(str(project.absolute())) as repo:
            repo.index.check_graph()
            config = repo.config
    except DvcException as problem:
        raise StageError(
            f"dvc: {' '.join(str(problem).split())}: run the doctor in the root of the project, resolve merge "
            "conflicts, or `git checkout .dvc dvc.yaml dvc.lock` (without git: `dvc config --local core.no_scm true`)"
        ) from None
    yield ok("DVC can read the project")
    return config


def cache_directory(config: Config, project: Path = Path()) -> Path:
    """Where DVC's cache is."""
    return Path(config["cache"].get("dir") or project / ".dvc/cache")


def check_cache(config: Config, project: Path = Path()) -> Found[None]:
    """Whether DVC can link its cache into the project, or copies everything."""
    cache = cache_directory(config, project)
    kinds = config["cache"].get("type") or ["reflink", "copy"]
    remedy = "`dvc config --local cache.type reflink,hardlink,symlink`"
    if existing(cache).stat().st_dev == existing(project / "data").stat().st_dev or "symlink" in kinds:
        yield ok(f"cache.type is {','.join(kinds)}: {cache}")
    elif "copy" not in kinds:
        yield error(f"cache.type is {','.join(kinds)}, and the cache {cache} is on another file system", remedy)
    else:
        yield warning(f"the cache {cache} is on another file system, so DVC copies everything", remedy)


def check_connections(config: Config, environment: Mapping[str, str] = os.environ) -> Found[None]:
    """What DVC itself sends, and remotes on other machines."""
    found = []
    if config["core"].get("analytics", True) and not environment.get("DVC_NO_ANALYTICS"):
        found.append(warning("each dvc reports its use to its makers", "`dvc config core.analytics false`"))
    if config["core"].get("check_update", True):
        found.append(warning("dvc asks for newer versions of itself", "`dvc config core.check_update false`"))
    for name, remote in config.get("remote", {}).items():
        scheme, separator, _ = str(remote.get("url", "")).partition("://")
        if separator and scheme != "file":
            what = f"`dvc push` and `pull` connect to the remote {name} ({scheme})"
            found.append(warning(what, f"`dvc remote add --local --default {name}-here DIR` with a directory here"))
    yield from found or [ok("DVC opens no connections, and has no remote on another machine")]
