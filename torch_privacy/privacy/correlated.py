# SPDX-License-Identifier: Apache-2.0
"""Provides the coefficients of banded noise that make the error of what an optimizer sums up least.

An optimizer applies a linear map A to the gradients of n steps: prefix sums for SGD, with its momentum, weight decay
and learning rates. With noise of coefficients c, of norm 1, the error of its iterates is ``A C^-1 z``, and the mean
square over the steps is ``‖A C^-1‖² / n``, in squared standard deviations of the noise before its correlation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter

from ..support.validate import in_range, whole
from .bracket import Array

DIGITS = 10  # of coefficients, so that every machine finds the same ones
LARGEST_DENSE = 1200  # steps up to which a learning-rate schedule is part of the workload


@dataclass(frozen=True)
class Workload:
    """Says what an optimizer makes of gradients: ``v_t = m v_{t-1} + g_t`` and ``θ_t = (1 - ηλ) θ_{t-1} - η_t v_t``.

    Args:
        num_steps: n.
        momentum: m of SGD, in [0, 1).
        weight_decay: η λ, the share of the weights that a step takes away, in [0, 1).
        rates: the learning rate of each step, up to a factor; None for equal ones.
    """

    num_steps: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        whole("Workload", at_least=1, num_steps=self.num_steps)
        for name in ("momentum", "weight_decay"):
            value = getattr(self, name)
            in_range("Workload", 0, 1, **{name: value}) if value else None

    def response(self) -> Array:
        """Returns (n,) what a gradient does to the weights after 0, 1, 2, ... steps, at equal rates."""
        impulse = np.zeros(self.num_steps)
        impulse[0] = 1.0
        smoothed = _divided(impulse, [1.0, -self.momentum])
        return _divided(smoothed, [1.0, -(1 - self.weight_decay)])

    def matrix(self) -> Array:
        """Returns (n, n) A, with row t the share of each gradient in the weights after step t."""
        n, rates = self.num_steps, np.ones(self.num_steps) if self.rates is None else np.array(self.rates)
        rates = rates / np.sqrt(np.mean(rates**2))
        total, smoothed, rows = np.zeros(n), np.zeros(n), np.empty((n, n))
        for t in range(n):
            smoothed *= self.momentum
            smoothed[t] += 1.0
            total = (1 - self.weight_decay) * total + rates[t] * smoothed
            rows[t] = total
        return rows


def _divided(numerator: Array, denominator: Sequence[float] | Array) -> Array:
    """Returns the coefficients of the quotient of two power series, for each row."""
    return np.asarray(lfilter([1.0], np.asarray(denominator, float), numerator))


def inverse(coefficients: Sequence[float] | Array, length: int) -> Array:
    """Returns the coefficients w of ``C^-1``, (length,): those of ``1 / (c_0 + c_1 x + ...)``."""
    impulse = np.zeros(length)
    impulse[0] = 1.0
    return _divided(impulse, coefficients)


def mean_error(coefficients: Sequence[float], workload: Workload) -> float:
    """Returns the root mean square error of the iterates, in units of noise multiplier times sensitivity.

    Example:
        >>> f"{mean_error((1.0,), Workload(num_steps=4)):.4f}"  # sqrt((1 + 2 + 3 + 4) / 4)
        '1.5811'
    """
    norm = float(np.linalg.norm(coefficients))
    return norm * float(np.sqrt(_square_and_gradient(np.asarray(coefficients, float), workload)[0]))


@lru_cache(maxsize=64)
def best_coefficients(bands: int, workload: Workload) -> tuple[float, ...]:
    """Returns c_0, ..., c_{b-1} >= 0 of norm 1 with the least `mean_error`.

    Args:
        bands: b, at least 1; at most ``num_steps`` of them are above 0.
        workload: what the optimizer sums up.

    Example:
        >>> [round(c, 4) for c in best_coefficients(2, Workload(num_steps=1000))]
        [0.7502, 0.6613]
    """
    whole("best_coefficients", at_least=1, bands=bands)
    if bands == 1:
        return (1.0,)
    start = np.ones(bands)
    for k in range(1, bands):
        start[k] = start[k - 1] * (2 * k - 1) / (2 * k)
    start *= 0.98 ** np.arange(bands)

    def loss(tail: Array) -> tuple[float, Array]:
        c = np.append(1.0, tail)
        square, gradient = _square_and_gradient(c, workload)
        norm = float(c @ c)
        return float(np.log(norm * square)), (2 * c / norm + gradient / square)[1:]

    found = minimize(loss, start[1:], jac=True, method="L-BFGS-B", bounds=[(0, 1)] * (bands - 1), tol=1e-12)
    c = np.append(1.0, found.x)
    return tuple(np.round(c / np.linalg.norm(c), DIGITS).tolist())


def _square_and_gradient(c: Array, workload: Workload) -> tuple[float, Array]:
    """Returns ``‖A C^-1‖² / n``, and its derivative by each coefficient.

    A change of c_k moves ``C^-1`` by ``-C^-1 S_k C^-1``, with S_k the shift by k.
    """
    n = workload.num_steps
    w = inverse(c, n)
    if workload.rates is not None and n <= LARGEST_DENSE:
        b = _divided(workload.matrix()[:, ::-1], c)[:, ::-1]
        squares = b.T @ b
        diagonals = np.array([np.trace(squares, -k) for k in range(n)])
        square = float(diagonals[0])
        slopes = [-2 * float(diagonals[k:] @ w[: n - k]) if k < n else 0.0 for k in range(len(c))]
        return square / n, np.array(slopes) / n
    response = workload.response()
    b = _divided(response, c)  # column of A C^-1, which is Toeplitz
    rows = np.arange(n, 0, -1.0)  # in which each of its entries stands
    square = float(rows @ b**2)
    moved = _divided(b, c)  # of A C^-2
    slopes = [-2 * float((rows * b)[k:] @ moved[: n - k]) if k < n else 0.0 for k in range(len(c))]
    return square / n, np.array(slopes) / n
