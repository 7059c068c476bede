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
from ..support.held_state import MAX_ENTRIES
from ..support.model_state import Visits, same
from .loop_variables import MISSING, Variable, is_cached, is_flat, is_table

MOST_NUMBERS = 2**22  # of a tensor or array that is copied; of a larger one some numbers are compared
SAMPLED = 4096  # numbers of a larger one
SMALLER = 0.75  # factor on a number that has no earlier value: probabilities and signs stay valid
_SEQUENCES = (list, tuple, deque)
_CONSTANT = frozenset({int, float, bool, str, bytes, complex, type(None)})


class Sample:
    """Holds some numbers of a tensor or an array that is too large to be copied."""

    def __init__(self, value: Tensor | np.ndarray):
        self._numbers, self._kind = sampled(value), (type(value), tuple(value.shape), value.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and self._kind == other._kind and same(self._numbers, other._numbers)

    __hash__ = None  # type: ignore[assignment]


def sampled(value: Tensor | np.ndarray, most: int = SAMPLED) -> Any:
    """Returns a copy of some numbers of a tensor or an array."""
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1) if value.numel() <= most or value.is_contiguous() else value.detach()[:1]
        return flat.reshape(-1)[:: max(1, flat.numel() // most)].clone()
    return value.flat[:: max(1, value.size // most)].copy()


class Replacement:
    """Makes other content for a variable in another way than from its own earlier content."""

    def exchanged(self, value: Any) -> Any:
        """Returns the other content, or MISSING."""
        raise NotImplementedError


def content_of(value: Any, visits: Visits | None = None) -> Any:
    """Returns a copy of the content with the same types, which changes in place do not reach.

    Containers in themselves, or deep within each other, are not copied.
    """
    if type(value) in _CONSTANT:
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        if not _is_plain(value):
            return value
        size = value.numel() if isinstance(value, Tensor) else value.size
        if size > MOST_NUMBERS:
            return Sample(value)
        return value.detach().clone() if isinstance(value, Tensor) else value.copy()
    if is_cached(value):
        return value.cache_info()[1::2]  # misses and present size
    if is_table(value):
        return rows_of(value, np.arange(len(value)))
    if isinstance(value, (*_SEQUENCES, Mapping)) and _has_parts(value):
        inner = visits or Visits()
        copied = functools.partial(_copied, value, inner)
        return inner.result((value,), copied, within=value, below=value)
    return copy(value) if isinstance(value, (set, list, dict, deque)) else value


def _copied(container: Any, visits: Visits) -> Any:
    return rebuilt(container, [content_of(part, visits) for part in _values(container)])


def _has_parts(value: Any) -> bool:
    """True for a container that is not long, of more than numbers and texts."""
    return not isinstance(value, (Tensor, np.ndarray, set)) and len(value) <= MAX_ENTRIES and not is_flat(value)


def _is_plain(value: Tensor | np.ndarray) -> bool:
    """True if the numbers of a tensor or an array can be read."""
    if isinstance(value, np.ndarray):
        return value.dtype != object
    return value.layout is torch.strided and not (value.is_meta or value.is_inference() or value.is_nested)


def _values(container: Any) -> list[Any]:
    return [*container.values()] if isinstance(container, Mapping) else [*container]


def rebuilt(container: Any, values: list[Any]) -> Any:
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
        for key, value in zip(container, values, strict=True):
            other[key] = value
        return other
    return container


def alike(value: Any, content: Any, visits: Visits | None = None) -> bool:
    """True if a value has this content; containers deep within each other must be the same objects."""
    if type(value) in _CONSTANT:
        return type(value) is type(content) and (value is content or same(value, content))
    if isinstance(content, Sample):
        return isinstance(value, (Tensor, np.ndarray)) and _is_plain(value) and Sample(value) == content
    if is_cached(value):
        return content == value.cache_info()[1::2]
    if type(value) is not type(content) and not isinstance(value, Tensor):
        return False
    if is_table(value):
        return same_table(value, content)
    if isinstance(value, (Mapping, *_SEQUENCES)):
        visits = visits or Visits()
        compare = functools.partial(_alike_parts, value, content, visits)
        return visits.result((value, content), compare, within=True, below=value is content)
    if isinstance(value, np.generic):
        return same(value.item(), content.item())
    return same(value, content)


def _alike_parts(value: Any, content: Any, visits: Visits) -> bool:
    if isinstance(value, Mapping):
        return value.keys() == content.keys() and all(alike(v, content[key], visits) for key, v in value.items())
    return len(value) == len(content) and all(alike(v, c, visits) for v, c in zip(value, content, strict=False))


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
    if not _is_plain(value) or not value.numel():
        return MISSING
    other = old.clone() if _fits(value, old) else _rolled(value.detach())
    return other.requires_grad_() if value.requires_grad and value.is_leaf else other


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
    if is_table(old) and len(old) == len(value):
        return rows_of(old, np.arange(len(old)))
    other = rows_of(value, np.roll(np.arange(len(value)), 1))
    return MISSING if same_table(value, other) else other


def _rolled(value: Tensor) -> Tensor:
    rolled = value.reshape(-1).roll(1).reshape(value.shape)
    return value * SMALLER if torch.equal(rolled, value) and value.is_floating_point() else rolled


def _other_parts(value: Any, old: Any, visits: Visits) -> Any:
    """Returns a container with other parts: each has its old content; those that are new have another order."""
    if not 0 < len(value) <= MAX_ENTRIES:
        return MISSING
    values, olds = _values(value), _old_parts(value, old)
    others = [v if alike(v, o) else other_content(v, o, visits) for v, o in zip(values, olds, strict=True)]
    others = [v if other is MISSING else other for v, other in zip(values, others, strict=True)]
    if all(map(alike, values, others)):
        others = (
            [*values[-1:], *values[:-1]] if len({(type(v), getattr(v, "shape", None)) for v in values}) == 1 else []
        )
    return MISSING if not others or all(map(alike, values, others)) else rebuilt(value, others)


def _old_parts(value: Any, old: Any) -> list[Any]:
    """Returns the old content of each part of a container; MISSING for new ones."""
    if isinstance(value, dict):
        return [old.get(key, MISSING) if isinstance(old, Mapping) else MISSING for key in value]
    olds = [*old] if isinstance(old, _SEQUENCES) else []
    return (olds + [MISSING] * len(value))[: len(value)]


class Saved:
    """Keeps a value as it is: the object, its parts, and its content, to put all of them back."""

    def __init__(self, value: Any):
        self.value = value
        self._contents: list[tuple[Any, Any]] = []  # of the parts, and after them of what they are in
        self._save(value, Visits())

    def _save(self, value: Any, visits: Visits) -> None:
        content = None
        if isinstance(value, (Tensor, np.ndarray)):
            is_result = isinstance(value, Tensor) and not value.is_leaf and value.requires_grad
            copied = value if is_result else content_of(value)
            content = None if copied is value or isinstance(copied, Sample) else copied
        elif type(value) is set or isinstance(value, (list, dict, deque)):
            content = copy(value)
        if isinstance(value, tuple) or (content is not None and _has_parts(value)):
            visits.result((value,), lambda: [self._save(part, visits) for part in _values(value)], within=(), below=())
        if content is not None:
            self._contents.append((value, content))

    def restore(self) -> None:
        """Puts parts and content back into the object."""
        for value, content in self._contents:
            fill(value, content)


@torch.no_grad()
def fill(value: Any, content: Any) -> bool:
    """Gives an object another content in place; returns False if it cannot have it."""
    if isinstance(value, Tensor):
        if not _fits(value, content) or (value.requires_grad and not value.is_leaf):
            return False
        if not same(value.detach(), content):
            value.copy_(content)
        return True
    if isinstance(value, np.ndarray):
        fits = isinstance(content, np.ndarray) and value.shape == content.shape and value.dtype == content.dtype
        if fits and value.flags.writeable:
            value[...] = content
        return fits and value.flags.writeable
    if type(value) is not type(content) or not isinstance(value, (list, dict, deque, set)):
        return False
    if isinstance(value, dict):
        if [*value] != [*content] or any(value[key] is not c for key, c in content.items()):
            value.clear()
            for key, c in content.items():
                value[key] = c
    elif isinstance(value, set):
        value ^= value ^ content
    elif [*map(id, value)] != [*map(id, content)]:
        value.clear()
        value.extend(content)
    return True


def _fits(value: Tensor, content: Any) -> bool:
    return (
        _is_plain(value)
        and isinstance(content, Tensor)
        and value.shape == content.shape
        and value.dtype == content.dtype
        and value.device == content.device
    )


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
        self._saved = [(v, Saved(v.read())) for v in [*self._kept, *(v for v, _ in self._others)]]
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
