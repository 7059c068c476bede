# SPDX-License-Identifier: Apache-2.0
"""Replays plans: a compiled forward with probes, then compiled norms and sums, each compared with the tape first."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...support.replay import RandomState, recording_disabled
from ..layout import Layouts
from .actions import ActionTape, Unfit
from .agreement import RandomLosses, Wanted, answers_of, check_answers, check_outputs, factors_of
from .batches import Dimensions, Padded, flattened
from .light import ObservingMode, run_with_probes
from .rows import CompiledRows, RowsOf

MAX_PLANS = 16  # kinds of batches; more mean that the model or its inputs change all the time
MAX_REDONE = 3  # batches that compiled graphs began and the tape had to make again, or that it could not plan

_TRACES = itertools.count()


@torch.compiler.assume_constant_result
def _trace_number() -> int:
    """Returns a number that dynamo asks for once per trace, so that each graph returns its own."""
    return next(_TRACES)


def _traced(*args: Any) -> tuple[Any, list[Tensor], bool, int]:
    return *run_with_probes(*args), _trace_number()


def _new_traced() -> Callable:
    """Returns a copy with code of its own: dynamo counts compilations by code, and refuses the ninth in a process."""
    return FunctionType(_traced.__code__.replace(), _traced.__globals__)


@dataclass(frozen=True)
class Learned:
    """Holds what the tape has shown about one path of the user's code: the model's calls, and the way to the losses."""

    actions: tuple[tuple[str, str], ...]
    layouts: tuple[tuple[int, int, int], ...]  # of every call: dimension, positions before and after the examples
    dtype: torch.dtype  # of the losses
    features: frozenset[Any]
    reached: frozenset[str]
    used_otherwise: frozenset[str]


@dataclass(eq=False)
class Plan:
    """Compiled graphs for all batches with inputs of the same sizes."""

    actions: tuple[tuple[str, str], ...]
    layouts: tuple[tuple[int, int, int], ...]
    probes: list[Tensor]
    kept: tuple[bool, ...]  # for each tensor that the calls use, whether the rows need it
    rows_of: RowsOf
    rows: CompiledRows
    forward: Callable
    trace: int = -1  # number of the compiled forward that was compared with the tape


@dataclass(frozen=True)
class Batch:
    """A batch between its compiled forward and its losses."""

    plan: Plan
    count: int  # rows, without the padding
    outputs: list[Tensor]  # as the user got them, those with a gradient
    versions: list[tuple[Tensor, int]]  # of inputs and outputs
    tensors: list[Tensor]


def _arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of torch.compile: one graph, and the model's own random numbers, for comparisons."""
    arguments = {"dynamic": False, **settings, "fullgraph": True}
    if arguments.get("backend", "inductor") == "inductor":
        from torch._inductor import list_mode_options

        mode, options = arguments.pop("mode", None), arguments.get("options") or {}
        arguments["options"] = {**(list_mode_options(mode) if mode else {}), "fallback_random": True, **options}
    return arguments


