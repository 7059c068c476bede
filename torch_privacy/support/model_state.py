# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors and attributes of a model, and detects and undoes changes: by versions, and by contents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, compress
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor, nn

from .contents import MISSING, Saved, copied, has_entries, length_if_long, local_of, plain_type, same, values_in
from .held_state import Entry, Modules, StateWalk, place_of, state_entries
from .own_draws import randn
from .script_modules import registries_of, scripted, takes_hooks

version_of = attrgetter("_version")


class Versions:
    """Remembers the versions of tensors, which count the writes into them other than through ``.data``."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._tensors = [*tensors]
        self._versions = [*map(version_of, self._tensors)]

    def are_current(self) -> bool:
        """True if nothing was written into any of the tensors since."""
        return self._versions == [*map(version_of, self._tensors)]

    def unchanged(self) -> list[Tensor]:
        """Returns the tensors into which nothing was written since."""
        now = [*map(version_of, self._tensors)]
        return [*compress(self._tensors, map(eq, now, self._versions))]


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


def attribute_tensors(model: nn.Module) -> Versions:
    """Returns the tensors in a model's plain attributes, or in containers there, such as position indices.

    Tensors that are added later, or written into, may hold data of a batch.
    """
    found = _tensors_held([value for *_, value in state_entries([*model.named_modules()])])
    return Versions(t for t in found if not t.requires_grad and not t.is_inference())


def _tensors_held(values: list[Any]) -> Iterator[Tensor]:
    """Yields the tensors among values and in containers, which may contain themselves."""
    seen: set[int] = set()
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            yield value
        elif (isinstance(value, frozenset) or plain_type(value) is not None) and id(value) not in seen:
            seen.add(id(value))
            values += values_in(value)


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
        self._versions = Versions([t for _, t in self._tree.entries])

    def changed(self) -> tuple[list[str], list[str]]:
        """Returns the names of the parameters and of the buffers that have changed."""
        present = self._tree if self._tree.is_current() else ModelTree(self._model)
        if present is self._tree and self._versions.are_current():
            return [], []
        now, unchanged = dict(present.entries), {id(t) for t in self._versions.unchanged()}
        changed = [
            (name, isinstance(t, nn.Parameter))
            for name, t in self._tree.entries
            if now.get(name) is not t or id(t) not in unchanged
        ]
        return [name for name, is_parameter in changed if is_parameter], [
            name for name, is_parameter in changed if not is_parameter
        ]


class ModelState:
    """Copies buffers and attributes of a model, to restore them and its hooks, and to detect what a forward changed.

    Args:
        model: the model, with all that its modules and the functions that it calls hold (`state_entries`).
        parameters: names of frozen parameters that are copied and restored, too.
    """

    def __init__(self, model: nn.Module, parameters: Collection[str] = ()):
        self._modules, self._parameters = [*model.named_modules()], frozenset(parameters)
        self._before = StateWalk(self._modules)
        entries = chain(self._before.entries(), _parameter_entries(self._modules, self._parameters))
        self._entries = [(entry, Saved(entry[3], length_if_long)) for entry in entries]
        self._places = {(place_of(holder), key) for (_, holder, key, _), _ in self._entries}
        self._hooks = [(registry, frozenset(registry)) for registry in _hook_registries(self._modules)]
        self._extra = dict(extra_states(self._modules))

    def _current_entries(self, *, with_parameters: bool = True) -> Iterator[Entry]:
        frozen = _parameter_entries(self._modules, self._parameters if with_parameters else ())
        return chain(state_entries(self._modules), frozen)

    def restore(self, except_for: Collection[str] = ()) -> None:
        """Restores everything except for these names: the same objects, with the same content.

        What was added since is removed, but not from objects, classes and functions that are reached since only, such
        as those of a module that a forward imports: what these hold may be older. Hooks that were registered since are
        removed, too. A forward may register its hooks once, and note in an attribute that it did: with the attribute
        alone put back, it would register them again.
        """
        for name, holder, key, _ in list(self._current_entries()):
            added = (place_of(holder), key) not in self._places and self._before.has_seen(holder, key)
            if added and name not in except_for:
                del holder[key]
        for (name, holder, key, value), saved in self._entries:
            if name in except_for:
                continue
            if holder.get(key) is not value:
                holder[key] = value
            saved.restore()
        for registry, before in self._hooks:
            for key in [key for key in registry if key not in before]:
                del registry[key]

    def changes(self, *, with_parameters: bool = False) -> dict[str, Any]:
        """Returns dotted name -> present content of everything that has changed."""
        left_out = () if with_parameters else self._parameters
        before = {name: saved.content for (name, *_), saved in self._entries if name not in left_out} | self._extra
        now = {name: value for name, _, _, value in self._current_entries(with_parameters=with_parameters)}
        now |= extra_states(self._modules)
        changed = [name for name in {**before, **now} if not same(now.get(name, MISSING), before.get(name, MISSING))]
        return {name: copied(now.get(name, MISSING), length_if_long) for name in changed}


class QuietState:
    """Keeps what a model holds besides its parameters, while its forwards do not change it, to put it back.

    A `ModelState` before every batch would take milliseconds. Here a small tensor is copied once, and again when it was
    written into. Of modules that are not torch's own all attributes are put back, those that are new are deleted, and
    small tensors, lists, dictionaries and sets get their entries back.
    """

    def __init__(self, model: nn.Module):
        modules = [module for module in model.modules() if takes_hooks(module) and scripted(module) is module]
        own = [vars(module) for module in modules if not type(module).__module__.startswith("torch.")]
        self._holders = [*own, *(module._buffers for module in modules if module._buffers)]
        self._known: list[set[str]] = []  # keys of each holder
        self._places: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._contents: list[tuple[Any, Any]] = []
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}  # by place

    def keep(self) -> None:
        """Keeps what there is now."""
        if [*map(len, self._holders)] != [*map(len, self._known)]:
            self._known = [{*holder} for holder in self._holders]
            self._places = [(holder, key) for holder in self._holders for key in holder if key not in _OF_TORCH]
            self._copies = {}
        self._values, self._contents = [holder.get(key, MISSING) for holder, key in self._places], []
        for place, value in enumerate(self._values):
            if type(value) in _CONTAINERS and len(value) <= _SMALL:
                self._contents.append((value, value.copy()))
            elif isinstance(value, Tensor):
                self._keep_tensor(place, value)
            elif place in self._copies:  # of a tensor that is gone
                del self._copies[place]

    def _keep_tensor(self, place: int, t: Tensor) -> None:
        known, version, _ = self._copies.get(place, (None, 0, None))
        if t.is_inference() or t.numel() > _SMALL or not has_entries(t):
            self._copies.pop(place, None)
        elif t is not known or t._version != version:
            self._copies[place] = t, t._version, t.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back what was kept."""
        for holder, known in zip(self._holders, self._known, strict=True):
            for key in [key for key in holder if key not in known]:
                del holder[key]
        for (holder, key), value in zip(self._places, self._values, strict=True):
            if value is not MISSING:
                holder[key] = value
        for value, content in self._contents:
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)
        for t, version, content in self._copies.values():
            if t._version != version:
                t.copy_(content)


