# SPDX-License-Identifier: Apache-2.0
"""Computes metrics of a trade-off function: single numbers that bound every attacker."""

import numpy as np
from scipy.special import ndtri

from ...support.validate import non_negative, strictly_between
from ..bracket import Array, Bracket
from .base import TradeOff
from .closed_form import IDENTITY, Gaussian
from .tensor import enclosed


def true_positive_rate(f: TradeOff, false_positive_rate: float | Array) -> float | Array:
    """Returns the largest true positive rate of any test at a false positive rate: ``1 - f(α)``."""
    return 1 - f(false_positive_rate)


def advantage(f: TradeOff) -> float:
    """Returns the largest true positive rate minus false positive rate of any test: ``δ(0)``, the total variation."""
    return float(f.delta(0.0))


def bayes_accuracy(f: TradeOff, prior: float) -> float:
    """Returns the largest probability of a correct guess about membership, given its prior probability.

    ``1 - min_α (π f(α) + (1 - π) α) = 1 - π (1 - δ(log((1 - π)/π)))``; never below ``max(π, 1 - π)``, the accuracy
    of guessing without the release.

    Args:
        f: trade-off function of one direction, or the symmetrized one.
        prior: π, probability of membership before the release, in (0, 1).

    Example:
        >>> [round(bayes_accuracy(Gaussian(1.0), prior), 4) for prior in (0.5, 0.1)]
        [0.6915, 0.9013]
    """
    strictly_between("tradeoff.bayes_accuracy", 0, 1, prior=prior)
    return 1 - prior * (1 - float(f.delta(float(np.log1p(-prior) - np.log(prior)))))


def posterior(f: TradeOff, prior: float, false_positive_rate: float) -> float:
    """Returns the largest probability that an example is a member, given that a test says so.

    ``π (1 - f(α)) / (π (1 - f(α)) + (1 - π) α)``. It falls with α, so it bounds every test with a false positive rate
    of at least α. At a rate of 0 it would be 1 if any outcome is possible for members only.

    Args:
        f: trade-off function.
        prior: π, probability of membership before the test, in (0, 1).
        false_positive_rate: α, in (0, 1).

    Example:
        >>> round(posterior(Gaussian(1.0), prior=0.01, false_positive_rate=0.001), 3)
        0.156
    """
    strictly_between("tradeoff.posterior", 0, 1, prior=prior, false_positive_rate=false_positive_rate)
    caught = prior * float(true_positive_rate(f, false_positive_rate))
    return caught / (caught + (1 - prior) * false_positive_rate)


def mu(f: TradeOff, floor: float = 1e-6) -> Bracket[float]:
    """Returns the smallest μ with ``G_μ <= f``: the mechanism is certainly μ-Gaussian differentially private.

    ``μ = sup_α Φ⁻¹(1 - α) - Φ⁻¹(f(α))`` over the α at which both errors are at least ``floor``; ∞ if there are none.

    Args:
        f: trade-off function.
        floor: in (1e-13, 1/2). Smaller errors are ignored: a mechanism that fails entirely with a probability of 1e-9
            has no finite μ, and a subsampled one approaches its μ without sampling at tiny errors.

    Returns:
        (low, high), exact for piecewise linear f: as G_μ is convex, the largest difference is at a corner.

    Guarantees:
        - with ``high``: no test with both errors above ``floor`` does better than one against G_μ.

    Example:
        >>> from torch_privacy.privacy.tradeoff import JL
        >>> mu(Gaussian(1.5))
        Bracket(low=1.5, high=1.5)
        >>> low, high = mu(JL(1.0, 16))
        >>> round(low, 2), high - low < 1e-3
        (1.38, True)
    """
    check_floor("tradeoff.mu", floor)
    if isinstance(f, Gaussian):
        return Bracket(f.mu, f.mu)
    low, high = enclosed(f, pieces=2048)
    halves = ((side, side.inverse()) for side in (high, low))
    return Bracket(*(max(_mu_where_alpha_is_smaller(half, floor) for half in both) for both in halves))


def check_floor(where: str, floor: float) -> None:
    """Refuses a floor of errors that `mu` cannot take."""
    strictly_between(where, 1e-13, 0.5, floor=floor)


def _mu_where_alpha_is_smaller(f: TradeOff, floor: float) -> float:
    """Returns the same for ``floor <= α <= f(α)``; the inverse covers the other α."""
    assert f.corners is not None
    alpha, beta = f.corners
    fixed = float(np.interp(0.0, alpha - beta, alpha))  # f(α) = α
    if fixed < floor:
        return np.inf
    alpha = np.concatenate([[floor], alpha[(alpha > floor) & (alpha < fixed)], [fixed]])
    return max(float((-ndtri(alpha) - ndtri(np.maximum(np.asarray(f(alpha)), 0))).max()), 0.0)


def regret(f: TradeOff, mu: float) -> Bracket[float]:
    """Returns how far f lies above G_μ: the smallest Δ >= 0 with ``f(α + Δ) - Δ <= G_μ(α)`` for all α.

    Where ``G_μ <= f``, this is what is lost by stating μ in place of f: the best tests make at most Δ more of each of
    the two errors than G_μ says. By duality ``Δ = sup_ε (δ_μ(ε) - δ(ε)) / (1 + e^ε)`` over all real ε, with δ_μ the
    profile of G_μ.

    Args:
        f: trade-off function.
        mu: μ, 0 or above; with ∞ G_μ is 0.

    Returns:
        (low, high), for piecewise linear f exact up to 1e-14: as G_μ is convex, the supremum is at a piece's slope.

    Source: Gomez et al. (2025), arXiv:2503.10945; Kaissis et al. (2024), arXiv:2406.08918, for Δ.

    Example:
        >>> from torch_privacy.privacy.tradeoff import Laplace
        >>> round(regret(Laplace(1.0), mu(Laplace(1.0)).high).high, 3)
        0.037
    """
    if mu != np.inf:
        non_negative("tradeoff.regret", mu=mu)
    low, high = enclosed(f, pieces=2048)
    return Bracket(_regret(low, mu), _regret(high, mu))


def _regret(f: TradeOff, mu: float) -> float:
    assert f.corners is not None
    alpha, beta = f.corners
    losses = np.log(-np.diff(beta)) - np.log(np.diff(alpha))
    gaussian = 1.0 if np.isinf(mu) else (Gaussian(mu) if mu else IDENTITY).delta(losses)
    with np.errstate(over="ignore"):
        return float(((gaussian - np.asarray(f.delta(losses))) / (1 + np.exp(losses))).max(initial=0.0))  # f = 0: none
