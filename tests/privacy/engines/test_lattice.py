# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from torch_privacy.privacy.engines.curve import ClosedFormCurve
from torch_privacy.privacy.engines.lattice import Lattice, optimistic, pessimistic
from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair

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
def pair_and_spacing(request):
    noise_multiplier, probability, ratio = CASES[request.param]
    pair = SubsampledGaussianPair(1 / noise_multiplier, probability)
    return pair, ratio * pair.second_moment() ** 0.5


@pytest.mark.thorough(but=3)
def test_one_step_lies_between_its_bounds_in_both_directions(pair_and_spacing):
    pair, spacing = pair_and_spacing
    lower, upper = optimistic(pair, spacing), pessimistic(pair, spacing)
    height = pair.ends[1]
    epsilons = pair.floor + height * np.concatenate([np.geomspace(1e-6, 1, 25), np.linspace(0.01, 1, 15)])
    for direction in (False, True):
        truth = ClosedFormCurve(pair, swapped=direction)
        direction_bounds = (lower.swapped, upper.swapped) if direction else (lower, upper)
        for epsilon in -epsilons if direction else epsilons:
            low, high = truth.delta(float(epsilon))
            rounding = 2e-15 * (1 + np.exp(min(epsilon, 0)))
            assert direction_bounds[0].delta(float(epsilon)) <= high + min(rounding, 1e-10 * high + 1e-18)
            assert direction_bounds[1].delta(float(epsilon)) >= low - min(rounding, 1e-10 * low + 1e-18)


def test_one_step_masses_are_positive_and_add_up(pair_and_spacing):
    pair, spacing = pair_and_spacing
    for lattice in (optimistic(pair, spacing), pessimistic(pair, spacing)):
        assert (lattice.mass >= 0).all()
        for side in (lattice, lattice.swapped):
            assert side.mass.sum() + side.only_p == pytest.approx(1, abs=1e-11)


def test_truncated_outcomes_are_perfectly_telling_in_either_direction():
    upper = pessimistic(SubsampledGaussianPair(1.0, 1.0), 0.05)
    assert 0 < upper.only_p < 1e-22
    assert 0 < upper.only_q < 1e-22
    swapped = Lattice(0.0, 1.0, np.ones(1), only_p=0.1, only_q=0.2).swapped
    assert (swapped.only_p, swapped.only_q) == (0.2, 0.1)
    assert swapped.delta(50.0) == 0.2


@pytest.mark.parametrize("lattice", [optimistic, pessimistic])
def test_one_step_error_falls_with_the_square_of_the_spacing(lattice):
    pair = SubsampledGaussianPair(1.0, 0.1)
    epsilons = np.linspace(0.03, 0.5, 301)  # a grid that no lattice is aligned with
    truth = np.array([ClosedFormCurve(pair, swapped=False).delta(float(e)).low for e in epsilons])

    def error(spacing):
        one_step = lattice(pair, spacing)
        return np.abs([one_step.delta(float(e)) for e in epsilons] - truth).mean()

    assert error(2e-3) / error(4e-3) == pytest.approx(1 / 4, rel=0.05)


def test_pessimistic_lattice_with_much_noise_keeps_all_mass():
    pair = SubsampledGaussianPair(1e-4, 0.5)
    upper = pessimistic(pair, pair.span / 1000)
    assert len(upper.mass) < 1100
    assert upper.mass.sum() + upper.only_p == pytest.approx(1, abs=1e-12)
    assert 0 < upper.only_q < 1e-22
    below = pair.cell_masses(pair.base_loss(np.array([0.0, upper.start - pair.floor])))
    truncated = float(pair.mixed(*below)[0])
    assert upper.mass[0] >= truncated  # the P-mass of the cell that reaches to -∞ moves up, none is lost
