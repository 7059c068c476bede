# SPDX-License-Identifier: Apache-2.0
"""Trains with the noise that the CLT and the moments accountant ask for: Bu, Dong, Long and Su (2020), Figure 4, left.

``torch-privacy reproduce gdp-figure4`` trains on MNIST with noise multiplier 1.3 and with 1.06, which the CLT takes to
be as private after 20 epochs, and with 0.7 and 0.638 for 70 epochs. In the paper less noise reaches 95, 96 and 97 %
test accuracy after 18, 26 and 45 epochs, more noise after 23, 33 and 64; at the epsilon 4 of its own accountant, the
CLT or the moments, less noise has 96 % and more noise 92 %. Two more rows have the noise at which the
certified epsilon is that of the moments accountant: `gdp-calibration` computes it.

One run each in the paper, and q = 256 / 60000, learning rate 0.15, clip norm 1.5.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torch_privacy import privacy
from torch_privacy.experiments.study import Study
from torch_privacy.privacy.summary import equal_releases
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    PRIVACY_COLUMNS,
    SCORE,
    Numbers,
    TableColumn,
    TrainingRow,
    folder_name,
    rows_folder,
)
from torch_privacy_papers.bu2020 import mnist
from torch_privacy_papers.bu2020.table1 import DELTA, PROBABILITY

ROUNDING = 1e-6  # of a score, which is a mean in float32: 0.95 is 0.94999998
BUDGET, AT_BUDGET = 4.0, "accuracy_at_4"
REACHED = {0.95: "epochs_to_95", 0.96: "epochs_to_96", 0.97: "epochs_to_97"}
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    **{key: TableColumn(f"epochs to {accuracy:.0%}".replace("%", " %"), digits=0) for accuracy, key in REACHED.items()},
    AT_BUDGET: TableColumn("accuracy at epsilon 4", digits=1, percent=True),
    **PRIVACY_COLUMNS,
}
NOTES = (
    "Epochs to: the first epoch after which the test accuracy is at least this. It is looked at to draw the figure, "
    "never to choose anything.",
    "Moments: the paper's noise, with the epsilon of the moments accountant. CLT: the noise for which the CLT "
    "claims the same epsilon; its certified epsilon is larger. Certified: the noise that really has that epsilon, from "
    "gdp-calibration.",
    "Accuracy at epsilon 4: after the last epoch at which the row's own accountant has at most 4.",
)
DEFAULTS = replace(  # q = 256 / 60000, delta = 1e-5
    mnist.DEFAULTS, learning_rate=0.15, clip_norm=1.5, noise_multiplier=1.3, epochs=20
)
NOISES = {20: {"moments": 1.3, "CLT": 1.06, "certified": 1.086}, 70: {"moments": 0.7, "CLT": 0.638, "certified": 0.656}}
PAPER = {0.7: (23, 33, 64, 0.92), 0.638: (18, 26, 45, 0.96)}


def rows(quick: bool) -> Sequence[TrainingRow]:
    """Returns three trainings of 20 epochs, and three of 70; a quick look makes one epoch of each."""
    return [
        TrainingRow(
            f"sigma {noise:g}, {method}, {epochs} epochs",
            {"noise_multiplier": noise, "epochs": 1 if quick else epochs},
            dict(zip((*REACHED.values(), AT_BUDGET), PAPER.get(noise, ()), strict=False)),
        )
        for epochs, noises in NOISES.items()
        for method, noise in noises.items()
    ]


def epochs_to_accuracy(run: RunFolder) -> Numbers:
    """Returns after how many epochs a finished training had each accuracy; None if it never had."""
    scores = _scores(run)
    return {
        key: next((float(epoch) for epoch, score in enumerate(scores, 1) if score > accuracy - ROUNDING), None)
        for accuracy, key in REACHED.items()
    }


def numbers_of(run: RunFolder) -> Numbers:
    """Returns when a finished training had each accuracy, and its accuracy when its accountant had epsilon 4."""
    settings = run.read_settings()
    return {**epochs_to_accuracy(run), AT_BUDGET: score_at(BUDGET, settings["noise_multiplier"], _scores(run))}


def score_at(budget: float, noise: float, scores: Sequence[float]) -> float | None:
    """Returns the last of the scores after each epoch at which the noise's accountant has at most this epsilon.

    None if all of them have: the training ends below it.
    """
    epsilon = ACCOUNTANTS[next(method for noises in NOISES.values() for method, one in noises.items() if one == noise)]

    def exceeds(epochs: int) -> bool:
        return epsilon(noise, round(epochs / PROBABILITY)) > budget

    within = bisect_left(range(1, len(scores) + 1), True, key=exceeds)
    return scores[within - 1] if 0 < within < len(scores) else None


ACCOUNTANTS: Mapping[str, Callable[[float, int], float]] = {  # (noise multiplier, steps) -> epsilon
    "moments": lambda noise, steps: privacy.moments_of(equal_releases(noise, PROBABILITY, steps), DELTA),
    "CLT": lambda noise, steps: privacy.clt(equal_releases(noise, PROBABILITY, steps)).epsilon(DELTA),
    "certified": lambda noise, steps: privacy.compose(
        [(privacy.SubsampledGaussian(noise, PROBABILITY), steps)]
    ).epsilon_high(DELTA),
}


def _scores(run: RunFolder) -> list[float]:
    """Returns the test accuracy after each epoch."""
    return [row.test_score or 0.0 for row in run.read_metrics() if row.training == "private"]


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws the test accuracy over epochs for each noise, of the first seed."""
    drawn = {}
    for epochs, noises in NOISES.items():
        curves = {}
        for method, noise in noises.items():
            name = f"sigma {noise:g}, {method}, {epochs} epochs"
            scores = np.array(_scores(RunFolder(rows_folder(folder) / folder_name(name, results["seeds"][0]))))
            curves[f"{noise:g}, {method}"] = np.arange(1, len(scores) + 1), 100 * scores
        title = f"Noise for {epochs} epochs at the epsilon of {noises['moments']:g} by moments"
        drawn[f"figure-4-left-{epochs}"] = plots.curves_plot(curves, title=title, ylabel="test accuracy (%)")
    return drawn


STUDY = Study(COLUMNS, rows, NOTES, DEFAULTS, mnist.build_task, figures=figures, numbers_of=numbers_of)
