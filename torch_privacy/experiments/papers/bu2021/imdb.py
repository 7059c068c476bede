# SPDX-License-Identifier: Apache-2.0
"""Film reviews with norms by random projections: Bu, Gopi, Kulkarni, Lee, Shen and Tantipongpipat (2021), IMDb.

``torch-privacy reproduce jl-imdb`` does with a bidirectional LSTM (598,274 parameters) and Adam, DP-Adam-JL, what
``jl-mnist`` does. The paper states 83.2 % accuracy at epsilon 21 with one projection; that epsilon is wrong.

Source: arXiv:2102.03013, the tables and the section on IMDb.
"""

from dataclasses import dataclass

from torch.optim import Adam

from torch_privacy.data import Data, TrainingWords, load_imdb
from torch_privacy.experiments.models.networks import BiLSTM
from torch_privacy.experiments.papers.bu2021 import common as jl
from torch_privacy.experiments.papers.bu2021.common import SECONDS
from torch_privacy.runs.rows import EXACT, SCORE

WORDS, LENGTH = 8185, 150


@dataclass(frozen=True)
class Settings(jl.Settings):
    """The paper's settings, but for the number of epochs, which it does not print; 15 of them are 1,465 steps."""

    noise_multiplier: float | None = 0.6
    learning_rate: float = 0.001
    clip_norm: float = 1.0
    epochs: float = 15


def load(folder: str | None) -> Data:
    """The reviews, each its 150 last words."""
    return load_imdb(folder, vocabulary=TrainingWords(WORDS), length=LENGTH)


EXPERIMENT = jl.Experiment(
    Settings,
    load,
    BiLSTM,
    Adam,
    methods={
        "non-private": {SECONDS: 12},
        "vanilla": {SECONDS: 13_931},
        "JL(1)": {SECONDS: 38},
        "JL(5)": {SECONDS: 128},
        "JL(10)": {SECONDS: 243},
        "JL(30)": {SECONDS: 669},
    },
    trained={0: {}, 30: {}, 10: {}, 5: {}, 1: {SCORE: 0.832, EXACT: 21}},
    quick_epochs=0.01,
)
COLUMNS = jl.COLUMNS
NOTES = (*jl.NOTES, "The vocabulary is taken from the training reviews without noise: no epsilon covers it.")
build_task, rows, figures = EXPERIMENT.build_task, EXPERIMENT.rows, EXPERIMENT.figures
