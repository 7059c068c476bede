# SPDX-License-Identifier: Apache-2.0
"""What a model holds beside its parameters: buffers and plain attributes, which a forward may change."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ENTRIES = 10_000  # of a container that are looked at; one that is longer is known by its length alone
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_Slot = tuple[str, dict[str, Any], str, Any]  # dotted name, where it is kept, under which key, what is there


class ModelState:
    """Buffers and attributes of a model as they are now: to put them back, and to see what a forward changed.

    Args:
        model: looked into with the plain objects that its modules hold.
        parameters: names of frozen parameters that are put back, too.
    """

    def __init__(self, model: nn.Module, parameters: Collection[str] = ()):
        self._modules, self._parameters = [*model.named_modules()], frozenset(parameters)
        self._slots = [(slot, _copied(slot[3])) for slot in self._now()]

    def _now(self, *, with_parameters: bool = True) -> Iterator[_Slot]:
        frozen = _parameter_slots(self._modules, self._parameters if with_parameters else ())
        return chain(slots(self._modules), frozen)

    def restore(self, but: Collection[str] = ()) -> None:
        """Put everything back, but what has these names: the same objects, with the same content."""
        known = {(id(place), key) for (_, place, key, _), _ in self._slots}
        for name, place, key, _ in list(self._now()):
            if (id(place), key) not in known and name not in but:
                del place[key]
        for (name, place, key, value), content in self._slots:
            if name in but:
                continue
            if place.get(key) is not value:
                place[key] = value
            _fill(value, content)

    def changes(self, *, with_parameters: bool = False) -> dict[str, Any]:
        """Dotted name -> content, of all that holds something else now."""
        but = () if with_parameters else self._parameters
        before = {name: content for (name, *_), content in self._slots if name not in but}
        now = {name: value for name, _, _, value in self._now(with_parameters=with_parameters)}
        changed = {name: _copied(value) for name, value in now.items() if not same(value, before.get(name, _MISSING))}
        return changed | {name: _MISSING for name in before if name not in now}


class ParameterMarks:
    """What a model's parameters held, trained or not: copies as long as these are small, else a few numbers each."""

    def __init__(self, model: nn.Module):
        self._small, self._names, self._marks = _marks(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Names of the parameters that hold something else now."""
        small, names, now = _marks(model)
        changed = [name for name, mark in now.items() if not same(mark, self._marks.get(name, _MISSING))]
        if names != self._names or not all(same(small[kind], self._small[kind]) for kind in small):
            before, after = _apart(self._small, self._names), _apart(small, names)
            changed += [name for name, copy in after.items() if not same(copy, before.get(name, _MISSING))]
        return changed


@torch.no_grad()
def restore(parameters: Iterable[Tensor], contents: Iterable[Tensor]) -> None:
    """Put back what parameters held; what holds it still is not touched."""
    for p, content in zip(parameters, contents, strict=True):
        if not _equal(p, content):
            p.copy_(content)


_MISSING = object()


_Modules = list[tuple[str, nn.Module]]


def slots(modules: _Modules) -> Iterator[_Slot]:
    """The buffers and attributes of modules, and of the plain objects that these hold."""
    seen: set[int] = set()
    for prefix, module in modules:
        start = f"{prefix}." if prefix else ""
        for key, value in list(module._buffers.items()):
            yield start + key, module._buffers, key, value
        for key, value in list(vars(module).items()):
            if key not in _OF_TORCH and not isinstance(value, nn.Module):
                yield start + key, vars(module), key, value
                yield from _inside(start + key, value, seen)


def _inside(name: str, value: Any, seen: set[int]) -> Iterator[_Slot]:
    """The attributes of a plain object that a module holds, and of those that it holds."""
    kind = type(value)
    is_plain = isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, _NOT_PLAIN)
    if not is_plain or kind.__module__.split(".")[0] in _LIBRARIES or id(value) in seen or len(seen) > ENTRIES:
        return
    seen.add(id(value))
    for key, part in list(vars(value).items()):
        yield f"{name}.{key}", vars(value), key, part
        yield from _inside(f"{name}.{key}", part, seen)


_NOT_PLAIN = (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType)
_LIBRARIES = frozenset(
    {"torch", "numpy", "builtins", "functools", "threading", "logging", "torch_privacy", "transformers"}
)


def _parameter_slots(modules: _Modules, names: Collection[str]) -> Iterator[_Slot]:
    for prefix, module in modules if names else ():
        for key, value in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if name in names:
                yield name, module._parameters, key, value


def _copied(value: Any) -> Any:
    """The content, safe from changes in place; things of unknown kinds stand for themselves."""
    if isinstance(value, Tensor):
        return value.detach().clone() if _has_entries(value) else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(v) for key, v in value.items()} if len(value) <= ENTRIES else len(value)
    if isinstance(value, (list, tuple, deque)):
        return [_copied(v) for v in value] if len(value) <= ENTRIES else len(value)
    if isinstance(value, (set, frozenset)):
        return set(value) if len(value) <= ENTRIES else len(value)
    return value


def _has_entries(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_meta and not value.is_inference() and not value.is_nested


def same(value: Any, content: Any) -> bool:
    """Whether a value has this content; undefined entries count as the same."""
    if value is content:
        return True
    if isinstance(value, Tensor):
        if not isinstance(content, Tensor) or not _has_entries(value) or not _has_entries(content):
            return False
        return value.shape == content.shape and value.dtype == content.dtype and _equal(value.detach(), content)
    if isinstance(value, np.ndarray):
        alike = isinstance(content, np.ndarray) and value.dtype == content.dtype
        return alike and np.array_equal(value, content, equal_nan=value.dtype.kind in "fc")
    if isinstance(value, (Mapping, list, tuple, deque, set, frozenset)) and isinstance(content, int):
        return len(value) == content
    if isinstance(value, Mapping):
        alike = isinstance(content, Mapping) and value.keys() == content.keys()
        return alike and all(same(v, content[key]) for key, v in value.items())
    if isinstance(value, (list, tuple, deque)):
        alike = isinstance(content, (list, tuple, deque)) and len(value) == len(content)
        return alike and all(same(v, w) for v, w in zip(value, content, strict=True))
    if isinstance(value, float) and isinstance(content, float):
        return value == content or (value != value and content != content)
    if isinstance(value, (bool, int, complex, str, bytes, set, frozenset)):
        return type(value) is type(content) and value == content
    return False


def _equal(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    """Bring what may have been changed in place back to its content."""
    if isinstance(value, Tensor):
        if _has_entries(value) and not _equal(value.detach(), content):
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = content
    elif not isinstance(content, int):  # of a long container, whose content was not kept
        _fill_container(value, content)


def _fill_container(value: Any, content: Any) -> None:
    if isinstance(value, dict):
        for key in [key for key in value if key not in content]:
            del value[key]
        _fill_each(value, content)
    elif isinstance(value, list):
        value[len(content) :] = []
        value += content[len(value) :]
        _fill_each(value, dict(enumerate(content)))
    elif isinstance(value, deque):
        if not same(value, content):
            value.clear()
            value.extend(content)
    elif isinstance(value, set) and value != content:
        value.clear()
        value |= content


def _fill_each(value: Any, content: Mapping[Any, Any]) -> None:
    for key, c in content.items():
        inside = value.get(key, _MISSING) if isinstance(value, dict) else value[key]
        if not same(inside, c):
            if type(inside) in (list, dict, set, deque) or (isinstance(inside, Tensor) and _fits(inside, c)):
                _fill(inside, c)
            else:
                value[key] = _copied(c)


def _fits(value: Tensor, content: Any) -> bool:
    return isinstance(content, Tensor) and value.shape == content.shape and value.dtype == content.dtype


_PIECE = 2**18  # entries at a time
_SMALL = 2**20  # entries that are copied, of all parameters together

_Kind = tuple[torch.dtype, torch.device]


@torch.no_grad()
def _marks(
    model: nn.Module,
) -> tuple[dict[_Kind, Tensor], dict[str, tuple[_Kind, int]], dict[str, Tensor | None]]:
    """Copies of small parameters in a row; their names, with the number of entries; of all others random products.

    Hardly any change leaves products with its entries as they are. Parameters that cannot be looked into have None.
    """
    flat: dict[_Kind, list[Tensor]] = {}
    names: dict[str, tuple[_Kind, int]] = {}
    products: dict[str, Tensor | None] = {}
    room = _SMALL
    for name, p in model.named_parameters():
        if not _has_entries(p) or nn.parameter.is_lazy(p):
            products[name] = None
            continue
        entries = p.detach().reshape(-1)
        if entries.numel() <= min(room, _PIECE):
            kind = entries.dtype, entries.device
            flat.setdefault(kind, []).append(entries)
            names[name] = kind, entries.numel()
            room -= entries.numel()
            continue
        entries = torch.view_as_real(entries).reshape(-1) if entries.is_complex() else entries
        weights = _weights(p.device)
        products[name] = torch.stack([(part * weights[: len(part)]).sum() for part in entries.split(_PIECE)])
    return {kind: torch.cat(parts) for kind, parts in flat.items()}, names, products


def _apart(copies: Mapping[_Kind, Tensor], names: Mapping[str, tuple[_Kind, int]]) -> dict[str, Tensor]:
    """The copies of parameters by name."""
    parts = {
        kind: iter(copy.split([size for other, size in names.values() if other == kind]))
        for kind, copy in copies.items()
    }
    return {name: next(parts[kind]) for name, (kind, _) in names.items()}


@cache
def _weights(device: torch.device) -> Tensor:
    """Fixed random numbers."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    generator = torch.Generator().manual_seed(1)
    return torch.randn(_PIECE, generator=generator, dtype=dtype, device="cpu").to(device)
