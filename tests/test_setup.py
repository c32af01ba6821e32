"""What `make setup` installs, the sample corpus of `make repro`, and the model that comes with it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from scripts import install, sample_corpus
from stages.base import publish
from tests.project import REPO

pytestmark = pytest.mark.slow  # most run setup.sh

TINY_LLAMA = REPO / "models" / "tiny-llama"


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_corpus_is_what_python_documents_in_three_formats_and_the_same_each_time(tmp_path):
    for name in ("corpus", "again"):
        sample_corpus.write(tmp_path / name)
    files = contents(tmp_path / "corpus")
    assert files == contents(tmp_path / "again")
    assert 1e6 < sum(map(len, files.values())) < 3e6
    assert {path.parts[0] + path.suffix for path in files} == {"topics.txt", "modules.json", "distributions.yaml"}
    assert all(files.values())
    assert files[Path("topics/while.txt")].startswith(b'The "while" statement')
    heapq = json.loads(files[Path("modules/heapq.json")])
    assert heapq["functions"]["heappush"] == "Push item onto heap, maintaining the heap invariant."
    assert yaml.safe_load(files[Path("distributions/pyyaml.yaml")])["name"] == "PyYAML"


def test_an_interrupted_corpus_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted():
        yield "topics/while.txt", "text"
        raise KeyboardInterrupt

    monkeypatch.setattr(sample_corpus, "files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample_corpus.write(tmp_path / "raw")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mine.txt", "deep/er/mine.bin", ".hidden", "sub/link"])
def test_own_files_are_left_unchanged_and_empty_directories_and_a_gitignore_are_none(
    tmp_path, monkeypatch, capsys, name
):
    path = tmp_path / name
    assert sample_corpus.is_empty(tmp_path / "missing")
    path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / ".gitignore").write_text("*\n")
    assert sample_corpus.is_empty(tmp_path)
    if name == "sub/link":
        path.symlink_to("elsewhere")
    else:
        path.write_text("mine")
    before = contents(tmp_path)
    monkeypatch.setattr("sys.argv", ["sample_corpus", "--raw-dir", str(tmp_path)])
    sample_corpus.main()
    assert contents(tmp_path) == before
    assert "left unchanged" in capsys.readouterr().out


def test_a_gitignore_and_a_link_to_another_disk_survive(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / ".gitignore").write_text("*\n")
    (tmp_path / "raw").symlink_to(disk)
    monkeypatch.setattr(sample_corpus, "files", lambda: iter([("topics/while.txt", "text")]))
    sample_corpus.write(tmp_path / "raw")
    assert (tmp_path / "raw").is_symlink()
    assert contents(disk) == {Path(".gitignore"): b"*\n", Path("topics/while.txt"): b"text"}


def test_docstrings_nest_and_omit_what_is_private_or_empty():
    source = '''
"""Module."""
class A:
    """Class."""
    def f(self):
        """Method."""
    def g(self): ...
    def _private(self):
        """Private."""
    class B:
        """Inner."""
class Bare: ...
def f():
    """Function."""
'''
    assert sample_corpus.docstrings(ast.parse(source)) == {
        "doc": "Module.",
        "classes": {"A": {"doc": "Class.", "classes": {"B": {"doc": "Inner."}}, "methods": {"f": "Method."}}},
        "functions": {"f": "Function."},
    }


def test_tiny_llama_is_small_and_tied():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY_LLAMA))
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.get_input_embeddings().padding_idx is None  # otherwise the EOS token would not be trained


def test_tiny_llama_decodes_what_it_encodes():
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    for text in ("", " two  spaces ", "\n\n\ttabs\r\n", "don't , . ! ?", "Grüße 日本 😀", "\0\x07", "<|endoftext|>"):
        input_ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        assert tokenizer.decode(input_ids) == text
        assert tokenizer.eos_token_id not in input_ids


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_locks_are_complete_and_name_neither_urls_nor_paths(build):
    lock = (REPO / f"requirements-{build}.lock").read_text(encoding="utf-8")
    assert not re.search(r"://|^\s*-|/", re.sub(r"--hash=sha256:[0-9a-f]{64}", "", lock), re.MULTILINE)
    requirements = re.split(r"^(?=\w)", lock, flags=re.MULTILINE)[1:]
    assert all("==" in requirement and "--hash=sha256:" in requirement for requirement in requirements)
    (torch,) = [requirement.split()[0] for requirement in requirements if requirement.startswith("torch==")]
    assert torch == {"cpu": "torch==2.13.0+cpu", "cuda": "torch==2.13.0"}[build]
    assert any(requirement.startswith("nvidia-") for requirement in requirements) == (build == "cuda")
    # `pip download` fetches what a lock lists, and nothing that only a build needs.
    unconditional = re.findall(r"^(\S+)==\S+ \\$", lock, re.MULTILINE)
    assert {"setuptools", "torch", "uv"} <= set(unconditional)


def test_the_lock_that_is_audited_has_the_packages_of_the_other():
    cpu, cuda = (
        set(re.findall(r"^(\S+==[^\s+]+)", (REPO / f"requirements-{build}.lock").read_text("utf-8"), re.MULTILINE))
        for build in ("cpu", "cuda")
    )
    assert len(cpu) > 100 and cpu <= cuda


PYTHON = """#!/usr/bin/env bash
# Replaces the python of the virtual environment: logs which packages of which lock are to be installed, and fails for
# those in REFUSED.
[[ $* != *scripts.install_encoder ]] || { echo encoder >> log && exit; }
[[ $* != "-m pip --version" ]] || { [[ -e .venv/bin/pip ]]; exit; }
[[ $* == *" --require-hashes "* ]] || exit 9
packages=$(sed -n 's/^\\(\\S*==\\S*\\).*/\\1/p' "${!#}" | paste -sd ' ')
echo "$packages" >> log
[[ " $packages " != *" ${REFUSED:-none} "* ]]
"""


@pytest.fixture
def run_setup(tmp_path):
    """A function that runs a copy of the set-up script, a python that only logs, a simulated GPU and its device file.

    Returns the exit status, the lines of the log, and the last line of the errors.
    """
    script, device_file = (REPO / "scripts/setup.sh").read_text(), "/dev/nvidia0"
    assert device_file in script
    for build in ["cpu", "cuda"]:
        (tmp_path / f"requirements-{build}.lock").write_text(LOCK.replace("BUILD", build))
    (tmp_path / "requirements-encoder.lock").touch()
    executables = {
        "scripts/setup.sh": script.replace(device_file, f"{tmp_path}/nvidia0"),
        "scripts/locked.sh": (REPO / "scripts/locked.sh").read_text(),
        ".venv/bin/python": PYTHON,
        ".venv/bin/pip": "",
        "bin/nvidia-smi": '#!/bin/sh\n[ "$GPU" = 1 ]\n',
    }
    for path, content in executables.items():
        executable = tmp_path / path
        executable.parent.mkdir(parents=True, exist_ok=True)
        executable.write_text(content)
        executable.chmod(0o755)

    def run(*, gpu, refused=""):
        log = tmp_path / "log"
        log.write_text("")
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "GPU": str(gpu), "REFUSED": refused}
        process = subprocess.run([tmp_path / "scripts/setup.sh"], env=environment, capture_output=True, text=True)
        *_, last = ["", *process.stderr.splitlines()]
        return process.returncode, log.read_text().splitlines(), last

    return run


LOCK = """# Made for a test.
setuptools==1 \\
    --hash=sha256:0
