"""Write a sample corpus into `data/raw`, unless it holds files already: Python's documentation as installed here.

    python -m scripts.sample_corpus

    topics/*.txt           what `help("while")` and the like print, one file per topic
    modules/*.json         the docstrings of the standard library, one file per module
    distributions/*.yaml   the metadata and descriptions of the installed distributions, one file each

Nothing is downloaded, and modules are parsed rather than imported. The same environment gives the same bytes.
"""

import argparse
import ast
import importlib.metadata
import json
import pydoc_data.topics
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stages.base import publish

# Parts of the standard library that are programs, tests, tables, GUI toolkits or deprecated.
NOT_LIBRARY = {"antigravity", "ensurepip", "idlelib", "pydoc_data", "test", "tests", "this"}
NOT_LIBRARY |= {"distutils", "encodings", "lib2to3", "tkinter", "turtle", "turtledemo"}

# The beginning describes the distribution; the rest, mostly change logs, would outweigh the documentation.
MAX_DESCRIPTION_CHARS = 1000
METADATA_FIELDS = ["name", "version", "summary", "keywords", "requires_python", "requires_dist", "description"]


def main() -> None:
    """Write the corpus and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw-dir", type=Path, default=Path("data/raw"), help="default: %(default)s")
    raw_dir = parser.parse_args().raw_dir
    if not is_empty(raw_dir):
        print(f"sample corpus: {raw_dir} already holds files; left unchanged")
        return
    lock = Path("dvc.lock")
    if lock.exists() and f"path: {raw_dir}\n" in lock.read_text(encoding="utf-8"):
        # As in a clone: with the sample corpus, all stages would run and replace the results.
        raise SystemExit(
            f"sample corpus: {raw_dir} is empty, but {lock} has results of other files in it: `dvc pull` gets the "
            f"results, and the files if they were added with `dvc add {raw_dir}`; without the files, use `dvc repro "
            f"--allow-missing`. To start with the sample corpus instead, delete {lock}"
        )
    sizes = write(raw_dir)
    print(f"sample corpus: {len(sizes)} files, {sum(sizes):,} bytes in {raw_dir}")


def is_empty(raw_dir: Path) -> bool:
    """Whether `raw_dir` holds nothing but directories and `.gitignore` files."""
    return all((path.is_dir() and not path.is_symlink()) or path.name == ".gitignore" for path in raw_dir.rglob("*"))


def write(raw_dir: Path) -> list[int]:
    """Write all of the corpus or nothing; returns the size of each file in bytes."""
    raw_dir = raw_dir.resolve()  # may be a link to a larger disk, which the rename below must not replace
    sizes = []
    with publish.directory(raw_dir) as root:
        if (ignored := raw_dir / ".gitignore").exists():
            shutil.copy2(ignored, root)
        for path, content in files():
            target = root / path
            target.parent.mkdir(exist_ok=True)
            sizes.append(target.write_bytes(content.encode()))
    return sizes


def files() -> Iterator[tuple[str, str]]:
    """Path and content of each file of the corpus."""
    for name, text in topics():
        yield f"topics/{name}.txt", text
    for name, documentation in modules():
        yield f"modules/{name}.json", json.dumps(documentation, indent=2, ensure_ascii=False) + "\n"
    for name, metadata in distributions():
        yield f"distributions/{name}.yaml", yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)


def topics() -> Iterator[tuple[str, str]]:
    """Name and text of each topic of the language."""
    yield from sorted(pydoc_data.topics.topics.items())


def modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and docstrings of each public module of the standard library that has docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = {}
    for name in sys.stdlib_module_names:
        for path in [root / f"{name}.py", *(root / name).rglob("*.py")]:
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if path.is_file() and not any(part.startswith("_") or part in NOT_LIBRARY for part in parts):
                sources[".".join(parts)] = path
    for name, path in sorted(sources.items()):
        if documentation := docstrings(ast.parse(path.read_bytes())):
            yield name, {"module": name, **documentation}


def docstrings(node: ast.Module | ast.ClassDef) -> dict[str, Any]:
    """The docstring of a module or class and those of its public members, without empty entries."""
    classes, functions = {}, {}
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            if isinstance(child, ast.ClassDef):
                classes[child.name] = docstrings(child)
            else:
                functions[child.name] = ast.get_docstring(child)
    members = "methods" if isinstance(node, ast.ClassDef) else "functions"
    entries = {"doc": ast.get_docstring(node), "classes": _drop_empty(classes), members: _drop_empty(functions)}
    return _drop_empty(entries)


def distributions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, metadata and description of each installed distribution."""
    found: dict[str, dict[str, Any]] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata.json
        # Of two with the same name, Python would import the first on the path.
        found.setdefault(re.sub(r"[-_.]+", "-", str(metadata["name"])).lower(), metadata)
    for name, metadata in sorted(found.items()):
        metadata["description"] = metadata.get("description", "")[:MAX_DESCRIPTION_CHARS]
        yield name, _drop_empty({field: metadata.get(field) for field in METADATA_FIELDS})


def _drop_empty(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if value}


if __name__ == "__main__":
    main()
