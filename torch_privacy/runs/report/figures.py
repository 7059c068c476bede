# SPDX-License-Identifier: Apache-2.0
"""Draws figures of trade-off functions, profiles and any other curves.

Every function takes curves by name and returns a figure, which `save` writes as SVG, PNG or PDF.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, LogFormatterMathtext

from ...privacy.bracket import Array, Bracket
from ...privacy.tradeoff import TradeOff
from .style import FILE_COLORS, FILE_FAINT, FILE_INK, FILE_STYLE

FORMATS = ("svg", "png", "pdf")
NO_METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MOST_IN_LEGEND = 4  # curves; with more the legend stands next to the axes
POWERS_RANGE = 1e6  # ratio of a logarithmic axis's ends beyond which its labels are powers of ten
MINOR_THRESHOLDS = 2, 0.5  # decades of a logarithmic axis up to which minor ticks are labeled


class Mark(NamedTuple):
    """A labeled point of a plot."""

    x: float
    y: float
    text: str


def tradeoff_plot(
    curves: Mapping[str, TradeOff | Bracket[Any]], *, title: str = "What an attacker can do", marks: Sequence[Mark] = ()
) -> Figure:
    """Draws the share of members missed at each false positive rate; the area inside an interval is filled.

    Args:
        curves: trade-off functions, or intervals of them, by their name in the legend.
        title: title of the figure.
        marks: points to label, in error rates.
    """
    figure, axes = _new(title, "false alarms (%)", "members missed (%)", size=(4.8, 4.4))
    _tradeoffs(axes, curves)
    for mark in marks:
        _note(axes, Mark(100 * mark.x, 100 * mark.y, mark.text), (80, 40))
    if len(curves) > 1:
        axes.legend(frameon=False, loc="upper right")
    return figure


def tradeoff_panels(panels: Mapping[str, Mapping[str, TradeOff | Bracket[Any]]], *, title: str) -> Figure:
    """Draws several `tradeoff_plot` in a grid of three columns, each under its name, with one legend."""
    with matplotlib.rc_context(FILE_STYLE):
        figure, grid = _grid(len(panels), title, "members missed (%)", row_height=3.4, margin=0.5, sharex=True)
        for axes, (name, curves) in zip(grid.flat, panels.items(), strict=False):
            _tradeoffs(axes, curves)
            axes.set_title(name, fontsize=10, loc="left")
        for axes in grid[-1]:
            axes.set_xlabel("false alarms (%)")
        handles, names = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def epsilon_plot(
    curves: Mapping[str, tuple[Array, Array | Bracket[Array]]], *, title: str, xlabel: str = "epoch"
) -> Figure:
    """Draws ε over epochs or any other axis; each curve is (x, ε) or (x, interval of ε)."""
    figure, axes = _new(title, xlabel, "epsilon")
    _lines(axes, curves)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def curves_plot(
    curves: Mapping[str, tuple[Array, Array | Bracket[Array]]],
    *,
    title: str,
    ylabel: str,
    xlabel: str = "epoch",
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Draws any curves; each is (x, y) or (x, interval of y)."""
    figure, axes = _new(title, xlabel, ylabel)
    _lines(axes, curves)
    for log, axis, scale in ((log_x, axes.xaxis, axes.set_xscale), (log_y, axes.yaxis, axes.set_yscale)):
        if log:
            scale("log")
            least, most = axis.get_view_interval()
            formatter = LogFormatterMathtext if most > POWERS_RANGE * least else LogFormatter
            axis.set_major_formatter(formatter(minor_thresholds=MINOR_THRESHOLDS))
            axis.set_minor_formatter(formatter(minor_thresholds=MINOR_THRESHOLDS))
    if len(curves) > MOST_IN_LEGEND:
        figure.legend(frameon=False, loc="outside right upper")
    else:
        axes.legend(frameon=False)
    return figure


def panels_plot(panels: Mapping[str, tuple[Array, Array]], *, title: str, ylabel: str) -> Figure:
    """Draws one line of (x, y) in each panel of a grid of three columns, under the name of x; y axes are shared."""
    with matplotlib.rc_context(FILE_STYLE):
        figure, grid = _grid(len(panels), title, ylabel, row_height=2.8, margin=0.4, sharex=False)
        for axes, (name, (x, y)) in zip(grid.flat, panels.items(), strict=False):
            axes.plot(x, y, marker="o", color=FILE_COLORS[0])
            axes.set_xlabel(name)
    return figure


