"""Draw dvc.yaml as docs/pipeline.svg: a row for each stage, with what it writes and an arrow from each stage it reads.

    python -m scripts.diagram

tests/test_pipeline.py fails where the picture is not that of dvc.yaml.
"""

import argparse
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import yaml

PIPELINE = Path(__file__).parents[1] / "dvc.yaml"
PICTURE = PIPELINE.parent / "docs/pipeline.svg"

# Pixels. Each box is below and to the right of the one before it, so a line that leaves a box downwards and turns right
# reaches every later one without passing through a box.
LEFT, TOP, RIGHT_STEP, DOWN_STEP = 90, 16, 46, 46
BOX_WIDTH, BOX_HEIGHT = 112, 30
CORNER = 9
CHARACTER = 6.4  # the mean width of one in a list of files

# The background is drawn too: a browser may apply a color scheme that is not the one of the page around the picture.
STYLE = """
  svg { --back: #ffffff; --text: #1d2730; --grey: #5b6770; --data: #dcebf7; --outputs: #fbe9d0 }
  @media (prefers-color-scheme: dark) {
    svg { --back: #0d1117; --text: #e6edf3; --grey: #9aa5b1; --data: #173a58; --outputs: #59401a }
  }
  text { font: 15px Helvetica, Arial, sans-serif; fill: var(--text) }
  .file { font-size: 13px; fill: var(--grey) }
  .line { fill: none; stroke: var(--grey); stroke-width: 1.5 }
  .tip { fill: var(--grey) }
  .back { fill: var(--back) }
  .data { fill: var(--data); stroke: var(--grey) }
  .outputs { fill: var(--outputs); stroke: var(--grey) }
"""


def main() -> None:
    """Write the picture."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    stages = yaml.safe_load(PIPELINE.read_text(encoding="utf-8"))["stages"]
    PICTURE.write_text(draw(stages), encoding="utf-8")


def outs(stage: dict[str, Any]) -> list[str]:
    """What a stage writes."""
    return [*stage["outs"], *stage.get("metrics", [])]


def arrows(stages: dict[str, Any]) -> list[tuple[str, str]]:
    """All pairs of a stage and one that reads an out of it, or a file in it."""
    return [
        (source, target)
        for target in stages
        for source in stages
        if any(_is_in(dep, outs(stages[source])) for dep in stages[target]["deps"])
    ]


def _is_in(dep: str, outs: list[str]) -> bool:
    return any(dep == out or dep.startswith(f"{out}/") for out in outs)


def inputs(stages: dict[str, Any]) -> list[tuple[str, str]]:
    """All pairs of a path that no stage writes and a stage that reads it; the code is left out."""
    written = [out for stage in stages.values() for out in outs(stage)]
    return [
        (dep, name)
        for name, stage in stages.items()
        for dep in stage["deps"]
        if not _is_in(dep, written) and not dep.startswith("stages/")
    ]


def draw(stages: dict[str, Any]) -> str:
    """The picture as SVG."""
    ends = [_text_left(row) + CHARACTER * len(_files(stage)) for row, stage in enumerate(stages.values())]
    width = round(max(ends)) + TOP
    height = 2 * TOP + DOWN_STEP * (len(stages) - 1) + BOX_HEIGHT
    title = ", ".join(f"{source} to {target}" for source, target in [*inputs(stages), *arrows(stages)])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
            f"<title>{_text(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{width}" height="{height}" rx="6"/>',
            *_elements(stages),
            "</svg>\n",
        ]
    )


def _elements(stages: dict[str, Any]) -> Iterator[str]:
    places = {name: (LEFT + RIGHT_STEP * row, TOP + DOWN_STEP * row) for row, name in enumerate(stages)}
    for path, name in inputs(stages):
        x, y = places[name][0], places[name][1] + BOX_HEIGHT // 2
        yield f'<text class="file" x="14" y="{y + 5}">{_text(path)}</text>'
        yield f'<path class="line" d="M{22 + 7 * len(_plain(path))},{y} H{x}"/>'
    for source, target in arrows(stages):
        down, end = places[source][0] + BOX_WIDTH // 8, places[target][0]
        start, y = places[source][1] + BOX_HEIGHT, places[target][1] + BOX_HEIGHT // 2
        corner = f"V{y - CORNER} Q{down},{y} {down + CORNER},{y}"
        yield f'<path class="line" d="M{down},{start} {corner} H{end}"/>'
    for row, (name, (x, y)) in enumerate(places.items()):
        middle = y + BOX_HEIGHT // 2
        yield f'<path class="tip" d="M{x},{middle} l-9,-4.5 v9 Z"/>'
        kind = outs(stages[name])[0].split("/")[0]
        yield f'<rect class="{kind}" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        yield f'<text x="{x + BOX_WIDTH // 2}" y="{middle + 5}" text-anchor="middle">{name}</text>'
        yield f'<text class="file" x="{_text_left(row)}" y="{middle + 5}">{escape(_files(stages[name]))}</text>'


def _text_left(row: int) -> int:
    return LEFT + RIGHT_STEP * row + BOX_WIDTH + 12


def _files(stage: dict[str, Any]) -> str:
    return " \N{MIDDLE DOT} ".join(map(_plain, outs(stage)))


def _plain(path: str) -> str:
    # A path that is a parameter is known by its name, one with a parameter in it by a placeholder.
    return path[2:-1] if path.startswith("${") and path.endswith("}") else path.replace("${", "<").replace("}", ">")


def _text(text: str) -> str:
    return escape(_plain(text))


if __name__ == "__main__":
    main()
