# SPDX-License-Identifier: Apache-2.0
"""Clipping rules: from the norms of the per-example gradients to the factors that bound what one example can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from ._check import positive
from .privacy import NeighboringRelation


class ClippingRule(ABC):
    """Factors c that bound every row of diag(c) J, and the sensitivity that follows for their sum.

    Guarantees:
        - ``factors(norms)[i] * norms[i]`` is at most the rule's bound, whatever the norms.
        - A row whose norm is infinite or undefined gets the factor 0.
    """

    @abstractmethod
    def factors(self, norms: Tensor) -> Tensor:
        """(n,) norms of the rows -> (n,) factors, each in [0, 1]."""

    @abstractmethod
    def sensitivity(self, relation: NeighboringRelation) -> float:
        """Largest L2 change of the clipped sum between neighboring data sets."""


@dataclass(frozen=True)
class Flat(ClippingRule):
    """One bound for the whole gradient: ``cᵢ = min(1, clip_norm / ‖gᵢ‖)``.

    Args:
        clip_norm: bound C on the L2 norm of each per-example gradient, in the units of the gradient. The median norm
            of unclipped gradients is a good start (take it on public data).

    Guarantees:
        - ``cᵢ‖gᵢ‖ <= clip_norm`` up to rounding (1e-5, relative).
        - A gradient within the bound is left exactly as it is.

    Edge cases: norm 0 gets the factor 1; an infinite or undefined norm gets 0.

    Source: Abadi et al. (2016), Algorithm 1.

    Example:
        >>> import torch
        >>> Flat(clip_norm=1.0).factors(torch.tensor([0.5, 4.0, float("inf")]))
        tensor([1.0000, 0.2500, 0.0000])
    """

    clip_norm: float

    def __post_init__(self) -> None:
        positive("Flat", clip_norm=self.clip_norm)

    def factors(self, norms: Tensor) -> Tensor:
        """``min(1, clip_norm / norm)``, and 0 where the norm is not finite."""
        return (self.clip_norm / norms).clamp(max=1).nan_to_num(nan=0.0)

    def sensitivity(self, relation: NeighboringRelation) -> float:
        """``clip_norm`` where one example comes, goes or is zeroed; twice that where it is replaced."""
        return self.clip_norm * (2 if relation is NeighboringRelation.REPLACE_ONE else 1)
