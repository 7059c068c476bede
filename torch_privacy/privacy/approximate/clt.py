# SPDX-License-Identifier: Apache-2.0
"""Provides the approximation of many releases by the central limit theorem: no bound on either side."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import expm1, log1p, sqrt

import numpy as np

from ...support.validate import Refused, in_range, non_negative, plain_numbers, strictly_between, whole
from ..bracket import Bracket
from ..compose import compose
from ..engines.curve import bisect, crossing
from ..engines.log_moments import log_moments
from ..events.base import Event, checked_releases
from ..events.charged import charged
from ..pairs.gaussian import SubsampledGaussianPair
from ..tradeoff import Gaussian

ONE = np.ones(1)


@dataclass(frozen=True)
class CLT:
    """The central-limit approximation of many releases: Gaussian differential privacy with μ.

    ``δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)``,  ``μ² = Σ χ²(P‖Q)``

    With the χ² divergence of each release's pair, in the direction where it is larger. Of T equal Poisson-sampled
    Gaussian steps that is ``μ = q sqrt(T (e^{1/σ²} - 1))``. A Gaussian release without sampling counts with 1/σ², which
    is exact.

    **An approximation, not a bound on either side.** It lies below the truth in all settings of the papers but one, by
    0.2% to 17% of ε, and above it with little noise: 31.1 against 28.0 at σ = 0.5 after 100 epochs, and 59.3 against
    14.5 at σ = 0.3, q = 256 / 29305, T = 11, δ = 1e-5. It must never be reported as a guarantee; `true_delta` is the δ
    that the releases really have.

    Source: Bu, Dong, Long & Su (2020), arXiv:1911.11607, equation 5.
    """

    releases: tuple[tuple[Event, int], ...]

    @property
    def mu(self) -> float:
        """The parameter of the approximating `tradeoff.Gaussian`."""
        squared = sum(count * _divergence(event) for event, count in charged(self.releases))
        return sqrt(min(squared, sys.float_info.max))  # as many steps with hardly any noise exceed it

    def delta(self, epsilon: float) -> float:
        """Returns the approximate δ at any real ε."""
        return float(Gaussian(self.mu).delta(epsilon))

    @plain_numbers
    def epsilon(self, delta: float) -> float:
        """Returns the approximate ε >= 0 at δ in (0, 1)."""
        strictly_between("CLT.epsilon", 0, 1, delta=delta)
        curve = Gaussian(self.mu)
        return float(crossing(lambda epsilon: float(curve.delta(epsilon)) <= delta).high)

    def true_delta(self, epsilon: float) -> Bracket[float]:
        """Returns certified bounds on the true δ of the releases at an ε, such as the ε of the CLT."""
        return compose(self.releases).delta(epsilon)


def clt(events: Iterable[tuple[Event, int]]) -> CLT:
    """Returns the CLT of some releases; not a bound on either side, see `CLT`.

    Args:
        events: pairs (event, how often), at least one.

    Raises:
        Refused: the privacy loss of an event has no second moment, such as that of `SubsampledJL`, or no known one.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> limit = clt([(SubsampledGaussian(noise_multiplier=0.638, sampling_probability=256 / 60000), 16406)])
        >>> round(limit.epsilon(1e-5), 2), f"{limit.true_delta(limit.epsilon(1e-5)).low:.1e}"  # claimed: 1e-5
        (8.7, '4.1e-05')
    """
    releases = tuple(checked_releases("clt", events))
    for event, _ in charged(releases):
        if not np.isfinite(_divergence(event)):
            raise Refused(f"clt: {event!r} has a privacy loss without a known variance: no CLT holds. Use compose.")
    if not any(count for _, count in releases):
        raise Refused("clt: there is no release. Pass one pair (event, how often) or more.")
    return CLT(releases)


def _divergence(event: Event) -> float:
    """Returns ``χ²(P‖Q)`` of one release, or the larger of both directions; 1/σ² of a Gaussian without sampling."""
    pair = event.dominating_pair()
    if isinstance(pair, SubsampledGaussianPair):
        return pair.probability**2 * expm1(min(pair.shift**2, 700.0)) if pair.probability < 1 else pair.shift**2
    return float(np.expm1(log_moments(pair, ONE)[0]))


LARGEST_MU, SMALLEST_MU = 1e3, 1e-9  # between which `clt_noise` searches


@plain_numbers
def clt_noise(epsilon: float, delta: float, sampling_probability: float, num_steps: int) -> float:
    """Returns the noise multiplier at which the CLT gives (ε, δ): ``σ = log(1 + (μ/q)² / T)^(-1/2)``.

    With q = 1 it is ``sqrt(T) / μ``, which is exact. μ is the largest one with ``δ(ε; μ) <= δ``.

    **An approximation, not a bound:** with this noise the true ε is above the one asked for in all settings of the
    papers but one. Train with the noise of `calibrate`, which is certified.

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
    if sampling_probability == 1:
        return sqrt(num_steps) / mu
    return log1p((mu / sampling_probability) ** 2 / num_steps) ** -0.5
