# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of every op: its record in the forward (``Use``) and its Jacobian block (``Op``)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

CHUNK_FLOATS = 2**21  # temporaries are split into chunks of 8 MiB of float32, which fit in the cache
KEPT = 2**18  # offsets of one kind at most that stay for later batches: 2 MiB


@dataclass(frozen=True)
class Method:
    """One exact method to compute the squared norms of a block's rows, with its cost.

    ``compute`` takes the op restricted to some examples, so that the caller may process them in chunks.
    """

    name: str
    compute: Callable[[Any], Tensor]
    flops: float  # multiplications and additions, for all examples
    floats: float  # numbers held at once, for all examples
    rows: bool = False  # whether ``compute`` returns the rows (n, *shape) instead of their squared norms (n,)


class Op(ABC):
    """Row block of the Jacobian for one tensor ``W``: row i is the gradient of example i's loss in ``W``.

    Shapes: n examples; ``W`` has the shape ``op.shape``. Everything is exact up to rounding in the dtype of ``b``;
    half precision is converted to float32 before any sum over examples.
    """

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """Number of examples n, the number of rows."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the tensor ``W``, and of each row."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype in which the block computes."""

    @property
    def device(self) -> torch.device:
        """Device of the op's tensors."""
        return next(value.device for value in vars(self).values() if isinstance(value, (Tensor, Op)))

    @abstractmethod
    def methods(self) -> list[Method]:
        """Returns every exact method for the squared norms (n,); the plan picks the cheapest and can explain why."""

    @property
    def sum_flops(self) -> float:
        """Cost of ``weighted_sum``, in the units of the methods; by default the cost of the rows."""
        return min((method.flops for method in self.methods() if method.rows), default=0.0)

    @property
    def kept_entry(self) -> float:
        """Cost of one kept row entry: it is written once and read twice, for its norm and for the sum."""
        return 80

    @abstractmethod
    def rows(self) -> Tensor:
        """Returns the rows themselves, (n, *shape)."""

    @abstractmethod
    def project(self, v: Tensor) -> Tensor:
        """Returns J v for k directions: (k, *shape) -> (n, k)."""

    @property
    def projected_floats(self) -> int:
        """Numbers that `project` needs for one direction."""
        return self.num_examples * self.shape[-1]

    def project_outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns J v (n,) for the direction v = left ⊗ right, of (shape[0],) and shape[1:]."""
        return self.project(outer(left, right, self.shape).unsqueeze(0))[:, 0]

    @abstractmethod
    def weighted_sum(self, c: Tensor) -> Tensor:
        """Returns Jᵀ c: (n,) -> (*shape,)."""

    @abstractmethod
    def select(self, index: Tensor | slice) -> Op:
        """Returns the block of some of the examples."""

    def merge(self, other: Op) -> Op | None:
        """Returns one op for two uses of one tensor, with cross terms; None if the two have no common form."""
        return None


@dataclass(frozen=True)
class Layout:
    """Position of the examples in an op's output: ``dim`` has size before·n·after, with the examples in the middle.

    (1, n, 1) is batch-first; (1, n, m) has m consecutive positions per example, like ``flatten(0, 1)`` of a batch-first
    tensor; (m, n, 1) is like ``flatten(0, 1)`` of a time-first tensor.
    """

    dim: int
    before: int
    num_examples: int
    after: int

    def examples_first(self, tensor: Tensor) -> Tensor:
        """Rearranges (d0, .., before·n·after, ..) to (n, d0, .., before·after, ..)."""
        if self.dim == 0 and self.before == 1:
            return tensor.unflatten(0, (self.num_examples, self.after)) if self.after != 1 else tensor.unsqueeze(1)
        if self.before == self.after == 1:
            return tensor.movedim(self.dim, 0).unsqueeze(self.dim + 1)
        split = tensor.unflatten(self.dim, (self.before, self.num_examples, self.after))
        return split.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 2)

    def owners(self) -> Tensor:
        """Returns (before·n·after,): the index of the example that each entry along the dimension belongs to."""
        return (
            torch.arange(self.num_examples, device="cpu").view(1, -1, 1).expand(self.before, -1, self.after).flatten()
        )


@dataclass(frozen=True)
class Ragged:
    """Position of examples without a regular order: packed sequences, tokens sorted by expert.

    ``owner`` (size of dimension ``dim``,) has the index of each entry's example, -1 if it belongs to none.
    """

    dim: int
    num_examples: int
    owner: Tensor

    def examples_first(self, tensor: Tensor) -> Tensor:
        """Rearranges (d0, .., size, ..) to (n, d0, .., longest, ..): each example's entries in order, zero-padded."""
        rows = tensor.movedim(self.dim, 0)
        padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return padded[self._slots().to(tensor.device, non_blocking=True)].movedim(1, self.dim + 1)

    def owners(self) -> Tensor:
        """Returns (size,): the index of the example that each entry along the dimension belongs to, or -1."""
        return self.owner

    def _slots(self) -> Tensor:
        """Returns (n, longest): the index of example i's k-th entry; one past the end if it has none."""
        counts = torch.bincount(self.owner + 1, minlength=self.num_examples + 1)
        order = self.owner.argsort(stable=True)[int(counts[0]) :]
        longest = max(1, int(counts[1:].max())) if self.num_examples else 1
        slots = torch.full((self.num_examples, longest), len(self.owner), device="cpu")
        rank = torch.arange(len(order), device="cpu") - (counts[1:].cumsum(0) - counts[1:])[self.owner[order]]
        slots[self.owner[order], rank] = order
        return slots


