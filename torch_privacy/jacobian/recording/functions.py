# SPDX-License-Identifier: Apache-2.0
"""Classifies torch's functions: which only rearrange entries, which may reorder examples, which change in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator


def _getter(attribute: str) -> Callable:
    """Returns the function that torch reports when an attribute such as ``Tensor.T`` is read."""
    return vars(torch._C.TensorBase)[attribute].__get__


# Functions of one tensor that only rearrange its entries (injectively), so that a gradient keeps its norm through them.
_REARRANGEMENTS = {
    *(torch.t, Tensor.t, torch.transpose, Tensor.transpose, _getter("T"), _getter("mT"), Tensor.permute),
    *(torch.permute, Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze, Tensor.contiguous, Tensor.clone, torch.clone),
    *(Tensor.movedim, torch.movedim, Tensor.view_as, Tensor.narrow, torch.narrow, Tensor.select, torch.select),
    *(Tensor.chunk, torch.chunk, Tensor.split, torch.split, torch.functional.split, Tensor.unbind, torch.unbind),
    *(Tensor.split_with_sizes, torch.split_with_sizes, Tensor.tensor_split, torch.tensor_split, Tensor.unsafe_chunk),
    *(Tensor.swapaxes, torch.swapaxes, Tensor.ravel, torch.ravel, Tensor.flip, torch.flip, Tensor.roll, torch.roll),
}
# Functions that use only the shape or type of their second tensor.
LIKE = {Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.type_as, Tensor.to}
FROM_PYTHON = {torch.tensor, torch.as_tensor}  # make tensors of numbers
# Functions that use only the type and device of their first.
NEW = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor}
_REORDERING = {
    *("index_select", "index_add", "index_copy", "index_put", "gather", "take", "take_along_dim", "masked_select"),
    *("scatter", "scatter_add", "scatter_reduce", "sort", "topk", "repeat_interleave", "unique", "nonzero"),
    *("index_reduce", "segment_reduce", "masked_scatter", "put", "argsort", "argwhere", "msort", "unique_consecutive"),
    *("pack_padded_sequence", "pad_packed_sequence", "kthvalue", "embedding_bag"),
}
# Functions that keep every entry at its place, or in its row: data without a gradient only weigh or leave out entries.
_ENTRYWISE = {
    *("add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "multiply", "divide", "true_divide", "subtract"),
    *("radd", "rsub", "rmul", "rdiv", "rtruediv", "rfloordiv", "rpow", "rmod", "iadd", "isub", "imul", "idiv", "ipow"),
    *("itruediv", "ifloordiv", "float_power", "floor_divide", "fmod", "remainder", "copy", "where", "masked_fill"),
    *("maximum", "minimum", "max", "min", "fmax", "fmin", "clamp", "clip", "clamp_min", "clamp_max", "lerp", "addcmul"),
    *("addcdiv", "atan2", "arctan2", "hypot", "copysign", "xlogy", "logaddexp", "logaddexp2", "heaviside", "prelu"),
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "broadcast_tensors"),
    *("layer_norm", "group_norm", "rms_norm", "instance_norm", "batch_norm", "normalize", "lstm", "gru", "rnn_tanh"),
    *("rnn_relu", "eq", "ne", "lt", "le", "gt", "ge", "cosine_similarity", "pairwise_distance"),
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "gaussian_nll_loss", "ctc_loss"),
    *("margin_ranking_loss", "hinge_embedding_loss", "cosine_embedding_loss", "soft_margin_loss", "multi_margin_loss"),
    *("multilabel_margin_loss", "multilabel_soft_margin_loss", "triplet_margin_loss", "cross_entropy_loss"),
    *("triplet_margin_with_distance_loss", "nll_loss_nd"),
    "multi_head_attention_forward",  # what it is composed of is recorded
}
# Products of two matrices, one of which may determine where rows of the other go, as a graph's adjacency matrix does.
_OF_MATRICES = {torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm}
_OF_MATRICES |= {torch.sparse.mm, torch.inner, Tensor.inner, F.linear}
# Functions by which data leave torch; they may come back in any form.
LEAVING = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
_METADATA = {
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


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among a function's arguments or results, in lists and tuples too; asked for every op."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_among(value)
    return found


def sorted_out(values: tuple) -> tuple[list[Tensor], tuple, bool]:
    """Returns `tensors_among` and `numbers_in` arguments, and whether there may be others; asked for each op."""
    tensors: list[Tensor] = []
    numbers: list[Any] = []
    others = False
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif value is None or value is Ellipsis or isinstance(value, (int, str)):
            numbers.append(value)
        elif isinstance(value, (list, tuple, slice)):
            others = True
            tensors += tensors_among((value,))
            numbers += numbers_in((value,))
        else:
            others = True
            if isinstance(value, (Integral, range)):
                numbers += numbers_in((value,))
    return tensors, tuple(numbers), others


@cache
def changes_in_place(func: Callable) -> bool:
    """True if the function writes into its first argument, by its name: ``add_``, ``__iadd__``, ``__setitem__``."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


