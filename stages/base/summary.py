"""What a stage prints at its end. The rest is in its JSON file."""

Row = tuple[int | str, str, str]
"""A number, what it counts, and a note."""


def table(*rows: Row) -> str:
    """Rows in the columns that all stages share, so that numbers stand below each other over the whole terminal."""
    cells = ((f"{number:,}" if isinstance(number, int) else number, what, note) for number, what, note in rows)
    return "\n".join(f"{number:>13}  {what:15}  {note}".rstrip() for number, what, note in cells)
