# SPDX-License-Identifier: Apache-2.0
"""Records every op call with batch data and a trainable parameter among its inputs.

A use is (op, parameter, input x, gradient edge of the output y). A tensor computed from parameters and constants alone
counts as a parameter itself. Every op runs unchanged, and nothing in the model is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode, _push_mode

from ...ops import COMPOSED, OPS, Use
from ...ops.elementwise import OVERWRITING
from ...support.torch_modes import OpMode, is_any_autocast_enabled, is_transformed, saves_elsewhere, tensors_in
from ..parallel.shards import may_be_parallel
from .called import watched
from .calls import (
    SCAN,
    CallLog,
    OpStep,
    Program,
    RunCall,
    edges_of,
    output_of,
    plain_output,
    uses_by_fallback,
    uses_by_rule,
)
from .coverage import CodePath
from .functions import (
    changes_in_place,
    decomposed,
    looks_up_examples,
    picks_one,
    sorted_out,
    tensors_among,
    traits,
    with_first_by_position,
)
from .packed import Packed, keeping_saved, noting_saved
from .sharded import ShardedTensors
from .tensors import FilledTensors, KnownTensors


class Recorder(OpMode):
    """Records every op call with data and one of ``parameters`` among its inputs, while it is active.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        num_examples: size of the batch, if it is known in advance; shows which tensors can have a part per example.
        filled: what earlier batches showed about tensors that are filled with numbers.
        saved_at: what they showed about the tensors that autograd saves.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor] = (),
        num_examples: int | None = None,
        filled: FilledTensors | None = None,
        saved_at: dict[tuple, int] | None = None,
    ):
        super().__init__()
        self.code, self.parameters = CodePath(), dict(parameters)
        constants = list(constants)
        self.tensors = KnownTensors(self.parameters, constants, num_examples, filled or FilledTensors())
        is_parallel = may_be_parallel([*self.parameters.values(), *constants])
        self.shards = ShardedTensors(self.tensors, self.parameters) if is_parallel else None
        self.program = Program(plain_output if self.shards is None else output_of)
        self.log = CallLog(self.parameters.values(), {} if saved_at is None else saved_at)
        self.reached: set[str] = set()  # names of the parameters that the losses were found to depend on
        self.padding: dict[str, set[int | None]] = {}  # name -> `Use.padding` of each use of the parameter itself
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
        base = args[0]._base if in_place else None
        before = None if base is None else known.source(base)
        stays_known = base is not None and (before is not None or known.is_constant(base))
        out = func(*args, **kwargs)
        result = args[0] if in_place else out
        step.numbers += known.contents(func, out)
        self.program.add(step, tensors_among((result,)))
        if base is not None and stays_known:  # it is a part of base that was written into
            known.add_derived(func, (), weights if before is None else [base, *weights], base)
        if known.makes_data_of_python(func):
            self._add_results(tensors_among((out,)))
        else:
            known.add_without_data(func, args, tensors, weights, out, result)
        known.add_blank(func, out)
        return out

    def _run_without_gradient(
        self, step: OpStep, args: tuple, kwargs: dict, tensors: list[Tensor], weights: list[Tensor], data: list[Tensor]
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
            if out.dtype not in self.code.dtypes or is_any_autocast_enabled():
                self.code.note_dtypes(out)
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
            self.code.note_dtypes(t)
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


_node, _requires_grad = attrgetter("grad_fn"), attrgetter("requires_grad")
