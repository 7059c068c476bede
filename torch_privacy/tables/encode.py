# SPDX-License-Identifier: Apache-2.0
"""Turns a table into tensors by a complete schema alone, and a model's outputs back into a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from ..support.validate import quoted
from .cells import Cells, dates, numbers, read_cells
from .extra import needed
from .schema import Column, Schema
from .threshold import Threshold

if TYPE_CHECKING:
    from pandas import DataFrame

MISSING_CODE, OTHER_CODE, FIRST_CODE = 0, 1, 2
NO_CLASS = -100  # what torch's cross_entropy leaves out
NUMBERS_OF = {"number": 2, "date": 6}  # value and missing; and the day in the year and in the week as sine and cosine
FURTHEST = 3.0  # a scaled number that a model sees; NaN stays
YEAR, WEEK = 365.2425, 7.0


@dataclass(frozen=True, eq=False)
class Encoded:
    """The tensors of n rows of a table.

    Args:
        numbers: float32 (n, d): of each number its value, such that its scale (or bounds) is [-1, 1], at most ±3, and 1
            where it is missing; of a date also sine and cosine of the day in the year and in the week.
        categories: int64 (n, k): 0 where missing, 1 for other values, 2, 3, ... for those of the schema.
        targets: int64 (n,), -100 where missing; or float32 (n,), scaled to [-1, 1], NaN where missing.
        num_missing: **private**: the exact number of missing cells of each column.
        num_not_understood: **private**: the exact number of cells that are not of the column's kind, or of no known
            category. Publish the noisy counts of `Learnt` instead.
    """

    numbers: Tensor
    categories: Tensor
    targets: Tensor | None
    num_missing: Mapping[str, int]
    num_not_understood: Mapping[str, int]

    @property
    def has_target(self) -> Tensor:
        """Returns bool (n,): whether a row has a target; the others have the loss 0."""
        if self.targets is None:
            return torch.zeros(len(self.numbers), dtype=torch.bool)
        return ~self.targets.isnan() if self.targets.is_floating_point() else self.targets != NO_CLASS

    @property
    def inputs(self) -> Tensor:
        """Returns the model's input as one tensor, float32 (n, d + k): the numbers, then the categories."""
        return torch.cat([self.numbers, self.categories.float()], 1)

    def dataset(self) -> TensorDataset:
        """Returns a dataset of ``(inputs, target)``; a ``TensorDataset``, as a batch of it is one indexing.

        Raises:
            ValueError: the table was encoded without its target.
        """
        if self.targets is None:
            raise ValueError("Encoded.dataset: the table was encoded without its target.")
        return TensorDataset(self.inputs, self.targets)


