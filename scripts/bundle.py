"""Write everything that the project needs into a directory that can be carried to a machine without internet access.

Command   make bundle ARGS="..."     or     python -m scripts.bundle ...
There     python3 bundle/unbundle.py TARGET

The bundle contains the repository (`git bundle`), the packages of the lock for one Python and platform, the model that
data/model.json lists and its license, what DVC's cache has of some stages, compiled code, and with --raw the raw files.
Files are in tar archives of at most --part-size. SHA256SUMS lists everything, so `sha256sum -c SHA256SUMS` checks it
without our code. A bundle that was interrupted continues with the first part that is missing. docs/air-gap.md is the
guide.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple, cast

import yaml
from packaging.markers import Marker, default_environment
from tqdm import tqdm

from scripts import unbundle
from stages.artifacts import command, publish
from stages.artifacts.errors import StageError
from stages.artifacts.params_file import load_params
from stages.artifacts.record import FileEntry
from stages.corpus import splits, tree
from stages.corpus.formats import suffixes
from stages.download import DownloadParams
from stages.model.license import LICENSE, ModelLicense
from stages.model.manifest import MANIFEST, ModelManifest, changed_file, verify_file
from stages.organize import OrganizeParams, find_root
from stages.training.environment import COMPILE_CACHE

HF_HOME = PurePath(".hf")
"""Where the target has the models of the Hub."""
DATA_STAGES = ("organize", "extract", "download", "pack")
_IMAGE = ("Dockerfile", "apptainer.def")
_OLDEST_GLIBC = 5  # 2.5, of manylinux1
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PART = re.compile(r"part-\d{4,}-[0-9a-f]{12}\.(tar|tmp)")
_CHUNK = 1 << 20
_ALIGNMENT, _RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE


@dataclass(frozen=True)
class Platform:
    """The machine for which packages are chosen."""

    python: str
    """Such as 3.11."""
    machine: str
    """Such as x86_64."""
    glibc: tuple[int, int]

    @classmethod
    def parse(cls, python: str, name: str) -> "Platform":
        """From a version and a name such as manylinux_2_28_x86_64."""
        match = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", name)
        if not match or not re.fullmatch(r"3\.\d+", python):
            raise StageError(
                f"--python is {python!r} and --platform {name!r}: give them as 3.11 and manylinux_2_28_x86_64"
            )
        return cls(python, match[3], (int(match[1]), int(match[2])))

    def tags(self) -> list[str]:
        """The platform tags of wheels that run there, the newest first."""
        versions = [f"manylinux_2_{minor}" for minor in range(self.glibc[1], _OLDEST_GLIBC - 1, -1)]
        return [f"{tag}_{self.machine}" for tag in (*versions, "manylinux2014", "manylinux2010", "manylinux1", "linux")]

    def environments(self) -> Iterator[dict[str, str]]:
        """What the markers of a lock are compared with: for the first and the last release of that Python."""
        for release in (0, 99):
            yield {
                **cast("dict[str, str]", default_environment()),
                "python_version": self.python, "python_full_version": f"{self.python}.{release}",
                "implementation_version": f"{self.python}.{release}", "platform_machine": self.machine,
            }  # fmt: skip


class Piece(NamedTuple):
    """A member of a part: a file, or a range of one that is larger than a part."""

    path: str
    offset: int
    length: int
    sha256: str


class Hashing:
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        """The next bytes."""
        chunk = self.file.read(size)
        self.digest.update(chunk)
        return chunk


def main() -> None:
    """Write the bundle."""
    parser = command.parser(__doc__)
    option = parser.add_argument
    option("--to", type=Path, default=Path("bundle"), metavar="DIR", help="the bundle (default: bundle)")
    option("--since", type=Path, metavar="DIR", help="an earlier bundle, or its index.json: leave out what it contains")
    option("--build", choices=["cpu", "cuda"], help="the lock (default: the one that is installed here)")
    option("--python", default=f"3.{sys.version_info.minor}", metavar="3.N", help="default: the one that runs here")
    option("--platform", default=f"manylinux_2_28_{platform.machine()}", help="default: %(default)s")
    option("--stages", nargs="*", metavar="STAGE", help="whose results to carry (default: data stages that have run)")
    option("--raw", action="store_true", help="carry the raw files, too")
    option("--part-size", default="4G", metavar="SIZE", help="of each archive at most, such as 700M (default: 4G)")
    option("--sign", type=Path, metavar="KEY", help="sign SHA256SUMS with this key of ssh-keygen")
    args = parser.parse_args()

    target = Platform.parse(args.python, args.platform)
    part_size = parse_size(args.part_size)
    if args.since and args.since.resolve() in (args.to.resolve(), (args.to / unbundle.INDEX).resolve()):
        raise StageError(f"--since is {args.since}, which this bundle would replace: name another directory with --to")
    since = read_index(args.since) if args.since else None
    check_directory(args.to)
    commit, branch = committed()
    stages = chosen_stages(args.stages)
    notes: list[str] = []
    earlier = earlier_digests(since)
    earlier_raw: dict[str, str] = since["raw"] if since else {}
    following = next_command(stages, bool(args.raw or earlier_raw))

    args.to.mkdir(parents=True, exist_ok=True)
    (args.to / unbundle.SUMS).unlink(missing_ok=True)  # until it is written again, the bundle is not complete
    write_script_and_recipes(args.to, target, following)
    with tempfile.TemporaryDirectory() as scratch:
        raw_dir, raw = raw_files(notes) if args.raw else (None, {})
        build = args.build or installed_build()
        packages = wheels(build, target)
        sources = {
            **packages, **model(Path(scratch), notes), **dvc_cache(stages),
            **files_below(COMPILE_CACHE, str(COMPILE_CACHE)), **raw,
        }  # fmt: skip
        check_names(sources)
        entries, pieces = measure_all(sources, part_size)
        verify_model(sources, entries)
        for path in listed("git", "ls-files", "-z"):
            entries.pop(path, None)  # the repository has it
        carried = [path for path, entry in entries.items() if entry.sha256 != earlier.get(path)]
        parts = named_parts((piece for path in carried for piece in pieces[path]), part_size)
        digests = write_parts(args.to, sources, parts)
        index: dict[str, Any] = {
            "format": unbundle.FORMAT, "commit": commit, "branch": branch, "since": since and since["commit"],
            "python": target.python, "machine": target.machine, "glibc": target.glibc,
            "stages": stages, "notes": notes,
            "next": following,
            "lock": lock_digest(build), "unpacked": unpacked_size(packages.values()), "compiled": f"{COMPILE_CACHE}/",
            "files": {
                path: {"size": entry.size, "sha256": entry.sha256, "replaces": earlier.get(path)}
                for path, entry in entries.items()
            },
            # A raw file that is gone has to go there, too, even if a bundle between the two is without raw files.
            # Other files do no harm, and may have been made there again.
            "raw_dir": raw_dir,
            "raw": {path: entries[path].sha256 for path in raw if path in entries} if args.raw else earlier_raw,
            "removed": {path: digest for path, digest in earlier_raw.items() if args.raw and path not in raw},
            "parts": {name: [piece[:3] for piece in members] for name, members in parts.items()},
        }  # fmt: skip
    write_repository(args.to, index["since"], commit)
    publish.write_json(args.to / unbundle.INDEX, index)
    write_sums(args.to, digests)
    if args.sign:
        sign(args.to, args.sign)
    size = sum(path.stat().st_size for path in args.to.iterdir())
    print(f"bundle: {args.to}: {len(parts)} parts, {size / 1e6:,.1f} MB; {len(carried)} of {len(entries)} files")
    for note in notes:
        print(f"note: {note}")


def parse_size(text: str) -> int:
    """A number of bytes, from a text such as 4G.

    Raises:
        StageError: it is none, or too small for an archive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])B?", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 100_000:
        raise StageError(f"--part-size is {text!r}: give at least 100K, with one of the units K, M, G, T (4G)")
    return size


