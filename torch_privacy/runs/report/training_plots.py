# SPDX-License-Identifier: Apache-2.0
"""Draws the plots of a report, as inline SVG in the page's colors: one training, or several in the same axes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torch_privacy import privacy
from torch_privacy.privacy.rounding import round_down, round_up, short
from torch_privacy.privacy.summary import FALSE_POSITIVE_RATE, FALSE_POSITIVES, Summary, releases_from_json, summarize
from torch_privacy.runs.agreement import check_ledger
from torch_privacy.runs.folder import NO_DIGESTS
from torch_privacy.runs.metrics import Measure, Metrics
from torch_privacy.runs.report.style import PAGE_COLORS, PAGE_FAINT, PAGE_INK, PAGE_STYLE, PAGE_VARIABLES
from torch_privacy.support.units import ITEM

if TYPE_CHECKING:
    from torch_privacy.runs.folder import RunFolder

Point = tuple[float, float]
COURSE_DASHES = ("-", "--", ":", "-.")
SMALLEST_AXIS = 1e-6  # matplotlib cannot draw a much smaller epsilon
LOG_RATIO = 50  # ratio of the runs' epsilons beyond which their axis is logarithmic
ALPHAS = np.concatenate([[0.0], np.geomspace(1e-4, 0.05, 40), np.linspace(0.06, 1, 80)])
DELTAS = np.geomspace(1e-9, 1e-2, 15)  # the curves are smooth, and the moments accountant is slow
FIRST, SECOND, THIRD = PAGE_COLORS[:3]
NOT_PRIVATE = "NOT PRIVATE"
SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


@dataclass(frozen=True)
class Training:
    """A finished training, as stored in its run folder: one of an experiment, or one in a loop of the user's own.

    Only the trainings of experiments have a test score after each epoch.
    """

    name: str
    results: dict[str, Any]
    measure: Measure | None  # of the test score after each epoch; None in a loop of one's own
    rows: list[Metrics]
    summary: Summary
    profile: privacy.Profile
    statement: dict[str, Any]
    scores: list[TestScore]  # on test data, after training
    subject: str  # file of the table, or experiment; "" in a loop of one's own

    @classmethod
    def read(cls, folder: RunFolder, name: str | None = None) -> Training:
        """Reads a run folder; raises a ``ValueError`` if a file is damaged."""
        results = folder.read_results()
        if "privacy" not in results:
            raise ValueError(f"{folder.path}: is a row of an experiment, it is no finished training. Name a whole run.")
        stated = results["privacy"]
        try:
            releases = releases_from_json(stated)
            summary = summarize(releases, stated["delta"])
        except (ValueError, ArithmeticError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{folder.results}: states releases that cannot be priced ({reason}).") from None
        digests = results.get("files", NO_DIGESTS)
        measure = Measure(**results["score"]) if "score" in results else None
        rows, statement = folder.read_metrics(digests), folder.read_statement(digests)
        check_ledger(folder, statement, releases, digests)
        if measure is not None and any(row.test_score is None or row.loss is None for row in rows):
            raise ValueError(f"{folder.metrics}: a line has no loss or no test score; the file is damaged.")
        name = (name or folder.path.absolute().name) + (f", {NOT_PRIVATE}" if statement.get("warning") else "")
        profile = privacy.compose(releases)
        subject = folder.read_settings(digests).get("file") or results.get("experiment", "")
        return cls(name, results, measure, rows, summary, profile, statement, scores_of(results), subject)

    @property
    def warning(self) -> str:
        """Returns NOT PRIVATE and the reason; empty for a private training."""
        return self.statement.get("warning") or ""

    @property
    def is_own(self) -> bool:
        """True if the training ran in a loop of the user's own."""
        return self.measure is None

    @property
    def unit(self) -> str:
        """Returns what one protected unit is, in words."""
        if "owner" in self.statement:
            return f"one {self.statement['owner']}"
        unit = self.statement["unit"].strip().rstrip(".")
        return unit if unit and unit != ITEM else "one example"


@dataclass(frozen=True)
class TestScore:
    """A test score of the private training, and that of the same network trained without privacy."""

    measure: Measure
    value: float | None  # None if it is not finite
    baseline: float | None = None
    has_baseline: bool = False


