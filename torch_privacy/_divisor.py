# SPDX-License-Identifier: Apache-2.0
"""Losses divided by something of the whole batch: a coupling that no gradient shows.

``losses / len(x)`` and ``losses / mask.sum()`` scale each example's gradient by a number in which others have a say.
Its traces are plain numbers that autograd keeps for the backward of a product or a quotient.
"""

from __future__ import annotations

from collections.abc import Iterable

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

    def check(self, num_examples: int, nodes: Iterable[Node]) -> None:
        """Refuse a factor that is the batch's size or its inverse, or one that changed since the batch before.

        Args:
            num_examples: size n of this (micro)batch.
            nodes: nodes of the graph between the losses and the first use of a parameter.
        """
        if len(self._seen) >= _BATCHES or num_examples < 2:
            return
        factors = [_plain_factor(node) for node in nodes]
        found = [factor for factor in factors if factor is not None]
        size = torch.tensor(float(num_examples), dtype=torch.float64)
        for factor in found:
            value = factor.double().cpu()
            if torch.isclose(value, size, rtol=1e-6) or torch.isclose(value * size, torch.ones_like(size), rtol=1e-6):
                raise Refused(
                    f"losses were multiplied or divided by {factor.item():g}, and the batch has {num_examples} "
                    "examples: a loss must not depend on how many others there are. Leave the division out; "
                    "PrivateTraining divides by the expected batch size."
                )
        for factor, before in zip(found, self._seen[-1] if self._seen else [], strict=False):
            # Python floats, which arrive in double precision, may follow a schedule of the user's.
            if factor.dtype != torch.float64 and not torch.equal(factor, before):
                raise Refused(
                    f"losses were multiplied or divided by a number that changes with the batch ({before.item():g}, "
                    f"then {factor.item():g}), so that each loss depends on other examples. Divide each example's "
                    "loss by a number of its own, such as the count of its own tokens."
                )
        self._seen.append(found)


def _plain_factor(node: Node) -> Tensor | None:
    """The number by which a product's or quotient's node scales everything alike, if it is one."""
    if not node.name().startswith(("DivBackward", "MulBackward")):
        return None
    other = getattr(node, "_saved_other", None)
    return other if isinstance(other, Tensor) and other.ndim == 0 and not other.requires_grad else None
