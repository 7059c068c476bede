# SPDX-License-Identifier: Apache-2.0
"""Provides `Finding`, the outcome of one check of a run folder, and `Verification`, all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite
from pathlib import Path
from typing import Any

from torch_privacy.privacy import Bracket
from torch_privacy.privacy.rounding import round_down, round_up

SAME = 1e-12  # relative difference of copies of one number
ROUNDED = 1e-7  # of one number computed by two machines


class Outcome(Enum):
    """The three outcomes of a check."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNCHECKED = "cannot be checked"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: what was checked, the verdict, and by how much it differs or why it cannot be known."""

    subject: str
    verdict: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """All that `verify` has found out about a run folder."""

    folder: Path
    findings: tuple[Finding, ...]

    @property
    def is_false(self) -> bool:
        """True if something that the folder states is false."""
        return any(finding.verdict is Outcome.DIFFERS for finding in self.findings)

    def of(self, verdict: Outcome) -> list[Finding]:
        """Returns the findings with this verdict."""
        return [finding for finding in self.findings if finding.verdict is verdict]

    def as_json(self) -> dict[str, Any]:
        """Returns the findings as plain values."""
        listed = [{"subject": one.subject, "verdict": one.verdict.value, "detail": one.detail} for one in self.findings]
        return {"folder": str(self.folder), "false": self.is_false, "findings": listed}

    def __str__(self) -> str:
        counts = ", ".join(f"{verdict.value}: {len(self.of(verdict))}" for verdict in Outcome)
        return f"{self.folder}: {'something is false' if self.is_false else 'nothing is false'} ({counts})"


def agrees(subject: str, detail: str = "") -> Finding:
    """Returns a finding that agrees."""
    return Finding(subject, Outcome.AGREES, detail)


def differs(subject: str, detail: str) -> Finding:
    """Returns a finding of something false."""
    return Finding(subject, Outcome.DIFFERS, detail)


def judged(subject: str, is_true: bool, detail: str, wrong: str | None = None) -> Finding:
    """Returns a finding that agrees or differs; ``wrong`` says why it differs, if that is not in ``detail``."""
    return agrees(subject, detail) if is_true else differs(subject, detail if wrong is None else wrong)


def unchecked(subject: str, detail: str) -> Finding:
    """Returns a finding of something that cannot be known."""
    return Finding(subject, Outcome.UNCHECKED, detail)


def equal(subject: str, stated: Any, found: Any, source: str) -> Finding:
    """Compares a value with the same one in another place, which ``source`` names."""
    if is_same(stated, found):
        return agrees(subject, "" if isinstance(stated, dict) else _shown(stated))
    return differs(subject, f"stated {_shown(stated)}, and {source} has {_shown(found)}")


def is_same(one: Any, other: Any) -> bool:
    """True for equal values, and for numbers that differ by rounding alone."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)):
        return one == other or abs(one - other) <= SAME * max(abs(one), abs(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def bracketed(subject: str, stated: dict[str, Any] | None, found: Bracket[float], *, digits: int = 3) -> Finding:
    """Compares a stated interval (null stands for infinity) with one that was computed again."""
    if stated is None:
        return unchecked(subject, f"not stated; here {_interval(found.low, found.high, digits)}")
    if reason := contradiction(stated, found):
        return differs(subject, reason)
    low, high = _ends(stated)
    if high < found.high and not is_close(high, found.high):
        return unchecked(subject, f"stated at most {high:.8g}; certified here is at most {found.high:.8g}")
    shown = _interval(low, high, digits)
    return agrees(subject, f"{shown}; {gap(high, found.high)}")


def contradiction(stated: dict[str, Any], found: Bracket[float]) -> str:
    """Returns why a stated interval is false if the value lies in another one; "" if both may be true."""
    low, high = _ends(stated)
    if low > high:
        return f"stated [{low:.6g}, {high:.6g}], which is no interval"
    if high < found.low and not is_close(high, found.low):
        short = f", {_percent(1 - high / found.low)} below the truth" if isfinite(found.low) else ""
        return f"stated at most {high:.6g}; it is at least {found.low:.6g}{short}"
    if low > found.high and not is_close(low, found.high):
        return f"stated at least {low:.6g}; it is at most {found.high:.6g}"
    return ""


def gap(stated: float, found: float) -> str:
    """Returns by how much a stated number differs from one computed again, in words."""
    if stated == found or not isfinite(stated) or not isfinite(found):
        return "equal" if stated == found else "infinite"
    share = 100 * (stated - found) / max(abs(found), 1e-300)
    return f"differs by {share:+.2g} %" if abs(share) >= 1e-9 else "differs by rounding"


def is_close(one: float, other: float) -> bool:
    """True for numbers that differ by what another machine rounds otherwise."""
    return one == other or abs(one - other) <= ROUNDED * max(abs(one), abs(other)) + 1e-14


def _ends(stated: dict[str, Any]) -> Bracket[float]:
    return Bracket(*(inf if stated[side] is None else float(stated[side]) for side in ("low", "high")))


def _interval(low: float, high: float, digits: int) -> str:
    return f"[{round_down(low, digits)}, {round_up(high, digits)}]"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _shown(value: Any) -> str:
    text = f"{value:.10g}" if isinstance(value, float) else "nothing" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
