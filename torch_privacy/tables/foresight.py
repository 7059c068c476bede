# SPDX-License-Identifier: Apache-2.0
"""Says before anything is released what cannot be learnt from a number of rows at an epsilon.

The cells of a column must be more than the noise of their counts, a class must be in about as many rows as the
threshold of categories, and numbers in as many as stand out of a histogram's noise. All that follows from the schema,
the number of rows and epsilon alone, which are public.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..mechanisms.histograms import STANDS_OUT
from .mechanisms import CountNoise, frequent
from .price import LearningBudget
from .schema import Schema
from .schema_file import toml_key

MANY_ERRORS = 4.0  # standard deviations from which on a noisy count is said to be more than nothing
RARE = 0.01  # share of the rows: a class that must be more frequent to be learnt deserves a warning
TOO_RARE = 0.1  # the same for a refusal by the command, if the kind of the target is left open


@dataclass(frozen=True)
class Doubt:
    """Says what cannot be learnt, and the lines to write into the schema instead.

    ``is_certain`` is True if the target or all columns will not be learnt, ``is_likely`` if a common target may not be;
    else only a rare class is lost.
    """

    what: str
    lines: str
    is_certain: bool
    is_likely: bool = True


def doubt_of(schema: Schema, n: int, budget: LearningBudget) -> Doubt | None:
    """Returns what cannot be learnt of all columns, or of the target, from n rows or owners; None without a doubt.

    Guarantees:
        - computed from public quantities alone, before the first release.
        - certain if two equally frequent classes, or equal numbers in all rows, would not be found, or if the kinds of
          all columns but the target are open, and the cells of all rows would be no more than noise.
        - likely, too, if a class in a tenth of the rows would not, and the kind of the target is left open.
    """
    rows = n * budget.rows  # of an owner at most as many
    doubt = _of_target(schema, rows, budget)
    return doubt if doubt is not None and doubt.is_certain else _of_all_columns(schema, rows, budget) or doubt


def _of_target(schema: Schema, rows: int, budget: LearningBudget) -> Doubt | None:
    if not schema.target or not schema.target_column.is_open:
        return None
    target = schema.target_column
    if schema.task == "regression":
        return _of_number(target.name, rows, budget)
    others = [column.kind for column in schema.columns if column is not target and column.is_open]
    least = _threshold(budget, 1 + others.count("category"))  # of the kinds to be learnt, none need be a category
    threshold = _threshold(budget, 1 + others.count("category") + others.count("learn"))
    if target.kind == "number":  # which frequent values make a class, and bounds a regression
        return _of_number(target.name, rows, budget) if least > rows / 2 else None
    if threshold <= RARE * rows:
        return None
    is_declared = target.kind == "category" or schema.task == "classification"
    lines = [f"[columns.{toml_key(target.name)}]", 'kind = "category"', 'categories = ["...", "..."]']
    if not is_declared:
        lines.append('or kind = "number", bounds = [0, 100] for a number')
    is_of_owners = budget.rows > 1  # then the number of rows is private
    if threshold > rows:
        what = (
            f"the classes of the target {target.name!r} cannot be learnt at this epsilon: each takes about "
            f"{threshold:,} rows, and there are {'at most ' if is_of_owners else ''}{rows:,}"
        )
    else:
        what = (
            f"a class of the target {target.name!r} in fewer than about {threshold:,} of "
            f"{'at most' if is_of_owners else 'the'} {rows:,} rows cannot be learnt at this epsilon"
        )
    is_certain = least > rows / 2
    return Doubt(what, ", ".join(lines), is_certain, is_certain or (not is_declared and threshold > TOO_RARE * rows))


def _of_all_columns(schema: Schema, rows: int, budget: LearningBudget) -> Doubt | None:
    used = [column for column in schema.columns if column.kind != "ignored"]
    least = MANY_ERRORS * budget.counts.stddev
    features = [column for column in used if column.name != schema.target]
    if not features or rows > least or any(column.kind != "learn" for column in features):
        return None
    what = (
        f"no column can be learnt at this epsilon: each of {len(used):,} takes about {least:,.0f} rows, and there are "
        f"{'at most ' if budget.rows > 1 else ''}{rows:,}"
    )
    return Doubt(what, lines_for(features[0].name), is_certain=True)


def lines_for(name: str) -> str:
    """Returns what to write into a schema for a column of which nothing can be learnt."""
    kinds = 'kind = "category", categories = ["...", "..."], or kind = "number", bounds = [0, 100] for a number'
    return f"[columns.{toml_key(name)}], {kinds}"


def _threshold(budget: LearningBudget, groups: int) -> int:
    """Returns in how many rows a class is found, if values of as many columns are looked for."""
    assert budget.categories is not None
    return frequent({}, replace(budget.categories.noise, groups=groups), budget.categories.delta)[1]


def _of_number(name: str, rows: int, budget: LearningBudget) -> Doubt | None:
    assert budget.bounds is not None
    least = STANDS_OUT[0] * CountNoise(budget.rows, 1, budget.bounds / 2).stddev
    if rows > least:
        return None
    what = f"the bounds of the target {name!r} take {least:,.0f} rows to be learnt at this epsilon, not {rows:,}"
    return Doubt(what, f'[columns.{toml_key(name)}], kind = "number", bounds = [0, 100]', is_certain=True)
