# SPDX-License-Identifier: Apache-2.0
"""Copies, compares and puts back the content of any value: tensors, arrays and containers, which may hold themselves.

Of types that are not known here, values are compared as objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .held_state import MAX_DEPTH, MAX_ENTRIES, SIMPLE

MISSING: Any = object()  # content of what is not there
_PLAIN = (dict, list, tuple, deque, set)
_COMPARED = (bool, int, float, complex, str, bytes, frozenset, torch.device)  # by ==, if the types are equal


def plain_type(value: Any) -> type | None:
    """Returns the plain type of a container: dict, list, tuple, deque or set; None for another value."""
    if type(value) in _PLAIN:
        return type(value)
    for plain in _PLAIN:
        if isinstance(value, plain):
            return plain
    return dict if isinstance(value, Mapping) else None


def keys_and_values(container: Any) -> tuple[list[Any] | None, list[Any]]:
    """Returns the keys of a mapping, None for other containers, and its values, as they are at one moment.

    Another thread of the user may change the container meanwhile.
    """
    if not isinstance(container, Mapping):
        return None, [*container]
    now = [*container.items()]
    return [key for key, _ in now], [value for _, value in now]


def values_in(container: Any) -> list[Any]:
    """Returns what a container holds at one moment, for a mapping its values."""
    return keys_and_values(container)[1]


def has_entries(value: Tensor | np.ndarray) -> bool:
    """True if the entries of a tensor or an array can be read and compared."""
    if isinstance(value, np.ndarray):
        return True
    return value.layout is torch.strided and not (value.is_meta or value.is_nested)


def local_of(tensor: Tensor) -> Tensor:
    """Returns a tensor itself, or this rank's shard of it."""
    return getattr(tensor, "_local_tensor", tensor)


