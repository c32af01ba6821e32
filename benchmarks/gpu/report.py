"""The tables of the results: goals first, then each part."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from benchmarks.gpu.results import Results, Row
from benchmarks.gpu.settings import large_settings
from benchmarks.tables import markdown
from benchmarks.train import comparisons
from benchmarks.train.comparisons import BARE, OURS, TRAINER

FORMATS = {
    "TFLOP/s": "{:.0f}",
    "GB/s": "{:.1f}",
    "passed": "{:.0f}",
    "skipped": "{:.0f}",
    "same bits": "{:.0f}",
    "ms": "{:.1f}",
    **comparisons.FORMATS,
    "MFU, unmasked attention only": "{:.1%}",
    "MFU, causal": "{:.1%}",
    "MFU, embeddings too": "{:.1%}",
    "peak GiB": "{:.2f}",
    "predicted GiB": "{:.2f}",
    "predicted / measured": "{:.3f}",
    "tokens attended to": "{:.0f}",
    "first step, s": "{:.1f}",
    "losses differ by": "{:.1e}",
}
"""The columns of all parts, and how their numbers are written."""


class _Goal(NamedTuple):
    text: str
    measure: Callable[[Results], list[float]]
    """All values that must reach it. A KeyError, IndexError or TypeError where something is not measured or unknown."""
    shape: str
    is_reached: Callable[[float], bool] | None
    """None: no limit is set."""


def _steps(results: Results, *words: str) -> Row:
    """The best setting, or that with some words more."""
    return results.rows("steps")[", ".join([results.about["best"], *words])]


def _large(results: Results, *words: str) -> Row:
    """That with the largest batch, or with some words more."""
    return results.rows("large")[", ".join([next(iter(large_settings("bf16"))), *words])]


def _of(results: Results, program: str) -> list[float]:
    rows = results.rows("programs")
    return [rows[OURS]["tokens/s"] / rows[program]["tokens/s"]]


def _ratios(results: Results) -> list[float]:
    """Predicted by measured memory of all settings that have both; at least eight."""
    values = [row["predicted / measured"] for row in step_rows(results).values() if "predicted / measured" in row]
    return [values[index] for index in range(max(8, len(values)))]


_GOALS = (
    _Goal("MFU with documents, as in PaLM: at least 55 %", lambda r: [_steps(r)["MFU"]], "{:.1%}", lambda x: x >= 0.55),
    _Goal(
        "the same, counting unmasked attention only", lambda r: [_steps(r)["MFU, unmasked attention only"]],
        "{:.1%}", None,
    ),
    _Goal(
        "tokens/s with documents, of those without: at least 97 %",
        lambda r: [_steps(r)["tokens/s"] / _steps(r, "no documents")["tokens/s"]], "{:.1%}", lambda x: x >= 0.97,
    ),
    _Goal(
        "tokens/s with `deterministic`, of those without", lambda r: [_steps(r, "deterministic")["tokens/s"] /
        _steps(r)["tokens/s"]], "{:.1%}", None,
    ),
    _Goal("tokens/s, large", lambda r: [_large(r)["tokens/s"]], "{:,.0f}", None),
    _Goal(
        "tokens/s with `deterministic`, of those without, large",
        lambda r: [_large(r, "deterministic")["tokens/s"] / _large(r)["tokens/s"]], "{:.1%}", None,
    ),
    _Goal("tokens/s, of the bare loop: over 100 %", lambda r: _of(r, BARE), "{:.1%}", lambda x: x > 1),
    _Goal("tokens/s, of the Trainer: over 100 %", lambda r: _of(r, TRAINER), "{:.1%}", lambda x: x > 1),
    _Goal("memory, predicted / measured: 0.9 to 1.1", _ratios, "{:.3f}", lambda x: 0.9 <= x <= 1.1),
    _Goal(
        "time lost to an asynchronous save, of a synchronous one: at most 5 %",
        lambda r: [r.rows("checkpoints")["asynchronous"]["of the synchronous one"]], "{:.1%}", lambda x: x <= 0.05,
    ),
    _Goal(
        "same bits after a kill, deterministic", lambda r: [r.rows("resume")["deterministic"]["same bits"]], "{:.0f}",
        bool,
    ),
)  # fmt: skip


def report(results: Results, planned: dict[str, list[str]]) -> str:
    """All results as Markdown.

    Args:
        results: Those of all parts so far.
        planned: The names of everything that is to be measured, by part.
    """
    about = [f"- {name}: {value}" for name, value in (results.about | results.stamp).items()]
    tables = [
        markdown(part, {name + _mark(results, row): row for name, row in rows.items()}, FORMATS)
        for part, rows in tables_of(results).items()
        if rows
    ]
    others = [
        f"- [{number}] " + ", ".join(f"{name} {value}" for name, value in stamp.items())
        for number, stamp in enumerate(results.stamps()[1:], 1)
    ]
    missing = [f"- {part}: {'; '.join(names)}" for part in planned if (names := results.missing(part, planned[part]))]
    errors = [f"- {part}: {name}{_mark(results, row)}: {row['error']}" for part, name, row in results.errors()]
    blocks = ["# On GPUs", "\n".join(about), _goals(results), *tables]
    blocks += ["Measured with something else:", "\n".join(others)] if others else []
    blocks += ["Not measured yet:", "\n".join(missing)] if missing else []
    blocks += ["Failed:", "\n".join(errors)] if errors else []
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def tables_of(results: Results) -> dict[str, dict[str, Row]]:
    """The rows of each table."""
    parts = {part: results.rows(part) for part in results.parts if part not in ("predicted", "matrix", "tests")}
    tests: dict[str, Row] = {}
    for index, stamp in enumerate(results.stamps()):
        if rows := [*results.of(stamp).rows("tests").values()]:
            counts = {name: sum(row.get(name, 0) for row in rows) for name in ("passed", "skipped")}
            tests["tests/gpu" + " " * index] = {**counts, "by": stamp}
    return {**parts, "tests": tests, "steps": step_rows(results)}


def _mark(results: Results, row: Row) -> str:
    """What stands behind the name of a row that has another stamp than that of now."""
    number = results.stamps().index(row["by"])
    return f" [{number}]" if number else ""


def step_rows(results: Results) -> dict[str, Row]:
    """The rows of `steps` and `matrix`, with the predicted memory, and the losses compared."""
    rows, predicted = results.rows("steps") | results.rows("matrix"), results.rows("predicted")
    references: dict[tuple[str, bool, str], list[float]] = {}
    for name, row in rows.items():
        if name in predicted:
            row["predicted GiB"] = predicted[name]["predicted GiB"]
            row["predicted / measured"] = row["predicted GiB"] / row["peak GiB"]
        # Those with the same rows and the same mask compute the same losses, up to rounding.
        same = name.split(", ")[2], "no documents" in name, str(row["by"])
        reference = references.setdefault(same, row["losses"])
        if None not in [*reference, *row["losses"]]:  # as that of a step that fp16 skipped
            row["losses differ by"] = max(abs(a - b) for a, b in zip(row["losses"], reference, strict=True))
    return rows


def _goals(results: Results) -> str:
    """Only results with one stamp are compared: that of now, or else another one."""
    lines = ["| goal | measured | reached |", "|---|---|---|"]
    for goal in _GOALS:
        line = f"| {goal.text} | | not measured |"
        for stamp in reversed(results.stamps()):
            with suppress(KeyError, IndexError, TypeError):
                values = goal.measure(results.of(stamp))
                low, high = (goal.shape.format(value) for value in (min(values), max(values)))
                reached = "" if goal.is_reached is None else "yes" if all(map(goal.is_reached, values)) else "no"
                found = f"{low if low == high else f'{low} to {high}'}{_mark(results, {'by': stamp})}"
                line = f"| {goal.text} | {found} | {reached} |"
        lines.append(line)
    return "\n".join(lines)
