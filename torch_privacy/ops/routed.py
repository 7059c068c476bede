# SPDX-License-Identifier: Apache-2.0
"""Jacobian blocks of routed matrix products: every token is multiplied by the matrix of its expert (grouped_mm)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._base import AnyLayout, Method, Op, Use, add_at, in_one_dtype
from .linear import Linear


@dataclass(frozen=True)
class RoutedLinear(Op):
    """k matrices ``W_k`` in one weight, token t of example i used as ``y_it = x_it W_kᵀ`` with k = ``experts_it``.

    Matrix k of row i is the sum of ``bᵢₜ xᵢₜᵀ`` over the tokens of expert k.
    Shapes: ``x`` (n, t, d) the detached input; ``b`` (n, t, e) the gradient of ℓᵢ in y, zero at padding; ``experts``
    (n, t) integers in [0, k); ``W`` (k, e, d).
    """

    x: Tensor
    b: Tensor
    experts: Tensor
    num_experts: int

    @property
    def num_examples(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_experts, self.b.shape[2], self.x.shape[2]))

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def merge(self, other: Op) -> Op | None:
        if not isinstance(other, RoutedLinear):
            return None
        x, b = torch.cat([self.x, other.x], 1), torch.cat([self.b, other.b], 1)
        return RoutedLinear(x, b, torch.cat([self.experts, other.experts], 1), self.num_experts)

    def methods(self) -> list[Method]:
        """Returns the methods of one matrix, with every pair of example and expert as an example of t/k tokens."""
        n, t, d, e = *self.x.shape, self.b.shape[2]
        k = min(self.num_experts, t)
        each = -(-t // self.num_experts)
        padded = 2 * n * t * (d + e)
        return [
            Method("gram", _over_pairs(Linear._gram), flops=2 * n * k * each**2 * (d + e), floats=padded),
            Method("rows per expert", _over_pairs(Linear._rows_norms), 2 * n * t * d * e, padded + n * k * d * e),
            Method("rows", RoutedLinear.rows, 2 * n * t * d * e, padded + n * self.shape.numel(), rows=True),
        ]

    def rows(self) -> Tensor:
        owners, experts, pairs = self._pairs()
        rows = self.b.new_zeros(self.num_examples, *self.shape)
        rows[owners, experts] = pairs.rows()
        return rows

    def project(self, v: Tensor) -> Tensor:
        x, b = self.x.flatten(0, 1), self.b.flatten(0, 1)
        total = b.new_zeros(len(x), len(v))
        for k, tokens in enumerate(self._tokens_per_expert()):
            total[tokens] = torch.einsum("te,ked,td->tk", b[tokens], v[:, k], x[tokens])
        return total.view(*self.experts.shape, len(v)).sum(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        x, b = self.x.flatten(0, 1), (self.b * c[:, None, None]).flatten(0, 1)
        return torch.stack([b[tokens].mT @ x[tokens] for tokens in self._tokens_per_expert()])

    def select(self, index: Tensor | slice) -> RoutedLinear:
        return RoutedLinear(self.x[index], self.b[index], self.experts[index], self.num_experts)

    def _tokens_per_expert(self) -> tuple[Tensor, ...]:
        """Returns for each expert the indices (into n·t) of its tokens."""
        experts = self.experts.flatten()
        return experts.argsort().split(experts.bincount(minlength=self.num_experts).tolist())

    def _pairs(self) -> tuple[Tensor, Tensor, Linear]:
        """Returns the pairs of example and expert that occur: their examples, their experts, and a block of tokens."""
        n, k = self.num_examples, self.num_experts
        pair = (torch.arange(n, device=self.experts.device)[:, None] * k + self.experts).flatten()
        pair, order = pair.sort()
        distinct, number, counts = pair.unique_consecutive(return_inverse=True, return_counts=True)
        slot = torch.arange(len(pair), device=pair.device) - (counts.cumsum(0) - counts)[number]
        shape = len(distinct), int(counts.max()) if len(counts) else 0

        def padded(tokens: Tensor) -> Tensor:
            places = tokens.new_zeros(*shape, tokens.shape[2])
            places[number, slot] = tokens.flatten(0, 1)[order]
            return places

        return distinct // k, distinct % k, Linear(padded(self.x), padded(self.b))


def _over_pairs(norms: Callable[[Linear], Tensor]) -> Callable[[RoutedLinear], Tensor]:
    def compute(op: RoutedLinear) -> Tensor:
        owners, _, pairs = op._pairs()
        return add_at(op.b.new_zeros(op.num_examples), owners, norms(pairs))

    return compute


@dataclass(frozen=True)
class RoutedUse(Use):
    """Records one call of ``y_t = x_t W_k`` for the tokens t of expert k: ``x`` (s, d), ``W`` (k, d, e), y (s, e).

    ``offsets`` (k,) are the ends of each expert's tokens; y is undefined for tokens after the last end.
    """

    x: Tensor
    offsets: Tensor

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x, self.offsets)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        x, b = in_one_dtype(self.x, b)
        places = torch.arange(len(x), device=x.device, dtype=self.offsets.dtype)
        experts = torch.searchsorted(self.offsets, places, right=True)
        beyond = experts == len(self.offsets)
        x, b = (tensor.masked_fill(beyond[:, None], 0) for tensor in (x, b))
        x, b, experts = (layout.examples_first(tensor) for tensor in (x, b, experts.masked_fill(beyond, 0)))
        return RoutedLinear(b, x, experts, len(self.offsets))  # swapped, because y = x W has the row x bᵀ


def grouped_mm(
    y: Tensor,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Iterator[Use]:
    """Records ``y_t = x_t W_k`` for the tokens t of expert k, sorted by expert."""
    if input.ndim == 2 and mat2.ndim == 3 and offs is not None and bias is None:
        yield RoutedUse(mat2, input, offs)


# F.grouped_mm calls this function; older versions of torch lack it.
RECORDERS = {getattr(torch, name): grouped_mm for name in ["_grouped_mm"] if hasattr(torch, name)}
