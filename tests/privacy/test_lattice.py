# SPDX-License-Identifier: Apache-2.0
import mpmath
import numpy as np
import pytest

from torch_privacy.privacy.engines.curve import ClosedForm
from torch_privacy.privacy.engines.lattice import Lattice, optimistic, pessimistic
from torch_privacy.privacy.pairs.base import SubsampledNormal

# noise multiplier, sampling probability, spacing / deviation of one step
CASES = {
    "usual": (1.0, 0.01, 1 / 20),
    "Adult": (0.55, 256 / 29305, 1 / 20),
    "little noise": (0.3, 1e-3, 1 / 10),
    "rare and little noise": (0.3, 1e-5, 1 / 10),
    "coarser than the deviation": (0.55, 1e-4, 2.0),
    "much noise": (20.0, 1e-5, 1 / 20),
    "half": (0.7, 0.5, 1 / 50),
    "nearly all": (1.0, 1 - 1e-9, 1 / 50),
    "all": (1.0, 1.0, 1 / 50),
}


@pytest.fixture(params=CASES, ids=str)
def law_and_spacing(request):
    noise_multiplier, probability, ratio = CASES[request.param]
    law = SubsampledNormal(1 / noise_multiplier, probability)
    return law, ratio * law.second_moment() ** 0.5


def test_one_step_lies_between_its_bounds_in_both_directions(law_and_spacing):
    law, spacing = law_and_spacing
    lower, upper = optimistic(law, spacing), pessimistic(law, spacing)
    height = law.ends[1]
    epsilons = law.floor + height * np.concatenate([np.geomspace(1e-6, 1, 25), np.linspace(0.01, 1, 15)])
    for direction in (False, True):
        truth = ClosedForm(law, swapped=direction)
        pair = (lower.swapped, upper.swapped) if direction else (lower, upper)
        for epsilon in -epsilons if direction else epsilons:
            low, high = truth.delta(float(epsilon))
            rounding = 2e-15 * (1 + np.exp(min(epsilon, 0)))
            assert pair[0].delta(float(epsilon)) <= high + min(rounding, 1e-10 * high + 1e-18)
            assert pair[1].delta(float(epsilon)) >= low - min(rounding, 1e-10 * low + 1e-18)


def test_one_step_masses_are_positive_and_add_up(law_and_spacing):
    law, spacing = law_and_spacing
    for lattice in (optimistic(law, spacing), pessimistic(law, spacing)):
        assert (lattice.mass >= 0).all()
        for pair in (lattice, lattice.swapped):
            assert pair.mass.sum() + pair.only_p == pytest.approx(1, abs=1e-11)


def test_truncated_outcomes_are_perfectly_telling_in_either_direction():
    upper = pessimistic(SubsampledNormal(1.0, 1.0), 0.05)
    assert 0 < upper.only_p < 1e-22
    assert 0 < upper.only_q < 1e-22
    swapped = Lattice(0.0, 1.0, np.ones(1), only_p=0.1, only_q=0.2).swapped
    assert (swapped.only_p, swapped.only_q) == (0.2, 0.1)
    assert swapped.delta(50.0) == 0.2


@pytest.mark.parametrize("lattice", [optimistic, pessimistic])
def test_one_step_error_falls_with_the_square_of_the_spacing(lattice):
    law = SubsampledNormal(1.0, 0.1)
    epsilons = np.linspace(0.03, 0.5, 301)  # a grid that no lattice is aligned with
    truth = np.array([ClosedForm(law, swapped=False).delta(float(e)).low for e in epsilons])

    def error(spacing):
        one_step = lattice(law, spacing)
        return np.abs([one_step.delta(float(e)) for e in epsilons] - truth).mean()

    assert error(2e-3) / error(4e-3) == pytest.approx(1 / 4, rel=0.05)


@pytest.mark.parametrize("swapped", [False, True])
def test_closed_form_of_one_step_matches_forty_digits(swapped):
    for sigma, q in [(0.3, 1e-5), (1.0, 0.01), (20.0, 1e-5), (0.7, 0.9)]:
        for epsilon in (1e-7, 1e-3, 0.1, 2.0):
            low, high = ClosedForm(SubsampledNormal(1 / sigma, q), swapped=swapped).delta(epsilon)
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


def test_pessimistic_lattice_with_much_noise_keeps_all_mass():
    law = SubsampledNormal(1e-4, 0.5)
    upper = pessimistic(law, law.span / 1000)
    assert len(upper.mass) < 1100
    assert upper.mass.sum() + upper.only_p == pytest.approx(1, abs=1e-12)
    assert 0 < upper.only_q < 1e-22
    below = law.cell_masses(law.base_loss(np.array([0.0, upper.start - law.floor])))
    truncated = float(law.mixed(*below)[0])
    assert upper.mass[0] >= truncated  # the P-mass of the cell that reaches to -∞ moves up, none is lost


@pytest.mark.parametrize("q", [1e-20, 1e-12, 1e-3])
def test_mean_height_keeps_its_digits_however_small_q(q):
    assert SubsampledNormal(1.0, q).mean_height_of(0.5, 0.25) == pytest.approx(q / 2, rel=1e-3, abs=0)
