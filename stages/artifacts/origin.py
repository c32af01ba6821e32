"""How the data of a model was made, for its lineage: each data stage records its parameters and packages.

The records are data/splits/summary.json, data/extract.json and data/pack.json. `consolidate` copies what is here into
lineage.json, so it needs neither these stages nor their parameters, which may have been edited since.
"""

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stages.artifacts import code
from stages.artifacts.errors import StageError
from stages.artifacts.record import Record

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RECORDS = {
    "organize": Path("data/splits/summary.json"),
    "extract": Path("data/extract.json"),
    "pack": Path("data/pack.json"),
}
"""What each data stage writes about itself."""

_PLACES = {"raw_dir"}
"""Parameters that only state where something is on this machine."""


@dataclass(frozen=True)
class Origin:
    """What decided the result of a stage, in addition to its inputs and its code."""

    params: dict[str, Any]
    packages: dict[str, str]
    """Versions of Python and of the packages that the stage imports."""

    @classmethod
    def of(cls, entry: str, params: "DataclassInstance") -> "Origin":
        """The origin of what the module `entry` computes here and now."""
        values = {name: value for name, value in dataclasses.asdict(params).items() if name not in _PLACES}
        return cls(values, code.packages(entry))


@dataclass(frozen=True)
class DataRecord(Record):
    """What the records of all data stages share; each has keys of its own too."""

    STAGE: ClassVar[str] = "organize"

    origin: Origin
    fingerprint: str = ""
    """Of the corpus, in data/extract.json."""


def find_records() -> dict[str, DataRecord]:
    """The records of this project by stage; without those that are missing or of an older version."""
    found = {}
    for stage, path in RECORDS.items():
        with suppress(StageError):
            found[stage] = DataRecord.read(path)
    return found
