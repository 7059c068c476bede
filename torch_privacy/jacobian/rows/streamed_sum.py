# SPDX-License-Identifier: Apache-2.0
"""Computes the clipped sum block by block while the backward runs, so that each op's input and b are freed early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from ...ops._base import is_half
from ...support.torch_modes import full_precision, without_autocast
from ...support.validate import Refused
from ..layouts.predict import Prediction
from ..parallel.agreement import ALONE
from ..parallel.shards import TensorParallel, local_gradient
from .blocks import Block, NativeSum, NothingKept
from .operator import Jacobian
from .plan import Budget

if TYPE_CHECKING:
    from ...ops import AnyLayout, Op, Use
    from ..layouts.known import Merging
    from ..recording.calls import Call, Reached
    from ..recording.recorder import Source
    from .check import RowCheck

# The coarsest rounding in the graph at which a second backward, which rounds again, keeps the bound on a row.
FINE = 1e-6
NORMAL = nullcontext()
# Calls with inputs and outputs of at most this many bytes get every b of one backward at once.
AT_ONCE = 2**24
LayoutOf = Callable[[int, Tensor | None, Tensor], "AnyLayout"]  # (number of a call, its b, losses)
OnBlock = Callable[[Block], None]
Clip = Callable[[Jacobian, str], dict[str, Tensor]]
Observe = Callable[[Jacobian, str], None]


class GradientSink(Protocol):
    """Receives the gradients of a backward."""

    def take(self, number: int, g: Tensor | None, like: Tensor) -> None:
        """Receives the gradient at the edge of a call (or cut); gradients are off, as they are in a backward."""


def layouts_by(source: Sequence[AnyLayout] | Prediction, merging: Merging | None = None) -> LayoutOf:
    """Returns a function that gives the layout of each call: a known one, or one that the backward must confirm."""

    def known(number: int, b: Tensor | None, like: Tensor) -> AnyLayout:
        return layouts[number]

    def predicted(number: int, b: Tensor | None, like: Tensor) -> AnyLayout:
        assert isinstance(source, Prediction)
        call = source.calls[number]
        layout = source.layout(number, call.output.gradient(b, like) if b is None or call.is_cut else b)
        return layout if merging is None else merging.layout(layout)

    if isinstance(source, Prediction):
        return predicted
    layouts = source if merging is None else [merging.layout(layout) for layout in source]
    return known


class Collector:
    """Receives the b of every call and makes the blocks: a block is complete when all uses of its weight are known.

    Args:
        calls: the calls whose b is received.
        layouts: of the output of each call; also of cuts, whose b may be received too.
        sources: weight's id -> its source.
        budget: decides what may be kept; None keeps everything, for any question.
        native: computes the sum of blocks of which nothing is kept; with a budget only.
        frees_inputs: whether the calls' inputs may be freed.
        precision: of the products for norms and sums.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        layouts: LayoutOf,
        sources: Mapping[int, Source],
        budget: Budget | None = None,
        native: NativeSum | None = None,
        *,
        frees_inputs: bool = False,
        precision: AbstractContextManager = NORMAL,
    ):
        self._native, self._frees_inputs, self._precision = native, frees_inputs, precision
        self.blocks: list[Block] = []
        self._calls, self._layouts, self._sources = calls, layouts, sources
        self._budget = budget
        self.on_block: OnBlock | None = None
        self._open: dict[int, Block] = {}
        self._awaited = Counter(id(use.weight) for call in calls for use in call.uses)
        self.names = [sources[key].names for key in self._awaited]  # parameters of each block to come
        self._sharing = Counter(name for names in self.names for name in names)

    def take(self, number: int, g: Tensor | None, like: Tensor) -> None:
        with self._precision:  # not the backward itself, which is the user's
            self._take(number, g, like)

    def _take(self, number: int, g: Tensor | None, like: Tensor) -> None:
        if number >= len(self._calls):
            self._layouts(number, g, like)
            return
        call = self._calls[number]
        b = call.output.gradient(g, like)
        if self._budget is not None:
            self._budget.passed(call.size)
        uses, layout = call.uses, self._layouts(number, b, like)
        if self._frees_inputs:
            call.forget()
        for use in uses:
            self._take_use(use, b, layout)

    def _take_use(self, use: Use, b: Tensor, layout: AnyLayout) -> None:
        key, source = id(use.weight), self._sources[id(use.weight)]
        op = make_op(use, b, layout, source.names)
        block = self._open.pop(key, None)
        if block is None:
            rounds = source.half and not source.direct
            block = Block(use.weight, source.names, source.direct, source.rearranged, rounds, source.way_back)
            block.summed_once = self._budget is not None
        block.ops.append(op)
        self._awaited[key] -= 1
        if self._awaited[key]:
            self._open[key] = block
        else:
            self._finish(block)

    def _finish(self, block: Block) -> None:
        if len(block.ops) > 1:
            block.merge()
        alone = self._sharing[block.names[0]] == 1
        if self._budget is None:
            if block.stands_alone and alone:
                block.keep_smaller_rows()
        elif block.stands_alone and alone:
            assert self._native is not None
            block.reduce(self._budget, self._native)
        else:
            block.hold(self._budget)
        if self.on_block is None:
            self.blocks.append(block)
        else:
            self.on_block(block)


