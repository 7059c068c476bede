# SPDX-License-Identifier: Apache-2.0
"""The tape: records op calls with data and parameters, and computes per-example gradients from them.

After the forward, ``jacobian`` walks the autograd graph from the losses: every path to a trainable parameter must lead
through a recorded use, or the call is refused with the names of parameter and op. One backward, to the outputs only,
then gives every use its b, the gradient in its output y.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..ops import AnyLayout, Layout
from ..support.torch_modes import without_autocast
from ..support.validate import Refused
from .layouts.codes import Rounding, fresh_generator
from .layouts.known import SPOT_CHECK, Footprint, Layouts, Merging, kind_of_call
from .layouts.measure import Measurement
from .layouts.predict import CodedSink, Disagreement, Expected, Irregular, Options, PlainSink, Prediction
from .parallel.agreement import ALONE
from .parallel.shards import TensorParallel, attention_is_split, peers_of, refuse_split_positions, whole_losses
from .recording.calls import Call, Reached
from .recording.functions import without_numbers
from .recording.graph import Graph, saved_bytes
from .recording.paths import CallFinder, check_losses, check_unchanged
from .recording.recorder import Recorder
from .rows.blocks import Block
from .rows.check import NativeSum, RowCheck
from .rows.operator import Jacobian
from .rows.plan import Budget, distinct_bytes, least_bytes
from .rows.streamed_sum import (
    AT_ONCE,
    Clip,
    Collector,
    Observe,
    StreamedRows,
    backward_into,
    cotangent_of,
    layouts_by,
    make_op,
)

# Peak memory allowed by default, in units of what non-private training needs.
MEMORY_BUDGET = 1.2

LOOKUPS = ("embedding", "embedding_bag")
# Gradients of at least this many bytes are measured at once, because each portion needs several backwards.
PORTION_BYTES = 2**24
# Any budget allows this many bytes, unless it is below what non-private training needs.
MIN_BUDGET = 2**26
# Up to this many bytes, graph and calls may be in memory together while predicted layouts are confirmed.
MAX_UNCONFIRMED_BYTES = 2**28


class Tape(Recorder):
    """Per-example gradients from what was recorded while it was active; ``record`` makes one for a model.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        layouts: of earlier batches, by path.
        num_examples: size of the batch, if it is known in advance; shows which tensors can have a part per example.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor] = (),
        layouts: Layouts | None = None,
        num_examples: int | None = None,
    ):
        self.layouts = layouts if layouts is not None else Layouts()
        super().__init__(parameters, constants, num_examples, self.layouts.filled)
        self.reached: set[str] = set()  # names of the parameters that the losses were found to depend on
        self.used_otherwise: set[str] = set()  # names of those used other than as the table of a look-up
        self.measured = False  # whether layouts had to be measured, by additional backwards
        self._native: NativeSum | None = None  # if a coded backward also served to check the rows
        self._parts = self.parameters  # this rank's parts of the parameters, if they are distributed
        self._peers, self._parallel = ALONE, None  # the ranks with the other parts
        self._leaves = {id(p): p for p in self.parameters.values() if p.requires_grad}
        self.unrecorded: list[Call] = []  # stand for the nodes by which the losses reached parameters otherwise

    def begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Records until `end`, from a call of the model with these arguments on."""
        self.note_inputs(args, kwargs)
        self._forwards += 1
        self.__enter__()

    def end(self, output: Any) -> None:
        """Stops recording what `begin` began, after the model returned its output or was interrupted."""
        self._forwards -= 1
        self.__exit__(None, None, None)

    def start(self, batch: Any) -> None:
        """Records until `stop`, from the batch on that holds the data."""
        self.note_inputs(batch)
        self.__enter__()

    def jacobian(
        self, losses: Tensor, *, retain_graph: bool = False, may_miss: Iterable[str] = (), verify: bool = False
    ) -> Jacobian:
        """Returns the Jacobian of the per-example losses in the recorded parameters.

        Args:
            losses: (n,) one loss per example, computed under this tape; the graph is freed unless retained.
            retain_graph: keep the graph for further backwards.
            may_miss: names of parameters that the losses need not reach; their rows are then zero.
            verify: compare with native backwards if layouts had to be measured, as on the first batches.

        Returns:
            A ``Jacobian`` with n rows, detached from the graph.

        Raises:
            Refused: losses of another shape; a parameter that is reached past the recorded ops, or never; an output in
                which examples cannot be separated; an input changed in place since it was used; disagreement with
                a native backward.
        """
        losses = self._whole(losses)
        reached = self._reach(losses, may_miss)
        with without_autocast(losses.device.type), self._peers.same_random():
            if not len(losses):
                return Jacobian(0, losses.dtype, self._parts, [], self._parallel)
            layouts = self._find_layouts(reached, checks_rows=verify)
            if self.measured:
                self._check_same_examples()
            kinds = [kind_of_call(call) for call in reached.calls] if verify else []
            verify = self._peers.any(verify and self.measured and not self.layouts.verified(kinds, len(losses)))
            retain_graph = retain_graph or verify
            try:
                blocks = self._blocks(reached, layouts, retain_graph=retain_graph)
            except Disagreement:
                blocks = self._blocks(reached, self._measure(reached), retain_graph=retain_graph)
            jacobian = Jacobian(len(losses), losses.dtype, self._parts, blocks, self._parallel)
            if self.measured:
                jacobian.check_equal()
            if verify:
                check = self._row_check(reached, None)
                check.add(jacobian)
                check.conclude()
                self.layouts.note_verified(kinds, len(losses))
        return jacobian

    def _blocks(
        self, reached: Reached, layouts: Sequence[AnyLayout] | Prediction, *, retain_graph: bool
    ) -> list[Block]:
        """Computes the blocks by one backward; if the layouts are predicted, the graph stays in case they are wrong."""
        losses, predicted = reached.losses, layouts if isinstance(layouts, Prediction) else None
        places = reached.calls if predicted is None else predicted.calls
        collector = Collector(reached.calls, layouts_by(layouts), self._sources)
        backward_into(
            collector,
            losses,
            torch.ones_like(losses),
            places,
            lambda: reached.deepest(places),
            retain_graph=retain_graph or predicted is not None or reached.needs_graph,
            at_once=self._peers.all(sum([call.size for call in reached.calls]) <= AT_ONCE),
        )
        if predicted is not None:
            predicted.conclude()
            self._note_confirmed(reached, predicted)
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
        """Returns Σᵢ cᵢ row_i with factors group by group, by one backward that keeps no more than the budget allows.

        Args:
            losses: as of ``jacobian``; the graph is freed.
            groups: label -> names of parameters; a partition of the recorded ones.
            clip: (Jacobian restricted to a group, the group's label) -> the group's clipped sum by name; called as
                soon as the group's last b is known. None sums nothing: the rows are only observed.
            merging: examples whose mean is one row.
            may_miss: as of ``jacobian``.
            memory_budget: peak memory allowed: up to 100 in units of what non-private training needs, else in bytes.
            observe: receives the rows of every group before they are summed.

        Returns:
            The clipped sum by name, which is verified on the first batches. Under a budget below what must be held,
            the graph stays instead, and a second backward with the factors as cotangent gives the sum.
        """
        losses = self._whole(losses)
        reached = self._reach(losses, may_miss)
        with without_autocast(losses.device.type), self._peers.same_random():
            if not len(losses):
                return self._sum_of_none(losses, groups, clip)
            layouts = self._layouts_for_sum(reached, groups, memory_budget, merging)
            if self.measured:
                self._check_same_examples()
            kinds = [kind_of_call(call) for call in reached.calls] if self.measured else []
            unverified = self._peers.any(self.measured and not self.layouts.verified(kinds, len(losses)))

            def clipped(layouts: Sequence[AnyLayout] | Prediction) -> dict[str, Tensor]:
                check = self._row_check(reached, merging) if unverified else None
                rows = StreamedRows(
                    reached,
                    layouts,
                    self._sources,
                    self._parts,
                    merging,
                    self.parameters,
                    self._parallel,
                )
                total = rows.clipped_sum(groups, clip, lambda: self._budget(reached, memory_budget), check, observe)
                if isinstance(layouts, Prediction):
                    self._note_confirmed(reached, layouts)
                return total

            try:
                total = clipped(layouts)
            except Disagreement:
                total = clipped(self._measure(reached))
            if unverified:
                self.layouts.note_verified(kinds, len(losses))
        return total

    def _sum_of_none(self, losses: Tensor, groups: Mapping[str, Sequence[str]], clip: Clip | None) -> dict[str, Tensor]:
        """Returns the clipped sum of an empty batch."""
        empty = Jacobian(0, losses.dtype, self._parts, [], self._parallel)
        sums = [clip(empty.restricted(names), label) for label, names in groups.items() if clip is not None]
        return {name: total for part in sums for name, total in part.items()}

    def _layouts_for_sum(
        self,
        reached: Reached,
        groups: Mapping[str, Sequence[str]],
        memory_budget: float,
        merging: Merging | None,
    ) -> Sequence[AnyLayout] | Prediction:
        """Returns the layouts; a prediction only if the backward that sums can also confirm it."""
        layouts = self._find_layouts(reached, merging, checks_rows=merging is None)
        if not isinstance(layouts, Prediction):
            return layouts
        wants_second = self._budget(reached, memory_budget).wants_second_backward
        if len(groups) > 1 or self._peers.any(wants_second or not self._may_keep_graph(reached)):
            return self._confirm(reached, layouts)
        return layouts

    def _row_check(self, reached: Reached, merging: Merging | None) -> RowCheck:
        """Returns a check of the rows against a native backward, which a coded one may have been already."""
        dtypes = reached.dtypes()
        if self._native is None:
            exponents = Rounding.of(dtypes).exponents
            self._native = NativeSum.of(reached.losses, self._parts, merging, exponents, self.parameters)
        return RowCheck(self._native, dtypes, self._peers)

    # Tensor-parallel models

    def _whole(self, losses: Tensor) -> Tensor:
        """Returns the losses as an ordinary tensor, which they are unless they are distributed."""
        return whole_losses(losses) if self._may_be_parallel and isinstance(losses, Tensor) else losses

    def _note_parts(self, calls: Sequence[Call]) -> None:
        """Notes which ranks have parts of this model, and this rank's part of every parameter.

        Raises:
            Refused: every rank has only some positions of an example.
        """
        if not self._may_be_parallel:
            return
        if calls and (self._splits_positions or attention_is_split()):
            raise refuse_split_positions(sorted({name for call in calls for name in self._names_in(call)}))
        self._peers = peers_of(self._meshes)
        if self._peers.size == 1:
            return
        self._parts = {name: self._piece(p) for name, p in self.parameters.items()}
        self._parallel = TensorParallel(self._peers, self.parameters)

    def _check_same_examples(self) -> None:
        """Raises unless the model was called with the same numbers on all ranks, as far as they are unchanged."""
        if self._parallel is not None:
            self._parallel.check_same_inputs([t for t, version in self._inputs if t._version == version])

    def _names_in(self, call: Call) -> Iterator[str]:
        """Yields the names of the parameters that a call uses."""
        for use in call.uses:
            yield from self._names_of(use.weight)

    # Memory

    def _may_keep_graph(self, reached: Reached) -> bool:
        """True if the graph is small enough to stay while the rows are computed."""
        known = self.layouts.footprint(reached.path, len(reached.losses))
        activations = known.activations if known is not None else self._activations(reached)
        size = activations + sum([call.size for call in reached.calls])
        return size < MAX_UNCONFIRMED_BYTES

    def _budget(self, reached: Reached, limit: float) -> Budget:
        known = self.layouts.footprint(reached.path, len(reached.losses)) or Footprint(self._activations(reached), 0)
        parameters = sum([p.numel() * p.itemsize for p in self._parts.values()])
        call_bytes = sum([call.size for call in reached.calls])
        if 1 <= limit <= 100:
            limit = max(limit * max(known.activations, parameters), MIN_BUDGET)
        return Budget(limit, known.activations, known.least, call_bytes, parameters)

    def _activations(self, reached: Reached) -> int:
        """Returns the bytes that autograd keeps for the backward."""
        if self._saved_elsewhere:  # by checkpointing or offloading, whose tensors can be read only once
            return distinct_bytes([t for call in reached.calls for use in call.uses for t in use.saved()])
        lasting = [*self._parts.values(), *(tensor for tensor, _ in self._constants.values())]
        return saved_bytes(reached.graph, len(reached.losses), lasting)

    def _least_bytes(self, call: Call, b: Tensor, layout: Expected | AnyLayout) -> float:
        """Returns the bytes that must be held of a call until the clipped sum, if its gradient has this layout."""
        if not isinstance(layout, Layout):
            return call.size  # any order of the examples needs the same
        with torch.no_grad():
            ops = [make_op(use, b, layout, self._names_of(use.weight)) for use in call.uses]
            return sum([least_bytes(op) for op in ops])

    def _portions(self, reached: Reached) -> list[list[int]]:
        """Returns the calls' numbers in portions with gradients that need little memory."""
        sizes = [place.output.size for place in reached.places]
        most, portions, total = max(PORTION_BYTES, self._activations(reached) / 8), [], float("inf")
        for number, size in enumerate(sizes):
            if total + size > most:
                portions.append([])
                total = 0
            portions[-1].append(number)
            total += size
        return self._peers.gather(portions)[0]

    # The calls and their path

    def _reach(self, losses: Tensor, may_miss: Iterable[str]) -> Reached:
        """Returns the calls between losses and parameters."""
        check_losses(losses)
        self.layouts.filled.learn(len(losses))
        graph = Graph(losses)
        finder = CallFinder(self._calls, self._leaves, self._is_constant)
        calls, self.unrecorded = finder.reached(graph, losses)
        calls += self.unrecorded
        self._check_weights(calls)
        self._check_all_reached(calls, set(may_miss))
        for call in calls:
            check_unchanged(call)
        self._note_parts(calls)
        cuts = [*{cut.edge: cut for cut in self._cuts if cut.edge.node in graph.children}.values()]
        path = self._path(graph, finder.nodes_before(graph), [*calls, *cuts], len(losses))
        return Reached(losses, graph, calls, cuts, path)

    def _check_weights(self, calls: Sequence[Call]) -> None:
        """Raises if a parameter is complex, or was written into between its use and the recording's start."""
        used = {id(use.weight): use.weight for call in calls for use in call.uses}
        complex_ones = [name for key, w in used.items() if w.is_complex() for name in self._sources[key].names]
        if complex_ones:
            raise Refused(
                f"tape: parameter {', '.join(map(repr, complex_ones))} is complex, which no rule for rows allows. "
                "Keep it as real numbers (..., 2), with torch.view_as_complex(w) in the forward, or freeze it."
            )
        unrecorded = {id(use.weight): use.weight for call in self.unrecorded for use in call.uses}
        written = [self._sources[key] for key, w in unrecorded.items() if self._source(w) is None]
        if written:
            raise Refused(
                f"tape: the forward wrote into parameter {', '.join(repr(source.names[0]) for source in written)}, so "
                "that its uses before and after are of different weights. Change weights after an update only, by "
                "after_update= of PrivateTraining."
            )

    def _check_all_reached(self, calls: list[Call], may_miss: set[str]) -> None:
        """Raises unless the losses reach every parameter that they must not miss."""
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
            raise Refused(never_reached(missing))

    def _path(self, graph: Graph, first_nodes: Iterator[Node], calls: Sequence[Call], n: int) -> int:
        """Returns the number of the path: functions with their integer arguments, the losses' graph, and the calls.

        Another path, taken by a branch in the model or the loss or with other parameters trained, may have other
        layouts or mix examples, so that it must be measured anew.
        """
        numbers: list[int] = []
        functions = [(step.func, without_numbers(step.numbers, numbers)) for step in self._steps()]
        used = [(call.op, *(self._names_of(use.weight) for use in call.uses)) for call in calls]
        above = [*first_nodes]
        names = [node.name() for node in above]
        self.code.note(
            (name, *[child.name() for child in graph.children[node]]) for name, node in zip(names, above, strict=True)
        )
        program = hash((*functions, *names, *used))
        return self.layouts.path(program, n, tuple(numbers))

    # The layouts

    def _find_layouts(
        self, reached: Reached, merging: Merging | None = None, *, checks_rows: bool = False
    ) -> Sequence[AnyLayout] | Prediction:
        """Returns the layouts of the calls' outputs, or a prediction of them. The graph stays.

        It is a prediction if the path is new, or if the data may change the layouts: the coded backwards are then made,
        and the backward to come must confirm it. With ``checks_rows`` the first of the coded backwards also serves to
        check the rows, if that is still due.
        """
        layouts, n, calls = self.layouts, len(reached.losses), reached.calls
        places = reached.places
        self.measured, self._native = False, None
        known = layouts.recall(reached.path, places, n)
        unseen = self._moved_unseen or (self._moved and reached.graph.has_custom_functions())
        unseen = unseen or reached.graph.has_scripted_parts()
        if self._peers.size > 1 and not self._plan_alike(reached, known, unseen=unseen):
            return self._measure(reached)
        if known is not None and n > 1 and (unseen or reached.cuts):
            if unseen or not reached.cuts_are_near():
                return self._predict(reached, calls, _alone(known[: len(calls)]), merging, checks_rows)
            if self._cuts_hold(reached, known[len(calls) :]):
                return known[: len(calls)]
        elif known is not None:
            if not self._spot_check_is_due():
                return known
            self.measured = True
            if self._peers.all(self._measurement(reached).agrees_in_part(known, self._portions(reached))):
                return known
        else:
            expected = layouts.expect(places, self._names_of, n)
            places = places if expected is not None else calls
            expected = expected or layouts.expect(calls, self._names_of, n)
            if expected is not None:
                return self._predict(reached, places, _alone(expected), merging, checks_rows)
            guess = layouts.guess(reached.places, self._names_of, n)
            if guess is not None:
                return self._predict(reached, reached.places, guess, merging, checks_rows, guessed=True)
        return self._measure(reached)

    def _plan_alike(self, reached: Reached, known: Sequence[AnyLayout] | None, *, unseen: bool) -> bool:
        """True if all ranks would do the same with this batch, as far as what they remember decides that."""
        layouts, n = self.layouts, len(reached.losses)
        some = [layouts.expect(places, self._names_of, n) for places in (reached.places, reached.calls)]
        guess = None if known is not None or any(some) else layouts.guess(reached.places, self._names_of, n)
        irregular = [any(isinstance(layout, Irregular) for layout in expected or ()) for expected in some]
        irregular.append(any(isinstance(options[0], Irregular) for options in guess or ()))
        near = bool(reached.cuts) and reached.cuts_are_near()
        due = not layouts.verified(map(kind_of_call, reached.calls), n)
        found = [known is not None, *(expected is not None for expected in some), guess is not None]
        return self._peers.are_equal([*found, *irregular, unseen, near, due, len(reached.calls), len(reached.cuts)])

    def _spot_check_is_due(self) -> bool:
        """True if what is known is measured again on this batch, on all ranks alike."""
        if self._peers.size == 1:
            return self.layouts.spot_check_is_due()
        return not int(torch.randint(SPOT_CHECK, (), generator=fresh_generator(), device="cpu"))

    def _predict(
        self,
        reached: Reached,
        places: Sequence[Call],
        options: Sequence[Options],
        merging: Merging | None,
        checks_rows: bool,
        *,
        guessed: bool = False,
    ) -> Prediction:
        """Returns the prediction of these layouts, with the coded backwards made."""
        self.measured = True
        n, cotangent = len(reached.losses), cotangent_of(reached.losses, merging)
        rounding = Rounding.of(reached.dtypes())
        prediction = Prediction(places, options, cotangent, rounding, guessed=guessed, peers=self._peers)
        is_new, least = self.layouts.footprint(reached.path, n) is None, 0.0
        activations = self._activations(reached) if is_new else 0

        def add_least(number: int, g: Tensor) -> None:
            nonlocal least
            if is_new and not places[number].is_cut:
                least += self._least_bytes(places[number], g, options[number][0])  # all regular ones need the same

        due = checks_rows and not self.layouts.verified(map(kind_of_call, reached.calls), n)
        native = NativeSum(self._parts, prediction.coded[0], self.parameters) if due else None
        for k, coded in enumerate(prediction.coded):
            sink = CodedSink(prediction, k, add_least if k == 0 else None)
            leaves = native.leaves if native is not None and k == 0 else ()
            found = backward_into(
                sink, reached.losses, coded, places, lambda: reached.deepest(places), retain_graph=True, leaves=leaves
            )
            if native is not None and k == 0:
                native.take(found)
        self._native = native
        if is_new:
            self.layouts.note_footprint(reached.path, n, Footprint(activations, least))
        return prediction

    def _confirm(self, reached: Reached, prediction: Prediction) -> Sequence[AnyLayout]:
        """Returns predicted layouts, confirmed by an additional backward; or measured ones, if they are wrong."""
        sink = PlainSink(prediction)
        try:
            calls = prediction.calls
            backward_into(
                sink, reached.losses, prediction.cotangent, calls, lambda: reached.deepest(calls), retain_graph=True
            )
            prediction.conclude()
        except Disagreement:
            return self._measure(reached)
        self._note_confirmed(reached, prediction)
        return [sink.layouts[number] for number in range(len(reached.calls))]

    def _cuts_hold(self, reached: Reached, known: Sequence[AnyLayout]) -> bool:
        """True if the cuts have the known layouts; then the calls below them, on a known path, have theirs too."""
        self.measured = True
        losses, edges = reached.losses, [cut.edge for cut in reached.cuts]
        rounding = Rounding.of(reached.dtypes())
        expected = [layout for layout in known if isinstance(layout, Layout)]
        ones = torch.ones_like(losses)
        prediction = Prediction(reached.cuts, _alone(expected), ones, rounding, peers=self._peers)
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

    def _note_confirmed(self, reached: Reached, prediction: Prediction) -> None:
        """Remembers a confirmed prediction for the path, if it covers every example and all calls and cuts."""
        if len(prediction.calls) == len(reached.places) and prediction.teaches:
            self.layouts.note_confirmed(reached.path, reached.places, prediction.expected, self._names_of)

    def _measurement(self, reached: Reached) -> Measurement:
        losses, edges = reached.losses, [place.edge for place in reached.places]
        n = len(losses)

        def gradients(c: Tensor, some: Sequence[int]) -> list[Tensor | None]:
            return _gradients(losses, [edges[k] for k in some], c, retain_graph=True)

        def known(call: Call) -> Expected | None:
            return None if self._moved else self.layouts.expect_of(call, self._names_of, n)

        return Measurement(reached.places, self._names_of, gradients, losses, reached.dtypes, known, self._peers)

    def _measure(self, reached: Reached) -> list[AnyLayout]:
        """Returns the layouts of the calls' outputs, measured by as many backwards as it takes. The graph stays."""
        self.measured = True
        places, n = reached.places, len(reached.losses)
        measurement = self._measurement(reached)
        activations, least = self._activations(reached), 0.0

        def add_least(number: int, b: Tensor, layout: AnyLayout) -> None:
            nonlocal least
            if not places[number].is_cut:
                least += self._least_bytes(places[number], b, layout)

        layouts = self.layouts.measure(reached.path, measurement, self._portions(reached), add_least)
        self.layouts.learn(reached.path, measurement, self._names_of)
        self.layouts.note_footprint(reached.path, n, Footprint(activations, least))
        return layouts[: len(reached.calls)]


def never_reached(names: Sequence[str]) -> str:
    """Returns what a refusal says about parameters that the losses do not depend on."""
    return (
        f"tape: the losses never reach parameter {', '.join(map(repr, names))}. Use it, freeze it with "
        "requires_grad_(False), or leave it out of the optimizer. Where the data choose layers (experts), "
        "the first batches must be large enough to reach all; what was reached once may be missed later."
    )


def _alone(expected: Sequence[Expected]) -> list[Options]:
    """Returns each layout as the only option of its call."""
    return [(layout,) for layout in expected]


def _gradients(losses: Tensor, inputs: Sequence[Any], cotangent: Tensor, *, retain_graph: bool) -> list[Tensor | None]:
    """Returns the gradients of ``cotangent · losses`` in tensors or edges, by one backward that ends at these."""
    if not inputs:
        return []
    return list(torch.autograd.grad(losses, inputs, cotangent, retain_graph=retain_graph, allow_unused=True))
