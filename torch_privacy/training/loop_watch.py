# SPDX-License-Identifier: Apache-2.0
"""Rehearses the variables of the user's loop: do losses depend on what earlier batches left in them?

A rehearsal puts the model back before each of its runs. What the loop itself keeps (a running mean, the weights of
groups, a list of losses) stays as it is. So in one run of each rehearsed batch, every variable that has changed since
an earlier rehearsal has its content of that time again, and the losses and rows of all examples must stay the same.
After the first steps it is the run with other examples, in which those of the kept ones must stay. What they depend on
must follow from the step count or from the released weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from ..model_check.rehearsal.comparison import AnswerComparison
from ..model_check.rehearsal.turn import Answers, Turn
from ..sampling.variants import DatasetExamples, equal_batches
from ..support.contents import MISSING, same
from ..support.model_state import ModelState
from ..support.validate import Refused
from .bystanders import OtherOptimizers
from .loop_contents import Exchange, Former, content_of
from .loop_frames import frames_of_loop, objects_of_loop
from .loop_rows import NOT_COMPARED, OtherRows, is_shared, is_small, may_be_read, reads_others
from .loop_suspects import CauseSearch, Counts, Suspect, Suspects, grouped
from .loop_variables import (
    Finder,
    Variable,
    attributes_of_model,
    holds_only,
    parts_of,
)

Script = Generator[Turn, Answers, None]
_Key = tuple[str, str]
_Other = tuple[Variable, Any]  # a variable and its earlier content


@dataclass(frozen=True)
class _Rehearsed:
    """A rehearsed batch, and what could come of the variables of the loop in it."""

    examples: DatasetExamples
    earlier: Mapping[_Key, Any]  # contents of variables at an earlier rehearsed batch
    begun: Mapping[_Key, Any]  # contents when the batch was fetched
    private: OtherRows  # private rows of other examples
    step: int
    units: np.ndarray | None
    rows: bool  # whether rows are compared, too
    fetches: bool  # whether items are compared that are fetched with earlier contents

    def fetched_with(self, others: list[_Other], changed: list[Variable]) -> Any:
        """Returns the batch as the data set and ``collate_fn`` make it with these contents.

        Other variables that have changed since the batch was fetched have their content of that time.
        """
        read, keys = [*filter(may_be_read, others)], {variable.key for variable, _ in others}
        former = [(v, self.begun.get(v.key, MISSING)) for v in changed if v.key not in keys]
        moved = [(v, then) for v, then in former if then is not MISSING and not same(v.read(), then)]
        exchange = Exchange([(v, Former(then)) for v, then in moved if may_be_read((v, then))] + read, [])
        other = self._fetched(exchange)
        differs = not equal_batches(other, self.examples.batch)  # twice alike, or it drew random numbers of its own
        return other if differs and equal_batches(self._fetched(exchange), other) else self.examples.batch

    def _fetched(self, exchange: Exchange) -> Any:
        exchange.enter()
        try:
            again = self.examples.again()
        finally:
            exchange.settle()
        return self.examples.batch if again is None else again


class LoopWatch:
    """Watches the variables of the loop, around rehearsed batches.

    Args:
        model: the model that is trained; what it holds is not the loop's.
        excluded: returns more objects that are not the loop's, such as the training; must not keep it alive.
        optimizer: its settings are put back, if a run with other contents changed them.
        others: notes other optimizers; what they train is named there.
    """

    def __init__(
        self, model: nn.Module, excluded: Callable[[], list[Any]], optimizer: Optimizer, others: OtherOptimizers
    ):
        self._model, self._excluded, self._optimizer = model, excluded, optimizer
        self.moving: set[str] = set()  # frozen parameters of the model that the loop changes, such as a teacher's
        self.suspects = Suspects(model)
        self.others = others
        self._earlier: Mapping[_Key, Any] | None = None  # contents at an earlier rehearsed batch
        self._counts = Counts()
        self._of_model: dict[_Key, Variable] = {}  # attributes of the model that the loop's code names
        self._left: dict[_Key, Any] = {}  # their contents after the last rehearsed batch, unless later ones change them
        self._by_forward: set[_Key] = set()  # those that change between a batch and its step
        # Those that the loop writes between batches, and those of the data set that it shares with workers.
        self._written, self._shared = set[_Key](), set[_Key]()

    @property
    def not_covered(self) -> list[str]:
        """Returns what the privacy statement says about variables on which losses depend."""
        return self.suspects.not_covered + self.others.not_covered

    # Batches

    def rehearsed(
        self, turns: Callable[[], Script], examples: DatasetExamples, step: int, units: np.ndarray | None, *, rows: bool
    ) -> Script:
        """Yields the turns of a rehearsal, and before the batch itself one with earlier contents of the variables.

        Unless rows are compared, the turn with other examples has the earlier contents, too. If that shows anything,
        the whole rehearsal is made again with turns that are apart, to find the cause.
        """
        found = self.variables(examples)
        begun = {key: content_of(variable.read()) for key, variable in self._of_model.items()}
        self.suspects.renew(found)
        self.suspects.observe(step)
        before = {key: content_of(variable.read()) for key, variable in found.items()}
        earlier = before if self._earlier is None else self._earlier
        self._counts.note(found, step)
        private = OtherRows(examples, often=not rows)
        batch = _Rehearsed(examples, earlier, before, private, step, units, rows, fetches=rows)
        known, is_over, script = self._earlier, False, turns()
        self._earlier = before
        try:
            turn = next(script)
            if turn.replaces and not rows:
                others, kept = self.changed(found, batch)
                batch = replace(batch, fetches=self._makes_items(batch, others))
                if not batch.fetches and (is_over := (yield from self._joined(script, turn, others, kept))):
                    return
                script = turns()
                turn = next(script)
            run = _Runs(self, batch, {} if rows else found)
            try:
                yield from run.turns(script, turn)
                is_over = True
            finally:
                script.close()
                run.settle()
        finally:
            self._leave(begun)
            if not is_over:  # the batch comes again, as for code that is new
                self._earlier = known

    def _makes_items(self, batch: _Rehearsed, others: list[_Other]) -> bool:
        """True if items are others with the earlier contents of these variables."""
        examples = batch.examples
        changed = [other for other in others if may_be_read(other) and not isinstance(other[1], OtherRows)]
        if not changed or not examples.fetches_here or examples.fetches_rows or not examples.repeats():
            return False
        return not equal_batches(batch.fetched_with(changed, []), examples.batch)

    def _leave(self, begun: Mapping[_Key, Any]) -> None:
        """Notes what is in the model's attributes when a rehearsed batch ends, and which of them the batch changed."""
        self._left = {key: content_of(variable.read()) for key, variable in self._of_model.items()}
        self._by_forward |= {key for key, left in self._left.items() if not same(begun.get(key, MISSING), left)}
        self._of_model = {}

    def _joined(
        self, script: Script, turn: Turn, others: list[_Other], kept: list[Variable]
    ) -> Generator[Turn, Answers, bool]:
        """Yields the turns of a rehearsal, of which the first has other examples and other contents of variables.

        Returns:
            False if the answers differ, or other turns than usual were asked for. Then the rehearsal is undone.
        """
        exchange, settings, passed, is_first = Exchange(others, kept), self.keep_settings(), False, True
        turn.around = exchange.exchanging

        def put_back() -> None:
            exchange.put_back()
            settings()

        try:
            answers = yield turn
            while True:
                was_batch = turn.is_batch
                turn = script.send(answers)
                if was_batch:
                    return False
                if is_first:
                    turn.before.insert(0, put_back)
                    is_first = False
                turn.around = self.suspects.watching if turn.is_batch and self.suspects.found else None
                answers = yield turn
        except StopIteration:
            passed = True
            return True
        except Refused:
            return False
        finally:
            script.close()
            if not passed:
                put_back()

    def watched(self, turn: Turn, step: int) -> Script:
        """Yields the turn of a batch that is not rehearsed; sees what becomes of variables on which losses depend."""
        for key in self._by_forward:
            self._left.pop(key, None)
        self.suspects.observe(step)
        if self.suspects.found:
            turn.around = self.suspects.watching
        yield turn
        self.suspects.judge()

    def forget(self) -> None:
        """Forgets earlier contents after a refusal: with them, the code that was refused might run again."""
        self._earlier = None

    def begin_loop(self) -> None:
        """Notes the steps of other optimizers from now on."""
        self.others.begin_loop()
        self._counts.begin_loop()

    def end_loop(self) -> None:
        """Lets go of the frames of the loop."""
        self.others.end_loop()
        self.suspects.release()

    # Variables

    def variables(self, examples: DatasetExamples) -> dict[_Key, Variable]:
        """Returns the present variables of the loop, without what belongs to the model or to the batch."""
        model = self._model
        own = [*model.modules(), *model.parameters(), *model.buffers(), *self._excluded()]
        finder = Finder(own + parts_of(examples.batch))
        found = finder.variables(frames_of_loop(), *objects_of_loop(), *examples.code)
        self._of_model = {v.key: v for v in attributes_of_model(model, finder.named)}
        left, self._left = self._left, {}
        self._written |= {k for k, v in self._of_model.items() if k in left and not same(v.read(), left[k])}
        found += [variable for key, variable in self._of_model.items() if key in self._written]
        of_data = [variable for variable in finder.of_data(examples.sources) if is_small(variable.read())]
        self._shared = {variable.key for variable in of_data if not examples.fetches_here and is_shared(variable)}
        found += [variable for variable in of_data if examples.fetches_here or variable.key in self._shared]
        known = {*map(id, [*model.parameters(), *model.buffers()]), *self.others.parameters}
        return {variable.key: variable for variable in found if not holds_only(variable.read(), known)}

    def changed(self, found: Mapping[_Key, Variable], batch: _Rehearsed) -> tuple[list[_Other], list[Variable]]:
        """Returns the variables to exchange, and others that have changed since: counts of steps, and suspects.

        Those that have not changed are exchanged if they have private rows of other examples.
        """
        private, unchanged = batch.private, batch.private.attributes
        others, kept, known = [], [], self.suspects.keys
        for key, variable in found.items():
            content, value = batch.earlier.get(key, MISSING), variable.read()
            if content is not MISSING and same(value, content):
                unchanged.append(variable)
                continue
            if key in known or self._counts.has(key, batch.step, value):
                kept.append(variable)
            else:
                others.append((variable, content))
        batch.examples.notes.update(NOT_COMPARED.format(v.name) for v, _ in others if v.key in self._shared)
        others += [(variable, private) for variable in unchanged if private.are_in(variable)]
        return others, kept

    def keep_settings(self) -> Callable[[], None]:
        """Returns what puts the optimizer's settings back."""
        groups = self._optimizer.param_groups
        kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]

        def put_back() -> None:
            for group, values in zip(groups, kept, strict=False):
                group.update(values)

        return put_back

    def keep_model(self) -> ModelState:
        """Returns a copy of the model's buffers and attributes."""
        return ModelState(self._model, self.moving)


