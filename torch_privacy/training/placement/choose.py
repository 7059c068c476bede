# SPDX-License-Identifier: Apache-2.0
"""Finds out where the weights of a model are, and refuses wrappers that hide them; places those of ``DDP``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...support.gathered_weights import sharded_modules
from ...support.ranks import Ranks, num_processes
from ...support.validate import Refused
from .base import Placement, Ranked, Whole
from .buckets import InFlight, LocalSums


class Replicated(Ranked):
    """Every rank has all weights: ``DistributedDataParallel``, with its reducer never used.

    Args:
        wrapper: the user's wrapped model.
        ranks: its processes.

    Raises:
        Refused: ``static_graph=True``.
    """

    def __init__(self, wrapper: DistributedDataParallel, ranks: Ranks):
        super().__init__(wrapper.module, ranks)
        if wrapper.static_graph:
            raise Refused(
                "PrivateTraining: DistributedDataParallel was made with static_graph=True, so that its backwards wait "
                "for a reduction that private training never asks for. Leave it out: nothing is reduced in a backward."
            )
        self._wrapper = wrapper
        self.part = ranks.rank
        self.num_parts = ranks.size
        self.in_words = f"DistributedDataParallel over {ranks.size} ranks"

    @contextmanager
    def running(self) -> Iterator[None]:
        wrapper = self._wrapper
        if not wrapper.require_backward_grad_sync:
            raise Refused(
                "PrivateTraining: the loop runs inside of DistributedDataParallel.no_sync(), as in accelerate's "
                "accumulate. Leave it out: pass Performance(microbatch_size=...), which accumulates the "
                "clipped sums."
            )
        before = wrapper.require_forward_param_sync
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
        try:
            yield
        finally:
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = True, before

    def _start(self, sums: LocalSums, flight: InFlight) -> None:
        self._start_flat(sums.names, sums, flight)

    def gradients(self, mean: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = mean if self._everywhere else self._gather_flat(mean)
        return {name: whole[name].to(p) for name, p in parameters.items()}

    def replicas(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]


def placement_of(model: Any) -> Placement:
    """Returns where the weights of a model are.

    Raises:
        Refused: every rank would train a model of its own, or a wrapper that hides parameters or sums gradients itself.
    """
    _check_wrappers(model)
    if not (dist.is_available() and dist.is_initialized()):
        return Whole(model)
    from torch.distributed.tensor import DTensor

    from .sharded import Sharded
    from .tensor_parallel import ShardedTensorParallelWeights, TensorParallelWeights

    if isinstance(model, DistributedDataParallel):
        if any(isinstance(p, DTensor) for p in model.parameters()):
            raise Refused(
                "PrivateTraining: a tensor-parallel model is wrapped in DistributedDataParallel. Use fully_shard on "
                'the other dimension of the mesh instead: parallelize_module(model, mesh["tp"], plan), then '
                'fully_shard(model, mesh=mesh["dp"]).'
            )
        return Replicated(model, Ranks.here())
    if isinstance(model, nn.Module):
        inside = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
        if inside:
            raise Refused(
                f"PrivateTraining: module {inside[0]!r} is wrapped in DistributedDataParallel. Wrap the whole model, "
                "and pass the wrapped one."
            )
        if sharded_modules(model):
            distributed = [p for p in model.parameters() if isinstance(p, DTensor)]
            placed: list[Any] = [p.placements for p in distributed if p.device_mesh.ndim > 1]
            is_parallel = any(len(places) > 2 or not places[0].is_replicate() for places in placed)
            kind = ShardedTensorParallelWeights if is_parallel else Sharded
            return kind(model, Ranks.here())
        if any(isinstance(p, DTensor) for p in model.parameters()):
            return TensorParallelWeights(model, Ranks.here())
    if num_processes() > 1:
        raise Refused(
            f"PrivateTraining: torch.distributed runs with {num_processes()} processes, and each would train a model "
            "of its own. Apply fully_shard to the model, or wrap it in DistributedDataParallel and pass the wrapped "
            "one; make the optimizer afterwards."
        )
    return Whole(model)


def _check_wrappers(model: Any) -> None:
    """Refuses wrappers that keep parameters where they cannot be recorded."""
    parts = [model, *model.modules()] if isinstance(model, nn.Module) else [model]
    for part in parts:
        kind = type(part)
        if isinstance(part, DataParallel):
            raise Refused(
                "PrivateTraining: nn.DataParallel splits a batch between copies of the model, of which the recorder "
                "sees none. Pass model.module, and use fully_shard or DistributedDataParallel for several devices."
            )
        if any(base.__name__ == "FullyShardedDataParallel" for base in kind.__mro__):
            raise Refused(
                "PrivateTraining: FullyShardedDataParallel (FSDP1) keeps its parameters in flat vectors, in which the "
                "layers' own cannot be distinguished. Use torch.distributed.fsdp.fully_shard (FSDP2)."
            )
        if kind.__module__.split(".")[0] == "deepspeed":
            raise Refused(
                f"PrivateTraining: {kind.__name__} of DeepSpeed sums gradients and steps by itself, so that no example "
                "can be clipped. Use torch.distributed.fsdp.fully_shard, which shards as ZeRO-3 does."
            )
