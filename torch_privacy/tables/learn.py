# SPDX-License-Identifier: Apache-2.0
"""Learns privately what a schema leaves open: kinds, categories, bounds, and the counts of cells that are missing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import privacy
from ..privacy.release import new_fingerprint
from ..support.validate import positive, strictly_between, whole
from ..training.bound_data import reserve
from .cells import Cells, codes, dates, numbers, read_cells
from .extra import needed
from .foresight import MANY_ERRORS, doubt_of, lines_for
from .learnt import Learnt, TableError
from .mechanisms import CountNoise, frequent, noisy_counts
from .price import LearningBudget
from .ranges import is_unscaled, learn_ranges
from .read import rows_of
from .schema import KIND_OF_TASK, Column, Schema, Task
from .schema_file import toml_key, toml_text
from .split import owner_codes

if TYPE_CHECKING:
    from pandas import DataFrame

MAJORITY = 0.75  # share of the cells that must be numbers (or dates) where the kind is learnt
COVERED = 0.9  # share of the target's cells in frequent values, from which on it is a class
MOST_CLASSES = 100
LONGEST_CATEGORY = 200  # characters
MOST_NOTES = 5  # in an error
TOO_FEW = "has too few rows to learn its bounds at this epsilon"
KINDS_OF_CELLS = ("missing", "code", "number", "date", "date, month first", "date, day first", "text")
USE_OF_CELLS = ("missing", "used", "not understood")


def learn(
    frame: DataFrame,
    schema: Schema,
    *,
    epsilon: float,
    delta: float,
    owners: Any = None,
    per_owner: int = 1,
    record: Callable[[privacy.Release], object] | None = None,
    budget: privacy.DataBudget | None = None,
    scales: bool = False,
) -> Learnt:
    """Learns what a schema leaves open from training rows, with differential privacy, and counts unusable cells.

    There are up to four releases, one after the other, each by opendp and with an event of its own. Which there are,
    and their prices, depends on the schema and the number of rows alone:

    1. **Counts**: for each column the cells that are missing, codes, numbers, dates or text, with discrete Gaussian
       noise. They decide the kinds to be learnt: number or date if three quarters of the cells are, else category. A
       code has a zero before other digits, as in 00123; a column with codes is a category.
    2. **Categories**: for each column all values with a noisy count above a threshold (discrete Gaussian noise). Rarer
       ones become "other".
    3. **Bounds**: two histograms of each number or date with discrete Gaussian noise, the second with finer bins in the
       range that the first has found. The bounds are the ends of the bins that stand out of the noise, and a
       margin. The same histograms give the scale, where most values lie, and say whether the logarithm is taken; with
       ``scales`` also for columns with declared bounds.

    Args:
        frame: training rows, as from `read_table`. Their number is public.
        schema: what is public.
        epsilon: what all releases together may spend at ``delta``, alone. A training with them as ``prior_releases``
            costs less than the sum of both epsilons.
        delta: in (0, 1); a tenth of it is the chance that a value of one person alone passes a threshold.
        owners: one value per row: the person to whom the row belongs. Rows of the same person are then protected
            together: at most ``per_owner`` of them, chosen at random, take part in learning.
        per_owner: largest number of rows of one owner, 1 or more.
        record: called with each release before it is used, to keep it also if what follows is refused:
            ``lambda release: ledger.record(release.event, len(ledger), release.fingerprint)``.
        budget: of the data (``tp.Budget.open``), to draw the releases from; refused ones have read no cell.
        scales: whether to learn, too, where most values lie within declared bounds.

    Guarantees:
        - ``learnt.epsilon(delta) <= epsilon``. The neighboring relation is adding or removing one row, or one owner.
        - Schema, notes and counts are functions of the releases, the schema and the number of rows alone.
        - Nothing is released if an argument is refused.

    Edge cases:
        A complete schema costs one release, of counts, with noise of up to half a percent of the rows.

        A column of which nothing can be learnt is ignored, and a note says so: empty, all values different, or too few
        rows for this epsilon.

    Raises:
        ValueError: the table lacks columns of the schema, an owner is missing, or a number is out of range.
        TableError: the target cannot be predicted: constant, empty, or too rare values. ``error.releases`` were made;
            none if the number of rows and epsilon alone show that its classes or bounds cannot be learnt.
        ImportError: opendp or pandas is not installed.

    Source: Canonne, Kamath & Steinke (2020), arXiv:2004.00010 (noise); Rogers (2023), arXiv:2309.09170 (thresholds).
    """
    positive("learn", epsilon=epsilon)
    strictly_between("learn", 0, 1, delta=delta)
    whole("learn", at_least=1, per_owner=per_owner)
    needed("opendp.measurements")
    schema.check_frame(frame, "the table")
    if not len(frame):
        raise ValueError("learn: the table has no rows.")
    rows = 1 if owners is None else per_owner
    kept = np.arange(len(frame)) if owners is None else capped(owners, per_owner, len(frame))
    # with owners their number is public, and that of their rows is not
    n = len(frame) if owners is None else len(owner_codes(owners, len(frame), "learn")[1])
    parts = LearningBudget.of(schema, n, rows, epsilon, delta, scales=scales)
    doubt = doubt_of(schema, n, parts)
    if doubt is not None and doubt.is_certain:
        raise TableError(f"{doubt.what[0].upper()}{doubt.what[1:]}.", (), doubt.lines)
    learning = _Learning(schema, frame.iloc[kept], n, parts, record)
    if budget is None:
        return learning.learnt()
    planned = [(e if owners is None else replace(e, unit=budget.unit), k) for e, k in parts.events]  # type: ignore
    run = reserve(budget, planned, "schema of a table", rows_of(frame), num_owners=None if owners is None else n)
    run.begin()
    try:
        return learning.learnt()
    finally:
        run.settle(fingerprints=[release.fingerprint for release in learning.releases])


def capped(owners: Any, per_owner: int, n: int, seed: int | None = None) -> NDArray[np.int64]:
    """Returns the positions of at most ``per_owner`` rows of each owner, chosen at random, in increasing order.

    Which rows of an owner are chosen does not depend on the other owners. A ``seed`` of 128 secret bits chooses
    the same rows again.
    """
    codes, _ = owner_codes(owners, n, "learn")
    order = np.lexsort((np.random.default_rng(secrets.randbits(128) if seed is None else seed).random(n), codes))
    first = np.searchsorted(codes[order], codes[order], side="left")  # position of the owner's first row in the order
    return np.sort(order[np.arange(n) - first < per_owner])


class _Learning:
    """The state between the three releases; what is private of it is ``_cells`` alone."""

    def __init__(
        self,
        schema: Schema,
        frame: DataFrame,
        num_rows: int,
        budget: LearningBudget,
        record: Callable[[privacy.Release], object] | None,
    ):
        self._open, self._keep = schema, record
        self._budget, self._num_rows = budget, num_rows
        self._cells = {
            column.name: read_cells(frame[column.name], schema.rules)
            for column in schema.columns
            if column.kind != "ignored"
        }
        self._columns = {column.name: column for column in schema.columns}
        self._task: Task | None = schema.task
        self.releases: list[privacy.Release] = []
        self._counts: dict[str, dict[str, int]] = {}
        self._notes: list[str] = []

    def learnt(self) -> Learnt:
        """Makes the releases and returns what was learnt."""
        self._learn_kinds(self._release_counts())
        if self._budget.categories is not None:
            self._learn_categories()
        if self._budget.bounds is not None:
            self._learn_bounds()
        self._say_counts()
        if all(column.kind == "ignored" or column.name == self._open.target for column in self._columns.values()):
            first, rest = self._notes[:MOST_NOTES], len(self._notes[MOST_NOTES:])
            more = f" And {rest} more." if rest else ""
            features = self._open.features
            raise TableError(
                f"Nothing can be learnt of any column at this epsilon ({' '.join(first)}{more}) Raise epsilon, or "
                "declare what is public.",
                self.releases,
                lines_for(features[0].name),
            )
        schema = self._open.with_columns(self._columns.values(), self._task)
        counts = MappingProxyType({name: MappingProxyType(values) for name, values in self._counts.items()})
        return Learnt(schema, tuple(self.releases), tuple(self._notes), counts, self._budget.counts.stddev)

    def _record(self, what: str, rho: float, delta: float = 0.0) -> None:
        release = privacy.Release(privacy.ZeroConcentrated(rho, delta), new_fingerprint(what))
        if self._keep is not None:
            self._keep(release)
        self.releases.append(release)

    def _release_counts(self) -> dict[str, dict[str, int]]:
        """Releases the number of cells of each sort, for each column."""
        sorts = {name: self._sorts(self._columns[name], cells) for name, cells in self._cells.items()}
        exact = [int((of == i).sum()) for names, of in sorts.values() for i in range(len(names))]
        noise = self._budget.counts
        released = noisy_counts(np.array(exact, np.int64), noise).tolist()
        self._record("counts", noise.rho)
        following = iter(released)
        return {name: {sort: next(following) for sort in names} for name, (names, _) in sorts.items()}

    def _sorts(self, column: Column, cells: Cells) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Returns the names of the sorts of cells, and the number of the sort of each cell."""
        rules = self._open.rules
        if column.kind == "learn":
            is_number = ~np.isnan(numbers(cells, rules))
            month, day = (~np.isnan(dates(cells, day_first=day_first)) for day_first in (False, True))
            conditions = [cells.is_missing, codes(cells), is_number, month & day, month, day]
            return KINDS_OF_CELLS, np.select(conditions, range(6), 6)
        if column.kind == "category":
            known = None if column.categories is None else set(column.categories)
            is_used = np.array([known is None or value in known for value in cells.values], bool)
            understood = cells.spread(is_used, False)
        else:
            values = numbers(cells, rules) if column.kind == "number" else dates(cells, day_first=column.day_first)
            understood = ~np.isnan(values)
        return USE_OF_CELLS, np.select([cells.is_missing, understood], [0, 1], 2)

    def _learn_kinds(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        error = MANY_ERRORS * self._budget.counts.stddev
        for name, of in counts.items():
            column = self._columns[name]
            if column.kind != "learn":
                self._counts[name] = {sort: max(of[sort], 0) for sort in USE_OF_CELLS}
                continue
            sorts = {sort: number if number > error else 0 for sort, number in of.items()}  # the rest is noise
            all_dates = sorts["date"] + max(sorts["date, month first"], sorts["date, day first"])
            filled = sum(sorts.values()) - sorts["missing"]
            is_target = name == self._open.target
            if not filled and not is_target:
                used, column = 0, self._without(column, "empty, as far as can be learnt")
            elif filled and sorts["number"] >= MAJORITY * filled and not sorts["code"]:
                used, column = sorts["number"], replace(column, kind="number")
            elif filled and all_dates >= MAJORITY * filled and not is_target:
                day_first = self._open.day_first
                if day_first is None:
                    day_first = of["date, day first"] - of["date, month first"] > error
                used, column = all_dates, replace(column, kind="date", day_first=day_first)
            else:
                used, column = filled, replace(column, kind="category")
            if is_target and self._task is not None:
                used = sorts["number"] + sorts["code"] if self._task == "regression" else filled
                column = replace(column, kind=KIND_OF_TASK[self._task], day_first=False)
            self._columns[name] = column
            self._counts[name] = dict(zip(USE_OF_CELLS, (sorts["missing"], used, filled - used), strict=True))

    def _learn_categories(self) -> None:
        """Releases the frequent values of all open categories, and of the target if its task is open."""
        budget, target = self._budget.categories, self._open.target
        assert budget is not None
        chosen = [
            name
            for name, column in self._columns.items()
            if (column.kind == "category" and column.categories is None) or (name == target and column.is_open)
        ]
        exact: dict[str, int] = {}
        for place, name in enumerate(chosen):
            cells = self._cells[name]
            numbers_of = np.bincount(cells.codes[cells.codes >= 0], minlength=len(cells.values))
            exact |= {
                f"{place} {value}": int(count)
                for value, count in zip(cells.values, numbers_of, strict=True)
                if len(value) <= LONGEST_CATEGORY
            }
        noise = replace(budget.noise, groups=len(chosen))
        released, threshold = frequent(exact, noise, budget.delta)
        self._record("categories", budget.noise.rho, budget.delta)
        for place, name in enumerate(chosen):
            start = f"{place} "
            found = {key.removeprefix(start): count for key, count in released.items() if key.startswith(start)}
            if name == target:
                self._learn_classes(found, threshold, noise)
            elif found:
                self._columns[name] = replace(self._columns[name], categories=tuple(sorted(found)))
                self._note_rare(name, found, threshold, noise)
            else:
                reason = f"no value is frequent enough to be learnt (it takes about {threshold} rows)"
                self._columns[name] = self._without(self._columns[name], reason)

    def _learn_classes(self, found: Mapping[str, int], threshold: int, noise: CountNoise) -> None:
        name = self._open.target
        column, used = self._columns[name], self._counts[name]["used"]
        covered = sum(found.values()) >= COVERED * used
        if column.kind == "number" and len(found) == 1 and covered:
            self._refuse(f"has one frequent value alone, {next(iter(found))!r}, so there is nothing to predict")
        if self._task is None:
            is_class = column.kind != "number" or (2 <= len(found) <= MOST_CLASSES and covered)
            self._task = "classification" if is_class else "regression"
            self._notes.append(f"The target {name!r} was taken for {self._task}. State the task if that is wrong.")
        if self._task == "regression":
            return
        if not found:
            self._refuse(
                f"has no value in about {threshold} rows or more, which it takes to be learnt",
                'kind = "category"',
                'categories = ["...", "..."]',
                'or kind = "number", bounds = [0, 100] for a number',
            )
        if len(found) == 1:
            self._refuse(
                f"has one frequent value alone, {next(iter(found))!r}, so there is nothing to predict; a rarer value "
                f"takes about {threshold} rows to be learnt",
                'kind = "category"',
                f'categories = [{toml_text(next(iter(found)))}, "..."]',
            )
        self._columns[name] = replace(column, kind="category", categories=tuple(sorted(found)))
        self._note_rare(name, found, threshold, noise)

    def _note_rare(self, name: str, found: Mapping[str, int], threshold: int, noise: CountNoise) -> None:
        rare = self._counts[name]["used"] - sum(found.values())
        error = self._budget.counts.stddev + np.sqrt(len(found)) * noise.stddev
        if rare > MANY_ERRORS * error:
            what = "have the loss 0" if name == self._open.target else 'count as "other"'
            self._notes.append(f"{name!r}: about {rare} cells with values in fewer than {threshold} rows {what}.")

    def _learn_bounds(self) -> None:
        """Releases two histograms of all numbers and dates without bounds or scale; see `ranges`."""
        rho, target = self._budget.bounds, self._open.target
        assert rho is not None
        chosen = {name: column for name, column in self._columns.items() if self._needs_range(column)}
        if not chosen:
            return
        noise = CountNoise(self._budget.rows, len(chosen), rho / 2)
        values = {name: self._values(column) for name, column in chosen.items()}
        made, lost = learn_ranges(
            chosen, values, noise, self._num_rows, target, lambda noise: self._record("bounds", noise.rho)
        )
        self._columns |= made
        for name in lost:
            if name == target:
                self._refuse(TOO_FEW, 'kind = "number"', "bounds = [0, 100]")
            self._columns[name] = self._without(made[name], TOO_FEW.removeprefix("has "))

    def _needs_range(self, column: Column) -> bool:
        return column.kind in ("number", "date") and (
            column.bounds is None or (self._budget.has_scales and is_unscaled(column))
        )

    def _values(self, column: Column) -> NDArray[np.float64]:
        cells = self._cells[column.name]
        return dates(cells, day_first=column.day_first) if column.kind == "date" else numbers(cells, self._open.rules)

    def _without(self, column: Column, reason: str) -> Column:
        """Returns the column as ignored, and says so."""
        if column.name != self._open.target:
            self._notes.append(f"{column.name!r} is ignored: {reason}.")
        return Column(column.name, "ignored", reason=reason)

    def _say_counts(self) -> None:
        error = MANY_ERRORS * self._budget.counts.stddev
        for name, of in self._counts.items():
            column = self._columns[name]
            if column.kind == "ignored":
                continue
            is_target = name == self._open.target
            if of["missing"] > error:
                rule = "have the loss 0" if is_target else "are imputed"
                self._notes.append(f"{name!r}: about {of['missing']} cells are missing and {rule}.")
            if of["not understood"] > error:
                if column.kind == "category":  # of a column that is declared: one that is learnt has none
                    what, rule = "of no declared category", 'count as "other"'
                else:
                    what, rule = f"no {column.kind}", "are imputed"
                rule = "have the loss 0" if is_target else rule
                self._notes.append(f"{name!r}: about {of['not understood']} cells are {what} and {rule}.")

    def _refuse(self, what: str, *lines: str) -> None:
        missing = min(self._counts[self._open.target]["missing"], self._num_rows * self._budget.rows)
        if missing > MANY_ERRORS * self._budget.counts.stddev:
            what += f"; about {missing:,} of its cells are missing"
        place = f"[columns.{toml_key(self._open.target)}]"
        written = ", ".join((place, *lines)) if lines else ""
        raise TableError(f"The target {self._open.target!r} {what}.", self.releases, written)
