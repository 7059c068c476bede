# SPDX-License-Identifier: Apache-2.0
"""Compares what compiled graphs compute with what the tape computes, for losses that are random sums of the output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..layout import Merging
from .actions import ActionTape, Unfit
from .batches import Dimensions, flattened

AGREEMENT = 200  # tolerance of a comparison, in units of the coarsest rounding
LARGEST_TOLERANCE = 0.05
Answers = tuple[Sequence[Tensor], Mapping[str, Tensor]]  # squared norms of every group, sums by name


@dataclass(frozen=True)
class Wanted:
    """Says what is to be computed from the rows: one sum for each group of parameters."""

    groups: Mapping[str, Sequence[str]]
    count: int  # rows
    views: int  # losses per row
    memory_budget: float

    def merging(self) -> Merging | None:
        """Returns the merging of the views of each example."""
        return None if self.views == 1 else Merging.views(self.count, self.views)


class RandomLosses:
    """Losses that depend on every entry of a model's output, one for each row of its inputs.

    Args:
        dimensions: of the outputs.
        size: number of rows of the inputs.
        output: of the model.
    """

    def __init__(self, dimensions: Dimensions, size: int, output: Any):
        leaves, spec = flattened(output)
        self._size, self._parts = size, []
        for number, (leaf, dim) in enumerate(zip(leaves, dimensions.of(leaves, spec), strict=True)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                if dim is None or leaf.shape[dim] != size or not leaf.is_floating_point():
                    raise Unfit("an output of the model has no part for each example")
                self._parts.append((number, dim, torch.randn_like(leaf, requires_grad=False)))
        if not self._parts:
            raise Unfit("no output of the model has a gradient")

    def of(self, output: Any) -> Tensor:
        """Returns the losses (size,) of an output."""
        leaves = tree_leaves(output)
        terms = [
            (leaves[number] * weights).movedim(dim, 0).flatten(1).sum(1)
            if weights.ndim > 1
            else leaves[number] * weights
            for number, dim, weights in self._parts
        ]
        dtype = terms[0].dtype
        return sum([term.to(dtype) for term in terms[1:]], terms[0])

    def gradients(self, output: Any, probes: Sequence[Tensor], wanted: Wanted) -> list[Tensor]:
        """Returns the gradients of the losses' sum in the probes, with views averaged."""
        losses = self.of(output)
        return gradients(losses, probes, wanted.merging())


def gradients(losses: Tensor, probes: Sequence[Tensor], merging: Merging | None) -> list[Tensor]:
    """Returns the gradients in the probes, of losses that are averaged over the rows of a merging."""
    cotangent = torch.ones_like(losses) if merging is None else merging.weights().to(losses)
    found = torch.autograd.grad(losses, probes, cotangent, allow_unused=True)
    return [torch.zeros_like(p, requires_grad=False) if b is None else b for b, p in zip(found, probes, strict=True)]


def factors_of(squares: Tensor) -> Tensor:
    """Returns factors that clip most rows, for a comparison."""
    norms = squares.sqrt()
    return (norms.median() / norms).clamp(max=1).nan_to_num(0, 0, 0)


def answers_of(tape: ActionTape, losses: Tensor, wanted: Wanted) -> Answers:
    """Returns norms and sums by the tape."""
    norms: list[Tensor] = []

    def clip(jacobian: Any, group: str) -> dict[str, Tensor]:
        norms.append(jacobian.squared_norms())
        labels.append(group)
        return jacobian.weighted_sum(factors_of(norms[-1]))

    labels: list[str] = []
    sums = tape.clipped_sum(
        losses,
        wanted.groups,
        clip,
        merging=wanted.merging(),
        may_miss=tape.parameters,
        memory_budget=wanted.memory_budget,
    )
    order = [labels.index(label) for label in wanted.groups]
    return [norms[k] for k in order], sums


def check_outputs(expected: Any, found: Any, tape: ActionTape) -> None:
    """Raises ``Unfit`` unless two outputs of the model agree."""
    pairs = zip(tree_leaves(expected), tree_leaves(found), strict=False)
    for a, b in pairs:
        if isinstance(a, Tensor) and not _agree(a.detach(), b.detach(), _tolerance(tape)):
            raise Unfit("the compiled model returned another output than the model itself")


def check_answers(expected: Answers, found: Answers, tape: ActionTape) -> None:
    """Raises ``Unfit`` unless norms and sums agree."""
    tolerance = _tolerance(tape)
    norms = [(a.sqrt(), b.sqrt()) for a, b in zip(expected[0], found[0], strict=True)]
    if not all(_agree(a, b, tolerance) for a, b in norms):
        raise Unfit("norms of compiled rows differ from the tape's")
    longest = max(float(a.sum()) for a, _ in norms)
    for name, total in expected[1].items():
        if not _agree(total, found[1][name], tolerance, longest / max(1.0, float(len(norms[0][0])) ** 0.5)):
            raise Unfit(f"the compiled sum of {name!r} differs from the tape's")


def _agree(a: Tensor, b: Tensor, tolerance: float, scale: float = 0.0) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise Unfit("some values are not finite", by_data=True)
    difference, length = (a.double() - b.double()).norm(), a.double().norm()
    return bool(difference <= tolerance * torch.clamp(length, min=scale))


def _tolerance(tape: ActionTape) -> float:
    dtypes: Iterable[torch.dtype] = {call.output.dtype for call in tape._calls}
    return min(LARGEST_TOLERANCE, AGREEMENT * max(torch.finfo(dtype).eps for dtype in dtypes))
