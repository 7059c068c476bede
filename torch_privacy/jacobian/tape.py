# SPDX-License-Identifier: Apache-2.0
"""The tape: notes where ops meet parameters, and the per-example gradients that follow from them.

After the forward, ``jacobian`` walks the autograd graph from the losses: every path to a trainable parameter must lead
through a noted use, or the call is refused with the names of parameter and op. One backward, to the outputs only, then
gives every use its b, the gradient in its output y.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from .._model_state import AttributeTensors, ModelTensors
from .._torch_modes import uncompiled, without_autocast
from .._validate import Refused, whole
from ..ops import OPS, AnyLayout, Layout
from .blocks import Block
from .calls import Call, Reached
from .clipped_sum import Clip, Collector, NormEstimates, Observe, RowsAsTheyCome, backward_into, layouts_by, make_op
from .graph import Graph, saved_bytes
from .layout import Footprint, Layouts, Measurement, Merging, kind_of_call
from .measure import Rounding
from .operator import Jacobian
from .plan import Budget, distinct_bytes, least_bytes
from .prediction import Disagreement, Expected, Prediction
from .recorder import Notes
from .self_check import Checks
from .torch_functions import without_numbers

# Peak memory allowed by default, in units of what non-private training needs.
MEMORY_BUDGET = 1.2

LOOKUPS = ("embedding", "embedding_bag")
# Bytes of gradients that are measured at once, at least: a portion takes several backwards.
PORTION = 2**24
# Bytes that any budget allows that is not below what non-private training needs.
LITTLE = 2**26
# Bytes of graph and calls up to which both may be there at once while predicted layouts are proved.
ROOM = 2**28


class Tape(Notes):
    """Per-example gradients from what was noted while it was active; ``record`` makes one of a model.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        layouts: what earlier batches taught about where the examples sit.
        num_examples: size of the batch, where it is known beforehand: tells what may hold a part for each example.
        estimates: take the place of exact norms in the clipped sum.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor] = (),
        layouts: Layouts | None = None,
        num_examples: int | None = None,
        estimates: NormEstimates | None = None,
    ):
        self.layouts = layouts if layouts is not None else Layouts()
        super().__init__(parameters, constants, num_examples, self.layouts.filled)
        self._estimates = estimates
        self.reached: set[str] = set()  # names of the parameters that the losses were found to depend on
        self.used_otherwise: set[str] = set()  # names of those that were met by more than a look-up, as its table
        self.measured = False  # whether layouts had to be measured, by backwards of their own
        self._leaves = {id(p): name for name, p in self.parameters.items() if p.requires_grad}

    def begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """The model is called with these arguments: records until `end`."""
        self.note_inputs(args, kwargs)
        self.__enter__()

    def end(self, output: Any) -> None:
        """The model has given its output, or was interrupted."""
        self.__exit__(None, None, None)

    def jacobian(
        self, losses: Tensor, *, retain_graph: bool = False, may_miss: Iterable[str] = (), verify: bool = False
    ) -> Jacobian:
        """The Jacobian of the per-example losses in the recorded parameters.

        Args:
            losses: (n,) one loss per example, computed under this tape; the graph is used up unless retained.
            retain_graph: keep the graph for further backwards.
            may_miss: names of parameters that the losses need not reach; their rows are then zero.
            verify: compare with native backwards whenever layouts had to be measured, as on the first batches.

        Returns:
            A ``Jacobian`` with n rows, detached from the graph.

        Raises:
            Refused: losses of another shape; a parameter that is reached past the known ops, or never; an output in
                which examples cannot be told apart; an input changed in place since it was used; disagreement with
                a native backward.
        """
        reached = self._reach(losses, may_miss)
        with without_autocast(losses.device.type):
            if not len(losses):
                return Jacobian(0, losses.dtype, self.parameters, [])
            kinds = [kind_of_call(call) for call in reached.calls]
            told = self._told(reached, torch.ones_like(losses))
            verify = verify and self.measured and not self.layouts.verified(kinds, len(losses))
            try:
                blocks = self._blocks(reached, told, retain_graph=retain_graph or verify)
            except Disagreement:
                blocks = self._blocks(reached, self._measure(reached), retain_graph=retain_graph or verify)
            jacobian = Jacobian(len(losses), losses.dtype, self.parameters, blocks)
            if verify:
                checks = Checks(losses, self.parameters, reached.dtypes())
                checks.look(jacobian)
                checks.conclude()
                self.layouts.note_verified(kinds, len(losses))
        return jacobian

    def _blocks(self, reached: Reached, told: Sequence[AnyLayout] | Prediction, *, retain_graph: bool) -> list[Block]:
        """By one backward; where its layouts are a prediction, the graph stays in case that this does not hold."""
        losses, predicted = reached.losses, told if isinstance(told, Prediction) else None
        places = reached.calls if predicted is None else predicted.calls
        edges = [place.edge for place in places]
        bs = _gradients(losses, edges, torch.ones_like(losses), retain_graph=retain_graph or predicted is not None)
        collector = Collector(reached.calls, layouts_by(told), self._sources)
        with torch.no_grad():
            for number, g in enumerate(bs):
                collector.take(number, g, losses)
        if predicted is not None:
            predicted.conclude()
            self._note_success(reached, predicted)
        return collector.blocks

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
    ) -> dict[str, Tensor]:
        """Σᵢ cᵢ row_i with factors group by group, by one backward in which no more is kept than the budget allows.

        Args:
            losses: as of ``jacobian``; the graph is used up.
            groups: label -> names of parameters; a partition of the recorded ones.
            clip: (Jacobian restricted to a group, the group's label) -> the group's clipped sum by name; called as
                soon as the group's last b is there. None sums nothing: the rows are observed alone.
            merging: examples whose mean is to be one row.
            may_miss: as of ``jacobian``.
            memory_budget: peak memory allowed: up to 100 in units of what non-private training needs, else in bytes.
            observe: is shown the rows of every group before they are summed.

        Returns:
            The clipped sum by name, which on the first batches is verified. Under a budget below what must be held,
            the graph stays instead, and a second backward with the factors as cotangent gives the sum.
        """
        reached = self._reach(losses, may_miss)
        with without_autocast(losses.device.type):
            if not len(losses):
                empty = Jacobian(0, losses.dtype, self.parameters, [])
                sums = [clip(empty.restricted(names), label) for label, names in groups.items() if clip is not None]
                return {name: total for part in sums for name, total in part.items()}
            kinds = [kind_of_call(call) for call in reached.calls]
            cotangent = torch.ones_like(losses) if merging is None else merging.weights().to(losses)
            told = self._told(reached, cotangent)
            budget = self._budget(reached, memory_budget)
            if isinstance(told, Prediction) and (
                len(groups) > 1 or budget.wants_second_backward or not self._has_room(reached)
            ):
                told = self._proved(reached, told)
            unproved = self.measured and not self.layouts.verified(kinds, len(losses))

            def clipped(told: Sequence[AnyLayout] | Prediction) -> dict[str, Tensor]:
                checks = Checks(losses, self.parameters, reached.dtypes(), merging) if unproved else None
                rows = RowsAsTheyCome(reached, told, self._sources, self.parameters, merging, self._estimates)
                total = rows.clipped_sum(groups, clip, lambda: self._budget(reached, memory_budget), checks, observe)
                if isinstance(told, Prediction):
                    self._note_success(reached, told)
                return total

            try:
                total = clipped(told)
            except Disagreement:
                total = clipped(self._measure(reached))
            if unproved:
                self.layouts.note_verified(kinds, len(losses))
        return total

    def _has_room(self, reached: Reached) -> bool:
        """Whether the graph may stay while the rows come, since it is small."""
        known = self.layouts.footprint(reached.path, len(reached.losses))
        activations = known.activations if known is not None else self._activations(reached)
        return self._estimates is None and activations + sum([call.size for call in reached.calls]) < ROOM

    def _budget(self, reached: Reached, limit: float) -> Budget:
        known = self.layouts.footprint(reached.path, len(reached.losses)) or Footprint(self._activations(reached), 0)
        parameters = sum([p.numel() * p.itemsize for p in self.parameters.values()])
        on_the_way = sum([call.size for call in reached.calls])
        if 1 <= limit <= 100:
            limit = max(limit * max(known.activations, parameters), LITTLE)
        return Budget(limit, known.activations, known.least, on_the_way, parameters)

    def _activations(self, reached: Reached) -> int:
        """Bytes that autograd keeps for the backward."""
        if self._saved_elsewhere:  # by checkpointing or offloading, which give it back but once
            return distinct_bytes([t for call in reached.calls for use in call.uses for t in use.saved()])
        lasting = [*self.parameters.values(), *(tensor for tensor, _ in self._constants.values())]
        return saved_bytes(reached.graph, len(reached.losses), lasting)

    def _reach(self, losses: Tensor, may_miss: Iterable[str]) -> Reached:
        """The calls between losses and parameters."""
        check_losses(losses)
        self.layouts.filled.learn(len(losses))
        graph = Graph(losses)
        calls = self._reached_calls(graph)
        self._check_all_reached(calls, set(may_miss))
        for call in calls:
            _check_versions(call)
        cuts = [*{cut.edge: cut for cut in self._cuts if cut.edge.node in graph.children}.values()]
        return Reached(losses, graph, calls, cuts, self._path(graph, [*calls, *cuts], len(losses)))

    def _told(self, reached: Reached, cotangent: Tensor) -> Sequence[AnyLayout] | Prediction:
        """Where the examples sit in the calls' outputs, or where they should, by what earlier batches taught.

        The latter where the data or a new path may have it otherwise: the further backwards are then made, and the
        one that is to come, with this cotangent, must bear it out. The graph stays.
        """
        layouts, n, calls = self.layouts, len(reached.losses), reached.calls
        places = reached.places
        self.measured = False
        known = layouts.recall(reached.path, places, n)
        hidden = self._moved_unseen or (self._moved and reached.graph.has_custom_functions())
        if known is not None and n > 1 and (hidden or reached.cuts):
            if hidden or not reached.cuts_are_near():
                return self._predicted(reached, calls, known[: len(calls)], cotangent)
            if self._cuts_hold(reached, known[len(calls) :]):
                return known[: len(calls)]
        elif known is not None:
            if not layouts.spot_check_is_due():
                return known
            self.measured = True
            if self._measurement(reached).agrees_in_part(known, self._portions(reached)):
                return known
        else:
            expected = layouts.expect(places, self._names_of, n)
            places = places if expected is not None else calls
            expected = expected or layouts.expect(calls, self._names_of, n)
            if expected is not None:
                return self._predicted(reached, places, expected, cotangent)
        return self._measure(reached)

    def _predicted(
        self, reached: Reached, places: Sequence[Call], expected: Sequence[Expected], cotangent: Tensor
    ) -> Prediction:
        """What should be, with the further backwards made."""
        self.measured = True
        n = len(reached.losses)
        prediction = Prediction(places, expected, cotangent, Rounding.of(reached.dtypes()))
        is_new, least = self.layouts.footprint(reached.path, n) is None, 0.0
        activations = self._activations(reached) if is_new else 0

        def look(number: int, g: Tensor) -> None:
            nonlocal least
            if is_new and not places[number].is_cut:
                least += self._least_bytes(places[number], g, expected[number])

        for k, coded in enumerate(prediction.coded):
            noting = _Noting(prediction, k, look if k == 0 else None)
            backward_into(noting, reached.losses, coded, places, reached.deepest(places), retain_graph=True)
        if is_new:
            self.layouts.note_footprint(reached.path, n, Footprint(activations, least))
        return prediction

    def _proved(self, reached: Reached, prediction: Prediction) -> Sequence[AnyLayout]:
        """What was predicted, borne out by a backward of its own; or what is measured."""
        proof = _Proof(prediction)
        try:
            deepest = reached.deepest(prediction.calls)
            backward_into(proof, reached.losses, prediction.cotangent, prediction.calls, deepest, retain_graph=True)
            prediction.conclude()
        except Disagreement:
            return self._measure(reached)
        self._note_success(reached, prediction)
        return [proof.layouts[number] for number in range(len(reached.calls))]

    def _cuts_hold(self, reached: Reached, known: Sequence[AnyLayout]) -> bool:
        """Whether the examples sit in the cuts as they did: what lies below on a known path does so, too."""
        self.measured = True
        losses, edges = reached.losses, [cut.edge for cut in reached.cuts]
        rounding = Rounding.of(reached.dtypes())
        expected = [layout for layout in known if isinstance(layout, Layout)]
        prediction = Prediction(reached.cuts, expected, torch.ones_like(losses), rounding)
        with torch.no_grad():
            for cotangent in (*prediction.coded, prediction.cotangent):
                for number, g in enumerate(_gradients(losses, edges, cotangent, retain_graph=True)):
                    g = reached.cuts[number].output.gradient(g, losses)
                    if cotangent is prediction.cotangent:
                        prediction.layout(number, g)
                    else:
                        prediction.note(0, number, g)
        try:
            prediction.conclude()
        except Disagreement:
            return False
        return True

    def _note_success(self, reached: Reached, prediction: Prediction) -> None:
        """A prediction held; it teaches the path, if every example had a say and all calls and cuts were looked at."""
        if prediction.teaches and len(prediction.calls) == len(reached.places):
            self.layouts.note_bearing_out(reached.path, prediction.expected, len(reached.losses))

    def _measurement(self, reached: Reached) -> Measurement:
        losses, edges = reached.losses, [place.edge for place in reached.places]
        n = len(losses)

        def gradients(c: Tensor, some: Sequence[int]) -> list[Tensor | None]:
            return _gradients(losses, [edges[k] for k in some], c, retain_graph=True)

        def known(call: Call) -> Expected | None:
            return None if self._moved else self.layouts.expect_of(call, self._names_of, n)

        return Measurement(reached.places, self._names_of, gradients, losses, reached.dtypes, known)

    def _measure(self, reached: Reached) -> list[AnyLayout]:
        """Where the examples sit in the calls' outputs, by as many further backwards as it takes. The graph stays."""
        self.measured = True
        places, n = reached.places, len(reached.losses)
        measurement = self._measurement(reached)
        activations, least = self._activations(reached), 0.0

        def look(number: int, b: Tensor, layout: AnyLayout) -> None:
            nonlocal least
            if not places[number].is_cut:
                least += self._least_bytes(places[number], b, layout)

        layouts = self.layouts.measure(reached.path, measurement, self._portions(reached), look)
        self.layouts.learn(reached.path, measurement, self._names_of)
        self.layouts.note_footprint(reached.path, n, Footprint(activations, least))
        return layouts[: len(reached.calls)]

    def _least_bytes(self, call: Call, b: Tensor, layout: Expected | AnyLayout) -> float:
        """Bytes that must be held of a call until the clipped sum, its gradient being of this kind."""
        if not isinstance(layout, Layout):
            return call.size  # as many for one order of the examples as for any other
        with torch.no_grad():
            ops = [make_op(use, b, layout, self._names_of(use.weight)) for use in call.uses]
            return sum([least_bytes(op) for op in ops])

    def _portions(self, reached: Reached) -> list[list[int]]:
        """The calls by number, so many at a time that their gradients take little memory."""
        sizes = [place.output.size for place in reached.places]
        most, portions, size = max(PORTION, self._activations(reached) / 8), [], float("inf")
        for number, own in enumerate(sizes):
            if size + own > most:
                portions.append([])
                size = 0
            portions[-1].append(number)
            size += own
        return portions

    def _path(self, graph: Graph, calls: Sequence[Call], n: int) -> int:
        """Number of what was computed: functions with their whole-number arguments, the graph of the losses, the calls.

        Another path, as by a branch in the model's or the loss's code, or with other parameters that are trained, may
        have other layouts or mix examples; so it must be measured anew.
        """
        numbers: list[int] = []
        functions = [(step.func, without_numbers(step.numbers, numbers)) for step in self._steps()]
        met = [(call.op, *(self._names_of(use.weight) for use in call.uses)) for call in calls]
        above = [*self.nodes_before_calls(graph)]
        names = [node.name() for node in above]
        self.code.note(
            (name, *[child.name() for child in graph.children[node]]) for name, node in zip(names, above, strict=True)
        )
        program = hash((*functions, *names, *met))
        return self.layouts.path(program, n, tuple(numbers))

    def nodes_before_calls(self, graph: Graph) -> Iterator[Node]:
        """The nodes between the losses and the first noted calls on every path."""
        return graph.before({call.output.edge.node for call in self._calls})

    def _reached_calls(self, graph: Graph) -> list[Call]:
        """The calls between losses and parameters, in the order they were made; refuses any path around them."""
        by_node: dict[Node, list[Call]] = {}
        for call in self._calls:
            by_node.setdefault(call.edge.node, []).append(call)
        reached: list[Call] = []
        stack, above = [graph.root], {graph.root: graph.root}
        while stack:
            node = stack.pop()
            self._check_known(node, above[node])
            if node in by_node:
                reached += by_node[node]
                following = [n for call in by_node[node] for n in call.inputs]
            else:
                following = graph.following(node)
            for n in following:
                if n not in above:
                    above[n] = node
                    stack.append(n)
        order = {id(call): i for i, call in enumerate(self._calls)}
        return sorted(reached, key=lambda call: order[id(call)])

    def _check_known(self, node: Node, above: Node) -> None:
        if node in self._unknown:
            op, names = self._unknown[node]
            raise Refused(
                f"tape: parameter {', '.join(map(repr, names))} was used by {op!r}, which has no exact rule. "
                f"Allowed: {', '.join(sorted({f.__name__.strip('_') for f in OPS}))}. "
                "Write that step with these, or freeze the parameter."
            )
        leaf = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
        if leaf is not None and id(leaf) in self._leaves:
            raise Refused(
                f"tape: parameter {self._leaves[id(leaf)]!r} reaches the losses by a path that no recorded op explains,"
                f" at {above.name()}. {_advice(above)}"
            )
        if isinstance(node, BackwardCFunction) and node.name().startswith("CheckpointFunction"):
            raise Refused("tape: reentrant activation checkpointing hides ops. Pass use_reentrant=False to checkpoint.")

    def _check_all_reached(self, calls: list[Call], may_miss: set[str]) -> None:
        reached: set[str] = set()
        for call in calls:
            for use in call.uses:
                names = self._names_of(use.weight)
                reached.update(names)
                if call.op not in LOOKUPS or not self._sources[id(use.weight)].direct:
                    self.used_otherwise.update(names)
        self.reached = reached
        missing = [name for name in self.parameters if name not in reached | may_miss]
        if missing:
            raise Refused(
                f"tape: the losses never reach parameter {', '.join(map(repr, missing))}. Use it, freeze it with "
                "requires_grad_(False), or leave it out of the optimizer. Where the data choose layers (experts), "
                "the first batches must be large enough to reach all; what was reached once may be missed later."
            )