torch==1+BUILD \\
    --hash=sha256:0
torchmetrics==1 \\
    --hash=sha256:0
uv==1 \\
    --hash=sha256:0
"""
TOOLS = "setuptools==1 uv==1"
CPU, CUDA = (
    [TOOLS, f"torch==1+{build}", f"setuptools==1 torch==1+{build} torchmetrics==1 uv==1", "encoder"]
    for build in ("cpu", "cuda")
)


NOTHING = (0, [], "")
NO_CPU = "setup: the cpu build of torch cannot be installed here"
NO_CUDA = "setup: the cuda build of torch cannot be installed here"
MISSING = "setup: requirements-cpu.lock cannot be installed: the error above names what is missing"


@pytest.mark.parametrize(
    "runs",  # gpu, what cannot be installed, and the result
    [
        [
            (0, "", (0, CPU, "")), (0, "", NOTHING),
            (1, "", (0, CUDA, "")), (1, "", NOTHING),
            (0, "", NOTHING),  # a CPU node leaves the build of the GPU node
        ],
        [(0, "torch==1+cpu", (0, [*CPU[:2], *CUDA], NO_CPU)), (0, "", NOTHING), (1, "", NOTHING)],
        [(0, "", (0, CPU, "")), (1, "torch==1+cuda", (0, CUDA[:2], NO_CUDA)), (1, "", NOTHING)],
        [(0, "uv==1", (1, CPU[:1], MISSING))],
        [(0, "torchmetrics==1", (1, CPU[:3], MISSING))],
    ],
    ids=["fits", "falls back", "keeps the other", "no uv", "no package"],
)  # fmt: skip
def test_setup_installs_the_build_that_fits_or_the_other_one_and_keeps_it(run_setup, runs):
    for gpu, refused, (status, installed, last) in runs:
        found = run_setup(gpu=gpu, refused=refused)
        assert found[:2] == (status, installed)
        assert found[2].startswith(last) and bool(last) == bool(found[2])


def test_setup_finishes_an_environment_without_pip(run_setup, tmp_path):
    """As it is after Ctrl-C while it is made, and on a Debian that lacked python3-venv."""
    (tmp_path / ".venv/bin/pip").unlink()
    (tmp_path / "bin/python3").write_text("#!/bin/sh\n[ \"$*\" = '-m venv .venv' ] && touch .venv/bin/pip\n")
    (tmp_path / "bin/python3").chmod(0o755)
    assert run_setup(gpu=0) == (0, CPU, "")
    assert (tmp_path / ".venv/bin/pip").exists()


def test_setup_names_an_environment_that_was_moved(run_setup, tmp_path):
    """`make repro` starts its programs, which start the Python of the place where it was made."""
    run_setup(gpu=0)
    for python in (tmp_path / ".venv/bin/python", Path("/bin/sh")):  # the latter where that path is too long
        (tmp_path / ".venv/bin/dvc").write_text(f"#!{python}\n")
        assert run_setup(gpu=0) == NOTHING
    (tmp_path / ".venv/bin/dvc").write_text(f"#!{tmp_path}/before/.venv/bin/python\n")
    status, installed, last = run_setup(gpu=0)
    assert (status, installed) == (1, []) and "was moved" in last


def test_setup_detects_a_gpu_by_its_device_file(run_setup, tmp_path):
    (tmp_path / "nvidia0").touch()
    assert run_setup(gpu=0) == (0, CUDA, "")


def test_setup_fails_if_neither_build_can_be_installed(run_setup, tmp_path):
    (tmp_path / "requirements-cuda.lock").write_text(LOCK.replace("BUILD", "cpu"))
    status, _, last = run_setup(gpu=0, refused="torch==1+cpu")
    assert (status, last.startswith("setup: neither build of torch")) == (1, True)


@pytest.mark.parametrize("name", ["cpu", "encoder"])
def test_setup_runs_again_if_a_lock_changed(run_setup, tmp_path, name):
    run_setup(gpu=0)
    with (tmp_path / f"requirements-{name}.lock").open("a") as lock:
        lock.write("# changed\n")
    assert run_setup(gpu=0)[1][:2] == CPU[:2]


def test_uv_looks_for_packages_where_pip_would():
    listing = """:env:.find-links='/wheels /more'
