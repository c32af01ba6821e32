"""Pictures of the course of a training, as SVG: for a paper as they are, and for a page with its own colors.

The same numbers give the same bytes, without dates or random ids. However many rows there are, a curve has a limited
number of points, among them every peak.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from stages.artifacts import history
from stages.artifacts.history import Row
from stages.export.page import COLORS

_LIGHT = {name: light for name, (light, _) in COLORS.items()}
_SIZE = (5.4, 3.3)
"""Inches: so small that the letters can be read on a phone, and so wide as a column of text."""
_STYLE: Any = {
    "svg.hashsalt": "report",  # ids in the picture are random without it
    "svg.fonttype": "path",  # looks the same where the font is missing
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "text.color": _LIGHT["text"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _LIGHT["grey"],
    "axes.labelcolor": _LIGHT["text"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "grid.color": _LIGHT["line"],
    "grid.linewidth": 0.7,
    "xtick.color": _LIGHT["grey"],
    "ytick.color": _LIGHT["grey"],
    "xtick.labelcolor": _LIGHT["text"],
    "ytick.labelcolor": _LIGHT["text"],
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
}
_PHASES = {
    "data": "yellow", "forward": "blue", "backward": "pale", "update": "green", "validation": "orange",
    "saving": "purple", "other": "before",
}  # fmt: skip

Series = tuple[list[float], list[float]]
"""Steps, and the values at them."""


def loss(rows: list[Row], before: list[Row]) -> str | None:
    """The losses of training and validation; None: no row has one."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("loss (nats per token)")
        steps, losses = history.series(rows, "loss")
        _draw(axes, (steps, losses), "pale", "training, each step", linewidth=0.8)
        _draw(axes, (steps, smooth(losses)), "blue", "training, running mean")
        # Fewer points, and none without held-out rows.
        _draw(axes, history.series(rows, "validation_loss"), "orange", "validation", marker="o", markersize=3)
        steps, losses = history.series(before, "loss")
        _draw(axes, (steps, smooth(losses)), "before", "run before: training, mean")
        _draw(axes, history.series(before, "validation_loss"), "before", "run before: validation", linestyle="dashed")
        return _svg(figure, axes)


def learning_rate(rows: list[Row], before: list[Row]) -> str | None:
    """The learning rate of each step."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("learning rate")
        _draw(axes, history.series(rows, "lr"), "blue", "this run")
        _draw(axes, history.series(before, "lr"), "before", "run before")
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        axes.set_ylim(0, None)
        return _svg(figure, axes)


def gradient_norm(rows: list[Row], before: list[Row]) -> str | None:
    """The norm of the gradient before it was clipped."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("gradient norm, before clipping")
        steps, norms = history.series(rows, "grad_norm")
        _draw(axes, (steps, norms), "pale", "each step", linewidth=0.8)
        _draw(axes, (steps, smooth(norms)), "blue", "running mean")
        steps, others = history.series(before, "grad_norm")
        _draw(axes, (steps, smooth(others)), "before", "run before, running mean")
        if min([*norms, *others], default=0) > 0:  # a logarithmic axis has no place for 0
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        return _svg(figure, axes)


def tokens_per_second(rows: list[Row], before: list[Row]) -> str | None:
    """The tokens per second of all ranks."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("tokens per second")
        _draw(axes, history.series(rows, "tokens_per_second"), "blue", "this run")
        _draw(axes, history.series(before, "tokens_per_second"), "before", "run before")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, None)
        return _svg(figure, axes)


def memory(rows: list[Row], before: list[Row]) -> str | None:
    """The memory of rank 0: of the GPU, or on CPUs of the process."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("memory of rank 0 (GiB)")
        _draw(axes, history.series(rows, "memory_gib"), "green", "now")
        _draw(axes, history.series(rows, "memory_peak_gib"), "blue", "peak")
        _draw(axes, history.series(before, "memory_peak_gib"), "before", "run before, peak")
        axes.set_ylim(0, None)
        return _svg(figure, axes)


