# SPDX-License-Identifier: Apache-2.0
"""Norms, fingerprints and clip factors of the rows of one run, which a rehearsal compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .operator import Jacobian

# Entries of a fingerprint's direction before it repeats; a prime, so that no two rows of a weight get the same entries.
PATTERN = 65_521


@dataclass
class RowAnswers:
    """Norms, fingerprints and clip factors of the rows, each (rows,) for every group of parameters."""

    weigh: Callable[[Any, str], None] | None = None  # computes the clip factors if no sum is wanted
    norms: dict[str, Tensor] = field(default_factory=dict)
    fingerprints: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def take(self, jacobian: Any, group: str) -> None:
        """Receives the rows of one group of parameters, before they are summed."""
        self.norms[group] = jacobian.squared_norms().sqrt().double().cpu()
        if isinstance(jacobian, Jacobian):
            self.fingerprints[group] = fingerprint(jacobian).double().cpu()
        if self.weigh is not None:  # last, because it may free the rows
            self.weigh(jacobian, group)


def fingerprint(jacobian: Jacobian) -> Tensor:
    """Returns the product (n,) of each row with one fixed random direction."""
    return jacobian.project_on(_direction)


def _direction(shape: torch.Size, device: torch.device) -> Tensor:
    size = shape.numel()
    if device not in _PATTERNS:
        generator = torch.Generator().manual_seed(7)
        _PATTERNS[device] = torch.randn(PATTERN, generator=generator, dtype=torch.float32, device="cpu").to(device)
    pattern = _PATTERNS[device]
    return (pattern if size <= PATTERN else pattern.repeat(-(-size // PATTERN)))[:size].view(shape)


_PATTERNS: dict[torch.device, Tensor] = {}
