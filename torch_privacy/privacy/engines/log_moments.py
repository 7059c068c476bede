# SPDX-License-Identifier: Apache-2.0
"""Computes the log moments of one release's privacy loss: the α(λ) of the moments accountant.

``α(λ) = log max(E_P e^(λ l), E_Q e^(-λ l))`` with the loss ``l = log P/Q``, and ``α(a - 1) / (a - 1)`` is the Rényi
divergence of order a. Up to rounding and the error of a quadrature, which converges geometrically.

They bound tiny δ of Poisson-sampled Gaussian steps, where other engines' nodes end: ``δ(ε) <= exp(K(λ) + H(λ) - λ ε)``
for every λ > 0, with the log moment K(λ) of all steps together; the smallest of these bounds is some percent of ε above
the truth at any δ.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache, singledispatch

import numpy as np
from scipy.special import gammaln, logsumexp, xlog1py, xlogy

from ..bracket import Array, Bracket, ordered
from ..pairs.base import DiscretizablePair, DominatingPair, PairBounds
from ..pairs.discrete import LaplacePair
from ..pairs.either import EitherPair
from ..pairs.gaussian import LARGEST_SHIFT, SubsampledGaussianPair, SymmetrizedPair
from ..pairs.shifted import DiscreteGaussianNoise, Mixture, NoiseLaw, log_density
from .curve import Curve
from .tilt import LARGEST_EXPONENT, tilt_entropy

MOST_NODES = 200_000
MOST_TERMS = 2**20  # of a binomial sum; an order beyond it has a quadrature
ENDS = -40.0  # log of the share that the outermost nodes may have
STEP_OF_SYMMETRIZED = 4e-3  # of the outcome; the error falls with its third power


def log_moments(pair: DominatingPair | PairBounds, orders: Array) -> Array:
    """Returns α(λ) for each λ > 0; of bounds, that of the upper one. Infinite where it is, or where no rule has it."""
    values = tuple(np.asarray(orders, float).tolist())
    if not isinstance(pair, PairBounds):
        return _larger(pair, values)
    if pair.mixtures is not None:
        return _of_mixtures(*pair.mixtures, values)
    return np.full(len(values), np.inf) if pair.upper is None else _larger(pair.upper, values)


@lru_cache(maxsize=1024)  # a plot asks for the same moments at every δ
def _larger(pair: DominatingPair, orders: tuple[float, ...]) -> Array:
    return _directions(pair, np.array(orders)).max(0)


@lru_cache(maxsize=1024)
def _of_mixtures(noise: NoiseLaw, p: Mixture, q: Mixture, orders: tuple[float, ...]) -> Array:
    """Returns the larger direction by a sum over integers, or by `_by_trapezoids`; infinite if that takes many nodes.

    Zeros of a mixture's density lie π over its widest distance of shifts off the axis, or farther.
    """
    shifts = [shift for _, shift in p + q]
    low, high = min(shifts), max(shifts)
    width, scale = high - low, noise.stddev if isinstance(noise, DiscreteGaussianNoise) else 1.0
    found = []
    for order in orders:
        step = 1.0 if noise.whole else min(0.1, 1 / (4 * width), 1 / (width * math.sqrt(order)))
        reach = 12 * scale + width * (order + 1)
        if (high - low + 2 * reach) / step > MOST_NODES:
            found.append(math.inf)
            continue
        x = np.arange(math.floor((low - reach) / step), math.ceil((high + reach) / step) + 1) * step
        log_p, log_q = log_density(noise, x, p), log_density(noise, x, q)
        exponents = np.stack([log_p + order * (log_p - log_q), log_q + order * (log_q - log_p)])
        tops = exponents.max(1, keepdims=True)
        total = (tops + np.log(np.exp(exponents - tops).sum(1, keepdims=True)))[:, 0].max()
        found.append(float(total - logsumexp(noise.log_density(x))))
    return np.array(found)


@singledispatch
def _directions(pair: DominatingPair, orders: Array) -> Array:
    """Returns ``log E_P e^(λ l)`` and ``log E_Q e^(-λ l)``, shape (2, orders)."""
    if not isinstance(pair, DiscretizablePair) or pair.heavy:
        return np.full((2, len(orders)), np.inf)
    nodes = pair.nodes(pair.coarsest_step * min(1.0, 2 / math.sqrt(orders.max() + 1)))
    if nodes is None:
        return np.full((2, len(orders)), np.inf)
    found = []
    for powers in (orders, -orders - 1):
        exponents = nodes.log_mass + powers[:, None] * nodes.losses
        largest = exponents.max(1, keepdims=True)
        total = (largest + np.log(np.exp(exponents - largest).sum(1, keepdims=True)))[:, 0]
        inside = (exponents[:, [0, -1]] - largest).max(1) < ENDS
        found.append(np.where(inside | bool(pair.atoms.size), total, np.inf))
    return np.array(found)


@_directions.register
def _(pair: EitherPair, orders: Array) -> Array:
    usual, other = _directions(pair.usual, orders), _directions(pair.other, orders)
    return np.logaddexp(math.log1p(-pair.share) + usual, math.log(pair.share) + other)


@_directions.register
def _(pair: LaplacePair, orders: Array) -> Array:
    """Source: Mironov (2017), arXiv:1702.07476, Proposition 6."""
    near, far = np.log((orders + 1) / (2 * orders + 1)), np.log(orders / (2 * orders + 1))
    return np.tile(np.logaddexp(near + orders * pair.shift, far - (orders + 1) * pair.shift), (2, 1))


@_directions.register
def _(pair: SymmetrizedPair, orders: Array) -> Array:
    """The losses above 0 are those of the one-sided pair, those below their reflection, and all others are 0."""
    nodes = pair.one_sided.nodes(min(STEP_OF_SYMMETRIZED, pair.one_sided.coarsest_step / 8))
    losses, log_mass = nodes.losses[nodes.losses > 0], nodes.log_mass[nodes.losses > 0]
    raised = orders[:, None] * losses
    with np.errstate(over="ignore"):  # infinite is right then
        above = np.where(
            raised < 1, np.exp(log_mass) * np.expm1(np.minimum(raised, 1)), np.exp(log_mass + raised) - np.exp(log_mass)
        )
        total = np.log1p((above + np.exp(log_mass - losses) * np.expm1(-raised)).sum(1))
    ends = log_mass[-1] + raised[:, -1] < total + ENDS
    return np.tile(np.where(ends & np.isfinite(total), total, np.inf), (2, 1))


@_directions.register
def _(pair: SubsampledGaussianPair, orders: Array) -> Array:
    if pair.shift > LARGEST_SHIFT:  # beyond floating point; without sampling α is larger, so it is still a bound
        return np.tile(orders * (orders + 1) / 2 * pair.shift**2, (2, 1))
    found = np.full((2, len(orders)), -np.inf)
    whole = (orders == np.round(orders)) & (orders < MOST_TERMS)
    found[0, whole] = [_at_whole_order(pair, round(order) + 1) for order in orders[whole].tolist()]
    octaves = np.floor(np.log2(np.maximum(orders, 1.0)))
    for octave in np.unique(octaves[~whole]):  # orders of one octave share a rule
        chosen = ~whole & (octaves == octave)
        found[:, chosen] = _by_trapezoids(pair, orders[chosen])
    return found


def _at_whole_order(pair: SubsampledGaussianPair, order: int) -> float:
    """Returns ``log E_Q (P/Q)^a`` for a whole a: a binomial sum, minus the binomial weights, which add up to 1.

    The other direction is never larger.

    Source: Mironov, Talwar & Zhang (2019), arXiv:1908.10530, section 3.3 for the sum, Theorem 5 for the directions.
    """
    k = np.arange(2.0, order + 1)
    weights = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    weights = weights + xlog1py(order - k, -pair.probability) + xlogy(k, pair.probability)
    exponents = k * (k - 1) / 2 * pair.shift**2
    terms = weights + exponents + np.log(-np.expm1(-exponents))
    largest = float(terms.max())
    total = largest + math.log(float(np.exp(terms - largest).sum()))
    return math.log1p(math.exp(total)) if total < LARGEST_EXPONENT else total


def _by_trapezoids(pair: SubsampledGaussianPair, orders: Array) -> Array:
    """Returns both directions by the trapezoid rule, which converges geometrically: branch points lie σπ off the axis.

    On a line θσ off the axis the integrand is at most about e^(λ θ² / 8) times that on the axis, so with steps of h the
    relative error is about e^(-8 π² σ² / (λ h²)), here e^-79.
    """
    shift, largest = pair.shift, float(orders.max())
    step = min(0.1, 1 / (4 * shift), 1.0 / (shift * math.sqrt(largest)))
    x = np.arange(-12 - shift * largest, 12 + shift * (largest + 1), step)
    log_q = -(x**2) / 2 + np.log(step / np.sqrt(2 * np.pi))
    with np.errstate(divide="ignore"):  # log 0 = -∞ is right for q = 1
        log_unsampled = np.log1p(-pair.probability)
    loss = np.logaddexp(log_unsampled, np.log(pair.probability) + shift * x - shift**2 / 2)
    exponents = log_q + np.stack([orders + 1, -orders])[..., None] * loss
    tops = exponents.max(2, keepdims=True)
    return (tops + np.log(np.exp(exponents - tops).sum(2, keepdims=True)))[..., 0]


TINY = 1e-20  # at larger δ the engines are narrower
ORDERS = np.geomspace(0.03, 500, 160)  # of the λ, in units of one over the largest shift
RELATIVE, ABSOLUTE = 1e-9, 1e-12  # bounds on the rounding of one step's log moment


class BoundedByMoments(Curve):
    """A curve with an upper bound by moments where δ is tiny; for Gaussian steps.

    Args:
        engine: the curve.
        steps: the pairs, and how often each happened.
    """

    def __init__(self, engine: Curve, steps: Sequence[tuple[SubsampledGaussianPair, int]]):
        self._engine, self._steps = engine, steps

    @cached_property
    def _bounds(self) -> tuple[Array, Array]:
        """The λ, and an upper bound on K(λ) + H(λ) for each."""
        orders = ORDERS / min(max(pair.shift for pair, _ in self._steps), LARGEST_SHIFT)
        total = np.zeros(len(orders))
        for pair, count in self._steps:
            alpha = log_moments(pair, orders)
            total += count * (alpha * (1 + RELATIVE) + ABSOLUTE)
        return orders, total + tilt_entropy(orders)

    def _epsilon(self, delta: float) -> float:
        orders, bounds = self._bounds
        return max(float(((bounds - math.log(delta)) / orders).min()), 0.0)

    def delta(self, epsilon: float) -> Bracket[float]:
        low, high = self._engine.delta(epsilon)
        if 0 < high < TINY:
            orders, bounds = self._bounds
            exponent = float((bounds - orders * epsilon).min())
            high = min(high, max(math.exp(min(exponent, 0.0)), 5e-324))
        return ordered(low, high)

    def epsilon(self, delta: float) -> Bracket[float]:
        low, high = self._engine.epsilon(delta)
        return ordered(low, min(high, self._epsilon(delta)) if 0 < delta < TINY else high)

    def epsilon_high(self, delta: float) -> float:
        high = self._engine.epsilon_high(delta)
        return min(high, self._epsilon(delta)) if 0 < delta < TINY else high

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._engine.surely_below(epsilon, delta) or (0 < delta < TINY and self._epsilon(delta) <= epsilon)
