"""Carry the project to a machine without internet access: make a bundle here, and there install it with its own copy.

    make bundle ARGS="..."   or   python -m scripts.bundle ...
    python3 BUNDLE/unbundle.py TARGET        there, with Python and git alone; again with each later bundle

    repository.bundle    the commits of the branch (`git bundle`)
    wheels/              the packages of the lock, for one Python and platform (`pip download`)
    dvc/                 what DVC tracks: the results of all stages that have run, and with --raw the raw files
    hf/                  the model, if it is one of the Hub
    SHA256SUMS           of all files: `sha256sum -c SHA256SUMS` checks them without this script

docs/air-gap.md is the guide. A Python that is too old for the packages has to get as far as the message about that. So
there is no syntax here that Python 3.6, which many clusters have as python3, does not know.
"""

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ABOUT: "dict[str, str]" = {}
"""What the copy in a bundle knows of it: `python` and `machine` that it is for, `next`, the command that follows."""

REPOSITORY, WHEELS, RESULTS, HUB, SUMS = "repository.bundle", "wheels", "dvc", "hf", "SHA256SUMS"
CACHE = ".hf"
"""Where the pipeline looks for models of the Hub."""
UNFINISHED = ".unbundle"
"""How the name of a clone ends that an interrupted unbundle has left; the next one replaces it."""


class Refused(Exception):
    """No bundle can be made or installed; each argument is a line about the reason and the remedy."""


def make() -> None:
    """Write a bundle; it appears when it is complete."""
    from stages.base import command, publish
    from stages.base.errors import StageError

    parser = command.parser(__doc__)
    option = parser.add_argument
    option("--to", type=Path, default=Path("bundle"), metavar="DIR", help="a new directory (default: bundle)")
    option("--build", choices=["cpu", "cuda"], help="the lock (default: the one that is installed here)")
    option("--python", default=f"3.{sys.version_info.minor}", metavar="3.N", help="default: %(default)s")
    option("--platform", default="manylinux_2_28_" + platform.machine(), help="default: %(default)s")
    option("--raw", action="store_true", help="carry the raw files, too, which `dvc add` has to track")
    args = parser.parse_args()
    try:
        if args.to.exists():
            raise Refused(f"--to is {args.to}, which exists: delete it, or name another directory")
        if not re.fullmatch(r"3\.\d+", args.python):  # with which unbundle.py compares its own
            raise Refused(f"--python is {args.python!r}: give it as 3.12, without more")
        found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", args.platform)
        if not found:
            raise Refused(f"--platform is {args.platform!r}: give it as manylinux_2_28_x86_64, glibc and processor")
        tracked = committed()
        with publish.directory(args.to) as new:
            branch = git("rev-parse", "--abbrev-ref", "HEAD").strip()
            git("bundle", "create", "--quiet", str(new / REPOSITORY), *{"HEAD", branch})
            download(args.build or installed_build(), args.python, int(found[1]), found[2], new / WHEELS)
            copy_model(tracked, new / HUB)
            has_results = push(tracked, new / RESULTS, args.raw)
            following = "make repro" if args.raw or not has_results else "make repro ARGS=--allow-missing"
            about = {"python": args.python, "machine": found[2], "next": following}
            script = Path(__file__).read_text(encoding="utf-8")
            script = re.sub("(?m)^ABOUT: .*", lambda _: f"ABOUT = {about}", script)
            publish.write_text(new / "unbundle.py", script)
            for recipe in Path(__file__).with_name("image").iterdir():
                text = recipe.read_text().replace("PYTHON_VERSION", args.python).replace("NEXT_COMMAND", following)
                publish.write_text(new / recipe.name, text)
            sums = {str(path.relative_to(new)): digest_of(path) for path in new.rglob("*") if path.is_file()}
            publish.write_text(new / SUMS, "".join(f"{sums[path]}  {path}\n" for path in sorted(sums)))
    except Refused as error:
        raise StageError(*error.args) from None
    size = sum((args.to / path).stat().st_size for path in sums)
    print(f"bundle: {args.to}: {len(sums)} files, {size / 1e6:,.1f} MB")
    print(f"the SHA-256 of its {SUMS} is {digest_of(args.to / SUMS)}")


