"""Verify a bundle that `make bundle` wrote, and install it: project, packages, model, results. No network is needed.

    python3 BUNDLE/unbundle.py TARGET

This script is in the bundle itself and needs nothing but Python and git. Before anything is written it checks that the
bundle has the files of SHA256SUMS and no other ones, with their digests, and that no file of TARGET would be lost. A
run that was interrupted can be repeated.

A Python that is too old for the packages has to get as far as the message about that. So there is no syntax here that
Python 3.6, which many clusters have as python3, does not know.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

SUMS = "SHA256SUMS"
ABOUT = "bundle.json"
_KEYS = {"branch": str, "python": str, "machine": str, "has_results": bool, "notes": list, "next": str}
"""Of that file."""
REPOSITORY = "repository.bundle"
WHEELS = "wheels"
FILES = "files"
"""What is copied to the same paths in the target."""
RESULTS = "dvc"
"""A remote of DVC."""
UNFINISHED = ".unbundle"
"""In a target that was empty, until git has written all files: nothing there is of anybody else. Elsewhere: a file that
is not complete; organize skips what begins with a dot."""

_PULL = """
import sys
import yaml
from dvc.exceptions import DvcException
from dvc.repo import Repo
with open("dvc.lock") as file:
    stages = list(yaml.safe_load(file)["stages"])
try:
    with Repo(config={"remote": {"bundle": {"url": sys.argv[1]}}}) as repo:
        repo.pull(stages, remote="bundle")  # not what `dvc add` tracks, which is in no remote of the bundle
except DvcException as error:
    sys.exit(f"error: {error}")
