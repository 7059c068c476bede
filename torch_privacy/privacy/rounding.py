# SPDX-License-Identifier: Apache-2.0
"""Rounds bounds to decimal text on the safe side: lower bounds down, upper bounds up, exactly."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from math import isfinite

import numpy as np

LARGE = 1e6  # numbers from here on are written with a power of ten


def fixed(value: float, digits: int, rounding: str) -> str:
    """Returns a finite number with the given number of decimals, rounded in the given direction."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding))


def scientific(value: float, rounding: str = ROUND_CEILING) -> str:
    """Returns three significant digits, rounded in the given direction.

    Example:
        >>> scientific(1.0001e-5), scientific(9.999e-6), scientific(9.999e-6, ROUND_FLOOR), scientific(0.25)
        ('1.01e-5', '1.00e-5', '9.99e-6', '2.50e-1')
    """
    if not 0 < value < 1e300:
        return f"{value:g}"
    exact = Decimal(value)
    rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), rounding)
    exponent = rounded.adjusted()  # one more if 9.999 became 10.00
    digits = rounded.scaleb(-exponent).quantize(Decimal("0.01"))
    return f"{digits}e{exponent}" if exponent else str(digits)


def short(value: float, rounding: str = ROUND_CEILING, digits: int = 6) -> str:
    """Returns up to six significant digits, rounded in the given direction: a δ, or a target, as one writes it.

    Example:
        >>> short(1e-5), short(1 / 293110), short(2.0), short(1 / 293110, ROUND_FLOOR)
        ('1e-05', '3.41169e-06', '2', '3.41168e-06')
    """
    if not value or not isfinite(value):
        return f"{value:g}"
    exact = Decimal(repr(float(value)))  # the digits that were written, not those of the binary number
    return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), rounding)):g}"


def round_down(value: float, digits: int = 3) -> str:
    """Returns a lower bound with ``digits`` decimals, never rounded up."""
    return _directed(value, digits, ROUND_FLOOR)


def round_up(value: float, digits: int = 3) -> str:
    """Returns an upper bound with ``digits`` decimals, never rounded down; from a million on, three significant digits.

    Example:
        >>> round_up(11.80701), round_down(11.80799), round_up(3.7865e11)
        ('11.808', '11.807', '3.79e11')
    """
    return _directed(value, digits, ROUND_CEILING)


def in_float32(value: float) -> float:
    """Returns the smallest number of single precision that is not below an upper bound, for files that keep no more.

    Example:
        >>> in_float32(0.3), in_float32(0.7), in_float32(2.0)  # the nearest to 0.7 is below it
        (0.30000001192092896, 0.7000000476837158, 2.0)
    """
    nearest = np.float32(value)
    return float(nearest if float(nearest) >= value else np.nextafter(nearest, np.float32(np.inf)))


def _directed(value: float, digits: int, rounding: str) -> str:
    if not isfinite(value):
        return str(value)
    return scientific(value, rounding) if value >= LARGE else fixed(value, digits, rounding)
