# SPDX-License-Identifier: Apache-2.0
"""Losses divided by something of the whole batch: a coupling that no gradient shows.

``losses / len(x)`` and ``losses / mask.sum()`` scale each example's gradient by a number in which others have a say.
Its traces are plain numbers that autograd keeps for the backward of a product or a quotient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import product

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ._check import Refused

_BATCHES = 2  # batches that are looked at


class Divisors:
    """Looks at the plain numbers by which the losses of the first batches were multiplied or divided.

    What it cannot see: numbers turned into Python floats before they are used, and changes later than the second batch.
    """

    def __init__(self) -> None:
        self._seen: list[list[Tensor]] = []

    def check(self, sizes: Collection[int], nodes: Iterable[Node]) -> None:
        """Refuse a factor that is the batch's size or its inverse, or one that changed since the batch before.

        Args:
            sizes: of this (micro)batch: number of examples, and of their views together.
            nodes: nodes of the graph between the losses and the first use of a parameter.
        """
        if len(self._seen) >= _BATCHES or min(sizes) < 2:
            return
        found = [factor for node in nodes if (factor := _plain_factor(node)) is not None]
        for factor, size in product(found, sizes):
            if _is_size_or_inverse(factor, size):
                raise Refused(
                    f"losses were multiplied or divided by {factor.item():g}, and the batch has {size} "
                    "examples: a loss must not depend on how many others there are. Leave the division out; "
                    "PrivateTraining divides by the expected batch size. (A constant of your own that happens to be as "
                    f"large: write it as a float, {factor.item():.1f}.)"
                )
        for factor, before in zip(found, self._seen[-1] if self._seen else [], strict=False):
            # Python floats, which arrive in double precision, may follow a schedule of the user's.
            if factor.dtype != torch.float64 and not torch.equal(factor, before):
                raise Refused(
                    f"losses were multiplied or divided by a number that changes with the batch ({before.item():g}, "
                    f"then {factor.item():g}), so that each loss depends on other examples. Divide each example's "
                    "loss by a number of its own, such as the count of its own tokens; write a schedule as a float."
                )
        self._seen.append(found)


def _is_size_or_inverse(factor: Tensor, n: int) -> bool:
    """Whether a factor is n (unless it was written as a Python float, which arrives in double precision) or 1/n."""
    value = float(factor)
    is_size = factor.dtype != torch.float64 and math.isclose(value, n, rel_tol=1e-6)
    return is_size or math.isclose(value * n, 1, rel_tol=1e-6)


def _plain_factor(node: Node) -> Tensor | None:
    """The number by which a product's or quotient's node scales everything alike, if it is one."""
    if not node.name().startswith(("DivBackward", "MulBackward")):
        return None
    operands = (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None))
    numbers = [t for t in operands if isinstance(t, Tensor) and t.numel() == 1 and not t.requires_grad]
    return numbers[0].reshape(()) if numbers else None
