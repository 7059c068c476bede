# SPDX-License-Identifier: Apache-2.0
"""The engine's proof on the user's own batch: what the rows add up to is what ordinary backwards give."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .._validate import Refused
from .layout import Merging
from .measure import fresh_generator
from .operator import Jacobian

PIECE = 2**16  # entries that are sketched at once
BUCKETS = 256  # a difference of two gradients is as long as that of their sketches, within a tenth or so


class Checks:
    """Compares the sum of all rows, and two rows drawn at random, with native backwards.

    Held are random sketches of the gradients, linear and of a few numbers each, so that neither the native ones nor
    ours have to be there all at once.

    Args:
        losses: (n,), with their graph, which stays.
        parameters: all recorded ones.
        dtypes: the floating-point types on the way.
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
        some = torch.randperm(n, generator=fresh_generator())[:2].tolist()
        self._weights = [
            losses.new_ones(n),
            *(losses.new_zeros(n).index_fill(0, losses.new_tensor(i).long(), 1) for i in some),
        ]
        self._tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
        self._floors = {name: n * _floor(p, dtypes) for name, p in parameters.items()}
        self._seeds = {name: int(torch.randint(2**62, (), generator=fresh_generator())) for name in parameters}
        self._squares: Tensor | float = 0.0
        self._off = [self._native(losses, parameters, c, merging) for c in self._weights]

    def _native(
        self, losses: Tensor, parameters: Mapping[str, Tensor], c: Tensor, merging: Merging | None
    ) -> dict[str, Tensor | float]:
        """Sketches of the negative gradient of ``c · losses``."""
        if merging is not None:
            c = c[merging.assignment.to(c.device)] * merging.weights().to(c)
        native = torch.autograd.grad(losses, list(parameters.values()), c, retain_graph=True, allow_unused=True)
        return {
            name: 0.0 if grad is None else -self._sketch(name, grad)
            for name, grad in zip(parameters, native, strict=True)
        }

    @torch.no_grad()
    def look(self, jacobian: Jacobian) -> None:
        """Take in the rows of some of the parameters; each parameter is to come once."""
        self._squares = self._squares + jacobian.squared_norms()
        for c, off in zip(self._weights, self._off, strict=True):
            for name, part in jacobian.parts_of_sum(c):
                off[name] = off[name] + self._sketch(name, part)

    def conclude(self) -> None:
        """Refuse unless all agree."""
        assert isinstance(self._squares, Tensor)
        norms = self._squares.sqrt()
        for c, off in zip(self._weights, self._off, strict=True):
            scale = (c * norms.to(c.dtype)).sum()
            if not scale.isfinite():
                continue
            most = self._tolerance * float(scale)
            wrong = [name for name, sketch in off.items() if _length(sketch) > most + self._floors[name]]
            if wrong:
                raise Refused(
                    f"tape: the rows of parameter {', '.join(map(repr, wrong))} do not add up to the native gradient. "
                    "This is a bug in torch_privacy, or the model overrides a gradient (custom backward, gradient "
                    "hook): freeze that part, and please report it."
                )

    def _sketch(self, name: str, gradient: Tensor) -> Tensor:
        """(BUCKETS,): sums of the entries with random signs, the same for one parameter every time."""
        flat = gradient.detach().flatten()
        generator = torch.Generator(flat.device).manual_seed(self._seeds[name])
        total = flat.new_zeros(BUCKETS, dtype=torch.promote_types(flat.dtype, torch.float32))
        for part in flat.split(PIECE):
            signs = torch.randint(0, 2, (PIECE,), generator=generator, device=flat.device, dtype=torch.int8)
            signed = torch.where(signs[: len(part)].bool(), part, -part).to(total.dtype)
            total += F.pad(signed, (0, -len(part) % BUCKETS)).view(-1, BUCKETS).sum(0)
        return total


def _floor(p: Tensor, dtypes: Collection[torch.dtype]) -> float:
    """A gradient of this length or less may be lost: its squares vanish in the type for sums, or itself on the way."""
    infos = [torch.finfo(dtype) for dtype in {*dtypes, p.dtype}]
    for_sums = torch.finfo(torch.promote_types(p.dtype, torch.float32))
    entry = max(for_sums.smallest_normal**0.5, *(16 * info.smallest_normal * info.eps for info in infos))
    return p.numel() ** 0.5 * entry


def _length(sketch: Tensor | float) -> float:
    return float(sketch.norm()) if isinstance(sketch, Tensor) else abs(sketch)
