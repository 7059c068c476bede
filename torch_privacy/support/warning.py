# SPDX-License-Identifier: Apache-2.0
"""Warns at the line of the user's code, however deep inside of the package the reason was found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_ROOT = str(Path(__file__).resolve().parents[1])
PACKAGES = (_ROOT + os.sep, _ROOT + "_papers" + os.sep)  # the library's own code
_NOT_USERS = (*PACKAGES, contextlib.__file__, dataclasses.__file__)
_NAME = __name__.partition(".")[0]
_PREFIXES = (f"{_NAME}.", f"{_NAME}_papers.")  # of names of modules


def warn(text: str) -> None:
    """Gives a ``UserWarning`` that names the innermost line outside of the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_not_users(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _is_not_users(frame: FrameType) -> bool:
    """True of a frame of the library, such as the ``__init__`` that is generated for one of its dataclasses."""
    file = frame.f_code.co_filename
    is_generated = file == "<string>" and frame.f_globals.get("__name__", "").startswith(_PREFIXES)
    return is_generated or file.startswith(_NOT_USERS)
