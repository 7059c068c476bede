# SPDX-License-Identifier: Apache-2.0
"""Computes epsilon over epochs by several accountants and exactly: Abadi et al. (2016), Figure 2.

``torch-privacy reproduce accountant-q0.01`` prices noise multiplier 4 at sampling probability 0.01 and delta = 1e-5.
The paper: 9.34 by strong composition and 1.26 by the moments accountant after 100 epochs, 24.22 and 2.55 after 400.

More rows give delta at a fixed epsilon, as the paper's Figure 3 does over the epochs, for its three levels of noise on
MNIST, the private components included.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torch_privacy import privacy
from torch_privacy.experiments.study import Study
from torch_privacy.privacy.summary import equal_releases
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import CLT, EXACT, MOMENTS, PRIVACY_COLUMNS, Computation, Context, Numbers, TableColumn
from torch_privacy_papers.abadi2016.levels import LEVELS, Level

NOISE, PROBABILITY, DELTA = 4.0, 0.01, 1e-5
EPOCHS = 100, 400  # at which the paper quotes numbers
STRONG, STRONG_VALID = "strong", "strong_valid"
MOMENTS_DELTA, EXACT_DELTA = "delta_moments", "delta"
COLUMNS = {
    STRONG: TableColumn("strong, as in 2016", digits=2),
    STRONG_VALID: TableColumn("strong, valid", digits=2),
    **{key: PRIVACY_COLUMNS[key] for key in (MOMENTS, CLT, EXACT)},
    MOMENTS_DELTA: TableColumn("delta, moments", scientific=True),
    EXACT_DELTA: TableColumn("delta, certified", scientific=True),
}
PAPER = {100: {STRONG: 9.34, MOMENTS: 1.26}, 400: {STRONG: 24.22, MOMENTS: 2.55}}
NOTES = (
    "Strong composition gives the paper's numbers only if sampling is assumed to shrink a step's epsilon to q epsilon, "
    "which is too small; the column beside it uses the valid log(1 + q (e^epsilon - 1)).",
    "CLT: the central limit theorem's approximation, which is no bound.",
    "Rows with delta: at the level's fixed epsilon, the private components included. The paper's 1e-5 is by adding up "
    "the moments of two layers as if each had a sample of its own, which is no bound; ours are those of one release.",
)


def rows(quick: bool) -> Sequence[Computation]:
    """Returns the two points that the paper quotes, and delta at three times of each level of noise."""
    quoted = [Computation(f"{epochs} epochs", partial(epsilons, epochs), PAPER[epochs]) for epochs in EPOCHS]
    fixed = [
        Computation(
            f"{level.name}, epsilon {level.epsilon:g}, {epochs:g} epochs",
            partial(deltas, level, epochs),
            {MOMENTS_DELTA: DELTA} if epochs == level.epochs else {},
        )
        for level in LEVELS
        for epochs in (level.epochs / 2, level.epochs, level.certified_epochs)
    ]
    return [*quoted, *fixed]


def deltas(level: Level, epochs: float, context: Context) -> Numbers:
    """Returns delta at the level's epsilon after ``epochs`` epochs, by moments and certified."""
    return {
        MOMENTS_DELTA: level.moments_delta(epochs, level.epsilon),
        EXACT_DELTA: level.delta(epochs, level.epsilon),
    }


def epsilons(epochs: float, context: Context) -> Numbers:
    """Returns every accountant's epsilon after ``epochs`` epochs."""
    setting = NOISE, PROBABILITY, round(epochs / PROBABILITY)
    event, num_steps = privacy.SubsampledGaussian(NOISE, PROBABILITY), setting[2]
    return {
        STRONG: privacy.strong_composition(*setting, DELTA, amplification=privacy.scaled_epsilon),
        STRONG_VALID: privacy.strong_composition(*setting, DELTA),
        MOMENTS: privacy.moments_of(equal_releases(*setting), DELTA),
        CLT: privacy.clt(equal_releases(*setting)).epsilon(DELTA),
        EXACT: privacy.compose([(event, num_steps)]).epsilon(DELTA),
    }


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws the paper's figure with the certified curve added, and delta over the epochs of its Figure 3."""
    epochs = np.linspace(5, 400, 20 if results["quick"] else 80).round()
    numbers = [epsilons(float(e), Context(results["quick"], 0, None)) for e in epochs]
    low, high = np.array([number[EXACT] for number in numbers], float).T
    curves: dict[str, Any] = {
        "strong composition, as in 2016 (not valid)": STRONG,
        "moments accountant": MOMENTS,
    }
    drawn: dict[str, Any] = {"certified": (epochs, privacy.Bracket(low, high))}
    for name, key in curves.items():
        drawn[name] = epochs, np.array([number[key] for number in numbers], float)
    title = f"Noise multiplier {NOISE:g}, q = {PROBABILITY:g}, delta = {DELTA:g}"
    return {"figure-2": plots.epsilon_plot(drawn, title=title), "figure-3-delta": _delta_figure(results["quick"])}


def _delta_figure(quick: bool) -> plots.Figure:
    """Draws certified delta at each level's epsilon over its epochs."""
    drawn: dict[str, Any] = {}
    for level in LEVELS:
        epochs = np.linspace(0.1, 1, 5 if quick else 15) * level.certified_epochs
        bounds = np.array([level.delta(float(e), level.epsilon) for e in epochs]).T
        drawn[f"sigma {level.noise:g}, epsilon {level.epsilon:g}"] = epochs, privacy.Bracket(*bounds)
    title = "Delta at fixed epsilon"
    return plots.curves_plot(drawn, title=title, ylabel="delta", log_x=True, log_y=True)


STUDY = Study(COLUMNS, rows, NOTES, delta=DELTA, figures=figures)
