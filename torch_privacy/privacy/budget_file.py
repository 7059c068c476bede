# SPDX-License-Identifier: Apache-2.0
"""Reads the file of a data set's budget: a header, and a line for each step of a run, chained by digests."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..support.schema import violation
from ..support.units import plural
from ..support.validate import Refused
from .compose import relation_of
from .events.base import Event, NeighboringRelation, checked_releases, event_from_dict
from .gaussian_filter import GaussianFilter
from .ledger_file import FORMAT, LedgerFile, Line
from .release import Release

PATIENCE = 120.0  # seconds to wait for another process, which may be pricing a run
RUN_BYTES = 6  # of the name of a run
Releases = Iterable[tuple[Event, int]]

TEXT = {"type": "string"}
SHARE = {"type": ["number", "null"], "minimum": 0}
RELEASES = {"type": "array", "items": {"type": "object", "required": ["event", "count"]}}
HEADER = {
    "required": ["ledger", "purpose", "epsilon", "delta", "unit", "neighboring_relation"],
    "properties": {
        "ledger": {"const": FORMAT},
        "purpose": {"const": "budget"},
        "epsilon": {"type": "number", "exclusiveMinimum": 0},
        "delta": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "unit": TEXT,
        "neighboring_relation": {"enum": [relation.value for relation in NeighboringRelation]},
    },
}
LINES: Mapping[str, Any] = {  # by their first key
    "bind": {"required": ["bind"], "properties": {"bind": {"type": "object", "required": ["fingerprint", "method"]}}},
    "reserve": {
        "required": ["what", "ledger", "date", "releases", "share"],
        "properties": {
            "reserve": TEXT,
            "what": TEXT,
            "ledger": {"type": ["string", "null"]},
            "date": TEXT,
            "releases": RELEASES,
            "share": SHARE,
        },
    },
    "begin": {"properties": {"begin": TEXT}},
    "settle": {
        "required": ["releases", "share", "reason", "date", "fingerprints"],
        "properties": {
            "settle": TEXT,
            "releases": RELEASES,
            "share": SHARE,
            "reason": TEXT,
            "date": TEXT,
            "fingerprints": {"type": "array", "items": TEXT},
            "warning": TEXT,
        },
    },
}


@dataclass(frozen=True)
class BudgetRun:
    """A run that draws from a budget.

    Attributes:
        run: its name.
        what: the run in words.
        ledger: path of its own ledger, if it has one.
        date: of the reservation.
        reserved: all that it may release.
        share: of the budget; None for a run that was declared in advance.
        has_begun: whether it may have read rows.
        settled: what it has released, once it has ended.
        reason: why it ended before all was released.
        fingerprints: of its releases.
        warning: why these are not private, whatever was drawn for them; "" if they are.
    """

    run: str
    what: str
    ledger: str | None
    date: str
    reserved: list[tuple[Event, int]]
    share: float | None
    has_begun: bool = False
    settled: list[tuple[Event, int]] | None = None
    reason: str = ""
    fingerprints: tuple[str, ...] = ()
    warning: str = ""

    @property
    def releases(self) -> list[tuple[Event, int]]:
        """Returns what the run is charged for."""
        return self.reserved if self.settled is None else self.settled

    @property
    def status(self) -> str:
        """Returns how far the run is, in a word."""
        return "settled" if self.settled is not None else "begun" if self.has_begun else "reserved"


@dataclass(frozen=True)
class BudgetState:
    """Holds the content of a budget's file.

    Attributes:
        epsilon, delta, unit, neighboring_relation: of the budget.
        runs: in the order of their reservations.
        data: fingerprint of the data; empty until they are bound.
    """

    epsilon: float
    delta: float
    unit: str
    neighboring_relation: NeighboringRelation
    runs: list[BudgetRun] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def filter(self) -> GaussianFilter:
        """Returns the filter by which runs chosen from outcomes are priced."""
        return GaussianFilter(self.epsilon, self.delta, self.neighboring_relation, self.unit)

    @property
    def is_open(self) -> bool:
        """True while no run has begun, so that every run is declared in advance."""
        return not any(run.has_begun for run in self.runs)

    @property
    def share(self) -> float:
        """Returns the shares of all runs that may have been chosen from outcomes, together."""
        return sum(run.share for run in self.runs if run.share is not None)

    @cached_property
    def epsilon_high(self) -> float:
        """Returns an upper bound on ε of all runs at the budget's δ."""
        declared = [release for run in self.runs if run.share is None for release in run.releases]
        return self.filter.epsilon_high(declared, self.share)

    def run(self, name: str) -> BudgetRun | None:
        """Returns the run of this name."""
        return next((run for run in self.runs if run.run == name), None)

    def with_run(self, releases: list[tuple[Event, int]]) -> BudgetState:
        """Returns the state with a further run of these releases."""
        share = None if self.is_open else self.filter.share(releases)
        return replace(self, runs=[*self.runs, BudgetRun("", "", None, "", releases, share)])

    def as_json(self) -> dict[str, Any]:
        """Returns the budget and what is drawn from it, for statements and the command."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "unit": self.unit,
            "neighboring_relation": self.neighboring_relation.value,
            "epsilon_drawn": self.epsilon_high,
            "num_runs": len(self.runs),
            "num_unsettled": sum(run.settled is None for run in self.runs),
            **({"num_not_private": number} if (number := sum(bool(run.warning) for run in self.runs)) else {}),
        }


def state_in(path: Path, file: LedgerFile | None = None) -> BudgetState:
    """Returns what is in a budget's file, which is neither locked nor changed unless it is given open.

    Raises:
        Refused: it is damaged, or no budget.
        FileNotFoundError: there is no such file.
    """
    opened = LedgerFile(path, read_only=True) if file is None else file
    try:
        lines = opened.read()
    finally:
        if file is None:
            opened.release()
    wrong = violation(HEADER, lines[0]) if lines else "it holds no whole line"
    if wrong:
        raise Refused(f"Budget: {str(path)!r} is no budget, or damaged ({wrong}). Name another file, or restore it.")
    header = lines[0]
    relation = NeighboringRelation(header["neighboring_relation"])
    state = BudgetState(header["epsilon"], header["delta"], header["unit"], relation)
    for number, line in enumerate(lines[1:], start=2):
        try:
            _take(state, line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refused(f"Budget: line {number} of {str(path)!r} cannot be read: {error}.") from error
    return state


@contextmanager
def locked(path: Path) -> Iterator[tuple[LedgerFile, BudgetState]]:
    """Opens the file for this process alone; what was appended is on the disk at the end."""
    file = LedgerFile(path, patience=PATIENCE)
    try:
        state = state_in(path, file)
        file.mend()
        yield file, state
        file.sync()
    finally:
        file.lose("it was closed")


def _take(state: BudgetState, line: Line) -> None:
    """Takes in a line."""
    kind = next(iter(line), "")
    if kind not in LINES:
        raise ValueError(f"unknown entry {kind!r:.40}")
    if wrong := violation(LINES[kind], line):
        raise ValueError(wrong)
    if kind == "bind":
        if state.data:
            raise ValueError("the data are bound twice")
        state.data.update(line["bind"])
        return
    place = next((place for place, run in enumerate(state.runs) if run.run == line[kind]), None)
    if (place is None) != (kind == "reserve"):
        raise ValueError(f"run {line[kind]!r:.40} is {'unknown' if place is None else 'there twice'}")
    if place is None:
        share, text = line["share"], {name: line[name] for name in ("what", "ledger", "date")}
        state.runs.append(BudgetRun(line["reserve"], **text, reserved=_releases(line["releases"]), share=share))
        return
    run = state.runs[place]
    if run.settled is not None:
        raise ValueError(f"run {run.run!r} was settled before")
    changed = {"has_begun": True}
    if kind == "settle":
        made = _releases(line["releases"])
        changed = {
            "has_begun": run.has_begun or bool(made),  # what has released something has begun, noted or not
            "settled": made,
            "share": line["share"],
            "reason": line["reason"],
            "fingerprints": tuple(line["fingerprints"]),
            "warning": line.get("warning", ""),
        }
    state.runs[place] = replace(run, **changed)


def _releases(described: list[Any]) -> list[tuple[Event, int]]:
    return checked_releases("Budget", [(event_from_dict(one["event"]), one["count"]) for one in described])


def create(path: Path, epsilon: float, delta: float, unit: str, relation: NeighboringRelation) -> None:
    """Makes the file of a budget; leaves one alone that another process has made meanwhile."""
    header: Line = {"ledger": FORMAT, "purpose": "budget", "epsilon": epsilon, "delta": delta, "unit": unit}
    try:
        file = LedgerFile(path, create=True)
        try:
            with file.published():
                append(file, {**header, "neighboring_relation": relation.value})
        finally:
            file.lose("it was made")
    except Refused:
        if not os.path.lexists(path):
            raise


def checked(path: str, unit: str, relation: NeighboringRelation, releases: Releases) -> list[tuple[Event, int]]:
    """Returns releases of this unit and relation, without those that are made 0 times; refuses others."""
    found = checked_releases("Budget", releases)
    units = sorted({event.unit for event, _ in found} - {unit})
    if units:
        raise Refused(
            f"Budget: an event protects one {units[0]}, and {path!r} is a budget for one {unit}: their epsilons do not "
            f"add up. Protect {plural(unit)}, or open a budget for {plural(units[0])}."
        )
    wrong = [event for event, _ in found if not _holds(event, relation)]
    if wrong:
        raise Refused(
            f"Budget: {wrong[0]!r} holds for {wrong[0].neighboring_relation.in_words}, and {path!r} is a budget for "
            f"{relation.in_words}. Open another budget for this relation; the epsilons of both have no sum."
        )
    return [(event, count) for event, count in found if count]


def includes(reserved: Releases, releases: Releases) -> bool:
    """True if releases are part of those reserved, so that they cost no more."""
    left = count_of(reserved)
    left.subtract(count_of(releases))
    return all(count >= 0 for count in left.values())


def counted(releases: Iterable[Release]) -> list[tuple[Event, int]]:
    """Returns the events of releases, as pairs (event, how often)."""
    return list(Counter(release.event for release in releases).items())


def count_of(releases: Releases) -> Counter[Event]:
    """Returns how often each event is released."""
    counts: Counter[Event] = Counter()
    for event, count in releases:
        counts[event] += count
    return counts


def _holds(event: Event, relation: NeighboringRelation) -> bool:
    """True if an event holds under a relation."""
    try:
        return relation_of({event.neighboring_relation, relation}) == relation
    except ValueError:
        return False


def append(file: LedgerFile, line: Line) -> None:
    """Appends a line, which is on the disk once the file is synced."""
    file.append(*file.encode([line]))


def new_run() -> str:
    """Returns a new name of a run."""
    return secrets.token_hex(RUN_BYTES)
