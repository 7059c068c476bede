# SPDX-License-Identifier: Apache-2.0
"""Finds the calls between losses and parameters, recorded or not, and refuses what has no exact rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ...support.validate import Refused
from ..parallel.ranks import NO_OTHERS, ModelRanks, peers_of
from ..parallel.shards import attention_is_split, is_distributed, listed, refuse_split_positions
from .calls import Call, edge_of
from .functions import without_numbers
from .graph import Graph
from .recorder import Recorder
from .tensors import WeightSource
from .unrecorded import UnrecordedUses

# Two further backwards through this part of the graph are cheaper than one through all of it.
NEAR = 0.3
PathOf = Callable[[int, int, tuple[int, ...]], int]  # see ``Layouts.path``


@dataclass(slots=True)
class RecordedGraph:
    """The calls between losses and parameters, with the graph and its path number.

    Attributes:
        calls: recorded ones in order, then those that stand for nodes of the graph where nothing was recorded.
        cuts: the tensors in between with entries that the data may have reordered.
        parts: name -> this rank's part of each parameter.
        ranks: that have the other parts.
        num_losses: n.
        sources: a weight's id -> what it was computed from.
        size: bytes of inputs and outputs of all calls.
    """

    recorder: Recorder
    losses: Tensor
    graph: Graph
    calls: list[Call]
    unrecorded: list[Call]
    cuts: list[Call]
    path: int
    parts: Mapping[str, Tensor]
    ranks: ModelRanks
    num_losses: int = field(init=False)
    sources: Mapping[int, WeightSource] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_losses, self.sources = self.losses.shape[0], self.recorder.tensors.sources
        self.size = sum(map(_size, self.calls))

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """Returns the parameters by name, as the graph has them."""
        return self.recorder.parameters

    def running_again(self) -> AbstractContextManager:
        """Returns a context for a backward, in which parts of the forward run again under saved-tensor hooks."""
        log = self.recorder.log
        return log.again.watching(self.losses.device) if log.saved_elsewhere else nullcontext()

    @property
    def needs_graph(self) -> bool:
        """True if some rows are computed by nodes of the graph, which must then outlive the backward."""
        return bool(self.unrecorded)

    def free_inputs(self) -> None:
        """Frees what the calls hold for their rows, once no backward makes rows any more."""
        for call in self.calls:
            call.free_inputs()

    @property
    def places(self) -> list[Call]:
        """Returns calls and cuts."""
        return [*self.calls, *self.cuts]

    @property
    def moves_unseen(self) -> bool:
        """True if the data may have reordered examples where it cannot be seen."""
        program, graph = self.recorder.program, self.graph
        left = program.moved or self.recorder.tensors.left_torch
        hides = program.moved_unseen or (left and graph.has_custom_functions())
        return hides or graph.has_scripted_parts() or (self.recorder.shards is None and self._has_unseen_nodes())

    def _has_unseen_nodes(self) -> bool:
        """True if code that was not recorded made a node, as TorchScript does; custom functions do not count."""
        seen: set[int] = set()
        for step in self.recorder.program.used:
            seen.update(range(step.first, step.last))
        return not self.graph.is_made_by(seen)

    def names_of(self, weight: Tensor) -> tuple[str, ...]:
        """Returns the names of the parameters that a weight was computed from."""
        return self.sources[id(weight)].names

    def dtypes(self) -> set[torch.dtype]:
        """Returns the floating-point types between losses and parameters, including casts between calls."""
        return {self.losses.dtype, *(call.output.dtype for call in self.calls), *self.graph.cast_dtypes()}

    def precision(self) -> float:
        """Returns the relative rounding of the coarsest floating-point type between losses and parameters."""
        return max(torch.finfo(dtype).eps for dtype in self.dtypes())

    def deepest(self, places: Sequence[Call]) -> list[bool]:
        """Returns, for each call or cut, whether no other one lies below it in the graph."""
        nodes = [place.output.edge.node for place in places]
        above = self.graph.above(set(nodes))
        return [node not in above for node in nodes]

    def cuts_are_near(self) -> bool:
        """True if the part of the graph above the cuts is small enough for two more backwards through it."""
        above = self.graph.above({cut.output.edge.node for cut in self.cuts})
        return len(above) <= NEAR * len(self.graph.children)


def reach(recorder: Recorder, losses: Tensor, may_miss: Iterable[str], path_of: PathOf) -> RecordedGraph:
    """Returns the calls between losses and parameters.

    Raises:
        Refused: losses that are no vector; a parameter that has no exact rows, or that the losses must not miss and
            do; an input that was changed in place since it was used; examples that are split over ranks.
    """
    check_losses(losses)
    tensors, graph = recorder.tensors, Graph(losses)
    tensors.filled.learn(len(losses))
    trained = [*filter(_requires_grad, recorder.parameters.values())]
    leaves = dict(zip(map(id, trained), trained, strict=True))
    finder = CallFinder(recorder.log.calls, leaves, tensors.is_constant)
    calls, unrecorded = finder.reached(graph, losses)
    calls, recorder.log.unrecorded = calls + unrecorded, unrecorded
    _check_weights(recorder, calls, unrecorded)
    _check_reached(recorder, calls, set(may_miss))
    check_unchanged(calls)
    ranks, parts = _ranks_with_parts(recorder, calls)
    cuts = recorder.program.cuts
    if cuts:
        cuts = [*{cut.edge: cut for cut in cuts if cut.edge.node in graph.children}.values()]
    program, numbers = _program(recorder, graph, finder, [*calls, *cuts])
    path = path_of(program, len(losses), numbers)
    return RecordedGraph(recorder, losses, graph, calls, unrecorded, cuts, path, parts, ranks)


def _check_weights(recorder: Recorder, calls: Sequence[Call], unrecorded: Sequence[Call]) -> None:
    """Raises if a parameter is complex, was written into since the recording's start, or is a part outside of an op."""
    tensors = recorder.tensors
    weights: dict[int, Tensor] = {}
    for call in calls:
        for use in call.uses:
            weights[id(use.weight)] = use.weight
    if any(map(Tensor.is_complex, weights.values())):
        names = [name for weight in weights.values() if weight.is_complex() for name in tensors.all_names([weight])]
        raise Refused(
            f"tape: parameter {', '.join(map(repr, names))} is complex, which no rule for rows allows. "
            "Keep it as real numbers (..., 2), with torch.view_as_complex(w) in the forward, or freeze it."
        )
    if not unrecorded:
        return
    uses = [use for call in unrecorded for use in call.uses]
    parts = {id(use.weight): use.weight for use in uses if is_distributed(use.weight)}
    if parts:
        names = [name for weight in parts.values() for name in tensors.all_names([weight])]
        raise Refused(
            f"tape: parameter {listed(names)} is a distributed tensor, and the forward uses this rank's part of it "
            "(to_local()), or uses it where no op is recorded, so that its rows are not known. Use the parameter "
            "itself, on distributed data (use_local_output=False in the layer before), or freeze it."
        )
    written = {id(use.weight): use.weight for use in uses if tensors.source(use.weight) is None}
    if written:
        names = [tensors.all_names([weight])[0] for weight in written.values()]
        raise Refused(
            f"tape: the forward wrote into parameter {', '.join(map(repr, names))}, so that its uses before and after "
            "are of different weights. Change weights after an update only, by "
            "after_update= of PrivateTraining."
        )