_NOT_IN_PLACE = {"__invert__", "__index__", "__int__", "__iter__", "__init__"}


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a torch function that do not depend on its arguments."""

    metadata: bool  # returns sizes, types and the like, and no tensor
    like_second: bool  # uses only shape or type of its second tensor
    like_first: bool  # uses only type and device of its first
    in_place: bool
    entrywise: bool  # keeps entries of a tensor with a gradient where they are, or in their row
    leaves_torch: bool  # gives the data to numpy or Python
    calls_functions: bool  # calls functions among its arguments, as torch.cond does
    reorders: bool | None  # may reorder examples as the data say; None if that depends on the arguments


@cache
def traits(func: Callable) -> Traits:
    """Returns the traits of a function; called on every call of it, and so cached."""
    depends = func in (Tensor.__getitem__, Tensor.__setitem__, F.embedding)
    return Traits(
        metadata=func in _METADATA,
        like_second=func in LIKE,
        like_first=func in NEW,
        in_place=changes_in_place(func),
        entrywise=_base_name(func) in _ENTRYWISE,
        leaves_torch=func in LEAVING,
        calls_functions=isinstance(func, HigherOrderOperator),
        reorders=None if depends else _base_name(func) in _REORDERING,
    )


def _base_name(func: Callable) -> str:
    """Returns a function's name without underscores around it, and without an overload's name."""
    return getattr(func, "__name__", "").split(".")[0].strip("_")


@cache
def decomposed(func: Callable) -> Callable | None:
    """Returns a torch function with inner calls that can be recorded; None unless the function is written in Python.

    Such a function first asks whether it is overridden, and would then hand itself to the recorder. The one returned
    has the same code with the answer no, so that it continues, and its inner calls are recorded instead.
    """
    if not isinstance(func, FunctionType) or not func.__module__.startswith("torch."):
        return None
    answers = {name: _not_overridden for name in func.__code__.co_names if name.startswith("has_torch_function")}
    if not answers:
        return None
    inner = FunctionType(
        func.__code__, {**func.__globals__, **answers}, func.__name__, func.__defaults__, func.__closure__
    )
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner


def _not_overridden(*tensors: Any) -> bool:
    return False


def picks_one(func: Callable, args: tuple, source: Callable) -> bool:
    """True if single numbers from the data index a parameter, as they do a mixture's experts: the result is a slice."""
    if func is not Tensor.__getitem__ or not source(args[0]):
        return False
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    tensors = [key for key in keys if isinstance(key, Tensor)]
    return bool(tensors) and all(_is_number(key) for key in tensors)


