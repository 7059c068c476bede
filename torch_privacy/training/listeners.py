# SPDX-License-Identifier: Apache-2.0
"""Provides listeners, which follow a training step by step: run folder, callbacks, audit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..mechanisms.sums import Summation
from .draws import Share
from .rehearsals import Part
from .state import State


class Listener:
    """Follows a training; each method does nothing unless a class derived from it says otherwise."""

    def begin_step(self, size: int) -> None:
        """Begins a step with a batch of this many examples; also if the step is made again."""

    def batches_before_step(self, state: State) -> Iterable[Part]:
        """Yields batches of its own, of which nothing is released, for the loop to compute losses of."""
        return ()

    def after_batch(self, share: Share, losses: Tensor, summation: Summation) -> None:
        """Takes the losses (n, views) of a (micro)batch, and its clipped sum. Secret."""

    def completed(self, sums: dict[str, Tensor], state: State) -> dict[str, Tensor]:
        """Returns the sums of the step, to which it may add those of its own examples."""
        return sums

    def before_release(self, *, is_new: bool) -> None:
        """Is called before a release; ``is_new`` unless the ledger has it already."""

    def after_release(self, release: Mapping[str, Tensor], stddevs: Mapping[str, float], state: State) -> None:
        """Takes a release, with the noise in it, once it is in the ledger."""

    def before_update(self, groups: Sequence[Mapping[str, Any]], gradients: Mapping[str, Tensor]) -> None:
        """Takes the optimizer's groups of parameters and the private gradient before the update."""

    def after_step(self, training: Any) -> None:
        """Is called when a step was made."""

    def batches_at_end(self, state: State) -> Iterable[Part]:
        """Yields batches of its own after the last step."""
        return ()

    def at_end(self, training: Any) -> None:
        """Is called when the loop has ended by itself."""


def together(*listeners: Listener | None) -> Listener:
    """Returns one listener for all that are there."""
    there = [listener for listener in listeners if listener is not None]
    return there[0] if len(there) == 1 else Listeners(there)


class Listeners(Listener):
    """Passes on what happens to several listeners, in their order."""

    def __init__(self, listeners: Sequence[Listener]):
        self._all = listeners

    def begin_step(self, size: int) -> None:
        for listener in self._all:
            listener.begin_step(size)

    def batches_before_step(self, state: State) -> Iterator[Part]:
        for listener in self._all:
            yield from listener.batches_before_step(state)

    def after_batch(self, share: Share, losses: Tensor, summation: Summation) -> None:
        for listener in self._all:
            listener.after_batch(share, losses, summation)

    def completed(self, sums: dict[str, Tensor], state: State) -> dict[str, Tensor]:
        for listener in self._all:
            sums = listener.completed(sums, state)
        return sums

    def before_release(self, *, is_new: bool) -> None:
        for listener in self._all:
            listener.before_release(is_new=is_new)

    def after_release(self, release: Mapping[str, Tensor], stddevs: Mapping[str, float], state: State) -> None:
        for listener in self._all:
            listener.after_release(release, stddevs, state)

    def before_update(self, groups: Sequence[Mapping[str, Any]], gradients: Mapping[str, Tensor]) -> None:
        for listener in self._all:
            listener.before_update(groups, gradients)

    def after_step(self, training: Any) -> None:
        for listener in self._all:
            listener.after_step(training)

    def batches_at_end(self, state: State) -> Iterator[Part]:
        for listener in self._all:
            yield from listener.batches_at_end(state)

    def at_end(self, training: Any) -> None:
        for listener in self._all:
            listener.at_end(training)
