# SPDX-License-Identifier: Apache-2.0
"""Schedules rehearsals, and remembers what they have shown about the user's code."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..jacobian.recording.coverage import CodePath, RehearsedCode, described
from ..mechanisms.sums import Summation
from ..model_check.rehearsal.comparison import ALIKE, NEGLIGIBLE, not_repeated, repeats, shows_dependence
from ..model_check.rehearsal.kept import draw_few, draw_halves, without_ends
from ..model_check.rehearsal.rehearsal import Rehearsal, RehearsalMemory
from ..model_check.rehearsal.turn import Answers, Turn
from ..sampling.collate_check import CollateCheck
from ..sampling.item_check import ItemCheck
from ..sampling.variants import DatasetExamples
from ..support.model_state import ModelState, QuietState
from ..support.script_modules import registries_of
from ..support.validate import Refused
from ..support.warning import warn
from .draws import Draws, Share
from .loop_watch import LoopWatch

THOROUGH = 2  # up to this step every batch is rehearsed in full: both halves are replaced, one is left out
RARELY = 64  # least number of steps between the first steps of two epochs that are rehearsed
BLOCK = 256  # steps of which the secret key selects one, which is rehearsed
FIRST = 20  # batches that may run new code without a warning
OFTEN, SEVERAL = 0.1, 5  # share of later batches with new code that is warned of, and how many of them there must be
OFTEN_NEW = (
    "PrivateTraining: {} of the last {} batches ran code that no batch before had run, and each was rehearsed, which "
    "takes several times as long. New now: {}. Is a function, a lambda or a number made anew in each step? Make it "
    "once, before the loop."
)

Script = Generator[Turn, Answers, None]


@dataclass(frozen=True)
class FirstRun:
    """Holds what a batch that was set aside ran and gave; it must give the same when it comes again."""

    features: frozenset[Any]
    losses: Tensor
    sizes: Mapping[str, Tensor]  # norm, total and root of the number of entries of each clipped sum

    @classmethod
    def of(cls, code: CodePath, losses: Tensor, sums: Mapping[str, Tensor]) -> FirstRun:
        """Takes the losses of a batch, and the sizes of its clipped sums."""
        found = {name: t.double() for name, t in sums.items()}
        sizes = {
            name: torch.tensor([float(t.norm()), float(t.sum()), t.numel() ** 0.5], dtype=torch.float64)
            for name, t in found.items()
        }
        return cls(frozenset(code.features), losses.detach().double().cpu(), sizes)

    def check_repeated(self, again: FirstRun) -> None:
        """Refuses a loop that gave other answers when it ran code that it did not run again.

        Sums are compared if the same parameters are trained.
        """
        missing = self.features - again.features
        if missing and not (self._has_losses_of(again) and self._has_sizes_of(again)):
            named = {getattr(feature[0], "__name__", "") for feature in missing if isinstance(feature, tuple)}
            raise Refused(not_repeated(sorted(name for name in named if name)))

    def _has_losses_of(self, again: FirstRun) -> bool:
        sizes = self.losses.abs().nan_to_num(0, posinf=0)
        return repeats(again.losses, self.losses, sizes.clamp(min=0.1 * max(sizes.flatten().tolist(), default=0.0)))

    def _has_sizes_of(self, again: FirstRun) -> bool:
        """True if the sums have equal sizes; entries that cancel leave a total of nothing but rounding."""
        if self.sizes.keys() != again.sizes.keys() or not self.sizes:
            return True
        first, second = (torch.stack([run.sizes[name] for name in self.sizes]) for run in (self, again))
        norms = first[:, 0].nan_to_num(0, posinf=0)
        scale = norms.clamp(min=NEGLIGIBLE / ALIKE * float(norms.max()))
        return repeats(second[:, :2], first[:, :2], torch.stack([scale, scale * first[:, 2]], 1))


class ModelSettings:
    """Holds the modes of modules, the numbers of torch's own layers, and which parameters require a gradient."""

    def __init__(self, places: SettingPlaces):
        self._places = places
        self._before: list[Any] | None = places.values()
        self._switched: list[tuple[dict[str, Any], str, Any]] = []

    def switched(self) -> Collection[str]:
        """Returns the keys of those that have changed since; none when asked again."""
        before, self._before = self._before, None
        if before is None or before == (now := self._places.values()):
            return ()
        changed = zip(self._places.all, before, now, strict=True)
        self._switched = [(holder, key, value) for (holder, key), old, value in changed if old != value]
        return [key for _, key, _ in self._switched]

    def keep(self) -> None:
        """Makes the changes again, if they were put back."""
        for holder, key, value in self._switched:
            holder[key] = value


