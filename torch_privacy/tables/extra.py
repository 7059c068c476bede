# SPDX-License-Identifier: Apache-2.0
"""Imports the optional libraries of this room when they are first needed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def needed(name: str) -> ModuleType:
    """Returns the module of an optional library.

    Raises:
        ImportError: one sentence that names the extra, if it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        library = name.split(".")[0]
        raise ImportError(
            f"torch_privacy.tables needs {library}, which is not installed. Install it with: "
            "pip install 'torch-privacy[tables]'"
        ) from error
