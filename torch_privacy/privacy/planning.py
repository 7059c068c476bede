# SPDX-License-Identifier: Apache-2.0
"""Plans a training before it begins: batch size, number of steps and noise, from public numbers alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, count
from math import exp, log, sqrt
from typing import Any

import numpy as np

from ..support.validate import InvalidValue, in_range, plain_numbers, positive, strictly_between, whole
from .calibrate import calibrate
from .rounding import round_up, short

STEPS = (250, 500, 1000, 2000)
ENOUGH = 0.9  # of what can be learnt
WHERE = "plan"


@dataclass(frozen=True)
class PlannedTraining:
    """A training within a privacy target, and its signal.

    Args:
        num_steps: T.
        expected_batch_size: B.
        noise_multiplier: σ, certified for the target.
        signal: total signal as a share of its limit, ``B sqrt(T) / (n σ μ)``, in (0, 1] up to the calibration's
            tolerance.
        cost: examples touched on average, ``B T``.
    """

    num_steps: int
    expected_batch_size: int
    noise_multiplier: float
    signal: float

    @property
    def cost(self) -> int:
        """Number of examples touched on average."""
        return self.expected_batch_size * self.num_steps

    def small(self, expected_batch_size: int) -> dict[str, Any]:
        """Returns settings of `PrivateTraining` that simulate this training with a smaller batch, on public data.

        The noise in each mean gradient, ``σ / B``, stays the same, and with it the total amount of noise. The learning
        rate, clip norm and number of steps that are best in the simulation are so in the training, nearly; it learns a
        little better, as a larger batch samples its gradient more exactly. **The simulation protects nothing**: its
        data must be public.

        Args:
            expected_batch_size: of the simulation, in [1, B].

        Source: Sander, Stock & Sablayrolles (2023), "TAN Without a Burn", arXiv:2210.03403, section 4.
        """
        whole("PlannedTraining.small", at_least=1, expected_batch_size=expected_batch_size)
        in_range("PlannedTraining.small", 0, self.expected_batch_size, expected_batch_size=expected_batch_size)
        noise = self.noise_multiplier * expected_batch_size / self.expected_batch_size
        return {"expected_batch_size": expected_batch_size, "num_steps": self.num_steps, "noise_multiplier": noise}


@dataclass(frozen=True)
class MeasuredTask:
    """A task on which the accuracy was measured for many numbers of examples and epsilons.

    Args:
        what: data and network.
        guess: accuracy of the most frequent class, in percent.
        without_privacy: accuracy of the same network without privacy, on all of the task's examples; at least the
            largest of ``points``.
        points: pairs of total signal ``n μ``, which grows, and the largest accuracy up to there.

    Source: ``python benchmarks/accuracy.py sizes``; see docs/accuracy.md.
    """

    what: str
    guess: float
    without_privacy: float
    points: tuple[tuple[float, float], ...]

    def accuracy(self, total_signal: float) -> float:
        """Returns the accuracy at a total signal: a guess at 0, linear up to the first point and from there on in the
        logarithm of the signal, and that of the last point beyond it.
        """
        signals, accuracies = zip(*self.points, strict=True)
        if total_signal < signals[0]:
            return self.guess + (accuracies[0] - self.guess) * total_signal / signals[0]
        return float(np.interp(log(total_signal), np.log(signals), accuracies))

    def learnt(self, total_signal: float) -> float:
        """Returns how much of what the network can learn is learnt: 0 is a guess, 1 as without privacy."""
        return (self.accuracy(total_signal) - self.guess) / (self.without_privacy - self.guess)

    def signal_for(self, learnt: float) -> float | None:
        """Returns the smallest total signal with at least this share learnt; None if no point has so much."""
        signals = [signal for signal, _ in self.points]
        shares = [self.learnt(signal) for signal in signals]
        return None if shares[-1] < learnt else exp(np.interp(learnt, shares, np.log(signals)))


MEASURED = (
    MeasuredTask(
        "Adult, perceptron",
        76.4,
        84.9,
        ((71, 76.4), (251, 81.5), (284, 82.5), (833, 83.2), (1003, 83.7), (3332, 84.5), (4062, 84.9)),
    ),
    MeasuredTask(
        "digits, two convolutions",
        11.4,
        96.5,
        ((71, 24.6), (251, 70.2), (284, 71.5), (711, 84.1), (1003, 85.7), (2508, 89.7), (8330, 93.1)),
    ),
    MeasuredTask(
        "film reviews, linear",
        50.0,
        82.6,
        ((71, 53.7), (251, 58.7), (284, 62.0), (833, 68.6), (1003, 70.5), (2844, 77.8), (4012, 78.2), (10031, 79.8),
         (33321, 80.0)),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class TrainingPlan:
    """Trainings that a privacy target allows, by number of steps and batch size, and the one to take.

    Printed, it is a table of them, followed by what was measured on other tasks with as much signal.

    Args:
        num_examples: n.
        target_epsilon: ε of each of them, never exceeded.
        delta: δ of each of them.
        limit: μ, the largest total signal of one example: that of one release of the sum over all examples.
        rows: the trainings.
        chosen: of those with enough signal, the one that touches the fewest examples.
    """

    num_examples: int
    target_epsilon: float
    delta: float
    limit: float
    rows: tuple[PlannedTraining, ...]
    chosen: PlannedTraining

    @property
    def total_signal(self) -> float:
        """Signal of all examples together, ``n μ``: the length of the sum of n equal rows, in units of its noise."""
        return self.num_examples * self.limit

    @property
    def learnt(self) -> tuple[float, float]:
        """Smallest and largest share of what can be learnt that the measured tasks learnt with this total signal."""
        shares = [task.learnt(self.total_signal) for task in MEASURED]
        return min(shares), max(shares)

    def __str__(self) -> str:
        about = f"{self.num_examples:,} examples, epsilon {self.target_epsilon:g} at delta = {short(self.delta)}"
        heads = f"{'steps':>6}{'batch':>10}{'noise multiplier':>18}{'signal':>9}{'examples touched':>20}"
        rows = [
            f"{row.num_steps:6,} {row.expected_batch_size:9,}{round_up(row.noise_multiplier):>18}"
            f"{100 * row.signal:7.0f} %{row.cost:20,}{'  <- take this' if row is self.chosen else ''}"
            for row in self.rows
        ]
        measured = [
            f"{task.accuracy(self.total_signal):8.1f} %{task.guess:8.1f} %{task.without_privacy:14.1f} %   {task.what}"
            for task in MEASURED
        ]
        signal = f"Total signal n mu = {self.total_signal:,.0f}. Accuracies measured with as much:"
        heads_measured = f"{'private':>10}{'a guess':>10}{'not private':>16}"
        shown = [f"{about}, Poisson sampling", "", heads, *rows, "", signal, heads_measured, *measured, self.advice()]
        return "\n".join(shown)

    def _repr_html_(self) -> str:
        """Returns the printed table for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    def advice(self) -> str:
        """Returns a sentence on whether there are enough examples for this epsilon."""
        n, epsilon, (low, high) = f"{self.num_examples:,} examples", f"epsilon {self.target_epsilon:g}", self.learnt
        if low >= ENOUGH:
            return f"{n} are enough for {epsilon}, if your task is like these."
        least, most = f"{100 * low:.0f}", f"{100 * high:.0f}"
        learnt = most if least == most else f"{least} to {most}"
        signals = [task.signal_for(ENOUGH) for task in MEASURED]
        needed = [signal / self.limit for signal in signals if signal is not None]
        return (
            f"With {n} and {epsilon} expect no better than {learnt} % of what can be learnt. "
            f"For {100 * ENOUGH:.0f} % these took {min(needed):,.0f} to {max(needed):,.0f} examples at this "
            "epsilon. Take features that were not learnt from these data, a smaller network, or a larger epsilon."
        )


