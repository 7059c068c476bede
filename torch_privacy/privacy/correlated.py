# SPDX-License-Identifier: Apache-2.0
"""Provides the coefficients of correlated noise that make the error of what an optimizer sums up small.

An optimizer applies a linear map A to the gradients of n steps: prefix sums for SGD, with its momentum, weight decay,
learning rates and the average of its weights. With C the lower triangular Toeplitz matrix of the coefficients c, the
error of its iterates is ``A C^-1 z``, and the mean square over the steps is ``‖A C^-1‖² / n``, in squared standard
deviations of the noise before its correlation. Either C has few bands, or its inverse W has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy

from ..support.validate import InvalidValue, in_range, whole
from .bracket import Array

DIGITS = 10  # of coefficients, so that every machine finds the same ones
LARGEST_DENSE = 1200  # steps up to which what differs between them is part of the workload


@dataclass(frozen=True)
class Workload:
    """Says what an optimizer makes of gradients: ``v_t = m v_{t-1} + g_t``, ``θ_t = (1 - ηλ) θ_{t-1} - η_t v_t``.

    What counts is the error of ``a_t = d_t a_{t-1} + (1 - d_t) θ_t``: the weights themselves, or an average of them.

    Args:
        num_steps: n.
        momentum: m of SGD, in [0, 1).
        weight_decay: η λ, the share of the weights that a step takes away, in [0, 1).
        rates: the learning rate of each step, up to a factor; None for equal ones.
        average: d of a moving average of the weights, in [0, 1), or d_0, d_1, ... of each step: t / (t + 1) is the mean
            of all weights.

    What differs between steps counts up to `LARGEST_DENSE` of them: longer trainings take equal rates, and refuse
    averages that differ.
    """

    num_steps: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    rates: tuple[float, ...] | None = None
    average: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        whole("Workload", at_least=1, num_steps=self.num_steps)
        for name in ("momentum", "weight_decay", "average"):
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                in_range("Workload", 0, 1, **{name: value}) if value else None
        if isinstance(self.average, tuple) and self.num_steps > LARGEST_DENSE:
            raise InvalidValue(
                "Workload", "average", self.average[:3],
                f"and so on differs between steps, which counts up to {LARGEST_DENSE} steps: pass one number.",
            )  # fmt: skip

    @property
    def differs(self) -> bool:
        """True if A is no Toeplitz matrix, and small enough to be one of numbers."""
        varies = self.rates is not None or isinstance(self.average, tuple)
        return varies and self.num_steps <= LARGEST_DENSE

    def response(self) -> Array:
        """Returns (n,) what a gradient does to the weights, or to their average, after 0, 1, 2, ... steps."""
        if isinstance(self.average, tuple):
            raise InvalidValue("Workload.response", "average", self.average[:3], "and so on must be one number.")
        impulse = np.zeros(self.num_steps)
        impulse[0] = 1 - self.average
        smoothed = _divided(impulse, [1.0, -self.momentum])
        return _divided(_divided(smoothed, [1.0, -(1 - self.weight_decay)]), [1.0, -self.average])

    def matrix(self) -> Array:
        """Returns (n, n) A, with row t the share of each gradient in the weights, or their average, after step t."""
        n, rates = self.num_steps, np.ones(self.num_steps) if self.rates is None else np.array(self.rates)
        rates = rates / np.sqrt(np.mean(rates**2))
        averages = np.broadcast_to(self.average, n)
        total, smoothed, averaged, rows = np.zeros(n), np.zeros(n), np.zeros(n), np.empty((n, n))
        for t in range(n):
            smoothed *= self.momentum
            smoothed[t] += 1.0
            total = (1 - self.weight_decay) * total + rates[t] * smoothed
            averaged = averages[t] * averaged + (1 - averages[t]) * total
            rows[t] = averaged
        return rows


def _divided(numerator: Array, denominator: Sequence[float] | Array) -> Array:
    """Returns the coefficients of the quotient of two power series, for each row."""
    return np.asarray(scipy.signal.lfilter([1.0], np.asarray(denominator, float), numerator))


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


def inverse_error(coefficients: Sequence[float] | Array, workload: Workload) -> float:
    """Returns what `mean_error` does for noise ``x_t = w_0 z_t + w_1 z_{t-1} + ...``, at equal learning rates."""
    b = np.convolve(workload.response(), coefficients)[: workload.num_steps]
    return float(np.sqrt(np.arange(workload.num_steps, 0, -1.0) @ b**2 / workload.num_steps))


@lru_cache(maxsize=64)
def inverse_coefficients(bands: int, workload: Workload, num_batches: int) -> tuple[float, ...]:
    """Returns w_0, ..., w_{p-1} of the banded inverse square root of the workload, scaled to the price of its passes.

    The series are the first p coefficients of ``1 / sqrt(response)``: 1, -1/2, -1/8, -1/16, ... for sums. Every example
    takes part once in ``num_batches`` steps, so that k passes have the sensitivity of the sum of k columns of
    ``C = W^-1``. All entries of C are at least 0, so that this is the worst case, also for gradients chosen adaptively.
    The scale makes it at most √k after any number k of passes, as for k Gaussian releases.

    Args:
        bands: p, at least 1.
        workload: what the optimizer sums up, at equal learning rates.
        num_batches: of a pass over the data.

    Raises:
        ValueError: C has negative entries, or so few bands make the error larger.

    Source: Kalinin, McKenna, Upadhyay & Lampert (2025), arXiv:2505.12128; Denisov et al. (2022), arXiv:2202.08312.

    Example:
        >>> [round(w / inverse_coefficients(4, Workload(8), 8)[0], 4) for w in inverse_coefficients(4, Workload(8), 8)]
        [1.0, -0.5, -0.125, -0.0625]
    """
    whole("inverse_coefficients", at_least=1, bands=bands, num_batches=num_batches)
    n = workload.num_steps
    response = workload.response() / workload.response()[0]
    w = np.ones(min(bands, n))
    for k in range(1, len(w)):  # of a power -1/2 of a series
        j = np.arange(1, k + 1)
        w[k] = ((-0.5 * j - (k - j)) * response[1 : k + 1]) @ w[k - 1 :: -1] / k
    passes = -(-n // num_batches)
    c = inverse(w, passes * num_batches)
    if c.min() < -1e-12:
        raise InvalidValue("inverse_coefficients", "bands", bands, "must be another number: C has negative entries.")
    total, largest = np.zeros_like(c), 0.0
    for k in range(passes):
        total[k * num_batches :] += c[: len(c) - k * num_batches]
        largest = max(largest, float(np.sum(total[: (k + 1) * num_batches] ** 2)) / (k + 1))
    w = w * np.sqrt(largest) * (1 + 1e-9)  # rounded upwards
    if inverse_error(w, workload) > 1.01 * inverse_error((1.0,), workload):
        few = "is too small for this momentum, weight decay and average: independent noise has a smaller error."
        raise InvalidValue("inverse_coefficients", "bands", bands, few)
    return (*w.tolist(), *[0.0] * (bands - len(w)))


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

    found = scipy.optimize.minimize(
        loss, start[1:], jac=True, method="L-BFGS-B", bounds=[(0, 1)] * (bands - 1), tol=1e-12
    )
    c = np.append(1.0, found.x)
    return tuple(np.round(c / np.linalg.norm(c), DIGITS).tolist())


@lru_cache(maxsize=2)
def _reversed_matrix(workload: Workload) -> Array:
    return workload.matrix()[:, ::-1].copy()


def _square_and_gradient(c: Array, workload: Workload) -> tuple[float, Array]:
    """Returns ``‖A C^-1‖² / n``, and its derivative by each coefficient.

    A change of c_k moves ``C^-1`` by ``-C^-1 S_k C^-1``, with S_k the shift by k.
    """
    n = workload.num_steps
    w = inverse(c, n)
    if workload.differs:
        b = _divided(_reversed_matrix(workload), c)  # A C^-1, from its last column on
        spectrum = (np.abs(np.fft.rfft(b, 2 * n)) ** 2).sum(0)
        diagonals = np.fft.irfft(spectrum)[:n]  # sums over those of B^T B
        square = float(np.sum(b**2))
        slopes = [-2 * float(diagonals[k:] @ w[: n - k]) if k < n else 0.0 for k in range(len(c))]
        return square / n, np.array(slopes) / n
    response = workload.response()
    b = _divided(response, c)  # column of A C^-1, which is Toeplitz
    rows = np.arange(n, 0, -1.0)  # in which each of its entries stands
    square = float(rows @ b**2)
    moved = _divided(b, c)  # of A C^-2
    slopes = [-2 * float((rows * b)[k:] @ moved[: n - k]) if k < n else 0.0 for k in range(len(c))]
    return square / n, np.array(slopes) / n
