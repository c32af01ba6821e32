"""Results that are kept under the digest of all that decides them, and used again when the digest is met again.

One store serves runs that were killed, small edits, and several machines or experiments that share a disk. A result is
one file and a JSON value. It is published by rename, whole or not at all, and its SHA-256 is verified at each use.

`rm -rf data/.reuse` clears the store at any time: what is not found is computed again.
"""

import ast
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stages.artifacts import publish

_SOURCES = Path(__file__).parents[2]
_FILE, _VALUE = "file", "value.json"
_TEMPORARY = ".tmp-"
_ABANDONED = 24 * 3600  # seconds after which a temporary entry is taken for that of a killed process


def root() -> Path:
    """The store of this project.

    It is resolved against `$DVC_ROOT`, which DVC sets, so that `dvc exp run --temp` and queued experiments, which run
    in a copy of the project, share it.
    """
    return Path(os.environ.get("DVC_ROOT", "."), "data", ".reuse").absolute()


class Store(NamedTuple):
    """A folder with an entry for each result."""

    path: Path

    def fetch(self, key: str, target: Path) -> Any | None:
        """Lay the file stored under `key` at `target`, in place of what is there, and return the value stored with it.

        None: there is no such entry, or not as it was stored; then it is removed, and nothing lies at `target`.
        """
        entry = self.path / key
        target.unlink(missing_ok=True)
        try:
            content = json.loads((entry / _VALUE).read_bytes())
            _link(entry / _FILE, target)
            if content["seal"] == _seal(content["value"], publish.sha256_file(target)):
                os.utime(entry)
                return content["value"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        target.unlink(missing_ok=True)
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def put(self, key: str, file: Path, sha256: str, value: Any) -> None:
        """Store a finished file and a JSON value. The file must never be written to again: the store may link to it."""
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.path))
        try:
            _link(file, temporary / _FILE)
            (temporary / _VALUE).write_text(json.dumps({"seal": _seal(value, sha256), "value": value}))
            temporary.chmod(0o755)  # others who share the store may read it
            temporary.rename(self.path / key)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not (isinstance(error, OSError) and (self.path / key).exists()):  # another run was faster
                raise

    def trim(self, limit: int) -> None:
        """Remove the entries that were not used for the longest time until all together take `limit` bytes at most.

        Files that also lie elsewhere, as an output of the stage or in DVC's cache, take nothing: they are links.
        """
        entries = sorted(_entries(self.path), reverse=True)
        for used, _, entry in entries:
            if entry.name.startswith(_TEMPORARY) and time.time() - used > _ABANDONED:
                shutil.rmtree(entry, ignore_errors=True)
        total = 0
        for _, size, entry in entries:
            total += size
            if total > limit and not entry.name.startswith(_TEMPORARY):
                shutil.rmtree(entry, ignore_errors=True)


def digest_of_code(module: str) -> str:
    """The SHA-256 of what runs when `module` does: the first-party files that it imports, and how far, and the versions
    of the packages that these import.
    """
    files: dict[str, str] = {}
    packages: set[str] = set()
    names = [module]
    while names:
        name = names.pop()
        place = _SOURCES / name.replace(".", "/")
        file = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)
        if file is None or name in files:  # None: a function of a module
            continue
        files[name] = publish.sha256_file(file)
        for imported in _imports(file):
            parts = imported.split(".")
            if parts[0] == __name__.partition(".")[0]:
                names += (".".join(parts[:count]) for count in range(1, len(parts) + 1))
            else:
                packages.add(parts[0])
    distributions = importlib.metadata.packages_distributions()
    used = {name for package in packages - sys.stdlib_module_names for name in distributions.get(package, ())}
    versions = {name: importlib.metadata.version(name) for name in used}
    return publish.sha256_json([sys.version_info[:2], versions, files])


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _link(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where that cannot be."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _seal(value: Any, sha256: str) -> str:
    return publish.sha256_json([value, sha256])


def _entries(path: Path) -> Iterator[tuple[float, int, Path]]:
    """For each entry when it was used last, the bytes that only it takes, and its path."""
    for entry in path.iterdir() if path.exists() else ():
        try:
            files = [file.stat() for file in entry.iterdir()]
            yield entry.stat().st_mtime, sum(file.st_size for file in files if file.st_nlink == 1), entry
        except OSError:  # another run removed it
            continue
