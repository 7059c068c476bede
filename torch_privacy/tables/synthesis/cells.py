# SPDX-License-Identifier: Apache-2.0
"""Turns a table into whole numbers, one for each cell of a column, and back: by a complete schema alone."""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..cells import EPOCH, dates, number_as_text, numbers, read_cells
from ..encode import FIRST_CODE, MISSING_CODE, OTHER_CODE
from ..extra import needed
from ..schema import Column, Schema

if TYPE_CHECKING:
    from pandas import DataFrame

BINS = 32  # of a number or a date, equal in width
OTHER = "other"  # what a category that the schema does not name becomes
DIGITS = 2  # of a number below the width of its bin
Codes = NDArray[np.int64]  # (n, k)


@dataclass(frozen=True, eq=False)
class ColumnGrid:
    """The values that each column of a synthetic table can have, as whole numbers from 0 on.

    Of every column 0 is a missing cell. Of a category 1 is "other", and 2, 3, ... are those of the schema. Of a number
    or a date 1 to 32 are bins of equal width between the bounds; a number has one value more for the zero itself, which
    many tables have in most rows, if the bounds contain it. All that is public, as the schema is.

    Args:
        schema: complete; its ignored columns are not synthesized.

    Example:
        >>> import pandas as pd
        >>> columns = Column("age", "number", (0, 64)), Column("city", "category", categories=("Rome",))
        >>> grid = ColumnGrid(Schema(columns, target=""))
        >>> codes = grid.encode(pd.DataFrame({"age": ["33", "0", "?"], "city": ["Rome", "Oslo", ""]}))
        >>> grid.sizes, codes.tolist()
        ((34, 3), [[17, 2], [33, 1], [0, 0]])
        >>> grid.decode(codes, np.random.default_rng(0), whole=["age"]).astype(str).values.tolist()
        [['33', 'Rome'], ['0', 'other'], ['', '']]
    """

    schema: Schema

    @property
    def columns(self) -> tuple[Column, ...]:
        """Returns the columns that are synthesized, in the order of the file."""
        return tuple(column for column in self.schema.columns if column.kind != "ignored")

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the columns."""
        return tuple(column.name for column in self.columns)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the number of values of each column."""
        return tuple(
            FIRST_CODE + len(column.categories or ())
            if column.kind == "category"
            else 1 + BINS + (_has_zero(column) and column.kind == "number")
            for column in self.columns
        )

    @property
    def rare(self) -> tuple[int, ...]:
        """Returns how many values of each column are of no kind: a missing cell, and "other"."""
        return tuple(FIRST_CODE if column.kind == "category" else 1 for column in self.columns)

    @property
    def numeric(self) -> tuple[int, ...]:
        """Returns the places of the numbers, dates left out."""
        return tuple(place for place, column in enumerate(self.columns) if column.kind == "number")

    def holds_whole(self, place: int) -> NDArray[np.bool_]:
        """Returns for each value of a column of numbers whether it can be a whole number, (size,); a missing one is."""
        low, high = self.columns[place].limits
        ends = np.ceil(low + (high - low) / BINS * np.arange(BINS))
        holds = np.ones(self.sizes[place], bool)
        holds[1:BINS] = ends[1:] > ends[:-1]  # the last bin has the upper bound, and then comes zero
        return holds

    def encode(self, frame: DataFrame) -> Codes:
        """Returns the value of each cell, int64 (n, k). A row depends on its own cells alone."""
        return self._encoded(frame)[0]

    def fractions(self, frame: DataFrame) -> NDArray[np.bool_]:
        """Returns bool (n, numbers): whether a cell is a number that is not whole."""
        return self._encoded(frame)[1]

    def _encoded(self, frame: DataFrame) -> tuple[Codes, NDArray[np.bool_]]:
        codes = np.zeros((len(frame), len(self.columns)), np.int64)
        fractions = np.zeros((len(frame), len(self.numeric)), bool)
        for place, column in enumerate(self.columns):
            cells = read_cells(frame[column.name], self.schema.rules)
            if column.kind == "category":
                known = {category: FIRST_CODE + i for i, category in enumerate(column.categories or ())}
                values = np.array([known.get(text, OTHER_CODE) for text in cells.values], np.int64)
                codes[:, place] = cells.spread(values, MISSING_CODE)
                continue
            is_number = column.kind == "number"
            found = numbers(cells, self.schema.rules) if is_number else dates(cells, day_first=column.day_first)
            low, high = column.limits
            within = np.clip(np.nan_to_num(found), low, high)  # first: a warning of an overflow would show one row
            bins = np.minimum(np.floor((within - low) / (high - low) * BINS), BINS - 1).astype(np.int64)
            codes[:, place] = np.where(np.isnan(found), MISSING_CODE, 1 + bins)
            if is_number:
                codes[(found == 0) & _has_zero(column), place] = 1 + BINS
                fractions[:, self.numeric.index(place)] = ~np.isnan(found) & (found != np.floor(found))
        return codes, fractions

    def decode(self, codes: Codes, rng: np.random.Generator, whole: Collection[str] = ()) -> DataFrame:
        """Returns the table of these values; within its bin a number is drawn evenly, a missing cell is empty.

        Args:
            codes: int64 (n, k).
            rng: draws within bins.
            whole: names of columns with whole numbers alone.
        """
        found = {
            column.name: self._cells(column, codes[:, place], rng, column.name in whole)
            for place, column in enumerate(self.columns)
        }
        return needed("pandas").DataFrame(found)

    def _cells(self, column: Column, codes: Codes, rng: np.random.Generator, is_whole: bool) -> NDArray[Any]:
        if column.kind == "category":
            return np.array(["", OTHER, *(column.categories or ())], object)[codes]
        low, high = column.limits
        width = (high - low) / BINS
        start = low + width * (codes - 1)
        if is_whole or column.kind == "date":
            first, after = np.ceil(start), np.ceil(start + width)
            drawn = np.floor(first + (after - first) * rng.random(len(codes)))
            values = np.where(after > first, np.minimum(drawn, after - 1), np.round(start + width / 2))
        else:
            digits = min(DIGITS - math.floor(math.log10(width)), 300)  # after the point; 10³⁰⁹ is infinite
            values = np.round(start + width * rng.random(len(codes)), digits)
        if column.kind == "date":
            texts = [(EPOCH + datetime.timedelta(days=int(day))).isoformat() for day in np.where(codes, values, 0)]
        else:
            values = np.where(codes == 1 + BINS, 0.0, values)
            texts = [number_as_text(float(value), self.schema.decimal) for value in values]
        return np.where(codes == MISSING_CODE, "", np.array(texts, object))


def _has_zero(column: Column) -> bool:
    low, high = column.limits
    return low <= 0 <= high
