# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors and attributes of a model, detects changes in them, and restores them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .held_state import MAX_DEPTH, MAX_ENTRIES, SIMPLE, Entry, Modules, place_of, state_entries
from .script_modules import scripted


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model: those that are trained, and those that hold no data of the batch."""

    trained: Mapping[str, Tensor]  # held by the optimizer and requiring a gradient, by dotted name
    others: Mapping[str, Tensor]  # frozen parameters and buffers, which hold no data of the batch
    attributes: Sequence[Tensor] = ()  # tensors in plain attributes, unchanged since before the first batch

    @property
    def constants(self) -> list[Tensor]:
        """All tensors that hold no data of the batch."""
        return [*self.others.values(), *self.attributes]


class AttributeTensors:
    """Remembers the tensors in a model's plain attributes, or in containers there, such as position indices.

    Tensors that are added later, or written into, may hold data of a batch.
    """

    def __init__(self, model: nn.Module):
        found = _tensors_held([value for *_, value in state_entries([*model.named_modules()])])
        self._kept = [(t, t._version) for t in found if not t.requires_grad and not t.is_inference()]

    def unchanged(self) -> list[Tensor]:
        """Returns the tensors into which nothing was written since."""
        return [t for t, version in self._kept if t._version == version]


def _tensors_held(values: list[Any]) -> Iterator[Tensor]:
    """Yields the tensors among values and in containers, which may contain themselves."""
    seen: set[int] = set()
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (Mapping, list, tuple, deque, set, frozenset)) and id(value) not in seen:
            seen.add(id(value))
            values += value.values() if isinstance(value, Mapping) else value


class ModelTree:
    """The modules of a model with their tensors, read once, because walking over modules takes longer than a layer."""

    def __init__(self, model: nn.Module):
        self.modules = [*model.named_modules()]
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.entries = [
            (f"{prefix}.{key}" if prefix else key, t)
            for prefix, module in self.modules
            for registry in (module._parameters, module._buffers)
            for key, t in registry.items()
            if t is not None and not t.is_inference()
        ]
        self._registries = [
            (holder, kind, registry, [*registry.keys()], [*map(id, registry.values())], [*registry.values()])
            for holder in (vars(scripted(module)) for _, module in self.modules)
            for kind, registry in ((kind, holder[kind]) for kind in ("_modules", "_parameters", "_buffers"))
        ]

    def is_current(self) -> bool:
        """True if no module, parameter or buffer was added, replaced or removed since."""
        for holder, kind, registry, keys, ids, _ in self._registries:
            if holder[kind] is not registry or len(registry) != len(keys):
                return False
            if keys and ([*registry.keys()] != keys or [*map(id, registry.values())] != ids):  # most are empty
                return False
        return True


class MutationGuard:
    """Detects whether parameters or buffers of a model were replaced, or written into other than through ``.data``."""

    def __init__(self, model: nn.Module, tree: ModelTree | None = None):
        self._model, self._tree = model, tree or ModelTree(model)
        self._versions = [t._version for _, t in self._tree.entries]

    def changed(self) -> tuple[list[str], list[str]]:
        """Returns the names of the parameters and of the buffers that have changed."""
        present = self._tree if self._tree.is_current() else ModelTree(self._model)
        if present is self._tree and self._versions == [t._version for _, t in present.entries]:
            return [], []
        now = dict(present.entries)
        changed = [
            (name, isinstance(t, nn.Parameter))
            for (name, t), version in zip(self._tree.entries, self._versions, strict=True)
            if now.get(name) is not t or t._version != version
        ]
        return [name for name, is_parameter in changed if is_parameter], [
            name for name, is_parameter in changed if not is_parameter
        ]


class ModelState:
    """Copies the buffers and attributes of a model, to restore them and to detect what a forward changed.

    Args:
        model: the model, with all that its modules and the functions that it calls hold (`state_entries`).
        parameters: names of frozen parameters that are copied and restored, too.
    """

    def __init__(self, model: nn.Module, parameters: Collection[str] = ()):
        self._modules, self._parameters = [*model.named_modules()], frozenset(parameters)
        self._entries = [(entry, _copied(entry[3])) for entry in self._current_entries()]
        self._places = {(place_of(holder), key) for (_, holder, key, _), _ in self._entries}

    def _current_entries(self, *, with_parameters: bool = True) -> Iterator[Entry]:
        frozen = _parameter_entries(self._modules, self._parameters if with_parameters else ())
        return chain(state_entries(self._modules), frozen)

    def restore(self, except_for: Collection[str] = ()) -> None:
        """Restores everything except for these names: the same objects, with the same content."""
        for name, holder, key, _ in list(self._current_entries()):
            if (place_of(holder), key) not in self._places and name not in except_for:
                del holder[key]
        for (name, holder, key, value), content in self._entries:
            if name in except_for:
                continue
            if holder.get(key) is not value:
                holder[key] = value
            if content is not value:  # else it cannot change in place, or has no copy
                _fill(value, content)

    def changes(self, *, with_parameters: bool = False) -> dict[str, Any]:
        """Returns dotted name -> present content of everything that has changed."""
        left_out = () if with_parameters else self._parameters
        before = {name: content for (name, *_), content in self._entries if name not in left_out}
        now = {name: value for name, _, _, value in self._current_entries(with_parameters=with_parameters)}
        changed = {name: _copied(value) for name, value in now.items() if not same(value, before.get(name, _MISSING))}
        return changed | {name: _MISSING for name in before if name not in now}


class ParameterDigests:
    """Detects changed parameters, trained or not: keeps copies of small ones and random projections of the others."""

    def __init__(self, model: nn.Module):
        self._copies, self._sizes, self._products = _digests(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Returns the names of the parameters that have changed."""
        copies, sizes, products = _digests(model)
        changed = [name for name, p in products.items() if not same(p, self._products.get(name, _MISSING))]
        if sizes != self._sizes or not all(same(copies[kind], self._copies[kind]) for kind in copies):
            before, after = _by_name(self._copies, self._sizes), _by_name(copies, sizes)
            changed += [name for name, copy in after.items() if not same(copy, before.get(name, _MISSING))]
        return changed


