"""A project is bundled, carried and unbundled: with small made-up packages, and once as it is."""

import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from huggingface_hub import snapshot_download

from scripts import bundle
from stages.base import publish
from stages.base.errors import StageError
from stages.base.files import FileEntry
from tests.byte_model import make_model
from tests.hub_server import Hub
from tests.project import REPO, Project, flip_bit, make_pipeline
from tests.public_tasks import ARC, serve

pytestmark = pytest.mark.slow  # each test makes a bundle, or installs one

PYTHON = f"3.{sys.version_info.minor}"
SETUP = f"""#!/usr/bin/env bash
# Notes how it was called, and makes an environment that has nothing of its own.
echo "$PYTHON $PIP_NO_INDEX $PIP_FIND_LINKS ${{PIP_INDEX_URL:-none}}" > .setup.log
mkdir -p .venv/bin
for name in python dvc; do
    [ $name = dvc ] && module="-m dvc" || module=
    printf '#!/bin/sh\\nexec {sys.executable} %s "$@"\\n' "$module" > .venv/bin/$name
done
chmod +x .venv/bin/*
echo cpu cpu $(cat requirements-cpu.lock requirements-encoder.lock | sha256sum | cut -d' ' -f1) > .venv/.setup
"""


def git(*arguments: str, cwd: Path = Path()) -> str:
    command = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.com", *arguments]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def dvc(command: str, target: str, cwd: Path = Path()) -> None:
    subprocess.run([sys.executable, "-m", "dvc", command, "--quiet", target], cwd=cwd, check=True)


def write(files: dict[str, str], directory: Path = Path()) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


def commit(**files: str) -> None:
    write({name.replace("__", "."): content for name, content in files.items()})
    git("add", ".")
    git("commit", "--quiet", "--allow-empty", "--message", "Next")


def make_wheel(directory: Path, name: str) -> str:
    """A wheel without modules; returns its line in a lock."""
    info, path = f"{name}-1.dist-info", directory / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1 \\\n    --hash=sha256:{publish.sha256_file(path)}\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two packages in its locks and results of the stage `organize`; beside it, the packages."""
    project = tmp_path_factory.mktemp("bundled") / "project"
    (project / "../packages").mkdir(parents=True)
    others = yaml.safe_load((REPO / "dvc.yaml").read_text())["stages"].values()
    stages = {
        "organize": {
            "cmd": "cp -r data/raw data/splits; echo > data/splits/more", "deps": ["data/raw"], "outs": ["data/splits"],
        },
        "extract": {
            "cmd": "cp data/splits/a.txt data/extracted", "deps": ["data/splits"],
            "params": [entry for stage in others for entry in stage.get("params", [])],  # of all in params.yaml
            "meta": {"runtime": [name for stage in others for name in stage.get("meta", {}).get("runtime", [])]},
        },
    }  # fmt: skip
    write(
        {
            "requirements-cpu.lock": "absent==1 ; sys_platform == 'win32' \\\n    --hash=sha256:0\n"
            + make_wheel(project / "../packages", "tiny"),
            "requirements-encoder.lock": make_wheel(project / "../packages", "other"),
            "requirements-score.lock": make_wheel(project / "../packages", "third"),
            "params.yaml": (REPO / "params.yaml").read_text(),
            "dvc.yaml": yaml.safe_dump({"stages": stages}),
            "models/tiny-llama/config.json": "{}",
            "scripts/setup.sh": SETUP,
            ".gitignore": (REPO / ".gitignore").read_text() + "/.setup.log\n",
            "data/.gitignore": (REPO / "data/.gitignore").read_text(),
            ".dvc/config": "[core]\n    analytics = false\n",
            ".dvc/.gitignore": "/tmp\n/cache\n/config.local\n",
            "Makefile": (REPO / "Makefile").read_text(),
            "data/raw/a.txt": "a" * 150_000,
            f"data/raw/deep/{'é' * 100} b.txt": "b",
            "data/raw/empty.txt": "",
        },
        project,
    )
    (project / "scripts/setup.sh").chmod(0o755)
    git("init", "--quiet", "--initial-branch", "work", cwd=project)
    dvc("add", "data/raw", cwd=project)
    dvc("repro", "organize", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "--quiet", "--message", "First", cwd=project)
    return project


def enter(original: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a copy of the project the current directory, with the packages beside the original one as those of pip."""
    monkeypatch.chdir(project)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"NO_INDEX": "1", "INDEX_URL": "https://absent.invalid", "FIND_LINKS": f"{original}/../packages"}
    for name, value in (settings | {"CONFIG_FILE": os.devnull}).items():
        monkeypatch.setenv(f"PIP_{name}", value)


