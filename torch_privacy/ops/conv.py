# SPDX-License-Identifier: Apache-2.0
"""Jacobian blocks of convolutions in one to three dimensions, also transposed, with all their options."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from ._base import AnyLayout, Method, Op, Use, in_sum_dtype
from .conv_costs import BOXED_GRAM, GRAM, KEPT, NARROW, NATIVE_ROWS, ROWS, SHIFTED_ROWS, ConvCosts, Costs
from .dense import Rows, in_its_precision, product
from .gram import norms_from_gram
from .unfold import Geometry, by_group, half_unfolded, padded, unfolded, unfolded_channels_last

VECTOR = 16  # float32 numbers in the largest vector registers


@dataclass(frozen=True)
class Conv(Op):
    """A kernel ``W`` (e, d/groups, *kernel) used as ``y = x ⋆ W``; row i sums ``b`` times patch over all places.

    Shapes: ``x`` (n, m, d, *size) the detached input, m images per example; ``b`` (n, m, e, *places).
    A transposed convolution has the same rows with ``x`` and ``b`` swapped.
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
        """Merges two uses of one kernel on images of equal size into one use with more images."""
        if not isinstance(other, Conv) or other.geometry != self.geometry or other.x.shape[2:] != self.x.shape[2:]:
            return None
        return Conv(torch.cat([self.x, other.x], 1), torch.cat([self.b, other.b], 1), self.geometry)

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def methods(self) -> list[Method]:
        """Returns matrix products with the unfolded input, the native kernel, and Gram matrices of places."""
        n, one = self.num_examples, _costs_of_one(self.x.shape[1:], self.b.shape[1:], self.geometry)
        return [
            Method(name, _COMPUTED[name], n * flops, n * floats, rows=name in (ROWS, NATIVE_ROWS))
            for name, (flops, floats) in one.items()
        ]

    @property
    def sum_flops(self) -> float:
        return ConvCosts(self.x.shape[1:], self.b.shape[1:], self.geometry).of_sum(self.num_examples)

    @property
    def kept_entry(self) -> float:
        return KEPT  # the methods' cost includes the norm

    def rows(self) -> Tensor:
        return min((method for method in self.methods() if method.rows), key=lambda method: method.flops).compute(self)

    def project(self, v: Tensor) -> Tensor:
        b = self.b.flatten(1)
        return torch.stack([(b * self.forward(w).flatten(1)).sum(1) for w in v], 1)

    def project_outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns the product with one direction by a convolution with a single channel in each group."""
        groups = self.geometry.groups
        y = self.forward(right.expand(groups, *right.shape))
        b = torch.einsum("nmge...,ge->nmg...", self.b.unflatten(2, (groups, -1)), left.view(groups, -1))
        return (b * y).flatten(1).sum(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        """Returns the native weight gradient of the convolution, with x or b of example i weighted by cᵢ."""
        x, b, c = self.x, self.b, c.view(-1, *(1,) * (self.b.ndim - 1))
        if x.numel() < b.numel():  # the smaller of the two is copied
            x = x * c
        else:
            b = b * c
        return _weight_gradient(b.flatten(0, 1), x.flatten(0, 1), self.shape, self.geometry)

    def select(self, index: Tensor | slice) -> Conv:
        return replace(self, x=self.x[index], b=self.b[index])

    def forward(self, weight: Tensor) -> Tensor:
        """Returns ``x ⋆ weight``, (n, m, e, *places)."""
        g, zeros = self.geometry, (0,) * len(self.geometry.kernel)
        y = torch.convolution(
            self.x.flatten(0, 1), weight, None, g.stride, g.padding, g.dilation, False, zeros, g.groups
        )
        return y.unflatten(0, self.x.shape[:2])

    def _native_rows(self) -> Tensor:
        """Computes all rows in one native call on (1, n·d, *size): the channels of each example are separate groups."""
        n, groups = self.num_examples, self.geometry.groups
        if not n:
            return self.b.new_zeros(0, *self.shape)
        x, b = (tensor.transpose(0, 1).flatten(1, 2) for tensor in (self.x, self.b))
        shape = (n * self.shape[0], *self.shape[1:])
        return _weight_gradient(b, x, shape, replace(self.geometry, groups=n * groups)).view(n, *self.shape)

    def _unfolded_rows(self) -> Tensor:
        """Computes one matrix product per example and group, in the order that fills the processor's vectors best."""
        patches, b = self.patches(), by_group(self.b, self.geometry.groups).flatten(2)
        if self._channels_last:
            rows = product(b, patches.mT).unflatten(2, (*self.geometry.kernel, self.shape[1])).movedim(-1, 2)
        elif _unfilled(b.shape[1]) < _unfilled(patches.shape[1]):
            rows = product(patches, b.mT).mT
        else:
            rows = product(b, patches.mT)
        return rows.reshape(self.num_examples, *self.shape)

    def _shifted_norms(self) -> Tensor:
        """Computes norms from rows, for one offset of the kernel's first dimension at a time.

        Each offset is a view of the half-unfolded input. With stride s, the offsets 0 .. s - 1 start from the same
        lines with different remainders modulo s.
        """
        g, b = self.geometry, by_group(self.b, self.geometry.groups)
        step, dilation, length = g.stride[0], g.dilation[0], b.shape[3:].numel()
        spacing, b, lines = math.gcd(step, dilation), b.flatten(2), half_unfolded(self.x, self.b.shape[3:], g)
        total = b.new_zeros(self.num_examples)
        for line, together in groupby(range(0, g.kernel[0] * dilation, dilation), lambda offset: offset // step):
            first, *others = (offset % step // spacing for offset in together)
            chosen = slice(first, max(others, default=first) + 1, dilation // spacing)
            products = product(lines[:, chosen, :, line * length :][..., : b.shape[2]].flatten(1, 2), b.mT)
            total += _by_example(products, g.groups).square_().sum(1)
        return total

    def patches(self) -> Tensor:
        """Returns the patches, (n·groups, d·kernel, t); with ``_channels_last`` (n·groups, kernel·d, t)."""
        unfold = unfolded_channels_last if self._channels_last else unfolded
        return unfold(self.x, self.b.shape[3:], self.geometry)

    @property
    def _channels_last(self) -> bool:
        """True if patches have the channels innermost in memory."""
        narrow = self.b.shape[-1] < NARROW <= self.shape[1]
        return not self.geometry.is_pointwise and (narrow or self.x.stride(2) == 1)

    def _gram(self) -> Tensor:
        patches = self.patches()
        return self._norms_of(product(patches.mT, patches))

    def _boxed_gram(self) -> Tensor:
        """Computes the same without patches: their inner products sum those of input cells along the diagonals."""
        x = padded(self.x, self.b.shape[3:], self.geometry)
        cells = x.flatten(2)
        gram, g = product(cells.mT, cells).view(x.shape[0], *x.shape[2:], *x.shape[2:]), self.geometry
        for dim, (kernel, stride, dilation) in enumerate(zip(g.kernel, g.stride, g.dilation, strict=True)):
            axis = 1 + dim + (dim > 0)  # the images stand second
            gram = _box_filtered(gram, (axis, axis + x.ndim - 2), kernel, stride, dilation)
        t = self.b.shape[1] * self.b.shape[3:].numel()  # places of all images of one example
        return self._norms_of(gram.reshape(x.shape[0], t, t))

    def _norms_of(self, gram: Tensor) -> Tensor:
        """Returns squared norms from the inner products of patches (n·groups, t, t); from rows where terms cancel."""
        b, groups = by_group(self.b, self.geometry.groups).flatten(2), self.geometry.groups
        grams = [gram.unflatten(0, (self.num_examples, groups)) for gram in (product(b.mT, b), gram)]
        return norms_from_gram(grams, [b.shape[1], self.shape[1:].numel()], self)


_COMPUTED = {  # name of a method -> how it is computed
    ROWS: Conv._unfolded_rows,
    NATIVE_ROWS: Conv._native_rows,
    GRAM: Conv._gram,
    BOXED_GRAM: Conv._boxed_gram,
    SHIFTED_ROWS: Conv._shifted_norms,
}


@lru_cache(maxsize=4096)
def _costs_of_one(x: torch.Size, b: torch.Size, geometry: Geometry) -> Costs:
    """Returns the costs for one example with these sizes; cached."""
    costs = ConvCosts(x, b, geometry)
    return costs.of_rows() | costs.of_norms()


def _unfilled(size: int) -> float:
    """Returns the share of a vector register's numbers that a line of this size leaves empty."""
    return -size % VECTOR / max(1, size)


def _by_example(products: Tensor, groups: int) -> Tensor:
    """Flattens (n·groups, *sizes) to (n, -1)."""
    return products.unflatten(0, (products.shape[0] // groups, groups)).flatten(1)


def _box_filtered(gram: Tensor, axes: tuple[int, int], kernel: int, stride: int, dilation: int) -> Tensor:
    """Sums the entries at (place + offset), in both dimensions ``axes``, over the kernel's offsets."""
    places = (gram.shape[axes[0]] - dilation * (kernel - 1) - 1) // stride + 1
    key: list[slice] = [slice(None)] * gram.ndim

    def shifted(offset: int) -> Tensor:
        window = slice(offset, offset + (places - 1) * stride + 1, stride)
        key[axes[0]] = key[axes[1]] = window
        return gram[tuple(key)]

    total = shifted(0).clone(memory_format=torch.contiguous_format)
    for offset in range(dilation, kernel * dilation, dilation):
        total += shifted(offset)
    return total


def _weight_gradient(b: Tensor, x: Tensor, shape: Sequence[int], geometry: Geometry) -> Tensor:
    """Returns the native gradient in a kernel of this shape, for x (batch, d, *size) and b (batch, e, *places)."""
    g, zeros = geometry, (0,) * len(geometry.kernel)
    return torch.ops.aten.convolution_backward(
        b, x, b.new_empty(shape), None, g.stride, g.padding, g.dilation, False, zeros, g.groups, (False, True, False)
    )[1]


@dataclass(frozen=True)
class ConvUse(Use):
    """Records one call of a convolution: ``x`` (n·m, d, *size), y (n·m, e, *places)."""

    x: Tensor
    geometry: Geometry

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        op = Conv(layout.examples_first(self.x), layout.examples_first(b), self.geometry)
        return in_its_precision(op, in_half=b.dtype is torch.bfloat16)


@dataclass(frozen=True)
class TransposedConvUse(ConvUse):
    """Records a call of a transposed convolution: x (n·m, d, *size), y (n·m, e, *places), W (d, e/groups, *kernel).

    The convolution with ``W`` maps y to x, so the rows are those of a convolution that maps b to x.
    """

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        x, g, size, in_half = self.x, self.geometry, b.shape[2:], b.dtype is torch.bfloat16
        spare = [
            size + 2 * padding - covered
            for size, padding, covered in zip(size, g.padding, g.covered(x.shape[2:]), strict=True)
        ]
        if any(
            left >= stride for left, stride in zip(spare, g.stride, strict=True)
        ):  # because of a large output_padding
            sides = [
                side for p, left in zip(reversed(g.padding), reversed(spare), strict=True) for side in (p, p - left)
            ]
            b, g = F.pad(b, sides), replace(g, padding=(0,) * len(g.padding))
        op = Conv(layout.examples_first(b), layout.examples_first(x), g)
        return in_its_precision(op, in_half=in_half)


@dataclass(frozen=True)
class ChannelBiasUse(Use):
    """Records the bias of a convolution: row i sums ``b`` over its images and places."""

    def example_dims(self, b_ndim: int) -> list[int]:
        return [0]

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        return Rows(layout.examples_first(in_sum_dtype(b)).flatten(3).sum((1, 3)))


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
    """Records ``y = x ⋆ W + bias`` for a batch of signals, images or volumes."""
    dims = weight.ndim - 2
    if input.ndim != dims + 2:  # one image without a batch dimension has no examples
        return
    stride, dilation = _per_dimension(stride, dims), _per_dimension(dilation, dims)
    kernel = tuple(weight.shape[2:])
    if isinstance(padding, str):
        input, padding = _pad_as_named(input, padding, kernel, dilation)
    yield ConvUse(weight, input, Geometry(kernel, stride, _per_dimension(padding, dims), dilation, groups))
    if bias is not None:
        yield ChannelBiasUse(bias)


def transposed_convolution(
    y: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Iterator[Use]:
    """Records ``y`` with ``<y, v> = <x, v ⋆ W>`` for every v, plus bias; y's size determines the output padding."""
    dims = weight.ndim - 2
    if input.ndim != dims + 2:
        return
    stride, padding, dilation = (_per_dimension(value, dims) for value in (stride, padding, dilation))
    yield TransposedConvUse(weight, input, Geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups))
    if bias is not None:
        yield ChannelBiasUse(bias)


def _per_dimension(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _pad_as_named(x: Tensor, padding: str, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[Tensor, int]:
    """Returns the input with 'same' padding (an odd cell goes to the right, as in torch) and the padding left to do."""
    if padding == "valid":
        return x, 0
    sides: list[int] = []
    for size, step in zip(reversed(kernel), reversed(dilation), strict=True):
        total = step * (size - 1)
        sides += [total // 2, total - total // 2]
    return F.pad(x.detach(), sides), 0


RECORDERS = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), convolution),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), transposed_convolution),
}
