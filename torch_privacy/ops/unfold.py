# SPDX-License-Identifier: Apache-2.0
"""Unfolds the input of a convolution: the patch under the kernel at every place, for all examples.

Inputs are (n, m, d, *size) for m images per example, and outputs have the size ``places``. Results have the images
after the first spatial dimension, so that several images need no copies of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ._base import multiples, offsets


@dataclass(frozen=True)
class Geometry:
    """Options of a convolution: one number per spatial dimension each, and the number of groups."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def is_pointwise(self) -> bool:
        """True if the convolution is a linear map at every place, so that the patches are the input itself."""
        return max((*self.kernel, *self.stride)) == 1 and not any(self.padding)

    def covered(self, places: Sequence[int]) -> list[int]:
        """Returns the size of the padded input that the kernel covers for an output of this size."""
        steps = zip(self.kernel, self.stride, self.dilation, places, strict=True)
        return [(place - 1) * stride + dilation * (size - 1) + 1 for size, stride, dilation, place in steps]


def by_group(tensor: Tensor, groups: int) -> Tensor:
    """Rearranges (n, m, channels, first, *others) to (n·groups, channels/groups, first, m, *others)."""
    n, _, channels = tensor.shape[:3]
    return tensor.movedim(1, 3).reshape(n * groups, channels // groups, *tensor.movedim(1, 3).shape[2:])


def padded(x: Tensor, places: Sequence[int], g: Geometry, *, channels_last: bool = False) -> Tensor:
    """Returns the part of the padded input that the kernel covers: (n·groups, d/groups, *size), images after size[0].

    ``channels_last`` determines the memory order, not the order of the returned dimensions.
    """
    x = by_group(x, g.groups)
    sides: list[int] = []
    sizes = (x.shape[2], *x.shape[4:])
    for size, padding, covered in zip(sizes, g.padding, g.covered(places), strict=True):
        sides = [padding, covered - size - padding, *sides]
    sides = [*sides[:-2], 0, 0, *sides[-2:]]
    if not channels_last:
        return F.pad(x, sides) if any(sides) else x
    x = x.movedim(1, -1)
    return (F.pad(x, [0, 0, *sides]) if any(sides) else x).contiguous().movedim(-1, 1)


def unfolded(x: Tensor, places: Sequence[int], g: Geometry) -> Tensor:
    """Returns the patch under the kernel at every place, (n·groups, d·kernel, t), by one copy of a strided view.

    ``F.unfold`` computes the same for images without groups, in twice the time on a CPU.
    """
    m, (first, *others), kernel = x.shape[1], places, g.kernel
    x = padded(x, places, g)
    inner = [step * dilation for step, dilation in zip((x.stride(2), *x.stride()[4:]), g.dilation, strict=True)]
    across = [x.stride(2) * g.stride[0], x.stride(3)]
    across += [step * stride for step, stride in zip(x.stride()[4:], g.stride[1:], strict=True)]
    stride = g.stride[-1]
    if others and stride > 1 and g.dilation[-1] == 1 and kernel[-1] % stride == 0:
        # The columns are sorted by their remainders: places that are neighbours are neighbours in memory, too.
        x = x.unflatten(-1, (x.shape[-1] // stride, stride)).movedim(-1, 2).contiguous()
        steps = (x.stride(3), *x.stride()[5:])
        inner = [step * dilation for step, dilation in zip(steps, g.dilation, strict=True)] + [x.stride(2)]
        across = [x.stride(3) * g.stride[0], x.stride(4)]
        across += [step * by for step, by in zip(steps[1:], (*g.stride[1:-1], 1), strict=True)]
        kernel = (*kernel[:-1], kernel[-1] // stride, stride)
    sizes = (*x.shape[:2], *kernel, first, m, *others)
    view = x.as_strided(sizes, (*x.stride()[:2], *inner, *across), x.storage_offset())
    return view.reshape(x.shape[0], x.shape[1] * math.prod(kernel), first * m * math.prod(others))


def unfolded_channels_last(x: Tensor, places: Sequence[int], g: Geometry) -> Tensor:
    """Returns the same as (n·groups, kernel·d, t), with t changing slowest in memory.

    A line of the kernel is one run of numbers in the input with its channels last. Runs are selected by their index,
    which is several times faster than a copy of a strided view.
    """
    m, kernel = x.shape[1], g.kernel
    x = padded(x, places, g, channels_last=True).movedim(1, -1)
    n, d = x.shape[0], x.shape[-1]
    one, line, image, *others = (step // d for step in x.stride()[:-1])
    steps = (line, *others)
    run = kernel[-1] if steps[-1] * g.dilation[-1] == 1 else 1
    inner = [(size, step * by) for size, step, by in zip(kernel, steps, g.dilation, strict=True)]
    inner = inner[:-1] if run > 1 else inner
    across = [(size, step * by) for size, step, by in zip(places, steps, g.stride, strict=True)]
    index = offsets((across[0], (m, image), *across[1:], *inner), x.device) + multiples(n, one, x.device)[:, None]
    runs = x.as_strided((max(0, x.numel() // d - run + 1), run * d), (d, 1), x.storage_offset())
    return runs.index_select(0, index.flatten()).view(n, m * math.prod(places), math.prod(kernel) * d).mT


def half_unfolded(x: Tensor, places: Sequence[int], g: Geometry) -> Tensor:
    """Returns the input unfolded in all dimensions but the first: (n·groups, remainders, d·kernel[1:], lines·m·places).

    The lines are sorted by their remainder modulo the stride, as far as the kernel meets them.
    """
    m = x.shape[1]
    step, spacing = g.stride[0], math.gcd(g.stride[0], g.dilation[0])
    x = padded(x, places, g)
    x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, -x.shape[2] % step)) if x.shape[2] % step else x
    (outer, channel, line, image), steps = x.stride()[:4], x.stride()[4:]
    inner = [step * dilation for step, dilation in zip(steps, g.dilation[1:], strict=True)]
    across = [step * stride for step, stride in zip(steps, g.stride[1:], strict=True)]
    sizes = (x.shape[0], step // spacing, x.shape[1], *g.kernel[1:], x.shape[2] // step, m, *places[1:])
    strides = (outer, line * spacing, channel, *inner, line * step, image, *across)
    lines = x.as_strided(sizes, strides, x.storage_offset())
    return lines.reshape(*sizes[:2], math.prod(sizes[2 : 2 + len(g.kernel)]), math.prod(sizes[2 + len(g.kernel) :]))
