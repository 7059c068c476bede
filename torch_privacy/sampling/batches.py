# SPDX-License-Identifier: Apache-2.0
"""Fetches, collates and splits batches of given examples."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from ..support.draws import AS_DRAWN, Drawn, Rule, RunDraws
from ..support.fixed_draws import drawing
from ..support.random_state import SeededRandomNumbers, random_position
from ..support.validate import Refused
from .datasets import behind_subsets, check_map_style, tensors_and_rows
from .places import Places
from .shadow import apart

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class BatchRequest:
    """Describes one (micro)batch to fetch."""

    indices: np.ndarray  # of the examples
    views: int = 1  # how often each example is fetched
    seed: bytes | None = None  # of the random numbers; None leaves the user's random state unchanged
    keeps_items: bool = False  # whether a worker returns the items with the batch, because they will be needed

    def seed_for(self, purpose: str) -> bytes:
        """Returns a separate seed for fetching, for collating, ..."""
        assert self.seed is not None
        return hashlib.blake2b(purpose.encode(), key=self.seed, digest_size=32).digest()


class Batches:
    """Fetches and collates batches of a map-style dataset for given example indices.

    The result is what ``torch.utils.data.DataLoader`` would return for the same examples. The tensors of a
    ``TensorDataset`` (or a ``Subset`` of one) are indexed at once instead of example by example. While examples are
    fetched and collated, also in workers, the random numbers of torch, numpy and Python are a function of the seed.

    Args:
        dataset: map-style.
        collate_fn, num_workers: as in ``DataLoader``.
        fetchable: indices of the examples that may take another's place in a rehearsal; by default all.
        owners: (n,) the owner of each example, if examples of one owner may depend on each other.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate_fn: Collate | None,
        num_workers: int,
        fetchable: np.ndarray | None = None,
        owners: np.ndarray | None = None,
    ):
        check_map_style(dataset)
        self.dataset, self._fetchable, self._owners = dataset, fetchable, owners
        self._collate, self.collate_fn = collate_fn or default_collate, collate_fn
        self._tensors = tensors_and_rows(dataset) if collate_fn is None else None
        self._num_workers, self.fetches_here = num_workers, num_workers == 0
        self._here: Any = None  # beside workers, what this process fetches from
        self.places = Places(dataset, lambda item: self.fetch(BatchRequest(np.array([item]), seed=bytes(32))).batch)
        self.drawn: Drawn | None = None  # by collate_fn, for the last batch

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a worker needs, which does not look after the rows."""
        return {**vars(self), "places": None, "_here": None}

    @property
    def holds_tensors(self) -> bool:
        """True if the data set consists of tensors only, with the items as their rows."""
        return self._tensors is not None

    def __call__(self, requests: Iterator[BatchRequest]) -> Iterator[tuple[BatchRequest, Fetched]]:
        """Yields every request with its batch, in order."""
        if self._num_workers == 0:
            for request in requests:
                yield request, self.fetch(request)
            return
        self._here, waiting = None, deque[BatchRequest]()

        def requests_noted() -> Iterator[BatchRequest]:
            for request in requests:
                waiting.append(request)
                yield request

        loader = DataLoader(
            _BatchDataset(self),
            batch_size=None,
            sampler=requests_noted(),
            num_workers=self._num_workers,
            collate_fn=_identity,
            generator=torch.Generator(),  # so that starting the workers does not advance the user's random state
        )
        for fetched in _naming_ended_workers(iter(loader)):
            yield waiting.popleft(), fetched

    def plain(self, batches: Iterable[np.ndarray]) -> Iterator[Any]:
        """Yields the collated batch of every array of example indices, with the user's own random numbers."""
        for indices in batches:
            request = BatchRequest(indices)
            yield self.collate(self.items(request), request)

    def draw(self, generator: np.random.Generator, count: int, kept: np.ndarray) -> np.ndarray:
        """Returns the indices (count,) of random examples, with replacement; of other owners than the kept ones."""
        if self._owners is not None:
            known = np.arange(len(self.dataset)) if self._fetchable is None else self._fetchable  # type: ignore[arg-type]
            others = known[~np.isin(self._owners[known], self._owners[kept])]
            if len(others):
                return others[generator.integers(len(others), size=count)]
        if self._fetchable is None:
            return generator.integers(len(self.dataset), size=count)  # type: ignore[arg-type]
        return self._fetchable[generator.integers(len(self._fetchable), size=count)]

    def other_rows(self, generator: np.random.Generator, kept: np.ndarray) -> np.ndarray:
        """Returns a row for each example: its own for those that are kept, and all of their owners, else another's."""
        n = len(self.dataset)  # type: ignore[arg-type]
        rows = (np.arange(n) + generator.integers(1, max(2, n), size=n)) % n
        if self._owners is not None:
            kept = np.flatnonzero(np.isin(self._owners, self._owners[kept]))
        rows[kept] = kept
        return rows

    @cached_property
    def fetches_together(self) -> bool:
        """True if the data set fetches many items in one call, so that they may depend on each other."""
        return self._tensors is None and hasattr(behind_subsets(self.dataset), "__getitems__")

    def fetch(self, request: BatchRequest) -> Fetched:
        """Returns the batch of a request, with its items."""
        items, items_end = self._items_and_end(request)
        batch, end = self.collate_and_end(items, request)
        return Fetched(batch, items, (items_end, end))

    def items(self, request: BatchRequest) -> Any:
        """Returns the items of a request, each as often as it has views; for a data set of tensors the row indices."""
        return self._items_and_end(request)[0]

    def _items_and_end(self, request: BatchRequest) -> tuple[Any, Any]:
        """Returns the items of a request, and the position of the random numbers after fetching them."""
        indices = np.repeat(request.indices, request.views)
        if self._tensors is not None:
            return indices, None
        with random_numbers_of(request, "items") as position:
            dataset = self._dataset_here()
            if hasattr(dataset, "__getitems__"):
                items = list(dataset.__getitems__(indices.tolist()))
                if len(items) != len(indices):
                    raise Refused(
                        f"__getitems__ of the data set returned {len(items)} items for {len(indices)} indices. It must "
                        "return one for each, in their order. Leave out examples that cannot be used beforehand."
                    )
            else:
                items = [dataset[i] for i in indices.tolist()]
            return items, position()

    def _dataset_here(self) -> Any:
        """Returns the data set; beside workers a copy, so that later ones do not inherit a file that it opened."""
        if self.fetches_here or get_worker_info() is not None:
            return self.dataset
        if self._here is None:
            self._here = apart(self.dataset)
        return self._here

    def collate(self, items: Any, request: BatchRequest) -> Any:
        """Returns the batch of these items."""
        return self.collate_and_end(items, request)[0]

    def collate_and_end(self, items: Any, request: BatchRequest, draws: RunDraws = AS_DRAWN) -> tuple[Any, Any]:
        """Returns the batch of these items, and the position of the random numbers after collating them."""
        if self._tensors is not None:
            tensors, subset = self._tensors
            rows = torch.from_numpy(items if subset is None else subset[items])
            rows = rows.to(tensors[0].device, non_blocking=True)
            return [_rows_of(tensor, rows) for tensor in tensors], None
        with random_numbers_of(request, "collate") as position, drawing(draws, len(items)) as drawn:
            self.drawn = drawn
            batch = self._collate(items if draws.rule is Rule.AS_DRAWN else _Items(items, drawn.restart))
            drawn.end()
            return batch, position()


