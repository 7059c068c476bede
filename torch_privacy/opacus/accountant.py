# SPDX-License-Identifier: Apache-2.0
"""Provides `Accountant`, which shows the releases of an engine's trainings as Opacus' accountants do."""

from __future__ import annotations

import math
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .. import privacy
from ..support.validate import Refused
from .run import OpacusRun

Events = list[tuple[privacy.Event, int]]


class Accountant:
    """Prices all trainings of a `PrivacyEngine`, and the histories that it has loaded; Opacus' ``IAccountant``.

    Args:
        mechanism: name that Opacus uses: "prv", "rdp" or "gdp". Epsilon is the certified one for each.
    """

    def __init__(self, mechanism: str = "prv"):
        self._mechanism = mechanism
        self.runs: list[OpacusRun] = []
        self._given: dict[tuple[privacy.Event, str, str], privacy.Release] = {}  # made elsewhere; see `give`
        self._loaded: dict[str, Events] = {}  # by the name of the run that made them, in another process
        self._loaded_warning = ""  # why one of these is not private

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Returns (noise multiplier, sampling probability, number of steps) of what was released, as Opacus does.

        Raises:
            Refused: a release given as ``prior_releases`` is no Poisson-sampled Gaussian.
        """
        history: list[tuple[float, float, int]] = []
        for event, count in self.events():
            if not isinstance(event, privacy.SubsampledGaussian):
                raise Refused(f"PrivacyEngine.accountant.history: {event!r} has no place in a history of Opacus.")
            entry = event.noise_multiplier, event.sampling_probability
            if history and history[-1][:2] == entry:
                count += history.pop()[2]
            history.append((*entry, count))
        return history

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of Opacus' accountants."""
        return "prv", "rdp", "gdp"

    def mechanism(self) -> str:
        """Returns the name given."""
        return self._mechanism

    def __len__(self) -> int:
        return len(self.history)

    def events(self, without: OpacusRun | None = None) -> Events:
        """Returns what was released, loaded histories first; ``without`` leaves one run out."""
        events: Events = [(release.event, 1) for release in self._given.values()]
        for name, loaded in self._loaded.items():
            if all(run.name != name for run in self.runs):
                events += loaded
        return events + [pair for run in self.runs if run is not without for pair in run.trainings.own_events()]

    def releases(self, without: OpacusRun | None = None) -> list[privacy.Release]:
        """Returns what was released, for a training that builds on it."""
        number = 0
        releases = list(self._given.values())
        for event, count in self.events(without)[len(releases) :]:
            for _ in range(count):
                releases.append(privacy.Release(event, f"opacus {number}", self._warning()))
                number += 1
        return releases

    def _warning(self) -> str:
        """Returns why a training of this engine is not private; "" if all are."""
        found = [self._loaded_warning, *(run.training.statement().get("warning", "") for run in self.runs)]
        return next(filter(None, [*found, *(release.warning for release in self._given.values())]), "")

    def give(self, releases: Iterable[privacy.Release]) -> None:
        """Counts releases that were made elsewhere, once where they are given or loaded again.

        They are known by event, fingerprint and a mark. Histories have numbers in place of fingerprints, as other
        histories have, too, so that the mark is a random one, as for a release without a fingerprint; else it keeps
        equal ones of one call apart.
        """
        seen = Counter[tuple[privacy.Event, str]]()
        for release in releases:
            known = release.event, release.fingerprint
            is_unnamed = not release.fingerprint or release.fingerprint.startswith("opacus ")
            mark = uuid.uuid4().hex if is_unnamed else str(seen[known])
            self._given[*known, mark] = release
            seen[known] += 1

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """Returns a certified upper bound on epsilon at ``delta``; infinite, with a warning, if a run is not private.

        Opacus' options for orders and errors change nothing.
        """
        if warning := self._warning():
            warnings.warn(f"PrivacyEngine.get_epsilon: {warning}", stacklevel=3)
            return math.inf
        events = self.events()
        return privacy.compose(events).epsilon(delta).high if events else 0.0

    def get_privacy_spent(self, delta: float, **options: Any) -> tuple[float, float]:
        """Returns `get_epsilon`, and NaN in place of the order alpha of Opacus' ``RDPAccountant``."""
        return self.get_epsilon(delta), math.nan

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Counts a release that other code has made."""
        event = privacy.SubsampledGaussian(noise_multiplier, sample_rate)
        self.give([privacy.Release(event, f"opacus step {len(self._given)}")])

    def state_dict(self) -> dict[str, Any]:
        """Returns the history; nothing of it is secret.

        Opacus can load it if it knows all of the releases; else there is no ``"history"``, for which Opacus asks.
        """
        try:
            history = {"history": self.history}
        except Refused:
            history = {}
        runs = dict(self._loaded) | {run.name: run.trainings.own_events() for run in self.runs}
        return {
            **history,
            "mechanism": self._mechanism,
            "runs": {
                name: [(privacy.event_to_dict(event), count) for event, count in events]
                for name, events in runs.items()
            },
            "given": [
                (privacy.event_to_dict(event), fingerprint, release.warning, mark)
                for (event, fingerprint, mark), release in self._given.items()
            ],
            "warning": self._warning(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Adds a history, of Opacus or of an engine. What this engine has released stays.

        A run of an engine is counted once, with the larger number of its steps; a history of Opacus as often as it is
        loaded, because two equal ones cannot be distinguished.

        Raises:
            Refused: it is no state of an accountant.
        """
        kinds = {"history": list | tuple, "runs": Mapping}
        if not isinstance(state_dict, Mapping) or not any(
            isinstance(state_dict.get(name), kind) for name, kind in kinds.items()
        ):
            raise Refused("PrivacyEngine: privacy_accountant_state_dict has no history. Load one that Opacus saved.")
        if "runs" not in state_dict:
            self.give(privacy.releases_from_opacus(state_dict))
            return
        for described, fingerprint, warning, mark in state_dict.get("given", []):
            event = privacy.event_from_dict(described)
            self._given.setdefault((event, fingerprint, mark), privacy.Release(event, fingerprint, warning))
        self._loaded_warning = self._loaded_warning or state_dict.get("warning", "")
        for name, pairs in state_dict["runs"].items():
            loaded = [(privacy.event_from_dict(event), count) for event, count in pairs]
            if _steps(loaded) > _steps(self._loaded.get(name, ())):
                self._loaded[name] = loaded


def _steps(events: Iterable[tuple[privacy.Event, int]]) -> int:
    return sum(count for _, count in events)
