# SPDX-License-Identifier: Apache-2.0
"""The price of steps with banded noise: reference values, groups that are rounded up, and runs that stay apart."""

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from torch_privacy import privacy

BandedGaussian, SubsampledGaussian = privacy.BandedGaussian, privacy.SubsampledGaussian


def epsilon(*releases, delta=1e-5):
    return privacy.compose([*releases]).epsilon(delta)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("bands", "expected"), [(1, 1.828237), (4, 4.185152), (8, 6.228375), (16, 9.083009)])
def test_a_thousand_steps_have_the_reference_values(bands, expected):
    low, high = epsilon((BandedGaussian(1.0, 0.01, bands), 1000))
    assert low - 1e-6 <= expected <= high + 1e-6
    accountant = PLDAccountant()
    sampled = dp_event.PoissonSampledDpEvent(0.01 * bands, dp_event.GaussianDpEvent(1.0))
    accountant.compose(dp_event.SelfComposedDpEvent(sampled, -(-1000 // bands)))
    assert accountant.get_epsilon(1e-5) == pytest.approx(high, rel=1e-3)


@pytest.mark.parametrize("count", [1, 4, 5, 8, 9])
def test_a_group_that_was_begun_costs_a_whole_one(count):
    reduced = (SubsampledGaussian(1.0, 0.4), -(-count // 4))
    assert epsilon((BandedGaussian(1.0, 0.1, 4), count)) == epsilon(reduced)
    assert privacy.moments_of([(BandedGaussian(1.0, 0.1, 4), count)], 1e-5) == privacy.moments_of([reduced], 1e-5)
    assert privacy.to_dp_event([(BandedGaussian(1.0, 0.1, 4), count)]) == privacy.to_dp_event([reduced])


def test_runs_are_rounded_up_one_by_one():
    first, second = BandedGaussian(1.0, 0.1, 4), BandedGaussian(1.0, 0.1, 4, run=1)
    ledger = privacy.Ledger()
    for step, event in enumerate([first, second, second]):
        ledger.record(event, step, str(step))
    assert ledger.profile().epsilon(1e-5) == epsilon((SubsampledGaussian(1.0, 0.4), 2))
    assert epsilon((first, 1), (first, 1)) == epsilon((SubsampledGaussian(1.0, 0.4), 2))


def test_beside_others_and_as_many_as_a_target_allows():
    event = BandedGaussian(2.0, 0.05, 8)
    both = epsilon((event, 100), (privacy.Gaussian(5.0), 1))
    assert both == epsilon((SubsampledGaussian(2.0, 0.4), 13), (privacy.Gaussian(5.0), 1))
    most = privacy.most_steps(event, 3.0, 1e-5)
    assert most % 8 == 0
    assert epsilon((event, most)).high <= 3.0 < epsilon((event, most + 1)).high


@pytest.mark.parametrize("bands", [1, 2, 10])
def test_all_examples_at_every_turn_are_gaussians_without_sampling(bands):
    event = BandedGaussian(1.5, 1 / bands, bands)
    assert event.sampler == "no"
    assert epsilon((event, 3 * bands)) == epsilon((privacy.Gaussian(1.5), 3))


def test_a_price_of_one_step_alone_is_not_given():
    event = BandedGaussian(1.0, 0.1, 4)
    for use in (privacy.for_group, privacy.in_bins, lambda event, size: privacy.truncated(event, size, 2)):
        with pytest.raises(ValueError, match=r"no known price|no price of its own"):
            use(event, 10)
    with pytest.raises(ValueError, match="at most 10 bands"):
        BandedGaussian(1.0, 0.1, 11)
