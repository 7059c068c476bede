# SPDX-License-Identifier: Apache-2.0
"""Computes what each method of a convolution's block costs for one example: a function of the sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .unfold import Geometry

# Costs of the methods' steps, in matrix-product operations that take the same time (measured on one core of a CPU).
NATIVE = 0.8  # one operation of the native convolution
COPY = 60  # one number copied or summed in another memory order
SQUARE = 30  # one entry of a row squared and summed
REORDER = 120  # one entry of a row converted from the blocked format of the native convolution
KEPT = 30  # one entry of a row kept for the sum
SUM = 40_000_000  # overhead of one more native weight gradient
CALL = 120_000  # overhead of one matrix product among many
NATIVE_BLOCK = 16  # the native convolution is fastest if channels are a multiple of this
NARROW = 16  # a line of fewer places is copied faster with the channels innermost

ROWS, NATIVE_ROWS, SHIFTED_ROWS = "rows", "rows, native", "rows, shifted"
GRAM, BOXED_GRAM = "gram", "gram, boxed"
Costs = dict[str, tuple[float, float]]  # method -> flops, with the copies, reorderings and calls; numbers held at once


@dataclass(frozen=True)
class ConvCosts:
    """The sizes of one example, ``x`` (m, d, *size) and ``b`` (m, e, *places), and what follows from them."""

    x: torch.Size
    b: torch.Size
    geometry: Geometry

    @cached_property
    def _shape(self) -> torch.Size:  # of the kernel
        return torch.Size((self.b[1], self.x[1] // self.geometry.groups, *self.geometry.kernel))

    @cached_property
    def _t(self) -> int:  # places of all images
        return self.b[0] * self.b[2:].numel()

    @cached_property
    def _unfolded(self) -> int:  # entries in the patches
        return self.geometry.groups * self._t * self._shape[1:].numel()

    def of_rows(self) -> Costs:
        """Returns the costs of the methods that give rows: one matrix product for each group, or a native call."""
        size, pointwise = self._shape.numel(), self.geometry.is_pointwise
        products, squares = 2 * self._t * size, SQUARE * size
        flops = products + squares + CALL * self.geometry.groups + (0 if pointwise else COPY * self._unfolded)
        rows: Costs = {ROWS: (flops, self._unfolded + size)}
        if pointwise:
            return rows
        d, e, held = self._shape[1], self._shape[0] // self.geometry.groups, self.x.numel() + self.b.numel()
        blocked = d == e == 1 or (d % NATIVE_BLOCK == e % NATIVE_BLOCK == 0)
        products = NATIVE * products + COPY * held if blocked else products + 3 * COPY * self._unfolded
        floats = size + 0.8 * (held + size)  # makes chunks slightly larger, because calls are expensive
        return rows | {NATIVE_ROWS: (products + squares + REORDER * size, floats)}

    def of_norms(self) -> Costs:
        """Returns the costs of the methods that give norms alone."""
        groups, (e, d) = self.geometry.groups, self._shape[:2]
        terms = groups * self._t**2
        of_terms = 2 * terms * e // groups + 2 * COPY * terms + 2 * CALL * groups
        copied = 0 if self.geometry.is_pointwise else COPY * self._unfolded
        flops = 2 * terms * self._shape[1:].numel() + of_terms + copied
        gram: Costs = {GRAM: (flops, self._unfolded + 3 * terms)}
        if self.geometry.is_pointwise:
            return gram
        cells, summed = self._box_sizes()
        flops = 2 * groups * cells**2 * d + COPY * groups * summed + of_terms
        return gram | {BOXED_GRAM: (flops, 2 * groups * cells**2 + 3 * terms), SHIFTED_ROWS: self._of_shifted()}

    def _of_shifted(self) -> tuple[float, float]:
        size, g = self._shape.numel(), self.geometry
        lines = self._unfolded // g.kernel[0] * g.covered(self.b[2:])[0] // max(1, self.b[2])
        calls = -(-g.kernel[0] // g.stride[0]) * g.groups
        copied = COPY * (0.5 + 0.5 * NARROW / max(1, self.b[-1]))  # one number in lines as long as the output's
        flops = (2 * self._t + SQUARE) * size + copied * lines + CALL * calls
        return flops, lines + size * g.stride[0] // g.kernel[0]

    def _box_sizes(self) -> tuple[int, int]:
        """Returns the numbers of input cells and of additions in the box filter, for one group."""
        m, *places = self.b[0], *self.b[2:]
        left = [m, *self.geometry.covered(places)]
        cells, summed = math.prod(left), 0
        for dim, (kernel, place) in enumerate(zip(self.geometry.kernel, places, strict=True)):
            left[1 + dim] = place
            summed += kernel * math.prod(left) ** 2
        return cells, summed

    def of_sum(self, num_examples: int) -> float:
        """Returns the flops of the weighted sum of this many examples' rows."""
        products = 2 * num_examples * self._t * self._shape.numel()
        return NATIVE * products + COPY * num_examples * min(self.x.numel(), self.b.numel()) + SUM
