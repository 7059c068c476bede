# SPDX-License-Identifier: Apache-2.0
import pytest
from drawn import draws
from hypothesis import given
from hypothesis import strategies as st

from torch_privacy import privacy

NAN = float("nan")
MNIST = 256 / 60000

# target epsilon, steps -> smallest sufficient noise multiplier at q = 256 / 60000, delta = 1e-5
EXACT = {
    (1, 1_000): 0.8822964595,
    (1, 10_000): 1.7510073165,
    (1, 100_000): 5.0878726991,
    (3, 1_000): 0.6428487881,
    (3, 10_000): 0.8849500555,
    (3, 100_000): 2.0048737930,
    (8, 1_000): 0.4833425064,
    (8, 10_000): 0.6224678886,
    (8, 100_000): 1.0435566703,
}


@pytest.mark.parametrize(("target", "num_steps"), EXACT)
def test_calibrate_is_just_above_the_exact_noise_multiplier(target, num_steps):
    found = privacy.calibrate(target, 1e-5, sampling_probability=MNIST, num_steps=num_steps)
    exact = EXACT[target, num_steps]
    assert exact <= found <= exact * (1 + 3e-4)


@draws(6)
@given(st.floats(0.2, 20), st.floats(0.01, 1), st.integers(1, 300))
def test_calibrate_is_never_above_the_target(target, q, steps):
    found = privacy.calibrate(target, 1e-5, sampling_probability=q, num_steps=steps, tolerance=1e-3)
    high = privacy.compose([(privacy.SubsampledGaussian(found, q), steps)]).epsilon(1e-5).high
    assert high <= target
    less = privacy.compose([(privacy.SubsampledGaussian(found * (1 - 1.1e-3), q), steps)]).epsilon(1e-5).high
    assert less > target * (1 - 1e-4)


def test_calibrate_refuses_a_target_out_of_reach():
    with pytest.raises(ValueError, match=r"target_epsilon=1e-06 needs a noise_multiplier above 10000"):
        privacy.calibrate(1e-6, 1e-9, sampling_probability=1.0, num_steps=1000)
    with pytest.raises(ValueError, match=r"target_epsilon=1000.0 is met even at noise_multiplier=0.1"):
        privacy.calibrate(1000.0, 1e-5, sampling_probability=1.0, num_steps=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0}, "target_epsilon=0 must be greater"),
        ({"target_epsilon": float("inf")}, "target_epsilon=inf must be a finite"),
        ({"delta": 1}, "delta=1 must lie"),
        ({"sampling_probability": 1.5}, "sampling_probability=1.5 must lie"),
        ({"num_steps": 0}, "num_steps=0 must be an integer"),
        ({"num_steps": 10.0}, "num_steps=10.0 must be an integer"),
        ({"tolerance": -1.0}, "tolerance=-1.0 must be greater"),
    ],
)
def test_calibrate_refuses_hostile_arguments(change, message):
    usual = {"target_epsilon": 1.0, "delta": 1e-5, "sampling_probability": 0.1, "num_steps": 10}
    with pytest.raises(ValueError, match=f"calibrate: {message}"):
        privacy.calibrate(**{**usual, **change})


@pytest.mark.parametrize(("target", "q", "num_steps"), [(0.3, 3.2e-3, 183), (3, MNIST, 10_000), (0.05, 0.5, 10)])
def test_calibrate_asks_few_questions(target, q, num_steps, monkeypatch):
    asked, high = [], privacy.Profile.epsilon_high
    monkeypatch.setattr(privacy.Profile, "epsilon_high", lambda profile, d: asked.append(d) or high(profile, d))
    found = privacy.calibrate(target, 1e-5, sampling_probability=q, num_steps=num_steps)
    assert len(asked) <= 8
    assert privacy.compose([(privacy.SubsampledGaussian(found, q), num_steps)]).epsilon(1e-5).high <= target


def high_of(event, count, delta=1e-5) -> float:
    return privacy.compose([(event, count)]).epsilon(delta).high


