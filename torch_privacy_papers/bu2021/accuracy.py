# SPDX-License-Identifier: Apache-2.0
"""Compares the accuracy of training with few projections and with exact norms: Bu, Gopi et al. (2021), Figure 4.

``torch-privacy reproduce jl-accuracy --seeds 0-24`` trains the network of ``jl-mnist`` on the first 1,500 and the first
3,000 digits with 1, 3 and 20 projections and with exact norms, and compares the accuracies of runs that begin with the
same weights. The paper, of 25 runs on all digits: JL(3) "is already very close" and JL(20) "almost indistinguishable".

Source: arXiv:2102.03013, Section 3.3.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from torch.utils.data import TensorDataset

from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task
from torch_privacy.privacy.bracket import Array
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.report import style
from torch_privacy.runs.rows import ACCURACY_COLUMN, EXACT, PRIVACY_COLUMNS, SCORE, TrainingRow
from torch_privacy_papers.bu2021 import common as jl
from torch_privacy_papers.bu2021.tables import ON_MNIST

SIZES, QUICK_SIZE = (1_500, 3_000), 1_000  # training examples
TESTED = 2_000  # test examples
EPOCHS = 3
PROJECTIONS = 0, 1, 3, 20  # 0: exact norms
COLUMNS = {SCORE: ACCURACY_COLUMN, EXACT: replace(PRIVACY_COLUMNS[EXACT], scientific=True)}
NOTES = (
    "NOT PRIVATE with 1 or 3 projections, as their epsilons show: these rows only show how training behaves.",
    "Estimated norms give a clipped example a larger weight on average, at the same noise: 1.38 times with three "
    "projections, 1.04 times with 20. The effect is visible in short trainings.",
    f"Noise relative to the mean gradient of a batch is that of jl-mnist. Accuracy is on {TESTED:,} test digits.",
)
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Settings(jl.Settings):
    """The settings of a training on few digits."""

    num_examples: int = SIZES[-1]  # of the training set, from the first


DEFAULTS = Settings(  # jl-mnist's, for batches of 64 in place of 256: a quarter of the noise, twice the learning rate
    noise_multiplier=0.325,
    expected_batch_size=64,
    learning_rate=0.5,
    clip_norm=1.5,
    epochs=EPOCHS,
)


def build_task(settings: Settings) -> Task:
    """Returns the first digits of MNIST, and the network of ``jl-mnist``."""
    task = ON_MNIST.build_task(settings)
    return replace(task, train=_first(task.train, settings.num_examples), test=_first(task.test, TESTED))


def rows(quick: bool) -> Sequence[TrainingRow]:
    """Returns every number of projections with every number of examples; a quick look has fewer examples and epochs."""
    sizes, epochs = ((QUICK_SIZE,), 2) if quick else (SIZES, EPOCHS)
    return [
        TrainingRow(name(size, r), {"num_examples": size, "num_projections": r, "epochs": epochs})
        for size in sizes
        for r in PROJECTIONS
    ]


def name(size: int, projections: int) -> str:
    """Returns the name of a row, such as ``3,000 digits, JL(3)``."""
    return f"{size:,} digits, {jl.method_name(projections)}"


def findings(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the difference in accuracy of every number of projections from exact norms, with a paired t-test."""
    scores = {row["row"]: 100 * np.array([run["numbers"][SCORE] for run in row["runs"]]) for row in results["rows"]}
    if len(results["seeds"]) > 1:
        for row, exact in _pairs(results["quick"]):
            differences = scores[row] - scores[exact]
            low, mean, high = paired(differences)
            p_value = stats.ttest_rel(scores[row], scores[exact]).pvalue if differences.any() else 1.0
            yield (
                f"{row}: {mean:+.2f} points of accuracy from exact norms, {CONFIDENCE:.0%} interval {low:+.2f} to "
                f"{high:+.2f}, p = {p_value:.2g}, paired over {len(results['seeds'])} seeds."
            )


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    low: Array
    mean: Array
    high: Array


def paired(differences: Array) -> Interval:
    """Returns Student's confidence interval of the mean of paired differences (runs, ...)."""
    runs = len(differences)
    mean, error = differences.mean(0), differences.std(0, ddof=1) / sqrt(runs)
    half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, runs - 1)) * error
    return Interval(mean - half_width, mean, mean + half_width)


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws Figure 4 for each number of examples, and the differences from exact norms with their intervals."""
    quick, seeds = results["quick"], results["seeds"]
    curves = [jl.learning_curves(folder, rows(quick), seed) for seed in seeds]
    epochs = {row: curve[0] for row, curve in curves[0].items()}
    scores = {row: 100 * np.array([curve[row][1] for curve in curves]) for row in epochs}  # (seeds, epochs)
    drawn: dict[str, plots.Figure] = {}
    for size in dict.fromkeys(row.settings["num_examples"] for row in rows(quick)):
        in_order = *PROJECTIONS[1:], 0  # exact norms last, so that colors agree with the differences
        means = {jl.method_name(r): (epochs[name(size, r)], scores[name(size, r)].mean(0)) for r in in_order}
        title = f"Mean accuracy of {len(seeds)} run{'s' * (len(seeds) > 1)}, {size:,} digits"
        drawn[f"accuracy-{size}"] = plots.curves_plot(means, title=title, ylabel=jl.ACCURACY)
        if len(seeds) > 1:
            differences = {
                jl.method_name(r): (epochs[name(size, r)], paired(scores[name(size, r)] - scores[name(size, 0)]))
                for r in PROJECTIONS[1:]
            }
            drawn[f"difference-{size}"] = _differences(
                differences, f"Less exact norms, {size:,} digits, 95 % intervals"
            )
    return drawn


def _differences(curves: Mapping[str, tuple[Array, Interval]], title: str) -> plots.Figure:
    """Draws mean differences over epochs, each with its interval shaded."""
    means = {method: (x, interval.mean) for method, (x, interval) in curves.items()}
    figure = plots.curves_plot(means, title=title, ylabel="points of test accuracy")
    axes = figure.axes[0]
    for line, (x, interval) in zip(axes.get_lines(), curves.values(), strict=True):
        axes.fill_between(x, interval.low, interval.high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(0, color=style.FILE_FAINT, linewidth=1.2)
    return figure


def _pairs(quick: bool) -> Iterator[tuple[str, str]]:
    """Yields every row with projections, with that of exact norms on the same examples."""
    for row in rows(quick):
        if row.settings["num_projections"]:
            yield row.name, name(row.settings["num_examples"], 0)


def _first(data: Any, size: int) -> TensorDataset:
    return TensorDataset(*data[:size])


STUDY = Study(COLUMNS, rows, NOTES, DEFAULTS, build_task, figures=figures, findings=findings)
