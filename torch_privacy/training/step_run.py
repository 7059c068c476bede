# SPDX-License-Identifier: Apache-2.0
"""Runs the user's loop on the batches of a step, rehearsals included; knows neither noise nor ledger."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from torch import Tensor

from ..jacobian.parallel.shards import whole_losses
from ..jacobian.tape import Tape
from ..mechanisms.sums import Recording, RunAgain, Summation
from ..model_check.rehearsal.comparison import coarsest_rounding
from ..model_check.rehearsal.row_digests import RowAnswers, direction
from ..model_check.rehearsal.turn import Answers, Turn
from ..sampling.batches import BatchRequest
from ..sampling.owners import OwnerSampler
from ..sampling.variants import DatasetExamples
from ..support.draws import AS_DRAWN
from ..support.fixed_draws import drawing_in
from ..support.model_state import MutationGuard
from ..support.normalization import SmallGroups
from ..support.random_state import SeededRandomNumbers, owned_by_another, random_position
from ..support.torch_modes import UNCOMPILED
from ..support.validate import Refused
from ..support.warning import warn
from .callbacks import Listener
from .draws import Share
from .loop_checks import (
    ForwardHooks,
    OneThread,
    Pending,
    check_still_trained,
    check_user_code,
    equal_rates,
    flat_losses,
    refusing_used_graphs,
)
from .meeting import Meeting
from .placement import Ranked
from .rehearsals import Answered, FirstRun, Part
from .release import Releases
from .state import Setup, State, StepSums, while_alive

Run = Generator[Pending | None, Tensor, StepSums | None]


class StepRun:
    """Runs the batches of steps, as a coroutine.

    It yields a batch that waits for the loop's losses, is sent these, and yields None: the next batch is made when it
    is asked for. It returns the sums of the step.

    Args:
        setup, state: of the training.
        meeting: with the other ranks.
        listener: follows the steps.

    Attributes:
        run: of the step in progress.
        pending: the batch that was handed out and waits for its losses.
        part: the (micro)batch in progress.
        turns_made: turns of it that were answered.
        is_rehearsal: whether the turn handed out last is a rehearsal.
        is_within_step: True between the microbatches of a step.
    """

    def __init__(self, setup: Setup, state: State, meeting: Meeting, listener: Listener):
        self._setup, self._state, self.meeting, self.listener = setup, state, meeting, listener
        self.one_thread = OneThread()
        self.run: Run | None = None
        self.pending: Pending | None = None
        self.part: Part | None = None
        self.turns_made = 0
        self.is_rehearsal = self.is_within_step = False
        self.hooks = ForwardHooks(
            while_alive(self, lambda runs: runs.pending, None),
            while_alive(self, lambda runs: lambda inputs: runs._state.outside.note(inputs, runs._state.step), None),
        )
        self.hooks.register(setup.model)
        self._known_shares: tuple[Releases | None, int, Sequence[Share]] = None, 0, ()

    # A step

    def step(self, fetched: Iterator[DatasetExamples]) -> Run:
        """Runs the next step on the fetched batches."""
        state, total = self._state, StepSums()
        records = state.releases.draws.records(state.step)
        self._check_places(records)
        self.listener.begin_step(len(records))
        shares = self._shares(state.releases, state.step)
        state.guard.check_not_lent()
        self.meeting.begin_step()
        self._setup.mechanism.begin(self._setup.model, state.tensors, state.releases.noise.key, state.step)
        self.meeting.check_public_tensors()
        yield from self.observed(self.listener.batches_before_step(state))
        for number, share in enumerate(shares):
            part = state.rehearsals.begin(next(fetched), share, state.step, number, len(shares))
            yield from self._turns(part, total)
        return total

    def _check_places(self, records: np.ndarray) -> None:
        """Refuses rows that have moved, where an example would be drawn again, or for another owner, at a new place.

        With several ranks, too: where they do not move alike, one example is drawn at two places of a batch. Elsewhere
        rows may move. Those that were changed are noted.
        """
        settings, ranks = self._setup.settings, self._setup.placement.ranks
        matters = settings.sampling.needs_places or settings.owners is not None or ranks.size > 1
        if matters and not self._setup.batches.places.are_kept(records):
            raise Refused(
                f"PrivateTraining: rows of the data set were moved or replaced before step {self._state.step}, so that "
                "an example may be in more steps, on more ranks, or be that of more owners, than the price is for. "
                "Leave the data as they are from the start to the last step: batches are drawn at random, and need no "
                "shuffling."
            )
        if self._setup.batches.places.are_rewritten(records):
            self._state.rewritten.note(self._state.step)

    def requests(self, end: int) -> Iterator[BatchRequest]:
        """Yields a request for every (micro)batch from the next step to the end."""
        releases, rehearsals = self._state.releases, self._state.rehearsals
        for later in range(self._state.step, end):
            shares = self._shares(releases, later)
            for number, share in enumerate(shares):
                rehearsed, _ = rehearsals.are_due(later, number, len(shares))
                seed = releases.draws.own_secret(b"data", later, number)
                yield BatchRequest(share.indices, self._setup.settings.views, seed, rehearsed)

    def _shares(self, releases: Releases, step: int) -> Sequence[Share]:
        """Returns this rank's share of each (micro)batch of a step; asked for twice in a step."""
        if self._known_shares[0] is not releases or self._known_shares[1] != step:
            self._known_shares = releases, step, self._find_shares(releases, step)
        return self._known_shares[2]

    def _find_shares(self, releases: Releases, step: int) -> Sequence[Share]:
        mechanism = self._setup.mechanism
        if isinstance(releases.draws.sampler, OwnerSampler):  # rows are owners
            return releases.draws.parts(step)
        units = mechanism.units(releases.draws.sampler, step, len(releases.draws.records(step)))
        return releases.draws.parts(step, units, mechanism.num_rows)

    def observed(self, parts: Iterable[Part]) -> Generator[Pending | None, Tensor, None]:
        """Hands out batches of which nothing is released; recording and losses go to the listener that wants them."""
        for part in parts:
            self.part, self.turns_made = part, 0
            turn = next(part.script)
            try:
                with self._prepared(part, turn) as pending:
                    losses = flat_losses((yield pending), turn.count, self._setup.settings.views)
                    check_user_code(pending, losses)
                    with refusing_used_graphs():
                        assert turn.take is not None
                        turn.take(pending.tape, losses)
            finally:
                self.forget()
            self.is_rehearsal = True
            yield None

    def leave_step(self) -> None:
        """Ends the step in progress, if there is one, without its sums."""
        run, self.run = self.run, None
        if run is not None:
            run.close()
        self.forget()

    def forget(self) -> None:
        """Drops the batch in progress, if any, and restores the model."""
        if self.part is not None:
            self.part.script.close()
        self.part, self.is_within_step = None, False
        self.hooks.unwind()
        self.meeting.let_go()

    # A (micro)batch and its turns

    def _turns(self, part: Part, total: StepSums) -> Generator[Pending | None, Tensor, None]:
        """Hands out the turns of a (micro)batch, of which the batch itself is the last; adds its sums to the total."""
        self.part, self.turns_made = part, 0
        turn: Turn | None = next(part.script)
        while turn is not None:
            with self._prepared(part, turn) as pending:
                losses = yield pending
                self.turns_made += 1
                turn = self._after_turn(pending, part, losses, total)
            if turn is not None or not part.is_last:
                yield None

    def _after_turn(self, pending: Pending, part: Part, losses: Tensor, total: StepSums) -> Turn | None:
        """Takes the losses of a turn; returns the next turn, or None after the last one of all ranks."""
        place = f"answers turn {self.turns_made} of part {part.number + 1} of step {self._state.step}"
        try:
            turn, left_out = self._next_turn(pending, part, losses), 0
            if turn is None:
                self._state.tensors = self._setup.tensors()  # the user's code may have frozen some
            if part.answered is not None:
                left_out = part.answered.summation.num_left_out
        except Exception as error:
            self.meeting.tell(place, error)
            raise
        turn, left_out = self.meeting.answered(place, turn, part, left_out)
        self.is_rehearsal = turn is not None  # also on a rank with an idle one
        if turn is None:
            total.left_out += left_out
            self._end(part, total)
        return turn

    def _next_turn(self, pending: Pending, part: Part, losses: Tensor) -> Turn | None:
        """Takes the losses of a turn: sums the batch, or compares; returns the next turn, or None after the batch."""
        turn, rehearsals = pending.turn, self._state.rehearsals
        if turn.is_idle or rehearsals.has_switched(part):
            self._wait_for_losses()
            pending.close()
            if turn.is_idle:
                assert turn.state is not None
                turn.state.restore()
                return None
            rehearsals.restart(part, None)
            return next(part.script)
        try:
            check_still_trained(pending)
            answered, answers = self._answers(pending, part, losses)
            pending.close()
            if turn.state is not None:
                rehearsals.keeps_state = bool(rehearsals.keeps_state or answers.changes)
            # Not with other examples or random numbers, which may take a path that the batch never takes.
            if turn.is_batch and answered is not None and rehearsals.is_new(part, answered.code):
                rehearsals.restart(part, FirstRun.of(answered.code, answers.losses, answered.sums))
                return next(part.script)
            try:
                return part.script.send(answers)
            except StopIteration:
                assert turn.is_batch, "the batch itself comes last"
                assert answered is not None
                if part.first is not None:
                    part.first.check_repeated(FirstRun.of(answered.code, answers.losses, answered.sums))
                part.answered = answered
                return None
        except RunAgain:
            pending.close()
            rehearsals.restart(part, None)
            return next(part.script)
        except BaseException as error:
            pending.close()
            part.script.close()
            if isinstance(error, Refused):
                self._state.check_diverged(error)
            raise

    def _end(self, part: Part, total: StepSums) -> None:
        """Adds the sums of a (micro)batch, after the last turn of all ranks."""
        answered, part.answered = part.answered, None
        assert answered is not None
        if self._setup.placement.counts:
            self.listener.after_batch(part.share, answered.losses, answered.summation)
        self._state.rehearsals.note_passed(part, answered.code, self._state.step)
        self.meeting.add(total, answered.sums)
        self.is_within_step = not part.is_last

    # A turn

    @contextmanager
    def _prepared(self, part: Part, turn: Turn) -> Iterator[Pending]:
        """Sets up recording and random numbers for the user's code; ends them with the ``with`` block."""
        if owned_by_another(self):
            raise Refused(
                "PrivateTraining: a batch of another training waits for its step, with random numbers set up for it. "
                "Call its step first: run the two loops one after the other, not in a zip. If that loop was left by an "
                "error, delete what keeps it: that training, or a progress bar over it."
            )
        for act in turn.before:
            act()
        if turn.is_batch and self.turns_made:
            turn.batch = part.examples.batch  # an earlier turn may have written into the one that it was given
        part.rates = equal_rates(self._setup.optimizer, part.rates)
        setup, state = self._setup, self._state
        state.tensors = setup.tensors()
        size, tape = turn.count * setup.settings.views, self._recorder(part, turn)
        contexts, numbers = ExitStack(), None
        try:
            contexts.enter_context(UNCOMPILED)
            contexts.enter_context(setup.placement.running())
            seed = state.releases.draws.own_secret(b"random numbers", state.step, part.number)
            numbers = SeededRandomNumbers(seed, owner=self)
            if part.rehearsed and part.start is None:
                part.start = random_position()  # the same before every turn
                numbers.begin(seed)
            if turn.draws is not AS_DRAWN:
                turn.drawn = contexts.enter_context(drawing_in(setup.model, turn.draws, size))
            if turn.trace is not None:
                contexts.enter_context(turn.trace.recording(size))
            if turn.around is not None:
                contexts.enter_context(turn.around())
            guard = MutationGuard(setup.model, setup.tensors_of.tree)
            is_first = state.step + part.number + self.turns_made == 0
            notes = SmallGroups(setup.model, lambda text: warn(f"PrivateTraining: {text}")) if is_first else None
            pending = Pending(turn, tape, guard, numbers, contexts, notes)
            self.is_rehearsal, self.pending = not turn.is_batch, pending
            place = f"turn {self.turns_made + 1} of part {part.number + 1} of step {state.step}"
            self.meeting.begin_turn(turn, place)
            yield pending
        finally:
            if self.pending is not None:
                self.pending.stop()
            self.pending = None
            contexts.close()
            if numbers is not None:
                numbers.close()

    def present_turn(self) -> tuple[int, int, int] | None:
        """Returns what identifies the turn that waits for its losses, or None."""
        part = self.part
        return None if self.pending is None or part is None else (self._state.step, part.number, self.turns_made)

    @contextmanager
    def recorded(self, pending: Pending) -> Iterator[None]:
        """Records the user's code in this thread, also if another one answers the batch."""
        pending.start()
        try:
            yield
        finally:
            pending.stop()
            for leave in () if pending.turn.drawn is None else pending.turn.drawn.on_return:
                leave()

    def _recorder(self, part: Part, turn: Turn) -> Recording | None:
        """Returns the recorder of a turn; None if only losses are compared."""
        setup, state, size = self._setup, self._state, turn.count * self._setup.settings.views
        if turn.take is not None:
            return setup.mechanism.exact_recorder(state.tensors, size) if turn.rows else None
        if not (turn.rows or turn.is_batch):
            return None
        return setup.mechanism.recorder(state.tensors, state.releases.noise.key, state.step, part.number, size)

    def _answers(self, pending: Pending, part: Part, losses: Tensor) -> tuple[Answered | None, Answers]:
        """Returns the sums of a turn, None if it has no recording, and what is compared."""
        turn, tape, setup = pending.turn, pending.tape, self._setup
        losses = flat_losses(losses, turn.count, setup.settings.views)
        changed_buffers = check_user_code(pending, losses)
        changes = {} if turn.state is None else turn.state.changes()
        self._wait_for_losses()
        losses = whole_losses(losses)
        summation = setup.mechanism.summation(part.share.units_of(turn.keep), turn.count)
        summation.defers = isinstance(setup.placement, Ranked) and setup.placement.reduces_in_buckets
        rows: RowAnswers | None = None
        sums: dict[str, Tensor] = {}
        if tape is not None and part.share.counts:
            if part.rehearsed:
                rows = RowAnswers(None if turn.is_batch else summation.compute_factors)
            tape.code.note([("changed", name) for name in changed_buffers] if changed_buffers else ())
            sums = self._clipped_sums(tape, losses, summation, rows, is_batch=turn.is_batch)
        if rows is not None:
            rows.factors = {name: factors.double().cpu() for name, factors in summation.factors.items()}
        if turn.drawn is not None:
            turn.drawn.end()
        end = random_position() if part.rehearsed else None
        answers = Answers(
            losses=losses.detach().view(turn.count, setup.settings.views),
            rows=rows,
            changes=changes,
            later={} if turn.state is None else turn.state.changes(),
            settled=tape is not None and not tape.measured,
            random=end,
            drew=end is not None and part.start != end,
            rounding=self._rounding(tape) if part.rehearsed else 0.0,
            shapes=0 if tape is None else tape.code.shapes,
        )
        self._state.reached.drew |= answers.drew
        answered = None if tape is None else Answered(sums, summation, tape.code, answers.losses)
        return answered, answers

    def _rounding(self, tape: Recording | None) -> float:
        return coarsest_rounding(self._state.tensors.trained.values(), None if tape is None else tape.code)

    def _clipped_sums(
        self, tape: Recording, losses: Tensor, summation: Summation, rows: RowAnswers | None, *, is_batch: bool
    ) -> dict[str, Tensor]:
        """Returns the clipped sums of a batch, or none for a rehearsal; either way ``rows`` takes what is compared."""
        reached, is_alone = self._state.reached, is_batch and self._setup.placement.ranks.size == 1
        with refusing_used_graphs():
            sums = tape.clipped_sum(
                losses,
                self._setup.mechanism.groups(list(tape.parameters)),
                summation if is_batch else None,
                merging=summation.merging,
                may_miss=reached.may_miss(tape.parameters) if is_alone else tape.parameters,
                memory_budget=self._setup.settings.performance.memory_budget,
                observe=None if rows is None else rows.take,
                observe_on=direction,
            )
        summation.check_bound()
        reached.note(tape.reached, tape.parameters, tape.padding if isinstance(tape, Tape) else None)
        if is_alone:
            reached.warn_of_missing(tape.parameters)
        return sums

    def _wait_for_losses(self) -> None:
        self.meeting.wait_for_losses(f"turn {self.turns_made} of step {self._state.step}")
