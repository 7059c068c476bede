# SPDX-License-Identifier: Apache-2.0
"""Holds the estimated norms of a batch's rows, and their exact weighted sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...jacobian.layouts.codes import fresh_generator
from ...jacobian.rows.check import ProjectionCheck, vjp
from .jvp import Project


class SketchedJacobian:
    """The Jacobian of per-example losses, known only by its projections: norms are estimates, sums are exact.

    Guarantees:
        - ``squared_norms()[i]`` is ‖row i‖² times a χ²_r / r variable that is independent of everything else.
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
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._losses.device

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of every parameter."""
        return {name: p.shape for name, p in self._parameters.items()}

    def squared_norms(self, *, final: bool = True) -> Tensor:
        """Returns estimates of the rows' squared norms, (n,); nothing is computed twice, so they are final."""
        return self._estimates[self._kept]

    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """Returns Jᵀ c for weights c (n,): name -> a tensor of the parameter's shape. Frees the graph."""
        total, measured = self.measured_sum(c)
        self.judge(total, measured.tolist())
        return total

    def measured_sum(self, c: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the same without waiting for a GPU, and what `judge` must know. A weight of 0 leaves a row out."""
        c = torch.zeros_like(self._losses).index_put((self._kept,), c.to(self._losses))
        total = vjp(self._losses, self._parameters, c, retain_graph=False)
        return total, self._check.measure(total, c)

    def judge(self, total: Mapping[str, Tensor], measured: Sequence[float]) -> None:
        """Raises unless the sum agrees with the projections, and is finite."""
        self._check.judge(total, measured)

    def check_single_rows(self) -> None:
        """Raises unless the sum of all rows, and two rows drawn at random, agree with the projections."""
        n, finite = len(self._losses), bool(self._estimates.isfinite().all())
        some = torch.randperm(n, generator=fresh_generator(), device="cpu")[:2].tolist()
        single = [
            torch.zeros_like(self._losses).index_fill(0, torch.tensor(i, device=self._losses.device), 1) for i in some
        ]
        for c in [torch.ones_like(self._losses), *single] if finite else []:
            self._check.compare(vjp(self._losses, self._parameters, c, retain_graph=True), c)

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """Returns J v, (n, k), for k directions given as name -> (k, *shape)."""
        return self._project(v)[self._kept]

    def select(self, index: Tensor | slice) -> SketchedJacobian:
        """Returns the rows of some of the examples."""
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
        """Describes how the projections are computed."""
        return self._explanation
