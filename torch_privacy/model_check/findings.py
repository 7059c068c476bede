# SPDX-License-Identifier: Apache-2.0
"""Collects what ``check`` has found: problems, notes, and how each parameter is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..jacobian.rows.operator import PlanRow
from ..support.validate import Refused, quoted
from .checkup import EXACT, NOT_CHECKED, REFUSED, ParameterUse, Problem, Verdict
from .recorded_run import message_of

Refusal = tuple[tuple[str, ...], str]  # names of the parameters concerned, and the message


class Findings:
    """Collects the findings of one ``check``.

    Attributes:
        problems, notes: in the order in which they were found.
        meetings: name of a parameter -> the calls that use it.
        plan: how norms and sums of the exact parameters are computed.
        exact: names of the parameters with exact rows.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.meetings: dict[str, tuple[ParameterUse, ...]] = {}
        self.plan: list[PlanRow] = []
        self.exact: Sequence[str] = ()

    def blame(self, check: str, text: str, names: tuple[str, ...] = ()) -> None:
        """Reports a problem."""
        self.problems.append(Problem(check, names, text))

    def passes(self, check: str, names: tuple[str, ...], run: Callable, *args: Any) -> bool:
        """True if ``run(*args)`` passes; reports its refusal as a problem of these parameters otherwise."""
        try:
            run(*args)
        except Refused as error:
            self.blame(check, message_of(error), names)
            return False
        return True

    def blame_all(self, refusals: list[Refusal]) -> None:
        """Reports refusals of one kind as one problem."""
        (first, text), *others = refusals
        more = [name for names, _ in others for name in names]
        also = f" The same holds for {quoted(more, at_most=5)}." if more else ""
        self.blame("parameters", text + self._in_modules(first) + also, (*first, *more))

    def _in_modules(self, names: Sequence[str]) -> str:
        """Returns a sentence with the modules that use these parameters; empty if there is none."""
        modules = {met.module for name in names for met in self.meetings.get(name, ()) if met.module}
        return f" (In module {quoted(sorted(modules))}.)" if modules else ""

    def verdict(self, name: str, p: Tensor) -> Verdict:
        """Returns the verdict on one parameter."""
        refused = any(name in problem.names for problem in self.problems)
        verdict = REFUSED if refused else EXACT if name in self.exact else NOT_CHECKED
        plan = tuple(row for row in self.plan if name in row.names)
        return Verdict(name, tuple(p.shape), self.meetings.get(name, ()), plan, verdict)
