# SPDX-License-Identifier: Apache-2.0
"""Puts learning-rate schedulers back where a turn of the loop made no step, so that they count steps."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def schedulers_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Returns the schedulers that hold one of these optimizers.

    An optimizer does not know its schedulers, so they are looked for among the objects that refer to it.
    """
    referrers = gc.get_referrers(*optimizers)
    dicts = [referrer for referrer in referrers if type(referrer) is dict]  # the attributes of an object
    owners = [*referrers, *(gc.get_referrers(*dicts) if dicts else ())]
    schedulers = {id(o): o for o in owners if issubclass(type(o), LRScheduler)}.values()
    return [s for s in schedulers if any(s.optimizer is optimizer for optimizer in optimizers)]


class SchedulerState:
    """Remembers the learning rates and the counts of schedulers, as they are when a step begins.

    Args:
        optimizer: the original optimizer.
        schedulers: those that follow it.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any]):
        self._optimizer = optimizer
        self._settings = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        self._states = [
            (s, {key: _copied(value) for key, value in vars(s).items() if key != "optimizer"}) for s in schedulers
        ]

    def restore(self) -> None:
        """Puts schedulers back, and what they have set."""
        if not self._states:
            return
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
        for scheduler, state in self._states:
            vars(scheduler).update({key: _copied(value) for key, value in state.items()})


class StepSchedulers:
    """The schedulers of a loop, which are put back after a rehearsal, and after all but the last microbatch of a step.

    Args:
        optimizer: the original optimizer.
        private: the one that the loop has in its place.
    """

    def __init__(self, optimizer: Optimizer, private: Optimizer):
        self._optimizers = [optimizer, private]
        self._found: list[Any] = []
        self._references: list[int] = []  # to the optimizers, when schedulers were looked for
        self._begun: tuple[int, SchedulerState] | None = None  # a step

    def forget(self) -> None:
        """Forgets the step that was begun."""
        self._begun = None

    def find(self) -> None:
        """Looks for schedulers where there may be new ones, as it takes milliseconds: all know an initial rate."""
        if not any("initial_lr" in group for group in self._optimizers[0].param_groups):
            return
        references = [sys.getrefcount(optimizer) for optimizer in self._optimizers]
        if references != self._references:
            self._found = schedulers_of(self._optimizers)
            self._references = references

    def begin(self, step: int) -> None:
        """Remembers the schedulers at the first batch of a step."""
        if self._found and (self._begun is None or self._begun[0] != step):
            self._begun = step, SchedulerState(self._optimizers[0], self._found)

    def end(self, step: int) -> None:
        """Puts schedulers back after a batch that did not make the step."""
        if self._begun is not None and self._begun[0] == step:
            self._begun[1].restore()


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict | set) else value
