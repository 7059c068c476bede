# SPDX-License-Identifier: Apache-2.0
"""Provides the pair of a Gaussian release with clip factors from random projections: a scale mixture of normals.

With r projections the squared norm is estimated up to a factor ``s = χ²_r / r``, so one example enters with
``Z = 1 / (σ sqrt(s))`` standard deviations of the noise, Z known to the attacker: the base pair is (Z, N(Z, 1)) against
(Z, N(0, 1)). Z is heavy-tailed, P(Z > z) ~ z^-r. The base loss ``u = Z x - Z²/2`` has densities ``e^(±u/2) E(u)``
under the two, with E even. Everything is integrated over ``u = a sinh(w)``, ``a = sqrt(r) / σ``, in which E is smooth
to rounding accuracy on a grid of a few hundred points.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import scipy
from scipy.special import gammaln, kve

from ..bracket import Array
from .base import UNIT, Nodes, Tails
from .subsampled import SubsampledPair, loss_error

NEGLIGIBLE = -80.0  # log density times loss beyond which a tail ends
LARGEST_LOSS = 3e4  # the lattice counts larger losses as infinite
FURTHEST = 600.0  # largest w; losses there are e^600
MOST_PANELS = 8000  # of width `BaseDensities.panel`, on either side
LATTICE_TAIL = 1e-9  # mass that the lattice may count as infinite, per sampled step


def log_bessel(order: float, x: Array) -> Array:
    """Returns ``log(e^x K_order(x))`` for order > 0 and any x > 0, with a relative accuracy of about 1e-13."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        value = np.log(kve(order, np.minimum(x, 1e5)))
        mu = 4 * order**2
        series = 1 + (mu - 1) / (8 * x) * (1 + (mu - 9) / (16 * x) * (1 + (mu - 25) / (24 * x)))
        large = np.log(np.pi / (2 * x)) / 2 + np.log(np.maximum(series, 1e-300))
        value = np.where(x > np.maximum(1e5, 1e5 * order**2 / 1e4), large, value)
    if order > 60 or not np.isfinite(value).all():
        value = np.where(np.isfinite(value) & (order <= 60), value, _debye(order, x))
    return value


def _debye(order: float, x: Array) -> Array:
    """Returns ``log(e^x K_order(x))`` uniformly for large orders (DLMF 10.41.4, six terms)."""
    z = x / order
    root = np.sqrt(1 + z**2)
    p = 1 / root
    terms = (
        (3 * p - 5 * p**3) / 24,
        (81 * p**2 - 462 * p**4 + 385 * p**6) / 1152,
        (30375 * p**3 - 369603 * p**5 + 765765 * p**7 - 425425 * p**9) / 414720,
        (4465125 * p**4 - 94121676 * p**6 + 349922430 * p**8 - 446185740 * p**10 + 185910725 * p**12) / 39813120,
        (
            1519035525 * p**5
            - 49286948607 * p**7
            + 284499769554 * p**9
            - 614135872350 * p**11
            + 566098157625 * p**13
            - 188699385875 * p**15
        )
        / 6688604160,
    )
    series = 1 + sum((-1) ** k * term / order**k for k, term in enumerate(terms, start=1))
    # η = root + log(z / (1 + root)); x - order η without cancellation: x - order root = -order / (z + root)
    return (
        np.log(np.pi / (2 * order)) / 2
        - np.log(root) / 2
        + np.log(series)
        + order * (np.log1p(root) - np.log(z) - 1 / (z + root))
    )


