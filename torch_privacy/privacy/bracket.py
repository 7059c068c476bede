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
