"""Write everything that the project needs into a directory that can be carried to a machine without internet access.

Command   make bundle ARGS="..."     or     python -m scripts.bundle ...
There     python3 bundle/unbundle.py TARGET

The bundle has the repository (`git bundle`), the packages of the lock for one Python and platform (`pip download`), the
model that data/model.json lists, the results of all stages that have run (`dvc push`), and with --raw the raw files.
SHA256SUMS lists all files, so `sha256sum -c SHA256SUMS` checks them without our code. The directory appears when it is
complete. docs/air-gap.md is the guide.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import cast

import yaml
from dvc.exceptions import DvcException
from dvc.repo import Repo
from packaging.markers import Marker, default_environment

from scripts import unbundle
from stages.base import command, publish
from stages.base.errors import StageError
from stages.base.names import is_utf8, printable
from stages.base.params_file import load_params
from stages.base.record import check_files
from stages.download import DownloadParams
from stages.model.license import LICENSE, ModelLicense
from stages.model.manifest import MANIFEST, REMEDY, ModelManifest
from stages.organize import OrganizeParams, find_root
from stages.splits import suffixes, tree

HF_HOME = PurePath(".hf")
"""Where the target has the models of the Hub."""
_IMAGE = ("Dockerfile", "apptainer.def")
_OLDEST_GLIBC = 5  # 2.5, of manylinux1


def main() -> None:
    """Write the bundle."""
    parser = command.parser(__doc__)
    option = parser.add_argument
    option("--to", type=Path, default=Path("bundle"), metavar="DIR", help="a new directory (default: bundle)")
    option("--build", choices=["cpu", "cuda"], help="the lock (default: the one that is installed here)")
    option("--python", default=f"3.{sys.version_info.minor}", metavar="3.N", help="default: the one that runs here")
    option("--platform", default=f"manylinux_2_28_{platform.machine()}", help="default: %(default)s")
    option("--raw", action="store_true", help="carry the raw files, too")
    args = parser.parse_args()

    if args.to.exists():
        raise StageError(f"--to is {args.to}, which exists: delete it, or name another directory")
    build = args.build or installed_build()
    tags = platform_tags(args.platform)
    branch = committed()
    notes: list[str] = []
    with publish.directory(args.to) as new:
        output("git", "bundle", "create", "--quiet", str(new / unbundle.REPOSITORY), "HEAD", *branch)
        download(build, args.python, tags, new / unbundle.WHEELS)
        notes += copy_model(new / unbundle.FILES)
        notes += copy_raw_files(new / unbundle.FILES) if args.raw else []
        for path in filter(None, output("git", "ls-files", "-z").split("\0")):
            (new / unbundle.FILES / path).unlink(missing_ok=True)  # the repository has it
        has_results = push_results(new / unbundle.RESULTS)
        following = "make repro" if args.raw or not has_results else "make repro ARGS=--allow-missing"
        about = {
            "branch": branch[0] if branch else "main", "python": args.python, "machine": tags[0].split("_", 3)[3],
            "has_results": has_results, "notes": notes, "next": following,
        }  # fmt: skip
        publish.write_json(new / unbundle.ABOUT, about)
        shutil.copyfile(unbundle.__file__, new / "unbundle.py")
        for name in _IMAGE:
            recipe = Path(__file__).with_name("image").joinpath(name).read_text()
            recipe = recipe.replace("PYTHON_VERSION", args.python).replace("NEXT_COMMAND", following)
            (new / name).write_text(recipe)
        sums = {path: publish.sha256_file(new / path) for path in unbundle.files_of(new)}
        publish.write_text(new / unbundle.SUMS, "".join(f"{sums[path]}  {path}\n" for path in sorted(sums)))
    size = sum((args.to / path).stat().st_size for path in sums)
    print(f"bundle: {args.to}: {len(sums)} files, {size / 1e6:,.1f} MB")
    print(f"the SHA-256 of its {unbundle.SUMS} is {publish.sha256_file(args.to / unbundle.SUMS)}")
    for note in notes:
        print(f"note: {note}")


def installed_build() -> str:
    """The build that `make setup` has installed here."""
    try:
        return Path(".venv/.setup").read_text().split()[1]
    except (OSError, IndexError):
        raise StageError("which lock? run `make setup` first, or give --build cpu or --build cuda") from None


def committed() -> list[str]:
    """The name of the branch, or nothing where there is none.

    Raises:
        StageError: files are not committed: they would be missing on the other side, silently.
    """
    dirty = output("git", "status", "--porcelain", "--no-renames").splitlines()
    if dirty:
        raise StageError(
            f"{len(dirty)} files are not in the last commit, and a bundle has commits only: "
            f"{', '.join(line.split(maxsplit=1)[1] for line in dirty[:10])}",
            "commit them (dvc.lock with the results of the stages), or list them in .git/info/exclude",
        )
    if output("git", "rev-parse", "--is-shallow-repository") == "true":
        raise StageError("this clone has a part of the history: run `git fetch --unshallow` first")
    branch = output("git", "rev-parse", "--abbrev-ref", "HEAD")
    return [] if branch == "HEAD" else [branch]


def platform_tags(name: str) -> list[str]:
    """The tags of the wheels that run where those of a tag such as manylinux_2_28_x86_64 do, the newest first."""
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", name)
    if not match:
        raise StageError(f"--platform is {name!r}: give it as manylinux_2_28_x86_64, with the glibc and the processor")
    versions = [f"manylinux_2_{minor}" for minor in range(int(match[1]), _OLDEST_GLIBC - 1, -1)]
    return [f"{tag}_{match[2]}" for tag in (*versions, "manylinux2014", "manylinux2010", "manylinux1", "linux")]


def requirements(lock: str, python: str, machine: str) -> Iterator[str]:
    """The packages of a lock, with their hashes, that another Python and machine need.

    pip compares the markers with the Python that runs it, even if it downloads for another one.
    """
    environment = {
        **cast("dict[str, str]", default_environment()), "python_version": python,
        "python_full_version": f"{python}.0", "implementation_version": f"{python}.0", "platform_machine": machine,
    }  # fmt: skip
    for block in re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)[1:]:
        requirement, _, marker = block.partition("\\")[0].partition(";")
        if not marker or Marker(marker.strip()).evaluate(environment):
            yield requirement.strip() + " " + " ".join(re.findall(r"--hash=\S+", block))


def download(build: str, python: str, tags: list[str], directory: Path) -> None:
    """Fetch the packages with pip, which knows mirrors, proxies and certificates."""
    platforms = [part for tag in tags for part in ("--platform", tag)]
    for name in (build, "encoder"):
        lock = Path(f"requirements-{name}.lock").read_text(encoding="utf-8")
        needed = [*requirements(lock, python, tags[0].split("_", 3)[3])]
        print(f"bundle: downloading {len(needed)} packages of requirements-{name}.lock", flush=True)
        # A package without wheel needs setuptools for its name and version: this environment has it.
        process = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-build-isolation", "--require-hashes",
             "--implementation", "cp", "--python-version", python, *platforms, "--dest", str(directory),
             "--requirement", "/dev/stdin"], input="\n".join(needed), text=True,
        )  # fmt: skip
        if process.returncode != 0:
            raise StageError(
                f"pip could not download all packages for Python {python} on {tags[0]}, see above: it needs an index "
                "or a directory that has them (PIP_INDEX_URL, PIP_FIND_LINKS)"
            )


def copy_model(files: Path) -> list[str]:
    """Copy the model to where the target has it, compared with its manifest; returns what to know there."""
    params = load_params(DownloadParams)
    name = params.model_name
    if not MANIFEST.is_file():
        if in_project(Path(name)) and output("git", "ls-files", "--", name):
            return []
        raise StageError(f"{MANIFEST} is missing, so it is unknown which files {name!r} has: `dvc repro download`")
    manifest = ModelManifest.read()
    revision = params.model_revision if manifest.commit else manifest.model_revision
    if (manifest.model_name, manifest.model_revision) != (name, revision):
        raise StageError(f"{MANIFEST} describes another model than {name!r} at {revision!r}: `dvc repro download`")
    directory, notes = manifest.directory(), []
    if manifest.commit:  # as in the Hub's own cache: where there are no links, it has files in their places
        cache = directory.parent.parent
        base = files / HF_HOME / "hub" / cache.name
        target = base / "snapshots" / manifest.commit
        listing = Path("trees", f"{manifest.commit}.json")  # which files the model has on the Hub
        if (cache / listing).is_file():
            copy(cache / listing, base / listing)
        if revision != manifest.commit:
            publish.write_text(base / "refs" / revision, manifest.commit)
        notes.append(f"the model is in {HF_HOME} there: export HF_HOME=$PWD/{HF_HOME} HF_HUB_OFFLINE=1")
    elif place := in_project(directory):
        target = files / place
    else:
        place = f"models/{directory.name}"
        if output("git", "ls-files", "--", place):
            raise StageError(f"the model {name} would be in {place} there, where the repository has another: rename it")
        target = files / place
        notes.append(f"the model {name} is in {place} there: set model_name: {place}")
    licenses = ModelLicense.read().files if LICENSE.is_file() else {}
    entries = {**manifest.files, **licenses}
    check_files({directory / file: entry for file, entry in entries.items()}, REMEDY)
    for file in entries:
        copy(directory / file, target / file)
    return notes


def copy_raw_files(files: Path) -> list[str]:
    """Copy the raw files to where the target has them; returns what to know there."""
    notes = []
    raw_dir = load_params(OrganizeParams).raw_dir
    root = find_root(raw_dir)
    place = in_project(root)
    if place is None:
        place = "data/raw"
        notes.append(f"the raw files of {raw_dir} are in {place} there: set raw_dir: {place}")
    # All, also those that organize does not read: DVC hashes them. Of the links those that organize reads, as files.
    found = {os.path.join(parent, name) for parent, _, names in os.walk(root) for name in names}
    read = {os.path.join(root, path) for path in tree.walk(root, lambda name: suffixes.find(name) is not None)[0]}
    links = sorted(path for path in found if os.path.islink(path) and path not in read)
    if links:
        notes.append(
            f"{len(links)} links in {raw_dir} are not carried, such as {printable(links[0])}: organize skips them"
        )
    for path in sorted(found.difference(links)):
        relative = os.path.join(place, os.path.relpath(path, root))
        if not is_utf8(relative) or re.search(r"[\n\r\\]", relative):  # as sha256sum writes no line
            raise StageError(f"{path} has a backslash, a line end or no UTF-8 in it: rename it")
        if unbundle.UNFINISHED in PurePath(relative).parts:
            raise StageError(f"{path} has the name of what an interrupted unbundle leaves: delete it, or rename it")
        copy(Path(path), files / relative)
    return notes


def copy(source: Path, target: Path) -> None:
    """Copy the content of a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def in_project(directory: Path) -> str | None:
    """The path of a directory relative to the project; None: it is elsewhere."""
    path = Path(os.path.normpath(Path.cwd() / directory))  # not resolved: a link to another disk is in the project
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else None


