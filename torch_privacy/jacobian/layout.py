# SPDX-License-Identifier: Apache-2.0
"""Which entries of an op's output belong to which example: measured by further backwards, never assumed.

With cotangent ones the backward gives b = Σᵢ ∂ℓᵢ/∂y, with cotangent c it gives Σᵢ cᵢ ∂ℓᵢ/∂y. Where an entry belongs to
example j alone the second is cⱼ times the first; an entry that several examples share fails that. The cⱼ are powers of
two with signs: multiplying by them commutes with rounding, so that the two agree bit for bit, or nearly, in any type.
Where no regular layout fits, the ratio of the two says entry by entry whose it is.

That an entry serves the loss of one example does not say that it was made from that example's data alone: a rehearsal
shows that, see ``_independence.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from .._validate import Refused
from ..ops import AnyLayout, Layout, Ragged
from .measure import Codes, Fitting, Rounding, fresh_generator
from .prediction import Expected, Irregular
from .torch_functions import Filled

if TYPE_CHECKING:
    from .calls import Call

# The layouts on a path are measured until this many batches have told them without doubt; then they are known.
PROOFS = 2
# A known path is measured again on one batch in so many, in case that not all of its branches could be seen.
SPOT_CHECK = 64

# Paths of one program that are remembered.
MOST_PATHS = 1000
IRREGULAR = "in no regular order"
# Powers of two by which losses are weighted, at most: 2^96, and what backwards make of it, is below what float32 holds.
MOST_EXPONENT = 96

Kind = tuple[int, str]
CallKind = tuple  # see ``kind_of_call``
Found = TypeVar("Found", bound=AnyLayout | Irregular)
Sizes = tuple[int, tuple[int, ...]]  # a batch's size, and the whole numbers met on the way


@dataclass(frozen=True)
class Footprint:
    """Bytes that a batch takes on a path; only what grows with it, so that one batch tells the same as another."""

    activations: float  # kept by autograd for the backward
    least: float  # held until the clipped sum, however that is done


NamesOf = Callable[[Tensor], tuple[str, ...]]
Look = Callable[[int, Tensor, AnyLayout], None]  # (number of a call, gradient in its output, layout)


class Layouts:
    """What earlier batches taught about the layout of every call on a path (see ``path``), and of every call alone.

    In a batch of one nothing can be told apart: what it teaches holds for batches of one alone.
    """

    def __init__(self) -> None:
        # All by whether batches of one have told, beside what larger ones have.
        self._proofs: dict[tuple[int, bool], tuple[list[Kind], int]] = {}
        self._by_call: dict[tuple[tuple, bool], tuple[Kind, int]] = {}
        self._batches: Counter[bool] = Counter()
        self._verified: Counter[tuple[tuple, bool]] = Counter()
        self._footprints: dict[tuple[int, bool], Footprint] = {}
        self._generator = fresh_generator()
        self.filled = Filled()
        self._paths: dict[int, list[tuple[Sizes, int]]] = {}  # program -> the sizes first met on each path, its number
        self._numbers = count()
        self._path_of = lru_cache(maxsize=1024)(self._find_path)

    def path(self, program: int, n: int, numbers: tuple[int, ...]) -> int:
        """Number of the path that a program takes with these whole numbers for n examples.

        The same as that of an earlier batch if every number is, or was a multiple of that batch's size and is the same
        multiple of this one's.
        """
        return self._path_of(program, n, numbers)

    def _find_path(self, program: int, n: int, numbers: tuple[int, ...]) -> int:
        known = self._paths.setdefault(program, [])
        here = n, numbers
        path = next((path for sizes, path in known if _grown(sizes, here)), None)
        if path is None:
            path = next(self._numbers)
            known.append((here, path))
            if len(known) > MOST_PATHS:  # numbers drawn at random: those of long ago do not come again
                self._forget(known.pop(0)[1])
        return path

    def _forget(self, path: int) -> None:
        for one in (True, False):
            self._proofs.pop((path, one), None)
            self._footprints.pop((path, one), None)

    def footprint(self, path: int, n: int) -> Footprint | None:
        """What n examples on a path take, where an earlier batch has told."""
        known = next((self._footprints[path, one] for one in told_by(n) if (path, one) in self._footprints), None)
        return None if known is None else Footprint(n * known.activations, n * known.least)

    def note_footprint(self, path: int, n: int, footprint: Footprint) -> None:
        """What a batch of n took."""
        self._footprints[path, n == 1] = Footprint(footprint.activations / n, footprint.least / n)

    def settled(self, n: int) -> bool:
        """Whether enough batches were measured to trust the model with n examples."""
        return any(self._batches[one] >= PROOFS for one in told_by(n))

    def verified(self, calls: Iterable[CallKind], n: int) -> bool:
        """Whether enough batches with calls of these kinds were compared with native backwards, to trust one of n."""
        return all(any(self._verified[kind, one] >= PROOFS for one in told_by(n)) for kind in calls)

    def note_verified(self, calls: Iterable[CallKind], n: int) -> None:
        """A batch of n with calls of these kinds was compared."""
        self._verified.update({(kind, n == 1) for kind in calls})

    def recall(self, path: int, calls: Sequence[Call], n: int) -> list[Layout] | None:
        """The layout of every call for a batch of n, if enough batches have told of this path."""
        proofs = (self._proofs.get((path, one), ([], 0)) for one in told_by(n))
        kinds = next((kinds for kinds, count in proofs if count >= PROOFS), None)
        if kinds is None:
            return None
        recalled = [_recall(kind, call, n) for kind, call in zip(kinds, calls, strict=True)]
        return _complete(layout if isinstance(layout, Layout) else None for layout in recalled)

    def expect(self, calls: Sequence[Call], names_of: NamesOf, n: int) -> list[Expected] | None:
        """The layout that every call has had on any path so far, if enough batches have told: yet to be verified."""
        return _complete(self.expect_of(call, names_of, n) for call in calls)

    def expect_of(self, call: Call, names_of: NamesOf, n: int) -> Expected | None:
        """The layout that a call has had so far."""
        key = _key(call, names_of)
        known = (self._by_call.get((key, one), (None, 0)) for one in told_by(n))
        kind = next((kind for kind, count in known if count >= PROOFS), None)
        return None if kind is None else _recall(kind, call, n)

    def spot_check_is_due(self) -> bool:
        """Whether chance has picked this batch to look again at what is known."""
        return not torch.randint(SPOT_CHECK, (), generator=self._generator)

    def measure(
        self, path: int, measurement: Measurement, portions: Sequence[Sequence[int]], look: Look
    ) -> list[AnyLayout]:
        """The layout of every call on a path. See ``learn``."""
        self._batches[measurement.n == 1] += 1
        for portion in portions:
            measurement.run(portion, look)
        return [measurement.options[number][0] for number in range(len(measurement.calls))]

    def learn(self, path: int, measurement: Measurement, names_of: NamesOf) -> None:
        """One batch that leaves no doubt is a proof; another answer than before starts the count anew."""
        if measurement.in_doubt:
            return
        one, calls = measurement.n == 1, measurement.calls
        found = [measurement.options[number] for number in range(len(calls))]
        kinds = [_kind(options[0]) if one or len(options) == 1 else None for options in found]
        by_call: dict[tuple, Kind | None] = {}
        for call, kind in zip(calls, kinds, strict=True):
            key = _key(call, names_of)
            by_call[key] = kind if by_call.get(key, kind) == kind else None
        for key, kind in by_call.items():
            if kind is not None:
                before, count = self._by_call.get((key, one), (kind, 0))
                self._by_call[key, one] = kind, count + 1 if before == kind else 1
        regular = [kind for kind in kinds if kind is not None and kind[1] != IRREGULAR]
        if len(regular) == len(kinds):  # where the data decide, the path says nothing
            self._prove(path, one, regular)

    def note_bearing_out(self, path: int, layouts: Sequence[Expected], n: int) -> None:
        """A batch of n, with a gradient for every example in every call, has borne out these layouts on a path."""
        self._batches[n == 1] += 1
        regular = [layout for layout in layouts if isinstance(layout, Layout)]
        if len(regular) == len(layouts):
            self._prove(path, n == 1, [_kind(layout) for layout in regular])

    def _prove(self, path: int, one: bool, kinds: list[Kind]) -> None:
        before, count = self._proofs.get((path, one), (kinds, 0))
        self._proofs[path, one] = (kinds, count + 1 if before == kinds else 1)


class Measurement:
    """Where the examples sit in the gradients of one batch, told by backwards with different cotangents.

    Args:
        calls: those whose outputs are looked at.
        names_of: tensor -> the parameters behind it.
        gradients: (n,) cotangent, numbers of some calls -> the gradients in their outputs.
        losses: (n,).
        dtypes: gives the floating-point types on the way.
        known: gives the layout that a call has had so far, where that will do if several fit.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        names_of: NamesOf,
        gradients: Callable[[Tensor, Sequence[int]], Sequence[Tensor | None]],
        losses: Tensor,
        dtypes: Callable[[], Collection[torch.dtype]],
        known: Callable[[Call], Expected | None] = lambda call: None,
    ):
        self.calls, self.n = calls, len(losses)
        self.options: dict[int, list[AnyLayout]] = {}  # of each call that was looked at; they say the same of it
        self.in_doubt = False  # some examples' gradients are not finite
        self._names_of, self._gradients, self._losses = names_of, gradients, losses
        self._known = known
        self._rounding = Rounding.of(dtypes())

    def run(self, portion: Sequence[int], look: Look | None = None) -> None:
        """Find the layouts of some of the calls, and show each one's gradient with its layout to ``look``."""
        plain = self._gradients_of(torch.ones_like(self._losses), portion)
        fittings = self._fit(plain, portion)
        for number, fitting, g in zip(portion, fittings, plain, strict=True):
            options = fitting.layouts()
            if not fitting.is_sure(options):
                options = self._settled(number, fitting, options)
            self.options[number] = options
            self.in_doubt |= bool(fitting.aside)
            if look is not None:
                look(number, g, options[0])

    def agrees_in_part(self, known: Sequence[AnyLayout], portions: Sequence[Sequence[int]]) -> bool:
        """Whether one of the portions, drawn at random, has the layouts that are known."""
        portion = portions[int(torch.randint(len(portions), (), generator=fresh_generator()))]
        self.run(portion)
        regular = {
            number: [option for option in options if isinstance(option, Layout)]
            for number, options in self.options.items()
        }
        return all(known[number] in options for number, options in regular.items())

    def _fit(self, plain: Sequence[Tensor], portion: Sequence[int], weights: Tensor | float = 1.0) -> list[Fitting]:
        """What agrees with further backwards; refuses where nothing does. ``plain`` are those with these weights."""
        codes = Codes(self.n, self._rounding.exponents)
        dims = [_example_dims(self.calls[number]) for number in portion]
        fittings = [Fitting(g, d, codes, self._rounding) for g, d in zip(plain, dims, strict=True)]
        for k in range(codes.num_digits if self.n > 1 else 0):
            scaled = self._gradients_of(codes.cotangent(k) * weights, portion)
            for fitting, g in zip(fittings, scaled, strict=True):
                fitting.narrow(k, g)
            del scaled
        found = [fitting.layouts() for fitting in fittings]
        for number, options in zip(portion, found, strict=True):
            if not options:
                raise Refused(_coupled(self.calls[number], self._names_of, self.n))
        if any(isinstance(options[0], Ragged) for options in found):
            c = codes.independent()
            for number, fitting, g in zip(portion, fittings, self._gradients_of(c * weights, portion), strict=True):
                if not fitting.confirmed(c, g):
                    raise Refused(_coupled(self.calls[number], self._names_of, self.n))
        return fittings

    def _settled(self, number: int, fitting: Fitting, options: list[AnyLayout]) -> list[AnyLayout]:
        """The one of several layouts that holds; where they fit since one example's gradient outweighs the others'.

        It is the one that the call has had so far, or the one that is left when the losses are weighted so that all
        examples' gradients are of one size; whichever of the layouts that size is taken from.
        """
        call = self.calls[number]
        known = self._known(call)
        if known in [option for option in options if isinstance(option, Layout)]:
            return [option for option in options if option == known]
        left: list[AnyLayout] = []
        for option in options:
            weights = _equalizing(fitting.sizes(option))
            again = self._fit(self._gradients_of(weights, [number]), [number], weights)[0]
            found = again.layouts()
            left += found[:1]
            is_one = again.are_alike([*found, *left]) and (isinstance(found[0], Ragged) or found[0] in options)
            if not is_one or type(found[0]) is not type(option):
                raise Refused(_ambiguous(call, self._names_of, self.n))
        return left[:1]

    def _gradients_of(self, c: Tensor, portion: Sequence[int]) -> list[Tensor]:
        """Gradients in the calls' outputs; zeros where the losses do not depend on one."""
        return [
            self.calls[number].output.gradient(g, self._losses)
            for number, g in zip(portion, self._gradients(c.to(self._losses), portion), strict=True)
        ]


