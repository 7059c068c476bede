# SPDX-License-Identifier: Apache-2.0
"""Tests the price of a person with several examples by closed forms, quadrature, two engines and another library."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, stats

from torch_privacy import privacy
from torch_privacy.privacy.compose import Profile
from torch_privacy.privacy.pairs.group import GroupPair

REFERENCE = {1: 1.8282, 2: 3.979, 4: 8.899, 8: 20.895, 16: 52.714}  # ε at σ = 1, q = .01, T = 1000, δ = 1e-5


@pytest.mark.parametrize("size", REFERENCE)
def test_epsilon_of_a_person_is_that_of_the_reference(size):
    step = privacy.SubsampledGroup(1.0, 0.01, size)
    low, high = privacy.compose([(step, 1000)]).epsilon(1e-5)
    assert low <= high
    assert (low, high) == pytest.approx((REFERENCE[size],) * 2, abs=1e-3)


@pytest.mark.thorough
def test_dp_accounting_agrees_from_above():
    from dp_accounting.pld import PLDAccountant

    releases = [(privacy.SubsampledGroup(1.2, 0.02, 2), 20)]
    accountant = PLDAccountant(value_discretization_interval=2e-3)
    accountant.compose(privacy.to_dp_event(releases))
    low, high = privacy.compose(releases).epsilon(1e-5)
    assert low - 1e-9 <= accountant.get_epsilon(1e-5) <= high * 1.02


CASES = [(1.0, 0.01, 8), (0.5, 0.3, 3), (3.0, 0.9, 40), (0.4, 1e-3, 5), (20.0, 0.2, 100), (2.0, 1e-5, 2)]


def exact_delta(noise: float, q: float, size: int, epsilon: float, *, swapped: bool) -> float:
    """Returns the hockey stick of one step by quadrature of the densities."""
    counts = np.arange(size + 1)
    weights = stats.binom.pmf(counts, size, q)

    def excess(x: float) -> float:
        p, other = weights @ stats.norm.pdf(x, counts / noise), stats.norm.pdf(x)
        first, second = (other, p) if swapped else (p, other)
        return max(first - math.exp(epsilon) * second, 0.0)

    ends = np.linspace(-12, 12 + min(size, 40) / noise, 60)
    return sum(integrate.quad(excess, a, b, limit=200)[0] for a, b in pairwise(ends))


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(("noise", "q", "size"), CASES[:4])
@pytest.mark.parametrize("epsilon", [-0.2, 0.05, 1.0])
def test_one_step_has_the_hockey_stick_of_its_densities_in_both_orders(noise, q, size, epsilon):
    curves = privacy.compose([(privacy.SubsampledGroup(noise, q, size), 1)]).directions
    for direction, swapped in (("remove", False), ("add", True)):
        low, high = curves[direction].delta(epsilon)
        assert low <= high
        assert (low, high) == pytest.approx((exact_delta(noise, q, size, epsilon, swapped=swapped),) * 2, abs=1e-8)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("noise", "q", "size"), CASES)
def test_two_engines_agree(noise, q, size):
    releases = [(privacy.SubsampledGroup(noise, q, size), 200)]
    contour = privacy.compose(releases).epsilon(1e-6)
    lattice = Profile(releases, "lattice").epsilon(1e-6)
    assert contour.low <= lattice.high
    assert lattice.low <= contour.high
    assert contour.high - contour.low <= 0.01 * contour.high + 1e-5


def test_outcomes_are_those_of_the_losses():
    pair = GroupPair(1.3, 0.02, 30)
    x = np.linspace(-15, 60, 400)
    heights = pair._height_at(x)
    assert (np.diff(heights) > 0).all()
    np.testing.assert_allclose(pair.outcome(heights), x, atol=1e-9)
    assert pair.outcome(np.array([0.0, np.inf])).tolist() == [-np.inf, np.inf]
    cuts = np.concatenate([[0.0], heights, [np.inf]])
    mass, _ = pair.cells(cuts, np.full(len(cuts) - 1, np.inf))
    assert mass.sum() == pytest.approx(1, abs=1e-13)


@pytest.mark.thorough
def test_losses_beyond_floating_point_are_priced_as_a_simulation_finds():
    """The loss of one step may exceed 700, and e^700 is no number; 10,000 trainings are simulated."""
    noise, q, size, steps, people = 0.3, 0.05, 20, 4, 10_000
    lattice = Profile([(privacy.SubsampledGroup(noise, q, size), steps)], "lattice")
    rng, pair = np.random.default_rng(0), GroupPair(1 / noise, q, size)
    joined = rng.binomial(size, q, people * steps)
    heights = pair._height_at(joined / noise + rng.standard_normal(people * steps))
    losses = (heights + pair.floor).reshape(people, steps).sum(1)
    for epsilon in (20.0, 100.0):
        found = np.maximum(-np.expm1(epsilon - losses), 0)
        error = 6 * found.std() / people**0.5
        low, high = lattice.delta(epsilon)
        assert low - error <= found.mean() <= high + error
        assert high - low < 0.01 * high


def test_groups_reduce_to_single_examples_and_to_full_batches():
    one = privacy.compose([(privacy.SubsampledGroup(1.1, 0.01, 1), 300)]).epsilon(1e-5)
    assert one == privacy.compose([(privacy.SubsampledGaussian(1.1, 0.01), 300)]).epsilon(1e-5)
    everyone = privacy.compose([(privacy.SubsampledGroup(8.0, 1.0, 4), 5)]).epsilon(1e-5)
    assert everyone == privacy.compose([(privacy.Gaussian(2.0), 5)]).epsilon(1e-5)


@pytest.mark.parametrize("q", [1e-4, 0.01, 0.4])
def test_more_examples_cost_more_and_at_most_one_as_long_as_all(q):
    sizes = (1, 2, 3, 10, 100)
    found = [privacy.compose([(privacy.SubsampledGroup(4.0, q, size), 100)]).epsilon(1e-5) for size in sizes]
    assert all(more.low > fewer.high for fewer, more in pairwise(found))
    for size, bracket in zip(sizes, found, strict=True):
        longest = privacy.SubsampledGaussian(4.0 / size, 1 - (1 - q) ** size)
        assert bracket.low <= privacy.compose([(longest, 100)]).epsilon(1e-5).high


def test_every_gaussian_step_has_a_price_for_groups():
    events = {
        privacy.SubsampledGaussian(1.0, 0.1): privacy.SubsampledGroup(1.0, 0.1, 3),
        privacy.Gaussian(2.0): privacy.SubsampledGroup(2.0, 1.0, 3),
        privacy.SubsampledGEP(2.0, 0.1): privacy.SubsampledGroup(2 / 2**0.5, 0.1, 3),
        privacy.SubsampledBlocks((3.0, 4.0), 0.1): privacy.SubsampledGroup(2.4, 0.1, 3),
        privacy.NoisyCovariance(5.0): privacy.SubsampledGroup(5.0, 1.0, 3),
        privacy.Laplace(6.0): privacy.Laplace(2.0, unit="person with at most 3 examples"),
    }
    for event, expected in events.items():
        found = privacy.for_group(event, 3)
        assert found.unit == "person with at most 3 examples"
        assert type(found) is type(expected)
        assert found.noise_multiplier == pytest.approx(expected.noise_multiplier, rel=1e-12)
        assert privacy.event_from_dict(privacy.event_to_dict(found)) == found
    together = [(privacy.for_group(event, 3, "patient"), 2) for event in events]
    assert "one patient with at most 3 examples" in privacy.compose(together).statement(1e-5)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (privacy.SubsampledJL(1.0, 32, 0.1), "SubsampledJL has no known price"),
        (privacy.KnownProfile((1.0,), (0.0,)), "KnownProfile has no known price"),
        (privacy.FixedSizeGaussian(1.0, 0.1), "replace one example: must be add/remove or zero out"),
        (privacy.SubsampledGroup(1.0, 0.1, 3), "protects one person with at most 3 examples already"),
        (privacy.SubsampledGaussian(1.0, 0.1, unit="customer"), "protects one customer already"),
    ],
)
def test_events_without_a_price_for_groups_are_refused(event, message):
    with pytest.raises(ValueError, match=message):
        privacy.for_group(event, 2)


def test_releases_of_different_units_have_no_joint_price():
    one, other = privacy.SubsampledGaussian(1.0, 0.1), privacy.SubsampledGaussian(1.0, 0.1, unit="customer")
    with pytest.raises(ValueError, match=r"different units \['customer', 'example'\]"):
        privacy.compose([(one, 1), (other, 1)])
    assert privacy.compose([(other, 3)]).epsilon(1e-5) == privacy.compose([(one, 3)]).epsilon(1e-5)
    assert "(add/remove one customer, Poisson sampling)" in str(privacy.compose([(other, 3)]))
    assert privacy.event_to_dict(one).keys() == {"type", "noise_multiplier", "sampling_probability"}
    with pytest.raises(ValueError, match="unit='' must say in words"):
        privacy.SubsampledGaussian(1.0, 0.1, unit="")


def test_a_group_is_a_mixture_of_gaussians_elsewhere():
    event = privacy.to_dp_event([(privacy.SubsampledGroup(1.5, 0.25, 2), 7)]).events[0]
    assert (event.count, event.event.standard_deviation) == (7, 1.5)
    assert list(event.event.sensitivities) == [0, 1, 2]
    assert list(event.event.sampling_probs) == pytest.approx([0.5625, 0.375, 0.0625], rel=1e-14)


@pytest.mark.thorough
def test_sampling_persons_is_compared_with_sampling_examples():
    found = {size: privacy.compare_persons(1.0, 0.01, 1000, 1e-5, size) for size in (1, 2, 4, 8, 16)}
    assert [round(one.person.high, 2) for one in found.values()] == [1.83, 3.98, 8.9, 20.9, 52.71]
    assert [one.noise_ratio for one in found.values()] == pytest.approx([1, 0.793, 0.720, 0.697, 0.688], abs=2e-3)
    one_example = privacy.compose([(privacy.SubsampledGaussian(1.0, 0.01), 1000)])
    for size in (2, 4, 8):
        whole = found[size].generic
        of_one = one_example.delta(whole / size).high
        assert of_one * math.expm1(whole) / math.expm1(whole / size) == pytest.approx(1e-5, rel=1e-3)
    assert found[16].generic is None
    for size, one in found.items():
        step = privacy.SubsampledGroup(one.noise_multiplier, 0.01, size)
        assert privacy.compose([(step, 1000)]).epsilon(1e-5).high <= one.one.high
    assert "shorter than about 0.70 of the gradient of one example" in found[8].rule
    assert found[16].lines()[2] == ("  by generic group privacy, for comparison", "none below 480")
    assert found[16].as_json()["epsilon_by_generic_group_privacy"] is None


def test_pairs_of_rare_groups_keep_their_digits():
    pair = privacy.SubsampledGroup(1.0, 1e-12, 3).dominating_pair()
    assert pair.floor == pytest.approx(-3e-12, rel=1e-12)
    height = pair._height_at(np.array([0.0]))[0]
    assert height == pytest.approx(3e-12 * math.exp(-0.5), rel=1e-9)
