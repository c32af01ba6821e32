"""The report on a training: pictures of its course, samples of text, and a page that contains both.

The page needs no network and no other file. The same numbers give the same bytes, without dates or random ids, so DVC
sees a change only where there is one.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from stages.artifacts import history
from stages.artifacts.history import Row
from stages.artifacts.publish import write_text

_BLUE, _LIGHT_BLUE, _ORANGE, _GREY = "#1f5fa8", "#a9c8e8", "#d1570b", "#6b7280"

_STYLE: Any = {
    "svg.hashsalt": "report",  # ids in the picture are random without it
    "svg.fonttype": "path",  # looks the same where the font is missing
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": "#111827",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Sample:
    """A prompt, and what the model wrote after it."""

    prompt: str
    continuation: str


def write(
    directory: Path, name: str, rows: list[Row], facts: Sequence[tuple[str, str]], samples: Sequence[Sample], note: str
) -> None:
    """Write `loss.svg`, `schedule.svg`, `sample.md` and `index.html` into a directory.

    Args:
        directory: An empty directory.
        name: Of the experiment.
        rows: The history of the training.
        facts: Names and values for the table at the top.
        samples: What the model wrote.
        note: A sentence above the samples: how they were made, or why there are none.
    """
    pictures = {"loss.svg": loss_picture(rows), "schedule.svg": schedule_picture(rows)}
    for file, picture in pictures.items():
        write_text(directory / file, picture)
    write_text(directory / "sample.md", _markdown(name, samples, note))
    write_text(directory / "index.html", _page(name, list(pictures.values()), facts, samples, note))


def loss_picture(rows: list[Row]) -> str:
    """SVG of the training loss and the validation loss over the steps."""
    with mpl.rc_context(_STYLE):
        # Figure, not pyplot: no backend is chosen, no display needed, and nothing is kept in global state.
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        axes = figure.add_subplot()
        steps, losses = history.series(rows, "loss")
        axes.plot(steps, losses, color=_LIGHT_BLUE, linewidth=0.9, label="training, each step")
        axes.plot(steps, _smooth(losses), color=_BLUE, linewidth=1.8, label="training, running mean")
        steps, losses = history.series(rows, "validation_loss")  # fewer points, and none without held-out rows
        if steps:
            axes.plot(steps, losses, color=_ORANGE, linewidth=1.6, marker="o", markersize=4, label="validation")
            name = "before training " if steps[0] == 0 else ""
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
            style: dict[str, Any] = {"textcoords": "offset points", "color": _ORANGE, "bbox": box}
            axes.annotate(f"{name}{losses[0]:.2f}", (steps[0], losses[0]), xytext=(8, 0), va="center", **style)
            axes.annotate(f"{losses[-1]:.2f}", (steps[-1], losses[-1]), xytext=(4, 7), ha="right", **style)
        axes.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
        axes.legend()
        return _svg(figure)


def schedule_picture(rows: list[Row]) -> str:
    """SVG of the learning rate and the gradient norm over the steps."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
        top.plot(*history.series(rows, "lr"), color=_BLUE, linewidth=1.8)
        top.set(title="Learning rate", ylabel="learning rate", ylim=(0, None))
        top.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        steps, norms = history.series(rows, "grad_norm")
        bottom.plot(steps, norms, color=_LIGHT_BLUE, linewidth=0.9)
        bottom.plot(steps, _smooth(norms), color=_BLUE, linewidth=1.8)
        bottom.set(title="Gradient norm, before clipping", xlabel="step", ylabel="gradient norm")
        if norms and min(norms) > 0:  # a logarithmic axis has no place for 0
            bottom.set_yscale("log")
            bottom.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            bottom.yaxis.set_major_formatter("{x:g}")
            bottom.yaxis.set_minor_locator(NullLocator())
        return _svg(figure)


def _smooth(values: list[float]) -> list[float]:
    """An exponential moving average over about a fiftieth of the values, corrected for its start as in Adam."""
    decay = 1 - 1 / max(1.0, len(values) / 50)
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(mean / weight)
    return result


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})  # matplotlib would write the time of day
    return file.getvalue()


def _markdown(name: str, samples: Sequence[Sample], note: str) -> str:
    blocks = [f"# Samples from {name}\n\n{note}\n"]
    for number, sample in enumerate(samples, 1):
        blocks.append(
            f"## {number}\n\nPrompt:\n\n{_quote(sample.prompt)}\n\nContinuation:\n\n{_quote(sample.continuation)}\n"
        )
    return "\n".join(blocks)


def _quote(text: str) -> str:
    # Indented code, not a fence: a sample may contain any number of backticks.
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "


def _page(
    name: str, pictures: Sequence[str], facts: Sequence[tuple[str, str]], samples: Sequence[Sample], note: str
) -> str:
    table = "\n".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in facts)
    # From `<svg` on: the XML declaration and the doctype before it are not valid inside of HTML.
    figures = "\n".join(f"<figure>{picture[picture.index('<svg') :]}</figure>" for picture in pictures)
    texts = "\n".join(
        f"<pre><span>{escape(sample.prompt)}</span>{escape(sample.continuation)}</pre>" for sample in samples
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; color: #111827; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }}
  h1 {{ margin-bottom: .25rem; }}
  h2 {{ margin-top: 2.5rem; border-bottom: 1px solid #e5e7eb; }}
  table {{ border-collapse: collapse; }}
  th {{ text-align: left; font-weight: normal; color: {_GREY}; padding: .15rem 1.5rem .15rem 0; vertical-align: top; }}
  td {{ font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
  figure {{ margin: 1rem 0; }}
  svg {{ max-width: 100%; height: auto; }}
  pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
  pre {{ background: #f6f8fa; padding: .75rem 1rem; border-radius: 6px; }}
  pre span {{ color: {_GREY}; }}
</style>
</head>
<body>
<h1>{escape(name)}</h1>
<table>
{table}
</table>
<h2>Training</h2>
{figures}
<h2>Samples</h2>
<p>{escape(note)}</p>
{texts}
</body>
</html>
"""


def loss_text(loss: float | None) -> str:
    """A loss and its perplexity, for people to read."""
    return "not measured" if loss is None else f"{loss:.4f} nats per token (perplexity {perplexity(loss):,.1f})"


def perplexity(loss: float | None) -> float | None:
    """exp(loss): a model with this loss is as uncertain as a uniform choice among that many tokens."""
    return None if loss is None else math.exp(min(loss, 700.0))  # above 709, exp overflows a float
