# SPDX-License-Identifier: Apache-2.0
"""Freezes layers while a model is trained on ranks: the same training as in one process, or refused on all ranks."""

from __future__ import annotations

import pytest
from ranked import case, difference, start, whole_weights
from torch import Tensor
from trainings import cross_entropy

FREEZES, THAWS, STEPS = 3, 5, 7  # steps that are not rehearsed
WHEN = ["before the forward", "after the step before", "between two loops", "never"]


def frozen_later(rank: int | None, how: str | None, when: str, alone: bool = False) -> dict[str, Tensor]:
    """Freezes the first layer for two steps, on all ranks or on rank 1 alone; returns the weights."""
    training = start(case(num_steps=STEPS), how, "sgd", noise_multiplier=1e-6)
    inner = training.model.module if how == "ddp" else training.model

    def freeze() -> None:
        if training.step_count in (FREEZES, THAWS) and (rank == 1 or not alone):
            inner[0].requires_grad_(training.step_count == THAWS)

    while training.step_count < STEPS:
        for x, y in training:
            if when == "before the forward":
                freeze()
            released = training.step(cross_entropy(training.model, x, y))
            if released and when == "after the step before":
                freeze()
            if released and when == "between two loops":
                break
        if when == "between two loops":
            freeze()
    return whole_weights(training.model)


@pytest.mark.thorough
@pytest.mark.parametrize("when", WHEN[:-1])
@pytest.mark.parametrize("how", ["layers", "root", "ddp"])
def test_a_layer_is_frozen_for_some_steps_as_in_one_process(ranks2, how, when):
    expected = frozen_later(None, None, when)
    assert difference(frozen_later(None, None, "never"), expected) > 1e-3
    for found in ranks2.run(frozen_later, how, when):
        assert difference(found, expected) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("when", WHEN[:-1])
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_a_layer_that_one_rank_alone_freezes_is_refused(ranks2, how, when):
    text = ranks2.refusal(frozen_later, how, when, True)
    assert "only some ranks train '0.bias' (2 such parameters)" in text
    assert "on all ranks" in text
