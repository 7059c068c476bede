# SPDX-License-Identifier: Apache-2.0
"""Provides Adam as the papers print it, without bias correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class UncorrectedAdam(torch.optim.Optimizer):
    """Adam without bias correction: ``m ← β₁ m + (1 - β₁) g``, ``u ← β₂ u + (1 - β₂) g²``, ``θ ← θ - η m / (√u + ξ)``.

    m and u are 0 at the start, so that the first step is ``(1 - β₁) / √(1 - β₂)`` = 3.2 times as long as that of
    ``torch.optim.Adam``. From some thousand steps on both are the same.

    Source: Bu, Dong, Long & Su (2020), Algorithm 2; Bu, Gopi et al. (2021), Algorithm 3.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Makes a step with the gradients that are there."""
        assert closure is None, "the gradient is computed before"
        for group in self.param_groups:
            (of_mean, of_square), rate, eps = group["betas"], group["lr"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                moments: dict[str, Tensor] = self.state[p]
                if not moments:
                    moments |= {"m": torch.zeros_like(p), "u": torch.zeros_like(p)}
                moments["m"].lerp_(p.grad, 1 - of_mean)
                moments["u"].mul_(of_square).addcmul_(p.grad, p.grad, value=1 - of_square)
                p.addcdiv_(moments["m"], moments["u"].sqrt().add_(eps), value=-rate)