def local_of(tensor: Tensor) -> Tensor:
    """Returns a tensor itself, or this rank's shard of it."""
    return getattr(tensor, "_local_tensor", tensor)


@torch.no_grad()
def restore(parameters: Iterable[Tensor], contents: Iterable[Tensor]) -> None:
    """Restores the contents of parameters; does not write into those that still have them."""
    for p, content in zip(parameters, contents, strict=True):
        if not _equal(p, content):
            p.copy_(content)


_MISSING = object()


def _parameter_entries(modules: Modules, names: Collection[str]) -> Iterator[Entry]:
    """Yields the parameters with these names."""
    for prefix, module in modules if names else ():
        for key, value in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if name in names:
                yield name, module._parameters, key, value


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


def _copied(value: Any, visits: Visits | None = None) -> Any:
    """Returns a copy of the content, which changes in place do not reach.

    Values of unknown types are not copied, nor are containers in themselves, or deep within each other.
    """
    if type(value) in SIMPLE:
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if _has_entries(value) else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, (Mapping, list, tuple, deque, set, frozenset)):
        return value
    if len(value) > MAX_ENTRIES:
        return len(value)
    if isinstance(value, (set, frozenset)):
        return set(value)
    visits = visits or Visits()
    return visits.result((value,), lambda: _copied_parts(value, visits), within=value, below=value)


def _copied_parts(container: Any, visits: Visits) -> Any:
    if isinstance(container, Mapping):
        return {key: _copied(part, visits) for key, part in container.items()}
    return [_copied(part, visits) for part in container]


def _has_entries(value: Tensor) -> bool:
    """True if the tensor's entries can be read and compared."""
    return value.layout is torch.strided and not value.is_meta and not value.is_inference() and not value.is_nested


