# SPDX-License-Identifier: Apache-2.0
"""Scales and shifts of normalizations: layer, group, instance and RMS norm, and batch norm with fixed statistics.

The normalized input is recomputed, not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.normalization import groups_for
from ..support.torch_modes import saves_elsewhere
from ..support.validate import Refused
from ._base import AnyLayout, Op, Use, in_one_dtype, in_sum_dtype, is_half
from .dense import Rows


@dataclass(frozen=True)
class Statistics:
    """Mean and inverse standard deviation, as saved by the op for its backward."""

    mean: Tensor
    inverse_std: Tensor

    @staticmethod
    def of(y: Tensor, node: str) -> Statistics | None:
        """Returns the statistics saved by y's node if it has this name; None if rounded or saved elsewhere."""
        saved_by = y.grad_fn
        if saved_by is None or saved_by.name() != node or saves_elsewhere():
            return None
        mean, inverse_std = saved_by._saved_result1, saved_by._saved_result2  # type: ignore[attr-defined]
        return None if is_half(mean) else Statistics(mean, inverse_std)


@dataclass(frozen=True)
class ScaleUse(Use):
    """Records ``y = normalize(x)·w`` per channel or normalized entry; row i sums ``b·normalize(x)`` over positions.

    ``normalize`` returns a new tensor.
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
    """Records ``y = ... + bias``; row i sums ``b`` over its positions."""

    def saved(self) -> tuple[Tensor, ...]:
        return ()

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        return Rows(self._per_example(in_sum_dtype(b), layout))


@dataclass(frozen=True)
class LayerScaleUse(ScaleUse):
    """Records the scale of a layer norm over the last dimension; row i is ``Σₜ (xₜ - meanₜ)·bₜ·inverse_stdₜ``."""

    statistics: Statistics

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        x, b = in_one_dtype(self.x, b)
        terms = layout.examples_first((x - self.statistics.mean).mul_(b))
        inverse_std = layout.examples_first(self.statistics.inverse_std)
        n, d = len(terms), terms.shape[-1]
        positions = terms.shape[1:-1].numel()
        return Rows((inverse_std.reshape(n, 1, positions) @ terms.reshape(n, positions, d)).squeeze(1))


class GroupRows:
    """The rows of scale and shift of one group norm, by one native call that treats all images as channels of one.

    Args:
        x: input (images, channels, *places).
        num_groups: number of groups of channels.
        statistics: those of each image's groups.
    """

    def __init__(self, x: Tensor, num_groups: int, statistics: Statistics):
        self._x, self._num_groups, self._statistics = x, num_groups, statistics
        self._computed_for: Callable[[], Tensor | None] = lambda: None  # weak reference to b
        self._rows: list[Tensor | None] = [None, None]  # not taken yet

    def take(self, b: Tensor, which: int) -> Tensor:
        """Returns the rows (images, channels) of the scale (0) or the shift (1), and frees them."""
        if self._computed_for() is not b or self._rows[which] is None:
            self._computed_for, self._rows = ref(b), self._compute(*in_one_dtype(self._x, b))
        rows, self._rows[which] = self._rows[which], None
        assert rows is not None
        return rows

    def _compute(self, x: Tensor, b: Tensor) -> list[Tensor | None]:
        images, channels = x.shape[:2]
        everything, groups = images * channels, images * self._num_groups
        as_one = (t.contiguous().view(1, everything, -1) for t in (b, x))
        both = (self._statistics.mean, self._statistics.inverse_std)
        mean, inverse_std = (t.to(x.dtype).view(1, groups) for t in both)
        places, unused = x.shape[2:].numel(), x.new_empty(everything)
        _, scale, shift = torch.ops.aten.native_group_norm_backward(
            *as_one, mean, inverse_std, unused, 1, everything, places, groups, (False, True, True)
        )
        return [scale.view(images, channels), shift.view(images, channels)]


@dataclass(frozen=True)
class GroupUse(Use):
    """Records scale (``which`` 0) or shift (1) of a group norm with known statistics."""

    x: Tensor
    rows: GroupRows
    which: int

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        return Rows(layout.examples_first(self.rows.take(b, self.which)).sum(1))


def layer_norm(
    y: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Iterator[Use]:
    """Records ``y = (x - mean) / sqrt(var + eps)·w + bias`` over the last dimensions."""

    def normalize(x: Tensor) -> Tensor:
        return F.layer_norm(x, normalized_shape, eps=eps)

    channels = slice(-len(normalized_shape), None)
    statistics = Statistics.of(y, "NativeLayerNormBackward0") if len(normalized_shape) == 1 else None
    if weight is not None and statistics is not None:
        yield LayerScaleUse(weight, input, normalize, channels, statistics)
        weight = None
    yield from _scale_and_shift(weight, bias, input, normalize, channels)


def group_norm(
    y: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Iterator[Use]:
    """Records ``y = (x - mean) / sqrt(var + eps)·w + bias`` over groups of channels, per example."""

    def normalize(x: Tensor) -> Tensor:
        return F.group_norm(x, num_groups, eps=eps)

    statistics = Statistics.of(y, "NativeGroupNormBackward0")
    if statistics is None or not input.numel():
        yield from _scale_and_shift(weight, bias, input, normalize, slice(1, 2))
        return
    rows = GroupRows(input, num_groups, statistics)
    for which, parameter in enumerate((weight, bias)):
        if parameter is not None:
            yield GroupUse(parameter, input, rows, which)


def rms_norm(
    y: Tensor, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Iterator[Use]:
    """Records ``y = x / sqrt(mean(x²) + eps)·w`` over the last dimensions."""

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
    """Records ``y = (x - mean) / sqrt(var + eps)·w + bias`` per channel and example, or with fixed statistics."""
    if use_input_stats and running_mean is not None:
        channels = input.shape[1]
        raise Refused(
            "ops.norm: instance_norm in training mode has running statistics, which are computed from the data without "
            f"noise. Pass track_running_stats=False, or use GroupNorm({groups_for(channels)}, {channels}) instead."
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
    """Records ``y = (x - running_mean) / sqrt(running_var + eps)·w + bias``; refuses statistics of the batch."""
    if training:
        channels = input.shape[1]
        groups = groups_for(channels) if input.ndim > 3 else 1
        raise Refused(
            "ops.norm: batch_norm in training mode takes its statistics from the whole batch, so that one example's "
            f"loss depends on the others. Use GroupNorm({groups}, {channels}) instead, or call eval() on the module to "
            "keep its running statistics fixed."
        )
    yield from _scale_and_shift(
        weight, bias, input, _with_fixed_statistics(running_mean, running_var, eps), slice(1, 2)
    )


def _with_fixed_statistics(mean: Tensor | None, var: Tensor | None, eps: float) -> Callable[[Tensor], Tensor]:
    """Returns x -> ``(x - mean) / sqrt(var + eps)`` per channel, with the current values of the statistics."""
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