class BaseDensities:
    """Densities, masses and tails of one base pair, under B (without the example) and A (with it)."""

    def __init__(self, projections: int, noise: float):
        self.r, self.noise = projections, noise
        self.scale = math.sqrt(projections) / noise
        self.correction = 0.0  # log of the total mass lost to rounding, at most 1e-9
        self.panel = 0.25 / math.sqrt(projections + 4)
        log_mass, u = self._until_negligible()
        while not _resolved(log_mass, u):
            self.panel /= 2
            log_mass, u = self._until_negligible()
        self.w_end = self.panel * (len(u) - 1)
        self.correction = -math.log(self.panel * _both_sides(log_mass, u))

    def _until_negligible(self) -> tuple[Array, Array]:
        """Returns the log density under A at w = 0, panel, 2 panel, ..., and the u there."""
        log_mass, u = np.empty(0), np.empty(0)
        for start in range(0, MOST_PANELS, 100):
            more = self.scale * np.sinh(self.panel * np.arange(start, start + 100))
            root = np.hypot(self.scale, more)
            u = np.append(u, more)
            log_mass = np.append(log_mass, self.smooth(more) - self.scale**2 / (2 * (root + more)) + np.log(root))
            beyond = np.flatnonzero((log_mass[1:] < NEGLIGIBLE) & (log_mass[1:] < log_mass[:-1]))
            if beyond.size:
                return log_mass[: beyond[0] + 2], u[: beyond[0] + 2]
        return log_mass, u

    def smooth(self, u: Array) -> Array:
        """Returns ``log E(u) + hypot(a, u) / 2``, which is smooth and even."""
        return self._closed_form(u) + self.correction

    @property
    def rounding(self) -> float:
        """Relative rounding error of E, up to a factor: the two large terms of its logarithm nearly cancel."""
        order = self.r / 2 + 0.5
        bessel = float(log_bessel(order, np.array([self.scale / 2]))[0])
        return 2.0**-53 * (64 + order * abs(math.log(2 * self.scale)) + abs(bessel) + self.scale / 2)

    def _closed_form(self, u: Array) -> Array:
        """Returns ``E(u) = b^a / Γ(a) * 2 / sqrt(2π) * (2 q)^-(a + 1/2) K_{a+1/2}(q / 2)``, a = r/2, b = r / (2 σ²)."""
        a, b = self.r / 2, self.r / (2 * self.noise**2)
        root = np.hypot(self.scale, u)
        constant = a * math.log(b) - float(gammaln(a)) + math.log(2 / math.sqrt(2 * math.pi))
        return constant - (a + 0.5) * np.log(2 * root) + log_bessel(a + 0.5, root / 2)

    @cached_property
    def _interpolated(self) -> Callable[[Array], Array]:
        w = np.arange(-8, math.ceil(self.w_end / self.panel) + 9) * self.panel
        return scipy.interpolate.make_interp_spline(w, self.smooth(self.scale * np.sinh(w)), k=7)

    def log_tail(self, u: float) -> tuple[float, float]:
        """Returns the log masses under B and A of all base losses above u, however far out u lies."""
        points, weights = np.polynomial.legendre.leggauss(8)
        parts, starts, peak = [], math.asinh(u / self.scale) + self.panel * np.arange(101), -np.inf
        while True:
            w = starts[:-1, None] + (1 + points) * self.panel / 2
            location = self.scale * np.sinh(np.minimum(w, FURTHEST)).ravel()
            root = np.hypot(self.scale, location)
            near, far = self.scale**2 / (2 * (root + np.abs(location))), (root + np.abs(location)) / 2
            log_mass = self.smooth(location) + np.log(np.tile(weights, 100) * (self.panel / 2) * root)
            left = location < 0
            parts.append(np.array([log_mass - np.where(left, near, far), log_mass - np.where(left, far, near)]))
            peak = np.maximum(peak, parts[-1].max(1))
            if (parts[-1][:, -1] < peak + NEGLIGIBLE).all() or w[-1, -1] > FURTHEST:
                break
            starts = starts + 100 * self.panel
        logs = np.concatenate(parts, axis=1)
        largest = logs.max(1)
        base, shifted = largest + np.log(np.exp(logs - largest[:, None]).sum(1))
        return float(base), float(shifted)

    @cached_property
    def beyond(self) -> float:
        """The mass under A above the last panel, which is that under B below the first one."""
        return 2 * math.exp(self.log_tail(self.scale * math.sinh(self.w_end))[1])

    def masses(self, u: Array, at: Array | None = None) -> tuple[Array, Array, Array]:
        """Returns the masses under B and A between consecutive u, and ``e^at`` times the first (one ``at`` a cell).

        Uses Gauss' rule on panels that the cuts refine. Without ``at`` the third equals the first.
        """
        end = self.scale * math.sinh(self.w_end)
        w = np.arcsinh(np.clip(u, -end, end) / self.scale)
        panels = np.arange(-math.ceil(self.w_end / self.panel), math.ceil(self.w_end / self.panel) + 1) * self.panel
        edges = np.unique(np.concatenate([w, panels[(panels > w[0]) & (panels < w[-1])]]))
        if len(edges) < 2:
            nothing = np.zeros(len(u) - 1)
            return nothing, nothing, nothing
        points, weights = np.polynomial.legendre.leggauss(8 if len(edges) < 5000 else 4)
        half = np.diff(edges)[:, None] / 2
        inside = edges[:-1, None] + half * (1 + points)
        location = self.scale * np.sinh(inside)
        smooth = self._interpolated(np.abs(inside))
        root = np.hypot(self.scale, location)
        near, far = self.scale**2 / (2 * (root + np.abs(location))), (root + np.abs(location)) / 2
        smooth += np.log(half * weights * root)  # du = a cosh(w) dw
        left, starts = location < 0, np.searchsorted(edges, w)
        log_base = smooth - np.where(left, near, far)
        parts = [np.exp(log_base), np.exp(smooth - np.where(left, far, near))]
        if at is not None:
            of_piece = np.repeat(at, np.diff(starts))
            parts.append(np.exp(np.minimum(log_base + of_piece[:, None], 300)))
        sums = [np.add.reduceat(np.append(part.sum(1), 0.0), starts)[:-1] for part in parts]
        base, shifted, weighted = (np.where(np.diff(starts) == 0, 0.0, part) for part in (*sums, sums[0])[:3])
        return base, shifted, weighted

    @cached_property
    def _tail(self) -> tuple[Array, Array]:
        """A grid of losses, and the mass under A above each."""
        u = self.scale * np.sinh(np.arange(0, self.w_end, self.panel))
        return u, np.cumsum(self.masses(np.append(u, np.inf))[1][::-1])[::-1]

    def quantile(self, mass: float) -> float:
        """Returns a loss above which A has at most this mass (and B below its negative)."""
        u, above = self._tail
        return float(u[min(int(np.searchsorted(-above, -mass)), len(u) - 1)])


