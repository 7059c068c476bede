# SPDX-License-Identifier: Apache-2.0
"""Do examples depend on each other? A rehearsal shows it: the batch once more, with other examples in some places.

What must hold is one sentence: example i's loss, and its row of the Jacobian, are functions of example i and of the
model alone. A rehearsal shows that of any code, without looking into it:

* **Replace** (tight). A random half of the batch is kept, and other examples take the places of the rest, at equal
  shapes and with the same random numbers. Loss, norm, fingerprint and clip factor of every kept example must stay.
* **Remove** (loose). The kept half alone, without random numbers: the losses must stay, up to rounding. This finds what
  equal shapes hide: a division by the size of the batch, padding that is not masked, a place in the batch.

Buffers and attributes are put back before every run. What a run changes in them must not depend on the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._model_state import ModelState, ParameterDigests, restore, same
from .._replay import in_eval, torch_generators
from .._validate import Refused
from .operator import Jacobian

TIGHT = 64  # units of rounding by which losses at equal shapes may differ
TIGHT_ROWS = 1024  # and rows, which are long sums; in most networks both are equal to the last bit
NEGLIGIBLE = 1e-6  # rows this much shorter than the longest are not compared where shapes depend on the data
COARSE = 0.02  # relative difference that is allowed in the rows of a part of the batch
PATTERN = (
    65_521  # entries of a fingerprint's direction before it repeats; a prime, so that no two rows of one are alike
)

AS_IT_IS, IN_EVAL, BY_MEANS = range(3)  # how random numbers are drawn: as usual, in eval mode, and replaced by means


class Examples(Protocol):
    """A batch whose examples can be replaced and left out."""

    batch: Any
    count: int

    def with_others(self, keep: np.ndarray) -> Any:
        """The batch with other examples where ``keep`` (count,) is false, at equal shapes; None if there is no such."""

    def without(self, keep: np.ndarray) -> Any:
        """The kept examples alone; None if they cannot be told from the others."""


@dataclass
class Turn:
    """One run of the user's code on a batch."""

    batch: Any
    count: int
    is_batch: bool = False  # the batch itself, to be released if nothing speaks against it
    rehearsed: bool = True  # whether this batch was, or is being, rehearsed
    rows: bool = True  # whether rows are compared, not the losses alone
    random: int = AS_IT_IS
    trace: Trace | None = None  # notes what the modules give
    prepare: Callable[[], None] = lambda: None  # to be called right before the run
    state: ModelState | None = None  # of the model before the run, as far as it is put back


@dataclass
class Answers:
    """What a run gave that must not depend on other examples."""

    losses: Tensor  # (count, views)
    rows: RowAnswers | None
    changes: dict[str, Any]  # buffers and attributes that the user's code changed
    random: Any  # where the random numbers stood at the end
    later: dict[str, Any] = field(default_factory=dict)  # the same behind the backward passes
    settled: bool = False  # whether these passes were those of any other run, and none that only measures layouts
    drew: bool = False  # whether random numbers were drawn
    shapes: int = 0  # tells whether all results in the forward had the same shapes


@dataclass
class RowAnswers:
    """Norms, fingerprints and clip factors of the rows, each (rows,) for every group of parameters."""

    weigh: Callable[[Any, str], None] | None = None  # computes factors, where no sum is wanted
    norms: dict[str, Tensor] = field(default_factory=dict)
    fingerprints: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def take(self, jacobian: Any, group: str) -> None:
        """Take in the rows of one group of parameters, before they are summed."""
        self.norms[group] = jacobian.squared_norms().sqrt().double().cpu()
        if isinstance(jacobian, Jacobian):
            self.fingerprints[group] = fingerprint(jacobian).double().cpu()
        if self.weigh is not None:  # at last, for it may use the rows up
            self.weigh(jacobian, group)


def fingerprint(jacobian: Jacobian) -> Tensor:
    """Returns the product (n,) of each row with one direction, which is drawn once and for all."""
    return jacobian.project_on(_direction)


