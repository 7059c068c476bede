# SPDX-License-Identifier: Apache-2.0
"""What every answer of the accountant is: two bounds on one true value."""

from typing import Any, Generic, NamedTuple, TypeVar

from numpy.typing import NDArray

Array = NDArray[Any]
T = TypeVar("T")


class Bracket(NamedTuple, Generic[T]):
    """Two bounds on one true value: ``low <= truth <= high``; numbers, arrays of one shape, or trade-off functions."""

    low: T
    high: T


def inner(first: Bracket[float], second: Bracket[float]) -> Bracket[float]:
    """What two brackets of the same value say together."""
    high = min(first.high, second.high)
    return Bracket(min(max(first.low, second.low), high), high)
