# SPDX-License-Identifier: Apache-2.0
"""Provides the placements of tensor-parallel models (``parallelize_module``), with or without ``fully_shard``.

The T ranks of one tensor-parallel group compute with the same examples, indices and random numbers. Each has shards of
some weights and all of the others. The norms of the rows are added up by the recorder, so that the clip factors are
equal on all T ranks, and a rank's sums are those of its own shards: nothing is added up over the group.

Sums of weights that all T ranks have are equal up to rounding. Those of the first rank are given to the others, because
a release that two ranks round differently would be two releases with one noise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...jacobian.parallel.shards import listed
from ...mechanisms.base import Mechanism
from ...mechanisms.estimated_norms import Sketched
from ...mechanisms.gep import BGEP, GEP
from ...support.contents import local_of
from ...support.gathered_weights import GatheredWeights
from ...support.ranks import Ranks
from ...support.validate import Refused
from .base import Ranked
from .buckets import InFlight, LocalSums, Slice, buckets_of, by_kind
from .sharded import Sharded


@dataclass(frozen=True)
class Split:
    """The shard of one weight that a tensor-parallel rank computes with.

    Args:
        shape: of the whole weight.
        dim: in which it is sharded; None if each rank has all of it.
        count, index: the number of shards, and which of them this is.
    """

    shape: torch.Size
    dim: int | None = None
    count: int = 1
    index: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """Returns start and length of the shard in its dimension, as torch divides it."""
        assert self.dim is not None
        size = self.shape[self.dim]
        each = -(-size // self.count)
        start = min(self.index * each, size)
        return start, min(each, size - start)

    @property
    def local_shape(self) -> torch.Size:
        """Returns the shape of the shard."""
        if self.dim is None:
            return self.shape
        return torch.Size([*self.shape[: self.dim], self.span[1], *self.shape[self.dim + 1 :]])

    def placed(self, part: Slice) -> Slice:
        """Returns consecutive rows of the shard as consecutive numbers of the whole weight.

        Between the numbers of a shard in another dimension than the first there are those of other ranks, which are
        zero here, and get noise as all others.
        """
        if not self.dim or not len(part.numbers):
            before = 0 if self.dim is None else self.span[0] * self.shape[1:].numel()
            return Slice(part.numbers, before + part.first)
        rows = part.numbers.view(-1, *self.local_shape[1:])
        whole = rows.new_zeros(len(rows), *self.shape[1:])
        whole.narrow(self.dim, *self.span).copy_(rows)
        return Slice(whole.view(-1), part.first // rows[0].numel() * whole[0].numel())

    def own(self, numbers: Tensor) -> Tensor:
        """Returns the numbers (k,) of the shard among those that `placed` returned."""
        if not self.dim or not len(numbers):
            return numbers
        return numbers.view(-1, *self.shape[1:]).narrow(self.dim, *self.span).reshape(-1)

    def row(self, row: int) -> int:
        """Returns the number of a row of the weight in the shard; outside of the shard if other ranks have it."""
        return row - self.span[0] if self.dim == 0 else row


class _Split(Ranked):
    """Splits the sums of tensor-parallel models: what their placements share."""

    waits_inside = True

    def _begin(self, group: Any, count: int, index: int, part: int = 0) -> None:
        """Notes the ranks with the other shards, their number, and which of them this is; and its part of a batch."""
        self._group, self._count, self._index, self.part = group, count, index, part
        self.counts = index == 0
        self._splits = {name: self._split_of(name, p) for name, p in self.model.named_parameters()}

    @abstractmethod
    def _tensor_parallel(self, p: Tensor) -> Any:
        """Returns the placement of a parameter, or of its gradient, by tensor parallelism; None if it has none."""

    @abstractmethod
    def _start_row(self, split: Split) -> int:
        """Returns the number of the first row that this rank keeps of a shard."""

    def _split_of(self, name: str, p: Tensor) -> Split:
        place = self._tensor_parallel(p)
        if place is None or type(place) is Replicate:
            return Split(p.shape)
        if type(place) is not Shard:
            raise Refused(
                f"PrivateTraining: parameter {name!r} has the placement {place}: private training knows weights that "
                "are sharded in one dimension or replicated. Use ColwiseParallel or RowwiseParallel for its module."
            )
        return Split(p.shape, place.dim, self._count, self._index)

    def check(self, settings: Any) -> None:
        if isinstance(settings.unscheduled, (Sketched, GEP, BGEP)):
            raise Refused(
                f"PrivateTraining: clipping={settings.clipping!r} needs whole rows of the gradient, and the model is "
                "tensor parallel: each rank has parts of the rows only. Take a rule such as Flat, which clips by exact "
                "norms, or use fully_shard or DistributedDataParallel instead of parallelize_module."
            )

    def _summed(self, total: Tensor) -> Tensor:
        """Adds up a tensor that every rank gets whole: that of the first rank of each tensor-parallel group."""
        return super()._summed(total if self.counts else total.zero_())

    def _placed(self, slices: dict[str, Slice]) -> dict[str, Slice]:
        return {name: self._splits[name].placed(part) for name, part in slices.items()}

    def take(self, mechanism: Mechanism, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
        slices, places = super().take(mechanism, parameters)
        lengths = {name: torch.linalg.vector_norm(slices[name]) for name in slices if name in self._splits}
        whole = [name for name in lengths if self._splits[name].dim is None]
        apart: dict[str, Tensor] = {}
        for bucket in buckets_of({name: slices[name].nbytes for name in whole}):
            for chosen in by_kind({name: slices[name] for name in bucket}):
                apart |= self._copy_first(chosen)
        _check_alike(lengths, apart)
        return slices, places

    def _copy_first(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Overwrites sums (k,) with those of the first rank of the group, in place; returns how far each moved."""
        sizes = [len(s) for s in sums.values()]
        flat = torch.cat([*sums.values()])
        dist.broadcast(flat, src=dist.get_global_rank(self._group, 0), group=self._group)
        firsts = [*flat.split(sizes)]
        apart = {
            name: torch.linalg.vector_norm(s - first) for (name, s), first in zip(sums.items(), firsts, strict=True)
        }
        torch._foreach_copy_([*sums.values()], firsts)  # pyright: ignore[reportPrivateImportUsage]
        return apart

    @property
    def shard(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        are_split = any(p.requires_grad and self._splits[name].dim is not None for name, p in self._named())
        return self.part * self._count + (self._index if are_split else 0)

    @property
    def slice_number(self) -> int:
        return self.shard

    def in_common(self) -> Collection[str]:
        return {name for name, split in self._splits.items() if split.dim is None}

    def _named(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_parameters()]

    def _alike(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            name: local_of(p).detach().new_zeros(()).expand(self._splits[name].local_shape)
            for name, p in parameters.items()
        }

    def gradients(self, mean: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, p in parameters.items():
            local = local_of(p)
            part = self._splits[name].own(mean[name]).view(local.shape).to(local.device, p.dtype)
            if isinstance(p, DTensor):
                part = DTensor.from_local(
                    part.contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
            found[name] = part
        return found

    def clear_row(self, gradient: Tensor, row: int) -> None:
        split, local = self._split_of("padding", gradient), local_of(gradient)
        row = split.row(row) - self._start_row(split)
        if 0 <= row < len(local):
            local[row] = 0

    def replicas(self) -> list[tuple[str, Tensor]]:
        found = []
        for name, p in [*self._named(), *self.model.named_buffers()]:
            split = self._splits.get(name)
            own = [self.part] if self.num_parts > 1 and isinstance(p, DTensor) else []
            own += [] if split is None or split.dim is None else [self._index]
            found.append((f"shard {own} of {name}" if own else name, local_of(p)))
        return found


def _check_alike(lengths: Mapping[str, Tensor], apart: Mapping[str, Tensor]) -> None:
    """Refuses sums that this rank has not as the first rank has them, up to rounding.

    The recorder compares the rows of the first batches alone, in which those behind a weight of zeros are zero.

    Args:
        lengths: of the sums of all parameters.
        apart: how far those of parameters that all ranks have are from the first rank's.

    Raises:
        Refused: a rank has only a term of such a parameter's gradient.
    """
    if not apart:
        return
    device = next(iter(lengths.values())).device
    own, far = (
        dict(zip(some, torch.stack([length.double().to(device) for length in some.values()]).tolist(), strict=True))
        for some in (lengths, apart)
    )
    longest = max(own.values())
    differing = [name for name in far if far[name] > 1e-2 * own[name] + 1e-4 * longest]
    if differing:
        raise Refused(
            f"PrivateTraining: the clipped sums of the replicated parameters {listed(differing)} differ between the "
            "tensor-parallel ranks: one of them is used on a part of each example only (a norm of every head, "
            "activations sharded by position), or a rank has other weights or losses. Nothing was released for this "
            "step. Freeze such a parameter, and change weights and compute losses on all ranks alike."
        )


class TensorParallelWeights(_Split):
    """Ranks have shards of some weights and compute with the same examples: ``parallelize_module``.

    Args:
        model: the user's model, with parameters that are ``DTensor`` on one mesh.
        ranks: its processes.

    Raises:
        Refused: several meshes, a mesh of several dimensions or without some of the processes, other placements than
            one shard or a replica on each rank.
    """

    def __init__(self, model: nn.Module, ranks: Ranks):
        super().__init__(model, ranks)
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        mesh = max(meshes, key=lambda mesh: mesh.ndim)
        if len(meshes) > 1 or mesh.ndim > 1:
            raise Refused(
                f"PrivateTraining: the model's parameters are DTensors on {len(meshes)} device meshes, of "
                f"{mesh.ndim} dimensions, but fully_shard was not applied to it. Give parallelize_module one mesh of "
                'one dimension for all modules, as mesh["tp"].'
            )
        if mesh.size() != ranks.size:
            raise Refused(
                f"PrivateTraining: the model's tensor-parallel mesh has {mesh.size()} of the {ranks.size} processes, "
                'and the others would train models of their own. Call fully_shard(model, mesh=mesh["dp"]) after '
                "parallelize_module, or start torchrun with as many processes as the mesh has."
            )
        self._begin(mesh.get_group(), mesh.size(), mesh.get_local_rank())
        self.in_words = f"tensor parallel over {ranks.size} ranks"

    @property
    def reduces_in_buckets(self) -> bool:
        return False  # the slices are as large as the sums

    def _tensor_parallel(self, p: Tensor) -> Any:
        return p.placements[0] if isinstance(p, DTensor) else None

    def _start_row(self, split: Split) -> int:
        return 0

    def _start(self, sums: LocalSums, flight: InFlight) -> None:
        flight.add({name: Slice(total.reshape(-1), 0) for name, total in sums.take(sums.names).items()})


class ShardedTensorParallelWeights(_Split, Sharded):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Ranks have shards of the shards: ``parallelize_module`` on one dimension of a mesh, ``fully_shard`` on the other.

    A batch is divided over the first dimension. The ranks along the second have the same part of it. FSDP shards the
    rows of what a rank has of a weight under tensor parallelism, and so are the sums reduced.

    Args:
        model: the user's model.
        ranks: its processes.

    Raises:
        Refused: meshes that are not of these two dimensions, weights that are not sharded by ``fully_shard``.
    """

    def __init__(self, model: nn.Module, ranks: Ranks):
        Ranked.__init__(self, model, ranks)
        self._weights = GatheredWeights(model)
        self._dtensors = {name: p for name, p in self._weights.sharded.items() if isinstance(p, DTensor)}
        self._buckets = self._buckets_by_unit()
        meshes = {p.device_mesh for p in self._dtensors.values() if p.device_mesh.ndim > 1}
        both = next(iter(meshes))
        plain = [name for name in self._weights.sharded if name not in self._dtensors]
        if len(meshes) > 1 or both.ndim > 2 or plain:
            raise Refused(
                "PrivateTraining: with tensor parallelism every parameter must be sharded by fully_shard on one "
                f"dimension of a mesh of two ({', '.join(sorted(map(str, meshes)))}{', not so: ' if plain else ''}"
                f"{', '.join(plain)}). Call parallelize_module(model, mesh['tp'], plan), then fully_shard(model, "
                "mesh=mesh['dp']) with no ignored_params and no replicas of shards."
            )
        if both.size() != ranks.size:
            raise Refused(
                f"PrivateTraining: the model's device mesh has {both.size()} of the {ranks.size} processes. Start "
                "torchrun with as many processes as the mesh has, or make the mesh over all of them."
            )
        assert both.mesh_dim_names is not None
        self.mesh = both[both.mesh_dim_names[0]]
        self.num_parts = self.mesh.size()
        self._check()
        self._begin(both.get_group(1), both.size(1), both.get_local_rank(1), self.mesh.get_local_rank())
        self.in_words = f"fully_shard over {both.size(0)} x tensor parallel over {both.size(1)} ranks"

    def _check(self) -> None:
        for name, p in self._dtensors.items():
            if getattr(p.placements[0], "dim", None) != 0 or (p.device_mesh.ndim == 1 and p.device_mesh != self.mesh):
                raise Refused(
                    f"PrivateTraining: parameter {name!r} has the placements {p.placements} on {p.device_mesh}: with "
                    "tensor parallelism private training knows weights that fully_shard divides by rows, all over one "
                    "dimension of the mesh. Leave out shard_placement_fn, and use one mesh."
                )
        self._refuse_offloading()

    def _tensor_parallel(self, p: Tensor) -> Any:
        return p.placements[1] if isinstance(p, DTensor) and p.device_mesh.ndim == 2 else None

    def _start_row(self, split: Split) -> int:
        return self.part * -(-split.local_shape[0] // self.num_parts)

    def _shard_dim(self, name: str) -> int:
        return 0
