# SPDX-License-Identifier: Apache-2.0
"""Warns at the line of the user's code, however deep inside of the package the reason was found."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
PACKAGES = (_ROOT + os.sep, _ROOT + "_papers" + os.sep)  # the library's own code
_NOT_USERS = (*PACKAGES, contextlib.__file__)


def warn(text: str) -> None:
    """Gives a ``UserWarning`` that names the innermost line outside of the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
