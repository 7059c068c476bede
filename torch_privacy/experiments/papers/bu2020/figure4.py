# SPDX-License-Identifier: Apache-2.0
"""Trains with the noise that the CLT and the moments accountant ask for: Bu, Dong, Long and Su (2020), Figure 4, left.

``torch-privacy reproduce gdp-figure4`` trains on MNIST with noise multiplier 1.3 and with 1.06, which the CLT takes to
be as private after 20 epochs, and with 0.7 and 0.638 for 70 epochs. In the paper less noise reaches 95, 96 and 97 %
test accuracy after 18, 26 and 45 epochs, more noise after 23, 33 and 64. Two more rows have the noise at which the
certified epsilon is that of the moments accountant: `gdp-calibration` computes it.

One run each in the paper, and q = 256 / 60000, learning rate 0.15, clip norm 1.5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torch_privacy.experiments.papers.bu2020 import mnist
from torch_privacy.experiments.study import Study
from torch_privacy.report import figures as plots
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    PRIVACY_COLUMNS,
    SCORE,
    Column,
    Numbers,
    Training,
    folder_name,
    rows_folder,
)

ROUNDING = 1e-6  # of a score, which is a mean in float32: 0.95 is 0.94999998
REACHED = {0.95: "epochs_to_95", 0.96: "epochs_to_96", 0.97: "epochs_to_97"}
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    **{key: Column(f"epochs to {accuracy:.0%}".replace("%", " %"), digits=0) for accuracy, key in REACHED.items()},
    **PRIVACY_COLUMNS,
}
NOTES = (
    "Epochs to: the first epoch after which the test accuracy is at least this. It is looked at to draw the figure, "
    "never to choose anything.",
    "Moments: the paper's noise, with the epsilon of the moments accountant. CLT: the noise for which the CLT "
    "claims the same epsilon; its certified epsilon is larger. Certified: the noise that really has that epsilon, from "
    "gdp-calibration.",
)
DEFAULTS = replace(  # q = 256 / 60000, delta = 1e-5
    mnist.DEFAULTS, learning_rate=0.15, clip_norm=1.5, noise_multiplier=1.3, epochs=20
)
NOISES = {20: {"moments": 1.3, "CLT": 1.06, "certified": 1.086}, 70: {"moments": 0.7, "CLT": 0.638, "certified": 0.656}}
PAPER = {0.7: (23, 33, 64), 0.638: (18, 26, 45)}


def rows(quick: bool) -> Sequence[Training]:
    """Returns three trainings of 20 epochs, and three of 70; a quick look makes one epoch of each."""
    return [
        Training(
            f"sigma {noise:g}, {method}, {epochs} epochs",
            {"noise_multiplier": noise, "epochs": 1 if quick else epochs},
            dict(zip(REACHED.values(), PAPER.get(noise, ()), strict=False)),
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


STUDY = Study(COLUMNS, rows, NOTES, DEFAULTS, mnist.build_task, figures=figures, numbers_of=epochs_to_accuracy)