def committed() -> "set[str]":
    """The files that git tracks; it must have all of them, as they are: others would be missing there, silently."""
    dirty = git("status", "--porcelain", "--no-renames").splitlines()
    if dirty:
        names = ", ".join(line.split(maxsplit=1)[1] for line in dirty[:10])
        remedy = "commit them (dvc.lock with the results of the stages), or list them in .git/info/exclude"
        raise Refused(f"{len(dirty)} files are not in the last commit, and a bundle has commits only: {names}", remedy)
    if git("rev-parse", "--is-shallow-repository") == "true\n":
        raise Refused("this clone has a part of the history: run `git fetch --unshallow` first")
    return {*git("ls-files", "-z").split("\0")} - {""}


def installed_build() -> str:
    """The build that `make setup` has installed here."""
    try:
        return Path(".venv/.setup").read_text().split()[1]
    except (OSError, IndexError):
        raise Refused("which lock? run `make setup` first, or give --build cpu or --build cuda") from None


def requirements(lock: str, python: str, machine: str) -> "Iterator[str]":
    """The packages of a lock, with their hashes, that another Python and machine need.

    pip compares the markers with the Python that runs it, even if it downloads for another one.
    """
    from packaging.markers import Marker

    there = {"python_version": python, "python_full_version": python + ".0", "platform_machine": machine}
    for block in re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)[1:]:
        requirement, _, marker = block.partition("\\")[0].partition(";")
        if not marker or Marker(marker.strip()).evaluate(there):
            yield requirement.strip() + " " + " ".join(re.findall(r"--hash=\S+", block))


def download(build: str, python: str, glibc: int, machine: str, wheels: Path) -> None:
    """Fetch the packages with pip, which knows mirrors, proxies and certificates."""
    tags = [f"manylinux_2_{minor}" for minor in range(glibc, 4, -1)]  # 2.5 is that of manylinux1
    tags += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
    for name in (build, "encoder", "score"):
        needed = [*requirements(Path(f"requirements-{name}.lock").read_text(encoding="utf-8"), python, machine)]
        print(f"bundle: downloading {len(needed)} packages of requirements-{name}.lock", flush=True)
        # A package without wheel needs setuptools for its name and version: this environment has it.
        process = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-build-isolation", "--require-hashes",
             "--implementation", "cp", "--python-version", python, *(f"--platform={tag}_{machine}" for tag in tags),
             "--dest", str(wheels), "--requirement", "/dev/stdin"], input="\n".join(needed), encoding="utf-8",
        )  # fmt: skip
        if process.returncode != 0:
            raise Refused(
                f"pip could not download all packages for Python {python} on {machine}, see above: it needs an index "
                "or a directory that has them (PIP_INDEX_URL, PIP_FIND_LINKS)"
            )


def copy_model(tracked: "set[str]", hf: Path) -> None:
    """Copy a model of the Hub as its cache has it, compared with its manifest; git or DVC must have another one."""
    from stages.base import publish
    from stages.base.files import check_files
    from stages.base.params_file import load_params
    from stages.download import DownloadParams
    from stages.model.license import LICENSE, ModelLicense
    from stages.model.manifest import MODEL_MANIFEST, REMEDY, ModelManifest

    params = load_params(DownloadParams)
    name = os.path.normpath(params.model_name)
    if any(path == name + ".dvc" or path.startswith(name + "/") for path in tracked):
        return
    if Path(name).is_dir():
        raise Refused(f"neither git nor DVC tracks the model {name}: move it below models/, `dvc add` it, and commit")
    manifest = ModelManifest.read() if MODEL_MANIFEST.is_file() else None
    wanted = (params.model_name, params.model_revision)
    if manifest is None or manifest.commit is None or (manifest.model_name, manifest.model_revision) != wanted:
        raise Refused(
            f"{MODEL_MANIFEST} is missing, or of another model than {name} at {wanted[1]}: `dvc repro download`"
        )
    source, commit = manifest.directory(), manifest.commit
    cache = source.parent.parent
    files = {**manifest.files, **(ModelLicense.read().files if LICENSE.is_file() else {})}
    check_files({source / file: entry for file, entry in files.items()}, REMEDY)
    copies = {source / file: Path("snapshots", commit, file) for file in files}
    copies[cache / f"trees/{commit}.json"] = Path(f"trees/{commit}.json")  # which files the model has on the Hub
    for path in filter(Path.is_file, copies):
        final = hf / "hub" / cache.name / copies[path]
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(path), str(final))
    if params.model_revision != commit:
        publish.write_text(hf / "hub" / cache.name / "refs" / params.model_revision, commit)


