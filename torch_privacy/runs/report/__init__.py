# SPDX-License-Identifier: Apache-2.0
"""Renders run folders as self-contained HTML pages, and draws figures of privacy curves.

Figures are drawn without a backend. So matplotlib is imported even where ``MPLBACKEND`` names one that this Python does
not have, as that of a notebook's kernel; where it has it, the backend stays the one that was named.
"""

import os
import sys
from contextlib import suppress


def _import_matplotlib() -> None:
    named = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named
    if named is not None:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = named


if "matplotlib" not in sys.modules:
    _import_matplotlib()
