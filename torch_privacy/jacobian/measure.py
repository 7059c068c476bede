# SPDX-License-Identifier: Apache-2.0
"""Which layouts agree with what several backwards, each with a code for every example, say of one tensor's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops import AnyLayout, Layout, Ragged
from ..ops._base import CHUNK_FLOATS, in_sum_dtype

# Rounding of an example's own b, and what cancels only up to rounding, in units of the coarsest type's.
OWN = 64
OTHERS = 16
SMALL = 2.0**-32


def fresh_generator() -> torch.Generator:
    """A generator for checks, seeded by the system: it leaves the user's random state alone."""
    return torch.Generator().manual_seed(system_seed())


def system_seed() -> int:
    """Returns a seed from the system."""
    return torch.Generator().seed()


@dataclass(frozen=True)
class Rounding:
    """By how much the b of an example alone may differ from what another backward says, in the types on the way.

    Multiplying by powers of two commutes with rounding. What is left: sums whose order changes from run to run, other
    examples' terms that cancel only up to rounding, and numbers too small for their type.
    """

    own: float  # relative to the example's own b
    others: float  # relative to the largest of the examples, under their factors
    most: float  # of that, relative to the largest without factors
    grain: float  # absolute, for each entry
    exponents: int  # how many powers of two the type has room for
    nothing: float  # entries up to this are no gradient

    @staticmethod
    def of(dtypes: Collection[torch.dtype]) -> Rounding:
        """The rounding of the coarsest of these types, and the range of the narrowest."""
        infos = [torch.finfo(dtype) for dtype in dtypes]
        eps = max(info.eps for info in infos)
        grain = max(info.smallest_normal * info.eps for info in infos)
        exponents = 4 if torch.float16 in dtypes else 16
        nothing = 2**13 * grain if grain < 1e-30 else 0.0  # in float16 small gradients are not far above
        most = 0.02 if eps < 1e-5 else 0.002
        return Rounding(min(OWN * eps, 0.02), OTHERS * eps, most, 16 * grain, exponents, nothing)


