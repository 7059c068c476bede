# SPDX-License-Identifier: Apache-2.0
"""Provides the placement of ``fully_shard`` (FSDP2), on a mesh of one dimension, or of two: replicas of shards (HSDP).

The weights are gathered once, before the user's code runs, and stay until the sums are known. So neither forward nor
backward waits for other ranks, whatever path a rank's data take through the model, and however many backwards it needs.
The sums are reduced bucket by bucket, one for each sharded module, while those of the next bucket are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...support.gathered_weights import GatheredWeights
from ...support.ranks import Ranks
from ...support.validate import Refused
from .base import Ranked, local_of
from .buckets import InFlight, LocalSums, Slice, by_kind, kind_of


class Sharded(Ranked):
    """Ranks have shards of the weights: ``fully_shard``.

    Args:
        model: the user's model, in which ``fully_shard`` was applied to some modules.
        ranks: its processes.

    Raises:
        Refused: several meshes, a mesh without some of the processes, weights that are offloaded or sharded otherwise.
    """

    def __init__(self, model: nn.Module, ranks: Ranks):
        super().__init__(model, ranks)
        self._weights = GatheredWeights(model)
        self._dtensors = {name: p for name, p in self._weights.sharded.items() if isinstance(p, DTensor)}
        self._buckets = self._buckets_by_unit()
        meshes = {p.device_mesh for p in self._dtensors.values()}
        if len(meshes) != 1:
            raise Refused(
                f"PrivateTraining: the model's parameters are on {len(meshes)} different device meshes. Call "
                "fully_shard with one mesh for all modules."
            )
        self.mesh = mesh = meshes.pop()
        self._check()
        if mesh.size() != ranks.size:
            raise Refused(
                f"PrivateTraining: the model's device mesh has {mesh.size()} of the {ranks.size} processes. Start "
                "torchrun with as many processes as the mesh has, or make the mesh over all of them."
            )
        self.part = 0
        for dim in range(mesh.ndim):
            self.part = self.part * mesh.size(dim) + mesh.get_local_rank(dim)
        self.num_parts = mesh.size()
        self.shard = self._shards[1]
        sizes = " x ".join(str(mesh.size(dim)) for dim in range(mesh.ndim))
        self.in_words = f"fully_shard over {sizes} ranks"

    def _check(self) -> None:
        for name, p in self._dtensors.items():
            *replicated, last = p.placements
            if type(last) is not Shard or any(type(other) is not Replicate for other in replicated):
                raise Refused(
                    f"PrivateTraining: parameter {name!r} has the placements {p.placements}: private training knows "
                    "fully_shard on a mesh of one dimension, or of two (replicas of shards). Use fully_shard alone."
                )
        self._refuse_offloading()

    def _refuse_offloading(self) -> None:
        if any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in self._weights.groups):
            raise Refused(
                "PrivateTraining: fully_shard was called with CPUOffloadPolicy. Sums and noise are made where the "
                "weights are computed with. Leave the policy out, and shard over more ranks for memory."
            )

    def _buckets_by_unit(self) -> list[list[str]]:
        """Returns the names of the parameters that are reduced together: those of the nearest sharded module."""
        units = {id(unit) for unit in self._weights.units}
        found: dict[str, list[str]] = {}
        modules = dict(self.model.named_modules())
        for name in self._dtensors:
            owner = name.rpartition(".")[0]
            while owner and id(modules.get(owner)) not in units:
                owner = owner.rpartition(".")[0]
            found.setdefault(owner, []).append(name)
        return [*found.values()]

    # Weights

    def of_optimizer(self) -> Mapping[str, Tensor] | None:
        return self._weights.sharded if self._weights.are_gathered else None

    def _modules(self) -> Iterable[nn.Module]:
        return [self.model, *self._weights.units]

    def hold(self) -> None:
        silent = [group for group in self._weights.groups if not group.reduce_grads]
        if silent:
            raise Refused(
                "PrivateTraining: set_requires_gradient_sync(False) was called on the model. Leave it out: pass "
                "Performance(microbatch_size=...), which accumulates the clipped sums."
            )
        super().hold()
        self._weights.gather()

    def let_go(self) -> None:
        super().let_go()
        self._weights.let_go()

    # Sums

    def _start(self, sums: LocalSums, flight: InFlight) -> None:
        names = set(sums.names)
        for unit in self._buckets:
            trained = [name for name in unit if name in names]
            for present in by_kind(sums.take(trained)):
                otherwise = [name for name in present if self._shard_dim(name)]
                for name in otherwise:
                    flight.add({name: Slice(self._reduced_columns(name, present.pop(name)), 0)})
                if present:
                    self._start_rows(present, flight)
        self._start_flat([name for name in sums.names if name not in self._dtensors], sums, flight)

    def _start_rows(self, sums: dict[str, Tensor], flight: InFlight) -> None:
        """Begins to reduce sums of parameters that are sharded by their first dimension, all at once; frees them."""
        shards, index = self._shards
        sizes = {name: total.numel() for name, total in sums.items()}
        each = {
            name: -(-total.shape[0] // shards) * total[0].numel() if len(total) else 0 for name, total in sums.items()
        }
        dtype, device = kind_of(next(iter(sums.values())))
        flight.land()  # so that two buckets are in memory, not three
        whole = torch.zeros(shards, sum(each.values()), dtype=dtype, device=device)
        at = 0
        for name in [*sums]:
            flat, size = sums.pop(name).reshape(-1), each[name]
            full = flat.numel() // size if size else 0
            whole[:full, at : at + size] = flat[: full * size].view(full, size)
            if full < shards:
                rest = flat[full * size :]
                whole[full, at : at + len(rest)] = rest
            at += size
        own = torch.zeros(whole.shape[1], dtype=dtype, device=device)

        def finish() -> dict[str, Slice]:
            for dim in range(self.mesh.ndim - 1):
                dist.all_reduce(own, group=self.mesh.get_group(dim))
            found, at = {}, 0
            for name, size in sizes.items():
                start, end = (min(k * each[name], size) for k in (index, index + 1))
                found[name] = Slice(own[at : at + end - start], start)
                at += each[name]
            return found

        flight.start(own, whole.view(-1), self.mesh.get_group(self.mesh.ndim - 1), finish)

    def _reduced_columns(self, name: str, total: Tensor) -> Tensor:
        """Returns the sum of a parameter that is sharded by another dimension, with zeros outside of the own shard.

        Its numbers do not follow each other in the vector of all numbers, so that the noise of all is drawn.
        """
        partial = DTensor.from_local(total.contiguous(), self.mesh, [Partial("sum")] * self.mesh.ndim, run_check=False)
        local = partial.redistribute(self.mesh, self._dtensors[name].placements).to_local()
        whole = torch.zeros_like(total)
        self._own_columns(name, whole).copy_(local)
        return whole

    def _own_columns(self, name: str, whole: Tensor) -> Tensor:
        (shards, index), dim = self._shards, self._shard_dim(name)
        each = -(-whole.shape[dim] // shards)
        start = min(index * each, whole.shape[dim])
        return whole.narrow(dim, start, min(each, whole.shape[dim] - start))

    @property
    def _shards(self) -> tuple[int, int]:
        """Returns the number of shards, and the own one."""
        dim = self.mesh.ndim - 1
        return self.mesh.size(dim), self.mesh.get_local_rank(dim)

    def _shard_dim(self, name: str) -> int:
        return self._dtensors[name].placements[-1].dim  # pyright: ignore

    def gradients(self, mean: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = {} if self._everywhere else self._gather_flat(mean)
        found = {}
        for name, p in parameters.items():
            if name not in self._dtensors:
                found[name] = (mean if self._everywhere else flat)[name].to(p)
                continue
            assert isinstance(p, DTensor)
            local = p.to_local()
            if self._everywhere or self._shard_dim(name):
                part = self._own_columns(name, mean[name])
            else:
                part = mean[name].view(local.shape)
            part = part.to(local.device, p.dtype).contiguous()
            found[name] = DTensor.from_local(
                part, self.mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        return found

    def clear_row(self, gradient: Tensor, row: int) -> None:
        if not isinstance(gradient, DTensor):
            gradient[row] = 0
            return
        local, (shards, index) = gradient.to_local(), self._shards
        if gradient.placements[-1].dim == 0:  # pyright: ignore
            row -= index * -(-gradient.shape[0] // shards)
        if 0 <= row < len(local):
            local[row] = 0

    def replicas(self) -> list[tuple[str, Tensor]]:
        _, shard = self._shards
        found = []
        for name, p in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if name in self._dtensors:
                found.append((f"shard {shard} of {name}", local_of(p)))
            else:
                found.append((name, p))
        return found
