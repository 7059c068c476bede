# SPDX-License-Identifier: Apache-2.0
"""Provides the central limit theorem for trade-off functions, with the error of Berry and Esseen where it is known."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt

import numpy as np
import scipy

from ...support.validate import Refused, plain_number, whole
from ..bracket import Array, Bracket
from ..tradeoff import Gaussian, TradeOff
from ..tradeoff.base import ROUNDING

FURTHEST, LAST = 640.0, 320.0  # privacy loss up to which integrals reach, and where their last part begins
SCALES = (0.0, *(FURTHEST / 2**k for k in range(30)))  # ends of their parts: losses of all sizes are found
ACCURACY = 1e-11  # relative, of a part
CONVERGED = 1e-9  # share of an integral that may lie in the last part
ESSEEN = 0.56  # the constant of the theorem
SYMMETRIC = 1e-6  # largest difference between the directions of a symmetric trade-off function, in units of δ(0)


@dataclass(frozen=True)
class Functionals:
    """The functionals of a symmetric trade-off function f, of its privacy loss ``log |f'(x)|`` for x uniform on [0, 1].

    Args:
        kl: ``-∫ log |f'|``, the Kullback-Leibler divergence.
        kappa2: ``∫ log² |f'|``.
        kappa3: ``∫ |log |f'||³``; infinite, like the next, where it is not known to be finite.
        kappa3bar: ``∫ |log |f'| + kl|³``, around the mean.

    Source: Dong, Roth & Su (2022), JRSS-B, section 3.1.
    """

    kl: float
    kappa2: float
    kappa3: float
    kappa3bar: float


@dataclass(frozen=True)
class TradeOffCLT:
    """The approximation of ``f₁ ⊗ f₂ ⊗ ...`` by ``tradeoff.Gaussian(mu)``, made by `tradeoff_clt`.

    Args:
        mu: ``2 Σ kl / sqrt(Σ κ₂ - Σ kl²)``.
        error: γ, with ``G(α + γ) - γ <= f(α) <= G(α - γ) + γ`` for α from γ to 1 - γ; None where a third moment is
            infinite or not known, or γ is 1/2 or more, so that the theorem says nothing.
    """

    mu: float
    error: float | None

    @property
    def curve(self) -> Gaussian:
        """The approximating trade-off function. **It is no bound**: the truth may be easier to attack."""
        return Gaussian(self.mu)

    def bounds(self, alpha: float | Array) -> Bracket[Array]:
        """Returns the theorem's bounds on the type II errors of the product; 0 and 1 - α where it says nothing.

        They hold up to the accuracy of the integrals, about 1e-9, and are far wider than those of `tradeoff.tensor`.
        """
        values = np.asarray(alpha, float)
        low, high = np.zeros(values.shape), 1 - values
        if self.error is not None:
            inside = (values >= self.error) & (values <= 1 - self.error)
            up, down = (self.curve.at(np.clip(values + move, 0, 1)) for move in (self.error, -self.error))
            low = np.where(inside, np.maximum(np.asarray(up) - self.error, 0), low)
            high = np.where(inside, np.minimum(np.asarray(down) + self.error, high), high)
        return Bracket(low, high)


def functionals(f: TradeOff) -> Functionals:
    """Returns kl, κ₂, κ₃ and the centered κ₃ of a symmetric trade-off function, to about 1e-9, relative.

    They are integrals of the privacy profile δ: with ``l = log |f'|``, and g a smooth function with g(0) = 0,
    ``E g(l) = ∫ δ(t) (e^-t (g'' - g')(t) + (g'' - g')(-t)) dt`` over t > 0. A piecewise linear f has sums.

    Raises:
        Refused: f is not symmetric, or kl or κ₂ is infinite or not known to be finite.

    Source: Dong, Roth & Su (2022), section 3.1, for the functionals; Proposition 6 for the profile.

    Example:
        >>> found = functionals(Gaussian(0.5))
        >>> round(found.kl, 6), round(found.kappa2, 6)  # μ²/2 and μ² + μ⁴/4
        (0.125, 0.265625)
    """
    _check_symmetric(f)
    if f.corners is not None:
        return _of_corners(f)
    kl, kappa2, kappa3 = _integrals(f, lambda t: np.array([1 + 0 * t, 2 - 2 * t, np.sign(t) * (6 * t - 3 * t**2)]))
    if not np.isfinite(kl + kappa2):
        raise Refused(f"functionals: the privacy loss of {f!r} has no known variance: no CLT holds. Use compose.")

    def centered(t: Array) -> Array:
        return np.array([np.sign(t + kl) * (6 * (t + kl) - 3 * (t + kl) ** 2)])

    return Functionals(float(kl), float(kappa2), float(kappa3), float(_integrals(f, centered, -kl)[0]) + kl**3)


def tradeoff_clt(factors: Iterable[TradeOff | tuple[TradeOff, int]]) -> TradeOffCLT:
    """Returns the approximation of a tensor product of trade-off functions by the central limit theorem.

    **An approximation, not a bound**, but for `TradeOffCLT.bounds`. Certified prices never use it: see `compose` and
    `tradeoff.tensor`.

    Args:
        factors: symmetric trade-off functions, or pairs (trade-off function, how often), at least one.

    Raises:
        Refused: a factor is not symmetric (pass ``tradeoff.symmetrized(f)``), has infinite losses or no known variance,
            or there is none but the identity.

    Source: Dong, Roth & Su (2022), JRSS-B, Theorem 5; Bu, Dong, Long & Su (2020), arXiv:1911.11607, section 2.3.

    Example:
        >>> from torch_privacy.privacy import tradeoff
        >>> step = tradeoff.symmetrized(tradeoff.subsampled(Gaussian(1.0), 0.01))
        >>> limit = tradeoff_clt([(step, 10_000)])
        >>> round(limit.mu, 4), round(limit.error, 4)
        (1.6725, 0.0281)
    """
    total = np.zeros(4)  # of kl, κ₂, kl² and the centered κ₃
    for factor in factors:
        f, count = factor if isinstance(factor, tuple) else (factor, 1)
        whole("tradeoff_clt", at_least=1, count=plain_number(count))
        one = functionals(f)
        total += count * np.array([one.kl, one.kappa2, one.kl**2, one.kappa3bar])
    kl, kappa2, squares, third = total.tolist()
    variance = kappa2 - squares
    if not variance > 0:
        raise Refused("tradeoff_clt: the factors reveal nothing, or there is none. Pass one that is no identity.")
    error = ESSEEN * third / variance**1.5
    return TradeOffCLT(2 * kl / sqrt(variance), error if error < 0.5 else None)


def _integrals(f: TradeOff, second: Callable[[Array], Array], kink: float = 0.0) -> Array:
    """Returns ``∫ δ(t) (e^-t c(t) + c(-t)) dt`` over t > 0 for several functions c; infinite if it does not converge.

    Args:
        f: the trade-off function.
        second: the functions c of the loss, ``g'' - g'``.
        kink: a loss at which one of them is not smooth.
    """

    def integrand(t: float) -> Array:
        loss = np.asarray(t)
        return np.asarray(f.delta(t)) * (np.exp(-loss) * second(loss) + second(-loss))

    ends = sorted({*SCALES, abs(kink)})
    size = np.abs([integrand(end) * end for end in ends[1:]]).sum(0).max()
    parts = [
        scipy.integrate.quad_vec(integrand, *pair, epsabs=ACCURACY * size, epsrel=ACCURACY, limit=200)[0]
        for pair in pairwise(ends)
    ]
    last = sum((part for start, part in zip(ends, parts, strict=False) if start >= LAST), np.zeros(len(parts[0])))
    total = sum(parts, np.zeros(len(parts[0])))
    return np.where(np.abs(last) <= CONVERGED * np.abs(total), total, inf)


def _of_corners(f: TradeOff) -> Functionals:
    """Returns the functionals of a piecewise linear trade-off function: sums over its slopes."""
    assert f.corners is not None
    alpha, beta = f.corners
    if alpha[-1] < 1 - ROUNDING:
        raise Refused(f"functionals: {f!r} has outcomes that reveal everything: its kl is infinite. Use compose.")
    width, fall = np.diff(alpha), -np.diff(beta)
    width, fall = width[(width > 0) & (fall > 0)], fall[(width > 0) & (fall > 0)]
    loss = np.log(fall) - np.log(width)
    kl = -float(width @ loss)
    powers = width @ loss**2, width @ np.abs(loss) ** 3, width @ np.abs(loss + kl) ** 3
    return Functionals(kl, *map(float, powers))


def _check_symmetric(f: TradeOff) -> None:
    epsilon = np.append(0.0, np.geomspace(1e-6, 100, 60))
    here, there = np.asarray(f.delta(epsilon)), np.asarray(f.inverse().delta(epsilon))
    if (np.abs(here - there) > SYMMETRIC * here[0] + ROUNDING).any():
        raise Refused(f"functionals: {f!r} is not symmetric. Pass tradeoff.symmetrized(f), which holds both ways.")
