# SPDX-License-Identifier: Apache-2.0
"""The Jacobian of per-example losses that is known by its projections alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..jacobian.codes import fresh_generator
from ..jacobian.self_check import ProjectionCheck, vjp
from .jvp import Project


class SketchedJacobian:
    """The Jacobian of per-example losses by its projections: norms are estimates, sums are exact.

    Guarantees:
        - ``squared_norms()[i]`` is ‖row i‖² times a variable of law χ²_r / r, independent of everything else.
        - ``weighted_sum(c)`` is Σᵢ cᵢ row_i, by one backward.
        - ``project(v)[i, j]`` is the inner product of row i with direction j.
    """

    def __init__(
        self,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        estimates: Tensor,
        project: Project,
        check: ProjectionCheck,
        explanation: str,
        *,
        kept: Tensor | None = None,
    ):
        self._losses, self._parameters, self._estimates = losses, parameters, estimates
        self._project, self._check, self._explanation = project, check, explanation
        self._kept = torch.arange(len(losses), device=losses.device) if kept is None else kept

    @property
    def num_examples(self) -> int:
        """Number of rows."""
        return len(self._kept)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of every parameter."""
        return {name: p.shape for name, p in self._parameters.items()}

    def squared_norms(self) -> Tensor:
        """Estimates of the rows' squared norms, (n,)."""
        return self._estimates[self._kept]

    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """Jᵀ c for weights c (n,): name -> a tensor of the parameter's shape. The graph is used up."""
        c = torch.zeros_like(self._losses).index_put((self._kept,), c.to(self._losses))
        total = vjp(self._losses, self._parameters, c, retain_graph=False)
        self._check.compare(total, c)
        return total

    def look_at_single_rows(self) -> None:
        """Refuse unless the sum of all rows, and two rows drawn at random, agree with the projections."""
        n, finite = len(self._losses), bool(self._estimates.isfinite().all())
        some = torch.randperm(n, generator=fresh_generator())[:2].tolist()
        single = [
            torch.zeros_like(self._losses).index_fill(0, torch.tensor(i, device=self._losses.device), 1) for i in some
        ]
        for c in [torch.ones_like(self._losses), *single] if finite else []:
            self._check.compare(vjp(self._losses, self._parameters, c, retain_graph=True), c)

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """J v, (n, k), for k directions given as name -> (k, *shape)."""
        return self._project(v)[self._kept]

    def select(self, index: Tensor | slice) -> SketchedJacobian:
        """The rows of some of the examples only."""
        return SketchedJacobian(
            self._losses,
            self._parameters,
            self._estimates,
            self._project,
            self._check,
            self._explanation,
            kept=self._kept[index],
        )

    def explain(self) -> str:
        """How the projections are made."""
        return self._explanation