def _direction(shape: torch.Size, device: torch.device) -> Tensor:
    size = shape.numel()
    if device not in _PATTERNS:
        generator = torch.Generator().manual_seed(7)
        _PATTERNS[device] = torch.randn(PATTERN, generator=generator, dtype=torch.float32, device="cpu").to(device)
    pattern = _PATTERNS[device]
    return (pattern if size <= PATTERN else pattern.repeat(-(-size // PATTERN)))[:size].view(shape)


_PATTERNS: dict[torch.device, Tensor] = {}


MORE = 4  # times that others are drawn again, to see whether the random numbers go on elsewhere
FACTOR = "the clip factor"
REPLACED = "when other examples took the places of the rest"
REMOVED = "when the rest was left out"


@dataclass(frozen=True)
class _Removed:
    """A part that ran alone."""

    keep: np.ndarray
    turn: Turn
    whole: Answers | None  # of the whole batch in the same way; None for those of the batch's own run
    answers: Answers


@dataclass(frozen=True)
class Finding:
    """An answer that was another one because of other examples."""

    what: str  # a clause: "the loss of example 3 of 8 changed from 1.5 to 1.7"
    turn: Callable[[Trace], Turn] | None  # the run that shows it
    kept: np.ndarray  # numbers of the examples that were kept
    cure: str = ""  # where it is known without another run


class Rehearsal:
    """The runs of one batch, of which the last is the batch itself.

    Args:
        model: whose buffers and attributes are put back before every run.
        examples: the batch.
        halves: for each replacement, which examples are kept (count,).
        alone: for each removal, which examples are kept (count,).
        rows_alone: whether their rows are compared, too, and not their losses alone.
        units: (count,) number of the row that each example belongs to, where several share one.
        moving: names of frozen parameters that the user's loop changes between runs, as those of a teacher that follows
            the weights; they are put back, too. More are added when they are seen.
        overwritten: names of attributes that take in data, but are written anew before they are read, such as the last
            attention weights. Before the batch itself they are not put back: were they read, answers would move.
        notes: what could not be compared is added here, in words.
        keep_weights: copy the trained parameters, and put them back should the loop have moved them by hand.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        halves: Sequence[np.ndarray],
        *,
        alone: Sequence[np.ndarray] = (),
        rows_alone: bool = False,
        units: np.ndarray | None = None,
        moving: set[str] | None = None,
        overwritten: set[str] | None = None,
        notes: set[str] | None = None,
        keep_weights: bool = False,
    ):
        self._model, self._examples, self._halves = model, examples, halves
        self._alone = [keep for keep in alone if 0 < keep.sum() < examples.count]
        self._units = np.arange(examples.count) if units is None else units
        self._own_rows, self._rows_alone = units is None, rows_alone
        self._moving = set() if moving is None else moving
        self._overwritten = set() if overwritten is None else overwritten
        self._expected: dict[str, Any] = {}  # what the batch itself left in attributes that may be overwritten
        self._notes = set() if notes is None else notes
        self._keep_weights = keep_weights

    def turns(self) -> Generator[Turn, Answers, None]:
        """Asks for one run after the other, and is sent the answers; refuses, or ends behind the batch itself."""
        frozen = {name for name, p in self._model.named_parameters() if not p.requires_grad}
        weights = [p for p in self._model.parameters() if p.requires_grad] if self._keep_weights else []
        copies = [p.detach().clone() for p in weights]
        while True:
            before, marks = ModelState(self._model, self._moving), ParameterDigests(self._model)
            passed = False
            try:
                moved, overwritten = yield from self._attempt(before, marks)
                passed = not (moved or overwritten)
            finally:
                if not passed:
                    before.restore()
                    restore(weights, copies)
            if passed:
                return
            if not moved <= frozen - self._moving:
                raise Refused(written_into(sorted(moved)))
            self._moving |= moved
            self._overwritten |= overwritten
            self._expected = {name: self._expected[name] for name in overwritten}

    def _attempt(
        self, before: ModelState, marks: ParameterDigests
    ) -> Generator[Turn, Answers, tuple[set[str], set[str]]]:
        """One rehearsal, and the batch. It is done again where it gives names of parameters or attributes:

        of frozen parameters that moved between the runs; and of attributes that took in data, which may be harmless.
        """
        moved: set[str] = set()
        ended: list[dict[str, Any]] = []  # what is changed when the next run begins, by the loop behind the step, too

        def prepare(turn: Turn) -> None:
            ended.append(before.changes(with_parameters=True))
            before.restore(except_for=self._overwritten if turn.is_batch else ())
            if turn.is_batch:
                moved.update(marks.changed(self._model))

        def run(turn: Turn) -> Generator[Turn, Answers, Answers]:
            turn.prepare, turn.state = lambda: prepare(turn), before
            return (yield turn)

        replaced: list[tuple[np.ndarray, Any, Answers]] = []
        for keep in self._halves:
            batch = self._examples.with_others(keep)
            if batch is not None:
                replaced.append((keep, batch, (yield from run(Turn(batch, self._examples.count)))))
        if not replaced and self._examples.count > 1:
            self._notes.add("No other examples were put in the places of some, for none made a batch of equal shapes.")
        removed = yield from self._removals(run, replaced)
        own = yield from run(Turn(self._examples.batch, self._examples.count, is_batch=True))
        if moved:
            return moved, set()
        changed = marks.changed(self._model)
        if changed:
            raise Refused(written_into(changed))
        learnt = {name for _, _, answers in replaced for name in self._learnt(answers, own)}
        behind = self._changed_by_the_loop(replaced, ended[1:]) - learnt - self._overwritten
        if behind:
            what = (
                f"the loop changed {_quoted(sorted(behind))} behind training.step in a way that depends on the examples"
            )
            raise Refused(_depend(what, "", STATE_CURE))
        findings = self._findings(replaced, removed, own)
        if findings and (yield from self._draws_depend_on_data(run, replaced, own)):
            findings = yield from self._without_random_numbers(run, replaced, removed, own)
            if not findings:
                own = yield from self._batch_again(run, own)
        if learnt and not findings and not learnt & {name for name, _ in self._model.named_buffers()}:
            self._expected = {name: own.changes.get(name) for name in learnt}
            return set(), learnt
        # What was written before it was read is the same now, though another batch's was there before.
        learnt |= {name for name, content in self._expected.items() if not same(own.changes.get(name), content)}
        self._expected = {}
        if learnt:
            what = f"the forward changed {_quoted(sorted(learnt))} in a way that depends on the examples of the batch"
            raise Refused(_depend(what, "", STATE_CURE))
        if findings:
            yield from self._explain(run, findings[0], own)
        return set(), set()

    def _learnt(self, answers: Answers, own: Answers) -> set[str]:
        """Names of buffers and attributes that took in data of the examples."""
        differing = _differing(answers.changes, own.changes)
        if answers.settled and own.settled:
            differing |= _differing(answers.later, own.later)
        return differing - self._overwritten

    @staticmethod
    def _changed_by_the_loop(replaced: list, ended: list[dict[str, Any]]) -> set[str]:
        """Names of what the loop changed behind ``training.step``, in another way when the other half was kept."""
        if len(replaced) < 2:
            return set()
        by_loop = (_differing(answers.later, end) for (_, _, answers), end in zip(replaced[:2], ended, strict=False))
        return _differing(*ended[:2]) & set().union(*by_loop)

    def _removals(self, run: Any, replaced: list) -> Generator[Turn, Answers, list[_Removed]]:
        """Every part alone; none where random numbers are drawn that cannot be turned off."""
        rows = (not replaced or self._rows_alone) and self._own_rows
        randoms = (AS_IT_IS,) if replaced and not replaced[0][2].drew else (IN_EVAL, BY_MEANS)
        for random in randoms if self._alone else ():
            whole = None  # the batch's own run will do
            if random != AS_IT_IS:
                whole = yield from run(Turn(self._examples.batch, self._examples.count, rows=rows, random=random))
            if whole is None or not whole.drew:
                return (yield from self._parts_alone(run, whole, rows, random))
        if self._alone:
            if not replaced:
                raise Refused(
                    "rehearsal: no examples fit in the places of others, and the forward is random even in eval mode, "
                    "so nothing can be shown about the examples' independence. Turn the random numbers off in eval "
                    "mode, let collate_fn give batches of equal shapes, or pass assume_independent='reason'."
                )
            self._notes.add("Parts of the batch were not compared, for the forward is random even in eval mode.")
        return []

    def _parts_alone(
        self, run: Any, whole: Answers | None, rows: bool, random: int
    ) -> Generator[Turn, Answers, list[_Removed]]:
        removed = []
        for keep in self._alone:
            part = self._examples.without(keep)
            if part is not None:
                turn = Turn(part, int(keep.sum()), rows=rows, random=random)
                removed.append(_Removed(keep, turn, whole, (yield from run(turn))))
        return removed

    def _findings(self, replaced: list, removed: Sequence[_Removed], own: Answers) -> list[Finding]:
        found: list[Finding] = []
        for keep, batch, answers in replaced:
            turn = _again(batch, self._examples.count)
            loose = answers.shapes != own.shapes
            found += self._moved(keep, answers, own, np.flatnonzero(keep), turn, loose, REPLACED)
        return found + self._removal_findings(removed, own)

    def _removal_findings(self, removed: Sequence[_Removed], own: Answers) -> list[Finding]:
        found: list[Finding] = []
        for part in removed:
            turn = _again(part.turn.batch, part.turn.count, part.turn.random)
            places = np.arange(part.turn.count)
            found += self._moved(part.keep, part.answers, part.whole or own, places, turn, True, REMOVED)
        return found

    def _batch_again(self, run: Any, own: Answers) -> Generator[Turn, Answers, Answers]:
        """The batch itself once more, which must come last; it must give the same answers."""
        everyone = np.arange(self._examples.count)
        again = yield from run(Turn(self._examples.batch, self._examples.count, is_batch=True))
        found = self._moved(everyone >= 0, again, own, everyone, None, False, "when the batch was made again")
        if found:
            raise Refused(_not_repeating(found[0].what))
        return again

    def _draws_depend_on_data(self, run: Any, replaced: list, own: Answers) -> Generator[Turn, Answers, bool]:
        """Whether the data decide how many random numbers are drawn; by chance that shows with some others only."""
        if any(answers.random != own.random for _, _, answers in replaced):
            return True
        for keep, *_ in replaced * MORE if own.drew else ():
            batch = self._examples.with_others(keep)
            if batch is not None:
                answers = yield from run(Turn(batch, self._examples.count, rows=False))
                if answers.random != own.random:
                    return True
        return False

    def _without_random_numbers(
        self, run: Any, replaced: list, removed: Sequence[_Removed], own: Answers
    ) -> Generator[Turn, Answers, list[Finding]]:
        """Where the data decide how many random numbers are drawn, these say nothing: compare without, and loosely."""
        found = self._removal_findings(removed, own)
        for keep, batch, _ in replaced:
            for random in (IN_EVAL, BY_MEANS):
                whole = yield from run(Turn(self._examples.batch, self._examples.count, random=random))
                answers = yield from run(Turn(batch, self._examples.count, random=random))
                if not (whole.drew or answers.drew):
                    break
            turn = _again(batch, self._examples.count, random)
            found += self._moved(keep, answers, whole, np.flatnonzero(keep), turn, True, REPLACED)
        return found

    def _moved(
        self,
        keep: np.ndarray,
        answers: Answers,
        own: Answers,
        places: np.ndarray,
        turn: Any,
        loose: bool,
        how: str,
    ) -> list[Finding]:
        """The first answer of a kept example that is another one; ``places`` are the kept ones in ``answers``."""
        kept = np.flatnonzero(keep)
        if not len(kept):
            return []
        found: list[Finding] = []

        def compare(name: str, a: Tensor, b: Tensor, scale: Tensor, eps: float, numbers: np.ndarray) -> None:
            worst = _worst(a, b, scale, _tolerance(eps, loose))
            if worst is not None and not found:
                was, now = float(b.flatten()[worst]), float(a.flatten()[worst])
                example = int(numbers[worst * len(numbers) // max(1, a.numel())])
                what = (
                    f"{name} of example {example} of {self._examples.count} changed from {was:.7g} to {now:.7g} {how}"
                )
                scaled = _scaled_alike(answers.losses[places], own.losses[kept], self._examples.count)
                found.append(Finding(what, turn, kept, RULE_CURE if name == FACTOR else scaled))

        a, b = answers.losses.double().cpu()[places], own.losses.double().cpu()[kept]
        finite = b[b.isfinite()].abs()
        typical = float(finite.max()) if len(finite) and loose else 0.0
        compare("the loss", a, b, b.abs().nan_to_num(0).clamp(min=0.1 * typical), _eps(own.losses.dtype), kept)
        if answers.rows is not None and own.rows is not None:
            self._compare_rows(answers, own, keep, places, compare, loose)
        return found

    def _compare_rows(
        self, answers: Answers, own: Answers, keep: np.ndarray, places: np.ndarray, compare: Any, loose: bool
    ) -> None:
        assert answers.rows is not None
        assert own.rows is not None
        if self._own_rows:
            rows, theirs = np.flatnonzero(keep), places
        else:  # rows that several examples share are compared where all of these were kept
            rows = theirs = np.setdiff1d(self._units[keep], self._units[~keep])
        eps = _eps(own.losses.dtype) * (1 if loose else TIGHT_ROWS / TIGHT)
        for group, norms in own.rows.norms.items():
            a, b = answers.rows.norms[group][theirs], norms[rows]
            longest = norms[norms.isfinite()]
            least = NEGLIGIBLE * float(longest.max()) if len(longest) and loose else 0.0
            if len(a) and len(answers.losses) != len(own.losses):  # other shapes everywhere, so other rounding
                least, eps = COARSE * float(longest.max()) if len(longest) else 0.0, max(eps, COARSE**2 / 4)
            scale = b.nan_to_num(0).clamp(min=least)
            compare("the norm of the gradient", a, b, scale, eps, rows)
            if len(answers.losses) != len(
                own.losses
            ):  # what ops met may have a part for each example, at another place
                continue
            if group in own.rows.fingerprints and group in answers.rows.fingerprints:
                a, b = answers.rows.fingerprints[group][theirs], own.rows.fingerprints[group][rows]
                compare("the direction of the gradient", a, b, torch.maximum(scale, b.abs().nan_to_num(0)), eps, rows)
        for name, factors in own.rows.factors.items():
            a, b = answers.rows.factors[name][theirs], factors[rows]
            largest = float(b.abs().max()) if len(b) and loose else 0.0
            compare(FACTOR, a, b, b.abs().clamp(min=NEGLIGIBLE * largest), eps, rows)

    def _explain(self, run: Any, finding: Finding, own: Answers) -> Generator[Turn, Answers, None]:
        """Refuse; where two more runs can show it, say in which module the examples meet."""
        where = ""
        if self._overwritten:
            kept = f"The forward reads what earlier batches left in {_quoted(sorted(self._overwritten))}."
            raise Refused(_depend(finding.what, kept, STATE_CURE))
        if finding.turn is not None and finding.cure != RULE_CURE:
            once, again = Trace(self._model), Trace(self._model)
            turn = finding.turn(once)
            yield from run(turn)
            repeated = yield from run(
                Turn(self._examples.batch, self._examples.count, random=turn.random, rows=False, trace=again)
            )
            unequal = _worst(
                repeated.losses.double().cpu(),
                own.losses.double().cpu(),
                own.losses.double().cpu().abs().nan_to_num(0),
                _tolerance(_eps(own.losses.dtype), False),
            )
            if turn.random == AS_IT_IS and unequal is not None:
                raise Refused(_not_repeating(finding.what))
            places = finding.kept if turn.count == self._examples.count else np.arange(turn.count)
            where = again.differs(once, finding.kept, places, loose=turn.count != self._examples.count)
        raise Refused(_depend(finding.what, "" if finding.cure else where, finding.cure))


def halves(count: int, generator: np.random.Generator, units: np.ndarray | None = None) -> list[np.ndarray]:
    """A random half of the examples and the other half; one of an empty and of a whole batch where there is but one.

    Examples of one unit stay together.
    """
    numbers = np.arange(count) if units is None else np.unique(units)
    if len(numbers) < 2:
        return [np.zeros(count, bool)]
    chosen = generator.permutation(numbers)[: len(numbers) // 2]
    keep = np.zeros(count, bool)
    keep[chosen if units is None else np.isin(units, chosen)] = True
    return [keep, ~keep]


FEW = 4  # examples


def few(count: int, generator: np.random.Generator) -> np.ndarray:
    """Some examples: so few that the longest of the batch is rarely among them."""
    keep = np.zeros(count, bool)
    keep[generator.permutation(count)[: min(FEW, count // 2)]] = True
    return inner(keep) if count > 2 else keep


def inner(keep: np.ndarray) -> np.ndarray:
    """The kept examples but the first and the last of the batch, which alone would be first and last, too."""
    some = keep.copy()
    some[[0, -1]] = False
    return some if some.any() else keep


def _again(batch: Any, count: int, random: int = AS_IT_IS) -> Callable[[Trace], Turn]:
    return lambda trace: Turn(batch, count, rows=False, random=random, trace=trace)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _tolerance(eps: float, loose: bool) -> float:
    """Relative difference that rounding explains; half precision rounds so coarsely that its units are not added up."""
    tight = 4 * eps if 1e-5 < eps < 0.01 else TIGHT * eps
    return min(2 * eps**0.5 if loose else tight, 0.2)


def _worst(a: Tensor, b: Tensor, scale: Tensor, tolerance: float) -> int | None:
    """Number of the entry that differs the most, beyond what is allowed; None where there is none."""
    if torch.equal(a, b):
        return None
    undefined = a.isnan() & b.isnan()
    off = (
        torch.where((a == b) | undefined, 0, (a - b).abs() / (tolerance * scale + 1e-300))
        .flatten()
        .nan_to_num(torch.inf)
    )
    if not off.numel() or float(off.max()) <= 1:
        return None
    return int(off.argmax())


class _Call:
    """One call of a module: sums of inputs and outputs for each example, where these have a dimension of them."""

    __slots__ = ("gave", "given", "kind", "name")

    def __init__(self, name: str, kind: str, given: list[Tensor]):
        self.name, self.kind, self.given, self.gave = name, kind, given, []


class Trace:
    """What the modules of a model were given and gave in one run, as sums for each example."""

    def __init__(self, model: nn.Module):
        self._model, self.calls, self._running = model, [], []
        self._count = 0

    @contextmanager
    def watching(self, count: int) -> Iterator[None]:
        """Notes the calls that are made meanwhile."""
        self._count = count
        names = {module: name for name, module in self._model.named_modules()}
        handles = [
            handle
            for module in names
            for handle in (
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True),
            )
        ]
        self._names = names
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(_Call(self._names.get(module, ""), type(module).__name__, self._sums((args, kwargs))))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._running.pop()
        call.gave = self._sums(output)
        self.calls.append(call)

    @torch.no_grad()
    def _sums(self, values: Any) -> list[Tensor]:
        tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided]
        found = []
        for t in tensors:
            dims = [dim for dim, size in enumerate(t.shape) if size == self._count]
            if dims and not t.is_nested and not t.is_complex():
                rows = t.detach().movedim(dims[0], 0).reshape(self._count, -1).double()
                found.append(
                    (rows * torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)).sum(1).cpu()
                )
        return found

    def differs(self, other: Trace, kept: np.ndarray, places: np.ndarray, *, loose: bool) -> str:
        """Where examples meet first: a sentence; ``kept`` are the examples' numbers here, ``places`` there."""
        tolerance = 1e-3 if loose else 1e-6

        def unlike(one: list[Tensor], two: list[Tensor]) -> bool:
            return any(
                len(a) > kept.max() and len(b) > places.max() and not _alike(a[kept], b[places], tolerance)
                for a, b in zip(one, two, strict=False)
            )

        if not self.calls:
            return "It happens outside of the model: in the loop, the loss or collate_fn."
        root = next((k for k, call in enumerate(self.calls) if call.name == ""), None)
        if root is not None and root < len(other.calls) and unlike(self.calls[root].given, other.calls[root].given):
            return (
                "It happens before the model: what model(...) is given for them differs already (loop or collate_fn)."
            )
        for mine, theirs in zip(self.calls, other.calls, strict=False):
            if mine.name != theirs.name:
                return f"The forward takes another course from module {mine.name!r} ({mine.kind}) on."
            if unlike(mine.gave, theirs.gave) and not unlike(mine.given, theirs.given):
                return (
                    f"They meet in module {mine.name!r} ({mine.kind})."
                    if mine.name
                    else "They meet in the model's own forward."
                )
        return (
            "The model's outputs are the same: they meet in the loss (a mean over the batch, negatives from the batch, "
            "a broadcast of (n, 1) against (n,)), or in the backward pass."
        )


def _alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(a.abs().nan_to_num(0).max()), equal_nan=True)


class Means(TorchDispatchMode):
    """Replaces random numbers by their means, and dropout by nothing; torch's generators stand still."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mean = _MEANS.get(func.overloadpacket.__name__) if torch.Tag.nondeterministic_seeded in func.tags else None
        if mean is None:
            return func(*args, **kwargs)
        before = torch_generators()
        try:
            return mean(func, args, kwargs)
        finally:
            for generator, state in before:
                generator.set_state(state)


def _filled(value: Callable[..., float]) -> Callable:
    """Of a function that fills its first argument."""
    return lambda func, args, kwargs: args[0].fill_(value(*args[1:]))


def _made(value: float) -> Callable:
    """Of a factory: what it makes, filled with a number."""
    return lambda func, args, kwargs: func(*args, **kwargs).fill_(value)


def _bernoulli(func: Any, args: Any, kwargs: Any) -> Tensor:
    p = args[1] if len(args) > 1 else 0.5
    return args[0].copy_(p) if isinstance(p, Tensor) else args[0].fill_(p)


def _normal(func: Any, args: Any, kwargs: Any) -> Tensor:
    return func(*args, **kwargs).copy_(args[0]) if isinstance(args[0], Tensor) else func(*args, **kwargs).fill_(args[0])


def _whole_numbers(func: Any, args: Any, kwargs: Any) -> Tensor:
    bounds = [value for value in args if type(value) is int]
    return func(*args, **kwargs).fill_(sum(bounds[:2]) // 2)


_MEANS: dict[str, Callable] = {
    "bernoulli_": _bernoulli,
    "bernoulli": lambda func, args, kwargs: args[0].clone() if len(args) < 2 else torch.full_like(args[0], args[1]),
    "normal_": _filled(lambda mean=0.0, *_: mean),
    "uniform_": _filled(lambda low=0.0, high=1.0, *_: (low + high) / 2),
    "exponential_": _filled(lambda rate=1.0, *_: 1 / rate),
    "native_dropout": lambda func, args, kwargs: (args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)),
    "multinomial": lambda func, args, kwargs: args[0].topk(args[1] if len(args) > 1 else kwargs["num_samples"]).indices,
    "normal": _normal,
    "poisson": lambda func, args, kwargs: args[0].clone(),
    "randperm": lambda func, args, kwargs: (found := func(*args, **kwargs)).copy_(torch.arange(len(found))),
    **dict.fromkeys(("randint", "randint_like", "random_"), _whole_numbers),
    **dict.fromkeys(("randn", "randn_like"), _made(0.0)),
    **dict.fromkeys(("rand", "rand_like"), _made(0.5)),
}


@contextmanager
def without_random_numbers(model: nn.Module, how: int) -> Iterator[None]:
    """The model in eval mode, and random numbers replaced by their means where that is asked for."""
    with ExitStack() as stack:
        if how != AS_IT_IS:
            stack.enter_context(in_eval([*model.modules()]))
        if how == BY_MEANS:
            stack.enter_context(Means())
        yield


CURE = (
    "Make each loss a function of its own example and of the model alone: GroupNorm in place of BatchNorm, a division "
    "by a number of the example's own in place of the batch's size or tokens, a mask for padding, negatives from "
    "within the example."
)


STATE_CURE = (
    "What is kept there carries data past the noise. Take a layer without running statistics, e.g. GroupNorm, put that "
    "module in eval mode, or return the value from the forward in place of keeping it."
)


RULE_CURE = (
    "The factor of a row must be a function of that row's norm alone. Let the clipping rule use no other norm, nor a "
    "statistic of them."
)


def _depend(what: str, where: str, cure: str) -> str:
    return f"rehearsal: examples of a batch depend on each other: {what}. {where + ' ' if where else ''}{cure or CURE}"


def _differing(some: dict[str, Any], others: dict[str, Any]) -> set[str]:
    absent = object()
    return {name for name in {*some, *others} if not same(some.get(name, absent), others.get(name, absent))}


def _scaled_alike(some: Tensor, whole: Tensor, count: int) -> str:
    """What to do where every loss of a part is the same multiple of what it is in the whole batch; else nothing."""
    ratios = (some.double() / whole.double()).flatten()
    ratios = ratios[ratios.isfinite()]
    if len(ratios) < 2 or float(ratios.max() - ratios.min()) > 1e-3 * float(ratios.abs().max()):
        return ""
    ratio = float(ratios.mean())
    if abs(ratio - 1) < 1e-3:
        return ""
    if len(some) and abs(ratio * len(some) / count - 1) < 1e-3:
        return (
            "The losses are divided by the number of examples in the batch. Leave the division out: PrivateTraining "
            "divides by the expected batch size."
        )
    return (
        f"Every loss is {ratio:.4g} times as large then: it is divided or multiplied by a number of the whole batch "
        "(its tokens, a sum of weights, a mean). Divide each example's loss by a number of its own, such as the count "
        "of its own tokens."
    )


def written_into(names: Sequence[str]) -> str:
    """What to say where a forward changed parameters."""
    return (
        f"rehearsal: the forward changed {_quoted(names)}, or the loop did, which would carry data past the noise. "
        "Write into no parameter; training.step makes the updates."
    )


def _not_repeating(what: str) -> str:
    return (
        f"rehearsal: the same batch does not give the same losses twice ({what}), so nothing can be shown about it. "
        "Model or loop keep a state of their own (a counter of batches, a running value outside of the model), or draw "
        "random numbers from a generator of their own. Use training.step_count in place of a counter, and the global "
        "generators of torch, numpy or Python, which are set for every batch; or say why examples do not depend on "
        "each other: assume_independent='...', which the privacy statement prints."
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
