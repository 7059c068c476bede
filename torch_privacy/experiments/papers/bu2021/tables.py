# SPDX-License-Identifier: Apache-2.0
"""Digits with norms by random projections: Bu, Gopi, Kulkarni, Lee, Shen and Tantipongpipat (2021), MNIST.

``torch-privacy reproduce jl-mnist`` times a step of two convolutions and two dense layers (26,010 parameters) by every
method that the paper compares, measures its memory and largest batch, and trains with 1, 5, 10 and 30 projections and
with exact norms. The paper states 95 % accuracy at epsilon 2.4 with one projection; that epsilon is wrong.

Source: arXiv:2102.03013, Tables 3 and 4 and the section on MNIST.
"""

from dataclasses import dataclass

from torch.optim import SGD

from torch_privacy.data import load_mnist
from torch_privacy.experiments.models.networks import mnist_cnn
from torch_privacy.experiments.papers.bu2021 import common as jl
from torch_privacy.experiments.papers.bu2021.common import LARGEST, SECONDS
from torch_privacy.runs.rows import EXACT, SCORE


@dataclass(frozen=True)
class Settings(jl.Settings):
    """The paper's settings; 15 epochs are 3,516 steps."""

    noise_multiplier: float | None = 1.3
    learning_rate: float = 0.25
    clip_norm: float = 1.5
    epochs: float = 15


EXPERIMENT = jl.Experiment(
    Settings,
    load_mnist,
    mnist_cnn,
    SGD,
    methods={
        "non-private": {SECONDS: 1, LARGEST: 60_000},
        "vanilla": {SECONDS: 50, LARGEST: 512},
        "outer product": {SECONDS: 12},
        "JL(1)": {SECONDS: 3},
        "JL(10)": {SECONDS: 20, LARGEST: 60_000},
    },
    trained={0: {}, 30: {}, 10: {}, 5: {}, 1: {SCORE: 0.95, EXACT: 2.4}},
    quick_epochs=0.1,
)
COLUMNS, NOTES = jl.COLUMNS, jl.NOTES
build_task, rows, figures = EXPERIMENT.build_task, EXPERIMENT.rows, EXPERIMENT.figures
