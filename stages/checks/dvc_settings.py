"""DVC: the project, its settings, caches and locks."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml
from dvc.config import Config, ConfigError
from dvc.dirs import site_cache_dir

from stages.artifacts.errors import StageError
from stages.artifacts.file_lock import flock, mount_of, open_lock
from stages.checks.disks import existing
from stages.checks.findings import Finding, error, ok, warning

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many times as fast, where it was built
_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "fuse.sshfs")
_LEFT_OVER = "if no dvc runs in this clone, on any node, delete that file"


def read_config(project: Path = Path()) -> Mapping[str, Any]:
    """The settings of DVC, from all its files.

    Raises:
        StageError: a file cannot be read.
    """
    try:
        config: Mapping[str, Any] = Config(str((project / ".dvc").absolute()))
    except ConfigError as problem:
        raise StageError(f"DVC: {' '.join(str(problem).split())}: correct .dvc/config, or `git checkout` it") from None
    return config


def cache_directory(config: Mapping[str, Any], project: Path = Path()) -> Path:
    """Where DVC's cache is."""
    return Path(config["cache"].get("dir") or project / ".dvc/cache")


def check_project(config: Mapping[str, Any], project: Path = Path()) -> Iterator[Finding]:
    """Whether DVC finds its project and git, and can read the pipeline."""
    for name in ("dvc.yaml", "dvc.lock"):
        path = project / name
        try:
            yaml.load(path.read_bytes(), Loader=_LOADER)
        except FileNotFoundError:
            if name == "dvc.yaml":
                yield error("dvc.yaml is missing", "run the doctor in the root of the project, or `git checkout` it")
        except yaml.YAMLError as problem:
            reason = " ".join(str(problem).split())[:200]
            yield error(f"{name} is not valid YAML ({reason})", f"resolve its merge conflict, or `git checkout {name}`")
    if not (project / ".dvc").is_dir():
        yield error(".dvc is missing, so `dvc repro` does not run", "`git checkout .dvc`, or clone the project again")
        return
    above = (project.resolve(), *project.resolve().parents)
    if not config["core"]["no_scm"] and not any((each / ".git").exists() for each in above):
        yield error(
            ".git is missing, so `dvc repro` does not run", "`git init`, or `dvc config --local core.no_scm true`"
        )
    else:
        yield ok("DVC finds its project")


def check_cache(config: Mapping[str, Any], project: Path = Path()) -> Iterator[Finding]:
    """The kinds of links, and whether the cache can be shared as its settings have it."""
    cache = cache_directory(config, project)
    kinds = config["cache"].get("type") or ["reflink", "copy"]
    is_elsewhere = existing(cache).stat().st_dev != existing(project / "data").stat().st_dev
    if is_elsewhere and not {"symlink", "copy"} & set(kinds):
        yield error(
            f"cache.type is {','.join(kinds)}, and the cache {cache} is on another file system: no such links",
            "`dvc config --local cache.type reflink,hardlink,symlink`",
        )
    elif is_elsewhere and kinds == ["reflink", "copy"]:
        yield warning(
            f"the cache {cache} is on another file system, so DVC copies everything",
            "`dvc config --local cache.type reflink,hardlink,symlink`, or `copy` if that is wanted",
        )
    else:
        yield ok(f"cache.type is {','.join(kinds)}: {cache}")
    if not os.access(existing(cache), os.W_OK):
        yield error(
            f"cannot write into DVC's cache {cache}", "`chmod g+ws` and `dvc config --local cache.shared group`"
        )
    elif config["cache"].get("shared") == "group" and cache.is_dir() and not cache.stat().st_mode & 0o2000:
        yield warning(f"what is made in the shared cache {cache} does not belong to its group", f"`chmod g+s {cache}`")


def check_site_cache(config: Mapping[str, Any], mounts: Path = Path("/proc/self/mountinfo")) -> Iterator[Finding]:
    """The SQLite databases of DVC: they must be writable, and on a disk of this machine alone."""
    path = Path(site_cache_dir(config["core"].get("site_cache_dir")))
    remedy = "`dvc config --local core.site_cache_dir DIR` with a directory on a local disk, or $DVC_SITE_CACHE_DIR"
    kind, _ = mount_of(existing(path), mounts)
    if not os.access(existing(path), os.W_OK):
        yield error(f"cannot write into DVC's site cache {path}", remedy)
    elif kind in _NETWORK:
        yield warning(f"DVC's site cache {path} is on {kind}, where SQLite must not be used by several nodes", remedy)
    else:
        yield ok(f"DVC's site cache is {path}")


def check_locks(config: Mapping[str, Any], project: Path = Path()) -> Iterator[Finding]:
    """Locks that a running dvc holds, or that one has left which was killed or whose node was lost."""
    temporary = project / ".dvc/tmp"
    found: list[Finding] = []
    path = temporary / "lock"
    if path.exists() and config["core"]["hardlink_lock"]:
        found.append(warning(f"{path} exists: a dvc runs, or was killed", _LEFT_OVER))
    elif path.exists():
        with open_lock(path) as lock:
            if not flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                found.append(warning(f"{path} is locked: a dvc runs in this clone", "wait until it ends"))
    path = temporary / "rwlock"
    try:
        locks = json.loads(path.read_bytes()) if path.exists() else {}
        writers = locks.get("write", {}).values()
        readers = [each for infos in locks.get("read", {}).values() for each in infos]
        holders = {int(each["pid"]): str(each["cmd"]) for each in (*writers, *readers)}
    except (ValueError, KeyError, TypeError, AttributeError):
        found.append(error(f"{path} is damaged, so `dvc repro` does not run", _LEFT_OVER))
        holders = {}
    for pid, command in sorted(holders.items()):
        if not psutil.pid_exists(pid):  # DVC looks for it, too, and removes the lock
            continue
        if _is_dvc(pid):
            found.append(warning(f"{path}: process {pid} holds it ({command})", "wait until it ends"))
        else:
            found.append(
                error(f"{path} names process {pid}, which is not dvc here: it was killed, or its node lost", _LEFT_OVER)
            )
    yield from found or [ok("no dvc holds a lock in this clone")]


def _is_dvc(pid: int) -> bool:
    try:
        return any("dvc" in Path(part).name for part in psutil.Process(pid).cmdline()[:4])
    except psutil.Error:
        return False
