"""Results as Markdown tables."""

from collections.abc import Mapping

Rows = Mapping[str, Mapping[str, float | None]]
"""What was measured, by the name of the row and the title of the column; None or missing: the cell stays empty."""


def markdown(title: str, rows: Rows, formats: Mapping[str, str]) -> str:
    """A table of numbers.

    Args:
        title: Of the first column, which has the names of the rows.
        rows: The numbers.
        formats: The other columns, and how `str.format` writes their numbers. Columns without a number are left out.
    """
    columns = [name for name in formats if any(row.get(name) is not None for row in rows.values())]
    lines = [[title, *columns], ["---"] * (1 + len(columns))]
    for name, row in rows.items():
        cells = ["" if (value := row.get(column)) is None else formats[column].format(value) for column in columns]
        lines.append([name, *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
