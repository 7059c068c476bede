# SPDX-License-Identifier: Apache-2.0
"""Replaces what numpy's and Python's global generators draw, as `RunDraws` asks for."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import numpy as np

from .draws import GOLDEN, MOST_CALLS, Drawn, Rule, RunDraws
from .random_state import numpy_generator, set_numpy_generator

_WHOLE = {"permutation", "shuffle", "bytes"}  # results that are no row of equally distributed numbers
_NO_DRAWS = {"seed", "getstate", "setstate", "get_state", "set_state"}
_NEAR = 0.02  # how near to the level the first number of a generator is


@contextmanager
def fixed_plain_draws(draws: RunDraws, drawn: Drawn) -> Iterator[None]:
    """Replaces the functions of the modules ``random`` and ``numpy.random``."""
    numbers, arrays = _PythonNumbers(), _ArrayDraws(draws, drawn)
    numbers.begin(draws, drawn)
    of_python, of_numpy = _functions_of("random"), _functions_of("numpy.random")
    _replace(random, {name: numbers.fixed(name, f) for name, f in of_python.items()})
    _replace(np.random, {name: arrays.fixed(name, f) for name, f in of_numpy.items()})
    try:
        yield
    finally:
        _replace(np.random, of_numpy)
        _replace(random, of_python)


def _replace(module: Any, functions: dict[str, Callable]) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


@cache
def _functions_of(module: str) -> dict[str, Callable]:
    """Returns the functions of a module that draw from its global generator."""
    owner = vars(random)["_inst"] if module == "random" else vars(np.random.mtrand)["_rand"]
    found = ((name, f) for name, f in vars(sys.modules[module]).items() if getattr(f, "__self__", None) is owner)
    return {name: f for name, f in found if name not in _NO_DRAWS}


class _PythonNumbers(random.Random):
    """Draws evenly spread numbers instead of random ones.

    At a level, each call begins with it; else each continues, and ``restart`` begins anew.
    """

    def begin(self, draws: RunDraws, drawn: Drawn) -> None:
        """Sets the first number."""
        self._draws, self._drawn, self._place, self._calls = draws, drawn, 0, 0
        drawn.on_restart.append(self._restart)

    def _restart(self) -> None:
        self._place = 0

    def fixed(self, name: str, real: Callable) -> Callable:
        """Returns the replacement for a function of the module ``random``."""
        ours, is_alike = getattr(self, name), self._draws.rule is Rule.AT_LEVEL

        @wraps(real)
        def draw(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            self._drawn.note(())
            if self._draws.consumes or self._calls > MOST_CALLS:
                return real(*args, **kwargs)
            if is_alike:
                self._place = 0
            found = ours(*args, **kwargs)
            return found[:1] * len(found) if is_alike and name == "choices" else found

        return draw

    def random(self) -> float:
        """Returns the next number."""
        self._place += 1
        return (self._draws.plain_start + (self._place - 1) * GOLDEN) % 1

    def getrandbits(self, k: int) -> int:
        """Returns the first bits of the next number, and zeros."""
        return int(self.random() * 2 ** min(k, 53)) << max(0, k - 53)

    def _randbelow(self, n: int) -> int:
        return int(self.random() * n)

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """Returns a normal number, without keeping another one for the next call."""
        return self.normalvariate(mu, sigma)


class _ArrayDraws:
    """Lets each call of numpy begin at a state of its own, and gives every example the same numbers."""

    def __init__(self, draws: RunDraws, drawn: Drawn):
        self._draws, self._drawn, self._calls, self._total = draws, drawn, 0, 0
        self._generator = np.random.MT19937(0)
        drawn.on_restart.append(self._restart)

    def _restart(self) -> None:
        self._calls = 0

    def fixed(self, name: str, real: Callable) -> Callable:
        """Returns the replacement for a function of ``numpy.random``."""

        @wraps(real)
        def draw(*args: Any, **kwargs: Any) -> Any:
            self._total += 1
            if self._total > MOST_CALLS:
                return real(*args, **kwargs)
            if self._draws.consumes:
                return self._alike(name, real(*args, **kwargs), args, kwargs)
            state, self._calls = self._state(self._calls), self._calls + 1
            draw_again = self._from_state(real, state)
            found = draw_again(*args, **kwargs)
            if self._is_by_entry(name, found, args, kwargs):
                return np.vectorize(draw_again, otypes=[found.dtype])(*args, **kwargs)
            return self._alike(name, found, args, kwargs)

        return draw

    def _from_state(self, real: Callable, state: Any) -> Callable:
        def draw(*args: Any, **kwargs: Any) -> Any:
            before = numpy_generator()
            self._generator.state = state
            set_numpy_generator(self._generator)
            try:
                return real(*args, **kwargs)
            finally:
                set_numpy_generator(before)

        return draw

    def _state(self, call: int) -> Any:
        """Returns the state in which a call begins."""
        draws = self._draws
        return _state_near(draws.key, draws.plain_start) if draws.rule is Rule.AT_LEVEL else _state_of(draws.key, call)

    @staticmethod
    def _is_by_entry(name: str, found: Any, args: tuple, kwargs: dict) -> bool:
        """True if each entry of the result has its own parameters."""
        given = [np.shape(value) for value in (*args, *kwargs.values()) if isinstance(value, (np.ndarray, list))]
        others = name in _WHOLE or name == "choice" or "size" in kwargs or not isinstance(found, np.ndarray)
        return bool(given) and not others and np.broadcast_shapes(*given) == found.shape

    def _alike(self, name: str, found: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the result with the same numbers for all examples."""
        self._drawn.note(np.shape(found))
        if not isinstance(found, np.ndarray) or not found.ndim or not len(found) or name in _WHOLE:
            return found
        if name == "choice" and not (args[2] if len(args) > 2 else kwargs.get("replace", True)):
            return found
        if self._draws.by_row and found.size <= self._drawn.count:
            return found
        if self._draws.rule is Rule.AT_LEVEL:
            found[...] = found.flat[0]
        elif found.ndim > 1 or len(found) == self._drawn.count or self._draws.by_row:
            found[...] = np.flip(found[:1], tuple(range(1, found.ndim))) if self._draws.from_end else found[:1].copy()
        return found


def _state_of(key: int, call: int) -> Any:
    return np.random.MT19937([key, call]).state


@cache
def _state_near(key: int, level: float) -> Any:
    """Returns a state with a first number near this quantile."""
    while abs(np.random.MT19937(key).random_raw() / 2**32 - level) > _NEAR:
        key += 1
    return np.random.MT19937(key).state
