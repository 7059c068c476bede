# SPDX-License-Identifier: Apache-2.0
"""Joins the objects that `PrivacyEngine.make_private` returns to one `PrivateTraining`."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..sampling.examples import Examples
from ..support.validate import Refused
from ..training import PrivateTraining
from .catcher import CatcherHooks, LossCatcher
from .optimizers import DPOptimizer
from .schedulers import StepSchedulers
from .trainings import Trainings

MOST_EPOCHS = 10_000  # of a training without a given length


@dataclass
class _Pass:
    """A pass over the loader; only the latest may go on."""

    is_active: bool = False  # the loop is inside of it
    is_open: bool = False  # a batch waits for its step


class OpacusRun:
    """Trains one model: hands out batches, and makes a private step where the loop calls ``optimizer.step()``.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
        settings: arguments of `PrivateTraining`.
        examples: the data.
        steps_per_epoch: number of steps in a pass of the loader.
        max_grad_norm: bound on the gradient of an example.
        loss_reduction: "mean" or "sum".
        batch_first: whether positions lie behind the batch where a criterion gets both in one dimension.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Examples,
        settings: Mapping[str, Any],
        *,
        steps_per_epoch: int,
        max_grad_norm: float,
        loss_reduction: str,
        batch_first: bool,
    ):
        self.steps_per_epoch, self.loss_reduction, self._batch_first = steps_per_epoch, loss_reduction, batch_first
        self._catcher = LossCatcher(loss_reduction)
        self._pass = _Pass()  # the latest
        self.name = uuid.uuid4().hex  # in checkpoints
        self.private_optimizer = DPOptimizer(optimizer, self)
        self._schedulers = StepSchedulers(optimizer, self.private_optimizer)
        hooks = CatcherHooks(self._catcher)
        self.trainings = Trainings(model, optimizer, examples, settings, max_grad_norm, hooks)
        self._microbatch_size = self.training.settings.performance.microbatch_size  # where a loader has no limit
        if loss_reduction == "sum":
            optimizer.register_step_pre_hook(self._undo_division)

    @property
    def training(self) -> PrivateTraining:
        """Returns the training that makes the next step."""
        return self.trainings.present

    def _undo_division(self, *_: Any) -> None:
        """Multiplies the private gradient by the divisor, as the loss is a sum."""
        if not self._pass.is_active:  # the user goes on without privacy
            return
        for group in self.trainings.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.training.settings.expected_batch_size)

    def batches(self, microbatch_size: int | None) -> Iterator[Any]:
        """Yields the (micro)batches of one pass: ``steps_per_epoch`` steps, with their rehearsals."""
        self._pass = this_pass = _Pass()
        self._schedulers.forget()
        self._catcher.close()
        performance = self.training.settings.performance
        size = self._microbatch_size if microbatch_size is None else microbatch_size
        if size != performance.microbatch_size:
            self.trainings.change(performance=replace(performance, microbatch_size=size))
        training, made = self.training, 0
        self._schedulers.find()
        steps = training.steps()
        try:
            this_pass.is_active = True
            for batches in steps:
                for batch in batches:
                    this_pass.is_open = True
                    self._schedulers.begin(self.training.step_count)
                    self._catcher.open()
                    try:
                        yield batch
                    finally:
                        if self._pass is this_pass:
                            self._catcher.close()
                    if self._pass is not this_pass:
                        raise Refused("PrivacyEngine: a newer pass over the private loader has begun since this one.")
                    self._check_answered("the loop went on to the next batch")
                    self._schedulers.end(self.training.step_count)
                made += 1
                if made == self.steps_per_epoch:
                    return
        finally:
            if self._pass is this_pass:
                this_pass.is_open = this_pass.is_active = False
                self._catcher.forget()
            steps.close()
        if not made:
            raise Refused(
                f"PrivacyEngine: all {training.step_count} steps are made that the privacy budget was planned for; "
                "another pass over the loader would exceed it. Give make_private more epochs. To evaluate on the "
                "training data, make a DataLoader of loader.dataset."
            )

    def _check_answered(self, what: str) -> None:
        if self._pass.is_open:
            raise Refused(
                f"PrivacyEngine: {what} without optimizer.step(). Every batch of the private loader needs "
                "loss.backward() and optimizer.step(): gradients are not accumulated over batches (raise the loader's "
                "batch_size, and use BatchMemoryManager). To evaluate on the training data, make a DataLoader of "
                "loader.dataset."
            )

    def step(self) -> None:
        """Makes the step of the batch on which the loop has called ``loss.backward()``, or compares a rehearsal."""
        loss = self._catcher.backward_loss
        if loss is None or not self._pass.is_open:
            raise Refused(
                "DPOptimizer.step() was called without loss.backward() on a batch of the private loader. Call the two "
                "once for every batch that the loader returned by make_private yields."
            )
        self._catcher.close()
        n, verified = self.training.num_in_batch, self.trainings.examples.assume_independent is None
        with torch.enable_grad():
            losses = loss.of_examples(n, batch_first=self._batch_first, verified=verified)
            self._catcher.forget()
            self.training.step(losses)
        self._pass.is_open = False


class PrivateLoader:
    """Yields the batches of a private training, and their rehearsals; a pass makes ``len(loader)`` steps.

    Takes the place of Opacus' ``DPDataLoader``. Batches are Poisson samples, so their sizes differ. Empty ones are made
    without the loop. The first steps, and few later ones, come with rehearsals: further batches for which
    ``optimizer.step()`` compares and releases nothing.

    Args:
        run: makes the steps.
        data_loader: the user's loader, of which ``dataset``, ``collate_fn`` and the number of workers are kept.
        microbatch_size: largest number of examples in a batch; None for no limit.
    """

    def __init__(self, run: OpacusRun, data_loader: Any, microbatch_size: int | None = None):
        self.run, self.data_loader, self.microbatch_size = run, data_loader, microbatch_size
        self.dataset, self.collate_fn = data_loader.dataset, data_loader.collate_fn
        self.num_workers, self.batch_size = data_loader.num_workers, data_loader.batch_size
        self.sample_rate = run.training.settings.sampling_probability

    def __len__(self) -> int:
        """Returns the number of steps in a pass; with a limit, the number of batches to expect."""
        steps = self.run.steps_per_epoch
        if self.microbatch_size is None:
            return steps
        return max(steps, math.ceil(steps * self.run.training.settings.expected_batch_size / self.microbatch_size))

    def __iter__(self) -> Iterator[Any]:
        return self.run.batches(self.microbatch_size)
