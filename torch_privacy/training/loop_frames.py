# SPDX-License-Identifier: Apache-2.0
"""Finds the user's code: its frames on the stack, its objects, and what is not of a library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..support.libraries import is_library
from ..support.warning import PACKAGES


def frames_of_loop() -> list[FrameType]:
    """Returns the frames of the user's code that are on the stack, the innermost first."""
    outside = [frame for frame in _stack() if not frame.f_code.co_filename.startswith(PACKAGES)]
    return [frame for frame in outside if not is_library(frame.f_code.co_filename)] or outside[:1]


def objects_of_loop() -> list[Any]:
    """Returns the objects of the user's classes that run code of a library, such as a Trainer's subclass.

    The user's code may have no name for them, as in ``Trainer(...).train()``.
    """
    methods = [frame for frame in _stack() if frame.f_code.co_argcount and frame.f_code.co_varnames[0] == "self"]
    objects = [frame.f_locals.get("self") for frame in methods if is_library(frame.f_code.co_filename)]
    return [value for value in objects if is_users(type(value))]


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(kind: type) -> bool:
    """True if a class is defined in the user's own code."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or module is None or (file is not None and not is_library(file))
