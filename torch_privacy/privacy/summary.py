# SPDX-License-Identifier: Apache-2.0
"""Summarizes a training's privacy in the numbers to report: for the command line, the run folder and the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR
from math import isfinite
from typing import Any

import numpy as np

from torch_privacy import privacy
from torch_privacy.privacy.events.base import chosen_fields, releases_to_json
from torch_privacy.privacy.rounding import round_down, round_up, scientific, short
from torch_privacy.support.validate import InvalidValue, Refused

FALSE_POSITIVE_RATES = (1e-2, 1e-3, 1e-4)  # at which the attacker's true positive rate is reported
FALSE_POSITIVE_RATE = FALSE_POSITIVE_RATES[0]  # where there is room for one
FLOOR = 1e-6  # of the errors at which mu holds
FALSE_POSITIVES = f"{100 * FALSE_POSITIVE_RATE:g} %"

Releases = Sequence[tuple[privacy.Event, int]]  # events, and how often each


@dataclass(frozen=True)
class Summary:
    """The certified interval of some releases, and the ε of other accountants for comparison.

    Guarantees:
        - ``epsilon_high`` is never below the true epsilon at ``delta``, no ``high`` of ``attacker`` below what the best
          attacker reaches; ``clt_epsilon`` is an approximation without any guarantee.
    """

    releases: Releases
    delta: float
    epsilon_low: float
    epsilon_high: float
    clt_epsilon: float | None  # None if the central limit theorem does not hold; so is mu
    moments_epsilon: float | None  # None if a release has no finite moments
    mu: float | None  # mu of the central limit theorem
    attacker: dict[str, Any]  # see `attacker_as_json`

    @property
    def true_positive_rate_high(self) -> float:
        """Returns the largest true positive rate at FALSE_POSITIVE_RATE."""
        return self.attacker["true_positive_rates"][0]["high"]

    def as_json(self) -> dict[str, Any]:
        """Returns nested plain values, as in ``results.json`` and under ``--json``; null stands for infinity."""
        profile = privacy.compose(self.releases)
        return {
            "neighboring_relation": profile.neighboring_relation.value,
            "sampler": profile.sampler,
            **releases_as_json(self.releases),
            "delta": self.delta,
            "epsilon": interval_as_json(privacy.Bracket(self.epsilon_low, self.epsilon_high)),
            "clt": {
                "epsilon": finite_or_none(self.clt_epsilon),
                "mu": finite_or_none(self.mu),
                "note": "an approximation, not a bound",
            },
            "moments_accountant": {
                "epsilon": finite_or_none(self.moments_epsilon),
                "note": "a bound, looser than needed",
            },
            "attacker": self.attacker,
        }


def interval_as_json(interval: privacy.Bracket[float]) -> dict[str, float | None]:
    """Returns both ends of a certified interval; null stands for infinity."""
    return {side: finite_or_none(value) for side, value in interval._asdict().items()}


def finite_or_none(value: float | None) -> float | None:
    """Returns a number, or None for one that is not finite: JSON has no such number."""
    return value if value is not None and isfinite(value) else None


def equal_releases(noise_multiplier: float, sampling_probability: float, num_steps: int) -> Releases:
    """Returns the releases of equal Poisson-sampled Gaussian steps."""
    return [(privacy.SubsampledGaussian(noise_multiplier, sampling_probability), num_steps)]


def equal_steps(releases: Releases) -> tuple[float, float, int] | None:
    """Returns (noise multiplier, sampling probability, number) if the releases are `equal_releases`, else None."""
    event, count = releases[0] if len(releases) == 1 else (None, 0)
    if not isinstance(event, privacy.SubsampledGaussian):
        return None
    return event.noise_multiplier, event.sampling_probability, count


def releases_as_json(releases: Releases) -> dict[str, Any]:
    """Returns releases as plain values, with noise and sampling of equal steps beside them."""
    steps = equal_steps(releases)
    return {
        **({} if steps is None else dict(zip(("noise_multiplier", "sampling_probability"), steps, strict=False))),
        "num_steps": sum(count for _, count in releases),
        "releases": releases_to_json(releases),
    }


def releases_from_json(content: dict[str, Any]) -> Releases:
    """Returns the releases that ``Summary.as_json`` or a statement lists; a ``ValueError`` if one has no price."""
    found = [(privacy.event_from_dict(release["event"]), release["count"]) for release in content["releases"]]
    return privacy.compose(found).events


def compose_steps(noise_multiplier: float, sampling_probability: float, num_steps: int) -> privacy.Profile:
    """Returns the privacy profile of `equal_releases`."""
    return privacy.compose(equal_releases(noise_multiplier, sampling_probability, num_steps))


def limit_of(releases: Releases) -> privacy.CLT | None:
    """Returns the central-limit approximation of some releases; None if the theorem does not hold for them."""
    try:
        return privacy.clt(releases)
    except Refused:
        return None


def summarize(releases: Releases, delta: float) -> Summary:
    """Returns every number to report about some releases, at one delta."""
    profile, limit = privacy.compose(releases), limit_of(releases)
    epsilon = profile.epsilon(delta)
    return Summary(
        releases=releases,
        delta=delta,
        epsilon_low=float(epsilon.low),
        epsilon_high=float(epsilon.high),
        clt_epsilon=None if limit is None else float(limit.epsilon(delta)),
        moments_epsilon=moments_or_none(releases, delta),
        mu=None if limit is None else float(limit.mu),
        attacker=attacker_as_json(profile),
    )


def moments_or_none(releases: Releases, delta: float) -> float | None:
    """Returns ε by the moments accountant; None for releases that it cannot price."""
    try:
        return privacy.moments_of(releases, delta)
    except Refused:
        return None


def privacy_lines(summary: Summary) -> list[tuple[str, str]]:
    """Returns the summary as lines of a table: name and value."""
    low, high = round_down(summary.epsilon_low), round_up(summary.epsilon_high)
    lines = [
        (f"epsilon at delta = {short(summary.delta)}, certified", f"[{low}, {high}]; report {high}"),
        *_release_lines(summary.releases),
    ]
    if summary.clt_epsilon is not None:
        clt = f"{summary.clt_epsilon:.3f}, an approximation, not a bound"
        lines += [
            ("epsilon by the central limit theorem", clt),
            ("mu of the central limit theorem", f"{summary.mu:.4g}"),
        ]
    if summary.moments_epsilon is not None:
        lines.append(("epsilon by the moments accountant", f"{round_up(summary.moments_epsilon)}, a looser bound"))
    return [*lines, *attacker_lines(summary.attacker)]


def delta_lines(releases: Releases, epsilon: float) -> list[tuple[str, str]]:
    """Returns δ at an ε as lines of a table: name and value."""
    (low, high), limit = privacy.compose(releases).delta(epsilon), limit_of(releases)
    bracket = f"[{scientific(low, ROUND_FLOOR)}, {scientific(high)}]; report {scientific(high)}"
    lines = [(f"delta at epsilon = {epsilon:g}, certified", bracket), *_release_lines(releases)]
    if limit is not None:
        shown = f"{limit.delta(epsilon):.2e}, an approximation, not a bound"
        lines.append(("delta by the central limit theorem", shown))
    return lines


def _release_lines(releases: Releases) -> list[tuple[str, str]]:
    """Returns neighboring relation, sampler and releases as lines of a table."""
    profile, steps = privacy.compose(releases), equal_steps(releases)
    if steps is None:
        sampler, released = profile.sampler, "; ".join(f"{count} x {_in_brief(event)}" for event, count in releases)
    else:
        sampler = f"{profile.sampler}, probability {steps[1]:.6g} a step"
        released = f"{steps[2]} steps at noise multiplier {steps[0]:.6g}"
    return [
        ("neighboring relation", profile.neighboring_relation.explained(profile.unit)),
        ("sampler", sampler),
        ("releases", released),
    ]


def _in_brief(event: privacy.Event) -> str:
    """Returns an event with numbers of six digits, without its neighboring relation, which has a line of its own."""
    fields = {name: value for name, value in chosen_fields(event).items() if name != "neighboring_relation"}
    shown = [
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value!r}" for name, value in fields.items()
    ]
    return f"{type(event).__name__}({', '.join(shown)})"


def attacker_as_json(profile: privacy.Profile) -> dict[str, Any]:
    """Returns certified intervals of what the best attacker reaches, and of μ with its regret, as plain values."""
    mu = profile.mu(FLOOR)
    return {
        "advantage": _clipped(profile.advantage()),
        "mu": {**interval_as_json(mu), "errors_at_least": FLOOR, "regret": _clipped(profile.regret(FLOOR))},
        "true_positive_rates": [
            {"false_positive_rate": rate, **_clipped(profile.true_positive_rate(rate))} for rate in FALSE_POSITIVE_RATES
        ],
    }


def _clipped(rate: privacy.Bracket[float]) -> dict[str, float]:
    """Returns the bracket of a rate as plain values in [0, 1]."""
    return {side: min(max(float(value), 0.0), 1.0) for side, value in rate._asdict().items()}


def attacker_lines(attacker: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns `attacker_as_json` as lines of a table."""
    caught = [
        (
            f"true positives at {100 * rate['false_positive_rate']:g} % false positives",
            f"at most {percent(rate['high'])}, for any attacker",
        )
        for rate in attacker["true_positive_rates"]
    ]
    return [*caught, *curve_lines(attacker)]


