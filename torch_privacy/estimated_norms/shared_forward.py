# SPDX-License-Identifier: Apache-2.0
"""A forward in forward mode along one direction after the other: what no direction enters is computed once.

Forward mode computes values and tangents side by side. The values are the same for all directions: the first pass notes
them below autograd, op by op, and later passes are given them back, so that a further direction takes its tangents
alone. Of the values those stay in memory that some tangent was computed from: about what a backward would keep.
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
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

# Made anew in every pass: tangents begin as zeros, and are added to.
_ZEROS = frozenset({aten.zeros, aten.zeros_like, aten.new_zeros, aten._efficientzerotensor})
_SHAPES = frozenset({aten.is_same_size, aten._has_same_storage_numel})  # read no entries
_PRODUCTS = frozenset({aten.mm, aten.bmm, aten.convolution})
_LIKE = aten._new_zeros_with_same_feature_meta  # neither does this; it begins a tangent
_RAW = frozenset({Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.__array__, Tensor.__dlpack__})
# In the place of values that nobody needs: were one needed, the sums would not bear the projections out.
_UNSEEN, _SOME = 1e3, 2**10


class Unshared(RuntimeError):
    """The forward does what later passes cannot be given back."""


class _How(Enum):
    """What later passes do with an op whose result they are not given back."""

    AGAIN = "compute it"
    CHANGED = "give back its arguments, which it changed in the first pass"


@dataclass(frozen=True)
class _Place:
    """Where a result lies in its storage."""

    storage: int
    entries: int  # of the storage
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    empty: Tensor  # with the result's type and device


@dataclass(frozen=True)
class _Zeros:
    """A result that is zero, which takes no memory."""

    empty: Tensor
    size: tuple[int, ...]


class _NoRawMemory(TorchFunctionMode):
    """Refuses to read entries past torch's ops, where those of later passes may be others."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in _RAW and _may_be_missing(args[0]):
            raise Unshared(f"the forward calls {func.__name__}, which reads memory past torch's ops")
        return func(*args, **(kwargs or {}))


