# SPDX-License-Identifier: Apache-2.0
"""From events to a privacy profile: brackets on ε, δ and the trade-off function of everything that was released."""

from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from .._check import one_of, strictly_between, whole
from .bracket import Array, Bracket
from .curve import Curve, Value
from .engine import METHODS, Between, curves
from .event import LAWS, Event, NeighboringRelation
from .law import Law

RELATION_NAMES = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add/remove one example",
    NeighboringRelation.REPLACE_ONE: "replace one example",
    NeighboringRelation.REPLACE_SPECIAL: "replace one example by a null record",
}


class Profile:
    """What a list of releases costs together; made by `compose`.

    Every answer is a `Bracket` that contains the true value, maximised over the directions *remove* and *add*. For
    ε, δ, true positive rate and advantage report ``high``; for the trade-off function ``low``.

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
        # The other direction is rarely the dearer one, and its moments usually tell so without composing it.
        answers += [curve.epsilon(delta) for curve in others if curve.epsilon_bound(delta) > answers[0].high]
        return _larger(answers)

    def epsilon_high(self, delta: float) -> float:
        """``epsilon(delta).high`` exactly, in about half the time."""
        strictly_between("Profile.epsilon_high", 0, 1, delta=delta, hint="A usual choice is 1e-5.")
        remove, *others = self._curves
        high = remove.epsilon_high(delta)
        return max([high, *(curve.epsilon_high(delta) for curve in others if curve.epsilon_bound(delta) > high)])

    def delta(self, epsilon: float) -> Bracket[float]:
        """Smallest δ at which the releases are (ε, δ)-private, at any real ε."""
        if isinstance(epsilon, bool) or not np.isfinite(epsilon):
            raise ValueError(f"Profile.delta: epsilon={epsilon!r} must be a finite number.")
        return _larger([curve.delta(float(epsilon)) for curve in self._curves])

    def advantage(self) -> Bracket[float]:
        """Largest true positive rate minus false positive rate of any membership test: ``δ(0)``."""
        return self.delta(0.0)

    def tradeoff(self, alpha: Value) -> Bracket[Value]:
        """Type II error of the best test at type I error ``alpha``, symmetrised over both directions.

        ``f(α) = sup_{ε >= 0} max(1 - δ(ε) - e^ε α, e^-ε (1 - δ(ε) - α), 0)``. ``low`` takes the supremum over a grid,
        with the upper bounds of δ. ``high`` takes it over the corners of a convex function that lies below δ as a
        function of e^ε: the lines through a lower bound at a grid point and an upper bound one point further away.

        Args:
            alpha: in [0, 1], a number or an array.

        Returns:
            Two floats, or two arrays of alpha's shape. ``low`` is the safe side: no attacker does better.
        """
        errors = np.asarray(alpha, float)
        if not ((errors >= 0) & (errors <= 1)).all():
            raise ValueError(f"Profile.tradeoff: alpha={alpha!r} must lie in [0, 1].")
        x, y_high, corners_x, corners_y = self._corners
        low, high = _best_test(errors, x, y_high), _best_test(errors, corners_x, corners_y)
        bounds: list[Any] = [np.minimum(bound, 1 - errors) for bound in (low, high)]
        return Bracket(*bounds) if errors.ndim else Bracket(*(bound.item() for bound in bounds))

    def true_positive_rate(self, false_positive_rate: Value) -> Bracket[Value]:
        """Largest true positive rate of any membership test at this rate of false positives: ``1 - f(α)``."""
        low, high = self.tradeoff(false_positive_rate)
        return Bracket(1 - high, 1 - low)

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

    @cached_property
    def _corners(self) -> tuple[Array, Array, Array, Array]:
        """Grid of x = e^ε with upper bounds of δ, and the corners of a convex lower bound of δ."""
        furthest = max(self.epsilon(1e-12).low, 1e-6)
        x = np.exp(np.linspace(0, min(furthest, 600.0), 257))
        low, high = np.array([self.delta(float(np.log(point))) for point in x]).T
        # Below δ on [x_i, x_i+1]: the line through (x_i-1, high) and (x_i, low), and the one through (x_i+1, low) and
        # (x_i+2, high). Left of the grid δ(1/x) = 1 - 1/x + δ(x)/x by duality; right of it δ >= 0.
        width, before = np.diff(x), 1 / x[1]
        high_before = 1 - before + before * high[1]
        falling = (low[:-1] - np.append(high_before, high[:-2])) / np.diff(np.append(before, x[:-1]))
        rising = np.append((high[2:] - low[1:-1]) / width[1:], 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):  # parallel lines meet anywhere
            meet = (low[1:] - rising * width - low[:-1]) / (falling - rising)
        meet = np.clip(np.nan_to_num(meet), 0, width)
        between = low[1:] - rising * (width - meet)
        return x, high, np.concatenate([x, x[:-1] + meet, x[-1:]]), np.concatenate([low, between, [0.0]])


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
    return Bracket(max(lows), max(highs))


def _best_test(alpha: Array, x: Array, delta: Array) -> Array:
    """``sup max(1 - δ - x α, (1 - δ - α) / x, 0)`` over pairs (x, δ)."""
    alpha = alpha[..., None]
    return np.maximum(np.maximum(1 - delta - x * alpha, (1 - delta - alpha) / x).max(-1), 0)


def _rounded(value: float, mode: str) -> str:
    """Three decimals, more below 1, rounded in a given direction."""
    if not 0 < value < np.inf:
        return f"{value:g}"
    digits = 3 + max(0, -int(np.floor(np.log10(value))))
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=mode))
