# SPDX-License-Identifier: Apache-2.0
"""Draws the privacy of the trainings of Table 1: Bu, Dong, Long and Su (2020), Figures 2, 3 and A.1.

``torch-privacy reproduce gdp-figures`` draws epsilon against delta, epochs and noise, and delta over epochs (Figure 2),
the trade-off function of each line of Table 1 (Figure 3), what sampling is worth by f-DP and by the older bound, and
the composed trade-off function of one epoch against its Gaussian limit (Figure A.1). The paper: for mu = 0.57 type I
and type II errors add to at least 77.6 % by the central limit theorem and to 9.4 % by the moments accountant; after one
epoch function and limit are "almost identical". Certified curves are added.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from torch_privacy import privacy
from torch_privacy.experiments.study import Study
from torch_privacy.privacy import Bracket, tradeoff
from torch_privacy.privacy.summary import compose_steps, equal_releases
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import CLT, EXACT, MOMENTS, MU, PRIVACY_COLUMNS, Computation, Context, Numbers, TableColumn
from torch_privacy_papers.bu2020.table1 import DELTA, PROBABILITY, TABLE, PrintedSetting

SUM_CLT, SUM_MOMENTS, SUM_EXACT = "errors_clt", "errors_moments", "errors"
GAP = "gap"
COLUMNS = {
    **PRIVACY_COLUMNS,
    SUM_CLT: TableColumn("errors, CLT", digits=1, percent=True),
    SUM_MOMENTS: TableColumn("errors, moments", digits=1, percent=True),
    SUM_EXACT: TableColumn("errors, certified", digits=1, percent=True),
    GAP: TableColumn("off its limit", digits=1, percent=True),
}
PAPER_SUMS = {1.1: {SUM_CLT: 0.776, SUM_MOMENTS: 0.094}}
NOTES = (
    "errors: the smallest sum of false positive and false negative rate of any attack; 100 % is blind guessing.",
    "off its limit: the largest distance of the composed trade-off function of one epoch from G_mu; the sampling "
    "probability is enlarged so that mu is that of all 60 epochs.",
)
ONE_EPOCH = 234  # steps
NOISE_OF_FIGURE_2, EPOCHS_OF_FIGURE_2 = 0.7, 45
EPSILON_OF_FIGURE_2, LEAST_DELTA = 5.0, 1e-12  # of the panel of delta, of which the text says nothing more
UNSAMPLED = 3.0, 0.05, 0.25  # epsilon, delta, sampling probability: large enough to see the difference


def rows(quick: bool) -> Sequence[Computation]:
    """Returns the six lines of Table 1, and the second after one epoch."""
    lines = [
        Computation(
            line.name,
            partial(errors_of, line),
            {MU: line.mu, CLT: line.clt, MOMENTS: line.moments, **PAPER_SUMS.get(line.noise_multiplier, {})},
        )
        for line in TABLE
    ]
    return [*lines, Computation("sigma 1.1, one epoch", distance_from_limit)]


def errors_of(line: PrintedSetting, context: Context) -> Numbers:
    """Returns the epsilons of a line of Table 1, and the smallest sum of errors by each accountant."""
    setting = line.noise_multiplier, PROBABILITY, line.num_steps
    limit, moments, profile = (
        privacy.clt(equal_releases(*setting)),
        privacy.moments_of(equal_releases(*setting), DELTA),
        compose_steps(*setting),
    )
    advantage = profile.advantage()
    return {
        MU: limit.mu,
        CLT: limit.epsilon(DELTA),
        MOMENTS: moments,
        EXACT: profile.epsilon(DELTA),
        SUM_CLT: least_sum(tradeoff.Gaussian(limit.mu)),
        SUM_MOMENTS: least_sum(tradeoff.EpsilonDelta(moments, DELTA)),
        SUM_EXACT: Bracket(1 - advantage.high, 1 - advantage.low),
    }


def least_sum(curve: tradeoff.TradeOff) -> float:
    """Returns the smallest sum of both errors, 1 - delta(0)."""
    return 1 - float(curve.delta(0.0))


def early() -> tuple[privacy.Profile, tradeoff.Gaussian]:
    """Returns one epoch of the second line, with more sampling to reach the mu of all epochs, and its limit."""
    setting = 1.1, sqrt(60) * PROBABILITY, ONE_EPOCH
    return compose_steps(*setting), tradeoff.Gaussian(privacy.clt(equal_releases(*setting)).mu)


def distance_from_limit(context: Context) -> Numbers:
    """Returns the largest distance of the composed trade-off function, in the paper's direction, from its limit."""
    profile, limit = early()
    alpha = np.linspace(0, 1, 1001)
    low, high = profile.tradeoff(alpha, "remove")
    distances = np.abs(np.array([low, high]) - limit(alpha))
    inside = np.where((low <= limit(alpha)) & (limit(alpha) <= high), 0.0, distances.min(0))
    return {MU: limit.mu, GAP: Bracket(float(inside.max()), float(distances.max()))}


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws Figures 2, 3 and A.1."""
    return {**_figure_2(results["quick"]), **_figure_3(), "figure-A1": _figure_a1(), "sampling": _sampling()}


def _figure_2(quick: bool) -> dict[str, plots.Figure]:
    """Draws epsilon of the third line against delta, epochs and noise."""
    points = 10 if quick else 30
    deltas, epochs = np.geomspace(1e-10, 1e-2, points), np.linspace(1, EPOCHS_OF_FIGURE_2, points)
    noises, last = np.geomspace(0.55, 1.5, points), round(EPOCHS_OF_FIGURE_2 / PROBABILITY)
    noise = NOISE_OF_FIGURE_2
    by_delta = [(noise, last, float(d)) for d in deltas]
    by_epoch = [(noise, round(float(e) / PROBABILITY), DELTA) for e in epochs]
    by_noise = [(float(s), last, DELTA) for s in noises]
    steps, at = f"Noise multiplier {noise:g}, {EPOCHS_OF_FIGURE_2} epochs", f"delta = {DELTA:g}"
    return {
        "figure-2-delta": plots.profile_plot(_curves(deltas, by_delta), title=steps),
        "figure-2-epochs": plots.epsilon_plot(_curves(epochs, by_epoch), title=f"Noise multiplier {noise:g}, {at}"),
        "figure-2-noise": plots.epsilon_plot(
            _curves(noises, by_noise), title=f"{EPOCHS_OF_FIGURE_2} epochs, {at}", xlabel="noise multiplier"
        ),
        "figure-2-delta-epochs": plots.curves_plot(
            _deltas(epochs),
            title=f"Noise multiplier {noise:g}, epsilon = {EPSILON_OF_FIGURE_2:g}",
            ylabel="delta",
            log_y=True,
        ),
    }


def _deltas(epochs: np.ndarray) -> dict[str, Any]:
    """Returns delta by every accountant after each number of epochs, at one epsilon."""
    settings = [(NOISE_OF_FIGURE_2, PROBABILITY, round(float(e) / PROBABILITY)) for e in epochs]
    epsilon = EPSILON_OF_FIGURE_2
    low, high = np.array([compose_steps(*setting).delta(epsilon) for setting in settings], float).T
    steps = [equal_releases(*setting) for setting in settings]
    return {
        "certified": (epochs, Bracket(_shown(low), _shown(high))),
        "CLT: an approximation, no bound": (epochs, _shown([float(privacy.clt(s).delta(epsilon)) for s in steps])),
        "moments accountant": (epochs, _shown([privacy.moments_delta(s, epsilon) for s in steps])),
    }


def _shown(deltas: Any) -> np.ndarray:
    """Returns the deltas; not a number for those that are too small to draw."""
    deltas = np.asarray(deltas, float)
    return np.where(deltas >= LEAST_DELTA, deltas, np.nan)


def _sampling() -> plots.Figure:
    """Draws a mechanism's trade-off function, that on a sample, and the (epsilon, delta) pair of the older bound."""
    epsilon, delta, probability = UNSAMPLED
    whole = tradeoff.EpsilonDelta(epsilon, delta)
    older = tradeoff.EpsilonDelta(float(privacy.sampled_epsilon(np.array(epsilon), probability)), probability * delta)
    curves = {
        f"on all data: ({epsilon:g}, {delta:g})-private": whole,
        f"on a sample of {100 * probability:g} %": tradeoff.symmetrized(tradeoff.subsampled(whole, probability)),
        "on the sample, by the older bound": older,
    }
    return plots.tradeoff_plot(curves, title="What sampling is worth")


