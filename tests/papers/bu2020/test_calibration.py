# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_privacy import privacy
from torch_privacy.privacy.summary import compose_steps, equal_releases
from torch_privacy.runs.rows import MU, Context
from torch_privacy_papers.bu2020 import calibration
from torch_privacy_papers.bu2020.table1 import DELTA, PROBABILITY

CONTEXT = Context(quick=True, seed=0, data=None)


@pytest.mark.parametrize("setting", calibration.SETTINGS, ids=str)
def test_calibration_finds_the_papers_noise_and_says_what_it_really_costs(setting):
    numbers, paper = calibration.smaller_noise(*setting, CONTEXT), calibration.SETTINGS[setting]
    assert numbers[calibration.NOISE_CLT] == pytest.approx(paper[calibration.NOISE_CLT], rel=5e-3)
    assert numbers[MU] == pytest.approx(paper[MU], abs=0.006)
    num_steps, target = round(setting[1] / PROBABILITY), numbers[calibration.TARGET]
    claimed = privacy.clt(equal_releases(numbers[calibration.NOISE_CLT], PROBABILITY, num_steps)).epsilon(DELTA)
    assert claimed == pytest.approx(target, rel=1e-4)
    assert numbers[calibration.TRUTH_CLT].low > target
    assert numbers[calibration.TRUTH_DELTA].low > DELTA
    assert compose_steps(numbers[calibration.NOISE_EXACT], PROBABILITY, num_steps).epsilon_high(DELTA) <= target
