# SPDX-License-Identifier: Apache-2.0
"""Computes the clipped sum by a second backward, for blocks of which nothing but norms and products was kept."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from ...support.validate import Refused
from ..layouts.known import Merging
from ..parallel.shards import local_gradient
from ..recording.paths import RecordedGraph
from .blocks import Direction, OuterProduct, outer_product
from .check import random_direction


class SumByBackward:
    """Computes the clipped sum of blocks of which nothing was kept, by a backward of the losses times the factors.

    Under saved-tensor hooks the user's code runs again in each backward, and nothing forces it to draw the same random
    numbers: the factors would be those of other rows. So the sums are confirmed by the rows' products with a random
    direction.

    Args:
        reached: the batch.
        cotangent: (n,) weight of each loss in its row.
        merging: which examples share a row, their mean.
        frees_graph: whether the backward frees the graph; then there can be only one.
    """

    def __init__(
        self, reached: RecordedGraph, cotangent: Tensor, merging: Merging | None, *, frees_graph: bool = False
    ):
        self._reached, self._cotangent, self._merging = reached, cotangent, merging
        self._names: list[str] = []
        self._factors: Tensor | None = None  # of the latest backward
        self._sums: dict[str, Tensor] = {}
        self._frees_graph = frees_graph
        self._fixed: Direction | None = None
        self._named: Sequence[Mapping[str, OuterProduct]] = []
        self._differences: list[tuple[str, Tensor, Tensor]] = []  # name, difference, lengths of the rows
        again = reached.recorder.log.saved_elsewhere
        self._confirming = {name: random_direction(p) for name, p in reached.parts.items()} if again else {}

    def project_on(self, fixed: Direction | None, named: Sequence[Mapping[str, OuterProduct]]) -> None:
        """Sets the directions, of any weight and by name, on which rows are projected before they are left out."""
        self._fixed, self._named = fixed, named

    @property
    def projects(self) -> bool:
        return bool(self._confirming or self._named or self._fixed)

    def directions(self, name: str, weight: Tensor) -> dict[Hashable, OuterProduct]:
        found: dict[Hashable, OuterProduct] = {id(of[name][0]): of[name] for of in self._named}
        if self._confirming:
            found[None] = self._confirming[name]
        if self._fixed is not None:
            found[self._fixed] = self._fixed(weight.shape, weight.device)
        return found

    def expect(self, name: str) -> None:
        self._names.append(name)

    def __call__(self, c: Tensor, name: str) -> Tensor:
        if self._factors is not c:
            if self._factors is not None and self._frees_graph:
                raise Refused(
                    "tape: under this memory budget the rows of a batch can be summed once, with one vector of factors."
                )
            self._factors, self._sums = c, self._backward(c)
        return self._sums.pop(name)

    def confirm(self, name: str, total: Tensor, product: Tensor, scale: Tensor) -> None:
        theirs = outer_product(self._confirming[name], total)
        self._differences.append((name, (theirs - product).abs(), scale))

    def conclude(self, squares: Tensor | None) -> None:
        """Raises ``Refused`` unless the sums are those of the rows (of these squared norms) that gave the factors.

        Rounding is relative to all parameters, because a gradient that is zero but for rounding has no size of its own.
        """
        if not self._differences or squares is None or self._factors is None:
            return
        names, differences, scales = zip(*self._differences, strict=True)
        self._differences = []
        found = torch.stack([torch.stack(parts).double().cpu() for parts in (differences, scales)])
        factors, lengths = self._factors.to(squares).abs(), squares.nan_to_num(0.0, posinf=0.0).sqrt()
        most = self._reached.precision() ** 0.5 * max(float(found[1].norm()), float(factors @ lengths))
        wrong = [name for name, is_right in zip(names, (found[0] <= most).tolist(), strict=True) if not is_right]
        if wrong and math.isfinite(most):
            raise Refused(
                f"tape: a part under activation checkpointing, or another saved-tensor hook, gave other numbers in a "
                f"second backward, so that the sum of parameter {', '.join(map(repr, wrong))} is not that of the rows "
                "that were clipped. Nothing was released. Leave preserve_rng_state=True, its default, in checkpoint; "
                "or raise memory_budget in Performance, so that one backward is enough."
            )

    def _backward(self, c: Tensor) -> dict[str, Tensor]:
        c = c.to(self._cotangent)
        if self._merging is not None:
            c = c[self._merging.assignment.to(c.device)] * self._cotangent
        leaves = [self._reached.leaves[name] for name in self._names]
        if self._frees_graph:  # calls hold what a part under checkpointing is made again from
            self._reached.free_inputs()
        with self._reached.running_again():
            found = torch.autograd.grad(self._reached.losses, leaves, c, retain_graph=not self._frees_graph)
        return {
            name: g if type(g) is Tensor else cast(Tensor, local_gradient(g, leaf))
            for name, g, leaf in zip(self._names, found, leaves, strict=True)
        }
