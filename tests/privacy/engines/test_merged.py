# SPDX-License-Identifier: Apache-2.0
"""Tests merged outcomes against the contour engine, closed forms, quadrature, and the brackets that they narrow."""

import numpy as np
import pytest

from torch_privacy import privacy
from torch_privacy.privacy.engines import contour
from torch_privacy.privacy.engines.curve import ClosedFormCurve, crossing
from torch_privacy.privacy.engines.merged import MergedEngine
from torch_privacy.privacy.engines.outcomes import Grid

COARSE = Grid(0.1, 1e-22)


def bracket(steps, delta, *, swapped=False, grid=COARSE):
    engine = MergedEngine(steps, swapped=swapped)
    low, high = (
        crossing(lambda epsilon, a=above: engine.delta(epsilon, grid, above=a) <= delta) for above in (False, True)
    )
    return low.low, high.high


def pairs(*events):
    return [(event.dominating_pair(), count) for event, count in events]


SMOOTH = {
    "sampled": [(privacy.SubsampledGaussian(1.1, 0.01), 1000)],
    "whole batches": [(privacy.Gaussian(5.0), 20)],
    "thousands of nats": [(privacy.Gaussian(0.5), 900)],
    "replaced": [(privacy.SubsampledGaussian(0.8, 0.02, privacy.NeighboringRelation.REPLACE_ONE), 500)],
    "group": [(privacy.SubsampledGroup(2.0, 0.01, 4), 500)],
    "together": [
        (privacy.SubsampledGaussian(1.0, 0.01), 800),
        (privacy.Gaussian(9.0), 3),
        (privacy.SubsampledGEP(3.0, 0.1), 7),
    ],
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("swapped", [False, True], ids=["remove", "add"])
@pytest.mark.parametrize("case", SMOOTH)
def test_merged_outcomes_enclose_what_the_contour_finds(case, swapped):
    steps = pairs(*SMOOTH[case])
    for delta in (1e-4, 1e-11):
        exact = contour.curve(steps, swapped=swapped).epsilon(delta)
        tilt = MergedEngine(steps, swapped=swapped).tilt(delta)
        for grid, narrow in ((COARSE, 0.2), (Grid(0.1, 1e-8 * delta, tilt), 0.05)):
            low, high = bracket(steps, delta, swapped=swapped, grid=grid)
            assert low <= exact.high * (1 + 1e-12)
            assert high >= exact.low * (1 - 1e-12)
            assert high - low < narrow * high


@pytest.mark.parametrize("swapped", [False, True], ids=["remove", "add"])
@pytest.mark.parametrize(
    "event",
    [
        privacy.SubsampledGaussian(0.7, 1e-7),
        privacy.SubsampledJL(1.5, 16, 1e-4),
        privacy.SubsampledJL(0.8, 40, 1.0),
        privacy.SubsampledGroup(1.0, 1e-4, 5),
        privacy.FinitePair((0.6, 0.4), (0.3, 0.7)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_single_step_encloses_its_closed_form(event, swapped):
    steps = pairs((event, 1))
    engine, closed = MergedEngine(steps, swapped=swapped), ClosedFormCurve(steps[0][0], swapped=swapped)
    for epsilon in (0.0, 1e-6, 1e-3, 0.1, 2.0):
        exact = closed.delta(epsilon)
        assert engine.delta(epsilon, COARSE, above=False) <= exact.high * (1 + 1e-9)
        assert engine.delta(epsilon, COARSE, above=True) >= exact.low * (1 - 1e-9)


@pytest.mark.parametrize(("noise", "q"), [(0.6, 1e-5), (2.0, 1e-3)])
def test_two_rare_steps_enclose_the_integral(noise, q):
    """δ of two steps is the mean of δ of one at ε minus the loss of the other."""
    ((pair, _),) = steps = pairs((privacy.SubsampledGaussian(noise, q), 2))
    x = np.linspace(-9, 16, 200_001)
    u = x / noise - 1 / (2 * noise**2)
    loss, density = pair.loss_at(u), np.exp(pair.loss_at(u) - x**2 / 2) / np.sqrt(2 * np.pi)
    engine = MergedEngine(steps, swapped=False)
    for epsilon in (3 * q, 0.01, 0.05):
        gain, lost, _ = pair.tails(epsilon - loss, swapped=False)
        exact = float(((gain - lost) * density).sum() * (x[1] - x[0]))
        assert engine.delta(epsilon, Grid(0.03, 1e-40), above=False) <= exact * (1 + 1e-6)
        assert engine.delta(epsilon, Grid(0.03, 1e-40), above=True) >= exact * (1 - 1e-6)
        assert engine.delta(epsilon, Grid(0.03, 1e-40), above=True) <= exact * 1.1


NARROWED = [
    ([(privacy.SubsampledGaussian(0.6566, 2.05e-6), 1459)], 1.7e-13),
    ([(privacy.SubsampledJL(13.5, 32, 1.0), 2), (privacy.SubsampledJL(3.4, 64, 0.0055), 66)], 1e-12),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("releases", "delta"), NARROWED, ids=["rare", "two heavy"])
def test_rare_and_heavy_losses_are_bracketed_to_a_thousandth(releases, delta):
    low, high = privacy.compose(releases).epsilon(delta)
    assert 0 < low <= high <= low * 1.001


@pytest.mark.thorough
def test_tiny_deltas_cost_no_more_than_renyi_accounting():
    releases = [(privacy.SubsampledGaussian(4.0, 0.00033), 10_000)]
    low, high = privacy.compose(releases).epsilon(1e-25)
    assert 0 < low <= high <= privacy.moments_of(releases, 1e-25)


@pytest.mark.parametrize(
    "event", [privacy.Gaussian(30.0), privacy.Laplace(40.0)], ids=lambda event: type(event).__name__
)
def test_losses_that_count_as_infinite_are_as_rare_as_asked_for(event):
    """Cells are wide in far tails: one that is negligible only in part must stay finite, and so must the last atom."""
    engine = MergedEngine(pairs((event, 50)), swapped=False)
    assert engine.outcomes(Grid(0.1, 1e-128), above=True).infinite <= 1e-126


def test_a_single_loss_has_a_cell():
    """A million hardly random answers had a part like that, and ended in an error."""
    assert len(Grid(0.01, 0.0).ends(0.0, 0.0, [(0.0, 1e-4), (0.0, 1e-300)])) >= 2
