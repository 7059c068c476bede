# SPDX-License-Identifier: Apache-2.0
"""Digits with NoisySGD at six noise levels: Bu, Dong, Long and Su (2020), Table 1.

``torch-privacy reproduce gdp-mnist`` trains two convolutions and two dense layers (26,010 parameters) on MNIST. The
paper reports 95.0 to 98.0 % test accuracy, averaged over ten runs, at mu = 0.23 to 4.78.

Source: Z. Bu, J. Dong, Q. Long, W. Su, "Deep learning with Gaussian differential privacy", Harvard Data Science Review
2(3), 2020, arXiv:1911.11607; the settings of the first three lines are those of TensorFlow Privacy's tutorial.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from torch_privacy.data import load_mnist
from torch_privacy.experiments.models.networks import mnist_cnn
from torch_privacy.experiments.papers.bu2020.table1 import BATCH, DELTA, TABLE, Setting
from torch_privacy.experiments.task import Task, seeded
from torch_privacy.runs.rows import ACCURACY_COLUMN, CLT, MOMENTS, MU, PRIVACY_COLUMNS, SCORE, Training

COLUMNS = {SCORE: ACCURACY_COLUMN, **PRIVACY_COLUMNS}


@dataclass(frozen=True)
class Settings:
    """The first line of the table; 15 epochs are 3,516 steps."""

    noise_multiplier: float | None = TABLE[0].noise_multiplier  # None with a target_epsilon, and only then
    target_epsilon: float | None = None
    delta: float = DELTA
    expected_batch_size: int = BATCH
    learning_rate: float = TABLE[0].learning_rate
    clip_norm: float = TABLE[0].clip_norm
    epochs: float = TABLE[0].epochs
    seed: int = 0  # public: the initial weights, the baseline's shuffling; never the noise
    baseline: bool = False
    data: str | None = None


def build_task(settings: Settings) -> Task:
    """MNIST's own split, and the network to be trained on it."""
    data = load_mnist(settings.data)
    return Task(
        train=data.train,
        test=data.test,
        new_model=partial(seeded, mnist_cnn, settings.seed),
        new_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=settings.learning_rate),
        losses=partial(F.cross_entropy, reduction="none"),
        not_covered=data.not_covered,
        data_files=data.files,
    )


def rows(quick: bool) -> Sequence[Training]:
    """The six lines of Table 1; a quick look makes one epoch of each."""
    return [_row(line, 1 if quick else line.epochs) for line in TABLE]


def _row(line: Setting, epochs: float) -> Training:
    settings = {
        "learning_rate": line.learning_rate,
        "noise_multiplier": line.noise_multiplier,
        "clip_norm": line.clip_norm,
        "epochs": epochs,
    }
    return Training(line.name, settings, {SCORE: line.accuracy, MU: line.mu, CLT: line.clt, MOMENTS: line.moments})
