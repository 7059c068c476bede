# SPDX-License-Identifier: Apache-2.0
"""Keeps notes on objects that belong to others, such as models, which store nothing themselves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Owner = TypeVar("Owner")
Note = TypeVar("Note")


class Notes:
    """The notes on each object, while it exists; equal objects have separate ones."""

    def __init__(self) -> None:
        self._notes: dict[int, dict[Callable[..., Any], Any]] = {}  # by id: models may define equality
        self._lock = threading.Lock()

    def of(self, owner: Owner, make: Callable[[Owner], Note]) -> Note:
        """Returns what ``make(owner)`` returned when it was first asked for; it must not refer to the owner."""
        with self._lock:
            if id(owner) not in self._notes:
                self._notes[id(owner)] = {}
                weakref.finalize(owner, self._notes.pop, id(owner), None).atexit = False
            found = self._notes[id(owner)]
        if make not in found:
            made = make(owner)
            return found.setdefault(make, made)
        return found[make]

    def forget(self, owner: object) -> None:
        """Drops the notes on an object."""
        self._notes.get(id(owner), {}).clear()


NOTES = Notes()
