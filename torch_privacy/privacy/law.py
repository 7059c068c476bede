# SPDX-License-Identifier: Apache-2.0
"""One step's exact law: the pair of distributions that an attacker must tell apart, in closed form."""

from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

from .tradeoff import Array

# P- and Q-mass beyond this many standard deviations is treated as truncated: 7.6e-24 on each side, per step.
REACH = 10.0

# 1 / noise_multiplier beyond which one step's losses leave floating-point range; ε is above 200 there.
LARGEST_SHIFT = 20.0


def normal_mass(low: Array, high: Array) -> Array:
    """Mass of N(0, 1) in [low, high], low <= high, with relative accuracy in both tails."""
    on_the_right = low > 0
    return np.where(on_the_right, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


@dataclass(frozen=True)
class SubsampledNormal:
    """The pair ``P = (1 - q) N(0, 1) + q N(z, 1)`` against ``Q = N(0, 1)``: one Poisson-sampled Gaussian release.

    This is the *remove* direction; *add* is the same pair swapped. With x drawn from P or Q:

    - base loss ``u = z x - z²/2``, the log-likelihood ratio of N(z, 1) against N(0, 1);
    - privacy loss ``l = log(1 - q + q e^u)``, increasing in u and above its edge ``log(1 - q)``.

    Losses are written as ``l = floor + height``. For q < 1 the floor is the edge, whence
    ``e^u = (1 - q) / q * (e^height - 1)``: no digit is lost however small q or the height.
    For q = 1 there is no edge, and the floor is where Q has lost all but 7.6e-24 of its mass.

    Args:
        shift: z = 1 / noise_multiplier.
        probability: q, in (0, 1].
    """

    shift: float
    probability: float

    @property
    def floor(self) -> float:
        """The loss that heights are measured from."""
        if self.probability == 1:
            return -self.shift * REACH - self.shift**2 / 2
        return float(np.log1p(-self.probability))

    def base_loss(self, height: Array) -> Array:
        """Base loss u at which the privacy loss is ``floor + height``, for heights of 0 and above."""
        if self.probability == 1:
            return self.floor + height
        with np.errstate(divide="ignore"):  # height 0 is u = -∞
            return np.log1p(-self.probability) - np.log(self.probability) + height + np.log(-np.expm1(-height))

    def height(self, x: Array) -> Array:
        """Privacy loss of the outcome x, less the floor; the inverse of `base_loss`."""
        u = self.shift * x - self.shift**2 / 2
        if self.probability == 1:
            return u - self.floor
        return np.logaddexp(0, u + np.log(self.probability) - np.log1p(-self.probability))

    def mean_height(self, base: float, shifted: float) -> float:
        """Log of the mean likelihood ratio, less the floor, of what has these masses under N(0, 1) and N(z, 1)."""
        if self.probability == 1:
            return float(np.log(shifted / base)) - self.floor
        return float(np.log1p(self.probability / (1 - self.probability) * shifted / base))

    @property
    def span(self) -> float:
        """Distance between the largest and the smallest loss within REACH."""
        ends = self.height(np.array([-REACH, self.shift + REACH]))
        return float(ends[1] - ends[0])

    def outcome(self, u: Array) -> Array:
        """The x at which the base loss is u."""
        return u / self.shift + self.shift / 2

    def cell_masses(self, u: Array) -> tuple[Array, Array]:
        """Masses under N(0, 1) and N(z, 1) of the cells between consecutive base losses ``u``."""
        x = self.outcome(u)
        return normal_mass(x[:-1], x[1:]), normal_mass(x[:-1] - self.shift, x[1:] - self.shift)

    def mixed(self, base: Array, shifted: Array) -> Array:
        """P-mass of what has mass ``base`` under N(0, 1) and ``shifted`` under N(z, 1)."""
        return (1 - self.probability) * base + self.probability * shifted

    def second_moment(self) -> float:
        """``E_P[l²]``, one step's share of the composed variance (it only steers resolutions: 1% is plenty)."""
        x = np.linspace(-REACH, self.shift + REACH, 400)
        losses = self.floor + self.height((x[:-1] + x[1:]) / 2)
        masses = self.mixed(*self.cell_masses(self.shift * x - self.shift**2 / 2))
        return float((masses * losses**2).sum())

    def remove_tails(self, epsilon: Array) -> tuple[Array, Array, Array]:
        """Exact hockey stick of P against Q at e^ε as ``gain - loss``, and the largest exponent that was taken.

        ``δ(ε) = q (N_z - e^u N_0)(x > x(u))`` with u the base loss of ε; ``1 - e^ε`` below the edge.
        """
        x, u, below = self._threshold(epsilon)
        gain = np.where(below, -np.expm1(np.minimum(epsilon, 0)), self.probability * ndtr(self.shift - x))
        # In truth e^u N_0 <= N_z there; the minimum only catches rounding errors of huge exponents.
        log_loss = np.minimum(u + log_ndtr(-x), log_ndtr(self.shift - x))
        loss = np.where(below, 0.0, self.probability * np.exp(log_loss))
        return gain, loss, np.abs(u) + np.abs(log_ndtr(-x))

    def add_tails(self, epsilon: Array) -> tuple[Array, Array, Array]:
        """The same for Q against P: ``δ(ε) = q e^ε (e^u N_0 - N_z)(x < x(u))``, u the base loss of -ε."""
        x, u, beyond = self._threshold(-epsilon)
        log_weight = np.minimum(epsilon + u, -np.log(self.probability))  # q e^(ε + u) = 1 - (1 - q) e^ε is at most 1
        log_gain = log_weight + log_ndtr(x)
        log_loss = np.minimum(epsilon + log_ndtr(x - self.shift), log_gain)
        gain, loss = (np.where(beyond, 0.0, self.probability * np.exp(tail)) for tail in (log_gain, log_loss))
        return gain, loss, np.abs(epsilon) + np.abs(u) + np.abs(log_ndtr(x - self.shift))

    def _threshold(self, loss: Array) -> tuple[Array, Array, Array]:
        """Outcome and base loss at a privacy loss; if that lies below the edge, any, and the third is true."""
        height = np.asarray(loss - self.floor, float)
        below_edge = (height <= 0) & (self.probability < 1)
        u = self.base_loss(np.where(below_edge, 1.0, height))
        return self.outcome(u), u, below_edge