def read_index(path: Path) -> dict[str, Any]:
    """The index of an earlier bundle."""
    file = path / unbundle.INDEX if path.is_dir() else path
    try:
        index: dict[str, Any] = json.loads(file.read_bytes())
        if index["format"] != unbundle.FORMAT:
            raise StageError(f"--since: {file} has another format: make a bundle without --since")
    except (OSError, ValueError, KeyError, TypeError):
        raise StageError(f"--since is {path}: name an earlier bundle, or its {unbundle.INDEX}") from None
    return index


def check_directory(directory: Path) -> None:
    """Refuse a directory in which files would be lost, or that the next bundle would find in the project."""
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    if names and "unbundle.py" not in names:  # which is written first
        raise StageError(
            f"--to is {directory}, which has other files, such as {names[0]}: name a new directory, or that of a bundle"
        )
    path = in_project(directory)
    if path is not None:
        pattern = path + "/" * (not directory.is_symlink())
        if subprocess.run(["git", "check-ignore", "--quiet", pattern]).returncode != 0:
            raise StageError(
                f"--to is {directory}, in the project, where git does not ignore it: name it bundle-..., or elsewhere"
            )


def committed() -> tuple[str, str]:
    """The commit and the branch that the bundle has.

    Raises:
        StageError: files are not committed: they would be missing on the other side, silently.
    """
    dirty = [entry[3:] for entry in listed("git", "status", "--porcelain", "--no-renames", "-z")]
    if dirty:
        raise StageError(
            f"{len(dirty)} files are not in the last commit, and a bundle has commits only: {', '.join(dirty[:10])}\n"
            "commit them (dvc.lock with the results of the stages), or list them in .git/info/exclude"
        )
    if output("git", "rev-parse", "--is-shallow-repository") == "true":
        raise StageError("this clone has a part of the history: run `git fetch --unshallow` first")
    branch = output("git", "rev-parse", "--abbrev-ref", "HEAD")
    return output("git", "rev-parse", "HEAD"), "main" if branch == "HEAD" else branch