def _check_reached(recorder: Recorder, calls: Sequence[Call], may_miss: Set[str]) -> None:
    """Raises unless the losses reach every parameter that they must not miss; notes those that they reach."""
    sources, reached = recorder.tensors.sources, set[str]()
    for call in calls:
        for use in call.uses:
            source = sources[id(use.weight)]
            reached.update(source.names)
            for name in source.names:
                recorder.padding.setdefault(name, set()).add(use.padding if source.direct else None)
    recorder.reached = reached
    missing = recorder.parameters.keys() - reached - may_miss
    if missing:
        raise Refused(never_reached([name for name in recorder.parameters if name in missing]))


def never_reached(names: Sequence[str]) -> str:
    """Returns what a refusal says about parameters that the losses do not depend on."""
    return (
        f"tape: the losses never reach parameter {', '.join(map(repr, names))}. Use it, freeze it with "
        "requires_grad_(False), or leave it out of the optimizer. Where the data choose layers (experts), "
        "the first batches must be large enough to reach all; a parameter that was reached once "
        "may be unused in later batches."
    )


def _ranks_with_parts(recorder: Recorder, calls: Sequence[Call]) -> tuple[ModelRanks, Mapping[str, Tensor]]:
    """Returns the ranks that have parts of this model, and this rank's part of every parameter.

    Raises:
        Refused: every rank has only some positions of an example.
    """
    shards, parameters = recorder.shards, recorder.parameters
    if shards is None:
        return NO_OTHERS, parameters
    if calls and (shards.splits_positions or attention_is_split()):
        weights = [use.weight for call in calls for use in call.uses]
        raise refuse_split_positions(recorder.tensors.all_names(weights))
    peers = peers_of(shards.meshes)
    if peers.size == 1:
        return NO_OTHERS, parameters
    parts = {name: shards.piece(p) for name, p in parameters.items()}
    return ModelRanks(peers, parameters, shards.unchanged_inputs()), parts


def _program(
    recorder: Recorder, graph: Graph, finder: CallFinder, calls: Sequence[Call]
) -> tuple[int, tuple[int, ...]]:
    """Returns a hash of the program, and the integers among its arguments; with the batch's size they are the path.

    The program is made of functions, the losses' graph, and the calls. Another one, taken by a branch in the model or
    the loss or with other parameters trained, may have other layouts or mix examples, so that it must be measured anew.
    """
    numbers: list[int] = []
    wiring, places = graph.wiring()
    found: list[Any] = [wiring]
    for step in recorder.program.steps():
        kept = without_numbers(step.numbers, numbers) if step.numbers else ()
        found.append((step.func, kept, places.get(step.node)))
    for node in finder.nodes_before(graph):
        recorder.code.features.add((node.name(), *map(_name, graph.children[node])))
    sources = recorder.tensors.sources
    for call in calls:
        found.append(call.op)
        for use in call.uses:
            found.append(sources[id(use.weight)].names)
    return hash(tuple(found)), tuple(numbers)


