# SPDX-License-Identifier: Apache-2.0
"""What the accounting commands draw with ``--plot``."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from torch_privacy import privacy
from torch_privacy.privacy.comparison import Claim
from torch_privacy.privacy.summary import compose_steps, round_down, round_up, scientific
from torch_privacy.report import figures as plots

TANGENT_DELTA = 1e-5  # of the (epsilon, delta) that is drawn beside a trade-off curve


def profile_picture(noise_multiplier: float, sampling_probability: float, num_steps: int, marked: plots.Mark) -> Figure:
    """ε at every δ: certified, and by the accountants that papers use."""
    setting = noise_multiplier, sampling_probability, num_steps
    profile, limit = compose_steps(*setting), privacy.clt(*setting)
    delta = np.geomspace(1e-10, 1e-2, 33)
    low, high = np.array([profile.epsilon(value) for value in delta.tolist()]).T
    curves = {
        "certified": (delta, privacy.Bracket(low, high)),
        "CLT: an approximation, no bound": (delta, np.array([limit.epsilon(value) for value in delta.tolist()])),
        "moments accountant": (delta, np.array([privacy.moments(*setting, value) for value in delta.tolist()])),
    }
    return plots.profile_plot(curves, title=_releases(*setting), marks=[marked])


def calibration_picture(
    noise_multiplier: float, sampling_probability: float, num_steps: int, delta: float, target: float
) -> Figure:
    """ε over noise multipliers around the one that reaches a target."""
    noise = noise_multiplier * np.geomspace(0.7, 2, 40)
    low, high = np.array([compose_steps(float(s), sampling_probability, num_steps).epsilon(delta) for s in noise]).T
    chosen = plots.Mark(
        noise_multiplier, target, f"noise multiplier {noise_multiplier:.4g}\nepsilon at most {target:g}"
    )
    title = f"{num_steps:,} steps, q = {sampling_probability:.4g}, delta = {delta:g}"
    return plots.noise_plot(noise, privacy.Bracket(low, high), chosen, target, title=title)


def tradeoff_picture(noise_multiplier: float, sampling_probability: float, num_steps: int) -> Figure:
    """The trade-off curve, the (ε, δ) pair that is one of its tangents, and the smallest Gaussian below it."""
    profile = compose_steps(noise_multiplier, sampling_probability, num_steps)
    curve = profile.tradeoffs["symmetrized"]
    gaussian, epsilon = profile.mu().high, profile.epsilon(TANGENT_DELTA).high
    curves: dict[str, Any] = {"these releases": curve}
    if np.isfinite(gaussian):
        curves[f"Gaussian, mu = {round_up(gaussian)}"] = privacy.tradeoff.Gaussian(gaussian)
    if np.isfinite(epsilon):
        name = f"epsilon = {round_up(epsilon)}, delta = {TANGENT_DELTA:g}"
        curves[name] = privacy.tradeoff.EpsilonDelta(epsilon, TANGENT_DELTA)
    return plots.tradeoff_plot(curves, title=_releases(noise_multiplier, sampling_probability, num_steps))


def claims_picture(claims: list[Claim], title: str) -> Figure:
    """Every accountant's ε that is finite, against the certified one."""
    known = [
        (claim.accountant, claim.epsilon)
        for claim in claims
        if claim.epsilon is not None and np.isfinite(claim.epsilon)
    ]
    certified = privacy.Bracket(claims[0].low or 0.0, claims[0].epsilon or 0.0)
    names, values = zip(*known, strict=True)
    return plots.claims_plot(names, values, certified, title=title)


def epsilon_mark(epsilon: privacy.Bracket[float], delta: float) -> plots.Mark:
    """The point that ``epsilon`` reports."""
    return plots.Mark(delta, epsilon.high, f"at most {round_up(epsilon.high)} at {delta:g}")


def delta_mark(epsilon: float, delta: privacy.Bracket[float]) -> plots.Mark:
    """The point that ``delta`` reports."""
    return plots.Mark(delta.high, epsilon, f"at most {scientific(delta.high)} at {round_down(epsilon)}")


def _releases(noise_multiplier: float, sampling_probability: float, num_steps: int) -> str:
    return f"{num_steps:,} steps, noise multiplier {noise_multiplier:.4g}, q = {sampling_probability:.4g}"
