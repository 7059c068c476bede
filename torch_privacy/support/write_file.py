# SPDX-License-Identifier: Apache-2.0
"""Writes files so that a crash or a power failure leaves the old content or the new one, complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
PUBLIC, OWN = 0o644, 0o600  # who may read: all whom the umask allows; the owner alone
UNFOLLOWED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # to open the file itself, and no link


def partial_of(path: Path) -> Path:
    """Returns the name under which a file is written before it is complete."""
    return path.with_name(path.name + PARTIAL)


def write_whole(path: Path, save: Callable[[BinaryIO], object], mode: int = OWN) -> None:
    """Writes a temporary file with ``save``, flushes it to disk and renames it; follows no link.

    Its owner alone can read it, unless the ``mode`` is `PUBLIC`.

    Raises:
        OSError: with the name of the file, which is unchanged.
    """
    partial = partial_of(path)
    try:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_directory(directory: Path) -> None:
    """Returns when the names of the files in a directory are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot
        return
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
