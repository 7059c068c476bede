# SPDX-License-Identifier: Apache-2.0
"""Provides `Data`, which every reader returns, and random splits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from torch_privacy.support import validate as _check


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, read and checked.

    Both parts are pairs of tensors: inputs (n, ...) and labels (n,), int64, where label i stands for ``classes[i]``.
    Images are float32 of shape (n, channels, height, width) in [0, 1]; features are float32 of shape (n, d); words,
    users and movies are numbers, int64 of shape (n, t).
    """

    name: str
    train: TensorDataset
    test: TensorDataset
    classes: tuple[Any, ...]
    licence: str
    files: Mapping[str, str]  # name -> SHA-256 of every file that was read, as it lies on the disk
    num_ids: tuple[int, ...] = ()  # sizes of the columns of inputs that are ids
    not_covered: tuple[str, ...] = field(
        default=()
    )  # what was computed from the examples without noise: no epsilon covers it

    @property
    def num_classes(self) -> int:
        """Returns the number of classes."""
        return len(self.classes)


def images(pixels: NDArray[np.uint8], labels: NDArray[np.integer[Any]]) -> TensorDataset:
    """Converts pixels (n, channels, height, width) of 0 to 255 and labels (n,) to the tensors of ``Data``.

    The scale is 1/255, not a statistic of the images, since a mean of private images would be a release.
    """
    return TensorDataset(scaled(pixels), torch.from_numpy(labels.astype(np.int64)))


def scaled(pixels: NDArray[np.uint8]) -> torch.Tensor:
    """Converts pixels of 0 to 255 to float32 in [0, 1]."""
    return torch.from_numpy(pixels.astype(np.float32)).div_(255)


def rows(inputs: torch.Tensor, labels: torch.Tensor, chosen: NDArray[np.int64]) -> TensorDataset:
    """Returns the chosen examples."""
    index = torch.from_numpy(chosen)
    return TensorDataset(inputs[index], labels[index])


def random_split(num_examples: int, *, test_fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the row numbers of a random training part and of the test part, each in increasing order.

    The seed is public: it determines which rows are held out, and depends on no example.

    Args:
        num_examples: Number of rows, at least 1.
        test_fraction: Fraction of rows in the test part, in (0, 1); the count is rounded to the nearest integer.
        seed: A non-negative integer; equal seeds give equal splits.

    Returns:
        Training rows and test rows; together they hold every row once.

    Example:
        >>> train, test = random_split(10, test_fraction=0.2, seed=0)
        >>> len(train), len(test)
        (8, 2)
    """
    _check.whole("random_split", at_least=1, num_examples=num_examples)
    _check.whole("random_split", seed=seed)
    _check.strictly_between("random_split", 0, 1, test_fraction=test_fraction)
    order = np.random.default_rng(seed).permutation(num_examples)
    num_test = round(num_examples * test_fraction)
    return np.sort(order[num_test:]), np.sort(order[:num_test])
