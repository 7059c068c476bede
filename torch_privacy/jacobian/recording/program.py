# SPDX-License-Identifier: Apache-2.0
"""Notes the calls of torch functions in a forward, and which of them may put examples into another order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from .calls import Call, Output
from .functions import Traits, may_reorder

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


_reorders = attrgetter("reorders")
