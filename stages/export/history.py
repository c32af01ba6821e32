"""What a training left behind of its course: history.tsv."""

import csv
from pathlib import Path

Row = dict[str, float | None]
"""A row of history.tsv by column; None where it is empty."""


def read(path: Path) -> list[Row]:
    """All rows, in order of their step."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {name: float(cell) if cell else None for name, cell in row.items()}
            for row in csv.DictReader(file, delimiter="\t")
        ]


def values(rows: list[Row], name: str) -> tuple[list[float], list[float]]:
    """The steps at which a column has a value, and the values."""
    points = [(row["step"] or 0.0, value) for row in rows if (value := row.get(name)) is not None]
    return [step for step, _ in points], [value for _, value in points]
