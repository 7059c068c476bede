# SPDX-License-Identifier: Apache-2.0
"""Computes the trade-off function for a group of examples that are all added, all removed, or changed one by one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...support.validate import plain_numbers, whole
from ..bracket import Array, Bracket
from .base import TradeOff
from .closed_form import IDENTITY, Gaussian, Laplace
from .piecewise_linear import PiecewiseLinear, hull
from .tensor import enclosed

SLACK = 1e-15  # several roundings of an error rate; each step moves the bounds apart by so much


@plain_numbers
def group(f: TradeOff, size: int, pieces: int = 512) -> Bracket[TradeOff]:
    """Returns ``1 - (1 - f)∘...∘(1 - f)``, ``size`` times: the trade-off function for a group, between two bounds.

    Along a chain of data sets, each with one example more than the one before, a test that rejects with probability x
    on one of them rejects with at most 1 - f(x) on the next. So a test with a rate α of false alarms on the first
    misses at least this much on the last. Nothing but f is used: it holds for any mechanism, training included.

    Args:
        f: trade-off function for one example. For groups of added and removed examples pass one that holds
            in both directions (`symmetrized`).
        size: number k of examples in the group, at least 1.
        pieces: number of tangents of an f that is not piecewise linear; the bracket narrows with its square.

    Returns:
        ``low <= truth <= high`` everywhere; ``low`` is the safe side. They are equal for `Gaussian` (μ becomes kμ),
        `Laplace` (ε becomes kε) and `IDENTITY`.

    Guarantees:
        - ``low`` is rounded down and ``high`` up, by 1e-15 in each step; steep pieces of f enlarge what that costs;
        - ``group(group(f, a), b) = group(f, ab)`` and ``group(f, k).inverse() = group(f.inverse(), k)``: exactly for
          the truth, so brackets of both sides overlap;
        - for (ε, δ)-privacy the line of slope ``-e^kε`` has ``δ (e^kε - 1)/(e^ε - 1)``, the known group privacy of
          (ε, δ), and the other lines make it better;
        - an error of f grows with k as the advantage of an attacker does: where δ of f is below 1e-15, the δ of a large
          group says little.

    `for_group` prices steps of DP-SGD for a group exactly: each example joins the batch by itself, which this function
    cannot know.

    Source: Dong, Roth & Su (2022), JRSS-B (arXiv:1905.02383, Theorem 2.14).

    Example:
        >>> from torch_privacy.privacy.tradeoff import EpsilonDelta
        >>> group(Gaussian(0.5), 4).low
        Gaussian(mu=2.0)
        >>> three = group(EpsilonDelta(1.0, 1e-6), 3).low
        >>> f"{float(three.delta(3.0)):.3e}", f"{1e-6 * (np.e**3 - 1) / (np.e - 1):.3e}"
        ('1.111e-05', '1.111e-05')
    """
    whole("tradeoff.group", at_least=1, size=size)
    whole("tradeoff.group", at_least=8, pieces=pieces)
    if size == 1 or f == IDENTITY:
        return Bracket(f, f)
    if isinstance(f, Gaussian):
        return _exact(replace(f, mu=size * f.mu))
    if isinstance(f, Laplace):
        return _exact(replace(f, epsilon=size * f.epsilon))
    low, high = enclosed(f, pieces)
    return Bracket(_power(low, size, pieces, _below), _power(_raised(high), size, pieces, _above))


def _exact(f: TradeOff) -> Bracket[TradeOff]:
    return Bracket(f, f)


def _power(f: PiecewiseLinear, size: int, pieces: int, after: Callable[..., PiecewiseLinear]) -> PiecewiseLinear:
    """Returns a bound for a group of ``size``, by squaring and multiplying."""
    result = None
    while True:
        if size % 2:
            result = f if result is None else after(f, result, pieces)
        size //= 2
        if not size:
            assert result is not None
            return result
        f = after(f, f, pieces)


def _below(f: PiecewiseLinear, first: PiecewiseLinear, pieces: int) -> PiecewiseLinear:
    """Returns a bound from below on ``f(1 - first(α))``, which is linear between corners of ``first`` and those of f.

    Where 1 - first(α) reaches a corner of f is known up to rounding. The corner is put where it is surely not reached
    yet, with the value where it surely is: so the lines from corner to corner stay below.
    """
    rejected = 1 - first.beta  # at the corners of ``first``
    inner = f.alpha[(f.alpha > rejected[0] - SLACK) & (f.alpha < rejected[-1] + SLACK)]
    alpha = np.concatenate([first.alpha, np.interp(inner - 2 * SLACK, rejected, first.alpha)])
    beta = np.asarray(f(np.minimum(np.concatenate([rejected, inner]) + 2 * SLACK, 1.0)))
    order = np.lexsort((beta, alpha))
    result = _hull(alpha[order], beta[order] - SLACK)
    if len(result.alpha) <= 4 * pieces:
        return result
    low, _ = enclosed(result, 2 * pieces)
    return _hull(low.alpha, low.beta - SLACK)


def _above(f: PiecewiseLinear, first: PiecewiseLinear, pieces: int) -> PiecewiseLinear:
    """Returns a bound from above on ``f(1 - first(α))``: lines between values at corners, as it is convex."""
    inner = f.alpha[(f.alpha > 1 - first.beta[0]) & (f.alpha < 1 - first.beta[-1])]
    alpha = np.unique(np.concatenate([first.alpha, np.interp(inner, 1 - first.beta, first.alpha)]))
    rejected = np.maximum(1 - np.asarray(first(alpha)) - SLACK, 0.0)
    result = _hull(np.append(alpha, 1.0), np.append(f(rejected), 0.0) + SLACK)
    if len(result.alpha) <= 4 * pieces:
        return result
    return _raised(enclosed(result, 2 * pieces).high)


def _raised(f: PiecewiseLinear) -> PiecewiseLinear:
    """Returns f with more than its rounding; what was zero to the right of the last corner no longer is."""
    return _hull(np.append(f.alpha, 1.0), np.append(f.beta, 0.0) + SLACK)


def _hull(alpha: Array, beta: Array) -> PiecewiseLinear:
    return hull(alpha, np.clip(beta, 0, 1 - alpha))
