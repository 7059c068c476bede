# SPDX-License-Identifier: Apache-2.0
"""Provides the placement of ``DistributedDataParallel``, in which every rank has all weights.

A rank gets the sum of its slice of all numbers (reduce-scatter), adds the noise of that slice, and the slices are
gathered: the bytes of one all-reduce, and 1/N of the noise for each rank. The wrapper's own reducer is never used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...support.ranks import Ranks
from ...support.validate import Refused
from .base import Ranked
from .buckets import InFlight, LocalSums


class Replicated(Ranked):
    """Every rank has all weights: ``DistributedDataParallel``, with its reducer never used.

    Args:
        wrapper: the user's wrapped model.
        ranks: its processes.
    """

    def __init__(self, wrapper: DistributedDataParallel, ranks: Ranks):
        super().__init__(wrapper.module, ranks)
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
