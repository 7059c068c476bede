# SPDX-License-Identifier: Apache-2.0
"""Provides what private learning of a table's schema ends with: a `Learnt`, or a `TableError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
