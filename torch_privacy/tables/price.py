# SPDX-License-Identifier: Apache-2.0
"""Divides the privacy budget of learning a schema among its releases, from public quantities alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .. import privacy
from ..privacy.events.concentrated import LARGEST_RHO, delta_of
from .mechanisms import CountNoise
from .ranges import is_unscaled
from .schema import Schema

PARTS = {"counts": 0.2, "categories": 0.4, "bounds": 0.4}  # of rho, where all three are needed
THRESHOLD_PART = 0.1  # of delta, where categories are learnt
FINEST = 0.005  # stddev of a count that needs no less noise, as a share of the rows
FINEST_SCALE = 0.001  # the same of the histograms that scales are learnt from
COMPOSING = 0.88  # what is left of rho when three releases are priced one by one, as a ledger does
TRIES = 12


@dataclass(frozen=True)
class Categories:
    """The price of learning categories: of the noise, and of the chance to pass the threshold."""

    noise: CountNoise
    delta: float


@dataclass(frozen=True)
class LearningBudget:
    """The price of each release, fixed before the first one."""

    rows: int  # by which neighboring tables differ at most
    counts: CountNoise
    categories: Categories | None
    bounds: float | None  # rho of both histograms
    has_scales: bool = False  # whether they are also of columns with declared bounds

    @property
    def events(self) -> list[tuple[privacy.Event, int]]:
        """Returns the releases as events."""
        events: list[privacy.Event] = [privacy.ZeroConcentrated(self.counts.rho)]
        if self.categories is not None:
            events.append(privacy.ZeroConcentrated(self.categories.noise.rho, self.categories.delta))
        if self.bounds is not None:
            events += [privacy.ZeroConcentrated(CountNoise(self.rows, 1, self.bounds / 2).rho)] * 2
        return [(event, 1) for event in events]

    @classmethod
    def of(
        cls, schema: Schema, n: int, rows: int, epsilon: float, delta: float, *, scales: bool = False
    ) -> LearningBudget:
        """Returns the budget that spends at most ``epsilon`` at ``delta``, with ``scales`` within declared bounds."""
        rho = COMPOSING * _largest_rho(epsilon, (1 - THRESHOLD_PART) * delta)
        for _ in range(TRIES):
            budget = cls._with(schema, n, rows, rho, delta, scales)
            spent = privacy.compose(budget.events).epsilon_high(delta)
            if spent <= epsilon:
                return budget
            rho *= 0.998 * (epsilon / spent) ** 2
        raise ValueError(f"learn: epsilon={epsilon!r} at delta={delta!r} cannot be met. Raise one of them.")

    @classmethod
    def _with(cls, schema: Schema, n: int, rows: int, rho: float, delta: float, scales: bool) -> LearningBudget:
        open_parts, scales = _needed(schema), scales and any(map(is_unscaled, schema.columns))
        learns_bounds = "bounds" in open_parts
        parts = {part: PARTS[part] for part in ("counts", *open_parts, *(["bounds"] if scales else []))}
        share = rho / sum(parts.values())
        counts = CountNoise(rows, sum(column.kind != "ignored" for column in schema.columns), share * parts["counts"])
        counts = replace(counts, rho=min(counts.rho, counts.rho * (counts.stddev / (FINEST * n)) ** 2))
        rest = (rho - counts.rho) / (sum(parts.values()) - parts["counts"]) if len(parts) > 1 else 0.0
        bounds = rest * parts["bounds"] if "bounds" in parts else None
        if bounds is not None and not learns_bounds:  # a scale need not be as exact as bounds
            finest = CountNoise(rows, sum(map(is_unscaled, schema.columns)), bounds / 2).stddev / (FINEST_SCALE * n)
            bounds *= min(1.0, finest**2)
        return cls(
            rows,
            counts,
            Categories(CountNoise(rows, 0, rest * parts["categories"]), THRESHOLD_PART * delta)
            if "categories" in parts
            else None,
            bounds,
            scales,
        )


def _needed(schema: Schema) -> list[str]:
    """Returns which of categories and bounds may have to be learnt; the kinds are not known yet."""
    kinds = {column.kind for column in schema.open_columns}
    features = {column.kind for column in schema.open_columns if column.name != schema.target}
    if not schema.target:
        needed = {"categories": {"learn", "category"}, "bounds": {"learn", "number", "date"}}
        return [part for part, of_kinds in needed.items() if features & of_kinds]
    target, task = schema.target_column, schema.task
    may_be_number = target.is_open and task != "classification" and target.kind != "category"
    return [
        part
        for part, needed in (
            ("categories", task is None or target.is_open or features & {"learn", "category"}),
            ("bounds", may_be_number or features & {"learn", "number", "date"}),
        )
        if needed and (kinds or task is None)
    ]


def _largest_rho(epsilon: float, delta: float) -> float:
    """Returns nearly the largest rho with which a mechanism is (epsilon, delta)-private."""
    low, high = 1e-12, LARGEST_RHO / 2
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if delta_of(middle, np.array([epsilon]))[0] <= delta else (low, middle)
    return low