def scores_of(results: dict[str, Any]) -> list[TestScore]:
    """Returns the test scores in a ``results.json``."""
    if "score" in results:
        baseline = results["baseline_test_score"]
        return [TestScore(Measure(**results["score"]), results["test_score"], baseline, baseline is not None)]
    scores, baselines = results["scores"], results["baseline_scores"]
    return [
        TestScore(
            measure_of(name, [scores.get(name), baselines.get(name)]), value, baselines.get(name), name in baselines
        )
        for name, value in scores.items()
    ]


def measure_of(name: str, values: Sequence[float | None]) -> Measure:
    """Returns how to show scores by this name; accuracies between 0 and 1 are shown in percent.

    Example:
        >>> measure_of("eval_accuracy", [0.84]).text(0.84), measure_of("loss", [0.41]).text(0.41)
        ('84.0 %', '0.410')
    """
    is_share = re.search("accuracy|^acc$|_acc$", name.lower()) is not None
    return Measure(name, percent=is_share and all(0 <= value <= 1 for value in values if value is not None))


def score_plot(rows: Sequence[Metrics], measure: Measure) -> str:
    """Draws the test score of the private and the non-private training over epochs."""
    figure, axes = score_axes(measure)
    for training, color in {"private": FIRST, "non-private": SECOND}.items():
        course = [row for row in rows if row.training == training]
        if course:
            draw_course(axes, course, measure, color=color)
    _label_ends(axes, rows, measure)
    axes.margins(y=0.15)
    return as_svg(figure)


def loss_axes() -> tuple[Figure, Axes]:
    """Returns the axes of the training loss over epochs."""
    figure, axes = new_axes("Training loss (not private)", "epoch", "mean loss")
    whole_numbers(axes.xaxis)
    return figure, axes


def loss_plot(rows: Sequence[Metrics]) -> str:
    """Draws the mean training loss of each epoch; epochs without one, or with one that is not finite, are left out."""
    figure, axes = loss_axes()
    draw_losses(axes, rows, color=FIRST)
    if shown := list(_losses(rows)):
        falls = len(shown) > 1 and shown[-1][1] < shown[-2][1]
        shift, align = ((0, -8), "top") if falls else ((0, 8), "bottom")
        _label(axes, f"{shown[-1][1]:.3g}", shown[-1], shift, FIRST, ha="right", va=align)
    else:
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", color=PAGE_INK)
    axes.margins(y=0.15)
    return as_svg(figure)


def _losses(rows: Sequence[Metrics]) -> Iterator[Point]:
    for row in rows:
        if row.training == "private" and row.loss is not None and np.isfinite(row.loss):
            yield row.epoch, row.loss


def draw_losses(axes: Axes, rows: Sequence[Metrics], **style: Any) -> None:
    """Draws one training's mean loss of every epoch."""
    shown = np.array(list(_losses(rows)), float).reshape(-1, 2)
    axes.plot(*shown.T, **_markers(len(shown)), **style)


def _markers(count: int) -> dict[str, Any]:
    """Returns the style of points on a curve, unless there are too many."""
    return {"marker": "o", "markersize": 3} if count <= 60 else {}


def score_axes(measure: Measure) -> tuple[Figure, Axes]:
    """Returns the axes of a test score over epochs."""
    name = measure.name[0].upper() + measure.name[1:]
    figure, axes = new_axes(f"{name} on held-out examples", "epoch", f"test {measure.name}{' (%)' * measure.percent}")
    whole_numbers(axes.xaxis)
    return figure, axes


def draw_course(axes: Axes, rows: Sequence[Metrics], measure: Measure, **style: Any) -> None:
    """Draws one training's test score after every epoch."""
    values = [(100 if measure.percent else 1) * row.test_score for row in rows if row.test_score is not None]
    axes.plot([row.epoch for row in rows], values, marker="o", markersize=3, **style)


def epsilon_plot(rows: Sequence[Metrics], delta: float) -> str:
    """Draws the epsilon spent over epochs, as a certified interval."""
    figure, axes = new_axes("Privacy spent", "epoch", f"epsilon at delta = {short(delta)}")
    rows = [row for row in rows if row.training == "private" and row.epsilon_high is not None]
    epochs = [row.epoch for row in rows]
    if not rows:
        return as_svg(figure)
    low, high = (np.array([getattr(row, end) for row in rows], float) for end in ("epsilon_low", "epsilon_high"))
    axes.fill_between(epochs, low, high, color=FIRST, alpha=0.25, linewidth=0)
    axes.plot(epochs, high, color=FIRST, **_markers(len(rows)))
    _label(axes, f"at most {round_up(float(high[-1]))}", (epochs[-1], float(high[-1])), (-6, 6), FIRST, ha="right")
    axes.set_ylim(0, max(1.15 * max(high[np.isfinite(high)], default=1), SMALLEST_AXIS))
    whole_numbers(axes.xaxis)
    return as_svg(figure)


