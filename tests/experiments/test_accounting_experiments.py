# SPDX-License-Identifier: Apache-2.0
"""The papers' numbers about accounting, to the digits that they give."""

import pytest

from torch_privacy import privacy
from torch_privacy.experiments.papers.abadi2016 import accountant as accountant_q001
from torch_privacy.experiments.papers.bu2020 import calibration as gdp_calibration
from torch_privacy.experiments.papers.bu2020 import figures as gdp_figures
from torch_privacy.experiments.papers.bu2020.table1 import DELTA, PROBABILITY, TABLE
from torch_privacy.privacy.summary import compose_steps
from torch_privacy.runs.rows import CLT, EXACT, MOMENTS, MU, Context

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


def test_one_epoch_is_near_its_limit():
    numbers = gdp_figures.distance_from_limit(CONTEXT)
    assert numbers[MU] == pytest.approx(0.57, abs=0.005)
    assert 0 < numbers[gdp_figures.GAP].low <= numbers[gdp_figures.GAP].high < 0.02


@pytest.mark.parametrize("epochs", accountant_q001.EPOCHS)
def test_figure_2_of_2016_has_the_papers_points(epochs):
    numbers = accountant_q001.epsilons(epochs, CONTEXT)
    paper = accountant_q001.PAPER[epochs]
    assert numbers[accountant_q001.STRONG] == pytest.approx(paper[accountant_q001.STRONG], rel=2e-3)
    assert numbers[MOMENTS] == pytest.approx(paper[MOMENTS], rel=1e-2)
    assert numbers[EXACT].high < numbers[MOMENTS] < numbers[accountant_q001.STRONG_VALID]


@pytest.mark.parametrize("setting", gdp_calibration.SETTINGS, ids=str)
def test_calibration_finds_the_papers_noise_and_says_what_it_really_costs(setting):
    numbers, paper = gdp_calibration.smaller_noise(*setting, CONTEXT), gdp_calibration.SETTINGS[setting]
    assert numbers[gdp_calibration.NOISE_CLT] == pytest.approx(paper[gdp_calibration.NOISE_CLT], rel=5e-3)
    assert numbers[MU] == pytest.approx(paper[MU], abs=0.006)
    num_steps, target = round(setting[1] / PROBABILITY), numbers[gdp_calibration.TARGET]
    claimed = privacy.clt(numbers[gdp_calibration.NOISE_CLT], PROBABILITY, num_steps).epsilon(DELTA)
    assert claimed == pytest.approx(target, rel=1e-4)
    assert numbers[gdp_calibration.TRUTH_CLT].low > target
    assert numbers[gdp_calibration.TRUTH_DELTA].low > DELTA
    assert compose_steps(numbers[gdp_calibration.NOISE_EXACT], PROBABILITY, num_steps).epsilon_high(DELTA) <= target
