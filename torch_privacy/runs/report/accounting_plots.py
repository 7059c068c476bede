# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the accounting commands' ``--plot``."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from torch_privacy import privacy
from torch_privacy.privacy.comparison import Claim
from torch_privacy.privacy.rounding import round_up, scientific, short
from torch_privacy.privacy.summary import Releases, compose_steps, equal_steps, limit_of, moments_or_none
from torch_privacy.runs.report import figures

TANGENT_DELTA = 1e-5  # delta of the (epsilon, delta) drawn next to a trade-off curve


def profile_figure(releases: Releases, mark: figures.Mark) -> Figure:
    """Draws ε at every δ: certified, and by the accountants of papers that know such releases."""
    profile, limit = privacy.compose(releases), limit_of(releases)
    delta = np.geomspace(1e-10, 1e-2, 33)
    low, high = np.array([profile.epsilon(value) for value in delta.tolist()]).T
    curves: dict[str, Any] = {"certified": (delta, privacy.Bracket(low, high))}
    if limit is not None:
        approximation = np.array([limit.epsilon(value) for value in delta.tolist()])
        curves["CLT: an approximation, no bound"] = delta, approximation
    moments = [moments_or_none(releases, value) for value in delta.tolist()]
    if None not in moments:
        curves["moments accountant"] = delta, np.array(moments)
    return figures.profile_plot(curves, title=in_words(releases), marks=[mark])


def calibration_figure(
    noise_multiplier: float, sampling_probability: float, num_steps: int, delta: float, target: float
) -> Figure:
    """Draws ε over noise multipliers around the calibrated one."""
    noise = noise_multiplier * np.geomspace(0.7, 2, 40)
    low, high = np.array([compose_steps(float(s), sampling_probability, num_steps).epsilon(delta) for s in noise]).T
    chosen = figures.Mark(
        noise_multiplier, target, f"noise multiplier {noise_multiplier:.4g}\nepsilon at most {target:g}"
    )
    title = f"{num_steps:,} steps, q = {sampling_probability:.4g}, delta = {short(delta)}"
    return figures.noise_plot(noise, privacy.Bracket(low, high), chosen, target, title=title)


def tradeoff_figure(releases: Releases) -> Figure:
    """Draws the trade-off function, an (ε, δ) pair tangent to it, and the largest Gaussian one below it."""
    profile = privacy.compose(releases)
    curve = profile.tradeoffs["symmetrized"]
    gaussian, epsilon = profile.mu().high, profile.epsilon(TANGENT_DELTA).high
    curves: dict[str, Any] = {"these releases": curve}
    if np.isfinite(gaussian):
        curves[f"Gaussian, mu = {round_up(gaussian)}"] = privacy.tradeoff.Gaussian(gaussian)
    if np.isfinite(epsilon):
        name = f"epsilon = {round_up(epsilon)}, delta = {TANGENT_DELTA:g}"
        curves[name] = privacy.tradeoff.EpsilonDelta(epsilon, TANGENT_DELTA)
    return figures.tradeoff_plot(curves, title=in_words(releases))


def claims_figure(claims: list[Claim], title: str) -> Figure:
    """Draws every accountant's finite ε next to the certified one."""
    known = [
        (claim.accountant, claim.epsilon)
        for claim in claims
        if claim.epsilon is not None and np.isfinite(claim.epsilon)
    ]
    certified = privacy.Bracket(claims[0].low or 0.0, claims[0].epsilon or 0.0)
    names, values = zip(*known, strict=True)
    return figures.claims_plot(names, values, certified, title=title)


def epsilon_mark(epsilon: privacy.Bracket[float], delta: float) -> figures.Mark:
    """Returns the point that ``epsilon`` reports."""
    return figures.Mark(delta, epsilon.high, f"at most {round_up(epsilon.high)} at {short(delta)}")


def delta_mark(epsilon: float, delta: privacy.Bracket[float]) -> figures.Mark:
    """Returns the point that ``delta`` reports."""
    return figures.Mark(delta.high, epsilon, f"at most {scientific(delta.high)} at {round_up(epsilon)}")


def in_words(releases: Releases) -> str:
    """Returns a heading for some releases."""
    steps = equal_steps(releases)
    if steps is None:
        return f"{sum(count for _, count in releases):,} releases of {len({event for event, _ in releases})} kinds"
    noise_multiplier, sampling_probability, num_steps = steps
    return f"{num_steps:,} steps, noise multiplier {noise_multiplier:.4g}, q = {sampling_probability:.4g}"
