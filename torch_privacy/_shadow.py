# SPDX-License-Identifier: Apache-2.0
"""Whose data the entries of a tensor hold, where no gradient tells: token ids, masks, what is detached.

The gradient in an op's output says whose loss an entry serves. That the entry was also made from that example's data
must be known as well: a loss that looks up the neighbor's tokens has rows like any other, but one example enters two.
So every input of the model gets a shadow of the same shape that holds each entry's example number, and goes through
the same functions. Where shadows meet a parameter they must say what the gradient says. Functions without a rule are
run again (``_influence.py``); what several examples' data went into without a gradient stays marked whatever follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ._influence import MIXED, NOBODY, UNKNOWN, Influence, can_be_run_again, results_of
from ._inputs import Item

# (size, k): the examples lie in the tensor's k-th dimension of this size. With k = -1 each has a tensor of its own, and
# with -2 and -3 several rows of the first dimension: one behind the other, or all first ones first.
Where = tuple[int, int]
Shadow = dict[Where, Tensor]

_MOVES = {  # functions of one tensor (the first argument) that only move its entries about, or repeat them
    *("__getitem__", "roll", "flip", "fliplr", "flipud", "rot90", "view", "reshape", "flatten", "unflatten", "ravel"),
    *("transpose", "permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "expand", "broadcast_to"),
    *("expand_as", "view_as", "reshape_as", "repeat", "repeat_interleave", "tile", "chunk", "split", "unbind"),
    *("split_with_sizes", "tensor_split", "narrow", "select", "squeeze", "unsqueeze", "contiguous", "clone", "detach"),
    *(
        "index_select",
        "gather",
        "take_along_dim",
        "take",
        "masked_select",
        "diagonal",
        "unfold",
        "_pack_padded_sequence",
    ),
}
_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"}
_POINTWISE = {
    *("add", "sub", "rsub", "mul", "div", "floor_divide", "true_divide", "remainder", "fmod", "pow", "neg", "abs"),
    *("clamp", "clamp_min", "clamp_max", "clip", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "minimum"),
    *("maximum", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not"),
    *("bitwise_xor", "and", "or", "xor", "invert", "radd", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "rpow", "lshift", "rshift", "iadd", "isub", "imul", "to", "long", "int", "short", "float"),
    *("double", "half", "bfloat16", "bool", "byte", "char", "type", "type_as", "cpu", "cuda", "isnan", "isfinite"),
    *("nan_to_num", "floor", "ceil", "round", "trunc", "sign", "square", "sqrt", "exp", "log", "sin", "cos", "tanh"),
    *("sigmoid", "relu", "where"),
}
_REDUCTIONS = {
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "cumsum", "cumprod"),
    *("cummax", "cummin", "count_nonzero", "softmax", "sort", "argsort", "topk", "std", "var", "logsumexp", "median"),
}
_WITHOUT_GRADIENT = {"any", "all", "argmax", "argmin", "count_nonzero", "argsort"}
_NEW = {"new_zeros", "new_ones", "new_full", "new_empty"}
_DETACHING = {torch.detach, Tensor.detach, vars(torch._C.TensorBase)["data"].__get__}
_ATTRIBUTES = {
    vars(torch._C.TensorBase)[name].__get__: name for name in ("T", "mT", "data") if name in vars(torch._C.TensorBase)
}


class Shadows:
    """The shadows of one batch's tensors, which are known by identity and version.

    Args:
        num_examples: size of the batch; where it is not known every dimension may be that of the examples.
        thorough: whether functions of numbers that no rule tells of are run again to find out; those of whole numbers
            always are.
    """

    def __init__(self, num_examples: int | None = None, *, thorough: bool = True):
        self._num_examples, self._thorough = num_examples, thorough
        self.begun = False  # whether the model's inputs are among them
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Shadow]] = {}
        self._expected: dict[GradientEdge, Shadow] = {}
        self._mixed: dict[int, tuple[Tensor, bool]] = {}  # by a shadow's id: whether something in it is

    def begin(
        self, tensor: Tensor, item: Item | None = None, rows_for_each: int = 0, but: Collection[int] = ()
    ) -> None:
        """An input of the model: each entry belongs to the example of its place, or all to that of the list's item.

        ``but``: dimensions in which no examples lie, whatever their size.
        """
        self.begun = True
        shadow: Shadow = {}
        n = self._num_examples
        if item is not None and n is not None and item.owner(n) is not None:
            whole = torch.full((), item.place, dtype=torch.int32, device=tensor.device)
            shadow[n, -1] = whole.expand(tensor.shape)
            if not item.alike:
                self._put(tensor, shadow)
                return
        if n is not None and rows_for_each:
            numbers = torch.arange(n, dtype=torch.int32, device=tensor.device)
            for k, order in ((-2, numbers.repeat_interleave(rows_for_each)), (-3, numbers.repeat(rows_for_each))):
                shadow[n, k] = order.view([-1] + [1] * (tensor.ndim - 1)).expand(tensor.shape)
        self._put(tensor, {**shadow, **self._by_shape(tensor, but)})

    def _by_shape(self, tensor: Tensor, but: Collection[int] = ()) -> Shadow:
        """The examples in every dimension of their number, other than that of features where the first is another."""
        n, shadow = self._num_examples, {}
        of_features = tensor.is_floating_point() and tensor.ndim > 1 and len(tensor) != n  # as of several graphs' nodes
        for dim, size in enumerate(tensor.shape[:-1] if of_features else tensor.shape):
            if size == (n or size) and dim not in but:
                shape = [1] * dim + [size] + [1] * (tensor.ndim - dim - 1)
                numbers = torch.arange(size, dtype=torch.int32, device=tensor.device).view(shape)
                whose = numbers.expand(tensor.shape)
                shadow[size, sum(same == size for same, _ in shadow)] = whose
                self._mixed[id(whose)] = whose, False
        return shadow

    def behind(self, func: Callable, args: tuple, kwargs: dict, data: Sequence[Tensor]) -> Any:
        """What the result's shadow is made of, to be asked before the function runs; None where nothing is known.

        Tensors that are neither shadowed nor in ``data`` hold nobody's.
        """
        if not self._known or not (_drops_gradient(func) or any([id(t) in self._known for t in data])):
            return None
        rule = _rule(func)
        unknown = {id(t) for t in data}
        shadows = {id(t): shadow for t in data if (shadow := self._found(func, t))}
        values = [t for t in data if t.is_floating_point()]
        found, is_marked = {}, False
        for where in {where for shadow in shadows.values() for where in shadow}:
            value = None
            if rule is not None:
                with suppress(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                    value = rule(_Reader(where, shadows, unknown), args, kwargs)
            if value is None and any([self._is_mixed(shadows.get(id(t), {}).get(where)) for t in values]):
                value = torch.tensor(MIXED, dtype=torch.int32, device=values[0].device)  # whatever the function does
                is_marked = True
            found[where] = value
        if is_marked:  # under some hypothesis of where the examples lie; under the others nothing is known then
            device = values[0].device
            found = {w: torch.tensor(UNKNOWN, device=device).int() if v is None else v for w, v in found.items()}
        found = {where: value for where, value in found.items() if value is not None}
        return found if found or rule is not None else None

    def influences(
        self, func: Callable, args: tuple, kwargs: dict, data: Sequence[Tensor], *, in_place: bool
    ) -> dict[Where, tuple[Influence, bool]]:
        """What finds out of a result that no rule tells of; as ``behind``, asked for before the function runs."""
        n = self._num_examples
        if not self._known or n is None or n < 2 or not can_be_run_again(func, data):
            return {}
        if not self._thorough and any([t.is_floating_point() for t in data]):
            return {}
        shadows = [(t, shadow) for t in data if (shadow := self._found(func, t))]
        found = {}
        for where in {where for _, shadow in shadows for where in shadow if where[0] == n}:
            owners = {id(t): shadow.get(where, shadow.get((n, 0))) for t, shadow in shadows}
            known = {key: whose for key, whose in owners.items() if whose is not None and not (whose < NOBODY).any()}
            somebody_s = {key: whose for key, whose in known.items() if (whose != NOBODY).any()}
            if somebody_s:
                alone = all(id(t) in known for t in data)
                found[where] = Influence(func, args, kwargs, in_place=in_place, owners=somebody_s, n=n), alone
        return found

    def note_influences(self, out: Any, influences: Mapping[Where, tuple[Influence, bool]]) -> None:
        """A function that no rule tells of gave ``out``."""
        results = results_of(out)
        shadows: list[Shadow] = [{} for _ in results]
        for where, (influence, alone) in influences.items() if results else ():
            for result, shadow, whose in zip(results, shadows, influence.owners(), strict=False):
                if whose is not None and whose.shape == result.shape:
                    shadow[where] = whose if alone else torch.where(whose == MIXED, MIXED, UNKNOWN).int()
        for result, shadow in zip(results, shadows, strict=True):
            if not result.requires_grad:
                self._put(result, shadow)

    def note(self, out: Any, behind: Any) -> None:
        """The function gave ``out``."""
        if not behind:
            return
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        for k, result in enumerate(outs):
            if isinstance(result, Tensor):
                self._put(result, _fitted(behind, k, result.shape))

    def expect(self, edge: GradientEdge, shape: torch.Size, behind: Any) -> None:
        """The output of a call that met parameters hangs at ``edge``."""
        shadow = _fitted(behind, 0, shape) if behind else {}
        if shadow:
            self._expected[edge] = shadow

    def verdict(self, edge: GradientEdge, b: Tensor, owners: Tensor, dim: int, n: int) -> bool | None:
        """Whether each entry's data are those of the example whose loss it serves: ``owners`` along ``dim``.

        None where that is not known of all entries with a gradient.
        """
        owners = owners.to(b.device).view([-1] + [1] * (b.ndim - dim - 1))
        answers = []
        for (size, _), shadow in self._expected.get(edge, {}).items():
            if size == n:
                live = b != 0
                off = ((shadow >= 0) & (shadow != owners) | (shadow == MIXED)) & live
                answers.append(False if off.any() else None if ((shadow < 0) & live).any() else True)
        return None if not answers else True if True in answers else None if None in answers else False

    def _is_mixed(self, shadow: Tensor | None) -> bool:
        if shadow is None:
            return False
        if id(shadow) not in self._mixed:
            self._mixed[id(shadow)] = shadow, bool((shadow == MIXED).any())
        return self._mixed[id(shadow)][1]

    def _found(self, func: Callable, tensor: Tensor) -> Shadow | None:
        """A tensor's shadow; where a gradient told of it until now, that of its shape."""
        known = self._of(tensor)
        return self._by_shape(tensor) if known is None and tensor.requires_grad and _drops_gradient(func) else known

    def _of(self, tensor: Tensor) -> Shadow | None:
        known = self._known.get(id(tensor))
        return known[2] if known is not None and known[0]() is tensor and known[1] == tensor._version else None

    def _put(self, tensor: Tensor, shadow: Shadow) -> None:
        if shadow:
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, shadow


