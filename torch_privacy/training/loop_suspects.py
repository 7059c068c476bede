# SPDX-License-Identifier: Apache-2.0
"""Judges variables of the loop that enter losses: each must follow from the step count or from the released weights.

Which of many enter is found by runs with some of them: delta debugging, as of Zeller & Hildebrandt (2002), Simplifying
and isolating failure-inducing input, IEEE TSE 28(2).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..model_check.rehearsal.comparison import CARRIES
from ..model_check.rehearsal.turn import Answers, Turn
from ..support.contents import MISSING, same
from ..support.validate import Refused, quoted
from ..support.warning import warn
from .loop_contents import content_of, sampled
from .loop_variables import Variable

ROUNDING = 64  # units of rounding by which an average may differ from one of released weights
FEW_NUMBERS = 64  # numbers of each tensor that are compared after every step
LONGEST_PERIOD = 16  # steps

Verdict = bool | None  # True: it follows; False: it does not; None: not known yet
Point = tuple[int, int, int]  # the loop, the step, and a number of the loop before it

REFUSED = (
    "PrivateTraining: the losses depend on {}, which the loop changes between a batch and its step and keeps for later "
    f"batches, {CARRIES}. Compute it anew in every turn, before it is read, from training.step_count, the released "
    "weights or the example's own data; or leave it out."
)
WARNED = (
    "PrivateTraining: the losses depend on {}, which the loop changes between batches. If private data enter there "
    "(losses, labels, activations or counts of earlier batches), later releases depend on them without noise, and no "
    "epsilon covers that: the privacy statement says so under not_covered. Compute it in every turn from "
    "training.step_count, from the released weights or from public data; or leave it out."
)
NOT_COVERED = (
    "the loop's variable {!r}, on which losses depend: it changes between batches, and was not shown to follow from "
    "the step count or the released weights alone"
)


class Suspect:
    """Watches a variable, or a module, that enters the losses and changes between batches.

    Args:
        name: of the variable, as the user's code writes it.
        variables: the variable, or those of the module.
    """

    def __init__(self, name: str, variables: Sequence[Variable]):
        self.name, self.keys = name, [variable.key for variable in variables]
        self.verdict: Verdict = None
        self.changes_in_turn = False
        self.is_named = False  # whether the user was warned
        self._variables = [*variables]
        self._steps, self._numbers = array("q"), array("d")
        self._tensors: list[Tensor] | None = None
        self._begun: list[Any] = []

    def renew(self, found: Mapping[Any, Variable]) -> None:
        """Takes the variables of the present loop."""
        self._variables = [found[key] for key in self.keys if key in found]

    def release(self) -> None:
        """Drops the variables, and with them the frames of the loop."""
        self._variables, self._begun = [], []

    def begin_turn(self) -> None:
        """Remembers the content at the begin of a turn."""
        self._begun = [content_of(variable.read()) for variable in self._variables]

    def end_turn(self) -> None:
        """Notes whether the turn changed the content."""
        if self._begun and len(self._begun) == len(self._variables):
            now = (variable.read() for variable in self._variables)
            self.changes_in_turn |= not all(map(same, now, self._begun))
        self._begun = []

    def observe(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Takes the content before a step into account; ``weights`` are those of the model, which were released."""
        if self.verdict is False or not self._variables:
            return
        values = [variable.read() for variable in self._variables]
        number = _number(values[0]) if len(values) == 1 else None
        if number is not None:
            if step not in self._steps[-1:]:
                self._steps.append(step)
                self._numbers.append(number)
                self.verdict = follows_steps(np.array(self._steps), np.array(self._numbers))
            return
        pairs = _pairs(self._variables, values, weights)
        self.verdict = False if pairs is None else self._follows_weights(pairs)

    def _follows_weights(self, pairs: list[tuple[Tensor, Tensor | None]]) -> Verdict:
        now = [sampled(t, FEW_NUMBERS) for t, _ in pairs]
        of_weights = [None if w is None else sampled(w, FEW_NUMBERS) for _, w in pairs]
        before, self._tensors = self._tensors, now
        if before is None or all(map(torch.equal, now, before)):
            return self.verdict
        return are_averaged(before, now, of_weights)