class SharedForward(TorchDispatchMode):
    """Stands around every pass, by ``along``.

    Raises:
        Unshared: a value is changed in place after a tangent was computed from it, or a pass takes another course than
            the first did.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, Any]] = []  # every op on values, and its result or how it is had again
        self._next = 0
        self._first = True
        self._entries = 0  # of all values
        self._needed: dict[int, torch.UntypedStorage] = {}  # what later passes are given back
        # Storages by their numbers; a weak reference keeps a number from being given to another one.
        self._values: dict[int, StorageWeakRef] = {}
        self._tangents: dict[int, StorageWeakRef] = {}
        self._zeros: dict[int, StorageWeakRef] = {}
        self._met: dict[int, StorageWeakRef] = {}  # by tangents
        self._filled: set[int] = set()  # of the zeros

    @contextmanager
    def along(self, direction: Iterable[Tensor]) -> Iterator[None]:
        """A pass along the direction that these tensors are."""
        self._next, self._tangents, self._zeros = 0, {}, {}
        _note(self._tangents, direction)
        with _NoRawMemory(), self:
            yield
        self._first = False

    @property
    def entries_per_op(self) -> float:
        """How large values are in the mean."""
        return self._entries / max(1, len(self._noted))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _SHAPES:
            return func(*args, **kwargs)
        met = _tensors((args, kwargs))
        numbers = {_number(t) for t in met}
        if func.overloadpacket in _ZEROS:
            out = func(*args, **kwargs)
            _note(self._zeros, [out])
            return out
        if not numbers.isdisjoint(self._tangents):
            return self._of_tangents(func, met, args, kwargs)
        if self._first:
            return self._of_values(func, met, args, kwargs)
        return self._again(func, args, kwargs)

    def _of_tangents(self, func: Any, met: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        """An op that a tangent enters."""
        changed = _changed(func, args, kwargs)
        if any(_number(t) not in self._tangents and _number(t) not in self._zeros for t in changed):
            raise Unshared(f"{func} writes a tangent into a value")
        _note(self._tangents, changed)
        if self._first and func.overloadpacket is not _LIKE:
            self._need(met)
        out = func(*args, **kwargs)
        _note(self._tangents, _tensors(out))
        return out

    def _of_values(self, func: Any, met: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        """An op on values, in the first pass."""
        changed = {_number(t) for t in _changed(func, args, kwargs)}
        if not changed.isdisjoint(self._met):
            raise Unshared(f"{func} changes a value that tangents were computed from")
        out = func(*args, **kwargs)
        results = _tensors(out)
        self._entries += sum(t.numel() for t in results)
        if self._is_zero(func, args):
            zeros = _Zeros(out.new_empty(0), tuple(out.shape))
            self._noted.append((func, zeros))
            return self._found(zeros)
        if any(_number(t) in self._zeros for t in results) or not changed.isdisjoint(self._zeros):
            self._need(met)
            self._filled |= changed
            self._noted.append((func, _How.AGAIN))
        elif changed:
            self._noted.append((func, _How.CHANGED))
        else:
            _note(self._values, results)
            self._keep(t for t in results if not _may_be_missing(t))
            self._noted.append((func, tree_map(_placed, out)))
        return out

    def _again(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An op on values, in a later pass."""
        if self._next == len(self._noted) or self._noted[self._next][0] is not func:
            raise Unshared(f"{func} was not called when the forward was made first")
        result = self._noted[self._next][1]
        self._next += 1
        if result is _How.AGAIN:
            return func(*args, **kwargs)
        if result is _How.CHANGED:
            changed, count = _changed(func, args, kwargs), len(func._schema.returns)
            return changed[0] if count == 1 else tuple(changed) if count else None
        return tree_map(self._found, result)

    def _is_zero(self, func: Any, args: tuple) -> bool:
        """Whether an op multiplies by zeros, as forward mode does where a factor has no tangent."""
        if func.overloadpacket not in _PRODUCTS or (func.overloadpacket is aten.convolution and args[2] is not None):
            return False
        return any(_number(t) in self._zeros and _number(t) not in self._filled for t in args[:2])

    def _need(self, tensors: Iterable[Tensor]) -> None:
        """Tangents meet these; zeros are made anew for them."""
        tensors = [t for t in tensors if _number(t) not in self._tangents and _number(t) not in self._zeros]
        _note(self._met, tensors)
        self._keep(tensors)

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        self._needed |= {_number(t): t.untyped_storage() for t in tensors}

    def _found(self, place: Any) -> Any:
        """A result of the first pass, or something like it where nobody needs it."""
        if isinstance(place, _Zeros):
            zeros = place.empty.new_zeros(()).expand(place.size)
            _note(self._zeros, [zeros])
            return zeros
        if not isinstance(place, _Place):
            return place
        storage = self._needed.get(place.storage)
        if storage is None:  # of the same size: forward mode compares those of a tensor and its tangent
            other = place.empty.new_empty(place.entries)
            other[:_SOME] = _UNSEEN
            storage = other.untyped_storage()
        return place.empty.detach().set_(storage, place.offset, place.size, place.stride)


def _may_be_missing(value: Tensor) -> bool:
    """Whether it is given up where no tangent needs it; whole numbers and truth values are always kept."""
    return value.is_floating_point() or value.is_complex()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _number(tensor: Tensor) -> int:
    """Of the storage."""
    return tensor.untyped_storage()._cdata


def _note(into: dict[int, StorageWeakRef], tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        reference = StorageWeakRef(tensor.untyped_storage())
        into.setdefault(reference.cdata, reference)


def _placed(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    if result.is_conj() or result.is_neg():
        raise Unshared("a complex value is conjugated")
    storage, empty = result.untyped_storage(), result.new_empty(0).detach()
    entries = storage.nbytes() // result.itemsize
    return _Place(storage._cdata, entries, tuple(result.shape), result.stride(), int(result.storage_offset()), empty)


def _changed(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an op writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return _tensors([given.get(a.name) for a in schema.arguments if a.is_write])
