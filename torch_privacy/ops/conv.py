# SPDX-License-Identifier: Apache-2.0
"""Convolutions in one and two dimensions: strides, paddings, dilations and groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ._base import Layout, Method, Op, Use, in_one_dtype, in_sum_dtype
from .dense import Rows
from .linear import Linear


@dataclass(frozen=True)
class Geometry:
    """How the kernel moves: one number per spatial dimension each, and the number of groups."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Conv(Op):
    """A kernel ``W`` (e, d/groups, *kernel) used as ``y = x ⋆ W``; row i sums ``b`` times patch over all places.

    Shapes: ``x`` (n, m, d, *size) the detached input, m images per example; ``b`` (n, m, e, *places).
    """

    x: Tensor
    b: Tensor
    geometry: Geometry

    @property
    def num_examples(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.b.shape[2], self.x.shape[2] // self.geometry.groups, *self.geometry.kernel))

    def merge(self, other: Op) -> Op | None:
        """Two uses of one kernel on images of one size are one use with more images."""
        if not isinstance(other, Conv) or other.geometry != self.geometry or other.x.shape[2:] != self.x.shape[2:]:
            return None
        return Conv(torch.cat([self.x, other.x], 1), torch.cat([self.b, other.b], 1), self.geometry)

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def methods(self) -> list[Method]:
        """Those of the matrix product with the unfolded input, group by group."""
        n, m, e, *places = self.b.shape
        t, groups = m * math.prod(places), self.geometry.groups
        d = self.shape[1:].numel()
        unfolded = n * t * d * groups
        return [
            Method("rows", Conv._rows_norms, flops=2 * n * t * d * e, floats=unfolded + n * d * e),
            Method("gram", Conv._gram, flops=2 * n * t * t * (d * groups + e), floats=unfolded + 3 * n * t * t),
        ]

    def rows(self) -> Tensor:
        return torch.cat([block.rows() for block in self._blocks()], 1).view(self.num_examples, *self.shape)

    def project(self, v: Tensor) -> Tensor:
        b = self.b.flatten(1)
        return torch.stack([(b * self._forward(w).flatten(1)).sum(1) for w in v], 1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        """The native weight gradient of the convolution, with the b of example i weighted by cᵢ."""
        geometry, dims = self.geometry, len(self.geometry.kernel)
        weighted = self.b * c.view(-1, *(1,) * (self.b.ndim - 1))
        return torch.ops.aten.convolution_backward(
            weighted.flatten(0, 1),
            self.x.flatten(0, 1),
            self.b.new_empty(self.shape),
            None,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            False,
            (0,) * dims,
            geometry.groups,
            (False, True, False),
        )[1]

    def select(self, index: Tensor | slice) -> Conv:
        return replace(self, x=self.x[index], b=self.b[index])

    def _forward(self, weight: Tensor) -> Tensor:
        g = self.geometry
        conv = F.conv1d if len(g.kernel) == 1 else F.conv2d
        y = conv(self.x.flatten(0, 1), weight, None, g.stride, g.padding, g.dilation, g.groups)
        return y.unflatten(0, self.x.shape[:2])

    def _blocks(self) -> list[Linear]:
        """One matrix product per group: x unfolded to (n, t, d·kernel) and b to (n, t, e)."""
        groups = self.geometry.groups
        patches = self._patches().unflatten(2, (groups, -1)).flatten(3, 4)  # (n, m, group, d·kernel, places)
        b = self.b.flatten(3).unflatten(2, (groups, -1))
        return [Linear(_positions(patches[:, :, k]), _positions(b[:, :, k])) for k in range(groups)]

    def _patches(self) -> Tensor:
        """What the kernel meets at every place, (n, m, d, kernel, places): one copy of a strided view.

        ``F.unfold`` gives the same for images without groups, in twice the time on a CPU.
        """
        g, dims = self.geometry, len(self.geometry.kernel)
        sides = [side for padding in reversed(g.padding) for side in (padding, padding)]
        x = F.pad(self.x, sides) if any(sides) else self.x
        outer, steps = x.stride()[:3], x.stride()[3:]
        inner = [step * dilation for step, dilation in zip(steps, g.dilation, strict=True)]
        across = [step * stride for step, stride in zip(steps, g.stride, strict=True)]
        view = x.as_strided((*x.shape[:3], *g.kernel, *self.b.shape[3:]), (*outer, *inner, *across), x.storage_offset())
        return view.flatten(3 + dims).flatten(3, 2 + dims)

    def _rows_norms(self) -> Tensor:
        return torch.stack([block._rows_norms() for block in self._blocks()]).sum(0)

    def _gram(self) -> Tensor:
        return torch.stack([block._gram() for block in self._blocks()]).sum(0)


def _positions(tensor: Tensor) -> Tensor:
    """(n, m, d, places) -> (n, m·places, d), without a copy where m = 1."""
    return tensor.squeeze(1).mT if tensor.shape[1] == 1 else tensor.mT.flatten(1, 2)


@dataclass(frozen=True)
class ConvUse(Use):
    """One call of a convolution: ``x`` (n·m, d, *size), y (n·m, e, *places)."""

    x: Tensor
    geometry: Geometry

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: Layout) -> Op:
        x, b = in_one_dtype(self.x, b)
        return Conv(_images(x, layout), _images(b, layout), self.geometry)


@dataclass(frozen=True)
class ChannelBiasUse(Use):
    """The bias of a convolution: row i sums ``b`` over its images and places."""

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def op(self, b: Tensor, layout: Layout) -> Op:
        return Rows(_images(in_sum_dtype(b), layout).flatten(3).sum((1, 3)))


def _images(tensor: Tensor, layout: Layout) -> Tensor:
    """(n·m, channels, *size) -> (n, m, channels, *size)."""
    return layout.examples_first(tensor)


def convolution(
    y: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Iterator[Use]:
    """``y = x ⋆ W + bias`` for a batch of signals or images."""
    dims = weight.ndim - 2
    if input.ndim != dims + 2:  # one image without a batch dimension: nothing tells examples apart
        return
    stride, dilation = _per_dimension(stride, dims), _per_dimension(dilation, dims)
    kernel = tuple(weight.shape[2:])
    if isinstance(padding, str):
        input, padding = _pad_as_named(input, padding, kernel, dilation)
    yield ConvUse(weight, input, Geometry(kernel, stride, _per_dimension(padding, dims), dilation, groups))
    if bias is not None:
        yield ChannelBiasUse(bias)


def _per_dimension(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _pad_as_named(x: Tensor, padding: str, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[Tensor, int]:
    """The input after 'same' padding (the odd cell goes to the right, as in torch), or as it is for 'valid'."""
    if padding == "valid":
        return x, 0
    sides: list[int] = []
    for size, step in zip(reversed(kernel), reversed(dilation), strict=True):
        total = step * (size - 1)
        sides += [total // 2, total - total // 2]
    return F.pad(x, sides), 0


RECORDERS = {torch.conv1d: convolution, torch.conv2d: convolution}
