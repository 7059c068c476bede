# SPDX-License-Identifier: Apache-2.0
"""Whether layouts that earlier batches taught hold on this batch, too: shown by one further backward.

With cotangent ones the backward gives b, with a code for each loss it gives s. Where a layout is right, example i's
part of s is code i times its part of b. Of each part only two numbers are kept, taken as the backwards run: its length,
and its product with a fixed random direction; so that the two gradients need not be there at once.

What slips through. A part that holds entries of another example with another code differs by half of these or more, so
that the product agrees with a probability below ``1e-5 / r`` in float32, where r is the share of these entries in the
part's length. Entries of an example with the same code agree. Up to 32 examples have codes of their own; of more, two
share one with a probability of 1/32 (1/8 in float16, above 8 examples). So two examples that have changed places slip
through one batch with 1/32, and through the next as rarely, since codes are drawn anew; of an order that is wrong for
k pairs all of them do so with about 32^-k. What slips through all the same meets a rehearsal, which shows that losses
and rows do not depend on other examples, and on one batch in 64 of a known path a spot check, which measures with as
many digits as it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops import AnyLayout, Layout, Ragged
from ..ops._base import is_half
from .measure import Codes, Rounding, entries, fresh_generator, in_pieces, length

if TYPE_CHECKING:
    from .calls import Call


class Disagreement(Exception):
    """The layouts of this batch are others than expected: they must be measured."""


@dataclass(frozen=True)
class Irregular:
    """A call whose examples lie along ``dim`` in another order on every batch: it is read from the codes."""

    dim: int


Expected = Layout | Irregular


class Prediction:
    """The layouts that are expected of some calls, and what one batch's gradients say of them.

    Give the gradients of every backward with the cotangents ``coded`` to ``note``, then those of the plain one to
    ``layout``, and ``conclude``.

    Args:
        calls: those whose gradients will come.
        expected: the layout of each.
        cotangent: (n,) of the plain backward.
        rounding: how far gradients may be off.
    """

    def __init__(self, calls: Sequence[Call], expected: Sequence[Expected], cotangent: Tensor, rounding: Rounding):
        self.calls, self.cotangent = calls, cotangent
        self.expected, self._rounding = expected, rounding
        self._codes = Codes(len(cotangent), rounding.exponents)
        digits = self._codes.num_digits if any(isinstance(layout, Irregular) for layout in expected) else 1
        self._factors = [self._codes.cotangent(k) for k in range(digits)]
        self._coded: list[dict[int, Tensor]] = [{} for _ in self._factors]
        self._plain: dict[int, Tensor] = {}

    @property
    def coded(self) -> list[Tensor]:
        """The cotangents of the further backwards; one, if all layouts are regular."""
        return [factor.to(self.cotangent) * self.cotangent for factor in self._factors]

    def note(self, k: int, number: int, s: Tensor) -> None:
        """The gradient in a call's output has come, of the backward with the k-th cotangent."""
        if k == 0 or isinstance(self.expected[number], Irregular):
            self._coded[k][number] = self._sketch(number, s)

    def layout(self, number: int, b: Tensor) -> AnyLayout:
        """The layout of a call, whose gradient of the plain backward has come; not yet proved."""
        sketch, expected = self._sketch(number, b), self.expected[number]
        if isinstance(expected, Irregular):
            return Ragged(expected.dim, len(self.cotangent), self._owner(number, sketch, b))
        self._plain[number] = sketch
        return expected

    def conclude(self) -> None:
        """Raise ``Disagreement`` unless all gradients that have come bear the layouts out."""
        agree, bad, _ = self._verdicts()
        if not (agree | bad).all():
            raise Disagreement

    @property
    def teaches(self) -> bool:
        """Whether all calls bear their layouts out, and every example had a gradient in each."""
        agree, bad, some = self._verdicts()
        return len(self._plain) == len(self.calls) and bool((agree & ~bad & some).all())

    def _verdicts(self) -> tuple[Tensor, Tensor, Tensor]:
        """(calls, n) each: whether the parts agree; are not finite in either backward; are more than nothing."""
        numbers = list(self._plain)
        if not numbers:
            none = torch.ones(0) > 0
            return none, none, none
        plain, coded = (_together([sketches[k] for k in numbers]) for sketches in (self._plain, self._coded[0]))
        grain = torch.tensor([self._grain(self.calls[k].shape.numel() / len(self.cotangent)) for k in numbers])
        return *self._agree(plain, coded, self._factors[0].double(), grain.double()[:, None]), plain[:, 1] > 0

    def _grain(self, size: float) -> float:
        return self._rounding.grain * size**0.5

    def _agree(self, plain: Tensor, coded: Tensor, factor: Tensor, grain: Tensor | float) -> tuple[Tensor, Tensor]:
        """Whether sketches ``coded`` (.., 2, m) are of ``factor`` times what ``plain`` are; where none are finite."""
        size, scaled = plain[..., 1, :], coded[..., 1, :] / factor.abs()
        most = self._rounding.own * size + grain * (1 + 1 / factor.abs())
        product = (coded[..., 0, :] / factor - plain[..., 0, :]).abs() <= most
        return product & ((scaled - size).abs() <= most), ~size.isfinite() & ~scaled.isfinite()

    def _owner(self, number: int, plain: Tensor, b: Tensor) -> Tensor:
        """(size,): the example that each entry along the dimension belongs to, -1 where there is no gradient."""
        assert self._coded[0], "the further backwards come first"
        plain = plain.cpu().double()
        expected = self.expected[number]
        assert isinstance(expected, Irregular)
        grain = self._grain(b.numel() / max(1, b.shape[expected.dim]))
        digits = []
        for sketches in self._coded:
            coded = sketches[number].cpu().double()
            without = (plain[1] == 0) & (coded[1] == 0)
            digit = self._codes.digit(coded[1] / plain[1] * (coded[0] * plain[0]).sign())
            agree, _ = self._agree(plain, coded, self._codes.value(digit.clamp(min=0)).double(), grain)
            digits.append(torch.where(without, -2, torch.where(agree, digit, -1)))
        without = torch.stack([digit == -2 for digit in digits]).all(0)
        owner = torch.where(without, -1, self._codes.owner(digits))
        if (owner == len(self.cotangent)).any():
            raise Disagreement
        return owner

    def _sketch(self, number: int, gradient: Tensor) -> Tensor:
        """(2, m): of each example's part, or of each entry's, its product with the random direction and its length."""
        expected, gradient = self.expected[number], gradient.detach()
        if isinstance(expected, Irregular):
            rows = entries(gradient, expected.dim)
        else:
            rows = expected.examples_first(gradient).reshape(expected.num_examples, -1)
        if is_half(rows):
            return torch.stack([in_pieces(_product, rows), in_pieces(length, rows)])
        return torch.stack([_product(rows), length(rows)])


def _product(rows: Tensor) -> Tensor:
    return rows @ _direction(rows.shape[1], rows.dtype, rows.device)


@lru_cache(maxsize=64)
def _direction(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size,) normal numbers that nobody else knows."""
    return torch.randn(size, generator=fresh_generator(), dtype=torch.float32, device="cpu").to(device, dtype)


def _together(sketches: Sequence[Tensor]) -> Tensor:
    """(calls, 2, n) in float64."""
    widest = torch.float64 if any(sketch.dtype == torch.float64 for sketch in sketches) else torch.float32
    return torch.stack([sketch.to(widest) for sketch in sketches]).cpu().double()
