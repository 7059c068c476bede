# SPDX-License-Identifier: Apache-2.0
"""Provides ``check``, which verifies a model and its losses on one batch before training, and its findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer

from ..jacobian.layouts.known import Layouts
from ..jacobian.recording.coverage import CodePath
from ..jacobian.recording.paths import check_losses
from ..jacobian.rows.operator import PlanRow
from ..jacobian.tape import Tape
from ..sampling.variants import CollatedExamples
from ..support.fixed_draws import drawing_in
from ..support.model_state import ModelTensors, Snapshot, attribute_tensors
from ..support.normalization import SmallGroups
from ..support.random_state import RandomState, SeededRandomNumbers, frozen, random_position, seeded
from ..support.torch_modes import UNCOMPILED, tensors_in
from ..support.validate import Refused, quoted
from .checkup import EXACT, NOT_CHECKED, REFUSED, Checkup, ParameterUse, Problem, Verdict
from .recorded_run import RecordedRun, message_of
from .rehearsal.comparison import coarsest_rounding
from .rehearsal.kept import draw_halves
from .rehearsal.rehearsal import Rehearsal, RehearsalMemory
from .rehearsal.row_digests import RowAnswers
from .rehearsal.turn import Answers, Turn
from .requirements import TensorsOf, check_initialized, check_model, check_no_gradient_hooks

LossFunction = Callable[[nn.Module, Any], Tensor]


def check(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Checkup:
    """Runs every self-check of the engine on one batch; needs no dataset, optimizer or noise, and trains nothing.

    Args:
        model: the module to be trained; its parameters that require a gradient are checked.
        loss_fn: (model, batch) -> (n,) losses, one for each example.
        batch: a tensor, or tensors in tuples, lists and mappings, with the n examples along the first dimension; at
            least two examples, of different lengths if examples have lengths.

    Returns:
        A ``Checkup``: a verdict on every parameter, and all problems instead of the first one.

    Guarantees:
        - If ``ok`` is true: the losses have shape (n,) and are finite; no batch normalization is in training mode;
          every trainable parameter reaches the losses, and only through functions with exact rows; the rows with random
          weights add up to the native gradient of the losses with these weights; loss and row of every example stay the
          same when other examples of the batch replace the rest (each half is kept once); the losses of each half
          alone, and of the first example alone, equal those in the whole batch; what the forward changes in buffers, or
          in attributes that it reads later, does not depend on the examples; it changes no parameter.
        - Afterwards the tensors and modes of the model are as before, and so is the random state of torch, numpy and
          Python. Plain attributes that the forward sets keep what the last run stored there. During the check the
          model's tensors take twice their memory.

    Edge cases:
        Batch normalization in training mode is a problem; the other checks are then made with it in eval mode. If the
        forward draws random numbers, parts of the batch are compared with all modules in eval mode and, if that is
        not enough, with random numbers replaced by their means; if it is still random, a note says that parts were
        not compared.

    Raises:
        Refused: no parameter requires a gradient, or one is not initialized yet (lazy modules).

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        >>> checkup = check(model, lambda model, x: model(x).square().sum(1), torch.randn(8, 3))
        >>> checkup.ok
        True
    """
    with UNCOMPILED:
        return _Examination(model, loss_fn, batch).checkup()


class _Examination:
    """Runs one ``check``: keeps the model's original state."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batch: Any):
        self._model, self._loss_fn, self._batch = model, loss_fn, batch
        self._parameters = _trainable(model)
        # The checks of requirements.py expect an optimizer; they read only its list of parameters.
        self._optimizer: Optimizer = SGD(self._parameters.values(), lr=0.0)
        self._tensors_of = TensorsOf(model, self._optimizer, attribute_tensors(model))
        self._found = Findings()
        self._num_examples = 0
        self._layouts = Layouts()

    def checkup(self) -> Checkup:
        """Runs all checks, then restores the model and the random state."""
        with seeded(torch.initial_seed()):  # a training in another thread shares the random state
            self._random, self._before = RandomState(), Snapshot(self._model)
            try:
                self._run()
            finally:
                self._before.restore()
        verdicts = tuple(self._found.verdict(name, p) for name, p in self._parameters.items())
        return Checkup(self._num_examples, verdicts, tuple(self._found.problems), tuple(self._found.notes))

    def _run(self) -> None:
        """Runs all checks; those of rows and independence need usable losses."""
        for name, p in self._parameters.items():
            self._found.passes("parameters", (name,), check_no_gradient_hooks, {name: p})
        batch_norm_parameters = self._put_batch_norms_in_eval_mode()
        with SmallGroups(self._model, self._found.notes.append):
            losses = self._losses(self._batch)
        if self._usable(losses):
            self._num_examples = len(losses)
            self._check_parameters([name for name in self._parameters if name not in batch_norm_parameters])
            self._check_independence()

    def _losses(self, batch: Any) -> Any:
        """Returns the losses of a batch, with the original model and the random numbers of the first run."""
        self._before.restore_tensors()
        self._random.restore()
        with torch.enable_grad():
            return self._loss_fn(self._model, batch)

    def _put_batch_norms_in_eval_mode(self) -> tuple[str, ...]:
        """Puts batch normalization in eval mode, reports it as a problem, and returns the names of its parameters."""
        batch_norms = [m for m in self._model.modules() if isinstance(m, _BatchNorm) and m.training]
        parameters = {id(p) for m in batch_norms for p in m.parameters()}
        names = tuple(name for name, p in self._parameters.items() if id(p) in parameters)
        if not self._found.passes("modules", names, check_model, self._model, self._optimizer):
            self._found.notes.append("All other checks were made with the batch normalization in eval mode.")
        for module in batch_norms:
            module.training = False
        return names

    def _usable(self, losses: Any) -> bool:
        """True if the other checks can go on with these losses; reports the problem otherwise."""
        if not self._found.passes("losses", (), check_losses, losses):
            return False
        n, sizes = len(losses), sorted({len(t) for t in tensors_in(self._batch) if t.ndim})
        non_finite = (~losses.isfinite()).nonzero().flatten().tolist()
        if sizes and n not in sizes:
            examples = " or ".join(map(str, sizes))
            self._found.blame(
                "losses", f"there are {n} for a batch of {examples} examples: must be one for each example."
            )
        elif n < 2:
            self._found.blame("batch", f"it has {n} examples: must be at least 2, so that one can depend on the other.")
        elif non_finite:
            listed = quoted(non_finite, at_most=5)
            self._found.blame("losses", f"those of examples {listed} are not finite, nor would their gradients be.")
        return not (non_finite or n < 2 or (sizes and n not in sizes))

    def _check_parameters(self, names: Sequence[str]) -> None:
        """Finds the parameters with exact rows, by leaving out those that each refusal names; reports the refusals."""
        refused: dict[str, list[Refusal]] = {}  # by kind
        run = self._record(names)
        while run.refusal is not None:
            blamed = _named_in(run.refusal, names) or tuple(names)
            refused.setdefault(_kind(run.refusal), []).append((blamed, run.refusal))
            names = [name for name in names if name not in blamed]
            run = self._record(names)
        self._found.exact, self._found.plan = names, run.plan()
        for kind in refused.values():
            self._found.blame_all(kind)

    def _record(self, names: Sequence[str]) -> RecordedRun:
        """Records the batch with respect to these parameters, while the others are frozen."""
        self._before.restore_tensors()  # before the tape notes the versions of its tensors
        run = RecordedRun(self._tensors(), names, self._num_examples)
        if names:
            with frozen(self._parameters, except_for=names):
                run.run(self._model, lambda: self._losses(self._batch))
            self._found.meetings |= run.meetings()
        return run

    def _check_independence(self) -> None:
        """Checks that losses and rows stay the same when other examples of the batch are replaced or left out."""
        n = self._num_examples
        generator = np.random.default_rng(0)
        examples = CollatedExamples(self._batch, n, generator)
        if examples.without(np.ones(n, bool)) is None:
            self._found.notes.append(
                "Nothing was rehearsed, because no tensor in the batch has the examples first: whether examples depend "
                "on each other is not known. Training replaces items before they are collated, and will show it."
            )
            return
        kept = draw_halves(n, generator)
        first = np.arange(n) == 0
        memory = RehearsalMemory()
        turns = Rehearsal(self._model, examples, kept, generator, alone=[*kept, first], memory=memory).turns()
        try:
            turn = next(turns)
            while True:
                turn = turns.send(self._answers(turn))
        except StopIteration:
            self._found.notes += sorted(memory.notes)
        except Refused as error:
            self._found.blame("examples", message_of(error), _named_in(str(error), self._all_names()))
        finally:
            turns.close()

    def _answers(self, turn: Turn) -> Answers:
        """Runs the user's losses on the batch of one turn, and returns what the rehearsal compares."""
        for act in turn.before:
            act()
        numbers = SeededRandomNumbers(b"check")
        try:
            start = random_position()
            numbers.begin(b"check")
            with drawing_in(self._model, turn.draws, turn.count) as turn.drawn, torch.enable_grad():
                trace = nullcontext() if turn.trace is None else turn.trace.recording(turn.count)
                with trace:
                    losses, rows, code = self._losses_and_rows(turn)
            end = random_position()
        finally:
            numbers.close()
        changes = {} if turn.state is None else turn.state.changes()
        return Answers(
            losses.detach()[:, None],
            rows,
            changes,
            end,
            drew=end != start,
            rounding=coarsest_rounding(self._parameters.values(), code),
            shapes=code.shapes,
        )

    def _losses_and_rows(self, turn: Turn) -> tuple[Tensor, RowAnswers | None, CodePath]:
        """Returns losses, norms and fingerprints of the exact rows, and what was seen of the code in the forward."""
        if not turn.rows or not self._found.exact:
            return self._losses_of(turn), None, CodePath()
        tensors = self._tensors()
        frozen_names = (p for name, p in tensors.trained.items() if name not in self._found.exact)
        exact = {name: tensors.trained[name] for name in self._found.exact}
        rows = RowAnswers()
        with frozen(self._parameters, except_for=self._found.exact):
            with Tape(exact, [*frozen_names, *tensors.constants], self._layouts, turn.count) as tape:
                tape.note_inputs(turn.batch)
                losses = self._losses_of(turn)
            rows.take(tape.jacobian(losses, may_miss=exact), "all")
        return losses, rows, tape.code

    def _losses_of(self, turn: Turn) -> Tensor:
        """Returns the losses of a turn's batch; refuses losses of another shape, and code that fails on it."""
        try:
            losses = self._loss_fn(self._model, turn.batch)
        except Exception as error:  # of any kind, raised by the user's code
            raise Refused(
                f"the losses of {turn.count} of the {self._num_examples} examples alone cannot be computed: "
                f"{_first_line(error)} Batches of private training have any size; write model and losses for any n."
            ) from error
        if not isinstance(losses, Tensor) or losses.shape != (turn.count,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise Refused(
                f"the losses of {turn.count} of the {self._num_examples} examples alone have shape {shape}: must be "
                f"({turn.count},). Write model and losses for any n; squeeze(), for example, drops an n of 1; "
                "squeeze(1) does not."
            )
        return losses

    def _tensors(self) -> ModelTensors:
        """Returns the present tensors of the model."""
        return self._tensors_of()

    def _all_names(self) -> list[str]:
        """Returns the names of all parameters and buffers."""
        return [name for name, _ in (*self._model.named_parameters(), *self._model.named_buffers())]


def _trainable(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Returns the parameters that require a gradient; refuses lazy modules, and a model without any."""
    check_initialized(model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise Refused("check: no parameter of the model requires a gradient; there is nothing to train.")
    return trainable


def _named_in(message: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the names that the message has in quotes."""
    in_quotes = set(re.findall(r"'([^']+)'", message))
    return tuple(name for name in names if name in in_quotes)


def _kind(refusal: str) -> str:
    """Returns the refusal without names and numbers, so that refusals of one kind are equal."""
    return " ".join(re.sub(r"'[^']*'|[\d(),]", " ", refusal).split())


def _first_line(error: Exception) -> str:
    """Returns the type and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .:") + "."


Refusal = tuple[tuple[str, ...], str]  # names of the parameters concerned, and the message


class Findings:
    """Collects the findings of one ``check``.

    Attributes:
        problems, notes: in the order in which they were found.
        meetings: name of a parameter -> the calls that use it.
        plan: how norms and sums of the exact parameters are computed.
        exact: names of the parameters with exact rows.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.meetings: dict[str, tuple[ParameterUse, ...]] = {}
        self.plan: list[PlanRow] = []
        self.exact: Sequence[str] = ()

    def blame(self, check: str, text: str, names: tuple[str, ...] = ()) -> None:
        """Reports a problem."""
        self.problems.append(Problem(check, names, text))

    def passes(self, check: str, names: tuple[str, ...], run: Callable, *args: Any) -> bool:
        """True if ``run(*args)`` passes; reports its refusal as a problem of these parameters otherwise."""
        try:
            run(*args)
        except Refused as error:
            self.blame(check, message_of(error), names)
            return False
        return True

    def blame_all(self, refusals: list[Refusal]) -> None:
        """Reports refusals of one kind as one problem."""
        (first, text), *others = refusals
        more = [name for names, _ in others for name in names]
        also = f" The same holds for {quoted(more, at_most=5)}." if more else ""
        self.blame("parameters", text + self._in_modules(first) + also, (*first, *more))

    def _in_modules(self, names: Sequence[str]) -> str:
        """Returns a sentence with the modules that use these parameters; empty if there is none."""
        modules = {met.module for name in names for met in self.meetings.get(name, ()) if met.module}
        return f" (In module {quoted(sorted(modules))}.)" if modules else ""

    def verdict(self, name: str, p: Tensor) -> Verdict:
        """Returns the verdict on one parameter."""
        refused = any(name in problem.names for problem in self.problems)
        verdict = REFUSED if refused else EXACT if name in self.exact else NOT_CHECKED
        plan = tuple(row for row in self.plan if name in row.names)
        return Verdict(name, tuple(p.shape), self.meetings.get(name, ()), plan, verdict)
