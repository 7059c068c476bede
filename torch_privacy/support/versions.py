# SPDX-License-Identifier: Apache-2.0
"""Detects writes into tensors by their versions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import attrgetter, eq

from torch import Tensor

version_of = attrgetter("_version")


class Versions:
    """Remembers the versions of tensors, which count the writes into them other than through ``.data``."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._tensors = [*tensors]
        self._versions = [*map(version_of, self._tensors)]

    def are_current(self) -> bool:
        """True if nothing was written into any of the tensors since."""
        return self._versions == [*map(version_of, self._tensors)]

    def unchanged(self) -> list[Tensor]:
        """Returns the tensors into which nothing was written since."""
        now = [*map(version_of, self._tensors)]
        return [*compress(self._tensors, map(eq, now, self._versions))]