class Visits:
    """Remembers the containers that a recursion has entered, so that it ends where one contains itself."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, ...], Any] = {}
        self._entered: list[Any] = []  # so that no other object gets its id
        self._levels = MAX_DEPTH

    def result(self, entered: tuple[Any, ...], compute: Callable[[], Any], *, within: Any, below: Any) -> Any:
        """Returns ``compute()``, once for each container or pair of them.

        Returns ``within`` to a part of these containers that leads to them again, and ``below`` in too deep a level.
        """
        if not self._levels:
            return below
        key = tuple(map(id, entered))
        if key not in self._results:
            self._results[key] = within
            self._entered.append(entered)
            self._levels -= 1
            self._results[key] = compute()
            self._levels += 1
        return self._results[key]


class ContentSummary:
    """Stands for the content of a value that is compared, but neither copied as a whole nor put back.

    Args:
        of: returns what is compared; None for values of other kinds.
        value: has the content.
    """

    def __init__(self, of: Callable[[Any], Any], value: Any):
        self._of, self._content = of, of(value)

    def is_of(self, value: Any) -> bool:
        """True if a value, or one that another summary stands for, has this content."""
        return same(value._content if isinstance(value, ContentSummary) else self._of(value), self._content)


def length_if_long(value: Any) -> Any:
    """Returns a summary of a long container; MISSING for other values."""
    return ContentSummary(_length, value) if plain_type(value) is not None and len(value) > MAX_ENTRIES else MISSING


def _length(container: Any) -> int | None:
    return None if plain_type(container) is None else len(container)


class Saved:
    """Keeps a value as it is: the object, its parts and their content, to compare it and to put all of them back.

    Containers in themselves, or deep within each other, are not copied; of long ones, the parts are not.

    Args:
        value: of any type.
        otherwise: returns the content of a value, or of a part, that is not put back, such as a `ContentSummary`;
            MISSING for all others.

    Attributes:
        content: a copy with plain containers, which changes in place do not reach.
    """

    __slots__ = ("_held", "_otherwise", "content", "value")

    def __init__(self, value: Any, otherwise: Callable[[Any], Any] = lambda _: MISSING):
        self.value, self._otherwise = value, otherwise
        self._held: list[tuple[Any, Any]] = []  # objects that can change in place, and what they hold
        self.content = value if type(value) in SIMPLE else self._copied(value)

    def _copied(self, value: Any, visits: Visits | None = None) -> Any:
        if type(value) in SIMPLE:
            return value
        content = self._otherwise(value)
        if content is not MISSING:
            return content
        if isinstance(value, (Tensor, np.ndarray)):
            if not has_entries(value):
                return value
            return self._hold(value, value.detach().clone() if isinstance(value, Tensor) else value.copy())
        kind = plain_type(value)
        if kind is None:
            return value
        if kind is set:
            return self._hold(value, set(value))
        inner = visits or Visits()
        return inner.result((value,), lambda: self._copied_container(value, kind, inner), within=value, below=value)

    def _copied_container(self, value: Any, kind: type, visits: Visits) -> Any:
        plain = dict(value.items()) if kind is dict else kind(value)
        if isinstance(value, (dict, list, deque)):
            self._hold(value, plain)
        if len(plain) > MAX_ENTRIES:
            return plain
        parts = [part if type(part) in SIMPLE else self._copied(part, visits) for part in values_in(plain)]
        return dict(zip(plain, parts, strict=True)) if kind is dict else kind(parts)

    def _hold(self, value: Any, content: Any) -> Any:
        self._held.append((value, content))
        return content

    def restore(self) -> None:
        """Puts parts and content back into the object; does not write into tensors that have not changed."""
        for value, content in self._held:
            fill(value, content)


def copied(value: Any, otherwise: Callable[[Any], Any] = lambda _: MISSING) -> Any:
    """Returns a copy of the content, as of `Saved`."""
    return Saved(value, otherwise).content


def fill(value: Any, content: Any) -> None:
    """Gives an object other content in place, if it is a tensor, an array or a container that can have it.

    A container gets the very parts of the other one.
    """
    if isinstance(value, Tensor):
        if has_entries(value) and value.shape != content.shape:  # it was resized in place
            value.data = content.clone()
        elif has_entries(value) and not same(value.detach(), content):
            with torch.inference_mode(value.is_inference()), torch.no_grad():
                value.copy_(content)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable and value.shape == content.shape:
            value[...] = content
    elif isinstance(value, dict):
        if not (_are_same(value, content) and _are_same(value.values(), content.values())):
            value.clear()
            for key, part in content.items():
                value[key] = part
    elif isinstance(value, (list, deque)):
        if not _are_same(value, content):
            value.clear()
            value.extend(content)
    elif isinstance(value, set) and value != content:
        value.clear()
        value |= content


def _are_same(some: Collection[Any], others: Collection[Any]) -> bool:
    """True if two containers have the same objects in them."""
    return len(some) == len(others) and all(map(is_, some, others))


def same(value: Any, content: Any, visits: Visits | None = None) -> bool:
    """True if a value, or the content of another one, equals this content; NaN equals NaN.

    Containers deep within each other must be the same objects.
    """
    if value is content:
        return True
    if type(value) in SIMPLE:
        return type(value) is type(content) and (value == content or (value != value and content != content))
    if isinstance(content, ContentSummary):
        return content.is_of(value)
    if isinstance(value, Tensor):
        if not isinstance(content, Tensor) or not has_entries(value) or not has_entries(content):
            return False
        return value.shape == content.shape and value.dtype == content.dtype and _equal(value.detach(), content)
    if isinstance(value, np.ndarray):
        alike = isinstance(content, np.ndarray) and value.dtype == content.dtype
        return alike and np.array_equal(value, content, equal_nan=value.dtype.kind in "fc")
    if isinstance(value, np.generic):
        return type(value) is type(content) and same(value.item(), content.item())
    kind = plain_type(value)
    if kind is not None and kind is not set and kind is plain_type(content):
        visits = visits or Visits()
        return visits.result((value, content), lambda: _same_parts(value, content, visits), within=True, below=False)
    if kind is set:
        return isinstance(content, set) and value == content
    return isinstance(value, _COMPARED) and type(value) is type(content) and value == content


def _same_parts(value: Any, content: Any, visits: Visits) -> bool:
    if isinstance(value, Mapping):
        value, content = dict(value.items()), dict(content.items())  # another thread may change them meanwhile
        return value.keys() == content.keys() and all(same(v, content[key], visits) for key, v in value.items())
    value, content = [*value], [*content]
    return len(value) == len(content) and all(same(v, c, visits) for v, c in zip(value, content, strict=True))


def _equal(a: Tensor, b: Tensor) -> bool:
    a, b = local_of(a), local_of(b)  # no rank waits for another
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
