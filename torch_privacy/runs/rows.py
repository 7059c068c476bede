# SPDX-License-Identifier: Apache-2.0
"""Provides the rows and columns of an experiment's table: every row is a training or a computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_privacy.privacy import Bracket

Number = float | Bracket[float] | None
Numbers = Mapping[str, Number]  # a column's key -> a number, or a certified bracket around one


@dataclass(frozen=True)
class Column:
    """One quantity of the table: its heading and its number format."""

    heading: str
    digits: int = 3
    percent: bool = False  # a fraction, shown in percent
    scientific: bool = False  # three digits and a power of ten


@dataclass(frozen=True)
class Context:
    """The inputs of a computation: size, seed and data."""

    quick: bool
    seed: int
    data: str | None  # folder of data sets, as given by --data


@dataclass(frozen=True)
class Computation:
    """A row that one function computes; ``seeded`` if its numbers depend on the seed."""

    name: str
    compute: Callable[[Context], Numbers]
    paper: Mapping[str, float] = field(default_factory=dict)
    seeded: bool = False


@dataclass(frozen=True)
class Training:
    """A row that is a private training; ``settings`` replace some of the experiment's defaults."""

    name: str
    settings: Mapping[str, Any]
    paper: Mapping[str, float] = field(default_factory=dict)
    seeded: bool = True


Row = Computation | Training


SCORE, BASELINE = "score", "baseline_score"  # test scores of the private training and of the non-private baseline
MU = "mu"
CLT, MOMENTS, EXACT = "epsilon_clt", "epsilon_moments", "epsilon"
ACCURACY_COLUMN = Column("accuracy", digits=1, percent=True)
BASELINE_COLUMN = Column("not private", digits=1, percent=True)
PRIVACY_COLUMNS = {
    MU: Column("mu (CLT)", digits=2),
    CLT: Column("eps, CLT", digits=2),
    MOMENTS: Column("eps, moments", digits=2),
    EXACT: Column("eps, certified"),
}


def training_numbers(results: Mapping[str, Any]) -> dict[str, Number]:
    """Returns the numbers of a training's ``results.json``, by the keys of the common columns."""
    stated = results["privacy"]
    low, high = (stated["epsilon"][side] for side in ("low", "high"))
    return {
        SCORE: results["test_score"],
        BASELINE: results["baseline_test_score"],
        MU: stated["clt"]["mu"],
        CLT: stated["clt"]["epsilon"],
        MOMENTS: stated["moments_accountant"]["epsilon"],
        EXACT: None if low is None or high is None else Bracket(low, high),
    }


def folder_name(row: str, seed: int | None) -> str:
    """Returns the name of a row's folder, such as ``sigma-1.3-seed-0``; ``seed`` is None for a row without seeds."""
    kept = "".join(letter if letter.isalnum() or letter in ".+" else " " for letter in row.lower())
    return "-".join(kept.split()) + ("" if seed is None else f"-seed-{seed}")


def rows_folder(run: Path) -> Path:
    """Returns the folder that holds the folders of a run's rows."""
    return run / "rows"
