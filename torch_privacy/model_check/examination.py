# SPDX-License-Identifier: Apache-2.0
"""``check``: everything the engine verifies about a model and its losses, on one batch, before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer

from ._model import Attributes, Census, check_model, check_no_hooks, take_census
from ._replay import OwnRandomNumbers, RandomState, Snapshot, frozen, next_numbers
from ._torch_modes import uncompiled
from ._validate import Refused
from .batches import CollatedExamples
from .jacobian.calls import Call
from .jacobian.independence import Answers, Rehearsal, RowAnswers, Turn, halves, without_random_numbers
from .jacobian.layout import Layouts, Measurement
from .jacobian.operator import Jacobian, PlanRow
from .jacobian.tape import Tape, check_losses
from .ops import AnyLayout, Layout
from .ops.fallback import ReplayUse

LossFunction = Callable[[nn.Module, Any], Tensor]
_Refusal = tuple[tuple[str, ...], str]  # names of the parameters blamed, and the engine's words

EXACT, REFUSED, NOT_CHECKED = "exact", "refused", "not checked"


@dataclass(frozen=True)
class Problem:
    """Something that training would refuse, or that would make its guarantee void; ``text`` says what to do."""

    check: str  # the one that found it
    names: tuple[str, ...]  # parameters and buffers concerned
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(frozen=True)
class Meeting:
    """A call of a torch function that met a parameter."""

    op: str  # the function's name
    module: str  # dotted name of the innermost module whose forward made the call; the model itself is ""
    inside: bool  # whether the model's own forward was running
    layout: str  # shape of the output with n where the examples sit, "(n, 16, 64)", "(n·16, 64)"; "" if not measured
    generic: bool  # a function without a rule of its own: its rows come from its own backward, which is slower


@dataclass(frozen=True)
class Verdict:
    """What the check found about one trainable parameter."""

    name: str
    shape: tuple[int, ...]
    meetings: tuple[Meeting, ...]
    plan: tuple[PlanRow, ...]
    verdict: str  # "exact", "refused", "not checked"

    @property
    def ops(self) -> tuple[str, ...]:
        """Torch functions that met the parameter; a star marks those without a rule of their own."""
        return tuple(dict.fromkeys(met.op + "*" * met.generic for met in self.meetings))

    @property
    def layouts(self) -> tuple[str, ...]:
        """Where the examples sit in these functions' outputs."""
        return tuple(dict.fromkeys(met.layout for met in self.meetings if met.layout))

    @property
    def methods(self) -> tuple[str, ...]:
        """How the norms are computed."""
        return tuple(dict.fromkeys(row.norms_by for row in self.plan))

    @property
    def kept(self) -> tuple[str, ...]:
        """What the clipped sum is made of."""
        return tuple(dict.fromkeys(row.keeps for row in self.plan))