class _Noting:
    """Gives a prediction the gradients of a further backward."""

    def __init__(self, prediction: Prediction, k: int, look: Callable[[int, Tensor], None] | None):
        self._prediction, self._k, self._look = prediction, k, look

    def take(self, number: int, g: Tensor | None, like: Tensor) -> None:
        g = self._prediction.calls[number].output.gradient(g, like)
        self._prediction.note(self._k, number, g)
        if self._look is not None:
            self._look(number, g)


class _Proof:
    """Gives a prediction the gradients of the plain backward, and keeps the layouts."""

    def __init__(self, prediction: Prediction):
        self._prediction = prediction
        self.layouts: dict[int, AnyLayout] = {}

    def take(self, number: int, g: Tensor | None, like: Tensor) -> None:
        b = self._prediction.calls[number].output.gradient(g, like)
        self.layouts[number] = self._prediction.layout(number, b)


class _Known:
    """What is remembered of a model between recordings."""

    def __init__(self, model: nn.Module):
        self.layouts, self.attributes = Layouts(), AttributeTensors(model)


class _Memory:
    """What is known of every model that was recorded, for as long as the model is there; nothing is kept on models."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    def of(self, model: nn.Module) -> _Known:
        """What is known of a model."""
        with self._lock:
            known = self._known.get(id(model))
            if known is None:
                known = self._known[id(model)] = _Known(model)
                weakref.finalize(model, self._known.pop, id(model), None).atexit = False
            return known


_MEMORY = _Memory()


class _Inputs:
    """Lets a tape note what the model is called with. In copies of the model it does nothing."""

    def __init__(self, tape: Tape | None = None):
        self._tape = tape

    def __call__(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        # There are none while another thread removes its hook from the model.
        if self._tape is not None:
            self._tape.note_inputs(args, kwargs)

    def __deepcopy__(self, memo: dict) -> _Inputs:
        return _Inputs()

    def __reduce__(self) -> tuple:
        return _Inputs, ()


class record(Tape):
    """Notes every use of the model's trainable parameters inside the ``with`` block.

    What batches teach of where their examples lie is remembered for as long as the model is there, so that from the
    third one on a batch costs one backward.

    Args:
        model: any module; its parameters with ``requires_grad`` are recorded. Buffers, frozen parameters and tensors
            that are plain attributes when the model is recorded first count as constants.
        num_examples: size of the batch, which tells apart what may hold a part for each example, and what cannot.
            Without it the size of the model's first input is taken, along the dimension that held the examples of
            earlier batches, at first the first one. A wrong size costs time, and may let a model be refused.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> with record(model) as tape:
        ...     losses = model(torch.ones(2, 3)).flatten()
        >>> tape.jacobian(losses).squared_norms()
        tensor([4., 4.])
    """

    def __init__(self, model: nn.Module, num_examples: int | None = None):
        if num_examples is not None:
            whole("record", num_examples=num_examples)
        known = _MEMORY.of(model)
        named = dict(model.named_parameters())
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        tensors = ModelTensors(trainable, {**frozen, **dict(model.named_buffers())}, known.attributes.unchanged())
        super().__init__(tensors.trained, tensors.constants, known.layouts, num_examples)
        self._model, self._contexts = model, ExitStack()

    def __enter__(self) -> Self:
        if not self._entered:
            self._contexts.enter_context(uncompiled())
            hook = self._model.register_forward_pre_hook(_Inputs(self), with_kwargs=True, prepend=True)
            self._contexts.callback(hook.remove)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if not self._entered:
            self._contexts.close()


def _advice(node: Node) -> str:
    """What to do where a parameter hangs at a node that no op was noted for."""
    if isinstance(node, BackwardCFunction):
        return (
            "How a custom autograd.Function uses a parameter cannot be seen. Write it with torch's functions (a "
            "straight-through estimator is w + (f(w) - w).detach()), or estimate the norms by "
            "jacobian=tp.Sketched(32), or freeze the parameter."
        )
    return (
        "Call the model as model(x) and use its parameters nowhere else (or put all of it under tp.record / "
        "training.record()). torch.func, vmap, autograd.grad inside of the forward and TorchScript hide what they do: "
        "do without them, or estimate the norms by jacobian=tp.Sketched(32), or freeze the parameter."
    )


def check_losses(losses: Tensor) -> None:
    """Refuses what is not one loss per example, with a gradient."""
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if isinstance(losses, Tensor) and losses.ndim == 2 and losses.shape[0] == losses.shape[1] > 1:
            raise Refused(
                f"losses of shape {shape} given: must be (n,), one loss per example. A broadcast of (n, 1) against "
                "(n,) makes (n, n), in which every example meets every other. Give outputs and targets one shape, e.g. "
                "outputs.squeeze(1) or targets.view_as(outputs)."
            )
        raise Refused(
            f"losses of shape {shape} given: must be (n,), one loss per example. Pass reduction='none' to the loss "
            "function. Where an example has several positions, sum their losses over the example's own count: "
            "(losses * mask).sum(1) / mask.sum(1)."
        )
    if not losses.is_floating_point() or losses.grad_fn is None:
        raise Refused(
            f"losses of dtype {losses.dtype} with requires_grad={losses.requires_grad} given: must be floating-point "
            "and computed from the model with gradients enabled (not under torch.no_grad())."
        )


def _check_versions(call: Call) -> None:
    if any(tensor._version != version for tensor, version in call.versions):
        raise Refused(
            f"tape: an input of {call.op!r} was changed in place after its use, so its Jacobian is lost. "
            "Write the later step out of place."
        )


def _gradients(losses: Tensor, inputs: Sequence[Any], cotangent: Tensor, *, retain_graph: bool) -> list[Tensor | None]:
    """Gradients of ``cotangent · losses`` in the inputs (tensors or edges), by one backward that goes no further."""
    if not inputs:
        return []
    return list(torch.autograd.grad(losses, inputs, cotangent, retain_graph=retain_graph, allow_unused=True))