def make_op(use: Use, b: Tensor, layout: AnyLayout, names: tuple[str, ...]) -> Op:
    """Returns the Jacobian block of one use; a refusal names the parameters behind its weight."""
    try:
        return use.op(b, layout)
    except Refused as error:
        raise Refused(f"{error} Used with parameter {', '.join(map(repr, names))}.") from None


def cotangent_of(losses: Tensor, merging: Merging | None) -> Tensor:
    """Returns (n,), the weight of each loss in its row."""
    return torch.ones_like(losses) if merging is None else merging.weights().to(losses)


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


class GroupSums:
    """Clips and sums each group of parameters as soon as its last block is complete; then frees the group.

    Args:
        groups: label -> names of its parameters.
        clip: (Jacobian restricted to a group, the group's label) -> clipped sum by name.
        num_rows: number of rows of the Jacobian.
        dtype: type of the losses.
        parameters: all recorded ones.
        blocks: the parameters' names of each block to come.
        budget: is given back the bytes that are no longer held.
        check: receives every group's rows.
        observe: also receives the rows, with the label.
        confirm: raises unless the layouts hold, before anything is computed from the blocks.
        parallel: adds up norms over tensor-parallel ranks.
        native: of the blocks of which nothing was kept.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[str]],
        clip: Clip,
        num_rows: int,
        dtype: torch.dtype,
        parameters: Mapping[str, Tensor],
        blocks: Sequence[tuple[str, ...]],
        budget: Budget,
        check: RowCheck | None = None,
        observe: Observe | None = None,
        confirm: Callable[[], None] | None = None,
        parallel: TensorParallel | None = None,
        native: NativeSum | None = None,
    ):
        self._parallel, self._native = parallel, native
        self._budget, self._check, self._observe, self._confirm = budget, check, observe, confirm
        self.sums: dict[str, Tensor] = {}
        self._groups, self._clip, self._parameters = groups, clip, parameters
        self._num_rows, self._dtype = num_rows, dtype
        self._label = {name: label for label, names in groups.items() for name in names}
        self._awaited = Counter(label for names in blocks for label in self._labels(names))
        self._blocks: dict[str, list[Block]] = {label: [] for label in groups}
        for label in groups:
            if not self._awaited[label]:
                self._finish(label)

    def add(self, block: Block) -> None:
        """Adds a complete block."""
        for label in self._labels(block.names):
            self._blocks[label].append(block)
            self._awaited[label] -= 1
            if not self._awaited[label]:
                self._finish(label)

    def _labels(self, names: tuple[str, ...]) -> set[str]:
        return {self._label[name] for name in names}

    def _finish(self, label: str) -> None:
        if self._confirm is not None:
            self._confirm()
        blocks = self._blocks.pop(label)
        if self._parallel is not None and self._budget.may_drop:
            self._drop_together(blocks)
        whole = Jacobian(self._num_rows, self._dtype, self._parameters, blocks, self._parallel)
        jacobian = whole.restricted(self._groups[label])
        if self._check is not None:
            self._check.add(jacobian)
        if self._observe is not None:
            self._observe(jacobian, label)
        self.sums |= self._clip(jacobian, label)
        self._budget.release(sum([block.held for block in blocks]))

    def _drop_together(self, blocks: Sequence[Block]) -> None:
        """Drops the blocks that other ranks dropped, so that all of them make the native backward, and for the same."""
        assert self._parallel is not None
        assert self._native is not None
        dropped = self._parallel.peers.any_of([block.dropped for block in blocks])
        for block, is_dropped in zip(blocks, dropped, strict=True):
            if is_dropped:
                block.drop(self._native)


class NativeBackward:
    """Computes the clipped sum of blocks of which nothing was kept, by a backward of the losses times the factors.

    Args:
        losses: (n,), whose graph stays.
        parameters: all recorded ones.
        cotangent: (n,) weight of each loss in its row.
        merging: examples whose mean is one row.
    """

    def __init__(
        self, losses: Tensor, parameters: Mapping[str, Tensor], cotangent: Tensor, merging: Merging | None = None
    ):
        self._losses, self._parameters, self._cotangent, self._merging = losses, parameters, cotangent, merging
        self._names: list[str] = []
        self._factors: Tensor | None = None  # of the latest backward
        self._sums: dict[str, Tensor] = {}

    def expect(self, name: str) -> None:
        self._names.append(name)

    def __call__(self, c: Tensor, name: str) -> Tensor:
        if self._factors is not c:
            self._factors, self._sums = c, self._backward(c)
        return self._sums.pop(name)

    def _backward(self, c: Tensor) -> dict[str, Tensor]:
        c = c.to(self._cotangent)
        if self._merging is not None:
            c = c[self._merging.assignment.to(c.device)] * self._cotangent
        leaves = [self._parameters[name] for name in self._names]
        found = torch.autograd.grad(self._losses, leaves, c, retain_graph=True)
        return {
            name: g if type(g) is Tensor else cast(Tensor, local_gradient(g, leaf))
            for name, g, leaf in zip(self._names, found, leaves, strict=True)
        }


def backward_into(
    sink: GradientSink,
    losses: Tensor,
    cotangent: Tensor,
    calls: Sequence[Call],
    deepest: Callable[[], Sequence[bool]],
    *,
    retain_graph: bool = False,
    at_once: bool = False,
    leaves: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Runs one backward that stops at the calls; each b goes to the sink as soon as it is known, and is then freed.

    ``deepest`` marks the calls with no other call below them. The backward ends at these and at ``leaves``, and returns
    the gradients of the leaves. With ``at_once`` every b is held until the end, which is faster for small ones; so is
    the b of calls that need the graph.
    """
    if not calls and not leaves:
        return []
    handles: list[Any] = []
    try:
        ends = [
            k for k, last in enumerate([True] * len(calls) if at_once else deepest()) if last or calls[k].needs_graph
        ]
        if len(ends) < len(calls):
            streamed = set(range(len(calls))).difference(ends)
            for number in sorted(streamed):
                edge = calls[number].edge
                handles.append(edge.node.register_prehook(_hand_over(sink, number, edge.output_nr, losses)))
        edges = [calls[number].edge for number in ends]
        inputs = [*edges, *leaves]
        gradients = torch.autograd.grad(losses, inputs, cotangent, retain_graph=retain_graph, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    of_leaves: list[Tensor | None] = [*gradients[len(ends) :]]
    of_calls = [*gradients[: len(ends)]]
    del gradients  # each b is freed once the sink has done with it
    with torch.no_grad():
        for number in reversed(ends):
            sink.take(number, of_calls.pop(), losses)
    return of_leaves


def _hand_over(sink: GradientSink, number: int, output: int, losses: Tensor) -> Callable[[tuple], None]:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        sink.take(number, gradients[output], losses)

    return hook


class StreamedRows:
    """Computes the rows of one batch op by op while the backward runs, and keeps no more than necessary.

    Args:
        reached: the calls that the losses depend on; their graph is freed.
        layouts: of the output of each call; or a prediction, for one group of parameters.
        sources: weight's id -> its source.
        parameters: all recorded ones.
        merging: examples whose mean is one row.
        leaves: the parameters in the graph, if ``parameters`` are this rank's parts of them.
        parallel: the ranks that have the other parts.
    """

    def __init__(
        self,
        reached: Reached,
        layouts: Sequence[AnyLayout] | Prediction,
        sources: Mapping[int, Source],
        parameters: Mapping[str, Tensor],
        merging: Merging | None,
        leaves: Mapping[str, Tensor] | None = None,
        parallel: TensorParallel | None = None,
    ):
        self._parallel = parallel
        self._leaves = parameters if leaves is None else leaves
        self._reached, self._sources, self._parameters, self._merging = reached, sources, parameters, merging
        self._layouts, self._predicted = layouts_by(layouts, merging), None
        if isinstance(layouts, Prediction):
            self._predicted = layouts
        self._cotangent = cotangent_of(reached.losses, merging)

    def clipped_sum(
        self,
        groups: Mapping[str, Sequence[str]],
        clip: Clip | None,
        budget: Callable[[], Budget],
        check: RowCheck | None,
        observe: Observe | None = None,
    ) -> dict[str, Tensor]:
        """Returns the sum of all groups by name; ``check`` receives the rows first and must agree.

        Without ``clip`` nothing is summed.
        """
        if clip is None:
            return self._run(groups, lambda *_: {}, budget(), check, observe)
        peers = ALONE if self._parallel is None else self._parallel.peers
        if len(groups) > 1 or not peers.any(budget().wants_second_backward) or self._rounds:
            return self._run(groups, clip, budget(), check, observe)
        if check is not None or observe is not None:  # these need rows
            self._run(groups, lambda *_: {}, budget(), check, observe, retain_graph=True)
        try:
            dropping = budget()
            dropping.may_drop = True
            with full_precision(self._reached.losses.device):  # both backwards, which must give the same b
                return self._run(groups, clip, dropping, retain_graph=True)
        except NothingKept:  # some rows are to be left out
            return self._run(groups, clip, budget())

    @property
    def _rounds(self) -> bool:
        """True if a native sum would be rounded by more than the bound allows."""
        return self._reached.precision() > FINE or any(is_half(p) for p in self._parameters.values())

    def _run(
        self,
        groups: Mapping[str, Sequence[str]],
        clip: Clip,
        budget: Budget,
        check: RowCheck | None = None,
        observe: Observe | None = None,
        *,
        retain_graph: bool = False,
    ) -> dict[str, Tensor]:
        losses, calls, predicted = self._reached.losses, self._reached.calls, self._predicted
        peers = ALONE if self._parallel is None else self._parallel.peers
        retain_graph = retain_graph or predicted is not None or self._reached.needs_graph  # the prediction may fail
        native = NativeBackward(losses, self._leaves, self._cotangent, self._merging)
        collector = Collector(
            calls,
            self._layouts,
            self._sources,
            budget,
            native,
            frees_inputs=not retain_graph,
            precision=full_precision(losses.device),
        )
        sums = GroupSums(
            groups,
            clip,
            len(losses) if self._merging is None else self._merging.count,
            losses.dtype,
            self._parameters,
            collector.names,
            budget,
            check,
            observe,
            None if predicted is None else predicted.conclude,
            self._parallel,
            native,
        )
        collector.on_block = sums.add
        places = calls if predicted is None else predicted.calls
        backward_into(
            collector,
            losses,
            self._cotangent,
            places,
            lambda: self._reached.deepest(places),
            retain_graph=retain_graph,
            at_once=peers.all(budget.call_bytes <= AT_ONCE),
        )
        if check is not None:
            check.conclude()
        return sums.sums
