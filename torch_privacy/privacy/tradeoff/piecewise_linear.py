# SPDX-License-Identifier: Apache-2.0
"""Provides piecewise linear trade-off functions: exact for discrete distributions, and bounds of other curves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .base import ROUNDING, Array, TradeOff


@dataclass(frozen=True, eq=False)
class PiecewiseLinear(TradeOff):
    """The trade-off function that joins given corners by straight lines; 0 to the right of the last one.

    Args:
        alpha: ascending, from 0 to at most 1.
        beta: f at ``alpha``, descending to 0, convex.

    Guarantees:
        - exact: f, ``delta`` and ``inverse`` are those of the corners, up to rounding.

    Raises:
        ValueError: if the corners are not those of a trade-off function; the message names the first wrong one.

    Example:
        >>> f = PiecewiseLinear(np.array([0, 0.25, 0.75]), np.array([0.75, 0.25, 0]))
        >>> float(f(0.125)), float(f.delta(0.0))
        (0.5, 0.5)
    """

    alpha: Array
    beta: Array

    def __post_init__(self) -> None:
        alpha, beta = (np.array(side, float, ndmin=1) for side in (self.alpha, self.beta))
        _check_corners(alpha, beta)
        alpha, beta = np.clip(alpha, 0, 1), np.clip(beta, 0, 1)
        alpha.flags.writeable = beta.flags.writeable = False
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "beta", beta)

    @classmethod
    def from_masses(cls, without: Sequence[float] | Array, with_it: Sequence[float] | Array) -> "PiecewiseLinear":
        """Returns the exact trade-off function of two discrete distributions, by the Neyman-Pearson lemma.

        Args:
            without: masses of the outcomes under Q, the distribution without the example; they add up to 1.
            with_it: masses of the same outcomes under P.

        Example:
            >>> warner = PiecewiseLinear.from_masses([0.25, 0.75], [0.75, 0.25])  # randomized response, ε = log 3
            >>> round(float(warner.delta(0.0)), 12)
            0.5
        """
        q, p = np.asarray(without, float), np.asarray(with_it, float)
        for name, mass in (("without", q), ("with_it", p)):
            if mass.ndim != 1 or len(mass) != len(p) or not (mass >= 0).all() or abs(mass.sum() - 1) > 1e-9:
                raise ValueError(
                    f"PiecewiseLinear.from_masses: {name} must be as many masses as the other has, 0 or greater, "
                    f"that add up to 1; got shape {mass.shape}, sum {float(mass.sum())!r}."
                )
        with np.errstate(divide="ignore", invalid="ignore"):
            order = np.argsort(-np.log(p) + np.log(q), kind="stable")  # the largest privacy loss first
        return _from_rejections(np.cumsum(q[order]), _masses_left(p[order]))

    @classmethod
    def from_losses(
        cls, losses: Sequence[float] | Array, masses: Sequence[float] | Array, at_infinity: float = 0.0
    ) -> "PiecewiseLinear":
        """Returns the exact trade-off function of a discrete privacy loss distribution.

        Args:
            losses: ``log(P/Q)`` of each outcome, finite.
            masses: masses of the same outcomes under P; under Q they are ``e^-loss`` times as large.
            at_infinity: P-mass of outcomes impossible under Q. The rest of Q up to 1 is impossible under P.

        Example:
            >>> f = PiecewiseLinear.from_losses([np.log(3), -np.log(3)], [0.75, 0.25])  # the same mechanism
            >>> round(float(f.delta(0.0)), 12)
            0.5
        """
        p, loss = np.asarray(masses, float), np.asarray(losses, float)
        q = p * np.exp(-loss)
        if p.shape != loss.shape or not np.isfinite(loss).all() or not (q.sum() <= 1 + 1e-9):
            raise ValueError(
                "PiecewiseLinear.from_losses: losses must be finite and as many as masses; masses * e^-losses must sum "
                f"to at most 1; got shapes {loss.shape} and {p.shape}, sum {float(q.sum()) if q.size else 0.0!r}."
            )
        rest = max(1 - float(q.sum()), 0.0)
        return cls.from_masses(np.append(q, [0.0, rest]), np.append(p, [at_infinity, 0.0]))

    @cached_property
    def _losses(self) -> Array:
        """The privacy loss of each piece, descending: the log of its negated slope, which may be too large itself."""
        return np.log(-np.diff(self.beta)) - np.log(np.diff(self.alpha))

    @property
    def corners(self) -> tuple[Array, Array]:
        return self.alpha, self.beta

    def at(self, alpha: float | Array) -> float | Array:
        return np.interp(alpha, self.alpha, self.beta)

    def delta(self, epsilon: float | Array) -> float | Array:
        epsilon = np.asarray(epsilon, float)
        best = np.searchsorted(-self._losses, -epsilon)  # the corner that a line of slope -e^ε supports
        with np.errstate(divide="ignore"):  # log 0 = -∞ is right for the first corner
            far = np.exp(np.minimum(epsilon, 1e6) + np.log(self.alpha[best]))
        near = np.exp(np.minimum(epsilon, 700.0)) * self.alpha[best]
        return np.maximum(1 - self.beta[best] - np.where(epsilon > 700, far, near), 0.0)

    def inverse(self) -> "PiecewiseLinear":
        return PiecewiseLinear(*_inverted(self.alpha, self.beta))


def _inverted(alpha: Array, beta: Array) -> tuple[Array, Array]:
    return beta[::-1], alpha[::-1]


def _check_corners(alpha: Array, beta: Array) -> None:
    where = "tradeoff.PiecewiseLinear"
    if alpha.shape != beta.shape or alpha.ndim != 1:
        raise ValueError(f"{where}: alpha and beta must be lists of one length, got {alpha.shape} and {beta.shape}.")
    wrong = {
        "must start at alpha = 0": alpha[:1] != 0,
        "must end at beta = 0": np.append(np.zeros(len(beta) - 1), beta[-1:] != 0),
        "must have alpha rising": np.append(False, ~(np.diff(alpha) > 0)),
        "must have beta falling": np.append(False, ~(np.diff(beta) < 0)),
        "must not lie above 1 - alpha": ~(beta <= 1 - alpha + ROUNDING),
        "must be convex": _concave(alpha, beta),
    }
    for rule, offenders in wrong.items():
        for index in np.flatnonzero(offenders)[:1]:
            raise ValueError(f"{where}: corner {index}, ({alpha[index]!r}, {beta[index]!r}), {rule}.")


def _concave(alpha: Array, beta: Array) -> Array:
    """Returns True for each corner that lies above the chord past it by more than rounding."""
    if len(alpha) < 3:
        return np.zeros(len(alpha), bool)
    left, width = np.diff(alpha)[:-1], alpha[2:] - alpha[:-2]
    chord = beta[:-2] + (beta[2:] - beta[:-2]) * left / width
    return np.concatenate([[False], beta[1:-1] > chord + ROUNDING, [False]])


def hull(alpha: Array, beta: Array) -> PiecewiseLinear:
    """Returns the largest convex function below points that fall from (0, f(0)) to (…, 0), in the given order."""
    kept: list[int] = []
    for index in range(len(alpha)):
        if kept and alpha[index] <= alpha[kept[-1]]:
            if beta[index] >= beta[kept[-1]]:
                continue
            kept.pop()
        while len(kept) > 1 and _above_chord(alpha, beta, kept[-2], kept[-1], index):
            kept.pop()
        if not kept or beta[index] < beta[kept[-1]]:
            kept.append(index)
    return PiecewiseLinear(alpha[kept], beta[kept])


def _above_chord(alpha: Array, beta: Array, a: int, b: int, c: int) -> bool:
    return bool((beta[b] - beta[a]) * (alpha[c] - alpha[a]) >= (beta[c] - beta[a]) * (alpha[b] - alpha[a]))


def _masses_left(p: Array) -> Array:
    """Returns ``1 - cumsum``, summed from the small end so that the last tiny masses keep their digits."""
    return np.append(np.cumsum(p[::-1])[::-1][1:], 0.0)


def _from_rejections(alpha: Array, beta: Array) -> PiecewiseLinear:
    """Builds the function from the errors of tests that each reject one more outcome, the largest loss first."""
    alpha, beta = np.append(0.0, np.minimum(alpha, 1)), np.append(1.0, beta)
    start = np.flatnonzero(alpha == 0)[-1]  # outcomes impossible under Q cause no false alarm
    end = np.flatnonzero(beta == 0)[0]  # rejecting outcomes impossible under P gains nothing
    return hull(alpha[start : end + 1], beta[start : end + 1])


def double_conjugate(function: Callable[[Array], Array], points: int = 2001) -> PiecewiseLinear:
    """Returns ``f**``, the largest trade-off function nowhere above a function on [0, 1], from values on a grid.

    Args:
        function: takes an array of α in [0, 1]; its values are clipped to [0, 1 - α].
        points: grid points; half of them equally spaced, half of them geometrically towards 0.

    Guarantees:
        - on the grid it is nowhere above the function, and equal to it if that is a trade-off function; between grid
          points it lies above a convex function, as a chord does.

    Example:
        >>> bump = double_conjugate(lambda alpha: 1 - alpha**2)
        >>> round(float(bump(0.5)), 6)
        0.5
    """
    alpha = np.unique(np.concatenate([np.linspace(0, 1, points // 2 + 1), np.geomspace(1e-12, 1, points // 2)]))
    beta = np.clip(function(alpha), 0, 1 - alpha)
    end = np.flatnonzero(beta == 0)[0]
    return hull(alpha[: end + 1], beta[: end + 1])
