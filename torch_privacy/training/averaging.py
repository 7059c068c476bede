# SPDX-License-Identifier: Apache-2.0
"""Averages a model's weights over the steps of a training, which reduces noise at no privacy cost."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..support.gathered_weights import sharded_modules
from ..support.validate import Refused, strictly_between
from .placement import is_held, local_of, reshard, shard_of
from .saved_model import without_wrapper
from .weights import lent, moves_nothing

WHERE = "MovingAverage"


class MovingAverage:
    """Exponential moving average of a model's weights: after step t = 0, 1, ... ``a = d a + (1 - d) w``.

    In early steps the decay is smaller, ``d = min(decay, (1 + t) / (10 + t))``, so that the average forgets the first
    weights.

    Args:
        model: the model with the weights to average. Of one wrapped in ``DistributedDataParallel`` every rank averages
            all weights; of one to which ``fully_shard`` was applied, its own shards, without communication.
        optimizer: the average is updated after each of its steps.
        decay: weight of the past, in (0, 1); averages over about ``1 / (1 - decay)`` steps.

    Guarantees:
        - With `PrivateTraining` the average is a function of the released gradients alone, so the same epsilon covers
          it: it is updated in every step, including those of empty batches, which the training loop does not see.
        - Each number of the average is the same bit for bit on one process and on any number of ranks, if the weights
          were the same after every step.

    Edge cases:
        A step with learning rate zero and gradients zero, as ``torch.distributed.checkpoint`` makes one to see the
        state of an optimizer, is not counted.

    Raises:
        ValueError: a decay out of range.
        Refused: the model is sharded, and a training computes with its whole weights: make the average before the loop.

    Source: De, Berrada, Hayes, Smith & Balle (2022), arXiv:2204.13650, section 3.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> average = MovingAverage(model, optimizer, decay=0.99)
        >>> model(torch.ones(4, 1)).sum().backward()
        >>> optimizer.step()
        >>> average.step_count
        1
        >>> with average.applied():  # also for sharded models
        ...     averaged = model.weight.clone()
        >>> torch.equal(averaged, average.model.weight)
        True
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, decay: float = 0.999):
        strictly_between(WHERE, 0, 1, decay=decay)
        self.decay, self.step_count = decay, 0
        self._trained = trained = without_wrapper(model)
        self._model: nn.Module | None = None
        self._is_applied = False
        if sharded_modules(trained):
            self._check_between_steps()
            reshard(trained)
            self._averages = {name: p.detach().clone() for name, p in trained.named_parameters()}
        else:
            self._model = copy.deepcopy(trained).requires_grad_(False)
            self._averages = {name: p.detach() for name, p in self._model.named_parameters()}
        optimizer.register_step_pre_hook(self._check_not_applied)
        optimizer.register_step_post_hook(self._update)

    @property
    def model(self) -> nn.Module:
        """Returns a copy of the model with the averaged weights, not to be trained; its buffers are the latest ones.

        Raises:
            Refused: the model is sharded, so that it cannot be copied; use `applied`.
        """
        if self._model is None:
            raise Refused(
                f"{WHERE}.model: the model is sharded by fully_shard, and cannot be copied. Evaluate the model itself "
                "inside of `with average.applied():`, on all ranks."
            )
        return self._model

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the trained model its averaged weights within the ``with`` block, and its own ones back at the end.

        Evaluate or save the model there. It costs the memory of one more copy of the weights (of the own shards), and
        no communication; but if the model is sharded, its forward does communicate, so that every rank must run it.

        Raises:
            Refused: a training's step is in progress, or the average is applied already; within the block, a step of
                the optimizer or of the training.
        """
        self._check_between_steps()
        if self._is_applied:
            raise Refused(f"{WHERE}.applied: the averaged weights are applied already. Leave that block first.")
        parameters = self._parameters()
        own = {name: local_of(p).detach().clone() for name, p in parameters.items()}
        with lent(parameters.values()):
            self._is_applied = True
            try:
                self._write(self._averages)
                yield
            finally:
                self._write(own)
                self._is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for ``load_state_dict``: shards, if the model is sharded.

        It has the same names for one process and for ranks, so that ``torch.distributed.checkpoint`` loads it with
        another number of ranks, too.
        """
        if self._model is not None:
            return {"step_count": self.step_count, "model": self._model.state_dict()}
        averages = {id(p): self._averages[name] for name, p in self._parameters().items()}
        tensors = self._trained.state_dict(keep_vars=True)
        return {"step_count": self.step_count, "model": {key: averages.get(id(t), t) for key, t in tensors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned, of this model or of one with other shards or none.

        Raises:
            Refused: parameters are missing, or have another shape.
        """
        if self._model is not None:
            self._model.load_state_dict(state["model"])
        else:
            self._load_shards(state["model"])
        self.step_count = state["step_count"]

    @torch.no_grad()
    def _load_shards(self, tensors: Mapping[str, Tensor]) -> None:
        names = {id(p): name for name, p in self._parameters().items()}
        own = {key: names[id(t)] for key, t in self._trained.state_dict(keep_vars=True).items() if id(t) in names}
        wrong = [key for key, name in own.items() if key not in tensors or tensors[key].shape != self._shape(name)]
        if wrong:
            raise Refused(
                f"{WHERE}.load_state_dict: {wrong[0]!r} is missing or has another shape, as are {len(wrong) - 1} more. "
                "Load a state of the same model."
            )
        for key, name in own.items():
            local_of(self._averages[name]).copy_(shard_of(tensors[key], self._averages[name]))

    def _shape(self, name: str) -> torch.Size:
        return self._averages[name].shape

    def _parameters(self) -> dict[str, Tensor]:
        """Returns the trained parameters, as shards if the model is sharded."""
        reshard(self._trained)
        return dict(self._trained.named_parameters())

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self._parameters().items():
            local_of(p).copy_(local_of(values[name]))

    def _check_between_steps(self) -> None:
        if is_held(self._trained):
            raise Refused(
                f"{WHERE}: a step of the training is in progress. Make the average before the loop, and apply it "
                "after the loop or where training.step(losses) has returned True."
            )

    def _check_not_applied(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_applied and not moves_nothing(optimizer):
            raise Refused(
                f"{WHERE}.applied: optimizer.step() was called while the averaged weights are applied, so that the "
                "update would be lost. Leave the `with` block first."
            )

    @torch.no_grad()
    def _update(self, optimizer: Optimizer, *_: Any) -> None:
        if moves_nothing(optimizer):
            return
        weight = 1 - min(self.decay, (1 + self.step_count) / (10 + self.step_count))
        for name, current in self._parameters().items():
            local_of(self._averages[name]).lerp_(local_of(current), weight)
        if self._model is not None:
            for copied, current in zip(self._model.buffers(), self._trained.buffers(), strict=True):
                copied.copy_(current)
        self.step_count += 1
