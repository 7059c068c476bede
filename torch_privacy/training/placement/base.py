# SPDX-License-Identifier: Apache-2.0
"""Provides placements: where the weights of a training are, and how the ranks' sums become one noisy gradient.

With several ranks every rank has a part of the one batch. A step adds up the ranks' sums, draws the noise of each
number once, by its place among all numbers, and gives each rank the gradient of what it keeps.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...mechanisms.base import Mechanism
from ...support.contents import local_of as local_of
from ...support.gathered_weights import sharded_modules
from ...support.ranks import Ranks
from ...support.validate import Refused
from .buckets import DEFERRED_BYTES, FlatBucket, InFlight, LocalSums, Slice, buckets_of, by_kind

Used = nn.Module | Tensor

_IN_USE: dict[int, weakref.ref[Used]] = {}  # by id


def begin_use(used: Iterable[Used]) -> list[Used]:
    """Registers these; returns those that were not in use."""
    new: list[Used] = []
    for one in used:
        known = _IN_USE.get(id(one))
        if known is None or known() is not one:
            new.append(one)
    _IN_USE.update(zip(map(id, new), map(weakref.ref, new), strict=True))
    return new


def end_use(used: Iterable[Used]) -> None:
    """Undoes `begin_use`."""
    for one in used:
        _IN_USE.pop(id(one), None)


def is_in_use(some: Iterable[Used]) -> bool:
    """True if one of these is in use."""
    for one in some:
        known = _IN_USE.get(id(one))
        if known is not None and known() is one:
            return True
    return False


class Placement(ABC):
    """Where the weights of a training are.

    Attributes:
        model: the user's model without a wrapper.
        ranks: the processes of the training.
        part, num_parts: number of this rank's part of every batch, and the number of parts.
        shard: number of this rank's shard of the weights; ranks with the same number have the same weights.
        counts: False if another rank has the same part of every batch, and counts its examples.
        waits_inside: True if the model's forward and backward wait for other ranks.
        in_words: for states and statements.
    """

    model: nn.Module
    ranks: Ranks
    part: int = 0
    num_parts: int = 1
    shard: int = 0
    counts: bool = True
    waits_inside: bool = False
    in_words: str = "one process"

    def of_optimizer(self) -> Mapping[str, Tensor] | None:
        """Returns the parameters that the optimizer holds, by name, if they are not those that the model has now."""
        return None

    def hold(self) -> None:
        """Makes all weights of the model whole, until `let_go`; does nothing if they are."""
        begin_use(self._modules())

    def let_go(self) -> None:
        """Undoes `hold`; also after an error in the middle of a forward or backward."""
        end_use(self._modules())

    def _modules(self) -> Iterable[nn.Module]:
        """Returns the modules by which `is_held` knows a model, and parts of it with weights that are not whole."""
        return [self.model]

    def running(self) -> AbstractContextManager[Any]:
        """Returns a context in which the user's code runs: no wrapper of torch communicates."""
        return nullcontext()

    def check(self, settings: Any) -> None:  # noqa: B027
        """Refuses settings of a training (`TrainingSettings`) for which this rank would need all weights."""

    def in_common(self) -> Collection[str]:
        """Returns the names of the weights that are equal on all ranks with the same part, whatever their shards."""
        return ()

    def meet(self, place: str, payload: bytes = b"") -> list[bytes]:
        """Waits for the other ranks if they wait for each other inside of the model; raises what one has found.

        Returns what each rank sent, in order; only the own ``payload`` if none waits.
        """
        return self.ranks.exchange(place, payload=payload) if self.waits_inside else [payload]

    @abstractmethod
    def gradients(self, mean: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what the optimizer's parameters get as gradients, from the release after noise and division."""

    def clear_row(self, gradient: Tensor, row: int) -> None:
        """Sets a row of a parameter's gradient to zero."""
        gradient[row] = 0


class Whole(Placement):
    """One process has all weights."""

    def __init__(self, model: nn.Module):
        self.model, self.ranks = model, Ranks()

    def gradients(self, mean: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: mean[name].to(p) for name, p in parameters.items()}


class Ranked(Placement):
    """Reduces the sums of several ranks to slices: what all placements over ranks share.

    A step calls `collect` for every (micro)batch and then `take`, on all ranks.
    """

    def __init__(self, model: nn.Module, ranks: Ranks):
        self.model, self.ranks = model, ranks
        self.forget()

    @abstractmethod
    def replicas(self) -> list[tuple[str, Tensor]]:
        """Returns the tensors, with labels, that must be equal on all ranks that have the same labels."""

    @abstractmethod
    def _start(self, sums: LocalSums, flight: InFlight) -> None:
        """Begins to reduce the sums of all parameters, bucket by bucket; the slices land in the flight."""

    def forget(self) -> None:
        """Drops the sums of a step."""
        self._slices: dict[str, Tensor] = {}
        self._places: dict[str, int] = {}
        self._flat: list[FlatBucket] = []  # parameters of which each rank has a slice
        self._everywhere = self._has_collected = False

    def collect(self, sums: dict[str, Any], mechanism: Mechanism, parameters: Mapping[str, Tensor]) -> None:
        """Adds up the ranks' sums of one (micro)batch; every rank gets the sum of its slices.

        Args:
            sums: of this rank: name -> tensor, or `DeferredSum`, which is computed when its bucket is reduced.
            mechanism: completes the sums; says whether each rank needs all of them.
            parameters: the trained ones, as the optimizer holds them.
        """
        self._everywhere = mechanism.needs_whole_release
        if self._everywhere:
            whole = mechanism.complete(sums, parameters)
            found = {name: Slice(self._summed(total), 0) for name, total in whole.items()}
            sizes = {name: total.numel() for name, total in whole.items()}
        else:
            extras = mechanism.complete({name: total for name, total in sums.items() if name not in parameters}, {})
            flight = InFlight()
            self._flat = []
            self._start(LocalSums(sums, self._alike(parameters)), flight)
            found = self._placed(flight.landed()) | {
                name: Slice(self._summed(total), 0) for name, total in extras.items()
            }
            sizes = {name: p.numel() for name, p in parameters.items()}
            sizes |= {name: total.numel() for name, total in extras.items()}
        place = 0
        for name, size in sizes.items():
            if name in found:
                part = found[name]
                self._places[name] = place + part.first
                self._slices[name] = self._slices[name].add_(part.numbers) if name in self._slices else part.numbers
            place += size
        self._has_collected = True

    def take(self, mechanism: Mechanism, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Returns this rank's slices of the step's sums, by name, and the place of the first number of each.

        Places count the numbers of all sums, in order.
        """
        if not self._has_collected:
            self.collect({}, mechanism, parameters)
        slices, places = {name: self._slices[name] for name in self._places}, self._places
        self._slices, self._places, self._has_collected = {}, {}, False
        return slices, places

    @property
    def reduces_in_buckets(self) -> bool:
        """True if the sums are too large to be in memory together: they are computed bucket by bucket."""
        return sum([p.numel() * p.itemsize for p in self.model.parameters()]) > DEFERRED_BYTES

    @property
    def slice_number(self) -> int:
        """Returns the number of the slices that `take` gave; ranks with the same number got the same ones."""
        if self._everywhere:
            return 0
        return self.part if self._flat else self.shard

    def _alike(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns tensors of the shapes and types that this rank's sums have."""
        return parameters

    def _placed(self, slices: dict[str, Slice]) -> dict[str, Slice]:
        """Returns the slices of this rank's sums as slices of the whole parameters' sums."""
        return slices

    def _summed(self, total: Tensor) -> Tensor:
        """Adds up a tensor that every rank gets whole, in place."""
        self.ranks.sum_in_place(total, None if total.is_cpu else dist.group.WORLD)
        return total

    def _start_flat(self, names: Iterable[str], sums: LocalSums, flight: InFlight) -> None:
        """Begins to reduce parameters that all ranks have whole to slices; `_gather_flat` puts them together again."""
        for bucket in buckets_of({name: sums.bytes_of(name) for name in names}):
            for chosen in by_kind(sums.take(bucket)):
                flight.land()  # so that two buckets are in memory, not three
                flat = FlatBucket(chosen, dist.get_world_size(), dist.get_rank())
                self._flat.append(flat)
                flat.start(flight)

    def _gather_flat(self, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for bucket in self._flat:
            found |= bucket.gathered(mean)
        self._flat = []
        return found


def is_held(model: nn.Module) -> bool:
    """True while a training computes a step with a model, or with one of which this is a part."""
    return is_in_use(model.modules())


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, which is whole or sharded as ``like`` is; without communication.

    Raises:
        Refused: it is sharded otherwise.
    """
    mesh, placements = getattr(like, "device_mesh", None), getattr(like, "placements", ())
    theirs = getattr(tensor, "placements", None)
    if theirs is not None and (theirs, getattr(tensor, "device_mesh", None)) != (placements, mesh):
        raise Refused(
            f"a shard {theirs} of a tensor of shape {tuple(tensor.shape)} cannot become one {placements or 'of none'}. "
            "Load the state with torch.distributed.checkpoint, which moves shards between ranks."
        )
    if mesh is None or theirs is not None:
        return local_of(tensor)
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            size = tensor.shape[placement.dim]
            each = -(-size // mesh.size(dim))
            start = min(mesh.get_local_rank(dim) * each, size)
            tensor = tensor.narrow(placement.dim, start, min(each, size - start))
    return tensor


def reshard(model: nn.Module) -> None:
    """Frees the whole weights that a forward has left, so that the model's parameters are shards."""
    for unit in sharded_modules(model):
        unit.reshard()