class _Runs:
    """The runs of one rehearsed batch with earlier contents of the loop's variables."""

    def __init__(self, watch: LoopWatch, batch: _Rehearsed, found: Mapping[_Key, Variable]):
        self._watch, self._batch = watch, batch
        self._found = found  # the variables, if they are not to be looked for again
        self._comparison = AnswerComparison(batch.examples.count, batch.units)
        self._exchange = Exchange([], [])
        self._batch_turn = Exchange([], [])  # what it changes is put back before more runs
        self._others: list[_Other] = []
        self._kept: list[Variable] = []
        self._in_turn: set[_Key] = set()  # those that the batch's own turn changes
        self._put_back: list[Callable[[], None]] = []
        self._before = watch.keep_model()

    def turns(self, script: Script, turn: Turn) -> Script:
        """Yields the turns of the script from this one, one more before the batch, and more to explain it."""
        examples, exchanged = self._batch.examples, None
        while True:
            if turn.is_batch and exchanged is None:
                exchanged = yield self._turn(None, rows=self._batch.rows)
            answers = yield self._after_exchange(turn)
            try:
                turn = script.send(answers)
            except StopIteration:
                break
        if exchanged is not None and self._moves(exchanged, answers):
            rows = not self._moves(Answers(exchanged.losses, None, {}, None), answers)
            control = yield self._turn([], rows=rows)  # a difference without other contents is none of the loop's
            if self._moves(control, answers):
                self._watch._earlier = self._batch.earlier  # the next rehearsal judges what this one could not
            else:
                culprits = yield from self._culprits(answers, rows=rows)
                yield from self._check_rows(culprits, answers, rows=rows)
                self._watch.suspects.found += [self._suspect(group) for group in culprits]
                self._watch.suspects.observe(self._batch.step)
            turn = Turn(examples.batch, examples.count, is_batch=True, before=[self._before.restore])
            yield self._after_exchange(turn)

    def _culprits(self, original: Answers, *, rows: bool) -> Generator[Turn, Answers, list[list[_Other]]]:
        """Returns those variables on which losses or rows depend, in groups."""

        def matters(answers: Answers) -> bool:
            return self._moves(answers, original)

        search = CauseSearch[_Other](lambda others: self._turn(others, rows=rows), matters)
        return (yield from search.among(grouped(self._others)))

    def _check_rows(self, culprits: list[list[_Other]], original: Answers, *, rows: bool) -> Script:
        """Refuses private rows of other examples on which losses depend; drops those that do not show it again."""
        for group in [group for group in culprits if isinstance(group[0][1], OtherRows)]:
            again = yield self._turn(group, rows=rows)
            control = yield self._turn([], rows=rows)
            if self._moves(again, original) and not self._moves(control, original):
                raise Refused(reads_others(group[0][0].group))
            culprits.remove(group)

    def settle(self) -> None:
        """Puts back everything that a run with other contents changed."""
        self._exchange.settle()
        while self._put_back:
            self._put_back.pop()()

    def _turn(self, others: list[_Other] | None, *, rows: bool) -> Turn:
        """Returns a run of the batch in which these variables have earlier contents; by default all that changed."""
        examples = self._batch.examples

        def prepare() -> None:
            self.settle()
            self._batch_turn.settle()
            if others is None:
                found = self._found or self._watch.variables(examples)
                self._others, self._kept = self._watch.changed(found, self._batch)
            self._put_back = [self._watch.keep_model().restore, self._watch.keep_settings()]
            self._before.restore()
            kept = [v for v, _ in self._others] + self._kept
            exchanged = self._others if others is None else others
            self._exchange = Exchange(exchanged, kept)
            if self._batch.fetches:
                turn.batch = self._fetched_with(exchanged)

        turn = Turn(examples.batch, examples.count, rows=rows, before=[prepare])
        turn.around = lambda: self._exchange.exchanging()
        return turn

    def _fetched_with(self, others: list[_Other]) -> Any:
        """Returns the batch as the data set and ``collate_fn`` make it with these contents."""
        if not any(map(may_be_read, self._others)):
            return self._batch.examples.batch
        return self._batch.fetched_with(others, [*(variable for variable, _ in self._others), *self._kept])

    def _after_exchange(self, turn: Turn) -> Turn:
        """Lets a turn begin as if there had been none with earlier contents."""
        turn.before.insert(0, self.settle)
        if turn.is_batch:
            turn.around = self._noting
        return turn

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Notes which of the changed variables the batch's own turn changes."""
        begun = [(variable, content_of(variable.read())) for variable, _ in self._others]
        self._batch_turn = Exchange([], [variable for variable, _ in begun] + self._kept)
        self._batch_turn.enter()
        with self._watch.suspects.watching():
            yield
        self._in_turn |= {variable.key for variable, content in begun if not same(variable.read(), content)}

    def _suspect(self, group: list[_Other]) -> Suspect:
        suspect = Suspect(group[0][0].group, [variable for variable, _ in group])
        suspect.changes_in_turn = not self._in_turn.isdisjoint(suspect.keys)
        return suspect

    # Comparing

    def _moves(self, answers: Answers, original: Answers) -> bool:
        everyone = np.arange(self._batch.examples.count)
        how = "when a variable of the loop had an earlier content"
        return bool(self._comparison.compare(everyone >= 0, answers, original, everyone, None, how, loose=False))