def _both_sides(log_mass: Array, u: Array) -> float:
    """Returns the sum of a density under A over u and -u, where it is e^-u times that at u."""
    return float(np.exp(log_mass).sum() + np.exp(log_mass[1:] - u[1:]).sum())


def _resolved(log_mass: Array, u: Array) -> bool:
    """True if every other point gives nearly the same sum; the rule with all points then has twice as many digits."""
    return abs(2 * _both_sides(log_mass[::2], u[::2]) / _both_sides(log_mass, u) - 1) < 1e-10 or len(u) >= MOST_PANELS


@lru_cache(maxsize=64)
def base_densities(projections: int, noise: float) -> BaseDensities:
    """Returns the base pair, cached: pairs that differ in their sampling probability share it."""
    return BaseDensities(projections, noise)


@dataclass(frozen=True)
class SubsampledMixturePair(SubsampledPair):
    """The pair of a Poisson-sampled release with a random, public shift Z.

    Args:
        projections: r.
        noise: σ, the noise multiplier if norms were exact.
        probability: q, in (0, 1].
        largest: base loss beyond which a lattice counts losses as infinite; by default one that is rare.
    """

    projections: int
    noise: float
    probability: float
    largest: float | None = None

    @property
    def _base(self) -> BaseDensities:
        return base_densities(self.projections, self.noise)

    @property
    def heavy(self) -> bool:
        return True

    @property
    def base_ends(self) -> tuple[float, float]:
        top = min(self._base.quantile(LATTICE_TAIL), LARGEST_LOSS) if self.largest is None else self.largest
        return (-top if self.probability == 1 else -self._base.quantile(1e-24)), top

    def quantile(self, mass: float) -> float:
        """Returns a base loss that a sampled step exceeds with at most this probability, or 1e-24 if that is larger."""
        return self._base.quantile(max(mass, 1e-24))

    def cell_masses(self, u: Array) -> tuple[Array, Array]:
        return self._base.masses(u)[:2]

    def weighted_masses(self, u: Array, at: Array) -> tuple[Array, Array, Array]:
        return self._base.masses(u, at)

    def log_tails(self, u: Array, *, above: bool) -> tuple[Array, Array]:
        # Below u lies what lies above -u, with the two distributions exchanged.
        logs = np.array([self._base.log_tail(float(x) if above else -float(x)) for x in np.ravel(u)])
        base, shifted = (logs[:, i].reshape(np.shape(u)) for i in (0, 1))
        return (base, shifted) if above else (shifted, base)

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        gain, loss, exponent = super().tails(epsilon, swapped=swapped)
        return Tails(gain, loss, exponent + self.node_rounding / UNIT)

    @property
    def beyond(self) -> float:
        return self._base.beyond

    @property
    def coarsest_step(self) -> float:
        return 0.2

    @property
    def node_rounding(self) -> float:
        return self._base.rounding

    def nodes(self, step: float) -> Nodes | None:
        one = self._base
        spacing = min(step / math.sqrt(self.projections), step / 0.2 * one.panel)  # in w
        last = math.ceil(one.w_end / spacing)
        if last > MOST_PANELS:
            return None
        w = np.arange(-last, last + 1) * spacing
        u = one.scale * np.sinh(w)
        root = np.hypot(one.scale, u)
        losses = self.loss_at(u)
        near, far = one.scale**2 / (2 * (root + np.abs(u))), (root + np.abs(u)) / 2  # -log of e^(±u/2 - root/2)
        half = one.smooth(np.abs(u[len(u) // 2 :]))
        between = spacing * root
        smooth = np.concatenate([half[:0:-1], half]) + np.log(between)
        sampled = np.log(self.probability) + np.log1p((1 / self.probability - 1) * np.exp(-np.maximum(u, 1.0)))
        log_mass = smooth + np.where(u < 1, losses - np.where(u < 0, near, far), sampled - near)
        gaps = between * self.probability * np.exp(np.minimum(u - losses, 700))
        error = loss_error(u, losses, 12 * UNIT * np.abs(u), self.probability)
        mass_error = error + 2 * UNIT * (np.abs(log_mass) + np.abs(u) + near + 8)
        return Nodes(losses, log_mass, gaps, step, error, mass_error)