def push_results(directory: Path) -> bool:
    """Copy the results of all stages that have run into a remote of DVC; returns whether there are any.

    Raises:
        StageError: DVC's cache lacks one, or has another content.
    """
    lock = yaml.safe_load(Path("dvc.lock").read_text()) if Path("dvc.lock").is_file() else {}
    stages = list(lock.get("stages", {}))
    if not stages:
        return False
    remedy = f"`dvc repro` or `dvc pull` writes it again, of {', '.join(stages)}"
    try:
        with Repo(config={"remote": {"bundle": {"url": str(directory.resolve())}}}) as repo:
            repo.push(stages, remote="bundle")
            states = repo.status(stages, cloud=True, remote="bundle")
    except DvcException as error:
        raise StageError(*str(error).splitlines()) from None
    if states:
        raise StageError(f"DVC's cache lacks {', '.join(states)}: {remedy}")
    for path in (directory / "files/md5").glob("*/*"):
        digest = hashlib.md5(usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        name = path.parent.name + path.name  # the listing of a directory is `<MD5>.dir`
        if digest.hexdigest() != name.removesuffix(".dir"):
            raise StageError(f"{name}, of DVC's cache, is damaged: delete it; {remedy}")
    return True


def output(*arguments: str) -> str:
    """What a command prints.

    Raises:
        StageError: it failed.
    """
    process = subprocess.run(arguments, capture_output=True, text=True, errors="surrogateescape")
    if process.returncode != 0:
        raise StageError(*f"{' '.join(arguments)}: {process.stderr.strip()}".splitlines())
    return process.stdout.strip()


if __name__ == "__main__":
    command.run(main)
