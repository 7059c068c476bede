# SPDX-License-Identifier: Apache-2.0
"""Provides the settings of a training on a table of the user's own, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from torch_privacy.experiments import task
from torch_privacy.experiments.task import Option

TEST_SHARE = 0.1
OfTable = partial(Option, panel="Your own table")


@dataclass(frozen=True, kw_only=True)
class TableSettings(task.Settings):
    """The settings of a training on a table; `own_table.complete` chooses those that the user leaves out."""

    file: str = ""
    hidden_units: Annotated[
        list[int],
        Option("Width of the hidden layer, in units; for a table, 0 is a linear model.", shown="adult: 16", kind=int),
    ] = field(default_factory=lambda: [64])
    target: Annotated[str, OfTable("Column of the table to predict.", metavar="COLUMN")] = ""
    schema: Annotated[  # the file that declares what is public; None for the template's cautious choice
        str | None,
        OfTable(
            "What is public about the columns, as written by torch-privacy schema and filled in.",
            shown="types from the file's storage types; the rest is learnt privately",
            kind=Path,
            metavar="FILE",
        ),
    ] = None
    schema_share: Annotated[
        float,
        OfTable(
            "Share of epsilon and delta for learning bounds and categories that the schema leaves open, in (0, 1).",
            shown="0.3",
        ),
    ] = 0.3
    owner: Annotated[
        str | None,
        OfTable("Column that names the person of each row: protects persons instead of rows.", metavar="COLUMN"),
    ] = None
    per_owner: Annotated[int | None, OfTable("Largest number of rows of one person to use, with --owner.")] = None
    test_share: Annotated[
        float, OfTable("Share of the rows kept for the test, in (0, 1).", shown=f"{TEST_SHARE:g}")
    ] = TEST_SHARE
    threshold: Annotated[
        str | None,
        OfTable(
            "Predict a class from this probability on, such as yes=0.1; for rare classes.",
            shown="the most probable class",
            metavar="CLASS=P",
        ),
    ] = None
    weight_decay: Annotated[  # None: by the number of classes; older runs have none: they fitted few rows too closely
        float | None,
        OfTable(
            "A step multiplies the hidden layers' weights by one minus this times the learning rate.",
            shown="0.6 for few classes",
        ),
    ] = 0.0
    clipping: str = "flat"  # older runs have "automatic": its probabilities were worse than the base rate
    average: float = 0.99  # decay of the weights' moving average


OF_TABLE = (
    "target",
    "schema",
    "schema_share",
    "owner",
    "per_owner",
    "test_share",
    "threshold",
    "weight_decay",
)  # that no experiment has
