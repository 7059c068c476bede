# SPDX-License-Identifier: Apache-2.0
"""Draws a training on a table from the budget of the data: what is learnt of the schema and all steps, together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_privacy import privacy, tables
from torch_privacy.experiments import table_notes
from torch_privacy.experiments.table_settings import TableSettings
from torch_privacy.experiments.task import number_of_steps
from torch_privacy.privacy.budget_file import new_run
from torch_privacy.tables.price import LearningBudget
from torch_privacy.training.bound_data import bind_data, reserve


class Draft:
    """The price of a training on a table, before anything is learnt of it.

    Args:
        settings: with the budget's path.
        num_units: number of rows, or of their owners, that are trained on.
        num_owners: number of owners of all rows; None if rows are protected.
    """

    def __init__(self, settings: TableSettings, num_units: int, num_owners: int | None):
        assert settings.budget is not None
        self._settings, self._n, self._num_owners = settings, num_units, num_owners
        self._budget = privacy.Budget.open(settings.budget)

    def bound(self, rows: Sequence[Any]) -> privacy.DataBudget:
        """Returns the budget, which belongs to a table with these rows."""
        return bind_data(self._budget, rows, num_owners=self._num_owners)

    def reserve(self, schema: tables.Schema, rows: Sequence[Any], open_ledger: Callable[[str], Path | None]) -> float:
        """Reserves both prices for a run, which begins; returns the noise multiplier of the steps.

        Args:
            schema: what is public of the table.
            rows: of the whole table.
            open_ledger: makes the ledger of a run of this name.
        """
        settings = self._settings
        assert settings.target_epsilon is not None
        planned, noise = _planned(settings, schema, self._n), planned_noise(settings, schema, self._n)
        self._budget.check(planned(noise))
        run, budget = new_run(), self.bound(rows)
        what = f"training on {Path(settings.file).name}"
        reserve(budget, planned(noise), what, rows, run=run, ledger=open_ledger(run)).begin()
        return noise


def planned_noise(settings: TableSettings, schema: tables.Schema, n: int) -> float:
    """Returns the noise multiplier with which learning and training of n units cost the target epsilon."""
    assert settings.target_epsilon is not None
    return privacy.calibrate_schedule(_planned(settings, schema, n), settings.target_epsilon, settings.delta)


def learning_budget(settings: TableSettings, schema: tables.Schema, n: int) -> LearningBudget:
    """Returns the price of what is to be learnt of n rows, or n owners."""
    assert settings.target_epsilon is not None
    epsilon, delta = settings.schema_share * settings.target_epsilon, settings.schema_share * settings.delta
    return LearningBudget.of(schema, n, settings.per_owner or 1, epsilon, delta, scales=True)


def _planned(
    settings: TableSettings, schema: tables.Schema, n: int
) -> Callable[[float], list[tuple[privacy.Event, int]]]:
    """Returns all releases as a function of the noise multiplier."""
    assert settings.target_epsilon is not None
    unit = table_notes.event_unit(settings)
    learning: list[tuple[privacy.Event, int]] = []
    if not schema.is_complete or schema.has_scales_to_learn:
        parts = learning_budget(settings, schema, n)
        learning = [(replace(event, unit=unit), count) for event, count in parts.events]  # type: ignore[call-arg]
    probability, steps = settings.expected_batch_size / n, number_of_steps(settings, n)

    def planned(noise: float) -> list[tuple[privacy.Event, int]]:
        relation = privacy.NeighboringRelation.REPLACE_SPECIAL
        return [*learning, (privacy.SubsampledGaussian(noise, probability, relation, unit), steps)]

    return planned
