# SPDX-License-Identifier: Apache-2.0
"""Holds the parts of a training, and its progress; the parts of its loop share both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import privacy
from ..mechanisms.base import Mechanism
from ..mechanisms.noise import generators
from ..model_check.requirements import TensorsOf, check_no_gradient_hooks
from ..sampling.batches import Batches
from ..sampling.canaries import WithCanaries
from ..sampling.examples import Examples
from ..support.dates import now
from ..support.model_state import ModelTensors
from ..support.validate import Refused
from .bystanders import OutsideForwards, RewrittenRows
from .placement import Placement, local_of
from .reached_parameters import ReachedParameters
from .rehearsals import Rehearsals
from .release import Releases
from .schedule import StepPlan
from .settings import TrainingSettings
from .statement import Account, TrainingProgress
from .weights import WeightGuard

DIVERGED = 1e6  # a weight beyond which a failed check is blamed on its size


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
    stop_reason: str | None = None
    date: str | None = None
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
            (*rehearsals.watch.not_covered, *self.outside.not_covered, *self.rewritten.not_covered),
            generators(self.tensors.trained.values()),
            self.date or now(),
            callbacks,
            self.num_trained,
        )

    def check_diverged(self, error: Refused) -> None:
        """Refuses weights so large that sums overflow, which rehearsals and self-checks cannot tell from mistakes."""
        local = [local_of(p).detach() for p in self.tensors.trained.values()]
        largest = max((float(p.abs().max()) for p in local if p.numel()), default=0.0)
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