class _Reader:
    """Reads shadows under one hypothesis of where the examples lie."""

    def __init__(self, where: Where, shadows: dict[int, Shadow], unknown: set[int]):
        self._where, self._shadows, self._unknown = where, shadows, unknown

    def knows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._shadows

    def __call__(self, value: Tensor) -> Tensor:
        shadow = self._shadows.get(id(value), {})
        found = shadow.get(self._where, shadow.get((self._where[0], 0)))
        if found is not None:
            return found
        owner = UNKNOWN if id(value) in self._unknown else NOBODY
        return torch.full((), owner, dtype=torch.int32, device=value.device).expand(value.shape)


Rule = Callable[[_Reader, tuple, dict], Any]


@cache
def _rule(func: Callable) -> Rule | None:
    """How a function carries shadows; None for one that loses them."""
    if func in _ATTRIBUTES:
        return _as_it_is if _ATTRIBUTES[func] == "data" else _moved(func)
    full_name = getattr(func, "__name__", "")
    name = full_name.strip("_")
    if full_name == "__setitem__":
        return _written
    if full_name in _MOVES or name in _MOVES:
        return _moved(func)
    if name in _JOINS:
        return lambda read, args, kwargs: func([read(t) for t in args[0]], *args[1:], **kwargs)
    if func is F.embedding_bag:
        return _bagged
    if func in (F.embedding, F.one_hot):
        return _looked_up
    if name.endswith("_like") or name in _NEW:
        return lambda read, args, kwargs: torch.tensor(NOBODY, dtype=torch.int32, device=args[0].device)
    if name == "where":
        return _chosen
    if name in _POINTWISE:
        return _pointwise
    if name in _REDUCTIONS:
        return _reduced(name)
    return _mapped if name in ("linear", "matmul", "mm") else None


