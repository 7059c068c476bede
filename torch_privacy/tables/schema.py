# SPDX-License-Identifier: Apache-2.0
"""Provides `Schema`: what is public of a table's columns, and what is still to be learnt privately."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..support.validate import quoted
from .cells import MISSING, NO_LETTER, Rules, parse_date
from .read import column_types
from .schema_file import KINDS, parse, read_text, toml_key, write

if TYPE_CHECKING:
    from pandas import DataFrame

    from .shape import Shape

Kind = Literal["number", "category", "date", "ignored", "learn"]
Task = Literal["classification", "regression"]
TASKS = ("classification", "regression")
KIND_OF_TASK: dict[str, Kind] = {"classification": "category", "regression": "number"}
OF_STORAGE = "its storage type"  # begins the reason why a column of Parquet is ignored
LARGEST_BOUND = 1e30  # float32 holds it


@dataclass(frozen=True)
class Column:
    """Describes what is public of one column; what is None, and the kind "learn", is still to be learnt.

    Args:
        name: as in the file.
        kind: ``"number"``, ``"category"``, ``"date"``, ``"ignored"`` or ``"learn"``.
        bounds: of numbers, (low, high); of dates, two ISO dates such as ``"2024-01-31"``. Values beyond are clipped.
        categories: the texts that are kept apart; all others are "other".
        day_first: whether ``03/01/2024`` is the third of January.
        reason: why the column is ignored, in words.
        scale: of numbers and dates, where most values lie within the bounds: it becomes [-1, 1], and values outside it
            go on to ±3. None stands for the bounds; ``learn(..., scales=True)`` learns it.
        log: unit of the logarithm ``log(1 + value / log)`` that a model sees in place of a number; None for none.
        source: where bounds or categories are known from, in words, such as a form or a law.
    """

    name: str
    kind: Kind
    bounds: tuple[Any, Any] | None = None
    categories: tuple[str, ...] | None = None
    day_first: bool = False
    reason: str = ""
    scale: tuple[Any, Any] | None = None
    log: float | None = None
    source: str = ""

    @property
    def is_open(self) -> bool:
        """True if something of the column is to be learnt."""
        if self.kind in ("number", "date"):
            return self.bounds is None
        return self.kind == "learn" or (self.kind == "category" and self.categories is None)

    @property
    def limits(self) -> tuple[float, float]:
        """Returns the bounds as numbers; of dates, in days since 1970-01-01."""
        assert self.bounds is not None
        low, high = self.bounds
        return (parse_date(low), parse_date(high)) if self.kind == "date" else (float(low), float(high))

    @property
    def scale_limits(self) -> tuple[float, float]:
        """Returns the scale as numbers; the bounds, if there is none."""
        return self.limits if self.scale is None else replace(self, bounds=self.scale).limits


@dataclass(frozen=True)
class Schema:
    """Describes what is public of a table: its columns, the target and how cells are read.

    Args:
        columns: every column of the file, the target too, in the file's order.
        target: name of the column to predict; "" for a table to synthesize, which needs none.
        task: ``"classification"`` or ``"regression"``; None if it is to be learnt, or without target.
        missing: texts that mean a missing value, in any case; the empty cell always does.
        decimal: ``"."`` or ``","``; the other one may separate thousands.
        day_first: whether dates of columns to be learnt have the day before the month; None learns it for each. In a
            schema file it holds for declared dates, too, which do not say it themselves.
        file: how the file is written, in words, where its cells were asked and no schema file; for a comment.

    Raises:
        ValueError: one sentence that names the column and what is wrong.

    Example:
        >>> schema = Schema((Column("age", "number", (0, 120)), Column("city", "category"),
        ...                  Column("rent", "number", (0, 5000))), target="rent", task="regression")
        >>> schema.is_complete, [column.name for column in schema.open_columns]
        (False, ['city'])
        >>> Schema.from_toml(schema.to_toml()) == schema
        True
    """

    columns: tuple[Column, ...]
    target: str
    task: Task | None = None
    missing: tuple[str, ...] = MISSING
    decimal: Literal[".", ","] = "."
    day_first: bool | None = None
    file: str = ""
    _where: str = field(default="Schema", repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            self._refuse(f"the column {twice[0]!r} comes twice")
        if self.target and self.target not in names:
            self._refuse(f"target = {self.target!r} is not one of its columns{_did_you_mean(self.target, names)}")
        if self.task is None and self.target:
            kind = self.target_column.kind  # a declared kind says the task
            if kind == "category" or (kind == "number" and self.target_column.bounds is not None):
                object.__setattr__(self, "task", "classification" if kind == "category" else "regression")
        if not isinstance(self.day_first, (bool, type(None))):
            self._refuse(f"day_first = {self.day_first!r} must be true or false")
        if self.task not in (None, *TASKS):
            self._refuse(f"task = {self.task!r} must be 'classification', 'regression' or 'learn'")
        if self.decimal not in (".", ","):
            self._refuse(f"decimal = {self.decimal!r} must be '.' or ','")
        if not all(isinstance(marker, str) for marker in self.missing):
            self._refuse(f"missing = {list(self.missing)!r} must be a list of texts")
        for column in self.columns:
            self._check_column(column)
        if self.target:
            self._check_target()
        if not self.features:
            self._refuse("every column but the target is ignored. Nothing is left to learn from")

    @classmethod
    def template(
        cls,
        path: str | Path,
        target: str,
        *,
        task: Task | None = None,
        ignore: Iterable[str] = (),
        shape: Shape | None = None,
    ) -> Schema:
        """Returns the cautious schema of a file, from its column names and storage types, and a ``shape``.

        No cell is looked at here. CSV has no storage types, so every kind is to be learnt; in Parquet a number, date,
        truth value or text is one, with bounds and categories to be learnt. What has no use, such as a list, is
        ignored.

        Args:
            path: CSV or Parquet file.
            target: name of the column to predict; "" for none.
            task: by default it follows from the target's storage type, if that is text, truth value or fraction; it is
                to be learnt if the target is an integer, or in CSV.
            ignore: names of columns that the model must not see, such as that of the owner.
            shape: how numbers and dates are written, from `shape_of`, which looks at cells; by default with a decimal
                point, and the order of days and months is learnt.

        Raises:
            ValueError: one sentence; the target or a column to ignore is not in the file, or cannot be predicted.
        """
        types = column_types(path)
        ignored = tuple(ignore)
        for name in (*([target] if target else ()), *ignored):
            if name not in types:
                raise ValueError(f"{path}: there is no column {name!r}{_did_you_mean(name, types)}.")
        if target in ignored:
            raise ValueError(f"{path}: the column {target!r} cannot be both the target and left out.")
        columns = [
            Column(name, "ignored", reason="left out by the command") if name in ignored else _column_of(name, kind)
            for name, kind in types.items()
        ]
        if target:
            place = list(types).index(target)
            columns[place], task = _target_of(str(path), target, types[target], task)
        if shape is None:
            return cls(tuple(columns), target, task, _where=str(path))
        columns = [
            replace(column, day_first=bool(shape.day_first)) if column.kind == "date" else column for column in columns
        ]
        written = {"decimal": shape.decimal, "day_first": shape.day_first, "file": shape.in_words()}
        return cls(tuple(columns), target, task, **written, _where=str(path))

    @classmethod
    def read(cls, path: str | Path, *, shape: Shape | None = None) -> Schema:
        """Reads a schema file; decimal mark and order of days and months that it does not say are those of ``shape``.

        Raises:
            ValueError: one sentence with the path and the line or key; the file is not TOML, or a value is not allowed.
        """
        return cls.from_toml(read_text(path), str(path), shape=shape)

    @classmethod
    def from_toml(cls, text: str, where: str = "schema", *, shape: Shape | None = None) -> Schema:
        """Returns the schema in the text of a schema file; ``where`` begins every error, ``shape`` as in `read`."""
        values = parse(text, where, shape)
        return cls(**{**values, "columns": tuple(Column(**column) for column in values["columns"])}, _where=where)

    def to_toml(self) -> str:
        """Returns the text of a schema file (TOML), with comments for those who edit it."""
        return write(asdict(self))

    @property
    def is_complete(self) -> bool:
        """True if nothing is to be learnt."""
        return (self.task is not None or not self.target) and not self.open_columns

    @property
    def has_scales_to_learn(self) -> bool:
        """True if a feature, or a number to predict, has bounds but no scale."""
        return any(column.bounds is not None and column.scale is None for column in self.columns)

    @property
    def open_columns(self) -> tuple[Column, ...]:
        """Returns the columns of which something is to be learnt."""
        return tuple(column for column in self.columns if column.is_open)

    @property
    def features(self) -> tuple[Column, ...]:
        """Returns the columns that the model sees."""
        return tuple(column for column in self.columns if column.kind != "ignored" and column.name != self.target)

    @property
    def target_column(self) -> Column:
        """Returns the column to predict."""
        return next(column for column in self.columns if column.name == self.target)

    @property
    def classes(self) -> tuple[str, ...]:
        """Returns the classes of a complete classification, in the order of the model's outputs."""
        return self.target_column.categories or ()

    @property
    def rules(self) -> Rules:
        """Returns the rules on how cells are read."""
        return Rules.of(self.missing, self.decimal)

    def with_columns(self, columns: Iterable[Column], task: Task | None) -> Schema:
        """Returns the schema with other columns and another task."""
        return replace(self, columns=tuple(columns), task=task)

    def check_frame(
        self, frame: DataFrame, where: str, *, with_target: bool = True, declared_in: str | None = None
    ) -> None:
        """Raises a ``ValueError`` of one sentence unless the table has the schema's columns.

        A table to predict (``with_target=False``) needs the features alone, and may have more columns. The sentence
        names the schema's file, ``declared_in``.
        """
        if not hasattr(frame, "iloc") or not hasattr(frame, "columns"):
            raise ValueError(f"{where}: is of type {type(frame).__name__}, and must be a data frame of pandas.")
        have = [*frame.columns]
        twice = {*frame.columns[frame.columns.duplicated()]}
        if strange := [name for name in have if not isinstance(name, str) or name in twice]:
            raise ValueError(
                f"{where}: the column name {strange[0]!r} is no text, or comes twice. Give each a name of its own, "
                "such as by frame.rename(columns=str)."
            )
        needed = [column.name for column in (self.columns if with_target else self.features)]
        if lacking := [name for name in needed if name not in have]:
            cure = "" if with_target else " Rename a column or add an empty one: an empty cell counts as missing."
            raise ValueError(
                f"{where}: lacks the {_plural(lacking)} {quoted(lacking, at_most=5)} of the schema"
                f"{'' if declared_in is None else f' in {declared_in}'}{_did_you_mean(lacking[0], have)}.{cure}"
            )
        known = {column.name for column in self.columns}
        if with_target and (unknown := [name for name in have if name not in known]):
            file = "" if declared_in is None else f"to {declared_in}: "
            raise ValueError(
                f"{where}: the schema does not name the {_plural(unknown)} {quoted(unknown, at_most=5)}. Add "
                f'{file}[columns.{toml_key(unknown[0])}] with kind = "ignored" or another kind.'
            )

    def _check_column(self, column: Column) -> None:
        name, kind = column.name, column.kind
        if kind not in KINDS:
            self._refuse(f"kind = {kind!r} must be one of {quoted(KINDS)}", name)
        if column.bounds is not None and kind not in ("number", "date"):
            self._refuse(f"bounds belong to a number or a date, not to kind = {kind!r}", name)
        self._check_scale(column)
        if column.categories is not None and kind != "category":
            self._refuse(f"categories belong to kind = 'category', not to {kind!r}", name)
        if column.bounds is not None:
            self._check_bounds(column)
        if column.categories is not None:
            self._check_categories(column, column.categories)
        if any(NO_LETTER.search(text) for text in (name, *(column.categories or ()), column.source)):
            self._refuse("a name, source or category has half of a pair of surrogates, which no file can hold", name)

    def _check_bounds(self, column: Column, key: str = "bounds") -> None:
        shown = f"{key} = {list(column.bounds or ())!r}"
        if column.kind == "date":
            if not all(isinstance(end, str) and not math.isnan(parse_date(end)) for end in column.bounds or ()):
                self._refuse(f"{shown} must be two dates such as 2024-01-31", column.name)
        elif not all(
            isinstance(end, (int, float)) and not isinstance(end, bool) and abs(end) <= LARGEST_BOUND
            for end in column.bounds or ()
        ):
            self._refuse(f"{shown} must be two numbers within ±{LARGEST_BOUND:g}", column.name)
        low, high = column.limits
        if not low < high:
            self._refuse(f"{shown} must be the smaller one first, and not equal", column.name)

    def _check_scale(self, column: Column) -> None:
        if column.scale is not None:
            if column.bounds is None:
                self._refuse("scale belongs to a number or a date with bounds", column.name)
            self._check_bounds(replace(column, bounds=column.scale), "scale")
            (low, high), (first, last) = column.limits, column.scale_limits
            if not low <= first < last <= high:
                self._refuse(f"scale = {list(column.scale)!r} must lie within bounds", column.name)
        if column.log is not None and not (
            column.kind == "number"
            and isinstance(column.log, (int, float))
            and 0 < column.log <= LARGEST_BOUND
            and column.bounds is not None
            and column.limits[0] >= 0
            and column.name != self.target
        ):
            self._refuse(
                f"log = {column.log!r} must be a number above 0, of a feature with bounds of 0 or more", column.name
            )

    def _check_categories(self, column: Column, categories: tuple[str, ...]) -> None:
        if not categories or not all(isinstance(category, str) for category in categories):
            self._refuse("categories must be a list of one or more texts, or 'learn'", column.name)
        if twice := sorted({category for category in categories if categories.count(category) > 1}):
            self._refuse(f"the category {twice[0]!r} comes twice", column.name)
        if missing := [category for category in categories if self.rules.is_missing(category)]:
            self._refuse(f"the category {missing[0]!r} is one of the texts for a missing value", column.name)
        if strange := [category for category in categories if category != " ".join(category.split())]:
            self._refuse(f"the category {strange[0]!r} has spaces around it or several in a row", column.name)

    def _check_target(self) -> None:
        column = self.target_column
        if column.kind == "ignored":
            self._refuse("the target cannot be ignored", column.name)
        if column.kind == "date":
            self._refuse("a date cannot be the target. Make it a number, such as days, first", column.name)
        needed = KIND_OF_TASK.get(self.task or "")
        if needed and column.kind not in (needed, "learn"):
            self._refuse(f"task = {self.task!r} needs a target of kind = {needed!r}, not {column.kind!r}", column.name)
        if column.categories is not None and len(column.categories) < 2:
            self._refuse("the target has one category alone, so there is nothing to predict", column.name)

    def _refuse(self, what: str, column: str | None = None) -> None:
        place = "" if column is None else f"[columns.{toml_key(column)}]: "
        raise ValueError(f"{self._where}: {place}{what}.")


