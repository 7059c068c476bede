# SPDX-License-Identifier: Apache-2.0
"""Provides what private learning of a table's schema ends with: a `Learnt`, or a `TableError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import privacy
from .schema import Schema


class TableError(ValueError):
    """Raised after private learning found nothing that can be trained on; ``releases`` were spent nevertheless.

    ``lines`` are what to write into the schema file instead, as text of TOML.
    """

    def __init__(self, message: str, releases: Sequence[privacy.Release] = (), lines: str = ""):
        super().__init__(message)
        self.releases, self.lines = tuple(releases), lines


@dataclass(frozen=True)
class Learnt:
    """A complete schema, and the releases that it took. All of it may be published.

    Args:
        schema: complete.
        releases: for ``PrivateTraining(prior_releases=...)``.
        notes: sentences on what was learnt and what is missing.
        counts: noisy numbers of cells: column -> {"missing", "used", "not understood"} -> number.
        count_stddev: standard deviation of the noise on each of ``counts``.
    """

    schema: Schema
    releases: tuple[privacy.Release, ...]
    notes: tuple[str, ...]
    counts: Mapping[str, Mapping[str, int]]
    count_stddev: float

    def epsilon(self, delta: float) -> float:
        """Returns the epsilon of all releases of the learning alone, at ``delta``."""
        return privacy.compose([(release.event, 1) for release in self.releases]).epsilon_high(delta)


def event_for(release: privacy.Release, unit: str) -> privacy.Event:
    """Returns the event of a release where this unit is protected."""
    return replace(release.event, unit=unit)  # type: ignore[call-arg]


def as_plain(
    schema: Schema, unit: str, releases: Sequence[privacy.Release] = (), notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a complete schema and the releases that it took, as plain data for a checkpoint."""
    return {
        "schema": schema.to_toml(),
        "events": [privacy.event_to_dict(event_for(release, unit)) for release in releases],
        "fingerprints": [release.fingerprint for release in releases],
        "notes": list(notes),
    }


def releases_in(plain: Mapping[str, Any]) -> list[privacy.Release]:
    """Returns the releases that `as_plain` wrote."""
    both = zip(plain["events"], plain["fingerprints"], strict=True)
    return [privacy.Release(privacy.event_from_dict(event), fingerprint) for event, fingerprint in both]
