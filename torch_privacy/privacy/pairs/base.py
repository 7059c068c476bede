# SPDX-License-Identifier: Apache-2.0
"""One step's exact law: the pair of distributions (P, Q) that an attacker must tell apart.

The *remove* direction is P against Q, *add* is Q against P (`swapped`). An engine asks a law for what it can use:

- everyone: `tails`, the exact hockey stick of the single step;
- the lattice: masses of cells of losses (`Continuous.cells`), or atoms (`discrete`);
- the contour: points and masses that integrate an analytic law to rounding accuracy (`Continuous.nodes`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr

from ..bracket import Array

# P- and Q-mass beyond this many standard deviations is treated as truncated: 7.6e-24 on each side, per step.
REACH = 10.0

# 1 / noise_multiplier beyond which one step's losses leave floating-point range; ε is above 200 there.
LARGEST_SHIFT = 20.0


class Tails(NamedTuple):
    """A hockey stick ``δ(ε) = gain - loss``, and the largest exponent that its rounding error grows with."""

    gain: Array
    loss: Array
    exponent: Array


class Nodes(NamedTuple):
    """Points of a trapezoid rule of spacing ``step``: losses, log P-masses, and how far neighbors' losses lie apart."""

    losses: Array
    log_mass: Array
    gaps: Array
    step: float


class Law(ABC):
    """One step's pair (P, Q)."""

    @abstractmethod
    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        """Exact hockey stick of P against Q at e^ε, any real ε; of Q against P if swapped."""

    @property
    @abstractmethod
    def span(self) -> float:
        """Distance between the largest and the smallest loss that a lattice must reach."""

    @abstractmethod
    def second_moment(self) -> float:
        """``E_P[l²]``, one step's share of the composed variance (it only steers resolutions: 1% is plenty)."""

    @property
    def symmetric(self) -> bool:
        """Whether both directions have one and the same hockey stick."""
        return False


class Continuous(Law):
    """A pair whose loss has a density and is monotone in some outcome.

    Losses are written as ``l = floor + height``, so that no digit is lost near the floor.
    """

    @property
    @abstractmethod
    def floor(self) -> float:
        """The loss that heights are measured from."""

    @property
    @abstractmethod
    def ends(self) -> tuple[float, float]:
        """Heights of the smallest and the largest loss that a lattice must reach."""

    @property
    def edge(self) -> bool:
        """Whether no loss lies below the floor."""
        return False

    @property
    def smallest(self) -> float:
        """No loss of P lies below this; may be -∞."""
        return self.floor if self.edge else -np.inf

    @abstractmethod
    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        """P-mass of the cells between consecutive heights ``cuts``, and their ``P - e^(floor + at) Q``.

        The second, with one height ``at`` for each cell, keeps its relative accuracy. Cuts may be infinite; for an
        infinite ``at`` it is the P-mass.
        """

    def mean_height(self, low: float, high: float) -> float:
        """Log of the mean likelihood ratio of what lies between two heights, less the floor."""
        cuts = np.array([low, high])
        mass, excess = self.cells(cuts, np.array([high]))
        return high - float(np.log1p(-excess[0] / mass[0]))

    @property
    def coarsest_step(self) -> float:
        """Spacing at which `nodes` integrates every ``e^(s l)`` with real s to rounding accuracy."""
        raise NotImplementedError

    def nodes(self, step: float) -> Nodes | None:
        """A trapezoid rule for ``E_P f(l)``; None if the law is not smooth enough for one.

        Oscillations ``e^(i t l)`` are integrated to rounding accuracy while ``t * gaps + 26.6 step <= 2π``.
        """
        return None

    @property
    def node_rounding(self) -> float:
        """Relative rounding error of the masses of `nodes`, estimated."""
        return 2.0**-50

    @property
    def heavy(self) -> bool:
        """Whether ``E_P e^(s l)`` is infinite for every s > 0, so that only -1 <= s <= 0 are of use."""
        return False

    @property
    def span(self) -> float:
        bottom, top = self.ends
        return top - bottom

    def second_moment(self) -> float:
        bottom, top = self.ends
        cuts = np.concatenate([np.linspace(bottom, top, 401), np.geomspace(max(bottom, 1e-9 * top), top, 400)])
        cuts = np.unique(cuts)
        middle = (cuts[:-1] + cuts[1:]) / 2
        return float((self.cells(cuts, middle)[0] * (self.floor + middle) ** 2).sum())