class SettingPlaces:
    """Knows where a model has its settings."""

    def __init__(self, model: nn.Module):
        holders = [
            (vars(module), key)
            for module in model.modules()
            for key, value in vars(module).items()
            if key == "training"
            or (type(module).__module__.startswith("torch.") and key[0] != "_" and type(value) in (bool, int, float))
        ]
        parts = [registries_of(module)[0] for module in model.modules()]
        self._dicts, self._keys = [holder for holder, _ in holders], [key for _, key in holders]
        self._parameters = [(part, name) for part in parts for name in part]  # FSDP2 puts whole ones into them
        self.all: list[tuple[dict[str, Any], str]] = holders + [({}, TRAINED)] * len(self._parameters)

    def values(self) -> list[Any]:
        """Returns the settings, in a fixed order."""
        values = [*map(dict.get, self._dicts, self._keys)]
        for part, name in self._parameters:
            values.append(getattr(part.get(name), TRAINED, None))
        return values


TRAINED = "requires_grad"


@dataclass(frozen=True)
class Answered:
    """Holds what the last turn of a (micro)batch gave, of which the step is made. Secret."""

    sums: dict[str, Tensor]
    summation: Summation
    code: CodePath
    losses: Tensor


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
    before: ModelState | QuietState | None = None  # the model's, to be put back if the part is restarted
    first: FirstRun | None = None  # of the batch, if it was set aside because it ran new code
    step: int = 0
    settings: ModelSettings | None = None  # when it began
    rates: list[dict[str, Any]] | None = None  # the optimizer's settings at its first turn
    start: Any = None  # position at which its random numbers begin, if it is rehearsed
    answered: Answered | None = None  # what the batch itself gave


@dataclass(frozen=True)
class Coupled:
    """Names the releases between the last rehearsal that passed and one that failed."""

    first: int
    last: int
    found: int  # the step at which the rehearsal failed

    def __str__(self) -> str:
        return (
            f"NOT PRIVATE (from the last rehearsal that passed: step {self.found} showed that examples depend on each "
            f"other, and releases {self.first} to {self.last} were made since step {self.first - 1}, the last one "
            f"before that passed, and may leak; if nothing made since is ever shown, go on from a state of step "
            f"{self.first} or before, in another run folder)"
            if self.first
            else f"NOT PRIVATE (no rehearsal has passed: step {self.found} showed that examples depend on each other, "
            f"and releases 0 to {self.last}, which were made before, may leak; begin anew)"
        )


