"""Python and the installed packages, compared with pyproject.toml and the lock. Only of the standard library."""

import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from stages.checks.findings import Finding, error, ok, warning

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_SETUP = "install the lock with `make setup`"
_PIN = re.compile(r"^([\w.-]+==[^\s;]+(?: ; [^\\\n]+)?)", re.MULTILINE)


def check_python(project: Path = Path(), prefix: Path = Path(sys.prefix)) -> Iterator[Finding]:
    """Whether Python is that of .venv; of which version it must be, the doctor has checked."""
    name = f"Python {sys.version_info[0]}.{sys.version_info[1]} in {prefix}"
    environment = project / ".venv"
    if environment.exists() and environment.resolve() != prefix.resolve():
        yield warning(f"{name} is not that of .venv", "`source .venv/bin/activate`, or run `make doctor`")
    else:
        yield ok(name)


def find_version(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_packages(project: Path = Path(), installed: Callable[[str], str | None] = find_version) -> Iterator[Finding]:
    """The installed packages: an error if the pipeline cannot run with them, a warning if they are not the locked ones.

    The lock that fits is the one of the installed build of torch, as in scripts/setup.sh.
    """
    torch = installed("torch")
    path = project / f"requirements-{'cpu' if torch and torch.endswith('+cpu') else 'cuda'}.lock"
    try:
        required = _required(project / "pyproject.toml")
        locked = _locked(path)
    except FileNotFoundError as problem:
        yield error(f"{problem.filename} is missing", "run the doctor in the root of the project, or `git checkout` it")
        return
    wrong = [f"{each} ({installed(each.name) or 'not installed'})" for each in required if not _fits(each, installed)]
    if wrong:
        yield error(f"the pipeline needs {', '.join(wrong)}", _SETUP)
        return
    names = {each.name for each in required}
    others = [each for each in locked if not _fits(each, installed)]
    others.sort(key=lambda each: each.name not in names)  # those that stages import come first
    if others:
        shown = ", ".join(f"{each.name} {installed(each.name) or 'is missing'}" for each in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        yield warning(f"installed packages are not those of {path.name}: {shown}{more}", _SETUP)
    else:
        yield ok(f"{len(locked)} packages are those of {path.name}")


def _fits(requirement: "Requirement", installed: Callable[[str], str | None]) -> bool:
    found = installed(requirement.name)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _required(path: Path) -> "list[Requirement]":
    """The dependencies in pyproject.toml; Python 3.10 has no parser of TOML."""
    from packaging.requirements import Requirement

    block = re.search(r"^dependencies = \[(.*?)^\]", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Requirement(text) for text in re.findall(r'^ *"([^"]+)"', block[1] if block else "", re.MULTILINE)]


def _locked(path: Path) -> "list[Requirement]":
    """The packages of a lock that this Python and this machine need."""
    from packaging.requirements import Requirement

    pins = (Requirement(text) for text in _PIN.findall(path.read_text(encoding="utf-8")))
    return [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
