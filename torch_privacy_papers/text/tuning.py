# SPDX-License-Identifier: Apache-2.0
"""Chooses settings for ``text-imdb`` on the reviews that are declared public, which costs no privacy.

``torch-privacy reproduce text-imdb-tuning`` trains the dense layer and the last layer of the encoder on 3,000 public
reviews, with the number of steps and, in the mean gradient, the noise of a row of ``text-imdb``, and scores them on
2,000 others. No other review plays a part.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Settings
from torch_privacy.privacy import calibrate
from torch_privacy.runs.rows import ACCURACY_COLUMN, SCORE, TrainingRow
from torch_privacy_papers.text import imdb

NUM_PRIVATE = 25_000
TARGET = imdb.STUDY.settings()  # of the dense layer
RATES = 3.0, 9.0, 27.0
OTHERS = {"shrinkage": (0.3, 3.0), "clip_norm": (0.35, 1.4), "epochs": (10, 40)}  # tried at epsilon 3
OF_LAST = {1e-3: 10.0, 3e-4: 30.0, 3e-3: 3.0}  # learning rate -> head factor, tried at epsilon 3


@cache
def noise_multiplier(epsilon: float, meant: Settings) -> float:
    """Returns the noise multiplier at which the mean gradient is as noisy as in a row of ``text-imdb`` at epsilon."""
    share = meant.expected_batch_size / NUM_PRIVATE
    needed = calibrate(epsilon, meant.delta, sampling_probability=share, num_steps=num_steps(meant))
    return needed * batch_size(meant) / meant.expected_batch_size


def num_steps(meant: Settings) -> int:
    """Returns the number of steps of a row."""
    return round(meant.epochs * NUM_PRIVATE / meant.expected_batch_size)


def batch_size(meant: Settings) -> int:
    """Returns the size of the row's batches, or all public reviews if these are fewer."""
    return min(meant.expected_batch_size, imdb.NUM_TO_LEARN)


def rows(quick: bool) -> Sequence[TrainingRow]:
    """Returns a row for everything that was tried; a quick look has one row."""
    tried = [
        *((epsilon, {"learning_rate": rate}) for epsilon in imdb.EPSILONS for rate in RATES),
        *(
            (3, {name: value, "learning_rate": rate})
            for name, values in OTHERS.items()
            for value in values
            for rate in RATES
        ),
        *((3, {"method": "last", "learning_rate": rate, "head_factor": factor}) for rate, factor in OF_LAST.items()),
    ]
    return [_row(*one) for one in tried[: 1 if quick else None]]


def _row(epsilon: float, changed: dict[str, Any]) -> TrainingRow:
    meant = imdb.STUDY.settings(**changed)
    settings = {
        **changed,
        "expected_batch_size": batch_size(meant),
        "noise_multiplier": noise_multiplier(epsilon, meant),
        "epochs": num_steps(meant) * batch_size(meant) / imdb.NUM_TO_LEARN,
    }
    named = {"epsilon": epsilon, **changed}
    what = [named.pop("method")] if "method" in named else []
    name = ", ".join([*what, *(f"{setting.replace('_', ' ')} {value:g}" for setting, value in named.items())])
    return TrainingRow(name, settings)


TUNING = Study(
    {SCORE: replace(ACCURACY_COLUMN, heading="accuracy, public reviews")},
    rows,
    (
        "Learned from 3,000 of the 5,000 reviews that are declared public and scored on the other 2,000, with the "
        "steps and the noise of a row of text-imdb at that epsilon. No other review plays a part, so the choice costs "
        "no privacy.",
    ),
    replace(TARGET, target_epsilon=None, noise_multiplier=1.0, on_public=True),
    imdb.build_task,
    settings_of_choice=imdb.settings_of_choice,
)
