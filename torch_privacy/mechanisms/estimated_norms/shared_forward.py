# SPDX-License-Identifier: Apache-2.0
"""Runs a forward in forward mode along one direction after the other, and computes shared values only once.

Forward mode computes values and tangents side by side. The values are the same for all directions: the first pass
records them below autograd, op by op, and later passes reuse them and compute only their tangents. The values that stay
in memory are those that some tangent was computed from: about as many as a backward would keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ...support.torch_modes import tensors_in

aten = torch.ops.aten

# Recomputed in every pass: tangents start as zeros, and are added to.
_ZEROS = frozenset({aten.zeros, aten.zeros_like, aten.new_zeros, aten._efficientzerotensor})
_METADATA = frozenset({aten.is_same_size, aten._has_same_storage_numel})  # read no entries
_PRODUCTS = frozenset({aten.mm, aten.bmm, aten.convolution})
_TANGENT_ZEROS = aten._new_zeros_with_same_feature_meta  # reads no entries either; it creates a tangent
_RAW_READS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.__array__, Tensor.__dlpack__})
# Stands in for values that were freed, unless a kept value of equal size does: if one were needed after all, the sums
# would disagree with the projections.
_SENTINEL, _SENTINEL_ENTRIES = 1e3, 2**10


class CannotShare(RuntimeError):
    """Raised when the forward does something that later passes cannot replay."""


class _Replay(Enum):
    """Replays of an op without a recorded result."""

    RECOMPUTE = "compute the result"
    RETURN_ARGUMENTS = "return the arguments, which the op changed in the first pass"


@dataclass(frozen=True)
class _Place:
    """Position of a result in its storage."""

    storage: int
    entries: int  # of the storage
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    empty: Tensor  # with the result's type and device


@dataclass(frozen=True)
class _Zeros:
    """A zero result, which takes no memory."""

    empty: Tensor
    size: tuple[int, ...]


class _NoRawMemory(TorchFunctionMode):
    """Refuses to read entries without a torch op, because later passes may hold other entries there."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in _RAW_READS and _may_be_freed(args[0]):
            raise CannotShare(f"the forward calls {func.__name__}, which reads memory past torch's ops")
        return func(*args, **(kwargs or {}))


