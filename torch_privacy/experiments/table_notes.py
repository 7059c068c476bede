# SPDX-License-Identifier: Apache-2.0
"""Says in words what a training on the user's own table chose, protects and learnt, and at which price."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_privacy import privacy, tables
from torch_privacy.experiments import task
from torch_privacy.experiments.table_settings import TableSettings
from torch_privacy.privacy.rounding import round_up, short
from torch_privacy.support import validate as _check
from torch_privacy.support.units import OF_TABLE, ONE_EXAMPLE, owner_in_words, plural, unit_of_column
from torch_privacy.tables.cells import read_cells
from torch_privacy.tables.learn import TOO_FEW
from torch_privacy.tables.schema import OF_STORAGE
from torch_privacy.tables.schema_file import toml_key, toml_text

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_NAMES = 20  # of columns, in a message
FEW_ROWS = 10  # below which a declared category is pointed out
NUMBERING = {"id", "ids", "uuid", "guid", "identifier", "ssn"}  # words of a name for a number of a person or a row
ROW_NUMBERS = {"column 1", "Unnamed: 0", "__index_level_0__", "rownames"}  # of pandas and R; an empty name is the first
MOST_CLASSES = 6  # of a column, in a message


def notes(
    settings: TableSettings,
    schema: tables.Schema,
    n: int,
    released: Mapping[str, Any],
    prior: Sequence[privacy.Release],
) -> tuple[str, ...]:
    """Returns sentences on what was chosen, and on what was learnt and its price."""
    name, steps = Path(settings.file).name, task.number_of_steps(settings, n)
    clipping = "automatic clipping" if settings.clipping == "automatic" else f"clip norm {settings.clip_norm:g}"
    whom = "rows" if settings.owner is None else plural(event_unit(settings))  # the number of their rows is private
    epochs = f"{settings.epochs:.3g} epoch{'s' * (settings.epochs != 1)}"
    chosen = (
        f"{name}: trains on {n:,} {whom}; a share of {settings.test_share:g} is kept for the test. Protected: "
        f"{unit(settings)}.",
        f"Chosen: delta {short(settings.delta)}, batches of {settings.expected_batch_size:,}, {steps:,} steps "
        f"({epochs}), {_units(settings)}, {clipping}, learning rate {settings.learning_rate:g}, "
        f"weight decay {settings.weight_decay:g}, averaged weights.",
    )
    if not prior:
        price = "The schema says all that is needed: nothing was learnt privately, and all of epsilon is for training."
    else:
        cost = cost_of([release.event for release in prior], settings.delta)
        total = settings.target_epsilon
        of = "" if total is None else f" of the total {total:g}; the training has the rest"
        price = f"Learnt privately, for {cost}{of}: {_in_words(schema, released.get('declared', ()))}."
    return (*chosen, *_unusable(schema), *released["notes"], *_hints(settings, schema), price)


def _unusable(schema: tables.Schema) -> tuple[str, ...]:
    """Returns which columns of a Parquet file hold no single values, and so are not used."""
    unusable = (column for column in schema.columns if column.reason.startswith(OF_STORAGE))
    return tuple(f"{column.name!r} is ignored: {column.reason}." for column in unusable)


def to_write(settings: Any, lines: str) -> str:
    """Returns which file to change, and the lines to write into it, by settings with file, target and schema."""
    if not lines:
        return ""
    if settings.schema is not None:
        return f"Write into {settings.schema}: {lines}. "
    name, target = shlex.quote(Path(settings.file).name), shlex.quote(settings.target)
    made = f"torch-privacy schema {name} --target {target} --output schema.toml"
    return f"Make a schema ({made}), write into schema.toml: {lines}, and add --schema schema.toml. "


def identifiers(settings: TableSettings, schema: tables.Schema) -> str | None:
    """Returns what to do with features that may number persons or rows, by their names alone; None without such."""
    features = [column.name for column in schema.open_columns if column.name != schema.target]
    of_persons = [name for name in features if NUMBERING & {word.lower() for word in _WORD.findall(name)}]
    found = [*of_persons, *(name for name in features if name in ROW_NUMBERS)]
    if not found:
        return None
    lines = to_write(settings, f'[columns.{toml_key(found[0])}], kind = "ignored"').rstrip()
    owner = f" If a person may have several rows, add --owner {shlex.quote(found[0])} instead." if of_persons else ""
    return (
        f"{Path(settings.file).name}: {_check.quoted(found, at_most=MOST_NAMES)} will be used as a feature. If it "
        "numbers persons or rows, as its name suggests, it predicts nothing for others: "
        f"{lines[0].lower()}{lines[1:]}{'' if settings.owner else owner}"
    )


def other_mark(settings: TableSettings, schema: tables.Schema, frame: DataFrame) -> str | None:
    """Returns a sentence if the schema file names the decimal mark that fewer columns have; it is only to be shown."""
    if settings.schema is None:
        return None
    found = tables.shape_of(frame, schema.missing, schema.decimal).decimal
    if found == schema.decimal:
        return None
    return (
        f"{Path(settings.file).name}: more columns are numbers with the decimal mark '{found}' than with "
        f"'{schema.decimal}'. {to_write(settings, f'decimal = {toml_text(found)}')}".rstrip()
    )


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _hints(settings: TableSettings, schema: tables.Schema) -> tuple[str, ...]:
    """Returns what may help if bounds could not be learnt."""
    reason = TOO_FEW.removeprefix("has ")
    lost = [column.name for column in schema.columns if column.kind == "ignored" and column.reason == reason]
    if lost:
        more = f" (so for {_check.quoted(lost[1:], at_most=MOST_NAMES)}, too)" if lost[1:] else ""
        line = f'[columns.{toml_key(lost[0])}], kind = "number", bounds = [0, 100], as publicly known{more}'
        return (f"Bounds that are declared need not be learnt. {to_write(settings, line)}".rstrip(),)
    return ()


def _in_words(schema: tables.Schema, listed: Sequence[Mapping[str, str]]) -> str:
    """Returns what a complete schema says of the columns that are used, and was not declared; of many, the first."""
    declared, found = {one["column"]: one["declared"] for one in listed}, []
    for column in (schema.target_column, *schema.features):
        if column.name in declared and (column.scale in (None, column.bounds) or ", most " in declared[column.name]):
            continue
        name = f"{column.name!r} (target)" if column.name == schema.target else repr(column.name)
        if column.kind == "category":
            categories = column.categories or ()
            shown = ", ".join(repr(one) if "," in one or one != one.strip() else one for one in categories)
            names = f": {shown}" if len(categories) <= MOST_CLASSES else ""
            found.append(f"{name} {len(categories)} categor{'y' if len(categories) == 1 else 'ies'}{names}")
        else:
            low, high = column.bounds or ("", "")
            scale = "" if column.scale in (None, column.bounds) else f", most {column.scale[0]} to {column.scale[1]}"
            found.append(f"{name} {low} to {high}{scale}{'' if column.log is None else ', its logarithm'}")
    more = [f"and {len(found) - MOST_NAMES} more in schema.toml"] if len(found) > MOST_NAMES else []
    return "; ".join([*found[:MOST_NAMES], *more]) or "values fill the declared bounds"


def exact(train: tables.Encoded) -> tuple[str, ...]:
    """Returns how many cells are missing or wrong; exact, since nothing was paid for counting."""
    found = []
    for counts, words in ((train.num_missing, "missing"), (train.num_not_understood, "not of the declared kind")):
        listed = ", ".join(f"{count:,} of {name!r}" for name, count in counts.items() if count)
        found += [f"{words}: {listed}"] if listed else []
    if not found:
        return ()
    return (f"Imputed in the training rows ({'; '.join(found)}). These are exact counts, so keep them to yourself.",)


def declared_in(settings: TableSettings, schema: tables.Schema) -> dict[str, Any]:
    """Returns bounds and categories that a schema file declares, each with its source, as plain data."""
    if settings.schema is None:
        return {}
    found = []
    for column in schema.columns:
        if column.kind == "category" and column.categories is not None:
            what = ", ".join(column.categories)
        elif column.bounds is not None:
            what = f"{column.bounds[0]} to {column.bounds[1]}"
            what += "" if column.scale in (None, column.bounds) else f", most {column.scale[0]} to {column.scale[1]}"
        else:
            continue
        found.append({"column": column.name, "declared": what, "source": column.source})
    return {"declared": found}


def rare(schema: tables.Schema, frame: Any, listed: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Returns sentences on declared categories that few training rows have; exact, so only to be shown."""
    names, found = {one["column"] for one in listed}, []
    for column in schema.columns:
        if column.kind != "category" or column.name not in names:
            continue
        cells = read_cells(frame[column.name], schema.rules)
        counts = dict(
            zip(cells.values, np.bincount(cells.codes[cells.codes >= 0], minlength=len(cells.values)), strict=True)
        )
        few = {one: int(counts.get(one, 0)) for one in column.categories or () if counts.get(one, 0) < FEW_ROWS}
        if none := [one for one, count in few.items() if not count]:
            few = {one: count for one, count in few.items() if count}
            found.append(
                f"{column.name!r}: no training row has the declared category "
                f"{_check.quoted(none, at_most=MOST_CLASSES)}. If it is misspelt, correct the schema. This is "
                "an exact count: keep it to yourself."
            )
        if few:
            shown = ", ".join(f"{one!r} ({count})" for one, count in list(few.items())[:MOST_CLASSES])
            found.append(
                f"{column.name!r}: few rows have the declared category {shown}. The run folder publishes it: if it is "
                "known from these rows alone, take it out of the schema. This is an exact count: keep it to yourself."
            )
    return tuple(found)


def _units(settings: TableSettings) -> str:
    if not settings.hidden_units:
        return "no hidden units (a linear model)"
    return f"{' and '.join(map(str, settings.hidden_units))} hidden units"


def unit(settings: TableSettings) -> str:
    """Returns the unit of protection in words."""
    if settings.owner is None:
        return "one row of the table"
    assert settings.per_owner is not None
    return owner_in_words(event_unit(settings), settings.per_owner, OF_TABLE)


def event_unit(settings: TableSettings) -> str:
    """Returns the word for the unit of protection in events: those of learning and training must agree."""
    return ONE_EXAMPLE if settings.owner is None else unit_of_column(settings.owner)


def cost_of(events: Sequence[privacy.Event], delta: float) -> str:
    """Returns the certified epsilon of the releases, in words."""
    return f"epsilon {round_up(privacy.compose([(event, 1) for event in events]).epsilon_high(delta))}"
