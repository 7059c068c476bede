# SPDX-License-Identifier: Apache-2.0
"""Elementwise uses of parameters: sums, differences, products, quotients, selections and concatenations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.validate import Refused
from ._base import AnyLayout, Layout, Op, Use, in_sum_dtype
from .dense import Rows, sum_of_positions

MAX_ENTRIES = 2**26  # 256 MiB of float32, for the rows of a weight with separate entries for every example


@dataclass(frozen=True)
class EntrywiseUse(Use):
    """Records a parameter that was broadcast to y; row i sums its terms over the broadcast dimensions."""

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim))

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        return Rows(sum_to_weight(self.terms(in_sum_dtype(b)), self.weight, layout))

    def terms(self, b: Tensor) -> Tensor:
        """Returns ``b`` times the derivative of y in the parameter, entry by entry."""
        return b


@dataclass(frozen=True)
class TermUse(EntrywiseUse):
    """Records one call of ``y = x + scale·p``."""

    scale: float = 1.0

    def terms(self, b: Tensor) -> Tensor:
        return b if self.scale == 1 else b * self.scale


@dataclass(frozen=True)
class FactorUse(EntrywiseUse):
    """Records one call of ``y = x·p``."""

    x: Tensor

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def terms(self, b: Tensor) -> Tensor:
        return b * in_sum_dtype(self.x)


@dataclass(frozen=True)
class DivisorUse(EntrywiseUse):
    """Records one call of ``y = x / p``: the derivative is ``-x / p²``."""

    x: Tensor

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def terms(self, b: Tensor) -> Tensor:
        p = in_sum_dtype(self.weight.detach())
        return -b * in_sum_dtype(self.x) / (p * p)


@dataclass(frozen=True)
class ChosenUse(EntrywiseUse):
    """Records one call of ``y = p where chosen, else another value``."""

    chosen: Tensor

    def saved(self) -> tuple[Tensor, ...]:
        return (self.chosen,)

    def terms(self, b: Tensor) -> Tensor:
        return b * self.chosen


@dataclass(frozen=True)
class PieceUse(EntrywiseUse):
    """Records one piece of ``cat`` or ``stack``: p is the part of y that begins at ``start`` in dimension ``dim``."""

    dim: int
    start: int
    size: int
    stacked: bool

    def example_dims(self, b_ndim: int) -> list[int]:
        return [dim for dim in range(b_ndim) if dim != self.dim]

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        part = in_sum_dtype(b).narrow(self.dim, self.start, self.size)
        weight = self.weight.detach()
        if self.stacked:
            weight = weight[(None,) * (b.ndim - 1 - weight.ndim)].unsqueeze(self.dim)
        rows = sum_to_weight(part, weight, layout)
        return Rows(rows.reshape(len(rows), *self.weight.shape))


@dataclass(frozen=True)
class WrittenUse(EntrywiseUse):
    """Records one call of ``y[key] = p`` with a key that takes all of the first dimension, where the examples are."""

    key: tuple[int | slice, ...]

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        return Rows(sum_to_weight(in_sum_dtype(b)[self.key], self.weight, layout))


@dataclass(frozen=True)
class SlopeUse(EntrywiseUse):
    """Records a call of ``prelu``: ``y = x where x > 0, else p·x``, with one p per channel (dimension 1) or for all."""

    x: Tensor

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        terms = in_sum_dtype(b) * in_sum_dtype(self.x.clamp(max=0))
        per_channel = self.weight.numel() > 1
        channels = self.weight.detach().view(-1, *(1,) * (b.ndim - 2)) if per_channel else self.weight
        return Rows(sum_to_weight(terms, channels, layout).reshape(-1, *self.weight.shape))


def sum_to_weight(terms: Tensor, weight: Tensor, layout: AnyLayout) -> Tensor:
    """Returns the rows (n, *weight.shape) of a weight that was broadcast to y, from terms in the shape of y."""
    regular = type(layout) is Layout and layout.dim == 0 and layout.num_examples == len(terms)
    if regular and terms.shape[1:] == weight.shape:
        return terms  # nothing to sum
    broadcast = (1,) * (terms.ndim - weight.ndim) + tuple(weight.shape)
    if broadcast[layout.dim] > 1 and layout.num_examples > 1:
        return _rows_of_entries_per_example(terms, weight, layout)
    first = layout.examples_first(terms)
    summed = [dim + 1 for dim, size in enumerate(broadcast) if size == 1 and first.shape[dim + 1] != 1]
    if summed == [1] and first.stride(0) < first.stride(1):
        first = sum_of_positions(first.flatten(2))
    elif summed:
        first = first.sum(summed)
    return first.reshape(first.shape[0], *weight.shape)


def _rows_of_entries_per_example(terms: Tensor, weight: Tensor, layout: AnyLayout) -> Tensor:
    """Returns the rows of a weight with separate entries for every example, such as a repeated parameter."""
    n = layout.num_examples
    check_entries_per_example("ops.elementwise", weight, n)
    owner = layout.owners().to(terms.device).view(-1, *(1,) * (terms.ndim - 1 - layout.dim))
    return torch.stack([torch.where(owner == i, terms, 0).sum_to_size(weight.shape) for i in range(n)])


def check_entries_per_example(where: str, weight: Tensor, n: int) -> None:
    """Raises if a weight with separate entries for each of n examples has too many rows' entries: about n² of them."""
    if n * weight.numel() > MAX_ENTRIES:
        raise Refused(
            f"{where}: a function of parameters of shape {tuple(weight.shape)} has separate entries for each of the "
            f"{n} examples, and their rows are too large. Let broadcasting repeat the parameter, not expand or repeat."
        )