class Compiled:
    """Holds the compiled graphs of one model, and what the tape has shown about it.

    Args:
        model: the user's model.
        settings: of torch.compile.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any]):
        self.model = model
        self._settings = _arguments(settings)
        self._inputs, self._outputs = Dimensions(), Dimensions()
        self._learned: dict[Any, Learned] = {}  # way from the model's output to the losses -> what was learned
        self._plans: dict[Any, Plan] = {}
        self._layouts = Layouts()  # of comparisons
        self._num_redone = 0
        self.num_compared = self.num_replayed = 0
        self.given_up = ""  # why the tape makes all batches from now on

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        """Compiles a graph without guards, because it always gets inputs of the same sizes."""
        backend = self._settings.get("backend", "inductor")
        if backend == "inductor":
            from torch._inductor.compile_fx import compile_fx  # takes seconds to import

            return compile_fx(graph, [*inputs], config_patches=self._settings["options"])  # pyright: ignore[reportReturnType]
        if isinstance(backend, str):
            from torch._dynamo.backends.registry import lookup_backend

            backend = lookup_backend(backend)
        return backend(graph, [*inputs])

    def give_up(self, reason: str) -> None:
        """Leaves all later batches to the tape, and says so once."""
        if not self.given_up:
            self.given_up = reason
            warnings.warn(f"PrivateTraining: the model runs uncompiled from here on: {reason}.", stacklevel=2)

    def note_redone(self, error: Unfit) -> None:
        """Counts a batch that had to be left to the tape."""
        self._num_redone += not error.by_data
        if self._num_redone >= MAX_REDONE:
            self.give_up(str(error))

    # What the tape shows

    @property
    def is_ready(self) -> bool:
        """True if there is something to replay."""
        return bool(self._learned) and not self.given_up

    def learn(self, tape: ActionTape, inputs: Any, output: Any, way: Any, losses: Tensor) -> None:
        """Takes what the tape found on a batch."""
        layouts = tuple((layout.dim, layout.before, layout.after) for layout in tape.regular_layouts())
        self._inputs.learn(inputs, len(losses))
        self._outputs.learn(output, len(losses))
        features = frozenset(tape.code.features)
        known = self._learned.get(way)
        if known is not None:
            if (known.actions, known.layouts) != (tuple(tape.actions), layouts):
                raise Unfit("the model takes several paths")
            features |= known.features
        self._learned[way] = Learned(
            tuple(tape.actions),
            layouts,
            losses.dtype,
            features,
            frozenset(tape.reached),
            frozenset(tape.used_otherwise),
        )

    def learned(self, way: Any, batch: Batch) -> Learned:
        """Returns what was learned about a batch's way to its losses."""
        known = self._learned.get(way)
        if known is None or (known.actions, known.layouts) != (batch.plan.actions, batch.plan.layouts):
            raise Unfit("the losses were computed in a new way")
        return known

    # The forward

    def run(
        self, args: tuple, kwargs: dict[str, Any], tape: ActionTape, wanted: Wanted, size: int, *, compare: bool
    ) -> tuple[Any, Batch]:
        """Returns the model's output, computed by a compiled graph, with what its rows are computed from.

        Args:
            args: of the model.
            kwargs: of the model.
            tape: made for this batch; it has not begun.
            wanted: of the batch.
            size: number of rows that the batch is padded to.
            compare: whether the graphs must be compared with the tape again.

        Raises:
            Unfit: the batch must be left to the tape.
        """
        padded = Padded.to(args, kwargs, self._inputs, wanted.count * wanted.views, size * wanted.views)
        key = (padded.signature, self.model.training, tuple(wanted.groups), torch.is_autocast_enabled("cpu"))
        plan = self._plans.get(key)
        results = None if plan is None or compare else self._replay(plan, padded)
        if plan is not None and results is not None and results[2] == plan.trace:
            output, tensors, _ = results
        else:  # also if dynamo compiled the forward again, or chose another graph
            plan = plan if compare else None
            state = RandomState()
            tape = ActionTape(tape.parameters, tape.constant_tensors(), self._layouts, padded.size)
            plan, output, tensors = self._compared(plan, padded, tape, replace(wanted, count=size), state)
            self._check_padding(args, kwargs, padded, output, tape, state)
            self._plans[key] = plan
            if len(self._plans) > MAX_PLANS:
                self.give_up(f"its inputs had more than {MAX_PLANS} sizes")
                raise Unfit(self.given_up)
        self.num_replayed += 1
        cut = padded.cut(output, self._outputs)
        outputs = [t for t in flattened(cut)[0] if isinstance(t, Tensor)]
        used = [*outputs, *(t for t in flattened((args, kwargs))[0] if isinstance(t, Tensor))]
        differentiable = [t for t in outputs if t.requires_grad]
        return cut, Batch(plan, wanted.count, differentiable, [(t, t._version) for t in used], tensors)

    def _replay(self, plan: Plan, padded: Padded) -> tuple[Any, list[Tensor], int]:
        args = (self.model._call_impl, padded.args, padded.kwargs, plan.actions, plan.probes, plan.kept)
        with torch.compiler.set_stance("default"):
            output, tensors, fits, trace = plan.forward(*args)
        if not fits:
            raise Unfit("the compiled model uses parameters in other calls than the model itself")
        return output, tensors, trace

    # Comparisons with the tape

    def _compared(
        self, plan: Plan | None, padded: Padded, tape: ActionTape, wanted: Wanted, state: RandomState
    ) -> tuple[Plan, Any, list[Tensor]]:
        """Returns the plan, new or not, once its graphs agreed with the tape on this batch, and their results."""
        self.num_compared += 1
        versions = [(buffer, buffer._version) for buffer in self.model.buffers()]
        with tape:
            tape.note_inputs(padded.args, padded.kwargs)
            output = self._eager_call(*padded.args, **padded.kwargs)
        if any(buffer._version != version for buffer, version in versions):
            raise Unfit("the model changes its buffers")
        exact = RandomLosses(self._outputs, padded.size, output)
        expected = answers_of(tape, exact.of(output), wanted)
        plan = self._plan(padded, tape, exact, wanted, state) if plan is None else plan
        state.restore()
        replayed, tensors, plan.trace = self._replay(plan, padded)
        check_outputs(output, replayed, tape)
        norms = plan.rows.norms(tape.parameters, tensors, exact.gradients(replayed, plan.probes, wanted))
        sums = plan.rows.sums([factors_of(squares) for squares in norms])
        check_answers(expected, (norms, sums), tape)
        state.restore()
        return plan, *self._replay(plan, padded)[:2]  # once more: the comparison has used up the graph

    def _check_padding(
        self, args: tuple, kwargs: dict, padded: Padded, output: Any, tape: ActionTape, state: RandomState
    ) -> None:
        """Raises ``Unfit`` if the padding changed the output; random numbers would, in any case."""
        after = RandomState()
        if padded.size != padded.count and state == after:
            with torch.no_grad():
                check_outputs(self._eager_call(*args, **kwargs), padded.cut(output, self._outputs), tape)
            after.restore()

    def _plan(self, padded: Padded, tape: ActionTape, exact: RandomLosses, wanted: Wanted, state: RandomState) -> Plan:
        """Returns a plan that repeats what the tape did on a batch; its forward is not compiled yet."""
        budget = None if tape.budget is None else tape.budget.left_for_rows()
        if budget is None:
            raise Unfit("inputs and gradients of all calls together exceed memory_budget")
        layouts, actions, names = tape.regular_layouts(), tuple(tape.actions), dict(self.model.named_parameters())
        observing = ObservingMode(actions, {id(p): name for name, p in names.items()})
        state.restore()
        with observing:
            self._eager_call(*padded.args, **padded.kwargs)
        program = observing.program
        probes = [
            torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
            for shape, dtype, device in program.outputs
        ]
        state.restore()
        everything = (True,) * len(observing.tensors)
        call = self._eager_call
        output, tensors, fits = run_with_probes(call, padded.args, padded.kwargs, actions, probes, everything)
        if not fits:
            raise Unfit("the model does not repeat its calls")
        rows_of = RowsOf(
            program,
            layouts,
            wanted.groups,
            wanted.merging(),
            wanted.count,
            next(iter(self._learned.values())).dtype,
            budget,
        )
        others = {name: p for name, p in names.items() if name not in tape.parameters and name in program.parameters()}
        bs = exact.gradients(output, probes, wanted)
        rows = CompiledRows(rows_of, tape.parameters, others, tensors, bs, self._compile)
        kinds = tuple((layout.dim, layout.before, layout.after) for layout in layouts)
        return Plan(actions, kinds, probes, rows.wanted, rows_of, rows, torch.compile(_new_traced(), **self._settings))

    def _eager_call(self, *args: Any, **kwargs: Any) -> Any:
        with recording_disabled(), torch.compiler.set_stance("force_eager"):
            return self.model._call_impl(*args, **kwargs)
