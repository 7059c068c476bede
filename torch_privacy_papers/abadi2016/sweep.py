# SPDX-License-Identifier: Apache-2.0
"""Varies one setting of private training on MNIST at a time: Abadi et al. (2016), Figure 5.

``torch-privacy reproduce abadi-sweep`` varies, one at a time, the number of components, hidden units, lot size,
learning rate, clip norm and noise of ``abadi-mnist``. Every training ends before the certified epsilon would exceed 2,
so that more noise and smaller lots allow more epochs. The paper shows plots, and reports 95 % at the reference. It says
that the best lot has about sqrt(N) examples, which are 245 of 60,000; its own reference has 600, and so has our best.
Beside the panels it states three things, which have rows as well: that larger rates do as well with less noise and
fewer epochs, that noise which decreases during training helps little, and that a larger network is better if there is
time for few epochs only.

Source: M. Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133, section 5.2.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from torch_privacy import privacy
from torch_privacy.experiments.study import Study
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import ACCURACY_COLUMN, EXACT, PRIVACY_COLUMNS, SCORE, TrainingRow
from torch_privacy_papers.abadi2016 import mnist
from torch_privacy_papers.abadi2016.levels import LAYERS
from torch_privacy_papers.abadi2016.mnist import Settings

EPSILON, NUM_EXAMPLES = 2.0, 60_000
COLUMNS = {SCORE: ACCURACY_COLUMN, EXACT: PRIVACY_COLUMNS[EXACT]}
NOTES = ("Each row is the reference with one setting replaced. Each ends before epsilon would exceed 2.",)


DEFAULTS = replace(mnist.DEFAULTS, baseline=False)  # the reference


@dataclass(frozen=True)
class Factor:
    """One panel of the figure: a setting, its title, its reference value and the other values."""

    setting: str
    title: str
    reference: float
    values: tuple[float, ...]
    unit: float = 1.0  # of the values, in units of the setting

    def row_name(self, value: float) -> str:
        """Returns the name of a value's row."""
        return f"{self.title} {value:g}"


SIGMA = LAYERS**-0.5  # the paper's unit of noise, in noise multipliers
FACTORS = (
    Factor("num_components", "components", 60, (20, 40, 100, 200)),
    Factor("hidden_units", "hidden units", 1000, (200, 500, 1500, 2000)),
    Factor("expected_batch_size", "lot size", 600, (200, 400, 1000, 2000)),
    Factor("learning_rate", "learning rate", 0.1, (0.01, 0.03, 0.05, 0.07, 0.2, 0.4)),
    Factor("clip_norm", "clip norm", 4, (1, 2, 6, 8)),
    Factor("noise_multiplier", "noise sigma", 4, (2, 3, 6, 8), unit=SIGMA),
)
REFERENCE = "reference"
STABLE = 0.01, 0.07  # learning rates between which the paper finds accuracy stable
TOGETHER: dict[str, dict[str, Any]] = {  # larger rates with less noise, hence with fewer epochs
    "learning rate 0.2, noise sigma 3": {"learning_rate": 0.2, "noise_multiplier": 3 * SIGMA},
    "learning rate 0.4, noise sigma 2": {"learning_rate": 0.4, "noise_multiplier": 2 * SIGMA},
}
SHORT = 5  # epochs, with noise for epsilon 2
SHORT_UNITS = 200, 1000, 4000
DECREASING: dict[str, dict[str, Any]] = {  # noise that is scaled to end at epsilon 2, after the reference's epochs
    "noise that falls to a half": {"final_noise": 0.5},
    "noise that falls to a quarter": {"final_noise": 0.25},
}


def rows(quick: bool) -> Sequence[TrainingRow]:
    """Returns the reference and each setting's other values; a quick look trains the extremes for one epoch."""
    chosen = [
        (factor.row_name(value), _settings(factor, value))
        for factor in FACTORS
        for value in (factor.values[:: len(factor.values) - 1] if quick else factor.values)
    ]
    epochs = {"epochs": 1.0} if quick else {}
    reference = TrainingRow(REFERENCE, {"epochs": epochs_within_budget(DEFAULTS), **epochs}, {SCORE: 0.95})
    if not quick:
        chosen += [(name, _within_budget(changed)) for name, changed in TOGETHER.items()]
        scaled = {**reference.settings, "noise_multiplier": None, "target_epsilon": EPSILON}
        chosen += [(name, {**scaled, **changed}) for name, changed in DECREASING.items()]
        short = {**scaled, "epochs": SHORT}
        chosen += [(f"{SHORT} epochs, hidden units {n}", {**short, "hidden_units": n}) for n in SHORT_UNITS]
    return [reference, *(TrainingRow(name, {**settings, **epochs}) for name, settings in chosen)]


