# SPDX-License-Identifier: Apache-2.0
"""Computes the clipped sum block by block while the backward runs, so that each op's input and b are freed early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from ...ops import AnyLayout, Use
from ...ops._base import is_half
from ...support.torch_modes import full_precision, without_autocast
from ..layouts.known import Merging
from ..layouts.predict import FoundLayouts
from ..recording.backward import backward_into
from ..recording.paths import RecordedGraph
from .blocks import Block, Direction, NothingKept
from .native import RowCheck, SumByBackward
from .operator import Jacobian
from .plan import MemoryBudget, make_op

# The coarsest rounding in the graph at which a second backward, which rounds again, keeps the bound on a row.
FINE = 1e-6
# Calls with inputs and outputs of at most this many bytes get every b of one backward at once.
AT_ONCE = 2**24
Clip = Callable[[Jacobian, str], dict[str, Tensor]]
Observe = Callable[[Jacobian, str], None]


@dataclass(frozen=True)
class SumRequest:
    """A question about the rows of one batch: their clipped sum, group by group.

    Attributes:
        groups: label -> names of parameters; a partition of the recorded ones.
        clip: (Jacobian restricted to a group, the group's label) -> the group's clipped sum by name; called as soon as
            the group's last b is known. None sums nothing.
        merging: which examples share a row, their mean.
        observe: receives the rows of every group before they are summed.
        observe_on: the only direction that ``observe`` projects rows on; None if it may ask anything.
        memory_budget: peak memory allowed; None keeps everything, so that any query can be answered later.
        verify: whether the rows are checked against an ordinary backward on the first batches.
    """

    groups: Mapping[str, Sequence[str]]
    clip: Clip | None = None
    merging: Merging | None = None
    observe: Observe | None = None
    memory_budget: float | None = None
    observe_on: Direction | None = None
    verify: bool = True

    def cotangent(self, losses: Tensor) -> Tensor:
        """Returns (n,), the weight of each loss in its row."""
        return torch.ones_like(losses) if self.merging is None else self.merging.weights().to(losses)

    def num_rows(self, losses: Tensor) -> int:
        """Returns the number of rows of a batch."""
        return len(losses) if self.merging is None else self.merging.count


class StreamedSum:
    """Answers a request by one backward that keeps no more than the budget allows, or by two.

    Args:
        reached: the calls that the losses depend on.
        found: their layouts.
        request: what is asked.
        budget: of one backward; None keeps everything.
    """

    def __init__(self, reached: RecordedGraph, found: FoundLayouts, request: SumRequest, budget: MemoryBudget | None):
        self._reached, self._found, self._request, self._budget = reached, found, request, budget
        self._cotangent = request.cotangent(reached.losses)

    def compute(self, check: RowCheck | None = None, *, retain_graph: bool = False) -> dict[str, Tensor]:
        """Returns the sum of all groups by name; ``check`` receives the rows first and must agree.

        The graph is freed unless it is retained.
        """
        request, budget = self._request, self._budget
        if not self._wants_second_backward():
            return self._backward(request, budget, check, retain_graph)
        assert budget is not None
        if check is not None or request.observe is not None:
            # In a backward of its own, so that the sum is computed as on batches without it, bit for bit.
            self._show_rows(replace(request, clip=None), budget, check)
        if request.clip is None:
            return {}
        request = replace(request, observe=None)
        try:
            with full_precision(self._reached.losses.device):  # both backwards, which must give the same b
                return self._backward(request, budget.fresh(may_drop=True), None, True, last=not retain_graph)
        except NothingKept:  # some rows are to be left out
            return self._backward(request, budget.fresh(), None, retain_graph)

    def _show_rows(self, request: SumRequest, budget: MemoryBudget, check: RowCheck | None) -> None:
        """Lets check and observer see the rows, of which nothing but norms and projections is kept if these suffice."""
        may_drop = request.observe is None or request.observe_on is not None
        try:
            self._backward(request, budget.fresh(may_drop=may_drop), check, True)
        except NothingKept:
            if check is not None:
                check.begin()
            self._backward(request, budget.fresh(), check, True)

    def _wants_second_backward(self) -> bool:
        """True if nothing need be kept of the rows but norms: a second backward gives the sum, if one is wanted."""
        budget, reached, request = self._budget, self._reached, self._request
        if budget is None or len(request.groups) > 1 or (request.clip is None and request.observe_on is None):
            return False
        return reached.ranks.peers.any(budget.wants_second_backward) and (request.clip is None or not self._rounds())

    def _rounds(self) -> bool:
        """True if a native sum would be rounded by more than the bound allows."""
        return self._reached.precision() > FINE or any(is_half(p) for p in self._reached.parts.values())

    def _backward(
        self,
        request: SumRequest,
        budget: MemoryBudget | None,
        check: RowCheck | None,
        retain_graph: bool,
        *,
        last: bool = False,
    ) -> dict[str, Tensor]:
        """Returns the sums, by one backward; if it is the ``last``, the one for the sum may free the graph."""
        reached, found = self._reached, self._found
        needs_graph = found.may_fail or reached.needs_graph
        retain_graph = retain_graph or needs_graph
        native = SumByBackward(reached, self._cotangent, request.merging, frees_graph=last and not needs_graph)
        if request.clip is None:
            native.project_on(request.observe_on, [] if check is None else check.directions)
        work = Backward(reached, found, request, budget, native, check)
        blocks = BlockStream(work, frees_inputs=budget is not None and not retain_graph)
        at_once = reached.ranks.peers.all(reached.size <= AT_ONCE)
        backward_into(blocks, reached, found.places, self._cotangent, retain_graph=retain_graph, at_once=at_once)
        if check is not None:
            check.conclude()
        return blocks.groups.sums


@dataclass(frozen=True, slots=True)
class Backward:
    """The batch, its layouts and the request that one backward is made for.

    Attributes:
        budget: decides what may be kept; None keeps everything, so that any query can be answered later.
        native: computes the sum of blocks of which nothing is kept.
        check: receives every group's rows first.
    """

    reached: RecordedGraph
    found: FoundLayouts
    request: SumRequest
    budget: MemoryBudget | None
    native: SumByBackward
    check: RowCheck | None


class BlockStream:
    """Makes the blocks while one backward runs: a block is complete when all uses of its weight are known.

    Args:
        work: what the backward is made for.
        frees_inputs: whether the calls' inputs may be freed.
    """

    def __init__(self, work: Backward, *, frees_inputs: bool):
        self._work, self._frees_inputs = work, frees_inputs
        self._precision = full_precision(work.reached.losses.device)
        sources = work.reached.sources
        self._open: dict[int, Block] = {}
        self._awaited: dict[int, int] = {}  # uses of each weight to come
        for call in work.reached.calls:
            for use in call.uses:
                self._awaited[id(use.weight)] = self._awaited.get(id(use.weight), 0) + 1
        blocks = [sources[key].names for key in self._awaited]
        self._sharing: dict[str, int] = {}  # blocks of each parameter
        for name in chain.from_iterable(blocks):
            self._sharing[name] = self._sharing.get(name, 0) + 1
        self.groups = GroupSums(work, blocks)

    def take(self, number: int, g: Tensor | None) -> None:
        work = self._work
        call = work.found.places[number]
        output, uses = call.output, call.unpacked() if call.part else call.uses
        with self._precision:  # not the backward itself, which is the user's
            if type(g) is Tensor and output.part is None and g.shape == output.shape:  # most of them
                b = g
            else:
                b = output.gradient(g, work.reached.losses)
            if number < len(work.reached.calls) and work.budget is not None:
                work.budget.passed += call.size
            layout = work.found.layout(number, b)
            if number >= len(work.reached.calls):  # a cut
                return
            if work.request.merging is not None:
                layout = work.request.merging.layout(layout)
            if self._frees_inputs:  # the ops made from the call hold what they need
                call.free_inputs()
            for use in uses:
                self._take_use(use, b, layout)

    def _take_use(self, use: Use, b: Tensor, layout: AnyLayout) -> None:
        """Adds a use to its block; once that is complete, decides what is kept of it, and passes it on."""
        key = id(use.weight)
        source = self._work.reached.sources[key]
        op = make_op(use, b, layout, source.names)
        block = self._open.pop(key, None)
        if block is None:
            rounds = source.half and not source.direct
            block = Block(use.weight, source.names, source.direct, source.rearranged, rounds, source.way_back)
            block.summed_once = self._work.budget is not None
        block.ops.append(op)
        self._awaited[key] -= 1
        if self._awaited[key]:
            self._open[key] = block
            return
        if len(block.ops) > 1:
            block.merge()
        is_alone = block.stands_alone and self._sharing[block.names[0]] == 1
        budget, held = self._work.budget, 0
        if budget is None:
            if is_alone:
                block.keep_smaller_rows()
        elif is_alone:
            held = block.reduce(budget, self._work.native)
        else:  # its rows must be joined with those of other blocks
            held = budget.hold(block.least_bytes)
        self.groups.add(block, held)


class GroupSums:
    """Clips and sums each group of parameters as soon as its last block is complete; then frees the group.

    Args:
        work: what the backward is made for.
        blocks: the parameters' names of each block to come.
    """

    def __init__(self, work: Backward, blocks: Sequence[tuple[str, ...]]):
        self._work = work
        self.sums: dict[str, Tensor] = {}
        groups = work.request.groups
        label_of: dict[str, str] = {}
        self._blocks: dict[str, list[Block]] = {}
        for label, names in groups.items():
            label_of.update(dict.fromkeys(names, label))
            self._blocks[label] = []
        self._labels: dict[tuple[str, ...], dict[str, None]] = {}  # of each block
        self._held, self._awaited = dict.fromkeys(groups, 0), dict.fromkeys(groups, 0)  # bytes and number of its blocks
        for names in blocks:
            self._labels[names] = labels = dict.fromkeys(map(label_of.__getitem__, names))
            for label in labels:
                self._awaited[label] += 1
        for label in groups:
            if not self._awaited[label]:
                self._finish(label)

    def add(self, block: Block, held: int) -> None:
        """Adds a complete block, and the bytes that are held of it."""
        for label in self._labels[block.names]:
            self._blocks[label].append(block)
            self._held[label] += held
            self._awaited[label] -= 1
            if not self._awaited[label]:
                self._finish(label)

    def _finish(self, label: str) -> None:
        work, request, reached = self._work, self._work.request, self._work.reached
        work.found.conclude()  # raises unless the layouts hold, before anything is computed from the blocks
        blocks = self._blocks.pop(label)
        if work.budget is not None and work.budget.may_drop:
            self._drop_together(blocks)
        losses, names = reached.losses, request.groups[label]
        jacobian = Jacobian(request.num_rows(losses), losses.dtype, reached.parts, blocks, reached.ranks)
        if len(names) < len(reached.parts):
            jacobian = jacobian.restricted(names)
        if work.check is not None:
            work.check.add(jacobian)
        if request.observe is not None:
            request.observe(jacobian, label)
        if request.clip is not None:
            squares = jacobian.squared_norms(final=False) if any(map(_native, blocks)) else None
            self.sums |= request.clip(jacobian, label)
            if squares is not None:
                work.native.conclude(squares)
        if work.budget is not None:
            work.budget.release(self._held[label])

    def _drop_together(self, blocks: Sequence[Block]) -> None:
        """Drops the blocks that other ranks dropped, so that all of them make the native backward, and for the same."""
        dropped = self._work.reached.ranks.peers.any_of([block.dropped for block in blocks])
        for block, is_dropped in zip(blocks, dropped, strict=True):
            if is_dropped:
                block.drop(self._work.native)


_native = attrgetter("native")


class DeferredSum:
    """A clipped sum Jᵀ c that is computed part by part, after it was decided that it is wanted.

    Args:
        jacobian: its rows.
        factors: (n,) c.
    """

    def __init__(self, jacobian: Jacobian, factors: Tensor):
        self._jacobian, self._factors = jacobian, factors

    @torch.no_grad()
    def compute(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the sum in these parameters, name -> tensor."""
        device = self._factors.device
        with without_autocast(device.type), full_precision(device):
            return self._jacobian.restricted(names).weighted_sum(self._factors)
