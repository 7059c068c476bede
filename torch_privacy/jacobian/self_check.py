# SPDX-License-Identifier: Apache-2.0
"""Checks the engine on the user's own batch: sums of its rows must equal the gradients of ordinary backwards."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.torch_modes import product_rounding
from ..support.validate import Refused
from .codes import fresh_generator
from .layout import Merging
from .operator import Jacobian

PIECE = 2**16  # entries that are sketched at once
BUCKETS = 256  # numbers in a sketch; its length estimates that of a difference of gradients within about a tenth


class RowCheck:
    """Compares the sum of all rows, and two random rows, with native backwards.

    Only linear random sketches of the gradients are held, of a few numbers each, so that neither the native gradients
    nor ours must be in memory all at once.

    Args:
        losses: (n,), with their graph, which stays.
        parameters: all recorded ones.
        dtypes: the floating-point types between losses and parameters.
        merging: examples whose mean is one row.
    """

    def __init__(
        self,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        dtypes: Collection[torch.dtype],
        merging: Merging | None = None,
    ):
        n = len(losses) if merging is None else merging.count
        some = torch.randperm(n, generator=fresh_generator(), device="cpu")[:2].tolist()
        self._weights = [
            losses.new_ones(n),
            *(losses.new_zeros(n).index_fill(0, losses.new_tensor(i).long(), 1) for i in some),
        ]
        products = product_rounding(losses.device)
        self._tolerance = max(products, *(torch.finfo(dtype).eps for dtype in dtypes)) ** 0.5
        self._floors = {name: n * _floor(p, dtypes) for name, p in parameters.items()}
        self._seeds = {
            name: int(torch.randint(2**62, (), generator=fresh_generator(), device="cpu")) for name in parameters
        }
        self._squares: Tensor | float = 0.0
        self._differences = [self._native(losses, parameters, c, merging) for c in self._weights]

    def _native(
        self, losses: Tensor, parameters: Mapping[str, Tensor], c: Tensor, merging: Merging | None
    ) -> dict[str, Tensor | float]:
        """Returns sketches of the negative gradient of ``c · losses``."""
        if merging is not None:
            c = c[merging.assignment.to(c.device)] * merging.weights().to(c)
        native = torch.autograd.grad(losses, list(parameters.values()), c, retain_graph=True, allow_unused=True)
        return {
            name: 0.0 if grad is None else -self._sketch(name, grad)
            for name, grad in zip(parameters, native, strict=True)
        }

    @torch.no_grad()
    def add(self, jacobian: Jacobian) -> None:
        """Adds the rows of some of the parameters; each parameter must be added once."""
        self._squares = self._squares + jacobian.squared_norms()
        for c, difference in zip(self._weights, self._differences, strict=True):
            for name, part in jacobian.parts_of_sum(c):
                difference[name] = difference[name] + self._sketch(name, part)

    def conclude(self) -> None:
        """Raises ``Refused`` unless all rows agree with the native gradients."""
        assert isinstance(self._squares, Tensor)
        norms = self._squares.sqrt()
        for c, difference in zip(self._weights, self._differences, strict=True):
            scale = (c * norms.to(c)).sum()
            if not scale.isfinite():
                continue
            most = self._tolerance * float(scale)
            wrong = [name for name, sketch in difference.items() if _length(sketch) > most + self._floors[name]]
            if wrong:
                raise Refused(
                    f"tape: the rows of parameter {', '.join(map(repr, wrong))} do not add up to the native gradient. "
                    "This is a bug in torch_privacy, or the model overrides a gradient (custom backward, gradient "
                    "hook): freeze that part, and please report it."
                )

    def _sketch(self, name: str, gradient: Tensor) -> Tensor:
        """Returns (BUCKETS,), sums of the entries with random signs, the same signs for one parameter every time."""
        flat = gradient.detach().flatten()
        generator = torch.Generator(flat.device).manual_seed(self._seeds[name])
        total = flat.new_zeros(BUCKETS, dtype=torch.promote_types(flat.dtype, torch.float32))
        for part in flat.split(PIECE):
            signs = torch.randint(0, 2, (PIECE,), generator=generator, device=flat.device, dtype=torch.int8)
            signed = torch.where(signs[: len(part)].bool(), part, -part).to(total.dtype)
            total += F.pad(signed, (0, -len(part) % BUCKETS)).view(-1, BUCKETS).sum(0)
        return total


def _floor(p: Tensor, dtypes: Collection[torch.dtype]) -> float:
    """Returns the length up to which a gradient may be lost: its squares underflow, or its entries do on the way."""
    infos = [torch.finfo(dtype) for dtype in {*dtypes, p.dtype}]
    for_sums = torch.finfo(torch.promote_types(p.dtype, torch.float32))
    entry = max(for_sums.smallest_normal**0.5, *(16 * info.smallest_normal * info.eps for info in infos))
    return p.numel() ** 0.5 * entry


def _length(sketch: Tensor | float) -> float:
    return float(sketch.norm()) if isinstance(sketch, Tensor) else abs(sketch)


class ProjectionCheck:
    """Compares sums of rows by ordinary backwards with random projections of the rows: ``v·(Jᵀ c)`` is ``c·(J v)``.

    Args:
        v: name -> (g, *shape): some of the directions.
        projections: (n, g), the rows projected on these.
        norms: (n,), estimates that set the scale.
    """

    def __init__(self, v: Mapping[str, Tensor], projections: Tensor, norms: Tensor):
        self._v, self._projections, self._norms = v, projections, norms

    def compare(self, total: Mapping[str, Tensor], c: Tensor) -> None:
        """Raises unless the projections confirm the weighted sum ``total`` with weights c.

        Raises:
            Refused: the model's backward is not the derivative of its forward, is not linear, or is undefined.
        """
        self.judge(total, self.measure(total, c).tolist())

    def measure(self, total: Mapping[str, Tensor], c: Tensor) -> Tensor:
        """Returns (3,) what `judge` must know: the sum's length, the largest difference, and what it is relative to."""
        lengths = [torch.linalg.vector_norm(part).double().to(c.device) for part in total.values()]
        length = torch.stack(lengths).norm()
        ours = sum(torch.tensordot(v.flatten(1), total[name].flatten(), 1).to(c.device) for name, v in self._v.items())
        used = c != 0
        projections = torch.where(used[:, None], self._projections.to(c), 0)
        difference = (ours - c @ projections).abs().max()
        scale = length + torch.where(used, c * self._norms.to(c), 0).sum()
        return torch.stack([length, difference.double(), scale.double()])

    def judge(self, total: Mapping[str, Tensor], measured: Sequence[float]) -> None:
        """Raises as `compare` does."""
        length, difference, scale = measured
        if not math.isfinite(length) and not all(bool(part.isfinite().all()) for part in total.values()):
            raise Refused(
                "Sketched: the sum of the clipped gradients is not finite, and with one backward for all examples the "
                "example that caused it cannot be left out. Keep losses and their gradients finite, e.g. by "
                "log_softmax in place of log(softmax), or by clamping the model's inputs."
            )
        tolerance = max(torch.finfo(part.dtype).eps for part in (self._projections, *total.values())) ** 0.5
        if not difference <= tolerance * scale:
            raise Refused(
                "Sketched: the model's ordinary gradient is not what its projections say. Possible causes: a custom "
                "backward or a gradient hook that is no derivative, a parameter used outside of model(...), or a "
                "forward that does not repeat. Remove it."
            )


def vjp(losses: Tensor, parameters: Mapping[str, Tensor], c: Tensor, *, retain_graph: bool) -> dict[str, Tensor]:
    """Returns the gradient of ``c · losses`` by name; zeros for parameters that the losses do not depend on."""
    grads = torch.autograd.grad(losses, list(parameters.values()), c, retain_graph=retain_graph, allow_unused=True)
    pairs = zip(parameters.items(), grads, strict=True)
    return {name: torch.zeros_like(p) if g is None else g.detach().clone() for (name, p), g in pairs}
