# SPDX-License-Identifier: Apache-2.0
"""From the numbers of examples to what the user's loop gets: fetched, collated, split into microbatches."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from ._model_state import same
from ._replay import OwnRandomNumbers, next_numbers
from ._validate import Refused

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Draw:
    """One (micro)batch to fetch: the examples' numbers, how often each is fetched, and the random numbers for it."""

    numbers: np.ndarray
    views: int = 1
    seed: bytes | None = None  # None leaves the user's random numbers as they are
    keeps_items: bool = False  # whether a worker gives the items beside the batch, as they will be asked for

    def seed_for(self, purpose: str) -> bytes:
        """A seed of its own for fetching, collating, ..."""
        assert self.seed is not None
        return hashlib.blake2b(purpose.encode(), key=self.seed, digest_size=32).digest()


class Batches:
    """Collated batches of a map-style dataset for given numbers of examples.

    The result is what ``torch.utils.data.DataLoader`` would give for the same examples. Tensors in a
    ``TensorDataset`` (or a ``Subset`` of one) are indexed at once instead of example by example. While examples are
    fetched and collated, in workers, too, the random numbers of torch, numpy and Python are a function of the seed.
    """

    def __init__(self, dataset: Dataset, collate_fn: Collate | None, num_workers: int):
        check_map_style(dataset)
        self.dataset = dataset
        self._collate = collate_fn or default_collate
        self._tensors = _tensors_of(dataset) if collate_fn is None else None
        self._num_workers = num_workers

    @property
    def holds_tensors(self) -> bool:
        """Whether the data set is nothing but tensors, whose rows are the items."""
        return self._tensors is not None

    def __call__(self, draws: Iterator[Draw]) -> Iterator[Drawn]:
        """The batch of every draw, in order."""
        if self._num_workers == 0:
            for draw in draws:
                yield Drawn(self, draw, self.fetch(draw))
            return
        waiting: deque[Draw] = deque()

        def noted() -> Iterator[Draw]:
            for draw in draws:
                waiting.append(draw)
                yield draw

        loader = DataLoader(
            _Fetching(self),
            batch_size=None,
            sampler=noted(),
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # so that starting the workers takes nothing from the user's random state
        )
        for fetched in loader:
            yield Drawn(self, waiting.popleft(), fetched)

    def plain(self, numbers: Iterable[np.ndarray]) -> Iterator[Any]:
        """The collated batch of every array of example numbers, with the user's own random numbers."""
        for some in numbers:
            draw = Draw(some)
            yield self.collate(self.items(draw), draw)

    @cached_property
    def fetches_together(self) -> bool:
        """Whether the data set is given many numbers at once, so that its items may depend on each other."""
        origin, _ = _origin(self.dataset)
        return self._tensors is None and hasattr(origin, "__getitems__")

    def fetch(self, draw: Draw) -> Fetched:
        """The batch of a draw, with its items."""
        items, items_end = self._items_to_end(draw)
        batch, end = self.collate_to_end(items, draw)
        return Fetched(batch, items, (items_end, end))

    def items(self, draw: Draw) -> Any:
        """The items of a draw, each as often as it has views; of tensors the rows."""
        return self._items_to_end(draw)[0]

    def _items_to_end(self, draw: Draw) -> tuple[Any, Any]:
        numbers = np.repeat(draw.numbers, draw.views)
        if self._tensors is not None:
            return numbers, None
        some = numbers.tolist()
        with _random_numbers(draw, "items") as position:
            if hasattr(self.dataset, "__getitems__"):
                items = list(self.dataset.__getitems__(some))  # type: ignore[attr-defined]
            else:
                items = [self.dataset[i] for i in some]
            return items, position()

    def collate(self, items: Any, draw: Draw) -> Any:
        """The batch of these items."""
        return self.collate_to_end(items, draw)[0]

    def collate_to_end(self, items: Any, draw: Draw) -> tuple[Any, Any]:
        """Returns the batch of these items, and where its random numbers ended."""
        if self._tensors is not None:
            tensors, chosen = self._tensors
            rows = torch.from_numpy(items if chosen is None else chosen[items])
            return [tensor[rows] for tensor in tensors], None
        with _random_numbers(draw, "collate") as position:
            return self._collate(items), position()


@dataclass
class Fetched:
    """A batch, as it comes from the data set or from a worker."""

    batch: Any
    items: Any  # before they were collated; None where a worker kept them
    ends: tuple[Any, Any]  # where the random numbers of the items ended, and those of ``collate_fn``


class _Fetching(Dataset):
    """Fetches whole batches, in a worker."""

    def __init__(self, batches: Batches):
        self._batches = batches

    def __getitem__(self, draw: Draw) -> Any:
        fetched = self._batches.fetch(draw)
        return fetched if draw.keeps_items else replace(fetched, items=None)


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _random_numbers(draw: Draw, purpose: str) -> Iterator[Callable[[], Any]]:
    """Sets the draw's random numbers; yields a function that returns where they stand, and None without a seed."""
    if draw.seed is None:
        yield lambda: None
        return
    own = OwnRandomNumbers(draw.seed_for(purpose))
    try:
        yield next_numbers
    finally:
        own.close()


