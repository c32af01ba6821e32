"""Verify a bundle that `make bundle` wrote, and install it: project, packages, model, data. No network is needed.

    python3 BUNDLE/unbundle.py TARGET
    python3 BUNDLE/unbundle.py TARGET --allowed-signers FILE     # refuses a bundle that none of them signed

This script is in the bundle itself and needs nothing but Python and git. Before anything is written it checks the
signature, the digest of every file of the bundle, the names and sizes in its parts, Python, processor and C library,
free disk space, and that no file of TARGET would be lost. A run that was interrupted can be repeated.

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
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

FORMAT = 1
"""Of `index.json`; it grows when an older unbundle.py could not read a new bundle."""
INDEX = "index.json"
SUMS = "SHA256SUMS"
SIGNATURE = SUMS + ".sig"
REPOSITORY = "repository.bundle"
NAMESPACE = "bundle"
"""Of signatures: one that was made for anything else is not accepted."""
_TEMPORARY = ".unbundle"
"""The name that a file has, beside its place, until it is complete; organize passes over what begins with a dot."""
_UPDATING = "refs/unbundle/updating"
"""The commit to which git brings the files of the target, while it does: after a kill, they may be half written."""
_CHUNK = 1 << 20


class Refused(Exception):
    """The bundle cannot be installed; the message names the reason and the remedy."""


def main() -> None:
    """Run the command; exit status 2 if the bundle was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="TARGET", help="a new or empty directory; or the project, for a later bundle")
    parser.add_argument("--allowed-signers", metavar="FILE", help="refuse a bundle that none of these keys has signed")
    args = parser.parse_args()
    signers = Path(args.allowed_signers).absolute() if args.allowed_signers else None
    try:
        unbundle(Path(__file__).absolute().parent, Path(args.target).absolute(), signers)
    except (Refused, OSError) as error:
        for line in str(error).splitlines():
            print("error: " + line, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: run it again", file=sys.stderr)
        sys.exit(130)


def unbundle(bundle: Path, target: Path, allowed_signers: "Path | None" = None) -> None:
    """Verify the bundle, then install it.

    Raises:
        Refused: nothing in `target` was changed, unless the message is about the installation itself.
    """
    index = verify(bundle, allowed_signers)
    needed = check_target(index, target)
    print(f"verified: commit {index['commit'][:12]}, {len(index['files'])} files", flush=True)

    target.mkdir(parents=True, exist_ok=True)
    update_repository(bundle, index, target)
    extract(bundle, index, target, needed)
    install(index, target)
    for note in index["notes"]:
        print("note: " + note)
    print(f"unbundled: cd {shlex.quote(str(target))} && {index['next']}")


def verify(bundle: Path, allowed_signers: "Path | None") -> "dict[str, Any]":
    """Check everything about the bundle and this machine that does not concern the target; returns the index."""
    sums = read_sums(bundle)
    verify_digests(bundle, {INDEX: sums[INDEX]})
    index: dict[str, Any] = json.loads((bundle / INDEX).read_text(encoding="utf-8"))
    if index["format"] != FORMAT:
        raise Refused(f"{bundle / INDEX} has format {index['format']}: use the unbundle.py of that bundle")
    check_machine(index)  # before hours are spent on digests
    verify_signature(bundle, allowed_signers)
    repository = [REPOSITORY] if (bundle / REPOSITORY).is_file() else []
    unlisted = sorted({*index["parts"], *repository} - {*sums})  # they would not be verified
    if unlisted:
        raise Refused(f"{bundle / SUMS} does not list {', '.join(unlisted)}: run `make bundle` again")
    verify_digests(bundle, {name: sums[name] for name in sums if name != INDEX})
    for path in [*index["files"], *index["removed"], *filter(None, [index["raw_dir"]])]:
        check_path(path)
    for part, pieces in index["parts"].items():
        check_members(bundle / part, pieces)
    return index


def read_sums(bundle: Path) -> "dict[str, str]":
    """The digest of each file of the bundle."""
    if not (bundle / SUMS).is_file():
        raise Refused(f"{bundle / SUMS} is missing: it is written last, so run `make bundle` again")
    sums = {}
    for line in (bundle / SUMS).read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if not name or name != os.path.basename(name) or name in (".", ".."):
            raise Refused(f"{bundle / SUMS} has an invalid line: {line!r}")
        sums[name] = digest
    if INDEX not in sums:
        raise Refused(f"{bundle / SUMS} does not list {INDEX}: this is not a bundle")
    return sums


def verify_signature(bundle: Path, allowed_signers: "Path | None") -> None:
    """Check with ssh-keygen who has signed the list of digests, and with it all files."""
    signature = bundle / SIGNATURE
    if allowed_signers is None:
        if signature.is_file():
            print("note: the bundle is signed; --allowed-signers FILE checks by whom")
        return
    if not allowed_signers.is_file():
        raise Refused(f"--allowed-signers: {allowed_signers} does not exist")
    if not signature.is_file():
        raise Refused(f"{signature} is missing, so nobody has signed the bundle: `make bundle` signs with --sign KEY")
    if shutil.which("ssh-keygen") is None:
        raise Refused("the signature cannot be checked: install ssh-keygen (package openssh-client)")
    common = ["-s", str(signature), "-f", str(allowed_signers)]
    found = run(["ssh-keygen", "-Y", "find-principals", *common], stderr=subprocess.STDOUT)
    refused = f"{signature} is not a valid signature of {SUMS} by a key in {allowed_signers}: "
    if found.returncode != 0:
        raise Refused(refused + found.stdout.strip())
    signer = found.stdout.splitlines()[0]
    with (bundle / SUMS).open("rb") as content:
        command = ["ssh-keygen", "-Y", "verify", *common, "-I", signer, "-n", NAMESPACE]
        checked = run(command, stdin=content, stderr=subprocess.STDOUT)
    if checked.returncode != 0:
        raise Refused(refused + checked.stdout.strip())
    print("signed by " + signer)


def verify_digests(bundle: Path, sums: "dict[str, str]") -> None:
    """Name all files of the bundle that are missing or damaged."""
    problems = []
    for name, digest in sorted(sums.items()):
        print(f"verifying {bundle / name}", flush=True)
        if not (bundle / name).is_file():
            problems.append(f"{bundle / name} is missing")
        elif sha256(bundle / name) != digest:
            problems.append(f"{bundle / name} is damaged: its SHA-256 is not the one in {SUMS}")
    if problems:
        raise Refused("\n".join([*problems, "copy these files again; nothing was installed"]))


def check_machine(index: "dict[str, Any]") -> None:
    """Refuse a Python or a machine for which the bundle has no packages."""
    wanted, here = index["python"], "{}.{}".format(*sys.version_info[:2])
    if here != wanted:
        found = shutil.which(f"python{wanted}")
        remedy = f"run it with {found}" if found else f"install it, or `make bundle ARGS='--python {here}'`"
        raise Refused(f"the bundle is for Python {wanted}, and {sys.executable} is Python {here}: {remedy}")
    machine = platform.machine()
    if machine != index["machine"]:
        raise Refused(
            f"the bundle is for processors of type {index['machine']}; this machine is {machine}: bundle with "
            f"--platform manylinux_2_28_{machine}"
        )
    library, version = platform.libc_ver()
    if library != "glibc" or [int(number) for number in version.split(".")[:2]] < index["glibc"]:
        lowest = ".".join(map(str, index["glibc"]))
        raise Refused(
            f"the bundle is for glibc {lowest} or later; this machine has {library or 'another C library'} {version}: "
            "bundle with a lower --platform"
        )
    for module in ("ensurepip", "venv"):  # which some distributions leave out
        if importlib.util.find_spec(module) is None:
            raise Refused(f"{sys.executable} cannot create environments (no module {module}): install python3-venv")
    for command in ("git", "bash"):
        if shutil.which(command) is None:
            raise Refused(f"{command} is missing on this machine: install it first")


def check_path(path: str) -> None:
    """Refuse a path that leads out of the target, or into git's own files."""
    parts = path.split("/")
    if "\0" in path or {"", ".", ".."} & {*parts} or parts[0] == ".git":
        raise Refused(f"the bundle is not safe: {path!r} is not a path in the project")


def check_members(part: Path, pieces: "list[list[object]]") -> None:
    """Compare what a part contains with the index, so that later only files of the index are written."""
    try:
        with tarfile.open(str(part), "r:", encoding="utf-8") as archive:
            members = [(member.name, member.size, member.isreg()) for member in archive]
    except tarfile.TarError as error:
        raise Refused(f"{part} cannot be read: {error}") from None
    expected = [(path, length, True) for path, _, length in pieces]
    for found, wanted in zip(members, expected, strict=False):
        if found != wanted:
            raise Refused(f"{part} contains {found[0]!r}, where {INDEX} has {wanted[0]!r}")
    if len(members) != len(expected):
        raise Refused(f"{part} contains {len(members)} files, {INDEX} lists {len(expected)}")


def check_target(index: "dict[str, Any]", target: Path) -> "set[str]":
    """Refuse a target in which files are missing or would be lost; returns the paths that have to be written."""
    names = {path.name for path in target.iterdir()} if target.exists() else set()
    if ".git" in names:
        changed = changed_files(target)
        if changed:
            raise Refused(
                f"{target} has changes that are not committed: {', '.join(changed[:10])}: commit or revert them"
            )
    elif names:
        raise Refused(f"{target} has other files, such as {sorted(names)[0]}: name a new or empty directory")
    since = index["since"]
    if since and (".git" not in names or git(target, "cat-file", "-e", since + "^{commit}").returncode != 0):
        raise Refused(
            f"the bundle continues an earlier one, of commit {since[:12]}, which is not in {target}: install it first"
        )

    carried = {path for pieces in index["parts"].values() for path, _, _ in pieces}
    is_installed = installed_lock(target) == index["lock"]
    # What training compiles again, and the files of packages that are installed: an image deletes these.
    expendable = (index["compiled"], "wheels/") if is_installed else (index["compiled"],)
    needed, problems = set(), []
    for path, entry in index["files"].items():
        final = target / path
        digest = sha256(final) if final.is_file() else None
        if digest == entry["sha256"]:
            continue
        if path.startswith(expendable):
            if digest is not None or path not in carried:
                continue
        elif path not in carried:
            state = "is missing" if digest is None else "was changed"
            problems.append(
                f"{final} {state}: this bundle expects it from an earlier one, with SHA-256 {entry['sha256']}; a "
                "bundle without --since contains it"
            )
        elif digest is not None and digest != entry["replaces"]:
            problems.append(f"{final} has another content, which would be lost: move it away")
        needed.add(path)
    for path, digest in index["removed"].items():
        if (target / path).is_file() and sha256(target / path) != digest:
            problems.append(f"{target / path} has another content, which would be lost: move it away")
    problems += [
        f"{target / path} is not in the bundle, and would be trained on: move it away"
        for path in other_raw_files(index, target)
    ]
    if problems:
        raise Refused("\n".join([*problems[:20], "nothing was installed"]))
    existing = next(path for path in [target, *target.parents] if path.exists())
    free = shutil.disk_usage(str(existing)).free
    # `dvc checkout` copies what it cannot clone.
    size = sum(index["files"][path]["size"] * (1 + path.startswith(".dvc/cache/")) for path in needed)
    size += 0 if is_installed else index["unpacked"]
    if size > free:
        raise Refused(f"{target} needs {size / 1e9:.1f} GB and has {free / 1e9:.1f} GB free")
    return needed


def changed_files(target: Path) -> "list[str]":
    """The files with changes that are not committed, except those that an update may have left half done."""
    changed = [entry[3:] for entry in listed(target, "status", "--porcelain", "--no-renames", "--untracked-files=no")]
    if not has_commit(target, _UPDATING):
        return changed
    if not has_commit(target, "HEAD"):  # then all files are of the update
        return []
    updated = {*listed(target, "diff", "--name-only", "--no-renames", "HEAD", _UPDATING)}
    return [path for path in changed if path not in updated]


def other_raw_files(index: "dict[str, Any]", target: Path) -> "list[str]":
    """The files in the directory of raw files that `organize` would read, and that the other side does not have."""
    if index["raw_dir"] is None:
        return []
    known = {*index["raw"], *index["removed"]}
    if (target / ".git").exists():
        known.update(listed(target, "ls-files"))
    found = []
    for parent, directories, names in os.walk(str(target / index["raw_dir"])):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        paths = [os.path.relpath(os.path.join(parent, name), str(target)) for name in sorted(names)]
        found += [path for path in paths if path not in known and not os.path.basename(path).startswith(".")]
    return found


def installed_lock(target: Path) -> "str | None":
    """The digest of the lock from which the environment was installed; None if there is no environment."""
    try:
        return (target / ".venv/.setup").read_text().split()[2]
    except (OSError, IndexError):
        return None


def update_repository(bundle: Path, index: "dict[str, Any]", target: Path) -> None:
    """Create the clone, or bring it to the bundle's commit; its own commits are never overwritten."""
    if not (target / ".git").exists():
        git(target, "init", "--quiet", check=True)
        git(target, "symbolic-ref", "HEAD", "refs/heads/" + index["branch"], check=True)
    if (bundle / REPOSITORY).is_file():  # an earlier bundle may have had the same commit
        git(target, "fetch", "--quiet", str(bundle / REPOSITORY), "HEAD", check=True)
    if has_commit(target, "HEAD"):
        ahead = git(target, "rev-list", "--count", index["commit"] + "..HEAD", check=True).stdout.strip()
        if ahead != "0":
            if git(target, "merge-base", "--is-ancestor", index["commit"], "HEAD").returncode == 0:
                git(target, "update-ref", "-d", _UPDATING, check=True)
                return  # commits of its own, on top of the bundle's
            merge = "git merge " + index["commit"][:12]
            raise Refused(f"{target} has {ahead} commits that the bundle lacks: run `{merge}` there, then this again")
    if has_commit(target, _UPDATING):
        git(target, "reset", "--quiet", "--hard", index["commit"], check=True)
    git(target, "update-ref", _UPDATING, index["commit"], check=True)
    merged = git(target, "merge", "--quiet", "--ff-only", index["commit"])
    if merged.returncode == 0 or not listed(target, "status", "--porcelain", "--untracked-files=no"):
        git(target, "update-ref", "-d", _UPDATING, check=True)  # git has updated all files, or none
    if merged.returncode != 0:
        raise Refused(f"git cannot update {target}: {merged.stderr.strip()}")


def extract(bundle: Path, index: "dict[str, Any]", target: Path, needed: "set[str]") -> None:
    """Write the files: each under a temporary name first, and in its place when its digest is right."""
    digest = hashlib.sha256()
    for part, pieces in index["parts"].items():
        print(f"unpacking {bundle / part}", flush=True)
        with tarfile.open(str(bundle / part), "r:", encoding="utf-8") as archive:
            for (path, offset, length), member in zip(pieces, archive, strict=True):
                if path not in needed:
                    continue
                if offset == 0:
                    digest = hashlib.sha256()
                source = archive.extractfile(member)
                assert source  # a regular file, as verified
                final, entry = target / path, index["files"][path]
                temporary = final.with_name(_TEMPORARY)  # on the same disk, also behind a link
                final.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("ab" if offset else "wb") as file:
                    for chunk in chunks(source):
                        digest.update(chunk)
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())  # else a power cut could leave the name without the content
                if offset + length < entry["size"]:
                    continue  # the next piece is in the next part
                if digest.hexdigest() != entry["sha256"]:
                    temporary.unlink()
                    raise Refused(f"{path} in {part} is not what was bundled: run `make bundle` again")
                os.replace(str(temporary), str(final))
    for path in index["removed"]:
        if (target / path).is_file():
            (target / path).unlink()


