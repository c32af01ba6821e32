"""The tables of the results: goals first, then each part."""

from collections.abc import Callable
from contextlib import suppress

from benchmarks.gpu.results import Results, Row
from benchmarks.gpu.settings import PARTS, large_settings
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


def _steps(results: Results, *words: str, part: str = "steps") -> float:
    """Tokens/s of the best setting, of `large` of that with the largest batch, or of the same with some words more."""
    best = results.about["best"] if part == "steps" else next(iter(large_settings("bf16")))
    return float(results.rows(part)[", ".join([best, *words])]["tokens/s"])


def _ratios(results: Results) -> list[float]:
    """Predicted by measured memory of all settings that have both; at least eight."""
    values = [row["predicted / measured"] for row in step_rows(results).values() if "predicted / measured" in row]
    return [values[index] for index in range(max(8, len(values)))]


def _of(results: Results, program: str) -> float:
    rows = results.rows("programs")
    return float(rows[OURS]["tokens/s"] / rows[program]["tokens/s"])


_GOALS: tuple[tuple[str, str, Callable[[float], bool] | None, Callable[[Results], list[float]]], ...] = (
    ("MFU with documents, as in PaLM: at least 55 %", "{:.1%}", lambda x: x >= 0.55,
     lambda r: [r.rows("steps")[r.about["best"]]["MFU"]]),
    ("the same, counting unmasked attention only", "{:.1%}", None,
     lambda r: [r.rows("steps")[r.about["best"]]["MFU, unmasked attention only"]]),
    ("tokens/s with documents, of those without: at least 97 %", "{:.1%}", lambda x: x >= 0.97,
     lambda r: [_steps(r) / _steps(r, "no documents")]),
    ("tokens/s with `deterministic`, of those without", "{:.1%}", None,
     lambda r: [_steps(r, "deterministic") / _steps(r)]),
    ("tokens/s, large", "{:,.0f}", None, lambda r: [_steps(r, part="large")]),
    ("tokens/s with `deterministic`, of those without, large", "{:.1%}", None,
     lambda r: [_steps(r, "deterministic", part="large") / _steps(r, part="large")]),
    ("tokens/s, of the bare loop: over 100 %", "{:.1%}", lambda x: x > 1, lambda r: [_of(r, BARE)]),
    ("tokens/s, of the Trainer: over 100 %", "{:.1%}", lambda x: x > 1, lambda r: [_of(r, TRAINER)]),
    ("memory, predicted / measured: 0.9 to 1.1", "{:.3f}", lambda x: 0.9 <= x <= 1.1, _ratios),
    ("same bits after a kill, deterministic", "{:.0f}", bool,
     lambda r: [r.rows("resume")["deterministic"]["same bits"]]),
)  # fmt: skip
"""What it is, how it is written, when it is reached (None: no limit is set), and all values that must reach it: a
KeyError, IndexError or TypeError where something is not measured or unknown."""


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
    parts = {part: results.rows(part) for part in PARTS if part not in ("predicted", "tests")}
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
    """The rows of `steps`, with the predicted memory, and the losses compared."""
    rows, predicted = results.rows("steps"), results.rows("predicted")
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
    for text, shape, is_reached, measure in _GOALS:
        line = f"| {text} | | not measured |"
        for stamp in reversed(results.stamps()):
            with suppress(KeyError, IndexError, TypeError):
                values = measure(results.of(stamp))
                low, high = (shape.format(value) for value in (min(values), max(values)))
                reached = "" if is_reached is None else "yes" if all(map(is_reached, values)) else "no"
                found = f"{low if low == high else f'{low} to {high}'}{_mark(results, {'by': stamp})}"
                line = f"| {text} | {found} | {reached} |"
        lines.append(line)
    return "\n".join(lines)