class Encoder:
    """Turns tables into tensors: each row is a function of its own cells and of a complete schema.

    Args:
        schema: complete; from a file, or `Learnt.schema`.

    Guarantees:
        - A row's tensors do not depend on other rows.
        - A missing number or date, or a cell that is none, becomes the middle of its bounds, 0, with the indicator 1.
          Values beyond the bounds are clipped.
        - Rows are never dropped. One without a target (missing, no number, or of no known class) has a loss of 0.

    Raises:
        ValueError: the schema is not complete; the message lists what is to be learnt.

    Example:
        >>> import pandas as pd
        >>> from torch_privacy.tables import Column, Schema
        >>> schema = Schema((Column("age", "number", (0, 100)), Column("city", "category", categories=("Rome",)),
        ...                  Column("rent", "number", (0, 1000))), target="rent", task="regression")
        >>> frame = pd.DataFrame({"age": ["75", "?"], "city": ["Rome", "Oslo"], "rent": ["250", "250"]})
        >>> encoded = Encoder(schema).encode(frame)
        >>> encoded.numbers.tolist(), encoded.categories.tolist(), encoded.targets.tolist()
        ([[0.5, 0.0], [0.0, 1.0]], [[2], [1]], [-0.5, -0.5])
    """

    def __init__(self, schema: Schema):
        if not schema.is_complete:
            names = quoted((column.name for column in schema.open_columns), at_most=5) or "the task"
            raise ValueError(f"Encoder: the schema leaves {names} to be learnt. Pass the schema that learn returns.")
        self.schema = schema
        self._numeric = [column for column in schema.features if column.kind in NUMBERS_OF]
        self._categorical = [column for column in schema.features if column.kind == "category"]

    @property
    def num_numbers(self) -> int:
        """Returns d, the number of columns of ``Encoded.numbers``."""
        return sum(NUMBERS_OF[column.kind] for column in self._numeric)

    @property
    def num_codes(self) -> tuple[int, ...]:
        """Returns the number of codes of each column of ``Encoded.categories``, with missing and other."""
        return tuple(FIRST_CODE + len(column.categories or ()) for column in self._categorical)

    @property
    def names_of_numbers(self) -> list[tuple[str, str]]:
        """Returns the column and the meaning of each column of ``Encoded.numbers``."""
        waves = ("sine of the year", "cosine of the year", "sine of the week", "cosine of the week")
        return [
            (column.name, meaning)
            for column in self._numeric
            for meaning in (
                "half of its scale" if column.log is None else "half of its scale, as logarithm",
                *(waves if column.kind == "date" else ()),
                "missing",
            )
        ]

    @property
    def names_of_codes(self) -> list[tuple[str, str]]:
        """Returns the column and the value of each code, of one column after the other."""
        return [
            (column.name, value)
            for column in self._categorical
            for value in ("(missing)", "(other)", *(column.categories or ()))
        ]

    @property
    def target_scale(self) -> float:
        """Returns the factor from an error of a scaled target to the target's own unit; 1 for classification."""
        if self.schema.task != "regression":
            return 1.0
        low, high = self.schema.target_column.scale_limits
        return (high - low) / 2

    def unscaled(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns scaled targets of a regression, or outputs, (n,), in the target's own unit."""
        low, high = self.schema.target_column.scale_limits
        return low + (high - low) * (values + 1) / 2

    def encode(self, frame: DataFrame, *, with_target: bool = True, where: str = "the table") -> Encoded:
        """Returns the tensors of a table's rows.

        Args:
            frame: as from `read_table`, with every column of the schema; without target, the features suffice.
            with_target: whether the table has the target.
            where: begins the message of an error, such as the file's path.

        Raises:
            ValueError: a column is missing, or unknown to the schema.
        """
        self.schema.check_frame(frame, where, with_target=with_target)
        missing: dict[str, int] = {}
        not_understood: dict[str, int] = {}
        read = {
            column.name: read_cells(frame[column.name], self.schema.rules)
            for column in (*self.schema.features, *([self.schema.target_column] if with_target else []))
        }

        def count(column: Column, is_used: NDArray[np.bool_]) -> None:
            is_missing = read[column.name].is_missing
            missing[column.name] = int(is_missing.sum())
            not_understood[column.name] = int((~is_used & ~is_missing).sum())

        parts = [np.zeros((len(frame), 0), np.float32)]
        for column in self._numeric:
            values = self._values(column, read[column.name])
            count(column, ~np.isnan(values))
            parts.append(_numeric(column, values))
        codes = np.zeros((len(frame), len(self._categorical)), np.int64)
        for k, column in enumerate(self._categorical):
            codes[:, k] = _codes(column, read[column.name])
            count(column, codes[:, k] >= FIRST_CODE)
        targets = None
        if with_target:
            column = self.schema.target_column
            targets, is_used = self._targets(column, read[column.name])
            count(column, is_used)
        return Encoded(
            torch.from_numpy(np.concatenate(parts, 1)), torch.from_numpy(codes), targets, missing, not_understood
        )

    def predictions(self, outputs: Tensor, threshold: Threshold | None = None) -> DataFrame:
        """Returns a model's outputs as a table with the column "prediction".

        For classification, logits (n, classes) also become "probability of CLASS" for each class; the prediction is
        the most probable class, or that of a ``threshold``. For regression, outputs (n,) become numbers in the target's
        unit, clipped to its bounds; one that is not finite becomes NaN.
        """
        pandas = needed("pandas")
        outputs = outputs.detach().cpu().double()
        if self.schema.task == "regression":
            column = self.schema.target_column
            (low, high), (first, last) = column.limits, column.scale_limits
            scaled = ((outputs + 1) / 2).numpy()
            return pandas.DataFrame({"prediction": (first * (1 - scaled) + last * scaled).clip(low, high)})
        classes = self.schema.classes
        chances = outputs.softmax(1).numpy()
        places = outputs.argmax(1).numpy() if threshold is None else threshold.decide(chances)
        table = {"prediction": np.array(classes, object)[places]}
        table |= {f"probability of {name}": chances[:, i] for i, name in enumerate(classes)}
        return pandas.DataFrame(table)

    def _values(self, column: Column, cells: Cells) -> NDArray[np.float64]:
        if column.kind == "date":
            return dates(cells, day_first=column.day_first)
        return numbers(cells, self.schema.rules)

    def _targets(self, column: Column, cells: Cells) -> tuple[Tensor, NDArray[np.bool_]]:
        if self.schema.task == "regression":
            scaled = _scaled(column, numbers(cells, self.schema.rules))
            return torch.from_numpy(scaled.astype(np.float32)), ~np.isnan(scaled)
        codes = _codes(column, cells)
        classes = np.where(codes >= FIRST_CODE, codes - FIRST_CODE, NO_CLASS)
        return torch.from_numpy(classes), codes >= FIRST_CODE


def _scaled(column: Column, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the values, clipped to the bounds, such that the scale becomes [-1, 1]; NaN stays."""
    (low, high), ends = column.limits, column.scale_limits
    values = np.clip(values, low, high)  # first: a warning of an overflow would show one row
    if column.log is None and ends == (low, high):
        return (values - low) / (high - low) * 2 - 1
    if column.log is not None:
        values, ends = np.log1p(values / column.log), np.log1p(np.array(ends) / column.log)
    return (2 * values - ends[0] - ends[1]) / (ends[1] - ends[0])


def _numeric(column: Column, values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Returns the numbers that the model sees of a number or date, (n, 2) or (n, 6)."""
    is_missing = np.isnan(values)
    parts = [_scaled(column, values).clip(-FURTHEST, FURTHEST)]
    if column.kind == "date":
        # 1970-01-01 was a Thursday; whole days, so that the time of day does not matter
        turns = [2 * math.pi * np.floor(values) / period for period in (YEAR, WEEK)]
        parts += [wave(turn) for turn in turns for wave in (np.sin, np.cos)]
    parts = [np.where(is_missing, 0.0, part) for part in parts]
    return np.stack([*parts, is_missing], 1).astype(np.float32)


def _codes(column: Column, cells: Cells) -> NDArray[np.int64]:
    """Returns the code of each cell."""
    place = {category: FIRST_CODE + i for i, category in enumerate(column.categories or ())}
    return cells.spread(np.array([place.get(value, OTHER_CODE) for value in cells.values], np.int64), MISSING_CODE)
