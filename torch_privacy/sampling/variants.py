# SPDX-License-Identifier: Apache-2.0
"""Builds variants of a batch for rehearsals: with other examples of the data set, or without some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from itertools import filterfalse
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..support.draws import AS_DRAWN, Drawn, Rule, RunDraws
from ..support.model_state import same, version_of
from ..support.torch_modes import tensors_in
from ..support.validate import Refused
from .batches import Batches, BatchRequest, Fetched, random_numbers_of
from .datasets import behind_subsets, source_of


def _start(request: BatchRequest, purpose: str) -> Any:
    """Returns the position at which the request's random numbers begin."""
    with random_numbers_of(request, purpose) as position:
        return position()


MAX_TRIES = 8  # draws of other examples until the collated shapes agree


class DatasetExamples:
    """Holds a batch of a data set, and builds it again with other examples of the data set, or without some."""

    def __init__(self, batches: Batches, request: BatchRequest, fetched: Fetched):
        self._batches, self._request, self._fetched = batches, request, fetched
        self.count, self.indices = len(request.indices), request.indices
        self._versions = _versions(fetched.batch)
        self._whole: tuple[RunDraws, Any] = AS_DRAWN, fetched.batch  # the last one that was asked for
        self.drawn: Drawn | None = None
        self.notes: set[str] = set()

    @property
    def batch(self) -> Any:
        """Returns the batch; fetches it again, with the same seed, if its tensors were written into since."""
        if _versions(self._fetched.batch) != self._versions:
            self._fetched = self._batches.fetch(self._request)
            self._versions = _versions(self._fetched.batch)
        return self._fetched.batch

    @cached_property
    def generator(self) -> np.random.Generator:
        """Returns the generator that chooses the kept examples and the replacements."""
        return np.random.Generator(np.random.PCG64DXSM(int.from_bytes(self._request.seed_for("others"), "big")))

    @property
    def drawn_together(self) -> bool:
        """Implements `BatchVariants`."""
        return self._drew("collate", self._fetched.ends[1])

    def whole(self, draws: RunDraws) -> Any:
        """Implements `BatchVariants`; returns the batch as it was drawn if collate_fn draws what cannot be replaced."""
        if draws.rule is Rule.AS_DRAWN or not self.drawn_together:
            return self.batch
        if self._whole[0] != draws:
            batch = self._collated_with(self.items, draws)
            self._whole, self.drawn = (draws, self.batch if batch is None else batch), self._batches.drawn
        return self._whole[1]

    def with_others(self, keep: np.ndarray, draws: RunDraws = AS_DRAWN) -> Any:
        """Implements `BatchVariants`: replaces items before collation or, if that fails, rows of the collated tensors.

        If whole batches of other items never have equal shapes, each item is replaced by one of its own shapes.
        """
        whole = self.whole(draws)
        places = np.flatnonzero(~keep)
        pool: dict[str, list[tuple[int, Any]]] = {}  # shapes -> indices and items of other examples
        for _ in range(MAX_TRIES):
            indices = self._batches.draw(self.generator, len(places), self._request.indices[keep])
            batch = self._fetched_together(places, indices) if draws.rule is Rule.AS_DRAWN else None
            if batch is None:
                others = self._batches.items(BatchRequest(indices, self._request.views, self.generator.bytes(32)))
                batch = self._collated(_mixed(self.items, others, places, self._request.views), draws, whole)
                for index, other in zip(indices.tolist(), _by_example(others, self._request.views), strict=False):
                    pool.setdefault(repr(shapes_of(other)), []).append((index, other))
            if batch is not None:
                return batch
        batch = self._replaced_by_shape(places, pool, draws, whole)
        if batch is None and (draws.rule is not Rule.AS_DRAWN or not self.drawn_together):
            batch = self._collated_examples(whole).with_others(keep)
        return batch

    def without(self, keep: np.ndarray, draws: RunDraws = AS_DRAWN) -> Any:
        """Implements `BatchVariants`."""
        items, kept, fetched = self.items, np.repeat(keep, self._request.views), self._fetched
        if self.drawn_together:  # a part alone would draw other random numbers
            whole = self.whole(draws)
            batch = (
                None if whole is self.batch else self._collated_with([items[k] for k in np.flatnonzero(kept)], draws)
            )
            if batch is not None:
                return batch
            self.notes.add(
                "What collate_fn makes of a part of the batch was not compared, because it draws random numbers that "
                "could not be replaced: padding or a division there may depend on other examples."
            )
            return self._collated_examples(whole).without(keep)
        if self._batches.fetches_together and not self._drew("items", fetched.ends[0]):
            items = self._batches.items(replace(self._request, indices=self._request.indices[keep]))
            return self._batches.collate(items, self._request)
        kept_items = items[kept] if isinstance(items, np.ndarray) else [items[k] for k in np.flatnonzero(kept)]
        return self._batches.collate(kept_items, self._request)

    def _collated_examples(self, batch: Any) -> CollatedExamples:
        """Returns the same batch, to be changed after collation."""
        return CollatedExamples(batch, self.count, self.generator, self._request.views, only_if_sure=True)

    def _drew(self, purpose: str, end: Any) -> bool:
        """True if random numbers were drawn to fetch the items, or to collate them."""
        return end is not None and end != _start(self._request, purpose)

    def few(self, count: int) -> BatchRequest:
        """Returns the request for the first examples of the batch."""
        return replace(self._request, indices=self._request.indices[:count])

    def others(self, count: int) -> BatchRequest:
        """Returns a request for random examples of the data set."""
        indices = self._batches.draw(self.generator, count, self._request.indices)
        return BatchRequest(indices, self._request.views, self.generator.bytes(32))

    def sizes(self) -> np.ndarray | None:
        """Returns the number of numbers and letters in each example (count,); None where items are no list."""
        found = [_size(one) for one in _by_example(self.items, self._request.views)]
        return np.array(found) if len(found) == self.count else None

    def repeats(self) -> bool:
        """True if the data set returns the same items again, given the same random numbers."""
        return self._is_repeated

    @cached_property
    def _is_repeated(self) -> bool:
        if self._batches.holds_tensors:
            return True
        return equal_batches(self._batches.fetch(self._request).batch, self.batch)

    @property
    def fetches_rows(self) -> bool:
        """True if items are rows of tensors, which no code makes."""
        return self._batches.holds_tensors

    @property
    def code(self) -> list[Any]:
        """Returns what builds batches besides the user's loop: ``collate_fn``."""
        return [self._batches.collate_fn]

    @property
    def sources(self) -> list[Any]:
        """Returns the data set and, if it is a subset, the one behind it."""
        dataset = self._batches.dataset
        source = behind_subsets(dataset)
        return [dataset] if source is dataset else [dataset, source]

    @property
    def fetches_here(self) -> bool:
        """True unless items are fetched in other processes, which do not see what the loop changes."""
        return self._batches.fetches_here

    def rows_of_others(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns rows with which those of all other examples are exchanged, and the places of this batch's examples.

        For the data set and, if it is a subset, for the one behind it: there, rows outside of the subset stay.
        """
        rows, kept = self._batches.other_rows(self.generator, self._request.indices), self._request.indices
        source, subset = source_of(self._batches.dataset)
        if subset is None:
            return [(rows, np.repeat(kept, self._request.views))]
        behind = np.arange(len(source))  # type: ignore[arg-type]
        behind[subset] = subset[rows]
        places = np.repeat(kept, self._request.views)
        return [(rows, places), (behind, subset[places])]

    def again(self) -> Any:
        """Returns the batch as it is when it is fetched and collated again; None if that cannot be compared."""
        if self._batches.holds_tensors or not self.repeats():
            return None
        try:
            batch = self._batches.fetch(self._request).batch
        except Exception:  # of the user's code
            return None
        return batch if shapes_of(batch) == shapes_of(self.batch) else None

    def _fetched_together(self, places: np.ndarray, indices: np.ndarray) -> Any:
        """Returns the batch with other examples in these places, for a data set that fetches many items in one call.

        None for other data sets, and if random numbers or shapes would differ.
        """
        if not self._batches.fetches_together:
            return None
        mixed = self._request.indices.copy()
        mixed[places] = indices
        try:
            again = self._batches.fetch(replace(self._request, indices=mixed))
        except Exception:
            return None
        return (
            again.batch
            if again.ends == self._fetched.ends and shapes_of(again.batch) == shapes_of(self.batch)
            else None
        )

    def _collated(self, items: Any, draws: RunDraws, whole: Any) -> Any:
        """Returns the batch of these items; None if its shapes, or the random numbers that it draws, differ."""
        batch = self._collated_with(items, draws)
        return batch if batch is not None and shapes_of(batch) == shapes_of(whole) else None

    def _collated_with(self, items: Any, draws: RunDraws) -> Any:
        """Returns the batch of these items; None if other random numbers are drawn than should be."""
        try:
            batch, end = self._batches.collate_and_end(items, self._request, draws)
        except Exception:  # for example, if items of two fetches were padded to different lengths
            return None
        expected = self._fetched.ends[1] if draws.consumes else _start(self._request, "collate")
        return batch if end is None or end == expected else None

    def _replaced_by_shape(
        self, places: np.ndarray, pool: Mapping[str, list[tuple[int, Any]]], draws: RunDraws, whole: Any
    ) -> Any:
        """Returns the batch with each of these examples replaced by one of equal shapes, if the pool has one."""
        items, views, changed = self.items, self._request.views, False
        if isinstance(items, np.ndarray):
            return None
        items = list(items)
        for place in places:
            span = slice(views * place, views * (place + 1))
            same_shape = pool.get(repr(shapes_of(items[span])), ())
            others = [other for index, other in same_shape if index != self._request.indices[place]]
            if others:
                items[span] = others[int(self.generator.integers(len(others)))]
                changed = True
        return self._collated(items, draws, whole) if changed else None

    @property
    def items(self) -> Any:
        """Returns the items before collation; fetches them again, with the same seed, if a worker kept them.

        For a data set of tensors these are the indices of their rows.
        """
        if self._fetched.items is None:
            self._fetched.items = self._batches.items(self._request)
        return self._fetched.items


def equal_batches(batch: Any, other: Any) -> bool:
    """True if two batches with the same structure have equal numbers."""
    return all(same(a, b) for a, b in zip(tree_leaves(batch), tree_leaves(other), strict=False))


def _by_example(items: Any, views: int) -> Iterator[Any]:
    """Yields the items of each example, one for each view."""
    return (items[k : k + views] for k in range(0, len(items), views)) if isinstance(items, list) else iter(())


def _mixed(items: Any, others: Any, places: np.ndarray, views: int) -> Any:
    """Returns the items with those of the examples in these places replaced by the others."""
    if isinstance(items, np.ndarray):
        mixed = items.copy()
        mixed.reshape(-1, views)[places] = others.reshape(-1, views)
        return mixed
    mixed = list(items)
    for k, place in enumerate(places):
        for view in range(views):
            mixed[views * place + view] = others[views * k + view]
    return mixed


def variants_of(batches: Batches, requests: Iterator[BatchRequest]) -> Iterator[DatasetExamples]:
    """Yields the batch of every request, in order."""
    for request, fetched in batches(requests):
        yield DatasetExamples(batches, request, fetched)


class CollatedExamples:
    """Replaces or removes examples of a batch after collation: tensors and lists have the examples first.

    Args:
        batch: a tensor, or tensors in tuples, lists and mappings.
        count: number of examples.
        generator: chooses the replacements among the examples of the batch.
        views: number of consecutive rows of each example.
        only_if_sure: return None if some tensor has another length, or if a list has as many tensors as there are
            examples, each of this length: it may be a list of inputs or a list of examples.
    """

    def __init__(
        self, batch: Any, count: int, generator: np.random.Generator, views: int = 1, *, only_if_sure: bool = False
    ):
        self.batch, self.count, self._generator, self._views = batch, count, generator, views
        self._only_if_sure = only_if_sure
        self.drawn_together, self.notes = False, set[str]()
        self.drawn: Drawn | None = None

    def whole(self, draws: RunDraws) -> Any:
        """Implements `BatchVariants`."""
        return self.batch

    def with_others(self, keep: np.ndarray, draws: RunDraws = AS_DRAWN) -> Any:
        """Implements `BatchVariants`."""
        indices = np.arange(self.count)
        shift = self._generator.integers(1, max(2, self.count), size=self.count)
        replaced = self._selected(np.where(keep, indices, (indices + shift) % self.count))
        return replaced if replaced is not None and shapes_of(replaced) == shapes_of(self.batch) else None

    def without(self, keep: np.ndarray, draws: RunDraws = AS_DRAWN) -> Any:
        """Implements `BatchVariants`."""
        return self._selected(np.flatnonzero(keep))

    def _selected(self, indices: np.ndarray) -> Any:
        """Returns the batch of these examples; None if it is not clear where the examples are."""
        views = self._views
        rows = (views * indices[:, None] + np.arange(views)).ravel()
        found: list[bool] = []
        selected = _select(self.batch, rows, views * self.count, found)
        return selected if all(found if self._only_if_sure else [True]) and any(found) else None


def _select(batch: Any, rows: np.ndarray, n: int, found: list[bool]) -> Any:
    """Returns these rows of all tensors with a first dimension of n, and of lists of length n.

    ``found`` gets True for each of these, and False for tensors and lists that may have the examples elsewhere.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        if isinstance(batch, torch.Tensor) and batch.is_nested:
            raise Refused(
                "the batch is a nested tensor, in which rehearsals cannot replace examples. Let collate_fn pad them "
                "to one length, and return the lengths; or give the reason why examples do not depend on each other: "
                "tp.Examples(data, assume_independent=...)."
            )
        if batch.ndim and len(batch) == n:
            found.append(True)
            return batch[torch.from_numpy(rows).to(batch.device) if isinstance(batch, torch.Tensor) else rows]
        if batch.ndim:
            found.append(False)
        return batch
    if isinstance(batch, Mapping):
        part: Any = copy(batch)  # keeps its type and its attributes
        for key, value in batch.items():
            part[key] = _select(value, rows, n, found)
        return part
    if isinstance(batch, (list, tuple)):
        have_n_rows = [isinstance(v, torch.Tensor) and v.ndim > 0 and len(v) == n for v in batch]
        if len(batch) == n and not all(have_n_rows):
            found.append(True)
            return type(batch)(batch[k] for k in rows)
        if len(batch) == n and n > 1:
            found.append(False)
        parts = [_select(value, rows, n, found) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        part = copy(batch)
        for entry in fields(batch):
            object.__setattr__(part, entry.name, _select(getattr(batch, entry.name), rows, n, found))
        return part
    return batch


def _versions(batch: Any) -> list[int]:
    """Returns how often the tensors of a batch were written into."""
    return [*map(version_of, filterfalse(torch.Tensor.is_inference, tensors_in(batch)))]


def _size(value: Any) -> int:
    """Returns the number of numbers and letters in an item."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(np.prod(value.shape))
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(_size(getattr(value, entry.name)) for entry in fields(value))
    return len(value) if isinstance(value, (str, bytes)) else 1


def shapes_of(batch: Any) -> Any:
    """Returns the structure of a batch, with the shapes of its tensors."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {key: shapes_of(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [shapes_of(value) for value in batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        return [shapes_of(getattr(batch, entry.name)) for entry in fields(batch)]
    return None
