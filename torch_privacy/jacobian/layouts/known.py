# SPDX-License-Identifier: Apache-2.0
"""Remembers, from batch to batch, which dimension of each call's output holds the examples."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ...ops import AnyLayout, Layout, Ragged
from ..recording.tensors import FilledTensors
from .codes import system_seed
from .measure import Measurement, NamesOf, OnLayout, example_dims
from .predict import Expected, Irregular, Options

if TYPE_CHECKING:
    from ..recording.calls import Call

# Layouts are confirmed or measured until this many batches have shown those of a path without doubt.
PROOFS = 2
# One batch in this many on a known path is measured again, in case some of its branches could not be seen.
SPOT_CHECK = 64

# Layouts of one call that are compared with codes where no earlier batch has shown the right one.
MAX_OPTIONS = 4

# Paths of one program that are remembered.
MAX_PATHS = 1000
IRREGULAR = "in no regular order"

Kind = tuple[int, str]
CallKind = tuple  # see ``kind_of_call``
Found = TypeVar("Found", bound=AnyLayout | Irregular)
Sizes = tuple[int, tuple[int, ...]]  # size of a batch, and the integers among the arguments of its calls


@dataclass(frozen=True)
class PathTaken:
    """The path of a batch, and the numbers of the graph's nodes that had no gradient: behind these nothing is known."""

    number: int
    closed: frozenset[int]


@dataclass(frozen=True)
class Footprint:
    """Bytes that a batch needs on a path. Only what grows with the batch counts, so that one batch predicts others."""

    activations: float  # kept by autograd for the backward
    least: float  # held until the clipped sum, whatever the plan
    part: float = 0.0  # made again for the largest part under activation checkpointing, while its backward runs

    def times(self, n: float) -> Footprint:
        """Returns the bytes of n times as many examples."""
        return Footprint(n * self.activations, n * self.least, n * self.part)


@dataclass
class OnPath:
    """Holds what batches on a path have shown, batches of one apart from larger ones.

    Attributes:
        kinds, proofs: the layouts of its calls, and how many batches in a row have shown them.
        closed: numbers of the nodes that had no gradient in any of these.
        footprint: of one example; None before the first batch.
        is_verified: whether the rows need no native backward.
    """

    kinds: list[Kind] = field(default_factory=list)
    proofs: int = 0
    closed: frozenset[int] = frozenset()
    footprint: Footprint | None = None
    is_verified: bool = False


