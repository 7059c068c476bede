# SPDX-License-Identifier: Apache-2.0
"""Jacobian blocks of embedding look-ups, without one-hot matrices and, for norms of a large table, without rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.validate import Refused
from ._base import AnyLayout, Method, Op, Use, add_at, in_one_dtype, in_sum_dtype, multiples
from .dense import Rows, product
from .elementwise import FactorUse, sum_to_weight
from .gram import Lost, checked_sums
from .linear import Linear

OF_BAG = inspect.signature(F.embedding_bag)


@dataclass(frozen=True)
class Embedding(Op):
    """A table ``W`` of v vectors used as ``y = W[ids]``; row i is ``G_i[w] = Σ_{t: ids_it = w} b_it``.

    Shapes: ``ids`` (n, t) integers in [0, v); ``b`` (n, t, e), zero at padding; ``W`` of any ``table`` shape that
    flattens to v vectors of e.
    """

    ids: Tensor
    b: Tensor
    table: torch.Size

    @property
    def num_examples(self) -> int:
        return self.ids.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self.table

    def merge(self, other: Op) -> Op | None:
        if isinstance(other, Linear) and other.shape == self.table:
            return TiedEmbedding(self, other)
        if not isinstance(other, Embedding) or other.b.shape[2] != self.b.shape[2]:
            return None
        return Embedding(torch.cat([self.ids, other.ids], 1), torch.cat([self.b, other.b], 1), self.table)

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def methods(self) -> list[Method]:
        (n, t, e), size = self.b.shape, self.table.numel()
        return [
            Method("sum per token", Embedding._sum_per_token, flops=4 * n * t * e, floats=n * t * e),
            Method("rows", Embedding.rows, flops=n * t * e + 2 * n * size, floats=n * size, rows=True),
        ]

    @property
    def sum_flops(self) -> float:
        return 2 * self.b.numel()

    def rows(self) -> Tensor:
        return self._summed(self.ids, self._vocabulary).view(self.num_examples, *self.table)

    def project(self, v: Tensor) -> Tensor:
        vectors = v.reshape(len(v), self._vocabulary, self.b.shape[2])
        return torch.stack([torch.einsum("nte,nte->n", self.b, F.embedding(self.ids, w)) for w in vectors], 1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        total = self.b.new_zeros(self._vocabulary, self.b.shape[2])
        return add_at(total, self.ids.flatten(), (self.b * c[:, None, None]).flatten(0, 1)).view(self.table)

    def select(self, index: Tensor | slice) -> Embedding:
        return replace(self, ids=self.ids[index], b=self.b[index])

    @property
    def _vocabulary(self) -> int:
        return self.table.numel() // self.b.shape[2]

    def _sum_per_token(self) -> Tensor:
        """Sums b over equal tokens of one example, and returns the sum of the squares of these sums.

        Sorting groups equal tokens and costs t log t; comparing all pairs would cost t² e.
        """
        t = self.ids.shape[1]
        if t == 1:
            return self.b.flatten(1).square().sum(1)
        ids, order = self.ids.sort(dim=1)
        slot = torch.zeros_like(ids)  # index of the distinct token within its example
        slot[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
        return self._summed(torch.empty_like(slot).scatter_(1, order, slot), t).square().sum((1, 2))

    def _summed(self, slots: Tensor, count: int) -> Tensor:
        """Returns (n, count, e): b summed over each of the slots (n, t)."""
        n, _, e = self.b.shape
        slots = slots + multiples(n, count, slots.device)[:, None]
        total = self.b.new_zeros(n * count, e)
        return add_at(total, slots.flatten(), self.b.flatten(0, 1)).view(n, count, e)


@dataclass(frozen=True)
class TiedEmbedding(Op):
    """A table that is both looked up and multiplied by, as in language models; row i is the sum A + B of two rows.

    ``‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩`` with ``⟨A, B⟩ = Σ_{s,t} b'_is[ids_it]·(x_is·b_it)`` for the b' and x of the
    product, so that no table per example is formed.
    """

    looked_up: Embedding
    product: Linear

    @property
    def num_examples(self) -> int:
        return self.product.num_examples

    @property
    def shape(self) -> torch.Size:
        return self.product.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.looked_up.dtype, self.product.dtype)

    def merge(self, other: Op) -> Op | None:
        if isinstance(other, TiedEmbedding):
            both = self.merge(other.looked_up)
            return None if both is None else both.merge(other.product)
        product, looked_up = self.product.merge(other), self.looked_up.merge(other)
        if isinstance(product, Linear):
            return TiedEmbedding(self.looked_up, product)
        return TiedEmbedding(looked_up, self.product) if isinstance(looked_up, Embedding) else None

    def methods(self) -> list[Method]:
        """Returns the methods of the product, with the cross terms added."""
        (n, s, e), t = self.product.x.shape, self.looked_up.ids.shape[1]
        flops, floats = 2 * n * s * t * e, 3 * n * s * t + n * t * e
        found = [self._with_cross_terms(method, flops, floats) for method in self.product.methods() if not method.rows]
        size = n * self.shape.numel()
        return [*found, Method("rows", TiedEmbedding.rows, flops=2 * s * size, floats=3 * size, rows=True)]

    def rows(self) -> Tensor:
        return self.looked_up.rows() + self.product.rows()

    def project(self, v: Tensor) -> Tensor:
        return self.looked_up.project(v) + self.product.project(v)

    def project_outer(self, left: Tensor, right: Tensor) -> Tensor:
        return self.looked_up.project_outer(left, right) + self.product.project_outer(left, right)

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self.looked_up.weighted_sum(c) + self.product.weighted_sum(c)

    def select(self, index: Tensor | slice) -> TiedEmbedding:
        return TiedEmbedding(self.looked_up.select(index), self.product.select(index))

    def _with_cross_terms(self, method: Method, flops: float, floats: float) -> Method:
        def compute(op: TiedEmbedding) -> Tensor:
            return op._norms(method.compute(op.product))

        return replace(method, compute=compute, flops=method.flops + flops, floats=method.floats + floats)

    def _norms(self, product_norms: Tensor) -> Tensor:
        """Adds the norms of the look-ups and the cross terms; uses explicit rows where they nearly cancel."""
        ids, b, output = self.looked_up.ids, self.looked_up.b, self.product.b
        columns = output.gather(2, ids.unsqueeze(1).expand(-1, output.shape[1], -1)).flatten(1)  # (n, s·t)
        lost = b.shape[2] * torch.linalg.vector_norm(columns, 1, dim=1) + columns.shape[1]  # in units of tiny
        terms = columns.mul_(product(self.product.x, b.mT).flatten(1))  # that add up to ⟨A, B⟩
        separate = product_norms + self.looked_up._sum_per_token()
        size = separate + 2 * torch.linalg.vector_norm(terms, 1, dim=1)
        lost_there = Lost(lost, 2 * torch.finfo(b.dtype).tiny)
        return checked_sums(separate + 2 * terms.sum(1), size, lost_there, self)


@dataclass(frozen=True)
class EmbeddingUse(Use):
    """Records one call of ``y = W[ids]``: ``ids`` (*positions), y (*positions, *vector)."""

    ids: Tensor
    padding_idx: int | None = None

    @property
    def padding(self) -> int | None:
        return None if self.padding_idx is None else self.padding_idx % len(self.weight)

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(self.ids.ndim))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.ids,)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        size = math.prod(b.shape[self.ids.ndim :])
        b = in_sum_dtype(b).reshape(*self.ids.shape, size)
        vocabulary = self.weight.numel() // size
        if self.padding_idx is not None:  # the padding vector gets no gradient, by definition
            b = b.masked_fill((self.ids == self.padding_idx % vocabulary).unsqueeze(-1), 0)
        return look_ups(self.ids, b, self.weight.shape, layout)


def look_ups(ids: Tensor, b: Tensor, table: torch.Size, layout: AnyLayout) -> Embedding:
    """Returns the op for ``ids`` (*positions) and ``b`` (*positions, e)."""
    ids, b = layout.examples_first(ids), layout.examples_first(b)
    t = math.prod(ids.shape[1:])
    return Embedding(ids.reshape(len(ids), t), b.reshape(len(b), t, b.shape[-1]), table)


@dataclass(frozen=True)
class Bags:
    """Tokens divided into bags: bag k holds the tokens of ``ids`` (s,) from ``offsets[k]`` to ``offsets[k + 1]``."""

    ids: Tensor
    offsets: Tensor  # (bags + 1,)
    padding_idx: int | None
    weights: Tensor | None  # (s,) factors of the tokens' vectors, for sums

    def places(self) -> tuple[Tensor, Tensor]:
        """Returns indices (bags, longest) into ``ids``, and a mask of the tokens that count: padding does not."""
        starts, ends = self.offsets[:-1, None], self.offsets[1:, None]
        longest = int((ends - starts).max()) if len(starts) else 0
        places = starts + torch.arange(longest, device=self.ids.device)
        counts = places < ends
        places = torch.where(counts, places, 0)
        return places, counts if self.padding_idx is None else counts & (self.ids[places] != self.padding_idx)

    def winners(self, table: Tensor) -> Tensor:
        """Returns (bags, e): the token with the largest entry; ties are broken as in torch."""
        return torch.embedding_bag(table, self.ids, self.offsets, False, 2, False, None, True, self.padding_idx)[3]


@dataclass(frozen=True)
class BagUse(Use):
    """Records one call of ``y_k = Σ_{t in bag k} factor_kt·W[ids_kt]``, for sums and means; y (bags, e)."""

    bags: Bags
    mean: bool

    @property
    def padding(self) -> int | None:
        return self.bags.padding_idx

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def saved(self) -> tuple[Tensor, ...]:
        weights = () if self.bags.weights is None else (self.bags.weights,)
        return (self.bags.ids, self.bags.offsets, *weights)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        places, counts = self.bags.places()
        factors, b = in_one_dtype(counts if self.bags.weights is None else self.bags.weights[places] * counts, b)
        if self.mean:
            factors = factors / counts.sum(1, keepdim=True).clamp(min=1)
        return look_ups(self.bags.ids[places], b.unsqueeze(1) * factors.unsqueeze(2), self.weight.shape, layout)


@dataclass(frozen=True)
class LargestUse(BagUse):
    """Records one call of ``y_kj = max_{t in bag k} W[ids_kt, j]``: each entry of y comes from one token."""

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        e = b.shape[1]
        entries = self.bags.winners(self.weight) * e + torch.arange(e, device=b.device)
        filled = self.bags.places()[1].any(1, keepdim=True)
        b = torch.where(filled, in_sum_dtype(b), 0)
        return look_ups(torch.where(filled, entries, 0), b.unsqueeze(2), self.weight.shape, layout)


@dataclass(frozen=True)
class BagWeightUse(FactorUse):
    """Records the factors p of one call of ``y_k = Σ_t p_kt·x[ids_kt]`` with the table x and bags of equal size t."""

    bags: Bags

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        places, counts = self.bags.places()
        vectors, b = in_one_dtype(self.x[self.bags.ids[places]], b)
        terms = torch.einsum("kte,ke->kt", vectors, b) * counts
        return Rows(sum_to_weight(terms, self.weight, layout))


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
    """Records ``y = W[ids]``."""
    _check_options("ops.embedding", max_norm, scale_grad_by_freq, sparse)
    yield EmbeddingUse(weight, input, padding_idx)


def embedding_bag(y: Tensor, *args: Any, **kwargs: Any) -> Iterator[Use]:
    """Records ``y_k``: sum, mean or max of the vectors of bag k; bags are rows of input, or begin at ``offsets``.

    The arguments are those of ``F.embedding_bag``.
    """
    bound = OF_BAG.bind(*args, **kwargs)
    bound.apply_defaults()
    given: Any = SimpleNamespace(**bound.arguments)
    input, weight, padding_idx = given.input, given.weight, given.padding_idx
    _check_options("ops.embedding_bag", given.max_norm, given.scale_grad_by_freq, given.sparse)
    if input.is_nested or input.is_floating_point():  # the second is a deprecated order of arguments
        return
    if padding_idx is not None:
        padding_idx %= len(weight)
    weights = None if given.per_sample_weights is None else given.per_sample_weights.reshape(-1)
    bags = Bags(input.reshape(-1), _offsets(input, given.offsets, given.include_last_offset), padding_idx, weights)
    yield LargestUse(weight, bags, False) if given.mode == "max" else BagUse(weight, bags, given.mode == "mean")
    if given.per_sample_weights is not None and input.ndim == 2:
        yield BagWeightUse(given.per_sample_weights, weight, bags)


def _offsets(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    """Returns the starts of the bags, and the end of the last one."""
    if offsets is None:
        return torch.arange(len(input) + 1, device=input.device) * input.shape[1]
    return offsets if include_last_offset else torch.cat([offsets, offsets.new_tensor([len(input)])])


def _check_options(where: str, max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    if max_norm is not None:
        raise Refused(
            f"{where}: max_norm={max_norm!r} rewrites the table in the forward, depending on the batch. "
            "Allowed: max_norm=None."
        )
    if scale_grad_by_freq:
        raise Refused(
            f"{where}: scale_grad_by_freq=True divides by counts over the whole batch, which couples its "
            "examples. Allowed: scale_grad_by_freq=False."
        )
    if sparse:
        raise Refused(
            f"{where}: sparse=True makes a gradient that shows which rows the batch used, but noise must be added to "
            "all of them. Allowed: sparse=False."
        )


def getitem(y: Tensor, input: Tensor, key: Any) -> Iterator[Use]:
    """Records ``y = W[ids]`` or ``y = W[ids, ids, ...]``, with integer tensors for the first dimensions."""
    keys = key if isinstance(key, tuple) else (key,)
    whole = [k for k in keys if isinstance(k, Tensor) and k.dtype in (torch.int64, torch.int32)]
    if len(whole) < len(keys):
        return
    ids = torch.zeros((), dtype=torch.int64, device=input.device)
    for k, size in zip(whole, input.shape, strict=False):
        ids = ids * size + k % size
    if ids.ndim:  # a scalar index selects one vector for all examples
        yield EmbeddingUse(input, ids)


def index_select(y: Tensor, input: Tensor, dim: int, index: Tensor) -> Iterator[Use]:
    """Records ``y = W[ids]``."""
    if dim % input.ndim == 0 and index.ndim == 1:
        yield EmbeddingUse(input, index)


def take(y: Tensor, input: Tensor, index: Tensor) -> Iterator[Use]:
    """Records ``y = W.flatten()[ids]``."""
    yield EmbeddingUse(input, index % input.numel())


def gather(y: Tensor, input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Iterator[Use]:
    """Records ``y[i, j] = W[ids[i, j], j]``, and the same for other dimensions."""
    grids = torch.meshgrid(*(torch.arange(size, device=index.device) for size in index.shape), indexing="ij")
    coordinates = [index if k == dim % input.ndim else grid for k, grid in enumerate(grids)]
    yield from getitem(y, input, tuple(coordinates))


RECORDERS = {
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    Tensor.__getitem__: getitem,
    **dict.fromkeys((torch.index_select, Tensor.index_select), index_select),
    **dict.fromkeys((torch.take, Tensor.take), take),
    **dict.fromkeys((torch.gather, Tensor.gather), gather),
}
