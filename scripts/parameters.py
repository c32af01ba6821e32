"""Write docs/parameters.md: each parameter with its default, unit, effect, and the stages that run again.

Groups, order and defaults come from params.yaml, the stages from dvc.yaml. The rest comes from the dataclasses: the
effect is the first sentence of the docstring of a field, and the unit what follows the last `, in ` or `, as ` of it.

Example  python -m scripts.parameters
"""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from stages.base import publish
from stages.base.params_file import PARAMS_FILE, PIPELINE_FILE, flatten
from stages.building.params import FsdpParams
from stages.consolidate import ConsolidateParams
from stages.deduplicate import DeduplicateParams
from stages.download import DownloadParams
from stages.evaluate import EvaluateParams
from stages.extract import ExtractParams, ExtractRuntime
from stages.launching.runtime import TrainRuntime
from stages.organize import OrganizeParams
from stages.pack import PackParams
from stages.plan import Cluster
from stages.score import ScoreParams
from stages.training.params import TrainParams

PAGE = Path("docs/parameters.md")
CLASSES: dict[str, list[type[Any]]] = {
    "": [
        *(OrganizeParams, ExtractParams, DeduplicateParams, DownloadParams, PackParams, TrainParams),
        *(ConsolidateParams, EvaluateParams, ScoreParams),
    ],
    "fsdp.": [FsdpParams],
    "plan.": [Cluster],
    "runtime.": [ExtractRuntime, TrainRuntime],
}
"""Where the fields of each section are."""
UNIT = re.compile(r"(.*), (?:in|as) (.*)")
"""At the end of a sentence."""
HEAD = """# Parameters

Edit `params.yaml`, and run `dvc repro`. `dvc exp run -S batch_size=4` edits it, too.
[training.md](training.md) explains the larger choices.

A changed parameter runs the stages in the last column again, then those after them
[whose inputs have changed](reruns.md). Those of `runtime` change no result, and run nothing.

<!-- `make parameters` writes this page. -->
"""


def main() -> None:
    """Write the page."""
    publish.write_text(PAGE, page())


def page() -> str:
    """The content of docs/parameters.md."""
    text, pipeline = PARAMS_FILE.read_text(), yaml.safe_load(PIPELINE_FILE.read_text())["stages"]
    defaults = dict(flatten(yaml.safe_load(text)))
    readers = {
        name: [stage for stage, entry in pipeline.items() if name in set(_names(entry["params"]))] for name in defaults
    }
    effects = {
        f"{prefix}{name}": found
        for prefix, classes in CLASSES.items()
        for cls in reversed(classes)
        for name, found in fields(cls)
    }
    parts = [HEAD]
    # The title of each group, and its lines.
    groups = re.split(r"^# ==== (.*) ====$", text, flags=re.MULTILINE)
    for title, lines in zip(groups[1::2], groups[2::2], strict=True):
        names = [*flatten(yaml.safe_load(lines))]
        rows = [(f"`{name}`", _code(value), *effects[name], ", ".join(readers[name])) for name, value in names]
        head = [("key", "default", "unit, values", "effect", "runs again"), ("---",) * 5]
        parts.append("\n".join([f"## {title}\n", *(f"|{'|'.join(row)}|" for row in [*head, *rows]), ""]))
    return "\n".join(parts)


def _names(params: list[Any]) -> Iterator[str]:
    for entry in params:
        yield from [entry] if isinstance(entry, str) else itertools.chain.from_iterable(entry.values())


def _code(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else f"`{yaml.safe_dump(value).splitlines()[0]}`"


def fields(cls: type[Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """The fields of a dataclass and of its bases: each with its values or unit, and its effect."""
    hints = get_type_hints(cls)
    for base in cls.__mro__[-2::-1]:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, doc in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                name = ast.unparse(field.target)
                if name in hints:
                    yield name, describe(" ".join(ast.literal_eval(doc.value).split()), [*_values(hints[name])])


def describe(docstring: str, values: list[str]) -> tuple[str, str]:
    """The values or the unit of a field, and its effect: the first sentence, and those that explain a value."""
    first, *others = re.split(r"(?<=\.) ", docstring)
    effect, _, unit = UNIT.sub(r"\1\n\2", first).removesuffix(".").partition("\n")
    explained = [other for other in others if other.partition(":")[0] in ("null", *values)]
    return unit or ", ".join(values), " ".join([f"{effect}.", *explained])


def _values(hint: Any) -> Iterator[str]:
    """The values that a type allows, as people write them; none: too many."""
    if hint is bool:
        yield from ("true", "false")
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_origin(hint) is not list:
        yield from itertools.chain.from_iterable(map(_values, get_args(hint)))


if __name__ == "__main__":
    main()
