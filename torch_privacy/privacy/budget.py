# SPDX-License-Identifier: Apache-2.0
"""Provides `Budget`, an (ε, δ) that releases must not exceed, and `DataBudget`, which belongs to a data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support.units import ONE_EXAMPLE, now
from ..support.validate import Refused, check_unit, plain_numbers, positive, quoted, strictly_between
from .bracket import Bracket
from .budget_file import (
    BudgetRun,
    BudgetState,
    append,
    checked,
    counted,
    create,
    includes,
    locked,
    new_run,
    state_in,
)
from .budget_runs import Reservation, check_complete, check_goes_on, warning_of
from .calibrate import largest_number, log_ratio, most_steps
from .compose import compose
from .events.banded import of_own_run
from .events.base import Event, NeighboringRelation, check_relation, releases_to_json
from .ledger import Ledger
from .ledger_file import LedgerFile
from .release import Release
from .rounding import round_up, short

Releases = Iterable[tuple[Event, int]]


@plain_numbers
@dataclass(frozen=True)
class Budget:
    """An (ε, δ) that all releases together must not exceed: a privacy filter and an odometer.

    `allows` and `remaining` are the filter. They use certified upper bounds, so the releases that they allow are
    (epsilon, delta)-private together, even if one stops early for any reason. `spent` is the odometer: the cost of the
    releases so far, provided that their number was fixed in advance. If outcomes decide when to stop, report the
    budget instead. The events themselves (noise, sampling) must be chosen in advance, not from outcomes; `open` returns
    a budget for runs that are chosen from the outcomes of earlier ones.

    Args:
        epsilon: above 0.
        delta: in (0, 1).

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> budget, event = Budget(epsilon=2.0, delta=1e-5), SubsampledGaussian(1.0, 0.01)
        >>> budget.remaining(event)
        1202
        >>> budget.remaining(event, after=[(event, 1000)]), budget.allows([(event, 1203)])
        (202, False)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        positive("Budget", epsilon=self.epsilon)
        strictly_between("Budget", 0, 1, delta=self.delta)

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        unit: str | None = None,
        neighboring_relation: NeighboringRelation | None = None,
    ) -> DataBudget:
        """Opens the budget of a data set in a file, which is made if it does not exist; see `DataBudget`.

        Args:
            path: of the file.
            epsilon: of the budget; may be left out for a file that exists, and must else be the one in it.
            delta: likewise.
            unit: the word for what is protected, such as "customer"; by default "example".
            neighboring_relation: under which all events must hold; by default zero-out of one example, under which
                events for add/remove hold, too.

        Raises:
            Refused: the file has another epsilon, delta, unit or relation, or is damaged.
            FileNotFoundError: there is no such file, and epsilon or delta was not given.
        """
        given = {"epsilon": epsilon, "delta": delta, "unit": unit, "neighboring_relation": neighboring_relation}
        path = Path(path).absolute()
        if not os.path.lexists(path):
            if epsilon is None or delta is None:
                raise FileNotFoundError(2, "no such budget; give epsilon and delta to make one", str(path))
            word = ONE_EXAMPLE if unit is None else unit
            made = DataBudget(epsilon, delta, path, word, neighboring_relation or DEFAULT_RELATION)
            create(path, made.epsilon, made.delta, made.unit, made.neighboring_relation)
        state = state_in(path)
        found = DataBudget(state.epsilon, state.delta, path, state.unit, state.neighboring_relation)
        differing = [f"{name}={value!r}" for name, value in given.items() if value not in (None, getattr(found, name))]
        if differing:
            kept = ", ".join(f"{name}={getattr(found, name)!r}" for name in given)
            raise Refused(
                f"Budget.open: {', '.join(differing)}, but {str(path)!r} was made with {kept}. Leave it out: a "
                "budget is fixed when it is made."
            )
        return found

    def allows(self, releases: Releases) -> bool:
        """True if all of these together are certainly within the budget."""
        return compose(releases).epsilon_high(self.delta) <= self.epsilon

    def remaining(self, event: Event, after: Releases = (), most: int = 10**7) -> int:
        """Returns how many more releases of an event are within the budget after those; at most ``most``."""
        after = list(after)
        return most_steps(event, self.epsilon, self.delta, beside=after, most=most) if self.allows(after) else 0

    def spent(self, releases: Releases) -> Bracket[float]:
        """Returns ε of the releases so far at the budget's δ."""
        return compose(releases).epsilon(self.delta)


DEFAULT_RELATION = NeighboringRelation.REPLACE_SPECIAL


