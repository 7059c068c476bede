# SPDX-License-Identifier: Apache-2.0
"""Records which code a forward ran: a rehearsal covers only this code, so that other code needs a rehearsal too."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...support.torch_modes import is_any_autocast_enabled, tensors_in
from .functions import FROM_PYTHON

FEW = 16  # numbers in a list or tensor, up to which each is noted
FRAMES = 6  # of the stack that tell a place in the code
MOST_PLACES = 2**14
SMALL = 4  # integers below this are dimensions, flags and counts; larger ones are sizes, which may vary
# Functions that may be given a list with an entry for each example.
TAKE_LISTS = FROM_PYTHON | {torch.split, torch.split_with_sizes, Tensor.split, Tensor.split_with_sizes}


class CodePath:
    """The torch functions that were called, each with the place in the code that called it, and the kinds of numbers.

    A factor that was 0 until now, or 256 times smaller, may let in what was not seen: that is new code, too. The order
    of calls and the sizes of tensors do not count: a layer that is left out at random, or a longer text, is
    not new code.
    """

    def __init__(self) -> None:
        self.features: set[Any] = set()
        self.shapes = 0  # hash of the shapes of all results
        self.dtypes: set[torch.dtype] = set()  # in which results were computed from data
        self.place = 0  # hash of the place in the code of the latest call

    def note_call(self, func: Callable, numbers: tuple, values: tuple = ()) -> None:
        """Adds a call of a torch function with these integers, names and flags, and the kinds of other numbers."""
        place = self.place = _PLACES.number(sys._getframe(2))
        if func in TAKE_LISTS:
            numbers = self._note_entries(numbers)
        self.features.add((func, place, _without_sizes(numbers)))
        for k, value in enumerate(values):
            if type(value) is float or isinstance(value, (float, np.generic)):
                self.features.add((place, k, kind_of_number(value)))
            elif isinstance(value, (list, tuple)) and len(value) <= FEW:
                self.note_kinds(k, [v for v in value if isinstance(v, float)])

    def note_dtypes(self, result: Tensor) -> None:
        """Adds the type of a result, and that of autocast: a recurrent network rounds to it inside alone."""
        self.dtypes.add(result.dtype)
        if is_any_autocast_enabled() and torch.is_autocast_enabled(device := result.device.type):
            self.dtypes.add(torch.get_autocast_dtype(device))

    def _note_entries(self, numbers: tuple) -> tuple:
        """Adds the entries of lists one by one, as few lists of many entries are equal; returns the other numbers."""
        for value in numbers:
            if isinstance(value, tuple):
                entries = _without_sizes(value)
                self.features.update(
                    [(self.place, k if len(entries) <= FEW else None, v) for k, v in enumerate(entries)]
                )
        return tuple(list if isinstance(value, tuple) else value for value in numbers)

    def note_kinds(self, number: int, values: Iterable[float]) -> None:
        """Adds the kinds of the few numbers in an argument of the latest call."""
        self.features.update([(self.place, number, k, kind_of_number(v)) for k, v in enumerate(values)])

    def note_inputs(self, inputs: Any, batch: Any) -> None:
        """Adds whether each input of the model is a tensor of the batch, a view of one, or made by the loop."""
        originals = tensors_in(batch)
        ids, storages = [*map(id, originals)], None
        with torch._C.DisableTorchFunction():
            for k, t in enumerate(tensors_in(inputs)):
                kind = 0
                if id(t) not in ids:
                    storages = {*map(_storage, originals)} if storages is None else storages
                    kind = 1 if _storage(t) in storages else 2
                self.features.add(("input", k, kind))
            for k, t in enumerate(originals):
                if t._version:
                    self.features.add(("written into", k))

    @property
    def convolves(self) -> bool:
        """True if a convolution or a recurrent network was called, which a GPU may multiply less precisely."""
        names = {getattr(feature[0], "__name__", "") for feature in self.features}
        return any("conv" in name or name.startswith(("lstm", "gru", "rnn")) for name in names)

    def note(self, features: Iterable[Any]) -> None:
        """Adds anything else in which paths differ."""
        self.features.update(features)


def kind_of_number(value: Any) -> Any:
    """Returns what a number is equal to, if that is 0, 1, -1, infinity or nan; else its sign and size, by 2⁸."""
    value = float(value.real)
    if value in (0.0, 1.0, -1.0) or value - value != 0.0:
        return repr(abs(value) if value == 0 else value)
    return value > 0, math.frexp(value)[1] >> 3


def _storage(t: Tensor) -> Any:
    return t.untyped_storage().data_ptr() if t.layout is torch.strided and not t.is_nested else id(t)


class _Places:
    """Numbers the places in the code that call torch: six frames of the stack, enough to tell apart two layers.

    A place is known by its functions and the positions of the calls in their source, not in their bytecode: Python
    compiles the condition of a ``while`` loop twice, and a lambda in a loop anew each time.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[int, list[tuple[CodeType, int]]]] = {}  # keeps the code that ids name

    def number(self, frame: Any) -> int:
        """Returns the number of the place that a frame is at.

        The loop is unrolled because this runs for every call of a torch function.
        """
        try:
            a = frame
            b = a.f_back
            c = b.f_back
            d = c.f_back
            e = d.f_back
            f = e.f_back
            codes = id(a.f_code), id(b.f_code), id(c.f_code), id(d.f_code), id(e.f_code), id(f.f_code)
            key = *codes, a.f_lasti, b.f_lasti, c.f_lasti, d.f_lasti, e.f_lasti, f.f_lasti
        except AttributeError:  # the stack has fewer frames
            codes, lasts, a = (), (), frame
            while a is not None:
                codes, lasts, a = (*codes, id(a.f_code)), (*lasts, a.f_lasti), a.f_back
            key = *codes, *lasts
        known = self._known.get(key)
        return self._add(key, _calls(frame)) if known is None else known[0]

    def _add(self, key: tuple[int, ...], calls: list[tuple[CodeType, int]]) -> int:
        if len(self._known) >= MOST_PLACES:  # of code that is made anew in every step
            self._known.clear()
        number = hash(tuple([(code, code.co_filename, _position(code, last)) for code, last in calls]))
        self._known[key] = number, calls
        return number

    def text(self, number: int) -> str:
        """Returns the user's function at a place, with file and line; nothing if it was forgotten."""
        for known, calls in self._known.values():
            own = [call for call in calls if not call[0].co_filename.startswith(_LIBRARIES)]
            if known == number and own:
                code, last = own[0]
                return f"{code.co_qualname} ({Path(code.co_filename).name}, line {_position(code, last)[0]})"
        return ""


