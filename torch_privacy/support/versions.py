# SPDX-License-Identifier: Apache-2.0
"""Detects writes into tensors by their versions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class Versions:
    """Remembers the versions of tensors, which count the writes into them other than through ``.data``."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._tensors = [*tensors]
        self._versions = [t._version for t in self._tensors]

    def are_current(self) -> bool:
        """True if nothing was written into any of the tensors since."""
        return self._versions == [t._version for t in self._tensors]

    def unchanged(self) -> list[Tensor]:
        """Returns the tensors into which nothing was written since."""
        return [t for t, version in zip(self._tensors, self._versions, strict=True) if t._version == version]
