# SPDX-License-Identifier: Apache-2.0
"""Renders what only a training on a table has: what was declared public, and the coefficients of a linear model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_privacy.runs.report import html

NO_SOURCE = "none is stated"
INTRODUCTION = (
    "The schema file declares these to be public, so that epsilon does not cover them. They must be known without "
    "looking at the rows; the source says from where."
)
MOST = 200  # coefficients on the page


def declared_rows(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the columns with what was declared public and its source."""
    return [(one["column"], one["declared"], one["source"] or NO_SOURCE) for one in results.get("declared", ())]


def coefficient_rows(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns column, value, class and coefficient, the largest first."""
    found = sorted(results.get("coefficients", ()), key=lambda one: -abs(one["coefficient"]))
    return [(one["column"], one["value"], one["class"] or "", f"{one['coefficient']:+.4g}") for one in found]


def sections(results: Mapping[str, Any]) -> str:
    """Returns both sections as HTML; empty without them."""
    parts = []
    if rows := coefficient_rows(results):
        said = (
            "The model is linear. Of a number the coefficient is for half of its scale, of a category where it is the "
            "value. They are part of the released model, with its noise in them."
        )
        if len(rows) > MOST:
            said += f" Shown are the {MOST} largest of {len(rows):,}; results.json has all."
        table = html.table(("column", "value", "class", "coefficient"), (("ours", row) for row in rows[:MOST]))
        parts += ["<h2>The coefficients</h2>", html.paragraphs([said]), table]
    if declared := declared_rows(results):
        table = html.table(("column", "declared public", "source"), (("declared", row) for row in declared))
        parts += ["<h2>What was declared public</h2>", html.paragraphs([INTRODUCTION]), table]
    return "".join(parts)
