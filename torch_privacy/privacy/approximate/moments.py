# SPDX-License-Identifier: Apache-2.0
"""Provides the moments accountant and Rényi differential privacy: valid upper bounds, looser than `compose`.

Both add up the log moments α(λ) of the releases, and differ in how the sum becomes (ε, δ).
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...support.validate import Refused, non_negative, plain_numbers, strictly_between
from ..bracket import Array
from ..engines.log_moments import log_moments
from ..events.base import Event, checked_releases
from ..events.charged import charged
from ..events.concentrated import ZeroConcentrated
from ..events.counts import DiscreteGaussian

MOMENT_ORDERS = tuple(order / 8 for order in range(1, 257))
DP_ACCOUNTING_ORDERS = (*(1 + order / 10 for order in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)

Orders = Sequence[float] | Array
Conversion = Callable[[Array, Array, float], Array]
"""A function from Rényi divergences, their orders and δ to the ε that each of them implies."""


def mironov_conversion(divergence: Array, order: Array, delta: float) -> Array:
    """Returns the ε that a Rényi divergence D of order a implies at δ: ``D + log(1/δ) / (a - 1)``.

    It is the conversion of the moments accountant, and the one that papers print, such as GEP in its Lemma D.4; never
    below `canonne_conversion`.

    Source: Mironov (2017), arXiv:1702.07476, Proposition 3; Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Lemma D.4.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> steps = [(SubsampledGaussian(noise_multiplier=1.5, sampling_probability=1000 / 50_000), 5000)]
        >>> for conversion in (mironov_conversion, canonne_conversion):
        ...     print(f"{rdp(steps, 1e-5, range(2, 65), conversion):.3f}")
        5.790
        5.165
    """
    return divergence - np.log(delta) / (order - 1)


def canonne_conversion(divergence: Array, order: Array, delta: float) -> Array:
    """Returns the ε that a Rényi divergence D of order a implies: ``D + log(1 - 1/a) - log(a δ) / (a - 1)``.

    Source: Canonne, Kamath & Steinke (2020), arXiv:2004.00010, Proposition 12.
    """
    return divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)


@plain_numbers
def rdp(
    events: Iterable[tuple[Event, int]],
    delta: float,
    orders: Orders = DP_ACCOUNTING_ORDERS,
    conversion: Conversion = canonne_conversion,
) -> float:
    """Returns ε by Rényi differential privacy, the default of most libraries: a valid but loose upper bound.

    The least ε that the conversion gives for ``Σ R(a)`` at any order a, at least 0, with the Rényi divergence
    ``R(a) = α(a - 1) / (a - 1)`` of each release, in the direction where it is larger; α as in `moments_of`.

    Args:
        events: pairs (event, how often).
        delta: in (0, 1).
        orders: the a to try, above 1; the default is that of dp-accounting.
        conversion: from divergences to ε. The default, `canonne_conversion`, is the tighter one; with
            `mironov_conversion` it is the one that papers print.

    Raises:
        Refused: an event has infinite Rényi divergences, such as `SubsampledJL`, or is known by bounds with outcomes
            that reveal everything, such as `BallsAndBins`.

    Source: Mironov, Talwar & Zhang (2019), arXiv:1908.10530.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> step = SubsampledGaussian(noise_multiplier=0.7, sampling_probability=256 / 60000)
        >>> round(rdp([(step, 70 * 60000 // 256)], delta=1e-5), 2)
        7.84
        >>> round(rdp([(step, 70 * 60000 // 256)], delta=1e-5, conversion=mironov_conversion), 2)
        8.68
        >>> from torch_privacy.privacy import Laplace
        >>> round(rdp([(step, 1000), (Laplace(noise_multiplier=20.0), 50)], delta=1e-5), 2)
        3.23
    """
    return _epsilon("rdp", events, delta, _checked("rdp", orders, above=1), conversion)


@plain_numbers
def moments_of(events: Iterable[tuple[Event, int]], delta: float, orders: Orders = MOMENT_ORDERS) -> float:
    """Returns ε of the moments accountant of 2016: a valid but loose upper bound, to compare with published numbers.

    ``ε = min_λ (Σ α(λ) + log 1/δ) / λ``,  ``α(λ) = log max(E_Q[(Q/P)^λ], E_P[(P/Q)^λ])`` with the pair (P, Q) of each
    release. That is `rdp` at the orders λ + 1 with `mironov_conversion`.

    Args:
        events: pairs (event, how often).
        delta: in (0, 1).
        orders: the λ to try, above 0. The default goes up to 32 as in the paper, in steps of an
            eighth; the paper's own table agrees with real orders, integer ones give larger ε.

    Raises:
        Refused: as `rdp`.

    Source: Abadi et al. (2016), arXiv:1607.00133, Theorem 2 and equation 3.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> step = SubsampledGaussian(noise_multiplier=0.7, sampling_probability=256 / 60000)
        >>> round(moments_of([(step, 70 * 60000 // 256)], delta=1e-5), 2)
        8.68
    """
    return _epsilon("moments_of", events, delta, _checked("moments_of", orders, above=0) + 1, mironov_conversion)


@plain_numbers
def moments_delta(events: Iterable[tuple[Event, int]], epsilon: float, orders: Orders = MOMENT_ORDERS) -> float:
    """Returns δ of the moments accountant at an ε: ``min_λ exp(Σ α(λ) - λ ε)``, at most 1; an upper bound.

    Args:
        events: as in `moments_of`.
        epsilon: at least 0.
        orders: as in `moments_of`.

    Raises:
        Refused: as `rdp`.

    Source: Abadi et al. (2016), arXiv:1607.00133, Theorem 2, the tail bound.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> steps = [(SubsampledGaussian(1.1, 0.01), 1000)]
        >>> f"{moments_delta(steps, moments_of(steps, 1e-5)):.6g}"
        '1e-05'
    """
    non_negative("moments_delta", epsilon=epsilon)
    values = _checked("moments_delta", orders, above=0)
    return float(np.exp(min((_log_moments("moments_delta", events, values) - values * epsilon).min(), 0.0)))


def _epsilon(
    where: str, events: Iterable[tuple[Event, int]], delta: float, orders: Array, conversion: Conversion
) -> float:
    """Returns the least ε at any of the Rényi orders."""
    strictly_between(where, 0, 1, delta=delta)
    divergence = _log_moments(where, events, orders - 1) / (orders - 1)
    return max(float(conversion(divergence, orders, delta).min()), 0.0)


def _log_moments(where: str, events: Iterable[tuple[Event, int]], values: Array) -> Array:
    """Returns ``Σ α(λ)`` of all releases, for every λ of the values."""
    total = np.zeros(len(values))
    for event, count in charged(checked_releases(where, events)):
        rho = _concentration(event)
        if rho is not None:
            found = values * (values + 1) * rho
        else:
            found = log_moments(event.dominating_pair(), values)
        if count and not np.isfinite(found).any():
            raise Refused(
                f"{where}: {event!r} has no finite moments at these orders: its losses are heavy-tailed, or some "
                "outcomes reveal everything. Use compose."
            )
        total += count * found if count else 0.0
    return total


def _concentration(event: Event) -> float | None:
    """Returns a ρ with which Rényi divergences of every order a are at most a ρ; None where the pair has better ones.

    The pair of discrete Gaussian noise lumps its tails. The noise itself is s²/(2σ²)-concentrated (Canonne, Kamath &
    Steinke 2020, arXiv:2004.00010, Theorem 4).
    """
    if isinstance(event, ZeroConcentrated) and event.delta == 0:
        return event.rho
    if isinstance(event, DiscreteGaussian):
        return (event.sensitivity / event.noise_stddev) ** 2 / 2
    return None


def _checked(where: str, orders: Orders, *, above: float) -> Array:
    values = np.asarray(orders, float)
    if values.size == 0 or not ((values > above) & np.isfinite(values)).all():
        raise ValueError(f"{where}: orders={orders!r} must be one or more finite numbers greater than {above}.")
    return values
