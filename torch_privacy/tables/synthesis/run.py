# SPDX-License-Identifier: Apache-2.0
"""Makes a generator of synthetic rows in a run folder, release by release; a run that is stopped or killed goes on."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import privacy
from ...privacy.budget_file import new_run
from ...runs import checkpoint
from ...runs.folder import RunFolder
from ...support.units import plural
from ...support.validate import Refused, strictly_between
from ...training.bound_data import reserve
from ..extra import needed
from ..learn import TableError, capped, learn
from ..read import rows_of
from ..schema import Schema
from ..split import owner_codes
from .cells import Grid
from .marginals import Marginals
from .network import order_of
from .network_training import STEPS_BETWEEN, NetworkTraining
from .plan import WHERE, Plan, Settings
from .statement import of_marginals, with_generator
from .synthesizer import Synthesizer

if TYPE_CHECKING:
    from pandas import DataFrame

FEWEST = 200  # rows or persons, below which noise is all that is left
MOST_VALUES = 1000  # of one column
EXPERIMENT = "synthetic table"  # in the settings of the run folder


class Run:
    """A run of a generator. Call `steps` to its end, and then `finish`.

    Args:
        path: the run folder, new or of a run that was stopped.
        frame: rows to learn from, as from `read_table`.
        schema: what is public.
        settings: of the run.
        owners: (n,) the person of each row, or None.
        budget: of the data, or None; ``of_budget`` are the rows that it belongs to, if there are more.
        written: settings to write, such as the file's name; by default those of the run.
    """

    def __init__(
        self,
        path: Path | str,
        frame: DataFrame,
        schema: Schema,
        settings: Settings,
        *,
        owners: Any = None,
        budget: privacy.DataBudget | None = None,
        of_budget: tuple[DataFrame, int | None] | None = None,
        written: Mapping[str, Any] | None = None,
    ):
        self.folder, self.settings = RunFolder(Path(path)), settings
        self._frame, self._declared, self._owners, self._budget = frame, schema, owners, budget
        self._written = {"experiment": EXPERIMENT, **(written or asdict(settings))}
        if (owners is None) != (settings.per_owner is None):
            raise ValueError(
                f"{WHERE}: owners and per_owner belong together: the person of each row, and how many rows."
            )
        self.num_units = len(frame) if owners is None else len(owner_codes(owners, len(frame), WHERE)[1])
        self._of_budget = of_budget or (frame, None if owners is None else self.num_units)
        self.plan = Plan(settings, schema, self.num_units)
        self._check()
        self.notes: list[str] = []
        self._marginals: Marginals | None = None
        self._network: NetworkTraining | None = None
        self._ledger: privacy.Ledger | None = None
        self._state: dict[str, Any] = {}

    def _check(self) -> None:
        n, settings = self.num_units, self.settings
        what = "rows" if self._owners is None else plural(settings.unit)
        if n < FEWEST:
            raise ValueError(
                f"{WHERE}: {n} {what} to learn from are too few: with fewer than {FEWEST} hardly anything but noise "
                "would be left."
            )
        strictly_between(WHERE, 0, 1 / n, delta=settings.delta, hint=f"It must be below 1/n for these {n:,} {what}.")
        self._declared.check_frame(self._frame, "the table")
        for column in self._declared.columns:
            if (number := len(column.categories or ())) > MOST_VALUES:
                raise ValueError(
                    f"{WHERE}: the column {column.name!r} has {number:,} categories in the schema, for {n:,} {what}; "
                    f'at most {MOST_VALUES:,} are synthesized. Give it kind = "ignored".'
                )

    # What the run is made of, after the first step

    @property
    def unit(self) -> str:
        """Returns what is protected, in words."""
        if self.settings.per_owner is None:
            return "one row of the table"
        return f"one {self.settings.unit}, at most {self.settings.per_owner} of its rows"

    @property
    def scale(self) -> float:
        """Returns the factor on the noise of the generator's releases."""
        return self._state["scale"]

    @property
    def target(self) -> int | None:
        """Returns the place of the target, if there is one."""
        schema, names = self.grid.schema, self.grid.names
        return names.index(schema.target) if schema.target in names else None

    @property
    def order(self) -> list[int]:
        """Returns the places of the columns, in the order in which a network draws them."""
        return order_of(len(self.grid.sizes), self.target)

    @property
    def prior(self) -> list[privacy.Release]:
        """Returns the releases that the schema was learnt from."""
        released = self._state["released"]
        both = zip(released["events"], released["fingerprints"], strict=True)
        return [privacy.Release(privacy.event_from_dict(event), fingerprint) for event, fingerprint in both]

    @property
    def of_owners(self) -> dict[str, Any]:
        """Returns arguments of `Examples`, where persons are protected."""
        if self._owners is None:
            return {}
        owners = np.asarray(self._owners)
        return {"owners": owners, "per_owner": self.settings.per_owner, "owner_name": self.settings.unit}

    # The run

    def steps(self) -> Iterator[tuple[int, int]]:
        """Makes all releases; yields how many of the generator's are made, and how many there are.

        Leave the loop at any time and call `close`: a run with the same arguments goes on there.
        """
        if self.folder.checkpoint.exists():
            self._resume()
        else:
            self._begin()
        yield from self._marginal_steps() if self._network is None else self._network_steps(self._network)

    def _begin(self) -> None:
        needed("opendp.measurements")
        self.folder.check_new()
        scale = self.plan.scale()
        if self._budget is not None:
            self._budget.check(self._all_planned(scale))
        self.folder.create()
        try:
            run = "" if self._budget is None else new_run()
            if run:
                self._reserve(scale, run).begin()
            self._ledger = privacy.Ledger(self.folder.ledger, run=run)
            self._state = {
                "settings": asdict(self.settings),
                "digest": self._digest(),
                "key": secrets.token_bytes(32).hex(),
                "scale": scale,
                "released": self._learnt(self._ledger),
                "made": [],
                "network": None,
            }
            self.folder.write_settings(self._written, self.folder.write_json)
            self._prepare()
            self._save()
        except BaseException:
            self.close()
            raise

    def _all_planned(self, scale: float) -> list[tuple[privacy.Event, int]]:
        return [*self.plan.learning, *self.plan.generating(scale)]

    def _reserve(self, scale: float, run: str) -> Any:
        assert self._budget is not None
        frame, num_owners = self._of_budget
        what = f"synthetic rows in {self.folder.path.absolute()}"
        releases, rows, ledger = self._all_planned(scale), rows_of(frame), self.folder.ledger
        return reserve(self._budget, releases, what, rows, num_owners=num_owners, run=run, ledger=ledger)

    def _learnt(self, ledger: privacy.Ledger) -> dict[str, Any]:
        """Learns what the schema leaves open; each release is in the ledger before it is used."""
        schema, settings, share = self._declared, self.settings, self.settings.learning_share
        if schema.is_complete:
            return {"schema": schema.to_toml(), "events": [], "fingerprints": [], "notes": []}

        def event_of(release: privacy.Release) -> privacy.Event:
            return replace(release.event, unit=settings.unit)  # type: ignore[call-arg]

        try:
            learnt = learn(
                self._frame,
                schema,
                epsilon=share * settings.epsilon,
                delta=share * settings.delta,
                owners=self._owners,
                per_owner=settings.per_owner or 1,
                record=lambda release: ledger.record(event_of(release), len(ledger), release.fingerprint),
            )
        except TableError as error:
            spent = ledger.profile().epsilon_high(settings.delta) if len(ledger) else 0.0
            raise ValueError(f"{str(error).rstrip('.')}. To learn this has cost epsilon {spent:.3f}.") from None
        return {
            "schema": learnt.schema.to_toml(),
            "events": [privacy.event_to_dict(event_of(release)) for release in learnt.releases],
            "fingerprints": [release.fingerprint for release in learnt.releases],
            "notes": [note.replace("are imputed", "stay missing") for note in learnt.notes],
        }

    def _resume(self) -> None:
        self.folder.lock()
        try:
            state = checkpoint.load(self.folder.checkpoint)
            if state.get("settings") != asdict(self.settings):
                raise Refused(f"{self.folder.path}: was begun with other settings. Give those, or name another folder.")
            if state["digest"] != self._digest():
                raise Refused(f"{self.folder.path}: the table was changed since the run began. Restore it.")
            self._state, self._ledger = state, privacy.Ledger.load(self.folder.ledger)
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Encodes the rows by the completed schema, and takes up what was made already."""
        state, settings = self._state, self.settings
        self.grid = grid = Grid(Schema.from_toml(state["released"]["schema"]))
        lost = [c for c in grid.schema.columns if c.kind == "ignored" and c.reason != "left out by the command"]
        self.notes = [note for note in state["released"]["notes"] if "is ignored" not in note]
        self.notes += [f"The synthetic table lacks {c.name!r}: {c.reason or 'the schema ignores it'}." for c in lost]
        rows = np.arange(len(self._frame))
        if self._owners is not None and settings.generator != "network":  # its training chooses rows in each step
            rows = capped(
                self._owners, settings.per_owner or 1, len(rows), int.from_bytes(self._derived("owners")[:16])
            )
        used = self._frame.iloc[rows]
        self.codes = grid.encode(used)
        if settings.generator == "network":
            self._prepare_network()
            return
        self._marginals = Marginals(
            settings.generator,
            self.codes,
            grid.fractions(used),
            grid.sizes,
            self.plan.releases(self.scale),
            bytes.fromhex(state["key"]),
            rows=settings.per_owner or 1,
            total=self.num_units if self._owners is None else None,
            target=self.target,
            made=state["made"],
        )

    def _prepare_network(self) -> None:
        assert self._ledger is not None
        self._ledger.close()  # the training opens it
        self._network = NetworkTraining(
            self.codes,
            self.grid.sizes,
            self.order,
            self.plan.training,
            seed=self.settings.seed,
            noise_multiplier=self.scale,
            folder=self.folder,
            prior=self.prior,
            owners=self.of_owners,
            budget=None if self._budget is None else replace(self._budget, is_bound=True),
        )
        self._ledger = self._network.training.ledger
        if self._state["network"] is not None:
            self._network.load_state_dict(self._state["network"])

    def _marginal_steps(self) -> Iterator[tuple[int, int]]:
        marginals, ledger = self._marginals, self._ledger
        assert marginals is not None
        assert ledger is not None
        releases, before = self.plan.releases(self.scale), len(self._state["released"]["events"])
        for number in range(len(marginals.made), len(releases)):
            # noise is a function of key and number; a choice that was lost with its process is made anew, unseen
            ledger.record(releases[number].event, before + number, self._derived(f"release {number}").hex())
            self._state["made"] = [*self._state["made"], marginals.make()]
            self._save()
            yield number + 1, len(releases)

    def _network_steps(self, network: NetworkTraining) -> Iterator[tuple[int, int]]:
        for made, of in network.steps():
            if made % STEPS_BETWEEN == 0 or made == of:
                self._save()
            yield made, of

    def _save(self) -> None:
        if self._network is not None:
            self._state["network"] = self._network.state_dict()
        assert self._ledger is not None
        self._ledger.sync()
        self.folder.write_checkpoint(self._state)

    def synthesizer(self) -> Synthesizer:
        """Returns the generator, after the last step: a function of the releases alone."""
        if self._network is not None:
            columns = [column for column in self.grid.columns if column.kind == "number"]
            names = [c.name for c in columns if all(float(end).is_integer() for end in c.bounds or ())]
            return Synthesizer(self.grid, self._network.model, tuple(names))  # bounds are public
        assert self._marginals is not None
        numbers = [self.grid.names[place] for place in self.grid.numeric]
        both = zip(numbers, self._marginals.fractional, strict=True)
        return Synthesizer(
            self.grid, self._marginals.chain(), tuple(name for name, is_fraction in both if not is_fraction)
        )

    def profile(self) -> privacy.Profile:
        """Returns the price of all releases."""
        assert self._ledger is not None
        return self._ledger.profile()

    @property
    def data_budget(self) -> dict[str, Any]:
        """Returns the budget of the data and what is drawn from it, as statements have it; nothing without one."""
        return {} if self._budget is None else {"data_budget": self._budget.state.as_json()}

    def finish(self) -> Synthesizer:
        """Writes the generator and its privacy statement, and deletes the secret checkpoint."""
        found, ledger = self.synthesizer(), self._ledger
        assert ledger is not None
        ledger.sync()
        found.save(self.folder)
        if self._network is not None:
            statement = self._network.training.statement()
        else:
            if self._budget is not None:
                fingerprints = [release.fingerprint for release in ledger.releases]
                reservation = self._reserve(self.scale, ledger.run)
                if reservation.drawn is None or reservation.drawn.settled is None:  # of a run that was killed here
                    reservation.settle(fingerprints=fingerprints)
            statement = of_marginals(self, ledger)
        self.folder.write_json(self.folder.privacy, with_generator(statement, self))
        self.folder.delete_checkpoint()
        self.close()
        return found

    def close(self) -> None:
        """Lets go of the folder, so that the run can be resumed."""
        if self._ledger is not None:
            self._ledger.close()
        if self.folder.is_locked:
            self.folder.abandon()  # unlocks it, and removes it if nothing is in it

    def _derived(self, purpose: str) -> bytes:
        return hmac.new(bytes.fromhex(self._state["key"]), purpose.encode(), hashlib.sha256).digest()

    def _digest(self) -> str:
        """Returns a digest of the table, which is as secret as the table."""
        hashes = needed("pandas").util.hash_pandas_object(self._frame.astype(str), index=False).to_numpy()
        return hashlib.sha256(repr(list(self._frame.columns)).encode() + hashes.tobytes()).hexdigest()
