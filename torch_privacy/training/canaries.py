# SPDX-License-Identifier: Apache-2.0
"""Scores the canaries of an audited training, by their losses or by their parts in the releases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..mechanism import Mechanism, Recording, Summation
from ..sampling.canaries import WithCanaries
from ..support.validate import Refused

LENGTH = 1e4  # of a gradient canary, in units of the sensitivity: it is always clipped
UNLIMITED = 100.0  # memory budget: all rows are kept
NORMAL_QUARTILE = 0.6745
FEWEST_FOR_SPREAD = 50  # canaries, to estimate how much they disturb each other

Take = Callable[[Any, Tensor], None]


@dataclass
class Observed:
    """What an attacker with access to every release knows of m canaries after T steps, for a score of one's own.

    ``projections[t, i]`` is the product of release t, less the known sum of all other examples, with the direction of
    canary i, divided by the standard deviation of its noise: normal with variance 1 and mean ``signals[t, i]`` if
    canary i joined the step, else 0.
    """

    losses_before: Tensor | None = None  # (m,) losses of the canaries before the first step, in eval mode
    losses_after: Tensor | None = None  # (m,) the same, after the last step
    projections: Tensor | None = None  # (T, m)
    signals: Tensor | None = None  # (T, m)
    log_ratio: Tensor | None = None  # (m,) logarithm of the likelihood ratio, in against out, of all steps


@dataclass
class CanaryScores:
    """Observes the training on a data set with canaries.

    Args:
        data: the data set.
        by_losses: hands the canaries out before the first step and after the last, for their losses.
        by_releases: computes the canaries' directions before every step, and their products with its release.
        keeps_steps: keeps the products of every step, (T, m), not only their likelihood ratio.
    """

    data: WithCanaries
    by_losses: bool
    by_releases: bool
    keeps_steps: bool = False
    observed: Observed = field(default_factory=Observed)
    training: Any = None  # the one that trains on the data set

    def __post_init__(self) -> None:
        self._losses: list[tuple[int, Tensor]] = []
        self._rows: dict[tuple[int, str], Any] = {}  # first canary and group of parameters -> their Jacobian
        self._known: dict[str, Tensor] = {}  # sum of the step's examples that are no canaries
        self._entries: dict[str, Tensor] = {}  # (m,) each gradient canary's entry of a parameter
        self._steps: list[tuple[Tensor, Tensor]] = []
        if self.by_releases:
            self.observed.log_ratio = torch.zeros(self.data.num_canaries, dtype=torch.float64)

    @property
    def canaries(self) -> np.ndarray:
        """Returns the indices of the canaries in the data set."""
        return self.data.num_examples + np.arange(self.data.num_canaries)

    # Losses

    def take_losses(self, first: int, views: int) -> Take:
        """Returns the function that takes the losses of some canaries, the first of which has this number."""
        return lambda _, losses: self._losses.append((first, losses.detach().view(-1, views).mean(1).double().cpu()))

    def conclude_losses(self, *, after: bool) -> None:
        """Puts the losses taken so far together."""
        losses = torch.cat([part for _, part in sorted(self._losses, key=lambda pair: pair[0])])
        self._losses = []
        if after:
            self.observed.losses_after = losses
        else:
            self.observed.losses_before = losses

    # Releases

    def begin_step(self) -> None:
        """Forgets rows and sums of the last step."""
        self._rows, self._known = {}, {}

    def take_rows(self, first: int, mechanism: Mechanism, summation: Summation) -> Take:
        """Returns the function that keeps the rows of some canaries, the first of which has this number."""

        def take(recording: Recording, losses: Tensor) -> None:
            recording.clipped_sum(
                losses,
                mechanism.groups(list(recording.parameters)),
                None,
                merging=summation.merging,
                may_miss=recording.parameters,
                memory_budget=UNLIMITED,
                observe=lambda rows, group: self._rows.update({(first, group): rows}),
            )

        return take

    def take_known(self, mechanism: Mechanism, summation: Summation) -> Take:
        """Returns the function that adds the clipped sum of examples that are no canaries to what is known."""

        def take(recording: Recording, losses: Tensor) -> None:
            sums = recording.clipped_sum(
                losses,
                mechanism.groups(list(recording.parameters)),
                summation,
                merging=summation.merging,
                may_miss=recording.parameters,
            )
            self.know(sums)

        return take

    def know(self, sums: Mapping[str, Tensor]) -> None:
        """Adds a sum over examples that are no canaries to what the attacker knows of the step."""
        for name, total in sums.items():
            self._known[name] = self._known[name] + total if name in self._known else total.clone()

    def note_release(
        self,
        release: Mapping[str, Tensor],
        stddevs: Mapping[str, float],
        summation: Callable[[int], Summation],
        sampling_probability: float,
    ) -> None:
        """Compares a release with the directions of the canaries, and adds what it shows to the log-ratio.

        The likelihood ratio of a step is that of a normal variable with mean 0 against the mixture of the means 0 and
        μ with weights 1 - q and q. For records that disturb each other, the variance is that seen among them.
        """
        unknown = {name: total - self._known[name] if name in self._known else total for name, total in release.items()}
        products = torch.zeros(self.data.num_canaries, dtype=torch.float64)
        squares = torch.zeros_like(products)
        for (first, group), rows in self._rows.items():
            size = rows.num_examples
            along, square = summation(size).responses(rows, group, unknown, stddevs)
            products[first : first + size] += along.double().cpu()
            squares[first : first + size] += square.double().cpu()
        signals = squares.sqrt()
        projections = torch.where(signals > 0, products / signals, 0)
        variance = self._variance(projections[signals > 0])
        q = sampling_probability
        exponent = (projections * signals - squares / 2) / variance
        ratio = torch.logaddexp(torch.tensor(np.log1p(-q) if q < 1 else -np.inf), np.log(q) + exponent)
        assert self.observed.log_ratio is not None
        self.observed.log_ratio += torch.where(signals > 0, ratio, 0)
        if self.keeps_steps:
            self._steps.append((projections.float(), signals.float()))
        self.begin_step()

    def _variance(self, projections: Tensor) -> float:
        """Returns the variance of projections with noise of variance 1, which other canaries may disturb."""
        if not self.data.are_records or len(projections) < FEWEST_FOR_SPREAD:
            return 1.0
        deviation = (projections - projections.median()).abs().median() / NORMAL_QUARTILE
        return max(1.0, float(deviation) ** 2)

    def conclude(self) -> Observed:
        """Returns what was observed in the whole training."""
        if self._steps:
            self.observed.projections, self.observed.signals = (
                torch.stack(list(part)) for part in zip(*self._steps, strict=True)
            )
        return self.observed

    # Gradient canaries

    def gradient_losses(
        self, tape: Recording, parameters: Mapping[str, Tensor], chosen: Tensor, length: float
    ) -> Tensor:
        """Returns losses with the gradients of the chosen gradient canaries, recorded on the tape."""
        entries = {name: part[chosen] for name, part in self._entries_of(parameters).items()}
        with torch.enable_grad(), tape:
            values = [F.embedding(part, parameters[name].reshape(-1, 1)).squeeze(1) for name, part in entries.items()]
            return length * torch.stack(values).sum(0)

    def _entries_of(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._entries:
            return self._entries
        m, generator = self.data.num_canaries, torch.Generator().manual_seed(0)
        large = [name for name, p in parameters.items() if p.numel() >= m]
        if large:
            self._entries = {
                name: torch.randperm(parameters[name].numel(), generator=generator)[:m].to(parameters[name].device)
                for name in large
            }
            return self._entries
        total = sum(p.numel() for p in parameters.values())
        raise Refused(
            f"tp.audit: GradientCanaries({m}) need a trained parameter with {m} entries, one for each; the largest has "
            f"{max((p.numel() for p in parameters.values()), default=0)} of {total} in all. Take fewer canaries."
        )
