# SPDX-License-Identifier: Apache-2.0
"""Trains the network of a generator with `PrivateTraining`, and keeps its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from ... import privacy
from ...mechanisms.clipping import Flat
from ...runs.folder import RunFolder
from ...sampling.examples import Examples
from ...support import random_state
from ...training import MovingAverage, PrivateTraining
from ...training.sampling import Poisson
from ..defaults import Defaults
from .cells import Codes, ColumnGrid
from .network import RowNetwork

STEPS_BETWEEN = 25  # checkpoints


class NetworkTraining:
    """The private training of a row network.

    Args:
        codes: int64 (n, k): the rows.
        grid: the values of each column.
        order: of the columns, in the network.
        found: settings of the training.
        seed: of the first weights.
        noise_multiplier, delta: of the training.
        folder: with the ledger of the run; None to train in memory.
        prior: releases of the schema's learning.
        owners: arguments of `Examples`, where persons are protected.
        budget: of the data, in which the run has its reservation.
        data: takes the place of the rows, with canaries in an audit.
    """

    def __init__(
        self,
        codes: Codes,
        grid: ColumnGrid,
        order: Sequence[int],
        found: Defaults,
        *,
        seed: int,
        noise_multiplier: float,
        folder: RunFolder | None = None,
        prior: Sequence[privacy.Release] = (),
        owners: Mapping[str, Any] | None = None,
        budget: privacy.DataBudget | None = None,
        data: Any = None,
    ):
        with random_state.seeded(seed):
            self.network = RowNetwork(grid.sizes, order, grid.rare).float()
        self._optimizer = found.new_optimizer(self.network)
        rows = TensorDataset(torch.from_numpy(codes))
        self.training = PrivateTraining(
            self.network,
            self._optimizer,
            Examples(rows, budget=budget, **(owners or {})) if data is None else data,
            expected_batch_size=found.expected_batch_size,
            num_steps=found.num_steps,
            sampling=Poisson(),
            clipping=Flat(found.clip_norm),
            noise_multiplier=noise_multiplier,
            delta=found.delta,
            prior_releases=prior,
            run_folder=folder,
        )
        self._average = MovingAverage(self.network, self._optimizer, found.average)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Trains to the end; yields the number of steps made, and that of all."""
        for batches in self.training.steps():
            for (codes,) in batches:
                self.training.step(self.network(codes))
            yield self.training.step_count, self.training.settings.num_steps

    @property
    def model(self) -> Any:
        """Returns the `RowNetwork` with averaged weights."""
        return self._average.model.eval()

    def state_dict(self) -> dict[str, Any]:
        """Returns what is needed to go on; it is secret."""
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {"training": self.training.state_dict(), "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
        self.training.load_state_dict(state["training"])
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])

    def _parts(self) -> dict[str, Any]:
        return {"model": self.network, "optimizer": self._optimizer, "average": self._average}
