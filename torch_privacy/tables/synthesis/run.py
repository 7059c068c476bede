# SPDX-License-Identifier: Apache-2.0
"""Makes a generator of synthetic rows in a run folder, release by release; a run that is stopped or killed goes on."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import privacy
from ...privacy.budget_file import new_run
from ...runs import checkpoint
from ...runs.folder import RunFolder
from ...support.validate import Refused
from ...training.bound_data import reserve
from ..extra import needed
from ..learnt import releases_in
from ..read import rows_of
from ..schema import Schema
from .cells import Codes, ColumnGrid
from .marginals import Marginals
from .network import order_of
from .network_training import STEPS_BETWEEN, NetworkTraining
from .plan import Plan, SynthesisSettings
from .released import PublicSetup
from .source import TO_WRITE, SourceRows
from .statement import of_marginals, with_generator
from .synthesizer import Synthesizer

if TYPE_CHECKING:
    from pandas import DataFrame

DRAWN = 10_000  # rows, to see what a network draws
EXPERIMENT = "synthetic table"  # in the settings of the run folder


class GeneratorRun:
    """A run of a generator. Call `steps` to its end, and then `finish`.

    Args:
        path: the run folder, new or of a run that was stopped.
        frame: rows to learn from, as from `read_table`.
        schema: what is public.
        settings: of the run.
        owners: (n,) the person of each row, or None.
        budget: of the data, or None; ``of_budget`` are the rows that it belongs to, if there are more.
        written: settings to write, such as the file's name; by default those of the run.
        to_write: returns a sentence on where to write lines of a schema, for errors.
    """

    def __init__(
        self,
        path: Path | str,
        frame: DataFrame,
        schema: Schema,
        settings: SynthesisSettings,
        *,
        owners: Any = None,
        budget: privacy.DataBudget | None = None,
        of_budget: tuple[DataFrame, int | None] | None = None,
        written: Mapping[str, Any] | None = None,
        to_write: Callable[[str], str] = TO_WRITE,
    ):
        self.folder, self.settings = RunFolder(Path(path)), settings
        self.source, self._budget = SourceRows(frame, schema, settings, owners, of_budget, to_write), budget
        self.source.check()
        self._written = {"experiment": EXPERIMENT, **(written or asdict(settings))}
        self.plan = Plan(settings, schema, self.source.num_units)
        self._marginals: Marginals | None = None
        self._network: NetworkTraining | None = None
        self._ledger: privacy.Ledger | None = None
        self._state: dict[str, Any] = {}

    # What the run is made of, after the first step

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
        return releases_in(self._state["released"])

    @property
    def notes(self) -> list[str]:
        """Returns what a reader should know of the columns."""
        lost = [c for c in self.grid.schema.columns if c.kind == "ignored" and c.reason != "left out by the command"]
        notes = [note for note in self._state["released"]["notes"] if "is ignored" not in note]
        return notes + [f"The synthetic table lacks {c.name!r}: {c.reason or 'the schema ignores it'}." for c in lost]

    @property
    def public(self) -> PublicSetup:
        """Returns what is public of the marginals."""
        return PublicSetup(
            generator=self.settings.generator,
            sizes=tuple(self.grid.sizes),
            num_numeric=len(self.grid.numeric),
            releases=self.plan.releases(self.scale),
            rows=self.settings.per_owner or 1,
            total=self.source.num_units if self.settings.per_owner is None else None,
            target=self.target,
        )

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
                "digest": self.source.digest(),
                "key": secrets.token_bytes(32).hex(),
                "scale": scale,
                "released": self.source.learn(self._ledger),
                "made": [],
                "network": None,
            }
            self.folder.write_settings(self._written, self.folder.write_json)
            self._save()  # what was learnt is kept, however long the rest takes
            self._prepare()
            self._save()
        except BaseException:
            self.close()
            raise

    def _all_planned(self, scale: float) -> list[tuple[privacy.Event, int]]:
        return [*self.plan.learning, *self.plan.generating(scale)]

    def _reserve(self, scale: float, run: str) -> Any:
        assert self._budget is not None
        frame, num_owners = self.source.whole
        what = f"synthetic rows in {self.folder.path.absolute()}"
        releases, rows, ledger = self._all_planned(scale), rows_of(frame), self.folder.ledger
        return reserve(self._budget, releases, what, rows, num_owners=num_owners, run=run, ledger=ledger)

    def _resume(self) -> None:
        self.folder.lock()
        try:
            state = checkpoint.load(self.folder.checkpoint)
            if state.get("settings") != asdict(self.settings):
                raise Refused(f"{self.folder.path}: was begun with other settings. Give those, or name another folder.")
            if state["digest"] != self.source.digest():
                raise Refused(f"{self.folder.path}: the table was changed since the run began. Restore it.")
            self._state, self._ledger = state, privacy.Ledger.load(self.folder.ledger)
            self._check_reserved(self._ledger.run)
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _check_reserved(self, run: str) -> None:
        """Refuses to go on with a run that was begun with another budget or none, or has nothing reserved any more."""
        if bool(run) != (self._budget is not None):
            was, now = ("with a", "Give it with") if run else ("without a", "Resume it without")
            raise Refused(f"{self.folder.path}: the run was begun {was} budget of the data. {now} budget=, --budget.")
        made = len(self._state["made"])
        is_training = self.settings.generator == "network"  # which asks itself
        if run and not is_training and made < len(self.plan.releases(self.scale)):
            self._reserve(self.scale, run).begin()  # refuses a run that is settled

    def _prepare(self) -> None:
        """Encodes the rows by the completed schema, and takes up what was made already."""
        self.grid = grid = ColumnGrid(Schema.from_toml(self._state["released"]["schema"]))
        if self.settings.generator == "network":  # its training chooses rows of each person in each step
            self.codes = grid.encode(self.source.frame)
            self._prepare_network()
            return
        used = self.source.used(int.from_bytes(self._derived("owners")[:16]))
        self.codes, key = grid.encode(used), bytes.fromhex(self._state["key"])
        self._marginals = Marginals(self.codes, grid.fractions(used), self.public, key, self._state["made"])

    def _prepare_network(self) -> None:
        assert self._ledger is not None
        self._ledger.close()  # the training opens it
        self._network = NetworkTraining(
            self.codes,
            self.grid,
            self.order,
            self.plan.training,
            seed=self.settings.seed,
            noise_multiplier=self.scale,
            folder=self.folder,
            prior=self.prior,
            owners=self.source.of_owners,
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
        for number in range(len(self._state["made"]), len(releases)):
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
            model = self._network.model
            drawn = model.draw(DRAWN, np.random.default_rng(0))
            names = [self.grid.names[place] for place in self.grid.numeric if self._is_whole(place, drawn)]
            return Synthesizer(self.grid, model, tuple(names))
        assert self._marginals is not None
        numbers = [self.grid.names[place] for place in self.grid.numeric]
        released = self._marginals.released
        both = zip(numbers, released.fractional, strict=True)
        return Synthesizer(self.grid, released.chain(), tuple(name for name, is_fraction in both if not is_fraction))

    def _is_whole(self, place: int, drawn: Codes) -> bool:
        """True if a number has whole bounds, and drawn values leave out most bins in which no whole number lies."""
        is_bounded = all(float(end).is_integer() for end in self.grid.columns[place].bounds or ())  # bounds are public
        holds = self.grid.holds_whole(place)
        return is_bounded and bool(holds.all() or 2 * (~holds[drawn[:, place]]).mean() < (~holds).mean())

    def profile(self) -> privacy.Profile:
        """Returns the price of all releases."""
        assert self._ledger is not None
        return self._ledger.profile()

    @property
    def data_budget(self) -> dict[str, Any]:
        """Returns the budget of the data and what is drawn from it, as statements have it; nothing without one."""
        return {} if self._budget is None else {"data_budget": self._budget.state.as_json()}

    def finish(self, not_covered: Sequence[str] = ()) -> Synthesizer:
        """Writes the generator and its privacy statement, and deletes the secret checkpoint.

        The statement lists as ``not_covered`` what else was read from the rows without noise.
        """
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
                if reservation.drawn.settled is None:  # of a run that was killed here
                    reservation.settle(fingerprints=fingerprints)
            statement = of_marginals(self.settings, ledger, self.source.num_units, self.data_budget)
        self.folder.write_json(self.folder.privacy, with_generator(statement, self.settings, not_covered))
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
