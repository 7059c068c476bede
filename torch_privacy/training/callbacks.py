# SPDX-License-Identifier: Apache-2.0
"""Lets others follow a training step by step: listeners (run folder, callbacks, audit), and the user's callbacks.

Callbacks are given exact numbers of private data, and epsilon so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..mechanisms.sums import Summation
from ..support.ranks import Ranks
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


Training = Any  # a `PrivateTraining`, of which this file knows nothing

QUANTILES = (0.1, 0.5, 0.9)


class Callback:
    """Base class for what is called after every step of a training, by ``PrivateTraining(callbacks=[...])``.

    A callback only observes: what it is given does not enter any release. Do not steer the training by
    `StepLog.not_private` (learning rate, clip norm, stop): these are exact numbers of private data, and epsilon would
    not cover that.

    Guarantees:
        - ``after_step`` is called once for each release, in order: not for rehearsals, once for all microbatches of a
          step, and also for an empty batch, which the loop does not see.
        - With several ranks it is called on each of them, with the numbers of the whole batch, the same on all ranks.
          Let rank 0 write (``step.rank``).
        - If a callback raises an exception, the step was made, recorded and paid; the other callbacks are called, and
          a note at the exception says so. A new iteration goes on with the next step.

    Example:
        >>> import torch_privacy as tp
        >>> class Losses(tp.Callback):
        ...     def __init__(self):
        ...         self.of_steps = []
        ...     def after_step(self, training, step):
        ...         self.of_steps.append(step.loss)
    """

    def after_step(self, training: Training, step: StepLog) -> None:
        """Is called after each step, when the weights are updated and the scheduler has advanced."""

    def at_end(self, training: Training) -> None:
        """Is called when a loop over the training ends by itself, after the last step; not after ``break``."""


class StepLog:
    """Holds what one step did. ``loss``, ``share_clipped`` and ``norm_quantiles`` are exact numbers of private data.

    They are computed when they are first read, from examples in the sum: those with a finite gradient. An example is
    a row of the data set, of all microbatches and ranks; its loss and gradient are means over its views. With
    `MicroBatches` an example has the gradient of its group, with owners that of its owner.

    Attributes:
        step: number of steps made so far, this one included.
        num_steps: number of steps planned.
        learning_rates: those of this step, one for each group of parameters of the optimizer.
        rank: number of this process; 0 is to write files.
        delta: that of the training, for ``epsilon``; None if it has none.
        private_gradient: parameter's name -> the gradient, noise included, with which the optimizer made the step
            (an optimizer that writes into gradients has changed it). It is a function of the releases: looking at it
            costs nothing. It takes as much memory as the weights as long as this object is kept.
    """

    def __init__(
        self,
        training: Training,
        learning_rates: tuple[float, ...],
        batch: BatchNumbers,
        private_gradient: Mapping[str, Tensor],
    ):
        self.step, self.num_steps = training.step_count, training.settings.num_steps
        self.learning_rates, self.rank = learning_rates, batch.ranks.rank
        self.delta = training.settings.delta
        self.private_gradient = private_gradient
        self._training, self._batch = training, batch

    @property
    def loss(self) -> float | None:
        """Returns the mean loss of the batch; None if no example is in the sum. Not private."""
        return None if self._table is None else float(self._table[0].mean())

    @property
    def share_clipped(self) -> float | None:
        """Returns the share of examples with a clip factor below 1 in any group of parameters. Not private.

        With `GEP` it counts examples with a clipped embedding or residual.
        """
        return None if self._table is None else float(self._table[2].mean())

    @property
    def norm_quantiles(self) -> dict[float, float]:
        """Returns quantiles of the norms before clipping, by 0.1, 0.5 and 0.9; empty as the loss is None. Not private.

        They are norms of whole gradients, over all groups of parameters: estimates with `Sketched`; with `BGEP` norms
        of the embeddings, as nothing else is released.
        """
        return {} if self._table is None else dict(zip(QUANTILES, self._quantiles, strict=True))

    @property
    def not_private(self) -> dict[str, float]:
        """Returns these numbers by name: loss, share_clipped, norm_q10, norm_q50, norm_q90; none of an empty batch."""
        if self.loss is None or self.share_clipped is None:
            return {}
        norms = {f"norm_q{round(100 * q)}": norm for q, norm in self.norm_quantiles.items()}
        return {"loss": self.loss, "share_clipped": self.share_clipped, **norms}

    @cached_property
    def epsilon(self) -> float | None:
        """Returns an upper bound on epsilon of the releases up to this step, at ``delta``; None without one.

        It is computed when first read, in 2 to 30 ms: not every step has to. To report an epsilon, see
        `PrivateTraining.spent`: it also knows what a stop before the last step costs.
        """
        return None if self.delta is None else self._training.profile_at_step().epsilon_high(self.delta)

    @cached_property
    def warning(self) -> str | None:
        """Returns why ``epsilon`` does not hold, such as a ``test_seed``; None if it does."""
        return self._training._setup.account.warning(self._training._progress())

    @cached_property
    def _table(self) -> np.ndarray | None:
        """Returns (3, n) losses, norms and whether clipped, of the examples in the sum; None without any. Secret."""
        table = self._batch.table()
        table = table[:, np.isfinite(table[1])]
        return table if table.shape[1] else None

    @cached_property
    def _quantiles(self) -> list[float]:
        assert self._table is not None
        return np.quantile(self._table[1], QUANTILES).tolist()


class BatchNumbers:
    """Collects loss, norm and whether it was clipped of each example of a step; secret. No host waits before `table`.

    Args:
        ranks: processes of the training.
        size: number of examples in the batch of all ranks.
    """

    def __init__(self, ranks: Ranks, size: int):
        self.ranks, self._size = ranks, size
        self._parts: list[tuple[np.ndarray, np.ndarray | None, tuple[Tensor, Tensor, Tensor]]] = []
        self._joined: np.ndarray | None = None

    def note(self, positions: np.ndarray, losses: Tensor, summation: Summation, units: np.ndarray | None) -> None:
        """Takes the examples at these positions of the batch; ``units`` are the rows that they belong to, if shared."""
        self._parts.append((positions, units, (losses, summation.norms(), summation.clipped())))

    def join(self) -> None:
        """Joins the examples of all ranks, each of which calls it."""
        if self.ranks.size > 1:
            table = torch.from_numpy(self.table())
            self.ranks.sum_in_place(table)
            self._joined = table.numpy()

    def table(self) -> np.ndarray:
        """Returns (3, size): losses; norms, not finite for examples that are in no sum; 1 if clipped, else 0."""
        if self._joined is not None:
            return self._joined
        table = np.zeros((3, self._size))
        for positions, units, (losses, *of_rows) in self._parts:
            table[0, positions] = losses.double().cpu().numpy()
            rows = torch.stack([part.double() for part in of_rows]).cpu().numpy()  # one wait for a GPU
            table[1:, positions] = rows if units is None else rows[:, units]
        return table


class Callbacks(Listener):
    """Calls the callbacks of a training, and collects the numbers of a step for them; does nothing without any.

    Raises:
        ValueError: something else than a `Callback`.
    """

    def __init__(self, callbacks: Sequence[Any], ranks: Ranks):
        self._callbacks, self._ranks = tuple(callbacks), ranks
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise ValueError(
                    f"PrivateTraining: callbacks={list(callbacks)!r:.300} has {callback!r:.100}, which is no object of "
                    "a class derived from tp.Callback. Define after_step(self, training, step), and pass an object."
                )
        self._batch: BatchNumbers | None = None
        self._learning_rates: tuple[float, ...] = ()
        self._gradients: Mapping[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def names(self) -> list[str]:
        """Returns the names of the callbacks' classes, in order."""
        return [type(callback).__name__ for callback in self._callbacks]

    def begin_step(self, size: int) -> None:
        """Begins a step, with a batch of this many examples; also if it is made again."""
        self._batch = BatchNumbers(self._ranks, size) if self._callbacks else None

    def after_batch(self, share: Share, losses: Tensor, summation: Summation) -> None:
        """Takes the losses (n, views) of a (micro)batch, and its clipped sum."""
        if self._batch is not None and summation.factors:
            self._batch.note(share.positions, losses.detach().mean(1), summation, share.units)

    def before_update(self, groups: Sequence[Mapping[str, Any]], gradients: Mapping[str, Tensor]) -> None:
        """Takes the optimizer's groups of parameters and the private gradient before the update."""
        if self._callbacks:
            self._gradients = gradients
            self._learning_rates = tuple(float(group.get("lr", float("nan"))) for group in groups)

    def after_step(self, training: Training) -> None:
        """Calls the callbacks after a step; raises the first exception of one, after all were called."""
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        batch.join()
        log, self._gradients = StepLog(training, self._learning_rates, batch, self._gradients), {}
        self._call("after_step", training, log)

    def at_end(self, training: Training) -> None:
        """Calls the callbacks when the loop has ended by itself."""
        self._call("at_end", training)

    def _call(self, method: str, training: Training, *arguments: Any) -> None:
        failure: Exception | None = None
        for callback in self._callbacks:
            try:
                getattr(callback, method)(training, *arguments)
            except Exception as error:
                error.add_note(
                    f"PrivateTraining: raised by {type(callback).__name__}.{method}, after step {training.step_count} "
                    "was made, recorded and paid. The training is whole: iterate anew to go on with the next step."
                )
                failure = failure or error
        if failure is not None:
            self._ranks.tell(f"calls back after step {training.step_count}", failure)
            raise failure
