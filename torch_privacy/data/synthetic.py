# SPDX-License-Identifier: Apache-2.0
"""Draws synthetic data in the format of real ones, to try settings without private data."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

from torch_privacy.data.adult import NUM_FEATURES
from torch_privacy.data.dataset import Data

# The numbers of answers to each of the census's 14 questions, from its documentation.
ADULT_QUESTIONS = (5, 8, 5, 16, 5, 7, 14, 6, 5, 2, 2, 2, 5, 41)
ADULT_RICH = 0.24  # fraction of incomes above 50,000 dollars, from the documentation
UNDECIDED = 0.7  # standard deviation of wealth that answers do not explain, relative to the explained one


def synthetic_adult(num_train: int = 29_305, num_test: int = 3_256, seed: int = 0) -> Data:
    """Returns synthetic people: one answer to each question of `load_adult`, and an income that depends on some.

    It uses only published facts: the questions, their numbers of answers, and the fraction of large incomes.

    Args:
        num_train: number of training examples.
        num_test: number of test examples.
        seed: of the draws.

    Example:
        >>> data = synthetic_adult(1000, 100)
        >>> inputs, labels = data.train.tensors
        >>> tuple(inputs.shape), inputs.sum(1).unique().tolist(), data.num_classes
        ((1000, 123), [14.0], 2)
    """
    generator, n = np.random.default_rng(seed), num_train + num_test
    features, first = np.zeros((n, NUM_FEATURES), np.float32), 0
    for count in ADULT_QUESTIONS:
        answers = generator.choice(count, n, p=generator.dirichlet(np.ones(count)))
        features[np.arange(n), first + answers] = 1
        first += count
    answers_mixed = features @ generator.standard_normal((NUM_FEATURES, 4))
    wealth = np.tanh(answers_mixed) @ generator.standard_normal(4)
    wealth += UNDECIDED * wealth.std() * generator.standard_normal(n)
    labels = wealth > np.quantile(wealth, 1 - ADULT_RICH)
    x, y = torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64))
    parts = TensorDataset(x[:num_train], y[:num_train]), TensorDataset(x[num_train:], y[num_train:])
    return Data("synthetic Adult", *parts, classes=("<=50K", ">50K"), licence="made up, no rights", files={})
