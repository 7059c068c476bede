# SPDX-License-Identifier: Apache-2.0
"""Loops that do more than train, under several ranks: evaluation, other forwards, schedulers, refusals, resuming."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranked import VIEWS, calls, case, difference, go, mlp, of_pair, start, whole_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from trainings import RULES, data

import torch_privacy as tp
from torch_privacy.training import loop_contents

pytestmark = VIEWS
HOWS = pytest.mark.parametrize("how", ["layers", "ddp"])
QUIET = {"noise_multiplier": 1e-6}
Found = tuple[dict[str, torch.Tensor], Any]


def assert_as_in_one_process(pool: Any, function: Any, how: str, *arguments: Any) -> Any:
    """Compares the weights; returns what else the function returned, in one process and on the ranks."""
    weights, expected = function(None, None, *arguments)
    found = pool.run(function, how, *arguments)
    assert max(difference(others, weights) for others, _ in found) < 1e-12
    return expected, [rest for _, rest in found]


def evaluating(rank: int | None, how: str | None) -> Found:
    training = start(case(), how, "sgd", **QUIET)
    x, outputs = data().tensors[0], []
    for batch in training:
        if training.step(of_pair(training.model, batch)):
            with torch.no_grad():
                outputs.append(training.model(x))
        if training.step_count == 2:
            break
    training.model.eval()
    with torch.no_grad():
        outputs.append(training.model(x))
    training.model.train()
    go(training, of_pair)
    return whole_weights(training.model), torch.stack(outputs)


@pytest.mark.thorough
@HOWS
def test_a_model_is_evaluated_between_steps_and_between_loops(ranks2, how):
    expected, found = assert_as_in_one_process(ranks2, evaluating, how)
    for outputs in found:
        torch.testing.assert_close(outputs, expected)


def with_targets(rank: int | None, how: str | None) -> Found:
    """Runs the model without gradient and twice with it, for one batch."""
    training = start(case(), how, "sgd", **QUIET)
    for x, y in training:
        with torch.no_grad():
            target = training.model(x + 1)
        drift = (training.model(x) - target).square().sum(1)
        training.step(of_pair(training.model, (x, y)) + drift)
    return whole_weights(training.model), None


def weights_outside(rank: int | None, how: str | None) -> Found:
    """Uses a weight outside of the model's forward."""
    training = start(case(partial(mlp, 3, 5, 2)), how, "sgd", **QUIET)
    inner = getattr(training.model, "module", training.model)
    for x, y in training:
        logits = training.model(x)
        with training.record():
            again = F.linear(torch.tanh(logits), inner[2].weight.T)
        training.step(F.cross_entropy(logits, y, reduction="none") + again.square().sum(1))
    return whole_weights(training.model), None


def own_scheduler(rank: int | None, how: str | None) -> Found:
    training = start(case(), how, "sgd", **QUIET)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
    for batch in training:
        if training.step(of_pair(training.model, batch)):
            scheduler.step()
    return whole_weights(training.model), None


@pytest.mark.thorough
@HOWS
@pytest.mark.parametrize("loop", [with_targets, weights_outside, own_scheduler])
def test_loops_do_on_ranks_what_they_do_in_one_process(ranks2, how, loop):
    assert_as_in_one_process(ranks2, loop, how)


def own_average(rank: int | None, how: str | None, most: int) -> Found:
    """Keeps averages of the weights, shards of them on ranks: new tensors in every step, and others in place."""
    training = start(case(), how, "sgd", **QUIET)
    kept, anew = [p.detach().clone() for p in training.model.parameters()], list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_contents, "MOST_NUMBERS", most)
        for batch in training:
            if training.step(of_pair(training.model, batch)):
                weights = [p.detach().clone() for p in training.model.parameters()]
                anew = [old.lerp(w, 0.1) for old, w in zip(anew or weights, weights, strict=True)]
                for average, w in zip(kept, weights, strict=True):
                    average.lerp_(w, 0.1)
    return whole_weights(training.model), None


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("most", [loop_contents.MOST_NUMBERS, 4])
def test_loops_keep_averages_of_shards(ranks2, most):
    """Rehearsals exchange small ones, and compare some numbers of large ones."""
    assert_as_in_one_process(ranks2, own_average, "layers", most)


def trying_again(rank: int | None, how: str | None) -> Found:
    training = start(case(), how, "sgd", **QUIET)
    refused = 0
    while training.step_count < len(training):
        try:
            for batch in training:
                losses = of_pair(training.model, batch)
                bad = training.step_count == 2 and not refused and rank in (None, 1)
                training.step(losses.mean() if bad else losses)
        except tp.Refused:
            refused += 1
    return whole_weights(training.model), (refused, training.step_count, len(training.ledger))


@pytest.mark.thorough(but=1)
@HOWS
def test_a_step_that_was_refused_on_one_rank_is_made_again_by_all(ranks2, how):
    expected, found = assert_as_in_one_process(ranks2, trying_again, how)
    assert [expected, *found] == [(1, 5, 5)] * 3


def resumed(rank: int | None, how: str | None, rule: str) -> Found:
    clipping = RULES[rule][0]
    first, second = (start(case(partial(mlp, 3, 4, 2)), how, clipping=clipping) for _ in range(2))
    go(first, of_pair, steps=2)
    set_model_state_dict(second.model, copy.deepcopy(get_model_state_dict(first.model)))
    states = copy.deepcopy(get_optimizer_state_dict(first.model, first.optimizer))
    set_optimizer_state_dict(second.model, second.optimizer, states)
    second.load_state_dict(first.state_dict())
    go(second, of_pair)
    return whole_weights(second.model), (repr(second.clipping), second.num_lost, second.ledger.state_dict())


def uninterrupted(rank: int | None, how: str | None, rule: str) -> Found:
    training = start(case(partial(mlp, 3, 4, 2)), how, clipping=RULES[rule][0])
    go(training, of_pair)
    return whole_weights(training.model), (repr(training.clipping), 0, training.ledger.state_dict())


@pytest.mark.thorough
@HOWS
@pytest.mark.parametrize("rule", ["flat", "adaptive", "micro-batches"])
def test_ranks_resume_a_run_of_any_rule_bit_for_bit(ranks2, how, rule):
    found, expected = ranks2.run(resumed, how, rule), ranks2.run(uninterrupted, how, rule)
    for (weights, rest), (wanted, others) in zip(found, expected, strict=True):
        assert rest == others
        assert all(torch.equal(weights[name], weight) for name, weight in wanted.items())


def masks(rank: int, how: str) -> list[list[float]]:
    """Returns the dropout masks of each example of a step, and those of a rehearsal."""
    seen: list[list[float]] = []

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        dropped = m.drop(torch.ones(len(x), 30))
        seen.extend(dropped.tolist())
        return m.out(dropped * m.first(x))

    parts = {"first": lambda: nn.Linear(3, 30), "drop": nn.Dropout, "out": lambda: nn.Linear(30, 2)}
    training = start(case(calls(forward, **parts)), how, num_steps=4)
    kept = []
    for batch in training:
        seen.clear()
        training.step(of_pair(training.model, batch))
        if not training.rehearsing:
            kept.extend(seen)
    return kept


@pytest.mark.thorough
@HOWS
def test_no_two_examples_share_random_numbers(ranks2, how):
    """With one seed for all ranks, the first examples of their parts would have one dropout mask."""
    found = [tuple(mask) for part in ranks2.run(masks, how) for mask in part]
    assert len(found) > 20
    assert len(set(found)) == len(found)
