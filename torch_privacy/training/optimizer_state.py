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

    Writes through ``.data`` are not seen. Single numbers are left out: they count steps.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._known = {place: (value, version_of(local_of(value))) for place, value in self._present().items()}

    def moved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Returns the names of what is new or was written into since, for these parameters, unless it is zero."""
        names = {id(p): name for name, p in parameters.items()}
        return [
            f"{key} of {names[parameter]}"
            for (parameter, key), value in self._present().items()
            if parameter in names and self._is_other((parameter, key), value) and bool(local_of(value).any())
        ]

    def _is_other(self, place: tuple[int, str], value: Tensor) -> bool:
        known, version = self._known.get(place, (None, 0))
        return known is not value or version_of(local_of(value)) != version

    def _present(self) -> dict[tuple[int, str], Tensor]:
        return {
            (id(parameter), key): value
            for parameter, entries in self._optimizer.state.items()
            for key, value in (entries.items() if isinstance(entries, Mapping) else ())
            if isinstance(value, Tensor) and value.numel() > 1
        }
