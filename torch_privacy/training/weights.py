# SPDX-License-Identifier: Apache-2.0
"""Who moved the weights? Between two steps of a private training nobody but its own updates may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._validate import Refused

SOME = 16  # entries of each parameter that are remembered


class WeightMarks:
    """What some entries of each parameter are, and how often it was written into, when it was looked at last."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        self._views = {name: (p, p.data_ptr(), _some(p)) for name, p in parameters.items()}
        self.renew()

    def renew(self) -> None:
        """Look at them now."""
        self._entries = [view.clone() for _, _, view in self._views.values()]
        self._versions = [p._version for p, _, _ in self._views.values()]

    def holds(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether these are the parameters that are looked at, in the memory where they were."""
        known = self._views
        return parameters.keys() == known.keys() and all(
            known[name][0] is p and known[name][1] == p.data_ptr() for name, p in parameters.items()
        )

    def moved(self) -> list[str]:
        """Names of the parameters that are others since they were looked at."""
        return [
            name
            for (name, (p, place, view)), before in zip(self._views.items(), self._entries, strict=True)
            if p.data_ptr() != place or not torch.equal(view, before)
        ]

    def untouched(self) -> bool:
        """Whether nothing was written into any of them since."""
        return self._versions == [p._version for p, _, _ in self._views.values()] and not self.moved()


def _some(p: Tensor) -> Tensor:
    """A view of some entries, as whole numbers, which are equal where they are undefined, too."""
    flat = p.detach().view(-1) if p.is_contiguous() else p.detach().flatten()[:0]
    some = flat[:: max(1, flat.numel() // SOME)]
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return some.view(kinds[p.itemsize]) if p.itemsize in kinds else torch.view_as_real(some)


class OptimizerGuard:
    """Refuses the steps of any optimizer that holds trained parameters, but the training's own.

    Args:
        parameters: gives the trained parameters.
    """

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]]):
        self._parameters, self._own_step = parameters, False
        self._handle = register_optimizer_step_pre_hook(self._check)

    def step(self, optimizer: Optimizer) -> None:
        """The training's own step."""
        self._own_step = True
        try:
            optimizer.step()
        finally:
            self._own_step = False

    def close(self) -> None:
        """Let every step pass again."""
        self._handle.remove()

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if self._own_step:
            return
        trained = {id(p) for p in self._parameters().values()}
        if any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
            raise Refused(
                "PrivateTraining: optimizer.step() was called inside of the loop, with a gradient that is not private. "
                "No weight was moved. Leave out losses.backward(), optimizer.step() and GradScaler: "
                "training.step(losses) makes the gradient, clips, adds noise, and steps the optimizer. A trainer that "
                "makes the steps itself cannot be used."
            )
