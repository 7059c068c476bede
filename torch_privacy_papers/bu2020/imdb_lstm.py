# SPDX-License-Identifier: Apache-2.0
"""Classifies film reviews with a two-layer LSTM: the baseline of Bu, Dong, Long and Su (2020), Table 3.

``torch-privacy reproduce gdp-imdb-lstm`` trains two bidirectional LSTM layers without privacy, as the paper does, and
privately with NoisyAdam, as it does not: with exact norms, and the noise, sampling and clip norm of `gdp-imdb`.

The text says of it only "the (non private) two-layer LSTM RNN model in the Tensorflow tutorials": the layers are that
tutorial's, of 64 and 32 units in each direction. Words and length are those of `gdp-imdb` in place of subwords, and the
learning rate is 0.001, Adam's default, in place of 0.0001.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from torch_privacy.data import TrainingWords, load_imdb
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task, seeded
from torch_privacy.runs.rows import MU, USUAL_COLUMNS, TrainingRow
from torch_privacy_papers.bu2020 import imdb
from torch_privacy_papers.bu2020.imdb import Settings
from torch_privacy_papers.models.networks import StackedLSTM

NOTES = (
    imdb.VOCABULARY,
    "The paper trains this network without privacy only; its accuracy is not in the text that we have.",
    "Not private: as many epochs of Adam on 90 % of the training reviews, and of these epochs the best one on the "
    "other 10 %. Its learning rate was not tuned, nor was that of NoisyAdam.",
)
DEFAULTS = replace(imdb.DEFAULTS, learning_rate=0.001)
HELD_OUT = 0.1


def build_task(settings: Settings) -> Task:
    """Returns IMDb's own split and the LSTM."""
    return task.classification(
        load_imdb(settings.data, vocabulary=TrainingWords(settings.words), length=settings.length),
        partial(seeded, partial(StackedLSTM, settings.words), settings.seed),
        settings,
        new_optimizer=lambda model: torch.optim.Adam(task.trainable(model), lr=settings.learning_rate),
        baseline_held_out=HELD_OUT,
    )


def rows(quick: bool) -> Sequence[TrainingRow]:
    """Returns the private training, with its baseline; a quick look makes a few steps."""
    return [TrainingRow("two-layer LSTM, NoisyAdam", {"epochs": 0.04, "baseline": False} if quick else {}, {MU: 2.07})]


STUDY = Study(USUAL_COLUMNS, rows, NOTES, DEFAULTS, build_task)
