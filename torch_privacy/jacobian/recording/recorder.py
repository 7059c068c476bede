# SPDX-License-Identifier: Apache-2.0
"""Records every op call with batch data and a trainable parameter among its inputs.

A use is (op, parameter, input x, gradient edge of the output y). A tensor computed from parameters and constants alone
counts as a parameter itself. Every op runs unchanged, and nothing in the model is changed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode, _push_mode

from ...ops import COMPOSED, OPS, Use
from ...ops.elementwise import OVERWRITING
from ...support.torch_modes import OpMode, is_transformed, saves_elsewhere, tensors_in
from ..parallel.shards import may_be_parallel
from .called import watched
from .calls import (
    SCAN,
    Call,
    CallLog,
    Output,
    RunCall,
    edges_of,
    output_of,
    plain_output,
    uses_by_fallback,
    uses_by_rule,
)
from .constants import FilledTensors
from .coverage import CodePath
from .functions import (
    Traits,
    changes_in_place,
    decomposed,
    looks_up_examples,
    may_reorder,
    picks_one,
    sorted_out,
    tensors_among,
    traits,
    with_first_by_position,
)
from .packed import Packed, keeping_saved, noting_saved
from .sharded import ShardedTensors
from .tensors import KnownTensors

_next_number = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(slots=True, eq=False)
class OpStep:
    """A call of a torch function with its arguments, except for the tensors' entries."""

    func: Callable
    traits: Traits
    numbers: tuple  # integers, names and flags
    made_of: list[OpStep]  # the steps that made its arguments, for tensors that no gradient goes back to
    reorders: bool = False  # the data may have determined where entries of the result come from
    node: int = -1  # sequence number of its result in the graph
    first: int = field(default_factory=_next_number)  # number of the next node
    last: int = 0  # the same once it was run

    def note_result(self, result: Tensor) -> None:
        """Notes which nodes of the graph, if any, the step made: of several results, only some may be used."""
        node = result.grad_fn
        if node is not None:
            self.node = node._sequence_nr()
        self.last = _next_number()


class Program:
    """The steps of one forward.

    Args:
        output: tensor -> its position in the graph.
    """

    def __init__(self, output: Callable[[Tensor], Output]):
        self._output = output
        self.used: list[OpStep] = []  # steps that a gradient goes back through
        self.made_by: dict[int, tuple[weakref.ref[Tensor], OpStep]] = {}  # of tensors that no gradient goes back to
        self.cuts: list[Call] = []  # tensors with entries that the data may have reordered
        self.moved = False  # the data reordered entries of some tensor, with or without a gradient
        self.moved_unseen = False  # the same, of tensors that are not known

    def makers(self, tensors: Iterable[Tensor]) -> list[OpStep]:
        """Returns the steps that made those of the tensors that no gradient goes back to."""
        made_by = self.made_by
        known = [(t, *made_by[id(t)]) for t in tensors if id(t) in made_by]
        return [step for t, alive, step in known if alive() is t]

    def add(self, step: OpStep, results: Sequence[Tensor]) -> None:
        """Adds a step if its result has a gradient; else it is added once the result is used."""
        for t in results:
            if t.requires_grad:
                step.note_result(t)
                self.used.append(step)
                return
        for t in results:
            self.made_by[id(t)] = weakref.ref(t), step
            if step.traits.in_place and t._base is not None:
                self.made_by[id(t._base)] = weakref.ref(t._base), step

    def steps(self) -> list[OpStep]:
        """Returns the steps that a gradient goes back through, and those that made the other tensors used there."""
        found: dict[OpStep, None] = {}
        for step in self.used:
            stack = [step]
            while stack:
                step = stack.pop()
                if step not in found:
                    found[step] = None
                    stack += step.made_of
        return [*found]

    def note_unseen(self) -> None:
        """Notes that the data may have reordered entries of unknown tensors."""
        self.moved = self.moved_unseen = True

    def check_order(
        self, step: OpStep, args: tuple, data: Sequence[Tensor], tensors: Iterable[Tensor], place: int
    ) -> None:
        """Adds cuts, before a step is run, if its data may determine where entries with a gradient go."""
        step.reorders = may_reorder(step.func, args, data) or any(map(_reorders, step.made_of))
        if not step.reorders:
            return
        self.moved = True
        differentiable = [t for t in tensors if t.grad_fn is not None]
        if not differentiable:
            return
        unmeasurable = [
            t for t in differentiable if not t.is_floating_point() or t.layout is not torch.strided or t.is_nested
        ]
        if unmeasurable or step.traits.in_place:
            self.moved_unseen = True
            return
        self.cuts += [Call.cut(step.func, output, place) for output in map(self._output, differentiable)]


