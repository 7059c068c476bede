# SPDX-License-Identifier: Apache-2.0
"""Provides the recording of one batch that compiled graphs may compute, with the tape in reserve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ...support.replay import is_recording_disabled
from ...support.torch_modes import without_autocast
from ..clipped_sum import Clip, Observe
from ..layout import Merging
from ..tape import MEMORY_BUDGET
from .actions import ActionTape, Unfit
from .agreement import Wanted, gradients
from .batches import flattened

if TYPE_CHECKING:  # it imports the compiler, which takes seconds
    from .replay import Batch, Compiled, Learned


UNDERFLOW = 1e-20  # squared norms are upper bounds, so that a row of zeros may have one above 0


class CompiledRecording:
    """Records one batch: by compiled graphs if a plan fits, else by the tape, from which plans are learned.

    Args:
        tape: of the batch.
        compiled: the graphs.
        wanted: of the batch; None leaves it to the tape.
        size: number of rows that the batch is padded to.
        compare: whether the graphs are compared with the tape on this batch.
    """

    def __init__(self, tape: ActionTape, compiled: Compiled, wanted: Wanted | None, size: int, *, compare: bool):
        self._tape, self._compiled, self._wanted = tape, compiled, wanted
        self._size, self._compare = size, compare
        self._batch: Batch | None = None
        self._learned: Learned | None = None
        self._inputs: Any = None
        self._output: Any = None
        self._outputs: list[Node] = []  # the output's nodes, before the losses change it
        self._forwards = 0
        self._by_hand = False  # the loop records code of its own

    # What a recording has

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Returns the trained parameters by name."""
        return self._tape.parameters

    @property
    def code(self) -> Any:
        """Returns the path through the model's code."""
        return self._tape.code

    @property
    def reached(self) -> set[str]:
        """Returns the names of the parameters that the losses depend on."""
        return self._tape.reached if self._learned is None else set(self._learned.reached)

    @property
    def used_otherwise(self) -> set[str]:
        """Returns the names of parameters used other than as the table of a look-up."""
        return self._tape.used_otherwise if self._learned is None else set(self._learned.used_otherwise)

    @property
    def measured(self) -> bool:
        """Returns whether layouts had to be measured."""
        return self._tape.measured

    def start(self, batch: Any) -> None:
        """Records the user's code from the batch on; no plan takes what it does with parameters."""
        self._tape.is_inside = False
        self._tape.start(batch)

    def stop(self) -> None:
        """Ends what `start` began."""
        self._tape.stop()

    def __enter__(self) -> ActionTape:
        self._by_hand = True
        return self._tape.__enter__()

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    # The forward

    def begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Begins to record by the tape."""
        self._inputs = args, kwargs
        self._tape.is_inside = True
        self._tape.begin(model, args, kwargs)

    def end(self, output: Any) -> None:
        """Ends the recording by the tape."""
        self._tape.end(output)
        self._tape.is_inside = False
        self._note_output(output)

    def _note_output(self, output: Any) -> None:
        self._forwards += 1
        self._output = output
        tensors = [t for t in flattened(output)[0] if isinstance(t, Tensor)]
        self._outputs = [t.grad_fn for t in tensors if t.grad_fn is not None]

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls the model, by compiled graphs if possible."""
        compiled = self._compiled
        if (
            self._wanted is None
            or self._forwards
            or self._by_hand
            or not compiled.is_ready
            or not torch.is_grad_enabled()
            or is_recording_disabled()
        ):
            return compiled.model._call_impl(*args, **kwargs)
        try:
            with self._tape.paused():
                output, self._batch = compiled.run(
                    args, kwargs, self._tape, self._wanted, self._size, compare=self._compare
                )
        except Unfit as error:
            compiled.note_redone(error)
        except RuntimeError as error:
            compiled.give_up(_first_line(error))
        else:
            self._note_output(output)
            return output
        return compiled.model._call_impl(*args, **kwargs)

    # The sum

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
        """Returns the clipped sum by name; see ``Tape.clipped_sum``.

        Raises:
            Unfit: the compiled forward does not fit the losses; the batch must be handed out again, for the tape.
        """
        if self._batch is None:
            way = self._way(losses)
            total = self._tape.clipped_sum(
                losses,
                groups,
                clip,
                merging=merging,
                may_miss=may_miss,
                memory_budget=memory_budget,
                observe=observe,
            )
            self._learn(way, losses)
            return total
        try:
            if self._forwards != 1 or self._by_hand:
                raise Unfit("the model was called several times for one batch")
            assert clip is not None
            with without_autocast(losses.device.type):
                return self._sum_of(self._batch, losses, groups, clip, merging, observe)
        except Unfit as error:
            self._compiled.note_redone(error)
            raise

    def _learn(self, way: Any, losses: Tensor) -> None:
        if self._wanted is not None and not self._compiled.is_ready:
            reason = self._tape.unfit or "the tape found no plan"
        else:
            reason = ""
        try:
            if self._forwards != 1 or self._by_hand:
                raise Unfit("the model is called several times for one batch, or code outside of it is recorded")
            if len(losses) > 1:
                self._compiled.learn(self._tape, self._inputs, self._output, way, losses)
        except Unfit as error:
            reason = str(error)
            if self._wanted is None:
                return
        if reason and self._wanted is not None:
            self._compiled.note_redone(Unfit(reason))

    def _sum_of(
        self,
        batch: Batch,
        losses: Tensor,
        groups: Mapping[str, Sequence[str]],
        clip: Clip,
        merging: Merging | None,
        observe: Observe | None,
    ) -> dict[str, Tensor]:
        if any(tensor._version != version for tensor, version in batch.versions):
            raise Unfit("the model's input or output was changed in place")
        self._learned = self._compiled.learned(self._way(losses), batch)
        self._tape.code.note(self._learned.features)
        plan, parameters = batch.plan, self._tape.parameters
        if dict(groups) != dict(plan.rows_of.groups) or losses.dtype != plan.rows_of.dtype:
            raise Unfit("the losses have another type than before")
        bs = gradients(losses, plan.probes, merging)
        norms = plan.rows.norms(parameters, batch.tensors, bs)
        for squares in norms:
            if batch.count < len(squares) and not squares[batch.count :].amax() <= UNDERFLOW:
                raise Unfit("examples that were left out have a gradient, or one is not finite", by_data=True)
        rows = [_Rows(squares[: batch.count], [*names]) for squares, names in zip(norms, groups.values(), strict=True)]
        for label, of_group in zip(groups, rows, strict=True):
            if observe is not None:
                raise Unfit("a rehearsal compares rows")
            of_group.answer = clip(of_group, label)  # pyright: ignore[reportArgumentType]
        size = plan.rows_of.count
        factors = [_extended(of_group.factors, size, squares) for of_group, squares in zip(rows, norms, strict=True)]
        sums = plan.rows.sums(factors)
        extra = {name: value for r in rows for name, value in r.answer.items() if name not in parameters}
        return {**{name: sums[name] for names in groups.values() for name in names}, **extra}

    def _way(self, losses: Tensor) -> frozenset[Any]:
        """Returns what identifies the graph from the model's output to the losses.

        Raises:
            Unfit: a trained parameter is reached there, in a batch computed by compiled graphs.
        """
        leaves = {id(p) for p in self._tape.parameters.values()}
        ends = set(self._outputs)
        found: set[Any] = set()
        stack: list[Node] = [] if losses.grad_fn is None else [losses.grad_fn]
        seen = set(stack)
        while stack:
            node = stack.pop()
            if node in ends:
                continue
            if self._batch is not None and id(getattr(node, "variable", None)) in leaves:
                raise Unfit("the losses reach a parameter other than through the model's output")
            following = [child for child, _ in node.next_functions if child is not None]
            found.add((node.name(), *("" if child in ends else child.name() for child in following)))
            stack += [child for child in following if child not in seen]
            seen.update(following)
        return frozenset(found)


class _Rows:
    """The rows of one group of parameters: norms now, and the sum once the factors of all groups are known."""

    def __init__(self, squares: Tensor, names: list[str]):
        self._squares, self._names = squares, names
        self.num_examples = len(squares)
        self.factors: Tensor = squares
        self.answer: dict[str, Tensor] = {}

    def squared_norms(self) -> Tensor:
        """Returns the squared norms of the rows."""
        return self._squares

    first_squared_norms = squared_norms  # inaccurate ones are noticed before, and left to the tape

    def select(self, index: Tensor) -> Any:
        """Leaves a batch with rows that are not finite to the tape."""
        raise Unfit("a gradient is not finite", by_data=True)

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """Keeps the factors."""
        self.factors = factors
        return {}


def _extended(factors: Tensor, size: int, like: Tensor) -> Tensor:
    full = torch.zeros(size, dtype=factors.dtype, device=like.device)
    full[: len(factors)] = factors
    return full


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
