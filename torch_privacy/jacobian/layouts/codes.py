# SPDX-License-Identifier: Apache-2.0
"""Codes that separate examples in backwards, and how much rounding may blur them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from ...support.own_draws import randint, randperm

# Rounding of an example's b, and of other examples' terms that cancel, in units of the coarsest type's rounding.
ROUNDING = 64
CANCELLATION = 16


# A source of seeds that several ranks have in common, while they compute together.
_SHARED: ContextVar[random.Random | None] = ContextVar("shared_seeds", default=None)


def fresh_generator() -> torch.Generator:
    """Returns a generator for checks, seeded by the system; the user's random state stays as it is.

    Inside ``shared_seeds`` it is the same on all ranks, because cotangents must be.
    """
    seeds = _SHARED.get()
    return torch.Generator().manual_seed(system_seed() if seeds is None else seeds.getrandbits(62))


def system_seed() -> int:
    """Returns a seed from the system."""
    return torch.Generator().seed()


@contextmanager
def shared_seeds(seed: int) -> Iterator[None]:
    """Seeds the generators for checks from one number inside."""
    token = _SHARED.set(random.Random(seed))
    try:
        yield
    finally:
        _SHARED.reset(token)


@dataclass(frozen=True)
class Rounding:
    """Bounds on how much an example's b may differ between two backwards, given the floating-point types in the graph.

    Multiplying by powers of two commutes with rounding. What remains: sums in an order that changes from run to run,
    other examples' terms that cancel only up to rounding, and numbers too small for their type.
    """

    relative: float  # relative to the example's b
    cancellation: float  # relative to the largest of the examples' b, times their factors
    max_cancellation: float  # upper limit of that, relative to the largest b without factors
    absolute: float  # for each entry
    exponents: int  # how many powers of two are in the range of the type
    negligible: float  # entries up to this count as zero

    def allowed(self, length: Tensor, factor: Tensor, root_entries: Tensor | float) -> Tensor:
        """Returns how far apart b and s / c may be, for an example's parts b and s of two gradients and its factor c.

        This decides, for every way to compare the two, whether they agree: entry by entry, or by length and product.

        Args:
            length: of b.
            factor: |c|.
            root_entries: square root of the number of entries of b.
        """
        return self.relative * length + self.absolute * root_entries * (1 + 1 / factor)

    @staticmethod
    def of(dtypes: Collection[torch.dtype]) -> Rounding:
        """Returns the rounding of the coarsest of these types, with the range of the narrowest."""
        infos = [torch.finfo(dtype) for dtype in dtypes]
        eps = max(info.eps for info in infos)
        smallest = max(info.smallest_normal * info.eps for info in infos)
        exponents = 4 if torch.float16 in dtypes else 16
        negligible = 2**13 * smallest if smallest < 1e-30 else 0.0  # in float16 small gradients are not far above
        max_cancellation = 0.02 if eps < 1e-5 else 0.002
        return Rounding(
            min(ROUNDING * eps, 0.02), CANCELLATION * eps, max_cancellation, 16 * smallest, exponents, negligible
        )


class Codes:
    """A different number for every example, encoded digit by digit in cotangents of signed powers of two.

    One digit is one cotangent. It has ``2 * exponents`` values: the powers of two around 1, with both signs.
    """

    def __init__(self, n: int, exponents: int):
        self._generator = fresh_generator()
        self._exponents, self._base = exponents, 2 * exponents
        self.num_digits = 1
        while self._base**self.num_digits < n:
            self.num_digits += 1
        self._codes = randperm(self._base**self.num_digits, generator=self._generator)[:n]
        self._in_order, self._order = self._codes.sort()

    def cotangent(self, k: int) -> Tensor:
        """Returns (n,), the factors that encode the k-th digit of every example."""
        return self.value(self._codes // self._base**k % self._base)

    def independent(self) -> Tensor:
        """Returns (n,), random factors that are independent of the codes."""
        return self.value(randint(self._base, self._codes.shape, generator=self._generator))

    def value(self, digit: Tensor) -> Tensor:
        """Returns the factor that encodes a digit."""
        return torch.ldexp(1.0 - 2.0 * (digit % 2), digit // 2 - self._exponents // 2)

    def digit(self, factor: Tensor) -> Tensor:
        """Returns the digit of the nearest factor; -1 if there is none."""
        exponent = factor.abs().log2().round() + self._exponents // 2
        digit = 2 * exponent + (factor < 0)
        return torch.where((exponent >= 0) & (exponent < self._exponents), digit, -1).long()

    def owner(self, digits: Sequence[Tensor]) -> Tensor:
        """Returns the numbers of the examples with these digits; n if there is no such example."""
        codes = sum((digit * self._base**k for k, digit in enumerate(digits)), torch.zeros_like(digits[0]))
        codes = torch.where(torch.stack([digit < 0 for digit in digits]).any(0), -1, codes)
        place = torch.searchsorted(self._in_order, codes).clamp(max=len(self._codes) - 1)
        return torch.where(self._in_order[place] == codes, self._order[place], len(self._codes))