def told_by(n: int) -> tuple[bool, ...]:
    """Whose teachings hold for a batch of n, the best first: those of batches of one (True) for such batches alone."""
    return (False, True) if n == 1 else (False,)


def _grown(before: Sizes, now: Sizes) -> bool:
    """Whether some sizes are what others become when the batch grows or shrinks; one of 1 does not tell which grow."""
    (n, numbers), (m, others) = before, now
    return all(v == w or (n > 1 and not v % n and v // n * m == w) for v, w in zip(numbers, others, strict=True))


def _complete(layouts: Iterable[Found | None]) -> list[Found] | None:
    """All of them, or None if one is missing."""
    found = [*layouts]
    complete = [layout for layout in found if layout is not None]
    return complete if len(complete) == len(found) else None


def _equalizing(sizes: Tensor) -> Tensor:
    """(n,) powers of two that bring all sizes near the largest, and that near 1 if it is far below."""
    told = sizes.double().isfinite() & (sizes > 0)
    sizes = torch.where(told, sizes.double(), 1)
    largest = sizes[told].max().clamp(min=2.0**-8) if told.any() else sizes.new_ones(())
    exponents = (largest / sizes).log2().round().clamp(-MOST_EXPONENT, MOST_EXPONENT)
    return torch.where(told, exponents.exp2(), 1)


def kind_of_call(call: Call) -> CallKind:
    """An op and how it meets its parameters, less the sizes."""
    return (call.op, len(call.shape), *((type(use).__name__, use.weight.shape) for use in call.uses))


@dataclass(frozen=True)
class Merging:
    """Losses taken together: ``assignment`` (m,) has the number below ``count`` of each one's group.

    A group's row is the mean of its members' rows. Groups of ``together`` consecutive losses each have regular layouts.
    """

    assignment: Tensor
    count: int
    together: int | None = None

    @classmethod
    def views(cls, count: int, views: int) -> Merging:
        """Of so many examples, each seen in as many ways, one behind the other."""
        return cls(torch.arange(count).repeat_interleave(views), count, views)

    def of_views(self, views: int) -> Merging:
        """The same groups where each member is seen in so many ways, one behind the other."""
        return Merging(self.assignment.repeat_interleave(views), self.count)

    def layout(self, layout: AnyLayout) -> AnyLayout:
        """Where the groups sit, given where the members do."""
        if self.together is not None and isinstance(layout, Layout):
            return Layout(layout.dim, layout.before, self.count, self.together * layout.after)
        numbers = torch.cat([self.assignment.cpu(), torch.tensor([-1])])  # the last is nobody's, also by the index -1
        return Ragged(layout.dim, self.count, numbers[layout.owners()])

    def weights(self) -> Tensor:
        """(m,): one over the size of each member's group."""
        return 1 / torch.bincount(self.assignment, minlength=self.count)[self.assignment]


def _key(call: Call, names_of: NamesOf) -> tuple:
    """By which a call is known on another path: where in the code it is made, and the parameters that it meets."""
    uses = ((type(use).__name__, names_of(use.weight)) for use in call.uses)
    return (call.op, call.place, len(call.shape), *uses)


def _example_dims(call: Call) -> list[int]:
    """The dimensions in which all uses of the call can have their examples."""
    if call.is_cut:
        return list(range(len(call.shape)))
    dims = [set(use.example_dims(len(call.shape))) for use in call.uses]
    return sorted(set.intersection(*dims))


def _kind(layout: AnyLayout) -> Kind:
    """A layout less the sizes that change with the batch."""
    if isinstance(layout, Ragged):
        return layout.dim, IRREGULAR
    if layout.before == layout.after == 1:
        return layout.dim, "only"
    if layout.before == 1 or layout.after == 1:
        return layout.dim, "after" if layout.before == 1 else "before"
    return layout.dim, f"{layout.before} before, {layout.after} after"


def _recall(kind: Kind, call: Call, n: int) -> Expected | None:
    """The layout of this kind for a batch of n, unless the sizes say that it must be another one."""
    dim = kind[0]
    if kind[1] == IRREGULAR:
        return Irregular(dim)
    positions, left = divmod(call.shape[dim], n)
    layouts = [Layout(dim, 1, n, positions), Layout(dim, positions, n, 1)] if positions and not left else []
    return next((layout for layout in layouts if _kind(layout) == kind), None)


def _place(call: Call, names_of: NamesOf) -> str:
    """Which call, for a message."""
    if call.is_cut:
        return f"in a tensor that goes {call.op!r} (of shape {tuple(call.shape)})"
    names = sorted({name for use in call.uses for name in names_of(use.weight)})
    return f"at op {call.op!r} with parameter {', '.join(map(repr, names))} (output {tuple(call.shape)})"


def _coupled(call: Call, names_of: NamesOf, n: int) -> str:
    if not _example_dims(call):
        return (
            f"tape: {_place(call, names_of)} no dimension can hold examples. Give a layer that is called for one "
            "example at a time a batch of one, as in layer(x[None])[0]; better, call it once for all examples."
        )
    return (
        f"tape: {_place(call, names_of)} the {n} "
        "examples of the batch cannot be told apart: either one example's loss depends on another example (batch "
        "normalization, in-batch negatives, a loss averaged over the batch), or they lie in no regular order. "
        "Make each loss depend on its own example only, e.g. with GroupNorm in place of BatchNorm."
    )


def _ambiguous(call: Call, names_of: NamesOf, n: int) -> str:
    return (
        f"tape: {_place(call, names_of)} several orders of the {n} examples fit this batch, since some examples' "
        "gradients are so much larger than the others', and no earlier batch has shown the right one. Nothing was "
        "released. Scale the inputs, or bound the loss of one example, e.g. by smooth_l1_loss in place of mse_loss."
    )
