# SPDX-License-Identifier: Apache-2.0
"""What the tape must know of torch's functions: which move entries about, which may reorder examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _getter(attribute: str) -> Callable:
    """The function by which torch reports that an attribute such as ``Tensor.T`` was read."""
    return vars(torch._C.TensorBase)[attribute].__get__


# Functions of one tensor that only move its entries about (injectively): the norm of a gradient survives the way back.
_REARRANGEMENTS = {
    *(torch.t, Tensor.t, torch.transpose, Tensor.transpose, _getter("T"), _getter("mT"), Tensor.permute),
    *(torch.permute, Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze, Tensor.contiguous, Tensor.clone, torch.clone),
    *(Tensor.movedim, torch.movedim, Tensor.view_as, Tensor.narrow, torch.narrow, Tensor.select, torch.select),
    *(Tensor.chunk, torch.chunk, Tensor.split, torch.split, torch.functional.split, Tensor.unbind, torch.unbind),
    *(Tensor.split_with_sizes, torch.split_with_sizes, Tensor.tensor_split, torch.tensor_split, Tensor.unsafe_chunk),
    *(Tensor.swapaxes, torch.swapaxes, Tensor.ravel, torch.ravel, Tensor.flip, torch.flip, Tensor.roll, torch.roll),
}
# Factories whose result holds no data of the batch.
_CONSTANTS = {torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices}
# Factories whose result may stand for an input with a part for every example, such as a first hidden state.
_FILLED = {torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn}
FROM_PYTHON = {torch.tensor, torch.as_tensor}  # make tensors of numbers
_FILLED |= FROM_PYTHON
LARGE = 2**20  # entries of what rows take that hang on a filled tensor with a part for each example, as on a constant
# Functions that take no more than the shape or type of their second tensor.
LIKE = {Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.type_as, Tensor.to}
# Functions that take no more than the type and device of their first.
NEW = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor}
_REORDERING = {
    *("index_select", "index_add", "index_copy", "index_put", "gather", "take", "take_along_dim", "masked_select"),
    *("scatter", "scatter_add", "scatter_reduce", "sort", "topk", "repeat_interleave", "unique", "nonzero"),
    *("index_reduce", "segment_reduce", "masked_scatter", "put", "argsort", "argwhere", "msort", "unique_consecutive"),
    *("_pack_padded_sequence", "_pad_packed_sequence"),
}
# Products in which one operand may say where rows of the other go, as a graph's adjacency does.
_OF_MATRICES = {torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm}
_OF_MATRICES |= {torch.sparse.mm}
_PRODUCTS = {*_OF_MATRICES, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm}
_PRODUCTS |= {torch.einsum, torch.functional.einsum, torch.tensordot, torch.functional.tensordot}
# By which data leave torch, in whatever form they may come back.
LEAVING = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
_TELLING = {
    *(
        _getter(name)
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_nested", "is_leaf")
    ),
    *(_getter(name) for name in ("is_sparse", "is_cuda", "is_quantized", "itemsize", "nbytes")),
    *(Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel),
    *(Tensor.is_contiguous, Tensor.element_size, Tensor.storage_offset, Tensor.get_device),
}
EXPANSIONS = {Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to}


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among the values, lists and tuples included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


_Kind = tuple[Callable, torch.Size]  # what made it, and its shape


def _holds_none(shape: torch.Size, num_examples: int) -> bool:
    """Whether no dimension can hold so many examples."""
    return all(size % max(num_examples, 1) for size in shape)


class Filled:
    """Which tensors that are filled with numbers may stand for an input, such as a first hidden state (n, d).

    The rest are constants, which are exact whatever they are taken for: only, one with a part for each example takes
    n times its size.
    """

    def __init__(self) -> None:
        self._of_any_batch: set[_Kind] = set()  # met in batches whose examples they cannot hold
        self._met: set[_Kind] = set()  # in the batch under way, whose size is not known yet
        self._shape: tuple[int, ...] = ()  # of the batch's first input
        self._dims = {0}  # of first inputs in which the examples may lie

    def guess(self, shape: tuple[int, ...]) -> int | None:
        """The size of a batch whose first input has this shape, by what earlier batches taught."""
        self._shape = shape
        return next((shape[dim] for dim in sorted(self._dims) if dim < len(shape)), None)

    def learn(self, num_examples: int) -> None:
        """The batch under way was of this size."""
        dims = {dim for dim, size in enumerate(self._shape) if size == num_examples}
        self._dims, self._shape = self._dims & dims or dims or self._dims, ()
        met, self._met = self._met, set()
        self._of_any_batch |= {kind for kind in met if _holds_none(kind[1], num_examples)}

    def _is_of_any_batch(self, kind: _Kind, num_examples: int | None) -> bool:
        """Whether it was met in a batch whose examples it cannot hold, be it this one."""
        if num_examples is None:
            self._met.add(kind)
        elif _holds_none(kind[1], num_examples):
            self._of_any_batch.add(kind)
        return kind in self._of_any_batch

    def stands_for_input(self, func: Callable, out: Tensor, num_examples: int | None) -> bool:
        """Whether it is large, has a dimension of n, and was not met where n was another."""
        if self._is_of_any_batch((func, out.shape), num_examples):
            return False
        return num_examples is None or (num_examples * out.numel() > LARGE and num_examples in out.shape)

    def may_be_filled_by_examples(self, func: Callable, out: Any, num_examples: int | None) -> bool:
        """Whether it is made to be written into, and may have a part for each example: (n, 7, 4) of zeros."""
        if not isinstance(out, Tensor) or not out.is_floating_point() or num_examples not in out.shape:
            return False
        name = getattr(func, "__name__", "")
        is_new = func in _FILLED or name.startswith("new_") or name.endswith("_like")
        return is_new and (func, out.shape) not in self._of_any_batch

    def makes_constant(self, func: Callable, out: Any, num_examples: int | None) -> bool:
        """Whether a factory's result holds no data of the batch; a list of whole numbers counts as positions."""
        if func in _CONSTANTS:
            return True
        if func in FROM_PYTHON and not out.is_floating_point():
            return out.ndim < 2
        return func in _FILLED and not self.stands_for_input(func, out, num_examples)

    def is_cached(self, tensor: Tensor, num_examples: int | None) -> bool:
        """Whether whole numbers that nothing made, as of a cache in the model's code, have no part for examples."""
        return not tensor.is_floating_point() and self._is_of_any_batch((Tensor, tensor.shape), num_examples)

    def makes_new(self, func: Callable, out: Any, args: tuple, num_examples: int | None) -> bool:
        """Whether the result only takes type and device of its argument, as in ``weight.new_zeros(n, d)``: an input."""
        name = getattr(func, "__name__", "")
        if name.endswith("_like") and args and not args[0].requires_grad:
            return False  # of a constant's shape, which has no part for each example
        is_new = name.startswith("new_") or name.endswith("_like")
        return is_new and self.stands_for_input(func, out, num_examples)


