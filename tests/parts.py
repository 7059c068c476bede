# SPDX-License-Identifier: Apache-2.0
"""What the cases are made of: a module whose forward is a function, inputs of tokens, and the losses."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Calls(nn.Module):
    """A module whose forward is a function of itself and x."""

    def __init__(self, forward: Callable, **parts: nn.Module | Tensor):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss per example that gives every position another weight."""
    y = model(x)
    y = y.reshape(len(x), y.numel() // max(1, len(x)))
    return (y.sin() * torch.linspace(0.5, 1.5, y.shape[1], dtype=y.dtype)).sum(1)
