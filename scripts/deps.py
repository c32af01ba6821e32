"""Write into dvc.yaml which modules each stage can reach. DVC does not follow imports, so the lists have to name them.

    python -m scripts.deps

Reached are all modules that a stage imports, directly or through others, wherever in a file (stages/artifacts/code.py).
Everything else in dvc.yaml stays as it is, comments included. tests/test_pipeline.py fails where a list has a
module too many or too few.
"""

import argparse
import re
from pathlib import Path

import yaml

from stages.artifacts import code

PIPELINE = Path(__file__).parents[1] / "dvc.yaml"


def main() -> None:
    """Write the lists and print which stages have changed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    old = PIPELINE.read_text(encoding="utf-8")
    new = with_deps(old)
    PIPELINE.write_text(new, encoding="utf-8")
    before, after = (yaml.safe_load(text)["stages"] for text in (old, new))
    changed = [stage for stage in after if before[stage]["deps"] != after[stage]["deps"]]
    print(f"dvc.yaml: {'new deps of ' + ', '.join(changed) if changed else 'all deps are up to date'}")


def entries(stage: str, cmd: str) -> set[str]:
    """The modules that a stage runs: the one of its name, and the one that its command starts."""
    [started] = re.findall(r"python -m (\S+)", cmd)
    return {f"stages.{stage}", started}


def modules(stage: str, cmd: str) -> list[str]:
    """The files of all modules that a stage can reach, and their templates, relative to the project, sorted."""
    root = PIPELINE.parent
    reached = code.reached(*entries(stage, cmd))
    if missing := entries(stage, cmd) - reached.keys():
        raise SystemExit(f"dvc.yaml: stage {stage}: there is no module {', '.join(sorted(missing))}")
    files = [*reached.values(), *(file.with_suffix(".html") for file in reached.values())]
    return sorted(str(file.relative_to(root)) for file in files if file.exists())


def with_deps(text: str) -> str:
    """The text of dvc.yaml with the lists as they must be."""
    stages = yaml.safe_load(text)["stages"]
    lines: list[str] = []
    stage, is_in_deps = "", False
    for line in [*text.splitlines(), ""]:  # the empty line ends a list at the end of the file
        if match := re.fullmatch(r"  (\w+):", line):
            stage = match[1]
        if is_in_deps and not line.startswith("      - "):
            lines += (f"      - {file}" for file in modules(stage, stages[stage]["cmd"]))
            is_in_deps = False
        if line == "    deps:":
            is_in_deps = True
        if not (is_in_deps and line.startswith("      - stages/")):
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
