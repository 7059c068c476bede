# SPDX-License-Identifier: Apache-2.0
"""Copies, compares and exchanges the contents of the variables of a loop."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..sampling.stored_rows import kind_of
from ..support.contents import (
    MISSING,
    ContentSummary,
    Saved,
    Visits,
    copied,
    fill,
    has_entries,
    keys_and_values,
    local_of,
    plain_type,
    same,
)
from ..support.held_state import MAX_ENTRIES
from .loop_variables import Variable, is_cached, is_table

MOST_NUMBERS = 2**22  # of a tensor or array that is copied; of a larger one some numbers are compared
SAMPLED = 4096  # numbers of a larger one
SMALLER = 0.75  # factor on a number that has no earlier value: probabilities and signs stay valid
_SEQUENCES = (list, tuple, deque)


class TableCopy(ContentSummary):
    """Holds a copy of a table."""

    def __init__(self, table: Any):
        self.table = rows_of(table, np.arange(len(table)))

    def is_of(self, value: Any) -> bool:
        """True for a table of the same type with equal rows."""
        return type(value) is type(self.table) and same_table(value, self.table)


def _sample(value: Any) -> Any:
    """Returns some numbers of a tensor or an array that is too large to be copied."""
    if not isinstance(value, (Tensor, np.ndarray)) or not has_entries(value):
        return None
    return type(value), tuple(value.shape), value.dtype, sampled(value)


def _cache_state(function: Any) -> Any:
    """Returns how often a cached function was computed, and its present number of results."""
    return function.cache_info()[1::2] if is_cached(function) else None


def sampled(value: Tensor | np.ndarray, most: int = SAMPLED) -> Any:
    """Returns a copy of some numbers of a tensor or an array."""
    if isinstance(value, Tensor):
        value = local_of(value)  # a shard cannot be flattened with the others, and no rank waits for another
        flat = value.detach().reshape(-1) if value.numel() <= most or value.is_contiguous() else value.detach()[:1]
        return flat.reshape(-1)[:: max(1, flat.numel() // most)].clone()
    return value.flat[:: max(1, value.size // most)].copy()


def content_of(value: Any) -> Any:
    """Returns a copy of the content of a variable, which changes in place do not reach."""
    return copied(value, _not_put_back)


def _not_put_back(value: Any) -> Any:
    """Returns the content of what is compared, but not put back in place; MISSING for other values."""
    if isinstance(value, (Tensor, np.ndarray)):
        return _numbers_not_put_back(value)
    if plain_type(value) is not None:
        return MISSING
    if is_cached(value):
        return ContentSummary(_cache_state, value)
    return TableCopy(value) if is_table(value) else MISSING


def _numbers_not_put_back(value: Tensor | np.ndarray) -> Any:
    if isinstance(value, np.ndarray):
        return (
            value if value.dtype == object else ContentSummary(_sample, value) if value.size > MOST_NUMBERS else MISSING
        )
    if not has_entries(value):
        return MISSING
    if value.numel() > MOST_NUMBERS:
        return ContentSummary(_sample, value)
    return MISSING if value.is_leaf else value.detach().clone()  # of a result, such as losses


class Replacement:
    """Makes other content for a variable in another way than from its own earlier content."""

    def exchanged(self, value: Any) -> Any:
        """Returns the other content, or MISSING."""
        raise NotImplementedError

    def not_put_back(self, part: Any) -> Any:
        """Returns the content of a part that is not put back after the run, or MISSING."""
        return _not_put_back(part)


class Former(Replacement):
    """Gives a variable the content that it had, of any length."""

    def __init__(self, content: Any):
        self._content = content

    def exchanged(self, value: Any) -> Any:
        if isinstance(value, (*_SEQUENCES, dict)) and plain_type(self._content) is plain_type(value):
            return rebuilt(value, *keys_and_values(self._content))
        return content_of(self._content)


def rebuilt(container: Any, keys: list[Any] | None, values: list[Any]) -> Any:
    """Returns a container of the same type with other values; the container itself if it has a type of its own."""
    if isinstance(container, tuple):
        return container._make(values) if hasattr(container, "_make") else tuple(values)  # type: ignore[attr-defined]
    if isinstance(container, (list, deque)):
        other = copy(container)
        other.clear()
        other.extend(values)
        return other
    if isinstance(container, dict):
        other = copy(container)
        other.clear()
        for key, value in zip(keys or [], values, strict=True):
            other[key] = value
        return other
    return container


def other_content(value: Any, old: Any, visits: Visits | None = None) -> Any:
    """Returns another content of the same type, shape, length and keys, which the user's code takes as it took the old.

    It is the old content where that fits; else the value's own numbers in another order, or a smaller number. MISSING
    if there is none.
    """
    if isinstance(old, Replacement):
        return old.exchanged(value)
    if is_cached(value):  # it computes its results again
        return functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
    if isinstance(value, (Tensor, np.ndarray)):
        return _other_numbers(value, old)
    if isinstance(value, (*_SEQUENCES, dict)):
        visits = visits or Visits()
        others = functools.partial(_other_parts, value, old, visits)
        return visits.result((value, old), others, within=MISSING, below=MISSING)
    if is_table(value):
        return _other_rows(value, old)
    if type(value) is type(old) and not isinstance(value, Mapping):
        return content_of(old)
    return type(value)(value * SMALLER) if isinstance(value, (float, np.floating)) else MISSING


def _other_numbers(value: Tensor | np.ndarray, old: Any) -> Any:
    if isinstance(value, np.ndarray):
        if isinstance(old, np.ndarray) and old.shape == value.shape and old.dtype == value.dtype:
            return old.copy()
        return _rolled(torch.from_numpy(value.copy())).numpy() if value.dtype.kind in "fiu" and value.size else MISSING
    fits = isinstance(old, Tensor) and _kind(value) == _kind(old)
    if not has_entries(value):  # such as a sparse one
        return old if fits and old is not value else MISSING
    if not value.numel():
        return MISSING
    other = old.clone() if fits else _rolled(value.detach())
    return other.requires_grad_() if value.requires_grad and value.is_leaf else other


def _kind(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.device, value.layout


def rows_of(value: Any, rows: np.ndarray) -> Any:
    """Returns an object of the same type with these rows of a table, a tensor, an array or a list."""
    kind = kind_of(value)
    assert kind is not None
    return kind.take(value, rows)


def same_table(value: Any, other: Any) -> bool:
    """True if two tables of one type have equal rows."""
    return bool(value.equals(other))


def _other_rows(value: Any, old: Any) -> Any:
    """Returns the old table if it has as many rows; else the same rows in another order."""
    if isinstance(old, TableCopy) and len(old.table) == len(value):
        return rows_of(old.table, np.arange(len(value)))
    other = rows_of(value, np.roll(np.arange(len(value)), 1))
    return MISSING if same_table(value, other) else other


def _rolled(value: Tensor) -> Tensor:
    if local_of(value) is not value:
        other = value.clone()
        local_of(other).copy_(_rolled(local_of(value)))
        return other
    flat = value.reshape(-1)
    rolled = flat.roll(1)
    if _are_offsets(flat):
        rolled[0] = 0
    rolled = rolled.reshape(value.shape)
    return value * SMALLER if torch.equal(rolled, value) and value.is_floating_point() else rolled


def _are_offsets(value: Tensor) -> bool:
    """True for whole numbers from 0 that never fall, as places where parts begin: code relies on their order."""
    if not value.numel() or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        return False
    return bool(value[0] == 0 and (value[1:] >= value[:-1]).all())


def _other_parts(container: Any, old: Any, visits: Visits) -> Any:
    """Returns a container with other parts: each has its old content; those that are new have another order."""
    keys, values = keys_and_values(container)
    if not 0 < len(values) <= MAX_ENTRIES:
        return MISSING
    olds = _old_parts(keys, old, len(values))
    others = [v if same(v, o) else other_content(v, o, visits) for v, o in zip(values, olds, strict=True)]
    others = [v if other is MISSING else other for v, other in zip(values, others, strict=True)]
    if all(map(same, values, others)):
        others = (
            [*values[-1:], *values[:-1]] if len({(type(v), getattr(v, "shape", None)) for v in values}) == 1 else []
        )
    return MISSING if not others or all(map(same, values, others)) else rebuilt(container, keys, others)


def _old_parts(keys: list[Any] | None, old: Any, count: int) -> list[Any]:
    """Returns the old content of each part of a container; MISSING for new ones."""
    if keys is not None:
        return [old.get(key, MISSING) if isinstance(old, Mapping) else MISSING for key in keys]
    olds = [*old] if isinstance(old, _SEQUENCES) else []
    return (olds + [MISSING] * count)[:count]


class Exchange:
    """Gives variables another content for one run of the user's code, and puts everything back.

    Args:
        others: the variables that get another content, with their content at an earlier time. They get another object,
            where that is possible: other names for the same object are other variables.
        kept: more variables that are put back at the end.
    """

    def __init__(self, others: list[tuple[Variable, Any]], kept: list[Variable]):
        self._others, self._kept = others, kept
        self._saved: list[tuple[Variable, Saved]] = []
        self._written: list[tuple[Variable, Any, Any]] = []  # its value before, and the one that it was given
        self._filled: list[Saved] = []

    def enter(self) -> None:
        """Exchanges the contents."""
        self.settle()
        for variable, old in [*((v, None) for v in self._kept), *self._others]:
            otherwise = old.not_put_back if isinstance(old, Replacement) else _not_put_back
            self._saved.append((variable, Saved(variable.read(), otherwise)))
        for variable, old in self._others:
            value = variable.read()
            other = other_content(value, old)
            if other is MISSING:
                continue
            if variable.is_writable:
                self._written.append((variable, value, other))
                variable.write(other)
            else:
                self._filled.append(Saved(value))
                fill(value, other)

    def leave(self) -> None:
        """Puts the contents back before the user's code goes on after ``step``; keeps what the run wrote itself."""
        for variable, value, other in reversed(self._written):
            if variable.read() is other:
                variable.write(value)
        for saved in reversed(self._filled):
            saved.restore()
        self._written, self._filled = [], []

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Has the contents exchanged inside of the ``with`` block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def put_back(self) -> None:
        """Puts everything back as it was before the run, which then leaves no trace; may be called again later."""
        self.leave()
        for variable, saved in self._saved:
            now = variable.read()
            if now is not saved.value and variable.is_writable:
                variable.write(saved.value)
        for _, saved in self._saved:
            saved.restore()

    def settle(self) -> None:
        """Puts everything back, for the last time."""
        self.put_back()
        self._saved = []
