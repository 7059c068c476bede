# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_privacy import privacy
from torch_privacy.privacy.summary import equal_releases
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Metrics
from torch_privacy.runs.rows import Context
from torch_privacy_papers.bu2020 import calibration, figure4
from torch_privacy_papers.bu2020.table1 import DELTA, PROBABILITY


def test_epochs_are_those_of_the_first_time_that_an_accuracy_is_reached(tmp_path):
    scores = [0.5, 0.9499999809265137, 0.94, 0.965, None, 0.96]
    rows = [Metrics("private", epoch, epoch, 1.0, None, score) for epoch, score in enumerate(scores, 1)]
    folder = RunFolder(tmp_path)
    folder.write_metrics([*rows, Metrics("non-private", 1.0, 1, 1.0, None, 0.99)])
    assert figure4.epochs_to_accuracy(folder) == {"epochs_to_95": 2, "epochs_to_96": 4, "epochs_to_97": None}
    assert set(figure4.epochs_to_accuracy(folder)) <= set(figure4.COLUMNS)


@pytest.mark.parametrize(("noise", "accountant"), [(0.7, "moments"), (0.638, "CLT"), (0.656, "certified")])
def test_score_at_a_budget_is_that_of_the_last_epoch_within_it(noise, accountant):
    scores = [epoch / 100 for epoch in range(1, 71)]
    found = figure4.score_at(4.0, noise, scores)
    epochs = round(100 * found)

    def epsilon(epochs: int) -> float:
        steps = round(epochs / PROBABILITY)
        if accountant == "moments":
            return privacy.moments_of(equal_releases(noise, PROBABILITY, steps), DELTA)
        if accountant == "CLT":
            return privacy.clt(equal_releases(noise, PROBABILITY, steps)).epsilon(DELTA)
        return privacy.compose([(privacy.SubsampledGaussian(noise, PROBABILITY), steps)]).epsilon_high(DELTA)

    assert epsilon(epochs) <= 4 < epsilon(epochs + 1)
    assert figure4.score_at(100.0, noise, scores) is None
    assert figure4.score_at(0.01, noise, scores) is None


@pytest.mark.parametrize("epochs", figure4.NOISES)
def test_noises_are_those_of_the_calibration(epochs):
    noises = figure4.NOISES[epochs]
    numbers = calibration.smaller_noise(noises["moments"], epochs, Context(quick=True, seed=0, data=None))
    assert noises["CLT"] == pytest.approx(numbers[calibration.NOISE_CLT], abs=5e-3)
    assert 0 <= noises["certified"] - numbers[calibration.NOISE_EXACT] < 1e-3  # rounded up
    steps = [(privacy.SubsampledGaussian(noises["certified"], PROBABILITY), round(epochs / PROBABILITY))]
    assert privacy.compose(steps).epsilon_high(DELTA) <= numbers[calibration.TARGET]