def with_first_by_position(func: Callable, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of a call by keywords alone, such as ``F.embedding(input=ids, weight=w)``, its first moved.

    An op's first tensor has a role: it is what ``relu_`` writes into, and what ``zeros_like`` takes the shape of.
    """
    if func in _OTHERS_FIRST:
        return (), kwargs
    name = next((name for name in ("input", "tensor", "self") if name in kwargs), None)
    rest = {key: value for key, value in kwargs.items() if key != name}
    return (() if name is None else (kwargs[name],)), rest


_OTHERS_FIRST = frozenset({torch.where, torch.searchsorted})  # their ``input`` or ``self`` is not the first argument


def looks_up_examples(func: Callable, args: tuple) -> bool:
    """True if a look-up by constant indices repeats one example's for all, such as positions expanded to (n, t).

    Any other constant indices give one result for all examples together: a function of the parameter alone.
    """
    ids = args[0] if func is F.embedding and args else None
    if ids is None or ids.ndim < 2 or ids.shape[0] < 2:
        return False
    return ids.stride(0) == 0 or bool((ids == ids[:1]).all())  # the host waits for a GPU where they are copies


def may_reorder(func: Callable, args: tuple, data: Sequence[Tensor]) -> bool:
    """True if the function may reorder examples as its data say, so that known layouts must be confirmed.

    Data without a gradient may do so in any function but those that keep entries at their places.
    """
    kind = traits(func)
    reorders = kind.reorders
    if reorders is None:
        reorders = _may_reorder(func, args, data)
    if reorders or len(data) < 2:
        return reorders
    differentiable = [t.requires_grad for t in data]
    if all(differentiable):
        return func in _OF_MATRICES and all([t.ndim == 2 for t in data])
    if not any(differentiable):
        return False
    if func is F.scaled_dot_product_attention and all(differentiable[:-1]):
        query, mask = data[0].shape, data[-1].shape  # a mask of each example leaves the examples apart
        return len(mask) < len(query) or mask[0] != query[0] or mask[0] == 1
    return not kind.entrywise or _spreads(data)


def _may_reorder(func: Callable, args: tuple, data: Sequence[Tensor]) -> bool:
    """Answers for the functions that depend on their arguments."""
    if func is F.embedding:
        return len(args) < 2 or args[1].requires_grad  # a gather among activations; by keyword it may be one
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return not all(map(_is_written_out, keys))


def _is_written_out(key: Any) -> bool:
    """True if `numbers_in` an index has all of it, as it does of integers and slices, but not of arrays."""
    if isinstance(key, (list, tuple)):
        return all(map(_is_written_out, key))
    return key is None or key is Ellipsis or isinstance(key, (Integral, range, slice))


def _spreads(data: Sequence[Tensor]) -> bool:
    """True if data without a gradient repeat, by broadcasting, a tensor that has one, as (n, m, 1) repeats (m, d).

    A mask may distribute the entries of a tensor to examples in this way. So may a single number of the data, which
    chooses between two orders of all examples.
    """
    masks = [t.shape for t in data if not t.requires_grad]
    if any([mask.numel() == 1 for mask in masks]):
        return True
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
    """True if the function only rearranges the entries of its tensor."""
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
    """Returns the integers, names and None among arguments, including those in lists, ranges and slices."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            continue
        if value is None or value is Ellipsis or isinstance(value, (int, str)):
            found.append(value)
        elif isinstance(value, slice):
            found.append(numbers_in([*map(_bound, (value.start, value.stop, value.step))]))
        elif isinstance(value, (list, tuple)):
            found.append(numbers_in(value))
        elif isinstance(value, range):
            found.append((value.start, value.stop, value.step))
        elif isinstance(value, Integral):  # of numpy
            found.append(int(value))
    return tuple(found)


def _bound(value: Any) -> Any:
    """Returns a slice's bound as an integer if it is a tensor, which torch reads, too."""
    return int(value) if isinstance(value, Tensor) and not is_functorch_wrapped_tensor(value) else value


def without_numbers(values: tuple, found: list[int]) -> tuple:
    """Returns the values with ``int`` in place of every integer, and appends these integers to ``found``."""
    kept: list[Any] = []
    for value in values:
        if type(value) is int:
            found.append(value)
            kept.append(int)
        else:
            kept.append(without_numbers(value, found) if isinstance(value, tuple) else value)
    return tuple(kept)
