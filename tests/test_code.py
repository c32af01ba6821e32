"""Which code decides a result: comments and docstrings do not, statements do, in the modules that a stage reaches."""

import re
import shutil
from pathlib import Path

import pytest

from stages.base import code
from stages.checkpointing import run
from tests.project import REPO


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the stages, to edit."""
    shutil.copytree(REPO / "stages", tmp_path / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def write(project: Path, **modules: str) -> None:
    """Stages that are a few modules: `a__b="..."` is stages/a/b.py."""
    for name, text in {"__init__": "", **modules}.items():
        path = project / "stages" / f"{name.replace('__', '/') if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_comments_docstrings_and_layout_do_not_change_the_digest(project: Path) -> None:
    """In every module, whatever it contains."""
    before = code.digest(*run.WEIGHTS, project=project), code.digest_with_packages("stages.pack", project=project)
    for path in (project / "stages").rglob("*.py"):
        text = path.read_text()
        text = re.sub(r'"""([A-Z])', r'"""Reworded: \1', text)
        text = text.replace("\n\n\n", "\n\n\n# a comment\n\n\n") + "\n\n# the end\n"
        assert text != path.read_text()
        path.write_text(text)
    assert before == (
        code.digest(*run.WEIGHTS, project=project),
        code.digest_with_packages("stages.pack", project=project),
    )


@pytest.mark.slow
def test_a_statement_names_another_run_exactly_if_its_module_decides_numbers(project: Path) -> None:
    """A launcher, a message, a lock, a tracker or the saver may change without a training."""

    def digest() -> str:
        return code.digest(*run.WEIGHTS, within=run.DECIDING, project=project)

    before, root = digest(), project / "stages"
    names = {f"{path.relative_to(root)}": path for path in root.rglob("*.py")}
    deciding = {
        *("building/sharding.py", "building/weights.py"),
        *("forward/attention.py", "forward/loss.py", "training/loop.py", "training/optimizer.py", "training/order.py"),
        *("training/schedule.py", "training/step.py", "model/meta.py", "base/splitmix64.py"),
    }
    changed = set()
    for name, path in names.items():
        text = path.read_text()
        path.write_text(text + "\nedited = 1\n")
        if digest() != before:
            changed.add(name)
        path.write_text(text)
    assert deciding <= changed
    rooms = {name.split("/")[0] for name in changed if "/" in name}
    assert rooms == {"base", "building", "forward", "model", "training"}
    assert {name for name in changed if name.startswith("base/")} == {"base/splitmix64.py"}


def test_the_code_that_decides_numbers_knows_no_launcher_and_no_checkpoint() -> None:
    """It is given what it needs of them. And every module in these rooms is part of what names a run."""
    reached, rooms = code.reached(*run.WEIGHTS), ("building", "forward", "training")
    assert {name.split(".")[1] for name in reached if "." in name} == {*rooms, "base", "model"}
    files = {path for room in rooms for path in (REPO / "stages" / room).glob("*.py")}
    # These only read a finished model, or one that is downloaded.
    assert {path.name for path in files - {*reached.values()}} == {
        "adapter_probe.py",
        "frozen_model.py",
        "load_probe.py",
    }


@pytest.mark.parametrize(
    ("old", "new", "is_equal"),
    [
        ("x = 1", "x = 1  # one", True),
        ("x = 1", "x = (\n    1\n)", True),
        ("x = 'a'", 'x = "a"', True),
        ("def f():\n    '''Old.'''\n    return 1", "def f():\n    '''New.'''\n\n    return 1", True),
        ("class A:\n    x: int\n    '''Old.'''", "class A:\n    x: int\n    '''New.'''", True),
        ("x = 1", "x = 2", False),
        ("x = 1", "x = 1.0", False),
        ("x = 1", "x = True", False),
        ("x = 'a'", "x = b'a'", False),
        ("x = '''a'''", "x = '''b'''", False),  # not a docstring
        ("def f(a, b): ...", "def f(b, a): ...", False),
        ("x = None", "x = []", False),
        ("if a:\n    b()\nc()", "if a:\n    b()\n    c()", False),
    ],
)
def test_only_statements_change_the_digest(tmp_path: Path, old: str, new: str, is_equal: bool) -> None:
    digests = []
    for text in (old, new):
        write(tmp_path, a=text)
        digests.append(code.digest("stages.a", project=tmp_path))
    assert (digests[0] == digests[1]) == is_equal


def test_modules_are_reached_by_any_import_that_runs(tmp_path: Path) -> None:
    write(
        tmp_path,
        a="from typing import TYPE_CHECKING\nimport json\nif TYPE_CHECKING:\n    from stages.types import T\n"
        "else:\n    from stages import other\nfrom stages.pack.one import name\n",
        other="",
        types="",
        unused="",
        pack__one="def f():\n    from stages.pack import two\n    class C:\n        import stages.three\n",
        pack__two="import stages.a\n",  # a circle ends
        three="",
    )
    (tmp_path / "stages/pack/__init__.py").write_text("import stages.of_package\n")
    (tmp_path / "stages/of_package.py").write_text("")
    assert list(code.reached("stages.a", project=tmp_path)) == [
        "stages", "stages.a", "stages.of_package", "stages.other", "stages.pack", "stages.pack.one", "stages.pack.two",
        "stages.three",
    ]  # fmt: skip


def test_packages_change_only_the_digest_with_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a="import numpy\n", b="import json\n")
    before = {name: code.digest_with_packages(f"stages.{name}", project=tmp_path) for name in "ab"}
    plain = code.digest("stages.a", project=tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"another {name}")
    after = {name: code.digest_with_packages(f"stages.{name}", project=tmp_path) for name in "ab"}
    assert before["a"] != after["a"]
    assert before["b"] == after["b"]
    assert code.digest("stages.a", project=tmp_path) == plain


MODULE = '''
import os

class A(int):
    """A docstring."""

    x: int | None = None

    def f(self, *a: str, **k: int) -> str:
        return f"{self!r:>{10}} {a[0]}" + "".join(sorted(k)) + u"é"

async def g():
    return [x async for x in h()]

with open(os.devnull) as file, file:
    pass
match 1:
    case {"a": [1, *_]}:
        pass
'''


def test_the_digest_is_the_same_in_every_version_of_python(tmp_path: Path) -> None:
    """Written down with Python 3.10 to 3.13: a new Python on the cluster must not send trainings back to step 0."""
    write(tmp_path, a=MODULE)
    digest = "ed13ff725f94229bde282f188c7c56c4bf0fb7db931496130de56e35edeecf5a"
    assert code.digest("stages.a", project=tmp_path) == digest
