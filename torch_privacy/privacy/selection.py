# SPDX-License-Identifier: Apache-2.0
"""Prices private hyper-parameter search: a random number of private runs, of which only the best is released."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..support.validate import in_range, one_of, positive, whole
from .bracket import Array
from .compose import Profile, compose
from .events.base import Event, NeighboringRelation, checked_releases, priced
from .pairs.base import PairBounds
from .pairs.discrete import pair_from_guarantees

DISTRIBUTIONS = ("poisson", "geometric", "logarithmic")
LARGEST = 600.0  # loss in the table of bounds
NEAR, GRID = 24, 160  # points of the table of bounds, up to the largest loss and beyond
ORDERS = {"geometric": 1.0, "logarithmic": 0.0}  # η of the truncated negative binomial


@lru_cache(maxsize=16)
def _dominating_pair(event: "Repeated") -> PairBounds:
    """Returns the pair of the table ``δ(ε) = mean * δ_run(ε - log 1/c)``."""
    run = compose(event.releases)
    loss = _largest_loss(run, event)
    near = np.linspace(0.0, min(loss, LARGEST), NEAR)
    above = [min(event.mean * run.delta(float(epsilon - loss)).high, 1.0) for epsilon in near]
    deltas = np.geomspace(max(above[-1], 1e-12), 1e-13, GRID)  # equal ratios give equal slack between points
    epsilons = loss + np.array([run.epsilon_high(min(delta / event.mean, 0.5)) for delta in deltas])
    deltas, epsilons = np.append(deltas, 0.0), np.append(epsilons, loss + run.epsilon_high(0.0))  # finite if pure
    known = epsilons <= LARGEST
    return PairBounds(pair_from_guarantees(np.append(near, epsilons[known]), np.append(above, deltas[known])))


def _largest_loss(run: Profile, event: "Repeated") -> float:
    """Returns ``log 1/c``, with c the least ratio of φ' between neighboring data sets."""
    if event.distribution == "poisson":
        return event.mean * run.delta(0.0).high
    order, stop = ORDERS[event.distribution], _stopping(event)
    largest = min(max(run.epsilon_high(1e-9), 0.1), LARGEST)  # not infinite, as of a run that fails more often
    grid = np.append(0.0, np.geomspace(1e-3, largest, 40))
    bounds = np.array([(epsilon, run.delta(float(epsilon)).high) for epsilon in grid])
    better = np.append(0.0, np.geomspace(1e-9, 1.0, 4000))  # probability y that a run is better than the outcome
    neighbor = _largest_better(better[1:], bounds) * (1 - stop) + stop
    this = better[:-1] * (1 - stop) + stop
    return (order + 1) * float(np.log(max((neighbor / this).max(), 1.0)))  # both rise in y: a cell's end over its start


def _largest_better(better: Array, bounds: Array) -> Array:
    """Returns the largest y on neighboring data: the least ``e^ε y + δ`` and ``1 - e^-ε (1 - y - δ)`` over all ε."""
    epsilon, delta = bounds.T[:, :, None]
    with np.errstate(over="ignore"):  # then the other bound holds
        return np.minimum(np.exp(epsilon) * better + delta, 1 - np.exp(-epsilon) * (1 - better - delta)).min(0)


def _stopping(event: "Repeated") -> float:
    """Returns γ of the truncated negative binomial distribution with the event's mean."""
    if event.distribution == "geometric":
        return 1 / event.mean
    low, high = 1e-12, 1 - 1e-9  # mean = (1/γ - 1) / log(1/γ), falling in γ
    for _ in range(200):
        middle = (low * high) ** 0.5 if low < 1e-3 else (low + high) / 2
        low, high = (middle, high) if (1 / middle - 1) / -np.log(middle) > event.mean else (low, middle)
    return low  # γ with the larger mean


@priced(_dominating_pair)
@dataclass(frozen=True, repr=False)
class Repeated(Event):
    """K runs of the same releases, of which only the best is released; K is drawn at random and kept secret.

    With φ the generating function of K, ``m = φ'(1)`` its mean, F an outcome's rank on one data set and F' on the
    other, an outcome has density ``p φ'(F)`` against ``p' φ'(F')``, so

        δ(ε) <= m δ_run(ε - log 1/c),   c = min φ'(F') / φ'(F),  for ε >= 0.

    For Poisson ``c >= e^(-m δ_run(0))``; for the others c follows from ``1 - F' <= e^ε (1 - F) + δ_run(ε)`` at every ε.
    Proof: ``p φ'(F) - e^ε p' φ'(F') <= φ'(F) (p - e^ε c p')`` and ``φ' <= m``; no run at all is equally likely on both
    data sets. Ties are broken at random, which changes nothing. This is an upper bound; the lower one is trivial.

    The score that ranks the runs must itself be released by each run (or be public): accuracy on private examples needs
    its own event among the releases.

    Args:
        releases: the releases of one run, as a tuple of pairs (event, how often).
        mean: expected number of runs; above 0 for "poisson" (which may draw 0 runs), else above 1; at most 1e6.
        distribution: distribution of K: "poisson", "geometric" or "logarithmic" (truncated negative binomial, η = 1
            or 0).

    Guarantees:
        - for runs that are (ε, 0)-private: 3 ε for "geometric", 2 ε for "logarithmic", the published (2 + η) ε.

    Source: the proof is the one of Koskela, Redberg & Wang (2024), arXiv:2402.06701, in terms of ranks; distributions
        and their need for a random K from Liu & Talwar (2019), arXiv:1811.07971, and Papernot & Steinke (2022),
        arXiv:2110.03620.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> search = Repeated(((SubsampledGaussian(2.0, 0.1), 10),), mean=10)
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
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The unit of the releases."""
        return compose(self.releases).unit

    @property
    def sampler(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The sampler of the releases."""
        return compose(self.releases).sampler

    @property
    def assumption(self) -> str:
        own = "only the best run is released, ranked by what the runs release, and never the number of runs"
        return "; ".join([own, *compose(self.releases).assumptions])

    def draw(self, generator: np.random.Generator) -> int:
        """Draws a number K of runs, which must stay secret, as must the generator's seed.

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
        for _, count in checked_releases("Repeated", self.releases):
            whole("Repeated", at_least=1, count=count)
        compose(self.releases)