@draws(6)
@given(st.floats(0.3, 10), st.floats(0.5, 5), st.floats(1e-3, 0.5))
def test_most_steps_is_within_the_target_and_one_more_is_not(target, noise, q):
    event = privacy.SubsampledGaussian(noise, q)
    steps = privacy.most_steps(event, target, 1e-5, most=100_000)
    assert steps == 0 or high_of(event, steps) <= target
    assert steps == 100_000 or high_of(event, steps + 1) > target


def test_most_steps_counts_what_was_released_before():
    event, before = privacy.SubsampledGaussian(1.0, 0.01), [(privacy.Gaussian(20.0), 1)]
    steps = privacy.most_steps(event, 2.0, 1e-5, beside=before)
    assert privacy.compose([*before, (event, steps)]).epsilon(1e-5).high <= 2.0
    assert privacy.compose([*before, (event, steps + 1)]).epsilon(1e-5).high > 2.0
    assert steps < privacy.most_steps(event, 2.0, 1e-5)


def test_largest_sampling_probability_is_never_above_the_target():
    q = privacy.largest_sampling_probability(2.5, 1e-5, noise_multiplier=1.0, num_steps=2000)
    assert high_of(privacy.SubsampledGaussian(1.0, q), 2000) <= 2.5
    assert high_of(privacy.SubsampledGaussian(1.0, q * 1.001), 2000) > 2.5
    assert privacy.largest_sampling_probability(50.0, 1e-5, noise_multiplier=5.0, num_steps=1) == 1.0
    with pytest.raises(ValueError, match=r"largest_sampling_probability: target_epsilon=1e-09 is out of reach"):
        privacy.largest_sampling_probability(1e-9, 1e-20, noise_multiplier=0.1, num_steps=10**6)


def test_fewest_projections_reach_the_target_and_one_fewer_does_not():
    setting = {"noise_multiplier": 1.0, "sampling_probability": 0.01, "num_steps": 2000}
    found = privacy.fewest_projections(2.8, 1e-5, **setting)
    assert high_of(privacy.SubsampledJL(1.0, found, 0.01), 2000) <= 2.8
    assert high_of(privacy.SubsampledJL(1.0, found - 1, 0.01), 2000) > 2.8
    with pytest.raises(ValueError, match=r"fewest_projections: target_epsilon=2\.5 is out of reach"):
        privacy.fewest_projections(2.5, 1e-5, **setting)


@pytest.mark.parametrize(("projections", "inflation"), [(16, 1.339), (32, 1.089), (64, 1.035), (128, 1.016)])
def test_noise_that_makes_up_for_estimated_norms_matches_the_notes(projections, inflation):
    def schedule(noise):
        return [(privacy.SubsampledJL(noise, projections, 0.01), 2000)]

    found = privacy.calibrate_schedule(schedule, 2.583841, 1e-5)
    assert found == pytest.approx(inflation, abs=7e-4)
    assert privacy.compose(schedule(found)).epsilon(1e-5).high <= 2.583841


def test_schedule_of_falling_noise_is_scaled_to_the_target():
    def schedule(scale):
        return [(privacy.SubsampledGaussian(scale * (2.0 - i / 10), 0.01), 100) for i in range(10)]

    scale = privacy.calibrate_schedule(schedule, 1.0, 1e-5)
    assert privacy.compose(schedule(scale)).epsilon(1e-5).high <= 1.0
    assert privacy.compose(schedule(scale * (1 - 2e-4))).epsilon(1e-5).high > 1.0


def test_budget_allows_exactly_what_remains():
    budget, event = privacy.Budget(1.0, 1e-5), privacy.SubsampledGaussian(1.0, 0.01)
    remaining = budget.remaining(event, after=[(event, 50)])
    assert budget.allows([(event, 50 + remaining)])
    assert not budget.allows([(event, 51 + remaining)])
    assert budget.remaining(event, after=[(privacy.Gaussian(1.0), 1)]) == 0
    assert budget.spent([(event, 50)]) == privacy.compose([(event, 50)]).epsilon(1e-5)
    for arguments, message in (
        ((0, 1e-5), "epsilon=0 must"),
        ((1.0, 1.0), "delta=1.0 must"),
        ((1.0, NAN), "delta=nan"),
    ):
        with pytest.raises(ValueError, match=f"Budget: {message}"):
            privacy.Budget(*arguments)
