# SPDX-License-Identifier: Apache-2.0
"""From the numbers of examples to what the user's loop gets: fetched, collated, split into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from ._check import Refused

Collate = Callable[[list[Any]], Any]


class Batches:
    """Collated batches of a map-style dataset for given numbers of examples.

    The result is what ``torch.utils.data.DataLoader`` would give for the same examples. Tensors in a
    ``TensorDataset`` (or a ``Subset`` of one) are indexed at once instead of example by example.
    """

    def __init__(self, dataset: Dataset, collate_fn: Collate | None, num_workers: int):
        check_map_style(dataset)
        self.dataset = dataset
        self._collate = collate_fn or default_collate
        self._tensors = _tensors_of(dataset) if collate_fn is None else None
        self._num_workers = num_workers

    def __call__(self, batches: Iterator[np.ndarray]) -> Iterator[Any]:
        """One collated batch for every array of example numbers, in order."""
        if self._num_workers == 0:
            yield from map(self._fetch, batches)
            return
        yield from DataLoader(
            self.dataset,
            batch_sampler=map(np.ndarray.tolist, batches),
            num_workers=self._num_workers,
            collate_fn=self._collate,
            generator=torch.Generator(),  # so that starting the workers takes nothing from the user's random state
        )

    def _fetch(self, indices: np.ndarray) -> Any:
        if self._tensors is not None:
            tensors, chosen = self._tensors
            rows = torch.from_numpy(indices if chosen is None else chosen[indices])
            return [tensor[rows] for tensor in tensors]
        numbers = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):
            return self._collate(self.dataset.__getitems__(numbers))  # type: ignore[attr-defined]
        return self._collate([self.dataset[i] for i in numbers])


def check_map_style(dataset: Any, name: str = "dataset") -> None:
    """Refuse what examples cannot be drawn from by number: loaders (they shuffle), streams, things without a length."""
    if isinstance(dataset, DataLoader):
        raise Refused(
            f"{name} is a DataLoader: its shuffled batches are no Poisson sample, and the privacy guarantee is for "
            "Poisson sampling only. Pass loader.dataset; batches are drawn here."
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise Refused(
            f"{name} of type {type(dataset).__name__} cannot be sampled: must be map-style, with __getitem__ and "
            "__len__. Load the examples into a list or a TensorDataset first."
        )
    if len(dataset) == 0:
        raise Refused(f"{name} is empty: must hold at least one example.")


def share_examples(a: Dataset, b: Dataset) -> bool:
    """Whether an example of one data set is one of the other, as far as `Subset` and tensors' memory tell."""
    (first, some), (second, others) = _origin(a), _origin(b)
    if first is second:
        return some is None or others is None or bool(np.isin(some, others).any())
    ours, theirs = _tensors_of(a), _tensors_of(b)
    if ours is None or theirs is None:
        return False
    return any(
        bool(np.isin(_addresses(x, ours[1]), _addresses(y, theirs[1])).any())
        for x in ours[0]
        for y in theirs[0]
        if x.numel() and y.numel() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    )


def _origin(dataset: Dataset) -> tuple[Dataset, np.ndarray | None]:
    """What a subset, of a subset, is taken from, and the chosen examples (None: all)."""
    if type(dataset) is not Subset:
        return dataset, None
    origin, chosen = _origin(dataset.dataset)
    numbers = np.asarray(dataset.indices, dtype=np.int64)
    return origin, numbers if chosen is None else chosen[numbers]


def _addresses(tensor: torch.Tensor, chosen: np.ndarray | None) -> np.ndarray:
    """Where the chosen rows begin in memory."""
    rows = np.arange(len(tensor)) if chosen is None else chosen
    return tensor.data_ptr() + rows * (tensor.stride(0) * tensor.itemsize)


def split(indices: np.ndarray, microbatch_size: int | None) -> Sequence[np.ndarray]:
    """Consecutive parts of at most ``microbatch_size`` examples; no parts of an empty batch."""
    if len(indices) == 0:
        return []
    size = microbatch_size or len(indices)
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _tensors_of(dataset: Dataset) -> tuple[tuple[torch.Tensor, ...], np.ndarray | None] | None:
    """The tensors behind the dataset and the chosen rows (None: all), where it is nothing but tensors."""
    origin, chosen = _origin(dataset)
    return (origin.tensors, chosen) if type(origin) is TensorDataset else None
