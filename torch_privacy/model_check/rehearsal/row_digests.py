# SPDX-License-Identifier: Apache-2.0
"""Norms, fingerprints and clip factors of the rows of one run, which a rehearsal compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from ...jacobian.rows.operator import Jacobian, RowsOfBatch
from ...support.own_draws import randn

# Entries of a fingerprint's direction before it repeats; a prime, so that no two rows of a weight get the same entries.
PATTERN = 65_521


@dataclass
class RowAnswers:
    """Norms, fingerprints and clip factors of the rows, each (rows,) for every group of parameters."""

    weigh: Callable[[RowsOfBatch, str], None] | None = None  # computes the clip factors if no sum is wanted
    norms: dict[str, Tensor] = field(default_factory=dict)
    fingerprints: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def take(self, jacobian: RowsOfBatch, group: str) -> None:
        """Receives the rows of one group of parameters, before they are summed."""
        self.norms[group] = jacobian.squared_norms().sqrt().double().cpu()
        if isinstance(jacobian, Jacobian):
            self.fingerprints[group] = fingerprint(jacobian).double().cpu()
        if self.weigh is not None:  # last, because it may free the rows
            self.weigh(jacobian, group)


def fingerprint(jacobian: Jacobian) -> Tensor:
    """Returns the products (n,) of each row with one fixed random direction."""
    return jacobian.project_on(direction)


def direction(shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the two factors, of shape[:1] and shape[1:], of a fixed random direction in a weight of this shape.

    A product with such a direction is far cheaper than one with any other.
    """
    left, right = torch.Size([*shape[:1], 1])[:1], shape[1:]
    return _numbers(left, device, 7), _numbers(right, device, 8)


def _numbers(shape: torch.Size, device: torch.device, seed: int) -> Tensor:
    pattern, size = _pattern(device, seed), shape.numel()
    return (pattern if size <= PATTERN else pattern.repeat(-(-size // PATTERN)))[:size].view(shape)


@cache
def _pattern(device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return randn(PATTERN, generator=generator, dtype=torch.float32).to(device)