def normal_mass(low: Array, high: Array) -> Array:
    """Mass of N(0, 1) in [low, high], low <= high, with relative accuracy in both tails."""
    on_the_right = low > 0
    return ndtr(np.where(on_the_right, -low, high)) - ndtr(np.where(on_the_right, -high, low))


class Subsampled(Continuous):
    """The pair ``P = (1 - q) B + q A`` against ``Q = B``: one release on a Poisson sample, base pair (A, B).

    This is the *remove* direction; *add* is the same pair swapped. With x drawn from P or Q:

    - base loss ``u``, the log-likelihood ratio of A against B;
    - privacy loss ``l = log(1 - q + q e^u)``, increasing in u and above its edge ``log(1 - q)``.

    For q < 1 the floor is the edge, whence ``e^u = (1 - q) / q * (e^height - 1)``: no digit is lost however small q or
    the height. For q = 1 there is no edge, and the floor is the smallest base loss that matters.
    """

    probability: float  # q, in (0, 1]

    @property
    @abstractmethod
    def base_ends(self) -> tuple[float, float]:
        """Smallest and largest base loss that a lattice must reach."""

    @abstractmethod
    def cell_masses(self, u: Array) -> tuple[Array, Array]:
        """Masses under B and A of the cells between consecutive base losses ``u``, which may be infinite."""

    def weighted_masses(self, u: Array, at: Array) -> tuple[Array, Array, Array]:
        """`cell_masses`, and ``e^at`` times the mass under B."""
        base, shifted = self.cell_masses(u)
        return base, shifted, np.exp(at) * base

    @property
    def edge(self) -> bool:
        return self.probability < 1

    @property
    def symmetric(self) -> bool:
        return self.probability == 1

    @property
    def floor(self) -> float:
        return self.base_ends[0] if self.probability == 1 else float(np.log1p(-self.probability))

    def base_loss(self, height: Array) -> Array:
        """Base loss u at which the privacy loss is ``floor + height``, for heights of 0 and above."""
        if self.probability == 1:
            return self.floor + height
        with np.errstate(divide="ignore"):  # height 0 is u = -∞
            return np.log1p(-self.probability) - np.log(self.probability) + height + np.log(-np.expm1(-height))

    def height_at(self, u: Array) -> Array:
        """The inverse of `base_loss`."""
        if self.probability == 1:
            return u - self.floor
        return np.logaddexp(0, u + np.log(self.probability) - np.log1p(-self.probability))

    def loss_at(self, u: Array) -> Array:
        """Privacy loss at a base loss, exact to rounding also where it is nearly 0."""
        if self.probability == 1:
            return u
        small = np.log1p(self.probability * np.expm1(np.minimum(u, 1.0)))
        return np.where(u < 1, small, self.floor + self.height_at(np.maximum(u, 1.0)))

    def mean_height_of(self, base: float, shifted: float) -> float:
        """Log of the mean likelihood ratio, less the floor, of what has these masses under B and A."""
        if self.probability == 1:
            return float(np.log(shifted / base)) - self.floor if shifted else -np.inf
        return float(np.log1p(self.probability / (1 - self.probability) * shifted / base))

    def mean_height(self, low: float, high: float) -> float:
        base, shifted = self.cell_masses(self._base_loss(np.array([low, high])))
        return self.mean_height_of(float(base[0]), float(shifted[0]))

    @property
    def ends(self) -> tuple[float, float]:
        bottom, top = self.height_at(np.array(self.base_ends))
        return float(bottom), float(top)

    def mixed(self, base: Array, shifted: Array) -> Array:
        """P-mass of what has mass ``base`` under B and ``shifted`` under A."""
        return (1 - self.probability) * base + self.probability * shifted

    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        base, shifted, weighted = self.weighted_masses(self._base_loss(cuts), self._base_loss(at))
        mass = self.mixed(base, shifted)
        return mass, np.where(at == -np.inf, mass, self.probability * (shifted - weighted))

    def _base_loss(self, heights: Array) -> Array:
        lowest = 0.0 if self.edge else -np.inf
        inner = np.isfinite(heights) & (heights > lowest)
        outer = np.where(heights > lowest, np.inf, -np.inf)
        return np.where(inner, self.base_loss(np.where(inner, heights, 1.0)), outer)

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        return self.add_tails(epsilon) if swapped else self.remove_tails(epsilon)

    def remove_tails(self, epsilon: Array) -> Tails:
        """``δ(ε) = q (A - e^u B)(losses above u)`` with u the base loss of ε; ``1 - e^ε`` below the edge."""
        u, below = self._threshold(epsilon)
        log_base, log_shifted = self.log_tails(u, above=True)
        # In truth e^u B <= A there; the minimum only catches rounding errors of huge exponents.
        log_loss = np.minimum(u + log_base, log_shifted)
        gain = np.where(below, -np.expm1(np.minimum(epsilon, 0)), self.probability * np.exp(log_shifted))
        loss = np.where(below, 0.0, self.probability * np.exp(log_loss))
        return Tails(gain, loss, np.abs(u) + np.abs(log_base))

    def add_tails(self, epsilon: Array) -> Tails:
        """The same for Q against P: ``δ(ε) = q e^ε (e^u B - A)(losses below u)``, u the base loss of -ε."""
        u, beyond = self._threshold(-epsilon)
        log_base, log_shifted = self.log_tails(u, above=False)
        log_weight = np.minimum(epsilon + u, -np.log(self.probability))  # q e^(ε + u) = 1 - (1 - q) e^ε is at most 1
        log_gain = log_weight + log_base
        log_loss = np.minimum(epsilon + log_shifted, log_gain)
        gain, loss = (np.where(beyond, 0.0, self.probability * np.exp(tail)) for tail in (log_gain, log_loss))
        return Tails(gain, loss, np.abs(epsilon) + np.abs(u) + np.abs(log_shifted))

    @abstractmethod
    def log_tails(self, u: Array, *, above: bool) -> tuple[Array, Array]:
        """Log masses under B and A of the base losses above (or below) u."""

    def _threshold(self, loss: Array) -> tuple[Array, Array]:
        """Base loss at a privacy loss; if that lies below the edge, any, and the second is true."""
        height = np.asarray(loss - self.floor, float)
        below_edge = (height <= 0) & self.edge
        return self.base_loss(np.where(below_edge, 1.0, height)), below_edge


