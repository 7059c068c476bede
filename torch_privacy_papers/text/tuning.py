# SPDX-License-Identifier: Apache-2.0
"""Chooses settings for ``text-imdb`` on the reviews that are declared public, which costs no privacy.

``torch-privacy reproduce text-imdb-tuning`` trains the dense layer on 3,000 public reviews, with the number of steps
and, in the mean gradient, the noise of a row of ``text-imdb``, and scores it on 2,000 others. No other review plays a
part.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from torch_privacy.experiments.study import Study
from torch_privacy.privacy import calibrate
from torch_privacy.runs.rows import ACCURACY_COLUMN, SCORE, TrainingRow
from torch_privacy_papers.text import imdb

NUM_PRIVATE = 25_000
TARGET = imdb.STUDY.settings()  # of the dense layer
RATES = 3.0, 9.0, 27.0
OTHERS = {"shrinkage": (0.3, 3.0), "clip_norm": (0.35, 1.4), "epochs": (10, 40)}  # tried at epsilon 3


@cache
def noise_multiplier(epsilon: float, epochs: float) -> float:
    """Returns that of batches of all public reviews, with the noise in the mean gradient of a row at epsilon."""
    share = TARGET.expected_batch_size / NUM_PRIVATE
    needed = calibrate(epsilon, TARGET.delta, sampling_probability=share, num_steps=num_steps(epochs))
    return needed * imdb.NUM_TO_LEARN / TARGET.expected_batch_size


def num_steps(epochs: float) -> int:
    """Returns the number of steps of a row."""
    return round(epochs * NUM_PRIVATE / TARGET.expected_batch_size)


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
    ]
    return [_row(*one) for one in tried[: 1 if quick else None]]


def _row(epsilon: float, changed: dict[str, float]) -> TrainingRow:
    meant = replace(TARGET, **changed)
    settings = {
        **changed,
        "noise_multiplier": noise_multiplier(epsilon, meant.epochs),
        "epochs": float(num_steps(meant.epochs)),  # each of one batch
    }
    name = ", ".join(f"{setting.replace('_', ' ')} {value:g}" for setting, value in changed.items())
    return TrainingRow(f"epsilon {epsilon:g}, {name}", settings)


TUNING = Study(
    {SCORE: replace(ACCURACY_COLUMN, heading="accuracy, public reviews")},
    rows,
    (
        "Learned from 3,000 of the 5,000 reviews that are declared public and scored on the other 2,000, with the "
        "steps and the noise of a row of text-imdb at that epsilon. No other review plays a part, so the choice costs "
        "no privacy.",
    ),
    replace(TARGET, target_epsilon=None, noise_multiplier=1.0, expected_batch_size=imdb.NUM_TO_LEARN, on_public=True),
    imdb.build_task,
)