:env:.no-index='0'
global.cert='/certificates'
global.find-links='/replaced'
global.index-url='https://mirror/simple'
install.extra-index-url='\\nhttps://one\\nhttps://two'
list.format='columns'
"""
    settings = install.pip_settings(listing)
    assert settings == {
        "cert": "/certificates", "find-links": "/wheels /more", "index-url": "https://mirror/simple", "no-index": "0",
        "extra-index-url": "\nhttps://one\nhttps://two",
    }  # fmt: skip
    assert sorted(install.uv_options(settings)[2:]) == sorted(
        ["--default-index", "https://mirror/simple", "--index", "https://one", "--index", "https://two",
         "--find-links", "/wheels", "--find-links", "/more"]
    )  # fmt: skip
    assert "--no-index" in install.uv_options({"no-index": "true"})


@pytest.fixture
def install_offline(tmp_path):
    """A function that installs a source package from a directory without network; returns the process."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/setup.py").write_text(
        "from setuptools import setup; setup(name='plain', version='1', py_modules=[])"
    )
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with tarfile.open(wheels / "plain-1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "plain", "plain-1")
    digest = publish.sha256_file(wheels / "plain-1.tar.gz")

    def run(lock, **settings):
        (tmp_path / "lock").write_text(lock.format(digest=digest))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        command = [sys.executable, "-m", "scripts.install", "--target", str(tmp_path / "site"), "--require-hashes"]
        return subprocess.run(
            [*command, "--no-build-isolation", "--requirement", str(tmp_path / "lock")], cwd=REPO, text=True,
            env={**inherited, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels),
                 "PIP_NO_CACHE_DIR": "1", **settings},
            capture_output=True,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("settings", [{}, {"PIP_PREFER_BINARY": "1"}], ids=["uv", "pip"])
def test_a_source_package_is_built_without_a_network(install_offline, tmp_path, settings):
    process = install_offline("plain==1 --hash=sha256:{digest}\n", **settings)
    assert process.returncode == 0, process.stderr
    assert ("no equivalent of pip's setting prefer-binary" in process.stdout) == bool(settings)
    assert (tmp_path / "site/plain-1.dist-info").is_dir()


def test_a_package_that_is_missing_offline_is_named(install_offline):
    process = install_offline("absent==1 --hash=sha256:{digest}\n")
    assert process.returncode != 0
    assert "absent was not found" in process.stderr


def test_make_repro_without_git_names_the_setting_of_dvc(tmp_path):
    for name in ("Makefile", ".dvc/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "dvc"):
        (tmp_path / ".venv/bin" / name).write_text("#!/bin/sh\necho $0 $@\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    make = ["make", "--old-file", "setup", "repro"]
    done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert "without git, DVC needs: .venv/bin/dvc config --local core.no_scm true" in done.stderr
    assert (done.returncode, "dvc repro" in done.stdout) == (2, False)
    (tmp_path / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    assert "dvc repro" in subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (tmp_path / ".dvc/config.local").unlink()
    (tmp_path / ".git").touch()  # of a worktree
    assert "dvc repro" in subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