def step_time(rows: list[Row], before: list[Row]) -> str | None:
    """The phases of a step, one on the other."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("milliseconds per step")
        phases = {name: [row.get(f"{name}_ms") or 0.0 for row in rows] for name in _PHASES}
        phases = {name: values for name, values in phases.items() if any(values)}
        if phases:
            steps = [row["step"] or 0.0 for row in rows]
            kept = _every(len(steps))
            values = [[phases[name][index] for index in kept] for name in phases]
            steps = [steps[index] for index in kept]
            if len(steps) == 1:  # an area needs a width
                steps, values = [steps[0] - 0.4, steps[0] + 0.4], [2 * value for value in values]
            colors = [_LIGHT[_PHASES[name]] for name in phases]
            axes.stackplot(steps, values, labels=list(phases), colors=colors, linewidth=0)
        totals = [sum(row.get(f"{name}_ms") or 0.0 for name in _PHASES) for row in before]
        _draw(axes, ([row["step"] or 0.0 for row in before], totals), "text", "run before, all", linestyle="dotted")
        axes.set_ylim(0, None)
        return _svg(figure, axes, [f"{name} {_text(values[-1])}" for name, values in phases.items()], reverse=True)


COURSE = {
    "loss": (loss, "Loss"),
    "learning_rate": (learning_rate, "Learning rate"),
    "gradient_norm": (gradient_norm, "Gradient norm"),
}
"""Pictures of history.tsv: name, function and caption."""
SPEED = {
    "tokens_per_second": (tokens_per_second, "Tokens per second"),
    "memory": (memory, "Memory"),
    "step_time": (step_time, "Time of a step"),
}
"""Pictures of speed.tsv."""


def _axes(label: str) -> tuple[Figure, Axes]:
    # Figure, not pyplot: no backend is chosen, no display needed, and nothing is kept in global state.
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # 1: also where there is a single step
    return figure, axes


def _draw(axes: Axes, series: Series, color: str, label: str, **style: Any) -> None:
    steps, values = thin(*series)
    if steps:
        order = 1.9 if color == "before" else 2  # behind the others
        if len(steps) == 1:  # a line of one point cannot be seen
            style = {"marker": "o", "clip_on": False, **style}
        axes.plot(steps, values, color=_LIGHT[color], label=label, zorder=order, **style)


def thin(steps: Sequence[float], values: Sequence[float], num_parts: int = 400) -> Series:
    """Finite points of a curve: the lowest and the highest of each of `num_parts` parts, and the last one."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if len(points) <= 2 * num_parts:
        kept = points
    else:
        bounds = [len(points) * index // num_parts for index in range(num_parts + 1)]
        parts = [points[start:end] for start, end in pairwise(bounds)]
        value = itemgetter(1)
        kept = sorted({points[-1], *(choose(part, key=value) for part in parts for choose in (min, max))})
    return [step for step, _ in kept], [value for _, value in kept]


def _every(number: int, limit: int = 400) -> list[int]:
    """Indices of at most `limit` + 1 of some rows, with even distances, the last one included."""
    if number <= limit:
        return list(range(number))
    return sorted({number * index // limit for index in range(limit)} | {number - 1})


def smooth(values: Sequence[float]) -> list[float]:
    """An exponential moving average over about a fiftieth of the values, corrected for its start as in Adam."""
    decay = 1 - 1 / max(1.0, len(values) / 50)
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):  # after one that is not, no mean would be
            mean = decay * mean + (1 - decay) * value
            weight = decay * weight + (1 - decay)
        result.append(mean / weight if weight else math.nan)
    return result


def _svg(figure: Figure, axes: Axes, values: Iterable[str] = (), reverse: bool = False) -> str | None:
    """The figure with a legend above it where there are several curves; None: there is none.

    Its title, for those who do not see it, has the last value of each curve, and of losses the lowest.

    Args:
        figure: What is drawn.
        axes: Its only ones.
        values: What else the title has.
        reverse: Whether the last curve comes first.
    """
    if not axes.has_data():
        return None
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        order = slice(None, None, -1 if reverse else 1)
        columns = 2 if max(map(len, labels)) > 12 else 4
        figure.legend(handles[order], labels[order], fontsize=8, loc="outside upper left", ncols=columns)
    file = io.StringIO()
    # Not the time of day, nor the version of matplotlib.
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    texts = [*values]
    for line in lines[:: -1 if reverse else 1]:
        points: list[float] = np.asarray(line.get_ydata()).tolist()
        lowest = f" (lowest {_text(min(points))})" if "loss" in axes.get_ylabel() else ""
        texts += [f"{line.get_label()} {_text(points[-1])}{lowest}"]
    title = f"<title>Last values of {axes.get_ylabel()}: {'; '.join(texts)}</title>"
    return re.sub(r"<svg [^>]*>", lambda found: f"{found[0]}\n {title}", file.getvalue(), count=1)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
