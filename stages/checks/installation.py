"""The installed packages, compared with the lock. Only of the standard library."""

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stages.checks.findings import Found, error, ok, warning

_PIN = re.compile(r"^([\w.-]+==[^\s;]+(?: ; [^\\\n]+)?)", re.MULTILINE)
_SHOWN = 5


def find_version(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_packages(project: Path = Path(), installed: Callable[[str], str | None] = find_version) -> Found[None]:
    """Whether the packages are those of the lock, of the installed build of torch as in scripts/setup.sh.

    Where one is missing that a stage needs, importing it is the error.
    """
    from packaging.requirements import Requirement

    torch = installed("torch")
    path = project / f"requirements-{'cpu' if torch and torch.endswith('+cpu') else 'cuda'}.lock"
    if not path.exists():
        yield error(f"{path} is missing", "run the doctor in the root of the project, or `git checkout` it")
        return
    pins = [Requirement(text) for text in _PIN.findall(path.read_text(encoding="utf-8"))]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]  # of this Python and this machine
    others = [
        f"{pin} ({found or 'is missing'})"
        for pin, found in ((pin, installed(pin.name)) for pin in pins)
        if found is None or not pin.specifier.contains(found, prereleases=True)
    ]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        what = f"installed packages are not those of {path.name}: {', '.join(others[:_SHOWN])}{more}"
        yield warning(what, "install the lock with `make setup`")
    else:
        yield ok(f"{len(pins)} packages are those of {path.name}")