@dataclass(frozen=True)
class Checkup:
    """What ``check`` found; prints as a table of verdicts, followed by every problem with its cure."""

    num_examples: int  # 0 if there were no losses to count
    verdicts: tuple[Verdict, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # what could not be checked, or is worth knowing

    @property
    def ok(self) -> bool:
        """Whether no check found a problem."""
        return not self.problems

    def raise_if_refused(self) -> None:
        """Raise ``Refused`` with all problems, if there are any."""
        if self.problems:
            raise Refused("\n".join(map(str, self.problems)))

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        from .cli.tables import checkup_text

        return checkup_text(self)


def check(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Checkup:
    """Run every self-check of the engine on one batch: no data set, no optimizer, no noise, and nothing is trained.

    Args:
        model: the module to be trained; its parameters that require a gradient are checked.
        loss_fn: (model, batch) -> (n,) losses, one for each example.
        batch: a tensor, or tuples, lists and mappings of such, with the n examples first; at least two of them, and
            of different lengths if examples have lengths.

    Returns:
        A ``Checkup``: a verdict for every parameter, and all problems instead of the first one.

    Guarantees:
        - ``ok`` says: the losses have shape (n,) and are finite; no batch normalization is in training mode; every
          trainable parameter reaches the losses, and only through functions with exact rows; the rows add up to the
          native gradient, and two rows drawn at random equal backwards of their own; loss and row of every example
          stay when other examples of the batch take the places of the rest (each half is kept once); each half, and
          the first example, have alone the losses that they have in the whole batch; what the forward changes in
          buffers, or in attributes that it reads later, does not depend on the examples; it changes no parameter.
        - Afterwards the tensors and modes of the model are what they were, and so is the random state of torch, numpy
          and Python. Plain attributes that the forward sets hold what the last run left there. Meanwhile the model's
          tensors are held twice.

    Edge cases:
        With batch normalization in training mode, which is a problem, the other checks go on in its eval mode. Where
        the forward draws random numbers, parts of the batch are compared with all modules in eval mode and, if that is
        not enough, with random numbers replaced by their means; if it is still random then, a note says that parts
        were not compared.

    Raises:
        Refused: no parameter requires a gradient, or one is not initialized yet (lazy modules).

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        >>> checkup = check(model, lambda model, x: model(x).square().sum(1), torch.randn(8, 3))
        >>> checkup.ok
        True
    """
    with uncompiled():
        return _Examination(model, loss_fn, batch).checkup()


class _Examination:
    """One run of ``check``: the model as it was, and what was found so far."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batch: Any):
        self._model, self._loss_fn, self._batch = model, loss_fn, batch
        self._attributes = Attributes(model)
        self._parameters = _trainable(model)
        # A stand-in: only its list of parameters is looked at.
        self._optimizer: Optimizer = SGD(self._parameters.values(), lr=0.0)
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._meetings: dict[str, tuple[Meeting, ...]] = {}
        self._plan: list[PlanRow] = []
        self._exact: Sequence[str] = ()
        self._num_examples = 0
        self._layouts = Layouts()

    def checkup(self) -> Checkup:
        """Run all checks, and leave model and random state as they were."""
        self._random, self._before = RandomState(), Snapshot(self._model)
        try:
            self._run()
        finally:
            self._before.restore()
            self._random.restore()
        verdicts = tuple(self._verdict(name, p) for name, p in self._parameters.items())
        return Checkup(self._num_examples, verdicts, tuple(self._problems), tuple(self._notes))

    def _run(self) -> None:
        for name, p in self._parameters.items():
            self._passes("parameters", (name,), check_no_hooks, {name: p})
        set_aside = self._set_aside_batch_norms()
        losses = self._losses(self._batch)
        if self._usable(losses):
            self._num_examples = len(losses)
            self._check_parameters([name for name in self._parameters if name not in set_aside])
            self._check_independence()

    def _losses(self, batch: Any) -> Any:
        """The losses of a batch, by the model and with the random numbers of the first run."""
        self._before.restore_tensors()
        self._random.restore()
        with torch.enable_grad():
            return self._loss_fn(self._model, batch)

    def _set_aside_batch_norms(self) -> tuple[str, ...]:
        """Names of the parameters of batch normalization in training mode, which is put in eval mode meanwhile."""
        found = [m for m in self._model.modules() if isinstance(m, _BatchNorm) and m.training]
        own = {id(p) for m in found for p in m.parameters()}
        names = tuple(name for name, p in self._parameters.items() if id(p) in own)
        if not self._passes("modules", names, check_model, self._model, self._optimizer):
            self._notes.append("All other checks were made with the batch normalization in eval mode.")
        for module in found:
            module.training = False
        return names

    def _usable(self, losses: Any) -> bool:
        """Whether the other checks can go on with these losses."""
        if not self._passes("losses", (), check_losses, losses):
            return False
        n, sizes = len(losses), sorted({len(t) for t in _tensors(self._batch) if t.ndim})
        wrong = (~losses.isfinite()).nonzero().flatten().tolist()
        if sizes and n not in sizes:
            examples = " or ".join(map(str, sizes))
            self._blame("losses", f"there are {n} for a batch of {examples} examples: must be one for each example.")
        elif n < 2:
            self._blame("batch", f"it has {n} examples: must be at least 2, so that one can depend on the other.")
        elif wrong:
            self._blame("losses", f"those of examples {_listed(wrong)} are not finite, nor would be their gradients.")
        return not (wrong or n < 2 or (sizes and n not in sizes))

    def _check_parameters(self, names: Sequence[str]) -> None:
        """Rows in the parameters that there is nothing to say against; the others are set aside problem by problem."""
        refused: dict[str, list[_Refusal]] = {}  # by kind
        attempt = self._attempt(names)
        while attempt.refusal is not None:
            blamed = _named_in(attempt.refusal, names) or tuple(names)
            refused.setdefault(_kind(attempt.refusal), []).append((blamed, attempt.refusal))
            names = [name for name in names if name not in blamed]
            attempt = self._attempt(names)
        self._exact, self._plan = names, attempt.plan()
        for kind in refused.values():
            self._blame_all(kind)
        self._note_uses_outside()

    def _attempt(self, names: Sequence[str]) -> _Attempt:
        """The tape over some of the parameters, the others being frozen."""
        self._before.restore_tensors()  # now, since the tape knows its tensors by version
        attempt = _Attempt(self._census(), names, self._num_examples)
        if names:
            with frozen(self._parameters, but=names):
                attempt.run(self._model, lambda: self._losses(self._batch))
            self._meetings |= attempt.meetings()
        return attempt

    def _blame_all(self, refusals: list[_Refusal]) -> None:
        """Refusals of one kind, told once."""
        (first, text), *others = refusals
        more = [name for names, _ in others for name in names]
        also = f" The same holds for {_listed(more)}." if more else ""
        self._blame("parameters", text + self._in_modules(first) + also, (*first, *more))

    def _note_uses_outside(self) -> None:
        outside = [name for name, meetings in self._meetings.items() if not all(met.inside for met in meetings)]
        if outside:
            self._notes.append(
                f"Parameter {_quoted(outside)} is used outside of the model's own forward. With PrivateTraining put "
                "that under `with training.record():`."
            )

    def _check_independence(self) -> None:
        """Do losses and rows stay when other examples take the places of some, or when some are left out?"""
        n = self._num_examples
        generator = np.random.default_rng(0)
        examples = CollatedExamples(self._batch, n, generator)
        if examples.without(np.ones(n, bool)) is None:
            self._notes.append(
                "Nothing was rehearsed, for no tensor in the batch has the examples first: whether examples depend on "
                "each other is not known. Training replaces items before they are collated, and will find out."
            )
            return
        kept = halves(n, generator)
        first = np.arange(n) == 0
        notes: set[str] = set()
        turns = Rehearsal(self._model, examples, kept, alone=[*kept, first], notes=notes).turns()
        try:
            turn = next(turns)
            while True:
                turn = turns.send(self._answers(turn))
        except StopIteration:
            self._notes += sorted(notes)
        except Refused as error:
            self._blame("examples", _words(error), _named_in(str(error), self._all_names()))
        finally:
            turns.close()

    def _answers(self, turn: Turn) -> Answers:
        """What the user's losses give on the batch of a turn."""
        turn.prepare()
        numbers = OwnRandomNumbers(b"check")
        try:
            start = next_numbers()
            numbers.begin(b"check")
            with without_random_numbers(self._model, turn.random), torch.enable_grad():
                trace = nullcontext() if turn.trace is None else turn.trace.watching(turn.count)
                with trace:
                    losses, rows, shapes = self._losses_and_rows(turn)
            end = next_numbers()
        finally:
            numbers.close()
        changes = {} if turn.state is None else turn.state.changes()
        return Answers(losses.detach()[:, None], rows, changes, end, drew=end != start, shapes=shapes)

    def _losses_and_rows(self, turn: Turn) -> tuple[Tensor, RowAnswers | None, int]:
        if not turn.rows or not self._exact:
            return self._losses_of(turn), None, 0
        census = self._census()
        frozen_names = (p for name, p in census.trained.items() if name not in self._exact)
        exact = {name: census.trained[name] for name in self._exact}
        rows = RowAnswers()
        with frozen(self._parameters, but=self._exact):
            with Tape(exact, [*frozen_names, *census.constants], self._layouts, turn.count) as tape:
                tape.note_inputs(turn.batch)
                losses = self._losses_of(turn)
            rows.take(tape.jacobian(losses, may_miss=exact), "all")
        return losses, rows, tape.code.shapes

    def _losses_of(self, turn: Turn) -> Tensor:
        try:
            losses = self._loss_fn(self._model, turn.batch)
        except Exception as error:  # whatever the loss function stumbles over
            raise Refused(
                f"the losses of {turn.count} of the {self._num_examples} examples alone cannot be computed: "
                f"{_first_line(error)} Batches of private training have any size; write model and losses for any n."
            ) from error
        if not isinstance(losses, Tensor) or losses.shape != (turn.count,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise Refused(
                f"the losses of {turn.count} of the {self._num_examples} examples alone have shape {shape}: must be "
                f"({turn.count},). Write model and losses for any n; squeeze(), for one, drops an n of 1, and "
                "squeeze(1) does not."
            )
        return losses

    def _blame(self, check: str, text: str, names: tuple[str, ...] = ()) -> None:
        self._problems.append(Problem(check, names, text))

    def _passes(self, check: str, names: tuple[str, ...] | None, run: Callable, *args: Any) -> bool:
        """Whether a check of the engine passes; else what it says is blamed on ``names``, or on those that it names."""
        try:
            run(*args)
        except Refused as error:
            self._blame(check, _words(error), _named_in(str(error), self._all_names()) if names is None else names)
            return False
        return True

    def _census(self) -> Census:
        return take_census(self._model, self._optimizer, self._attributes)

    def _all_names(self) -> list[str]:
        return [name for name, _ in (*self._model.named_parameters(), *self._model.named_buffers())]

    def _in_modules(self, names: Sequence[str]) -> str:
        modules = {met.module for name in names for met in self._meetings.get(name, ()) if met.module}
        return f" (In module {_quoted(sorted(modules))}.)" if modules else ""

    def _verdict(self, name: str, p: Tensor) -> Verdict:
        refused = any(name in problem.names for problem in self._problems)
        verdict = REFUSED if refused else EXACT if name in self._exact else NOT_CHECKED
        plan = tuple(row for row in self._plan if name in row.names)
        return Verdict(name, tuple(p.shape), self._meetings.get(name, ()), plan, verdict)


class _Attempt:
    """One run of the tape over some of the parameters."""

    def __init__(self, census: Census, names: Sequence[str], n: int):
        frozen = (p for name, p in census.trained.items() if name not in names)
        self._layouts = _Witness()
        trained = {name: census.trained[name] for name in names}
        self.tape = Tape(trained, [*frozen, *census.constants], self._layouts, n)
        self.losses: Tensor | None = None  # None also where the tape refused before there were any
        self.refusal: str | None = None
        self._jacobian: Jacobian | None = None
        self._forwards: list[tuple[str, range]] = []

    def run(self, model: nn.Module, losses_of: Callable[[], Tensor]) -> None:
        """Compute the losses, and ask for their Jacobian."""
        try:
            with _watching(model, self.tape, self._forwards), self.tape:
                self.losses = losses_of()
            self._jacobian = self.tape.jacobian(self.losses, retain_graph=True, verify=bool(self.tape.parameters))
        except Refused as error:
            self.refusal = _words(error)

    def meetings(self) -> dict[str, tuple[Meeting, ...]]:
        """What each parameter met."""
        found: dict[str, tuple[Meeting, ...]] = {}
        for number, call in enumerate(self.tape._calls):
            around = [name for name, calls in self._forwards if number in calls]
            for use in call.uses:
                where = around[-1] if around else "", "" in around
                met = Meeting(call.op, *where, self._layouts.of(call), isinstance(use, ReplayUse))
                found |= {name: (*found.get(name, ()), met) for name in self.tape._names_of(use.weight)}
        return found

    def plan(self) -> list[PlanRow]:
        """How norms and sums are computed."""
        return [] if self._jacobian is None else self._jacobian.plan()


class _Witness(Layouts):
    """Remembers what was measured."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[int, str] = {}

    def of(self, call: Call) -> str:
        """The layout of a call; empty if it was not measured."""
        return self._shapes.get(id(call), "")

    def measure(self, path: int, measurement: Measurement, *args: Any, **kwargs: Any) -> list[AnyLayout]:
        layouts = super().measure(path, measurement, *args, **kwargs)
        calls = measurement.calls
        self._shapes = {id(call): _shape(call, layout) for call, layout in zip(calls, layouts, strict=True)}
        return layouts


def _shape(call: Call, layout: AnyLayout) -> str:
    """A call's output with n where the examples sit: (n, 3), (n·16, 3), (16·n, 3); or (80 by owner, 3)."""
    sizes = [str(size) for size in call.shape]
    if isinstance(layout, Layout):
        around = str(layout.before) * (layout.before > 1), "n", str(layout.after) * (layout.after > 1)
        sizes[layout.dim] = "·".join(filter(None, around))
    else:
        sizes[layout.dim] += " by owner"
    return f"({', '.join(sizes)})"


@contextmanager
def _watching(model: nn.Module, tape: Tape, forwards: list[tuple[str, range]]) -> Iterator[None]:
    """Notes in ``forwards``, as they begin, which of the tape's calls fall into which module's forward."""
    running: list[int] = []
    names = {module: name for name, module in model.named_modules()}

    def before(module: nn.Module, _: Any) -> None:
        running.append(len(forwards))
        forwards.append((names[module], range(len(tape._calls), len(tape._calls))))

    def after(module: nn.Module, *_: Any) -> None:
        number = running.pop()
        forwards[number] = names[module], range(forwards[number][1].start, len(tape._calls))

    hooks = [module.register_forward_pre_hook(before) for module in names]
    hooks += [module.register_forward_hook(after, always_call=True) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _trainable(model: nn.Module) -> Mapping[str, nn.Parameter]:
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise Refused(f"check: parameter {_quoted(lazy)} is not initialized yet. Run the model once on a batch before.")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise Refused("check: no parameter of the model requires a gradient; there is nothing to train.")
    return trainable


def _tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def _words(error: Refused) -> str:
    """What the engine says, without the part of it that says it."""
    return re.sub(r"^(PrivateTraining|tape|rehearsal): ", "", str(error))


def _named_in(message: str, names: Sequence[str]) -> tuple[str, ...]:
    quoted = set(re.findall(r"'([^']+)'", message))
    return tuple(name for name in names if name in quoted)


def _kind(refusal: str) -> str:
    """The words of a refusal without the names and numbers in it."""
    return " ".join(re.sub(r"'[^']*'|[\d(),]", " ", refusal).split())


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _listed(things: Sequence[Any]) -> str:
    return ", ".join(map(repr, things[:5])) + (f" and {len(things) - 5} more" if len(things) > 5 else "")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .:") + "."
