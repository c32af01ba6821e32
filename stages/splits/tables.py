"""Parquet and Arrow files have units, row groups and record batches, between which a large one is cut."""

from collections.abc import Iterable
from pathlib import Path

from stages.splits.suffixes import TABLES

PARQUET = ".parquet"

_ABOUT_DATASETS = ("dataset_info.json", "state.json")  # `save_to_disk` writes them beside its Arrow files


def is_table(path: str) -> bool:
    """Whether a file has units."""
    return path.lower().endswith(TABLES)


def count_units(path: Path) -> int:
    """The number of row groups or record batches.

    Raises:
        ValueError: it is damaged, or has dictionaries, which precede the record batches that need them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from stages.work import arrow

    try:
        if path.name.lower().endswith(PARQUET):
            with pq.ParquetFile(path) as file:
                return int(file.num_row_groups)
        return sum(1 for _ in arrow.find_batches(path))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(str(error)) from None


def find_metadata(paths: Iterable[str]) -> set[str]:
    """The files that are about the Arrow files beside them, or caches of these, in directories of `save_to_disk`."""
    names: dict[str, set[str]] = {}  # by directory
    for path in paths:
        directory, _, name = path.rpartition("/")
        if name in _ABOUT_DATASETS or name.endswith(".arrow"):
            names.setdefault(directory, set()).add(name)
    found: set[str] = set()
    for directory, of_directory in names.items():
        if of_directory.issuperset(_ABOUT_DATASETS) and len(of_directory) > len(_ABOUT_DATASETS):
            caches = [name for name in of_directory if name.startswith("cache-")]
            found |= {f"{directory}/{name}".lstrip("/") for name in (*_ABOUT_DATASETS, *caches)}
            found.add(f"{directory.rpartition('/')[0]}/dataset_dict.json".lstrip("/"))
    return found.intersection(paths)
