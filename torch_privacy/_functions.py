# SPDX-License-Identifier: Apache-2.0
"""What the tape must know of torch's functions: which move entries about, which may reorder examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
}
# Factories whose result holds no data of the batch. What random and fill functions make may stand for an input.
_CONSTANTS = {torch.arange, torch.linspace, torch.eye}
# Functions that take no more than the shape or type of their second tensor.
_LIKE = {Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.type_as}
_REORDERING = {
    *("index_select", "index_add", "index_copy", "index_put", "gather", "take", "take_along_dim", "masked_select"),
    *("scatter", "scatter_add", "scatter_reduce", "sort", "topk", "repeat_interleave", "unique", "nonzero"),
    *("_pack_padded_sequence", "_pad_packed_sequence"),
}
EXPANSIONS = {Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to}


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the values, lists and tuples included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def data_arguments(func: Callable, args: tuple, tensors: list[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t is args[0]] if func in _LIKE else tensors


def makes_constant(func: Callable, out: Any) -> bool:
    """Whether a factory's result holds no data of the batch; a list of whole numbers counts as positions."""
    return func in _CONSTANTS or (func is torch.tensor and out.ndim < 2 and not out.is_floating_point())


def makes_new(func: Callable) -> bool:
    """Whether the result only takes type and device of its argument, as in ``weight.new_zeros(n, d)``: a new input."""
    name = getattr(func, "__name__", "")
    return name.startswith("new_") or name.endswith("_like")


def looks_up_examples(func: Callable, args: tuple) -> bool:
    """Whether a look-up by constant numbers repeats one example's for all, as of positions expanded to (n, t).

    Any other constant numbers make one result for all examples together: a function of the parameter alone.
    """
    ids = args[0] if func is F.embedding and args else None
    return ids is not None and ids.ndim > 1 and ids.shape[0] > 1 and bool((ids == ids[:1]).all())


def may_reorder(func: Callable, args: tuple) -> bool:
    """Whether the function may move examples about as its data say: then layouts are measured on every batch."""
    if func is Tensor.__getitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(key, Tensor) for key in keys)
    if func is F.embedding:
        return len(args) < 2 or args[1].requires_grad  # a gather among activations; by keyword it may be one
    return getattr(func, "__name__", "").rstrip("_") in _REORDERING


def rearranges(func: Callable, args: tuple) -> bool:
    if func in _REARRANGEMENTS:
        return True
    if func is Tensor.__getitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(key is None or key is Ellipsis or isinstance(key, (int, slice)) for key in keys)
    if func is F.embedding:  # a look-up of distinct rows, such as positions 0..t-1
        return len(args) == 2 and len(args[0].unique()) == args[0].numel()
    return False


def numbers_in(values: Iterable[Any]) -> tuple:
    """The whole numbers, names and None among arguments, lists and slices included."""
    found: list[Any] = []
    for value in values:
        if value is None or value is Ellipsis or isinstance(value, (int, str)):
            found.append(value)
        elif isinstance(value, slice):
            found.append(numbers_in((value.start, value.stop, value.step)))
        elif isinstance(value, (list, tuple)):
            found.append(numbers_in(value))
    return tuple(found)


def in_units_of(n: int, numbers: tuple) -> tuple:
    """The same with multiples of n replaced by how many times n they are."""
    return tuple(
        in_units_of(n, value)
        if isinstance(value, tuple)
        else ("n", value // n)
        if type(value) is int and value and value % n == 0
        else value
        for value in numbers
    )
