# SPDX-License-Identifier: Apache-2.0
"""Estimates norms by sketches of the factors: rows are matrices, multiplied by k directions and never formed.

For a linear map row i is ``Gᵢ = bᵢᵀ xᵢ`` (e, d), and its squared norm is estimated by ``‖Gᵢ Sᵀ‖² / k``, which is
``Σⱼ ‖bᵢᵀ (xᵢ sⱼ)‖² / k`` for k directions S (k, d) of standard normal entries: 2 n t k (d + e) operations and
n k (t + e) numbers, without terms in t² or d·e. Directions multiply the longer side.

**Distribution.** With the squared singular values of the matrices of all parameters, divided by ‖gᵢ‖², as weights w
(their sum is 1), the estimate is ‖gᵢ‖² times ``s = Σⱼ wⱼ χ²_k / k``, independent for each j: the directions of
different parameters are drawn separately, and the uses of one parameter are added before the norm is taken. If the
norms of some parameters are exact, s also has a constant part w₀. This is the limit in distribution of M equal weights
w₀ / M as M grows, and ``P(s <= t) <= P(χ²_k <= k t)`` for t < 1, which accounting.md 7 proves for finitely many
weights, passes to the limit: P(s <= t) <= P(s < t') <= liminf P(s_M < t') <= P(χ²_k <= k t') for every t' in (t, 1),
and the right side is continuous. For t >= 1 the envelope that ``SubsampledSketch`` prices is 1. So the envelope covers
any mixture of sketched and exact parameters.

**Dependence.** All this assumes that an example's estimate is a function of its row and of the directions. If a
parameter were sketched in one batch and exact in another, depending on the other examples, then one example would
change the factors of all others. So the parameter alone determines whether it is sketched and from which side; the
batch size and the memory budget do not matter; and a parameter that appears in another form is refused.

Source: factored trace estimates in place of norms, following Ullah et al. (2026, DP-SGD-RC); no code was published.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..jacobian.blocks import Block
from ..jacobian.codes import fresh_generator
from ..jacobian.norms import projections
from ..jacobian.plan import held_bytes
from ..ops import Method, Op
from ..ops.conv import Conv
from ..ops.dense import Rows, squared_lengths, sum_rows
from ..ops.embedding import Embedding, TiedEmbedding
from ..ops.linear import Arrangement, GroupedLinear, Linear
from ..support.validate import Refused
from .estimates import Estimates


class Matrix(NamedTuple):
    """The form of the matrix that represents each row of a block."""

    rows: int
    columns: int
    arrangement: Arrangement | None = None  # if the matrix holds the weight's entries in another order

    @property
    def left(self) -> bool:
        """True if directions multiply from the left: S G (k, columns); else S Gᵀ (k, rows)."""
        return self.rows > self.columns

    def pays(self, k: int) -> bool:
        """Returns True if a sketch by k directions takes fewer operations than the rows themselves."""
        return self.rows * self.columns > k * (self.rows + self.columns)


@singledispatch
def matrix(op: Op) -> Matrix | None:
    """Returns the form of the matrix that ``sketch`` multiplies; None if there is no rule, and norms are exact."""
    return None


@matrix.register(Rows | Linear | Conv | TiedEmbedding)
def _(op: Op) -> Matrix | None:
    return Matrix(op.shape[0], math.prod(op.shape[1:])) if len(op.shape) > 1 else None


@matrix.register
def _(op: Embedding) -> Matrix:
    e = op.b.shape[2]
    return Matrix(op.shape.numel() // e, e)


@matrix.register
def _(op: GroupedLinear) -> Matrix:
    g, e, d = op.x.shape[1], op.b.shape[3], op.x.shape[3]
    return Matrix(g * e, d, op.arrangement)


@singledispatch
def sketch(op: Op, s: Tensor, left: bool) -> Tensor:
    """Returns ``S Gᵢ`` if left, else ``S Gᵢᵀ``: (n, k, the other side), for directions s (k, one side)."""
    raise NotImplementedError(f"no sketch of {type(op).__name__}")


@sketch.register
def _(op: Rows, s: Tensor, left: bool) -> Tensor:
    rows = op.values.reshape(op.num_examples, op.shape[0], math.prod(op.shape[1:]))
    return s @ (rows if left else rows.mT)


@sketch.register
def _(op: Linear, s: Tensor, left: bool) -> Tensor:
    near, far = (op.b, op.x) if left else (op.x, op.b)
    return (near @ s.mT).mT @ far


@sketch.register
def _(op: GroupedLinear, s: Tensor, left: bool) -> Tensor:
    g, e = op.x.shape[1], op.b.shape[3]
    if left:
        return ((op.b @ s.view(-1, g, e).permute(1, 2, 0)).mT @ op.x).sum(1)
    return ((op.x @ s.mT).mT @ op.b).transpose(1, 2).flatten(2)


@sketch.register
def _(op: Embedding, s: Tensor, left: bool) -> Tensor:
    if left:
        return F.embedding(op.ids, s.mT.contiguous()).mT @ op.b
    return replace(op, b=op.b @ s.mT, table=torch.Size((op.shape.numel() // op.b.shape[2], len(s)))).rows().mT


@sketch.register
def _(op: TiedEmbedding, s: Tensor, left: bool) -> Tensor:
    return sketch(op.looked_up, s, left) + sketch(op.product, s, left)


@sketch.register
def _(op: Conv, s: Tensor, left: bool) -> Tensor:
    """Sketches a kernel: from the left, b gets k channels; from the right, x is convolved to k channels per group."""
    k, groups = len(s), op.geometry.groups
    if left:
        b, x = (t.unflatten(2, (groups, -1)) for t in (op.b, op.x))
        b = torch.einsum("kge,nmge...->nmgk...", s.view(k, groups, -1), b).flatten(1, 2)  # each group becomes an image
        return Conv(x.flatten(1, 2), b, replace(op.geometry, groups=1)).rows().flatten(2)
    y = op.forward(s.view(k, *op.shape[1:]).repeat(groups, *(1,) * (len(op.shape) - 1)))
    y, b = (t.transpose(1, 2).unflatten(1, (groups, -1)).flatten(3) for t in (y, op.b))  # (n, groups, channels, t)
    return (y @ b.mT).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Factored(Op):
    """All uses of one weight: squared norms are estimated by a sketch of the summed rows, everything else is exact.

    Shapes: ``directions`` (k, longer side of the matrix).
    """

    uses: tuple[Op, ...]
    directions: Tensor
    matrix: Matrix

    @property
    def num_examples(self) -> int:
        return self.uses[0].num_examples

    @property
    def shape(self) -> torch.Size:
        return self.uses[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.directions.dtype

    def methods(self) -> list[Method]:
        """Returns the sketch of the factors, and that of the rows for the case that the clipped sum needs rows."""
        (k, longer), entries = self.directions.shape, self.num_examples * self.shape.numel()
        numbers = sum(held_bytes(use) / use.dtype.itemsize + _unfolded(use) for use in self.uses)
        floats = k * (numbers / sum(self.matrix[:2]) + entries / longer)
        found = [Method("sketch", Factored.estimates, flops=2 * k * numbers, floats=floats)]
        if len(self.uses) == 1:
            makers = [method for method in self.uses[0].methods() if method.rows]
            found += [_of_the_use(method, more=2 * k * entries) for method in makers]
        return found

    def estimates(self) -> Tensor:
        """Returns estimated squared norms (n,)."""
        return squared_lengths(self.summed_sketch().flatten(1)) / len(self.directions)

    def norms_from(self, rows: Tensor) -> Tensor:
        """Returns the same estimates from rows that were computed already."""
        if self.matrix.arrangement is not None:
            g, d = self.matrix.rows, self.matrix.columns
            rows = self.matrix.arrangement.matrices(rows, 1, g, d).squeeze(1)
        (k, left), rows = (len(self.directions), self.matrix.left), rows.reshape(len(rows), *self.matrix[:2])
        return squared_lengths(sketch(Rows(rows), self.directions, left).flatten(1)) / k

    @property
    def sum_flops(self) -> float:
        return sum(use.sum_flops for use in self.uses)

    @property
    def kept_entry(self) -> float:
        return self.uses[0].kept_entry

    def rows(self) -> Tensor:
        return sum_rows(list(self.uses)).values

    def project(self, v: Tensor) -> Tensor:
        first, *others = (projections(use, v.to(use.dtype)) for use in self.uses)
        return sum(others, first)

    def weighted_sum(self, c: Tensor) -> Tensor:
        first, *others = (use.weighted_sum(c.to(use.dtype)) for use in self.uses)
        return sum(others, first)

    def select(self, index: Tensor | slice) -> Factored:
        return replace(self, uses=tuple(use.select(index) for use in self.uses))

    def summed_sketch(self) -> Tensor:
        """Returns the sketch of the summed rows, (n, k, shorter side): the sum of the uses' sketches."""
        first, *others = (sketch(use, self.directions.to(use.dtype), self.matrix.left) for use in self.uses)
        return sum(others, first)

    def is_true(self, t: Tensor) -> bool:
        """Returns True if the inner product of the sketch with t (k, shorter side) agrees with ``project``."""
        direction = self.directions.mT @ t if self.matrix.left else t.mT @ self.directions
        if self.matrix.arrangement is not None:
            direction = self.matrix.arrangement.weights(direction[None, None])
        expected = self.project(direction.reshape(1, *self.shape)).squeeze(1)
        found = self.summed_sketch()
        scale = squared_lengths(found.flatten(1)).sqrt() * t.norm()
        off = ((found * t).sum((1, 2)) - expected).abs()
        return bool((~(off > torch.finfo(self.dtype).eps ** 0.5 * scale)).all())


