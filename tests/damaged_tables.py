"""Tables with bytes that are not theirs, and what the readers make of them.

python -m tests.damaged_tables 1000    # files of each format; prints how many were read and rejected
"""

import io
import json
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.base.publish import sha256_file
from stages.formats import tables
from stages.formats.source import Rejected
from stages.formats.tables import Table


def write(name: str, choice: random.Random) -> bytearray:
    """A table of many types, in row groups of 100 rows."""
    table = pa.table(
        {
            "text": [f"text {number}" for number in range(500)],
            "category": pa.array(["a", "b"] * 250).dictionary_encode(),
            "list": [["x", None, "y"]] * 500,
            "struct": [{"a": "q", "b": number} for number in range(500)],
            "map": pa.array([[("k", "v")]] * 500, pa.map_(pa.string(), pa.string())),
            "large": pa.array(["z"] * 500, pa.large_string()),
        }
    )
    sink = io.BytesIO()
    if name.endswith(".parquet"):
        compression, version = choice.choice(["snappy", "zstd", "none"]), choice.choice(["1.0", "2.0"])
        pq.write_table(table, sink, row_group_size=100, compression=compression, data_page_version=version)
    else:
        options = pa.ipc.IpcWriteOptions(compression=choice.choice([None, "lz4", "zstd"]))
        with choice.choice([pa.ipc.new_file, pa.ipc.new_stream])(sink, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=100)
    return bytearray(sink.getvalue())


def damage(content: bytearray, choice: random.Random) -> bytearray:
    """Some bytes are changed, half of the time in the footer, or the end is missing."""
    first = choice.choice([0, max(0, len(content) - 3000)])
    for _ in range(choice.choice([1, 2, 8])):
        content[choice.randrange(first, len(content))] = choice.choice([0, 255, 127, 128, choice.randrange(256)])
    return content[: choice.randrange(len(content))] if choice.random() < 0.1 else content


def main() -> None:
    """Read as many tables of each format as the argument says."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # this machine must survive
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for name in ("a.parquet", "a.arrow"):
            for number in range(int(sys.argv[1])):
                choice = random.Random(f"{name} {number}")
                Path(name).write_bytes(damage(write(name, choice), choice))
                try:
                    with Table(name, sha256_file(Path(name))) as table:
                        for rows in table.rows(lambda schema: schema.names):
                            assert isinstance(rows, (tables.Rows, Rejected))
                    outcomes["read"] += 1
                except Rejected:
                    outcomes["rejected"] += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
