# SPDX-License-Identifier: Apache-2.0
"""Adds up the losses of a training's batches for its metrics, without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..runs.metrics import Log
from ..support.ranks import Ranks


class Losses:
    """Adds up the losses of one rank: of the step in progress, and of the steps since the last row of the metrics.

    Args:
        log: gets the sums.
        ranks: processes of the training; the first one has the sums of all.
    """

    def __init__(self, log: Log, ranks: Ranks):
        self.log, self._ranks = log, ranks
        self._drawn = 0  # examples of the step in progress
        self._sums: Tensor | None = None  # and the number of finite losses with their sum; secret
        self._since_row: Tensor | None = None  # the same of the steps since they were read last

    def begin_step(self) -> None:
        """Forgets the losses of a step that was not made."""
        self._drawn, self._sums = 0, None

    def add(self, losses: Tensor) -> None:
        """Adds the losses (n, views) of a (micro)batch."""
        losses = losses.detach().mean(1).double()
        finite = losses.isfinite()
        sums = torch.stack([finite.sum().double(), torch.where(finite, losses, 0).sum()])
        self._drawn += losses.numel()
        self._sums = sums if self._sums is None else self._sums + sums

    def end_step(self) -> None:
        """Counts the losses of the step that was made."""
        if self._sums is not None:
            self._since_row = self._sums if self._since_row is None else self._since_row + self._sums
        self.log.add_sums(self._drawn, 0, 0.0)
        self.begin_step()

    def read(self) -> Log:
        """Returns the log with all losses of this rank so far; it waits for a GPU."""
        if self._since_row is not None:
            count, total = self._since_row.tolist()
            self.log.add_sums(0, count, total)
            self._since_row = None
        return self.log

    def sum_ranks(self) -> None:
        """Adds up the losses since the last row over all ranks, which call it together; the first one keeps them."""
        log = self.read()
        sums = log.summed(self._ranks)
        log.take(sums) if self._ranks.is_first else log.forget()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with the losses in a state; without any, which older ones are, from here on."""
        self._since_row = None
        self.begin_step()
        self.log.load_state_dict(state or {})
        if not self._ranks.is_first:  # it has the sums
            self.log.forget()
