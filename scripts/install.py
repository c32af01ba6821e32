"""Install packages into this environment with uv, which needs 30 seconds for a lock for which pip needs 90.

Example  python -m scripts.install --requirement requirements-cpu.lock

All options are passed on, so they must be options of both `uv pip install` and `pip install`. uv reads neither PIP_*
nor pip.conf: where to look for packages is passed to it from pip's settings. If one of them has no equivalent in uv,
pip installs the packages.
"""

import ast
import os
import subprocess
import sys

_OPTIONS = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
_FLAGS = {"no-index": "--no-index", "no-cache-dir": "--no-cache"}
_VARIABLES = {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT"}
_IRRELEVANT = {
    "config-file", "disable-pip-version-check", "no-color", "no-input", "progress-bar", "quiet", "root-user-action",
    "verbose",
}  # fmt: skip
"""Settings that change neither what is installed nor where it comes from."""


def main() -> None:
    arguments = sys.argv[1:]
    listing = [sys.executable, "-m", "pip", "config", "list"]
    settings = pip_settings(subprocess.run(listing, check=True, stdout=subprocess.PIPE, text=True).stdout)
    if unknown := sorted(settings.keys() - (_OPTIONS | _FLAGS | _VARIABLES).keys() - _IRRELEVANT):
        print(f"setup: using pip, which is slower: uv has no equivalent of pip's setting {', '.join(unknown)}")
        command = ["pip", "install", "-qq"]
    else:
        # As pip does. Otherwise each process that may not write to the environment compiles torch and transformers
        # again, which takes 6 seconds.
        command = ["uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", sys.executable]
        command += uv_options(settings)
        os.environ.update({_VARIABLES[name]: value for name, value in settings.items() if name in _VARIABLES})
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", *command, *arguments])


def pip_settings(listing: str) -> dict[str, str]:
    """The settings of `pip install`, from the output of `pip config list`: lines such as `:env:.find-links='x'`."""
    settings = {}
    for section in ("global", "install", ":env:"):  # a later one replaces the values of an earlier one, as in pip
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            where, _, name = key.rpartition(".")
            if where == section:
                settings[name] = str(ast.literal_eval(value))
    return settings


def uv_options(settings: dict[str, str]) -> list[str]:
    """The options of `uv pip install` that make it look for packages where pip would."""
    # As pip does: the best version of all indexes, not of the first one that has the package.
    options = ["--index-strategy", "unsafe-best-match"]
    for name, value in settings.items():
        if name in _OPTIONS:
            options += [part for location in value.split() for part in (_OPTIONS[name], location)]
        elif name in _FLAGS and value.lower() in ("1", "on", "t", "true", "y", "yes"):
            options.append(_FLAGS[name])
    return options


if __name__ == "__main__":
    main()
