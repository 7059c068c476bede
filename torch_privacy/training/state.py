# SPDX-License-Identifier: Apache-2.0
"""Holds the parts of a training, and its progress; the parts of its loop share both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import privacy
from ..jacobian.recording.paths import never_reached
from ..mechanisms.base import Mechanism
from ..mechanisms.noise import generators
from ..model_check.requirements import TensorsOf, check_no_gradient_hooks
from ..sampling.batches import Batches
from ..sampling.canaries import WithCanaries
from ..sampling.examples import Examples
from ..support.model_state import ModelTensors
from ..support.ranks import Ranks, RefusedTogether
from ..support.units import iso
from ..support.validate import Refused, quoted
from ..support.warning import warn
from .bystanders import OutsideForwards, RewrittenRows
from .placement import Placement
from .rehearsals import Rehearsals
from .release import Releases
from .sampling import StepPlan
from .settings import TrainingSettings
from .statement import Account, TrainingProgress
from .weights import DIVERGED, WeightGuard, largest_weight, padding_rows

PATIENCE = 8  # batches that may miss a parameter, if random numbers or the data may decide which layers are run
WARNED = (
    "PrivateTraining: the losses of the first batch do not reach {}. That is fine if random numbers or the data decide "
    "which layers are run, as with LayerDrop and experts. Otherwise freeze what is not used, with "
    f"requires_grad_(False): what is not reached in {PATIENCE} batches is refused."
)
VARIES = (
    "PrivateTraining: the row of padding_idx of {} gets a gradient in some batches alone, as where the table is used "
    "in another way than look-ups if an example asks for it, or if a layer is not skipped. It stays as it is without "
    "such a use, and has noise with one, so that the weights would show which examples there are. Use the table in "
    "the same way in every batch; or make it without padding_idx, and mask what padding adds."
)


class ReachedParameters:
    """Remembers what the batches so far have shown of the parameters, and of the mechanism's choices.

    Args:
        padding: name of an embedding table -> its ``padding_idx``.
        mechanism: learns from batches, too.

    Attributes:
        names: parameters that were reached, which later losses may miss.
        padded: name of a table -> whether its row of padding may have a gradient, the same in every batch.
    """

    def __init__(self, padding: Mapping[str, int], mechanism: Mechanism):
        self.names: set[str] = set()
        self.padded: dict[str, bool] = {}
        self._tables = dict(padding)
        self._mechanism = mechanism
        self.drew = False  # whether random numbers were drawn in some turn
        self._last: set[str] | None = None  # what the turn before has reached
        self._varies = False  # whether two turns, with other examples, have reached other parameters
        self._num_batches, self._has_warned = 0, False
        self._known_to_all: Any = None

    def may_miss(self, names: Collection[str]) -> Collection[str]:
        """Returns which of the trained parameters the losses of the next batch may miss.

        If random numbers were drawn, they may decide which layers are run, and the data do where turns with other
        examples have reached others. Then all may be missed in the first batches.
        """
        self._num_batches += 1
        return names if self._is_patient else self.names

    @property
    def _is_patient(self) -> bool:
        return (self.drew or self._varies) and self._num_batches <= PATIENCE

    def warn_of_missing(self, trained: Collection[str]) -> None:
        """Warns once of parameters that the losses have not reached, if that may be by chance."""
        missing = [name for name in trained if name not in self.names]
        if missing and not self._has_warned:
            self._has_warned = True
            warn(WARNED.format(quoted(missing)))

    @property
    def padding(self) -> dict[str, int]:
        """Returns the row of padding of each table in which it has no gradient."""
        return {name: row for name, row in self._tables.items() if not self.padded.get(name)}

    def note(
        self,
        reached: Collection[str],
        trained: Collection[str],
        padding: Mapping[str, Collection[int | None]] | None,
    ) -> None:
        """Adds what a batch has reached: layers that are skipped at random are reached when they are not skipped.

        ``padding`` has, for each parameter, the row without a gradient of each use; None if uses are not known.

        Raises:
            Refused: the row of padding of a table may have a gradient in some batches, and in others not.
        """
        reached, last = set(reached), self._last
        self._varies |= last is not None and last != reached
        self._last = reached
        self.names |= reached
        for name, row in self._tables.items():
            if name in trained:
                has_gradient = padding is None or padding.get(name, {row}) != {row}
                if self.padded.setdefault(name, has_gradient) != has_gradient:
                    raise Refused(VARIES.format(quoted([name])))

    @property
    def has_changed(self) -> bool:
        """Returns whether this rank knows what the others may not know."""
        return self._known_to_all != self._known()

    def share(self, ranks: Ranks, trained: Sequence[str], *, changed: bool) -> None:
        """Joins what the ranks know, if it has changed on one of them; every rank calls it.

        Raises:
            RefusedTogether: the losses of no rank have reached some of the trained parameters, which none `may_miss`;
                a row of padding may have a gradient on one rank, and on another not.
        """
        self._num_batches += 1
        if changed:  # a bit for each name, as all ranks have the same ones in the same order
            has, lacks = ([self.padded.get(name) is one for name in trained] for one in (True, False))
            bits = [*(name in self.names for name in trained), *has, *lacks]
            known = ranks.gather((np.packbits(bits).tobytes(), self._mechanism.learned(), self.drew, self._varies))
            joined = np.bitwise_or.reduce([np.frombuffer(packed, np.uint8) for packed, *_ in known])
            reached, used, unused = np.split(np.unpackbits(joined, count=len(bits)).astype(bool), 3)
            if (used & unused).any():
                raise RefusedTogether(VARIES.format(quoted(np.array(trained)[used & unused].tolist())))
            self.names = {name for name, is_reached in zip(trained, reached, strict=True) if is_reached}
            self.padded |= {name: bool(is_used) for name, is_used in zip(trained, used, strict=True) if is_used}
            self._mechanism.learn([learned for _, learned, *_ in known])
            self.drew, self._varies = (any(flags) for flags in zip(*(flags for _, _, *flags in known), strict=True))
            self._known_to_all = self._known()
        missing = [name for name in trained if name not in self.names]
        if missing and not self._is_patient:
            raise RefusedTogether(never_reached(missing))
        self.warn_of_missing(trained)

    def _known(self) -> Any:
        return (
            frozenset(self.names),
            frozenset(self.padded.items()),
            repr(self._mechanism.learned()),
            self.drew,
            self._varies,
        )


@dataclass(frozen=True)
class Setup:
    """Holds what a training is made of.

    Attributes:
        given: the user's model as it was passed, perhaps in a wrapper.
        model: the same without a wrapper.
        optimizer, scheduler: the user's own.
        after_update: called with the model after every optimizer step, if given.
        batches: fetches the batches of the data set.
        examples: the data, as the user gave them.
        placement: where the weights are.
        settings, plan: what is priced.
        mechanism: clips and sums.
        tensors_of: finds the trained parameters.
        ledger, account: record and price the releases.
        callbacks: names of the callbacks' classes.
    """

    given: nn.Module
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    after_update: Callable[[Any], Any] | None
    batches: Batches
    examples: Examples
    placement: Placement
    settings: TrainingSettings
    plan: StepPlan
    mechanism: Mechanism
    tensors_of: TensorsOf
    ledger: privacy.Ledger
    account: Account
    callbacks: tuple[str, ...] = ()

    @property
    def canaries(self) -> WithCanaries | None:
        """Returns the data set of an audit; None for any other."""
        return self.examples.canaries

    def tensors(self) -> ModelTensors:
        """Returns the present tensors of the model; refuses gradient hooks on trained parameters."""
        tensors = self.tensors_of()
        check_no_gradient_hooks(tensors.trained)
        return tensors

    def for_resuming(self, tensors: ModelTensors) -> dict[str, Any]:
        """Returns the settings that a resumed training must have, too."""
        return self.settings.for_resuming(self.mechanism, tensors.trained)


@dataclass
class State:
    """Holds the progress of a training, and what it has seen.

    Attributes:
        tensors: the present tensors of the model.
        reached: the parameters that losses have reached.
        outside: knows forwards on rows of the data outside of a batch.
        rewritten: knows whether other code has changed rows of the data.
        guard: notices updates by other code.
        releases: noise and batches of the present keys.
        rehearsals: know what was rehearsed.
        step: number of steps made.
        num_non_finite: examples left out so far. Secret.
        unseen: what the statement says of steps that no ledger may have.
        stop_reason: as declared.
        date: of the last step in this process.
        has_ended: whether a loop has made the last step.
    """

    tensors: ModelTensors
    reached: ReachedParameters
    outside: OutsideForwards
    rewritten: RewrittenRows = field(init=False, default_factory=RewrittenRows)
    guard: WeightGuard = field(init=False)
    releases: Releases = field(init=False)
    rehearsals: Rehearsals = field(init=False)
    step: int = 0
    num_non_finite: int = 0
    unseen: tuple[str, ...] = ()
    stop_reason: str | None = None
    date: datetime | None = None
    has_ended: bool = False

    @property
    def num_trained(self) -> int:
        """Returns the number of trained numbers, on all ranks together."""
        return sum(map(Tensor.numel, self.tensors.trained.values()))

    def use(self, releases: Releases, account: Account) -> None:
        """Goes on with these releases, such as those under new keys."""
        self.releases, self.rehearsals.draws = releases, releases.draws
        account.count_lost(releases.num_lost, releases.plan)
        self.rehearsals.num_steps = account.steps_allowed

    def progress(self, callbacks: tuple[str, ...]) -> TrainingProgress:
        """Returns what a privacy statement depends on."""
        rehearsals = self.rehearsals
        return TrainingProgress(
            self.step,
            self.stop_reason,
            self.guard.moved_otherwise(self.step),
            str(rehearsals.coupled or ""),
            frozenset(rehearsals.memory.notes),
            (*rehearsals.watch.not_covered, *self.outside.not_covered, *self.rewritten.not_covered, *self.unseen),
            generators(self.tensors.trained.values()),
            iso(self.date or datetime.now(UTC)),
            callbacks,
            self.num_trained,
        )

    def check_diverged(self, error: Refused) -> None:
        """Refuses weights so large that sums overflow, which rehearsals and self-checks cannot tell from mistakes."""
        largest = largest_weight(self.tensors.trained.values())
        if not largest < DIVERGED:  # NaN, too
            raise Refused(
                f"PrivateTraining: training has diverged: after step {self.step} the largest weight is "
                f"{largest:.3g}, so that gradients overflow and checks fail ({error}) Lower the clip norm or the "
                "learning rate: noise and gradients of one step are as large as their product."
            ) from error


@dataclass
class StepSums:
    """Holds the clipped sums of a step's microbatches so far. Secret."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    left_out: int = 0  # examples without a finite gradient, on all ranks


def optimized(placement: Placement, tensors: ModelTensors) -> Mapping[str, Tensor]:
    """Returns the trained parameters as the optimizer holds them: shards, if the model is sharded."""
    of_optimizer, trained = placement.of_optimizer(), tensors.trained
    return trained if of_optimizer is None else {name: of_optimizer[name] for name in trained}


def while_alive(owner: Any, read: Callable[[Any], Any], default: Any) -> Callable[[], Any]:
    """Returns a function that reads from an object while it exists, and does not keep it alive."""
    reference = weakref.ref(owner)

    def read_if_alive() -> Any:
        alive = reference()
        return default if alive is None else read(alive)

    return read_if_alive


def make_state(setup: Setup) -> State:
    """Returns the state of a training before its first step, which has no releases and rehearsals yet."""
    tensors = setup.tensors()
    reached = ReachedParameters(padding_rows(setup.model, tensors.trained), setup.mechanism)
    state, placement = State(tensors, reached, OutsideForwards(setup.batches)), setup.placement
    trained = while_alive(state, lambda present: optimized(placement, present.tensors), {})
    state.guard = WeightGuard(trained, setup.optimizer)
    return state