@dataclass(frozen=True)
class DataBudget(Budget):
    """The budget of a data set, in a file from which all runs on it draw, in several processes; made by `Budget.open`.

    A run *reserves* the price of all that it may release before it reads a row; *begins*; and *settles* when it has
    ended. Runs reserved before any run has begun are declared in advance: their price together is exact, by
    composition. Every later run may be chosen from outcomes, and takes a share of the Gaussian release that
    `GaussianFilter` describes. `PrivateTraining`, `PrivatePCA`, `tables.learn` and the commands do all of this with
    ``budget=``.

    Args:
        epsilon, delta: of all runs together.
        path: of the file.
        unit, neighboring_relation: of every event.
        is_bound: whether the data were compared by `torch_privacy.bind_data`, so that runs do not compare theirs, which
            may be another form of the same rows.

    Guarantees:
        - All runs together are (epsilon, delta)-private, however later ones were chosen and whenever they stop.
        - A run that does not fit is refused, and the file is unchanged.
        - When `reserve` returns, the reservation is on the disk; a run that is killed keeps it.
        - Two processes draw one after the other. A changed bit is noticed, and a torn last line is dropped, as in a
          `Ledger`.

    Example:
        >>> import tempfile
        >>> from torch_privacy.privacy import Gaussian
        >>> file = Path(tempfile.mkdtemp()) / "people.budget"
        >>> budget = Budget.open(file, epsilon=3, delta=1e-6)
        >>> run = budget.reserve([(Gaussian(5.0), 4)], "four means")
        >>> run.begin()
        >>> run.settle([(Gaussian(5.0), 4)])
        >>> budget.allows([(Gaussian(1.5), 1)]), budget.allows([(Gaussian(5.0), 4)])
        (False, True)
    """

    path: Path
    unit: str = ONE_EXAMPLE
    neighboring_relation: NeighboringRelation = DEFAULT_RELATION
    is_bound: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("Budget", unit=self.unit)
        check_relation("Budget", self.neighboring_relation)

    @property
    def state(self) -> BudgetState:
        """Returns what is in the file, without locking or changing it."""
        return state_in(self.path)

    @property
    def key_path(self) -> Path:
        """Returns the path of the secret key under which the data are fingerprinted."""
        return self.path.with_name(f"{self.path.name}.key")

    def allows(self, releases: Releases) -> bool:
        """True if a run with these releases could be reserved now, beside all other runs."""
        return self.state.with_run(self._checked(releases)).epsilon_high <= self.epsilon

    def remaining(self, event: Event, after: Releases = (), most: int = 10**7) -> int:
        """Returns how many releases of an event a run could reserve now, after those; at most ``most``."""
        after, state = list(after), self.state

        def excess(number: int) -> float:
            further = state.with_run(self._checked([*after, (event, number)]))
            return log_ratio(further.epsilon_high, self.epsilon)

        return largest_number(excess, most)

    def spent(self, releases: Releases = ()) -> Bracket[float]:
        """Returns bounds on ε of all runs at the budget's δ, with a further run of these releases; the lower is 0.

        A run with a ``warning`` (``state.runs``) is not private, and costs more than it has drawn.
        """
        state = self.state
        found = self._checked(releases)
        return Bracket(0.0, (state.with_run(found) if found else state).epsilon_high)

    def check(self, releases: Releases) -> None:
        """Raises ``Refused``, with what is left, unless a run with these releases fits."""
        self._check_fits(self.state, self._checked(releases))

    def unknown(self, releases: Iterable[Release]) -> list[Release]:
        """Returns those releases that no settled run has drawn already, by event and fingerprint."""
        runs = self.state.runs
        known = {(of_own_run(event), text) for run in runs for event, _ in run.releases for text in run.fingerprints}
        return [release for release in releases if (of_own_run(release.event), release.fingerprint) not in known]

    def reserve(
        self, releases: Releases, what: str, *, run: str | None = None, ledger: str | os.PathLike[str] | None = None
    ) -> Reservation:
        """Reserves the price of a run, before it reads a row.

        Args:
            releases: all that the run may release, as pairs (event, how often).
            what: the run in words, such as "a histogram of ages".
            run: a name for it, by which a resumed run finds its reservation; by default a new one.
            ledger: the file in which the run records its releases, if it does; a run that has begun is not resumed
                without.

        Raises:
            Refused: what is left of the budget does not suffice, an event has another unit or relation, or the run has
                reserved other releases before, has begun and has no ledger of its own in this file, or has its ledger
                in another file, of which this one is a copy.
        """
        found, name = self._checked(releases), run or new_run()
        with locked(self.path) as (file, state):
            known = state.run(name)
            if known is None:
                self._check_fits(state, found)
                share = None if state.is_open else state.filter.share(found)
                line = {
                    "reserve": name,
                    "what": what,
                    "ledger": None if ledger is None else str(Path(ledger).absolute()),
                    "date": now(),
                    "releases": releases_to_json(found),
                    "share": share,
                }
                append(file, line)
            elif not includes(known.reserved, found):
                raise Refused(
                    f"Budget: run {name} has reserved {known.reserved!r:.300} and would now release {found!r:.300}. "
                    "Resume it with the settings it began with, or begin a new run."
                )
            else:
                check_goes_on(known, ledger)
        return Reservation(self, name, tuple(found if known is None else known.reserved))

    def bind(self, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the fingerprint of the data; one that is made now if there is none.

        Args:
            make: returns the fingerprint of the data; `torch_privacy.bind_data` has it.
        """
        if found := self.state.data:
            return found
        with locked(self.path) as (file, state):
            if not state.data:
                append(file, {"bind": dict(make())})
        return self.state.data

    def settle(
        self, run: str, releases: Releases | None = None, *, reason: str = "", fingerprints: Iterable[str] = ()
    ) -> None:
        """Ends a run: what it did not release of its reservation is free again.

        Args:
            run: its name.
            releases: what it has released, as pairs (event, how often); None for all that it has reserved.
            reason: why the run ended before all was released, in words. The reason must be independent of the data,
                such as a power failure: if outcomes decided, the whole reservation is spent.
            fingerprints: of the run's own releases, by which `unknown` knows them. No two releases may share one.

        Raises:
            Refused: there is no such run, it is settled, has released more than reserved, or less without a reason; it
                gives something back while another process writes its ledger. A run of this process cannot go on.
        """
        self._settle(run, releases, reason, fingerprints, ends_writer=releases is not None)

    def _settle(
        self,
        run: str,
        releases: Releases | None,
        reason: str,
        fingerprints: Iterable[str],
        warning: str = "",
        *,
        ends_writer: bool,
        ledger: Ledger | None = None,
    ) -> None:
        with locked(self.path) as (file, state):
            known = self._known(state, run)
            if known.settled is not None:
                raise Refused(f"Budget: run {run} is settled already.")
            made = known.reserved if releases is None else self._checked(releases)
            if not includes(known.reserved, made):
                raise Refused(f"Budget: run {run} has released {made!r:.300}, more than {known.reserved!r:.300}.")
            is_new = not known.has_begun and not made
            is_free = is_new and (known.share is not None or state.is_open)  # nothing depends on outcomes
            if not includes(made, known.reserved) and not is_free and not reason.strip():
                raise Refused(
                    f"Budget: run {run} has reserved more than it has released. If it ended for a reason that is "
                    "independent of the data, give the reason (reason=, --reason); else settle the whole reservation: "
                    "leave releases (--ledger) out."
                )
            if ends_writer and known.ledger is not None and os.path.lexists(known.ledger):
                LedgerFile(known.ledger).lose("its run was settled")
            if ledger is not None:
                check_complete(known, ledger)
            warning = warning or warning_of(known)
            line = {"settle": run, "releases": releases_to_json(made), "reason": reason, "date": now()}
            line |= {"warning": warning} if warning else {}
            share = None if known.share is None else min(known.share, state.filter.share(made))
            append(file, {**line, "share": share, "fingerprints": list(fingerprints)})

    def settle_from(self, run: str, ledger: Ledger, *, reason: str = "") -> None:
        """Ends a run by what its ledger has; see `settle`.

        Raises:
            Refused: the ledger is that of another run, or lacks releases of this one.
        """
        if ledger.run != run:
            raise Refused(f"Budget: this is the ledger of run {ledger.run or '(none)'}, not of {run}.")
        made = counted(self.unknown(ledger.made))
        self._settle(run, made, reason, (), ledger.warning, ends_writer=True, ledger=ledger)

    def begin(self, run: str) -> None:
        """Notes that a run begins to read rows: runs reserved from now on may be chosen from its outcomes."""
        with locked(self.path) as (file, state):
            known = self._known(state, run)
            if known.settled is not None:
                raise Refused(
                    f"Budget: run {run} ({known.what}) is settled: what it had not released is no longer reserved. "
                    "Begin a new run."
                )
            if not known.has_begun:
                append(file, {"begin": run})

    def _known(self, state: BudgetState, run: str) -> BudgetRun:
        found = state.run(run)
        if found is None:
            names = quoted([known.run for known in state.runs], at_most=5)
            raise Refused(f"Budget: {str(self.path)!r} has no run {run!r}. It has {names or 'none'}.")
        return found

    def _checked(self, releases: Releases) -> list[tuple[Event, int]]:
        """Returns releases of this unit and relation; refuses others."""
        return checked(str(self.path), self.unit, self.neighboring_relation, releases)

    def _check_fits(self, state: BudgetState, releases: list[tuple[Event, int]]) -> None:
        further = state.with_run(releases)
        if further.epsilon_high <= self.epsilon:
            return
        how = "" if state.is_open else ", as one that may be chosen from outcomes of earlier runs"
        raise Refused(
            f"Budget: this run does not fit into {str(self.path)!r} (epsilon {self.epsilon:g} at delta = "
            f"{short(self.delta)}): {round_up(state.epsilon_high)} is drawn, and with this run{how} it would be "
            f"{round_up(further.epsilon_high)}. Nothing was read or released. Add noise, take fewer steps, or settle "
            f"runs that have ended (torch-privacy budget status {self.path})."
        )