def _curves(x: np.ndarray, settings: Sequence[tuple[float, int, float]]) -> dict[str, Any]:
    """Returns epsilon by every accountant for each (noise multiplier, steps, delta)."""
    exact = [compose_steps(s, PROBABILITY, t).epsilon(d) for s, t, d in settings]
    low, high = np.array(exact, float).T
    return {
        "certified": (x, Bracket(low, high)),
        "CLT: an approximation, no bound": (
            x, np.array([privacy.clt(equal_releases(s, PROBABILITY, t)).epsilon(d) for s, t, d in settings]),
        ),
        "moments accountant": (
            x, np.array([privacy.moments_of(equal_releases(s, PROBABILITY, t), d) for s, t, d in settings]),
        ),
    }  # fmt: skip


def _figure_3() -> dict[str, plots.Figure]:
    """Draws every line's trade-off function: certified, by CLT, and by moments at one delta or at all deltas."""
    at_one, at_all = {}, {}
    for line in TABLE:
        setting = line.noise_multiplier, PROBABILITY, line.num_steps
        steps = equal_releases(*setting)
        known = {
            "certified": compose_steps(*setting).tradeoffs["symmetrized"],
            "CLT": tradeoff.Gaussian(privacy.clt(steps).mu),
        }
        name = f"{line.name}: accuracy {100 * line.accuracy:.1f} %"
        epsilon = privacy.moments_of(steps, DELTA)
        at_one[name] = {**known, f"moments, delta = {DELTA:g}": tradeoff.EpsilonDelta(epsilon, DELTA)}
        at_all[name] = {**known, "moments, all pairs": _highest([
            tradeoff.EpsilonDelta(privacy.moments_of(steps, float(d)), float(d)) for d in np.geomspace(1e-12, 0.5, 60)
        ])}  # fmt: skip
    return {
        "figure-3-one-delta": plots.tradeoff_panels(at_one, title="One pair (epsilon, delta) against the whole curve"),
        "figure-3-all-pairs": plots.tradeoff_panels(at_all, title="All pairs that the moments accountant gives"),
    }


def _highest(curves: Sequence[tradeoff.TradeOff]) -> tradeoff.TradeOff:
    """Returns the pointwise maximum of several trade-off functions on a fine grid; it holds if all of them do."""
    alpha = np.unique(np.concatenate([np.geomspace(1e-6, 1, 400), np.linspace(0, 1, 400)]))
    return tradeoff.PiecewiseLinear(alpha, np.max([np.asarray(curve(alpha)) for curve in curves], axis=0))


def _figure_a1() -> plots.Figure:
    """Draws one epoch and its limit."""
    profile, limit = early()
    curves = {f"{ONE_EPOCH} steps, composed": profile.tradeoffs["remove"], f"G_mu, mu = {limit.mu:.2f}": limit}
    return plots.tradeoff_plot(curves, title="The limit after one epoch")


STUDY = Study(COLUMNS, rows, NOTES, delta=DELTA, figures=figures)
