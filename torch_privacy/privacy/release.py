# SPDX-License-Identifier: Apache-2.0
"""Provides `Release`, one entry of a ledger, why such are not private, and which descriptions are of one sum."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .events.base import REMOVALS, Event, check_event, event_to_dict
from .ledger_file import LedgerFile


@dataclass(frozen=True)
class Release:
    """One release made outside of a training, for the ledger of the training that builds on it.

    Args:
        event: the release's description.
        fingerprint: distinguishes it from other releases of the same event, such as a digest of many noisy numbers. Two
            with one event and one fingerprint may be counted as one.
        warning: the reason why it is not private; "" if it is.
    """

    event: Event
    fingerprint: str
    warning: str = ""

    def __post_init__(self) -> None:
        check_event("privacy.Release", self.event)


def new_fingerprint(what: str) -> str:
    """Returns a fingerprint that no other release has; a digest of the outcome is shared by those with equal ones."""
    return f"{what}: {secrets.token_hex(8)}"


@dataclass(frozen=True)
class PendingRelease:
    """A release that is being recorded."""

    size: int  # of the file, once its lines are there
    event: Event
    index: int
    step: int
    fingerprint: str


class Reason:
    """Why the releases of a ledger are not private: a file has it when it is known, at the latest with the next sync.

    Attributes:
        ask: returns the reason as their training sees it now, "" if they are private.
        known: the reason as far as it is known without asking, as from a file or a state.
    """

    def __init__(self) -> None:
        self.ask: Callable[[], str] = str
        self.known = self._written = ""
        self._number = 0  # of releases when it was asked for

    def now(self) -> str:
        """Returns the reason; one that was known stays."""
        self.known = self.ask() or self.known
        return self.known

    def note(self, number: int, file: LedgerFile | None) -> None:
        """Asks about this number of releases, and writes the reason into the file."""
        self._number = number
        self.now()
        self.write(file)

    def note_if_new(self, number: int, file: LedgerFile | None) -> None:
        """Asks if releases were made since the last time: what comes after the last one is not about them."""
        if number > self._number:
            self.note(number, file)

    def write(self, file: LedgerFile | None) -> None:
        """Writes what is known into the file, unless it has that or is closed."""
        if self.known != self._written and file is not None and file.is_open:
            file.append(*file.encode([{"warning": self.known}]))
            self._written = self.known

    def take(self, found: Any) -> None:
        """Takes the reason that a line of a file has."""
        if not isinstance(found, str):
            raise ValueError(f"warning {found!r} is not a string")
        self.known = self._written = found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "known": self.now(), "ask": str}  # a copy knows what is known now


def is_same_sum(event: Event, other: Event) -> bool:
    """True for equal events, and for those that differ in their relations alone and have the same sum and price.

    The steps of older runs were recorded under add/remove.
    """
    if event == other:
        return True
    relations = {event.neighboring_relation, other.neighboring_relation}
    fields = event_to_dict(event), event_to_dict(other)
    return relations == set(REMOVALS) and _without_relation(fields[0]) == _without_relation(fields[1])


def _without_relation(description: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in description.items() if name != "neighboring_relation"}