@dataclass
class Fetched:
    """Holds a batch as it comes from the data set or from a worker."""

    batch: Any
    items: Any  # before collation; None if a worker did not return them
    ends: tuple[Any, Any]  # positions of the random numbers after fetching and after collating


class _BatchDataset(Dataset):
    """Presents whole batches as the items of a data set, so that workers fetch them."""

    def __init__(self, batches: Batches):
        self._batches = batches

    def __getitem__(self, request: BatchRequest) -> Any:
        fetched = self._batches.fetch(request)
        return fetched if request.keeps_items else replace(fetched, items=None)


def _naming_ended_workers(batches: Iterator[Fetched]) -> Iterator[Fetched]:
    """Yields the batches; raises a ``RuntimeError``, as torch does, if a worker ended while it handed over a batch."""
    while True:
        try:
            fetched = next(batches)
        except StopIteration:
            return
        except (EOFError, ConnectionError) as error:
            if str(error).startswith("Caught "):  # the data set's own, from a worker
                raise
            raise RuntimeError(
                f"DataLoader worker ended while it handed over a batch ({type(error).__name__}). Nothing of this batch "
                "was released: iterate over the training again. If memory is short, lower num_workers."
            ) from error
        yield fetched


def _identity(batch: Any) -> Any:
    return batch


class _Items(list):
    """Lets random numbers begin anew when ``collate_fn`` takes the next item, so that those of an item are its own."""

    def __init__(self, items: Iterable[Any], begin_anew: Callable[[], None]):
        super().__init__(items)
        self._begin_anew = begin_anew

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self._begin_anew()
            yield item
        self._begin_anew()

    def __getitem__(self, place: Any) -> Any:
        self._begin_anew()
        return super().__getitem__(place)


@contextmanager
def random_numbers_of(request: BatchRequest, purpose: str) -> Iterator[Callable[[], Any]]:
    """Seeds the random numbers for a request; yields a function that returns their position, or None without a seed."""
    if request.seed is None:
        yield lambda: None
        return
    numbers = SeededRandomNumbers(request.seed_for(purpose))
    try:
        yield random_position
    finally:
        numbers.close()


def _rows_of(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor[rows]``, in a half to a third of the time."""
    return (
        tensor.index_select(0, rows.to(tensor.device, non_blocking=True))
        if tensor.layout is torch.strided
        else tensor[rows]
    )


def split(indices: np.ndarray, microbatch_size: int | None) -> Sequence[np.ndarray]:
    """Returns consecutive parts of at most ``microbatch_size`` examples; no part for an empty batch."""
    if len(indices) == 0:
        return []
    size = microbatch_size or len(indices)
    return [indices[i : i + size] for i in range(0, len(indices), size)]