def installed_build() -> str:
    """The build that `make setup` has installed here."""
    try:
        return Path(".venv/.setup").read_text().split()[1]
    except (OSError, IndexError):
        raise StageError("which lock? run `make setup` first, or give --build cpu or --build cuda") from None


def requirements(lock: str, environment: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """The packages of a lock that are installed in an environment, each with its hashes."""
    for block in re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)[1:]:
        requirement, _, marker = block.partition("\\")[0].partition(";")
        if not marker or Marker(marker.strip()).evaluate(environment):
            yield requirement.strip(), re.findall(r"--hash=sha256:(\w+)", block)


def wheels(build: str, target: Platform) -> dict[str, Path]:
    """The files of all packages, by path in the target; those that are missing in wheels/ are downloaded.

    pip compares the markers of a lock with the Python that runs it, even if another one is asked for. So they are
    evaluated here.
    """
    directory = Path("wheels", f"{build}-{target.python}-{target.glibc[0]}.{target.glibc[1]}-{target.machine}")
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    present = by_digest(directory)
    for name in (build, "encoder"):
        lock = Path(f"requirements-{name}.lock").read_text(encoding="utf-8")
        for environment in target.environments():
            needed = dict(requirements(lock, environment))
            missing = {line: hashes for line, hashes in needed.items() if not present.keys() & set(hashes)}
            if missing:
                download(missing, directory, target)
                present = by_digest(directory)
            for hashes in needed.values():
                found |= {f"wheels/{present[digest].name}": present[digest] for digest in hashes if digest in present}
    return dict(sorted(found.items()))


def unpacked_size(packages: Iterable[Path]) -> int:
    """The bytes that wheels have when they are installed."""
    size = 0
    for path in packages:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                size += sum(member.file_size for member in archive.infolist())
    return size


def lock_digest(build: str) -> str:
    """What scripts/setup.sh notes when it has installed the packages of a build."""
    return hashlib.sha256(b"".join(Path(f"requirements-{x}.lock").read_bytes() for x in (build, "encoder"))).hexdigest()


def by_digest(directory: Path) -> dict[str, Path]:
    """The files of a directory by their SHA-256."""
    return {publish.sha256_file(path): path for path in directory.iterdir()}