def curve_lines(attacker: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what `attacker_as_json` says of the whole curve as lines of a table."""
    mu, high = attacker["mu"], attacker["mu"]["high"]
    floor = f"{mu['errors_at_least']:g}".replace("e-0", "e-")
    bracket = "none" if high is None else f"[{round_down(mu['low'])}, {round_up(high)}]; report {round_up(high)}"
    return [
        ("true minus false positives, at any rate", f"at most {percent(attacker['advantage']['high'])}"),
        (f"mu (errors of {floor} or more), certified", bracket),
        ("distance to the curve of mu (regret)", f"at most {round_up(mu['regret']['high'], 4)}, in error rates"),
    ]


def percent(share: float) -> str:
    """Returns a share as a percentage, rounded up to a tenth of a percent, or to three digits where it is small."""
    return f"{round_up(100 * share, 1 if share >= 0.01 else 3)} %"


def tradeoff_points(profile: privacy.Profile, alphas: Sequence[float]) -> list[dict[str, float]]:
    """Returns, for each false positive rate alpha, a certified interval of the smallest false negative rate beta."""
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise InvalidValue("tradeoff", "alpha", alpha, "must lie in [0, 1]. It is a rate of false positives.")
    curve = profile.tradeoff(np.asarray(alphas, np.float64))
    return [
        {"alpha": float(alpha), "beta_low": float(low), "beta_high": float(high)}
        for alpha, low, high in zip(alphas, *map(np.atleast_1d, curve), strict=True)
    ]
