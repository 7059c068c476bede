# SPDX-License-Identifier: Apache-2.0
"""Knows which code is a library's, and not the user's: wherever its environment keeps installed packages."""

from __future__ import annotations

import functools
import site
import sysconfig
from pathlib import Path

from .warning import PACKAGES

_FOLDERS = {"site-packages", "dist-packages"}  # also of the environment below a virtual one, or of the user
_STATED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_STATED |= {*site.getsitepackages(), site.getusersitepackages()}
_PATHS = tuple(_STATED | {str(Path(path).resolve()) for path in _STATED})


@functools.cache
def is_library(file: str) -> bool:
    """True for a file of Python itself, of an installed package, or of this library."""
    return file.startswith(("<frozen", *_PATHS, *PACKAGES)) or not _FOLDERS.isdisjoint(Path(file).parts)
