# SPDX-License-Identifier: Apache-2.0
"""Draws what few projections cost, without training: Bu, Gopi et al. (2021), Figures 2 and 3, and 8 of version 1.

``torch-privacy reproduce jl-figures`` computes the certified epsilon of DP-SGD-JL over the epochs, for every number of
projections and for exact norms, at three settings: MNIST (60,000 examples, batches of 256, noise multiplier 1.3) and
25,000 examples in batches of 64 at noise multiplier 0.5, both for 5 epochs (Figure 8 of version 1), and the LSTM on
IMDb (25,000, 256, 0.6) for 20 epochs (Figure 3 of version 2). It also draws the density of an estimated norm relative
to the norm, chi_r / sqrt(r) (Figure 2). The paper prints these figures without numbers. Version 1 says that epsilon is
not monotone in the number of projections, version 2 that it is.

Source: arXiv:2102.03013, Figures 2 and 3; its first version (submitted to ICLR 2021), Figures 2 and 8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import lgamma, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from torch_privacy import privacy
from torch_privacy.experiments.study import Study
from torch_privacy.privacy import Bracket
from torch_privacy.privacy.bracket import Array
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import EXACT, Computation, Context, Numbers, TableColumn
from torch_privacy_papers.bu2021.common import method_name

DELTA = 1e-5
FIRST = "epsilon_of_one_epoch"
BELOW_HALF, DEVIATION, WEIGHT = "below_half", "deviation", "mean_weight"
COLUMNS = {
    FIRST: TableColumn("eps, 1 epoch", scientific=True),
    EXACT: TableColumn("eps, all epochs", scientific=True),
    DEVIATION: TableColumn("std of estimate"),
    BELOW_HALF: TableColumn("below half", digits=2, percent=True),
    WEIGHT: TableColumn("mean weight"),
}
NOTES = (
    "eps: certified, at delta = 1e-5, by numerical composition: the central limit theorem does not hold for estimated "
    "norms.",
    "chi_r / sqrt(r) is an estimated norm relative to the norm. std: its standard deviation; below half: how often it "
    "is below half the norm, so that the gradient may enter with twice the clip norm; mean weight: the mean of its "
    "inverse, the factor by which a clipped gradient is larger on average than with exact norms (infinite for r = 1).",
    "The paper shows these quantities as figures, without numbers. Its curves are certified here again, not read off.",
)
PROJECTIONS = 1, 2, 3, 5, 10, 20, 30, 100, 0  # 0: exact norms
QUICK_PROJECTIONS = 10, 30, 0  # fewer take longer to price
POINTS, QUICK_POINTS = 8, 3  # of a curve
DRAWN = 1, 2, 5, 10, 30, 100  # densities


@dataclass(frozen=True)
class Panel:
    """The settings of one panel."""

    name: str
    figure: str
    num_examples: int
    expected_batch_size: int
    noise_multiplier: float
    epochs: int

    @property
    def probability(self) -> float:
        """Returns the sampling probability."""
        return self.expected_batch_size / self.num_examples

    def epsilon(self, projections: int, epochs: float) -> Bracket[float]:
        """Returns the certified epsilon after some epochs, for a number of projections or, with 0, exact norms."""
        return _epsilon(self.noise_multiplier, self.probability, projections, round(epochs / self.probability))

    def title(self) -> str:
        """Returns the settings in words."""
        return f"n = {self.num_examples:,}, B = {self.expected_batch_size}, sigma = {self.noise_multiplier:g}"


PANELS = (
    Panel("MNIST", "figure-8-mnist", 60_000, 256, 1.3, 5),
    Panel("25,000 in batches of 64", "figure-8-small-batches", 25_000, 64, 0.5, 5),
    Panel("IMDb", "figure-3-imdb", 25_000, 256, 0.6, 20),
)


def rows(quick: bool) -> Sequence[Computation]:
    """Returns every number of projections in every panel, then the distributions of the estimates."""
    counts = QUICK_PROJECTIONS if quick else PROJECTIONS
    priced = [Computation(row_name(panel, r), partial(epsilons, panel, r)) for panel in PANELS for r in counts]
    return [*priced, *(Computation(f"chi_r / sqrt(r), r = {r}", partial(estimate, r)) for r in counts if r)]


def row_name(panel: Panel, projections: int) -> str:
    """Returns the name of a row, such as ``IMDb, JL(30)``."""
    return f"{panel.name}, {method_name(projections)}"


def epsilons(panel: Panel, projections: int, context: Context) -> Numbers:
    """Returns epsilon after the first and after all epochs."""
    return {FIRST: panel.epsilon(projections, 1), EXACT: panel.epsilon(projections, panel.epochs)}


def estimate(projections: int, context: Context) -> Numbers:
    """Returns the spread of an estimated norm relative to the norm, and the mean of its inverse if it is finite."""
    r = projections
    chi = stats.chi(r, scale=1 / sqrt(r))
    inverse = None if r == 1 else float(np.exp(0.5 * log(r / 2) + lgamma((r - 1) / 2) - lgamma(r / 2)))
    return {DEVIATION: float(chi.std()), BELOW_HALF: float(chi.cdf(0.5)), WEIGHT: inverse}


def findings(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields whether epsilon falls as the number of projections grows, in each panel, from the certified intervals."""
    numbers = {row["row"]: row["runs"][0]["numbers"] for row in results["rows"]}
    for panel in PANELS:
        counts = QUICK_PROJECTIONS if results["quick"] else PROJECTIONS
        falls = [
            numbers[row_name(panel, more)][key]["high"] < numbers[row_name(panel, fewer)][key]["low"]
            for key in (FIRST, EXACT)
            for fewer, more in pairwise(counts)
        ]
        found = "falls with every step to more projections" if all(falls) else "does NOT fall at every step"
        yield f"{panel.name} ({panel.title()}): epsilon {found}, after one epoch and after {panel.epochs}."


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws epsilon over the epochs in each panel, and the densities of the estimates."""
    quick = results["quick"]
    drawn = {panel.figure: _over_epochs(panel, quick) for panel in PANELS}
    x = np.linspace(0, 2.5, 300)
    densities = {f"r = {r}": (x, density(r, x)) for r in DRAWN}
    return drawn | {
        "figure-2-density": plots.curves_plot(
            densities, title="An estimated norm relative to the norm", ylabel="density", xlabel="chi_r / sqrt(r)"
        )
    }


def density(projections: int, x: Array) -> Array:
    """Returns the density of chi_r / sqrt(r) at x."""
    return np.asarray(stats.chi.pdf(x, projections, scale=1 / sqrt(projections)))


def _over_epochs(panel: Panel, quick: bool) -> plots.Figure:
    epochs = np.linspace(panel.epochs / 20, panel.epochs, QUICK_POINTS if quick else POINTS)
    curves = {}
    for r in QUICK_PROJECTIONS if quick else PROJECTIONS:
        low, high = np.array([panel.epsilon(r, epoch) for epoch in epochs.tolist()]).T
        curves[method_name(r)] = (epochs, Bracket(low, high))
    title = f"{panel.name}: {panel.title()}"
    return plots.curves_plot(curves, title=title, ylabel="certified epsilon", log_y=True)


@cache
def _epsilon(noise_multiplier: float, probability: float, projections: int, num_steps: int) -> Bracket[float]:
    """Returns the certified epsilon, which rows and figures share."""
    event = (
        privacy.SubsampledJL(noise_multiplier, projections, probability)
        if projections
        else privacy.SubsampledGaussian(noise_multiplier, probability)
    )
    return privacy.compose([(event, num_steps)]).epsilon(DELTA)


STUDY = Study(COLUMNS, rows, NOTES, delta=DELTA, figures=figures, findings=findings)