def _number(value: Any) -> float | None:
    if isinstance(value, (Real, np.number)):
        return float(value)
    is_one = (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.size == 1)
    return float(value.item()) if is_one else None


def follows_steps(steps: np.ndarray, values: np.ndarray) -> Verdict:
    """Returns whether the values at these steps are those of a clock: affine, geometric or periodic, within bounds.

    Each value may be held for a number of steps, as that of an epoch.
    """
    if len(values) < 3 or np.ptp(values) == 0:
        return None
    is_held = _is_held(steps, values)
    if is_held is not False:
        return is_held
    moving = _moving_part(values)
    gaps, slopes = np.diff(steps[moving]), np.diff(values[moving]) / np.diff(steps[moving])
    if len(slopes) < 3:
        return True if len(slopes) == 2 and np.isclose(*slopes, rtol=1e-6, atol=0) else None
    if abs(slopes[-1]) < abs(slopes[-2]) and slopes[-1] * slopes[-2] > 0:  # it may end at a bound
        gaps, slopes = gaps[:-1], slopes[:-1]
    if np.allclose(slopes, slopes[0], rtol=1e-6, atol=0) or (np.all(gaps == 1) and _is_periodic(values[moving])):
        return True
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = slopes[1:] / slopes[:-1]
    if np.all(gaps == 1) and np.allclose(ratios, ratios[0], rtol=1e-4, atol=0):
        return True if len(ratios) > 1 else None
    repeats = len(set(values.tolist())) <= len(values) // 2 and len(values) < 3 * LONGEST_PERIOD
    return None if repeats else False


def _is_held(steps: np.ndarray, values: np.ndarray) -> Verdict:
    """True for an affine or geometric sequence, each value of which is there for equally many steps, above one.

    None while it may become one: after two or three changes of one sign, until the next is due.
    """
    new = np.flatnonzero(np.diff(values)) + 1
    gaps, moves = np.diff(steps[new]), np.diff(values[new])
    if len(moves) < 1 or gaps[0] < 2 or (gaps != gaps[0]).any():
        return False
    if len(moves) > 1 and np.allclose(moves, moves[0], rtol=1e-6, atol=0):
        return True
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = moves[1:] / moves[:-1]
    if len(ratios) > 1:
        return bool(np.allclose(ratios, ratios[0], rtol=1e-4, atol=0))
    is_due = steps[-1] - steps[new[-1]] >= gaps[0]
    return False if is_due or (moves * (values[new[0]] - values[0]) < 0).any() else None


def _moving_part(values: np.ndarray) -> slice:
    """Returns the part between a constant start and a constant end, as of a value that is kept within bounds."""
    changing = np.flatnonzero(np.diff(values))
    return slice(int(changing[0]), int(changing[-1]) + 2)


