"""Parquet and Arrow files have units, row groups and record batches, between which a large one is cut.

The file format of Arrow is a stream of the same messages between two marks, so both formats are read as streams.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from stages.splits.suffixes import TABLES

ARROW_FILE = b"ARROW1\0\0"
"""What an Arrow file begins with, before the stream."""
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

    try:
        if path.name.lower().endswith(PARQUET):
            with pq.ParquetFile(path) as file:
                return int(file.num_row_groups)
        return sum(1 for _ in find_batches(path))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(str(error)) from None


def find_batches(path: Path) -> Iterator[int]:
    """Where the record batches of an Arrow file begin, in bytes; pyarrow raises what is wrong with it.

    Raises:
        ValueError: it has dictionaries.
    """
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:  # a body is skipped, not read
        if file.read(len(ARROW_FILE)) != ARROW_FILE:
            file.seek(0)
        pa.ipc.read_message(file)  # the schema
        while True:
            offset = file.tell()
            try:
                message = pa.ipc.read_message(file)
            except EOFError:  # the end of the stream
                return
            if message.type != "record batch":
                raise ValueError(f"it has a {message.type}")
            yield offset


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