def tradeoff_plot(profile: privacy.Profile, summary: Summary) -> str:
    """Draws the share of members that an attacker misses at each false positive rate, next to perfect privacy."""
    figure, axes = tradeoff_axes("What an attacker can do", "false positives (%)", "members missed (%)")
    curve = profile.tradeoff(ALPHAS)
    write_along(axes, "perfect privacy")
    axes.fill_between(100 * ALPHAS, 100 * curve.low, 100 * curve.high, color=FIRST, alpha=0.25, linewidth=0)
    axes.plot(100 * ALPHAS, 100 * curve.low, color=FIRST)
    missed = 100 * (1 - summary.true_positive_rate_high)
    axes.plot([100 * FALSE_POSITIVE_RATE], [missed], "o", color=SECOND, clip_on=False, zorder=5)
    label = f"at {FALSE_POSITIVES} false positives\nat least {round_down(missed, 1)} % are missed"
    axes.plot([100 * FALSE_POSITIVE_RATE, 44], [missed, 88], color=SECOND, linewidth=0.8)
    axes.text(46, 88, label, color=SECOND, va="center")
    return as_svg(figure)


def tradeoff_axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Returns the axes of two error rates in percent, with the line of an attacker who guesses blindly."""
    figure, axes = new_axes(title, xlabel, ylabel)
    axes.plot([0, 100], [100, 0], color=PAGE_FAINT, linestyle="--", linewidth=1.2)
    axes.set(xlim=(0, 100), ylim=(0, 100))
    return figure, axes


def write_along(axes: Axes, text: str) -> None:
    """Writes a text along the line of an attacker who guesses blindly."""
    along = {"rotation": -45, "transform_rotates_text": True, "rotation_mode": "anchor", "ha": "center"}
    axes.text(72, 31, text, color=PAGE_INK, **along)


def profile_plot(profile: privacy.Profile, summary: Summary) -> str:
    """Draws epsilon over delta: certified, by the central limit theorem, and by the moments accountant."""
    figure, axes = new_axes("Epsilon at every delta", "delta", "epsilon")
    low, high = np.array([profile.epsilon(float(d)) for d in DELTAS], float).T
    axes.fill_between(DELTAS, low, high, color=FIRST, alpha=0.25, linewidth=0)
    axes.plot(DELTAS, high, color=FIRST, label="certified interval")
    if summary.clt_epsilon is not None:
        limit = privacy.clt(summary.releases)
        approximation = [limit.epsilon(float(d)) for d in DELTAS]
        axes.plot(DELTAS, approximation, color=SECOND, linestyle="--", label="CLT: approximation, not a bound")
    if summary.moments_epsilon is not None:
        moments = [privacy.moments_of(summary.releases, float(d)) for d in DELTAS]
        axes.plot(DELTAS, moments, color=THIRD, linestyle=":", label="moments accountant")
    axes.plot([summary.delta], [summary.epsilon_high], "o", color=FIRST)
    _scale_deltas(axes)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", nbins=6)
    axes.legend(frameon=False, labelcolor="linecolor", loc="lower left", handlelength=2.4)
    return as_svg(figure)


def _scale_deltas(axes: Axes) -> None:
    """Makes the axis of delta logarithmic; its labels are plain text, as formulas take half a second to set."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"10{f'{np.log10(value):.0f}'.translate(SUPERSCRIPTS)}")


def page_style() -> AbstractContextManager[None]:
    """Returns a context in which plots have the page's style."""
    return matplotlib.rc_context(PAGE_STYLE)


def whole_numbers(axis: Axis) -> None:
    """Puts the ticks of an axis at whole numbers."""
    axis.set_major_locator(MaxNLocator(integer=True))


