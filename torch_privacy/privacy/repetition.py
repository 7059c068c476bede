# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameter search: a private run repeated a random number of times, of which only the best is released."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .._check import in_range, one_of, positive, whole
from .bracket import Array
from .compose import compose
from .discrete import allowed_by
from .engine import Between
from .event import Event, NeighboringRelation, priced
from .tradeoff import TradeOff
from .tradeoff.bounds import highest_of_lines

DISTRIBUTIONS = ("poisson", "geometric", "logarithmic")
ORDERS = {"geometric": 1.0, "logarithmic": 0.0}  # η of the truncated negative binomial
TABLE = 256  # thresholds at which a run's δ is asked for
RANKS = 6000  # cells of the chance to be beaten, twice
RATIOS = 400  # likelihood ratios between which the largest gain is interpolated
LARGEST = 300.0  # log of a ratio beyond which outcomes count as perfectly telling


def _law(event: "Repeated") -> Between:
    return _priced(event)


@lru_cache(maxsize=16)
def _priced(event: "Repeated") -> Between:
    """The table of `Repeated`'s bound as a dominating pair."""
    run = compose(event.releases)
    furthest = min(run.epsilon_high(min(1e-14 / max(event.mean, 1.0), 1e-3)), 600.0)
    epsilons = np.linspace(0.0, max(furthest, 1e-6), TABLE + 1)
    deltas = np.array([run.delta(epsilon).high for epsilon in epsilons.tolist()])
    ratios, weights, rest = _largest_gains(event, highest_of_lines(epsilons, deltas, epsilons, deltas))
    shifts = np.log(ratios)
    asked = np.linspace(0.0, min(furthest + max(shifts[-1], 0.0), 600.0), 2 * TABLE + 1)
    bounds = rest + _at_most(epsilons, deltas, asked[:, None] - shifts) @ weights
    return Between(allowed_by(asked, np.minimum(bounds, 1.0)))


def _at_most(epsilons: Array, deltas: Array, asked: Array) -> Array:
    """δ of a run at any real ε: chords of a table, convex in e^ε, and by symmetry below 0."""
    above = np.interp(np.exp(np.abs(np.clip(asked, -700, 700))), np.exp(epsilons), deltas)
    negative = np.minimum(asked, 0.0)
    return np.where(asked < 0, -np.expm1(negative) + np.exp(negative) * above, above)


def _largest_gains(event: "Repeated", curve: TradeOff) -> tuple[Array, Array, float]:
    """Ratios r_k, weights w_k and a rest with ``max_y (φ'(1 - y) - φ'(1 - y') r)+ <= rest + Σ w_k (1 - r / r_k)+``.

    The maximum is over y and all y' up to 1 - f(y), f the run's trade-off function: of each cell of y the line with
    the largest φ' of its outcome and the smallest on the neighboring data. Convex and falling in r, it lies below its
    chords, and these are a mixture of hockey sticks.
    """
    grids = [np.geomspace(1e-12, 1.0, RANKS), np.linspace(0.0, min(40 / event.mean, 1.0), RANKS)]
    beaten = np.unique(np.concatenate(grids))
    own, other = _derivative(event, beaten[:-1]), _derivative(event, 1 - np.asarray(curve(beaten[1:])))
    with np.errstate(divide="ignore"):
        last = min(float((np.log(own) - np.log(other)).max()), LARGEST)
    ratios = np.concatenate([[0.0], np.exp(np.linspace(min(-3.0, last), max(last, 1e-9), RATIOS))])
    gains = np.array([max(float((own - other * ratio).max()), 0.0) for ratio in ratios])
    slopes = np.append(np.diff(gains) / np.diff(ratios), 0.0)
    return ratios[1:], np.maximum(np.diff(slopes), 0.0) * ratios[1:], float(gains[-1])


def _derivative(event: "Repeated", beaten: Array) -> Array:
    """``φ'(1 - y)`` for chances y that one run is better than the outcome."""
    if event.distribution == "poisson":
        return event.mean * np.exp(-event.mean * beaten)
    stop = _stopping(event)
    return event.mean * (stop / (stop + (1 - stop) * beaten)) ** (ORDERS[event.distribution] + 1)


def _stopping(event: "Repeated") -> float:
    """γ of the truncated negative binomial with the event's mean."""
    if event.distribution == "geometric":
        return 1 / event.mean
    low, high = 1e-12, 1 - 1e-9  # mean = (1/γ - 1) / log(1/γ), falling in γ
    for _ in range(200):
        middle = (low * high) ** 0.5 if low < 1e-3 else (low + high) / 2
        low, high = (middle, high) if (1 / middle - 1) / -np.log(middle) > event.mean else (low, middle)
    return low  # the larger mean


