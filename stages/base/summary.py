"""What a stage prints at its end. The rest is in its JSON file."""

Row = tuple[int | str, str, str]
"""A number, what it counts, and a note."""


def counted(number: int, noun: str) -> str:
    """A number of things, such as `1 file` and `2,000 files`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def table(*rows: Row) -> str:
    """Rows in the columns that all stages share, so that numbers stand below each other over the whole terminal."""
    cells = (
        (f"{number:,}" if isinstance(number, int) else number, what.removesuffix("s") if number == 1 else what, note)
        for number, what, note in rows
    )
    return "\n".join(f"{number:>13}  {what:15}  {note}".rstrip() for number, what, note in cells)