@cache
def changes_in_place(func: Callable) -> bool:
    """Whether the function writes into its first argument, by its name: ``add_``, ``__iadd__``, ``__setitem__``."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


_NOT_IN_PLACE = {"__invert__", "__index__", "__int__", "__iter__", "__init__"}


@dataclass(frozen=True, slots=True)
class Traits:
    """What can be said of a torch function without its arguments."""

    tells: bool  # it gives sizes, types and the like, and no tensor
    like: bool  # it takes no more than shape or type of its second tensor
    new: bool  # it takes no more than type and device of its first
    in_place: bool
    leaves: bool  # by it data leave torch
    moves: bool | None  # examples may be moved as the data say; None where the arguments decide


@cache
def traits(func: Callable) -> Traits:
    """What can be said of it; asked for on every call."""
    asks = func in (Tensor.__getitem__, Tensor.__setitem__, F.embedding) or func in _PRODUCTS
    return Traits(
        tells=func in _TELLING,
        like=func in LIKE,
        new=func in NEW,
        in_place=changes_in_place(func),
        leaves=func in LEAVING,
        moves=None if asks else getattr(func, "__name__", "").rstrip("_") in _REORDERING,
    )


@cache
def opened(func: Callable) -> Callable | None:
    """A torch function written in Python whose inner calls can be seen; None where it is not written in Python.

    Such a function begins by asking whether anybody overrides it. The one given back has the same code, and is told
    that nobody does: so it goes on, and what it calls is seen instead of itself.
    """
    if not isinstance(func, FunctionType) or not func.__module__.startswith("torch."):
        return None
    asked = {name: _nobody for name in func.__code__.co_names if name.startswith("has_torch_function")}
    if not asked:
        return None
    inner = FunctionType(
        func.__code__, {**func.__globals__, **asked}, func.__name__, func.__defaults__, func.__closure__
    )
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner


def _nobody(*tensors: Any) -> bool:
    return False


def picks_one(func: Callable, args: tuple, source: Callable) -> bool:
    """Whether a parameter is indexed by single numbers out of the data, as a mixture's experts are: a slice of it."""
    if func is not Tensor.__getitem__ or not source(args[0]):
        return False
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    tensors = [key for key in keys if isinstance(key, Tensor)]
    return bool(tensors) and all(_is_number(key) for key in tensors)


