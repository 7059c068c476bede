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
    new: list[Used] = []
    for one in used:
        known = _IN_USE.get(id(one))
        if known is None or known() is not one:
            new.append(one)
    _IN_USE.update(zip(map(id, new), map(weakref.ref, new), strict=True))
    return new


def end_use(used: Iterable[Used]) -> None:
    """Undoes `begin_use`."""
    for one in used:
        _IN_USE.pop(id(one), None)


def is_in_use(some: Iterable[Used]) -> bool:
    """True if one of these is in use."""
    for one in some:
        known = _IN_USE.get(id(one))
        if known is not None and known() is one:
            return True
    return False