def push(tracked: "set[str]", directory: Path, raw: bool) -> bool:
    """Copy what DVC tracks into a remote in the bundle; returns whether there are results of stages."""
    import yaml
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    from stages.base.params_file import load_params
    from stages.organize import OrganizeParams

    raw_file = os.path.normpath(load_params(OrganizeParams).raw_dir) + ".dvc"
    if raw and raw_file not in tracked:
        raise Refused(f"--raw: DVC does not track {raw_file[:-4]}: `dvc add {raw_file[:-4]}`, and commit {raw_file}")
    lock = yaml.safe_load(Path("dvc.lock").read_text(encoding="utf-8")) if "dvc.lock" in tracked else {}
    stages = list(lock.get("stages", {}))
    targets = stages + sorted(path for path in tracked if path.endswith(".dvc") and (raw or path != raw_file))
    if not targets:
        return False
    remedy = "`dvc repro` or `dvc pull` writes it again"
    try:
        with Repo(config={"remote": {"bundle": {"url": str(directory.resolve())}}}) as repo:
            repo.push(targets, remote="bundle")
            lacking = repo.status(targets, cloud=True, remote="bundle")
    except DvcException as error:
        raise Refused(*str(error).splitlines()) from None
    if lacking:
        raise Refused(f"DVC's cache lacks {', '.join(lacking)}: {remedy}")
    for path in (directory / "files/md5").glob("*/*"):
        name = path.parent.name + path.name  # the listing of a directory is `<MD5>.dir`
        if digest_of(path, "md5") != name.replace(".dir", ""):
            raise Refused(f"{name}, of DVC's cache, is damaged: delete it; {remedy}")
    return bool(stages)


# From here on, on the other side.


def install(bundle: Path, target: Path) -> None:
    """Verify the bundle, then bring it into the target. Nothing there is changed before all of it is verified."""
    print(f"verifying {bundle}", flush=True)
    sums = verify(bundle)
    check_machine(target)
    update_repository(bundle, target)
    for path in sorted(path for path in sums if path.startswith(HUB + "/")):
        final = target / CACHE / path[len(HUB) + 1 :]
        if not final.is_file() or digest_of(final) != sums[path]:  # such as a part of it
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(bundle / path), str(final))
    # No settings of this machine: an index or a proxy in them cannot be reached from here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment.update(PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    environment["PIP_FIND_LINKS"] = (bundle / WHEELS).as_uri()  # a URL, because pip splits a path at its spaces
    dvc, commands = str(target / ".venv/bin/dvc"), [[str(target / "scripts/setup.sh")]]
    if any((bundle / WHEELS).glob("lm_eval-*")):  # which `score` could not fetch there
        commands.append([str(target / ".venv/bin/python"), "-m", "stages.scoring.packages"])
    if (bundle / RESULTS).is_dir():
        commands.append([dvc, "remote", "add", "--quiet", "--local", "--force", "bundle", str(bundle / RESULTS)])
        commands.append([dvc, "pull", "--remote", "bundle", "--allow-missing"])  # without --raw it lacks the raw files
    for command in commands:
        if subprocess.run(command, env=environment, cwd=str(target)).returncode != 0:
            raise Refused(f"{shlex.quote(command[0])} failed, see above: remove the cause, and run this again")
    print("unbundled: cd {} && {}".format(shlex.quote(str(target)), ABOUT["next"]))


