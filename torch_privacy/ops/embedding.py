# SPDX-License-Identifier: Apache-2.0
"""Look-ups in a table of vectors, without forming one-hot matrices or, for norms, a table of gradients per example."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._check import Refused
from ._base import Layout, Method, Op, Use, in_sum_dtype


@dataclass(frozen=True)
class Embedding(Op):
    """A table ``W`` (v, e) used as ``y = W[ids]``; row i is ``G_i[w] = Σ_{t: ids_it = w} b_it``.

    Shapes: ``ids`` (n, t) integers; ``b`` (n, t, e), already zero where ids is the padding index.
    """

    ids: Tensor
    b: Tensor
    vocabulary: int

    @property
    def num_examples(self) -> int:
        return self.ids.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.vocabulary, self.b.shape[2]))

    def merge(self, other: Op) -> Op | None:
        if not isinstance(other, Embedding):
            return None
        return Embedding(torch.cat([self.ids, other.ids], 1), torch.cat([self.b, other.b], 1), self.vocabulary)

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def methods(self) -> list[Method]:
        n, t, e = self.b.shape
        return [Method("sum per token", Embedding._sum_per_token, flops=4 * n * t * e, floats=n * t * e)]

    def rows(self) -> Tensor:
        n, t, e = self.b.shape
        rows = self.b.new_zeros(n, self.vocabulary, e)
        return rows.scatter_add_(1, self.ids.unsqueeze(2).expand(n, t, e), self.b)

    def project(self, v: Tensor) -> Tensor:
        return torch.stack([torch.einsum("nte,nte->n", self.b, F.embedding(self.ids, w)) for w in v], 1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        total = self.b.new_zeros(self.shape)
        return total.index_add_(0, self.ids.flatten(), (self.b * c[:, None, None]).flatten(0, 1))

    def select(self, index: Tensor | slice) -> Embedding:
        return Embedding(self.ids[index], self.b[index], self.vocabulary)

    def _sum_per_token(self) -> Tensor:
        """The b of equal tokens of one example are added; the squares of these sums are added.

        Sorting puts equal tokens side by side and costs t log t, where comparing all pairs would cost t² e.
        """
        n, t, e = self.b.shape
        if t == 1:
            return self.b.flatten(1).square().sum(1)
        ids, order = self.ids.sort(dim=1)
        slot = torch.zeros_like(ids)  # number of the distinct token within its example
        slot[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
        b = self.b.gather(1, order.unsqueeze(2).expand(n, t, e))
        sums = torch.zeros_like(b).scatter_add_(1, slot.unsqueeze(2).expand(n, t, e), b)
        return sums.square().sum((1, 2))


@dataclass(frozen=True)
class EmbeddingUse(Use):
    """One call of ``y = W[ids]``: ``ids`` (*positions), y (*positions, e)."""

    ids: Tensor
    padding_idx: int | None

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim - 1))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.ids,)

    def op(self, b: Tensor, layout: Layout) -> Op:
        ids, b = layout.examples_first(self.ids), layout.examples_first(in_sum_dtype(b))
        t = math.prod(ids.shape[1:])
        ids, b = ids.reshape(len(ids), t), b.reshape(len(b), t, b.shape[-1])
        if self.padding_idx is not None:  # the padding vector gets no gradient, by definition
            b = b.masked_fill((ids == self.padding_idx % self.weight.shape[0]).unsqueeze(2), 0)
        return Embedding(ids, b, self.weight.shape[0])


def embedding(
    y: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Iterator[Use]:
    """``y = W[ids]``."""
    if max_norm is not None:
        raise Refused(
            f"ops.embedding: max_norm={max_norm!r} rewrites the table in the forward, depending on the batch. "
            "Allowed: max_norm=None."
        )
    if scale_grad_by_freq:
        raise Refused(
            "ops.embedding: scale_grad_by_freq=True divides by counts over the whole batch, which couples its "
            "examples. Allowed: scale_grad_by_freq=False."
        )
    if sparse:
        raise Refused(
            "ops.embedding: sparse=True makes a gradient that tells which rows the batch used, and noise must fall on "
            "all of them. Allowed: sparse=False."
        )
    yield EmbeddingUse(weight, input, padding_idx)


RECORDERS = {F.embedding: embedding}
