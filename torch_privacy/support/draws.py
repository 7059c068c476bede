# SPDX-License-Identifier: Apache-2.0
"""Says what the random numbers of a rehearsal are: those of the batch, or others that do not change with its examples.

Two runs with equal seeds draw equal numbers as long as each draws as many, in the same places. They do not if one of
them is a part of the batch, if nodes of several graphs are joined to one tensor, or if the data decide how many numbers
are drawn. Then an honest program gives an example other numbers, and nothing can be compared. So each draw gets numbers
that depend on its place *within an example* alone: every example has the same dropout mask, the same noise.

A mean (no dropout, no noise) would hide what only the noise shows, such as its scale; and a permutation replaced by the
identity would hide every mixing of examples. So each number is a quantile of the distribution that was asked for, and
a permutation moves everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

GOLDEN = 0.6180339887498949  # its multiples, modulo 1, fill the interval evenly
MOST_CALLS = 10_000  # draws in a run that are replaced: a loop that waits for a number must end


class Rule(Enum):
    """Decides which numbers a draw gets."""

    AS_DRAWN = "as drawn"
    BY_PLACE = "by the place within an example and the number of the call, equal for all examples"
    FEW_AS_DRAWN = "as drawn, if it is at most one for each example; else by the place within an example"
    AT_LEVEL = "one quantile for all"


@dataclass(frozen=True)
class RunDraws:
    """The random numbers of a run."""

    rule: Rule = Rule.AS_DRAWN
    key: int = 0  # chooses numbers and permutations
    level: float = 0.5  # the quantile of ``AT_LEVEL``
    by_row: bool = False  # whether one number for each example may differ between them, because no run leaves any out
    from_end: bool = False  # whether places are counted from the last one, as with padding on the left
    in_eval: bool = False  # whether all modules are in eval mode

    @property
    def start(self) -> float:
        """Returns the quantile of the first draw."""
        return self.level if self.rule is Rule.AT_LEVEL else self.key * GOLDEN % 1

    @property
    def plain_start(self) -> float:
        """Returns the same for numpy and Python: small where torch's is large, as a draw may hide another's."""
        return 1 - self.start

    @property
    def consumes(self) -> bool:
        """True if the generators advance as in the user's own run."""
        return self.rule in (Rule.AS_DRAWN, Rule.FEW_AS_DRAWN)


AS_DRAWN, IN_EVAL = RunDraws(), RunDraws(in_eval=True)


def may_be_time_first(shape: tuple[int, ...], count: int) -> bool:
    """True if the examples may be in the second dimension, behind the positions."""
    return len(shape) > 2 and shape[1] == count


@dataclass
class Drawn:
    """Holds what was drawn in a run with replaced random numbers.

    ``restart`` begins anew, as an item begins: the numbers until its next call do not depend on earlier ones. ``end``
    puts the generators where the run alone has moved them.
    """

    count: int  # of the examples
    few: int = 0  # how many draws were at most one number for each example
    unaligned: int = 0  # how many others did not have the examples in their first dimension, or perhaps in another
    on_restart: list[Callable[[], None]] = field(default_factory=list)
    on_end: list[Callable[[], None]] = field(default_factory=list)
    on_return: list[Callable[[], None]] = field(default_factory=list)  # called when the loop of the run goes on

    def note(self, shape: tuple[int, ...]) -> None:
        """Counts a draw of this shape."""
        if math.prod(shape) <= self.count:
            self.few += 1
        elif len(shape) < 2 or shape[0] != self.count or may_be_time_first(shape, self.count):
            self.unaligned += 1

    def restart(self) -> None:
        """Begins anew."""
        for begin in self.on_restart:
            begin()

    def end(self) -> None:
        """Ends the run, before the positions of the generators are compared."""
        for act in self.on_end:
            act()

    @property
    def has_many(self) -> bool:
        """True if there were enough draws that some may have been for single examples."""
        return self.few + self.unaligned >= self.count