@dataclass
class Rehearsals:
    """Decides which (micro)batches are rehearsed and how, and remembers what was shown.

    Args:
        model: the user's model.
        draws: provide the secret key, which determines the steps, the microbatch and the examples.
        assumed: True if the user assumes independence, so that nothing is rehearsed.
        num_steps: of the training; the last one is rehearsed.
        epoch: number of steps in which every example is in one batch on average.
        watch: watches the variables of the loop.
        items: compares items with those of a data set with other examples; None if there is no need.
        collate: compares what collate_fn makes after other batches; None if there is no need.
    """

    model: nn.Module
    draws: Draws
    assumed: bool
    num_steps: int
    epoch: float
    watch: LoopWatch
    items: ItemCheck | None = None
    collate: CollateCheck | None = None
    memory: RehearsalMemory = field(default_factory=RehearsalMemory)
    keeps_state: bool | None = None  # whether turns change buffers or attributes; None before the first rehearsal
    last_passed: int = -1  # the last step with a rehearsal that passed
    coupled: Coupled | None = None  # releases that may leak, if a rehearsal has failed
    code: RehearsedCode = field(default_factory=RehearsedCode)  # the paths through the code that were rehearsed

    def __post_init__(self) -> None:
        self._places = SettingPlaces(self.model)
        self._due: tuple[Any, set[int]] = None, set()
        self._num_settled = self._num_new = (
            0  # batches after the first steps; those that ran new code, without the first 20
        )
        self._warned, self._quiet = False, None
        self.memory.moving = self.watch.moving

    def are_due(self, step: int, number: int, count: int) -> tuple[bool, bool]:
        """Returns whether microbatch ``number`` of ``count`` is to be rehearsed, and whether in full."""
        due = not self.assumed and (step == self.num_steps - 1 or number in self._due_of(step, count))
        return due, due and step <= THOROUGH

    def _due_of(self, step: int, count: int) -> set[int]:
        """Returns the microbatches of a step, of ``count``, that are to be rehearsed; asked for twice in a step."""
        asked = self.draws, step, count
        if self._due[0] != asked:
            self._due = asked, self._find_due(step, count)
        return self._due[1]

    def _find_due(self, step: int, count: int) -> set[int]:
        turns = self._turns(step)
        if not turns:
            return set()
        first = self._chance(b"rehearsal")  # the microbatch that is rehearsed first; the others follow in turn
        return {(first + turn) % count for turn in turns}

    def _turns(self, step: int) -> list[int]:
        """Returns, for each reason to rehearse a step, how many steps were rehearsed for the same reason before."""
        turns: list[int] = []
        if step <= THOROUGH or step & (step - 1) == 0:
            turns.append(step.bit_length())
        block, place = divmod(step, BLOCK)
        if place == self._chance(b"rehearsed step", block) % BLOCK:
            turns.append(block)
        period = self.epoch * math.ceil(RARELY / self.epoch)
        if step and step // period > (step - 1) // period:
            turns.append(int(step // period))
        return turns

    def _chance(self, purpose: bytes, *numbers: int) -> int:
        return int.from_bytes(self.draws.secret(purpose, *numbers)[:8], "little")

    def begin(self, examples: DatasetExamples, share: Share, step: int, number: int, count: int) -> Part:
        """Returns the part that begins with this microbatch."""
        rehearsed, thorough = self.are_due(step, number, count) if share.counts else (False, False)
        script = (
            self._script(examples, share, step, thorough=thorough)
            if rehearsed
            else self.watch.watched(Turn(examples.batch, examples.count, is_batch=True), step)
        )
        before = None if rehearsed else self._state_before()
        is_last, thorough = number == count - 1, rehearsed and thorough
        return Part(
            examples,
            share,
            number,
            is_last,
            script,
            rehearsed,
            thorough,
            before,
            step=step,
            settings=ModelSettings(self._places),
        )

    def _state_before(self) -> ModelState | QuietState:
        """Returns what puts the model's state back if a batch that is not rehearsed turns out to run new code."""
        if self.keeps_state is not False:
            return ModelState(self.model)
        self._quiet = self._quiet or QuietState(self.model)
        self._quiet.keep()
        return self._quiet

    def restart(self, part: Part, first: FirstRun | None) -> None:
        """Restarts a part with a full rehearsal, from the model's state before its first turn."""
        part.script.close()
        part.first = part.first or first
        if part.before is not None:
            part.before.restore()
        if part.settings is not None:
            part.settings.keep()
        part.script = self._script(part.examples, part.share, part.step, thorough=True)
        part.rehearsed = part.thorough = True

    def has_switched(self, part: Part) -> bool:
        """True if the first turn of a part switched settings, so that it is to be restarted with these.

        Otherwise they would be put back in some turns, and a loop that switches them once would not switch them again.
        """
        if part.settings is None or not part.share.counts or self.assumed:
            return False
        switched = part.settings.switched()
        return TRAINED in switched or (part.rehearsed and len(switched) > 0)

    def is_new(self, part: Part, code: CodePath) -> bool:
        """True if the part took a path through the code that no rehearsal has seen."""
        if self.assumed or part.thorough or not part.share.counts:
            return False
        new = self.code.new_in(code, part.examples.count)
        self._num_settled += 1
        self._num_new += bool(new) and self._num_settled > FIRST
        if self._num_new > max(OFTEN * (self._num_settled - FIRST), SEVERAL) and not self._warned:
            self._warned = True
            warn(OFTEN_NEW.format(self._num_new, self._num_settled - FIRST, described(new)))
        return bool(new)

    def note_passed(self, part: Part, code: CodePath, step: int) -> None:
        """Remembers the path of a part of this step that passed its rehearsal."""
        if part.rehearsed:
            self.code.add(code, part.examples.count)
            if part.first is not None:  # it gave the same answers
                self.code.add_features(part.first.features, part.examples.count)
            self.last_passed = step if self.watch.suspects.are_clear else self.last_passed

    def note_refused(self, error: Refused, step: int) -> Coupled | None:
        """Remembers which releases may leak if this refusal of a step shows that examples depend on each other.

        Returns them if they were not known.
        """
        if self.coupled is not None:
            return None
        self.watch.forget()
        first = self.last_passed + 1
        if shows_dependence(error) and not self.assumed and first < step:
            self.coupled = Coupled(first, step - 1, step)
        return self.coupled

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of the training."""
        self.last_passed, coupled = state["last_rehearsed"], state["coupled"]
        self.coupled = None if coupled is None else Coupled(**coupled)

    def _script(self, examples: DatasetExamples, share: Share, step: int, *, thorough: bool) -> Script:
        units, by_owner = share.units, self.draws.by_owner
        if thorough:
            self.memory.overwritten.clear()  # each full rehearsal shows again which they are
            if not examples.repeats():
                self.memory.notes.add(
                    "The data set returns other items when they are fetched again, so whether they depend on items "
                    "fetched before was not shown. This is harmless if the data set uses random numbers of its own."
                )
        if self.items is not None:
            self.items(examples.indices, examples.generator, thorough=thorough)
            self.memory.notes |= self.items.notes
        if self.collate is not None and thorough:
            self.collate(examples)
            self.memory.notes |= self.collate.notes
        kept = draw_halves(examples.count, examples.generator, units)
        whole = units if by_owner else None  # an owner's examples may depend on each other
        sizes = examples.sizes() if thorough or examples.generator.integers(2) else None
        alone = [draw_few(examples.count, examples.generator, whole, sizes)]
        alone += [without_ends(keep, whole) for keep in kept] if thorough else []
        rehearsal = Rehearsal(
            self.model,
            examples,
            kept if thorough else kept[:1],
            examples.generator,
            alone=alone,
            rows_alone=thorough,
            rows_once=True,
            units=units,
            whole_units=by_owner,
            memory=self.memory,
            keep_weights=thorough,
        )
        return self.watch.rehearsed(rehearsal.turns, examples, step, units, rows=thorough)


def idle_turn(model: nn.Module, examples: DatasetExamples) -> Turn:
    """Returns a turn for a rank that needs none while others do; the model's buffers are put back after it."""
    return Turn(examples.batch, examples.count, rows=False, state=ModelState(model), is_idle=True)


def one_turn(turn: Turn) -> Script:
    """Returns the script of a single turn."""
    yield turn
