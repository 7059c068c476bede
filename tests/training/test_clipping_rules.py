# SPDX-License-Identifier: Apache-2.0
"""Tests each clipping rule in training against the explicit computation from the rows."""

import copy
import json
import math

import pytest
import torch
from cases import Calls
from oracle import one_backward_per_example
from parts import own_batches
from scipy import stats
from torch import nn
from torch.utils.data import Subset, TensorDataset
from trainings import (
    RULES,
    ZERO_OUT,
    N,
    by_each_rule,
    clipped,
    clipped_in_parts,
    cross_entropy,
    cross_entropy_of_pair,
    data,
    groups_of,
    network,
    network_parameters,
    noise_of,
    parameters_of,
    rows_of,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy.mechanisms.base import PRICED_ROUNDING
from torch_privacy.sampling.samplers import PoissonSampler, Sampler

BY_EXAMPLE = [name for name in RULES if name != "micro-batches"]


def noise_stddev(rule):
    """Returns the sum's at noise multiplier 1; an adaptive rule splits the noise with a count of sensitivity 1/2."""
    multiplier = PRICED_ROUNDING
    return RULES[rule][2] * ((multiplier**-2 - (0.5 / 4.0) ** 2) ** -0.5 if rule == "adaptive" else multiplier)


def next_clip_norm(clip_norm, norms, noise, expected_batch_size):
    """Returns the adaptive rule's next clip norm; the count's noise has a standard deviation of 4."""
    fraction = ((norms <= clip_norm).double() - 0.5).sum() + 4.0 * noise
    fraction = fraction / expected_batch_size + 0.5
    return min(max(clip_norm * math.exp(-0.2 * (fraction - 0.5)), 1e-6), 1e6)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(
    ("rule", "microbatch_size"), [*((rule, None) for rule in RULES), *((rule, 3) for rule in BY_EXAMPLE)]
)
def test_step_of_any_rule_releases_the_explicit_sum_plus_noise(rule, microbatch_size):
    clipping, explicit, _ = RULES[rule]
    training = training_of(clipping=clipping, performance=tp.Performance(microbatch_size=microbatch_size))
    rows, clip_norm, stddev = [], 0.5, noise_stddev(rule)
    for x, y in own_batches(training, cross_entropy):
        step, before = training.step_count, parameters_of(training).clone()
        rows.append(rows_of(training, x, y))
        stepped = training.step(cross_entropy(training.model, x, y))
        if training.rehearsing:  # it ran new code, and comes again
            rows.pop()
        if not stepped:
            continue
        noise, everyone = noise_of(training, step), torch.cat(rows)
        groups = groups_of(training, step, len(everyone), 2)
        rows = []
        if rule == "adaptive":
            explicit = clipped_in_parts([26], [clip_norm])
            stddev = noise_stddev(rule) * clip_norm / 0.5
            clip_norm = next_clip_norm(clip_norm, everyone.norm(dim=1), noise[-1], 8)
            assert training.clipping.clip_norm == pytest.approx(clip_norm, rel=1e-6)
        divisor = 2 if rule == "micro-batches" else 8
        expected = before - (explicit(everyone, groups) + stddev * noise[:26]) / divisor
        torch.testing.assert_close(parameters_of(training), expected, rtol=1e-6, atol=1e-6)
    assert training.step_count == 6
    assert rule != "adaptive" or abs(clip_norm - 0.5) > 0.01


@by_each_rule
def test_empty_step_of_any_rule_is_noise_times_the_sensitivity(rule, monkeypatch):
    """The clip norm of an adaptive rule changes by the noise of its count alone."""
    monkeypatch.setattr(PoissonSampler, "indices", lambda self, step: torch.zeros(0, dtype=torch.int64).numpy())
    training = training_of(clipping=RULES[rule][0], expected_batch_size=0.5, num_steps=3)
    assert train(training) == []
    expected, stddev, clip_norm = network_parameters(), noise_stddev(rule), 0.5
    for step in range(3):
        noise = noise_of(training, step)
        expected -= stddev * noise[:26] / (1 if rule == "micro-batches" else 0.5)
        if rule == "adaptive":
            clip_norm = next_clip_norm(clip_norm, torch.zeros(0), noise[-1], 0.5)
            stddev = noise_stddev(rule) * clip_norm / 0.5
    torch.testing.assert_close(parameters_of(training), expected, rtol=1e-6, atol=1e-6 * expected.abs().max())
    assert rule != "adaptive" or training.clipping.clip_norm == pytest.approx(clip_norm, rel=1e-6) != 0.5


@pytest.mark.thorough(but=2)
@by_each_rule
def test_steps_of_any_rule_are_priced_as_the_noise_multiplier_given(rule):
    training = training_of(clipping=RULES[rule][0], delta=1e-3)
    train(training)
    assert training.event == tp.privacy.SubsampledGaussian(1.0, 0.2, ZERO_OUT)
    assert training.spent().epsilon == tp.privacy.compose([(training.event, 6)]).epsilon(1e-3)


@pytest.mark.parametrize("left_out", [0, 7, 39])
@by_each_rule
def test_one_example_moves_the_sum_of_any_rule_by_at_most_the_sensitivity(rule, left_out, monkeypatch):
    """All examples join; the others keep their micro-batches, and the noise, the same in both, is subtracted."""
    clipping, _, sensitivity = RULES[rule]
    everyone, sums = data(), []
    numbers = torch.arange(N).numpy() % 10
    groups = {N: numbers, N - 1: numbers[torch.arange(N).numpy() != left_out]}
    monkeypatch.setattr(Sampler, "groups", lambda self, step, size, count: groups.get(size, numbers[:size]))
    for dataset in (everyone, Subset(everyone, [i for i in range(N) if i != left_out])):
        training = training_of(dataset=dataset, expected_batch_size=len(dataset), num_steps=1, clipping=clipping)
        train(training)
        divisor = 10 if rule == "micro-batches" else len(dataset)
        moved = (network_parameters() - parameters_of(training)) * divisor
        sums.append(moved - noise_stddev(rule) * noise_of(training, 0)[:26])
    moved = (sums[0] - sums[1]).norm()
    assert 0.1 * sensitivity < moved <= sensitivity * (1 + 1e-5)


def test_example_that_outweighs_its_micro_batch_counts_twice():
    """The sensitivity of twice the clip norm is reached: noise in proportion to the clip norm would not suffice."""
    everyone, sums = TensorDataset(torch.tensor([[1.0], [2.0], [-1e9]])), []
    for dataset in (everyone, Subset(everyone, [0, 1])):
        model = nn.Linear(1, 1, bias=False)
        start = model.weight.item()
        training = training_of(
            model, dataset, expected_batch_size=len(dataset), num_steps=1, clipping=tp.MicroBatches(0.7, 3)
        )
        for (x,) in training:
            training.step(model(x).squeeze(1))
        sums.append(start - model.weight.item() - 1.4 * PRICED_ROUNDING * noise_of(training, 0).item())
    assert abs(sums[0] - sums[1]) == pytest.approx(1.4, rel=1e-5)


def test_micro_batches_are_drawn_anew_for_every_step_by_the_key_alone():
    here, there = training_of(), training_of()
    torch.manual_seed(7)
    draws = [groups_of(here, step, 1000, 5) for step in range(3)]
    assert all((draw == groups_of(there, step, 1000, 5)).all() for step, draw in enumerate(draws))
    assert all(stats.chisquare(draw.bincount(minlength=5)).pvalue > 1e-4 for draw in draws)
    assert all((draws[i] != draws[j]).double().mean() > 0.7 for i in range(3) for j in range(i))  # 0.8 if independent


class Poisoned(TensorDataset):
    """Has one example that is not finite."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (x * math.inf if i == 7 else x), y


@pytest.mark.thorough(but=3)
@by_each_rule
def test_example_that_is_not_finite_is_left_out_and_counted(rule):
    clipping, explicit, _ = RULES[rule]
    training = training_of(dataset=Poisoned(*data().tensors), expected_batch_size=N, num_steps=1, clipping=clipping)
    for x, y in own_batches(training, cross_entropy):
        rows = rows_of(training, x, y)
        assert rows[7].isnan().any()
        groups = groups_of(training, 0, N, 10)
        kept = groups != groups[7] if rule == "micro-batches" else torch.arange(N) != 7
        training.step(cross_entropy(training.model, x, y))
    assert training.num_non_finite == (~kept).sum()  # examples, not micro-batches
    sum_and_noise = explicit(rows[kept], groups[kept]) + noise_stddev(rule) * noise_of(training, 0)[:26]
    expected = network_parameters() - sum_and_noise / (10 if rule == "micro-batches" else N)
    torch.testing.assert_close(parameters_of(training), expected, rtol=1e-6, atol=1e-6)
    if rule == "adaptive":  # it counts as outside of the clip norm
        clip_norm = next_clip_norm(0.5, rows.norm(dim=1), noise_of(training, 0)[-1], N)
        assert training.clipping.clip_norm == pytest.approx(clip_norm, rel=1e-6)


def test_part_of_a_gradient_that_is_not_finite_is_left_out_of_its_group():
    """Only the part in the second layer is left out: the part in the first layer has a bound of its own."""
    model = Calls(lambda m, x: m.f(x[:, :3]) + m.g(x[:, 3:]), f=nn.Linear(3, 2), g=nn.Linear(1, 2))
    x = torch.cat([data().tensors[0], torch.ones(N, 1)], 1)
    x[7, 3] = 1e200  # whose square is infinite
    training = training_of(
        model, TensorDataset(x, torch.zeros(N)), expected_batch_size=N, num_steps=1, clipping=tp.EachLayer(0.3)
    )
    start = parameters_of(training).clone()
    for x, _ in own_batches(training, lambda model, x, _: model(x).sum(1)):
        rows = one_backward_per_example(copy.deepcopy(model), x, lambda model, x: model(x).sum(1))
        training.step(model(x).sum(1))
    assert training.num_non_finite == 1
    second = rows[torch.arange(N) != 7][:, 8:]
    total = torch.cat([clipped(rows[:, :8], 0.3), clipped(second, 0.3)]) + 0.18**0.5 * PRICED_ROUNDING * noise_of(
        training, 0
    )
    torch.testing.assert_close(parameters_of(training), start - total / N, rtol=1e-6, atol=1e-6)


STATEMENTS = {  # entries of the privacy statement; by default those of the rule's own statement
    "flat": {"rule": "Flat", "clip_norm": 0.5},
    "per layer": {"rule": "PerLayer", "clip_norm": 0.5, "clip_norms": {"0": 0.5 / 2**0.5, "2": 0.5 / 2**0.5}},
    "each layer": {"rule": "EachLayer", "clip_norm": 0.3, "clip_norms": {"0": 0.3, "2": 0.3}},
    "groups": {"rule": "Groups", "clip_norms": {"": 0.3, "2": 0.2, "2.weight": 0.6}},
    "automatic": {"rule": "Automatic", "clip_norm": 0.5, "gamma": 0.1},
    "adaptive": {"rule": "Adaptive", "target_quantile": 0.5, "learning_rate": 0.2, "count_noise_stddev": 4.0},
    "micro-batches": {"rule": "MicroBatches", "clip_norm": 0.5, "size": 4},
}


def test_every_rule_is_trained_with():
    rules = {rule for rule in tp.ClippingRule.__subclasses__() if rule.__module__.startswith("torch_privacy.")}
    assert {type(rule) for rule, _, _ in RULES.values()} == rules


@pytest.mark.thorough(but=2)
@by_each_rule
def test_statement_says_the_rule_its_settings_and_its_sensitivity(rule):
    training = training_of(clipping=RULES[rule][0])
    train(training)
    statement = json.loads(json.dumps(training.statement(), allow_nan=False))
    assert statement["clipping"].items() >= STATEMENTS.get(rule, RULES[rule][0].statement()).items()
    scale = training.clipping.clip_norm / 0.5 if rule == "adaptive" else 1.0
    assert statement["sensitivity"] == pytest.approx(RULES[rule][2] * scale)


def test_adaptive_clip_norm_finds_the_median_of_the_norms():
    """Has little noise, and a learning rate of zero so that the norms do not change."""
    model = network()
    rows = one_backward_per_example(
        model, data()[:][0], cross_entropy_of_pair, [(x[None], y[None]) for x, y in data()]
    ).norm(dim=1)
    training = training_of(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        expected_batch_size=N,
        num_steps=60,
        clipping=tp.Adaptive(0.01, learning_rate=0.3, count_noise_stddev=0.1),
        noise_multiplier=0.1,
    )
    train(training)
    low, high = rows.quantile(torch.tensor([0.4, 0.6]))
    assert low < training.clipping.clip_norm < high