@priced(_law)
@dataclass(frozen=True, repr=False)
class Repeated(Event):
    """Runs of the same releases, K of them, of which the best is released; K is drawn at random and kept secret.

    **The bound.** φ is the generating function of K, ``m = φ'(1)`` its mean, f the trade-off function of one run. Ties
    are broken at random, so ranks are continuous. Let y be the chance that a run on the first data set beats an
    outcome, y' the chance on the neighboring one; then ``y' <= 1 - f(y)``. With densities p and p' of a run, the
    outcome is the best of all with density ``p φ'(1 - y)`` against ``p' φ'(1 - y')``, and that no run happens is as
    likely on both. So for ε >= 0, with ``r = e^ε p' / p`` and the convex ``g(r) = max_y (φ'(1 - y) - φ'(f(y)) r)+``,

        δ(ε) <= ∫ p g(r) = Σ w_k δ_run(ε - log r_k)    for    g(r) = Σ w_k (1 - r / r_k)+.

    As ``g(r) <= m (1 - r / r_max)+`` it is never above ``m δ_run(ε - log r_max)``, the published bound. It is only an
    upper one; the lower one is trivial.

    What ranks the runs must itself be part of what a run releases (or be public): the accuracy on private examples is
    an event of its own among the releases.

    Args:
        releases: what one run releases: pairs (event, how often).
        mean: expected number of runs, above 0 for Poisson (none may happen), above 1 else.
        distribution: of K: "poisson", "geometric" or "logarithmic" (truncated negative binomial, η = 1 or 0).

    Guarantees:
        - for runs that are (ε, 0)-private: 3 ε for "geometric", 2 ε for "logarithmic", the published (2 + η) ε.
        - never above ``m δ_run(ε - log r_max)`` (but for the table's width), of which the first factor and a slightly
          larger r_max are Theorem 6 of Koskela, Redberg & Wang.

    Source: the derivation above, after the proof of Koskela, Redberg & Wang (2024), arXiv:2402.06701, whose bound has
        the largest φ' and the largest ratio at once. Distributions, and why K must be random, from Liu & Talwar
        (2019), arXiv:1811.07971, and Papernot & Steinke (2022), arXiv:2110.03620.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> search = Repeated(((SubsampledGaussian(2.0, 0.01), 1000),), mean=10)
        >>> run, best = (compose(events).epsilon(1e-6).high for events in (search.releases, [(search, 1)]))
        >>> bool(run < best < 3 * run)
        True
    """

    releases: tuple[tuple[Event, int], ...]
    mean: float
    distribution: str = "poisson"

    @property
    def neighboring_relation(self) -> NeighboringRelation:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The relation of the releases."""
        return compose(self.releases).neighboring_relation

    @property
    def sampler(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The sampler of the releases."""
        return compose(self.releases).sampler

    @property
    def assumption(self) -> str:
        return "only the best run is released, ranked by what the runs release, and never the number of runs"

    def draw(self, generator: np.random.Generator) -> int:
        """A number K of runs, which must stay secret; so must the generator's seed.

        Example:
            >>> from torch_privacy.privacy import Laplace
            >>> search = Repeated(((Laplace(1.0), 1),), mean=5, distribution="geometric")
            >>> draws = [search.draw(np.random.default_rng(seed)) for seed in range(4000)]
            >>> min(draws), round(sum(draws) / 4000)
            (1, 5)
        """
        if self.distribution == "poisson":
            return int(generator.poisson(self.mean))
        if self.distribution == "geometric":
            return int(generator.geometric(_stopping(self)))
        return int(generator.logseries(1 - _stopping(self)))

    def __post_init__(self) -> None:
        one_of("Repeated", DISTRIBUTIONS, distribution=self.distribution)
        positive("Repeated", mean=self.mean)
        in_range("Repeated", 0 if self.distribution == "poisson" else 1, 1e6, mean=self.mean)
        if not isinstance(self.releases, tuple) or not all(isinstance(pair, tuple) for pair in self.releases):
            raise ValueError(f"Repeated: releases={self.releases!r} must be a tuple of pairs (event, count).")
        for _, count in self.releases:
            whole("Repeated", at_least=1, count=count)
        compose(self.releases)
