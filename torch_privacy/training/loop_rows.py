# SPDX-License-Identifier: Apache-2.0
"""Exchanges the private rows of other examples in what the loop and ``collate_fn`` read: tensors, arrays, tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..model_check.rehearsal.comparison import CARRIES
from ..sampling.stored_rows import kind_of, num_bytes
from ..sampling.variants import DatasetExamples
from ..support.contents import MISSING, Visits, keys_and_values, same
from .loop_contents import Replacement, rebuilt, rows_of
from .loop_variables import BUFFER, CONTAINERS, FEW, NUMBERS, Variable, attributes_of

FEWEST = 4  # examples of a batch that must be found at their places
FEW_PARTS = 16  # of a container that is looked into
MOST_BYTES, MOST_BYTES_OFTEN = 2**26, 2**18  # of rows that are exchanged; in every rehearsal
REFUSED = (
    "PrivateTraining: the losses of a batch change if rows of {} that belong to other examples are exchanged: the loop "
    f"or collate_fn reads private data besides the batch, {CARRIES}. So do means, class weights and neighbors over all "
    "data: one example changes many gradients. Nothing was released in this step. Compute such numbers from public "
    "data, or release them with noise and pass prior_releases=."
)
NOT_COMPARED = (
    "The loop changes {} in memory that processes share. Items of workers were not compared with earlier numbers: "
    "if these depend on private data, no epsilon covers it."
)


class OtherRows(Replacement):
    """Knows which rows of the private data belong to other examples than those of a batch, and what replaces them.

    A tensor, array, list or table is taken for private data if it has as many rows as there are examples and, at the
    places of the batch's examples, what is in the batch. If their numbers are in the batch, equal length is enough.
    """

    def __init__(self, examples: DatasetExamples, *, often: bool):
        self._most = MOST_BYTES_OFTEN if often else MOST_BYTES
        self._laws = {len(rows): (rows, places) for rows, places in examples.rows_of_others()}
        self._examples = examples

    @property
    def attributes(self) -> list[Variable]:
        """Returns the attributes of the data set, which may be such tensors."""
        return [variable for source in self._examples.sources for variable in attributes_of(source)]

    @cached_property
    def _columns(self) -> list[list[Any]]:
        """Returns the parts of the batch's items, each for all examples."""
        items = self._examples.items
        leaves = [tree_leaves(item) for item in items] if isinstance(items, list) else []
        return [[*column] for column in zip(*leaves, strict=True)] if len({*map(len, leaves)}) == 1 else []

    @cached_property
    def _leaves(self) -> list[Tensor]:
        """Returns the tensors in the batch, and what the items have in one part, if it has one shape."""
        found = [
            _tensor_of(leaf) for leaf in tree_leaves(self._examples.batch) if isinstance(leaf, (Tensor, np.ndarray))
        ]
        found += [_tensor_of([np.asarray(part) for part in column]) for column in self._columns]
        return [leaf for leaf in found if leaf is not None]

    def are_in(self, variable: Variable) -> bool:
        """True if the variable has such rows, and can get others."""
        return bool(self._laws) and variable.is_writable and self.exchanged(variable.read()) is not MISSING

    def exchanged(self, value: Any) -> Any:
        """Returns the value with other rows in place of those of other examples."""
        return self._exchanged(value, Visits())

    def not_put_back(self, part: Any) -> Any:
        """Returns parts of which no rows are exchanged, because there are too many, as they are."""
        is_large = isinstance(part, (Tensor, np.ndarray)) and num_bytes(part) > self._most
        return part if is_large else super().not_put_back(part)

    def _exchanged(self, value: Any, visits: Visits) -> Any:
        if not isinstance(value, Collection) or isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0:
            return MISSING
        if len(value) in self._laws:
            rows, places = self._laws[len(value)]
            if num_bytes(value) <= self._most and self._has_batch(value, places):
                return rows_of(value, rows)
        if type(value) in (tuple, list, dict) and 0 < len(value) <= FEW_PARTS:
            return visits.result((value,), lambda: self._with_other_parts(value, visits), within=MISSING, below=MISSING)
        return MISSING

    def _with_other_parts(self, value: Any, visits: Visits) -> Any:
        keys, parts = keys_and_values(value)
        others = [self._exchanged(part, visits) for part in parts]
        kept = [part if other is MISSING else other for part, other in zip(parts, others, strict=True)]
        return MISSING if all(other is MISSING for other in others) else rebuilt(value, keys, kept)

    def _has_batch(self, value: Any, places: np.ndarray) -> bool:
        """True if a tensor, array, list or table has the batch's numbers at the places of its examples."""
        if len(places) < FEWEST or kind_of(value) is None or isinstance(value, dict):
            return False
        if any(_equal(torch.from_numpy(places), leaf) for leaf in self._leaves):
            return True
        if isinstance(value, list):
            of_batch = [value[place] for place in places.tolist()]
            if any(all(map(same, of_batch, column)) for column in self._columns):
                return not all(same(part, of_batch[0]) for part in of_batch)
            own = _tensor_of(of_batch)
        else:
            own = _tensor_of(rows_of(value, places))
        return own is not None and bool((own != own[:1]).any()) and any(_equal(own, leaf) for leaf in self._leaves)


def _tensor_of(value: Any) -> Tensor | None:
    """Returns the numbers of a tensor, an array, a table or a list; None if it has others."""
    try:
        found = value if isinstance(value, Tensor) else torch.as_tensor(np.array(value))
    except (TypeError, ValueError, RuntimeError):
        return None
    return found.detach() if found.ndim and found.layout is torch.strided else None


def reads_others(name: str) -> str:
    """Returns the message for losses that depend on rows of other examples in a variable."""
    return REFUSED.format(repr(name))


def _equal(own: Tensor, leaf: Tensor) -> bool:
    if own.shape != leaf.shape:
        return False
    return torch.equal(own.to(leaf.device, leaf.dtype), leaf)


def may_be_read(other: tuple[Variable, Any]) -> bool:
    """True for a variable that items may depend on, with its earlier content: rows and numbers, not growing caches."""
    variable, content = other
    if isinstance(content, OtherRows):
        return True
    value = variable.read()
    return is_small(value) and not (isinstance(value, Mapping) and _keys(value) != _keys(content))


def is_shared(variable: Variable) -> bool:
    """True for numbers that other processes can see when they change: shared tensors, and buffers."""
    return variable.access is BUFFER or (isinstance(value := variable.read(), Tensor) and value.is_shared())


def is_small(value: Any) -> bool:
    """True for a number, a text, or a few of them, in containers, too."""
    return _count(value) <= FEW


def _count(value: Any, depth: int = 4) -> float:
    """Returns how many numbers and texts a value holds; more than a few, if it has other parts."""
    if isinstance(value, CONTAINERS) and depth and len(value) <= FEW:
        return sum(_count(part, depth - 1) for part in keys_and_values(value)[1])
    if isinstance(value, (Tensor, np.ndarray)):
        return math.prod(value.shape)
    return 1 if isinstance(value, NUMBERS) else math.inf


def _keys(value: Any) -> Any:
    return value.keys() if isinstance(value, Mapping) else None