class Layouts:
    """The layouts of every call on a path (see ``path``), and of every call alone, as earlier batches had them.

    In a batch of one nothing needs to be separated, so that its layouts are used for batches of one only.
    """

    def __init__(self) -> None:
        # The second part of a key is true for what batches of one have shown, false for larger ones.
        self._on_path: defaultdict[tuple[int, bool], OnPath] = defaultdict(OnPath)
        self._by_call: dict[tuple[tuple, bool], tuple[Kind, int]] = {}
        self._batches: Counter[bool] = Counter()
        self._verified: Counter[tuple[tuple, bool]] = Counter()
        self._random = random.Random(system_seed())
        self.filled = FilledTensors()
        self.saved_at: dict[tuple, int] = {}  # see ``MadeAgain``
        self._paths: dict[int, list[tuple[Sizes, int]]] = {}  # program -> sizes first seen on each path, its number
        self._numbers = count()
        self._path_of = lru_cache(maxsize=1024)(self._find_path)

    # Paths

    def path(self, program: int, n: int, numbers: tuple[int, ...]) -> int:
        """Returns the number of the path that a program takes with these integers for n examples.

        The path is that of an earlier batch if every integer is equal in both, or is the same multiple of the batch's
        size in both.
        """
        return self._path_of(program, n, numbers)

    def _find_path(self, program: int, n: int, numbers: tuple[int, ...]) -> int:
        known = self._paths.setdefault(program, [])
        here = n, numbers
        path = next((path for sizes, path in known if _have_grown(sizes, here)), None)
        if path is None:
            path = next(self._numbers)
            known.append((here, path))
            if len(known) > MAX_PATHS:  # integers drawn at random: the oldest do not come again
                self._forget(known.pop(0)[1])
        return path

    def _forget(self, path: int) -> None:
        for is_one in (True, False):
            self._on_path.pop((path, is_one), None)

    # What is known

    def footprint(self, path: int, n: int) -> Footprint | None:
        """Returns the bytes that n examples need on a path; None if no earlier batch took it."""
        for key in relevant_keys(n):
            of_one = self._on_path[path, key].footprint
            if of_one is not None:
                return of_one.times(n)
        return None

    def settled(self, n: int) -> bool:
        """True if enough batches were measured to trust the model with n examples."""
        return any(self._batches[key] >= PROOFS for key in relevant_keys(n))

    def verified(self, path: int, n: int) -> bool:
        """True if the rows of a batch of n on a path need no native backward, as `verify` has found."""
        return self._on_path[path, n == 1].is_verified

    def verify(self, path: int, calls: Iterable[CallKind], n: int) -> bool:
        """True if enough batches with calls of these kinds agreed with native backwards to trust one of n examples."""
        if not all(any(self._verified[kind, key] >= PROOFS for key in relevant_keys(n)) for kind in calls):
            return False
        self._on_path[path, n == 1].is_verified = True
        return True

    def recall(self, path: int, calls: Sequence[Call], n: int) -> tuple[list[Layout], frozenset[int]] | None:
        """Returns the layout of every call for a batch of n, and the nodes without a gradient where these hold.

        None unless enough batches have proved this path.
        """
        for key in relevant_keys(n):
            known = self._on_path[path, key]
            if known.proofs >= PROOFS:
                recalled = [_recall(kind, call, n) for kind, call in zip(known.kinds, calls, strict=True)]
                regular = [layout for layout in recalled if isinstance(layout, Layout)]
                return (regular, known.closed) if len(regular) == len(recalled) else None
        return None

    def expect(self, calls: Sequence[Call], names_of: NamesOf, n: int) -> list[Expected] | None:
        """Returns the layout that every call has had on any path so far, to be confirmed; None unless all are known."""
        return _complete(self.expect_of(call, names_of, n) for call in calls)

    def expect_of(self, call: Call, names_of: NamesOf, n: int) -> Expected | None:
        """Returns the layout that a call has had so far; None unless enough batches had it."""
        call_key = _key(call, names_of)
        for key in relevant_keys(n):
            kind, count = self._by_call.get((call_key, key), ((0, ""), 0))
            if count >= PROOFS:
                return _recall(kind, call, n)
        return None

    def guess(self, calls: Sequence[Call], names_of: NamesOf, n: int) -> list[Options] | None:
        """Returns the layouts that each call may have: that of the latest batch, if any, or the regular ones that fit.

        None if a call has none, or if there is nothing to separate.
        """
        if n < 2:
            return None
        guesses = [self._options(call, names_of, n) for call in calls]
        return guesses if all(guesses) else None

    def _options(self, call: Call, names_of: NamesOf, n: int) -> Options:
        seen = self._by_call.get((_key(call, names_of), False))
        latest = None if seen is None else _recall(seen[0], call, n)
        return (latest,) if latest is not None else tuple(regular_layouts(call, n))[:MAX_OPTIONS]

    def spot_check_is_due(self) -> bool:
        """True if this batch was drawn at random to measure again what is known."""
        return not self._random.randrange(SPOT_CHECK)

    # What batches show

    def note_footprint(self, path: int, n: int, footprint: Footprint) -> None:
        """Remembers the bytes that a batch of n needed."""
        self._on_path[path, n == 1].footprint = footprint.times(1 / n)

    def note_verified(self, calls: Iterable[CallKind], n: int) -> None:
        """Remembers that a batch of n with calls of these kinds agreed with native backwards."""
        self._verified.update({(kind, n == 1) for kind in calls})

    def measure(
        self, path: int, measurement: Measurement, portions: Sequence[Sequence[int]], on_layout: OnLayout
    ) -> list[AnyLayout]:
        """Returns the measured layout of every call on a path; ``learn`` remembers them."""
        self._batches[measurement.n == 1] += 1
        for portion in portions:
            measurement.run(portion, on_layout)
        return [measurement.options[number][0] for number in range(len(measurement.calls))]

    def learn(self, path: PathTaken | None, measurement: Measurement, names_of: NamesOf) -> None:
        """Counts a batch that leaves no doubt as a proof; a layout that differs from before restarts the count.

        Without a path it proves the layouts of single calls, which every batch must confirm.
        """
        if measurement.in_doubt:
            return
        is_one, calls = measurement.n == 1, measurement.calls
        found = [measurement.options[number] for number in range(len(calls))]
        kinds = [_kind(options[0]) if is_one or len(options) == 1 else None for options in found]
        self._learn(path, calls, kinds, is_one, names_of)

    def note_confirmed(
        self, path: PathTaken | None, calls: Sequence[Call], layouts: Sequence[Expected], names_of: NamesOf
    ) -> None:
        """Counts a batch with a gradient for every example in every call, all of which confirmed these layouts."""
        regular = [layout for layout in layouts if isinstance(layout, Layout)]
        if len(regular) == len(layouts):
            is_one = any(layout.num_examples == 1 for layout in regular)
            self._batches[is_one] += 1
            self._learn(path, calls, [_kind(layout) for layout in regular], is_one, names_of)

    def _learn(
        self,
        path: PathTaken | None,
        calls: Sequence[Call],
        kinds: Sequence[Kind | None],
        is_one: bool,
        names_of: NamesOf,
    ) -> None:
        by_call: dict[tuple, Kind | None] = {}
        for call, kind in zip(calls, kinds, strict=True):
            key = _key(call, names_of)
            by_call[key] = kind if by_call.get(key, kind) == kind else None
        for key, kind in by_call.items():
            if kind is not None:
                before, count = self._by_call.get((key, is_one), (kind, 0))
                self._by_call[key, is_one] = kind, count + 1 if before == kind else 1
        regular = [kind for kind in kinds if kind is not None and kind[1] != IRREGULAR]
        if path is not None and len(regular) == len(kinds):  # if the data determine a layout, the path does not
            self._prove(path, is_one, regular)

    def _prove(self, path: PathTaken, is_one: bool, kinds: list[Kind]) -> None:
        known = self._on_path[path.number, is_one]
        is_known = known.proofs > 0 and known.kinds == kinds
        known.kinds, known.proofs = kinds, known.proofs + 1 if is_known else 1
        known.closed = known.closed & path.closed if is_known else path.closed


