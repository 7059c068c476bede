# SPDX-License-Identifier: Apache-2.0
"""Finds where the code of a model can keep something: attributes, objects in containers, classes, functions."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache, lru_cache, partial
from itertools import chain
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .libraries import is_library
from .script_modules import registries_of

MAX_ENTRIES = 10_000  # of a container that is copied; of a longer one only the length is compared
SIMPLE = frozenset({int, float, bool, str, bytes, complex, type(None), torch.Size, torch.dtype, torch.device})
MAX_DEPTH = 32  # levels of containers or objects within each other that are followed at once
LARGEST_GLOBAL = 2**24  # entries of a global tensor, beyond which it is left out
Entry = tuple[str, MutableMapping[str, Any], str, Any]  # dotted name, dictionary that holds it, key, value
Modules = list[tuple[str, nn.Module]]
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_NOT_PLAIN = (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType)
_LIBRARIES = frozenset(
    {
        "torch",
        "numpy",
        "builtins",
        "functools",
        "lightning",
        "logging",
        "pytorch_lightning",
        "threading",
        "torch_privacy",
        "torch_privacy_papers",
        "transformers",
    }
)


def state_entries(modules: Modules) -> Iterator[Entry]:
    """Yields everything that the modules, or the functions that they call, can change and read again.

    That is buffers and attributes; attributes of the plain objects in them, in containers too; attributes of the
    modules' own classes; defaults, attributes, closures and globals of their methods, of their hooks, and of the
    functions and classes that these name. Classes and functions of libraries are left out.
    """
    return StateWalk(modules).entries()


def place_of(holder: Any) -> int:
    """Returns what identifies the holder of an entry."""
    return id(holder.target if type(holder) is Attributes else holder)


class Attributes(MutableMapping[str, Any]):
    """The attributes of a class, a function or a cell as a dictionary."""

    def __init__(self, target: Any):
        self.target = target

    def __getitem__(self, key: str) -> Any:
        try:
            return vars(self.target)[key] if isinstance(self.target, type) else getattr(self.target, key)
        except (AttributeError, ValueError):  # of an empty cell
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.target, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self.target, key)

    def __iter__(self) -> Iterator[str]:
        return iter(dir(self.target))

    def __len__(self) -> int:
        return len(dir(self.target))


class StateWalk:
    """Walks over what modules hold, once over each object."""

    def __init__(self, modules: Modules):
        self._modules = modules
        self._seen = {id(module) for _, module in modules}
        self._dictionaries: set[int] = set()  # with the attributes of what was seen
        self._globals: set[tuple[int, str]] = set()  # named by functions that were seen, whether they exist or not
        self._depth = 0
        self._deeper: list[tuple[str, Any]] = []  # for later, such as the rest of a long linked list

    def entries(self) -> Iterator[Entry]:
        for prefix, module in self._modules:
            yield from self._of_module(prefix, module)
        while self._deeper:
            yield from self._parts(*self._deeper.pop())

    def has_seen(self, holder: Any, key: str) -> bool:
        """True if the walk would have yielded what this holder had under this key."""
        here = place_of(holder)
        return here in self._seen or here in self._dictionaries or (here, key) in self._globals

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen or len(self._seen) > MAX_ENTRIES:
            return False
        self._seen.add(id(value))
        return True

    def _of_module(self, prefix: str, module: nn.Module) -> Iterator[Entry]:
        start = f"{prefix}." if prefix else ""
        _, buffers = registries_of(module)
        for key, value in list(buffers.items()):
            yield start + key, buffers, key, value
        if isinstance(module, torch.jit.ScriptModule):
            return
        held = vars(module)
        self._dictionaries.update((id(buffers), id(held)))
        for key in [key for key in list(held) if key not in _TORCH_ATTRIBUTES]:
            value = held.get(key)
            if type(value) in SIMPLE:
                yield start + key, held, key, value
            elif not (isinstance(value, nn.Module) and id(value) in self._seen):
                yield start + key, held, key, value
                yield from self._parts(start + key, value)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook in list(hooks.values()):
                yield from self._parts(f"{start}hook", hook)
        yield from self._of_class(type(module))

    def _parts(self, name: str, value: Any) -> Iterator[Entry]:
        """Yields what a value holds: an object, a function, a class or a container of these."""
        if type(value) in SIMPLE or isinstance(value, (Tensor, ModuleType)):
            return
        if self._depth == MAX_DEPTH:
            self._deeper.append((name, value))
            return
        self._depth += 1
        yield from self._parts_here(name, value)
        self._depth -= 1

    def _parts_here(self, name: str, value: Any) -> Iterator[Entry]:
        if isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, (list, tuple, deque, set, frozenset, Mapping)):
            yield from self._in_container(name, value)
        elif isinstance(value, (MethodType, partial, staticmethod, classmethod, property)):
            if isinstance(value, partial):
                yield f"{name}.keywords", Attributes(value), "keywords", value.keywords
            for part in _INSIDE[next(one for one in _INSIDE if isinstance(value, one))]:
                yield from self._parts(name, getattr(value, part))
        elif isinstance(value, nn.Module):
            for prefix, module in value.named_modules():
                if self._is_new(module):
                    yield from self._of_module(f"{name}.{prefix}" if prefix else name, module)
        else:
            yield from self._of_object(name, value)

    def _in_container(self, name: str, value: Any) -> Iterator[Entry]:
        if len(value) > MAX_ENTRIES or not self._is_new(value):
            return
        for key, part in list(value.items() if isinstance(value, Mapping) else enumerate(value)):
            if type(part) not in SIMPLE:
                yield from self._parts(f"{name}[{key!r:.40}]", part)

    def _of_object(self, name: str, value: Any) -> Iterator[Entry]:
        """Yields the attributes of a plain object, and what they hold."""
        kind = type(value)
        if kind.__module__.split(".")[0] in _LIBRARIES or isinstance(value, _NOT_PLAIN):
            return
        held: Any = getattr(value, "__dict__", None)
        slots = [key for cls in kind.__mro__ for key in slots_of(cls)]
        if not (isinstance(held, dict) or slots) or not self._is_new(value):
            return
        self._dictionaries.add(id(held))
        for key, part in list(held.items()) if isinstance(held, dict) else ():
            yield f"{name}.{key}", held, key, part
            yield from self._parts(f"{name}.{key}", part)
        for key in slots:
            if hasattr(value, key):
                yield f"{name}.{key}", Attributes(value), key, getattr(value, key)
                yield from self._parts(f"{name}.{key}", getattr(value, key))
        yield from self._of_class(kind)

    def _of_class(self, kind: type) -> Iterator[Entry]:
        """Yields the attributes of a class and of its bases, and what their methods hold."""
        for cls in _own_classes(kind):
            if not self._is_new(cls):
                continue
            for key, value in list(vars(cls).items()):
                if not key.startswith("__") and not hasattr(type(value), "__get__") and not _is_code(value):
                    yield f"{cls.__qualname__}.{key}", Attributes(cls), key, value
                if key not in ("__dict__", "__weakref__"):
                    yield from self._parts(f"{cls.__qualname__}.{key}", value)

    def _of_function(self, func: FunctionType) -> Iterator[Entry]:
        """Yields defaults, attributes, closure and named globals of a function."""
        if not _is_own(func.__module__ or "") or not self._is_new(func):
            return
        name = func.__qualname__
        self._dictionaries.add(id(vars(func)))
        for key in ("__defaults__", "__kwdefaults__"):
            if (value := getattr(func, key)) is not None:
                yield f"{name}.{key}", Attributes(func), key, value
                yield from self._parts(f"{name}.{key}", value)
        for key, value in list(vars(func).items()):
            yield f"{name}.{key}", vars(func), key, value
            yield from self._parts(f"{name}.{key}", value)
        for key, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
            yield from self._of_cell(f"{name}.<closure>.{key}", cell)
        space = func.__globals__
        for key in globals_in(func.__code__):
            if (id(space), key) not in self._globals:
                self._globals.add((id(space), key))
                if key in space:
                    yield from self._of_global(f"{func.__module__}.{key}", space, key)

    def _of_cell(self, name: str, cell: CellType) -> Iterator[Entry]:
        holder = Attributes(cell)
        if "cell_contents" in holder and self._is_new(cell):
            value = cell.cell_contents
            if not _is_code(value):
                yield name, holder, "cell_contents", value
            yield from self._parts(name, value)

    def _of_global(self, name: str, space: dict[str, Any], key: str) -> Iterator[Entry]:
        value = space[key]
        large = isinstance(value, Tensor) and (value.requires_grad or value.numel() > LARGEST_GLOBAL)
        if large or isinstance(value, ModuleType):
            return
        if not _is_code(value) and (type(value) in SIMPLE or isinstance(value, Tensor) or not callable(value)):
            yield name, space, key, value
        if not hasattr(value, "__dict__") or _is_code(value) or _is_own(type(value).__module__):
            yield from self._parts(name, value)


_INSIDE: dict[type, tuple[str, ...]] = {
    MethodType: ("__self__", "__func__"),
    partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}


def _is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, ModuleType, type, nn.Module, staticmethod, classmethod))


def slots_of(cls: type) -> tuple[str, ...]:
    """Returns the slots that a class has besides those of its bases."""
    slots = vars(cls).get("__slots__", ())
    return tuple(s for s in ((slots,) if isinstance(slots, str) else slots) if s not in ("__dict__", "__weakref__"))


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Returns the names that a function looks up, and functions inside of it."""
    inner = (names for const in code.co_consts if isinstance(const, CodeType) for names in names_in(const))
    return tuple(dict.fromkeys(chain(code.co_names, inner)))


@lru_cache(maxsize=4096)
def globals_in(code: CodeType) -> tuple[str, ...]:
    """Returns those of `names_in` that are globals of the function, not attributes: ``b``, but not for ``self.b``."""
    own = [op.argval for op in dis.get_instructions(code) if "GLOBAL" in op.opname or op.opname.endswith("D_NAME")]
    inner = (names for const in code.co_consts if isinstance(const, CodeType) for names in globals_in(const))
    return tuple(dict.fromkeys(chain(own, inner)))


@lru_cache(maxsize=4096)
def _own_classes(kind: type) -> tuple[type, ...]:
    """Returns a class and its bases, without those of Python and of libraries."""
    return tuple(cls for cls in kind.__mro__ if _is_own(cls.__module__))


@cache
def _is_own(module: str) -> bool:
    """True for a module that is no part of Python or of a library."""
    top = module.split(".")[0]
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not is_library(file)
