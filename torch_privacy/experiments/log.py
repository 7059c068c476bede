# SPDX-License-Identifier: Apache-2.0
"""How a training went: running means within an epoch, one row of metrics at the end of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Metrics:
    """One line of ``metrics.csv``: the state of one training (``private`` or ``non-private``) after an epoch."""

    training: str
    epoch: float
    step: int
    loss: float  # mean over the examples drawn in this epoch
    train_accuracy: float  # over the same examples, while training; in [0, 1]
    test_accuracy: float  # in [0, 1]
    epsilon_low: float | None = None  # None for non-private training
    epsilon_high: float | None = None


@dataclass(frozen=True)
class Progress:
    """Where a training stands after a step; ``metrics`` is there when the step ended an epoch."""

    training: str
    step: int
    num_steps: int
    loss: float
    accuracy: float
    metrics: Metrics | None = None
    epoch_end: int | None = None  # the step that ends the epoch under way


@dataclass
class Log:
    """The course of one training of ``num_steps`` steps in ``epochs`` epochs; the last epoch may be a part of one."""

    training: str
    num_steps: int
    epochs: float
    rows: list[Metrics] = field(default_factory=list)
    num_examples: int = 0  # these three: in this epoch
    loss_sum: float = 0.0
    correct_sum: float = 0.0
    seconds: float = 0.0

    def add(self, losses: Tensor, correct: Tensor) -> None:
        """Count the examples of one batch."""
        self.num_examples += len(losses)
        self.loss_sum += float(losses.detach().sum())
        self.correct_sum += float(correct.sum())

    def has_diverged(self) -> bool:
        """Whether the loss of some epoch is not a finite number."""
        return not all(math.isfinite(row.loss) for row in self.rows)

    def is_complete(self) -> bool:
        """Whether every epoch has its row."""
        return len(self.rows) >= math.ceil(self.epochs)

    def is_epoch_over(self, step: int) -> bool:
        """Whether ``step`` steps finish an epoch that has no row yet."""
        return not self.is_complete() and step >= self._epoch_end()

    def end_epoch(self, step: int, test_accuracy: float, *epsilon: float) -> Progress:
        """Add a row for the epoch that ``step`` finished, and begin the next one."""
        loss, accuracy = self._means()
        epoch = min(len(self.rows) + 1.0, self.epochs)
        self.rows.append(Metrics(self.training, epoch, step, loss, accuracy, test_accuracy, *epsilon))
        self.num_examples, self.loss_sum, self.correct_sum = 0, 0.0, 0.0
        return Progress(self.training, step, self.num_steps, loss, accuracy, self.rows[-1])

    def progress(self, step: int) -> Progress:
        """Where the training stands in the middle of an epoch."""
        return Progress(self.training, step, self.num_steps, *self._means(), epoch_end=self._epoch_end())

    def timed(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """The same steps, with the time spent in them added up; the time between them is the caller's."""
        start = perf_counter()
        for progress in steps:
            self.seconds += perf_counter() - start
            yield progress
            start = perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> Log:
        """The log that ``state_dict`` described."""
        rows: Any = [Metrics(**row) for row in state["rows"]]
        return Log(**{**state, "rows": rows})

    def _epoch_end(self) -> int:
        return round(min((len(self.rows) + 1) / self.epochs, 1) * self.num_steps)

    def _means(self) -> tuple[float, float]:
        n = max(self.num_examples, 1)
        return self.loss_sum / n, self.correct_sum / n
