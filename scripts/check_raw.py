"""Name the files under `raw_dir` that DVC cannot read, or does not watch, before DVC meets them.

    python -m scripts.check_raw                     lists them; the lines for .dvcignore are on stdout
    python -m scripts.check_raw >> .dvcignore       hides from DVC what organize passes over, too

DVC opens all files under `raw_dir` before it runs `organize`, also those that `organize` would pass over: it waits for
a pipe, reads a device without end, and fails at a broken link. Here no file is opened. Which files DVC sees is asked
from DVC itself, so what is in .dvcignore already is not listed.
"""

import argparse
import os
import re
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import NamedTuple

from dvc.dvcfile import is_valid_filename
from dvc.exceptions import DvcException
from dvc.repo import Repo

from stages.artifacts import command
from stages.artifacts.errors import StageError
from stages.artifacts.params_file import load_params
from stages.corpus import splits, tree
from stages.corpus.formats import suffixes
from stages.organize import OrganizeParams, find_root

IGNORE_FILE = ".dvcignore"


class Problem(NamedTuple):
    """What is wrong with a file."""

    path: str
    """Below `raw_dir`."""
    reason: str
    remedy: str | None = None
    """None: `organize` passes the file over, so it can be hidden from DVC."""


def main() -> None:
    """List all problems; the exit status is 2 if DVC would stop at one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    root = find_root(load_params(OrganizeParams).raw_dir)
    try:
        repo = Repo()
        paths = watched(root, repo)
        problems = sorted(find(root, repo, paths))
        hidden = count_hidden(root, repo, paths)
    except DvcException as error:  # such as no git repository
        raise StageError(str(error)) from None
    for rule, count in hidden.items():
        print(
            f"warning: DVC does not notice edits of {count} files that organize reads ({rule}): remove that "
            "pattern, or the .dvc in that directory, unless this is meant so",
            file=sys.stderr,
        )
    if not problems:
        print(f"check_raw: DVC can read all files in {root}", file=sys.stderr)
        return
    if is_in_project(root, repo):
        remedy = f"remove it, or hide it from DVC: python -m scripts.check_raw >> {IGNORE_FILE}"
        for problem in problems:
            if problem.remedy is None:
                print(pattern(os.path.relpath(os.path.join(root, problem.path), repo.root_dir)), flush=True)
    else:
        remedy = f"remove it ({IGNORE_FILE} has no effect outside of the project)"
    raise StageError("\n".join(describe(root, problem, remedy) for problem in problems))


def describe(root: Path, problem: Problem, remedy: str) -> str:
    """A line for people."""
    return f"{splits.printable(os.path.join(root, problem.path))} {problem.reason}: {problem.remedy or remedy}"


def watched(root: Path, repo: Repo) -> set[str]:
    """The paths below `raw_dir` of all files that DVC opens."""
    start = os.path.abspath(root)
    walk = repo.dvcignore.walk(repo.fs, start)  # as DVC itself walks
    return {os.path.join(directory, "")[len(start) + 1 :] + name for directory, _, names in walk for name in names}


def find(root: Path, repo: Repo, paths: Iterable[str]) -> Iterator[Problem]:
    """The files at which DVC would stop, of those that it opens."""
    can_have_stages = is_in_project(root, repo)
    not_utf8 = set()
    for path in paths:
        place = os.path.join(root, path)
        if not is_utf8(path):
            not_utf8.add(first_not_utf8(path))
        elif reason := objection(place):
            yield Problem(path, reason)
        elif can_have_stages and is_valid_filename(path) and not repo.scm.is_ignored(os.path.abspath(place)):
            yield Problem(path, "is read by DVC as stages", f"name the directory {root} in .gitignore")
    for path in not_utf8:
        yield Problem(path, "has a name that is not UTF-8, at which DVC fails: rename it", rename(root / path))


def count_hidden(root: Path, repo: Repo, paths: Set[str]) -> Counter[str]:
    """The number of files that `organize` reads and DVC does not open, by the patterns that hide them."""
    files, _ = tree.walk(root, lambda name: suffixes.find(name) is not None)
    places = [os.path.join(root, path) for path in files if path not in paths]
    results = [repo.dvcignore.check_ignore(place) for place in places if not objection(place)]
    return Counter(rule.file_info for result in results for rule in result.pattern_infos)


def is_in_project(root: Path, repo: Repo) -> bool:
    """Whether a directory is inside of the project: only there, DVC applies .dvcignore and looks for stages."""
    return Path(os.path.abspath(root)).is_relative_to(repo.root_dir)


def objection(path: str) -> str | None:
    """Why DVC cannot read a file. DVC follows a link to a file, wherever it leads, and no link to a directory."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"is a broken link, at which DVC fails ({error.strerror})"
    if stat.S_ISFIFO(mode):
        return "is a pipe, for which DVC waits forever"
    if not stat.S_ISREG(mode):
        return "is not a regular file: DVC fails at a socket, and reads a device without end"
    if os.path.basename(path) == IGNORE_FILE:
        return f"is a second {IGNORE_FILE}, which DVC refuses in a directory that it tracks"
    if not os.access(path, os.R_OK, effective_ids=True):
        return "cannot be read, at which DVC fails (Permission denied)"
    return None


def is_utf8(path: str) -> bool:
    """Whether a path has no byte that is not UTF-8, which `os.fsdecode` makes a lone surrogate."""
    return not re.search("[\udc80-\udcff]", path)


def first_not_utf8(path: str) -> str:
    """The path up to its first name that is not UTF-8: if a directory is renamed, so are all files in it."""
    names = path.split("/")
    return "/".join(names[: next(index for index, name in enumerate(names, 1) if not is_utf8(name))])


def rename(path: Path) -> str:
    """The command that gives a file a name in UTF-8, from cp1252, the most common encoding of old Windows files."""
    old = "".join(chr(byte) if chr(byte) not in "\\'" and 31 < byte < 127 else f"\\x{byte:02x}" for byte in bytes(path))
    new = path.with_name(os.fsencode(path.name).decode("cp1252", "replace"))
    return f"mv -n $'{old}' {shlex.quote(str(new))}"


def pattern(path: str) -> str:
    """The line of .dvcignore that matches a path below the root of the project."""
    escaped = re.sub(r"([\\*?\[])", r"\\\1", path)
    return "/" + re.sub(r"[\n\r\t\v\f]|\s$", "?", escaped)  # DVC strips white space at the end of a line


if __name__ == "__main__":
    command.run(main)
