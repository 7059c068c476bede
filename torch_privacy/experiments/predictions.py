# SPDX-License-Identifier: Apache-2.0
"""Predicts the rows of a new table with the model of a finished run on a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from torch_privacy import tables
from torch_privacy.experiments import OWN_TABLE
from torch_privacy.experiments.table_scores import threshold_of
from torch_privacy.runs.folder import NO_DIGESTS, RunFolder
from torch_privacy.support.validate import quoted

if TYPE_CHECKING:
    from pandas import DataFrame

ROWS_AT_ONCE = 4096
MOST_NAMES = 10  # of columns, in a note
MARKS = {".": ("point", "1.5"), ",": ("comma", "1,5")}  # of decimals: name and example
FORMULA = tuple("=+-@\t\uff1d\uff0b\uff0d\uff20")  # how cells begin that spreadsheets run; the last are wide
NUMBER = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions for a table, with sentences on how it was read."""

    frame: DataFrame
    notes: tuple[str, ...]

    def as_csv(self, separator: str = ",") -> str:
        """Returns the predictions as CSV, one line for each row, in the rows' order.

        A text that a spreadsheet would run as a formula has a ' before it; numbers never do.
        """
        inert, names = self.frame.copy(), [_inert(name) for name in self.frame.columns]
        for place, kind in enumerate(inert.dtypes):
            if kind.kind not in "fiub":
                inert.isetitem(place, inert.iloc[:, place].map(_inert))
        return inert.to_csv(index=False, header=names, lineterminator="\n", float_format="%.9g", sep=separator)

    def as_records(self) -> list[dict[str, Any]]:
        """Returns the predictions as plain values, one record for each row."""
        return json.loads(self.frame.to_json(orient="records", double_precision=15) or "[]")


@dataclass(frozen=True, eq=False)
class Predictor:
    """The model of a finished run on a table, with the schema that encodes other tables."""

    schema: tables.Schema
    model: nn.Module
    threshold: tables.Threshold | None = None

    @classmethod
    def load(cls, path: Path, threshold: str | None = None) -> Predictor:
        """Returns the model in a run folder, of which every file is checked by its digest.

        A ``threshold`` such as ``"yes=0.1"`` replaces that of the run.

        Raises:
            ValueError: the folder holds no finished run on a table, one of its files was changed, or it has no such
                class.
        """
        folder = RunFolder(path)
        results = folder.read_finished()
        if results.get("experiment") != OWN_TABLE:
            raise ValueError(f"{path}: is no run on a table of your own. Name a folder that train FILE has made.")
        digests = results.get("files", NO_DIGESTS)
        settings = folder.read_settings(digests)
        schema = tables.Schema.from_toml(folder.read_schema(digests))
        model = tables.new_model(schema, settings["hidden_units"]).float()  # as it was trained
        try:
            model.load_state_dict(safetensors.torch.load(folder.read_model(digests)))
        except (RuntimeError, safetensors.SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{folder.model}: does not fit the schema beside it ({reason}).") from None
        threshold = settings.get("threshold") if threshold is None else threshold
        return cls(schema, model.eval(), threshold_of(threshold, schema, "predict"))

    @property
    def target(self) -> str:
        """Returns the name of the column that is predicted."""
        return self.schema.target

    def predict_file(self, path: Path, keep: Sequence[str] = ()) -> Predictions:
        """Returns the predictions for a CSV or Parquet file, with notes on columns and cells that were not used.

        The columns to ``keep`` come first, as they are in the file.
        """
        frame = tables.read_table(path, allow_empty=True)
        self.schema.check_frame(frame, str(path), with_target=False)
        known = {column.name for column in self.schema.columns}
        extra = [str(name) for name in frame.columns if name not in known and name not in keep]
        notes = list(frame.attrs.get("notes", ()))
        if extra:
            notes.append(f"{path}: columns that the model does not know are ignored: {_quoted(extra)}.")
        encoded = tables.Encoder(self.schema).encode(frame, with_target=False)
        notes += [f"{path}: {doubt}" for doubt in self._doubts(frame, encoded)]
        found = self._predicted(encoded)
        for place, name in enumerate(dict.fromkeys(keep)):
            if name not in frame:
                names = _quoted([str(one) for one in frame.columns])
                raise ValueError(f"predict: --keep {name!r} is no column of {path}, which has {names}.")
            if name in found:
                raise ValueError(f"predict: --keep {name!r} has the name of a column of predictions. Rename it first.")
            found.insert(place, name, frame[name].astype(object).to_numpy())
        return Predictions(found, tuple(notes))

    def predict(self, frame: DataFrame) -> DataFrame:
        """Returns a column ``prediction`` and, for classes, the probability of each."""
        return self._predicted(tables.Encoder(self.schema).encode(frame, with_target=False))

    def _predicted(self, encoded: tables.Encoded) -> DataFrame:
        with torch.no_grad():
            parts = zip(encoded.numbers.split(ROWS_AT_ONCE), encoded.categories.split(ROWS_AT_ONCE), strict=True)
            outputs = torch.cat([self.model(part) for part in parts])
        return tables.Encoder(self.schema).predictions(outputs, self.threshold)

    def _doubts(self, frame: DataFrame, encoded: tables.Encoded) -> Iterator[str]:
        """Yields sentences on cells that the model cannot use, or may read as another number or date than is meant."""
        features = {column.name: column for column in self.schema.features}
        shape = tables.shape_of(frame.loc[:, list(features)], self.schema.missing, self.schema.decimal)
        if shape.decimal != self.schema.decimal:
            (other, wrong), (mark, right) = (MARKS[one.decimal] for one in (shape, self.schema))
            yield f"numbers have a decimal {other}, and the model reads a decimal {mark}. Write {right}, not {wrong}."
        dates = [column.name for column in features.values() if column.kind == "date"]
        swapped = [name for name in dates if shape.day_first is (not features[name].day_first)]
        if swapped:
            order = "days before months" if shape.day_first else "months before days"
            yield f"dates have {order}, and the model reads {_quoted(swapped)} the other way. Write 2024-03-01."
        strange = {name: count for name, count in encoded.num_not_understood.items() if count}
        for is_category, what in ((False, "are no number or date, and are imputed"), (True, "count as other")):
            listed = [
                f"{count:,} of {name!r}"
                for name, count in strange.items()
                if (features[name].kind == "category") == is_category
            ]
            if listed:
                rest = f" and of {len(listed) - MOST_NAMES} more columns" if len(listed) > MOST_NAMES else ""
                where = "categories that the model does not know: " if is_category else "cells that it cannot read: "
                yield f"{where}{', '.join(listed[:MOST_NAMES])}{rest}; these {what}."


def _inert(text: Any) -> Any:
    """Returns a cell that no spreadsheet runs: a text that begins a formula, and is no number, gets a ' before it."""
    if not isinstance(text, str):
        return text
    line = re.sub(r"[\r\n]", " ", text)
    return f"'{line}" if line.lstrip(" ").startswith(FORMULA) and not NUMBER.fullmatch(line) else line


def _quoted(names: list[str]) -> str:
    return quoted(names, at_most=MOST_NAMES)
