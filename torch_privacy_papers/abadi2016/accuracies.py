# SPDX-License-Identifier: Apache-2.0
"""Provides accuracy over epochs, and over epsilon and delta: Abadi et al. (2016), Figures 3 and 4.

One training has an accuracy after each epoch. Accounting alone says how many of its steps stay within any (epsilon,
delta), and so which of these accuracies it has there. Figure 4 is the best of the three levels of noise at each point.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Metrics
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import Computation, Context, Numbers, TableColumn, folder_name, rows_folder
from torch_privacy_papers.abadi2016.levels import LEVELS, most_steps

EPSILONS = 0.25, 0.5, 1, 2, 4, 8
DELTAS = 1e-5, 1e-4, 1e-3, 1e-2
COLUMNS = {f"delta {delta:g}": TableColumn(f"delta {delta:g}", digits=1, percent=True) for delta in DELTAS}
PAPER = {0.25: {"delta 0.01": 0.90}, **{level.epsilon: {"delta 1e-05": level.accuracy} for level in LEVELS}}
NOTE = (
    "Rows of one epsilon (Figure 4): the accuracy after the last epoch within (epsilon, delta), by certified "
    "accounting, of the three longest trainings above; the best of the three, chosen by test accuracy as in the paper."
)


def rows() -> Sequence[Computation]:
    """Returns a row for each epsilon, to stand behind the trainings that it is computed from."""
    return [
        Computation(f"epsilon {epsilon:g}", partial(best_within, epsilon), PAPER.get(epsilon, {}), seeded=True)
        for epsilon in EPSILONS
    ]


def best_within(epsilon: float, context: Context) -> Numbers:
    """Returns, for each delta, the best accuracy that one of the trainings has within (epsilon, delta).

    Raises:
        ValueError: If the run has left out one of the trainings.
    """
    courses = [course(context.run, level.certified_name, context.seed) for level in LEVELS]
    numbers: dict[str, float | None] = {}
    for key, delta in zip(COLUMNS, DELTAS, strict=True):
        found = [
            accuracy_after(rows, most_steps(level, epsilon, delta)) for level, rows in zip(LEVELS, courses, strict=True)
        ]
        numbers[key] = max((score for score in found if score is not None), default=None)
    return numbers


def accuracy_after(rows: Sequence[Metrics], steps: int) -> float | None:
    """Returns the test accuracy after the last epoch that ends within these steps, or None if none does."""
    return next((row.test_score for row in reversed(rows) if row.step <= steps), None)


def course(run: Path | None, name: str, seed: int) -> list[Metrics]:
    """Returns the private training's epochs in the row of this name.

    Raises:
        ValueError: If the run has left out the row.
    """
    folder = None if run is None else RunFolder(rows_folder(run) / folder_name(name, seed))
    if folder is None or not folder.metrics.exists():
        raise ValueError(f"reproduce: rows of one epsilon are computed from {name!r}; run it as well.")
    return [row for row in folder.read_metrics() if row.training == "private"]


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws Figure 3, accuracy in training and on test data over the epochs, and Figure 4, over epsilon and delta."""
    if results["quick"]:
        return {}
    drawn: dict[str, Any] = {}
    for level in LEVELS:
        epochs = course(folder, level.certified_name, results["seeds"][0])
        for name, scores in (
            ("test", [row.test_score for row in epochs]),
            ("in training", [row.train_score for row in epochs]),
        ):
            drawn[f"sigma {level.noise:g}, {name}"] = np.array([row.epoch for row in epochs]), _percent(scores)
    best = {row["row"]: [run["numbers"] for run in row["runs"]] for row in results["rows"]}
    within: dict[str, Any] = {}
    for key in COLUMNS:
        means = [
            np.nan
            if any(number[key] is None for number in best[f"epsilon {epsilon:g}"])
            else float(np.mean([number[key] for number in best[f"epsilon {epsilon:g}"]]))
            for epsilon in EPSILONS
        ]
        within[key] = np.array(EPSILONS, float), _percent(means)
    accuracy = "accuracy (%)"
    return {
        "figure-3": plots.curves_plot(drawn, title="Accuracy over the epochs", ylabel=accuracy, log_x=True),
        "figure-4": plots.curves_plot(
            within, title="Best accuracy", ylabel=f"test {accuracy}", xlabel="epsilon", log_x=True
        ),
    }


def _percent(scores: Sequence[float | None]) -> np.ndarray:
    return 100 * np.array([np.nan if score is None else score for score in scores], float)
