# SPDX-License-Identifier: Apache-2.0
"""Provides the numbers of papers and other libraries: one approximation and three loose bounds.

For a guarantee use `compose`. All but those that take events are for equal Poisson-sampled Gaussian steps; neighbors
differ by one example added or removed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log1p

import numpy as np

from ..support.validate import InvalidValue, in_range, non_negative, plain_numbers, positive, strictly_between, whole
from .bracket import Array, Bracket
from .compose import compose
from .engines.curve import bisect, crossing
from .engines.moment_bound import log_moments_of_gaussian
from .events.base import Event, check_noise, checked_releases
from .events.charged import charged
from .events.gaussian import SubsampledGaussian
from .pairs.gaussian import SubsampledGaussianPair
from .tradeoff import Gaussian

LEAST_NOISE, MOST_NOISE = 0.2, 1e4  # noise multipliers that are searched
NOISE_TOLERANCE = 1e-6  # relative


@plain_numbers
@dataclass(frozen=True)
class CLT:
    """The central-limit approximation of many Poisson-sampled Gaussian steps: Gaussian differential privacy with μ.

    ``δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)``,  ``μ = q sqrt(T (e^{1/σ²} - 1))``

    **An approximation, not a bound on either side.** It lies below the truth in all settings of the papers but one, by
    0.2% to 17% of ε, and above it with little noise: 31.1 against 28.0 at σ = 0.5 after 100 epochs, and 59.3 against
    14.5 at σ = 0.3, q = 256 / 29305, T = 11, δ = 1e-5. It must never be reported as a guarantee; `true_delta` is the δ
    that the steps really have.

    Source: Bu, Dong, Long & Su (2020), arXiv:1911.11607, equation 5.
    """

    noise_multiplier: float
    sampling_probability: float
    num_steps: int

    def __post_init__(self) -> None:
        _check("clt", self.noise_multiplier, self.sampling_probability, self.num_steps)

    @property
    def mu(self) -> float:
        """The parameter of the approximating `tradeoff.Gaussian`."""
        deviation = np.sqrt(np.expm1(min(self.noise_multiplier**-2, 700.0)))
        return float(self.sampling_probability * np.sqrt(self.num_steps) * deviation)

    def delta(self, epsilon: float) -> float:
        """Returns the approximate δ at any real ε."""
        return float(Gaussian(self.mu).delta(epsilon))

    def epsilon(self, delta: float) -> float:
        """Returns the approximate ε >= 0 at δ in (0, 1)."""
        strictly_between("CLT.epsilon", 0, 1, delta=delta)
        return float(crossing(lambda epsilon: self.delta(epsilon) <= delta).high)

    def true_delta(self, epsilon: float) -> Bracket[float]:
        """Returns certified bounds on the true δ of the steps at an ε, such as the ε of the CLT."""
        step = SubsampledGaussian(self.noise_multiplier, self.sampling_probability)
        return compose([(step, self.num_steps)]).delta(epsilon)


def clt(noise_multiplier: float, sampling_probability: float, num_steps: int) -> CLT:
    """Returns the CLT of equal Poisson-sampled Gaussian steps; not a bound on either side, see `CLT`.

    Args:
        noise_multiplier: σ, in [1e-6, 1e6].
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.

    Example:
        >>> limit = clt(noise_multiplier=0.638, sampling_probability=256 / 60000, num_steps=16406)
        >>> round(limit.epsilon(1e-5), 2), f"{limit.true_delta(limit.epsilon(1e-5)).low:.1e}"  # claimed: 1e-5
        (8.7, '4.1e-05')
    """
    return CLT(noise_multiplier, sampling_probability, num_steps)


LARGEST_MU, SMALLEST_MU = 1e3, 1e-9  # between which `clt_noise` searches


@plain_numbers
def clt_noise(epsilon: float, delta: float, sampling_probability: float, num_steps: int) -> float:
    """Returns the noise multiplier at which the CLT gives (ε, δ): ``σ = log(1 + (μ/q)² / T)^(-1/2)``.

    μ is the largest one with ``δ(ε; μ) <= δ``. **An approximation, not a bound:** with this noise the true ε is above
    the one asked for in all settings of the papers but one. Train with the noise of `calibrate`, which is certified.

    Args:
        epsilon: the ε that the CLT shall give, 0 or above.
        delta: in (0, 1).
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.

    Source: Bu, Dong, Long & Su (2020), arXiv:1911.11607, section 4.2, where it replaces the noise of the moments
    accountant.

    Example:
        >>> from torch_privacy.privacy import calibrate
        >>> claimed = clt_noise(1.34, 1e-5, sampling_probability=256 / 60000, num_steps=4688)
        >>> needed = calibrate(1.34, 1e-5, sampling_probability=256 / 60000, num_steps=4688)
        >>> round(claimed, 2), round(needed, 2)
        (1.06, 1.09)
    """
    non_negative("clt_noise", epsilon=epsilon)
    strictly_between("clt_noise", 0, 1, delta=delta)
    in_range("clt_noise", 0, 1, sampling_probability=sampling_probability)
    whole("clt_noise", at_least=1, num_steps=num_steps)
    mu = bisect(lambda mu: float(Gaussian(mu).delta(epsilon)) <= delta, LARGEST_MU, SMALLEST_MU, 1e-6)[1]
    return log1p((mu / sampling_probability) ** 2 / num_steps) ** -0.5


MOMENT_ORDERS = tuple(order / 8 for order in range(1, 257))


@plain_numbers
def moments(
    noise_multiplier: float,
    sampling_probability: float,
    num_steps: int,
    delta: float,
    orders: Sequence[float] | Array = MOMENT_ORDERS,
) -> float:
    """Returns ε of the moments accountant of 2016: a valid but loose upper bound, to compare with published numbers.

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
    return moments_of([(SubsampledGaussian(noise_multiplier, sampling_probability), num_steps)], delta, orders)


