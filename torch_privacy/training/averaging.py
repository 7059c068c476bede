# SPDX-License-Identifier: Apache-2.0
"""Averages a model's weights over the steps of a training, which reduces noise at no privacy cost."""

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..support.validate import strictly_between


class MovingAverage:
    """Exponential moving average of a model's weights: after step t = 0, 1, ... ``a = d a + (1 - d) w``.

    In early steps the decay is smaller, ``d = min(decay, (1 + t) / (10 + t))``, so that the average forgets the first
    weights.

    Args:
        model: the model with the weights to average.
        optimizer: the average is updated after each of its steps.
        decay: weight of the past, in (0, 1); averages over about ``1 / (1 - decay)`` steps.

    Attributes:
        model: a copy of the model with the averaged weights, not to be trained; its buffers are the latest ones.

    Guarantees:
        - With `PrivateTraining` the average is a function of the released gradients alone, so the same epsilon covers
          it: it is updated in every step, including those of empty batches, which the training loop does not see.

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
        optimizer.register_step_post_hook(self._update)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for ``load_state_dict``."""
        return {"step_count": self.step_count, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned."""
        self.step_count = state["step_count"]
        self.model.load_state_dict(state["model"])

    @torch.no_grad()
    def _update(self, *_: Any) -> None:
        weight = 1 - min(self.decay, (1 + self.step_count) / (10 + self.step_count))
        for average, current in zip(self.model.parameters(), self._trained.parameters(), strict=True):
            average.lerp_(current, weight)
        for copied, current in zip(self.model.buffers(), self._trained.buffers(), strict=True):
            copied.copy_(current)
        self.step_count += 1
