# SPDX-License-Identifier: Apache-2.0
"""Scales and shifts of normalisations: layer_norm and group_norm. The normalised input is computed again, not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._base import Layout, Op, Use, in_sum_dtype
from .dense import Rows


@dataclass(frozen=True)
class ScaleUse(Use):
    """``y = normalize(x)·w`` per channel or per normalised entry; row i sums ``b·normalize(x)`` over its positions."""

    x: Tensor
    normalize: Callable[[Tensor], Tensor]
    channels: slice  # dimensions of y that the weight spans

    def example_dims(self, b_ndim: int) -> list[int]:
        spanned = range(b_ndim)[self.channels]
        return [0] if spanned[0] == 1 else list(range(spanned[0]))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: Layout) -> Op:
        return Rows(self._per_example(in_sum_dtype(b) * in_sum_dtype(self.normalize(self.x)), layout))

    def _per_example(self, terms: Tensor, layout: Layout) -> Tensor:
        spanned = [dim + 1 for dim in range(terms.ndim)[self.channels]]
        first = layout.examples_first(terms)
        others = [dim for dim in range(1, first.ndim) if dim not in spanned]
        return first.sum(others) if others else first


@dataclass(frozen=True)
class ShiftUse(ScaleUse):
    """``y = ... + bias``; row i sums ``b`` over its positions."""

    def saved(self) -> tuple[Tensor, ...]:
        return ()

    def op(self, b: Tensor, layout: Layout) -> Op:
        return Rows(self._per_example(in_sum_dtype(b), layout))


def layer_norm(
    y: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Iterator[Use]:
    """``y = (x - mean) / sqrt(var + eps)·w + bias`` over the last dimensions."""

    def normalize(x: Tensor) -> Tensor:
        return F.layer_norm(x, normalized_shape, eps=eps)

    yield from _scale_and_shift(weight, bias, input, normalize, slice(-len(normalized_shape), None))


def group_norm(
    y: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Iterator[Use]:
    """``y = (x - mean) / sqrt(var + eps)·w + bias`` over groups of channels, per example."""

    def normalize(x: Tensor) -> Tensor:
        return F.group_norm(x, num_groups, eps=eps)

    yield from _scale_and_shift(weight, bias, input, normalize, slice(1, 2))


def _scale_and_shift(
    weight: Tensor | None, bias: Tensor | None, x: Tensor, normalize: Callable[[Tensor], Tensor], channels: slice
) -> Iterator[Use]:
    if weight is not None:
        yield ScaleUse(weight, x, normalize, channels)
    if bias is not None:
        yield ShiftUse(bias, x, normalize, channels)


RECORDERS = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
}