def _is_periodic(values: np.ndarray) -> bool:
    return any(
        np.array_equal(values[period:], values[:-period])
        for period in range(1, min(LONGEST_PERIOD, len(values) // 3) + 1)
    )


def _pairs(
    variables: Sequence[Variable], values: Sequence[Any], weights: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor | None]] | None:
    """Returns each tensor with the weight that it may be an average of; None if there is something else."""
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for variable, value in zip(variables, values, strict=True):
        if value is MISSING or isinstance(value, (bool, str, bytes, type(None))):
            continue
        name = variable.name[len(variable.group) + 1 :]
        for suffix, tensor in _tensors(name, value):
            if not isinstance(tensor, Tensor):
                return None
            weight = _weight_of(suffix, tensor, weights)
            if weight is None and tensor.numel() > 1:
                return None
            pairs.append((tensor, weight))
    return pairs


def _tensors(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [pair for key, v in value.items() for pair in _tensors(f"{name}.{key}" if name else str(key), v)]
    if isinstance(value, (list, tuple)):
        return [pair for number, v in enumerate(value) for pair in _tensors(f"#{number}", v)]
    return [(name, value)]


def _weight_of(name: str, tensor: Tensor, weights: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the weight of this name, or the one at this place of a list, if it has the same shape."""
    parts = [part for part in name.split(".") if part != "module"]
    named = [".".join(parts[start:]) for start in range(len(parts))]
    if name.startswith("#") and name[1:].isdigit() and int(name[1:]) < len(weights):
        named = [[*weights][int(name[1:])]]
    found = next((weights[key] for key in named if key in weights), None)
    return found if found is not None and found.shape == tensor.shape else None


def are_averaged(before: Sequence[Tensor], now: Sequence[Tensor], weights: Sequence[Tensor | None]) -> bool:
    """True if ``now = a before + (1 - a) weights`` for one number a over all tensors, up to rounding.

    Single numbers without a weight are counters: they may change by a whole number.
    """
    olds, news, ws, eps = [], [], [], torch.finfo(torch.float64).eps
    for old, new, w in zip(before, now, weights, strict=True):
        if w is None:
            if not torch.equal(new.double() - old.double(), (new.double() - old.double()).round()):
                return False
        elif not new.is_floating_point():
            if not (torch.equal(new, old) or torch.equal(new, w)):
                return False
        else:
            for kept, tensor in ((olds, old), (news, new), (ws, w)):
                kept.append(tensor.double().cpu())
            eps = max(eps, torch.finfo(new.dtype).eps)
    if not news:
        return False
    old, new, w = torch.cat(olds), torch.cat(news), torch.cat(ws)
    span = old - w
    a = float((new - w) @ span / (span @ span)) if bool(span.any()) else 0.0
    allowed = ROUNDING * eps * torch.stack([old.abs(), new.abs(), w.abs()]).amax(0)
    return bool(((new - w - a * span).abs() <= allowed).all())


class Suspects:
    """The variables on which losses were found to depend, until each is shown to follow or not.

    Attributes:
        found: so far.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self.found: list[Suspect] = []

    @property
    def not_covered(self) -> list[str]:
        """Returns what the privacy statement says about them."""
        named = [suspect.name for suspect in self.found if suspect.verdict is not True]
        return [NOT_COVERED.format(name) for name in dict.fromkeys(named)]

    @property
    def are_clear(self) -> bool:
        """True if losses depend on no variable that may carry data."""
        return all(suspect.verdict is True for suspect in self.found)

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Returns the keys of their variables."""
        return {key for suspect in self.found for key in suspect.keys}

    def renew(self, variables: Mapping[tuple[str, str], Variable]) -> None:
        """Takes note of where the variables are now."""
        for suspect in self.found:
            suspect.renew(variables)

    def observe(self, step: int) -> None:
        """Compares them with step count and weights, and judges."""
        if self.found:
            weights: dict[str, Tensor] = dict(self._model.named_parameters())
            weights |= dict(self._model.named_buffers())
            for suspect in self.found:
                suspect.observe(step, weights)
            self.judge()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes which suspects change inside of the ``with`` block, which begins and ends with a turn."""
        for suspect in self.found:
            suspect.begin_turn()
        try:
            yield
        finally:
            for suspect in self.found:
                suspect.end_turn()

    def judge(self, *, at_end: bool = False) -> None:
        """Refuses or warns, once, of what does not follow from step count or weights."""
        refused = [s for s in self.found if s.verdict is False and s.changes_in_turn]
        if refused:
            self.found = [s for s in self.found if s not in refused]  # the loop may be corrected and go on
            raise Refused(REFUSED.format(quoted([*dict.fromkeys(s.name for s in refused)])))
        named = [s for s in self.found if not s.is_named and (s.verdict is False or (at_end and s.verdict is None))]
        for suspect in named:
            suspect.is_named = True
        if named:
            warn(WARNED.format(quoted([*dict.fromkeys(suspect.name for suspect in named)])))

    def release(self) -> None:
        """Lets go of the frames of the loop."""
        for suspect in self.found:
            suspect.release()


class Counts:
    """The whole numbers among the loop's variables, which may count its steps."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, str], list[Point]] = {}
        self._loop = 0

    def begin_loop(self) -> None:
        """Notes that another loop begins, in which counts may begin anew."""
        self._loop += 1

    def note(self, variables: Mapping[tuple[str, str], Variable], step: int) -> None:
        """Notes the present numbers."""
        for key, variable in variables.items():
            value = variable.read()
            if isinstance(value, int):
                self._points.setdefault(key, []).append((self._loop, step, value))

    def has(self, key: tuple[str, str], step: int, value: Any) -> bool:
        """True if this value, and those noted before, are a count of steps."""
        return isinstance(value, int) and is_count([*self._points.get(key, []), (self._loop, step, value)])


def grouped(others: Sequence[tuple[Variable, Any]]) -> list[list[tuple[Variable, Any]]]:
    """Returns variables, each with an earlier content, by what can only be suspected together: those of one object."""
    groups: dict[tuple[str, str], list[tuple[Variable, Any]]] = {}
    for variable, content in others:
        groups.setdefault((variable.scope, variable.group), []).append((variable, content))
    return [*groups.values()]


def is_count(points: Sequence[Point]) -> bool:
    """True if whole numbers are an affine function of the step, or of the step since their loop began.

    The second is believed from three different steps on: two lie on a line always, and each loop would have its two.
    """
    if _is_affine([(step, value) for _, step, value in points]):
        return True
    begun: dict[int, int] = {}
    since = [(step - begun.setdefault(loop, step), value) for loop, step, value in points]
    return len({step for step, _ in since}) > 2 and _is_affine(since)


def _is_affine(points: Sequence[tuple[int, int]]) -> bool:
    (first, start), (last, end) = min(points), max(points)
    if first == last:
        return False
    return all((value - start) * (last - first) == (end - start) * (step - first) for step, value in points)


MOST_RUNS = 40  # to find out on which variables losses depend
T = TypeVar("T")


class CauseSearch(Generic[T]):
    """Looks for the groups of changes that matter, in at most about `MOST_RUNS` runs.

    Args:
        turn_of: changes -> a run of the batch with these.
        matters: answers -> whether they differ from those without changes.
    """

    def __init__(self, turn_of: Callable[[list[T]], Turn], matters: Callable[[Answers], bool]):
        self._turn_of, self._matters, self._runs_made = turn_of, matters, 0

    def among(self, groups: list[list[T]]) -> Generator[Turn, Answers, list[list[T]]]:
        """Returns those groups on which answers depend; together they are known to matter."""
        if len(groups) == 1 or self._runs_made >= MOST_RUNS:
            return groups
        found: list[list[T]] = []
        for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
            if (yield from self._matter(half)):
                found += yield from self.among(half)
        return found or (yield from self._together(groups))

    def _together(self, groups: list[list[T]]) -> Generator[Turn, Answers, list[list[T]]]:
        """Returns the groups without those that can be left out, where no half of them matters alone."""
        needed = [*groups]
        for group in groups:
            fewer = [other for other in needed if other is not group]
            if self._runs_made < MOST_RUNS and fewer and (yield from self._matter(fewer)):
                needed = fewer
        return needed

    def _matter(self, groups: list[list[T]]) -> Generator[Turn, Answers, bool]:
        self._runs_made += 1
        answers = yield self._turn_of([change for group in groups for change in group])
        return self._matters(answers)
