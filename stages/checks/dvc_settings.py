"""DVC: whether it can read the project, and its cache."""

from pathlib import Path

from dvc.config import Config
from dvc.exceptions import DvcException
from dvc.repo import Repo

from stages.base.errors import StageError, one_line
from stages.checks.findings import Found, error, ok, warning
from stages.checks.machine import existing


def read(project: Path = Path()) -> Found[Config]:
    """Have DVC read its settings, dvc.yaml and dvc.lock, and give the settings.

    Raises:
        StageError: it cannot, or could not run a stage.
    """
    try:
        with Repo(str(project.absolute())) as repo:
            repo.index.check_graph()
            config, root = repo.config, Path(repo.scm.root_dir).resolve()
            parents = {Path(out.fs_path).parent for out in repo.index.outs if out.is_in_repo}
    except DvcException as problem:
        if "is not a git repository" in str(problem):
            raise StageError(
                f"dvc: {project.absolute()} has no .git: run `dvc config --local core.no_scm true`, or `git init`"
            ) from None
        raise StageError(
            f"dvc: {one_line(problem)}: run the doctor in the root of the project; resolve merge conflicts, or take "
            "git's file (`git checkout dvc.lock`); if git has no dvc.lock, delete it: DVC's run cache has the results"
        ) from None
    locks = project / ".dvc/tmp/rwlock"
    if locks.exists() and not locks.stat().st_size:
        raise StageError(
            f"{locks} is empty, as a DVC that was killed in the wrong moment leaves it: if no DVC runs in this clone, "
            "delete it"
        )
    for parent in sorted(parents) * (not config["core"]["no_scm"]):
        if not (target := parent.resolve()).is_relative_to(root):
            raise StageError(
                f"{parent} leads to {target}, and DVC refuses results outside of git's directory: make it a directory; "
                "CHECKPOINT_ROOT and `dvc cache dir --local DIR` move what is large to another disk"
            )
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
