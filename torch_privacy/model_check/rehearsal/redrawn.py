# SPDX-License-Identifier: Apache-2.0
"""Decides whether a difference between two runs comes from other examples, or from random numbers that moved."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...support.draws import Drawn, Rule, RunDraws
from .comparison import REMOVED, REPLACED, AnswerComparison, ChangedAnswer
from .trace import Trace
from .turn import Answers, BatchVariants, Turn

LEVELS = 6  # quantiles at which random numbers are fixed in a full rehearsal, half of them for each doubtful run
EXTREME = 0.02  # the first and the last of them lie this near to 0 and to 1

Run = Callable[[Turn], Generator[Turn, Answers, Answers]]
Verdict = list[ChangedAnswer] | None  # None if nothing can be said, because random numbers could not be replaced


@dataclass(frozen=True)
class OtherRun:
    """A run with other examples in some places, or of a part of the batch alone."""

    keep: np.ndarray  # (count,) which examples were kept
    turn: Turn
    answers: Answers
    whole: Answers | None = None  # of the whole batch with the same random numbers; None if its usual run has them

    @property
    def is_part(self) -> bool:
        """True for a part of the batch alone."""
        return self.turn.keep is not None


class Redrawn:
    """Runs whole batches and others with random numbers that examples cannot move, and compares them.

    Args:
        examples: the batch.
        comparison: of two runs.
        generator: chooses the random numbers.
        run: makes one turn.
        notes: receives, in words, what could not be compared.
        thorough: compare at all levels, so that each branch that a random number decides is taken.
    """

    def __init__(
        self,
        examples: BatchVariants,
        comparison: AnswerComparison,
        generator: np.random.Generator,
        run: Run,
        notes: set[str],
        *,
        thorough: bool,
    ):
        self._examples, self._comparison, self._run = examples, comparison, run
        self._generator, self._notes, self._thorough = generator, notes, thorough
        self._wholes: dict[tuple[RunDraws, bool], Answers] = {}
        self._first_level = 0
        self._drawn: dict[RunDraws, list[Drawn | None]] = {}  # in the runs of the whole batch

    @cached_property
    def _key(self) -> int:
        return int(self._generator.integers(2**31))

    @cached_property
    def _levels(self) -> list[float]:
        levels = (np.arange(LEVELS) + self._generator.random(LEVELS)) / LEVELS
        levels[0], levels[-1] = EXTREME, 1 - EXTREME
        self._generator.shuffle(levels)
        return levels.tolist()

    @cached_property
    def by_place(self) -> RunDraws:
        """The random numbers for parts of the batch."""
        return RunDraws(Rule.BY_PLACE, self._key)

    def at_levels(self, *, by_row: bool, in_eval: bool = False) -> list[RunDraws]:
        """Returns random numbers that are equal in all places of a draw, once for each level.

        The next call begins with the other half of the levels.
        """
        levels, first = self._levels, self._first_level
        self._first_level = (first + LEVELS // 2) % LEVELS
        rotated = levels[first:] + levels[:first]
        return [RunDraws(Rule.AT_LEVEL, self._key, level, by_row, in_eval=in_eval) for level in rotated]

    def whole(self, draws: RunDraws, *, rows: bool) -> Generator[Turn, Answers, Answers]:
        """Runs the whole batch with these random numbers, once."""
        if (draws, rows) not in self._wholes:
            turn = Turn(self._examples.whole(draws), self._examples.count, rows=rows, draws=draws)
            self._wholes[draws, rows] = yield from self._run(turn)
            self._drawn[draws] = [turn.drawn, self._examples.drawn if self._examples.drawn_together else None]
        return self._wholes[draws, rows]

    def other(
        self, keep: np.ndarray, draws: RunDraws, *, rows: bool, is_part: bool = False
    ) -> Generator[Turn, Answers, OtherRun | None]:
        """Runs the batch with these random numbers, with other examples or without some, and whole."""
        batch = self._examples.without(keep, draws) if is_part else self._examples.with_others(keep, draws)
        if batch is None:
            return None
        count = int(keep.sum()) if is_part else self._examples.count
        turn = Turn(batch, count, rows=rows, draws=draws, keep=keep if is_part else None, replaces=not is_part)
        answers = yield from self._run(turn)
        return OtherRun(keep, turn, answers, (yield from self.whole(draws, rows=rows)))

    def says_something(self, other: OtherRun) -> bool:
        """True if random numbers could be fixed in both runs, and the losses are not equal for all examples."""
        return other.whole is not None and not (_moved(other, other.whole) or _are_alike(other.whole))

    def compare(self, other: OtherRun, original: Answers) -> list[ChangedAnswer]:
        """Returns the first answer of a kept example that changed, if there is one."""
        turn, whole = other.turn, other.whole or original
        places = np.arange(turn.count) if other.is_part else np.flatnonzero(other.keep)
        loose = other.is_part or turn.draws.rule is not Rule.AS_DRAWN or other.answers.shapes != whole.shapes
        how = REMOVED if other.is_part else REPLACED
        return self._comparison.compare(other.keep, other.answers, whole, places, _again(turn), how, loose=loose)

    def confirm(
        self, other: OtherRun, found: list[ChangedAnswer], original: Answers
    ) -> Generator[Turn, Answers, Verdict]:
        """Returns what is left of these findings if random numbers cannot have caused them.

        * Other examples, and equally many draws: only large draws are replaced, so that every branch that a random
          number decides is taken as in the batch.
        * A part: places are counted from the end, as padding may be on the left.
        * Where single numbers were drawn for single examples, or examples are not in the first dimension, both may
          show random numbers that moved. Then draws are fixed at levels.
        """
        draws = other.turn.draws
        if draws.rule is Rule.AT_LEVEL:
            return found
        if draws.rule is Rule.BY_PLACE:
            left = yield from self._findings(other, [fixed := replace(draws, from_end=True)])
            is_final = not any(drawn and (drawn.has_many or drawn.unaligned) for drawn in self._drawn[fixed])
            is_final &= other.turn.drawn is None or not other.turn.drawn.unaligned
        elif other.answers.random == original.random:
            left = yield from self._findings(other, [fixed := RunDraws(Rule.FEW_AS_DRAWN, self._key, by_row=True)])
            is_final = not any(drawn and drawn.has_many for drawn in self._drawn[fixed])
        else:
            left, is_final = None, False
        if left is not None and (is_final or not left):
            return left
        left = yield from self._findings(other, self.at_levels(by_row=not other.is_part))
        if left is None:
            left = yield from self._findings(other, self.at_levels(by_row=not other.is_part, in_eval=True))
            if left == []:
                self._notes.add(
                    "Batches were compared in eval mode only, because in training mode they draw random numbers that "
                    "cannot be replaced."
                )
        return left

    def _findings(self, other: OtherRun, all_draws: Iterable[RunDraws]) -> Generator[Turn, Answers, Verdict]:
        """Returns what is found with some of these random numbers, the first of those with rows.

        Those with which the losses are equal for all examples say nothing, because the draws may have hidden all.
        """
        shown = False
        for number, draws in enumerate(all_draws):
            rows = other.turn.rows and number == 0
            again = yield from self.other(other.keep, draws, rows=rows, is_part=other.is_part)
            if again is None or again.whole is None or _moved(again, again.whole):
                return None
            found = self.compare(again, again.whole)
            if found:
                return found
            shown |= not _are_alike(again.whole)
            if shown and number + 1 >= (LEVELS // 2 if self._thorough else 1):
                break
        return [] if shown else None


def _moved(other: OtherRun, whole: Answers) -> bool:
    """True if random numbers were drawn that are not the same in both runs."""
    if other.turn.draws.consumes:
        return other.answers.random != whole.random
    return whole.drew or other.answers.drew


def _are_alike(answers: Answers) -> bool:
    """True if no loss is defined, or all losses of several examples are equal."""
    losses = answers.losses[answers.losses.isfinite()]
    return losses.numel() == 0 or (losses.numel() > 1 and bool((losses == losses[0]).all()))


def _again(turn: Turn) -> Callable[[Trace], Turn]:
    return lambda trace: Turn(turn.batch, turn.count, rows=False, draws=turn.draws, trace=trace)