def new_axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Returns an empty plot in the page's style."""
    with page_style():
        figure = Figure(figsize=(4.6, 3.3), layout="constrained")
        axes = figure.subplots()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _label_ends(axes: Axes, rows: Sequence[Metrics], measure: Measure) -> None:
    """Labels each curve at its end, the higher one above and the lower one below."""
    last = {row.training: (row.test_score, row.epoch) for row in rows if row.test_score is not None}
    ends = sorted(last.items(), key=lambda end: end[1][0], reverse=True)
    for (training, (score, epoch)), (shift, align) in zip(ends, [(8, "bottom"), (-8, "top")], strict=False):
        color = FIRST if training == "private" else SECOND
        text, value = f"{training} {measure.text(score)}", (100 if measure.percent else 1) * score
        _label(axes, text, (epoch, value), (0, shift), color, ha="right", va=align)


def _label(axes: Axes, text: str, point: Point, shift: Point, color: str, **align: Any) -> None:
    """Writes text next to a point, ``shift`` printer's points away from it."""
    axes.annotate(text, point, shift, textcoords="offset points", color=color, **align)


def as_svg(figure: Figure) -> str:
    """Returns the figure as an ``<svg>`` element in the page's colors."""
    text = io.StringIO()
    no_metadata = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    with page_style():
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in PAGE_VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def overlay_plots(runs: Sequence[Training]) -> Iterator[str]:
    """Draws several trainings in the same axes, as ``<svg>`` elements.

    There is one plot for each kind of test score, and one for the losses of trainings without test scores per epoch.
    """
    if any(run.is_own for run in runs):
        figure, axes = loss_axes()
        for run, style in _styled(runs):
            if run.is_own:
                draw_losses(axes, run.rows, **style)
        _legend(axes, runs)
        yield as_svg(figure)
    for measure in dict.fromkeys(run.measure for run in runs if run.measure is not None):
        figure, axes = score_axes(measure)
        for run, style in _styled(runs):
            if run.measure == measure:
                course = [row for row in run.rows if row.training == "private"]
                draw_course(axes, course, measure, **style)
        _legend(axes, runs)
        yield as_svg(figure)
    yield _overlaid_epsilons(runs)
    yield _overlaid_tradeoffs(runs)
    yield _overlaid_profiles(runs)


def _overlaid_epsilons(runs: Sequence[Training]) -> str:
    deltas = ", ".join(dict.fromkeys(f"{short(run.summary.delta)}" for run in runs))
    figure, axes = new_axes("Privacy spent", "epoch", f"epsilon at delta = {deltas}")
    for run, style in _styled(runs):
        spent = [(row.epoch, row.epsilon_high) for row in run.rows if row.epsilon_high is not None]
        axes.plot(*np.array(spent, float).reshape(-1, 2).T, **style)
    scale_epsilons(axes)
    whole_numbers(axes.xaxis)
    return as_svg(figure)


def _overlaid_tradeoffs(runs: Sequence[Training]) -> str:
    figure, axes = tradeoff_axes("What an attacker can do", "false positives (%)", "members missed (%)")
    for run, style in _styled(runs):
        axes.plot(100 * ALPHAS, 100 * run.profile.tradeoff(ALPHAS).low, **style)
    return as_svg(figure)


def _overlaid_profiles(runs: Sequence[Training]) -> str:
    figure, axes = new_axes("Epsilon at every delta", "delta", "epsilon")
    for run, style in _styled(runs):
        axes.plot(DELTAS, [run.profile.epsilon_high(float(d)) for d in DELTAS], **style)
    _scale_deltas(axes)
    scale_epsilons(axes)
    return as_svg(figure)


def scale_epsilons(axes: Axes) -> None:
    """Starts the axis of epsilon at zero, or makes it logarithmic if the runs' epsilons differ by a large factor."""
    courses = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    largest = [max(y[np.isfinite(y)], default=0) for y in courses]
    if max(largest, default=0) > LOG_RATIO * min((y for y in largest if y > 0), default=np.inf):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _styled(runs: Sequence[Training]) -> Iterator[tuple[Training, dict[str, Any]]]:
    """Yields every run with its color and dashes, the same in all plots."""
    dashes = (dash for dash in cycle(COURSE_DASHES) for _ in PAGE_COLORS)
    for run, color, dash in zip(runs, cycle(PAGE_COLORS), dashes, strict=False):
        yield run, {"color": color, "linestyle": dash, "label": run.name}


def _legend(axes: Axes, runs: Sequence[Training]) -> None:
    axes.margins(y=0.15)
    axes.legend(frameon=False, labelcolor="linecolor", fontsize=8 if len(runs) > 6 else 9, handlelength=1.6)
