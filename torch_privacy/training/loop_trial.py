# SPDX-License-Identifier: Apache-2.0
"""Audits a training loop of any library from outside: hands it canaries, and tests the gradients that it releases."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..privacy.loop_audit import LoopAudit, judge
from ..support.validate import Refused, strictly_between, whole

LENGTH = 100.0  # of a canary's gradient, in units of the clip norm


@dataclass(frozen=True)
class LoopTrial:
    """One run that a loop is asked for: data set, model, loss and settings.

    Example i has a gradient along weight i alone, whatever the weights are, and so long that it is clipped: each entry
    of a release shows one example. There is so little noise that it shows, too. Can be pickled, for loops with
    processes of their own.

    Args:
        seed: for the loop's random numbers; differs between runs. A loop may ignore it.
        num_examples: n.
        num_steps: steps that the loop must make.
        sampling_probability: with which each example joins a step, independently.
        noise_multiplier: standard deviation of the noise over the clip norm.
        clip_norm: bound on the norm of an example's gradient.
    """

    seed: int
    num_examples: int = 64
    num_steps: int = 64
    sampling_probability: float = 0.5
    noise_multiplier: float = 0.02
    clip_norm: float = 1.0

    @property
    def expected_batch_size(self) -> int:
        return round(self.num_examples * self.sampling_probability)

    @property
    def dataset(self) -> TensorDataset:
        """Pairs (x, y): x (n,) with one entry that is not zero, and y, a sign that the loss needs."""
        return TensorDataset(LENGTH * self.clip_norm * torch.eye(self.num_examples), torch.ones(self.num_examples))

    def model(self) -> nn.Module:
        """Returns a new linear model, with one weight for each example."""
        model = nn.Linear(self.num_examples, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the loss of a batch: "mean", "sum" or "none", as torch's losses have it."""
        losses = outputs.squeeze(-1) * targets
        return {"mean": losses.mean, "sum": losses.sum}[reduction]() if reduction != "none" else losses


def audit_loop(
    loop: Callable[[LoopTrial], Iterable[Any]],
    *,
    runs: int = 2,
    significance: float = 1e-6,
    test_seed: int | None = None,
) -> LoopAudit:
    """Audits a loop of any library from outside: does it sample, clip, add noise and divide as it was asked to?

    The loop trains a linear model on canaries that never overlap, with little noise, so that its releases show who
    joined each step and what noise was added. Under the claim both have laws that are known exactly: Poisson sampling,
    and independent normal noise. Each test compares one aspect with its law.

    Args:
        loop: takes a `LoopTrial` and trains ``trial.model()`` on ``trial.dataset`` with its settings; returns the
            released gradient of each step, as the optimizer gets it: ``trial.num_steps`` tensors or arrays with n
            entries each. A constant factor does not matter.
        runs: how often the loop is called. From two on, numbers that are equal in all runs show, too.
        significance: probability of a false alarm, of all tests together.
        test_seed: fixes the seeds of the trials, for tests only.

    Returns:
        The `LoopAudit`.

    Guarantees:
        - A right loop is rejected with a probability of at most ``significance`` (each p-value is exact or too large,
          and multiplied by the number of tests).
        - Found with p < 1e-6: a loader that shuffles, two ranks with equal masks, a divisor by the real batch size, a
          sum without clipping, noise that is missing, too small or used twice.

    Raises:
        Refused: the loop returns something else, or its noise hides who joined.

    Example:
        >>> import torch
        >>> def loop(trial, shuffled=False):
        ...     generator, released = torch.Generator().manual_seed(trial.seed), []
        ...     for step in range(trial.num_steps):
        ...         joined = torch.rand(trial.num_examples, generator=generator) < trial.sampling_probability
        ...         noise = trial.noise_multiplier * torch.randn(trial.num_examples, generator=generator)
        ...         released.append((joined + noise) * trial.clip_norm / trial.expected_batch_size)
        ...     return released
        >>> audit_loop(loop).is_rejected
        False

    Source: Nasr et al. (2023), arXiv 2302.07956, for canaries with gradients that do not overlap; the tests are ours.
    """
    whole("audit_loop", runs=runs, at_least=1)
    strictly_between("audit_loop", 0, 1, significance=significance)
    first = secrets.randbits(31) if test_seed is None else test_seed
    trials = [LoopTrial(first + run) for run in range(runs)]
    releases = np.stack([_released(loop(trial), trial) for trial in trials])
    return judge(releases, trials[0].sampling_probability, trials[0].noise_multiplier, significance)


def _released(returned: Any, trial: LoopTrial) -> np.ndarray:
    """Returns the releases of a run as an array (T, n)."""
    expected = (trial.num_steps, trial.num_examples)
    try:
        steps = [torch.as_tensor(step).detach().cpu().double().flatten().numpy() for step in returned]
        releases = np.stack(steps)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Refused(
            f"audit_loop: the loop returned {type(returned).__name__}, which is not a list of gradients of one size "
            f"({error}). Return trial.num_steps = {expected[0]} tensors with {expected[1]} entries each."
        ) from None
    if releases.shape != expected or not np.isfinite(releases).all():
        raise Refused(
            f"audit_loop: the loop returned {releases.shape[0]} gradients with {releases.shape[1]} entries each, "
            f"{int((~np.isfinite(releases)).sum())} of them not finite; must be {expected[0]} with {expected[1]} "
            "finite ones. Return a copy of the weight's gradient of every step, after the noise was added."
        )
    return releases
