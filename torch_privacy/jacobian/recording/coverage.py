# SPDX-License-Identifier: Apache-2.0
"""Records which code a forward ran: a rehearsal covers only this code, so that other code needs a rehearsal too."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...support.torch_modes import tensors_in

FEW = 16  # numbers in a list or tensor, up to which each is noted
SMALL = 4  # integers below this are dimensions, flags and counts; larger ones are sizes, which may vary


class CodePath:
    """The torch functions that were called, each with the place in the code that called it, and the kinds of numbers.

    A factor that was 0 until now, or 256 times smaller, may let in what was not seen: that is new code, too. The order
    of calls and the sizes of tensors do not count: a layer that is left out at random, or a longer text, is
    not new code.
    """

    def __init__(self) -> None:
        self.features: set[Any] = set()
        self.shapes = 0  # hash of the shapes of all results
        self.place = 0  # hash of the place in the code of the latest call

    def note_call(self, func: Callable, numbers: tuple, values: tuple = ()) -> None:
        """Adds a call of a torch function with these integers, names and flags, and the kinds of other numbers."""
        place = self.place = _place(sys._getframe(2))
        self.features.add((func, place, _without_sizes(numbers)))
        for k, value in enumerate(values):
            if type(value) is float or isinstance(value, (float, np.generic)):
                self.features.add((place, k, kind_of_number(value)))
            elif isinstance(value, (list, tuple)) and len(value) <= FEW:
                self.note_kinds(k, [v for v in value if isinstance(v, float)])

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


def _place(a: Any) -> int:
    """Returns a hash of six frames of the stack, enough to distinguish two layers of one class.

    The loop is unrolled because this runs for every call of a torch function.
    """
    try:
        b = a.f_back
        c = b.f_back
        d = c.f_back
        e = d.f_back
        f = e.f_back
        codes = id(a.f_code), id(b.f_code), id(c.f_code), id(d.f_code), id(e.f_code), id(f.f_code)
        return hash((codes, a.f_lasti, b.f_lasti, c.f_lasti, d.f_lasti, e.f_lasti, f.f_lasti))
    except AttributeError:  # the stack has fewer frames
        place = 0
        while a is not None:
            place = hash((place, id(a.f_code), a.f_lasti))
            a = a.f_back
        return place


class RehearsedCode:
    """Remembers which code was rehearsed. A rehearsal of a batch of one covers only batches of one."""

    def __init__(self) -> None:
        self._features: dict[bool, set[Any]] = {True: set(), False: set()}

    def has(self, path: CodePath, num_examples: int) -> bool:
        """True if all of this code was rehearsed."""
        new = path.features - self._features[False]
        return not (new - self._features[True] if num_examples == 1 else new)

    def add(self, path: CodePath, num_examples: int) -> None:
        """Adds code that was rehearsed."""
        self.add_features(path.features, num_examples)

    def add_features(self, features: Iterable[Any], num_examples: int) -> None:
        """Adds the features of code that was rehearsed, or changed no answer of a batch that was."""
        self._features[num_examples == 1].update(features)


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
