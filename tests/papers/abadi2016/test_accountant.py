# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_privacy.runs.rows import EXACT, MOMENTS, Context
from torch_privacy_papers.abadi2016 import accountant

CONTEXT = Context(quick=True, seed=0, data=None)


@pytest.mark.parametrize("epochs", accountant.EPOCHS)
def test_figure_2_of_2016_has_the_papers_points(epochs):
    numbers = accountant.epsilons(epochs, CONTEXT)
    paper = accountant.PAPER[epochs]
    assert numbers[accountant.STRONG] == pytest.approx(paper[accountant.STRONG], rel=2e-3)
    assert numbers[MOMENTS] == pytest.approx(paper[MOMENTS], rel=1e-2)
    assert numbers[EXACT].high < numbers[MOMENTS] < numbers[accountant.STRONG_VALID]


def test_rows_of_fixed_epsilon_give_a_delta_that_grows_to_the_budget():
    numbers = {row.name: row.compute(CONTEXT) for row in accountant.rows(quick=True)[2:5]}
    assert all("epsilon 0.5" in name for name in numbers)
    certified = [found[accountant.EXACT_DELTA].high for found in numbers.values()]
    assert certified == sorted(certified)
    assert 0.9e-5 < certified[-1] <= 1e-5
    assert all(found[accountant.MOMENTS_DELTA] > found[accountant.EXACT_DELTA].high for found in numbers.values())
