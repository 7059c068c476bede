# SPDX-License-Identifier: Apache-2.0
"""Estimates the norms of rows by random projections of the gradients, for any differentiable model.

It needs only a vector of per-example losses: neither a table of ops nor a layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ...jacobian.layouts.known import PROOFS, Merging, relevant_keys
from ...jacobian.recording.coverage import CodePath
from ...jacobian.recording.functions import numbers_in
from ...jacobian.recording.graph import Graph
from ...jacobian.recording.paths import check_losses
from ...jacobian.rows.blocks import Direction
from ...jacobian.rows.native import ProjectionCheck, ProjectionsDiffer
from ...ops._base import is_half
from ...support.random_state import RandomState
from ...support.torch_modes import OpMode, full_precision
from ...support.validate import Refused, one_of
from ..sums import RunAgain
from .directions import Directions
from .jvp import STRATEGIES, BatchingMode, ForwardCall, differentiable_twice, project_prefetched
from .settings import Projections
from .sketched_rows import SketchedJacobian

SMALL = 2**14  # mean number of entries of the forward's values; below it, a torch call costs more than its arithmetic
# The gradient of a row of padding is zero; its tangent is not, so that forward mode fails once a batch has padding.
PADDING = "it has no zero for the row of padding_idx in an embedding"
BY_GRAPH = f"double vjp, {BatchingMode.EACH.value}"  # the strategy that fails for the fewest models
PREFETCHED_ENTRIES = 2**22  # largest number of entries of output tangents that are kept through the forward


class Projector:
    """Projects the gradients of one model's batches, by the strategy that worked on its first batch.

    Args:
        setting: the user's choice.
    """

    def __init__(self, setting: Projections):
        self.setting = setting
        self.strategy: str | None = None  # chosen on the first batch that has examples
        self._reasons: dict[str, str] = {}  # strategy -> why a faster one was rejected
        self._checked: Counter[tuple[int, bool]] = Counter()  # (graph, only one example) -> batches
        self._output_entries: int | None = None  # of one forward, once the strategy is known
        self.saw_padding = False  # whether a trained table was looked up with a ``padding_idx``
        self.by_graph: tuple[int, int] | None = None  # step and (micro)batch that its own graph projects, run again

    @property
    def learned(self) -> str | None:
        """State for a resumed run: the strategy; None before the first batch."""
        return self.strategy

    @learned.setter
    def learned(self, strategy: str | None) -> None:
        one_of("PrivateTraining.load_state_dict", (None, *STRATEGIES), projections=strategy)
        self.strategy = strategy

    def join(self, known: Sequence[str]) -> None:
        """Takes the strategy of the first rank that has one: all give the same norms, but not bit for bit."""
        self.strategy = next(iter(known), self.strategy)

    @property
    def repeats_forward(self) -> bool:
        """True if the model's forward calls must be kept, to be repeated."""
        return self.strategy is None or STRATEGIES[self.strategy].repeats_forward

    @property
    def needs_backends(self) -> bool:
        """True if the model's forward must run with backends that can be differentiated twice."""
        return self.strategy is None or not STRATEGIES[self.strategy].repeats_forward

    @property
    def prefetches(self) -> bool:
        """True if tangents are computed before the forward, without a graph in memory; needs small model outputs."""
        if self.strategy is None or self._output_entries is None or not STRATEGIES[self.strategy].repeats_forward:
            return False
        return self.setting.num_projections * self._output_entries <= PREFETCHED_ENTRIES

    def is_new(self, graph: Graph, num_examples: int) -> bool:
        """Returns True if a batch with this graph must still be checked; counts the batch."""
        path = hash(tuple(node.name() for node in graph.nodes()))
        known = any(self._checked[path, one] >= PROOFS for one in relevant_keys(num_examples))
        self._checked[path, num_examples == 1] += 1
        return not known

    def explain(self) -> str:
        """Describes how the projections are computed, and why not by a faster strategy."""
        if self.strategy is None:
            return "chosen on the first batch"
        text = f"{self.setting.num_projections} projections by {self.strategy}"
        return "; ".join([text, *(f"not by {strategy}: {reason}" for strategy, reason in self._reasons.items())])

    def jacobian(
        self,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        calls: Sequence[ForwardCall],
        directions: Directions,
        prefetched: Mapping[str, Tensor] | None = None,
    ) -> SketchedJacobian:
        """Returns the projected Jacobian of one batch.

        ``prefetched``: the last group of the directions along which tangents were prefetched, if they were.
        """
        known = BY_GRAPH if directions.place == self.by_graph else self.strategy
        self._output_entries = sum(size for call in calls for size in call.sizes)
        if self.strategy is not None and prefetched is not None:
            projections = project_prefetched(losses, calls, STRATEGIES[self.strategy].batching)
            groups = ((prefetched, projection) for projection in projections)
            return self._estimated(self.strategy, losses, parameters, calls, groups)
        if known is not None:
            try:
                return self._projected(known, losses, parameters, calls, directions)
            except RuntimeError as error:
                raise _strategy_failed(error) from error
        reasons: dict[str, str] = {}
        for strategy in self._candidates():
            if self.saw_padding and STRATEGIES[strategy].repeats_forward:
                reasons[strategy] = PADDING
                continue
            try:
                self._reasons = reasons
                jacobian = self._projected(strategy, losses, parameters, calls, directions)
                jacobian.check_single_rows()
                self._check_worth(strategy, calls)
            except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
                reasons[strategy] = str(error).strip().partition("\n")[0][:200]
                continue
            self.strategy = strategy
            return jacobian
        listed = "; ".join(f"{strategy}: {reason}" for strategy, reason in reasons.items())
        raise Refused(
            f"Sketched: no way to project the gradients of these losses. {listed}. Give custom functions a jvp or a "
            "backward that can be differentiated; or use exact norms, with clipping=Flat(...)."
        )

    def _candidates(self) -> list[str]:
        """Returns the strategies in the order in which they are tried, forward mode first, or those of the method."""
        shared, together, each = BatchingMode
        if self.setting.num_projections == 1:
            order = [each, together]
        elif self.setting.group_size is None:
            order = [shared, together, each]
        else:
            order = [shared, each] if self.setting.group_size == 1 else [together, shared, each]
        found = [
            (order.index(s.batching), name)
            for name, s in STRATEGIES.items()
            if s.batching in order and name.startswith(self.setting.method or "")
        ]
        return [name for _, name in sorted(found, key=lambda pair: (not STRATEGIES[pair[1]].repeats_forward, pair[0]))]

    def _check_worth(self, strategy: str, calls: Sequence[ForwardCall]) -> None:
        """Raises for shared forwards of small tensors, unless memory counts: batched directions are faster there."""
        if STRATEGIES[strategy].batching is BatchingMode.SHARED and self.setting.group_size is None:
            if max(call.mean_entries for call in calls) < SMALL:
                raise RuntimeError("its tensors are so small that directions together take less time")

    def groups(
        self, strategy: str, directions: Directions, parameters: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Yields the directions of a batch in the groups that the strategy batches."""
        size = self.setting.group_size if STRATEGIES[strategy].batching is BatchingMode.TOGETHER else 1
        return directions.in_groups(self.setting.num_projections, size, parameters)

    def _projected(
        self,
        strategy: str,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        calls: Sequence[ForwardCall],
        directions: Directions,
    ) -> SketchedJacobian:
        project = STRATEGIES[strategy](losses, parameters, calls)
        groups = self.groups(strategy, directions, parameters)
        return self._estimated(strategy, losses, parameters, calls, ((v, project(v)) for v in groups))

    def _estimated(
        self,
        strategy: str,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        calls: Sequence[ForwardCall],
        groups: Iterable[tuple[Mapping[str, Tensor], Tensor]],
    ) -> SketchedJacobian:
        """Returns the Jacobian from pairs of a group of directions and the projections on these."""
        v, projections, total = {}, losses.detach()[:, None], torch.zeros_like(losses)
        for v, found in groups:  # noqa: B007  (the last group is used by the check below)
            projections = found.detach().to(losses)
            total += projections.square().sum(1)
        for call in calls:
            call.free_shared()
        r = self.setting.num_projections
        check = ProjectionCheck(v, projections, (total / r).sqrt())

        def project(v: Mapping[str, Tensor]) -> Tensor:
            return STRATEGIES[strategy](losses, parameters, calls)(v)

        rows = torch.arange(len(losses), device=losses.device)
        return SketchedJacobian(losses, parameters, total / r, project, check, rows)


class ProjectedRecording(OpMode):
    """Records the model's forward calls on one batch, in place of a `Tape`.

    Args:
        projector: chooses the strategy, and remembers it from batch to batch.
        parameters: the trained parameters, by name.
        directions: those of this batch only.
    """

    def __init__(self, projector: Projector, parameters: Mapping[str, Tensor], directions: Directions):
        super().__init__()
        self.code, self.measured, self.reached = CodePath(), False, set[str]()
        self.parameters = dict(parameters)
        self._projector, self._directions = projector, directions
        self._calls: list[ForwardCall] = []
        self._prefetched: dict[str, Tensor] | None = None  # the last group of directions with prefetched tangents
        self._active: list[tuple[ForwardCall, ExitStack]] = []
        self._outputs: list[GradientEdge] = []
        self._by_graph = projector.by_graph == directions.place

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.code.note_call(func, numbers_in(args))
        if func is F.embedding and _pads(*args, **(kwargs or {})):
            self._projector.saw_padding = True
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and self._active:
            self.code.shapes = hash((self.code.shapes, out.shape))
            self.code.note_dtypes(out)
        return out

    def start(self, batch: Any) -> None:
        """Notes the code of the loop, from the batch on."""
        self.__enter__()

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Starts to record one forward call of the model."""
        repeats = self._projector.repeats_forward and not self._by_graph
        call = ForwardCall(model, args, kwargs, RandomState() if repeats else None)
        context = ExitStack()
        self._active.append((call, context))
        if self._projector.prefetches and repeats:
            with self.paused():
                self._prefetch_tangents(call)
        if self._projector.needs_backends or self._by_graph:
            context.enter_context(differentiable_twice(model))
        context.enter_context(self)
        context.enter_context(self._full_precision())  # rounding would change the distribution of the estimates

    def _full_precision(self) -> AbstractContextManager:
        return full_precision(next(iter(self.parameters.values())).device)

    def _prefetch_tangents(self, call: ForwardCall) -> None:
        strategy = self._projector.strategy
        assert strategy is not None
        for v in self._projector.groups(strategy, self._directions, self.parameters):
            self._prefetched = v  # frees the previous group
            try:
                call.prefetch_tangents(v, self.parameters, STRATEGIES[strategy].batching)
            except RuntimeError as error:
                raise _strategy_failed(error) from error
        call.free_shared()

    def end(self, output: Any) -> None:
        """Ends the recording of one forward call; ``output`` is None if the forward raised."""
        call, context = self._active.pop()
        context.close()
        self._outputs += [edge for edge, _ in call.record_output(output)]
        self._calls.append(call)

    def nodes_before_calls(self, graph: Graph) -> list[Node]:
        """Returns the nodes between the losses and the model's outputs."""
        return graph.before({edge.node for edge in self._outputs})

    def clipped_sum(
        self,
        losses: Tensor,
        groups: Mapping[str, Sequence[str]],
        clip: Callable[[SketchedJacobian, str], dict[str, Tensor]] | None,
        *,
        merging: Merging | None = None,
        may_miss: Iterable[str] = (),
        memory_budget: float = 0.0,
        observe: Callable[[SketchedJacobian, str], None] | None = None,
        observe_on: Direction | None = None,
    ) -> dict[str, Tensor]:
        """Returns Σᵢ cᵢ row_i by name, with cᵢ from the estimated norms; arguments as in ``Tape.clipped_sum``.

        Raises:
            Refused: half precision, a parameter that the losses do not reach, losses that no strategy can project, or
                sums that disagree with the projections.
            RunAgain: they disagree where the forward was repeated. Its values may have other bits, as in a fused LSTM
                or attention, and at a kink, such as that of a ReLU or a maximum, other bits have another gradient.
        """
        check_losses(losses)
        graph = Graph(losses)
        self.code.note([node.name() for node in self.nodes_before_calls(graph)])
        self._check_reached(graph, set(may_miss))
        if self._projector.is_new(graph, len(losses)):
            self._check_precision({losses.dtype, *graph.cast_dtypes()})
        (label,) = groups  # `SketchedSum` accepts no rule with several groups
        with self._full_precision():
            jacobian = self._projector.jacobian(
                losses, self.parameters, self._calls, self._directions, self._prefetched
            )
            if observe is not None:
                observe(jacobian, label)
            try:
                return {} if clip is None else clip(jacobian, label)
            except ProjectionsDiffer as error:
                if self._by_graph or not self._projector.repeats_forward:
                    raise
                self._projector.by_graph = self._directions.place
                raise RunAgain from error

    def _check_reached(self, graph: Graph, may_miss: set[str]) -> None:
        leaves = {id(getattr(node, "variable", None)) for node in graph.nodes()}
        self.reached = {name for name, p in self.parameters.items() if id(p) in leaves}
        missing = [name for name in self.parameters if name not in self.reached | may_miss]
        if missing:
            raise Refused(
                f"Sketched: the losses never reach parameter {', '.join(map(repr, missing))}. Use it, freeze it with "
                "requires_grad_(False), or leave it out of the optimizer."
            )

    def _check_precision(self, dtypes: Iterable[torch.dtype]) -> None:
        names = [name for name, p in self.parameters.items() if is_half(p)]
        if names or any(torch.finfo(dtype).bits < 32 for dtype in dtypes):
            where = f"parameter {', '.join(map(repr, names))}" if names else "the forward"
            raise Refused(
                f"Sketched: half precision in {where}: rounding changes the distribution of the estimated norms, "
                "which the accountant prices. Compute in float32, or use exact norms, with clipping=Flat(...)."
            )


def _pads(input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> bool:
    """True for a look-up in which a row of a trained table has no gradient."""
    return padding_idx is not None and weight.requires_grad


def _strategy_failed(error: RuntimeError) -> Refused:
    """Returns the error for a batch on which the chosen projection strategy fails."""
    reason = str(error).partition(". ")[0]
    return Refused(
        f"Sketched: this batch cannot be projected like the earlier ones: {reason}. Let it run the same ops as they "
        "did."
    )