def relevant_keys(n: int) -> tuple[bool, ...]:
    """Returns the keys under which to look for a batch of n, best first: True (batches of one) only for n = 1."""
    return (False, True) if n == 1 else (False,)


def _have_grown(before: Sizes, now: Sizes) -> bool:
    """True if some sizes become the others when the batch grows or shrinks; a batch of 1 does not show which grow."""
    (n, numbers), (m, others) = before, now
    return all(v == w or (n > 1 and not v % n and v // n * m == w) for v, w in zip(numbers, others, strict=True))


def _complete(layouts: Iterable[Found | None]) -> list[Found] | None:
    """Returns all layouts, or None if one is missing."""
    found = [*layouts]
    complete = [layout for layout in found if layout is not None]
    return complete if len(complete) == len(found) else None


def kind_of_call(call: Call) -> CallKind:
    """Returns the op, and the types of its uses with their weights' shapes, without the sizes of the batch."""
    return (call.op, len(call.shape), *((use.kind, use.weight.shape) for use in call.uses))


def _key(call: Call, names_of: NamesOf) -> tuple:
    """Returns what identifies a call on any path: the op, its place in the code, and its parameters."""
    uses = ((use.kind, names_of(use.weight)) for use in call.uses)
    return (call.op, call.place, len(call.shape), *uses)


def _kind(layout: AnyLayout) -> Kind:
    """Returns the layout without the sizes that change with the batch."""
    if isinstance(layout, Ragged):
        return layout.dim, IRREGULAR
    if layout.before == layout.after == 1:
        return layout.dim, "only"
    if layout.before == 1 or layout.after == 1:
        return layout.dim, "after" if layout.before == 1 else "before"
    return layout.dim, f"{layout.before} before, {layout.after} after"


def regular_layouts(call: Call, n: int) -> Iterator[Layout]:
    """Yields the regular layouts that a call's output may have for n examples, the usual ones first."""
    for dim in example_dims(call):
        positions, left = divmod(call.shape[dim], n)
        if positions and not left:
            yield Layout(dim, 1, n, positions)
            if positions > 1:
                yield Layout(dim, positions, n, 1)


def _recall(kind: Kind, call: Call, n: int) -> Expected | None:
    """Returns the layout of this kind for a batch of n; None if it does not fit the output's size."""
    return Irregular(kind[0]) if kind[1] == IRREGULAR else _recall_regular(kind, call.output.shape[kind[0]], n)


@lru_cache(maxsize=4096)
def _recall_regular(kind: Kind, size: int, n: int) -> Layout | None:
    dim = kind[0]
    positions, left = divmod(size, n)
    if positions and not left:
        for layout in (Layout(dim, 1, n, positions), Layout(dim, positions, n, 1)):
            if _kind(layout) == kind:
                return layout
    return None


@dataclass(frozen=True)
class Merging:
    """Groups of losses with one row each: ``assignment`` (m,) has each loss's group, a number below ``count``.

    A group's row is the mean of its members' rows. Groups of ``together`` consecutive losses each have regular layouts.
    """

    assignment: Tensor
    count: int
    together: int | None = None

    @classmethod
    def views(cls, count: int, views: int) -> Merging:
        """Groups the ``views`` consecutive augmentations of each of ``count`` examples."""
        return cls(torch.arange(count, device="cpu").repeat_interleave(views), count, views)

    def of_views(self, views: int) -> Merging:
        """Returns the same groups for members with ``views`` consecutive augmentations each."""
        return Merging(self.assignment.repeat_interleave(views), self.count)

    def layout(self, layout: AnyLayout) -> AnyLayout:
        """Returns the layout of the groups, given that of the members."""
        if self.together is not None and isinstance(layout, Layout):
            return Layout(layout.dim, layout.before, self.count, self.together * layout.after)
        numbers = torch.cat(
            [self.assignment.cpu(), self.assignment.new_tensor([-1], device="cpu")]
        )  # -1, no example, maps to -1 as an index
        return Ragged(layout.dim, self.count, numbers[layout.owners()])

    def weights(self) -> Tensor:
        """Returns (m,), one over the size of each member's group."""
        return 1 / torch.bincount(self.assignment, minlength=self.count)[self.assignment].double()
