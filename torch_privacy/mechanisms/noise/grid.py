# SPDX-License-Identifier: Apache-2.0
"""Adds noise on a grid that the noise alone determines.

Why a grid: floating-point numbers are denser near zero, and noise can only take floating-point values. If a sum and its
noise nearly cancel, or if the sum has more bits than the noise, the low bits of the release come from the sum alone and
can reveal who took part, regardless of the noise (Mironov 2012). So both are rounded to multiples of one unit, which
depends only on the noise: then the release is a function of the sum plus noise in real numbers.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

_GRID_BITS = 32  # the grid's unit is 2^-32 standard deviations, rounded down to a power of two
MIN_STDDEV = 2.0**-900  # far above the smallest power of two


def grid_unit(stddev: float) -> float:
    """Returns the unit of the grid of a release with noise of this standard deviation: a power of two."""
    return math.ldexp(0.5, math.frexp(stddev)[1] - _GRID_BITS)


def add_on_grid(values: np.ndarray, noise: np.ndarray, unit: float | np.ndarray) -> None:
    """Replaces values v by ``u·(round(v/u) + round(noise))``.

    Products with powers of two, and sums of integers below 2^53, are exact.

    Args:
        values: (n,) float64.
        noise: (n,) float64 in units of the grid; is overwritten.
        unit: the grid's unit u, or that of each value.
    """
    np.rint(noise, out=noise)
    np.multiply(values, 1 / unit, out=values)
    np.rint(values, out=values)
    np.add(values, noise, out=values)
    np.multiply(values, unit, out=values)


def add_on_device(values: Tensor, noise: Tensor, unit: float) -> Tensor:
    """Returns the same for tensors (n,) on any device that has float64; overwrites the noise."""
    return noise.round_().add_(values.double().mul_(1 / unit).round_()).mul_(unit)
