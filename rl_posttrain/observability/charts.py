"""The report's pictures, as inline SVG. Pure functions from numbers to text; nothing is fetched or cached."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, GRID = "#1d2733", "#66727f", "#e4e8ec"
# Okabe and Ito's palette without its yellow: told apart by people with any kind of colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WIDTH = 10.5  # inches; the page scales pictures to its width, so that all have letters of one size
POINTS = 400  # a curve of more points is averaged down to these many: the picture stays small, and as wide
STYLE: Any = {
    "svg.fonttype": "none",  # letters stay text: searchable, and a tenth of the size
    "svg.hashsalt": "rl_posttrain",  # the same numbers give the same file
    "font.family": "DejaVu Sans",  # comes with matplotlib, whose layout is measured with it
    "font.size": 8.5,
    "text.parse_math": False,  # a domain called "$x$" is a name
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Curve:
    """One quantity over steps. With `low` and `high`, measured points with intervals instead of a line."""

    label: str
    steps: np.ndarray  # int [n], rising
    values: np.ndarray  # float [n]
    low: np.ndarray | None = None  # float [n]
    high: np.ndarray | None = None  # float [n]


@dataclass(frozen=True)
class Panel:
    """One small plot; several curves share its axes and get a legend."""

    title: str
    curves: Sequence[Curve]
    percent: bool = False  # values are shares: the axis is 0 to 100%
    smooth: bool = True  # lines of 20 points or more: each step faintly, the trend over it


def panels_svg(
    panels: Sequence[Panel], description: str, stages: Sequence[tuple[int, str]] = (), columns: int = 3
) -> str:
    """Small multiples over steps, `columns` in a row.

    Args:
      description: what the picture shows, for readers who cannot see it.
      stages: (first step, name) of each stage; a line marks where the second and later begin.
    """
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.35 * rows), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.06))
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index >= len(panels):
                axes.set_axis_off()
                continue
            _panel(axes, panels[index], stages)
            if index + columns >= len(panels):
                axes.set_xlabel("step")
        return _svg(figure, description)


def change_svg(
    rows: Sequence[tuple[str, tuple[float, float, float], tuple[float, float, float]]], names: tuple[str, str]
) -> str:
    """A line per domain from its accuracy before to that after, each with its interval.

    Args:
      rows: (domain, (value, low, high) before, (value, low, high) after), shares in [0, 1].
      names: of the two, for the legend.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.8 + 0.38 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for y, (_, before, after) in enumerate(rows):
            axes.plot([before[0], after[0]], [y - 0.1, y + 0.1], color=GRID, linewidth=3, zorder=1)
            for (value, low, high), colour, shift in ((before, MUTED, -0.1), (after, COLOURS[0], 0.1)):
                axes.plot([low, high], [y + shift] * 2, color=colour, linewidth=1.4, alpha=0.45)
                axes.plot([value], [y + shift], "o", color=colour, markersize=5.5)
        for name, colour in zip(names, (MUTED, COLOURS[0]), strict=True):
            axes.plot([], [], "o", color=colour, markersize=5.5, label=name)
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-0.015, 1.015)
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))
        axes.grid(visible=False, axis="y")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.0)
        listed = ", ".join(f"{row[0]} {row[1][0]:.0%} to {row[2][0]:.0%}" for row in rows)
        return _svg(figure, f"held-out accuracy, {names[0]} and {names[1]}: {listed}")


def stacked_svg(steps: np.ndarray, phases: Mapping[str, np.ndarray]) -> str:
    """Seconds of each step by phase, stacked. `steps` int [n], each phase float [n]."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
        axes = figure.subplots()
        places, _ = _thin(steps, steps.astype(float))
        layers = [_thin(steps, values)[1] for values in phases.values()]
        colours = [COLOURS[i % len(COLOURS)] for i in range(len(layers))]
        axes.stackplot(places, layers, labels=list(phases), colors=colours, alpha=0.85, linewidth=0)
        usual = float(np.percentile(np.sum(layers, axis=0), 99))  # a slow step must not flatten the others
        axes.set_ylim(0, 1.15 * usual or 1.0)
        axes.set_xlim(places[0], places[-1] if places[-1] > places[0] else places[0] + 1)
        axes.set_xlabel("step")
        axes.set_ylabel("seconds")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(phases), borderaxespad=0.0)
        return _svg(figure, "seconds per step, by phase: " + ", ".join(phases))


def _panel(axes: Axes, panel: Panel, stages: Sequence[tuple[int, str]]) -> None:
    axes.set_title(panel.title)
    for index, curve in enumerate(panel.curves):
        colour = COLOURS[index % len(COLOURS)]
        if curve.low is not None and curve.high is not None:
            reach = np.clip([curve.values - curve.low, curve.high - curve.values], 0, None)
            axes.errorbar(
                curve.steps, curve.values, reach, fmt="o-", color=colour, ecolor=colour, elinewidth=1.1,
                linewidth=1.1, markersize=3.6, label=curve.label, zorder=3,
            )  # fmt: skip
            continue
        steps, values = _thin(curve.steps, curve.values)
        if len(steps) >= 20 and panel.smooth:
            axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.28)
            axes.plot(steps, _smooth(values), color=colour, linewidth=1.6, label=curve.label)
        else:
            style = "." if len(steps) < 20 else ""
            axes.plot(steps, values, f"{style}-", color=colour, linewidth=1.4, markersize=4, label=curve.label)
    if panel.percent:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    left, right = axes.get_xlim()
    for start, name in stages[1:]:
        if left < start < right:
            axes.axvline(start, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
            axes.text(
                start,
                0.99,
                f" {name}",
                transform=axes.get_xaxis_transform(),
                va="top",
                color=MUTED,
                fontsize=7,
            )
    if len(panel.curves) > 1:
        axes.legend(loc="best", handlelength=1.4, borderaxespad=0.2)


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `POINTS` points, each the mean of its neighbours."""
    if len(steps) <= POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), POINTS + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(steps)])
    return np.add.reduceat(steps, edges) / counts, np.add.reduceat(values, edges) / counts


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of about a twentieth of the curve, centred, shorter at the ends: it does not lag."""
    reach = max(1, len(values) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    left, right = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    return (sums[right] - sums[left]) / (right - left)


def _percent(value: float, _: object) -> str:
    return f"{100 * value:.0f}%"


def _svg(figure: Figure, description: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    size = r'<svg(?P<rest>.*?) width="[^"]*"| height="[0-9.]+pt"'
    text = re.sub(size, lambda match: f"<svg{match['rest']}" if match["rest"] else "", text, count=2)
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")  # for readers without the font
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)
