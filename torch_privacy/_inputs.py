# SPDX-License-Identifier: Apache-2.0
"""The tensors that a model is given, and where they may have a part for each example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class Item:
    """Where a tensor is in a list of tensors."""

    place: int
    length: int
    alike: bool  # whether all have one shape

    def owner(self, n: int) -> int | None:
        """The example that it belongs to as a whole, where the list has n."""
        return self.place if self.length == n else None


NEWS = 2  # batches that are looked at because of what was not known before
Kind = tuple[int, torch.Size]  # an input's place among all, and the shape of its rows


class SeveralRows:
    """Which inputs have several rows for each example, such as pairs or flattened sequences (q n, ..).

    Batches of two sizes tell: what all examples share does not grow with them. They also tell of a dimension that is of
    the batch's size by chance, as the two ends of edges are where there are two graphs.
    """

    def __init__(self) -> None:
        self._met: dict[Kind, dict[int, int]] = {}  # n -> rows
        self._other: set[Kind] = set()  # those that had a number of rows that n does not divide
        self._told: Counter[Kind] = Counter()
        self._shapes: dict[tuple[int, int], dict[int, torch.Size]] = {}  # place, dimensions -> n -> shape

    def look(self, place: int, shape: torch.Size, n: int | None) -> tuple[int, bool]:
        """q, or 0 where it is not known to be above one; and whether that is news."""
        if n is None or n < 2:
            return 0, False
        kind, rows = (place, shape[1:]), shape[0]
        if rows % n:
            self._other.add(kind)
        met = self._met.setdefault(kind, {})
        met[n] = rows
        grows = kind not in self._other and any(m != n and n * before == m * rows for m, before in met.items())
        if not grows or rows <= n:
            return 0, False
        self._told[kind] += 1
        return rows // n, self._told[kind] <= NEWS

    def by_chance(self, place: int, shape: torch.Size, n: int | None) -> set[int]:
        """The dimensions of size n that had another size than the batch's as often as not."""
        if n is None or n < 2:
            return set()
        met = self._shapes.setdefault((place, len(shape)), {})
        met[n] = shape
        of_n = {dim: sum(before[dim] == m for m, before in met.items()) for dim, size in enumerate(shape) if size == n}
        return {dim for dim, times in of_n.items() if 2 * times <= len(met)}


@dataclass(frozen=True)
class Input:
    """One of a model's floating-point inputs, in which the gradient is measured.

    Args:
        target: the tensor, or its edge in the graph.
        shape: the tensor's.
        item: its place in a list of tensors.
        rows_for_each: example, where that is known and more than one.
    """

    target: Any
    shape: torch.Size
    item: Item | None = None
    rows_for_each: int = 0

    def owner(self, n: int) -> int | None:
        """The example that it belongs to as a whole, where it is one of a list of n."""
        return None if self.item is None else self.item.owner(n)

    def has_examples(self, n: int) -> bool:
        """Whether it must have a part for each of n examples, or be one's alone."""
        return n in self.shape or self.rows_for_each > 0 or self.owner(n) is not None

    def dims(self, n: int) -> list[int]:
        """Where the parts of n examples may lie."""
        return [dim for dim, size in enumerate(self.shape) if size == n]


def with_tensors(arguments: Any, replaced: Callable[[Tensor, Item | None], Tensor]) -> Any:
    """The arguments with every tensor replaced: alone or in lists, tuples, mappings and data classes.

    ``replaced`` is told the place of a tensor in a list of tensors. The arguments themselves are no such list.
    """

    def is_list(value: Any) -> bool:
        alike = type(value) in (list, tuple) and all(isinstance(item, Tensor) for item in value)
        return alike and value is not arguments

    def of_any(value: Any) -> Any:
        if isinstance(value, Tensor):
            return replaced(value, None) if value.ndim else value
        if is_list(value):
            alike = len({t.shape for t in value}) == 1
            items = (Item(k, len(value), alike) for k in range(len(value)))
            return type(value)(replaced(t, item) if t.ndim else t for t, item in zip(value, items, strict=True))
        if isinstance(value, MutableMapping) or (is_dataclass(value) and not isinstance(value, type)):
            return _with_parts(value, lambda part: tree_map(of_any, part, is_leaf=is_list))
        return value

    return tree_map(of_any, arguments, is_leaf=is_list)


def _with_parts(value: Any, replaced: Callable[[Any], Any]) -> Any:
    """A copy of a mapping or a data class, its values replaced; the thing itself where nothing in it is another."""
    if isinstance(value, MutableMapping):  # such as UserDict: torch maps over plain ones
        parts = dict(value.items())
    else:
        parts = {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    others = {key: new for key, part in parts.items() if (new := replaced(part)) is not part}
    if not others:
        return value
    changed = copy(value)
    if isinstance(value, MutableMapping):
        changed.update(others)
    else:
        for key, part in others.items():
            object.__setattr__(changed, key, part)  # also of a frozen one
    return changed