@pytest.fixture
def project(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that project, as the current directory."""
    project = tmp_path / "project"
    shutil.copytree(original, project, symlinks=True)
    enter(original, project, monkeypatch)
    return project


def make(*options: str, to: str = "../bundle") -> Path:
    """Bundle the current project."""
    with mock.patch.object(sys, "argv", ["bundle", "--build", "cpu", "--to", to, *options]):
        bundle.make()
    return Path(to).resolve()


@pytest.fixture(scope="module")
def made_once(original: Path) -> Path:
    """The bundle of that project with its raw files; not to be changed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        enter(original, original, monkeypatch)
        return make("--raw")


@pytest.fixture
def made(made_once: Path, tmp_path: Path) -> Path:
    """A copy of that bundle."""
    return Path(shutil.copytree(made_once, tmp_path / "bundle"))


def unbundle(made: Path, target: Path, **about: str) -> None:
    """Install a bundle, by this module instead of its copy."""
    with mock.patch.object(bundle, "ABOUT", {"python": PYTHON, "machine": platform.machine(), "next": "", **about}):
        bundle.install(made, target)


def refused(made: Path, target: Path, message: str, **about: str) -> None:
    before = sorted(target.rglob("*")) if target.exists() else None
    with pytest.raises(bundle.Refused, match=message):
        unbundle(made, target, **about)
    assert (sorted(target.rglob("*")) if target.exists() else None) == before, "something was written"


def test_what_is_bundled_arrives(original: Path, made: Path, tmp_path: Path) -> None:
    target = tmp_path / "else" / "w h\u00e9re"
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=made).returncode == 0
    wheels = {f"{name}-1-py3-none-any.whl" for name in ("tiny", "other", "third")}
    assert {path.name for path in (made / "wheels").iterdir()} == wheels
    command = [sys.executable, "-I", "-S", str(made / "unbundle.py"), str(target)]  # it needs no package
    subprocess.run(command, cwd=tmp_path, check=True)
    for path in (original / "data/raw").rglob("*.txt"):
        assert (target / path.relative_to(original)).read_bytes() == path.read_bytes()
        assert (target / "data/splits" / path.relative_to(original / "data/raw")).read_bytes() == path.read_bytes()
    assert git("rev-parse", "--abbrev-ref", "HEAD", cwd=target) == "work\n"
    assert git("rev-parse", "HEAD", cwd=target) == git("rev-parse", "HEAD", cwd=original)
    assert git("status", "--porcelain", cwd=target) == ""
    assert (target / ".setup.log").read_text() == f"{sys.executable} 1 {(made / 'wheels').as_uri()} none\n"
    assert not list(target.parent.glob("*.unbundle"))
    again = subprocess.run(command, cwd=tmp_path, check=True, stdout=-1, text=True)  # it changes nothing
    assert again.stdout.endswith(" && make repro\n")


def test_without_raw_files_the_other_stages_run_there(project: Path, tmp_path: Path) -> None:
    made, target = make(), tmp_path / "a target"
    install = [sys.executable, made / "unbundle.py", target]
    command = subprocess.check_output(install, text=True).splitlines()[-1].removeprefix("unbundled: ")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "USER": "other"}
    output = subprocess.check_output(command, shell=True, cwd=tmp_path, env=environment, text=True)
    assert "Stage 'organize' didn't change" in output
    assert (target / "data/extracted").is_file() and not (target / "data/raw").exists()
    for name in ("Dockerfile", "apptainer.def"):
        assert "exec make repro ARGS=--allow-missing" in (made / name).read_text()


