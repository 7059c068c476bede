# SPDX-License-Identifier: Apache-2.0
"""Shows by rehearsals that examples do not depend on each other: the batch runs again with other examples in it.

One sentence must hold: example i's loss, and its row of the Jacobian, are functions of example i and of the model
alone. A rehearsal shows that for any code, without inspecting it:

* **Replace** (tight). A random half of the batch is kept, and other examples take the places of the rest, at equal
  shapes and with the same random numbers. Loss, norm, fingerprint and clip factor of every kept example must stay.
* **Remove** (loose). The kept half runs alone: the losses must stay, up to rounding. This finds what equal shapes hide:
  a division by the size of the batch, padding that is not masked, an index in the batch. If random numbers are drawn,
  both runs draw numbers that are equal for all examples (`support/draws.py`).

Where the data decide how many numbers are drawn, or which example gets them, a difference may mean nothing. Then the
comparison is made again with random numbers that do not move, and the difference counts if it shows there, too.

Buffers and attributes are put back before every run. What a run changes in them must not depend on the examples, nor
on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from ...support.contents import Saved, same
from ...support.draws import AS_DRAWN, Rule
from ...support.model_state import ModelState, ParameterDigests, extra_states
from ...support.validate import Refused, quoted
from .comparison import (
    REPEATED,
    RULE_CURE,
    STATE_CURE,
    AnswerComparison,
    ChangedAnswer,
    depend,
    differing,
    losses_repeat,
    not_repeating,
    written_into,
)
from .redrawn import OtherRun, Redrawn, Run
from .trace import Trace
from .turn import Answers, BatchVariants, Turn
from .unrepeatable import not_compared, varying_names


@dataclass
class RehearsalMemory:
    """Holds what rehearsals have shown about the user's code, for later ones.

    Attributes:
        moving: names of frozen parameters that the user's loop changes between runs, such as those of a teacher that
            follows the weights; they are put back too.
        overwritten: names of attributes that take in data, but are written before they are read, such as the last
            attention weights. Before the batch itself they are not put back: if they were read, answers would change.
        varying: names of attributes that differ between two runs of the same batch, such as durations, and are never
            read. They are not put back before the other runs: if they were read, answers would change.
        notes: what could not be compared, in words.
        draws_move: whether the data decide how many random numbers are drawn, as with packed sequences. Later
            rehearsals that are not in full replace other examples with numbers at a level from the start.
    """

    moving: set[str] = field(default_factory=set)
    overwritten: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    draws_move: bool = False


class Rehearsal:
    """Produces the runs of one batch, of which the last is the batch itself.

    Args:
        model: its buffers and attributes are put back before every run.
        examples: the batch.
        halves: for each replacement, which examples are kept (count,).
        generator: chooses the random numbers that are compared where those of the batch cannot be.
        alone: for each removal, which examples are kept (count,).
        rows_alone: whether the rows of the first of these are compared too, and not its losses only.
        rows_once: compare rows in the first replacement only, and losses in the others.
        units: (count,) number of the row that each example belongs to, if several share one.
        whole_units: whether the examples in ``alone`` are all those of their units, so that their rows are compared.
        memory: what earlier rehearsals have shown; this one adds to it.
        keep_weights: copy the trained parameters, and put them back if the loop moves them itself.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: BatchVariants,
        halves: Sequence[np.ndarray],
        generator: np.random.Generator,
        *,
        alone: Sequence[np.ndarray] = (),
        rows_alone: bool = False,
        rows_once: bool = False,
        units: np.ndarray | None = None,
        whole_units: bool = False,
        memory: RehearsalMemory | None = None,
        keep_weights: bool = False,
    ):
        self._model, self._examples, self._halves, self._generator = model, examples, halves, generator
        self._alone = [keep for keep in alone if 0 < keep.sum() < examples.count]
        self._comparison = AnswerComparison(examples.count, units)
        self._whole_rows, self._rows_alone, self._rows_once = units is None or whole_units, rows_alone, rows_once
        self._memory = memory or RehearsalMemory()
        self._expected: dict[str, Any] = {}  # what the batch itself left in attributes that may be overwritten
        self._keep_weights = keep_weights

    @property
    def _is_thorough(self) -> bool:
        return len(self._halves) > 1

    def turns(self) -> Generator[Turn, Answers, None]:
        """Yields one run after the other, and receives its answers by ``send``; ends after the batch itself.

        Raises:
            Refused: an answer for a kept example changed, or a run changed what it must not.
        """
        frozen = {name for name, p in self._model.named_parameters() if not p.requires_grad}
        kept = [Saved(p) for p in self._model.parameters() if p.requires_grad] if self._keep_weights else []
        while True:
            before, marks = ModelState(self._model, self._memory.moving), ParameterDigests(self._model)
            passed = False
            try:
                moved, overwritten = yield from self._attempt(before, marks)
                passed = not (moved or overwritten)
            finally:
                if not passed:
                    before.restore()
                    for weights in kept:
                        weights.restore()
            if passed:
                return
            if not moved <= frozen - self._memory.moving:
                raise Refused(written_into(sorted(moved)))
            self._memory.moving |= moved
            self._memory.overwritten |= overwritten
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
            if self._is_thorough:
                ended.append(before.changes(with_parameters=True))
            before.restore(except_for=self._memory.overwritten if turn.is_batch else self._memory.varying)
            if turn.is_batch:
                moved.update(marks.changed(self._model))

        def run(turn: Turn) -> Generator[Turn, Answers, Answers]:
            turn.before, turn.state = [partial(prepare, turn)], before
            answers = yield turn
            self._comparison.rounding = max(self._comparison.rounding, answers.rounding)
            return answers

        redrawn = Redrawn(
            self._examples, self._comparison, self._generator, run, self._memory.notes, thorough=self._is_thorough
        )
        replaced = yield from self._replacements(run, redrawn)
        self._comparison.parts_alone = not replaced
        removed = yield from self._removals(run, redrawn, replaced)
        took_sizes = yield from self._took_sizes_beside_draws(redrawn, removed)
        original = yield from run(Turn(self._examples.batch, self._examples.count, is_batch=True))
        if moved:
            return moved, set()
        changed = marks.changed(self._model)
        if changed:
            raise Refused(written_into(changed))
        took_data = {name for part in replaced for name in self._took_data(part.answers, part.whole or original)}
        for part in removed:
            took_sizes |= set() if part.whole else self._took_data(part.answers, original)
        took_data |= took_sizes
        by_loop = self._changed_by_loop(replaced, ended[1:])
        self._check_loop(by_loop - took_data - self._memory.overwritten - self._memory.varying)
        findings, are_doubtful = yield from self._findings(run, redrawn, [*replaced, *removed], original)
        if are_doubtful and not findings:
            original = yield from self._again(run, original, is_batch=True)
        in_file = took_data & set(_in_file(self._model))
        if took_data and not findings and not in_file and not took_data & self._expected.keys():
            original = yield from self._leave_out_varying(run, took_data, replaced, original)
        if took_data and not findings and not in_file:
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
        return names - self._memory.overwritten - self._memory.varying

    def _took_sizes_beside_draws(
        self, redrawn: Redrawn, removed: Sequence[OtherRun]
    ) -> Generator[Turn, Answers, set[str]]:
        """Returns the names of what holds something else for a part of the batch, such as the number of examples.

        Here random numbers are drawn. A difference counts if it is still there where they are equal in all places.
        """
        names: set[str] = set()
        for part in removed:
            found = self._took_data(part.answers, part.whole) - names if part.whole else set()
            if found:
                level = redrawn.at_levels(by_row=False)[0]
                fixed = yield from redrawn.other(part.keep, level, rows=False, is_part=True)
                if fixed is not None and fixed.whole is not None:
                    names |= found & self._took_data(fixed.answers, fixed.whole)
        return names

    def _leave_out_varying(
        self, run: Run, took_data: set[str], replaced: Sequence[OtherRun], original: Answers
    ) -> Generator[Turn, Answers, Answers]:
        """Takes out of ``took_data`` what differs between two runs of the same batch as well, and is never read."""
        batch, count = self._examples.batch, self._examples.count
        again = yield from run(Turn(batch, count))
        found = varying_names(took_data, original, again, [part.answers for part in replaced])
        if found:
            self._memory.varying |= found
            other = yield from run(Turn(batch, count))  # begins with what the run before has left
            kept = f"The forward reads what earlier runs left in {quoted(sorted(found))}."
            self._check_repeats(other, original, lambda what: depend(what, kept, STATE_CURE))
            took_data -= found
            self._memory.notes.add(not_compared(quoted(sorted(found))))
        return (yield from self._again(run, original, is_batch=True))

    @staticmethod
    def _changed_by_loop(replaced: Sequence[OtherRun], ended: list[dict[str, Any]]) -> set[str]:
        """Returns names of what the loop changed after ``training.step``, differently when the other half was kept."""
        if len(replaced) < 2:
            return set()
        by_loop = (differing(part.answers.later, end) for part, end in zip(replaced[:2], ended, strict=False))
        return differing(*ended[:2]) & set().union(*by_loop)

    # The runs

    def _replacements(self, run: Run, redrawn: Redrawn) -> Generator[Turn, Answers, list[OtherRun]]:
        """Runs the batch with other examples in some places."""
        if self._memory.draws_move and not self._is_thorough:
            other = yield from redrawn.other(self._halves[0], redrawn.at_levels(by_row=True)[0], rows=True)
            if other is not None and redrawn.says_something(other):
                return [other]
        replaced: list[OtherRun] = []
        for keep in self._halves:
            batch, rows = self._examples.with_others(keep), not (replaced and self._rows_once)
            if batch is not None:
                turn = Turn(batch, self._examples.count, rows=rows, replaces=True)
                replaced.append(OtherRun(keep, turn, (yield from run(turn))))
            elif self._examples.drawn_together:  # perhaps how many numbers collate_fn draws depends on the examples
                for draws in redrawn.at_levels(by_row=True):
                    other = yield from redrawn.other(keep, draws, rows=rows)
                    replaced += [] if other is None else [other]
        if not replaced and self._examples.count > 1:
            self._memory.notes.add("No examples were replaced by others, because none made a batch of equal shapes.")
        return replaced

    def _removals(
        self, run: Run, redrawn: Redrawn, replaced: Sequence[OtherRun]
    ) -> Generator[Turn, Answers, list[OtherRun]]:
        """Runs every part alone."""
        if not self._alone:
            return []
        rows = (not replaced or self._rows_alone) and self._whole_rows
        is_random = not replaced or replaced[0].whole or replaced[0].answers.drew or self._examples.drawn_together
        draws = redrawn.by_place if is_random else AS_DRAWN
        whole = (yield from redrawn.whole(draws, rows=rows)) if is_random else None
        removed = []
        for number, keep in enumerate(self._alone):
            part = self._examples.without(keep, draws)
            if part is not None:
                with_rows = rows and (number == 0 or not replaced)
                turn = Turn(part, int(keep.sum()), rows=with_rows, draws=draws, keep=keep)
                removed.append(OtherRun(keep, turn, (yield from run(turn)), whole))
        self._memory.notes |= self._examples.notes
        return removed

    def _again(self, run: Run, original: Answers, *, is_batch: bool) -> Generator[Turn, Answers, Answers]:
        """Runs the batch again, as a rehearsal or because it must come last; it must give the same answers."""
        again = yield from run(Turn(self._examples.batch, self._examples.count, is_batch=is_batch))
        self._check_repeats(again, original, not_repeating)
        return again

    def _check_repeats(self, again: Answers, original: Answers, message: Callable[[str], str]) -> None:
        everyone = np.arange(self._examples.count)
        found = self._comparison.compare(everyone >= 0, again, original, everyone, None, REPEATED, loose=False)
        if found:
            raise Refused(message(found[0].what))

    # What they show

    def _findings(
        self, run: Run, redrawn: Redrawn, others: Sequence[OtherRun], original: Answers
    ) -> Generator[Turn, Answers, tuple[list[ChangedAnswer], bool]]:
        """Returns the first answer that changed because of other examples; and whether the batch must run again."""
        doubtful = False
        for other in others:
            found = redrawn.compare(other, original)
            if found and (original.drew or self._examples.drawn_together):
                if not doubtful:
                    yield from self._again(run, original, is_batch=False)
                left, doubtful = (yield from redrawn.confirm(other, found, original)), True
                self._memory.draws_move |= not (left or other.is_part) and other.answers.random != original.random
                if left is None and other.is_part:
                    self._note_random(are_replaced=len(self._alone) < len(others))
                    continue
                found = found if left is None else left
            if found:
                return found, doubtful
        return [], doubtful

    def _note_random(self, *, are_replaced: bool) -> None:
        """Notes that parts could not be compared; raises if other examples could not either."""
        if not are_replaced:
            raise Refused(
                "rehearsal: no examples fit in the places of others, and the forward draws random numbers that cannot "
                "be replaced, even in eval mode, so nothing can be shown about the examples' independence. Draw them "
                "by functions of torch, or by those of the modules numpy.random and random; or turn them off in eval "
                "mode, let collate_fn give batches of equal shapes, or pass Examples(data, "
                "assume_independent='reason')."
            )
        self._memory.notes.add(
            "Parts of the batch were not compared, because the forward draws random numbers that cannot be replaced: "
            "it is random even in eval mode."
        )

    def _explain(self, run: Run, finding: ChangedAnswer, original: Answers) -> Generator[Turn, Answers, None]:
        """Raises ``Refused``; names the module in which examples are mixed if two more runs can show it."""
        where = ""
        if self._memory.overwritten:
            kept = f"The forward reads what earlier batches left in {quoted(sorted(self._memory.overwritten))}."
            raise Refused(depend(finding.what, kept, STATE_CURE))
        if finding.turn is not None and finding.cure != RULE_CURE:
            once, again = Trace(self._model), Trace(self._model)
            turn = finding.turn(once)
            yield from run(turn)
            whole = self._examples.whole(turn.draws)
            repeated = yield from run(Turn(whole, self._examples.count, draws=turn.draws, rows=False, trace=again))
            if turn.draws.rule is Rule.AS_DRAWN:
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


def _in_file(model: nn.Module) -> Iterator[str]:
    """Yields the names of what is in the model's file besides parameters."""
    yield from (name for name, _ in extra_states([*model.named_modules()]))
    for prefix, module in model.named_modules():
        unsaved = getattr(module, "_non_persistent_buffers_set", ())
        names = (key for key, _ in module.named_buffers(recurse=False, remove_duplicate=False) if key not in unsaved)
        yield from (f"{prefix}.{key}" if prefix else key for key in names)
