# SPDX-License-Identifier: Apache-2.0
"""Scales and shifts of normalizations: layer, group, instance and RMS norm, and batch norm with fixed statistics.

The normalised input is computed again, not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._check import Refused
from ._base import AnyLayout, Op, Use, in_one_dtype, in_sum_dtype
from .dense import Rows


@dataclass(frozen=True)
class ScaleUse(Use):
    """``y = normalize(x)·w`` per channel or per normalised entry; row i sums ``b·normalize(x)`` over its positions.

    ``normalize`` gives a new tensor.
    """

    x: Tensor
    normalize: Callable[[Tensor], Tensor]
    channels: slice  # dimensions of y that the weight spans

    def example_dims(self, b_ndim: int) -> list[int]:
        spanned = range(b_ndim)[self.channels]
        return [0] if spanned[0] == 1 else list(range(spanned[0]))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        b, terms = in_one_dtype(b, self.normalize(in_sum_dtype(self.x)))
        terms.mul_(b)  # in place: the allocation of a second tensor of this size costs more than the product
        return Rows(self._per_example(terms, layout))

    def _per_example(self, terms: Tensor, layout: AnyLayout) -> Tensor:
        spanned = [dim + 1 for dim in range(terms.ndim)[self.channels]]
        first = layout.examples_first(terms)
        others = [dim for dim in range(1, first.ndim) if dim not in spanned]
        return first.sum(others) if others else first


@dataclass(frozen=True)
class ShiftUse(ScaleUse):
    """``y = ... + bias``; row i sums ``b`` over its positions."""

    def saved(self) -> tuple[Tensor, ...]:
        return ()

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
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


def rms_norm(
    y: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Iterator[Use]:
    """``y = x / sqrt(mean(x²) + eps)·w`` over the last dimensions."""

    def normalize(x: Tensor) -> Tensor:
        return torch.rms_norm(x, normalized_shape, eps=eps)

    yield from _scale_and_shift(weight, None, input, normalize, slice(-len(normalized_shape), None))


def instance_norm(
    y: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Iterator[Use]:
    """``y = (x - mean) / sqrt(var + eps)·w + bias`` per channel and example, or with fixed statistics."""
    if use_input_stats and running_mean is not None:
        channels = input.shape[1]
        raise Refused(
            "ops.norm: instance_norm in training mode was given running statistics, which learn from the data without "
            f"noise. Pass track_running_stats=False, or put GroupNorm({channels}, {channels}) in its place."
        )

    def normalize(x: Tensor) -> Tensor:
        return torch.instance_norm(x, None, None, None, None, True, 0.0, eps, cudnn_enabled)

    chosen = normalize if use_input_stats else _with_fixed_statistics(running_mean, running_var, eps)
    yield from _scale_and_shift(weight, bias, input, chosen, slice(1, 2))


def batch_norm(
    y: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Iterator[Use]:
    """``y = (x - running_mean) / sqrt(running_var + eps)·w + bias``; statistics of the batch itself are refused."""
    if training:
        channels = input.shape[1]
        raise Refused(
            "ops.norm: batch_norm in training mode takes its statistics from the whole batch, so that one example's "
            f"loss depends on the others. Put GroupNorm({math.gcd(32, channels)}, {channels}) in its place, or call "
            "eval() on the module to keep its running statistics fixed."
        )
    yield from _scale_and_shift(
        weight, bias, input, _with_fixed_statistics(running_mean, running_var, eps), slice(1, 2)
    )


def _with_fixed_statistics(mean: Tensor | None, var: Tensor | None, eps: float) -> Callable[[Tensor], Tensor]:
    """``(x - mean) / sqrt(var + eps)`` per channel, with the statistics as they are now."""
    assert mean is not None
    assert var is not None
    mean, inverse = mean.clone(), (var + eps).rsqrt()

    def normalize(x: Tensor) -> Tensor:
        shape = (-1, *(1,) * (x.ndim - 2))
        return (x - mean.view(shape)) * inverse.view(shape)

    return normalize


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
    torch.rms_norm: rms_norm,
    torch.instance_norm: instance_norm,
    torch.batch_norm: batch_norm,
}
