# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_privacy import privacy

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


@pytest.mark.slow
@pytest.mark.parametrize(("target", "num_steps"), EXACT)
def test_calibrate_is_just_above_the_exact_noise_multiplier(target, num_steps):
    found = privacy.calibrate(target, 1e-5, sampling_probability=MNIST, num_steps=num_steps)
    exact = EXACT[target, num_steps]
    assert exact <= found <= exact * (1 + 3e-4)


@settings(max_examples=6)
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
