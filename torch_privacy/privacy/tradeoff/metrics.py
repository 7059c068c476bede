# SPDX-License-Identifier: Apache-2.0
"""What one wants to know of a trade-off function, in one number. Each is the best that any attacker can do."""

import numpy as np
from scipy.special import ndtri

from ..._validate import strictly_between
from ..bracket import Array, Bracket
from .base import TradeOff
from .closed_form import Gaussian
from .tensor import enclosed


def true_positive_rate(f: TradeOff, false_positive_rate: float | Array) -> float | Array:
    """Largest share of members recognized at this share of false alarms: ``1 - f(α)``."""
    return 1 - f(false_positive_rate)


def advantage(f: TradeOff) -> float:
    """Largest true positive rate less false positive rate of any test: ``δ(0)``, the total variation distance."""
    return float(f.delta(0.0))


def bayes_accuracy(f: TradeOff, prior: float) -> float:
    """Largest probability of a right guess about membership, given the probability of it beforehand.

    ``1 - min_α (π f(α) + (1 - π) α) = 1 - π (1 - δ(log((1 - π)/π)))``; never below ``max(π, 1 - π)``, which one has
    without looking.

    Args:
        f: trade-off function; the mechanism's own direction, or the symmetrised one.
        prior: π, in (0, 1).

    Example:
        >>> [round(bayes_accuracy(Gaussian(1.0), prior), 4) for prior in (0.5, 0.1)]
        [0.6915, 0.9013]
    """
    strictly_between("tradeoff.bayes_accuracy", 0, 1, prior=prior)
    return 1 - prior * (1 - float(f.delta(float(np.log1p(-prior) - np.log(prior)))))


def posterior(f: TradeOff, prior: float, false_positive_rate: float) -> float:
    """Largest probability that one who is called a member is one: ``π (1 - f(α)) / (π (1 - f(α)) + (1 - π) α)``.

    It falls with α: whoever raises false alarms at a rate of at least α can be this sure and no surer. A rate of 0
    would ask for the outcomes that no one else could have caused: probability 1 if there are any.

    Args:
        f: trade-off function.
        prior: π, probability of membership beforehand, in (0, 1).
        false_positive_rate: α, in (0, 1).

    Example:
        >>> round(posterior(Gaussian(1.0), prior=0.01, false_positive_rate=0.001), 3)
        0.156
    """
    strictly_between("tradeoff.posterior", 0, 1, prior=prior, false_positive_rate=false_positive_rate)
    caught = prior * float(true_positive_rate(f, false_positive_rate))
    return caught / (caught + (1 - prior) * false_positive_rate)


def mu(f: TradeOff, floor: float = 1e-6) -> Bracket[float]:
    """The smallest μ with ``G_μ <= f``: Gaussian differential privacy that the mechanism certainly has.

    ``μ = sup_α Φ⁻¹(1 - α) - Φ⁻¹(f(α))`` over the α at which both errors are at least ``floor``; ∞ if there are none.

    Args:
        f: trade-off function.
        floor: in (1e-13, 1/2). Errors below it are left aside: a mechanism that fails entirely with a probability of
            1e-9 has no finite μ at all, and a subsampled one tends to that without sampling at the far end.

    Returns:
        (low, high), exact for piecewise linear f, whose largest difference is at a corner (G_μ is convex).

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
    strictly_between("tradeoff.mu", 1e-13, 0.5, floor=floor)
    if isinstance(f, Gaussian):
        return Bracket(f.mu, f.mu)
    low, high = enclosed(f, pieces=2048)
    return Bracket(*(max(_mu_of_half(side, floor), _mu_of_half(side.inverse(), floor)) for side in (high, low)))


def _mu_of_half(f: TradeOff, floor: float) -> float:
    """The same over the α between ``floor`` and f(α); the others are those of the inverse."""
    assert f.corners is not None
    alpha, beta = f.corners
    fixed = float(np.interp(0.0, alpha - beta, alpha))  # f(α) = α
    if fixed < floor:
        return np.inf
    alpha = np.concatenate([[floor], alpha[(alpha > floor) & (alpha < fixed)], [fixed]])
    return max(float((-ndtri(alpha) - ndtri(np.maximum(np.asarray(f(alpha)), 0))).max()), 0.0)
