# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from torch_privacy.privacy import NoisyCovariance, SubsampledGaussian, compose
from torch_privacy_papers.abadi2016 import sweep
from torch_privacy_papers.abadi2016.sweep import DEFAULTS, EPSILON, FACTORS, epochs_within_budget


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("factor", FACTORS, ids=lambda factor: factor.setting)
def test_sweep_ends_when_epsilon_is_spent_and_not_later(factor):
    for value in factor.values[:: len(factor.values) - 1]:
        kind = type(getattr(DEFAULTS, factor.setting))
        settings = replace(DEFAULTS, **{factor.setting: kind(value * factor.unit)})
        probability = settings.expected_batch_size / 60_000
        steps = round(epochs_within_budget(settings) / probability)
        step = SubsampledGaussian(settings.noise_multiplier, probability)
        spent = [compose([(NoisyCovariance(7.0), 1), (step, n)]).epsilon(1e-5).high for n in (steps, steps + 2)]
        assert spent[0] <= EPSILON < spent[1]


def test_sweep_draws_every_setting_with_the_reference_among_its_values(tmp_path):
    rows = [
        {"row": row.name, "runs": [{"numbers": {"score": 0.5 + number / 1000}}]}
        for number, row in enumerate(sweep.rows(quick=False))
    ]
    (figure,) = sweep.figures({"rows": rows}, tmp_path).values()
    assert len(figure.axes) == len(FACTORS) == 6
    for axes, factor in zip(figure.axes, FACTORS, strict=True):
        x, y = axes.lines[0].get_data()
        assert axes.get_xlabel() == factor.title
        assert list(x) == sorted([factor.reference, *factor.values])
        assert y[list(x).index(factor.reference)] == pytest.approx(50.0)


@pytest.mark.parametrize(("best", "said"), [(200, "agrees with"), (600, "does not agree"), (2000, "does not agree")])
def test_sweep_says_what_its_best_lot_means_for_the_papers_rule(best, said):
    rows = [
        {"row": row.name, "runs": [{"numbers": {"score": 0.96 if row.name == f"lot size {best}" else 0.9}}]}
        for row in sweep.rows(quick=False)
    ]
    rows[0]["runs"][0]["numbers"]["score"] = 0.96 if best == 600 else 0.9
    sentence, _ = sweep.findings({"rows": rows})
    assert f"245 of 60,000 here, {said}" in sentence
    assert f"the best lot has {best} (200: " in sentence


def test_sweep_says_how_stable_accuracy_is_over_the_rates():
    scores = {"learning rate 0.01": 0.9, "learning rate 0.05": 0.93, "learning rate 0.2": 0.99}
    rows = [
        {"row": row.name, "runs": [{"numbers": {"score": scores.get(row.name, 0.91)}}]} for row in sweep.rows(False)
    ]
    _, sentence = sweep.findings({"rows": rows})
    assert "Ours vary by 3.0 points there, and are best at 0.2 (0.01: 90.0 %, " in sentence


@pytest.mark.parametrize("name", sweep.TOGETHER)
def test_larger_rates_with_less_noise_spend_the_same_in_fewer_epochs(name):
    reference, *others = sweep.rows(quick=False)
    (row,) = (row for row in others if row.name == name)
    assert row.settings["epochs"] < reference.settings["epochs"]
    settings = replace(DEFAULTS, **row.settings)
    step = SubsampledGaussian(settings.noise_multiplier, 0.01), round(100 * settings.epochs)
    assert 0.999 * EPSILON < compose([(NoisyCovariance(7.0), 1), step]).epsilon(1e-5).high <= EPSILON
