# SPDX-License-Identifier: Apache-2.0
"""Pairs of releases with estimated norms: densities, nodes and the Bessel function in them."""

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr

from torch_privacy.privacy.pairs.mixture import BaseDensities, SubsampledMixturePair, log_bessel


@pytest.mark.parametrize(
    ("order", "x"), [(1, 0.3), (5.5, 2.0), (32.5, 0.2), (59.5, 3.0), (60.5, 30.0), (128.5, 50.0), (5000.5, 100.0)]
)
def test_log_bessel_matches_forty_digits(order, x):
    with mpmath.workdps(60):
        exact = float(mpmath.log(mpmath.besselk(order, mpmath.mpf(x))) + x)
    assert log_bessel(order, np.array([x]))[0] == pytest.approx(exact, rel=1e-13, abs=1e-12)
    assert log_bessel(3.0, np.array([1e30]))[0] == pytest.approx(np.log(np.pi / 2e30) / 2)


@pytest.mark.parametrize(("projections", "noise"), [(1, 0.1), (2, 0.05), (16, 0.3), (10_000, 0.05), (10_000_000, 1.0)])
def test_nodes_of_estimated_norms_carry_all_mass_under_p_and_q(projections, noise):
    pair = SubsampledMixturePair(projections, noise, 0.5)
    nodes = pair.nodes(pair.coarsest_step)
    assert np.exp(nodes.log_mass).sum() == pytest.approx(1, abs=1e-9 + pair.node_rounding)
    assert np.exp(nodes.log_mass - nodes.losses).sum() == pytest.approx(1, abs=1e-9 + pair.node_rounding)


@pytest.mark.parametrize(("projections", "noise"), [(4, 0.8), (16, 1.3), (64, 1.0), (300, 0.6)])
def test_densities_of_estimated_norms_match_simulation_of_z(projections, noise):
    s = np.random.default_rng(1).chisquare(projections, 200_000) / projections
    z = 1 / (noise * np.sqrt(s))
    cuts = np.array([-np.inf, -2.0, -0.5, 0.0, 0.7, 3.0, np.inf])
    base, shifted, _ = BaseDensities(projections, noise).masses(cuts)
    assert base.sum() == pytest.approx(1, abs=1e-9)
    assert shifted.sum() == pytest.approx(1, abs=1e-9)
    for mass, sign in ((base, 1), (shifted, -1)):
        expected = np.diff([np.mean(ndtr(cut / z + sign * z / 2)) for cut in cuts])
        np.testing.assert_allclose(mass, expected, atol=4 / 200_000**0.5 * 0.5)
