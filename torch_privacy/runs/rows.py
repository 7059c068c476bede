# SPDX-License-Identifier: Apache-2.0
"""The rows of an experiment's table: each a training or a computation, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch_privacy.privacy import Bracket

Number = float | Bracket[float] | None
Numbers = Mapping[str, Number]  # a column's key -> a number, or a certified bracket around one


@dataclass(frozen=True)
class Column:
    """One quantity of the table: its heading, and how it is written."""

    heading: str
    digits: int = 3
    percent: bool = False  # a share, shown in percent
    scientific: bool = False  # three digits and a power of ten


@dataclass(frozen=True)
class Context:
    """What a computation may depend on."""

    quick: bool
    seed: int
    data: str | None  # folder of data, as --data says


@dataclass(frozen=True)
class Computation:
    """A row that is computed at once. ``seeded`` if its numbers depend on the seed; else it is made for one only."""

    name: str
    compute: Callable[[Context], Numbers]
    paper: Mapping[str, float] = field(default_factory=dict)
    seeded: bool = False


@dataclass(frozen=True)
class Training:
    """A row that is a private training: the experiment's ``Settings``, some of them replaced; `numbers` are its own."""

    name: str
    settings: Mapping[str, Any]
    paper: Mapping[str, float] = field(default_factory=dict)
    seeded: bool = True


Row = Computation | Training


class Reproducible(Protocol):
    """A module of ``torch_privacy.experiments`` that ``reproduce`` runs."""

    @property
    def COLUMNS(self) -> Mapping[str, Column]: ...  # in the order of the table
    @property
    def rows(self) -> Callable[[bool], Sequence[Row]]: ...  # of ``quick``


SCORE, BASELINE = "score", "baseline_score"  # a training's test score, and that of the network without privacy
MU = "mu"
CLT, MOMENTS, EXACT = "epsilon_clt", "epsilon_moments", "epsilon"
ACCURACY_COLUMN = Column("accuracy", digits=1, percent=True)
PRIVACY_COLUMNS = {
    MU: Column("mu (CLT)", digits=2),
    CLT: Column("eps, CLT", digits=2),
    MOMENTS: Column("eps, moments", digits=2),
    EXACT: Column("eps, certified"),
}


def training_numbers(results: Mapping[str, Any]) -> dict[str, Number]:
    """What a training's ``results.json`` says, by the keys of the usual columns."""
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


def with_one_noise(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Chosen settings, where a target takes the place of the experiment's own noise, or the other way round."""
    if "target_epsilon" in chosen:
        return {"noise_multiplier": None, **chosen}
    return {"target_epsilon": None, **chosen} if "noise_multiplier" in chosen else dict(chosen)


def folder_name(row: str, seed: int | None) -> str:
    """The folder of a row of this name within the run folder, such as ``sigma-1.3-seed-0``; None: it has no seed."""
    kept = "".join(letter if letter.isalnum() or letter in ".+" else " " for letter in row.lower())
    return "-".join(kept.split()) + ("" if seed is None else f"-seed-{seed}")


def rows_folder(run: Path) -> Path:
    """Where a run of an experiment keeps the folders of its rows."""
    return run / "rows"