class SharedForward(TorchDispatchMode):
    """Records the values of the first pass and replays them in later ones; ``along`` wraps every pass.

    Raises:
        CannotShare: a value is changed in place after a tangent was computed from it, or a later pass calls other ops
            than the first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[Any, Any]] = []  # every op on values, with its result or its replay
        self._next = 0
        self._first = True
        self._entries = 0  # of all values
        self._kept: dict[int, torch.UntypedStorage] = {}  # values that later passes reuse
        # Storages by their ids; a weak reference keeps an id from being used for another storage.
        self._values: dict[int, StorageWeakRef] = {}
        self._tangents: dict[int, StorageWeakRef] = {}
        self._zeros: dict[int, StorageWeakRef] = {}
        self._used_by_tangents: dict[int, StorageWeakRef] = {}
        self._written_zeros: set[int] = set()
        self._stand_ins: dict[tuple[int, torch.device], torch.UntypedStorage | None] = {}  # for freed values

    @contextmanager
    def along(self, direction: Iterable[Tensor]) -> Iterator[None]:
        """Wraps one pass along the direction given by these tensors."""
        self._next, self._tangents, self._zeros = 0, {}, {}
        _track(self._tangents, direction)
        with _NoRawMemory(), self:
            yield
        self._first = False

    @property
    def entries_per_op(self) -> float:
        """Mean number of entries of a value."""
        return self._entries / max(1, len(self._recorded))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _METADATA:
            return func(*args, **kwargs)
        used = tensors_in((args, kwargs))
        numbers = {_storage_id(t) for t in used}
        if func.overloadpacket in _ZEROS:
            out = func(*args, **kwargs)
            _track(self._zeros, [out])
            return out
        if not numbers.isdisjoint(self._tangents):
            return self._run_tangent_op(func, used, args, kwargs)
        if self._first:
            return self._record_value_op(func, used, args, kwargs)
        return self._replay_value_op(func, args, kwargs)

    def _run_tangent_op(self, func: Any, used: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an op that takes a tangent."""
        changed = _written_by(func, args, kwargs)
        if any(_storage_id(t) not in self._tangents and _storage_id(t) not in self._zeros for t in changed):
            raise CannotShare(f"{func} writes a tangent into a value")
        _track(self._tangents, changed)
        if self._first and func.overloadpacket is not _TANGENT_ZEROS:
            self._keep_for_tangents(used)
        out = func(*args, **kwargs)
        _track(self._tangents, tensors_in(out))
        return out

    def _record_value_op(self, func: Any, used: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs and records an op on values, in the first pass."""
        changed = {_storage_id(t) for t in _written_by(func, args, kwargs)}
        if not changed.isdisjoint(self._used_by_tangents):
            raise CannotShare(f"{func} changes a value that tangents were computed from")
        out = func(*args, **kwargs)
        results = tensors_in(out)
        self._entries += sum(t.numel() for t in results)
        if self._is_zero(func, args):
            zeros = _Zeros(out.new_empty(0), tuple(out.shape))
            self._recorded.append((func, zeros))
            return self._restored(zeros)
        if any(_storage_id(t) in self._zeros for t in results) or not changed.isdisjoint(self._zeros):
            self._keep_for_tangents(used)
            self._written_zeros |= changed
            self._recorded.append((func, _Replay.RECOMPUTE))
        elif changed:
            self._recorded.append((func, _Replay.RETURN_ARGUMENTS))
        else:
            _track(self._values, results)
            self._keep(t for t in results if not _may_be_freed(t))
            self._recorded.append((func, tree_map(_place_of, out)))
        return out

    def _replay_value_op(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replays an op on values, in a later pass."""
        if self._next == len(self._recorded) or self._recorded[self._next][0] is not func:
            raise CannotShare(f"{func} was not called in the first pass of the forward")
        result = self._recorded[self._next][1]
        self._next += 1
        if result is _Replay.RECOMPUTE:
            return func(*args, **kwargs)
        if result is _Replay.RETURN_ARGUMENTS:
            changed, count = _written_by(func, args, kwargs), len(func._schema.returns)
            return changed[0] if count == 1 else tuple(changed) if count else None
        return tree_map(self._restored, result)

    def _is_zero(self, func: Any, args: tuple) -> bool:
        """Returns True if an op multiplies by zeros, as forward mode does for a factor without a tangent."""
        if func.overloadpacket not in _PRODUCTS or (func.overloadpacket is aten.convolution and args[2] is not None):
            return False
        return any(_storage_id(t) in self._zeros and _storage_id(t) not in self._written_zeros for t in args[:2])

    def _keep_for_tangents(self, tensors: Iterable[Tensor]) -> None:
        """Keeps the values among these for later passes; zeros are created again there."""
        tensors = [t for t in tensors if _storage_id(t) not in self._tangents and _storage_id(t) not in self._zeros]
        _track(self._used_by_tangents, tensors)
        self._keep(tensors)

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        self._kept |= {_storage_id(t): t.untyped_storage() for t in tensors}

    def _restored(self, place: Any) -> Any:
        """Returns a result of the first pass, or a placeholder if it was freed."""
        if isinstance(place, _Zeros):
            zeros = place.empty.new_zeros(()).expand(place.size)
            _track(self._zeros, [zeros])
            return zeros
        if not isinstance(place, _Place):
            return place
        storage = self._kept.get(place.storage)
        if storage is None:
            storage = self._of_equal_size(place) or _filled(place)
        return place.empty.detach().set_(storage, place.offset, place.size, place.stride)

    def _of_equal_size(self, place: _Place) -> torch.UntypedStorage | None:
        """Returns a kept value in place of a freed one: forward mode compares its size, and nothing reads it."""
        like = (place.entries * place.empty.itemsize, place.empty.device)
        if like not in self._stand_ins:
            self._stand_ins[like] = next((s for s in self._kept.values() if (s.nbytes(), s.device) == like), None)
        return self._stand_ins[like]


def _filled(place: _Place) -> torch.UntypedStorage:
    other = place.empty.new_empty(place.entries)
    other[:_SENTINEL_ENTRIES] = _SENTINEL
    return other.untyped_storage()


def _may_be_freed(value: Tensor) -> bool:
    """Returns True if a value is freed if no tangent needs it; integers and booleans are always kept."""
    return value.is_floating_point() or value.is_complex()


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _track(into: dict[int, StorageWeakRef], tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        reference = StorageWeakRef(tensor.untyped_storage())
        into.setdefault(reference.cdata, reference)


def _place_of(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    if result.is_conj() or result.is_neg():
        raise CannotShare("a complex value is conjugated")
    storage, empty = result.untyped_storage(), result.new_empty(0).detach()
    entries = storage.nbytes() // result.itemsize
    return _Place(storage._cdata, entries, tuple(result.shape), result.stride(), int(result.storage_offset()), empty)


def _written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the arguments that an op writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return tensors_in([given.get(a.name) for a in schema.arguments if a.is_write])
