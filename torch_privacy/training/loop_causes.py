# SPDX-License-Identifier: Apache-2.0
"""Finds which of many changes make answers differ, by runs with some of them: delta debugging.

Source: Zeller & Hildebrandt (2002), Simplifying and isolating failure-inducing input, IEEE TSE 28(2).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from ..model_check.rehearsal.turn import Answers, Turn

MOST_RUNS = 40  # to find out on which variables losses depend
T = TypeVar("T")


class CauseSearch(Generic[T]):
    """Looks for the groups of changes that matter, in at most about `MOST_RUNS` runs.

    Args:
        turn_of: changes -> a run of the batch with these.
        matters: answers -> whether they differ from those without changes.
    """

    def __init__(self, turn_of: Callable[[list[T]], Turn], matters: Callable[[Answers], bool]):
        self._turn_of, self._matters, self._runs_made = turn_of, matters, 0

    def among(self, groups: list[list[T]]) -> Generator[Turn, Answers, list[list[T]]]:
        """Returns those groups on which answers depend; together they are known to matter."""
        if len(groups) == 1 or self._runs_made >= MOST_RUNS:
            return groups
        found: list[list[T]] = []
        for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
            if (yield from self._matter(half)):
                found += yield from self.among(half)
        return found or (yield from self._together(groups))

    def _together(self, groups: list[list[T]]) -> Generator[Turn, Answers, list[list[T]]]:
        """Returns the groups without those that can be left out, where no half of them matters alone."""
        needed = [*groups]
        for group in groups:
            fewer = [other for other in needed if other is not group]
            if self._runs_made < MOST_RUNS and fewer and (yield from self._matter(fewer)):
                needed = fewer
        return needed

    def _matter(self, groups: list[list[T]]) -> Generator[Turn, Answers, bool]:
        self._runs_made += 1
        answers = yield self._turn_of([change for group in groups for change in group])
        return self._matters(answers)
