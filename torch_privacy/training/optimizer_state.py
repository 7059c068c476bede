# SPDX-License-Identifier: Apache-2.0
"""Detects writes of other code into an optimizer's state, which the next update would give to the weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from ..support.versions import version_of
from .placement import local_of


class OptimizerMarks:
    """Remembers the tensors of an optimizer's state, such as momenta, and how often each was written into.

    Writes through ``.data`` are not seen. Counts of steps are left out.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._known = {(id(p), key): (value, _version(value)) for p, key, value in self._present()}

    def moved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Returns the names of what is new or was written into since, for these parameters, unless it is zero."""
        others = [place for place in self._present() if self._is_other(*place)]
        if not others:
            return []
        names = {id(p): name for name, p in parameters.items()}
        return [
            f"{key} of {names[id(p)]}" for p, key, value in others if id(p) in names and bool(local_of(value).any())
        ]

    def _is_other(self, p: Tensor, key: str, value: Tensor) -> bool:
        known, version = self._known.get((id(p), key), (None, 0))
        return known is not value or _version(value) != version

    def _present(self) -> list[tuple[Tensor, str, Tensor]]:
        return [
            (p, key, value)
            for p, entries in self._optimizer.state.items()
            if isinstance(entries, dict)
            for key, value in entries.items()
            if key != "step" and isinstance(value, Tensor) and (value.ndim or not p.ndim)
        ]


def _version(value: Tensor) -> int:
    value = value if type(value) is Tensor else local_of(value)
    return 0 if value.is_inference() else version_of(value)
