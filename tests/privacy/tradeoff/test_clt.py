# SPDX-License-Identifier: Apache-2.0
"""The central limit theorem for trade-off functions: against closed forms, integrals, known limits and products."""

import itertools

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr

from torch_privacy import privacy
from torch_privacy.privacy import tradeoff
from torch_privacy.privacy.tradeoff import JL, EpsilonDelta, Gaussian, Laplace, subsampled, symmetrized


@pytest.mark.parametrize("mu", [1e-3, 0.5, 4.0])
def test_functionals_of_a_gaussian_are_its_closed_forms(mu):
    found = privacy.functionals(Gaussian(mu))
    assert found.kl == pytest.approx(mu**2 / 2, rel=1e-9)
    assert found.kappa2 == pytest.approx(mu**2 + mu**4 / 4, rel=1e-9)
    assert found.kappa3bar == pytest.approx(np.sqrt(8 / np.pi) * mu**3, rel=1e-9)
    third = quad(lambda x: abs(mu * x - mu**2 / 2) ** 3 * np.exp(-(x**2) / 2), -30, 30, points=[mu / 2], limit=400)[0]
    assert found.kappa3 == pytest.approx(third / np.sqrt(2 * np.pi), rel=1e-9)


def test_functionals_of_laplace_noise_are_integrals_of_its_loss():
    shift = 1.3
    powers = {"kl": lambda loss: -loss, "kappa2": lambda loss: loss**2, "kappa3": lambda loss: abs(loss) ** 3}
    kl = shift + np.exp(-shift) - 1
    powers["kappa3bar"] = lambda loss: abs(loss + kl) ** 3
    found = privacy.functionals(Laplace(shift))
    for name, power in powers.items():
        inside = quad(lambda x, g=power: g(2 * x - shift) * np.exp(-x) / 2, 0, shift, points=[shift / 2], limit=400)[0]
        expected = power(-shift) / 2 + inside + power(shift) * np.exp(-shift) / 2
        assert getattr(found, name) == pytest.approx(expected, rel=1e-9), name


def test_functionals_of_estimated_norms_are_moments_of_their_scale():
    """E Z² = r / (r - 2) / σ², E Z⁴ = r² / (r - 2) / (r - 4) / σ⁴."""
    noise, r = 1.5, 40
    square, fourth = r / (r - 2) / noise**2, r**2 / (r - 2) / (r - 4) / noise**4
    found = privacy.functionals(JL(noise, r))
    assert found.kl == pytest.approx(square / 2, rel=1e-8)
    assert found.kappa2 == pytest.approx(square + fourth / 4, rel=1e-8)


def test_limit_of_gaussians_is_exact_and_has_the_published_error():
    limit = privacy.tradeoff_clt([(Gaussian(0.3), 100)])
    assert limit.mu == pytest.approx(3.0, rel=1e-9)
    assert limit.error == pytest.approx(0.56 * np.sqrt(8 / np.pi) / 10, rel=1e-9)
    assert privacy.tradeoff_clt([Gaussian(3.0), Gaussian(4.0)]).mu == pytest.approx(5.0, rel=1e-9)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("mu", [0.5, 1.0])
def test_limit_of_sampled_gaussians_is_the_published_one(mu):
    """Dong, Roth & Su (2022), Theorem 11: q sqrt(n) = 1 gives sqrt(2 (e^μ² Φ(3μ/2) + 3 Φ(-μ/2) - 2)) for n → ∞."""
    published = np.sqrt(2 * (np.exp(mu**2) * ndtr(1.5 * mu) + 3 * ndtr(-0.5 * mu) - 2))
    found = [privacy.tradeoff_clt([(symmetrized(subsampled(Gaussian(mu), q)), round(q**-2))]).mu for q in (1e-2, 1e-4)]
    gaps = np.abs(np.array(found) / published - 1)
    assert gaps[0] < 0.05
    assert gaps[1] < 0.012 * gaps[0]  # it falls with q


def test_functionals_of_pure_privacy_are_sums_of_two_losses():
    epsilon = 0.4
    high, low = (1 / (1 + np.exp(sign * epsilon)) for sign in (-1, 1))
    kl = epsilon * (high - low)
    found = privacy.functionals(EpsilonDelta(epsilon))
    assert (found.kl, found.kappa2, found.kappa3) == pytest.approx((kl, epsilon**2, epsilon**3))
    assert found.kappa3bar == pytest.approx(high * (epsilon - kl) ** 3 + low * (epsilon + kl) ** 3)


@pytest.mark.thorough
@pytest.mark.parametrize("f", [Laplace(0.3), EpsilonDelta(0.2)], ids=["Laplace", "pure"])
def test_bounds_of_berry_and_esseen_enclose_the_product(f):
    product = tradeoff.tensor(f, f)
    for _ in range(6):
        product = privacy.Bracket(*(getattr(tradeoff.tensor(g, g), side) for side, g in product._asdict().items()))
    limit, alpha = privacy.tradeoff_clt([(f, 128)]), np.linspace(0, 1, 201)
    low, high = limit.bounds(alpha)
    assert limit.error < 0.1
    assert (low <= product.high(alpha) + 1e-9).all()
    assert (product.low(alpha) <= high + 1e-9).all()
    assert np.abs(product.low(alpha) - limit.curve(alpha)).max() < limit.error
    inside = (alpha > limit.error) & (alpha < 1 - limit.error)
    assert inside.sum() > 150
    assert (low[~inside] == 0).all()  # where the theorem says nothing
    assert (high[~inside] == 1 - alpha[~inside]).all()
    assert (low[inside] < limit.curve(alpha[inside])).all()
    assert (high[inside] > limit.curve(alpha[inside])).all()


def test_error_is_unknown_without_a_third_moment_and_for_few_factors():
    heavy = privacy.tradeoff_clt([(JL(1.0, 12), 10_000)])
    assert heavy.error is None
    assert privacy.functionals(JL(1.0, 12)).kappa3 == np.inf
    few = privacy.tradeoff_clt([Gaussian(1.0)])
    assert few.error is None
    low, high = few.bounds([0.1, 0.5])
    assert (low.tolist(), high.tolist()) == ([0, 0], [0.9, 0.5])


REFUSED = {
    "one direction": (lambda: [subsampled(Gaussian(1.0), 0.1)], "is not symmetric. Pass tradeoff.symmetrized"),
    "an outcome that reveals everything": (lambda: [EpsilonDelta(1.0, 1e-5)], "its kl is infinite"),
    "no variance": (lambda: [JL(1.0, 2)], "has no known variance"),
    "identity": (lambda: [tradeoff.IDENTITY], "reveal nothing"),
    "nothing": (lambda: [], "reveal nothing"),
    "no count": (lambda: [(Gaussian(1.0), 0)], "count=0 must be an integer of at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_factors_without_a_limit_are_refused(name):
    factors, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        privacy.tradeoff_clt(factors())


@pytest.mark.thorough
def test_limit_of_rare_samples_is_found_at_every_scale():
    """The losses of a step are as small as q."""
    ratios = [
        privacy.functionals(symmetrized(subsampled(Gaussian(1.0), q))).kappa2 / q**2 for q in (1e-2, 1e-3, 1e-4, 1e-5)
    ]
    changes = [abs(later / earlier - 1) for earlier, later in itertools.pairwise(ratios)]
    assert changes[1] < 0.2 * changes[0]
    assert changes[2] < 0.2 * changes[1]
