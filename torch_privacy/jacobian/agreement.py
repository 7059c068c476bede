# SPDX-License-Identifier: Apache-2.0
"""Random projections of gradients, held against ordinary backwards."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .._validate import Refused


class Check:
    """Compares sums of rows by ordinary backwards with the projections: ``v·(Jᵀ c)`` is ``c·(J v)``.

    Args:
        v: name -> (g, *shape): some of the directions.
        projections: (n, g), of the rows on these.
        norms: (n,), estimates that set the scale.
    """

    def __init__(self, v: Mapping[str, Tensor], projections: Tensor, norms: Tensor):
        self._v, self._projections, self._norms = v, projections, norms

    def look(self, total: Mapping[str, Tensor], c: Tensor) -> None:
        """Refuse a sum that the projections do not bear out.

        Raises:
            Refused: the model's backward is not the derivative of its forward, is not linear, or is undefined.
        """
        length = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in total.values()))
        if not math.isfinite(length) and not all(bool(part.isfinite().all()) for part in total.values()):
            raise Refused(
                "Sketched: the sum of the clipped gradients is not finite, and with one backward for all examples the "
                "one that spoils it cannot be left out. Keep losses and their gradients finite, e.g. by log_softmax "
                "in place of log(softmax), or by clamping the model's inputs."
            )
        ours = sum(torch.tensordot(v.flatten(1), total[name].flatten(), 1) for name, v in self._v.items())
        used = c != 0
        theirs = c[used] @ self._projections[used].to(c)
        scale = length + float((c[used] * self._norms[used].to(c)).sum())
        tolerance = max(torch.finfo(part.dtype).eps for part in (self._projections, *total.values())) ** 0.5
        if not float((ours - theirs).abs().max()) <= tolerance * scale:
            raise Refused(
                "Sketched: the model's ordinary gradient is not what its projections say: a custom backward or a "
                "gradient hook that is no derivative, a parameter used outside of model(...), or a forward that does "
                "not repeat. Remove it."
            )


def vjp(losses: Tensor, parameters: Mapping[str, Tensor], c: Tensor, *, retain_graph: bool) -> dict[str, Tensor]:
    """Gradient of ``c · losses`` by name; zero where the losses do not depend on a parameter."""
    grads = torch.autograd.grad(losses, list(parameters.values()), c, retain_graph=retain_graph, allow_unused=True)
    pairs = zip(parameters.items(), grads, strict=True)
    return {name: torch.zeros_like(p) if g is None else g.detach().clone() for (name, p), g in pairs}
