# SPDX-License-Identifier: Apache-2.0
"""Photographs with norms by random projections: Bu, Gopi, Kulkarni, Lee, Shen and Tantipongpipat (2021), CIFAR-10.

``torch-privacy reproduce jl-cifar10`` does with seven convolutions and a dense layer (623,146 parameters, as printed;
the widths are reconstructed) what ``jl-mnist`` does. The paper states 66.1 % accuracy at epsilon 5.55 with one
projection; that epsilon is wrong.

Source: arXiv:2102.03013, the tables and the section on CIFAR-10.
"""

from dataclasses import dataclass

from torch.optim import SGD

from torch_privacy.data import load_cifar10
from torch_privacy.experiments.models.networks import cifar_cnn
from torch_privacy.experiments.papers.bu2021 import common as jl
from torch_privacy.experiments.papers.bu2021.common import SECONDS
from torch_privacy.runs.rows import EXACT, SCORE


@dataclass(frozen=True)
class Settings(jl.Settings):
    """The paper's settings; 20 epochs are 3,906 steps."""

    noise_multiplier: float | None = 0.9
    learning_rate: float = 0.1
    clip_norm: float = 2.0
    epochs: float = 20


EXPERIMENT = jl.Experiment(
    Settings,
    load_cifar10,
    cifar_cnn,
    SGD,
    methods={
        "non-private": {SECONDS: 2.5},
        "vanilla": {SECONDS: 434},
        "JL(1)": {SECONDS: 6.6},
        "JL(10)": {SECONDS: 38},
    },
    trained={0: {}, 30: {}, 10: {}, 5: {}, 1: {SCORE: 0.661, EXACT: 5.55}},
    quick_epochs=0.005,
)
COLUMNS, NOTES = jl.COLUMNS, jl.NOTES
build_task, rows, figures = EXPERIMENT.build_task, EXPERIMENT.rows, EXPERIMENT.figures
