# SPDX-License-Identifier: Apache-2.0
"""Recognizes how a program wrote a table: its decimal mark and the order of day and month.

This shape is that of the export, not of a row, and is public by declaration, as separator and encoding are: the
template of a schema states it, and who uses the schema declares it. It follows from the majority of cells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from .cells import Rules, dates, numbers, read_cells

if TYPE_CHECKING:
    from pandas import DataFrame

ROWS = 20_000  # that are looked at
MOST = 0.75  # share of a column's cells that must be numbers or dates


@dataclass(frozen=True)
class Shape:
    """The form in which numbers and dates are written.

    Args:
        decimal: ``"."`` or ``","``.
        day_first: whether ``03/01/2024`` is the third of January; None if no date shows it.
        separator: between cells of CSV; "" for Parquet.
        encoding: of CSV; "" for Parquet.
    """

    decimal: Literal[".", ","] = "."
    day_first: bool | None = None
    separator: str = ""
    encoding: str = ""

    def in_words(self) -> str:
        """Returns the shape in one line.

        Example:
            >>> Shape(",", True, ";", "UTF-8").in_words()
            "separator ';', UTF-8, decimal comma, days before months"
        """
        order = {None: [], True: ["days before months"], False: ["months before days"]}[self.day_first]
        file = [f"separator {self.separator!r}", self.encoding] if self.separator else []
        return ", ".join([*file, "decimal comma" if self.decimal == "," else "decimal point", *order])


def shape_of(frame: DataFrame, missing: Iterable[str], expected: Literal[".", ","] = ".") -> Shape:
    """Returns the shape of a table from `read_table`: what most of its columns agree on.

    The decimal mark is that with which more columns can be read as numbers; the ``expected`` one, where it is as many.
    Days come before months if more dates can be read only in that order.
    """
    votes: dict[Literal[".", ","], int] = {".": 0, ",": 0}
    days, other = 0, "," if expected == "." else "."
    for name in frame.columns:
        column = frame[name].iloc[:ROWS]
        if column.dtype.kind in "iufbM":
            continue
        rules = {mark: Rules.of(missing, mark) for mark in votes}
        cells = read_cells(column, rules["."])
        filled = max(int((~cells.is_missing).sum()), 1)
        for mark in votes:
            votes[mark] += int((~np.isnan(numbers(cells, rules[mark]))).sum() >= MOST * filled)
        first, last = (~np.isnan(dates(cells, day_first=day_first)) for day_first in (True, False))
        if (first | last).sum() >= MOST * filled:
            days += int((first & ~last).sum()) - int((last & ~first).sum())
    return Shape(
        other if votes[other] > votes[expected] else expected,
        None if not days else days > 0,
        frame.attrs.get("separator", ""),
        frame.attrs.get("encoding", ""),
    )