def download(missing: dict[str, list[str]], directory: Path, target: Platform) -> None:
    """Fetch packages with pip, which knows mirrors, proxies and certificates."""
    print(f"bundle: downloading {len(missing)} packages for Python {target.python} on {target.machine}", flush=True)
    lines = [" ".join([line, *(f"--hash=sha256:{digest}" for digest in hashes)]) for line, hashes in missing.items()]
    platforms = [part for tag in target.tags() for part in ("--platform", tag)]
    # A package without wheel needs setuptools for its name and version: this environment has it.
    options = ["--no-deps", "--no-build-isolation", "--require-hashes", "--dest", str(directory)]
    process = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-qq", *options, "--python-version", target.python, *platforms,
         "--implementation", "cp", "--requirement", "/dev/stdin"], input="\n".join(lines), text=True,
    )  # fmt: skip
    if process.returncode != 0:
        raise StageError(
            "pip could not download all packages, see above: it needs an index or a directory with files for this "
            "Python and platform (PIP_INDEX_URL, PIP_FIND_LINKS); the next run continues"
        )


def model(scratch: Path, notes: list[str]) -> dict[str, Path]:
    """The files of the model, by path in the target."""
    params = load_params(DownloadParams)
    name = params.model_name
    if not MANIFEST.is_file():
        if in_project(Path(name)) and listed("git", "ls-files", "-z", "--", name):
            return {}
        raise StageError(
            f"{MANIFEST} is missing, so it is unknown which files {name!r} has: `dvc repro download` first"
        )
    manifest = ModelManifest.read()
    if manifest.model_name != name:
        raise StageError(
            f"{MANIFEST} describes {manifest.model_name!r}, model_name is {name!r}: `dvc repro download` first"
        )
    if manifest.commit and manifest.model_revision != params.model_revision:
        raise StageError(
            f"{MANIFEST} describes {name!r} at {manifest.model_revision!r}, params.yaml names it at "
            f"{params.model_revision!r}: `dvc repro download` first"
        )
    directory, files = manifest.directory(), model_files(manifest)
    for file, entry in files.items():
        verify_file(directory / file, entry, contents=False)
    if manifest.commit is None:
        base = in_project(directory)
        if base is None:
            base = f"models/{directory.name}"
            if listed("git", "ls-files", "-z", "--", base):
                raise StageError(
                    f"the model {name} would be in {base} there, where the repository has another model: rename its "
                    "directory"
                )
            notes.append(f"the model {name} is in {base} there: set model_name: {base}")
        return {f"{base}/{file}": directory / file for file in files}
    # As the Hub's own cache: where there are no links, it has files in their places.
    cache = directory.parent.parent
    base = str(HF_HOME / "hub" / cache.name)
    found = {f"{base}/snapshots/{manifest.commit}/{file}": (directory / file).resolve() for file in files}
    listing = cache / "trees" / f"{manifest.commit}.json"  # which files the model has on the Hub
    if listing.is_file():
        found[f"{base}/trees/{listing.name}"] = listing
    if manifest.model_revision != manifest.commit:  # else it could be found by its commit only
        reference = scratch / "reference"
        reference.write_text(manifest.commit)
        found[f"{base}/refs/{manifest.model_revision}"] = reference
    notes.append(f"the model is in {HF_HOME} there: export HF_HOME=$PWD/{HF_HOME} HF_HUB_OFFLINE=1")
    return found


def model_files(manifest: ModelManifest) -> dict[str, FileEntry]:
    """The files of the model, and those that say its license."""
    return manifest.files | (ModelLicense.read().files if LICENSE.is_file() else {})


def verify_model(sources: dict[str, Path], entries: dict[str, FileEntry]) -> None:
    """Compare the files of the model that are carried with data/model.json."""
    if MANIFEST.is_file():
        manifest = ModelManifest.read()
        directory = manifest.directory()
        wanted = {(directory / file).resolve(): entry for file, entry in model_files(manifest).items()}
        for path, source in sources.items():
            if wanted.get(source.resolve(), entries[path]) != entries[path]:
                raise changed_file(source)


