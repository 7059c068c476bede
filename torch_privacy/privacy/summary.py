# SPDX-License-Identifier: Apache-2.0
"""A training's privacy in the numbers that one reports: for the command line, the run folder and the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from math import isfinite
from typing import Any

import numpy as np

from torch_privacy import privacy

FALSE_POSITIVE_RATE = 0.01  # where an attacker's power is quoted
FALSE_POSITIVES = f"{100 * FALSE_POSITIVE_RATE:g} %"
LARGE = 1e6  # from here on numbers are written with a power of ten
RELATION = "add or remove one example"  # the neighboring relation of all that is trained here, in words

Releases = Sequence[tuple[privacy.Event, int]]  # events, and how often each


@dataclass(frozen=True)
class Summary:
    """The certified bracket and, by name, what other accountants say about the same releases.

    Guarantees:
        - ``epsilon_high`` is never below the true epsilon at ``delta``, ``true_positive_rate_high`` never below the
          best attacker's power. Nothing of the sort holds for ``clt_epsilon``, which is an approximation.
    """

    releases: Releases
    delta: float
    epsilon_low: float
    epsilon_high: float
    clt_epsilon: float | None  # None unless the releases are equal steps of one subsampled Gaussian; mu, too
    moments_epsilon: float | None  # None unless all releases are subsampled Gaussians
    mu: float | None  # of the central limit theorem
    true_positive_rate_low: float  # at FALSE_POSITIVE_RATE
    true_positive_rate_high: float

    def as_json(self) -> dict[str, Any]:
        """Nested plain values, as in ``results.json`` and under ``--json``; null stands for infinity."""
        profile, steps = privacy.compose(self.releases), equal_steps(self.releases)
        return {
            "neighboring_relation": profile.neighboring_relation.value,
            "sampler": profile.sampler,
            **({} if steps is None else dict(zip(("noise_multiplier", "sampling_probability"), steps, strict=False))),
            "num_steps": sum(count for _, count in self.releases),
            "releases": [{"event": privacy.event_to_dict(event), "count": count} for event, count in self.releases],
            "delta": self.delta,
            "epsilon": {"low": _or_none(self.epsilon_low), "high": _or_none(self.epsilon_high)},
            "clt": {
                "epsilon": _or_none(self.clt_epsilon),
                "mu": _or_none(self.mu),
                "note": "an approximation, not a bound",
            },
            "moments_accountant": {"epsilon": _or_none(self.moments_epsilon), "note": "a bound, looser than needed"},
            "attacker": {
                "false_positive_rate": FALSE_POSITIVE_RATE,
                "true_positive_rate": {"low": self.true_positive_rate_low, "high": self.true_positive_rate_high},
            },
        }


def _or_none(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def equal_releases(noise_multiplier: float, sampling_probability: float, num_steps: int) -> Releases:
    """Equal steps of the Poisson-subsampled Gaussian."""
    return [(privacy.SubsampledGaussian(noise_multiplier, sampling_probability), num_steps)]


def equal_steps(releases: Releases) -> tuple[float, float, int] | None:
    """(noise multiplier, sampling probability, number) of releases that are `equal_releases`; None of any others."""
    (event, count), *others = releases
    if others or not isinstance(event, privacy.SubsampledGaussian):
        return None
    return event.noise_multiplier, event.sampling_probability, count


def releases_from_json(content: dict[str, Any]) -> Releases:
    """The releases that ``Summary.as_json`` wrote."""
    return [(privacy.event_from_dict(release["event"]), release["count"]) for release in content["releases"]]


def compose_steps(noise_multiplier: float, sampling_probability: float, num_steps: int) -> privacy.Profile:
    """Privacy profile of `equal_releases`."""
    return privacy.compose(equal_releases(noise_multiplier, sampling_probability, num_steps))


def summarize(releases: Releases, delta: float) -> Summary:
    """Every number that one reports about some releases, at one delta."""
    profile, steps = privacy.compose(releases), equal_steps(releases)
    epsilon = profile.epsilon(delta)
    power = profile.true_positive_rate(FALSE_POSITIVE_RATE)
    limit = None if steps is None else privacy.clt(*steps)
    return Summary(
        releases=releases,
        delta=delta,
        epsilon_low=float(epsilon.low),
        epsilon_high=float(epsilon.high),
        clt_epsilon=None if limit is None else float(limit.epsilon(delta)),
        moments_epsilon=_moments(releases, delta),
        mu=None if limit is None else float(limit.mu),
        true_positive_rate_low=float(power.low),
        true_positive_rate_high=float(power.high),
    )


def _moments(releases: Releases, delta: float) -> float | None:
    """ε by the moments accountant; None for releases that it does not know."""
    try:
        return privacy.moments_of(releases, delta)
    except ValueError:
        return None


def privacy_lines(summary: Summary) -> list[tuple[str, str]]:
    """The summary as lines of a table: what, and how much."""
    low, high = round_down(summary.epsilon_low), round_up(summary.epsilon_high)
    power = round_up(100 * summary.true_positive_rate_high, 1)
    lines = [
        (f"epsilon at delta = {summary.delta:g}, certified", f"[{low}, {high}]; report {high}"),
        *_what(summary.releases),
    ]
    if summary.clt_epsilon is not None:
        clt = f"{summary.clt_epsilon:.3f}, an approximation, not a bound"
        lines += [
            ("epsilon by the central limit theorem", clt),
            ("mu of the central limit theorem", f"{summary.mu:.4g}"),
        ]
    if summary.moments_epsilon is not None:
        lines.append(("epsilon by the moments accountant", f"{round_up(summary.moments_epsilon)}, a looser bound"))
    return [*lines, (f"true positives at {FALSE_POSITIVES} false positives", f"at most {power} %, whoever attacks")]


def delta_lines(
    noise_multiplier: float, sampling_probability: float, num_steps: int, epsilon: float
) -> list[tuple[str, str]]:
    """δ at an ε as lines of a table: what, and how much."""
    low, high = compose_steps(noise_multiplier, sampling_probability, num_steps).delta(epsilon)
    limit = privacy.clt(noise_multiplier, sampling_probability, num_steps).delta(epsilon)
    bracket = f"[{scientific(low, ROUND_FLOOR)}, {scientific(high)}]; report {scientific(high)}"
    return [
        (f"delta at epsilon = {epsilon:g}, certified", bracket),
        *_what(equal_releases(noise_multiplier, sampling_probability, num_steps)),
        ("delta by the central limit theorem", f"{limit:.2e}, an approximation, not a bound"),
    ]


def _what(releases: Releases) -> list[tuple[str, str]]:
    """What was released, and for which neighbors."""
    profile, steps = privacy.compose(releases), equal_steps(releases)
    if steps is None:
        sampler, released = profile.sampler, "; ".join(f"{count} x {event!r}" for event, count in releases)
    else:
        sampler = f"{profile.sampler}, probability {steps[1]:.6g} a step"
        released = f"{steps[2]} steps at noise multiplier {steps[0]:.6g}"
    return [("neighboring relation", RELATION), ("sampler", sampler), ("releases", released)]


def scientific(value: float, rounding: str = ROUND_CEILING) -> str:
    """Three significant digits on the safe side.

    Example:
        >>> scientific(1.0001e-5), scientific(9.999e-6), scientific(9.999e-6, ROUND_FLOOR), scientific(0.25)
        ('1.01e-5', '1.00e-5', '9.99e-6', '2.50e-1')
    """
    if not 0 < value < 1e300:
        return f"{value:g}"
    exact = Decimal(value)
    rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), rounding)
    exponent = rounded.adjusted()  # one more if 9.999 became 10.00
    digits = rounded.scaleb(-exponent).quantize(Decimal("0.01"))
    return f"{digits}e{exponent}" if exponent else str(digits)


def attacker_as_json(profile: privacy.Profile) -> dict[str, Any]:
    """The largest advantage, and the smallest Gaussian trade-off function below, as certified brackets."""
    mu = profile.mu()
    return {
        "advantage": profile.advantage()._asdict(),
        "mu": {"low": _or_none(mu.low), "high": _or_none(mu.high), "errors_at_least": 1e-6},
    }


def attacker_lines(attacker: dict[str, Any]) -> list[tuple[str, str]]:
    """The same as lines of a table."""
    mu, advantage = attacker["mu"]["high"], attacker["advantage"]["high"]
    return [
        ("true less false positives, whatever the rate", f"at most {round_up(100 * advantage, 1)} %"),
        ("Gaussian mechanism that is no more private", "none" if mu is None else f"mu = {round_up(mu)}"),
    ]


def tradeoff_points(profile: privacy.Profile, alphas: Sequence[float]) -> list[dict[str, float]]:
    """At each false positive rate alpha, the certified bracket of the smallest possible false negative rate beta."""
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise ValueError(f"tradeoff: alpha={alpha!r} must lie in [0, 1]. It is a rate of false positives.")
    curve = profile.tradeoff(np.asarray(alphas, np.float64))
    return [
        {"alpha": float(alpha), "beta_low": float(low), "beta_high": float(high)}
        for alpha, low, high in zip(alphas, *map(np.atleast_1d, curve), strict=True)
    ]


def round_down(value: float, digits: int = 3) -> str:
    """A lower bound in so many decimals, never rounded up."""
    return _directed(value, digits, upward=False)


def round_up(value: float, digits: int = 3) -> str:
    """An upper bound in so many decimals, never rounded down; from a million on in three significant digits.

    Example:
        >>> round_up(11.80701), round_down(11.80799), round_up(3.7865e11)
        ('11.808', '11.807', '3.79e11')
    """
    return _directed(value, digits, upward=True)


def _directed(value: float, digits: int, *, upward: bool) -> str:
    """Decimal text on the safe side of a float, exactly."""
    rounding = ROUND_CEILING if upward else ROUND_FLOOR
    if not isfinite(value):
        return str(value)
    if value >= LARGE:
        return scientific(value, rounding)
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding))