"""


class Refused(Exception):
    """The bundle cannot be installed; each argument is a line about the reason and the remedy."""


def main() -> None:
    """Run the command; exit status 2 if the bundle was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="TARGET", help="a new or empty directory; or the project, for a later bundle")
    target = Path(parser.parse_args().target).absolute()
    try:
        unbundle(Path(__file__).absolute().parent, target)
    except (Refused, OSError) as error:
        for line in error.args if isinstance(error, Refused) else [str(error)]:
            print("error: " + printable(line), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: run it again", file=sys.stderr)
        sys.exit(130)


def unbundle(bundle: Path, target: Path) -> None:
    """Verify the bundle, then install it.

    Raises:
        Refused: nothing in `target` was changed, unless the message is about the installation itself.
    """
    print(f"verifying {bundle}", flush=True)
    sums = read_sums(bundle)
    verify(bundle, sums)
    try:
        about = json.loads((bundle / ABOUT).read_text(encoding="utf-8"))
        values = [(about[key], kind) for key, kind in _KEYS.items()] + [(note, str) for note in about["notes"]]
        if not all(isinstance(value, kind) for value, kind in values):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Refused(f"{bundle / ABOUT} is not valid: bundle again") from None
    check_machine(about)
    files = {path[len(FILES) + 1 :]: digest for path, digest in sums.items() if path.startswith(FILES + "/")}
    check_repository(bundle, about["branch"], files)
    missing = check_target(target, files)

    update_repository(bundle, target, about["branch"])
    for path in missing:
        final = target / path
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(UNFINISHED)  # on the same disk, also behind a link
        shutil.copyfile(str(bundle / FILES / path), str(temporary))
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # else a power cut could leave the name without the content
        os.replace(str(temporary), str(final))
    install(bundle, target, about["has_results"])
    for note in about["notes"]:
        print("note: " + printable(note))
    print("unbundled: cd {} && {}".format(shlex.quote(str(target)), printable(about["next"])))


def read_sums(bundle: Path) -> "dict[str, str]":
    """The digest of each file of the bundle, by its path."""
    if not (bundle / SUMS).is_file():
        raise Refused(f"{bundle / SUMS} is missing: copy the whole bundle again")
    text = (bundle / SUMS).read_text(encoding="utf-8", errors="surrogateescape")
    sums: dict[str, str] = {}
    for digest, _, path in [line.partition("  ") for line in text.split("\n") if line]:
        parts = path.split("/")
        if {"", ".", "..", UNFINISHED} & {*parts} or parts[:2] == [FILES, ".git"] or path in sums:
            raise Refused(f"the bundle is not safe: {path!r} in {bundle / SUMS} is no path of a bundle, or there twice")
        sums[path] = digest
    return sums


def check_machine(about: "dict[str, Any]") -> None:
    """Refuse a Python or a machine for which the bundle has no packages."""
    wanted, here = about["python"], "{}.{}".format(*sys.version_info[:2])
    if here != wanted:
        found = shutil.which("python" + wanted)
        remedy = "run it with " + found if found else f"install it, or `make bundle ARGS='--python {here}'`"
        raise Refused(f"the bundle is for Python {wanted}, and {sys.executable} is Python {here}: {remedy}")
    machine = platform.machine()
    if machine != about["machine"]:
        raise Refused(
            f"the bundle is for processors of type {about['machine']}; this machine is {machine}: bundle with "
            f"--platform manylinux_2_28_{machine}"
        )
    if importlib.util.find_spec("ensurepip") is None:  # which some distributions leave out
        raise Refused(f"{sys.executable} cannot create environments: install python3-venv")
    if shutil.which("git") is None:
        raise Refused("git is missing on this machine: install it first")


def files_of(bundle: Path) -> "set[str]":
    """The paths of all files of a bundle but the list of digests.

    Raises:
        Refused: there is a link, or something else that is no regular file.
    """
    found: set[str] = set()
    for parent, directories, names in os.walk(str(bundle)):
        for path in [os.path.join(parent, name) for name in [*directories, *names]]:
            if os.path.islink(path) or not (os.path.isfile(path) or os.path.isdir(path)):
                raise Refused(f"{path} is neither a file nor a directory: copy the bundle again")
        found.update(os.path.relpath(os.path.join(parent, name), str(bundle)) for name in names)
    return found - {SUMS}


def verify(bundle: Path, sums: "dict[str, str]") -> None:
    """Name all files of the bundle that are missing, damaged or too many."""
    found = files_of(bundle)
    problems = [f"{bundle / path} is not listed in {SUMS}: delete it" for path in found.difference(sums)]
    for path, digest in sums.items():
        if path not in found:
            problems.append(f"{bundle / path} is missing: copy it again")
        elif sha256(bundle / path) != digest:
            problems.append(f"{bundle / path} is damaged: copy it again")
    if problems:
        raise Refused(*sorted(problems), "nothing was installed")


def check_repository(bundle: Path, branch: str, files: "dict[str, str]") -> None:
    """Refuse a repository that git does not take, and files where it has others, or links that lead elsewhere."""
    with tempfile.TemporaryDirectory() as scratch:
        fetch(bundle, Path(scratch), branch)
        tracked = {*git(Path(scratch), "ls-tree", "-r", "-z", "--name-only", "FETCH_HEAD").split("\0")} - {""}
    taken = tracked.union(*map(parents, tracked))
    for path in sorted(files):
        if path in taken or tracked & parents(path):
            raise Refused(f"the bundle is not safe: its repository has something else in the place of {path}")


def parents(path: str) -> "set[str]":
    """The directories of a relative path."""
    return {str(parent) for parent in PurePosixPath(path).parents}


def check_target(target: Path, files: "dict[str, str]") -> "list[str]":
    """Refuse a target in which files would be lost; returns the paths of the files that it lacks."""
    names = {path.name for path in target.iterdir()} if target.exists() else set()
    if names and UNFINISHED not in names:
        if ".git" not in names:
            raise Refused(f"{target} has other files, such as {min(names)}: name a new or empty directory")
        changed = git(target, "status", "--porcelain", "--untracked-files=no").splitlines()
        if changed:
            raise Refused(
                f"{target} has changes that are not committed, such as {changed[0][3:]}: commit them, or revert them "
                f"with `git -C {shlex.quote(str(target))} reset --hard`, also after an interrupted unbundle"
            )
    present = [path for path in files if os.path.lexists(str(target / path))]
    lost = {path for path in present if not (target / path).is_file() or sha256(target / path) != files[path]}
    above = {parent for path in files for parent in parents(path)}
    lost.update(path for path in above if os.path.lexists(str(target / path)) and not (target / path).is_dir())
    if lost:
        raise Refused(*(f"{target / path} has another content: move it away" for path in sorted(lost)))
    return sorted(set(files).difference(present))


def update_repository(bundle: Path, target: Path, branch: str) -> None:
    """Create the clone, or bring it to the bundle's commit; its own commits are never overwritten."""
    unfinished = target / UNFINISHED
    if unfinished.exists() or not (target / ".git").exists():
        target.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        shutil.rmtree(str(target / ".git"), ignore_errors=True)
        fetch(bundle, target, branch)
        git(target, "reset", "--quiet", "--hard", "FETCH_HEAD")
        unfinished.unlink()
    else:
        git(target, "fetch", "--quiet", str(bundle / REPOSITORY), "HEAD")
        git(target, "merge", "--quiet", "--ff-only", "FETCH_HEAD")  # where both have commits, its message says so


def fetch(bundle: Path, target: Path, branch: str) -> None:
    """Make a repository with the commits of the bundle, and no files yet."""
    git(target, "init", "--quiet")
    git(target, "symbolic-ref", "HEAD", "refs/heads/" + branch)
    git(target, "fetch", "--quiet", str(bundle / REPOSITORY), "HEAD")


def install(bundle: Path, target: Path, has_results: bool) -> None:
    """Install the packages from the bundle's files alone, and let DVC put the results in their places."""
    # No settings of this machine: an index or a proxy in them cannot be reached from here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment.update(PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    environment["PIP_FIND_LINKS"] = (bundle / WHEELS).as_uri()  # a URL, because pip splits a path at its spaces
    commands = [[str(target / "scripts/setup.sh")]]
    if has_results:
        commands.append([str(target / ".venv/bin/python"), "-c", _PULL, str(bundle / RESULTS)])
    for command in commands:
        if subprocess.run(command, env=environment, cwd=str(target)).returncode != 0:
            raise Refused(
                f"all files are in {target}, but packages or results are not, see the errors above; run it again when "
                "their cause is removed"
            )


def printable(text: str) -> str:
    """The text as one line, as `stages/base/names.py` makes it: names in a bundle must not look like our messages."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def git(directory: Path, *arguments: str) -> str:
    """What git prints in a directory.

    Raises:
        Refused: git failed.
    """
    command = ["git", "-C", str(directory), *arguments]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="surrogateescape")
    if process.returncode != 0:
        raise Refused(*f"{' '.join(command)} failed: {process.stderr.strip()}".splitlines())
    return process.stdout


if __name__ == "__main__":
    main()
