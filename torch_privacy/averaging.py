# SPDX-License-Identifier: Apache-2.0
"""The average of a model's weights over the steps of a training: less noise than the last weights, at no cost."""

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ._validate import strictly_between


class MovingAverage:
    """Exponential moving average of a model's weights: after step t = 0, 1, ... ``a = d a + (1 - d) w``.

    Early on the average forgets faster, ``d = min(decay, (1 + t) / (10 + t))``, so that the first weights do not stay.

    Args:
        model: whose weights are averaged.
        optimizer: after each of its steps the average is brought up to date.
        decay: weight of the past, in (0, 1); averages over about ``1 / (1 - decay)`` steps.

    Attributes:
        model: a copy of the model with the averaged weights, not to be trained; buffers are the latest.

    Guarantees:
        - Under `PrivateTraining` the average is a function of the released gradients alone, hence covered by the same
          epsilon: it moves at every step, that of an empty batch included, which the training loop does not see.

    Raises:
        ValueError: a decay out of range.

    Source: De, Berrada, Hayes, Smith & Balle (2022), arXiv:2204.13650, section 3.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> average = MovingAverage(model, optimizer, decay=0.99)
        >>> model(torch.ones(4, 1)).sum().backward()
        >>> optimizer.step()
        >>> average.step_count
        1
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, decay: float = 0.999):
        strictly_between("MovingAverage", 0, 1, decay=decay)
        self.decay, self.step_count = decay, 0
        self._trained = model
        self.model = copy.deepcopy(model).requires_grad_(False)
        optimizer.register_step_post_hook(self._follow)

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` goes on from."""
        return {"step_count": self.step_count, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.step_count = state["step_count"]
        self.model.load_state_dict(state["model"])

    @torch.no_grad()
    def _follow(self, *_: Any) -> None:
        weight = 1 - min(self.decay, (1 + self.step_count) / (10 + self.step_count))
        for mean, now in zip(self.model.parameters(), self._trained.parameters(), strict=True):
            mean.lerp_(now, weight)
        for kept, now in zip(self.model.buffers(), self._trained.buffers(), strict=True):
            kept.copy_(now)
        self.step_count += 1
