# SPDX-License-Identifier: Apache-2.0
"""Who moved the weights? Between two steps of a private training nobody but its own updates may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._check import Refused

SOME = 16  # entries of each parameter that are remembered


class WeightMarks:
    """What some entries of each parameter are now, and how often the parameter was written into."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        self._entries = {name: _some(p) for name, p in parameters.items()}
        self._versions = {name: p._version for name, p in parameters.items()}

    def moved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Names of the parameters whose entries are others now."""
        both = [name for name in parameters if name in self._entries]
        before, now = [self._entries[name] for name in both], [_some(parameters[name]) for name in both]
        return [n for n, a, b in zip(both, before, now, strict=True) if not torch.equal(a.nan_to_num(), b.nan_to_num())]

    def untouched(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether nothing was written into any of them."""
        same = all(p._version == self._versions.get(name) for name, p in parameters.items())
        return same and not self.moved(parameters)


@torch.no_grad()
def _some(p: Tensor) -> Tensor:
    flat = p.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SOME)].clone()


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