def _start(draw: Draw, purpose: str) -> Any:
    """Returns where the draw's random numbers begin."""
    with _random_numbers(draw, purpose) as position:
        return position()


TRIES = 8  # draws of other examples, until the collated shapes agree


class Drawn:
    """A batch, and what it takes to do it again with other examples, or without some."""

    def __init__(self, batches: Batches, draw: Draw, fetched: Fetched):
        self._batches, self._draw, self._fetched = batches, draw, fetched
        self.batch, self.count = fetched.batch, len(draw.numbers)

    @cached_property
    def generator(self) -> np.random.Generator:
        """Chooses which examples are kept, and the others."""
        return np.random.Generator(np.random.PCG64DXSM(int.from_bytes(self._draw.seed_for("others"), "big")))

    def with_others(self, keep: np.ndarray) -> Any:
        """As of `Examples`: items are replaced before they are collated; else the rows of the collated tensors.

        Where whole batches of items never have equal shapes, places get items of the shapes that they had.
        """
        places = np.flatnonzero(~keep)
        pool: dict[str, list[tuple[int, Any]]] = {}  # by their shapes: numbers of other examples, and their items
        for _ in range(TRIES):
            numbers = self.generator.integers(len(self._batches.dataset), size=len(places))  # type: ignore[arg-type]
            batch = self._fetched_together(places, numbers)
            if batch is None:
                others = self._batches.items(Draw(numbers, self._draw.views, self.generator.bytes(32)))
                batch = self._collated(_mixed(self._own_items(), others, places, self._draw.views))
                for number, other in zip(numbers.tolist(), _by_example(others, self._draw.views), strict=False):
                    pool.setdefault(repr(_shapes(other)), []).append((number, other))
            if batch is not None:
                return batch
        batch = self._of_shapes(places, pool)
        if batch is None:
            alike = CollatedExamples(self.batch, self.count, self.generator, self._draw.views, sure=True)
            batch = alike.with_others(keep)
        return batch

    def without(self, keep: np.ndarray) -> Any:
        """As of `Examples`. Where random numbers are drawn for a batch as a whole, a part of it would get others."""
        items, kept, fetched = self._own_items(), np.repeat(keep, self._draw.views), self._fetched
        if self._drew("collate", fetched.ends[1]):
            alike = CollatedExamples(self.batch, self.count, self.generator, self._draw.views, sure=True)
            return alike.without(keep)
        if self._batches.fetches_together and not self._drew("items", fetched.ends[0]):
            items = self._batches.items(replace(self._draw, numbers=self._draw.numbers[keep]))
            return self._batches.collate(items, self._draw)
        some = items[kept] if isinstance(items, np.ndarray) else [items[k] for k in np.flatnonzero(kept)]
        return self._batches.collate(some, self._draw)

    def _drew(self, purpose: str, end: Any) -> bool:
        """True if random numbers were drawn for the items, or to collate them."""
        return end is not None and end != _start(self._draw, purpose)

    def repeats(self) -> bool:
        """Whether the data set gives the same items when it is asked again, with the same random numbers."""
        if self._batches.holds_tensors:
            return True
        again = self._batches.fetch(self._draw).batch
        return all(same(a, b) for a, b in zip(tree_leaves(again), tree_leaves(self.batch), strict=False))

    def _fetched_together(self, places: np.ndarray, numbers: np.ndarray) -> Any:
        """The batch with others in these places, where the data set fetches many at once, and may mix them.

        None where it does not, where the random numbers would be others, and where the shapes are.
        """
        if not self._batches.fetches_together:
            return None
        mixed = self._draw.numbers.copy()
        mixed[places] = numbers
        try:
            again = self._batches.fetch(replace(self._draw, numbers=mixed))
        except Exception:
            return None
        return again.batch if again.ends == self._fetched.ends and _shapes(again.batch) == _shapes(self.batch) else None

    def _collated(self, items: Any) -> Any:
        """The batch of these items; None where its shapes, or the random numbers that it takes, are others."""
        try:
            batch, end = self._batches.collate_to_end(items, self._draw)
        except Exception:  # as where items of two fetches were padded to different lengths
            return None
        return batch if end == self._fetched.ends[1] and _shapes(batch) == _shapes(self.batch) else None

    def _of_shapes(self, places: np.ndarray, pool: Mapping[str, list[tuple[int, Any]]]) -> Any:
        """The batch with others where there are some with the shapes of an example's own items."""
        items, views, changed = self._own_items(), self._draw.views, False
        if isinstance(items, np.ndarray):
            return None
        items = list(items)
        for place in places:
            mine = slice(views * place, views * (place + 1))
            alike = pool.get(repr(_shapes(items[mine])), ())
            fitting = [other for number, other in alike if number != self._draw.numbers[place]]
            if fitting:
                items[mine] = fitting[int(self.generator.integers(len(fitting)))]
                changed = True
        return self._collated(items) if changed else None

    def _own_items(self) -> Any:
        if self._fetched.items is None:  # a worker fetched them: the seed makes them the same ones
            self._fetched.items = self._batches.items(self._draw)
        return self._fetched.items


