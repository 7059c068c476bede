# SPDX-License-Identifier: Apache-2.0
"""Defines ``Checkup``, the result of ``check``: a verdict on every parameter, and all problems."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .._validate import Refused
from ..jacobian.operator import PlanRow

EXACT, REFUSED, NOT_CHECKED = "exact", "refused", "not checked"


@dataclass(frozen=True)
class Problem:
    """Describes what training would refuse, or what would void its guarantee; ``text`` says what to do."""

    check: str  # name of the check that found it
    names: tuple[str, ...]  # of the parameters and buffers concerned
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(frozen=True)
class Meeting:
    """Describes a call of a torch function that used a parameter."""

    op: str  # name of the function
    module: str  # dotted name of the innermost module whose forward made the call; the model itself is ""
    inside: bool  # whether the model's own forward was running
    layout: str  # output shape with n for the examples' dimension, "(n, 16, 64)", "(n·16, 64)"; "" if not measured
    generic: bool  # True if the op has no rule of its own: its rows come from its own backward, which is slower


@dataclass(frozen=True)
class Verdict:
    """Describes what the check found about one trainable parameter."""

    name: str
    shape: tuple[int, ...]
    meetings: tuple[Meeting, ...]
    plan: tuple[PlanRow, ...]
    verdict: str  # "exact", "refused", "not checked"

    @property
    def ops(self) -> tuple[str, ...]:
        """Returns the torch functions that used the parameter; a star marks those without a rule of their own."""
        return tuple(dict.fromkeys(met.op + "*" * met.generic for met in self.meetings))

    @property
    def layouts(self) -> tuple[str, ...]:
        """Returns the shapes of these functions' outputs, with n for the examples' dimension."""
        return tuple(dict.fromkeys(met.layout for met in self.meetings if met.layout))

    @property
    def methods(self) -> tuple[str, ...]:
        """Returns the methods by which the norms are computed."""
        return tuple(dict.fromkeys(row.norms_by for row in self.plan))

    @property
    def kept(self) -> tuple[str, ...]:
        """Returns what is kept for the clipped sum."""
        return tuple(dict.fromkeys(row.keeps for row in self.plan))


@dataclass(frozen=True)
class Checkup:
    """Holds the result of ``check``; prints as a table of verdicts, followed by every problem and its cure."""

    num_examples: int  # 0 if there were no usable losses
    verdicts: tuple[Verdict, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # what could not be checked, and other remarks

    @property
    def ok(self) -> bool:
        """True if no check found a problem."""
        return not self.problems

    def raise_if_refused(self) -> None:
        """Raises ``Refused`` with all problems, if there are any."""
        if self.problems:
            raise Refused("\n".join(map(str, self.problems)))

    def as_json(self) -> dict[str, Any]:
        """Returns the same as plain data."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        from ..cli.tables import checkup_text

        return checkup_text(self)