def test_a_bundle_that_was_tampered_with_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    for path in sorted(bundle.verify(made)):
        content = (made / path).read_bytes()
        if content:
            flip_bit(made / path, len(content) // 2)
            refused(made, target, f"{path} is damaged")
        (made / path).unlink()
        refused(made, target, f"{path} is missing")
        (made / path).symlink_to("/etc/passwd")
        refused(made, target, f"{path} is neither a file nor a directory")
        (made / path).unlink()
        (made / path).write_bytes(content)
    write({"dvc/files/md5/ab/c": "planted"}, made)
    refused(made, target, r"dvc/files/md5/ab/c is not listed in SHA256SUMS")
    (made / "dvc/files/md5/ab/c").unlink()
    sums = (made / bundle.SUMS).read_text()
    (made / "hf").mkdir()
    for path in ("hf/../../escaped", "/etc/passwd", "hf//x", "./unbundle.py", "hf"):  # outside, or not as it is written
        (made / bundle.SUMS).write_text(f"{sums}{'0' * 64}  {path}\n")
        refused(made, target, f"{made / path} is missing: copy it again")
    (made / bundle.SUMS).write_bytes(b"\xff\xfe")
    refused(made, target, "is not listed in SHA256SUMS")
    (made / bundle.SUMS).unlink()
    refused(made, target, "SHA256SUMS is missing")


def seal(made: Path) -> None:
    """Let the list of digests be that of the files as they are now."""
    sums = {path.relative_to(made): bundle.digest_of(path) for path in made.rglob("*") if path.is_file()}
    lines = [f"{digest}  {path}\n" for path, digest in sums.items() if path.name != bundle.SUMS]
    (made / bundle.SUMS).write_text("".join(lines))


def test_a_repository_that_git_does_not_take_is_refused(made: Path, tmp_path: Path) -> None:
    (made / bundle.REPOSITORY).write_text("nothing")
    seal(made)
    refused(made, tmp_path / "target", "git .* failed")


def test_a_link_in_the_place_of_the_model_cache_is_refused(project: Path, made: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "elsewhere"
    unbundle(made, target)
    other.mkdir()
    Path(".hf").symlink_to(other)
    git("add", "--force", ".hf")
    commit()
    second = make(to="../2")
    write({"hf/planted": "planted"}, second)
    seal(second)
    for where in (target, tmp_path / "new"):
        with pytest.raises(bundle.Refused, match=r"^the bundle is not safe: its repository has \.hf"):
            unbundle(second, where)
    assert not (tmp_path / "new").exists() and not list(other.iterdir())


def test_names_in_a_bundle_are_no_messages(made: Path, tmp_path: Path) -> None:
    (made / "a\nerror: b\x1b[2J").touch()
    command = [sys.executable, str(made / "unbundle.py"), str(tmp_path / "target")]
    errors = subprocess.run(command, capture_output=True, text=True).stderr
    assert errors == (
        f"error: {made}/a\\nerror: b\\x1b[2J is not listed in SHA256SUMS: delete it\nerror: nothing was installed\n"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("python", "3.9", rf"for Python 3\.9, and .* is Python {PYTHON}: (run it with|install it)"),
        ("machine", "riscv64", "for processors of type riscv64; this machine is"),
    ],
)
def test_another_machine_is_refused(made_once: Path, tmp_path: Path, key: str, value: str, message: str) -> None:
    refused(made_once, tmp_path / "target", message, **{key: value})


def test_an_environment_of_another_python_is_refused(made_once: Path, tmp_path: Path) -> None:
    """`make setup` keeps an environment, and would install packages of this Python into it."""
    target = tmp_path / "target"
    unbundle(made_once, target)
    write({".venv/pyvenv.cfg": "home = /usr/bin\nversion = 3.9.1\n"}, target)
    refused(made_once, target, rf"for Python {PYTHON}, and .*/\.venv has Python 3\.9: delete \.venv$")
    write({".venv/pyvenv.cfg": f"home = /usr/bin\nversion_info = {PYTHON}.1\n"}, target)  # as uv writes it
    unbundle(made_once, target)


def test_own_files_and_commits_of_the_target_stay(project: Path, made: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write({"mine.txt": "mine"}, target)
    refused(made, target, r"has other files, such as mine\.txt")
    (target / "mine.txt").unlink()
    unbundle(made, target)
    write({"data/raw/new.txt": "new"})
    dvc("add", "data/raw")
    dvc("repro", "organize")
    commit(README__md="new")
    second = make("--raw", to="../second")
    write({"params.yaml": "mine"}, target)
    refused(second, target, r"changes that are not committed, such as params\.yaml")
    git("checkout", "--quiet", "params.yaml", cwd=target)
    write({"README.md": "mine"}, target)
    with pytest.raises(bundle.Refused, match=r"(?s)merge .*README\.md"):
        unbundle(second, target)
    assert (target / "README.md").read_text() == "mine"
    (target / "README.md").unlink()
    git("commit", "--quiet", "--allow-empty", "--message", "Mine", cwd=target)
    with pytest.raises(bundle.Refused, match=r"merge .* failed: .*[Nn]ot possible to fast-forward"):
        unbundle(second, target)
    git("merge", "--quiet", "--no-edit", "FETCH_HEAD", cwd=target)
    write({"data/raw/a.txt": "mine"}, target)
    with pytest.raises(bundle.Refused, match=r"dvc failed, see above"):  # which does not overwrite it without --force
        unbundle(second, target)
    assert (target / "data/raw/a.txt").read_text() == "mine"
    (target / "data/raw/a.txt").unlink()
    unbundle(second, target)
    assert git("rev-parse", "HEAD^2", cwd=target) == git("rev-parse", "HEAD")
    for name, content in {"README.md": "new", "data/raw/new.txt": "new", "data/raw/a.txt": "a" * 150_000}.items():
        assert (target / name).read_text() == content


def test_an_installation_that_was_interrupted_continues(
    made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the clone, in a file of the model, and in the set-up."""
    target, run = tmp_path / "target", bundle.git
    write({"hf/a": "a" * 9, "hf/b": "b" * 9}, made)
    seal(made)

    def stopped(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    def killed(*arguments: str) -> str:
        if "clone" not in arguments:
            return run(*arguments)
        write({"Makefile": "half", ".git/index.lock": ""}, Path(arguments[-1]))
        raise KeyboardInterrupt

    def copied_in_part(source: str, final: str) -> None:
        Path(final).write_text("half")
        raise KeyboardInterrupt

    places = [(bundle, "git", killed), (shutil, "copyfile", copied_in_part), (bundle.subprocess, "run", stopped)]
    for place in places:
        with monkeypatch.context() as patched:
            patched.setattr(*place)
            with pytest.raises(KeyboardInterrupt):
                unbundle(made, target)
    (target / ".hf/b").write_text("damaged  ")  # of the same size
    unbundle(made, target)
    assert git("status", "--porcelain", cwd=target) == ""
    assert [(target / f".hf/{name}").read_text() for name in "ab"] == ["a" * 9, "b" * 9]
    assert (target / "data/splits/a.txt").is_file()
    assert not list(tmp_path.glob("*.unbundle"))


def test_a_result_that_dvc_lacks_or_has_damaged_is_named(project: Path) -> None:
    digest = hashlib.md5(b"b").hexdigest()
    cached = project / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    cached.chmod(0o644)
    cached.write_text("?")
    cached.chmod(0o444)  # else DVC itself would notice
    with pytest.raises(StageError, match=f"{digest}, of DVC's cache, is damaged: delete it"):
        make()
    cached.unlink()
    with pytest.raises(StageError, match=r"DVC's cache lacks data/splits.*: `dvc repro`"):
        make()
    assert [path.name for path in project.parent.iterdir()] == ["project"], "a part of a bundle is there"


def use_model(directory: Path, **fields: Any) -> None:
    """Let params.yaml and data/model.json name a model in a directory."""
    write({"config.json": "{}", "model.safetensors": "weights"}, directory)
    files = {name: FileEntry.of(directory / name) for name in ("config.json", "model.safetensors")}
    manifest = make_model(**{"model_name": str(directory), "files": files, **fields})
    params = Path("params.yaml").read_text()
    commit(params__yaml=re.sub("(?m)^model_name: .*", f"model_name: {manifest.model_name}", params))


def test_a_model_of_the_hub_is_found_there_as_in_its_cache(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HOME", str(hub.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))  # which is read at import
    snapshot = hub / "models--acme--model" / "snapshots" / ("c" * 40)
    use_model(snapshot, model_name="acme/model", commit="c" * 40)
    made = make()  # `unbundle` copies its hf/ to .hf/
    found = snapshot_download("acme/model", cache_dir=made / "hf/hub", local_files_only=True)
    assert (Path(found) / "model.safetensors").read_text() == "weights"
    (snapshot / "model.safetensors").write_text("changed")
    with pytest.raises(StageError, match=r"model\.safetensors is damaged or was changed"):
        make(to="../2")
    use_model(snapshot, model_name="acme/model", commit="c" * 40, model_revision="v1")
    with pytest.raises(StageError, match=r"or of another model than acme/model at main: `dvc repro download`"):
        make(to="../2")


def test_a_model_in_a_directory_is_carried_by_dvc(project: Path, tmp_path: Path) -> None:
    use_model(tmp_path / "mine")
    with pytest.raises(StageError, match=r"neither git nor DVC tracks the model .*/mine: move it below models/, `dvc"):
        make()
    use_model(Path("models/mine"))
    dvc("add", "models/mine")
    commit()
    digest = hashlib.md5(b"weights").hexdigest()
    assert (make() / f"dvc/files/md5/{digest[:2]}/{digest[2:]}").read_text() == "weights"


def test_what_cannot_be_carried_is_refused_by_name(project: Path) -> None:
    write({"new.txt": "", "params.yaml": "mine"})
    with pytest.raises(StageError, match=r"^2 files are not in the last commit.*: params\.yaml, new\.txt\n"):
        make()
    with pytest.raises(StageError, match=r"--to is \.\., which exists: delete it, or name another"):
        make(to="..")
    git("checkout", "--quiet", "params.yaml")
    Path("new.txt").unlink()
    with pytest.raises(StageError, match="--platform is 'win32': give it as manylinux_2_28_x86_64"):
        make("--platform", "win32")
    with pytest.raises(StageError, match=r"--python is '3\.12\.1': give it as 3\.12, without more"):
        make("--python", "3.12.1")
    git("rm", "--quiet", "data/raw.dvc")
    commit()
    with pytest.raises(StageError, match=r"DVC does not track data/raw: `dvc add data/raw`, and commit data/raw\.dvc"):
        make("--raw")


def test_a_lock_is_read_for_the_python_and_platform_of_the_other_machine() -> None:
    lock = (REPO / "requirements-cuda.lock").read_text()
    for python, numpy in (("3.11", "numpy==2.4"), ("3.13", "numpy==2.5")):
        lines = [*bundle.requirements(lock, python, "aarch64")]
        assert next(line for line in lines if line.startswith("numpy==")).startswith(numpy)
        assert not any(line.startswith("pywin32") for line in lines)
        assert all("--hash=sha256:" in line for line in lines)


def test_an_old_python_gets_as_far_as_the_message_about_it(made_once: Path) -> None:
    ast.parse((made_once / "unbundle.py").read_text(), feature_version=(3, 6))


@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_make_repro_passes_on_the_other_side(tmp_path: Path) -> None:
    """With a public task, which gives the same answers there."""
    near, made, target = (tmp_path / name for name in ("near", "bundle", "elsewhere"))
    make_pipeline(Project(near))
    Project(near).set(max_steps=10, tasks=["arc_easy"])
    git("init", "--quiet", cwd=near)
    dvc("add", "data/raw", cwd=near)
    with Hub().serve() as hub:
        serve(hub, tmp_path / "hub", "allenai/ai2_arc", ["ARC-Easy"], ("train", "validation", "test"), ARC)
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        Project(near).run("python", "-m", "stages.score", "--fetch", "arc_easy", **settings)
    dvc("add", "evals/public/allenai--ai2_arc", cwd=near)
    git("add", ".", cwd=near)
    git("commit", "--quiet", "--message", "First", cwd=near)
    build = Path(sys.prefix, ".setup").read_text().split()[1]
    command = [sys.executable, "-m", "scripts.bundle", "--raw", "--build", build, "--to", made]
    subprocess.run(command, cwd=near, check=True)
    environment = [f"HOME={tmp_path}", "USER=other", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
    there = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", "env", "-i", *environment]
    python = sys._base_executable  # type: ignore[attr-defined]
    subprocess.run([*there, python, made / "unbundle.py", target], check=True)
    subprocess.run([*there, "make", "-C", target, "repro"], check=True)
    assert (target / "outputs/report/report.html").is_file()
    subprocess.run([*there, "make", "-C", target, "unbundle", f"BUNDLE={made}"], check=True)
    there[-1] = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([*there, "dvc", "repro"], cwd=near, check=True)
    for name in ("tasks.json", "answers.jsonl"):
        assert (near / "outputs" / name).read_bytes() == (target / "outputs" / name).read_bytes()
