# SPDX-License-Identifier: Apache-2.0
"""Several trainings over one another: scores, epsilons, trade-off functions and profiles, in the page's colors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from torch_privacy.report.training_plots import COLORS, FAINT, as_svg, new_axes, plot_course, score_axes

if TYPE_CHECKING:
    from torch_privacy.report.render import Training

DASHES = ("-", "--", ":", "-.")
APART = 50  # ratio of epsilons


def draw(runs: Sequence[Training]) -> Iterator[str]:
    """All pictures, as ``<svg>`` elements; a score plot for each kind of score."""
    for measure in dict.fromkeys(run.measure for run in runs):
        figure, axes = score_axes(measure)
        for run, style in _styled(runs):
            if run.measure == measure:
                course = [row for row in run.rows if row.training == "private"]
                plot_course(axes, course, measure, **style)
        _legend(axes, runs)
        yield as_svg(figure)
    yield _epsilon_plot(runs)
    yield _tradeoff_plot(runs)
    yield _profile_plot(runs)


def _epsilon_plot(runs: Sequence[Training]) -> str:
    deltas = ", ".join(dict.fromkeys(f"{run.summary.delta:g}" for run in runs))
    figure, axes = new_axes("Privacy spent", "epoch", f"epsilon at delta = {deltas}")
    for run, style in _styled(runs):
        spent = [(row.epoch, row.epsilon_high) for row in run.rows if row.epsilon_high is not None]
        axes.plot(*np.array(spent, float).reshape(-1, 2).T, **style)
    _scale_epsilons(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return as_svg(figure)


def _tradeoff_plot(runs: Sequence[Training]) -> str:
    figure, axes = new_axes("What an attacker can do", "false positives (%)", "members missed (%)")
    alpha = np.concatenate([[0.0], np.geomspace(1e-4, 0.05, 40), np.linspace(0.06, 1, 80)])
    axes.plot([0, 100], [100, 0], color=FAINT, linestyle="--", linewidth=1.2)
    for run, style in _styled(runs):
        axes.plot(100 * alpha, 100 * run.profile.tradeoff(alpha).low, **style)
    axes.set(xlim=(0, 100), ylim=(0, 100))
    return as_svg(figure)


def _profile_plot(runs: Sequence[Training]) -> str:
    figure, axes = new_axes("Epsilon at every delta", "delta", "epsilon")
    delta = np.geomspace(1e-9, 1e-2, 15)
    for run, style in _styled(runs):
        axes.plot(delta, [run.profile.epsilon_high(float(d)) for d in delta], **style)
    axes.set_xscale("log")
    _scale_epsilons(axes)
    return as_svg(figure)


def _scale_epsilons(axes: Axes) -> None:
    """From zero; or by powers of ten where the runs are so far apart that only one could be read."""
    courses = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    largest = [max(y[np.isfinite(y)], default=0) for y in courses]
    if max(largest, default=0) > APART * min((y for y in largest if y > 0), default=np.inf):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _styled(runs: Sequence[Training]) -> Iterator[tuple[Training, dict[str, Any]]]:
    """Every run with its color and dash, the same in all plots."""
    dashes = (dash for dash in cycle(DASHES) for _ in COLORS)
    for run, color, dash in zip(runs, cycle(COLORS), dashes, strict=False):
        yield run, {"color": color, "linestyle": dash, "label": run.name}


def _legend(axes: Axes, runs: Sequence[Training]) -> None:
    axes.margins(y=0.15)
    axes.legend(frameon=False, labelcolor="linecolor", fontsize=8 if len(runs) > 6 else 9, handlelength=1.6)