def profile_plot(
    curves: Mapping[str, tuple[Array, Array | Bracket[Array]]],
    *,
    title: str = "Epsilon at every delta",
    marks: Sequence[Mark] = (),
) -> Figure:
    """Draws ε over δ on a logarithmic axis; each curve is (δ, ε) or (δ, interval of ε)."""
    figure, axes = _new(title, "delta", "epsilon")
    _lines(axes, curves)
    for mark in marks:
        _note(axes, mark, (-24, -48))
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def noise_plot(noise: Array, epsilon: Bracket[Array], chosen: Mark, target: float, *, title: str) -> Figure:
    """Draws ε over the noise multiplier, with the target as a line and the chosen noise as a point."""
    figure, axes = _new(title, "noise multiplier", "epsilon")
    _lines(axes, {"certified": (noise, epsilon)})
    axes.axhline(target, color=FILE_FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    _note(axes, chosen, (24, 18))
    axes.set_ylim(bottom=0)
    return figure


def claims_plot(names: Sequence[str], values: Sequence[float], certified: Bracket[float], *, title: str) -> Figure:
    """Draws each accountant's ε as a point: red below the certified one, which is a line, an arrow far above it."""
    figure, axes = _new(title, "epsilon", "", size=(6.4, 0.42 * len(names) + 1.3))
    low, high = certified
    rows = np.arange(len(names))[::-1]
    axes.axvspan(low, high, color=FILE_COLORS[0], alpha=0.3, linewidth=0)
    axes.axvline(high, color=FILE_COLORS[0], linewidth=1.2)
    edge = 2 * high
    for row, value in zip(rows, values, strict=True):
        below, at = value < low, min(value, edge)
        color = FILE_COLORS[5] if below else FILE_INK
        axes.plot([high, at], [row, row], color=color, linewidth=1.2)
        axes.plot([at], [row], "o" if value <= edge else ">", color=color, markersize=6)
        text = f"{value:.4g}" + (", below the truth" if below else "")
        axes.annotate(text, (max(at, high), row), (9, 0), textcoords="offset points", va="center", color=color)
    axes.set_yticks(rows, names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(min(0.6 * high, 0.6 * min(values)), 1.25 * edge)
    axes.margins(y=0.12)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format of the file's ending; the same figure gives the same bytes.

    Raises:
        ValueError: if the ending is not svg, png or pdf.
    """
    kind = check_format(path)
    no_metadata = NO_METADATA[kind]
    with matplotlib.rc_context(FILE_STYLE):
        figure.savefig(path, dpi=160, facecolor="white", metadata=no_metadata)


def check_format(path: str | os.PathLike[str]) -> str:
    """Returns the format of a file's ending.

    Raises:
        ValueError: if it is not svg, png or pdf.
    """
    kind = os.path.splitext(os.fspath(path))[1].lstrip(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"plot={os.fspath(path)!r} must end in .{', .'.join(FORMATS)}.")
    return kind


def _new(title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (5.6, 3.8)) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(FILE_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")  # a title may be wider than the axes
        axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _grid(count: int, title: str, ylabel: str, *, row_height: float, margin: float, sharex: bool) -> tuple[Figure, Any]:
    """Returns a figure and its axes in rows of three; those beyond ``count`` are hidden."""
    rows = -(-count // 3)
    figure = Figure(figsize=(9.6, row_height * rows + margin), layout="constrained")
    grid = figure.subplots(rows, 3, sharex=sharex, sharey=True, squeeze=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    return figure, grid


def _tradeoffs(axes: Axes, curves: Mapping[str, TradeOff | Bracket[Any]]) -> None:
    """Draws trade-off functions in percent, and blind guessing."""
    axes.plot([0, 100], [100, 0], color=FILE_FAINT, linewidth=1.2, linestyle=(0, (4, 3)), label="blind guessing")
    for (name, curve), (color, dash) in zip(curves.items(), _looks(), strict=False):
        alpha, low, high = _sampled(curve)
        if not isinstance(curve, TradeOff):
            axes.fill_between(100 * alpha, 100 * low, 100 * high, color=color, alpha=0.25, linewidth=0)
        axes.plot(100 * alpha, 100 * low, color=color, linestyle=dash, label=name)
    axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal")


def _looks() -> Iterator[tuple[str, Any]]:
    """Yields a color and a dash for each curve: 36 different pairs, then the same again."""
    for number in count():
        turn, place = divmod(number, len(FILE_COLORS))
        yield FILE_COLORS[place], DASHES[(place + turn) % len(DASHES)]


def _sampled(curve: TradeOff | Bracket[Any]) -> tuple[Array, Array, Array]:
    """Returns α and both bounds of f there: dense near 0, where f is steep, and by symmetry near its end."""
    low, high = (curve, curve) if isinstance(curve, TradeOff) else curve
    small = np.geomspace(1e-4, 0.05, 40)
    steep = [np.asarray(side.inverse()(small)) for side in (low, high)]
    corners = [side.corners[0] for side in (low, high) if side.corners is not None and len(side.corners[0]) < 100]
    alpha = np.unique(np.concatenate([[0.0], small, np.linspace(0.05, 1, 96), *steep, *corners]))
    return alpha, np.asarray(low(alpha)), np.asarray(high(alpha))


def _lines(axes: Axes, curves: Mapping[str, tuple[Array, Array | Bracket[Array]]]) -> None:
    for (name, (x, y)), (color, dash) in zip(curves.items(), _looks(), strict=False):
        if isinstance(y, Bracket):
            axes.fill_between(x, y.low, y.high, color=color, alpha=0.25, linewidth=0)
        axes.plot(x, y.high if isinstance(y, Bracket) else y, color=color, linestyle=dash, label=name)


def _note(axes: Axes, mark: Mark, place: tuple[float, float]) -> None:
    """Draws a point, and its text ``place`` printer's points away at the end of a thin line."""
    axes.plot([mark.x], [mark.y], "o", color=FILE_INK, markersize=5, zorder=5, clip_on=False)
    align: dict[str, Any] = {"ha": "left" if place[0] > 0 else "right", "va": "bottom" if place[1] > 0 else "top"}
    line = {"arrowstyle": "-", "color": FILE_FAINT, "linewidth": 0.8}
    axes.annotate(mark.text, (mark.x, mark.y), place, textcoords="offset points", fontsize=9, arrowprops=line, **align)