def _calls(frame: Any) -> list[tuple[CodeType, int]]:
    """Returns the code of a frame and of the five above it, with the bytecode's positions."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < FRAMES:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def _position(code: CodeType, last: int) -> tuple[int | None, ...]:
    """Returns lines and columns of a call; where Python keeps no columns, the line and the bytecode's position."""
    position = next(islice(code.co_positions(), last // 2, None))
    return position if position[2] is not None else (position[0], last)


_PLACES = _Places()
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class RehearsedCode:
    """Remembers which code was rehearsed. A rehearsal of a batch of one covers only batches of one."""

    def __init__(self) -> None:
        self._features: dict[bool, set[Any]] = {True: set(), False: set()}

    def new_in(self, path: CodePath, num_examples: int) -> set[Any]:
        """Returns what of this code was not rehearsed."""
        new = path.features - self._features[False]
        return new - self._features[True] if num_examples == 1 else new

    def add(self, path: CodePath, num_examples: int) -> None:
        """Adds code that was rehearsed."""
        self.add_features(path.features, num_examples)

    def add_features(self, features: Iterable[Any], num_examples: int) -> None:
        """Adds the features of code that was rehearsed, or changed no answer of a batch that was."""
        self._features[num_examples == 1].update(features)


def described(features: Iterable[Any]) -> str:
    """Returns one of these features in words."""
    calls = [feature for feature in features if callable(feature[0])]
    for func, place, _ in sorted(calls, key=lambda feature: _PLACES.text(feature[1]), reverse=True):
        where = _PLACES.text(place)
        return f"the call of {getattr(func, '__name__', 'an op')}{' in ' if where else ''}{where}"
    return "the size of a number" if any(isinstance(feature[0], int) for feature in features) else "an input's origin"


@lru_cache(maxsize=2**14)
def _without_sizes(numbers: tuple) -> tuple:
    """Returns the values with ``int`` in place of every large integer."""
    return tuple(
        _without_sizes(value)
        if isinstance(value, tuple)
        else int
        if type(value) is int and not -SMALL < value < SMALL
        else value
        for value in numbers
    )
