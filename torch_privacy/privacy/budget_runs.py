# SPDX-License-Identifier: Apache-2.0
"""A run that draws from the budget of a data set: what it has reserved, and the ledger of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support.validate import Refused
from .budget_file import BudgetRun, Releases, count_of, includes
from .events.base import Event
from .ledger import Ledger


@dataclass(frozen=True)
class Reservation:
    """Holds what a run has reserved; as a limit of the run, it allows what is part of it.

    Args:
        budget: from which it is drawn.
        run: its name; "" for a rank that leaves the file to the first one.
        reserved: all that the run may release.
    """

    budget: Any  # a `DataBudget`, by which it was made
    run: str
    reserved: tuple[tuple[Event, int], ...]

    def allows(self, releases: Releases) -> bool:
        """True if all of these together are part of what is reserved."""
        return includes(self.reserved, releases)

    def remaining(self, event: Event, after: Releases = (), most: int = 10**7) -> int:
        """Returns how many more releases of an event are reserved after those; at most ``most``."""
        left = count_of(self.reserved)
        left.subtract(count_of(after))
        return 0 if min(left.values(), default=0) < 0 else min(left[event], most)

    @property
    def drawn(self) -> BudgetRun:
        """Returns what the file has of the run; refuses a file that lacks it, such as an older copy of the budget's."""
        return self.budget._known(self.budget.state, self.run)

    def as_json(self) -> dict[str, Any]:
        """Returns the budget and what is drawn from it, this run included, for statements."""
        state = self.budget.state
        if self.run:
            self.budget._known(state, self.run)  # refuses a file that lacks it
        return state.as_json()

    def begin(self) -> None:
        """Notes that the run begins to read rows; refuses a run that is settled."""
        if self.run:
            self.budget.begin(self.run)

    def settle(
        self, releases: Releases | None = None, *, reason: str = "", fingerprints: Iterable[str] = (), warning: str = ""
    ) -> None:
        """Ends the run; see `DataBudget.settle`. ``warning`` is why its releases are not private, if they are not."""
        if self.run:
            self.budget._settle(self.run, releases, reason, fingerprints, warning, ends_writer=False)


def _ledger_of(known: BudgetRun, path: str | os.PathLike[str] | None) -> Ledger | None:
    """Returns the ledger in a file, if the file is there and is that of the run."""
    try:
        found = None if path is None else Ledger.read(path)
    except (OSError, Refused):
        return None
    return found if found is not None and found.run == known.run else None


def warning_of(known: BudgetRun) -> str:
    """Returns why the releases in a run's ledger are not private, as far as there is a file that says so."""
    found = _ledger_of(known, known.ledger)
    return "" if found is None else found.warning


def check_goes_on(known: BudgetRun, ledger: str | os.PathLike[str] | None) -> None:
    """Refuses to go on with a run that has begun, unless its ledger says what it has released.

    A copy of the ledger beside the one that the run has named is refused: both would draw what is reserved once.
    """
    if known.has_begun and known.settled is None and _ledger_of(known, ledger) is None:
        raise Refused(
            f"Budget: run {known.run} has begun, and no ledger of its own says what it has released since, so that "
            "it may not release it again. Settle it (torch-privacy budget settle) and begin a new run, or resume it "
            "with its ledger."
        )
    if ledger is None or Path(ledger).absolute() == Path(known.ledger or ""):
        return
    if _ledger_of(known, known.ledger) is not None and not _is_same_file(ledger, known.ledger):
        raise Refused(
            f"Budget: run {known.run} has its ledger in {known.ledger!r}, and {str(ledger)!r} is a copy of it: both "
            "would draw what was reserved once. Resume the run where it began, or begin a new one in a new folder."
        )


def _is_same_file(path: str | os.PathLike[str], other: str | None) -> bool:
    return other is not None and os.path.lexists(path) and os.path.samefile(path, other)


def check_complete(known: BudgetRun, ledger: Ledger) -> None:
    """Refuses a ledger that lacks releases of the one that the run has named, such as an older copy."""
    recorded = _ledger_of(known, known.ledger)
    if recorded is not None and len(recorded) > len(ledger):
        raise Refused(
            f"Budget: run {known.run} has {len(recorded)} releases in {known.ledger!r}, and the ledger given has "
            f"{len(ledger)}. Settle it from that file."
        )
