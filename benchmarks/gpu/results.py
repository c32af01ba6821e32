"""What was measured so far, in a file, so that a second run continues where the first one ended."""

import copy
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import PARTS

Row = dict[str, Any]
"""A result: numbers by the column of the table, or an `error`; and `by`, the stamp of what measured it."""
Stamp = dict[str, str]
"""Device, driver, versions of packages, digest of the code, and the commit where there is git."""

RESULT = "result "
"""What the line of a result begins with that another process prints."""


def print_result(name: str, result: Row) -> None:
    """Hand a result to the parent process."""
    print(RESULT + json.dumps({"name": name, **result}), flush=True)


class Results:
    """Results by part and name, in a file that is replaced after each of them."""

    def __init__(self, path: Path, about: dict[str, str], stamp: Stamp, fresh: Collection[str] = ()) -> None:
        """Read the file. What other code or another device has measured stays.

        Args:
            path: Of the file; there may be none.
            about: What all results have in common.
            stamp: What measures now.
            fresh: The parts whose results are thrown away.

        Raises:
            SystemExit: the file has results of something else.
        """
        self._path, self.about, self.stamp = path, about, stamp
        self.parts: dict[str, dict[str, Row]] = {}
        if path.exists():
            stored = json.loads(path.read_text())
            self.parts = {part: rows for part, rows in stored["parts"].items() if part not in fresh}
            if self.parts and stored["about"] != about:
                raise SystemExit(
                    f"error: the results in {path} are of {stored['about']}, not of {about}: use another --results, or "
                    "throw them away with --fresh"
                )

    def missing(self, part: str, names: Iterable[str]) -> list[str]:
        """Those of `names` that were never measured."""
        return [name for name in names if name not in self.parts.get(part, {})]

    def failed(self, part: str, names: Iterable[str], of_other_code: bool = False) -> list[str]:
        """Those of `names` whose result is an error; maybe only those of other code, which may be mended."""
        rows = self.parts.get(part, {})
        return [
            name
            for name in names
            if "error" in rows.get(name, {})
            and not (of_other_code and rows[name]["by"].get("code") == self.stamp.get("code"))
        ]

    def add(self, part: str, name: str, result: Row) -> None:
        """Keep a result."""
        self.parts.setdefault(part, {})[name] = {**result, "by": self.stamp}
        replace(self._path, json.dumps({"about": self.about, "parts": self.parts}, indent=1))

    def rows(self, part: str) -> dict[str, Row]:
        """The results of a part that are no errors."""
        return {name: dict(row) for name, row in self.parts.get(part, {}).items() if "error" not in row}

    def errors(self) -> list[tuple[str, str, Row]]:
        """Everything that failed, of the parts that there are: part, name and row."""
        found = ((part, name, row) for part in PARTS for name, row in self.parts.get(part, {}).items())
        return [each for each in found if "error" in each[2]]

    def stamps(self) -> list[Stamp]:
        """That of now, and then those of other code, devices or packages."""
        rows = [row for rows in self.parts.values() for row in rows.values()]
        return [dict(stamp) for stamp in dict.fromkeys(tuple(row["by"].items()) for row in [{"by": self.stamp}, *rows])]

    def of(self, stamp: Stamp) -> "Results":
        """Those with this stamp alone, and what was predicted, wherever that was."""
        view = copy.copy(self)
        view.parts = {
            part: {name: row for name, row in rows.items() if row["by"] == stamp or part == "predicted"}
            for part, rows in self.parts.items()
        }
        return view


def replace(path: Path, text: str) -> None:
    """Write a file that is at no moment half written."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
