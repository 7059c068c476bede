# SPDX-License-Identifier: Apache-2.0
"""What every op owes: notes taken in the forward (``Use``) and, after the backward, its Jacobian block (``Op``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

CHUNK_FLOATS = 2**21  # temporaries are made in chunks of 8 MiB of float32: larger ones fall out of the cache


@dataclass(frozen=True)
class Method:
    """One exact way to get the squared norms of a block's rows, with its price.

    ``compute`` takes the op restricted to some examples, so that the caller may go through them in chunks.
    """

    name: str
    compute: Callable[[Any], Tensor]
    flops: float  # multiplications and additions, for all examples
    floats: float  # numbers held at once, for all examples
    rows: bool = False  # whether ``compute`` gives the rows themselves (n, *shape) instead of their squared norms (n,)


class Op(ABC):
    """Row block of the Jacobian for one tensor ``W``: row i is the gradient of example i's loss in ``W``.

    Shapes: n examples; ``W`` has the shape ``op.shape``. Everything is exact up to rounding in the dtype of ``b``;
    half precision is raised to float32 before any sum.
    """

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """Number of examples n, the number of rows."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the tensor ``W`` whose gradient the rows are."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type in which the block computes."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors it computes with."""
        held = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return next(value.device for value in held if isinstance(value, Tensor | Op))

    @abstractmethod
    def methods(self) -> list[Method]:
        """Every exact way to get the squared norms (n,); the plan takes the cheapest and can say why."""

    @property
    def sum_flops(self) -> float:
        """Price of ``weighted_sum``, in the units of the methods; by default that of making the rows."""
        return min((method.flops for method in self.methods() if method.rows), default=0.0)

    @property
    def kept_entry(self) -> float:
        """Price of one row entry that is kept: it is written once and read twice, for its norm and for the sum."""
        return 80

    def norms_from(self, rows: Tensor) -> Tensor | None:
        """Squared norms (n,) that go with its own rows, where norms are estimated; None where they are the lengths."""
        return None

    @abstractmethod
    def rows(self) -> Tensor:
        """The rows themselves, (n, *shape)."""

    @abstractmethod
    def project(self, v: Tensor) -> Tensor:
        """J v for k directions: (k, *shape) -> (n, k)."""

    @abstractmethod
    def weighted_sum(self, c: Tensor) -> Tensor:
        """Jᵀ c: (n,) -> (*shape,)."""

    @abstractmethod
    def select(self, index: Tensor | slice) -> Op:
        """The same block for some of the examples only."""

    def merge(self, other: Op) -> Op | None:
        """One op for two uses of one tensor, cross terms included; None where the two have no common form."""
        return None


@dataclass(frozen=True)
class Layout:
    """Where the examples sit in an op's output: dimension ``dim`` of size before·n·after, example number in the middle.

    (1, n, 1) is batch-first; (1, n, m) has m consecutive positions per example, as after ``flatten(0, 1)`` of a
    batch-first tensor; (m, n, 1) is the same of a time-first one.
    """

    dim: int
    before: int
    num_examples: int
    after: int

    def examples_first(self, tensor: Tensor) -> Tensor:
        """(d0, .., before·n·after, ..) -> (n, d0, .., before·after, ..)."""
        if self.dim == 0 and self.before == 1:
            return tensor.unflatten(0, (self.num_examples, self.after)) if self.after != 1 else tensor.unsqueeze(1)
        if self.before == self.after == 1:
            return tensor.movedim(self.dim, 0).unsqueeze(self.dim + 1)
        split = tensor.unflatten(self.dim, (self.before, self.num_examples, self.after))
        return split.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 2)

    def owners(self) -> Tensor:
        """(before·n·after,): the number of the example that each entry along the dimension belongs to."""
        return torch.arange(self.num_examples).view(1, -1, 1).expand(self.before, -1, self.after).flatten()


@dataclass(frozen=True)
class Ragged:
    """Where the examples sit if they lie in no regular order: packed sequences, tokens sorted by expert.

    ``owner`` (size of dimension ``dim``,) has the number of each entry's example, -1 where it belongs to none.
    """

    dim: int
    num_examples: int
    owner: Tensor

    def examples_first(self, tensor: Tensor) -> Tensor:
        """(d0, .., size, ..) -> (n, d0, .., most, ..): each example's entries in their order, filled up with zeros."""
        rows = tensor.movedim(self.dim, 0)
        padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return padded[self._slots().to(tensor.device)].movedim(1, self.dim + 1)

    def owners(self) -> Tensor:
        """(size,): the number of the example that each entry along the dimension belongs to, or -1."""
        return self.owner

    def _slots(self) -> Tensor:
        """(n, most): where the k-th entry of example i lies; one past the end where it has no k-th."""
        counts = torch.bincount(self.owner + 1, minlength=self.num_examples + 1)
        order = self.owner.argsort(stable=True)[int(counts[0]) :]
        most = max(1, int(counts[1:].max())) if self.num_examples else 1
        slots = torch.full((self.num_examples, most), len(self.owner))
        rank = torch.arange(len(order)) - (counts[1:].cumsum(0) - counts[1:])[self.owner[order]]
        slots[self.owner[order], rank] = order
        return slots


AnyLayout = Layout | Ragged


@dataclass(frozen=True)
class Use(ABC):
    """What the tape notes where an op meets a parameter ``weight``; makes the ``Op`` once the backward has given b."""

    weight: Tensor

    @abstractmethod
    def example_dims(self, b_ndim: int) -> Sequence[int]:
        """The dimensions of the op's output among which the examples are looked for."""

    @abstractmethod
    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        """The Jacobian block, from the gradient ``b`` of the losses in the op's output."""

    def saved(self) -> tuple[Tensor, ...]:
        """Tensors that must not be changed in place before the backward."""
        return ()


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor is in half precision."""
    return tensor.dtype in (torch.float16, torch.bfloat16)


def in_sum_dtype(tensor: Tensor) -> Tensor:
    """Half precision raised to float32, in which norms and sums are taken; anything else as it is."""
    return tensor.float() if is_half(tensor) else tensor


def in_one_dtype(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their types for sums."""
    if x.dtype == b.dtype and not is_half(x):
        return x, b
    x, b = in_sum_dtype(x), in_sum_dtype(b)
    dtype = torch.promote_types(x.dtype, b.dtype)
    return x.to(dtype), b.to(dtype)
