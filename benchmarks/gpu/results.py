"""What was measured so far, in a file, so that a second run continues where the first one ended."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A result: numbers by the column of the table, or an `error`."""


class Results:
    """Results by part and name, in a file that is replaced after each of them."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Read the file. What was measured with other code, arguments or devices does not count."""
        self._path, self.about = path, about
        self.parts: dict[str, dict[str, Row]] = {}
        if path.exists():
            stored = json.loads(path.read_text())
            if changed := [name for name in about if stored["about"].get(name) != about[name]]:
                print(f"starting over, because these have changed: {', '.join(changed)}")
            else:
                for part, rows in stored["parts"].items():  # what failed is measured again
                    self.parts[part] = {name: row for name, row in rows.items() if "error" not in row}

    def missing(self, part: str, names: Iterable[str]) -> list[str]:
        """Those of `names` without a result."""
        return [name for name in names if name not in self.parts.get(part, {})]

    def add(self, part: str, name: str, result: Row) -> None:
        """Keep a result."""
        self.parts.setdefault(part, {})[name] = result
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"about": self.about, "parts": self.parts}, indent=1))
        temporary.replace(self._path)

    def rows(self, part: str) -> dict[str, Row]:
        """The results of a part that are no errors."""
        return {name: dict(row) for name, row in self.parts.get(part, {}).items() if "error" not in row}

    def errors(self) -> list[str]:
        """Everything that failed."""
        return [
            f"{part}: {name}: {row['error']}"
            for part, rows in self.parts.items()
            for name, row in rows.items()
            if "error" in row
        ]
