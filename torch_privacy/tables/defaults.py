# SPDX-License-Identifier: Apache-2.0
"""Chooses the settings of a training on a table from public quantities alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from ..support.validate import positive, strictly_between, whole
from .model import Perceptron

BATCH_GROWTH, LARGEST_BATCH = 7.0, 8192
FEW_CLASSES = 4  # up to which weights decay
LARGEST_DECAY, FULL_DECAY = 0.6, 3000.0  # from this many rows times epsilon on
STEPS = ((0.5, 150), (4.0, 300), (math.inf, 600))  # up to which epsilon, how many


@dataclass(frozen=True)
class Defaults:
    """Settings of a training on a table.

    Args:
        expected_batch_size: mean number of rows in a batch.
        num_steps: number of steps.
        epochs: ``num_steps * expected_batch_size / n``.
        learning_rate: of Adam.
        weight_decay: of AdamW: a step multiplies the weights of the `Perceptron`, but neither its biases nor embeddings
            nor the linear part, by ``1 - learning_rate * weight_decay``.
        clip_norm: of ``Flat`` clipping.
        average: decay of the ``MovingAverage`` that gives the resulting weights.
        hidden_units: widths of the hidden layers.
        delta: of the whole training, with the learning of the schema.
        learning_share: share of epsilon, and of delta, for ``learn``.
    """

    expected_batch_size: int
    num_steps: int
    epochs: float
    learning_rate: float
    weight_decay: float
    clip_norm: float
    average: float
    hidden_units: tuple[int, ...]
    delta: float
    learning_share: float

    def new_optimizer(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer of the model's parameters."""
        hidden = [p for layer in model.modules() if isinstance(layer, Perceptron) for p in layer.parameters()]
        decaying = [p for p in hidden if p.ndim > 1]
        if not (self.weight_decay and decaying):
            return Adam(model.parameters(), lr=self.learning_rate)
        ids = {id(p) for p in decaying}
        others = [p for p in model.parameters() if id(p) not in ids]
        groups = [{"params": decaying, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return AdamW(groups, lr=self.learning_rate)


def defaults(n: int, epsilon: float, delta: float | None = None, *, classes: float = math.inf) -> Defaults:
    """Returns settings for n training rows and a target epsilon: functions of these public numbers alone.

    Batches of ``7 √n`` rows (at most 8,192, and half of all), 300 steps (150 for epsilon up to 0.5, 600 beyond 4),
    AdamW with learning rate 0.01, gradients clipped to norm 5, one hidden layer of 64 units, and weights averaged over
    some 100 steps. A small clip norm pushes all rows alike, also those that are right already, and the probabilities
    end far from the truth: with norm 5 log losses were the smallest, at the same accuracy. With up to
    four classes weights decay by 0.6 (less below ``n ε = 3000``, where little is learnt): noise and few rows let them
    grow, and the probabilities become too sure. On digits and numbers decay made the score worse. The settings were
    chosen on Adult, scikit-learn's digits and made tables, all treated as public (``benchmarks/tables_tuning.py``). The
    learning of the schema may spend 0.3 of epsilon, alone; as its noise is Gaussian, too, the training loses only
    about a twentieth of epsilon by it, not three tenths.

    Args:
        n: number of training rows, 2 or more.
        epsilon: of the whole training, above 0.
        delta: by default the power of ten at or below ``1 / (10 n)``.
        classes: how many the target has; infinity for a number, or if it is unknown.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> found = defaults(39_000, epsilon=2.0)
        >>> found.expected_batch_size, found.num_steps, found.delta
        (1382, 300, 1e-06)
    """
    whole("defaults", at_least=2, n=n)
    positive("defaults", epsilon=epsilon)
    if delta is None:
        delta = 10.0 ** math.floor(math.log10(0.1 / n) + 1e-9)
    strictly_between("defaults", 0, 1, delta=delta)
    batch = max(1, min(round(BATCH_GROWTH * math.sqrt(n)), LARGEST_BATCH, n // 2))
    steps = next(steps for most, steps in STEPS if epsilon <= most)
    return Defaults(
        expected_batch_size=batch,
        num_steps=steps,
        epochs=steps * batch / n,
        learning_rate=0.01,
        weight_decay=LARGEST_DECAY * min(1.0, n * epsilon / FULL_DECAY) if classes <= FEW_CLASSES else 0.0,
        clip_norm=5.0,
        average=0.99,
        hidden_units=(64,),
        delta=delta,
        learning_share=0.3,
    )
