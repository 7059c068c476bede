# SPDX-License-Identifier: Apache-2.0
"""Provides `Bracket`, the two bounds in which the accountant encloses every true value."""

from typing import Any, Generic, NamedTuple, TypeVar

from numpy.typing import NDArray

Array = NDArray[Any]
T = TypeVar("T")


class Bracket(NamedTuple, Generic[T]):
    """Two bounds on one true value: ``low <= truth <= high``; numbers, arrays of one shape, or trade-off functions."""

    low: T
    high: T


def ordered(low: float, high: float) -> Bracket[float]:
    """Returns the bracket ``(min(low, high), high)``: rounding must not lift a lower bound above the upper one."""
    return Bracket(min(low, high), high)


def inner(first: Bracket[float], second: Bracket[float]) -> Bracket[float]:
    """Returns the intersection of two brackets of the same value."""
    return ordered(max(first.low, second.low), min(first.high, second.high))
