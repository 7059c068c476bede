# SPDX-License-Identifier: Apache-2.0
"""Records the course of a training: running means within an epoch, and a row of metrics at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from torch_privacy.support.ranks import Ranks

MOST_ROWS = 1000  # of a training: with more epochs, some of them share a row
SUMS = ("num_drawn", "num_examples", "loss_sum", "score_sum")  # over the examples since the last row


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
    """True if the loss or the test score of some epoch is not finite: exact, as one example may have such a loss."""
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
    """Records one training of ``num_steps`` steps in ``epochs`` epochs, the last of which may be a partial one.

    With more than `MOST_ROWS` epochs, a row holds several.

    Args:
        num_steps: number of steps planned.
        epochs: number of passes over the data that they are on average.
        training: "private" or "non-private".
        measure, finish: the score, and a function of its mean over examples; not used where no scores are added.
    """

    num_steps: int
    epochs: float
    training: str = "private"
    measure: Measure = ACCURACY
    finish: Callable[[float], float] = float
    rows: list[Metrics] = field(default_factory=list)
    num_drawn: int = 0  # this and the next three: over the examples since the last row
    num_examples: float = 0  # that are in the sums
    loss_sum: float = 0.0
    score_sum: float = 0.0
    seconds: float = 0.0

    def add(self, losses: Tensor, scores: Tensor) -> None:
        """Adds the losses and scores of a batch, those that are not finite included."""
        self.add_sums(len(losses), len(losses), float(losses.detach().sum()), float(scores.sum()))

    def add_sums(self, num_drawn: int, num_examples: float, loss_sum: float, score_sum: float = 0.0) -> None:
        """Adds examples: how many were drawn, how many are in the sums, and the sums of their losses and scores."""
        self.num_drawn += num_drawn
        self.num_examples += num_examples
        self.loss_sum += loss_sum
        self.score_sum += score_sum

    def summed(self, ranks: Ranks) -> dict[str, Any]:
        """Returns the sums over the examples of all ranks, which call it together."""
        if ranks.size == 1:
            return {name: getattr(self, name) for name in SUMS}
        import torch

        sums = torch.tensor([float(getattr(self, name)) for name in SUMS], dtype=torch.float64, device="cpu")
        ranks.sum_in_place(sums)
        return {name: type(getattr(self, name))(value) for name, value in zip(SUMS, sums.tolist(), strict=True)}

    def take(self, sums: Mapping[str, Any]) -> None:
        """Replaces the sums since the last row."""
        for name in SUMS:
            setattr(self, name, sums[name])

    def forget(self) -> None:
        """Leaves out the losses and scores since the last row."""
        self.num_drawn, self.num_examples, self.loss_sum, self.score_sum = 0, 0, 0.0, 0.0

    def has_diverged(self) -> bool:
        """True if the loss or the test score of some epoch is not finite."""
        return has_diverged(self.rows)

    def is_due(self, step: int) -> bool:
        """True if ``step`` steps complete an epoch, or several, since the last row."""
        last = self.rows[-1].step if self.rows else 0
        return last < step >= min(self._end(self._number(last) + 1), self.num_steps)

    def row(self, step: int, *epsilon: float, test_score: float | None = None) -> Metrics:
        """Returns the row of what was added since the last one; it has scores if there is a test score."""
        number = self._number(step)
        epoch = number * self._stride if step == self._end(number) else self.epochs * step / self.num_steps
        epoch = float(f"{epoch:.6g}")
        loss, score = self._means()
        if test_score is not None:
            return Metrics(self.training, epoch, step, loss, score, test_score, *epsilon)
        known = None if not self.num_drawn else loss if self.num_examples else math.nan
        return Metrics(self.training, epoch, step, known, None, None, *epsilon)

    def end_epoch(self, step: int, *epsilon: float, test_score: float | None = None) -> Progress:
        """Adds a row, and starts the next epoch."""
        self.rows.append(self.row(step, *epsilon, test_score=test_score))
        progress = self.progress(step, self.rows[-1])
        self.forget()
        return progress

    def progress(self, step: int, metrics: Metrics | None = None) -> Progress:
        """Returns the state of the training after a step; ``metrics`` if it ended an epoch."""
        loss, score = self._means()
        return Progress(self.training, step, self.num_steps, loss, score, metrics, measure=self.measure)

    def timed(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """Yields the same steps and adds up their running time, without the caller's time between them."""
        start = perf_counter()
        for progress in steps:
            self.seconds += max(perf_counter() - start, 0.0)
            yield progress
            start = perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain values, which JSON can hold."""
        rows = [{name: _in_json(value) for name, value in asdict(row).items()} for row in self.rows]
        return {name: _in_json(getattr(self, name)) for name in (*SUMS, "seconds")} | {"rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned; what is not in it, as in older ones, begins anew."""
        self.rows = [Metrics(**{name: _of_json(value) for name, value in row.items()}) for row in state.get("rows", ())]
        self.take({name: _of_json(state.get(name, 0)) for name in SUMS})
        self.seconds = state.get("seconds", 0.0)

    def _means(self) -> tuple[float, float]:
        n = max(self.num_examples, 1)
        return self.loss_sum / n, self.finish(self.score_sum / n)

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
