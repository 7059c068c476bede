# SPDX-License-Identifier: Apache-2.0
"""Records the course of a training: running means within an epoch, and a row of metrics at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 1000  # of a training of one's own: with more epochs, some of them share a row
SUMS = ("num_examples", "loss_sum", "score_sum")  # over the examples of the current epoch
COUNTERS = (*SUMS, "seconds")


@dataclass(frozen=True)
class Measure:
    """The name and the number format of a score."""

    name: str
    percent: bool = False  # a fraction of the examples, shown in percent
    larger_is_better: bool = True

    def text(self, value: float | None, digits: int | None = None) -> str:
        """Returns a score as text; None stands for one that is not finite.

        Example:
            >>> Measure("accuracy", percent=True).text(0.8475), Measure("RMSE").text(0.9149)
            ('84.8 %', '0.915')
        """
        if value is None or not math.isfinite(value):
            return "not finite"
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
    loss: float | None  # mean over the examples drawn in this epoch; None if none was
    train_score: float | None = None  # over the same examples, while training; None if the loop computes no scores
    test_score: float | None = None  # such as the accuracy, in [0, 1]
    epsilon_low: float | None = None  # None for non-private training
    epsilon_high: float | None = None


def has_diverged(rows: Iterable[Metrics]) -> bool:
    """True if the loss or the test score of some epoch is not finite."""
    return not all(math.isfinite(value) for row in rows for value in (row.loss, row.test_score) if value is not None)


@dataclass(frozen=True)
class Progress:
    """The state of a training after a step; ``metrics`` is None unless the step ended an epoch."""

    training: str
    step: int
    num_steps: int
    loss: float
    score: float
    metrics: Metrics | None = None
    measure: Measure = ACCURACY  # of the score
    num_lost: int = 0  # releases besides those of the steps, see `PrivateTraining.num_lost`


@dataclass
class Log:
    """Records one training of ``num_steps`` steps in ``epochs`` epochs, the last of which may be a partial one."""

    training: str
    num_steps: int
    epochs: float
    rows: list[Metrics] = field(default_factory=list)
    num_examples: int = 0  # this and the next two: sums over the current epoch
    loss_sum: float = 0.0
    score_sum: float = 0.0
    seconds: float = 0.0
    measure: Measure = ACCURACY
    finish: Callable[[float], float] = float  # from the mean over examples to the score

    def add(self, losses: Tensor, scores: Tensor) -> None:
        """Adds the losses and scores of a batch."""
        self.num_examples += len(losses)
        self.loss_sum += float(losses.detach().sum())
        self.score_sum += float(scores.sum())

    def has_diverged(self) -> bool:
        """True if the loss or the test score of some epoch is not finite."""
        return has_diverged(self.rows)

    def is_complete(self) -> bool:
        """True if every epoch has its row."""
        return len(self.rows) >= math.ceil(self.epochs)

    def is_epoch_over(self, step: int) -> bool:
        """True if ``step`` steps complete an epoch that has no row yet."""
        return not self.is_complete() and step >= self._epoch_end()

    def end_epoch(self, step: int, test_score: float, *epsilon: float) -> Progress:
        """Adds a row for the epoch that ended with ``step``, and starts the next epoch."""
        loss, score = self._means()
        epoch = min(len(self.rows) + 1.0, self.epochs)
        if step < self._epoch_end():  # the training ends early
            epoch = round(self.epochs * step / self.num_steps, 4)
        self.rows.append(Metrics(self.training, epoch, step, loss, score, test_score, *epsilon))
        self.forget()
        return Progress(self.training, step, self.num_steps, loss, score, self.rows[-1], measure=self.measure)

    def forget(self) -> None:
        """Leaves out the losses and scores since the last row."""
        self.num_examples, self.loss_sum, self.score_sum = 0, 0.0, 0.0

    def progress(self, step: int) -> Progress:
        """Returns the state of the training within an epoch."""
        return Progress(self.training, step, self.num_steps, *self._means(), measure=self.measure)

    def timed(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """Yields the same steps and adds up their running time, without the caller's time between them."""
        start = perf_counter()
        for progress in steps:
            self.seconds += max(perf_counter() - start, 0.0)
            yield progress
            start = perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain values."""
        return {name: getattr(self, name) for name in COUNTERS} | {"rows": [asdict(row) for row in self.rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.rows = [Metrics(**row) for row in state["rows"]]

    def _epoch_end(self) -> int:
        return round(min((len(self.rows) + 1) / self.epochs, 1) * self.num_steps)

    def _means(self) -> tuple[float, float]:
        n = max(self.num_examples, 1)
        return self.loss_sum / n, self.finish(self.score_sum / n)


@dataclass
class LossLog:
    """Records the mean training loss of each epoch, for a training of ``num_steps`` steps in a loop of one's own.

    Losses that are not finite are left out of the mean; it is NaN if all of an epoch's losses are.

    Args:
        num_steps: number of steps planned.
        epochs: number of passes over the data that they are on average; above `MOST_ROWS`, rows hold several.
    """

    num_steps: int
    epochs: float
    rows: list[Metrics] = field(default_factory=list)
    num_drawn: int = 0  # this and the next two: since the last row
    num_examples: float = 0.0  # with a finite loss
    loss_sum: float = 0.0

    def add(self, num_drawn: int, num_examples: float, loss_sum: float) -> None:
        """Adds the examples of some steps: how many were drawn, how many have a finite loss, and the sum of these."""
        self.num_drawn += num_drawn
        self.num_examples += num_examples
        self.loss_sum += loss_sum

    def is_due(self, step: int) -> bool:
        """True if ``step`` steps complete an epoch, or several, since the last row."""
        number = self._number(self.rows[-1].step if self.rows else 0)
        return step >= min(self._end(number + 1), self.num_steps)

    def row(self, step: int, *epsilon: float) -> Metrics:
        """Returns the row of what was added since the last one."""
        number = self._number(step)
        epoch = number * self._stride if step == self._end(number) else self.epochs * step / self.num_steps
        loss = self.loss_sum / self.num_examples if self.num_examples else math.nan
        return Metrics("private", float(f"{epoch:.6g}"), step, loss if self.num_drawn else None, None, None, *epsilon)

    def end_epoch(self, step: int, *epsilon: float) -> None:
        """Adds a row, and starts the next epoch."""
        self.rows.append(self.row(step, *epsilon))
        self.num_drawn, self.num_examples, self.loss_sum = 0, 0.0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain values, which JSON can hold."""
        rows = [{name: _in_json(value) for name, value in asdict(row).items()} for row in self.rows]
        counts = {"num_drawn": self.num_drawn, "num_examples": self.num_examples}
        return counts | {"loss_sum": _in_json(self.loss_sum), "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned."""
        self.rows = [Metrics(**{name: _of_json(value) for name, value in row.items()}) for row in state["rows"]]
        self.num_drawn, self.num_examples = state["num_drawn"], state["num_examples"]
        self.loss_sum = _of_json(state["loss_sum"])

    @property
    def _stride(self) -> int:
        """Returns the number of epochs in a row."""
        return max(1, math.ceil(self.epochs / MOST_ROWS))

    def _end(self, number: int) -> int:
        """Returns the step that ends the row with this number, counted from 1."""
        return round(number * self._stride * self.num_steps / self.epochs)

    def _number(self, step: int) -> int:
        """Returns the number of rows that are complete after ``step`` steps."""
        number = math.floor(self.epochs * step / (self._stride * self.num_steps))
        return number + 1 if self._end(number + 1) <= step else number


def _in_json(value: Any) -> Any:
    """Returns a number that is not finite as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _of_json(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
