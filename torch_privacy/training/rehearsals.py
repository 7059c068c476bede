# SPDX-License-Identifier: Apache-2.0
"""Schedules rehearsals, and remembers what they have shown about the user's code."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from torch import nn

from ..jacobian.code_path import CodePath, RehearsedCode
from ..jacobian.independence import Rehearsal, draw_few, draw_halves, without_ends
from ..jacobian.turns import Answers, Turn
from ..sampling.batches import DatasetExamples
from ..sampling.item_check import ItemCheck
from ..support.model_state import ModelState
from .release import Releases, Share

THOROUGH = 2  # up to this step every batch is rehearsed in full: both halves are replaced, one is left out
RARELY = 64  # later, steps 4, 8, 16, ... are rehearsed, and each other step with a chance of 1 in 64, by the secret key

Script = Generator[Turn, Answers, None]


@dataclass
class Part:
    """Holds a (micro)batch in progress and its turns, of which the batch itself is the last."""

    examples: DatasetExamples
    share: Share
    number: int  # of the microbatch in its step
    is_last: bool
    script: Script
    rehearsed: bool
    thorough: bool  # whether it is rehearsed in full
    before: ModelState | None = None  # the model's, to be put back if the part is restarted


@dataclass
class Rehearsals:
    """Decides which (micro)batches are rehearsed and how, and remembers what was shown.

    Args:
        model: the user's model.
        releases: provides the secret key, which determines the steps, the microbatch and the examples.
        assumed: True if the user assumes independence, so that nothing is rehearsed.
        items: compares items with those of a data set with other examples; None if there is no need.
    """

    model: nn.Module
    releases: Releases
    assumed: bool
    items: ItemCheck | None = None
    moving: set[str] = field(default_factory=set)  # frozen parameters that the loop changes, such as a teacher's
    overwritten: set[str] = field(
        default_factory=set
    )  # attributes that hold data but are overwritten before they are read
    keeps_state: bool = False  # whether turns change buffers or attributes
    not_compared: set[str] = field(default_factory=set)  # what could not be compared, in words
    code: RehearsedCode = field(default_factory=RehearsedCode)  # the paths through the code that were rehearsed

    def are_due(self, step: int, number: int, count: int) -> tuple[bool, bool]:
        """Returns whether microbatch ``number`` of ``count`` is to be rehearsed, and whether in full."""
        early = step <= THOROUGH
        chance = int.from_bytes(self.releases.secret(b"rehearsal", step)[:8], "little")
        if self.assumed or number != chance // RARELY % count:
            return False, False
        return early or step & (step - 1) == 0 or chance % RARELY == 0, early

    def begin(
        self,
        examples: DatasetExamples,
        share: Share,
        step: int,
        number: int,
        count: int,
    ) -> Part:
        """Returns the part that begins with this microbatch."""
        rehearsed, thorough = self.are_due(step, number, count) if share.counts else (False, False)
        script = (
            self._script(examples, share, thorough=thorough)
            if rehearsed
            else one_turn(Turn(examples.batch, examples.count, is_batch=True))
        )
        before = ModelState(self.model) if self.keeps_state and not rehearsed else None
        return Part(examples, share, number, number == count - 1, script, rehearsed, rehearsed and thorough, before)

    def restart(self, part: Part) -> None:
        """Restarts a part with a full rehearsal, from the model's state before its first turn."""
        part.script.close()
        if part.before is not None:
            part.before.restore()
        part.script, part.rehearsed, part.thorough = self._script(part.examples, part.share, thorough=True), True, True

    def is_new(self, part: Part, code: CodePath) -> bool:
        """True if the part took a path through the code that no rehearsal has seen."""
        return part.share.counts and not (self.assumed or part.thorough or self.code.has(code, part.examples.count))

    def note_passed(self, part: Part, code: CodePath) -> None:
        """Remembers the path of a part that passed its rehearsal."""
        if part.rehearsed:
            self.code.add(code, part.examples.count)

    def _script(self, examples: DatasetExamples, share: Share, *, thorough: bool) -> Script:
        units, by_owner = share.units, self.releases.by_owner
        if thorough:
            self.overwritten.clear()  # each full rehearsal shows again which they are
            if not examples.repeats():
                self.not_compared.add(
                    "The data set returns other items when they are fetched again, so whether they depend on items "
                    "fetched before was not shown. This is harmless if the data set uses random numbers of its own."
                )
        if self.items is not None:
            self.items(examples.indices, examples.generator, thorough=thorough)
            self.not_compared |= self.items.notes
        kept = draw_halves(examples.count, examples.generator, units)
        whole = units if by_owner else None  # an owner's examples may depend on each other
        alone = [draw_few(examples.count, examples.generator, whole)]
        alone += [without_ends(keep, whole) for keep in kept] if thorough else []
        return Rehearsal(
            self.model,
            examples,
            kept if thorough else kept[:1],
            alone=alone,
            rows_alone=thorough,
            rows_once=True,
            units=units,
            whole_units=by_owner,
            moving=self.moving,
            overwritten=self.overwritten,
            notes=self.not_compared,
            keep_weights=thorough,
        ).turns()


def idle_turn(model: nn.Module, examples: DatasetExamples) -> Turn:
    """Returns a turn for a rank that needs none while others do; the model's buffers are put back after it."""
    return Turn(examples.batch, examples.count, rows=False, state=ModelState(model), is_idle=True)


def one_turn(turn: Turn) -> Script:
    """Returns the script of a single turn."""
    yield turn
