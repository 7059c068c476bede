# SPDX-License-Identifier: Apache-2.0
"""The tape: records op calls with data and parameters, and computes per-example gradients from them.

After the forward, every path through the autograd graph from the losses to a trainable parameter must lead through a
recorded use, or the call is refused with the names of parameter and op. One backward, to the outputs only, then gives
every use its b, the gradient in its output y. Three calls follow each other: `reach` finds the uses,
`LayoutFinder.find` their layouts, and `StreamedSum.compute` the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ..support.torch_modes import without_autocast
from .layouts.find import LayoutFinder
from .layouts.known import Layouts, Merging
from .layouts.predict import Disagreement
from .parallel.shards import whole_losses
from .recording.paths import RecordedGraph, reach
from .recording.recorder import Recorder
from .rows.blocks import Direction
from .rows.operator import Jacobian
from .rows.streamed_sum import Clip, Observe, StreamedSum, SumRequest

# Peak memory allowed by default, in units of what non-private training needs.
MEMORY_BUDGET = 1.2


class Tape(Recorder):
    """Per-example gradients from what was recorded while it was active; ``record`` makes one for a model.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        layouts: of earlier batches, by path.
        num_examples: size of the batch, if it is known in advance; shows which tensors can have a part per example.

    Attributes:
        measured: whether layouts had to be measured, by additional backwards.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor] = (),
        layouts: Layouts | None = None,
        num_examples: int | None = None,
    ):
        self.layouts = layouts if layouts is not None else Layouts()
        super().__init__(parameters, constants, num_examples, self.layouts.filled, self.layouts.saved_at)
        self.measured = False

    def jacobian(
        self, losses: Tensor, *, retain_graph: bool = False, may_miss: Iterable[str] = (), verify: bool = False
    ) -> Jacobian:
        """Returns the Jacobian of the per-example losses in the recorded parameters; arguments as of ``record``."""
        kept: list[Jacobian] = []

        def keep(jacobian: Jacobian, group: str) -> dict[str, Tensor]:
            kept.append(jacobian)
            return {}

        request = SumRequest({"all": [*self.parameters]}, keep, verify=verify)
        self._answer(request, losses, may_miss, retain_graph=retain_graph)
        kept[0].check_equal()  # in each batch: in those before, the rows may have been nearly zero
        return kept[0]

    def clipped_sum(
        self,
        losses: Tensor,
        groups: Mapping[str, Sequence[str]],
        clip: Clip | None,
        *,
        merging: Merging | None = None,
        may_miss: Iterable[str] = (),
        memory_budget: float = MEMORY_BUDGET,
        observe: Observe | None = None,
        observe_on: Direction | None = None,
    ) -> dict[str, Tensor]:
        """Returns Σᵢ cᵢ row_i with factors group by group, by one backward that keeps no more than the budget allows.

        Args:
            losses: as of ``jacobian``; the graph is freed.
            groups: label -> names of parameters; a partition of the recorded ones.
            clip: (Jacobian restricted to a group, the group's label) -> the group's clipped sum by name; called as
                soon as the group's last b is known. None sums nothing: the rows are only observed.
            merging: which examples share a row, their mean.
            may_miss: as of ``jacobian``.
            memory_budget: peak memory allowed: up to 100 in units of what non-private training needs, else in bytes.
            observe: receives the rows of every group before they are summed.
            observe_on: the only direction that ``observe`` projects rows on; None if it may ask anything.

        Returns:
            The clipped sum by name, which is verified on the first batches. Under a budget below what must be held,
            the graph stays instead, and a second backward with the factors as cotangent gives the sum.
        """
        return self._answer(SumRequest(groups, clip, merging, observe, memory_budget, observe_on), losses, may_miss)

    def _answer(
        self, request: SumRequest, losses: Tensor, may_miss: Iterable[str], *, retain_graph: bool = False
    ) -> dict[str, Tensor]:
        if self.shards is not None:
            losses = whole_losses(losses)
        reached = reach(self, losses, may_miss, self.layouts.path)
        with without_autocast(losses.device.type), reached.ranks.peers.same_random():
            if not len(losses):
                return _sum_of_none(reached, request)
            finder = LayoutFinder(self.layouts, reached, request)
            try:
                return _sum_by(finder, reached, request, retain_graph=retain_graph)
            finally:
                self.measured = finder.measured


def _sum_by(
    finder: LayoutFinder, reached: RecordedGraph, request: SumRequest, *, retain_graph: bool
) -> dict[str, Tensor]:
    """Returns the sums; if the layouts turn out to be wrong, they are measured, and the rows are computed again."""
    while True:
        found, check = finder.find(), finder.check()
        try:
            sums = StreamedSum(reached, found, request, finder.budget()).compute(check, retain_graph=retain_graph)
        except Disagreement:
            finder.doubt()
        else:
            finder.learn(found, check)
            return sums


def _sum_of_none(reached: RecordedGraph, request: SumRequest) -> dict[str, Tensor]:
    """Returns the sums of an empty batch."""
    empty = Jacobian(0, reached.losses.dtype, reached.parts, [], reached.ranks)
    sums = [request.clip(empty.restricted(names), label) for label, names in request.groups.items() if request.clip]
    return {name: total for part in sums for name, total in part.items()}