class Snapshot:
    """Keeps a copy of a model's tensors and modes; takes as much memory as the model."""

    def __init__(self, model: nn.Module):
        self._modes = [(module, module.training) for module in model.modules()]
        registries = [r for module in model.modules() for r in registries_of(module)]
        self._registries: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = [(r, dict(r)) for r in registries]
        tensors = {id(t): t for r in registries for t in r.values() if isinstance(t, Tensor)}
        self._tensors = [Saved(t) for t in tensors.values()]

    def restore(self) -> None:
        """Restores tensors and modes."""
        self.restore_tensors()
        for module, training in self._modes:
            module.training = training

    def restore_tensors(self) -> None:
        """Restores parameters and buffers; does not write into those that have not changed."""
        for registry, before in self._registries:
            for name in [name for name in registry if name not in before]:
                del registry[name]
            registry.update(before)
        for saved in self._tensors:
            saved.restore()


class ParameterDigests:
    """Detects changed parameters, trained or not: keeps copies of small ones and random projections of the others."""

    def __init__(self, model: nn.Module):
        self._copies, self._sizes, self._products = _digests(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Returns the names of the parameters that have changed."""
        copies, sizes, products = _digests(model)
        changed = [name for name, p in products.items() if not same(p, self._products.get(name, MISSING))]
        if sizes != self._sizes or not all(same(copies[kind], self._copies[kind]) for kind in copies):
            before, after = _by_name(self._copies, self._sizes), _by_name(copies, sizes)
            changed += [name for name, copy in after.items() if not same(copy, before.get(name, MISSING))]
        return changed


def extra_states(modules: Modules) -> Iterator[tuple[str, Any]]:
    """Yields what modules put into the model's file besides parameters and buffers, by its names there.

    Left out is what no file can have, because the module raises an error, and what does not compare equal when it is
    asked for twice, such as an object made anew.
    """
    for prefix, module in modules:
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            try:
                content, again = copied(module.get_extra_state()), module.get_extra_state()
            except Exception:  # of the user's code: there is no file of this model
                continue
            if same(again, content):
                yield f"{prefix}._extra_state" if prefix else "_extra_state", content


def _hook_registries(modules: Modules) -> list[MutableMapping[int, Any]]:
    """Returns where torch keeps the hooks of these modules, by number."""
    return [vars(module)[name] for _, module in modules if takes_hooks(module) for name in _HOOKS]


def _parameter_entries(modules: Modules, names: Collection[str]) -> Iterator[Entry]:
    """Yields the parameters with these names."""
    for prefix, module in modules if names else ():
        for key, value in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if name in names:
                yield name, module._parameters, key, value


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_CONTAINERS, _OF_TORCH = {list, dict, set}, frozenset(vars(nn.Module()))
_SMALL = 2**12  # entries of a tensor or a container that is copied
_CHUNK = 2**18  # entries that one random projection covers
_MAX_COPIED = 2**20  # entries that are copied, of all parameters together

_Kind = tuple[torch.dtype, torch.device]


@torch.no_grad()
def _digests(model: nn.Module) -> tuple[dict[_Kind, Tensor], dict[str, tuple[_Kind, int]], dict[str, Tensor | None]]:
    """Returns copies of small parameters, concatenated; their names and sizes; random projections of all others.

    A projection changes with almost any change of the entries. It is None for a parameter that cannot be read.
    """
    flat: dict[_Kind, list[Tensor]] = {}
    sizes: dict[str, tuple[_Kind, int]] = {}
    products: dict[str, Tensor | None] = {}
    room = _MAX_COPIED
    for name, p in _with_entries(model.named_parameters()):
        if not has_entries(p) or nn.parameter.is_lazy(p):
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


def _with_entries(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors; in place of a subclass that only holds other tensors, as quantized weights do, these."""
    for name, t in named:
        flatten = getattr(t, "__tensor_flatten__", None)
        if flatten is None or local_of(t) is not t or nn.parameter.is_lazy(t):
            yield name, t
        else:
            yield from _with_entries((f"{name}.{inner}", getattr(t, inner)) for inner in flatten()[0])


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
    return randn(_CHUNK, generator=generator, dtype=dtype).to(device)