def add(y: Tensor, input: Tensor, other: Tensor, *, alpha: float = 1) -> Iterator[Use]:
    """Records ``y = input + alpha·other``."""
    yield TermUse(input)
    yield TermUse(other, float(alpha))


def subtract(y: Tensor, input: Tensor, other: Tensor, *, alpha: float = 1) -> Iterator[Use]:
    """Records ``y = input - alpha·other``."""
    yield TermUse(input)
    yield TermUse(other, -float(alpha))


def reversed_subtract(y: Tensor, input: Tensor, other: Tensor, *, alpha: float = 1) -> Iterator[Use]:
    """Records ``y = other - alpha·input``."""
    yield from subtract(y, other, input, alpha=alpha)


def multiply(y: Tensor, input: Tensor, other: Tensor) -> Iterator[Use]:
    """Records ``y = input·other``; a Python number is broadcast like a tensor."""
    yield FactorUse(input, torch.as_tensor(other, device=y.device))
    yield FactorUse(other, torch.as_tensor(input, device=y.device))


def divide(y: Tensor, input: Tensor, other: Tensor, *, rounding_mode: None = None) -> Iterator[Use]:
    """Records ``y = input / other``."""
    if rounding_mode is None:
        other = torch.as_tensor(other, device=y.device)
        yield FactorUse(input, 1 / other.detach())
        yield DivisorUse(other, torch.as_tensor(input, device=y.device))


def reversed_divide(y: Tensor, input: Tensor, other: Tensor) -> Iterator[Use]:
    """Records ``y = other / input``."""
    yield from divide(y, other, input)


def _tensor(value: Any, y: Tensor) -> Tensor:
    """Returns a tensor as it is, and a number as a tensor beside y."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device=y.device)


def where(y: Tensor, condition: Tensor, input: Tensor, other: Tensor) -> Iterator[Use]:
    """Records ``y = input where condition, else other``."""
    yield ChosenUse(_tensor(input, y), condition)
    yield ChosenUse(_tensor(other, y), ~condition)


def masked_fill(y: Tensor, input: Tensor, mask: Tensor, value: Tensor) -> Iterator[Use]:
    """Records ``y = value where mask, else input``."""
    yield ChosenUse(input, ~mask)
    yield ChosenUse(_tensor(value, y), mask)


def write(y: Tensor, input: Tensor, key: Any, value: Tensor) -> Iterator[Use]:
    """Records ``y = input``, but ``value`` at ``key``, for keys of slices and numbers that leave the examples first."""
    keys = key if isinstance(key, tuple) else (key,)
    is_simple = all(type(one) in (int, slice) for one in keys) and keys[:1] == (slice(None),)
    if is_simple and isinstance(value, Tensor) and value.ndim <= y.ndim - sum(type(one) is int for one in keys):
        yield WrittenUse(value, keys)


def cat(y: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Iterator[Use]:
    """Records the concatenation ``y`` of the tensors."""
    start = 0
    for tensor in tensors:
        if tensor.ndim == y.ndim:  # torch also accepts empty vectors
            yield PieceUse(tensor, dim % y.ndim, start, tensor.shape[dim], stacked=False)
            start += tensor.shape[dim]


def stack(y: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Iterator[Use]:
    """Records the concatenation ``y`` of the tensors in a new dimension."""
    for start, tensor in enumerate(tensors):
        yield PieceUse(tensor, dim % y.ndim, start, 1, stacked=True)


def prelu(y: Tensor, input: Tensor, weight: Tensor) -> Iterator[Use]:
    """Records ``y = x where x > 0, else weight·x``."""
    yield SlopeUse(weight, input)


RECORDERS = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__), add),
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__), subtract),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), reversed_subtract),
    **dict.fromkeys(
        (torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__), multiply
    ),
    Tensor.__imul__: multiply,
    **dict.fromkeys(
        (torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.div_, Tensor.divide, Tensor.true_divide), divide
    ),
    **dict.fromkeys((Tensor.__truediv__, Tensor.__itruediv__), divide),
    Tensor.__rtruediv__: reversed_divide,
    torch.where: where,
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), masked_fill),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), cat),
    torch.stack: stack,
    Tensor.__setitem__: write,
    **dict.fromkeys((F.prelu, torch.prelu), prelu),
}

# Functions that overwrite the input that their recorder needs; the tape passes a copy made before the call.
OVERWRITING = {Tensor.mul_, Tensor.__imul__, Tensor.div_, Tensor.__itruediv__, Tensor.__setitem__}
