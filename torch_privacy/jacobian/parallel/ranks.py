# SPDX-License-Identifier: Apache-2.0
"""Adds up norms and projections over the ranks that hold parts of a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...support.validate import Refused
from .agreement import ALONE, Peers
from .shards import is_distributed, listed, on_this_rank


class Projected(Protocol):
    """A block of the rows in the parameters of these names."""

    names: tuple[str, ...]

    def project(self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns J v (n, k)."""
        ...


class ModelRanks:
    """The tensor-parallel ranks that hold parts of one model; a single process holds all of it, and asks none.

    Args:
        peers: the ranks of the mesh.
        parameters: name -> parameter.
        inputs: of the model's forward.
    """

    def __init__(self, peers: Peers, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor] = ()):
        self.peers, self._inputs = peers, inputs
        self.sharded = frozenset(name for name, p in parameters.items() if _is_sharded(p))

    def squared_norms(self, of: Callable[[set[str]], Tensor], names: set[str]) -> Tensor:
        """Returns squared norms (n,), equal on all ranks bit for bit, by one all-reduce.

        Args:
            of: names -> the squared norms (n,) in this rank's parts of these parameters.
            names: of the parameters.
        """
        if self.peers.size == 1:
            return of(names)
        inside = of(names & self.sharded) if names & self.sharded else None
        once = of(names - self.sharded) if names - self.sharded or inside is None else torch.zeros_like(inside)
        return self.peers.sum(torch.zeros_like(once) if inside is None else inside, once=once)

    def projections(
        self, blocks: Sequence[Projected], v: Mapping[str, Tensor], parameters: Mapping[str, Tensor], zeros: Tensor
    ) -> Tensor:
        """Returns the products (n, k) of whole rows with directions, of which each rank has its parts."""
        if self.peers.size == 1:
            return sum((block.project(v, parameters).to(zeros.device) for block in blocks), zeros)
        inside, once = zeros.clone(), zeros.clone()
        for block in blocks:
            total = inside if self.sharded.issuperset(block.names) else once
            total += block.project(v, parameters).to(total.device)
        return self.peers.sum(inside, once=once)

    def check_equal(self, of: Callable[[set[str]], Tensor], names: set[str]) -> None:
        """Raises unless the rows of each replicated parameter have equal norms on all ranks, up to rounding.

        These differ where the model itself computes on shards that torch sees as ordinary tensors, as a norm of each
        head does: then a rank has only a term of the row.
        """
        if self.peers.size == 1:
            return
        whole = sorted(names - self.sharded)
        mine = [of({name}).double().cpu().sqrt() for name in whole]
        first, *others = self.peers.gather(mine)
        longest = torch.stack(first).nan_to_num(0, 0, 0).norm(dim=0).max() if whole else 0.0
        alike = partial(torch.allclose, rtol=1e-2, atol=1e-4 * float(longest), equal_nan=True)
        differing = [
            name
            for name, one, *rest in zip(whole, first, *others, strict=True)
            if not all(alike(one, other) for other in rest)
        ]
        if differing:  # on all ranks alike
            raise Refused(
                f"tape: the rows of the replicated parameters {listed(differing)} have other norms on each "
                "tensor-parallel rank: one of them is used on a part of each example only (a norm of every head, "
                "activations sharded by position), or the losses differ. Freeze such a parameter, and compute the "
                "same losses on all ranks."
            )

    @torch.no_grad()
    def check_same_inputs(self) -> None:
        """Raises unless the model was called with the same numbers on all ranks."""
        if self.peers.size == 1:
            return
        dense = [t for t in self._inputs if t.layout is torch.strided and not (t.is_nested or t.is_complex())]
        plain = [on_this_rank(t) for t in dense]
        found = self.peers.gather([*map(_fingerprint, plain)])
        if any(other != found[0] for other in found[1:]):
            raise Refused(
                "tape: the tensor-parallel ranks called the model with different inputs. All ranks of the mesh share "
                "every example: draw batches by the rank on the data-parallel mesh, or on one rank for all; shard "
                "inputs inside of the model."
            )


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Returns sums that differ for tensors with other entries, with a probability near one."""
    flat = tensor.detach().flatten().double()
    num_nan, flat = int(flat.isnan().sum()), flat.nan_to_num()  # NaN differs from itself
    return (*tensor.shape, num_nan, float(flat.sum()), float(flat @ torch.linspace(1, 2, len(flat)).to(flat)))


def _is_sharded(parameter: Any) -> bool:
    return is_distributed(parameter) and any(place.is_shard() for place in parameter.placements)


NO_OTHERS = ModelRanks(ALONE, {})
