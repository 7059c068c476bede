# SPDX-License-Identifier: Apache-2.0
"""Parameters met by broadcasting: ``x + p``, ``x - p``, ``x * p`` and their spellings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._check import Refused
from ._base import Layout, Op, Use, in_sum_dtype
from .dense import Rows

MOST_ENTRIES = 2**26  # 256 MiB of float32, for the rows of a weight with entries for every example


@dataclass(frozen=True)
class TermUse(Use):
    """One call of ``y = x + scale·p``: row i is ``scale·b_i``, summed over the dimensions in which p was broadcast."""

    scale: float = 1.0

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim))

    def op(self, b: Tensor, layout: Layout) -> Op:
        rows = sum_to_weight(in_sum_dtype(b), self.weight, layout)
        return Rows(rows if self.scale == 1 else rows * self.scale)


@dataclass(frozen=True)
class FactorUse(Use):
    """One call of ``y = x·p``: row i is ``b_i·x_i``, summed over the dimensions in which p was broadcast."""

    x: Tensor

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: Layout) -> Op:
        return Rows(sum_to_weight(in_sum_dtype(b) * in_sum_dtype(self.x), self.weight, layout))


def sum_to_weight(terms: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    """(like y) -> (n, *weight.shape): the rows of a weight that was broadcast to y."""
    broadcast = (1,) * (terms.ndim - weight.ndim) + tuple(weight.shape)
    if broadcast[layout.dim] > 1 and layout.num_examples > 1:
        return _rows_of_entries_per_example(terms, weight, layout)
    first = layout.examples_first(terms)
    summed = [dim + 1 for dim, size in enumerate(broadcast) if size == 1 and first.shape[dim + 1] != 1]
    return (first.sum(summed) if summed else first).reshape(first.shape[0], *weight.shape)


def _rows_of_entries_per_example(terms: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    """Rows of a weight that has entries of its own for every example, such as an expanded parameter: n² of them."""
    n = layout.num_examples
    if n * weight.numel() > MOST_ENTRIES:
        raise Refused(
            f"ops.elementwise: a function of parameters of shape {tuple(weight.shape)} has entries of its own for each "
            f"of the {n} examples, too many to tell apart. Let broadcasting repeat the parameter, not expand or repeat."
        )
    owner = torch.arange(n, device=terms.device).view(1, n, 1).expand(layout.before, n, layout.after).flatten()
    owner = owner.view(-1, *(1,) * (terms.ndim - 1 - layout.dim))
    return torch.stack([torch.where(owner == i, terms, 0).sum_to_size(weight.shape) for i in range(n)])


def add(y: Tensor, input: Tensor, other: Tensor, *, alpha: float = 1) -> Iterator[Use]:
    """``y = input + alpha·other``."""
    yield TermUse(input)
    yield TermUse(other, float(alpha))


def subtract(y: Tensor, input: Tensor, other: Tensor, *, alpha: float = 1) -> Iterator[Use]:
    """``y = input - alpha·other``."""
    yield TermUse(input)
    yield TermUse(other, -float(alpha))


def reversed_subtract(y: Tensor, input: Tensor, other: Tensor, *, alpha: float = 1) -> Iterator[Use]:
    """``y = other - alpha·input``."""
    yield from subtract(y, other, input, alpha=alpha)


def multiply(y: Tensor, input: Tensor, other: Tensor) -> Iterator[Use]:
    """``y = input·other``; a factor that is a plain number is broadcast like a tensor."""
    yield FactorUse(input, torch.as_tensor(other, device=y.device))
    yield FactorUse(other, torch.as_tensor(input, device=y.device))


RECORDERS = {
    **dict.fromkeys(
        (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__),
        add,
    ),
    **dict.fromkeys(
        (torch.sub, torch.subtract, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__),
        subtract,
    ),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), reversed_subtract),
    **dict.fromkeys(
        (torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__),
        multiply,
    ),
}

# Functions that write over the very input they must remember; the tape hands their recorder a copy made before.
OVERWRITING = {Tensor.mul_}
