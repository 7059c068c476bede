# SPDX-License-Identifier: Apache-2.0
"""Finds the variables of the user's loop: of its frames, and of the functions, objects and modules that these name."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import chain
from multiprocessing.sharedctypes import SynchronizedBase  # pickle: none, only its type is compared
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..sampling.stored_rows import kind_of
from ..support.contents import MISSING, keys_and_values
from ..support.held_state import MAX_DEPTH, Attributes, names_in, slots_of
from ..support.libraries import is_library
from ..support.script_modules import registries_of
from .loop_frames import is_users

MOST = 5000  # variables that are looked at
LONGEST = MOST // 10  # parts of a container
FEW = 64  # numbers of a variable on which items may depend
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
NUMBERS = (int, float, str, bytes, complex, np.generic, type(None))
_CACHED = type(functools.cache(len))
_SIMPLE = (Tensor, np.ndarray, *NUMBERS)
_DATA = (*_SIMPLE, *CONTAINERS)
_BUFFERS = (SynchronizedBase, ctypes._SimpleCData, ctypes.Array, memoryview, array)
_OF_OPTIMIZER = ("defaults", "param_groups", "state")  # made of settings, and of released gradients


class Access(NamedTuple):
    """Reads and writes what a holder has under a key."""

    read: Callable[[Any, Any], Any]  # returns MISSING if there is nothing
    write: Callable[[Any, Any, Any], None] | None  # None if it can be changed in place only


class Variable(NamedTuple):
    """One variable of the loop.

    Attributes:
        scope: the function or module that it was found in.
        name: as the user's code would write it, such as "self.center".
        group: name of the module that it is a part of, which is exchanged as a whole; else its own name.
        access: reads and writes it.
        holder: dictionary, frame, cell, ... that has it.
        place: its key there.
    """

    scope: str
    name: str
    group: str
    access: Access
    holder: Any
    place: Any

    @property
    def key(self) -> tuple[str, str]:
        """Returns what identifies the variable at another time."""
        return self.scope, self.name

    @property
    def is_writable(self) -> bool:
        """True if the variable can get another object."""
        return self.access.write is not None

    def read(self) -> Any:
        """Returns its value, or MISSING."""
        return self.access.read(self.holder, self.place)

    def write(self, value: Any) -> None:
        """Gives it another object."""
        assert self.access.write is not None
        self.access.write(self.holder, self.place, value)


@functools.lru_cache(maxsize=4096)
def _kinds(kind: type) -> tuple[bool, bool]:
    """Returns whether values of a type hold data, and whether they have no parts that are looked at."""
    return issubclass(kind, _DATA), issubclass(kind, _SIMPLE)


def is_cached(function: Any) -> bool:
    """True for what ``functools.cache`` returns. By type: to ask an object for an attribute may run code of its own."""
    return isinstance(function, _CACHED) and isinstance(function.__wrapped__, FunctionType)


def is_table(value: Any) -> bool:
    """True for a table of pandas or polars."""
    return type(value).__module__.partition(".")[0] in ("pandas", "polars") and kind_of(value) is not None


class Finder:
    """Walks over the variables of the loop once.

    Of modules and objects of libraries, it looks at those attributes alone that the user's code names.

    Args:
        excluded: objects that are not the loop's own, such as the model that is trained.
    """

    def __init__(self, excluded: Collection[Any]):
        self._excluded = {id(value) for value in excluded}
        self._seen = set(self._excluded)
        self._names: set[tuple[int, str]] = set()
        self.named: set[str] = set()  # in the user's code, as far as it was seen
        self._found: dict[tuple[str, str], Variable] = {}
        self._kept: list[Any] = []  # what was seen, so that no other object gets its id
        self._depth, self._longest = 0, LONGEST
        self._deeper: list[tuple[str, str, Any, str]] = []  # for later, such as the rest of a long linked list

    def variables(self, frames: Collection[FrameType], *functions: Any) -> list[Variable]:
        """Returns the variables of these frames and functions, and of what they name."""
        self.named.update(*(names_in(frame.f_code) for frame in frames))
        for frame in frames:
            self._visit_frame(frame)
        for function in functions:
            self._descend("", getattr(function, "__name__", type(function).__name__), function)
        self._go_deeper()
        return [*self._found.values()]

    def of_data(self, sources: Iterable[Any]) -> list[Variable]:
        """Returns the variables of data sets, of their code and of the objects in them; of no long list, which is rows.

        Those that ``variables`` has found are left out.
        """
        held = [variable for source in sources for variable in attributes_of(source)]
        known, self._longest = {*self._found}, FEW
        for source in sources:
            self._descend("", "", type(source))
        for variable in held:
            self._visit(*variable[:2], *variable[3:])
        self._go_deeper()
        return [variable for key, variable in self._found.items() if key not in known]

    def _go_deeper(self) -> None:
        while self._deeper:
            self._descend(*self._deeper.pop())

    def _visit_frame(self, frame: FrameType) -> None:
        if frame.f_locals is not frame.f_globals:
            scope = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            for key in list(frame.f_locals):
                self._visit(scope, key, LOCAL, frame, key)
        self._visit_names(frame.f_code, frame.f_globals)

    def _visit(self, scope: str, name: str, access: Access, holder: Any, place: Any, group: str = "") -> None:
        """Notes the variable, if it holds data, and walks over what its value holds."""
        value = access.read(holder, place)
        if isinstance(value, _BUFFERS):
            access, holder, value = BUFFER, value, BUFFER.read(value, None)
        if value is MISSING or len(self._found) >= MOST or id(value) in self._excluded:
            return
        is_data, is_simple = _kinds(type(value))
        if is_data or is_cached(value) or is_table(value):
            self._found.setdefault((scope, name), Variable(scope, name, group or name, access, holder, place))
        if not is_simple or _own_entries(value):
            self._descend(scope, name, value, group)

    def _descend(self, scope: str, name: str, value: Any, group: str = "") -> None:
        """Walks over the parts of a container, and over what a module, an object, a function or a class holds."""
        _, is_simple = _kinds(type(value))
        if (is_simple and not _own_entries(value)) or id(value) in self._seen:
            return
        if isinstance(value, type):
            return self._visit_class(value)
        if self._depth == MAX_DEPTH:
            return self._deeper.append((scope, name, value, group))
        self._seen.add(id(value))
        self._kept.append(value)
        self._depth += 1
        self._descend_into(scope, name, value, group)
        self._depth -= 1

    def _descend_into(self, scope: str, name: str, value: Any, group: str) -> None:
        if isinstance(value, _DATA):
            for key, part in () if isinstance(value, _SIMPLE) else _parts(value, self._longest):
                self._descend(scope, f"{name}[{key!r}]", part, group)
            for key, holder in _own_entries(value):
                self._visit(scope, f"{name}.{key}", ENTRY, holder, key, group)
        elif isinstance(value, nn.Module):
            self._visit_module(scope, name, value, group or name)
        elif isinstance(value, MethodType):
            self._descend(scope, name, value.__self__, group)
            self._descend(scope, name, value.__func__)
        elif isinstance(value, functools.partial):
            self._descend(scope, name, [value.func, value.args])
            for key in value.keywords:
                self._visit(scope, f"{name}.keywords[{key!r}]", ENTRY, value.keywords, key, group)
        elif isinstance(value, FunctionType):
            self._visit_function(name, value)
        elif is_cached(value):
            self._descend(scope, name, value.__wrapped__)
        elif isinstance(value, ContextVar):
            self._visit(scope, name, CONTEXT, value, None, group)
        elif isinstance(value, GeneratorType):
            if value.gi_frame is not None and not value.gi_running and not is_library(value.gi_code.co_filename):
                self._visit_frame(value.gi_frame)
        else:
            self._visit_object(scope, name, value, group)

    def _visit_object(self, scope: str, name: str, value: Any, group: str) -> None:
        is_module = isinstance(value, ModuleType)
        if is_module and is_library(getattr(value, "__file__", None) or "<frozen"):
            return
        is_whole = not is_module and (is_users(type(value)) or hasattr(value, "fit"))
        if is_whole:
            self._visit_class(type(value))
        left_out = _OF_OPTIMIZER if isinstance(value, Optimizer) else ()
        for key, access, holder in _attributes(value):
            if (is_whole or key in self.named) and key not in left_out:
                self._visit(value.__name__ if is_module else scope, f"{name}.{key}", access, holder, key, group)

    def _visit_module(self, scope: str, name: str, module: nn.Module, group: str) -> None:
        for registry in registries_of(module):
            for key in list(registry):
                self._visit(scope, f"{name}.{key}", ENTRY, registry, key, group)
        own = () if isinstance(module, torch.jit.ScriptModule) else list(vars(module))
        for key in own:
            if key not in _TORCH_ATTRIBUTES:
                self._visit(scope, f"{name}.{key}", ENTRY, vars(module), key, group)
        for key, child in list(module._modules.items()):
            self._descend(scope, f"{name}.{key}", child, group)
        self._visit_class(type(module))

    def _visit_function(self, name: str, function: FunctionType) -> None:
        if is_library(function.__code__.co_filename):
            return
        scope = function.__qualname__
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._visit(scope, key, ENTRY, Attributes(cell), "cell_contents")
        for number, _ in enumerate(function.__defaults__ or ()):
            self._visit(scope, f"{name}.__defaults__[{number}]", ITEM, function.__defaults__, number)
        for holder, mark in ((function.__kwdefaults__ or {}, "__kwdefaults__."), (vars(function), "")):
            for key in list(holder):
                self._visit(scope, f"{name}.{mark}{key}", ENTRY, holder, key)
        self._visit_names(function.__code__, function.__globals__)

    def _visit_class(self, kind: type) -> None:
        """Walks over the attributes of the user's classes, and over their methods."""
        for base in kind.__mro__:
            if id(base) in self._seen or not is_users(base):
                continue
            self._seen.add(id(base))
            for key, value in list(vars(base).items()):
                function = getattr(value, "__func__", value)
                if isinstance(function, FunctionType) or (not key.startswith("__") and isinstance(value, _DATA)):
                    self._visit(base.__module__, f"{base.__name__}.{key}", OF_CLASS, base, key)

    def _visit_names(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Walks over the globals that the code names, and those that functions within it name."""
        names = names_in(code)
        self.named.update(names)
        for key in sorted(names):
            if key in namespace and (id(namespace), key) not in self._names:
                self._names.add((id(namespace), key))
                self._visit(str(namespace.get("__name__")), key, ENTRY, namespace, key)


def attributes_of(value: Any, name: str | None = None) -> list[Variable]:
    """Returns the variables in an object's dictionary."""
    kind, name = type(value), name or type(value).__name__
    return [
        Variable(kind.__module__, f"{name}.{key}", f"{name}.{key}", ENTRY, vars(value), key)
        for key in list(getattr(value, "__dict__", ()))
    ]


def attributes_of_model(model: nn.Module, names: Collection[str]) -> list[Variable]:
    """Returns those attributes of a model, its parts and its tensors that have one of these names and hold data."""
    parts = chain(model.named_modules(), model.named_parameters(), model.named_buffers())
    found = [
        variable
        for prefix, part in parts
        for variable in attributes_of(part, f"model.{prefix}" if prefix else "model")
        if variable.place in names and not (isinstance(part, nn.Module) and variable.place in _settings_of(type(part)))
    ]
    return [variable for variable in found if isinstance(variable.read(), _DATA)]


@functools.cache
def _settings_of(kind: type) -> frozenset[str]:
    """Returns the attributes that torch's own modules have; those of its layers may be switched."""
    is_torch = kind.__module__.startswith("torch.")
    return _TORCH_ATTRIBUTES.union(inspect.signature(kind.__init__).parameters if is_torch else ())


def parts_of(value: Any, depth: int = 4) -> list[Any]:
    """Returns a value and the tensors, containers and objects in it, such as those of a batch."""
    if isinstance(value, NUMBERS) or not depth:
        return []
    holder = getattr(value, "__dict__", None)
    inner = [part for _, part in _parts(value)] if isinstance(value, CONTAINERS) else []
    inner += [*holder.values()] if isinstance(holder, dict) and not isinstance(value, Tensor) else []
    return [value, *(part for each in inner for part in parts_of(each, depth - 1))]


def _parts(container: Any, longest: int = LONGEST) -> Iterator[tuple[Any, Any]]:
    """Yields the parts of a container that is not long, with their keys, unless all are numbers and texts."""
    if len(container) <= longest:
        keys, values = keys_and_values(container)
        if not all(isinstance(value, NUMBERS) for value in values):
            yield from enumerate(values) if keys is None else zip(keys, values, strict=True)


def _own_entries(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns the attributes that a tensor, a number or a container has besides its content, and what has them.

    So has a mapping that is written in Python; not what is an entry, too, as in a `ModelOutput` of transformers.
    """
    holder = getattr(value, "__dict__", None) if isinstance(value, _DATA) else None
    if not holder or not isinstance(holder, dict):
        return []
    entries = {*map(id, keys_and_values(value)[1])} if isinstance(value, Mapping) else ()
    return [(key, holder) for key, part in list(holder.items()) if id(part) not in entries]


def _attributes(value: Any) -> Iterator[tuple[str, Access, Any]]:
    """Yields the attributes of an object, and what has them."""
    holder = getattr(value, "__dict__", {})
    for key in list(holder) if isinstance(holder, dict) else ():
        yield key, ENTRY, holder
    for key in sorted({slot for kind in type(value).__mro__ for slot in slots_of(kind)}):
        yield key, SLOT, value


def _entries_of(buffer: Any) -> Any:
    """Returns the numbers that are in a buffer of this or of several processes, as an array over the same memory."""
    try:
        return np.asarray(memoryview(getattr(buffer, "_obj", buffer)))
    except (TypeError, ValueError):  # no numbers, or released
        return MISSING


def _class_attribute(kind: type, key: str) -> Any:
    value = vars(kind).get(key, MISSING)
    return getattr(value, "__func__", value)


def _write_local(frame: FrameType, key: str, value: Any) -> None:
    """Writes a local variable of a frame that waits for a call."""
    frame.f_locals[key] = value
    if sys.version_info < (3, 13):  # there f_locals is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


ENTRY = Access(lambda holder, key: holder.get(key, MISSING), lambda holder, key, value: holder.__setitem__(key, value))
LOCAL = Access(lambda frame, key: frame.f_locals.get(key, MISSING), _write_local)
CONTEXT = Access(lambda variable, _: variable.get(MISSING), lambda variable, _, value: variable.set(value))
SLOT = Access(lambda holder, key: getattr(holder, key, MISSING), object.__setattr__)
OF_CLASS = Access(_class_attribute, setattr)
BUFFER = Access(lambda buffer, _: _entries_of(buffer), None)
ITEM = Access(lambda values, number: values[number], None)


def holds_only(value: Any, known: Collection[int]) -> bool:
    """True for a tensor with one of these ids, and for a list, tuple or dictionary of such, as of parameters."""
    parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return bool(parts) and all(id(part) in known for part in parts)
