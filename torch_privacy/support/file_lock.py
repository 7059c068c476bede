# SPDX-License-Identifier: Apache-2.0
"""Locks files for this process: until it ends, even by ``kill -9``; a process that is forked from it has no lock."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

try:
    import fcntl
except ImportError:  # Windows: a second process is not noticed
    fcntl = None


class Holder(Protocol):
    """Holds an open file that is locked."""

    def lose(self, reason: str) -> None:
        """Closes the file, if it is open."""


_HOLDERS: weakref.WeakValueDictionary[tuple[int, int], Holder] = weakref.WeakValueDictionary()  # by device and inode


def holder_of(descriptor: int) -> Holder | None:
    """Returns the object of this process that locked this file last, if it exists; it may have lost the file since."""
    return _HOLDERS.get(_place(descriptor))


def lock(descriptor: int) -> None:
    """Locks an open file, until its descriptor is closed.

    Raises:
        OSError: with EAGAIN or EACCES if it is locked; with another number on a file system without locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def note_holder(descriptor: int, holder: Holder) -> None:
    """Notes who has the file, and loses it in a forked process."""
    _HOLDERS[_place(descriptor)] = holder


def _place(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _leave_to_parent() -> None:
    """Closes the files in a forked process: its parent writes them, and their locks shall end with the parent."""
    for holder in list(_HOLDERS.values()):
        holder.lose("this process was forked from the one that writes it")
    _HOLDERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
