# SPDX-License-Identifier: Apache-2.0
"""Composes events into a privacy profile: brackets of ε, δ and the trade-off function of all releases together."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..support.units import ONE_EXAMPLE
from ..support.validate import InvalidValue, non_negative, one_of, plain_numbers
from .bracket import Bracket
from .engines.curve import Curve, Value
from .engines.dispatch import METHODS, curves
from .events.base import REMOVALS, Event, NeighboringRelation, checked_releases
from .events.charged import charged
from .pairs.base import DominatingPair, PairBounds
from .rounding import fixed, short
from .tradeoff import PiecewiseLinear, metrics, of_profile
from .tradeoff.base import rates

Releases = tuple[tuple[Event, int], ...]
PIECES, MANY = 256, 12  # of a trade-off function: thresholds, and different releases from which they are fewer


class Profile:
    """The privacy profile of a list of releases together; made by `compose`.

    Every answer is a `Bracket` that contains the true value, maximized over the directions *remove* and *add*. For
    ε, δ, μ, advantage, true positive rate and posterior report ``high``; for the trade-off function ``low``.

    Guarantees:
        - ``low <= truth <= high``: discretization, aliasing, truncation and the rounding of the contour engine are
          bounded by proof, the rounding of the lattice and the convergence of quadratures by an estimate (see
          ``engines.contour`` and ``engines.fft``);
        - full-batch Gaussians and single steps have a closed form; the bracket is as wide as its rounding error;
        - from some hundred steps on, the bracket is usually 1e-10 of ε wide (contour engine), else 1e-5 (lattice), and
          at most 1e-3 where sampling is rare or losses have atoms; docs/accounting.md lists the exceptions;
        - more than 1000 different Gaussian steps are enclosed by groups of similar ones;
        - for an event with known bounds only (`FixedSizeGaussian`, `KnownProfile`, `Repeated`), the bracket is as wide
          as those bounds;
        - with a noise multiplier below 0.05, or losses that no engine resolves, ``low`` is trivial and ``high`` comes
          from a single step that dominates all (``engines.dispatch.dominating``).

    Edge cases: without any release, ε = 0 and δ = 0. If no finite ε has the given δ, ``high`` is infinite.
    """

    def __init__(self, events: Sequence[tuple[Event, int]], method: str = "auto"):
        self._events, self._method = tuple(events), method

    def __reduce__(self) -> tuple[type["Profile"], tuple[Any, ...]]:
        """Pickles the releases alone; the curves are composed again."""
        return Profile, (self._events, self._method)

    @property
    def events(self) -> list[tuple[Event, int]]:
        """The releases, as given to `compose`: (event, count) pairs."""
        return list(self._events)

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        """The relation under which all events hold together.

        A price under add/remove holds under zero-out, too: what is replaced with nothing is removed from every sum.
        """
        return relation_of({event.neighboring_relation for event, _ in self._events})

    @property
    def unit(self) -> str:
        """The word for what is added, removed or replaced, such as "customer"; all events share it."""
        return next((event.unit for event, _ in self._events), ONE_EXAMPLE)

    @property
    def relation_in_words(self) -> str:
        """The relation and its unit as they are printed: "add/remove one example"."""
        return self.neighboring_relation.words(self.unit)

    @property
    def sampler(self) -> str:
        """The word for how examples were drawn; several samplers are joined by " + "."""
        return " + ".join(dict.fromkeys(event.sampler for event, _ in self._events)) or "no"

    @property
    def assumptions(self) -> list[str]:
        """The assumptions of the prices beyond the relation and the samplers."""
        return list(dict.fromkeys(event.assumption for event, _ in self._events if event.assumption))

    @property
    def directions(self) -> dict[str, Curve]:
        """The curve of each direction, with ``delta(epsilon)``, ``epsilon(delta)`` and ``epsilon_high(delta)``.

        "remove" has the example in the first data set, "add" in the second; "both" where the two curves are equal.
        """
        names = ("remove", "add") if len(self._curves) == 2 else ("both",)
        return dict(zip(names, self._curves, strict=True))

    @cached_property
    def _counted(self) -> Releases:
        """Each different event once, so that equal releases in other portions share what was computed."""
        of_events: Counter[Event] = Counter()
        for event, count in charged(self._events):
            of_events[event] += count
        return tuple(of_events.items())

    @cached_property
    def _curves(self) -> tuple[Curve, ...]:
        return _curves(self._counted, self._method)

    @plain_numbers
    def epsilon(self, delta: float) -> Bracket[float]:
        """Returns the smallest ε >= 0 at which the releases are (ε, δ)-private.

        Args:
            delta: in [0, 1); well below one over the number of examples. With 0 this is pure DP: the largest privacy
                loss, which is infinite for Gaussian noise.
        """
        _check_delta("Profile.epsilon", delta)
        return _epsilon(self._counted, self._method, delta)

    @plain_numbers
    def epsilon_high(self, delta: float) -> float:
        """Returns exactly ``epsilon(delta).high``, in about half the time."""
        _check_delta("Profile.epsilon_high", delta)
        return _epsilon_high(self._counted, self._method, delta)

    @plain_numbers
    def delta(self, epsilon: float) -> Bracket[float]:
        """Returns the smallest δ at which the releases are (ε, δ)-private, at any real ε."""
        if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not np.isfinite(epsilon):
            raise InvalidValue("Profile.delta", "epsilon", epsilon, "must be a finite number.")
        return _larger([curve.delta(float(epsilon)) for curve in self._curves])

    @property
    def tradeoffs(self) -> dict[str, Bracket[PiecewiseLinear]]:
        """The trade-off functions (f-DP), each between certified bounds: "symmetrized", "remove" and "add".

        The symmetrized one holds in both directions. The others are missing where both directions are equal or only
        their maximum is known. Computed once, by `tradeoff.of_profile` from 257 values of ε; from fewer, down to 33,
        for more than 12 different releases, as each value takes time for each of them. The bounds are then wider.
        """
        return dict(_tradeoffs(self._counted, self._method))

    def tradeoff(self, alpha: Value, direction: str = "symmetrized") -> Bracket[Value]:
        """Returns the type II error of the best test at type I error ``alpha``: values of `tradeoffs`.

        Args:
            alpha: in [0, 1], a number or an array.
            direction: "symmetrized", or "remove" or "add" if `tradeoffs` has them.

        Returns:
            Two floats, or two arrays of alpha's shape. ``low`` is the safe side: no attacker does better.
        """
        errors = rates("Profile.tradeoff", alpha)
        one_of("Profile.tradeoff", self.tradeoffs, direction=direction)
        bounds: list[Any] = [np.asarray(curve(errors)) for curve in self.tradeoffs[direction]]
        return Bracket(*bounds) if bounds[0].ndim else Bracket(*(bound.item() for bound in bounds))

    @plain_numbers
    def mu(self, floor: float = 1e-6) -> Bracket[float]:
        """Returns the smallest μ with a Gaussian trade-off function below the symmetrized one.

        With ``high``, no attacker with both errors above ``floor`` does better than against a single Gaussian release
        of noise multiplier 1 / μ. This is a bound, unlike the μ of `clt`.

        Args:
            floor: smaller errors are ignored, see `tradeoff.mu`.
        """
        metrics.check_floor("Profile.mu", floor)
        low, high = self.tradeoffs["symmetrized"]
        return Bracket(metrics.mu(high, floor).low, metrics.mu(low, floor).high)

    @plain_numbers
    def regret(self, floor: float = 1e-6) -> Bracket[float]:
        """Returns how well ``mu().high`` fits: the distance Δ between the symmetrized trade-off function f and G_μ.

        Where Δ is 0, μ says all that f says; with 0.01 the best tests make up to one percentage point more of each of
        the two errors than μ says.

        Args:
            floor: as for `mu`. Errors below it, which μ ignores, count here: ``high`` is never below it.

        Guarantees:
            - ``f(α + Δ) - Δ <= G_μ(α)`` and ``G_μ(α + Δ) - Δ <= f(α)`` for all α, with Δ = ``high``: so *every* test
              has a true positive rate of at most ``1 - G_μ(α + Δ) + Δ``, also one with errors below ``floor``.

        Source: see `tradeoff.regret`.
        """
        metrics.check_floor("Profile.regret", floor)
        low, high = self.tradeoffs["symmetrized"]
        stated = self.mu(floor).high
        return Bracket(metrics.regret(low, stated).low, max(metrics.regret(high, stated).high, floor))

    def advantage(self) -> Bracket[float]:
        """Returns the largest true positive rate minus false positive rate of any membership test: ``δ(0)``."""
        return self.delta(0.0)

    def true_positive_rate(self, false_positive_rate: Value) -> Bracket[Value]:
        """Returns the largest true positive rate of any membership test at a false positive rate: ``1 - f(α)``."""
        low, high = self.tradeoff(false_positive_rate)
        return Bracket(1 - high, 1 - low)

    @plain_numbers
    def posterior(self, prior: float, false_positive_rate: float = 0.01) -> Bracket[float]:
        """Returns the largest probability that an example is a member, given that a test says so.

        Args:
            prior: probability of membership before the test, in (0, 1).
            false_positive_rate: lower bound on the test's false positive rate, in (0, 1); see `tradeoff.posterior`.
        """
        low, high = self.tradeoffs["symmetrized"]
        return Bracket(*(metrics.posterior(curve, prior, false_positive_rate) for curve in (high, low)))

    @plain_numbers
    def statement(self, delta: float, unit: str | None = None) -> str:
        """Returns one line to publish: both bounds rounded outwards, δ, the neighboring relation and the sampler.

        Args:
            delta: see `epsilon`.
            unit: the unit of privacy in more words than the events have.
        """
        low, high = self.epsilon(delta)
        relation = self.neighboring_relation.words(unit or self.unit)
        context = "; ".join([f"{relation}, {self.sampler} sampling", *self.assumptions])
        context = context if self.events else "nothing was released"  # which holds for all neighbors
        interval = f"[{_rounded(low, ROUND_FLOOR)}, {_rounded(high, ROUND_CEILING)}]"
        return f"epsilon in {interval} at delta = {short(delta)} ({context})"

    def __str__(self) -> str:
        return self.statement(1e-5)


def relation_of(relations: Collection[NeighboringRelation]) -> NeighboringRelation:
    """Returns the relation under which events of these relations hold together.

    Raises:
        ValueError: there is none.
    """
    if len(relations) <= 1:
        return next(iter(relations), NeighboringRelation.ADD_OR_REMOVE_ONE)
    if not set(relations) <= set(REMOVALS):
        names = sorted(relation.name for relation in relations)
        raise ValueError(f"compose: events assume different neighboring relations {names}; price them separately.")
    return NeighboringRelation.REPLACE_SPECIAL


def compose(events: Iterable[tuple[Event, int]], method: str = "auto") -> Profile:
    """Composes releases into their joint privacy profile; their order does not matter.

    Args:
        events: pairs (event, how often).
        method: "auto" takes the first engine that resolves the releases (see ``engines.dispatch``). "contour" and
            "lattice" ask for one of two independent engines, to check the other; even a single release is then
            composed, not read off its closed form.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> profile = compose([(SubsampledGaussian(noise_multiplier=0.55, sampling_probability=256 / 29305), 2061)])
        >>> print(profile.statement(delta=1e-5))
        epsilon in [11.807, 11.808] at delta = 1e-05 (add/remove one example, Poisson sampling)

    Raises:
        ValueError: if an event type is unknown, a count is no integer from 0 to 2^53, or units or neighboring relations
            differ (events under add/remove and zero-out together hold under zero-out).
    """
    events = checked_releases("compose", events)
    one_of("compose", METHODS, method=method)
    charged(events)
    relation_of({event.neighboring_relation for event, _ in events})
    units = sorted({event.unit for event, _ in events})
    if len(units) > 1:
        raise ValueError(
            f"compose: events protect different units {units}: their epsilons do not add up. Price them separately, or "
            "price all for the same unit (privacy.for_group, or unit= of an event)."
        )
    return Profile(events, method)


@lru_cache(maxsize=4)  # up to some 100 MB each
def _curves(releases: Releases, method: str) -> tuple[Curve, ...]:
    """Returns the curves of releases, each different event once."""
    counts: dict[DominatingPair | PairBounds, int] = {}
    for event, count in releases:
        pair = event.dominating_pair()
        counts[pair] = counts.get(pair, 0) + count
    return curves([(pair, count) for pair, count in counts.items() if count], method)


@lru_cache(maxsize=1024)  # two numbers each
def _epsilon(releases: Releases, method: str, delta: float) -> Bracket[float]:
    remove, *others = _curves(releases, method)
    answers = [remove.epsilon(delta)]
    high = answers[0].high  # the other direction rarely has the larger ε
    larger = [curve for curve in others if high < np.inf and not curve.surely_below(high, delta)]
    answers += [curve.epsilon(delta) for curve in larger]
    return _larger(answers)


@lru_cache(maxsize=1024)  # a number each: a training is calibrated twice, before it has a folder and in it
def _epsilon_high(releases: Releases, method: str, delta: float) -> float:
    remove, *others = _curves(releases, method)
    high = remove.epsilon_high(delta)
    larger = [curve for curve in others if high < np.inf and not curve.surely_below(high, delta)]
    return max([high, *(curve.epsilon_high(delta) for curve in larger)])


@lru_cache(maxsize=64)  # the trade-off curves take some seconds to compute, and some ten kilobytes to keep
def _tradeoffs(releases: Releases, method: str) -> dict[str, Bracket[PiecewiseLinear]]:
    pieces = min(max(PIECES * MANY // max(len(releases), 1), PIECES // 8), PIECES)
    return of_profile(Profile(releases, method), pieces)


def _check_delta(where: str, delta: float) -> None:
    """Raises a ``ValueError`` unless delta lies in [0, 1)."""
    non_negative(where, delta=delta)
    if delta >= 1:
        raise InvalidValue(where, "delta", delta, "must lie in [0, 1). A usual choice is 1e-5.")


def _larger(brackets: Sequence[Bracket[float]]) -> Bracket[float]:
    lows, highs = zip(*brackets, strict=True)
    return Bracket(max(lows) + 0.0, max(highs) + 0.0)  # never -0.0


def _rounded(value: float, rounding: str) -> str:
    """Returns three decimals, and more below 1, rounded in the given direction."""
    if not 0 < value < np.inf:
        return f"{value:g}"
    return fixed(value, 3 + max(0, -int(np.floor(np.log10(value)))), rounding)
