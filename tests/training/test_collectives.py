# SPDX-License-Identifier: Apache-2.0
"""A private step sends no more than an ordinary one, and ranks send the same collectives whatever their data."""

from __future__ import annotations

import itertools
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from collectives import NETWORKS, Collective, Counted, counted, is_message, num_bytes, numbers_of_calls, private_steps
from collectives import shown as listed
from gloo_pool import Pool
from ranked import CASES, case
from real_models import QUIET
from torch.utils.data import TensorDataset
from trainings import data

import torch_privacy as tp
from torch_privacy.training.rehearsals import Rehearsals

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")]
SETTLED, FIRST = 1.02, 1.05  # of the bytes of an ordinary step, at most


@cache
def on_ranks(pool: Pool, name: str, how: str) -> list[Counted]:
    return pool.run(counted, name, how)


def of_model(step: list[Collective]) -> list[Collective]:
    return [one for one in step if not is_message(one)]


# Bytes


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "root", "ddp"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_sends_no_more_bytes_than_an_ordinary_one(ranks2, name, how):
    for found in on_ranks(ranks2, name, how):
        assert min(found.turns[:3]) > 1 == found.turns[3]
        assert found.ratio(found.settled()) <= SETTLED, listed(found.settled())
        for step in found.private:
            assert found.ratio(step) <= (FIRST if num_bytes(found.ordinary) > 20_000 else 1.07), listed(step)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_gathered_once_in_a_step(ranks2, name):
    """An ordinary step gathers them for the forward and again for the backward."""
    for found in on_ranks(ranks2, name, "layers"):
        ordinary = numbers_of_calls(found.ordinary)
        for step in found.private:
            private = numbers_of_calls(of_model(step))
            assert private["reduce-scatter"] == ordinary["reduce-scatter"]
            assert ordinary["reduce-scatter"] == private["all-gather"] < ordinary["all-gather"]


@pytest.mark.thorough
def test_ordinary_steps_send_what_they_are_known_to(ranks2):
    """Of this network, these numbers are known: Opacus sends 1.67 times as much."""
    ordinary = on_ranks(ranks2, "MLP, 1,699 parameters", "layers")[0].ordinary
    assert numbers_of_calls(ordinary) == {"all-gather": 6, "reduce-scatter": 3}
    assert num_bytes(ordinary) == 13_856 + 6_928


def test_a_settled_step_has_five_messages(ranks2):
    found = on_ranks(ranks2, "MLP, uneven", "layers")[0]
    messages = [one.bytes for one in found.settled() if is_message(one)]
    assert messages == [2 * 32, 2 * 32, 2 * 32, 1, 2 * 32]  # begin, the turn's end, the digests, the record, the update


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_replicated_shards_sends_no_more_bytes_than_an_ordinary_one(ranks4, name):
    for found in ranks4.run(counted, name, "hsdp", 12):
        assert numbers_of_calls(found.ordinary)["all-reduce"] > 0
        assert found.ratio(found.settled()) <= SETTLED, listed(found.settled())
        for step in found.private:
            assert found.ratio(step) <= FIRST, listed(step)


# Whatever the data


def mostly_nan() -> TensorDataset:
    """Data of which many parts have examples without a finite gradient, and some have only such."""
    x, y = data().tensors
    x = x.clone()
    x[torch.arange(len(x)) % 2 == 0, 1] = torch.nan
    return TensorDataset(x, y)


DATA: dict[str, Any] = {
    "parts of other sizes": case(expected_batch_size=3, num_steps=10),
    "empty parts": case(expected_batch_size=1, num_steps=12),
    "microbatches": case(expected_batch_size=7, performance=tp.Performance(microbatch_size=2), num_steps=8),
    "examples without finite gradients": case(data=mostly_nan, expected_batch_size=3, num_steps=8),
    "experts that a rank does not call": CASES["experts"],
    "ops by fallback": CASES["fallback"],
    "a frozen layer": CASES["frozen layer"],
}


def collectives_of(rank: int, name: str, how: str) -> tuple[list[list[Collective]], list[int]]:
    warnings.filterwarnings("ignore", "PrivateTraining: half of the examples")  # have no finite gradient
    return private_steps(DATA[name], how)


def assert_equal_on_all_ranks(found: list[tuple[list[list[Collective]], list[int]]]) -> None:
    """Asserts that all ranks made equal collectives, and that each step made the same ones, but for messages."""
    steps, turns = found[0]
    for others, _ in found[1:]:
        for k, (step, other) in enumerate(zip(steps, others, strict=True)):
            assert step == other, f"step {k}: {listed(step)}\nand {listed(other)}"
    reduced = [[one for one in of_model(step) if one.kind == "reduce-scatter"] for step in steps]
    longest = max(reduced, key=len)
    assert longest
    for ones in reduced:  # all buckets in order, again for each microbatch
        assert ones == longest[: len(ones)]
    assert turns == found[1][1]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
@pytest.mark.parametrize("name", DATA)
def test_ranks_make_the_same_collectives_whatever_their_data(ranks2, name, how):
    assert_equal_on_all_ranks(ranks2.run(collectives_of, name, how))


def with_other_rehearsals(rank: int, how: str) -> tuple[tuple[list[list[Collective]], list[int]], int]:
    """Rehearses a settled step on rank 1 alone; returns also how many turns were those of a rank that waits."""
    are_due, rehearsed = Rehearsals.are_due, []

    def are_due_here(self: Rehearsals, step: int, number: int, count: int) -> tuple[bool, bool]:
        if step == 5:
            rehearsed.append(rank == 1)
            return rank == 1, False
        return are_due(self, step, number, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rehearsals, "are_due", are_due_here)
        return private_steps(case(expected_batch_size=8, num_steps=8), how), sum(rehearsed)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_a_rank_that_rehearses_alone_makes_the_collectives_of_all(ranks2, how):
    found = ranks2.run(with_other_rehearsals, how)
    assert found[0][1] == 0 < found[1][1]
    assert_equal_on_all_ranks([steps for steps, _ in found])
    assert found[0][0][1][5] > 1  # the other one waits


def with_new_code(rank: int, how: str, turns_before: int) -> tuple[list[list[Collective]], list[int]]:
    """Runs other code on rank 1 after so many turns."""
    turns = itertools.count()  # rehearsals would put a list back

    def losses(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        out = model(x)
        if next(turns) >= turns_before and rank == 1:
            out = out.exp().log()
        return torch.nn.functional.cross_entropy(out, y, reduction="none")

    return private_steps(case(expected_batch_size=8, num_steps=8), how, losses)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_a_rank_with_new_code_makes_the_collectives_of_all(ranks2, how):
    (_, turns), _ = ranks2.run(with_new_code, how, 1000)
    assert turns[5] == 1
    found = ranks2.run(with_new_code, how, sum(turns[:5]))
    assert_equal_on_all_ranks(found)
    assert found[0][1][5] > 1
