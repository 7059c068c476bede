# SPDX-License-Identifier: Apache-2.0
"""Holds the rows that a generator learns from, checks them, and learns privately what their schema leaves open."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ... import privacy
from ...privacy.rounding import round_up
from ...support.units import plural
from ...support.validate import strictly_between
from ..foresight import doubt_of
from ..learn import TableError, capped, learn
from ..learnt import as_plain, event_for
from ..read import rows_of
from ..schema import Schema
from ..split import owner_codes
from .plan import WHERE, SynthesisSettings, learning_budget

if TYPE_CHECKING:
    from pandas import DataFrame

FEWEST = 200  # rows or persons, below which noise is all that is left
MOST_VALUES = 1000  # of one column
TO_WRITE = "Write into a schema: {}. ".format  # lines of TOML


@dataclass(frozen=True)
class SourceRows:
    """Rows to learn from, what is public of them, and the person of each row, if persons are protected.

    ``of_budget`` are the rows that the data's budget belongs to and the number of their owners, if these are more;
    ``to_write`` returns a sentence on where to write lines of a schema.
    """

    frame: DataFrame
    schema: Schema
    settings: SynthesisSettings
    owners: Any = None
    of_budget: tuple[DataFrame, int | None] | None = None
    to_write: Callable[[str], str] = TO_WRITE

    @property
    def whole(self) -> tuple[DataFrame, int | None]:
        """Returns the rows that a budget belongs to, and the number of their owners."""
        return self.of_budget or (self.frame, None if self.owners is None else self.num_units)

    @cached_property
    def num_units(self) -> int:
        """Returns the number of rows, or of persons where these are protected."""
        return len(self.frame) if self.owners is None else len(owner_codes(self.owners, len(self.frame), WHERE)[1])

    @property
    def of_owners(self) -> dict[str, Any]:
        """Returns arguments of `Examples`, where persons are protected."""
        if self.owners is None:
            return {}
        return {
            "owners": owner_codes(self.owners, len(self.frame), WHERE)[0],
            "per_owner": self.settings.per_owner,
            "owner_name": self.settings.unit,
        }

    def check(self) -> None:
        """Refuses what cannot become a generator, from public facts and from the schema alone."""
        if (self.owners is None) != (self.settings.per_owner is None):
            raise ValueError(
                f"{WHERE}: owners and per_owner belong together: the person of each row, and how many rows."
            )
        n, delta = self.num_units, self.settings.delta
        what = "rows" if self.owners is None else plural(self.settings.unit)
        if n < FEWEST:
            raise ValueError(
                f"{WHERE}: {n} {what} to learn from are too few: with fewer than {FEWEST} hardly anything but noise "
                "would be left."
            )
        strictly_between(WHERE, 0, 1 / n, delta=delta, hint=f"It must be below 1/n for these {n:,} {what}.")
        self.schema.check_frame(self.frame, "the table")
        for column in self.schema.columns:
            if (number := len(column.categories or ())) > MOST_VALUES:
                raise ValueError(
                    f"{WHERE}: the column {column.name!r} has {number:,} categories in the schema, for {n:,} {what}; "
                    f'at most {MOST_VALUES:,} are synthesized. Give it kind = "ignored".'
                )
        if self.schema.is_complete:
            return
        doubt = doubt_of(self.schema, n, learning_budget(self.settings, self.schema, n))
        if doubt is not None and doubt.is_certain:
            raise ValueError(
                f"{WHERE}: {doubt.what}. {self.to_write(doubt.lines)}Nothing was learnt, and it has cost nothing."
            )

    def learn(self, ledger: privacy.Ledger) -> dict[str, Any]:
        """Learns what the schema leaves open; each release is in the ledger before it is used."""
        schema, settings, share = self.schema, self.settings, self.settings.learning_share
        if schema.is_complete:
            return as_plain(schema, settings.unit)

        def record(release: privacy.Release) -> None:
            ledger.record(event_for(release, settings.unit), len(ledger), release.fingerprint)

        try:
            learnt = learn(
                self.frame,
                schema,
                epsilon=share * settings.epsilon,
                delta=share * settings.delta,
                owners=self.owners,
                per_owner=settings.per_owner or 1,
                record=record,
            )
        except TableError as error:
            spent = ledger.profile().epsilon_high(settings.delta)  # `check` refuses what is known before
            lines = self.to_write(error.lines) if error.lines else ""
            raise ValueError(
                f"{str(error).rstrip('.')}. {lines}To learn this has cost epsilon {round_up(spent)}. {ledger.path} has "
                "what was released; another try costs as much again, and the epsilons add up."
            ) from None
        return as_plain(learnt.schema, settings.unit, learnt.releases, [_of_rows(note) for note in learnt.notes])

    def used(self, seed: int) -> DataFrame:
        """Returns the rows that marginals count: of each person at most as many as the settings say."""
        if self.owners is None:
            return self.frame
        return self.frame.iloc[capped(self.owners, self.settings.per_owner or 1, len(self.frame), seed)]

    def digest(self) -> str:
        """Returns a digest of the table, which is as secret as the table."""
        digest = hashlib.sha256(repr(list(self.frame.columns)).encode())
        for row in rows_of(self.frame):
            digest.update(repr(row).encode())
        return digest.hexdigest()


def _of_rows(note: str) -> str:
    """Returns a note of the learning for rows that nothing is trained to predict: they have no loss."""
    note = re.sub("(missing|no number) and have the loss 0", r"\1 and stay missing", note)
    return note.replace("have the loss 0", 'count as "other"').replace("are imputed", "stay missing")