def _settings(factor: Factor, value: float) -> dict[str, Any]:
    kind = type(getattr(DEFAULTS, factor.setting))
    return _within_budget({factor.setting: kind(value * factor.unit)})


def _within_budget(changed: Mapping[str, Any]) -> dict[str, Any]:
    return {**changed, "epochs": epochs_within_budget(replace(DEFAULTS, **changed))}


def epochs_within_budget(settings: Settings) -> float:
    """Returns the number of epochs within epsilon 2, the release of the components included if there is one."""
    assert settings.noise_multiplier is not None
    probability = settings.expected_batch_size / NUM_EXAMPLES
    pca_noise = settings.pca_noise_multiplier if settings.projection == mnist.COMPONENTS else math.inf
    return probability * _steps(settings.noise_multiplier, probability, pca_noise, settings.pca_sampling_probability)


@lru_cache(maxsize=64)
def _steps(noise: float, probability: float, pca_noise: float, pca_probability: float) -> int:
    before = [] if math.isinf(pca_noise) else [(privacy.NoisyCovariance(pca_noise, pca_probability), 1)]
    step = privacy.SubsampledGaussian(noise, probability)
    return privacy.Budget(EPSILON, DEFAULTS.delta).remaining(step, after=before)


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws the accuracy over each setting, with the others at their reference."""
    reached = {row["row"]: 100 * np.mean([run["numbers"][SCORE] for run in row["runs"]]) for row in results["rows"]}
    panels = {}
    for factor in FACTORS:
        points = {value: reached.get(factor.row_name(value)) for value in factor.values}
        points[factor.reference] = reached[REFERENCE]
        known = sorted((value, score) for value, score in points.items() if score is not None)
        panels[factor.title] = tuple(np.array(column, float) for column in zip(*known, strict=True))
    return {"figure-5": plots.panels_plot(panels, title="One setting varies", ylabel="test accuracy (%)")}


def findings(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the lots and the learning rates say about the paper's rules for them."""
    lots = _over("expected_batch_size", results)
    best = max(lots, key=lambda lot: lots[lot])
    yield (
        f"The paper's rule that the best lot has about sqrt(N) examples, {NUM_EXAMPLES**0.5:.0f} of {NUM_EXAMPLES:,} "
        f"here, {'agrees with' if best < 2 * NUM_EXAMPLES**0.5 else 'does not agree with'} this sweep: the best lot "
        f"has {best:g} ({_listed(lots)}). "
        "All lots have the reference's learning rate and noise multiplier."
    )
    rates = _over("learning_rate", results)
    stable = [score for rate, score in rates.items() if STABLE[0] <= rate <= STABLE[1]]
    yield (
        f"The paper finds accuracy stable for rates from {STABLE[0]} to {STABLE[1]}, with a peak at 0.05. Ours vary by "
        f"{100 * (max(stable) - min(stable)):.1f} points there, and are best at "
        f"{max(rates, key=lambda rate: rates[rate]):g} ({_listed(rates)})."
    )


def _over(setting: str, results: Mapping[str, Any]) -> dict[float, float]:
    """Returns the mean accuracy at each value of a setting, the reference's included, in order."""
    (factor,) = (factor for factor in FACTORS if factor.setting == setting)
    names = {value: factor.row_name(value) for value in factor.values} | {factor.reference: REFERENCE}
    reached = {row["row"]: np.mean([run["numbers"][SCORE] for run in row["runs"]]) for row in results["rows"]}
    return {value: float(reached[name]) for value, name in sorted(names.items())}


def _listed(scores: Mapping[float, float]) -> str:
    return ", ".join(f"{value:g}: {100 * score:.1f} %" for value, score in scores.items())


STUDY = Study(COLUMNS, rows, NOTES, DEFAULTS, mnist.build_task, figures=figures, findings=findings)
