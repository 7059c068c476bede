# SPDX-License-Identifier: Apache-2.0
"""Provides the rows and columns of an experiment's table: every row is a training or a computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_privacy.privacy import Bracket
from torch_privacy.runs.metrics import Metrics

Number = float | Bracket[float] | None
Numbers = Mapping[str, Number]  # a column's key -> a number, or a certified bracket around one


@dataclass(frozen=True)
class TableColumn:
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
    run: Path | None = None  # folder of the run, for a row that is computed from trainings before it


@dataclass(frozen=True)
class Computation:
    """A row that one function computes; ``seeded`` if its numbers depend on the seed.

    ``needs`` names a package without which the function returns no number: the results then say so.
    """

    name: str
    compute: Callable[[Context], Numbers]
    paper: Mapping[str, float] = field(default_factory=dict)
    seeded: bool = False
    needs: str = ""


@dataclass(frozen=True)
class TrainingRow:
    """A row that is a private training; ``settings`` replace some of the experiment's defaults."""

    name: str
    settings: Mapping[str, Any]
    paper: Mapping[str, float] = field(default_factory=dict)
    seeded: bool = True


Row = Computation | TrainingRow


SCORE, BASELINE = "score", "baseline_score"  # test scores of the private training and of the non-private baseline
GAP, BASELINE_GAP = "gap", "baseline_gap"  # how far the last epoch's training score is above them
MU = "mu"
CLT, MOMENTS, EXACT = "epsilon_clt", "epsilon_moments", "epsilon"
ACCURACY_COLUMN = TableColumn("accuracy", digits=1, percent=True)
BASELINE_COLUMN = TableColumn("not private", digits=1, percent=True)
GAP_COLUMN = TableColumn("gap", digits=1, percent=True)
BASELINE_GAP_COLUMN = TableColumn("gap, not private", digits=1, percent=True)
PRIVACY_COLUMNS = {
    MU: TableColumn("mu (CLT)", digits=2),
    CLT: TableColumn("eps, CLT", digits=2),
    MOMENTS: TableColumn("eps, moments", digits=2),
    EXACT: TableColumn("eps, certified"),
}
USUAL_COLUMNS = {SCORE: ACCURACY_COLUMN, BASELINE: BASELINE_COLUMN, **PRIVACY_COLUMNS}


def training_numbers(results: Mapping[str, Any], metrics: Sequence[Metrics]) -> dict[str, Number]:
    """Returns the numbers of a training's ``results.json`` and ``metrics.csv``, by the keys of the common columns."""
    stated = results["privacy"]
    low, high = (stated["epsilon"][side] for side in ("low", "high"))
    return {
        SCORE: results["test_score"],
        BASELINE: results["baseline_test_score"],
        MU: stated["clt"]["mu"],
        CLT: stated["clt"]["epsilon"],
        MOMENTS: stated["moments_accountant"]["epsilon"],
        EXACT: None if low is None or high is None else Bracket(low, high),
        GAP: _gap("private", metrics),
        BASELINE_GAP: _gap("non-private", metrics),
    }


def _gap(training: str, metrics: Sequence[Metrics]) -> float | None:
    """Returns the last epoch's score on the examples drawn, while training, minus the test score after it."""
    rows = [row for row in metrics if row.training == training]
    if not rows or rows[-1].train_score is None or rows[-1].test_score is None:
        return None
    return rows[-1].train_score - rows[-1].test_score


def folder_name(row: str, seed: int | None) -> str:
    """Returns the name of a row's folder, such as ``sigma-1.3-seed-0``; ``seed`` is None for a row without seeds."""
    kept = "".join(letter if letter.isalnum() or letter in ".+" else " " for letter in row.lower())
    return "-".join(kept.split()) + ("" if seed is None else f"-seed-{seed}")


def rows_folder(run: Path) -> Path:
    """Returns the folder that holds the folders of a run's rows."""
    return run / "rows"