class Recorder(OpMode):
    """Records every op call with data and one of ``parameters`` among its inputs, while it is active.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        num_examples: size of the batch, if it is known in advance; shows which tensors can have a part per example.
        filled: what earlier batches showed about tensors that are filled with numbers.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor] = (),
        num_examples: int | None = None,
        filled: FilledTensors | None = None,
    ):
        super().__init__()
        self.code, self.parameters = CodePath(), dict(parameters)
        self.tensors = KnownTensors(self.parameters, constants, num_examples, filled or FilledTensors())
        tensors = [*self.parameters.values(), *self.tensors.constants()]
        self.shards = ShardedTensors(self.tensors, self.parameters) if may_be_parallel(tensors) else None
        self.program = Program(plain_output if self.shards is None else output_of)
        self.log = CallLog()
        self.log.again.expect({*map(id, self.parameters.values())})
        self.reached: set[str] = set()  # names of the parameters that the losses were found to depend on
        self.used_otherwise: set[str] = set()  # names of those used other than as the table of a look-up
        self._forwards = 0  # of the model that are running

    def note_inputs(self, *inputs: Any) -> None:
        """Takes the arguments that the model is called with."""
        if not is_transformed():
            tensors = tensors_in(inputs)
            self.tensors.note_inputs(tensors)
            if self.shards is not None:
                self.shards.note_inputs(tensors)

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

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        traits_ = traits(func)
        if traits_.metadata:
            return func(*args, **(kwargs or {}))
        if kwargs and not args:
            args, kwargs = with_first_by_position(func, kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        kwargs = kwargs or {}
        if self.shards is not None and self.shards.is_internal(func, values, sys._getframe(1)):
            return self._run_internal(func, args, kwargs)
        tensors, numbers, others = sorted_out(values)
        self.code.note_call(func, numbers, values if others else ())
        if is_transformed():  # the graph will tell what was used
            if traits_.reorders is not False:
                self.program.note_unseen()
            self.program.used.append(step := OpStep(func, traits_, numbers, []))
            out = func(*args, **kwargs)
            for t in tensors_among((out,)):
                step.note_result(t)
            return out
        if traits_.calls_functions and torch.is_grad_enabled():
            if func in COMPOSED:
                return self._run_op(func, args, kwargs, [], [])
            args, kwargs = watched(func, args, kwargs, self.tensors)
        known, program = self.tensors, self.program
        weights, data, plain = known.classify(tensors)
        if plain:
            for k, entries in known.read_constants(tensors, data):
                self.code.note_kinds(k, entries)
            if not traits_.entrywise:
                numbers += known.stamps(tensors)
        step = OpStep(func, traits_, numbers, program.makers(tensors) if program.made_by else [])
        if not torch.is_grad_enabled():
            return self._run_without_gradient(step, args, kwargs, tensors, weights, data)
        if traits_.like_second:
            data = [t for t in data if t is args[0]]
        elif traits_.like_first:
            data = [t for t in data if t is not args[0]]
        if weights and data and func is Tensor.__getitem__ and picks_one(func, args, known.source):
            data = []
        if traits_.in_place:
            if weights and not data and known.takes_examples(func, args, weights):
                data = [args[0]]
            if self.log.views:
                self.log.move_views_to_base(args[0])
        if weights and (data or looks_up_examples(func, args)):
            return self._run_with_weights(step, args, kwargs, data, weights)
        if data:
            if traits_.reorders is not False or len(data) > 1 or step.made_of:  # seldom
                program.check_order(step, args, data, tensors, self.code.place)
            return self._run_on_data(step, args, kwargs)
        return self._run_without_data(step, args, kwargs, tensors, weights)

    def _run_without_data(
        self, step: OpStep, args: tuple, kwargs: dict, tensors: list[Tensor], weights: list[Tensor]
    ) -> Any:
        """Runs an op on parameters and constants, or a factory, and keeps what its result is."""
        func, in_place, known = step.func, step.traits.in_place, self.tensors
        base = args[0]._base if in_place and not weights else None
        constant = base if base is not None and known.is_constant(base) else None
        out = func(*args, **kwargs)
        result = args[0] if in_place else out
        step.numbers += known.contents(func, out)
        self.program.add(step, tensors_among((result,)))
        if constant is not None:  # constants were written into a part of it
            known.add_constant(constant)
        if known.makes_data_of_python(func):
            self._add_results(tensors_among((out,)))
        else:
            known.add_without_data(func, args, tensors, weights, out, result)
        known.add_blank(func, out)
        return out

    def _run_without_gradient(
        self,
        step: OpStep,
        args: tuple,
        kwargs: dict,
        tensors: list[Tensor],
        weights: list[Tensor],
        data: list[Tensor],
    ) -> Any:
        """Runs an op under ``no_grad``; results made of constants alone are constants, as in spectral norm."""
        target = kwargs.get("out", args[0] if args and step.traits.in_place else None)
        is_constant = target is None or self.tensors.has_been_constant(target)
        self.program.check_order(step, args, data, (), self.code.place)
        out = self._run_on_data(step, args, kwargs)
        if tensors and is_constant and all(t is target for t in data):
            for t in tensors_among((out if target is None else target,)):
                # a view of a parameter requires a gradient even here
                self.tensors.add_derived(step.func, args, weights, t)
        return out

    def _run_with_weights(
        self, step: OpStep, args: tuple, kwargs: dict, data: list[Tensor], weights: list[Tensor]
    ) -> Any:
        """Runs an op on parameters and data. There are no calls before data that no gradient goes back to."""
        for t in data:
            if t.grad_fn is not None:
                if step.traits.reorders is not False or len(data) > 1 or step.made_of:
                    self.program.check_order(step, args, data, data, self.code.place)
                break
        else:
            step.made_of = []
        self.program.used.append(step)
        run = self._run_and_record if step.func in OPS else self._run_op
        out = run(step.func, args, kwargs, data, weights)
        results = (out,) if isinstance(out, Tensor) else tensors_among((out,))
        if results:
            step.note_result(results[0])
        self._add_results(results, with_weights=True)
        return out

    def _run_on_data(self, step: OpStep, args: tuple, kwargs: dict) -> Any:
        """Runs an op without parameters, or without a gradient."""
        out = step.func(*args, **kwargs)
        if isinstance(out, Tensor) and out.requires_grad and out.ndim and out.is_floating_point():  # most of them
            step.note_result(out)
            self.program.used.append(step)
            if self._forwards:
                self.code.shapes = hash((self.code.shapes, out.shape))
        else:
            results = [out] if isinstance(out, Tensor) else tensors_among((args[0] if step.traits.in_place else out,))
            self.program.add(step, results)
            self._add_results(results)
        if step.traits.leaves_torch and args and isinstance(args[0], Tensor):
            self.tensors.left_torch = True
            self.program.moved_unseen |= step.reorders
        return out

    def _run_internal(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a call that only moves entries between ranks: nothing is recorded but that integers may hold data.

        Which steps made its results is forgotten. That is no loss: if any step reordered examples, the layouts of this
        batch are confirmed in any case, because the graph has functions of ``torch.distributed``, unseen inside.
        """
        out = func(*args, **kwargs)
        for t in tensors_among((out,)):
            if not t.is_floating_point():
                self.tensors.add_made(t)
        return out

    def _add_results(self, results: Iterable[Tensor], *, with_weights: bool = False) -> None:
        """Adds results that were computed from data."""
        counts = with_weights or self._forwards  # the loop's other results, such as its logs, round no row
        for t in results:
            if counts:
                self.code.shapes = hash((self.code.shapes, t.shape))
            if not t.ndim or not t.is_floating_point():
                self.tensors.add_made(t)

    # The calls

    def _run_op(self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], weights: list[Tensor]) -> Any:
        """Runs an op without a rule on parameters and data, and records it, or the ops that it is composed of."""
        inside = COMPOSED.get(func) or decomposed(func)
        if inside is None:
            return self._run_and_record(func, args, kwargs, data, weights)
        if saves_elsewhere() is not None:
            self.log.again.note_inside(func, args, kwargs)
        with self._recording_inside():
            return inside(self._add_composed, *args, **kwargs) if func in COMPOSED else inside(*args, **kwargs)

    @contextmanager
    def _recording_inside(self) -> Iterator[None]:
        """Records inside a function that is running, where torch has disabled this mode."""
        _push_mode(self)
        try:
            yield
        finally:
            _pop_mode()

    def _run_and_record(
        self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], weights: list[Tensor]
    ) -> Any:
        known, inputs = self.tensors, edges_of(data, weights, self.tensors)
        in_place = changes_in_place(func)
        copied = in_place and (func in OVERWRITING or func not in OPS)
        before = (args[0].detach().clone(), *args[1:]) if copied else args
        saved: list[tuple[Tensor, Packed]] = []
        if saves_elsewhere() is None:
            out = func(*args, **kwargs)
        else:
            with noting_saved() as saved:
                out = func(*args, **kwargs)
        result = args[0] if in_place else out
        results = [result] if isinstance(result, Tensor) else tensors_among((result,))
        outputs = [*filter(_node, results)]
        if not outputs:
            saved.clear()
            return out
        op = getattr(func, "__name__", None) or str(func)
        self.code.features.add((op, known.all_names(weights)))
        if not any(map(Tensor.is_complex, (*outputs, *data, *weights))):
            wanted = [*filter(_requires_grad, weights)]
            run = RunCall(func, before, kwargs, wanted, data, result, results, in_place)
            is_sharded = self.shards is not None and self.shards.are_met(*outputs, *data, *weights)
            if saves_elsewhere() is None:
                found = self._uses(run, is_sharded=is_sharded)
            else:
                with keeping_saved():
                    found = self._uses(run, is_sharded=is_sharded)
            for y, uses in found:
                self.log.add(op, y, uses, tuple(inputs), self.code.place, saved)
        saved.clear()
        return out

    def _uses(self, run: RunCall, *, is_sharded: bool) -> list[tuple[Tensor, tuple[Use, ...]]]:
        """Returns the uses of parameters in a call, with the outputs that they are used for."""
        if is_sharded:
            assert self.shards is not None
            return self.shards.uses(run)
        uses = uses_by_rule(run, self.tensors)
        if uses is None:
            return uses_by_fallback(run)
        return [(run.result, self.tensors.before_expansion(uses) if self.tensors.expanded else uses)]

    def _add_composed(self, y: Tensor, uses: Iterable[Use]) -> None:
        """Adds the uses of parameters that one of our own compositions reports for y."""
        uses = tuple(use for use in uses if use.weight.requires_grad and self.tensors.source(use.weight) is not None)
        if uses:
            self.log.add(SCAN, y, uses, (), self.code.place)


_node, _requires_grad, _reorders = attrgetter("grad_fn"), attrgetter("requires_grad"), attrgetter("reorders")
