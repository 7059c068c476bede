# SPDX-License-Identifier: Apache-2.0
"""Finds the layouts of one batch: asks what earlier batches have shown, and makes the backwards that are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from torch import Tensor

from ...ops import AnyLayout, Layout
from ...support.own_draws import randint
from ..recording.backward import OpenNodes, backward_into
from ..recording.calls import Call
from ..recording.paths import RecordedGraph
from ..rows.native import ProjectedSum, RowCheck
from ..rows.plan import Memory, MemoryBudget
from ..rows.streamed_sum import SumRequest
from .codes import Rounding, fresh_generator
from .known import SPOT_CHECK, CallKind, Layouts, PathTaken, kind_of_call
from .measure import Measurement
from .predict import Disagreement, Expected, FoundLayouts, GuardedLayouts, Irregular, Options, Prediction, ProvenLayouts


class Certainty(Enum):
    """Says how well earlier batches know the layouts, and so how many further backwards are made."""

    PROVEN = "proven"  # none, but for spot checks
    EXPECTED = "expected"  # a coded one; the backward that computes the rows confirms it
    UNKNOWN = "unknown"  # one for each digit of the codes, and a plain one


@dataclass(frozen=True)
class LayoutClaim:
    """The layouts that a batch should have, as earlier batches say.

    Attributes:
        places: calls and cuts that the claim is about.
        options: the layouts that each of these may have.
        guessed: True if no earlier batch had these layouts.
        known: proven layouts: of all places, or those of the calls, which follow if the claim about the cuts holds.
        closed: numbers of the nodes that must have no gradient for these to hold.
        teaches: True if the batch can still prove something of its path; its nodes are watched then.
    """

    state: Certainty
    places: Sequence[Call] = ()
    options: Sequence[Options] = ()
    guessed: bool = False
    known: Sequence[Layout] | None = None
    closed: frozenset[int] = frozenset()
    teaches: bool = True

    def numbers(self) -> list[int]:
        """Returns what determines the backwards that the claim leads to."""
        irregular = any(isinstance(options[0], Irregular) for options in self.options)
        states = [self.state is state for state in Certainty]
        return [*states, len(self.places), irregular, self.guessed, self.known is not None, bool(self.closed)]


UNKNOWN = LayoutClaim(Certainty.UNKNOWN)


class LayoutFinder:
    """Finds the layouts of one batch.

    Args:
        layouts: what earlier batches have shown.
        reached: the batch.
        request: what is asked of its rows.

    Attributes:
        measured: whether additional backwards were made.
    """

    def __init__(self, layouts: Layouts, reached: RecordedGraph, request: SumRequest):
        self._layouts, self._reached, self._request = layouts, reached, request
        self._peers = reached.ranks.peers
        self._memory = Memory(layouts, reached)
        self.measured = False
        self._nodes: OpenNodes | None = None  # watched in a batch that may prove its path
        self._native: ProjectedSum | None = None  # if a coded backward also served to check the rows
        self._is_doubted = False

    def find(self) -> FoundLayouts:
        """Returns the layouts. The graph stays."""
        found = self._found(UNKNOWN if self._is_doubted else self._agreed_claim())
        if self.measured:
            self._reached.ranks.check_same_inputs()
        return found

    def doubt(self) -> None:
        """Takes note that what `find` returned does not hold: it then measures."""
        self._is_doubted = True

    def budget(self) -> MemoryBudget | None:
        """Returns the budget of the backward that computes the rows; None if it keeps everything."""
        limit = self._request.memory_budget
        return None if limit is None else self._memory.budget(limit)

    def check(self) -> RowCheck | None:
        """Returns a check of the rows against a native backward, if one is due."""
        if not self._peers.any(self._request.verify and not self._are_verified()):
            return None
        dtypes, losses, merging = self._reached.dtypes(), self._reached.losses, self._request.merging
        if self._native is None:
            exponents = Rounding.of(dtypes).exponents
            with self._reached.running_again():
                self._native = ProjectedSum.of(losses, self._reached.parts, merging, exponents, self._reached.leaves)
        return RowCheck(self._native, dtypes, self._peers)

    def learn(self, found: FoundLayouts, check: RowCheck | None) -> None:
        """Remembers that the layouts, and the rows if they were checked, are right."""
        self._note_confirmed(found)
        if check is not None and self._peers.all(check.is_conclusive):
            self._layouts.note_verified(self._kinds, self._reached.num_losses)

    @cached_property
    def _kinds(self) -> list[CallKind]:
        return [kind_of_call(call) for call in self._reached.calls]

    def _are_verified(self) -> bool:
        layouts, path, n = self._layouts, self._reached.path, self._reached.num_losses
        return (not self.measured and layouts.verified(path, n)) or layouts.verify(path, self._kinds, n)

    # What is claimed

    def _agreed_claim(self) -> LayoutClaim:
        """Returns what earlier batches say, if all ranks would make the same backwards."""
        claim = self._claim()
        if self._peers.size == 1:
            return claim
        reached, is_due = self._reached, not self._are_verified()
        same = self._peers.are_equal([*claim.numbers(), is_due, len(reached.calls), len(reached.cuts)])
        return claim if same else UNKNOWN

    def _claim(self) -> LayoutClaim:
        """Returns what earlier batches say; a path is known better than its calls."""
        layouts, reached, n = self._layouts, self._reached, self._reached.num_losses
        places, names_of = reached.places, reached.names_of
        proven = layouts.recall(reached.path, places, n)
        if proven is not None:
            (known, closed), unseen = proven, n > 1 and reached.moves_unseen
            if n == 1 or not (unseen or reached.cuts):
                return LayoutClaim(Certainty.PROVEN, places, known=known, closed=frozenset() if n == 1 else closed)
            of_calls = known[: len(reached.calls)]
            if unseen or not reached.cuts_are_near():
                return LayoutClaim(Certainty.EXPECTED, reached.calls, _alone(of_calls), teaches=False)
            of_cuts = _alone(known[len(of_calls) :])
            return LayoutClaim(Certainty.EXPECTED, reached.cuts, of_cuts, known=of_calls, closed=closed)
        for some in (places, reached.calls):
            expected = layouts.expect(some, names_of, n)
            if expected is not None:
                return LayoutClaim(Certainty.EXPECTED, some, _alone(expected))
        guess = layouts.guess(places, names_of, n)
        return UNKNOWN if guess is None else LayoutClaim(Certainty.EXPECTED, places, guess, guessed=True)

    # What is found

    def _found(self, claim: LayoutClaim) -> FoundLayouts:
        """Makes the backwards that a claim needs, and returns the layouts, or those measured if it does not hold."""
        if claim.state is Certainty.PROVEN:
            assert claim.known is not None
            if self._holds_on_spot_check(claim.known):
                return self._while_closed(claim.known, claim.closed)
        elif claim.state is Certainty.EXPECTED:
            prediction = self._predict(claim)
            if claim.known is None and self._may_confirm_later():
                return prediction
            layouts = self._confirm(prediction)
            if layouts is not None:
                return self._proven(layouts) if claim.known is None else self._while_closed(claim.known, claim.closed)
        return self._measure()

    def _proven(self, layouts: Sequence[AnyLayout]) -> ProvenLayouts:
        calls = self._reached.calls
        return ProvenLayouts(calls, layouts[: len(calls)])

    def _while_closed(self, known: Sequence[Layout], closed: Set[int]) -> FoundLayouts:
        """Returns the layouts of the calls, which hold while some nodes have no gradient: the rows' backward checks."""
        if not closed:
            return self._proven(known)
        calls, made = self._reached.calls, self._reached.graph.made
        if self._peers.size == 1 and self._may_confirm_later():
            return GuardedLayouts(calls, known, [made[number] for number in sorted(closed)])
        return self._found(LayoutClaim(Certainty.EXPECTED, calls, _alone(known[: len(calls)])))

    def _holds_on_spot_check(self, known: Sequence[AnyLayout]) -> bool:
        """True unless a random part of the calls was measured again, and differs."""
        if self._peers.size == 1:
            is_due = self._layouts.spot_check_is_due()
        else:
            is_due = not int(randint(SPOT_CHECK, (), generator=fresh_generator()))
        if not is_due:
            return True
        self.measured = True
        return self._peers.all(self._measurement().agrees_in_part(known, self._memory.portions()))

    def _may_confirm_later(self) -> bool:
        """True if the backward that computes the rows can also confirm a prediction."""
        budget = self.budget()
        if budget is None:
            return True
        if len(self._request.groups) > 1:
            return False
        return not self._peers.any(budget.wants_second_backward or not self._memory.may_keep_graph())

    def _predict(self, claim: LayoutClaim) -> Prediction:
        """Returns the prediction of the claimed layouts, with the coded backwards made.

        The first of these also serves to check the rows, if that is due.
        """
        self.measured = True
        reached, places, request = self._reached, claim.places, self._request
        rounding, cotangent = Rounding.of(reached.dtypes()), request.cotangent(reached.losses)
        prediction = Prediction(places, claim.options, cotangent, rounding, guessed=claim.guessed, peers=self._peers)
        is_new, least = claim.known is None and self._memory.known is None, 0.0

        def add_least(number: int, g: Tensor) -> None:
            nonlocal least
            least += self._memory.least_bytes(places[number], g, claim.options[number][0])  # the same for all regular

        due = claim.known is None and request.verify and request.merging is None and not self._are_verified()
        native = ProjectedSum(reached.parts, prediction.coded[0], reached.leaves) if due else None
        covers_all = claim.known is None and len(places) == len(reached.places)
        self._nodes = OpenNodes(reached.graph.nodes()) if claim.teaches and covers_all else None
        for k, coded in enumerate(prediction.coded):
            sink = _CodedSink(prediction, k, add_least if is_new and k == 0 else None)
            reads = native if k == 0 else None
            with nullcontext() if reads is None else reads.watching(reached.losses):
                leaves = () if reads is None else reads.leaves
                backward_into(sink, reached, places, coded, retain_graph=True, leaves=leaves)
            if self._nodes is not None:
                self._nodes.stop()
        self._native = native
        if is_new:
            self._memory.note(least)
        return prediction

    def _confirm(self, prediction: Prediction) -> list[AnyLayout] | None:
        """Returns the layouts of the places of a prediction, by an additional backward; None if they are wrong."""
        sink, places = _PlainSink(prediction), prediction.places
        try:
            backward_into(sink, self._reached, places, prediction.cotangent, retain_graph=True)
            prediction.conclude()
        except Disagreement:
            return None
        self._note_confirmed(prediction)
        return [sink.layouts[number] for number in range(len(places))]

    def _note_confirmed(self, found: FoundLayouts) -> None:
        """Remembers a confirmed prediction for the path, if it covers every example and all calls and cuts."""
        if isinstance(found, Prediction):
            places = self._reached.places
            if len(found.places) == len(places) and found.teaches:
                self._layouts.note_confirmed(self._path_taken(), places, found.expected, self._reached.names_of)

    def _path_taken(self) -> PathTaken | None:
        """Returns the path, and what this batch did not show of it.

        None if its nodes were not watched, or if it shows only which copies it took.
        """
        if self._nodes is None or self._peers.any(self._nodes.copies_are_closed()):
            return None
        closed = self._nodes.closed()
        numbers = [number for number, node in enumerate(self._reached.graph.made) if node in closed] if closed else []
        return PathTaken(self._reached.path, frozenset(numbers))

    def _measurement(self) -> Measurement:
        reached, n = self._reached, self._reached.num_losses

        def known(call: Call) -> Expected | None:
            moved = reached.recorder.program.moved
            return None if moved else self._layouts.expect_of(call, reached.names_of, n)

        return Measurement(reached, known)

    def _measure(self) -> ProvenLayouts:
        """Returns the layouts of the calls' outputs, measured by as many backwards as it takes."""
        self.measured = True
        reached, memory, least = self._reached, self._memory, 0.0
        measurement, places = self._measurement(), reached.places

        def add_least(number: int, b: Tensor, layout: AnyLayout) -> None:
            nonlocal least
            least += memory.least_bytes(places[number], b, layout)

        self._nodes = nodes = OpenNodes(reached.graph.nodes())
        layouts = self._layouts.measure(reached.path, measurement, memory.portions(), add_least)
        nodes.stop()
        self._layouts.learn(self._path_taken(), measurement, reached.names_of)
        memory.note(least)
        return self._proven(layouts)


class _CodedSink:
    """Passes the gradients of a coded backward to a prediction."""

    def __init__(self, prediction: Prediction, k: int, on_gradient: Callable[[int, Tensor], None] | None):
        self._prediction, self._k, self._on_gradient = prediction, k, on_gradient

    def take(self, number: int, g: Tensor | None) -> None:
        prediction = self._prediction
        g = prediction.places[number].output.gradient(g, prediction.cotangent)
        prediction.note(self._k, number, g)
        if self._on_gradient is not None:
            self._on_gradient(number, g)


class _PlainSink:
    """Passes the gradients of the plain backward to a prediction, and keeps the layouts."""

    def __init__(self, prediction: Prediction):
        self._prediction = prediction
        self.layouts: dict[int, AnyLayout] = {}

    def take(self, number: int, g: Tensor | None) -> None:
        prediction = self._prediction
        b = prediction.places[number].output.gradient(g, prediction.cotangent)
        self.layouts[number] = prediction.layout(number, b)


def _alone(expected: Sequence[Expected]) -> list[Options]:
    """Returns each layout as the only option of its call."""
    return [(layout,) for layout in expected]
