# SPDX-License-Identifier: Apache-2.0
"""Copies a data set, with everything that its code reads, so that the rows of other examples can be exchanged in it."""

from __future__ import annotations

import functools
import random
import struct
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..support.held_state import Attributes, Entry, names_in, place_of, slots_of
from ..support.libraries import is_library
from .stored_rows import kind_of

MANY = 1000  # entries of a container up to which each is looked at
MOST_PARTS = 50_000  # objects of a data set that are looked at
SMALL = 2**20  # bytes of a tensor or array that is copied; larger ones are shared until their rows are exchanged

_MANAGED_DICT, _WORD = 1 << 4, struct.calcsize("P")  # as in CPython's object.__reduce_ex__
_LRU = type(functools.lru_cache(lambda: None))
_RANDOM = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)


class TooLarge(Exception):
    """Raised if a data set has too many parts to be copied."""


@dataclass
class DatasetShadow:
    """A copy of a data set, and of the globals, closures, defaults and class attributes that its code reads."""

    root: Any
    slots: list[Entry] = field(default_factory=list)  # what its code reads besides, with copies as values
    has_generators: bool = False  # whether random generators of its own were found

    @classmethod
    def of(cls, dataset: Any) -> DatasetShadow:
        """Returns a copy of the data set in its present state, without values that it has cached."""
        copier = _Copier({}, follow=True)
        root = copier.copy(dataset)
        return cls(root, [*copier.slots.values()], copier.has_generators)

    def copy(self, exchanged: Mapping[int, Any]) -> DatasetShadow:
        """Returns a copy with other objects in place of some, given by their ids."""
        copier = _Copier(exchanged, follow=False)
        for new in exchanged.values():
            if transforms_of(new) is not None:
                new._format_kwargs = copier.copy(new._format_kwargs)
        slots = [(name, holder, key, copier.copy(value)) for name, holder, key, value in self.slots]
        return DatasetShadow(copier.copy(self.root), slots)

    @contextmanager
    def in_place(self) -> Iterator[Any]:
        """Lets the data set's code read the copies of globals, closures, ... within the ``with`` block."""
        before: list[Entry] = []
        try:
            for name, holder, key, value in self.slots:
                before.append((name, holder, key, holder[key]))
                holder[key] = value
            yield self.root
        finally:
            for _, holder, key, value in reversed(before):
                holder[key] = value


class _Copier:
    """Copies objects and containers; what cannot be copied, such as locks and open files, is shared.

    Args:
        exchanged: id of an object -> the one to put in its place.
        follow: whether to look for slots in code.
    """

    def __init__(self, exchanged: Mapping[int, Any], *, follow: bool):
        self._memo: dict[int, Any] = dict(exchanged)
        self._alive: list[Any] = []  # so that no id is used twice
        self._follow, self._seen = follow, set[int]()
        self._seen_places: set[tuple[int, str]] = set()
        self.slots: dict[tuple[int, str], Entry] = {}
        self.has_generators = False

    def copy(self, value: Any) -> Any:
        """Returns the copy of a value."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type, types.ModuleType)):
            known = self._memo.get(id(value), value)
            if isinstance(value, type):
                self._look_at_class(value)
            return known
        if id(value) in self._memo:
            return self._memo[id(value)]
        self._alive.append(value)
        if len(self._alive) > MOST_PARTS:
            raise TooLarge(f"it has more than {MOST_PARTS:,} parts")
        return self._new(value)

    def _keep(self, value: Any, new: Any) -> Any:
        self._memo[id(value)] = new
        return new

    def _new(self, value: Any) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            small = value.nbytes <= SMALL and not isinstance(value, nn.Parameter) and value.__class__ is not np.memmap
            new = value if not small else value.detach().clone() if isinstance(value, Tensor) else value.copy()
            return self._keep(value, new)
        if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            return self._container(value)
        if isinstance(value, (types.FunctionType, _LRU)):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return self._keep(value, types.MethodType(self.copy(value.__func__), self.copy(value.__self__)))
        if isinstance(value, types.MethodWrapperType):  # such as the __len__ of a dictionary
            return self._keep(value, getattr(self.copy(value.__self__), value.__name__))
        if isinstance(value, functools.partial):
            parts = (self.copy(part) for part in (value.func, value.args, value.keywords))
            func, args, keywords = parts
            return self._keep(value, functools.partial(func, *args, **keywords))
        if isinstance(value, (torch.Generator, random.Random, *_RANDOM)):
            self.has_generators = True
            return self._keep(value, value.clone_state() if isinstance(value, torch.Generator) else deepcopy(value))
        return self._object(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, (tuple, frozenset)):
            if len(value) > MANY or isinstance(value, frozenset):
                return self._keep(value, value)
            parts = [self.copy(part) for part in value]
            if all(part is old for part, old in zip(parts, value, strict=True)):
                return self._keep(value, value)
            return self._keep(value, type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts))
        new = self._keep(value, copy(value))
        if isinstance(value, defaultdict):
            new.default_factory = self.copy(value.default_factory)
        if len(value) > MANY or isinstance(value, set):
            return new
        if isinstance(value, dict):
            for key, part in value.items():
                dict.__setitem__(new, key, self.copy(part))
        else:
            for place, part in enumerate(value):
                new[place] = self.copy(part)
        return new

    def _object(self, value: Any) -> Any:
        kind, entries = type(value), attributes_of(value)
        if self._follow:
            self._look_at_class(kind)
        tables = kind_of(value) is not None and transforms_of(value) is None
        is_constant = not entries and not _is_own_class(kind)  # such as a mark of a library, which has one identity
        if tables or is_constant or not _can_be_copied(kind):
            return self._keep(value, value)
        new = self._keep(value, _bare(kind))
        cached = _cached_names(type(value))
        for name, part in entries.items():
            if name in cached:
                continue
            _set(new, value, name, self.copy(part))
        return new

    # Code

    def _function(self, value: Any) -> Any:
        if isinstance(value, _LRU):
            new = functools.lru_cache(**value.cache_parameters())(self.copy(value.__wrapped__))
            return self._keep(value, new)
        self._keep(value, value)
        if self._follow:
            self._look_at(value)
        return value

    def _look_at(self, function: types.FunctionType) -> None:
        """Notes the slots that a function reads."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._note(name, Attributes(cell), "cell_contents")
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._note(name, Attributes(function), name)
        if not _is_own_code(function.__code__.co_filename):
            return
        self._note(function.__name__, Attributes(function), "__dict__")
        names = names_in(function.__code__)
        for name in names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                if _is_own_code(getattr(value, "__file__", None) or "/"):
                    for other in names:
                        if other in vars(value):
                            self._note(other, vars(value), other)
            else:
                self._note(name, function.__globals__, name)

    def _note(self, name: str, holder: MutableMapping[str, Any], key: str) -> None:
        place = place_of(holder), key
        if place in self._seen_places:
            return
        self._seen_places.add(place)
        try:
            value = holder[key]
            holder[key] = value
        except (KeyError, AttributeError, TypeError):  # an empty cell, a class that is closed
            return
        new = self.copy(value)
        if not isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
            self.slots[place] = name, holder, key, new

    def _look_at_class(self, kind: type) -> None:
        """Notes what a class's own code reads, and the data that it holds."""
        if not self._follow or id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for base in kind.__mro__:
            if not _is_own_class(base):
                continue
            for name, value in [*vars(base).items()]:
                for function in _functions_of(value):
                    self.copy(function)
                is_data = not _functions_of(value) or isinstance(value, _LRU)
                if is_data and not name.startswith("__") and not hasattr(type(value), "__set__"):
                    self._note(f"{base.__name__}.{name}", Attributes(base), name)


