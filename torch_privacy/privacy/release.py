# SPDX-License-Identifier: Apache-2.0
"""Provides `Release`, one entry of a ledger, and says which descriptions are of one sum."""

from dataclasses import dataclass
from typing import Any

from .events.base import REMOVALS, Event, check_event, event_to_dict


@dataclass(frozen=True)
class Release:
    """One release made outside of a training, for the ledger of the training that builds on it.

    Args:
        event: the release's description.
        fingerprint: distinguishes it from other releases of the same event, such as a digest of what was released.
        warning: the reason why it is not private; "" if it is.
    """

    event: Event
    fingerprint: str
    warning: str = ""

    def __post_init__(self) -> None:
        check_event("privacy.Release", self.event)


@dataclass(frozen=True)
class PendingRelease:
    """A release that is being recorded."""

    size: int  # of the file, once its lines are there
    event: Event
    index: int
    step: int
    fingerprint: str


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