def same(value: Any, content: Any, visits: Visits | None = None) -> bool:
    """True if a value has this content; NaN equals NaN. Containers deep within each other must be the same objects."""
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
    if isinstance(value, (Mapping, list, tuple, deque)):
        visits = visits or Visits()
        return visits.result((value, content), lambda: _same_parts(value, content, visits), within=True, below=False)
    if isinstance(value, float) and isinstance(content, float):
        return value == content or (value != value and content != content)
    if isinstance(value, (bool, int, complex, str, bytes, set, frozenset)):
        return type(value) is type(content) and value == content
    return False


def _same_parts(value: Any, content: Any, visits: Visits) -> bool:
    if isinstance(value, Mapping):
        alike = isinstance(content, Mapping) and value.keys() == content.keys()
        return alike and all(same(v, content[key], visits) for key, v in value.items())
    alike = isinstance(content, (list, tuple, deque)) and len(value) == len(content)
    return alike and all(same(v, w, visits) for v, w in zip(value, content, strict=True))


def _equal(a: Tensor, b: Tensor) -> bool:
    a, b = local_of(a), local_of(b)  # no rank waits for another
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    """Writes the content back into a value that may have been changed in place."""
    if value is content:  # it was not copied
        return
    if isinstance(value, Tensor):
        if _has_entries(value) and not _equal(value.detach(), content):
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = content
    elif not isinstance(content, int):  # an int stands for a long container, which was not copied
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
    elif isinstance(value, tuple):
        for entry, c in zip(value, content, strict=True):
            _fill(entry, c)
    elif isinstance(value, set) and value != content:
        value.clear()
        value |= content


def _fill_each(value: Any, content: Mapping[Any, Any]) -> None:
    for key, c in content.items():
        entry = value.get(key, _MISSING) if isinstance(value, dict) else value[key]
        if not same(entry, c):
            if type(entry) in (list, dict, set, deque) or (isinstance(entry, Tensor) and _fits(entry, c)):
                _fill(entry, c)
            else:
                value[key] = _copied(c)


def _fits(value: Tensor, content: Any) -> bool:
    return isinstance(content, Tensor) and value.shape == content.shape and value.dtype == content.dtype


_CHUNK = 2**18  # entries that one random projection covers
_MAX_COPIED = 2**20  # entries that are copied, of all parameters together

_Kind = tuple[torch.dtype, torch.device]


@torch.no_grad()
def _digests(
    model: nn.Module,
) -> tuple[dict[_Kind, Tensor], dict[str, tuple[_Kind, int]], dict[str, Tensor | None]]:
    """Returns copies of small parameters, concatenated; their names and sizes; random projections of all others.

    A projection changes with almost any change of the entries. It is None for a parameter that cannot be read.
    """
    flat: dict[_Kind, list[Tensor]] = {}
    sizes: dict[str, tuple[_Kind, int]] = {}
    products: dict[str, Tensor | None] = {}
    room = _MAX_COPIED
    for name, p in model.named_parameters():
        if not _has_entries(p) or nn.parameter.is_lazy(p):
            products[name] = None
            continue
        entries = local_of(p).detach().reshape(-1)
        if entries.numel() <= min(room, _CHUNK):
            kind = entries.dtype, entries.device
            flat.setdefault(kind, []).append(entries)
            sizes[name] = kind, entries.numel()
            room -= entries.numel()
            continue
        entries = torch.view_as_real(entries).reshape(-1) if entries.is_complex() else entries
        weights = _weights(p.device)
        products[name] = torch.stack([(part * weights[: len(part)]).sum() for part in entries.split(_CHUNK)])
    return {kind: torch.cat(parts) for kind, parts in flat.items()}, sizes, products


def _by_name(copies: Mapping[_Kind, Tensor], sizes: Mapping[str, tuple[_Kind, int]]) -> dict[str, Tensor]:
    """Splits the concatenated copies into one for each parameter."""
    parts = {
        kind: iter(copy.split([size for other, size in sizes.values() if other == kind]))
        for kind, copy in copies.items()
    }
    return {name: next(parts[kind]) for name, (kind, _) in sizes.items()}


@cache
def _weights(device: torch.device) -> Tensor:
    """Returns the fixed random weights of the projections."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    generator = torch.Generator().manual_seed(1)
    return torch.randn(_CHUNK, generator=generator, dtype=dtype, device="cpu").to(device)