class CallFinder:
    """Finds the calls that the losses depend on.

    Args:
        calls: all recorded ones, in order.
        leaves: id of a recorded parameter -> the parameter.
        is_constant: True for other leaves of the graph that hold no data.
    """

    def __init__(self, calls: Sequence[Call], leaves: Mapping[int, Tensor], is_constant: Callable[[Tensor], bool]):
        self._calls, self._leaves, self._is_constant = calls, leaves, is_constant

    def reached(self, graph: Graph, losses: Tensor) -> tuple[list[Call], list[Call]]:
        """Returns the recorded calls between losses and parameters, in order, and calls for what was not recorded."""
        by_node: dict[Node, list[Call]] = {}
        for call in self._calls:
            by_node.setdefault(call.output.edge.node, []).append(call)
        reached: list[Call] = []
        stack, seen, complete, children = [graph.root], {graph.root}, True, graph.children
        while stack:
            node = stack.pop()
            if _may_end(type(node)):
                complete = self._is_end(node) and complete
            calls = by_node.get(node)
            if calls is None:
                following = children[node] if node in children else graph.following(node)
            else:
                following = []
                for call in calls:
                    reached.append(call)
                    following += map(_node, call.inputs)
            for n in following:
                if n not in seen:
                    seen.add(n)
                    stack.append(n)
        if len(reached) == len(self._calls):
            reached = [*self._calls]
        else:
            met = {*map(id, reached)}
            reached = [call for call in self._calls if id(call) in met]
        if complete:
            return reached, []
        starts = [edge_of(losses), *(edge for call in reached for edge in call.inputs)]
        return reached, UnrecordedUses(by_node, self._leaves, self._is_constant).calls(starts)

    def nodes_before(self, graph: Graph) -> list[Node]:
        """Returns the nodes between the losses and the first recorded call on every path."""
        return graph.before({call.output.edge.node for call in self._calls})

    def _is_end(self, node: Node) -> bool:
        """True unless the node is a recorded parameter, which is then reached other than by a recorded call."""
        if isinstance(node, BackwardCFunction) and node.name().startswith("CheckpointFunction"):
            raise Refused("tape: reentrant activation checkpointing hides ops. Pass use_reentrant=False to checkpoint.")
        return id(getattr(node, "variable", None)) not in self._leaves


_node, _size, _name = attrgetter("node"), attrgetter("size"), methodcaller("name")
_requires_grad = attrgetter("requires_grad")


@cache
def _may_end(kind: type) -> bool:
    """True for the types of nodes that `CallFinder` looks at: leaves, and custom functions."""
    return kind.__name__ == "AccumulateGrad" or issubclass(kind, BackwardCFunction)


def check_losses(losses: Tensor) -> None:
    """Raises ``Refused`` unless there is one loss per example, with a gradient."""
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if isinstance(losses, Tensor) and losses.ndim == 2 and losses.shape[0] == losses.shape[1] > 1:
            raise Refused(
                f"losses of shape {shape} given: must be (n,), one loss per example. A broadcast of (n, 1) against "
                "(n,) makes (n, n), which combines every example with every other. Give outputs and targets one "
                "shape, e.g. outputs.squeeze(1) or targets.view_as(outputs)."
            )
        if isinstance(losses, Tensor) and losses.ndim == 2 and losses.shape[1] == 1:
            raise Refused(
                f"losses of shape {shape} given: must be (n,), one loss per example. Pass losses.squeeze(1); plain "
                "squeeze() would also drop an n of 1. If the loss function has targets, give outputs and targets one "
                "shape before it, e.g. outputs.squeeze(1)."
            )
        a_model_of_transformers = (
            " The .loss of a transformers model is a mean over the batch: take "
            "torch_privacy.huggingface.per_example_loss(model, batch) instead of model(**batch).loss."
        )
        raise Refused(
            f"losses of shape {shape} given: must be (n,), one loss per example. Pass reduction='none' to the loss "
            f"function.{a_model_of_transformers if shape == () or not isinstance(losses, Tensor) else ''} "
            "If an example has several positions, sum their losses and divide by the example's own count: "
            "(losses * mask).sum(1) / mask.sum(1)."
        )
    if not losses.is_floating_point() or losses.grad_fn is None:
        raise Refused(
            f"losses of dtype {losses.dtype} with requires_grad={losses.requires_grad} given: must be floating-point "
            "and computed from the model with gradients enabled (not under torch.no_grad())."
        )


def check_unchanged(calls: Iterable[Call]) -> None:
    """Raises ``Refused`` if an input of a call was changed in place."""
    for call in calls:
        for tensor, version in call.versions:
            if tensor._version != version:
                raise Refused(
                    f"tape: an input of {call.op!r} was changed in place after its use, so its Jacobian is lost. "
                    "Write the later step out of place."
                )