def next_command(carried: list[str], has_raw: bool) -> str:
    """What trains on the other side."""
    if has_raw or not carried:
        return "make repro"
    # Of stages that dvc.lock has, --allow-missing takes results that are missing for up to date. So these are forced,
    # one by one: --force alone would run the data stages too.
    others = [name for name in yaml.safe_load(Path("dvc.yaml").read_text())["stages"] if name not in carried]
    if locked_stages().keys().isdisjoint(others):
        return "make repro ARGS=--allow-missing"
    return f"make repro ARGS='--allow-missing --force --single-item {' '.join(others)}'"


def locked_stages() -> dict[str, Any]:
    """The stages that have run, as dvc.lock has them."""
    return yaml.safe_load(Path("dvc.lock").read_text())["stages"] if Path("dvc.lock").is_file() else {}


def chosen_stages(names: list[str] | None) -> list[str]:
    """The stages whose results are carried: those that are named, or the data stages that have run."""
    locked = locked_stages()
    if names is None:
        return [name for name in DATA_STAGES if name in locked]
    for name in names:
        if name not in locked:
            raise StageError(f"--stages: {name!r} has no results in dvc.lock, which has {', '.join(locked) or 'none'}")
    return names


def dvc_cache(stages: Sequence[str]) -> dict[str, Path]:
    """The files of DVC's cache that the results of some stages consist of, by path in the target."""
    if not stages:
        return {}
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo() as repo:
            used = {info.value for infos in repo.used_objs(targets=list(stages)).values() for info in infos}
            cache = repo.cache.local
            paths = {digest: Path(cache.oid_to_path(digest)) for digest in sorted(used)}
    except DvcException as error:
        raise StageError(str(error)) from None
    if lost := [digest for digest, path in paths.items() if not path.is_file()]:
        raise StageError(
            f"DVC's cache lacks {len(lost)} files of the results of {', '.join(stages)}, such as {lost[0]}: run "
            "`dvc repro` or `dvc pull` for these stages, or choose others with --stages"
        )
    for digest, path in paths.items():
        if md5_file(path) != digest.partition(".")[0]:  # the listing of a directory is `<MD5>.dir`
            raise StageError(
                f"{path}, of DVC's cache, is damaged: delete it, and run `dvc repro` or `dvc pull` for the stages "
                f"{', '.join(stages)}"
            )
    return {f".dvc/cache/files/md5/{digest[:2]}/{digest[2:]}": path for digest, path in paths.items()}