def verify(bundle: Path) -> "dict[str, str]":
    """The digest of each file, by its path. The bundle must have these files, no others, and no links."""
    if not (bundle / SUMS).is_file():
        raise Refused(f"{bundle / SUMS} is missing: copy the whole bundle again")
    text = (bundle / SUMS).read_text(encoding="utf-8", errors="surrogateescape")
    sums = {path: expected for expected, _, path in (line.partition("  ") for line in text.split("\n") if line)}
    found: set[str] = set()
    for parent, directories, names in os.walk(str(bundle)):
        for path in [os.path.join(parent, name) for name in [*directories, *names]]:
            if os.path.islink(path) or not (os.path.isfile(path) or os.path.isdir(path)):
                raise Refused(f"{path} is neither a file nor a directory: copy the bundle again")
        found.update(os.path.relpath(os.path.join(parent, name), str(bundle)) for name in names)
    problems = [f"{bundle / path} is not listed in {SUMS}: delete it" for path in found - {SUMS} - set(sums)]
    for path in sums:
        if path not in found:
            problems.append(f"{bundle / path} is missing: copy it again")
        elif digest_of(bundle / path) != sums[path]:
            problems.append(f"{bundle / path} is damaged: copy it again")
    if problems:
        raise Refused(*sorted(problems), "nothing was installed")
    return sums


def check_machine(target: Path) -> None:
    """Refuse a Python, here or in the target, or a machine for which the bundle has no packages."""
    wanted, here = ABOUT["python"], "{}.{}".format(*sys.version_info[:2])
    if here != wanted:
        found = shutil.which("python" + wanted)
        remedy = "run it with " + found if found else f"install it, or `make bundle ARGS='--python {here}'`"
        raise Refused(f"the bundle is for Python {wanted}, and {sys.executable} is Python {here}: {remedy}")
    settings = target / ".venv/pyvenv.cfg"
    there = re.search(r"(?m)^version(?:_info)? *= *(\d+\.\d+)", settings.read_text()) if settings.is_file() else None
    if there and there[1] != wanted:
        raise Refused(f"the bundle is for Python {wanted}, and {target / '.venv'} has Python {there[1]}: delete .venv")
    machine = platform.machine()
    if machine != ABOUT["machine"]:
        remedy = f"bundle with --platform manylinux_2_28_{machine}"
        raise Refused(f"the bundle is for processors of type {ABOUT['machine']}; this machine is {machine}: {remedy}")


def update_repository(bundle: Path, target: Path) -> None:
    """Clone the repository, or bring the clone to the bundle's commit; nothing of its own is overwritten."""
    names = {path.name for path in target.iterdir()} if target.exists() else set()
    if names and ".git" not in names:
        raise Refused(f"{target} has other files, such as {min(names)}: name a new or empty directory")
    changed = git("-C", str(target), "status", "--porcelain", "--untracked-files=no").splitlines() if names else []
    if changed:
        raise Refused(f"{target} has changes that are not committed, such as {changed[0][3:]}: commit or revert them")
    clone = target if names else target.with_name(target.name + UNFINISHED)
    if not names:
        shutil.rmtree(str(clone), ignore_errors=True)
        clone.parent.mkdir(parents=True, exist_ok=True)
        git("clone", "--quiet", str(bundle / REPOSITORY), str(clone))
    git("-C", str(clone), "fetch", "--quiet", str(bundle / REPOSITORY), "HEAD")
    if git("-C", str(clone), "ls-tree", "FETCH_HEAD", CACHE):
        raise Refused(f"the bundle is not safe: its repository has {CACHE}, where the model belongs")
    git("-C", str(clone), "merge", "--quiet", "--ff-only", "FETCH_HEAD")  # which names what is in its way
    if not names:
        os.rename(str(clone), str(target))


def git(*arguments: str) -> str:
    """What git prints."""
    process = subprocess.run(["git", *arguments], stdout=-1, stderr=-1, encoding="utf-8", errors="surrogateescape")
    if process.returncode != 0:
        raise Refused(*f"git {' '.join(arguments)} failed: {process.stderr.strip()}".splitlines())
    return process.stdout


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """The digest of a file's content, in hex."""
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def main() -> None:
    """Install the bundle that this copy is in; exit status 2 if it was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="TARGET", help="a new or empty directory; or the project, for a later bundle")
    target = Path(parser.parse_args().target).absolute()
    try:
        install(Path(__file__).absolute().parent, target)
    except (Refused, OSError) as error:
        for line in error.args if isinstance(error, Refused) else [str(error)]:
            # On one line, and printable: names in a bundle must not look like our messages.
            line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
            print("error: " + line, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: run it again", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    if ABOUT:
        main()
    else:
        from stages.base import command

        command.run(make)
