# SPDX-License-Identifier: Apache-2.0
"""Locks a folder for one process, until it ends."""

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from torch_privacy.support.file_lock import lock, note_holder
from torch_privacy.support.write_file import UNFOLLOWED


class FolderLock:
    """The lock of a folder, a file in it; it ends with the process, even by ``kill -9``."""

    def __init__(self, folder: Path):
        self.file = folder / "lock"
        self._close: Callable[[], object] | None = None

    @property
    def is_held(self) -> bool:
        """True if this object holds the lock."""
        return self._close is not None

    def take(self) -> None:
        """Takes the lock; raises a ``ValueError`` if another run, in this process or another, has it."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | UNFOLLOWED, 0o644)
        try:
            lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise OSError(error.errno, error.strerror, str(self.file)) from None
            raise ValueError(
                f"{self.file.parent}: another process is training in this folder. Wait until it ends."
            ) from None
        self._close = weakref.finalize(self, os.close, descriptor)
        note_holder(descriptor, self)

    def release(self) -> None:
        """Gives the lock back, if it is held."""
        if self._close is not None:
            self._close()
        self._close = None

    def lose(self, reason: str) -> None:
        """Gives the lock up in a forked process, which does not have it."""
        self.release()
