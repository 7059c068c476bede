# SPDX-License-Identifier: Apache-2.0
"""Trains on MNIST with NoisySGD at six noise levels: Bu, Dong, Long and Su (2020), Table 1.

``torch-privacy reproduce gdp-mnist`` trains two convolutions and two dense layers (26,010 parameters) on MNIST. The
paper reports 95.0 to 98.0 % test accuracy, averaged over ten runs, at mu = 0.23 to 4.78.

Source: Z. Bu, J. Dong, Q. Long, W. Su, "Deep learning with Gaussian differential privacy", Harvard Data Science Review
2(3), 2020, arXiv:1911.11607; the settings of the first three lines are those of TensorFlow Privacy's tutorial.
"""

from collections.abc import Sequence
from functools import partial

from torch_privacy.data import load_mnist
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Settings, Task, classification, seeded
from torch_privacy.runs.rows import ACCURACY_COLUMN, CLT, MOMENTS, MU, PRIVACY_COLUMNS, SCORE, TrainingRow
from torch_privacy_papers.bu2020.table1 import BATCH, DELTA, TABLE, PrintedSetting
from torch_privacy_papers.models.networks import mnist_cnn

COLUMNS = {SCORE: ACCURACY_COLUMN, **PRIVACY_COLUMNS}


DEFAULTS = Settings(  # the first line of the table; 15 epochs are 3,516 steps
    noise_multiplier=TABLE[0].noise_multiplier,
    delta=DELTA,
    expected_batch_size=BATCH,
    learning_rate=TABLE[0].learning_rate,
    clip_norm=TABLE[0].clip_norm,
    epochs=TABLE[0].epochs,
)


def build_task(settings: Settings) -> Task:
    """Returns MNIST's own split and a network of convolutions."""
    return classification(load_mnist(settings.data), partial(seeded, mnist_cnn, settings.seed), settings)


def rows(quick: bool) -> Sequence[TrainingRow]:
    """Returns the six lines of Table 1; a quick look makes one epoch of each."""
    return [_row(line, 1 if quick else line.epochs) for line in TABLE]


def _row(line: PrintedSetting, epochs: float) -> TrainingRow:
    settings = {
        "learning_rate": line.learning_rate,
        "noise_multiplier": line.noise_multiplier,
        "clip_norm": line.clip_norm,
        "epochs": epochs,
    }
    return TrainingRow(line.name, settings, {SCORE: line.accuracy, MU: line.mu, CLT: line.clt, MOMENTS: line.moments})


STUDY = Study(COLUMNS, rows, defaults=DEFAULTS, build_task=build_task)
