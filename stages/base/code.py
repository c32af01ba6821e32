"""Which code decides a result: the modules that a stage reaches by import, and a digest of their statements.

`run_id` and the keys of the reuse store contain this digest, and DVC watches the rooms that the modules are in. DVC
hashes bytes, so it runs a stage again after any edit. The digest leaves out comments, docstrings and layout, so after
such an edit the stage finds its earlier result: a reworded comment costs seconds, not a training.

Imports are read from the syntax tree, wherever in a module they are; nothing is imported. What only a type checker
imports (`if TYPE_CHECKING:`) does not run and is left out. `importlib.import_module` is not followed.
"""

import ast
import importlib.metadata
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from stages.base import publish

_PROJECT = Path(__file__).parents[2]


def reached(*entries: str, project: Path = _PROJECT) -> dict[str, Path]:
    """The first-party modules that run when the modules `entries` do, packages included: name -> file, sorted."""
    modules: dict[str, Path] = {}
    pending = [parent for entry in entries for parent in _with_parents(entry)]
    while pending:
        name = pending.pop()
        file = _file(name, project)
        if file is None or name in modules:  # None: not a module but a name that one defines
            continue
        modules[name] = file
        ours = [each for each in _parse(file.read_bytes())[1] if each.partition(".")[0] == __name__.partition(".")[0]]
        pending += (parent for imported in ours for parent in _with_parents(imported))
    return dict(sorted(modules.items()))


def digest(*entries: str, within: tuple[str, ...] = ("stages",), project: Path = _PROJECT) -> str:
    """SHA-256 of the statements of all modules that `entries` reach. The same on every supported version of Python.

    Args:
        entries: Names of modules.
        within: Packages and modules; of what `entries` reach, only what is in them counts.
        project: Where they are.
    """
    prefixes = tuple(f"{name}." for name in within)
    files = reached(*entries, project=project).items()
    # By name, so that a statement moved from one module to another counts as a change.
    return publish.sha256_json(
        {name: _parse(file.read_bytes())[0] for name, file in files if f"{name}.".startswith(prefixes)}
    )


def digest_with_packages(*entries: str, project: Path = _PROJECT) -> str:
    """The same, and the versions of Python and of the installed packages that these modules import.

    For results that are computed again at little cost. It is not part of `run_id`: DVC does not watch packages, and an
    update of one must not send a training back to step 0.
    """
    return publish.sha256_json([packages(*entries, project=project), digest(*entries, project=project)])


def packages(*entries: str, project: Path = _PROJECT) -> dict[str, str]:
    """The versions of Python and of the installed packages that the modules of `entries` import, sorted by name."""
    files = reached(*entries, project=project).values()
    imported = {name.partition(".")[0] for file in files for name in _parse(file.read_bytes())[1]}
    # A package may belong to several distributions, and have none at all if it is not installed.
    used = {found for name in imported - sys.stdlib_module_names for found in _find_distributions().get(name, ())}
    versions = {name: importlib.metadata.version(name) for name in sorted(used)}
    return {"python": "{}.{}".format(*sys.version_info), **versions}


@cache
def _find_distributions() -> dict[str, set[str]]:
    """The distributions of each top-level package.

    On Python 3.10, importlib.metadata.packages_distributions leaves out those without top_level.txt, such as numpy.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for each in importlib.metadata.distributions():
        names = (each.read_text("top_level.txt") or "").split()
        for name in names or {file.parts[0].partition(".")[0] for file in each.files or ()}:
            found[name].add(each.metadata["Name"])
    return found


@cache  # a stage asks for a digest and for packages, a launcher for those of several stages
def _parse(source: bytes) -> tuple[str, frozenset[str]]:
    """SHA-256 of the statements of a file of Python, and its imports as `_imports` gives them."""
    tree = ast.parse(source)
    return publish.sha256_json(_canonical(tree)), frozenset(_imports(tree))


def _file(name: str, project: Path) -> Path | None:
    path = project / name.replace(".", "/")
    # No import and no importlib.util.find_spec, which imports the parent packages.
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _with_parents(name: str) -> list[str]:
    """`stages.model.hub` -> itself and its packages: Python runs their `__init__.py` too."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _imports(node: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports. `from a import b` gives `a.b`: `b` may be a module or not."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "a relative import, which this function does not resolve; ruff's TID252 forbids them"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    # Where the test is TYPE_CHECKING, its `else` is the branch that runs.
    for child in node.orelse if is_for_types and isinstance(node, ast.If) else ast.iter_child_nodes(node):
        yield from _imports(child)


def _canonical(node: Any) -> Any:
    """A syntax tree as JSON, without positions and docstrings.

    `ast.dump` would do but for empty fields: which ones there are differs between versions of Python.
    """
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty strings to nested format specs
        node = ast.JoinedStr(
            [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
        )
    if isinstance(node, ast.AST):
        fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
        return [type(node).__name__, {name: _canonical(value) for name, value in fields.items()}]
    if isinstance(node, list):
        return [_canonical(item) for item in node if not _is_docstring(item)]
    return repr(node)  # a string: JSON has no bytes, complex numbers or Ellipsis


def _is_docstring(node: Any) -> bool:
    """Whether a statement is a string alone: of a module, class or function, or below a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