def _by_example(items: Any, views: int) -> Iterator[Any]:
    return (items[k : k + views] for k in range(0, len(items), views)) if isinstance(items, list) else iter(())


def _mixed(items: Any, others: Any, places: np.ndarray, views: int) -> Any:
    if isinstance(items, np.ndarray):
        mixed = items.copy()
        mixed.reshape(-1, views)[places] = others.reshape(-1, views)
        return mixed
    mixed = list(items)
    for k, place in enumerate(places):
        for view in range(views):
            mixed[views * place + view] = others[views * k + view]
    return mixed


class CollatedExamples:
    """A batch of which no more is known than what was collated: tensors and lists with the examples first.

    Args:
        batch: a tensor, or tuples, lists and mappings of such.
        count: number of examples.
        generator: chooses the others, among the examples of the batch.
        views: rows of each example, one behind the other.
        sure: give nothing where some tensor has another length, or where a list has as many tensors as there are
            examples, each of this length: it may be a list of inputs, or one of examples.
    """

    def __init__(self, batch: Any, count: int, generator: np.random.Generator, views: int = 1, *, sure: bool = False):
        self.batch, self.count, self._generator, self._views, self._sure = batch, count, generator, views, sure

    def with_others(self, keep: np.ndarray) -> Any:
        """As of `Examples`."""
        numbers = np.arange(self.count)
        shift = self._generator.integers(1, max(2, self.count), size=self.count)
        chosen = self._rows_of(self.batch, np.where(keep, numbers, (numbers + shift) % self.count))
        return chosen if chosen is not None and _shapes(chosen) == _shapes(self.batch) else None

    def without(self, keep: np.ndarray) -> Any:
        """As of `Examples`."""
        return self._rows_of(self.batch, np.flatnonzero(keep))

    def _rows_of(self, batch: Any, numbers: np.ndarray) -> Any:
        views = self._views
        rows = (views * numbers[:, None] + np.arange(views)).ravel()
        found: list[bool] = []
        chosen = _rows(batch, rows, views * self.count, found)
        return chosen if all(found if self._sure else [True]) and any(found) else None


def _rows(batch: Any, rows: np.ndarray, n: int, found: list[bool]) -> Any:
    """The examples with these numbers: of tensors with n first, and of lists of n things."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        if batch.ndim and len(batch) == n:
            found.append(True)
            return batch[torch.from_numpy(rows).to(batch.device) if isinstance(batch, torch.Tensor) else rows]
        if batch.ndim:
            found.append(False)
        return batch
    if isinstance(batch, Mapping):
        part: Any = copy(batch)  # of its own kind, which may have attributes
        for key, value in batch.items():
            part[key] = _rows(value, rows, n, found)
        return part
    if isinstance(batch, (list, tuple)):
        whole = [isinstance(v, torch.Tensor) and v.ndim > 0 and len(v) == n for v in batch]
        if len(batch) == n and not all(whole):
            found.append(True)
            return type(batch)(batch[k] for k in rows)
        if len(batch) == n and n > 1:
            found.append(False)
        parts = [_rows(value, rows, n, found) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        part = copy(batch)
        for entry in fields(batch):
            object.__setattr__(part, entry.name, _rows(getattr(batch, entry.name), rows, n, found))
        return part
    return batch


def _shapes(batch: Any) -> Any:
    """The structure of a batch, with the shapes of its tensors."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {key: _shapes(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_shapes(value) for value in batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        return [_shapes(getattr(batch, entry.name)) for entry in fields(batch)]
    return None


def check_map_style(dataset: Any, name: str = "dataset") -> None:
    """Refuse what examples cannot be drawn from by number: loaders (they shuffle), streams, things without a length."""
    if isinstance(dataset, DataLoader):
        raise Refused(
            f"{name} is a DataLoader: its shuffled batches are no Poisson sample, and the privacy guarantee is for "
            "Poisson sampling only. Pass loader.dataset; batches are drawn here."
        )
    if type(dataset).__module__.startswith("pandas."):
        raise Refused(
            f"{name} is a {type(dataset).__name__} of pandas, and its items are columns, not rows. Pass the rows, e.g. "
            "TensorDataset(torch.tensor(frame[features].values), torch.tensor(frame[label].values))."
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
