"""How the data of a model was made, for its lineage: each data stage records its parameters and packages.

The records are data/splits/summary.json, data/extract.json, data/deduplicate.json and data/pack.json. `consolidate`
copies what is here into lineage.json, so it needs neither these stages nor their parameters, which may have been edited
since. Each record names what its stage read, so those of other data, which a stage has written since, are left out.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stages.base import code, publish
from stages.base.errors import StageError
from stages.base.files import JsonFile

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DATA_METRICS = {
    "organize": Path("data/splits/summary.json"),
    "extract": Path("data/extract.json"),
    "deduplicate": Path("data/deduplicate.json"),
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
        values = {field.name: _as_written(getattr(params, field.name)) for field in dataclasses.fields(params)}
        return cls({name: value for name, value in values.items() if name not in _PLACES}, code.packages(entry))


def _as_written(value: Any) -> Any:
    """A value of params.yaml, such as the rules of `records`, without what is not written there."""
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    if dataclasses.is_dataclass(value):
        values = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: _as_written(found) for field, found in values if found != field.default}
    return value


@dataclass(frozen=True)
class DataMetrics(JsonFile):
    """What the records of all data stages share; each has keys of its own too."""

    STAGE: ClassVar[str] = "organize"

    origin: Origin
    source: str = ""
    """Of what the stage read. In data/extract.json: SHA-256 of summary.json; in the others the `fingerprint` of the
    record before."""
    fingerprint: str = ""
    """Of what it wrote: the corpus, also with what is skipped of it, the tokens. summary.json has none: its own SHA-256
    covers the manifests."""


def find_data_metrics(tokens: str) -> dict[str, DataMetrics]:
    """The records of how some tokens were made, by stage.

    Args:
        tokens: Their fingerprint, as in data/pack.json.

    Returns:
        Back to the first stage whose record is missing, of an older version, or of other data.
    """
    found: dict[str, DataMetrics] = {}
    written = tokens
    for stage, path in reversed(DATA_METRICS.items()):
        try:
            record = DataMetrics.read(path)
        except StageError:
            break
        if written != (record.fingerprint or publish.sha256_file(path)):
            break
        found = {stage: record, **found}
        written = record.source
    return found