@dataclass(frozen=True)
class SubsampledNormal(Subsampled):
    """``P = (1 - q) N(0, 1) + q N(z, 1)`` against ``Q = N(0, 1)``: one Poisson-sampled Gaussian release.

    Base loss ``u = z x - z²/2``.

    Args:
        shift: z = 1 / noise_multiplier.
        probability: q, in (0, 1].
    """

    shift: float
    probability: float

    @property
    def base_ends(self) -> tuple[float, float]:
        return -self.shift * REACH - self.shift**2 / 2, self.shift * REACH + self.shift**2 / 2

    def outcome(self, u: Array) -> Array:
        """The x at which the base loss is u."""
        return u / self.shift + self.shift / 2

    def cell_masses(self, u: Array) -> tuple[Array, Array]:
        x = self.outcome(u)
        return normal_mass(x[:-1], x[1:]), normal_mass(x[:-1] - self.shift, x[1:] - self.shift)

    def log_tails(self, u: Array, *, above: bool) -> tuple[Array, Array]:
        x = self.outcome(u)
        return (log_ndtr(-x), log_ndtr(self.shift - x)) if above else (log_ndtr(x), log_ndtr(x - self.shift))

    @property
    def coarsest_step(self) -> float:
        return min(0.4 / self.shift, 0.2)

    def nodes(self, step: float) -> Nodes:
        x = np.arange(-REACH - (10 if self.probability < 0.5 else 30), REACH + 30 + self.shift, step)
        u = self.shift * x - self.shift**2 / 2
        losses = self.loss_at(u)
        log_mass = losses - x**2 / 2 + np.log(step / np.sqrt(2 * np.pi))
        return Nodes(losses, log_mass, step * self.shift * self.probability * np.exp(u - losses), step)