def _as_it_is(read: _Reader, args: tuple, kwargs: dict) -> Tensor:
    return read(args[0])


def _moved(func: Callable) -> Rule:
    def rule(read: _Reader, args: tuple, kwargs: dict) -> Any:
        table, *rest = args
        ids = next((t for t in _tensors((*rest, kwargs)) if read.knows(t)), None)
        if not read.knows(table):  # a table that holds nobody's data, or unknown ones
            return None if ids is None else _beside(read(ids), torch.as_tensor(read(table).max()))
        moved = func(read(table).contiguous(), *rest, **kwargs)
        if ids is not None and isinstance(moved, Tensor) and moved.shape == ids.shape:  # as in gather
            chosen_by = read(ids)  # unknown if by a sort, which moves what it does not change
            return _joined(moved, chosen_by.masked_fill(chosen_by == UNKNOWN, NOBODY))
        return moved

    return rule


def _beside(ids: Tensor, table: Tensor) -> Tensor:
    """What is looked up belongs to whom its number belongs to; (*positions) -> (*positions, 1)."""
    return _joined(ids, table).unsqueeze(-1)


def _looked_up(read: _Reader, args: tuple, kwargs: dict) -> Tensor | None:
    ids = args[0] if args else kwargs["input"]
    if ids.requires_grad or not read.knows(ids):
        return None
    return read(ids).unsqueeze(-1)


