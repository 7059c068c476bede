# SPDX-License-Identifier: Apache-2.0
"""The report's four plots, as inline SVG whose colors follow the page: light, dark, color-blind safe."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torch_privacy import privacy
from torch_privacy.privacy.summary import (
    FALSE_POSITIVE_RATE,
    FALSE_POSITIVES,
    Summary,
    equal_steps,
    round_down,
    round_up,
)
from torch_privacy.runs.metrics import Measure, Metrics

Point = tuple[float, float]

# Each color stands for a variable of the page's style sheet, and is replaced by it in the finished SVG.
INK, FAINT = "#010101", "#020202"
COLORS = FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH = "#030303", "#040404", "#050505", "#060606", "#070707", "#080808"
VARIABLES = dict(
    zip(
        (INK, FAINT, *COLORS),
        ("--ink", "--faint", "--first", "--second", "--third", "--fourth", "--fifth", "--sixth"),
        strict=True,
    )
)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be read aloud
    "svg.hashsalt": "torch_privacy",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "lines.linewidth": 2,
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}


def score_plot(rows: Sequence[Metrics], measure: Measure) -> str:
    """The test score of the private and the non-private training over epochs."""
    figure, axes = score_axes(measure)
    for training, color in {"private": FIRST, "non-private": SECOND}.items():
        course = [row for row in rows if row.training == training]
        if course:
            plot_course(axes, course, measure, color=color)
    _label_ends(axes, rows, measure)
    axes.margins(y=0.15)
    return as_svg(figure)


def score_axes(measure: Measure) -> tuple[Figure, Axes]:
    """Where a test score is drawn over epochs."""
    name = measure.name[0].upper() + measure.name[1:]
    figure, axes = new_axes(f"{name} on held-out examples", "epoch", f"test {measure.name}{' (%)' * measure.percent}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def plot_course(axes: Axes, rows: Sequence[Metrics], measure: Measure, **style: Any) -> None:
    """One training's test score after every epoch."""
    values = [(100 if measure.percent else 1) * row.test_score for row in rows]
    axes.plot([row.epoch for row in rows], values, marker="o", markersize=3, **style)


def epsilon_plot(rows: Sequence[Metrics], delta: float) -> str:
    """Epsilon spent over epochs, as a certified bracket."""
    figure, axes = new_axes("Privacy spent", "epoch", f"epsilon at delta = {delta:g}")
    rows = [row for row in rows if row.training == "private"]
    epochs = [row.epoch for row in rows]
    low, high = (np.array([getattr(row, end) for row in rows], float) for end in ("epsilon_low", "epsilon_high"))
    axes.fill_between(epochs, low, high, color=FIRST, alpha=0.25, linewidth=0)
    axes.plot(epochs, high, color=FIRST, marker="o", markersize=3)
    _label(axes, f"at most {round_up(float(high[-1]))}", (epochs[-1], float(high[-1])), (-6, 6), FIRST, ha="right")
    axes.set_ylim(0, 1.15 * max(high[np.isfinite(high)], default=1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return as_svg(figure)


def tradeoff_plot(profile: privacy.Profile, summary: Summary) -> str:
    """How many members an attacker must miss at each rate of false alarms, against perfect privacy."""
    figure, axes = new_axes("What an attacker can do", "false positives (%)", "members missed (%)")
    alpha = np.concatenate([[0.0], np.geomspace(1e-4, 0.05, 40), np.linspace(0.06, 1, 80)])
    curve = profile.tradeoff(alpha)
    axes.plot([0, 100], [100, 0], color=FAINT, linestyle="--", linewidth=1.2)
    along = {"rotation": -45, "transform_rotates_text": True, "rotation_mode": "anchor", "ha": "center"}
    axes.text(72, 31, "perfect privacy", color=INK, **along)
    axes.fill_between(100 * alpha, 100 * curve.low, 100 * curve.high, color=FIRST, alpha=0.25, linewidth=0)
    axes.plot(100 * alpha, 100 * curve.low, color=FIRST)
    missed = 100 * (1 - summary.true_positive_rate_high)
    axes.plot([100 * FALSE_POSITIVE_RATE], [missed], "o", color=SECOND, clip_on=False, zorder=5)
    label = f"at {FALSE_POSITIVES} false positives\nat least {round_down(missed, 1)} % are missed"
    axes.plot([100 * FALSE_POSITIVE_RATE, 44], [missed, 88], color=SECOND, linewidth=0.8)
    axes.text(46, 88, label, color=SECOND, va="center")
    axes.set(xlim=(0, 100), ylim=(0, 100))
    return as_svg(figure)


def profile_plot(profile: privacy.Profile, summary: Summary) -> str:
    """Epsilon as a function of delta: certified, by the central limit theorem, and by the moments accountant."""
    figure, axes = new_axes("Epsilon at every delta", "delta", "epsilon")
    delta = np.geomspace(1e-9, 1e-2, 15)  # the curves are smooth, and the moments accountant is slow
    low, high = np.array([profile.epsilon(float(d)) for d in delta], float).T
    axes.fill_between(delta, low, high, color=FIRST, alpha=0.25, linewidth=0)
    axes.plot(delta, high, color=FIRST, label="certified bracket")
    steps = equal_steps(summary.releases)
    if steps is not None:
        approximation = [privacy.clt(*steps).epsilon(float(d)) for d in delta]
        axes.plot(delta, approximation, color=SECOND, linestyle="--", label="CLT: approximation, not a bound")
        moments = [privacy.moments(*steps, float(d)) for d in delta]
        axes.plot(delta, moments, color=THIRD, linestyle=":", label="moments accountant")
    axes.plot([summary.delta], [summary.epsilon_high], "o", color=FIRST)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", nbins=6)
    axes.legend(frameon=False, labelcolor="linecolor", loc="lower left", handlelength=2.4)
    return as_svg(figure)


def new_axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """An empty plot in the page's style."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.3), layout="constrained")
        axes = figure.subplots()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _label_ends(axes: Axes, rows: Sequence[Metrics], measure: Measure) -> None:
    """Name each curve at its end, the higher one above and the lower one below."""
    ends = sorted({row.training: row for row in rows}.values(), key=lambda row: row.test_score, reverse=True)
    for row, (shift, align) in zip(ends, [(8, "bottom"), (-8, "top")], strict=False):
        color = FIRST if row.training == "private" else SECOND
        text, value = f"{row.training} {measure.text(row.test_score)}", (100 if measure.percent else 1) * row.test_score
        _label(axes, text, (row.epoch, value), (0, shift), color, ha="right", va=align)


def _label(axes: Axes, text: str, point: Point, shift: Point, color: str, **align: Any) -> None:
    """Text beside a point, ``shift`` printer's points away from it."""
    axes.annotate(text, point, shift, textcoords="offset points", color=color, **align)


def as_svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element, its placeholder colors replaced by the page's."""
    text = io.StringIO()
    nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg
