# SPDX-License-Identifier: Apache-2.0
"""Two ranks draw once from the budget of their data: together refused, killed and resumed, stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import CASES, go, start

import torch_privacy as tp
from torch_privacy.runs.report import render as report

STEPS, DELTA = 5, 1e-3


def begun(rank: int, folder: Path, noise: float = 4.0) -> tp.PrivateTraining:
    report.render = lambda folders: "a page"
    budget = tp.Budget.open(folder / "people.budget", epsilon=3, delta=DELTA)
    settings = {"noise_multiplier": noise, "delta": DELTA, "num_steps": STEPS, "examples": {"budget": budget}}
    return start(CASES["uneven"], "ddp", run_folder=folder / "run", **settings)


def refused(rank: int, folder: Path) -> None:
    begun(rank, folder, noise=0.3)


def whole(rank: int, folder: Path) -> tuple[str, Any]:
    training = begun(rank, folder)
    go(training, CASES["uneven"].losses)
    return str(training.spent()), training.statement()["data_budget"]


def killed(rank: int, folder: Path) -> None:
    training = begun(rank, folder)
    go(training, CASES["uneven"].losses, steps=2)
    parts = training, training.model, training.optimizer
    torch.save([part.state_dict() for part in parts], folder / f"{rank}.pt")
    go(training, CASES["uneven"].losses, steps=3)
    os._exit(9)


def resumed(rank: int, folder: Path) -> int:
    training = begun(rank, folder)
    state, model, optimizer = torch.load(folder / f"{rank}.pt")
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    training.load_state_dict(state)
    go(training, CASES["uneven"].losses)
    return training.step_count


def stopped(rank: int, folder: Path) -> None:
    """Rank 0 alone declares the stop, and the loop goes on."""
    training = begun(rank, folder)
    for batch in training:
        made = training.step(CASES["uneven"].losses(training.model, batch))
        if made and training.step_count == 2 and rank == 0:
            training.declare_stop("the machine is needed")


def test_ranks_draw_once_and_are_refused_together(ranks2, tmp_path):
    assert "does not fit into" in ranks2.refusal(refused, tmp_path)
    budget = tp.Budget.open(tmp_path / "people.budget")
    assert not budget.state.runs
    assert not budget.state.data
    first, second = ranks2.run(whole, tmp_path)
    assert first == second
    (drawn,) = budget.state.runs
    assert drawn.status == "settled"
    assert sum(count for _, count in drawn.releases) == STEPS
    assert first[1]["epsilon_drawn"] == budget.spent().high


@pytest.mark.thorough
def test_killed_ranks_do_not_draw_twice(ranks2, tmp_path):
    assert [outcome.exit_code for outcome in ranks2.outcomes(killed, tmp_path)] == [9, 9]
    budget = tp.Budget.open(tmp_path / "people.budget")
    (drawn,) = budget.state.runs
    assert drawn.status == "begun"
    assert ranks2.run(resumed, tmp_path) == [STEPS, STEPS]
    (drawn,) = budget.state.runs
    assert (drawn.status, drawn.reserved) == ("settled", drawn.settled)


@pytest.mark.thorough
def test_stop_that_one_rank_declares_ends_the_loop_of_both(ranks2, tmp_path):
    assert "the stop was declared" in ranks2.refusal(stopped, tmp_path)
    (drawn,) = tp.Budget.open(tmp_path / "people.budget").state.runs
    assert [count for _, count in drawn.settled] == [2]
