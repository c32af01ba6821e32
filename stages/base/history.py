"""The course of a training: tables to which it adds rows, and which its checkpoints contain.

history.tsv    a row every `history_freq` steps and at every validation. It has no clock times: the file is as
               reproducible as the weights
speed.tsv      a row every `log_freq` steps and at every save: time and memory
"""

import csv
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stages.base.errors import StageError
from stages.base.identity import Adoption
from stages.base.names import printable

HISTORY = "history.tsv"
"""Its name, in a checkpoint and in outputs/."""

SPEED = "speed.tsv"
"""Its name, in a checkpoint and in outputs/."""

COLUMNS = ("step", "epoch", "tokens", "loss", "lr", "grad_norm", "validation_loss")
"""Of history.tsv; with sources, `of_source` follows for each."""

Row = dict[str, float | None]
"""A row by column; None where a cell is empty."""


class Table:
    """The rows of a running training, which include those of the run that it resumes."""

    def __init__(self, columns: Sequence[str], text: str = "") -> None:
        """Start with the content of a file, which gets those of these columns that it lacks, or with no rows."""
        header, *rows = text.splitlines() or [""]
        self._columns = [*dict.fromkeys([*filter(None, header.split("\t")), *columns])]
        self._lines = ["\t".join(self._columns), *rows]

    def add(self, **values: float | None) -> None:
        """Add a row; columns that are not given, or None, are empty."""
        # repr: the shortest digits that are read back as the same float.
        cells = (values.get(name) for name in self._columns)
        self._lines.append("\t".join("" if value is None else repr(value) for value in cells))

    def last(self, name: str) -> float | None:
        """The value of a column in the last row; None where it is empty, or there is no row."""
        cells = dict(zip(self._columns, self._lines[-1].split("\t"), strict=False))
        return float(cells[name]) if len(self._lines) > 1 and cells.get(name) else None

    def text(self) -> str:
        """Content of the file."""
        return "\n".join(self._lines) + "\n"


class History(Table):
    """history.tsv."""

    def __init__(self, text: str = "", sources: Iterable[str] = ()) -> None:
        """Start with the content of a history.tsv, or with no rows; a column for each source follows the others."""
        super().__init__([*COLUMNS, *map(of_source, sources)], text)

    def without(self, name: str) -> "History":
        """The same rows, with empty columns `name` and `name ...`."""
        rows = [
            "\t".join(
                "" if f"{column} ".startswith(f"{name} ") else cell
                for column, cell in zip(self._columns, cells, strict=False)
            )
            for cells in (line.split("\t") for line in self._lines[1:])
        ]
        return History("\n".join([self._lines[0], *rows]))

    def best_step(self, adopted: Adoption | None) -> int | None:
        """The best step of the run itself: neither step 0, nor one until `adopted`, where another run ended."""
        first = adopted.step if adopted else 0  # its losses may be on the same rows, and are in the history then
        rows, index = [line.split("\t") for line in self._lines[1:]], COLUMNS.index("validation_loss")
        losses = {int(row[0]): float(row[index]) for row in rows if row[index]}
        return lowest({step: loss for step, loss in losses.items() if step > first})


def of_source(source: str) -> str:
    """The column of the validation loss of a source, whose name may have tabs and line ends."""
    return f"validation_loss {printable(source)}"


def lowest(losses: Mapping[int, float]) -> int | None:
    """The step with the lowest validation loss, the newest of several; None where no loss is finite."""
    steps = (step for step, loss in losses.items() if math.isfinite(loss))
    return min(steps, key=lambda step: (losses[step], -step), default=None)


def read(path: Path) -> list[Row]:
    """All rows, in the order of their steps.

    Raises:
        StageError: the file is missing or damaged.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t")
            rows = list(reader)
        if "step" not in (reader.fieldnames or ()):
            raise ValueError
        return [{name: float(cell) if cell else None for name, cell in row.items()} for row in rows]
    except FileNotFoundError:
        raise StageError(f"{path} is missing: run `dvc repro train`") from None
    except (ValueError, TypeError, csv.Error):
        raise StageError(f"{path} is not valid: run `dvc repro -f -s train`") from None


def series(rows: list[Row], name: str) -> tuple[list[float], list[float]]:
    """The steps at which a column has a value, and the values."""
    points = [(row["step"] or 0.0, value) for row in rows if (value := row.get(name)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def digest(path: Path, last_step: int) -> str:
    """The SHA-256 of a file that `read` reads, up to a step: that of the checkpoint of the step.

    Raises:
        StageError: the file is missing or damaged.
    """
    num_rows = sum((row["step"] or 0) <= last_step for row in read(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    return hashlib.sha256("\n".join(lines[: num_rows + 1]).encode()).hexdigest()
