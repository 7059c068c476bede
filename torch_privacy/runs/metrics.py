# SPDX-License-Identifier: Apache-2.0
"""How a training went: running means within an epoch, one row of metrics at the end of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

COUNTERS = ("num_examples", "loss_sum", "score_sum", "seconds")


@dataclass(frozen=True)
class Measure:
    """What a score is called, and how it is written."""

    name: str
    percent: bool = False  # a share of the examples, shown in percent
    larger_is_better: bool = True

    def text(self, value: float, digits: int | None = None) -> str:
        """A score for a reader.

        Example:
            >>> Measure("accuracy", percent=True).text(0.8475), Measure("RMSE").text(0.9149)
            ('84.8 %', '0.915')
        """
        if self.percent:
            return f"{100 * value:.{1 if digits is None else digits}f} %"
        return f"{value:.{3 if digits is None else digits}f}"


ACCURACY = Measure("accuracy", percent=True)


@dataclass(frozen=True)
class Metrics:
    """One line of ``metrics.csv``: the state of one training (``private`` or ``non-private``) after an epoch."""

    training: str
    epoch: float
    step: int
    loss: float  # mean over the examples drawn in this epoch
    train_score: float  # over the same examples, while training
    test_score: float  # such as the accuracy, in [0, 1]
    epsilon_low: float | None = None  # None for non-private training
    epsilon_high: float | None = None


@dataclass(frozen=True)
class Progress:
    """Where a training stands after a step; ``metrics`` is there when the step ended an epoch."""

    training: str
    step: int
    num_steps: int
    loss: float
    score: float
    metrics: Metrics | None = None
    measure: Measure = ACCURACY  # of the score


@dataclass
class Log:
    """The course of one training of ``num_steps`` steps in ``epochs`` epochs; the last epoch may be a part of one."""

    training: str
    num_steps: int
    epochs: float
    rows: list[Metrics] = field(default_factory=list)
    num_examples: int = 0  # these three: in this epoch
    loss_sum: float = 0.0
    score_sum: float = 0.0
    seconds: float = 0.0
    measure: Measure = ACCURACY
    finish: Callable[[float], float] = float  # from the mean over examples to the score

    def add(self, losses: Tensor, scores: Tensor) -> None:
        """Count the examples of one batch: the loss and the score of each."""
        self.num_examples += len(losses)
        self.loss_sum += float(losses.detach().sum())
        self.score_sum += float(scores.sum())

    def has_diverged(self) -> bool:
        """Whether the loss of some epoch is not a finite number."""
        return not all(math.isfinite(row.loss) for row in self.rows)

    def is_complete(self) -> bool:
        """Whether every epoch has its row."""
        return len(self.rows) >= math.ceil(self.epochs)

    def is_epoch_over(self, step: int) -> bool:
        """Whether ``step`` steps finish an epoch that has no row yet."""
        return not self.is_complete() and step >= self._epoch_end()

    def end_epoch(self, step: int, test_score: float, *epsilon: float) -> Progress:
        """Add a row for the epoch that ``step`` finished, and begin the next one."""
        loss, score = self._means()
        epoch = min(len(self.rows) + 1.0, self.epochs)
        self.rows.append(Metrics(self.training, epoch, step, loss, score, test_score, *epsilon))
        self.num_examples, self.loss_sum, self.score_sum = 0, 0.0, 0.0
        return Progress(self.training, step, self.num_steps, loss, score, self.rows[-1], measure=self.measure)

    def progress(self, step: int) -> Progress:
        """Where the training stands in the middle of an epoch."""
        return Progress(self.training, step, self.num_steps, *self._means(), measure=self.measure)

    def timed(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """The same steps, with the time spent in them added up; the time between them is the caller's."""
        start = perf_counter()
        for progress in steps:
            self.seconds += perf_counter() - start
            yield progress
            start = perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {name: getattr(self, name) for name in COUNTERS} | {"rows": [asdict(row) for row in self.rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.rows = [Metrics(**row) for row in state["rows"]]

    def _epoch_end(self) -> int:
        return round(min((len(self.rows) + 1) / self.epochs, 1) * self.num_steps)

    def _means(self) -> tuple[float, float]:
        n = max(self.num_examples, 1)
        return self.loss_sum / n, self.finish(self.score_sum / n)
