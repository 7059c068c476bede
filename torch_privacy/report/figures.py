# SPDX-License-Identifier: Apache-2.0
"""Pictures of trade-off functions and of profiles. The only module of this folder that needs matplotlib.

Every function takes curves by name and returns a figure, which `save` writes as SVG, PNG or PDF.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, LogFormatterMathtext

from ..privacy.bracket import Array, Bracket
from ..privacy.tradeoff import TradeOff

FORMATS = ("svg", "png", "pdf")
INK, FAINT = "#1c1c1c", "#8a8a8a"
COLORS = ("#0067a8", "#b84a00", "#00785a", "#8a4f9e", "#6b5b00", "#a3002c")  # told apart by the color-blind, too
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MANY = 4  # curves, beyond which their names stand beside the picture
POWERS = 1e6  # range of a logarithmic axis, beyond which powers of ten are written as such
LABELED = 2, 0.5  # decades of a logarithmic axis up to which numbers between powers of ten are written
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "torch_privacy",  # the same picture is the same file
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "lines.linewidth": 2,
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}


class Mark(NamedTuple):
    """A point of a plot that is worth a word."""

    x: float
    y: float
    text: str


def tradeoff_plot(
    curves: Mapping[str, TradeOff | Bracket[Any]],
    *,
    title: str = "What an attacker can do",
    marks: Sequence[Mark] = (),
) -> Figure:
    """Members missed at each rate of false alarms; the area between the two sides of a bracket is filled.

    Args:
        curves: trade-off functions, or brackets of them, by the name that the legend shows.
        title: above the picture.
        marks: points to name, in error rates.
    """
    figure, axes = _new(title, "false alarms (%)", "members missed (%)", size=(4.8, 4.4))
    _tradeoffs(axes, curves)
    for mark in marks:
        _note(axes, Mark(100 * mark.x, 100 * mark.y, mark.text), (80, 40))
    if len(curves) > 1:
        axes.legend(frameon=False, loc="upper right")
    return figure


def tradeoff_panels(panels: Mapping[str, Mapping[str, TradeOff | Bracket[Any]]], *, title: str) -> Figure:
    """Several `tradeoff_plot` side by side, three to a line, by the name above each; they share one legend."""
    lines = -(-len(panels) // 3)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.4 * lines + 0.5), layout="constrained")
        grid = figure.subplots(lines, 3, sharex=True, sharey=True, squeeze=False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        for axes, (name, curves) in zip(grid.flat, panels.items(), strict=False):
            _tradeoffs(axes, curves)
            axes.set_title(name, fontsize=10, loc="left")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[-1]:
            axes.set_xlabel("false alarms (%)")
        for axes in grid[:, 0]:
            axes.set_ylabel("members missed (%)")
        handles, names = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def epsilon_plot(
    curves: Mapping[str, tuple[Array, Array | Bracket[Array]]], *, title: str, xlabel: str = "epoch"
) -> Figure:
    """ε over epochs, or over whatever else grows; each curve is (x, ε), or (x, bracket of ε)."""
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
    """Anything over anything; each curve is (x, y), or (x, bracket of y)."""
    figure, axes = _new(title, xlabel, ylabel)
    _lines(axes, curves)
    for log, axis, scale in ((log_x, axes.xaxis, axes.set_xscale), (log_y, axes.yaxis, axes.set_yscale)):
        if log:
            scale("log")
            least, most = axis.get_view_interval()
            formatter = LogFormatterMathtext if most > POWERS * least else LogFormatter
            axis.set_major_formatter(formatter(minor_thresholds=LABELED))
            axis.set_minor_formatter(formatter(minor_thresholds=LABELED))
    if len(curves) > MANY:
        figure.legend(frameon=False, loc="outside right upper")
    else:
        axes.legend(frameon=False)
    return figure


def panels_plot(panels: Mapping[str, tuple[Array, Array]], *, title: str, ylabel: str) -> Figure:
    """One line of (x, y) each, three panels to a line, by the name of x; all share the axis of y."""
    lines = -(-len(panels) // 3)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.8 * lines + 0.4), layout="constrained")
        grid = figure.subplots(lines, 3, sharey=True, squeeze=False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        for axes, (name, (x, y)) in zip(grid.flat, panels.items(), strict=False):
            axes.plot(x, y, marker="o", color=COLORS[0])
            axes.set_xlabel(name)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(ylabel)
    return figure


def profile_plot(
    curves: Mapping[str, tuple[Array, Array | Bracket[Array]]],
    *,
    title: str = "Epsilon at every delta",
    marks: Sequence[Mark] = (),
) -> Figure:
    """ε over δ, on a logarithmic axis; each curve is (δ, ε), or (δ, bracket of ε)."""
    figure, axes = _new(title, "delta", "epsilon")
    _lines(axes, curves)
    for mark in marks:
        _note(axes, mark, (-24, -48))
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def noise_plot(noise: Array, epsilon: Bracket[Array], chosen: Mark, target: float, *, title: str) -> Figure:
    """ε over the noise multiplier, the target as a line, and the noise that was chosen."""
    figure, axes = _new(title, "noise multiplier", "epsilon")
    _lines(axes, {"certified": (noise, epsilon)})
    axes.axhline(target, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    _note(axes, chosen, (24, 18))
    axes.set_ylim(bottom=0)
    return figure


def claims_plot(names: Sequence[str], values: Sequence[float], certified: Bracket[float], *, title: str) -> Figure:
    """Each accountant's ε as a point, the certified one as a line across; red below it, an arrow far above it."""
    figure, axes = _new(title, "epsilon", "", size=(6.4, 0.42 * len(names) + 1.3))
    low, high = certified
    rows = np.arange(len(names))[::-1]
    axes.axvspan(low, high, color=COLORS[0], alpha=0.3, linewidth=0)
    axes.axvline(high, color=COLORS[0], linewidth=1.2)
    edge = 2 * high
    for row, value in zip(rows, values, strict=True):
        below, at = value < low, min(value, edge)
        color = COLORS[5] if below else INK
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
    """Write a figure, its format by the name's ending; the same figure makes the same bytes.

    Raises:
        ValueError: the ending is none of svg, png and pdf.
    """
    kind = check_format(path)
    nothing = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=160, facecolor="white", metadata=nothing)