def md5_file(path: Path) -> str:
    """The MD5 of a file's bytes, in hexadecimal: its name in DVC's cache."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        for chunk in unbundle.chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def raw_files(notes: list[str]) -> tuple[str, dict[str, Path]]:
    """The directory of the raw files in the target, and the files by path in the target."""
    raw_dir = load_params(OrganizeParams).raw_dir
    root = find_root(raw_dir)
    base = in_project(root)
    if base is None:
        base = "data/raw"
        notes.append(f"the raw files of {raw_dir} are in {base} there: set raw_dir: {base}")
    read, passed_over = tree.walk(root, lambda name: suffixes.find(name) is not None)
    links = [item.path for item in passed_over if "link" in item.reason]
    if links:
        first = splits.printable(links[0])
        notes.append(f"{len(links)} links in {raw_dir} are not carried, such as {first}: organize passes them over")
    # All other files, also those that organize does not read: DVC hashes them.
    through_links = {f"{base}/{path}": root / path for path in read if (root / path).is_symlink()}
    return base, {**files_below(root, base), **through_links}


def in_project(directory: Path) -> str | None:
    """The path of a directory relative to the project; None: it is elsewhere."""
    path = Path(os.path.normpath(Path.cwd() / directory))  # not resolved: a link to another disk is in the project
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else None


def files_below(root: Path, base: str) -> dict[str, Path]:
    """All regular files below a directory, by path in the target."""
    found = {}
    for parent, directories, names in os.walk(root):
        directories.sort()
        for path in (Path(parent, name) for name in sorted(names)):
            if path.is_file() and not path.is_symlink():
                found[f"{base}/{path.relative_to(root)}"] = path
    return found


def check_names(paths: Iterable[str]) -> None:
    """Refuse names that the index, which is text, cannot have."""
    for path in paths:
        if splits.printable(path) != path:
            raise StageError(f"{splits.printable(path)} has a name that is not UTF-8: rename it")


def measure_all(sources: dict[str, Path], part_size: int) -> tuple[dict[str, FileEntry], dict[str, list[Piece]]]:
    """Size and SHA-256 of each file, and its pieces."""
    entries, pieces = {}, {}
    total = sum(path.stat().st_size for path in sources.values())
    with tqdm(total=total, desc="sha256", unit="B", unit_scale=True, disable=None) as progress:
        for path, source in sources.items():
            entries[path], pieces[path] = measure(path, source, part_size)
            progress.update(entries[path].size)
    return entries, pieces


def measure(path: str, source: Path, part_size: int) -> tuple[FileEntry, list[Piece]]:
    """Size and SHA-256 of a file, and its pieces, each as large as a part if there are several."""
    room = (_empty(part_size) - _overhead(path)) // _ALIGNMENT * _ALIGNMENT
    if source.stat().st_size <= room:
        entry = FileEntry.of(source)
        return entry, [Piece(path, 0, entry.size, entry.sha256)]
    pieces: list[Piece] = []
    with source.open("rb") as file:
        whole = Hashing(file)  # read once, so that the digest of the whole is that of the pieces
        while file.tell() < os.fstat(file.fileno()).st_size:
            offset, digest = file.tell(), hashlib.sha256()
            while chunk := whole.read(min(_CHUNK, offset + room - file.tell())):
                digest.update(chunk)
            pieces.append(Piece(path, offset, file.tell() - offset, digest.hexdigest()))
        return FileEntry(file.tell(), whole.digest.hexdigest()), pieces


def earlier_digests(since: dict[str, Any] | None) -> dict[str, str]:
    """The SHA-256 of each file of an earlier bundle, and of those before it, as far as raw files go."""
    return since["raw"] | {path: entry["sha256"] for path, entry in since["files"].items()} if since else {}


def plan_parts(pieces: Iterable[Piece], part_size: int) -> Iterator[list[Piece]]:
    """Fill parts with pieces in their order."""
    part: list[Piece] = []
    free = _empty(part_size)
    for piece in pieces:
        size = _overhead(piece.path) + _round_up(piece.length)
        if size > free:
            yield part
            part, free = [], _empty(part_size)
        part.append(piece)
        free -= size
    if part:
        yield part


def _empty(part_size: int) -> int:
    return part_size - _RECORD  # the end of an archive is at most that long


def _overhead(path: str) -> int:
    # The header; before it, for a long name, another one and the name itself.
    return 2 * _ALIGNMENT + _round_up(len(path.encode()) + 1)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def named_parts(pieces: Iterable[Piece], part_size: int) -> dict[str, list[Piece]]:
    """The pieces of each part, by its name, which contains a digest of what it contains."""
    named = {}
    for number, part in enumerate(plan_parts(pieces, part_size), 1):
        digest = hashlib.sha256(json.dumps(part).encode()).hexdigest()
        named[f"part-{number:04}-{digest[:12]}.tar"] = part
    return named


def write_parts(directory: Path, sources: dict[str, Path], parts: dict[str, list[Piece]]) -> dict[str, str]:
    """Write the parts that are missing or damaged, and delete those of another bundle.

    Returns:
        The SHA-256 of each part.
    """
    for path in directory.iterdir():
        if _PART.fullmatch(path.name) and path.name not in parts:
            path.unlink()
    digests = {}
    total = sum(piece.length for pieces in parts.values() for piece in pieces)
    with tqdm(total=total, desc="parts", unit="B", unit_scale=True, disable=None) as progress:
        for name, pieces in parts.items():
            part = directory / name
            if not part.is_file() or (digest := part_digest(part, pieces)) is None:
                write_part(part, pieces, sources)
                digest = part_digest(part, pieces)
            if digest is None:
                raise StageError(f"{part} has other bytes than were written: is the disk damaged?")
            digests[name] = digest
            progress.update(sum(piece.length for piece in pieces))
    return digests


def write_part(part: Path, pieces: Iterable[Piece], sources: dict[str, Path]) -> None:
    """Write a part."""
    with (
        written(part) as file,
        # The format that every tar reads, with names as on the other side, whatever the locale is here.
        tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as archive,
    ):
        for piece in pieces:
            add(archive, piece, sources[piece.path])


def part_digest(part: Path, pieces: Sequence[Piece]) -> str | None:
    """The SHA-256 of a part; None if it does not contain these pieces."""
    with part.open("rb") as file:
        whole, found = Hashing(file), []
        try:
            with tarfile.open(fileobj=cast("BinaryIO", whole), mode="r|", encoding="utf-8") as archive:
                for member in archive:
                    content = Hashing(cast("BinaryIO", archive.extractfile(member)))
                    while content.read(_CHUNK):
                        pass
                    found.append((member.name, content.digest.hexdigest()))
        except tarfile.TarError:
            return None
        while whole.read(_CHUNK):
            pass
    return whole.digest.hexdigest() if found == [(piece.path, piece.sha256) for piece in pieces] else None


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name only when it is complete and on the disk."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def add(part: tarfile.TarFile, piece: Piece, source: Path) -> None:
    """Add a piece of a file to a part; the bytes depend on nothing else, such as owners or times."""
    member = tarfile.TarInfo(piece.path)
    member.size = piece.length
    with source.open("rb") as file:
        file.seek(piece.offset)
        content = Hashing(file)
        try:
            part.addfile(member, cast("BinaryIO", content))
        except OSError as error:
            if error.errno is not None:
                raise  # else it is tarfile's own: the file became shorter
        if content.digest.hexdigest() != piece.sha256:
            raise StageError(f"{source} changed while it was bundled: run it again")


def write_repository(directory: Path, since: str | None, commit: str) -> None:
    """The commits that an earlier bundle lacks; nothing if there are none."""
    file = directory / unbundle.REPOSITORY
    file.unlink(missing_ok=True)
    if since != commit:
        output("git", "bundle", "create", "--quiet", str(file), "HEAD", *([f"^{since}"] if since else []))


def write_script_and_recipes(directory: Path, target: Platform, following: str) -> None:
    """What is read before anything is unpacked: the script, and the recipes of images."""
    shutil.copyfile(unbundle.__file__, directory / "unbundle.py")
    for name in _IMAGE:
        recipe = Path(__file__).with_name("image") / name
        text = recipe.read_text().replace("PYTHON_VERSION", target.python).replace("NEXT_COMMAND", following)
        (directory / name).write_text(text)


def write_sums(directory: Path, parts: dict[str, str]) -> None:
    """The digests of all files of the bundle, as `sha256sum` writes them; last, so that it stands for the others."""
    (directory / unbundle.SIGNATURE).unlink(missing_ok=True)
    names = [
        name for name in (unbundle.INDEX, "unbundle.py", *_IMAGE, unbundle.REPOSITORY) if (directory / name).is_file()
    ]
    digests = {**parts, **{name: publish.sha256_file(directory / name) for name in names}}
    publish.write_text(directory / unbundle.SUMS, "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)))


def sign(directory: Path, key: Path) -> None:
    """Sign the list of digests."""
    sums = directory / unbundle.SUMS
    if subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", unbundle.NAMESPACE, sums]).returncode != 0:
        raise StageError(f"--sign: ssh-keygen could not sign with {key}, see above; the bundle itself is complete")


def output(*arguments: str) -> str:
    """What a command prints.

    Raises:
        StageError: it failed.
    """
    process = subprocess.run(arguments, capture_output=True, text=True)
    if process.returncode != 0:
        raise StageError(f"{' '.join(arguments)}: {process.stderr.strip()}")
    return process.stdout.strip()


def listed(*arguments: str) -> list[str]:
    """The names, each ended by a null byte, that a command prints."""
    process = subprocess.run(arguments, capture_output=True)
    if process.returncode != 0:
        raise StageError(f"{' '.join(arguments)}: {os.fsdecode(process.stderr).strip()}")
    return [os.fsdecode(name) for name in process.stdout.split(b"\0") if name]


if __name__ == "__main__":
    command.run(main, after_interrupt="the next run continues")
