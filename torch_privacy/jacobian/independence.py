# SPDX-License-Identifier: Apache-2.0
"""Shows by rehearsals that examples do not depend on each other: the batch runs again with other examples in it.

One sentence must hold: example i's loss, and its row of the Jacobian, are functions of example i and of the model
alone. A rehearsal shows that for any code, without inspecting it:

* **Replace** (tight). A random half of the batch is kept, and other examples take the places of the rest, at equal
  shapes and with the same random numbers. Loss, norm, fingerprint and clip factor of every kept example must stay.
* **Remove** (loose). The kept half runs alone, without random numbers: the losses must stay, up to rounding. This finds
  what equal shapes hide: a division by the size of the batch, padding that is not masked, an index in the batch.

Buffers and attributes are put back before every run. What a run changes in them must not depend on the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..support.model_state import ModelState, ParameterDigests, restore, same
from ..support.validate import Refused
from .comparison import (
    REMOVED,
    REPEATED,
    REPLACED,
    RULE_CURE,
    STATE_CURE,
    Comparison,
    Finding,
    depend,
    differing,
    losses_repeat,
    not_repeating,
    quoted,
    written_into,
)
from .randomness import RandomNumbers
from .trace import Trace
from .turns import Answers, Examples, Turn
from .unrepeatable import not_compared, varying_names

REDRAWS = 4  # other examples drawn, to see whether the number of random draws depends on them

Run = Callable[[Turn], Generator[Turn, Answers, Answers]]


@dataclass(frozen=True)
class _Replaced:
    """A run with other examples in some places."""

    keep: np.ndarray
    batch: Any
    answers: Answers


@dataclass(frozen=True)
class _Removed:
    """A run of a part of the batch alone."""

    keep: np.ndarray
    turn: Turn
    whole: Answers | None  # of the whole batch with the same random numbers; None for those of the batch's usual run
    answers: Answers


class Rehearsal:
    """Produces the runs of one batch, of which the last is the batch itself.

    Args:
        model: its buffers and attributes are put back before every run.
        examples: the batch.
        halves: for each replacement, which examples are kept (count,).
        alone: for each removal, which examples are kept (count,).
        rows_alone: whether the rows of the first of these are compared too, and not its losses only.
        rows_once: compare rows in the first replacement only, and losses in the others.
        units: (count,) number of the row that each example belongs to, if several share one.
        whole_units: whether the examples in ``alone`` are all those of their units, so that their rows are compared.
        moving: names of frozen parameters that the user's loop changes between runs, such as those of a teacher that
            follows the weights; they are put back too. More are added when they are seen.
        overwritten: names of attributes that take in data, but are written before they are read, such as the last
            attention weights. Before the batch itself they are not put back: if they were read, answers would change.
        varying: names of attributes that differ between two runs of the same batch, such as durations, and are never
            read. They are not put back before the other runs: if they were read, answers would change.
        notes: receives, in words, what could not be compared.
        keep_weights: copy the trained parameters, and put them back if the loop moves them itself.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        halves: Sequence[np.ndarray],
        *,
        alone: Sequence[np.ndarray] = (),
        rows_alone: bool = False,
        rows_once: bool = False,
        units: np.ndarray | None = None,
        whole_units: bool = False,
        moving: set[str] | None = None,
        overwritten: set[str] | None = None,
        varying: set[str] | None = None,
        notes: set[str] | None = None,
        keep_weights: bool = False,
    ):
        self._model, self._examples, self._halves = model, examples, halves
        self._alone = [keep for keep in alone if 0 < keep.sum() < examples.count]
        self._comparison = Comparison(examples.count, units)
        self._whole_rows, self._rows_alone, self._rows_once = units is None or whole_units, rows_alone, rows_once
        self._moving = set() if moving is None else moving
        self._overwritten = set() if overwritten is None else overwritten
        self._varying = set() if varying is None else varying
        self._expected: dict[str, Any] = {}  # what the batch itself left in attributes that may be overwritten
        self._notes = set() if notes is None else notes
        self._keep_weights = keep_weights

    def turns(self) -> Generator[Turn, Answers, None]:
        """Yields one run after the other, and receives its answers by ``send``; ends after the batch itself.

        Raises:
            Refused: an answer for a kept example changed, or a run changed what it must not.
        """
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
        """Makes one rehearsal, and the batch; must be repeated if it returns names.

        Returns:
            Names of frozen parameters that moved between the runs; names of attributes that took in data, which may
            be harmless.
        """
        moved: set[str] = set()
        ended: list[dict[str, Any]] = []  # changes seen when the next run begins, which the loop made after the step

        def prepare(turn: Turn) -> None:
            ended.append(before.changes(with_parameters=True))
            before.restore(except_for=self._overwritten if turn.is_batch else self._varying)
            if turn.is_batch:
                moved.update(marks.changed(self._model))

        def run(turn: Turn) -> Generator[Turn, Answers, Answers]:
            turn.prepare, turn.state = lambda: prepare(turn), before
            return (yield turn)

        replaced = yield from self._replacements(run)
        removed = yield from self._removals(run, replaced)
        original = yield from run(Turn(self._examples.batch, self._examples.count, is_batch=True))
        if moved:
            return moved, set()
        changed = marks.changed(self._model)
        if changed:
            raise Refused(written_into(changed))
        took_data = {name for part in replaced for name in self._took_data(part.answers, original)}
        by_loop = self._changed_by_loop(replaced, ended[1:])
        self._check_loop(by_loop - took_data - self._overwritten - self._varying)
        findings = self._findings(replaced, removed, original)
        if findings and (yield from self._draws_depend_on_data(run, replaced, original)):
            findings = yield from self._without_random_numbers(run, replaced, removed, original)
            if not findings:
                original = yield from self._batch_again(run, original)
        if took_data and not findings and not took_data & self._expected.keys():
            original = yield from self._leave_out_varying(run, took_data, replaced, original)
        if took_data and not findings and not took_data & {name for name, _ in self._model.named_buffers()}:
            self._expected = {name: original.changes.get(name) for name in took_data}
            return set(), took_data
        self._check_state(took_data, original)
        if findings:
            yield from self._explain(run, findings[0], original)
        return set(), set()

    def _check_loop(self, changed: set[str]) -> None:
        """Raises if the loop changed something after ``training.step`` in a way that depends on the examples."""
        if changed:
            names = quoted(sorted(changed))
            what = f"the loop changed {names} after training.step in a way that depends on the examples"
            raise Refused(depend(what, "", STATE_CURE))

    def _check_state(self, took_data: set[str], original: Answers) -> None:
        """Raises if buffers or attributes took in data of the examples.

        Attributes that are written before they are read now hold the same, though they began with another batch's data.
        """
        took_data |= {name for name, content in self._expected.items() if not same(original.changes.get(name), content)}
        self._expected = {}
        if took_data:
            what = f"the forward changed {quoted(sorted(took_data))} in a way that depends on the examples of the batch"
            raise Refused(depend(what, "", STATE_CURE))

    def _took_data(self, answers: Answers, original: Answers) -> set[str]:
        """Returns the names of buffers and attributes that took in data of the examples."""
        names = differing(answers.changes, original.changes)
        if answers.settled and original.settled:
            names |= differing(answers.later, original.later)
        return names - self._overwritten - self._varying

    def _leave_out_varying(
        self, run: Run, took_data: set[str], replaced: Sequence[_Replaced], original: Answers
    ) -> Generator[Turn, Answers, Answers]:
        """Takes out of ``took_data`` what differs between two runs of the same batch as well, and is never read."""
        batch, count = self._examples.batch, self._examples.count
        again = yield from run(Turn(batch, count, rows=False))
        found = varying_names(took_data, original, again, [part.answers for part in replaced])
        if found:
            self._varying |= found
            other = yield from run(Turn(batch, count))  # begins with what the run before has left
            kept = f"The forward reads what earlier runs left in {quoted(sorted(found))}."
            self._check_repeats(other, original, lambda what: depend(what, kept, STATE_CURE))
            took_data -= found
            self._notes.add(not_compared(quoted(sorted(found))))
        return (yield from self._batch_again(run, original))

    @staticmethod
    def _changed_by_loop(replaced: Sequence[_Replaced], ended: list[dict[str, Any]]) -> set[str]:
        """Returns names of what the loop changed after ``training.step``, differently when the other half was kept."""
        if len(replaced) < 2:
            return set()
        by_loop = (differing(part.answers.later, end) for part, end in zip(replaced[:2], ended, strict=False))
        return differing(*ended[:2]) & set().union(*by_loop)

    # The runs

    def _replacements(self, run: Run) -> Generator[Turn, Answers, list[_Replaced]]:
        """Runs the batch with other examples in some places."""
        replaced = []
        for keep in self._halves:
            batch = self._examples.with_others(keep)
            if batch is not None:
                turn = Turn(batch, self._examples.count, rows=not (replaced and self._rows_once))
                replaced.append(_Replaced(keep, batch, (yield from run(turn))))
        if not replaced and self._examples.count > 1:
            self._notes.add("No examples were replaced by others, because none made a batch of equal shapes.")
        return replaced

    def _removals(self, run: Run, replaced: Sequence[_Replaced]) -> Generator[Turn, Answers, list[_Removed]]:
        """Runs every part alone; none if random numbers are drawn that cannot be turned off."""
        rows = (not replaced or self._rows_alone) and self._whole_rows
        draws = not replaced or replaced[0].answers.drew
        modes = (RandomNumbers.EVAL_MODE, RandomNumbers.MEANS) if draws else (RandomNumbers.AS_DRAWN,)
        for random in modes if self._alone else ():
            whole = None  # the batch's usual run serves
            if random is not RandomNumbers.AS_DRAWN:
                whole = yield from run(Turn(self._examples.batch, self._examples.count, rows=rows, random=random))
            if whole is None or not whole.drew:
                some = len(self._alone) if not replaced else 1
                return (yield from self._parts_alone(run, whole, some if rows else 0, random))
        if self._alone:
            if not replaced:
                raise Refused(
                    "rehearsal: no examples fit in the places of others, and the forward is random even in eval mode, "
                    "so nothing can be shown about the examples' independence. Turn the random numbers off in eval "
                    "mode, let collate_fn give batches of equal shapes, or pass assume_independent='reason'."
                )
            self._notes.add("Parts of the batch were not compared, because the forward is random even in eval mode.")
        return []

    def _parts_alone(
        self, run: Run, whole: Answers | None, with_rows: int, random: RandomNumbers
    ) -> Generator[Turn, Answers, list[_Removed]]:
        """Runs the parts, of which the first ``with_rows`` are compared by their rows, too."""
        removed = []
        for number, keep in enumerate(self._alone):
            part = self._examples.without(keep)
            if part is not None:
                turn = Turn(part, int(keep.sum()), rows=number < with_rows, random=random, keep=keep)
                removed.append(_Removed(keep, turn, whole, (yield from run(turn))))
        return removed

    def _batch_again(self, run: Run, original: Answers) -> Generator[Turn, Answers, Answers]:
        """Runs the batch itself again, because it must come last; it must give the same answers."""
        again = yield from run(Turn(self._examples.batch, self._examples.count, is_batch=True))
        self._check_repeats(again, original, not_repeating)
        return again

    def _check_repeats(self, again: Answers, original: Answers, message: Callable[[str], str]) -> None:
        everyone = np.arange(self._examples.count)
        found = self._comparison.compare(everyone >= 0, again, original, everyone, None, REPEATED, loose=False)
        if found:
            raise Refused(message(found[0].what))

    # What they show

    def _findings(self, replaced: Sequence[_Replaced], removed: Sequence[_Removed], original: Answers) -> list[Finding]:
        found: list[Finding] = []
        for part in replaced:
            turn = _again(part.batch, self._examples.count)
            loose = part.answers.shapes != original.shapes
            places = np.flatnonzero(part.keep)
            found += self._comparison.compare(part.keep, part.answers, original, places, turn, REPLACED, loose=loose)
        return found + self._removal_findings(removed, original)

    def _removal_findings(self, removed: Sequence[_Removed], original: Answers) -> list[Finding]:
        found: list[Finding] = []
        for part in removed:
            turn = _again(part.turn.batch, part.turn.count, part.turn.random)
            places, whole = np.arange(part.turn.count), part.whole or original
            found += self._comparison.compare(part.keep, part.answers, whole, places, turn, REMOVED, loose=True)
        return found

    def _draws_depend_on_data(
        self, run: Run, replaced: Sequence[_Replaced], original: Answers
    ) -> Generator[Turn, Answers, bool]:
        """Returns whether the data determine how many random numbers are drawn.

        Some replacements may leave that number unchanged by chance, so that more of them are tried.
        """
        if any(part.answers.random != original.random for part in replaced):
            return True
        for part in [*replaced] * REDRAWS if original.drew else ():
            batch = self._examples.with_others(part.keep)
            if batch is not None:
                answers = yield from run(Turn(batch, self._examples.count, rows=False))
                if answers.random != original.random:
                    return True
        return False

    def _without_random_numbers(
        self, run: Run, replaced: Sequence[_Replaced], removed: Sequence[_Removed], original: Answers
    ) -> Generator[Turn, Answers, list[Finding]]:
        """Compares again, loosely and without random numbers, because the data determine how many are drawn."""
        found = self._removal_findings(removed, original)
        for part in replaced:
            for random in (RandomNumbers.EVAL_MODE, RandomNumbers.MEANS):
                whole = yield from run(Turn(self._examples.batch, self._examples.count, random=random))
                answers = yield from run(Turn(part.batch, self._examples.count, random=random))
                if not (whole.drew or answers.drew):
                    break
            turn = _again(part.batch, self._examples.count, random)
            places = np.flatnonzero(part.keep)
            found += self._comparison.compare(part.keep, answers, whole, places, turn, REPLACED, loose=True)
        return found

    def _explain(self, run: Run, finding: Finding, original: Answers) -> Generator[Turn, Answers, None]:
        """Raises ``Refused``; names the module in which examples are mixed if two more runs can show it."""
        where = ""
        if self._overwritten:
            kept = f"The forward reads what earlier batches left in {quoted(sorted(self._overwritten))}."
            raise Refused(depend(finding.what, kept, STATE_CURE))
        if finding.turn is not None and finding.cure != RULE_CURE:
            once, again = Trace(self._model), Trace(self._model)
            turn = finding.turn(once)
            yield from run(turn)
            repeated = yield from run(
                Turn(self._examples.batch, self._examples.count, random=turn.random, rows=False, trace=again)
            )
            if turn.random is RandomNumbers.AS_DRAWN:
                alike = losses_repeat(repeated, original)
                if alike:  # once more: a loop that alternates may have been in phase
                    again_once = yield from run(Turn(self._examples.batch, self._examples.count, rows=False))
                    alike = losses_repeat(again_once, original)
                if not alike:
                    raise Refused(not_repeating(finding.what))
            is_part = turn.count != self._examples.count
            places = np.arange(turn.count) if is_part else finding.kept
            where = again.first_difference(once, finding.kept, places, loose=is_part)
        raise Refused(depend(finding.what, "" if finding.cure else where, finding.cure))


def _again(batch: Any, count: int, random: RandomNumbers = RandomNumbers.AS_DRAWN) -> Callable[[Trace], Turn]:
    return lambda trace: Turn(batch, count, rows=False, random=random, trace=trace)
