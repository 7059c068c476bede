# SPDX-License-Identifier: Apache-2.0
"""Provides the parts of test cases: a module defined by a function, tokens, losses, and a loop without rehearsals."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Calls(nn.Module):
    """Calls a function of the module and x as its forward."""

    def __init__(self, forward: Callable, **parts: nn.Module | Tensor):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class Hidden(torch.autograd.Function):
    """Computes ``x w²`` by a custom function, so that the tape does not see the use of ``w``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return b * w * w, (2 * b * x * w).sum(0)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def in_type(dtype: torch.dtype, model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Returns model and input in this dtype, and makes it the default of tensors created in the forward."""
    torch.set_default_dtype(dtype)
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


def own_batches(training: Any, losses: Callable) -> Iterator[Any]:
    """Yields the batches of a training; answers its rehearsals itself with ``losses(model, *batch)``."""
    for batch in training:
        if training.rehearsing:
            assert not training.step(losses(training.model, *batch))
        else:
            yield batch


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    """Returns one loss per example, with another weight for every position."""
    y = model(x)
    y = y.reshape(len(x), y.numel() // max(1, len(x)))
    return (y.sin() * torch.linspace(0.5, 1.5, y.shape[1], dtype=y.dtype)).sum(1)
