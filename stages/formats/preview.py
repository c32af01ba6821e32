"""What becomes of a raw file: its first rows, and the rule that it may need."""

import json
import os
import shlex
import tempfile
from itertools import islice
from pathlib import Path

from stages.base.errors import StageError
from stages.base.names import printable
from stages.base.summary import counted
from stages.formats import rules
from stages.formats.layouts import find_layouts
from stages.formats.limits import LIMITS
from stages.formats.shard import ReadParams, count_rules, join_parts, read_files
from stages.splits import manifests as splits
from stages.splits import suffixes, tree

NUM_PREVIEWED, LONGEST_PREVIEWED = 5, 1000
"""Rows that a preview shows, and characters of each."""


def preview(file: Path, params: ReadParams) -> str:
    """What becomes of a raw file, as text: its first rows, and what has none. It may be given below `raw_dir`.

    Raises:
        StageError: it is not below `raw_dir`, is not read by its name, or changes.
    """
    from stages.work import arrow

    path = os.path.relpath(file if file.exists() else Path(params.raw_dir, file), params.raw_dir)
    if not Path(params.raw_dir, path).exists():
        raise StageError(f"there is no {file}, here or below {params.raw_dir}")
    if path.startswith("..") or not Path(params.raw_dir, path).is_file():
        raise StageError(f"{file} is not a file below {params.raw_dir}: name one, such as {params.raw_dir}/a.jsonl")
    if not (suffix := suffixes.find(path)):
        compressed = " or ".join(suffixes.COMPRESSIONS)
        raise StageError(
            f"{file} is not read: its name ends in none of {', '.join(suffixes.FORMATS)} "
            f"(and {compressed}, but not after {', '.join(suffixes.TABLES)}): convert it, or add the suffix that "
            "its content has, as .txt for code"
        )
    found = rules.find(params.records, path)
    unit = "the file" if suffix[0] in ("text", "csv", "tsv") else "each string"
    with tempfile.TemporaryDirectory() as directory:
        shard = Path(directory, "rows")
        raw = splits.RawFile(path, *tree.measure(Path(params.raw_dir, path)))
        result = read_files([raw], shard, params, LIMITS)
        if result.changed:
            raise StageError(f"{file} changes while it is read: try again when it is complete")
        rows = (
            (column, text) for texts, column in arrow.read_rows(shard) for text in texts[:NUM_PREVIEWED].to_pylist()
        )
        shown = [_show(number, *row) for number, row in enumerate(islice(rows, NUM_PREVIEWED), 1)]
    return "\n".join(
        [
            f"{printable(path)}: " + (f"records.{found[0]}" if found else f"no rule: {unit} is a document"),
            *_skipped(printable(path)),
            *[f"it is not UTF-8: read as {params.fallback_encoding} (fallback_encoding)"] * bool(result.fallback),
            *shown,
            counted(result.counts.strings, "row")
            + ", as it has no text" * bool(result.silent)
            + f", of {params.min_chars} characters or more" * (params.min_chars > 1),
            *map(str, join_parts(result.rejected, NUM_PREVIEWED)),
            *(count_rules(params.records, [result])[found[0]].describe() if found else ()),
            *filter(None, [find_layouts(params, [path], LIMITS)]),
        ]
    )


def _skipped(path: str) -> list[str]:
    """A line that says why `organize` has skipped a raw file; none where it has not, or has not run."""
    try:
        summary = splits.read_summary(splits.SPLITS)
    except StageError:
        return []
    reasons = {item.path: item.reason for item in summary.passed_over}
    names = [path, *(f"{above}/" for above in Path(path).parents)]
    return [f"organize skips it: {reasons[name]}" for name in names if name in reasons]


def _show(number: int, column: int, text: str) -> str:
    if column == rules.MESSAGES:
        return f"--- {number}: a conversation\n{json.dumps(json.loads(text), indent=2, ensure_ascii=False)}"
    more = f"... ({len(text)} characters)" * (len(text) > LONGEST_PREVIEWED)
    return f"--- {number}: a document\n{text[:LONGEST_PREVIEWED]}{more}"


def command_for(path: str, params: ReadParams) -> str:
    """The command that shows what becomes of a raw file."""
    return f"python -m stages.extract --preview {shlex.quote(f'{params.raw_dir}/{path}')}"
