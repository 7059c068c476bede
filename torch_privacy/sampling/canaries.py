# SPDX-License-Identifier: Apache-2.0
"""Provides a data set with canaries: records that fair coins put into the data of an audited run, or leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from ..support.validate import Refused, whole
from .datasets import check_map_style


@dataclass(frozen=True)
class GradientCanaries:
    """Canaries that are gradients, not records: canary i has its own entry of every large parameter.

    Its gradient is zero elsewhere, and large enough to be clipped always. No two canaries share an entry, so they do
    not disturb each other, and the attack on them is nearly ideal. A parameter is large if it has ``count`` entries or
    more; there must be one.

    Args:
        count: number of canaries.

    Example:
        >>> GradientCanaries(1000)
        GradientCanaries(count=1000)

    Source: Nasr et al. (2023), arXiv 2302.07956; Steinke, Nasr & Jagielski (2023), arXiv 2305.08846, "Dirac canaries".
    """

    count: int

    def __post_init__(self) -> None:
        whole("GradientCanaries", count=self.count, at_least=1)

    def __len__(self) -> int:
        return self.count


class WithCanaries(Dataset):
    """A data set of n examples and m canaries, of which those with ``coins[i]`` true are in.

    Its length is n + m whatever the coins are, so that sampling probability and divisor do not depend on them. Canaries
    that are out are sampled like all others and then left out of the batch: exactly the data set without them.

    Args:
        dataset: map-style data set of n examples.
        canaries: map-style data set, or a list, of m more examples like these; or `GradientCanaries`.
        coins: (m,) bool; true for those that are in.
    """

    def __init__(self, dataset: Dataset, canaries: Dataset | Sequence[Any] | GradientCanaries, coins: np.ndarray):
        check_map_style(dataset)
        self.examples, self.num_examples = dataset, len(dataset)  # type: ignore[arg-type]
        self.num_canaries = len(canaries)  # type: ignore[arg-type]
        self.are_records = not isinstance(canaries, GradientCanaries)
        if self.are_records:
            check_map_style(canaries, "canaries")
        if len(coins) != self.num_canaries:
            raise ValueError(f"WithCanaries: {len(coins)} coins for {self.num_canaries} canaries; must be as many.")
        self.items = joined(dataset, canaries) if self.are_records else dataset  # those out included
        self.scores: Any = None  # what observes the training on this data set
        self.training: Any = None
        self._is_in = np.concatenate([np.ones(self.num_examples, bool), np.asarray(coins, bool)])

    def check_only_one(self, training: Any) -> None:
        """Remembers the training on the data set; refuses a second one, if canaries are scored."""
        if self.scores is not None and self.training is not None:
            raise Refused(
                "tp.audit: train(dataset) made a second PrivateTraining on the data set with canaries. Make one; or "
                "audit a game of several trainings by tp.audit_scores, with scores and claim of your own."
            )
        self.training = training

    def __len__(self) -> int:
        return self.num_examples + self.num_canaries

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        if not self._is_in[index]:
            raise Refused(
                f"item {index} is a canary that this run leaves out. Pass the data set of an audit to PrivateTraining "
                "only; read the examples from your own data set."
            )
        if index >= len(self.items):  # type: ignore[arg-type]
            raise Refused(f"item {index} is a gradient canary, which has no record. Read your own data set.")
        return self.items[index]

    @property
    def fetchable(self) -> np.ndarray:
        """Returns the indices of all examples and of the canaries that are in and have a record."""
        return np.flatnonzero(self._is_in[: len(self.items)])  # type: ignore[arg-type]

    def present(self, indices: np.ndarray) -> np.ndarray:
        """Returns those of the indices that are in."""
        return indices[self._is_in[indices]]

    def has_record(self, indices: np.ndarray) -> np.ndarray:
        """Returns True for each index of an example or of a canary that can be fetched."""
        return indices < len(self.items)  # type: ignore[arg-type]

    def is_canary(self, indices: np.ndarray) -> np.ndarray:
        """Returns True for each index of a canary."""
        return indices >= self.num_examples


class _Joined(Dataset):
    """Presents the items of two data sets as one."""

    def __init__(self, first: Any, second: Any):
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __getitem__(self, index: int) -> Any:
        n = len(self._first)
        return self._first[index] if index < n else self._second[index - n]


def joined(dataset: Any, canaries: Any) -> Dataset:
    """Returns the items of both; a `TensorDataset` if the first is one and the items of the second fit."""
    if type(dataset) is TensorDataset:
        tensors = _as_tensors(dataset.tensors, canaries)
        if tensors is not None:
            return TensorDataset(*(torch.cat(pair) for pair in zip(dataset.tensors, tensors, strict=True)))
    return _Joined(dataset, canaries)


def _as_tensors(like: Sequence[torch.Tensor], canaries: Any) -> list[torch.Tensor] | None:
    """Returns the canaries' items as tensors like these; None if their shapes differ."""
    if type(canaries) is TensorDataset:
        tensors = [*canaries.tensors]
    else:
        items = [canaries[i] for i in range(len(canaries))]
        if not all(isinstance(item, (tuple, list)) and len(item) == len(like) for item in items):
            return None
        tensors = [torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*items, strict=True)]
    if [part.shape[1:] for part in tensors] != [part.shape[1:] for part in like]:
        return None
    return [part.to(model) for part, model in zip(tensors, like, strict=True)]
