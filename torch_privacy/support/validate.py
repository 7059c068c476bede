# SPDX-License-Identifier: Apache-2.0
"""Provides one-line validators, which raise a ``ValueError``: where, what was given, what is allowed, what to do."""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import numpy as np

LARGEST = sys.float_info.max
PLACE_IN_MEMORY = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of an object that has none of its own
AT_A_GLANCE = 8  # names, among which a misspelt one is found by eye
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Refused(ValueError):
    """Raised where going on would break exactness or privacy; nothing was released and nothing was lost.

    The message names the culprit (parameter, op, module or argument) and the cure.
    """


class InvalidValue(ValueError):
    """Raised for an argument with a value that is not allowed; `named` lets a command call it by its own name."""

    def __init__(self, where: str, name: str, value: Any, allowed: str):
        super().__init__(where, name, value, allowed)
        self.where, self.name, self._value, self._allowed = where, name, value, allowed.strip()

    def __str__(self) -> str:
        return self.named(f"{self.name}=")

    def named(self, shown: str) -> str:
        """Returns the message with this text before the value."""
        return f"{self.where}: {shown}{self._value!r} {self._allowed}"


def plain_number(value: Any) -> Any:
    """Returns a scalar of numpy or torch as Python's number; in tuples, too; anything else as it is.

    Example:
        >>> plain_number(np.float32(0.5)), plain_number((np.int64(3), "3")), plain_number("0.5")
        (0.5, (3, '3'), '0.5')
    """
    if type(value) is tuple:
        return tuple(plain_number(item) for item in value)
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    is_array = getattr(value, "shape", None) == () and hasattr(value, "item")
    if is_array and not getattr(value, "requires_grad", False) and isinstance(value.item(), (int, float)):
        return value.item()
    return value


def plain_numbers(decorated: Decorated) -> Decorated:
    """Decorates a function, or a class for its ``__init__``: scalars of numpy and torch arrive as Python's numbers."""
    function = decorated.__init__ if isinstance(decorated, type) else decorated

    @functools.wraps(function)
    def with_plain_numbers(*args: Any, **kwargs: Any) -> Any:
        return function(*map(plain_number, args), **{name: plain_number(value) for name, value in kwargs.items()})

    if not isinstance(decorated, type):
        return with_plain_numbers  # pyright: ignore[reportReturnType]
    decorated.__init__ = with_plain_numbers
    return decorated  # pyright: ignore[reportReturnType]


def _all_finite_numbers(where: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not -LARGEST <= value <= LARGEST:  # an integer may be too large for a float
            raise InvalidValue(where, name, value, "must be a finite number.")


def positive(where: str, *, hint: str = "", **values: float) -> None:
    """Raises a ``ValueError`` unless every value is a finite number above zero; ``hint`` ends its message."""
    _all_finite_numbers(where, values)
    for name, value in values.items():
        if value <= 0:
            raise InvalidValue(where, name, value, f"must be greater than 0. {hint}")


def non_negative(where: str, **values: float) -> None:
    """Raises a ``ValueError`` unless every value is a finite number, zero or above."""
    _all_finite_numbers(where, values)
    for name, value in values.items():
        if value < 0:
            raise InvalidValue(where, name, value, "must be 0 or greater.")


def in_range(where: str, low: float, high: float, *, hint: str = "", **values: float) -> None:
    """Raises a ``ValueError`` unless every value lies in the half-open interval ``(low, high]``."""
    _all_finite_numbers(where, values)
    for name, value in values.items():
        if not low < value <= high:
            raise InvalidValue(where, name, value, f"must lie in ({low:g}, {high:g}]. {hint}")


def strictly_between(where: str, low: float, high: float, *, hint: str = "", **values: float) -> None:
    """Raises a ``ValueError`` unless every value lies in the open interval ``(low, high)``."""
    _all_finite_numbers(where, values)
    for name, value in values.items():
        if not low < value < high:
            raise InvalidValue(where, name, value, f"must lie in ({low:g}, {high:g}). {hint}")


def whole(where: str, *, at_least: int = 0, at_most: int | None = None, **values: int) -> None:
    """Raises a ``ValueError`` unless every value is an integer within these limits; 3.0 is refused, too."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise InvalidValue(where, name, value, f"must be an integer of at least {at_least}.")
        if at_most is not None and value > at_most:
            raise InvalidValue(where, name, value, f"must be at most {at_most}.")


def one_of(where: str, allowed: Iterable[Any], **values: Any) -> None:
    """Raises a ``ValueError`` unless every value is among the allowed ones."""
    allowed = list(allowed)
    for name, value in values.items():
        if value not in allowed:
            raise InvalidValue(where, name, value, unknown_name(value, allowed))


def unknown_name(value: Any, allowed: Sequence[Any]) -> str:
    """Returns what a message says of a value that is none of these: the nearest of many names, or all names."""
    close = get_close_matches(str(value), map(str, allowed), n=1) if len(allowed) > AT_A_GLANCE else ()
    return f"is unknown. Did you mean {close[0]!r}?" if close else f"must be one of {', '.join(map(repr, allowed))}."


def quoted(names: Iterable[Any], *, at_most: int | None = None) -> str:
    """Returns the names in quotes, separated by commas; beyond ``at_most`` only the number of the others."""
    listed = [repr(name) for name in names]
    shown = listed[:at_most]
    return ", ".join(shown) + (f" and {len(listed) - len(shown)} more" if len(shown) < len(listed) else "")


def check_unit(where: str, **units: str) -> None:
    """Raises a ``ValueError`` unless each unit is a word or a few, on one line."""
    for name, unit in units.items():
        if not isinstance(unit, str) or not unit.strip() or not unit.isprintable():
            raise ValueError(
                f'{where}: {name}={unit!r} must say in words what is added or removed, such as "customer".'
            )
