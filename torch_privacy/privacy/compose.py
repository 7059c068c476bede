# SPDX-License-Identifier: Apache-2.0
"""From events to a privacy profile: brackets on ε, δ and the trade-off function of everything that was released."""

from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from .._validate import one_of, strictly_between, whole
from .bracket import Bracket
from .engines.curve import Curve, Value
from .engines.dispatch import METHODS, Between, curves
from .events.base import LAWS, Event, NeighboringRelation
from .pairs.base import Law
from .tradeoff import PiecewiseLinear, of_profile
from .tradeoff import metrics as questions
from .tradeoff.base import rates

RELATION_NAMES = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add/remove one example",
    NeighboringRelation.REPLACE_ONE: "replace one example",
    NeighboringRelation.REPLACE_SPECIAL: "replace one example by a null record",
}


class Profile:
    """What a list of releases costs together; made by `compose`.

    Every answer is a `Bracket` that contains the true value, maximised over the directions *remove* and *add*. For
    ε, δ, μ, advantage, true positive rate and posterior report ``high``; for the trade-off function ``low``.

    Guarantees:
        - ``low <= truth <= high``: discretisation, aliasing and truncation are bounded by proof, rounding and the
          convergence of quadratures by an estimate (see `contour` and `fourier`);
        - full-batch Gaussians and single steps: a closed form, the bracket as wide as its rounding error;
        - usually (some hundred steps and more) the bracket is about 1e-12 of ε wide, from the contour engine; else
          about 1e-5 of ε, from the lattice;
        - an event of which only bounds are known (`FixedSizeGaussian`, `KnownProfile`, `Repeated`) is as wide as that;
        - with a noise multiplier below 0.05, or losses that no engine resolves, ``low`` is trivial and ``high`` comes
          from a single step that dominates all (see `engine.dominating`).

    Edge cases: nothing released: ε = 0 and δ = 0. If no finite ε has the given δ, ``high`` is infinite.
    """

    def __init__(self, events: Sequence[tuple[Event, int]], method: str = "auto"):
        self._events, self._method = tuple(events), method

    @property
    def events(self) -> list[tuple[Event, int]]:
        """The releases, as given to `compose`: (event, count) pairs."""
        return list(self._events)

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        """The relation that all events share."""
        return next((event.neighboring_relation for event, _ in self._events), NeighboringRelation.ADD_OR_REMOVE_ONE)

    @property
    def sampler(self) -> str:
        """How the examples of each release were drawn; several ways are joined by " + "."""
        return " + ".join(dict.fromkeys(event.sampler for event, _ in self._events)) or "no"

    @property
    def assumptions(self) -> list[str]:
        """What the prices take for granted beyond relation and samplers."""
        return list(dict.fromkeys(event.assumption for event, _ in self._events if event.assumption))

    @property
    def directions(self) -> dict[str, Curve]:
        """The curve of each direction, with ``delta(epsilon)``, ``epsilon(delta)`` and ``epsilon_high(delta)``.

        "remove" has the example in the first data set, "add" in the second; "both" where they are one and the same.
        """
        names = ("remove", "add") if len(self._curves) == 2 else ("both",)
        return dict(zip(names, self._curves, strict=True))

    @cached_property
    def _curves(self) -> tuple[Curve, ...]:
        return curves(_merged(self._events), self._method)

    def epsilon(self, delta: float) -> Bracket[float]:
        """Smallest ε >= 0 at which the releases are (ε, δ)-private.

        Args:
            delta: in (0, 1); well below one over the number of examples.
        """
        strictly_between("Profile.epsilon", 0, 1, delta=delta, hint="A usual choice is 1e-5.")
        remove, *others = self._curves
        answers = [remove.epsilon(delta)]
        high = answers[0].high  # the other direction is rarely the dearer one
        dearer = [curve for curve in others if high < np.inf and not curve.surely_below(high, delta)]
        answers += [curve.epsilon(delta) for curve in dearer]
        return _larger(answers)

    def epsilon_high(self, delta: float) -> float:
        """``epsilon(delta).high`` exactly, in about half the time."""
        strictly_between("Profile.epsilon_high", 0, 1, delta=delta, hint="A usual choice is 1e-5.")
        remove, *others = self._curves
        high = remove.epsilon_high(delta)
        dearer = [curve for curve in others if high < np.inf and not curve.surely_below(high, delta)]
        return max([high, *(curve.epsilon_high(delta) for curve in dearer)])

    def delta(self, epsilon: float) -> Bracket[float]:
        """Smallest δ at which the releases are (ε, δ)-private, at any real ε."""
        if isinstance(epsilon, bool) or not np.isfinite(epsilon):
            raise ValueError(f"Profile.delta: epsilon={epsilon!r} must be a finite number.")
        return _larger([curve.delta(float(epsilon)) for curve in self._curves])

    @cached_property
    def tradeoffs(self) -> dict[str, Bracket[PiecewiseLinear]]:
        """The trade-off functions (f-DP), each between certified bounds: "symmetrized", "remove" and "add".

        The symmetrized one holds whichever direction is dearer. The others are missing where both directions are one
        and the same, or only their maximum is known. Made by `tradeoff.of_profile` from 257 ε, and kept.
        """
        return of_profile(self)

    def tradeoff(self, alpha: Value, direction: str = "symmetrized") -> Bracket[Value]:
        """Type II error of the best test at type I error ``alpha``: values of `tradeoffs`.

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

    def mu(self, floor: float = 1e-6) -> Bracket[float]:
        """The smallest μ whose Gaussian trade-off function lies below the symmetrized one.

        With ``high``: no attacker with both errors above ``floor`` does better than against a single release of noise
        multiplier 1 / μ. No approximation, unlike the μ of `clt`.

        Args:
            floor: errors below it are left aside, see `tradeoff.mu`.
        """
        low, high = self.tradeoffs["symmetrized"]
        return Bracket(questions.mu(high, floor).low, questions.mu(low, floor).high)

    def advantage(self) -> Bracket[float]:
        """Largest true positive rate minus false positive rate of any membership test: ``δ(0)``."""
        return self.delta(0.0)

    def true_positive_rate(self, false_positive_rate: Value) -> Bracket[Value]:
        """Largest true positive rate of any membership test at this rate of false positives: ``1 - f(α)``."""
        low, high = self.tradeoff(false_positive_rate)
        return Bracket(1 - high, 1 - low)

    def posterior(self, prior: float, false_positive_rate: float = 0.01) -> Bracket[float]:
        """How sure anyone can be that an example took part, who is wrong about non-members at this rate or more often.

        Args:
            prior: probability of membership beforehand, in (0, 1).
            false_positive_rate: in (0, 1); the smaller, the surer, see `tradeoff.posterior`.
        """
        low, high = self.tradeoffs["symmetrized"]
        return Bracket(*(questions.posterior(curve, prior, false_positive_rate) for curve in (high, low)))

    def statement(self, delta: float) -> str:
        """One line to publish: both bounds rounded outwards, δ, the neighboring relation and the sampler."""
        low, high = self.epsilon(delta)
        context = "; ".join(
            [f"{RELATION_NAMES[self.neighboring_relation]}, {self.sampler} sampling", *self.assumptions]
        )
        interval = f"[{_rounded(low, ROUND_FLOOR)}, {_rounded(high, ROUND_CEILING)}]"
        return f"epsilon in {interval} at delta = {delta:g} ({context})"

    def __str__(self) -> str:
        return self.statement(1e-5)


def compose(events: Iterable[tuple[Event, int]], method: str = "auto") -> Profile:
    """The joint privacy profile of all releases, each pair (event, how often), in any order.

    Args:
        events: pairs (event, how often).
        method: "auto" takes the first engine that can (see `engine`); "contour" and "lattice" ask for one of two
            independent ones, to check the other. A single release is then composed, too, not read off its closed form.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> profile = compose([(SubsampledGaussian(noise_multiplier=0.55, sampling_probability=256 / 29305), 2061)])
        >>> print(profile.statement(delta=1e-5))
        epsilon in [11.807, 11.808] at delta = 1e-05 (add/remove one example, Poisson sampling)

    Raises:
        ValueError: an unknown event type, a count that is not a non-negative integer, or mixed neighboring relations.
    """
    events = [(event, count) for event, count in events]
    for event, count in events:
        if type(event) not in LAWS:
            raise ValueError(f"compose: cannot price {event!r}. Known: {', '.join(kind.__name__ for kind in LAWS)}.")
        whole(f"compose, {event!r}", count=count)
    one_of("compose", METHODS, method=method)
    relations = {event.neighboring_relation for event, _ in events}
    if len(relations) > 1:
        names = sorted(relation.name for relation in relations)
        raise ValueError(f"compose: events assume different neighboring relations {names}; price them separately.")
    return _profile(tuple(events), method)


@lru_cache(maxsize=4)  # a profile keeps its composed curves, up to some 100 MB each
def _profile(events: tuple[tuple[Event, int], ...], method: str) -> Profile:
    return Profile(events, method)


def _merged(events: Sequence[tuple[Event, int]]) -> list[tuple[Law | Between, int]]:
    """One-step laws, each once, with how often it happened in all."""
    counts: dict[Law | Between, int] = {}
    for event, count in events:
        law = LAWS[type(event)](event)
        counts[law] = counts.get(law, 0) + count
    return [(law, count) for law, count in counts.items() if count]


def _larger(brackets: Sequence[Bracket[float]]) -> Bracket[float]:
    lows, highs = zip(*brackets, strict=True)
    return Bracket(max(lows) + 0.0, max(highs) + 0.0)  # never -0.0


def _rounded(value: float, mode: str) -> str:
    """Three decimals, more below 1, rounded in a given direction."""
    if not 0 < value < np.inf:
        return f"{value:g}"
    digits = 3 + max(0, -int(np.floor(np.log10(value))))
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=mode))