def _bagged(read: _Reader, args: tuple, kwargs: dict) -> Tensor | None:
    """One bag a row: it must be of one example."""
    ids = args[0] if args else kwargs["input"]
    return _common(read(ids), 1) if ids.ndim == 2 and read.knows(ids) else None


def _written(read: _Reader, args: tuple, kwargs: dict) -> Tensor:
    target, key, value = args
    shadow = read(target).clone()
    if isinstance(value, Tensor):
        shadow[key] = read(value)
    return shadow


def _chosen(read: _Reader, args: tuple, kwargs: dict) -> Tensor:
    condition, *values = args
    if not read.knows(values[0]) and not isinstance(values[0], Tensor) and not isinstance(values[1], Tensor):
        return read(condition)
    device = condition.device
    one, other = (read(v) if isinstance(v, Tensor) else torch.tensor(NOBODY, device=device) for v in values)
    return _joined(read(condition), torch.where(condition, one.int(), other.int()))


def _pointwise(read: _Reader, args: tuple, kwargs: dict) -> Tensor:
    shadows = [read(t) for t in _tensors((args, kwargs)) if isinstance(t, Tensor)]
    return reduce(_joined, shadows)


def _reduced(name: str) -> Rule:
    def rule(read: _Reader, args: tuple, kwargs: dict) -> Any:
        x = args[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        if isinstance(dim, Tensor):
            return _pointwise(read, args, kwargs)
        if isinstance(dim, bool):  # std(unbiased)
            dim = None
        if _has_gradient(x) and name not in _WITHOUT_GRADIENT:  # which tells
            return None
        if name == "topk" or (name in ("sort", "argsort") and dim is None):
            dim = kwargs.get("dim", -1)
        together = _common(read(x), tuple(range(x.ndim)) if dim is None else dim)
        # In whatever order a sort leaves several examples, it says nothing of whose the entries are.
        return together.masked_fill(together == MIXED, UNKNOWN) if name in ("sort", "argsort", "topk") else together

    return rule


def _mapped(read: _Reader, args: tuple, kwargs: dict) -> Tensor | None:
    """A linear map of the last dimension."""
    x = args[0]
    if _has_gradient(x) or not read.knows(x) or len(args) < 2 or read.knows(args[1]):
        return None
    return _common(read(x), -1)


def _drops_gradient(func: Callable) -> bool:
    """Whether no gradient follows what the function gives."""
    return not torch.is_grad_enabled() or func in _DETACHING


def _has_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _common(shadow: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The owner that all entries along the dimensions share; these are kept, of size one."""
    if not shadow.numel():
        return shadow.sum(dim, keepdim=True, dtype=shadow.dtype)
    highest = shadow.amax(dim, keepdim=True)
    lowest = torch.where(shadow == NOBODY, highest, shadow).amin(dim, keepdim=True)
    mixed = (shadow == MIXED).any(dim=dim, keepdim=True) if isinstance(dim, int) else (shadow == MIXED).any()
    found = torch.where(lowest == UNKNOWN, UNKNOWN, torch.where(lowest == highest, highest, MIXED))
    return found.masked_fill(mixed, MIXED)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Owners of what is made of two entries each."""
    if one is other:
        return one
    found = torch.where(one == other, one, torch.where(one == NOBODY, other, torch.where(other == NOBODY, one, MIXED)))
    unknown = ((one == UNKNOWN) | (other == UNKNOWN)) & (one != MIXED) & (other != MIXED)
    return found.masked_fill(unknown, UNKNOWN)


def _fitted(behind: dict[Where, Any], k: int, shape: torch.Size) -> Shadow:
    """The shadows brought to the result's shape, by dimensions of size one that are dropped or filled; else none."""
    found: Shadow = {}
    for where, value in behind.items():
        shadow = value[k] if isinstance(value, (tuple, list)) and k < len(value) else value
        if isinstance(shadow, Tensor):
            fitted = _to_shape(shadow, shape)
            if fitted is not None:
                found[where] = fitted
    return found


def _to_shape(shadow: Tensor, shape: torch.Size) -> Tensor | None:
    if shadow.shape == shape:
        return shadow
    if shadow.ndim == len(shape) and all(a in (1, b) for a, b in zip(shadow.shape, shape, strict=True)):
        return shadow.expand(shape)
    if not shadow.ndim:
        return shadow.expand(shape)
    without = [size for size in shadow.shape if size != 1]
    return shadow.reshape(shape) if without == [size for size in shape if size != 1] else None


def _tensors(values: Any) -> list[Tensor]:
    """Tensors among values, lists and dictionaries included."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    return (
        [t for value in values for t in _tensors(value)] if isinstance(values, (list, tuple, type({}.values()))) else []
    )