def _column_of(name: str, storage: str) -> Column:
    """Returns the cautious choice for a feature of this storage type."""
    if storage == "boolean":
        return Column(name, "category", categories=("False", "True"))
    if storage in ("integer", "number"):
        return Column(name, "number")
    if storage == "date":
        return Column(name, "date")
    if storage == "text":
        return Column(name, "learn")
    return Column(name, "ignored", reason=f"{OF_STORAGE} {storage} is not a single value")


def _target_of(path: str, name: str, storage: str, task: Task | None) -> tuple[Column, Task | None]:
    if storage == "date":
        raise ValueError(f"{path}: the target {name!r} is a date. Make it a number, such as days, first.")
    if storage not in ("boolean", "integer", "number", "text"):
        raise ValueError(f"{path}: the target {name!r} cannot be predicted: its storage type is {storage}.")
    if task is None and storage in ("boolean", "number"):
        task = "classification" if storage == "boolean" else "regression"
    if storage == "boolean" and task == "classification":
        return Column(name, "category", categories=("False", "True")), task
    return Column(name, KIND_OF_TASK[task] if task else "learn"), task


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    names = list(names)
    close = difflib.get_close_matches(name.lower(), [one.lower() for one in names], n=1)
    if close:
        return f" (did you mean {next(one for one in names if one.lower() == close[0])!r}?)"
    return f" (it has {quoted(names, at_most=8)})"


def _plural(names: list[str]) -> str:
    return "column" if len(names) == 1 else "columns"
