"""A project is bundled, carried and unbundled: with small made-up packages, and once as it is."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import bundle, unbundle
from stages.artifacts import publish
from stages.artifacts.errors import StageError
from stages.corpus import tree
from stages.model.license import ModelLicense
from stages.model.manifest import ModelManifest
from tests.project import REPO, flip_bit

PYTHON = f"3.{sys.version_info.minor}"
OTHER_USER = 12345
SETUP = f"""#!/usr/bin/env bash
# Notes how it was called, and makes an environment that has nothing of its own.
cd "$(dirname "$0")/.."
echo "$PYTHON $PIP_NO_INDEX $PIP_FIND_LINKS ${{PIP_INDEX_URL:-none}}" > .setup.log
mkdir -p .venv/bin
printf '#!/bin/sh\\nexec {sys.executable} "$@"\\n' > .venv/bin/python
printf '#!/bin/sh\\nexec {sys.executable} -m dvc "$@"\\n' > .venv/bin/dvc
chmod +x .venv/bin/*
echo cpu cpu $(cat requirements-cpu.lock requirements-encoder.lock | sha256sum | cut -d' ' -f1) > .venv/.setup
"""
IGNORED = "/.hf/\n/wheels/\n/bundle*/\n.unbundle\n/.setup.log\n.venv/\n/data/*\n/outputs/\n"

Make = Callable[..., Path]
"""Bundles the current project: options -> the bundle."""


def git(*arguments: str, cwd: Path = Path()) -> str:
    command = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.com", *arguments]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def write(files: dict[str, str], directory: Path) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


def make_wheel(directory: Path, name: str) -> str:
    """A wheel with one module; returns its line in a lock."""
    info = f"{name}-1.dist-info"
    path = directory / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "x = 1\n" * 1000)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1 \\\n    --hash=sha256:{publish.sha256_file(path)}\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two packages in its locks, which pip has fetched once."""
    path = tmp_path_factory.mktemp("bundled")
    project, packages = path / "project", path / "packages"
    packages.mkdir()
    windows = "absent==1 ; sys_platform == 'win32' \\\n    --hash=sha256:0\n"
    write(
        {
            "requirements-cpu.lock": "# A comment.\n" + windows + make_wheel(packages, "tiny"),
            "requirements-encoder.lock": make_wheel(packages, "other"),
            "params.yaml": (REPO / "params.yaml").read_text(),
            "models/tiny-llama/config.json": "{}",
            "scripts/setup.sh": SETUP,
            ".gitignore": IGNORED,
            "Makefile": (REPO / "Makefile").read_text(),
            "data/raw/a.txt": "a" * 150_000,
            "data/raw/deep/er/b.txt": "b" * 300_000,
            "data/raw/empty.txt": "",
            f"data/raw/{'é' * 100}/{'x' * 200}.txt": "long",
        },
        project,
    )
    (project / "scripts/setup.sh").chmod(0o755)
    git("init", "--quiet", "--initial-branch", "work", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "--quiet", "--message", "First", cwd=project)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(project)
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        settings = {"NO_INDEX": "1", "FIND_LINKS": str(packages), "CONFIG_FILE": os.devnull}
        for name, value in settings.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        bundle.wheels("cpu", bundle.Platform(PYTHON, os.uname().machine, (2, 28)))
    shutil.rmtree(packages)
    return project


@pytest.fixture
def project(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that project, as the current directory."""
    shutil.copytree(original, tmp_path / "project", symlinks=True)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("PIP_INDEX_URL", "https://unreachable.invalid/simple")
    return tmp_path / "project"


@pytest.fixture
def make(project: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def run(*options: str, to: str = "../bundle") -> Path:
        monkeypatch.setattr(sys, "argv", ["bundle", "--build", "cpu", "--to", to, *options])
        bundle.main()
        return Path(to).resolve()

    return run


def test_what_is_bundled_arrives(make: Make, project: Path, tmp_path: Path) -> None:
    made = make("--raw", "--part-size", "100K")
    parts = sorted(made.glob("part-*"))
    assert len(parts) > 4 and all(part.stat().st_size <= 100_000 for part in parts)
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=made).returncode == 0
    target = tmp_path / "else" / "w h\u00e9re"
    unbundle.unbundle(made, target)
    for path in (project / "data/raw").rglob("*.txt"):
        assert (target / path.relative_to(project)).read_bytes() == path.read_bytes()
    assert git("rev-parse", "--abbrev-ref", "HEAD", cwd=target) == "work\n"
    assert git("rev-parse", "HEAD", cwd=target) == git("rev-parse", "HEAD")
    assert git("status", "--porcelain", cwd=target) == ""
    wheels = target / "wheels"  # as a URL below: pip would split a path at its spaces
    assert {path.name for path in wheels.iterdir()} == {f"{x}-1-py3-none-any.whl" for x in ("tiny", "other")}
    assert (target / ".setup.log").read_text() == f"{sys.executable} 1 {wheels.as_uri()} none\n"
    assert not list(target.rglob(".unbundle"))
    unbundle.unbundle(made, target)  # repeated, it changes nothing


def test_two_bundles_of_one_commit_are_equal(make: Make) -> None:
    first, second = make("--raw", to="../1"), make("--raw", to="../2")
    assert [path.name for path in sorted(second.iterdir())] == [path.name for path in sorted(first.iterdir())]
    for path in first.glob("part-*"):
        assert (second / path.name).read_bytes() == path.read_bytes()


def write_sums(made: Path) -> None:
    """Let the list of digests fit what was done to the bundle."""
    bundle.write_sums(made, {part.name: publish.sha256_file(part) for part in made.glob("part-*")})


def refused(made: Path, target: Path, message: str, signers: Path | None = None) -> None:
    before = sorted(target.rglob("*")) if target.exists() else None
    with pytest.raises(unbundle.Refused, match=message):
        unbundle.unbundle(made, target, signers)
    assert (sorted(target.rglob("*")) if target.exists() else None) == before, "something was written"


def test_a_damaged_bundle_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    made, target = make("--raw", "--part-size", "100K"), tmp_path / "target"
    for number, name in enumerate(sorted(path.name for path in made.iterdir() if path.name != unbundle.SUMS)):
        damaged = shutil.copytree(made, tmp_path / f"flipped-{number}")
        flip_bit(damaged / name, (damaged / name).stat().st_size // 2)
        refused(damaged, target, f"{name} is damaged: its SHA-256")
        (damaged / name).unlink()
        refused(damaged, target, f"{name} is missing")
    (made / unbundle.SUMS).unlink()
    refused(made, target, "SHA256SUMS is missing: it is written last")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("python", "3.9", rf"for Python 3\.9, and .* is Python {PYTHON}: (run it with|install it)"),
        ("machine", "riscv64", "for processors of type riscv64; this machine is"),
        ("glibc", [2, 99], r"for glibc 2\.99 or later; this machine has glibc"),
        ("format", 99, "has format 99"),
        ("since", "0" * 40, "continues an earlier one, of commit 000000000000"),
        ("files", {"../escaped": {"size": 1, "sha256": "", "replaces": None}}, r"'\.\./escaped' is not a path"),
        ("files", {"/etc/escaped": {"size": 1, "sha256": "", "replaces": None}}, "'/etc/escaped' is not a path"),
        ("files", {".git/hooks/x": {"size": 1, "sha256": "", "replaces": None}}, r"'\.git/hooks/x' is not a path"),
        ("removed", {"a/../../b": ""}, r"'a/\.\./\.\./b' is not a path"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Make, tmp_path: Path, key: str, value: object, message: str) -> None:
    made = make()
    index = json.loads((made / unbundle.INDEX).read_text())
    publish.write_json(made / unbundle.INDEX, index | {key: value})
    write_sums(made)
    refused(made, tmp_path / "target", message)


def test_a_file_without_a_digest_is_refused(make: Make, tmp_path: Path) -> None:
    made = make()
    lines = (made / unbundle.SUMS).read_text().splitlines(keepends=True)
    for name in ("part-", unbundle.REPOSITORY):
        (made / unbundle.SUMS).write_text("".join(line for line in lines if name not in line))
        refused(made, tmp_path / "target", f"SHA256SUMS does not list {name}")


@pytest.mark.parametrize("kind", ["name", "link", "more"])
def test_a_part_with_other_members_than_the_index_is_refused(make: Make, tmp_path: Path, kind: str) -> None:
    made = make()
    (part,) = made.glob("part-*")
    with tarfile.open(part) as archive:
        members = archive.getmembers()
    if kind == "name":
        members[0].name = "../escaped"
    elif kind == "link":
        members[0].type, members[0].linkname = tarfile.SYMTYPE, "/etc"
    else:
        members.append(tarfile.TarInfo("../escaped"))
    with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    write_sums(made)
    refused(made, tmp_path / "target", f"{part.name} contains")


def test_a_file_that_is_not_what_the_index_names_is_never_in_its_place(make: Make, tmp_path: Path) -> None:
    made, target = make("--raw"), tmp_path / "target"
    index = json.loads((made / unbundle.INDEX).read_text())
    index["files"]["data/raw/a.txt"]["sha256"] = "0" * 64
    publish.write_json(made / unbundle.INDEX, index)
    write_sums(made)
    with pytest.raises(unbundle.Refused, match=r"data/raw/a\.txt in part-.* is not what was bundled"):
        unbundle.unbundle(made, target)
    assert not (target / "data/raw/a.txt").exists()


def test_a_second_bundle_has_only_what_changed(make: Make, project: Path, tmp_path: Path) -> None:
    first, target = make("--raw", to="../first"), tmp_path / "target"
    (project / "data/raw/a.txt").write_text("other")
    (project / "data/raw/empty.txt").unlink()
    write({"README.md": "new"}, project)
    git("add", ".")
    git("commit", "--quiet", "--message", "Second")
    second = make("--raw", "--since", str(first), to="../second")
    sizes = [sum(path.stat().st_size for path in made.iterdir()) for made in (first, second)]
    assert sizes[1] < 40_000 < 450_000 < sizes[0]
    (part,) = second.glob("part-*")
    with tarfile.open(part) as archive:
        assert archive.getnames() == ["data/raw/a.txt"]

    refused(second, target, "continues an earlier one, of commit .* install it first")
    unbundle.unbundle(first, target)
    (target / "data/raw/deep/er/b.txt").write_text("mine")
    refused(second, target, r"deep/er/b\.txt was changed: this bundle expects it from an earlier one")
    (target / "data/raw/deep/er/b.txt").unlink()
    refused(second, target, r"deep/er/b\.txt is missing: this bundle expects it from an earlier one")
    unbundle.unbundle(first, target)
    (target / "data/raw/empty.txt").write_text("mine")
    refused(second, target, r"empty\.txt has another content, which would be lost")
    (target / "data/raw/empty.txt").write_text("")
    (target / "params.yaml").write_text("mine")
    refused(second, target, r"changes that are not committed: params\.yaml")
    git("checkout", "--quiet", "params.yaml", cwd=target)

    unbundle.unbundle(second, target)
    assert (target / "README.md").read_text() == "new"
    assert (target / "data/raw/a.txt").read_text() == "other"
    assert not (target / "data/raw/empty.txt").exists()
    third = make("--raw", "--since", str(second / unbundle.INDEX), to="../third")
    assert not list(third.glob("part-*")) and not (third / unbundle.REPOSITORY).exists()
    unbundle.unbundle(third, target)


def commit(project: Path, content: str) -> None:
    write({"README.md": content}, project)
    git("add", ".")
    git("commit", "--quiet", "--message", content)


def test_raw_files_that_are_gone_here_go_there_too(make: Make, project: Path, tmp_path: Path) -> None:
    target, raw = tmp_path / "target", project / "data/raw"
    first = make("--raw", to="../1")
    unbundle.unbundle(first, target)
    commit(project, "Second")
    second = make("--since", str(first), to="../2")
    unbundle.unbundle(second, target)
    (raw / "empty.txt").unlink()
    (raw / "a.txt").write_text("new")
    unbundle.unbundle(make("--raw", "--since", str(second), to="../3"), target)
    assert not (target / "data/raw/empty.txt").exists()
    assert (target / "data/raw/a.txt").read_text() == "new"


def test_raw_files_that_the_bundle_lacks_are_refused_by_name(make: Make, project: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write({"data/raw/in-git.txt": "in git"}, project)
    git("add", "--force", "data/raw/in-git.txt")
    git("commit", "--quiet", "--message", "In git")
    unbundle.unbundle(make("--raw", to="../1"), target)
    (project / "data/raw/deep/er/b.txt").unlink()
    full = make("--raw", to="../2")
    refused(full, target, r"data/raw/deep/er/b\.txt is not in the bundle, and would be trained on: move it away")
    (target / "data/raw/deep/er/b.txt").rename(target / "data/raw/.hidden")  # which organize passes over
    unbundle.unbundle(full, target)


def test_files_that_may_be_lost_do_not_stop_a_later_bundle(make: Make, project: Path, tmp_path: Path) -> None:
    compiled = Path("outputs/.compile/ab/x.py")
    write({str(compiled): "1"}, project)
    first, target = make(to="../1"), tmp_path / "target"
    unbundle.unbundle(first, target)
    commit(project, "Second")
    second = make("--since", str(first), to="../2")
    (target / compiled).write_text("compiled there")
    unbundle.unbundle(first, target)
    assert (target / compiled).read_text() == "compiled there"
    shutil.rmtree(target / "outputs")
    shutil.rmtree(target / "wheels")
    unbundle.unbundle(second, target)
    (target / ".venv/.setup").unlink()
    refused(second, target, r"wheels/other-1-py3-none-any\.whl is missing: this bundle expects it from an earlier one")


def test_the_free_space_for_packages_and_results_is_checked(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    index = json.loads((made / unbundle.INDEX).read_text())
    assert index["unpacked"] > 2 * 6000
    index["files"][".dvc/cache/files/md5/ab/c"] = {"size": 1000, "sha256": "", "replaces": None}
    index["parts"]["x"] = [[".dvc/cache/files/md5/ab/c", 0, 1000]]
    size = sum(entry["size"] for entry in index["files"].values())
    for free, fits in ((size + 1000 + index["unpacked"], True), (size + 999 + index["unpacked"], False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(0, 0, free))  # type: ignore[attr-defined]
        with nullcontext() if fits else pytest.raises(unbundle.Refused, match=r"needs .* GB and has .* GB free"):
            unbundle.check_target(index, tmp_path / "target")


def test_own_files_and_commits_of_the_target_stay(make: Make, project: Path, tmp_path: Path) -> None:
    made, target = make("--raw"), tmp_path / "target"
    write({"mine.txt": "mine"}, target)
    refused(made, target, r"has other files, such as mine\.txt")
    (target / "mine.txt").unlink()
    unbundle.unbundle(made, target)
    commit(project, "Second")
    write({"README.md": "mine"}, target)
    for _ in range(2):
        with pytest.raises(unbundle.Refused, match=r"(?s)git cannot update .*README\.md"):
            unbundle.unbundle(make("--raw"), target)
        assert (target / "README.md").read_text() == "mine"
    (target / "README.md").unlink()
    git("commit", "--quiet", "--allow-empty", "--message", "Mine", cwd=target)
    with pytest.raises(unbundle.Refused, match="1 commits that the bundle lacks: run `git merge"):
        unbundle.unbundle(made, target)
    head = listed_commit(project)
    git("merge", "--quiet", "--no-edit", head, cwd=target)  # as the message says
    unbundle.unbundle(made, target)
    unbundle.unbundle(made, target)
    assert listed_commit(target) != head


def listed_commit(directory: Path) -> str:
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=directory, text=True).strip()


def test_stages_whose_results_are_not_carried_are_run_on_the_other_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stages = ["organize", "extract", "train"]
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": {name: {} for name in stages}}, sort_keys=False))
    for locked, command in (
        (["organize", "extract"], "make repro ARGS=--allow-missing"),
        (stages, "make repro ARGS='--allow-missing --force --single-item train'"),
    ):
        Path("dvc.lock").write_text(yaml.safe_dump({"stages": {name: {} for name in locked}}))
        assert bundle.next_command(["organize", "extract"], has_raw=False) == command
        assert bundle.next_command([], has_raw=False) == bundle.next_command(["extract"], has_raw=True) == "make repro"


def test_a_bundle_that_was_interrupted_continues(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = {path.name: path.read_bytes() for path in make("--raw", "--part-size", "100K", to="../whole").iterdir()}
    pieces: list[bundle.Piece] = []
    add = bundle.add

    def interrupted(part: tarfile.TarFile, piece: bundle.Piece, source: Path) -> None:
        pieces.append(piece)
        if len(pieces) == 4:
            raise KeyboardInterrupt
        add(part, piece, source)

    monkeypatch.setattr(bundle, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make("--raw", "--part-size", "100K")
    refused(tmp_path / "bundle", tmp_path / "target", "SHA256SUMS is missing")
    present = {path: path.stat().st_mtime_ns for path in (tmp_path / "bundle").glob("*.tar")}
    assert present
    made = make("--raw", "--part-size", "100K")
    assert {path: path.stat().st_mtime_ns for path in present} == present, "a part was written again"
    assert {path.name for path in made.iterdir()} == set(expected)
    assert all(
        (made / name).read_bytes() == content for name, content in expected.items() if name != unbundle.REPOSITORY
    )


@pytest.mark.parametrize("damage", ["flipped", "shorter", "empty"])
def test_a_damaged_part_is_written_again(make: Make, damage: str) -> None:
    made = make("--raw", "--part-size", "100K")
    expected = {path: path.read_bytes() for path in made.glob("part-*")}
    part = next(path for path in sorted(expected) if expected[path].count(b"a") > 80_000)
    if damage == "flipped":
        flip_bit(part, 50_000)
    else:
        os.truncate(part, 50_000 if damage == "shorter" else 0)
    made = make("--raw", "--part-size", "100K")
    assert {path: path.read_bytes() for path in made.glob("part-*")} == expected


def test_a_file_that_changes_while_it_is_bundled_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch, project: Path, tmp_path: Path
) -> None:
    verify = bundle.verify_model

    def changed(*arguments: Any) -> None:
        verify(*arguments)
        (project / "data/raw/a.txt").write_text("z" * 150_000)

    monkeypatch.setattr(bundle, "verify_model", changed)
    with pytest.raises(StageError, match=r"^data/raw/a\.txt changed while it was bundled: run it again"):
        make("--raw", "--part-size", "100K")
    monkeypatch.undo()
    monkeypatch.chdir(project)
    (project / "data/raw/a.txt").write_text("a" * 150_000)
    unbundle.unbundle(make("--raw", "--part-size", "100K"), tmp_path / "target")
    assert (tmp_path / "target/data/raw/a.txt").read_text() == "a" * 150_000


def test_a_directory_with_other_files_is_refused_and_left_alone(make: Make, tmp_path: Path) -> None:
    mine = {"part-00000.parquet": "mine", "index.json": "mine", "Dockerfile": "mine"}
    write(mine, tmp_path / "disk")
    with pytest.raises(StageError, match=r"^--to is \.\./disk, which has other files, such as Dockerfile: name"):
        make(to="../disk")
    assert {path.name: path.read_text() for path in (tmp_path / "disk").iterdir()} == mine
    made = make()
    write({"part-00000.parquet": "mine"}, made)
    make()
    assert (made / "part-00000.parquet").read_text() == "mine"


def test_a_bundle_in_the_project_has_to_be_ignored_by_git(make: Make, project: Path) -> None:
    with pytest.raises(
        StageError, match=r"^--to is carry, in the project, where git does not ignore it: name it bundle-"
    ):
        make(to="carry")
    assert not (project / "carry").exists()
    make(to="bundle-2")
    make(to=str(project / "bundle-2"))


@pytest.mark.parametrize("path", ["airgap.json", "bundle/index.json", "bundle-2/index.json", "wheels/x.whl"])
def test_what_commands_write_into_the_project_does_not_stop_a_bundle(path: str) -> None:
    assert subprocess.run(["git", "check-ignore", "--quiet", path], cwd=REPO).returncode == 0


def test_an_installation_that_was_interrupted_continues(
    make: Make, monkeypatch: pytest.MonkeyPatch, project: Path, tmp_path: Path
) -> None:
    made, target, moves = make("--raw", "--part-size", "100K"), tmp_path / "target", iter(range(9))
    replace = os.replace

    def interrupted(source: Path, final: Path) -> None:
        assert Path(source).parent == Path(final).parent, "a move between disks is a copy"
        if next(moves) == 2:
            raise KeyboardInterrupt
        replace(source, final)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            unbundle.unbundle(made, target)
    unbundle.unbundle(made, target)
    assert (target / "data/raw/deep/er/b.txt").read_bytes() == (project / "data/raw/deep/er/b.txt").read_bytes()
    assert not list(target.rglob(".unbundle"))


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_an_update_of_the_repository_that_was_killed_continues(
    make: Make, monkeypatch: pytest.MonkeyPatch, project: Path, tmp_path: Path, later: bool
) -> None:
    target, run = tmp_path / "target", unbundle.run
    made = make(to="../1")
    if later:
        unbundle.unbundle(made, target)
        write({"new.txt": "new", "params.yaml": (project / "params.yaml").read_text() + "# new\n"}, project)
        commit(project, "Second")
        made = make(to="../2")

    def killed(command: list[str], **streams: Any) -> Any:
        if "merge" in command:  # it has written two files, one of them in part
            write({"new.txt" if later else "Makefile": "new", "params.yaml": "half of"}, target)
            raise KeyboardInterrupt
        return run(command, **streams)

    with monkeypatch.context() as patched:
        patched.setattr(unbundle, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            unbundle.unbundle(made, target)
    if later:
        write({"Makefile": "mine"}, target)
        refused(made, target, r"changes that are not committed: Makefile: commit or revert")
        git("checkout", "Makefile", cwd=target)
    unbundle.unbundle(made, target)
    assert git("rev-parse", "HEAD", cwd=target) == git("rev-parse", "HEAD")
    assert git("status", "--porcelain", cwd=target) == ""
    write({"params.yaml": "mine"}, target)
    refused(made, target, r"changes that are not committed: params\.yaml")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory with two keys, and a list with the first one."""
    for name in ("mine", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    (tmp_path / "signers").write_text("me@example.com " + (tmp_path / "mine.pub").read_text())
    return tmp_path


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_only_a_bundle_that_an_allowed_key_signed_is_installed(
    make: Make, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, signers = tmp_path / "target", keys / "signers"
    made = make()
    refused(made, target, r"SHA256SUMS\.sig is missing, so nobody has signed", signers)
    made = make("--sign", str(keys / "other"))
    refused(made, target, r"SHA256SUMS\.sig is not a valid signature of SHA256SUMS by a key in", signers)
    made = make("--sign", str(keys / "mine"))
    with (made / unbundle.SUMS).open("a") as sums:
        sums.write("0" * 64 + "  other\n")
    refused(made, target, "is not a valid signature", signers)
    unbundle.unbundle(make("--sign", str(keys / "mine")), target, signers)
    assert "signed by me@example.com" in capsys.readouterr().out


def test_results_that_dvc_has_are_carried_and_checked_out(
    make: Make, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = b"a result"
    digest = hashlib.md5(content).hexdigest()
    listing = json.dumps([{"md5": digest, "relpath": "0.txt"}]).encode()
    directory = hashlib.md5(listing).hexdigest() + ".dir"
    organize = {"cmd": "false", "deps": ["data/raw"], "outs": ["data/splits"]}
    others = yaml.safe_load((REPO / "dvc.yaml").read_text())["stages"].values()
    extract = {
        "cmd": "python -c \"open('data/extracted', 'w')\"", "deps": ["data/splits"],
        "params": sorted({name for stage in others for name in stage.get("params", [])}),  # all names are in dvc.yaml
        "meta": {"runtime": [name for stage in others for name in stage.get("meta", {}).get("runtime", [])]},
    }  # fmt: skip
    results = {
        "cmd": "false",
        "deps": [{"path": "data/raw", "hash": "md5", "md5": "0" * 32 + ".dir", "size": 1, "nfiles": 1}],
        "outs": [{"path": "data/splits", "hash": "md5", "md5": directory, "size": len(content), "nfiles": 1}],
    }
    write(
        {
            ".dvc/config": "[core]\n    analytics = false\n",
            ".dvc/.gitignore": "/tmp\n/cache\n/config.local\n",
            "dvc.yaml": yaml.safe_dump({"stages": {"organize": organize, "extract": extract}}),
            "dvc.lock": yaml.safe_dump({"schema": "2.0", "stages": {"organize": results}}),
        },
        project,
    )  # fmt: skip
    git("add", ".")
    git("commit", "--quiet", "--message", "Results")
    with pytest.raises(StageError, match=r"^--stages: 'train' has no results in dvc\.lock, which has organize"):
        make("--stages", "train")
    cache = project / ".dvc/cache/files/md5"
    for name, data in ((directory, listing), (digest, content)):
        (cache / name[:2]).mkdir(parents=True, exist_ok=True)
        (cache / name[:2] / name[2:]).write_bytes(data)
    made = make()
    target = tmp_path / "a target"
    unbundle.unbundle(made, target)
    assert (target / "data/splits/0.txt").read_bytes() == content
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("unbundled: ")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "USER": "other"}
    process = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert (target / "data/extracted").is_file()
    for name in ("Dockerfile", "apptainer.def"):
        assert "exec make repro ARGS=--allow-missing" in (made / name).read_text()
    (cache / digest[:2] / digest[2:]).write_bytes(b"?" * len(content))
    with pytest.raises(StageError, match="of DVC's cache, is damaged: delete it"):
        make()
    (cache / digest[:2] / digest[2:]).unlink()
    with pytest.raises(StageError, match=f"cache lacks 1 files of the results of organize, such as {digest}"):
        make()


MANIFEST = ModelManifest(
    model_name="acme/model", model_revision="main", commit="c" * 40, architecture="", model_type="", dtype="",
    num_parameters=0, files={}, weights=[], tied_weights={}, layer_classes=[], module_classes=[], router_loss_coef=None,
    vocab_size=0, max_seq_length=None, eos_token_id=None, bos_token_id=None, pad_token_id=None,
)  # fmt: skip


def use_model(project: Path, directory: Path, **fields: str | None) -> None:
    """Let params.yaml and data/model.json name a model in a directory."""
    write({"config.json": "{}", "model.safetensors": "weights", "LICENSE": "text"}, directory)
    ModelLicense({}, None, {"LICENSE": bundle.FileEntry.of(directory / "LICENSE")}).write()
    files = {name: bundle.FileEntry.of(directory / name) for name in ("config.json", "model.safetensors")}
    manifest = bundle.ModelManifest(**{**vars(MANIFEST), "files": files, **fields})
    manifest.write()
    params = project / "params.yaml"
    params.write_text(params.read_text().replace("models/tiny-llama ", f"{manifest.model_name} "))
    git("commit", "--quiet", "--all", "--message", "Model")


def test_a_model_of_the_hub_is_found_there_as_in_its_cache(
    make: Make, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HOME", str(hub.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))  # which is read at import
    snapshot = hub / "models--acme--model" / "snapshots" / ("c" * 40)
    use_model(project, snapshot)
    made, target = make(), tmp_path / "target"
    unbundle.unbundle(made, target)
    from huggingface_hub import snapshot_download

    found = snapshot_download("acme/model", cache_dir=target / bundle.HF_HOME / "hub", local_files_only=True)
    assert (Path(found) / "model.safetensors").read_text() == "weights"
    assert (Path(found) / "LICENSE").read_text() == "text"
    (snapshot / "model.safetensors").write_text("changed")
    with pytest.raises(StageError, match=r"model\.safetensors was changed since the download"):
        make()


def test_a_model_elsewhere_on_this_machine_is_below_models_there(
    make: Make, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_model(project, tmp_path / "mine", model_name=str(tmp_path / "mine"), commit=None)
    unbundle.unbundle(make(), tmp_path / "target")
    assert (tmp_path / "target/models/mine/model.safetensors").read_text() == "weights"
    assert (tmp_path / "target/models/mine/LICENSE").read_text() == "text"
    assert "is in models/mine there: set model_name: models/mine" in capsys.readouterr().out


def test_a_model_elsewhere_with_the_name_of_another_one_is_refused(make: Make, project: Path, tmp_path: Path) -> None:
    use_model(project, tmp_path / "tiny-llama", model_name=str(tmp_path / "tiny-llama"), commit=None)
    with pytest.raises(
        StageError, match=r"would be in models/tiny-llama there, where the repository has another model"
    ):
        make()


def test_a_model_that_the_repository_has_is_compared_too(make: Make, project: Path) -> None:
    use_model(project, Path("models/mine"), model_name="models/mine", commit=None)
    git("add", "models/mine")
    write({"models/mine/config.json": "[]"}, project)
    git("commit", "--quiet", "--all", "--message", "Edited")
    with pytest.raises(StageError, match=r"models/mine/config\.json was changed since the download"):
        make()


def test_another_revision_than_the_downloaded_one_is_refused(
    make: Make, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))  # which is read at import
    use_model(project, tmp_path / "hub/models--acme--model/snapshots" / ("c" * 40), model_revision="v1")
    with pytest.raises(
        StageError, match=r"describes 'acme/model' at 'v1', params\.yaml names it at 'main': `dvc repro"
    ):
        make()


def test_links_that_organize_passes_over_are_not_carried(
    make: Make, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, there = project / "data/raw", tmp_path / "target/data/raw"
    write({"id_rsa": "PRIVATE", "private.txt": "PRIVATE"}, tmp_path / "home")
    write({"blobs/1": "read through its link", ".hidden": "not read"}, raw)
    (raw / "snapshot.txt").symlink_to("blobs/1")
    before, _ = tree.walk(raw, lambda name: name.endswith(".txt"))
    for name, place in {"home": tmp_path / "home", "private.txt": "../../../home/private.txt", "deep/up": "..",
                        "deep/er/up": "../..", "copy.txt": "a.txt", "broken.txt": "absent"}.items():  # fmt: skip
        (raw / name).symlink_to(place)
    made = make("--raw")
    assert (
        "6 links in data/raw are not carried, such as broken.txt: organize passes them over" in capsys.readouterr().out
    )
    unbundle.unbundle(made, tmp_path / "target")
    assert "PRIVATE" not in {path.read_text() for path in there.rglob("*") if path.is_file()}
    assert tree.walk(raw, lambda name: name.endswith(".txt"))[0] == before
    assert tree.walk(there, lambda name: name.endswith(".txt"))[0] == before
    assert (there / "snapshot.txt").read_text() == "read through its link"
    assert (there / ".hidden").is_file(), "DVC would see another directory there"


def test_a_name_that_is_not_utf8_is_refused(make: Make, project: Path) -> None:
    (project / "data/raw" / os.fsdecode(b"caf\xe9.txt")).touch()
    with pytest.raises(StageError, match=r"^data/raw/caf\\xe9\.txt has a name that is not UTF-8: rename it"):
        make("--raw")


def test_what_is_not_committed_is_refused_by_name(make: Make, project: Path) -> None:
    write({"dvc.lock": "schema: '2.0'\nstages: {}\n", "params.yaml": "mine"}, project)
    with pytest.raises(StageError, match=r"^2 files are not in the last commit.*: params\.yaml, dvc\.lock\n"):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--part-size", "4"), "--part-size is '4': give at least 100K"),
        (("--python", "3"), "--python is '3'"),
        (("--platform", "win32"), "--platform 'win32': give them as 3.11 and manylinux_2_28_x86_64"),
        (("--since", "../absent"), r"--since is \.\./absent: name an earlier bundle"),
        (("--since", "../bundle"), "which this bundle would replace: name another directory"),
    ],
)
def test_options_that_cannot_work_are_refused(make: Make, options: tuple[str, str], message: str) -> None:
    with pytest.raises(StageError, match=message):
        make(*options)


def test_a_lock_is_read_for_the_python_of_the_other_machine() -> None:
    lock = (REPO / "requirements-cuda.lock").read_text()
    for python, numpy in (("3.11", "numpy==2.4"), ("3.13", "numpy==2.5")):
        target = bundle.Platform(python, "aarch64", (2, 28))
        for environment in target.environments():
            names = dict(bundle.requirements(lock, environment))
            assert next(name for name in names if name.startswith("numpy==")).startswith(numpy)
            assert not any(name.startswith("pywin32") for name in names)
            assert all(names.values())


def test_only_files_that_are_larger_than_a_part_are_cut(tmp_path: Path) -> None:
    contents = {
        "a": 60_000 * b"a",
        "b": 60_000 * b"b",
        "c": b"",
        "d": os.urandom(250_000),
        "e": 85_000 * b"e",
        "f": b"f",
    }
    cut = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        entry, pieces = bundle.measure(name, tmp_path / name, 100_000)
        assert entry.sha256 == hashlib.sha256(content).hexdigest()
        assert [piece.sha256 for piece in pieces] == [
            hashlib.sha256(content[piece.offset : piece.offset + piece.length]).hexdigest() for piece in pieces
        ]
        assert sum(piece.length for piece in pieces) == len(content)
        cut += pieces
    parts = [[piece.path for piece in pieces] for pieces in bundle.plan_parts(cut, 100_000)]
    assert parts == [["a"], ["b", "c"], ["d"], ["d"], ["d"], ["e", "f"]]


def test_platform_tags_include_all_older_ones() -> None:
    tags = bundle.Platform("3.11", "x86_64", (2, 17)).tags()
    assert tags[0] == "manylinux_2_17_x86_64" and "manylinux2014_x86_64" in tags
    assert "manylinux_2_28_x86_64" not in tags


def test_the_script_in_the_bundle_needs_no_package(make: Make, tmp_path: Path) -> None:
    made = make()
    command = [sys.executable, "-I", "-S", str(made / "unbundle.py"), str(tmp_path / "target")]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    flip_bit(next(made.glob("part-*")), 600)
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 2 and process.stderr.startswith("error: ") and "is damaged" in process.stderr


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def other_side(home: Path) -> tuple[list[str], str]:
    """How to run a command as on another machine, and the Python there.

    It runs without a network and environment, and where possible as another user.
    """
    environment = ["env", "-i", f"HOME={home}", "USER=other", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
    isolated = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    if os.getuid() != 0:
        return [isolated[0], "--map-root-user", *isolated[1:], *environment], sys._base_executable  # type: ignore[attr-defined]
    other_user = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    os.chown(home, OTHER_USER, OTHER_USER)
    for directory in (str(Path(sys._base_executable).parent), "/usr/local/bin", "/usr/bin"):  # type: ignore[attr-defined]
        python = f"{directory}/python{PYTHON}"
        command = [*isolated, *other_user, *environment]
        if subprocess.run([*command, python, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return command, python
    pytest.skip(f"no Python {PYTHON} that another user can run, with the module ensurepip")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_make_repro_passes_on_the_other_side(open_directory: Path) -> None:
    near, made, home = (open_directory / name for name in ("near", "bundle", "home"))
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPO).split("\0"):
        if (REPO / name).is_file():
            (near / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, near / name)
    params = (near / "params.yaml").read_text()
    write({"params.yaml": params.replace("max_steps:    ", "max_steps: 10")}, near)
    git("init", "--quiet", cwd=near)
    git("add", ".", cwd=near)
    git("commit", "--quiet", "--message", "First", cwd=near)
    build = Path(sys.prefix, ".setup").read_text().split()[1]
    command = [sys.executable, "-m", "scripts.bundle", "--build", build, "--part-size", "100M", "--to"]
    subprocess.run([*command, made], cwd=near, check=True)

    home.mkdir()
    there, python = other_side(home)
    target = home / "elsewhere"
    subprocess.run([*there, python, made / "unbundle.py", target], cwd=open_directory, check=True)
    subprocess.run([*there, "make", "-C", target, "repro"], check=True)
    assert (target / "outputs/report/report.html").is_file()

    write({"README.md": "changed"}, near)
    git("commit", "--quiet", "--all", "--message", "Second", cwd=near)
    second = open_directory / "second"
    subprocess.run([*command, second, "--since", made], cwd=near, check=True)
    assert sum(path.stat().st_size for path in second.iterdir()) < 200_000
    subprocess.run([*there, "make", "-C", target, "unbundle", f"BUNDLE={second}"], check=True)
    assert (target / "README.md").read_text() == "changed"
