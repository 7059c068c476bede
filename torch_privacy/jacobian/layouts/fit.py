# SPDX-License-Identifier: Apache-2.0
"""Finds the layouts of one tensor's gradient that agree with several coded backwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...ops import AnyLayout, Layout, Ragged
from ...ops._base import CHUNK_FLOATS, in_sum_dtype
from .codes import Codes, Rounding

SMALL = 2.0**-32  # gradients with no entry above this are scaled up, so that their squares do not underflow


class CandidateLayouts:
    """The layouts of one tensor's gradient that agree with all backwards so far.

    Args:
        b: gradient of the losses' sum in the tensor.
        dims: dimensions that may hold the examples.
        codes: encoded in the cotangents.
        rounding: how much b may differ between two backwards.
    """

    def __init__(self, b: Tensor, dims: Sequence[int], codes: Codes, rounding: Rounding):
        self._unit = _unit(b.detach())
        self._b, self._codes = self._in_units(b), codes
        absolute, negligible = rounding.absolute * self._unit, rounding.negligible * self._unit
        self._rounding = replace(rounding, absolute=absolute, negligible=negligible)
        n = len(codes.cotangent(0))
        if n < 2:  # nothing to separate
            regular = [Layout(dim, 1, n, b.shape[dim] if n else 1) for dim in dims if n or not b.shape[dim]][:1]
        else:
            regular = list(_regular_layouts(b.shape, n, dims))
        self._regular = {layout: _not_finite(layout, self._b) for layout in regular}
        self._exact = set(self._regular)  # those that agree without an allowance for cancellation
        self._digits: dict[int, list[Tensor]] = {dim: [] for dim in dims} if n > 1 else {}
        self._digits_are_exact = dict.fromkeys(self._digits, True)

    @property
    def num_not_finite(self) -> int:
        """Returns the number of examples that cannot be placed, because their b is not finite."""
        return min((int(not_finite.sum()) for not_finite in self._regular.values()), default=0)

    def narrow(self, k: int, scaled: Tensor) -> None:
        """Keeps the layouts that agree with the backward of the cotangent for digit k."""
        c, kept, scaled = self._codes.cotangent(k), {}, self._in_units(scaled)
        for layout, not_finite in self._regular.items():
            exact, near = self._fits(layout, not_finite, c, scaled)
            if near:
                kept[layout] = not_finite
            if not exact:
                self._exact.discard(layout)
        self._regular = kept
        if self._codes.num_digits > 1 or not self._regular:
            self._digits = {dim: [*digits, self._digit(dim, scaled)] for dim, digits in self._digits.items()}

    def layouts(self) -> list[AnyLayout]:
        """Returns regular layouts with the fewest undefined examples, only exact ones if any; else irregular ones."""
        fewest = self.num_not_finite
        regular = [layout for layout, not_finite in self._regular.items() if not_finite.sum() == fewest]
        n = len(self._codes.cotangent(0))
        if regular:
            doubtful = 0 < fewest < n and len({tuple(self._regular[layout].tolist()) for layout in regular}) > 1
            exact = [layout for layout in regular if layout in self._exact]
            return [] if doubtful else [*(exact or regular)]
        owners = ((dim, self._owner(dim)) for dim in self._digits)
        return [Ragged(dim, n, owner) for dim, owner in owners if not (owner == n).any()]

    def is_sure(self, layouts: Sequence[AnyLayout]) -> bool:
        """True if these, of ``layouts()``, are exact, and assign every entry with a gradient to the same example."""
        first = layouts[0]
        exact = first in self._exact if isinstance(first, Layout) else self._digits_are_exact[first.dim]
        return exact and self.are_alike(layouts)

    def are_alike(self, layouts: Sequence[AnyLayout]) -> bool:
        """True if these assign every entry with a gradient to the same example."""
        return all(self._agree_on_owners(layouts[0], other) for other in layouts[1:])

    def sizes(self, layout: AnyLayout) -> Tensor:
        """Returns (n,), the largest entries of the examples' parts."""
        first = layout.examples_first(self._b)
        return in_pieces(_largest_entry, first.reshape(len(first), first.shape[1:].numel())).cpu()

    def confirmed(self, c: Tensor, scaled: Tensor) -> bool:
        """True if the owners found entry by entry hold for another cotangent too."""
        layout = self.layouts()[0]
        if isinstance(layout, Layout):
            return True
        factor, scaled = c.cpu().double()[layout.owner], self._in_units(scaled)
        return bool(self._agrees(entries(self._b, layout.dim), entries(scaled, layout.dim), factor)[1].all())

    def _in_units(self, gradient: Tensor) -> Tensor:
        return gradient.detach() if self._unit == 1 else gradient.detach() * self._unit

    def _agree_on_owners(self, one: AnyLayout, other: AnyLayout) -> bool:
        if not self._b.numel():  # an expert that no token reached
            return True
        across = [dim for dim in range(self._b.ndim) if dim not in (one.dim, other.dim)]
        largest = self._b.abs().amax(across) if across else self._b.abs()
        some = ~(largest <= self._rounding.negligible).cpu()
        if one.dim == other.dim:
            return not (some & (one.owners() != other.owners())).any()
        mine, theirs = one.owners()[:, None], other.owners()[None]
        return not (some & (mine != theirs if one.dim < other.dim else (mine != theirs).T)).any()

    def _fits(self, layout: Layout, not_finite: Tensor, c: Tensor, scaled: Tensor) -> tuple[bool, bool]:
        """Returns whether the layout agrees exactly, and whether it agrees with an allowance for cancellation."""
        first, first_scaled = (layout.examples_first(t).reshape(len(c), -1) for t in (self._b, scaled))
        if not_finite.any() and (not_finite & torch.isfinite(first_scaled).all(1).cpu()).any():
            return False, False
        exact, near = self._agrees(first, first_scaled, c)
        return bool((exact | not_finite).all()), bool((near | not_finite).all())

    def _agrees(self, plain: Tensor, scaled: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Returns, for each row, whether ``scaled`` is ``factor`` times ``plain``.

        First up to the rounding of the row itself, then with an allowance for other rows' terms that cancel.
        """
        factor = factor.to(in_sum_dtype(plain[:0]))
        size = in_pieces(length, plain)
        error = in_pieces(lambda a, b, c: length(b / c[:, None] - a), plain, scaled, factor)
        rounding, factor = self._rounding, factor.abs()
        largest = _largest(size)
        cancelled = rounding.cancellation * (_largest(factor * size) / factor + largest)
        cancelled = cancelled.clamp(max=rounding.max_cancellation * largest)
        allowed = rounding.allowed(size, factor, plain.shape[1] ** 0.5)
        return (error <= allowed).cpu(), (error <= allowed + cancelled).cpu()

    def _digit(self, dim: int, scaled: Tensor) -> Tensor:
        """Returns (size,), each entry's digit along ``dim``: -1 if it has none, -2 if it has no gradient."""
        plain, scaled = entries(self._b, dim), entries(scaled, dim)
        digit = self._codes.digit(in_pieces(_ratio, plain, scaled))
        exact, agrees = self._agrees(plain, scaled, self._codes.value(digit.clamp(min=0).cpu()))
        without = (in_pieces(_largest_entry, plain) + in_pieces(_largest_entry, scaled) == 0).cpu()
        self._digits_are_exact[dim] &= bool((exact | without).all())
        return torch.where(without, -2, torch.where(agrees, digit.cpu(), -1))

    def _owner(self, dim: int) -> Tensor:
        """Returns (size,), the example of each entry: -1 if it has no gradient, n if several examples share it."""
        digits = self._digits[dim]
        without = torch.stack([digit == -2 for digit in digits]).all(0)
        return torch.where(without, -1, self._codes.owner(digits))


def _unit(b: Tensor) -> float:
    """Returns 1, or for small entries a power of two to multiply them by, so that their squares do not underflow."""
    largest = float(b.abs().max()) if b.numel() else 0.0
    most = 1000 if b.dtype == torch.float64 else 100
    return 2.0 ** min(-math.frexp(largest)[1], most) if 0 < largest < SMALL else 1.0


def _not_finite(layout: Layout, b: Tensor) -> Tensor:
    """Returns a mask (n,) of the examples with a b that is not finite."""
    first = layout.examples_first(b)
    if not first.numel():
        return torch.zeros(len(first), dtype=torch.bool, device="cpu")
    return ~_largest_entry(first.reshape(len(first), -1)).isfinite().cpu()


def length(rows: Tensor) -> Tensor:
    """Returns the norm of each row."""
    return torch.linalg.vector_norm(rows, dim=1)


def _largest_entry(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, ord=torch.inf, dim=1) if rows.shape[1] else rows.new_zeros(len(rows))


def _ratio(plain: Tensor, scaled: Tensor) -> Tensor:
    """Returns the factor between rows, also if the squares of their entries underflow."""
    unit = _largest_entry(plain)[:, None]
    plain = plain / unit
    return (plain * (scaled / unit)).sum(1) / plain.square().sum(1)


def in_pieces(of_rows: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns a function of rows, computed for some rows at a time, so that temporaries stay small."""
    step = max(1, CHUNK_FLOATS // 4 // max(1, tensors[0].shape[1]))
    pieces = zip(*(tensor.split(step) for tensor in tensors), strict=True)
    return torch.cat([of_rows(*map(in_sum_dtype, piece)) for piece in pieces])


def _largest(sizes: Tensor) -> float:
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def entries(tensor: Tensor, dim: int) -> Tensor:
    """Returns (size, everything else) of a tensor (.., size, ..)."""
    rows = tensor.movedim(dim, 0)
    return rows.reshape(len(rows), rows.shape[1:].numel())


def _regular_layouts(shape: torch.Size, n: int, dims: Sequence[int]) -> Iterator[Layout]:
    for dim in dims:
        if shape[dim] == 0 or shape[dim] % n:
            continue
        positions = shape[dim] // n
        # Consecutive positions first, interleaved ones next, then those in between.
        befores = [1, positions] + [k for k in range(2, positions) if positions % k == 0]
        yield from (Layout(dim, before, n, positions // before) for before in dict.fromkeys(befores))