def install(index: "dict[str, Any]", target: Path) -> None:
    """Install the packages from the bundle's files alone, and let DVC put the results in their places."""
    # No settings of this machine: an index or a proxy in them cannot be reached from here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment.update(PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    environment["PIP_FIND_LINKS"] = (target / "wheels").as_uri()  # a URL, because pip splits a path at its spaces
    if subprocess.run([str(target / "scripts/setup.sh")], env=environment).returncode != 0:
        raise Refused(
            f"all files are in {target}, but its packages cannot be installed: the errors above name the cause; run "
            "it again when it is removed"
        )
    if index["stages"]:
        command = [str(target / ".venv/bin/python"), "-m", "dvc", "checkout", "--quiet", *index["stages"]]
        if subprocess.run(command, cwd=str(target)).returncode != 0:
            raise Refused(f"all files are in {target}, but `dvc checkout` failed: see the error above")


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def chunks(file: "IO[bytes]") -> "Iterator[bytes]":
    """What is in a file, in pieces that fit into memory."""
    return iter(lambda: file.read(_CHUNK), b"")


def git(directory: Path, *arguments: str, check: bool = False) -> "subprocess.CompletedProcess[str]":
    """Run git in a directory.

    Raises:
        Refused: `check`, and git failed.
    """
    process = run(["git", "-C", str(directory), *arguments], stderr=subprocess.PIPE)
    if check and process.returncode != 0:
        raise Refused(f"git {' '.join(arguments)} failed in {directory}: {process.stderr.strip()}")
    return process


def listed(directory: Path, *arguments: str) -> "list[str]":
    """The paths that git lists."""
    return [path for path in git(directory, *arguments, "-z", check=True).stdout.split("\0") if path]


def has_commit(directory: Path, reference: str) -> bool:
    """Whether a reference, such as HEAD, names a commit in a clone."""
    return git(directory, "rev-parse", "--verify", "--quiet", reference).returncode == 0


def run(command: "list[str]", **streams: "Any") -> "subprocess.CompletedProcess[str]":
    """Run a command and read its output as text."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="surrogateescape", **streams)


if __name__ == "__main__":
    main()