AnyLayout = Layout | Ragged


@dataclass(frozen=True)
class Use(ABC):
    """The tape's record of one use of a parameter ``weight``; makes the ``Op`` once the backward has computed b."""

    weight: Tensor

    @abstractmethod
    def example_dims(self, b_ndim: int) -> Sequence[int]:
        """Returns the dimensions of the op's output that may hold the examples."""

    @abstractmethod
    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        """Returns the Jacobian block, given the gradient ``b`` of the losses in the op's output."""

    def saved(self) -> tuple[Tensor, ...]:
        """Returns the tensors that must not be changed in place before the backward."""
        return ()

    @property
    def padding(self) -> int | None:
        """Returns the row of ``weight`` that never gets a gradient by this use; None if every row may."""
        return None

    @property
    def kind(self) -> str:
        """Name of the rule."""
        return type(self).__name__


def outer(left: Tensor, right: Tensor, shape: torch.Size) -> Tensor:
    """Returns left ⊗ right, of shape[:1] and shape[1:]."""
    return (left.view(-1, *(1,) * right.ndim) * right).view(shape)


def add_at(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Adds rows (m, ..) in place to those of ``total`` with these indices (m,): on a GPU always in the same order."""
    if total.device.type == "cpu":
        return total.index_add_(0, index, rows)
    return total.index_put_((index,), rows, accumulate=True)  # CUDA sorts; its index_add_ adds atomically, in any order


def offsets(sizes_and_steps: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Returns the places of all entries, in order, of a tensor with these sizes and steps; few are kept for others."""
    are_few = math.prod([size for size, _ in sizes_and_steps]) <= KEPT
    return (_offsets if are_few else _offsets.__wrapped__)(sizes_and_steps, device)


@lru_cache(maxsize=64)
def _offsets(sizes_and_steps: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    places = torch.zeros((), dtype=torch.int64, device=device)
    for size, step in sizes_and_steps:
        places = places.unsqueeze(-1) + torch.arange(size, device=device) * step
    return places.flatten()


def multiples(count: int, step: int, device: torch.device) -> Tensor:
    """Returns 0, step, ... (count,); batches vary in size, so that more are kept than are asked for."""
    return offsets(((1 << max(0, count - 1).bit_length(), step),), device)[:count]


def chunk_size(num_examples: int, floats: float) -> int:
    """Returns how many examples to take at a time, given that temporaries for all would have ``floats`` numbers."""
    return max(1, num_examples // max(1, math.ceil(floats / CHUNK_FLOATS)))


HALF = frozenset({torch.float16, torch.bfloat16})


def is_half(tensor: Tensor) -> bool:
    """Returns True if a tensor is in half precision."""
    return tensor.dtype in HALF


def in_sum_dtype(tensor: Tensor) -> Tensor:
    """Converts half precision to float32, for norms and sums; returns other tensors unchanged."""
    return tensor.float() if tensor.dtype in HALF else tensor


def in_one_dtype(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Converts both tensors to the wider of their dtypes for sums."""
    if x.dtype == b.dtype and x.dtype not in HALF:
        return x, b
    x, b = in_sum_dtype(x), in_sum_dtype(b)
    dtype = torch.promote_types(x.dtype, b.dtype)
    return x.to(dtype), b.to(dtype)