@plain_numbers
def plan(
    num_examples: int, target_epsilon: float, delta: float, *, num_steps: Sequence[int] = STEPS, signal: float = 0.9
) -> TrainingPlan:
    """Returns how large a batch must be, for each number of steps, and the cheapest training with enough signal.

    After T steps the sum of the clipped mean gradients has grown like T, and its noise like ``σ sqrt(T) / B``. So the
    total signal of an example is ``q sqrt(T) / σ`` with ``q = B / n``: the inverse of the total amount of noise. At a
    given (ε, δ) it grows with the batch, up to the limit μ that one release of the whole sum reaches. Beyond 90 to 95 %
    of the limit larger batches cost time and change little; far below it accuracy is given away.

    With fewer steps the same signal costs less, so that the cheapest row has the fewest steps. How few are enough
    depends on the task: simulate with `PlannedTraining.small`.

    Args:
        num_examples: n, at least 1.
        target_epsilon: above 0.
        delta: in (0, 1/n), best at most 1/(10 n).
        num_steps: numbers of steps to consider.
        signal: share of the limit that is enough, in (0, 1].

    Guarantees:
        - the certified epsilon of every row, with Poisson sampling, is at most the target;
        - for each number of steps, the row before the last has too little signal; the last has enough, or takes all.

    Raises:
        ValueError: a number is out of range, or no noise multiplier up to 1e4 reaches the target.

    Source: Sander, Stock & Sablayrolles (2023), "TAN Without a Burn", arXiv:2210.03403, section 3.

    Example:
        >>> found = plan(50_000, 3.0, 1e-6)
        >>> found.chosen.num_steps, found.chosen.expected_batch_size
        (250, 4096)
        >>> f"{found.chosen.noise_multiplier:.3f} {found.chosen.signal:.3f}"
        '2.219 0.901'
    """
    whole(WHERE, at_least=1, num_examples=num_examples)
    positive(WHERE, target_epsilon=target_epsilon)
    strictly_between(WHERE, 0, 1 / num_examples, delta=delta, hint=f"It must be below 1/n (n = {num_examples}).")
    in_range(WHERE, 0, 1, signal=signal)
    if not num_steps:
        raise InvalidValue(WHERE, "num_steps", num_steps, "must name a number of steps.")
    limit = 1 / calibrate(target_epsilon, delta, sampling_probability=1.0, num_steps=1)
    rows: list[PlannedTraining] = []
    enough: list[PlannedTraining] = []
    for steps in sorted(set(num_steps)):
        whole(WHERE, at_least=1, num_steps=steps)
        for size in _sizes(num_examples, limit, steps):
            noise = calibrate(target_epsilon, delta, sampling_probability=size / num_examples, num_steps=steps)
            share = size * sqrt(steps) / (num_examples * noise * limit)
            rows.append(PlannedTraining(steps, size, noise, share))
            if share >= signal or size == num_examples:
                enough.append(rows[-1])
                break
    return TrainingPlan(num_examples, target_epsilon, delta, limit, tuple(rows), min(enough, key=lambda row: row.cost))


def _sizes(num_examples: int, limit: float, num_steps: int) -> Iterator[int]:
    """Yields 1, 2, 3, 4, 6, 8, 12, 16, ... from a batch with little signal on, and all examples at last.

    At a noise multiplier of 0.8, less than two thirds of the limit, by the central limit theorem.
    """
    first = 0.5 * num_examples * limit / sqrt(num_steps)
    for size in chain([1], (digit * 2**power for power in count() for digit in (2, 3))):
        if size >= num_examples:
            break
        if size >= first:
            yield size
    yield num_examples