class Codes:
    """A number of its own for every example, told digit by digit: each by a cotangent of powers of two with signs.

    ``exponents`` of them, around 1, so that a digit has twice as many values.
    """

    def __init__(self, n: int, exponents: int):
        self._generator = fresh_generator()
        self._exponents, self._base = exponents, 2 * exponents
        self.num_digits = 1
        while self._base**self.num_digits < n:
            self.num_digits += 1
        self._codes = torch.randperm(self._base**self.num_digits, generator=self._generator)[:n]
        self._in_order, self._order = self._codes.sort()

    def cotangent(self, k: int) -> Tensor:
        """(n,): the k-th digit of every example."""
        return self.value(self._codes // self._base**k % self._base)

    def independent(self) -> Tensor:
        """(n,): digits that have nothing to do with the codes."""
        return self.value(torch.randint(self._base, self._codes.shape, generator=self._generator))

    def value(self, digit: Tensor) -> Tensor:
        """The factor that stands for a digit."""
        return torch.ldexp(1.0 - 2.0 * (digit % 2), digit // 2 - self._exponents // 2)

    def digit(self, factor: Tensor) -> Tensor:
        """The digit of the nearest factor; -1 where there is none."""
        exponent = factor.abs().log2().round() + self._exponents // 2
        digit = 2 * exponent + (factor < 0)
        return torch.where((exponent >= 0) & (exponent < self._exponents), digit, -1).long()

    def owner(self, digits: Sequence[Tensor]) -> Tensor:
        """The examples with these digits; n where there is none."""
        codes = sum((digit * self._base**k for k, digit in enumerate(digits)), torch.zeros_like(digits[0]))
        codes = torch.where(torch.stack([digit < 0 for digit in digits]).any(0), -1, codes)
        place = torch.searchsorted(self._in_order, codes).clamp(max=len(self._codes) - 1)
        return torch.where(self._in_order[place] == codes, self._order[place], len(self._codes))


class Fitting:
    """The layouts under which one tensor's gradient agrees with all backwards so far.

    Args:
        b: gradient of the losses' sum in the tensor.
        dims: where its examples may lie.
        codes: what the cotangents tell.
        rounding: how far b may be off.
    """

    def __init__(
        self,
        b: Tensor,
        dims: Sequence[int],
        codes: Codes,
        rounding: Rounding,
    ):
        self._unit = _unit(b.detach())
        self._b, self._codes = self._in_units(b), codes
        grain, nothing = rounding.grain * self._unit, rounding.nothing * self._unit
        self._rounding = replace(rounding, grain=grain, nothing=nothing)
        n = len(codes.cotangent(0))
        if n < 2:  # nothing to tell apart
            regular = [Layout(dim, 1, n, b.shape[dim] if n else 1) for dim in dims if n or not b.shape[dim]][:1]
        else:
            regular = list(_candidates(b.shape, n, dims))
        self._regular = {layout: _not_finite(layout, self._b) for layout in regular}
        self._exact = set(self._regular)  # those that agree without leave for what other examples leave behind
        self._digits: dict[int, list[Tensor]] = {dim: [] for dim in dims} if n > 1 else {}
        self._digits_are_exact = dict.fromkeys(self._digits, True)

    @property
    def aside(self) -> int:
        """Examples that nothing is known of, since their b is not finite."""
        return min((int(aside.sum()) for aside in self._regular.values()), default=0)

    def narrow(self, k: int, scaled: Tensor) -> None:
        """Keep what agrees with the backward whose cotangent was digit k."""
        c, kept, scaled = self._codes.cotangent(k), {}, self._in_units(scaled)
        for layout, aside in self._regular.items():
            exact, near = self._fits(layout, aside, c, scaled)
            if near:
                kept[layout] = aside
            if not exact:
                self._exact.discard(layout)
        self._regular = kept
        if self._codes.num_digits > 1 or not self._regular:
            self._digits = {dim: [*digits, self._digit(dim, scaled)] for dim, digits in self._digits.items()}

    def layouts(self) -> list[AnyLayout]:
        """The regular ones with the fewest examples set aside, of these the exact ones; or the irregular ones."""
        fewest = self.aside
        regular = [layout for layout, aside in self._regular.items() if aside.sum() == fewest]
        n = len(self._codes.cotangent(0))
        if regular:
            doubtful = 0 < fewest < n and len({tuple(self._regular[layout].tolist()) for layout in regular}) > 1
            exact = [layout for layout in regular if layout in self._exact]
            return [] if doubtful else [*(exact or regular)]
        owners = ((dim, self._owner(dim)) for dim in self._digits)
        return [Ragged(dim, n, owner) for dim, owner in owners if not (owner == n).any()]

    def is_sure(self, layouts: Sequence[AnyLayout]) -> bool:
        """Whether these, of ``layouts()``, are exact, and give every entry that has a gradient to the same example."""
        first = layouts[0]
        exact = first in self._exact if isinstance(first, Layout) else self._digits_are_exact[first.dim]
        return exact and self.are_alike(layouts)

    def are_alike(self, layouts: Sequence[AnyLayout]) -> bool:
        """Whether these give every entry that has a gradient to the same example."""
        return all(self._agree_on_owners(layouts[0], other) for other in layouts[1:])

    def sizes(self, layout: AnyLayout) -> Tensor:
        """(n,): the largest entries of the examples' parts."""
        first = layout.examples_first(self._b)
        return in_pieces(_largest_entry, first.reshape(len(first), first.shape[1:].numel())).cpu()

    def confirmed(self, c: Tensor, scaled: Tensor) -> bool:
        """Whether the owners found entry by entry hold for another cotangent as well."""
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
        some = ~(largest <= self._rounding.nothing).cpu()
        if one.dim == other.dim:
            return not (some & (one.owners() != other.owners())).any()
        mine, theirs = one.owners()[:, None], other.owners()[None]
        return not (some & (mine != theirs if one.dim < other.dim else (mine != theirs).T)).any()

    def _fits(self, layout: Layout, aside: Tensor, c: Tensor, scaled: Tensor) -> tuple[bool, bool]:
        """Whether it agrees exactly, and whether it does nearly."""
        first, first_scaled = (layout.examples_first(t).reshape(len(c), -1) for t in (self._b, scaled))
        if aside.any() and (aside & torch.isfinite(first_scaled).all(1).cpu()).any():
            return False, False
        exact, near = self._agrees(first, first_scaled, c)
        return bool((exact | aside).all()), bool((near | aside).all())

    def _agrees(self, plain: Tensor, scaled: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """For each row: whether ``scaled`` is ``factor`` times ``plain``.

        First up to the row's own rounding, then also up to what other rows' may leave behind.
        """
        factor = factor.to(in_sum_dtype(plain[:0]))
        size = in_pieces(length, plain)
        error = in_pieces(lambda a, b, c: length(b / c[:, None] - a), plain, scaled, factor)
        rounding, factor = self._rounding, factor.abs()
        largest = _largest(size)
        others = rounding.others * (_largest(factor * size) / factor + largest)
        others = others.clamp(max=rounding.most * largest)
        own = rounding.own * size + rounding.grain * plain.shape[1] ** 0.5 * (1 + 1 / factor)
        return (error <= own).cpu(), (error <= own + others).cpu()

    def _digit(self, dim: int, scaled: Tensor) -> Tensor:
        """(size,): each entry's digit along ``dim``, -1 where it is none, -2 where there is no gradient."""
        plain, scaled = entries(self._b, dim), entries(scaled, dim)
        digit = self._codes.digit(in_pieces(_ratio, plain, scaled))
        exact, agrees = self._agrees(plain, scaled, self._codes.value(digit.clamp(min=0).cpu()))
        without = (in_pieces(_largest_entry, plain) + in_pieces(_largest_entry, scaled) == 0).cpu()
        self._digits_are_exact[dim] &= bool((exact | without).all())
        return torch.where(without, -2, torch.where(agrees, digit.cpu(), -1))

    def _owner(self, dim: int) -> Tensor:
        """(size,): example that each entry belongs to; -1 where it has no gradient, n where it is no single one's."""
        digits = self._digits[dim]
        without = torch.stack([digit == -2 for digit in digits]).all(0)
        return torch.where(without, -1, self._codes.owner(digits))


def _unit(b: Tensor) -> float:
    """1; or a power of two that brings numbers so small that their squares vanish to where they do not."""
    largest = float(b.abs().max()) if b.numel() else 0.0
    most = 1000 if b.dtype == torch.float64 else 100
    return 2.0 ** min(-math.frexp(largest)[1], most) if 0 < largest < SMALL else 1.0


def _not_finite(layout: Layout, b: Tensor) -> Tensor:
    """(n,): which examples' b is not finite."""
    first = layout.examples_first(b)
    if not first.numel():
        return torch.zeros(len(first)) > 0
    return ~_largest_entry(first.reshape(len(first), -1)).isfinite().cpu()


def length(rows: Tensor) -> Tensor:
    """Returns the norm of each row."""
    return torch.linalg.vector_norm(rows, dim=1)


def _largest_entry(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, ord=torch.inf, dim=1) if rows.shape[1] else rows.new_zeros(len(rows))


def _ratio(plain: Tensor, scaled: Tensor) -> Tensor:
    """By what factor rows differ, also where the squares of their entries vanish."""
    unit = _largest_entry(plain)[:, None]
    plain = plain / unit
    return (plain * (scaled / unit)).sum(1) / plain.square().sum(1)


def in_pieces(of_rows: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A function of rows, some rows at a time: temporaries as large as the whole would weigh in the peak of memory."""
    step = max(1, CHUNK_FLOATS // 4 // max(1, tensors[0].shape[1]))
    pieces = zip(*(tensor.split(step) for tensor in tensors), strict=True)
    return torch.cat([of_rows(*map(in_sum_dtype, piece)) for piece in pieces])


def _largest(sizes: Tensor) -> float:
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def entries(tensor: Tensor, dim: int) -> Tensor:
    """(.., size, ..) -> (size, everything else)."""
    rows = tensor.movedim(dim, 0)
    return rows.reshape(len(rows), rows.shape[1:].numel())


def _candidates(shape: torch.Size, n: int, dims: Sequence[int]) -> Iterator[Layout]:
    for dim in dims:
        if shape[dim] == 0 or shape[dim] % n:
            continue
        positions = shape[dim] // n
        # Consecutive positions first, interleaved next, then what lies between.
        befores = [1, positions] + [k for k in range(2, positions) if positions % k == 0]
        yield from (Layout(dim, before, n, positions // before) for before in dict.fromkeys(befores))