@plain_numbers
def moments_of(
    events: Iterable[tuple[Event, int]], delta: float, orders: Sequence[float] | Array = MOMENT_ORDERS
) -> float:
    """Returns ε of the moments accountant for releases of several kinds: their α(λ) add up.

    Args:
        events: pairs (event, how often); each event must be priced as one Poisson-sampled or full-batch Gaussian, such
            as `SubsampledGaussian`, `NoisyCovariance`, `SubsampledBlocks` and `SubsampledGEP`.
        delta: as in `moments`.
        orders: as in `moments`.

    Raises:
        ValueError: if an event is of another kind.

    Example:
        >>> from torch_privacy.privacy import NoisyCovariance
        >>> print(round(moments_of([(NoisyCovariance(7.0), 1), (SubsampledGaussian(4.0, 0.01), 10_000)], 1e-5), 2))
        1.45
    """
    strictly_between("moments", 0, 1, delta=delta)
    values = _check_orders("moments", orders, above=0)
    return float(((_log_moments("moments_of", events, values) - np.log(delta)) / values).min())


@plain_numbers
def moments_delta(
    events: Iterable[tuple[Event, int]], epsilon: float, orders: Sequence[float] | Array = MOMENT_ORDERS
) -> float:
    """Returns δ of the moments accountant at an ε: ``min_λ exp(Σ α(λ) - λ ε)``, at most 1; an upper bound.

    Args:
        events: as in `moments_of`.
        epsilon: at least 0.
        orders: as in `moments_of`.

    Source: Abadi et al. (2016), arXiv:1607.00133, Theorem 2, the tail bound.

    Example:
        >>> steps = [(SubsampledGaussian(1.1, 0.01), 1000)]
        >>> f"{moments_delta(steps, moments_of(steps, 1e-5)):.6g}"
        '1e-05'
    """
    non_negative("moments_delta", epsilon=epsilon)
    values = _check_orders("moments_delta", orders, above=0)
    return float(np.exp(min((_log_moments("moments_delta", events, values) - values * epsilon).min(), 0.0)))


@plain_numbers
def moments_noise(
    target_epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    num_steps: int,
    orders: Sequence[float] | Array = MOMENT_ORDERS,
) -> float:
    """Returns the smallest noise multiplier with which `moments` states at most the target, as the papers plan.

    Args:
        target_epsilon: above 0.
        delta: as in `moments`.
        sampling_probability: as in `moments`.
        num_steps: as in `moments`.
        orders: as in `moments`.

    Raises:
        ValueError: the target needs a noise multiplier above 1e4, or below 0.2.

    Example:
        >>> noise = moments_noise(8.0, 1e-5, sampling_probability=0.01, num_steps=10_000)
        >>> f"{noise:.3f}, {moments(noise, 0.01, 10_000, 1e-5):.4f}"
        '0.962, 8.0000'
    """
    return _noise(
        "moments_noise", partial(moments, orders=orders), target_epsilon, delta, sampling_probability, num_steps
    )