def looks_up_examples(func: Callable, args: tuple) -> bool:
    """Whether a look-up by constant numbers repeats one example's for all, as of positions expanded to (n, t).

    Any other constant numbers make one result for all examples together: a function of the parameter alone.
    """
    ids = args[0] if func is F.embedding and args else None
    return ids is not None and ids.ndim > 1 and ids.shape[0] > 1 and bool((ids == ids[:1]).all())


def may_reorder(func: Callable, args: tuple, data: Sequence[Tensor]) -> bool:
    """Whether the function may move examples about as its data say: then what is known of layouts must be verified."""
    moves = traits(func).moves
    if moves is None:
        moves = _may_reorder(func, args, data)
    return moves or (len(data) > 1 and _spreads(data))


def _may_reorder(func: Callable, args: tuple, data: Sequence[Tensor]) -> bool:
    """Of one whose arguments decide."""
    if func in _PRODUCTS:
        held = [t.requires_grad for t in data]
        matrices = all(any(arg is tensor and arg.ndim == 2 for tensor in data) for arg in args[:2])
        return (any(held) and not all(held)) or (func in _OF_MATRICES and matrices)
    if func is F.embedding:
        return len(args) < 2 or args[1].requires_grad  # a gather among activations; by keyword it may be one
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(key, Tensor) for key in keys)


def _spreads(data: Sequence[Tensor]) -> bool:
    """Whether data without a gradient are broadcast against one that has one, and repeat it: as (n, m, 1) does (m, d).

    So a mask may hand the entries of a tensor to the examples they belong to.
    """
    masks = [t.shape for t in data if not t.requires_grad]
    if not masks or len(masks) == len(data):
        return False
    for t in data:
        if t.requires_grad:
            shape = t.shape
            for mask in masks:
                if len(mask) > len(shape) and any([size > 1 for size in mask[: len(mask) - len(shape)]]):
                    return True
                if any([a == 1 < b for a, b in zip(reversed(shape), reversed(mask), strict=False)]):
                    return True
    return False


def rearranges(func: Callable, args: tuple) -> bool:
    """True if the function only moves the entries of its tensor about."""
    if func in _REARRANGEMENTS:
        return True
    if func is Tensor.__getitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(key is None or key is Ellipsis or isinstance(key, (int, slice)) or _is_number(key) for key in keys)
    if func is F.embedding:  # a look-up of distinct rows, such as positions 0..t-1
        return len(args) == 2 and len(args[0].unique()) == args[0].numel()
    return False


def _is_number(key: Any) -> bool:
    return isinstance(key, Tensor) and key.ndim == 0 and key.dtype is not torch.bool


def numbers_in(values: Iterable[Any]) -> tuple:
    """The whole numbers, names and None among arguments, lists and slices included."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            continue
        if value is None or value is Ellipsis or isinstance(value, (int, str)):
            found.append(value)
        elif isinstance(value, slice):
            found.append(numbers_in((value.start, value.stop, value.step)))
        elif isinstance(value, (list, tuple)):
            found.append(numbers_in(value))
    return tuple(found)


def without_numbers(values: tuple, found: list[int]) -> tuple:
    """The same with every whole number taken out, and put into ``found``."""
    kept: list[Any] = []
    for value in values:
        if type(value) is int:
            found.append(value)
            kept.append(int)
        else:
            kept.append(without_numbers(value, found) if isinstance(value, tuple) else value)
    return tuple(kept)
