# SPDX-License-Identifier: Apache-2.0
"""The papers' numbers about accounting, to the digits that they give."""

import numpy as np
import pytest

from torch_privacy import privacy
from torch_privacy.privacy import tradeoff
from torch_privacy.privacy.summary import compose_steps
from torch_privacy.runs.rows import CLT, EXACT, MOMENTS, MU, Context
from torch_privacy_papers.bu2020 import figures as gdp_figures
from torch_privacy_papers.bu2020.table1 import PROBABILITY, TABLE

CONTEXT = Context(quick=True, seed=0, data=None)


@pytest.mark.parametrize("line", TABLE, ids=lambda line: line.name)
def test_table_1_has_the_papers_mu_and_epsilons(line):
    numbers = gdp_figures.errors_of(line, CONTEXT)
    assert numbers[MU] == pytest.approx(line.mu, abs=0.005)
    assert numbers[CLT] == pytest.approx(line.clt, abs=0.006)
    assert numbers[MOMENTS] == pytest.approx(line.moments, rel=3e-3)
    low, high = numbers[EXACT]
    assert low <= high < numbers[MOMENTS]


def test_errors_add_up_to_the_paper_s_and_to_the_smallest_sum():
    line = TABLE[1]
    numbers = gdp_figures.errors_of(line, CONTEXT)
    assert numbers[gdp_figures.SUM_CLT] == pytest.approx(0.776, abs=0.003)  # theirs is of the rounded mu
    assert numbers[gdp_figures.SUM_MOMENTS] == pytest.approx(0.094, abs=0.001)
    curve = compose_steps(line.noise_multiplier, PROBABILITY, line.num_steps).tradeoffs["symmetrized"]
    low, high = numbers[gdp_figures.SUM_EXACT]
    sums = [float(curve.low(alpha / 1000)) + alpha / 1000 for alpha in range(1001)]
    assert low == pytest.approx(min(sums), abs=2e-3)
    assert low <= high


@pytest.mark.thorough
def test_one_epoch_is_near_its_limit():
    numbers = gdp_figures.distance_from_limit(CONTEXT)
    assert numbers[MU] == pytest.approx(0.57, abs=0.005)
    assert 0 < numbers[gdp_figures.GAP].low <= numbers[gdp_figures.GAP].high < 0.02


def test_delta_over_epochs_rises_and_the_moments_are_above_what_is_certified():
    epochs = np.array([20.0, 45.0])
    curves = gdp_figures._deltas(epochs)
    low, high = curves["certified"][1]
    assert np.all(low <= high)
    assert high[0] < low[1]
    assert np.all(curves["moments accountant"][1] > high)
    assert np.all(curves["CLT: an approximation, no bound"][1] < low)


def test_the_older_bound_on_sampling_is_a_pair_of_the_curve_that_f_dp_gives():
    epsilon, delta, probability = gdp_figures.UNSAMPLED
    sampled = tradeoff.symmetrized(tradeoff.subsampled(tradeoff.EpsilonDelta(epsilon, delta), probability))
    older = float(privacy.sampled_epsilon(epsilon, probability))
    assert float(sampled.delta(older)) == pytest.approx(probability * delta)
    alpha = np.linspace(0, 1, 101)
    above = np.asarray(sampled(alpha)) - np.asarray(tradeoff.EpsilonDelta(older, probability * delta)(alpha))
    assert above.min() > -1e-9
    assert above.max() > 0.4
