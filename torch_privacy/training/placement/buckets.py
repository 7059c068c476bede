# SPDX-License-Identifier: Apache-2.0
"""Provides buckets: sums of several parameters in one vector, which one collective reduces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...jacobian.rows.plan import in_portions
from ...jacobian.rows.streamed_sum import DeferredSum
from ...support.ranks import communicating

BUCKET_BYTES = 2**25  # of sums that are reduced together, where FSDP does not say it
DEFERRED_BYTES = 2**26  # of weights: sums of smaller models are computed at once, which is faster


class Slice(NamedTuple):
    """Consecutive numbers of a sum, and which of its numbers is the first of them."""

    numbers: Tensor
    first: int


class LocalSums:
    """The sums of one rank, computed when they are taken.

    Args:
        sums: name -> tensor or deferred sum; those that are missing are zero.
        parameters: the trained ones, which determine shapes and types: every rank has the same, whatever its data.
    """

    def __init__(self, sums: dict[str, Any], parameters: Mapping[str, Tensor]):
        self._sums, self._parameters = sums, parameters

    @property
    def names(self) -> list[str]:
        """Returns the names of all parameters, in order."""
        return [*self._parameters]

    def bytes_of(self, name: str) -> int:
        """Returns the size of a sum."""
        p = self._parameters[name]
        return p.numel() * torch.promote_types(p.dtype, torch.float32).itemsize

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns these sums, each (*shape) in at least float32, and forgets them."""
        names = [*names]
        taken = {name: self._sums.pop(name) for name in names if name in self._sums}
        deferred = {id(part): part for part in taken.values() if isinstance(part, DeferredSum)}
        for part in deferred.values():
            taken |= part.compute([name for name in names if taken.get(name) is part])
        found = {}
        for name in names:
            p = self._parameters[name]
            dtype = torch.promote_types(p.dtype, torch.float32)
            total = taken.get(name)
            found[name] = torch.zeros(p.shape, dtype=dtype, device=p.device) if total is None else total.to(dtype)
        return found


class InFlight:
    """Reduces one bucket after the other; while one is under way, the sums of the next are computed.

    Two are never under way together, because gloo mixes up their messages.
    """

    def __init__(self) -> None:
        self._begun: tuple[Any, Callable[[], dict[str, Slice]]] | None = None
        self._landed: dict[str, Slice] = {}

    def start(self, own: Tensor, whole: Tensor, group: Any, finish: Callable[[], dict[str, Slice]]) -> None:
        """Begins to sum vectors of all ranks, (N·k,), of which each rank gets its part (k,).

        Args:
            own: (k,) receives the part.
            whole: (N·k,) of this rank.
            group: process group; None for the default one.
            finish: returns the slices by name, once the part is there.
        """
        self.land()
        self._begun = reduce_scatter(own, whole, group), finish

    def add(self, slices: Mapping[str, Slice]) -> None:
        """Adds slices that are there already."""
        self.land()
        self._landed |= slices

    def landed(self) -> dict[str, Slice]:
        """Returns all slices, after the last reduction."""
        self.land()
        return self._landed

    def land(self) -> None:
        """Waits for the reduction that is under way."""
        if self._begun is not None:
            work, finish = self._begun
            with communicating():
                work.wait()
            self._begun = None
            self._landed |= finish()


class FlatBucket:
    """Parameters' sums in one vector, of which each rank gets a slice.

    Args:
        sums: name -> (*shape), of one dtype and device.
        num_ranks, rank: of the default process group.
    """

    def __init__(self, sums: dict[str, Tensor], num_ranks: int, rank: int):
        self._shapes = {name: total.shape for name, total in sums.items()}
        self._kind = kind_of(next(iter(sums.values())))
        self._size = sum(total.numel() for total in sums.values())
        self._num_ranks = num_ranks
        self._each = -(-self._size // num_ranks)
        self._start, self._end = rank * self._each, (rank + 1) * self._each
        self._whole: Tensor | None = self._zeros(self._each * num_ranks)
        torch.cat([total.reshape(-1) for total in sums.values()], out=self._whole[: self._size])

    def start(self, flight: InFlight) -> None:
        """Begins to add up the vectors of all ranks."""
        whole, own = self._whole, self._zeros(self._each)
        assert whole is not None
        self._whole = None

        def finish() -> dict[str, Slice]:
            return {name: Slice(own[a - self._start : b - self._start], a - at) for name, at, a, b in self._spans()}

        flight.start(own, whole, None, finish)

    def gathered(self, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the parts of all ranks as tensors of the parameters' shapes."""
        own = self._zeros(self._each)
        for name, _, a, b in self._spans():
            own[a - self._start : b - self._start] = slices[name]
        whole = self._zeros(self._each * self._num_ranks)
        all_gather(whole, own)
        parts = whole[: self._size].split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self._kind[0], device=self._kind[1])

    def _spans(self) -> Iterator[tuple[str, int, int, int]]:
        """Yields (name, start of its entries, start of those in the slice, their end) where they overlap."""
        at = 0
        for name, shape in self._shapes.items():
            a, b = max(at, self._start), min(at + shape.numel(), self._end)
            if a < b:
                yield name, at, a, b
            at += shape.numel()


def buckets_of(sizes: Mapping[str, int]) -> list[list[str]]:
    """Returns the names in order, divided where more than `BUCKET_BYTES` would be together."""
    return in_portions(sizes, BUCKET_BYTES)


def by_kind(sums: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Returns the sums, divided by dtype and device."""
    found: dict[Any, dict[str, Tensor]] = {}
    for name, total in sums.items():
        found.setdefault(kind_of(total), {})[name] = total
    return [*found.values()]


def kind_of(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Returns dtype and device."""
    return tensor.dtype, tensor.device


def reduce_scatter(own: Tensor, whole: Tensor, group: Any = None) -> Any:
    """Begins to sum vectors of all ranks, (N·k,), of which each rank gets its part (k,); returns what to wait for."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with communicating():
        return function(own, whole, group=group, async_op=True)


def all_gather(whole: Tensor, own: Tensor, group: Any = None) -> None:
    """Gives all ranks the vectors of each, (k,), one after the other: (N·k,)."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with communicating():
        function(whole, own, group=group)