@dataclass(frozen=True)
class PlusMinus(Continuous):
    """``P = (1 - q) N(0, 1) + q N(z, 1)`` against ``Q = (1 - q) N(0, 1) + q N(-z, 1)``: one example replaced.

    The dominating pair of a Poisson-sampled Gaussian release when an example is replaced by its opposite. It is
    symmetric. The outcome at a privacy loss is ``z x = l / 2 + asinh((1 - q) / q e^(z²/2) sinh(l / 2))``.

    Args:
        shift: z, the largest value of one example over the noise's standard deviation.
        probability: q, in (0, 1].
    Source: Zhu, Dong & Wang (2022), arXiv:2106.08567; Lebeda, Regehr, Kamath & Steinke (2024), arXiv:2405.20769.
    """

    shift: float
    probability: float

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def floor(self) -> float:
        return 0.0

    @property
    def ends(self) -> tuple[float, float]:
        top = float(self.loss_at(np.array(self.shift + REACH)))
        return -top, top

    def loss_at(self, x: Array) -> Array:
        """Privacy loss of the outcome x."""
        parts = []
        for u in (self.shift * x - self.shift**2 / 2, -self.shift * x - self.shift**2 / 2):
            with np.errstate(divide="ignore"):
                large = np.logaddexp(np.log1p(-self.probability), np.log(self.probability) + u)
            parts.append(np.where(u < 1, np.log1p(self.probability * np.expm1(np.minimum(u, 1.0))), large))
        return parts[0] - parts[1]

    def outcome(self, loss: Array) -> Array:
        """The x at which the privacy loss is ``loss``."""
        half = np.minimum(np.abs(loss), 1e6) / 2  # more is infinity, below
        log_ratio = np.log1p(-self.probability) - np.log(self.probability) if self.probability < 1 else -np.inf
        with np.errstate(over="ignore", divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half) / 2)
            log_beta = log_ratio + self.shift**2 / 2 + log_sinh
            asinh = np.where(log_beta > 300, log_beta + np.log(2), np.arcsinh(np.exp(np.minimum(log_beta, 300))))
        return np.where(np.isinf(loss), loss, np.sign(loss) * (half + asinh) / self.shift)

    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        x = self.outcome(cuts)
        null, plus, minus = (normal_mass(x[:-1] + move, x[1:] + move) for move in (0.0, -self.shift, self.shift))
        mass = (1 - self.probability) * null + self.probability * plus
        loss = np.where(np.isfinite(at), at, 0.0)
        excess = self.probability * (plus - np.exp(loss) * minus) - (1 - self.probability) * np.expm1(loss) * null
        return mass, np.where(at == -np.inf, mass, excess)

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        size = np.abs(epsilon)
        x = self.outcome(size)
        q, log_null, log_minus = self.probability, log_ndtr(-x), log_ndtr(-x - self.shift)
        gain = q * ndtr(self.shift - x)
        loss = q * np.exp(size + log_minus) + (1 - q) * -np.expm1(-size) * np.exp(size + log_null)
        loss = np.minimum(loss, gain)  # but for rounding
        # δ(-ε) = 1 - e^-ε + e^-ε δ(ε), the symmetry of the pair
        gain, loss = (np.where(epsilon < 0, np.exp(-size) * tail, tail) for tail in (gain, loss))
        return Tails(gain - np.expm1(np.minimum(epsilon, 0.0)), loss, size + np.abs(log_minus))

    @property
    def coarsest_step(self) -> float:
        return min(0.4 / self.shift, 0.2)

    def nodes(self, step: float) -> Nodes:
        reach = REACH + 20 + self.shift
        x = np.arange(-reach, reach, step)
        q = self.probability
        ahead, behind = (sign * self.shift * x - self.shift**2 / 2 for sign in (1.0, -1.0))
        with np.errstate(divide="ignore"):
            log_mixed, log_other = (np.logaddexp(np.log1p(-q), np.log(q) + u) for u in (ahead, behind))
        log_mass = log_mixed - x**2 / 2 + np.log(step / np.sqrt(2 * np.pi))
        gaps = step * self.shift * q * (np.exp(ahead - log_mixed) + np.exp(behind - log_other))
        return Nodes(self.loss_at(x), log_mass, gaps, step)


@dataclass(frozen=True)
class Symmetrised(Law):
    """The smallest symmetric curve above a remove curve: ``δ(ε)`` of ``law`` for ε >= 0, its reflection below.

    The reflection is ``δ(-ε) = 1 - e^-ε + e^-ε δ(ε)``; what is left of the mass has loss 0.

    Args:
        law: a pair whose remove direction is the dearer one at every ε >= 0.
    """

    law: SubsampledNormal

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def span(self) -> float:
        return 2 * self.law.span

    def second_moment(self) -> float:
        return self.law.second_moment()

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        gain, loss, exponent = self.law.remove_tails(np.abs(epsilon))
        weight = np.exp(np.minimum(epsilon, 0.0))
        return Tails(weight * gain - np.expm1(np.minimum(epsilon, 0.0)), weight * loss, exponent)
