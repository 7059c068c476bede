# SPDX-License-Identifier: Apache-2.0
"""Registers the modules and parameters that a step or an average uses for a while, so that nothing else does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

Used = nn.Module | Tensor

_IN_USE: dict[int, weakref.ref[Used]] = {}  # by id


def begin_use(used: Iterable[Used]) -> list[Used]:
    """Registers these; returns those that were not in use."""
    new = [one for one in used if not is_in_use([one])]
    _IN_USE.update({id(one): weakref.ref(one) for one in new})
    return new


def end_use(used: Iterable[Used]) -> None:
    """Undoes `begin_use`."""
    for one in used:
        _IN_USE.pop(id(one), None)


def is_in_use(some: Iterable[Used]) -> bool:
    """True if one of these is in use."""
    found = [one for one in some if id(one) in _IN_USE]
    return bool(found) and any(_IN_USE[id(one)]() is one for one in found)
