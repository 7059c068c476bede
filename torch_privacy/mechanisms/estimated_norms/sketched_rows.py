# SPDX-License-Identifier: Apache-2.0
"""Holds the estimated norms of a batch's rows, and their exact weighted sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...jacobian.layouts.codes import fresh_generator
from ...jacobian.rows.native import ProjectionCheck, vjp
from ...support.own_draws import randperm
from .jvp import Project


@dataclass(frozen=True, eq=False)
class SketchedJacobian:
    """The Jacobian of per-example losses, known only by its projections: norms are estimates, sums are exact.

    Guarantees:
        - ``squared_norms()[i]`` is ‖row i‖² times a χ²_r / r variable that is independent of everything else.
        - ``weighted_sum(c)`` is Σᵢ cᵢ row_i, by one backward.
        - ``project(v)[i, j]`` is the inner product of row i with direction j.
    """

    losses: Tensor
    parameters: Mapping[str, Tensor]
    estimates: Tensor  # of the squared norms
    products: Project
    check: ProjectionCheck
    kept: Tensor  # numbers of the rows, if some were selected

    @property
    def num_examples(self) -> int:
        """Number of rows."""
        return len(self.kept)

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.losses.device

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of every parameter."""
        return {name: p.shape for name, p in self.parameters.items()}

    def squared_norms(self, *, final: bool = True) -> Tensor:
        """Returns estimates of the rows' squared norms, (n,); nothing is computed twice, so they are final."""
        return self.estimates[self.kept]

    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """Returns Jᵀ c for weights c (n,): name -> a tensor of the parameter's shape. Frees the graph."""
        total, measured = self.measured_sum(c)
        self.judge(total, measured.tolist())
        return total

    def measured_sum(self, c: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the same without waiting for a GPU, and what `judge` must know. A weight of 0 leaves a row out."""
        c = torch.zeros_like(self.losses).index_put((self.kept,), c.to(self.losses))
        total = vjp(self.losses, self.parameters, c, retain_graph=False)
        return total, self.check.measure(total, c)

    def judge(self, total: Mapping[str, Tensor], measured: Sequence[float]) -> None:
        """Raises unless the sum agrees with the projections, and is finite."""
        self.check.judge(total, measured)

    def check_single_rows(self) -> None:
        """Raises unless the sum of all rows, and two rows drawn at random, agree with the projections."""
        n, finite = len(self.losses), bool(self.estimates.isfinite().all())
        some = randperm(n, generator=fresh_generator())[:2].tolist()
        single = [
            torch.zeros_like(self.losses).index_fill(0, torch.tensor(i, device=self.losses.device), 1) for i in some
        ]
        for c in [torch.ones_like(self.losses), *single] if finite else []:
            self.check.compare(vjp(self.losses, self.parameters, c, retain_graph=True), c)

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """Returns J v, (n, k), for k directions given as name -> (k, *shape)."""
        return self.products(v)[self.kept]

    def select(self, index: Tensor | slice) -> SketchedJacobian:
        """Returns the rows of some of the examples."""
        return replace(self, kept=self.kept[index])
