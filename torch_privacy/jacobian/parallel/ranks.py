# SPDX-License-Identifier: Apache-2.0
"""Joins the ranks that hold parts of a tensor-parallel model: they decide alike, and add up norms and projections.

Every backward of a tensor-parallel model contains collectives. So all ranks must make equally many backwards, in one
order and with equal cotangents. Three things ensure that:

* Random numbers: within ``same_random`` all seeds come from one that the first rank draws anew for every batch.
* Decisions that depend on a rank's own shards (does this layout fit, is a second backward due) are made together.
* What the ranks remember of earlier batches may differ. Each batch begins with an exchange of what every rank would do
  with it; if they differ, all of them measure, which is right in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...support.ranks import messages_of
from ...support.validate import Refused
from ..layouts.codes import fresh_generator, shared_seeds
from .shards import is_distributed, listed, on_this_rank

Value = TypeVar("Value")


class Peers:
    """The ranks of one group, which hold the same examples and parts of the same model.

    Args:
        group: of the ranks; None for a single process, which agrees with itself at no cost.
    """

    def __init__(self, group: Any = None):
        self.group = group
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self._messages = None if self.size == 1 else messages_of(group)

    @contextmanager
    def same_random(self) -> Iterator[None]:
        """Draws equal random numbers for checks on all ranks inside; the first rank chooses the seed."""
        if self.size == 1:
            yield
        else:
            (seed, *_), *_ = self._exchange([fresh_generator().initial_seed() % 2**62])
            with shared_seeds(seed):
                yield

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Returns, for each flag, whether it is true on some rank."""
        if self.size == 1 or not flags:
            return list(flags)
        return [any(column) for column in zip(*self._exchange(flags), strict=True)]

    def any(self, flag: bool) -> bool:
        """True if the flag is true on some rank."""
        return flag if self.size == 1 else self.any_of([flag])[0]

    def all(self, flag: bool) -> bool:
        """True if the flag is true on every rank."""
        return flag if self.size == 1 else not self.any(not flag)

    def are_equal(self, numbers: Sequence[int]) -> bool:
        """True if these numbers, equally many everywhere, are equal on all ranks."""
        return self.size == 1 or len(set(map(tuple, self._exchange(numbers)))) == 1

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, any that can be pickled, in the order of the ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        # pickle: torch's own message between ranks, which trust each other: a gradient could lie, too
        dist.all_gather_object(found, value, group=self._messages)
        return found

    def refuse(self, text: str | None) -> None:
        """Refuses, on all ranks and with one text, what some of them found; None says that this rank found nothing."""
        if self.size > 1 and self.any(text is not None):
            text = next(text for text in self.gather(text) if text is not None)
        if text is not None:
            raise Refused(text)

    def sum(self, tensor: Tensor, *, once: Tensor) -> Tensor:
        """Returns the sum of ``tensor`` over the ranks, and of ``once`` from the first of them, by one all-reduce.

        The result is equal on all ranks, bit for bit, also if ``once`` was rounded differently.
        """
        if self.size == 1 or not tensor.numel():
            return tensor + once
        total = tensor + once if dist.get_rank(self.group) == 0 else tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def _exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the whole numbers of every rank."""
        mine = torch.tensor([int(number) for number in numbers], dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._messages)
        return [numbers.tolist() for numbers in found]


ALONE = Peers()


def peers_of(meshes: Sequence[Any]) -> Peers:
    """Returns the ranks of the mesh that the ops of a forward met; a single process if there was none."""
    if not meshes:
        return ALONE
    mesh = meshes[0]
    if len(meshes) > 1 or mesh.ndim > 1:
        raise Refused(
            f"tape: the model's activations are distributed over several meshes ({', '.join(map(str, meshes))}). Use "
            "one mesh of one dimension for the whole plan."
        )
    return Peers(mesh.get_group())


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
