"""Pictures of the course of a training, as SVG: for a paper, and for the page of the report.

The same numbers give the same bytes, without dates or random ids. However many rows there are, matplotlib draws a curve
with a limited number of points, among them every peak.
"""

import io
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from stages.base import history
from stages.base.history import Row
from stages.export.scores import TaskScore

COLORS = {
    "back": "#ffffff",
    "panel": "#f4f6f8",
    "text": "#1b232c",
    "grey": "#566270",
    "line": "#dfe4ea",
    "blue": "#1f5fa8",
    "pale": "#8db5e2",
    "orange": "#c04d08",
    "green": "#1d7a5a",
    "yellow": "#d9a21b",
    "purple": "#7b4b9e",
}
"""Text and lines have the contrast that WCAG AA asks for, on `back` and on `panel`."""

_STYLE: Any = {
    "svg.hashsalt": "report",  # ids in the picture are random without it
    "svg.fonttype": "path",  # looks the same where the font is missing
    "figure.figsize": (5.4, 3.3),  # so small that the letters can be read on a phone, and as wide as a column of text
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "text.parse_math": False,  # names may have a $
    "text.color": COLORS["text"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLORS["grey"],
    "axes.labelcolor": COLORS["text"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "axes.formatter.limits": (-2, 5),
    "grid.color": COLORS["line"],
    "grid.linewidth": 0.7,
    "xtick.color": COLORS["grey"],
    "ytick.color": COLORS["grey"],
    "xtick.labelcolor": COLORS["text"],
    "ytick.labelcolor": COLORS["text"],
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
    "path.simplify_threshold": 0.5,  # of a pixel
}


@dataclass(frozen=True)
class Curve:
    """A column of a table."""

    column: str
    color: str
    label: str
    is_mean: bool = False
    """Whether it is the running mean of the column."""
    style: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """What is drawn, over the steps."""

    caption: str
    label: str
    """Of the vertical axis."""
    curves: list[Curve]
    scale: str = "zero"
    """Of the vertical axis: from `zero`; `log`; or `auto`, around the values."""


_MEANS = 10_000
"""Points of a running mean at most, as each is the mean of a fiftieth of all values."""
_LONGEST = 32
"""Characters of a label; one of 60 would leave nothing of a picture that is so narrow."""
_THIN = {"linewidth": 0.8}
_PHASES = {
    "data": "yellow", "forward": "blue", "backward": "pale", "update": "green", "validation": "orange",
    "saving": "purple", "other": "grey",
}  # fmt: skip
COURSE = {
    "loss": Picture(
        "Loss",
        "loss (nats per token)",
        [
            Curve("loss", "pale", "training, each step", style=_THIN),
            Curve("loss", "blue", "training, running mean", is_mean=True),
            # Fewer points, and none without held-out rows.
            Curve("validation_loss", "orange", "validation", style={"linestyle": "dashed"}),
        ],
        "auto",
    ),
    "learning_rate": Picture("Learning rate", "learning rate", [Curve("lr", "blue", "learning rate")]),
    "gradient_norm": Picture(
        "Gradient norm",
        "gradient norm, before clipping",
        [
            Curve("grad_norm", "pale", "each step", style=_THIN),
            Curve("grad_norm", "blue", "running mean", is_mean=True),
        ],
        "log",
    ),
}
"""Of history.tsv, by name."""
_COLORS = ("blue", "orange", "green", "purple", "yellow", "grey", "pale")


def of_sources(sources: Iterable[str]) -> Picture:
    """The validation loss of each source, of history.tsv."""
    curves = [Curve(history.of_source(name), color, name) for name, color in zip(sources, cycle(_COLORS), strict=False)]
    return Picture("Validation loss by source", "loss (nats per token)", curves, "auto")


SPEED = {
    "tokens_per_second": Picture(
        "Tokens per second", "tokens per second", [Curve("tokens_per_second", "blue", "tokens per second")]
    ),
    "memory": Picture(
        "Memory",
        "memory of rank 0 (GiB)",
        [
            Curve("memory_gib", "green", "now"),
            Curve("memory_peak_gib", "blue", "peak"),
        ],
    ),
    "step_time": Picture(
        "Time of a step",
        "milliseconds per step",
        [Curve(f"{phase}_ms", color, phase, style=_THIN) for phase, color in _PHASES.items()],
    ),
}
"""Of speed.tsv."""


def draw(picture: Picture, rows: list[Row]) -> tuple[str, str] | None:
    """A picture with a legend above it where there are several curves, and its text; None: there are no values.

    The text, for those who do not see it, has the last value of each curve, and of losses the lowest.

    Args:
        picture: What is drawn.
        rows: Of history.tsv or speed.tsv.
    """
    texts, positive = [], True
    with mpl.rc_context(_STYLE):
        # Figure, not pyplot: no backend is chosen, no display needed, and nothing is kept in global state.
        figure = Figure()
        axes = figure.add_subplot()
        axes.set(xlabel="step", ylabel=picture.label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # 1: where there is a single step
        for curve in picture.curves:
            steps, values = series(rows, curve)
            if not values.any():
                continue
            marker = {"marker": "o", "clip_on": False} if len(steps) == 1 else {}  # a line of one point cannot be seen
            axes.plot(steps, values, color=COLORS[curve.color], label=_label(curve.label), **{**marker, **curve.style})
            lowest = f" (lowest {_text(values.min())})" if "loss" in curve.column else ""
            texts += [f"{curve.label} {_text(values[-1])}{lowest}"]
            positive &= values.min() > 0
        if not texts:
            return None
        if picture.scale == "zero":
            axes.set_ylim(0, None)
        elif picture.scale == "log" and positive:
            axes.set(yscale="log", ylabel=f"{picture.label} (log scale)")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > 1:
            figure.legend(loc="outside upper left", ncols=2 if max(map(len, labels)) > 12 else 4)
        return _svg(figure), f"Last values of {picture.label}: {'; '.join(texts)}"


def draw_tasks(scores: list[TaskScore]) -> tuple[str, str] | None:
    """Scores from 0 to 1, before training and after it, and the text of the picture; None: there are no such scores."""
    shown = [score for score in scores if score.higher_is_better and 0 <= score.score <= 1][::-1]  # the first on top
    if not shown:
        return None
    places, texts = range(len(shown)), []
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.4, 1.2 + 0.35 * len(shown)))
        axes = figure.add_subplot()
        axes.set(xlabel="score, with the interval of 95 %", xlim=(-0.02, 1.02), ylim=(-0.6, len(shown) - 0.4))
        axes.set_yticks(places, [_label(score.task) for score in shown])
        axes.grid(visible=False, axis="y")
        errors = [1.96 * (score.stderr or 0) for score in shown]
        values = [score.score for score in shown]
        axes.errorbar(values, places, xerr=errors, fmt="o", color=COLORS["blue"], capsize=3, label="after training")
        for place, score in zip(places, shown, strict=True):
            texts += [f"{score.task} {_text(score.score)}"]
            if score.initial is not None:
                axes.plot([score.initial, score.score], [place, place], color=COLORS["pale"], zorder=1)
                texts[-1] += f" (before {_text(score.initial)})"
        for found, marker, name, color in (
            ([score.initial for score in shown], "o", "before training", "pale"),
            ([score.chance for score in shown], "|", "by chance", "orange"),
        ):
            known = [(value, place) for place, value in zip(places, found, strict=True) if value is not None]
            if known:
                axes.plot(*zip(*known, strict=True), marker, color=COLORS[color], markersize=9, label=name)
        figure.legend(loc="outside upper left", ncols=3)
        return _svg(figure), "; ".join(texts[::-1])


def _svg(figure: Figure) -> str:
    file, font = io.StringIO(), get_font(findfont(_STYLE["font.family"]))
    text = "".join(each.get_text() for each in figure.findobj(Text))
    # What the font lacks, as Chinese, has no path: a browser writes such a picture with fonts of its own.
    has_glyphs = all(font.get_char_index(ord(character)) for character in text if character.isprintable())
    with mpl.rc_context({} if has_glyphs else {"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        # Not the time of day, nor the version of matplotlib.
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()


def series(rows: list[Row], curve: Curve) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The steps at which a curve has a finite value, and the values."""
    points = np.array(history.series(rows, curve.column))
    steps, values = points[:, np.isfinite(points[1])]
    if curve.is_mean and len(values):
        window, every = max(1, len(values) // 50), max(1, len(values) // _MEANS)
        # Of the windows, not a difference of cumulative sums, which has no digits left after a peak of 1e16.
        means = sliding_window_view(values, window)[::-every][::-1].mean(axis=1)
        steps, values = steps[window - 1 :][::-every][::-1], means
    return steps, values


def _label(name: str) -> str:
    """A name so short that it leaves room for what it names, and that a legend shows."""
    name = name if not name.startswith("_") else f"\u200b{name}"  # which begins what matplotlib does not show
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 2 + 1 :]}"


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
