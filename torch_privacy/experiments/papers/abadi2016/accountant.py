# SPDX-License-Identifier: Apache-2.0
"""Computes epsilon over epochs by several accountants and exactly: Abadi et al. (2016), Figure 2.

``torch-privacy reproduce accountant-q0.01`` prices noise multiplier 4 at sampling probability 0.01 and delta = 1e-5.
The paper: 9.34 by strong composition and 1.26 by the moments accountant after 100 epochs, 24.22 and 2.55 after 400.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torch_privacy import privacy
from torch_privacy.experiments.study import Study
from torch_privacy.report import figures as plots
from torch_privacy.runs.rows import CLT, EXACT, MOMENTS, PRIVACY_COLUMNS, Column, Computation, Context, Numbers

NOISE, PROBABILITY, DELTA = 4.0, 0.01, 1e-5
EPOCHS = 100, 400  # at which the paper quotes numbers
STRONG, STRONG_VALID = "strong", "strong_valid"
COLUMNS = {
    STRONG: Column("strong, as in 2016", digits=2),
    STRONG_VALID: Column("strong, valid", digits=2),
    **{key: PRIVACY_COLUMNS[key] for key in (MOMENTS, CLT, EXACT)},
}
PAPER = {100: {STRONG: 9.34, MOMENTS: 1.26}, 400: {STRONG: 24.22, MOMENTS: 2.55}}
NOTES = (
    "Strong composition gives the paper's numbers only if sampling is assumed to shrink a step's epsilon to q epsilon, "
    "which is too small; the column beside it uses the valid log(1 + q (e^epsilon - 1)).",
    "CLT: the central limit theorem's approximation, which is no bound.",
)


def rows(quick: bool) -> Sequence[Computation]:
    """Returns the two points that the paper quotes."""
    return [Computation(f"{epochs} epochs", partial(epsilons, epochs), PAPER[epochs]) for epochs in EPOCHS]


def epsilons(epochs: float, context: Context) -> Numbers:
    """Returns every accountant's epsilon after ``epochs`` epochs."""
    setting = NOISE, PROBABILITY, round(epochs / PROBABILITY)
    event, num_steps = privacy.SubsampledGaussian(NOISE, PROBABILITY), setting[2]
    return {
        STRONG: privacy.strong_composition(*setting, DELTA, amplification=privacy.scaled_epsilon),
        STRONG_VALID: privacy.strong_composition(*setting, DELTA),
        MOMENTS: privacy.moments(*setting, DELTA),
        CLT: privacy.clt(*setting).epsilon(DELTA),
        EXACT: privacy.compose([(event, num_steps)]).epsilon(DELTA),
    }


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws the paper's figure with the certified curve added."""
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
    return {"figure-2": plots.epsilon_plot(drawn, title=title)}


STUDY = Study(COLUMNS, rows, NOTES, delta=DELTA, figures=figures)
