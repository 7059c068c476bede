# SPDX-License-Identifier: Apache-2.0
"""Compares norms by random projections with other methods on MNIST, CIFAR-10 and IMDb: Bu, Gopi et al. (2021), tables.

``torch-privacy reproduce jl-mnist`` times a step of two convolutions and two dense layers (26,010 parameters) by every
method that the paper compares, measures its memory and largest batch, and trains with 1, 5, 10 and 30 projections and
with exact norms. ``jl-cifar10`` does the same with seven convolutions and a dense layer (623,146 parameters, as
printed; the widths are reconstructed), and ``jl-imdb`` with a bidirectional LSTM (598,274 parameters) and Adam, which
is DP-Adam-JL. With one projection the paper claims 95 % accuracy at epsilon 2.4 on MNIST, 66.1 % at 5.55 on CIFAR-10
and 83.2 % at 21 on IMDb; these epsilons are wrong.

Source: arXiv:2102.03013, Tables 3 and 4 and the sections on the data sets.
"""

from torch.optim import SGD, Adam

from torch_privacy.data import Data, TrainingWords, load_cifar10, load_imdb, load_mnist
from torch_privacy.runs.rows import EXACT, SCORE
from torch_privacy_papers.bu2021.common import (
    LARGEST,
    PROJECTIONS,
    RATIO,
    SECONDS,
    AccuracyComparison,
    MicroBatchSettings,
    Settings,
)
from torch_privacy_papers.models.networks import BiLSTM, cifar_cnn, mnist_cnn

WORDS, LENGTH = 8185, 150
MNIST_DEFAULTS = MicroBatchSettings(  # 15 epochs are 3,516 steps
    noise_multiplier=1.3, expected_batch_size=256, learning_rate=0.25, clip_norm=1.5, epochs=15
)
CIFAR10_DEFAULTS = Settings(  # 20 epochs are 3,906 steps
    noise_multiplier=0.9, expected_batch_size=256, learning_rate=0.1, clip_norm=2.0, epochs=20
)
IMDB_DEFAULTS = Settings(  # 20 epochs, as in Table 3 of the first version, are 1,953 steps
    noise_multiplier=0.6, expected_batch_size=256, learning_rate=0.001, clip_norm=1.0, epochs=20
)


def load_reviews(folder: str | None) -> Data:
    """Returns the reviews, each cut to its last 150 words."""
    return load_imdb(folder, vocabulary=TrainingWords(WORDS), length=LENGTH)


ON_MNIST = AccuracyComparison(
    MNIST_DEFAULTS,
    load_mnist,
    mnist_cnn,
    SGD,
    methods={
        "non-private": {SECONDS: 1, LARGEST: 60_000},
        "vanilla": {SECONDS: 50, LARGEST: 512},
        "outer product": {SECONDS: 12},
        "JL(1)": {SECONDS: 3},
        "JL(10)": {SECONDS: 20, LARGEST: 60_000},
        "JL(10), double vjp": {SECONDS: 22},
    },
    trained={0: {}, 30: {}, 10: {}, 5: {}, 1: {SCORE: 0.95, EXACT: 2.4}},
    goal=0.95,
    micro_batches=(4, 16),
    quick_epochs=0.1,
)
ON_CIFAR10 = AccuracyComparison(
    CIFAR10_DEFAULTS,
    load_cifar10,
    cifar_cnn,
    SGD,
    methods={
        "non-private": {SECONDS: 2.5},
        "vanilla": {SECONDS: 434},
        "JL(1)": {SECONDS: 6.6},
        "JL(10)": {SECONDS: 38},
        "outer product": {SECONDS: 17, RATIO: 17 / 12},
        "JL(1), double vjp": {SECONDS: 78, RATIO: 78 / 12},
        "JL(10), double vjp": {SECONDS: 657, RATIO: 657 / 12},
    },
    trained={0: {}, 30: {}, 10: {}, 5: {}, 1: {SCORE: 0.661, EXACT: 5.55}},
    goal=0.55,
    quick_epochs=0.005,
)
ON_IMDB = AccuracyComparison(
    IMDB_DEFAULTS,
    load_reviews,
    BiLSTM,
    Adam,
    methods={
        "non-private": {SECONDS: 12},
        "vanilla": {SECONDS: 13_931},
        "JL(1)": {SECONDS: 38},
        "JL(4)": {SECONDS: 100},
        "JL(5)": {SECONDS: 128},
        "JL(10)": {SECONDS: 243},
        "JL(30)": {SECONDS: 669},
    },
    trained={0: {}, 30: {}, 10: {}, 5: {}, 1: {SCORE: 0.832, EXACT: 21}},
    goal=0.70,
    projections=PROJECTIONS,
    shorter={"learning_rate": 0.01, "epochs": 3},
    quick_epochs=0.01,
)
MNIST = ON_MNIST.study(
    "micro-batches of s: the mean gradient of s examples is clipped. The sensitivity is twice the clip norm, and a "
    "step sums s times fewer terms: relative to their mean, the noise is 2 s times as large at the same epsilon. "
    "Learning rate and clip norm are those of the other rows, and were not tuned for it.",
)
CIFAR10 = ON_CIFAR10.study(
    "The paper's outer product and double vjp are in PyTorch, where the non-private epoch takes 12 s.",
)
IMDB = ON_IMDB.study(
    "The vocabulary is taken from the training reviews without noise: epsilon does not cover it.",
    "Gradients become long under the noise: with exact norms the median of a batch is 2.3, 2.7 and 8.8 after 3, 6 and "
    "10 epochs, and a tenth are above 2.6, 226 and 679, at clip norm 1. Of a gradient of norm 8.8 exact norms leave "
    "11 %, JL(1) 29 % on average; of one of norm 679, 0.15 and 0.89 %. So JL(1) has more signal under the same noise.",
    "The paper prints 83.2 % with JL(1) at a claimed epsilon of 21, which is above 10¹² in truth. Its learning rate, "
    "0.001, is low for exact norms: at 0.01, three epochs come within two points of what 20 reach.",
    "3 epochs at rate 0.01: other settings than the paper's, so that 30 projections train in less than an hour. They "
    "were chosen by two trials with exact norms, scored on held-out training reviews. No epsilon covers this choice.",
)
