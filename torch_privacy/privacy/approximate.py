# SPDX-License-Identifier: Apache-2.0
"""What the papers report: an approximation and a loose bound, offered by name. For a guarantee use `compose`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._check import in_range, positive, strictly_between, whole
from .curve import crossing
from .event import check_noise
from .law import LARGEST_SHIFT
from .tradeoff import Array, Gaussian


@dataclass(frozen=True)
class CLT:
    """The central-limit approximation of many Poisson-sampled Gaussian steps: Gaussian differential privacy with μ.

    ``δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)``

    **An approximation, not a bound on either side.** It lies below the truth in every setting of the papers, by 0.2%
    to 17% of ε, and far above it with little noise and few steps: 59.3 against 14.5 at σ = 0.3, q = 256 / 29305, T =
    11, δ = 1e-5. It must never be reported as a guarantee.

    Args:
        mu: ``q sqrt(T (e^{1/σ²} - 1))``, above 0.
    """

    mu: float

    def __post_init__(self) -> None:
        positive("CLT", mu=self.mu)

    def delta(self, epsilon: float) -> float:
        """Approximate δ at any real ε."""
        return float(Gaussian(self.mu).delta(epsilon))

    def epsilon(self, delta: float) -> float:
        """Approximate ε >= 0 at δ in (0, 1)."""
        strictly_between("CLT.epsilon", 0, 1, delta=delta)
        return float(crossing(lambda epsilon: self.delta(epsilon) <= delta).high)


def clt(noise_multiplier: float, sampling_probability: float, num_steps: int) -> CLT:
    """The CLT's μ for equal Poisson-sampled Gaussian steps; not a bound on either side, see `CLT`.

    Source: Bu, Dong, Long & Su (2020), arXiv:1911.11607, equation 5.

    Example:
        >>> round(clt(noise_multiplier=0.55, sampling_probability=256 / 29305, num_steps=2061).epsilon(1e-5), 3)
        10.199
    """
    _check("clt", noise_multiplier, sampling_probability, num_steps)
    deviation = np.sqrt(np.expm1(min(noise_multiplier**-2, 700.0)))
    return CLT(float(sampling_probability * np.sqrt(num_steps) * deviation))


def moments(
    noise_multiplier: float,
    sampling_probability: float,
    num_steps: int,
    delta: float,
    orders: Sequence[float] | Array = tuple(order / 8 for order in range(1, 257)),
) -> float:
    """The moments accountant of 2016: a valid but loose upper bound on ε, kept to compare with published numbers.

    ``ε = min_λ (T α(λ) + log 1/δ) / λ``,  ``α(λ) = log max(E_Q[(Q/P)^λ], E_P[(P/Q)^λ])``,
    with ``P = (1 - q) N(0, 1) + q N(1/σ, 1)``, ``Q = N(0, 1)``.

    Args:
        noise_multiplier: σ, in [1e-6, 1e6].
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.
        delta: in (0, 1).
        orders: the λ to try, above 0. The default goes up to 32 as in the paper, in steps of an
            eighth; the paper's own table agrees with real orders, integer ones give larger ε.

    Source: Abadi et al. (2016), arXiv:1607.00133, Theorem 2 and equation 3.

    Example:
        >>> round(moments(0.7, 256 / 60000, 70 * 60000 // 256, delta=1e-5), 2)
        8.68
    """
    _check("moments", noise_multiplier, sampling_probability, num_steps)
    strictly_between("moments", 0, 1, delta=delta)
    values = np.asarray(orders, float)
    if values.size == 0 or not ((values > 0) & np.isfinite(values)).all():
        raise ValueError(f"moments: orders={orders!r} must be one or more finite numbers greater than 0.")
    alpha = _log_moments(1 / noise_multiplier, sampling_probability, values)
    return float(((num_steps * alpha - np.log(delta)) / values).min())


def _check(where: str, noise_multiplier: float, sampling_probability: float, num_steps: int) -> None:
    check_noise(where, noise_multiplier)
    in_range(where, 0, 1, sampling_probability=sampling_probability)
    whole(where, at_least=1, num_steps=num_steps)


def _log_moments(shift: float, probability: float, orders: Array) -> Array:
    """α(λ) by the trapezoid rule, geometrically convergent: the nearest branch points lie σπ off the axis."""
    if shift > LARGEST_SHIFT:  # out of floating-point range; without sampling α is larger, hence still a bound
        return orders * (orders + 1) / 2 * shift**2
    step = min(0.1, 1 / (4 * shift))
    x = np.arange(-12 - shift * orders.max(), 12 + shift * (orders.max() + 1), step)
    log_q = -(x**2) / 2 + np.log(step / np.sqrt(2 * np.pi))
    with np.errstate(divide="ignore"):  # log 0 = -∞ is right for q = 1
        log_unsampled = np.log1p(-probability)
    loss = np.logaddexp(log_unsampled, np.log(probability) + shift * x - shift**2 / 2)
    add = [np.logaddexp.reduce(log_q - order * loss) for order in orders]
    remove = [np.logaddexp.reduce(log_q + (order + 1) * loss) for order in orders]
    return np.maximum(add, remove)
