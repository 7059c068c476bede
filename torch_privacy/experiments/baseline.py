# SPDX-License-Identifier: Apache-2.0
"""Trains the network of a task without privacy, to compare."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from torch_privacy.data.dataset import random_split
from torch_privacy.experiments.fitting import (
    length,
    losses_and_scores,
    new_average,
    new_parts,
    test_score,
    wrapped_for_ranks,
)
from torch_privacy.experiments.task import Settings, Task
from torch_privacy.runs.metrics import Log
from torch_privacy.sampling.batches import Batches, split
from torch_privacy.support.ranks import Ranks


def steps(task: Task, settings: Settings, ranks: Ranks, log: Log) -> Iterator[tuple[int, nn.Module | None]]:
    """Trains for as many steps as the log plans on shuffled batches, without clipping and noise.

    Yields the number of every step, and at the end of an epoch the network to score. If the task holds out a part of
    the training data, no step sees it, and this network is the one with the best score on it so far: early stopping.
    """
    if ranks.rank:
        torch.manual_seed(settings.seed + ranks.rank)  # other dropout masks for other examples
    own = replace(task, new_optimizer=task.new_baseline_optimizer or task.new_optimizer)
    model, optimizer, scheduler = new_parts(own, log.num_steps)
    average, wrapped = new_average(task, model, optimizer), wrapped_for_ranks(model)
    train, held_out = _data(task, settings)
    best = BestEpoch(replace(own, test=held_out)) if held_out is not None else None
    batches = shuffled_batches(train, settings, ranks)
    for step, (batch, weight) in zip(range(1, log.num_steps + 1), batches, strict=False):
        losses, scores = losses_and_scores(own, wrapped, batch)
        optimizer.zero_grad()
        (losses.mean() * weight).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        log.add(losses, scores)
        if not log.is_due(step):
            yield step, None
            continue
        scored = model if average is None else average.model
        yield step, scored if best is None else best.of(scored)


@dataclass
class BestEpoch:
    """Keeps a copy of the network with the best score so far on ``task.test``, here a part of the training data."""

    task: Task
    score: float = math.nan
    model: nn.Module | None = None

    def of(self, model: nn.Module) -> nn.Module:
        """Returns the best of all networks seen, this one included; the earlier one if scores are equal."""
        score = test_score(self.task, model)
        is_better = score > self.score if self.task.score.measure.larger_is_better else score < self.score
        if self.model is None or is_better or math.isnan(self.score):
            self.score, self.model = score, deepcopy(model)
        return self.model


def _data(task: Task, settings: Settings) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Returns what the baseline trains on, and the part of the training data that picks its best epoch, if any."""
    if not task.baseline_held_out:
        return task.train, None
    parts = random_split(length(task.train), test_fraction=task.baseline_held_out, seed=settings.seed)
    train, held_out = (Subset(task.train, rows.tolist()) for rows in parts)
    return train, held_out


def shuffled_batches(train: Dataset[Any], settings: Settings, ranks: Ranks) -> Iterator[tuple[Any, float]]:
    """Yields this rank's part of shuffled batches, epoch after epoch, without end, and the weight of its mean loss.

    The mean over the ranks of these means, each times its weight, is that over the batch.
    """
    order, batches = np.random.default_rng(settings.seed), Batches(train, None, 0)
    n, (rank, size) = length(train), (ranks.rank, ranks.size)
    while True:
        whole = split(order.permutation(n), settings.expected_batch_size)
        # A batch smaller than the number of ranks is computed by all of them.
        parts = [indices[rank::size] if len(indices) >= size else indices for indices in whole]
        weights = [
            len(own) * size / len(indices) if len(indices) >= size else 1.0
            for own, indices in zip(parts, whole, strict=True)
        ]
        yield from zip(batches.plain(parts), weights, strict=True)
