# SPDX-License-Identifier: Apache-2.0
"""Provides the oracle of the contour engine: δ(ε) of Poisson-sampled Gaussian steps with 30 digits, by mpmath."""

import mpmath
import numpy as np

MOST = 400  # points of the integral; cases that need more are skipped
DIGITS = 30


def exact_delta(noise: float, q: float, steps: int, epsilon: float, *, swapped: bool = False) -> float | None:
    """Returns δ(ε) rounded to a float, or None where this simple rule needs too many points.

    The same integral as the engine's on another line, with another spacing, in arithmetic of 30 digits.
    """
    c, period, end = _line(noise, q, steps, epsilon, swapped)
    count = int(end * period / 6.28) + 2
    if count > MOST:
        return None
    with mpmath.workdps(DIGITS):
        losses, mass = _nodes(noise, q, swapped, end)
        weights = [m * mpmath.exp(c * loss) for loss, m in zip(losses, mass, strict=True)]
        moment = mpmath.fsum(weights)
        kept = [
            (loss, w / moment) for loss, w in zip(losses, weights, strict=True) if w > moment * mpmath.mpf(10) ** -27
        ]
        spacing = 2 * mpmath.pi / period
        turns = [mpmath.expj(spacing * loss) for loss, _ in kept]
        terms, total = [mpmath.mpc(w) for _, w in kept], mpmath.mpf(0)
        for k in range(count):
            s = mpmath.mpc(c, k * spacing)
            value = mpmath.fsum(terms) ** steps * mpmath.expj(-k * spacing * epsilon) / (s * (s + 1))
            total += value.real / (2 if k == 0 else 1)
            terms = [term * turn for term, turn in zip(terms, turns, strict=True)]
        return float(moment**steps * mpmath.exp(-c * mpmath.mpf(epsilon)) * total * spacing / mpmath.pi)


def _nodes(noise, q, swapped, end):
    shift, probability = 1 / mpmath.mpf(noise), mpmath.mpf(q)
    step = mpmath.mpf(min(0.15, 0.3 * noise, 6.2 / (end / noise + 30)))
    x = [step * k for k in range(int(-13 / step), int((30 + shift) / step))]
    ratio = [1 - probability + probability * mpmath.exp(shift * at - shift**2 / 2) for at in x]
    losses = [mpmath.log(r) for r in ratio]
    normal = [step * mpmath.npdf(at) for at in x]
    if swapped:
        return [-loss for loss in losses], normal
    return losses, [r * m for r, m in zip(ratio, normal, strict=True)]


def _line(noise, q, steps, epsilon, swapped):
    """Returns c, a period with aliases below 1e-20, and the t beyond which the integrand is below 1e-25."""
    x = np.arange(-13, 30 + 1 / noise, 0.02)
    u = x / noise - noise**-2 / 2
    loss = np.logaddexp(np.log1p(-q) if q < 1 else -np.inf, np.log(q) + u)
    log_mass = -(x**2) / 2 + np.log(0.02 / np.sqrt(2 * np.pi)) + (0 if swapped else loss)
    loss = -loss if swapped else loss
    tilts = np.geomspace(1e-3, 200, 150)
    exponents = log_mass + tilts[:, None] * loss
    log_moment = steps * np.log(np.exp(exponents - exponents.max(1)[:, None]).sum(1)) + steps * exponents.max(1)
    chernoff = log_moment - tilts * epsilon
    best = int(np.argmin(chernoff - np.log(tilts * (1 + tilts))))
    c = float(tilts[best])
    aliases = (chernoff[best + 1 :] - chernoff.min() + 60) / (tilts[best + 1 :] - c)
    period = max(60 / c, float(aliases.min()))
    w = np.exp(exponents[best] - exponents[best].max())
    w /= w.sum()
    deviation = float(np.sqrt(w @ loss**2 - (w @ loss) ** 2))
    end = 10 / (deviation * steps**0.5)
    while end * period < 4 * MOST:
        sizes = [abs(np.exp(1j * t * loss) @ w) for t in np.linspace(end, 1.5 * end, 5)]
        if steps * np.log(max(sizes)) < -60:
            break
        end *= 1.2
    return c, period, end