def apart(value: Any, known: dict[int, Any] | None = None, *, is_part: bool = False) -> Any:
    """Returns a copy of a data set, and of the objects in it, that shares arrays and whatever else they hold.

    A file that one of them opens when it is first read is open in the copy alone, so that no process inherits it.
    """
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if type(value) in (list, dict) and len(value) <= MANY and not is_part:
        new = known[id(value)] = copy(value)
        for key, part in enumerate(value) if isinstance(value, list) else value.items():
            new[key] = apart(part, known, is_part=True)
        return new
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, apart(value.__self__, known))
    entries = {} if kind_of(value) is not None or isinstance(value, (type, nn.Module)) else attributes_of(value)
    if not entries or not _can_be_copied(type(value)):
        return value
    new = known[id(value)] = _bare(type(value))
    for name, part in entries.items():
        _set(new, value, name, apart(part, known))
    return new


def _can_be_copied(kind: type) -> bool:
    """True if an object of this class is what its attributes are."""
    custom = kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    return not custom and _is_python_class(kind)


def _bare(kind: type) -> Any:
    """Returns an object without attributes; a copy must not close what it shares with the original."""
    return object.__new__(_without_del(kind) if hasattr(kind, "__del__") else kind)


def _set(new: Any, value: Any, name: str, part: Any) -> None:
    """Gives a copy an attribute where the original has it."""
    if name in getattr(value, "__dict__", ()):
        new.__dict__[name] = part
    else:
        object.__setattr__(new, name, part)


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes that an object stores, in its dictionary and in slots."""
    kind: type = type(value)
    own: Any = {} if isinstance(value, type) else getattr(value, "__dict__", None)
    found: dict[str, Any] = dict(own or {})
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found


def transforms_of(value: Any) -> Any:
    """Returns where a data set of the library datasets holds its transform, which may read it; None for others."""
    return getattr(value, "__dict__", {}).get("_format_kwargs") if not isinstance(value, type) else None


def _is_python_class(kind: type) -> bool:
    """True if the class's objects hold Python's attributes alone, and nothing of an extension."""
    slots = {name for base in kind.__mro__ for name in slots_of(base)}
    has_pointer = kind.__dictoffset__ != 0 and not kind.__flags__ & _MANAGED_DICT
    words = has_pointer + (kind.__weakrefoffset__ > 0) + len(slots)
    return kind.__itemsize__ == 0 and kind.__basicsize__ <= object.__basicsize__ + words * _WORD


def _cached_names(kind: type) -> set[str]:
    """Returns the names of cached properties; the copy computes their values again."""
    return {name for base in kind.__mro__ for name, v in vars(base).items() if isinstance(v, functools.cached_property)}


@functools.cache
def _without_del(kind: type) -> type:
    return type(kind.__name__, (kind,), {"__del__": lambda self: None, "__module__": kind.__module__})


def _functions_of(value: Any) -> list[Any]:
    """Returns the functions in an entry of a class."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, functools.cached_property):
        value = value.func
    found = [value.fget, value.fset] if isinstance(value, property) else [value]
    return [function for function in found if isinstance(function, (types.FunctionType, _LRU))]


def _is_own_class(kind: type) -> bool:
    """True if a class is defined in the user's code."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" if file is None else _is_own_code(file)


@functools.cache
def _is_own_code(file: str) -> bool:
    """True unless the file belongs to Python, to an installed package or to this one."""
    return not file.startswith("<frozen") and not is_library(str(Path(file).resolve()))
