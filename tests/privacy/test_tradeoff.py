# SPDX-License-Identifier: Apache-2.0
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_privacy.privacy.tradeoff import Gaussian

ALPHA = np.linspace(0, 1, 201)
MU = st.floats(1e-3, 8)


@given(MU)
def test_gaussian_is_convex_nonincreasing_and_below_guessing(mu):
    f = Gaussian(mu)(ALPHA)
    assert (np.diff(f) <= 0).all()
    assert (np.diff(f, 2) >= -1e-14).all()
    assert (f <= 1 - ALPHA + 1e-14).all()


@given(MU)
def test_gaussian_is_its_own_inverse(mu):
    alpha = ALPHA[1:-1]
    f = Gaussian(mu)
    inner = f(alpha) > 1e-8
    np.testing.assert_allclose(f(f(alpha))[inner], alpha[inner], rtol=1e-6)


@given(MU, st.floats(-5, 20))
def test_gaussian_delta_matches_forty_digits(mu, epsilon):
    with mpmath.workdps(40):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        exact = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
    assert Gaussian(mu).delta(epsilon) == pytest.approx(float(exact), abs=1e-14, rel=1e-9)


def test_gaussian_delta_and_tradeoff_are_conjugate():
    f, alpha = Gaussian(1.3), np.linspace(0, 1, 100_001)
    for epsilon in (0.0, 0.5, 2.0):
        best = (1 - f(alpha) - np.exp(epsilon) * alpha).max()
        assert best == pytest.approx(f.delta(epsilon), abs=1e-8)


@pytest.mark.parametrize("mu", [0, -1.0, float("nan")])
def test_gaussian_refuses_mu(mu):
    with pytest.raises(ValueError, match=r"tradeoff\.Gaussian: mu="):
        Gaussian(mu)