def check_format(path: str | os.PathLike[str]) -> str:
    """The format that a file's name asks for.

    Raises:
        ValueError: it is none of svg, png and pdf.
    """
    kind = os.path.splitext(os.fspath(path))[1].lstrip(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"plot={os.fspath(path)!r} must end in .{', .'.join(FORMATS)}.")
    return kind


def _new(title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (5.6, 3.8)) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")  # may be wider than the axes
        axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _tradeoffs(axes: Axes, curves: Mapping[str, TradeOff | Bracket[Any]]) -> None:
    """Trade-off functions in percent, and blind guessing."""
    axes.plot([0, 100], [100, 0], color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), label="blind guessing")
    for (name, curve), color, dash in zip(curves.items(), _cycled(COLORS), _cycled(DASHES), strict=False):
        alpha, low, high = _sampled(curve)
        if not isinstance(curve, TradeOff):
            axes.fill_between(100 * alpha, 100 * low, 100 * high, color=color, alpha=0.25, linewidth=0)
        axes.plot(100 * alpha, 100 * low, color=color, linestyle=dash, label=name)
    axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal")


def _cycled(values: Sequence[Any]) -> Sequence[Any]:
    return [*values] * 4


def _sampled(curve: TradeOff | Bracket[Any]) -> tuple[Array, Array, Array]:
    """α, and both sides of f there: dense near 0, where f is steep, and by symmetry near its end."""
    low, high = (curve, curve) if isinstance(curve, TradeOff) else curve
    small = np.geomspace(1e-4, 0.05, 40)
    steep = [np.asarray(side.inverse()(small)) for side in (low, high)]
    corners = [side.corners[0] for side in (low, high) if side.corners is not None and len(side.corners[0]) < 100]
    alpha = np.unique(np.concatenate([[0.0], small, np.linspace(0.05, 1, 96), *steep, *corners]))
    return alpha, np.asarray(low(alpha)), np.asarray(high(alpha))


def _lines(axes: Axes, curves: Mapping[str, tuple[Array, Array | Bracket[Array]]]) -> None:
    for (name, (x, y)), color, dash in zip(curves.items(), _cycled(COLORS), _cycled(DASHES), strict=False):
        if isinstance(y, Bracket):
            axes.fill_between(x, y.low, y.high, color=color, alpha=0.25, linewidth=0)
        axes.plot(x, y.high if isinstance(y, Bracket) else y, color=color, linestyle=dash, label=name)


def _note(axes: Axes, mark: Mark, place: tuple[float, float]) -> None:
    """A point, and its text so many printer's points away, at the end of a thin line."""
    axes.plot([mark.x], [mark.y], "o", color=INK, markersize=5, zorder=5, clip_on=False)
    align: dict[str, Any] = {"ha": "left" if place[0] > 0 else "right", "va": "bottom" if place[1] > 0 else "top"}
    line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.8}
    axes.annotate(mark.text, (mark.x, mark.y), place, textcoords="offset points", fontsize=9, arrowprops=line, **align)
