# SPDX-License-Identifier: Apache-2.0
import mpmath
import pytest

from torch_privacy.privacy.engines.curve import ClosedFormCurve
from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair


@pytest.mark.parametrize("swapped", [False, True])
def test_closed_form_of_one_step_matches_forty_digits(swapped):
    for sigma, q in [(0.3, 1e-5), (1.0, 0.01), (20.0, 1e-5), (0.7, 0.9)]:
        for epsilon in (1e-7, 1e-3, 0.1, 2.0):
            low, high = ClosedFormCurve(SubsampledGaussianPair(1 / sigma, q), swapped=swapped).delta(epsilon)
            exact = _one_step_in_forty_digits(sigma, q, epsilon, swapped)
            assert low <= exact <= high
            assert high - low <= 1e-11 * exact + 1e-17 * q


def _one_step_in_forty_digits(sigma: float, q: float, epsilon: float, swapped: bool) -> float:
    with mpmath.workdps(60):
        z, q, e = mpmath.mpf(1 / sigma), mpmath.mpf(q), mpmath.mpf(epsilon)
        ratio = (mpmath.exp(-e if swapped else e) - 1 + q) / q  # e^u at the threshold
        if ratio <= 0:
            return 0.0 if swapped else float(1 - mpmath.exp(e))
        x = mpmath.log(ratio) / z + z / 2
        if swapped:
            return float(mpmath.ncdf(x) - mpmath.exp(e) * ((1 - q) * mpmath.ncdf(x) + q * mpmath.ncdf(x - z)))
        return float((1 - q - mpmath.exp(e)) * mpmath.ncdf(-x) + q * mpmath.ncdf(z - x))


@pytest.mark.parametrize("q", [1e-20, 1e-12, 1e-3])
def test_mean_height_keeps_its_digits_however_small_q(q):
    assert SubsampledGaussianPair(1.0, q).mean_height_of(0.5, 0.25) == pytest.approx(q / 2, rel=1e-3, abs=0)