DP_ACCOUNTING_ORDERS = (*(1 + order / 10 for order in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)


@plain_numbers
def rdp(
    noise_multiplier: float,
    sampling_probability: float,
    num_steps: int,
    delta: float,
    orders: Sequence[float] | Array = DP_ACCOUNTING_ORDERS,
) -> float:
    """Returns ε by Rényi differential privacy, the default of most libraries: a valid but loose upper bound.

    ``ε = min_a T R(a) + log(1 - 1/a) - log(a δ) / (a - 1)``, at least 0, with the Rényi divergence
    ``R(a) = α(a - 1) / (a - 1)`` of one step; α as in `moments`, which differs in the last step only.

    Args:
        noise_multiplier: σ, in [1e-6, 1e6].
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.
        delta: in (0, 1).
        orders: the a to try, above 1; the default is that of dp-accounting.

    Source: Mironov, Talwar & Zhang (2019), arXiv:1908.10530; Canonne, Kamath & Steinke (2020), arXiv:2004.00010,
    Proposition 12, for the last step.

    Example:
        >>> round(rdp(0.7, 256 / 60000, 70 * 60000 // 256, delta=1e-5), 2)
        7.84
    """
    _check("rdp", noise_multiplier, sampling_probability, num_steps)
    return rdp_of([(SubsampledGaussian(noise_multiplier, sampling_probability), num_steps)], delta, orders)


@plain_numbers
def rdp_of(
    events: Iterable[tuple[Event, int]], delta: float, orders: Sequence[float] | Array = DP_ACCOUNTING_ORDERS
) -> float:
    """Returns ε by Rényi differential privacy for a composition of different releases.

    Args:
        events: as in `moments_of`.
        delta: as in `rdp`.
        orders: as in `rdp`.

    Raises:
        ValueError: if an event is of another kind.

    Example:
        >>> from torch_privacy.privacy import NoisyCovariance
        >>> print(round(rdp_of([(NoisyCovariance(7.0), 1), (SubsampledGaussian(4.0, 0.01), 10_000)], 1e-5), 2))
        1.2
    """
    strictly_between("rdp", 0, 1, delta=delta)
    values = _check_orders("rdp", orders, above=1)
    divergence = _log_moments("rdp_of", events, values - 1) / (values - 1)
    candidates = divergence + np.log1p(-1 / values) - np.log(delta * values) / (values - 1)
    return max(float(candidates.min()), 0.0)


@plain_numbers
def rdp_noise(
    target_epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    num_steps: int,
    orders: Sequence[float] | Array = DP_ACCOUNTING_ORDERS,
) -> float:
    """Returns the smallest noise multiplier with which `rdp` states at most the target.

    Args:
        target_epsilon: above 0.
        delta: as in `rdp`.
        sampling_probability: as in `rdp`.
        num_steps: as in `rdp`.
        orders: as in `rdp`; with whole ones it takes less time.

    Raises:
        ValueError: the target needs a noise multiplier above 1e4, or below 0.2.

    Example:
        >>> orders = range(2, 64)
        >>> noise = rdp_noise(8.0, 1e-5, sampling_probability=0.01, num_steps=10_000, orders=orders)
        >>> f"{rdp(noise, 0.01, 10_000, 1e-5, orders):.4f}"
        '8.0000'
    """
    accountant = partial(rdp, orders=orders)
    return _noise("rdp_noise", accountant, target_epsilon, delta, sampling_probability, num_steps)


def sampled_epsilon(epsilon: Array, sampling_probability: float) -> Array:
    """Returns ``log(1 + q (e^ε - 1))``, amplification by Poisson sampling; valid for any (ε, δ) if δ becomes q δ."""
    return np.log1p(sampling_probability * np.expm1(epsilon))


def scaled_epsilon(epsilon: Array, sampling_probability: float) -> Array:
    """Returns ``q ε``, the amplification in the baseline of the 2016 paper. **Not valid**: it is too small."""
    return sampling_probability * epsilon


@plain_numbers
def strong_composition(
    noise_multiplier: float,
    sampling_probability: float,
    num_steps: int,
    delta: float,
    amplification: Callable[[Array, float], Array] = sampled_epsilon,
) -> float:
    """Returns ε by strong composition, the baseline of the moments accountant: valid and very loose.

    One step is ``(ε₀, δ₀)``-private with ``ε₀ = sqrt(2 log(1.25/δ₀)) / σ``, after sampling ``(ε₁, q δ₀)``, and T of
    them are ``ε₁ sqrt(2 T log(1/δ')) + T ε₁ (e^ε₁ - 1)`` at ``δ = T q δ₀ + δ'``; the split of δ is the best of many.

    Args:
        noise_multiplier: σ, in [1e-6, 1e6].
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.
        delta: in (0, 1).
        amplification: from (ε₀, q) to ε₁. With the default, `sampled_epsilon`, the answer is a bound. The paper's
            9.34 and 24.22 come out only with `scaled_epsilon`, which is not valid; the valid ones are 26.4 and 82.3.

    Guarantees:
        - with the default never below the true ε: where the formula for ε₀ is invalid (above ε₀ = 1), the exact value
          is used.

    Source: Dwork & Roth (2014), Theorems 3.20 and A.1; Abadi et al. (2016), section 5.1 for the numbers.

    Example:
        >>> setting = dict(noise_multiplier=4.0, sampling_probability=0.01, num_steps=10_000, delta=1e-5)
        >>> round(strong_composition(**setting), 2)
        26.39
        >>> round(strong_composition(**setting, amplification=scaled_epsilon), 2)
        9.35
    """
    _check("strong_composition", noise_multiplier, sampling_probability, num_steps)
    strictly_between("strong_composition", 0, 1, delta=delta)
    share = 1 / (1 + np.exp(-np.linspace(-12, 12, 241)))  # share of δ for the steps
    step_delta = np.minimum(share * delta / (num_steps * sampling_probability), 0.5)
    with np.errstate(over="ignore"):  # where e^ε overflows, the bound is infinite, which is valid
        step = amplification(_step_epsilon(noise_multiplier, step_delta), sampling_probability)
        spread = step * np.sqrt(-2 * num_steps * np.log((1 - share) * delta))
        total = spread + num_steps * step * np.expm1(step)
    return float(total.min())


def _step_epsilon(noise_multiplier: float, deltas: Array) -> Array:
    """Returns ε of one full-batch Gaussian step at each δ: the textbook formula, or the exact value if larger."""
    textbook = np.sqrt(2 * np.log(1.25 / deltas)) / noise_multiplier
    falls_short = Gaussian(1 / noise_multiplier).delta(textbook) > deltas
    for index in np.flatnonzero(falls_short):
        curve, target = Gaussian(1 / noise_multiplier), deltas[index]
        textbook[index] = crossing(lambda epsilon, f=curve, least=target: bool(f.delta(epsilon) <= least)).high
    return textbook


def _check(where: str, noise_multiplier: float, sampling_probability: float, num_steps: int) -> None:
    check_noise(where, noise_multiplier)
    in_range(where, 0, 1, sampling_probability=sampling_probability)
    whole(where, at_least=1, num_steps=num_steps)


def _log_moments(where: str, events: Iterable[tuple[Event, int]], values: Array) -> Array:
    """Returns ``Σ α(λ)`` of all releases, for every λ of the values."""
    total = np.zeros(len(values))
    for event, count in charged(checked_releases(where, events)):
        pair = event.dominating_pair()
        if not isinstance(pair, SubsampledGaussianPair):
            raise ValueError(f"{where}: {event!r} is not one Poisson-sampled Gaussian release. Use compose.")
        total += count * log_moments_of_gaussian(pair.shift, pair.probability, values)
    return total


def _noise(
    where: str, accountant: Callable[..., float], target: float, delta: float, q: float, num_steps: int
) -> float:
    """Returns the smallest noise multiplier with which an accountant states at most the target, to 1e-6."""
    positive(where, target_epsilon=target)
    _check(where, 1.0, q, num_steps)
    strictly_between(where, 0, 1, delta=delta)

    def excess(noise: float) -> float:
        if not LEAST_NOISE <= noise <= MOST_NOISE:
            end, found = ("below", LEAST_NOISE) if noise < LEAST_NOISE else ("above", MOST_NOISE)
            raise InvalidValue(where, "target_epsilon", target, f"needs a noise multiplier {end} {found:g}.")
        return float(np.log(max(accountant(noise, q, num_steps, delta), 1e-300) / target))

    good = min(max(clt_noise(target, delta, q, num_steps), 2 * LEAST_NOISE), MOST_NOISE / 2)
    fails, low = good, excess(good)
    high = low
    while high > 0:
        fails, high, good = good, excess(1.2 * good), 1.2 * good
    while low <= 0:
        good, low, fails = fails, excess(fails / 1.2), fails / 1.2
    low, high = excess(fails), excess(good)
    while good / fails > 1 + NOISE_TOLERANCE:  # nearly a straight line in log-log
        share = min(max(low / (low - high), 0.0), 1.0) + NOISE_TOLERANCE / 2
        middle = fails * (good / fails) ** min(max(share, 1e-3), 1 - 1e-3)
        value = excess(middle)
        if value > 0:
            fails, low, high = middle, value, high / 2
        else:
            good, high, low = middle, value, low / 2
    return good


def _check_orders(where: str, orders: Sequence[float] | Array, *, above: float) -> Array:
    values = np.asarray(orders, float)
    if values.size == 0 or not ((values > above) & np.isfinite(values)).all():
        raise ValueError(f"{where}: orders={orders!r} must be one or more finite numbers greater than {above}.")
    return values