def _of_the_use(method: Method, more: float) -> Method:
    compute: Callable[[Factored], Tensor] = lambda op: method.compute(op.uses[0])  # noqa: E731
    return replace(method, compute=compute, flops=method.flops + more)


def _unfolded(op: Op) -> int:
    """Returns the numbers that a convolution reads in addition to the entries of its input."""
    return op.num_unfolded - op.x.numel() if isinstance(op, Conv) else 0


class FactoredNorms(Estimates):
    """Sketches every weight used only by linear maps, convolutions or tied look-ups; other norms are exact.

    Exact norms are as cheap for pure look-ups, small parameters and vectors; weights behind a chain of ops, and
    parameters that several blocks share, get explicit rows.
    """

    def prepare(self, block: Block, *, alone: bool) -> None:
        seen = _as_matrix(block.ops) if alone and block.rearranged and not block.rounds else None
        if seen is None or not seen.pays(self.setting.num_projections):
            self.forms.require(block.names, "exact")
            return
        self.forms.require(block.names, f"sketched as a matrix {seen.rows} x {seen.columns}{_text(seen.arrangement)}")
        size, number = max(seen.rows, seen.columns), list(self.parameters).index(block.names[0])
        shape = self.setting.num_projections, size
        factored = Factored(tuple(block.ops), self.directions.matrix(number, shape, like=_like(block.ops)), seen)
        self._check(factored, block.names)
        block.ops, block.estimated = [factored], True

    def _check(self, factored: Factored, names: Sequence[str]) -> None:
        """Raises unless the sketch agrees with projections, on two examples of each of the first batches."""
        if not self.forms.needs_check(names):
            return
        some = torch.randperm(factored.num_examples, generator=fresh_generator(), device="cpu")[:2]
        shorter = min(factored.matrix[:2])
        t = torch.randn(len(factored.directions), shorter, generator=fresh_generator(), device="cpu")
        t = t.to(factored.directions)
        if not factored.select(some.to(t.device)).is_true(t):
            raise Refused(
                f"Sketched: the sketch of parameter {', '.join(map(repr, names))} is not that of its rows. This is a "
                "bug in torch_privacy: freeze that part or use exact norms, without jacobian=, and please report it."
            )


def _as_matrix(ops: Sequence[Op]) -> Matrix | None:
    """Returns the matrix that all uses of a weight agree on; None if one has none, or exact norms are as cheap."""
    seen = {matrix(op) for op in ops}
    if len(seen) > 1 or all(isinstance(op, Rows | Embedding) for op in ops):
        return None
    return seen.pop()


def _text(arrangement: Arrangement | None) -> str:
    return "" if arrangement is None else f" of entries in the order {arrangement.order} of {arrangement.sizes}"


def _like(ops: Sequence[Op]) -> Tensor:
    """Returns an empty tensor in the dtype of the ops' sketches."""
    dtype = functools.reduce(torch.promote_types, [op.dtype for op in ops])
    return torch.empty(0, dtype=dtype, device=ops[0].device)
