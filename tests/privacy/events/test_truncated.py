# SPDX-License-Identifier: Apache-2.0
"""The price of a truncated Poisson sample: dp-accounting as a witness, a simulation of both data sets, and limits."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from torch_privacy import privacy

T = privacy.TruncatedGaussian
LISTS = [  # with the smallest delta that dp-accounting resolves well
    [(T(4.0, 0.5, 2, 1), 3), (T(3.0, 0.5, 2, 1), 2)],
    [(T(1.0, 0.01, 50_000, 600), 1000)],
    [(T(1.0, 0.01, 50_000, 500), 1000)],
    [(T(2.0, 0.3, 20, 5), 10)],
    [(T(2.0, 1.0, 20, 5), 10)],
    [(T(1.5, 0.2, 20, 20), 10)],
    [(T(3.0, 0.3, 1, 1), 4)],
]


@pytest.mark.thorough(but=1)
@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("releases", LISTS, ids=str)
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_dp_accounting_has_the_same_price(releases, delta):
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=2e-4)
    for event, count in releases:
        theirs = dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=event.num_examples,
            sampling_probability=event.sampling_probability,
            truncated_batch_size=event.most,
            noise_multiplier=event.noise_multiplier,
        )
        assert privacy.from_dp_event(theirs) == [(event, 1)]
        accountant.compose(theirs, count)
    low, high = privacy.compose(releases).epsilon(delta)
    assert low <= high <= low * (1 + 1e-3)
    assert low * (1 - 1e-4) - 1e-6 <= accountant.get_epsilon(delta) <= high * (1 + 1e-3) + 1e-4


@pytest.mark.parametrize("noise", [0.1, 0.05, 1e-3, 4e-6])
def test_little_noise_has_a_finite_price_above_that_of_more_noise(noise):
    """Losses beyond floating point; it ended in errors of numpy, or without memory."""
    for steps in (1, 10):
        high = privacy.compose([(T(noise, 0.01, 10_000, 130), steps)]).epsilon(1e-5).high
        whole = privacy.compose([(privacy.Gaussian(noise / 4), steps)]).epsilon(1e-5)  # all that a cut can move
        more = privacy.compose([(T(1.5 * noise, 0.01, 10_000, 130), steps)]).epsilon(1e-5)
        assert more.low < high <= whole.high * (1 + 1e-6) < math.inf


@pytest.mark.thorough
def test_engines_agree():
    for releases in LISTS:
        contour, lattice = (privacy.compose(releases, method).epsilon(1e-5) for method in ("auto", "lattice"))
        assert contour.low <= lattice.high
        assert lattice.low <= contour.high


@pytest.mark.parametrize("swapped", [False, True])
def test_no_data_set_leaks_more(swapped):
    """n examples +1 or -1 each, of which one is removed: the exact hockey stick of the released sums."""
    n, q, most, noise = 6, 0.4, 2, 1.0

    def law(values):
        """Returns (sums, probabilities) of a truncated sample of these examples."""
        found: dict[float, float] = {}
        for sample in range(2 ** len(values)):
            members = [i for i in range(len(values)) if sample >> i & 1]
            chance = q ** len(members) * (1 - q) ** (len(values) - len(members))
            size = min(len(members), most)
            parts = list(_subsets(members, size))
            for part in parts:
                total = sum(values[i] for i in part)
                found[total] = found.get(total, 0.0) + chance / len(parts)
        return np.array(list(found)), np.array(list(found.values()))

    x = np.linspace(-14, 14, 20_001)
    event = T(noise, q, n, most)
    for others in ([-1.0] * 5, [1.0] * 5, [1.0, -1.0, 1.0, -1.0, 1.0], [-1.0, -1.0, -1.0, 1.0, 1.0]):
        densities = [
            (norm.pdf(x[:, None], sums, noise) @ chances) for sums, chances in (law([1.0, *others]), law(others))
        ]
        p, r = densities[::-1] if swapped else densities
        for epsilon in (0.1, 0.5, 1.0, 2.0):
            delta = np.maximum(p - math.exp(epsilon) * r, 0).sum() * (x[1] - x[0])
            assert delta <= privacy.compose([(event, 1)]).delta(epsilon).high


def _subsets(members, size):
    if size == 0:
        yield []
        return
    for place in range(len(members) - size + 1):
        for rest in _subsets(members[place + 1 :], size - 1):
            yield [members[place], *rest]


def test_a_largest_size_far_above_the_mean_costs_what_poisson_sampling_does():
    far = privacy.compose([(T(1.0, 0.01, 50_000, 50_000), 1000)]).epsilon(1e-5)
    assert far == privacy.compose([(privacy.SubsampledGaussian(1.0, 0.01), 1000)]).epsilon(1e-5)
    sizes = [privacy.compose([(T(1.0, 0.01, 50_000, k), 1000)]).epsilon(1e-5).high for k in (500, 550, 600, 650)]
    assert sizes == sorted(sizes, reverse=True)


def test_it_holds_for_zeroing_out_only():
    with pytest.raises(ValueError, match="the number of examples decides how often a batch is cut"):
        T(1.0, 0.1, 20, 5, privacy.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with pytest.raises(ValueError, match="TruncatedGaussian has no known price for a person"):
        privacy.for_group(T(1.0, 0.1, 20, 5), 3)
