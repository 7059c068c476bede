# SPDX-License-Identifier: Apache-2.0
"""Checks, by one more backward, that layouts learned from earlier batches, or guessed, hold on this batch.

With cotangent ones the backward gives b, with a code for each loss it gives s. If a layout is right, example i's part
of s is code i times its part of b. Only two numbers of each part are kept, computed as the backwards run: its length,
and its product with a fixed random direction. So the two gradients need not be in memory at once.

What may be missed. A part that holds entries of another example with another code differs by half of these or more, so
that the product agrees with a probability below ``1e-5 / r`` in float32, where r is the share of these entries in the
part's length. Entries of an example with the same code agree. Up to 32 examples have different codes; of more, two
share one with a probability of 1/32 (1/8 in float16, above 8 examples). So two examples that have changed places are
missed on one batch with probability 1/32, and as rarely on the next, because codes are drawn again; an order that is
wrong for k pairs is missed with a probability of about 32^-k. Another regular layout is wrong for nearly all examples.
Two further checks follow: rehearsals show that losses and rows do not depend on other examples, and one batch in 64 of
a known path gets a spot check, which measures with every digit that is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ...ops import AnyLayout, Layout, Ragged
from ...ops._base import is_half
from ...support.own_draws import randn
from ..parallel.ranks import ALONE, Peers
from ..recording.backward import OpenNodes
from .codes import Codes, Rounding, system_seed
from .fit import entries, in_pieces, length

if TYPE_CHECKING:
    from ..recording.calls import Call


class Disagreement(Exception):
    """Raised if the layouts of this batch differ from those expected, so that they must be measured."""


@dataclass(frozen=True)
class Irregular:
    """The layout of a call with examples along ``dim`` in another order on every batch, which the codes reveal."""

    dim: int


Expected = Layout | Irregular
Options = tuple[Expected, ...]  # several regular layouts, or one of either kind


class FoundLayouts(Protocol):
    """The layouts of one batch, as the backward that computes the rows needs them."""

    @property
    def places(self) -> Sequence[Call]:
        """Returns the calls, in order, and perhaps cuts: a backward passes their gradients to `layout`."""
        ...

    @property
    def may_fail(self) -> bool:
        """Returns whether this backward must still confirm the layouts, so that the graph must stay."""
        ...

    def layout(self, number: int, b: Tensor) -> AnyLayout:
        """Returns the layout of a place, given its gradient."""
        ...

    def conclude(self) -> None:
        """Raises ``Disagreement`` unless all gradients so far confirm the layouts, on all ranks."""


@dataclass(frozen=True)
class ProvenLayouts:
    """Layouts that need no confirmation."""

    places: Sequence[Call]
    layouts: Sequence[AnyLayout]
    may_fail: bool = False

    def layout(self, number: int, b: Tensor) -> AnyLayout:
        return self.layouts[number]

    def conclude(self) -> None:
        pass


class GuardedLayouts:
    """Layouts that hold while some nodes of the graph have no gradient, as in all batches that proved them."""

    may_fail = True

    def __init__(self, places: Sequence[Call], layouts: Sequence[AnyLayout], nodes: Iterable[Node]):
        self.places, self._layouts, self._nodes = places, layouts, OpenNodes(nodes)

    def layout(self, number: int, b: Tensor) -> AnyLayout:
        return self._layouts[number]

    def conclude(self) -> None:
        self._nodes.stop()
        if self._nodes.any_open():
            raise Disagreement


class Prediction:
    """The expected layouts of some calls, compared with the gradients of one batch.

    Pass the gradients of every backward with the cotangents ``coded`` to ``note``, then those of the plain one to
    ``layout``, and call ``conclude``.

    Args:
        places: the calls and cuts with gradients to compare.
        options: for each, the layouts that it may have, of which exactly one must agree.
        cotangent: (n,) of the plain backward.
        rounding: how much gradients may differ between two backwards.
        guessed: True if no earlier batches had these layouts; then gradients must be finite to confirm them.
        peers: ranks that must come to the same conclusion.
    """

    may_fail = True

    def __init__(
        self,
        places: Sequence[Call],
        options: Sequence[Options],
        cotangent: Tensor,
        rounding: Rounding,
        *,
        guessed: bool = False,
        peers: Peers = ALONE,
    ):
        self._peers, self._failed = peers, False
        self.places, self.cotangent = places, cotangent
        self.options, self._rounding, self._guessed = [*options], rounding, guessed
        self._codes = Codes(len(cotangent), rounding.exponents)
        digits = self._codes.num_digits if any(isinstance(layout, Irregular) for layout in self.expected) else 1
        self._factors = [self._codes.cotangent(k) for k in range(digits)]
        self._coded: list[dict[int, list[Tensor]]] = [{} for _ in self._factors]
        self._plain: dict[int, Tensor] = {}

    @property
    def expected(self) -> list[Expected]:
        """Returns the first of each call's layouts; the only one, once its plain gradient was seen."""
        return [options[0] for options in self.options]

    @property
    def coded(self) -> list[Tensor]:
        """Returns the cotangents of the coded backwards; one, if all layouts are regular."""
        return [factor.to(self.cotangent) * self.cotangent for factor in self._factors]

    def note(self, k: int, number: int, s: Tensor) -> None:
        """Adds the gradient in a call's output, of the backward with the k-th cotangent."""
        options = self.options[number]
        if k == 0 or isinstance(options[0], Irregular):
            self._coded[k][number] = [self._sketch(option, s) for option in options]

    def layout(self, number: int, b: Tensor) -> AnyLayout:
        """Returns the layout of a call, given its gradient of the plain backward; not yet confirmed."""
        options = self.options[number]
        plain = [self._sketch(option, b) for option in options]
        if isinstance(options[0], Irregular):
            return Ragged(options[0].dim, len(self.cotangent), self._owner(number, plain[0], b))
        k = self._one_that_agrees(number, plain) if len(options) > 1 else 0
        layout = options[k]
        assert isinstance(layout, Layout)
        self.options[number], self._plain[number] = (layout,), plain[k]
        self._coded[0][number] = [self._coded[0][number][k]]
        return layout

    def _one_that_agrees(self, number: int, plain: Sequence[Tensor]) -> int:
        """Returns which of several layouts agrees; any, if there is no gradient."""
        coded = self._coded[0][number]
        if not (plain[0].any() or coded[0].any()):
            return 0
        factor = self._factors[0].double()
        root = self._root_entries(number)
        agreeing = []
        for k, pair in enumerate(zip(plain, coded, strict=True)):
            a, b = (sketch.cpu().double() for sketch in pair)
            if self._agree(a, b, factor, root)[0].all():
                agreeing.append(k)
        if len(agreeing) != 1:
            self._fail()
            return 0
        return agreeing[0]

    def _fail(self) -> None:
        """Raises ``Disagreement``; where other ranks wait for the rest of the backward, only ``conclude`` does."""
        if self._peers.size == 1:
            raise Disagreement
        self._failed = True

    def conclude(self) -> None:
        agree, not_finite, _ = self._verdicts()
        confirmed = bool((agree if self._guessed else agree | not_finite).all())
        if not self._peers.all(confirmed and not self._failed):
            raise Disagreement

    @property
    def teaches(self) -> bool:
        """True if the layouts of all calls are confirmed, and every example had a gradient in each call."""
        agree, not_finite, nonzero = self._verdicts()
        return self._peers.all(len(self._plain) == len(self.places) and bool((agree & ~not_finite & nonzero).all()))

    def _verdicts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns masks (calls, n) of the parts that agree, are not finite in either backward, and are not zero."""
        numbers = list(self._plain)
        if not numbers:
            empty = torch.zeros(0, dtype=torch.bool, device="cpu")
            return empty, empty, empty
        plain = _stacked([self._plain[k] for k in numbers])
        coded = _stacked([self._coded[0][k][0] for k in numbers])
        roots = torch.tensor([*map(self._root_entries, numbers)], dtype=torch.float64, device="cpu")[:, None]
        return *self._agree(plain, coded, self._factors[0].double(), roots), plain[:, 1] > 0

    def _root_entries(self, number: int) -> float:
        """Returns the root of the number of entries that an example has in a place."""
        return (self.places[number].shape.numel() / len(self.cotangent)) ** 0.5

    def _agree(self, plain: Tensor, coded: Tensor, factor: Tensor, root: Tensor | float) -> tuple[Tensor, Tensor]:
        """Returns where sketches ``coded`` (.., 2, m) fit ``factor`` times ``plain``, and where neither is finite."""
        size, scaled = plain[..., 1, :], coded[..., 1, :] / factor.abs()
        most = self._rounding.allowed(size, factor.abs(), root)
        product = (coded[..., 0, :] / factor - plain[..., 0, :]).abs() <= most
        return product & ((scaled - size).abs() <= most), ~size.isfinite() & ~scaled.isfinite()

    def _owner(self, number: int, plain: Tensor, b: Tensor) -> Tensor:
        """Returns (size,), the example of each entry along the dimension; -1 if it has no gradient."""
        assert self._coded[0], "the coded backwards come first"
        plain = plain.cpu().double()
        expected = self.expected[number]
        assert isinstance(expected, Irregular)
        root = (b.numel() / max(1, b.shape[expected.dim])) ** 0.5
        digits = []
        for sketches in self._coded:
            coded = sketches[number][0].cpu().double()
            without = (plain[1] == 0) & (coded[1] == 0)
            digit = self._codes.digit(coded[1] / plain[1] * (coded[0] * plain[0]).sign())
            agree, _ = self._agree(plain, coded, self._codes.value(digit.clamp(min=0)).double(), root)
            digits.append(torch.where(without, -2, torch.where(agree, digit, -1)))
        without = torch.stack([digit == -2 for digit in digits]).all(0)
        owner = torch.where(without, -1, self._codes.owner(digits))
        shared = owner == len(self.cotangent)
        if shared.any():
            self._fail()
            owner = torch.where(shared, -1, owner)
        return owner

    def _sketch(self, expected: Expected, gradient: Tensor) -> Tensor:
        """Returns (2, m): product with the random direction, and length, of each example's part or of each entry's."""
        gradient = gradient.detach()
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
    """Returns (size,) normal numbers, seeded by the system; not by the ranks in common, because they are kept."""
    generator = torch.Generator().manual_seed(system_seed())
    return randn(size, generator=generator, dtype=torch.float32).to(device, dtype)


def _stacked(sketches: Sequence[Tensor]) -> Tensor:
    """Returns the sketches as (calls, 2, n) in float64."""
    widest = torch.float64 if any(sketch.dtype == torch.float64 for sketch in sketches) else torch.float32
    return torch.stack([sketch.to(sketches[0].device, widest) for sketch in sketches]).cpu().double()
